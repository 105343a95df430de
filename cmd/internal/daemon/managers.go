// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/pb"
)

// Managers is a connection to one of several volume managers: the leader, as far as known. If a
// call gets no answer, or is answered with the leader's address, it is repeated at another manager;
// every call can be repeated. While managers answer and none of them leads, that goes on for some
// seconds. If a stream ends that way, the next stream goes to another manager.
// With one manager it is a plain connection. Its methods may be called concurrently.
type Managers struct {
	open     func(address string) (*grpc.ClientConn, error)
	patience time.Duration // with an election

	mu      sync.Mutex
	conns   []*grpc.ClientConn // in the order of the list, followed by leaders that were not in it
	current int
}

// Dial opens connections to volume managers; addresses is separated by commas. Connections are made
// in the background and retried for ever, with a back-off of 0.2 to 2 s.
func Dial(addresses string, files TLSFiles, options ...grpc.DialOption) (*Managers, error) {
	m := &Managers{patience: electionPatience, open: func(address string) (*grpc.ClientConn, error) { return dial(address, files, options) }}
	for address := range strings.SplitSeq(addresses, ",") {
		conn, err := m.open(strings.TrimSpace(address))
		if err != nil {
			return nil, errors.Join(err, m.Close())
		}
		m.conns = append(m.conns, conn)
	}
	return m, nil
}

// Close closes the connections.
func (m *Managers) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all error
	for _, c := range m.conns {
		all = errors.Join(all, c.Close())
	}
	return all
}

func (m *Managers) now() *grpc.ClientConn {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.conns[m.current]
}

// Next switches to another manager. A caller uses it when the present manager must not be obeyed.
func (m *Managers) Next() { m.leave(m.now(), "") }

// leave switches away from a manager, unless that has happened already: to the leader if it is
// known, else to the next one.
func (m *Managers) leave(from *grpc.ClientConn, leader string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.conns[m.current] != from {
		return
	}
	m.current = (m.current + 1) % len(m.conns)
	if leader == "" {
		return
	}
	at := slices.IndexFunc(m.conns, func(c *grpc.ClientConn) bool { return c.Target() == leader })
	if at < 0 && len(m.conns) < managersMost {
		if conn, err := m.open(leader); err == nil {
			at, m.conns = len(m.conns), append(m.conns, conn)
		}
	}
	if at >= 0 {
		m.current = at
	}
}

// managersMost bounds the number of managers, since leaders outside the list are added to it.
const managersMost = 16

// elsewhere switches to another manager if err shows that this one is of no use, and reports
// whether it did.
func (m *Managers) elsewhere(from *grpc.ClientConn, err error) bool {
	leader, notLeader := pb.NotLeader(err)
	s := status.Convert(err)
	silent := s.Code() == codes.DeadlineExceeded || s.Code() == codes.Unavailable && len(s.Details()) == 0
	_, foreign := pb.OtherCluster(err)
	if err == nil || !notLeader && !silent && !foreign && !pb.OutcomeUnknown(err) {
		return false
	}
	m.leave(from, leader)
	return m.now() != from
}

// Invoke implements [grpc.ClientConnInterface].
func (m *Managers) Invoke(ctx context.Context, method string, args, reply any, options ...grpc.CallOption) error {
	until := time.Now().Add(m.patience)
	electing := false
	for tried := 1; ; tried++ {
		conn := m.now()
		err := conn.Invoke(ctx, method, args, reply, options...)
		if !m.elsewhere(conn, err) || ctx.Err() != nil {
			return err
		}
		_, notLeader := pb.NotLeader(err)
		electing = electing || notLeader
		if tried <= m.count() {
			continue
		}
		if !electing || time.Now().After(until) {
			return err
		}
		tried = 0
		select {
		case <-ctx.Done():
			return err
		case <-time.After(electionPause):
		}
	}
}

// electionPatience is how long a call is repeated while managers answer and none of them leads:
// they notice within two seconds that a leader is gone, and name it until then.
const (
	electionPatience = 5 * time.Second
	electionPause    = 100 * time.Millisecond
)

func (m *Managers) count() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.conns)
}

// NewStream implements [grpc.ClientConnInterface].
func (m *Managers) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, options ...grpc.CallOption) (grpc.ClientStream, error) {
	conn := m.now()
	stream, err := conn.NewStream(ctx, desc, method, options...)
	if err != nil {
		m.elsewhere(conn, err)
		return nil, err
	}
	return &managersStream{stream, ctx, m, conn}, nil
}

// managersStream watches how a stream ends.
type managersStream struct {
	grpc.ClientStream
	ctx      context.Context //nolint:containedctx // the caller's; the stream's own ends with it
	managers *Managers
	conn     *grpc.ClientConn
}

// RecvMsg implements [grpc.ClientStream].
func (s *managersStream) RecvMsg(message any) error {
	err := s.ClientStream.RecvMsg(message)
	if err != nil && s.ctx.Err() == nil {
		s.managers.elsewhere(s.conn, err)
	}
	return err
}

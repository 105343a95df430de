// SPDX-License-Identifier: Apache-2.0

// Package managers finds the volume manager that leads, for agents and commands.
package managers

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

// Conn is a connection to one of several volume managers: the leader, as far as known. If a
// call gets no answer, or is answered with the leader's address, it is repeated at another manager;
// every call can be repeated. While managers answer and none of them leads, that goes on for some
// seconds. If a stream ends that way, the next stream goes to another manager.
// With one manager it is a plain connection. Its methods may be called concurrently.
type Conn struct {
	open     func(address string) (*grpc.ClientConn, error)
	patience time.Duration // with an election

	mu      sync.Mutex
	all     []manager // in the order of the list, followed by leaders that were not in it
	current int
	turn    int // the last one that was tried without having been named as the leader
}

type manager struct {
	address string
	*grpc.ClientConn
}

// Connect connects to volume managers; addresses is separated by commas. Open opens a connection to
// one of them, and does not wait for it.
func Connect(addresses string, open func(address string) (*grpc.ClientConn, error)) (*Conn, error) {
	m := &Conn{patience: electionPatience, open: open}
	for address := range strings.SplitSeq(addresses, ",") {
		address = strings.TrimSpace(address)
		conn, err := m.open(address)
		if err != nil {
			return nil, errors.Join(err, m.Close())
		}
		m.all = append(m.all, manager{address, conn})
	}
	return m, nil
}

// Close closes the connections.
func (m *Conn) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	var all error
	for _, one := range m.all {
		all = errors.Join(all, one.Close())
	}
	return all
}

func (m *Conn) now() *grpc.ClientConn {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.all[m.current].ClientConn
}

// Next switches to another manager. A caller uses it when the present manager must not be obeyed.
func (m *Conn) Next() { m.leave(m.now(), "") }

// leave switches away from a manager, unless that has happened already: to the leader if it is
// known, else to the next one. A leader that is named but not reached does not change whose turn is next: its
// address may be one that only other machines reach, and the list may have it under another one.
func (m *Conn) leave(from *grpc.ClientConn, leader string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.all[m.current].ClientConn != from {
		return
	}
	if at := m.knownLocked(leader); at >= 0 {
		m.current = at
		return
	}
	m.turn = (m.turn + 1) % len(m.all)
	if m.turn == m.current {
		m.turn = (m.turn + 1) % len(m.all)
	}
	m.current = m.turn
}

// knownLocked is the place of a manager's address, which may be a new one; -1 if it cannot be used.
func (m *Conn) knownLocked(address string) int {
	at := slices.IndexFunc(m.all, func(one manager) bool { return one.address == address })
	if at >= 0 || address == "" || len(m.all) >= managersMost {
		return at
	}
	conn, err := m.open(address)
	if err != nil {
		return -1
	}
	m.all = append(m.all, manager{address, conn})
	return len(m.all) - 1
}

// managersMost bounds the number of managers, since leaders outside the list are added to it.
const managersMost = 16

// elsewhere switches to another manager if err shows that this one is of no use, and reports
// whether it did.
func (m *Conn) elsewhere(from *grpc.ClientConn, err error) bool {
	leader, notLeader := pb.NotLeader(err)
	s := status.Convert(err)
	silent := s.Code() == codes.DeadlineExceeded || s.Code() == codes.Unavailable && len(s.Details()) == 0
	_, foreign := pb.OtherCluster(err)
	if err == nil || !notLeader && !silent && !foreign && !stranger(s) && !pb.OutcomeUnknown(err) {
		return false
	}
	m.leave(from, leader)
	return m.now() != from
}

// stranger reports whether not a manager has answered but what is on the way to one, such as a proxy. gRPC makes
// codes of the HTTP status of such an answer that managers use, too (google.golang.org/grpc/internal/transport).
func stranger(s *status.Status) bool {
	return strings.HasPrefix(s.Message(), "unexpected HTTP status code received from server")
}

// Invoke implements [grpc.ClientConnInterface].
func (m *Conn) Invoke(ctx context.Context, method string, args, reply any, options ...grpc.CallOption) error {
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

func (m *Conn) count() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.all)
}

// NewStream implements [grpc.ClientConnInterface].
func (m *Conn) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, options ...grpc.CallOption) (grpc.ClientStream, error) {
	conn := m.now()
	opened, err := conn.NewStream(ctx, desc, method, options...)
	if err != nil {
		m.elsewhere(conn, err)
		return nil, err
	}
	return &stream{opened, ctx, m, conn}, nil
}

// stream watches how a stream ends.
type stream struct {
	grpc.ClientStream
	ctx      context.Context //nolint:containedctx // the caller's; the stream's own ends with it
	managers *Conn
	conn     *grpc.ClientConn
}

// RecvMsg implements [grpc.ClientStream].
func (s *stream) RecvMsg(message any) error {
	err := s.ClientStream.RecvMsg(message)
	if err != nil && s.ctx.Err() == nil {
		s.managers.elsewhere(s.conn, err)
	}
	return err
}

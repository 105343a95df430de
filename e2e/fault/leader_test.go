// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/pb"
)

// leading is a connection to the manager that leads, as programs have it: package daemon, which
// is internal to cmd, decides by the same answers.
type leading struct {
	addresses []string
	conns     []*grpc.ClientConn

	mu      sync.Mutex
	current int
}

// dialManager connects to the managers.
func (c *cluster) dialManager(at *machine, options ...grpc.DialOption) *leading {
	c.t.Helper()
	l := &leading{addresses: strings.Split(c.addresses, ",")}
	for _, address := range l.addresses {
		l.conns = append(l.conns, c.dialOne(at, address, options...))
	}
	return l
}

func (c *cluster) dialOne(at *machine, address string, options ...grpc.DialOption) *grpc.ClientConn {
	c.t.Helper()
	host, _, _ := strings.Cut(address, ":")
	conn, err := grpc.NewClient("passthrough:///"+address, append(options,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			conn, err := at.dial(ctx, host, address)
			if err != nil {
				return nil, err
			}
			conn.keepalive = true
			return conn, nil
		}),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: userTimeout, PermitWithoutStream: true}),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 200 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second},
			MinConnectTimeout: 3 * time.Second,
		}),
	)...)
	if err != nil {
		c.t.Fatalf("%v", err)
	}
	return conn
}

// Close closes the connections.
func (l *leading) Close() (err error) {
	for _, conn := range l.conns {
		err = errors.Join(err, conn.Close())
	}
	return err
}

func (l *leading) now() *grpc.ClientConn {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.conns[l.current]
}

// Next switches to another manager.
func (l *leading) Next() { l.leave(l.now(), "") }

func (l *leading) leave(from *grpc.ClientConn, leader string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.conns[l.current] != from {
		return
	}
	l.current = (l.current + 1) % len(l.conns)
	if at := slices.Index(l.addresses, leader); at >= 0 {
		l.current = at
	}
}

// elsewhere switches to another manager if err shows that this one is of no use, and reports
// whether it did.
func (l *leading) elsewhere(from *grpc.ClientConn, err error) bool {
	leader, notLeader := pb.NotLeader(err)
	s := status.Convert(err)
	silent := s.Code() == codes.DeadlineExceeded || s.Code() == codes.Unavailable && len(s.Details()) == 0
	_, foreign := pb.OtherCluster(err)
	if err == nil || !notLeader && !silent && !foreign && !pb.OutcomeUnknown(err) {
		return false
	}
	l.leave(from, leader)
	return l.now() != from
}

// Invoke implements [grpc.ClientConnInterface].
func (l *leading) Invoke(ctx context.Context, method string, args, reply any, options ...grpc.CallOption) error {
	until, electing := time.Now().Add(5*time.Second), false
	for tried := 1; ; tried++ {
		conn := l.now()
		err := conn.Invoke(ctx, method, args, reply, options...)
		if !l.elsewhere(conn, err) || ctx.Err() != nil {
			return err
		}
		_, notLeader := pb.NotLeader(err)
		electing = electing || notLeader
		if tried <= len(l.conns) {
			continue
		}
		if !electing || time.Now().After(until) {
			return err
		}
		tried = 0
		select {
		case <-ctx.Done():
			return err
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// NewStream implements [grpc.ClientConnInterface].
func (l *leading) NewStream(ctx context.Context, desc *grpc.StreamDesc, method string, options ...grpc.CallOption) (grpc.ClientStream, error) {
	conn := l.now()
	stream, err := conn.NewStream(ctx, desc, method, options...)
	if err != nil {
		l.elsewhere(conn, err)
		return nil, err
	}
	return &leadingStream{stream, ctx, l, conn}, nil
}

// leadingStream watches how a stream ends.
type leadingStream struct {
	grpc.ClientStream
	ctx  context.Context //nolint:containedctx // the caller's; the stream's own ends with it
	all  *leading
	conn *grpc.ClientConn
}

// RecvMsg implements [grpc.ClientStream].
func (s *leadingStream) RecvMsg(message any) error {
	err := s.ClientStream.RecvMsg(message)
	if err != nil && s.ctx.Err() == nil {
		s.all.elsewhere(s.conn, err)
	}
	return err
}

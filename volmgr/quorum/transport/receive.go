// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/quorum"
)

// receiving is either kind of stream.
type receiving interface {
	Context() context.Context
	Recv() (*pb.QuorumPart, error)
	SendHeader(metadata.MD) error
}

// acceptedKey is in the header of a stream that is not refused.
const acceptedKey = "weft-quorum-accepted"

// greet reads the first part of a stream, and refuses one that is not for this member.
func (t *Transport) greet(stream receiving) (self *Self, from quorum.ID, err error) {
	if self = t.current(); self == nil {
		return nil, 0, status.Error(codes.Unavailable, "this manager does not run yet, or stops")
	}
	first, err := stream.Recv()
	if err != nil {
		return nil, 0, err
	}
	hello := first.GetHello()
	from = quorum.ID(hello.GetFrom())
	name := t.cfg.Name(stream.Context())
	if err = self.check(hello, name); err == nil {
		err = self.admit(hello)
		if _, member := self.Members().Find(from); err == nil || member { // operators are told of one that is too old
			t.change(from, func(p *Peer) {
				p.Address, p.Name, p.Level, p.Version = hello.GetAddress(), name, block.SaidLevel(hello.GetLevel()), hello.GetVersion()
			})
		}
	}
	if err != nil {
		t.cfg.Log.Warn("another manager is refused", "member", from, "address", hello.GetAddress(), "err", status.Convert(err).Message())
		return nil, 0, err
	}
	return self, from, stream.SendHeader(metadata.Pairs(acceptedKey, "1"))
}

// check refuses a stream that is not for this member, or whose sender has proved another name than
// that of the member it says it is. A member that has just joined knows of no names.
func (s *Self) check(hello *pb.QuorumHello, name string) error {
	from := quorum.ID(hello.GetFrom())
	if got := hello.GetClusterId(); got != s.Cluster.String() {
		return status.Errorf(codes.FailedPrecondition, "this manager is of cluster %v, and not of %s", s.Cluster, got)
	}
	if got := quorum.ID(hello.GetTo()); got != s.ID {
		return status.Errorf(codes.FailedPrecondition, "this manager is member %v, and not %v", s.ID, got)
	}
	if from == 0 || from == s.ID {
		return status.Errorf(codes.FailedPrecondition, "member %v cannot be another manager", from)
	}
	known, _ := s.Members().Find(from)
	if name != "" && known.Name != "" && name != known.Name {
		return status.Errorf(codes.FailedPrecondition, "member %v is manager %s, and the certificate is that of manager %s", from, known.Name, name)
	}
	return nil
}

// admit refuses a member that does not know the cluster's level, since it could neither apply what is
// recorded nor lead, and one that was removed.
func (s *Self) admit(hello *pb.QuorumHello) error {
	from := quorum.ID(hello.GetFrom())
	if knows := block.SaidLevel(hello.GetLevel()); s.Agreed != nil && knows < s.Agreed() {
		return status.Errorf(codes.FailedPrecondition, "the cluster is at level %d, and member %v knows no level above %d: install the version that the other managers have", s.Agreed(), from, knows)
	}
	if _, member := s.Members().Find(from); !member && s.Leads() {
		return status.Errorf(codes.FailedPrecondition, "member %v was removed from the quorum: it can join again with an empty directory", from)
	}
	return nil
}

// read reads a message, which has to be from a member to this one.
func read(stream receiving, from, to quorum.ID) (m quorum.Message, err error) {
	var text []byte
	for more := true; more; {
		part, err := stream.Recv()
		if err != nil {
			return m, err
		}
		if len(text)+len(part.GetMessage()) > messageMost {
			return m, status.Errorf(codes.ResourceExhausted, "message of more than %d bytes", messageMost)
		}
		text, more = append(text, part.GetMessage()...), part.GetMore()
	}
	m, err = quorum.DecodeMessage(text)
	if err != nil {
		return m, status.Error(codes.InvalidArgument, err.Error())
	}
	if m.From() != from || m.To() != to {
		return m, status.Errorf(codes.InvalidArgument, "message from member %v to %v in a stream from %v to %v", m.From(), m.To(), from, to)
	}
	return m, nil
}

// Messages is part of the service.
func (t *Transport) Messages(stream grpc.ClientStreamingServer[pb.QuorumPart, pb.QuorumReceived]) error {
	self, from, err := t.greet(stream)
	if err != nil {
		return err
	}
	for {
		m, err := read(stream, from, self.ID)
		if errors.Is(err, io.EOF) {
			return stream.SendAndClose(&pb.QuorumReceived{})
		}
		if err != nil {
			return err
		}
		if _, snapshot := m.Snapshot(); snapshot {
			return status.Error(codes.InvalidArgument, "a snapshot among the messages")
		}
		t.heard(from)
		if err := self.To.Receive(stream.Context(), m, nil); err != nil {
			return status.Error(codes.Unavailable, err.Error())
		}
	}
}

func (t *Transport) heard(from quorum.ID) {
	t.change(from, func(p *Peer) { p.Heard = time.Now() })
}

// Snapshot is part of the service.
func (t *Transport) Snapshot(stream grpc.ClientStreamingServer[pb.QuorumPart, pb.QuorumReceived]) error {
	self, from, err := t.greet(stream)
	if err != nil {
		return err
	}
	m, err := read(stream, from, self.ID)
	if err != nil {
		return err
	}
	if _, snapshot := m.Snapshot(); !snapshot {
		return status.Error(codes.InvalidArgument, "the message brings no snapshot")
	}
	if !t.staging.TryLock() {
		return status.Error(codes.Unavailable, "another snapshot is being received")
	}
	defer t.staging.Unlock()
	t.heard(from)
	if err := self.To.Receive(stream.Context(), m, &content{stream: stream}); err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}
	return stream.SendAndClose(&pb.QuorumReceived{})
}

// content reads the content of a snapshot from its stream.
type content struct {
	stream receiving
	rest   []byte
}

// Read implements [io.Reader].
func (c *content) Read(p []byte) (int, error) {
	for len(c.rest) == 0 {
		part, err := c.stream.Recv()
		if err != nil {
			return 0, err
		}
		c.rest = part.GetContent()
	}
	n := copy(p, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

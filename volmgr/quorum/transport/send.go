// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/quorum"
	"weft.dev/weft/volmgr/quorum/member"
)

// link is the way to one peer.
type link struct {
	id        quorum.ID
	messages  chan quorum.Message
	snapshots chan member.Outgoing
	dropped   chan struct{} // of size 1: a message did not fit
	closed    chan struct{}
}

func newLink(id quorum.ID) *link {
	return &link{id, make(chan quorum.Message, queueMost), make(chan member.Outgoing, 1), make(chan struct{}, 1), make(chan struct{})}
}

// offer takes a message, unless there is no room. It is called with the transport's lock held.
func (l *link) offer(o member.Outgoing) bool {
	if o.Content != nil {
		select {
		case l.snapshots <- o:
			return true
		default:
			return false // the one that is under way is reported
		}
	}
	select {
	case l.messages <- o.Message:
		return true
	default:
	}
	select {
	case l.dropped <- struct{}{}:
	default:
	}
	return false
}

// close ends the goroutines of a link that is not in the transport's list any more.
func (l *link) close() {
	close(l.closed)
	for {
		select {
		case o := <-l.snapshots:
			lose(o)
		default:
			return
		}
	}
}

// sendMessages keeps a stream to a peer, until ctx ends or nothing was sent for long.
func (t *Transport) sendMessages(ctx context.Context, l *link) error {
	self := t.current()
	for pause := pauseFirst; self != nil; {
		taken, err := t.stream(ctx, self, l)
		if ctx.Err() != nil || errors.Is(err, errIdle) && t.retire(l) {
			return nil
		}
		if taken {
			pause = pauseFirst
		}
		if gone(self.Members(), l.id) {
			t.drop(l)
			return nil
		}
		t.problem(self, l.id, err)
		if self.To.Unreachable(ctx, l.id) != nil || !t.rest(ctx, l, pause) {
			return nil
		}
		pause = min(2*pause, pauseMost)
	}
	return nil
}

// errIdle ends a stream on which nothing was sent for long.
var errIdle = errors.New("nothing to send")

// retire removes a link that is not used, unless a message has come meanwhile.
func (t *Transport) retire(l *link) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(l.messages) > 0 || len(l.snapshots) > 0 || t.links[l.id] != l {
		return t.links[l.id] != l
	}
	delete(t.links, l.id)
	l.close()
	return true
}

// gone reports whether a member was removed. Who has just joined knows of no members at all.
func gone(members quorum.Members, id quorum.ID) bool {
	_, there := members.Find(id)
	return len(members) > 0 && !there
}

// drop removes a link, and what is known of its peer.
func (t *Transport) drop(l *link) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.links[l.id] == l {
		delete(t.links, l.id)
		delete(t.known, l.id)
		l.close()
	}
}

// rest waits, and then drops what has come meanwhile: Raft repeats what still matters.
func (t *Transport) rest(ctx context.Context, l *link, pause time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-l.closed:
		return false
	case <-time.After(pause):
	}
	for {
		select {
		case <-l.messages:
		default:
			return true
		}
	}
}

// problem remembers why messages to a peer are lost, and logs it once.
func (t *Transport) problem(self *Self, id quorum.ID, err error) {
	text := ""
	if err != nil && !errors.Is(err, errIdle) {
		text = cause(err)
	}
	was := t.change(id, func(p *Peer) { p.Problem = text })
	switch {
	case text == "" && was.Problem != "":
		t.cfg.Log.Info("manager answers again", "member", id)
	case text != was.Problem && (was.Problem == "" || status.Code(err) == codes.FailedPrecondition):
		t.cfg.Log.Warn("manager does not answer", "member", id, "address", t.address(self, id), "err", text)
	}
}

// cause strips what gRPC and Go put before the cause of a failed connection.
func cause(err error) string {
	text := status.Convert(err).Message()
	if status.Code(err) == codes.Unavailable && strings.Contains(text, "desc = ") {
		text = strings.Trim(text[strings.LastIndex(text, ": ")+2:], `"`)
	}
	return text
}

// stream sends messages to a peer until that fails. It reports whether the peer took them.
func (t *Transport) stream(ctx context.Context, self *Self, l *link) (taken bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	conn, err := t.dial(self, l.id)
	if err != nil {
		return false, err
	}
	defer conn.Close()
	stream, err := pb.NewQuorumClient(conn).Messages(ctx)
	if err == nil {
		err = t.greeted(stream, self, l.id)
	}
	if err != nil {
		return false, err
	}
	t.problem(self, l.id, nil)
	ended := make(chan error, 1)
	go func() { ended <- stream.RecvMsg(&pb.QuorumReceived{}) }()
	idle := time.NewTimer(idleMost)
	defer idle.Stop()
	for {
		select {
		case err := <-ended:
			return true, cmp.Or(err, errEnded)
		case <-idle.C:
			return true, errIdle
		case <-l.dropped:
			err = self.To.Unreachable(ctx, l.id)
		case m := <-l.messages:
			idle.Reset(idleMost)
			if err = sendMessage(stream, m); errors.Is(err, io.EOF) {
				err = cmp.Or(<-ended, errEnded)
			}
		}
		if err != nil {
			return true, err
		}
	}
}

// errEnded is for a stream that the peer has ended without an error.
var errEnded = errors.New("the manager has ended the stream")

// greeted says hello, and waits until the peer has accepted that.
func (t *Transport) greeted(stream grpc.ClientStreamingClient[pb.QuorumPart, pb.QuorumReceived], self *Self, to quorum.ID) error {
	hello := &pb.QuorumHello{
		ClusterId: self.Cluster.String(), From: uint64(self.ID), To: uint64(to), Address: t.cfg.Address,
		Level: uint32(self.Level), Version: self.Version,
	}
	if err := stream.Send(&pb.QuorumPart{Hello: hello}); err != nil {
		return refusal(stream, err)
	}
	if header, err := stream.Header(); err != nil || len(header.Get(acceptedKey)) == 0 {
		return cmp.Or(stream.RecvMsg(&pb.QuorumReceived{}), errEnded)
	}
	return nil
}

// refusal returns why a stream has ended, which its Send does not say.
func refusal(stream grpc.ClientStream, err error) error {
	if errors.Is(err, io.EOF) {
		return cmp.Or(stream.RecvMsg(&pb.QuorumReceived{}), errEnded)
	}
	return err
}

func (t *Transport) dial(self *Self, id quorum.ID) (*grpc.ClientConn, error) {
	address := t.address(self, id)
	if address == "" {
		return nil, fmt.Errorf("the address of member %v is not known", id)
	}
	return t.cfg.Dial(address)
}

// sender is either kind of stream.
type sender interface{ Send(*pb.QuorumPart) error }

func sendMessage(stream sender, m quorum.Message) error {
	text, err := m.Encode()
	if err != nil {
		return err
	}
	for more := true; more; {
		n := min(len(text), pieceMost)
		more = n < len(text)
		if err := stream.Send(&pb.QuorumPart{Message: text[:n], More: more}); err != nil {
			return err
		}
		text = text[n:]
	}
	return nil
}

// sendSnapshots sends one snapshot after the other.
func (t *Transport) sendSnapshots(ctx context.Context, l *link) error {
	for {
		var o member.Outgoing
		select {
		case <-ctx.Done():
			return nil
		case <-l.closed:
			return nil
		case o = <-l.snapshots:
		}
		self := t.current()
		if self == nil {
			lose(o)
			return nil
		}
		err := t.sendSnapshot(ctx, self, o)
		report := self.To.SnapshotSent
		if err != nil {
			report = self.To.Lost
			t.cfg.Log.Warn("snapshot for another manager", "member", l.id, "err", status.Convert(err).Message())
		}
		if report(ctx, l.id) != nil {
			return nil
		}
	}
}

var errStalled = status.Error(codes.DeadlineExceeded, "the snapshot does not move")

func (t *Transport) sendSnapshot(ctx context.Context, self *Self, o member.Outgoing) error {
	defer o.Content.Close()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stall := time.AfterFunc(stallMost, func() { cancel(errStalled) })
	defer stall.Stop()
	conn, err := t.dial(self, o.To())
	if err != nil {
		return err
	}
	defer conn.Close()
	stream, err := pb.NewQuorumClient(conn).Snapshot(ctx)
	if err == nil {
		err = t.greeted(stream, self, o.To())
	}
	if err != nil {
		return err
	}
	if err := sendMessage(stream, o.Message); err != nil {
		return refusal(stream, err)
	}
	for piece := make([]byte, pieceMost); ; {
		n, err := io.ReadFull(o.Content, piece)
		if n > 0 {
			if err := stream.Send(&pb.QuorumPart{Content: piece[:n]}); err != nil {
				return refusal(stream, err)
			}
			stall.Reset(stallMost)
		}
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			break
		}
		if err != nil {
			return fmt.Errorf("copy the state: %w", err)
		}
	}
	_, err = stream.CloseAndRecv()
	return err
}

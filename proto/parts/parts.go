// SPDX-License-Identifier: Apache-2.0

// Package parts carries states of any size over a stream whose messages are limited: the
// agents' reports and the volume manager's wanted states.
//
// A state of at most 1 MiB is sent as one message. A larger one is serialized and sent in
// parts, the last of which is marked; the receiver gets the state only when all parts have
// arrived. A report that equals the previous one is replaced by a short message that says
// so.
//
// A wanted state goes to an agent as its difference from the one before, if the agent can
// take that: see difference.go. The agent's end makes whole states of the differences. A
// sum over both shows whether the two ends hold the same; if they do not, the agent's end
// says so with its next report and drops what comes until the whole state is sent again.
//
// Peers of an older version know no parts and no differences, and would take one for an
// empty state. Each side therefore says in every state what it understands, and a manager
// sends whole states to an agent that does not.
package parts

import (
	"errors"
	"fmt"
	"sync/atomic"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"weft.dev/weft/proto/pb"
)

const (
	// MaxMessage is the largest message that servers and clients accept, in any call.
	MaxMessage = 4 << 20
	// partMost is the largest part, and the largest state that is sent in one message.
	partMost = 1 << 20
	// wholeMost is the largest state that is sent whole to a peer without parts.
	wholeMost = MaxMessage - 64<<10
	// stateMost is the largest state that a receiver collects, about 400 000 legs. It
	// bounds the memory that a peer can make the receiver use.
	stateMost = 256 << 20
)

// State is one of the four messages that carry states, as a pointer.
type State interface {
	proto.Message
	GetGeneration() uint64
	GetTerm() uint64
	GetScale() *pb.Scale
}

// Understood is the Scale of every state that is sent as one message: it tells the peer
// that this side understands parts and differences.
func Understood() *pb.Scale { return &pb.Scale{Understood: true, Differences: true} }

// Stream is one end of a stream of states. One goroutine may send while another
// receives.
type Stream[Out, In State] struct {
	// Part, if set, is called for each part but the last: the peer is alive, although its
	// state takes long to arrive.
	Part func()

	stream  stream[Out, In]
	repeats bool
	most    int // stateMost; smaller in tests

	peer  atomic.Int32 // what is known of the peer
	last  Out          // the last whole state that was sent, if repeats; none if it was sent as a difference
	parts []byte       // the parts received so far
	heard bool         // a whole state has been received

	differs atomic.Bool      // the peer takes differences
	given   given            // what SendPieces has sent; of the goroutine that sends
	held    held[In]         // the state in pieces; of the goroutine that receives
	head    *pb.TargetReport // of the last report that was sent as a difference
	sums    sums             // of the pieces of the last report; of the goroutine that receives
	change  Change           // of the last report that was received
	// lost: the end that receives differences cannot follow any more.
	lost atomic.Bool
}

// What is known of a peer.
const (
	unknown = iota
	understands
	doesNot
)

type stream[Out, In State] interface {
	Send(Out) error
	Recv() (In, error)
}

// Reporting makes the agents' end of a stream. A message must not be changed after Send.
func Reporting[Out, In State](s stream[Out, In]) *Stream[Out, In] {
	return &Stream[Out, In]{stream: s, repeats: true, most: stateMost}
}

// Wanting makes the manager's end. It does not keep the messages that it sends.
func Wanting[Out, In State](s stream[Out, In]) *Stream[Out, In] {
	return &Stream[Out, In]{stream: s, most: stateMost}
}

// Send sends a state: whole, in parts, or as a note that it is unchanged.
func (s *Stream[Out, In]) Send(m Out) error {
	if !s.repeats {
		return s.send(m)
	}
	if s.last.ProtoReflect().IsValid() && s.peer.Load() == understands && Same(s.last, m) {
		return s.repeat(m)
	}
	err := s.sendReport(m)
	if err != nil || !s.lost.Load() {
		return err
	}
	return s.repeat(m)
}

// sendReport sends a report: as a difference, if it is one that can be cut and the manager
// takes that.
func (s *Stream[Out, In]) sendReport(m Out) error {
	g := &s.given
	g.round++
	head, pieces, ok := cutReport(m, g.same)
	if !ok || !s.TakesDifferences() {
		s.last = m
		return s.send(m)
	}
	starts := g.pieces == nil
	d, err := difference(g, true, pieces)
	if errors.Is(err, errTwice) {
		*g = given{number: g.number}
		return s.sendReport(m)
	}
	if err != nil {
		return err
	}
	var none Out
	s.last = none
	if !starts && len(d.Pieces) == 0 && Same(s.head, head) {
		return s.repeat(m)
	}
	s.head = head
	return s.sendDifference(any(head).(Out), d)
}

func (s *Stream[Out, In]) send(m Out) error {
	if size := proto.Size(m); size <= partMost || s.takesWhole(size) {
		return s.stream.Send(m)
	}
	return s.cut(m)
}

// repeat sends a note that the last state still holds, and whether this end needs a whole one.
func (s *Stream[Out, In]) repeat(m Out) error {
	scale := Understood()
	scale.Unchanged, scale.Lost = true, s.lost.Load()
	return s.stream.Send(carrier(m, m.GetGeneration(), scale))
}

// takesWhole reports whether a state of this size is sent whole. A peer gets no parts if it
// has sent a state and did not say that it understands them. A peer that has sent nothing
// yet gets parts only of a state that does not fit one message: if the peer is too old, it
// refuses them, since no part names a node.
func (s *Stream[Out, In]) takesWhole(size int) bool {
	peer := s.peer.Load()
	return peer == doesNot || peer == unknown && size <= wholeMost
}

func (s *Stream[Out, In]) cut(m Out) error {
	all, err := proto.Marshal(m)
	if err != nil {
		return err
	}
	if len(all) > s.most {
		return fmt.Errorf("send state: %s", tooLarge(m, s.most))
	}
	for len(all) > 0 {
		part := all[:min(len(all), partMost)]
		all = all[len(part):]
		if err := s.stream.Send(carrier(m, 0, &pb.Scale{Understood: true, Differences: true, Part: part, More: len(all) > 0})); err != nil {
			return err
		}
	}
	return nil
}

// Recv returns the next state once all of it has arrived, or a message that says that the
// state is unchanged. When a new state begins, the parts of an interrupted one are dropped.
func (s *Stream[Out, In]) Recv() (In, error) {
	for {
		m, err := s.recv()
		if err != nil {
			return m, err
		}
		if !s.repeats {
			return s.report(m)
		}
		if m.GetScale().GetDifference() == nil {
			s.held = held[In]{}
			s.lost.Store(false)
			return m, nil
		}
		whole, ok, err := s.held.apply(m)
		if err != nil {
			return whole, status.Errorf(codes.InvalidArgument, "%s in pieces: %v", name(m), err)
		}
		s.lost.Store(!ok)
		if ok {
			return whole, nil
		}
	}
}

// report returns a report as the manager gets it, see Change.
func (s *Stream[Out, In]) report(m In) (In, error) {
	var none In
	r, ok := any(m).(*pb.TargetReport)
	switch {
	case m.GetScale().GetUnchanged():
		return m, nil
	case m.GetScale().GetDifference() == nil:
		s.sums, s.change = sums{}, Change{}
		return m, nil
	case !ok:
		return none, status.Errorf(codes.InvalidArgument, "%s: these are sent whole", name(m))
	}
	r, change, err := s.sums.apply(r)
	if err != nil {
		return none, err
	}
	s.change = change
	return any(r).(In), nil
}

// Change says how the last report that Recv returned relates to the one before.
func (s *Stream[Out, In]) Change() Change { return s.change }

// recv returns the next message once all its parts have arrived.
func (s *Stream[Out, In]) recv() (In, error) {
	var none In
	for {
		m, err := s.stream.Recv()
		if err != nil {
			return none, err
		}
		scale := m.GetScale()
		s.note(scale)
		switch {
		case scale.GetUnchanged() && !s.heard:
			return none, status.Errorf(codes.InvalidArgument, "%s: unchanged, but none was sent before", name(m))
		case scale.GetUnchanged():
			return m, nil
		case scale.GetMore() || len(scale.GetPart()) > 0:
			whole, err := s.join(m)
			if err != nil || whole.ProtoReflect().IsValid() {
				return whole, err
			}
		default:
			s.parts, s.heard = nil, true
			return m, nil
		}
	}
}

func (s *Stream[Out, In]) note(scale *pb.Scale) {
	if scale.GetUnderstood() {
		s.peer.Store(understands)
	} else {
		s.peer.CompareAndSwap(unknown, doesNot)
	}
	if scale.GetDifferences() {
		s.differs.Store(true)
	}
	if !s.repeats && scale.GetLost() {
		s.lost.Store(true)
	}
}

// join adds a part. It returns the state if the part was the last one, otherwise nil.
func (s *Stream[Out, In]) join(m In) (whole In, err error) {
	scale := m.GetScale()
	if len(scale.Part) == 0 {
		return whole, status.Errorf(codes.InvalidArgument, "%s: an empty part", name(m))
	}
	if len(s.parts)+len(scale.Part) > s.most {
		return whole, status.Error(codes.ResourceExhausted, tooLarge(m, s.most))
	}
	s.parts = append(s.parts, scale.Part...)
	if scale.More {
		if s.Part != nil {
			s.Part()
		}
		return whole, nil
	}
	all := s.parts
	s.parts = nil
	state := m.ProtoReflect().New().Interface().(In)
	if err := proto.Unmarshal(all, state); err != nil {
		return whole, status.Errorf(codes.InvalidArgument, "%s in parts: %v", name(m), err)
	}
	s.heard = true
	return state, nil
}

func name(m proto.Message) string { return string(m.ProtoReflect().Descriptor().Name()) }

func tooLarge(m proto.Message, most int) string {
	return fmt.Sprintf("%s is larger than the %d bytes that one state may have", name(m), most)
}

// carrier returns a message of m's type with only a generation and scale.
func carrier[M State](m M, generation uint64, scale *pb.Scale) M {
	c := m.ProtoReflect().New()
	fields := c.Descriptor().Fields()
	c.Set(fields.ByName("scale"), protoreflect.ValueOfMessage(scale.ProtoReflect()))
	if generation != 0 {
		c.Set(fields.ByName("generation"), protoreflect.ValueOfUint64(generation))
	}
	return c.Interface().(M)
}

// Same reports whether two states are equal apart from their generations.
func Same[M State](a, b M) bool {
	x, y := a.ProtoReflect(), b.ProtoReflect()
	if any(a) == any(b) {
		return true
	}
	if x.IsValid() != y.IsValid() {
		return false
	}
	for i, fields := 0, x.Descriptor().Fields(); i < fields.Len(); i++ {
		f := fields.Get(i)
		if f.Name() == "generation" || f.Name() == "scale" {
			continue
		}
		if x.Has(f) != y.Has(f) || x.Has(f) && !x.Get(f).Equal(y.Get(f)) {
			return false
		}
	}
	return true
}

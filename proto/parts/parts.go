// SPDX-License-Identifier: Apache-2.0

// Package parts carries whole states over a stream whose messages have a limit:
// the agents' reports, and what the volume manager wants of them.
//
// A state of at most 1 MiB is one message, as the proto says it. A larger one is
// serialized and sent in parts, of which the last says so; the receiver gets the
// state when all of them are there, and never a piece of it. A report that says what
// the one before it said is not sent again: a short message says so.
//
// Peers of an older version know none of this, and would take a part for a state
// that is empty. So each side says that it understands, in each state that it
// sends, and a manager sends whole states to an agent that does not.
package parts

import (
	"fmt"
	"sync/atomic"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"weft.dev/weft/proto/pb"
)

const (
	// MaxMessage is the largest message that servers and clients take, of any call.
	MaxMessage = 4 << 20
	// partMost is the largest part, and the largest state that is not cut.
	partMost = 1 << 20
	// wholeMost still fits one message, if the peer may not know of parts.
	wholeMost = MaxMessage - 64<<10
	// stateMost is the largest state that a receiver collects: some 400 000 legs. It
	// bounds the memory that a peer can take.
	stateMost = 256 << 20
)

// State is one of the four messages that carry states, as a pointer.
type State interface {
	proto.Message
	GetGeneration() uint64
	GetScale() *pb.Scale
}

// Understood is the Scale of every state that is sent as one message.
func Understood() *pb.Scale { return &pb.Scale{Understood: true} }

// Stream is one end of a stream of states. One goroutine may send while another
// receives.
type Stream[Out, In State] struct {
	// Part, if set, is called for each part that is not the last: the peer is alive,
	// though its state takes long.
	Part func()

	stream  stream[Out, In]
	repeats bool
	most    int // stateMost; tests have less

	peer  atomic.Int32 // what is known of it
	last  Out          // the newest whole state that was sent, if repeats
	parts []byte       // received of the next state
	heard bool         // a whole state was received
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

// Reporting is the agents' end of a stream. What is sent must not be changed after.
func Reporting[Out, In State](s stream[Out, In]) *Stream[Out, In] {
	return &Stream[Out, In]{stream: s, repeats: true, most: stateMost}
}

// Wanting is the manager's end. It keeps nothing of what it sends.
func Wanting[Out, In State](s stream[Out, In]) *Stream[Out, In] {
	return &Stream[Out, In]{stream: s, most: stateMost}
}

// Send sends a state: whole, in parts, or that it is unchanged.
func (s *Stream[Out, In]) Send(m Out) error {
	if s.repeats {
		if s.last.ProtoReflect().IsValid() && s.peer.Load() == understands && Same(s.last, m) {
			return s.stream.Send(carrier(m, m.GetGeneration(), &pb.Scale{Understood: true, Unchanged: true}))
		}
		s.last = m
	}
	if size := proto.Size(m); size <= partMost || s.takesWhole(size) {
		return s.stream.Send(m)
	}
	return s.cut(m)
}

// takesWhole: a peer that has spoken without a word of parts gets none. One that has
// not spoken yet refuses a part if it is too old, since no part names a node.
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
		if err := s.stream.Send(carrier(m, 0, &pb.Scale{Understood: true, Part: part, More: len(all) > 0})); err != nil {
			return err
		}
	}
	return nil
}

// Recv returns the next state, when all of it is there, or a message that says that
// the newest one is unchanged. One that was cut off is dropped when another begins.
func (s *Stream[Out, In]) Recv() (In, error) {
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
}

// join adds a part; it returns the state if that was the last one, else nil.
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

// carrier is a message of m's type with nothing in it but a generation and scale.
func carrier[M State](m M, generation uint64, scale *pb.Scale) M {
	c := m.ProtoReflect().New()
	fields := c.Descriptor().Fields()
	c.Set(fields.ByName("scale"), protoreflect.ValueOfMessage(scale.ProtoReflect()))
	if generation != 0 {
		c.Set(fields.ByName("generation"), protoreflect.ValueOfUint64(generation))
	}
	return c.Interface().(M)
}

// Same reports whether two states say the same, whatever their generations.
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

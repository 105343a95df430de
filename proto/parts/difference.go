// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"weft.dev/weft/proto/pb"
)

// Piece is what a wanted state says of one thing, such as a volume.
type Piece[M State] struct {
	Key string
	// State has the entries of its lists that are about this thing. Without any the piece
	// is gone.
	State M

	// In a report, which is cut each time that it is sent, State is made only if the entry is
	// not the one of last time: of is its address, and fill adds it to an empty State.
	of   any
	fill func(M)
}

// given is what the other end holds of a state, as its sender knows it.
type given struct {
	number uint64
	term   uint64
	round  uint64           // counts the differences that were made
	pieces map[string]*mark // nil: the other end holds nothing
	known  map[any]*mark    // the marks of pieces of a report, by their entries
	sum    uint64
}

// mark is what is remembered of a piece that was sent.
type mark struct {
	hash  uint64
	of    any    // see Piece
	round uint64 // the last one in which it was there
}

// held is a state in pieces, as its receiver has them.
type held[M State] struct {
	number uint64 // 0: none
	term   uint64
	pieces []heldPiece[M] // in the order of their keys
	sum    uint64
}

type heldPiece[M State] struct {
	key   string
	state M
	hash  uint64
}

// hash is the part of a piece in the sum of a difference.
func hash(key string, content []byte) uint64 {
	sum := sha256.Sum256(append(append([]byte(key), 0), content...))
	return binary.LittleEndian.Uint64(sum[:8])
}

// TakesDifferences reports whether the other end has said that it accepts states as
// differences.
func (s *Stream[Out, In]) TakesDifferences() bool { return s.differs.Load() }

// Starts reports whether the next SendPieces has to be given every piece, because the other
// end holds no state of this term, or not the one that this end believes. The goroutine that
// sends calls it.
func (s *Stream[Out, In]) Starts(term uint64) bool {
	if s.lost.Swap(false) || s.given.term != term {
		s.given.pieces, s.given.term = nil, term
	}
	return s.given.pieces == nil
}

// Lost reports whether the other end has said that it needs the whole state.
func (s *Stream[Out, In]) Lost() bool { return s.lost.Load() }

// SendPieces sends a state as its difference from the one before. head has the fields that
// are not lists. The pieces are all that may have changed or, with all, the whole state. A
// piece that is as the other end has it is not sent again.
func (s *Stream[Out, In]) SendPieces(head Out, all bool, pieces []Piece[Out]) error {
	if s.given.pieces == nil && !all {
		return fmt.Errorf("send difference: the other end holds nothing to differ from")
	}
	s.given.round++
	d, err := difference(&s.given, all, pieces)
	if err != nil {
		return err
	}
	return s.sendDifference(head, d)
}

func (s *Stream[Out, In]) sendDifference(head Out, d *pb.Difference) error {
	s.given.number = d.To
	m := proto.CloneOf(head)
	scale := Understood()
	scale.Difference = d
	setScale(m, scale)
	return s.send(m)
}

// difference returns what turns the given state into the next one, which is the given one
// from then on.
func difference[M State](g *given, all bool, pieces []Piece[M]) (*pb.Difference, error) {
	d := &pb.Difference{From: g.number, To: g.number + 1}
	if g.pieces == nil {
		d.From, g.pieces, g.known, g.sum = 0, map[string]*mark{}, map[any]*mark{}, 0
	}
	for _, p := range pieces {
		if old := g.pieces[p.Key]; p.fill != nil && old != nil && old.round == g.round {
			return nil, errTwice
		}
		if p.fill != nil {
			p.State = p.State.ProtoReflect().New().Interface().(M)
			p.fill(p.State)
		}
		content, err := content(p.State)
		if err != nil {
			return nil, err
		}
		if g.note(p.Key, content, mark{of: p.of, round: g.round}) {
			d.Pieces = append(d.Pieces, &pb.Piece{Key: p.Key, Content: content})
		}
	}
	for key, m := range g.pieces {
		if all && m.round != g.round {
			g.note(key, nil, mark{})
			d.Pieces = append(d.Pieces, &pb.Piece{Key: key})
		}
	}
	d.Sum = g.sum
	return d, nil
}

// content serializes a piece. The same piece always gives the same bytes.
func content[M State](m M) ([]byte, error) {
	if !m.ProtoReflect().IsValid() {
		return nil, nil
	}
	return proto.MarshalOptions{Deterministic: true}.Marshal(m)
}

// same reports whether an entry of a report was there last time, and notes that it still is.
func (g *given) same(of any) bool {
	m := g.known[of]
	if m != nil {
		m.round = g.round
	}
	return m != nil
}

// errTwice is the error of difference if a report has two entries about one thing, of which one
// was there last time: its piece has to be made of both.
var errTwice = errors.New("two entries about one thing")

// note records that the other end gets a piece, and reports whether it is new to it.
func (g *given) note(key string, content []byte, m mark) bool {
	old, had := g.pieces[key]
	if had {
		g.sum -= old.hash
		delete(g.known, old.of)
	}
	if len(content) == 0 {
		delete(g.pieces, key)
		return had
	}
	m.hash = hash(key, content)
	g.pieces[key] = &m
	if m.of != nil {
		g.known[m.of] = &m
	}
	g.sum += m.hash
	return !had || m.hash != old.hash
}

// apply turns the held state into the next one, and returns that. ok is false if the
// difference is from another state; nothing is held then.
func (h *held[M]) apply(m M) (whole M, ok bool, err error) {
	d := m.GetScale().GetDifference()
	if d.From == 0 {
		*h = held[M]{term: m.GetTerm()}
	} else if d.From != h.number || m.GetTerm() != h.term {
		*h = held[M]{}
		return whole, false, nil
	}
	slices.SortFunc(d.Pieces, func(a, b *pb.Piece) int { return cmp.Compare(a.Key, b.Key) })
	for _, p := range d.Pieces {
		if err := h.put(p, m.ProtoReflect().New().Interface().(M)); err != nil {
			return whole, false, err
		}
	}
	if h.number = d.To; h.sum != d.Sum {
		*h = held[M]{}
		return whole, false, nil
	}
	return h.join(m), true, nil
}

// put replaces one piece. state is an empty message for its content.
func (h *held[M]) put(p *pb.Piece, state M) error {
	at, had := slices.BinarySearchFunc(h.pieces, p.Key, func(x heldPiece[M], key string) int { return cmp.Compare(x.key, key) })
	if had {
		h.sum -= h.pieces[at].hash
	}
	if len(p.Content) == 0 {
		if had {
			h.pieces = slices.Delete(h.pieces, at, at+1)
		}
		return nil
	}
	if err := proto.Unmarshal(p.Content, state); err != nil {
		return err
	}
	fresh := heldPiece[M]{p.Key, state, hash(p.Key, p.Content)}
	h.sum += fresh.hash
	if had {
		h.pieces[at] = fresh
		return nil
	}
	h.pieces = slices.Insert(h.pieces, at, fresh)
	return nil
}

// join makes one state of the head and all pieces. The entries of its lists are those of the
// pieces, which nobody changes.
func (h *held[M]) join(head M) M {
	whole := proto.CloneOf(head)
	setScale(whole, Understood())
	n := len(h.pieces)
	switch to := any(whole).(type) {
	case *pb.TargetWanted:
		to.Legs, to.Admissions = make([]*pb.WantedLeg, 0, n), make([]*pb.Admission, 0, n) // a volume often has one leg here
		for i := range h.pieces {
			from := any(h.pieces[i].state).(*pb.TargetWanted)
			to.Drives, to.Legs = append(to.Drives, from.Drives...), append(to.Legs, from.Legs...)
			to.Admissions, to.Exports = append(to.Admissions, from.Admissions...), append(to.Exports, from.Exports...)
			to.Space = append(to.Space, from.Space...)
			to.Discovery = append(to.Discovery, from.Discovery...)
		}
	case *pb.InitiatorWanted:
		to.Attachments = make([]*pb.WantedAttachment, 0, n)
		for i := range h.pieces {
			to.Attachments = append(to.Attachments, any(h.pieces[i].state).(*pb.InitiatorWanted).Attachments...)
		}
	}
	return whole
}

func setScale[M State](m M, scale *pb.Scale) {
	r := m.ProtoReflect()
	r.Set(r.Descriptor().Fields().ByName("scale"), protoreflect.ValueOfMessage(scale.ProtoReflect()))
}

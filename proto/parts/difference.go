// SPDX-License-Identifier: Apache-2.0

package parts

import (
	"crypto/sha256"
	"encoding/binary"
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
}

// given is what the other end holds of a state, as its sender knows it.
type given struct {
	number uint64
	term   uint64
	sums   map[string]uint64 // the hash of each piece; nil: the other end holds nothing
	sum    uint64
}

// held is a state in pieces, as its receiver has them.
type held[M State] struct {
	number uint64 // 0: none
	term   uint64
	keys   []string // in order
	pieces map[string]hashed[M]
	sum    uint64
}

type hashed[M State] struct {
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
		s.given.sums, s.given.term = nil, term
	}
	return s.given.sums == nil
}

// Lost reports whether the other end has said that it needs the whole state.
func (s *Stream[Out, In]) Lost() bool { return s.lost.Load() }

// SendPieces sends a state as its difference from the one before. head has the fields that
// are not lists. The pieces are all that may have changed or, with all, the whole state. A
// piece that is as the other end has it is not sent again.
func (s *Stream[Out, In]) SendPieces(head Out, all bool, pieces []Piece[Out]) error {
	g := &s.given
	d := &pb.Difference{From: g.number, To: g.number + 1}
	if g.sums == nil {
		if !all {
			return fmt.Errorf("send difference: the other end holds nothing to differ from")
		}
		d.From, g.sums, g.sum = 0, map[string]uint64{}, 0
	}
	left := map[string]bool{}
	if all {
		for key := range g.sums {
			left[key] = true
		}
	}
	for _, p := range pieces {
		delete(left, p.Key)
		content, err := content(p.State)
		if err != nil {
			return err
		}
		if g.note(p.Key, content) {
			d.Pieces = append(d.Pieces, &pb.Piece{Key: p.Key, Content: content})
		}
	}
	for key := range left {
		g.note(key, nil)
		d.Pieces = append(d.Pieces, &pb.Piece{Key: key})
	}
	d.Sum, g.number = g.sum, d.To
	m := proto.CloneOf(head)
	scale := Understood()
	scale.Difference = d
	setScale(m, scale)
	return s.send(m)
}

// content serializes a piece. The same piece always gives the same bytes.
func content[M State](m M) ([]byte, error) {
	if !m.ProtoReflect().IsValid() {
		return nil, nil
	}
	return proto.MarshalOptions{Deterministic: true}.Marshal(m)
}

// note records that the other end gets a piece, and reports whether it is new to it.
func (g *given) note(key string, content []byte) bool {
	old, had := g.sums[key]
	if len(content) == 0 {
		delete(g.sums, key)
		g.sum -= old
		return had
	}
	h := hash(key, content)
	g.sums[key] = h
	g.sum += h - old
	return !had || h != old
}

// apply turns the held state into the next one, and returns that. ok is false if the
// difference is from another state; nothing is held then.
func (h *held[M]) apply(m M) (whole M, ok bool, err error) {
	d := m.GetScale().GetDifference()
	if d.From == 0 {
		*h = held[M]{term: m.GetTerm(), pieces: map[string]hashed[M]{}}
	} else if d.From != h.number || m.GetTerm() != h.term {
		*h = held[M]{}
		return whole, false, nil
	}
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
	old, had := h.pieces[p.Key]
	at, _ := slices.BinarySearch(h.keys, p.Key)
	h.sum -= old.hash
	switch {
	case len(p.Content) > 0:
		if err := proto.Unmarshal(p.Content, state); err != nil {
			return err
		}
		h.pieces[p.Key] = hashed[M]{state, hash(p.Key, p.Content)}
		h.sum += h.pieces[p.Key].hash
		if !had {
			h.keys = slices.Insert(h.keys, at, p.Key)
		}
	case had:
		delete(h.pieces, p.Key)
		h.keys = slices.Delete(h.keys, at, at+1)
	}
	return nil
}

// join makes one state of the head and all pieces. The entries of its lists are those of the
// pieces, which nobody changes.
func (h *held[M]) join(head M) M {
	whole := proto.CloneOf(head)
	setScale(whole, Understood())
	to := whole.ProtoReflect()
	for _, key := range h.keys {
		h.pieces[key].state.ProtoReflect().Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
			if f.IsList() {
				list := to.Mutable(f).List()
				for i := range v.List().Len() {
					list.Append(v.List().Get(i))
				}
			}
			return true
		})
	}
	return whole
}

func setScale[M State](m M, scale *pb.Scale) {
	r := m.ProtoReflect()
	r.Set(r.Descriptor().Fields().ByName("scale"), protoreflect.ValueOfMessage(scale.ProtoReflect()))
}

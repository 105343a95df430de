// SPDX-License-Identifier: Apache-2.0

package mapped

import "math/bits"

// The records of one chunk of the legs, of all layers, are a chain, those of the highest layer id
// first. A layer's id is higher than its parent's, so the records that a layer sees come nearest
// first. Records of layers that are gone may be in the chain until they are collected; nothing sees
// them.
//
// A chunk that was written between many snapshots has a long chain. What decides a grain after many
// others is remembered (far) until the chain changes.

// walk calls yield for each record of a chunk that l sees, nearest first, until it returns false.
// The caller holds the chunk's stripe.
func (t *Tree) walk(l *layer, chunk uint32, yield func(slot uint32, r *record) bool) {
	t.deciding(l, chunk, allGrains, yield)
}

// deciding is walk for the records that decide some of the grains. Which layer the others are of is not
// looked up: below many snapshots that would be most of the time.
func (t *Tree) deciding(l *layer, chunk uint32, grains uint64, yield func(slot uint32, r *record) bool) {
	if grains&(grains-1) == 0 {
		if slot := t.nearest(l, chunk, grains); slot != 0 {
			yield(slot, t.record(slot))
		}
		return
	}
	for slot, _ := t.seen(l, t.first[chunk], grains); slot != 0; {
		r := t.record(slot)
		if !yield(slot, r) {
			return
		}
		slot, _ = t.seen(l, r.next, grains)
	}
}

// seen returns the first slot of a chain, from one on, whose record decides some of the grains as l sees them, and
// how many records it has passed by; 0 if there is none.
func (t *Tree) seen(l *layer, slot uint32, grains uint64) (found uint32, passed int) {
	for ; slot != 0; passed++ {
		r := t.record(slot)
		if r.have.Load()&grains != 0 {
			if o := t.layers[r.layer]; o != nil && l.sees(o) {
				break
			}
		}
		slot = r.next
	}
	return slot, passed
}

// nearest returns the slot of the record that decides a grain as l sees it, 0 if there is none.
func (t *Tree) nearest(l *layer, chunk uint32, grain uint64) uint32 {
	s := t.stripe(chunk)
	f := s.far[farChunk{l.ID, chunk}]
	if f != nil && f.known&grain != 0 {
		return f.slots[bits.TrailingZeros64(grain)]
	}
	slot, passed := t.seen(l, t.first[chunk], grain)
	if passed >= farFrom {
		s.remember(f, farChunk{l.ID, chunk}, grain, slot)
	}
	return slot
}

// farFrom is after how many records what decides a grain is remembered, and farChunks for how many
// chunks of a stripe at most: some 10 MiB of memory for a tree. Tests have fewer of both.
var (
	farFrom   = 16
	farChunks = 128
)

// farChunk is a chunk as a layer sees it.
type farChunk struct{ layer, chunk uint32 }

// far is what decides the grains of a chunk, as far as that is known.
type far struct {
	known uint64
	slots [ChunkSize / GrainSize]uint32 // 0: no record
}

// remember notes what decides a grain. f is what is known of the chunk, nil if that is nothing. The caller
// holds the stripe.
func (s *stripe) remember(f *far, of farChunk, grain uint64, slot uint32) {
	if f == nil {
		if s.far == nil || len(s.far) >= farChunks {
			s.far = map[farChunk]*far{}
		}
		f = &far{}
		s.far[of] = f
	}
	f.known |= grain
	f.slots[bits.TrailingZeros64(grain)] = slot
}

// forgetFar is called when a record comes into the chain of a chunk, leaves it, or decides more grains. The
// caller holds the stripe.
func (s *stripe) forgetFar(chunk uint32) {
	for of := range s.far {
		if of.chunk == chunk {
			delete(s.far, of)
		}
	}
}

// own returns the slot of a layer's own record of a chunk, 0 if it has none.
func (t *Tree) own(l *layer, chunk uint32) uint32 {
	for slot := t.first[chunk]; slot != 0; {
		r := t.record(slot)
		if r.layer <= l.ID {
			if r.layer == l.ID {
				return slot
			}
			return 0
		}
		slot = r.next
	}
	return 0
}

// source is where a chunk of a leg has its data: in a slot, or in the base.
type source struct {
	slot uint32 // 0: the base
	at   int64  // where the bytes of the chunk begin on the drive
}

// source returns where a grain's data is as l sees it; false if it reads as zeroes.
func (t *Tree) source(l *layer, chunk uint32, grain int64) (from source, data bool) {
	slot := t.nearest(l, chunk, 1<<grain)
	switch {
	case slot == 0 && t.overBase(l, chunk):
		return source{at: t.baseAt(chunk)}, true
	case slot == 0 || t.record(slot).data.Load()>>grain&1 == 0:
		return source{}, false
	}
	return source{slot, t.data(slot)}, true
}

// holder returns the slot that has all of these grains as data, as l sees them; 0 if there is none.
func (t *Tree) holder(l *layer, chunk uint32, grains uint64) (holder uint32) {
	t.deciding(l, chunk, grains, func(slot uint32, r *record) bool {
		if grains&^r.data.Load() == 0 {
			holder = slot
		}
		return false
	})
	return holder
}

// inherited returns the grains that l would see as data without its own record. Zeroes of a doomed
// layer hide nothing here: the layer may be gone at any time, and what it hid would then show.
func (t *Tree) inherited(l *layer, chunk uint32) (data uint64) {
	seen := uint64(0)
	t.walk(l, chunk, func(_ uint32, r *record) bool {
		if r.layer == l.ID {
			return true
		}
		data |= r.data.Load() &^ seen
		if t.layers[r.layer].State != StateDoomed {
			seen |= r.have.Load()
		}
		return seen != allGrains
	})
	return data | t.fromBase(l, chunk, seen)
}

// link puts a record into the chain of its chunk.
func (t *Tree) link(slot uint32) {
	r := t.record(slot)
	at := &t.first[r.chunk]
	for *at != 0 && t.record(*at).layer > r.layer {
		at = &t.record(*at).next
	}
	r.next, *at = *at, slot
	t.stripe(r.chunk).forgetFar(r.chunk)
	t.count(slot, r.layer, 1)
}

// unlink takes a record out of the chain of a chunk.
func (t *Tree) unlink(slot, chunk uint32) {
	at := &t.first[chunk]
	for *at != slot {
		at = &t.record(*at).next
	}
	r := t.record(slot)
	*at, r.next = r.next, 0
	t.stripe(chunk).forgetFar(chunk)
	t.count(slot, r.layer, -1)
}

// count notes that a layer has a slot more, or less. The caller holds a stripe.
func (t *Tree) count(slot, id uint32, n int64) {
	l := t.layers[id]
	if l == nil {
		return
	}
	l.records.Add(n)
	if hasChunk(slot) {
		l.chunks.Add(n)
	}
}

// ownBit marks in Leg.top that the record is the leg's own layer's.
const ownBit = 1 << 31

// retop tells the open legs where their look-ups of a chunk begin, after its chain has changed.
func (t *Tree) retop(chunk uint32) {
	for _, leg := range t.legs {
		if top := *leg.top.Load(); int(chunk) < len(top) {
			top[chunk].Store(t.topOf(leg.layer, chunk))
		}
	}
}

// topOf is the first record that a layer sees of a chunk. 0: none.
func (t *Tree) topOf(l *layer, chunk uint32) (top uint32) {
	t.walk(l, chunk, func(slot uint32, r *record) bool {
		if top = slot; r.layer == l.ID {
			top |= ownBit
		}
		return false
	})
	return top
}

// hideTop makes look-ups of a chunk go by its stripe.
func (t *Tree) hideTop(chunk uint32) {
	for _, leg := range t.legs {
		if top := *leg.top.Load(); int(chunk) < len(top) {
			top[chunk].Store(0)
		}
	}
}

// mask is the grains that a range inside a chunk touches.
func mask(from, n int64) uint64 {
	first, last := from/GrainSize, (from+n-1)/GrainSize
	return allGrains >> (63 - last) &^ (1<<first - 1)
}

// run returns the first run of grains in m, as a mask, and its bounds in bytes of the chunk.
func run(m uint64) (grains uint64, from, to int64) {
	first := bits.TrailingZeros64(m)
	n := bits.TrailingZeros64(^(m >> first))
	return allGrains >> (64 - n) << first, int64(first) * GrainSize, int64(first+n) * GrainSize
}

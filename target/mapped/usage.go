// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"fmt"
	"math/bits"

	"weft.dev/weft/proto/block"
)

// Space is how much of a tree's extents is taken.
type Space struct {
	Total block.Size // for data
	Free  block.Size // of it; what a volatile drive has yet to flush is not free
	Empty block.Size // of that, in extents that hold nothing, which GiveBack can give back
	// Pending is free once a volatile drive has been flushed.
	Pending block.Size
}

// Space returns the tree's space.
func (t *Tree) Space() Space {
	t.space.mu.Lock()
	defer t.space.mu.Unlock()
	s := Space{Total: block.Size(t.space.total) * ChunkSize, Free: block.Size(t.space.chunks) * ChunkSize}
	s.Pending = block.Size(len(t.space.quarantine)) * ChunkSize
	for i := range t.space.free {
		if t.space.free[i] == everySlot {
			s.Empty += block.Size(usable(false)) * ChunkSize
		}
	}
	return s
}

// Room returns how much is free, at least as far as least: if less than that is, but more would be after a
// flush of the drive, the drive is flushed first. It is cheap otherwise. An error of the drive stops the tree.
func (t *Tree) Room(least block.Size) (block.Size, error) {
	free, pending := t.space.room()
	if free < least && free+pending >= least {
		if err := t.flush(); err != nil {
			return 0, fmt.Errorf("find room in tree %v: %w", t.place.Tree, err)
		}
		free, _ = t.space.room()
	}
	return free, nil
}

// Usage is the space of one layer.
type Usage struct {
	Used       block.Size // chunks that are the layer's own; a base is not counted
	Referenced block.Size // grains that it reads as data, its own and others'
	// Freed is what comes free if the layer is deleted: all of Used if nothing is over it, nothing
	// if several layers are, else the chunks that one layer over it does not need.
	Freed block.Size
}

// Usage counts the space of a leg or a snapshot. It looks at every chunk, one at a time.
func (t *Tree) Usage(object block.UUID) (u Usage, err error) {
	t.admin.Lock()
	defer t.admin.Unlock()
	at := t.super.layer(object)
	if at == nil {
		return u, fmt.Errorf("usage of %v: %w", object, ErrUnknown)
	}
	l, children := t.layers[at.ID], t.super.children(at.ID)
	for chunk := range chunksOf(l.Size) {
		s := t.stripe(chunk)
		s.mu.Lock()
		own, seen := uint32(0), uint64(0)
		t.walk(l, chunk, func(slot uint32, r *record) bool {
			if r.layer == l.ID {
				own = slot
			}
			u.Referenced += block.Size(bits.OnesCount64(r.data.Load()&^seen)) * GrainSize
			seen |= r.have.Load()
			return seen != allGrains
		})
		u.Referenced += block.Size(bits.OnesCount64(t.fromBase(l, chunk, seen))) * GrainSize
		if own != 0 && hasChunk(own) {
			u.Used += ChunkSize
			if len(children) == 0 || len(children) == 1 && t.comesFree(own, children[0], chunk) {
				u.Freed += ChunkSize
			}
		}
		s.mu.Unlock()
	}
	return u, nil
}

// Used returns the space that is each leg's and each snapshot's own. It looks at no chunk and does
// not wait for the drive.
func (t *Tree) Used() map[block.UUID]block.Size {
	s := t.stripe(0)
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make(map[block.UUID]block.Size, len(t.layers))
	for _, l := range t.layers {
		if l.State != StateDoomed {
			all[l.Object] = block.Size(l.chunks.Load()) * ChunkSize
		}
	}
	return all
}

// comesFree reports whether merging the record of a slot into a child frees a chunk: both have one,
// or the child needs none of its data.
func (t *Tree) comesFree(slot, child, chunk uint32) bool {
	over := t.own(t.layers[child], chunk)
	if over == 0 {
		return false
	}
	return hasChunk(over) || t.record(slot).data.Load()&^t.record(over).have.Load() == 0
}

// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"cmp"
	"fmt"
	"math/bits"
	"slices"

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
		if t.space.all(i) == everySlot {
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

// Changes grows whenever a record changes.
func (t *Tree) Changes() uint64 { return t.seq.Load() }

// Usages counts the space of each leg and each snapshot. It looks at every record of the tree once, chunk by
// chunk, while I/O and changes go on: what changes meanwhile is counted as it was or as it is. Between chunks
// it calls pause, and ends if that is false: the answer is nil then.
func (t *Tree) Usages(pause func() bool) map[block.UUID]Usage {
	c := t.census()
	for chunk := range c.chunks {
		s := t.stripe(chunk)
		s.mu.Lock()
		t.countChunk(c, chunk)
		s.mu.Unlock()
		if !pause() {
			return nil
		}
	}
	all := make(map[block.UUID]Usage, len(c.layers))
	for _, l := range c.layers { // by id: parents come first
		if p := c.of[l.Parent]; p != nil {
			l.over += p.over
		}
		if l.State != StateDoomed {
			l.Usage.Referenced = l.inBase + block.Size(l.over)*GrainSize
			all[l.Object] = l.Usage
		}
	}
	return all
}

// census is the space of all layers while it is counted.
type census struct {
	chunks uint32
	based  uint32     // chunks of the base
	layers []*counted // by id
	of     map[uint32]*counted
	views  []chunkView // of the layers that have a record of the chunk that is looked at, by id
	slots  []uint32    // its records
}

// counted is a layer whose space is counted.
type counted struct {
	*layer
	Usage
	children int
	inBase   block.Size // what it would read of a base without any record
	over     int64      // grains that are data by its records, less those that were without them
}

// chunkView is what a layer that has a record of a chunk reads there: the grains that records decide, and those
// that are data.
type chunkView struct {
	layer      *counted
	have, data uint64
	own        uint64 // the data of its own record
	chunk      bool   // which has a chunk
}

// census takes the layers as they are now.
func (t *Tree) census() *census {
	s := t.stripe(0)
	s.mu.Lock()
	defer s.mu.Unlock()
	c := &census{chunks: uint32(len(t.first)), based: uint32(len(t.base)) * chunkCount, of: map[uint32]*counted{}}
	for _, l := range t.layers {
		x := &counted{layer: l}
		if l.based {
			x.inBase = block.Size(min(chunksOf(l.Size), c.based)) * ChunkSize
		}
		c.layers, c.of[l.ID] = append(c.layers, x), x
	}
	slices.SortFunc(c.layers, func(a, b *counted) int { return cmp.Compare(a.ID, b.ID) })
	for _, l := range c.layers {
		if p := c.of[l.Parent]; p != nil {
			p.children++
		}
	}
	return c
}

// countChunk counts the records of a chunk, those of parents first. The caller holds its stripe.
func (t *Tree) countChunk(c *census, chunk uint32) {
	c.views, c.slots = c.views[:0], c.slots[:0]
	for slot := t.first[chunk]; slot != 0; slot = t.record(slot).next {
		c.slots = append(c.slots, slot)
	}
	var parent uint32
	var below chunkView
	for _, slot := range slices.Backward(c.slots) {
		r := t.record(slot)
		l := c.of[r.layer]
		if l == nil {
			continue
		}
		if l.Parent == 0 || l.Parent != parent { // clones of one snapshot follow one another
			parent, below = l.Parent, c.under(l, chunk)
		}
		have, data := r.have.Load(), r.data.Load()
		now := chunkView{l, below.have | have, below.data&^have | data, data, hasChunk(slot)}
		c.views = append(c.views, now)
		l.over += int64(bits.OnesCount64(now.data)) - int64(bits.OnesCount64(below.data))
		if now.chunk {
			l.Used += ChunkSize
			if l.children == 0 {
				l.Freed += ChunkSize
			}
		}
		// One of two chunks comes free when the record of a parent is merged into that of its only child.
		if p := below.layer; p != nil && p.ID == l.Parent && p.children == 1 && below.chunk && (now.chunk || below.own&^have == 0) {
			p.Freed += ChunkSize
		}
	}
}

// under is what a layer reads of a chunk without its own record: what the nearest layer with one does, or what
// is in the base.
func (c *census) under(l *counted, chunk uint32) chunkView {
	for _, v := range slices.Backward(c.views) {
		if l.sees(v.layer.layer) {
			return v
		}
	}
	if l.based && chunk < c.based {
		return chunkView{data: allGrains}
	}
	return chunkView{}
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

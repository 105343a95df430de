// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/bits"
	"slices"

	"weft.dev/weft/proto/block"
)

// Reclaim gives back the space of deleted layers, and returns when no more can be had: a layer under
// several others waits until one is left, and one that is pinned until it is not. I/O goes on meanwhile. If ctx ends, the next call goes on
// from there. What cannot be read keeps its layer, and nothing else; in the end Reclaim fails with the first
// such error. A damaged tree gives nothing back.
func (t *Tree) Reclaim(ctx context.Context) error {
	t.reclaiming.Lock()
	defer t.reclaiming.Unlock()
	kept := map[uint32]bool{} // layers of which something cannot be read
	var unread error          // the first
	for {
		doomed, child := t.nextDoomed(kept)
		if doomed == 0 {
			return unread
		}
		if child != 0 {
			err := t.merge(ctx, doomed, child)
			if errors.Is(err, ErrPinned) {
				continue
			}
			if err != nil {
				err = fmt.Errorf("merge layer %d of tree %v into %d: %w", doomed, t.place.Tree, child, err)
			}
			if t.unreadable(err) != nil {
				kept[doomed], unread = true, cmp.Or(unread, err)
				continue
			}
			if err != nil {
				return err
			}
		}
		err := t.move(doomed, func() error { return t.remove(doomed) })
		if err != nil && !errors.Is(err, ErrPinned) {
			return fmt.Errorf("remove layer %d of tree %v: %w", doomed, t.place.Tree, err)
		}
	}
}

// Reclaimable reports whether Reclaim has something to do.
func (t *Tree) Reclaimable() bool {
	doomed, _ := t.nextDoomed(nil)
	return doomed != 0
}

// nextDoomed chooses a deleted layer that has no child, or else one that has a single child and is not among
// those to be kept. Pinned layers are not chosen. It returns 0 if there is none.
func (t *Tree) nextDoomed(kept map[uint32]bool) (doomed, child uint32) {
	if t.damage != nil {
		return 0, 0
	}
	t.admin.Lock()
	defer t.admin.Unlock()
	pinned := t.pinned()
	for _, l := range t.super.layers {
		if l.State != StateDoomed || pinned[l.ID] {
			continue
		}
		switch children := t.super.children(l.ID); {
		case len(children) == 0:
			return l.ID, 0
		case len(children) == 1 && doomed == 0 && !kept[l.ID]:
			doomed, child = l.ID, children[0]
		}
	}
	return doomed, child
}

// merge makes the child have all that it sees in the doomed layer. At any moment, what the child
// sees is the same. After an error to read it goes on with the other chunks.
func (t *Tree) merge(ctx context.Context, doomed, child uint32) error {
	var unread *unreadError // the first
	for chunk := range t.chunksOfLayer(doomed) {
		if t.closing.Load() {
			return block.ErrGone
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		err := t.move(doomed, func() error { return t.mergeChunk(chunk, doomed, child) })
		if failed := t.unreadable(err); failed != nil {
			unread = cmp.Or(unread, failed)
		} else if err != nil {
			return err
		}
	}
	if unread != nil {
		return unread
	}
	return nil
}

// chunksOfLayer yields the chunks that a layer which gets no more records has records of, and their
// slots.
func (t *Tree) chunksOfLayer(id uint32) func(yield func(chunk, slot uint32) bool) {
	return func(yield func(chunk, slot uint32) bool) {
		for i, e := range *t.extents.Load() {
			for n := range e.blocks {
				b := &e.blocks[n]
				records := b.records.Load()
				if records == nil {
					continue
				}
				for j := range records {
					b.mu.Lock()
					layer, chunk := records[j].layer, records[j].chunk
					b.mu.Unlock()
					if layer == id && !yield(chunk, uint32(i<<slotShift+n*perBlock+j)) {
						return
					}
				}
			}
		}
	}
}

// mergeChunk does one chunk. The fewer grains are copied: the doomed layer's into the child's chunk,
// or the other way round.
func (t *Tree) mergeChunk(chunk, doomed, child uint32) error {
	s := t.stripe(chunk)
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.take(chunk, allGrains)
	defer t.drop(s, chunk, allGrains)
	from, into := t.own(t.layers[doomed], chunk), t.own(t.layers[child], chunk)
	if from == 0 {
		return nil
	}
	below := t.record(from).entry()
	var above entry
	if into != 0 {
		above = t.record(into).entry()
	}
	need := below.have &^ above.have
	if need == 0 {
		return nil // the record goes with its layer
	}
	next := entry{layer: child, chunk: chunk, have: above.have | need, zero: above.zero | below.zero&need}
	needed, kept := need&^below.zero, above.have&^above.zero
	slot, copied, source := into, needed, from
	if into == 0 || needed != 0 && (!hasChunk(into) || bits.OnesCount64(kept) < bits.OnesCount64(needed)) {
		slot, copied, source = from, kept, into
	}
	if slot == from && copied != 0 { // the child's chunk moves: nothing may be written to it meanwhile
		b.quiet = true
		defer func() {
			b.quiet = false
			t.retop(chunk)
		}()
		t.hideTop(chunk)
	}
	s.mu.Unlock()
	defer s.mu.Lock()
	if b.quiet {
		idle := make(chan struct{})
		t.whenIdle(into, func(uint32) { close(idle) })
		<-idle
	}
	if err := t.copyGrains(source, slot, copied); err != nil {
		return err
	}
	return t.replace(into, slot, next, false)
}

// copyGrains copies grains of a chunk into another one, durably enough for a record to name them.
func (t *Tree) copyGrains(from, to uint32, grains uint64) error {
	t.setBlank(to, false) // until they have their record, which may never be written
	for grains != 0 {
		m, a, b := run(grains)
		grains &^= m
		p := make([]byte, b-a)
		if err := block.ReadAt(t.below, p, t.data(from)+a); err != nil {
			return &unreadError{err}
		}
		io := &block.IO{Op: block.OpWrite, FUA: t.volatile, Off: t.data(to) + a, Len: b - a, Data: p}
		if err := block.Do(t.below, io); err != nil {
			return err
		}
	}
	return nil
}

// remove takes a doomed layer out of the tree, and frees its slots: once the superblock does not
// have it, its records mean nothing.
func (t *Tree) remove(id uint32) error {
	t.admin.Lock()
	defer t.admin.Unlock()
	err := t.change(func(s *super) error {
		gone, heir := s.byID(id), false
		for i := range s.layers {
			if l := &s.layers[i]; l.Parent == id {
				l.Parent, l.Base, heir = gone.Parent, gone.Base, true
			}
		}
		if gone.Base && !heir {
			s.base = nil
		}
		s.layers = slices.DeleteFunc(s.layers, func(l Layer) bool { return l.ID == id })
		return nil
	}, func() {})
	if err != nil {
		return err
	}
	for chunk, slot := range t.chunksOfLayer(id) {
		t.forget(slot, chunk)
	}
	return nil
}

// forget frees the slot of a record whose layer is gone.
func (t *Tree) forget(slot, chunk uint32) {
	s, b, r := t.stripe(chunk), t.block(slot), t.record(slot)
	s.mu.Lock()
	t.unlink(slot, chunk)
	b.mu.Lock()
	r.set(entry{seq: r.seq})
	b.mu.Unlock()
	t.retop(chunk)
	s.mu.Unlock()
	t.free(slot)
}

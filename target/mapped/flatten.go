// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/bits"

	"weft.dev/weft/proto/block"
)

// A clone is over the snapshot that it began as, and reads from there what it has not written itself. To
// be flattened, it gets all of that as its own:
//
//	base ── mon ── db1                   base ── mon ── db1
//	          \                   ──►
//	           tue ── c1                 tue ── c1             tue: a snapshot of c1
//
// What is copied is copied to the lowest of its layers, tue here: what that one reads does not change by
// it, so nothing does that is over it. Chunk after chunk, each grain that the layer does not decide is
// copied, if it is not zeroes. From then on, whatever is written, discarded or merged, what the layer does
// not decide of that chunk reads as zeroes. After the last chunk, one change of the superblock takes the
// parent away. Nothing is noted on the way: who begins again looks which grains the layer decides.

// Inheriting returns the id of the lowest of some objects' layers that is over a layer which is not
// theirs; 0 if there is none. A deleted layer is nobody's.
func Inheriting(layers []Layer, own func(object block.UUID) bool) uint32 {
	theirs, over := map[uint32]bool{}, map[uint32]bool{} // by layer: it is theirs, or it is over one that is
	for _, l := range layers {                           // by id: parents come first
		over[l.ID] = theirs[l.Parent] || over[l.Parent]
		theirs[l.ID] = l.State != StateDoomed && own(l.Object)
		if theirs[l.ID] && !over[l.ID] && l.Parent != 0 {
			return l.ID
		}
	}
	return 0
}

// Flatten copies to the layers of some objects what they read from others' layers, so that they need
// those no longer, while I/O goes on. The objects are those of a volume and of its snapshots; owned is asked
// whenever Flatten looks for a layer, since there may be others by then. Before each chunk pace is called
// with the bytes that are about to be copied, and with those that are left, these included. If Flatten is
// cut off, the next one goes on from there. It fails with ErrPinned at a layer that is pinned. What cannot be read does not keep it from what is behind; in
// the end it fails with the first such error. Without space it fails with an error that is block.ErrFull.
func (t *Tree) Flatten(ctx context.Context, owned func() func(object block.UUID) bool, pace func(ctx context.Context, n, left int64) error) error {
	for {
		t.admin.Lock()
		id := Inheriting(t.super.layers, owned())
		var err error
		if l := t.super.byID(id); l != nil {
			err = t.keepsParent(l)
		}
		t.admin.Unlock()
		if id == 0 {
			return nil
		}
		if err == nil {
			err = t.intact()
		}
		if err == nil {
			err = t.flatten(ctx, id, pace)
		}
		if err != nil {
			return fmt.Errorf("flatten layer %d of tree %v: %w", id, t.place.Tree, err)
		}
	}
}

// Kin is the layers of the tree, by id, as of their last change. It does not wait for the drive. They must not
// be changed.
func (t *Tree) Kin() []Layer { return *t.kin.Load() }

// unreadError is the failure to read what was to be copied.
type unreadError struct{ error }

func (e *unreadError) Unwrap() error { return e.error }

// unreadable returns the failure to read that an error is; nil if it is another one, or the tree has stopped.
func (t *Tree) unreadable(err error) *unreadError {
	if failed := (*unreadError)(nil); errors.As(err, &failed) && t.Err() == nil {
		return failed
	}
	return nil
}

// flatten makes all that a layer reads its own. If the layer is deleted meanwhile, there may be another
// one that needs it.
func (t *Tree) flatten(ctx context.Context, id uint32, pace func(ctx context.Context, n, left int64) error) error {
	chunks, left := t.inheritedBy(id)
	var unread *unreadError // the first
	for chunk := range chunks {
		n := t.inheritedIn(id, chunk)
		if n == 0 {
			continue
		}
		if err := pace(ctx, n, max(left, n)); err != nil {
			return err
		}
		err := t.flattenChunk(id, chunk)
		if failed := t.unreadable(err); failed != nil {
			unread = cmp.Or(unread, failed)
		} else if err != nil {
			return err
		}
		left -= n
	}
	if unread != nil {
		return unread
	}
	return t.part(id)
}

// inheritedBy returns how many chunks a layer has, and how many bytes it reads from others.
func (t *Tree) inheritedBy(id uint32) (chunks uint32, n int64) {
	s := t.stripe(0)
	s.mu.Lock()
	if l := t.layers[id]; l != nil {
		chunks = chunksOf(l.Size)
	}
	s.mu.Unlock()
	for chunk := range chunks {
		n += t.inheritedIn(id, chunk)
	}
	return chunks, n
}

// inheritedIn returns how many bytes of a chunk a layer reads from others.
func (t *Tree) inheritedIn(id, chunk uint32) int64 {
	s := t.stripe(chunk)
	s.mu.Lock()
	defer s.mu.Unlock()
	n := 0
	t.lenders(id, chunk, func(_ source, grains uint64) { n += bits.OnesCount64(grains) })
	return int64(n) * GrainSize
}

// lenders yields from where a layer reads the grains of a chunk that are data and not its own; nothing if
// the layer is deleted. The caller holds the stripe.
func (t *Tree) lenders(id, chunk uint32, yield func(from source, grains uint64)) {
	l := t.layers[id]
	if l == nil || l.State == StateDoomed || l.Parent == 0 {
		return
	}
	left := allGrains
	t.walk(l, chunk, func(slot uint32, r *record) bool {
		data := r.data.Load() & left
		left &^= r.have.Load()
		if data != 0 && r.layer != id {
			yield(source{slot, t.data(slot)}, data)
		}
		return left != 0
	})
	if inBase := t.fromBase(l, chunk, ^left); inBase != 0 {
		yield(source{at: t.baseAt(chunk)}, inBase)
	}
}

// lent is grains of a chunk that a layer reads from another one.
type lent struct {
	source
	grains uint64
}

// flattenChunk copies to a layer what it reads from others in one chunk.
func (t *Tree) flattenChunk(id, chunk uint32) error {
	t.reclaiming.Lock() // so the layer does not go meanwhile
	defer t.reclaiming.Unlock()
	if t.closing.Load() {
		return block.ErrGone
	}
	s := t.stripe(chunk)
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.take(chunk, allGrains)
	defer t.drop(s, chunk, allGrains)
	var all []lent
	t.lenders(id, chunk, func(from source, grains uint64) {
		if from.slot != 0 {
			t.record(from.slot).hold()
		}
		all = append(all, lent{from, grains})
	})
	s.mu.Unlock()
	data, grains, err := t.borrow(all)
	s.mu.Lock()
	if err != nil || grains == 0 {
		return err
	}
	slot, err := t.slotFor(id, s, b, chunk, false)
	if err != nil {
		return err
	}
	own := t.own(t.layers[id], chunk)
	s.mu.Unlock()
	defer s.mu.Lock()
	if err := t.writeGrains(slot, data, grains); err != nil {
		return err
	}
	return t.addGrains(id, slot, own, chunk, grains, false)
}

// borrow reads grains into their places in a chunk, and returns those that are not zeroes. It gives up
// the sources.
func (t *Tree) borrow(all []lent) (data []byte, grains uint64, err error) {
	data = make([]byte, ChunkSize)
	for _, from := range all {
		for left := from.grains; left != 0 && err == nil; {
			m, a, b := run(left)
			left &^= m
			if err = block.ReadAt(t.below, data[a:b], from.at+a); err != nil {
				err = &unreadError{err}
			}
		}
		t.releaseSource(from.slot)
		grains |= from.grains
	}
	for g := range int64(ChunkSize / GrainSize) {
		if grains>>g&1 == 1 && block.AllZero(data[g*GrainSize:][:GrainSize]) {
			grains &^= 1 << g
		}
	}
	return data, grains, err
}

// writeGrains writes grains of a chunk, durably enough for a record to name them.
func (t *Tree) writeGrains(slot uint32, data []byte, grains uint64) error {
	t.setBlank(slot, false) // until they have their record, which may never be written
	for grains != 0 {
		m, a, b := run(grains)
		grains &^= m
		io := &block.IO{Op: block.OpWrite, FUA: t.volatile, Off: t.data(slot) + a, Len: b - a, Data: data[a:b]}
		if err := block.Do(t.below, io); err != nil {
			return err
		}
	}
	return nil
}

// part takes the parent of a layer away, of which nothing is read any more.
func (t *Tree) part(id uint32) error {
	t.reclaiming.Lock()
	defer t.reclaiming.Unlock()
	if t.closing.Load() {
		return block.ErrGone
	}
	t.admin.Lock()
	defer t.admin.Unlock()
	l := t.super.byID(id)
	if l == nil || l.State == StateDoomed {
		return nil
	}
	if err := t.keepsParent(l); err != nil {
		return err
	}
	return t.change(func(s *super) error {
		s.byID(id).Parent = 0
		return nil
	}, func() {
		for _, leg := range t.legs { // some begin to look at zeroes of those that were below
			leg.lookAnew()
		}
	})
}

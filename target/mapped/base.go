// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"context"
	"fmt"
	"slices"

	"weft.dev/weft/proto/block"
)

// A leg that was on the drive before its tree, extent after extent, is the tree's base:
//
//	base of the tree ── mon ── db1     what neither mon nor db1 has is in the base
//
// One layer, without a parent, is over the base, and what is in the base belongs to it. While that
// layer is frozen, the base does not change. While it is a leg's head, which then is the only one that
// sees the base, the leg writes to the base in place. So a tree that has just been made over a leg, or
// whose layer over the base has no records any more, holds in the base what the leg is: without the
// tree, it reads the same.

// FormatOver makes a tree of a leg that is there already, and opens it. The leg's bytes are in the
// extents of p.Base, in this order, and are neither read nor written; its size is not more. A tree
// whose FormatOver was cut off is not opened (ErrUnfinished), and the leg is as it was.
func FormatOver(p Place, object block.UUID, size block.Size, note []byte) (*Tree, error) {
	err := p.check()
	if err == nil && (len(p.Base) == 0 || size > baseSize(p.Base)) {
		err = fmt.Errorf("a base of %v for %v: %w", baseSize(p.Base), size, block.ErrRange)
	}
	if err != nil {
		return nil, fmt.Errorf("format tree %v over a leg: %w", p.Tree, err)
	}
	t := newTree(p)
	l := Layer{ID: 1, State: StateOpen, Object: object, Size: size, Base: true, Note: slices.Clone(note)}
	if err := t.format(l); err != nil {
		return nil, fmt.Errorf("format tree %v over a leg: %w", p.Tree, err)
	}
	return t, nil
}

// LeaveBase deletes the leg that the base belongs to, unless other objects are over the base: needed. Once
// Reclaim has given back what was deleted, Base is empty, and the extents are not read any more. It can be
// repeated. The leg must not be open.
func (t *Tree) LeaveBase(leg block.UUID) (needed bool, err error) {
	t.admin.Lock()
	over := map[uint32]bool{}
	for _, l := range t.super.layers { // by id: parents come first
		over[l.ID] = l.Base || over[l.Parent]
		needed = needed || over[l.ID] && l.State != StateDoomed && l.Object != leg
	}
	t.admin.Unlock()
	if needed {
		return true, nil
	}
	return false, t.Delete(leg)
}

func baseSize(extents []uint32) block.Size { return block.Size(len(extents)) * block.ExtentSize }

// Base returns the extents of the base, in the order of its bytes; none if no layer needs it.
func (t *Tree) Base() []uint32 {
	t.admin.Lock()
	defer t.admin.Unlock()
	return slices.Clone(t.super.base)
}

// GrowBase gives the base more extents, behind its own, which must hold zeroes. extents are all that it
// is to have. It can be repeated; a base that no layer needs does not grow.
func (t *Tree) GrowBase(extents []uint32) error {
	p := t.place
	p.Base = extents
	if err := p.check(); err != nil {
		return fmt.Errorf("grow the base of tree %v: %w", t.place.Tree, err)
	}
	if err := t.growBase(extents); err != nil {
		return fmt.Errorf("grow the base of tree %v: %w", t.place.Tree, err)
	}
	return nil
}

func (t *Tree) growBase(extents []uint32) error {
	t.admin.Lock()
	defer t.admin.Unlock()
	known := t.super.base
	switch {
	case len(known) == 0 || len(extents) <= len(known):
		return nil
	case !slices.Equal(known, extents[:len(known)]):
		return fmt.Errorf("it begins with the extents %v, not %v: %w", known, extents, block.ErrRange)
	}
	for _, leg := range t.legs { // see barrier
		leg.writes.shut()
		defer leg.writes.open()
	}
	return t.change(func(s *super) error { s.base = slices.Clone(extents); return nil }, func() {})
}

// overBase reports whether what no record decides of a chunk is in the base, as l sees it. The caller
// holds a stripe, as for all that follows.
func (t *Tree) overBase(l *layer, chunk uint32) bool {
	return l.based && int(chunk/chunkCount) < len(t.base)
}

// fromBase is the grains of a chunk that l sees in the base, if records decide those in seen.
func (t *Tree) fromBase(l *layer, chunk uint32, seen uint64) uint64 {
	if !t.overBase(l, chunk) {
		return 0
	}
	return ^seen
}

// baseAt is where the bytes of a chunk in the base begin on the drive.
func (t *Tree) baseAt(chunk uint32) int64 {
	return t.base[chunk/chunkCount] + int64(chunk%chunkCount)*ChunkSize
}

// direct is those of the grains that the leg has in a base of its own: they are changed in place. The
// caller has taken them, so they stay there.
func (l *Leg) direct(chunk uint32, grains uint64) uint64 {
	t := l.tree
	if !l.layer.Base || l.layer.State != StateOpen || !t.overBase(l.layer, chunk) {
		return 0
	}
	if own := t.own(l.layer, chunk); own != 0 {
		return grains &^ t.record(own).have.Load()
	}
	return grains
}

// mixedError says that a part of a range is in the leg's own base: these grains.
type mixedError struct{ direct uint64 }

func (e *mixedError) Error() string {
	return fmt.Sprintf("grains %#x of the range are in the base", e.direct)
}

// until is the end of the part of a range of the chunk that begins at from and is all in the base, or
// all not.
func (e *mixedError) until(from, to int64) int64 {
	at := from/GrainSize + 1
	for at*GrainSize < to && e.direct>>at&1 == e.direct>>(from/GrainSize)&1 {
		at++
	}
	return min(at*GrainSize, to)
}

// zeroBase does a discard, or a write of zeroes, to grains of a chunk in the base.
func (t *Tree) zeroBase(at int64, grains uint64, io *block.IO) error {
	for grains != 0 {
		m, a, b := run(grains)
		grains &^= m
		if err := block.Do(t.below, &block.IO{Op: io.Op, FUA: io.FUA, Unmap: io.Unmap, Off: at + a, Len: b - a}); err != nil {
			return err
		}
	}
	return nil
}

// releaseSource is release, unless the source is the base.
func (t *Tree) releaseSource(slot uint32) {
	if slot != 0 {
		t.release(slot)
	}
}

// Settling says how far a leg is from being in the base alone.
type Settling struct {
	// Alone says that the leg is all that there is in the tree, and is over a base that is as large as
	// the leg. Only then Settle can do something.
	Alone bool
	// Left is the space of the chunks that are not in the base yet.
	Left block.Size
	// Plain says that the base holds all of the leg: without the tree, it is the same.
	Plain bool
}

// Settling says how far a leg is from being in the base alone; a zero leg is any that has the tree to
// itself. That it is plain stays so until a snapshot is taken. It does not wait for the drive.
func (t *Tree) Settling(leg block.UUID) (s Settling) {
	t.stripes[0].mu.Lock()
	defer t.stripes[0].mu.Unlock()
	l := t.alone(leg)
	if l == nil {
		return s
	}
	return Settling{Alone: true, Left: block.Size(l.chunks.Load()) * ChunkSize, Plain: t.settled}
}

// alone returns the layer of a leg that has the tree to itself, with a base that is large enough; nil
// if it has not, or the tree is damaged. The caller holds a stripe.
func (t *Tree) alone(leg block.UUID) *layer {
	if len(t.layers) != 1 || t.damage != nil {
		return nil
	}
	for _, l := range t.layers {
		if l.Base && l.State == StateOpen && (leg.IsZero() || l.Object == leg) && l.Size <= block.Size(len(t.base))*block.ExtentSize {
			return l
		}
	}
	return nil
}

// Settle copies what a leg has in chunks of its own to its place in the base, and frees the chunks,
// while I/O goes on. Before each chunk it calls pace with the bytes that it is about to copy. If it is
// cut off, the next call goes on from there. ErrState means that the leg is not alone in the tree, or
// is not any more.
func (t *Tree) Settle(ctx context.Context, leg block.UUID, pace func(context.Context, int64) error) error {
	t.reclaiming.Lock()
	defer t.reclaiming.Unlock()
	t.barrier(leg)
	for {
		t.lockAll() // a record that moves to another slot is in no chain for a moment
		l := t.alone(leg)
		t.settled = l != nil && l.records.Load() == 0
		done := t.settled
		t.unlockAll()
		switch {
		case l == nil:
			return fmt.Errorf("settle leg %v of tree %v: %w", leg, t.place.Tree, ErrState)
		case done:
			return nil
		}
		for chunk := range t.chunksOfLayer(l.ID) { // a write may move a record to a slot that was looked at
			if err := t.settleChunk(ctx, chunk, leg, pace); err != nil {
				return fmt.Errorf("settle leg %v of tree %v: %w", leg, t.place.Tree, err)
			}
		}
	}
}

// barrier waits for the writes to a leg that are under way. Some may have begun while the leg was over a
// snapshot, and will have records; those that begin once it is alone have none. A tree in which nothing
// is reclaimed gets no leg that is alone, unless the base grows.
func (t *Tree) barrier(leg block.UUID) {
	t.admin.Lock()
	defer t.admin.Unlock()
	if l := t.super.layer(leg); l != nil {
		if open := t.openLeg(l.ID); open != nil {
			open.writes.shut()
			open.writes.open()
		}
	}
}

// settleChunk does one chunk. Until its record is gone, durably, the record decides what is read, so
// whatever a cut leaves in the base is not seen.
func (t *Tree) settleChunk(ctx context.Context, chunk uint32, leg block.UUID, pace func(context.Context, int64) error) error {
	if t.closing.Load() {
		return block.ErrGone
	}
	if err := pace(ctx, ChunkSize); err != nil {
		return err
	}
	s := t.stripe(chunk)
	s.mu.Lock()
	defer s.mu.Unlock()
	b := s.take(chunk, allGrains)
	defer t.drop(s, chunk, allGrains)
	l := t.alone(leg)
	if l == nil {
		return ErrState
	}
	own := t.own(l, chunk)
	if own == 0 {
		return nil
	}
	b.quiet = true // writes to what the leg has do not ask: they must have ended, and none may begin
	defer func() {
		b.quiet = false
		t.retop(chunk)
	}()
	t.hideTop(chunk)
	to := t.baseAt(chunk)
	s.mu.Unlock()
	defer s.mu.Lock()
	idle := make(chan struct{})
	t.whenIdle(own, func(uint32) { close(idle) })
	<-idle
	if err := t.settleGrains(own, to); err != nil {
		return err
	}
	// With FUA: a later write to the base must not be lost behind a record that comes back.
	return t.clearSlot(own, chunk, true)
}

// settleGrains makes the base hold what the record of a slot decides, durably.
func (t *Tree) settleGrains(slot uint32, to int64) error {
	r := t.record(slot)
	have, data := r.have.Load(), r.data.Load()
	for left := data; left != 0; {
		m, a, b := run(left)
		left &^= m
		p := make([]byte, b-a)
		if err := block.ReadAt(t.below, p, t.data(slot)+a); err != nil {
			return err
		}
		if err := block.WriteAt(t.below, p, to+a); err != nil {
			return err
		}
	}
	if err := t.zeroBase(to, have&^data, &block.IO{Op: block.OpWriteZeroes}); err != nil {
		return err
	}
	if t.volatile {
		return t.flush()
	}
	return nil
}

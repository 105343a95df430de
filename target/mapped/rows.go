// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"weft.dev/weft/proto/block"
)

// Somebody else than the tree can read a layer that never changes, as long as what it consists of stays where it
// is. A pin sees to that: until it is let go, neither the layer nor any under it is merged or removed, and so none
// of their chunks gets another content. Layers over it live on as usual, since they only have chunks of their own.
//
// Pins are in memory: who reads the drive by itself pins the layer again after each opening of the tree, before
// space is reclaimed.

// ErrTooManyRows is returned for a layer whose data is in too many pieces.
var ErrTooManyRows = errors.New("its data is in too many pieces")

// Row is a range of a layer. It begins where the one before it ends.
type Row struct {
	Length int64
	At     int64 // where its bytes are on the drive
	Zero   bool  // it has none: it reads as zeroes
}

// Pin keeps what a snapshot holds, or a leg that is never written again, in its place until Unpin. Until then it
// cannot be opened or deleted: ErrInUse. It must not be open (ErrInUse), nor consist of extents that were there
// before the tree (ErrState), which are written when the tree goes. It is pinned once, however often this is called.
func (t *Tree) Pin(object block.UUID) error {
	if fresh, err := t.pin(object); err != nil || !fresh {
		if err != nil {
			err = fmt.Errorf("pin %v: %w", object, err)
		}
		return err
	}
	t.moving.Lock() // the chunk that is being merged, or the layer that is being removed, was chosen before
	defer t.moving.Unlock()
	if !t.volatile {
		return nil
	}
	if err := t.flush(); err != nil { // records of chunks that were copied to a layer may be in the drive's cache alone
		t.Unpin(object)
		return fmt.Errorf("pin %v: %w", object, err)
	}
	return nil
}

// pin is Pin, without waiting for what moves. It returns false if the object was pinned already.
func (t *Tree) pin(object block.UUID) (fresh bool, err error) {
	t.admin.Lock()
	defer t.admin.Unlock()
	l := t.super.layer(object)
	switch {
	case l == nil:
		return false, ErrUnknown
	case t.openLeg(l.ID) != nil:
		return false, ErrInUse
	case t.basedNow(l.ID):
		return false, ErrState
	case t.isPinned(object):
		return false, nil
	}
	t.pins[object] = l.ID
	return true, nil
}

// basedNow reports whether a layer sees the base. The caller holds admin.
func (t *Tree) basedNow(id uint32) bool {
	s := t.stripe(0)
	s.mu.Lock()
	defer s.mu.Unlock()
	return t.layers[id].based
}

// Unpin lets go of a layer. Reclaimable says then whether there is something to be given back.
func (t *Tree) Unpin(object block.UUID) {
	t.admin.Lock()
	defer t.admin.Unlock()
	delete(t.pins, object)
}

// Pinned returns what is pinned.
func (t *Tree) Pinned() []block.UUID {
	t.admin.Lock()
	defer t.admin.Unlock()
	return slices.Collect(maps.Keys(t.pins))
}

// isPinned reports whether an object is pinned. The caller holds admin.
func (t *Tree) isPinned(object block.UUID) bool {
	_, is := t.pins[object]
	return is
}

// pinned returns the layers of which nothing may move: those that are pinned, and all under them. The caller
// holds admin.
func (t *Tree) pinned() map[uint32]bool {
	all := map[uint32]bool{}
	for _, id := range t.pins {
		for l := t.super.byID(id); l != nil && !all[l.ID]; l = t.super.byID(l.Parent) {
			all[l.ID] = true
		}
	}
	return all
}

// ErrPinned ends a merge, since a layer over it was pinned, and the flattening of a layer that is.
var ErrPinned = errors.New("layer is pinned")

// keepsParent says why a layer may not be parted from those under it: then the pin would protect it alone. After a
// freeze a pinned object is another layer than it was, and will be pinned as that one. The caller holds admin.
func (t *Tree) keepsParent(l *Layer) error {
	if t.isPinned(l.Object) || t.pinned()[l.ID] {
		return ErrPinned
	}
	return nil
}

// move does something that gives chunks of a doomed layer another content, or another owner.
func (t *Tree) move(doomed uint32, do func() error) error {
	t.moving.Lock()
	defer t.moving.Unlock()
	t.admin.Lock()
	pinned := t.pinned()[doomed]
	t.admin.Unlock()
	if pinned {
		return ErrPinned
	}
	return do()
}

// Rows returns the first size bytes of a layer that is pinned: in order, as few rows as possible, and at most so
// many (ErrTooManyRows).
func (t *Tree) Rows(object block.UUID, size block.Size, most int) ([]Row, error) {
	rows, err := t.rows(object, size, most)
	if err != nil {
		return nil, fmt.Errorf("rows of %v: %w", object, err)
	}
	return rows, nil
}

func (t *Tree) rows(object block.UUID, size block.Size, most int) ([]Row, error) {
	t.admin.Lock()
	id, pinned := t.pins[object]
	l := t.super.byID(id)
	t.admin.Unlock()
	switch {
	case !pinned:
		return nil, ErrState
	case t.Err() != nil:
		return nil, t.Err()
	case t.damage != nil && t.damage.Unknown[object] > 0:
		return nil, t.damage
	case size == 0 || size > l.Size || size%unit != 0:
		return nil, fmt.Errorf("%v of %v: %w", size, l.Size, block.ErrRange)
	}
	var rows []Row
	for chunk := range chunksOf(size) {
		left := int64(size) - int64(chunk)*ChunkSize
		for _, r := range t.rowsOf(id, chunk, min(left, ChunkSize)) {
			rows = join(rows, r)
		}
		if len(rows) > most {
			return nil, fmt.Errorf("%w: more than %d", ErrTooManyRows, most)
		}
	}
	return rows, nil
}

// rowsOf returns the first size bytes of a chunk.
func (t *Tree) rowsOf(id, chunk uint32, size int64) (rows []Row) {
	s := t.stripe(chunk)
	s.mu.Lock()
	defer s.mu.Unlock()
	var at [ChunkSize / GrainSize]Row
	for i := range at {
		at[i].Zero = true
	}
	open := uint64(allGrains)
	t.walk(t.layers[id], chunk, func(slot uint32, r *record) bool {
		for grains := r.data.Load() & open; grains != 0; {
			m, from, to := run(grains)
			grains &^= m
			for off := from; off < to; off += GrainSize {
				at[off/GrainSize] = Row{At: t.data(slot) + off}
			}
		}
		open &^= r.have.Load()
		return open != 0
	})
	for i := range at {
		at[i].Length = min(GrainSize, size-int64(i)*GrainSize)
		if at[i].Length <= 0 {
			break
		}
		rows = join(rows, at[i])
	}
	return rows
}

// join appends a row, or makes the last one longer.
func join(rows []Row, r Row) []Row {
	if n := len(rows) - 1; n >= 0 && rows[n].Zero == r.Zero && (r.Zero || rows[n].At+rows[n].Length == r.At) {
		rows[n].Length += r.Length
		return rows
	}
	return append(rows, r)
}

// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"fmt"
	"maps"
	"slices"
	"sync/atomic"

	"weft.dev/weft/proto/block"
)

// chunksOf is how many chunks a layer of a size has.
func chunksOf(size block.Size) uint32 { return uint32((size + ChunkSize - 1) / ChunkSize) }

func checkLayer(l Layer) error {
	switch {
	case l.Size == 0 || l.Size > MaxSize || l.Size%unit != 0:
		return fmt.Errorf("size %v: %w", l.Size, block.ErrRange)
	case len(l.Note) > MaxNote:
		return fmt.Errorf("note of %d bytes, at most %d: %w", len(l.Note), MaxNote, block.ErrRange)
	case l.Object.IsZero():
		return fmt.Errorf("object without an id: %w", ErrUnknown)
	}
	return nil
}

// relate makes look-ups follow the superblock. The caller holds all stripes, or is the only one who
// knows the tree.
func (t *Tree) relate() {
	children, before := map[uint32][]*layer{}, maps.Clone(t.layers)
	t.kin.Store(&t.super.layers)
	clear(t.layers)
	largest := uint32(0)
	for _, l := range t.super.layers {
		x := &layer{Layer: l, chunks: new(atomic.Int64), records: new(atomic.Int64)}
		if was := before[l.ID]; was != nil {
			x.chunks, x.records = was.chunks, was.records
		}
		t.layers[l.ID] = x
		children[l.Parent] = append(children[l.Parent], x)
		largest = max(largest, chunksOf(l.Size))
	}
	n := uint32(0)
	var number func(parent uint32)
	number = func(parent uint32) {
		for _, l := range children[parent] {
			n++
			l.in = n
			l.based = l.Base || parent != 0 && t.layers[parent].based
			number(l.ID)
			l.out = n
		}
	}
	number(0)
	if int(largest) > len(t.first) {
		t.first = append(t.first, make([]uint32, int(largest)-len(t.first))...)
	}
	for _, leg := range t.legs {
		leg.layer = t.layers[leg.layer.ID]
	}
	for i := range t.stripes {
		t.stripes[i].far = nil
	}
	t.settled = false
	t.base = make([]int64, len(t.super.base))
	for i, e := range t.super.base {
		t.base[i] = t.place.offset(e)
	}
}

// change commits what edit makes of the superblock, shows it to look-ups, and then calls also, which
// changes how open legs look. The caller holds admin.
func (t *Tree) change(edit func(*super) error, also func()) error {
	if err := t.intact(); err != nil {
		return err
	}
	return t.changeDamaged(edit, also)
}

// changeDamaged is change for what is right in a damaged tree as well.
func (t *Tree) changeDamaged(edit func(*super) error, also func()) error {
	next := t.super.clone()
	if err := edit(next); err != nil {
		return err
	}
	if err := t.commit(next); err != nil {
		return err
	}
	t.lockAll()
	defer t.unlockAll()
	t.relate()
	also()
	return nil
}

func (s *super) add(l Layer) error {
	if err := checkLayer(l); err != nil {
		return err
	}
	if s.layer(l.Object) != nil {
		return fmt.Errorf("%v: %w", l.Object, ErrExists)
	}
	l.ID, l.Note = s.next, slices.Clone(l.Note)
	s.next++
	s.layers = append(s.layers, l)
	return nil
}

// Layers returns the layers of the tree, by id.
func (t *Tree) Layers() []Layer {
	t.admin.Lock()
	defer t.admin.Unlock()
	all := slices.Clone(t.super.layers)
	for i := range all {
		all[i].Note = slices.Clone(all[i].Note)
	}
	return all
}

// Layer returns the layer of a leg or a snapshot; false if the tree does not have it.
func (t *Tree) Layer(object block.UUID) (Layer, bool) {
	t.admin.Lock()
	defer t.admin.Unlock()
	l := t.super.layer(object)
	if l == nil {
		return Layer{}, false
	}
	found := *l
	found.Note = slices.Clone(l.Note)
	return found, true
}

// Freeze makes what a leg holds a snapshot, and gives the leg a new head over it. It holds the leg's
// writes back while it takes place, so every write that was acknowledged before is in the snapshot,
// durably even on a drive with a volatile cache, and every write begun after its end is not. It is done already if the leg's head is over such a
// snapshot. ErrUnknown, ErrExists and ErrState change nothing.
func (t *Tree) Freeze(leg, snapshot block.UUID, note []byte) error {
	t.admin.Lock()
	defer t.admin.Unlock()
	head := t.super.layer(leg)
	if head == nil || head.State != StateOpen {
		return fmt.Errorf("freeze %v: no such leg: %w", leg, ErrUnknown)
	}
	if s := t.super.layer(snapshot); s != nil && s.State == StateFrozen && s.ID == head.Parent {
		return nil
	}
	open := t.openLeg(head.ID)
	if open != nil {
		open.writes.shut()
		defer open.writes.open()
	}
	id, next := head.ID, t.super.next
	err := t.change(func(s *super) error {
		l := s.byID(id)
		fresh := Layer{Parent: id, State: StateOpen, Object: leg, Size: l.Size, Note: l.Note}
		l.State, l.Object, l.Frozen, l.Note = StateFrozen, snapshot, t.seq.Load(), slices.Clone(note)
		if other := t.super.layer(snapshot); other != nil {
			return fmt.Errorf("%v: %w", snapshot, ErrExists)
		}
		if err := checkLayer(*l); err != nil {
			return err
		}
		return s.add(fresh)
	}, func() {
		if open != nil {
			open.moveTo(next)
		}
	})
	if err != nil {
		return fmt.Errorf("freeze %v as %v: %w", leg, snapshot, err)
	}
	return nil
}

// Clone makes a new leg that begins as a snapshot. What is beyond the snapshot's end reads as
// zeroes; a leg cannot be smaller than its snapshot. ErrUnknown, ErrExists and ErrState change
// nothing.
func (t *Tree) Clone(snapshot, leg block.UUID, size block.Size, note []byte) error {
	t.admin.Lock()
	defer t.admin.Unlock()
	err := t.change(func(s *super) error { return s.addOver(snapshot, leg, size, note) }, func() {})
	if err != nil {
		return fmt.Errorf("clone %v as %v: %w", snapshot, leg, err)
	}
	return nil
}

func (s *super) addOver(snapshot, leg block.UUID, size block.Size, note []byte) error {
	from := s.layer(snapshot)
	switch {
	case from == nil:
		return ErrUnknown
	case from.State != StateFrozen:
		return fmt.Errorf("%w: %v", ErrState, from.State)
	case size < from.Size:
		return fmt.Errorf("%v is less than the snapshot's %v: %w", size, from.Size, block.ErrRange)
	}
	return s.add(Layer{Parent: from.ID, State: StateOpen, Object: leg, Size: size, Note: note})
}

// Create makes an empty leg in the tree.
func (t *Tree) Create(leg block.UUID, size block.Size, note []byte) error {
	t.admin.Lock()
	defer t.admin.Unlock()
	err := t.change(func(s *super) error { return s.add(Layer{State: StateOpen, Object: leg, Size: size, Note: note}) }, func() {})
	if err != nil {
		return fmt.Errorf("create %v: %w", leg, err)
	}
	return nil
}

// Seal makes a leg a snapshot: what it holds is durable, also on a drive with a volatile cache, and
// never changes. Unlike Freeze it leaves no head. The leg must be closed (ErrInUse). It is done already
// if the object is a snapshot. ErrUnknown and ErrInUse change nothing.
func (t *Tree) Seal(object block.UUID) error {
	t.admin.Lock()
	defer t.admin.Unlock()
	l := t.super.layer(object)
	switch {
	case l == nil:
		return fmt.Errorf("seal %v: %w", object, ErrUnknown)
	case l.State == StateFrozen:
		return nil
	case t.openLeg(l.ID) != nil:
		return fmt.Errorf("seal %v: %w", object, ErrInUse)
	}
	id := l.ID
	err := t.change(func(s *super) error { // the superblock is written after a flush
		l := s.byID(id)
		l.State, l.Frozen = StateFrozen, t.seq.Load()
		return nil
	}, func() {})
	if err != nil {
		return fmt.Errorf("seal %v: %w", object, err)
	}
	return nil
}

// Restore makes a leg what one of the tree's snapshots is; what is beyond the snapshot's end reads as
// zeroes. What was written since is deleted; freeze it first to keep it. Writes are held back while it
// takes place, and reads that are under way find the one or the other. ErrUnknown and ErrState change
// nothing.
func (t *Tree) Restore(leg, snapshot block.UUID) error {
	t.admin.Lock()
	defer t.admin.Unlock()
	var open *Leg
	if head := t.super.layer(leg); head != nil {
		open = t.openLeg(head.ID)
	}
	if open != nil {
		open.writes.shut()
		defer open.writes.open()
	}
	next := t.super.next
	err := t.change(func(s *super) error {
		head, from := s.layer(leg), s.layer(snapshot)
		switch {
		case head == nil || from == nil:
			return ErrUnknown
		case head.State != StateOpen || from.State != StateFrozen:
			return ErrState
		}
		head.State = StateDoomed
		return s.add(Layer{Parent: from.ID, State: StateOpen, Object: leg, Size: max(head.Size, from.Size), Note: head.Note})
	}, func() {
		if open != nil {
			open.restored.Add(1)
			open.moveTo(next)
			open.lookAnew() // what was over the snapshot must not be found
		}
	})
	if err != nil {
		return fmt.Errorf("restore %v to %v: %w", leg, snapshot, err)
	}
	return nil
}

// Grow makes a leg larger; what is new reads as zeroes. A leg never shrinks: a smaller size changes
// nothing.
func (t *Tree) Grow(leg block.UUID, size block.Size) error {
	t.admin.Lock()
	defer t.admin.Unlock()
	head := t.super.layer(leg)
	if head != nil && head.State == StateOpen && head.Size >= size {
		return nil
	}
	err := t.change(func(s *super) error {
		head := s.layer(leg)
		if head == nil || head.State != StateOpen {
			return ErrUnknown
		}
		head.Size = size
		return checkLayer(*head)
	}, func() {
		if open := t.openLeg(head.ID); open != nil {
			open.resize(size)
		}
	})
	if err != nil {
		return fmt.Errorf("grow %v to %v: %w", leg, size, err)
	}
	return nil
}

// Delete deletes a leg or a snapshot. Reclaim gives its space back: all of it if nothing is over it,
// else what a single layer over it does not need. It must be closed and not pinned (ErrInUse); one that
// is not there is no error.
func (t *Tree) Delete(object block.UUID) error {
	t.admin.Lock()
	defer t.admin.Unlock()
	l := t.super.layer(object)
	if l == nil {
		return nil
	}
	if t.openLeg(l.ID) != nil || t.isPinned(object) {
		return fmt.Errorf("delete %v: %w", object, ErrInUse)
	}
	id := l.ID
	if err := t.changeDamaged(func(s *super) error { s.byID(id).State = StateDoomed; return nil }, func() {}); err != nil {
		return fmt.Errorf("delete %v: %w", object, err)
	}
	return nil
}

// openLeg returns the open leg of a layer. The caller holds admin.
func (t *Tree) openLeg(id uint32) *Leg {
	for _, l := range t.legs {
		if l.layer.ID == id {
			return l
		}
	}
	return nil
}

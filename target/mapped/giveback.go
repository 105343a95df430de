// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"fmt"
	"slices"

	"weft.dev/weft/proto/block"
)

// GiveBack gives up extents that hold nothing, as long as keep stays free, and returns those that the
// tree has afterwards: the home extent first. Only what is not among them may get another owner, and
// the drive's label should then say so; if it does not, the next Open takes them again. An error of
// the drive stops the tree.
func (t *Tree) GiveBack(keep block.Size) (has []uint32, err error) {
	t.admin.Lock()
	defer t.admin.Unlock()
	if err := t.Err(); err != nil {
		return nil, fmt.Errorf("give back extents of tree %v: %w", t.place.Tree, err)
	}
	if t.Space().Pending > 0 {
		if err := t.flush(); err != nil {
			return nil, fmt.Errorf("give back extents of tree %v: %w", t.place.Tree, err)
		}
	}
	t.preparing.Lock() // a chunk that is being zeroed is nobody's, and its extent stays
	given := t.takeEmpty(keep)
	t.preparing.Unlock()
	if len(given) > 0 {
		next := t.super.clone()
		next.extents = slices.DeleteFunc(next.extents, func(e uint32) bool { return slices.Contains(given, e) })
		if err := t.commit(next); err != nil { // the tree has stopped
			return nil, fmt.Errorf("give back extents of tree %v: %w", t.place.Tree, err)
		}
		if err := t.wipe(given); err != nil {
			return nil, fmt.Errorf("give back extents of tree %v: %w", t.place.Tree, err)
		}
	}
	home := t.place.home()
	others := slices.DeleteFunc(slices.Clone(t.super.extents), func(e uint32) bool { return e == home })
	return append([]uint32{home}, others...), nil
}

// Wipe makes the extents of a tree nobody's: nothing on them says any more that there was a tree. It
// must not be open. A Wipe that was cut off is repeated; the tree may not be there any more then.
func Wipe(p Place) error {
	if err := p.check(); err != nil {
		return fmt.Errorf("wipe tree %v: %w", p.Tree, err)
	}
	at := []int64{p.offset(p.home()) + superAt[0], p.offset(p.home()) + superAt[1]}
	for _, e := range p.Extents {
		at = append(at, p.offset(e))
	}
	for _, off := range at {
		if err := block.WriteAt(p.Device, make([]byte, unit), off); err != nil {
			return fmt.Errorf("wipe tree %v: %w", p.Tree, err)
		}
	}
	if err := block.Flush(p.Device); err != nil {
		return fmt.Errorf("wipe tree %v: %w", p.Tree, err)
	}
	return nil
}

// wipe clears the heads of extents, so that nobody takes them for a tree's.
func (t *Tree) wipe(extents []uint32) error {
	for _, e := range extents {
		if err := block.WriteAt(t.below, make([]byte, unit), t.place.offset(e)); err != nil {
			return t.fail(fmt.Errorf("wipe the head of extent %d: %w", e, err))
		}
	}
	return t.flush()
}

// takeEmpty takes all slots of extents without data, so that nobody else gets one, and returns the
// numbers of these extents. The caller holds admin.
func (t *Tree) takeEmpty(keep block.Size) (given []uint32) {
	s, all := &t.space, *t.extents.Load()
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := len(all) - 1; i >= 0; i-- {
		e := all[i]
		if e.gone || e.number == t.place.home() || s.all(i) != everySlot || block.Size(s.chunks-usable(false))*ChunkSize < keep {
			continue
		}
		s.free[i] = [slotCount / 64]uint64{}
		s.ready = slices.DeleteFunc(s.ready, func(slot uint32) bool { return int(slot>>slotShift) == i })
		s.chunks -= usable(false)
		s.total -= usable(false)
		e.gone = true
		given = append(given, e.number)
	}
	return given
}

// everySlot is the free slots of an extent, other than the home extent, that holds nothing.
var everySlot = func() (free [slotCount / 64]uint64) {
	for i := range free {
		free[i] = ^uint64(0)
	}
	free[0] &^= 1
	return free
}()

// again uses the place in memory of an extent that was given back for another one; false if there is
// none. Slots keep their numbers, and a reader that is late may still look at their records.
func (t *Tree) again(number uint32) (i int, ok bool) {
	for i, e := range *t.extents.Load() {
		if !e.gone {
			continue
		}
		for b := range e.blocks {
			block := &e.blocks[b]
			block.mu.Lock()
			if records := block.records.Load(); records != nil {
				for j := range records {
					records[j].set(entry{})
				}
			}
			block.mu.Unlock()
		}
		e.number, e.at, e.gone = number, t.place.offset(number), false
		t.space.mu.Lock()
		t.space.total += usable(false)
		t.space.mu.Unlock()
		return i, true
	}
	return 0, false
}

// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"golang.org/x/sync/errgroup"

	"weft.dev/weft/proto/block"
)

// Format makes a tree with one open layer, which is empty, and opens it. What the extents held
// before is not read; a tree whose Format was cut off is not opened (ErrUnfinished).
func Format(p Place, object block.UUID, size block.Size, note []byte) (*Tree, error) {
	if err := p.check(); err != nil {
		return nil, fmt.Errorf("format tree %v: %w", p.Tree, err)
	}
	if len(p.Base) > 0 {
		return nil, fmt.Errorf("format tree %v: a base: %w", p.Tree, block.ErrUnsupported)
	}
	t := newTree(p)
	if err := t.format(Layer{ID: 1, State: StateOpen, Object: object, Size: size, Note: slices.Clone(note)}); err != nil {
		return nil, fmt.Errorf("format tree %v: %w", p.Tree, err)
	}
	return t, nil
}

func (t *Tree) format(l Layer) error {
	if err := checkLayer(l); err != nil {
		return err
	}
	// Until the second copy of the superblock begins with something else than zeroes, the tree was
	// never finished.
	home := t.place.offset(t.place.home())
	for i := range superAt {
		if err := block.WriteAt(t.below, make([]byte, unit), home+superAt[i]); err != nil {
			return err
		}
	}
	if err := block.Flush(t.below); err != nil {
		return err
	}
	next := &super{next: l.ID + 1, extents: slices.Sorted(slices.Values(t.place.Extents)), layers: []Layer{l}, base: slices.Clone(t.place.Base)}
	for _, e := range next.extents {
		if err := t.initialize(e); err != nil {
			return err
		}
	}
	if err := t.commit(next); err != nil {
		return err
	}
	for _, e := range next.extents {
		t.addExtent(e)
	}
	t.fill()
	t.relate()
	return nil
}

// initialize writes the head and the empty tables of an extent. The superblock's commit, which
// flushes first, takes it into use.
func (t *Tree) initialize(extent uint32) error {
	at := t.place.offset(extent)
	for _, table := range tableAt {
		if err := block.WriteAt(t.below, make([]byte, tableSize), at+table); err != nil {
			return fmt.Errorf("initialize extent %d: %w", extent, err)
		}
	}
	head := encodeHead(t.place.Tree, t.place.Drive, extent, extent == t.place.home())
	if err := block.WriteAt(t.below, head, at); err != nil {
		return fmt.Errorf("initialize extent %d: %w", extent, err)
	}
	return nil
}

// commit makes next the superblock, durably: the first copy before the second, so that at any time
// one of them is whole. An error stops the tree. The caller holds admin.
func (t *Tree) commit(next *super) error {
	if t.super != nil {
		next.generation = t.super.generation
	}
	next.generation++
	b, err := next.encode(t.place.Tree, t.place.Drive, t.place.home())
	if err != nil {
		return err
	}
	if err := t.Err(); err != nil {
		return err
	}
	if err := t.flush(); err != nil {
		return t.fail(fmt.Errorf("flush before the superblock: %w", err))
	}
	for i := range superAt {
		if err := t.writeSuper(b, i); err != nil {
			return t.fail(fmt.Errorf("write superblock: %w", err))
		}
	}
	t.super = next
	return nil
}

func (t *Tree) writeSuper(b []byte, i int) error {
	if err := block.WriteAt(t.below, b, t.place.offset(t.place.home())+superAt[i]); err != nil {
		return err
	}
	return t.flush()
}

// addExtent puts an extent into memory, without free slots.
func (t *Tree) addExtent(number uint32) *extent {
	e := &extent{number: number, at: t.place.offset(number)}
	all := append(slices.Clone(*t.extents.Load()), e)
	t.space.addExtent(number == t.place.home())
	t.extents.Store(&all)
	return e
}

// Open opens a tree: it repairs what a crash may have left, and takes extents of the place that the
// tree has not used yet. ErrUnfinished means that Format was cut off, so that there was nothing in
// the tree; ErrDamaged names what is damaged in both copies. A tree of which records are is opened, see Damage.
func Open(p Place) (*Tree, error) {
	t, err := open(p)
	if err != nil {
		return nil, fmt.Errorf("open tree %v: %w", p.Tree, err)
	}
	return t, nil
}

func open(p Place) (*Tree, error) {
	if err := p.check(); err != nil {
		return nil, err
	}
	t := newTree(p)
	if t.volatile {
		// The process before this one may have ended without a flush. What it made free may be used at
		// once now, and what it replaced may be cleared, so that has to be durable.
		if err := block.Flush(t.below); err != nil {
			return nil, fmt.Errorf("flush before it is read: %w", err)
		}
	}
	// The order matters: a superblock that was not finished is gone before anything depends on it.
	if err := t.openSuper(); err != nil {
		return nil, err
	}
	if err := t.openTables(); err != nil {
		return nil, err
	}
	t.relate()
	if err := t.index(); err != nil {
		return nil, err
	}
	if t.damage != nil { // nothing may be written to it, and nothing is free
		t.measure()
		return t, nil
	}
	t.fill()
	if err := t.addNew(p.Extents); err != nil {
		return nil, err
	}
	return t, t.growBase(p.Base)
}

// openSuper reads the superblock and makes its copies equal.
func (t *Tree) openSuper() error {
	var raw [2][]byte
	var got [2]*super
	for i := range superAt {
		var err error
		if raw[i], got[i], err = t.readSuper(i); err != nil {
			return fmt.Errorf("read superblock: %w", err)
		}
	}
	best := 0
	switch {
	case got[0] == nil && got[1] == nil && block.AllZero(raw[1]):
		return ErrUnfinished
	case got[0] == nil && got[1] == nil:
		return fmt.Errorf("%w: both copies of its superblock", ErrDamaged)
	case got[0] == nil || got[1] != nil && got[1].generation > got[0].generation:
		best = 1
	}
	if err := t.place.fits(got[best]); err != nil {
		return err
	}
	if !bytes.Equal(raw[0], raw[1]) {
		if err := t.writeSuper(raw[best], 1-best); err != nil {
			return fmt.Errorf("repair superblock: %w", err)
		}
	}
	t.super = got[best]
	return nil
}

// fits says what a superblock has that is not in the place.
func (p *Place) fits(s *super) error {
	for _, e := range s.extents {
		if !slices.Contains(p.Extents, e) {
			return fmt.Errorf("%w: it uses extent %d, which is not among its extents", ErrDamaged, e)
		}
	}
	if len(p.Base) < len(s.base) || !slices.Equal(s.base, p.Base[:len(s.base)]) {
		return fmt.Errorf("%w: its base is in the extents %v, which are not %v", ErrDamaged, s.base, p.Base)
	}
	return nil
}

// readSuper reads a copy of the superblock; nil if it is damaged.
func (t *Tree) readSuper(i int) (raw []byte, s *super, err error) {
	at := t.place.offset(t.place.home()) + superAt[i]
	raw = make([]byte, unit)
	if err := block.ReadAt(t.below, raw, at); err != nil {
		return nil, nil, err
	}
	n, err := superLength(raw, t.place.Tree, t.place.Drive, t.place.home())
	if err == nil && n > unit {
		raw = make([]byte, (n+unit-1)/unit*unit)
		if err := block.ReadAt(t.below, raw, at); err != nil {
			return nil, nil, err
		}
	}
	if err == nil {
		s, err = decodeSuper(raw, t.place.Tree, t.place.Drive, t.place.home())
	}
	if errors.Is(err, ErrNewer) {
		return nil, nil, err
	}
	return raw, s, nil
}

// openTables reads the records of all extents.
func (t *Tree) openTables() error {
	for _, number := range t.super.extents {
		t.addExtent(number)
	}
	all := *t.extents.Load()
	highest := make([]uint64, len(all))
	bad := make([][]int, len(all))
	var group errgroup.Group
	group.SetLimit(16) // reads in flight, so that a large tree opens at the drive's speed
	buffers := sync.Pool{New: func() any { return new([3][tableSize]byte) }}
	for i, e := range all {
		group.Go(func() (err error) {
			b := buffers.Get().(*[3][tableSize]byte)
			defer buffers.Put(b)
			highest[i], bad[i], err = t.openTable(e, [2][]byte{b[0][:], b[1][:]}, b[2][:])
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	t.lose(bad)
	t.seq.Store(slices.Max(highest))
	return nil
}

// openTable reads both copies of an extent's table into raw, and writes again the blocks in which they differ from
// want, what they should be. It returns the slots whose records are bad in both; their blocks stay as they are.
func (t *Tree) openTable(e *extent, raw [2][]byte, want []byte) (highest uint64, bad []int, err error) {
	if err := t.openHead(e); err != nil {
		return 0, nil, err
	}
	for c := range raw {
		if err := t.readTable(raw[c], e.at+tableAt[c]); err != nil {
			return 0, nil, fmt.Errorf("read the table of extent %d: %w", e.number, err)
		}
	}
	clear(want)
	for b := range e.blocks {
		from, to := b*unit, (b+1)*unit
		if block.AllZero(raw[0][from:to]) && block.AllZero(raw[1][from:to]) {
			continue
		}
		records, known := new([perBlock]record), len(bad)
		for i := range records {
			slot := b*perBlock + i
			good, from, err := t.goodRecord(raw, e.number, slot)
			if err != nil {
				return 0, nil, err
			}
			if from == nil {
				bad = append(bad, slot)
				continue
			}
			highest = max(highest, good.seq)
			records[i].set(good)
			copy(want[slot*recordSize:], from)
		}
		e.blocks[b].records.Store(records)
		if len(bad) > known { // it may be read again one day
			for c := range raw {
				copy(raw[c][from:to], want[from:to])
			}
		}
	}
	return highest, bad, t.repairTable(e, raw, want)
}

// goodRecord returns the record of a slot that counts, and its bytes; none if both copies are bad. Those of slots that
// are never used do not matter.
func (t *Tree) goodRecord(raw [2][]byte, extent uint32, slot int) (good entry, from []byte, err error) {
	at := slot * recordSize
	good, from = newer(raw[0][at:][:recordSize], raw[1][at:][:recordSize], t.place.Tree, extent, slot)
	reserved := slot == 0 || slot <= len(superAt) && extent == t.place.home()
	switch {
	case from == nil && reserved:
		return entry{}, noRecord[:], nil
	case reserved && good.layer != 0:
		return entry{}, nil, fmt.Errorf("%w: a record in slot %d of extent %d, where none may be", ErrDamaged, slot, extent)
	}
	return good, from, nil
}

// openHead writes the head of an extent again if it is not as it should be. The superblock says
// that the extent is the tree's.
func (t *Tree) openHead(e *extent) error {
	head, want := make([]byte, unit), encodeHead(t.place.Tree, t.place.Drive, e.number, e.number == t.place.home())
	err := block.ReadAt(t.below, head, e.at)
	if err == nil && !bytes.Equal(head, want) || errors.Is(err, block.ErrMedium) {
		err = block.WriteAt(t.below, want, e.at)
	}
	if err != nil {
		return fmt.Errorf("head of extent %d: %w", e.number, err)
	}
	return nil
}

// newer returns the newer good one of the copies of a record, and its bytes. There is one way to write a record.
func newer(a, b []byte, tree block.UUID, extent uint32, slot int) (entry, []byte) {
	x, okX := decodeEntry(a, tree, extent, slot)
	if okX && bytes.Equal(a, b) {
		return x, a
	}
	y, okY := decodeEntry(b, tree, extent, slot)
	switch {
	case okY && (!okX || y.seq > x.seq):
		return y, b
	case okX:
		return x, a
	}
	return entry{}, nil
}

// repairTable writes the blocks of want that a copy on the drive does not have.
func (t *Tree) repairTable(e *extent, raw [2][]byte, want []byte) error {
	repaired := false
	for c, table := range tableAt {
		for at := 0; at < tableSize; at += unit {
			if bytes.Equal(raw[c][at:at+unit], want[at:at+unit]) {
				continue
			}
			repaired = true
			if err := block.WriteAt(t.below, want[at:at+unit], e.at+table+int64(at)); err != nil {
				return fmt.Errorf("repair the table of extent %d: %w", e.number, err)
			}
		}
	}
	if !repaired {
		return nil
	}
	return block.Flush(t.below)
}

// index makes the chains. Of two records for one layer and chunk the newer counts, and the other is
// cleared on the drive: if it stayed, it would count again when the newer one is gone. In a damaged tree
// none goes.
func (t *Tree) index() error {
	slots, err := t.byLayer()
	if err != nil {
		return err
	}
	var losers []uint32
	for _, slot := range slots {
		r := t.record(slot)
		front := t.first[r.chunk]
		if front != 0 && t.record(front).layer == r.layer {
			if t.record(front).seq > r.seq {
				losers = append(losers, slot)
				continue
			}
			t.unlink(front, r.chunk)
			losers = append(losers, front)
		}
		t.link(slot)
	}
	for _, slot := range losers {
		t.record(slot).set(entry{seq: t.record(slot).seq})
		if t.damage != nil {
			continue
		}
		if err := t.put(slot, false, func(*entry) {}); err != nil {
			return err
		}
		t.publish(slot, func(*record) {})
	}
	if len(losers) == 0 || t.damage != nil {
		return nil
	}
	return block.Flush(t.below)
}

// byLayer sorts the slots in use by layer, in two passes over all of them. A record of a layer that
// is gone makes its slot free.
func (t *Tree) byLayer() ([]uint32, error) {
	at := make(map[uint32]int, len(t.layers)) // of a layer's next slot
	for slot, r := range t.used() {
		l := t.layers[r.layer]
		switch {
		case l == nil:
			r.set(entry{seq: r.seq})
		case r.chunk >= chunksOf(l.Size):
			return nil, fmt.Errorf("%w: the record of slot %d of extent %d is beyond the end of layer %d", ErrDamaged, slot%slotCount, t.extent(slot).number, l.ID)
		default:
			at[r.layer]++
		}
	}
	n := 0
	for _, id := range slices.Sorted(maps.Keys(at)) {
		at[id], n = n, n+at[id]
	}
	slots := make([]uint32, n)
	for slot, r := range t.used() {
		slots[at[r.layer]] = slot
		at[r.layer]++
	}
	return slots, nil
}

// set makes r what a record on the drive says.
func (r *record) set(e entry) {
	r.layer, r.chunk, r.seq = e.layer, e.chunk, e.seq
	r.have.Store(e.have)
	r.data.Store(e.have &^ e.zero)
}

// used yields the slots that have a layer. Nothing may change meanwhile.
func (t *Tree) used() func(yield func(uint32, *record) bool) {
	return func(yield func(uint32, *record) bool) {
		for i, e := range *t.extents.Load() {
			for b := range e.blocks {
				records := e.blocks[b].records.Load()
				if records == nil {
					continue
				}
				for j := range records {
					if r := &records[j]; r.layer != 0 && !yield(uint32(i<<slotShift+b*perBlock+j), r) {
						return
					}
				}
			}
		}
	}
}

// fill makes the slots free that no record uses.
func (t *Tree) fill() {
	for i := range *t.extents.Load() {
		t.fillExtent(i)
	}
}

func (t *Tree) fillExtent(i int) {
	e := (*t.extents.Load())[i]
	var free [slotCount / 64]uint64
	for slot := 1; slot < slotCount; slot++ {
		if e.number == t.place.home() && slot <= len(superAt) {
			continue
		}
		records := e.blocks[slot/perBlock].records.Load()
		if records == nil || records[slot%perBlock].layer == 0 {
			free[slot/64] |= 1 << (slot % 64)
		}
	}
	t.space.fill(i, free)
}

// addNew takes the extents that the superblock does not have.
func (t *Tree) addNew(extents []uint32) error {
	t.admin.Lock()
	defer t.admin.Unlock()
	next := t.super.clone()
	var fresh []uint32
	for _, e := range extents {
		if _, ok := slices.BinarySearch(t.super.extents, e); !ok {
			fresh = append(fresh, e)
		}
	}
	if len(fresh) == 0 {
		return nil
	}
	for _, e := range fresh {
		if err := t.initialize(e); err != nil {
			return err
		}
	}
	next.extents = slices.Sorted(slices.Values(append(next.extents, fresh...)))
	if err := t.commit(next); err != nil {
		return err
	}
	for _, e := range fresh {
		i, ok := t.again(e)
		if !ok {
			t.addExtent(e)
			i = len(*t.extents.Load()) - 1
		}
		t.fillExtent(i)
	}
	return nil
}

// AddExtents gives the tree more extents, which must be its own according to the drive's label, and
// lets the writes go on that wait for space. It can be repeated. An error of the drive stops the
// tree.
func (t *Tree) AddExtents(extents []uint32) error {
	p := t.place
	p.Extents = extents
	err := p.check()
	if err == nil {
		err = t.intact()
	}
	if err != nil {
		return fmt.Errorf("add extents to tree %v: %w", t.place.Tree, err)
	}
	if err := t.addNew(extents); err != nil {
		return fmt.Errorf("add extents to tree %v: %w", t.place.Tree, err)
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/target/treecheck"
)

// lose makes both copies of records bad: n, from one on.
func lose(img *image, p Place, extent uint32, slot, n int) {
	bad := bytes.Repeat([]byte{0x5a}, n*recordSize)
	for _, at := range tableAt {
		img.write(bad, p.offset(extent)+at+int64(slot)*recordSize)
	}
}

// chunkOf reads a grain in the middle of a chunk: its tag, or '?' if it is unknown.
func chunkOf(t *testing.T, l *Leg, off int64) string {
	t.Helper()
	b := make([]byte, sector)
	switch err := block.ReadAt(l, b, off); {
	case errors.Is(err, block.ErrMedium) && errors.Is(err, ErrDamaged):
		return "?"
	case err != nil:
		t.Fatal(err)
	}
	return fmt.Sprint(tags(b)[0])
}

// In the sample, snapshot 2 has chunks 0 and 1 in the slots 1 and 2 of extent 0; the head of leg 1 over it has two
// grains of chunk 0 in slot 3, and chunk 1 as zeroes in slot 256; clone 3 has nothing. What is read of them here is
// the first grain of chunk 0, another one of it, chunk 1, and chunk 2.
func TestALostRecordLosesOnlyWhatItMayHaveDecided(t *testing.T) {
	img, p := sample(t)
	for name, c := range map[string]struct {
		extent  uint32
		slot, n int
		want    [3]string // leg 1, snapshot 2, clone 3
	}{
		"chunk 0 of the snapshot":          {0, 1, 1, [3]string{"2?0?", "??1?", "????"}},
		"chunk 1 of the snapshot":          {0, 2, 1, [3]string{"210?", "11??", "????"}},
		"chunk 0 of the head":              {0, 3, 1, [3]string{"??0?", "111?", "????"}},
		"a slot with a chunk, not used":    {2, 200, 1, [3]string{"210?", "111?", "????"}},
		"a block of them":                  {2, 64, 64, [3]string{"210?", "111?", "????"}},
		"the zeroes of the head":           {0, 256, 1, [3]string{"21?0", "1110", "???0"}},
		"a slot without a chunk, not used": {2, 1023, 1, [3]string{"2100", "1110", "???0"}},
		"slots of both kinds":              {0, 255, 2, [3]string{"21??", "111?", "????"}},
		"a slot that is never used":        {0, 0, 1, [3]string{"2100", "1110", "1110"}},
		"the slots of the superblock":      {2, 0, 3, [3]string{"2100", "1110", "1110"}},
	} {
		t.Run(name, func(t *testing.T) {
			tree, over, err := openOver(img, p, func(m *image) { lose(m, p, c.extent, c.slot, c.n) })
			must(t, err)
			intact := c.want == [3]string{"2100", "1110", "1110"}
			if (tree.Damage() == nil) != intact {
				t.Errorf("Damage() = %v", tree.Damage())
			}
			var got [3]string
			for i := range got {
				l, err := tree.Leg(id(uint64(i + 1)))
				must(t, err)
				for _, off := range []int64{0, 512 << 10, 1 << 20, 2 << 20} {
					got[i] += chunkOf(t, l, off)
				}
				l.Close()
			}
			if got != c.want {
				t.Errorf("reads %v, want %v", got, c.want)
			}
			must(t, sameAsTheChecker(tree, over))
		})
	}
}

// sameAsTheChecker compares what is unknown of a tree, grain by grain in the windows and as a whole, with what the
// independent reader says.
func sameAsTheChecker(tree *Tree, img *image) error {
	report, err := treecheck.Check(img, testSize, firstExtent)
	if err != nil {
		return err
	}
	found := &report.Trees[0]
	if d := tree.Damage(); found.Damaged() != (d != nil) {
		return fmt.Errorf("the tree says %v, the checker %+v", d, found.Findings)
	} else if d == nil {
		return nil
	}
	for _, l := range found.Layers {
		if l.State == "doomed" {
			continue
		}
		if n := tree.Damage().Unknown[l.Object]; uint64(n) != l.UnknownBytes {
			return fmt.Errorf("object %v: %v are unknown, the checker says %v", l.Object, n, block.Size(l.UnknownBytes))
		}
		if l.Object == ballast {
			continue
		}
		if err := readsAsTheChecker(tree, img, found, l.Object); err != nil {
			return err
		}
	}
	return nil
}

func readsAsTheChecker(tree *Tree, img *image, found *treecheck.Tree, object block.UUID) error {
	leg, err := tree.Leg(object)
	if err != nil {
		return err
	}
	defer leg.Close()
	content, err := found.Content(img, firstExtent, object)
	if err != nil {
		return err
	}
	for i := range windowSectors() {
		var got, want [sector]byte
		err := block.ReadAt(leg, got[:], sectorAt(i))
		_, wantErr := content.ReadAt(want[:], sectorAt(i))
		if (err != nil) != (wantErr != nil) || err == nil && got != want {
			return fmt.Errorf("object %v, sector %d: %x, %v; the checker reads %x, %v", object, i, tags(got[:]), err, tags(want[:]), wantErr)
		}
	}
	return nil
}

// afterLoss makes random records of an image bad, in both copies, and opens the tree: each sector is as it may be, or
// unknown.
func afterLoss(r *rand.Rand, kind kindOfTree, img *image, volatile bool, before, after model, n *counts) error {
	over := newImage(img)
	p := kind.place(nil)
	e := p.Extents[r.IntN(len(p.Extents))]
	slot, many := r.IntN(slotCount), 1
	switch r.IntN(4) {
	case 0:
		slot, many = slot/perBlock*perBlock, perBlock
	case 1: // some of those that are in use
		slot, many = usedSlot(r, over, p, e), 1+r.IntN(2)
	}
	lose(over, p, e, slot, min(many, slotCount-slot))
	d := &drive{size: testSize, volatile: volatile, at: true, img: over}
	t, err := Open(kind.place(d))
	if err != nil {
		return fmt.Errorf("with %d lost records from slot %d of extent %d on: %w", many, slot, e, err)
	}
	defer t.Close()
	t.prepareNothing()
	if err := lossy(t, before, after, n); err != nil {
		return fmt.Errorf("with %d lost records from slot %d of extent %d on: %w", many, slot, e, err)
	}
	return sameAsTheChecker(t, over)
}

// usedSlot chooses a slot with a record that is not the ballast's, if there is one.
func usedSlot(r *rand.Rand, img *image, p Place, e uint32) int {
	raw, used := make([]byte, tableSize), []int{1}
	img.read(raw, p.offset(e)+tableAt[0])
	for slot := range slotCount {
		if x, ok := decodeEntry(raw[slot*recordSize:][:recordSize], p.Tree, e, slot); ok && x.layer > 1 {
			used = append(used, slot)
		}
	}
	return used[r.IntN(len(used))]
}

// lossy is judge, of a tree in which records may be lost.
func lossy(t *Tree, before, after model, n *counts) error {
	for _, layer := range t.Layers() {
		if layer.State == StateDoomed || layer.Object == ballast {
			continue
		}
		l, err := t.Leg(layer.Object)
		if err != nil {
			return err
		}
		a, b := before.objects[layer.Object], after.objects[layer.Object]
		for i := range windowSectors() {
			p := make([]byte, sector)
			err := block.ReadAt(l, p, sectorAt(i))
			n.reads++
			if errors.Is(err, block.ErrMedium) && t.Damage() != nil {
				n.unknown++
				continue
			}
			if err != nil {
				return err
			}
			v := tags(p)[0]
			if !(a != nil && v == a[i] || b != nil && v == b[i] || slices.Contains(before.may[layer.Object][i], v) || slices.Contains(after.may[layer.Object][i], v)) {
				return fmt.Errorf("object %v (frozen %v) sector %d is %x, and not unknown", layer.Object, after.frozen[layer.Object], i, v)
			}
		}
		l.Close()
	}
	return nil
}

// A drive that cannot read a sector of a table has lost the records in it, and no others. What it can read in the
// other copy is written again.
func TestWhatCannotBeReadOfATableIsBad(t *testing.T) {
	img, p := sample(t)
	for name, copies := range map[string][]int64{"one copy": tableAt[:1], "both copies": tableAt[:]} {
		wrote := 0
		p.Device = &drive{size: testSize, at: true, img: newImage(img), broken: func(io *block.IO) error {
			for _, table := range copies {
				switch at := p.offset(0) + table + 3*sector; {
				case at < io.Off || at >= io.Off+io.Len:
				case io.Op == block.OpRead:
					return fmt.Errorf("a bad sector: %w", block.ErrMedium)
				default:
					wrote++
				}
			}
			return nil
		}}
		tree, err := Open(p)
		must(t, err)
		if one := len(copies) == 1; one != (tree.Damage() == nil) || one != (wrote > 0) {
			t.Errorf("%s: Damage() = %v, and the bad sector was written %d times", name, tree.Damage(), wrote)
		}
		if d := tree.Damage(); d != nil && d.Records != "the records 24 to 31 of extent 0" {
			t.Errorf("%s: %v", name, d)
		}
		tree.Close()
	}
}

// An error of the drive's that is not one of the medium is no damage: a drive that is away has lost nothing.
func TestADriveThatIsAwayIsNotDamage(t *testing.T) {
	img, p := sample(t)
	p.Device = &drive{size: testSize, at: true, img: img, broken: func(io *block.IO) error {
		if io.Off == p.offset(0)+tableAt[0] {
			return block.ErrGone
		}
		return nil
	}}
	if tree, err := Open(p); !errors.Is(err, block.ErrGone) {
		t.Errorf("Open = %v, %v", tree, err)
	}
}

// damaged is a sample of which chunk 0 of the snapshot is lost.
func damaged(t *testing.T) (tree *Tree, leg *Leg, img *image, p Place) {
	t.Helper()
	img, p = sample(t)
	p.Extents = append(p.Extents, 1)
	lose(img, p, 0, 1, 1)
	p.Device = &drive{size: testSize, at: true, img: newImage(img)}
	tree, err := Open(p)
	must(t, err)
	leg, err = tree.Leg(id(1))
	must(t, err)
	return tree, leg, p.Device.(*drive).img, p
}

// A damaged tree is read. Nothing in it changes but which layers are deleted.
func TestADamagedTreeIsNotWrittenTo(t *testing.T) {
	tree, leg, img, p := damaged(t)
	io := func(op block.Op) error {
		x := &block.IO{Op: op, Off: 1 << 20, Len: GrainSize}
		if op == block.OpWrite {
			x.Data = make([]byte, GrainSize)
		}
		return block.Do(leg, x)
	}
	pace := func(context.Context, int64) error { return nil }
	for name, c := range map[string]struct{ got, want error }{
		"write in place": {block.WriteAt(leg, tagged(9, 1), 0), block.ErrMedium},
		"write":          {io(block.OpWrite), block.ErrMedium},
		"discard":        {io(block.OpDiscard), block.ErrMedium},
		"write zeroes":   {io(block.OpWriteZeroes), block.ErrMedium},
		"flush":          {io(block.OpFlush), nil},
		"freeze":         {tree.Freeze(id(1), id(9), nil), ErrDamaged},
		"clone":          {tree.Clone(id(2), id(9), 64<<20, nil), ErrDamaged},
		"create":         {tree.Create(id(9), 1<<20, nil), ErrDamaged},
		"seal":           {tree.Seal(id(3)), ErrDamaged},
		"restore":        {tree.Restore(id(1), id(2)), ErrDamaged},
		"grow":           {tree.Grow(id(1), 128<<20), ErrDamaged},
		"add extents":    {tree.AddExtents(p.Extents), ErrDamaged},
		"flatten":        {tree.Flatten(t.Context(), func() func(block.UUID) bool { return func(o block.UUID) bool { return o == id(3) } }, func(context.Context, int64, int64) error { return nil }), ErrDamaged},
		"settle":         {tree.Settle(t.Context(), id(1), pace), ErrState},
		"reclaim":        {tree.Reclaim(t.Context()), nil},
		"pin":            {tree.Pin(id(2)), nil},
		"rows":           {errOf(tree.Rows(id(2), 64<<20, 1000)), ErrDamaged},
	} {
		if !errors.Is(c.got, c.want) {
			t.Errorf("%s: %v, want %v", name, c.got, c.want)
		}
	}
	if len(img.pages) != 0 {
		t.Errorf("the drive was written to: %d pages", len(img.pages))
	}
	if s := tree.Space(); s.Free != 0 || s.Empty != 0 || tree.Settling(block.UUID{}).Alone {
		t.Errorf("its space is %+v, Settling() = %+v", s, tree.Settling(block.UUID{}))
	}
	has, err := tree.GiveBack(0)
	if err != nil || !slices.Equal(has, []uint32{2, 0}) {
		t.Errorf("GiveBack = %v, %v", has, err)
	}
	must(t, tree.Delete(id(3)))
	if l, there := tree.Layer(id(3)); there || tree.Reclaimable() {
		t.Errorf("after Delete there is %+v, Reclaimable() = %v", l, tree.Reclaimable())
	}
}

// The older of two records of a chunk is not cleared in a damaged tree: it may be in a block with a lost one, which
// would be written as free.
func TestALostRecordStaysLost(t *testing.T) {
	img, p := sample(t)
	older := make([]byte, recordSize)
	entry{layer: 1, chunk: 1, have: allGrains, seq: 1}.encode(older, p.Tree, 0, 5)
	for _, at := range tableAt {
		img.write(older, p.offset(0)+at+5*recordSize)
	}
	lose(img, p, 0, 3, 1)
	d := &drive{size: testSize, at: true, img: newImage(img)}
	p.Device = d
	for range 2 {
		tree, err := Open(p)
		must(t, err)
		if tree.Damage() == nil || len(d.img.pages) > 0 {
			t.Errorf("Damage() = %v, %d pages were written", tree.Damage(), len(d.img.pages))
		}
		l, err := tree.Leg(id(2))
		must(t, err)
		if got := chunkOf(t, l, 1<<20); got != "1" {
			t.Errorf("chunk 1 reads %s", got)
		}
		tree.Close()
	}
}

// A lost record is of no chunk behind the end of its layer.
func TestNothingIsUnknownBehindTheEndOfALayer(t *testing.T) {
	img, p := sample(t)
	d := &drive{size: testSize, at: true, img: img}
	p.Device = d
	tree, err := Open(p)
	must(t, err)
	must(t, tree.Grow(id(3), 128<<20))
	clone, err := tree.Leg(id(3))
	must(t, err)
	must(t, block.WriteAt(clone, tagged(5, GrainSize/sector), 100<<20))
	tree.Close()
	lose(img, p, 2, 200, 1)
	tree, err = Open(p)
	must(t, err)
	clone, err = tree.Leg(id(3))
	must(t, err)
	for off, want := range map[int64]string{100 << 20: "5", 100<<20 + 512<<10: "0", 101 << 20: "?"} {
		if got := chunkOf(t, clone, off); got != want {
			t.Errorf("%d reads %s, want %s", off, got, want)
		}
	}
	clone.Close()
	must(t, sameAsTheChecker(tree, img))
}

func errOf[T any](_ T, err error) error { return err }

// What is unknown may be data, and may differ: a copy that leaves out what is not named must not leave it out.
func TestRangesNameWhatIsUnknown(t *testing.T) {
	tree, leg, _, _ := damaged(t)
	const size = 64 << 20
	want := []block.Range{{Off: 0, End: 1 << 20}, {Off: 2 << 20, End: size}} // chunk 1 is known to be zeroes
	if got, _, err := leg.Allocated(0, size, 1000); err != nil || !slices.Equal(got, want) {
		t.Errorf("data of the leg: %v, %v; want %v", got, err, want)
	}
	if got, _, err := tree.Ranges(id(2), block.UUID{}, 2<<20, size, 1000); err != nil || !slices.Equal(got, want[1:]) {
		t.Errorf("data of the snapshot: %v, %v; want %v", got, err, want[1:])
	}
	got, _, err := leg.Differing(id(2), 0, size, 1000)
	if must(t, err); !slices.Equal(got, []block.Range{{Off: 0, End: size}}) {
		t.Errorf("what differs: %v", got)
	}
}

// If the records can be read again one day, the tree is whole, whatever was deleted meanwhile.
func TestAnErrorThatPassesLosesNothing(t *testing.T) {
	img, p := sample(t)
	want := contents(t, img, p)
	tree, over, err := openOver(img, p, func(m *image) { lose(m, p, 0, 0, slotCount) })
	must(t, err)
	must(t, tree.Delete(id(3)))
	tree.Close()
	for _, at := range tableAt {
		b := make([]byte, tableSize)
		img.read(b, p.offset(0)+at)
		over.write(b, p.offset(0)+at)
	}
	p.Device = &drive{size: testSize, at: true, img: over}
	tree, err = Open(p)
	must(t, err)
	if tree.Damage() != nil {
		t.Fatal(tree.Damage())
	}
	must(t, tree.Reclaim(t.Context()))
	must(t, tree.Clone(id(2), id(3), 64<<20, nil))
	tree.Close()
	must(t, checked(over, true))
	if got := contents(t, over, p); got != want {
		t.Errorf("reads %s, want %s", got, want)
	}
}

// slowTables is a drive that begins writes to tables later than others.
type slowTables struct{ *drive }

func (d slowTables) Submit(io *block.IO) {
	if at := (io.Off - firstExtent) % extentSize; io.Op != block.OpRead && at >= tableAt[0] && at < ChunkSize {
		time.AfterFunc(5*time.Microsecond, func() { d.drive.Submit(io) })
		return
	}
	d.drive.Submit(io)
}

// A record moves to another slot. Whatever was written in place since, and acknowledged, must not be lost without a
// word if the power is cut then and the new record goes bad: the old one must be gone.
func TestNothingIsBuiltOnARecordBeforeTheOldOneIsGone(t *testing.T) {
	const grain = GrainSize / sector
	for name, c := range map[string]struct {
		prepare func(t *testing.T, tree *Tree, leg *Leg)
		move    func(tree *Tree, leg *Leg) error
		off     int64 // of the grain that is written in place
	}{
		"a write to zeroes": {func(t *testing.T, tree *Tree, leg *Leg) {
			must(t, block.WriteAt(leg, tagged(1, 2*grain), 0))
			must(t, tree.Freeze(id(1), id(2), nil))
			must(t, block.Do(leg, &block.IO{Op: block.OpDiscard, Len: ChunkSize}))
		}, func(_ *Tree, leg *Leg) error { return block.WriteAt(leg, tagged(2, 1), 0) }, 0},
		"a merge": {func(t *testing.T, tree *Tree, leg *Leg) {
			must(t, block.WriteAt(leg, tagged(1, 4*grain), 0))
			must(t, tree.Freeze(id(1), id(2), nil))
			must(t, block.WriteAt(leg, tagged(2, grain), 5*GrainSize))
			must(t, tree.Delete(id(2)))
		}, func(tree *Tree, _ *Leg) error { return tree.Reclaim(context.Background()) }, 5 * GrainSize},
	} {
		for after := range 24 {
			synctest.Test(t, func(t *testing.T) {
				d := slowTables{&drive{size: testSize, base: newImage(nil), img: newImage(nil)}}
				tree, err := Format(testPlace(d), id(1), 64<<20, nil)
				must(t, err)
				leg, err := tree.Leg(id(1))
				must(t, err)
				c.prepare(t, tree, leg)
				moved := make(chan error, 1)
				go func() { moved <- c.move(tree, leg) }()
				time.Sleep(time.Duration(after) * time.Microsecond)
				must(t, block.WriteAt(leg, tagged(3, 1), c.off+sector))
				from := d.now() // it is acknowledged
				must(t, <-moved)
				slot := tree.own(leg.layer, 0)
				for k := from; k <= d.now(); k++ {
					img := d.crash(rand.New(rand.NewPCG(uint64(k), 1)), k)
					lose(img, tree.place, tree.extent(slot).number, int(slot%slotCount), 1)
					again, err := Open(testPlace(&drive{size: testSize, at: true, img: img}))
					must(t, err)
					l, err := again.Leg(id(1))
					must(t, err)
					if got := chunkOf(t, l, c.off+sector); got != "?" && got != "3" {
						t.Errorf("%s, written %d µs later, cut before event %d: reads %s", name, after, k, got)
					}
				}
			})
		}
	}
}

// A leg that has a damaged tree over its base to itself is not copied back, and does not pass for a plain one.
func TestADamagedTreeIsNotSettled(t *testing.T) {
	img := newImage(overImage())
	lose(img, overPlace(nil), 2, 200, 1)
	tree, err := Open(overPlace(&drive{size: testSize, at: true, img: img}))
	must(t, err)
	err = tree.Settle(t.Context(), id(1), func(context.Context, int64) error { return nil })
	if s := tree.Settling(id(1)); !errors.Is(err, ErrState) || s.Alone || s.Plain || tree.Damage() == nil {
		t.Errorf("Settle = %v, Settling() = %+v, Damage() = %v", err, s, tree.Damage())
	}
}

// A record moves to another slot, or goes. Look-ups leave its slot before that is free: whoever is about to read it
// would find what another chunk has there by then.
func TestASlotIsFreeOnlyWhenLookUpsHaveLeftIt(t *testing.T) {
	const all = ChunkSize / sector
	write := func(tag uint64) func(t *testing.T, tree *Tree, leg *Leg) {
		return func(t *testing.T, _ *Tree, leg *Leg) { must(t, block.WriteAt(leg, tagged(tag, all), 0)) }
	}
	freeze := func(t *testing.T, tree *Tree, _ *Leg) { must(t, tree.Freeze(id(1), id(2), nil)) }
	discard := func(t *testing.T, _ *Tree, leg *Leg) {
		must(t, block.Do(leg, &block.IO{Op: block.OpDiscard, Len: ChunkSize}))
	}
	for name, steps := range map[string][]func(t *testing.T, tree *Tree, leg *Leg){ // the last one gives up a slot
		"a discard over a snapshot": {write(1), freeze, write(2), discard},
		"a write to zeroes":         {write(1), freeze, discard, write(2)},
		"a discard":                 {write(1), discard},
	} {
		t.Run(name, func(t *testing.T) {
			tree, err := Format(testPlace(&drive{size: testSize, at: true, img: newImage(nil)}), id(1), 64<<20, nil)
			must(t, err)
			defer tree.Close()
			leg, err := tree.Leg(id(1))
			must(t, err)
			last := len(steps) - 1
			for _, step := range steps[:last] {
				step(t, tree, leg)
			}
			top := &(*leg.top.Load())[0]
			slot := top.Load() &^ ownBit
			seen := slot
			tree.idlers.mu.Lock() // nothing is made free meanwhile
			done := make(chan struct{})
			go func() {
				defer close(done)
				steps[last](t, tree, leg)
			}()
			for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(time.Millisecond) {
				if seen = top.Load() &^ ownBit; seen != slot {
					break
				}
			}
			tree.idlers.mu.Unlock()
			<-done
			if seen == slot {
				t.Errorf("slot %d was made free while look-ups began there", slot)
			}
		})
	}
}

// What is unknown is counted in a time that grows like the layers and the chunks, not like their pairs: a tree may have
// thousands of layers, one over another.
func TestWhatIsUnknownIsCountedOnce(t *testing.T) {
	const layers, chunks = 20_000, 64
	tree := &Tree{layers: map[uint32]*layer{}, first: make([]uint32, chunks), damage: &DamageError{}}
	for n := range uint32(layers) {
		tree.layers[n+1] = &layer{Layer: Layer{ID: n + 1, Parent: n, Object: id(uint64(n + 1)), Size: chunks * ChunkSize, State: StateFrozen}}
	}
	tree.extents.Store(&[]*extent{{}})
	for n := range chunks - 1 { // of the lowest layer; the last chunk has none
		slot := uint32(n + 1)
		tree.block(slot)
		tree.record(slot).set(entry{layer: 1, chunk: uint32(n), have: 3, zero: 1})
		tree.first[n] = slot
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		tree.measure() // records without chunks are lost
	}()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Fatal("it is not done after 10 s")
	}
	for n, want := range map[uint64]block.Size{1: 0, 2: (chunks - 1) * GrainSize, layers: (chunks - 1) * GrainSize} {
		if got := tree.damage.Unknown[id(n)]; got != want {
			t.Errorf("%v of layer %d are unknown, want %v", got, n, want)
		}
	}
}

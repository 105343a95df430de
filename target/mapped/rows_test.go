// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
)

// pinnedObject is an object that is read from the drive itself, past the tree.
type pinnedObject struct {
	object block.UUID
	rows   []Row
	holds  []uint64 // in the windows
	frozen bool
}

// readRows reads the windows of an object from the drive itself.
func readRows(d block.Device, rows []Row) []uint64 {
	all := make([]byte, objectSize)
	at := int64(0)
	for _, r := range rows {
		if !r.Zero {
			if err := block.ReadAt(d, all[at:at+r.Length], r.At); err != nil {
				panic(err)
			}
		}
		at += r.Length
	}
	var out []uint64
	for _, w := range windows {
		out = append(out, tags(all[w[0]:w[1]])...)
	}
	return out
}

func rowsAreInOrder(rows []Row, size int64) error {
	for i, r := range rows {
		if r.Length <= 0 || i > 0 && len(join(rows[i-1:i:i], r)) == 1 {
			return fmt.Errorf("row %d of %v could be part of the one before", i, rows)
		}
		size -= r.Length
	}
	if size != 0 {
		return fmt.Errorf("%v lack %d bytes", rows, size)
	}
	return nil
}

// pinSome pins an object, or lets one go.
func (w *world) pinSome(pinned []pinnedObject) ([]pinnedObject, error) {
	if i := w.r.IntN(4); i < len(pinned) {
		p := pinned[i]
		w.t.Unpin(p.object)
		w.m.objects[p.object] = p.holds
		if p.frozen {
			w.m.frozen[p.object] = true
		}
		return slices.Delete(pinned, i, i+1), nil
	}
	from := w.names(w.r.IntN(4) > 0)
	if len(from) == 0 || len(w.names(false)) < 2 { // one head is left to be written
		return pinned, nil
	}
	p := pinnedObject{object: w.pick(from)}
	w.close(p.object)
	if err := w.t.Pin(p.object); err != nil {
		return nil, err
	}
	p.holds, p.frozen = w.m.objects[p.object], w.m.frozen[p.object]
	delete(w.m.objects, p.object)
	delete(w.m.frozen, p.object)
	delete(w.m.may, p.object)
	var err error
	if p.rows, err = w.t.Rows(p.object, objectSize, 1<<20); err != nil {
		return nil, err
	}
	return append(pinned, p), rowsAreInOrder(p.rows, objectSize)
}

// pinnedHistory does random operations beside objects that are pinned, and compares what is read of these from the
// drive itself after each.
func pinnedHistory(seed uint64, n *counts) error {
	r := rand.New(rand.NewPCG(seed, 11))
	img := alone.image()
	d := &drive{size: testSize, at: true, img: newImage(img)}
	t, err := Open(alone.place(d))
	if err != nil {
		return err
	}
	w := &world{r: r, kind: alone, d: d, t: t, legs: map[block.UUID]*Leg{}, m: newModel(), n: n}
	w.m.objects[id(1)] = readObject(w.leg(id(1)))
	var pinned []pinnedObject
	for op := range 150 {
		was := w.t
		if err := w.step(func() {}); err != nil {
			return fmt.Errorf("op %d: %w", op, err)
		}
		for i, p := range pinned {
			if w.t != was {
				if err := w.t.Pin(p.object); err != nil {
					return err
				}
			}
			if !p.frozen && r.IntN(20) == 0 { // a version of it is made
				w.next++
				name := id(w.next << 20)
				if err := w.t.Freeze(p.object, name, nil); err != nil {
					return err
				}
				w.m.objects[name], w.m.frozen[name] = slices.Clone(p.holds), true
			}
			if err := errors.Join(is(w.t.Delete(p.object), ErrInUse), is(errorOf(w.t.Leg(p.object)), ErrInUse)); err != nil {
				return err
			}
			n.points++
			if got := readRows(d, pinned[i].rows); !slices.Equal(got, p.holds) {
				return fmt.Errorf("op %d: of %v, which was pinned, its rows hold something else", op, p.object)
			}
		}
		if pinned, err = w.pinSome(pinned); err != nil {
			return fmt.Errorf("op %d: pin: %w", op, err)
		}
		if err := w.verify(); err != nil {
			return fmt.Errorf("op %d: %w", op, err)
		}
	}
	w.bg.Wait()
	for len(pinned) > 0 {
		w.t.Unpin(pinned[0].object)
		pinned = pinned[1:]
	}
	before := len(w.t.Layers())
	if err := w.t.Reclaim(context.Background()); err != nil {
		return err
	}
	n.settled += before - len(w.t.Layers())
	for _, l := range w.legs {
		l.Close()
	}
	return checked(d.img, true)
}

func errorOf[T any](_ T, err error) error { return err }

func is(err, want error) error {
	if errors.Is(err, want) {
		return nil
	}
	return fmt.Errorf("%v, want %w", err, want)
}

func TestWhatIsPinnedStaysWhereItIs(t *testing.T) {
	var n counts
	const most = 20
	for seed := range uint64(most) {
		if err := pinnedHistory(seed, &n); err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
	}
	t.Logf("%d histories, compared %d times, %d layers left to the end", most, n.points, n.settled)
	if n.points < 500 || n.settled == 0 {
		t.Error("the histories do not reach what they should")
	}
}

// A merge that is under way when the layer over it is pinned ends with its chunk, and goes on when it is let go.
func TestAPinWaitsForTheChunkThatIsMerged(t *testing.T) {
	d, tree, leg := slowTree(t)
	const chunks = 8
	for c := range int64(chunks) {
		must(t, block.WriteAt(leg, tagged(1, ChunkSize/sector/2), c*ChunkSize))
	}
	must(t, tree.Freeze(id(1), id(2), nil))
	for c := range int64(chunks) {
		must(t, block.WriteAt(leg, tagged(2, GrainSize/sector), c*ChunkSize+ChunkSize/4))
	}
	must(t, tree.Freeze(id(1), id(3), nil))
	must(t, tree.Delete(id(2)))
	d.set(func(io *block.IO) bool { return io.Op == block.OpWrite && io.Len == GrainSize })
	reclaimed, pinned := make(chan error, 1), make(chan error, 1)
	go func() { reclaimed <- tree.Reclaim(t.Context()) }()
	for kept := 0; kept == 0; time.Sleep(time.Millisecond) {
		d.mu.Lock()
		kept = len(d.kept)
		d.mu.Unlock()
	}
	go func() { pinned <- tree.Pin(id(3)) }()
	select {
	case err := <-pinned:
		t.Errorf("pinned while a chunk is being merged: %v", err)
		pinned <- err
	case <-time.After(50 * time.Millisecond):
	}
	d.answer()
	must(t, errors.Join(<-pinned, <-reclaimed))
	if tree.Reclaimable() || len(tree.Layers()) != 3 {
		t.Fatalf("pinned, and the layers are %v, reclaimable %v", tree.Layers(), tree.Reclaimable())
	}
	rows, err := tree.Rows(id(3), chunks*ChunkSize, 100)
	must(t, err)
	before := readAllRows(t, d, rows)
	for c := range int64(chunks) { // what has come free is used again
		must(t, block.WriteAt(leg, tagged(3, ChunkSize/sector), c*ChunkSize))
	}
	must(t, block.Flush(leg))
	if !slices.Equal(readAllRows(t, d, rows), before) {
		t.Error("what was pinned has changed")
	}
	for c := range chunks {
		at := c * ChunkSize / sector
		if before[at] != 1 || before[at+ChunkSize/4/sector] != 2 || before[at+ChunkSize/2/sector] != 0 {
			t.Errorf("chunk %d is %d, %d, %d; want 1, 2, 0", c, before[at], before[at+ChunkSize/4/sector], before[at+ChunkSize/2/sector])
		}
	}
	tree.Unpin(id(3))
	if err := is(errorOf(tree.Rows(id(3), chunks*ChunkSize, 100)), ErrState); err != nil {
		t.Errorf("rows of what is not pinned: %v", err)
	}
	must(t, tree.Reclaim(t.Context()))
	if n := len(tree.Layers()); n != 2 {
		t.Errorf("in the end the tree has %d layers, want 2", n)
	}
}

// What is pinned is not parted from what is under it: the pin would protect it alone.
func TestWhatIsPinnedIsNotFlattened(t *testing.T) {
	flatten := func(tree *Tree, during func()) error {
		return tree.Flatten(t.Context(), these(3, 4), func(context.Context, int64, int64) error { during(); return nil })
	}
	parents := func(tree *Tree) (all []uint32) {
		for _, l := range tree.Layers() {
			all = append(all, l.Parent)
		}
		return all
	}
	for name, pin := range map[string]func(tree *Tree, clone *Leg) (during func()){
		"a snapshot": func(tree *Tree, _ *Leg) func() { must(t, tree.Pin(id(4))); return func() {} },
		"the clone": func(tree *Tree, clone *Leg) func() {
			clone.Close()
			must(t, tree.Pin(id(3)))
			return func() {}
		},
		"the clone, of which a snapshot is taken then": func(tree *Tree, clone *Leg) func() {
			must(t, tree.Delete(id(4)))
			must(t, tree.Reclaim(t.Context()))
			clone.Close()
			must(t, tree.Pin(id(3)))
			must(t, tree.Freeze(id(3), id(5), nil))
			must(t, tree.Delete(id(5)))
			return func() {}
		},
		"a snapshot, while it is flattened": func(tree *Tree, _ *Leg) func() {
			return func() {
				if err := tree.Pin(id(4)); err != nil {
					t.Error(err)
				}
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			tree, clone := family(t, ramdisk.New(testSize, 4096))
			during := pin(tree, clone)
			before := parents(tree)
			if err := is(flatten(tree, during), ErrPinned); err != nil {
				t.Error(err)
			}
			if after := parents(tree); !slices.Equal(before, after) {
				t.Errorf("the parents are %v, and were %v", after, before)
			}
			must(t, tree.Delete(id(2)))
			must(t, tree.Reclaim(t.Context()))
			if after := parents(tree); !slices.Equal(before, after) {
				t.Errorf("after a deletion the parents are %v, and were %v", after, before)
			}
			for _, object := range tree.Pinned() {
				tree.Unpin(object)
			}
			must(t, flatten(tree, func() {}))
		})
	}
}

func readAllRows(t *testing.T, d block.Device, rows []Row) (all []uint64) {
	t.Helper()
	for _, r := range rows {
		p := make([]byte, r.Length)
		if !r.Zero {
			must(t, block.ReadAt(d, p, r.At))
		}
		all = append(all, tags(p)...)
	}
	return all
}

func TestWhatCannotBePinned(t *testing.T) {
	tree, leg, _ := memory(t, 64*block.MiB)
	if err := is(tree.Pin(id(1)), ErrInUse); err != nil {
		t.Errorf("a leg that is open: %v", err)
	}
	if err := is(tree.Pin(id(7)), ErrUnknown); err != nil {
		t.Errorf("one that is not there: %v", err)
	}
	for c := range int64(16) {
		must(t, block.WriteAt(leg, tagged(1, GrainSize/sector), c*4*GrainSize))
	}
	leg.Close()
	must(t, tree.Pin(id(1)))
	must(t, tree.Pin(id(1)))
	if rows, err := tree.Rows(id(1), 64*block.MiB, 32); err != nil || len(rows) != 32 || rows[0] != (Row{Length: GrainSize, At: rows[0].At}) || !rows[31].Zero {
		t.Errorf("rows: %v, %v; want 16 pieces of data and what is between them", rows, err)
	}
	for name, err := range map[string]error{
		"too many":  is(errorOf(tree.Rows(id(1), 64*block.MiB, 31)), ErrTooManyRows),
		"too large": is(errorOf(tree.Rows(id(1), 65*block.MiB, 100)), block.ErrRange),
		"nothing":   is(errorOf(tree.Rows(id(1), 0, 100)), block.ErrRange),
	} {
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	tree.Unpin(id(1))
	must(t, errorOf(tree.Leg(id(1))))

	d := &drive{size: testSize, at: true, img: newImage(nil)}
	over, err := FormatOver(overPlace(d), id(1), objectSize, nil)
	must(t, err)
	must(t, over.Freeze(id(1), id(2), nil))
	if err := is(over.Pin(id(2)), ErrState); err != nil {
		t.Errorf("one over the extents of a plain leg: %v", err)
	}
}

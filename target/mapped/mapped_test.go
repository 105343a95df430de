// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/target/treecheck"
)

// memory is a tree in memory, with one leg.
func memory(t testing.TB, size block.Size) (*Tree, *Leg, Place) {
	t.Helper()
	d := ramdisk.New(testSize, 4096)
	must(t, block.WriteAt(d, tagged(others, 60<<20/sector), firstExtent+extentSize+3*ChunkSize)) // somebody else's
	p := testPlace(d)
	p.Extents = []uint32{1}
	tree, err := Format(p, id(1), size, nil)
	if err != nil {
		t.Fatal(err)
	}
	leg, err := tree.Leg(id(1))
	if err != nil {
		t.Fatal(err)
	}
	return tree, leg, p
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// agree compares the tree's figures with those of the independent checker.
func agree(t *testing.T, tree *Tree) {
	t.Helper()
	report, err := treecheck.Check(reader{tree.below}, testSize, firstExtent)
	must(t, err)
	if len(report.Trees) != 1 || len(report.Trees[0].Findings) != 0 {
		t.Fatalf("the checker finds %+v", report.Trees)
	}
	got := report.Trees[0]
	space := tree.Space()
	if uint64(space.Total) != got.TotalBytes || uint64(space.Total-space.Free) != got.UsedBytes {
		t.Errorf("space is %+v, the checker counts %d, %d used", space, got.TotalBytes, got.UsedBytes)
	}
	must(t, countsAsTheCheckerDoes(tree, reader{tree.below}))
}

// countsAsTheCheckerDoes compares the space of each layer.
func countsAsTheCheckerDoes(t *Tree, img io.ReaderAt) error {
	report, err := treecheck.Check(img, testSize, firstExtent)
	if err != nil {
		return err
	}
	usages := t.Usages(always)
	for _, l := range report.Trees[0].Layers {
		u := usages[l.Object]
		if l.State != "doomed" && (uint64(u.Used) != l.UsedBytes || uint64(u.Referenced) != l.ReferencedBytes || uint64(u.Freed) != l.FreedBytes) {
			return fmt.Errorf("layer %d: usage is %+v, the checker counts %+v", l.ID, u, l)
		}
	}
	return nil
}

func always() bool { return true }

func usage(t *Tree, object uint64) Usage { return t.Usages(always)[id(object)] }

// reader makes a device a file.
type reader struct{ d block.Device }

func (r reader) ReadAt(p []byte, off int64) (int, error) { return len(p), block.ReadAt(r.d, p, off) }

func TestSpaceIsCountedAsTheCheckerCounts(t *testing.T) {
	tree, leg, _ := memory(t, 64<<20)
	w := func(at, n int64) {
		t.Helper()
		must(t, block.WriteAt(leg, tagged(uint64(at)+1, int(n)/sector), at))
	}
	w(0, 4096)
	w(5<<20, 3<<20)
	must(t, tree.Freeze(id(1), id(2), nil))
	w(4096, 4096)   // shares chunk 0
	w(5<<20, 1<<20) // replaces chunk 5
	must(t, tree.Freeze(id(1), id(3), nil))
	must(t, block.Do(leg, &block.IO{Op: block.OpDiscard, Off: 6 << 20, Len: 2 << 20}))
	must(t, tree.Clone(id(2), id(4), 128<<20, nil))
	agree(t, tree)
	want := map[uint64]Usage{
		1: {0, 1<<20 + GrainSize, 0},
		2: {4 << 20, 3<<20 + GrainSize, 0}, // two layers are over it
		3: {2 << 20, 3<<20 + GrainSize, 0},
		4: {0, 3<<20 + GrainSize, 0},
	}
	for object, u := range want {
		if got := usage(tree, object); got != u {
			t.Errorf("usage of %d = %+v, want %+v", object, got, u)
		}
	}
	must(t, tree.Delete(id(4)))
	must(t, tree.Reclaim(context.Background()))
	agree(t, tree)
	if got := usage(tree, 2); got.Freed != 2<<20 {
		t.Errorf("%v come free with snapshot 2, want the chunks 0 and 5, which the next one has too", got.Freed)
	}
	before := tree.Space().Free
	must(t, tree.Delete(id(2)))
	must(t, tree.Reclaim(context.Background()))
	agree(t, tree)
	if freed := tree.Space().Free - before; freed != 2<<20 {
		t.Errorf("deleting snapshot 2 freed %v, want 2MiB", freed)
	}
	leg.Close()
	for _, object := range []uint64{3, 1} {
		must(t, tree.Delete(id(object)))
	}
	must(t, tree.Reclaim(context.Background()))
	agree(t, tree)
	if s := tree.Space(); s.Free != s.Total || len(tree.Layers()) != 0 {
		t.Errorf("everything is deleted, and %v of %v are free, layers %v", s.Free, s.Total, tree.Layers())
	}
}

func TestAFullTreeSaysWhenToRepeat(t *testing.T) {
	tree, leg, place := memory(t, 1<<30)
	for c := range int64(253) {
		must(t, block.WriteAt(leg, tagged(uint64(c)+1, 8), c<<20))
	}
	err := block.WriteAt(leg, tagged(9, 8), 300<<20)
	var full *FullError
	if !errors.As(err, &full) || !errors.Is(err, block.ErrFull) {
		t.Fatalf("a write without space: %v, want a FullError", err)
	}
	must(t, block.WriteAt(leg, tagged(5, 8), 8192)) // what has its chunk goes on
	b := make([]byte, 4096)
	must(t, block.ReadAt(leg, b, 300<<20))
	if !bytes.Equal(b, make([]byte, 4096)) {
		t.Error("a write that failed for space has left something")
	}
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	if err := full.Wait(ended); !errors.Is(err, context.Canceled) {
		t.Errorf("Wait(ended) = %v", err)
	}
	must(t, block.Do(leg, &block.IO{Op: block.OpDiscard, Off: 7 << 20, Len: 1 << 20}))
	must(t, full.Wait(t.Context()))
	must(t, block.WriteAt(leg, tagged(9, 8), 300<<20))
	if err := block.WriteAt(leg, tagged(9, 8), 301<<20); !errors.As(err, &full) {
		t.Fatalf("full again: %v", err)
	}
	must(t, tree.AddExtents([]uint32{1, 2}))
	must(t, full.Wait(t.Context()))
	must(t, block.WriteAt(leg, tagged(9, 8), 301<<20))
	agree(t, tree)
	tree.Close()
	if err := block.WriteAt(leg, tagged(1, 8), 0); !errors.Is(err, block.ErrGone) {
		t.Errorf("a write after Close: %v, want ErrGone", err)
	}
	if _, err := Open(place); !errors.Is(err, ErrDamaged) {
		t.Errorf("opened without one of its extents: %v, want ErrDamaged", err)
	}
	place.Extents = []uint32{1, 2}
	tree, err = Open(place)
	must(t, err)
	agree(t, tree)
}

// Records of which all grains are zeroes need no chunk as long as there are slots without one.
func TestADiscardOverASnapshotGivesItsChunkBack(t *testing.T) {
	tree, leg, _ := memory(t, 1<<30)
	for c := range int64(100) {
		must(t, block.WriteAt(leg, tagged(uint64(c)+1, 8), c<<20))
	}
	must(t, tree.Freeze(id(1), id(2), nil))
	free := tree.Space().Free
	must(t, block.WriteAt(leg, tagged(1, 8), 0))
	for i := range uint64(9) { // 900 records for 768 slots
		clone := id(10 + i)
		must(t, tree.Clone(id(2), clone, 1<<30, nil))
		l, err := tree.Leg(clone)
		must(t, err)
		must(t, block.Do(l, &block.IO{Op: block.OpDiscard, Len: 100 << 20}))
		l.Close()
	}
	agree(t, tree)
	if took := free - tree.Space().Free; took != (1+900-768)<<20 {
		t.Errorf("900 records of zeroes took %v, want a chunk for each beyond 768", took)
	}
	b := make([]byte, 4096)
	must(t, block.ReadAt(leg, b, 1<<20))
	if !bytes.Equal(b, tagged(2, 8)) {
		t.Error("a discard in a clone changed its origin")
	}
}

// A kernel that copies a leg writes zeroes where nothing was written.
func TestZeroesTakeNoSpaceWhereThereIsNoData(t *testing.T) {
	tree, leg, _ := memory(t, 1<<30)
	write := func(at int64, fua bool, data []byte) {
		t.Helper()
		must(t, block.Do(leg, &block.IO{Op: block.OpWrite, FUA: fua, Off: at, Len: int64(len(data)), Data: data}))
	}
	free := tree.Space().Free
	takes := func(chunks block.Size) {
		t.Helper()
		if took := free - tree.Space().Free; took != chunks<<20 {
			t.Errorf("%v are taken, want %v", took, chunks<<20)
		}
	}
	zeroes := make([]byte, 3<<20)
	write(0, false, zeroes)
	takes(0)
	write(1<<20-4096, false, append(make([]byte, 4096), tagged(1, 8)...)) // over an edge
	takes(1)
	write(0, true, zeroes[:4096]) // the discard that took its chunk away may not be durable
	takes(2)
	write(1<<20, false, zeroes)
	takes(2) // what has a chunk keeps it
	b := make([]byte, 4096)
	must(t, block.ReadAt(leg, b, 1<<20))
	if !block.AllZero(b) {
		t.Error("zeroes over data are not read")
	}
	agree(t, tree)
}

// A merged chunk may have been discarded in the child before its doomed parent is gone.
func TestADiscardDuringAMergeStays(t *testing.T) {
	tree, leg, place := memory(t, 4<<20)
	must(t, block.WriteAt(leg, tagged(1, 32), 0)) // grain 0
	must(t, tree.Freeze(id(1), id(2), nil))
	must(t, block.Do(leg, &block.IO{Op: block.OpDiscard, Len: GrainSize})) // zeroes over it
	must(t, block.WriteAt(leg, tagged(2, 32), GrainSize))
	must(t, tree.Freeze(id(1), id(3), nil))
	must(t, block.WriteAt(leg, tagged(3, 32), 2*GrainSize))
	must(t, tree.Delete(id(3)))
	doomed, child := tree.nextDoomed(nil)
	must(t, tree.merge(t.Context(), doomed, child))
	must(t, block.Do(leg, &block.IO{Op: block.OpDiscard, Len: 4 << 20}))
	must(t, tree.remove(doomed))
	for range 2 {
		b := make([]byte, 4*GrainSize)
		must(t, block.ReadAt(leg, b, 0))
		if !bytes.Equal(b, make([]byte, len(b))) {
			t.Fatal("what was discarded came back when the layer was gone that hid it")
		}
		tree.Close()
		var err error
		tree, err = Open(place)
		must(t, err)
		leg, err = tree.Leg(id(1))
		must(t, err)
	}
}

// TestManyAtOnce writes, discards, freezes and reclaims at once, and reads what it wrote.
func TestManyAtOnce(t *testing.T) { manyAtOnce(t) }

func TestManyAtOnceWithReadyChunks(t *testing.T) {
	prepareAhead = 8
	defer func() { prepareAhead = 0 }()
	manyAtOnce(t)
}

func manyAtOnce(t *testing.T) {
	const writers, area = 8, 2 << 20 // of the leg, for each
	tree, leg, place := memory(t, writers*area)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	must(t, tree.Freeze(id(1), id(99), nil))
	want := make([][]byte, writers)
	var group, admin sync.WaitGroup
	failed := make(chan error, writers+1)
	for i := range writers {
		want[i] = make([]byte, area/writers)
		group.Go(func() {
			if err := oneOfMany(ctx, leg, want[i], i, writers); err != nil {
				failed <- fmt.Errorf("writer %d: %w", i, err)
			}
		})
	}
	stop := make(chan struct{})
	admin.Go(func() {
		for n := uint64(100); ; n++ {
			select {
			case <-stop:
				return
			default:
			}
			err := errors.Join(tree.Freeze(id(1), id(n), nil), tree.Reclaim(ctx))
			if n >= 103 {
				err = errors.Join(err, tree.Delete(id(n-2)))
			}
			if err != nil {
				failed <- err
				return
			}
		}
	})
	group.Wait()
	close(stop)
	admin.Wait()
	select {
	case err := <-failed:
		t.Fatal(err)
	default:
	}
	must(t, tree.Reclaim(ctx))
	agree(t, tree)
	tree.Close()
	tree, err := Open(place)
	must(t, err)
	leg, err = tree.Leg(id(1))
	must(t, err)
	for i := range want {
		if err := compareStriped(leg, want[i], i, writers); err != nil {
			t.Errorf("writer %d, after it was opened again: %v", i, err)
		}
	}
}

// oneOfMany writes to each n-th 4 KiB of the leg, so that all write to the same grains.
func oneOfMany(ctx context.Context, leg *Leg, want []byte, i, n int) error {
	r := rand.New(rand.NewPCG(uint64(i), 3))
	for range 1500 {
		if ctx.Err() != nil {
			return nil
		}
		at := r.IntN(len(want)/4096) * 4096
		op := block.OpWrite
		if r.IntN(4) == 0 {
			op = block.OpWriteZeroes
			clear(want[at : at+4096])
		} else {
			copy(want[at:], tagged(r.Uint64()>>1, 8))
		}
		off := int64(at*n + i*4096)
		if err := block.Do(leg, &block.IO{Op: op, Off: off, Len: 4096, Data: want[at : at+4096]}); err != nil {
			return err
		}
		again := r.IntN(len(want)/4096) * 4096
		b := make([]byte, 4096)
		if err := block.ReadAt(leg, b, int64(again*n+i*4096)); err != nil {
			return err
		}
		if !bytes.Equal(b, want[again:again+4096]) {
			return fmt.Errorf("offset %d reads what was not written last", again*n+i*4096)
		}
		if err := namedIfData(leg, b, int64(again*n+i*4096)); err != nil {
			return err
		}
	}
	return compareStriped(leg, want, i, n)
}

// namedIfData checks that both lists of ranges name what is written at an offset. Snapshot 99 is empty.
func namedIfData(leg *Leg, data []byte, off int64) error {
	end := off + int64(len(data))
	for kind, ask := range map[string]func() ([]block.Range, int64, error){
		"allocated": func() ([]block.Range, int64, error) { return leg.Allocated(off, end, 1) },
		"differing": func() ([]block.Range, int64, error) { return leg.Differing(id(99), off, end, 1) },
	} {
		found, _, err := ask()
		if err != nil {
			return err
		}
		if !block.AllZero(data) && (len(found) != 1 || found[0] != block.Range{Off: off, End: end}) {
			return fmt.Errorf("%d to %d are written, %s are %v", off, end, kind, found)
		}
	}
	return nil
}

func compareStriped(leg *Leg, want []byte, i, n int) error {
	b := make([]byte, 4096)
	for at := 0; at < len(want); at += 4096 {
		if err := block.ReadAt(leg, b, int64(at*n+i*4096)); err != nil {
			return err
		}
		if !bytes.Equal(b, want[at:at+4096]) {
			return fmt.Errorf("offset %d reads what was not written last", at*n+i*4096)
		}
	}
	return nil
}

func TestMappedIOTakesNoMemory(t *testing.T) {
	tree, leg, _ := memory(t, 64<<20)
	must(t, block.WriteAt(leg, tagged(1, 64), 0))
	must(t, tree.Freeze(id(1), id(2), nil))
	must(t, block.WriteAt(leg, tagged(1, 8), 0)) // grain 0 above, grain 1 below
	p := make([]byte, 32<<10)
	for name, io := range map[string]*block.IO{
		"read of one layer":  {Op: block.OpRead, Off: 0, Len: 4096, Data: p[:4096]},
		"read of two layers": {Op: block.OpRead, Off: 8192, Len: 16 << 10, Data: p[:16<<10]},
		"read of nothing":    {Op: block.OpRead, Off: 5 << 20, Len: 4096, Data: p[:4096]},
		"write in place":     {Op: block.OpWrite, Off: 4096, Len: 4096, Data: p[:4096]},
		"flush":              {Op: block.OpFlush},
	} {
		io.Done = func(*block.IO) {}
		leg.Submit(io)
		if n := testing.AllocsPerRun(100, func() { leg.Submit(io) }); n > 0 {
			t.Errorf("%s allocates %v times", name, n)
		}
		must(t, io.Err)
	}
}

func TestAnErrorOfTheDriveStopsTheTree(t *testing.T) {
	d := &drive{size: testSize, at: true, img: newImage(nil)}
	p := testPlace(d)
	tree, err := Format(p, id(1), 64<<20, nil)
	must(t, err)
	leg, err := tree.Leg(id(1))
	must(t, err)
	must(t, block.WriteAt(leg, tagged(1, 8), 0))
	broken := func(data bool) func(*block.IO) error {
		return func(io *block.IO) error {
			if io.Op == block.OpWrite && ((io.Off-firstExtent)%extentSize >= ChunkSize) == data {
				return block.ErrMedium
			}
			return nil
		}
	}
	d.broken = broken(true)
	if err := block.WriteAt(leg, tagged(2, 8), 1<<20); !errors.Is(err, block.ErrMedium) || tree.Err() != nil {
		t.Errorf("a bad block of data: %v, and the tree says %v; want only the write to fail", err, tree.Err())
	}
	d.broken = nil
	must(t, block.WriteAt(leg, tagged(3, 8), 1<<20))
	d.broken = broken(false)
	free := tree.Space().Free
	if err := block.WriteAt(leg, tagged(4, 8), 2<<20); !errors.Is(err, ErrFailed) {
		t.Errorf("a bad block of the table: %v, want ErrFailed", err)
	}
	if left := tree.Space().Free; left != free-ChunkSize {
		t.Errorf("%v are free, of %v: a write that is under way may take a chunk whose record may be on the drive", left, free)
	}
	d.broken = nil
	if err := block.ReadAt(leg, make([]byte, 4096), 0); !errors.Is(err, ErrFailed) {
		t.Errorf("a read after the tree has stopped: %v, want ErrFailed", err)
	}
	tree, err = Open(p)
	must(t, err)
	leg, err = tree.Leg(id(1))
	must(t, err)
	if got := readObjectAt(t, leg, 1<<20, 8); got[0] != 3 {
		t.Errorf("an acknowledged write reads %x after the tree was opened again", got)
	}
}

func readObjectAt(t *testing.T, l *Leg, off int64, sectors int) []uint64 {
	t.Helper()
	b := make([]byte, sectors*sector)
	must(t, block.ReadAt(l, b, off))
	return tags(b)
}

func TestRequestsThatAreRefused(t *testing.T) {
	tree, leg, _ := memory(t, 64<<20)
	must(t, tree.Freeze(id(1), id(2), nil))
	must(t, tree.Freeze(id(1), id(2), nil)) // is done already
	snapshot, err := tree.Leg(id(2))
	must(t, err)
	for name, c := range map[string]struct{ got, want error }{
		"write to a snapshot":     {block.WriteAt(snapshot, tagged(1, 8), 0), block.ErrReadOnly},
		"delete in use":           {tree.Delete(id(2)), ErrInUse},
		"delete a head in use":    {tree.Delete(id(1)), ErrInUse},
		"restore a snapshot":      {tree.Restore(id(2), id(2)), ErrState},
		"restore to a head":       {tree.Restore(id(1), id(1)), ErrState},
		"restore to what is not":  {tree.Restore(id(1), id(9)), ErrUnknown},
		"freeze a snapshot":       {tree.Freeze(id(2), id(3), nil), ErrUnknown},
		"freeze as another leg":   {tree.Freeze(id(1), id(1), nil), ErrExists},
		"clone a head":            {tree.Clone(id(1), id(3), 64<<20, nil), ErrState},
		"clone to what is there":  {tree.Clone(id(2), id(1), 64<<20, nil), ErrExists},
		"clone to something less": {tree.Clone(id(2), id(3), 32<<20, nil), block.ErrRange},
		"create what is there":    {tree.Create(id(1), 64<<20, nil), ErrExists},
		"a note too long":         {tree.Create(id(3), 64<<20, make([]byte, MaxNote+1)), block.ErrRange},
		"delete what is not":      {tree.Delete(id(9)), nil},
		"shrink":                  {tree.Grow(id(1), 4096), nil},
	} {
		if !errors.Is(c.got, c.want) {
			t.Errorf("%s: %v, want %v", name, c.got, c.want)
		}
	}
	if n := len(tree.Layers()); n != 2 {
		t.Errorf("%d layers after requests that were refused, want 2", n)
	}
	must(t, tree.Grow(id(1), 128<<20))
	must(t, block.WriteAt(leg, tagged(1, 8), 100<<20))
	if leg.Geometry().Size != 128<<20 {
		t.Errorf("a grown leg has %v", leg.Geometry().Size)
	}
	agree(t, tree)
}

// slow is a drive that keeps requests until it is told to answer.
type slow struct {
	block.Device
	mu   sync.Mutex
	keep func(*block.IO) bool
	kept []*block.IO
}

func (s *slow) Submit(io *block.IO) {
	s.mu.Lock()
	if s.keep != nil && s.keep(io) {
		s.kept = append(s.kept, io)
		s.mu.Unlock()
		return
	}
	s.mu.Unlock()
	s.Device.Submit(io)
}

func (s *slow) set(keep func(*block.IO) bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.keep = keep
}

// answer does what was kept.
func (s *slow) answer() {
	s.mu.Lock()
	kept := s.kept
	s.kept, s.keep = nil, nil
	s.mu.Unlock()
	for _, io := range kept {
		s.Device.Submit(io)
	}
}

func slowTree(t *testing.T) (*slow, *Tree, *Leg) {
	t.Helper()
	d := &slow{Device: ramdisk.New(testSize, 4096)}
	p := testPlace(d)
	p.Extents = []uint32{0}
	tree, err := Format(p, id(1), 64<<20, nil)
	must(t, err)
	leg, err := tree.Leg(id(1))
	must(t, err)
	return d, tree, leg
}

func TestFreezeWaitsForWrites(t *testing.T) {
	d, tree, leg := slowTree(t)
	must(t, block.WriteAt(leg, tagged(1, 8), 0))
	d.set(func(io *block.IO) bool {
		return io.Op == block.OpWrite && io.Len == 4096 && bytes.Equal(io.Data, tagged(2, 8))
	})
	wrote, frozen := make(chan error, 1), make(chan error, 1)
	go func() { wrote <- block.WriteAt(leg, tagged(2, 8), 0) }()
	for kept := 0; kept == 0; time.Sleep(time.Millisecond) {
		d.mu.Lock()
		kept = len(d.kept)
		d.mu.Unlock()
	}
	go func() { frozen <- tree.Freeze(id(1), id(2), nil) }()
	select {
	case err := <-frozen:
		t.Errorf("frozen with a write under way: %v", err)
		frozen <- err
	case <-time.After(50 * time.Millisecond):
	}
	d.answer()
	must(t, errors.Join(<-wrote, <-frozen))
	snapshot, err := tree.Leg(id(2))
	must(t, err)
	if got := readObjectAt(t, snapshot, 0, 8); got[0] != 2 {
		t.Errorf("the snapshot has %d, want the write that was under way", got[0])
	}
}

// A snapshot has every write that was acknowledged before, although the drive had it in its cache alone:
// also one that is there after a power cut, and was not answered.
func TestAFreezeIsDurable(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &drive{size: testSize, volatile: true, base: newImage(nil), img: newImage(nil)}
		tree, err := Format(testPlace(d), id(1), 64<<20, nil)
		must(t, err)
		leg, err := tree.Leg(id(1))
		must(t, err)
		must(t, block.WriteAt(leg, tagged(1, 16), 0))
		must(t, block.WriteAt(leg, tagged(2, 8), 0)) // in place: no record says so
		began := d.now()
		must(t, tree.Freeze(id(1), id(2), nil))
		answered := d.now()
		must(t, block.WriteAt(leg, tagged(3, 16), 0))
		for seed := range uint64(400) {
			cut := began + int(seed)%(d.now()-began+1)
			after := d.afterCut(t, seed, cut)
			snapshot, err := after.Leg(id(2))
			if errors.Is(err, ErrUnknown) && cut < answered {
				continue
			}
			must(t, err)
			if got := readObjectAt(t, snapshot, 0, 16); got[0] != 2 || got[15] != 1 {
				t.Fatalf("after a power cut the snapshot has %v, want what was acknowledged before it", got)
			}
		}
	})
}

// Each layer's own space is known without looking at its chunks, whatever happens to them.
func TestTheSpaceOfALegIsCounted(t *testing.T) {
	d := &drive{size: testSize, at: true, img: newImage(nil)}
	tree, err := Format(testPlace(d), id(1), 64<<20, nil)
	must(t, err)
	leg, err := tree.Leg(id(1))
	must(t, err)
	check := func(when string, want map[block.UUID]block.Size) {
		t.Helper()
		if got := tree.Used(); !maps.Equal(got, want) {
			t.Errorf("%s: Used = %v, want %v", when, got, want)
		}
		for object, used := range tree.Used() {
			if u := tree.Usages(always)[object]; u.Used != used {
				t.Errorf("%s: %v has %v, counted %v", when, object, u.Used, used)
			}
		}
	}
	write := func(chunks ...int64) {
		t.Helper()
		for _, c := range chunks {
			must(t, block.WriteAt(leg, tagged(1, 8), c<<20))
		}
	}
	write(0, 1, 2, 0)
	check("written", map[block.UUID]block.Size{id(1): 3 << 20})
	must(t, tree.Freeze(id(1), id(2), nil))
	write(0, 5)
	check("written over a snapshot", map[block.UUID]block.Size{id(1): 2 << 20, id(2): 3 << 20})
	must(t, block.Do(leg, &block.IO{Op: block.OpDiscard, Off: 5 << 20, Len: 1 << 20}))
	must(t, block.Do(leg, &block.IO{Op: block.OpDiscard, Off: 1 << 20, Len: 1 << 20}))
	check("discarded", map[block.UUID]block.Size{id(1): 1 << 20, id(2): 3 << 20})
	must(t, tree.Clone(id(2), id(3), 64<<20, nil))
	leg.Close()
	tree.Close()
	tree, err = Open(testPlace(d))
	must(t, err)
	check("opened again", map[block.UUID]block.Size{id(1): 1 << 20, id(2): 3 << 20, id(3): 0})
	must(t, tree.Delete(id(3)))
	must(t, tree.Delete(id(2)))
	must(t, tree.Reclaim(t.Context()))
	check("merged", map[block.UUID]block.Size{id(1): 2 << 20})
}

func TestAChunkInUseIsNotGivenAway(t *testing.T) {
	d, tree, leg := slowTree(t)
	must(t, block.WriteAt(leg, tagged(1, 8), 0))
	must(t, tree.Create(id(9), 64<<20, nil))
	other, err := tree.Leg(id(9))
	must(t, err)
	d.set(func(io *block.IO) bool { return io.Op == block.OpRead })
	b, read := make([]byte, 4096), make(chan error, 1)
	go func() { read <- block.ReadAt(leg, b, 0) }()
	for kept := 0; kept == 0; time.Sleep(time.Millisecond) {
		d.mu.Lock()
		kept = len(d.kept)
		d.mu.Unlock()
	}
	d.set(nil)
	must(t, block.Do(leg, &block.IO{Op: block.OpDiscard, Len: 1 << 20}))
	for c := range int64(4) { // would take the chunk
		must(t, block.WriteAt(other, tagged(2, 8), c<<20))
	}
	d.answer()
	must(t, <-read)
	if tags(b)[0] == 2 {
		t.Error("a read has got what another leg wrote")
	}
	free := tree.Space().Free
	must(t, block.WriteAt(other, tagged(2, 8), 5<<20))
	if tree.Space().Free != free-1<<20 || tree.record(3).layer == 0 {
		t.Error("the chunk did not come free when the read had ended")
	}
}

func TestAFreedChunkWaitsForAFlush(t *testing.T) {
	d := &drive{size: testSize, at: true, volatile: true, img: newImage(nil)}
	tree, err := Format(testPlace(d), id(1), 64<<20, nil)
	must(t, err)
	leg, err := tree.Leg(id(1))
	must(t, err)
	must(t, block.WriteAt(leg, tagged(1, 8), 0))
	free := tree.Space().Free
	must(t, block.Do(leg, &block.IO{Op: block.OpDiscard, Len: 1 << 20}))
	if got := tree.Space().Free; got != free {
		t.Errorf("%v free, %v before: the record that frees the chunk is only in the drive's cache", got, free)
	}
	must(t, block.Flush(leg))
	if got := tree.Space().Free; got != free+1<<20 {
		t.Errorf("%v free after the flush, %v before the discard", got, free)
	}
}

// afterCut opens the tree as a power cut before event k may leave it, on a drive with a volatile cache.
func (d *drive) afterCut(t *testing.T, seed uint64, k int) *Tree {
	t.Helper()
	tree, err := Open(testPlace(&drive{size: testSize, volatile: true, at: true, img: d.crash(rand.New(rand.NewPCG(seed, 1)), k)}))
	must(t, err)
	return tree
}

// forget makes the drive lose what it had in its cache alone.
func (d *drive) forget() {
	d.mu.Lock()
	defer d.mu.Unlock()
	base := newImage(d.base)
	for _, w := range d.log {
		if d.durable(w, d.events) {
			base.write(w.data, w.off)
		}
	}
	d.base, d.log, d.img = flat(base), nil, newImage(flat(base))
}

// A record that only the cache held is in memory still when the cache is lost. A write to its grain in place would
// be gone when the tree is opened again, although it was flushed.
func TestATreeStopsWhenItsDriveHasLostWrites(t *testing.T) {
	for name, notices := range map[string]func(d *drive, losses *uint64, leg *Leg){
		"another leg's flush has failed": func(_ *drive, losses *uint64, _ *Leg) { *losses++ },
		"its own flush fails": func(d *drive, _ *uint64, leg *Leg) {
			d.broken = func(io *block.IO) error {
				if io.Op == block.OpFlush {
					return errors.New("the cache is lost")
				}
				return nil
			}
			if err := block.Flush(leg); err == nil {
				t.Error("the flush succeeds")
			}
			d.broken = nil
		},
		"another leg's flush fails, and its own, behind it, does not": func(d *drive, losses *uint64, leg *Leg) {
			d.broken = func(io *block.IO) error {
				if io.Op == block.OpFlush {
					*losses++
				}
				return nil
			}
			if err := block.Flush(leg); !errors.Is(err, ErrFailed) {
				t.Errorf("a flush that knows nothing of the loss = %v", err)
			}
			d.broken = nil
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			d, losses := &drive{size: testSize, volatile: true, base: newImage(nil), img: newImage(nil)}, uint64(0)
			place := testPlace(d)
			place.Losses = func() uint64 { return losses }
			tree, err := Format(place, id(1), 64<<20, nil)
			must(t, err)
			leg, err := tree.Leg(id(1))
			must(t, err)
			must(t, block.Flush(leg))
			must(t, block.WriteAt(leg, tagged(1, GrainSize/sector), 0))
			d.forget()
			notices(d, &losses, leg)
			if err := block.WriteAt(leg, tagged(2, GrainSize/sector), 0); !errors.Is(err, ErrFailed) {
				t.Fatalf("%s: a write to what was lost = %v, want %v", name, err, ErrFailed)
			}
			tree.Close()
			tree, err = Open(place)
			must(t, err)
			leg, err = tree.Leg(id(1))
			must(t, err)
			must(t, block.WriteAt(leg, tagged(3, GrainSize/sector), 0))
			must(t, block.Flush(leg))
			d.forget()
			after, err := Open(testPlace(d))
			must(t, err)
			again, err := after.Leg(id(1))
			must(t, err)
			if got := readObjectAt(t, again, 0, 16); got[0] != 3 || got[15] != 3 {
				t.Errorf("%s: after a later write and a flush the leg has %v, want that write", name, got)
			}
		})
	}
}

// What cannot be read keeps its own layer from going, and no other one.
func TestWhatCannotBeReadDoesNotKeepOtherSpace(t *testing.T) {
	d := &drive{size: testSize, at: true, img: newImage(nil)}
	tree, err := Format(testPlace(d), id(1), 64<<20, nil)
	must(t, err)
	leg, err := tree.Leg(id(1))
	must(t, err)
	must(t, block.WriteAt(leg, tagged(1, 4*GrainSize/sector), 0))
	must(t, tree.Freeze(id(1), id(2), nil))
	must(t, block.WriteAt(leg, tagged(2, GrainSize/sector), 0))
	must(t, tree.Freeze(id(1), id(3), nil))
	must(t, block.WriteAt(leg, tagged(3, GrainSize/sector), 5*ChunkSize))
	want := whole(t, leg)
	must(t, tree.Delete(id(2)))
	must(t, tree.Delete(id(3)))
	d.broken = func(io *block.IO) error {
		if io.Op == block.OpRead && io.Len >= GrainSize {
			return errors.New("a bad sector")
		}
		return nil
	}
	if err := tree.Reclaim(t.Context()); err == nil || !strings.Contains(err.Error(), "a bad sector") || tree.Err() != nil {
		t.Fatalf("Reclaim = %v, the tree: %v", err, tree.Err())
	}
	if n := len(tree.Kin()); n != 2 || !tree.Reclaimable() {
		t.Errorf("%d layers are left, want the leg's and the one that cannot be read", n)
	}
	d.broken = nil
	must(t, tree.Reclaim(t.Context()))
	if n := len(tree.Kin()); n != 1 {
		t.Errorf("%d layers are left in the end, want the leg's", n)
	}
	if !bytes.Equal(whole(t, leg), want) {
		t.Error("the leg reads otherwise")
	}
	agree(t, tree)
}

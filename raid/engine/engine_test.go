// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
)

var errDisk = errors.New("disk says no")

// mirrorOf makes a mirror of slow legs, and returns the events of its engine.
func mirrorOf(t *testing.T, copies int) (*Volume, []*slow, chan Event) {
	t.Helper()
	events := make(chan Event, 100)
	cfg := Config{Layout: layout(1, copies, block.DefaultChunk), Size: 16 * block.MiB, OnEvent: func(e Event) { events <- e }}
	legs := make([]*slow, copies)
	all := make([]block.Device, copies)
	for i := range legs {
		legs[i] = &slow{memory: newMemory(cfg.Size)}
		all[i] = legs[i]
	}
	v := volume(t, cfg, all...)
	answerAll(legs) // the first flush
	return v, legs, events
}

func answerAll(legs []*slow) {
	for _, l := range legs {
		l.answer(nil)
	}
}

func wait[T any](t *testing.T, c chan T) T {
	t.Helper()
	select {
	case x := <-c:
		return x
	case <-time.After(10 * time.Second):
		t.Fatal("nothing happened in 10s")
		panic("not reached")
	}
}

// until polls a condition, for at most 10 s.
func until(t *testing.T, is func() bool) {
	t.Helper()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(10 * time.Second); !is(); <-tick.C {
		if time.Now().After(deadline) {
			t.Fatal("it has not come to that in 10s")
		}
	}
}

func TestAWriteIsAcknowledgedOnceAllLegsHaveIt(t *testing.T) {
	v, legs, _ := mirrorOf(t, 3)
	done := start(v, write(4096, fill(8192, 1)))
	for i, l := range legs {
		if !open(done) {
			t.Fatalf("acknowledged by %d of 3 legs", i)
		}
		l.answer(nil)
	}
	if err := wait(t, done); err != nil {
		t.Fatal(err)
	}
}

func TestAWriteThatALegFailsIsHeldUntilTheLegIsDropped(t *testing.T) {
	v, legs, events := mirrorOf(t, 2)
	done := start(v, write(0, fill(4096, 1)))
	legs[0].answer(errDisk)
	legs[1].answer(nil)
	if e := wait(t, events); e.Kind != LegFailed || e.Copy != 0 || !e.Held || !errors.Is(e.Err, errDisk) {
		t.Errorf("event %+v, want that 0.0 failed and holds", e)
	}
	if s := v.Status(); !open(done) || s.Held != 1 || s.Legs[0][0].Failed != 1 || s.Legs[0][0].Err == nil {
		t.Fatalf("open %v, status %+v; want one IO held by 0.0", open(done), s)
	}
	if err := v.Drop(0, 0); err != nil {
		t.Fatal(err)
	}
	if err := wait(t, done); err != nil {
		t.Fatal(err)
	}
	if s := v.Status(); s.Held != 0 || s.Legs[0][0].State != Dropped || s.Legs[0][0].Dirty != 1 {
		t.Errorf("status %+v, want 0.0 dropped with one region", s)
	}
}

func TestAWriteThatALegDoesNotAnswerWaitsForDropAndCut(t *testing.T) {
	for _, cutFirst := range []bool{false, true} {
		v, legs, _ := mirrorOf(t, 2)
		done := start(v, write(0, fill(4096, 1)))
		legs[1].answer(nil)
		if s := v.Status(); s.Legs[0][0].Outstanding != 1 || s.Legs[0][1].Outstanding != 0 || s.Legs[0][0].Oldest <= 0 {
			t.Errorf("status %+v, want one IO outstanding at 0.0", s)
		}
		if cutFirst {
			legs[0].answer(block.ErrGone)
		}
		if err := v.Drop(0, 0); err != nil {
			t.Fatal(err)
		}
		if !cutFirst {
			if !open(done) {
				t.Error("acknowledged while a device still has its memory")
			}
			legs[0].answer(block.ErrGone)
		}
		if err := wait(t, done); err != nil {
			t.Fatal(err)
		}
		if s := v.Status(); s.Legs[0][0].Dirty != 1 {
			t.Errorf("dirty %d, want the region of the write under way", s.Legs[0][0].Dirty)
		}
	}
}

func TestTheLastLegInSyncIsNotDroppedButTriedAgain(t *testing.T) {
	v, legs, _ := mirrorOf(t, 2)
	if err := v.Drop(0, 0); err != nil {
		t.Fatal(err)
	}
	if err := v.Drop(0, 1); !errors.Is(err, ErrLastLeg) {
		t.Fatalf("drop of the last leg = %v", err)
	}
	done := start(v, write(0, fill(4096, 1)))
	flushed := start(v, &block.IO{Op: block.OpFlush})
	legs[1].answer(errDisk)
	until(t, func() bool { return legs[1].holds() == 2 })
	if !open(done) || !open(flushed) || v.Status().Held == 0 {
		t.Fatal("not held")
	}
	legs[1].answer(nil)
	if err := errors.Join(wait(t, done), wait(t, flushed)); err != nil {
		t.Fatal(err)
	}
}

func TestAReadThatALegFailsGoesToAnother(t *testing.T) {
	v, legs, events := mirrorOf(t, 2)
	want := fill(4096, 1)
	for _, l := range legs {
		copy(l.data, want)
	}
	got := make([]byte, 4096)
	done := start(v, read(0, got))
	from, other := legs[0], legs[1]
	if from.holds() == 0 {
		from, other = other, from
	}
	from.answer(block.ErrMedium)
	if e := wait(t, events); e.Kind != LegFailed || e.Held {
		t.Errorf("event %+v, want an error that holds nothing", e)
	}
	other.answer(nil)
	if err := wait(t, done); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("read %v", err)
	}
}

func TestAReadFromADroppedLegIsMadeAgain(t *testing.T) {
	v, legs, _ := mirrorOf(t, 2)
	copy(legs[0].data, fill(4096, 1))
	copy(legs[1].data, fill(4096, 1))
	got := make([]byte, 4096)
	done := start(v, read(0, got))
	from := 0
	if legs[0].holds() == 0 {
		from = 1
	}
	if err := v.Drop(0, from); err != nil {
		t.Fatal(err)
	}
	clear(legs[from].data) // it went back in time
	legs[from].answer(nil)
	if !open(done) {
		t.Fatal("what a dropped leg read was believed")
	}
	legs[1-from].answer(nil)
	if err := wait(t, done); err != nil || !bytes.Equal(got, fill(4096, 1)) {
		t.Fatalf("read %v", err)
	}
}

func TestAMediumErrorOfAllCopiesFailsOnlyIfWanted(t *testing.T) {
	for _, wanted := range []bool{true, false} {
		cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: block.MiB, FailMedium: wanted}
		legs := memories(cfg)
		v := volume(t, cfg, legs...)
		for _, l := range legs {
			l.(*memory).failing(block.ErrMedium)
		}
		done := start(v, read(0, make([]byte, 4096)))
		if wanted {
			if err := wait(t, done); !errors.Is(err, block.ErrMedium) {
				t.Errorf("read = %v", err)
			}
			legs[1].(*memory).failing(errDisk) // which may pass
			done = start(v, read(0, make([]byte, 4096)))
		}
		if !open(done) {
			t.Fatal("not held")
		}
		legs[1].(*memory).failing(nil)
		if err := wait(t, done); err != nil {
			t.Errorf("read after it passed = %v", err)
		}
	}
}

func TestWhatOverlapsWaits(t *testing.T) {
	v, legs, _ := mirrorOf(t, 2)
	first := start(v, write(0, fill(8192, 1)))
	second := start(v, write(4096, fill(8192, 2)))
	got := make([]byte, 4096)
	reading := start(v, read(8192, got))
	beside := start(v, write(1<<20, fill(4096, 3)))
	if n := legs[0].holds(); n != 2 {
		t.Fatalf("a leg has %d IOs, want the first write and the one beside it", n)
	}
	answerAll(legs)
	if err := errors.Join(wait(t, first), wait(t, beside)); err != nil {
		t.Fatal(err)
	}
	if !open(reading) || legs[0].holds() != 1 {
		t.Fatal("the read did not wait for the second write")
	}
	answerAll(legs)
	answerAll(legs)
	if err := errors.Join(wait(t, second), wait(t, reading)); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, fill(8192, 2)[4096:]) {
		t.Error("the read saw what was before the write that it waited for")
	}
}

func TestASuspendedVolumeSendsNothingAndFailsNothing(t *testing.T) {
	v, legs, _ := mirrorOf(t, 2)
	v.Suspend()
	all := []chan error{
		start(v, write(0, fill(4096, 1))), start(v, read(1<<20, make([]byte, 4096))), start(v, &block.IO{Op: block.OpFlush}),
	}
	if n := legs[0].holds() + legs[1].holds(); n != 0 || !v.Status().Suspended {
		t.Fatalf("legs have %d IOs", n)
	}
	v.Resume()
	answerAll(legs)
	for _, done := range all {
		if err := wait(t, done); err != nil {
			t.Fatal(err)
		}
	}
}

func TestARebuildCopiesOnlyWhatWasMissed(t *testing.T) {
	v, legs, events := mirrorOf(t, 3)
	mediums := []*memory{legs[0].memory, legs[1].memory, legs[2].memory}
	put := func(off int64, seed uint64) {
		t.Helper()
		done := start(v, write(off, fill(4096, seed)))
		answerAll(legs)
		if err := wait(t, done); err != nil {
			t.Fatal(err)
		}
	}
	// Two legs leave at different times.
	if err := v.Drop(0, 1); err != nil {
		t.Fatal(err)
	}
	put(0, 1)
	if err := v.Drop(0, 2); err != nil {
		t.Fatal(err)
	}
	put(8<<20, 2)
	// Data that the leg that left later had not flushed counts as missed too.
	for copy, want := range []uint64{0, 2, 2} {
		if got := v.Status().Legs[0][copy].Dirty; got != want {
			t.Errorf("leg 0.%d misses %d regions, want %d", copy, got, want)
		}
	}
	for _, copy := range []int{1, 2} {
		mediums[copy].ios.Store(0)
		mediums[0].ios.Store(0)
		if err := v.Add(0, copy, mediums[copy], Rebuilding, false); err != nil {
			t.Fatal(err)
		}
		until(t, func() bool {
			legs[0].answer(nil)
			return len(events) > 0
		})
		if e := wait(t, events); e.Kind != LegCaughtUp || e.Copy != copy {
			t.Fatalf("event %+v", e)
		}
		if got := mediums[copy].ios.Load(); got != 3 { // two regions and a flush
			t.Errorf("leg 0.%d got %d IOs, want 3", copy, got)
		}
		if err := v.Promote(0, copy); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(mediums[0].data, mediums[copy].data) {
			t.Errorf("leg 0.%d differs", copy)
		}
	}
}

func TestARebuildingLegThatErrsIsDroppedAndItsMapKept(t *testing.T) {
	cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: 16 * block.MiB}
	events := make(chan Event, 10)
	cfg.OnEvent = func(e Event) { events <- e }
	legs := memories(cfg)
	v := volume(t, cfg, legs[0])
	bad := legs[1].(*memory)
	bad.failing(errDisk)
	if err := v.Add(0, 1, bad, Rebuilding, true); err != nil {
		t.Fatal(err)
	}
	if e := wait(t, events); e.Kind != RebuildFailed || !errors.Is(e.Err, errDisk) {
		t.Fatalf("event %+v", e)
	}
	if s := v.Status().Legs[0][1]; s.State != Dropped || s.Dirty != s.Regions {
		t.Errorf("leg is %+v, want it dropped and missing all", s)
	}
	bad.failing(nil)
	if err := v.Add(0, 1, bad, Rebuilding, false); err != nil {
		t.Fatal(err)
	}
	if e := wait(t, events); e.Kind != LegCaughtUp {
		t.Fatalf("event %+v", e)
	}
}

func TestALegDroppedBeforeItsFirstFlushMissesAll(t *testing.T) {
	cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: 16 * block.MiB}
	legs := []*slow{{memory: newMemory(cfg.Size)}, {memory: newMemory(cfg.Size)}}
	v := volume(t, cfg, legs[0], legs[1])
	legs[0].answer(nil)
	legs[1].answer(errDisk)
	if err := v.Drop(0, 1); err != nil {
		t.Fatal(err)
	}
	if s := v.Status().Legs[0][1]; s.Dirty != s.Regions || s.Regions == 0 {
		t.Errorf("it misses %d regions of %d", s.Dirty, s.Regions)
	}
}

func TestALegInSyncCanHaveAnotherDevice(t *testing.T) {
	v, legs, _ := mirrorOf(t, 2)
	failed := start(v, write(0, fill(4096, 1)))
	answerAll([]*slow{legs[1]})
	legs[0].answer(block.ErrGone)
	late := start(v, write(1<<20, fill(4096, 1)))
	answerAll([]*slow{legs[1]})
	if !open(failed) {
		t.Fatal("not held")
	}
	if err := v.Add(0, 0, legs[0].memory, InSync, false); err != nil {
		t.Fatal(err)
	}
	legs[0].answer(block.ErrGone) // what the old one had all the same
	if err := errors.Join(wait(t, failed), wait(t, late)); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(legs[0].data, legs[1].data) {
		t.Error("copies differ")
	}
}

func TestALateReadErrorOfAReplacedDeviceSaysNothingOfTheNewOne(t *testing.T) {
	v, legs, events := mirrorOf(t, 1)
	done := start(v, read(0, make([]byte, 4096)))
	if err := v.Add(0, 0, legs[0].memory, InSync, false); err != nil {
		t.Fatal(err)
	}
	legs[0].answer(block.ErrGone)
	if err := wait(t, done); err != nil {
		t.Fatal(err)
	}
	if err := v.Status().Legs[0][0].Err; err != nil || len(events) > 0 {
		t.Errorf("the new device has the old one's error: %v", err)
	}
}

func TestOnlyWhatIsSafeCanBeAdded(t *testing.T) {
	cfg := Config{Layout: layout(2, 2, block.DefaultChunk), Size: 16 * block.MiB, BlockSize: 512}
	legs := memories(cfg)
	v := volume(t, cfg, legs[0], nil, legs[2], legs[3])
	if err := v.Drop(1, 1); err != nil {
		t.Fatal(err)
	}
	if err := block.WriteAt(v, fill(1<<20, 1), 0); err != nil {
		t.Fatal(err)
	}
	big := newMemory(16 * block.MiB)
	big.g.BlockSize = 4096
	for name, err := range map[string]error{
		"in sync though it missed a write": v.Add(0, 1, legs[1], InSync, false),
		"in sync though it was dropped":    v.Add(1, 1, legs[3], InSync, false),
		"rebuilding though it is in sync":  v.Add(0, 0, legs[0], Rebuilding, false),
		"too small":                        v.Add(0, 1, newMemory(block.MiB), Rebuilding, true),
		"blocks too large":                 v.Add(0, 1, big, Rebuilding, true),
		"no such leg":                      v.Add(0, cfg.Layout.Slots(), legs[1], Rebuilding, true),
		"promoted though it misses writes": v.Promote(1, 1),
	} {
		if err == nil {
			t.Errorf("a leg was added %s", name)
		}
	}
}

func TestEqualizeMakesCopiesEqualAndCanBeCut(t *testing.T) {
	cfg := Config{Layout: layout(2, 3, block.DefaultChunk), Size: 8 * block.MiB}
	legs := memories(cfg)
	for i, l := range legs {
		copy(l.(*memory).data[1<<20:], fill(1<<20, uint64(i)))
	}
	stuck := &slow{memory: legs[4].(*memory)}
	legs[4] = stuck
	v := volume(t, cfg, legs...)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	if err := v.Equalize(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("equalize with a silent leg = %v", err)
	}
	reading := start(v, read(0, make([]byte, 4096)))
	if s := v.Status(); !open(reading) || !s.Equalizing || s.Equalized.Done == 0 || s.Equalized.Done >= s.Equalized.Total {
		t.Fatalf("status %+v, want IO to wait for the rest", s)
	}
	if err := v.Drop(1, 1); err != nil {
		t.Fatal(err)
	}
	stuck.answer(block.ErrGone)
	legs[5].(*memory).failing(errDisk)
	if err := v.Equalize(context.Background()); !errors.Is(err, errDisk) && !errors.Is(err, errLeft) {
		t.Fatalf("equalize with a leg that errs = %v", err)
	}
	legs[5].(*memory).failing(nil)
	for range 3 { // the units that failed may have kept the dropped leg's error
		if err := v.Equalize(context.Background()); err == nil {
			break
		} else if !errors.Is(err, errLeft) {
			t.Fatal(err)
		}
	}
	if err := wait(t, reading); err != nil {
		t.Fatal(err)
	}
	for i, l := range legs {
		m, ok := l.(*memory)
		if first := legs[i/3*3].(*memory); ok && !bytes.Equal(m.data, first.data) {
			t.Errorf("leg %d differs", i)
		}
	}
	if s := v.Status().Legs[1][1]; s.Dirty != s.Regions {
		t.Errorf("the leg that was dropped before it was equal misses %d regions of %d", s.Dirty, s.Regions)
	}
}

func TestAVolumeGrowsUnderIO(t *testing.T) {
	cfg := Config{Layout: layout(2, 2, block.DefaultChunk), Size: 4*block.MiB + 128*block.KiB, BlockSize: 512}
	legs := make([]block.Device, 4)
	for i := range legs {
		legs[i] = newMemory(8 * block.MiB)
	}
	v := volume(t, cfg, legs...)
	if err := v.Drop(1, 0); err != nil {
		t.Fatal(err)
	}
	if err := v.Grow(17 * block.MiB); err == nil {
		t.Error("grown beyond its legs")
	}
	if err := v.Grow(16 * block.MiB); err != nil {
		t.Fatal(err)
	}
	if err := v.Grow(block.MiB); err == nil {
		t.Error("shrunk")
	}
	if s := v.Status().Legs[1][0]; s.Dirty != 0 || s.Regions != 32 {
		t.Errorf("a dropped leg misses %d regions of %d before anything was written", s.Dirty, s.Regions)
	}
	testDevice(t, v, 16<<20)
	if s := v.Status().Legs[1][0]; s.Dirty < 17 {
		t.Errorf("a dropped leg misses %d regions, and none that is new", s.Dirty)
	}
}

func TestCloseWaitsAndAbortDoesNot(t *testing.T) {
	v, legs, _ := mirrorOf(t, 2)
	done := start(v, write(0, fill(4096, 1)))
	held := start(v, write(1<<20, fill(4096, 1)))
	legs[0].answer(errDisk)
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := v.Close(ctx); !errors.Is(err, context.Canceled) || !open(done) {
		t.Fatalf("close with IO under way = %v", err)
	}
	legs[1].answer(nil)
	v.Abort()
	for _, c := range []chan error{done, held, start(v, read(0, make([]byte, 4096)))} {
		if err := wait(t, c); !errors.Is(err, block.ErrGone) {
			t.Errorf("IO of an aborted volume = %v", err)
		}
	}
	if err := v.Close(context.Background()); err != nil {
		t.Error(err)
	}
}

func TestReadsAreSharedAndStreamsStay(t *testing.T) {
	v, legs, _ := mirrorOf(t, 2)
	for i := range int64(64) {
		start(v, read(i*128<<10, make([]byte, 4096)))
	}
	if a, b := legs[0].holds(), legs[1].holds(); a < 28 || b < 28 {
		t.Errorf("legs have %d and %d of 64 random reads", a, b)
	}
	answerAll(legs)
	for i := range int64(8) {
		start(v, read(3<<20+i*4096, make([]byte, 4096)))
	}
	if a, b := legs[0].holds(), legs[1].holds(); a != 0 && b != 0 {
		t.Errorf("legs have %d and %d of a stream of 8", a, b)
	}
}

// plain is a leg that supports only reads, writes and flushes.
type plain struct{ *memory }

func (p plain) Submit(io *block.IO) {
	if io.Op == block.OpWriteZeroes || io.Op == block.OpDiscard {
		io.Complete(block.ErrUnsupported)
		return
	}
	p.memory.Submit(io)
}

func TestLegsThatKnowNoZeroesAreWrittenThem(t *testing.T) {
	cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: 4 * block.MiB}
	legs := memories(cfg)
	m := legs[1].(*memory)
	m.g.DiscardUnit = 0
	legs[1] = plain{m}
	v := volume(t, cfg, legs...)
	if g := v.Geometry(); g.DiscardUnit != 0 {
		t.Errorf("discards offered: %+v", g)
	}
	if err := block.WriteAt(v, fill(4<<20, 1), 0); err != nil {
		t.Fatal(err)
	}
	if err := block.Do(v, &block.IO{Op: block.OpDiscard, Off: 0, Len: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	if err := block.Do(v, &block.IO{Op: block.OpWriteZeroes, Off: 1 << 20, Len: 3 << 20}); err != nil {
		t.Fatal(err)
	}
	want := append(fill(4<<20, 1)[:1<<20], make([]byte, 3<<20)...)
	if !bytes.Equal(m.data, want) || !bytes.Equal(legs[0].(*memory).data, want) {
		t.Error("copies differ, or are not what they must be")
	}
}

// While a copy is made again elsewhere, its column has one member more than its copies: the new
// one catches up beside both old ones, and then one of those leaves.
func TestACopyMovesBesideTheOthers(t *testing.T) {
	cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: 16 * block.MiB}
	events := make(chan Event, 10)
	cfg.OnEvent = func(e Event) { events <- e }
	legs := memories(cfg)
	v := volume(t, cfg, legs...)
	want := fill(1<<20, 1)
	if err := block.WriteAt(v, want, 0); err != nil {
		t.Fatal(err)
	}
	added := newMemory(cfg.Layout.LegSize(cfg.Size))
	if err := v.Add(0, 2, added, Rebuilding, true); err != nil {
		t.Fatal(err)
	}
	if e := wait(t, events); e.Kind != LegCaughtUp || e.Copy != 2 {
		t.Fatalf("event %+v, want copy 2 caught up", e)
	}
	if err := v.Promote(0, 2); err != nil {
		t.Fatal(err)
	}
	for copy := range 2 { // the new copy alone has everything
		if err := v.Drop(0, copy); err != nil {
			t.Fatal(err)
		}
	}
	got := make([]byte, len(want))
	if err := block.ReadAt(v, got, 0); err != nil || !bytes.Equal(got, want) {
		t.Errorf("ReadAt through the new copy = %v, equal %v", err, bytes.Equal(got, want))
	}
}

// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/target/treecheck"
)

// kindOfTree is what a history begins with.
type kindOfTree int

const (
	alone    kindOfTree = iota // a tree that is almost full
	overALeg                   // a tree over a leg that was there before
)

func (k kindOfTree) place(d block.Device) Place {
	if k == overALeg {
		return overPlace(d)
	}
	return testPlace(d)
}

func (k kindOfTree) image() *image {
	if k == overALeg {
		return overImage()
	}
	return baseImage()
}

// overPlace is a tree in one extent, over a leg in another one.
func overPlace(d block.Device) Place {
	p := testPlace(d)
	p.Extents, p.Base = []uint32{2}, []uint32{1}
	return p
}

// legImage is a drive with a leg that has something in each sector of the windows, and no tree.
func legImage() *image {
	img := newImage(nil)
	tag := uint64(1 << 40)
	for _, w := range windows {
		for at := w[0]; at < w[1]; at += sector {
			img.write(tagged(tag, 1), firstExtent+256<<20+at)
			tag++
		}
	}
	return img
}

var overImage = sync.OnceValue(func() *image {
	d := &drive{size: testSize, at: true, img: legImage()}
	t, err := FormatOver(overPlace(d), id(1), objectSize, []byte("first"))
	if err != nil {
		panic(err)
	}
	t.Close()
	return d.img
})

// inBase reads the windows from the base of a tree, as a leg without a tree reads them.
func inBase(d *drive) (out []uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, w := range windows {
		b := make([]byte, w[1]-w[0])
		d.img.read(b, firstExtent+256<<20+w[0])
		out = append(out, tags(b)...)
	}
	return out
}

func atOnce(context.Context, int64) error { return nil }

// settle copies a leg back to its base, while the next operations go on.
func (w *world) settle(head block.UUID) {
	w.leg(head)
	w.bg.Go(func() {
		err := w.t.Reclaim(context.Background())
		if err == nil {
			err = w.t.Settle(context.Background(), head, atOnce)
		}
		if err != nil && !errors.Is(err, ErrState) {
			w.bgErr.CompareAndSwap(nil, &err)
		}
	})
	if w.r.IntN(2) == 0 {
		w.bg.Wait()
	}
}

// plainIsTheSame compares what a leg reads without its tree, when nothing else is in the tree.
func (w *world) plainIsTheSame() error {
	heads := w.names(false)
	if w.kind != overALeg || len(heads) != 1 || !w.t.Settling(heads[0]).Plain {
		return nil
	}
	w.n.settled++
	if got, want := inBase(w.d), w.m.objects[heads[0]]; !slices.Equal(got, want) {
		return fmt.Errorf("without its tree the leg reads %x, want %x", got, want)
	}
	return nil
}

// readsAsTheCheckerDoes compares what the tree reads with what the independent reader reads.
func readsAsTheCheckerDoes(t *Tree, img *image) error {
	report, err := treecheck.Check(img, testSize, firstExtent)
	if err != nil {
		return err
	}
	for _, l := range t.Layers() {
		if l.State == StateDoomed || l.Object == ballast {
			continue
		}
		leg, err := t.Leg(l.Object)
		if err != nil {
			return err
		}
		got := readObject(leg)
		leg.Close()
		content, err := report.Trees[0].Content(img, firstExtent, l.Object)
		if err != nil {
			return err
		}
		var want []uint64
		for _, w := range windows {
			b := make([]byte, w[1]-w[0])
			if _, err := content.ReadAt(b, w[0]); err != nil {
				return err
			}
			want = append(want, tags(b)...)
		}
		if !slices.Equal(got, want) {
			return fmt.Errorf("object %v reads %x, the checker reads %x", l.Object, got, want)
		}
	}
	return nil
}

func TestCrashAtEveryWriteOverALeg(t *testing.T) { crashHistories(t, overALeg) }

// A leg gets its tree: whenever the power is cut, either there is no tree, or the tree holds the leg. The
// leg's own bytes stay as they are.
func TestACutWhileATreeIsMadeOverALeg(t *testing.T) {
	for _, volatile := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			img := legImage()
			d := &drive{size: testSize, volatile: volatile, base: img, img: newImage(img)}
			want := inBase(d)
			tree, err := FormatOver(overPlace(d), id(1), objectSize, nil)
			must(t, err)
			tree.Close()
			made := 0
			for seed := range uint64(8) {
				r := rand.New(rand.NewPCG(seed, 3))
				for k := range d.now() + 1 {
					cut := &drive{size: testSize, volatile: volatile, at: true, img: d.crash(r, k)}
					if got := inBase(cut); !slices.Equal(got, want) {
						t.Fatalf("cut before event %d: the leg itself has changed", k)
					}
					tree, err := Open(overPlace(cut))
					if errors.Is(err, ErrUnfinished) {
						continue
					}
					must(t, err)
					leg, err := tree.Leg(id(1))
					must(t, err)
					if got := readObject(leg); !slices.Equal(got, want) {
						t.Fatalf("cut before event %d: the tree reads %x, want %x", k, got, want)
					}
					made++
				}
			}
			if made == 0 {
				t.Error("no tree was whole")
			}
		})
	}
}

// over is a tree over a leg in virtual time, on a drive that takes a microsecond for each write.
func over(t *testing.T) (*drive, *Tree, *Leg) {
	t.Helper()
	img := legImage()
	d := &drive{size: testSize, base: img, img: newImage(img)}
	tree, err := FormatOver(overPlace(d), id(1), objectSize, nil)
	must(t, err)
	leg, err := tree.Leg(id(1))
	must(t, err)
	return d, tree, leg
}

func writeTag(leg *Leg, off int64, tag uint64, sectors int) error {
	return block.WriteAt(leg, tagged(tag, sectors), off)
}

// Without a snapshot a leg is written in place, and takes no space in its tree.
func TestALegWithoutSnapshotsIsWrittenInPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, tree, leg := over(t)
		free := tree.Space().Free
		must(t, writeTag(leg, 1<<20-4096, 9, 16))
		must(t, block.Do(leg, &block.IO{Op: block.OpWriteZeroes, Off: 0, Len: 20 << 10}))
		must(t, block.Do(leg, &block.IO{Op: block.OpDiscard, Off: 2<<20 + 64<<10, Len: 32 << 10}))
		if tree.Space().Free != free {
			t.Errorf("%v is free, %v before", tree.Space().Free, free)
		}
		if got, want := inBase(d), readObject(leg); !slices.Equal(got, want) || want[0] != 0 || want[40] == 0 {
			t.Errorf("the base has %x, the leg %x", got, want)
		}
		agree(t, tree)
	})
}

// What a snapshot has in the base stays, and comes to the leg's own place again when the snapshot is gone.
func TestALegGoesBackToItsBase(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, tree, leg := over(t)
		was := readObject(leg)
		must(t, tree.Freeze(id(1), id(2), nil))
		must(t, writeTag(leg, 512, 9, 3)) // a part of a grain: the rest comes from the base
		must(t, block.Do(leg, &block.IO{Op: block.OpWriteZeroes, Off: 1 << 20, Len: 16 << 10}))
		must(t, block.Do(leg, &block.IO{Op: block.OpDiscard, Off: 2 << 20, Len: 1 << 20}))
		now := readObject(leg)
		if got := inBase(d); !slices.Equal(got, was) {
			t.Fatalf("the base has changed to %x", got)
		}
		agree(t, tree)
		if err := tree.Settle(t.Context(), id(1), atOnce); !errors.Is(err, ErrState) || tree.Settling(id(1)).Alone {
			t.Errorf("Settle under a snapshot = %v, want ErrState", err)
		}
		must(t, tree.Delete(id(2)))
		must(t, tree.Reclaim(t.Context()))
		if s := tree.Settling(id(1)); !s.Alone || s.Plain || s.Left != ChunkSize {
			t.Errorf("Settling = %+v", s)
		}
		paced := int64(0)
		must(t, tree.Settle(t.Context(), id(1), func(_ context.Context, n int64) error { paced += n; return nil }))
		if s := tree.Settling(id(1)); !s.Plain || s.Left != 0 || paced == 0 {
			t.Errorf("Settling = %+v after %d bytes", s, paced)
		}
		if got := inBase(d); !slices.Equal(got, now) {
			t.Errorf("the base has %x, want %x", got, now)
		}
		agree(t, tree)
		if space := tree.Space(); space.Free != space.Total {
			t.Errorf("%+v, want all of it free", space)
		}
		must(t, tree.Freeze(id(1), id(3), nil)) // and it can have snapshots again
		if tree.Settling(id(1)).Plain {
			t.Error("plain, with a snapshot")
		}
	})
}

// Settling stops at the end of its time, and the next one goes on. A write that waits for it is not lost.
func TestSettlingIsCutOffAndGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, tree, leg := over(t)
		must(t, tree.Freeze(id(1), id(2), nil))
		for c := range int64(3) {
			must(t, writeTag(leg, c<<20, 9, 4))
		}
		must(t, tree.Delete(id(2)))
		must(t, tree.Reclaim(t.Context()))
		ended := errors.New("ended")
		n := 0
		err := tree.Settle(t.Context(), id(1), func(context.Context, int64) error {
			if n++; n > 1 {
				return ended
			}
			return nil
		})
		if s := tree.Settling(id(1)); !errors.Is(err, ended) || s.Left != 2*ChunkSize || s.Plain {
			t.Fatalf("Settle = %v, %+v left", err, s)
		}
		writes := make(chan error)
		must(t, tree.Settle(t.Context(), id(1), func(context.Context, int64) error {
			at := int64(n%3)<<20 + 2048
			go func() { writes <- writeTag(leg, at, 11, 4) }()
			n++
			time.Sleep(3 * time.Microsecond)
			return nil
		}))
		for range n - 2 {
			must(t, <-writes)
		}
		if got, want := inBase(d), readObject(leg); !slices.Equal(got, want) || want[5] != 11 && want[4] != 11 {
			t.Errorf("the base has %x, the leg %x", got, want)
		}
	})
}

// A write that began while there was a snapshot still gets a record when the snapshot is gone. The leg is
// not plain before this record is there, and in the base.
func TestALegIsNotPlainBeforeItsWritesHaveEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		img := legImage()
		below := &drive{size: testSize, base: img, img: newImage(img)}
		d := &slow{Device: below}
		tree, err := FormatOver(overPlace(d), id(1), objectSize, nil)
		must(t, err)
		leg, err := tree.Leg(id(1))
		must(t, err)
		must(t, tree.Freeze(id(1), id(2), nil))
		d.set(func(io *block.IO) bool { return io.Op == block.OpWrite && io.Len == GrainSize })
		wrote := make(chan error, 1)
		go func() { wrote <- writeTag(leg, 0, 9, 32) }()
		synctest.Wait()
		must(t, tree.Delete(id(2)))
		must(t, tree.Reclaim(t.Context()))
		settled := make(chan error, 1)
		go func() { settled <- tree.Settle(t.Context(), id(1), atOnce) }()
		time.Sleep(time.Second)
		if tree.Settling(id(1)).Plain {
			t.Error("plain, while a write is under way")
		}
		d.answer()
		must(t, <-wrote)
		must(t, <-settled)
		if got := inBase(below); got[0] != 9 || !tree.Settling(id(1)).Plain {
			t.Errorf("the base has %d, want 9; %+v", got[0], tree.Settling(id(1)))
		}
	})
}

// A write in place that is under way when its chunk is to be copied ends first, and is copied.
func TestSettlingWaitsForWritesUnderWay(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		img := legImage()
		below := &drive{size: testSize, base: img, img: newImage(img)}
		d := &slow{Device: below}
		tree, err := FormatOver(overPlace(d), id(1), objectSize, nil)
		must(t, err)
		leg, err := tree.Leg(id(1))
		must(t, err)
		must(t, tree.Freeze(id(1), id(2), nil))
		must(t, writeTag(leg, 0, 9, 32))
		must(t, tree.Delete(id(2)))
		must(t, tree.Reclaim(t.Context()))
		settled, wrote := make(chan error, 1), make(chan error, 1)
		begun := false
		go func() {
			settled <- tree.Settle(t.Context(), id(1), func(context.Context, int64) error {
				if !begun { // after the barrier
					begun = true
					d.set(func(io *block.IO) bool { return io.Op == block.OpWrite && io.Len == 8*sector })
					go func() { wrote <- writeTag(leg, 0, 11, 8) }()
					time.Sleep(time.Millisecond)
				}
				return nil
			})
		}()
		time.Sleep(time.Second)
		if tree.Settling(id(1)).Plain {
			t.Error("plain, while a write is under way")
		}
		d.answer()
		must(t, <-wrote)
		must(t, <-settled)
		if got := inBase(below); got[0] != 11 || got[7] != 11 || got[8] != 9 {
			t.Errorf("the base has %v, want 11 and then 9", got[:9])
		}
	})
}

// A base grows with its leg. Behind its old end the leg has what it had in chunks of its own.
func TestABaseGrows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d, tree, leg := over(t)
		const size = 300 << 20
		must(t, tree.Freeze(id(1), id(2), nil))
		must(t, tree.Grow(id(1), size))
		must(t, writeTag(leg, 256<<20+4096, 5, 8))
		must(t, tree.Delete(id(2)))
		must(t, tree.Reclaim(t.Context()))
		if s := tree.Settling(id(1)); s.Alone {
			t.Errorf("Settling = %+v with a base that is too small", s)
		}
		must(t, tree.GrowBase([]uint32{1, 0}))
		must(t, tree.Settle(t.Context(), id(1), atOnce))
		must(t, writeTag(leg, 256<<20, 6, 8))
		if got := readObjectAt(t, leg, 256<<20, 16); got[0] != 6 || got[8] != 5 {
			t.Errorf("the new part reads %v", got)
		}
		b := make([]byte, 8192)
		d.mu.Lock()
		d.img.read(b, firstExtent)
		d.mu.Unlock()
		if got := tags(b); got[0] != 6 || got[8] != 5 {
			t.Errorf("the new extent has %v", got)
		}
		leg.Close()
		tree.Close()
		p := overPlace(d)
		if _, err := Open(p); !errors.Is(err, ErrDamaged) {
			t.Errorf("Open with another base = %v, want ErrDamaged", err)
		}
		p.Base = []uint32{1, 0}
		again, err := Open(p)
		must(t, err)
		if err := again.GrowBase([]uint32{0, 1}); err != nil && !errors.Is(err, block.ErrRange) {
			t.Errorf("GrowBase to others = %v", err)
		}
		agree(t, again)
	})
}

// The base is there for as long as a layer needs it: that of a clone, when the leg is gone.
func TestTheBaseGoesWithItsLastLayer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, tree, leg := over(t)
		want := readObject(leg)
		must(t, tree.Freeze(id(1), id(2), nil))
		must(t, tree.Clone(id(2), id(3), objectSize, nil))
		leg.Close()
		for _, gone := range []block.UUID{id(1), id(2)} {
			must(t, tree.Delete(gone))
			must(t, tree.Reclaim(t.Context()))
		}
		clone, err := tree.Leg(id(3))
		must(t, err)
		if got := readObject(clone); !slices.Equal(got, want) {
			t.Errorf("the clone reads %x, want %x", got, want)
		}
		if got := tree.Base(); !slices.Equal(got, []uint32{1}) {
			t.Errorf("Base = %v", got)
		}
		agree(t, tree)
		clone.Close()
		must(t, tree.Delete(id(3)))
		must(t, tree.Reclaim(t.Context()))
		if got := tree.Base(); len(got) != 0 {
			t.Errorf("Base = %v after its last layer", got)
		}
		agree(t, tree)
	})
}

// A leg leaves its base when no other object is over that, also not one that was made from what is deleted.
func TestALegLeavesItsBase(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, tree, leg := over(t)
		want := readObject(leg)
		must(t, tree.Freeze(id(1), id(2), nil))
		must(t, tree.Clone(id(2), id(3), objectSize, nil))
		leave := func() bool {
			t.Helper()
			needed, err := tree.LeaveBase(id(1))
			must(t, err)
			must(t, tree.Reclaim(t.Context()))
			return !needed
		}
		if leave() {
			t.Error("it left while a snapshot is over the base")
		}
		must(t, tree.Delete(id(2)))
		if leave() || len(tree.Base()) == 0 {
			t.Error("it left while a clone is over the base")
		}
		must(t, tree.Flatten(t.Context(), these(3), unpaced))
		if needed, err := tree.LeaveBase(id(1)); needed || !errors.Is(err, ErrInUse) {
			t.Errorf("it left while it was open: %v, %v", needed, err)
		}
		leg.Close()
		for range 2 {
			if !leave() || len(tree.Base()) > 0 {
				t.Errorf("nobody needs the base, and it is %v", tree.Base())
			}
		}
		clone, err := tree.Leg(id(3))
		must(t, err)
		if got := readObject(clone); !slices.Equal(got, want) {
			t.Errorf("the clone reads %x, want %x", got, want)
		}
		agree(t, tree)
	})
}

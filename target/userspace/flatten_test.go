// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"bytes"
	"errors"
	"io/fs"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/mapped"
)

var cloned = block.VolumeID(copied)

// withClone is a drive with a leg, a snapshot of it on monday, a clone of that, and a snapshot of the clone
// on tuesday. The clone has written chunk 1 before.
func withClone(t *testing.T, chunks ...int64) *plantedDrive {
	t.Helper()
	p := newPlanted(t)
	p.write(t, leg, 'a', chunks...)
	p.carve(t, copied)
	p.carveSnapshot(t, monday, leg)
	must(t, p.prepare(monday, block.GiB, freezeOf(leg)))
	must(t, p.prepare(copied, block.GiB, cloneOf(monday)))
	p.write(t, copied, 'c', 1)
	p.carveSnapshot(t, tuesday, copied)
	must(t, p.prepare(tuesday, block.GiB, freezeOf(copied)))
	p.write(t, copied, 'd', 2)
	return p
}

// carveSnapshot makes the record of a leg of a snapshot of the volume that has another leg.
func (p *plantedDrive) carveSnapshot(t *testing.T, id, of block.LegID) {
	t.Helper()
	must(t, p.disk.Update(func(l *drive.Label) error {
		return l.PutLeg(&pb.LegLabel{
			LegId: id.String(), TreeId: leg.String(), Image: pb.ImageKind_IMAGE_KIND_MAPPED, Revision: 1,
			Volume: &pb.VolumeLabel{VolumeId: id.String(), Snapshot: &pb.SnapshotOf{VolumeId: of.String()}},
		})
	}))
}

func (p *plantedDrive) seen() TreeSeen { return p.disk.Trees()[leg.String()] }

// flat waits until the clone needs nothing of others.
func (p *plantedDrive) flat(t *testing.T) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !p.seen().Flat(p.disk.Label(), cloned, copied) || p.seen().Flattening[cloned].Busy; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("it is not flat: %+v", p.seen())
		}
	}
}

// A flattened clone holds what it held, with its snapshots, when all that it began as is gone, and also in
// the next process.
func TestACloneIsFlattened(t *testing.T) {
	p := withClone(t, 0, 1, 2, 3)
	if p.seen().Flat(p.disk.Label(), cloned, copied) {
		t.Fatal("it is flat, over a snapshot")
	}
	if !p.seen().Flat(p.disk.Label(), block.VolumeID(leg), leg) {
		t.Error("a leg that is no clone is not flat")
	}
	must(t, p.disk.Flatten(cloned, leg.String(), block.GiB))
	must(t, p.disk.Flatten(cloned, leg.String(), block.GiB))
	p.flat(t)
	must(t, p.disk.FreeLeg(monday))
	p.holds(t, copied, "acda")
	p.holds(t, tuesday, "acaa")
	must(t, p.machine.Legs.Do(step(dm.OpRemove, nil)))
	for len(p.disk.Trees()) > 0 { // until the space of monday is free
		time.Sleep(time.Millisecond)
	}
	must(t, p.disk.FreeLeg(leg))
	p.holds(t, copied, "acda")
	p.holds(t, tuesday, "acaa")
	if err := p.disk.Flatten(cloned, leg.String(), block.GiB); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Flatten in a tree that is not open = %v", err)
	}
}

// Flattening is slow if it is told so, says how much is left, and can be stopped. The last user of the tree
// does not wait for it.
func TestFlatteningIsThrottledAndStopped(t *testing.T) {
	p := withClone(t, 0, 1, 2, 3)
	must(t, p.disk.Flatten(cloned, leg.String(), 1))
	for p.seen().Flattening[cloned].Left == 0 {
		time.Sleep(time.Millisecond)
	}
	time.Sleep(20 * time.Millisecond)
	if f := p.seen().Flattening[cloned]; !f.Busy || f.Left == 0 || f.Left > 48*block.KiB || f.Waits != "" {
		t.Errorf("Flattening = %+v", f)
	}
	must(t, p.disk.StopFlattening(cloned, leg.String()))
	for p.seen().Flattening[cloned].Busy {
		time.Sleep(time.Millisecond)
	}
	if p.seen().Flat(p.disk.Label(), cloned, copied) {
		t.Error("it is flat at once")
	}
	must(t, p.disk.Flatten(cloned, leg.String(), 1))
	p.stop(t)
	p.holds(t, copied, "acda")
}

// withFullTree is a drive with a leg, a snapshot of it and a clone of that, in a tree with 20 chunks free.
func withFullTree(t *testing.T) *plantedDrive {
	t.Helper()
	p := newPlanted(t)
	free := int64(p.seen().Free / mapped.ChunkSize)
	var some []int64
	for c := range free - 20 {
		some = append(some, c)
	}
	p.write(t, leg, 'a', some...)
	p.carve(t, monday, copied)
	must(t, p.prepare(monday, block.GiB, freezeOf(leg)))
	must(t, p.prepare(copied, block.GiB, cloneOf(monday)))
	return p
}

// What writers may need is left to them: flattening waits for the tree to grow.
func TestFlatteningLeavesRoomForWriters(t *testing.T) {
	p := withFullTree(t)
	must(t, p.disk.Flatten(cloned, leg.String(), block.TiB))
	for p.seen().Flattening[cloned].Waits == "" {
		time.Sleep(time.Millisecond)
	}
	if f := p.seen(); f.Flattening[cloned].Waits != noRoom || !f.Flattening[cloned].Full || f.Full || f.Free != 20*mapped.ChunkSize || !f.Flattening[cloned].Busy {
		t.Errorf("%+v, and %v is free", f.Flattening, f.Free)
	}
	must(t, p.disk.GrowTree(leg.String(), 2))
	p.flat(t)
	p.holds(t, copied, "aaaa")
}

// Time in which nothing could be copied is not made up for when there is room again.
func TestFlatteningIsThrottledAfterAWaitForRoom(t *testing.T) {
	p := withFullTree(t)
	must(t, p.disk.Flatten(cloned, leg.String(), 64*block.KiB)) // 4 grains a second
	for p.seen().Flattening[cloned].Waits == "" {
		time.Sleep(time.Millisecond)
	}
	time.Sleep(2 * time.Second)
	before, began := p.seen().Flattening[cloned].Left, time.Now()
	must(t, p.disk.GrowTree(leg.String(), 2))
	time.Sleep(500 * time.Millisecond)
	copied, most := before-p.seen().Flattening[cloned].Left, block.Size(time.Since(began)*4/time.Second+2)*16*block.KiB
	if copied == 0 || copied > most {
		t.Errorf("%v were copied at 64 KiB/s, where %v may be", copied, most)
	}
	must(t, p.disk.StopFlattening(cloned, leg.String()))
}

// Whoever copies on a drive, all of it together is bounded. A copy that is late may be made up for, but not
// more than that.
func TestThePaceIsThatOfADrive(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var p pace
		began, done := time.Now(), make(chan error)
		for range 3 {
			go func() {
				for range 10 {
					if err := p.wait(t.Context(), 1<<20, 10*block.MiB); err != nil {
						done <- err
						return
					}
				}
				done <- nil
			}()
		}
		for range 3 {
			must(t, <-done)
		}
		if took := time.Since(began); took < 2700*time.Millisecond || took > 3100*time.Millisecond {
			t.Errorf("30 MiB took %v at 10 MiB/s", took)
		}
		time.Sleep(time.Hour)
		began = time.Now()
		for range 10 {
			must(t, p.wait(t.Context(), 1<<20, 10*block.MiB))
		}
		if took := time.Since(began); took < 700*time.Millisecond {
			t.Errorf("after an hour without a copy, 10 MiB took %v at 10 MiB/s", took)
		}
		must(t, p.wait(t.Context(), 1<<20, 1))
		began = time.Now()
		must(t, p.wait(t.Context(), 1<<20, block.GiB)) // the rate is that of who asks
		if took := time.Since(began); took > time.Second {
			t.Errorf("after a slow copy, a fast one began after %v", took)
		}
	})
}

// badReads fails reads of what holds data, as a drive with bad sectors does.
type badReads struct {
	block.Device
	failing *atomic.Bool
	failed  *atomic.Int64
}

func (b badReads) Submit(io *block.IO) {
	if io.Op == block.OpRead && io.Len == 16<<10 && b.failing.Load() {
		b.failed.Add(1)
		io.Complete(errors.New("a bad sector"))
		return
	}
	b.Device.Submit(io)
}

// What can be read is copied, although something else cannot be; that is said, and tried again later, without
// another order.
func TestABadSectorDoesNotKeepTheRest(t *testing.T) {
	var failing atomic.Bool
	var failed atomic.Int64
	p := newPlantedOn(t, func(_ string, data block.Device) block.Device { return badReads{data, &failing, &failed} })
	p.write(t, leg, 'a', 0, 1, 2, 3)
	p.carve(t, monday, copied)
	must(t, p.prepare(monday, block.GiB, freezeOf(leg)))
	must(t, p.prepare(copied, block.GiB, cloneOf(monday)))
	failing.Store(true)
	must(t, p.disk.Flatten(cloned, leg.String(), block.GiB))
	for p.seen().Flattening[cloned].Waits == "" {
		time.Sleep(time.Millisecond)
	}
	time.Sleep(3 * roomEvery)
	if f := p.seen().Flattening[cloned]; !strings.Contains(f.Waits, "a bad sector") || !f.Busy || f.Full || failed.Load() != 4 {
		t.Errorf("%d of 4 chunks were tried: %+v", failed.Load(), f)
	}
	if p.seen().Flat(p.disk.Label(), cloned, copied) {
		t.Error("it is flat, and nothing was copied")
	}
	must(t, p.disk.StopFlattening(cloned, leg.String()))
	for p.seen().Flattening[cloned].Busy {
		time.Sleep(time.Millisecond)
	}
	failing.Store(false)
	must(t, p.disk.Flatten(cloned, leg.String(), block.GiB))
	p.flat(t)
	p.holds(t, copied, "aaaa")
}

// Space that a bad sector keeps from coming free is said, and tried for again without another order.
func TestSpaceThatDoesNotComeFreeIsSaidAndTriedForAgain(t *testing.T) {
	var failing atomic.Bool
	var failed atomic.Int64
	p := newPlantedOn(t, func(_ string, data block.Device) block.Device { return badReads{data, &failing, &failed} })
	p.write(t, leg, 'a', 0)
	p.carve(t, monday)
	must(t, p.prepare(monday, block.GiB, freezeOf(leg)))
	p.use(t, leg, func(d Device) { must(t, block.WriteAt(d, bytes.Repeat([]byte{'b'}, 4096), 2*mapped.GrainSize)) })
	failing.Store(true)
	must(t, p.disk.FreeLeg(monday))
	until := func(what string, is func(TreeSeen) bool) {
		t.Helper()
		for end := time.Now().Add(tryAgain + 20*time.Second); !is(p.seen()); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("not %s: %+v", what, p.seen())
			}
		}
	}
	until("said", func(s TreeSeen) bool { return strings.Contains(s.Unreclaimed, "a bad sector") && !s.Busy })
	if layers := p.seen().Layers; len(layers) != 2 {
		t.Errorf("the layers are %v, want that of the snapshot too", layers)
	}
	failing.Store(false)
	until("free", func(s TreeSeen) bool { return s.Unreclaimed == "" && len(s.Layers) == 1 })
	p.holds(t, leg, "a")
}

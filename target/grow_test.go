// SPDX-License-Identifier: Apache-2.0

package target

import (
	"bytes"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/drive"
)

const (
	before = 300 * block.MiB
	after  = 900 * block.MiB
)

// sized gives one-leg volumes a size that hosts know.
func (w wish) sized(size block.Size) wish {
	for _, l := range w.Legs {
		l.Volume.SizeBytes = uint64(size)
		l.Volume.Layout = &pb.Layout{Stripes: 1, Copies: 1, ChunkBytes: uint64(block.DefaultChunk)}
	}
	return w
}

// grown makes the legs grow by two extents elsewhere on the drive.
func (w wish) grown() wish {
	for _, l := range w.Legs {
		l.Extents = append(l.Extents, &pb.Extent{Start: 10, Count: 2})
		l.SizeBytes = uint64(after)
		l.Volume.Generation++
		l.Volume.ExpandingToBytes = uint64(after)
	}
	return w
}

func legHas(size block.Size) func(*pb.TargetReport) bool {
	return func(r *pb.TargetReport) bool {
		l := legReport(r, 1)
		return l.GetReady() && l.GetSizeBytes() == uint64(size)
	}
}

// size is the size of leg 1's device.
func (w *world) size() block.Size {
	for _, s := range w.mappedLegs() {
		if s.Name == dmPrefix+legID(1).String() {
			return s.Table.Size()
		}
	}
	return 0
}

func TestALegGrowsWhileItIsExported(t *testing.T) {
	at(t, func(t *testing.T, w *world) {
		m, err := w.medium("/dev/d1")
		if err != nil {
			t.Fatal(err)
		}
		w.run()
		var looked []block.Size // by nvmet, at the leg's device
		w.targets.Resize = func(string, uint32) { looked = append(looked, w.size()) }
		w.manager.set(want().drive(1).volume(1, 1, 1).sized(before).TargetWanted)
		w.until("export ready", exportsReady(1))
		w.until("the size is reported", legHas(before))
		looked = nil

		left := bytes.Repeat([]byte("left by another"), 4096)[:8192]
		for _, s := range drive.ImageOf(&pb.LegLabel{Extents: []*pb.Extent{{Start: 10, Count: 2}}}).Segments(0) {
			if _, err := m.WriteAt(left, int64(s.Offset)); err != nil {
				t.Fatal(err)
			}
		}
		slow := make(chan struct{})
		m.set(func() { m.slow = slow })
		w.manager.set(want().drive(1).volume(1, 1, 1).sized(before).grown().TargetWanted)
		w.until("the label knows", func(r *pb.TargetReport) bool {
			return w.record(legID(1).String()).GetVolume().GetExpandingToBytes() == uint64(after)
		})
		slow <- struct{}{}
		r := w.until("zeroing has begun", func(r *pb.TargetReport) bool { return legReport(r, 1).GetZeroedBytes() == uint64(576*block.MiB) })
		if !legHas(before)(r) || !exportsReady(1)(r) || w.size() != before || len(looked) > 0 {
			t.Errorf("while it is zeroed the leg is %v, its device has %v, nvmet looked at it %d times; want it to go on with %v", legReport(r, 1), w.size(), len(looked), before)
		}
		if l := w.record(legID(1).String()); drive.Zeroed(l) != 512*block.MiB || drive.Whole(l) {
			t.Errorf("the label calls %v zeroed, whole: %v; want 512MiB", drive.Zeroed(l), drive.Whole(l))
		}
		close(slow)
		r = w.until("grown", legHas(after))
		if w.size() != after || !exportsReady(1)(r) || !drive.Whole(w.record(legID(1).String())) {
			t.Errorf("a grown leg has a device of %v", w.size())
		}
		if !w.user && (len(looked) != 1 || looked[0] != after) {
			t.Errorf("nvmet looked at the device when it had %v, want once when it had %v", looked, after)
		}
		w.readsZeroes(t)

		// A manager whose store was rebuilt may not know the new size: nothing shrinks.
		shrunk := want().drive(1).volume(1, 1, 1).sized(before).grown()
		shrunk.Legs[0].SizeBytes, shrunk.Legs[0].Volume.ExpandingToBytes = uint64(before), 0
		shrunk.Legs[0].Volume.Generation++
		w.manager.set(shrunk.TargetWanted)
		w.until("still as large", func(r *pb.TargetReport) bool { return r.GetGeneration() == 3 && legHas(after)(r) })
	})
}

// readsZeroes lets a host read the part by which leg 1 grew.
func (w *world) readsZeroes(t *testing.T) {
	t.Helper()
	if !w.user {
		return
	}
	c, ns := w.leg(1, 1, 0)
	defer c.Cut()
	if size := ns.Geometry().Size; size != after {
		t.Errorf("a host sees %v, want %v", size, after)
		return
	}
	got := make([]byte, 8192)
	if err := block.ReadAt(ns, got, int64(512*block.MiB)); err != nil || !bytes.Equal(got, make([]byte, 8192)) {
		t.Errorf("a host reads %q…, %v, of what the leg grew by", got[:15], err)
	}
}

func TestALegThatIsSmallerThanItsVolumeIsNotExported(t *testing.T) {
	at(t, func(t *testing.T, w *world) {
		m, err := w.medium("/dev/d1")
		if err != nil {
			t.Fatal(err)
		}
		w.run()
		w.manager.set(want().drive(1).leg(1, 1, 1, 0).admit(1, 1).sized(before).TargetWanted)
		w.until("the size is reported", legHas(before))
		slow := make(chan struct{})
		m.set(func() { m.slow = slow })
		w.manager.set(want().drive(1).leg(1, 1, 1, 1).admit(1, 1).export(1, 1, 1).grown().sized(after).TargetWanted)
		w.until("it waits", problemWith("not ready"))
		time.Sleep(20 * time.Second)
		r := w.until("a report", func(*pb.TargetReport) bool { return true })
		if l := legReport(r, 1); l.GetReady() || l.GetSizeBytes() >= uint64(after) || len(w.exported().Subsystems) > 0 {
			t.Errorf("a leg of %v of a volume of %v is reported as %v, exported: %v", before, after, l, w.exported().Subsystems)
		}
		close(slow)
		w.until("export ready", exportsReady(1))
	})
}

func TestACrashWhileALegGrowsIsMadeGood(t *testing.T) {
	gone := want().drive(1).leg(1, 1, 1, 0).grown().TargetWanted
	gone.Legs[0].Remove = true
	stages := []stage{
		{want().drive(1).volume(1, 1, 1).sized(before).TargetWanted, func(r *pb.TargetReport) bool { return exportsReady(1)(r) && legHas(before)(r) }},
		{want().drive(1).volume(1, 1, 1).sized(before).grown().TargetWanted, func(r *pb.TargetReport) bool { return exportsReady(1)(r) && legHas(after)(r) }},
		{want().drive(1).volume(1, 1, 1).grown().sized(after).TargetWanted, func(r *pb.TargetReport) bool { return exportsReady(1)(r) && legHas(after)(r) }},
		{gone, func(r *pb.TargetReport) bool {
			return len(r.GetExports()) == 0 && len(r.GetDrives()) == 1 && len(r.GetDrives()[0].GetLegs()) == 0
		}},
	}
	for _, d := range []Datapath{Kernel, User} {
		t.Run(string(d), func(t *testing.T) {
			t.Parallel()
			crashAnywhere(t, d, stages)
		})
	}
}

// An order made from an outdated observation never shrinks a device.
func TestWhatIsMappedIsNeverMadeSmaller(t *testing.T) {
	w := wantedLeg{WantedLeg: &pb.WantedLeg{SizeBytes: uint64(before)}}
	record := &pb.LegLabel{Zeroed: true, Extents: []*pb.Extent{{Count: 4}}}
	for _, c := range []struct {
		zeroed             uint32
		wanted, have, want block.Size
	}{
		{0, before, 0, before},
		{0, before, after, after},
		{2, after, before, before}, // until all is zeroed
		{2, after, 0, 512 * block.MiB},
		{0, after, before, after},
		{2, before, after, 512 * block.MiB}, // what is not zeroed was never mapped by us
	} {
		w.SizeBytes, record.ZeroedExtents = uint64(c.wanted), c.zeroed
		if got := legSize(w, record, c.have); got != c.want {
			t.Errorf("legSize(wanted %v, %d extents zeroed, mapped %v) = %v, want %v", c.wanted, c.zeroed, c.have, got, c.want)
		}
	}
}

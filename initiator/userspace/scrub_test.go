// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// rot changes a byte of a leg's medium.
func (w *world) rot(column, copy int, at int64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.legs[legID(column, copy)].data[at] ^= 1
}

// readsOf counts the reads of a leg's data.
func (w *world) readsOf(column, copy int) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.legs[legID(column, copy)].reads
}

func (w *world) scrub(s *volume.Scrub) { w.want(func(x *volume.Wanted) { x.Scrub = s }) }

func TestAWantedScrubReportsWhatDiffers(t *testing.T) {
	served(t, 2, 2, func(w *world) {
		w.rot(1, 1, 64<<10)
		w.scrub(&volume.Scrub{ID: "s1"})
		time.Sleep(10 * time.Second)
		want := &pb.ScrubReport{
			Id: "s1", Done: true, DoneBytes: uint64(volumeSize), TotalBytes: uint64(volumeSize), Found: 1,
			Run: w.report().Scrub.GetRun(), Position: &pb.ScrubPosition{Column: 1, Offset: uint64(volumeSize) / 2},
			Findings: []*pb.ScrubFinding{{Column: 1, Offset: 64 << 10, Length: 4096, Equal: []*pb.Copies{{Copies: []uint32{0}}, {Copies: []uint32{1}}}}},
		}
		if diff := cmp.Diff(want, w.report().Scrub, protocmp.Transform()); diff != "" {
			t.Errorf("scrub (-want +got):\n%s", diff)
		}
		w.expect("nothing else is done")
		if err := <-w.write(4096, 7); err != nil {
			t.Errorf("write = %v after the scrub", err)
		}

		w.scrub(&volume.Scrub{ID: "s2"})
		time.Sleep(10 * time.Second)
		if r := w.report().Scrub; r.GetId() != "s2" || !r.GetDone() || r.GetFound() != 1 {
			t.Errorf("a second scrub reports %v, want that it has found the same", r)
		}
		w.scrub(nil)
		time.Sleep(time.Second)
		if r := w.report().Scrub; r != nil {
			t.Errorf("without a wanted scrub there is %v", r)
		}
	})
}

// dataOf returns a part of a leg's medium.
func (w *world) dataOf(column, copy int, at, n int64) []byte {
	w.mu.Lock()
	defer w.mu.Unlock()
	return bytes.Clone(w.legs[legID(column, copy)].data[at : at+n])
}

// What differs is repaired once the manager has recorded it, and not before. A range for which no
// copy is named stays.
func TestAScrubRepairsWhatTheManagerHasRecorded(t *testing.T) {
	served(t, 2, 2, func(w *world) {
		w.rot(0, 0, 64<<10)
		w.rot(1, 1, 64<<10)
		rotten := w.dataOf(1, 1, 64<<10, 4096)
		want := &volume.Scrub{ID: "s1", Repair: true, From: []volume.Place{{Column: 1, Copy: 0}}}
		w.scrub(want)
		time.Sleep(time.Minute)
		r := w.report().Scrub
		if r.GetDone() || r.GetFound() != 2 || r.GetSettled() != 1 || !bytes.Equal(w.dataOf(1, 1, 64<<10, 4096), rotten) {
			t.Errorf("before the manager has recorded it: %v", r)
		}
		told := *want
		told.Run, told.Recorded = r.GetRun(), 2
		w.scrub(&told)
		time.Sleep(10 * time.Second)
		r = w.report().Scrub
		if !r.GetDone() || r.GetSettled() != 2 || r.GetRepaired() != 1 || !r.GetRepairs() {
			t.Errorf("after the repair: %v", r)
		}
		for i, want := range []pb.ScrubOutcome{pb.ScrubOutcome_SCRUB_OUTCOME_NOT_KNOWN, pb.ScrubOutcome_SCRUB_OUTCOME_REPAIRED} {
			if got := r.GetFindings()[i].GetOutcome(); got != want {
				t.Errorf("outcome of finding %d is %v, want %v", i, got, want)
			}
		}
		if !bytes.Equal(w.dataOf(1, 1, 64<<10, 4096), w.dataOf(1, 0, 64<<10, 4096)) || bytes.Equal(w.dataOf(0, 0, 64<<10, 4096), w.dataOf(0, 1, 64<<10, 4096)) {
			t.Error("want that column 1 is repaired and column 0 is as it was")
		}
		w.expect("nothing else is done")
	})
}

// A block with a medium error is written again in place: its leg is not recorded stale.
func TestAMediumErrorIsRepairedInPlace(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.mu.Lock()
		w.legs[legID(0, 1)].scratch = 1<<20 + 5000
		w.mu.Unlock()
		w.rot(0, 1, 1<<20+5000)
		want := &volume.Scrub{ID: "s1", Repair: true}
		w.scrub(want)
		time.Sleep(10 * time.Second)
		told := *want
		told.Run, told.Recorded = w.report().Scrub.GetRun(), 1
		w.scrub(&told)
		time.Sleep(10 * time.Second)
		r := w.report().Scrub
		if !r.GetDone() || r.GetFound() != 1 || r.GetRepaired() != 1 || r.GetAloneBytes() != 4096 {
			t.Errorf("scrub %v, want one block repaired", r)
		}
		if f := r.GetFindings()[0]; f.GetOffset() != 1<<20+4096 || f.GetLength() != 4096 || f.GetRight() != 0 {
			t.Errorf("finding %v, want the block that cannot be read", f)
		}
		if !bytes.Equal(w.dataOf(0, 0, 1<<20, 8192), w.dataOf(0, 1, 1<<20, 8192)) {
			t.Error("the copies differ")
		}
		w.expect("no leg is recorded stale")
	})
}

func TestAScrubBeginsWhereItIsTold(t *testing.T) {
	served(t, 2, 2, func(w *world) {
		w.rot(0, 1, 64<<10)
		w.rot(1, 1, 64<<10)
		w.rot(1, 1, 1<<20)
		w.scrub(&volume.Scrub{ID: "s1", Begin: volume.ScrubPosition{Column: 1, Off: block.MiB}})
		time.Sleep(10 * time.Second)
		if r := w.report().Scrub; !r.GetDone() || r.GetFound() != 1 || r.GetDoneBytes() != r.GetTotalBytes() {
			t.Errorf("scrub %v, want it done, with what is behind its beginning", r)
		}
	})
}

func TestTheRateOfAScrubChangesWhileItRuns(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.scrub(&volume.Scrub{ID: "s1", Rate: 128 * block.KiB})
		time.Sleep(5 * time.Second)
		if r := w.report().Scrub; r.GetDone() {
			t.Errorf("4 MiB at 128 KiB/s took 5 s: %v", r)
		}
		w.scrub(&volume.Scrub{ID: "s1", Rate: 100 * block.MiB})
		time.Sleep(6 * time.Second)
		if r := w.report().Scrub; !r.GetDone() {
			t.Errorf("6 s after it may read faster: %v", r)
		}
	})
}

// A scrub that waits for the manager does not outlive its volume.
func TestADetachDoesNotWaitForARepair(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.rot(0, 0, 64<<10)
		w.scrub(&volume.Scrub{ID: "s1", Repair: true})
		time.Sleep(5 * time.Second)
		w.want(func(x *volume.Wanted) { x.Detach = true })
		w.until(clean)
	})
}

func TestAScrubStopsWhenItIsNoLongerWanted(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.scrub(&volume.Scrub{ID: "s1", Rate: 128 * block.KiB})
		time.Sleep(5 * time.Second)
		r := w.report().Scrub
		if r.GetDone() || r.GetDoneBytes() == 0 || r.GetDoneBytes() > 2<<20 {
			t.Errorf("after 5 s at 128 KiB/s: %v", r)
		}
		w.scrub(nil)
		time.Sleep(10 * time.Second)
		reads := w.readsOf(0, 0)
		time.Sleep(20 * time.Second)
		if more := w.readsOf(0, 0) - reads; more != 0 {
			t.Errorf("%d reads after the scrub was stopped", more)
		}
	})
}

// A leg that fails the scrub's reads is treated as one that fails a user's: it is reported, and
// the volume is served.
func TestALegThatFailsAScrubIsReported(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.mu.Lock()
		w.legs[legID(0, 1)].bad = block.ErrMedium
		w.mu.Unlock()
		w.scrub(&volume.Scrub{ID: "s1"})
		time.Sleep(10 * time.Second)
		r := w.report()
		if s := r.Scrub; !s.GetDone() || s.GetAloneBytes() == 0 {
			t.Errorf("scrub %v, want all of it done, and that nothing was compared", s)
		}
		if err := <-w.write(4096, 7); err != nil {
			t.Errorf("write = %v", err)
		}
	})
}

func TestADetachDoesNotWaitForAScrub(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.scrub(&volume.Scrub{ID: "s1", Rate: 1})
		time.Sleep(5 * time.Second)
		began := time.Now()
		w.want(func(x *volume.Wanted) { x.Detach = true })
		w.until(clean)
		if took := time.Since(began); took > 5*time.Second {
			t.Errorf("the detach took %v", took)
		}
	})
}

func TestAScrubGoesOnAfterALegIsLost(t *testing.T) {
	served(t, 1, 3, func(w *world) {
		w.rot(0, 2, 1<<20)
		w.scrub(&volume.Scrub{ID: "s1", Rate: block.MiB})
		time.Sleep(time.Second)
		w.fallSilent("t1")
		if err := <-w.write(4096, 7); err != nil && !errors.Is(err, block.ErrMedium) {
			t.Errorf("write = %v", err)
		}
		time.Sleep(30 * time.Second)
		if s := w.report().Scrub; !s.GetDone() || s.GetFound() != 1 {
			t.Errorf("scrub %v, want it done, with what differs", s)
		}
	})
}

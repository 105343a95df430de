// SPDX-License-Identifier: Apache-2.0

package userspace

import (
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

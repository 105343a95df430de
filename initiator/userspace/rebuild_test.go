// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"testing"
	"time"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
)

// rebuilds wants leg 0.1 rebuilt whole, at a revision and a rate.
func (w *world) rebuilds(revision, since uint64, rate block.Size) {
	w.comesBack(0, 1, revision)
	w.want(func(x *volume.Wanted) {
		x.Links[1].CopyAll, x.Links[1].CopyAllSince, x.Links[1].WriteThrough = true, since, true
		x.RebuildRate = rate
	})
}

// interrupted has a leg whose rebuild, of all of it at revision 1, was interrupted after a part, and
// a mark where that part is on its medium.
func interrupted(t *testing.T, then func(w *world)) {
	served(t, 1, 2, func(w *world) {
		w.fallSilent("t1")
		time.Sleep(4 * time.Second)
		w.answer("t1")
		w.want(func(x *volume.Wanted) { x.Links = x.Links[:1] })
		time.Sleep(time.Second) // the host has dropped it
		w.rebuilds(1, 1, 256*block.KiB)
		time.Sleep(6 * time.Second) // of 16
		r := w.report()
		if len(r.Copies) != 1 || r.Copies[0].LegId != legID(0, 1).String() || r.Copies[0].TotalBytes != uint64(volumeSize) ||
			r.Copies[0].DoneBytes < 1<<20 || r.Copies[0].DoneBytes > 3<<20 {
			t.Fatalf("after 6s at 256KiB/s: %v", r.Copies)
		}
		if speed := r.Copies[0].BytesPerSecond; speed < 200<<10 || speed > 600<<10 { // the first copies begin at once
			t.Errorf("the host says %d bytes/s", speed)
		}
		w.fallSilent("t1")
		time.Sleep(4 * time.Second)
		w.want(func(x *volume.Wanted) { x.Links = x.Links[:1] })
		if err := <-w.write(4096, 7); err != nil {
			t.Fatal(err)
		}
		w.mu.Lock()
		w.legs[legID(0, 1)].data[512<<10] = 9
		w.mu.Unlock()
		w.answer("t1")
		then(w)
	})
}

func TestAnInterruptedRebuildGoesOnWhereItWas(t *testing.T) {
	interrupted(t, func(w *world) {
		w.rebuilds(2, 1, 0)
		time.Sleep(2 * time.Second)
		w.expectMark(t, 9)
	})
}

func TestARebuildBeginsAnewIfTheLegHasLostSomethingSince(t *testing.T) {
	interrupted(t, func(w *world) {
		w.rebuilds(2, 2, 0)
		time.Sleep(2 * time.Second)
		w.expectMark(t, 0)
	})
}

func TestARebuildBeginsAnewUnderAManagerThatDoesNotSaySinceWhen(t *testing.T) {
	interrupted(t, func(w *world) {
		w.rebuilds(2, 0, 0)
		time.Sleep(2 * time.Second)
		w.expectMark(t, 0)
	})
}

// expectMark checks the mark on the leg, and that the leg has what was written without it.
func (w *world) expectMark(t *testing.T, want byte) {
	t.Helper()
	if got := w.holds(0, 1, 512<<10); got != want {
		t.Errorf("the leg holds %d where it was copied to before, want %d", got, want)
	}
	if got := w.holds(0, 1, 4096); got != 7 {
		t.Errorf("the leg holds %d where it missed a write", got)
	}
	if r := w.report(); len(r.Copies) > 0 {
		t.Errorf("the rebuild has not ended: %v", r.Copies)
	}
}

// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"testing"
	"time"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/raid/checkpoint"
)

// begunElsewhere is a column whose second copy another host had copied up to 2 MiB, all of it since
// revision 1 of its record. Then that host died. A mark shows whether what was copied is copied
// again, and the first copy has a byte that was written after the last checkpoint.
func begunElsewhere(w *world) {
	for copy, behind := range []*checkpoint.Behind{nil, {Since: 1, Ranges: []checkpoint.Range{{Off: 2 << 20, End: int64(volumeSize)}}}} {
		l := w.legs[legID(0, copy)]
		l.list = checkpoint.NewTracker(volumeSize)
		l.list.Begin(1, behind != nil)
		if err := l.list.Commit(1, behind); err != nil {
			w.t.Fatal(err)
		}
	}
	source, leg := w.legs[legID(0, 0)], w.legs[legID(0, 1)]
	source.data[4096], source.data[3<<20] = 7, 6
	source.list.Mark(4096, 1)
	leg.data[512<<10] = 9
	w.wanted.Links = w.wanted.Links[:1]
}

// goesOn has this host copy to the second leg, and expects the mark to be there still, or not.
func goesOn(t *testing.T, first func(w *world), since uint64, want byte) {
	t.Helper()
	from(t, 1, 2, func(w *world) { begunElsewhere(w); first(w) }, func(w *world) {
		w.until(serving)
		w.rebuilds(2, since, 0)
		time.Sleep(2 * time.Second)
		w.expectMark(t, want)
		if got := w.holds(0, 1, 3<<20); got != 6 {
			t.Errorf("the leg holds %d where it had not been copied to, want 6", got)
		}
	})
}

func TestACopyGoesOnElsewhere(t *testing.T) {
	t.Run("after a detach", func(t *testing.T) { goesOn(t, func(*world) {}, 1, 9) })
	t.Run("after the host has died", func(t *testing.T) {
		goesOn(t, func(w *world) { w.wanted.Equalize = true }, 1, 9)
	})
}

func TestACopyBeginsAnewOnAnotherHostIf(t *testing.T) {
	t.Run("the leg has lost something since", func(t *testing.T) { goesOn(t, func(*world) {}, 2, 0) })
	t.Run("the manager does not say since when", func(t *testing.T) { goesOn(t, func(*world) {}, 0, 0) })
	t.Run("its target has restarted", func(t *testing.T) {
		goesOn(t, func(w *world) { w.legs[legID(0, 1)].list = checkpoint.NewTracker(volumeSize) }, 1, 0)
	})
	t.Run("the target of the copy in sync has restarted", func(t *testing.T) {
		goesOn(t, func(w *world) { w.legs[legID(0, 0)].list = checkpoint.NewTracker(volumeSize) }, 1, 0)
	})
	t.Run("it was away for a checkpoint", func(t *testing.T) {
		goesOn(t, func(w *world) {
			l := w.legs[legID(0, 0)].list
			l.Begin(2, false)
			if err := l.Commit(2, nil); err != nil {
				t.Fatal(err)
			}
		}, 1, 0)
	})
	t.Run("its target does not keep lists", func(t *testing.T) {
		goesOn(t, func(w *world) { w.legs[legID(0, 1)].list = nil }, 1, 0)
	})
}

// The next host may need it.
func TestTheTargetOfALegIsToldWhatTheLegLacks(t *testing.T) {
	from(t, 1, 2, func(w *world) { listAll(w); w.wanted.Links = w.wanted.Links[:1] }, func(w *world) {
		w.until(serving)
		w.legs[legID(0, 1)].list = checkpoint.NewTracker(volumeSize) // a new drive
		w.rebuilds(3, 3, 256<<10)
		for i := range int64(12) {
			time.Sleep(500 * time.Millisecond)
			if err := <-w.write(i*4096, 5); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(1200 * time.Millisecond)
		got := w.legs[legID(0, 1)].list.List()
		if got.Committed == 0 || got.Committed != w.legs[legID(0, 0)].list.List().Committed {
			t.Fatalf("the leg was not told of the last checkpoint: %+v", got)
		}
		b := got.Behind
		if b == nil || b.Since != 3 || len(b.Ranges) == 0 || b.Ranges[0].Off < 1<<20 || b.Ranges[0].Off > 3<<20 || b.Ranges[len(b.Ranges)-1].End < int64(volumeSize) {
			t.Errorf("after 7s at 256KiB/s the target knows that the leg lacks %+v", b)
		}
		w.want(func(x *volume.Wanted) { x.RebuildRate = 0 })
		time.Sleep(12 * time.Second)
		if b := w.legs[legID(0, 1)].list.List().Behind; b != nil && len(b.Ranges) > 0 {
			t.Errorf("the leg has all, and its target knows that it lacks %+v", b)
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
)

// full has a leg have no space for what is written to it, or some again.
func (w *world) full(column, copy int, full bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.legs[legID(column, copy)].err = nil; full {
		w.legs[legID(column, copy)].err = fmt.Errorf("leg: %w", block.ErrFull)
	}
}

// A copy to a full drive waits. Nothing is recorded, nobody's I/O waits, and the manager hears what is
// waited for.
func TestACopyToAFullDriveWaitsAndNobodyElse(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.fallSilent("t1")
		time.Sleep(4 * time.Second)
		w.answer("t1")
		if err := <-w.write(4096, 5); err != nil {
			t.Fatal(err)
		}
		w.want(func(x *volume.Wanted) { x.Links = x.Links[:1] })
		time.Sleep(time.Second)
		w.took()
		w.full(0, 1, true)
		w.rebuilds(1, 1, 0)
		time.Sleep(time.Minute)
		w.expect("without space", "connect t1")
		if err := <-w.write(8192, 6); err != nil {
			t.Fatal(err)
		}
		r := w.report()
		if r.Phase != serving || r.WaitingFor != "" || len(r.Copies) != 1 || !strings.Contains(r.Copies[0].WaitingFor, "space on its drive") {
			t.Errorf("reported %v waiting for %q, copies %v", r.Phase, r.WaitingFor, r.Copies)
		}
		w.full(0, 1, false)
		time.Sleep(10 * time.Second)
		w.expect("with space", "record-in-sync c0.1")
		for _, at := range []int64{4096, 8192} {
			if a, b := w.holds(0, 0, at), w.holds(0, 1, at); a != b {
				t.Errorf("at %d copies hold %d and %d after the rebuild", at, a, b)
			}
		}
	})
}

func TestADetachDoesNotWaitForACopyWithoutSpace(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.fallSilent("t1")
		time.Sleep(4 * time.Second)
		w.answer("t1")
		w.want(func(x *volume.Wanted) { x.Links = x.Links[:1] })
		time.Sleep(time.Second)
		w.mu.Lock()
		w.legs[legID(0, 0)].data[512<<10] = 9
		w.mu.Unlock()
		w.full(0, 1, true)
		w.rebuilds(1, 1, 0)
		time.Sleep(time.Minute)
		began := time.Now()
		w.want(func(x *volume.Wanted) { x.Detach = true })
		w.until(clean)
		if took := time.Since(began); took > time.Second {
			t.Errorf("the detach took %v", took)
		}
	})
}

// After a crash, one of the copies has no space for what the other one holds, which is then made equal to
// it; or each of them has none, and the volume waits, with both copies in sync.
func TestCopiesAreMadeEqualOnFullDrives(t *testing.T) {
	t.Run("one is full", func(t *testing.T) {
		from(t, 1, 2, func(w *world) { crashed(w); w.full(0, 1, true) }, func(w *world) {
			began := time.Now()
			w.until(serving)
			if took := time.Since(began); took > 5*time.Second {
				t.Errorf("it took %v", took)
			}
			w.expect("attach", "connect t0", "connect t1", "export db1")
			if a, b := w.holds(0, 0, 8192), w.holds(0, 1, 8192); a != b {
				t.Errorf("copies hold %d and %d when the device is there", a, b)
			}
		})
	})
	t.Run("both are full", func(t *testing.T) {
		from(t, 1, 2, func(w *world) { crashed(w); w.full(0, 0, true); w.full(0, 1, true) }, func(w *world) {
			w.until(equalizing)
			time.Sleep(10 * time.Minute)
			r := w.report()
			for _, node := range []string{"t0", "t1"} {
				if want := "of column 0 on " + node; r.Phase != equalizing || !strings.Contains(r.WaitingFor, "space for what another copy has") || !strings.Contains(r.WaitingFor, want) {
					t.Errorf("reported %v waiting for %q, want space %s", r.Phase, r.WaitingFor, want)
				}
			}
			w.expect("without space", "connect t0", "connect t1")
			w.full(0, 1, false)
			time.Sleep(5 * time.Second)
			w.expect("with space", "export db1")
			if a, b := w.holds(0, 0, 8192), w.holds(0, 1, 8192); a != b || w.report().WaitingFor != "" {
				t.Errorf("copies hold %d and %d when the device is there; waiting for %q", a, b, w.report().WaitingFor)
			}
		})
	})
}

// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
)

// readOnly is served for a host that shares the volume read-only. At the end, no record may
// have been made of a leg, and nothing written to one.
func readOnly(t *testing.T, f func(w *world)) {
	t.Helper()
	from(t, 1, 2, func(w *world) { w.wanted.ReadOnly = true }, func(w *world) {
		w.until(serving)
		w.expect("attach", "connect t0", "connect t1", "export db1")
		f(w)
		for id, l := range w.legs {
			if l.changes > 0 {
				t.Errorf("leg %v was sent %d operations that are no reads", id, l.changes)
			}
		}
	})
}

func TestWhoOnlyReadsCanNotWrite(t *testing.T) {
	readOnly(t, func(w *world) {
		if g := w.device.volume.Geometry(); !g.ReadOnly || g.VolatileCache || g.DiscardUnit > 0 {
			t.Errorf("the device is %+v, want it read-only, without a cache and discards", g)
		}
		if err := <-w.write(4096, 1); !errors.Is(err, block.ErrReadOnly) {
			t.Errorf("a write = %v, want %v", err, block.ErrReadOnly)
		}
		w.legs[legID(0, 0)].data[4096], w.legs[legID(0, 1)].data[4096] = 7, 7
		if got, err := w.read(4096); got != 7 || err != nil {
			t.Errorf("a read = %d, %v", got, err)
		}
		w.want(func(x *volume.Wanted) { x.Detach = true })
		w.until(clean)
		w.expect("detach, without a flush", "close", "disconnect t0", "disconnect t1")
	})
}

// A host that reads compares the copies, and writes to none although it is told to repair.
func TestWhoOnlyReadsComparesTheCopies(t *testing.T) {
	readOnly(t, func(w *world) {
		w.rot(0, 1, 64<<10)
		for id, repair := range map[string]bool{"s1": false, "s2": true} {
			w.scrub(&volume.Scrub{ID: id, Repair: repair})
			time.Sleep(10 * time.Second)
			if r := w.report().Scrub; r.GetId() != id || r.GetFound() != 1 || r.GetRepaired() != 0 || !repair && !r.GetDone() {
				t.Errorf("scrub %s (repair %v) reports %v", id, repair, r)
			}
		}
	})
}

func TestWhoOnlyReadsLeavesALegAndComesBackByItself(t *testing.T) {
	readOnly(t, func(w *world) {
		for _, name := range []string{"t0", "t1", "t0"} {
			w.fallSilent(name)
			read := make(chan error, 4)
			for i := range 4 {
				go func() { _, err := w.read(int64(i) << 20); read <- err }()
			}
			for range 4 {
				if err := <-read; err != nil {
					t.Errorf("a read while %s is silent: %v", name, err)
				}
			}
			time.Sleep(20 * time.Second)
			w.took()
			w.answer(name)
			time.Sleep(10 * time.Second)
			w.expect(name+" is back", "connect "+name)
		}
	})
}

func TestWhoOnlyReadsKeepsReadingWithoutTheManager(t *testing.T) {
	readOnly(t, func(w *world) {
		w.refuse(errors.New("connection refused"))
		w.fallSilent("t0")
		time.Sleep(time.Minute)
		if _, err := w.read(0); err != nil {
			t.Errorf("a read = %v", err)
		}
		if r := w.report(); r.Phase != serving {
			t.Errorf("phase %v, waits for %q; want it serving", r.Phase, r.WaitingFor)
		}
	})
}

func TestABadBlockIsReadFromTheOtherCopy(t *testing.T) {
	readOnly(t, func(w *world) {
		w.legs[legID(0, 0)].bad = block.ErrMedium
		w.legs[legID(0, 1)].data[8192] = 5
		for range 5 {
			if got, err := w.read(8192); got != 5 || err != nil {
				t.Errorf("a read = %d, %v", got, err)
			}
			time.Sleep(3 * time.Second)
		}
		w.expect("no leg left")
	})
}

func TestWhoOnlyReadsBeginsWithoutALegThatIsNotThere(t *testing.T) {
	from(t, 1, 2, func(w *world) {
		w.wanted.ReadOnly = true
		w.nodes["t1"].silent = true
	}, func(w *world) {
		w.until(serving)
		w.took()
		w.answer("t1")
		time.Sleep(10 * time.Second)
		w.fallSilent("t0") // so the other copy must be in use by now
		if _, err := w.read(0); err != nil {
			t.Errorf("a read = %v", err)
		}
	})
}

// regrant makes the manager want the volume by another grant of the same epoch.
func (w *world) regrant(number uint64) {
	w.want(func(x *volume.Wanted) {
		x.Detach, x.Grant = false, number
		for i := range x.Links {
			x.Links[i].NQN = block.SharedNQN(w.volume, x.Epoch, number, block.Host{}, block.NodeName(x.Links[i].Node))
		}
	})
}

// A host can return to an epoch that it left, because other hosts still have it.
func TestAHostComesBackToAnEpoch(t *testing.T) {
	readOnly(t, func(w *world) {
		w.want(func(x *volume.Wanted) { x.Detach = true })
		w.until(clean)
		w.took()
		w.regrant(2)
		w.until(serving)
		w.expect("again", "connect t0", "connect t1", "export db1")
		synctest.Wait()
	})
}

// A host that was put out and let in again without noticing has a device of an old grant: I/O
// that waits on it must not reach the new exports.
func TestADeviceEndsWithItsGrantThoughTheEpochStands(t *testing.T) {
	from(t, 1, 1, func(*world) {}, func(w *world) {
		w.until(serving)
		w.took()
		w.fallSilent("t0")
		late := w.write(0, 1)
		time.Sleep(3 * time.Second)
		w.regrant(2)
		select {
		case err := <-late:
			if err == nil {
				t.Error("a write of the grant that is over = nil, want an error")
			}
		case <-time.After(10 * time.Second):
			t.Error("a write of the grant that is over waits")
		}
		w.answer("t0")
		w.until(serving)
		if got := w.holds(0, 0, 0); got != 0 {
			t.Errorf("the leg holds %d, which was written by a grant that was over", got)
		}
		if r := w.report(); r.GetGrant() != 2 {
			t.Errorf("the report is about grant %d, want 2", r.GetGrant())
		}
		if err := <-w.write(0, 2); err != nil {
			t.Errorf("a write of the grant that stands = %v", err)
		}
	})
}

// A host that was put out of a shared volume by force, and let in again at the same epoch,
// releases the volume when it is asked to. What it gave up was another grant.
func TestAHostThatWasPutOutAndLetInAgainReleasesTheVolume(t *testing.T) {
	from(t, 1, 1, func(*world) {}, func(w *world) {
		w.until(serving)
		w.keeper.Want(nil, "", 2)
		time.Sleep(time.Second)
		w.regrant(2)
		w.want(func(x *volume.Wanted) { x.Detach = true })
		if r := w.until(clean); r.GetGrant() != 2 {
			t.Errorf("the report is about grant %d, want 2", r.GetGrant())
		}
	})
}

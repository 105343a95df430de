// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
)

// flush starts a flush of the device.
func (w *world) flush() <-chan error {
	w.mu.Lock()
	d := w.device
	w.mu.Unlock()
	done := make(chan error, 1)
	go func() { done <- block.Flush(d.volume) }()
	return done
}

// soon returns an outcome that must arrive within a minute.
func soon(t *testing.T, done <-chan error) error {
	t.Helper()
	select {
	case err := <-done:
		return err
	case <-time.After(time.Minute):
		t.Fatal("no answer in a minute")
		return nil
	}
}

// nextEpoch grants the volume again, at the next epoch.
func (w *world) nextEpoch() {
	w.want(func(x *volume.Wanted) {
		x.Epoch++
		x.Equalize = true
		w.wanted = x
		var links []volume.Link
		for _, l := range x.Links {
			links = append(links, w.link(l.Column, l.Copy))
		}
		x.Links = links
	})
}

// TestWhatWasFlushedOutlivesALossOfPowerUnnoticed: no acknowledged data is lost, so the volume
// continues, with the I/O under way.
func TestWhatWasFlushedOutlivesALossOfPowerUnnoticed(t *testing.T) {
	for _, copies := range []int{1, 2} {
		served(t, 1, copies, func(w *world) {
			if err := soon(t, w.write(4096, 1)); err != nil {
				t.Fatal(err)
			}
			if err := soon(t, w.flush()); err != nil {
				t.Fatal(err)
			}
			fua := &block.IO{Op: block.OpWrite, Off: 8192, Len: 512, Data: bytes.Repeat([]byte{2}, 512), FUA: true}
			if err := block.Do(w.device.volume, fua); err != nil {
				t.Fatal(err)
			}
			for copy := range copies {
				w.losePower(node(copy))
			}
			underWay := w.write(12288, 3)
			time.Sleep(time.Second)
			if !pending(underWay) {
				t.Error("a write was acknowledged under an identity that is gone")
			}
			w.reborn(0, 0, 1)
			if err := soon(t, underWay); err != nil {
				t.Errorf("a write that was under way = %v", err)
			}
			if err := soon(t, w.flush()); err != nil {
				t.Errorf("flush = %v", err)
			}
			for at, want := range map[int64]byte{4096: 1, 8192: 2, 12288: 3} {
				if got, err := w.read(at); got != want || err != nil {
					t.Errorf("%d copies: read at %d = %d, %v, want %d", copies, at, got, err, want)
				}
			}
			time.Sleep(time.Second)
			for _, did := range w.took() {
				if !strings.HasPrefix(did, "disconnect t1") && !strings.HasPrefix(did, "cut t1") {
					t.Errorf("%d copies: %s", copies, did)
				}
			}
			if r := w.report(); r.Phase != serving || r.GaveUp != nil {
				t.Errorf("reported %v", r)
			}
		})
	}
}

// TestADeviceFailsWhenWhatItAcknowledgedIsLost: a read would go back in time, and a flush
// would succeed although data is missing.
func TestADeviceFailsWhenWhatItAcknowledgedIsLost(t *testing.T) {
	for _, copies := range []int{1, 2} {
		served(t, 2, copies, func(w *world) {
			w.opened("the file system on /mnt")
			if err := soon(t, w.flush()); err != nil {
				t.Fatal(err)
			}
			if err := soon(t, w.write(4096, 1)); err != nil {
				t.Fatal(err)
			}
			for copy := range copies {
				w.losePower(node(copy))
			}
			volume := w.device.volume
			underWay, flushing := w.write(12288, 3), w.flush()
			w.reborn(0, 0, 1)
			w.reborn(1, 0, 1)
			if err := soon(t, underWay); err == nil {
				t.Error("a write was acknowledged, and its device has lost others")
			}
			if err := soon(t, flushing); err == nil {
				t.Error("a flush succeeded over a write that is lost")
			}
			if err := block.ReadAt(volume, make([]byte, 512), 4096); err == nil {
				t.Error("a read went back in time")
			}
			r := w.until(unclean)
			if !r.GaveUp.GetWritesLost() || !strings.Contains(r.GaveUp.GetWhy(), "of column 0 on t0") || r.Epoch != 1 {
				t.Errorf("reported %v, want epoch 1 given up, with writes lost, and by which leg", r)
			}
			w.took()
			time.Sleep(time.Minute)
			w.expect("it is not taken up again")
			w.nextEpoch()
			if r := w.until(serving); r.Epoch != 2 || r.GaveUp != nil {
				t.Errorf("reported %v, want epoch 2 served", r)
			}
		})
	}
}

// TestDetachSaysThatWritesWereLost: it completes, but not cleanly.
func TestDetachSaysThatWritesWereLost(t *testing.T) {
	served(t, 1, 1, func(w *world) {
		w.opened("the file system on /mnt")
		if err := soon(t, w.write(4096, 1)); err != nil {
			t.Fatal(err)
		}
		w.want(func(x *volume.Wanted) { x.Detach = true })
		w.losePower("t0")
		w.reborn(0, 0, 1)
		if r := w.until(unclean); !r.GaveUp.GetWritesLost() {
			t.Errorf("reported %v, want that writes were lost", r)
		}
	})
}

// TestWhatWasTakenAwayIsNotTakenUpAgainAtItsEpoch: copies may differ in the writes under way,
// and the manager does not know of it, because it did not ask for the removal.
func TestWhatWasTakenAwayIsNotTakenUpAgainAtItsEpoch(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.opened("a process")
		w.fallSilent("t1")
		done := w.write(4096, 1) // on one copy only
		w.keeper.Want(nil, "", 2)
		if err := soon(t, done); err == nil {
			t.Fatal("a write was acknowledged that one copy lacks")
		}
		time.Sleep(time.Second)
		w.expect("taken away", "cut t0", "cut t1", "close by force")
		if s := w.keeper.State(); !s.Idle || s.Report != nil {
			t.Errorf("state %+v, want nothing left", s)
		}
		w.answer("t1")
		w.tell()
		r := w.until(unclean)
		if r.GaveUp.GetWhy() == "" || r.GaveUp.GetWritesLost() || r.Epoch != 1 {
			t.Errorf("reported %v, want epoch 1 given up, and no write lost", r)
		}
		w.expect("it is not built again")
		// Nor does another keeper take it up, once this one has ended.
		w.stop()
		<-w.ended
		again := w.keeper.path.Keeper(w.volume)
		w.run(again)
		w.tell()
		w.until(unclean)
		w.expect("nor by the next keeper")
		w.nextEpoch()
		w.until(serving)
		if a, b := w.holds(0, 0, 4096), w.holds(0, 1, 4096); a != b {
			t.Errorf("copies hold %d and %d when the device is there", a, b)
		}
	})
}

// TestADetachTakenBackAfterItWasNotCleanIsANewGrant: the detach had already completed.
func TestADetachTakenBackAfterItWasNotCleanIsANewGrant(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.deafen()
		w.fallSilent("t1")
		w.write(0, 1)
		time.Sleep(time.Second)
		w.want(func(x *volume.Wanted) { x.Detach = true })
		w.until(unclean)
		w.took()
		w.want(func(x *volume.Wanted) { x.Detach = false })
		time.Sleep(time.Second)
		if r := w.report(); r.Phase != unclean || r.GaveUp.GetWhy() == "" {
			t.Errorf("reported %v, want it given up", r)
		}
		w.expect("it is not built again")
		w.hear()
	})
}

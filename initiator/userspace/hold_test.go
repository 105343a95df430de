// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

func TestWritesWaitForAHoldUntilItsLimit(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.want(func(x *volume.Wanted) { x.Holds = []volume.Hold{{ID: "s1", Limit: 5 * time.Second}} })
		time.Sleep(time.Second)
		done := w.write(1<<16, 7)
		time.Sleep(3 * time.Second)
		if r := w.report(); !pending(done) || r.Phase != stalled || len(r.Holds) != 1 || r.Holds[0].State != pb.HoldState_HOLD_STATE_HELD {
			t.Errorf("within the limit: the write waits %v, phase %v, holds %v; want it held", pending(done), r.Phase, r.Holds)
		}
		time.Sleep(2 * time.Second)
		if err := <-done; err != nil {
			t.Errorf("write = %v after the limit", err)
		}
		if r := w.until(serving); len(r.Holds) != 1 || r.Holds[0].State != pb.HoldState_HOLD_STATE_ENDED {
			t.Errorf("after the limit: holds %v, want one that has ended", r.Holds)
		}
	})
}

// A write that is under way at a silent target delays the hold, and the report says so.
func TestAHoldIsPendingWhileAWriteIsUnderWay(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.fallSilent("t1")
		done := w.write(1<<16, 7)
		synctest.Wait()
		w.want(func(x *volume.Wanted) { x.Holds = []volume.Hold{{ID: "s1", Limit: time.Minute}} })
		time.Sleep(500 * time.Millisecond)
		if r := w.report(); len(r.Holds) != 1 || r.Holds[0].State != pb.HoldState_HOLD_STATE_PENDING {
			t.Errorf("with a write under way: holds %v, want one that is pending", r.Holds)
		}
		w.answer("t1")
		time.Sleep(time.Second)
		if r := w.report(); len(r.Holds) != 1 || r.Holds[0].State != pb.HoldState_HOLD_STATE_HELD {
			t.Errorf("once the write is answered: holds %v, want one that is held", r.Holds)
		}
		if err := <-done; err != nil {
			t.Errorf("write = %v", err)
		}
		w.want(func(x *volume.Wanted) { x.Holds = nil })
		w.until(serving)
	})
}

// A write that waits for space on one leg is on the other already. A snapshot of both would have two
// contents, so that is no hold.
func TestAHoldIsPendingWhileAWriteWaitsForSpace(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		full := func(err error) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.legs[legID(0, 1)].err = err
		}
		full(block.ErrFull)
		done := w.write(1<<16, 7)
		time.Sleep(100 * time.Millisecond)
		w.want(func(x *volume.Wanted) { x.Holds = []volume.Hold{{ID: "s1", Limit: 3 * time.Second}} })
		time.Sleep(2 * time.Second)
		if r := w.report(); !pending(done) || len(r.Holds) != 1 || r.Holds[0].State != pb.HoldState_HOLD_STATE_PENDING {
			t.Errorf("with a write that one leg has: it waits %v, holds %v; want one that is pending", pending(done), r.Holds)
		}
		time.Sleep(2 * time.Second)
		full(nil)
		if err := <-done; err != nil {
			t.Errorf("write = %v", err)
		}
		w.want(func(x *volume.Wanted) { x.Holds = []volume.Hold{{ID: "s2", Limit: time.Minute}} })
		time.Sleep(time.Second)
		if r := w.report(); len(r.Holds) != 1 || r.Holds[0].State != pb.HoldState_HOLD_STATE_HELD {
			t.Errorf("once there is space: holds %v, want one that is held", r.Holds)
		}
		w.want(func(x *volume.Wanted) { x.Holds = nil })
		w.until(serving)
	})
}

// I/O is reported as held as soon as the last write is answered, and not when the keeper happens to look:
// all writers of a snapshot wait for that.
func TestAHoldIsReportedWithoutDelay(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		for _, id := range []string{"s1", "s2", "s3"} {
			w.fallSilent("t1")
			done := w.write(1<<16, 7)
			synctest.Wait()
			w.want(func(x *volume.Wanted) { x.Holds = []volume.Hold{{ID: id, Limit: time.Minute}} })
			time.Sleep(20 * time.Millisecond)
			if r := w.report(); len(r.Holds) != 1 || r.Holds[0].State != pb.HoldState_HOLD_STATE_PENDING {
				t.Errorf("with a write under way: holds %v, want one that is pending", r.Holds)
			}
			w.answer("t1")
			time.Sleep(5 * time.Millisecond)
			if r := w.report(); len(r.Holds) != 1 || r.Holds[0].State != pb.HoldState_HOLD_STATE_HELD {
				t.Errorf("5 ms after the write was answered: holds %v, want one that is held", r.Holds)
			}
			if err := <-done; err != nil {
				t.Errorf("write = %v", err)
			}
			w.want(func(x *volume.Wanted) { x.Holds = nil })
			w.until(serving)
		}
	})
}

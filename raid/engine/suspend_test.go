// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"testing"

	"weft.dev/weft/proto/block"
)

func TestALegWithoutACacheMissesOnlyWhatWasWrittenWithoutIt(t *testing.T) {
	v, legs, _ := mirrorOf(t, 2)
	if err := v.Drop(0, 1); err != nil {
		t.Fatal(err)
	}
	through := &slow{memory: newMemory(16 * block.MiB)}
	through.g.VolatileCache = false
	both := []*slow{legs[0], through}
	if err := v.Add(0, 1, through, Rebuilding, true); err != nil {
		t.Fatal(err)
	}
	until(t, func() bool { answerAll(both); return v.Status().Legs[0][1].State == CaughtUp })
	if err := v.Promote(0, 1); err != nil {
		t.Fatal(err)
	}
	put := func(off int64) {
		t.Helper()
		done := start(v, write(off, fill(4096, 1)))
		until(t, func() bool { answerAll(both); return !open(done) })
	}
	put(0)
	put(8 << 20)
	if err := v.Drop(0, 1); err != nil {
		t.Fatal(err)
	}
	put(12 << 20)
	if got := v.Status().Legs[0][1].Dirty; got != 1 {
		t.Errorf("it misses %d regions, want the one that was written after it had left", got)
	}
}

// A leg that says so late must not count as failed.
func TestALegThatKnowsNoZeroesSaysSoWhileTheVolumeIsSuspended(t *testing.T) {
	v, legs, events := mirrorOf(t, 2)
	done := start(v, &block.IO{Op: block.OpWriteZeroes, Off: 0, Len: 4096})
	v.Suspend()
	legs[0].answer(nil)
	legs[1].answer(block.ErrUnsupported)
	v.Resume()
	until(t, func() bool { answerAll(legs); return !open(done) || len(events) > 0 })
	if len(events) > 0 {
		t.Errorf("event %+v: that is no failure", <-events)
	}
}

func TestAnErrorIsForgottenThoughTheVolumeWasSuspendedMeanwhile(t *testing.T) {
	v, legs, events := mirrorOf(t, 2)
	done := start(v, read(0, make([]byte, 4096)))
	until(t, func() bool {
		for _, l := range legs {
			if l.holds() > 0 {
				l.answer(errDisk)
				return true
			}
		}
		return false
	})
	e := wait(t, events)
	v.Suspend()
	until(t, func() bool { // the timer finds nothing that it may do
		v.columns[0].lock()
		defer v.columns[0].unlock()
		return !v.columns[0].armed
	})
	v.Resume()
	until(t, func() bool { answerAll(legs); return !open(done) })
	until(t, func() bool { return v.Status().Legs[0][e.Copy].Err == nil })
	if s := v.Status().Legs[0][e.Copy]; s.State != InSync {
		t.Errorf("it is %v", s.State)
	}
}

// The owner is about to record a leg as stale: what the leg answers meanwhile acknowledges nothing.
func TestNothingIsAcknowledgedInWhichAWithheldLegTakesPart(t *testing.T) {
	for _, op := range []*block.IO{write(0, fill(4096, 1)), {Op: block.OpFlush}} {
		for _, dropped := range []bool{true, false} {
			v, legs, _ := mirrorOf(t, 2)
			done := start(v, op)
			if err := v.Withhold(0, 1, true); err != nil {
				t.Fatal(err)
			}
			answerAll(legs)
			if !open(done) || !v.Status().Legs[0][1].Withheld {
				t.Errorf("%v is acknowledged with a leg that is withheld", op.Op)
			}
			if dropped {
				if err := v.Drop(0, 1); err != nil {
					t.Fatal(err)
				}
			} else if err := v.Withhold(0, 1, false); err != nil {
				t.Fatal(err)
			}
			if err := wait(t, done); err != nil || v.Status().Legs[0][1].Withheld {
				t.Errorf("%v = %v once the leg has left (%v) or is readmitted", op.Op, err, dropped)
			}
		}
	}
}

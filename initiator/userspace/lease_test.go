// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"testing"
	"testing/synctest"
	"time"
)

// The manager grants a volume to another host 10 s after one leg is fenced, whether or not the
// other targets have answered. So no read may be answered here once a leg has been silent for
// 8 s.

// freeze stops the keeper for a while. I/O on the network continues, as it does in a machine's
// sockets while a process is frozen.
func (w *world) freeze(d time.Duration) {
	synctest.Wait()
	go w.keeper.Tell(func() { time.Sleep(d) })
	synctest.Wait()
}

// reads starts a read of one block through the device.
func (w *world) reads(at int64) <-chan error {
	done := make(chan error, 1)
	go func() { _, err := w.read(at); done <- err }()
	synctest.Wait()
	return done
}

func TestAReadAfterAFreezeWaitsUntilAllLegsHaveAnsweredAnew(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.deafen()
		time.Sleep(2 * time.Second)
		w.freeze(30 * time.Second)
		w.fallSilent("t0") // where the host has been fenced
		time.Sleep(29 * time.Second)
		frozen := w.reads(1 << 20) // from t1
		time.Sleep(2 * time.Second)
		thawed := w.reads(3 << 20)
		time.Sleep(20 * time.Second)
		if !pending(frozen) || !pending(thawed) {
			t.Error("a read was answered by a copy that may have been evicted 20 s before")
		}
		w.hear()
		w.answer("t0") // the host has not been fenced after all
		for _, done := range []<-chan error{frozen, thawed} {
			if err := <-done; err != nil {
				t.Errorf("read = %v when all legs answer", err)
			}
		}
		w.until(serving)
	})
}

func TestAReadThatIsAnsweredTooLateIsReadAnew(t *testing.T) {
	served(t, 1, 1, func(w *world) {
		time.Sleep(time.Second)
		w.fallSilent("t0")
		late := w.reads(1 << 16)
		w.freeze(9 * time.Second)
		time.Sleep(8500 * time.Millisecond)
		w.answer("t0") // it answers what was sent 8.5 s ago
		if !pending(late) {
			t.Error("a read was answered 8.5 s after the last leg was heard")
		}
		w.mu.Lock()
		reads := w.legs[legID(0, 0)].reads
		w.mu.Unlock()
		time.Sleep(5 * time.Second)
		if pending(late) {
			t.Error("the read still waits, and all legs answer")
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.legs[legID(0, 0)].reads == reads {
			t.Error("the read was answered with what it had read too late")
		}
	})
}

func TestTheLeaseCountsWhileTheMachineIsSuspended(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		w.deafen()
		time.Sleep(time.Second)
		w.mu.Lock()
		w.slept += time.Minute
		w.mu.Unlock()
		w.fallSilent("t0")
		done := w.reads(1 << 20) // from t1
		time.Sleep(20 * time.Second)
		if !pending(done) {
			t.Error("a read was answered, and a leg was not heard since before the machine slept")
		}
		w.hear()
		w.answer("t0")
		if err := <-done; err != nil {
			t.Errorf("read = %v when all legs answer", err)
		}
	})
}

func TestAFreezeWithinTheLeaseHoldsNothing(t *testing.T) {
	served(t, 1, 2, func(w *world) {
		time.Sleep(time.Second)
		w.freeze(7 * time.Second)
		for range 6 {
			if pending(w.reads(1 << 16)) {
				t.Error("a read waits, and the lease runs")
			}
			time.Sleep(time.Second)
		}
		time.Sleep(3 * time.Second)
		w.expect("and after it")
	})
}

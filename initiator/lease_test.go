// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"testing"
	"time"
)

// The manager grants a volume to another host 10 s after one leg is fenced, whether or not the
// other targets have answered. So no read may be answered here once a leg has been silent for
// 8 s.

// cutOff disconnects a host from the manager; its suspends wait for silent legs.
func (w *world) cutOff() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.managers, w.stuck = false, true
}

// fence makes a target unreachable for the host for good.
func (w *world) fence(target string) {
	w.mu.Lock()
	w.down[target] = true
	w.mu.Unlock()
	w.vanish(target)
}

func TestARestartOfTheAgentMakesNoLeaseLonger(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.cutOff()
		w.fence("t1")
		time.Sleep(6 * time.Second)
		w.stop()
		w.expect("6 s after the fence", "flush t0")
		w.start()
		time.Sleep(time.Second)
		w.expect("a new agent, which has heard nothing", "suspend top")
		time.Sleep(20 * time.Second)
		w.expect("the leg never answers")
	})
}

func TestAnAgentThatDiesAgainAndAgainSuspendsInTime(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.cutOff()
		stop := w.stop
		again := func() { time.Sleep(5 * time.Second); stop(); stop = w.start() }
		again()
		again()
		time.Sleep(time.Second)
		w.took()
		w.fence("t1")
		again()
		time.Sleep(2 * time.Second)
		w.expect("7 s after the fence", "suspend top")
		again()
		again()
		w.expect("it stays so")
	})
}

func TestAnAgentThatFindsADeviceOfLegsItDoesNotKnowSuspendsIt(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.stop()
		if err := remove((&kernel{runDir: w.dir + "/run"}).notesFile(w.volume)); err != nil {
			t.Fatal(err)
		}
		w.cutOff()
		w.start()
		time.Sleep(20 * time.Second)
		w.expect("no notes, no manager", "suspend top")
	})
}

func TestAnAgentThatWasFrozenSuspendsUntilAllLegsHaveAnsweredAnew(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.cutOff()
		w.freeze(7 * time.Second)
		time.Sleep(2 * time.Second)
		w.expect("frozen within the lease")
		w.freeze(30 * time.Second)
		time.Sleep(2 * time.Second)
		w.expect("frozen beyond it; all legs answer", "suspend top", "resume top")
		w.freeze(20 * time.Second)
		w.fence("t1")
		time.Sleep(20 * time.Second)
		w.expect("and one was fenced meanwhile", "suspend top")
	})
}

func TestTheLeaseCountsWhileTheMachineIsSuspended(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.cutOff()
		time.Sleep(time.Second)
		w.fallSilent("t1")
		w.mu.Lock()
		w.slept += time.Minute
		w.mu.Unlock()
		time.Sleep(time.Second)
		w.expect("it wakes up, and a leg does not answer", "suspend top")
		w.answer("t1")
		time.Sleep(time.Second)
		w.expect("it answers", "resume top")
	})
}

func TestTheLeaseClockIsAheadByWhatTheMachineWasSuspended(t *testing.T) {
	for range 1000 {
		before := time.Now()
		ahead := leaseClock().Sub(before)
		if slept := suspended(); slept < 0 || ahead < slept-time.Second || ahead > slept+time.Second {
			t.Fatalf("leaseClock is %v ahead, of which the machine was suspended %v", ahead, slept)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"errors"
	"testing"
	"time"

	"weft.dev/weft/proto/pb"
)

func stopping(r *pb.TargetReport) bool { return r.GetStopping() }

// serving runs an agent with two exports, which end with it.
func serving(t *testing.T, w *world) {
	w.goodbye = func(context.Context) bool { return true }
	w.manager.set(want().drive(1).volume(1, 1, 1).volume(2, 1, 1).TargetWanted)
	w.run()
	if r := w.until("exports", exportsReady(2)); r.GetStopping() {
		t.Error("an agent that serves says that it is stopping")
	}
}

// An agent that is asked to stop says so, and serves on until hosts have left its exports. The
// next agent says no such thing.
func TestAnAgentStopsOnceItsExportsAreLeft(t *testing.T) {
	in(t, User, func(t *testing.T, w *world) {
		serving(t, w)
		took := make(chan time.Duration)
		go func() { took <- w.leave() }()
		w.until("stopping", stopping)
		time.Sleep(time.Second)
		w.manager.set(want().drive(1).leg(1, 1, 1, 0).admit(1, 1).volume(2, 1, 1).TargetWanted) // the host has left volume 1
		if r := w.until("an export less", exportsReady(1)); !r.GetStopping() {
			t.Error("a later report does not say that the agent is stopping")
		}
		last := want().drive(1).leg(1, 1, 1, 0).admit(1, 1).volume(2, 1, 1)
		last.MayStop = true
		w.manager.set(last.TargetWanted)
		if d := <-took; d < time.Second || d > 2*time.Second {
			t.Errorf("the agent stopped after %v, want soon after it was told that it may", d)
		}
		w.stop()
		w.manager.forget()
		last.MayStop = false
		w.manager.set(last.TargetWanted)
		w.run()
		if r := w.until("an export", exportsReady(1)); r.GetStopping() {
			t.Error("the next agent says that it is stopping")
		}
	})
}

// An agent that is told nothing stops all the same.
func TestAnAgentDoesNotServeOnForLong(t *testing.T) {
	in(t, User, func(t *testing.T, w *world) {
		serving(t, w)
		if d := w.leave(); d < goodbyeFor || d > goodbyeFor+time.Second {
			t.Errorf("the agent stopped after %v, want %v", d, goodbyeFor)
		}
	})
}

func TestAnAgentWithNobodyToTellStopsAtOnce(t *testing.T) {
	for what, alone := range map[string]func(w *world){
		"no goodbye":      func(w *world) { w.goodbye = nil },
		"exports stay":    func(w *world) { w.goodbye = func(context.Context) bool { return false } },
		"nothing there":   func(w *world) { w.manager.set(want().drive(1).leg(1, 1, 1, 0).TargetWanted) },
		"no manager":      func(w *world) { w.manager.refuse = errors.New("away") },
		"manager goes":    func(*world) {},
		"manager unknown": func(w *world) { w.manager.away = true },
	} {
		t.Run(what, func(t *testing.T) {
			in(t, User, func(t *testing.T, w *world) {
				serving(t, w)
				w.stop()
				w.manager.forget()
				alone(w)
				w.run()
				time.Sleep(5 * time.Second)
				if what == "manager goes" {
					go func() {
						time.Sleep(500 * time.Millisecond)
						w.manager.mu.Lock()
						defer w.manager.mu.Unlock()
						w.manager.refuse = errors.New("away")
					}()
				}
				if d := w.leave(); d > 2*time.Second {
					t.Errorf("the agent stopped after %v, want at once", d)
				}
				if r := w.manager.last; r.GetStopping() != (what == "manager goes") {
					t.Errorf("the last report says stopping: %v", r.GetStopping())
				}
			})
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/pb"
)

func (w *world) opened() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.open = 1
}

// nextEpoch grants the volume again, at the next epoch.
func (w *world) nextEpoch() {
	w.mu.Lock()
	w.epoch++
	w.mu.Unlock()
	w.attach()
	w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].Equalize = true })
}

// TestADeviceFailsWhenALegHasLostItsCache: the kernel does not tell what was flushed, so
// acknowledged data may be lost.
func TestADeviceFailsWhenALegHasLostItsCache(t *testing.T) {
	for copies, want := range map[int][]string{
		1: {"disconnect t0", "fail c0", "fail top", "remove c0"},
		2: {"disconnect t0", "disconnect t1", "fail c0", "fail top", "remove c0"},
	} {
		in(t, 1, copies, func(w *world) {
			w.opened()
			w.reborn(0, 1)
			time.Sleep(2 * time.Second)
			w.expect("failed", want...)
			r := w.attachment()
			if !r.GaveUp.GetWritesLost() || !strings.Contains(r.GaveUp.GetWhy(), "of column 0 on t0") || r.Epoch != 1 {
				t.Errorf("reported %v, want epoch 1 given up, with writes lost, and by which leg", r)
			}
			if !strings.Contains(r.WaitingFor, "has the device of epoch 1 open") {
				t.Errorf("waiting for %q, want who is to close the device", r.WaitingFor)
			}
			w.closeDevice()
			if r := w.until(unclean); !r.GaveUp.GetWritesLost() {
				t.Errorf("reported %v, want that it was given up", r)
			}
			time.Sleep(time.Minute)
			w.expect("it is not taken up again", "remove top")
			w.empty()
			w.nextEpoch()
			if r := w.until(serving); r.Epoch != 2 || r.GaveUp != nil {
				t.Errorf("reported %v, want epoch 2 served", r)
			}
		})
	}
}

// TestARestartedAgentKnowsWhatWasGivenUp: even if its predecessor stopped halfway.
func TestARestartedAgentKnowsWhatWasGivenUp(t *testing.T) {
	for _, open := range []bool{false, true} {
		in(t, 1, 2, func(w *world) {
			if open {
				w.opened()
			}
			w.reborn(0, 1)
			time.Sleep(2 * time.Second)
			w.stop()
			w.closeDevice()
			w.took()
			w.start()
			if r := w.until(unclean); !r.GaveUp.GetWritesLost() {
				t.Errorf("reported %v, want that it was given up", r)
			}
			time.Sleep(5 * time.Second)
			for _, did := range w.took() {
				if strings.HasPrefix(did, "create") || strings.HasPrefix(did, "connect") {
					t.Errorf("open %v: %s, at an epoch that was given up", open, did)
				}
			}
			w.empty()
		})
	}
}

// TestAnAgentWithoutItsNotesSeesThatALegIsAnother: the tables still use a device that is gone.
func TestAnAgentWithoutItsNotesSeesThatALegIsAnother(t *testing.T) {
	in(t, 1, 1, func(w *world) {
		w.stop()
		w.loseNotes()
		w.reborn(0, 1)
		w.start()
		if r := w.until(unclean); !r.GaveUp.GetWritesLost() {
			t.Errorf("reported %v, want it given up", r)
		}
	})
}

// TestALegThatWasRebornBeforeItCameIntoUseIsGood: it has lost no data of this epoch.
func TestALegThatWasRebornBeforeItCameIntoUseIsGood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, 1)
		w.attach()
		w.reborn(0, 1)
		stop := w.start()
		w.until(serving)
		stop()
		w.start()
		time.Sleep(5 * time.Second)
		w.took()
		w.vanish("t0") // the same leg under another device
		time.Sleep(5 * time.Second)
		w.until(serving)
		w.expect("it goes on", "connect t0", "reload c0: linear")
	})
}

// TestWhatWasTakenAwayIsNotTakenUpAgainAtItsEpoch: copies may differ in the writes under way,
// and the manager does not know of it, because it did not ask for the removal.
func TestWhatWasTakenAwayIsNotTakenUpAgainAtItsEpoch(t *testing.T) {
	for name, meanwhile := range map[string]func(w *world){
		"the agent lives": func(*world) {},
		"another agent":   func(w *world) { w.stop(); w.start() },
		"another agent, in the middle": func(w *world) {
			w.stop()
			w.closeDevice()
			w.start()
		},
	} {
		in(t, 1, 2, func(w *world) {
			if strings.HasSuffix(name, "middle") {
				w.opened()
			}
			w.change(func(all *pb.InitiatorWanted) { all.Attachments = nil })
			time.Sleep(3 * time.Second)
			meanwhile(w)
			time.Sleep(3 * time.Second)
			w.empty()
			w.took()
			w.attach() // at the same epoch
			r := w.until(unclean)
			if r.GaveUp.GetWhy() == "" || r.GaveUp.GetWritesLost() || r.Epoch != 1 {
				t.Errorf("%s: reported %v, want epoch 1 given up, and no write lost", name, r)
			}
			time.Sleep(5 * time.Second)
			w.expect(name + ": it is not built again")
			w.nextEpoch()
			if r := w.until(serving); r.Epoch != 2 || r.GaveUp != nil {
				t.Errorf("%s: reported %v, want epoch 2 served", name, r)
			}
			w.expect(name+": but equal, at the next", "connect t0", "connect t1", "create c0: mirror t0 t1",
				"reload c0: mirror t0 t1", "flush t0", "flush t1", "create top: linear")
		})
	}
}

// TestNothingIsRemovedBeforeTheEpochIsNotedAsGivenUp: otherwise a later agent would take the volume
// up again.
func TestNothingIsRemovedBeforeTheEpochIsNotedAsGivenUp(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		blocked := filepath.Join(w.dir, "run", w.volume.String()+".json.new")
		if err := os.Mkdir(blocked, 0o700); err != nil {
			t.Fatal(err)
		}
		w.change(func(all *pb.InitiatorWanted) { all.Attachments = nil })
		time.Sleep(5 * time.Second)
		w.expect("while the note cannot be written")
		if err := os.Remove(blocked); err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Second)
		w.empty()
		w.took()
		w.attach() // at the same epoch
		if r := w.until(unclean); r.GaveUp.GetWhy() == "" {
			t.Errorf("reported %v, want the epoch given up", r)
		}
	})
}

// loseNotes removes an agent's notes.
func (w *world) loseNotes() {
	files, err := filepath.Glob(filepath.Join(w.dir, "run/*.json"))
	if err != nil || len(files) == 0 {
		w.t.Fatalf("notes: %v, %v", files, err)
	}
	for _, f := range files {
		if err := os.Remove(f); err != nil {
			w.t.Fatal(err)
		}
	}
}

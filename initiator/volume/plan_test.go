// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
)

// both runs a test for each kind of data path.
func both(t *testing.T, stripes, copies int, f func(t *testing.T, w *world)) {
	for name, caps := range ways {
		t.Run(name, func(t *testing.T) {
			w := newWorld(caps, stripes, copies)
			f(t, w)
			for _, b := range w.bad {
				t.Error(b)
			}
		})
	}
}

// until takes turns until the volume is in a phase, and returns the orders done.
func (w *world) until(t *testing.T, phase Phase) (did []string) {
	t.Helper()
	for range 500 {
		did = append(did, w.turn(1000)...)
		if w.verdict.Phase == phase {
			return did
		}
	}
	t.Fatalf("the volume is %s, waiting for %q, want %s; done:\n%s", w.verdict.Phase, w.verdict.Waiting, phase, strings.Join(did, "\n"))
	return nil
}

func (w *world) pass(d time.Duration) (did []string) {
	for end := w.now.Add(d); w.now.Before(end); {
		did = append(did, w.turn(1000)...)
	}
	return did
}

// before reports whether an order that begins with a comes before one that begins with b.
func before(did []string, a, b string) bool {
	find := func(s string) int {
		return slices.IndexFunc(did, func(o string) bool { return strings.HasPrefix(o, s) })
	}
	return find(a) >= 0 && find(a) < find(b)
}

func TestALostLegIsRecordedAndNotedBeforeIOGoesOn(t *testing.T) {
	both(t, 2, 2, func(t *testing.T, w *world) {
		w.until(t, Serving)
		w.silent[1] = true
		w.begin(0)
		did := w.pass(5 * time.Second)
		goesOn := map[bool]string{true: "change column 0", false: "drop"}[w.caps.Tables]
		if !before(did, "record-stale", "note") || !before(did, "note", goesOn) || !before(did, "note", "cut") {
			t.Errorf("done:\n%s\nwant the record, the note, and then %s and the cut", strings.Join(did, "\n"), goesOn)
		}
		if cutsFirst := before(did, "cut", goesOn); cutsFirst != w.caps.Tables {
			t.Errorf("the path ends first: %v, want %v: a table waits for the I/O below it", cutsFirst, w.caps.Tables)
		}
		if !w.wrote[0].done || w.verdict.Phase != Serving {
			t.Errorf("the volume is %s, its write acknowledged: %v", w.verdict.Phase, w.wrote[0].done)
		}
		w.silent[1] = false
		w.comeBack()
		w.pass(5 * time.Second)
		if !w.slots[Place{0, 1}].inSync || !w.slots[Place{1, 1}].inSync {
			t.Error("the legs that are back are not in sync again")
		}
	})
}

// Random failures, and random numbers of orders carried out before the next look: no
// acknowledged write is lost, no leg is read from that must not be and none is dropped that
// must stay, and when everything works again the volume serves with all legs, as large as wanted.
func TestPromisesHoldWhateverHappens(t *testing.T) {
	for seed := range uint64(40) {
		both(t, 2, 2+int(seed%2), func(t *testing.T, w *world) {
			random := rand.New(rand.NewPCG(seed, 1))
			var story []string
			for range 120 {
				switch node := random.IntN(w.layout.Copies); random.IntN(10) {
				case 0:
					w.silent[node] = true
					story = append(story, fmt.Sprintf("t%d falls silent", node))
				case 1:
					w.silent[node] = false
					story = append(story, fmt.Sprintf("t%d answers", node))
				case 2:
					w.away = random.IntN(2) == 0
					story = append(story, fmt.Sprintf("the manager is away: %v", w.away))
				case 3:
					w.comeBack()
				case 4:
					w.request(Hold{ID: fmt.Sprint(len(story)), Limit: time.Duration(1+random.IntN(4)) * time.Second})
					story = append(story, fmt.Sprintf("I/O is to be held: %v", w.wanted.Holds))
				case 5:
					w.wanted.Size, w.larger[node] = 2*block.GiB, 2*block.GiB
					story = append(story, fmt.Sprintf("the volume is to grow, and t%d has room", node))
				case 6:
					w.ask(random.IntN(w.layout.Copies + 1))
					story = append(story, fmt.Sprintf("legs on %v are to be left out", w.leaves))
				case 7:
					w.hangs[node] = !w.hangs[node]
					story = append(story, fmt.Sprintf("drives that hang: %v", w.hangs))
				default:
					w.begin(random.IntN(w.layout.Stripes))
				}
				for range random.IntN(10) {
					story = append(story, w.turn(random.IntN(6))...)
				}
			}
			clear(w.silent)
			clear(w.hangs)
			w.away = false
			w.request()
			w.ask(w.layout.Copies)
			for node := range w.layout.Copies {
				w.larger[node] = 2 * block.GiB
			}
			for range 8 {
				w.comeBack()
				story = append(story, w.pass(2*time.Second)...)
			}
			for at, l := range w.slots {
				if at.Copy < w.layout.Copies && !l.inSync {
					w.broken("leg %v is not in sync in the end", at)
				}
			}
			if w.verdict.Phase != Serving || w.deviceSize != w.wanted.Size || w.held || len(w.bad) > 0 {
				t.Errorf("seed %d: the volume is %s with %v, waiting for %q, in the end; the story:\n%s", seed, w.verdict.Phase, w.deviceSize, w.verdict.Waiting, strings.Join(story, "\n"))
			}
		})
		if t.Failed() {
			return
		}
	}
}

func TestDetachIsCleanWhenEveryLegHasEveryWrite(t *testing.T) {
	both(t, 1, 2, func(t *testing.T, w *world) {
		w.until(t, Serving)
		w.open = true
		w.wanted.Detach = true
		w.pass(2 * time.Second)
		if !w.device || w.verdict.Phase != Detaching || len(w.verdict.Waiting) == 0 {
			t.Errorf("while it is open the device is there: %v, and the volume %s, waiting for %q", w.device, w.verdict.Phase, w.verdict.Waiting)
		}
		w.open, w.refusal = false, ""
		if did := w.until(t, DetachedClean); !slices.Contains(did, "flush") || len(w.paths) > 0 {
			t.Errorf("let go by\n%s\nwith %d paths left; want a flush, and none left", strings.Join(did, "\n"), len(w.paths))
		}
	})
}

// A volume that is removed by force fails the I/O of its users. It is not taken up again at
// its epoch, because writes may be on some copies only.
func TestWhatIsNotWantedIsGivenUpAndTakenAway(t *testing.T) {
	both(t, 2, 2, func(t *testing.T, w *world) {
		w.until(t, Serving)
		w.open, w.unwanted = true, true
		did := w.pass(2 * time.Second)
		if !before(did, "give-up", "cut") || !before(did, "cut", map[bool]string{true: "fail-column", false: "abort"}[w.caps.Tables]) {
			t.Errorf("done:\n%s\nwant it given up, the paths cut, and then the rest", strings.Join(did, "\n"))
		}
		if w.device != w.caps.KnowsUsers || w.device && !w.broke {
			t.Errorf("the device is there: %v, fails: %v; want it taken from its users, or failing for as long as they have it", w.device, w.broke)
		}
		w.open = false
		if w.pass(2 * time.Second); w.device || w.built() || len(w.paths) > 0 {
			t.Errorf("left: device %v, volume %v, paths %v", w.device, w.built(), w.paths)
		}
		w.unwanted = false
		if w.pass(2 * time.Second); w.verdict.Phase != DetachedUnclean || w.verdict.GaveUp == nil || w.built() {
			t.Errorf("wanted again at its epoch the volume is %s, given up: %v; want it left", w.verdict.Phase, w.verdict.GaveUp)
		}
		w.wanted.Epoch, w.memory.Epoch, w.memory.Gone, w.memory.Over = 2, 2, false, nil // as a keeper does when a new epoch begins
		w.until(t, Serving)
	})
}

// A leg that returns in sync but without its drive's cache ends the epoch, unless it is known
// to lack nothing.
func TestALegThatLostItsCacheEndsTheEpochUnlessItLacksNothing(t *testing.T) {
	for name, caps := range ways {
		for _, unflushed := range []bool{true, false} {
			w := newWorld(caps, 1, 2)
			w.until(t, Serving)
			s := w.look()
			s.Columns[0].Copies[1].Reborn, s.Columns[0].Copies[1].Unflushed = true, unflushed || !caps.KnowsFlushed
			orders, v := Plan(w.wanted, w.memory, s, Limits{Lease: time.Minute}, caps)
			_, renewed := find[Renew](orders)
			end, over := find[GiveUp](orders)
			if want := unflushed || !caps.KnowsFlushed; over != want || renewed == want || (v.GaveUp != nil) != want || over && !end.Over.WritesLost {
				t.Errorf("%s, unflushed %v: orders %v, want the epoch given up %v, the leg renewed %v", name, unflushed, orders, want, !want)
			}
		}
	}
}

// A leg is being rebuilt and recorded stale, but cannot leave because the only good copy has
// fallen silent: it is still not read from.
func TestALegThatCannotLeaveStaysWhatItIs(t *testing.T) {
	w := newWorld(ways["tables"], 1, 2)
	w.until(t, Serving)
	s := w.look()
	good, bad := legID(0, 0), legID(0, 1)
	s.Columns[0].Copies[1].State = Rebuilding
	w.memory.Records.NoteStale(bad, 0)
	w.slots[Place{0, 1}].away = true
	w.link()
	silent := s.Legs[good]
	silent.Ways[0].Silent, silent.Ways[0].Looks, silent.Ways[0].Answers = s.Now.Add(-5*time.Second), 9, false
	s.Legs[good] = silent
	var want Column
	s.Columns[0].Differs = func(c Column) (bool, error) { want = c; return true, nil }
	Plan(w.wanted, w.memory, s, Limits{Window: 2 * time.Second, Lease: 8 * time.Second}, w.caps)
	if len(want.Copies) < 2 || want.Copies[0].State != InSync || want.Copies[1].State != Rebuilding {
		t.Errorf("wanted %+v, want the silent leg in sync, and the other one still rebuilt", want.Copies)
	}
}

// A volume grows while it serves, but not before every leg in use has room.
func TestAVolumeGrowsOnceEveryLegInUseHasRoom(t *testing.T) {
	both(t, 2, 2, func(t *testing.T, w *world) {
		w.until(t, Serving)
		w.wanted.Size = 2 * block.GiB
		w.larger[0] = 2 * block.GiB
		w.pass(2 * time.Second)
		if w.deviceSize != block.GiB || w.verdict.Phase != Serving || !slices.ContainsFunc(w.verdict.Notes, func(n string) bool { return strings.Contains(n, "on t1") }) {
			t.Errorf("with one copy that is larger the device has %v, %s with notes %q; want 1GiB, serving, and which leg is too short", w.deviceSize, w.verdict.Phase, w.verdict.Notes)
		}
		w.larger[1] = 2 * block.GiB
		w.begin(0)
		w.pass(2 * time.Second)
		if w.deviceSize != 2*block.GiB || w.verdict.Phase != Serving || !w.wrote[0].done {
			t.Errorf("with both the device has %v, %s, the write acknowledged: %v; want 2GiB", w.deviceSize, w.verdict.Phase, w.wrote[0].done)
		}
	})
}

// A lost leg does not keep a volume from growing. It is rebuilt only when it has room itself.
func TestAVolumeGrowsWithoutALostLeg(t *testing.T) {
	both(t, 1, 2, func(t *testing.T, w *world) {
		w.until(t, Serving)
		w.silent[1] = true
		w.pass(5 * time.Second)
		w.wanted.Size, w.larger[0] = 2*block.GiB, 2*block.GiB
		w.pass(2 * time.Second)
		if w.deviceSize != 2*block.GiB {
			t.Errorf("without the lost leg the device has %v, want 2GiB", w.deviceSize)
		}
		w.silent[1] = false
		w.comeBack()
		w.pass(5 * time.Second)
		if w.slots[Place{0, 1}].inSync {
			t.Error("a leg without room is in sync again")
		}
		w.larger[1] = 2 * block.GiB
		w.pass(5 * time.Second)
		if !w.slots[Place{0, 1}].inSync || w.verdict.Phase != Serving {
			t.Errorf("with room the leg is in sync: %v, the volume %s", w.slots[Place{0, 1}].inSync, w.verdict.Phase)
		}
	})
}

func TestAVolumeDoesNotShrink(t *testing.T) {
	both(t, 2, 2, func(t *testing.T, w *world) {
		w.until(t, Serving)
		w.wanted.Size = block.GiB / 2
		if did := w.pass(2 * time.Second); len(did) > 0 || w.deviceSize != block.GiB || w.verdict.Phase != Serving ||
			!slices.ContainsFunc(w.verdict.Notes, func(n string) bool { return strings.Contains(n, "cannot shrink") }) {
			t.Errorf("done %q; the device has %v, %s with notes %q; want nothing done, and the reason", did, w.deviceSize, w.verdict.Phase, w.verdict.Notes)
		}
	})
}

func TestThereIsNoDeviceBeforeTheCopiesAreEqual(t *testing.T) {
	both(t, 2, 2, func(t *testing.T, w *world) {
		w.wanted.Equalize = true
		w.until(t, Equalizing)
		w.until(t, Serving)
	})
}

// A reader writes nothing, so it continues without a silent copy and takes it back, and no record
// is made of either.
func TestAReaderLeavesACopyAndTakesItBackWithoutARecord(t *testing.T) {
	both(t, 1, 2, func(t *testing.T, w *world) {
		w.wanted.ReadOnly = true
		w.until(t, Serving)
		w.silent[1] = true
		did := w.pass(5 * time.Second)
		if c := w.columns[0].Copies[1]; c.State != Absent || w.verdict.Phase != Serving {
			t.Errorf("the silent copy is %v, the volume %s; want it left, and serving", c.State, w.verdict.Phase)
		}
		w.silent[1] = false
		did = append(did, w.pass(5*time.Second)...)
		if c := w.columns[0].Copies[1]; c.State != InSync {
			t.Errorf("the copy that answers again is %v, want it in use", c.State)
		}
		if slices.ContainsFunc(did, func(o string) bool { return strings.HasPrefix(o, "record") || o == "note" }) {
			t.Errorf("done:\n%s\nwant neither a record nor a note", strings.Join(did, "\n"))
		}
	})
}

func TestADetachThatIsCancelledLeavesTheVolumeAsItIs(t *testing.T) {
	both(t, 2, 2, func(t *testing.T, w *world) {
		w.until(t, Serving)
		w.open, w.wanted.Detach = true, true
		w.until(t, Detaching)
		w.wanted.Detach = false
		w.until(t, Serving)
		w.open, w.refusal = false, ""
		if did := w.pass(5 * time.Second); len(did) > 0 || !w.device {
			t.Errorf("done %q, and the device is there: %v; want nothing done", did, w.device)
		}
	})
}

// What remains of an epoch is the outcome of a detach, or that the epoch was given up, as long as
// the same grant is wanted. A grant of a shared volume begins anew.
func TestWhatRemainsOfAnEpoch(t *testing.T) {
	over := &Over{Why: "it had to"}
	for _, c := range []struct {
		name   string
		was    Memory
		wanted *Wanted
		want   Memory
	}{
		{"not wanted any more", Memory{Epoch: 2, Over: over}, nil, Memory{}},
		{"detached", Memory{Epoch: 2, Grant: 3}, &Wanted{Epoch: 2, Grant: 3, Detach: true}, Memory{Epoch: 2, Grant: 3, Gone: true, Clean: true}},
		{"detached before it was built", Memory{}, &Wanted{Epoch: 2, Detach: true}, Memory{Epoch: 2, Gone: true, Clean: true}},
		{"of an older grant", Memory{Epoch: 1}, &Wanted{Epoch: 2, Detach: true}, Memory{}},
		{"given up, and still wanted", Memory{Epoch: 2, Over: over}, &Wanted{Epoch: 2}, Memory{Epoch: 2, Gone: true, Over: over}},
		{"given up, and to be detached", Memory{Epoch: 2, Over: over}, &Wanted{Epoch: 2, Detach: true}, Memory{Epoch: 2, Gone: true, Over: over}},
		{"given up, and granted again", Memory{Epoch: 2, Over: over}, &Wanted{Epoch: 3}, Memory{}},
	} {
		if got := c.was.Ended(c.wanted, true); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %+v remains, want %+v", c.name, got, c.want)
		}
	}
	for grant, given := range map[uint64]bool{0: true, 4: false} {
		if m := Granted(&Wanted{Epoch: 2, Grant: grant}, over); m.Gone != given || (m.Over != nil) != given || m.Epoch != 2 || m.Grant != grant {
			t.Errorf("grant %d begins with %+v; want it given up: %v", grant, m, given)
		}
	}
}

func find[O Order](orders []Order) (O, bool) {
	for _, o := range orders {
		if found, ok := o.(O); ok {
			return found, true
		}
	}
	var none O
	return none, false
}

// hold is the state of the only requested hold.
func (w *world) hold() HoldState {
	if len(w.verdict.Holds) != 1 {
		return ""
	}
	return w.verdict.Holds[0].State
}

func TestIOIsHeldOnRequestAndNoLongerThanTheLimit(t *testing.T) {
	both(t, 1, 2, func(t *testing.T, w *world) {
		w.until(t, Serving)
		w.begin(0)
		w.wanted.Holds = []Hold{{ID: "s1", Limit: 3 * time.Second}}
		if w.turn(1000); w.hold() != HoldPending {
			t.Errorf("while I/O is under way the hold is %q, want it pending", w.hold())
		}
		w.until(t, Stalled)
		w.begin(0)
		w.pass(2 * time.Second)
		if !w.held || w.hold() != HoldHeld || w.wrote[1].done || !slices.ContainsFunc(w.verdict.Waiting, func(s string) bool { return strings.Contains(s, "s1") }) {
			t.Errorf("after 2s I/O is held: %v, the hold is %q, waiting for %q", w.held, w.hold(), w.verdict.Waiting)
		}
		w.pass(2 * time.Second)
		if w.held || w.hold() != HoldEnded || !w.wrote[1].done || w.verdict.Phase != Serving || len(w.verdict.Notes) == 0 {
			t.Errorf("after 4s I/O is held: %v, the hold %q, the volume %s with notes %q; want I/O to continue, and the report to say so", w.held, w.hold(), w.verdict.Phase, w.verdict.Notes)
		}
		w.request(Hold{ID: "s2", Limit: 3 * time.Second})
		if w.until(t, Stalled); !w.held {
			t.Error("I/O is not held for the next hold")
		}
		w.request()
		if w.until(t, Serving); w.held || len(w.verdict.Holds) > 0 {
			t.Errorf("after the release I/O is held: %v, with holds %v", w.held, w.verdict.Holds)
		}
	})
}

// ask has the manager ask for the legs on one node to be left out; Copies stands for none.
func (w *world) ask(node int) {
	clear(w.leaves)
	if node < w.layout.Copies {
		w.leaves[node] = true
	}
	w.link()
}

// A healthy leg leaves only when another copy has everything that was acknowledged on its medium,
// and the write that comes meanwhile waits no longer than that takes.
func TestALegIsLeftOutOnceAnotherCopyIsFlushed(t *testing.T) {
	both(t, 2, 2, func(t *testing.T, w *world) {
		w.until(t, Serving)
		w.begin(0)
		w.pass(time.Second)
		w.ask(1)
		did := w.turn(1000)
		w.begin(0)
		did = append(did, w.pass(2*time.Second)...)
		goesOn := map[bool]string{true: "change column 0", false: "drop"}[w.caps.Tables]
		for _, order := range [][2]string{{"hold I/O for legs to be left out", "flush"}, {"flush", "record-stale"}, {"record-stale", goesOn}, {goesOn, "resume I/O"}} {
			if !before(did, order[0], order[1]) {
				t.Errorf("%q does not come before %q; done:\n%s", order[0], order[1], strings.Join(did, "\n"))
			}
		}
		if w.slots[Place{0, 1}].inSync || w.slots[Place{1, 1}].inSync || !w.wrote[1].done || w.held || w.verdict.Phase != Serving {
			t.Errorf("I/O is held: %v, the write acknowledged: %v, the volume %s; done:\n%s", w.held, w.wrote[1].done, w.verdict.Phase, strings.Join(did, "\n"))
		}
	})
}

// A lost leg is recorded stale only once another copy has everything that was acknowledged on its
// medium: that one may have lost its power a moment ago.
func TestALostLegIsRecordedOnceAnotherCopyIsFlushed(t *testing.T) {
	both(t, 1, 2, func(t *testing.T, w *world) {
		w.until(t, Serving)
		w.begin(0)
		w.pass(time.Second)
		w.hangs[0], w.silent[1] = true, true
		did := w.pass(5 * time.Second)
		if slices.ContainsFunc(did, func(s string) bool { return strings.HasPrefix(s, "record-stale") }) {
			t.Errorf("the other copy does not answer a flush; done:\n%s", strings.Join(did, "\n"))
		}
		w.begin(0)
		clear(w.hangs)
		did = w.pass(time.Second)
		if !before(did, "flush", "record-stale") || !w.wrote[1].done {
			t.Errorf("the write is acknowledged: %v; done:\n%s", w.wrote[1].done, strings.Join(did, "\n"))
		}
	})
}

// A volume that is being built does without a leg once it has flushed the other one: what an earlier
// host has written there may be in the cache of its drive.
func TestAVolumeIsBuiltWithoutALegOnceTheOtherIsFlushed(t *testing.T) {
	both(t, 1, 2, func(t *testing.T, w *world) {
		w.hangs[0], w.silent[1] = true, true
		did := w.pass(2 * ConnectPatience)
		if slices.ContainsFunc(did, func(s string) bool { return strings.HasPrefix(s, "record-stale") }) {
			t.Errorf("the other copy does not answer a flush; done:\n%s", strings.Join(did, "\n"))
		}
		clear(w.hangs)
		w.until(t, Serving)
	})
}

// The manager is asked to record a leg, and its answer is lost. The leg is back: until the manager has
// said whether the record is made, no write is acknowledged that the others have in their caches only.
func TestALegThatMayBeRecordedStaleAcknowledgesNothing(t *testing.T) {
	both(t, 1, 2, func(t *testing.T, w *world) {
		if !w.caps.Withholds {
			t.Skip("this data path cannot withhold acknowledgements")
		}
		for _, records := range []bool{true, false} {
			w.until(t, Serving)
			w.unheard, w.silent[1] = true, true
			w.pass(5 * time.Second)
			clear(w.silent)
			w.begin(0)
			w.pass(2 * time.Second)
			last := len(w.wrote) - 1
			if w.wrote[last].done {
				t.Fatal("the leg may be recorded stale, and a write is acknowledged that the other one may lose")
			}
			if w.unheard = false; !records {
				w.memory.Records.NoteRefused(w.slots[Place{0, 1}].id)
			}
			w.pass(time.Second)
			if l := w.slots[Place{0, 1}]; l.inSync == records || !w.wrote[last].done {
				t.Errorf("the manager records it: %v; then it is in sync: %v, and the write acknowledged: %v", records, l.inSync, w.wrote[last].done)
			}
			w.comeBack()
			w.pass(10 * time.Second)
		}
	})
}

// Where no copy that stays can be flushed, the leg stays, and I/O continues with both.
func TestALegIsNotLeftOutWhileNoOtherCopyAnswers(t *testing.T) {
	both(t, 1, 2, func(t *testing.T, w *world) {
		w.until(t, Serving)
		w.hangs[0] = true
		w.ask(1)
		did := w.pass(5 * time.Second)
		w.begin(0)
		did = append(did, w.pass(time.Second)...)
		if holds := strings.Count(strings.Join(did, "\n"), "hold I/O"); holds != 1 || w.held || !w.wrote[0].done || !w.slots[Place{0, 1}].inSync {
			t.Errorf("I/O was held %d times, is held: %v; done:\n%s", holds, w.held, strings.Join(did, "\n"))
		}
		clear(w.hangs)
		w.silent[0] = true
		did = w.pass(time.Second)
		if strings.Contains(strings.Join(did, "\n"), "record-stale") || !w.slots[Place{0, 1}].inSync {
			t.Errorf("the other copy is silent; done:\n%s", strings.Join(did, "\n"))
		}
		w.pass(20 * time.Second)
		if w.slots[Place{0, 0}].inSync || !w.slots[Place{0, 1}].inSync {
			t.Error("of a silent copy and one that is to be left out, the silent one must go")
		}
		delete(w.silent, 0)
		w.comeBack()
		w.pass(20 * time.Second)
		if !w.slots[Place{0, 0}].inSync || w.slots[Place{0, 1}].inSync {
			t.Error("once the other copy is back, the leg must be left out")
		}
	})
}

// A host that begins to use a volume does not wait for a leg that it is to leave out.
func TestAVolumeIsBuiltWithoutALegToBeLeftOut(t *testing.T) {
	both(t, 1, 2, func(t *testing.T, w *world) {
		w.silent[1] = true
		w.ask(1)
		began := w.now
		w.until(t, Serving)
		if took := w.now.Sub(began); took > 3*time.Second {
			t.Errorf("it took %v", took)
		}
	})
}

// request replaces the requested holds, as a keeper does.
func (w *world) request(holds ...Hold) {
	w.wanted.Holds = holds
	w.memory.KeepHolds(w.wanted)
}

// The longest of several holds decides, and each is reported.
func TestIOIsHeldUntilTheLastHoldEnds(t *testing.T) {
	both(t, 1, 2, func(t *testing.T, w *world) {
		w.until(t, Serving)
		w.request(Hold{ID: "s1", Limit: time.Second}, Hold{ID: "s2", Limit: 3 * time.Second})
		w.pass(2 * time.Second)
		if want := []HoldSeen{{ID: "s1", State: HoldEnded}, {ID: "s2", State: HoldHeld}}; !w.held || !slices.Equal(w.verdict.Holds, want) {
			t.Errorf("after 2s I/O is held: %v, for %v; want %v", w.held, w.verdict.Holds, want)
		}
		w.pass(2 * time.Second)
		if w.held {
			t.Error("I/O is held after the last hold's limit")
		}
	})
}

// A leg that has failed a write may lack what the others have, until its loss is recorded: I/O at rest is
// not enough.
func TestIOIsNotHeldWhileALegHasFailedAWrite(t *testing.T) {
	held := func(change func(*planner)) HoldState {
		now := time.Unix(1e9, 0)
		l := Link{Leg: legID(0, 0), NQN: "nqn.a"}
		m := &Memory{Holds: map[string]Began{"s1": {At: now}}}
		p := &planner{c: ways["tables"], m: m, w: &Wanted{Links: []Link{l}, Holds: []Hold{{ID: "s1", Limit: time.Minute}}, Layout: block.Layout{Stripes: 1, Copies: 2}}, s: &Seen{
			Now: now, Holdable: true, Held: true, Quiet: true,
			Columns: []ColumnSeen{{Copies: []CopySeen{{State: InSync}, {State: InSync}}}},
		}, members: []member{{Leg: l.Leg, Link: &l, Source: true}}}
		change(p)
		p.holdForRequests()
		return p.v.Holds[0].State
	}
	for _, c := range []struct {
		name   string
		change func(*planner)
		want   HoldState
	}{
		{"all is well", func(*planner) {}, HoldHeld},
		{"I/O is under way", func(p *planner) { p.s.Quiet = false }, HoldPending},
		{"a leg is lost", func(p *planner) { p.members[0].Lost = lost(IOError, "bad") }, HoldPending},
		{"a leg has an error, and cannot be spared", func(p *planner) { p.s.Columns[0].Copies[0].Error = "bad" }, HoldPending},
		{"it is one that is copied to", func(p *planner) { p.members[0].Source, p.members[0].Lost = false, lost(IOError, "bad") }, HoldHeld},
		{"nobody writes", func(p *planner) { p.w.ReadOnly, p.members[0].Lost = true, lost(IOError, "bad") }, HoldHeld},
	} {
		if got := held(c.change); got != c.want {
			t.Errorf("%s: the hold is %q, want %q", c.name, got, c.want)
		}
	}
}

// I/O is held only while the file systems are frozen, and what is reported as held was held while they
// were.
func TestAHoldWithAFreeze(t *testing.T) {
	both(t, 1, 2, func(t *testing.T, w *world) {
		w.until(t, Serving)
		is := func(when string, held bool, want HoldSeen) {
			t.Helper()
			want.ID = "s1"
			if w.held != held || len(w.verdict.Holds) != 1 || w.verdict.Holds[0] != want {
				t.Errorf("%s: I/O is held: %v, holds %+v; want %v, %+v", when, w.held, w.verdict.Holds, held, want)
			}
		}
		freeze := func(s FreezeState, why string) {
			w.freezes = map[string]FreezeSeen{"s1": {s, why}}
			w.pass(time.Second)
		}
		w.request(Hold{ID: "s1", Limit: time.Hour, Freeze: true, Prepare: true})
		w.pass(time.Second)
		is("nothing is known", false, HoldSeen{State: HoldPending})
		for _, s := range []FreezeState{FreezeSyncing, FreezeBegins, FreezeFrozen} { // the last two: an earlier wish was to go on
			freeze(s, "")
			is(string(s), false, HoldSeen{State: HoldPending})
		}
		freeze(FreezeSynced, "")
		is("synced", false, HoldSeen{State: HoldPrepared})
		freeze(FreezeEnded, "no")
		is("failed", false, HoldSeen{State: HoldEnded, Error: "no"})
		w.request(Hold{ID: "s1", Limit: time.Hour, Freeze: true})
		for _, s := range []FreezeState{FreezeSyncing, FreezeSynced, FreezeBegins} {
			freeze(s, "")
			is(string(s), false, HoldSeen{State: HoldPending})
		}
		freeze(FreezeFrozen, "")
		is("frozen", true, HoldSeen{State: HoldHeld, Frozen: true})
		for _, s := range []FreezeState{FreezeEnds, FreezeEnded, ""} {
			freeze(s, "")
			is("held, then "+string(s), false, HoldSeen{State: HoldEnded})
		}
	})
}

// A file system is frozen for one hold at a time.
func TestAFreezeWaitsForAnother(t *testing.T) {
	both(t, 1, 2, func(t *testing.T, w *world) {
		w.until(t, Serving)
		w.request(Hold{ID: "s1", Limit: time.Hour, Freeze: true})
		for _, c := range []struct {
			other FreezeState
			want  bool
		}{{FreezeSynced, true}, {FreezeBegins, false}, {FreezeFrozen, false}, {FreezeEnds, false}, {FreezeEnded, true}} {
			w.freezes = map[string]FreezeSeen{"s1": {State: FreezeSynced}, "s2": {State: c.other}}
			orders, _ := Plan(w.wanted, w.memory, w.look(), Limits{Window: 2 * time.Second, Lease: 8 * time.Second}, w.caps)
			if _, got := find[FreezeFileSystems](orders); got != c.want {
				t.Errorf("another is %s: it begins: %v, want %v", c.other, got, c.want)
			}
		}
	})
}

// An agent that finds I/O held by an earlier one lets it continue: it cannot know for how long
// it was held.
func TestAHoldEndsWithItsAgent(t *testing.T) {
	both(t, 1, 2, func(t *testing.T, w *world) {
		w.until(t, Serving)
		w.request(Hold{ID: "s1", Limit: time.Minute})
		w.until(t, Stalled)
		kept, err := json.Marshal(w.memory)
		if err != nil {
			t.Fatal(err)
		}
		w.memory = &Memory{}
		if err := json.Unmarshal(kept, w.memory); err != nil {
			t.Fatal(err)
		}
		w.memory.Begin(w.now)
		w.pass(time.Second)
		if w.held || w.hold() != HoldEnded {
			t.Errorf("after a restart I/O is held: %v, the hold is %q; want it ended", w.held, w.hold())
		}
	})
}

// A host that does not know the wanted state keeps holding I/O, up to the limit.
func TestAHoldLastsWhileTheManagerIsSilent(t *testing.T) {
	both(t, 1, 2, func(t *testing.T, w *world) {
		w.until(t, Serving)
		w.wanted.Holds = []Hold{{ID: "m1", Limit: 3 * time.Second}}
		w.until(t, Stalled)
		limits := Limits{Window: 2 * time.Second, Lease: 8 * time.Second}
		kept := *w.wanted
		kept.Holds = nil
		s := w.look()
		if orders, v := Guard(&kept, w.memory, s, limits, w.caps); len(orders) > 0 || v.Phase != Stalled {
			t.Errorf("orders %v, %s; want none, and stalled", orders, v.Phase)
		}
		s.Now = s.Now.Add(4 * time.Second)
		if orders, _ := Guard(&kept, w.memory, s, limits, w.caps); len(orders) != 1 || orders[0] != (ResumeIO{}) {
			t.Errorf("after its limit: orders %v, want I/O to continue", orders)
		}
	})
}

// A leg with two paths is lost only when both are: its silence is that of the better path.
func TestALegIsLostWithItsLastPath(t *testing.T) {
	now := time.Unix(1e9, 0)
	good := WaySeen{Path: Path{"nqn.a", portal(0)}, Answers: true, Heard: now}
	dead := WaySeen{Path: Path{"nqn.a", portal(1)}, Silent: now.Add(-5 * time.Second), Looks: 9, Heard: now.Add(-6 * time.Second)}
	dying := WaySeen{Path: Path{"nqn.a", portal(0)}, Silent: now.Add(-time.Second), Looks: 9, Heard: now.Add(-time.Second)}
	for _, c := range []struct {
		name    string
		ways    []WaySeen
		lost    bool
		silence time.Duration
	}{
		{"one answers", []WaySeen{good, dead}, false, 0},
		{"one has just fallen silent", []WaySeen{dead, dying}, false, time.Second},
		{"none answers", []WaySeen{dead, dead}, true, 5 * time.Second},
		{"nothing is known", nil, false, 0},
	} {
		l := LegSeen{Ways: c.ways}
		if lost, silence := l.lost(now, 2*time.Second), l.Silence(now); lost != c.lost || silence != c.silence {
			t.Errorf("%s: lost %v, silent for %v; want %v, %v", c.name, lost, silence, c.lost, c.silence)
		}
	}
	if at := (LegSeen{Ways: []WaySeen{dead, good}}).heard(); !at.Equal(now) {
		t.Errorf("heard %v, want when the better way was", at)
	}
}

// A leg that shares one of its two paths with a lost leg need not leave with it.
func TestACutPathTakesOnlyThoseThatHaveNoOther(t *testing.T) {
	a, b := Path{"nqn.b", portal(0)}, Path{"nqn.b", portal(1)}
	lost, other, alone := silent(on(0, 1, "b")), on(1, 1, "b"), on(2, 1, "b")
	lost.Paths, other.Paths, alone.Paths = []Path{a}, []Path{a, b}, []Path{a}
	members := []*member{on(0, 0, "a"), lost, on(1, 0, "a"), other, on(2, 0, "a"), alone}
	leave(mirror, members)
	if !lost.Gone || other.Gone || !alone.Gone {
		t.Errorf("lost leaves %v, who has another path %v, who has not %v; want true, false, true", lost.Gone, other.Gone, alone.Gone)
	}
}

// A host connects to as many portals of a leg as the wanted state says, one if it says nothing
// or the data path cannot use several. To those after the first it connects only if they accept connections: what the
// kernel connects to a silent portal keeps it from connecting anything else.
func TestALegHasAsManyPathsAsWanted(t *testing.T) {
	for name, caps := range ways {
		for _, accept := range []bool{true, false} {
			for wanted, want := range map[int]int{0: 1, 1: 1, 2: 2, 9: 3} {
				if !caps.Multipath || !accept {
					want = 1
				}
				l := Link{NQN: "nqn.a", Portals: []block.Portal{portal(0), portal(1), portal(2)}, Paths: wanted}
				s := &Seen{Now: time.Unix(1e9, 0), Tried: map[Path]Tried{}}
				for range 9 { // turns
					p := &planner{c: caps, s: s, w: &Wanted{Links: []Link{l}}, m: &Memory{}}
					p.connect()
					for _, o := range p.orders {
						switch o := o.(type) {
						case Connect:
							s.Paths = append(s.Paths, PathSeen{Path: o.Path, State: PathConnecting})
						case Try:
							s.Tried[o.Path] = Tried{At: s.Now, OK: accept}
						}
					}
				}
				if len(s.Paths) != want {
					t.Errorf("%s: with %d wanted it connects %v, want %d paths; the others accept connections: %v", name, wanted, s.Paths, want, accept)
				}
			}
		}
	}
}

// A path whose end can take a minute is prepared for it, if and only if it is about to be cut.
func TestAPathThatLingersFailsFastOnlyWhenItIsCut(t *testing.T) {
	at := Path{"nqn.a", portal(0)}
	for _, c := range []struct {
		path PathSeen
		cut  bool
		want string
	}{
		{PathSeen{State: PathLive, Lingers: true}, true, "fail fast"},
		{PathSeen{State: PathSilent, Lingers: true}, true, "fail fast"},
		{PathSeen{State: PathReleased, Lingers: true}, true, ""},
		{PathSeen{State: PathLive, Lingers: true, FailsFast: true}, true, ""},
		{PathSeen{State: PathLive, Lingers: true}, false, ""},
		{PathSeen{State: PathLive, Lingers: true, FailsFast: true}, false, "fail fast no more"},
		{PathSeen{State: PathSilent, Lingers: true, FailsFast: true}, false, ""},
		{PathSeen{State: PathLive}, true, ""},
	} {
		c.path.Path = at
		p := &planner{s: &Seen{Paths: []PathSeen{c.path}}}
		var cut []Path
		if c.cut {
			cut = []Path{at}
		}
		p.failFast(cut)
		got := ""
		if len(p.orders) > 0 {
			got = strings.TrimSuffix(p.orders[0].String(), " "+at.String())
		}
		if got != c.want || len(p.orders) > 1 {
			t.Errorf("%+v, cut %v: %v, want %q", c.path, c.cut, p.orders, c.want)
		}
	}
}

// An attempt that was left behind and then succeeds makes a second path, which nobody wants.
func TestALegHasNoMorePathsThanWanted(t *testing.T) {
	l := Link{Leg: legID(0, 0), NQN: "nqn.a", Portals: []block.Portal{portal(0), portal(1)}} // it begins at the second
	end := "disconnect " + Path{"nqn.a", portal(0)}.String()
	for _, c := range []struct {
		name   string
		change func(*planner)
		want   string
	}{
		{"of two, one of which is wanted", func(*planner) {}, end},
		{"of two wanted", func(p *planner) { p.w.Links[0].Paths = 2 }, ""},
		{"with one that is silent", func(p *planner) { p.s.Paths[1].State = PathSilent }, ""},
		{"to a leg that does not answer", func(p *planner) { p.s.Legs = nil }, ""},
		{"that the data path moves, and leaves none behind", func(p *planner) { p.c.Hears = true }, ""},
		{"of which one is being moved", func(p *planner) { p.s.Paths[0].Moving = true }, ""},
		{"with a silent one whose controller the target has ended", func(p *planner) {
			p.s.Paths[0].State, p.s.Paths[1].Replaces = PathSilent, true
		}, end},
		{"with a silent one, of a leg that does not answer yet", func(p *planner) {
			p.s.Paths[0].State, p.s.Paths[1].Replaces, p.s.Legs = PathSilent, true, nil
		}, ""},
	} {
		p := &planner{c: ways["tables"], w: &Wanted{Links: []Link{l}}, m: &Memory{}, s: &Seen{
			Legs:  map[block.LegID]LegSeen{l.Leg: {Live: true}},
			Paths: []PathSeen{{Path: Path{"nqn.a", portal(0)}, State: PathLive}, {Path: Path{"nqn.a", portal(1)}, State: PathLive}},
		}}
		c.change(p)
		p.endSurplus()
		got := ""
		for _, o := range p.orders {
			got += o.String()
		}
		if got != c.want {
			t.Errorf("live paths %s: %q, want %q", c.name, got, c.want)
		}
	}
}

func TestPortalsAreTriedInTurn(t *testing.T) {
	rdma := block.Portal{Transport: block.RDMA, Address: "192.0.2.9", Port: 4420}
	l := &Link{NQN: "nqn.a", Portals: []block.Portal{portal(0), portal(1), rdma, portal(2)}} // a volume that begins at the second
	refused := func(node, turns int) PathSeen {
		return PathSeen{Path: Path{"nqn.a", portal(node)}, State: PathRefused, Turns: turns}
	}
	p := &planner{c: ways["copies"], s: &Seen{}, w: &Wanted{Links: []Link{*l}}, m: &Memory{}}
	for i, c := range []struct {
		paths []PathSeen
		want  []block.Portal
	}{
		{nil, []block.Portal{portal(1), portal(2), portal(0)}},
		{[]PathSeen{refused(1, 0)}, []block.Portal{portal(1), portal(2), portal(0)}},
		{[]PathSeen{refused(1, 1)}, []block.Portal{portal(2), portal(0), portal(1)}},
		{[]PathSeen{refused(1, 1), refused(2, 1), refused(0, 1)}, []block.Portal{portal(1), portal(2), portal(0)}},
		{[]PathSeen{{Path: Path{"nqn.a", portal(1)}, State: PathLive}}, []block.Portal{portal(2), portal(0)}},
	} {
		p.s.Paths = c.paths
		if got := p.portals(l); !slices.Equal(got, c.want) {
			t.Errorf("case %d: portals %v, want %v", i, got, c.want)
		}
	}
}

func TestNoIOIsHeldToLeaveOutALegWhileTheManagerIsAway(t *testing.T) {
	both(t, 1, 2, func(t *testing.T, w *world) {
		w.until(t, Serving)
		w.ask(1)
		w.away = true
		w.pass(2 * time.Second)
		w.begin(0)
		w.pass(2 * time.Second)
		if !w.wrote[0].done {
			t.Errorf("all legs answer, and a write waits: held %v, waiting %q", w.held, w.verdict.Waiting)
		}
		if want := "leave out legs: the volume manager, which has to record them, does not answer"; !slices.Contains(w.verdict.Notes, want) {
			t.Errorf("notes %q, want %q", w.verdict.Notes, want)
		}
		w.away = false
		w.pass(2 * time.Second)
		if w.slots[Place{0, 1}].inSync {
			t.Error("the leg is not left out when the manager is back")
		}
	})
}

func TestNoIOIsHeldToLeaveOutALegWhileTheWantedStateIsNotKnown(t *testing.T) {
	both(t, 1, 2, func(t *testing.T, w *world) {
		w.until(t, Serving)
		w.ask(1)
		s := w.look()
		orders, _ := Guard(w.wanted, w.memory, s, Limits{Window: 2 * time.Second, Lease: 8 * time.Second, Stuck: time.Minute, Connect: ConnectPatience, Retry: RetryLast}, w.caps)
		if len(orders) > 0 {
			t.Errorf("while the wanted state is not known: %v", orders)
		}
	})
}

// A rolling restart: the next target stops 4 s after the leg of the first was left out, which is in sync again.
func TestTheNextTargetOfARollingRestartIsLeftOutInTime(t *testing.T) {
	both(t, 1, 2, func(t *testing.T, w *world) {
		w.until(t, Serving)
		w.ask(1)
		w.pass(time.Second)
		if w.slots[Place{0, 1}].inSync {
			t.Fatal("the first leg is not left out")
		}
		w.ask(2) // its target is back
		w.comeBack()
		w.pass(4 * time.Second)
		if !w.slots[Place{0, 1}].inSync {
			t.Fatal("the first leg is not in sync again")
		}
		w.ask(0)
		did := w.pass(3 * time.Second) // as long as a target waits that stops
		if w.slots[Place{0, 0}].inSync {
			t.Errorf("3 s after it was asked for, the leg is not left out; done %q, notes %q, waiting %q", did, w.verdict.Notes, w.verdict.Waiting)
		}
	})
}

// `weft detach` waits for a mount to end, for hours perhaps; the volume is in use meanwhile.
func TestALegIsLeftOutOfAVolumeWhoseDetachWaitsForItsUsers(t *testing.T) {
	both(t, 1, 2, func(t *testing.T, w *world) {
		w.until(t, Serving)
		w.open = true
		w.wanted.Detach = true
		w.pass(5 * time.Second)
		w.ask(1)
		did := w.pass(time.Minute)
		if w.slots[Place{0, 1}].inSync {
			t.Errorf("the leg is not left out within a minute; done %q, notes %q, waiting %q", did, w.verdict.Notes, w.verdict.Waiting)
		}
	})
}

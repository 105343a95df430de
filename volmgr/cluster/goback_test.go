// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
)

// newBackWorld has a snapshot db1@mon, and db1 written since and detached. It returns what the two hold.
func newBackWorld(t *testing.T, seed uint64) (*snapWorld, int, int) {
	return newBackWorldOf(t, seed, true)
}

func newBackWorldOf(t *testing.T, seed uint64, thin bool) (*snapWorld, int, int) {
	w := newSnapWorldOf(t, seed, thin)
	for range 10 {
		w.writes(w.hosts["c1"])
	}
	if err := w.take("mon", "db1"); err != nil {
		t.Fatal(err)
	}
	w.settle()
	for range 10 {
		w.writes(w.hosts["c1"])
	}
	w.must(Detach{Volume: "db1"})
	w.settle()
	return w, w.legs[w.volume("db1").Legs[0].ID], w.legs[w.volume("db1@mon").Legs[0].ID]
}

// toSwitching has db1 go back until targets are told to.
func (w *snapWorld) toSwitching() {
	w.must(RestoreVolume{Volume: "db1", Snapshot: "db1@mon"})
	for range 10 {
		if w.volume("db1").Restoring.Switching {
			return
		}
		for _, n := range slices.Sorted(maps.Keys(w.targets)) {
			w.targetActs(w.targets[n])
			if w.volume("db1").Restoring.Switching {
				return
			}
		}
	}
	w.t.Fatal("no switching")
}

// A manager that begins to lead has no reports yet, and takes no target for one that does not answer.
func TestTheNextManagerLeavesNoLegBehindBeforeItsTargetHasReported(t *testing.T) {
	w, _, held := newBackWorld(t, 1)
	w.toSwitching()
	v := w.volume("db1")
	// both targets do it; none has reported yet to the new leader
	for _, x := range w.targets {
		for range 2 {
			w.targetObeys(x, w.s.WantedTarget(x.name))
		}
	}
	if w.legs[v.Legs[0].ID] != held || w.legs[v.Legs[1].ID] != held {
		t.Fatal("not back")
	}
	s, err := Load(w.s.Records())
	if err != nil {
		t.Fatal(err)
	}
	w.s = s
	w.now = w.now.Add(restoreAwait + time.Second)
	clear(w.back)
	w.s.Step(w.now, Tick{})
	for _, l := range v.Legs {
		w.s.Step(w.now, TargetReported{Session: 1, Report: w.targetReport(w.targets[l.Node])})
	}
	v = w.s.volumes.Get(v.ID)
	for _, l := range v.Legs {
		if l.State != LegInSync {
			t.Errorf("leg %v is %s: %s", l.ID, l.State, l.Reason)
		}
	}
}

// A store from before the snapshot does not know what legs hold that were going back to it: an operator
// chooses.
func TestAVolumeThatWasGoingBackToASnapshotThatIsNotKnown(t *testing.T) {
	w := newSnapWorld(t, 1)
	records := w.s.Records()
	if err := w.take("mon", "db1"); err != nil {
		t.Fatal(err)
	}
	w.settle()
	w.must(Detach{Volume: "db1"})
	w.settle()
	w.toSwitching()
	clear(w.back)
	w.lose("backup", records)
	for range 200 {
		w.now = w.now.Add(time.Second)
		w.must(Tick{})
		for _, x := range w.targets {
			w.targetActs(x)
		}
	}
	v := w.volume("db1")
	if v.Restoring != nil || !v.undecided() {
		t.Fatalf("it is %+v", v)
	}
	w.must(PromoteStaleLeg{Volume: "db1", Leg: v.Legs[0].ID, AcceptDataLoss: true})
	w.settle()
	w.must(Attach{Volume: "db1", Node: "c1"})
}

// A volume that was not clean is not called so before it goes back: it may be left as it was.
func TestAVolumeIsNotCalledCleanBeforeItGoesBack(t *testing.T) {
	w, _, _ := newBackWorld(t, 1)
	for id := range w.s.drives {
		w.s.drives[id].VolatileCache = true
	}
	v := w.volume("db1")
	c := v.clone()
	c.Clean = false // its last host released it, and said that its copies may differ
	w.s.volumes.Set(w.s.by, v.ID, c)
	w.s.index(v, c)
	w.must(RestoreVolume{Volume: "db1", Snapshot: "db1@mon"})
	a := w.targets[v.Legs[0].Node]
	b := w.targets[v.Legs[1].Node]
	r := w.targetReport(a) // its labels are those of before
	r.BootID = "2"
	w.must(TargetReported{Session: 1, Report: r})
	a.down, b.down = true, true
	w.must(TargetLost{Node: b.name, Session: 1})
	for range 80 {
		w.now = w.now.Add(time.Second)
		w.must(Tick{})
	}
	v = w.volume("db1")
	if v.Restoring == nil && !v.Legs[0].Suspect && v.Legs[0].State == LegInSync {
		t.Errorf("leg %v lost its cache and is not suspect: %+v", v.Legs[0].ID, v.Legs[0])
	}
}

// A leg that was stale before the volume went back is copied whole, also if the store was lost on the way.
func TestALegThatDidNotGoBackIsCopiedWholeAlsoByAnotherStore(t *testing.T) {
	for _, kind := range []string{"drives", "backup"} {
		w := newSnapWorld(t, 1)
		if err := w.take("mon", "db1"); err != nil {
			t.Fatal(err)
		}
		w.settle()
		v := w.volume("db1")
		b := v.Legs[1]
		w.targets[b.Node].down = true
		w.must(TargetLost{Node: b.Node, Session: 1})
		w.must(RecordStale{Node: "c1", Volume: v.ID, Epoch: v.Epoch, Legs: []block.LegID{b.ID}, Reason: "x"})
		for range 10 {
			w.writes(w.hosts["c1"])
		}
		w.must(Detach{Volume: "db1"})
		w.settle()
		w.targets[b.Node].down = false
		w.settle()
		if l := w.volume("db1").leg(b.ID); l.State != LegStale || l.CopyAll {
			t.Fatalf("it is %+v", l)
		}
		records := w.s.Records()
		w.toSwitching()
		for range 3 {
			for _, n := range slices.Sorted(maps.Keys(w.targets)) {
				w.targetObeys(w.targets[n], w.s.WantedTarget(n))
			}
		}
		clear(w.back)
		w.lose(kind, records)
		w.settle()
		w.settle()
		v = w.volume("db1")
		l := v.leg(b.ID)
		if v.Restoring != nil || l.State != LegStale {
			t.Fatalf("%s: %+v, %+v", kind, v.Restoring, l)
		}
		if !l.CopyAll {
			t.Errorf("%s: the volume went back, and only a part of %v is copied: %+v", kind, l, *l)
		}
	}
}

// A request that is based on what the volume was before a host had it is refused.
func TestAVolumeThatSomebodyHadMeanwhileDoesNotGoBack(t *testing.T) {
	w := newSnapWorld(t, 1)
	w.must(Detach{Volume: "db1"})
	w.settle()
	if err := w.take("keep", "db1"); err != nil {
		t.Fatal(err)
	}
	w.settle()
	saw := *w.volume("db1")
	w.must(Attach{Volume: "db1", Node: "c1"})
	w.settle()
	for range 10 {
		w.writes(w.hosts["c1"])
	}
	acked, kept := w.acked[w.volume("db1").ID], w.legs[w.volume("db1@keep").Legs[0].ID]
	w.must(Detach{Volume: "db1"})
	w.settle()
	if err := w.step(RestoreVolume{Volume: "db1", Snapshot: "db1@keep", IfGeneration: saw.Generation, IfEpoch: saw.Epoch}); err == nil {
		t.Errorf("accepted, though %d was acknowledged since the caller looked; kept is %d", acked, kept)
	}
}

// A leg that is still exported to the last host, which rebooted while it was being detached, may get what
// that has sent: it does not go back yet.
func TestALegThatIsStillExportedDoesNotGoBack(t *testing.T) {
	w := newSnapWorld(t, 1)
	if err := w.take("mon", "db1"); err != nil {
		t.Fatal(err)
	}
	w.settle()
	v := w.volume("db1")
	nqn := w.s.nqn(v, v.Attachment, v.Legs[0].Node)
	w.must(Detach{Volume: "db1"})
	w.hosts["c1"].boot++ // it reboots with I/O in flight
	w.hosts["c1"].volumes = map[block.VolumeID]WantedAttachment{}
	w.must(InitiatorReported{1, w.hostReport(w.hosts["c1"])})
	if v = w.volume("db1"); v.users() != "" || v.Holder != "" || v.Clean {
		t.Fatalf("%+v", v)
	}
	w.must(RestoreVolume{Volume: "db1", Snapshot: "db1@mon"})
	for range 5 {
		for _, x := range w.targets {
			w.targetObeys(x, w.s.WantedTarget(x.name))
			r := w.targetReport(x)
			if x.name == v.Legs[0].Node {
				r.Exports = []ExportReport{{NQN: nqn, Legs: []block.LegID{v.Legs[0].ID}}} // it cannot be removed yet
			}
			w.must(TargetReported{Session: 1, Report: r})
		}
	}
	if x := w.volume("db1").Restoring; x == nil || x.Switching {
		t.Errorf("it goes back, or has: %+v; exported: %v", x, w.s.targets[v.Legs[0].Node].exported.Has(v.Legs[0].ID))
	}
}

// A store that was rebuilt without one of the drives does not say that the volume went back: an operator
// chooses a copy first, and then it does. A copy of the snapshot has to be chosen, too, if the newest label
// lists the one that was found as not in sync. If only the label of the other one is missing, it is good: a
// snapshot never changes.
func TestAnUndecidedVolumeDoesNotGoBack(t *testing.T) {
	for _, listed := range []bool{true, false} {
		t.Run(fmt.Sprintf("its snapshot is listed as in sync: %v", listed), func(t *testing.T) { undecidedDoesNotGoBack(t, listed) })
	}
}

func undecidedDoesNotGoBack(t *testing.T, listed bool) {
	w, before, held := newBackWorld(t, 1)
	w.toSwitching()
	v := w.volume("db1")
	a, b := v.Legs[0], v.Legs[1]
	var reports []TargetReport
	for _, r := range w.reports() {
		if r.Node != b.Node {
			reports = append(reports, r)
		}
	}
	for _, r := range reports {
		for _, d := range r.Drives {
			for i := range d.Legs {
				if label := &d.Legs[i].Volume; !listed && label.Snapshot.Taken != 0 {
					label.Others = append(label.Others, d.Legs[i].Leg)
					label.InSync = slices.DeleteFunc(slices.Clone(label.InSync), func(l block.LegID) bool { return l == d.Legs[i].Leg })
				}
			}
		}
	}
	s, _, err := Rebuild(w.now, reports, nil)
	if err != nil {
		t.Fatal(err)
	}
	w.s = s
	w.targets[b.Node].down = true
	for _, x := range w.targets {
		x.wanted, x.said = nil, nil
	}
	clear(w.back)
	id := v.ID
	for range 6 {
		if _, err := w.s.Step(w.now, Tick{}); err != nil {
			t.Fatal(err)
		}
		for _, x := range w.targets {
			if x.down {
				continue
			}
			w.targetObeys(x, w.s.WantedTarget(x.name))
			if _, err := w.s.Step(w.now, TargetReported{Session: 1, Report: w.targetReport(x)}); err != nil {
				t.Fatal(err)
			}
		}
		w.now = w.now.Add(time.Second)
	}
	v = w.s.volumes.Get(id)
	if v.Restoring == nil || !v.undecided() || w.legs[a.ID] != before {
		t.Fatalf("its leg holds %d: %+v", w.legs[a.ID], v)
	}
	if e, err := w.s.Explain("db1"); err != nil || !slices.Contains(e.Waits, "an operator to choose a copy of each column that has none in sync") {
		t.Errorf("it is explained as %+v, %v", e, err)
	}
	choose := []string{"db1", "db1@mon"}
	if listed {
		choose = choose[:1]
		if x := w.volume("db1@mon"); x.undecided() {
			t.Errorf("nobody believes the snapshot's leg: %+v", x.Legs)
		}
	}
	for _, volume := range choose {
		e, err := w.s.Explain("db1")
		if !listed && (err != nil || !slices.Contains(e.Waits, "an operator to choose a copy of each column of db1@mon that has none in sync") ||
			!slices.ContainsFunc(e.Actions, func(do string) bool { return strings.Contains(do, "weft explain snapshot db1@mon") })) {
			t.Errorf("nothing is said of the snapshot, which nobody believes: %+v, %v", e, err)
		}
		unproven := slices.ContainsFunc(e.Waits, func(why string) bool { return strings.Contains(why, "not known whether what its tree has of db1@mon") })
		if volume == "db1@mon" && !unproven {
			t.Errorf("a leg that waits for that says %v", e.Waits)
		}
		for _, l := range w.volume(volume).Legs {
			if l.Node == a.Node {
				if _, err := w.s.Step(w.now, PromoteStaleLeg{Volume: volume, Leg: l.ID, AcceptDataLoss: true}); err != nil {
					t.Fatalf("promote the leg of %s: %v", volume, err)
				}
			}
		}
	}
	for range 20 {
		w.now = w.now.Add(100 * time.Millisecond)
		for _, x := range w.targets {
			if !x.down {
				w.targetObeys(x, w.s.WantedTarget(x.name))
				if _, err := w.s.Step(w.now, TargetReported{Session: 1, Report: w.targetReport(x)}); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	if v = w.s.volumes.Get(id); v.Restoring != nil || w.legs[a.ID] != held {
		t.Errorf("once a copy is chosen its leg holds %d, not %d: %+v", w.legs[a.ID], held, v.Restoring)
	}
}

// A volume that goes back again after the loss of the store says why it does not get on: on targets that are
// too old for it, and when it is told to.
func TestAVolumeThatDoesNotGoBackOnOldTargetsSaysWhy(t *testing.T) {
	for _, lost := range []bool{false, true} {
		w, _, _ := newBackWorldOf(t, 1, false)
		w.toSwitching()
		if lost {
			w.lose("drives", nil)
		}
		for range 5 {
			for _, x := range w.targets {
				r := w.targetReport(x)
				r.Level = plainRestoreLevel - 1
				w.must(TargetReported{Session: 1, Report: r})
			}
			w.must(Tick{})
		}
		if w.volume("db1").Restoring == nil {
			t.Fatalf("lost %v: it is back", lost)
		}
		e, err := w.s.Explain("db1")
		if err != nil {
			t.Fatal(err)
		}
		if waits := strings.Join(e.Waits, "; "); !strings.Contains(waits, "version") || strings.Contains(waits, "nothing of") {
			t.Errorf("lost %v: it waits for %q", lost, waits)
		}
	}
}

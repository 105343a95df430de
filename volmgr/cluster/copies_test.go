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
	"weft.dev/weft/volmgr/evidence"
	"weft.dev/weft/volmgr/image"
	"weft.dev/weft/volmgr/keys"
)

// copying returns the leg of a snapshot that is being copied; nil if there is none.
func (v *Volume) copying() *Leg {
	for i := range v.Legs {
		if l := &v.Legs[i]; l.Copying != nil && l.member() {
			return l
		}
	}
	return nil
}

// newCopyWorld has a snapshot db1@mon that lacks a copy, which is begun and does not get on.
func newCopyWorld(t *testing.T) (w *snapWorld, from, to *Leg) {
	w = newSnapWorld(t, 1)
	for _, x := range w.targets {
		x.copyFails = "it does not get on"
	}
	w.missed("db1", "mon")
	w.look(3)
	v := w.volume("db1@mon")
	to = v.copying()
	if to == nil {
		t.Fatalf("no copy was begun: %+v", v.Legs)
	}
	return w, v.leg(to.Copying.From), to
}

// A snapshot that requires authentication is copied from no target that does not demand it, and from none
// while there are no keys: its data would be exported to whoever says that it is the copying target.
func TestASnapshotThatRequiresAuthenticationIsNotExportedWithoutIt(t *testing.T) {
	w, from, to := newCopyWorld(t)
	v := w.volume("db1@mon").clone()
	v.Authentication = block.AuthenticationRequire
	for _, c := range []struct{ master, target bool }{{false, false}, {false, true}, {true, false}, {true, true}} {
		w.s.master, w.s.nodes[from.Node].TargetAuthenticates = keys.Master{}, c.target
		if c.master {
			w.s.master = keys.Make([32]byte{1})
		}
		exports, origin := w.s.copyExports(v, from.Node), w.s.originOf(v, v.leg(to.ID))
		if may := c.master && c.target; may != (len(exports) == 1) || may == origin.Wait || may != (w.s.unexportable(v, from) == "") {
			t.Errorf("%+v: exports %+v, origin %+v, %q", c, exports, origin, w.s.unexportable(v, from))
		}
		for _, x := range exports {
			if x.Keys.IsZero() {
				t.Errorf("%+v: an export without keys", c)
			}
		}
		if why := w.s.copyingWaits(v, v.leg(to.ID)); strings.Contains(why, "does not authenticate") == (c.master && c.target) {
			t.Errorf("%+v: it waits for %q", c, why)
		}
	}
	w.s.nodes[from.Node].TargetAuthenticates = false
	if why := newTx(w.s, w.now).copyLost(v, v.leg(to.ID)); why == "" {
		t.Error("the copy waits for a target that authenticates no more")
	}
}

// A drive to which a copy has failed gives way to others.
func TestACopyThatFailsIsTriedOnAnotherDrive(t *testing.T) {
	w, from, to := newCopyWorld(t)
	for name, x := range w.targets {
		if name != to.Node {
			x.copyFails = ""
		}
	}
	w.now = w.now.Add(copyFails)
	w.look(3)
	w.now = w.now.Add(copyAgain)
	w.look(6)
	v := w.bothCopies("db1@mon", to.Drive)
	if v.leg(from.ID) == nil {
		t.Errorf("its legs are %+v", v.Legs)
	}
	if left := w.s.uncopied[columnOf{v.ID, 0}]; left.failed != nil {
		t.Errorf("%+v is kept after it succeeded", left)
	}
}

// A source that cannot be reached says nothing about the drive to which it was copied.
func TestASourceThatIsAwayIsNotTheFaultOfTheDrive(t *testing.T) {
	w, from, to := newCopyWorld(t)
	w.targets[from.Node].down = true
	w.must(TargetLost{Session: 1, Node: from.Node})
	v := w.volume("db1@mon")
	tx := newTx(w.s, w.now)
	tx.noteFailure(v, v.leg(to.ID), "it is away")
	if failed := w.s.uncopied[columnOf{v.ID, 0}].failed; failed[to.Drive.UUID] || !failed[from.ID.UUID] {
		t.Errorf("what failed is %v", failed)
	}
}

// A drive that has no more space than is left to hosts gets a copy only if no other drive can have it.
func TestACopyIsNotPlacedOnAFullDrive(t *testing.T) {
	for _, own := range []bool{false, true} { // it is to be in a tree of its own
		w := newSnapWorld(t, 1)
		w.missed("db1", "mon")
		v := w.volume("db1@mon").clone()
		v.Legs = slices.DeleteFunc(v.Legs, func(l Leg) bool { return l.Copying != nil || !l.Rebuilt.IsZero() })
		if own {
			v.Snapshot = v.Snapshot.with(nil)
			v.Snapshot.Volume = block.VolumeID{} // its volume is gone
		}
		tx := newTx(w.s, w.now)
		before, err := tx.copyPlace(v, 0, nil, tx.newCopyLook())
		if err != nil {
			t.Fatal(err)
		}
		if tx.full(before.Drive) {
			t.Error("a drive with free extents is full")
		}
		fill := func(id block.DriveID) {
			d := w.s.drives[id]
			d.Space = []image.Extent{{Start: 0, Count: d.Extents}}
			r := w.s.targets[d.Node].drives[id]
			r.Reserve, r.Trees = []image.Extent{{Start: 0, Count: 1}}, []TreeReport{{Extents: []image.Extent{{Start: 1, Count: d.Extents - 1}}}}
			w.s.targets[d.Node].drives[id] = r
			if !tx.full(id) {
				t.Errorf("drive %v is not full: free %d, reserve %d", id, w.s.free(id), w.s.reserve(d))
			}
		}
		fill(before.Drive)
		for i := range uint64(16) {
			tx.gen += i
			if to, err := tx.copyPlace(v, 0, nil, tx.newCopyLook()); err != nil || to.Drive == before.Drive {
				t.Errorf("in a tree of its own %v: it goes to %v, %v", own, to.Drive, err)
			}
		}
		for id := range w.s.drives {
			if id != before.Drive {
				fill(id)
			}
		}
		if to, err := tx.copyPlace(v, 0, nil, tx.newCopyLook()); err != nil || !own && to.Drive != before.Drive {
			t.Errorf("all are full, and it goes to %v, %v", to.Drive, err)
		}
	}
}

// Of the drives with room, one whose target can copy is chosen.
func TestACopyIsPlacedWhereItCanBeMade(t *testing.T) {
	w := newSnapWorld(t, 1)
	w.missed("db1", "mon")
	v := w.volume("db1@mon").clone()
	v.Legs = slices.DeleteFunc(v.Legs, func(l Leg) bool { return l.Copying != nil || !l.Rebuilt.IsZero() })
	v.Snapshot = v.Snapshot.with(nil)
	v.Snapshot.Volume = block.VolumeID{} // its volume is gone
	var may block.NodeName
	for name := range w.targets {
		if name != v.Legs[0].Node {
			w.s.targets[name].report.Copies = may == ""
			if may == "" {
				may = name
			}
		}
	}
	for i := range uint64(16) {
		tx := newTx(w.s, w.now)
		tx.gen += i
		if to, err := tx.copyPlace(v, 0, nil, tx.newCopyLook()); err != nil || to.Node != may {
			t.Errorf("generation %d: %v, %v, want %s", i, to.Node, err, may)
		}
		failed := map[block.UUID]bool{}
		for id := range w.s.drivesOn[may] {
			failed[id.UUID] = true
		}
		if to, err := tx.copyPlace(v, 0, failed, tx.newCopyLook()); err == nil {
			t.Errorf("generation %d: a drive with which it failed: %v", i, to.Node)
		}
	}
}

// One column that cannot be copied does not hold up the others.
func TestAColumnThatCannotBeCopiedDoesNotHoldUpOthers(t *testing.T) {
	w, _, _ := newCopyWorld(t)
	v := w.volume("db1@mon")
	tx := newTx(w.s, w.now)
	tx.noteUncopied(v, 0, "no copy can be read", placeAgain)
	if !tx.now.Before(w.s.uncopied[columnOf{v.ID, 0}].until) || tx.now.Before(w.s.uncopied[columnOf{v.ID, 1}].until) {
		t.Errorf("what is not copied: %+v", w.s.uncopied)
	}
}

// What is copied from a leg that may not be good, or begins as one, is not taken for good, even if it is complete.
func TestACopyOfASuspectLegIsNotTaken(t *testing.T) {
	for _, what := range []string{"source", "base", "what the source has of it"} {
		w := newSnapWorld(t, 1)
		if err := w.take("sun", "db1"); err != nil {
			t.Fatal(err)
		}
		w.settle()
		for _, x := range w.targets {
			x.copyFails = "it does not get on"
		}
		w.missed("db1", "mon")
		w.look(3)
		v := w.volume("db1@mon")
		l := v.copying()
		if l == nil || l.Copying.Base.IsZero() {
			t.Fatalf("the copy is %+v", l)
		}
		id, sun := l.ID, w.volume("db1@sun")
		map[string]*Leg{"source": v.leg(l.Copying.From), "base": sun.leg(l.Copying.Base), "what the source has of it": sun.leg(l.Copying.Since)}[what].Suspect = true
		if tx := newTx(w.s, w.now); !tx.doubtful(v, l) || tx.copyLost(v, l) == "" {
			t.Errorf("%s is suspect, and the copy goes on", what)
		}
		if what == "source" { // its column has no other, so it is found good
			continue
		}
		x := w.targets[l.Node]
		x.ready[id], w.frozen[id], w.legs[id] = true, true, w.legs[l.Copying.From]
		w.targetActs(x)
		w.must(Tick{})
		if l := w.volume("db1@mon").leg(id); l != nil && l.State != LegDeleting {
			t.Errorf("%s is suspect: the leg is %+v", what, l)
		}
	}
}

// A leg of a snapshot stays as long as a volume is to begin as it, or is going back to it.
func TestALegThatVolumesBeginAsIsNotGivenUp(t *testing.T) {
	w := newSnapWorld(t, 1)
	if err := w.take("mon", "db1"); err != nil {
		t.Fatal(err)
	}
	w.settle()
	may := func() bool {
		v := w.volume("db1@mon").clone()
		third := v.Legs[0]
		third.ID, third.Copy = block.LegID{UUID: block.UUID{7}}, 2
		for id, d := range w.s.drives {
			if !slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.Node == d.Node }) {
				third.Drive, third.Node = id, d.Node
			}
		}
		v.Legs = append(v.Legs, third)
		_, needless := newTx(w.s, w.now).needless(v, &v.Legs[0], false)
		return needless
	}
	if !may() {
		t.Fatal("a leg too many is not given up")
	}
	w.must(CreateVolume{Name: "c", From: "db1@mon", Seed: w.seed()})
	if may() {
		t.Error("a leg is given up as which a clone is to begin")
	}
	w.settle()
	if !may() {
		t.Error("a leg too many is not given up after the clone is made")
	}
	w.must(Detach{Volume: "db1", Node: "c1"})
	w.settle()
	w.must(RestoreVolume{Volume: "db1", Snapshot: "db1@mon"})
	if may() {
		t.Error("a leg is given up to which a volume is going back")
	}
}

// A store from before a snapshot was copied finds the copy again: what is complete, and of the same moment, is
// one of its legs. What may be of another moment is not, nor what the lost manager had not recorded: it may have
// ended that copy, of a suspect leg. Both are named, and freed when they are not needed.
func TestACompleteLegThatNoRecordHasIsOneAgain(t *testing.T) {
	for _, what := range []string{"as recorded", "of another moment", "not recorded"} {
		same := what == "as recorded"
		w := newSnapWorld(t, 1)
		w.s.level = copiesLevel - 1 // so that it is not copied before the backup
		w.missed("db1", "mon")
		old := w.s.Records()
		w.s.level = block.KnownLevel
		w.look(6)
		v := w.bothCopies("db1@mon", block.DriveID{})
		i := slices.IndexFunc(v.Legs, func(l Leg) bool { return !l.Rebuilt.IsZero() })
		if i < 0 {
			t.Fatalf("its legs are %+v", v.Legs)
		}
		copied, n := v.Legs[i], w.copied
		w.lose("old backup", old)
		w.s.level = block.KnownLevel
		if n := len(w.volume("db1@mon").Legs); n != 1 {
			t.Fatalf("the backup knows of %d legs", n)
		}
		if x := w.targets[copied.Node]; !same {
			label := x.legs[copied.ID]
			if what == "not recorded" {
				label.Volume.InSync, label.Volume.Others = []block.LegID{v.Legs[1-i].ID}, []block.LegID{copied.ID}
			} else {
				label.Volume.Snapshot.Taken++
			}
			x.legs[copied.ID] = label
		}
		found, named := false, false
		for range 12 {
			w.look(1, "db1")
			l := w.volume("db1@mon").leg(copied.ID)
			found = found || l != nil && l.trusted()
			e, err := w.s.Explain("db1@mon")
			if err != nil {
				t.Fatal(err)
			}
			named = named || strings.Contains(strings.Join(e.Facts, "\n"), copied.ID.String())
		}
		if found != same || same && w.copied != n || !same && !named {
			t.Errorf("%s: it is a leg again %v, named %v, %d copies were made", what, found, named, w.copied-n)
		}
		if same {
			w.bothCopies("db1@mon", block.DriveID{})
			continue
		}
		x := w.targets[copied.Node]
		report := w.targetReport(x).Drives[0]
		label := &report.Legs[slices.IndexFunc(report.Legs, func(l evidence.LegLabel) bool { return l.Leg == copied.ID })]
		last := w.volume("db1@mon").clone()
		for j := range last.Legs {
			last.Legs[j].Suspect = true
		}
		tx := newTx(w.s, w.now)
		if d := w.s.drives[copied.Drive]; tx.adoptable(last, d, label) != (what == "not recorded") {
			t.Errorf("%s, and no other leg is good: it is taken %v", what, tx.adoptable(last, d, label))
		} else if what == "not recorded" {
			tx.volumes.set(last.ID, last)
			tx.adoptStray(last, d, label)
			v := tx.peek(last.ID)
			if l := v.leg(copied.ID); l == nil || l.trusted() || l.Blank || l.State != LegStale {
				t.Errorf("no label says that it was in sync, and it is recorded as %+v", l)
			} else if why := w.s.rebuildWaitsFor(v, l); !strings.Contains(why, "an operator to choose") {
				t.Errorf("it waits for %q", why)
			}
		}
	}
}

// A snapshot whose volume cannot be frozen says so.
func TestASnapshotThatCannotBeginSaysWhy(t *testing.T) {
	w := newSnapWorld(t, 1)
	if err := w.step(CreateSnapshots{Snapshots: []NewSnapshot{{Volume: "db1", Name: "x"}}, Seed: w.seed()}); err != nil {
		t.Fatal(err)
	}
	w.volume("db1").Attachment.Left = true
	v := w.volume("db1@x")
	v.Legs = nil
	if waits := w.s.phaseWaits(v, w.volume("db1")); !strings.Contains(strings.Join(waits, "\n"), "being attached, detached or expanded") {
		t.Errorf("it waits for %q", waits)
	}
}

// Whenever the store is lost while a snapshot is copied, and whatever store takes its place, the snapshot stays
// what it is, on each of its legs, and can be read.
func TestASnapshotOutlivesAStoreThatIsLostWhileItIsCopied(t *testing.T) {
	copied := 0
	for _, kind := range []string{"drives", "old backup", "new backup"} {
		for moment := range 14 {
			w := newSnapWorld(t, uint64(moment))
			w.s.level = copiesLevel - 1 // so that it is not copied before the backup
			w.missed("db1", "mon")
			w.s.level = block.KnownLevel
			records := w.s.Records()
			w.now = w.now.Add(copiesLook)
			w.must(Tick{})
			names := slices.Sorted(maps.Keys(w.targets))
			for i := range moment {
				w.targetActs(w.targets[names[i%len(names)]])
			}
			if kind == "new backup" {
				records = w.s.Records()
			}
			content := w.legs[w.volume("db1@mon").Legs[0].ID]
			w.lose(kind, records)
			t.Logf("%s, moment %d", kind, moment)
			for range 12 {
				w.look(1, "db1")
			}
			w.check()
			v := w.volume("db1@mon")
			if v == nil || !v.usable() || legsIn(v.inSync()) == 0 {
				e, err := w.s.Explain("db1@mon")
				t.Fatalf("%s, moment %d: it is %+v, explained as %+v, %v", kind, moment, v, e, err)
			}
			for _, l := range v.Legs {
				if l.trusted() && w.legs[l.ID] != content {
					t.Errorf("%s, moment %d: %v holds %d, want %d", kind, moment, &l, w.legs[l.ID], content)
				}
			}
			if legsIn(v.inSync()) == 2 {
				copied++
			}
		}
	}
	if copied == 0 {
		t.Error("no copy was there after a store was lost")
	}
	t.Logf("%d had both copies", copied)
}

// noneFreed has reports made of targets that fail each copy and that free no leg, for some time.
func (w *snapWorld) noneFreed(span time.Duration) (most int) {
	w.t.Helper()
	for end := w.now.Add(span); w.now.Before(end); {
		w.now = w.now.Add(15 * time.Second)
		for _, x := range w.targets {
			was := maps.Clone(x.legs)
			w.targetObeys(x, w.s.WantedTarget(x.name))
			for id, l := range was {
				if _, there := x.legs[id]; !there {
					x.legs[id] = l
				}
			}
			w.must(TargetReported{Session: 1, Report: w.targetReport(x)})
		}
		w.must(Tick{})
		most = max(most, len(w.volume("db1@mon").Legs))
	}
	return most
}

// A target that is online, but fails copies and frees no leg of an attempt, gets no further one: they would
// gather until none could be told from another. Other drives are tried meanwhile, and the snapshot says what
// is to be freed. Once that is, it is copied.
func TestLegsOfCopiesThatFailedAreFreedBeforeOthersBegin(t *testing.T) {
	w, from, _ := newCopyWorld(t)
	if most := w.noneFreed(2 * time.Hour); most > len(w.targets) {
		t.Errorf("%d legs, on %d drives", most, len(w.targets))
	}
	v := w.volume("db1@mon")
	left := map[block.DriveID]bool{}
	for _, l := range v.Legs {
		left[l.Drive] = true
	}
	if len(left) != len(w.targets) {
		t.Errorf("drives %v were tried, from %v", left, from.Drive)
	}
	e, err := w.s.Explain("db1@mon")
	if why := strings.Join(e.Waits, "\n"); err != nil || !strings.Contains(why, "is to be freed on") {
		t.Errorf("it waits for %q, %v", why, err)
	}
	for _, x := range w.targets {
		x.copyFails = ""
	}
	w.now = w.now.Add(copyAgain)
	w.look(12)
	w.bothCopies("db1@mon", block.DriveID{})
}

// A leg gets no number that another one has, and none if all are taken by legs that are to be freed.
func TestALegIsNotAddedWithoutANumber(t *testing.T) {
	w, from, _ := newCopyWorld(t)
	v := w.volume("db1@mon").clone()
	for i := len(v.Legs); i < maxPlaces; i++ {
		if v.noSlot(0) != nil && len(v.column(0)) < v.slots() {
			t.Fatalf("there is no place beside %d legs", len(v.Legs))
		}
		l := *from
		l.ID, l.State, l.Place = block.LegID{UUID: block.UUID{1, byte(i)}}, LegDeleting, v.nextPlace()
		v.Legs = append(v.Legs, l)
	}
	v.Legs = slices.DeleteFunc(v.Legs, func(l Leg) bool { return l.Copying != nil })
	l := *from
	l.ID, l.State, l.Place = block.LegID{UUID: block.UUID{2}}, LegDeleting, v.nextPlace()
	v.Legs = append(v.Legs, l)
	w.s.volumes.Set(w.s.by, v.ID, v)
	tx := newTx(w.s, w.now)
	if _, _, err := tx.planCopy(v, 0, tx.newCopyLook()); err == nil {
		t.Error("a copy is planned that has no number")
	}
	label := w.targets[from.Node].legs[from.ID]
	for _, d := range w.s.drives {
		stray := w.targetReport(w.targets[from.Node]).Drives[0].Legs[0]
		stray.Leg, stray.Volume = block.LegID{UUID: block.UUID{3}}, label.Volume
		tx.freeStray(v, d, &stray)
		tx.adoptStray(v, d, &stray)
	}
	if n := len(tx.peek(v.ID).Legs); n != maxPlaces {
		t.Errorf("it has %d legs, of %d that can have numbers", n, maxPlaces)
	}
}

// A copy that ended waits until its leg is freed, and is made on the same drive again. If that takes long, it is
// made on another one.
func TestADriveThatFreesNothingGivesWay(t *testing.T) {
	for _, frees := range []bool{true, false} {
		w, from, to := newCopyWorld(t)
		tx := newTx(w.s, w.now)
		tx.endCopy(w.volume("db1@mon").ID, to.ID, "its source is lost for a moment")
		tx.commit()
		if frees {
			w.look(5)
		} else {
			w.noneFreed(copyAgain - copiesLook)
		}
		l := w.volume("db1@mon").copying()
		if frees != (l != nil) || l != nil && l.Drive != to.Drive {
			t.Errorf("legs are freed %v: the copy is %+v", frees, l)
		}
		if !frees {
			w.noneFreed(time.Minute)
			if l := w.volume("db1@mon").copying(); l == nil || l.Drive == to.Drive || l.Drive == from.Drive {
				t.Errorf("after %v the copy is %+v", copyAgain, l)
			}
		}
	}
}

// What a lost store had found out about a leg of a snapshot counts as long as a label says so, although the leg
// is complete: it is not good if the newest label lists it as stale or as suspect, whether or not the label of
// the other leg is found.
func TestALegOfASnapshotIsNotBelievedAgainstTheNewestLabel(t *testing.T) {
	for _, c := range []struct {
		kind, what string
		alone      bool
	}{
		{"drives", "stale", false}, {"drives", "stale", true}, {"drives", "suspect", false}, {"drives", "suspect", true},
		{"old backup", "stale", false}, {"old backup", "stale", true}, {"old backup", "suspect", false}, {"old backup", "suspect", true},
	} {
		w := newSnapWorld(t, 1)
		if err := w.take("mon", "db1"); err != nil {
			t.Fatal(err)
		}
		w.settle()
		records := w.s.Records()
		good, bad := w.volume("db1@mon").Legs[0], w.volume("db1@mon").Legs[1]
		newest := good
		if c.alone { // the drive of the good leg has lost its label
			newest = bad
			delete(w.targets[good.Node].legs, good.ID)
			delete(w.targets[good.Node].ready, good.ID)
		}
		x := w.targets[newest.Node]
		label := x.legs[newest.ID]
		label.Volume.Generation += 5
		label.Volume.InSync = []block.LegID{good.ID}
		if c.what == "stale" {
			label.Volume.Others = []block.LegID{bad.ID}
		} else {
			label.Volume.Suspect = []block.LegID{bad.ID}
		}
		x.legs[newest.ID] = label
		w.lose(c.kind, records)
		w.s.level = block.KnownLevel
		settled := false
		for range 12 {
			w.targetsAct()
			v := w.volume("db1@mon")
			settled = settled || !v.Restored
			if l := v.leg(bad.ID); settled && l != nil && l.trusted() {
				t.Fatalf("%+v: the leg is %+v", c, l)
			}
		}
		v := w.volume("db1@mon")
		if l := v.leg(good.ID); !settled || !c.alone && (l == nil || !l.trusted() || v.leg(bad.ID) != nil) {
			t.Errorf("%+v: settled %v, its legs are %+v", c, settled, v.Legs)
		}
		e, err := w.s.Explain("db1@mon")
		if why := strings.Join(e.Actions, "\n"); c.alone && (err != nil || !strings.Contains(why, "promote-stale")) {
			t.Errorf("%+v: the next step is %q, %v, of legs %+v", c, why, err, v.Legs)
		}
	}
}

// targetsAct has targets do what they are told, and report, also while a snapshot has no good leg.
func (w *snapWorld) targetsAct() {
	w.t.Helper()
	w.now = w.now.Add(copiesLook)
	for _, name := range slices.Sorted(maps.Keys(w.targets)) {
		x := w.targets[name]
		w.targetObeys(x, w.s.WantedTarget(name))
		if _, err := w.s.Step(w.now, TargetReported{Session: 1, Report: w.targetReport(x)}); err != nil {
			w.t.Fatal(err)
		}
	}
	if _, err := w.s.Step(w.now, Tick{}); err != nil {
		w.t.Fatal(err)
	}
}

// more adds snapshots of db1 that are like db1@mon, later, and lack the same copy.
func (w *snapWorld) more(n int) {
	base := w.volume("db1@mon")
	x := w.targets[base.Legs[0].Node]
	for i := range n {
		v := base.clone()
		v.ID, v.Name = block.VolumeID{UUID: block.UUID{9, byte(i >> 8), byte(i)}}, block.VolumeName(fmt.Sprintf("db1@s%04d", i))
		v.Snapshot = v.Snapshot.with(nil)
		v.Snapshot.Taken = base.Snapshot.Taken.Add(time.Duration(i+1) * time.Second)
		for j := range v.Legs {
			was := v.Legs[j].ID
			v.Legs[j].ID = block.LegID{UUID: block.UUID{8, byte(i >> 8), byte(i), byte(j)}}
			l := x.legs[was]
			l.Leg, l.Volume.ID = v.Legs[j].ID, v.ID
			x.legs[l.Leg], x.ready[l.Leg], w.legs[l.Leg], w.frozen[l.Leg] = l, true, w.legs[was], true
		}
		w.s.volumes.Set(w.s.by, v.ID, v)
		w.s.index(nil, v)
	}
	w.targetActs(x)
}

// A look at snapshots that cannot be copied now takes twice as long for twice as many of a volume, not four
// times: there may be thousands, and the manager looks every few seconds.
func TestALookAtManySnapshotsThatLackCopiesIsShort(t *testing.T) {
	cost := func(n int) float64 {
		w := newSnapWorld(t, 1)
		w.s.level = copiesLevel - 1
		w.missed("db1", "mon")
		w.more(n)
		w.s.level = block.KnownLevel
		for name := range w.targets { // so that there is no place
			w.s.targets[name].report.Copies = false
		}
		return testing.AllocsPerRun(3, func() {
			tx := newTx(w.s, w.now)
			tx.s.lookedAtCopies, tx.s.uncopied = time.Time{}, map[columnOf]uncopied{}
			tx.noteCopies()
			if len(tx.s.uncopied) != n+1 {
				t.Errorf("of %d snapshots, %d were looked at", n+1, len(tx.s.uncopied))
			}
		})
	}
	if few, many := cost(60), cost(240); many > 6*few {
		t.Errorf("60 snapshots take %.0f allocations, 240 take %.0f", few, many)
	}
}

// While a snapshot of a volume is being taken, its other ones are not copied, and say so.
func TestACopyWaitsForASnapshotThatIsBeingTaken(t *testing.T) {
	w := newSnapWorld(t, 1)
	w.s.level = copiesLevel - 1
	w.missed("db1", "mon")
	w.s.level = block.KnownLevel
	if err := w.take("x", "db1"); err != nil {
		t.Fatal(err)
	}
	w.now = w.now.Add(copiesLook)
	for _, x := range w.targets {
		w.targetActs(x)
	}
	w.must(Tick{}) // no host acts
	e, err := w.s.Explain("db1@mon")
	if why := strings.Join(e.Waits, "\n"); err != nil || !strings.Contains(why, "snapshot db1@x to be taken") || w.volume("db1@mon").copying() != nil {
		t.Errorf("it waits for %q, %v, and has legs %+v", why, err, w.volume("db1@mon").Legs)
	}
	w.settle()
	w.look(6)
	w.bothCopies("db1@mon", block.DriveID{})
}

// A copy to a drive that was pulled does not keep its node from making others.
func TestACopyToADriveThatIsGoneLeavesItsNodeFree(t *testing.T) {
	w := newSnapWorld(t, 1)
	w.s.level = copiesLevel - 1
	w.missed("db1", "mon")
	w.s.level = block.KnownLevel
	w.now = w.now.Add(copiesLook)
	w.must(Tick{})
	to := w.volume("db1@mon").copying()
	if to == nil {
		t.Fatal("no copy was begun")
	}
	busy := func() bool { return newTx(w.s, w.now).copying()[string(to.Node)] }
	if !busy() {
		t.Error("a node that makes a copy is taken for idle")
	}
	report := w.targetReport(w.targets[to.Node])
	report.Drives = nil
	w.must(TargetReported{Session: 1, Report: report})
	if busy() {
		t.Error("a drive that is gone keeps its node busy")
	}
	if !newTx(w.s, w.now).copying()[to.Drive.String()] {
		t.Error("another copy may begin on the drive that is gone")
	}
}

// A leg that was given up while it was copied is not copied any more, and is nothing else either.
func TestALegThatIsGivenUpIsNotCopied(t *testing.T) {
	w, from, to := newCopyWorld(t)
	tx := newTx(w.s, w.now)
	tx.retire(tx.volume(w.volume("db1@mon").ID), to.ID, "it is not needed")
	tx.commit()
	v := w.volume("db1@mon")
	if o := w.s.originOf(v, v.leg(to.ID)); !o.Wait || o.Copy == nil || len(o.Copy.Portals) > 0 || len(w.s.copyExports(v, from.Node)) > 0 {
		t.Errorf("it is made of %+v, and %s exports %+v", o, from.Node, w.s.copyExports(v, from.Node))
	}
}

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
)

// restored starts from a backup that was made before more commands ran. report makes targets
// report the labels, and hosts the notes, from after those commands.
func restored(t *testing.T, more ...string) (state *State, report func(nodes ...string)) {
	t.Helper()
	s, reports := labelled(t)
	backup := s.state.Records()
	for _, line := range more {
		s.run(line)
	}
	records, err := Restored(t0, backup)
	if err != nil {
		t.Fatal(err)
	}
	if state, err = Load(records); err != nil {
		t.Fatal(err)
	}
	return state, func(nodes ...string) {
		for _, name := range nodes {
			var in Input
			if s.hosts[name] != nil {
				in = InitiatorReported{Session: 1, Report: s.hostReport(name)}
			} else {
				r := reports(name)[0]
				r.Generation = state.Generation() // it follows no other manager
				in = TargetReported{Session: 1, Report: r}
			}
			if _, err := state.Step(t0, in); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func restoredVolume(t *testing.T, s *State) Volume {
	t.Helper()
	v, err := s.Volume("db1")
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// legNodes are the targets of db1's legs.
func legNodes(v Volume) (nodes []string) {
	for _, l := range v.Legs {
		nodes = append(nodes, string(l.Node))
	}
	return nodes
}

func TestRestoredVolumeIsDetachedAndFarAheadOfWhatWasGranted(t *testing.T) {
	s, reports := labelled(t)
	before := restoredVolume(t, s.state)
	records, err := Restored(t0, s.state.Records())
	if err != nil {
		t.Fatal(err)
	}
	state, err := Load(records)
	if err != nil {
		t.Fatal(err)
	}
	v := restoredVolume(t, state)
	if v.Attachment != nil || v.Clean || v.Epoch < before.Epoch+epochJump || v.Holder != "c1" {
		t.Errorf("restored volume: attachment %v, clean %v, epoch %d, holder %q; want detached, not clean, from epoch %d, held by c1",
			v.Attachment, v.Clean, v.Epoch, v.Holder, before.Epoch+epochJump)
	}
	if g := reports("t1")[0].Generation; state.Generation() <= g {
		t.Errorf("Generation() = %d, want above what agents have reached, %d", state.Generation(), g)
	}
}

func TestRestoredVolumeWaitsForTheLabelsOfAllItsLegs(t *testing.T) {
	state, report := restored(t)
	nodes := legNodes(restoredVolume(t, state))
	report(nodes[0])
	if _, err := state.Step(t0, Attach{Volume: "db1", Node: "c1"}); !isReason(err, ReasonNotReady) {
		t.Errorf("Attach with one label seen = %v, want %s", err, ReasonNotReady)
	}
	if w := state.WantedTarget(restoredVolume(t, state).Legs[0].Node); len(w.Legs)+len(w.Exports) > 0 {
		t.Errorf("WantedTarget before the labels were seen = %+v, want nothing that writes a label", w)
	}
	report(nodes[1], "c1")
	for _, l := range restoredVolume(t, state).Legs {
		if l.State != LegInSync {
			t.Errorf("%v is %s after all labels agreed, want %s", &l, l.State, LegInSync)
		}
	}
	if _, err := state.Step(t0, Attach{Volume: "db1", Node: "c1"}); err != nil {
		t.Errorf("Attach with all labels seen = %v", err)
	}
}

func isReason(err error, reason string) bool {
	e, ok := errors.AsType[*Error](err)
	return ok && e.Reason == reason
}

// The backup lacks a record of the loss, and so may every label.
func TestLegThatWentStaleAfterTheBackupIsNotBelieved(t *testing.T) {
	for name, c := range map[string]struct {
		after []string
		want  []LegState
	}{
		"labels know":        {[]string{"stale c1 db1 0.1", "comply"}, []LegState{LegInSync, LegStale}},
		"no label knows":     {[]string{"stale c1 db1 0.1"}, []LegState{LegInSync, LegStale}},
		"the first was lost": {[]string{"stale c1 db1 0.0"}, []LegState{LegStale, LegInSync}},
	} {
		t.Run(name, func(t *testing.T) {
			state, report := restored(t, c.after...)
			report(append(legNodes(restoredVolume(t, state)), "c1")...)
			if got := legStates(t, state); !slices.Equal(got, c.want) {
				t.Errorf("legs are %v, want %v", got, c.want)
			}
		})
	}
}

func TestRestoredVolumeWaitsForItsLastHost(t *testing.T) {
	for name, c := range map[string]struct {
		after []string
		host  block.NodeName
	}{
		"the backup knows it":         {[]string{"stale c1 db1 0.0"}, "c1"},
		"the backup does not":         {[]string{"host c2", "detach db1 force", "comply", "attach db1 c2", "comply", "comply", "serve c2 db1", "stale c2 db1 0.0"}, "c2"},
		"the backup is of an old one": {[]string{"detach db1 force", "comply", "attach db1 c1", "comply", "comply", "serve c1 db1", "stale c1 db1 0.0"}, "c1"},
	} {
		t.Run(name, func(t *testing.T) {
			state, report := restored(t, c.after...)
			report(legNodes(restoredVolume(t, state))...)
			e, err := state.Explain("db1")
			if err != nil || !slices.ContainsFunc(e.Waits, func(w string) bool { return strings.Contains(w, "host "+string(c.host)) }) ||
				!slices.Contains(e.Actions, "if machine "+string(c.host)+" is gone for good: weft node confirm-dead "+string(c.host)) {
				t.Errorf("Explain(db1) = %+v, %v; want it to wait for %s", e, err, c.host)
			}
			for _, in := range []Input{ConfirmNodeDead{Node: c.host}, Tick{}} {
				if _, err := state.Step(t0, in); err != nil {
					t.Fatal(err)
				}
			}
			v := restoredVolume(t, state)
			if got := legStates(t, state); v.Restored || slices.Contains(got, LegInSync) {
				t.Errorf("with %s dead, legs are %v, restored %v; want none believed, and an operator's choice", c.host, got, v.Restored)
			}
			e, _ = state.Explain("db1")
			for _, leg := range []string{"0.0", "0.1"} {
				if !slices.ContainsFunc(e.Actions, func(a string) bool {
					return strings.Contains(a, "weft volume promote-stale db1 "+leg+" --accept-data-loss")
				}) {
					t.Errorf("Explain(db1).Actions = %q, want one that chooses %s", e.Actions, leg)
				}
				if !slices.ContainsFunc(e.Facts, func(f string) bool {
					return strings.Contains(f, "leg "+leg) && strings.Contains(f, "its label (generation")
				}) {
					t.Errorf("Explain(db1).Facts = %q, want what speaks for %s", e.Facts, leg)
				}
			}
			if _, err := state.Step(t0, PromoteStaleLeg{Volume: "db1", Leg: v.Legs[1].ID, AcceptDataLoss: true}); err != nil {
				t.Errorf("PromoteStaleLeg = %v", err)
			}
		})
	}
}

func TestColumnWithoutAllItsLabelsIsNotBelieved(t *testing.T) {
	state, report := restored(t)
	v := restoredVolume(t, state)
	report(legNodes(v)[0], "c1")
	for _, in := range []Input{ConfirmNodeDead{Node: v.Legs[1].Node}, Tick{}} {
		if _, err := state.Step(t0, in); err != nil {
			t.Fatal(err)
		}
	}
	for _, l := range restoredVolume(t, state).Legs {
		if l.State != LegStale {
			t.Errorf("%v is %s, want %s: the dead node's label may have been newer", &l, l.State, LegStale)
		}
	}
	if _, err := state.Step(t0, PromoteStaleLeg{Volume: "db1", Leg: v.Legs[0].ID, AcceptDataLoss: true}); err != nil {
		t.Errorf("PromoteStaleLeg = %v", err)
	}
}

// The second restore begins with the same numbers as the first, which the cluster has used
// since.
func TestABackupIsRestoredTwice(t *testing.T) {
	s, _ := labelled(t)
	backup := s.state.Records()
	restore := func() {
		records, err := Restored(s.now, backup)
		if err != nil {
			t.Fatal(err)
		}
		s.store = map[string][]byte{}
		keep(s.store, records)
		s.state = loadStore(t, s.store)
		s.session++
		s.hosts["c1"].phase = map[string]Phase{} // it has released what is not wanted
		for _, line := range []string{"report t1", "report t2", "report t3"} {
			s.run(line)
		}
		s.reportHost("c1")
		if v := restoredVolume(t, s.state); !strings.Contains(s.run("explain db1"), "the labels of leg 0.0") {
			t.Errorf("volume at epoch %d was judged by what targets say that may still be at another manager's orders", v.Epoch)
		}
		s.run("comply")
	}
	restore()
	for range 3 {
		for _, line := range []string{"attach db1 c1", "comply", "comply", "serve c1 db1", "stale c1 db1 0.1", "comply", "serve c1 db1", "comply", "in-sync c1 db1 0.1", "release c1 db1", "detach db1 force", "comply"} {
			s.run(line)
		}
	}
	before := restoredVolume(t, s.state)
	reached := s.state.Generation()
	restore()
	v := restoredVolume(t, s.state)
	if v.Epoch <= before.Epoch || v.Generation <= before.Generation || s.state.Generation() <= reached {
		t.Errorf("restored again: epoch %d, generation %d, of the store %d; want above %d, %d, %d",
			v.Epoch, v.Generation, s.state.Generation(), before.Epoch, before.Generation, reached)
	}
	for i, l := range v.Legs {
		if l.Revision <= before.Legs[i].Revision {
			t.Errorf("%v restored again at revision %d, it had %d", &l, l.Revision, before.Legs[i].Revision)
		}
	}
	for _, line := range []string{"attach db1 c1", "comply", "comply"} {
		s.run(line)
	}
	served := 0
	for _, x := range s.targets {
		for _, e := range x.exports {
			served += len(e.legs)
		}
	}
	if want := s.state.volumes.Get(v.ID).inSync()[0].Len(); served != want || want == 0 {
		t.Errorf("after the second restore %d of %d legs in sync are served:\n%s%s", served, want, s.run("volume db1"), s.run("explain db1"))
	}
}

// The generations of another store that an agent has acted on do not count for this one.
func TestAnAgentsWordOnAnotherStoresGenerationDoesNotCount(t *testing.T) {
	state, report := restored(t)
	s, _ := labelled(t)
	r := s.reports("t1")[0]
	r.Generation = state.Generation() + 1000
	if _, err := state.Step(t0, TargetReported{Session: 1, Report: r}); err != nil {
		t.Fatal(err)
	}
	n, err := state.Node("t1")
	if err != nil || n.Target.Generation != 0 || state.Generation() <= r.Generation {
		t.Errorf("after a report of generation %d the store is at %d, and t1 counts as having reached %d (%v); want it above, and 0",
			r.Generation, state.Generation(), n.Target.Generation, err)
	}
	report("t2")
}

// A volume that was made after the backup is on the drives, and its space stays taken.
func TestStatusTellsOfVolumesThatARestoredStoreDoesNotKnow(t *testing.T) {
	state, report := restored(t, "create db2 size=1GiB stripes=1 copies=2", "comply", "comply")
	report("t1", "t2", "t3", "c1")
	told := func() (lines []string) {
		for _, w := range state.Status().Wrong {
			if strings.Contains(w, "not in this store") {
				lines = append(lines, w)
			}
		}
		return lines
	}
	if got := told(); len(got) != 1 || !strings.Contains(got[0], "volume db2") || !strings.Contains(got[0], "rebuild-from-drives") {
		t.Errorf("Status().Wrong says %q, want one line on db2 and how to take it back", got)
	}
	s, _ := labelled(t)
	if state = s.state; len(told()) > 0 {
		t.Errorf("Status().Wrong says %q of a store that knows all", told())
	}
}

// restore starts a new manager on a restored backup.
func (s *script) restore(backup []Record) {
	s.t.Helper()
	records, err := Restored(s.now, backup)
	if err != nil {
		s.t.Fatal(err)
	}
	s.store = map[string][]byte{}
	keep(s.store, records)
	s.state = loadStore(s.t, s.store)
	s.session++
	for _, h := range s.hosts {
		h.phase = map[string]Phase{} // it has released what is not wanted
	}
}

// Targets may still carry out orders of a store that was restored earlier. Those do not
// count as orders of this store, even if the numbers are the same.
func TestOrdersOfAStoreThatWasRestoredBeforeDoNotCount(t *testing.T) {
	for name, second := range map[string]func(s *script, first []Record){
		"the same backup, and the second store has done more": func(s *script, first []Record) {
			s.now = s.now.Add(time.Minute)
			s.restore(first)
			for i := range 40 {
				s.run(fmt.Sprintf("label t3 n=%d", i))
			}
		},
		"a backup of the first one, before it was settled": func(s *script, _ []Record) {
			unsettled := s.state.Records()
			s.reportHost("c1")
			s.run("comply")
			s.restore(unsettled)
		},
	} {
		t.Run(name, func(t *testing.T) {
			s, _ := labelled(t)
			backup := s.state.Records()
			s.restore(backup)
			s.run("comply")
			second(s, backup)
			s.reportHost("c1")
			for _, node := range []string{"t1", "t2", "t3"} {
				s.run("report " + node)
			}
			if v := restoredVolume(t, s.state); !v.Restored {
				t.Errorf("volume was judged, at epoch %d, before a target had acted on an order of this store", v.Epoch)
			}
			s.run("comply")
			if v := restoredVolume(t, s.state); v.Restored {
				t.Errorf("volume was not judged though all have acted on the orders of this store: %s", s.run("explain db1"))
			}
		})
	}
}

// A copy that was suspect in the backup has been rebuilt since, as its label says. Now its
// peer has lost its cache: the two must not count as equally bad.
func TestASuspicionOfTheBackupEndsWhereLabelsKnowMore(t *testing.T) {
	s := suspected(t)
	backup := s.state.Records()
	for _, line := range []string{"comply", "comply", "in-sync c1 db1 0.0", "comply", "serve c1 db1"} {
		s.run(line)
	}
	if v := restoredVolume(t, s.state); !v.Legs[0].trusted() || !v.Legs[1].trusted() {
		t.Fatalf("before the restore the legs are not good:\n%s", s.run("volume db1"))
	}
	s.targets["t2"].reboot()
	s.restore(backup)
	s.reportHost("c1")
	s.run("comply")
	s.run("comply")
	for _, l := range restoredVolume(t, s.state).Legs {
		if l.Node == "t1" && !l.trusted() || l.Node == "t2" && l.State != LegStale {
			t.Errorf("%v is %s, suspect %v; want the copy that was made anew, and the other one given up", &l, l.State, l.Suspect)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"testing"
)

// restored starts from a backup that was made before more commands ran; report
// makes targets tell it what their drives say after them.
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
		for _, r := range reports(nodes...) {
			if _, err := state.Step(t0, TargetReported{Session: 1, Report: r}); err != nil {
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
	report(nodes[1])
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

func TestLegThatWentStaleAfterTheBackupIsNotBelieved(t *testing.T) {
	state, report := restored(t, "stale c1 db1 0.1", "comply")
	report(legNodes(restoredVolume(t, state))...)
	v := restoredVolume(t, state)
	if v.Legs[0].State != LegInSync || v.Legs[1].State != LegStale {
		t.Errorf("legs are %s and %s, want %s and %s", v.Legs[0].State, v.Legs[1].State, LegInSync, LegStale)
	}
}

func TestColumnWithoutAllItsLabelsIsNotBelieved(t *testing.T) {
	state, report := restored(t)
	v := restoredVolume(t, state)
	report(legNodes(v)[0])
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

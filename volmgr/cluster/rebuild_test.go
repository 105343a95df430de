// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"weft.dev/weft/proto/block"
)

// labelled is a cluster whose volume db1 is attached, and what its targets report.
func labelled(t *testing.T, commands ...string) (*script, func(nodes ...string) []TargetReport) {
	s := newScript(t)
	for _, line := range append([]string{
		"target t1 drives=4GiB", "target t2 drives=4GiB", "target t3 drives=4GiB",
		"create db1 size=1GiB stripes=1 copies=2", "comply", "host c1", "attach db1 c1", "comply", "serve c1 db1", "comply",
	}, commands...) {
		s.run(line)
	}
	return s, func(nodes ...string) []TargetReport {
		var reports []TargetReport
		for _, name := range nodes {
			r := s.targets[name].report()
			r.ClusterID = testCluster()
			for i := range r.Drives {
				r.Drives[i].Cluster = testCluster()
			}
			reports = append(reports, r)
		}
		return reports
	}
}

func rebuilt(t *testing.T, reports []TargetReport) (*State, string) {
	t.Helper()
	s, text, err := Rebuild(t0, reports)
	if err != nil {
		t.Fatalf("Rebuild = %v", err)
	}
	again, err := Load(s.Records())
	if err != nil {
		t.Fatalf("Load(Rebuild) = %v", err)
	}
	if diff := cmp.Diff(s.Records(), again.Records()); diff != "" {
		t.Fatalf("Load(Rebuild).Records() (-want +got):\n%s", diff)
	}
	return again, text
}

func TestRebuildFindsEverythingThatTheLabelsSay(t *testing.T) {
	s, reports := labelled(t)
	want := *s.state.volumes[s.state.byName["db1"]]
	state, text := rebuilt(t, reports("t1", "t2", "t3"))
	got, err := state.Volume("db1")
	if err != nil {
		t.Fatalf("Volume(db1) = %v; report:\n%s", err, text)
	}
	if got.ID != want.ID || got.Size != want.Size || got.Layout != want.Layout || got.Created != want.Created || len(got.Legs) != 2 {
		t.Errorf("rebuilt volume = %+v, want %+v", got, want)
	}
	if got.Attachment != nil || got.Clean || got.Epoch <= want.Epoch {
		t.Errorf("rebuilt volume: attachment %v, clean %v, epoch %d; want detached, not clean, above %d", got.Attachment, got.Clean, got.Epoch, want.Epoch)
	}
	for i, l := range got.Legs {
		if w := want.Legs[i]; l.ID != w.ID || l.State != LegInSync || !slices.Equal(l.Extents, w.Extents) || l.Drive != w.Drive || l.Revision <= w.Revision {
			t.Errorf("rebuilt leg %d = %+v, want %+v in sync at a newer revision", i, l, w)
		}
	}
	if state.Generation() <= reports("t1")[0].Generation {
		t.Errorf("Generation() = %d, want above what the agents have reached, %d", state.Generation(), reports("t1")[0].Generation)
	}
}

func TestRebuildTakesTheNewestLabelForTheTruth(t *testing.T) {
	_, reports := labelled(t, "lost t2", "lost t3", "stale c1 db1 0.1", "comply t1")
	// Whichever node has leg 0.1 did not hear of it: its label still calls both in sync.
	state, text := rebuilt(t, reports("t1", "t2", "t3"))
	v, err := state.Volume("db1")
	if err != nil {
		t.Fatal(err)
	}
	if v.Legs[0].State != LegInSync || v.Legs[1].State != LegStale {
		t.Errorf("rebuilt legs = %s, %s; want IN_SYNC, STALE; report:\n%s", v.Legs[0].State, v.Legs[1].State, text)
	}
}

func TestRebuildBelievesNoIncompleteColumn(t *testing.T) {
	s, reports := labelled(t)
	v, _ := s.state.Volume("db1")
	missing := string(v.Legs[0].Node)
	there := slices.DeleteFunc([]string{"t1", "t2", "t3"}, func(n string) bool { return n == missing })
	state, text := rebuilt(t, reports(there...))
	got, err := state.Volume("db1")
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Legs) != 1 || got.Legs[0].State != LegStale || !strings.Contains(text, "none can be believed") {
		t.Errorf("rebuilt legs = %+v; want the found one stale; report:\n%s", got.Legs, text)
	}
	_, err = state.Step(t0, PromoteStaleLeg{Volume: "db1", Leg: got.Legs[0].ID, AcceptDataLoss: true})
	if err != nil {
		t.Errorf("Step(PromoteStaleLeg) = %v, want the way out", err)
	}
}

func TestRebuildLeavesOutWhatContradictsItself(t *testing.T) {
	_, reports := labelled(t)
	all := reports("t1", "t2", "t3")
	i := slices.IndexFunc(all, func(r TargetReport) bool { return len(r.Drives[0].Legs) > 0 })
	intruder := all[i].Drives[0].Legs[0] // another volume over the same extents, with a later id
	intruder.Leg = block.LegID{UUID: block.UUID{0xff}}
	intruder.Volume.ID = block.VolumeID{UUID: block.UUID{0xff}}
	all[i].Drives[0].Legs = append(all[i].Drives[0].Legs, intruder)
	state, text := rebuilt(t, all)
	if n := len(state.Volumes()); n != 1 || !strings.Contains(text, "left out") {
		t.Errorf("Rebuild found %d volumes, want 1 and the other left out; report:\n%s", n, text)
	}
	all[0].Drives[0].Cluster = block.ClusterID{UUID: block.UUID{1}}
	if _, _, err := Rebuild(t0, all); err == nil {
		t.Error("Rebuild of two clusters' drives succeeded")
	}
}

func TestARebuiltClusterServesAgain(t *testing.T) {
	s, reports := labelled(t)
	state, _ := rebuilt(t, reports("t1", "t2", "t3"))
	s.state, s.session = state, 2
	s.store = map[string][]byte{}
	keep(s.store, state.Records())
	for _, line := range []string{"comply", "host c1", "attach db1 c1", "comply", "comply", "serve c1 db1"} {
		s.run(line)
	}
	v, _ := s.state.Volume("db1")
	if v.Attachment == nil || v.Attachment.State != Attached || v.Health != Healthy || !v.Attachment.Equalize {
		t.Errorf("after Rebuild and Attach: %s", s.run("volume db1"))
	}
}

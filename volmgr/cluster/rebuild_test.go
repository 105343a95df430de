// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/evidence"
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
	return s, s.reports
}

// reports returns the reports of targets that have no manager.
func (s *script) reports(nodes ...string) (all []TargetReport) {
	for _, name := range nodes {
		r := s.targets[name].report()
		r.ClusterID = testCluster()
		for i := range r.Drives {
			r.Drives[i].Cluster = testCluster()
		}
		all = append(all, r)
	}
	return all
}

func rebuilt(t *testing.T, reports []TargetReport, hosts ...InitiatorReport) (*State, string) {
	t.Helper()
	s, text, err := Rebuild(t0, reports, hosts)
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
	want := *s.state.volumes.Get(s.state.idOf("db1"))
	state, text := rebuilt(t, reports("t1", "t2", "t3"), s.hostReport("c1"))
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

// While labels are read, a target may still write one for the old manager. The rebuilt store
// must be ahead of that label, since a drive refuses an older definition.
func TestARebuiltVolumeIsAheadOfLabelsThatAreBeingWritten(t *testing.T) {
	s, reports := labelled(t)
	state, _ := rebuilt(t, reports("t1", "t2", "t3"), s.hostReport("c1"))
	got, err := state.Volume("db1")
	if err != nil {
		t.Fatal(err)
	}
	const underWay = 1000 // more than an old manager can have asked for meanwhile
	if newest := s.state.volumes.Get(got.ID).Generation; got.Generation < newest+underWay {
		t.Errorf("generation %d, labels have %d: want it %d ahead at least", got.Generation, newest, underWay)
	}
}

// legStates are the states of db1's legs, in order.
func legStates(t *testing.T, s *State) (states []LegState) {
	t.Helper()
	for _, l := range restoredVolume(t, s).Legs {
		states = append(states, l.State)
	}
	return states
}

// A record reaches a label late, or not at all if the target's agent is cut off. Only the
// host that had the volume knows which legs are in sync.
func TestAVolumeInUseIsRebuiltOnItsHostsWordAlone(t *testing.T) {
	for name, c := range map[string]struct {
		after []string
		want  []LegState
	}{
		"nothing went wrong":            {nil, []LegState{LegInSync, LegInSync}},
		"no label knows of the loss":    {[]string{"stale c1 db1 0.1"}, []LegState{LegInSync, LegStale}},
		"nor of that of the first":      {[]string{"stale c1 db1 0.0"}, []LegState{LegStale, LegInSync}},
		"one label knows":               {[]string{"stale c1 db1 0.1", "comply t1"}, []LegState{LegInSync, LegStale}},
		"both know":                     {[]string{"stale c1 db1 0.1", "comply"}, []LegState{LegInSync, LegStale}},
		"rebuilt, no label knows":       {[]string{"stale c1 db1 0.1", "comply", "serve c1 db1", "comply", "in-sync c1 db1 0.1"}, []LegState{LegInSync, LegInSync}},
		"the other one lost after that": {[]string{"stale c1 db1 0.1", "comply", "serve c1 db1", "comply", "in-sync c1 db1 0.1", "stale c1 db1 0.0"}, []LegState{LegStale, LegInSync}},
	} {
		t.Run(name, func(t *testing.T) {
			s, reports := labelled(t, c.after...)
			state, text := rebuilt(t, reports("t1", "t2", "t3"), s.hostReport("c1"))
			if got := legStates(t, state); !slices.Equal(got, c.want) {
				t.Errorf("rebuilt legs = %v, want %v; report:\n%s", got, c.want, text)
			}
			if !strings.Contains(text, "in use on c1 as /dev/weft/db1: unmount it") {
				t.Errorf("the report does not say what the manager's start will take away:\n%s", text)
			}
			if v := restoredVolume(t, state); v.Holder != "c1" {
				t.Errorf("rebuilt volume has holder %q, want c1, which was not seen to let go", v.Holder)
			}

			if got := AwaitedHosts(reports("t1", "t2", "t3"), nil); !slices.Equal(got, []block.NodeName{"c1"}) {
				t.Errorf("AwaitedHosts() = %v, want c1", got)
			}
			state, text = rebuilt(t, reports("t1", "t2", "t3"))
			if got := legStates(t, state); !slices.Equal(got, []LegState{LegStale, LegStale}) {
				t.Errorf("rebuilt legs without the host = %v, want none believed; report:\n%s", got, text)
			}
			for _, line := range []string{
				"host c1 has not reported", "start its agent and rebuild again",
				"weft volume promote-stale db1 0.0 --accept-data-loss", "weft volume promote-stale db1 0.1 --accept-data-loss",
			} {
				if !strings.Contains(text, line) {
					t.Errorf("the report does not say %q:\n%s", line, text)
				}
			}
			chosen := restoredVolume(t, state).Legs[1].ID
			if _, err := state.Step(t0, PromoteStaleLeg{Volume: "db1", Leg: chosen, AcceptDataLoss: true}); err != nil {
				t.Errorf("Step(PromoteStaleLeg) = %v, want the way out", err)
			}
		})
	}
}

// If no host could write a volume since its newest label, that label decides, and no host is
// waited for.
func TestAVolumeThatNobodyWritesIsRebuiltOnItsLabels(t *testing.T) {
	for name, after := range map[string][]string{
		"detached":            {"stale c1 db1 0.1", "release c1 db1", "detach db1", "comply"},
		"detached by force":   {"stale c1 db1 0.1", "detach db1 force", "comply"},
		"left":                {"stale c1 db1 0.1", "release c1 db1", "comply"},
		"grant taken back":    {"stale c1 db1 0.1", "release c1 db1", "detach db1", "comply", "lost t1", "attach db1 c1", "detach db1", "comply"},
		"let go, not clean":   {"stale c1 db1 0.1", "detach db1", "release c1 db1 unclean", "comply"},
		"one label is behind": {"stale c1 db1 0.1", "detach db1 force", "comply t1"},
	} {
		t.Run(name, func(t *testing.T) {
			_, reports := labelled(t, after...)
			all := reports("t1", "t2", "t3")
			state, text := rebuilt(t, all)
			if got := legStates(t, state); !slices.Equal(got, []LegState{LegInSync, LegStale}) {
				t.Errorf("rebuilt legs = %v, want %v; report:\n%s", got, []LegState{LegInSync, LegStale}, text)
			}
			if got := AwaitedHosts(all, nil); len(got) > 0 {
				t.Errorf("AwaitedHosts() = %v, want none", got)
			}
		})
	}
}

// If the agents are cut off after a grant began, the drives only have the label that was
// written during it.
func TestALabelOfTheTimeOfAGrantIsNotBelieved(t *testing.T) {
	for name, before := range map[string][]string{
		"after a clean detach":  {"release c1 db1", "detach db1", "comply"},
		"after the host's boot": {"release c1 db1", "comply", "reboot c1", "comply"},
	} {
		t.Run(name, func(t *testing.T) {
			s, reports := labelled(t, append(before, "attach db1 c1", "comply", "serve c1 db1", "stale c1 db1 0.0")...)
			all := reports("t1", "t2", "t3")
			state, text := rebuilt(t, all, s.hostReport("c1"))
			if got := legStates(t, state); !slices.Equal(got, []LegState{LegStale, LegInSync}) {
				t.Errorf("rebuilt legs = %v, want the one that the host went on with; report:\n%s", got, text)
			}
			state, text = rebuilt(t, all)
			if got := legStates(t, state); slices.Contains(got, LegInSync) {
				t.Errorf("rebuilt legs without the host = %v, want none believed; report:\n%s", got, text)
			}
		})
	}
}

func TestAHostsWordIsBelievedOnlyIfItIsTheLast(t *testing.T) {
	// c2 has had the volume since then, and lost the copy that c1's note calls good.
	s, reports := labelled(t, "host c2", "detach db1 force", "comply", "attach db1 c2", "comply", "comply", "serve c2 db1", "stale c2 db1 0.0")
	all := reports("t1", "t2", "t3")
	state, text := rebuilt(t, all, s.hostReport("c1"))
	if got := legStates(t, state); slices.Contains(got, LegInSync) || !strings.Contains(text, "host c2 has not reported") {
		t.Errorf("rebuilt legs on the word of an earlier host = %v, want none; report:\n%s", got, text)
	}
	state, text = rebuilt(t, all, s.hostReport("c1"), s.hostReport("c2"))
	if got := legStates(t, state); !slices.Equal(got, []LegState{LegStale, LegInSync}) {
		t.Errorf("rebuilt legs on the word of both = %v, want c2's; report:\n%s", got, text)
	}
	second := s.hostReport("c2")
	second.Node = "c3"
	state, text = rebuilt(t, all, s.hostReport("c2"), second)
	if got := legStates(t, state); slices.Contains(got, LegInSync) || !strings.Contains(text, "both claim") {
		t.Errorf("rebuilt legs on the word of two hosts for one epoch = %v, want none; report:\n%s", got, text)
	}
}

// A leg that the manager evicted after the host's note has a higher revision than the note.
func TestAHostsWordOnAnEarlierRevisionDoesNotCount(t *testing.T) {
	s, reports := labelled(t)
	old := s.hostReport("c1")
	s.run("stale c1 db1 0.1")
	s.run("comply")
	state, text := rebuilt(t, reports("t1", "t2", "t3"), old)
	if got := legStates(t, state); !slices.Equal(got, []LegState{LegInSync, LegStale}) {
		t.Errorf("rebuilt legs = %v, want %v; report:\n%s", got, []LegState{LegInSync, LegStale}, text)
	}
}

// All copies have lost their caches and one was kept, while the host was down. Its note
// matches neither copy, so an operator has to choose, and is told the evidence for each.
func TestAHostsWordThatUpholdsNoCopyProvesNothing(t *testing.T) {
	s := newScript(t)
	for _, line := range []string{
		"target t1 drives=4GiB volatile", "target t2 drives=4GiB volatile", "create db1 size=1GiB stripes=1 copies=2", "comply",
		"host c1", "attach db1 c1", "comply", "serve c1 db1", "comply",
	} {
		s.run(line)
	}
	old := s.hostReport("c1")
	for _, line := range []string{"lost t1", "lost t2", "reboot t1", "reboot t2", "comply", "comply"} {
		s.run(line)
	}
	state, text := rebuilt(t, s.reports("t1", "t2"), old)
	if got := legStates(t, state); slices.Contains(got, LegInSync) {
		t.Errorf("rebuilt legs = %v, want none believed; report:\n%s", got, text)
	}
	for _, l := range restoredVolume(t, state).Legs {
		if !strings.HasPrefix(l.Reason, "the note of host c1 from epoch 1 matches no copy in its present state") || !strings.Contains(l.Reason, "its label (generation") {
			t.Errorf("%v is not believed because %q, want what speaks for it", &l, l.Reason)
		}
	}
	if !strings.Contains(text, "weft volume promote-stale db1 0.0 --accept-data-loss") {
		t.Errorf("the report does not say how to choose:\n%s", text)
	}
}

// A target that has booted may have lost cached writes, so another copy is better.
func TestACopyWhoseTargetHasBootedSinceIsSuspect(t *testing.T) {
	for drives, want := range map[string]LegState{"volatile": LegStale, "": LegInSync} {
		s := newScript(t)
		for _, line := range []string{
			"target t1 drives=4GiB " + drives, "target t2 drives=4GiB " + drives, "create db1 size=1GiB stripes=1 copies=2", "comply",
			"host c1", "attach db1 c1", "comply", "serve c1 db1", "comply",
		} {
			s.run(line)
		}
		s.targets["t1"].reboot() // while no manager runs
		state, text := rebuilt(t, s.reports("t1", "t2"), s.hostReport("c1"))
		s.state, s.store = state, map[string][]byte{}
		keep(s.store, state.Records())
		s.run("report t1")
		s.run("report t2")
		v := restoredVolume(t, s.state)
		for _, l := range v.Legs {
			if l.Node == "t1" && l.State != want || l.Node == "t2" && l.State != LegInSync {
				t.Errorf("%v is %s with drives %q, want %s on t1; report:\n%s", &l, l.State, drives, want, text)
			}
		}
	}
}

// suspected has a volume in use with a suspect copy on t1, which has booted while t2, with
// the other copy, was away.
func suspected(t *testing.T) *script {
	s := newScript(t)
	for _, line := range []string{
		"target t1 drives=4GiB volatile", "target t2 drives=4GiB volatile", "create db1 size=1GiB stripes=1 copies=2", "comply",
		"host c1", "attach db1 c1", "comply", "serve c1 db1", "comply", "lost t2", "reboot t1", "comply t1",
	} {
		s.run(line)
	}
	return s
}

// A copy that was suspect when the store was lost stays suspect, though its host's note
// still has it in sync.
func TestACopyThatWasSuspectStaysSo(t *testing.T) {
	s := suspected(t)
	v := restoredVolume(t, s.state)
	if i := slices.IndexFunc(v.Legs, func(l Leg) bool { return l.Node == "t1" }); !v.Legs[i].Suspect {
		t.Fatalf("before the store was lost %+v is not suspect", v.Legs[i])
	}
	state, text := rebuilt(t, s.reports("t1", "t2"), s.hostReport("c1"))
	s.state, s.store = state, map[string][]byte{}
	keep(s.store, state.Records())
	s.run("report t1")
	s.run("report t2")
	for _, l := range restoredVolume(t, s.state).Legs {
		if l.Node == "t1" && l.State != LegStale || l.Node == "t2" && !l.trusted() {
			t.Errorf("%v is %s, suspect %v; want the copy that was suspect given up for the other one; report:\n%s", &l, l.State, l.Suspect, text)
		}
	}
}

func TestAColumnOfOneCopyNeedsNoHost(t *testing.T) {
	s := newScript(t)
	for _, line := range []string{
		"target t1 drives=4GiB", "create db1 size=1GiB stripes=1 copies=1", "comply",
		"host c1", "attach db1 c1", "comply", "serve c1 db1", "comply",
	} {
		s.run(line)
	}
	state, text := rebuilt(t, s.reports("t1"))
	if got := legStates(t, state); !slices.Equal(got, []LegState{LegInSync}) {
		t.Errorf("rebuilt legs = %v, want in sync; report:\n%s", got, text)
	}
}

func TestRebuildBelievesNoIncompleteColumn(t *testing.T) {
	s, reports := labelled(t)
	v, _ := s.state.Volume("db1")
	missing := string(v.Legs[0].Node)
	there := slices.DeleteFunc([]string{"t1", "t2", "t3"}, func(n string) bool { return n == missing })
	state, text := rebuilt(t, reports(there...), s.hostReport("c1"))
	got, err := state.Volume("db1")
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Legs) != 1 || got.Legs[0].State != LegStale || !strings.Contains(text, "the evidence proves none of them") {
		t.Errorf("rebuilt legs = %+v; want the found one stale; report:\n%s", got.Legs, text)
	}
	_, err = state.Step(t0, PromoteStaleLeg{Volume: "db1", Leg: got.Legs[0].ID, AcceptDataLoss: true})
	if err != nil {
		t.Errorf("Step(PromoteStaleLeg) = %v, want the way out", err)
	}
	e, err := state.Explain("db1")
	if text := strings.Join(append(e.Facts, e.Actions...), "\n"); err != nil || !strings.Contains(text, "column 0 has 1 of its 2 copies") || !strings.Contains(text, "rebuild-from-drives") {
		t.Errorf("Explain(db1) = %v, %v; want it to speak of the copy that was not found", e, err)
	}
}

func TestDrivesThatWereNotReadAreNamed(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*TargetReport)
		want   string
	}{
		"it does not answer": {func(r *TargetReport) { r.Drives[0].Error, r.Drives[0].Legs = "it does not answer", nil }, "it does not answer"},
		"not opened yet":     {func(r *TargetReport) { r.Drives = nil }, "carries its label but was not opened"},
		"not even its label": {func(r *TargetReport) { r.Devices[0].Unread, r.Drives = "it does not answer", nil }, "device /dev/nvme0n1 on t2: it does not answer"},
	} {
		t.Run(name, func(t *testing.T) {
			_, reports := labelled(t)
			all := reports("t1", "t2", "t3")
			if got := Unread(all); len(got) > 0 {
				t.Fatalf("Unread() = %v, want none", got)
			}
			c.change(&all[1])
			if got := Unread(all); len(got) != 1 || !strings.Contains(got[0], c.want) {
				t.Errorf("Unread() = %v, want one that %q", got, c.want)
			}
			if _, text := rebuilt(t, all); !strings.Contains(text, c.want) {
				t.Errorf("the report does not name the drive:\n%s", text)
			}
		})
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
	if _, _, err := Rebuild(t0, all, nil); err == nil {
		t.Error("Rebuild of two clusters' drives succeeded")
	}
}

func TestARebuiltClusterServesAgain(t *testing.T) {
	s, reports := labelled(t)
	state, _ := rebuilt(t, reports("t1", "t2", "t3"), s.hostReport("c1"))
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

// Labels list suspect copies, so that they survive the loss of the store: if all copies are
// suspect, there are no others.
func TestASuspectCopyIsFoundAsOne(t *testing.T) {
	s := newScript(t)
	for _, line := range []string{
		"target t1 drives=4GiB volatile", "target t2 drives=4GiB volatile", "create db1 size=1GiB stripes=1 copies=2", "comply",
		"host c1", "attach db1 c1", "comply", "serve c1 db1", "comply", "detach db1 force", "comply", "lost t2", "reboot t1", "comply t1",
	} {
		s.run(line)
	}
	s.targets["t2"].reboot()
	all := s.reports("t1", "t2")
	state, text := rebuilt(t, all)
	for _, l := range restoredVolume(t, state).Legs {
		if l.State != LegInSync || !l.Suspect {
			t.Errorf("%v is %s, suspect %v, want it in sync and suspect; report:\n%s", &l, l.State, l.Suspect, text)
		}
	}
	// Older versions did not list suspects.
	for i := range all {
		for j := range all[i].Drives[0].Legs {
			label := &all[i].Drives[0].Legs[j].Volume
			label.InSync, label.Suspect, label.ListsAll = nil, nil, false
		}
	}
	state, _ = rebuilt(t, all)
	for _, l := range restoredVolume(t, state).Legs {
		if l.State != LegStale || !strings.Contains(l.Reason, "all copies may have lost cached writes: its label (generation") {
			t.Errorf("%v is %s (%s), want it left to an operator, with what speaks for it", &l, l.State, l.Reason)
		}
	}
}

// Labels stay unchanged until an operator has chosen a copy: they are the only evidence,
// also if the store is lost once more.
func TestLabelsStayUntilACopyIsChosen(t *testing.T) {
	s, reports := labelled(t)
	s.state, _ = rebuilt(t, reports("t1", "t2", "t3"))
	s.session, s.store = 2, map[string][]byte{}
	keep(s.store, s.state.Records())
	labels := func() (all []evidence.VolumeLabel) {
		for _, r := range s.reports("t1", "t2", "t3") {
			for _, l := range r.Drives[0].Legs {
				all = append(all, l.Volume)
			}
		}
		return all
	}
	before := labels()
	s.run("comply")
	s.run("comply")
	if diff := cmp.Diff(before, labels()); diff != "" {
		t.Errorf("labels were written before a copy was chosen (-before +after):\n%s", diff)
	}
	chosen := restoredVolume(t, s.state).Legs[1].ID
	s.step(PromoteStaleLeg{Volume: "db1", Leg: chosen, AcceptDataLoss: true})
	s.run("comply")
	for _, label := range labels() {
		if !slices.Equal(label.InSync, []block.LegID{chosen}) {
			t.Errorf("label after the choice lists %v, want %v", label.InSync, chosen)
		}
	}
}

// Hosts that share a volume read-only have no lease, and neither labels nor notes name them.
// So a copy that may still be exported to one is not evicted for a writer.
func TestARebuiltStoreGivesUpNoCopyThatAReaderMayHave(t *testing.T) {
	s, reports := labelled(t, "host c2", "release c1 db1", "detach db1", "comply",
		"attach db1 c2 mode=SHARED_READ_ONLY", "comply", "comply", "serve c2 db1", "comply")
	legs := restoredVolume(t, s.state).Legs
	here, away := string(legs[0].Node), string(legs[1].Node)
	s.state, _ = rebuilt(t, reports("t1", "t2", "t3"))
	s.session, s.store = 2, map[string][]byte{}
	keep(s.store, s.state.Records())
	for _, line := range []string{"report t1", "report t2", "report t3", "report " + here, "lost " + away} {
		s.run(line) // c2 and the target that it reads from are cut off
	}
	s.hosts["c1"].phase = map[string]Phase{}
	s.reportHost("c1")
	s.run("attach db1 c1")
	for range 4 {
		s.run("comply " + here)
		s.run("wait 5s " + here + " c1")
	}
	const why = "(a host that this store does not know may still read from it)"
	if got := legStates(t, s.state); got[1] != LegInSync || len(s.targets[away].exports) == 0 || !strings.Contains(s.run("explain db1"), why) {
		t.Errorf("legs are %v, and the second one is exported to a reader; want it kept, and explain to say %q:\n%s", got, why, s.run("explain db1"))
	}
	s.run("comply")
	v := restoredVolume(t, s.state)
	if v.Attachment == nil || v.Attachment.State != Granted || len(v.FormerHosts) > 0 || len(s.targets[away].exports) > 0 && !s.state.admitted(s.state.volumes.Get(v.ID), &v.Legs[1]) {
		t.Errorf("after its target has fenced the reader:\n%s", s.run("volume db1"))
	}
}

// A drive that was away, or failed a flush, while no manager ran may have lost writes too.
func TestACopyWhoseDriveWasAwaySinceIsSuspect(t *testing.T) {
	for name, before := range map[string][]string{
		"in use":                 {"comply"},
		"taken away from a host": {"detach db1 force", "comply"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScript(t)
			for _, line := range append([]string{
				"target t1 drives=4GiB volatile", "target t2 drives=4GiB volatile", "return t1 as=1", "return t2 as=1",
				"create db1 size=1GiB stripes=1 copies=2", "comply", "host c1", "attach db1 c1", "comply", "serve c1 db1",
			}, before...) {
				s.run(line)
			}
			backup := s.state.Records()
			s.run("return t1 as=2 later")
			check := func(how string) {
				t.Helper()
				for _, l := range restoredVolume(t, s.state).Legs {
					if l.Node == "t1" && l.State != LegStale || l.Node == "t2" && !l.trusted() {
						t.Errorf("%s: %v is %s, suspect %v; want only the copy whose drive was not away", how, &l, l.State, l.Suspect)
					}
				}
			}
			s.state, _ = rebuilt(t, s.reports("t1", "t2"), s.hostReport("c1"))
			s.session, s.store = 2, map[string][]byte{}
			keep(s.store, s.state.Records())
			s.run("report t1")
			s.run("report t2")
			check("rebuilt")

			// The backup is from before the other drive was away and judged.
			records, err := Load(backup)
			if err != nil {
				t.Fatal(err)
			}
			for _, d := range records.drives {
				d.Incarnation = "0"
			}
			s.restore(records.Records())
			s.reportHost("c1")
			s.run("comply")
			s.run("comply")
			check("restored")
		})
	}
}

// A suspect copy counts when a rebuilt store decides how far an expansion has come: it may
// be the only copy left, and no host was told a size that it does not have.
func TestASuspectCopyThatHasNotGrownKeepsAVolumesSize(t *testing.T) {
	s := newScript(t)
	for _, line := range []string{
		"target t1 drives=4GiB volatile", "target t2 drives=4GiB volatile", "create db1 size=1GiB stripes=1 copies=2", "comply",
		"host c1", "attach db1 c1", "comply", "serve c1 db1", "comply", "detach db1 force", "comply",
		"slow t1", "expand db1 size=2GiB", "comply", "lost t2", "reboot t1", "comply t1",
	} {
		s.run(line)
	}
	s.targets["t2"].reboot()
	state, text := rebuilt(t, s.reports("t1", "t2"))
	v := restoredVolume(t, state)
	for _, l := range v.Legs {
		if have := s.targets[string(l.Node)].zeroed(l.ID); l.State == LegInSync && have < v.Layout.LegSize(v.Size) {
			t.Errorf("volume was rebuilt with %v, and %v, in sync and suspect %v, has %v; report:\n%s", v.Size, &l, l.Suspect, have, text)
		}
	}
}

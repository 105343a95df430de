// SPDX-License-Identifier: Apache-2.0

package upgrade

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/timestamppb"

	"weft.dev/weft/proto/pb"
)

// world is a cluster of three managers, three targets and a host, all of which run v1. The volume
// db1 has a copy on t1 and one on t2, and is attached to gpu1.
func world() Facts {
	f := Facts{To: "v2", Upgrade: &pb.Upgrade{Level: 1, Newest: 1}}
	for i, id := range []string{"aa", "bb", "cc"} {
		f.Managers = append(f.Managers, &pb.ManagerMember{Id: id, Address: fmt.Sprintf("m%d:4480", i+1), Voter: true, Leader: i == 0})
		f.Upgrade.Parts = append(f.Upgrade.Parts, &pb.UpgradePart{Kind: "manager", Name: id, Version: "v1", Level: 1})
	}
	for _, n := range []string{"t1", "t2", "t3"} {
		f.Nodes = append(f.Nodes, &pb.Node{Name: n, Target: &pb.AgentStatus{Known: true, Online: true, Version: "v1"}})
		f.Upgrade.Parts = append(f.Upgrade.Parts, &pb.UpgradePart{Kind: "target", Name: n, Version: "v1", Level: 1})
	}
	f.Nodes = append(f.Nodes, &pb.Node{Name: "gpu1", Initiator: &pb.AgentStatus{Known: true, Online: true, Version: "v1"}})
	f.Upgrade.Parts = append(f.Upgrade.Parts, &pb.UpgradePart{Kind: "initiator", Name: "gpu1", Version: "v1", Level: 1})
	f.Volumes = []*pb.Volume{volume("db1", 2, "t1", "t2")}
	return f
}

// volume has a copy on each of the nodes, in one column.
func volume(name string, copies uint32, nodes ...string) *pb.Volume {
	v := &pb.Volume{Name: name, State: pb.VolumeState_VOLUME_STATE_READY, Layout: &pb.Layout{Stripes: 1, Copies: copies}, Attachment: &pb.Attachment{VolumeName: name, Node: "gpu1"}}
	for i, n := range nodes {
		v.Legs = append(v.Legs, &pb.Leg{Copy: uint32(i), Node: n, State: pb.LegState_LEG_STATE_IN_SYNC})
	}
	return v
}

// upgraded says that parts run v2: "manager aa", "target t1".
func (f Facts) upgraded(parts ...string) {
	for _, p := range f.Upgrade.GetParts() {
		if slices.Contains(parts, p.GetKind()+" "+p.GetName()) {
			p.Version = "v2"
		}
	}
}

func (f Facts) maintain(node string) {
	f.node(node).MaintainedUntil = timestamppb.New(time.Date(2026, 11, 24, 3, 0, 0, 0, time.UTC))
}

// text is a plan in lines: a part, its state, and its blocks.
func text(p Plan) (lines []string) {
	for _, s := range p.Steps {
		line := s.Kind + " " + s.Name + ": " + string(s.State)
		if len(s.Blocks) > 0 {
			line += ", blocked: " + strings.Join(s.Blocks, "; ")
		}
		lines = append(lines, line)
	}
	return lines
}

func (f Facts) handsOver(node string) {
	f.part(Step{Kind: target, Name: node}).HandsOver = true
}

// A target that hands over to its next process is reloaded where it stands; one that is away, or is
// under maintenance already, is restarted.
func TestATargetThatHandsOverIsReloaded(t *testing.T) {
	for name, test := range map[string]struct {
		change  func(Facts)
		reloads bool
	}{
		"hands over":              {func(f Facts) { f.handsOver("t1") }, true},
		"does not":                {func(Facts) {}, false},
		"under maintenance":       {func(f Facts) { f.handsOver("t1"); f.maintain("t1") }, false},
		"away":                    {func(f Facts) { f.handsOver("t1"); f.node("t1").Target.Online = false }, false},
		"of another target alone": {func(f Facts) { f.handsOver("t2") }, false},
	} {
		t.Run(name, func(t *testing.T) {
			f := world()
			test.change(f)
			s := *Make(f).Find(target, "t1")
			verb, left := "systemctl restart weft-target", true
			if test.reloads {
				verb, left = "systemctl reload weft-target", false
			}
			does := strings.Join(s.Does, "; ")
			if s.Reloads != test.reloads || !strings.Contains(does, verb) || strings.Contains(does, "maintenance") != left || !strings.Contains(f.install(s), verb) {
				t.Errorf("reloads %v; it takes: %s", s.Reloads, does)
			}
		})
	}
}

// onlyReads is a manager that refuses everything but questions.
type onlyReads struct {
	pb.ManagerClient
	asked int
}

func (m *onlyReads) MaintainNode(context.Context, *pb.MaintainNodeRequest, ...grpc.CallOption) (*pb.Node, error) {
	m.asked++
	return nil, errors.New("it is put under maintenance")
}

func TestNextPutsATargetUnderMaintenanceOnlyIfItCannotHandOver(t *testing.T) {
	for _, hands := range []bool{true, false} {
		f, m := world(), &onlyReads{}
		if hands {
			f.handsOver("t1")
		}
		err := begin(t.Context(), m, f, *Make(f).Find(target, "t1"), nextOptions{length: time.Minute}, nil)
		if (err == nil) != hands || (m.asked == 0) != hands {
			t.Errorf("hands over %v: %v, asked for maintenance %d times", hands, err, m.asked)
		}
	}
}

const offline = "target t2 is offline"

func TestMake(t *testing.T) {
	allManagers := []string{"manager aa", "manager bb", "manager cc"}
	for name, test := range map[string]struct {
		change func(*Facts)
		want   []string // lines of text about parts that are not done
	}{
		"the manager that leads is the last of the managers": {
			change: func(*Facts) {},
			want:   []string{"manager bb: next", "manager cc: later", "manager aa: later", "target t1: later", "target t2: later", "target t3: later", "initiator gpu1: later"},
		},
		"managers come last where hosts share a volume": {
			change: func(f *Facts) {
				f.Volumes[0].Attachments = []*pb.Attachment{{Node: "gpu1"}, {Node: "gpu2"}}
			},
			want: []string{"target t1: next", "target t2: later", "target t3: later", "initiator gpu1: later", "manager bb: later", "manager cc: later", "manager aa: later"},
		},
		"too few managers would answer": {
			change: func(f *Facts) { f.Managers[2].Problem = "connection refused"; f.upgraded("manager bb") },
			want: []string{"manager cc: under way", "manager aa: later, blocked: without manager aa, too few managers would answer to decide anything: 2 of 3 that vote answer",
				"target t1: later", "target t2: later", "target t3: later", "initiator gpu1: later"},
		},
		"one manager alone is not in its own way": {
			change: func(f *Facts) {
				f.Managers = f.Managers[:1]
				f.Upgrade.Parts = slices.Delete(f.Upgrade.Parts, 1, 3)
			},
			want: []string{"manager aa: next", "target t1: later", "target t2: later", "target t3: later", "initiator gpu1: later"},
		},
		"a column with one copy stops agents": {
			change: func(f *Facts) {
				f.upgraded(allManagers...)
				f.Volumes[0].Legs[1].State = pb.LegState_LEG_STATE_STALE
			},
			want: blocked("column 0 of volume db1 has one copy in sync: leg 0.1 of volume db1 on t2 is stale", "target t1: next", "target t2: later", "target t3: later", "initiator gpu1: later"),
		},
		"so does a leg that is being copied, of three": {
			change: func(f *Facts) {
				f.upgraded(allManagers...)
				f.Volumes = []*pb.Volume{volume("db1", 3, "t1", "t2", "t3")}
				f.Volumes[0].Legs[0].State = pb.LegState_LEG_STATE_REBUILDING
			},
			want: blocked("leg 0.0 of volume db1 on t1 is rebuilding", "target t1: next", "target t2: later", "target t3: later", "initiator gpu1: later"),
		},
		"a detached volume has to be healed first": {
			change: func(f *Facts) {
				f.upgraded(allManagers...)
				f.Volumes[0].Attachment, f.Volumes[0].Legs[1].State = nil, pb.LegState_LEG_STATE_STALE
			},
			want: blocked("column 0 of volume db1 has one copy in sync: leg 0.1 of volume db1 on t2 is stale; a host copies it while the volume is detached, unless that is switched off, or once it is attached", "target t1: next", "target t2: later", "target t3: later", "initiator gpu1: later"),
		},
		"a leg that is about to go is no copy, and in nobody's way": {
			change: func(f *Facts) {
				f.upgraded(allManagers...)
				f.Volumes[0].Legs = append(f.Volumes[0].Legs, &pb.Leg{Copy: 2, Node: "t3", State: pb.LegState_LEG_STATE_DELETING})
			},
			want: []string{"target t1: next", "target t2: later", "target t3: later", "initiator gpu1: later"},
		},
		"a single copy is in the way of its target alone": {
			change: func(f *Facts) {
				f.upgraded(allManagers...)
				f.Volumes = []*pb.Volume{volume("scratch", 1, "t1")}
			},
			want: []string{"target t1: next, blocked: volume scratch has a single copy on t1, and gpu1 uses it: its I/O waits meanwhile", "target t2: later", "target t3: later", "initiator gpu1: later"},
		},
		"not if nobody uses it": {
			change: func(f *Facts) {
				f.upgraded(allManagers...)
				f.Volumes = []*pb.Volume{volume("scratch", 1, "t1")}
				f.Volumes[0].Attachment = nil
			},
			want: []string{"target t1: next", "target t2: later", "target t3: later", "initiator gpu1: later"},
		},
		"nor if its target hands over to its next process": {
			change: func(f *Facts) {
				f.upgraded(allManagers...)
				f.Volumes = []*pb.Volume{volume("scratch", 1, "t1")}
				f.handsOver("t1")
			},
			want: []string{"target t1: next", "target t2: later", "target t3: later", "initiator gpu1: later"},
		},
		"which must not depend on it alone, as it may fail": {
			change: func(f *Facts) {
				f.upgraded(allManagers...)
				f.handsOver("t1")
				f.Volumes[0].Legs[1].State = pb.LegState_LEG_STATE_STALE
			},
			want: blocked("column 0 of volume db1 has one copy in sync: leg 0.1 of volume db1 on t2 is stale", "target t1: next", "target t2: later", "target t3: later", "initiator gpu1: later"),
		},
		"a target that is away goes on first, and is in the way of the others": {
			change: func(f *Facts) { f.upgraded(allManagers...); f.node("t2").Target.Online = false },
			want:   []string{"target t1: later, blocked: " + offline, "target t2: under way", "target t3: later, blocked: " + offline, "initiator gpu1: later, blocked: " + offline},
		},
		"not if its machine is confirmed to be off": {
			change: func(f *Facts) {
				f.upgraded(append(allManagers, "target t1")...)
				f.node("t2").Target.Online, f.node("t2").ConfirmedDead = false, true
			},
			want: []string{"target t2: under way", "target t3: later", "initiator gpu1: later"},
		},
		"what its own maintenance leaves out does not stop it": {
			change: func(f *Facts) {
				f.upgraded(allManagers...)
				f.maintain("t2")
				f.Volumes[0].Legs[1].State = pb.LegState_LEG_STATE_STALE
			},
			want: []string{"target t1: later, blocked: node t2 is under maintenance until 2026-11-24T03:00:00Z; column 0 of volume db1 has one copy in sync: leg 0.1 of volume db1 on t2 is stale",
				"target t2: under way",
				"target t3: later, blocked: node t2 is under maintenance until 2026-11-24T03:00:00Z; column 0 of volume db1 has one copy in sync: leg 0.1 of volume db1 on t2 is stale",
				"initiator gpu1: later, blocked: node t2 is under maintenance until 2026-11-24T03:00:00Z; column 0 of volume db1 has one copy in sync: leg 0.1 of volume db1 on t2 is stale"},
		},
		"another leg that is lost then does": {
			change: func(f *Facts) {
				f.upgraded(append(allManagers, "target t1")...)
				f.maintain("t2")
				f.Volumes = append(f.Volumes, volume("db2", 2, "t3", "t1"))
				f.Volumes[1].Legs[1].State = pb.LegState_LEG_STATE_STALE
			},
			want: []string{"target t2: under way, blocked: column 0 of volume db2 has one copy in sync: leg 0.1 of volume db2 on t1 is stale",
				"target t3: later, blocked: node t2 is under maintenance until 2026-11-24T03:00:00Z; column 0 of volume db2 has one copy in sync: leg 0.1 of volume db2 on t1 is stale",
				"initiator gpu1: later, blocked: node t2 is under maintenance until 2026-11-24T03:00:00Z; column 0 of volume db2 has one copy in sync: leg 0.1 of volume db2 on t1 is stale"},
		},
		"everything is done": {
			change: func(f *Facts) {
				f.upgraded(append(allManagers, "target t1", "target t2", "target t3", "initiator gpu1")...)
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := world()
			test.change(&f)
			got := slices.DeleteFunc(text(Make(f)), func(line string) bool { return strings.HasSuffix(line, ": done") })
			if diff := cmp.Diff(test.want, got, cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("Make (-want +got):\n%s", diff)
			}
		})
	}
}

// blocked is lines, all with the same reason.
func blocked(why string, lines ...string) (all []string) {
	for _, line := range lines {
		all = append(all, line+", blocked: "+why)
	}
	return all
}

func TestTheLeaderHandsOverToOneThatIsUpgraded(t *testing.T) {
	f := world()
	f.upgraded("manager cc")
	if s := Make(f).Find("manager", "aa"); s.Successor != "cc" {
		t.Errorf("aa hands over to %q, want cc: bb is not upgraded", s.Successor)
	}
	f.Managers[2].Problem = "connection refused"
	if s := Make(f).Find("manager", "aa"); s.Successor != "" {
		t.Errorf("aa hands over to %q, which does not answer", s.Successor)
	}
	if s := Make(f).Find("manager", "bb"); s.Successor != "" {
		t.Errorf("bb does not lead, and hands over to %q", s.Successor)
	}
}

func TestWaits(t *testing.T) {
	f := world()
	s := Make(f).Find("target", "t2")
	wait := func(want string) {
		t.Helper()
		if got := f.Waits(*s); got != want {
			t.Errorf("Waits = %q, want %q", got, want)
		}
	}
	f.maintain("t2")
	wait("target t2 to be back with v2 (it runs v1)")
	f.node("t2").Target.Online = false
	wait("target t2, which is away, to be back with v2")
	f.upgraded("target t2")
	f.node("t2").Target.Online = true
	wait("the end of the maintenance of t2")
	f.node("t2").MaintainedUntil = nil
	f.Volumes[0].Legs[1].State = pb.LegState_LEG_STATE_REBUILDING
	wait("leg 0.1 of volume db1 on t2, which is rebuilding")
	f.Volumes[0].Legs[1].State = pb.LegState_LEG_STATE_IN_SYNC
	wait("")
	f.Volumes[0].Legs[0].State = pb.LegState_LEG_STATE_STALE
	wait("") // that is in the way of the next step, and no part of this one

	s = Make(f).Find("manager", "bb")
	f.Managers[1].Problem = "connection refused"
	wait("manager bb, which is away, to be back with v2")
	f.Managers[1].Problem = ""
	f.upgraded("manager bb")
	wait("")
}

func TestSummary(t *testing.T) {
	f := world()
	f.upgraded("manager bb", "target t1")
	if got, want := Make(f).Summary(), "2 of 7 run v2; the next step: `weft upgrade next`"; got != want {
		t.Errorf("Summary() = %q, want %q", got, want)
	}
	f.upgraded("manager aa", "manager cc", "target t2", "target t3", "initiator gpu1")
	if got, want := Make(f).Summary(), "7 of 7 run v2; nothing is left to do"; got != want {
		t.Errorf("Summary() = %q, want %q", got, want)
	}
	f.Upgrade.Newest = 2
	if got, want := Make(f).Summary(), "7 of 7 run v2; the cluster is at level 1: `weft upgrade finish`"; got != want {
		t.Errorf("Summary() = %q, want %q", got, want)
	}
}

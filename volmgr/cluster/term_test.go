// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
)

// apply steps, and stores the records.
func apply(t *testing.T, s *State, store map[string][]byte, in Input) Outcome {
	t.Helper()
	out, err := s.Step(t0, in)
	if err != nil {
		t.Fatalf("Step(%T) = %v", in, err)
	}
	keep(store, out.Records)
	return out
}

func newStore() (*State, map[string][]byte) {
	s, records := New(testCluster())
	store := map[string][]byte{}
	keep(store, records)
	return s, store
}

// agentSays returns reports of a node's agents that they have acted on an order.
func agentSays(node block.NodeName, o order) (target, initiator Input) {
	return TargetReported{Session: 1, Report: TargetReport{Node: node, BootID: "1", Highest: Term{testCluster(), o.term}, Generation: o.generation}},
		InitiatorReported{1, InitiatorReport{Node: node, BootID: "1", Highest: Term{testCluster(), o.term}, Generation: o.generation, Host: hostOf(string(node))}}
}

func TestEachStartOfAManagerBeginsATerm(t *testing.T) {
	s, store := newStore()
	for term := range uint64(3) {
		if got := s.WantedTarget("t1").Term; got != term {
			t.Errorf("before start %d the term is %d, want %d", term+1, got, term)
		}
		apply(t, s, store, BeginTerm{})
		s = loadStore(t, store)
	}
	if w, i := s.WantedTarget("t1"), s.WantedInitiator("c1"); w.Term != 3 || i.Term != 3 {
		t.Errorf("orders are of terms %d and %d, want 3", w.Term, i.Term)
	}
}

// A manager that was replaced, or runs on a copy of a store, must not win the agents back.
// It reports this, and relies on nothing that they did for the other manager.
func TestAReplacedManagerStaysBehind(t *testing.T) {
	s, store := newStore()
	apply(t, s, store, BeginTerm{})
	target, initiator := agentSays("n1", order{term: 7, generation: 1 << 40})
	for _, in := range []Input{target, initiator} {
		for again := range 2 {
			out := apply(t, s, store, in)
			if said := slices.ContainsFunc(out.Events, func(e event.Event) bool { return e.Kind == event.ManagerReplaced }); said != (again == 0) {
				t.Errorf("report %d of %T: events %v, want one that says it the first time", again+1, in, out.Events)
			}
		}
	}
	elsewhere := TargetReported{Session: 1, Report: TargetReport{Node: "n2", BootID: "1", Highest: Term{block.ClusterID{UUID: block.UUID{9}}, 7}, Generation: s.Generation()}}
	apply(t, s, store, elsewhere)
	if n, err := s.Node("n2"); err != nil || n.Target.Generation == 0 {
		t.Errorf("a term of another cluster counts here (%v)", err)
	}
	if s.Term() != 1 || s.Generation() > 100 {
		t.Errorf("it is at term %d, generation %d, and follows what agents do for another one", s.Term(), s.Generation())
	}
	if n, err := s.Node("n1"); err != nil || n.Target.Generation != 0 || n.Initiator.Generation != 0 {
		t.Errorf("agents count as having acted on %d and %d, want nothing (%v)", n.Target.Generation, n.Initiator.Generation, err)
	}
	if wrong := s.Status().Wrong; len(wrong) == 0 || !strings.Contains(wrong[0], "follow a volume manager of a later term") {
		t.Errorf("status says %q", wrong)
	}
}

// A store that replaces a lost one gets a term above all that agents have acted on, also if
// the clock was wrong, and however often one backup is restored. Once all agents have
// reported, it does not rise any more.
func TestAStoreThatReplacesALostOneEndsAboveAllAgents(t *testing.T) {
	seen := order{term: 1 << 50, generation: 9}
	target, initiator := agentSays("n1", seen)
	made := map[string]func(t *testing.T, backup []Record) []Record{
		"restored": func(t *testing.T, backup []Record) []Record {
			records, err := Restored(time.Unix(0, 0), backup)
			if err != nil {
				t.Fatal(err)
			}
			return records
		},
		"rebuilt": func(t *testing.T, _ []Record) []Record {
			s, _, err := Rebuild(time.Unix(0, 0), []TargetReport{{Node: "n1", ClusterID: testCluster(), BootID: "1", Highest: Term{testCluster(), 5}}}, nil)
			if err != nil {
				t.Fatal(err)
			}
			return s.Records()
		},
	}
	for name, records := range made {
		t.Run(name, func(t *testing.T) {
			s, store := newStore()
			apply(t, s, store, BeginTerm{})
			before, after := agentSays("n1", order{})
			apply(t, s, store, before)
			apply(t, s, store, after)
			made := records(t, s.Records())
			clear(store)
			keep(store, made)
			if s = loadStore(t, store); s.Term() <= 5 {
				t.Errorf("it begins at term %d", s.Term())
			}
			apply(t, s, store, BeginTerm{})
			apply(t, s, store, initiator)
			apply(t, s, store, target)
			if s = loadStore(t, store); s.Term() <= seen.term {
				t.Errorf("it is at term %d after agents that follow term %d have reported", s.Term(), seen.term)
			}
			term := s.Term()
			later, _ := agentSays("n1", order{term: term + 5})
			apply(t, s, store, later)
			if s.Term() != term {
				t.Errorf("it went from term %d to %d once all agents had reported: two managers would overtake one another for ever", term, s.Term())
			}
		})
	}
}

// A node that was lost together with the manager that led has never reported to the one that leads now.
// It has agents all the same, which are offline; nothing else of them is known.
func TestANodeLostWithTheLeaderIsOffline(t *testing.T) {
	s, store := newStore()
	apply(t, s, store, BeginTerm{})
	target, initiator := agentSays("n1", order{term: 1})
	apply(t, s, store, target)
	apply(t, s, store, initiator)
	s = loadStore(t, store)
	apply(t, s, store, BeginTerm{})
	n, err := s.Node("n1")
	if err != nil {
		t.Fatal(err)
	}
	want := AgentStatus{Known: true}
	if diff := cmp.Diff(want, n.Target); diff != "" {
		t.Error("the target:", diff)
	}
	if diff := cmp.Diff(want, n.Initiator); diff != "" {
		t.Error("the initiator:", diff)
	}
}

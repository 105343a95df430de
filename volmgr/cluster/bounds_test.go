// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/labelset"
)

func TestLabelsAreBoundedWhereverTheyComeFrom(t *testing.T) {
	many := map[string]string{}
	for i := range labelset.Most + 1 {
		many[fmt.Sprintf("k%d", i)] = "v"
	}
	s, _ := labelled(t)
	inputs := func(labels map[string]string) map[string]Input {
		return map[string]Input{
			"labels":     CreateVolume{Name: "new", Size: block.GiB, Labels: labels},
			"set_labels": UpdateVolume{Volume: "db1", SetLabels: labels},
			"selector":   CreatePool{Name: "new", Selector: labels},
			"topology":   CreateVolume{Name: "new", Size: block.GiB, Topology: []Segment{labels}},
			"preferred":  CreateVolume{Name: "new", Size: block.GiB, Preferred: []Segment{labels}},
			"labels ":    SetNodeLabels{Node: "t1", Labels: labels},
			"labels  ":   AddDrive{Node: "t1", Device: "/dev/x", Labels: labels},
		}
	}
	for _, c := range []struct {
		labels map[string]string
		says   string
	}{
		{many, "65 labels; at most 64 are allowed"},
		{map[string]string{strings.Repeat("k", 318): "v"}, `has 318 bytes; at most 317 are allowed`},
		{map[string]string{"note": strings.Repeat("v", 257)}, `the value of "note" has 257 bytes; at most 256 are allowed`},
		{notes("n", 34), "together; at most 8192 are allowed"},
		{map[string]string{"": "v"}, `key "" cannot be set`},
	} {
		for field, in := range inputs(c.labels) {
			field = strings.TrimSpace(field)
			var e *Error
			if _, err := s.state.Step(s.now, in); !errors.As(err, &e) || e.Kind != InvalidArgument || e.Field != field || !strings.Contains(e.Text, c.says) || len(e.Text) > 200 {
				t.Errorf("%T with %d labels in %s = %v, want it refused: %s", in, len(c.labels), field, err, c.says)
			}
		}
	}
	for i := range 3 { // a few at a time
		_, err := s.state.Step(s.now, UpdateVolume{Volume: "db1", SetLabels: notes(fmt.Sprint("n", i), 15)})
		if ok := i < 2; (err == nil) != ok {
			t.Errorf("15 labels of 250 bytes beside %d: %v", 15*i, err)
		}
	}
}

// A store of an earlier version may hold labels beyond today's bounds.
func TestLabelsThatWereTakenOnceDoNotStopAnything(t *testing.T) {
	s, _ := labelled(t)
	old := s.state.volumes.Get(s.state.idOf("db1")).clone()
	old.Labels = map[string]string{"owner": "me", "zz-note": strings.Repeat("x", 3<<20)}
	for i := range 30_000 {
		old.Labels[fmt.Sprintf("k%d", i)] = strings.Repeat("v", 50)
	}
	s.store[volumeKey(old.ID)] = encode("", old).Value
	s.run("restart")
	s.run("comply")
	if size := len(asJSON(t, s.state.WantedTarget("t1"))); size > 20_000 {
		t.Errorf("what is wanted of a target has %d bytes: the labels are in it", size)
	}
	v, err := s.state.Volume("db1")
	if size := len(asJSON(t, v)); err != nil || size > 20_000 || !strings.Contains(v.Labels["weft.dev/labels"], "30002 labels") {
		t.Errorf("the volume is shown as %d bytes with %q, %v; want a part of its labels, and a word about the others", size, v.Labels["weft.dev/labels"], err)
	}
	if e, err := s.state.Explain("db1"); err != nil || !strings.Contains(strings.Join(e.Actions, "\n"), "--label '*-' for all of them") {
		t.Errorf("Explain = %v, %v; want it to say how to take the labels away", e, err)
	}
	if got := s.step(UpdateVolume{Volume: "db1", SetLabels: map[string]string{"a": "b"}}); !strings.Contains(got, "30003 labels; at most 64 are allowed") {
		t.Errorf("one more label: %s", got)
	}
	if got := s.step(UpdateVolume{Volume: "db1", RemoveLabels: []string{"zz-note"}}); !strings.Contains(got, "removed: zz-note") {
		t.Errorf("one label less: %s", got)
	}
	if got := s.step(UpdateVolume{Volume: "db1", RemoveLabels: []string{"*"}, SetLabels: map[string]string{"a": "b"}}); !strings.Contains(got, "volume.updated") {
		t.Errorf("all labels but one less: %s", got)
	}
	if v, err := s.state.Volume("db1"); err != nil || !maps.Equal(v.Labels, map[string]string{"a": "b"}) {
		t.Errorf("the labels are %v, %v; want a=b", v.Labels, err)
	}
}

func asJSON(t *testing.T, value any) []byte {
	b, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// ghost reports for a target agent on an unused node.
func ghost(s *State, now time.Time, session uint64, n int) error {
	name := block.NodeName(fmt.Sprintf("ghost%05d", n))
	_, err := s.Step(now, InitiatorReported{session, InitiatorReport{Node: name, BootID: "1", Host: hostOf(string(name))}})
	return err
}

func TestNodesThatNobodyUsesAreBounded(t *testing.T) {
	s, _ := labelled(t)
	s.step(SetNodeLabels{"c1", map[string]string{"rack": "r1"}})
	state, now := s.state, s.now
	unused := func() (n int) {
		for _, node := range state.nodes {
			if strings.HasPrefix(string(node.Name), "ghost") {
				n++
			}
		}
		return n
	}
	for i := range MaxUnusedNodes {
		if err := ghost(state, now, 1, i); err != nil {
			t.Fatal(err)
		}
	}
	var e *Error
	if err := ghost(state, now, 1, MaxUnusedNodes); !errors.As(err, &e) || e.Reason != ReasonTooManyNodes || !strings.Contains(e.Text, fmt.Sprint(MaxUnusedNodes)) {
		t.Errorf("one node more = %v, want it refused with %s", err, ReasonTooManyNodes)
	}
	if unused() != MaxUnusedNodes || state.initiators["ghost05000"] != nil {
		t.Errorf("%d nodes are kept, and of the one that was refused %v", unused(), state.initiators["ghost05000"])
	}
	// After an hour a new node replaces the one that has been silent longest. Used nodes
	// stay, however long they are silent.
	now = now.Add(time.Minute)
	for i := 1; i < MaxUnusedNodes; i++ {
		if err := ghost(state, now, 1, i); err != nil {
			t.Fatal(err)
		}
	}
	now = now.Add(unusedFor - 30*time.Second)
	if _, err := state.Step(now, Tick{}); err != nil {
		t.Fatal(err)
	}
	if err := ghost(state, now, 1, MaxUnusedNodes); err != nil {
		t.Errorf("a node more after one was silent for an hour: %v", err)
	}
	if err := ghost(state, now, 1, MaxUnusedNodes+1); err == nil {
		t.Error("a node that was silent for less than an hour made room")
	}
	if _, there := state.nodes["ghost00000"]; there || unused() != MaxUnusedNodes {
		t.Errorf("%d nodes are kept, the oldest of them: %v", unused(), there)
	}
	for _, name := range []block.NodeName{"t1", "t2", "c1"} {
		if state.nodes[name] == nil {
			t.Errorf("node %s, which is used, is forgotten", name)
		}
	}
	keep := loadStore(t, recordsOf(state))
	if len(keep.nodes) != len(state.nodes) {
		t.Errorf("the store has %d nodes, want %d", len(keep.nodes), len(state.nodes))
	}
}

func recordsOf(s *State) map[string][]byte {
	store := map[string][]byte{}
	keep(store, s.Records())
	return store
}

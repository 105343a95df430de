// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"weft.dev/weft/proto/block"
)

// rebalance default [stop] [moves=2] begins or ends the rebalancing of a pool; with "plan" it shows
// the moves, with "show" how far it is.
func (s *script) rebalance(a args) string {
	switch {
	case a.has("plan"):
		plan, err := s.state.PlanRebalance(a.word(0), a.number("moves", 0))
		if err != nil {
			return printError(err)
		}
		var b strings.Builder
		for _, m := range plan {
			fmt.Fprintf(&b, "%s %d.%d %v: %s to %s\n", m.Volume, m.Column, m.Copy, m.Size, m.FromNode, m.ToNode)
		}
		return b.String()
	case a.has("show"):
		r := s.state.poolView(s.state.pools[a.word(0)]).Rebalance
		if r == nil {
			return "never\n"
		}
		return fmt.Sprintf("%d begun, %d moving, ended %v, stopped %v\n", r.Moves, r.Moving, !r.Ended.IsZero(), r.Stopped)
	}
	return s.step(RebalancePool{Pool: a.word(0), Stop: a.has("stop"), MaxMoves: a.number("moves", 0)})
}

// rebalancing is a cluster of three full nodes, to which others are added.
func rebalancing(t *testing.T, volumes int) *script {
	s := newScript(t)
	do := func(line string, args ...any) { s.run(fmt.Sprintf(line, args...)) }
	for i := range 3 {
		do("target t%d drives=10GiB", i+1)
	}
	do("host c1")
	for i := range volumes {
		do("create db%d size=1GiB stripes=1", i)
	}
	do("comply")
	for i := range volumes {
		do("attach db%d c1", i)
		do("comply")
		do("serve c1 db%d", i)
	}
	do("target t4 drives=10GiB")
	do("target t5 drives=20GiB")
	return s
}

// fills are the extents that legs which stay take of each node's drive.
func (s *script) fills() map[block.NodeName]int {
	all := map[block.NodeName]int{}
	for _, v := range s.state.volumes.All() {
		for i := range v.Legs {
			if l := &v.Legs[i]; l.member() && !l.Leave {
				all[l.Node] += int(l.Extents[0].Count)
			}
		}
	}
	return all
}

// inOrder checks each column's copies, and returns how many legs leave.
func (s *script) inOrder(t *testing.T) (moving int) {
	t.Helper()
	for _, v := range s.state.volumes.All() {
		leave, good := 0, map[block.NodeName]bool{}
		for i := range v.Legs {
			l := &v.Legs[i]
			if l.member() && l.Leave {
				leave++
			}
			if l.member() && l.State == LegInSync {
				if good[l.Node] {
					t.Fatalf("two legs in sync of %s are on %s", v.Name, l.Node)
				}
				good[l.Node] = true
			}
		}
		if len(good) < v.Layout.Copies || leave > 1 {
			t.Fatalf("%s has %d legs in sync, and %d that leave", v.Name, len(good), leave)
		}
		moving += leave
	}
	return moving
}

// turn lets time pass, everybody comply, and the host copy what is to be copied.
func (s *script) turn(volumes int, copies bool) {
	s.run("wait 11s c1 t1 t2 t3 t4 t5")
	s.run("comply")
	for i := range volumes {
		name := fmt.Sprintf("db%d", i)
		s.run("serve c1 " + name)
		v := s.state.volumes.Get(s.state.idOf(block.VolumeName(name)))
		for _, l := range v.Legs {
			if copies && l.State == LegRebuilding {
				s.run(fmt.Sprintf("in-sync c1 %s %d.%d", name, l.Column, l.Copy))
			}
		}
	}
}

func TestAddedDrivesTakeTheirShare(t *testing.T) {
	const volumes = 12
	s := rebalancing(t, volumes)
	plan, err := s.state.PlanRebalance(block.DefaultPool, 0)
	if err != nil || len(plan) == 0 {
		t.Fatalf("plan %v, %v", plan, err)
	}
	for range 3 {
		s.turn(volumes, true)
	}
	if f := s.fills(); f["t4"]+f["t5"] != 0 {
		t.Fatalf("legs move though nobody asked for it: %v", f)
	}
	s.run("rebalance default")
	for turns := 0; s.state.pools[block.DefaultPool].Rebalance.active(); turns++ {
		if turns > 300 {
			t.Fatalf("it does not end: %v", s.fills())
		}
		s.turn(volumes, true)
		if moving := s.inOrder(t); moving > mostRebalanced {
			t.Fatalf("%d legs move at a time", moving)
		}
	}
	for range 3 {
		s.turn(volumes, true)
	}
	f := s.fills()
	t.Logf("extents in use: %v; %d moves, planned %d", f, s.state.pools[block.DefaultPool].Rebalance.Moves, len(plan))
	size := map[block.NodeName]float64{"t1": 39, "t2": 39, "t3": 39, "t4": 39, "t5": 79} // extents
	for a := range size {
		for b := range size {
			if d := float64(f[a])/size[a] - float64(f[b])/size[b]; d > 0.1+4/size[a]+4/size[b] {
				t.Errorf("%s is %.0f%% fuller than %s", a, 100*d, b)
			}
		}
	}
	if s.inOrder(t) != 0 {
		t.Error("legs still move")
	}
	if again, _ := s.state.PlanRebalance(block.DefaultPool, 0); len(again) != 0 {
		t.Errorf("at the end there is still a plan: %v", again)
	}
}

// A volume that nobody can copy any more gives its place to others.
func TestVolumesThatAreDetachedDoNotHoldUpARebalancing(t *testing.T) {
	const volumes = 12
	s := rebalancing(t, volumes)
	s.run("rebalance default")
	s.run("wait 11s c1 t1 t2 t3 t4 t5")
	detached := 0
	for _, v := range s.state.volumes.All() {
		if slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.Leave }) {
			s.run("detach " + string(v.Name))
			s.run("release c1 " + string(v.Name))
			detached++
		}
	}
	if detached != mostRebalanced {
		t.Fatalf("%d volumes have a leg that moves, want %d", detached, mostRebalanced)
	}
	began := s.fills()
	for range 20 {
		s.run("wait 11s c1 t1 t2 t3 t4 t5")
		s.run("comply")
	}
	if r := s.state.pools[block.DefaultPool].Rebalance; r.active() && s.inOrder(t) == 0 {
		t.Errorf("nothing moves, and the rebalancing goes on: %+v, %v, at first %v", r, s.fills(), began)
	}
	for _, v := range s.state.volumes.All() {
		if v.Attachment == nil && slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.Leave }) {
			t.Errorf("%s is detached, and a leg of it is still to move", v.Name)
		}
	}
}

func TestARebalancingStopsAndKeepsItsBound(t *testing.T) {
	const volumes = 12
	s := rebalancing(t, volumes)
	s.run("rebalance default moves=3")
	for range 40 {
		s.turn(volumes, true)
	}
	if r := s.state.pools[block.DefaultPool].Rebalance; r.active() || r.Moves != 3 || r.Stopped {
		t.Errorf("%+v, want 3 moves and the end", r)
	}
	s.run("rebalance default")
	for range 3 {
		s.turn(volumes, false)
	}
	if n := s.inOrder(t); n != mostRebalanced {
		t.Fatalf("%d legs move", n)
	}
	was := s.state.pools[block.DefaultPool].Rebalance.Moves
	s.run("rebalance default stop")
	if n := s.inOrder(t); n > mostRebalanced {
		t.Fatalf("%d legs move after the stop", n)
	}
	for range 10 {
		s.turn(volumes, true)
	}
	if n := s.inOrder(t); n != 0 {
		t.Errorf("%d legs move long after the stop", n)
	}
	if r := s.state.pools[block.DefaultPool].Rebalance; !r.Stopped || r.Moves != was {
		t.Errorf("%+v after the stop, before %d moves", r, was)
	}
}

func TestALegWhoseCopyHasNotBegunStaysWhenARebalancingStops(t *testing.T) {
	const volumes = 12
	s := rebalancing(t, volumes)
	s.run("rebalance default")
	s.run("wait 1s c1 t1 t2 t3 t4 t5")
	if n := s.inOrder(t); n != mostRebalanced {
		t.Fatalf("%d legs move", n)
	}
	s.run("rebalance default stop")
	if n := s.inOrder(t); n != 0 {
		t.Errorf("%d legs still leave", n)
	}
	for range 5 {
		s.turn(volumes, true)
	}
	for _, v := range s.state.volumes.All() {
		if len(v.Legs) != v.Layout.Copies {
			t.Errorf("%s has %d legs, want the new ones given up", v.Name, len(v.Legs))
		}
	}
}

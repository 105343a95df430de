// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
)

var failOverLimits = Limits{Window: 2 * time.Second, FailOver: 500 * time.Millisecond, Quiesce: Quiesce}

// mover is a planner that has one leg with three portals, and a path to the first of them that
// has been silent for a second.
func mover() *planner {
	now := time.Unix(1e9, 0)
	l := Link{Leg: legID(0, 0), NQN: "nqn.a", Node: "t0", Portals: []block.Portal{portal(0), portal(1), portal(2)}}
	m := &Memory{}
	m.Begin(now)
	return &planner{
		c: Capabilities{Moves: true}, l: failOverLimits, m: m, w: &Wanted{Links: []Link{l}},
		s: &Seen{Now: now, Paths: []PathSeen{{
			Path: Path{"nqn.a", portal(0)}, State: PathLive, Heard: now.Add(-time.Second), Looks: 3, Answered: true, Replaces: true,
		}}},
	}
}

func (p *planner) moves() (all []string) {
	for _, o := range p.orders {
		all = append(all, o.String())
	}
	return all
}

func TestASilentPathMovesToTheNextPortal(t *testing.T) {
	to := func(node int) string { return fmt.Sprintf("move nqn.a at %v to %v", portal(0), portal(node)) }
	for _, c := range []struct {
		name   string
		change func(p *planner, path *PathSeen)
		want   []string
	}{
		{"silent", func(*planner, *PathSeen) {}, []string{to(1)}},
		{"disconnected", func(_ *planner, path *PathSeen) { path.State = PathSilent }, []string{to(1)}},
		{"for a moment only", func(p *planner, path *PathSeen) { path.Heard = p.s.Now.Add(-500 * time.Millisecond) }, nil},
		{"seen twice, by a host that was frozen", func(_ *planner, path *PathSeen) { path.Looks = 2 }, nil},
		{"not made yet", func(_ *planner, path *PathSeen) { path.State = PathConnecting }, nil},
		{"of a target that keeps old controllers", func(_ *planner, path *PathSeen) { path.Replaces = false }, nil},
		{"of a target that must have ended the old one", func(p *planner, path *PathSeen) {
			path.Replaces, path.Heard = false, p.s.Now.Add(-Quiesce-time.Second)
		}, []string{to(1)}},
		{"beside another path of the leg", func(p *planner, _ *PathSeen) { p.c.Multipath, p.w.Links[0].Paths = true, 2 }, nil},
		{"without another portal", func(p *planner, _ *PathSeen) { p.w.Links[0].Portals = p.w.Links[0].Portals[:1] }, nil},
		{"of a leg that is recorded stale", func(p *planner, _ *PathSeen) { p.m.Records.NoteStale(legID(0, 0), 0) }, nil},
		{"that no data path can move", func(p *planner, _ *PathSeen) { p.c.Moves = false }, nil},
		{"with a suspect portal beside it", func(p *planner, path *PathSeen) {
			p.m.FellSilent(PathSeen{Path: Path{"nqn.a", portal(1)}, Answered: true}, p.s.Now.Add(-time.Second))
		}, []string{to(2)}},
		{"with a portal beside it that was suspect", func(p *planner, path *PathSeen) {
			p.m.FellSilent(PathSeen{Path: Path{"nqn.a", portal(1)}, Answered: true}, p.s.Now.Add(-quarantineLeast))
		}, []string{to(1)}},
		{"with suspect portals only", func(p *planner, path *PathSeen) {
			for i, ago := range []time.Duration{2 * time.Second, 3 * time.Second} {
				p.m.FellSilent(PathSeen{Path: Path{"nqn.a", portal(1 + i)}, Answered: true}, p.s.Now.Add(-ago))
			}
		}, []string{to(2)}},
	} {
		p := mover()
		c.change(p, &p.s.Paths[0])
		p.failOver(nil)
		if got := p.moves(); !slices.Equal(got, c.want) {
			t.Errorf("a path %s: %q, want %q", c.name, got, c.want)
		}
	}
	p := mover()
	if p.failOver([]Path{p.s.Paths[0].Path}); len(p.orders) > 0 {
		t.Errorf("a path that is about to be cut: %q", p.moves())
	}
}

// A portal is trusted later after each outage. One outage counts once, however often the path is
// tried there.
func TestAPortalThatFallsSilentAgainIsTrustedLater(t *testing.T) {
	m, at := &Memory{}, Path{"nqn.a", portal(0)}
	now := time.Unix(1e9, 0)
	m.Begin(now)
	fell := func(answered bool) time.Duration {
		m.FellSilent(PathSeen{Path: at, Answered: answered}, now)
		return m.Suspects[at].until().Sub(now)
	}
	if first, still, second := fell(true), fell(false), fell(true); first != quarantineLeast || still != first || second != 2*first {
		t.Errorf("suspect for %v, after another attempt for %v, after another outage for %v", first, still, second)
	}
	for range 20 {
		fell(true)
	}
	if d := fell(true); d != quarantineMost {
		t.Errorf("suspect for %v, want %v at most", d, quarantineMost)
	}
	now = now.Add(suspectForgets + time.Second)
	if d := fell(true); d != quarantineLeast {
		t.Errorf("after a long time without an outage suspect for %v, want %v", d, quarantineLeast)
	}
}

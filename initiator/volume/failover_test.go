// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
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
		c: Capabilities{Moves: true, Hears: true}, l: failOverLimits, m: m, w: &Wanted{Links: []Link{l}},
		s: &Seen{Now: now, Paths: []PathSeen{{
			Path: Path{"nqn.a", portal(0)}, State: PathLive, Silent: now.Add(-time.Second), Looks: 3, Answered: true, Replaces: true,
		}}, Trying: map[Path]time.Time{{"nqn.a", portal(0)}: now.Add(-acceptsFor)}},
	}
}

// several gives the leg another path, that is live, to its second portal. The kernel does not tell which one is silent.
func several(p *planner, path *PathSeen) {
	p.c.Hears, p.c.Multipath, p.w.Links[0].Paths = false, true, 2
	other := *path
	other.Path = Path{"nqn.a", portal(1)}
	p.s.Paths, p.s.Tried = append(p.s.Paths, other), map[Path]Tried{}
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
		{"that waits for its older controller's commands", func(p *planner, path *PathSeen) {
			path.State, path.Greeted, p.s.Tried = PathSilent, true, map[Path]Tried{path.Path: {At: p.s.Now, OK: true}}
		}, nil},
		{"that waits for them for long", func(p *planner, path *PathSeen) {
			path.State, path.Greeted, path.Silent = PathSilent, true, p.s.Now.Add(-3*time.Second)
			p.s.Tried = map[Path]Tried{path.Path: {At: p.s.Now, OK: true}}
		}, []string{to(1)}},
		{"that was greeted, at a portal that has accepted no connection since", func(_ *planner, path *PathSeen) {
			path.State, path.Greeted = PathSilent, true
		}, []string{to(1)}},
		{"disconnected", func(_ *planner, path *PathSeen) { path.State = PathSilent }, []string{to(1)}},
		{"for a moment only", func(p *planner, path *PathSeen) { path.Silent = p.s.Now.Add(-500 * time.Millisecond) }, nil},
		{"at a portal that accepts connections", func(p *planner, path *PathSeen) {
			path.Silent, p.s.Tried = p.s.Now.Add(-900*time.Millisecond), map[Path]Tried{path.Path: {At: p.s.Now, OK: true}}
		}, nil},
		{"for long, at a portal that accepts connections", func(p *planner, path *PathSeen) {
			path.Silent, p.s.Tried = p.s.Now.Add(-1100*time.Millisecond), map[Path]Tried{path.Path: {At: p.s.Now, OK: true}}
		}, []string{to(1)}},
		{"at a portal that accepted connections before", func(p *planner, path *PathSeen) {
			path.Silent, p.s.Tried = p.s.Now.Add(-900*time.Millisecond), map[Path]Tried{path.Path: {At: p.s.Now.Add(-time.Second), OK: true}}
		}, []string{to(1)}},
		{"at a portal that accepted a connection at first, and does not any more", func(p *planner, path *PathSeen) {
			path.Silent, p.s.Tried = p.s.Now.Add(-900*time.Millisecond), map[Path]Tried{path.Path: {At: p.s.Now.Add(-acceptsFor - 1), OK: true}}
		}, []string{to(1)}},
		{"at a portal that accepted a connection at first, and is tried again only now", func(p *planner, path *PathSeen) {
			path.Silent, p.s.Trying[path.Path] = p.s.Now.Add(-900*time.Millisecond), p.s.Now
			p.s.Tried = map[Path]Tried{path.Path: {At: p.s.Now.Add(-acceptsFor - 1), OK: true}}
		}, nil},
		{"at a portal that is tried only now", func(p *planner, path *PathSeen) {
			path.Silent, p.s.Trying[path.Path] = p.s.Now.Add(-900*time.Millisecond), p.s.Now
		}, nil},
		{"seen twice, by a host that was frozen", func(_ *planner, path *PathSeen) { path.Looks = 2 }, nil},
		{"not made yet", func(_ *planner, path *PathSeen) { path.State = PathConnecting }, nil},
		{"of a target that keeps old controllers", func(_ *planner, path *PathSeen) { path.Replaces = false }, nil},
		{"of a target that must have ended the old one", func(p *planner, path *PathSeen) {
			path.Replaces, path.Silent = false, p.s.Now.Add(-Quiesce-time.Second)
		}, []string{to(1)}},
		{"beside another path of the leg", func(p *planner, _ *PathSeen) { p.c.Multipath, p.w.Links[0].Paths = true, 2 }, nil},
		{"beside another path of the leg, at a target that accepts connections there", func(p *planner, path *PathSeen) {
			several(p, path)
			p.s.Tried[Path{"nqn.a", portal(1)}] = Tried{At: p.s.Now, OK: true}
		}, []string{fmt.Sprintf("break nqn.a at %v, beside another path", portal(0))}},
		{"beside another path of the leg, for a moment only, at a target that keeps old controllers", func(p *planner, path *PathSeen) {
			path.Replaces, path.Silent = false, p.s.Now.Add(-failOverLimits.FailOver)
			several(p, path)
			p.s.Tried[Path{"nqn.a", portal(1)}] = Tried{At: p.s.Now, OK: true}
		}, nil},
		{"beside another path of the leg, at a target that accepted connections there before", func(p *planner, path *PathSeen) {
			several(p, path)
			p.s.Tried[Path{"nqn.a", portal(1)}] = Tried{At: path.Silent.Add(-1), OK: true}
		}, nil},
		{"beside another path of the leg, at a portal that accepts connections, too", func(p *planner, path *PathSeen) {
			several(p, path)
			path.Silent = p.s.Now.Add(-3 * time.Second)
			p.s.Tried[path.Path], p.s.Tried[Path{"nqn.a", portal(1)}] = Tried{At: p.s.Now, OK: true}, Tried{At: p.s.Now, OK: true}
		}, nil},
		{"over RDMA, beside another path of the leg", func(p *planner, path *PathSeen) {
			path.Portal.Transport = block.RDMA
			several(p, path)
			p.s.Trying[path.Path], p.s.Tried[Path{"nqn.a", portal(1)}] = p.s.Now.Add(-acceptsFor), Tried{At: p.s.Now, OK: true}
		}, nil},
		{"beside another path of the leg that is connecting", func(p *planner, path *PathSeen) {
			several(p, path)
			p.s.Paths[1].State = PathConnecting
			p.s.Tried[Path{"nqn.a", portal(1)}] = Tried{At: p.s.Now, OK: true}
		}, nil},
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
		{"that is moved already", func(_ *planner, path *PathSeen) { path.Moving = true }, nil},
		{"beside portals of another transport", func(p *planner, _ *PathSeen) {
			p.w.Links[0].Portals[1].Transport = block.RDMA
		}, []string{to(2)}},
		{"of which only legs are heard, at a portal that is dead, beside one that answers", func(p *planner, _ *PathSeen) {
			p.c.Hears, p.s.Tried = false, map[Path]Tried{{"nqn.a", portal(1)}: {At: p.s.Now, OK: true}}
		}, []string{to(1)}},
		{"of which only legs are heard, beside a portal that does not answer and one that does", func(p *planner, _ *PathSeen) {
			p.c.Hears, p.s.Tried = false, map[Path]Tried{{"nqn.a", portal(1)}: {At: p.s.Now}, {"nqn.a", portal(2)}: {At: p.s.Now, OK: true}}
		}, []string{to(2)}},
		{"of which only legs are heard, beside a portal that answered before", func(p *planner, path *PathSeen) {
			p.c.Hears, p.s.Tried = false, map[Path]Tried{{"nqn.a", portal(1)}: {At: path.Silent.Add(-1), OK: true}}
		}, nil},
		{"of which only legs are heard, at a portal that accepts connections: a drive may hang", func(p *planner, path *PathSeen) {
			p.c.Hears, path.Silent = false, p.s.Now.Add(-3*time.Second)
			p.s.Tried = map[Path]Tried{path.Path: {At: p.s.Now, OK: true}, {"nqn.a", portal(1)}: {At: p.s.Now, OK: true}}
		}, nil},
		{"of which only legs are heard, beside portals that accepted connections at first, and do not any more", func(p *planner, path *PathSeen) {
			p.c.Hears, p.s.Tried = false, map[Path]Tried{}
			for i := range 3 {
				to := Path{"nqn.a", portal(i)}
				p.s.Tried[to], p.s.Trying[to] = Tried{At: path.Silent.Add(tryAfter), OK: true}, p.s.Now.Add(-acceptsFor)
			}
		}, nil},
		{"of which only legs are heard, at a portal that accepted a connection at first, beside one that goes on to", func(p *planner, path *PathSeen) {
			p.c.Hears, p.s.Tried = false, map[Path]Tried{path.Path: {At: path.Silent.Add(tryAfter), OK: true}, {"nqn.a", portal(1)}: {At: p.s.Now, OK: true}}
		}, []string{to(1)}},
		{"beside another path of the leg, at a target that accepted connections at first, and does not any more", func(p *planner, path *PathSeen) {
			several(p, path)
			p.s.Tried[Path{"nqn.a", portal(1)}] = Tried{At: path.Silent.Add(tryAfter), OK: true}
			p.s.Trying[Path{"nqn.a", portal(1)}] = p.s.Now.Add(-acceptsFor)
		}, nil},
		{"of which only legs are heard, of a target that keeps old controllers", func(p *planner, path *PathSeen) {
			p.c.Hears, path.Replaces, path.Silent = false, false, p.s.Now.Add(-Quiesce-time.Second)
			p.s.Tried = map[Path]Tried{{"nqn.a", portal(1)}: {At: p.s.Now, OK: true}}
		}, nil},
	} {
		p := mover()
		p.s.Paths = slices.Grow(p.s.Paths, 1) // path stays where it is
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

// To give up a leg whose path is being moved would not end the wait sooner.
func TestALegWhosePathMovesHasLonger(t *testing.T) {
	for _, c := range []struct {
		moving bool
		silent time.Duration
		want   bool
	}{
		{false, 1900 * time.Millisecond, false},
		{false, 2100 * time.Millisecond, true},
		{true, 5900 * time.Millisecond, false},
		{true, 6100 * time.Millisecond, true},
	} {
		p := mover()
		p.l.Moving, p.s.Paths[0].Moving = 6*time.Second, c.moving
		leg := p.w.Links[0].Leg
		p.s.Legs = map[block.LegID]LegSeen{leg: {Ways: []WaySeen{{Path: p.s.Paths[0].Path, Silent: p.s.Now.Add(-c.silent), Looks: 9}}}}
		m := member{Leg: leg, Link: &p.w.Links[0], Paths: []Path{p.s.Paths[0].Path}}
		p.s.Columns = []ColumnSeen{{Copies: []CopySeen{{State: InSync}}}}
		if p.judge(&m, CopySeen{State: InSync}); m.Lost.any() != c.want {
			t.Errorf("moving %v, silent for %v: lost %q, want it lost: %v", c.moving, c.silent, m.Lost, c.want)
		}
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
	if m.FellSilent(PathSeen{Path: at, State: PathSilent, Answered: true, Greeted: true}, now); m.Suspects[at].Times != 2 {
		t.Error("a portal is suspect although its target has answered there")
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

// back is a planner whose path works but is not at home, where the leg's portal was tried and
// reached a moment ago.
func back() (p *planner, home Path) {
	p = mover()
	l := &p.w.Links[0]
	path := &p.s.Paths[0]
	path.Silent, path.Looks = time.Time{}, 0
	p.s.Legs = map[block.LegID]LegSeen{l.Leg: {Live: true}}
	home = Path{l.NQN, p.inTurn(l)[0]}
	if path.Portal == home.Portal {
		path.Portal = p.inTurn(l)[1]
	}
	p.s.Tried = map[Path]Tried{home: {At: p.s.Now.Add(-time.Second), OK: true}}
	return p, home
}

func TestAPathGoesBackToItsPortal(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(p *planner, home Path)
		want   func(p *planner, home Path) string
	}{
		{"reached", func(*planner, Path) {}, func(p *planner, home Path) string {
			return fmt.Sprintf("move %v to %v", p.s.Paths[0].Path, home.Portal)
		}},
		{"not tried yet", func(p *planner, home Path) { p.s.Tried = nil }, func(_ *planner, home Path) string { return "try " + home.String() }},
		{"tried long ago", func(p *planner, home Path) { p.s.Tried[home] = Tried{At: p.s.Now.Add(-tryEvery), OK: true} }, func(_ *planner, home Path) string { return "try " + home.String() }},
		{"not reached", func(p *planner, home Path) { p.s.Tried[home] = Tried{At: p.s.Now} }, nil},
		{"suspect", func(p *planner, home Path) { // and the third one is not better
			p.m.FellSilent(PathSeen{Path: home, Answered: true}, p.s.Now)
			p.w.Links[0].Portals = []block.Portal{home.Portal, p.s.Paths[0].Portal}
		}, nil},
		{"at home", func(p *planner, home Path) { p.s.Paths[0].Portal = home.Portal }, nil},
		{"while the path is silent", func(p *planner, _ Path) { p.s.Paths[0].Silent = p.s.Now }, nil},
		{"while it is moved", func(p *planner, _ Path) { p.s.Paths[0].Moving = true }, nil},
		{"before the path has answered", func(p *planner, _ Path) { p.s.Paths[0].Answered = false }, nil},
		{"while a drive behind it hangs", func(p *planner, _ Path) { p.s.Legs = nil }, nil},
		{"of a target that keeps old controllers", func(p *planner, _ Path) { p.s.Paths[0].Replaces = false }, nil},
		{"where a move interrupts others", func(p *planner, _ Path) { p.s.Paths[0].Stays = true }, nil},
		{"to a portal of another transport", func(p *planner, home Path) {
			for i := range p.w.Links[0].Portals {
				p.w.Links[0].Portals[i].Transport = block.RDMA
			}
			p.s.Tried[Path{home.Subsystem, block.Portal{Transport: block.RDMA, Address: home.Portal.Address, Port: home.Portal.Port}}] = Tried{At: p.s.Now, OK: true}
		}, nil},
		{"after the portal in use is no longer listed", func(p *planner, home Path) { p.w.Links[0].Portals = []block.Portal{home.Portal} }, func(p *planner, home Path) string {
			return fmt.Sprintf("move %v to %v", p.s.Paths[0].Path, home.Portal)
		}},
	} {
		p, home := back()
		c.change(p, home)
		var want []string
		if c.want != nil {
			want = []string{c.want(p, home)}
		}
		p.goBack()
		if got := p.moves(); !slices.Equal(got, want) {
			t.Errorf("%s: %q, want %q", c.name, got, want)
		}
	}
}

// A leg changes from the kernel to the process of its target at the next portal but one, or back. Its path follows,
// also one that has lost its connection: the leg may have changed without its host.
func TestAPathFollowsItsLegToTheOtherPart(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(p *planner)
		want   bool
	}{
		{"works", func(*planner) {}, true},
		{"lost, by an agent that has asked nobody yet", func(p *planner) {
			p.s.Paths[0].State, p.s.Paths[0].Replaces, p.s.Legs = PathSilent, false, nil
		}, true},
		{"silent", func(p *planner) { p.s.Paths[0].Silent = p.s.Now }, false},
		{"of a target that keeps old controllers", func(p *planner) { p.s.Paths[0].Replaces = false }, false},
		{"while a drive behind it hangs", func(p *planner) { p.s.Legs = nil }, false},
		{"moves already", func(p *planner) { p.s.Paths[0].Moving = true }, false},
		{"beside one that has followed", func(p *planner) {
			p.s.Paths[0].State = PathSilent
			p.s.Paths = append(p.s.Paths, PathSeen{Path: Path{p.s.Paths[0].Subsystem, p.w.Links[0].Portals[0]}, State: PathLive})
		}, false},
		{"over RDMA", func(p *planner) { p.s.Paths[0].Portal.Transport = block.RDMA }, false},
		{"at a portal that is listed", func(p *planner) { p.w.Links[0].Portals = append(p.w.Links[0].Portals, p.s.Paths[0].Portal) }, false},
	} {
		for _, by := range []block.ServedBy{block.InProcess, block.InKernel} {
			p, _ := back()
			at := p.s.Paths[0].Portal
			other, _ := at.Process()
			if by == block.InKernel {
				p.s.Paths[0].Portal, other = other, at
			}
			p.w.Links[0].Portals = []block.Portal{other}
			c.change(p)
			var want []string
			if c.want {
				want = []string{fmt.Sprintf("move %v to %v at %v", p.s.Paths[0].Path, by, other)}
			}
			p.goBack()
			if got := p.moves(); !slices.Equal(got, want) {
				t.Errorf("%s, %v: %q, want %q", c.name, by, got, want)
			}
		}
	}
}

// Volumes begin at different rails, and so do the columns of a volume and the copies of a column.
func TestRailsAreBalanced(t *testing.T) {
	rails := func(node string) (all []block.Portal) {
		for _, rail := range []string{"a", "b"} {
			all = append(all, block.Portal{Transport: block.TCP, Address: node + rail, Port: 4420, Rail: rail})
		}
		if node == "t1" { // targets may list their portals in any order
			slices.Reverse(all)
		}
		return all
	}
	first := func(volume, column, copy int, rail string) string {
		l := Link{Column: column, Copy: copy, Portals: rails(fmt.Sprintf("t%d", copy))}
		p := &planner{c: Capabilities{Rail: rail}, w: &Wanted{Volume: block.VolumeID{UUID: block.UUIDFromRandom([16]byte{byte(volume)})}}, m: &Memory{}, s: &Seen{}}
		return p.inTurn(&l)[0].Address[2:]
	}
	used := map[string]int{}
	for volume := range 64 {
		a := first(volume, 0, 0, "")
		used[a]++
		if b := first(volume, 0, 1, ""); b == a {
			t.Errorf("volume %d: both copies of a column begin at rail %s", volume, a)
		}
		if b := first(volume, 1, 0, ""); b == a {
			t.Errorf("volume %d: two columns begin at rail %s", volume, a)
		}
		if b := first(volume, 0, 1, "b"); b != "b" {
			t.Errorf("volume %d: a host of rail b begins at rail %s", volume, b)
		}
		if b := first(volume, 0, 0, "elsewhere"); b != a {
			t.Errorf("volume %d: a host of a rail that the target lacks begins at rail %s, others at %s", volume, b, a)
		}
	}
	if used["a"] < 16 || used["b"] < 16 {
		t.Errorf("64 volumes begin at the rails %v", used)
	}
}

// A host that is near to a network begins there, unless its rail says otherwise.
func TestNearNetworksComeFirst(t *testing.T) {
	portals := []block.Portal{
		{Transport: block.TCP, Address: "192.0.2.2", Port: 4420, Rail: "a"},
		{Transport: block.TCP, Address: "198.51.100.2", Port: 4420, Rail: "b"},
		{Transport: block.TCP, Address: "2001:db8::2", Port: 4420, Rail: "c"},
	}
	for near, want := range map[string]string{"192.0.2.0/24": "192.0.2.2", "198.51.100.0/24": "198.51.100.2", "2001:db8::/64": "2001:db8::2"} {
		for volume := range 16 {
			p := &planner{c: Capabilities{Near: []netip.Prefix{netip.MustParsePrefix(near)}}, w: &Wanted{Volume: block.VolumeID{UUID: block.UUIDFromRandom([16]byte{byte(volume)})}}, m: &Memory{}, s: &Seen{}}
			l := Link{Portals: slices.Clone(portals)}
			if got := p.inTurn(&l); got[0].Address != want || len(got) != len(portals) {
				t.Errorf("volume %d near %s begins with %v, want %s first and the others after it", volume, near, got, want)
			}
			p.c.Rail = "a"
			if got := p.inTurn(&l)[0].Address; got != "192.0.2.2" {
				t.Errorf("volume %d near %s, of rail a, begins at %s", volume, near, got)
			}
		}
	}
}

// What is preferred for a volume goes before what its host prefers for all.
func TestAVolumePrefersItsOwnNetwork(t *testing.T) {
	portals := []block.Portal{
		{Transport: block.TCP, Address: "192.0.2.2", Port: 4420, Rail: "a"},
		{Transport: block.TCP, Address: "198.51.100.2", Port: 4420, Rail: "b"},
		{Transport: block.TCP, Address: "203.0.113.2", Port: 4420, Rail: "c"},
	}
	near := func(text string) []netip.Prefix { return []netip.Prefix{netip.MustParsePrefix(text)} }
	for name, test := range map[string]struct {
		of   Wanted
		want []string
	}{
		"nothing":              {Wanted{}, []string{"198.51.100.2", "203.0.113.2", "192.0.2.2"}},
		"a rail":               {Wanted{Rail: "a"}, []string{"192.0.2.2", "198.51.100.2", "203.0.113.2"}},
		"a network":            {Wanted{Near: near("192.0.2.0/24")}, []string{"192.0.2.2", "198.51.100.2", "203.0.113.2"}},
		"both":                 {Wanted{Rail: "c", Near: near("192.0.2.0/24")}, []string{"203.0.113.2", "192.0.2.2", "198.51.100.2"}},
		"a rail that is no":    {Wanted{Rail: "d"}, []string{"198.51.100.2", "203.0.113.2", "192.0.2.2"}},
		"a network that is no": {Wanted{Near: near("10.0.0.0/8")}, []string{"198.51.100.2", "203.0.113.2", "192.0.2.2"}},
	} {
		for volume := range 16 {
			w := test.of
			w.Volume = block.VolumeID{UUID: block.UUIDFromRandom([16]byte{byte(volume)})}
			w.Links = []Link{{Portals: slices.Clone(portals)}}
			p := &planner{c: Capabilities{Rail: "b", Near: near("203.0.113.0/24")}, w: &w, m: &Memory{}, s: &Seen{}}
			var got []string
			for _, portal := range p.inTurn(&w.Links[0]) {
				got = append(got, portal.Address)
			}
			if !slices.Equal(got, test.want) {
				t.Errorf("a volume that prefers %s: %v, want %v", name, got, test.want)
			}
			p.notePreference()
			if told := len(p.v.Paths) > 0; told != strings.HasSuffix(name, "that is no") {
				t.Errorf("a volume that prefers %s: it is told %q", name, p.v.Paths)
			}
		}
	}
}

func TestTheOperatorIsToldOfSuspectPortals(t *testing.T) {
	p := mover()
	at := PathSeen{Path: Path{"nqn.a", portal(1)}, Answered: true}
	p.m.FellSilent(at, p.s.Now)
	p.m.FellSilent(at, p.s.Now)
	p.noteSuspects()
	want := []string{"portal tcp://192.0.2.2:4420 of t0 is suspect: it has fallen silent 2 times, and is used again from 2001-09-09T01:47:00Z on, earlier only if no other answers"}
	if !slices.Equal(p.v.Paths, want) {
		t.Errorf("suspects %q, want %q", p.v.Paths, want)
	}
}

// lossOf is why a planner counts the leg of its only copy as lost; nothing if it does not.
func (p *planner) lossOf() Loss {
	l := &p.w.Links[0]
	m := member{Leg: l.Leg, Link: l, Paths: []Path{p.s.Paths[0].Path}}
	p.judge(&m, CopySeen{State: InSync, Leg: l.Leg})
	if m.Lost.any() && !m.Waiting {
		return Loss{Text: "I/O is not expected to wait for it"}
	}
	return m.Lost
}

// refused is a planner whose leg's three portals have all refused connections for 300 ms, the last
// time a moment ago.
func refused() *planner {
	p := mover()
	p.l.Refused = 300 * time.Millisecond
	p.s.Paths[0].State = PathSilent
	p.s.Legs = map[block.LegID]LegSeen{legID(0, 0): {Ways: []WaySeen{{Path: p.s.Paths[0].Path, Silent: p.s.Now.Add(-350 * time.Millisecond)}}}}
	p.s.Tried = map[Path]Tried{}
	for _, portal := range p.w.Links[0].Portals {
		p.s.Tried[Path{"nqn.a", portal}] = p.refusedFor(300 * time.Millisecond)
	}
	return p
}

// refusedFor is a portal that has refused for so long.
func (p *planner) refusedFor(d time.Duration) Tried {
	last := p.s.Now.Add(-50 * time.Millisecond)
	return Tried{At: last, Refused: Refusals{First: last.Add(-d), Last: last}}
}

func TestALegIsLostSoonerIfAllPortalsOfItsTargetRefuse(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(p *planner, second Path)
		lost   bool
	}{
		{"all refuse", func(*planner, Path) {}, true},
		{"one has refused only now: the target may be starting", func(p *planner, second Path) { p.s.Tried[second] = p.refusedFor(200 * time.Millisecond) }, false},
		{"one has refused once", func(p *planner, second Path) { p.s.Tried[second] = p.refusedFor(0) }, false},
		{"one is silent", func(p *planner, second Path) { p.s.Tried[second] = Tried{At: p.s.Now} }, false},
		{"one accepts", func(p *planner, second Path) { p.s.Tried[second] = Tried{At: p.s.Now, OK: true} }, false},
		{"one was not tried", func(p *planner, second Path) { delete(p.s.Tried, second) }, false},
		{"one is not tried any more", func(p *planner, _ Path) { p.s.Now = p.s.Now.Add(2 * time.Second) }, false},
		{"one is connected", func(p *planner, _ Path) { p.s.Paths[0].State = PathLive }, false},
		{"no portal is listed", func(p *planner, _ Path) { p.w.Links[0].Portals = nil }, false},
		{"a data path that cannot tell", func(p *planner, _ Path) { p.l.Refused = 0 }, false},
	} {
		p := refused()
		c.change(p, Path{"nqn.a", p.w.Links[0].Portals[1]})
		if why := p.lossOf(); why.any() != c.lost {
			t.Errorf("%s: lost %v (%s), want %v", c.name, why.any(), why, c.lost)
		}
	}
}

// Refusals count together while attempts follow one another.
func TestRefusalsFollowOneAnother(t *testing.T) {
	at := time.Unix(1e9, 0)
	var r Refusals
	for range 3 {
		r = r.Again(at)
		at = at.Add(refusalsLast)
	}
	if d := r.Last.Sub(r.First); d != 2*refusalsLast {
		t.Errorf("three refusals last for %v, want %v", d, 2*refusalsLast)
	}
	if r = r.Again(at.Add(1)); r.First != r.Last {
		t.Errorf("refusals with a pause between them last for %v, want 0", r.Last.Sub(r.First))
	}
}

// While a portal refuses, the others are tried as often: only all of them together tell.
func TestTheOtherPortalsOfATargetThatRefusesAreTried(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(p *planner, first, second Path)
		want   int
	}{
		{"all tried before the last refusal", func(p *planner, first, _ Path) {
			p.s.Tried[first] = Tried{At: p.s.Now, Refused: Refusals{p.s.Now, p.s.Now}}
		}, 2},
		{"one tried since", func(p *planner, first, second Path) {
			p.s.Tried[first] = Tried{At: p.s.Now, Refused: Refusals{p.s.Now, p.s.Now}}
			p.s.Tried[second] = Tried{At: p.s.Now, OK: true}
		}, 1},
		{"all tried since", func(*planner, Path, Path) {}, 0},
		{"the portal in use is silent", func(p *planner, first, _ Path) { p.s.Tried = nil }, 0},
		{"connected", func(p *planner, first, _ Path) { p.s.Paths[0].State, p.s.Tried[first] = PathLive, Tried{At: p.s.Now} }, 0},
		{"no longer asked", func(p *planner, _, _ Path) { p.s.Now = p.s.Now.Add(2 * time.Second) }, 0},
	} {
		p := refused()
		c.change(p, p.s.Paths[0].Path, Path{"nqn.a", p.w.Links[0].Portals[1]})
		p.tryRefused()
		if len(p.orders) != c.want {
			t.Errorf("%s: %q, want %d tries", c.name, p.moves(), c.want)
		}
	}
}

func TestALegIsLostSoonerIfItsWholeTargetIsSilent(t *testing.T) {
	now := time.Unix(1e9, 0)
	way := func(mute time.Duration) WaySeen {
		return WaySeen{Path: Path{"nqn.a", portal(0)}, Silent: now.Add(-mute), Mute: now.Add(-mute), Looks: 3}
	}
	quiet := WaySeen{Path: Path{"nqn.a", portal(0)}, Silent: now.Add(-1900 * time.Millisecond), Looks: 9}
	for _, c := range []struct {
		name string
		ways []WaySeen
		lost bool
	}{
		{"its target answers nothing", []WaySeen{way(1100 * time.Millisecond)}, true},
		{"its target has answered nothing for a moment", []WaySeen{way(time.Second)}, false},
		{"its target answers, its drive does not", []WaySeen{quiet}, false},
		{"another way to it is silent for a moment", []WaySeen{way(1100 * time.Millisecond), way(time.Second)}, false},
		{"nothing is known", nil, false},
	} {
		p := mover()
		p.l.Mute = time.Second
		p.s.Now, p.s.Legs = now, map[block.LegID]LegSeen{legID(0, 0): {Ways: c.ways}}
		for _, portal := range p.w.Links[0].Portals {
			p.s.Trying[Path{"nqn.a", portal}] = now.Add(-acceptsFor)
		}
		if why := p.lossOf(); why.any() != c.lost {
			t.Errorf("%s: lost %v (%s), want %v", c.name, why.any(), why, c.lost)
		}
		accepts := Path{"nqn.a", p.w.Links[0].Portals[2]}
		if p.s.Tried = map[Path]Tried{accepts: {At: now, OK: true}}; p.lossOf().any() {
			t.Errorf("%s, and one of its portals accepts connections: lost", c.name)
		}
		if p.s.Tried = map[Path]Tried{accepts: {At: now.Add(-2 * acceptsFor), OK: true}}; p.lossOf().any() {
			t.Errorf("%s, and one of its portals has accepted a connection, but not yet the one that is tried now: lost", c.name)
		}
		if p.l.Mute = 0; p.lossOf().any() {
			t.Errorf("%s: lost on a data path that cannot tell", c.name)
		}
	}
}

// A target that is slow at first may be gone a moment later: while it is silent its portals are tried again, the less
// often the longer that takes.
func TestPortalsOfASilentTargetAreTriedAgain(t *testing.T) {
	for _, c := range []struct {
		silent, tried time.Duration // ago
		again         bool
	}{
		{tryAfter - 1, time.Hour, false},
		{tryAfter, time.Hour, true},
		{tryAfter, tryAfter, true},
		{300 * time.Millisecond, tryAgain - 1, false},
		{300 * time.Millisecond, tryAgain, true},
		{4 * time.Second, time.Second - 1, false},
		{4 * time.Second, time.Second, true},
	} {
		p := mover()
		path := &p.s.Paths[0]
		path.Silent, p.s.Trying = p.s.Now.Add(-c.silent), nil
		p.s.Tried = map[Path]Tried{path.Path: {At: p.s.Now.Add(-c.tried), OK: true}}
		p.trySilent()
		if got := slices.Contains(p.orders, Order(Try{path.Path})); got != c.again {
			t.Errorf("silent for %v, and accepted a connection %v ago: tried again %v, want %v", c.silent, c.tried, got, c.again)
		}
	}
}

// Two copies of a column, of targets that have been silent for longer than the patience with a
// target: the copies leave early only while another one answers.
func TestALegIsLostSoonerOnlyIfAnotherCopyAnswers(t *testing.T) {
	now := time.Unix(1e9, 0)
	way := func(mute time.Duration) []WaySeen {
		w := WaySeen{Answers: true, Heard: now}
		if mute > 0 {
			w = WaySeen{Silent: now.Add(-mute), Mute: now.Add(-mute), Looks: 9, Heard: now}
		}
		return []WaySeen{w}
	}
	for _, c := range []struct {
		name          string
		first, second time.Duration
		seen          CopyState // of the second
		lost          bool
	}{
		{"the other answers", time.Second, 0, InSync, true},
		{"the other has just fallen silent", time.Second, 100 * time.Millisecond, InSync, false},
		{"the other is silent as well", time.Second, time.Second, InSync, false},
		{"the other is being rebuilt", time.Second, 0, Rebuilding, false},
		{"the other is silent as well, for long", 3 * time.Second, 3 * time.Second, InSync, true},
	} {
		w := newWorld(ways["copies"], 1, 2)
		w.until(t, Serving)
		s := w.look()
		s.Now = now
		for copy, mute := range []time.Duration{c.first, c.second} {
			l := s.Legs[legID(0, copy)]
			l.Ways = way(mute)
			s.Legs[legID(0, copy)] = l
		}
		s.Columns[0].Copies[1].State = c.seen
		w.slots[Place{0, 1}].inSync = c.seen == InSync
		w.link()
		s.Trying = map[Path]time.Time{}
		for node := range 2 {
			s.Trying[Path{w.subsystem(node), portal(node)}] = now.Add(-acceptsFor)
		}
		p := &planner{w: w.wanted, m: w.memory, s: s, c: w.caps, l: Limits{Window: 2 * time.Second, Lease: 8 * time.Second, Mute: 700 * time.Millisecond}}
		p.findMembers()
		if why := p.members[0].Lost; why.any() != c.lost {
			t.Errorf("%s: lost %v (%s), want %v", c.name, why.any(), why, c.lost)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
)

// railed is like copied for one client, with two rails to each target.
func railed(t *testing.T, copies int, f func(*mirror)) {
	copied(t, copies, 1, func(c *cluster) {
		withoutCaches(c)
		c.rails = []string{"a", "b"}
	}, f)
}

// rail is the rail of c1's connection to a target, and the other one.
func (m *mirror) rail(of *targetHost) (active, other string) {
	m.network.mu.Lock()
	defer m.network.mu.Unlock()
	for c := range m.network.conns {
		if c.out.pair == (pair{"c1", of.name + "-b"}) {
			return of.name + "-b", of.name + "-a"
		}
	}
	return of.name + "-a", of.name + "-b"
}

// write begins to write an edition to a unit.
func (m *mirror) write(number uint64, at int64) <-chan error {
	done, device := make(chan error, 1), m.users.device("c1").volume
	m.did("c1 writes edition %d", number)
	go func() { done <- block.WriteAt(device, edition(number), at*unit) }()
	return done
}

// acknowledged waits for writes.
func (m *mirror) acknowledged(writes ...<-chan error) {
	m.t.Helper()
	for _, done := range writes {
		select {
		case err := <-done:
			if err != nil {
				m.t.Fatal(err)
			}
		case <-time.After(time.Minute):
			m.t.Fatal("a write is not acknowledged within a minute")
		}
	}
}

// revisions are those of the legs; each loss gives a leg a new one.
func (m *mirror) revisions() (all []string) {
	m.t.Helper()
	for _, l := range m.volume().GetLegs() {
		all = append(all, fmt.Sprintf("%s: %v at revision %d", l.GetNode(), l.GetState(), l.GetRevision()))
	}
	return all
}

// Each direction of a rail, and both, fall silent while the user writes. The writes go on through
// the other rail, before the leg counts as lost.
func TestALegGoesOnThroughAnotherRail(t *testing.T) {
	for _, name := range []string{"both ways", "towards the target", "towards the host"} {
		t.Run(name, func(t *testing.T) {
			railed(t, 2, func(m *mirror) {
				m.put("c1", 1, everyUnit...)
				legs := m.revisions()
				rail, other := m.rail(m.first)
				m.network.cut("c1", rail, name != "towards the host")
				m.network.cut(rail, "c1", name != "towards the target")
				began := time.Now()
				m.acknowledged(m.write(2, 0))
				if took := time.Since(began); took > 1500*time.Millisecond {
					t.Errorf("a write took %v, want less than the window of a leg, 2 s", took)
				}
				m.put("c1", 2, everyUnit...)
				if now, _ := m.rail(m.first); now != other {
					t.Errorf("the connection is through %s, want %s", now, other)
				}
				time.Sleep(10 * time.Second)
				m.network.heal()
				time.Sleep(10 * time.Second)
				if now := m.revisions(); !slices.Equal(now, legs) {
					t.Errorf("the legs were %q and are %q", legs, now)
				}
				m.holdsWithout(m.second, 2, everyUnit...)
			})
		})
	}
}

// A write is sent and held up on a rail that falls silent. Its retry through the other rail is
// acknowledged, and a newer write to the same place. Then the rail delivers what it has held up.
func TestAWriteThatASilentRailHeldUpDoesNotLandAfterItsRetry(t *testing.T) {
	railed(t, 1, func(m *mirror) {
		m.put("c1", 1, 0)
		rail, _ := m.rail(m.first)
		m.network.delay("c1", rail, time.Millisecond) // so that it is sent whole
		m.network.part("c1", rail, true)
		m.acknowledged(m.write(2, 0))
		m.acknowledged(m.write(3, 0))
		m.network.part("c1", rail, false)
		time.Sleep(time.Second)
		m.holds("c1", 3, 0)
	})
}

// The target has received a write when the rail falls silent, and its reader of that connection
// goes on only after the write's retry, and a newer write, were acknowledged.
func TestAWriteReceivedThroughASilentRailDoesNotLandAfterItsRetry(t *testing.T) {
	railed(t, 1, func(m *mirror) {
		m.put("c1", 1, 0)
		rail, _ := m.rail(m.first)
		m.network.delay("c1", rail, time.Millisecond)
		goOn := sync.OnceFunc(m.network.stall(rail, "c1"))
		defer goOn()
		again := m.write(2, 0)
		time.Sleep(100 * time.Millisecond)
		m.network.part("c1", rail, true)
		m.acknowledged(again)
		m.acknowledged(m.write(3, 0))
		goOn()
		time.Sleep(time.Second)
		m.holds("c1", 3, 0)
	})
}

// A write is inside the target's drive, which is slow, when the rail falls silent. Nothing is
// acknowledged through the other rail before that write has left the drive.
func TestNoWriteIsAcknowledgedThroughAnotherRailWhileAnOldOneIsInTheDrive(t *testing.T) {
	railed(t, 1, func(m *mirror) {
		m.put("c1", 1, 0)
		rail, _ := m.rail(m.first)
		m.first.platter.hangWrites()
		old := m.write(2, 0)
		time.Sleep(100 * time.Millisecond)
		m.network.part("c1", rail, true)
		time.Sleep(time.Second)
		goOn := m.first.platter.overtake()
		defer goOn()
		newer := m.write(3, 1)
		time.Sleep(3 * time.Second)
		select {
		case err := <-newer:
			t.Fatalf("a write was acknowledged, with %v, while an older connection's write is in the drive", err)
		default:
		}
		goOn()
		m.acknowledged(old, newer)
		m.acknowledged(m.write(4, 0))
		time.Sleep(time.Second)
		m.holds("c1", 4, 0)
		m.holds("c1", 3, 1)
	})
}

// A rail flaps: it is down for a second, again and again. It is used again only after it has been
// left alone for longer and longer, and the operator sees why. No leg is lost.
func TestARailThatFlapsIsLeftAlone(t *testing.T) {
	railed(t, 2, func(m *mirror) {
		legs := m.revisions()
		home, _ := m.rail(m.first)
		moves, told := 0, 0
		for range 60 {
			at, _ := m.rail(m.first)
			m.network.part("c1", home, true)
			m.acknowledged(m.write(1, 0))
			time.Sleep(time.Second)
			m.network.part("c1", home, false)
			if now, _ := m.rail(m.first); now != at {
				moves++
			}
			if strings.Contains(m.explain(), "on host c1, portal tcp://"+home) {
				told++
			}
			time.Sleep(time.Second)
		}
		if moves > 5 {
			t.Errorf("in two minutes of flapping the connection changed its rail %d times", moves)
		}
		if told < 30 { // not in the moments between its return and its next outage
			t.Errorf("explain named the rail %d times of 60, and says:\n%s", told, m.explain())
		}
		time.Sleep(10 * time.Minute)
		if now, _ := m.rail(m.first); now != home {
			t.Errorf("ten minutes after the last outage the connection is at %s, want %s", now, home)
		}
		if said := m.explain(); strings.Contains(said, "suspect") {
			t.Errorf("explain still says:\n%s", said)
		}
		if now := m.revisions(); !slices.Equal(now, legs) {
			t.Errorf("the legs were %q and are %q", legs, now)
		}
	})
}

// An operator takes a rail from a target and gives it another, while a volume is in use: the
// target restarts with other portals.
func TestAConnectionFollowsThePortalsOfItsTarget(t *testing.T) {
	railed(t, 2, func(m *mirror) {
		m.put("c1", 1, everyUnit...)
		at, other := m.rail(m.first)
		m.first.leave()
		m.rails = []string{"c", other[len(m.first.name)+1:]}
		m.first.start()
		m.acknowledged(m.write(2, 0))
		m.attachedAndHealthy()
		m.network.part("c1", other, true)
		m.acknowledged(m.write(3, 0))
		time.Sleep(time.Minute)
		m.attachedAndHealthy()
		m.network.mu.Lock()
		used := map[string]bool{}
		for c := range m.network.conns {
			if c.out.pair.from == "c1" && hostOf(c.out.pair.to) == m.first.name {
				used[c.out.pair.to] = true
			}
		}
		m.network.mu.Unlock()
		if added := m.first.name + "-c"; len(used) != 1 || !used[added] {
			t.Errorf("the connection is at %v, want %s; it was at %s", used, added, at)
		}
		m.holdsWithout(m.second, 3, 0)
	})
}

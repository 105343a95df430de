// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// spared runs f over a mirror of two copies with a third target that has no copy.
func spared(t *testing.T, f func(m *mirror, spare *targetHost)) { sparedAs(t, withoutCaches, f) }

// sparedAs is spared; set may change the cluster before it starts.
func sparedAs(t *testing.T, set func(*cluster), f func(m *mirror, spare *targetHost)) {
	synctest.Test(t, func(t *testing.T) {
		m := &mirror{t: t}
		m.cluster = newCluster(t, 3, 2, func(c *cluster) {
			m.users = share(c)
			set(c)
		})
		defer m.close()
		m.createVolume(block.Layout{Stripes: 1, Copies: 2})
		m.attachAs(m.clients[0], pb.AttachMode_ATTACH_MODE_EXCLUSIVE)
		var spare *targetHost
		for _, h := range m.targets {
			switch i := slices.IndexFunc(m.volume().GetLegs(), func(l *pb.Leg) bool { return l.GetNode() == h.name }); i {
			case 0:
				m.first = h
			case 1:
				m.second = h
			default:
				spare = h
			}
		}
		f(m, spare)
	})
}

// copiesOn waits until the volume is healthy, with its copies on these targets and nowhere
// else.
func (m *mirror) copiesOn(hosts ...*targetHost) {
	m.t.Helper()
	m.eventually(fmt.Sprintf("copies on %v", hosts), func(ctx context.Context) error {
		v, err := m.operator.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volumeName})
		if err != nil {
			return err
		}
		var on []string
		for _, l := range v.GetLegs() {
			on = append(on, fmt.Sprintf("%s: %v", l.GetNode(), l.GetState()))
		}
		slices.Sort(on)
		var want []string
		for _, h := range hosts {
			want = append(want, fmt.Sprintf("%s: %v", h.name, pb.LegState_LEG_STATE_IN_SYNC))
		}
		slices.Sort(want)
		if !slices.Equal(on, want) || v.GetHealth() != pb.Health_HEALTH_HEALTHY {
			return fmt.Errorf("the volume is %v, and its copies are %v", v.GetHealth(), on)
		}
		return nil
	})
}

// A target is gone for longer than the policy allows: its copy is made again on another one,
// under writes. The copy that is left then dies, too, and the new one has everything. When
// the lost target returns, its old copy is not used any more, and it can have a new one.
func TestACopyOfALostTargetIsMadeAgainElsewhere(t *testing.T) {
	spared(t, func(m *mirror, spare *targetHost) {
		m.put("c1", 1, everyUnit...)
		m.second.kill()
		m.put("c1", 2, 0, 7)
		time.Sleep(14 * time.Minute)
		if l := m.volume().GetLegs(); len(l) != 2 {
			t.Errorf("after 14 minutes there are %d legs", len(l))
		}
		time.Sleep(2 * time.Minute)
		m.put("c1", 3, 7, 9)
		m.eventually("the new copy is in sync", func(context.Context) error {
			if l := m.volume().GetLegs(); !slices.ContainsFunc(l, func(l *pb.Leg) bool {
				return l.GetNode() == spare.name && l.GetState() == pb.LegState_LEG_STATE_IN_SYNC
			}) {
				return errors.New(m.explain())
			}
			return nil
		})
		m.second.start()
		m.copiesOn(m.first, spare)
		m.first.kill()
		m.holds("c1", 3, 7, 9)
		m.holds("c1", 2, 0)
		m.holds("c1", 1, 1, 2, 3)
		time.Sleep(16 * time.Minute)
		m.first.start()
		m.copiesOn(m.second, spare)
		m.sameCopies()
	})
}

// A copy is made again elsewhere, the volume is written and detached, and the store is lost.
// The target that was away is back when the store is rebuilt from the drives: its old copy
// must not be believed, nor read.
func TestARebuiltStoreDoesNotBelieveACopyThatWasReplaced(t *testing.T) {
	spared(t, func(m *mirror, spare *targetHost) {
		m.put("c1", 1, everyUnit...)
		m.second.kill()
		time.Sleep(16 * time.Minute)
		m.eventually("the new copy is in sync", func(context.Context) error {
			if m.volume().GetHealth() != pb.Health_HEALTH_HEALTHY {
				return errors.New(m.explain())
			}
			return nil
		})
		m.put("c1", 2, everyUnit...)
		m.detach(m.clients[0], false)
		m.loseStore()
		m.second.start()
		t.Log(m.rebuildStore())
		m.startManager()
		m.attachAs(m.clients[0], pb.AttachMode_ATTACH_MODE_EXCLUSIVE)
		m.holds("c1", 2, everyUnit...)
		m.attachedAndHealthy()
		m.copiesOn(m.first, spare)
		m.sameCopies()
	})
}

// An operator moves a healthy copy under writes: both old copies serve until the new one is
// in sync.
func TestAHealthyCopyIsMovedUnderWrites(t *testing.T) {
	spared(t, func(m *mirror, spare *targetHost) {
		m.put("c1", 1, everyUnit...)
		if _, err := m.operator.MoveLeg(context.Background(), &pb.MoveLegRequest{Volume: volumeName, Copy: m.leg(m.second).GetCopy(), To: spare.name}); err != nil {
			t.Fatal(err)
		}
		for n := uint64(2); n < 30; n++ {
			m.put("c1", n, 0, int64(n), sharedUnits-1)
			time.Sleep(50 * time.Millisecond)
		}
		m.copiesOn(m.first, spare)
		m.first.kill()
		m.holds("c1", 29, 0, 29, sharedUnits-1)
		m.holds("c1", 2, 2)
	})
}

// longestPut writes for a while and returns the longest time that one write took.
func (m *mirror) longestPut(number *uint64, d time.Duration) (longest time.Duration) {
	m.t.Helper()
	for end := time.Now().Add(d); time.Now().Before(end); {
		*number++
		began := time.Now()
		m.put("c1", *number, int64(*number)%sharedUnits)
		longest = max(longest, time.Since(began))
		time.Sleep(10 * time.Millisecond)
	}
	return longest
}

// A target is stopped for maintenance under writes. If that is announced, no write waits longer
// than 0.2 s, from the announcement to the copy's return; if it is not, one does.
func TestAnAnnouncedMaintenanceStallsNoWrite(t *testing.T) {
	for _, announced := range []bool{true, false} {
		t.Run(fmt.Sprintf("announced %v", announced), func(t *testing.T) {
			spared(t, func(m *mirror, _ *targetHost) {
				number := uint64(1)
				m.put("c1", number, everyUnit...)
				longest := m.longestPut(&number, 2*time.Second)
				if announced {
					if _, err := m.operator.MaintainNode(context.Background(), &pb.MaintainNodeRequest{Node: m.second.name, Seconds: 900}); err != nil {
						t.Fatal(err)
					}
					began := time.Now()
					for {
						longest = max(longest, m.longestPut(&number, 10*time.Millisecond))
						if n := m.node(m.second.name); n.GetMaintainedUntil() != nil && len(n.GetStopWaitsFor())+len(n.GetStopsIoOf()) == 0 {
							break
						}
						if time.Since(began) > 10*time.Second {
							t.Fatalf("after 10 s %s waits for %q", m.second.name, m.node(m.second.name).GetStopWaitsFor())
						}
					}
					t.Logf("safe to stop after %v", time.Since(began))
				}
				m.second.kill()
				longest = max(longest, m.longestPut(&number, 20*time.Second))
				m.second.start()
				longest = max(longest, m.longestPut(&number, 10*time.Second))
				m.copiesOn(m.first, m.second)
				m.sameCopies()
				t.Logf("the longest of %d writes took %v", number, longest)
				if longest > 200*time.Millisecond == announced {
					t.Errorf("announced %v: the longest write took %v", announced, longest)
				}
			})
		})
	}
}

// A target is stopped in order under writes, as by systemctl stop, and stopped again right after
// it is back. No write waits longer than 0.2 s, from the stop to the copy's return. A target that
// does not say goodbye costs its hosts their patience.
func TestAnOrderlyStopStallsNoWrite(t *testing.T) {
	for _, goodbye := range []bool{true, false} {
		t.Run(fmt.Sprintf("goodbye %v", goodbye), func(t *testing.T) {
			spared(t, func(m *mirror, _ *targetHost) {
				number := uint64(1)
				m.put("c1", number, everyUnit...)
				longest := m.longestPut(&number, 2*time.Second)
				for range 3 {
					stopped := make(chan time.Duration, 1)
					go func() {
						began := time.Now()
						if goodbye {
							m.second.leave()
						} else {
							m.second.host.leave()
						}
						stopped <- time.Since(began)
					}()
					for len(stopped) == 0 {
						longest = max(longest, m.longestPut(&number, 10*time.Millisecond))
					}
					t.Logf("stopped after %v", <-stopped)
					longest = max(longest, m.longestPut(&number, 20*time.Second))
					m.second.start()
					longest = max(longest, m.longestPut(&number, 5*time.Second))
					m.copiesOn(m.first, m.second)
				}
				m.sameCopies()
				t.Logf("the longest of %d writes took %v", number, longest)
				if longest > 200*time.Millisecond == goodbye {
					t.Errorf("goodbye %v: the longest write took %v", goodbye, longest)
				}
			})
		})
	}
}

// A target's process is replaced by its next one under writes, again and again. No write waits for
// longer than 0.1 s, and nothing is recorded: no copy falls behind. Hosts keep their connections. If the
// next process dies before it begins, hosts lose the leg for a while, as at any crash.
func TestAHandoverStallsNoWriteAndCostsNoCopy(t *testing.T) {
	spared(t, func(m *mirror, _ *targetHost) {
		number := uint64(1)
		m.put("c1", number, everyUnit...)
		longest := m.longestPut(&number, 2*time.Second)
		before, made := m.revisions(), m.connectionsMade()
		for range 5 {
			done := make(chan struct{})
			go func() {
				defer close(done)
				m.second.handOver(true)
			}()
			longest = max(longest, m.longestPut(&number, 3*time.Second))
			<-done
		}
		if longest > 100*time.Millisecond {
			t.Errorf("the longest of %d writes took %v", number, longest)
		}
		if after := m.revisions(); !slices.Equal(after, before) {
			t.Errorf("the legs were %v, and are %v", before, after)
		}
		if now := m.connectionsMade(); !maps.Equal(now, made) {
			t.Errorf("hosts have connected: %v, before it was %v", now, made)
		}
		m.copiesOn(m.first, m.second)
		m.sameCopies()
		m.second.handOver(false)
		m.longestPut(&number, 5*time.Second)
		m.copiesOn(m.first, m.second)
		m.sameCopies()
		t.Logf("the longest of %d writes took %v", number, longest)
	})
}

// connectionsMade counts the connections to targets so far.
func (m *mirror) connectionsMade() map[string]int {
	n := m.network
	n.mu.Lock()
	defer n.mu.Unlock()
	made := maps.Clone(n.made)
	maps.DeleteFunc(made, func(address string, _ int) bool { return !strings.HasSuffix(address, ":4420") })
	return made
}

// A copy that is moved goes on being made while both its source and its place hand over.
func TestAHandoverDuringARebuildLosesNothing(t *testing.T) {
	spared(t, func(m *mirror, spare *targetHost) {
		m.put("c1", 1, everyUnit...)
		if _, err := m.operator.MoveLeg(context.Background(), &pb.MoveLegRequest{Volume: volumeName, Copy: m.leg(m.second).GetCopy(), To: spare.name}); err != nil {
			t.Fatal(err)
		}
		number := uint64(1)
		for range 5 {
			for _, h := range []*targetHost{spare, m.first} {
				h.handOver(true)
				m.longestPut(&number, 20*time.Millisecond)
			}
		}
		m.put("c1", number+1, everyUnit...)
		m.copiesOn(m.first, spare)
		m.first.kill()
		m.holds("c1", number+1, everyUnit...)
	})
}

// A fence that is decided while a target hands over holds: the volume is taken by force, and the next
// host has what was acknowledged, on equal copies.
func TestAFenceDuringAHandoverHolds(t *testing.T) {
	spared(t, func(m *mirror, _ *targetHost) {
		m.put("c1", 1, everyUnit...)
		done := make(chan struct{})
		go func() {
			defer close(done)
			for range 5 {
				m.second.handOver(true)
				time.Sleep(5 * time.Millisecond)
			}
		}()
		m.takenTo(m.clients[1], m.clients[0])
		<-done
		m.attachedAndHealthy()
		m.holds("c2", 1, everyUnit...)
		m.sameCopies()
	})
}

// Both targets of a volume stop at once: one copy stays in sync, and the write that waits for it
// is acknowledged when it is back. A target that is told nothing stops all the same.
func TestTargetsThatStopTogetherLoseNothing(t *testing.T) {
	spared(t, func(m *mirror, _ *targetHost) {
		m.put("c1", 1, everyUnit...)
		both := make(chan time.Duration, 2)
		for _, h := range []*targetHost{m.first, m.second} {
			go func() {
				began := time.Now()
				h.leave()
				both <- time.Since(began)
			}()
		}
		for range 2 {
			if d := <-both; d > longestGoodbye {
				t.Errorf("a target stopped after %v", d)
			}
		}
		late := m.write(2, 0)
		time.Sleep(5 * time.Second)
		m.second.start()
		m.first.start()
		m.acknowledged(late)
		m.copiesOn(m.first, m.second)
		m.sameCopies()
		m.holds("c1", 2, 0)
		m.holds("c1", 1, 1, 2, 3)
	})
}

// A target loses its power, with writes in its drive's cache, and the other one is stopped in
// order before the host has noticed. The copy that still has the writes is not given up.
func TestAnOrderlyStopLosesNothingThatTheOtherTargetHasLost(t *testing.T) {
	mirrored(t, func(*cluster) {}, func(m *mirror) {
		m.put("c1", 1, everyUnit...)
		m.flush("c1")
		m.put("c1", 2, everyUnit...)
		m.first.powerOff(rand.New(rand.NewPCG(1, 1)))
		time.Sleep(30 * time.Millisecond)
		m.second.leave()
		m.first.start()
		m.second.start()
		m.attachedAndHealthy()
		m.holds("c1", 2, everyUnit...)
		m.sameCopies()
	})
}

// node returns what the manager says of a node.
func (m *mirror) node(name string) *pb.Node {
	m.t.Helper()
	nodes, err := m.operator.ListNodes(context.Background(), &pb.ListNodesRequest{})
	if err != nil {
		m.t.Fatal(err)
	}
	return nodes.GetNodes()[slices.IndexFunc(nodes.GetNodes(), func(n *pb.Node) bool { return n.GetName() == name })]
}

// A volume in use gets a third copy under writes, loses both old ones, and goes on. It then gets
// fewer copies again, down to one, and is attached again with one.
func TestAVolumeInUseGetsMoreCopiesAndFewer(t *testing.T) {
	spared(t, func(m *mirror, spare *targetHost) {
		set := func(copies uint32) {
			t.Helper()
			if _, err := m.operator.UpdateVolume(context.Background(), &pb.UpdateVolumeRequest{Volume: volumeName, Copies: copies}); err != nil {
				t.Fatal(err)
			}
		}
		number := uint64(1)
		m.put("c1", number, everyUnit...)
		set(3)
		m.longestPut(&number, 2*time.Second)
		m.copiesOn(m.first, m.second, spare)
		m.sameCopies()
		m.put("c1", number, everyUnit...)
		m.first.kill()
		m.second.kill()
		m.holds("c1", number, everyUnit...)
		m.longestPut(&number, 5*time.Second)
		m.first.start()
		m.second.start()
		m.copiesOn(m.first, m.second, spare)
		m.sameCopies()
		set(2)
		if longest := m.longestPut(&number, 2*time.Second); longest > 200*time.Millisecond {
			t.Errorf("with a copy less, a write took %v", longest)
		}
		m.copiesOn(m.first, m.second)
		set(1)
		if longest := m.longestPut(&number, 2*time.Second); longest > 200*time.Millisecond {
			t.Errorf("with two copies less, a write took %v", longest)
		}
		m.copiesOn(m.first)
		m.put("c1", number, everyUnit...)
		m.detach(m.clients[0], false)
		set(2)
		m.attachAs(m.clients[1], pb.AttachMode_ATTACH_MODE_EXCLUSIVE)
		m.holds("c2", number, everyUnit...)
		m.eventually("two copies again", func(context.Context) error {
			if m.volume().GetHealth() != pb.Health_HEALTH_HEALTHY {
				return errors.New(m.explain())
			}
			return nil
		})
		m.sameCopies()
	})
}

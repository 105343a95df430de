// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"weft.dev/weft/proto/pb"
)

// detachedAndHealthy waits until the detached volume is healed, and checks that nobody could use it
// meanwhile.
func (m *mirror) detachedAndHealthy() {
	m.t.Helper()
	defer func() {
		if m.t.Failed() {
			for _, e := range m.events() {
				m.t.Logf("%v %s: %s", e.GetTime().AsTime().Format(time.TimeOnly), e.GetKind(), e.GetText())
			}
		}
	}()
	m.eventually("the detached volume is healed", func(ctx context.Context) error {
		v, err := m.operator.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volumeName})
		switch {
		case err != nil:
			return err
		case v.GetAttachment() != nil:
			m.t.Fatalf("it is attached to %s", v.GetAttachment().GetNode())
		case m.users.device("c1") != nil && !m.users.device("c1").over() || m.users.device("c2") != nil && !m.users.device("c2").over():
			m.t.Fatal("a host has a device")
		case v.GetHealth() != pb.Health_HEALTH_HEALTHY || v.GetHealing() != nil:
			return fmt.Errorf("it is %v, healed by %q", v.GetHealth(), v.GetHealing().GetNode())
		}
		return nil
	})
	if !m.volume().GetClean() {
		m.t.Error("it does not count as detached cleanly")
	}
}

// healsElsewhere has c1 write, the second copy's target die, c1 write again and be detached, by force or in
// order, and waits until the volume is healed with a copy on another target.
func (m *mirror) healsElsewhere(force bool) {
	m.t.Helper()
	m.put("c1", 1, everyUnit...)
	m.second.kill()
	m.put("c1", 2, 0, 7)
	m.detach(m.clients[0], force)
	time.Sleep(16 * time.Minute)
	m.detachedAndHealthy()
}

// isServedWithoutFirst has the first copy's target die, and checks that c2 reads what healsElsewhere wrote.
func (m *mirror) isServedWithoutFirst() {
	m.t.Helper()
	m.first.kill()
	m.attachAs(m.clients[1], pb.AttachMode_ATTACH_MODE_EXCLUSIVE)
	m.holds("c2", 2, 0, 7)
	m.holds("c2", 1, 1, 2, 3)
}

// healing waits until a host heals the volume.
func (m *mirror) healing() *pb.Attachment {
	m.t.Helper()
	m.eventually("a host heals the volume", func(ctx context.Context) error {
		if h := m.volume().GetHealing(); h.GetState() != pb.AttachmentState_ATTACHMENT_STATE_ATTACHED {
			return fmt.Errorf("host %q is %v", h.GetNode(), h.GetState())
		}
		return nil
	})
	h := m.volume().GetHealing()
	if d := m.users.device(h.GetNode()); d != nil && !d.over() {
		m.t.Errorf("%s, which heals the volume, has a device for users", h.GetNode())
	}
	return h
}

// A detached volume loses a copy, which is made again elsewhere without an attach. Then it loses the
// copy of which that was made: every write that was acknowledged is there.
func TestADetachedVolumeHeals(t *testing.T) {
	for name, force := range map[string]bool{"detached cleanly": false, "taken by force": true} {
		t.Run(name, func(t *testing.T) {
			spared(t, func(m *mirror, spare *targetHost) {
				m.healsElsewhere(force)
				m.isServedWithoutFirst()
				m.second.start()
				m.first.start()
				m.copiesOn(m.first, spare)
				m.sameCopies()
			})
		})
	}
}

// What a host has copied is in the caches of drives until it is flushed: the copy counts only after that. So
// a healed leg whose target then loses power has everything.
func TestAHealedCopySurvivesAPowerCut(t *testing.T) {
	sparedAs(t, asItIs, func(m *mirror, spare *targetHost) {
		m.healsElsewhere(false)
		m.powerCut(spare)
		time.Sleep(5 * time.Second)
		m.detachedAndHealthy()
		m.isServedWithoutFirst()
	})
}

func TestADetachedThinVolumeHeals(t *testing.T) {
	thin := func(c *cluster) { withoutCaches(c); c.thin = true }
	sparedAs(t, thin, func(m *mirror, spare *targetHost) {
		m.healsElsewhere(false)
		m.isServedWithoutFirst()
	})
}

// events are those of the volume.
func (m *mirror) events() []*pb.Event {
	m.t.Helper()
	list, err := m.operator.ListEvents(context.Background(), &pb.ListEventsRequest{Object: "volume " + volumeName, Limit: 1000})
	if err != nil {
		m.t.Fatal(err)
	}
	return list.GetEvents()
}

// slow makes a rebuild of the volume take minutes.
func (m *mirror) slow() {
	m.t.Helper()
	m.eventually("bound the rate of rebuilds", func(ctx context.Context) error {
		rate := uint64(1 << 20)
		_, err := m.operator.UpdateVolume(ctx, &pb.UpdateVolumeRequest{Volume: volumeName, RebuildBytesPerSecond: &rate})
		return err
	})
}

// The host that heals a volume dies, and a user wants the volume: it gets it at once, what was copied
// counts, and nothing is compared.
func TestAUserComesBeforeHealing(t *testing.T) {
	for name, fault := range map[string]func(m *mirror, healer *clientHost){
		"it heals":                 func(*mirror, *clientHost) {},
		"the host dies":            func(_ *mirror, healer *clientHost) { healer.kill() },
		"it is cut off":            func(m *mirror, healer *clientHost) { m.network.part(healer.name, "m1", true) },
		"the manager starts again": func(m *mirror, _ *clientHost) { m.managers[0].kill(); m.startManager() },
	} {
		t.Run(name, func(t *testing.T) {
			spared(t, func(m *mirror, spare *targetHost) {
				m.put("c1", 1, everyUnit...)
				m.slow()
				m.second.kill()
				m.put("c1", 2, 0, 7)
				m.detach(m.clients[0], false)
				time.Sleep(15*time.Minute + 30*time.Second)
				h := m.healing()
				healer, other := m.clients[0], m.clients[1]
				if h.GetNode() == other.name {
					healer, other = other, healer
				}
				fault(m, healer)
				began := time.Now()
				m.attachAs(other, pb.AttachMode_ATTACH_MODE_EXCLUSIVE)
				if took := time.Since(began); took > 3*time.Second {
					t.Errorf("the user waited for %v", took)
				}
				m.put(other.name, 3, 9)
				m.holds(other.name, 2, 0, 7)
				m.network.heal()
				m.eventually("the copy is in sync", func(context.Context) error {
					if m.leg(spare).GetState() != pb.LegState_LEG_STATE_IN_SYNC {
						return errors.New(m.explain())
					}
					return nil
				})
				m.first.kill()
				m.holds(other.name, 3, 9)
				m.holds(other.name, 2, 0, 7)
				m.holds(other.name, 1, 1, 2, 3)
				for _, e := range m.events() {
					if e.GetKind() == "volume.granted" && e.GetAttributes()["equalize"] == "true" {
						t.Errorf("copies were compared: %s", e.GetText())
					}
				}
			})
		})
	}
}

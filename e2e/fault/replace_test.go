// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// spared runs f over a mirror of two copies with a third target that has no copy.
func spared(t *testing.T, f func(m *mirror, spare *targetHost)) {
	synctest.Test(t, func(t *testing.T) {
		m := &mirror{t: t}
		m.cluster = newCluster(t, 3, 2, func(c *cluster) {
			m.users = share(c)
			withoutCaches(c)
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

// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr"
	kept "weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/store"
)

// withoutLevel makes a store what a version before levels wrote.
func (c *cluster) withoutLevel(h *managerHost) {
	c.t.Helper()
	s, err := store.Open(h.store, c.log)
	if err != nil {
		c.t.Fatalf("%v", err)
	}
	records, err := s.Load()
	if err := errors.Join(err, s.Close(), os.RemoveAll(h.store)); err != nil {
		c.t.Fatalf("%v", err)
	}
	records = slices.DeleteFunc(records, func(r kept.Record) bool { return r.Key == kept.LevelKey })
	if err := store.Create(h.store, records, c.log); err != nil {
		c.t.Fatalf("%v", err)
	}
}

// becomes restarts a manager as one of a version that knows another level.
func (h *managerHost) becomes(level block.Level) {
	h.cluster.t.Helper()
	h.kill()
	h.buried()
	h.level = level
	h.start()
}

// lead makes a manager lead, and waits until it does.
func (c *cluster) lead(h *managerHost) {
	c.t.Helper()
	c.eventually(h.name+" leads", func(ctx context.Context) error {
		if c.leader() == h {
			return nil
		}
		_, err := c.operator.TransferLeadership(ctx, &pb.TransferLeadershipRequest{Manager: h.address()})
		return errors.Join(err, errors.New("another one does"))
	})
}

// finish finishes an upgrade. It may be refused with want.
func (c *cluster) finish(want string) {
	c.t.Helper()
	c.eventually("finishing the upgrade says "+want, func(ctx context.Context) error {
		u, err := c.operator.FinishUpgrade(ctx, &pb.FinishUpgradeRequest{})
		if err != nil && want != "" && strings.Contains(err.Error(), want) || err == nil && want == "" {
			return nil
		}
		return fmt.Errorf("%v, %v", u, err)
	})
}

func (c *cluster) createPool(name string) {
	c.t.Helper()
	c.eventually("a pool is created", func(ctx context.Context) error {
		_, err := c.operator.CreatePool(ctx, &pb.CreatePoolRequest{Name: name})
		return err
	})
}

// Managers of three versions, of which the oldest knows no levels, keep a store together that is from
// before levels. Each of them may lead. The level is raised once all of them know it, and the manager
// that stands in the way is named. From then on, an older one does not even start.
func TestManagersOfThreeVersions(t *testing.T) { synctest.Test(t, threeVersions) }

func threeVersions(t *testing.T) {
	c := newCluster(t, 0, 0, func(c *cluster) { c.members, c.levels = 3, []block.Level{1, 2, 3} })
	defer c.close()
	first, second, third := c.managers[0], c.managers[1], c.managers[2]
	for _, h := range c.managers {
		c.lead(h)
		c.createPool("of-" + h.name)
	}
	knows := func(h *managerHost, level int) string {
		return fmt.Sprintf("manager %v knows level %d", h.member, level)
	}

	c.lead(third)
	c.finish(knows(first, 1))
	c.finish(knows(second, 2))
	c.lead(second)
	c.finish(knows(third, 3)) // the leader does not know all that there is
	first.becomes(3)
	c.lead(third)
	c.finish(knows(second, 2))
	second.kill()
	c.finish(fmt.Sprintf("manager %v", second.member))
	second.becomes(3)
	c.agreed()
	c.finish("")
	c.finish("")
	for _, h := range c.managers {
		c.lead(h)
		u, err := c.operator.GetUpgrade(context.Background(), &pb.GetUpgradeRequest{})
		if err != nil || u.GetLevel() != 3 || len(u.GetParts()) != 3 {
			t.Errorf("%s says %v, %v", h.name, u, err)
		}
	}
	pools, err := c.operator.ListPools(context.Background(), &pb.ListPoolsRequest{})
	if err != nil || len(pools.GetPools()) != 4 {
		t.Errorf("the pools are %v, %v", pools, err)
	}

	first.kill()
	first.buried()
	older := first.config()
	older.Level, older.Quorum = 2, &volmgr.Quorum{Address: first.address()}
	if _, err := volmgr.New(older); !errors.Is(err, kept.ErrLevel) {
		t.Errorf("an older manager starts: %v", err)
	}
	first.start()
	c.agreed()
}

// A manager is cut off while the level is raised, and comes back as one of an older version. Its store
// knows nothing of the raise, so it starts. The others take no message of it: it does not lead, nor
// does another one by its vote, and an operator is told which version it has. The right version goes on
// with what it has.
func TestAnOlderManagerNeverLeads(t *testing.T) { synctest.Test(t, olderManager) }

func olderManager(t *testing.T) {
	c := newCluster(t, 0, 0, func(c *cluster) { c.members, c.levels = 3, []block.Level{3, 3, 3} })
	defer c.close()
	first, second, third := c.managers[0], c.managers[1], c.managers[2]
	c.agreed()
	c.lead(first)
	apart := func(cut bool) {
		c.network.part(first.name, third.name, cut)
		c.network.part(second.name, third.name, cut)
	}
	apart(true) // and raised before its silence is noticed
	if u, err := c.operator.FinishUpgrade(context.Background(), &pb.FinishUpgradeRequest{}); err != nil || u.GetLevel() != 3 {
		t.Fatalf("finishing the upgrade says %v, %v", u, err)
	}
	first.kill()
	first.buried()
	third.becomes(2)
	apart(false)

	for range 60 {
		c.pass(time.Second)
		if h := c.leader(); h != nil {
			t.Fatalf("%s leads with the vote of a manager of an older version", h.name)
		}
	}

	first.start()
	c.createPool("without-it")
	c.eventually("the older manager is named", func(ctx context.Context) error {
		u, err := c.operator.GetUpgrade(ctx, &pb.GetUpgradeRequest{})
		for _, part := range u.GetParts() {
			if part.GetName() == third.member.String() && part.GetLevel() == 2 && part.GetBlocks() != "" {
				return nil
			}
		}
		return fmt.Errorf("%v, %w", u, err)
	})
	third.becomes(3)
	c.agreed()
	c.lead(third)
	pools, err := c.operator.ListPools(context.Background(), &pb.ListPoolsRequest{})
	if err != nil || len(pools.GetPools()) != 2 {
		t.Errorf("the pools are %v, %v", pools, err)
	}
}

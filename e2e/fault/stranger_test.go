// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// replaceManager starts the manager of a new cluster in place of the running one, as happens
// when the wrong disk is mounted. Both keep their stores, so a second call swaps them back.
func (c *cluster) replaceManager() {
	c.t.Helper()
	c.killManager()
	dir := c.managers[0].store
	if err := os.Rename(dir, dir+".swap"); err != nil {
		c.t.Fatalf("%v", err)
	}
	err := os.Rename(dir+".other", dir)
	if os.IsNotExist(err) {
		c.initStore()
	} else if err != nil {
		c.t.Fatalf("%v", err)
	}
	if err := os.Rename(dir+".swap", dir+".other"); err != nil {
		c.t.Fatalf("%v", err)
	}
	c.startManager()
}

func (u *user) count(what string) int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.counts[what]
}

// The manager of another cluster, with an empty store, answers at the known address while a
// volume is written: the host keeps its device and the targets keep their exports, so writes
// continue. When the right manager is back, everything works again.
func TestAnotherClustersManagerTakesNothingAway(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newCluster(t, 4, 2, func(*cluster) {})
		defer c.close()
		defer c.tell(1)
		c.createVolume(block.Layout{Stripes: 2, Copies: 2})
		c.attach(c.clients[0])
		c.healthy()
		c.user.work(1, 6)
		time.Sleep(5 * time.Second)

		c.replaceManager()
		time.Sleep(30 * time.Second)
		wrote := c.user.count("write")
		time.Sleep(5 * time.Second)
		if now := c.user.count("write"); now == wrote {
			t.Errorf("under another cluster's manager nothing was written for 5s\n%s", c.explain())
		}
		if made := c.user.count("device made"); made != 1 {
			t.Errorf("the device was made %d times: it was taken away", made)
		}
		c.sayWhoIsRefused(t)

		c.replaceManager()
		c.healthy()
		if made := c.user.count("device made"); made != 1 {
			t.Errorf("the device was made %d times: the right manager took it away", made)
		}
		if !c.user.pause(patience) {
			t.Fatalf("the user waits for answers\n%s", c.explain())
		}
		c.verify()
	})
}

// sayWhoIsRefused checks what an operator of the wrong manager sees.
func (c *cluster) sayWhoIsRefused(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	s, err := c.operator.GetStatus(ctx, &pb.GetStatusRequest{})
	if err != nil || len(s.Wrong) == 0 || !strings.Contains(s.Wrong[0], "c1's initiator") {
		t.Errorf("its status says %v, %v; want who is refused", s.GetWrong(), err)
	}
	events, err := c.operator.ListEvents(ctx, &pb.ListEventsRequest{Object: "node c1"})
	refused := 0
	for _, e := range events.GetEvents() {
		if e.Kind == "agent.refused" {
			refused++
		}
	}
	if err != nil || refused != 1 {
		t.Errorf("its events of c1 are %v, %v; want one that tells of the refusal", events.GetEvents(), err)
	}
}

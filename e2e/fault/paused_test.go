// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"bytes"
	"context"
	"errors"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/store"
)

// leads waits until a manager leads.
func (c *cluster) leads() (h *managerHost) {
	c.t.Helper()
	c.eventually("a manager leads", func(context.Context) error {
		if h = c.leader(); h == nil {
			return errors.New("none does")
		}
		return nil
	})
	return h
}

// pauseLeader freezes the manager that leads, and waits until another one leads.
func (c *cluster) pauseLeader() (paused *managerHost) {
	c.t.Helper()
	paused = c.leads()
	paused.running.at.freeze()
	c.eventually("another one leads", func(context.Context) error {
		if c.leader() == paused {
			return errors.New("none does")
		}
		return nil
	})
	return paused
}

// A read waits at a manager that leads, and is paused. Another one leads, and a change is
// acknowledged. The paused one goes on, and hears of none of that: it must not answer from what it
// knows.
// There are no agents: the manager would record their loss, and answer nothing until that is
// recorded.
func TestAReadOfAPausedLeaderIsNotOld(t *testing.T) { synctest.Test(t, readAtPaused) }

func readAtPaused(t *testing.T) {
	c := newCluster(t, 0, 0, func(c *cluster) { c.members = 3 })
	defer c.close()
	at := c.network.boot("reader")
	conn := c.dialOne(at, c.leads().address())
	defer conn.Close()
	client := pb.NewManagerClient(conn)
	if _, err := client.ListPools(context.Background(), &pb.ListPoolsRequest{}); err != nil { // it is connected
		t.Fatal(err)
	}
	paused := c.pauseLeader()
	next := c.dialOne(at, c.leads().address()) // soon: connections end when the paused one is silent for long
	defer next.Close()
	c.eventually("a change is acknowledged", func(ctx context.Context) error {
		_, err := pb.NewManagerClient(next).CreatePool(ctx, &pb.CreatePoolRequest{Name: "new"})
		return err
	})
	answer := make(chan error, 1)
	go func() {
		pools, err := client.ListPools(context.Background(), &pb.ListPoolsRequest{})
		if err == nil && !slices.ContainsFunc(pools.GetPools(), func(p *pb.Pool) bool { return p.GetName() == "new" }) {
			t.Errorf("a pool was created, and %s lists %v", paused.name, pools.GetPools())
		}
		answer <- err
	}()
	time.Sleep(200 * time.Millisecond)
	for _, h := range c.managers {
		if h != paused {
			c.network.part(h.name, paused.name, true)
		}
	}
	paused.running.at.thaw()
	t.Logf("the answer of the one that was paused: %v", <-answer)
}

// The manager that leads is paused. Another one takes the volume from one host and gives it to
// another. Then only the paused one is there for the agents, and goes on: it still takes itself for
// the leader, for a moment, and knows nothing of all that. Nobody obeys it. The host keeps its
// device, and its targets keep serving it.
//
// A leader asks the others before it says anything, but it can be paused after their answer. So
// the paused one does not ask here: the agents' own comparison of terms has to be enough. That they
// have compared is seen in what it knows of them.
func TestAPausedLeaderThatGoesOnIsNotObeyed(t *testing.T) {
	three := func(c *cluster) {
		withoutCaches(c)
		c.members = 3
	}
	for _, after := range []time.Duration{4 * time.Second, 5 * time.Second, 6 * time.Second, 7 * time.Second} {
		t.Run(after.String(), func(t *testing.T) {
			t.Parallel()
			mirrored(t, three, func(m *mirror) {
				m.put("c1", 1, everyUnit...)
				paused := m.pauseLeader()
				m.takenTo(m.clients[1], m.clients[0])
				m.put("c2", 2, 0)
				m.holds("c2", 2, 0)
				device := m.users.device("c2")
				for _, h := range m.managers {
					if h != paused {
						m.network.part(h.name, paused.name, true) // what they have said to it, too
						h.kill()
					}
				}
				time.Sleep(after)
				late := paused.running
				late.set(func() { late.sure = true })
				late.at.thaw()
				time.Sleep(5 * time.Second)
				heard := false
				late.set(func() { heard, late.sure = late.heard, false })
				if !heard {
					t.Error("no agent has reported to the manager that was replaced: this test shows nothing")
				}
				if device.over() || m.users.device("c2") != device {
					t.Error("a manager that was replaced took the volume from its host")
				}
				m.writesSoon(device, edition(3))
				m.network.heal()
				m.startManager()
				m.agreed()
				m.attachedAndHealthy()
			})
		})
	}
}

// All managers are gone, and one that was started on an old copy of the store answers in their
// place: it knows nothing of what a later leader has done. Nobody obeys it.
func TestAManagerOnAnOldCopyOfTheStoreIsNotObeyed(t *testing.T) {
	three := func(c *cluster) {
		withoutCaches(c)
		c.members = 3
	}
	mirrored(t, three, func(m *mirror) {
		m.put("c1", 1, everyUnit...)
		copied := m.copyStore()
		for range 2 { // other leaders have led since
			m.leads().kill()
			m.startManager()
			m.agreed()
		}
		m.takenTo(m.clients[1], m.clients[0])
		m.put("c2", 2, 0)
		device := m.users.device("c2")
		m.killManager()
		m.quorum = false
		copied.start()
		time.Sleep(15 * time.Second)
		if device.over() || m.users.device("c2") != device {
			t.Fatal("a manager that was replaced took the volume from its host")
		}
		m.writesSoon(device, edition(3))
		copied.kill()
		copied.buried()
		m.quorum = true
		m.startManager()
		m.agreed()
		m.attachedAndHealthy()
	})
}

// copyStore copies the managers' store for another manager at the first one's address.
func (m *mirror) copyStore() *managerHost {
	m.t.Helper()
	backup, err := m.backup(context.Background())
	if err != nil {
		m.t.Fatal(err)
	}
	records, err := store.ReadBackup(bytes.NewReader(backup))
	if err != nil {
		m.t.Fatal(err)
	}
	h := &managerHost{host: host{cluster: m.cluster, name: "m1"}, store: filepath.Join(m.stores, "copy")}
	if err := store.Create(h.store, records, m.log); err != nil {
		m.t.Fatal(err)
	}
	return h
}

// writesSoon writes to a device, which must not take long.
func (m *mirror) writesSoon(d *export, data []byte) {
	m.t.Helper()
	wrote := make(chan error, 1)
	go func() { wrote <- block.WriteAt(d.volume, data, 0) }()
	select {
	case err := <-wrote:
		if err != nil {
			m.t.Errorf("write = %v", err)
		}
	case <-time.After(20 * time.Second):
		m.t.Error("a write waits")
	}
}

// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr"
)

// loseStore removes all managers and their stores.
func (c *cluster) loseStore() {
	c.t.Helper()
	c.killManager()
	for _, h := range c.managers {
		h.replaced = false
		if err := os.RemoveAll(h.store); err != nil {
			c.t.Fatalf("%v", err)
		}
	}
}

// rebuildStore rebuilds the store from the drives of all targets and from the notes of the
// running hosts, and returns what an operator is told. The manager must then be started.
func (c *cluster) rebuildStore() string {
	c.t.Helper()
	at := c.network.boot("m1")
	var targets []block.NodeName
	for _, h := range c.targets {
		targets = append(targets, block.NodeName(h.name))
	}
	rebuild, err := volmgr.NewRebuild(volmgr.Config{Dir: c.managers[0].store, Log: c.log}, targets, nil)
	if err != nil {
		c.t.Fatalf("%v", err)
	}
	listener := c.listenManager(at, c.managers[0].address())
	server := grpc.NewServer()
	rebuild.Register(server)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	text, err := rebuild.Run(ctx)
	server.Stop()
	if err = errors.Join(err, <-served); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
		c.t.Fatalf("rebuild: %v", err)
	}
	at.kill()
	return text
}

// A target's agent cannot reach the manager while its exports keep serving; the other copy is
// lost, and the host continues with this one. Then host and store are lost. No label shows
// that the other copy misses writes. Either the host's note does, or an operator must be
// asked.
func TestARebuiltStoreBelievesTheHostAndNotTheLabels(t *testing.T) {
	for name, forgets := range map[string]bool{"the host comes back": false, "the host has lost its disk": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { rebuildAfterALoss(t, forgets) })
		})
	}
}

func rebuildAfterALoss(t *testing.T, forgets bool) {
	var s *sharers
	c := newCluster(t, 2, 1, func(c *cluster) { s = share(c) })
	defer c.close()
	c.createVolume(block.Layout{Stripes: 1, Copies: 2})
	c.attachAs(c.clients[0], pb.AttachMode_ATTACH_MODE_EXCLUSIVE)
	put := func(n uint64) {
		t.Helper()
		d := s.device("c1").volume
		if err := errors.Join(block.WriteAt(d, edition(n), 0), block.Flush(d)); err != nil {
			t.Fatal(err)
		}
	}
	put(1)
	v, err := c.operator.GetVolume(context.Background(), &pb.GetVolumeRequest{Volume: volumeName})
	if err != nil {
		t.Fatal(err)
	}
	first, other := c.targets[0], c.targets[1]
	if v.GetLegs()[0].GetNode() != first.name {
		first, other = other, first
	}
	c.network.part(other.name, "m1", true)
	time.Sleep(6 * time.Second)
	first.kill()
	put(2) // waits until the loss of the first copy is recorded
	c.clients[0].kill()
	c.loseStore()
	c.network.heal()
	first.start()
	if forgets {
		c.clients[0].buried()
		if err := os.RemoveAll(c.clients[0].dir); err != nil {
			t.Fatal(err)
		}
	}
	c.clients[0].start()
	text := c.rebuildStore()
	t.Logf("rebuild-from-drives: %s", text)
	c.startManager()
	if forgets {
		v, err := c.operator.GetVolume(context.Background(), &pb.GetVolumeRequest{Volume: volumeName})
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range v.GetLegs() {
			if l.GetState() != pb.LegState_LEG_STATE_STALE {
				t.Errorf("leg on %s is %v though nobody can know what it is worth", l.GetNode(), l.GetState())
			}
		}
		if !strings.Contains(text, "promote-stale "+volumeName+" 0.1 --accept-data-loss") {
			t.Errorf("the operator is not told how to choose: %s", text)
		}
		c.eventually("choose the copy that has all", func(ctx context.Context) error {
			_, err := c.operator.PromoteStaleLeg(ctx, &pb.PromoteStaleLegRequest{Volume: volumeName, LegId: v.GetLegs()[1].GetId(), AcceptDataLoss: true})
			return err
		})
	}
	c.attachAs(c.clients[0], pb.AttachMode_ATTACH_MODE_EXCLUSIVE)
	got := make([]byte, unit)
	if err := block.ReadAt(s.device("c1").volume, got, 0); err != nil {
		t.Fatal(err)
	}
	if n := binary.LittleEndian.Uint64(got); n != 2 {
		t.Errorf("edition 2 was acknowledged and flushed, all drives are there, and the volume holds edition %d", n)
	}
}

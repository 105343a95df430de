// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"testing"
	"time"

	"weft.dev/weft/e2e/testbed"
	"weft.dev/weft/e2e/vm"
)

// One of a target's two networks fails, in both directions or in one. The kernel's host continues over the
// other one, with all that was under way: nothing is recorded and no write fails. A write that was kept
// back on the lost path is not carried out when it arrives late. When the network is well, the path goes
// back.
func TestScenarioANetworkFails(t *testing.T) {
	b := testbed.Start(t, testbed.Options{Targets: 2, Rails: true, TargetFlags: []string{"--datapath", "user"}})
	c1, t1, network := b.Clients[0], b.Targets[0], b.Cluster.Network()
	b.Create("db1", "256MiB", 1, 2)
	device := b.Attach("db1", c1)
	railA, railB := t1.Addr(), t1.AddrOn(b.Rail)
	onlyOver(t, b, railA, railB)

	w := b.Write(c1, device, 64, 200, 1)
	w.AwaitProgress(100, time.Minute)
	for range 3 {
		network.Cut(c1, t1)
		onlyOver(t, b, railB, railA)
		w.AwaitProgress(50, time.Minute)
		nothingRecorded(t, b, "db1")
		network.Heal(c1, t1)
		onlyOver(t, b, railA, railB)
		w.AwaitProgress(50, time.Minute)
	}
	nothingRecorded(t, b, "db1")
	w.Stop()
	stall, _ := w.Stall()
	t.Logf("writes stood still for %v at most", stall)
	b.Verify(c1, device, 64, testbed.Acks{}.Add(w))

	late := lateWrites{t: t, network: network, host: c1, target: t1, device: device, moves: true}
	late.prepare()
	deliver := late.holdOldWrites()
	late.writeNew()
	nothingRecorded(t, b, "db1")
	deliver()
	time.Sleep(2 * time.Second)
	network.Set(c1, t1, vm.Fault{})
	late.areKept(b.Targets[1])
}

// onlyOver waits until the client is connected to a target at one address, and not at another.
func onlyOver(t *testing.T, b *testbed.Bed, address, other string) {
	t.Helper()
	b.Eventually(2*time.Minute, "the leg is connected at "+address+" alone", func(context.Context) error {
		if here, there := paths(t, b.Clients[0], address), paths(t, b.Clients[0], other); here != 1 || there != 0 {
			return fmt.Errorf("%d paths there, %d at %s", here, there, other)
		}
		return nil
	})
}

func nothingRecorded(t *testing.T, b *testbed.Bed, name string) {
	t.Helper()
	if stale := b.LastEvent("volume "+name, "leg.stale"); stale != nil {
		t.Fatalf("a leg was recorded stale: %v\n%s", stale, b.State())
	}
}

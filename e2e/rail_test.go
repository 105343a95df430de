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
	onRail := func(rail string, address string) {
		t.Helper()
		b.Eventually(2*time.Minute, "the leg on t1 is connected over rail "+rail+" alone", func(context.Context) error {
			a, other := paths(t, c1, t1.Addr()), paths(t, c1, t1.AddrOn(b.Rail))
			if address != t1.Addr() {
				a, other = other, a
			}
			if a != 1 || other != 0 {
				return fmt.Errorf("%d paths over it, %d over the other one", a, other)
			}
			return nil
		})
	}
	nothingRecorded := func() {
		t.Helper()
		if stale := b.LastEvent("volume db1", "leg.stale"); stale != nil {
			t.Fatalf("a leg was recorded stale: %v\n%s", stale, b.State())
		}
	}
	onRail("a", t1.Addr())
	acks := testbed.Acks{}

	w := b.Write(c1, device, 64, 200, 1)
	w.AwaitProgress(100, time.Minute)
	for range 3 {
		network.Cut(c1, t1)
		onRail("b", t1.AddrOn(b.Rail))
		w.AwaitProgress(50, time.Minute)
		nothingRecorded()
		network.Heal(c1, t1)
		onRail("a", t1.Addr())
		w.AwaitProgress(50, time.Minute)
	}
	nothingRecorded()
	w.Stop()
	w.NoErrors()
	acks.Add(w)
	stall, _ := w.Stall()
	t.Logf("writes stood still for %v at most", stall)
	b.Verify(c1, device, 64, acks)

	for _, what := range []string{"old", "new"} {
		shell(t, c1, fmt.Sprintf("yes %s | head -c 4096 > /tmp/%s", what, what))
	}
	late := lateWrites{t: t, network: network, host: c1, target: t1, device: device, moves: true}
	deliver := late.holdOldWrites()
	late.writeNew()
	nothingRecorded()
	deliver()
	time.Sleep(2 * time.Second)
	network.Set(c1, t1, vm.Fault{})
	b.Targets[1].Kill() // what is read then comes from t1
	shell(t, c1, "dd if=/dev/zero of="+device+" bs=4096 count=1 seek=100 oflag=direct 2>/dev/null")
	if kept := late.count("new"); kept != 4 {
		t.Errorf("of 4 newer writes %d are left, and %d older ones that came late", kept, late.count("old"))
	}
}

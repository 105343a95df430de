// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"strconv"
	"strings"
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

	b.Eventually(time.Minute, "both connections have the keep-alive timeout of targets that are processes", func(ctx context.Context) error {
		out, err := c1.Shell(ctx, "cat /sys/class/nvme/*/kato")
		if err == nil && strings.Join(strings.Fields(out), " ") != "11 11" {
			err = fmt.Errorf("timeouts in seconds: %s", out)
		}
		return err
	})

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

// A volume for which late writes are accepted is reached through both networks of each target at a time, and its
// data takes both. One of them fails, and comes back: nothing is recorded and no write fails. TestScenarioLateWrite
// shows why this is not the default.
func TestScenarioSeveralPaths(t *testing.T) {
	for _, by := range []string{"kernel", "user"} {
		t.Run("targets on the data path "+by, func(t *testing.T) { severalPaths(t, by) })
	}
}

func severalPaths(t *testing.T, by string) {
	b := testbed.Start(t, testbed.Options{Targets: 2, Rails: true, TargetFlags: []string{"--datapath", by}})
	c1, t1, network := b.Clients[0], b.Targets[0], b.Cluster.Network()
	b.Create("db1", "256MiB", 1, 2)
	if out, err := b.Try("volume", "set", "db1", "--paths", "2"); err == nil {
		t.Errorf("several paths, and nobody has accepted late writes: %s", out)
	}
	b.Weft("volume", "set", "db1", "--paths", "2", "--accept-late-writes")
	device := b.Attach("db1", c1)
	both := func(more int) { // and so many of other volumes
		t.Helper()
		b.Eventually(2*time.Minute, "both paths of each leg are there", func(context.Context) error {
			for _, x := range b.Targets {
				if first, second := paths(t, c1, x.Addr()), paths(t, c1, x.AddrOn(b.Rail)); min(first, second) != 1 || first+second != 2+more {
					return fmt.Errorf("%s: %d and %d", x.Name(), first, second)
				}
			}
			return nil
		})
	}
	both(0)
	b.Create("db2", "256MiB", 1, 2) // with one path at a time, which fails together with one of the others
	one := b.Write(c1, b.Attach("db2", c1), 64, 50, 1)
	began := received(t, t1)
	w := b.Write(c1, device, 64, 200, 1)
	w.AwaitProgress(1000, time.Minute)
	for i, n := range received(t, t1) { // 4MiB, in halves
		if n-began[i] < 1<<20 {
			t.Errorf("over network %d %s has received %d bytes", i, t1.Name(), n-began[i])
		}
	}
	for range 2 {
		for _, rail := range []*vm.Network{network, b.Rail} {
			rail.Cut(c1, t1)
			time.Sleep(3 * time.Second)
			w.AwaitProgress(50, time.Minute)
			one.AwaitProgress(20, time.Minute)
			nothingRecorded(t, b, "db1")
			nothingRecorded(t, b, "db2")
			rail.Heal(c1, t1)
			both(1)
		}
	}
	for _, w := range []*testbed.Writer{w, one} {
		w.Stop()
		w.NoErrors()
	}
	nothingRecorded(t, b, "db1")
	nothingRecorded(t, b, "db2")
	b.Detach("db2")
	stall, _ := w.Stall()
	t.Logf("writes stood still for %v at most", stall)
	b.Verify(c1, device, 64, testbed.Acks{}.Add(w))
	b.Weft("volume", "set", "db1", "--paths", "1")
	b.Detach("db1")
	b.Verify(c1, b.Attach("db1", c1), 64, testbed.Acks{}.Add(w))
	for _, x := range b.Targets {
		if n := paths(t, c1, x.Addr()) + paths(t, c1, x.AddrOn(b.Rail)); n != 1 {
			t.Errorf("with one path at a time, the host has %d to %s", n, x.Name())
		}
	}
}

// received is how much a machine has received over each of its two networks.
func received(t *testing.T, m *vm.Machine) (all []int) {
	t.Helper()
	for _, text := range strings.Fields(shell(t, m, "cat /sys/class/net/eth[01]/statistics/rx_bytes")) {
		n, err := strconv.Atoi(text)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, n)
	}
	if len(all) != 2 {
		t.Fatalf("%s has %d networks", m.Name(), len(all))
	}
	return all
}

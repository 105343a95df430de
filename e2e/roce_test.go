// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/e2e/testbed"
	"weft.dev/weft/e2e/vm"
	"weft.dev/weft/proto/pb"
)

// RoCE on kernels, with RDMA devices in software: a volume of two stripes and two copies, whose
// host prefers the rail with RDMA. A target loses power. Then the path to it is lost, and its legs
// are rebuilt over the other transport, and back. With WEFT_LONG=1, another target loses power while
// the manager is away.
func TestScenarioRoCE(t *testing.T) {
	b := testbed.Start(t, testbed.Options{Managers: 1, RoCE: true})
	c1 := b.Clients[0]
	b.Create("db1", "256MiB", 2, 2)
	device := b.Attach("db1", c1)
	for _, target := range b.Targets {
		awaitPath(t, b, target, "rdma")
	}
	b.Create("files", "256MiB", 2, 2)
	files := b.Attach("files", c1)
	shell(t, c1, fmt.Sprintf("mkfs.ext4 -q %s; mkdir -p /mnt/a; mount %s /mnt/a; %s; umount /mnt/a", files, files, fio("/mnt/a", "")))
	b.Detach("files")
	for _, m := range []*vm.Machine{c1, b.Targets[0]} {
		if says := shell(t, m, "weft doctor | grep roce1"); !strings.Contains(says, "is active over eth1, with a path MTU of 4096") && !strings.Contains(says, "lost or overtaken") {
			t.Errorf("weft doctor on %s says of its device: %s", m.Name(), says)
		}
	}

	w := b.Write(c1, device, span, 100, 1)
	w.AwaitProgress(100, time.Minute)
	first := b.Holder("db1", 0, 1)
	staleBeforeReleased(t, b, w, first, killUnderWrites(t, b, w, first))
	b.Up(first)
	rebuilt(t, b)
	awaitPath(t, b, first, "rdma", "tcp") // the first that it opened

	acks := testbed.Acks{}
	again := func() {
		w.Stop()
		acks.Add(w)
		w = b.Write(c1, device, span, 100, w.Next())
		w.AwaitProgress(100, time.Minute)
	}
	for range 2 {
		again()
		now, lost, other := awaitPath(t, b, first, "rdma", "tcp"), b.RoCE, "tcp"
		if now == "tcp" {
			lost, other = b.Cluster.Network(), "rdma"
		}
		lost.Cut(c1, first)
		w.AwaitProgress(100, time.Minute)
		stall, _ := w.Stall()
		t.Logf("the path to %s over %s was cut: the writer stalled for %v", first.Name(), now, stall.Round(time.Millisecond))
		awaitPath(t, b, first, other)
		rebuilt(t, b)
		if stall < time.Second {
			t.Errorf("the writer did not notice the cut of %s, although a leg has one path", now)
		}
		lost.Heal(c1, first)
	}

	if os.Getenv("WEFT_LONG") != "" {
		again()
		b.Up(managerAwayWhileATargetDies(t, b, w))
		rebuilt(t, b)
	}
	w.Stop()
	b.Verify(c1, device, span, acks.Add(w))
	b.Detach("db1")
	if left := strings.TrimSpace(shell(t, c1, "ls /sys/class/nvme")); left != "" {
		t.Errorf("after the detach controllers are left: %s", left)
	}
}

// managerAwayWhileATargetDies checks that a kernel that tries to connect over RDMA, to a target
// that is silent, does not keep the writes waiting once the loss is recorded.
func managerAwayWhileATargetDies(t *testing.T, b *testbed.Bed, w *testbed.Writer) (dies *vm.Machine) {
	t.Helper()
	dies, volmgr := b.Holder("db1", 0, 0), b.Daemon(b.Manager)
	over := awaitPath(t, b, dies, "rdma", "tcp")
	if err := volmgr.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	dies.Kill()
	time.Sleep(15 * time.Second) // the kernel has noticed, and would be connecting for a minute
	restart(t, volmgr)
	began := time.Now()
	w.AwaitProgress(100, time.Minute)
	took := time.Since(began)
	t.Logf("%v after the manager was back, writes went on without %s, which was connected over %s", took.Round(100*time.Millisecond), dies.Name(), over)
	if took > 20*time.Second {
		t.Errorf("writes waited %v for a target whose loss was recorded", took)
	}
	return dies
}

// rebuilt waits until db1 is healthy again.
func rebuilt(t *testing.T, b *testbed.Bed) {
	t.Helper()
	began := time.Now()
	b.WaitHealth("db1", pb.Health_HEALTH_HEALTHY, 3*time.Minute)
	t.Logf("healthy again in %v", time.Since(began).Round(100*time.Millisecond))
}

// awaitPath waits until the client has one live path to a target, over one of these transports, and
// returns which.
func awaitPath(t *testing.T, b *testbed.Bed, target *vm.Machine, transports ...string) (transport string) {
	t.Helper()
	b.Eventually(2*time.Minute, fmt.Sprintf("%s is connected over one of %v", target.Name(), transports), func(context.Context) error {
		var live []string
		all := controllers(t, b.Clients[0])
		for line := range strings.Lines(all) {
			f := strings.Fields(line) // name state transport address
			if len(f) < 4 {
				continue // it went away while its files were read
			}
			at, _, _ := strings.Cut(f[3], ",")
			if ours := at == "traddr="+target.Addr() || at == "traddr="+target.AddrOn(b.RoCE); ours && f[1] == "live" {
				live = append(live, f[2])
			}
		}
		if len(live) == 1 && slices.Contains(transports, live[0]) {
			transport = live[0]
			return nil
		}
		return fmt.Errorf("the controllers are %s", all)
	})
	return transport
}

// controllers lists a client's NVMe controllers.
func controllers(t *testing.T, c *vm.Machine) string {
	t.Helper()
	return shell(t, c, "cd /sys/class/nvme; for c in *; do echo $c $(cat $c/state $c/transport $c/address); done")
}

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/e2e/testbed"
	"weft.dev/weft/e2e/vm"
)

// stock is a machine without Weft's agent.
type stock struct {
	*testing.T
	*testbed.Bed
	m   *vm.Machine
	nqn string
}

const (
	ofUUID    = "nqn.2014-08.org.nvmexpress:uuid:"
	ownID     = "0f5d4a2c-6a0e-4d3a-9d0e-1c7f5a3b2e10"
	strangeID = "1f5d4a2c-6a0e-4d3a-9d0e-1c7f5a3b2e10"
)

// tool is a command of nvme-cli to the discovery controller of a target. Newer kernels refuse two host names with
// one id.
func (s stock) tool(command string, target *vm.Machine, nqn string) string {
	return fmt.Sprintf("nvme %s -t tcp -a %s -s 8009 -q %s -I %s", command, target.Addr(), nqn, strings.TrimPrefix(nqn, ofUUID))
}

// finds are the subsystems that the host finds at a target.
func (s stock) finds(target *vm.Machine, nqn string) (all []string) {
	s.Helper()
	for line := range strings.Lines(shell(s.T, s.m, s.tool("discover", target, nqn))) {
		if name, ok := strings.CutPrefix(line, "subnqn:"); ok {
			all = append(all, strings.TrimSpace(name))
		}
	}
	return all
}

// device waits for the block device of a subsystem.
func (s stock) device(subsystem string) (name string) {
	s.Helper()
	s.Eventually(time.Minute, "a device of "+subsystem, func(context.Context) error {
		out, err := s.m.Shell(s.Context(), "cd /sys/class/nvme-subsystem; for i in *; do grep -q '^"+subsystem+"$' $i/subsysnqn && ls -d $i/nvme*n*; done; true")
		if fields := strings.Fields(out); err == nil && len(fields) == 1 {
			name = "/dev/" + fields[0][strings.LastIndex(fields[0], "/")+1:]
			return nil
		}
		return fmt.Errorf("%q, %v", out, err)
	})
	return name
}

// A machine without Weft's agent finds its volume with nvme-cli at any target, uses it, sees it grow,
// keeps it through a power cut of the target, and has it no more after a detach.
func TestScenarioStockHost(t *testing.T) {
	b := testbed.Start(t, testbed.Options{Targets: 2})
	s := stock{T: t, Bed: b, m: b.Clients[0], nqn: ofUUID + ownID}
	if err := b.Daemon(s.m).Stop(t.Context()); err != nil { // its modules stay loaded
		t.Fatal(err)
	}
	b.Weft("node", "add", "h1", "--host-nqn", s.nqn)
	b.Create("mirrored", "64MiB", 1, 2)
	if out, err := b.Try("attach", "mirrored", "--node", "h1"); err == nil || !strings.Contains(err.Error()+out, "cannot put together") {
		t.Errorf("a mirrored volume is attached without an agent: %s, %v", out, err)
	}
	b.Create("scratch", "256MiB", 1, 1)
	subsystem := strings.TrimSpace(b.Weft("attach", "scratch", "--node", "h1", "--timeout", "2m"))
	for _, target := range b.Targets {
		b.Eventually(30*time.Second, target.Name()+" tells the host of its volume", func(context.Context) error {
			if got := s.finds(target, s.nqn); len(got) != 1 || got[0] != subsystem {
				return fmt.Errorf("it tells of %q, want %s", got, subsystem)
			}
			return nil
		})
		if got := s.finds(target, ofUUID+strangeID); len(got) > 0 {
			t.Errorf("%s tells a stranger of %q", target.Name(), got)
		}
	}
	shell(t, s.m, s.tool("connect-all", b.Targets[1], s.nqn))
	device := s.device(subsystem)
	shell(t, s.m, fmt.Sprintf("mkfs.ext4 -q %s; mkdir -p /mnt/s; mount %s /mnt/s; head -c 9000000 /dev/urandom > /mnt/s/a; sha256sum < /mnt/s/a > /tmp/a; sync", device, device))

	b.Weft("volume", "expand", "scratch", "--size", "512MiB")
	b.Eventually(time.Minute, "the device grows", func(context.Context) error {
		out, err := s.m.Shell(t.Context(), "blockdev --getsize64 "+device)
		if strings.TrimSpace(out) != fmt.Sprint(512<<20) {
			return fmt.Errorf("it has %s, %v", out, err)
		}
		return nil
	})

	holder := b.Holder("scratch", 0, 0)
	holder.Kill()
	b.Up(holder)
	shell(t, s.m, "echo 3 > /proc/sys/vm/drop_caches; sha256sum < /mnt/s/a | cmp - /tmp/a && cp /mnt/s/a /mnt/s/b && sync && umount /mnt/s")

	b.Weft("detach", "scratch")
	b.Eventually(time.Minute, "the host is told of nothing", func(context.Context) error {
		if got := s.finds(b.Targets[0], s.nqn); len(got) > 0 {
			return fmt.Errorf("it is told of %q", got)
		}
		return nil
	})
	shell(t, s.m, "nvme disconnect -n "+subsystem)
	if out, err := s.m.Shell(t.Context(), fmt.Sprintf("nvme connect -t tcp -a %s -s 4420 -q %s -I %s -n %s", holder.Addr(), s.nqn, ownID, subsystem)); err == nil {
		t.Errorf("a host whose volume was detached connects: %s", out)
	}
}

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
	"weft.dev/weft/proto/block"
)

// File systems grow with their volumes while files are written and checked.
func TestScenarioFileSystemsGrow(t *testing.T) {
	b := testbed.Start(t, testbed.Options{})
	c1 := b.Clients[0]
	for _, v := range []struct {
		name, mkfs, grow, check string
		stripes, copies         int
	}{
		{"ext4", "mkfs.ext4 -q", "resize2fs %[1]s", "e2fsck -fn %s", 2, 2},
		{"xfs", "mkfs.xfs -q", "xfs_growfs /mnt/%[2]s", "xfs_repair -n %s", 2, 1},
	} {
		b.Create(v.name, "320MiB", v.stripes, v.copies)
		device := b.Attach(v.name, c1)
		shell(t, c1, fmt.Sprintf("modprobe %s; %s %s; mkdir -p /mnt/%[1]s; mount -t %[1]s %[3]s /mnt/%[1]s", v.name, v.mkfs, device))
		files := inBackground(t, c1, "while [ ! -e /tmp/stop ]; do "+fio("/mnt/"+v.name, "--rate_iops=200")+"; done")
		for _, size := range []block.Size{448 * block.MiB, 576 * block.MiB} {
			b.Weft("volume", "expand", v.name, "--size", size.String(), "--wait", "--timeout", "3m")
			deviceHas(t, c1, device, size)
			shell(t, c1, fmt.Sprintf(v.grow+" >/dev/null", device, v.name))
			free := strings.TrimSpace(shell(t, c1, fmt.Sprintf("df -m /mnt/%s | tail -1 | tr -s ' ' | cut -d' ' -f2", v.name)))
			if n, err := strconv.Atoi(free); err != nil || block.Size(n)*block.MiB < size*8/10 {
				t.Errorf("%s has %s MiB on a volume of %v (%v)", v.name, free, size, err)
			}
		}
		shell(t, c1, "touch /tmp/stop")
		if err := <-files; err != nil {
			t.Errorf("files on %s: %v", v.name, err)
		}
		shell(t, c1, fmt.Sprintf("rm /tmp/stop; %s; umount /mnt/%s; "+v.check+" >/dev/null", fio("/mnt/"+v.name, ""), v.name, device))
		b.Detach(v.name)
		device = b.Attach(v.name, c1)
		shell(t, c1, fmt.Sprintf("mount -t %s %s /mnt/%[1]s; %[3]s; umount /mnt/%[1]s", v.name, device, fio("/mnt/"+v.name, "--verify_only=1")))
		b.Detach(v.name)
	}
}

// deviceHas checks that the kernel's device has the size of its volume.
func deviceHas(t *testing.T, m *vm.Machine, device string, size block.Size) {
	t.Helper()
	sectors := strings.TrimSpace(shell(t, m, fmt.Sprintf("cat /sys/class/block/$(basename $(readlink -f %s))/size", device)))
	if n, err := strconv.ParseUint(sectors, 10, 64); err != nil || block.Size(n)*512 != size {
		t.Errorf("%s on %s has %s sectors (%v), want %v", device, m.Name(), sectors, err, size)
	}
}

// inBackground runs a script on a machine; the channel receives its result.
func inBackground(t *testing.T, m *vm.Machine, script string) <-chan error {
	done := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		out, err := m.Shell(ctx, script)
		if err != nil {
			err = fmt.Errorf("%w\n%s", err, out)
		}
		done <- err
	}()
	return done
}

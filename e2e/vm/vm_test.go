// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"strings"
	"testing"
	"time"
)

func TestKernelMachineBootsAndRunsCommands(t *testing.T) {
	c := NewCluster(t)
	begin := time.Now()
	m := c.Start("m1", NVMe("1GiB", "A1"), StateDisk())
	t.Logf("boot took %s", time.Since(begin))
	out, err := m.Shell(t.Context(), "uname -a; cat /proc/uptime; cat /sys/class/nvme/nvme0/serial; df; free -m; ip addr; lsmod; dmesg | tail -5")
	if err != nil {
		t.Fatal(err)
	}
	t.Log(out)
	if !strings.Contains(out, "A1") {
		t.Errorf("no serial A1 in %s", out)
	}
}

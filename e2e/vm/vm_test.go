// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"io"
	"net"
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

func TestKernelForwardedPortAnswers(t *testing.T) {
	c := NewCluster(t)
	m := c.Start("m1", Forward(7000))
	if _, err := m.Start(t.Context(), "echo", "busybox", "nc", "-ll", "-p", "7000", "-e", "echo", "hello"); err != nil {
		t.Fatal(err)
	}
	var got string
	for range 50 {
		if got = greeting(m.Forwarded(7000)); got != "" {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	if got != "hello\n" {
		t.Errorf("the forwarded port says %q, want hello", got)
	}
}

// greeting is what a port says to those who connect, "" if nothing.
func greeting(address string) string {
	conn, err := net.DialTimeout("tcp", address, time.Second)
	if err != nil {
		return ""
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(2 * time.Second))
	text, _ := io.ReadAll(conn)
	return string(text)
}

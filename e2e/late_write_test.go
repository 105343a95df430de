// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/e2e/testbed"
	"weft.dev/weft/e2e/vm"
)

// A write is late if the network keeps it back while the host gives its path up, sends the same write
// on another path, and then a newer one to the same blocks. If the late one is still carried out, the
// newer one is lost although it was acknowledged. Linux alone, with two paths to one namespace, loses
// it. A volume does not: before the host connects through another portal, the agent beside the kernel's target
// has the connections of the lost path ended and drained, so what arrives on them late is not carried out.
// Nothing is recorded, since the leg goes on.
func TestScenarioLateWrite(t *testing.T) {
	b := testbed.Start(t, testbed.Options{Targets: 2, Rails: true})
	c1, t1, network := b.Clients[0], b.Targets[0], b.Cluster.Network()
	late := lateWrites{t: t, network: network, host: c1, target: t1}
	late.prepare()
	t.Run("Linux with two paths loses the newer write", func(t *testing.T) {
		late.t, late.device = t, twoPaths(t, b, c1, t1)
		first := strings.TrimSpace(shell(t, c1, "grep -l traddr="+t1.Addr()+", /sys/class/nvme/nvme*/address"))
		reset := strings.TrimSuffix(first, "address") + "reset_controller"
		deliver := late.holdOldWrites()
		shell(t, c1, "(echo 1 > "+reset+") >/dev/null 2>&1 &") // as a host does that finds its path dead
		late.writeNew()
		deliver()
		time.Sleep(2 * time.Second)
		if old := late.count("old"); old == 0 {
			t.Error("no late write was carried out: this test does not show what it is about")
		} else {
			t.Logf("of 4 newer writes, all acknowledged, %d are lost", old)
		}
		network.Set(c1, t1, vm.Fault{})
		shell(t, c1, "nvme disconnect -n late")
	})

	rails, addresses := []*vm.Network{network, b.Rail}, []string{t1.Addr(), t1.AddrOn(b.Rail)}
	moved := t.Run("a volume in user space moves its path", func(t *testing.T) {
		b.Datapath(c1, "user")
		b.Create("db0", "256MiB", 1, 2)
		device := b.Attach("db0", c1)
		w := b.Write(c1, device, 64, 200, 1)
		w.AwaitProgress(100, time.Minute)
		for _, rail := range rails { // the path is on the other one after the first
			rail.Cut(c1, t1)
			time.Sleep(4 * time.Second)
			w.AwaitProgress(50, time.Minute)
			nothingRecorded(t, b, "db0")
			rail.Heal(c1, t1)
		}
		w.Stop()
		stall, _ := w.Stall()
		t.Logf("writes stood still for %v at most", stall)
		b.Verify(c1, device, 64, testbed.Acks{}.Add(w))
		b.Detach("db0")
		b.Datapath(c1, "kernel")
	})

	if !moved {
		return // a network may still be cut
	}
	t.Run("a volume moves its path and keeps it", func(t *testing.T) {
		b.Create("db1", "256MiB", 1, 2)
		late.t, late.device, late.moves = t, b.Attach("db1", c1), true
		at := 0
		if paths(t, c1, addresses[1]) == 1 { // the target was slow to export, and the host tried this one
			at = 1
		}
		w := b.Write(c1, late.device, 64, 200, 1)
		w.AwaitProgress(100, time.Minute)
		for range 4 {
			rails[at].Cut(c1, t1)
			onlyOver(t, b, addresses[1-at], addresses[at])
			w.AwaitProgress(50, time.Minute)
			nothingRecorded(t, b, "db1")
			rails[at].Heal(c1, t1)
			at = 1 - at
		}
		w.Stop()
		stall, _ := w.Stall()
		t.Logf("writes stood still for %v at most", stall)
		b.Verify(c1, late.device, 64, testbed.Acks{}.Add(w))

		late.network = rails[at]
		deliver := late.holdOldWrites()
		late.writeNew()
		nothingRecorded(t, b, "db1")
		deliver()
		time.Sleep(2 * time.Second)
		late.network.Set(c1, t1, vm.Fault{})
		late.areKept(b.Targets[1])
	})
}

// twoPaths connects the host to a namespace of the target over both networks, without Weft, and lets
// Linux use both. It returns the device.
func twoPaths(t *testing.T, b *testbed.Bed, host, target *vm.Machine) (device string) {
	t.Helper()
	script := `modprobe brd rd_nr=1 rd_size=16384; cd /sys/kernel/config/nvmet
		mkdir -p subsystems/late/namespaces/1; echo 1 > subsystems/late/attr_allow_any_host
		echo -n /dev/ram0 > subsystems/late/namespaces/1/device_path; echo 1 > subsystems/late/namespaces/1/enable`
	connect := ""
	for i, address := range []string{target.Addr(), target.AddrOn(b.Rail)} {
		script += fmt.Sprintf("\np=ports/%d; mkdir $p; echo ipv4 > $p/addr_adrfam; echo %s > $p/addr_traddr; echo 4499 > $p/addr_trsvcid; echo tcp > $p/addr_trtype; ln -s /sys/kernel/config/nvmet/subsystems/late $p/subsystems/late",
			40000+i, address)
		connect += write("transport=tcp,traddr="+address+",trsvcid=4499,nqn=late,nr_io_queues=1,keep_alive_tmo=30") + "; "
	}
	shell(t, target, "set -e; "+script)
	return strings.TrimSpace(shell(t, host, "set -e; "+connect+`
		subsystem=$(dirname $(grep -l '^late$' /sys/class/nvme-subsystem/*/subsysnqn))
		echo round-robin > $subsystem/iopolicy
		for i in 1 2 3 4 5 6 7 8 9 10; do [ -b /dev/$(basename $subsystem/nvme*n1) ] && break; sleep 1; done
		echo /dev/$(basename $subsystem/nvme*n1)`))
}

// paths is the number of connections of the host to an address that are live.
func paths(t *testing.T, host *vm.Machine, address string) (n int) {
	t.Helper()
	for _, state := range strings.Fields(shell(t, host, "for c in /sys/class/nvme/nvme*; do grep -q traddr="+address+", $c/address && cat $c/state; done 2>/dev/null || true")) {
		if state == "live" {
			n++
		}
	}
	return n
}

// lateWrites are writes to the first four blocks of a device.
type lateWrites struct {
	t            *testing.T
	network      *vm.Network
	host, target *vm.Machine
	device       string
	moves        bool // the host goes on over another path at once
}

// prepare makes what is written.
func (l lateWrites) prepare() {
	l.t.Helper()
	for _, what := range []string{"old", "new"} {
		shell(l.t, l.host, fmt.Sprintf("yes %s | head -c 4096 > /tmp/%s", what, what))
	}
}

// areKept checks that the target has all newer writes. The other one, which has the other copy, is killed.
func (l lateWrites) areKept(other *vm.Machine) {
	l.t.Helper()
	other.Kill()
	shell(l.t, l.host, "dd if=/dev/zero of="+l.device+" bs=4096 count=1 seek=100 oflag=direct 2>/dev/null")
	if kept := l.count("new"); kept != 4 {
		l.t.Errorf("of 4 newer writes %d are left on the copy that missed them first; old ones: %d", kept, l.count("old"))
	}
}

// holdOldWrites begins to write "old" to each block, while what the host sends to the target is kept
// back. deliver delivers those writes, and nothing that the host has sent since.
func (l lateWrites) holdOldWrites() (deliver func()) {
	l.t.Helper()
	l.network.Set(l.host, l.target, vm.Fault{Hold: true})
	done := shell(l.t, l.host, "rm -f /tmp/done.*; for i in 0 1 2 3; do (dd if=/tmp/old of="+l.device+" bs=4096 count=1 seek=$i oflag=direct && touch /tmp/done.$i) >/dev/null 2>&1 & done; sleep 1; ls /tmp | grep -c '^done' || true")
	if strings.TrimSpace(done) == "4" && !l.moves {
		l.t.Error("all writes are done although the network keeps back what goes to the target")
	}
	return l.network.TakeHeld(l.host, l.target)
}

// writeNew waits until the writes that were kept back are acknowledged, without the path that was
// lost, and then writes "new" to the same blocks.
func (l lateWrites) writeNew() {
	l.t.Helper()
	shell(l.t, l.host, `for n in $(seq 60); do [ $(ls /tmp | grep -c '^done') = 4 ] && break; sleep 1; done; [ $(ls /tmp | grep -c '^done') = 4 ]
		for i in 0 1 2 3; do dd if=/tmp/new of=`+l.device+` bs=4096 count=1 seek=$i oflag=direct 2>/dev/null || exit 1; done`)
}

// count is how many of the blocks begin with a word.
func (l lateWrites) count(word string) (n int) {
	l.t.Helper()
	for i := range 4 {
		if strings.HasPrefix(shell(l.t, l.host, fmt.Sprintf("dd if=%s bs=4096 count=1 skip=%d iflag=direct 2>/dev/null | head -c 3", l.device, i)), word) {
			n++
		}
	}
	return n
}

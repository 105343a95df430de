// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// shell runs a script that must succeed and returns its output.
func shell(t *testing.T, m *Machine, script string) string {
	t.Helper()
	out, err := m.Shell(t.Context(), script)
	must(t, err)
	return strings.TrimSpace(out)
}

func TestKernelMachine(t *testing.T) {
	c := NewCluster(t)
	m := c.Start("m1", NVMe("1GiB", "A1"), NVMe("512MiB", "A2"), VolatileNVMe("64MiB", "A3"), VirtioDisk("64MiB", "V1"), StateDisk())
	t.Run("a command gives its output and exit code", func(t *testing.T) { testCommands(t, m) })
	t.Run("a command ends with its context", func(t *testing.T) { testCancel(t, m) })
	t.Run("files cross in both directions", func(t *testing.T) { testFiles(t, m) })
	t.Run("the programs are there", func(t *testing.T) { testPrograms(t, m) })
	t.Run("drives carry their serials and sizes", func(t *testing.T) { testSerials(t, m) })
	t.Run("daemons can be killed and started again", func(t *testing.T) { testDaemons(t, m) })
	t.Run("clocks can be compared and set", func(t *testing.T) { testClock(t, m) })
	t.Run("a drive fails and is good again", func(t *testing.T) { testDriveFault(t, m) })
	t.Run("a drive is pulled and put back", func(t *testing.T) { testPull(t, m) })
	t.Run("drives and state survive a power cut, the root does not", func(t *testing.T) { testPowerCut(t, m) })
}

func testCommands(t *testing.T, m *Machine) {
	out, err := m.Run(t.Context(), "sh", "-c", "echo out; echo bad >&2; exit 3")
	exit, ok := errors.AsType[*ExitError](err)
	if !ok || exit.Code != 3 || exit.Stderr != "bad" || out != "out\n" {
		t.Errorf("Run = %q, %v, want out, exit code 3 and bad", out, err)
	}
	if _, err := m.Run(t.Context(), "no-such-program"); err == nil || strings.Contains(err.Error(), "exit code") {
		t.Errorf("Run(no-such-program) = %v, want that it is not found", err)
	}
	if _, err := m.Shell(t.Context(), "false\necho on"); err == nil {
		t.Error("Shell continued after a failed command")
	}
	if got, want := shell(t, m, "cat /proc/sys/kernel/hostname"), "m1"; got != want {
		t.Errorf("host name = %q, want %q", got, want)
	}
}

func testCancel(t *testing.T, m *Machine) {
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	begin := time.Now()
	_, err := m.Run(ctx, "sh", "-c", "sleep 1000 & sleep 1000")
	if !errors.Is(err, context.DeadlineExceeded) || time.Since(begin) > 10*time.Second {
		t.Errorf("Run = %v after %s, want that its context ended", err, time.Since(begin))
	}
	if got := shell(t, m, "ps | grep -c '[s]leep 1000' || true"); got != "0" {
		t.Errorf("%s of its processes still run", got)
	}
}

func testFiles(t *testing.T, m *Machine) {
	data := bytes.Repeat([]byte("weft0123"), 1<<20)
	begin := time.Now()
	must(t, m.WriteFile(t.Context(), "/tmp/deep/file", data, 0o600))
	wrote := time.Now()
	got, err := m.ReadFile(t.Context(), "/tmp/deep/file")
	must(t, err)
	if !bytes.Equal(got, data) {
		t.Errorf("read %d bytes that are not the %d written", len(got), len(data))
	}
	t.Logf("8 MiB: written in %s, read in %s", wrote.Sub(begin), time.Since(wrote))
	must(t, m.WriteFile(t.Context(), "/tmp/empty", nil, 0o644))
	if got, err := m.ReadFile(t.Context(), "/tmp/empty"); err != nil || len(got) != 0 {
		t.Errorf("ReadFile(empty) = %q, %v", got, err)
	}
	if _, err := m.ReadFile(t.Context(), "/tmp/none"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("ReadFile(none) = %v, want fs.ErrNotExist", err)
	}
}

func testPrograms(t *testing.T, m *Machine) {
	shell(t, m, `
		fio --version; nvme version; dmsetup version; mkfs.xfs -V
		modprobe brd rd_nr=1 rd_size=65536
		mkfs.ext4 -q /dev/ram0; mount -t ext4 /dev/ram0 /mnt; umount /mnt; e2fsck -fp /dev/ram0
		modprobe dm_mirror; modprobe nvmet-tcp; modprobe nvme-tcp; modprobe xfs; modprobe loop; modprobe dm-flakey
		test -x "$(command -v weft)"; test -x "$(command -v workload)"
	`)
}

func testSerials(t *testing.T, m *Machine) {
	got := shell(t, m, `for b in /sys/block/nvme*n1; do
		read serial < $b/device/serial; read size < $b/size; echo $serial $size; done | sort
		for b in /sys/block/vd*; do cat $b/serial; echo; done | sort`)
	if want := "A1 2097152\nA2 1048576\nA3 131072\nV1\nweft-state\nweft-tools"; got != want {
		t.Errorf("drives = %q, want %q", got, want)
	}
}

func testDaemons(t *testing.T, m *Machine) {
	d, err := m.Start(t.Context(), "ticker", "sh", "-c", "trap 'echo bye; exit 0' TERM; echo hello; while :; do sleep 0.1; done")
	must(t, err)
	waitFor(t, "hello", func() bool { return strings.Contains(d.Log(), "hello") })
	if !d.Running() {
		t.Error("Running = false for a daemon that runs")
	}
	must(t, d.Kill(t.Context()))
	if d.Running() {
		t.Error("Running = true after Kill")
	}
	must(t, d.Restart(t.Context()))
	waitFor(t, "a second hello", func() bool { return strings.Count(d.Log(), "hello") == 2 })
	must(t, d.Stop(t.Context()))
	if code, err := d.Wait(t.Context()); code != 0 || err != nil || !strings.Contains(d.Log(), "bye") {
		t.Errorf("Wait after Stop = %d, %v, want 0; log %q", code, err, d.Log())
	}
	short, err := m.StartDaemon(t.Context(), "short", Command{Argv: []string{"sh", "-c", "exit 7"}, MayExit: true})
	must(t, err)
	if code, err := short.Wait(t.Context()); code != 7 || err != nil {
		t.Errorf("Wait = %d, %v, want 7", code, err)
	}
}

func waitFor(t *testing.T, what string, done func() bool) {
	t.Helper()
	for range 200 {
		if done() {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Fatalf("%s did not come", what)
}

func testClock(t *testing.T, m *Machine) {
	offset, within, err := m.ClockOffset(t.Context())
	must(t, err)
	t.Logf("clock offset %s, within %s", offset, within)
	if offset.Abs() > time.Second || within > 500*time.Millisecond {
		t.Errorf("ClockOffset = %s within %s just after boot", offset, within)
	}
	time.Sleep(2 * time.Second)
	later, _, err := m.ClockOffset(t.Context())
	must(t, err)
	if drift := (later - offset).Abs(); drift > 50*time.Millisecond {
		t.Errorf("the clock drifted by %s in 2s", drift)
	}
	must(t, m.SetClock(t.Context(), time.Now().Add(time.Hour)))
	offset, _, err = m.ClockOffset(t.Context())
	must(t, err)
	if off := (offset - time.Hour).Abs(); off > time.Second {
		t.Errorf("ClockOffset = %s after the clock was set an hour ahead", offset)
	}
	must(t, m.SetClock(t.Context(), time.Now()))
}

// nvme finds the block device of a serial.
func nvme(t *testing.T, m *Machine, serial string) string {
	t.Helper()
	return shell(t, m, `for b in /sys/block/nvme*n1; do
		read s < $b/device/serial; if [ "$s" = `+serial+` ]; then echo /dev/${b##*/}; fi; done`)
}

func testDriveFault(t *testing.T, m *Machine) {
	dev := nvme(t, m, "A1")
	write := "dd if=/dev/zero of=" + dev + " bs=4k count=8 oflag=direct conv=notrunc 2>&1"
	read := "dd if=" + dev + " of=/dev/null bs=4k count=8 iflag=direct 2>&1"
	d := m.Drive("A1")
	shell(t, m, write+"\n"+read)
	must(t, d.Fail(t.Context(), DriveFault{Writes: true}))
	if _, err := m.Shell(t.Context(), write); err == nil {
		t.Error("a write to a drive that fails writes succeeded")
	}
	shell(t, m, read)
	must(t, d.Fail(t.Context(), DriveFault{Reads: true}))
	if _, err := m.Shell(t.Context(), read); err == nil {
		t.Error("a read from a drive that fails reads succeeded")
	}
	shell(t, m, write)
	must(t, d.Fail(t.Context(), DriveFault{}))
	shell(t, m, write+"\n"+read)
}

func testPull(t *testing.T, m *Machine) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	must(t, m.Drive("A2").Pull(ctx))
	if dev := nvme(t, m, "A2"); dev != "" {
		t.Errorf("the pulled drive is still %s", dev)
	}
	must(t, m.Drive("A2").Plug(ctx))
	waitFor(t, "the drive that was put back", func() bool { return nvme(t, m, "A2") != "" })
}

func testPowerCut(t *testing.T, m *Machine) {
	dev := nvme(t, m, "A1")
	shell(t, m, "echo kept > /var/lib/weft/state; sync; echo gone > /root/file; printf synced | dd of="+dev+" conv=notrunc,fsync 2>&1")
	cached := func(synced string) string { // 256 blocks are flushed, and as many are not
		return "tr '\\0' x </dev/zero | dd of=" + nvme(t, m, "A3") + " bs=64k count=16 iflag=fullblock oflag=direct " + synced + " 2>&1"
	}
	shell(t, m, cached("conv=fsync"))
	shell(t, m, cached("seek=16"))
	m.Kill()
	if m.Running() {
		t.Error("Running = true after Kill")
	}
	if _, err := m.Run(t.Context(), "true"); err == nil {
		t.Error("a machine that is off ran a command")
	}
	must(t, m.Boot(t.Context()))
	got := shell(t, m, "cat /var/lib/weft/state; ls /root; head -c6 "+nvme(t, m, "A1"))
	if want := "kept\nsynced"; got != want {
		t.Errorf("after the power cut = %q, want %q", got, want)
	}
	// What was not flushed is there or not, each block by itself.
	kept := func(from int) string {
		return shell(t, m, fmt.Sprintf("dd if=%s bs=1M skip=%d count=1 2>/dev/null | tr -d '\\0' | wc -c", nvme(t, m, "A3"), from))
	}
	lost := m.Drive("A3").Lost()
	if all, some := kept(0), kept(1); all != fmt.Sprint(1<<20) || some != fmt.Sprint(1<<20-lost*4096) || lost == 0 || lost == 256 {
		t.Errorf("of a volatile drive %s bytes are left that were flushed and %s that were not; it says that it lost %d blocks", all, some, lost)
	}
	shell(t, m, cached("seek=32"))
	must(t, m.Reboot(t.Context()))
	if all := kept(2); all != fmt.Sprint(1<<20) {
		t.Errorf("after an orderly reboot %s bytes are left on a volatile drive", all)
	}
	if got := shell(t, m, "cat /var/lib/weft/state"); got != "kept" {
		t.Errorf("after the reboot the state disk holds %q", got)
	}
}

func TestKernelNetwork(t *testing.T) {
	c := NewCluster(t)
	a, b, d := c.Machine("a"), c.Machine("b"), c.Machine("d")
	c.Boot(t.Context(), a, b, d)
	n := c.Network()
	reaches := func(from, to *Machine) bool {
		_, err := from.Run(t.Context(), "ping", "-c1", "-W1", to.Addr())
		return err == nil
	}
	want := func(what string, ab, ba, ad bool) {
		t.Helper()
		got := [3]bool{reaches(a, b), reaches(b, a), reaches(a, d)}
		if diff := cmp.Diff([3]bool{ab, ba, ad}, got); diff != "" {
			t.Errorf("%s: reach a-b, b-a, a-d (-want +got):\n%s", what, diff)
		}
	}
	want("at first", true, true, true)
	n.Cut(a, b)
	want("a and b cut", false, false, true)
	n.Heal(a, b)
	n.Isolate(a)
	want("a isolated", false, false, false)
	if got := shell(t, a, "echo control"); got != "control" {
		t.Errorf("the control port of an isolated machine said %q", got)
	}
	n.Rejoin(a)
	want("healed", true, true, true)
	t.Run("one direction", func(t *testing.T) { testOneDirection(t, n, a, b) })
	t.Run("delay", func(t *testing.T) { testDelay(t, n, a, b) })
	t.Run("loss", func(t *testing.T) { testLoss(t, n, a, b) })
	t.Run("throughput", func(t *testing.T) { testThroughput(t, n, a, b) })
}

// testOneDirection sends datagrams, which need no reply.
func testOneDirection(t *testing.T, n *Network, a, b *Machine) {
	shell(t, a, "ping -c1 -W1 "+b.Addr()) // both know each other's MAC address
	n.Set(b, a, Fault{Cut: true})
	defer n.Set(b, a, Fault{})
	before := shell(t, b, "awk '/eth0/{print $3}' /proc/net/dev")
	_, _ = a.Run(t.Context(), "ping", "-c3", "-W1", b.Addr())
	if after := shell(t, b, "awk '/eth0/{print $3}' /proc/net/dev"); after == before {
		t.Error("a to b carries nothing though only b to a is cut")
	}
	if _, err := b.Run(t.Context(), "ping", "-c1", "-W1", a.Addr()); err == nil {
		t.Error("b reaches a though b to a is cut")
	}
}

// roundTrip is the shortest of several round trips, since a busy machine delays some.
func roundTrip(t *testing.T, a, b *Machine) time.Duration {
	t.Helper()
	out := shell(t, a, "ping -c10 -i0.2 "+b.Addr()+" | sed -n 's|.*= \\([0-9.]*\\)/.*|\\1ms|p'")
	d, err := time.ParseDuration(out)
	must(t, err)
	return d
}

func testDelay(t *testing.T, n *Network, a, b *Machine) {
	plain := roundTrip(t, a, b)
	n.SetBoth(a, b, Fault{Delay: 150 * time.Millisecond})
	slow := roundTrip(t, a, b)
	n.Heal(a, b)
	t.Logf("round trip %s, delayed %s", plain, slow)
	if slow < 300*time.Millisecond || slow > 600*time.Millisecond {
		t.Errorf("round trip = %s with 150 ms each way, want about 300 ms more than %s", slow, plain)
	}
}

func testLoss(t *testing.T, n *Network, a, b *Machine) {
	n.Set(a, b, Fault{Loss: 0.5})
	defer n.Set(a, b, Fault{})
	out, _ := a.Run(t.Context(), "ping", "-c40", "-i0.05", "-W1", b.Addr())
	var sent, received int
	for line := range strings.Lines(out) {
		if _, err := fmt.Sscanf(line, "%d packets transmitted, %d", &sent, &received); err == nil {
			break
		}
	}
	if received < 5 || received > 35 {
		t.Errorf("%d of %d packets came back at a loss of a half:\n%s", received, sent, out)
	}
}

func testThroughput(t *testing.T, n *Network, a, b *Machine) {
	const mib = 256
	// nc passes the connection to dd, because nc itself copies only 1 KiB at a time.
	d, err := b.Start(t.Context(), "sink", "nc", "-l", "-p", "9000", "-e", "dd", "of=/dev/null", "bs=64k")
	must(t, err)
	waitFor(t, "the listener", func() bool {
		out, err := b.Run(t.Context(), "netstat", "-ltn")
		return err == nil && strings.Contains(out, ":9000")
	})
	begin := time.Now()
	shell(t, a, fmt.Sprintf("nc %s 9000 -e dd if=/dev/zero bs=64k count=%d", b.Addr(), mib*16))
	_, err = d.Wait(t.Context())
	must(t, err)
	rate := mib / time.Since(begin).Seconds()
	t.Logf("network throughput: %.0f MiB/s, %d frames dropped", rate, n.Dropped())
	got, err := strconv.Atoi(shell(t, b, "cat /sys/class/net/eth0/statistics/rx_bytes"))
	must(t, err)
	if got < mib<<20 {
		t.Errorf("%d bytes arrived, want at least %d", got, mib<<20)
	}
}

func TestKernelFiveMachinesBootSideBySide(t *testing.T) {
	c := NewCluster(t)
	var all []*Machine
	for i := range 5 {
		all = append(all, c.Machine(fmt.Sprintf("m%d", i+1), NVMe("1GiB", fmt.Sprintf("S%d", i)), StateDisk()))
	}
	c.Boot(t.Context(), all...)
	for _, m := range all {
		if got := shell(t, m, "cat /proc/sys/kernel/hostname"); got != m.Name() {
			t.Errorf("host name = %q, want %q", got, m.Name())
		}
	}
}

// recorder is a test that records failures instead of failing.
type recorder struct {
	*testing.T
	mu       sync.Mutex
	failures []string
}

func (r *recorder) Errorf(format string, args ...any) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failures = append(r.failures, fmt.Sprintf(format, args...))
}

func (r *recorder) failed() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return strings.Join(r.failures, "\n")
}

func TestKernelSilentEndsAreFailures(t *testing.T) {
	deaths := map[string]struct{ script, want string }{
		"a panic":                {"echo c > /proc/sysrq-trigger", "Kernel panic"},
		"a reset":                {"echo b > /proc/sysrq-trigger", "ended unexpectedly"},
		"the end of the server":  {"kill -9 $(ps | awk '/[e]xe serve/{print $1}')", "the server has ended"},
		"a warning that matters": {"echo '<3>WARNING: CPU: 0 PID: 1 at made/up.c' > /dev/kmsg", "made/up.c"},
		"a daemon's exit":        {"kill -9 $(ps | awk '/[s]leep 4242/{print $1}')", "sleeper on m1 ended by itself"},
	}
	for name, death := range deaths {
		t.Run(name, func(t *testing.T) {
			r := &recorder{T: t}
			m := NewCluster(r).Start("m1")
			_, err := m.Start(t.Context(), "sleeper", "sleep", "4242")
			must(t, err)
			if out, err := m.Shell(t.Context(), death.script); err != nil {
				t.Logf("%s, %v", out, err)
			}
			waitFor(t, "the report of "+name, func() bool { return strings.Contains(r.failed(), death.want) })
		})
	}
}

// TestKernelNoMachineOutlivesTheTest kills a test process that runs a machine. If the
// variable is set, it is that process itself.
func TestKernelNoMachineOutlivesTheTest(t *testing.T) {
	const marker = "qemu runs as "
	if os.Getenv("WEFT_TEST_BE_KILLED") != "" {
		m := NewCluster(t).Start("m1")
		fmt.Printf("\n%s%d\n", marker, m.boot.process.Pid)
		time.Sleep(time.Minute)
		return
	}
	Require(t)
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), "WEFT_TEST_BE_KILLED=1", "WEFT_VM_LOGS="+t.TempDir(), "TMPDIR="+t.TempDir())
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	var pid int
	for lines := bufio.NewScanner(out); pid == 0 && lines.Scan(); {
		if text, ok := strings.CutPrefix(lines.Text(), marker); ok {
			pid, err = strconv.Atoi(text)
			must(t, err)
		}
	}
	must(t, cmd.Process.Kill())
	_ = cmd.Wait()
	if pid == 0 {
		t.Fatal("the process did not start a machine")
	}
	waitFor(t, "the end of QEMU", func() bool { return errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) })
}

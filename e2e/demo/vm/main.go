// SPDX-License-Identifier: Apache-2.0

// Demo shows Weft's main job as a story in virtual machines with real kernels. It creates,
// attaches and writes a mirrored, striped volume over three targets. A target's power is
// cut: I/O stalls and continues without an error. The target returns and is resynchronized;
// then the target with the other copy dies.
package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"time"

	"weft.dev/weft/e2e/testbed"
	"weft.dev/weft/e2e/vm"
	"weft.dev/weft/proto/pb"
)

func main() {
	verbose := flag.Bool("v", false, "also print what the machines do")
	flag.Parse()
	start := time.Now()
	code := testbed.Main("demo", *verbose, story)
	if code == 0 {
		fmt.Printf("\nmake demo-vm: PASS in %v: no error reached the application, every acknowledged write is on the volume\n", time.Since(start).Round(time.Second))
	} else {
		fmt.Printf("\nmake demo-vm: FAIL after %v: see above\n", time.Since(start).Round(time.Second))
	}
	os.Exit(code)
}

func chapter(format string, args ...any) { fmt.Printf("\n— "+format+"\n", args...) }

func tell(format string, args ...any) { fmt.Printf("  "+format+"\n", args...) }

// typed prints a command and its output, as an operator would see them.
func typed(b *testbed.Bed, args ...string) string {
	fmt.Printf("  $ weft %s\n", strings.Join(args, " "))
	out := b.Weft(args...)
	for line := range strings.Lines(strings.TrimRight(out, "\n")) {
		fmt.Print("    ", line)
	}
	if out != "" {
		fmt.Println()
	}
	return strings.TrimSpace(out)
}

const span = 16 // MiB; the part that the writer uses

func story(t vm.TB) {
	chapter("Five machines boot Debian's kernel %s: m1 (volmgr), t1 t2 t3 (targets with an NVMe drive each), c1 (client)", vm.KernelVersion())
	begin := time.Now()
	b := testbed.Start(t, testbed.Options{})
	c1 := b.Clients[0]
	tell("they are up and their drives added after %v", time.Since(begin).Round(time.Second))
	typed(b, "drive", "list")

	chapter("A volume: two columns of two copies, never two copies on one node")
	typed(b, "volume", "create", "db1", "--size", "512MiB", "--stripes", "2", "--copies", "2", "--wait")
	device := typed(b, "attach", "db1", "--node", "c1")
	run(t, c1, "mkfs.ext4 -q -E lazy_itable_init=0 "+device+" 128M; mkdir -p /mnt/db1; mount "+device+" /mnt/db1; cp -r /bin /mnt/db1/; sync; (cd /mnt/db1 && find . -type f | xargs sha256sum) > /tmp/sums; umount /mnt/db1")
	tell("it has an ext4 file system, and files with recorded checksums")
	b.Detach("db1")
	device = b.Attach("db1", c1)
	check := "cd /mnt/db1; sha256sum -c /tmp/sums >/dev/null; cd /"
	run(t, c1, "mount "+device+" /mnt/db1; "+check)
	tell("after detach and attach every file is unchanged")

	chapter("A program writes to a file without pause and records every acknowledged write; then a target's power is cut")
	file := "/mnt/db1/data"
	run(t, c1, fmt.Sprintf("dd if=/dev/zero of=%s bs=1M count=%d conv=fsync 2>/dev/null", file, span))
	w := b.Write(c1, file, span, 200, 1)
	w.AwaitProgress(200, time.Minute)
	first := b.Holder("db1", 0, 1)
	die(b, w, first)
	typed(b, "explain", "volume", "db1")

	chapter("%s returns and is resynchronized", first.Name())
	begin = time.Now()
	b.Up(first)
	b.WaitHealth("db1", pb.Health_HEALTH_HEALTHY, 3*time.Minute)
	tell("healthy again %v after its power came back", time.Since(begin).Round(time.Second))
	for _, e := range b.Events("volume db1") {
		if e.Kind == "leg.in-sync" {
			tell("%s", e.Text)
		}
	}

	chapter("Now the machine with the other copy dies")
	second := b.Holder("db1", 0, 0)
	die(b, w, second)
	w.Stop()
	b.Verify(c1, file, span, testbed.Acks{}.Add(w))
	tell("%d writes were acknowledged, and the last one of every block is on the volume", len(w.Log()))
	run(t, c1, check+"; umount /mnt/db1; e2fsck -fn "+device+" >/dev/null")
	tell("the other files are unchanged, and the file system is clean")
	typed(b, "status")
}

// die cuts a target's power and reports what the application noticed.
func die(b *testbed.Bed, w *testbed.Writer, target *vm.Machine) {
	target.Kill()
	tell("%s is dead", target.Name())
	w.AwaitProgress(100, time.Minute)
	w.NoErrors()
	stall, _ := w.Stall()
	tell("the application: a stall of %d ms, no error", stall.Milliseconds())
	if e := b.LastEvent("volume db1", "leg.stale"); e != nil {
		tell("volmgr's record, made before the first write continued: %s", e.Text)
	}
}

func run(t vm.TB, m *vm.Machine, script string) {
	if out, err := m.Shell(t.Context(), script); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

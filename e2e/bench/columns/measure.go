// SPDX-License-Identifier: Apache-2.0

package columns

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/e2e/bench/fio"
	"weft.dev/weft/e2e/vm"
)

// Options say what to measure.
type Options struct {
	CPUs    int     // processors of the machine
	Rounds  int     // of each workload on each device; the median counts
	Seconds float64 // of one run
	Out     io.Writer
}

// workload is one fio job, which runs once on each processor.
type workload struct {
	name, rw, bs string
	depth        int
}

var workloads = []workload{
	{"4k random read, depth 32", "randread", "4k", 32},
	{"4k random write, depth 32", "randwrite", "4k", 32},
	{"128k sequential read, depth 8", "read", "128k", 8},
	{"128k sequential write, depth 8", "write", "128k", 8},
}

// device is one that is measured.
type device struct {
	kind, path string
	columns    int
}

// kinds are the devices that are compared with raw ones.
func kinds() []string {
	if vm.KernelVersion() == "6.1" { // Debian's has no ublk
		return []string{"kernel"}
	}
	return []string{"kernel", "user"}
}

// Measure prints a table for a machine with o.CPUs processors.
func Measure(t vm.TB, o Options) {
	kinds := kinds()
	modules := []string{"dm_mod", "dm_mirror", "loop", fmt.Sprintf("brd rd_nr=%d rd_size=%d", most*copies, legSize/1024)}
	if slices.Contains(kinds, "user") {
		modules = append(modules, "ublk_drv")
	}
	m := vm.NewCluster(t).Start("columns", vm.CPUs(o.CPUs), vm.Memory(3072), vm.Modules(modules...))
	fmt.Fprintf(o.Out, "kernel %s, %d processors, %d rounds of %v s; fio runs once on each processor\n\n", vm.KernelVersion(), o.CPUs, o.Rounds, o.Seconds)
	program, err := os.Executable()
	if err == nil {
		err = m.Push(t.Context(), program, "/tmp/bench")
	}
	if err != nil {
		t.Fatalf("copy the program into the machine: %v", err)
	}
	var devices []device
	for n := 1; n <= most; n *= 2 {
		for _, kind := range append([]string{"raw"}, kinds...) {
			devices = append(devices, device{kind, start(t, m, kind, n), n})
		}
	}
	fmt.Fprintf(o.Out, "%-32s %8s %10s %8s\n", "IOPS as a ratio to raw", "columns", "raw IOPS", strings.Join(kinds, "     "))
	for _, w := range workloads {
		for at := 0; at < len(devices); at += 1 + len(kinds) {
			compare(t, m, o, w, devices[at:at+1+len(kinds)])
		}
	}
}

// start makes a device and returns its path.
func start(t vm.TB, m *vm.Machine, kind string, columns int) string {
	argv := []string{"/tmp/bench", Role, kind, fmt.Sprint(columns)}
	if kind != "user" {
		out, err := m.Run(t.Context(), argv...)
		if err != nil {
			t.Fatalf("make a device of kind %s: %v\n%s", kind, err, out)
		}
		return strings.TrimSpace(out)
	}
	d, err := m.Start(t.Context(), fmt.Sprintf("user%d", columns), argv...)
	if err != nil {
		t.Fatalf("%v", err)
	}
	for range 300 {
		if path, way, ok := strings.Cut(strings.TrimSpace(d.Log()), " "); ok {
			if way != "ublk" {
				t.Fatalf("the block device of user space is %s, not ublk", way)
			}
			return path
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Fatalf("the user-space volume of %d columns did not appear within 30 s:\n%s", columns, d.Log())
	return ""
}

// compare runs a workload on the devices of one number of columns, the raw one first.
func compare(t vm.TB, m *vm.Machine, o Options, w workload, devices []device) {
	ratios := make([][]float64, len(devices))
	for range o.Rounds {
		raw := 0.0
		for i, d := range devices {
			reached := iops(t, m, o, w, d)
			if i == 0 {
				raw = reached
				ratios[0] = append(ratios[0], raw)
				continue
			}
			ratios[i] = append(ratios[i], reached/raw)
		}
	}
	fmt.Fprintf(o.Out, "%-32s %8d %10.0f", w.name, devices[0].columns, fio.Median(ratios[0]))
	for _, r := range ratios[1:] {
		fmt.Fprintf(o.Out, " %8.2f", fio.Median(r))
	}
	fmt.Fprintln(o.Out)
}

// iops returns the I/Os per second that fio reaches on a device.
func iops(t vm.TB, m *vm.Machine, o Options, w workload, d device) float64 {
	all := fio.Run(t, m, "--name=job", "--filename="+d.path, "--rw="+w.rw, "--bs="+w.bs, fmt.Sprintf("--iodepth=%d", w.depth),
		"--size=48m", "--offset_increment=1m", fmt.Sprintf("--numjobs=%d", o.CPUs), "--group_reporting",
		fmt.Sprintf("--runtime=%v", o.Seconds), "--ramp_time=0.5")
	if len(all) != 1 {
		t.Fatalf("fio on %s reports %d jobs, want one", d.path, len(all))
	}
	return all[0]
}

// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"
	"time"

	"weft.dev/weft/e2e/bench/fio"
	"weft.dev/weft/e2e/testbed"
	"weft.dev/weft/e2e/vm"
	"weft.dev/weft/proto/pb"
)

// workload is one fio job.
type workload struct {
	name, rw, bs string
	depth        int
}

var workloads = []workload{
	{"4k random read, depth 1", "randread", "4k", 1},
	{"4k random read, depth 32", "randread", "4k", 32},
	{"4k random write, depth 1", "randwrite", "4k", 1},
	{"4k random write, depth 32", "randwrite", "4k", 32},
	{"128k sequential read, depth 8", "read", "128k", 8},
	{"128k sequential write, depth 8", "write", "128k", 8},
}

// layouts are the measured volumes. The raw namespace is the one under the first, a volume
// with one leg.
var layouts = []struct {
	name            string
	stripes, copies int
}{{"1 leg", 1, 1}, {"RAID0 ×2", 2, 1}, {"RAID1", 1, 2}, {"RAID10 2×2", 2, 2}}

// measure runs the part "vm".
func measure(t vm.TB) {
	b := testbed.Start(t, testbed.Options{DriveSize: "3GiB"})
	c1 := b.Clients[0]
	fmt.Printf("kernel %s, three targets with one drive each, one client, TCP; %d rounds of %v s\n\n", vm.KernelVersion(), *rounds, *seconds)
	if strings.Contains("throughput", *section) {
		throughput(t, b, c1)
	}
	if strings.Contains("stall", *section) {
		stalls(t, b, c1)
	}
}

// throughput compares volumes with the raw namespace.
func throughput(t vm.TB, b *testbed.Bed, c1 *vm.Machine) {
	devices := map[string]string{}
	for i, l := range layouts {
		name := fmt.Sprintf("bench%d", i)
		b.Create(name, "256MiB", l.stripes, l.copies)
		devices[l.name] = b.Attach(name, c1)
	}
	raw := rawNamespace(t, b, c1)
	fmt.Printf("%-32s %14s", "IOPS as a ratio to the raw", "raw IOPS")
	for _, l := range layouts {
		fmt.Printf("%14s", l.name)
	}
	fmt.Println()
	for _, w := range workloads {
		compare(t, c1, w, raw, devices)
	}
	for i := range layouts {
		b.Detach(fmt.Sprintf("bench%d", i))
	}
}

// rawNamespace is the NVMe device under the volume of one leg.
func rawNamespace(t vm.TB, b *testbed.Bed, client *vm.Machine) string {
	leg := b.Volume("bench0").Legs[0]
	out, err := client.Shell(t.Context(), "for c in /sys/class/nvme-subsystem/*; do grep -q "+leg.VolumeId+" $c/subsysnqn && ls -d $c/nvme*n* | grep -v c[0-9]*n || true; done")
	if err != nil || strings.TrimSpace(out) == "" {
		t.Fatalf("find the raw namespace: %v %s", err, out)
	}
	parts := strings.Split(strings.Fields(out)[0], "/")
	return "/dev/" + parts[len(parts)-1]
}

// compare runs a workload on the raw namespace and on every volume, in turn.
func compare(t vm.TB, client *vm.Machine, w workload, raw string, devices map[string]string) {
	turn := []string{raw}
	for _, l := range layouts {
		turn = append(turn, devices[l.name])
	}
	ratios := make([][]float64, len(layouts))
	var raws []float64
	for range *rounds {
		reached := iops(t, client, w, turn)
		raws = append(raws, reached[0])
		for i := range layouts {
			ratios[i] = append(ratios[i], reached[i+1]/reached[0])
		}
	}
	fmt.Printf("%-32s %14.0f", w.name, fio.Median(raws))
	for i := range layouts {
		fmt.Printf("%14.2f", fio.Median(ratios[i]))
	}
	fmt.Println()
}

// iops runs fio on each device in turn, in one process, and returns the IOPS of each.
func iops(t vm.TB, client *vm.Machine, w workload, devices []string) []float64 {
	args := []string{"--rw=" + w.rw, "--bs=" + w.bs, fmt.Sprintf("--iodepth=%d", w.depth),
		"--size=64m", fmt.Sprintf("--runtime=%v", *seconds), "--ramp_time=1", "--stonewall"}
	for i, device := range devices {
		args = append(args, fmt.Sprintf("--name=job%d", i), "--filename="+device)
	}
	reached := fio.Run(t, client, args...)
	if len(reached) != len(devices) {
		t.Fatalf("fio on %v reports %d jobs", devices, len(reached))
	}
	return reached
}

// stalls kills a target several times while a writer runs. It breaks each stall down with
// the times that the initiator agent logs.
func stalls(t vm.TB, b *testbed.Bed, client *vm.Machine) {
	b.Create("stall", "256MiB", 1, 2)
	device := b.Attach("stall", client)
	var all []float64
	next := uint64(1)
	fmt.Printf("\nstall of a writer when a target's power is cut\n")
	for i := range *deaths {
		w := b.Write(client, device, 16, 200, next)
		w.AwaitProgress(100, time.Minute)
		victim := b.Holder("stall", 0, uint32(i%2))
		seen := len(b.Daemon(client).Log())
		victim.Kill()
		w.AwaitProgress(100, time.Minute)
		stall, _ := w.Stall()
		all = append(all, stall.Seconds())
		fmt.Printf("  death %d: %5.2f s  %s\n", i+1, stall.Seconds(), breakdown(b.Daemon(client).Log()[seen:]))
		next = w.Next()
		w.Stop()
		b.Up(victim)
		b.WaitHealth("stall", pb.Health_HEALTH_HEALTHY, 3*time.Minute)
	}
	fmt.Printf("  median:  %5.2f s\n", fio.Median(all))
}

// breakdown finds the agent's log line with the duration of each part.
func breakdown(log string) string {
	for line := range strings.Lines(log) {
		if !strings.Contains(line, `msg="leg released"`) {
			continue
		}
		var parts []string
		for word := range strings.FieldsSeq(line) {
			name, value, _ := strings.Cut(word, "=")
			if d, err := time.ParseDuration(value); err == nil && name != "column" {
				parts = append(parts, fmt.Sprintf("%s %.2f s", name, d.Seconds()))
			}
		}
		return strings.Join(parts, ", ")
	}
	return "(the agent did not log it)"
}

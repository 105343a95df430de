// SPDX-License-Identifier: Apache-2.0

package target

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"google.golang.org/protobuf/types/known/durationpb"

	"weft.dev/weft/e2e/promtool"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/figures"
	"weft.dev/weft/proto/pb"
)

// gathered are an agent's metrics: name, device and drive to value.
func gathered(t *testing.T, a *Agent) map[string]float64 {
	t.Helper()
	r := prometheus.NewPedanticRegistry()
	if err := r.Register(a); err != nil {
		t.Fatal(err)
	}
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			key := f.GetName()
			for _, l := range m.GetLabel() {
				key += " " + l.GetValue()
			}
			got[key] = m.GetGauge().GetValue() + m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return got
}

func TestTheHealthOfDrivesIsServedAsMetrics(t *testing.T) {
	a := &Agent{changed: make(chan struct{})}
	if got := gathered(t, a); len(got) != 0 {
		t.Errorf("before the first report there are %v", got)
	}
	a.publish(&pb.TargetReport{Devices: []*pb.Device{
		{Path: "/dev/sda"},
		{Path: "/dev/nvme0n1", DriveId: "d1", Health: &pb.DriveHealth{Smart: &pb.SmartLog{
			CriticalWarning: 4, Celsius: -3, SparePercent: 9, SpareThresholdPercent: 10, UsedPercent: 103,
			ReadBytes: 1024000, WrittenBytes: 512000, UnsafeShutdowns: 17, MediaErrors: 12, ErrorEntries: 29,
		}}},
		{Path: "/dev/sdb", DriveId: "d2", Health: &pb.DriveHealth{Ios: 7, Latency: durationpb.New(20 * time.Millisecond)}},
	}})
	want := map[string]float64{
		"weft_target_drive_critical_warning /dev/nvme0n1 d1":       4,
		"weft_target_drive_temperature_celsius /dev/nvme0n1 d1":    -3,
		"weft_target_drive_spare_ratio /dev/nvme0n1 d1":            0.09,
		"weft_target_drive_spare_threshold_ratio /dev/nvme0n1 d1":  0.1,
		"weft_target_drive_used_ratio /dev/nvme0n1 d1":             1.03,
		"weft_target_drive_read_bytes_total /dev/nvme0n1 d1":       1024000,
		"weft_target_drive_written_bytes_total /dev/nvme0n1 d1":    512000,
		"weft_target_drive_unsafe_shutdowns_total /dev/nvme0n1 d1": 17,
		"weft_target_drive_media_errors_total /dev/nvme0n1 d1":     12,
		"weft_target_drive_error_entries_total /dev/nvme0n1 d1":    29,
		"weft_target_drive_io_seconds /dev/sdb d2":                 0.02,
	}
	if diff := cmp.Diff(want, gathered(t, a)); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
}

func TestRefusedHostsAreAMetricWhereTheyAreCounted(t *testing.T) {
	const name = "weft_target_refused_hosts_total"
	counts := &Agent{changed: make(chan struct{}), kernel: kernel{refusals: func() *pb.Refusals { return nil }}}
	if got := gathered(t, counts); len(got) != 1 || got[name] != 0 {
		t.Errorf("before the first report there are %v", got)
	}
	counts.publish(&pb.TargetReport{Refusals: &pb.Refusals{Count: 3}})
	if got := gathered(t, counts); got[name] != 3 {
		t.Errorf("after three refusals there are %v", got)
	}
	other := &Agent{changed: make(chan struct{})}
	other.publish(&pb.TargetReport{})
	if got := gathered(t, other); len(got) != 0 {
		t.Errorf("on the kernel's path, which does not count them, there are %v", got)
	}
}

func TestTheIOOfLegsAndDrivesIsServedAsMetrics(t *testing.T) {
	one, two := block.LegID{UUID: block.UUIDFromRandom([16]byte{1})}, block.LegID{UUID: block.UUIDFromRandom([16]byte{2})}
	had := func(n int) (f figures.Figures) {
		var t figures.Tally
		for range n {
			t.Add(figures.Write, 4096, time.Millisecond, false)
		}
		t.Take(&f)
		return f
	}
	legs := map[block.LegID]figures.Figures{one: had(3), two: had(4)}
	a := &Agent{changed: make(chan struct{})}
	a.counting.Store(&counting{legs: func() (map[block.LegID]figures.Figures, error) { return legs, nil }})
	d1 := &pb.DriveReport{DriveId: "d1", Device: "/dev/sda", Legs: []*pb.LegLabel{{LegId: one.String()}, {LegId: two.String()}}}
	a.publish(&pb.TargetReport{Drives: []*pb.DriveReport{d1}})
	r := prometheus.NewPedanticRegistry()
	if err := r.Register(a); err != nil {
		t.Fatal(err)
	}
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	if wrong, err := promlint.NewWithMetricFamilies(families).Lint(); err != nil || len(wrong) > 0 {
		t.Errorf("the metrics are not as they should be: %v, %v", wrong, err)
	}
	legs = map[block.LegID]figures.Figures{one: had(1)} // mapped anew; the other one is gone
	got := gathered(t, a)
	for key, want := range map[string]float64{
		"weft_drive_ios_total d1 write":                   8,
		"weft_drive_bytes_total d1 write":                 8 * 4096,
		"weft_drive_io_seconds d1 write":                  8,
		"weft_leg_bytes_total " + one.String() + " write": 4096,
	} {
		if got[key] != want {
			t.Errorf("%s = %v, want %v", key, got[key], want)
		}
	}
	if r := a.readings(); len(r) != 1 || r[0].Object.GetDriveId() != "d1" || r[0].Figures[figures.Write].IOs != 8 {
		t.Errorf("the manager gets %v", r)
	}
	a.other = "another cluster"
	if r := a.readings(); r != nil {
		t.Errorf("a manager that is not obeyed gets %v", r)
	}
}

func TestTheKernelsCountersAreReadByKind(t *testing.T) {
	root := t.TempDir()
	dir := filepath.Join(root, "sys/class/block/dm-3")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	const stat = "  100 1 800 50  200 2 1600 70  0 90 120  5 0 4096 3  7 11\n"
	if err := os.WriteFile(filepath.Join(dir, "stat"), []byte(stat), 0o644); err != nil {
		t.Fatal(err)
	}
	id := block.LegID{UUID: block.UUIDFromRandom([16]byte{1})}
	legs, _ := kernelCounting(root, fixedNames{id: "/dev/dm-3"}).read(&pb.TargetReport{})
	want := figures.Figures{
		figures.Read:    {IOs: 100, Bytes: 800 * 512, Took: 50 * time.Millisecond},
		figures.Write:   {IOs: 200, Bytes: 1600 * 512, Took: 70 * time.Millisecond},
		figures.Discard: {IOs: 5, Bytes: 4096 * 512, Took: 3 * time.Millisecond},
		figures.Flush:   {IOs: 7, Took: 11 * time.Millisecond},
	}
	if diff := cmp.Diff(want, legs[id]); diff != "" {
		t.Errorf("figures (-want +got):\n%s", diff)
	}
}

// fixedNames are the names of legs that are mapped.
type fixedNames map[block.LegID]string

func (n fixedNames) List() (map[block.LegID]string, error) { return n, nil }
func (fixedNames) Set(block.LegID, string) error           { return nil }

func TestADrivesOwnLogAlerts(t *testing.T) {
	const rules = "../deploy/helm/weft/monitoring/rules.yaml"
	alerts := func(hold time.Duration, logs ...*pb.SmartLog) (r promtool.Recording) {
		r.Interval, r.Hold = time.Minute, hold
		for _, log := range logs {
			a := &Agent{changed: make(chan struct{})}
			a.publish(&pb.TargetReport{Devices: []*pb.Device{{Path: "/dev/nvme0n1", DriveId: "d1", Health: &pb.DriveHealth{Smart: log}}}})
			registry := prometheus.NewPedanticRegistry()
			registry.MustRegister(a)
			if err := r.Scrape(map[string]prometheus.Gatherer{"t1": registry}); err != nil {
				t.Fatal(err)
			}
		}
		return r
	}
	const noManager = "WeftNoLeader" // none is scraped here
	well := alerts(2*time.Hour, &pb.SmartLog{UsedPercent: 80, MediaErrors: 12}, &pb.SmartLog{UsedPercent: 80, MediaErrors: 12})
	well.Check(t, rules, noManager)
	worn := alerts(2*time.Hour, &pb.SmartLog{UsedPercent: 81})
	worn.Check(t, rules, noManager, "WeftDriveWorn")
	failing := alerts(10*time.Minute, &pb.SmartLog{MediaErrors: 12}, &pb.SmartLog{MediaErrors: 12}, &pb.SmartLog{MediaErrors: 13})
	failing.Check(t, rules, noManager, "WeftDriveMediaErrors")
}

// SPDX-License-Identifier: Apache-2.0

package target

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/protobuf/types/known/durationpb"

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
			got[key] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
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

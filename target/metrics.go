// SPDX-License-Identifier: Apache-2.0

package target

import (
	"github.com/prometheus/client_golang/prometheus"

	"weft.dev/weft/proto/pb"
)

// metric names one series of each drive.
func metric(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("weft_target_"+name, help, []string{"drive", "device"}, nil)
}

// series is one number of a drive's health.
type series struct {
	desc *prometheus.Desc
	kind prometheus.ValueType
	of   func(*pb.SmartLog) float64
}

// smartSeries are the numbers of a drive's own log.
func smartSeries() []series {
	counter, gauge := prometheus.CounterValue, prometheus.GaugeValue
	return []series{
		{metric("drive_critical_warning", "Critical warning bits of the drive's health log."), gauge,
			func(s *pb.SmartLog) float64 { return float64(s.GetCriticalWarning()) }},
		{metric("drive_temperature_celsius", "Composite temperature of the drive."), gauge,
			func(s *pb.SmartLog) float64 { return float64(s.GetCelsius()) }},
		{metric("drive_spare_ratio", "Spare capacity that is left."), gauge,
			func(s *pb.SmartLog) float64 { return float64(s.GetSparePercent()) / 100 }},
		{metric("drive_spare_threshold_ratio", "Spare capacity below which the drive warns."), gauge,
			func(s *pb.SmartLog) float64 { return float64(s.GetSpareThresholdPercent()) / 100 }},
		{metric("drive_used_ratio", "Part of the expected life that is used; can exceed 1."), gauge,
			func(s *pb.SmartLog) float64 { return float64(s.GetUsedPercent()) / 100 }},
		{metric("drive_read_bytes_total", "Bytes that hosts read from the drive, over its life."), counter,
			func(s *pb.SmartLog) float64 { return float64(s.GetReadBytes()) }},
		{metric("drive_written_bytes_total", "Bytes that hosts wrote to the drive, over its life."), counter,
			func(s *pb.SmartLog) float64 { return float64(s.GetWrittenBytes()) }},
		{metric("drive_unsafe_shutdowns_total", "Power losses without warning."), counter,
			func(s *pb.SmartLog) float64 { return float64(s.GetUnsafeShutdowns()) }},
		{metric("drive_media_errors_total", "Media and data integrity errors."), counter,
			func(s *pb.SmartLog) float64 { return float64(s.GetMediaErrors()) }},
		{metric("drive_error_entries_total", "Entries of the drive's error log."), counter,
			func(s *pb.SmartLog) float64 { return float64(s.GetErrorEntries()) }},
	}
}

func latencyDesc() *prometheus.Desc {
	return metric("drive_io_seconds", "Mean time of the device's reads and writes in the last minute.")
}

// Describe implements prometheus.Collector.
func (a *Agent) Describe(out chan<- *prometheus.Desc) {
	out <- latencyDesc()
	for _, s := range smartSeries() {
		out <- s.desc
	}
}

// Collect implements prometheus.Collector. It shows the drives of the newest report.
func (a *Agent) Collect(out chan<- prometheus.Metric) {
	a.mu.Lock()
	report := a.report // never changed once it is here
	a.mu.Unlock()
	all, latency := smartSeries(), latencyDesc()
	for _, d := range report.GetDevices() {
		h := d.GetHealth()
		if h.GetLatency() != nil {
			out <- prometheus.MustNewConstMetric(latency, prometheus.GaugeValue, h.GetLatency().AsDuration().Seconds(), d.GetDriveId(), d.GetPath())
		}
		for i := 0; i < len(all) && h.GetSmart() != nil; i++ {
			out <- prometheus.MustNewConstMetric(all[i].desc, all[i].kind, all[i].of(h.GetSmart()), d.GetDriveId(), d.GetPath())
		}
	}
}

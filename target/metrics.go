// SPDX-License-Identifier: Apache-2.0

package target

import (
	"github.com/prometheus/client_golang/prometheus"

	"weft.dev/weft/proto/metric"
	"weft.dev/weft/proto/pb"
)

// perDrive describes a series of each drive.
func perDrive(name, help string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, []string{"drive", "device"}, nil)
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
		{perDrive(metric.DriveCriticalWarning, "Critical warning bits of the drive's health log."), gauge,
			func(s *pb.SmartLog) float64 { return float64(s.GetCriticalWarning()) }},
		{perDrive(metric.DriveTemperature, "Composite temperature of the drive."), gauge,
			func(s *pb.SmartLog) float64 { return float64(s.GetCelsius()) }},
		{perDrive(metric.DriveSpareRatio, "Spare capacity that is left."), gauge,
			func(s *pb.SmartLog) float64 { return float64(s.GetSparePercent()) / 100 }},
		{perDrive(metric.DriveSpareThresholdRatio, "Spare capacity below which the drive warns."), gauge,
			func(s *pb.SmartLog) float64 { return float64(s.GetSpareThresholdPercent()) / 100 }},
		{perDrive(metric.DriveUsedRatio, "Part of the expected life that is used; can exceed 1."), gauge,
			func(s *pb.SmartLog) float64 { return float64(s.GetUsedPercent()) / 100 }},
		{perDrive(metric.DriveReadBytes, "Bytes that hosts read from the drive, over its life."), counter,
			func(s *pb.SmartLog) float64 { return float64(s.GetReadBytes()) }},
		{perDrive(metric.DriveWrittenBytes, "Bytes that hosts wrote to the drive, over its life."), counter,
			func(s *pb.SmartLog) float64 { return float64(s.GetWrittenBytes()) }},
		{perDrive(metric.DriveUnsafeShutdowns, "Power losses without warning."), counter,
			func(s *pb.SmartLog) float64 { return float64(s.GetUnsafeShutdowns()) }},
		{perDrive(metric.DriveMediaErrors, "Media and data integrity errors."), counter,
			func(s *pb.SmartLog) float64 { return float64(s.GetMediaErrors()) }},
		{perDrive(metric.DriveErrorEntries, "Entries of the drive's error log."), counter,
			func(s *pb.SmartLog) float64 { return float64(s.GetErrorEntries()) }},
	}
}

func latencyDesc() *prometheus.Desc {
	return perDrive(metric.DriveMeanIOSeconds, "Mean time of the device's reads and writes in the last minute.")
}

func refusedDesc() *prometheus.Desc {
	return prometheus.NewDesc(metric.TargetRefusedHosts, "Connections whose hosts did not prove their identity.", nil, nil)
}

// Describe implements prometheus.Collector.
func (a *Agent) Describe(out chan<- *prometheus.Desc) {
	out <- latencyDesc()
	out <- refusedDesc()
	for _, d := range describeFigures().all() {
		out <- d
	}
	for _, s := range smartSeries() {
		out <- s.desc
	}
}

// Collect implements prometheus.Collector. It shows the drives of the newest report.
func (a *Agent) Collect(out chan<- prometheus.Metric) {
	a.mu.Lock()
	report := a.report // never changed once it is here
	a.mu.Unlock()
	if a.kernel.refusals != nil {
		out <- prometheus.MustNewConstMetric(refusedDesc(), prometheus.CounterValue, float64(report.GetRefusals().GetCount()))
	}
	a.collectFigures(out)
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

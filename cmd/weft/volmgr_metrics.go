// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"weft.dev/weft/proto/pb"
)

// statusMetrics are the numbers of "weft status", asked for at each scrape.
type statusMetrics struct {
	get   func(context.Context) (*pb.Status, error)
	gauge []statusGauge
}

type statusGauge struct {
	desc  *prometheus.Desc
	value func(*pb.Status) float64
}

func newStatusMetrics(get func(context.Context) (*pb.Status, error)) *statusMetrics {
	m := &statusMetrics{get: get}
	add := func(name, help string, value func(*pb.Status) float64) {
		m.gauge = append(m.gauge, statusGauge{prometheus.NewDesc(name, help, nil, nil), value})
	}
	add("weft_capacity_bytes", "Bytes of all drives' extents.", func(s *pb.Status) float64 { return float64(s.GetCapacityBytes()) })
	add("weft_allocated_bytes", "Bytes of extents that are in legs.", func(s *pb.Status) float64 { return float64(s.GetAllocatedBytes()) })
	add("weft_nodes", "Nodes known.", func(s *pb.Status) float64 { return float64(s.GetNodes()) })
	add("weft_nodes_offline", "Nodes of which an agent is offline.", func(s *pb.Status) float64 { return float64(s.GetNodesOffline()) })
	add("weft_drives", "Drives taken in.", func(s *pb.Status) float64 { return float64(s.GetDrives()) })
	add("weft_drives_not_ready", "Drives that can not be used now.", func(s *pb.Status) float64 { return float64(s.GetDrivesNotReady()) })
	add("weft_volumes", "Volumes.", func(s *pb.Status) float64 { return float64(s.GetVolumes()) })
	add("weft_volumes_degraded", "Volumes that are served with fewer copies than they should have.", func(s *pb.Status) float64 { return float64(s.GetVolumesDegraded()) })
	add("weft_volumes_unavailable", "Volumes of which a column can not be served.", func(s *pb.Status) float64 { return float64(s.GetVolumesUnavailable()) })
	add("weft_attachments", "Attachments.", func(s *pb.Status) float64 { return float64(s.GetAttachments()) })
	return m
}

func (m *statusMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, g := range m.gauge {
		ch <- g.desc
	}
}

// scrapeTimeout limits the question that a scrape asks.
const scrapeTimeout = 5 * time.Second

func (m *statusMetrics) Collect(ch chan<- prometheus.Metric) {
	// The interface of collectors carries no context.
	ctx, cancel := context.WithTimeout(context.Background(), scrapeTimeout)
	defer cancel()
	s, err := m.get(ctx)
	for _, g := range m.gauge {
		if err != nil {
			ch <- prometheus.NewInvalidMetric(g.desc, err)
			continue
		}
		ch <- prometheus.MustNewConstMetric(g.desc, prometheus.GaugeValue, g.value(s))
	}
}

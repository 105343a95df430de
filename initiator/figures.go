// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"weft.dev/weft/initiator/keeper"
	"weft.dev/weft/proto/figures"
	"weft.dev/weft/proto/figures/wire"
	"weft.dev/weft/proto/metric"
	"weft.dev/weft/proto/pb"
)

// figures are those of the volumes that are here, by name.
func (a *Agent) figures() (all []*keeper.Figures) {
	a.mu.Lock()
	keepers := make([]volumeKeeper, 0, len(a.keepers))
	for _, k := range a.keepers {
		keepers = append(keepers, k)
	}
	a.mu.Unlock()
	for _, k := range keepers {
		if f := k.Figures(); f != nil {
			all = append(all, f)
		}
	}
	slices.SortFunc(all, func(x, y *keeper.Figures) int { return strings.Compare(string(x.Name), string(y.Name)) })
	return all
}

// sendFigures sends the figures to the manager until ctx ends.
func (a *Agent) sendFigures(ctx context.Context) {
	s := &wire.Sender{
		Manager: a.cfg.Manager, Node: string(a.cfg.Node), Source: pb.FiguresSource_FIGURES_SOURCE_INITIATOR, Read: a.readings,
		Ended: func(err error) { a.log.Debug("figures are not sent", "err", err) },
	}
	s.Run(ctx)
}

// legKey is the key of a leg's counts.
type legKey struct {
	volume       any
	column, copy int
}

// readings are the counts for the manager; none for that of another cluster.
func (a *Agent) readings() (all []wire.Reading) {
	a.mu.Lock()
	refused := a.cluster.why != ""
	a.mu.Unlock()
	if refused {
		return nil
	}
	for _, f := range a.figures() {
		all = append(all, wire.Reading{Key: f.Key, Object: &pb.ObjectFigures{VolumeId: f.Volume.String()}, Figures: f.Users, Held: f.Held})
		for _, l := range f.Legs {
			all = append(all, wire.Reading{Key: legKey{f.Key, l.Column, l.Copy}, Object: &pb.ObjectFigures{LegId: l.Leg.String()}, Figures: l.Sent})
		}
	}
	return all
}

// volumeMetric names one series of each volume or leg.
func volumeMetric(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, append([]string{"volume"}, labels...), nil)
}

// figuresDescriptions are the series of volumes and legs. Their number is bounded by what is
// attached here.
type figuresDescriptions struct{ ios, bytes, errors, took, held, leg *prometheus.Desc }

func describeFigures() figuresDescriptions {
	return figuresDescriptions{
		ios:    volumeMetric(metric.VolumeIOs, "I/Os of the volume's users on this host.", "op"),
		bytes:  volumeMetric(metric.VolumeBytes, "Bytes of the I/Os of the volume's users on this host.", "op"),
		errors: volumeMetric(metric.VolumeErrors, "I/Os of the volume's users on this host that failed.", "op"),
		took:   volumeMetric(metric.VolumeIOSeconds, "Time that I/Os of the volume's users took on this host.", "op"),
		held:   volumeMetric(metric.VolumeHeldSeconds, "Time in which I/O of the volume was held on this host, because a leg was lost or failed it, or the volume was held."),
		leg:    volumeMetric(metric.LegIOSeconds, "Time that I/Os to the leg took, those of rebuilds included.", "leg", "target"),
	}
}

func (d figuresDescriptions) all() []*prometheus.Desc {
	return []*prometheus.Desc{d.ios, d.bytes, d.errors, d.took, d.held, d.leg}
}

// collectFigures collects the series of volumes and legs.
func (a *Agent) collectFigures(out chan<- prometheus.Metric) {
	d := describeFigures()
	counter := func(desc *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, v, labels...)
	}
	for _, f := range a.figures() {
		name := string(f.Name)
		for op := range figures.Op(figures.Ops) {
			c := &f.Users[op]
			if op == figures.Any {
				if c.Latency != nil {
					both := figures.Count{Took: f.Users[figures.Read].Took + f.Users[figures.Write].Took, Latency: c.Latency}
					out <- histogram(d.took, &both, name, op.String())
				}
				continue
			}
			counter(d.ios, float64(c.IOs), name, op.String())
			counter(d.errors, float64(c.Errors), name, op.String())
			if op != figures.Flush {
				counter(d.bytes, float64(c.Bytes), name, op.String())
			}
			if f.Latencies {
				out <- histogram(d.took, c, name, op.String())
			}
		}
		if !f.Latencies {
			continue
		}
		counter(d.held, f.Held.Seconds(), name)
		for _, l := range f.Legs {
			all := l.Sent.Sum()
			out <- histogram(d.leg, &all, name, l.Leg.String(), l.Node)
		}
	}
}

// histogram is a native histogram of latencies.
func histogram(desc *prometheus.Desc, c *figures.Count, labels ...string) prometheus.Metric {
	buckets, zero := c.Latency.Native()
	return prometheus.MustNewConstNativeHistogram(desc, c.Latency.Count(), c.Took.Seconds(), buckets, nil, zero,
		figures.Schema, figures.Least().Seconds(), time.Time{}, labels...)
}

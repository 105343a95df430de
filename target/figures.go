// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/figures"
	"weft.dev/weft/proto/figures/wire"
	"weft.dev/weft/proto/metric"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/drive"
)

// counting reads how much I/O a node's legs and drives have had.
type counting struct {
	legs  func() (map[block.LegID]figures.Figures, error)
	drive func(path string) figures.Figures // nil: that of a drive is the sum of its legs'

	mu     sync.Mutex
	last   map[block.LegID]figures.Figures
	drives map[string]*figures.Figures // by id: the sums, with those of legs that are gone
}

// kernelCounting reads the counters that the kernel keeps of drives, and of legs as mapped devices.
// It counts no latencies, only their sum.
func kernelCounting(root string, n naming) *counting {
	return &counting{
		legs: func() (map[block.LegID]figures.Figures, error) {
			nodes, err := n.List()
			all := map[block.LegID]figures.Figures{}
			for leg, node := range nodes {
				all[leg] = drive.Figures(root, node)
			}
			return all, err
		},
		drive: func(path string) figures.Figures { return drive.Figures(root, path) },
	}
}

// driveFigures is the I/O of one drive.
type driveFigures struct {
	id, device string
	figures.Figures
}

// read returns what legs and drives of a report have had so far.
func (c *counting) read(r *pb.TargetReport) (legs map[block.LegID]figures.Figures, drives []driveFigures) {
	legs, err := c.legs()
	if err != nil {
		return nil, nil // the agent's own work finds the same, and says so
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.drives == nil {
		c.drives = map[string]*figures.Figures{}
	}
	last := c.last
	c.last = maps.Clone(legs)
	for _, d := range r.GetDrives() {
		f := driveFigures{id: d.GetDriveId(), device: d.GetDevice()}
		if c.drive != nil {
			f.Figures = c.drive(d.GetDevice())
			drives = append(drives, f)
			continue
		}
		sum := c.drives[f.id]
		if sum == nil {
			sum = &figures.Figures{}
			c.drives[f.id] = sum
		}
		for _, l := range d.GetLegs() {
			id, err := block.ParseLegID(l.GetLegId())
			if err != nil {
				continue
			}
			now, was := legs[id], last[id]
			added, ok := now.Since(&was)
			if !ok { // it was mapped anew
				added = now
			}
			sum.Add(&added)
		}
		f.Figures = sum.Clone()
		drives = append(drives, f)
	}
	return legs, drives
}

// figures reads the figures of the newest report's legs and drives; none before the first report.
func (a *Agent) figures() (legs map[block.LegID]figures.Figures, drives []driveFigures) {
	a.mu.Lock()
	report := a.report // never changed once it is here
	a.mu.Unlock()
	c := a.counting.Load()
	if c == nil || report == nil {
		return nil, nil
	}
	return c.read(report)
}

// sendFigures sends the figures of drives to the manager until ctx ends.
func (a *Agent) sendFigures(ctx context.Context) {
	s := &wire.Sender{
		Manager: a.config.Manager, Node: string(a.config.Node), Source: pb.FiguresSource_FIGURES_SOURCE_TARGET, Read: a.readings,
		Ended: func(err error) { a.log.Debug("figures are not sent", "err", err) },
	}
	s.Run(ctx)
}

// readings are the counts for the manager; none for that of another cluster.
func (a *Agent) readings() (all []wire.Reading) {
	a.mu.Lock()
	refused := a.other != "" || a.behind != ""
	a.mu.Unlock()
	if refused {
		return nil
	}
	_, drives := a.figures()
	for _, d := range drives {
		if d.id != "" {
			all = append(all, wire.Reading{Key: d.id, Object: &pb.ObjectFigures{DriveId: d.id}, Figures: d.Figures})
		}
	}
	return all
}

// figuresDescriptions are the series of drives and legs. Their number is bounded by what is on the
// node's drives.
type figuresDescriptions struct{ ios, bytes, took, latency, leg *prometheus.Desc }

func describeFigures() figuresDescriptions {
	of := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc(name, help, labels, nil)
	}
	return figuresDescriptions{
		ios:     of(metric.DriveIOs, "I/Os of the drive.", "drive", "op"),
		bytes:   of(metric.DriveBytes, "Bytes of the I/Os of the drive.", "drive", "op"),
		took:    of(metric.DriveIOTimeSeconds, "Time that the I/Os of the drive took, added up.", "drive", "op"),
		latency: of(metric.DriveIOSeconds, "Time that I/Os of legs on the drive took; in the user-space data path.", "drive", "op"),
		leg:     of(metric.LegBytes, "Bytes that hosts read from the leg and wrote to it.", "leg", "op"),
	}
}

func (d figuresDescriptions) all() []*prometheus.Desc {
	return []*prometheus.Desc{d.ios, d.bytes, d.took, d.latency, d.leg}
}

// collectFigures collects the series of drives and legs.
func (a *Agent) collectFigures(out chan<- prometheus.Metric) {
	d := describeFigures()
	counter := func(desc *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, v, labels...)
	}
	legs, drives := a.figures()
	for _, one := range drives {
		for op := range figures.Op(figures.Ops) {
			c := &one.Figures[op]
			if op == figures.Any {
				continue
			}
			counter(d.ios, float64(c.IOs), one.id, op.String())
			counter(d.took, c.Took.Seconds(), one.id, op.String())
			if op != figures.Flush {
				counter(d.bytes, float64(c.Bytes), one.id, op.String())
			}
			if c.Latency == nil {
				continue
			}
			buckets, zero := c.Latency.Native()
			out <- prometheus.MustNewConstNativeHistogram(d.latency, c.Latency.Count(), c.Took.Seconds(), buckets, nil, zero,
				figures.Schema, figures.Least().Seconds(), time.Time{}, one.id, op.String())
		}
	}
	for _, id := range slices.SortedFunc(maps.Keys(legs), func(x, y block.LegID) int { return strings.Compare(x.String(), y.String()) }) {
		for _, op := range []figures.Op{figures.Read, figures.Write} {
			counter(d.leg, float64(legs[id][op].Bytes), id.String(), op.String())
		}
	}
}

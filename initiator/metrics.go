// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/metric"
	"weft.dev/weft/proto/pb"
)

// counts are the counters, and the last stall.
type counts struct {
	losses  uint64
	resync  block.Size
	stalled bool
	stall   stall
}

// stall is how long writes to a lost leg waited: until the loss was noticed, until the manager
// had recorded it, and until the writes continued without the leg.
type stall struct{ detect, record, release time.Duration }

func (a *Agent) lostLeg() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.counts.losses++
}

func (a *Agent) resynced(n block.Size) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.counts.resync += n
}

func (a *Agent) stalled(s stall) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.counts.stalled, a.counts.stall = true, s
}

// desc describes one series.
func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

type descriptions struct {
	attachments, legs, losses, stall, resync, refused *prometheus.Desc
}

func describe() descriptions {
	return descriptions{
		attachments: desc(metric.InitiatorAttachments, "Attached volumes by phase.", "phase"),
		legs:        desc(metric.InitiatorLegs, "Legs of attached volumes by state.", "state"),
		losses:      desc(metric.InitiatorLegLosses, "Legs that were lost while in use."),
		stall:       desc(metric.InitiatorLastStall, "How long writes waited when a leg was last lost, by part.", "part"),
		resync:      desc(metric.InitiatorResyncBytes, "Bytes copied to legs that returned."),
		refused:     desc(metric.InitiatorManagerRefused, "1 while the volume manager that answers is ignored: it belongs to another cluster, or was replaced."),
	}
}

// Describe implements prometheus.Collector.
func (a *Agent) Describe(out chan<- *prometheus.Desc) {
	d := describe()
	for _, each := range append(describeFigures().all(), d.attachments, d.legs, d.losses, d.stall, d.resync, d.refused) {
		out <- each
	}
}

// Collect implements prometheus.Collector.
func (a *Agent) Collect(out chan<- prometheus.Metric) {
	d := describe()
	gauge := func(desc *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, v, labels...)
	}
	phases, states := map[string]int{}, map[string]int{}
	for number := range pb.AttachmentPhase_name {
		phases[pb.Word(pb.AttachmentPhase(number))] = 0
	}
	for number := range pb.LinkState_name {
		states[pb.Word(pb.LinkState(number))] = 0
	}
	delete(phases, pb.Word(pb.AttachmentPhase_ATTACHMENT_PHASE_UNSPECIFIED))
	delete(states, pb.Word(pb.LinkState_LINK_STATE_UNSPECIFIED))
	for _, r := range a.report().GetAttachments() {
		phases[pb.Word(r.GetPhase())]++
		for _, l := range r.GetLegs() {
			states[pb.Word(l.GetState())]++
		}
	}
	for phase, n := range phases {
		gauge(d.attachments, float64(n), phase)
	}
	for state, n := range states {
		gauge(d.legs, float64(n), state)
	}
	a.mu.Lock()
	c, refused := a.counts, a.cluster.why != ""
	a.mu.Unlock()
	a.collectFigures(out)
	gauge(d.refused, map[bool]float64{true: 1}[refused])
	out <- prometheus.MustNewConstMetric(d.losses, prometheus.CounterValue, float64(c.losses))
	out <- prometheus.MustNewConstMetric(d.resync, prometheus.CounterValue, float64(c.resync))
	if c.stalled {
		gauge(d.stall, c.stall.detect.Seconds(), "detect")
		gauge(d.stall, c.stall.record.Seconds(), "record")
		gauge(d.stall, c.stall.release.Seconds(), "release")
	}
}

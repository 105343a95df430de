// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/quorum"
)

// metrics are the loop's own measurements.
type metrics struct {
	step, commit prometheus.Histogram
	refused      *prometheus.CounterVec
}

func newMetrics() metrics {
	histogram := func(name, help string) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "weft_volmgr_" + name, Help: help, Buckets: prometheus.ExponentialBuckets(1e-5, 4, 10),
		})
	}
	return metrics{
		step:   histogram("step_seconds", "Time to decide a batch of inputs."),
		commit: histogram("commit_seconds", "Time to make a batch of records durable."),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "weft_volmgr_refused_calls_total", Help: "Calls that were refused because of who made them.",
		}, []string{"method"}),
	}
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("weft_"+name, help, labels, nil)
}

var (
	volumesDesc     = desc("volumes", "Volumes by health.", "health")
	drivesDesc      = desc("drives", "Drives by state.", "state")
	nodesDesc       = desc("nodes", "Nodes by agent and whether it is online.", "agent", "online")
	capacityDesc    = desc("capacity_bytes", "Capacity of all drives.")
	allocatedDesc   = desc("allocated_bytes", "Capacity that legs take.")
	attachmentsDesc = desc("attachments", "Attachments by state.", "state")
	streamsDesc     = desc("volmgr_streams", "Open streams of agents.", "agent")
	leadsDesc       = desc("volmgr_leads", "1 if this manager leads, else 0.")
	managersDesc    = desc("volmgr_managers", "Managers by what they do; from the one that leads.", "state")
	termDesc        = desc("volmgr_term", "Number of the manager's term: each start begins one.")
	generationDesc  = desc("volmgr_generation", "Number of the newest commit.")
)

// Describe is part of [prometheus.Collector].
func (m *Manager) Describe(out chan<- *prometheus.Desc) { prometheus.DescribeByCollect(m, out) }

// Collect is part of [prometheus.Collector]. It waits at most a second for the state.
func (m *Manager) Collect(out chan<- prometheus.Metric) {
	out <- m.metrics.step
	out <- m.metrics.commit
	m.metrics.refused.Collect(out)
	m.collectManagers(out)
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	var state *cluster.State
	count := map[*prometheus.Desc]map[[2]string]int{volumesDesc: {}, drivesDesc: {}, nodesDesc: {}, attachmentsDesc: {}, streamsDesc: {}}
	err := m.look(ctx, func() {
		state = m.forked()
		count[streamsDesc][[2]string{"target"}] = len(m.targets)
		count[streamsDesc][[2]string{"initiator"}] = len(m.initiators)
	})
	if err != nil {
		return // the loop is not running, or is busy for longer
	}
	for _, v := range state.Volumes() {
		count[volumesDesc][[2]string{string(v.Health)}]++
	}
	for _, d := range state.Drives("") {
		count[drivesDesc][[2]string{string(d.State)}]++
	}
	for _, a := range state.AttachmentsAfter("", "") {
		count[attachmentsDesc][[2]string{string(a.State)}]++
	}
	for _, n := range state.Nodes() {
		for agent, s := range map[string]cluster.AgentStatus{"target": n.Target, "initiator": n.Initiator} {
			if s.Known {
				count[nodesDesc][[2]string{agent, map[bool]string{true: "1", false: "0"}[s.Online]}]++
			}
		}
	}
	sum, term := state.Status(), state.Term()
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	gauge(capacityDesc, float64(sum.Capacity))
	gauge(allocatedDesc, float64(sum.Allocated))
	gauge(termDesc, float64(term))
	gauge(generationDesc, float64(sum.Generation))
	for d, values := range count {
		for labels, n := range values {
			if d == nodesDesc {
				gauge(d, float64(n), labels[0], labels[1])
				continue
			}
			gauge(d, float64(n), labels[0])
		}
	}
}

// collectManagers says whether this manager leads, and what the others do if so.
func (m *Manager) collectManagers(out chan<- prometheus.Metric) {
	if m.quorum == nil {
		return
	}
	gauge := func(d *prometheus.Desc, value float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
	}
	now := m.quorum.Status()
	if now.Role != quorum.Leader {
		gauge(leadsDesc, 0)
		return
	}
	gauge(leadsDesc, 1)
	count := map[string]float64{"voting": 0, "learning": 0, "silent": 0}
	for _, one := range now.Applied.Members {
		_, silent := m.quorum.silent(now, one.ID)
		switch {
		case silent:
			count["silent"]++
		case one.Voter:
			count["voting"]++
		default:
			count["learning"]++
		}
	}
	for state, n := range count {
		gauge(managersDesc, n, state)
	}
}

// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"weft.dev/weft/proto/metric"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/quorum"
)

// metrics are the loop's own measurements.
type metrics struct {
	step, commit, confirm prometheus.Histogram
	refused               *prometheus.CounterVec
}

func newMetrics() metrics {
	histogram := func(name, help string) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: name, Help: help, Buckets: prometheus.ExponentialBuckets(1e-5, 4, 10), NativeHistogramBucketFactor: 1.1, NativeHistogramMaxBucketNumber: 100,
		})
	}
	return metrics{
		step:    histogram(metric.ManagerStepSeconds, "Time to decide a batch of inputs."),
		commit:  histogram(metric.ManagerCommitSeconds, "Time until a batch of records is durable: at a majority of the managers, or on the disk of the only one."),
		confirm: histogram(metric.ManagerConfirmSeconds, "Time until a majority of the managers has confirmed that this one leads, for answers without a record."),
		refused: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: metric.ManagerRefusedCalls, Help: "Calls that were refused because of who made them.",
		}, []string{"method"}),
	}
}

func desc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(name, help, labels, nil)
}

var (
	streamsDesc    = desc(metric.ManagerStreams, "Open streams of agents.", "agent")
	leadsDesc      = desc(metric.ManagerLeads, "1 if this manager leads, else 0.")
	managersDesc   = desc(metric.Managers, "Managers by what they do; from the one that leads.", "state")
	toSpareDesc    = desc(metric.ManagersToSpare, "Managers that may still be lost before no majority is left; from the one that leads.")
	termDesc       = desc(metric.ManagerTerm, "Number of the manager's term: each start begins one.")
	generationDesc = desc(metric.ManagerGeneration, "Number of the newest commit.")
)

// Describe is part of [prometheus.Collector]. Most series are there only at times.
func (m *Manager) Describe(out chan<- *prometheus.Desc) {
	m.metrics.step.Describe(out)
	m.metrics.commit.Describe(out)
	m.metrics.confirm.Describe(out)
	m.metrics.refused.Describe(out)
	for _, d := range slices.Concat(stateDescs, []*prometheus.Desc{streamsDesc, leadsDesc, managersDesc, toSpareDesc, termDesc, generationDesc}) {
		out <- d
	}
}

// Collect is part of [prometheus.Collector]. It waits at most a second for the state.
func (m *Manager) Collect(out chan<- prometheus.Metric) {
	out <- m.metrics.step
	out <- m.metrics.commit
	out <- m.metrics.confirm
	m.metrics.refused.Collect(out)
	m.collectManagers(out)
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	var state *cluster.State
	streams := map[string]int{}
	err := m.look(ctx, func() {
		state = m.forked()
		streams["target"], streams["initiator"] = len(m.targets), len(m.initiators)
	})
	if err != nil {
		return // the loop is not running, or is busy for longer
	}
	gauges(out).counts(streamsDesc, streams)
	gauges(out).set(termDesc, float64(state.Term()))
	gauges(out).set(generationDesc, float64(state.Generation()))
	gauges(out).state(state)
	m.versions(out, state)
}

// collectManagers says whether this manager leads, and what the others do if so.
func (m *Manager) collectManagers(out chan<- prometheus.Metric) {
	if m.quorum == nil {
		gauges(out).set(leadsDesc, 1)
		return
	}
	now := m.quorum.Status()
	if now.Role != quorum.Leader {
		gauges(out).set(leadsDesc, 0)
		return
	}
	gauges(out).set(leadsDesc, 1)
	count, voters := map[string]int{"voting": 0, "learning": 0, "silent": 0}, 0
	for _, one := range now.Applied.Members {
		_, silent := m.quorum.silent(now, one.ID)
		switch {
		case silent:
			count["silent"]++
		case one.Voter:
			voters++
			count["voting"]++
		default:
			count["learning"]++
		}
	}
	gauges(out).counts(managersDesc, count)
	majority := len(now.Applied.Members.Voters())/2 + 1
	gauges(out).set(toSpareDesc, float64(max(0, voters-majority)))
}

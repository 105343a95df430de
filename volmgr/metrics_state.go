// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"cmp"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"weft.dev/weft/proto/metric"
	"weft.dev/weft/volmgr/cluster"
)

// This file shows the state of the cluster as metrics. Numbers of things are there always. By name
// are only drives and pools, which are few, and what is not well: of volumes, which can be many, at
// most maxNamed in each series.

// maxNamed bounds the volumes that a series names; the worst ones come first.
const maxNamed = 100

var (
	volumesDesc     = desc(metric.Volumes, "Volumes by health.", "health")
	drivesDesc      = desc(metric.Drives, "Drives by state.", "state")
	nodesDesc       = desc(metric.Nodes, "Nodes by agent and whether it is online.", "agent", "online")
	capacityDesc    = desc(metric.CapacityBytes, "Capacity of all drives.")
	allocatedDesc   = desc(metric.AllocatedBytes, "Capacity that legs take.")
	promisedDesc    = desc(metric.PromisedBytes, "What all legs take if they are written whole; more than the capacity if thin volumes are over-committed.")
	attachmentsDesc = desc(metric.Attachments, "Attachments by state.", "state")

	poolCapacityDesc   = desc(metric.PoolCapacityBytes, "Capacity of a pool's drives.", "pool")
	poolAllocatedDesc  = desc(metric.PoolAllocatedBytes, "Capacity of a pool's drives that legs take.", "pool")
	driveCapacityDesc  = desc(metric.DriveCapacityBytes, "Capacity of a drive.", "drive", "node")
	driveAllocatedDesc = desc(metric.DriveAllocatedBytes, "Capacity of a drive that legs take.", "drive", "node")

	driveThinDesc  = desc(metric.DriveThinBytes, "Capacity of a drive that thin volumes have, or may take at any time.", "drive", "node")
	volumeUsedDesc = desc(metric.VolumeUsedBytes, "Space that the data of all legs of a thin volume takes; at most 100 volumes, those that take most.", "volume")
	volumeFullDesc = desc(metric.VolumeFull, "1 for a thin volume whose writes wait for space; at most 100 of them.", "volume")

	versionsDesc    = desc(metric.Versions, "Different versions of Weft that managers and agents run.")
	levelDesc       = desc(metric.Level, "The cluster's level.")
	backedUpDesc    = desc(metric.BackupTime, "When the last backup of the records was made, in seconds since 1970; 0 if none was.")
	newestLevelDesc = desc(metric.NewestLevel, "The newest level that the manager knows.")

	copiesLeftDesc    = desc(metric.VolumeCopiesLeft, "Copies that can be served of the column with fewest, of volumes that are not healthy; at most 100 of them, the worst.", "volume")
	rebuildLeftDesc   = desc(metric.RebuildLeftBytes, "Bytes that rebuilds under way have yet to copy, by volume; at most 100 of them.", "volume")
	scrubOpenDesc     = desc(metric.ScrubOpenRanges, "Ranges whose copies differ or cannot be read by the volume's last scrub; at most 100 volumes.", "volume")
	repairsDesc       = desc(metric.ReadRepairs, "Ranges that did not match their checksums when they were read, since the volume was created; at most 100 volumes.", "volume")
	repairsFailedDesc = desc(metric.ReadRepairsFail, "Those of them that could not be written again.", "volume")
	driveProblemDesc  = desc(metric.DriveProblem, "1 for a drive that needs attention, by its state.", "drive", "node", "state")
	nodeOfflineDesc   = desc(metric.NodeOffline, "1 for an agent that does not report, and whose absence was not announced.", "node", "agent")
	agentProblemsDesc = desc(metric.AgentProblems, "What an agent cannot do yet, by what it concerns.", "node", "agent", "kind")
)

var stateDescs = []*prometheus.Desc{
	volumesDesc, drivesDesc, nodesDesc, capacityDesc, allocatedDesc, promisedDesc, attachmentsDesc,
	poolCapacityDesc, poolAllocatedDesc, driveCapacityDesc, driveAllocatedDesc, driveThinDesc, volumeUsedDesc, volumeFullDesc, versionsDesc, levelDesc, newestLevelDesc, backedUpDesc,
	copiesLeftDesc, rebuildLeftDesc, scrubOpenDesc, repairsDesc, repairsFailedDesc, driveProblemDesc, nodeOfflineDesc, agentProblemsDesc,
}

// gauges are the metrics that a state shows.
type gauges chan<- prometheus.Metric

func (out gauges) set(d *prometheus.Desc, value float64, labels ...string) {
	out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, value, labels...)
}

// counts shows how many things there are of each kind.
func (out gauges) counts(d *prometheus.Desc, counts map[string]int) {
	for kind, n := range counts {
		out.set(d, float64(n), kind)
	}
}

// state shows the whole state.
func (out gauges) state(state *cluster.State) {
	out.nodes(state.Nodes())
	out.space(state)
	out.volumes(state.Volumes())
	attachments := map[string]int{}
	for _, a := range state.AttachmentsAfter("", "") {
		attachments[string(a.State)]++
	}
	out.counts(attachmentsDesc, attachments)
	out.set(levelDesc, float64(state.Level()))
	backedUp := 0.0
	if at := state.BackedUp(); !at.IsZero() {
		backedUp = float64(at.Unix())
	}
	out.set(backedUpDesc, backedUp)
}

// space shows drives and pools.
func (out gauges) space(state *cluster.State) {
	states := map[string]int{}
	var capacity, allocated, promised float64
	for _, d := range state.Drives("") {
		id, node := d.ID.String(), string(d.Node)
		states[string(d.State)]++
		capacity, allocated, promised = capacity+float64(d.Capacity), allocated+float64(d.Allocated), promised+float64(d.Promised)
		if d.Thin > 0 {
			out.set(driveThinDesc, float64(d.Thin), id, node)
		}
		out.set(driveCapacityDesc, float64(d.Capacity), id, node)
		out.set(driveAllocatedDesc, float64(d.Allocated), id, node)
		switch d.State {
		case cluster.DriveFailed, cluster.DriveMissing, cluster.DriveSuspect:
			out.set(driveProblemDesc, 1, id, node, string(d.State))
		}
	}
	out.counts(drivesDesc, states)
	out.set(capacityDesc, capacity)
	out.set(allocatedDesc, allocated)
	out.set(promisedDesc, promised)
	for _, p := range state.PoolsAfter("") {
		out.set(poolCapacityDesc, float64(p.Capacity), p.Name)
		out.set(poolAllocatedDesc, float64(p.Allocated), p.Name)
	}
}

// nodes shows the agents.
func (out gauges) nodes(nodes []cluster.Node) {
	online := map[[2]string]int{}
	for _, n := range nodes {
		for _, a := range []struct {
			kind, boot string
			cluster.AgentStatus
		}{{"target", n.TargetBoot, n.Target}, {"initiator", n.InitiatorBoot, n.Initiator}} {
			if a.Known {
				online[[2]string{a.kind, map[bool]string{true: "1", false: "0"}[a.Online]}]++
			}
			if a.boot != "" && !a.Online && n.MaintainedUntil.IsZero() {
				out.set(nodeOfflineDesc, 1, string(n.Name), a.kind)
			}
			problems := map[string]int{}
			for _, p := range a.Problems {
				kind, _, _ := strings.Cut(p.Object, " ")
				problems[kind]++
			}
			for kind, count := range problems {
				out.set(agentProblemsDesc, float64(count), string(n.Name), a.kind, kind)
			}
		}
	}
	for of, count := range online {
		out.set(nodesDesc, float64(count), of[0], of[1])
	}
}

// volumes shows the volumes' health, and those that are not well.
func (out gauges) volumes(all []cluster.Volume) {
	health := map[string]int{}
	copies, left, open := map[string]int{}, map[string]int{}, map[string]int{}
	repairs, failed := map[string]int{}, map[string]int{}
	used, full := map[string]int{}, map[string]int{}
	for i := range all {
		v := &all[i]
		name := string(v.Name)
		health[string(v.Health)]++
		if v.Health != cluster.Healthy && v.Health != "" {
			copies[name] = v.CopiesLeft
		}
		for _, r := range v.Rebuilds {
			if r.Ended.IsZero() {
				left[name] += int(cmp.Or(r.Total, v.Layout.LegSize(v.Size)) - r.Done) // all of it while the host has said nothing
			}
		}
		for _, l := range v.Legs {
			if v.Thin {
				used[name] += int(l.Used)
			}
			if l.Full && l.State == cluster.LegInSync { // users do not wait for others
				full[name] = 1
			}
		}
		if n := v.Open(); n > 0 {
			open[name] = n
		}
		if h := v.Heals; h != nil {
			repairs[name], failed[name] = int(h.Repaired+h.NotRepaired), int(h.NotRepaired)
		}
	}
	out.counts(volumesDesc, health)
	out.worst(copiesLeftDesc, copies, cmp.Compare)
	out.worst(rebuildLeftDesc, left, func(a, b int) int { return cmp.Compare(b, a) })
	most := func(a, b int) int { return cmp.Compare(b, a) }
	out.worst(volumeUsedDesc, used, most)
	out.worst(volumeFullDesc, full, most)
	out.worst(scrubOpenDesc, open, func(a, b int) int { return cmp.Compare(b, a) })
	out.worst(repairsDesc, repairs, func(a, b int) int { return cmp.Compare(b, a) })
	out.worst(repairsFailedDesc, failed, func(a, b int) int { return cmp.Compare(b, a) })
}

// worst shows the first maxNamed volumes in an order of their values.
func (out gauges) worst(d *prometheus.Desc, values map[string]int, order func(a, b int) int) {
	names := make([]string, 0, len(values))
	for name := range values {
		names = append(names, name)
	}
	slices.SortFunc(names, func(a, b string) int { return cmp.Or(order(values[a], values[b]), cmp.Compare(a, b)) })
	for _, name := range names[:min(maxNamed, len(names))] {
		out.set(d, float64(values[name]), name)
	}
}

// versions shows whether an upgrade is under way.
func (m *Manager) versions(out gauges, state *cluster.State) {
	run := map[string]bool{}
	for _, one := range m.managerLevels() {
		run[one.Version] = true
	}
	for _, a := range state.AgentLevels() {
		if a.Online {
			run[a.Version] = true
		}
	}
	delete(run, "")
	out.set(versionsDesc, float64(len(run)))
	out.set(newestLevelDesc, float64(m.cfg.Level))
}

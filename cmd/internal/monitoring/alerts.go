// SPDX-License-Identifier: Apache-2.0

package monitoring

import (
	"fmt"
	"time"

	"weft.dev/weft/proto/metric"
)

// Severity says who has to act on an alert, and when.
type Severity string

// The severities.
const (
	Critical Severity = "critical" // now: data cannot be reached, or the next failure makes it so
	Warning  Severity = "warning"  // today
)

// Alert is one rule.
type Alert struct {
	Name        string
	Expression  string        // it has a value while something is wrong
	For         time.Duration // how long it must have one
	Severity    Severity
	Summary     string // may name the labels of what Expression finds
	Description string
	Explain     string // the command that says more, with the same labels
	Runbook     string // heading in docs/operations.md, as a link's anchor
}

// worst is a metric of the manager that leads, without the labels that change when another one does.
// The labels of the thing that it is about stay.
func worst(series string) string {
	return "max without (instance, pod, container, node) (" + series + ")"
}

// worstOf is worst for a metric that is about a node.
func worstOf(series string) string { return "max without (instance, pod, container) (" + series + ")" }

// mean is the mean of a histogram's values in the last minutes, whether Prometheus keeps it as a
// native histogram or as a sum and a count.
func mean(histogram, over string) string {
	return fmt.Sprintf("(rate(%[1]s_sum[%[2]s]) / rate(%[1]s_count[%[2]s]) or histogram_sum(rate(%[1]s[%[2]s])) / histogram_count(rate(%[1]s[%[2]s])))", histogram, over)
}

// appeared is true when a counter has grown, or was not there before: some appear with their first
// count.
func appeared(counter, over string) string {
	return fmt.Sprintf("increase(%[1]s[%[2]s]) > 0 or (%[1]s > 0 unless %[1]s offset %[2]s)", counter, over)
}

const (
	explainVolume  = "weft explain volume {{ $labels.volume }}"
	explainNode    = "weft explain node {{ $labels.node }}"
	explainDrive   = "weft explain drive {{ $labels.drive }}"
	explainPool    = "weft explain pool {{ $labels.pool }}"
	explainCluster = "weft explain cluster"
)

// Alerts are all rules, by what they are about.
func Alerts() []Alert {
	var all []Alert
	for _, of := range [][]Alert{volumeAlerts(), driveAlerts(), spaceAlerts(), nodeAlerts(), managerAlerts(), accessAlerts()} {
		all = append(all, of...)
	}
	return all
}

func volumeAlerts() []Alert {
	copies := worst(metric.VolumeCopiesLeft)
	return []Alert{
		{
			Name: "WeftVolumeUnavailable", Expression: copies + " == 0", For: time.Minute, Severity: Critical,
			Summary:     "Volume {{ $labels.volume }} cannot be served",
			Description: "A column of the volume has no good copy that can be reached. Its I/O waits, or would wait.",
			Explain:     explainVolume, Runbook: "volumes",
		},
		{
			Name: "WeftVolumeLastCopy", Expression: copies + " == 1", For: 10 * time.Minute, Severity: Critical,
			Summary:     "Volume {{ $labels.volume }} is down to its last copy",
			Description: "All data can be read, but the next loss stops the volume. It has been so for 10 minutes.",
			Explain:     explainVolume, Runbook: "volumes",
		},
		{
			Name: "WeftVolumeDegraded", Expression: copies + " > 1", For: 15 * time.Minute, Severity: Warning,
			Summary:     "Volume {{ $labels.volume }} lacks a copy",
			Description: "A copy is away and has not returned for 15 minutes; {{ $value }} are left.",
			Explain:     explainVolume, Runbook: "volumes",
		},
		{
			Name:       "WeftRebuildStuck",
			Expression: worst(fmt.Sprintf("%[1]s > 0 and changes(%[1]s[10m]) == 0", metric.RebuildLeftBytes)), For: 10 * time.Minute, Severity: Warning,
			Summary:     "A rebuild of volume {{ $labels.volume }} does not move",
			Description: "{{ $value | humanize1024 }}B are left to copy, and nothing was copied for 10 minutes.",
			Explain:     explainVolume, Runbook: "volumes",
		},
		{
			Name: "WeftCopiesDiffer", Expression: worst(metric.ScrubOpenRanges) + " > 0", Severity: Warning,
			Summary:     "Copies of volume {{ $labels.volume }} differ",
			Description: "The last scrub found {{ $value }} ranges whose copies differ or cannot be read, and which were not repaired.",
			Explain:     explainVolume, Runbook: "repair-copies-that-differ",
		},
		{
			Name: "WeftVolumeIOErrors", Expression: fmt.Sprintf("sum without (op) (increase(%s[10m])) > 0", metric.VolumeErrors), Severity: Critical,
			Summary:     "I/O of volume {{ $labels.volume }} failed",
			Description: "Programs on the host {{ $labels.instance }} got errors in the last 10 minutes.",
			Explain:     explainVolume, Runbook: "volumes",
		},
		{
			Name: "WeftVolumeIOHeld", Expression: fmt.Sprintf("increase(%s[5m]) > 5", metric.VolumeHeldSeconds), Severity: Warning,
			Summary:     "I/O of volume {{ $labels.volume }} had to wait",
			Description: "On the host {{ $labels.instance }} it was held for {{ $value | humanizeDuration }} in the last 5 minutes, because a copy was lost, did not answer, or has no space.",
			Explain:     explainVolume, Runbook: "volumes",
		},
		{
			Name: "WeftHostIOStalled", Expression: metric.InitiatorAttachments + `{phase="stalled"} > 0`, For: time.Minute, Severity: Critical,
			Summary:     "I/O waits on the host {{ $labels.instance }}",
			Description: "{{ $value }} attached volumes answer no I/O.",
			Explain:     explainCluster, Runbook: "volumes",
		},
	}
}

func driveAlerts() []Alert {
	problem := worstOf(metric.DriveProblem + `{state=~%q}`)
	return []Alert{
		{
			Name: "WeftDriveFailed", Expression: fmt.Sprintf(problem, "FAILED|MISSING") + " > 0", For: 5 * time.Minute, Severity: Warning,
			Summary:     "Drive {{ $labels.drive }} of {{ $labels.node }} cannot be used",
			Description: "It is {{ $labels.state | toLower }}. Its copies are made again elsewhere after 15 minutes, unless that time was changed.",
			Explain:     explainDrive, Runbook: "drives",
		},
		{
			Name: "WeftDriveSuspect", Expression: fmt.Sprintf(problem, "SUSPECT") + " > 0", For: 5 * time.Minute, Severity: Warning,
			Summary:     "Drive {{ $labels.drive }} of {{ $labels.node }} shows signs of failing",
			Description: "It serves its copies and gets no new ones. Replace it before it fails.",
			Explain:     explainDrive, Runbook: "a-drive-is-suspect",
		},
		{
			Name: "WeftDriveMediaErrors", Expression: fmt.Sprintf("increase(%s[1h]) > 0", metric.DriveMediaErrors), Severity: Warning,
			Summary:     "Drive {{ $labels.drive }} has new media errors",
			Description: "Its log counts {{ $value | humanize }} more than an hour ago.",
			Explain:     explainDrive, Runbook: "a-drive-is-suspect",
		},
		{
			Name: "WeftDriveWorn", Expression: metric.DriveUsedRatio + " > 0.8", For: time.Hour, Severity: Warning,
			Summary:     "Drive {{ $labels.drive }} is worn",
			Description: "{{ $value | humanizePercentage }} of the life that its vendor expects is used. Plan its replacement.",
			Explain:     explainDrive, Runbook: "a-drive-dies-is-replaced-and-all-is-well",
		},
	}
}

// noRoom finds that the free space is less than the capacity of the largest of three nodes or more.
func noRoom() string {
	const ofManager = "instance, pod, container"
	nodes := fmt.Sprintf("sum without (drive, %s) (%s)", ofManager, metric.DriveCapacityBytes)
	free := fmt.Sprintf("sum without (drive, node, %s) (%s - %s)", ofManager, metric.DriveCapacityBytes, metric.DriveAllocatedBytes)
	return fmt.Sprintf("max without (node) (%[1]s) > %[2]s and count without (node) (%[1]s) > 2", nodes, free)
}

func spaceAlerts() []Alert {
	return []Alert{
		{
			Name: "WeftVolumeFull", Expression: worst(metric.VolumeFull) + " > 0", For: time.Minute, Severity: Critical,
			Summary:     "Writes of the thin volume {{ $labels.volume }} wait for space",
			Description: "A drive of it is full. Reads go on, and writes to what was written before; no copy is lost. Delete volumes, discard what is not needed, or move the leg.",
			Explain:     explainVolume, Runbook: "space",
		},
		{
			Name: "WeftDriveNearlyFull", Expression: worstOf(metric.DriveAllocatedBytes+" / "+metric.DriveCapacityBytes) + " > 0.95", For: time.Hour, Severity: Warning,
			Summary:     "Drive {{ $labels.drive }} of {{ $labels.node }} is nearly full",
			Description: "Legs take {{ $value | humanizePercentage }} of it. Legs on it can hardly grow, and new ones find little room there.",
			Explain:     explainDrive, Runbook: "use-drives-that-were-added",
		},
		{
			Name: "WeftPoolNearlyFull", Expression: worst(metric.PoolAllocatedBytes+" / "+metric.PoolCapacityBytes) + " > 0.85", For: time.Hour, Severity: Warning,
			Summary:     "Pool {{ $labels.pool }} is nearly full",
			Description: "Legs take {{ $value | humanizePercentage }} of its drives. Add drives.",
			Explain:     explainPool, Runbook: "use-drives-that-were-added",
		},
		{
			Name: "WeftNoRoomToRebuild", Expression: noRoom(), For: time.Hour, Severity: Warning,
			Summary:     "There is no room to make the legs of the largest node again",
			Description: "If the node with the most capacity ({{ $value | humanize1024 }}B) were full and were lost, the free space of the others would not suffice. Add drives, or ask `weft what-if lose node NAME` about each node.",
			Explain:     explainCluster, Runbook: "use-drives-that-were-added",
		},
	}
}

func nodeAlerts() []Alert {
	offline := worstOf(metric.NodeOffline + `{agent=%q}`)
	problems := worstOf(metric.AgentProblems + `{kind%s"paths"}`)
	return []Alert{
		{
			Name: "WeftTargetAway", Expression: fmt.Sprintf(offline, "target") + " > 0", For: 5 * time.Minute, Severity: Warning,
			Summary:     "The target agent of {{ $labels.node }} does not report",
			Description: "The agent or its machine is down, or does not reach the manager. Copies on its drives are away. Its absence was not announced with `weft node maintain {{ $labels.node }}`.",
			Explain:     explainNode, Runbook: "manager-and-agents",
		},
		{
			Name: "WeftHostAway", Expression: fmt.Sprintf(offline, "initiator") + " > 0", For: 5 * time.Minute, Severity: Warning,
			Summary:     "The initiator agent of {{ $labels.node }} does not report",
			Description: "The agent or its machine is down, or does not reach the manager. Volumes that are attached there cannot be attached elsewhere without force.",
			Explain:     explainNode, Runbook: "manager-and-agents",
		},
		{
			Name: "WeftHostPathSuspect", Expression: fmt.Sprintf(problems, "=") + " > 0", For: 5 * time.Minute, Severity: Warning,
			Summary:     "The host {{ $labels.node }} does not use all paths",
			Description: "A portal of a target did not answer it, so {{ $value }} volumes use another one. Check cable, switch port and network card on that rail.",
			Explain:     explainNode, Runbook: "volumes",
		},
		{
			Name: "WeftAgentProblem", Expression: fmt.Sprintf(problems, "!=") + " > 0", For: 10 * time.Minute, Severity: Warning,
			Summary:     "The {{ $labels.agent }} agent of {{ $labels.node }} cannot do something",
			Description: "It has tried for 10 minutes, and goes on. It concerns: {{ $labels.kind }}.",
			Explain:     explainNode, Runbook: "manager-and-agents",
		},
	}
}

func managerAlerts() []Alert {
	return []Alert{
		{
			Name: "WeftNoLeader", Expression: fmt.Sprintf("absent(%s == 1)", metric.ManagerLeads), For: time.Minute, Severity: Critical,
			Summary:     "No volume manager leads",
			Description: "Managers are down, do not reach one another, or are not scraped. I/O continues, but nothing can be attached, and a copy that fails makes writes wait. `weft volmgr list` shows which managers are there.",
			Explain:     explainCluster, Runbook: "manager-and-agents",
		},
		{
			Name: "WeftManagerSilent", Expression: worst(metric.Managers+`{state="silent"}`) + " > 0", For: 5 * time.Minute, Severity: Warning,
			Summary:     "A volume manager does not answer",
			Description: "{{ $value }} managers do not answer the one that leads. `weft volmgr list` names them.",
			Explain:     explainCluster, Runbook: "manager-and-agents",
		},
		{
			Name: "WeftManagerMajorityAtRisk",
			Expression: fmt.Sprintf("%s == 0 and sum without (state, instance, pod, container, node) (%s) > 1",
				worst(metric.ManagersToSpare), metric.Managers), For: 5 * time.Minute, Severity: Critical,
			Summary:     "The loss of one more volume manager stops all changes",
			Description: "Just a majority of the managers answers. `weft volmgr list` names the others.",
			Explain:     explainCluster, Runbook: "when-most-managers-are-lost",
		},
		{
			Name: "WeftCommitsSlow", Expression: mean(metric.ManagerCommitSeconds, "5m") + " > 0.1", For: 10 * time.Minute, Severity: Warning,
			Summary:     "The manager's disk is slow",
			Description: "A commit takes {{ $value | humanizeDuration }} on average. A write of a host whose copy was lost waits for one.",
			Explain:     explainCluster, Runbook: "manager-and-agents",
		},
		{
			Name: "WeftBackupOld", Expression: "time() - " + worst(metric.BackupTime) + " > 7 * 24 * 3600", For: 24 * time.Hour, Severity: Warning,
			Summary:     "The records of the cluster were not backed up for a week",
			Description: "Or never. `weft volmgr backup FILE` copies them. Without a backup, a lost store is rebuilt from the labels on the drives, which do not have pools, labels and history.",
			Explain:     explainCluster, Runbook: "back-up-restore-rebuild",
		},
		{
			Name: "WeftUpgradeUnfinished", Expression: worst(metric.Versions) + " > 1 or " + worst(metric.Level) + " < " + worst(metric.NewestLevel), For: 24 * time.Hour, Severity: Warning,
			Summary:     "An upgrade was not finished",
			Description: "For a day, managers and agents have run different versions, or the cluster's level was not raised. `weft upgrade status` says what is left to do.",
			Explain:     explainCluster, Runbook: "manager-and-agents",
		},
	}
}

func accessAlerts() []Alert {
	return []Alert{
		{
			Name: "WeftManagerNotObeyed", Expression: metric.InitiatorManagerRefused + " > 0", For: time.Minute, Severity: Critical,
			Summary:     "The host {{ $labels.instance }} does not obey the manager that answers",
			Description: "That manager belongs to another cluster, or was replaced by a later one. I/O continues.",
			Explain:     explainCluster, Runbook: "manager-and-agents",
		},
		{
			Name: "WeftCertificateEnds", Expression: fmt.Sprintf("%s - time() < 2 * 24 * 3600", metric.CertificateExpiry), For: 10 * time.Minute, Severity: Critical,
			Summary:     "A certificate of {{ $labels.instance }} ends soon",
			Description: "It ends in {{ $value | humanizeDuration }} and was not renewed. A certificate of the cluster's own authority renews itself when a third of its life is left, so its daemon has not reached a manager for long.",
			Explain:     explainCluster, Runbook: "who-may-do-what",
		},
		{
			Name: "WeftCallsRefused", Expression: fmt.Sprintf("sum without (method) (%s)", appeared(metric.ManagerRefusedCalls, "10m")), Severity: Warning,
			Summary:     "A volume manager refused calls",
			Description: "Somebody called what he may not in the last 10 minutes. `weft event list` says who, and from where.",
			Explain:     explainCluster, Runbook: "who-may-do-what",
		},
		{
			Name: "WeftTargetRefusesHosts", Expression: appeared(metric.TargetRefusedHosts, "10m"), Severity: Warning,
			Summary:     "The target {{ $labels.instance }} refused hosts",
			Description: "Somebody without the keys tried to connect in the last 10 minutes. `weft event list` has the address.",
			Explain:     explainCluster, Runbook: "authentication-of-hosts",
		},
	}
}

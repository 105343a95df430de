// SPDX-License-Identifier: Apache-2.0

// Package cluster holds the state and the decisions of the volume manager: which nodes,
// drives, pools and volumes there are, which hosts may write each volume, and which copies
// are good. It decides and does nothing else:
//
//	API request, agent report, tick ──► State.Step(now, input)
//	                                        │
//	        error: refused, nothing changed ┤
//	                                        ▼
//	        Outcome: records to commit durably, then nodes to wake,
//	                 events to publish, and the answer for the caller
//
// There is no I/O, no clock and no randomness here: times and seeds come with
// the inputs, so the same inputs always give the same states. The caller uses a
// State from one goroutine, commits [Outcome].Records in one transaction, and
// answers only after that. If the commit fails, the State is ahead of the store and
// must be thrown away: [Load] the records again.
//
// The durable part of a State is in the records. The reported part is known only from
// the agents: which of them are online, what they admit, what their inventories hold,
// when a fence began. No record holds any of it, and after Load it is empty until the
// agents report.
//
// A volume is S columns of C legs. A leg that is [LegInSync] holds every acknowledged
// write. Every transition in this package keeps that true, and keeps at least one such
// leg in every column. Where the rules are:
//
//	attach.go  grants, fences, leases, detaching      sync.go   legs going stale and coming back
//	shared.go  volumes attached to several hosts      whatif.go what a loss would lead to
//	volume.go  creating and deleting                  drive.go  adding and evicting drives
//	expand.go  volumes that grow in use               wanted.go what the agents are told
//	explain.go why a volume is in its state           rebuild.go a lost store rebuilt from drive labels
//	admit.go   which agents may report                term.go   managers that follow one another
//	replace.go legs that are made again elsewhere     upkeep.go draining, maintenance, moves, copies
//
// What needs no State is in packages of its own, which work on values alone: evidence (which
// copies labels and hosts' notes prove good), placement (which drives take a volume's legs),
// image (where on a drive), event (the history), backoff (pauses between rebuilds) and
// labelset (bounds of labels).
package cluster

// SPDX-License-Identifier: Apache-2.0

// Package cluster is the mind of the volume manager: which nodes, drives, pools
// and volumes there are, who may write each volume, and which copies are good.
// It decides and does nothing else:
//
//	API request, agent report, tick ──► State.Step(now, input)
//	                                        │
//	        error: refused, nothing changed ┤
//	                                        ▼
//	        Outcome: records to commit durably, then nodes to wake,
//	                 events to tell, and the answer for who asked
//
// There is no I/O, no clock and no randomness here: times and seeds come with
// the inputs, so the same inputs always give the same states. The caller owns a
// State from one goroutine, commits [Outcome].Records in one transaction, and only
// then answers anybody. If the commit fails the State is ahead of the store and
// must be thrown away: [Load] the records again.
//
// What is durable is in the records. What only the agents can say (who is
// online, what they admit, what their inventories hold, when a fence began) is
// kept beside it and is empty after Load until they report.
//
// A volume is S columns of C legs. A leg that is [LegInSync] holds every write
// that was ever acknowledged; every transition in this package keeps that true,
// and keeps at least one such leg in every column. Where the rules are:
//
//	attach.go  grants, fences, leases, detaching      sync.go   legs going stale and coming back
//	shared.go  volumes that several hosts have        fence.go  who still has to be kept out
//	volume.go  creating and deleting                  drive.go  taking drives in and giving them back
//	placement.go where legs go                        wanted.go what the agents are told
//	expand.go volumes that grow in use
//	explain.go why a volume is as it is               rebuild.go the store made anew from drive labels
package cluster

// SPDX-License-Identifier: Apache-2.0

// Package fault holds the fault suite of the user-space data path: a whole
// cluster in one process, in time that is as fast as the processor, under a
// writer that knows what was acknowledged.
//
//	writer ── engine, host ══ network ══ controller, leg ── medium ── sparse file
//	             │     initiator agent        │     target agent
//	             └──────── network ───────────┴──── volume manager ── store
//
// All that is Weft's is real: manager and store, gRPC, agents, NVMe/TCP, labels,
// legs. What is ours is between them: a network in memory that cuts, delays and
// delivers late, and a drive's cache that fails, is slow, and forgets at a loss of
// power. Time is that of testing/synctest.
//
//	go test ./e2e/fault -faults 5000 -seed 7
//
// The user's operations overlap; what each unit may hold is told by
// raid/engine/history. When all lose their power, what a flush or FUA had made
// durable must be there.
//
// The seed makes the faults, their times and what is written; how goroutines
// interleave is the scheduler's, so that a seed that failed may take some runs to
// fail again.
//
// That the suite sees what it must is shown by clusters that lie: see
// control_test.go.
package fault

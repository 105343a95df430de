// SPDX-License-Identifier: Apache-2.0

// Package fault holds the fault suite of the user-space data path: a whole
// cluster in one process, in time that is as fast as the processor, under a
// writer that knows what was acknowledged.
//
//	writer ── engine, host ══ network ══ controller, leg, backend ── drive
//	             │     initiator agent        │     target agent
//	             └──────── network ───────────┴──── volume manager ── power ── store
//
// All that is Weft's is real: manager and store, gRPC, agents, NVMe/TCP, labels,
// legs. The tests replace only what lies between and below them: the network is in
// memory, and cuts, delays and delivers late; drives fail, are slow, hold a write back
// for as long as they like, and may have a cache that forgets when the power goes; the
// manager can lose power in the middle of a commit. Time is that of testing/synctest.
//
// Some faults come by themselves, at any time. Others are plots: a few of them in the
// order that a guard is for, as a host that is fenced while a drive has writes of it.
// Whoever loses a volume by force goes on to use it. Processes stand still while their
// clocks go on, agents are started twice, and the manager's clock is set.
//
//	go test ./e2e/fault -seed 7 -only "force move,slow medium"
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

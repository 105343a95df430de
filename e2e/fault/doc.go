// SPDX-License-Identifier: Apache-2.0

// Package fault holds the fault suite of the user-space data path: a whole cluster in one
// process, in simulated time that passes as fast as the processor allows, under a user who
// knows which writes were acknowledged.
//
//	writer ── engine, host ══ network ══ controller, leg, backend ── drive
//	             │     initiator agent        │     target agent
//	             └──────── network ───────────┴──── volume manager ── power ── store
//
// Everything that belongs to Weft is real: manager and store, gRPC, agents, NVMe/TCP, labels,
// legs. The tests replace only what lies between and below them. The network is in memory, and
// cuts, delays and delivers late. Drives fail, are slow, hold a write back for any time, and
// may have a cache that is lost with the power. The manager can lose power in the middle of a
// commit. Time is that of testing/synctest.
//
// Some faults come on their own, at any time. Others are plots: a few faults in the order that
// a guard is meant for, such as a host that is fenced while a drive still holds back its
// writes. A host that loses a volume by force keeps using it. Processes freeze while their
// clocks continue, agents are started twice, and the manager's clock is set.
//
//	go test ./e2e/fault -seed 7 -only "force move,slow medium"
//
//	go test ./e2e/fault -faults 5000 -seed 7
//
// The user's operations overlap; raid/engine/history decides what each unit may hold. If
// everything loses power, data that a flush or FUA had made durable must still be there.
//
// The seed determines the faults, their times and what is written. The scheduler determines
// how goroutines interleave, so a seed that failed may need several runs to fail again.
//
// Clusters that misbehave on purpose show that the suite detects faults: see control_test.go.
package fault

// SPDX-License-Identifier: Apache-2.0

// Package fault holds the fault suite of the user-space data path: a whole cluster in one
// process, in simulated time that passes as fast as the processor allows, under a user who
// knows which writes were acknowledged.
//
//	writer ── engine, host ══ network ══ controller, leg, backend ── drive
//	             │     initiator agent        │     target agent
//	             └──────── network ───────────┴──── volume managers ── power ── log, store
//
// Everything that belongs to Weft is real: manager and store, gRPC, agents, NVMe/TCP, labels,
// legs. The tests replace only what lies between and below them. The network is in memory, and
// cuts, delays and delivers late. Drives fail, are slow, hold a write back for any time, and
// may have a cache that is lost with the power. Time is that of testing/synctest.
//
// One manager keeps the records, or three do together; see -managers. A manager can lose power in
// the middle of a commit, and of any write to its log or its store; what was not synced is then
// lost, wholly or in part. Managers are cut off from each other, also in one direction, lose
// messages, freeze and go on, hand leadership over, are removed, lose their disks, and come back as
// new members. A clerk calls their API all the time, and knows what was acknowledged.
//
// In another test callers only use the API of three managers. What they were told must be
// linearizable: see TestTheAPIIsLinearizable.
//
// Some faults come on their own, at any time. Others are plots: a few faults in the order that
// a guard is meant for, such as a host that is fenced while a drive still holds back its
// writes. A host that loses a volume by force keeps using it. Processes freeze while their
// clocks continue, agents are started twice, and the manager's clock is set.
//
//	go test ./e2e/fault -seed 7 -only "force move,slow medium"
//
//	go test ./e2e/fault -faults 5000 -first 7 -managers 3
//
// The user's operations overlap; raid/engine/history decides what each unit may hold. If
// everything loses power, data that a flush or FUA had made durable must still be there.
//
// The seed determines the faults, their times and what is written. The scheduler determines
// how goroutines interleave, so a seed that failed may need several runs to fail again.
//
//	go test ./e2e/fault -thin
//
// gives each life two thin volumes. The same faults and the same rules hold for them; discards are
// among the user's operations. Snapshots are taken of them, alone and in groups, read by hosts and from
// the drives, cloned, and deleted in any order, while all the faults go on; clones have users of their
// own. Some clones are sealed: several hosts then read one at once, and none may write it. Volumes go back
// to their snapshots, with what they hold kept in another one or not, also while the managers' store is
// lost. Drives are filled to the last chunk of a tree, and writes wait. A snapshot holds
// what its volume may have held at one moment after it was asked for, the same moment for all of a group,
// and never changes; a volume that went back holds what its snapshot does, and nothing that it held before;
// at the end all space comes free: see archive. thin_test.go fills drives to the last extent.
//
//	go test ./e2e/fault -snapshots
//
// does the same with volumes that are not thin: their legs get trees, and lose them, while everything else
// goes on.
//
// Clusters that misbehave on purpose show that the suite detects faults: see control_test.go.
package fault

// SPDX-License-Identifier: Apache-2.0

// Package checkpoint finds the parts of a column in which its copies may differ after the
// host that wrote to them has crashed.
//
// A target keeps a list of the regions of each leg that were written (Tracker). The host
// takes a checkpoint of each column from time to time (Take), and the targets then forget
// what was written before it:
//
//	host                                    the target of each leg in sync
//	-----------------------------------------------------------------------------
//	Begin(token) to every leg          ──▶  starts a new list, keeps the one before
//	waits until all writes accepted
//	so far are on every leg in sync
//	Commit(token) to every leg         ──▶  forgets the list before
//
// A list therefore has every region that was written since the last checkpoint began. A
// write that is on one copy and missing on another was not complete when any later
// checkpoint was committed, so the first copy still lists its region. The union of the
// lists of all legs in sync has every region in which the copies may differ (Unequal).
// Package raid/engine copies these from one leg to the others before a volume is used again.
//
// # A leg that is copied to
//
// It takes part in checkpoints, and its target keeps what it lacked at the last one (Behind).
// The next host copies that, and what any of the lists names, instead of the whole leg: at the
// checkpoint, the leg had everything else that the legs in sync had (Lacks).
//
// # When lists cannot be trusted
//
// Lists are in memory. A target that starts with none says so, and says so until a
// checkpoint of the column is committed: then the column is compared whole. The same
// holds if two lists do not belong to the same checkpoint. The token of a checkpoint is
// random, so legs whose last checkpoints match were in sync with each other when that
// checkpoint was committed, and everything that either of them was given since is in its
// list. This does not depend on anybody's record of which legs are in sync.
package checkpoint

// SPDX-License-Identifier: Apache-2.0

// Package explore visits everything that can happen in small clusters: every order of messages,
// losses, crashes and restarts, up to the bounds of a [Config]. Random histories find what is
// likely; this finds the shortest way to whatever is possible, or shows that there is none.
//
// The decisions are the real ones: package volmgr/cluster for the manager, initiator/volume for the
// hosts. Around them is a small abstract data path, one block of one volume:
//
//	manager  cluster.State ── reports, orders ──► target   label, admitted epoch, exports
//	   ▲                                            ▲      content and medium of its leg:
//	   │ reports, orders, records                   │      the number of the last write
//	   ▼                                            │
//	host     volume.Plan over what it sees ─────────┘      writes: out, sent, done
//
// Decisions are pure, so each is computed once. A [world] holds only numbers of managers, targets,
// hosts and messages, and two worlds are the same if they are ==. What no decision depends on is
// left out of these (see skip), and times are ages that stop growing once they no longer matter.
//
// # What happens when
//
// Time passes only when nothing else is under way, except for Config.Slownesses. Messages arrive and
// hosts take their turns at once, except for Config.Lates of them, which may come at any later time;
// with Lates negative, each may come late, any number of times. Users' writes, rebuilds and the
// commands that a dead host has left at a target come in every order in any case.
//
// # What holds in every world
//
//   - Each leg that is recorded in sync holds every acknowledged write (every flushed one, once all
//     such legs have lost their caches).
//   - A host that may read reads no older value than one that was acknowledged or read before, and
//     the same one from each copy.
//   - No host may write to a copy at an older epoch than the one that another host was granted.
//   - The copies of a volume that is recorded clean are equal.
//   - A host's note names only copies that hold what it has acknowledged.
//   - If nothing else breaks, the broken parts can heal in such a way that the volume serves again, or
//     can be attached.
//
// # What it leaves out
//
// One volume of one column, one block, one portal and one drive for each target. A target does what it is
// told in one step: its own planner is not run here (e2e/fault runs whole targets). The data path is
// the user-space one. Nothing moves, grows, is shared or scrubbed, and no store is lost.
package explore

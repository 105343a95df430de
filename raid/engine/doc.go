// SPDX-License-Identifier: Apache-2.0

// Package engine makes one block device from a volume's legs in user space: RAID0, RAID1
// and RAID10 with up to three copies. It places bytes as the device-mapper tables of
// package raid/dm/mirror do, so either path can read what the other wrote. It starts no
// goroutines: its code runs in those that submit I/O, in those that complete the legs'
// I/O, and in timers.
//
// # A leg's life
//
//	          Add(InSync)                    Drop: the owner has recorded it stale
//	Absent ───────────────▶ InSync ──────────────────────────┐
//	   │                      ▲                              ▼
//	   │              Promote │                           Dropped
//	   │ Add(Rebuilding)      │  every region is equal      │  ▲ an error, or Drop
//	   └──────────────▶ Rebuilding ──▶ CaughtUp ◀──          │  │
//	                       ▲   │           └─────────────────┼──┘ Drop, after a record
//	                       └───┼─────────────────────────────┘
//	                           └─ an error, or Drop ─▶ Dropped
//
// Writes go to all legs except Absent and Dropped ones; the regions that these miss are
// tracked. Reads go to InSync legs only. A write that a CaughtUp leg failed is held, as
// for an InSync leg: once the engine has reported that a leg has caught up, the owner may
// have recorded it in sync. So no write that it lacks may be acknowledged before it is
// recorded stale again.
//
// # What it promises
//
//   - A write is acknowledged only when each leg that was not dropped has it (design,
//     invariant 2). If a leg fails the write or does not answer, the write is held: it is
//     neither acknowledged nor failed until the owner drops the leg or the leg takes the
//     write after all. I/O that failed on the last leg in sync is retried forever. A
//     rebuild does not wait for held writes: it copies the data below them, and they
//     then start again. So a leg that can be read but no longer written can still be
//     replaced.
//
//   - Writes that overlap go to the legs one after another. A read waits for the writes
//     that it overlaps, and a write for such reads. So copies differ only while a write
//     is under way, and a value that was read once is on all copies (invariant 9).
//
//   - Data that was not yet flushed on a leg when the leg was dropped counts as missed. So
//     a leg that lost its cache in a power failure is repaired too.
//
//   - A discard on a mirror becomes a write of zeroes that may unmap, because copies may
//     return different data for a discarded block. If one of a column's legs does not
//     support discards, a discard does nothing on that column.
//
//   - A scrub (see Scrub) compares the copies in sync while the volume is in use, and says
//     where they differ. By the rules above they never do, unless a drive has changed what
//     it was given. If asked to, it repairs what it finds by the rules of Repair.
//
//   - Rebuilds and scrubs keep below the rates that the owner sets, and slow down, to a least
//     rate, while they make users' IO take more than twice as long as it does without them.
//
// # After a crash
//
// Copies may differ in writes that were under way when an earlier client crashed. Equalize
// makes them equal before the volume is used; EqualizeParts does so where the targets' lists
// say that they may differ. Members, Settle and Written are for the checkpoints that keep
// these lists short: see package raid/checkpoint.
//
// # What it asks of its owner
//
// A leg's device owns the memory of an IO until it answers. So after Drop of a leg that
// does not answer, the owner must cut the leg's device, that is, have it answer all its
// IOs with an error; only then do the writes that the leg had go on. Before a leg is added
// again, no IO that went to an earlier device of the leg may still reach the medium. The
// target's fence ensures that.
package engine

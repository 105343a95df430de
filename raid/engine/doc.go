// SPDX-License-Identifier: Apache-2.0

// Package engine makes one block device of a volume's legs in user space: RAID0,
// RAID1 and RAID10 with up to three copies, over the same addresses as the
// device-mapper tables of package raid, so that what one of them wrote the other
// reads. It starts no goroutines: it works in those that submit to it, in those
// that its legs answer from, and in timers.
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
// Writes go to all legs but Absent and Dropped ones; what these miss is tracked
// by region. Reads come from InSync legs only. CaughtUp legs hold writes as
// InSync ones do: from the moment that the engine says that a leg has caught up,
// the owner may have recorded it in sync, so nothing must be acknowledged that it
// lacks before it is recorded stale again.
//
// # What it promises
//
//   - A write is acknowledged only when each leg that was not dropped has it
//     (design, invariant 2). If one errs or is silent the write is held: neither
//     acknowledged nor failed, until the owner drops the leg or it has it after
//     all. Errors of the last leg in sync are tried again, for ever. A rebuild does
//     not wait for held writes: it copies what is below them, and they then begin
//     anew. So a leg that can only be read any more can still be replaced.
//   - Writes that overlap go to the legs one after another, and a read waits for
//     the writes that it overlaps, and the other way round. So copies never differ
//     for longer than a write is under way, and a value that was once read is on
//     all copies (invariant 9).
//   - What a leg had not been told to make durable when it was dropped counts as
//     missed, so that a leg that lost its cache with its power is repaired, too.
//   - A discard on a mirror becomes a write of zeroes that may unmap, because what
//     a discarded block reads as may differ between copies; if one of a column's
//     legs knows no discard, it does nothing on that column.
//
// # What it asks of its owner
//
// An IO's memory belongs to a leg's device until the device answers. So after
// Drop of a leg that is silent its device must be cut (all that it holds answered
// with an error): the writes that it had go on then. Before a leg is added again
// nothing that an earlier device of it was given may reach the medium any more:
// the fence of the target is for that.
package engine

// SPDX-License-Identifier: Apache-2.0

// Package mirror plans the kernel path of a volume: how its legs become one block
// device, by device-mapper mirrors under a stripe. It consists of values and decisions:
// nothing here touches a kernel, a file or a clock. Package raid/dm carries the plans out.
//
// A volume is a stack of mapped devices. With two columns of two copies:
//
//	weft-<volume>                    striped over the columns (linear if one)
//	├── weft-<volume>-c0             mirror [A, B], dirty log on a RAM disk
//	└── weft-<volume>-c1             mirror [C, D]
//
// A column has one of five shapes:
//
//	linear      one leg in sync, nothing tracked         linear A
//	flat        all live legs in sync                    mirror nosync [A B C]
//	equalizing  in sync by record, unequal after a crash mirror use-log [A B C], not yet exposed
//	tracked     a leg is lost, what it misses is logged  mirror use-log keep_log [S lost<i>]
//	rebuilding  a leg catches up on what is logged       mirror use-log [S back<i>]
//
// where S is the leg in sync or, if there are several, a mirror of their own,
// weft-<volume>-c<k>-in = mirror core nosync [A B]. lost<i> is a device that fails all
// I/O, and back<i> a linear map to the returning leg. Their names carry the number of the
// copy, so that a restarted agent learns from the kernel alone which copy's missed writes
// a log describes.
//
// What dm-mirror does, and what follows from it:
//
//   - With handle_errors, it holds a write that failed on a leg until the table is
//     swapped without a flush. So handle_errors is always set: no write that a leg lacks
//     is acknowledged before volmgr has recorded that leg as stale.
//   - With keep_log, it acknowledges such a write after all if any leg took it. So
//     keep_log is set only where one leg is alive: with two, a write that only the wrong
//     one took would be acknowledged.
//   - In a region that its log marks dirty, it writes to the first leg alone. So a table
//     that uses its log has exactly one source in sync, the first leg. If more legs are
//     in sync, an inner mirror of them is that source.
//   - With nosync, it forgets its log each time it is resumed. So nosync is set where all
//     legs are in sync, and only there.
//   - When a nosync mirror is suspended and resumed without a new table, it also forgets
//     that a leg failed, but not in which regions. Writes to these regions then go to one
//     leg and are acknowledged (observed on 6.1). So dm.Diff loads the table of a
//     suspended mirror again. Never suspend and resume a column by hand.
//
// [Plan] compares the devices that exist with those of a wanted [Column], and returns
// steps. No step lets a write be acknowledged that a leg in sync lacks. The caller makes
// volmgr's records; in both directions the record comes before the plan:
//
//   - When a leg is lost, record it as stale, then plan without it.
//   - When a leg has caught up (its rebuilding mirror was seen synced and healthy),
//     record it in sync, then plan with it as a source. If it joined earlier, it would
//     be read while the record calls it stale.
//
// Between that record and the switch, a write may fail on the leg. The mirror then marks
// the write's region dirty, where it writes to the first leg only; but it holds every
// write to that region for as long as it remembers the error. So from the record on,
// nothing may make it forget the error: no [Refresh], and no return to the old table when
// the switch takes long. Either the leg joins, and the held writes are issued again to
// it too, or the leg is recorded stale again and leaves.
//
// A step can block in its suspend when a leg below hangs or an inner mirror holds writes.
// Then look at the legs, record what has changed, and do the steps of [Release].
//
// dm-mirror sends a discard to all legs, but does not track it, nor order it against the
// copy to a leg that rebuilds, and it fails a discard that a leg failed instead of holding
// it. So callers switch discards off (queue/discard_max_bytes of the top device) at least
// from before they find out what a leg lacks until it is in sync.
package mirror

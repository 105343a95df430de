// SPDX-License-Identifier: Apache-2.0

// Package raid decides how a volume's legs become one block device. It is all
// values and arithmetic: nothing here touches a kernel, a file or a clock.
// Package raid/dm, whose values it makes, does.
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
// where S is the leg in sync, or, if there are more of them, a mirror of its
// own, weft-<volume>-c<k>-in = mirror core nosync [A B]; lost<i> is a device
// that fails all I/O, and back<i> a linear map to the returning leg. Their
// names carry the number of the copy, so that a restarted agent reads from the
// kernel alone whose misses a log holds.
//
// What dm-mirror does, and what follows from it:
//
//   - With handle_errors, a write that a leg failed is held until the table is
//     swapped without a flush. So handle_errors is always set: nothing is
//     acknowledged that a leg lacks before volmgr has recorded that leg stale.
//   - With keep_log it is acknowledged after all, as long as any leg took it.
//     So keep_log is set only where one leg is alive: with two, a write that
//     only the wrong one took would be acknowledged.
//   - In a region that its log calls dirty, it writes to the first leg alone.
//     So a table that uses its log has exactly one source in sync, and it is
//     the first; more legs in sync form an inner mirror that is the one source.
//   - With nosync it forgets its log each time it is resumed. So nosync is right
//     where all legs are in sync, and only there.
//   - Resumed after a suspend without a new table, a nosync mirror also forgets
//     that a leg failed, but not in which regions: writes there then go to one leg
//     and are acknowledged (seen on 6.1). So dm.Diff loads the table of a suspended
//     mirror anew; nobody should suspend and resume a column by hand.
//
// [Plan] turns the devices that are into those of a wanted [Column], in steps
// none of which lets a write be acknowledged that a leg in sync lacks. In both
// directions volmgr's record comes first; the order around a plan, which is the
// caller's, is:
//
//   - A leg that is lost: record it stale, then plan without it.
//   - A leg that has caught up, that is, whose rebuilding mirror was seen synced
//     and healthy: record it in sync, then plan with it as a source. Joined
//     before, it would be read while the record calls it stale.
//
// Between that record and the switch a write may fail on the leg. Its region is
// then dirty, where the mirror writes to the first leg only; but it holds every
// write to such a region for as long as it remembers the error. So from the
// record on nothing may make it forget: no [Refresh], no way back to the old
// table if the switch takes long. Either the leg joins, and the held writes are
// issued again to it too, or it is recorded stale again and leaves.
//
// A step can block in its suspend, because a leg below hangs or an inner mirror
// holds writes. Then look at the legs, record, and do what a new plan has before
// the first step on that device; see dm.Client.DoContext.
//
// A discard is not tracked by dm-mirror, and one that a leg failed is not held
// but failed. Callers switch discards off on a mirrored volume
// (queue/discard_max_bytes of the top device).
package raid

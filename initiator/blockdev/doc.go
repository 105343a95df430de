// SPDX-License-Identifier: Apache-2.0

// Package blockdev gives a [block.Device] out as a block device of the kernel.
//
//	/dev/weft/db1 → ../ublkb0     /dev/weft/db1 → ../nbd3      /dev/weft/db1 → ../loop7
//	      │                             │                            │ direct I/O
//	 ublk driver                   nbd driver                   loop driver
//	      │ io_uring commands           │ NBD over AF_UNIX           │ a file
//	      │                             │                       FUSE, /dev/fuse
//	 ─────┴─────────────── kernel ──────┴────────────────────────────┴─────────
//	              this process: block.Device.Submit, IO.Done
//
// Three kinds, the best that the machine has unless one is named:
//
//   - ublk (Linux 6.0 and newer, module ublk_drv): one copy per I/O, no system
//     call per I/O under load.
//   - nbd (module nbd): two copies, one socket pair per queue.
//   - fuse (fuse and loop, in almost every kernel): a loop device with direct I/O
//     over the one file of a FUSE file system. Each I/O is two system calls here, some
//     4 µs of processor time for a read of 4k, of which half is the copy to the reader
//     and the end of its I/O, and 2 µs of the loop driver's one worker: it is not the
//     limit, unless something else keeps its processor, as it has no priority.
//
// What they have in common: size and block size are those of the device's
// geometry; a flush of the kernel is a flush of the device, unless the geometry has
// no volatile cache; discards and zeroing pass through
// where the geometry has a discard unit. An I/O that the device keeps is kept: no
// timeout of the kernel turns a stall into an error.
//
// # Names
//
// Export holds a lock file of the name while it lives, so that one name is given
// out once, and records beside it what it made. A second lock, beside the name's
// link, is for processes with other run directories, as of two clusters on one
// machine: the name is refused while its process lives, and taken over after.
//
// All that this package makes in the kernel says whose it is (the mount's place and
// source, the loop device's file name, the nbd device's backend, the ublk device's
// server flags together with the record), and only what says so is ever taken away.
//
// # When the process dies
//
// A fuse device fails all I/O from then on. An nbd or ublk device that was
// exported with a Resume token holds its I/O instead; the next Export of the same
// name and token takes it over, with its users, and what was under way is sent
// again. In every other case the next Export of the name, or Remove, takes away
// what is left. A file system that is still mounted on a dead device keeps the
// dead device until it is unmounted, but never reaches the new one.
//
// # Memory
//
// Dirty pages of the device are written through this process. If the kernel
// needed such a write to give this process memory, both would wait for ever; so
// Export marks the process as one that writes for others (PR_SET_IO_FLUSHER, see
// prctl(2)), which needs CAP_SYS_RESOURCE. Where that is refused a warning is
// logged; then keep the process's memory from being reclaimed by other means (a
// cgroup with memory.min), and never put swap on the device in any case.
package blockdev

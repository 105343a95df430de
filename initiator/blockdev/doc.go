// SPDX-License-Identifier: Apache-2.0

// Package blockdev provides a [block.Device] as a kernel block device.
//
//	/dev/weft/db1 → ../ublkb0     /dev/weft/db1 → ../nbd3      /dev/weft/db1 → ../loop7
//	      │                             │                            │ direct I/O
//	 ublk driver                   nbd driver                   loop driver
//	      │ io_uring commands           │ NBD over AF_UNIX           │ a file
//	      │                             │                       FUSE, /dev/fuse
//	 ─────┴─────────────── kernel ──────┴────────────────────────────┴─────────
//	              this process: block.Device.Submit, IO.Done
//
// There are three kinds; unless one is named, the best that the machine supports is used:
//
//   - ublk (Linux 6.0 and newer, module ublk_drv): one copy per I/O, no system
//     call per I/O under load.
//   - nbd (module nbd): two copies, one socket pair per queue.
//   - fuse (fuse and loop, in almost every kernel): a loop device with direct I/O
//     over the one file of a FUSE file system. Each I/O costs two system calls here. A
//     4k read takes some 4 µs of processor time, half of it for the copy to the reader
//     and the completion, and 2 µs of the loop driver's single worker. The worker is not
//     the limit, unless other work keeps its processor busy: it has no priority.
//     Where the kernel has FUSE over io_uring (Linux 6.14 and newer) and an administrator
//     has switched it on (fuse.enable_uring), requests and answers go over io_uring. If
//     that does not work when the device is made, the device is made without it.
//
// All kinds have this in common: size and block size are those of the device's geometry; a
// flush from the kernel becomes a flush of the device, unless the geometry has no volatile
// cache; discards and zeroing are passed on if the geometry has a discard unit. If the device
// does not complete an I/O, the I/O waits: no kernel timeout turns a stall into an error.
//
// # Names
//
// Export holds a lock file for the name as long as the device is exported, so that each name
// is exported only once, and records next to it what it made. Processes with other run
// directories, such as those of two clusters on one machine, may have a volume of the same
// name, so a second lock, next to the link, is held for the name of the device. While its
// process lives, or its disk exists, another volume's device gets another of its
// Options.Names:
//
//	/dev/weft/db1 → ../loop7           .db1.lock            held by process 70, or it is dead
//	/dev/weft/db1+0b5f0a3e → ../loop8  .db1+0b5f0a3e.lock   held by process 80
//
// The lock's file tells in whose run directory the device is recorded, also after the
// process's death, so that its next process gets the name back.
//
// Everything that this package makes in the kernel carries a mark of its owner (the mount's
// place and source, the loop device's file name, the nbd device's backend, the ublk device's
// server flags together with the record), and nothing without our mark is ever removed.
//
// # When the process dies
//
// A device that was exported with a Resume token holds its I/O from then on. The next Export of
// the same name and token takes it over with its users, and the pending I/O is sent again,
// including what the dead process had begun, which may so be carried out twice. If no process does that in time, the device is removed, and its I/O fails.
//
// ublk and nbd do this in the kernel. A FUSE connection ends with its last descriptor, so a
// holder keeps one: a small process, which sees to the time of all kinds, too (see Hold). For
// the requests that the dead process had read, the kernel must have FUSE_NOTIFY_RESEND (Linux
// 6.9), and they must not have come over io_uring; such a device does not use it. If the kernel
// has it not, or there is no holder, or no token was given, a fuse device fails all I/O when its
// process dies.
//
// In every other case the next Export of the name, or Remove, removes what is left. A file
// system that is still mounted on a dead device keeps that device until it is unmounted, but
// never reaches the new one.
//
// # Memory
//
// Dirty pages of the device are written through this process. If the kernel had to write such
// a page in order to give this process memory, both would wait forever. So Export marks the
// process as one that writes for others (PR_SET_IO_FLUSHER, see prctl(2)), which needs
// CAP_SYS_RESOURCE. If that is refused it logs a warning; then protect the process's memory
// from reclaim by other means (a cgroup with memory.min). In any case, never put swap on the
// device.
package blockdev

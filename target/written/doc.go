// SPDX-License-Identifier: Apache-2.0

// Package written lists which regions of block devices are written, also where the kernel alone
// serves them. A small BPF program runs in the kernel whenever a block device is given an I/O, and
// marks its regions in memory that this process shares:
//
//	nvmet ──▶ leg's device ──▶ tracepoint block_bio_queue ──▶ drive
//	                                   │
//	                                   └─▶ program: device tracked? regions |= those of the write
//	                                                                 │
//	          package raid/checkpoint reads and clears them  ◀───────┘ shared memory
//
// The program runs before the device sees the I/O, so a write cannot reach the drive unlisted. The
// kernel counts the times at which it could not run the program; the program counts the I/Os that
// are longer than it can mark. Both are in [Watcher.Missed]: whoever relies on a list compares the
// count from before it began.
//
// The kernel must describe its own types (CONFIG_DEBUG_INFO_BTF), since the program reads struct bio.
// Debian, Ubuntu, Fedora, RHEL and SUSE build their kernels so. Lists and program go with the process.
package written

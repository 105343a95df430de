// SPDX-License-Identifier: Apache-2.0

// Package backend makes a block.Device of what a target has: a file, a block
// device, or plain memory.
//
//	NVMe/TCP controller ── block.Device ──┬── File    regular file or block device
//	                                      └── Memory  RAM, for tests and benchmarks
//
// Durable means durable: a write with FUA and a flush are answered when the
// kernel has said that the medium has the data (RWF_DSYNC, fdatasync), and a
// flush that failed once fails for ever, since the kernel reports what it lost
// only one time. A target has many hosts on one File, and sees to that for each of
// them (FlushAgain, Losses): whoever comes later knows what was lost.
//
// Discards and zeroing reach the medium as what it offers: holes in files,
// BLKDISCARD and BLKZEROOUT on block devices, and written zeroes where there is
// nothing better.
package backend

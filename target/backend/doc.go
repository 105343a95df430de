// SPDX-License-Identifier: Apache-2.0

// Package backend makes a block.Device of a file or a kernel block device.
//
//	NVMe/TCP controller ── block.Device ── File ── regular file or block device
//
// Durable means durable: a FUA write and a flush are answered when the kernel has confirmed that
// the data is on the medium (RWF_DSYNC, fdatasync). After a failed flush every later one fails too,
// since the kernel reports a loss only once. A target has many hosts on one File, so it keeps that
// rule itself for each of them (FlushAgain, Losses): an export made after the loss is not affected.
//
// Discards and zeroing use what the medium offers: holes in files, BLKDISCARD and BLKZEROOUT on
// block devices, and written zeroes where there is nothing better.
package backend

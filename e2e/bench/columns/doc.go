// SPDX-License-Identifier: Apache-2.0

// Package columns measures what a mirrored volume of 1, 2, 4 or 8 columns reaches on a machine
// with several processors, over both data paths:
//
//	kernel:  dm-stripe ─► dm-mirror per column ─► RAM disks of the kernel (brd)
//	user:    ublk ─► the engine ─► RAM disks of the process
//
// Each figure is a ratio to the RAM disks of the kernel under dm-stripe alone, with as many
// columns: what remains is the cost of mirroring, without a network. dm-mirror writes from one
// kernel worker per column, which is why columns count.
//
// It runs in a virtual machine, since the tables are the kernel's.
package columns

// SPDX-License-Identifier: Apache-2.0

// Package datapath measures the user-space data path on the machine itself: no
// virtual machine, loopback TCP, the server pinned to one processor and the
// client to another.
//
//	bench (this process) ── starts, asks, prints
//	├── client, pinned: makes the load                      ══ TCP ══╗
//	└── servers, pinned: bare frames, Weft's controller, peers  ◄════╝
//
// What is measured, each in its turn in every round, so that what else goes on
// in the machine falls on all:
//
//   - the machine's limit: frames of the same sizes as NVMe/TCP has them, answered
//     without looking at them. Once with blocking system calls as a C program makes
//     them, once as Go's network poller does it; both read as much as there is and
//     answer it with one write;
//   - Weft: proto/nvmetcp/host against proto/nvmetcp/controller, the hosts under
//     raid/engine (all legs on that one controller), and the block device before
//     it, where "server" is the process that gives the device out;
//   - what a user would take instead from the distribution: nbdkit, qemu-nbd,
//     qemu-storage-daemon, tgt. NBD servers are driven by the same loop as the bare
//     frames, tgt by libiscsi's iscsi-perf.
//
// Figures of one machine say little about another. So ratios are printed: of each
// round the ratio to the bare frames in it, and of these the median.
package datapath

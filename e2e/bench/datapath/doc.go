// SPDX-License-Identifier: Apache-2.0

// Package datapath measures the user-space data path on the machine itself: no
// virtual machine, loopback TCP, the server pinned to one processor and the
// client to another.
//
//	bench (this process) ── starts, asks, prints
//	├── client, pinned: makes the load                      ══ TCP ══╗
//	└── servers, pinned: bare frames, Weft's controller, peers  ◄════╝
//
// Each round measures all of the following in turn, so that other load on the machine
// affects all of them alike:
//
//   - the machine's upper bound: unparsed frames with the sizes of NVMe/TCP. Once without
//     ever waiting (both ends ask again until there is something), once with blocking
//     system calls, as a C program makes them, and once with Go's network poller; all read
//     as much as there is and answer it with one write;
//   - Weft: proto/nvmetcp/host against proto/nvmetcp/controller, the hosts under
//     raid/engine (with all legs on that one controller);
//   - the distribution's alternatives: nbdkit, qemu-nbd, qemu-storage-daemon, tgt. The
//     loop that drives the bare frames also drives NBD servers; libiscsi's iscsi-perf
//     drives tgt;
//   - SPDK, if the environment names a built one: its polling target with our host and with
//     its own client, and its client on our target.
//
// Another part measures block devices, where "server" is the process that exports the device:
// Weft's over its own memory (what the front end costs), over one leg and over two, and as
// the upper bound a C program that serves a file in memory through FUSE, below a loop device.
// Both ways of FUSE are measured, if the machine lets this program switch io_uring on for it.
//
// Tail measures how long the slowest I/Os of an hour take, beside bare frames and SPDK.
//
// Snapshots and Thin measure what snapshots cost beside others' (qcow2, dm-thin): reads and writes with
// none and with 100 of them, first writes, and making, cloning and deleting 1000. Each is divided by a
// plain device that is reached in the same way.
//
// Absolute figures do not carry over to other machines, so ratios are printed: for each
// round the ratio to the upper bound of that round, and over all rounds the median, with the least and the most.
package datapath

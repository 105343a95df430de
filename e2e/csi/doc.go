// SPDX-License-Identifier: Apache-2.0

// Package csi holds the tests of the CSI driver over a whole cluster in one
// process: a manager, targets and initiators of the user-space data path, and
// the driver on its socket. Devices, file systems and mounts are real.
//
//	csi-sanity ── unix socket ── csi ── volmgr ── targets, on sparse files
//	                              │                  ║ NVMe/TCP, loopback
//	                           mounts ── loop ── FUSE ── initiator
//
// It needs root, /dev/fuse and loop devices.
package csi

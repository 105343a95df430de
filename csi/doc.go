// SPDX-License-Identifier: Apache-2.0

// Package csi is Weft's CSI driver: it gives the volumes of a Weft cluster to
// containers, over version 1.13 of the Container Storage Interface.
//
//	 external-provisioner, -attacher, -resizer            kubelet
//	          │ controller service                          │ node service, registration
//	┌─────────▼──────────┐                       ┌──────────▼──────────┐
//	│ weft csi           │                       │ weft csi            │
//	│  --mode controller │                       │  --mode node        │
//	└─────────┬──────────┘                       └────┬───────────┬────┘
//	          │ Manager service                       │           │ mounts, formats, grows
//	          ▼                                       ▼           ▼
//	        volmgr ◄──────────────────────────────────┘     /dev/weft/NAME, which the
//	                                                        initiator agent keeps
//
// The driver keeps nothing. What it knows of a volume it asks the volume manager
// or the kernel (mountinfo, the device itself) anew in each call, so that it can
// be stopped, cut off or killed between any two steps, and the same call made
// again ends in the same state.
//
// # Errors
//
// A CO takes most codes, Internal among them, to mean that nothing is under way
// any more. Unavailable, Aborted, DeadlineExceeded, Canceled and (in
// Kubernetes) ResourceExhausted mean that it may be, and that the call, or its
// opposite, will be made again. The driver answers with one of these for as long
// as anything it has asked for may still happen; codes.go is the one table.
//
// # What it promises
//
//   - ControllerUnpublishVolume answers OK only when the targets have confirmed
//     that the node can no longer write, alive or not.
//   - A volume's operations do not overlap: the second one is Aborted, and told
//     which is under way and since when.
//   - A node takes a volume's device by the number that the agent reported for the
//     epoch, and holds it open while it looks; names decide nothing (node.go).
//   - A file system is made only on what was read as empty, or was begun and never
//     mounted, and what is there already is never replaced (format.go).
//   - NodeUnstageVolume answers OK only when nothing on the node has the volume's file
//     system any more, and names what has it. A mount is detached under its users
//     only when its attachment is gone and fenced (node_unstage.go).
//   - What hangs in the kernel keeps its volume, and nothing else: the call ends at
//     its deadline and says what goes on.
//   - What is not served is not advertised.
package csi

// SPDX-License-Identifier: Apache-2.0

// Package csi is Weft's CSI driver: it provides the volumes of a Weft cluster to containers, over
// version 1.13 of the Container Storage Interface.
//
//	 external-provisioner, -attacher, -resizer,
//	 -snapshotter                                         kubelet
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
// The driver stores no state. In each call it asks the volume manager or the kernel (mountinfo, the
// device itself) about the volume. So it can be stopped, cut off or killed between any two steps,
// and repeating the call leads to the same state.
//
// # Errors
//
// A CO understands most codes, Internal among them, to mean that nothing is under way any more.
// Unavailable, Aborted, DeadlineExceeded, Canceled and (in Kubernetes) ResourceExhausted mean that
// work may be under way, so the CO repeats the call or makes its opposite. The driver uses one of
// these as long as a request that it made may still take effect; codes.go is the one table.
//
// # What it promises
//
//   - ControllerUnpublishVolume answers OK only when the targets have confirmed
//     that the node can no longer write, alive or not.
//   - A volume's operations do not overlap: the second one is Aborted, and told
//     which is under way and since when.
//   - A node identifies a volume's device by the number that the agent reported for the
//     epoch, and holds it open while it checks; names decide nothing (node.go).
//   - A file system is made only on a device that reads as empty, or over our own that was
//     begun and never mounted; any other content is never replaced (format.go).
//   - NodeUnstageVolume answers OK only when nothing on the node has the volume's file
//     system any more, and otherwise names the users. A mount is detached under its users
//     only when its attachment is gone and fenced (node_unstage.go).
//   - A call that hangs in the kernel blocks its volume, and nothing else: it ends at
//     its deadline and says what is still under way.
//   - A snapshot is answered when it is complete, and one that failed is begun anew. No id of a
//     volume deletes it as a snapshot, nor the reverse (controller_snapshot.go).
//   - A clone has the layout and place of its source, or is refused (controller_clone.go).
//   - The driver advertises nothing that it does not support.
package csi

// SPDX-License-Identifier: Apache-2.0

// Package userspace keeps volumes in this process, for machines whose kernel lacks the NVMe
// host or device-mapper, or does not allow modules to be loaded.
//
//	/dev/weft/<name>        a kernel block device, package initiator/blockdev
//	volume                  package raid/engine: stripes, mirrors, holds writes
//	leg                     one namespace of a connection
//	connection              package proto/nvmetcp/host, one per target and volume
//
// The rules are the same as in the kernel's data path (package initiator): a write that did
// not reach a leg is acknowledged only after the manager has durably recorded that leg as
// stale; a rebuilding leg is read only after the manager has recorded it in sync; and a host
// that can neither reach a leg nor record its loss stops serving when its lease is over.
//
// The difference is in lifetimes. The kernel's stack outlives its agent, and a keeper there
// finds out by looking what exists. Here the data path ends with the process. Nothing is
// written down, a new process knows nothing, and each process has a boot id of its own. So the
// manager treats the end of a process as the crash of a client: it grants the volume again,
// and the copies are made equal. A process that is told to stop first detaches the volumes
// that nobody has open, which spares them that work.
//
// As there, package initiator/volume decides and does no I/O; the files here decide nothing.
package userspace

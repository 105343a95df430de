// SPDX-License-Identifier: Apache-2.0

// Package userspace keeps volumes in this process, for machines whose kernel has
// no NVMe host, no device-mapper, or lets nobody load them.
//
//	/dev/weft/<name>        a device of the kernel's, package initiator/blockdev
//	volume                  package raid/engine: stripes, mirrors, holds writes
//	leg                     one namespace of a connection
//	connection              package proto/nvmetcp/host, one per target and volume
//
// The rules are those of the kernel's data path (package initiator), and so are
// the words: a write that did not reach a leg is acknowledged only after the
// manager has durably recorded that leg as stale; a leg that is copied to is read
// only after the manager has recorded it in sync; a host that can neither reach a
// leg nor record its loss stops serving when its lease is over.
//
// What differs is who lives how long. The kernel's stack outlives its agent, and
// a keeper there finds what is by looking. Here the data path ends with the
// process: nothing is written down, a process that begins knows nothing, and its
// boot id is its own, so that the manager takes the end of a process for the crash
// of a client: it grants anew, and the copies are made equal. A process that is
// told to end lets go what nobody has open, which spares the next one that.
//
// As there, plan.go decides and touches nothing; files that touch decide nothing.
package userspace

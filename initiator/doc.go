// SPDX-License-Identifier: Apache-2.0

// Package initiator is the agent of a machine that uses volumes. It provides each attached
// volume as one block device, and keeps it working while legs come and go.
//
//	/dev/weft/<name> -> dm-N       symlink, made when the device is ready for use; see keeper.Names
//	weft-<volume>                  striped over the columns (linear if there is one)
//	weft-<volume>-c<k>             mirror of the legs of column k (linear if there is one)
//	/dev/nvmeXnY                   one leg: the multipath head of its namespace
//	nvme controllers               package initiator/fabrics
//
// One rule comes first: a write that did not reach a leg is acknowledged only after the
// manager has durably recorded that leg as stale. The kernel itself holds such writes
// (connections queue forever, mirrors hold failed writes), so an agent that is slow, stopped
// or dead can stall I/O but cannot lose it.
//
// Each attachment is one goroutine that repeats three steps (package initiator/keeper):
// observe the system (sysfs, device-mapper, the run directory), compare it with the wanted
// state, and carry out the next orders. Package initiator/volume decides and does no I/O; the
// files that touch the kernel decide nothing. A restarted agent finds its place by looking.
//
// All this is the kernel's data path ([Kernel]). Where the kernel lacks what it needs, this
// process follows the same rules ([User]): see package userspace.
package initiator

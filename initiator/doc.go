// SPDX-License-Identifier: Apache-2.0

// Package initiator is the agent of a machine that uses volumes. It gives each
// attached volume out as one block device and keeps it so while legs come and go.
//
//	/dev/weft/<name> -> dm-N       symlink, made when the device may be used
//	weft-<volume>                  striped over the columns (linear if there is one)
//	weft-<volume>-c<k>             mirror of the legs of column k (linear if there is one)
//	/dev/nvmeXnY                   one leg: the multipath head of its namespace
//	nvme controllers               package initiator/fabrics
//
// The rule that everything serves: a write that did not reach a leg is
// acknowledged only after the manager has durably recorded that leg as stale.
// The kernel holds such writes by itself (connections queue for ever, mirrors
// hold what fails), so that an agent that is slow, stopped or dead can stall
// I/O and cannot lose it.
//
// Each attachment is one goroutine that does the same thing again and again:
// look at what is (sysfs, device-mapper, the run directory), compare with what
// is wanted, do the next steps. plan.go decides and touches nothing; files that
// touch the kernel decide nothing. A restarted agent finds its place by looking.
//
// All that is the data path of the kernel ([Kernel]). Where the kernel cannot do
// it, the same rules are kept in this process ([User]): see package userspace.
package initiator

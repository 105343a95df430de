// SPDX-License-Identifier: Apache-2.0

// Package dm controls the kernel's device mapper by ioctl. It needs no dmsetup,
// libdevmapper or udev.
//
// A mapped device is described by a plain value first, and then made in the kernel:
//
//	want := []dm.Device{{Name: "leg", UUID: "weft-leg-1", Table: dm.Whole(size, dm.Linear{Device: "8:16"})}}
//	got, err := client.Devices("weft-leg-")
//	for _, step := range dm.Diff(got, want) {
//		err := client.Do(step)
//	}
//
// Diff is pure, level-triggered and safe to repeat: the next Diff finds and finishes what
// a crash interrupted (a device without a table, one left suspended, a table that was
// loaded but did not become live). Do changes one device at a time, and each change is
// atomic for the I/O on the device: load the inactive table, suspend, resume.
//
//	          Create            Load               Resume
//	(nothing) ------> no table ------> inactive ----------> live <--> suspended
//	    ^                                                    |  Load: inactive beside live
//	    +-------------------- Remove ------------------------+
//
// Sizes are bytes in the API; 512-byte sectors exist only between this package and the
// kernel. A device is named by its number ("253:4") or by the name of a mapped device;
// names are resolved when a table is loaded.
//
// The client has no state except the open control node, and may be used by many
// goroutines. A call blocks as long as the kernel does. A suspend waits for the I/O
// below, so a caller whose legs may hang runs it in a goroutine of its own, with a
// watchdog. Only interrupted system calls are retried; on a busy device (EBUSY) the
// caller decides.
//
// The package loads no kernel modules, except those that the kernel itself requests when
// a table names a target ("dm-mirror"). It does not wait for udev.
package dm

// SPDX-License-Identifier: Apache-2.0

// Package dm speaks to the kernel's device mapper by ioctl: no dmsetup, no
// libdevmapper, no udev needed.
//
// A mapped device is first a plain value and only then a thing in the kernel:
//
//	want := []dm.Device{{Name: "leg", UUID: "weft-leg-1", Table: dm.Whole(size, dm.Linear{Device: "8:16"})}}
//	got, err := client.Devices("weft-leg-")
//	for _, step := range dm.Diff(got, want) {
//		err := client.Do(step)
//	}
//
// Diff is pure, level-triggered and safe to repeat: what was cut by a crash (a
// device without a table, one left suspended, a table loaded and not switched
// to) is found by the next Diff and finished. Do changes one device at a time,
// and each change is atomic for whoever has I/O on it: load the inactive table,
// suspend, resume.
//
//	          Create            Load               Resume
//	(nothing) ------> no table ------> inactive ----------> live <--> suspended
//	    ^                                                    |  Load: inactive beside live
//	    +-------------------- Remove ------------------------+
//
// Sizes are bytes in the API and 512-byte sectors only in what goes to the
// kernel. Devices are named either by number ("253:4") or by the name of a
// mapped device; names are resolved when a table is loaded.
//
// The client has no state of its own beside the open control node and may be
// used from many goroutines. A call blocks for as long as the kernel does: a
// suspend waits for the I/O below, so callers with legs that may hang run it
// apart, with a watchdog. It retries nothing but interrupted system calls; a
// device that is busy (EBUSY) is the caller's to try again.
//
// It does not load kernel modules beyond what the kernel itself requests when
// a table names a target ("dm-mirror"), and does not wait for udev.
package dm

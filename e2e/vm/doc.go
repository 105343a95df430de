// SPDX-License-Identifier: Apache-2.0

// Package vm runs virtual machines for tests: a real Linux kernel, our own init,
// NVMe drives that outlive the machine, and a network that the test can cut.
//
//	 test process                                        QEMU, one per machine
//	┌───────────────────────────────────────────┐       ┌──────────────────────────┐
//	│ Cluster                                   │       │ Debian kernel 6.1 / 6.12 │
//	│  Machine t1 ── control: Run, Start, files ┼─serial┼─ e2e/guest init          │
//	│             ── console: oops? silent end? ┼─ttyS0─┼─ kernel                  │
//	│             ── QMP: pull a drive, fail it ┼───────┼─ NVMe drives (files)     │
//	│  Network    ── switch: cut, delay, lose   ┼─stream┼─ eth0 10.77.0.x          │
//	└───────────────────────────────────────────┘       └──────────────────────────┘
//
// A test defines its machines and boots them:
//
//	c := vm.NewCluster(t)
//	t1 := c.Machine("t1", vm.NVMe("2GiB", "A1"), vm.StateDisk())
//	h1 := c.Machine("h1", vm.Memory(512))
//	c.Boot(ctx, t1, h1)
//	out, err := h1.Run(ctx, "ping", "-c1", t1.Addr())
//	t1.Kill()                                  // power cut
//	c.Boot(ctx, t1)                            // the same drives, a fresh root
//	c.Network().Cut(t1, h1)
//
// All machines of all clusters boot the same kernel and initramfs, and mount the same
// read-only disk of programs. These are built once and kept in the cache ($WEFT_CACHE, or
// the user's cache directory). The init gets each machine's settings over the control port.
//
// Unexpected silence is an error. The test fails if a machine ends unexpectedly, if a
// kernel prints BUG, Oops or WARNING, or if a daemon exits by itself; the error quotes the
// end of the console. The logs of a failed test are kept, and the test prints their
// directory. QEMU ends with the test process, however that ends.
//
// Without hardware virtualization QEMU translates (TCG): a machine boots in a few seconds
// and computes about ten times slower, but its timers run in real time.
//
// Environment:
//
//	WEFT_KERNEL      6.1 (default) or 6.12
//	WEFT_KERNEL_DIR  a directory with boot/vmlinuz-* and lib/modules/*, for systems without apt
//	WEFT_CACHE       where kernels and images are kept
//	WEFT_VM_LOGS     where logs are kept (default: a directory under the system's temporary one)
//	WEFT_VM_DRIVES   where drives are kept (default: in memory if 8 GiB are free, else under the temporary directory)
//	WEFT_VM_KEEP     keep logs and drives of tests that passed
//	WEFT_KVM         0: do not use KVM even where it works
package vm

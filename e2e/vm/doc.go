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
// A test draws its machines and boots them:
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
// All machines of all clusters boot one kernel and one initramfs and mount one
// read-only disk of programs; both are made once and kept in the cache
// ($WEFT_CACHE, or the user's cache directory). What differs between machines is
// told to the init over the control port.
//
// Silence is an error: a machine that ends without having been told to, a kernel
// that prints BUG, Oops or WARNING, and a daemon that exits by itself fail the
// test, with the end of the console in the text. Logs of a failed test are kept
// in a directory that it prints. QEMU dies with the test process, whatever kills
// that.
//
// Without hardware virtualisation QEMU translates (TCG): a machine boots in a few
// seconds and computes perhaps ten times slower; timers run in real time.
//
// Environment:
//
//	WEFT_KERNEL      6.1 (default) or 6.12
//	WEFT_KERNEL_DIR  a directory with boot/vmlinuz-* and lib/modules/*, where there is no apt
//	WEFT_CACHE       where kernels and images are kept
//	WEFT_VM_LOGS     where logs are kept (default: a directory under the system's temporary one)
//	WEFT_VM_KEEP     keep logs and drives of tests that passed
//	WEFT_KVM         0: do not use KVM even where it works
package vm

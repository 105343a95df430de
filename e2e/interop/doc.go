// SPDX-License-Identifier: Apache-2.0

// Package interop is the interoperability suite: Linux's NVMe/TCP host on our
// target, our host on Linux's target, and the same cases on other pairs.
//
//	                our target                  nvmet
//	nvme-tcp        TestLinuxHostOnOurTarget    TestLinuxHostOnLinuxTarget
//	our host        TestOurHostOnOurTarget      TestOurHostOnLinuxTarget
//
//	make interop KERNEL=6.12      boots a machine and runs all four in it
//	go test ./e2e/interop         our host on our target, anywhere
//
// Linux with itself is there to show that the cases ask for nothing that Linux
// does not do, and that the suite would notice. Both ends of a pair run in one
// machine, over its loopback; ours run in the test's process, so that a case
// can do anything to them. Where a case needs a network that fails, a proxy in
// the process is that network.
//
// # The intent of blktests
//
// The cases carry the numbers of the tests of blktests' nvme group whose
// documented intent they make again. "Linux" are those about a program or file
// that only Linux's host has. Left out:
//
//	032, 050      PCI hot plug and timeouts: no fabrics
//	033 to 037    nvmet's passthru target: our namespaces have no NVMe drive beneath
//	038           deleting a subsystem that was never enabled: nvmet's configfs; with us every
//	              test that serves nothing to anybody does it (proto/nvmetcp/controller)
//	039           error logging through the kernel's fault injection, which Debian leaves out
//	046, 049, 067 passthrough as another user and by io_uring: a matter of the kernel alone
//	054           reservations on nvmet: since 6.13
//	056           offload of data placement to a network card
//	059           atomic writes of a drive
//	060           nvmet's reset file in debugfs: what it does to a host is what 061 does
//	062, 063      TLS, and keys for it out of DH-HMAC-CHAP: not offered (see proto/nvmetcp/dhchap)
//	064, 066      metadata and self-encrypting drives: our namespaces have neither
//	068, 069      life times of the kernel's own multipath devices
//	006           creating a target: every case does
//
// DH-HMAC-CHAP (041 to 045) needs kernel 6.12; Debian's 6.1 is built without.
package interop

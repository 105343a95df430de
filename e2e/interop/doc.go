// SPDX-License-Identifier: Apache-2.0

// Package interop is the interoperability suite: Linux's NVMe/TCP host on our
// target, our host on Linux's target, and the same cases on other pairs.
//
//	                our target                  nvmet
//	nvme-tcp        TestLinuxHostOnOurTarget    TestLinuxHostOnLinuxTarget
//	our host        TestOurHostOnOurTarget      TestOurHostOnLinuxTarget
//
//	make interop KERNEL=6.12      boots a machine and runs all four in it
//	make test                     the two of ours with Linux's, on 6.1
//	go test ./e2e/interop         our host on our target, anywhere
//
// The pair of Linux with itself shows that the cases demand only what Linux does, and that
// the suite would notice otherwise. Both ends of a pair run in one machine and use its
// loopback. Ours run in the test's process, so that a case can do anything to them. Where a
// case needs network failures, a proxy in the process causes them.
//
// # The intent of blktests
//
// The cases repeat the tests of blktests' nvme group by their stated intent, and carry
// their numbers. (L) applies only to Linux's host: to a program or file of it. (A) needs
// DH-HMAC-CHAP in the kernel, which 6.12 has and Debian's 6.1 has not. ffdhe6144 takes
// Linux half a minute per queue in an emulated machine (8192 less than a second), so only
// our own pair runs it. Tests that cannot apply are left out, with the reason.
//
//	002  many subsystems and discovery       discovery lists every subsystem once
//	003  keep alives of discovery            a discovery controller is kept alive (L)
//	004  UUID descriptors of a namespace     a namespace is found by its UUID
//	005  reset of a controller               a reset controller comes back
//	006  creating a target                   every case does
//	008  creating a host                     a namespace is found by its UUID
//	010  data verified by fio                data is what was written
//	012  mkfs, and data verified by fio      a file system is made and filled (L)
//	014  flush                               a flush is answered
//	016  many namespaces and discovery       many namespaces are all there
//	017  the same on files                   many namespaces are all there
//	018  access out of range                 beyond the end is an error
//	019  discard                             discarded blocks can be written again
//	021  nvme list                           nvme list and list-subsys show it (L)
//	022  nvme reset                          a reset controller comes back
//	023  nvme smart-log                      nvme smart-log, error-log, fw-log, effects-log are read (L)
//	025  nvme effects-log                    nvme smart-log, error-log, fw-log, effects-log are read (L)
//	026  nvme ns-descs                       nvme ns-descs shows the UUID (L)
//	027  nvme ns-rescan                      nvme ns-rescan under load (L)
//	028  nvme list-subsys                    nvme list and list-subsys show it (L)
//	029  nvme read and write                 nvme read, write, compare, flush, dsm, write-zeroes (L)
//	030  discovery's generation counter      discovery's generation counter grows with each change (L)
//	031  deletion right after connecting     a controller may go right after it came
//	032  PCI reset and removal               left out: no fabrics
//	033  passthru target: connecting         left out: our namespaces have no NVMe drive beneath
//	034  passthru target: data               left out: as 033
//	035  passthru target: mkfs               left out: as 033
//	036  passthru target: reset              left out: as 033
//	037  passthru target: deletion           left out: as 033
//	038  deleting what was never enabled     a subsystem with nothing in it, on no port, may go
//	039  error logging                       left out: by fault injection, not in Debian's kernels
//	040  reset and disconnect under load     resets under load lose nothing
//	041  authentication                      a host proves its key, in each kind of key (A)
//	042  key types                           a host proves its key, in each kind of key (A)
//	043  hashes and groups                   a host proves its key by each hash and group (A)
//	044  both directions                     both prove their keys (A)
//	045  authenticating again                a live host proves itself again (L A, our target)
//	046  passthrough as another user         left out: Linux's permissions, nothing on the wire
//	047  queue types                         read, write and poll queues (L)
//	048  queue count changes on reconnect    another number of queues after a reconnect
//	049  passthrough by io_uring             left out: a way into Linux's host, nothing on the wire
//	050  PCI timeout                         left out: no fabrics
//	051  namespaces enabled side by side     namespaces come and go side by side
//	052  file namespaces come and go         namespaces come and go side by side
//	053  rescan under load                   nvme ns-rescan under load (L)
//	054  reservations                        reservations (L, our target; nvmet: since 6.13)
//	055  write to a disabled namespace       a write to a namespace that is gone is an error
//	056  zero copy offload                   left out: needs a network card that can
//	057  ANA failover under load             paths fail over by ANA state under load
//	058  rapid remapping                     an nsid that means another namespace is another device
//	059  atomic writes                       left out: of a drive of its own
//	060  target reset by debugfs             left out: in nvmet's debugfs; 061 does the same to a host
//	061  target teardown and setup           a target that goes away and comes back under load
//	062  TLS                                 left out: not offered, see proto/nvmetcp/dhchap
//	063  secure concatenation                left out: as 062
//	064  metadata                            left out: our namespaces have none
//	065  unmap write zeroes in sysfs         zeroed blocks read as zeroes
//	066  self-encrypting drives              left out: of a drive of its own
//	067  admin passthrough by io_uring       left out: as 049
//	068  delayed removal of a multipath      left out: Linux's own since 6.16, nothing on the wire
//	069  life time of a multipath device     left out: Linux's own, nothing on the wire
//
// blktests no longer uses the missing numbers. Cases without a number cover topics that
// blktests lacks: a path that breaks, a silent network, a refused host, and nvme-cli's
// reading of Identify and ANA.
package interop

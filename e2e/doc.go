// SPDX-License-Identifier: Apache-2.0

// Package e2e holds the scenarios: what Weft promises, shown on real kernels in
// virtual machines, with real nvmet, real NVMe hosts and real device-mapper.
//
//	make e2e                                   all scenarios on Debian's 6.1
//	make e2e KERNEL=6.12 RUN=TargetKilled      some of them on another kernel
//
// Where machines cannot run, the scenarios are skipped with the reason; in CI that is a
// failure. Package e2e/testbed is the cluster they use, e2e/vm its machines, e2e/operator
// runs weft commands, and e2e/workload is the program that records what was acknowledged.
package e2e

// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"cmp"
	"os"
	"testing"
	"time"

	"weft.dev/weft/e2e/vm"
)

// TestInterop runs the suite of e2e/interop in a machine with the kernel of
// WEFT_KERNEL. Some of it only:
//
//	WEFT_RUN=TestLinuxHostOnOurTarget/057 go test -count=1 -v -run TestInterop ./e2e
func TestInterop(t *testing.T) {
	vm.Require(t)
	m := vm.NewCluster(t).Start("i",
		vm.Memory(1280), vm.CPUs(2),
		vm.Modules("nvme_tcp", "nvmet", "nvmet_tcp", "ext4"),
		// Linux's host and nvmet run in one machine. On 6.1, large writes between them
		// trigger the check in mm/usercopy.c.
		vm.KernelArgs("hardened_usercopy=off"),
	)
	mayNot := map[string]string{
		".*OnLinuxTarget/054_.*": "nvmet has reservations since 6.13",
		".*OnLinuxTarget/045_.*": "nvmet does not report when a host has authenticated",
	}
	if vm.KernelVersion() == "6.1" {
		mayNot["(TestLinuxHost.*|TestOurHostOnLinuxTarget)/04[1-5].*"] = "this kernel was built without DH-HMAC-CHAP"
		mayNot["TestLinuxHostOnOurTarget/discovery_asks_for_a_proof"] = "this kernel was built without DH-HMAC-CHAP"
	}
	vm.GoTest(t, m, vm.Suite{
		Package: "./e2e/interop", Run: cmp.Or(os.Getenv("WEFT_RUN"), ""), Limit: 35 * time.Minute, MaySkip: mayNot,
	})
}

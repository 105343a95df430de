// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"os"
	"testing"
)

// These tests run in virtual machines, by e2e.TestKernel, because a developer's kernel may
// have neither driver.

func TestKernelBlockdevNBD(t *testing.T) {
	requireKernel(t, NBD)
	runSuite(t, NBD)
	runResumeSuite(t, NBD)
}

func TestKernelBlockdevUBLK(t *testing.T) {
	requireKernel(t, UBLK)
	runSuite(t, UBLK)
	runResumeSuite(t, UBLK)
}

// requireKernel skips the test outside of a virtual machine, and where require does.
func requireKernel(t *testing.T, k Kind) {
	t.Helper()
	if os.Getenv("WEFT_GUEST") == "" {
		t.Skip("needs a kernel of its own: go test -run TestKernel ./e2e")
	}
	require(t, k)
}

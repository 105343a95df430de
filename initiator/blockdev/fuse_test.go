// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"os"
	"testing"
)

// TestFUSE runs the suite over FUSE and a loop device, which most kernels have.
func TestFUSE(t *testing.T) {
	require(t, FUSE)
	runSuite(t, FUSE)
}

// require skips where the machine has not the kind. Where CI says so and the
// machine has the kernel's part, that it can not be used is a failure.
func require(t *testing.T, k Kind) {
	t.Helper()
	a := systemOf(Options{DevDir: devices}).probe(k)
	if a.Usable {
		return
	}
	if k == FUSE && os.Getenv("CI") == "true" && exists("/dev/fuse") && exists("/dev/loop-control") {
		t.Fatalf("%s is there, but: %s", k, a.Reason)
	}
	t.Skipf("%s: %s", k, a.Reason)
}

// SPDX-License-Identifier: Apache-2.0

package interop

import (
	"os"
	"testing"
)

// onKernel skips tests that need a kernel of their own, with nvme-tcp and nvmet-tcp.
func onKernel(t *testing.T) {
	t.Helper()
	if os.Getenv("WEFT_GUEST") == "" {
		t.Skip("needs its own kernel: run make interop")
	}
}

func TestLinuxHostOnOurTarget(t *testing.T) {
	onKernel(t)
	l := &lab{target: ourTarget{}, host: linuxHost{}}
	runAll(t, l, cases())
	runAll(t, l, linuxCases())
}

// TestLinuxHostOnLinuxTarget shows that the cases demand only what Linux does with itself.
func TestLinuxHostOnLinuxTarget(t *testing.T) {
	onKernel(t)
	l := &lab{target: linuxTarget{}, host: linuxHost{}}
	runAll(t, l, cases())
	runAll(t, l, linuxCases())
}

func TestOurHostOnLinuxTarget(t *testing.T) {
	onKernel(t)
	runAll(t, &lab{target: linuxTarget{}, host: ourHost{}}, cases())
}

func TestOurHostOnOurTarget(t *testing.T) {
	runAll(t, &lab{target: ourTarget{}, host: ourHost{}}, cases())
}

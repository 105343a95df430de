// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
)

// apart is set in the process that has its own mount namespace.
const apart = "WEFT_CSI_TEST_APART"

// Mounts made here must not be visible to the rest of the machine: a process that copied
// the machine's mounts, as a container does, would keep a volume from being unstaged. So
// the program starts itself again in a mount namespace of its own.
func TestMain(m *testing.M) {
	if os.Geteuid() != 0 || os.Getenv(apart) != "" {
		// go test logs opened files to a file that some of the agents' threads do not have;
		// see the tests of initiator/blockdev.
		flag.Parse()
		if err := flag.Set("test.testlogfile", ""); err != nil {
			panic(err)
		}
		os.Exit(m.Run())
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), apart+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		os.Exit(max(exit.ExitCode(), 1))
	case err != nil:
		fmt.Fprintln(os.Stderr, "run the tests in a mount namespace of their own:", err)
		os.Exit(1)
	}
}

// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"weft.dev/weft/csi/mount"
)

// These tests mount in a mount namespace of their own, which ends with the process: so the program
// starts itself once more. Loop devices have no namespace; those over files in the tests' own
// directory are detached at the end, however it comes.
const ownDir = "WEFT_CSI_TEST_DIR"

func TestMain(m *testing.M) {
	if os.Geteuid() != 0 {
		os.Exit(m.Run())
	}
	if os.Getenv(ownDir) != "" {
		letGo()
		os.Exit(m.Run())
	}
	code, err := runApart()
	if err != nil {
		fmt.Fprintln(os.Stderr, "run the tests in a mount namespace of their own:", err)
		os.Exit(1)
	}
	os.Exit(code)
}

const loopMajor = 7 // Documentation/admin-guide/devices.txt

// letGo unmounts the namespace's copies of other programs' mounts on volumes and loop devices:
// otherwise those would be in use as long as the tests run.
func letGo() {
	all, err := mount.NewLinux().Mounts()
	if err != nil {
		return
	}
	for _, m := range all {
		if m.Device.Major == loopMajor || strings.HasPrefix(m.Source, "/dev/weft/") {
			_ = mount.NewLinux().Unmount(m.Point, true)
		}
	}
}

func runApart() (code int, err error) {
	dir, err := os.MkdirTemp("", "weft-csi-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(dir)
	defer detachLoops(dir)
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), ownDir+"="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	err = cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return max(exit.ExitCode(), 1), nil
	}
	return 0, err
}

func detachLoops(dir string) {
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err == nil && strings.HasPrefix(string(text), dir+"/") {
			name := filepath.Base(filepath.Dir(filepath.Dir(file)))
			_ = exec.Command("blockdev", "--setrw", "/dev/"+name).Run() // else a later file inherits it
			_ = exec.Command("losetup", "-d", "/dev/"+name).Run()
		}
	}
}

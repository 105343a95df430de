// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"golang.org/x/sys/unix"
)

// The previous user of a free loop device may have left it read-only.
func TestALoopDeviceIsWrittenToWhateverItWas(t *testing.T) {
	require(t, FUSE)
	s := systemOf(Options{DevDir: devices})
	disk := ownLoop(t, s)
	file, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err == nil {
		err = file.Truncate(1 << 20)
	}
	if err == nil {
		err = s.onLoop(disk, func(fd int) error { return unix.IoctlSetPointerInt(fd, unix.BLKROSET, 1) })
	}
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := s.configureLoop(disk, &unix.LoopConfig{Fd: uint32(file.Fd()), Size: 512}); err != nil {
		t.Fatal(err)
	}
	if ro := s.diskText(disk, "ro"); ro != "0" {
		t.Errorf("attached for writing, ro is %q", ro)
	}
	if err := s.detachLoop(disk); err != nil {
		t.Error(err)
	}
}

// ownLoop returns a free loop device that no other program will take, since programs take the
// free device with the lowest number.
func ownLoop(t *testing.T, s system) (disk string) {
	t.Helper()
	control, err := os.OpenFile(s.control("loop-control"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { control.Close() })
	number := 100_000 + os.Getpid()%100_000
	if err := unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_ADD, number); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.IoctlSetInt(int(control.Fd()), unix.LOOP_CTL_REMOVE, number); err != nil {
			t.Error(err)
		}
	})
	return "loop" + strconv.Itoa(number)
}

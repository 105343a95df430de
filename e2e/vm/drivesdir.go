// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	sharedMemory = "/dev/shm"
	drivesPrefix = "weft-drives-"
	// memoryForDrives is the memory that must be free for drives to be kept in it: more
	// than all machines of a test have together.
	memoryForDrives = 8 << 30 // bytes
)

// makeDrivesDir makes a directory for the files of a cluster's drives: in WEFT_VM_DRIVES, or
// in memory where enough is free, or in the system's temporary directory.
//
// Memory keeps a busy disk of this host out of the tests. A guest that zeroes a range makes
// QEMU call fallocate, which waits until the host's disk has written what lies in that range,
// and all other requests of the drive wait with it. A target takes a drive that is silent for
// so long for a failed one, and is right.
func makeDrivesDir() (string, error) {
	base := os.Getenv("WEFT_VM_DRIVES")
	if base == "" {
		base = os.TempDir()
		if freeMemory() >= memoryForDrives {
			base = sharedMemory
			removeAbandoned(base)
		}
	}
	return os.MkdirTemp(base, fmt.Sprintf("%s%d-", drivesPrefix, os.Getpid()))
}

// freeMemory returns how many bytes a file system in memory has free, and the machine with
// it. It returns 0 where there is no such file system.
func freeMemory() uint64 {
	var fs unix.Statfs_t
	if err := unix.Statfs(sharedMemory, &fs); err != nil || fs.Type != unix.TMPFS_MAGIC {
		return 0
	}
	available, err := availableMemory()
	if err != nil {
		return 0
	}
	return min(available, fs.Bavail*uint64(fs.Bsize))
}

// availableMemory reads from /proc/meminfo how many bytes programs can still get.
func availableMemory() (uint64, error) {
	info, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	var kib uint64
	_, rest, _ := strings.Cut(string(info), "\nMemAvailable:")
	_, err = fmt.Sscan(rest, &kib)
	return kib << 10, err
}

// removeAbandoned removes the drives of test processes that were killed: in memory they would
// take room until the machine's next boot.
func removeAbandoned(base string) {
	dirs, _ := filepath.Glob(filepath.Join(base, drivesPrefix+"*"))
	for _, dir := range dirs {
		var pid int
		if n, _ := fmt.Sscanf(filepath.Base(dir), drivesPrefix+"%d-", &pid); n == 1 && unix.Kill(pid, 0) == unix.ESRCH {
			_ = os.RemoveAll(dir)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"log/slog"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

var flusherOnce sync.Once

// becomeFlusher tells the kernel that this process writes out others' dirty pages: its
// allocations then never wait for such a write, which would in turn wait for this process. The
// mark belongs to a thread and is inherited by the threads that it creates, so every thread
// must have it.
func becomeFlusher(log *slog.Logger) {
	flusherOnce.Do(func() {
		_, _, e := syscall.AllThreadsSyscall6(unix.SYS_PRCTL, unix.PR_SET_IO_FLUSHER, 1, 0, 0, 0, 0)
		if e != 0 { // ENOTSUP in a program with cgo, such as one with the race detector
			log.Warn("not marked as an I/O flusher: this machine can deadlock when memory is short", "err", e)
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"context"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// serving are the descriptors by which the kernel tells that this process
// serves: FUSE connections, sockets, rings. When the process is killed the
// kernel closes them, once the last thread of the process that shares them has
// ended, and then ends what waits for an answer.
//
// A thread that itself waits for such an answer would never end, the descriptor
// would never be closed, and nobody but the administrator of fusectl could get it
// out. So everything that this process does to its own devices, it does apart.
var serving descriptors

type descriptors struct {
	mu  sync.Mutex
	fds map[int]*served
}

// served is one descriptor, as told from a later one with the same number.
type served struct{ fd int }

// open makes descriptors that serve. None of them may be closed before forget.
func (d *descriptors) open(f func() ([]int, error)) ([]int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	fds, err := f()
	if err != nil {
		return nil, err
	}
	if d.fds == nil {
		d.fds = make(map[int]*served)
	}
	for _, fd := range fds {
		d.fds[fd] = &served{fd}
	}
	return fds, nil
}

func (d *descriptors) forget(fds ...int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, fd := range fds {
		delete(d.fds, fd)
	}
}

// forgetter is forget for a descriptor that somebody else closes, after which its
// number may be another's at once.
func (d *descriptors) forgetter(fd int) func() {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.fds[fd]
	return func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.fds[fd] == s {
			delete(d.fds, fd)
		}
	}
}

// leave gives the calling thread a table of descriptors of its own, without those
// that serve, nor any other that it needs not: what this process closes while the
// thread waits would stay open. The thread must not be used for anything else.
func (d *descriptors) leave(keep []int) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := unix.Unshare(unix.CLONE_FILES); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	for fd := range d.fds {
		unix.Close(fd)
	}
	const all = "/proc/thread-self/fd"
	open, _ := os.ReadDir(all) // without a /proc the others stay
	for _, e := range open {
		fd, err := strconv.Atoi(e.Name())
		if err != nil || fd <= 2 || slices.Contains(keep, fd) {
			continue
		}
		// Go's runtime has an epoll and an eventfd, and ends the process without them.
		if kind, _ := os.Readlink(filepath.Join(all, e.Name())); !strings.HasPrefix(kind, "anon_inode:[event") {
			unix.Close(fd)
		}
	}
	return nil
}

// apart runs f, which waits for a device that this process serves, in a thread
// that does not keep the device alive. Of the process's descriptors f has those of
// keep, and its own.
func apart(f func() error, keep ...int) error {
	done := make(chan error, 1)
	go func() { done <- onThread(f, keep) }()
	return <-done
}

// apartWithin is apart, but waits no longer than ctx lasts: f, which cannot be
// ended, goes on then, and its outcome is lost.
func apartWithin(ctx context.Context, f func() error) error {
	done := make(chan error, 1)
	go func() { done <- onThread(f, nil) }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func onThread(f func() error, keep []int) error {
	runtime.LockOSThread()
	if unix.Gettid() == unix.Getpid() {
		// Go never ends the first thread, and with it its table would stay. While
		// it is locked here another goroutine gets another thread.
		defer runtime.UnlockOSThread()
		return apart(f, keep...)
	}
	// Not unlocked: the thread ends with the goroutine, and its table with it.
	if err := serving.leave(keep); err != nil {
		return err
	}
	return f()
}

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

// serving are the descriptors by which the kernel knows that this process serves: FUSE
// connections, sockets, rings. When the process is killed, the kernel closes them once the
// last thread that shares them has ended, and then fails the I/O that waits for an answer.
//
// A thread that itself waited for such an answer would never end. The descriptor would stay
// open, and only the administrator of fusectl could get the thread out. So whatever this
// process does to its own devices is done unshared.
var serving descriptors

type descriptors struct {
	mu  sync.Mutex
	fds map[int]*served
}

// served is one descriptor, distinct from a later one with the same number.
type served struct{ fd int }

// open registers descriptors that serve. None of them may be closed before forget.
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

// forgetter returns forget for a descriptor that other code closes, after which its number may
// be reused at once.
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

// leave gives the calling thread a descriptor table of its own, without the serving
// descriptors and any others that it does not need: what this process closes would otherwise
// stay open while the thread waits. The thread must not be used for anything else.
func (d *descriptors) leave(keep []int) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if err := unix.Unshare(unix.CLONE_FILES); err != nil {
		return os.NewSyscallError("unshare", err)
	}
	for fd := range d.fds {
		if !slices.Contains(keep, fd) {
			unix.Close(fd)
		}
	}
	const all = "/proc/thread-self/fd"
	open, _ := os.ReadDir(all) // without /proc, the others stay open
	for _, e := range open {
		fd, err := strconv.Atoi(e.Name())
		if err != nil || fd <= 2 || slices.Contains(keep, fd) {
			continue
		}
		// Go's runtime has an epoll and an eventfd, and crashes the process without them.
		if kind, _ := os.Readlink(filepath.Join(all, e.Name())); !strings.HasPrefix(kind, "anon_inode:[event") {
			unix.Close(fd)
		}
	}
	return nil
}

// unshared runs f, which waits for a device that this process serves, on a thread that does not
// keep the device alive. Of the process's descriptors f has only those in keep.
func unshared(f func() error, keep ...int) error {
	done := make(chan error, 1)
	go func() { done <- onThread(f, keep) }()
	return <-done
}

// unsharedWithin is unshared, but waits no longer than ctx lasts. It cannot stop f: f continues
// then, and its outcome is lost.
func unsharedWithin(ctx context.Context, f func() error) error {
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
		// Go never ends the first thread, so that thread's table would stay. While it is locked
		// here, another goroutine gets another thread.
		defer runtime.UnlockOSThread()
		return unshared(f, keep...)
	}
	// Not unlocked, so that the thread, and its table, end with the goroutine.
	if err := serving.leave(keep); err != nil {
		return err
	}
	return f()
}

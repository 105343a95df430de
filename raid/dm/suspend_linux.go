// SPDX-License-Identifier: Apache-2.0

package dm

import (
	"fmt"
	"os"
	"runtime"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The suspend of a mirror must not be interrupted once it waits for I/O. The kernel then takes back what it has
// begun, but dm-mirror cannot (dm-raid1.c has no presuspend_undo): it stays without recovery, fails writes that
// it would hold, and the next suspend of it waits for ever, in dm_rh_stop_recovery. A signal interrupts that
// wait, also the one that kills the process. So the ioctl is made by a child that ignores all signals, belongs
// to no session or process group of its parent, and has nothing but the control node open. If the parent dies,
// the child goes on, and the next process finds the device suspended.
//
// Other devices can take a suspend back, and do when their process ends: they go on serving.

// isMirror reports whether the live table of the device that a request names has a mirror. A resume may
// suspend it, too.
func (c control) isMirror(request []byte) bool {
	h, err := decodeHeader(request)
	if err != nil {
		return false
	}
	table, err := (&Client{c}).Table(h.name)
	return err == nil && slices.ContainsFunc(table, func(r Row) bool { _, is := r.Target.(Mirror); return is })
}

// inChild makes an ioctl in a child process.
func inChild(fd uintptr, cmd uint32, buf []byte) error {
	shared, err := unix.Mmap(-1, 0, len(buf), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANONYMOUS)
	if err != nil {
		return fmt.Errorf("make memory to share with a child: %w", err)
	}
	defer unix.Munmap(shared) //nolint:errcheck // it is whole pages of our own
	copy(shared, buf)
	pid, err := fork(fd, cmd, &shared[0])
	if err != nil {
		return fmt.Errorf("make a child: %w", err)
	}
	child, err := os.FindProcess(pid)
	if err != nil {
		return fmt.Errorf("find child %d: %w", pid, err)
	}
	ended, err := child.Wait()
	switch {
	case err != nil:
		return fmt.Errorf("wait for child %d: %w", pid, err)
	case !ended.Exited():
		return fmt.Errorf("child %d: %v", pid, ended)
	case !ended.Success():
		return unix.Errno(ended.ExitCode())
	}
	copy(buf, shared)
	return nil
}

// fork makes a child that makes one ioctl and exits with its errno.
func fork(fd uintptr, cmd uint32, arg *byte) (pid int, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var all, old unix.Sigset_t
	for i := range all.Val {
		all.Val[i] = ^all.Val[i]
	}
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &all, &old); err != nil {
		return 0, err
	}
	child, errno := forkRaw(fd, uintptr(cmd), uintptr(unsafe.Pointer(arg)))
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &old, nil); err != nil {
		panic(fmt.Sprint("set the signal mask back: ", err))
	}
	if errno != 0 {
		return 0, errno
	}
	return int(child), nil
}

// forkRaw is the part of fork that runs in both processes. The child has one thread and a copy of the memory,
// in which locks may be held by threads that it does not have. So it only makes system calls, in ways that
// touch neither the scheduler nor the heap and do not grow the stack, as syscall.forkAndExecInChild does.
//
//go:noinline
//go:norace
//go:nocheckptr
func forkRaw(fd, cmd, arg uintptr) (pid uintptr, errno unix.Errno) {
	pid, _, errno = unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 || pid != 0 {
		return pid, errno
	}
	// Its copies of locked files and connections would outlive its parent.
	if fd > 0 {
		unix.RawSyscall(unix.SYS_CLOSE_RANGE, 0, fd-1, 0)
	}
	unix.RawSyscall(unix.SYS_CLOSE_RANGE, fd+1, ^uintptr(0)>>32, 0)
	unix.RawSyscall(unix.SYS_SETSID, 0, 0, 0)
	_, _, errno = unix.RawSyscall(unix.SYS_IOCTL, fd, cmd, arg)
	for {
		unix.RawSyscall(unix.SYS_EXIT_GROUP, uintptr(errno), 0, 0)
	}
}

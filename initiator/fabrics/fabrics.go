// SPDX-License-Identifier: Apache-2.0

// Package fabrics controls the kernel's NVMe over Fabrics host: it connects and disconnects
// controllers, finds the block device of a namespace, and reports changes. It decides nothing.
//
//	/dev/nvme-fabrics                       Connect, Supported        connect.go
//	/sys/class/nvme, /sys/class/nvme-subsystem, /sys/block            sysfs.go, find.go
//	netlink sock_diag                       DestroySockets            sockets.go
//	netlink kobject_uevent                  Watch                     uevent.go
//	NVME_URING_CMD_IO                       Probe, Read, Flush        probe.go, command.go
//	NVME_IOCTL_ADMIN_CMD                    Admin                     admin.go
//
// With native multipath each namespace is one head (nvme<S>n<I>, the block device) over paths
// (nvme<S>c<C>n<I>, hidden), one per controller (nvme<C>). None of these numbers is the nsid,
// and a name may belong to another namespace at the next look: [Tree.FindNamespace] resolves
// it for every use.
//
// Writes to these files can block in the kernel for a minute and cannot be interrupted. Such
// calls run on goroutines of their own. If the caller's context ends first they are abandoned;
// until they return, another call for the same object returns [ErrBusy].
package fabrics

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// ErrBusy says that an earlier, abandoned call for the same object is still in the kernel.
var ErrBusy = errors.New("an earlier call is still running in the kernel")

// Error is an error from the kernel. It unwraps to the errno.
type Error struct {
	Op   string // what was being done
	Path string // to what
	Hint string // what this errno means here; may be empty
	Err  error
}

func (e *Error) Error() string {
	if e.Hint == "" {
		return fmt.Sprintf("%s %s: %v", e.Op, e.Path, e.Err)
	}
	return fmt.Sprintf("%s %s: %s (%v)", e.Op, e.Path, e.Hint, e.Err)
}

func (e *Error) Unwrap() error { return e.Err }

// Tree is the kernel's NVMe host as seen through its files.
type Tree struct {
	sys, dev string

	mu    sync.Mutex
	busy  map[string]bool       // objects with a call in the kernel
	found map[block.NQN][]entry // the subsystems that there were last

	controllers fixed[Controller] // without their state
	subsystems  fixed[*subsystem]
	rings       rings
	abandoned   []*runtime.Pinner // of memory that the kernel may still use
}

// New makes a Tree over sysfs at sys ("/sys") and device nodes at dev ("/dev").
func New(sys, dev string) *Tree {
	return &Tree{sys: sys, dev: dev, busy: map[string]bool{}, rings: make(rings, 16)}
}

// Check reports whether this kernel can be used: the fabrics module must be loaded and native
// multipath enabled. Without multipath there are no heads, I/O is not queued when a connection
// is lost, and Weft could keep none of its promises.
func (t *Tree) Check() error {
	const parameter = "module/nvme_core/parameters/multipath"
	v, err := t.read(parameter)
	if errors.Is(err, fs.ErrNotExist) {
		return &Error{Op: "read", Path: t.path(parameter), Hint: "module nvme_core is not loaded, or has no multipath support", Err: err}
	}
	if err != nil {
		return err
	}
	if v != "Y" {
		return &Error{Op: "check", Path: t.path(parameter), Hint: "boot with nvme_core.multipath=Y", Err: fmt.Errorf("is %q, must be \"Y\"", v)}
	}
	return nil
}

func (t *Tree) path(name string) string { return filepath.Join(t.sys, name) }

// read returns a sysfs file without its newline. A file has a page at most.
func (t *Tree) read(name string) (string, error) {
	path := t.path(name)
	fd, err := openFile(path, unix.O_RDONLY)
	if err != nil {
		return "", &Error{Op: "read", Path: path, Err: err}
	}
	defer unix.Close(fd)
	var page [4096]byte
	for n := 0; ; {
		m, err := unix.Read(fd, page[n:])
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return "", &Error{Op: "read", Path: path, Err: err}
		case m == 0 || n+m == len(page):
			return strings.TrimSpace(string(page[:n+m])), nil
		}
		n += max(m, 0)
	}
}

func (t *Tree) exists(name string) bool { return unix.Access(t.path(name), unix.F_OK) == nil }

// write writes one value with one write(2), as sysfs wants it.
func (t *Tree) write(name, value string) error {
	f, err := t.open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	return t.put(f, value)
}

func (t *Tree) open(name string) (*os.File, error) {
	f, err := os.OpenFile(t.path(name), os.O_WRONLY, 0)
	if err != nil {
		return nil, &Error{Op: "open", Path: t.path(name), Err: errno(err)}
	}
	return f, nil
}

func (t *Tree) put(f *os.File, value string) error {
	if _, err := unix.Write(int(f.Fd()), []byte(value)); err != nil {
		return &Error{Op: fmt.Sprintf("write %q to", value), Path: f.Name(), Err: err}
	}
	return nil
}

// errno removes the path from an error of package os, since Error has its own.
func errno(err error) error {
	if pe, ok := errors.AsType[*fs.PathError](err); ok {
		return pe.Err
	}
	return err
}

// await runs call on a goroutine of its own and waits for it or for ctx. Object is busy until
// call has returned.
func (t *Tree) await(ctx context.Context, op, object string, call func() error) error {
	t.mu.Lock()
	if t.busy[object] {
		t.mu.Unlock()
		return &Error{Op: op, Path: object, Err: ErrBusy}
	}
	t.busy[object] = true
	t.mu.Unlock()

	done := make(chan error, 1)
	go func() {
		err := call()
		t.mu.Lock()
		delete(t.busy, object)
		t.mu.Unlock()
		done <- err
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return &Error{Op: op, Path: object, Hint: "the kernel has not answered; not waiting any longer", Err: context.Cause(ctx)}
	}
}

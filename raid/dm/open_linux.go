// SPDX-License-Identifier: Apache-2.0

package dm

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// The paths that libdevmapper uses too.
const (
	controlPath = "/dev/mapper/control"
	miscPath    = "/proc/misc"
)

// Open opens the kernel's device mapper, and makes the control node if there is none. It
// loads no module: fs.ErrNotExist means that dm-mod is neither built in nor loaded.
func Open() (*Client, error) {
	if _, err := os.Stat(controlPath); errors.Is(err, fs.ErrNotExist) {
		if err := makeControl(miscPath, controlPath); err != nil {
			return nil, opError("open", "", err)
		}
	}
	f, err := os.OpenFile(controlPath, os.O_RDWR, 0)
	if err != nil {
		return nil, opError("open", "", err)
	}
	c := &Client{control{f}}
	if v, err := c.Version(); err != nil {
		f.Close()
		return nil, err
	} else if v[0] != interfaceVersion[0] {
		f.Close()
		return nil, opError("open", "", fmt.Errorf("kernel speaks version %v, want %d", v, interfaceVersion[0]))
	}
	return c, nil
}

func makeControl(misc, node string) error {
	minor, err := miscMinor(misc, "device-mapper")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(node), 0o755); err != nil {
		return err
	}
	const miscMajor = 10
	err = unix.Mknod(node, unix.S_IFCHR|0o600, int(unix.Mkdev(miscMajor, minor)))
	if err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make node %s: %w", node, err)
	}
	return nil
}

func miscMinor(misc, name string) (uint32, error) {
	f, err := os.Open(misc)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		number, device, ok := strings.Cut(strings.TrimSpace(lines.Text()), " ")
		if !ok || device != name {
			continue
		}
		minor, err := strconv.ParseUint(number, 10, 32)
		return uint32(minor), err
	}
	if err := lines.Err(); err != nil {
		return 0, err
	}
	return 0, fmt.Errorf("%s in %s: %w", name, misc, fs.ErrNotExist)
}

// control is the kernel, reached through /dev/mapper/control.
type control struct{ file *os.File }

func (c control) close() error { return c.file.Close() }

func (c control) ioctl(cmd uint32, buf []byte) error {
	conn, err := c.file.SyscallConn()
	if err != nil {
		return err
	}
	var errno error
	apart := cmd == cmdSuspend && c.isMirror(buf)
	if err := conn.Control(func(fd uintptr) {
		if apart {
			errno = inChild(fd, cmd, buf)
		} else {
			errno = ioctl(fd, cmd, unsafe.Pointer(&buf[0]))
		}
	}); err != nil {
		return err
	}
	return errno
}

// ioctl tries again after a signal: the Go runtime sends signals to preempt goroutines.
func ioctl(fd uintptr, cmd uint32, arg unsafe.Pointer) error {
	for {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, uintptr(cmd), uintptr(arg))
		switch errno {
		case 0:
			return nil
		case unix.EINTR:
			continue
		}
		return errno
	}
}

// watch opens the control node again, because the kernel keeps for each open file which
// event it has reported last. It arms the file before it calls changed, so an event
// between that call and the wait is reported at once.
func (c control) watch(ctx context.Context, changed func() (bool, error)) error {
	f, err := os.OpenFile(controlPath, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { f.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	var result error
	err = conn.Read(func(fd uintptr) (done bool) {
		if result = arm(fd); result != nil {
			return true
		}
		done, result = changed()
		return done || result != nil
	})
	if ctx.Err() != nil && errors.Is(err, os.ErrDeadlineExceeded) {
		return context.Cause(ctx)
	}
	if err != nil {
		return err
	}
	return result
}

func arm(fd uintptr) error {
	buf := make([]byte, headerSize)
	header{version: interfaceVersion, dataSize: headerSize, dataStart: headerSize}.encode(buf)
	return ioctl(fd, cmdArmPoll, unsafe.Pointer(&buf[0]))
}

// MajorMinor returns the number of the block device at a path.
func MajorMinor(path string) (block.DeviceNumber, error) {
	var s unix.Stat_t
	if err := unix.Stat(path, &s); err != nil {
		return block.DeviceNumber{}, &fs.PathError{Op: "stat", Path: path, Err: err}
	}
	if s.Mode&unix.S_IFMT != unix.S_IFBLK {
		return block.DeviceNumber{}, &fs.PathError{Op: "stat", Path: path, Err: unix.ENOTBLK}
	}
	return block.DeviceNumber{Major: unix.Major(s.Rdev), Minor: unix.Minor(s.Rdev)}, nil
}

// WriteThrough has flushes of a mapped device end at once: there is nothing to be flushed. They do not reach its
// targets then. A table that is loaded later undoes this. The root holds sys.
func WriteThrough(root string, n block.DeviceNumber) error {
	f, err := os.OpenFile(filepath.Join(root, fmt.Sprintf("sys/dev/block/%v/queue/write_cache", n)), os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteString("write through")
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return fmt.Errorf("switch the write cache off: %w", err)
	}
	return nil
}

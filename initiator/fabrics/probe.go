// SPDX-License-Identifier: Apache-2.0

package fabrics

import (
	"fmt"
	"path/filepath"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/nvmetcp"
)

const probeSize = 4096

// Probe reads 4 KiB from the start of a head, to check that the drive answers. It opens the device each
// time, because a head that is kept open could not be removed with its target.
//
// It returns within limit and the time that the kernel takes to reset a controller, whatever the target
// does: ErrNoAnswer if there is no live path, or the path is lost meanwhile. An ordinary read would wait
// until there is a path again, and a process that waits for it can not be killed.
func (t *Tree) Probe(h Head, limit time.Duration) error {
	return t.opened(h, "read", func(fd int) error {
		sector, err := unix.IoctlGetInt(fd, unix.BLKSSZGET)
		if err != nil {
			return fmt.Errorf("ask for the size of a block: %w", err)
		}
		size := max(probeSize, sector)
		var read nvmetcp.Command
		read.SetOpcode(nvmetcp.IORead)
		read.SetNSID(h.NSID)
		read.SetBlocks(uint32(size / sector))
		return pass(fd, ioctlIO, read, aligned(size), limit)
	})
}

// Flush makes a head's drive write out its cache. The target is asked even if the kernel takes the drive for
// one without a cache. It returns as Probe does.
func (t *Tree) Flush(h Head, limit time.Duration) error {
	return t.opened(h, "flush", func(fd int) error {
		var flush nvmetcp.Command
		flush.SetOpcode(nvmetcp.IOFlush)
		flush.SetNSID(h.NSID)
		return pass(fd, ioctlIO, flush, nil, limit)
	})
}

// opened opens a head for reading: when one that was open for writing is closed, udev looks at it again.
func (t *Tree) opened(h Head, op string, do func(fd int) error) error {
	path := filepath.Join(t.dev, h.Name)
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &Error{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	if err := is(fd, h.Dev); err != nil {
		return &Error{Op: op, Path: path, Err: err}
	}
	if err := do(fd); err != nil {
		return &Error{Op: op, Path: path, Err: err}
	}
	return nil
}

// is checks that a name still belongs to the device that it was resolved to.
func is(fd int, dev string) error {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	got := fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
	if got != strings.TrimSpace(dev) {
		return fmt.Errorf("is device %s, must be %s: %w", got, dev, ErrNoNamespace)
	}
	return nil
}

// aligned returns n bytes that begin at a multiple of n, as O_DIRECT needs.
func aligned(n int) []byte {
	b := make([]byte, 2*n)
	skip := n - int(uintptr(unsafe.Pointer(&b[0]))%uintptr(n))
	return b[skip : skip+n]
}

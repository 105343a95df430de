// SPDX-License-Identifier: Apache-2.0

package fabrics

import (
	"fmt"
	"path/filepath"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

const probeSize = 4096

// Probe reads 4 KiB from the start of a head, bypassing the page cache, to check that the
// drive answers. It opens the device each time, because a head that is kept open could not be
// removed with its target. It can block forever.
func (t *Tree) Probe(h Head) error {
	return t.opened(h, "read", unix.O_RDONLY|unix.O_DIRECT, func(fd int) error {
		_, err := unix.Pread(fd, aligned(probeSize), 0)
		return err
	})
}

// Flush makes a head's drive write out its cache. It can block forever.
func (t *Tree) Flush(h Head) error {
	return t.opened(h, "flush", unix.O_RDWR, unix.Fsync)
}

func (t *Tree) opened(h Head, op string, flags int, do func(fd int) error) error {
	path := filepath.Join(t.dev, h.Name)
	fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
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

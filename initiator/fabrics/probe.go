// SPDX-License-Identifier: Apache-2.0

package fabrics

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

const probeSize = 4096

// Probe reads 4 KiB from the start of a head, to check that the drive answers. It opens the device each
// time, because a head that is kept open could not be removed with its target. The kernel resets a controller
// that has not answered within limit.
//
// Probe waits until some path answers, forever if none does and the head stays, as an ordinary read would. But
// no signal ends the wait for that: a process that was killed in it would not end, and no other be started.
// So it goes through io_uring, and only where that passes no commands (before Linux 5.19, and where it is
// switched off or forbidden) it is an ordinary read.
func (t *Tree) Probe(h Head, limit time.Duration) error {
	return t.insist(h, "read", func(fd int) error {
		sector, err := unix.IoctlGetInt(fd, unix.BLKSSZGET)
		if err != nil {
			return fmt.Errorf("ask for the size of a block: %w", err)
		}
		return t.readBlocks(h, fd, aligned(max(probeSize, sector)), 0, limit)
	})
}

// Read reads from a head, past the page cache, in whole blocks. An answer of the drive that there is no data is
// a [block.ErrMedium]; any other error says that there was no answer, and that another attempt may help. The
// kernel resets a controller that has not answered within limit. Read waits no longer than that for a path, except
// where ordinary reads take the place of commands that are passed through: see Probe.
func (t *Tree) Read(h Head, p []byte, off int64, limit time.Duration) error {
	return t.opened(h, "read", func(fd int) error {
		data := aligned(len(p))
		err := t.readBlocks(h, fd, data, off, limit)
		var status nvmetcp.Status
		switch {
		case err == nil:
			copy(p, data)
		case errors.Is(err, errNoAnswer), errors.Is(err, block.ErrMedium):
		case errors.As(err, &status), errors.Is(err, unix.EIO):
			err = fmt.Errorf("%w: %w", block.ErrMedium, err)
		}
		return err
	})
}

// Overwrite writes to a head, past everything that uses it, in whole blocks. The kernel resets a controller that has not
// answered within limit, and keeps no such write while there is no path. After an error the target may still carry it
// out, until the host has connected again; after the death of the process, it may for limit, and then until that.
// Where commands are not passed through (see [Tree.Probe]) it does nothing, and returns [errors.ErrUnsupported]: an
// ordinary write could keep a process that is killed from ending.
func (t *Tree) Overwrite(h Head, p []byte, off int64, limit time.Duration) error {
	return t.opened(h, "write", func(fd int) error {
		data := aligned(len(p))
		copy(data, p)
		write, err := onBlocks(nvmetcp.IOWrite, h, fd, len(data), off)
		if err != nil {
			return err
		}
		err = t.ask(h, write, data, limit, func() error { return fmt.Errorf("%w: %w", errors.ErrUnsupported, errNotPassed) })
		if errors.Is(err, errAbandoned) { // by then the kernel has an answer, or has reset the controller
			time.Sleep(limit + time.Second)
		}
		return err
	})
}

// readBlocks reads at off of a head that is open as fd. data is aligned.
func (t *Tree) readBlocks(h Head, fd int, data []byte, off int64, limit time.Duration) error {
	read, err := onBlocks(nvmetcp.IORead, h, fd, len(data), off)
	if err != nil {
		return err
	}
	return t.ask(h, read, data, limit, func() error { return plainRead(fd, data, off) })
}

// onBlocks is a command on n bytes at off of a head that is open as fd.
func onBlocks(op nvmetcp.Opcode, h Head, fd, n int, off int64) (cmd nvmetcp.Command, err error) {
	sector, err := unix.IoctlGetInt(fd, unix.BLKSSZGET)
	if err != nil {
		return cmd, fmt.Errorf("ask for the size of a block: %w", err)
	}
	cmd.SetOpcode(op)
	cmd.SetNSID(h.NSID)
	cmd.SetSLBA(uint64(off) / uint64(sector))
	cmd.SetBlocks(uint32(n / sector))
	return cmd, nil
}

// Flush makes a head's drive write out its cache, and waits as Probe does. The target is asked even if the
// kernel takes the drive for one without a cache. (The kernel sends no ordinary flush to such a drive, so a
// read shows that it is there.)
func (t *Tree) Flush(h Head, limit time.Duration) error {
	return t.insist(h, "flush", func(block int) error {
		var flush nvmetcp.Command
		flush.SetOpcode(nvmetcp.IOFlush)
		flush.SetNSID(h.NSID)
		return t.ask(h, flush, nil, limit, func() error {
			if err := reopened(block, unix.O_RDWR, unix.Fsync); err != nil {
				return err
			}
			return plainRead(block, aligned(probeSize), 0)
		})
	})
}

// insist does something with a head until its target has answered, or the head is gone. It keeps the head open, so
// that no other one can take its name meanwhile.
func (t *Tree) insist(h Head, op string, do func(fd int) error) error {
	return t.opened(h, op, func(fd int) error {
		for began := time.Now(); ; {
			err := do(fd)
			if !errors.Is(err, errNoAnswer) {
				return err
			}
			time.Sleep(min(max(20*time.Millisecond, time.Since(began)/50), 250*time.Millisecond)) // often while a path may be moving
			if unix.Access(filepath.Join(t.dev, h.Name), unix.F_OK) != nil {
				return fmt.Errorf("%w: %w", ErrNoNamespace, err)
			}
		}
	})
}

// ask passes a command through, or does what is otherwise the same where that cannot be. The head is open, so its
// character device, which has the same numbers, is no other head's.
func (t *Tree) ask(h Head, cmd nvmetcp.Command, data []byte, limit time.Duration, otherwise func() error) error {
	generic, err := unix.Open(filepath.Join(t.dev, "ng"+strings.TrimPrefix(h.Name, "nvme")), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) { // before Linux 5.13
		return otherwise()
	}
	if err != nil {
		return err
	}
	defer unix.Close(generic)
	if err := t.pass(generic, cmd, data, limit); !errors.Is(err, errNotPassed) {
		return err
	}
	return otherwise()
}

// opened opens a head for reading: when one that was open for writing is closed, udev looks at it again.
func (t *Tree) opened(h Head, op string, do func(fd int) error) error {
	path := filepath.Join(t.dev, h.Name)
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return &Error{Op: "open", Path: path, Err: err}
	}
	defer unix.Close(fd)
	if err := t.sameHead(fd, h); err != nil {
		return &Error{Op: op, Path: path, Err: err}
	}
	if err := do(fd); err != nil {
		return &Error{Op: op, Path: path, Err: err}
	}
	return nil
}

func plainRead(block int, data []byte, off int64) error {
	return reopened(block, unix.O_RDONLY|unix.O_DIRECT, func(fd int) error { return readFull(fd, data, off) })
}

// reopened opens what fd has open once more.
func reopened(fd, flags int, do func(fd int) error) error {
	again, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", fd), flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(again)
	return do(again)
}

// sameHead checks that a name still belongs to the head that it was resolved to. When a head is gone, another one may get
// its name, its device number, and even its namespace ID. Once it is open, none does.
func (t *Tree) sameHead(fd int, h Head) error {
	if err := is(fd, h.Dev); err != nil || h.UUID.IsZero() {
		return err
	}
	text, err := t.read("block/" + h.Name + "/uuid")
	if now, _ := block.ParseUUID(text); err == nil && now != h.UUID {
		err = fmt.Errorf("is namespace %v, must be %v: %w", now, h.UUID, ErrNoNamespace)
	}
	return err
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

// aligned returns n bytes that begin on a page, as O_DIRECT needs.
func aligned(n int) []byte {
	const page = 4096
	b := make([]byte, n+page)
	skip := page - int(uintptr(unsafe.Pointer(&b[0]))%page)
	return b[skip : skip+n]
}

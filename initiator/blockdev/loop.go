// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// mark identifies a kernel device as ours: of this name, under this run directory. It has at
// most 63 characters.
func mark(o Options) string {
	m := fmt.Sprintf("weft:%016x:%s", markNumber(o), o.Name)
	return m[:min(len(m), 63)]
}

// markNumber is the mark where only a number fits.
func markNumber(o Options) uint64 {
	sum := sha256.Sum256([]byte(o.RunDir + "\x00" + string(o.Name)))
	var n uint64
	for _, b := range sum[:8] {
		n = n<<8 | uint64(b)
	}
	return n
}

// attachLoop makes a loop device of a file, with direct I/O, and returns the
// disk's name. The kernel asks the file for its size and discard granularity.
func (s system) attachLoop(f int, g block.Geometry, mark string) (disk string, err error) {
	control, err := os.OpenFile(s.control("loop-control"), os.O_RDWR, 0)
	if err != nil {
		return "", fmt.Errorf("attach a loop device: %w", err)
	}
	defer control.Close()
	config := unix.LoopConfig{Fd: uint32(f), Size: uint32(g.BlockSize)}
	config.Info.Flags = unix.LO_FLAGS_DIRECT_IO
	if g.ReadOnly {
		config.Info.Flags |= unix.LO_FLAGS_READ_ONLY
	}
	copy(config.Info.File_name[:len(config.Info.File_name)-1], mark)
	// Processes race for the free device; those who lose ask again.
	for range 64 {
		free, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return "", fmt.Errorf("attach a loop device: find a free one: %w", err)
		}
		disk = "loop" + strconv.Itoa(free)
		err = s.configureLoop(disk, &config)
		if errors.Is(err, unix.EBUSY) {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("attach a loop device: %w", err)
		}
		return disk, nil
	}
	return "", fmt.Errorf("attach a loop device: %w", unix.EBUSY)
}

// configureLoop attaches a free loop device to a file.
func (s system) configureLoop(disk string, config *unix.LoopConfig) error {
	return s.onLoop(disk, func(fd int) error {
		if err := unix.IoctlLoopConfigure(fd, config); err != nil || config.Info.Flags&unix.LO_FLAGS_READ_ONLY != 0 {
			return err
		}
		// A read-only setting (blockdev --setro) stays with the device when its file changes.
		if err := unix.IoctlSetPointerInt(fd, unix.BLKROSET, 0); err != nil {
			return errors.Join(err, unix.IoctlSetInt(fd, unix.LOOP_CLR_FD, 0))
		}
		return nil
	})
}

// onLoop opens a loop device and calls do with it.
func (s system) onLoop(disk string, do func(fd int) error) error {
	// A container's /dev may lack the node of a device that was just made.
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	if _, err := s.waitNode(ctx, disk); err != nil {
		return err
	}
	fd, err := unix.Open(s.node(disk), unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if errors.Is(err, unix.EACCES) || errors.Is(err, unix.EROFS) { // it is read-only
		fd, err = unix.Open(s.node(disk), unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	}
	if err != nil {
		return fmt.Errorf("open %s: %w", s.node(disk), err)
	}
	defer unix.Close(fd)
	return do(fd)
}

// detachLoop detaches a loop device from its file; if somebody has it open, as soon as it is
// closed. A device that is not attached is not an error.
func (s system) detachLoop(disk string) error {
	err := s.onLoop(disk, func(fd int) error { return unix.IoctlSetInt(fd, unix.LOOP_CLR_FD, 0) })
	if err != nil && !errors.Is(err, unix.ENXIO) && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("detach %s: %w", disk, err)
	}
	return nil
}

// keepLoop cancels a detachLoop that waits for somebody to close the device.
func (s system) keepLoop(disk string) error {
	return s.onLoop(disk, func(fd int) error {
		info, err := unix.IoctlLoopGetStatus64(fd)
		if err != nil {
			return err
		}
		info.Flags &^= unix.LO_FLAGS_AUTOCLEAR
		return unix.IoctlLoopSetStatus64(fd, info)
	})
}

// loopsOf finds the loop devices that carry a mark or use a file. If a device's file system is
// dead, the kernel does not report the mark; such a device counts as ours if it has that file
// name and is the recorded one. Whoever made it, it can serve nobody any more.
func (s system) loopsOf(mark, file, recorded string) []string {
	files, _ := filepath.Glob(filepath.Join(s.sys, "block/loop*/loop/backing_file"))
	var all []string
	for _, f := range files {
		disk := filepath.Base(filepath.Dir(filepath.Dir(f)))
		backing, err := os.ReadFile(f)
		if err != nil {
			continue // detached since
		}
		// For a file that is no longer mounted, the kernel reports only the last part of its
		// name. No other device is opened: it might not respond, like that of another cluster's
		// volume of this name.
		path := strings.TrimSuffix(string(backing), "\n")
		if path == file {
			all = append(all, disk)
			continue
		}
		if path != "/"+filepath.Base(file) {
			continue
		}
		found, err := s.loopMark(disk)
		if found == mark || dead(err) && disk == recorded {
			all = append(all, disk)
		}
	}
	return all
}

// dead reports whether err comes from a FUSE file system whose server is gone or going.
func dead(err error) bool {
	return errors.Is(err, unix.ENOTCONN) || errors.Is(err, unix.ECONNABORTED)
}

// loopMark reads the name that attachLoop set. This opens the device for a moment, but sends
// nothing to the file below.
func (s system) loopMark(disk string) (mark string, err error) {
	err = s.onLoop(disk, func(fd int) error {
		info, err := unix.IoctlLoopGetStatus64(fd)
		if err == nil {
			text, _, _ := bytes.Cut(info.File_name[:], []byte{0})
			mark = string(text)
		}
		return err
	})
	return mark, err
}

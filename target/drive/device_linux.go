// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// Access is the purpose for which a device is opened.
type Access int

// The ways to open a device.
const (
	ReadOnly  Access = unix.O_RDONLY
	ReadWrite Access = unix.O_RDWR
	// Exclusive is ReadWrite with O_EXCL: EBUSY if a file system, md, device-mapper or another
	// exclusive opener holds the device. On a regular file it is an flock: EBUSY if another
	// exclusive opener has it. A killed process keeps both until its last system call has ended, so
	// the next holder knows that none of its writes is still under way.
	Exclusive Access = unix.O_RDWR | unix.O_EXCL
)

// Device is a block device, opened with O_DIRECT to bypass the page cache, or a regular file in its
// place.
type Device struct {
	file      *os.File
	size      block.Size
	blockSize block.Size
	isBlock   bool
}

var _ Medium = (*Device)(nil)

// OpenDevice opens the block device or regular file at path.
func OpenDevice(path string, access Access) (_ *Device, retErr error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, fmt.Errorf("open device: %w", err)
	}
	d := &Device{blockSize: copyUnit, isBlock: info.Mode().Type() == os.ModeDevice}
	flags := int(access) | unix.O_CLOEXEC
	switch {
	case d.isBlock:
		flags |= unix.O_DIRECT
	case info.Mode().IsRegular():
		flags &^= unix.O_EXCL // undefined without O_CREAT, except on block devices
	default:
		return nil, fmt.Errorf("open device %s: neither a block device nor a file", path)
	}
	if d.file, err = os.OpenFile(path, flags, 0); err != nil {
		return nil, fmt.Errorf("open device: %w", err)
	}
	defer func() {
		if retErr != nil {
			d.file.Close()
		}
	}()
	if access == Exclusive && !d.isBlock {
		if err := d.lock(); err != nil {
			return nil, err
		}
	}
	if err := d.measure(); err != nil {
		return nil, err
	}
	return d, nil
}

func (d *Device) lock() error {
	err := d.control(func(fd int) error { return unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB) })
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = fmt.Errorf("another process has locked it: %w", unix.EBUSY)
	}
	if err != nil {
		return fmt.Errorf("open device %s: %w", d.file.Name(), err)
	}
	return nil
}

func (d *Device) measure() error {
	end, err := d.file.Seek(0, io.SeekEnd)
	if err != nil {
		return fmt.Errorf("size of device: %w", err)
	}
	if d.isBlock {
		var n int
		if err := d.control(func(fd int) (err error) { n, err = unix.IoctlGetInt(fd, unix.BLKSSZGET); return }); err != nil {
			return fmt.Errorf("block size of device: %w", err)
		}
		d.blockSize = block.Size(uint32(n)) // the kernel writes an int of 32 bits
	}
	if d.blockSize < 512 || d.blockSize > copyUnit {
		return fmt.Errorf("block size %v of device %s: 512 to 4096 bytes are supported", d.blockSize, d.file.Name())
	}
	d.size = block.Size(end) / d.blockSize * d.blockSize
	return nil
}

func (d *Device) control(f func(fd int) error) error {
	conn, err := d.file.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	return errors.Join(conn.Control(func(fd uintptr) { inner = f(int(fd)) }), inner)
}

// Size is the size of the device, in whole blocks.
func (d *Device) Size() block.Size { return d.size }

// BlockSize is the logical block size.
func (d *Device) BlockSize() block.Size { return d.blockSize }

// Close closes the file.
func (d *Device) Close() error { return d.file.Close() }

// ReadAt reads any range, through an aligned buffer.
func (d *Device) ReadAt(p []byte, offset int64) (int, error) {
	if offset < 0 || uint64(offset) > uint64(d.size) || uint64(len(p)) > uint64(d.size)-uint64(offset) {
		return 0, fmt.Errorf("read %d bytes at %d: the device has %d: %w", len(p), offset, d.size, io.EOF)
	}
	before := offset % int64(d.blockSize)
	b := aligned(int(block.Size(before + int64(len(p))).RoundUp(d.blockSize)))
	if _, err := d.file.ReadAt(b, offset-before); err != nil {
		return 0, err
	}
	return copy(p, b[before:]), nil
}

// NextData asks a file for its holes; a block device reports none.
func (d *Device) NextData(from int64) int64 {
	if d.isBlock {
		return from
	}
	next := from
	err := d.control(func(fd int) (err error) { next, err = unix.Seek(fd, from, unix.SEEK_DATA); return err })
	switch {
	case errors.Is(err, unix.ENXIO):
		return int64(d.size)
	case err != nil: // the file system does not support it
		return from
	}
	return next
}

// WriteAt writes whole blocks.
func (d *Device) WriteAt(p []byte, offset int64) (int, error) {
	if err := d.checkRange(block.Size(offset), block.Size(len(p))); err != nil {
		return 0, fmt.Errorf("write: %w", err)
	}
	b := aligned(len(p))
	copy(b, p)
	return d.file.WriteAt(b, offset)
}

func (d *Device) checkRange(offset, length block.Size) error {
	if offset%d.blockSize != 0 || length%d.blockSize != 0 || offset > d.size || length > d.size-offset {
		return fmt.Errorf("%d bytes at %d: not whole blocks of a device of %d", length, offset, d.size)
	}
	return nil
}

// Flush makes all earlier writes durable. fsync of a block device flushes its volatile cache.
func (d *Device) Flush() error { return d.file.Sync() }

// zeroChunk is how much one system call zeroes: 64 MiB take tens of milliseconds on a drive without
// a command for it.
const zeroChunk = 64 * block.MiB

// Zero fills a range with zeroes and flushes.
func (d *Device) Zero(ctx context.Context, offset, length block.Size, progress func(done block.Size)) error {
	if err := d.checkRange(offset, length); err != nil {
		return fmt.Errorf("zero: %w", err)
	}
	for done := block.Size(0); done < length; {
		if err := ctx.Err(); err != nil {
			return err
		}
		n := min(zeroChunk, length-done)
		if err := d.zeroOut(offset+done, n); err != nil {
			return fmt.Errorf("zero %v at %v: %w", n, offset+done, err)
		}
		done += n
		if progress != nil {
			progress(done)
		}
	}
	return d.Flush()
}

// zeroOut uses BLKZEROOUT: the drive's Write Zeroes if it has that; otherwise the kernel writes
// pages of zeroes.
func (d *Device) zeroOut(offset, length block.Size) error {
	if !d.isBlock {
		return d.zeroFile(offset, length)
	}
	return d.control(func(fd int) error {
		span := [2]uint64{uint64(offset), uint64(length)}
		if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.BLKZEROOUT, uintptr(unsafe.Pointer(&span))); errno != 0 {
			return errno
		}
		return nil
	})
}

// zeroFile punches a hole, or writes zeroes where the file system does not support holes.
func (d *Device) zeroFile(offset, length block.Size) error {
	err := d.control(func(fd int) error {
		return unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(offset), int64(length))
	})
	if !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENOSYS) {
		return err
	}
	return d.writeZeroes(offset, length)
}

func (d *Device) writeZeroes(offset, length block.Size) error {
	zeroes := make([]byte, min(length, block.MiB))
	for end := offset + length; offset < end; {
		n, err := d.file.WriteAt(zeroes[:min(block.Size(len(zeroes)), end-offset)], int64(offset))
		if err != nil {
			return err
		}
		offset += block.Size(n)
	}
	return nil
}

// aligned makes a buffer that O_DIRECT accepts with any block size.
func aligned(n int) []byte {
	b := make([]byte, n+int(copyUnit))
	skip := -uintptr(unsafe.Pointer(unsafe.SliceData(b))) & uintptr(copyUnit-1)
	return b[skip:][:n:n]
}

// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// kernel is the Calls on a file descriptor.
type kernel int

func (k kernel) Pread(p []byte, off int64) (int, error)  { return unix.Pread(int(k), p, off) }
func (k kernel) Pwrite(p []byte, off int64) (int, error) { return unix.Pwrite(int(k), p, off) }
func (k kernel) PwriteDurable(p []byte, off int64) (int, error) {
	return unix.Pwritev2(int(k), [][]byte{p}, off, unix.RWF_DSYNC)
}
func (k kernel) Fallocate(mode uint32, off, n int64) error {
	return unix.Fallocate(int(k), mode, off, n)
}
func (k kernel) Fdatasync() error { return unix.Fdatasync(int(k)) }
func (k kernel) FadviseDontNeed() error {
	return unix.Fadvise(int(k), 0, 0, unix.FADV_DONTNEED)
}

// openFlags finds out what f.path is, and how to open it.
func (f *File) openFlags(o Options) (flags int, err error) {
	flags = unix.O_RDWR
	if o.ReadOnly {
		flags = unix.O_RDONLY
	}
	var st unix.Stat_t
	if err := unix.Stat(f.path, &st); err != nil {
		return 0, err
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFBLK:
		f.isBlock = true
		if o.Exclusive {
			flags |= unix.O_EXCL
		}
	case unix.S_IFREG:
	default:
		return 0, errors.New("neither a block device nor a file")
	}
	return flags, nil
}

// open opens f.path as o says and finds out its abilities.
func (f *File) open(o Options) (retErr error) {
	flags, err := f.openFlags(o)
	if err != nil {
		return err
	}
	fd, err := unix.Open(f.path, flags|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	f.fd, f.calls = fd, kernel(fd)
	if o.Calls != nil {
		f.calls = o.Calls(f.calls)
	}
	defer func() {
		if retErr != nil {
			unix.Close(fd)
		}
	}()
	if err := f.measure(o); err != nil {
		return err
	}
	if !o.Buffered {
		f.direct = f.goDirect()
	}
	// The page cache is volatile, whatever the device says of its own cache.
	f.change(func(t *terms) { t.geometry.VolatileCache = t.geometry.VolatileCache || !f.direct })
	if !f.direct || o.workersOnly || o.Calls != nil {
		return nil
	}
	if f.aio = newAIO(fd, f.memory); f.aio != nil {
		f.aio.start(f.ended)
	}
	return nil
}

// measure fills in the geometry.
func (f *File) measure(o Options) error {
	g := block.Geometry{BlockSize: o.BlockSize, VolatileCache: true}
	if g.BlockSize == 0 {
		g.BlockSize = 4 * block.KiB
	}
	if f.isBlock {
		n, err := unix.IoctlGetInt(f.fd, unix.BLKSSZGET)
		if err != nil {
			return fmt.Errorf("block size: %w", err)
		}
		g.BlockSize = block.Size(n)
	}
	if g.BlockSize != 512 && g.BlockSize != 4*block.KiB {
		return fmt.Errorf("blocks of %v: must be 512 or 4096 bytes", g.BlockSize)
	}
	size, err := f.size()
	if err != nil {
		return fmt.Errorf("size: %w", err)
	}
	g.Size = size / g.BlockSize * g.BlockSize
	g.DiscardUnit = g.BlockSize
	if f.isBlock {
		g.VolatileCache = f.queueFile("write_cache") != "write through"
		if f.queueFile("discard_max_bytes") == "0" {
			g.DiscardUnit = 0
		}
	}
	f.terms.Store(&terms{geometry: g})
	return nil
}

// queueFile reads a file of the device's queue folder in sysfs, which a partition shares with its
// disk. Empty if there is none.
func (f *File) queueFile(name string) string {
	var st unix.Stat_t
	if err := unix.Fstat(f.fd, &st); err != nil {
		return ""
	}
	dir := fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
	for _, up := range []string{"/queue/", "/../queue/"} { // dir is a link: not for filepath.Join, which takes ".." out by itself
		if text, err := os.ReadFile(dir + up + name); err == nil {
			return strings.TrimSpace(string(text))
		}
	}
	return ""
}

func (f *File) size() (block.Size, error) {
	if f.isBlock {
		var n uint64
		if err := ioctl(f.fd, unix.BLKGETSIZE64, unsafe.Pointer(&n)); err != nil {
			return 0, err
		}
		return block.Size(n), nil
	}
	var st unix.Stat_t
	err := unix.Fstat(f.fd, &st)
	return block.Size(st.Size), err
}

// goDirect bypasses the page cache, if every block can still be read and written that way: the file
// system reports its alignment (statx, Linux 6.1), otherwise a test read decides.
func (f *File) goDirect() bool {
	flags, err := unix.FcntlInt(uintptr(f.fd), unix.F_GETFL, 0)
	if err != nil {
		return false
	}
	if _, err = unix.FcntlInt(uintptr(f.fd), unix.F_SETFL, flags|unix.O_DIRECT); err != nil {
		return false
	}
	f.memory = PageSize
	var st unix.Statx_t
	err = unix.Statx(f.fd, "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st)
	if err == nil && st.Mask&unix.STATX_DIOALIGN != 0 && st.Dio_offset_align != 0 {
		if block.Size(st.Dio_offset_align) <= f.Geometry().BlockSize && st.Dio_mem_align <= PageSize {
			f.memory = int(st.Dio_mem_align)
			return true
		}
	} else if _, err = unix.Pread(f.fd, Aligned(PageSize)[:f.Geometry().BlockSize], 0); err == nil {
		return true
	}
	unix.FcntlInt(uintptr(f.fd), unix.F_SETFL, flags)
	return false
}

// do carries out one checked IO and waits for it. scratch is the worker's own buffer, used when
// memory is not aligned for direct IO.
func (f *File) do(io *block.IO, scratch *[]byte) error {
	var err error
	switch io.Op {
	case block.OpRead:
		err = f.read(io, scratch)
	case block.OpWrite:
		err = f.write(io, scratch)
	case block.OpDiscard:
		err = f.discard(io.Off, io.Len)
	case block.OpWriteZeroes:
		err = f.writeZeroes(io)
	}
	if err != nil {
		return fmt.Errorf("%v %d bytes at %d of %s: %w: %w", io.Op, io.Len, io.Off, f.path, block.ErrMedium, err)
	}
	return nil
}

// memoryFor returns p, or a part of scratch that direct IO accepts in its place.
func (f *File) memoryFor(p []byte, scratch *[]byte) []byte {
	if !f.direct || aligned(p, f.memory) {
		return p
	}
	if cap(*scratch) < len(p) {
		*scratch = Aligned(len(p))
	}
	return (*scratch)[:len(p)]
}

func (f *File) read(io *block.IO, scratch *[]byte) error {
	p := f.memoryFor(io.Data, scratch)
	for at := 0; at < len(p); {
		n, err := f.calls.Pread(p[at:], io.Off+int64(at))
		switch {
		case err == unix.EINTR:
		case err != nil:
			return err
		case n == 0:
			return f.cutOff(io.Off + int64(at))
		}
		at += max(n, 0)
	}
	if &p[0] != &io.Data[0] {
		copy(io.Data, p)
	}
	return nil
}

func (f *File) write(io *block.IO, scratch *[]byte) error {
	p := f.memoryFor(io.Data, scratch)
	if &p[0] != &io.Data[0] {
		copy(p, io.Data)
	}
	if !io.FUA {
		return f.writeAll(p, io.Off, f.calls.Pwrite)
	}
	err := f.writeAll(p, io.Off, f.calls.PwriteDurable)
	if err == nil || f.writeAll(p, io.Off, f.calls.Pwrite) != nil {
		return err
	}
	if unsupported(err) { // as in some sandboxes
		return f.sync()
	}
	return f.Lose(err) // the write may have succeeded: making it durable failed, perhaps for other writes too
}

func (f *File) writeAll(p []byte, off int64, write func([]byte, int64) (int, error)) error {
	for len(p) > 0 {
		n, err := write(p, off)
		if err != nil && err != unix.EINTR {
			return err
		}
		n = max(n, 0)
		p, off = p[n:], off+int64(n)
	}
	return nil
}

// discard drops the range's content where the medium supports it; it is a hint.
func (f *File) discard(off, n int64) error {
	if f.Geometry().DiscardUnit == 0 {
		return nil
	}
	err := f.punch(off, n)
	if f.isBlock {
		span := [2]uint64{uint64(off), uint64(n)}
		err = ioctl(f.fd, unix.BLKDISCARD, unsafe.Pointer(&span))
	}
	if unsupported(err) {
		return nil
	}
	return err
}

func (f *File) writeZeroes(io *block.IO) error {
	err := f.zeroRange(io)
	if unsupported(err) {
		err = f.zeroByHand(io)
	}
	if err == nil && io.FUA {
		err = f.sync()
	}
	return err
}

// zeroRange asks the kernel for zeroes. It punches a hole if that is allowed, or if the file system
// (tmpfs) supports nothing else.
func (f *File) zeroRange(io *block.IO) error {
	if io.Unmap {
		if err := f.punch(io.Off, io.Len); !unsupported(err) {
			return err
		}
	}
	if f.isBlock {
		span := [2]uint64{uint64(io.Off), uint64(io.Len)}
		return ioctl(f.fd, unix.BLKZEROOUT, unsafe.Pointer(&span))
	}
	err := f.calls.Fallocate(unix.FALLOC_FL_ZERO_RANGE|unix.FALLOC_FL_KEEP_SIZE, io.Off, io.Len)
	if unsupported(err) {
		err = f.punch(io.Off, io.Len)
	}
	return err
}

// punch makes a hole; on a block device these are zeroes for which the medium may free the space
// (Linux 4.9), or EOPNOTSUPP.
func (f *File) punch(off, n int64) error {
	return f.calls.Fallocate(unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, n)
}

func (f *File) zeroByHand(io *block.IO) error {
	zeroes := Aligned(int(min(io.Len, 1<<20)))
	for off, end := io.Off, io.Off+io.Len; off < end; {
		n := min(int64(len(zeroes)), end-off)
		if err := f.writeAll(zeroes[:n], off, f.calls.Pwrite); err != nil {
			return err
		}
		off += n
	}
	return nil
}

func (f *File) fdatasync() error {
	for {
		if err := f.calls.Fdatasync(); err != unix.EINTR {
			return err
		}
	}
}

func (f *File) close() error { return unix.Close(f.fd) }

func unsupported(err error) bool {
	return errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.ENOTTY)
}

func ioctl(fd int, request uint, arg unsafe.Pointer) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), uintptr(request), uintptr(arg))
	if errno != 0 {
		return errno
	}
	return nil
}

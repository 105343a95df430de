// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// forgetful is a drive with a volatile cache: writes that were not made durable are only in the
// cache, and are gone after a power loss.
type forgetful struct {
	Calls

	mu    sync.Mutex
	cache map[int64][]byte // by the offset of a block of 512 bytes
	bare  bool             // supports neither durable writes nor zeroing
}

const sector = int64(block.SectorSize)

func (d *forgetful) Pread(p []byte, off int64) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	n, err := d.Calls.Pread(p, off)
	for at := int64(0); at < int64(n); at += sector {
		copy(p[at:], d.cache[off+at])
	}
	return n, err
}

func (d *forgetful) Pwrite(p []byte, off int64) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for at := int64(0); at < int64(len(p)); at += sector {
		d.cache[off+at] = bytes.Clone(p[at:][:sector])
	}
	return len(p), nil
}

func (d *forgetful) PwriteDurable(p []byte, off int64) (int, error) {
	if d.bare {
		return -1, unix.EOPNOTSUPP
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for at := int64(0); at < int64(len(p)); at += sector {
		delete(d.cache, off+at)
	}
	return d.Calls.Pwrite(p, off)
}

func (d *forgetful) Fallocate(_ uint32, off, n int64) error {
	if d.bare {
		return unix.EOPNOTSUPP
	}
	_, err := d.Pwrite(make([]byte, n), off)
	return err
}

func (d *forgetful) Fdatasync() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for off, p := range d.cache {
		if _, err := d.Calls.Pwrite(p, off); err != nil {
			return err
		}
	}
	clear(d.cache)
	return nil
}

func (d *forgetful) losePower() {
	d.mu.Lock()
	defer d.mu.Unlock()
	clear(d.cache)
}

// onForgetful opens a File, without a page cache of its own, on such a drive.
func onForgetful(t *testing.T, bare bool) (*File, *forgetful) {
	d := &forgetful{cache: map[int64][]byte{}, bare: bare}
	f := openFile(t, 1<<20, Options{Buffered: true, Calls: func(kernel Calls) Calls {
		d.Calls = kernel
		return d
	}})
	return f, d
}

// TestWhatIsSaidToBeDurableOutlivesThePower writes ones, makes them durable in each possible way,
// and checks what is left after the power loss.
func TestWhatIsSaidToBeDurableOutlivesThePower(t *testing.T) {
	ones := bytes.Repeat([]byte{1}, 4096)
	write := func(f *File, fua bool) error {
		return block.Do(f, &block.IO{Op: block.OpWrite, FUA: fua, Off: 8192, Len: 4096, Data: bytes.Clone(ones)})
	}
	zeroes := func(f *File, fua bool) error {
		return block.Do(f, &block.IO{Op: block.OpWriteZeroes, FUA: fua, Off: 8192, Len: 4096})
	}
	for _, c := range []struct {
		name string
		do   func(*File) error
		want []byte
	}{
		{"a write", func(f *File) error { return write(f, false) }, make([]byte, 4096)},
		{"a write and a flush", func(f *File) error { return errors.Join(write(f, false), block.Flush(f)) }, ones},
		{"a durable write", func(f *File) error { return write(f, true) }, ones},
		{"a write and the end", func(f *File) error { return errors.Join(write(f, false), f.Close()) }, ones},
		{"zeroes", func(f *File) error { return errors.Join(write(f, true), zeroes(f, false)) }, ones},
		{"zeroes and a flush", func(f *File) error { return errors.Join(write(f, true), zeroes(f, false), block.Flush(f)) }, make([]byte, 4096)},
		{"durable zeroes", func(f *File) error { return errors.Join(write(f, true), zeroes(f, true)) }, make([]byte, 4096)},
	} {
		for _, bare := range []bool{false, true} {
			f, d := onForgetful(t, bare)
			if err := c.do(f); err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
			d.losePower()
			file, err := os.ReadFile(f.path)
			if err != nil {
				t.Fatal(err)
			}
			if got := file[8192:][:4096]; !bytes.Equal(got, c.want) {
				t.Errorf("after %s and a loss of power, the drive holds %d, want %d (a drive that knows no durable writes: %v)", c.name, got[0], c.want[0], bare)
			}
		}
	}
}

// cachestat is struct cachestat of linux/mman.h.
type cachestat struct{ cache, dirty, writeback, evicted, recentlyEvicted uint64 }

// unwritten is the number of a file's pages that the kernel has not written yet.
func unwritten(t *testing.T, f *File) uint64 {
	t.Helper()
	const sysCachestat = 451 // Linux 6.5
	var whole [2]uint64
	var c cachestat
	_, _, errno := unix.Syscall6(sysCachestat, uintptr(f.fd), uintptr(unsafe.Pointer(&whole)), uintptr(unsafe.Pointer(&c)), 0, 0, 0)
	if errno == unix.ENOSYS || errno == unix.EOPNOTSUPP {
		t.Skipf("the kernel does not tell what of a file it has not written: %v", errno)
	}
	if errno != 0 {
		t.Fatal(errno)
	}
	return c.dirty + c.writeback
}

// TestTheKernelIsAskedToWrite inspects the kernel's page cache, where written data stays until the
// kernel is asked to make it durable.
func TestTheKernelIsAskedToWrite(t *testing.T) {
	f := openFile(t, 1<<20, Options{Buffered: true})
	write := func(fua bool) {
		t.Helper()
		if err := block.Do(f, &block.IO{Op: block.OpWrite, FUA: fua, Len: 4096, Data: Aligned(4096)}); err != nil {
			t.Fatal(err)
		}
	}
	unix.Fdatasync(f.fd) //nolint:errcheck // the next look tells
	if unwritten(t, f) > 0 {
		t.Skip("the file system of the temporary files does not write them")
	}
	write(false)
	if unwritten(t, f) == 0 {
		t.Skip("the file system of the temporary files writes at once")
	}
	if err := block.Flush(f); err != nil {
		t.Fatal(err)
	}
	if n := unwritten(t, f); n > 0 {
		t.Errorf("%d pages are not written after a flush", n)
	}
	write(true)
	if n := unwritten(t, f); n > 0 {
		t.Errorf("%d pages are not written after a durable write", n)
	}
}

// TestAFlushAsksTheKernel replaces the file with a pipe, which cannot be flushed.
func TestAFlushAsksTheKernel(t *testing.T) {
	f := openFile(t, 1<<20, Options{})
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	if err := unix.Dup3(pipe[1], f.fd, unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	if err := block.Flush(f); !errors.Is(err, unix.EINVAL) {
		t.Errorf("a flush of what cannot be flushed = %v, want %v", err, unix.EINVAL)
	}
}

// noting records what a File asks of the page cache.
type noting struct {
	Calls
	asked *[]string
}

func (n noting) Fdatasync() error {
	*n.asked = append(*n.asked, "fdatasync")
	return unix.EIO
}

func (n noting) FadviseDontNeed() error {
	*n.asked = append(*n.asked, "drop")
	return nil
}

// After a failed flush the page cache holds data that is not on the drive and that no later flush
// writes: a file must not be served with it.
func TestAFileIsOpenedWithoutWhatItsPageCacheHasLost(t *testing.T) {
	path := filepath.Join(t.TempDir(), "drive")
	if err := os.WriteFile(path, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	var asked []string
	f, err := Open(path, Options{Buffered: true, FlushAgain: true, Calls: func(kernel Calls) Calls { return noting{kernel, &asked} }})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if want := []string{"fdatasync", "drop"}; !slices.Equal(asked, want) || f.Losses() != 1 {
		t.Errorf("Open asked for %v, and counts %d losses; want %v, and 1", asked, f.Losses(), want)
	}
}

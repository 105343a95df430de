// SPDX-License-Identifier: Apache-2.0

package fabrics

import (
	"encoding/binary"
	"errors"
	"io/fs"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// An agent looks at sysfs several times a second for each volume, and a host with many volumes has many
// controllers. So what does not change of a device is read once.

// entry is something in a directory of sysfs. Sysfs numbers what it has, and uses no number again where inode numbers
// have 64 bits: an entry with the name of an older one has another number (Linux 5.5, include/linux/kernfs.h: kernfs_id_ino).
type entry struct {
	name   string
	number uint64
}

// entries lists a directory; none if it is not there.
func (t *Tree) entries(dir string) ([]entry, error) {
	path := t.path(dir)
	fd, err := openFile(path, unix.O_RDONLY|unix.O_DIRECTORY)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, &Error{Op: "list", Path: path, Err: err}
	}
	defer unix.Close(fd)
	var all []entry
	for buf := make([]byte, 16<<10); ; {
		n, err := unix.Getdents(fd, buf)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return nil, &Error{Op: "list", Path: path, Err: err}
		case n == 0:
			return all, nil
		}
		for rest := buf[:n]; len(rest) > 0; {
			var e entry
			if e, rest = parseDirent(rest); e.name != "." && e.name != ".." {
				all = append(all, e)
			}
		}
	}
}

// parseDirent parses the first of some struct linux_dirent64 (getdents64(2)).
func parseDirent(b []byte) (e entry, rest []byte) {
	length := binary.NativeEndian.Uint16(b[unsafe.Offsetof(unix.Dirent{}.Reclen):])
	e.number = binary.NativeEndian.Uint64(b)
	e.name = unix.ByteSliceToString(b[unsafe.Offsetof(unix.Dirent{}.Name):length])
	return e, b[length:]
}

// still reports whether an entry of a directory is still there.
func (t *Tree) still(dir string, e entry) bool {
	var now unix.Stat_t
	return unix.Lstat(t.path(dir+e.name), &now) == nil && now.Ino == e.number
}

// fixed has what does not change of entries, as long as they are there.
type fixed[T any] struct {
	mu    sync.Mutex
	known map[entry]T
}

// of returns what is known of an entry, or reads it. Read also reports whether that is all: an entry appears before
// its last files.
func (f *fixed[T]) of(e entry, read func(name string) (v T, all bool, err error)) (T, error) {
	f.mu.Lock()
	v, ok := f.known[e]
	f.mu.Unlock()
	if ok {
		return v, nil
	}
	v, all, err := read(e.name)
	if err != nil || !all {
		return v, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.known == nil {
		f.known = map[entry]T{}
	}
	f.known[e] = v
	return v, nil
}

// keep forgets all others.
func (f *fixed[T]) keep(there []entry) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.known) <= len(there) {
		return
	}
	kept := make(map[entry]T, len(there))
	for _, e := range there {
		if v, ok := f.known[e]; ok {
			kept[e] = v
		}
	}
	f.known = kept
}

// openFile is open(2), repeated when a signal interrupts it.
func openFile(path string, flags int) (int, error) {
	for {
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
		if !errors.Is(err, unix.EINTR) {
			return fd, err
		}
	}
}

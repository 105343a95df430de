// SPDX-License-Identifier: Apache-2.0

// Package mount does for the CSI driver what a machine's kernel and programs do with block devices
// and file systems: it mounts, reads what a device holds, and finds its users. It knows nothing of
// CSI and decides nothing about volumes.
package mount

import (
	"io"

	"weft.dev/weft/proto/block"
)

// Kernel is the part of its machine that the node service uses. kernel_linux.go has the one
// implementation for Linux; the driver's tests have another, and one suite there holds both to this
// contract.
//
// A call may hang as long as a device does; the caller must be prepared for that.
type Kernel interface {
	// Resolve follows the symbolic links of a path's directory. It does not touch the last element
	// of the path, which may be a dead file system.
	Resolve(path string) (string, error)
	// Mounts are those of this process's mount namespace.
	Mounts() (Table, error)
	// MountsElsewhere says where a device's file system is mounted in other mount namespaces, in a
	// sentence each. It sees no more than /proc shows.
	MountsElsewhere(device block.DeviceNumber) ([]string, error)
	// Holders says what keeps a mount busy, in a sentence each.
	Holders(m Mount) []string
	// Node is the device number of the block device node at path; false if there is none.
	Node(path string) (block.DeviceNumber, bool)
	// Size is the size of a block device in bytes. It makes no I/O.
	Size(device block.DeviceNumber) (uint64, error)

	// Open opens a block device for reading.
	Open(path string) (Disk, error)
	// Mount mounts a file system. The source is a name for people: the call mounts the disk, or
	// fails. unix.EROFS: the disk is read-only, and the file system's journal cannot be replayed.
	Mount(d Disk, source, target, fsType string, options []string) error
	// Bind mounts the file system at source also at target, if it is on this device. The mount
	// appears in one step, already read-only if that is asked for. Target is a directory.
	Bind(device block.DeviceNumber, source, target string, readOnly bool) error
	// BindDisk mounts the disk's node on the file target.
	BindDisk(d Disk, target string, readOnly bool) error
	// Unmount removes the topmost mount at a path without looking at it. A lazy unmount removes the
	// name now, and the rest when its last user has gone. unix.EBUSY: it is in use, for longer than
	// a moment. unix.EINVAL and fs.ErrNotExist: nothing is mounted there.
	Unmount(target string, lazy bool) error
	// Grows reports whether this process may grow a mounted file system: ext4 requires
	// CAP_SYS_RESOURCE.
	Grows(fsType string) bool
	// Usage says how full the file system at a path is.
	Usage(path string) (Usage, error)

	// Run runs a program; "{}" in its arguments stands for the disk. The program is killed if this
	// process ends. An error means that the program could not be run; a nonzero exit code is no
	// error.
	Run(d Disk, program string, args ...string) (Result, error)

	// MakeDir makes a directory and its parents, MakeFile an empty file; either may exist already.
	// unix.ELOOP: the path is a symbolic link, behind which a mount would be somewhere else;
	// unix.ENOTDIR and EISDIR: it is of the other kind. Remove removes an empty directory or a
	// file; it may be gone already.
	MakeDir(path string) error
	MakeFile(path string) error
	Remove(path string) error
}

// Disk is a block device that is held open: until it is closed, its number cannot pass to another
// device.
type Disk interface {
	io.Closer
	Number() block.DeviceNumber
	Size() (uint64, error)
	// ReadOnly reports whether the device accepts no writes, not even the kernel's own.
	ReadOnly() (bool, error)
	// ReadDirect reads past the page cache, so it returns the device's present content. Offset and
	// length are multiples of 4096.
	ReadDirect(p []byte, off int64) error
	// ReadCached reads through the page cache, which a mounted ext4 shares.
	ReadCached(p []byte, off int64) error
	// Busy reports whether someone holds the device exclusively: a mounted file system, another
	// device over it, a program that formats it.
	Busy() (bool, error)
}

// Usage is the usage of a file system.
type Usage struct {
	Bytes, BytesFree, BytesAvailable uint64
	Inodes, InodesFree               uint64
}

// Result is how a program ended.
type Result struct {
	Code   int
	Output string // both streams
}

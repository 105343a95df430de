// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"io"

	"weft.dev/weft/proto/block"
)

// kernel is what the node service asks of its machine. There is one
// implementation for Linux, see mount_linux.go; the tests have another, and one
// suite holds both to what is said here.
//
// Calls may hang for as long as a device does. Whoever calls must be able to.
type kernel interface {
	// Resolve follows the symbolic links of a path's directory. It does not look
	// at what the path itself names: there a dead file system may be.
	Resolve(path string) (string, error)
	// Mounts are those of this process's mount namespace.
	Mounts() (mounts, error)
	// MountsElsewhere tells where a device's file system is mounted in other mount
	// namespaces, by a sentence each. It sees no more than /proc shows.
	MountsElsewhere(device block.DeviceNumber) ([]string, error)
	// Holders tells what keeps a mount busy, by a sentence each.
	Holders(m mount) []string
	// Node is the number of the block device whose node a path is; false if it is
	// none.
	Node(path string) (block.DeviceNumber, bool)
	// Size is that of a block device in bytes. It makes no I/O.
	Size(device block.DeviceNumber) (uint64, error)

	// Open opens a block device for reading.
	Open(path string) (disk, error)
	// Mount mounts a file system. The source is a name for people: what is mounted
	// is the disk, or the call fails. unix.EROFS: the disk is read-only, and what is
	// in the file system's journal cannot be brought to its place.
	Mount(d disk, source, target, fsType string, options []string) error
	// Bind mounts at target what is mounted at source, if it is of this device. The
	// mount appears in one step, read-only if it is to be. Target is a directory.
	Bind(device block.DeviceNumber, source, target string, readOnly bool) error
	// BindDisk mounts the disk's node on the file target.
	BindDisk(d disk, target string, readOnly bool) error
	// Unmount takes away the topmost mount at a path without looking at it. A lazy
	// one takes the name away now, and the rest when nobody uses it any more.
	// unix.EBUSY: somebody uses it, and for longer than a moment.
	// unix.EINVAL and fs.ErrNotExist: nothing is mounted there.
	Unmount(target string, lazy bool) error
	// Grows tells whether this process may grow a file system that is mounted: ext4
	// asks for CAP_SYS_RESOURCE.
	Grows(fsType string) bool
	// Usage tells how full the file system at a path is.
	Usage(path string) (usage, error)

	// Run runs a program; "{}" in its arguments is the disk. It ends with the
	// program, or with this process. The error is for a program that could not be
	// run; a code that is not zero is no error.
	Run(d disk, program string, args ...string) (result, error)

	// MakeDir makes a directory and those above it, MakeFile an empty file; what is
	// there already is left. unix.ELOOP: it is a symbolic link, where a mount would be
	// somewhere else; unix.ENOTDIR and EISDIR: it is of the other kind. Remove removes an empty directory or a file; it may be
	// gone already.
	MakeDir(path string) error
	MakeFile(path string) error
	Remove(path string) error
}

// disk is a block device that is held open: as long as it is, its number cannot
// become that of another device.
type disk interface {
	io.Closer
	Number() block.DeviceNumber
	Size() (uint64, error)
	// ReadOnly tells whether the device takes no writes, the kernel's own included.
	ReadOnly() (bool, error)
	// ReadDirect reads around the page cache, and so what the device says now. Offset
	// and length are multiples of 4096.
	ReadDirect(p []byte, off int64) error
	// ReadCached reads through the page cache, which a mounted ext4 shares.
	ReadCached(p []byte, off int64) error
	// Busy tells whether somebody has the device for himself: a mounted file system,
	// another device over it, a program that formats it.
	Busy() (bool, error)
}

// usage is of a file system.
type usage struct {
	bytes, bytesFree, bytesAvailable uint64
	inodes, inodesFree               uint64
}

// result is how a program ended.
type result struct {
	code   int
	output string // both streams
}

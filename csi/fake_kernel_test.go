// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"weft.dev/weft/csi/mount"
	"weft.dev/weft/csi/mount/mounttest"
	"weft.dev/weft/proto/block"
)

// fakeKernel is a machine in memory: devices whose ends are kept, programs that write superblocks,
// a mount table. kernel_test.go holds it to the behavior of the real one.
type fakeKernel struct {
	mu        sync.Mutex
	nodes     map[string]block.DeviceNumber // device nodes, by path
	disks     map[block.DeviceNumber]*fakeDisk
	files     map[string]string // "dir" or "file"
	table     mount.Table
	lastMount int
	held      map[string]string // mount points that are in use, and their holders
	elsewhere map[block.DeviceNumber][]string
	hang      map[string]chan struct{} // operations that wait until the channel is closed: "Usage", "mkfs.ext4"
	ran       []string                 // programs, in order
	bound     bool                     // ext4 cannot be grown while mounted
}

type fakeDisk struct {
	number     block.DeviceNumber
	size       uint64
	start, end [4096]byte
	data       string // written into the file system by a user
	ioError    bool
	claimed    bool // by a holder that is not visible anywhere
	endError   bool // only the end cannot be read
	readOnly   bool
	dirty      bool // the journal is not empty
	idle       bool // mkfs succeeds and writes nothing
	mkfsKilled bool // mkfs is killed before its end
	fsck       mount.Result
	foreign    string // what blkid reports
}

func newFakeKernel() *fakeKernel {
	return &fakeKernel{
		nodes: map[string]block.DeviceNumber{}, disks: map[block.DeviceNumber]*fakeDisk{}, files: map[string]string{"/": "dir"},
		table:     mount.Table{{ID: 1, Parent: 0, Device: block.DeviceNumber{Major: 254, Minor: 0}, Root: "/", Point: "/", FSType: "ext4", Source: "/dev/vda", Options: []string{"rw"}}},
		lastMount: 1, held: map[string]string{}, elsewhere: map[block.DeviceNumber][]string{}, hang: map[string]chan struct{}{},
	}
}

// addDisk adds a blank device.
func (k *fakeKernel) addDisk(node string, size uint64) *fakeDisk {
	k.mu.Lock()
	defer k.mu.Unlock()
	d := &fakeDisk{number: block.DeviceNumber{Major: 7, Minor: uint32(len(k.disks))}, size: size}
	k.disks[d.number] = d
	k.nodes[node] = d.number
	return d
}

func (k *fakeKernel) waitFor(what string) {
	k.mu.Lock()
	gate := k.hang[what]
	k.mu.Unlock()
	if gate != nil {
		<-gate
	}
}

func (k *fakeKernel) Resolve(p string) (string, error) { return path.Clean(p), nil }

func (k *fakeKernel) Mounts() (mount.Table, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.table), nil
}

func (k *fakeKernel) MountsElsewhere(device block.DeviceNumber) ([]string, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.elsewhere[device], nil
}

func (k *fakeKernel) Holders(m mount.Mount) []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	if who, ok := k.held[m.Point]; ok {
		return []string{who}
	}
	return nil
}

func (k *fakeKernel) Node(p string) (block.DeviceNumber, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if m, ok := k.table.At(p); ok {
		n, ok := k.nodes[m.Root]
		return n, ok && m.FSType == "devtmpfs"
	}
	n, ok := k.nodes[p]
	return n, ok
}

func (k *fakeKernel) Size(device block.DeviceNumber) (uint64, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	d, ok := k.disks[device]
	if !ok {
		return 0, fs.ErrNotExist
	}
	return d.size, nil
}

func (k *fakeKernel) Open(p string) (mount.Disk, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	n, ok := k.nodes[p]
	if !ok {
		return nil, fmt.Errorf("open %s: %w", p, fs.ErrNotExist)
	}
	return fakeHandle{k, k.disks[n]}, nil
}

func (k *fakeKernel) add(m mount.Mount) {
	k.lastMount++
	m.ID = k.lastMount
	m.Parent = k.under(m.Point).ID
	k.table = append(k.table, m)
}

// under is the mount that a path is in.
func (k *fakeKernel) under(p string) mount.Mount {
	for ; ; p = path.Dir(p) {
		if m, ok := k.table.At(p); ok {
			return m
		}
	}
}

func (k *fakeKernel) Mount(d mount.Disk, source, target, fsType string, options []string) error {
	k.waitFor("mount")
	k.mu.Lock()
	defer k.mu.Unlock()
	disk := k.disks[d.Number()]
	super, ok := mount.ParseSuperblock(disk.start[:])
	m := mount.Mount{Device: disk.number, Root: "/", Point: target, FSType: fsType, Source: source}
	for _, o := range append([]string{"rw"}, options...) {
		switch flag := mount.IsFlag(o); {
		case !flag || o == "sync" || o == "dirsync" || o == "lazytime":
			m.Super = append(m.Super, o)
		case o == "ro":
			m.Options = slices.DeleteFunc(m.Options, func(o string) bool { return o == "rw" })
			fallthrough
		default:
			m.Options = append(m.Options, o)
		}
	}
	switch {
	case k.nodes[source] != disk.number:
		return unix.ESTALE
	case k.files[target] == "":
		return unix.ENOENT
	case k.files[target] != "dir":
		return unix.ENOTDIR
	case !ok || super.FSType != fsType:
		return unix.EINVAL
	case disk.readOnly && !m.ReadOnly():
		return unix.EACCES
	case disk.readOnly && disk.dirty:
		return unix.EROFS
	case fsType == "ext4" && !m.ReadOnly():
		disk.start = mounttest.Ext4(super.UUID, super.Bytes, true)
	}
	disk.dirty = false
	k.add(m)
	return nil
}

func (k *fakeKernel) Bind(device block.DeviceNumber, source, target string, readOnly bool) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	m := k.under(source)
	if m.Device != device {
		return unix.ESTALE
	}
	return k.bind(m, "dir", target, readOnly)
}

func (k *fakeKernel) BindDisk(d mount.Disk, target string, readOnly bool) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	for node, n := range k.nodes {
		if n == d.Number() {
			return k.bind(mount.Mount{Device: block.DeviceNumber{Major: 0, Minor: 6}, Root: node, FSType: "devtmpfs", Source: "devtmpfs", Options: []string{"rw"}}, "file", target, readOnly)
		}
	}
	return unix.ENOENT
}

func (k *fakeKernel) bind(m mount.Mount, kind, target string, readOnly bool) error {
	if k.files[target] != kind {
		return unix.ENOENT
	}
	m.Point = target
	if readOnly {
		m.Options = append([]string{"ro"}, slices.DeleteFunc(slices.Clone(m.Options), func(o string) bool { return o == "rw" })...)
	}
	k.add(m)
	return nil
}

func (k *fakeKernel) Unmount(target string, lazy bool) error {
	k.waitFor("umount")
	k.mu.Lock()
	defer k.mu.Unlock()
	m, ok := k.table.At(target)
	switch {
	case !ok && k.files[target] == "":
		return fmt.Errorf("unmount %s: %w", target, unix.ENOENT)
	case !ok:
		return fmt.Errorf("unmount %s: %w", target, unix.EINVAL)
	case k.held[target] != "" && !lazy, slices.ContainsFunc(k.table, func(o mount.Mount) bool { return o.Parent == m.ID }) && !lazy:
		return fmt.Errorf("unmount %s: %w", target, unix.EBUSY)
	}
	k.table = slices.DeleteFunc(k.table, func(o mount.Mount) bool { return o.ID == m.ID })
	return nil
}

func (k *fakeKernel) Grows(fsType string) bool { return fsType != "ext4" || !k.bound }

func (k *fakeKernel) Usage(p string) (mount.Usage, error) {
	k.waitFor("Usage")
	k.mu.Lock()
	defer k.mu.Unlock()
	d, ok := k.disks[k.under(p).Device]
	if !ok {
		return mount.Usage{}, fs.ErrNotExist
	}
	if d.ioError {
		return mount.Usage{}, unix.EIO
	}
	super, _ := mount.ParseSuperblock(d.start[:])
	return mount.Usage{Bytes: super.Bytes, BytesFree: super.Bytes, BytesAvailable: super.Bytes, Inodes: 16, InodesFree: 12}, nil
}

func (k *fakeKernel) MakeDir(p string) error  { return k.make(p, "dir") }
func (k *fakeKernel) MakeFile(p string) error { return k.make(p, "file") }

func (k *fakeKernel) make(p, kind string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	switch is, ok := k.files[p]; {
	case !ok, is == kind:
	case is == "link":
		return unix.ELOOP
	case kind == "dir":
		return unix.ENOTDIR
	default:
		return unix.EISDIR
	}
	k.files[p] = kind
	return nil
}

func (k *fakeKernel) Remove(p string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if _, ok := k.table.At(p); ok {
		return unix.EBUSY
	}
	delete(k.files, p)
	return nil
}

// ---- devices ----

type fakeHandle struct {
	k *fakeKernel
	d *fakeDisk
}

func (h fakeHandle) Close() error               { return nil }
func (h fakeHandle) Number() block.DeviceNumber { return h.d.number }

func (h fakeHandle) Size() (uint64, error) { return h.k.Size(h.d.number) }

func (h fakeHandle) ReadOnly() (bool, error) {
	h.k.mu.Lock()
	defer h.k.mu.Unlock()
	return h.d.readOnly, nil
}

func (h fakeHandle) ReadCached(p []byte, off int64) error { return h.ReadDirect(p, off) }

func (h fakeHandle) ReadDirect(p []byte, off int64) error {
	h.k.mu.Lock()
	defer h.k.mu.Unlock()
	if h.d.ioError {
		return unix.EIO
	}
	if h.d.endError && off > 0 {
		return unix.EIO
	}
	clear(p)
	if off == 0 {
		copy(p, h.d.start[:])
	}
	if uint64(off)+uint64(len(p)) == h.d.size && len(p) > len(h.d.end) {
		copy(p[len(p)-len(h.d.end):], h.d.end[:])
	}
	return nil
}

func (h fakeHandle) Busy() (bool, error) {
	h.k.mu.Lock()
	defer h.k.mu.Unlock()
	return h.d.claimed || len(h.k.elsewhere[h.d.number]) > 0 || len(h.k.table.FileSystemOn(h.d.number)) > 0, nil
}

func (k *fakeKernel) Run(d mount.Disk, program string, args ...string) (mount.Result, error) {
	k.waitFor(program)
	k.mu.Lock()
	defer k.mu.Unlock()
	disk := k.disks[d.Number()]
	if !slices.Contains(args, "-V") {
		k.ran = append(k.ran, program)
	}
	switch program {
	case "blkid":
		return disk.blkid(), nil
	case "e2fsck":
		return disk.fsck, nil
	case "mkfs.ext4", "mkfs.xfs":
		if slices.Contains(args, "-V") {
			return mount.Result{Output: "mke2fs 1.47.0 (5-Feb-2023)\n"}, nil
		}
		if disk.mkfsKilled {
			return mount.Result{Output: "half done"}, fmt.Errorf("run %s: signal: killed", program)
		}
		if !disk.idle {
			disk.mkfs(program, args)
		}
	case "resize2fs", "xfs_growfs":
		super, _ := mount.ParseSuperblock(disk.start[:])
		disk.start = encode(super.FSType, super.UUID, disk.size, true)
	default:
		return mount.Result{}, fmt.Errorf("run %s: there is no such program", program)
	}
	return mount.Result{}, nil
}

func (d *fakeDisk) blkid() mount.Result {
	if d.ioError {
		return mount.Result{Code: 2} // as the real one does
	}
	if d.foreign != "" {
		return mount.Result{Output: "DEVNAME=/dev/x\nTYPE=" + d.foreign + "\n"}
	}
	if super, ok := mount.ParseSuperblock(d.start[:]); ok {
		return mount.Result{Output: "DEVNAME=/dev/x\nUUID=" + super.UUID + "\nTYPE=" + super.FSType + "\n"}
	}
	return mount.Result{Code: 2}
}

func (d *fakeDisk) mkfs(program string, args []string) {
	uuid := ""
	for i, a := range args {
		if a == "-U" {
			uuid = args[i+1]
		}
		if rest, ok := strings.CutPrefix(a, "uuid="); ok {
			uuid = rest
		}
	}
	d.start = encode(strings.TrimPrefix(program, "mkfs."), uuid, d.size, false)
	d.data = ""
}

func encode(fsType, uuid string, size uint64, mounted bool) [4096]byte {
	if fsType == "xfs" {
		return mounttest.XFS(uuid, size, false)
	}
	return mounttest.Ext4(uuid, size, mounted)
}

// nothingMounted checks that everything mounted by tests is gone, targets included.
func (k *fakeKernel) nothingMounted(t *testing.T) {
	t.Helper()
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.table) > 1 {
		t.Errorf("still mounted: %s", k.table[1:].Points())
	}
	for _, p := range slices.Sorted(maps.Keys(k.files)) {
		if strings.HasPrefix(p, "/pods/") && k.files[p] != "" {
			t.Errorf("target %s is still there", p)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// fakeKernel is a machine in memory: devices of which the ends are kept, programs
// that write superblocks, a mount table. kernel_test.go holds it to what the real
// one does.
type fakeKernel struct {
	mu        sync.Mutex
	nodes     map[string]block.DeviceNumber // device nodes, by path
	disks     map[block.DeviceNumber]*fakeDisk
	files     map[string]string // "dir" or "file"
	table     mounts
	lastMount int
	held      map[string]string // mount points that do not go, and who holds them
	elsewhere map[block.DeviceNumber][]string
	hang      map[string]chan struct{} // what waits until the channel is closed: "Usage", "mkfs.ext4"
	ran       []string                 // programs, in order
	bound     bool                     // ext4 cannot be grown in use
}

type fakeDisk struct {
	number     block.DeviceNumber
	size       uint64
	start, end [4096]byte
	data       string // what a user wrote into the file system
	ioError    bool
	claimed    bool // by something that shows nowhere
	endError   bool // the end alone cannot be read
	readOnly   bool
	dirty      bool // there is something in the journal
	idle       bool // mkfs succeeds and writes nothing
	mkfsKilled bool // mkfs does not come to its end
	fsck       result
	foreign    string // what blkid says of it
}

func newFakeKernel() *fakeKernel {
	return &fakeKernel{
		nodes: map[string]block.DeviceNumber{}, disks: map[block.DeviceNumber]*fakeDisk{}, files: map[string]string{"/": "dir"},
		table:     mounts{{id: 1, parent: 0, device: block.DeviceNumber{Major: 254, Minor: 0}, root: "/", point: "/", fsType: "ext4", source: "/dev/vda", options: []string{"rw"}}},
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

func (k *fakeKernel) Mounts() (mounts, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return slices.Clone(k.table), nil
}

func (k *fakeKernel) MountsElsewhere(device block.DeviceNumber) ([]string, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.elsewhere[device], nil
}

func (k *fakeKernel) Holders(m mount) []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	if who, ok := k.held[m.point]; ok {
		return []string{who}
	}
	return nil
}

func (k *fakeKernel) Node(p string) (block.DeviceNumber, bool) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if m, ok := k.table.at(p); ok {
		n, ok := k.nodes[m.root]
		return n, ok && m.fsType == "devtmpfs"
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

func (k *fakeKernel) Open(p string) (disk, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	n, ok := k.nodes[p]
	if !ok {
		return nil, fmt.Errorf("open %s: %w", p, fs.ErrNotExist)
	}
	return fakeHandle{k, k.disks[n]}, nil
}

func (k *fakeKernel) add(m mount) {
	k.lastMount++
	m.id = k.lastMount
	m.parent = k.under(m.point).id
	k.table = append(k.table, m)
}

// under is the mount that a path is in.
func (k *fakeKernel) under(p string) mount {
	for ; ; p = path.Dir(p) {
		if m, ok := k.table.at(p); ok {
			return m
		}
	}
}

func (k *fakeKernel) Mount(d disk, source, target, fsType string, options []string) error {
	k.waitFor("mount")
	k.mu.Lock()
	defer k.mu.Unlock()
	disk := k.disks[d.Number()]
	super, ok := parseSuperblock(disk.start[:])
	m := mount{device: disk.number, root: "/", point: target, fsType: fsType, source: source}
	for _, o := range append([]string{"rw"}, options...) {
		switch _, flag := flags[o]; {
		case !flag || o == "sync" || o == "dirsync" || o == "lazytime":
			m.super = append(m.super, o)
		case o == "ro":
			m.options = slices.DeleteFunc(m.options, func(o string) bool { return o == "rw" })
			fallthrough
		default:
			m.options = append(m.options, o)
		}
	}
	switch {
	case k.nodes[source] != disk.number:
		return unix.ESTALE
	case k.files[target] == "":
		return unix.ENOENT
	case k.files[target] != "dir":
		return unix.ENOTDIR
	case !ok || super.fsType != fsType:
		return unix.EINVAL
	case disk.readOnly && !m.readOnly():
		return unix.EACCES
	case disk.readOnly && disk.dirty:
		return unix.EROFS
	case fsType == "ext4" && !m.readOnly():
		disk.start = encodeExt4(super.uuid, super.bytes, true)
	}
	disk.dirty = false
	k.add(m)
	return nil
}

func (k *fakeKernel) Bind(device block.DeviceNumber, source, target string, readOnly bool) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	m := k.under(source)
	if m.device != device {
		return unix.ESTALE
	}
	return k.bind(m, "dir", target, readOnly)
}

func (k *fakeKernel) BindDisk(d disk, target string, readOnly bool) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	for node, n := range k.nodes {
		if n == d.Number() {
			return k.bind(mount{device: block.DeviceNumber{Major: 0, Minor: 6}, root: node, fsType: "devtmpfs", source: "devtmpfs", options: []string{"rw"}}, "file", target, readOnly)
		}
	}
	return unix.ENOENT
}

func (k *fakeKernel) bind(m mount, kind, target string, readOnly bool) error {
	if k.files[target] != kind {
		return unix.ENOENT
	}
	m.point = target
	if readOnly {
		m.options = append([]string{"ro"}, slices.DeleteFunc(slices.Clone(m.options), func(o string) bool { return o == "rw" })...)
	}
	k.add(m)
	return nil
}

func (k *fakeKernel) Unmount(target string, lazy bool) error {
	k.waitFor("umount")
	k.mu.Lock()
	defer k.mu.Unlock()
	m, ok := k.table.at(target)
	switch {
	case !ok && k.files[target] == "":
		return fmt.Errorf("unmount %s: %w", target, unix.ENOENT)
	case !ok:
		return fmt.Errorf("unmount %s: %w", target, unix.EINVAL)
	case k.held[target] != "" && !lazy, slices.ContainsFunc(k.table, func(o mount) bool { return o.parent == m.id }) && !lazy:
		return fmt.Errorf("unmount %s: %w", target, unix.EBUSY)
	}
	k.table = slices.DeleteFunc(k.table, func(o mount) bool { return o.id == m.id })
	return nil
}

func (k *fakeKernel) Grows(fsType string) bool { return fsType != "ext4" || !k.bound }

func (k *fakeKernel) Usage(p string) (usage, error) {
	k.waitFor("Usage")
	k.mu.Lock()
	defer k.mu.Unlock()
	d, ok := k.disks[k.under(p).device]
	if !ok {
		return usage{}, fs.ErrNotExist
	}
	if d.ioError {
		return usage{}, unix.EIO
	}
	super, _ := parseSuperblock(d.start[:])
	return usage{bytes: super.bytes, bytesFree: super.bytes, bytesAvailable: super.bytes, inodes: 16, inodesFree: 12}, nil
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
	if _, ok := k.table.at(p); ok {
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
	return h.d.claimed || len(h.k.elsewhere[h.d.number]) > 0 || len(h.k.table.fileSystemOn(h.d.number)) > 0, nil
}

func (k *fakeKernel) Run(d disk, program string, args ...string) (result, error) {
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
			return result{output: "mke2fs 1.47.0 (5-Feb-2023)\n"}, nil
		}
		if disk.mkfsKilled {
			return result{output: "half done"}, fmt.Errorf("run %s: signal: killed", program)
		}
		if !disk.idle {
			disk.mkfs(program, args)
		}
	case "resize2fs", "xfs_growfs":
		super, _ := parseSuperblock(disk.start[:])
		disk.start = encode(super.fsType, super.uuid, disk.size, true)
	default:
		return result{}, fmt.Errorf("run %s: there is no such program", program)
	}
	return result{}, nil
}

func (d *fakeDisk) blkid() result {
	if d.ioError {
		return result{code: 2} // as the real one does
	}
	if d.foreign != "" {
		return result{output: "DEVNAME=/dev/x\nTYPE=" + d.foreign + "\n"}
	}
	if super, ok := parseSuperblock(d.start[:]); ok {
		return result{output: "DEVNAME=/dev/x\nUUID=" + super.uuid + "\nTYPE=" + super.fsType + "\n"}
	}
	return result{code: 2}
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
		return encodeXFS(uuid, size, false)
	}
	return encodeExt4(uuid, size, mounted)
}

func encodeExt4(uuid string, size uint64, mounted bool) (p [4096]byte) {
	sb := p[1024:]
	le := binary.LittleEndian
	le.PutUint16(sb[0x38:], 0xef53)
	le.PutUint32(sb[0x18:], 2)
	le.PutUint32(sb[0x4:], uint32(size/4096))
	copy(sb[0x68:], uuidBytes(uuid))
	if mounted {
		le.PutUint32(sb[0x2c:], 1)
		le.PutUint16(sb[0x34:], 1)
	}
	return p
}

func encodeXFS(uuid string, size uint64, inProgress bool) (p [4096]byte) {
	be := binary.BigEndian
	copy(p[:], "XFSB")
	be.PutUint32(p[4:], 4096)
	be.PutUint64(p[8:], size/4096)
	copy(p[32:], uuidBytes(uuid))
	if inProgress {
		p[126] = 1
	}
	return p
}

func uuidBytes(text string) []byte {
	b, err := hex.DecodeString(strings.ReplaceAll(text, "-", ""))
	if err != nil {
		panic(err)
	}
	return b
}

// nothingMounted checks that all that tests mounted is gone, targets included.
func (k *fakeKernel) nothingMounted(t *testing.T) {
	t.Helper()
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.table) > 1 {
		t.Errorf("still mounted: %s", k.table[1:].points())
	}
	for _, p := range slices.Sorted(maps.Keys(k.files)) {
		if strings.HasPrefix(p, "/pods/") && k.files[p] != "" {
			t.Errorf("target %s is still there", p)
		}
	}
}

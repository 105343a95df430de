// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"weft.dev/weft/csi/mount"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// machine is a kernel with everything the suite needs.
type machine struct {
	mount.Kernel
	dir  string // for mount points
	disk func(t *testing.T, size int64) (node string, set func(off int64, p []byte))
	grow func(t *testing.T, node string, size int64)
	lock func(t *testing.T, node string, readOnly bool) // makes a device read-only, or not
	link func(t *testing.T, to, path string)            // makes a symbolic link
	lose func(t *testing.T, point string)               // leaves "data" in the journal only
	hold func(t *testing.T, point string) (who string, release func())
}

func TestTheFakeKernelIsAsTheRealOne(t *testing.T) { kernelSuite(t, fakeMachine) }

func TestTheRealKernel(t *testing.T) {
	needsRoot(t)
	kernelSuite(t, realMachine)
}

// needsRoot skips a test that cannot run here. Where it must run, that is a failure.
func needsRoot(t *testing.T) {
	t.Helper()
	missing := ""
	if os.Geteuid() != 0 {
		missing = "root"
	}
	for _, program := range []string{"mkfs.ext4", "mkfs.xfs", "e2fsck", "resize2fs", "xfs_growfs", "blkid", "losetup"} {
		if _, err := mount.FindProgram(program); err != nil && missing == "" {
			missing = program
		}
	}
	if _, err := os.Stat("/dev/loop-control"); err != nil && missing == "" {
		missing = "/dev/loop-control"
	}
	switch {
	case missing == "":
	case os.Getenv("CI") == "true" && os.Geteuid() == 0:
		t.Fatalf("needs %s: make install brings the programs", missing)
	default:
		t.Skipf("needs %s", missing)
	}
}

func fakeMachine(t *testing.T) machine {
	k := newFakeKernel()
	k.files["/t"] = "dir"
	return machine{
		Kernel: k, dir: "/t",
		disk: func(t *testing.T, size int64) (string, func(int64, []byte)) {
			node := "/dev/" + t.Name()
			d := k.addDisk(node, uint64(size))
			return node, func(off int64, p []byte) {
				if off < 4096 {
					copy(d.start[off:], p)
				} else {
					copy(d.end[off-size+4096:], p)
				}
				if d.start[510] == 0x55 {
					d.foreign = "dos"
				}
			}
		},
		grow: func(_ *testing.T, node string, size int64) { k.disks[k.nodes[node]].size = uint64(size) },
		lock: func(_ *testing.T, node string, readOnly bool) { k.disks[k.nodes[node]].readOnly = readOnly },
		link: func(_ *testing.T, _, path string) { k.files[path] = "link" },
		lose: func(_ *testing.T, point string) {
			m, _ := k.table.At(point)
			k.disks[m.Device].dirty = true
		},
		hold: func(_ *testing.T, point string) (string, func()) {
			k.held[point] = "process 7 (postgres)"
			return "postgres", func() { delete(k.held, point) }
		},
	}
}

func realMachine(t *testing.T) machine {
	t.Helper()
	dir, err := os.MkdirTemp(os.Getenv(ownDir), "m")
	if err != nil {
		t.Fatal(err)
	}
	return machine{
		Kernel: mount.NewLinux(), dir: dir,
		disk: func(t *testing.T, size int64) (string, func(int64, []byte)) {
			t.Helper()
			node, _ := loopDevice(t, dir, size)
			return node, func(off int64, p []byte) {
				f, err := os.OpenFile(node, os.O_WRONLY, 0)
				if err == nil {
					_, err = f.WriteAt(p, off)
				}
				if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
					t.Fatal(err)
				}
			}
		},
		grow: func(t *testing.T, node string, size int64) {
			t.Helper()
			text, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(node), "loop/backing_file"))
			if err == nil {
				err = os.Truncate(strings.TrimSpace(string(text)), size)
			}
			if err != nil {
				t.Fatal(err)
			}
			run(t, "losetup", "-c", node)
		},
		lock: func(t *testing.T, node string, readOnly bool) {
			t.Helper()
			run(t, "blockdev", map[bool]string{true: "--setro", false: "--setrw"}[readOnly], node)
			t.Cleanup(func() { run(t, "blockdev", "--setrw", node) }) // it would outlast its file
		},
		link: func(t *testing.T, to, path string) {
			t.Helper()
			if err := os.Symlink(to, path); err != nil {
				t.Fatal(err)
			}
		},
		lose: func(t *testing.T, point string) {
			t.Helper()
			f, err := os.Create(filepath.Join(point, "data"))
			if err == nil {
				_, err = f.WriteString("acknowledged")
			}
			if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
				t.Fatal(err)
			}
			shutDown(t, point)
		},
		hold: func(t *testing.T, point string) (string, func()) {
			t.Helper()
			f, err := os.Open(point)
			if err != nil {
				t.Fatal(err)
			}
			return "process", func() { f.Close() }
		},
	}
}

// loopDevice makes a device over a sparse file.
func loopDevice(t *testing.T, dir string, size int64) (node string, file *os.File) {
	t.Helper()
	file, err := os.CreateTemp(dir, "disk")
	if err == nil {
		err = file.Truncate(size)
	}
	if err != nil {
		t.Fatal(err)
	}
	node = strings.TrimSpace(run(t, "losetup", "--find", "--show", file.Name()))
	t.Cleanup(func() {
		run(t, "losetup", "-d", node)
		file.Close()
		os.Remove(file.Name())
	})
	return node, file
}

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	file, err := mount.FindProgram(name)
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(file, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %v: %v: %s", name, args, err, out)
	}
	return string(out)
}

// open opens a device until the test's end.
func (m machine) open(t *testing.T, node string) mount.Disk {
	t.Helper()
	d, err := m.Open(node)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// made is a device with a file system.
func (m machine) made(t *testing.T, fsType string) (node string, d mount.Disk) {
	t.Helper()
	node, _ = m.disk(t, 320*mib)
	d = m.open(t, node)
	volume := &pb.Volume{Id: volumeID, SizeBytes: 320 * mib, Layout: &pb.Layout{Stripes: 2, Copies: 1, ChunkBytes: 128 << 10}}
	v, err := m.Run(d, "mkfs.ext4", "-V")
	succeeds(t, "ask for the version", err)
	program, args := mkfs(fsType, volume, true, parseE2fsVersion(v.Output))
	r, err := m.Run(d, program, args...)
	if err != nil || r.Code != 0 {
		t.Fatalf("%s %v = %+v, %v", program, args, r, err)
	}
	return node, d
}

// mounted is a device with a mounted file system.
func (m machine) mounted(t *testing.T, fsType string, options ...string) (d mount.Disk, point mount.Mount) {
	t.Helper()
	node, d := m.made(t, fsType)
	target := filepath.Join(m.dir, "mount")
	succeeds(t, "make the directory", m.MakeDir(target))
	succeeds(t, "mount", m.Mount(d, node, target, fsType, options))
	t.Cleanup(func() { _ = m.Unmount(target, true) })
	at, ok := m.at(t, target)
	if !ok || at.Device != d.Number() || at.Root != "/" || at.FSType != fsType || at.Source != node {
		t.Fatalf("at %s is %+v, want %s of %s", target, at, fsType, d.Number())
	}
	return d, at
}

func (m machine) at(t *testing.T, point string) (mount.Mount, bool) {
	t.Helper()
	all, err := m.Mounts()
	succeeds(t, "read the mounts", err)
	return all.At(point)
}

func kernelSuite(t *testing.T, newMachine func(*testing.T) machine) {
	for name, test := range map[string]func(*testing.T, machine){
		"a blank device is seen as blank":                    blankIsBlank,
		"a file system is seen as what it is":                madeIsSeen,
		"foreign signatures and stray bytes are seen":        foreignIsSeen,
		"a mount has the options that it was given":          optionsShow,
		"a device is mounted only as itself":                 onlyItself,
		"a bind is of one device, and read-only at once":     bindsAreExact,
		"a device's node is bound to a file":                 nodesAreBound,
		"what is not mounted can be unmounted harmlessly":    nothingToUnmount,
		"a held mount does not go, and its holder is named":  heldIsNamed,
		"a mounted device is busy":                           mountedIsBusy,
		"file systems grow":                                  fileSystemsGrow,
		"nothing is mounted on what is no plain place":       oddPlaces,
		"a journal is not passed over":                       journalsCount,
		"a program's code is told, and a missing program is": codesAreTold,
	} {
		t.Run(name, func(t *testing.T) { test(t, newMachine(t)) })
	}
}

func blankIsBlank(t *testing.T, m machine) {
	node, _ := m.disk(t, 64*mib)
	d := m.open(t, node)
	e, err := mount.Inspect(m, d)
	if err != nil || !e.Zero || e.Super != nil || len(e.Names) > 0 || e.Size != 64*mib {
		t.Errorf("look = %+v, %v, want a blank of 64 MiB", e, err)
	}
	if n, ok := m.Node(node); !ok || n != d.Number() {
		t.Errorf("Node(%s) = %v, %v, want %v", node, n, ok, d.Number())
	}
	if size, err := m.Size(d.Number()); err != nil || size != 64*mib {
		t.Errorf("Size = %d, %v", size, err)
	}
}

func madeIsSeen(t *testing.T, m machine) {
	for _, fsType := range fileSystems {
		_, d := m.made(t, fsType)
		e, err := mount.Inspect(m, d)
		if err != nil || e.Zero || e.Super == nil || !slices.Equal(e.Names, []string{fsType}) {
			t.Fatalf("look at %s = %+v, %v", fsType, e, err)
		}
		if s := *e.Super; s.FSType != fsType || s.UUID != volumeID || s.Bytes > 320*mib || s.Bytes < 319*mib || s.Mounted != (fsType == "xfs") {
			t.Errorf("superblock of a new %s = %+v", fsType, s)
		}
	}
}

func foreignIsSeen(t *testing.T, m machine) {
	node, set := m.disk(t, 64*mib)
	d := m.open(t, node)
	set(64*mib-512, []byte{1})
	if e, err := mount.Inspect(m, d); err != nil || e.Zero || len(e.Names) > 0 {
		t.Errorf("look at a stray byte = %+v, %v", e, err)
	}
	partition := []byte{0, 0, 2, 0, 0x83, 0, 0, 0, 1, 0, 0, 0, 0xff, 0xff, 0, 0}
	set(446, partition)
	set(510, []byte{0x55, 0xaa})
	if e, err := mount.Inspect(m, d); err != nil || !slices.Equal(e.Names, []string{"dos"}) {
		t.Errorf("look at a partition table = %+v, %v, want dos", e, err)
	}
}

func optionsShow(t *testing.T, m machine) {
	_, at := m.mounted(t, "ext4", "noatime", "nodev", "discard")
	if !mount.SameOptions(at, []string{"noatime", "nodev", "discard"}) || mount.SameOptions(at, []string{"noatime", "nodev"}) {
		t.Errorf("identity of the mount is %v", mount.IdentityOf(at))
	}
	succeeds(t, "unmount", m.Unmount(at.Point, false))
	if at, ok := m.at(t, at.Point); ok {
		t.Errorf("after unmount there is %+v", at)
	}
	_, at = m.mounted(t, "xfs", "ro", "nouuid")
	if !at.ReadOnly() || !mount.SameOptions(at, []string{"ro", "nouuid"}) {
		t.Errorf("identity of the read-only mount is %v", mount.IdentityOf(at))
	}
	u, err := m.Usage(at.Point)
	if err != nil || u.Bytes < 200*mib || u.BytesAvailable > u.BytesFree || u.InodesFree >= u.Inodes {
		t.Errorf("Usage = %+v, %v", u, err)
	}
}

func onlyItself(t *testing.T, m machine) {
	node, _ := m.disk(t, 64*mib)
	_, d := made2(t, m)
	target := filepath.Join(m.dir, "mount")
	succeeds(t, "make the directory", m.MakeDir(target))
	if err := m.Mount(d, node, target, "ext4", nil); !errors.Is(err, unix.ESTALE) {
		t.Errorf("mount by another device's name = %v, want ESTALE", err)
	}
	if at, ok := m.at(t, target); ok {
		t.Errorf("and there is %+v", at)
	}
}

// made2 is a second device: the fake names the first one after the test.
func made2(t *testing.T, m machine) (node string, d mount.Disk) {
	if k, ok := m.Kernel.(*fakeKernel); ok {
		k.addDisk("/dev/second", 64*mib)
		return "/dev/second", m.open(t, "/dev/second")
	}
	return m.made(t, "ext4")
}

func bindsAreExact(t *testing.T, m machine) {
	d, at := m.mounted(t, "ext4")
	for _, readOnly := range []bool{true, false} {
		target := filepath.Join(m.dir, "target")
		succeeds(t, "make the directory", m.MakeDir(target))
		if err := m.Bind(block.DeviceNumber{Major: 4095, Minor: 1}, at.Point, target, readOnly); !errors.Is(err, unix.ESTALE) {
			t.Errorf("bind of another device = %v, want ESTALE", err)
		}
		if at, ok := m.at(t, target); ok {
			t.Fatalf("and there is %+v", at)
		}
		succeeds(t, "bind", m.Bind(d.Number(), at.Point, target, readOnly))
		b, ok := m.at(t, target)
		if !ok || b.Device != d.Number() || b.Root != "/" || b.ReadOnly() != readOnly {
			t.Errorf("bind, read-only %v: there is %+v", readOnly, b)
		}
		all, _ := m.Mounts()
		if others := all.FileSystemOn(d.Number(), all.Place(at)); len(others) != 1 || others[0].Point != target {
			t.Errorf("beside %s the file system is on %q, want %s", at.Point, others.Points(), target)
		}
		if err := m.Remove(target); err == nil {
			t.Error("a mount point was removed")
		}
		succeeds(t, "unmount", m.Unmount(target, false))
		succeeds(t, "remove", m.Remove(target))
		succeeds(t, "remove again", m.Remove(target))
	}
}

func nodesAreBound(t *testing.T, m machine) {
	node, _ := m.disk(t, 64*mib)
	d := m.open(t, node)
	target := filepath.Join(m.dir, "node")
	succeeds(t, "make the file", m.MakeFile(target))
	succeeds(t, "make it again", m.MakeFile(target))
	if n, ok := m.Node(target); ok {
		t.Errorf("a file is device %v", n)
	}
	succeeds(t, "bind", m.BindDisk(d, target, false))
	at, ok := m.at(t, target)
	if n, is := m.Node(target); !ok || !is || n != d.Number() || !at.MayBeNode() || at.Device == d.Number() {
		t.Errorf("the target is %v, %v, mounted %+v", n, is, at)
	}
	succeeds(t, "unmount", m.Unmount(target, false))
	succeeds(t, "remove", m.Remove(target))
}

func nothingToUnmount(t *testing.T, m machine) {
	dir := filepath.Join(m.dir, "empty")
	succeeds(t, "make the directory", m.MakeDir(dir))
	if err := m.Unmount(dir, false); !errors.Is(err, unix.EINVAL) {
		t.Errorf("unmount of a directory = %v, want EINVAL", err)
	}
	if err := m.Unmount(filepath.Join(m.dir, "absent"), false); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("unmount of nothing = %v, want ENOENT", err)
	}
}

func heldIsNamed(t *testing.T, m machine) {
	d, at := m.mounted(t, "ext4")
	who, release := m.hold(t, at.Point)
	if err := m.Unmount(at.Point, false); !errors.Is(err, unix.EBUSY) {
		t.Errorf("unmount of a held mount = %v, want EBUSY", err)
	}
	if holders := m.Holders(at); len(holders) != 1 || !strings.Contains(holders[0], who) {
		t.Errorf("Holders = %q, want %s", holders, who)
	}
	succeeds(t, "detach", m.Unmount(at.Point, true))
	if at, ok := m.at(t, at.Point); ok {
		t.Errorf("detached, and there is %+v", at)
	}
	release()
	if elsewhere, err := m.MountsElsewhere(d.Number()); err != nil || len(elsewhere) > 0 {
		t.Errorf("mounted elsewhere: %q, %v", elsewhere, err)
	}
}

func mountedIsBusy(t *testing.T, m machine) {
	d, at := m.mounted(t, "xfs")
	if busy, err := d.Busy(); !busy || err != nil {
		t.Errorf("Busy of a mounted device = %v, %v", busy, err)
	}
	succeeds(t, "unmount", m.Unmount(at.Point, false))
	if busy, err := d.Busy(); busy || err != nil {
		t.Errorf("Busy of an unmounted device = %v, %v", busy, err)
	}
}

func fileSystemsGrow(t *testing.T, m machine) {
	for _, fsType := range fileSystems {
		d, at := m.mounted(t, fsType)
		m.grow(t, at.Source, 400*mib)
		s := &nodeServer{kernel: m.Kernel}
		if err := s.grow(t.Context(), &task{}, d, fsType, at.Point); !m.Grows(fsType) {
			if !errors.Is(err, errGrowsUnmounted) {
				t.Errorf("grow without the right to = %v", err)
			}
			succeeds(t, "unmount", m.Unmount(at.Point, false))
			e, err := mount.Inspect(m, d)
			succeeds(t, "look", err)
			succeeds(t, "check and grow", s.checkExt4(t.Context(), &task{}, attachment{volume: &pb.Volume{}, Attachment: &pb.Attachment{}}, d, e))
			succeeds(t, "mount", m.Mount(d, at.Source, at.Point, fsType, nil))
		} else {
			succeeds(t, "grow "+fsType, err)
		}
		u, err := m.Usage(at.Point)
		if err != nil || u.Bytes < 320*mib {
			t.Errorf("%s has %d bytes after growing to 400 MiB, %v", fsType, u.Bytes, err)
		}
		succeeds(t, "unmount", m.Unmount(at.Point, false))
	}
}

func codesAreTold(t *testing.T, m machine) {
	node, _ := m.disk(t, 64*mib)
	d := m.open(t, node)
	if r, err := m.Run(d, "blkid", "-p", "-o", "export", "{}"); err != nil || r.Code != 2 {
		t.Errorf("blkid of a blank device = %+v, %v, want code 2", r, err)
	}
	if _, err := m.Run(d, "mkfs.nothing", "{}"); err == nil {
		t.Error("a program that is not there ran")
	}
}

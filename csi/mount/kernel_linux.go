// SPDX-License-Identifier: Apache-2.0

package mount

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// linux is the kernel of this machine. It keeps no state.
//
// It uses system calls rather than mount(8), umount(8) and k8s.io/mount-utils for three reasons. A
// bind mount must appear in one step with all its attributes (mount_setattr(2)), since a crash
// between bind and remount would leave a writable one. An unmount must not look at what it
// unmounts. And a device must be passed on as the open descriptor that was checked, which
// mount-utils does not support. All that remains, parsing mountinfo, is short.
type linux struct {
	proc, sys string
}

// NewLinux returns the kernel of this machine.
func NewLinux() Kernel { return &linux{proc: "/proc", sys: "/sys"} }

func (l *linux) Resolve(path string) (string, error) {
	path = filepath.Clean(path)
	dir, err := filepath.EvalSymlinks(filepath.Dir(path))
	if errors.Is(err, fs.ErrNotExist) {
		return path, nil // then nothing is mounted there, under any name
	}
	if err != nil {
		return "", fmt.Errorf("resolve %s: %w", path, err)
	}
	return filepath.Join(dir, filepath.Base(path)), nil
}

func (l *linux) Mounts() (Table, error) {
	// Since Linux 5.8 a reader of mountinfo misses no entry because others disappear meanwhile.
	text, err := os.ReadFile(filepath.Join(l.proc, "self/mountinfo"))
	if err != nil {
		return nil, fmt.Errorf("read the mounts: %w", err)
	}
	return parseMounts(string(text)), nil
}

func (l *linux) Node(path string) (block.DeviceNumber, bool) {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return block.DeviceNumber{}, false
	}
	return numberOf(st.Rdev), true
}

func numberOf(dev uint64) block.DeviceNumber {
	return block.DeviceNumber{Major: unix.Major(dev), Minor: unix.Minor(dev)}
}

func (l *linux) Size(device block.DeviceNumber) (uint64, error) {
	text, err := os.ReadFile(filepath.Join(l.sys, "dev/block", device.String(), "size"))
	if err != nil {
		return 0, fmt.Errorf("read the size of device %s: %w", device, err)
	}
	sectors, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("size of device %s: %w", device, err)
	}
	return sectors * 512, nil // whatever the device's block size is
}

// ---- mounting ----

// flags are the options that are flags of mount(2). All others are text for the file system.
var flags = map[string]uintptr{
	"rw": 0, "suid": 0, "dev": 0, "exec": 0, "async": 0, "defaults": 0, "nolazytime": 0,
	"ro": unix.MS_RDONLY, "nosuid": unix.MS_NOSUID, "nodev": unix.MS_NODEV, "noexec": unix.MS_NOEXEC,
	"sync": unix.MS_SYNCHRONOUS, "dirsync": unix.MS_DIRSYNC, "lazytime": unix.MS_LAZYTIME,
	"noatime": unix.MS_NOATIME, "nodiratime": unix.MS_NODIRATIME,
	"relatime": unix.MS_RELATIME, "strictatime": unix.MS_STRICTATIME,
}

// IsFlag reports whether an option is one of mount(2)'s flags, which mountinfo shows for each mount
// separately.
func IsFlag(option string) bool {
	_, ok := flags[option]
	return ok
}

func (l *linux) Mount(d Disk, source, target, fsType string, options []string) error {
	var bits uintptr
	var data []string
	for _, o := range options {
		bit, ok := flags[o]
		if !ok {
			data = append(data, o)
		}
		bits |= bit
	}
	// The disk is held open, so no other device can have its number: if the name leads to this
	// number, it leads to this disk. The kernel resolves the name once more, so the caller checks
	// the result. In between, only this node's agent can point the name elsewhere: to the next
	// attachment of a volume of this name. This node owns that attachment too, so no journal is
	// replayed that must not be. A descriptor (/proc/self/fd/N, which fsconfig(2) accepts as
	// mount(2) does) would close this gap, but the kernel keeps that text as the mount's source for
	// good: df and mountinfo would tell an operator nothing, and the driver could not tell during
	// cleanup whose mount it is. A device's own name, /dev/loop3, may be missing in a container's
	// /dev.
	file, err := os.Stat(source)
	if err != nil {
		return fmt.Errorf("mount %s: %w", source, err)
	}
	if st, ok := file.Sys().(*syscall.Stat_t); !ok || numberOf(st.Rdev) != d.Number() {
		return fmt.Errorf("mount %s: it is no longer device %s: %w", source, d.Number(), unix.ESTALE)
	}
	at, err := unix.Open(target, unix.O_PATH|unix.O_NOFOLLOW|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("mount %s on %s: %w", source, target, err)
	}
	defer unix.Close(at)
	if err := unix.Mount(source, fmt.Sprintf("/proc/self/fd/%d", at), fsType, bits, strings.Join(data, ",")); err != nil {
		return fmt.Errorf("mount %s of %s on %s, options %q: %w", fsType, source, target, strings.Join(options, ","), err)
	}
	return nil
}

func (l *linux) Bind(device block.DeviceNumber, source, target string, readOnly bool) error {
	doing := fmt.Sprintf("bind %s to %s", source, target)
	return l.attach(doing, source, target, readOnly, func(tree int) error {
		var st unix.Stat_t
		if err := unix.Fstat(tree, &st); err != nil {
			return err
		}
		if numberOf(st.Dev) != device {
			return fmt.Errorf("it is of device %s, not %s: %w", numberOf(st.Dev), device, unix.ESTALE)
		}
		return nil
	})
}

// BindDisk's mount does not prevent writes to the device, read-only or not: that is up to the
// container runtime and, for a shared volume, to the targets.
func (l *linux) BindDisk(d Disk, target string, readOnly bool) error {
	held := d.(*linuxDisk)
	doing := fmt.Sprintf("bind device %s to %s", held.number, target)
	return l.attach(doing, held.path(), target, readOnly, func(tree int) error {
		var st unix.Stat_t
		if err := unix.Fstat(tree, &st); err != nil {
			return err
		}
		if numberOf(st.Rdev) != held.number {
			return fmt.Errorf("it is device %s, not %s: %w", numberOf(st.Rdev), held.number, unix.ESTALE)
		}
		return nil
	})
}

// attach clones a mount, checks and configures it while it is invisible, and moves it into place
// (open_tree, mount_setattr, move_mount: Linux 5.12).
func (l *linux) attach(doing, source, target string, readOnly bool, check func(tree int) error) error {
	tree, err := unix.OpenTree(unix.AT_FDCWD, source, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fmt.Errorf("%s: clone the mount: %w", doing, err)
	}
	defer unix.Close(tree)
	if err := check(tree); err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	if readOnly {
		attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY}
		if err := unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH, &attr); err != nil {
			return fmt.Errorf("%s: make it read-only: %w", doing, err)
		}
	}
	if err := unix.MoveMount(tree, "", unix.AT_FDCWD, target, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("%s: %w", doing, err)
	}
	return nil
}

// passing is how long an unmount waits for a short-lived user of the mount.
const passing = time.Second

// Unmount retries for a while if the mount is in use. The user may be a program that this very
// process is starting for another volume: from fork to exec a child has all descriptors of its
// parent, including attach's of a mount just made. This was seen to last 50 ms on a machine short
// of processors. Holding syscall.ForkLock in attach is no solution: a source that hangs would block
// the start of every program.
func (l *linux) Unmount(target string, lazy bool) error {
	how := unix.UMOUNT_NOFOLLOW
	if lazy {
		how |= unix.MNT_DETACH
	}
	err := unix.Unmount(target, how)
	end := time.Now().Add(passing)
	for wait := time.Millisecond; errors.Is(err, unix.EBUSY) && time.Now().Before(end); wait = min(2*wait, 50*time.Millisecond) {
		time.Sleep(wait) // the kernel has no event for a mount that becomes free
		err = unix.Unmount(target, how)
	}
	if err != nil {
		return fmt.Errorf("unmount %s: %w", target, err)
	}
	return nil
}

func (l *linux) Grows(fsType string) bool {
	if fsType != "ext4" {
		return true
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	err := unix.Capget(&header, &data[0])
	return err != nil || data[0].Effective&(1<<unix.CAP_SYS_RESOURCE) != 0
}

func (l *linux) Usage(path string) (Usage, error) {
	// An xfs that has shut itself down still answers statfs, but fails stat with EIO.
	var root unix.Stat_t
	if err := unix.Stat(path, &root); err != nil {
		return Usage{}, fmt.Errorf("stat %s: %w", path, err)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return Usage{}, fmt.Errorf("statfs %s: %w", path, err)
	}
	unit := uint64(st.Frsize)
	return Usage{
		Bytes: st.Blocks * unit, BytesFree: st.Bfree * unit, BytesAvailable: st.Bavail * unit,
		Inodes: st.Files, InodesFree: st.Ffree,
	}, nil
}

// ---- files ----

func (l *linux) MakeDir(path string) error {
	if err := notLinked(path); err != nil {
		return err
	}
	return os.MkdirAll(path, 0o750)
}

// notLinked refuses a symbolic link: mount(2) follows it, an unmount does not, and the mount would
// show elsewhere.
func notLinked(path string) error {
	if at, err := os.Lstat(path); err == nil && at.Mode()&fs.ModeSymlink != 0 {
		return fmt.Errorf("%s is a symbolic link, on which nothing is mounted: %w", path, unix.ELOOP)
	}
	return nil
}

func (l *linux) MakeFile(path string) error {
	if err := notLinked(path); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o750); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0o640)
	if err != nil {
		return err
	}
	return f.Close()
}

func (l *linux) Remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// ---- devices ----

type linuxDisk struct {
	file   *os.File
	number block.DeviceNumber
}

func (l *linux) Open(path string) (Disk, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", path, err)
	}
	d := &linuxDisk{file: os.NewFile(uintptr(fd), path)}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		d.Close()
		return nil, fmt.Errorf("look at %s: %w", path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFBLK {
		d.Close()
		return nil, fmt.Errorf("open %s: %w", path, unix.ENOTBLK)
	}
	d.number = numberOf(st.Rdev)
	return d, nil
}

func (d *linuxDisk) Close() error               { return d.file.Close() }
func (d *linuxDisk) Number() block.DeviceNumber { return d.number }

// path leads to the open device itself, whatever its name refers to by now.
func (d *linuxDisk) path() string { return fmt.Sprintf("/proc/self/fd/%d", d.file.Fd()) }

func (d *linuxDisk) Size() (uint64, error) {
	var size uint64
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, d.file.Fd(), unix.BLKGETSIZE64, uintptr(unsafe.Pointer(&size)))
	if errno != 0 {
		return 0, fmt.Errorf("ask device %s for its size: %w", d.number, errno)
	}
	return size, nil
}

func (d *linuxDisk) ReadOnly() (bool, error) {
	n, err := unix.IoctlGetInt(int(d.file.Fd()), unix.BLKROGET)
	if err != nil {
		return false, fmt.Errorf("ask device %s whether it is read-only: %w", d.number, err)
	}
	return n != 0, nil
}

func (d *linuxDisk) ReadDirect(p []byte, off int64) error { return d.read(p, off, unix.O_DIRECT) }
func (d *linuxDisk) ReadCached(p []byte, off int64) error { return d.read(p, off, 0) }

func (d *linuxDisk) read(p []byte, off int64, how int) error {
	fail := func(err error) error {
		return fmt.Errorf("read %d bytes at %d of device %s: %w", len(p), off, d.number, err)
	}
	fd, err := unix.Open(d.path(), unix.O_RDONLY|unix.O_CLOEXEC|how, 0)
	if err != nil {
		return fail(err)
	}
	defer unix.Close(fd)
	aligned, err := unix.Mmap(-1, 0, len(p), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return fail(err)
	}
	defer unix.Munmap(aligned)
	for done := 0; done < len(p); {
		n, err := unix.Pread(fd, aligned[done:], off+int64(done))
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return fail(err)
		case n == 0:
			return fail(fmt.Errorf("the device ends after %d bytes", done))
		default:
			done += n
		}
	}
	copy(p, aligned)
	return nil
}

func (d *linuxDisk) Busy() (bool, error) {
	fd, err := unix.Open(d.path(), unix.O_RDONLY|unix.O_EXCL|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	switch {
	case err == nil:
		unix.Close(fd)
		return false, nil
	case errors.Is(err, unix.EBUSY):
		return true, nil
	}
	return false, fmt.Errorf("open device %s exclusively: %w", d.number, err)
}

// childDisk is where a program finds the disk: its first descriptor after the standard three.
const childDisk = "/proc/self/fd/3"

func (l *linux) Run(d Disk, program string, args ...string) (Result, error) {
	args = slices.Clone(args)
	for i, a := range args {
		if a == "{}" {
			args[i] = childDisk
		}
	}
	file, err := FindProgram(program)
	if err != nil {
		return Result{}, fmt.Errorf("run %s: %w", program, err)
	}
	cmd := exec.Command(file, args...)
	cmd.Env = []string{"LC_ALL=C", "PATH=" + searchPath()}
	cmd.ExtraFiles = []*os.File{d.(*linuxDisk).file}
	// If a program outlived this process, it would format or repair a device at the same time as
	// the one that the next process starts.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	// The signal is sent when the thread that started the program ends, and another goroutine might
	// end that thread. So this goroutine keeps the thread while the program runs.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	switch {
	case err == nil:
		return Result{Output: string(out)}, nil
	case errors.As(err, &exit) && exit.Exited():
		return Result{Code: exit.ExitCode(), Output: string(out)}, nil
	}
	return Result{Output: string(out)}, fmt.Errorf("run %s: %w", program, err)
}

// searchPath is PATH plus the directories where distributions keep file system programs, which a
// service's PATH may lack.
func searchPath() string {
	return strings.Trim(os.Getenv("PATH")+":/usr/local/sbin:/usr/sbin:/sbin:/usr/bin:/bin", ":")
}

// FindProgram finds a program in PATH, or where distributions keep file system programs.
func FindProgram(name string) (string, error) {
	for _, dir := range filepath.SplitList(searchPath()) {
		if file, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return file, nil
		}
	}
	return "", fmt.Errorf("%w in %s", exec.ErrNotFound, searchPath())
}

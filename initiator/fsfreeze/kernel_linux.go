// SPDX-License-Identifier: Apache-2.0

package fsfreeze

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// This file touches the machine for this package.

// linux implements Kernel.
type linux struct{ proc, sys string }

// Linux is this machine.
func Linux() Kernel { return linux{proc: "/proc", sys: "/sys"} }

// Mounts reads the mounts of each mount namespace once. Those of others are reached through the root
// directory of one of their processes.
func (l linux) Mounts() (all []Mount, err error) {
	entries, err := os.ReadDir(l.proc)
	if err != nil {
		return nil, err
	}
	processes := []string{"self"}
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err == nil {
			processes = append(processes, e.Name())
		}
	}
	seen := map[string]bool{}
	for _, pid := range processes {
		dir := filepath.Join(l.proc, pid)
		// Two processes of one namespace can have different roots, and mountinfo shows what is below
		// the process's.
		ns, err := os.Readlink(filepath.Join(dir, "ns/mnt"))
		root, _ := os.Readlink(filepath.Join(dir, "root"))
		if err != nil || seen[ns+root] {
			continue // it has ended, or the same was seen before
		}
		text, err := os.ReadFile(filepath.Join(dir, "mountinfo"))
		switch {
		case err != nil && pid == "self":
			return nil, err
		case err != nil:
			continue
		}
		seen[ns+root] = true
		all = append(all, parseMounts(string(text), filepath.Join(dir, "root"))...)
	}
	return all, nil
}

// parseMounts reads the lines of mountinfo (proc(5)); root is where this process finds their root.
//
//	36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
func parseMounts(text, root string) (all []Mount) {
	for line := range strings.Lines(text) {
		of, about, found := strings.Cut(strings.TrimSpace(line), " - ")
		fields, more := strings.Fields(of), strings.Fields(about)
		if !found || len(fields) < 6 || len(more) < 2 {
			continue
		}
		id, err := strconv.Atoi(fields[0])
		device, failed := block.ParseDeviceNumber(fields[2])
		if err != nil || failed != nil {
			continue
		}
		m := Mount{ID: id, Device: device, FSType: more[0], Point: unescape(fields[4])}
		m.Path = filepath.Join(root, m.Point)
		if source := unescape(more[1]); filepath.IsAbs(source) {
			m.Disk = filepath.Join(root, source)
		}
		all = append(all, m)
	}
	return all
}

// unescape undoes the \040 of mountinfo.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\043`, "#", `\134`, `\`).Replace(s)
}

func (l linux) Over(device block.DeviceNumber) ([]block.DeviceNumber, error) {
	all := []block.DeviceNumber{device}
	for i := 0; i < len(all); i++ {
		dir := filepath.Join(l.sys, "dev/block", all[i].String())
		if _, err := os.Stat(dir); err != nil {
			if i > 0 && errors.Is(err, fs.ErrNotExist) {
				continue // it is gone by now
			}
			return nil, err
		}
		var files []string
		partitions, _ := filepath.Glob(filepath.Join(dir, "*/partition"))
		for _, p := range partitions {
			files = append(files, filepath.Join(filepath.Dir(p), "dev"))
		}
		holders, _ := filepath.Glob(filepath.Join(dir, "holders/*"))
		for _, h := range holders {
			files = append(files, filepath.Join(h, "dev"))
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				continue // likewise
			}
			number, err := block.ParseDeviceNumber(strings.TrimSpace(string(text)))
			if err != nil {
				return nil, fmt.Errorf("%s: %w", file, err)
			}
			all = append(all, number)
		}
	}
	return all, nil
}

func (l linux) BlockDevice(path string) (block.DeviceNumber, bool) {
	var st unix.Stat_t
	if unix.Stat(path, &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFBLK {
		return block.DeviceNumber{}, false
	}
	return block.DeviceNumber{Major: unix.Major(st.Rdev), Minor: unix.Minor(st.Rdev)}, true
}

type fileSystem struct{ *os.File }

func (l linux) Open(m Mount) (FileSystem, error) {
	fd, err := unix.Open(m.Path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	f := fileSystem{os.NewFile(uintptr(fd), m.Path)}
	id, err := mountOf(fd, "")
	if err == nil && id != uint64(m.ID) {
		err = errors.New("another mount hides it")
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// mountOf is the id of the mount that a path is on (Linux 5.8).
func mountOf(fd int, path string) (uint64, error) {
	var st unix.Statx_t
	if err := unix.Statx(fd, path, unix.AT_EMPTY_PATH, unix.STATX_MNT_ID, &st); err != nil {
		return 0, err
	}
	if st.Mask&unix.STATX_MNT_ID == 0 {
		return 0, errors.New("this kernel does not tell mounts apart: Linux 5.8 does")
	}
	return st.Mnt_id, nil
}

func (l linux) Holds(file FileSystem, path string) (bool, error) {
	var a, b unix.Stat_t
	if err := unix.Fstat(int(file.(fileSystem).Fd()), &a); err != nil {
		return false, err
	}
	err := unix.Stat(path, &b)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return a.Dev == b.Dev, err
}

func (f fileSystem) Sync() error { return unix.Syncfs(int(f.Fd())) }

// Requests of linux/fs.h, which x/sys lacks: _IOWR('X', 119, int) and the next.
const (
	fiFreeze = 0xc0045877
	fiThaw   = 0xc0045878
)

// Freeze is FIFREEZE (fsfreeze(8)).
func (f fileSystem) Freeze() error {
	err := f.control(fiFreeze)
	switch {
	case errors.Is(err, unix.EBUSY):
		return ErrFrozen
	case errors.Is(err, unix.EOPNOTSUPP), errors.Is(err, unix.ENOTTY):
		return ErrCannot
	}
	return err
}

// Thaw is FITHAW.
func (f fileSystem) Thaw() error {
	err := f.control(fiThaw)
	if errors.Is(err, unix.EINVAL) { // it is not frozen
		return nil
	}
	return err
}

func (f fileSystem) control(request uint) error {
	for {
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), uintptr(request), 0)
		switch errno {
		case 0:
			return nil
		case unix.EINTR:
		default:
			return errno
		}
	}
}

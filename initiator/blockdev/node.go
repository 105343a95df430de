// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

func numberOf(dev uint64) block.DeviceNumber {
	return block.DeviceNumber{Major: unix.Major(dev), Minor: unix.Minor(dev)}
}

// system holds the paths of the kernel's files.
type system struct{ dev, sys, proc string }

func (s system) node(disk string) string { return filepath.Join(s.dev, disk) }

func (s system) link(name block.VolumeName) string {
	return filepath.Join(s.dev, "weft", string(name))
}

// diskNumber reads the number of a disk.
func (s system) diskNumber(disk string) (block.DeviceNumber, error) {
	text, err := os.ReadFile(filepath.Join(s.sys, "block", disk, "dev"))
	if err != nil {
		return block.DeviceNumber{}, err
	}
	return block.ParseDeviceNumber(strings.TrimSpace(string(text)))
}

// diskText reads an attribute of a disk; "" if there is none.
func (s system) diskText(disk, attribute string) string {
	text, _ := os.ReadFile(filepath.Join(s.sys, "block", disk, attribute))
	return strings.TrimSpace(string(text))
}

// setDisk writes an attribute of a disk.
func (s system) setDisk(disk, attribute, value string) error {
	file := filepath.Join(s.sys, "block", disk, attribute)
	if err := os.WriteFile(file, []byte(value), 0); err != nil {
		return fmt.Errorf("set %s of %s to %q: %w", attribute, disk, value, err)
	}
	return nil
}

// control is the path of a driver's control device; a DevDir that holds only the volumes'
// names has none.
func (s system) control(name string) string {
	if path := s.node(name); s.dev == devices || exists(path) {
		return path
	}
	return filepath.Join(devices, name)
}

const devices = "/dev"

func exists(path string) bool {
	_, err := os.Lstat(path)
	return err == nil
}

// waitNode waits for a disk's node. devtmpfs makes it at once, and udev soon; where there is
// neither, as in a container with a /dev of its own, waitNode makes it.
func (s system) waitNode(ctx context.Context, disk string) (block.DeviceNumber, error) {
	n, err := s.diskNumber(disk)
	if err != nil {
		return n, fmt.Errorf("find %s: %w", disk, err)
	}
	path := s.node(disk)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	patience := 100
	if s.dev != devices {
		patience = 0
	}
	for ; ; patience-- {
		var st unix.Stat_t
		err := unix.Stat(path, &st)
		switch {
		case err == nil && st.Mode&unix.S_IFMT == unix.S_IFBLK && numberOf(st.Rdev) == n:
			return n, nil
		case patience == 0 && errors.Is(err, fs.ErrNotExist):
			if err := unix.Mknod(path, unix.S_IFBLK|0o660, int(unix.Mkdev(n.Major, n.Minor))); err != nil {
				return n, fmt.Errorf("make the node %s: %w", path, err)
			}
		case patience < 0:
			return n, fmt.Errorf("%s is not block device %s", path, n)
		}
		select {
		case <-ctx.Done():
			return n, fmt.Errorf("wait for the node %s: %w", path, ctx.Err())
		case <-tick.C:
		}
	}
}

// ---- the volume's name ----

const newSuffix = "~new" // "~" cannot occur in a volume's name

func linkTo(disk string) string { return "../" + disk }

// expose makes the volume's name lead to a disk, atomically.
func (s system) expose(name block.VolumeName, disk string) error {
	path := s.link(name)
	err := os.MkdirAll(filepath.Dir(path), 0o755)
	if err == nil {
		err = remove(path + newSuffix)
	}
	if err == nil {
		err = os.Symlink(linkTo(disk), path+newSuffix)
	}
	if err == nil {
		err = Announce(s.dev, s.sys, disk, name) // first: what has its name counts as announced
	}
	if err == nil {
		err = os.Rename(path+newSuffix, path)
	}
	if err != nil {
		return fmt.Errorf("expose %s: %w", name, err)
	}
	return nil
}

// Expose makes a name under devDir lead to a disk that another driver serves, as of device-mapper: the first of
// some names that no other device has. If others have all, the error is an ErrExported. chosen is called with
// the name before the disk has it, and may refuse it. A disk keeps its name until somebody removes it, whether
// processes live or die.
func Expose(devDir, sysDir, disk string, names []block.VolumeName, chosen func(block.VolumeName) error) error {
	s := system{dev: devDir, sys: sysDir}
	c, err := s.claimName(names, claimer{
		text: fmt.Sprintf("process %d, for %s", os.Getpid(), disk), owns: func(_ block.VolumeName, d string) bool { return d == disk },
	})
	if err != nil {
		return err
	}
	defer c.release()
	if err := chosen(c.name); err != nil {
		return err
	}
	return s.expose(c.name, disk)
}

// hide removes the name if it leads to the disk; a name that leads to another device stays.
func (s system) hide(name block.VolumeName, disk string) error {
	if to, err := os.Readlink(s.link(name)); err != nil || to != linkTo(disk) {
		return nil
	}
	return errors.Join(Withdraw(s.dev, s.sys, disk), remove(s.link(name)))
}

// remove removes a file, which may be gone already.
func remove(file string) error {
	if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

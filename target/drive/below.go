// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// below are the disks that a disk keeps its data on, by their names in /sys/block:
// those that it maps, and of a loop device the one that its file's file system is on.
func (s sysfs) below(name string, mounts []mountPoint) []string {
	var disks []string
	slaves := filepath.Join("sys/block", name, "slaves")
	for _, slave := range s.names(slaves) {
		disks = append(disks, s.wholeDisk(s.path(slaves, slave)))
	}
	if m, _ := s.backing(name, mounts); m != nil {
		disks = append(disks, s.wholeDisk(s.path("sys/dev/block", m.device)))
	}
	return slices.DeleteFunc(disks, func(d string) bool { return d == "" })
}

// wholeDisk follows a link to the directory of a disk or of a partition of one.
func (s sysfs) wholeDisk(link string) string {
	dir, err := filepath.EvalSymlinks(link)
	if err != nil {
		return "" // a file system without a device, or a device that has just gone
	}
	if _, err := os.Stat(filepath.Join(dir, "partition")); err == nil {
		dir = filepath.Dir(dir)
	}
	return filepath.Base(dir)
}

// backing is the path of a loop device's file and the mount that it is in: nil if
// none has it. A name without attributes of a loop device has no file.
func (s sysfs) backing(name string, mounts []mountPoint) (in *mountPoint, file string) {
	file = s.text("sys/block", name, "loop/backing_file")
	for i, m := range mounts {
		holds := file == m.point || strings.HasPrefix(file, strings.TrimSuffix(m.point, "/")+"/")
		if holds && (in == nil || len(m.point) >= len(in.point)) { // of two at one place the later is seen
			in = &mounts[i]
		}
	}
	return in, file
}

// isLoopElsewhere tells of a loop device whether its file is not one in a file
// system of this machine: to open such a device, or to look at its file, may take
// until another program answers. It may be a volume of the initiator beside us,
// which serves its loop devices through FUSE, and which may wait for this target.
//
// A file that is not found is taken for one of these: of a file system that is
// mounted in no place any more the kernel tells the path within it alone. So is a
// device that is looped to another one, as a kubelet does with raw volumes.
func (s sysfs) isLoopElsewhere(name string, mounts []mountPoint) bool {
	in, file := s.backing(name, mounts)
	switch {
	case file == "":
		return false
	case in == nil || !slices.Contains(localFileSystems, in.fsType):
		return true
	}
	info, err := os.Lstat(s.path(file))
	return err != nil || !info.Mode().IsRegular()
}

// localFileSystems ask nobody but the kernel and its disks for what they hold.
var localFileSystems = []string{
	"bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "ntfs3", "overlay",
	"ramfs", "reiserfs", "rootfs", "tmpfs", "vfat", "xfs", "zfs",
}

// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// below returns the disks on which a disk keeps its data, by their names in /sys/block: those that
// it maps and, for a loop device, the disk of the file system that holds its file.
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

// wholeDisk follows a link to the directory of a disk, or of the disk that a partition is on.
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

// backing returns the path of a loop device's file and the mount that holds it: nil if none does.
// The file is empty if the device is not a loop device.
func (s sysfs) backing(name string, mounts []mountPoint) (in *mountPoint, file string) {
	file = s.text("sys/block", name, "loop/backing_file")
	for i, m := range mounts {
		holds := file == m.point || strings.HasPrefix(file, strings.TrimSuffix(m.point, "/")+"/")
		if holds && (in == nil || len(m.point) >= len(in.point)) { // the later of two at one place is visible
			in = &mounts[i]
		}
	}
	return in, file
}

// isLoopElsewhere reports whether a loop device's file is outside the local file systems of this
// machine. Opening such a device, or even looking at its file, may take until another program
// answers. The device may be a volume of the initiator on this machine, which serves its loop
// devices through FUSE and may itself be waiting for this target.
//
// A file that is not found counts as elsewhere: if its file system is mounted nowhere any more, the
// kernel shows only the path inside it. So does a loop over another device, as a kubelet makes for
// raw volumes.
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

// localFileSystems depend only on the kernel and its disks for their content.
var localFileSystems = []string{
	"bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "ntfs3", "overlay",
	"ramfs", "reiserfs", "rootfs", "tmpfs", "vfat", "xfs", "zfs",
}

// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"regexp"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/csi/mount"
)

// Mount options come from StorageClasses and PersistentVolumes, and reach the kernel on the node,
// so only options known to stay within their volume are accepted. Refused are options that name
// other devices (journal_path, logdev, rtdev), that stop the machine (errors=panic), that ignore
// writes still in the journal (noload, norecovery), and that not all kernels of a cluster support.
var (
	generic = words("defaults rw ro suid nosuid dev nodev exec noexec sync async dirsync " +
		"lazytime nolazytime noatime relatime strictatime nodiratime")
	ofFileSystem = map[string][]string{
		"ext4": words("discard nodiscard barrier nobarrier delalloc nodelalloc auto_da_alloc noauto_da_alloc " +
			"init_itable noinit_itable user_xattr acl quota noquota usrquota grpquota prjquota " +
			"data=ordered data=writeback data=journal errors=continue errors=remount-ro barrier=0 barrier=1 " +
			"commit=N inode_readahead_blks=N stripe=N max_batch_time=N min_batch_time=N journal_ioprio=N max_dir_size_kb=N"),
		"xfs": words("discard nodiscard inode64 inode32 largeio nolargeio swalloc wsync filestreams nouuid noalign " +
			"noquota quota uquota gquota pquota usrquota grpquota prjquota uqnoenforce gqnoenforce pqnoenforce " +
			"logbufs=N logbsize=N allocsize=N sunit=N swidth=N"),
	}
	quantity = regexp.MustCompile(`^[0-9]{1,12}[kKmMgG]?$`)
	selinux  = regexp.MustCompile(`^context="?[A-Za-z0-9_.:,-]+"?$`)
)

func words(s string) []string { return strings.Fields(s) }

// known reports whether an option is accepted for a file system.
func known(fsType, option string) bool {
	if slices.Contains(generic, option) || slices.Contains(ofFileSystem[fsType], option) || selinux.MatchString(option) {
		return true
	}
	key, value, ok := strings.Cut(option, "=")
	return ok && quantity.MatchString(value) && slices.Contains(ofFileSystem[fsType], key+"=N")
}

// mountOptions returns the options for staging a volume. The flags come from a capability; the
// error has code InvalidArgument and names the bad option.
//
// nouuid is for clones, which have the UUID of their origin: xfs refuses to mount both on one node. The
// origin gets it too, since a clone may be there first.
func mountOptions(fsType string, flags []string, readOnly bool) ([]string, error) {
	var options []string
	for _, flag := range flags {
		for _, o := range mount.SplitOptions(flag) {
			if !known(fsType, o) {
				return nil, status.Errorf(codes.InvalidArgument, "volume_capability.mount.mount_flags: %q is not supported for %s", o, fsType)
			}
			if readOnly && o == "rw" {
				return nil, status.Errorf(codes.InvalidArgument, "volume_capability.mount.mount_flags: %q, with an access mode that is read-only", o)
			}
			options = append(options, o)
		}
	}
	if readOnly {
		options = append(options, "ro")
	}
	if fsType == "xfs" {
		options = append(options, "nouuid")
	}
	slices.Sort(options)
	return slices.Compact(options), nil
}

// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"regexp"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Mount options come from StorageClasses and PersistentVolumes, and are given to
// the kernel on the node: only those that are known to stay within their volume
// are. Not served are the ones that name other devices (journal_path, logdev,
// rtdev), that stop the machine (errors=panic), that leave out what is only in the
// journal yet (noload, norecovery), and that a cluster's kernels do not have in
// common.
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

// known tells whether an option may be given to a file system.
func known(fsType, option string) bool {
	if slices.Contains(generic, option) || slices.Contains(ofFileSystem[fsType], option) || selinux.MatchString(option) {
		return true
	}
	key, value, ok := strings.Cut(option, "=")
	return ok && quantity.MatchString(value) && slices.Contains(ofFileSystem[fsType], key+"=N")
}

// mountOptions are those that a volume is staged with. The flags are a
// capability's; the error is of code InvalidArgument and names the one at fault.
//
// nouuid is for clones of one volume on one node, which have one UUID.
func mountOptions(fsType string, flags []string, readOnly bool) ([]string, error) {
	var options []string
	for _, flag := range flags {
		for _, o := range splitOptions(flag) {
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

// telling are the options by which two mounts differ for those who use them, and
// which mountinfo shows whenever they are set. Of others the kernel shows some only
// if they are not its default.
var telling = words("noatime nodiratime nosuid nodev noexec sync dirsync lazytime discard nodelalloc wsync largeio filestreams")

// identity is what must be the same for two requests to be about the same mount.
func identity(options []string) []string {
	var found []string
	for _, o := range options {
		switch {
		case o == "ro", slices.Contains(telling, o):
			found = append(found, o)
		case strings.HasPrefix(o, "context="):
			found = append(found, strings.ReplaceAll(o, `"`, ""))
		}
	}
	slices.Sort(found)
	return slices.Compact(found)
}

// identityOf is that of a mount. The file system's own "ro" is not the mount's: a
// file system goes read-only by itself, after an error.
func identityOf(m mount) []string {
	super := slices.DeleteFunc(slices.Clone(m.super), func(o string) bool { return o == "ro" })
	return identity(append(super, m.options...))
}

// sameOptions tells whether a mount is what the options ask for.
func sameOptions(m mount, options []string) bool {
	return slices.Equal(identityOf(m), identity(options))
}

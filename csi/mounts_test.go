// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"slices"
	"strings"
	"testing"

	"weft.dev/weft/proto/block"
)

// A node whose kubelet's directory is bound elsewhere, and both propagate: what is
// mounted below one shows below the other.
const mountinfo = `
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:5 / /dev rw,nosuid shared:2 - devtmpfs devtmpfs rw,size=4k
31 22 254:0 /nodes/n1/kubelet /var/lib/kubelet rw,relatime shared:1 - ext4 /dev/vda rw
40 31 253:4 / /var/lib/kubelet/plugins/csi/globalmount rw,noatime shared:9 - ext4 /dev/weft/db1 rw,discard
41 22 253:4 / /nodes/n1/kubelet/plugins/csi/globalmount rw,noatime shared:9 - ext4 /dev/weft/db1 rw,discard
42 31 253:4 / /var/lib/kubelet/pods/p1/mount ro,noatime shared:9 - ext4 /dev/weft/db1 rw,discard
43 22 253:4 / /nodes/n1/kubelet/pods/p1/mount ro,noatime shared:9 - ext4 /dev/weft/db1 rw,discard
44 31 253:4 /sub /var/lib/kubelet/pods/p1/subpath rw shared:9 - ext4 /dev/weft/db1 rw
45 31 0:5 /dm-5 /var/lib/kubelet/pods/p2/device rw - devtmpfs devtmpfs rw,size=4k
46 31 253:6 / /var/lib/kubelet/with\040space\134 rw shared:11 master:3 propagate_from:2 - xfs /dev/weft/b rw,context="system_u:object_r:container_file_t:s0:c1,c2",nouuid
47 46 253:7 / /var/lib/kubelet/with\040space\134 rw - xfs /dev/weft/c rw
48 31 0:60 / /var/lib/kubelet/nfs rw - nfs4 server:/a\040b rw
a line that is none
49 31 0:61 / /var/lib/kubelet/fuse rw - fuse.x`

func TestMountinfoIsRead(t *testing.T) {
	all := parseMounts(mountinfo)
	if len(all) != 12 {
		t.Fatalf("%d mounts, want 12", len(all))
	}
	m := all[0]
	for _, o := range all {
		if o.id == 46 {
			m = o
		}
	}
	if m.point != `/var/lib/kubelet/with space\` || m.device != (block.DeviceNumber{Major: 253, Minor: 6}) || m.fsType != "xfs" || m.source != "/dev/weft/b" ||
		!slices.Equal(m.super, []string{"rw", `context="system_u:object_r:container_file_t:s0:c1,c2"`, "nouuid"}) {
		t.Errorf("mount 46 = %+v", m)
	}
}

func TestTheTopmostMountIsSeen(t *testing.T) {
	all := parseMounts(mountinfo)
	if m, ok := all.at(`/var/lib/kubelet/with space\`); !ok || m.id != 47 {
		t.Errorf("seen is %+v, %v, want the one that covers it", m, ok)
	}
	slices.Reverse(all)
	if m, ok := all.at(`/var/lib/kubelet/with space\`); !ok || m.id != 47 {
		t.Errorf("in another order: seen is %+v, %v", m, ok)
	}
	if m, ok := all.at("/var/lib/kubelet/pods"); ok {
		t.Errorf("at a mere directory is %+v", m)
	}
}

func TestCopiesOfAMountCountOnce(t *testing.T) {
	all := parseMounts(mountinfo)
	staged, _ := all.at("/var/lib/kubelet/plugins/csi/globalmount")
	targets := all.fileSystemOn(staged.device, all.place(staged))
	if len(targets) != 1 || targets[0].point != "/var/lib/kubelet/pods/p1/mount" {
		t.Errorf("beside the staging path the volume is on %q, want its one target", targets.points())
	}
	if got := all.fileSystemOn(block.DeviceNumber{Major: 253, Minor: 4}); len(got) != 2 {
		t.Errorf("the file system is on %q, want two places", got.points())
	}
}

func TestOnlyWhatMayBeADeviceNodeIsLookedAt(t *testing.T) {
	var may []string
	for _, m := range parseMounts(mountinfo) {
		if m.mayBeNode() {
			may = append(may, m.point)
		}
	}
	if got := strings.Join(may, " "); got != "/var/lib/kubelet/pods/p2/device" {
		t.Errorf("looked at: %s", got)
	}
	if !(mount{fsType: "tmpfs", root: "/loop1"}).mayBeNode() {
		t.Error("what is bound out of a container's /dev is not looked at")
	}
	for _, fsType := range []string{
		"9p", "beegfs", "ceph", "cifs", "ext4", "fuse.sshfs", "fuseblk", "gfs2", "glusterfs", "gpfs", "lustre",
		"nfs", "nfs4", "ocfs2", "orangefs", "overlay", "smb3", "virtiofs", "wekafs", "xfs",
	} {
		if (mount{fsType: fsType, root: "/dir"}).mayBeNode() {
			t.Errorf("a directory of %s is looked at, whose server may be gone", fsType)
		}
	}
}

func TestMountOptions(t *testing.T) {
	for _, c := range []struct {
		fsType   string
		flags    []string
		readOnly bool
		want     string
	}{
		{"ext4", nil, false, ""},
		{"xfs", nil, false, "nouuid"},
		{"xfs", []string{"noatime", "nouuid", "noatime"}, false, "noatime nouuid"},
		{"ext4", []string{"noatime,commit=30"}, true, "commit=30 noatime ro"},
		{"ext4", nil, true, "ro"},
		{"xfs", []string{"ro", "logbsize=256k"}, true, "logbsize=256k nouuid ro"},
		{"ext4", []string{`context="system_u:object_r:container_file_t:s0:c1,c2"`}, false, `context="system_u:object_r:container_file_t:s0:c1,c2"`},
		{"ext4", []string{"rw"}, true, "InvalidArgument"},
		{"ext4", []string{"noload", "ro"}, true, "InvalidArgument"},
		{"xfs", []string{"norecovery", "ro"}, true, "InvalidArgument"},
		{"ext4", []string{"errors=panic"}, false, "InvalidArgument"},
		{"ext4", []string{"journal_dev=0x801"}, false, "InvalidArgument"},
		{"xfs", []string{"logdev=/dev/sda"}, false, "InvalidArgument"},
		{"xfs", []string{"data=ordered"}, false, "InvalidArgument"},
		{"ext4", []string{"context=x,rootcontext=y"}, false, "InvalidArgument"},
		{"ext4", []string{`context="a\"b"`}, false, "InvalidArgument"},
		{"ext4", []string{"commit=-1"}, false, "InvalidArgument"},
		{"ext4", []string{"bind"}, false, "InvalidArgument"},
	} {
		options, err := mountOptions(c.fsType, c.flags, c.readOnly)
		got := strings.Join(options, " ")
		if err != nil {
			got = "InvalidArgument"
			refused(t, "options", err, 3, "mount_flags")
		}
		if got != c.want {
			t.Errorf("mountOptions(%s, %q, ro %v) = %q (%v), want %q", c.fsType, c.flags, c.readOnly, got, err, c.want)
		}
	}
}

func TestAFileSystemThatWentReadOnlyIsTheSameMount(t *testing.T) {
	m := mount{options: []string{"rw", "noatime"}, super: []string{"ro", "discard"}}
	if !sameOptions(m, []string{"noatime", "discard"}) {
		t.Errorf("identity is %v", identityOf(m))
	}
}

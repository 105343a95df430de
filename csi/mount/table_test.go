// SPDX-License-Identifier: Apache-2.0

package mount

import (
	"slices"
	"strings"
	"testing"

	"weft.dev/weft/proto/block"
)

// A node whose kubelet directory is also bound elsewhere, with propagation both ways: a mount below
// one shows below the other.
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
		if o.ID == 46 {
			m = o
		}
	}
	if m.Point != `/var/lib/kubelet/with space\` || m.Device != (block.DeviceNumber{Major: 253, Minor: 6}) || m.FSType != "xfs" || m.Source != "/dev/weft/b" ||
		!slices.Equal(m.Super, []string{"rw", `context="system_u:object_r:container_file_t:s0:c1,c2"`, "nouuid"}) {
		t.Errorf("mount 46 = %+v", m)
	}
}

func TestTheTopmostMountIsSeen(t *testing.T) {
	all := parseMounts(mountinfo)
	if m, ok := all.At(`/var/lib/kubelet/with space\`); !ok || m.ID != 47 {
		t.Errorf("seen is %+v, %v, want the one that covers it", m, ok)
	}
	slices.Reverse(all)
	if m, ok := all.At(`/var/lib/kubelet/with space\`); !ok || m.ID != 47 {
		t.Errorf("in another order: seen is %+v, %v", m, ok)
	}
	if m, ok := all.At("/var/lib/kubelet/pods"); ok {
		t.Errorf("at a mere directory is %+v", m)
	}
}

func TestCopiesOfAMountCountOnce(t *testing.T) {
	all := parseMounts(mountinfo)
	staged, _ := all.At("/var/lib/kubelet/plugins/csi/globalmount")
	targets := all.FileSystemOn(staged.Device, all.Place(staged))
	if len(targets) != 1 || targets[0].Point != "/var/lib/kubelet/pods/p1/mount" {
		t.Errorf("beside the staging path the volume is on %q, want its one target", targets.Points())
	}
	if got := all.FileSystemOn(block.DeviceNumber{Major: 253, Minor: 4}); len(got) != 2 {
		t.Errorf("the file system is on %q, want two places", got.Points())
	}
}

func TestOnlyWhatMayBeADeviceNodeIsLookedAt(t *testing.T) {
	var may []string
	for _, m := range parseMounts(mountinfo) {
		if m.MayBeNode() {
			may = append(may, m.Point)
		}
	}
	if got := strings.Join(may, " "); got != "/var/lib/kubelet/pods/p2/device" {
		t.Errorf("looked at: %s", got)
	}
	if !(Mount{FSType: "tmpfs", Root: "/loop1"}).MayBeNode() {
		t.Error("what is bound out of a container's /dev is not looked at")
	}
	for _, fsType := range []string{
		"9p", "beegfs", "ceph", "cifs", "ext4", "fuse.sshfs", "fuseblk", "gfs2", "glusterfs", "gpfs", "lustre",
		"nfs", "nfs4", "ocfs2", "orangefs", "overlay", "smb3", "virtiofs", "wekafs", "xfs",
	} {
		if (Mount{FSType: fsType, Root: "/dir"}).MayBeNode() {
			t.Errorf("a directory of %s is looked at, whose server may be gone", fsType)
		}
	}
}

func TestAFileSystemThatWentReadOnlyIsTheSameMount(t *testing.T) {
	m := Mount{Options: []string{"rw", "noatime"}, Super: []string{"ro", "discard"}}
	if !SameOptions(m, []string{"noatime", "discard"}) {
		t.Errorf("identity is %v", IdentityOf(m))
	}
}

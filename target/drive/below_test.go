// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"os"
	"path/filepath"
	"testing"

	"weft.dev/weft/proto/block"
)

// loop makes a loop device over a file of the given name.
func (m machine) loop(name, file string) {
	m.t.Helper()
	m.disk(name, "virtual", map[string]string{"loop/backing_file": file})
}

// on puts a disk on top of another one, or of a partition.
func (m machine) on(name, below string) {
	m.t.Helper()
	target, err := filepath.EvalSymlinks(filepath.Join(m.root, below))
	must(m.t, err)
	m.link(target, filepath.Join("sys/block", name, "slaves", filepath.Base(target)))
}

// Opening one of these may take until another program answers: for ever, if that waits for this
// target.
func TestADeviceThatAnotherProgramServesIsNotOpened(t *testing.T) {
	m := newMachine(t)
	m.file("proc/self/mountinfo", rootMount+`31 27 0:44 / /run/weft/db\0401.fuse rw - fuse.weft weft-db1 rw
32 27 0:45 / /nas rw - nfs4 nas:/export rw
33 27 0:5 /loop1 /var/lib/kubelet/volumeDevices/pvc rw - devtmpfs devtmpfs rw
34 27 7:1 / /srv rw - ext4 /dev/loop1 rw
35 27 0:46 / /twice rw - ext4 /dev/vdb rw
36 35 0:47 / /twice rw - fuse.sshfs host: rw
37 27 259:0 / /over rw - ext4 /dev/loop1p1 rw
`)
	m.loop("loop1", "/run/weft/db 1.fuse/db 1")
	m.files("sys/block/loop1/loop1p1", map[string]string{"partition": "1"})
	m.loop("loop2", "/nas/image")
	m.loop("loop3", "/var/lib/kubelet/volumeDevices/pvc")
	m.loop("loop4", "/srv/image")
	m.loop("loop5", "/twice/image")
	m.loop("loop6", "/over/image")
	m.loop("loop7", "/db1") // in a file system that is mounted nowhere any more
	m.loop("loop8", "/image (deleted)")
	for number, disk := range map[string]string{"7:1": "loop1", "259:0": "loop1/loop1p1"} {
		m.link("../../block/"+disk, "sys/dev/block/"+number)
	}
	for _, file := range []string{"nas/image", "var/lib/kubelet/volumeDevices/pvc", "srv/image", "twice/image", "over/image"} {
		m.file(file, "")
	}
	m.disk("dm-0", "virtual", map[string]string{"dm/name": "vg-on-a-volume"})
	m.on("dm-0", "sys/block/loop1")
	m.disk("md0", "virtual", nil)
	m.on("md0", "sys/block/loop1/loop1p1")
	m.disk("dm-1", "virtual", map[string]string{"dm/name": "weft-1-vol"})
	m.disk("dm-2", "virtual", map[string]string{"dm/name": "vg-on-a-volume-of-the-kernel"})
	m.on("dm-2", "sys/block/dm-1")
	if got := m.scan(); len(got) != 0 {
		t.Errorf("Scan listed %v, want nothing", got)
	}
}

func TestADeviceOverAFileOrADiskOfThisMachineIsListed(t *testing.T) {
	m := newMachine(t)
	m.file("proc/self/mountinfo", rootMount+`31 27 0:44 / /run/weft rw - fuse.weft weft-db1 rw
32 27 8:0 / /srv rw - xfs /dev/sda rw
33 27 0:45 / /over rw - fuse.sshfs host: rw
34 33 0:46 / /over rw - tmpfs tmpfs rw
`)
	m.disk("sda", "virtual", nil)
	m.link("../../block/sda", "sys/dev/block/8:0")
	m.disk("dm-0", "virtual", nil)
	m.on("dm-0", "sys/block/sda")
	all := map[string]string{"loop1": "/image", "loop2": "/srv/image", "loop3": "/over/image", "loop4": "/run/wefty"}
	for name, file := range all {
		m.loop(name, file)
		m.file(file, "")
	}
	got := m.scan()
	for _, name := range []string{"sda", "dm-0", "loop1", "loop2", "loop3", "loop4"} {
		if got["/dev/"+name] == nil {
			t.Errorf("%s is not listed", name)
		}
	}
	must(t, os.Remove(filepath.Join(m.root, "image")))
	m.link("/srv/image", "image")
	if m.scan()["/dev/loop1"] != nil {
		t.Error("a loop device over a link is listed: the kernel tells no links, so its file is another one")
	}
}

// The disk of a partition has the number: /sys/dev/block holds links.
func TestAPartitionAppearsWithItsDisk(t *testing.T) {
	m := newMachine(t)
	m.disk("sda", "virtual", map[string]string{"diskseq": "41"})
	m.files("sys/block/sda/sda2", map[string]string{"partition": "2"})
	for number, at := range map[string]string{"8:0": "sda", "8:2": "sda/sda2"} {
		m.link("../../block/"+at, "sys/dev/block/"+number)
	}
	for minor, want := range map[uint32]string{0: "41", 2: "41", 3: ""} {
		if got := Sequence(m.root, block.DeviceNumber{Major: 8, Minor: minor}); got != want {
			t.Errorf("the device 8:%d appeared as %q, want %q", minor, got, want)
		}
	}
}

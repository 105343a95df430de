// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// machine is a directory that looks like a machine's root.
type machine struct {
	t    *testing.T
	root string
}

const deviceSize = MinSize + 3*block.ExtentSize

// rootMount is a file system on a device that is none of the disks.
const rootMount = "27 1 0:30 / / rw shared:1 - btrfs /dev/vda1 rw\n"

func newMachine(t *testing.T) machine {
	m := machine{t, t.TempDir()}
	m.file("proc/self/mountinfo", rootMount+"22 27 0:21 / /proc rw,relatime shared:5 - proc proc rw\n")
	must(t, os.MkdirAll(filepath.Join(m.root, "sys/block"), 0o755))
	return m
}

func (m machine) file(path, text string) {
	m.t.Helper()
	path = filepath.Join(m.root, path)
	must(m.t, os.MkdirAll(filepath.Dir(path), 0o755))
	must(m.t, os.WriteFile(path, []byte(text), 0o644))
}

// files writes attributes below dir, each with the newline that sysfs adds.
func (m machine) files(dir string, texts map[string]string) {
	m.t.Helper()
	for name, text := range texts {
		m.file(filepath.Join(dir, name), text+"\n")
	}
}

func (m machine) link(target, path string) {
	m.t.Helper()
	path = filepath.Join(m.root, path)
	must(m.t, os.MkdirAll(filepath.Dir(path), 0o755))
	must(m.t, os.Symlink(target, path))
}

// disk makes /sys/block/NAME -> /sys/devices/WHERE/block/NAME and its device file; attributes
// default to those of a blank drive.
func (m machine) disk(name, where string, attributes map[string]string) {
	m.t.Helper()
	dir := filepath.Join("sys/devices", where, "block", name)
	all := map[string]string{
		"size": fmt.Sprint(deviceSize.Sectors()), "ro": "0", "hidden": "0", "dev": "8:0", "queue/logical_block_size": "512",
		"queue/rotational": "0", "queue/write_cache": "write back", "queue/zoned": "none",
	}
	for k, v := range attributes {
		all[k] = v
	}
	m.files(dir, all)
	must(m.t, os.MkdirAll(filepath.Join(m.root, dir, "holders"), 0o755))
	m.link("../"+strings.TrimPrefix(dir, "sys/"), "sys/block/"+name)
	m.medium(name, deviceSize)
}

func (m machine) medium(name string, size block.Size) {
	m.t.Helper()
	m.file("dev/"+name, "")
	must(m.t, os.Truncate(filepath.Join(m.root, "dev", name), int64(size)))
}

// holder makes other hold the disk or partition in dir.
func (m machine) holder(dir, other string) {
	m.t.Helper()
	must(m.t, os.MkdirAll(filepath.Join(m.root, dir, "holders", other), 0o755))
}

func (m machine) scan() map[string]*pb.Device {
	m.t.Helper()
	devices, err := NewInventory(m.root).Scan(m.t.Context())
	must(m.t, err)
	byPath := map[string]*pb.Device{}
	for _, d := range devices {
		byPath[d.Path] = d
	}
	return byPath
}

func TestEachKindOfDeviceIsDescribed(t *testing.T) {
	m := newMachine(t)
	// A PCIe NVMe drive without multipath: device is its controller.
	m.disk("nvme0n1", "pci0000:00/0000:01:00.0/nvme/nvme0", map[string]string{"wwid": "eui.0025", "queue/logical_block_size": "4096"})
	m.files("sys/devices/pci0000:00/0000:01:00.0", map[string]string{"numa_node": "1"})
	m.files("sys/devices/pci0000:00/0000:01:00.0/nvme/nvme0", map[string]string{
		"model": "SAMSUNG MZQL23T8HCLS-00A07           ", "serial": "S64HNE0R501234      ", "transport": "pcie", "numa_node": "1"})
	m.link("../..", "sys/devices/pci0000:00/0000:01:00.0/nvme/nvme0/block/nvme0n1/device")
	// A dual-ported one: device is the subsystem, which links to both controllers.
	m.disk("nvme1n1", "virtual/nvme-subsystem/nvme-subsys1", map[string]string{"wwid": "eui.0026", "queue/write_cache": "write through"})
	m.files("sys/devices/virtual/nvme-subsystem/nvme-subsys1", map[string]string{"model": "DUAL", "serial": "D1"})
	m.link("../..", "sys/devices/virtual/nvme-subsystem/nvme-subsys1/block/nvme1n1/device")
	for _, c := range []string{"nvme1", "nvme2"} {
		m.files("sys/devices/virtual/nvme-subsystem/nvme-subsys1/"+c, map[string]string{"transport": "pcie", "numa_node": "0"})
	}
	// A SCSI disk with its serial in a page of the device.
	m.disk("sda", "pci0000:00/ata1/target0:0:0", map[string]string{"queue/rotational": "1"})
	m.files("sys/devices/pci0000:00/ata1", map[string]string{
		"vendor": "ATA", "model": "ST4000", "wwid": "naa.5000c500", "vpd_pg80": "\x00\x80\x00\x08 ZFN1234trailing"})
	m.link("../../..", "sys/devices/pci0000:00/ata1/target0:0:0/block/sda/device")
	// A virtio disk: the serial is the block device's.
	m.disk("vda", "pci0000:00/virtio1", map[string]string{"serial": "v1"})
	m.files("sys/devices/pci0000:00/virtio1", map[string]string{"vendor": "0x1af4"})
	m.link("../..", "sys/devices/pci0000:00/virtio1/block/vda/device")
	m.disk("loop3", "virtual", map[string]string{"loop/backing_file": "/srv/a file"})
	m.file("srv/a file", "")
	m.disk("cciss!c0d0", "pci0000:00/0000:02:00.0", nil)
	must(t, os.MkdirAll(filepath.Join(m.root, "dev/cciss"), 0o755))
	m.medium("cciss/c0d0", deviceSize)

	size := uint64(deviceSize)
	want := map[string]*pb.Device{
		"/dev/nvme0n1": {Path: "/dev/nvme0n1", Model: "SAMSUNG MZQL23T8HCLS-00A07", Serial: "S64HNE0R501234", Wwid: "eui.0025",
			SizeBytes: size, BlockSize: 4096, NumaNode: 1, VolatileCache: true},
		"/dev/nvme1n1": {Path: "/dev/nvme1n1", Model: "DUAL", Serial: "D1", Wwid: "eui.0026", SizeBytes: size, BlockSize: 512},
		"/dev/sda": {Path: "/dev/sda", Model: "ATA ST4000", Serial: "ZFN1234", Wwid: "naa.5000c500", SizeBytes: size, BlockSize: 512,
			NumaNode: -1, Rotational: true, VolatileCache: true},
		"/dev/vda":        {Path: "/dev/vda", Serial: "v1", SizeBytes: size, BlockSize: 512, NumaNode: -1, VolatileCache: true},
		"/dev/loop3":      {Path: "/dev/loop3", Model: "loop /srv/a file", SizeBytes: size, BlockSize: 512, NumaNode: -1, VolatileCache: true},
		"/dev/cciss/c0d0": {Path: "/dev/cciss/c0d0", SizeBytes: size, BlockSize: 512, NumaNode: -1, VolatileCache: true},
	}
	if diff := cmp.Diff(want, m.scan(), protocmp.Transform()); diff != "" {
		t.Errorf("Scan (-want +got):\n%s", diff)
	}
}

func TestWhatIsNoDriveIsNotListed(t *testing.T) {
	m := newMachine(t)
	for _, transport := range []string{"tcp", "rdma", "fc", "loop"} {
		name := "nvme-" + transport
		dir := "virtual/nvme-subsystem/" + name
		m.disk(name+"n1", dir, nil)
		m.files("sys/devices/"+dir+"/nvme7", map[string]string{"transport": transport})
		m.link("../..", "sys/devices/"+dir+"/block/"+name+"n1/device")
	}
	m.disk("nvme9n1", "virtual/nvme-subsystem/nvme-subsys9", nil) // its controllers are gone
	m.link("../..", "sys/devices/virtual/nvme-subsystem/nvme-subsys9/block/nvme9n1/device")
	m.disk("nvme8c8n1", "virtual/nvme8", map[string]string{"hidden": "1"})
	m.disk("sdz", "virtual/empty", map[string]string{"size": "0"})
	for _, name := range []string{"ram0", "zram0", "sr0", "nbd1", "ublkb3", "fd0"} {
		m.disk(name, "virtual", nil)
	}
	m.disk("dm-0", "virtual", map[string]string{"dm/name": "weft-leg-1"})
	m.disk("dm-1", "virtual", map[string]string{"dm/name": "db1", "dm/uuid": "weft-leg-2"})
	if got := m.scan(); len(got) != 0 {
		t.Errorf("Scan listed %v, want nothing", got)
	}
}

func TestADeviceThatIsInUseIsRefused(t *testing.T) {
	m := newMachine(t)
	m.disk("sda", "virtual/a", map[string]string{"dev": "8:0"})
	m.disk("sdb", "virtual/b", map[string]string{"dev": "8:16"})
	m.disk("sdc", "virtual/c", map[string]string{"dev": "8:32"})
	m.disk("sdd", "virtual/d", map[string]string{"dev": "8:48"})
	m.disk("sde", "virtual/e", map[string]string{"dev": "8:64", "ro": "1"})
	m.disk("sdf", "virtual/f", map[string]string{"dev": "8:80", "queue/zoned": "host-managed"})
	m.disk("sdg", "virtual/g", map[string]string{"dev": "8:96", "size": "2048"})
	m.disk("sdh", "virtual/h", map[string]string{"dev": "8:112"})
	m.disk("sdi", "virtual/i", map[string]string{"dev": "8:128"})
	m.disk("dm-0", "virtual", map[string]string{"dev": "253:0", "dm/name": "vg-root"})
	m.file("proc/self/mountinfo", `28 1 8:0 / /srv/with\040space rw shared:1 - ext4 /dev/sda rw
29 1 0:40 / /pool rw - btrfs /dev/sdb rw
30 1 253:0 / / rw - ext4 /dev/mapper/vg-root rw
`)
	m.link("../dm-0", "dev/mapper/vg-root")
	m.file("proc/swaps", "Filename Type Size Used Priority\n/dev/sdc partition 1 0 -2\n")
	m.holder("sys/block/sdd", "dm-0")
	for _, part := range []string{"1", "2"} {
		m.files("sys/block/sdh/sdh"+part, map[string]string{"partition": part, "size": fmt.Sprint(deviceSize.Sectors()), "dev": "8:11" + part, "ro": "0"})
		m.medium("sdh"+part, deviceSize)
	}
	m.files("sys/block/sdi/sdi1", map[string]string{"partition": "1", "size": fmt.Sprint(deviceSize.Sectors()), "dev": "8:129", "ro": "0"})
	m.medium("sdi1", deviceSize)
	m.holder("sys/block/sdi", "md0")
	got := map[string]string{}
	for path, d := range m.scan() {
		got[path] = d.Refused
		if err := CheckAdd(d, strings.Join(d.Signatures, ", ")); (err == nil) != (d.Refused == "") {
			t.Errorf("CheckAdd(%s) = %v, and it is refused for %q", path, err, d.Refused)
		}
	}
	want := map[string]string{
		"/dev/sda":  "in use: mounted on /srv/with space",
		"/dev/sdb":  "in use: mounted on /pool",
		"/dev/sdc":  "in use: swap",
		"/dev/sdd":  "in use: dm-0 (vg-root)",
		"/dev/sde":  "read-only",
		"/dev/sdf":  "zoned",
		"/dev/sdg":  "too small: 1MiB, at least 512MiB are needed",
		"/dev/sdh":  "has partitions: sdh1, sdh2",
		"/dev/sdh1": "",
		"/dev/sdh2": "",
		"/dev/sdi":  "in use: md0",
		"/dev/sdi1": "its disk is in use: md0",
		"/dev/dm-0": "in use: mounted on /",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("refused (-want +got):\n%s", diff)
	}
}

func TestAPartitionIsNamedAfterItsDisk(t *testing.T) {
	m := newMachine(t)
	m.disk("sda", "virtual/a", map[string]string{"serial": "s1", "wwid": "naa.1", "queue/logical_block_size": "4096"})
	m.files("sys/block/sda/sda2", map[string]string{"partition": "2", "size": fmt.Sprint(deviceSize.Sectors()), "dev": "8:2", "ro": "0"})
	m.medium("sda2", deviceSize)
	want := &pb.Device{Path: "/dev/sda2", Serial: "s1-part2", Wwid: "naa.1-part2", SizeBytes: uint64(deviceSize), BlockSize: 4096,
		NumaNode: -1, VolatileCache: true}
	if diff := cmp.Diff(want, m.scan()["/dev/sda2"], protocmp.Transform()); diff != "" {
		t.Errorf("partition (-want +got):\n%s", diff)
	}
}

func TestADeviceWithContentsIsAddedOnlyByItsName(t *testing.T) {
	m := newMachine(t)
	m.disk("sda", "virtual/a", nil)
	path := filepath.Join(m.root, "dev/sda")
	must(t, patch(path, 0, "XFSB"))
	must(t, patch(path, 108, "data"))
	d := m.scan()["/dev/sda"]
	if want := `it carries xfs "data", which is erased only if forced by exactly that name`; d.Refused != want || d.DriveId != "" {
		t.Errorf("refused for %q, want %q", d.Refused, want)
	}
	for force, ok := range map[string]bool{"": false, "xfs": false, `xfs "data"`: true} {
		if err := CheckAdd(d, force); (err == nil) != ok {
			t.Errorf("CheckAdd(force %q) = %v, want success %v", force, err, ok)
		}
		if ok {
			continue
		}
		if err := FormatPath(path, cluster1, drive1, force); err == nil {
			t.Errorf("FormatPath(force %q) succeeded", force)
		}
	}
	must(t, FormatPath(path, cluster1, drive1, `xfs "data"`))
	opened, err := OpenPath(path, cluster1)
	must(t, err)
	must(t, opened.PutLeg(leg(1, 1, run(0, 2))))
	must(t, opened.ZeroLeg(t.Context(), legID(1), nil))
	must(t, opened.Close())

	// A leg of ours is a legitimate holder of a drive; any other holder is not.
	m.disk("dm-0", "virtual", map[string]string{"dm/name": "weft-leg-1"})
	m.holder("sys/block/sda", "dm-0")
	d = m.scan()["/dev/sda"]
	if d.DriveId != drive1.String() || d.Refused != "in use: dm-0 (weft-leg-1)" {
		t.Errorf("with a leg mapped: drive %q, refused for %q", d.DriveId, d.Refused)
	}
	m.holder("sys/block/sda", "dm-9")
	if d = m.scan()["/dev/sda"]; d.DriveId != "" {
		t.Errorf("with a holder that is not ours: drive %q, want none", d.DriveId)
	}
}

func TestALabelThatCanNotBeUsedIsExplained(t *testing.T) {
	m := newMachine(t)
	m.disk("sda", "virtual/a", nil)
	path := filepath.Join(m.root, "dev/sda")
	must(t, FormatPath(path, cluster1, drive1, ""))
	must(t, os.Truncate(path, int64(deviceSize+block.GiB)))
	d := m.scan()["/dev/sda"]
	if !strings.Contains(d.Refused, ErrOtherSize.Error()) || d.DriveId != "" {
		t.Errorf("grown: refused for %q, drive %q; want %q", d.Refused, d.DriveId, ErrOtherSize)
	}
	must(t, CheckAdd(d, Name(cluster1, drive1)))
	must(t, os.Truncate(path, int64(deviceSize)))
	for _, slot := range slotOffsets(deviceSize) {
		must(t, patch(path, int64(slot)+50, "\xff\xff"))
	}
	d = m.scan()["/dev/sda"]
	if !strings.Contains(d.Refused, ErrCorrupt.Error()) || !cmp.Equal(d.Signatures, []string{"weft drive (corrupt)"}) {
		t.Errorf("corrupt: refused for %q, signatures %q", d.Refused, d.Signatures)
	}
}

// A shelf that stops has more devices than are read at a time.
func TestManyDevicesThatHangDoNotHideTheOthers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		slots, hang, read := make(few, 8), make(chan struct{}), make(chan int, 4)
		defer close(hang)
		for range 16 {
			go slots.do(ctx, func() { <-hang })
		}
		synctest.Wait()
		for i := range 4 {
			go slots.do(ctx, func() { read <- i })
		}
		for range 4 {
			select {
			case <-read:
			case <-ctx.Done():
				t.Fatal("a device that answers was not read while others hang")
			}
		}
		synctest.Wait()
		if len(slots) != 0 {
			t.Errorf("%d calls count after their time, or after they have ended, want none", len(slots))
		}
	})
}

func TestOneDeviceThatHangsDoesNotHideTheOthers(t *testing.T) {
	m := newMachine(t)
	m.disk("sda", "virtual/a", nil)
	m.disk("sdb", "virtual/b", nil)
	inv := NewInventory(m.root)
	m.holder("sys/block/sda", "dm-0") // one of our legs
	inv.begin("/dev/sda")             // an earlier scan is still reading it
	inv.busy["/dev/sda"] = time.Date(2026, 11, 22, 5, 0, 0, 0, time.UTC)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	devices, err := inv.Scan(ctx)
	must(t, err)
	if len(devices) != 2 || devices[0].Unread != "it does not answer, since 2026-11-22T05:00:00Z" || devices[1].Refused+devices[1].Unread != "" {
		t.Errorf("Scan = %v, want sda not read and sdb fit for use", devices)
	}
	inv.end("/dev/sda")
	devices, err = inv.Scan(ctx)
	must(t, err)
	if devices[0].Unread != "" {
		t.Errorf("when it answers again it is not read for %q", devices[0].Unread)
	}
	// A scan that runs out of time reports the devices that it did not reach.
	stopped, stop := context.WithCancel(t.Context())
	stop()
	if devices, err = inv.Scan(stopped); err != nil || len(devices) != 2 {
		t.Errorf("Scan without time = %v, %v; want both devices", devices, err)
	}
}

// patch overwrites bytes of a file.
func patch(path string, offset int64, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = f.WriteAt([]byte(text), offset)
	return err
}

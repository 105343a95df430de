// SPDX-License-Identifier: Apache-2.0

package gpu

import (
	"bytes"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/rogpeppe/go-internal/txtar"
)

var update = flag.Bool("update", false, "rewrite the reports in testdata")

// tree reads a machine of testdata, with some of its files changed; "-" removes one.
func tree(t *testing.T, name string, changes map[string]string) fs.FS {
	t.Helper()
	archive, err := txtar.ParseFile(filepath.Join("testdata", name+".txtar"))
	if err != nil {
		t.Fatal(err)
	}
	for path, text := range changes {
		before := len(archive.Files)
		archive.Files = slices.DeleteFunc(archive.Files, func(f txtar.File) bool { return f.Name == path })
		if text == "-" && len(archive.Files) == before {
			t.Fatalf("%s has no file %s to remove", name, path)
		}
		if text != "-" {
			archive.Files = append(archive.Files, txtar.File{Name: path, Data: []byte(text)})
		}
	}
	root, err := Tree(txtar.Format(archive))
	if err != nil {
		t.Fatal(err)
	}
	return root
}

func read(t *testing.T, root fs.FS, at string) Machine {
	t.Helper()
	m, err := Read(root, at)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// The reports are there to be read: is each true of its tree?
func TestReportsOfMachines(t *testing.T) {
	for _, name := range []string{"dgx", "epyc", "cloud", "nogpu", "weft", "acs"} {
		var got bytes.Buffer
		Of(read(t, tree(t, name, nil), "")).Print(&got)
		file := filepath.Join("testdata", name+".report")
		if *update {
			if err := os.WriteFile(file, got.Bytes(), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		want, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), got.String()); diff != "" {
			t.Errorf("report of %s (-want +got; -update accepts)\n%s", name, diff)
		}
	}
}

const (
	nearDrive  = "sys/devices/pci0000:00/0000:00:01.1/0000:01:00.0/0000:02:08.0"
	dgxGPU     = "sys/devices/pci0000:00/0000:00:01.1/0000:01:00.0/0000:02:00.0/0000:07:00.0"
	mountinfo  = "proc/self/mountinfo"
	hookLess   = "0000000000000000 T pci_p2pdma_add_resource\n"
	withACS    = "hex 4096\n100: 0d 00 01 00 5f 00 1d 00\n"
	epycOption = "proc/driver/nvidia/params"
)

// Each condition of a direct way is taken away in turn.
func TestAVerdictFollowsItsConditions(t *testing.T) {
	for _, c := range []struct {
		what    string
		tree    string
		at      string
		changes map[string]string
		want    Way
		why     string // the beginning of the first reason
	}{
		{"nvidia-fs and a drive at the GPU's switch", "dgx", "/mnt/scratch", nil, Direct, "all conditions of nvidia-fs hold"},
		{"its module is not loaded", "dgx", "/mnt/scratch", map[string]string{"proc/modules": "", "proc/driver/nvidia-fs/version": "-"}, Bounce, "nvidia-fs: the module is not loaded"},
		{"its module is not installed", "dgx", "/mnt/scratch", map[string]string{"proc/modules": "", "proc/driver/nvidia-fs/version": "-", "lib/modules/6.8.0-1018-nvidia/modules.dep": ""}, Bounce, "nvidia-fs: the module is not installed for this kernel"},
		{"the drive's driver is a distribution's", "dgx", "/mnt/scratch", map[string]string{"proc/kallsyms": hookLess}, Bounce, "nvidia-fs: the driver nvme was not built for it"},
		{"nobody may read the symbols", "dgx", "/mnt/scratch", map[string]string{"proc/kallsyms": "-"}, NotKnown, "nvidia-fs: /proc/kallsyms cannot be read"},
		{"the switch redirects", "dgx", "/mnt/scratch", map[string]string{nearDrive + "/config": withACS}, NotKnown, "nvidia-fs: access control (ACS) at 0000:02:08.0 sends the data up"},
		{"nobody may read the switch", "dgx", "/mnt/scratch", map[string]string{nearDrive + "/config": "-"}, NotKnown, "nvidia-fs: whether access control (ACS) is on at 0000:02:08.0"},
		{"nvidia-fs has read the switch", "dgx", "/mnt/scratch", map[string]string{nearDrive + "/config": "-", "proc/driver/nvidia-fs/bridges": "0000:00:01.1\n"}, Direct, "all conditions of nvidia-fs hold"},
		{"nvidia-fs has seen the switch redirect", "dgx", "/mnt/scratch", map[string]string{nearDrive + "/config": "-", "proc/driver/nvidia-fs/bridges": "0000:02:08.0\n"}, NotKnown, "nvidia-fs: access control (ACS) at 0000:02:08.0"},
		{"the IOMMU translates", "dgx", "/mnt/scratch", map[string]string{"sys/kernel/iommu_groups/10/type": "DMA-FQ\n"}, NotKnown, "nvidia-fs: the IOMMU translates"},
		{"it is a virtual machine", "dgx", "/mnt/scratch", map[string]string{"proc/cpuinfo": "vendor_id: GenuineIntel\nflags: fpu hypervisor\n"}, NotKnown, "nvidia-fs: this is a virtual machine"},
		{"the GPU has no driver", "dgx", "/mnt/scratch", map[string]string{dgxGPU + "/driver": "-"}, Bounce, "the GPU has no NVIDIA driver"},
		{"the GPU is lent", "dgx", "/mnt/scratch", map[string]string{dgxGPU + "/driver": "-> ../../vfio-pci\n"}, Bounce, "the GPU is lent to a virtual machine"},
		{"the GPU is for games", "dgx", "/mnt/scratch", map[string]string{"proc/driver/nvidia/gpus/0000:07:00.0/information": "Model: NVIDIA GeForce RTX 4090\n"}, Bounce, "NVIDIA GeForce RTX 4090 has no GPUDirect"},
		{"ext4 writes data late", "dgx", "/mnt/scratch", map[string]string{mountinfo: "105 29 259:1 / /mnt/scratch rw - ext4 /dev/nvme0n1p1 rw,data=writeback\n"}, Bounce, "ext4 at /mnt/scratch is mounted with data=writeback"},
		{"another file system", "dgx", "/mnt/scratch", map[string]string{mountinfo: "105 29 0:44 / /mnt/scratch rw - btrfs /dev/nvme0n1p1 rw\n"}, Bounce, "the file system at /mnt/scratch is btrfs"},
		{"a file that is on no drive", "dgx", "/dev/shm/x", map[string]string{mountinfo: "105 29 0:44 / /dev/shm rw - tmpfs tmpfs rw\n"}, "", ""},
		{"the kernel's own way", "epyc", "/data/model.bin", nil, Direct, "all conditions of P2PDMA hold"},
		{"an old kernel", "epyc", "/data", map[string]string{"proc/sys/kernel/osrelease": "6.1.0-28-amd64\n"}, Bounce, "nvidia-fs: the module is not installed"},
		{"a kernel without it", "epyc", "/data", map[string]string{"proc/kallsyms": ""}, Bounce, "nvidia-fs: the module is not installed"},
		{"an Intel processor between", "epyc", "/data", map[string]string{"proc/cpuinfo": "vendor_id: GenuineIntel\ncpu family: 6\n"}, NotKnown, "P2PDMA: 0000:21:00.0 shares no PCIe switch with the GPU"},
		{"a driver that is closed", "epyc", "/data", map[string]string{"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15\n"}, Bounce, "nvidia-fs: the module is not installed"},
		{"a driver that is old", "epyc", "/data", map[string]string{"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15\n"}, Bounce, "nvidia-fs: the module is not installed"},
		{"a driver without the options", "epyc", "/data", map[string]string{epycOption: "RegistryDwords: \"RMForceStaticBar1=1\"\n"}, Bounce, "nvidia-fs: the module is not installed"},
		{"options that nobody may read", "epyc", "/data", map[string]string{epycOption: "-"}, NotKnown, "P2PDMA: the options of NVIDIA's driver cannot be read"},
		{"a GPU that NVIDIA does not list", "epyc", "/data", map[string]string{"proc/driver/nvidia/gpus/0000:01:00.0/information": "Model: Tesla T4\n"}, NotKnown, "P2PDMA: the GPU \"Tesla T4\" is not in NVIDIA's list"},
		{"cuFile does not ask for it", "epyc", "/data", map[string]string{"etc/cufile.json": "-"}, NotKnown, "P2PDMA: /etc/cufile.json does not ask for it"},
		{"cuFile turns it off", "epyc", "/data", map[string]string{"etc/cufile.json": "\"use_pci_p2pdma\": false,\n"}, NotKnown, "P2PDMA: /etc/cufile.json turns it off"},
		{"multipath is on", "epyc", "/data", map[string]string{"sys/module/nvme_core/parameters/multipath": "Y\n"}, NotKnown, "P2PDMA: NVIDIA supports it only with nvme_core.multipath=N"},
		{"an Arm machine needs no options", "epyc", "/data", map[string]string{"proc/cpuinfo": "CPU implementer: 0x41\n", epycOption: "-"}, NotKnown, "P2PDMA: 0000:21:00.0 shares no PCIe switch"},
		{"a namespace over RDMA, at the GPU's switch", "weft", "/dev/plain", nil, NotKnown, "nvidia-fs: whether it works through NVMe multipath (nvme5n1)"},
		{"a Weft volume of the kernel path", "weft", "/srv/models/llama", nil, Bounce, "a Weft volume on the kernel data path is a device-mapper device (dm-4)"},
		{"a Weft volume of the user-space path", "weft", "/dev/weft/db2", nil, Bounce, "loop0 is a loop device"},
		{"LVM", "acs", "/dev/mapper/vg0-scratch", nil, Bounce, "dm-0 (vg0-scratch) is a device-mapper device"},
		{"blanks in a mount point", "acs", "/scratch space/file", nil, Bounce, "ext4 at /scratch space is mounted with data=writeback"},
	} {
		m, err := Read(tree(t, c.tree, c.changes), c.at)
		if c.want == "" {
			if err == nil {
				t.Errorf("%s: read as %+v, want an error", c.what, m.Paths)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", c.what, err)
			continue
		}
		got := Judge(m)[0]
		if got.Way != c.want || !strings.HasPrefix(got.Reasons[0].Why, c.why) {
			t.Errorf("%s: %s because of %q, want %s because of %q", c.what, got.Way, got.Reasons, c.want, c.why)
		}
	}
}

// What excludes P2PDMA is the second list of reasons where nvidia-fs is excluded too.
func TestTheReasonsOfBothWaysAreGiven(t *testing.T) {
	for what, c := range map[string]struct {
		path, text, want string
	}{
		"old kernel":    {"proc/sys/kernel/osrelease", "6.1.0-28-amd64\n", "P2PDMA: kernel 6.1.0-28-amd64 is older than 6.2"},
		"no support":    {"proc/kallsyms", "", "P2PDMA: kernel 6.11.0-19-generic was built without CONFIG_PCI_P2PDMA"},
		"closed driver": {"proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15\n", "P2PDMA: NVIDIA's driver 570.86.15 is the closed one"},
		"old driver":    {"proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  550.54.15\n", "P2PDMA: NVIDIA's driver 550.54.15 is older than 565"},
		"no options":    {epycOption, "RegistryDwords: \"RMForceStaticBar1=1\"\n", "P2PDMA: NVIDIA's driver runs without RmForceDisableIomapWC=1"},
	} {
		got := Judge(read(t, tree(t, "epyc", map[string]string{c.path: c.text}), "/data"))[0]
		if !slices.ContainsFunc(got.Reasons, func(r Reason) bool { return r.Why == c.want && r.Next != "" }) {
			t.Errorf("%s: %q, want %q and what to do", what, got.Reasons, c.want)
		}
	}
}

// md, by its level: parity never, the others by mode and kernel.
func TestVerdictsOnMD(t *testing.T) {
	const md = "sys/devices/virtual/block/md0"
	for _, c := range []struct {
		level, release string
		want           Way
		why            string
	}{
		{"raid5", "6.8.0", Bounce, "md0 is md raid5: the processor works on the data"},
		{"raid0", "6.8.0", NotKnown, "nvidia-fs: whether it works through md raid0 (md0) depends on the release"},
		{"raid1", "6.8.0", NotKnown, "nvidia-fs: whether it works through md raid1 (md0) is not documented"},
	} {
		m := read(t, tree(t, "dgx", map[string]string{
			"proc/sys/kernel/osrelease": c.release + "\n",
			"dev/md0":                   "", "sys/class/block/md0": "-> ../../devices/virtual/block/md0\n", md + "/md/level": c.level + "\n",
			md + "/slaves/nvme0n1": "-> ../../../../pci0000:00/0000:00:01.1/0000:01:00.0/0000:02:08.0/0000:08:00.0/nvme/nvme0/nvme0n1\n",
		}), "/dev/md0")
		got := Judge(m)[0]
		if got.Way != c.want || got.Reasons[0].Why != c.why {
			t.Errorf("md %s on %s: %s because of %q, want %s because of %q", c.level, c.release, got.Way, got.Reasons, c.want, c.why)
		}
	}
}

// The NIC of a connection is that of its interface, else that to which the routes lead.
func TestTheNICOfAConnection(t *testing.T) {
	const address = "sys/devices/virtual/nvme-fabrics/ctl/nvme5/address"
	for text, want := range map[string]string{
		"traddr=203.0.113.13,trsvcid=4420,host_iface=ens5np0":    "0000:38:00.0",
		"traddr=203.0.113.13,trsvcid=4420":                       "0000:9b:00.0",
		"traddr=198.51.100.13,trsvcid=4420":                      "0000:38:00.0",
		"traddr=192.0.2.13,trsvcid=4420":                         "",
		"traddr=192.0.2.13,trsvcid=4420,src_addr=198.51.100.2":   "0000:38:00.0",
		"traddr=192.0.2.13,trsvcid=4420,host_traddr=203.0.113.2": "0000:9b:00.0",
		"traddr=2001:db8::13,trsvcid=4420":                       "0000:9b:00.0",
	} {
		m := read(t, tree(t, "weft", map[string]string{
			address: text + "\n",
			"proc/net/ipv6_route": "20010db8000000000000000000000000 40 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 00000001 00000000 00000001 ens11np0\n" +
				"fe800000000000000000000000000000 40 00000000000000000000000000000000 00 00000000000000000000000000000000 00000100 00000001 00000000 00000001 ens5np0\n",
		}), "/dev/plain")
		layers := m.Paths[0].Top.all()
		if got := layers[len(layers)-1]; got.PCI != want {
			t.Errorf("connection %s goes through %q, want %q", text, got.PCI, want)
		}
	}
}

func TestNearestFirst(t *testing.T) {
	m := read(t, tree(t, "dgx", nil), "")
	for i, want := range [][]string{0: {"mlx5_0", "mlx5_1"}, 2: {"mlx5_4", "mlx5_5"}} {
		if want == nil {
			continue
		}
		got := m.Nearest(m.GPUs[i])
		if got[0].Name() != want[0] || got[1].Name() != want[1] || len(got) != 5 {
			t.Errorf("nearest to GPU %d: %v, want %v first", i, got, want)
		}
	}
}

// The networks of the nearest cards, not of all; a card without a network is no reason to take a far
// one.
func TestNetworksNearToAGPU(t *testing.T) {
	for _, c := range []struct{ tree, gpu, want, err string }{
		{"weft", "0", "[203.0.113.0/24]", ""},
		{"weft", "0000:9a:00.0", "[203.0.113.0/24]", ""},
		{"epyc", "0", "[198.51.100.0/24]", ""},
		{"weft", "1", "[]", "this machine has 1 GPUs"},
		{"dgx", "0", "[]", "no route leads through the card nearest to it, mlx5_0"},
		{"nogpu", "0", "[]", "this machine has 0 GPUs"},
	} {
		got, err := read(t, tree(t, c.tree, nil), "").NetworksNear(c.gpu)
		if fmt.Sprint(got) != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("networks near to GPU %s of %s: %v, %v; want %s, %q", c.gpu, c.tree, got, err, c.want, c.err)
		}
	}
}

// A recording is all that a reading needs.
func TestARecordingIsReadAlike(t *testing.T) {
	for name, at := range map[string]string{"dgx": "/mnt/scratch", "epyc": "", "cloud": "", "nogpu": "", "weft": "/srv/models", "acs": "/scratch space"} {
		root := tree(t, name, nil)
		archive, err := Record(root, at)
		if err != nil {
			t.Fatal(err)
		}
		again, err := Tree(archive)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(Of(read(t, root, at)), Of(read(t, again, at))); diff != "" {
			t.Errorf("%s, read from its recording (-machine +recording)\n%s", name, diff)
		}
	}
}

func TestARecordingHasNoLinesThatNobodyReads(t *testing.T) {
	root := tree(t, "dgx", map[string]string{
		"proc/kallsyms":   "0 T secret_symbol\n0 T pci_p2pdma_add_resource\n",
		"etc/cufile.json": "\"token\": \"secret\",\n\"use_pci_p2pdma\": true\n",
		mountinfo:         "1 0 259:1 / / rw - ext4 /dev/nvme0n1p1 rw\n2 1 0:9 / /srv/secret rw - nfs secret:/ rw\n",
		"proc/modules":    "secret 1 0 - Live 0x0\n",
	})
	archive, err := Record(root, "/mnt")
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(archive, []byte("secret")) {
		t.Errorf("the recording has lines that the reading did not need:\n%s", archive)
	}
}

func TestTreesThatAreNone(t *testing.T) {
	for _, text := range []string{"-- ../x --\n", "-- a --\nhex many\n", "-- a --\nhex 4\n000: 01 02 03 04 05\n", "-- a --\nhex 4\nzz: 01\n", "-- a --\nhex 999999999\n"} {
		if _, err := Tree([]byte(text)); err == nil {
			t.Errorf("Tree(%q) gave no error", text)
		}
	}
}

// A chain of capabilities that leads in a circle, or out of the space, ends.
func TestAccessControlOfDamagedSpaces(t *testing.T) {
	circle := make([]byte, 4096)
	copy(circle[0x100:], []byte{1, 0, 0x02, 0x10}) // the next one is at 0x100 again
	outside := make([]byte, 0x104)
	copy(outside[0x100:], []byte{1, 0, 0xf2, 0xff})
	for name, c := range map[string]struct {
		config []byte
		want   Answer
	}{"none": {nil, Unknown}, "short": {make([]byte, 64), Unknown}, "empty": {make([]byte, 4096), No}, "circle": {circle, No}, "outside": {outside, No}} {
		if got := acs(c.config); got != c.want {
			t.Errorf("acs(%s) = %s, want %s", name, got, c.want)
		}
	}
}

// This machine's own files are only read.
func TestThisMachineCanBeRead(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("reads Linux's files")
	}
	root := os.DirFS("/")
	m := read(t, root, "")
	archive, err := Record(root, "")
	if err != nil {
		t.Fatal(err)
	}
	again, err := Tree(archive)
	if err != nil {
		t.Fatal(err)
	}
	Of(m).Print(&bytes.Buffer{})
	// Links and speeds may change between two readings; the devices do not.
	if got := read(t, again, ""); len(got.GPUs) != len(m.GPUs) || len(got.NICs) != len(m.NICs) || len(got.Drives) != len(m.Drives) || got.Kernel.Release != m.Kernel.Release {
		t.Errorf("this machine has %d GPUs, %d NICs and %d drives, and its recording %d, %d and %d", len(m.GPUs), len(m.NICs), len(m.Drives), len(got.GPUs), len(got.NICs), len(got.Drives))
	}
	t.Logf("%d bytes recorded, %d GPUs, %d NICs, %d drives", len(archive), len(m.GPUs), len(m.NICs), len(m.Drives))
}

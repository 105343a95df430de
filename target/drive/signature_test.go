// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"weft.dev/weft/proto/block"
)

// put is some bytes at an offset, counted from the end if it is negative.
type put struct {
	offset int64
	text   string
}

func TestEachSignatureIsRecognised(t *testing.T) {
	t.Parallel()
	const mib = 1 << 20
	const md1 = "\xfc\x4e\x2b\xa9\x01\x00\x00\x00"
	const uberblock = "\x0c\xb1\xba\x00\x00\x00\x00\x00"
	entry := "\x00\x02\x03\x00\x83\x00\x00\x00\x00\x08\x00\x00\x00\x10\x00\x00"
	for _, test := range []struct {
		want string
		puts []put
	}{
		{"", nil},
		{"data", []put{{700, "x"}}},
		{"data", []put{{mib - 1, "x"}}},
		{"data", []put{{-mib, "x"}}},
		{"data", []put{{-1, "x"}}},
		{"", []put{{mib, "x"}}}, // this place is not read
		{"ext2", []put{{1080, "\x53\xef"}}},
		{`ext2 "my disk"`, []put{{1080, "\x53\xef"}, {1024 + 120, "my disk"}, {1024 + 96, "\x02"}, {1024 + 100, "\x03"}}},
		{"ext3", []put{{1080, "\x53\xef"}, {1024 + 92, "\x04"}}},
		{"ext4", []put{{1080, "\x53\xef"}, {1024 + 92, "\x04"}, {1024 + 96, "\x42"}}},
		{"ext4", []put{{1080, "\x53\xef"}, {1024 + 100, "\x08"}}},
		{"jbd", []put{{1080, "\x53\xef"}, {1024 + 96, "\x08"}}},
		{"xfs", []put{{0, "XFSB"}}},
		{`xfs "data, \"x\""`, []put{{0, "XFSB"}, {108, "data, \"x\""}}},
		{`btrfs "pool"`, []put{{65536 + 64, "_BHRfS_M"}, {65536 + 0x12b, "pool"}}},
		{`swap "s1"`, []put{{4086, "SWAPSPACE2"}, {1052, "s1"}}},
		{"swap", []put{{65536 - 10, "SWAPSPACE2"}}},
		{"swap", []put{{4086, "SWAP-SPACE"}}},
		{"LVM2_member", []put{{512, "LABELONE"}, {536, "LVM2 001"}}},
		{"LVM2_member", []put{{24, "LVM2 001"}}},
		{`linux_raid_member "host:0"`, []put{{4096, md1}, {4096 + 32, "host:0"}}},
		{"linux_raid_member", []put{{0, md1}}},
		{"linux_raid_member", []put{{-8192, md1}}},
		{"linux_raid_member", []put{{-65536, "\xfc\x4e\x2b\xa9"}}},
		{"linux_raid_member", []put{{-65536, "\xa9\x2b\x4e\xfc"}}},
		{"gpt", []put{{512, "EFI PART"}}},
		{"gpt", []put{{4096, "EFI PART"}}},
		{"gpt", []put{{-512, "EFI PART"}}},
		{"gpt", []put{{-4096, "EFI PART"}}},
		{"gpt", []put{{512, "EFI PART"}, {510, "\x55\xaa"}, {446, entry}}}, // with its protective MBR
		{"dos", []put{{510, "\x55\xaa"}, {446, entry}}},
		{"dos", []put{{510, "\x55\xaa"}, {446 + 48, "\x80" + entry[1:]}}},
		{"data", []put{{510, "\x55\xaa"}}},                                        // no partition
		{"data", []put{{510, "\x55\xaa"}, {446, "\x77" + entry[1:]}}},             // code, no table
		{"dos, ext2", []put{{510, "\x55\xaa"}, {446, entry}, {1080, "\x53\xef"}}}, // both are named, sorted
		{"crypto_LUKS", []put{{0, "LUKS\xba\xbe\x00\x02"}}},
		{"crypto_LUKS", []put{{0x4000, "SKUL\xba\xbe\x00\x02"}}},
		{"crypto_LUKS", []put{{0x80000, "SKUL\xba\xbe\x00\x02"}}},
		{"zfs_member", []put{{128 << 10, uberblock}}},
		{"zfs_member", []put{{384<<10 + 127<<10, uberblock}}},
		{"zfs_member", []put{{-512<<10 + 132<<10, uberblock}}},
		{"zfs_member", []put{{-256<<10 + 132<<10, "\x00\x00\x00\x00\x00\xba\xb1\x0c"}}},
		{"bcache", []put{{4096 + 24, bcacheMagic}}},
		{"bcachefs", []put{{4096 + 24, bcachefsMagic}}},
		{"drbd", []put{{-4096 + 60, "\x83\x74\x02\x6b"}}},
		{"drbd", []put{{-4096 + 60, "\x83\x74\x02\x6d"}}},
		{`vfat "EFI"`, []put{{82, "FAT32   "}, {71, "EFI        "}, {510, "\x55\xaa"}}},
		{"vfat", []put{{54, "FAT16   "}, {510, "\x55\xaa"}}},
		{"ntfs", []put{{3, "NTFS    "}, {510, "\x55\xaa"}, {446, entry}}},
		{"exfat", []put{{3, "EXFAT   "}, {510, "\x55\xaa"}}},
		{`iso9660 "DEBIAN"`, []put{{32769, "CD001"}, {32808, "DEBIAN   "}}},
		{"squashfs", []put{{0, "hsqs"}}},
		{"f2fs", []put{{1024, "\x10\x20\xf5\xf2"}}},
		{"ceph_bluestore", []put{{0, "bluestore block device\n"}}},
		{"isw_raid_member", []put{{-1024, "Intel Raid ISM Cfg Sig. 1.3.00"}}},
		{"ddf_raid_member", []put{{-512, "\xde\x11\xde\x11"}}},
		{"stratis", []put{{516, "!Stra0tis\x86\xff\x02^\x41rh"}}},
	} {
		const size = 16 * mib
		image := make([]byte, size)
		for _, p := range test.puts {
			if p.offset < 0 {
				p.offset += size
			}
			copy(image[p.offset:], p.text)
		}
		got, err := Signatures(strings.NewReader(string(image)), size)
		if err != nil || strings.Join(got, ", ") != test.want {
			t.Errorf("Signatures(%v) = %q, %v; want %q", test.puts, got, err, test.want)
		}
	}
}

func TestSignaturesOfSmallAndOddDevicesDoNotReachBeyondThem(t *testing.T) {
	for _, size := range []int{1, 511, 512, 4096, 65536, 65537, 1<<20 - 1, 1<<20 + 1, 3<<20 + 12345} {
		for _, fill := range []byte{0, 0x5a} {
			image := strings.Repeat(string([]byte{fill}), size)
			got, err := Signatures(strings.NewReader(image), block.Size(size))
			want := fill != 0
			if err != nil || (len(got) > 0) != want {
				t.Errorf("Signatures of %d bytes of %#x = %q, %v", size, fill, got, err)
			}
		}
	}
}

// The output of this machine's tools is recognized; after a forced format nothing of it is left,
// for blkid either.
func TestWhatToolsMakeIsRecognised(t *testing.T) {
	for _, test := range []struct {
		want string
		tool []string
	}{
		{`ext4 "data"`, []string{"mkfs.ext4", "-q", "-F", "-L", "data"}},
		{`ext3 "data"`, []string{"mkfs.ext3", "-q", "-F", "-L", "data"}},
		{`ext2 "data"`, []string{"mkfs.ext2", "-q", "-F", "-L", "data"}},
		{`xfs "data"`, []string{"mkfs.xfs", "-q", "-f", "-L", "data"}},
		{`btrfs "data"`, []string{"mkfs.btrfs", "-q", "-f", "-L", "data"}},
		{`swap "data"`, []string{"mkswap", "-q", "-L", "data"}},
		{`vfat "DATA"`, []string{"mkfs.vfat", "-n", "DATA"}},
		{"gpt", []string{"sgdisk", "-o"}},
	} {
		t.Run(test.tool[0], func(t *testing.T) {
			tool, err := exec.LookPath(test.tool[0])
			if err != nil {
				t.Skipf("no %s on this machine", test.tool[0])
			}
			path := filepath.Join(t.TempDir(), "image")
			must(t, os.WriteFile(path, nil, 0o600))
			must(t, os.Truncate(path, int64(MinSize+block.ExtentSize)))
			if out, err := exec.CommandContext(t.Context(), tool, append(test.tool[1:], path)...).CombinedOutput(); err != nil {
				t.Fatalf("%v: %v\n%s", test.tool, err, out)
			}
			m, err := OpenDevice(path, Exclusive)
			must(t, err)
			defer m.Close()
			got, err := Signatures(m, m.Size())
			if err != nil || !cmp.Equal(got, []string{test.want}) {
				t.Fatalf("Signatures = %q, %v; want %q", got, err, test.want)
			}
			must(t, Format(m, cluster1, drive1, test.want))
			must(t, mustOpen(t, m).Erase())
			if got, err := Signatures(m, m.Size()); err != nil || len(got) != 0 {
				t.Errorf("Signatures after Erase = %q, %v; want none", got, err)
			}
			blkid, err := exec.LookPath("blkid")
			if err != nil {
				t.Skip("no blkid on this machine")
			}
			if out, err := exec.CommandContext(t.Context(), blkid, "-p", path).CombinedOutput(); err == nil || len(out) > 0 {
				t.Errorf("blkid still finds %s", out)
			}
		})
	}
}

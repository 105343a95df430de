// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"weft.dev/weft/proto/block"
)

// Signatures names what a device of size bytes carries: empty for a blank one. Names are those of
// blkid, with a file system's own label in quotes; one of our labels is "weft drive <id> of cluster
// <id>". Unknown content is "data" if it is in the first or last MiB, or "data at 3GiB" if it was
// found between them.
func Signatures(r io.ReaderAt, size block.Size) ([]string, error) {
	c, err := examine(r, size)
	if err != nil {
		return nil, err
	}
	return c.signatures(), nil
}

// contents is what a device carries.
type contents struct {
	copies  copies
	label   *Label   // the newest good one
	err     error    // why there is no label, or why it cannot be used
	foreign []string // signatures of others, without "data"
	data    bool     // one of the ends holds something that is not ours
	inside  int64    // offset of data between the ends of a device that looks blank otherwise; 0: none
}

func examine(r io.ReaderAt, size block.Size) (contents, error) {
	c := contents{err: ErrNoLabel}
	if size >= MinSize {
		c.copies, c.label, c.err = readLabel(r, size)
	}
	e, err := readEnds(r, int64(size))
	if err != nil && c.err == nil {
		return c, nil // one of our drives, with a bad sector in a spare copy
	}
	if err != nil {
		return c, err
	}
	// A payload of ours may look like anything. The first slot begins at the start of the device;
	// we write nothing into the last MiB of the device (labelMax).
	switch first := &c.copies[0]; {
	case first.label != nil:
		clear(e.head[:min(first.length(), len(e.head))])
	case errors.Is(first.err, ErrCorrupt), errors.Is(first.err, ErrNewer):
		clear(e.head)
	}
	c.foreign = e.signatures()
	c.data = !blank(e.head) || !blank(e.tail)
	if !c.data && len(c.foreign) == 0 && errors.Is(c.err, ErrNoLabel) && size >= MinSize && !wasErased(r, size) {
		c.inside, err = dataInside(r, size)
	}
	return c, err
}

func (c contents) signatures() []string {
	var names []string
	switch {
	case errors.Is(c.err, ErrNoLabel):
	case errors.Is(c.err, ErrNewer):
		names = append(names, "weft drive (newer format)")
	case c.label == nil:
		names = append(names, "weft drive (corrupt)")
	case errors.Is(c.err, ErrUnfinished):
		names = append(names, c.label.name()+" (unfinished)")
	default:
		names = append(names, c.label.name())
	}
	names = append(names, c.foreign...)
	if len(names) == 0 && c.data {
		names = append(names, "data")
	}
	if c.inside > 0 {
		names = append(names, fmt.Sprintf("data at %v", block.Size(c.inside)))
	}
	return names
}

// name is the label's name for operators, who have to repeat it to erase the drive.
func (l *Label) name() string { return Name(l.Cluster, l.Drive) }

// Name is the signature of a cluster's drive.
func Name(cluster block.ClusterID, id block.DriveID) string {
	return fmt.Sprintf("weft drive %v of cluster %v", id, cluster)
}

// window is how much of each end is read. All signatures known here lie within it.
const window = int64(block.MiB)

// ends are the first and the last MiB of a device.
type ends struct {
	head, tail []byte
	size       int64
}

func readEnds(r io.ReaderAt, size int64) (ends, error) {
	n := min(window, size)
	e := ends{head: make([]byte, n), tail: make([]byte, n), size: size}
	if _, err := r.ReadAt(e.head, 0); err != nil {
		return ends{}, fmt.Errorf("read the first %d bytes: %w", n, err)
	}
	if _, err := r.ReadAt(e.tail, size-n); err != nil {
		return ends{}, fmt.Errorf("read the last %d bytes: %w", n, err)
	}
	return e, nil
}

// at returns n bytes from offset, counted from the end if negative; n zeroes if they lie outside
// what was read.
func (e ends) at(offset int64, n int) []byte {
	if offset < 0 {
		offset += e.size
	}
	tail := e.size - int64(len(e.tail))
	switch {
	case offset >= 0 && offset+int64(n) <= int64(len(e.head)):
		return e.head[offset:][:n]
	case offset >= tail && offset+int64(n) <= e.size:
		return e.tail[offset-tail:][:n]
	}
	return make([]byte, n)
}

func (e ends) has(offset int64, text string) bool {
	return string(e.at(offset, len(text))) == text
}

func (e ends) le32(offset int64) uint32 { return binary.LittleEndian.Uint32(e.at(offset, 4)) }

// text returns a label field, up to the first NUL, with surrounding blanks removed.
func (e ends) text(offset int64, n int) string {
	b, _, _ := bytes.Cut(e.at(offset, n), []byte{0})
	return strings.TrimSpace(string(b))
}

// fixed are the signatures that are a few bytes at a known place: the offset of the magic from the
// beginning or, if negative, from the end, and the place of the user's own label, if there is one.
// Offsets are those of the named on-disk structs.
var fixed = []struct {
	name    string
	magic   string
	offsets []int64
	labelAt int64
	labelN  int
}{
	{"xfs", "XFSB", []int64{0}, 108, 12},                            // xfs_dsb: sb_magicnum, sb_fname
	{"btrfs", "_BHRfS_M", []int64{0x10040}, 0x1012b, 256},           // btrfs_super_block: magic, label
	{"swap", "SWAPSPACE2", pageEnds, 1052, 16},                      // union swap_header, in the last 10 bytes of a page of 4 to 64 KiB
	{"swap", "SWAP-SPACE", pageEnds, 0, 0},                          //
	{"LVM2_member", "LVM2 001", []int64{24, 536, 1048, 1560}, 0, 0}, // label_header.type, in one of the first 4 sectors
	{"gpt", "EFI PART", []int64{512, 4096, -512, -4096}, 0, 0},      // gpt_header.signature, at the second and at the last block
	{"crypto_LUKS", "LUKS\xba\xbe", []int64{0}, 0, 0},               // luks_phdr, luks2_phdr: magic
	{"crypto_LUKS", "SKUL\xba\xbe", luks2Seconds, 0, 0},             // the second header of LUKS2
	{"bcache", bcacheMagic, []int64{4096 + 24}, 0, 0},               // cache_sb.magic
	{"bcachefs", bcachefsMagic, []int64{4096 + 24}, 0, 0},           // bch_sb.magic
	{"drbd", "\x83\x74\x02\x6b", []int64{-4096 + 60}, 0, 0},         // md_on_disk_08.magic, internal meta data
	{"drbd", "\x83\x74\x02\x6c", []int64{-4096 + 60}, 0, 0},         // the same, in use
	{"drbd", "\x83\x74\x02\x6d", []int64{-4096 + 60}, 0, 0},         // meta_data_on_disk_9.magic
	{"ntfs", "NTFS    ", []int64{3}, 0, 0},                          // boot sector: OEM id
	{"exfat", "EXFAT   ", []int64{3}, 0, 0},                         // boot sector: FileSystemName
	{"vfat", "FAT32   ", []int64{82}, 71, 11},                       // BS_FilSysType, BS_VolLab of FAT32
	{"vfat", "FAT1", []int64{54}, 43, 11},                           // the same of FAT12 and FAT16
	{"iso9660", "CD001", []int64{32769}, 32808, 32},                 // volume descriptor: identifier, volume id
	{"squashfs", "hsqs", []int64{0}, 0, 0},                          // squashfs_super_block.s_magic
	{"f2fs", "\x10\x20\xf5\xf2", []int64{1024}, 0, 0},               // f2fs_super_block.magic
	{"ceph_bluestore", "bluestore block device", []int64{0}, 0, 0},  // bluestore bdev label
	{"isw_raid_member", "Intel Raid ISM Cfg Sig. ", isw, 0, 0},      // imsm_super.sig, in the last but one block
	{"ddf_raid_member", "\xde\x11\xde\x11", []int64{-512}, 0, 0},    // SNIA DDF anchor header
	{"stratis", "!Stra0tis\x86\xff\x02^\x41rh", []int64{516}, 0, 0}, // static header
}

var (
	pageEnds     = []int64{4<<10 - 10, 8<<10 - 10, 16<<10 - 10, 32<<10 - 10, 64<<10 - 10}
	luks2Seconds = []int64{0x4000, 0x8000, 0x10000, 0x20000, 0x40000, 0x80000}
	isw          = []int64{-1024, -8192}
)

const (
	bcacheMagic   = "\xc6\x85\x73\xf6\x4e\x1a\x45\xca\x82\x65\xf5\x7f\x48\xba\x6d\x81"
	bcachefsMagic = "\xc6\x85\x73\xf6\x66\xce\x90\xa9\xd9\x6a\x60\xcf\x80\x3d\xf7\xef"
	mdMagic       = 0xa92b4efc
)

// signatures names everything found, each name once.
func (e ends) signatures() []string {
	var found []string
	add := func(name, label string) {
		known := func(s string) bool { return s == name || strings.HasPrefix(s, name+" ") }
		if name == "" || slices.ContainsFunc(found, known) {
			return
		}
		if label != "" {
			name = fmt.Sprintf("%s %q", name, label)
		}
		found = append(found, name)
	}
	for _, s := range fixed {
		if slices.ContainsFunc(s.offsets, func(o int64) bool { return e.has(o, s.magic) }) {
			add(s.name, e.text(s.labelAt, s.labelN))
		}
	}
	add(e.ext())
	add(e.md())
	add(e.zfs(), "")
	// A boot sector of FAT or NTFS ends like an MBR, and has code in place of the table.
	if !slices.ContainsFunc(found, func(s string) bool {
		return s == "gpt" || s == "ntfs" || s == "exfat" || strings.HasPrefix(s, "vfat")
	}) {
		add(e.mbr(), "")
	}
	slices.Sort(found)
	return found
}

// ext tells ext2, 3 and 4 apart as the kernel does: by features that the older one does not know
// (ext4_super_block at 1024: s_magic 56, features 92 to 103, s_volume_name 120).
func (e ends) ext() (name, label string) {
	const sb = 1024
	if !e.has(sb+56, "\x53\xef") {
		return "", ""
	}
	compat, incompat, roCompat := e.le32(sb+92), e.le32(sb+96), e.le32(sb+100)
	const (
		hasJournal  = 0x4
		journalDev  = 0x8
		ext3Incompa = 0x2 | 0x4 | 0x10 // filetype, recover, meta_bg
		ext3RO      = 0x1 | 0x2 | 0x4  // sparse_super, large_file, btree_dir
	)
	label = e.text(sb+120, 16)
	switch {
	case incompat&journalDev != 0:
		return "jbd", label
	case incompat&^ext3Incompa != 0 || roCompat&^ext3RO != 0:
		return "ext4", label
	case compat&hasJournal != 0:
		return "ext3", label
	}
	return "ext2", label
}

// md finds a superblock of md: version 1.1 at 0, 1.2 at 4 KiB, 1.0 at 8 KiB
// before the end (mdp_superblock_1: magic, major_version 4, set_name 32), 0.90
// at 64 KiB before the end in either byte order (mdp_super_t).
func (e ends) md() (name, label string) {
	for _, offset := range []int64{0, 4096, e.size&^0xfff - 8192} {
		if e.le32(offset) == mdMagic && e.le32(offset+4) == 1 {
			return "linux_raid_member", e.text(offset+32, 32)
		}
	}
	old := e.size&^0xffff - 0x10000
	if e.le32(old) == mdMagic || binary.BigEndian.Uint32(e.at(old, 4)) == mdMagic {
		return "linux_raid_member", ""
	}
	return "", ""
}

// zfs looks for an uberblock in the second half of the four vdev labels, 256 KiB
// each, two at each end (uberblock.ub_magic, in either byte order).
func (e ends) zfs() string {
	end := e.size &^ 0x3ffff
	for _, label := range []int64{0, 256 << 10, end - 512<<10, end - 256<<10} {
		for i := range int64(128) {
			offset := label + 128<<10 + i<<10
			if e.has(offset, "\x0c\xb1\xba\x00\x00\x00\x00\x00") || e.has(offset, "\x00\x00\x00\x00\x00\xba\xb1\x0c") {
				return "zfs_member"
			}
		}
	}
	return ""
}

// mbr is a partition table with at least one entry: 4 of 16 bytes from 446, each
// with a flag of 0 or 0x80, a type at 4 and a number of sectors at 12.
func (e ends) mbr() string {
	if !e.has(510, "\x55\xaa") {
		return ""
	}
	used := false
	for i := range int64(4) {
		entry := e.at(446+16*i, 16)
		if entry[0]&0x7f != 0 {
			return ""
		}
		used = used || entry[4] != 0 && binary.LittleEndian.Uint32(entry[12:]) != 0
	}
	if !used {
		return ""
	}
	return "dos"
}

// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// When a file system may be made on a volume.
//
// The volume manager keeps what was made (Volume.formatted), in two steps around
// mkfs, and no file system is mounted before the second:
//
//	""  ──►  "formatting ext4"  ──► mkfs ──►  "ext4"  ──►  mount
//
// The device is read past the page cache at both ends. An error there ends all: a
// path that comes and goes must not look like an empty device (blkid's exit code is
// the same for both). Then:
//
//	recorded           what the device holds                        done
//	nothing            zeroes at both ends, and blkid finds nothing  mkfs
//	nothing            the file system asked for                     recorded, mounted
//	formatting F       the same zeroes                               mkfs
//	formatting F       F of our making, never mounted                mkfs
//	formatting F       what nobody knows: an mkfs that was cut off   mkfs
//	formatting F       any other F                                   recorded, mounted
//	F                  F                                             mounted
//	raw                the file system asked for                     recorded, mounted
//	any                anything else                                 refused, naming it
//
// "raw" is recorded before a raw device is given to anybody who may write to it: by
// NodeStageVolume, and by the manager where somebody attaches a volume by hand. Its
// data may be anywhere, so ends that are zeroes say nothing; who knows that it is
// empty takes the record back (weft volume set NAME --formatted none).
//
// Our making is told by its UUID, which is the volume's id. What stands behind
// "formatting" holds nothing of a user's, since it was never mounted: so a crash at
// any point neither formats data nor leaves a volume that cannot be used.
const (
	formatting = "formatting " // volmgr/cluster.Formatting
	rawDevice  = "raw"         // volmgr/cluster.Raw
)

// endSize is how much of each end of a device is looked at. All signatures that
// blkid knows are there: the farthest are ZFS's, in the first 512 KiB and the last.
const endSize = 1 << 20

// superblock is what the start of a device says of a file system.
type superblock struct {
	fsType  string
	uuid    string
	bytes   uint64 // how large the file system is
	mounted bool   // it has been mounted, or it cannot be told
}

// parseSuperblock reads the first 4 KiB or more of a device; ok is false if there
// is neither an ext4 nor an xfs that its kernel would take.
func parseSuperblock(p []byte) (s superblock, ok bool) {
	if len(p) < 4096 {
		return s, false
	}
	if s, ok := parseXFS(p); ok {
		return s, true
	}
	return parseExt4(p[1024:])
}

// parseExt4 reads the superblock of ext2, 3 and 4 (Documentation/filesystems/ext4).
func parseExt4(p []byte) (s superblock, ok bool) {
	le := binary.LittleEndian
	if le.Uint16(p[0x38:]) != 0xef53 || le.Uint32(p[0x18:]) > 6 {
		return s, false
	}
	blocks := uint64(le.Uint32(p[0x4:]))
	if incompatible := le.Uint32(p[0x60:]); incompatible&0x80 != 0 { // 64bit
		blocks |= uint64(le.Uint32(p[0x150:])) << 32
	}
	return superblock{
		fsType: "ext4", uuid: uuidText(p[0x68:0x78]), bytes: blocks << (10 + le.Uint32(p[0x18:])),
		mounted: le.Uint32(p[0x2c:]) != 0 || le.Uint16(p[0x34:]) != 0, // s_mtime, s_mnt_count
	}, true
}

// parseXFS reads the primary superblock of xfs. mkfs.xfs marks it as in progress
// and takes the mark away last; the kernel mounts none that is marked.
func parseXFS(p []byte) (s superblock, ok bool) {
	be := binary.BigEndian
	if !bytes.Equal(p[:4], []byte("XFSB")) || p[126] != 0 {
		return s, false
	}
	return superblock{
		fsType: "xfs", uuid: uuidText(p[32:48]), bytes: uint64(be.Uint32(p[4:])) * be.Uint64(p[8:]),
		mounted: true,
	}, true
}

func uuidText(p []byte) string {
	return fmt.Sprintf("%x-%x-%x-%x-%x", p[:4], p[4:6], p[6:8], p[8:10], p[10:16])
}

// evidence is what a device was seen to hold.
type evidence struct {
	size  uint64
	zero  bool // both ends are
	super *superblock
	names []string // what blkid calls what it found: "ext4", "gpt", "LVM2_member"
}

// look reads a device's ends and asks blkid. Any error means that nothing is known.
func look(k kernel, d disk) (e evidence, err error) {
	if e.size, err = d.Size(); err != nil {
		return e, err
	}
	if e.size == 0 || e.size%4096 != 0 {
		return e, fmt.Errorf("device %s has %d bytes", d.Number(), e.size)
	}
	start := make([]byte, min(endSize, e.size))
	end := make([]byte, len(start))
	if err := d.ReadDirect(start, 0); err != nil {
		return e, err
	}
	if err := d.ReadDirect(end, int64(e.size)-int64(len(end))); err != nil {
		return e, err
	}
	e.zero = allZero(start) && allZero(end)
	if s, ok := parseSuperblock(start); ok {
		e.super = &s
	}
	found, err := k.Run(d, "blkid", "-p", "-o", "export", "{}")
	if err != nil {
		return e, err
	}
	e.names, err = parseBlkid(found)
	return e, err
}

func allZero(p []byte) bool { return !slices.ContainsFunc(p, func(b byte) bool { return b != 0 }) }

// parseBlkid reads what blkid -p -o export says (blkid(8)).
func parseBlkid(r result) (names []string, err error) {
	switch r.code {
	case 0:
		for line := range strings.Lines(r.output) {
			key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
			if key == "TYPE" || key == "PTTYPE" {
				names = append(names, value)
			}
		}
		return names, nil
	case 2:
		return nil, nil // nothing, or an error: not believed alone
	case 8:
		return []string{"several contradicting signatures"}, nil
	}
	return nil, fmt.Errorf("blkid ended with code %d: %s", r.code, strings.TrimSpace(r.output))
}

// plan is what is to be done before a volume is mounted.
type plan struct {
	fsType string
	format bool
	fresh  bool // the device has never been written
}

// decide is the table above. The file system asked for may be empty: then it is the
// one that is there, or ext4. The error is of code FailedPrecondition.
func decide(volume *pb.Volume, asked string, e evidence) (plan, error) {
	recorded, begun := volume.GetFormatted(), false
	anything := recorded == rawDevice
	if anything {
		recorded = ""
	}
	if rest, ok := strings.CutPrefix(recorded, formatting); ok {
		recorded, begun = rest, true
	}
	p := plan{fsType: asked}
	if p.fsType == "" {
		p.fsType = cmp.Or(recorded, e.fsType(), defaultFSType)
	}
	refuse := func(format string, args ...any) (plan, error) {
		return plan{}, status.Errorf(codes.FailedPrecondition, "volume %q: %s", volume.GetName(), fmt.Sprintf(format, args...))
	}
	if recorded != "" && recorded != p.fsType {
		return refuse("%s was requested, but the volume has %s", p.fsType, recorded)
	}
	if foreign := e.foreign(); foreign != "" {
		return refuse("%s was requested, but the device holds %s: it is neither mounted nor formatted", p.fsType, foreign)
	}
	blank := e.zero && len(e.names) == 0
	switch fs := e.fsType(); {
	case fs != "" && fs != p.fsType:
		return refuse("%s was requested, but the device holds %s", p.fsType, fs)
	case fs != "" && begun && e.super.uuid == volume.GetId() && !e.super.mounted:
		p.format = true
	case fs != "":
	case recorded != "" && !begun && blank:
		return refuse("%s was made on it, but the device reads as empty: it is not formatted again", recorded)
	case recorded != "" && !begun:
		return refuse("%s was made on it, but the device holds something that is not a file system", recorded)
	case anything:
		return refuse("it was used as a raw device without a recognizable file system and may hold data anywhere: it is not formatted; "+
			"if nothing on it is needed, detach it and run: weft volume set %s --formatted none", volume.GetName())
	case blank:
		// At its first epoch nobody has had it before.
		p.format, p.fresh = true, recorded == "" && volume.GetEpoch() <= 1
	case begun:
		p.format = true
	default:
		return refuse("the device holds data that is not a file system: it is not formatted")
	}
	return p, nil
}

const defaultFSType = "ext4"

// fsType is the file system that is there, of those that are served; "" if none.
func (e evidence) fsType() string {
	if e.super == nil {
		return ""
	}
	return e.super.fsType
}

// foreign names what is there and is not ours to touch; "" if nothing is.
func (e evidence) foreign() string {
	var names []string
	for _, name := range e.names {
		served := name == "ext4" || name == "xfs"
		// An mkfs that was cut off may have left what blkid takes for its result.
		if !served {
			names = append(names, name)
		}
	}
	return strings.Join(names, ", ")
}

// mkfs is the program that makes a file system, and its arguments. Fresh says that
// the volume was never written; e2fs is the version of e2fsprogs.
//
// Nothing is discarded first: new legs read as zeroes and hold no space to give
// back, and a discard of the whole volume would pass through every leg. The geometry
// of the stripes is told, since a volume's device may not show it (a loop device
// does not), so that allocations begin on a new column.
func mkfs(fsType string, volume *pb.Volume, fresh bool, e2fs version) (program string, args []string) {
	chunk, stripes := volume.GetLayout().GetChunkBytes(), uint64(volume.GetLayout().GetStripes())
	if fsType == "xfs" {
		args = []string{"-q", "-f", "-K", "-m", "uuid=" + volume.GetId()}
		switch {
		case volume.GetSizeBytes() < stripedXFS:
			args = append(args, "-d", "noalign")
		case stripes > 1 && chunk > 0:
			args = append(args, "-d", fmt.Sprintf("su=%d,sw=%d", chunk, stripes))
		}
		return "mkfs.xfs", append(args, "{}")
	}
	extended := []string{"nodiscard"}
	if stripes > 1 && chunk > 0 {
		stride := chunk / 4096
		extended = append(extended, fmt.Sprintf("stride=%d", stride), fmt.Sprintf("stripe_width=%d", stride*stripes))
	}
	// The tables of inodes are 1/64 of the volume. Zeroing them at once takes minutes,
	// and by the kernel after the mount (lazy) it is still traffic to every leg; on a
	// volume that was never written they are zero already.
	if fresh && e2fs.atLeast(1, 47) {
		extended = append(extended, "assume_storage_prezeroed=1")
	} else {
		extended = append(extended, "lazy_itable_init=1", "lazy_journal_init=0")
	}
	// Blocks of 4096 also on small volumes, which stride counts in and which may grow.
	// No blocks for root alone: that is for the disk that the system runs from.
	args = []string{"-q", "-F", "-b", "4096", "-m", "0", "-U", volume.GetId(), "-E", strings.Join(extended, ",")}
	if e2fs.atLeast(1, 47) {
		// Nodes with Linux 5.15 could not mount it writable after a crash elsewhere.
		args = append(args, "-O", "^orphan_file")
	}
	return "mkfs.ext4", append(args, "{}")
}

// stripedXFS is the smallest size at which xfs is told of stripes, its device's own
// word of them included. With stripes it has 16 allocation groups or more, and on a
// smaller volume its log of 64 MiB fits in none.
const stripedXFS = uint64(block.GiB)

// version is a program's.
type version struct{ major, minor int }

func (v version) atLeast(major, minor int) bool {
	return v.major > major || v.major == major && v.minor >= minor
}

// parseE2fsVersion reads "mke2fs 1.47.0 (5-Feb-2023)"; zero if it is anything else.
func parseE2fsVersion(text string) (v version) {
	if _, err := fmt.Sscanf(text, "mke2fs %d.%d", &v.major, &v.minor); err != nil {
		return version{}
	}
	return v
}

// checked says what e2fsck -p has come to (e2fsck(8), EXIT CODE).
func checked(r result) error {
	text := strings.TrimSpace(r.output)
	switch {
	case r.code&^3 == 0: // clean, or repaired; that a reboot is wanted is for a root file system
		return nil
	case r.code&4 != 0:
		return status.Errorf(codes.FailedPrecondition, "the file system has errors that need manual repair (e2fsck): %s", text)
	case r.code&8 != 0, r.code&32 != 0:
		return status.Errorf(codes.Unavailable, "e2fsck failed, code %d: %s", r.code, text)
	}
	return status.Errorf(codes.Internal, "e2fsck ended with code %d: %s", r.code, text)
}

// needsGrowing tells whether a device has at least a block more than its file system.
func (s superblock) needsGrowing(size uint64) bool { return size >= s.bytes+uint64(4*block.KiB) }

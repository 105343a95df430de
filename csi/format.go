// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"cmp"
	"fmt"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/csi/mount"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// When a file system may be made on a volume.
//
// The volume manager records the file system (Volume.formatted) in two steps, before and after
// mkfs, and nothing is mounted before the second:
//
//	""  ──►  "formatting ext4"  ──► mkfs ──►  "ext4"  ──►  mount
//
// Both ends of the device are read past the page cache. A read error ends the call: a path that
// comes and goes must not look like an empty device (blkid's exit code is the same for both). Then:
//
//	recorded           what the device holds                        done
//	nothing            zeroes at both ends, and blkid finds nothing  mkfs
//	nothing            the file system asked for                     recorded, mounted
//	formatting F       the same zeroes                               mkfs
//	formatting F       F of our making, never mounted                mkfs
//	formatting F       unknown data: an mkfs that was cut off       mkfs
//	formatting F       any other F                                   recorded, mounted
//	F                  F                                             mounted
//	raw                the file system asked for                     recorded, mounted
//	any                anything else                                 refused, naming it
//
// "raw" is recorded before a raw device becomes writable for anyone: by NodeStageVolume, or by the
// manager when an operator attaches a volume by hand. Its data may be anywhere, so zeroes at the
// ends prove nothing. An operator who knows that the device is empty can clear the record (weft
// volume set NAME --formatted none).
//
// A file system made by this driver has the volume's id as its UUID. One recorded as "formatting"
// holds no user data, since it was never mounted. So after a crash at any point no data is
// formatted, and the volume stays usable.
const (
	formatting = "formatting " // volmgr/cluster.Formatting
	rawDevice  = "raw"         // volmgr/cluster.Raw
)

// plan is what to do before a volume is mounted.
type plan struct {
	fsType string
	format bool
	fresh  bool // the device was never written
}

// decide is the table above. If asked is empty, it stands for the existing file system, or for
// ext4. The error has code FailedPrecondition.
//
// Branches: the rows of the table, to be read side by side.
func decide(volume *pb.Volume, asked string, e mount.Contents) (plan, error) {
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
		p.fsType = cmp.Or(recorded, e.FSType(), defaultFSType)
	}
	refuse := func(format string, args ...any) (plan, error) {
		return plan{}, status.Errorf(codes.FailedPrecondition, "volume %q: %s", volume.GetName(), fmt.Sprintf(format, args...))
	}
	if recorded != "" && recorded != p.fsType {
		return refuse("%s was requested, but the volume has %s", p.fsType, recorded)
	}
	if foreign := e.Foreign(); foreign != "" {
		return refuse("%s was requested, but the device holds %s: it is neither mounted nor formatted", p.fsType, foreign)
	}
	blank := e.Zero && len(e.Names) == 0
	switch fs := e.FSType(); {
	case fs != "" && fs != p.fsType:
		return refuse("%s was requested, but the device holds %s", p.fsType, fs)
	case fs != "" && begun && e.Super.UUID == volume.GetId() && !e.Super.Mounted:
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
		// At its first epoch no other node has had it.
		p.format, p.fresh = true, recorded == "" && volume.GetEpoch() <= 1
	case begun:
		p.format = true
	default:
		return refuse("the device holds data that is not a file system: it is not formatted")
	}
	return p, nil
}

var defaultFSType = block.PropertyFileSystem.Default

// mkfs returns the program that makes a file system, and its arguments. fresh says that the volume
// was never written; e2fs is the version of e2fsprogs.
//
// Nothing is discarded first: new legs read as zeroes and hold no space to give back, and a discard
// of the whole volume would go to every leg. The stripe geometry is passed explicitly, since a
// volume's device may not show it (a loop device does not), so that allocations begin on a new
// column.
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
	// The inode tables take 1/64 of the volume. Zeroing them at once takes minutes; lazy zeroing by
	// the kernel after the mount is still traffic to every leg. On a volume that was never written
	// they are zero already.
	if fresh && e2fs.atLeast(1, 47) {
		extended = append(extended, "assume_storage_prezeroed=1")
	} else {
		extended = append(extended, "lazy_itable_init=1", "lazy_journal_init=0")
	}
	// 4096-byte blocks also on small volumes: stride counts in them, and the volume may grow. No
	// blocks reserved for root: those are for system disks.
	args = []string{"-q", "-F", "-b", "4096", "-m", "0", "-U", volume.GetId(), "-E", strings.Join(extended, ",")}
	if e2fs.atLeast(1, 47) {
		// Nodes with Linux 5.15 could not mount it writable after a crash on another node.
		args = append(args, "-O", "^orphan_file")
	}
	return "mkfs.ext4", append(args, "{}")
}

// stripedXFS is the smallest size at which xfs uses a stripe geometry, including the one that its
// device reports. With stripes it has 16 allocation groups or more, and on a smaller volume none of
// them has room for its log of 64 MiB.
const stripedXFS = uint64(block.GiB)

// version is a program's version.
type version struct{ major, minor int }

func (v version) atLeast(major, minor int) bool {
	return v.major > major || v.major == major && v.minor >= minor
}

// parseE2fsVersion reads "mke2fs 1.47.0 (5-Feb-2023)"; zero for any other text.
func parseE2fsVersion(text string) (v version) {
	if _, err := fmt.Sscanf(text, "mke2fs %d.%d", &v.major, &v.minor); err != nil {
		return version{}
	}
	return v
}

// checked interprets the exit code of e2fsck -p (e2fsck(8), EXIT CODE).
func checked(r mount.Result) error {
	text := strings.TrimSpace(r.Output)
	switch {
	case r.Code&^3 == 0: // clean, or repaired; the request to reboot concerns only a root file system
		return nil
	case r.Code&4 != 0:
		return status.Errorf(codes.FailedPrecondition, "the file system has errors that need manual repair (e2fsck): %s", text)
	case r.Code&8 != 0, r.Code&32 != 0:
		return status.Errorf(codes.Unavailable, "e2fsck failed, code %d: %s", r.Code, text)
	}
	return status.Errorf(codes.Internal, "e2fsck ended with code %d: %s", r.Code, text)
}

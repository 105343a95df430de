// SPDX-License-Identifier: Apache-2.0

package mount

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"

	"weft.dev/weft/proto/block"
)

// endSize is how much of each end of a device is read. It holds all signatures that blkid knows:
// the outermost are ZFS's, in the first 512 KiB and the last.
const endSize = 1 << 20

// Superblock is what the start of a device says about a file system.
type Superblock struct {
	FSType  string
	UUID    string
	Bytes   uint64 // how large the file system is
	Mounted bool   // it has been mounted, or this is unknown
}

// ParseSuperblock reads the first 4 KiB or more of a device; ok is false if they hold neither an
// ext4 nor an xfs that the kernel would mount.
func ParseSuperblock(p []byte) (s Superblock, ok bool) {
	if len(p) < 4096 {
		return s, false
	}
	if s, ok := parseXFS(p); ok {
		return s, true
	}
	return parseExt4(p[1024:])
}

// parseExt4 reads the superblock of ext2, 3 and 4 (Documentation/filesystems/ext4).
func parseExt4(p []byte) (s Superblock, ok bool) {
	le := binary.LittleEndian
	if le.Uint16(p[0x38:]) != 0xef53 || le.Uint32(p[0x18:]) > 6 {
		return s, false
	}
	blocks := uint64(le.Uint32(p[0x4:]))
	if incompatible := le.Uint32(p[0x60:]); incompatible&0x80 != 0 { // 64bit
		blocks |= uint64(le.Uint32(p[0x150:])) << 32
	}
	return Superblock{
		FSType: "ext4", UUID: uuidText(p[0x68:0x78]), Bytes: blocks << (10 + le.Uint32(p[0x18:])),
		Mounted: le.Uint32(p[0x2c:]) != 0 || le.Uint16(p[0x34:]) != 0, // s_mtime, s_mnt_count
	}, true
}

// parseXFS reads the primary superblock of xfs. mkfs.xfs marks it as in progress and removes the
// mark last; the kernel refuses to mount a marked one.
func parseXFS(p []byte) (s Superblock, ok bool) {
	be := binary.BigEndian
	if !bytes.Equal(p[:4], []byte("XFSB")) || p[126] != 0 {
		return s, false
	}
	return Superblock{
		FSType: "xfs", UUID: uuidText(p[32:48]), Bytes: uint64(be.Uint32(p[4:])) * be.Uint64(p[8:]),
		Mounted: true,
	}, true
}

func uuidText(p []byte) string {
	return fmt.Sprintf("%x-%x-%x-%x-%x", p[:4], p[4:6], p[6:8], p[8:10], p[10:16])
}

// Contents is what was found on a device.
type Contents struct {
	Size  uint64
	Zero  bool // both ends are
	Super *Superblock
	Names []string // blkid's names for what it found: "ext4", "gpt", "LVM2_member"
}

// Inspect reads a device's ends and asks blkid. After an error the content is unknown.
func Inspect(k Kernel, d Disk) (e Contents, err error) {
	if e.Size, err = d.Size(); err != nil {
		return e, err
	}
	if e.Size == 0 || e.Size%4096 != 0 {
		return e, fmt.Errorf("device %s has %d bytes", d.Number(), e.Size)
	}
	start := make([]byte, min(endSize, e.Size))
	end := make([]byte, len(start))
	if err := d.ReadDirect(start, 0); err != nil {
		return e, err
	}
	if err := d.ReadDirect(end, int64(e.Size)-int64(len(end))); err != nil {
		return e, err
	}
	e.Zero = allZero(start) && allZero(end)
	if s, ok := ParseSuperblock(start); ok {
		e.Super = &s
	}
	found, err := k.Run(d, "blkid", "-p", "-o", "export", "{}")
	if err != nil {
		return e, err
	}
	e.Names, err = parseBlkid(found)
	return e, err
}

func allZero(p []byte) bool { return !slices.ContainsFunc(p, func(b byte) bool { return b != 0 }) }

// parseBlkid reads the output of blkid -p -o export (blkid(8)).
func parseBlkid(r Result) (names []string, err error) {
	switch r.Code {
	case 0:
		for line := range strings.Lines(r.Output) {
			key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
			if key == "TYPE" || key == "PTTYPE" {
				names = append(names, value)
			}
		}
		return names, nil
	case 2:
		return nil, nil // nothing found, or an error: not trusted alone
	case 8:
		return []string{"several contradicting signatures"}, nil
	}
	return nil, fmt.Errorf("blkid ended with code %d: %s", r.Code, strings.TrimSpace(r.Output))
}

// FSType is the file system on the device, if it is a supported one; "" if there is none.
func (e Contents) FSType() string {
	if e.Super == nil {
		return ""
	}
	return e.Super.FSType
}

// Foreign names the content that is not ours to touch; "" if there is none.
func (e Contents) Foreign() string {
	var names []string
	for _, name := range e.Names {
		served := name == "ext4" || name == "xfs"
		// After an interrupted mkfs, blkid may already report its file system.
		if !served {
			names = append(names, name)
		}
	}
	return strings.Join(names, ", ")
}

// NeedsGrowing reports whether a device is larger than its file system by at least a block.
func (s Superblock) NeedsGrowing(size uint64) bool { return size >= s.Bytes+uint64(4*block.KiB) }

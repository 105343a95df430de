// SPDX-License-Identifier: Apache-2.0

package mirror

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
	"slices"

	"weft.dev/weft/proto/block"
)

// LogDeviceSize is the size of the device that holds a column's dirty log. It is far more
// than any log needs, so that a volume can grow; the file below is sparse.
const LogDeviceSize = block.MiB

// ErrLog means that the bytes are not a dirty log. The caller must then treat all
// regions as dirty.
var ErrLog = errors.New("not a dirty log")

// The "disk" log of device-mapper (drivers/md/dm-log.c, struct log_header_disk) has a
// little-endian header and, from sector 2 on, one bit per region: the lowest bit of the
// lowest byte first, 1 for clean. The format has not changed since 2.6.
const (
	logMagic   = 0x4D695272 // "MiRr"
	logVersion = 2
	logBits    = 2 * 512
)

// LogImage is a dirty log: it says which regions of a mirror's legs may differ. The zero
// value has no regions; use [CleanLog] or [DirtyLog].
type LogImage struct {
	regions uint64
	clean   []uint64 // bits beyond regions are 0
}

// maxRegions is the number of regions that fit on a log device.
const maxRegions = uint64(LogDeviceSize-logBits) * 8

// CleanLog returns a log of the given number of regions, none of them dirty.
func CleanLog(regions uint64) LogImage {
	l := DirtyLog(regions)
	for i := range l.clean {
		l.clean[i] = ^uint64(0)
	}
	if tail := regions % 64; tail != 0 {
		l.clean[len(l.clean)-1] = 1<<tail - 1
	}
	return l
}

// DirtyLog returns a log of the given number of regions, all of them dirty.
func DirtyLog(regions uint64) LogImage {
	return LogImage{regions, make([]uint64, (regions+63)/64)}
}

// Regions returns the number of regions in l.
func (l LogImage) Regions() uint64 { return l.regions }

// Dirty reports whether a region is dirty. A region outside l counts as dirty.
func (l LogImage) Dirty(region uint64) bool {
	return region >= l.regions || l.clean[region/64]&(1<<(region%64)) == 0
}

// Mark marks a region dirty. It changes l and all copies of it.
func (l LogImage) Mark(region uint64) {
	if region < l.regions {
		l.clean[region/64] &^= 1 << (region % 64)
	}
}

// Unmark marks a region clean. It changes l and all copies of it.
func (l LogImage) Unmark(region uint64) {
	if region < l.regions {
		l.clean[region/64] |= 1 << (region % 64)
	}
}

// Clone returns a copy of l that shares nothing with it.
func (l LogImage) Clone() LogImage { return LogImage{l.regions, slices.Clone(l.clean)} }

// Grow returns l with more regions. The new ones are clean.
func (l LogImage) Grow(regions uint64) LogImage {
	if regions <= l.regions {
		return l
	}
	grown := CleanLog(regions)
	for i := range l.regions {
		if l.Dirty(i) {
			grown.Mark(i)
		}
	}
	return grown
}

// CountDirty returns the number of dirty regions.
func (l LogImage) CountDirty() uint64 {
	n := l.regions
	for _, w := range l.clean {
		n -= uint64(bits.OnesCount64(w))
	}
	return n
}

// AllClean reports whether no region is dirty.
func (l LogImage) AllClean() bool { return l.CountDirty() == 0 }

// AllDirty reports whether every region is dirty.
func (l LogImage) AllDirty() bool { return l.CountDirty() == l.regions }

// Equal reports whether l and m have the same regions and the same of them are dirty.
func (l LogImage) Equal(m LogImage) bool {
	return l.regions == m.regions && slices.Equal(l.clean, m.clean)
}

// Merge returns a log in which the regions are dirty that are dirty in l or m. Logs of
// different sizes are an error.
func (l LogImage) Merge(m LogImage) (LogImage, error) {
	if l.regions != m.regions {
		return LogImage{}, fmt.Errorf("merge logs of %d and %d regions", l.regions, m.regions)
	}
	merged := l.Clone()
	for i, w := range m.clean {
		merged.clean[i] &= w
	}
	return merged, nil
}

// Both returns a log in which the regions are dirty that are dirty in l and in m. Logs of different
// sizes are an error.
func (l LogImage) Both(m LogImage) (LogImage, error) {
	if l.regions != m.regions {
		return LogImage{}, fmt.Errorf("compare logs of %d and %d regions", l.regions, m.regions)
	}
	both := l.Clone()
	for i, w := range m.clean {
		both.clean[i] |= w
	}
	return both, nil
}

// DirtyWords has a bit for each region, 64 to a word: 1 for dirty.
func (l LogImage) DirtyWords() []uint64 {
	words := make([]uint64, len(l.clean))
	for i, w := range l.clean {
		words[i] = ^w
	}
	if tail := l.regions % 64; tail != 0 {
		words[len(words)-1] &= 1<<tail - 1
	}
	return words
}

// LogSize is how many bytes at the start of the log device hold a log.
func LogSize(regions uint64) int { return logBits + 8*int((regions+63)/64) }

// Bytes returns the image as it is stored at the start of the log device, padded to a
// multiple of 4 KiB.
func (l LogImage) Bytes() []byte {
	size := block.Size(logBits + 8*len(l.clean)).RoundUp(4 * block.KiB)
	b := make([]byte, size)
	binary.LittleEndian.PutUint32(b[0:], logMagic)
	binary.LittleEndian.PutUint32(b[4:], logVersion)
	binary.LittleEndian.PutUint64(b[8:], l.regions)
	for i, w := range l.clean {
		binary.LittleEndian.PutUint64(b[logBits+8*i:], w)
	}
	return b
}

// ParseLog reads an image and ignores the bytes after it. Errors wrap [ErrLog].
func ParseLog(b []byte) (LogImage, error) {
	if len(b) < logBits {
		return LogImage{}, fmt.Errorf("%w: %d bytes, want at least %d", ErrLog, len(b), logBits)
	}
	magic, version := binary.LittleEndian.Uint32(b[0:]), binary.LittleEndian.Uint32(b[4:])
	if magic != logMagic || version != logVersion {
		return LogImage{}, fmt.Errorf("%w: magic %#x version %d", ErrLog, magic, version)
	}
	regions := binary.LittleEndian.Uint64(b[8:])
	if held := uint64(len(b)-logBits) / 8 * 64; regions > min(held, maxRegions) {
		return LogImage{}, fmt.Errorf("%w: %d regions in %d bytes", ErrLog, regions, len(b))
	}
	l := DirtyLog(regions)
	for i := range l.clean {
		l.clean[i] = binary.LittleEndian.Uint64(b[logBits+8*i:])
	}
	if tail := regions % 64; tail != 0 {
		l.clean[len(l.clean)-1] &= 1<<tail - 1
	}
	return l, nil
}

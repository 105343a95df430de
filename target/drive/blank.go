// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"io"

	"weft.dev/weft/proto/block"
)

// A device is blank if its ends, and this many blocks of 4 KiB spread evenly between them, hold
// only zeroes or the result of a discard. In a file whose file system reports holes, each sample
// moves on to the next data instead of reading a hole.
const samples = 128

// blank also accepts the ones that some drives return for discarded blocks.
func blank(b []byte) bool {
	return len(b) == 0 || (b[0] == 0 || b[0] == 0xff) && bytes.Count(b, b[:1]) == len(b)
}

// finder is a file that knows its holes.
type finder interface {
	// NextData returns the offset of the first data at or after from; the size if there is none.
	NextData(from int64) int64
}

// sample calls look with blocks from the middle of a device, until look says that it has seen
// enough.
func sample(r io.ReaderAt, size block.Size, next func(int64) int64, look func(offset int64, b []byte) bool) error {
	unit := int64(copyUnit)
	from, to := window, (int64(size)-window)/unit*unit
	step := max((to-from)/samples/unit*unit, unit)
	b := make([]byte, unit)
	for ; from < to; from += step {
		at := next(from) / unit * unit
		if at >= min(from+step, to) {
			continue
		}
		if _, err := r.ReadAt(b, at); err != nil {
			return fmt.Errorf("read %d bytes at %d: %w", unit, at, err)
		}
		if look(at, b) {
			return nil
		}
	}
	return nil
}

// dataInside returns the offset of some data between the ends of a device; 0 if it finds none.
func dataInside(r io.ReaderAt, size block.Size) (at int64, err error) {
	next := func(from int64) int64 { return from }
	if f, ok := r.(finder); ok {
		next = f.NextData
	}
	err = sample(r, size, next, func(offset int64, b []byte) bool {
		if !blank(b) {
			at = offset
		}
		return at > 0
	})
	return at, err
}

// Data that legs left on an erased drive has no owner, so adding the drive needs no second
// agreement. Erase records this in a block in the first slot, outside of all labels, with a
// checksum of the samples: if anything was written there since, the record does not count.
const (
	erasedMagic = "weft drive erased"
	erasedAt    = slotSize - copyUnit
)

func markErased(m Medium) error {
	sum, err := sampleSum(m, m.Size())
	if err != nil {
		return err
	}
	b := make([]byte, copyUnit)
	copy(b, erasedMagic)
	binary.LittleEndian.PutUint32(b[32:], sum)
	if _, err := m.WriteAt(b, int64(erasedAt)); err != nil {
		return err
	}
	return m.Flush()
}

func wasErased(r io.ReaderAt, size block.Size) bool {
	b := make([]byte, 36)
	if _, err := r.ReadAt(b, int64(erasedAt)); err != nil || !bytes.HasPrefix(b, []byte(erasedMagic)) {
		return false
	}
	sum, err := sampleSum(r, size)
	return err == nil && sum == binary.LittleEndian.Uint32(b[32:])
}

// sampleSum skips the areas of the labels.
func sampleSum(r io.ReaderAt, size block.Size) (sum uint32, err error) {
	next := func(from int64) int64 { return from }
	err = sample(r, size, next, func(offset int64, b []byte) bool {
		if block.Size(offset) >= firstExtent && block.Size(offset) < tailArea(size) {
			sum = crc32.Update(sum, crc32.MakeTable(crc32.Castagnoli), b)
		}
		return false
	})
	return sum, err
}

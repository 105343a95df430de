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

// A device is blank if nothing but zeroes, or what a discard leaves, is at its ends and
// in so many blocks of 4 KiB between them, evenly spread. In a file, where the file
// system tells what is a hole, no hole is looked at: each block stands for the first
// data behind it.
const samples = 128

// blank also accepts the ones that some drives read as where they were discarded.
func blank(b []byte) bool {
	return len(b) == 0 || (b[0] == 0 || b[0] == 0xff) && bytes.Count(b, b[:1]) == len(b)
}

// finder is a file that knows its holes.
type finder interface {
	// NextData is where the first data is, from an offset on: at the size if there is none.
	NextData(from int64) int64
}

// sample calls look with blocks from the middle of a device, until it says that it has
// seen enough.
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

// dataInside finds something between the ends of a device; 0 if there is nothing.
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

// What legs left on a drive that was erased is nobody's: it is not asked for again. A
// block in the first slot, outside of every label, says so, with a checksum of the
// samples: if somebody has written there since, it counts for nothing.
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

// sampleSum leaves out what is in the places of the labels.
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

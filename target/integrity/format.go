// SPDX-License-Identifier: Apache-2.0

package integrity

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"weft.dev/weft/proto/block"
)

// The geometry of an extent and of a page; all in bytes, except where it says otherwise.
const (
	BlockSize  = 4 << 10 // what one checksum is of
	PageBlocks = 960     // checksums in a page
	ExtentData = int64(block.CheckedData)

	pageSize   = 4 << 10
	pageData   = PageBlocks * BlockSize // what a page is of
	pagesAt    = 576 << 10              // in an extent
	dataAt     = int64(block.ExtentSize) - ExtentData
	extentOf   = uint64(ExtentData / pageData) // pages of an extent
	sumsAt     = 256                           // in a page
	partBlocks = 32                            // what one bit of a mark stands for
	allParts   = uint32(1)<<(PageBlocks/partBlocks) - 1
)

// A page, little-endian:
//
//	  0   4  CRC32C of bytes 4 to 4095
//	  4   4  version: 1
//	  8   4  mark: bit i says that checksums 32i to 32i+31 may be older than the data
//	 12   4  zeroes
//	 16  16  id of the leg
//	 32   8  number of the page in the leg: 68 for each extent
//	 40      zeroes
//	256      960 checksums: CRC32C of a block, XORed with that of 4096 zeroes
//
// 4096 zeroes are a page without a mark, of blocks of zeroes. The place is in the page, so a page
// that was written to the wrong place is damaged.
const formatVersion = 1

var (
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
	ofZeroes   = crc32.Checksum(make([]byte, BlockSize), castagnoli)
	zeroPage   [pageSize]byte

	errDamaged = errors.New("damaged page of checksums")
	errNewer   = errors.New("page of checksums of a newer version")
)

// sum is the checksum of a block as pages hold it. That of zeroes is 0.
func sum(b []byte) uint32 { return crc32.Checksum(b, castagnoli) ^ ofZeroes }

// content is what a page holds.
type content struct {
	mark uint32
	sums [PageBlocks]uint32
}

// encode writes a page to b.
func (c *content) encode(b []byte, leg block.LegID, number uint64) {
	clear(b[:sumsAt])
	le := binary.LittleEndian
	le.PutUint32(b[4:], formatVersion)
	le.PutUint32(b[8:], c.mark)
	copy(b[16:], leg.UUID[:])
	le.PutUint64(b[32:], number)
	for i, s := range c.sums {
		le.PutUint32(b[sumsAt+4*i:], s)
	}
	le.PutUint32(b, crc32.Checksum(b[4:pageSize], castagnoli))
}

// decode reads a page: errDamaged, or errNewer if a later version must have written it.
func (c *content) decode(b []byte, leg block.LegID, number uint64) error {
	if [pageSize]byte(b) == zeroPage {
		*c = content{}
		return nil
	}
	le := binary.LittleEndian
	switch version := le.Uint32(b[4:]); {
	case crc32.Checksum(b[4:pageSize], castagnoli) != le.Uint32(b):
		return fmt.Errorf("%w: page %d: its own checksum", errDamaged, number)
	case block.UUID(b[16:32]) != leg.UUID || le.Uint64(b[32:]) != number:
		return fmt.Errorf("%w: page %d: it is page %d of leg %v", errDamaged, number, le.Uint64(b[32:]), block.UUID(b[16:32]))
	case version > formatVersion:
		return fmt.Errorf("%w: page %d: version %d, this program knows %d", errNewer, number, version, formatVersion)
	case version == 0:
		return fmt.Errorf("%w: page %d: version 0", errDamaged, number)
	}
	c.mark = le.Uint32(b[8:]) & allParts
	for i := range c.sums {
		c.sums[i] = le.Uint32(b[sumsAt+4*i:])
	}
	return nil
}

// parts are the bits of a mark for blocks from to to, without to.
func parts(from, to int) uint32 {
	first, last := from/partBlocks, (to-1)/partBlocks
	return allParts & (uint32(1)<<(last+1) - 1) &^ (uint32(1)<<first - 1)
}

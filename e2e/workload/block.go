// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
)

// blockSize is the unit of writing and checking.
const blockSize = 4096

// A block records its writer, place and time:
//
//	0  magic "WEFTBLK1"
//	8  block number, little endian
//	16 sequence number of the write, little endian, from 1 over the whole run
//	24 CRC32C of all the rest of the block with this field zero
//	28 bytes that depend on block and sequence number
const magic = "WEFTBLK1"

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// fill writes block number n at sequence seq into b, which has blockSize bytes.
func fill(b []byte, n, seq uint64) {
	copy(b, magic)
	binary.LittleEndian.PutUint64(b[8:], n)
	binary.LittleEndian.PutUint64(b[16:], seq)
	binary.LittleEndian.PutUint32(b[24:], 0)
	x := n*0x9e3779b97f4a7c15 ^ seq
	for i := 28; i+4 <= blockSize; i += 4 {
		x = x*6364136223846793005 + 1442695040888963407
		binary.LittleEndian.PutUint32(b[i:], uint32(x>>32))
	}
	binary.LittleEndian.PutUint32(b[24:], crc32.Checksum(b, castagnoli))
}

// errBlank means that a block was never written: it is all zeroes.
var errBlank = errors.New("blank")

// parse checks b as block number n and returns its sequence number. It overwrites b's CRC
// field.
func parse(b []byte, n uint64) (seq uint64, err error) {
	if string(b[:8]) != magic {
		for _, c := range b {
			if c != 0 {
				return 0, fmt.Errorf("foreign data, begins % x", b[:16])
			}
		}
		return 0, errBlank
	}
	sum := binary.LittleEndian.Uint32(b[24:])
	binary.LittleEndian.PutUint32(b[24:], 0)
	if got := crc32.Checksum(b, castagnoli); got != sum {
		return 0, fmt.Errorf("crc %08x, want %08x: torn", got, sum)
	}
	if at := binary.LittleEndian.Uint64(b[8:]); at != n {
		return 0, fmt.Errorf("holds block %d", at)
	}
	return binary.LittleEndian.Uint64(b[16:]), nil
}

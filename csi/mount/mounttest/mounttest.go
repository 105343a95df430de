// SPDX-License-Identifier: Apache-2.0

// Package mounttest makes the first 4 KiB of devices with file systems, as far as Weft reads them,
// for tests.
package mounttest

import (
	"encoding/binary"
	"encoding/hex"
	"strings"
)

// Ext4 is the superblock of an ext4 that has, or has not, been mounted.
func Ext4(uuid string, size uint64, mounted bool) (p [4096]byte) {
	sb := p[1024:]
	le := binary.LittleEndian
	le.PutUint16(sb[0x38:], 0xef53)
	le.PutUint32(sb[0x18:], 2)
	le.PutUint32(sb[0x4:], uint32(size/4096))
	copy(sb[0x68:], uuidBytes(uuid))
	if mounted {
		le.PutUint32(sb[0x2c:], 1)
		le.PutUint16(sb[0x34:], 1)
	}
	return p
}

// XFS is the superblock of an xfs, finished or in the middle of mkfs.
func XFS(uuid string, size uint64, inProgress bool) (p [4096]byte) {
	be := binary.BigEndian
	copy(p[:], "XFSB")
	be.PutUint32(p[4:], 4096)
	be.PutUint64(p[8:], size/4096)
	copy(p[32:], uuidBytes(uuid))
	if inProgress {
		p[126] = 1
	}
	return p
}

func uuidBytes(text string) []byte {
	b, err := hex.DecodeString(strings.ReplaceAll(text, "-", ""))
	if err != nil {
		panic(err)
	}
	return b
}

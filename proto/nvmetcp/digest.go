// SPDX-License-Identifier: Apache-2.0

package nvmetcp

import "hash/crc32"

// DigestSize is the length of a header or data digest (TCP, 3.3.1).
const DigestSize = 4

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Digest is the CRC32C of b. It travels in little-endian order.
func Digest(b []byte) uint32 { return crc32.Checksum(b, castagnoli) }

// UpdateDigest extends digest d by the bytes b.
func UpdateDigest(d uint32, b []byte) uint32 { return crc32.Update(d, castagnoli, b) }

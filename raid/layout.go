// SPDX-License-Identifier: Apache-2.0

package raid

import (
	"math/bits"

	"weft.dev/weft/proto/block"
)

// Place is where a byte of a volume lies: in which column, and where in each of
// that column's legs.
type Place struct {
	Column int
	Offset block.Size
}

// Locate finds the place of a volume's byte: chunks are dealt out to the
// columns in turn, as dm-stripe does.
func Locate(l block.Layout, offset block.Size) Place {
	chunk, within := offset/l.Chunk, offset%l.Chunk
	columns := block.Size(l.Stripes)
	return Place{Column: int(chunk % columns), Offset: chunk/columns*l.Chunk + within}
}

// Offset is the inverse of Locate.
func Offset(l block.Layout, p Place) block.Size {
	chunk, within := p.Offset/l.Chunk, p.Offset%l.Chunk
	return (chunk*block.Size(l.Stripes)+block.Size(p.Column))*l.Chunk + within
}

// RegionSize is the unit of dirty tracking for legs of a size.
//
// From 1 GiB on it is at least 1 MiB, and large enough that a leg has at most
// 131072 regions: one write of the log is then at most 16 KiB. Smaller legs
// have regions of about 1/1024 of them, but at least 256 KiB: small enough for a
// partial resync to be partial on small volumes too, and not smaller, since
// dm-mirror copies one region after the other and pays round trips for each.
func RegionSize(leg block.Size) block.Size {
	const most = 131072
	if leg < block.GiB {
		return max(256*block.KiB, ceilPow2(leg/1024))
	}
	return max(block.MiB, ceilPow2((leg+most-1)/most))
}

// Regions is how many regions a leg has; the last one may be shorter.
func Regions(leg, region block.Size) uint64 { return uint64((leg + region - 1) / region) }

func ceilPow2(n block.Size) block.Size {
	if n <= 1 {
		return 1
	}
	return 1 << bits.Len64(uint64(n-1))
}

// SPDX-License-Identifier: Apache-2.0

package raid

import (
	"math/bits"

	"weft.dev/weft/proto/block"
)

// Place says where a byte of a volume lies: in which column, and at which offset in
// each of that column's legs.
type Place struct {
	Column int
	Offset block.Size
}

// Locate returns the place of a byte of a volume. Chunks go to the columns in turn, as
// in dm-stripe.
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

// RegionSize returns the unit of dirty tracking for legs of the given size.
//
// From 1 GiB on, a region is at least 1 MiB, and large enough that a leg has at most
// 131072 regions: one write of the log is then at most 16 KiB. On smaller legs a region
// is about 1/1024 of the leg, but at least 256 KiB. That is small enough that a partial
// resync of a small volume stays partial. It is no smaller because dm-mirror copies
// region by region and pays round trips for each.
func RegionSize(leg block.Size) block.Size {
	const most = 131072
	if leg < block.GiB {
		return max(256*block.KiB, ceilPow2(leg/1024))
	}
	return max(block.MiB, ceilPow2((leg+most-1)/most))
}

// Regions returns the number of regions of a leg; the last one may be shorter.
func Regions(leg, region block.Size) uint64 { return uint64((leg + region - 1) / region) }

// WordMask has the bits of regions first to last that lie in a word of a bitmap, at 64 regions a
// word. The word must hold one of them.
func WordMask(word, first, last uint64) uint64 {
	mask := ^uint64(0)
	if word == first/64 {
		mask <<= first % 64
	}
	if word == last/64 {
		mask &= ^uint64(0) >> (63 - last%64)
	}
	return mask
}

func ceilPow2(n block.Size) block.Size {
	if n <= 1 {
		return 1
	}
	return 1 << bits.Len64(uint64(n-1))
}

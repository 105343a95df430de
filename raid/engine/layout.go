// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"math/bits"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid"
)

// plan is the arithmetic of a volume's layout: that of raid.Locate, in the units of the
// hot path.
type plan struct {
	layout  block.Layout
	stripes int64
	chunk   int64
	shift   uint // of chunk
	region  uint // shift of the region size
	unit    uint // shift of the lock unit: no extent IO crosses a boundary between two
}

// lockUnit is the smallest lock unit. A column's range locks are distributed over its
// shards by lock unit.
const lockUnit = 1 << 20

func newPlan(l block.Layout, region block.Size) plan {
	p := plan{layout: l, stripes: int64(l.Stripes), chunk: int64(l.Chunk)}
	p.shift = uint(bits.TrailingZeros64(uint64(l.Chunk)))
	p.region = uint(bits.TrailingZeros64(uint64(region)))
	p.unit = uint(bits.TrailingZeros64(uint64(max(region, l.Chunk, lockUnit))))
	return p
}

// extent is the part of a column that one extent IO covers. It lies within one lock unit
// and, if there are several columns, within one chunk.
type extent struct {
	column int
	off    int64 // in each leg
	length int64
}

// first returns the first extent of a range of the volume.
func (p plan) first(off, length int64) extent {
	if p.stripes == 1 {
		rest := 1<<p.unit - off&(1<<p.unit-1)
		return extent{0, off, min(rest, length)}
	}
	within := off & (p.chunk - 1)
	chunk := off >> p.shift
	row := chunk / p.stripes
	return extent{int(chunk - row*p.stripes), row<<p.shift | within, min(p.chunk-within, length)}
}

// share returns how many of the volume's first off bytes lie in a column. So the range from
// a to b covers the part of the column from share(a) to share(b).
func (p plan) share(column int, off int64) int64 {
	chunk := off >> p.shift
	row := chunk / p.stripes
	share := row << p.shift
	switch at := chunk - row*p.stripes; {
	case int64(column) < at:
		share += p.chunk
	case int64(column) == at:
		share += off & (p.chunk - 1)
	}
	return share
}

func (p plan) legSize(volume int64) int64 { return int64(p.layout.LegSize(block.Size(volume))) }

func (p plan) regions(volume int64) uint64 {
	return raid.Regions(p.layout.LegSize(block.Size(volume)), 1<<p.region)
}

// regionsOf returns the first and the last region that a range of a leg touches.
func (p plan) regionsOf(off, end int64) (first, last uint64) {
	return uint64(off >> p.region), uint64((end - 1) >> p.region)
}

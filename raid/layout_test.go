// SPDX-License-Identifier: Apache-2.0

package raid

import (
	"testing"
	"testing/quick"

	"weft.dev/weft/proto/block"
)

// locateSlowly deals out chunks one by one.
func locateSlowly(l block.Layout, offset block.Size) Place {
	next := make([]block.Size, l.Stripes) // where the column's next chunk goes
	at := block.Size(0)
	for column := 0; ; column = (column + 1) % l.Stripes {
		if offset < at+l.Chunk {
			return Place{column, next[column] + offset - at}
		}
		next[column] += l.Chunk
		at += l.Chunk
	}
}

func TestLocateDealsOutChunksInTurn(t *testing.T) {
	if err := quick.Check(func(stripes, shift uint8, offset uint32) bool {
		l := block.Layout{Stripes: int(stripes)%8 + 1, Copies: 1, Chunk: 4 * block.KiB << (shift % 4)}
		at := block.Size(offset) % (64 * block.MiB)
		p := Locate(l, at)
		if p != locateSlowly(l, at) || Offset(l, p) != at {
			t.Errorf("Locate(%v, %d) = %v, back %d; want %v", l, at, p, Offset(l, p), locateSlowly(l, at))
		}
		return !t.Failed()
	}, nil); err != nil {
		t.Error(err)
	}
}

func TestRegionSizeFollowsTheRule(t *testing.T) {
	for leg, want := range map[block.Size]block.Size{
		0:                         256 * block.KiB,
		16 * block.MiB:            256 * block.KiB,
		256 * block.MiB:           256 * block.KiB,
		300 * block.MiB:           512 * block.KiB,
		512 * block.MiB:           512 * block.KiB,
		block.GiB - block.MiB:     block.MiB,
		block.GiB:                 block.MiB,
		128 * block.GiB:           block.MiB,
		128*block.GiB + block.MiB: 2 * block.MiB,
		block.TiB:                 8 * block.MiB,
		3 * block.TiB:             32 * block.MiB,
	} {
		if got := RegionSize(leg); got != want {
			t.Errorf("RegionSize(%v) = %v, want %v", leg, got, want)
		}
	}
	if err := quick.Check(func(n uint64) bool {
		leg := block.Size(n % uint64(block.PiB))
		r := RegionSize(leg)
		return r&(r-1) == 0 && r >= 256*block.KiB && Regions(leg, r) <= 131072
	}, nil); err != nil {
		t.Error(err)
	}
}

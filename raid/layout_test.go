// SPDX-License-Identifier: Apache-2.0

package raid

import (
	"strings"
	"testing"
	"testing/quick"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/dm"
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
		return r&(r-1) == 0 && r >= 256*block.KiB && Regions(leg, r) <= 131072 && len(CleanLog(Regions(leg, r)).Bytes()) <= 20<<10
	}, nil); err != nil {
		t.Error(err)
	}
}

func TestTopMapsEveryByteWhereLocateSays(t *testing.T) {
	v := block.VolumeID{UUID: block.UUID{1}}
	for _, test := range []struct {
		l    block.Layout
		size block.Size
	}{
		{block.Layout{Stripes: 1, Copies: 2, Chunk: block.DefaultChunk}, block.GiB},
		{block.Layout{Stripes: 4, Copies: 2, Chunk: block.DefaultChunk}, block.GiB},
		{block.Layout{Stripes: 3, Copies: 1, Chunk: block.DefaultChunk}, 10 * block.MiB},
		{block.Layout{Stripes: 3, Copies: 1, Chunk: block.DefaultChunk}, 10*block.MiB + 4*block.KiB},
		{block.Layout{Stripes: 8, Copies: 1, Chunk: block.MiB}, 3*block.MiB + 512},
	} {
		d := Top(v, test.l, test.size)
		if err := d.Table.Check(); err != nil || d.Table.Size() != test.size {
			t.Errorf("Top(%v, %v) has size %v, %v", test.l, test.size, d.Table.Size(), err)
		}
		leg := test.l.LegSize(test.size)
		for at := block.Size(0); at < test.size; at += 4 * block.KiB {
			column, offset := follow(d.Table, at)
			if want := Locate(test.l, at); column != ColumnName(v, want.Column) || offset != want.Offset || offset >= leg {
				t.Fatalf("Top(%v, %v) maps %d to %s at %d, want %v", test.l, test.size, at, column, offset, want)
			}
		}
	}
}

// A volume may grow in use because of this: its tables, and the legs behind them,
// only get longer.
func TestGrowthLeavesEveryByteWhereItIs(t *testing.T) {
	v := block.VolumeID{UUID: block.UUID{1}}
	if err := quick.Check(func(stripes, shift uint8, size, more, offset uint32) bool {
		l := block.Layout{Stripes: int(stripes)%8 + 1, Copies: 1, Chunk: 4 * block.KiB << (shift % 8)}
		const unit = 4 * block.KiB
		small := block.MiB + block.Size(size)%(64*block.MiB)/unit*unit
		large := small + unit + block.Size(more)%(64*block.MiB)/unit*unit
		at := block.Size(offset) % small
		column, where := follow(Top(v, l, small).Table, at)
		grownColumn, grownWhere := follow(Top(v, l, large).Table, at)
		if grownColumn != column || grownWhere != where || l.LegSize(large) < l.LegSize(small) || where >= l.LegSize(small) {
			t.Errorf("%v: byte %d is in %s at %d of %v, and at %v in %s at %d", l, at, column, where, small, large, grownColumn, grownWhere)
		}
		return !t.Failed()
	}, &quick.Config{MaxCount: 2000}); err != nil {
		t.Error(err)
	}
}

// follow is what the kernel does with an offset.
func follow(table dm.Table, at block.Size) (string, block.Size) {
	for _, r := range table {
		if at >= r.Start+r.Length {
			continue
		}
		within := at - r.Start
		switch target := r.Target.(type) {
		case dm.Linear:
			return string(target.Device), target.Offset + within
		case dm.Striped:
			chunk := within / target.Chunk
			n := block.Size(len(target.Legs))
			return string(target.Legs[chunk%n].Device), chunk/n*target.Chunk + within%target.Chunk
		}
	}
	return "", 0
}

func TestNamesFitIntoDeviceMapper(t *testing.T) {
	v := block.VolumeID{UUID: block.UUID{0xff}}
	c := NewColumn(v, block.MaxStripes-1, block.Layout{Stripes: 64, Copies: 3, Chunk: block.DefaultChunk}, block.TiB, "7:0")
	for _, name := range []string{c.lostName(2), c.backName(2), c.innerName(), c.UUID + "-lost2"} {
		if len(name) > 127 || !strings.HasPrefix(name, "weft-") {
			t.Errorf("name %q has %d characters, want at most 127 after weft-", name, len(name))
		}
	}
	if !strings.HasPrefix(c.UUID, TopUUID(v)) || !strings.HasPrefix(TopUUID(v), UUIDPrefix) {
		t.Errorf("uuids %s and %s do not begin alike", c.UUID, TopUUID(v))
	}
}

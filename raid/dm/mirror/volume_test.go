// SPDX-License-Identifier: Apache-2.0

package mirror

import (
	"strings"
	"testing"
	"testing/quick"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid"
	"weft.dev/weft/raid/dm"
)

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
			if want := raid.Locate(test.l, at); column != ColumnName(v, want.Column) || offset != want.Offset || offset >= leg {
				t.Fatalf("Top(%v, %v) maps %d to %s at %d, want %v", test.l, test.size, at, column, offset, want)
			}
		}
	}
}

// This is why a volume can grow while it is in use: its tables and the legs behind them only
// get longer.
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

// follow maps an offset of the device as the kernel does.
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

// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"bytes"
	"errors"
	"io/fs"
	"slices"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/controller"
	"weft.dev/weft/target/mapped"
)

func TestAnExportSaysWhereItsLegHasData(t *testing.T) {
	p := newPlanted(t)
	defer p.end(t)
	write := func(at int64) {
		t.Helper()
		must(t, block.WriteAt(p.leg, bytes.Repeat([]byte{9}, 4096), at))
	}
	grain := func(at int64) block.Range { return block.Range{Off: at, End: at + mapped.GrainSize} }
	write(5 << 20)
	p.carve(t, monday)
	must(t, p.prepare(monday, block.GiB, freezeOf(leg)))
	write(7<<20 + 16384)
	m, ok := p.leg.(controller.Mapper)
	if !ok {
		t.Fatalf("a leg's export is a %T, no Mapper", p.leg)
	}
	found, next, err := m.Allocated(0, 1<<30, 10)
	if want := []block.Range{grain(5 << 20), grain(7<<20 + 16384)}; err != nil || next != 1<<30 || !slices.Equal(found, want) {
		t.Errorf("Allocated = %v, %d, %v; want %v", found, next, err, want)
	}
	found, next, err = m.Differing(monday.UUID, 0, 1<<30, 10)
	if want := []block.Range{grain(7<<20 + 16384)}; err != nil || next != 1<<30 || !slices.Equal(found, want) {
		t.Errorf("Differing = %v, %d, %v; want %v", found, next, err, want)
	}
	for _, since := range []block.LegID{tuesday, leg} {
		if _, _, err := m.Differing(since.UUID, 0, 1<<30, 10); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("Differing since %v, which is no snapshot: %v, want ErrNotExist", since, err)
		}
	}
	p.carve(t, tuesday)
	must(t, p.prepare(tuesday, block.GiB, freezeOf(leg)))
	for _, closed := range []bool{false, true} {
		if closed {
			p.stop(t)
		}
		found, next, err = p.disk.Ranges(tuesday, monday, 0, 1<<30, 10)
		if want := []block.Range{grain(7<<20 + 16384)}; err != nil || next != 1<<30 || !slices.Equal(found, want) {
			t.Errorf("Ranges, closed %v: %v, %d, %v; want %v", closed, found, next, err, want)
		}
	}
	if _, _, err := p.disk.Ranges(copied, block.LegID{}, 0, 4096, 1); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Ranges of a leg that is not there: %v, want ErrNotExist", err)
	}
	if _, _, err := p.disk.Ranges(monday, block.LegID{}, 0, 1<<30+4096, 1); !errors.Is(err, block.ErrRange) {
		t.Errorf("Ranges beyond the end: %v, want ErrRange", err)
	}
	if _, _, err := m.Allocated(0, 1<<30, 10); !errors.Is(err, block.ErrGone) {
		t.Errorf("Allocated of a leg that is not mapped: %v, want ErrGone", err)
	}
}

func TestAPlainLegHoldsDataEverywhere(t *testing.T) {
	d := newSpare(64 * 4 * block.KiB)
	e := mapLeg(t, legsOn(map[block.DeviceNumber]*spare{one: d}), tableOn(one, 32, 1, 3, 1)).(controller.Mapper)
	found, next, err := e.Allocated(4096, 3*unit, 1)
	if want := []block.Range{{Off: 4096, End: 3 * unit}}; err != nil || next != 3*unit || !slices.Equal(found, want) {
		t.Errorf("Allocated = %v, %d, %v; want %v", found, next, err, want)
	}
	if _, _, err := e.Differing(monday.UUID, 0, unit, 1); !errors.Is(err, block.ErrUnsupported) {
		t.Errorf("Differing = %v, want ErrUnsupported", err)
	}
}

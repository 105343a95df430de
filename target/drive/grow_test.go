// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"errors"
	"math/rand/v2"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// leave puts text at the beginning of an extent, as data or as the remains of a deleted leg.
func leave(m *memory, extent int, text string) { m.damage(extentOffset(extent), text) }

func extentOffset(i int) int64 { return int64(firstExtent) + int64(i)*int64(block.ExtentSize) }

func text(t *testing.T, m *memory, extent int) string {
	t.Helper()
	b := make([]byte, 4)
	_, err := m.ReadAt(b, extentOffset(extent))
	must(t, err)
	return string(b)
}

const zeroes = "\x00\x00\x00\x00"

// smaller is a leg with data in its only extent, on a drive whose other extents hold remains.
func smaller(t *testing.T) *memory {
	t.Helper()
	m := formatted(t)
	d := mustOpen(t, m)
	must(t, d.PutLeg(leg(1, 1, run(1, 1))))
	must(t, d.ZeroLeg(t.Context(), legID(1), nil))
	for i := range 4 {
		leave(m, i, map[bool]string{true: "data", false: "left"}[i == 1])
	}
	must(t, m.Flush())
	return m
}

// larger is the record of the same leg with two more extents, one of them before the first on the
// drive.
func larger() *pb.LegLabel { return leg(1, 1, run(1, 2), run(0, 1)) }

func TestALegThatGrowsKeepsItsDataAndGetsZeroes(t *testing.T) {
	m := smaller(t)
	d := mustOpen(t, m)
	must(t, d.PutLeg(larger()))
	if l := d.Label().Leg(legID(1)); !l.Zeroed || Whole(l) || Zeroed(l) != block.ExtentSize {
		t.Errorf("grown leg: zeroed %v, whole %v, up to %v; want true, false, %v", l.Zeroed, Whole(l), Zeroed(l), block.ExtentSize)
	}
	var told []block.Size
	must(t, d.ZeroLeg(t.Context(), legID(1), func(n block.Size) { told = append(told, n) }))
	if l := mustOpen(t, m.clone()).Label().Leg(legID(1)); !Whole(l) || Zeroed(l) != 3*block.ExtentSize || l.ZeroedExtents != 0 {
		t.Errorf("zeroed leg: whole %v, up to %v, %d extents noted; want all", Whole(l), Zeroed(l), l.ZeroedExtents)
	}
	for i, want := range []string{zeroes, "data", zeroes, "left"} {
		if got := text(t, m, i); got != want {
			t.Errorf("extent %d holds %q, want %q", i, got, want)
		}
	}
	if len(told) != 2 || told[0] != 2*block.ExtentSize || told[1] != 3*block.ExtentSize {
		t.Errorf("progress was %v, want what of the leg is done", told)
	}
}

func TestALegMayGrowFartherWhileItIsZeroed(t *testing.T) {
	m := smaller(t)
	d := mustOpen(t, m)
	must(t, d.PutLeg(larger()))
	farther := larger()
	farther.Extents = append(farther.Extents, run(3, 1))
	asked := false
	must(t, d.ZeroLeg(t.Context(), legID(1), func(block.Size) {
		if asked {
			return
		}
		asked = true
		must(t, d.PutLeg(farther))
		if err := d.RemoveLeg(legID(1)); !errors.Is(err, ErrZeroing) {
			t.Errorf("RemoveLeg meanwhile = %v, want %v", err, ErrZeroing)
		}
	}))
	if l := d.Label().Leg(legID(1)); Whole(l) || Zeroed(l) != 3*block.ExtentSize {
		t.Errorf("after the first zeroing: whole %v, up to %v; want false, %v", Whole(l), Zeroed(l), 3*block.ExtentSize)
	}
	must(t, d.ZeroLeg(t.Context(), legID(1), nil))
	if l := d.Label().Leg(legID(1)); !Whole(l) || text(t, m, 3) != zeroes || text(t, m, 1) != "data" {
		t.Errorf("after the second: whole %v, extents 1 and 3 hold %q, %q", Whole(l), text(t, m, 1), text(t, m, 3))
	}
}

// Whenever the power fails, data stays, and what the label calls zeroed is zeroed.
func TestGrowthThatIsCutAnywhereCanBeRepeated(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(9, 10))
	grow := func(m *memory) error {
		d, err := Open(m, cluster1)
		if err != nil {
			return err
		}
		if err := d.PutLeg(larger()); err != nil {
			return err
		}
		return d.ZeroLeg(t.Context(), legID(1), nil)
	}
	start := smaller(t).clone()
	whole := start.clone()
	must(t, grow(whole))
	kinds := map[string]int{}
	for cutAt := 1; cutAt <= whole.writes; cutAt++ {
		cut := start.clone()
		cut.cutAt = cutAt
		if err := grow(cut); !errors.Is(err, errCut) {
			t.Fatalf("cut at sector %d: %v, want %v", cutAt, err, errCut)
		}
		for i, left := range cut.afterCut(random) {
			l := mustOpen(t, left.clone()).Label().Leg(legID(1))
			switch {
			case text(t, left, 1) != "data" || Zeroed(l) < block.ExtentSize:
				t.Fatalf("cut at sector %d, medium %d: data %q, zeroed up to %v", cutAt, i, text(t, left, 1), Zeroed(l))
			case !Whole(l):
				kinds["grown"]++
			case len(l.Extents) > 1:
				kinds["zeroed"]++
				if text(t, left, 2) != zeroes || text(t, left, 0) != zeroes {
					t.Fatalf("cut at sector %d, medium %d: called zeroed, and holds %q, %q", cutAt, i, text(t, left, 2), text(t, left, 0))
				}
			default:
				kinds["old"]++
			}
			must(t, grow(left))
			if text(t, left, 2) != zeroes || text(t, left, 0) != zeroes || text(t, left, 1) != "data" {
				t.Fatalf("cut at sector %d, medium %d: repeated, it holds %q, %q, %q", cutAt, i, text(t, left, 1), text(t, left, 2), text(t, left, 0))
			}
		}
	}
	if len(kinds) != 3 {
		t.Errorf("cuts left %v, want each of old, grown and zeroed", kinds)
	}
}

func TestExtentsAreComparedHoweverTheyAreCut(t *testing.T) {
	for _, c := range []struct {
		next, old []*pb.Extent
		want      bool
	}{
		{[]*pb.Extent{run(0, 2)}, []*pb.Extent{run(0, 1)}, true},
		{[]*pb.Extent{run(0, 2)}, []*pb.Extent{run(0, 1), run(1, 1)}, true},
		{[]*pb.Extent{run(0, 1), run(3, 1)}, []*pb.Extent{run(0, 1)}, true},
		{[]*pb.Extent{run(3, 1), run(0, 1)}, []*pb.Extent{run(0, 1)}, false},
		{[]*pb.Extent{run(0, 1)}, []*pb.Extent{run(0, 2)}, false},
		{[]*pb.Extent{run(1, 2)}, []*pb.Extent{run(0, 1)}, false},
	} {
		if got := ImageOf(&pb.LegLabel{Extents: c.next}).Extends(ImageOf(&pb.LegLabel{Extents: c.old})); got != c.want {
			t.Errorf("Extends(%v, %v) = %v, want %v", c.next, c.old, got, c.want)
		}
	}
}

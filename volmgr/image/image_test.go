// SPDX-License-Identifier: Apache-2.0

package image

import (
	"math/rand/v2"
	"slices"
	"testing"

	"weft.dev/weft/proto/block"
)

func TestAnImageContinuesOneOfItsKindAlone(t *testing.T) {
	small, large := Of([]Extent{{4, 2}}), Of([]Extent{{4, 2}, {9, 1}})
	if !large.Continues(small) || small.Continues(Of([]Extent{{5, 1}})) || (Image{"MAPPED", large.Extents}).Continues(small) {
		t.Error("an image continues another of its kind whose extents it begins with, and no other")
	}
	if large.Capacity() != 3*block.ExtentSize {
		t.Errorf("capacity %v, want 3 extents", large.Capacity())
	}
}

// A leg's old extents stay first and in order, and no two legs share an extent.
func TestALegGrowsBehindWhatItHas(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		const total = 40
		legs := [][]Extent{}
		for range 1 + random.IntN(6) {
			if e, ok := carve(legs, total, 1+uint32(random.IntN(4))); ok {
				legs = append(legs, e)
			}
		}
		for range 8 {
			i, more := random.IntN(len(legs)), 1+uint32(random.IntN(6))
			taken := slices.Concat(legs...)
			if Count(Holes(slices.Clone(taken), total)) < more {
				continue
			}
			old := legs[i]
			legs[i] = Extend(old, taken, total, more)
			if !begins(legs[i], old) || Count(legs[i]) != Count(old)+more {
				t.Fatalf("%v with %d more is %v", old, more, legs[i])
			}
			seen := map[uint32]bool{}
			for _, e := range each(slices.Concat(legs...)) {
				if seen[e] || e >= total {
					t.Fatalf("extent %d belongs to two legs, or is beyond the drive: %v", e, legs)
				}
				seen[e] = true
			}
			if more := Beyond(legs[i], old); !slices.Equal(each(more), each(legs[i])[Count(old):]) {
				t.Fatalf("Beyond(%v, %v) = %v", legs[i], old, more)
			}
		}
	}
}

func carve(legs [][]Extent, total, need uint32) ([]Extent, bool) {
	taken := slices.Concat(legs...)
	if Count(Holes(slices.Clone(taken), total)) < need {
		return nil, false
	}
	return FirstFit(taken, total, need), true
}

// A list that runs are inserted into and removed from stays sorted and holds just the rest.
func TestASortedListOfRunsStaysSorted(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	var list, want []Extent
	for range 2000 {
		e := Extent{uint32(random.IntN(50)), 1 + uint32(random.IntN(3))}
		if i := slices.Index(want, e); i >= 0 && random.IntN(2) == 0 {
			list, want = Remove(list, []Extent{e}), slices.Delete(want, i, i+1)
		} else {
			list, want = Insert(list, []Extent{e}), append(want, e)
		}
		if !slices.IsSortedFunc(list, byStart) || len(list) != len(want) || Count(list) != Count(want) {
			t.Fatalf("list %v, want the sorted %v", list, want)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

// Package rebalance decides which leg of a pool moves next, from one of the fullest drives to one
// of the emptiest, so that drives which were added take their share. It knows drives and legs as
// numbers; the caller says which leg may be on which drive. It decides one move at a time, because
// volumes come and go while legs are copied.
//
// A move never makes its new drive fuller than the drive that it left has become. So each move
// lowers the sum of the squares of the fills, weighted by the sizes of the drives, and moves end.
package rebalance

import (
	"bytes"
	"cmp"
	"slices"

	"weft.dev/weft/proto/block"
)

// Threshold is by how much two drives' fills must differ, as a part of a drive, before a leg moves
// from one to the other: a copy costs more than a small difference does.
const Threshold = 0.1

// most is how many of the fullest and of the emptiest drives are looked at.
const most = 64

// Drive is a drive that legs may move from or to.
type Drive struct {
	ID      block.DriveID
	Extents uint32
	Used    uint32
}

// Fill is the part of a drive that is used.
func (d Drive) Fill() float64 { return float64(d.Used) / float64(max(1, d.Extents)) }

func (d Drive) with(more int64) Drive {
	d.Used = uint32(max(0, int64(d.Used)+more))
	return d
}

// Leg is a leg that may move.
type Leg struct {
	Volume  block.VolumeID
	ID      block.LegID
	Drive   block.DriveID
	Extents uint32
}

// Move is a leg, and the drive that it moves to.
type Move struct {
	Leg Leg
	To  block.DriveID
}

// Next returns the next move; ok is false if none is worth its copy. fits says whether a leg may be
// on a drive: the rules of placement.
func Next(drives []Drive, legs []Leg, fits func(Leg, block.DriveID) bool) (m Move, ok bool) {
	byFill := slices.Clone(drives)
	slices.SortFunc(byFill, func(a, b Drive) int {
		return cmp.Or(cmp.Compare(b.Fill(), a.Fill()), bytes.Compare(a.ID.UUID[:], b.ID.UUID[:]))
	})
	on := map[block.DriveID][]Leg{}
	for _, l := range legs {
		on[l.Drive] = append(on[l.Drive], l)
	}
	for i, from := range byFill[:min(most, len(byFill))] {
		all := on[from.ID]
		slices.SortFunc(all, func(a, b Leg) int {
			return cmp.Or(cmp.Compare(b.Extents, a.Extents), bytes.Compare(a.ID.UUID[:], b.ID.UUID[:]))
		})
		for j := len(byFill) - 1; j > max(i, len(byFill)-1-most) && from.Fill()-byFill[j].Fill() > Threshold; j-- {
			to := byFill[j]
			for _, l := range all {
				if better(from, to, l) && fits(l, to.ID) {
					return Move{l, to.ID}, true
				}
			}
		}
	}
	return Move{}, false
}

// better reports whether a leg has room on another drive, and does not make it fuller than its own.
func better(from, to Drive, l Leg) bool {
	n := int64(l.Extents)
	return n > 0 && int64(to.Used)+n <= int64(to.Extents) && to.with(n).Fill() <= from.with(-n).Fill()
}

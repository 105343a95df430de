// SPDX-License-Identifier: Apache-2.0

package rebalance

import (
	"math/rand/v2"
	"slices"
	"testing"

	"weft.dev/weft/proto/block"
)

func id(n uint64) block.UUID {
	var u block.UUID
	for i := range 8 {
		u[15-i] = byte(n >> (8 * i))
	}
	return u
}

func drive(n uint64, extents, used uint32) Drive {
	return Drive{block.DriveID{UUID: id(n)}, extents, used}
}

func leg(n, drive uint64, extents uint32) Leg {
	return Leg{block.VolumeID{UUID: id(n)}, block.LegID{UUID: id(n)}, block.DriveID{UUID: id(drive)}, extents}
}

func anywhere(Leg, block.DriveID) bool { return true }

func TestALegMovesFromTheFullestDriveToTheEmptiest(t *testing.T) {
	drives := []Drive{drive(1, 100, 50), drive(2, 100, 0), drive(3, 100, 80), drive(4, 100, 10)}
	legs := []Leg{leg(1, 1, 50), leg(2, 3, 20), leg(3, 3, 30), leg(4, 3, 30), leg(5, 4, 10)}
	if m, ok := Next(drives, legs, anywhere); !ok || m.Leg.ID != legs[2].ID || m.To != drives[1].ID {
		t.Errorf("Next = %v, %v; want the first of the largest legs that improve it, to drive 2", m, ok)
	}
	not2 := func(_ Leg, to block.DriveID) bool { return to != drives[1].ID }
	if m, ok := Next(drives, legs, not2); !ok || m.To != drives[3].ID {
		t.Errorf("Next = %v, %v; want drive 4 if none may be on drive 2", m, ok)
	}
	if m, ok := Next(drives, legs, func(Leg, block.DriveID) bool { return false }); ok {
		t.Errorf("Next = %v, though no leg may be elsewhere", m)
	}
}

func TestASmallDifferenceIsLeft(t *testing.T) {
	for _, c := range []struct {
		what   string
		drives []Drive
		legs   []Leg
		moves  bool
	}{
		{"within the threshold", []Drive{drive(1, 100, 50), drive(2, 100, 41)}, []Leg{leg(1, 1, 1)}, false},
		{"above it", []Drive{drive(1, 100, 52), drive(2, 100, 41)}, []Leg{leg(1, 1, 1)}, true},
		{"it would only change places", []Drive{drive(1, 100, 50), drive(2, 100, 0)}, []Leg{leg(1, 1, 50)}, false},
		{"no room", []Drive{drive(1, 1000, 600), drive(2, 10, 4)}, []Leg{leg(1, 1, 20)}, false},
		{"one drive", []Drive{drive(1, 100, 50)}, []Leg{leg(1, 1, 1)}, false},
		{"none", nil, nil, false},
		{"a drive without extents", []Drive{drive(1, 100, 50), drive(2, 0, 0)}, []Leg{leg(1, 1, 1)}, false},
	} {
		if m, ok := Next(c.drives, c.legs, anywhere); ok != c.moves {
			t.Errorf("%s: Next = %v, %v", c.what, m, ok)
		}
	}
}

// unbalance is the sum of the squares of the fills, weighted by the sizes of the drives.
func unbalance(drives []Drive) (sum float64) {
	for _, d := range drives {
		sum += d.Fill() * d.Fill() * float64(d.Extents)
	}
	return sum
}

func TestEachMoveImprovesTheBalanceAndMovesEnd(t *testing.T) {
	for seed := range uint64(300) {
		r := rand.New(rand.NewPCG(seed, 3))
		var drives []Drive
		for i := range 2 + r.IntN(20) {
			drives = append(drives, drive(uint64(i), uint32(50+r.IntN(500)), 0))
		}
		var legs []Leg
		allowed := map[block.LegID]uint64{} // bits: the drives that it may be on
		for i := range r.IntN(200) {
			d, n := &drives[r.IntN(1+r.IntN(len(drives)))], uint32(1+r.IntN(20))
			if d.Used+n > d.Extents {
				continue
			}
			d.Used += n
			l := Leg{block.VolumeID{UUID: id(uint64(i))}, block.LegID{UUID: id(uint64(i))}, d.ID, n}
			legs, allowed[l.ID] = append(legs, l), r.Uint64()|r.Uint64()
		}
		at := func(id block.DriveID) int { return slices.IndexFunc(drives, func(d Drive) bool { return d.ID == id }) }
		fits := func(l Leg, to block.DriveID) bool { return allowed[l.ID]>>at(to)&1 == 1 }
		was, moves := unbalance(drives), 0
		for ; ; moves++ {
			m, ok := Next(drives, legs, fits)
			if !ok {
				break
			}
			from, to := at(m.Leg.Drive), at(m.To)
			if !fits(m.Leg, m.To) || from == to {
				t.Fatalf("seed %d: %v may not move there", seed, m)
			}
			drives[from].Used -= m.Leg.Extents
			drives[to].Used += m.Leg.Extents
			i := slices.IndexFunc(legs, func(l Leg) bool { return l.ID == m.Leg.ID })
			legs[i].Drive = m.To
			now := unbalance(drives)
			if now >= was || drives[to].Used > drives[to].Extents {
				t.Fatalf("seed %d, move %d: unbalance %v, before %v; drive has %d of %d", seed, moves, now, was, drives[to].Used, drives[to].Extents)
			}
			if was = now; moves > 10*len(legs) {
				t.Fatalf("seed %d: %d moves of %d legs", seed, moves, len(legs))
			}
		}
	}
}

func TestNewDrivesTakeTheirShare(t *testing.T) {
	var drives []Drive
	var legs []Leg
	for i := range uint64(4) {
		drives = append(drives, drive(i, 100, 80))
		for j := range uint64(20) {
			legs = append(legs, leg(100*i+j, i, 4))
		}
	}
	drives = append(drives, drive(4, 100, 0), drive(5, 100, 0))
	for {
		m, ok := Next(drives, legs, anywhere)
		if !ok {
			break
		}
		for i := range drives {
			switch drives[i].ID {
			case m.Leg.Drive:
				drives[i].Used -= 4
			case m.To:
				drives[i].Used += 4
			}
		}
		i := slices.IndexFunc(legs, func(l Leg) bool { return l.ID == m.Leg.ID })
		legs[i].Drive = m.To
	}
	for _, d := range drives {
		if d.Fill() < 0.45 || d.Fill() > 0.62 {
			t.Errorf("drive %v is %v full at the end, want about 53%%", d.ID, d.Fill())
		}
	}
}

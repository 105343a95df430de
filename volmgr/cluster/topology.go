// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"maps"
	"slices"
	"strings"

	"weft.dev/weft/proto/block"
)

// holds reports whether a node is in a segment.
func (g Segment) holds(n *Node) bool {
	for key, value := range g {
		if n.label(key) != value {
			return false
		}
	}
	return true
}

func (g Segment) String() string {
	var pairs []string
	for _, key := range slices.Sorted(maps.Keys(g)) {
		pairs = append(pairs, key+"="+g[key])
	}
	return strings.Join(pairs, ",")
}

// segments names some of them, for people.
func segments(all []Segment) string {
	var names []string
	for _, g := range all {
		names = append(names, g.String())
	}
	return some(names, 4)
}

// allows reports whether legs may lie on a node.
func (in CreateVolume) allows(n *Node) bool {
	return len(in.Topology) == 0 || slices.ContainsFunc(in.Topology, func(g Segment) bool { return g.holds(n) })
}

// behind is how far a node is from what is preferred: 0 in the first segment, 1 in
// none, and 0 if nothing is preferred.
func (in CreateVolume) behind(n *Node) float64 {
	if len(in.Preferred) == 0 {
		return 0
	}
	at := slices.IndexFunc(in.Preferred, func(g Segment) bool { return g.holds(n) })
	if at < 0 {
		at = len(in.Preferred)
	}
	return float64(at) / float64(len(in.Preferred))
}

// misplaced refuses a volume that has a leg outside of the segments that are asked for.
func (t *tx) misplaced(in CreateVolume, v *Volume) error {
	for i := range v.Legs {
		if n := t.nodes.peek(v.Legs[i].Node); n != nil && !in.allows(n) {
			return conflict(v.object(), "topology", v.Legs[i].String(), segments(in.Topology))
		}
	}
	return nil
}

// Capacity is how much could be made of volumes of a kind.
type Capacity struct {
	Available block.Size // by all of them together
	Maximum   block.Size // by one, now
	Minimum   block.Size
}

// Capacity tells what could be made of volumes such as in: of its copies, stripes,
// chunk, pool, spread and topology, with the defaults of CreateVolume. The error
// says which of them is wrong.
func (s *State) Capacity(in CreateVolume) (Capacity, error) {
	in.Name, in.Size = "capacity", minVolume
	in, err := in.normal()
	if err != nil {
		return Capacity{}, err
	}
	pool := s.pools[in.Pool]
	if pool == nil {
		return Capacity{}, notFound("pool " + in.Pool)
	}
	spots, _ := s.spots(pool, in)
	r := room{in: in, free: map[string][]*spot{}}
	for _, x := range spots {
		if r.records(x, max(1, in.Stripes)) > 0 {
			r.free[x.domain] = append(r.free[x.domain], x)
			r.most = max(r.most, x.free())
			r.drives++
		}
	}
	return Capacity{Available: r.available(), Maximum: r.maximum(), Minimum: minVolume}, nil
}

// room is the drives with free extents for volumes of a kind, by domain.
type room struct {
	in     CreateVolume
	drives int
	free   map[string][]*spot
	most   uint32 // of one drive
}

// records is how many legs of a volume with so many stripes a drive's label has room for.
func (r room) records(x *spot, stripes int) uint64 {
	return uint64(x.room / r.in.record(block.Layout{Stripes: stripes, Copies: r.in.Copies}).Size())
}

// available: n extents of columns fit if each of them can have its copies in
// different domains, and a domain holds at most one copy of each.
func (r room) available() block.Size {
	var total uint64
	for _, drives := range r.free {
		for _, x := range drives {
			total += uint64(x.free())
		}
	}
	return block.Size(largest(total/uint64(r.in.Copies), func(n uint64) bool {
		var copies uint64
		for _, drives := range r.free {
			var in uint64
			for _, x := range drives {
				in += uint64(x.free())
			}
			copies += min(in, n)
		}
		return copies >= n*uint64(r.in.Copies)
	})) * block.ExtentSize
}

// maximum is the size above which placement finds no place, whatever stripes it
// chooses where it may.
func (r room) maximum() (best block.Size) {
	least, most := r.in.Stripes, r.in.Stripes
	if least == 0 {
		least, most = 1, max(1, min(mostAutoStripes, r.drives/r.in.Copies))
	}
	for stripes := least; stripes <= most; stripes++ {
		size := block.Size(r.legExtents(stripes)) * block.ExtentSize * block.Size(stripes)
		size = min(size, maxVolume)
		if r.in.Stripes != 0 || size > 0 && autoStripes(size, r.in.Copies, r.drives) >= stripes {
			best = max(best, size)
		}
	}
	return best
}

// legExtents is how large the legs of a volume can be: a drive has room for so many
// whole ones, and a domain at most one of each column.
func (r room) legExtents(stripes int) uint64 {
	return largest(uint64(r.most), func(n uint64) bool {
		legs := 0
		for _, drives := range r.free {
			in := 0
			for _, x := range drives {
				in += int(min(uint64(x.free())/n, r.records(x, stripes)))
			}
			legs += min(in, stripes)
		}
		return legs >= stripes*r.in.Copies
	})
}

// largest is the largest n from 1 to most that fits, 0 if none does. What fits, fits
// with less.
func largest(most uint64, fits func(n uint64) bool) uint64 {
	low, high := uint64(0), most
	for low < high {
		n := low + (high-low+1)/2
		if fits(n) {
			low = n
		} else {
			high = n - 1
		}
	}
	return low
}

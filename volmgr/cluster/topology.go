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

// segments names the first few segments, for people.
func segments(all []Segment) string {
	var names []string
	for _, g := range all {
		names = append(names, g.String())
	}
	return some(names, 4)
}

// allows reports whether legs may be placed on a node.
func (in CreateVolume) allows(n *Node) bool {
	return len(in.Topology) == 0 || slices.ContainsFunc(in.Topology, func(g Segment) bool { return g.holds(n) })
}

// behind ranks a node by the preferred segments: 0 in the first, 1 in none, and 0 if none is
// preferred.
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

// misplaced refuses an existing volume that has a leg outside of the requested segments.
func (t *tx) misplaced(in CreateVolume, v *Volume) error {
	for i := range v.Legs {
		if n := t.nodes.peek(v.Legs[i].Node); n != nil && !in.allows(n) {
			return conflict(v.object(), "topology", v.Legs[i].String(), segments(in.Topology))
		}
	}
	return nil
}

// Capacity is the space for volumes of one kind.
type Capacity struct {
	Available block.Size // for all of them together
	Maximum   block.Size // for one, now
	Minimum   block.Size
}

// Capacity returns the space for volumes such as in, with its copies, stripes, chunk, pool,
// spread and topology and the defaults of CreateVolume. The error says which of them is
// wrong.
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

// room is the set of drives with space for volumes of one kind, by domain.
type room struct {
	in     CreateVolume
	drives int
	free   map[string][]*spot
	most   uint32 // largest number of free extents on one drive
}

// records is the number of legs, of a volume with this many stripes, for which a drive's
// label has room.
func (r room) records(x *spot, stripes int) uint64 {
	return uint64(x.room / r.in.record(r.in.layout(stripes)).Size())
}

// available is the size that fits in all volumes together. n extents of columns fit if each
// can have its copies in different domains. A domain holds at most one copy of each, so its
// free extents count up to n.
func (r room) available() block.Size {
	var total uint64
	for _, drives := range r.free {
		for _, x := range drives {
			total += uint64(x.free())
		}
	}
	g := r.in.group()
	return block.Size(largest(total/uint64(g.Members), func(n uint64) bool {
		var copies uint64
		for _, drives := range r.free {
			var in uint64
			for _, x := range drives {
				in += uint64(x.free())
			}
			copies += min(in, n)
		}
		return copies >= n*uint64(g.Members)
	})) * block.Size(g.Needs) * block.ExtentSize
}

// maximum is the largest size that placement can place, with any number of stripes that it
// may choose.
func (r room) maximum() (best block.Size) {
	g, least, most := r.in.group(), r.in.Stripes, r.in.Stripes
	if least == 0 {
		least, most = 1, max(1, min(mostAutoStripes, r.drives/g.Members))
	}
	for stripes := least; stripes <= most; stripes++ {
		size := block.Size(r.legExtents(stripes)) * block.ExtentSize * block.Size(stripes*g.Needs)
		size = min(size, maxVolume)
		if r.in.Stripes != 0 || size > 0 && autoStripes(size, g.Members, r.drives) >= stripes {
			best = max(best, size)
		}
	}
	return best
}

// legExtents is the largest leg, in extents, for which all legs of a volume fit: a drive
// takes whole legs, and a domain at most one of each column.
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
		return legs >= stripes*r.in.group().Members
	})
}

// largest is the largest n from 1 to most that fits, 0 if none does. If n fits, every
// smaller one must fit.
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

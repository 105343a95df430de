// SPDX-License-Identifier: Apache-2.0

package placement

import "weft.dev/weft/proto/block"

// Space is what drives have left for volumes of one kind.
type Space struct {
	request Request
	maximum block.Size // no volume may be larger
	drives  int
	free    map[string][]*Drive // by domain
	most    uint32              // largest number of free extents on one drive
}

// SpaceFor looks for drives with space for volumes such as r, none above maximum.
func SpaceFor(drives []*Drive, r Request, maximum block.Size) Space {
	s := Space{request: r, maximum: maximum, free: map[string][]*Drive{}}
	for _, x := range drives {
		if s.records(x, max(1, r.Stripes)) > 0 {
			s.free[x.Domain] = append(s.free[x.Domain], x)
			s.most = max(s.most, x.Free())
			s.drives++
		}
	}
	return s
}

// records is the number of legs, of a volume with this many stripes, for which a drive's
// label has room.
func (s Space) records(x *Drive, stripes int) uint64 {
	return uint64(x.Room / s.request.Record(s.request.Layout(stripes)))
}

// Available is the size that fits in all volumes together. n extents of columns fit if each
// can have its copies in different domains. A domain holds at most one copy of each, so its
// free extents count up to n.
func (s Space) Available() block.Size {
	var total uint64
	for _, drives := range s.free {
		for _, x := range drives {
			total += uint64(x.Free())
		}
	}
	g := s.request.group()
	return block.Size(largest(total/uint64(g.Members), func(n uint64) bool {
		var copies uint64
		for _, drives := range s.free {
			var in uint64
			for _, x := range drives {
				in += uint64(x.Free())
			}
			copies += min(in, n)
		}
		return copies >= n*uint64(g.Members)
	})) * block.Size(g.Needs) * s.request.Layout(1).ExtentData()
}

// Maximum is the largest volume that can be placed, with any number of stripes that
// placement may choose.
func (s Space) Maximum() (best block.Size) {
	g, least, most := s.request.group(), s.request.Stripes, s.request.Stripes
	if least == 0 {
		least, most = 1, max(1, min(mostAutoStripes, s.drives/g.Members))
	}
	for stripes := least; stripes <= most; stripes++ {
		size := block.Size(s.legExtents(stripes)) * s.request.Layout(1).ExtentData() * block.Size(stripes*g.Needs)
		size = min(size, s.maximum)
		if s.request.Stripes != 0 || size > 0 && autoStripes(size, g.Members, s.drives) >= stripes {
			best = max(best, size)
		}
	}
	return best
}

// legExtents is the largest leg, in extents, for which all legs of a volume fit: a drive
// takes whole legs, and a domain at most one of each column.
func (s Space) legExtents(stripes int) uint64 {
	return largest(uint64(s.most), func(n uint64) bool {
		legs := 0
		for _, drives := range s.free {
			in := 0
			for _, x := range drives {
				in += int(min(uint64(x.Free())/n, s.records(x, stripes)))
			}
			legs += min(in, stripes)
		}
		return legs >= stripes*s.request.group().Members
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

// SPDX-License-Identifier: Apache-2.0

// Package placement chooses the drives of a volume's legs, and says how much space is left
// for volumes. It works on values alone: the drives that may be used, each with its space,
// and a request.
//
// Placement is explicit: the drive of each leg is decided once and stored. A leg goes to the
// best of a few random drives that can take it. This "power of many choices" fills 10 000
// drives as evenly as a global optimum would, at a microsecond a leg, and nothing has to be
// recomputed when drives are added.
//
// Legs of one column never share a node or a failure domain. If random picks find no
// placement, a second pass takes the emptiest domains first, which finds one whenever there
// is one.
package placement

import (
	"cmp"
	"slices"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/image"
)

const (
	choices      = 16 // drives looked at for a leg
	choicesLarge = 32 // for legs of 1 TiB and more, where a bad pick lasts
	// The cost of a second leg of a volume on the same drive, or the same node, in units of
	// fill: a drive that is a quarter fuller is still preferred to a shared one.
	sharedDrive = 0.25
	sharedNode  = 0.05
	// The cost of a node in no preferred segment, compared with one in the first: a
	// preferred drive is taken even if it is half fuller.
	notPreferred = 0.5
)

// Drive is a drive that may take legs.
type Drive struct {
	ID      block.DriveID
	Node    block.NodeName
	Domain  string     // its failure domain; no two legs of a column share one
	Extents uint32     // in total
	Used    uint32     // extents, those of the request's legs included
	Room    block.Size // on its label, for the records of more legs
	Behind  float64    // 0 on the most preferred nodes, up to 1 on those in no preferred segment

	legs int // of the request
}

// Free is the number of extents that no leg occupies.
func (d *Drive) Free() uint32 { return d.Extents - min(d.Used, d.Extents) }

// Request asks for the legs of one volume.
type Request struct {
	Size    block.Size
	Stripes int                                  // 0 lets placement choose
	Layout  func(stripes int) block.Layout       // with this many stripes
	Record  func(layout block.Layout) block.Size // of a leg on its drive's label, with its extents in one piece
	Random  uint64                               // decides between equal drives
	Mapped  bool                                 // the legs get no extents: drives have what they may promise
	// Taken returns the extents of a drive that legs occupy. It is called for few drives.
	Taken func(block.DriveID) []image.Extent
}

func (r Request) group() block.Group { return r.Layout(1).Group() }

// Place is the drive of a leg and its extents there.
type Place struct {
	Column, Copy int
	Drive        *Drive
	Extents      []image.Extent
}

// Choose finds a place for each leg, by column and copy. If there is no room it returns no
// places, and the layout that lacks it.
func Choose(drives []*Drive, r Request) (block.Layout, []Place) {
	most := r.Stripes
	least := most
	if most == 0 {
		most, least = autoStripes(r.Size, r.group().Members, len(drives)), 1
	}
	for stripes := most; stripes >= least; stripes-- {
		layout := r.Layout(stripes)
		for _, pick := range []func(*placer, []*Drive) *Drive{(*placer).sample, (*placer).emptiest} {
			if places := tryPlace(drives, layout, r, pick); places != nil {
				return layout, places
			}
		}
	}
	layout := r.Layout(least)
	if r.Stripes == 0 {
		layout.Stripes = most
	}
	return layout, nil
}

// Sample is Choose for many drives of which only some have to be looked at: at returns the
// one of a number below n. It returns the places that Choose would, or none if Choose would
// look at all drives.
func Sample(n int, at func(int) *Drive, r Request) (block.Layout, []Place) {
	stripes := r.Stripes
	if stripes == 0 {
		stripes = autoStripes(r.Size, r.group().Members, n)
	}
	seen := map[int]*Drive{}
	p := newPlacer(nil, r.Layout(stripes), r)
	p.n, p.at = n, func(i int) *Drive {
		if seen[i] == nil {
			seen[i] = at(i)
		}
		return seen[i]
	}
	columns := p.columns(r.Layout(stripes), (*placer).few)
	if columns == nil {
		return r.Layout(stripes), nil
	}
	places := p.carve(columns, r.Taken)
	if overfull(places) != nil {
		return r.Layout(stripes), nil
	}
	return r.Layout(stripes), places
}

// placer places the legs of one volume.
type placer struct {
	drives []*Drive // in Sample none
	n      int      // how many drives there are
	at     func(int) *Drive
	need   uint32     // extents of a leg
	record block.Size // on the drive's label, with its extents in one piece
	mapped bool       // legs get no extents
	k      int
	rng    random
	onNode map[block.NodeName]int // legs of this request
	firsts map[block.NodeName]int // those of them that are first in a column, which serve reads
}

func newPlacer(drives []*Drive, layout block.Layout, r Request) *placer {
	p := &placer{
		drives: drives, n: len(drives), at: func(i int) *Drive { return drives[i] }, need: uint32(min(layout.LegExtents(r.Size), 1<<31)), k: choices, rng: random(r.Random),
		onNode: map[block.NodeName]int{}, firsts: map[block.NodeName]int{},
		record: r.Record(layout), mapped: r.Mapped,
	}
	if layout.LegSize(r.Size) >= block.TiB {
		p.k = choicesLarge
	}
	return p
}

// tryPlace places the legs of a layout; nil if there is no room. A leg in many extents needs
// more room on a label than was assumed when its drive was picked. If it does not fit,
// tryPlace starts again without that drive.
func tryPlace(drives []*Drive, layout block.Layout, r Request, pick func(*placer, []*Drive) *Drive) []Place {
	for {
		p := newPlacer(drives, layout, r)
		columns := p.columns(layout, pick)
		if columns == nil {
			return nil
		}
		places := p.carve(columns, r.Taken)
		full := overfull(places)
		if full == nil {
			return places
		}
		p.giveBack(columns)
		drives = slices.DeleteFunc(slices.Clone(drives), func(x *Drive) bool { return x == full })
	}
}

// overfull returns a drive whose label has no room for the extents of the legs placed there.
func overfull(places []Place) *Drive {
	pieces := map[*Drive]block.Size{}
	for _, at := range places {
		pieces[at.Drive] += block.LegRecord{Runs: max(1, len(at.Extents))}.Size() - block.LegRecord{Runs: 1}.Size()
	}
	for _, at := range places {
		if pieces[at.Drive] > at.Drive.Room {
			return at.Drive
		}
	}
	return nil
}

const mostAutoStripes = 8

// autoStripes is the number of columns of a volume whose request leaves it open: one for
// each 256 GiB up to 8, since a column is served by one kernel thread and read from one leg;
// at least two from 1 GiB on, since below that whole extents would be wasted; and no more
// than there are drives for.
func autoStripes(size block.Size, members, drives int) int {
	n := int(min((size+256*block.GiB-1)/(256*block.GiB), mostAutoStripes))
	if size >= block.GiB {
		n = max(n, 2)
	}
	return max(1, min(n, drives/members))
}

// columns picks a drive for each leg of every column, first leg first. If there is no room
// it returns nil and reserves nothing.
func (p *placer) columns(layout block.Layout, pick func(*placer, []*Drive) *Drive) [][]*Drive {
	if p.n == 0 {
		return nil
	}
	var columns [][]*Drive
	for range layout.Stripes {
		var legs []*Drive
		for range layout.Group().Members {
			x := pick(p, legs)
			if x == nil {
				p.giveBack(append(columns, legs))
				return nil
			}
			x.Used += p.need
			x.Room -= p.record
			x.legs++
			p.onNode[x.Node]++
			legs = append(legs, x)
		}
		p.rotate(legs)
		columns = append(columns, legs)
	}
	return columns
}

func (p *placer) giveBack(columns [][]*Drive) {
	for _, x := range slices.Concat(columns...) {
		x.Used -= p.need
		x.Room += p.record
		x.legs--
	}
}

// rotate makes the most preferred leg the first of its column; among equals, the one whose
// node has the fewest first legs. Reads go to first legs, so the reads of a volume use all
// of its nodes.
func (p *placer) rotate(legs []*Drive) {
	first := slices.MinFunc(legs, func(a, b *Drive) int {
		return cmp.Or(cmp.Compare(a.Behind, b.Behind), cmp.Compare(p.firsts[a.Node], p.firsts[b.Node]))
	})
	i := slices.Index(legs, first)
	legs[0], legs[i] = legs[i], legs[0]
	p.firsts[first.Node]++
}

// fits reports whether a drive can take the next leg of a column.
func (p *placer) fits(x *Drive, column []*Drive) bool {
	if x.Free() < p.need || x.Room < p.record {
		return false
	}
	return !slices.ContainsFunc(column, func(o *Drive) bool {
		return o.Domain == x.Domain || o.Node == x.Node
	})
}

func (p *placer) score(x *Drive) float64 {
	fill := float64(x.Used+p.need) / float64(x.Extents)
	return fill + sharedDrive*float64(x.legs) + sharedNode*float64(p.onNode[x.Node]) + notPreferred*x.Behind
}

// few picks the best of k random drives that fit; nil if none does, or if there are few
// drives at all.
func (p *placer) few(column []*Drive) (best *Drive) {
	if p.n <= 2*p.k {
		return nil
	}
	for met, tries := 0, 0; met < p.k && tries < 8*p.k; tries++ {
		x := p.at(p.rng.intn(p.n))
		if p.fits(x, column) {
			best = p.better(x, best)
			met++
		}
	}
	return best
}

// better returns the one with the lower score, or x if best is nil.
func (p *placer) better(x, best *Drive) *Drive {
	if best == nil || p.score(x) < p.score(best) {
		return x
	}
	return best
}

// sample picks the best of k random drives that fit. It looks at all drives if there are
// few, or if no random one fits.
func (p *placer) sample(column []*Drive) *Drive {
	if best := p.few(column); best != nil {
		return best
	}
	var best *Drive
	start := p.rng.intn(len(p.drives)) // so that equally good drives take turns
	for i := range p.drives {
		if x := p.drives[(start+i)%len(p.drives)]; p.fits(x, column) {
			best = p.better(x, best)
		}
	}
	return best
}

// emptiest picks the emptiest drive of the domain with room for the most legs.
// Legs are all of one size and a column takes each domain once, so this greedy
// choice finds a placement if there is one.
func (p *placer) emptiest(column []*Drive) *Drive {
	room := map[string]uint32{}
	for _, x := range p.drives {
		room[x.Domain] += min(x.Free()/p.need, uint32(x.Room/p.record))
	}
	var best *Drive
	for _, x := range p.drives {
		if !p.fits(x, column) {
			continue
		}
		if best == nil || cmp.Or(cmp.Compare(room[x.Domain], room[best.Domain]), cmp.Compare(x.Free(), best.Free())) > 0 {
			best = x
		}
	}
	return best
}

// carve finds extents for the legs on the drives that were picked.
func (p *placer) carve(columns [][]*Drive, takenOn func(block.DriveID) []image.Extent) (places []Place) {
	taken := map[block.DriveID][]image.Extent{}
	for c, column := range columns {
		for i, x := range column {
			if p.mapped {
				places = append(places, Place{Column: c, Copy: i, Drive: x})
				continue
			}
			if taken[x.ID] == nil {
				taken[x.ID] = takenOn(x.ID)
			}
			extents := image.FirstFit(taken[x.ID], x.Extents, p.need)
			taken[x.ID] = append(taken[x.ID], extents...)
			places = append(places, Place{Column: c, Copy: i, Drive: x, Extents: extents})
		}
	}
	return places
}

// random is splitmix64: small, and the same on every platform and in every version.
type random uint64

func (r *random) intn(n int) int {
	*r += 0x9e3779b97f4a7c15
	z := uint64(*r)
	z = (z ^ z>>30) * 0xbf58476d1ce4e5b9
	z = (z ^ z>>27) * 0x94d049bb133111eb
	return int((z ^ z>>31) % uint64(n))
}

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strings"

	"weft.dev/weft/proto/block"
)

// Placement is explicit: the drive of each leg is decided once and stored. A leg goes to the
// best of a few random drives that can take it. This "power of many choices" fills 10 000
// drives as evenly as a global optimum would, at a microsecond a leg, and nothing has to be
// recomputed when drives are added.
//
// Legs of one column never share a node or a value of the volume's spread label. If random
// picks find no placement, a second pass takes the emptiest domains first, which finds one
// whenever there is one.

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

// id draws the n-th identifier from a seed.
func (s Seed) id(n uint32) block.UUID {
	sum := sha256.Sum256(binary.BigEndian.AppendUint32(s[:], n))
	return block.UUIDFromRandom([16]byte(sum[:16]))
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

// spot is a drive that can take legs, and what this request has placed on it so far.
type spot struct {
	drive  *Drive
	domain string     // value of the spread label
	used   uint32     // extents, this request's included
	legs   int        // of this request
	room   block.Size // on the drive's label
	held   int        // legs that were there before
	behind float64
}

func (s *spot) free() uint32 { return s.drive.Extents - min(s.used, s.drive.Extents) }

// placer places the legs of one volume.
type placer struct {
	spots  []*spot
	need   uint32     // extents of a leg
	record block.Size // on the drive's label, with its extents in one piece
	k      int
	rng    random
	onNode map[block.NodeName]int // legs of this request
	firsts map[block.NodeName]int // those of them that are first in a column, which serve reads
}

// place finds room for a volume, or says why there is none.
func (s *State) place(pool *Pool, in CreateVolume) (block.Layout, []Leg, error) {
	spots, refusals := s.spots(pool, in)
	if err := s.enoughDomains(pool, in, spots, refusals); err != nil {
		return block.Layout{}, nil, err
	}
	most := in.Stripes
	least := most
	if most == 0 {
		most, least = autoStripes(in.Size, in.group().Members, len(spots)), 1
	}
	for stripes := most; stripes >= least; stripes-- {
		layout := in.layout(stripes)
		for _, pick := range []func(*placer, []*spot) *spot{(*placer).sample, (*placer).emptiest} {
			if legs := s.tryPlace(spots, layout, in, pick); legs != nil {
				return layout, legs, nil
			}
		}
	}
	layout := in.layout(least)
	if in.Stripes == 0 {
		layout.Stripes = most
	}
	return layout, nil, noSpace(pool, in, layout, spots, refusals)
}

// tryPlace places the legs of a layout; nil if there is no room. A leg in many extents needs
// more room on a label than was assumed when its drive was picked. If it does not fit,
// tryPlace starts again without that drive.
func (s *State) tryPlace(spots []*spot, layout block.Layout, in CreateVolume, pick func(*placer, []*spot) *spot) []Leg {
	for {
		p := newPlacer(spots, layout, in)
		columns := p.columns(layout, pick)
		if columns == nil {
			return nil
		}
		legs := s.carve(columns, p.need, in.Seed)
		full := p.overfull(columns, legs)
		if full == nil {
			return legs
		}
		p.giveBack(columns)
		spots = slices.DeleteFunc(slices.Clone(spots), func(x *spot) bool { return x == full })
	}
}

// overfull returns a drive whose label has no room for the extents of the legs placed there.
func (p *placer) overfull(columns [][]*spot, legs []Leg) *spot {
	at := slices.Concat(columns...)
	pieces := map[*spot]block.Size{}
	for i, x := range at {
		pieces[x] += block.LegRecord{Runs: len(legs[i].Extents)}.Size() - block.LegRecord{Runs: 1}.Size()
	}
	for _, x := range at {
		if pieces[x] > x.room {
			return x
		}
	}
	return nil
}

func newPlacer(spots []*spot, layout block.Layout, in CreateVolume) *placer {
	seed := in.Seed.id(0)
	p := &placer{
		need: uint32(min(layout.LegExtents(in.Size), 1<<31)), k: choices,
		rng:    random(binary.BigEndian.Uint64(seed[:8])),
		onNode: map[block.NodeName]int{}, firsts: map[block.NodeName]int{},
		record: in.record(layout).Size(),
	}
	if layout.LegSize(in.Size) >= block.TiB {
		p.k = choicesLarge
	}
	p.spots = spots
	return p
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

// spots lists the drives that the request can use now, in order of their ids, and for each
// other drive the reason why it cannot.
func (s *State) spots(pool *Pool, in CreateVolume) (usable []*spot, refusals []string) {
	type place struct {
		node    *Node
		online  bool
		domain  string
		allowed bool
		behind  float64
	}
	places := map[block.NodeName]place{}
	for _, id := range s.sortedDrives() {
		d := s.drives[id]
		at, ok := places[d.Node]
		if !ok {
			n := s.nodes[d.Node]
			at = place{n, s.targetOnline(n.Name), n.label(in.Spread), in.allows(n), in.behind(n)}
			places[d.Node] = at
		}
		var why string
		switch {
		case !pool.selects(d, at.node):
			why = fmt.Sprintf("not in pool %s", pool.Name)
		case !at.allowed:
			why = fmt.Sprintf("its node is not in %s", segments(in.Topology))
		case !at.online:
			why = "its target is offline"
		case d.State != DriveReady:
			why = fmt.Sprintf("%s%s", strings.ToLower(string(d.State)), because(d.Reason))
		case at.domain == "":
			why = fmt.Sprintf("its node has no label %q", in.Spread)
		default:
			usable = append(usable, &spot{drive: d, domain: at.domain, used: s.used[d.ID] + count(s.strays(d)), room: s.labelRoom(d), held: len(s.onDrive[d.ID]), behind: at.behind})
			continue
		}
		refusals = append(refusals, fmt.Sprintf("%s: %s", d.object(), why))
	}
	slices.Sort(refusals)
	return usable, refusals
}

// columns picks a drive for each leg of every column, first leg first. If there is no room
// it returns nil and reserves nothing.
func (p *placer) columns(layout block.Layout, pick func(*placer, []*spot) *spot) [][]*spot {
	if len(p.spots) == 0 {
		return nil
	}
	var columns [][]*spot
	for range layout.Stripes {
		var legs []*spot
		for range layout.Group().Members {
			x := pick(p, legs)
			if x == nil {
				p.giveBack(append(columns, legs))
				return nil
			}
			x.used += p.need
			x.room -= p.record
			x.legs++
			p.onNode[x.drive.Node]++
			legs = append(legs, x)
		}
		p.rotate(legs)
		columns = append(columns, legs)
	}
	return columns
}

func (p *placer) giveBack(columns [][]*spot) {
	for _, x := range slices.Concat(columns...) {
		x.used -= p.need
		x.room += p.record
		x.legs--
	}
}

// rotate makes the most preferred leg the first of its column; among equals, the one whose
// node has the fewest first legs. Reads go to first legs, so the reads of a volume use all
// of its nodes.
func (p *placer) rotate(legs []*spot) {
	first := slices.MinFunc(legs, func(a, b *spot) int {
		return cmp.Or(cmp.Compare(a.behind, b.behind), cmp.Compare(p.firsts[a.drive.Node], p.firsts[b.drive.Node]))
	})
	i := slices.Index(legs, first)
	legs[0], legs[i] = legs[i], legs[0]
	p.firsts[first.drive.Node]++
}

// fits reports whether a drive can take the next leg of a column.
func (p *placer) fits(x *spot, column []*spot) bool {
	if x.free() < p.need || x.room < p.record {
		return false
	}
	return !slices.ContainsFunc(column, func(o *spot) bool {
		return o.domain == x.domain || o.drive.Node == x.drive.Node
	})
}

func (p *placer) score(x *spot) float64 {
	fill := float64(x.used+p.need) / float64(x.drive.Extents)
	return fill + sharedDrive*float64(x.legs) + sharedNode*float64(p.onNode[x.drive.Node]) + notPreferred*x.behind
}

// sample picks the best of k random drives that fit. It looks at all drives if there are
// few, or if no random one fits.
func (p *placer) sample(column []*spot) *spot {
	var best *spot
	consider := func(x *spot) bool {
		if !p.fits(x, column) {
			return false
		}
		if best == nil || p.score(x) < p.score(best) {
			best = x
		}
		return true
	}
	if len(p.spots) > 2*p.k {
		for met, tries := 0, 0; met < p.k && tries < 8*p.k; tries++ {
			if consider(p.spots[p.rng.intn(len(p.spots))]) {
				met++
			}
		}
	}
	if best == nil {
		start := p.rng.intn(len(p.spots)) // so that equally good drives take turns
		for i := range p.spots {
			consider(p.spots[(start+i)%len(p.spots)])
		}
	}
	return best
}

// emptiest picks the emptiest drive of the domain with room for the most legs.
// Legs are all of one size and a column takes each domain once, so this greedy
// choice finds a placement if there is one.
func (p *placer) emptiest(column []*spot) *spot {
	room := map[string]uint32{}
	for _, x := range p.spots {
		room[x.domain] += min(x.free()/p.need, uint32(x.room/p.record))
	}
	var best *spot
	for _, x := range p.spots {
		if !p.fits(x, column) {
			continue
		}
		if best == nil || cmp.Or(cmp.Compare(room[x.domain], room[best.domain]), cmp.Compare(x.free(), best.free())) > 0 {
			best = x
		}
	}
	return best
}

// carve turns picked drives into legs with extents.
func (s *State) carve(columns [][]*spot, need uint32, seed Seed) []Leg {
	var legs []Leg
	taken := map[block.DriveID][]Extent{}
	for c, column := range columns {
		for i, x := range column {
			d := x.drive
			if taken[d.ID] == nil {
				taken[d.ID] = s.carved(d)
			}
			extents := firstFit(taken[d.ID], d.Extents, need)
			taken[d.ID] = append(taken[d.ID], extents...)
			legs = append(legs, Leg{
				ID: block.LegID{UUID: seed.id(uint32(len(legs) + 1))}, Column: c, Copy: i,
				Drive: d.ID, Node: d.Node, Image: plain(extents), State: LegCreating, Revision: 1,
			})
		}
	}
	setPlaces(legs)
	return legs
}

// carved returns the extents of a drive that legs occupy, sorted except for the strays at
// the end.
func (s *State) carved(d *Drive) []Extent { return slices.Concat(s.extents[d.ID], s.strays(d)) }

// strays returns the extents that a drive's label lists and no record has, as after a
// restore of an older backup. Targets keep those legs, so nothing else may be placed there.
func (s *State) strays(d *Drive) []Extent {
	if on := s.targets[d.Node]; on != nil {
		return on.strays[d.ID]
	}
	return nil
}

// firstFit finds need free extents among total: the first hole that holds them all, or else
// holes from the start on. The caller has checked that there are enough.
func firstFit(taken []Extent, total, need uint32) []Extent {
	holes := holes(taken, total)
	for _, h := range holes {
		if h.Count >= need {
			return []Extent{{h.Start, need}}
		}
	}
	var got []Extent
	for _, h := range holes {
		if need == 0 {
			break
		}
		n := min(h.Count, need)
		got = append(got, Extent{h.Start, n})
		need -= n
	}
	if need > 0 {
		panic(fmt.Sprintf("cluster: %d extents short on a drive of %d", need, total))
	}
	return got
}

func holes(taken []Extent, total uint32) (free []Extent) {
	slices.SortFunc(taken, byStart) // fast if they are sorted
	next := uint32(0)
	for _, e := range taken {
		if e.Start > next {
			free = append(free, Extent{next, e.Start - next})
		}
		next = max(next, e.Start+e.Count)
	}
	if next < total {
		free = append(free, Extent{next, total - next})
	}
	return free
}

// distinct names n different failure domains, for an error.
func distinct(n int, label string) string {
	if label == "node" {
		return fmt.Sprintf("%d different nodes", n)
	}
	return fmt.Sprintf("nodes with %d different values of label %q", n, label)
}

// enoughDomains refuses a request whose columns have more members than there are failure
// domains.
func (s *State) enoughDomains(pool *Pool, in CreateVolume, spots []*spot, refusals []string) error {
	domains := map[string]map[string]bool{}
	for _, x := range spots {
		put(domains, x.domain, string(x.drive.Node), true)
	}
	g := in.group()
	if len(domains) >= g.Members {
		return nil
	}
	within := "pool " + pool.Name
	if len(in.Topology) > 0 {
		within += " within " + segments(in.Topology)
	}
	var found []string
	for _, name := range slices.Sorted(maps.Keys(domains)) {
		if in.Spread == "node" {
			found = append(found, name)
			continue
		}
		found = append(found, fmt.Sprintf("%s (%s)", name, some(slices.Sorted(maps.Keys(domains[name])), 4)))
	}
	e := &Error{
		Kind: ResourceExhausted, Reason: ReasonNoSpace, Field: groupField(g), Object: "pool " + pool.Name,
		Text: fmt.Sprintf("volume %s: %s drives on %s, and %s has them on %d%s%s",
			in.Name, needs(g), distinct(g.Members, in.Spread), within, len(domains), because(some(found, 8)), listed(refusals)),
	}
	switch offline := s.offlineDomains(pool, in, domains); {
	case len(domains)+len(offline) >= g.Members:
		return e.hint("bring targets back: %s", some(offline, 8))
	case len(spots) == 0 && len(pool.Selector) > 0:
		return e.hint("the pool selects drives with labels %s: `weft drive label DRIVE %s`, or the same on a node", pairs(pool.Selector), strings.ReplaceAll(pairs(pool.Selector), ",", " "))
	case len(spots) == 0:
		return e.hint("`weft drive list` shows the drives, `weft drive add` adds more")
	case in.Spread == "node":
		return e.hint("add drives on more nodes with `weft drive add`, or ask for fewer copies")
	}
	return e.hint("ask for fewer copies, another --spread, or label nodes with `weft node label`")
}

// offlineDomains lists offline targets whose drives would add values of the volume's spread
// label.
func (s *State) offlineDomains(pool *Pool, in CreateVolume, have map[string]map[string]bool) (nodes []string) {
	seen := map[string]bool{}
	for _, id := range s.sortedDrives() {
		d := s.drives[id]
		n := s.nodes[d.Node]
		domain := n.label(in.Spread)
		if s.targetOnline(d.Node) || n.ConfirmedDead || !pool.selects(d, n) || !in.allows(n) || domain == "" || have[domain] != nil || seen[domain] {
			continue
		}
		seen[domain] = true
		nodes = append(nodes, string(d.Node))
	}
	slices.Sort(nodes)
	return nodes
}

// noSpace says, drive by drive, why a volume does not fit.
func noSpace(pool *Pool, in CreateVolume, layout block.Layout, spots []*spot, refusals []string) error {
	need := layout.LegSize(in.Size).RoundUp(block.ExtentSize)
	record := in.record(layout).Size()
	var full []string
	var room block.Size
	labelled := true // no drive lacks only room on its label
	for _, x := range spots {
		free := block.Size(x.free()) * block.ExtentSize
		room += free
		records := uint32(x.room / record)
		text := fmt.Sprintf("%s: %s free", x.drive.object(), free.Short())
		switch {
		case free < need:
			text += fmt.Sprintf(", %s short", (need - free).Short())
		case block.Size(records) < free/need && int(records) < layout.Legs():
			labelled = false
			text += fmt.Sprintf(", room on its label for %d of %d legs beside the %d that are there", records, layout.Legs(), x.held)
		default:
			text += fmt.Sprintf(", room for %d of %d legs (%s %s)", free/need, layout.Legs(), in.Spread, x.domain)
		}
		full = append(full, text)
	}
	e := &Error{
		Kind: ResourceExhausted, Reason: ReasonNoSpace, Object: "pool " + pool.Name,
		Text: fmt.Sprintf("volume %s: no space for %s of %s in pool %s, which has %s free%s", in.Name, plural(layout.Legs(), "leg"), need.Short(), pool.Name, room.Short(), listed(append(full, refusals...))),
	}
	if !labelled || uint64(in.Size) > uint64(room)/uint64(in.group().Members)*uint64(in.group().Needs) {
		return e.hint("delete volumes, or add drives with `weft drive add`")
	}
	if need == block.ExtentSize { // legs cannot be smaller
		return e.hint("ask for fewer stripes, since each leg takes %v at least, or add drives with `weft drive add`", need)
	}
	return e.hint("ask for more stripes (smaller legs), or add drives with `weft drive add`")
}

// plural counts things: "1 leg", "2 legs".
func plural(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}

// listed shortens a list for an error's text.
func listed(lines []string) string {
	if len(lines) == 0 {
		return ""
	}
	const most = 12
	if len(lines) > most {
		lines = append(slices.Clone(lines[:most]), fmt.Sprintf("and %d more", len(lines)-most))
	}
	return ": " + strings.Join(lines, "; ")
}

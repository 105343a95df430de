// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/image"
	"weft.dev/weft/volmgr/placement"
)

// Where a volume's legs may go. Package placement chooses among the drives that this file
// finds usable, and the refusals here say, drive by drive, why it found no place.

// Segment is a part of the cluster: the nodes that have all of these labels. The label
// "node" is the node's name.
type Segment map[string]string

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

// checkSegments refuses segments that no node's labels could match.
func checkSegments(field string, all []Segment) error {
	for _, g := range all {
		if err := checkLabels(field, g); err != nil {
			return err
		}
	}
	return nil
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

// request is the volume as placement sees it.
func (s *State) request(in CreateVolume) placement.Request {
	seed := in.Seed.id(0)
	return placement.Request{
		Size: in.Size, Stripes: in.Stripes, Layout: in.layout, Mapped: in.Thin,
		Record: func(layout block.Layout) block.Size { return in.record(layout).Size() },
		Random: binary.BigEndian.Uint64(seed[:8]),
		Taken:  func(id block.DriveID) []image.Extent { return s.carved(s.drives[id]) },
	}
}

// place finds drives and extents for a volume's legs, or says why there are none. In most
// cases a few random drives are enough. If they are not, it looks at all of them.
func (s *State) place(pool *Pool, in CreateVolume) (block.Layout, []Leg, error) {
	if layout, legs := s.sampled(pool, in); legs != nil {
		return layout, legs, nil
	}
	return s.placeAmongAll(pool, in)
}

// sampled places a volume as placeAmongAll would, but builds only the candidates that it looks
// at. It returns no legs if it would have to look at all of them.
func (s *State) sampled(pool *Pool, in CreateVolume) (block.Layout, []Leg) {
	f := s.field(pool, in)
	if f.domains < in.group().Members {
		return block.Layout{}, nil
	}
	at := func(i int) *placement.Drive {
		x := f.drives[i]
		return s.candidate(x.drive, x.domain, in.behind(x.node), in)
	}
	layout, places := placement.Sample(len(f.drives), at, s.request(in))
	return layout, in.legs(places)
}

// placeAmongAll is place, looking at all drives.
func (s *State) placeAmongAll(pool *Pool, in CreateVolume) (block.Layout, []Leg, error) {
	drives, refusals := s.candidates(pool, in)
	if err := s.enoughDomains(pool, in, drives, refusals); err != nil {
		return block.Layout{}, nil, err
	}
	layout, places := placement.Choose(drives, s.request(in))
	if places == nil {
		return layout, nil, s.noSpace(pool, in, layout, drives, refusals)
	}
	return layout, in.legs(places), nil
}

// legs are the legs of the requested volume at these places; nil if there are none.
func (in CreateVolume) legs(places []placement.Place) (legs []Leg) {
	for _, at := range places {
		legs = append(legs, Leg{
			ID: block.LegID{UUID: in.Seed.id(uint32(len(legs) + 1))}, Column: at.Column, Copy: at.Copy,
			Drive: at.Drive.ID, Node: at.Drive.Node, Image: newImage(in.Thin, in.layout(1), at.Extents), State: LegCreating, Revision: 1,
		})
	}
	setPlaces(legs)
	return legs
}

// newImage is the image of a leg of a layout that was given these extents; a thin one has none.
func newImage(thin bool, l block.Layout, extents []image.Extent) image.Image {
	if thin {
		return image.Image{Kind: image.Mapped}
	}
	return image.For(l, extents)
}

// fields are the drives that requests can use, for the few kinds of requests that there are.
// They follow from the drives, nodes, pools and online targets, and not from the volumes, so
// they last through many creates. Any change of those clears them.
type fields map[string]*field

// fieldsMost is how many kinds of requests are remembered.
const fieldsMost = 16

// field is what candidates would list, in the same order.
type field struct {
	drives  []usable
	domains int // in how many failure domains they are
}

type usable struct {
	drive  *Drive
	node   *Node
	domain string
}

// field returns the drives that a request can use.
func (s *State) field(pool *Pool, in CreateVolume) *field {
	key := strings.Join([]string{pool.Name, in.Spread, in.topology(), strconv.FormatBool(in.Integrity), strconv.FormatBool(in.Thin)}, "\x00")
	if f := s.fields[key]; f != nil {
		return f
	}
	f, domains, allowed := &field{}, map[string]bool{}, map[block.NodeName]bool{}
	for name, n := range s.nodes {
		allowed[name] = s.mayHold(in, n)
	}
	for _, id := range s.sortedDrives() {
		d := s.drives[id]
		n := s.nodes[d.Node]
		domain := n.label(in.Spread)
		if allowed[d.Node] && d.State == DriveReady && d.Suspect() == "" && d.Leaving == "" && domain != "" && pool.selects(d, n) {
			f.drives = append(f.drives, usable{d, n, domain})
			domains[domain] = true
		}
	}
	f.domains = len(domains)
	if len(s.fields) >= fieldsMost || s.fields == nil {
		s.fields = fields{}
	}
	s.fields[key] = f
	return f
}

// mayHold reports whether legs of the requested volume may be placed on a node now.
func (s *State) mayHold(in CreateVolume, n *Node) bool {
	return s.targetOnline(n.Name) && !s.stops(n.Name) && n.shunned() == "" && in.allows(n) && s.cannotServe(in.Thin, in.layout(1), n.Name) == ""
}

// topology is the text of the segments that the request allows.
func (in CreateVolume) topology() string {
	var all []string
	for _, g := range in.Topology {
		all = append(all, strconv.Quote(g.String()))
	}
	slices.Sort(all)
	return strings.Join(all, ",")
}

// candidate is a drive as placement sees it.
func (s *State) candidate(d *Drive, domain string, behind float64, in CreateVolume) *placement.Drive {
	total, promised := s.promise(d, in.again)
	x := &placement.Drive{
		ID: d.ID, Node: d.Node, Domain: domain, Extents: d.Extents, Used: d.Extents - min(s.free(d.ID), total-promised), Room: s.labelRoom(d), Behind: behind,
	}
	if in.Thin {
		x.Extents, x.Used = total, promised
	}
	return x
}

// candidates lists the drives that the request can use now, in order of their ids, and for each
// other drive the reason why it cannot.
func (s *State) candidates(pool *Pool, in CreateVolume) (usable []*placement.Drive, refusals []string) {
	type place struct {
		node    *Node
		online  bool
		domain  string
		allowed bool
		behind  float64
		cannot  string // serve it
	}
	places := map[block.NodeName]place{}
	for _, id := range s.sortedDrives() {
		d := s.drives[id]
		at, ok := places[d.Node]
		if !ok {
			n := s.nodes[d.Node]
			at = place{n, s.targetOnline(n.Name), n.label(in.Spread), in.allows(n), in.behind(n), s.cannotServe(in.Thin, in.layout(1), n.Name)}
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
		case s.stops(d.Node):
			why = "its target is stopping"
		case at.cannot != "":
			why = at.cannot
		case d.State != DriveReady:
			why = fmt.Sprintf("%s%s", strings.ToLower(string(d.State)), because(d.Reason))
		case d.Suspect() != "":
			why = "suspect: " + d.Suspect()
		case at.node.shunned() != "":
			why = at.node.shunned()
		case d.Leaving != "":
			why = d.Leaving.words()
		case at.domain == "":
			why = fmt.Sprintf("its node has no label %q", in.Spread)
		default:
			usable = append(usable, s.candidate(d, at.domain, at.behind, in))
			continue
		}
		refusals = append(refusals, fmt.Sprintf("%s: %s", d.object(), why))
	}
	slices.Sort(refusals)
	return usable, refusals
}

// cannotServe says why the target of a node cannot serve legs of a volume; empty if it can, as far as
// it has reported.
func (s *State) cannotServe(thin bool, l block.Layout, node block.NodeName) string {
	can := s.abilities(node)
	switch {
	case l.Integrity && !can.integrity:
		return "its target cannot keep checksums: it is of an older version"
	case thin && !can.thin:
		return "its target serves no thin volumes: it is of an older version"
	}
	return ""
}

// carved returns the extents of a drive that legs and trees occupy, sorted except for those of trees
// and the strays at the end.
func (s *State) carved(d *Drive) []image.Extent {
	return slices.Concat(s.extents[d.ID], d.spaceTaken(), s.strays(d))
}

// strays returns the extents that a drive's label lists and no record has, as after a
// restore of an older backup. Targets keep those legs, so nothing else may be placed there.
func (s *State) strays(d *Drive) []image.Extent {
	if on := s.targets[d.Node]; on != nil {
		return on.strays[d.ID]
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
		return Capacity{}, noPool(in.Pool)
	}
	drives, _ := s.candidates(pool, in)
	space := placement.SpaceFor(drives, s.request(in), maxVolume)
	return Capacity{Available: space.Available(), Maximum: space.Maximum(), Minimum: minVolume}, nil
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
func (s *State) enoughDomains(pool *Pool, in CreateVolume, drives []*placement.Drive, refusals []string) error {
	domains := map[string]map[string]bool{}
	for _, x := range drives {
		put(domains, x.Domain, string(x.Node), true)
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
	case len(drives) == 0 && len(pool.Selector) > 0:
		return e.hint("the pool selects drives with labels %s: `weft drive label DRIVE %s`, or the same on a node", pairs(pool.Selector), strings.ReplaceAll(pairs(pool.Selector), ",", " "))
	case len(drives) == 0:
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
func (s *State) noSpace(pool *Pool, in CreateVolume, layout block.Layout, drives []*placement.Drive, refusals []string) error {
	need := block.Size(layout.LegExtents(in.Size)) * block.ExtentSize
	record := in.record(layout).Size()
	var full []string
	var room block.Size
	labelled := true // no drive lacks only room on its label
	for _, x := range drives {
		free := block.Size(x.Free()) * block.ExtentSize
		room += free
		records := uint32(x.Room / record)
		text := fmt.Sprintf("%s: %s free", s.drives[x.ID].object(), free.Short())
		switch {
		case free < need:
			text += fmt.Sprintf(", %s short", (need - free).Short())
		case block.Size(records) < free/need && int(records) < layout.Legs():
			labelled = false
			text += fmt.Sprintf(", room on its label for %d of %d legs besides the %d there", records, layout.Legs(), len(s.onDrive[x.ID]))
		default:
			text += fmt.Sprintf(", room for %d of %d legs (%s %s)", free/need, layout.Legs(), in.Spread, x.Domain)
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

func poolResult(name string) view {
	return func(s *State) any { return s.poolView(s.pools[name]) }
}

// CreatePool names a set of drives. Result: Pool.
type CreatePool struct {
	Name     string
	Selector map[string]string
}

func (in CreatePool) apply(t *tx) (view, error) {
	if _, err := block.ParseVolumeName(in.Name); err != nil {
		return nil, invalid("name", "pool %v", strings.TrimPrefix(err.Error(), "volume "))
	}
	if err := checkLabels("selector", in.Selector); err != nil {
		return nil, err
	}
	if p := t.s.pools[in.Name]; p != nil {
		if !maps.Equal(p.Selector, in.Selector) {
			return nil, conflict("pool "+in.Name, "selector", p.Selector, in.Selector)
		}
		return poolResult(in.Name), nil
	}
	t.pools.set(in.Name, &Pool{Name: in.Name, Selector: maps.Clone(in.Selector)})
	t.event(event.Info, event.PoolCreated, "pool "+in.Name, "", "pool", in.Name)
	return poolResult(in.Name), nil
}

// DeletePool forgets a pool that no volume uses. Result: nil.
type DeletePool struct{ Name string }

func (in DeletePool) apply(t *tx) (view, error) {
	if in.Name == DefaultPool {
		return nil, refused(ReasonPoolInUse, "pool "+DefaultPool, "always exists, and cannot be deleted")
	}
	if t.s.pools[in.Name] == nil {
		return nil, nil
	}
	var users []string
	for _, v := range t.s.volumes.All() {
		if v.Pool == in.Name {
			users = append(users, string(v.Name))
		}
	}
	if slices.Sort(users); len(users) > 0 {
		return nil, refused(ReasonPoolInUse, "pool "+in.Name, "used by %s", some(users, 8))
	}
	t.pools.drop(in.Name)
	t.event(event.Info, event.PoolDeleted, "pool "+in.Name, "", "pool", in.Name)
	return nil, nil
}

// selects reports whether a drive belongs to a pool: each label of the selector
// is on the drive or else on its node.
func (p *Pool) selects(d *Drive, n *Node) bool {
	for key, want := range p.Selector {
		have, ok := d.Labels[key]
		if !ok {
			have = n.label(key)
		}
		if have != want {
			return false
		}
	}
	return true
}

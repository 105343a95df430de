// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/image"
	"weft.dev/weft/volmgr/placement"
)

// A mirror's copies are made again elsewhere: because a drive or its target has been away for
// too long, is known to be dead, is being emptied, or because an operator moves a leg. Such a
// leg "leaves". It goes in this order, and each step is durable before the next one:
//
//	add       a new leg, blank and stale, is placed beside the old ones
//	labels    of all in-sync legs of the column list the new leg
//	rebuild   the host copies all of it, as for any stale leg
//	in sync   the column now has one leg in sync more than it needs
//	retire    the leaving leg becomes stale; labels do not list it any more
//	labels    of all in-sync legs of the column do not list it, and no host uses it
//	free      its target erases it; then the record is dropped
//
// So a column never has fewer legs in sync than before the move, and a leg that its drive
// brings back later is on no label's list: a store that is rebuilt from the drives does not
// believe it (see package evidence).
//
// What to do follows from the records and reports alone, so a manager that restarts at any
// step goes on from there. A column has at most one leg more than it has copies.

// Policy is what an operator configures of a manager.
type Policy struct {
	// ReplaceAfter is how long a leg may be away before it is made again elsewhere; 0: never.
	ReplaceAfter time.Duration
	// HealAfter is how long a volume has been detached, and in want of a copy, before a host copies to
	// its legs; 0: none does.
	HealAfter time.Duration
	// EvacuateAfter is how long a drive may be suspect before its legs are made again elsewhere; 0: never.
	EvacuateAfter time.Duration
	// Overcommit is how many times its size a drive may promise to volumes; 0: DefaultOvercommit.
	Overcommit float64
	// HoldFor is how long a host holds I/O for a snapshot at most; 0: DefaultHoldFor.
	HoldFor time.Duration
}

// DefaultReplaceAfter is longer than a boot or an upgrade of a machine takes.
const DefaultReplaceAfter = 15 * time.Minute

// DefaultHealAfter is longer than the move of a volume from one host to another.
const DefaultHealAfter = 20 * time.Second

// SetPolicy sets the policy of the steps that follow.
func (s *State) SetPolicy(p Policy) { s.policy = p }

// member reports whether a leg is one of its column's copies, or becomes one.
func (l *Leg) member() bool { return l.State != LegDeleting && l.Retired == 0 }

// replaceable reports whether the volume's legs can be made again elsewhere. A volume of one
// copy has no second leg to copy from while it is in use, and a snapshot has no host that could copy.
func (v *Volume) replaceable() bool {
	return v.usable() && !v.IsSnapshot() && !v.oneCopy()
}

// leaves says why a leg has to be made again elsewhere; empty if it may stay. n and d are its
// node and drive, nil if there is no record of them.
func (s *State) leaves(l *Leg, n *Node, d *Drive) string {
	switch {
	case l.Leave && l.Rebalanced:
		return "it is moved to a drive that is less full"
	case l.Leave:
		return "it is being moved"
	case d == nil || n == nil:
		return "its drive was removed"
	case d.Leaving == LeaveEvict:
		return "its drive is being evicted"
	case d.Leaving == LeaveDrain:
		return "its drive is being drained"
	case n.Draining:
		return fmt.Sprintf("node %s is being drained", n.Name)
	case n.ConfirmedDead:
		return fmt.Sprintf("node %s is confirmed dead", n.Name)
	case s.unrecorded(l):
		return "its drive has no record of it"
	case s.damage(l).Damage != "":
		return "its tree is damaged"
	case !n.MaintainedUntil.IsZero(): // its absence is announced
		return ""
	}
	if left, away := s.awayLeft(d.ID); away && left <= 0 {
		return fmt.Sprintf("its drive has been away for more than %v", s.policy.ReplaceAfter)
	}
	return ""
}

// unrecorded reports whether a stale leg, which once had data, is missing from its drive, though
// the drive is there. A restored store knows such a leg if it was replaced after the backup.
func (s *State) unrecorded(l *Leg) bool {
	on := s.targets[l.Node]
	return l.State == LegStale && !l.Blank && on != nil && on.status.Online && on.lacks(l)
}

// damage is what the target of a leg says if the leg's tree is damaged: the leg is served, but takes no writes, and
// a part of it may be unknown. Zero: the tree is not, or the target is away.
func (s *State) damage(l *Leg) LegReport {
	on := s.targets[l.Node]
	if on == nil || !on.status.Online || !on.damaged[l.ID] {
		return LegReport{}
	}
	return on.legs.Get(l.ID)
}

// damagedAt reports whether a target that is online has legs in damaged trees.
func (s *State) damagedAt(node block.NodeName) bool {
	on := s.targets[node]
	return on != nil && on.status.Online && len(on.damaged) > 0
}

// awayLeft is how much longer a drive that is away may stay so.
func (s *State) awayLeft(id block.DriveID) (left time.Duration, away bool) {
	since, away := s.away[id]
	if !away || s.policy.ReplaceAfter <= 0 {
		return 0, false
	}
	return s.policy.ReplaceAfter - s.now.Sub(since), true
}

func (s *State) leaving(l *Leg) string { return s.leaves(l, s.nodes[l.Node], s.drives[l.Drive]) }

func (t *tx) leaving(l *Leg) string {
	return t.s.leaves(l, t.nodes.peek(l.Node), t.drives.peek(l.Drive))
}

// awayLook is how often noteAway looks.
const awayLook = 5 * time.Second

// noteAway starts and stops the clocks of drives that cannot be used, and has the volumes
// settled whose legs are to leave. The clocks start anew when the manager starts.
func (t *tx) noteAway() {
	s := t.s
	if t.now.Sub(s.lookedAway) < awayLook {
		return
	}
	s.lookedAway = t.now
	clear(s.crowded)
	away := map[block.DriveID]time.Time{}
	for _, id := range s.sortedDrives() {
		d := s.drives[id]
		ready := s.targetOnline(d.Node) && d.State == DriveReady
		if !ready {
			away[id] = t.now
			if since, ok := s.away[id]; ok {
				away[id] = since
			}
		}
		n := s.nodes[d.Node]
		late := s.policy.ReplaceAfter > 0 && !ready && t.now.Sub(away[id]) >= s.policy.ReplaceAfter
		if s.damagedAt(d.Node) || late || d.Leaving != "" || n.Draining || !ready && n.ConfirmedDead {
			t.settleDriveVolumes(d)
		}
		if d.Leaving == LeaveEvict {
			t.settleDrive(d)
		}
	}
	s.away = away
}

// settleDriveVolumes marks the volumes with a leg on a drive.
func (t *tx) settleDriveVolumes(d *Drive) {
	for id := range t.s.onNode.Get(d.Node).Keys() {
		if slices.ContainsFunc(t.peek(id).Legs, func(l Leg) bool { return l.Drive == d.ID }) {
			t.unsure[id] = true
		}
	}
}

// settleCopies takes the next step of each column with a leg that leaves, or has left. It adds to ask
// the legs that can be given up once the volume's host has left them out.
func (t *tx) settleCopies(id block.VolumeID, ask map[block.LegID]string) {
	if !t.peek(id).usable() {
		return
	}
	t.freeRetired(id)
	for c := range t.peek(id).Layout.Stripes {
		t.settleColumn(id, c, ask)
	}
}

func (t *tx) settleColumn(id block.VolumeID, column int, ask map[block.LegID]string) {
	t.endMoves(id, column)
	v := t.peek(id)
	wanted, legs := v.Layout.Group().Members, v.column(column)
	switch {
	case len(legs) > wanted && slices.ContainsFunc(legs, func(l *Leg) bool { return ask[l.ID] != "" }):
		// Once that leg is left out, it may be the one that is given up. A host that is asked to
		// leave out all copies leaves out none.
	case len(legs) > wanted:
		switch l, why := t.superfluous(v, column); {
		case l == nil:
		case t.hostDecides(v, l):
			ask[l.ID] = why
		default:
			t.retire(t.volume(id), l.ID, why)
		}
	case v.IsSnapshot():
		t.loseLegs(id, column)
	case !v.replaceable():
	case len(staying(legs, t.leaving)) < wanted && t.s.known(v)[column] != 0: // else there is nothing to copy from
		t.addLeg(id, column, "")
	}
}

// endMoves takes moves of a snapshot's legs back. MoveLeg refuses them; an earlier manager recorded them.
func (t *tx) endMoves(id block.VolumeID, column int) {
	v := t.peek(id)
	if !v.IsSnapshot() {
		return
	}
	for _, l := range v.column(column) {
		if l.Leave {
			t.volume(id).leg(l.ID).Leave = false
		}
	}
}

// staying are those of some legs that need not be made again.
func staying(legs []*Leg, leaving func(*Leg) string) (stay []*Leg) {
	for _, l := range legs {
		if leaving(l) == "" {
			stay = append(stay, l)
		}
	}
	return stay
}

// superfluous returns the leg of a column that can be given up now, and why; nil if none can.
func (t *tx) superfluous(v *Volume, column int) (superfluous *Leg, why string) {
	legs := v.column(column)
	leaving := slices.ContainsFunc(legs, func(l *Leg) bool { return t.leaving(l) != "" })
	for _, l := range slices.Backward(legs) { // the newest copies have the highest numbers
		reason, needless := t.needless(v, l, leaving)
		switch {
		case !needless:
		case l.Blank:
			return l, reason
		case superfluous == nil || t.spare(l) > t.spare(superfluous):
			superfluous, why = l, reason
		}
	}
	return superfluous, why
}

// spare is higher for a leg that its column misses less: first one that is not in sync, then one in a damaged tree,
// the more so if a part of it is lost, then one on a suspect drive.
func (t *tx) spare(l *Leg) int {
	d, damage := t.drives.peek(l.Drive), t.s.damage(l)
	return 8*rank(l.State != LegInSync) + 4*rank(damage.Unknown > 0) + 2*rank(damage.Damage != "") + rank(d != nil && d.Suspect() != "")
}

// apart reports whether a leg has a failure domain for itself while others of its column share one, as
// the leg that was to leave and its replacement may. Without it the copies would be in one domain.
func (t *tx) apart(v *Volume, l *Leg) bool {
	legs := v.column(l.Column)
	shares := func(l *Leg) bool {
		n := t.nodes.peek(l.Node)
		return slices.ContainsFunc(legs, func(o *Leg) bool {
			at := t.nodes.peek(o.Node)
			return o.ID != l.ID && (o.Node == l.Node || n != nil && at != nil && n.label(v.Spread) == at.label(v.Spread))
		})
	}
	return !shares(l) && slices.ContainsFunc(legs, shares)
}

// needless reports whether one leg of a column that has one too many can be given up, and why.
// leaving: some leg of the column leaves. A leg that has data can be given up only if as many
// others as the column needs are in sync and can be served. For one that was stale before, two
// others are enough: else a column of three copies that lost two could have only one of them
// made again.
//
// Branches: one for each reason to keep a leg, or to give it up.
func (t *tx) needless(v *Volume, l *Leg, leaving bool) (why string, needless bool) {
	enough := v.Layout.Group().Members
	if l.State == LegStale && l.StaleAt < t.gen && t.leaving(l) != "" {
		enough = min(enough, 2)
	}
	switch reason := t.leaving(l); {
	case l.Blank && reason != "": // it has nothing to lose
		return reason, true
	case v.IsSnapshot() && l.idle():
		return "it holds nothing, and is not being copied", true
	case l.Blank && slices.ContainsFunc(v.column(l.Column), t.s.evacuated):
		return "", false
	case l.Blank && !leaving && l.State == LegStale && t.s.othersReturned(v, l):
		return "the leg that it was to replace is back", true
	case t.others(v, l) < enough:
		return "", false
	case t.s.clonesBegin(v) != "":
		return "", false
	case !leaving && !t.apart(v, l):
		return "the column has enough copies without it", true
	default:
		return reason, reason != ""
	}
}

// idle reports whether a leg of a snapshot holds nothing, and nothing is being copied to it.
func (l *Leg) idle() bool { return l.Blank && l.State == LegStale && l.Copying == nil }

// others is how many other legs of a leg's column are in sync and can be served. Those in damaged trees count only if
// this leg is not sound either, and another one is: else it would be given up for them.
func (t *tx) others(v *Volume, l *Leg) int {
	sound := t.s.sound(v)[l.Column].Without(l.Copy)
	if t.s.isSound(v, l) || !v.Layout.Group().Readable(sound) {
		return sound.Len()
	}
	return t.s.serving(v)[l.Column].Without(l.Copy).Len()
}

// othersReturned reports whether all other legs of a column could be rebuilt or are in sync:
// then a blank leg, whose copy has not begun, is not needed.
func (s *State) othersReturned(v *Volume, l *Leg) bool {
	return !slices.ContainsFunc(v.column(l.Column), func(o *Leg) bool { return o.ID != l.ID && !s.servable(o) })
}

// ---- adding a leg ----

// addLeg places a new leg in a column. The next look tries again if there is no room.
func (t *tx) addLeg(id block.VolumeID, column int, to block.NodeName) error {
	return t.addLegAt(id, column, to, t.lookup())
}

func (t *tx) addLegAt(id block.VolumeID, column int, to block.NodeName, at lookup) error {
	if t.s.crowded[id] {
		return nil
	}
	v := t.peek(id)
	if v.IsSnapshot() { // a leg of one begins as another leg or is copied from one; this one would be of zeroes
		return v.neverChanges()
	}
	if err := v.noSlot(column); err != nil {
		return err
	}
	place, err := t.s.newPlace(v, column, to, t.seedFor(v, column), at)
	if err != nil {
		t.s.crowded[id] = true
		return err
	}
	t.carved[place.Drive.ID] = append(t.carved[place.Drive.ID], place.Extents)
	v = t.volume(id)
	v.Generation++
	v.Placed = v.nextPlace()
	nth := uint32(1)
	for v.leg(block.LegID{UUID: t.seedFor(v, column).id(nth)}) != nil { // a second leg of the column in this step
		nth++
	}
	l := Leg{
		ID: block.LegID{UUID: t.seedFor(v, column).id(nth)}, Column: column, Copy: v.freeSlot(column), Place: v.Placed,
		Drive: place.Drive.ID, Node: place.Drive.Node, Image: newImage(v.Thin, v.Layout, place.Extents), State: LegStale, Revision: 1,
		StaleSince: t.now.UTC(), StaleAt: t.gen, CopyAll: true, CopyAllSince: 1, Blank: true, Listed: v.Generation, Reason: "it is new and has no data yet",
	}
	v.Legs = append(v.Legs, l)
	v.sortLegs()
	t.volumeEvent(v, event.Info, event.LegAdded, fmt.Sprintf("%v, on drive %s%s", &l, t.drives.peek(l.Drive).Device, because(t.whyAdded(v, column))),
		"leg", l.ID.String(), "node", string(l.Node))
	return nil
}

// noSlot refuses one more leg of a column if the host of the volume has made no room for it, or if legs that
// are being freed have all places.
func (v *Volume) noSlot(column int) error {
	switch {
	case v.nextPlace() == 0:
		return refused(ReasonNotReady, v.object(), "its %d legs have all numbers until some of them are freed", len(v.Legs)).
			hint("`weft explain volume %s` names the targets that have to free them", v.Name)
	case len(v.column(column)) < v.slots():
		return nil
	}
	return refused(ReasonAttached, v.object(), "no room for another copy of column %d on %s, which was granted the volume before it got more copies", column, v.users()).
		hint("`weft detach %s` and attach it again", v.Name)
}

// whyAdded names the legs of a column that are made again elsewhere.
func (t *tx) whyAdded(v *Volume, column int) string {
	var all []string
	for _, l := range v.column(column) {
		if why := t.leaving(l); why != "" {
			all = append(all, fmt.Sprintf("%v leaves, since %s", l, why))
		}
		if t.s.evacuated(l) {
			all = append(all, fmt.Sprintf("the drive of %v has been suspect for more than %v", l, t.s.policy.EvacuateAfter))
		}
	}
	return strings.Join(all, "; ")
}

// seedFor draws a new leg's id and its random choices from what is unique to this step.
func (t *tx) seedFor(v *Volume, column int) Seed {
	text := append([]byte("leg"), v.ID.UUID[:]...)
	text = binary.BigEndian.AppendUint64(text, t.gen)
	return sha256.Sum256(binary.BigEndian.AppendUint32(text, uint32(column)))
}

// lookup is what newPlace looks at beside the state: nodes and drives, and the extents that the
// step under way has given to legs already.
type lookup struct {
	node   func(block.NodeName) *Node
	drive  func(block.DriveID) *Drive
	carved map[block.DriveID][][]image.Extent
	step   bool          // a step is under way
	only   block.DriveID // the drive to use; zero: any
	// refuses says why a drive is not to be used; empty if it may. nil: each may.
	refuses func(*placement.Drive) string
}

func (t *tx) lookup() lookup {
	return lookup{node: t.nodes.peek, drive: t.drives.peek, carved: t.carved, step: true}
}

func (s *State) lookup() lookup {
	return lookup{node: func(name block.NodeName) *Node { return s.nodes[name] }, drive: func(id block.DriveID) *Drive { return s.drives[id] }}
}

// newPlace finds a drive for one more leg of a column, by the rules for new volumes: in the
// volume's pool, in another failure domain and on another node than each copy that stays. It
// may be on the node of a leg that leaves. to restricts it to one node, unless it is empty.
func (s *State) newPlace(v *Volume, column int, to block.NodeName, seed Seed, at lookup) (placement.Place, error) {
	pool := s.pools[v.Pool]
	if pool == nil {
		return placement.Place{}, noPool(v.Pool)
	}
	in := CreateVolume{Name: v.Name, Spread: v.Spread, Copies: 1, Chunk: v.Layout.Chunk, Integrity: v.Layout.Integrity, Thin: v.Thin, again: true}
	request := s.requestLeg(v, seed, at)
	if some, _ := s.fitting(v, column, to, s.sample(pool, in, request.Random, at), at); len(some) > 0 {
		if _, places := placement.Choose(some, request); places != nil {
			return places[0], nil
		}
	}
	usable, refusals := s.candidates(pool, in)
	fit, unfit := s.fitting(v, column, to, usable, at)
	if len(fit) > 0 {
		if _, places := placement.Choose(fit, request); places != nil {
			return places[0], nil
		}
	}
	refusals = append(refusals, unfit...)
	for _, x := range fit {
		refusals = append(refusals, fmt.Sprintf("%s: %s free", s.drives[x.ID].object(), (block.Size(x.Free())*block.ExtentSize).Short()))
	}
	slices.Sort(refusals)
	e := &Error{
		Kind: ResourceExhausted, Reason: ReasonNoSpace, Object: v.object(),
		Text: fmt.Sprintf("%s: no place for another copy of column %d, which takes %s%s", v.object(), column, (block.Size(v.Layout.LegExtents(v.planned())) * block.ExtentSize).Short(), listed(refusals)),
	}
	return placement.Place{}, e.hint("add a drive in pool %s with `weft drive add`, on a node that holds no copy of this column", v.Pool)
}

// requestLeg is one leg of a volume as placement sees it.
func (s *State) requestLeg(v *Volume, seed Seed, at lookup) placement.Request {
	one := block.Layout{Stripes: 1, Copies: 1, Chunk: v.Layout.Chunk, Integrity: v.Layout.Integrity}
	return placement.Request{
		Size: v.Layout.LegSize(v.planned()), Stripes: 1, Mapped: v.Thin,
		Layout: func(int) block.Layout { return one },
		Record: func(block.Layout) block.Size { return v.legRecord() },
		Random: binary.BigEndian.Uint64(seed[:8]),
		Taken: func(id block.DriveID) []image.Extent {
			return slices.Concat(append([][]image.Extent{s.carved(s.drives[id])}, at.carved[id]...)...)
		},
	}
}

// legRecord is the size of a leg's record on a label, if its extents are in one piece.
func (v *Volume) legRecord() block.Size {
	return v.record(&Leg{Image: image.Of(make([]image.Extent, 1))}).Size()
}

// sampleSize is how many drives are looked at for a new leg before all are.
const sampleSize = 32

// sample returns some drives for a new leg, from a random one on; none if there are few, or if no
// step is under way: only steps may use fields.
func (s *State) sample(pool *Pool, in CreateVolume, random uint64, at lookup) (some []*placement.Drive) {
	if !at.step {
		return nil
	}
	f := s.field(pool, in)
	if len(f.drives) <= 2*sampleSize {
		return nil
	}
	n := uint64(len(f.drives))
	for i := range uint64(sampleSize) { // in order of their ids, which are random
		x := f.drives[(random%n+i*(n/sampleSize))%n]
		some = append(some, s.candidate(x.drive, x.domain, 0, in))
	}
	return some
}

// fitting returns the drives that can take a leg of a column, and why the others cannot. It
// counts what the step under way has given away already.
func (s *State) fitting(v *Volume, column int, to block.NodeName, drives []*placement.Drive, at lookup) (fit []*placement.Drive, refusals []string) {
	record := v.legRecord()
	for _, x := range drives {
		for _, leg := range at.carved[x.ID] {
			x.Used, x.Room = x.Used+image.Count(leg), x.Room-min(x.Room, record)
		}
		if why := s.unfit(v, column, to, x, at); why != "" {
			refusals = append(refusals, fmt.Sprintf("%s: %s", s.drives[x.ID].object(), why))
			continue
		}
		fit = append(fit, x)
	}
	return fit, refusals
}

// unfit says why a drive cannot take a leg of a column beside those that stay; empty if it can.
func (s *State) unfit(v *Volume, column int, to block.NodeName, x *placement.Drive, at lookup) string {
	if !at.only.IsZero() && x.ID != at.only {
		return "another drive is asked for"
	}
	if to != "" && x.Node != to {
		return fmt.Sprintf("not on node %s", to)
	}
	if at.refuses != nil {
		if why := at.refuses(x); why != "" {
			return why
		}
	}
	if n, d := at.node(x.Node), at.drive(x.ID); n == nil || d == nil || n.shunned() != "" || d.Leaving != "" {
		return "it takes no new legs"
	}
	if why := s.cannotServe(v.Thin, v.Layout, x.Node); why != "" {
		return why
	}
	return s.besides(v, column, x, at)
}

// besides says why a drive cannot hold another leg beside those that a column has; empty if it can.
func (s *State) besides(v *Volume, column int, x *placement.Drive, at lookup) string {
	for _, l := range v.column(column) {
		n := at.node(l.Node)
		switch leaves := s.leaves(l, n, at.drive(l.Drive)) != ""; {
		case l.Drive == x.ID:
			return fmt.Sprintf("it holds %v", l)
		case leaves || n == nil:
		case l.Node == x.Node:
			return fmt.Sprintf("its node holds %v", l)
		case n.label(v.Spread) == x.Domain:
			return fmt.Sprintf("%s %s holds %v", v.Spread, x.Domain, l)
		}
	}
	return ""
}

// freeSlot is the lowest copy number that no leg of a column has, not even one that is being
// freed, if there is such a number.
func (v *Volume) freeSlot(column int) int {
	var members, all block.MemberSet
	for _, l := range v.Legs {
		if l.Column != column {
			continue
		}
		all = all.With(l.Copy)
		if l.member() {
			members = members.With(l.Copy)
		}
	}
	for _, taken := range []block.MemberSet{all, members} {
		for n := range v.slots() {
			if !taken.Has(n) {
				return n
			}
		}
	}
	panic(fmt.Sprintf("cluster: column %d of volume %s has no slot for another leg", column, v.Name))
}

// nextPlace is a place that no leg of the volume has or had lately, on any node. So a command
// that is still on its way to a leg that has left finds no namespace under its number. It is 0 if legs,
// which are being freed for the most part, have all places.
func (v *Volume) nextPlace() int {
	taken := map[int]bool{}
	next := v.Placed
	for i := range v.Legs {
		p := v.Legs[i].place()
		taken[p] = true
		if v.Placed == 0 {
			next = max(next, p)
		}
	}
	for range maxPlaces {
		if next = next%maxPlaces + 1; !taken[next] {
			return next
		}
	}
	return 0
}

// sortLegs puts the legs in order of column and copy, those that are being freed last.
func (v *Volume) sortLegs() {
	slices.SortStableFunc(v.Legs, func(a, b Leg) int {
		left := map[bool]int{true: 1}
		if c := a.Column - b.Column; c != 0 {
			return c
		}
		if c := left[!a.member()] - left[!b.member()]; c != 0 {
			return c
		}
		return a.Copy - b.Copy
	})
}

// ---- forgetting a leg ----

// retire gives up a leg: it is not in sync any more, and labels do not list it.
func (t *tx) retire(v *Volume, id block.LegID, why string) {
	l := v.leg(id)
	switch l.State {
	case LegInSync:
		t.evict(v, id, "it is given up: "+why)
		t.drain(v, id)
	case LegRebuilding:
		t.stale(v, id, event.LegStale, why)
		t.drain(v, id)
	}
	v.Generation++
	l.Retired, l.Leave, l.Rebalanced = v.Generation, false, false
	l.Reason = "it was given up: " + why
	t.volumeEvent(v, event.Info, event.LegRetired, fmt.Sprintf("%v: %s", l, why), "leg", id.String(), "node", string(l.Node))
	v.sortLegs()
}

// freeRetired has retired legs freed once the labels of their columns' legs in sync do not list
// them, and drops the records of those that are freed.
func (t *tx) freeRetired(id block.VolumeID) {
	v := t.peek(id)
	for _, l := range v.Legs {
		switch {
		case l.State == LegDeleting && t.legGone(v, &l):
			v = t.volume(id)
			v.Legs = slices.DeleteFunc(v.Legs, func(o Leg) bool { return o.ID == l.ID })
			t.volumeEvent(v, event.Info, event.LegFreed, fmt.Sprintf("%v: its drive has no record of it", &l), "leg", l.ID.String(), "node", string(l.Node))
		case l.State == LegStale && l.Retired > 0 && l.Draining == 0 && t.s.labelsLack(v, l.Column, l.Retired) == nil:
			v = t.volume(id)
			gone := v.leg(l.ID)
			gone.State, gone.FreedAt = LegDeleting, t.gen
		}
	}
}

// labelsLack returns a leg in sync of a column whose label is older than a generation; nil if
// there is none.
func (s *State) labelsLack(v *Volume, column int, generation uint64) *Leg {
	for _, l := range v.column(column) {
		if l.State == LegInSync && !s.labelHas(l, generation) {
			return l
		}
	}
	return nil
}

// ---- for people ----

// replacementWaits says why a leg that should be made again elsewhere is not yet; empty if
// nothing is in the way, or if it may stay.
func (s *State) replacementWaits(v *Volume, column int) (waits, actions []string) {
	legs, g := v.column(column), v.Layout.Group()
	switch {
	case len(legs) > g.Members:
		return s.retirementWaits(v, column), nil
	case !v.replaceable():
		return nil, nil
	case len(staying(legs, s.leaving)) < g.Members && s.known(v)[column] != 0:
		return s.placeWaits(v, column)
	}
	for _, l := range legs {
		left, away := s.awayLeft(l.Drive)
		n := s.nodes[l.Node]
		if away && left > 0 && l.State != LegInSync && n != nil && n.MaintainedUntil.IsZero() {
			waits = append(waits, fmt.Sprintf("%v to return within %v; after that it is made again elsewhere", l, left.Round(time.Second)))
			if d := s.drives[l.Drive]; d != nil {
				actions = append(actions, fmt.Sprintf("if the drive of %v is gone for good, do not wait: weft drive evict %s", l, d.ID))
			}
		}
	}
	return waits, actions
}

// placeWaits says what one more leg of a column waits for before it is placed.
func (s *State) placeWaits(v *Volume, column int) (waits, actions []string) {
	if why, hint := s.noPlaceFor(v, column); why != "" {
		return []string{"a place for another copy: " + why}, []string{hint}
	}
	return nil, nil
}

// noPlaceFor says why one more leg of a column cannot be placed; empty if it can.
func (s *State) noPlaceFor(v *Volume, column int) (why, hint string) {
	err := v.noSlot(column)
	if err == nil {
		_, err = s.newPlace(v, column, "", Seed{}, s.lookup())
	}
	if e, ok := err.(*Error); ok {
		return strings.TrimPrefix(e.Text, v.object()+": "), e.Hint
	}
	return "", ""
}

// retirementWaits says what a column with a leg too many waits for.
func (s *State) retirementWaits(v *Volume, column int) (waits []string) {
	if c := s.clonesBegin(v); c != "" {
		return []string{fmt.Sprintf("volume %s, which begins as it or goes back to it, to be ready before a leg is given up", c)}
	}
	if s.sound(v)[column].Len() > v.Layout.Group().Members {
		return nil
	}
	for _, l := range v.column(column) {
		if why := s.leaving(l); why != "" && l.trusted() {
			waits = append(waits, fmt.Sprintf("another leg of column %d to be in sync before %v is given up (%s)", l.Column, l, why))
		}
	}
	return waits
}

// explainRetired covers legs that were made again elsewhere and are not freed yet.
func (s *State) explainRetired(e *Explanation, v *Volume, l *Leg) {
	if v.drains(l) {
		e.Waits = append(e.Waits, fmt.Sprintf("%s to stop using %v, which was given up", v.Attachment.Node, l))
		return
	}
	if l.State != LegDeleting {
		e.Facts = append(e.Facts, fmt.Sprintf("%v was given up; it is freed once the labels of the other legs show that", l))
		return
	}
	e.Waits = append(e.Waits, fmt.Sprintf("%v, which was given up, to be freed: %s", l, s.legWaitsFor(l)))
	switch d, online := s.drives[l.Drive], s.targetOnline(l.Node); {
	case d == nil || online && d.State == DriveReady:
	case d.Leaving != LeaveEvict:
		e.Actions = append(e.Actions, fmt.Sprintf("if the drive of %v is gone for good: weft drive evict %s", l, l.Drive))
	case !online:
		e.Actions = append(e.Actions, fmt.Sprintf("if node %s is gone for good: weft node confirm-dead %s, then weft node remove %s", l.Node, l.Node, l.Node))
	}
}

// legsOn returns, by volume, the legs on a node that count, or only those on a drive of it.
func (s *State) legsOn(node block.NodeName, drive block.DriveID) map[block.VolumeID][]*Leg {
	all := map[block.VolumeID][]*Leg{}
	for id := range s.onNode.Get(node).Keys() {
		v := s.volumes.Get(id)
		for i := range v.Legs {
			if l := &v.Legs[i]; l.Node == node && l.member() && (drive.IsZero() || l.Drive == drive) {
				all[id] = append(all[id], l)
			}
		}
	}
	return all
}

// maintained lists the nodes whose absence is announced.
func (s *State) maintained() (names []block.NodeName) {
	for name, n := range s.nodes {
		if !n.MaintainedUntil.IsZero() {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

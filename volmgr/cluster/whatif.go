// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/cow"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/image"
)

// What would happen if some nodes and drives were lost for good. The answer comes from the
// state machine itself: the loss is played through on a copy of the state, with the inputs that
// agents and hosts would give.
//
//	copy      a fork that can be stepped
//	lose      the agents of the nodes fall silent, the drives are missing
//	record    each host that is left records its lost legs stale: what is refused, stops
//	          here the volumes are compared with before
//	wait      the drives have been away for as long as the policy allows
//	place     legs are made again elsewhere, and take room from each other
//	copied    where a column lost several legs, the next one follows after the first
//
// Nothing is committed, and the copy is dropped.

// Loss is what is lost for good, all at once.
type Loss struct {
	Nodes  []block.NodeName
	Drives []block.DriveID
	Labels Segment // and all nodes of this segment; empty: none
}

// Consequences is what a loss would lead to.
type Consequences struct {
	Nodes        []block.NodeName // lost, by name
	Drives       []block.DriveID  // lost, with those of the lost nodes, in order
	ReplaceAfter time.Duration    // until legs are made again elsewhere; 0: not until an operator confirms the loss
	Volumes      []Consequence    // those with a leg there, worst first
	Attachments  []Attachment     // to lost hosts, by volume
	Copied       block.Size       // what is copied to make the lost legs again
}

// Consequence is what a loss would mean for one volume.
type Consequence struct {
	Volume        block.VolumeID
	Name          block.VolumeName
	Size          block.Size
	Before, After Health // After: once its host knows, and before anything is made again
	DataLost      bool   // some column has no copy left that is in sync
	Hosts         string // to which it is attached; empty: none
	CopyWaits     string // what the copies wait for; empty: nothing
	Legs          []LostLeg
}

// Degrades reports whether the volume has less redundancy than before, and still serves.
func (c *Consequence) Degrades() bool {
	return c.After != Unavailable && c.After != Healthy && c.After != c.Before
}

// Stops reports whether the volume could be served before, and cannot any more.
func (c *Consequence) Stops() bool { return c.After == Unavailable && c.Before != Unavailable }

// Unplaced is how many of its lost legs have no place elsewhere.
func (c *Consequence) Unplaced() (n int) {
	for _, l := range c.Legs {
		if l.To == "" {
			n++
		}
	}
	return n
}

// LostLeg is a leg that would be lost, and where it would be made again.
type LostLeg struct {
	Column, Copy int
	Node         block.NodeName
	Drive        block.DriveID
	State        LegState // before
	Size         block.Size
	To           block.NodeName // where it is made again; empty: nowhere
	ToDrive      block.DriveID
	Why          string // it is not made again
}

// rehearse returns a copy of the state that can be stepped. It shares what steps do not change
// in place, so the state stays as it is. Its agents may fall silent, but not report: what a
// report is compared with is shared.
func (s *State) rehearse() *State {
	if s.by != nil {
		s = s.Fork()
	}
	r := *s
	r.by = new(cow.Writer)
	r.nodes, r.drives, r.pools = maps.Clone(s.nodes), maps.Clone(s.drives), maps.Clone(s.pools)
	r.tokens, r.authorities, r.holders = maps.Clone(s.tokens), maps.Clone(s.authorities), maps.Clone(s.holders)
	r.drivesOn = maps.Clone(s.drivesOn)
	for name, drives := range r.drivesOn {
		r.drivesOn[name] = maps.Clone(drives)
	}
	r.targets, r.initiators = maps.Clone(s.targets), maps.Clone(s.initiators)
	r.foreignAgents, r.fences, r.away = maps.Clone(s.foreignAgents), maps.Clone(s.fences), maps.Clone(s.away)
	r.uncopied = maps.Clone(s.uncopied)
	r.events = event.NewLog(nil, s.events.Next(), s.events.Next())
	fresh := empty()
	r.onDrive, r.extents, r.touched, r.removed = fresh.onDrive, fresh.extents, fresh.touched, fresh.removed
	r.unsettled, r.fewer, r.wellness, r.crowded = fresh.unsettled, fresh.fewer, fresh.wellness, fresh.crowded
	for id, v := range r.volumes.All() {
		if v.unsettled() {
			r.unsettled[id] = true
		}
		if v.fewer() {
			r.fewer[id] = true
		}
		for _, l := range v.Legs {
			put(r.onDrive, l.Drive, l.ID, l.Extents)
			r.extents[l.Drive] = append(r.extents[l.Drive], l.Extents...)
		}
	}
	for _, all := range r.extents {
		slices.SortFunc(all, func(a, b image.Extent) int { return cmp.Compare(a.Start, b.Start) })
	}
	return &r
}

// WhatIf says what a loss would lead to. The error says which part of the loss is unknown.
func (s *State) WhatIf(loss Loss) (Consequences, error) {
	in, err := s.lost(loss)
	if err != nil {
		return Consequences{}, err
	}
	p := play{was: s, s: s.rehearse(), in: in}
	p.step(in)
	p.record()
	all := p.affected()
	p.replace(all)
	out := Consequences{
		Nodes: slices.Sorted(maps.Keys(in.nodes)), Drives: sorted(in.drives), ReplaceAfter: max(0, s.policy.ReplaceAfter),
		Attachments: p.hosts(),
	}
	for i := range all {
		out.Copied += p.placed(&all[i])
	}
	slices.SortStableFunc(all, worse)
	out.Volumes = all
	return out, nil
}

// worse sorts consequences: lost data, stopped, without a place for a leg, degraded; then by name.
func worse(a, b Consequence) int {
	rankOf := func(c *Consequence) int {
		switch {
		case c.DataLost:
			return 0
		case c.Stops():
			return 1
		case c.Unplaced() > 0:
			return 2
		case c.Degrades():
			return 3
		}
		return 4
	}
	return cmp.Or(cmp.Compare(rankOf(&a), rankOf(&b)), cmp.Compare(a.Name, b.Name))
}

// lost finds the nodes and drives of a loss.
func (s *State) lost(loss Loss) (lose, error) {
	in := lose{nodes: map[block.NodeName]bool{}, drives: map[block.DriveID]bool{}}
	if len(loss.Nodes)+len(loss.Drives)+len(loss.Labels) == 0 {
		return in, invalid("nodes", "missing: name the nodes, drives or labels that are lost")
	}
	for _, name := range loss.Nodes {
		if s.nodes[name] == nil {
			return in, notFound(nodeObject(name))
		}
		in.nodes[name] = true
	}
	if len(loss.Labels) > 0 {
		found := 0
		for name, n := range s.nodes {
			if loss.Labels.holds(n) {
				in.nodes[name] = true
				found++
			}
		}
		if found == 0 {
			return in, notFound("node with label " + loss.Labels.String()).hint("`weft node list` shows the labels of the nodes")
		}
	}
	for _, id := range loss.Drives {
		if s.drives[id] == nil {
			return in, notFound("drive " + id.String())
		}
		in.drives[id] = true
	}
	for name := range in.nodes {
		maps.Copy(in.drives, s.drivesOn[name])
	}
	return in, nil
}

// lose is the loss as a manager sees it: agents fall silent, and drives of other nodes are
// missing. Announced absences are over. Result: nil.
type lose struct {
	nodes  map[block.NodeName]bool
	drives map[block.DriveID]bool
}

func (in lose) apply(t *tx) (view, error) {
	for _, name := range slices.Sorted(maps.Keys(in.nodes)) {
		if on := t.target(name); on != nil {
			t.targetSilent(name, on, "lost")
		}
		if on := t.initiator(name); on != nil {
			t.initiatorSilent(name, on, "lost")
		}
		if !t.nodes.peek(name).MaintainedUntil.IsZero() {
			t.node(name).MaintainedUntil = time.Time{}
		}
		t.settleNode(name)
	}
	for _, id := range sorted(in.drives) {
		d := t.drives.peek(id)
		if in.nodes[d.Node] || d.State == DriveRemoving {
			continue
		}
		fresh := t.drives.edit(id)
		fresh.State, fresh.Reason = DriveMissing, "lost"
		if on := t.target(d.Node); on != nil {
			on.drives = maps.Clone(on.drives)
			delete(on.drives, id)
		}
		t.settleNode(d.Node)
	}
	return nil, nil
}

// has reports whether a leg is lost.
func (in lose) has(l *Leg) bool { return in.drives[l.Drive] || in.nodes[l.Node] }

// copied stands for the host that has copied everything to new legs. If no host had the volume
// before, it was granted one, which leaves the lost legs out. Result: nil.
type copied struct {
	legs map[block.VolumeID][]block.LegID
	lost lose
}

func (in copied) apply(t *tx) (view, error) {
	for _, id := range sorted(in.legs) {
		v := t.volume(id)
		for _, leg := range in.legs[id] {
			v.leg(leg).good()
			v.Generation++
		}
		for _, l := range v.Legs {
			if in.lost.has(&l) && l.State == LegInSync && v.dispensable(&l) {
				t.stale(v, l.ID, event.LegStale, "lost")
			}
		}
	}
	return nil, nil
}

// play is a loss that is being played through.
type play struct {
	was *State
	s   *State // steps on
	in  lose
}

// step passes an input to the copy. A refusal is an answer too.
func (p *play) step(in Input) { _, _ = p.s.Step(p.s.now, in) }

// touched are the volumes with a leg that is lost, in order.
func (p *play) touched() (ids []block.VolumeID) {
	found := map[block.VolumeID]bool{}
	nodes := maps.Clone(p.in.nodes)
	for id := range p.in.drives {
		nodes[p.was.drives[id].Node] = true
	}
	for name := range nodes {
		for id := range p.was.onNode.Get(name).Keys() {
			v := p.was.volumes.Get(id)
			if v.State == VolumeReady && slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.member() && p.in.has(&l) }) {
				found[id] = true
			}
		}
	}
	return sorted(found)
}

// record has each host that is left record the legs that it has lost, column by column. The
// manager refuses the last good one of a column, and so the host waits.
func (p *play) record() {
	for _, id := range p.touched() {
		v := p.s.volumes.Get(id)
		a := v.Attachment
		if a == nil || p.in.nodes[a.Node] || !p.was.initiatorOnline(a.Node) {
			continue
		}
		for c := range v.Layout.Stripes {
			var legs []block.LegID
			for _, l := range v.column(c) {
				if p.in.has(l) && (l.State == LegInSync || l.State == LegRebuilding) {
					legs = append(legs, l.ID)
				}
			}
			if len(legs) > 0 {
				p.step(RecordStale{Node: a.Node, Volume: id, Epoch: v.Epoch, Legs: legs, Reason: "lost"})
			}
		}
	}
}

// affected compares the volumes with before, when nothing has been made again yet.
func (p *play) affected() (all []Consequence) {
	for _, id := range p.touched() {
		old, v := p.was.volumes.Get(id), p.s.volumes.Get(id)
		c := Consequence{
			Volume: id, Name: v.Name, Size: v.Size, Before: p.was.health(old), After: p.s.health(v),
			Hosts: v.users(), CopyWaits: p.copyWaits(v),
		}
		for i := range old.Legs {
			if l := &old.Legs[i]; l.member() && p.in.has(l) {
				c.Legs = append(c.Legs, LostLeg{
					Column: l.Column, Copy: l.Copy, Node: l.Node, Drive: l.Drive, State: l.State, Size: v.Layout.LegSize(v.planned()),
				})
			}
		}
		left := old.members(func(l *Leg) bool { return p.was.isKnown(l) && !p.in.has(l) })
		lost := old.unreadable(left)
		c.DataLost = lost >= 0 && old.Layout.Group().Readable(old.members(p.was.isKnown)[lost])
		all = append(all, c)
	}
	return all
}

// copyWaits says what has to happen before legs are copied.
func (p *play) copyWaits(v *Volume) string {
	if a := v.Attachment; a != nil && p.in.nodes[a.Node] {
		return "the volume to be attached to another host"
	}
	return p.s.noCopier(v)
}

// replace lets the time pass until lost legs are made again, and finds each one its place.
func (p *play) replace(all []Consequence) {
	p.s.lookedSuspect = p.s.now // nor is a drive evacuated
	p.s.lookedHealing = p.s.now // no time passes, so nobody begins to heal: who copies does not matter here
	p.s.policy.ReplaceAfter = cmp.Or(max(0, p.s.policy.ReplaceAfter), DefaultReplaceAfter)
	p.s.away = maps.Clone(p.s.away)
	if p.s.away == nil {
		p.s.away = map[block.DriveID]time.Time{}
	}
	for id := range p.in.drives {
		p.s.away[id] = p.s.now.Add(-p.s.policy.ReplaceAfter)
	}
	for range 2 * block.MaxSlots { // each leg is added, and its predecessor then retired
		before := p.s.meta.Generation
		p.s.lookedAway = time.Time{}
		p.step(Tick{})
		if legs := p.unfinished(all); len(legs) > 0 {
			p.step(copied{legs, p.in})
		}
		if p.s.meta.Generation == before {
			break
		}
	}
	for i := range all {
		p.places(&all[i])
	}
}

// unfinished lists the new legs of columns that lost several: only after the first is copied,
// the next is added.
func (p *play) unfinished(all []Consequence) map[block.VolumeID][]block.LegID {
	legs := map[block.VolumeID][]block.LegID{}
	for i := range all {
		v := p.s.volumes.Get(all[i].Volume)
		for c := range v.Layout.Stripes {
			stay := p.stay(v, c)
			if len(stay) >= v.Layout.Group().Members {
				continue
			}
			for _, l := range stay {
				if l.Blank && l.State != LegInSync {
					legs[v.ID] = append(legs[v.ID], l.ID)
				}
			}
		}
	}
	return legs
}

// stay are the legs of a column that need not be made again.
func (p *play) stay(v *Volume, column int) []*Leg {
	return staying(v.column(column), p.s.leaving)
}

// places finds where the lost legs of a volume are made again, or why they are not.
func (p *play) places(c *Consequence) {
	v, old := p.s.volumes.Get(c.Volume), p.was.volumes.Get(c.Volume)
	for column := range v.Layout.Stripes {
		legs := v.column(column)
		legs = slices.DeleteFunc(legs, func(l *Leg) bool {
			was := old.leg(l.ID)
			return p.in.has(l) || was != nil && !was.Blank
		})
		for i := range c.Legs {
			l := &c.Legs[i]
			switch {
			case l.Column != column:
			case len(legs) > 0:
				l.To, l.ToDrive, legs = legs[0].Node, legs[0].Drive, legs[1:]
			default:
				l.Why = p.noPlace(old, v, column)
			}
		}
	}
}

// noPlace says why a lost leg of a column is not made again.
func (p *play) noPlace(old, v *Volume, column int) string {
	left := old.members(func(l *Leg) bool { return p.was.isKnown(l) && !p.in.has(l) })[column]
	switch {
	case old.Restored:
		return "the volume was restored from a backup and its copies are not judged yet"
	case v.Layout.Group().Members == 1:
		return "the volume has a single copy"
	case v.IsSnapshot():
		return "a target copies it again where there is room, which is not played here"
	case !v.replaceable():
		return "its legs cannot be made again elsewhere"
	case !v.Layout.Group().Readable(left):
		return "no copy in sync is left to copy from" + p.older(old, column)
	}
	why, _ := p.s.noPlaceFor(v, column)
	return cmp.Or(why, "the column waits for another of its copies")
}

// older names the newest stale leg of a column that is left, which an operator could promote.
func (p *play) older(v *Volume, column int) string {
	var best *Leg
	for _, l := range v.column(column) {
		if !p.in.has(l) && !l.Blank && l.State != LegInSync && (best == nil || l.StaleSince.After(best.StaleSince)) {
			best = l
		}
	}
	if best == nil {
		return ""
	}
	return fmt.Sprintf("; %v has missed writes since %s", best, best.StaleSince.UTC().Format(time.RFC3339))
}

// placed is what is copied to make a volume's lost legs again.
func (p *play) placed(c *Consequence) (n block.Size) {
	for _, l := range c.Legs {
		if l.To != "" {
			n += l.Size
		}
	}
	return n
}

// hosts lists the attachments to lost hosts.
func (p *play) hosts() (all []Attachment) {
	for name := range p.in.nodes {
		for id := range p.was.onNode.Get(name).Keys() {
			v := p.was.volumes.Get(id)
			if a := v.attachmentOf(name); a != nil {
				all = append(all, p.was.attachmentView(v, a))
			}
		}
	}
	slices.SortFunc(all, func(a, b Attachment) int {
		return cmp.Or(cmp.Compare(a.VolumeName, b.VolumeName), cmp.Compare(a.Node, b.Node))
	})
	return all
}

// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"hash/crc32"
	"slices"

	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid"
	"weft.dev/weft/raid/dm"
)

// column has one column built or changed, and reports whether all its in-sync
// copies are in place and equal.
func (p *planner) column(k int) (ready bool) {
	c := p.s.columns[k]
	if c.foreign != "" {
		p.v.Wait("an operator: column %d: %s", k, c.foreign)
		return false
	}
	if p.w.Layout.Copies > 1 && c.log == "" {
		p.do(order{op: opLog, column: k})
		return false
	}
	want, slots, ok := p.wantColumn(k)
	if !ok {
		return false
	}
	steps, err := raid.Plan(c.devices, want)
	if err != nil {
		p.v.Wait("an operator: %v", err)
		return false
	}
	if len(steps) > 0 || !p.noted(k, slots) {
		p.do(order{op: opColumn, column: k, steps: steps, slots: slots})
		return false
	}
	if p.w.ReadOnly {
		return p.forgive(k, want, slots)
	}
	if m := p.tried(k); m != nil {
		p.v.Note("leg %s of column %d on %s: device-mapper reports a %v, and no other copy can stand in", m.Leg, k, p.nodeOf(*m), c.health[m.device])
		if p.s.now.Sub(p.m.refreshed[k]) >= refreshInterval {
			p.do(order{op: opColumn, column: k, steps: raid.Refresh(c.devices, want), slots: slots, refresh: true})
			return false
		}
	}
	p.recovered(k)
	return c.Kind != raid.ShapeEqualizing
}

// first is the copy of a column that this host reads from if it can. Those that
// share a volume only to read it have different ones.
func (p *planner) first(k int) int {
	if !p.w.ReadOnly || len(p.w.Links) == 0 {
		return 0
	}
	_, _, host, _, err := block.ParseSubsystemNQN(p.w.Links[0].NQN)
	if err != nil {
		return 0
	}
	return int((crc32.ChecksumIEEE([]byte(host)) + uint32(k)) % uint32(p.w.Layout.Copies))
}

// forgive has the mirror of a column that nobody writes to try its legs again from
// time to time: it goes on with the others after an error, and fails when all have
// had one.
func (p *planner) forgive(k int, want raid.Column, slots []slot) (ready bool) {
	c := p.s.columns[k]
	ill := slices.ContainsFunc(p.members, func(m member) bool {
		return m.Column == k && c.health[m.device] != 0 && c.health[m.device] != dm.Alive
	})
	if ill && p.s.top.exists && p.s.now.Sub(p.m.refreshed[k]) >= refreshInterval {
		p.do(order{op: opColumn, column: k, steps: raid.Refresh(c.devices, want), slots: slots, refresh: true})
		return false
	}
	return true
}

// noted reports whether the slots of a column are remembered. They are not if
// an agent ended between a step and its note; a later loss would then be put
// down to the leg that had the slot before.
func (p *planner) noted(k int, slots []slot) bool {
	for copy, s := range slots {
		was := p.m.slot(k, copy)
		was.Dirty, s.Dirty = 0, 0
		if was != s {
			return false
		}
	}
	return true
}

// tried is the one leg of a column of an attached volume that stays in spite of
// its errors: its mirror has to be told to try it again, or it fails all I/O from
// then on. (With another source there the two might differ in what failed on both.)
func (p *planner) tried(k int) (last *member) {
	for i, m := range p.members {
		if m.Column != k || !m.Source {
			continue
		}
		if last != nil || m.Gone || m.Lost != "" {
			return nil
		}
		last = &p.members[i]
	}
	if last == nil || !p.s.top.exists {
		return nil
	}
	if h := p.s.columns[k].health[last.device]; h == 0 || h == dm.Alive {
		return nil
	}
	return last
}

// wantColumn says what each copy of a column should be; not ok if it cannot be
// built yet.
func (p *planner) wantColumn(k int) (want raid.Column, slots []slot, ok bool) {
	c := p.s.columns[k]
	want = raid.NewColumn(p.w.Volume, k, p.w.Layout, p.w.Size, c.log)
	want.Size = p.columnSize(k)
	want.Legs = make([]raid.Leg, p.w.Layout.Copies)
	want.ReadOnly, want.First = p.w.ReadOnly, p.first(k)
	want.Equalize = p.w.Equalize && !p.s.top.exists && !(c.Kind == raid.ShapeEqualizing && c.inSync == c.total)
	slots = make([]slot, p.w.Layout.Copies)
	sources := 0
	for copy := range want.Legs {
		state, device := p.wantCopy(k, copy, c)
		if state == raid.InSync {
			sources++
		}
		want.Legs[copy] = raid.Leg{Device: device, State: state}
		slots[copy] = p.slotFor(k, copy, state, device)
	}
	p.followOne(k, &want, slots)
	complete := p.complete(k)
	if complete && sources == 0 {
		p.v.Wait("a leg of column %d that is in sync", k)
	}
	return want, slots, complete && sources > 0
}

// followOne leaves one copy at most tracked or rebuilding, for a log is about
// one: the copy that comes back goes first, then the one that it is about.
func (p *planner) followOne(k int, want *raid.Column, slots []slot) {
	c := p.s.columns[k]
	best := -1
	rank := func(copy int) (n int) {
		if want.Legs[copy].State == raid.Rebuilding {
			n += 2
		}
		if c.tracks(copy) {
			n++
		}
		return n
	}
	for copy, l := range want.Legs {
		if (l.State == raid.Rebuilding || l.State == raid.Tracked) && (best < 0 || rank(copy) > rank(best)) {
			best = copy
		}
	}
	for copy, l := range want.Legs {
		if copy != best && (l.State == raid.Rebuilding || l.State == raid.Tracked) {
			want.Legs[copy], slots[copy] = raid.Leg{}, slot{}
		}
	}
	if best < 0 || want.Legs[best].State != raid.Rebuilding {
		return
	}
	l := p.w.At(k, best)
	want.Full = l.CopyAll || p.m.slot(k, best).Leg != l.Leg || !c.tracks(best)
	switch {
	case c.Kind == raid.ShapeRebuilding && c.Back == want.Legs[best].Device: // under way
	case want.Full:
		slots[best].Dirty = want.Size
	default:
		slots[best].Dirty = min(want.Size, block.Size(c.total-c.inSync)*c.Region)
	}
}

// wantCopy says what one copy should be, and on which device.
func (p *planner) wantCopy(k, copy int, c columnSeen) (raid.LegState, dm.Ref) {
	l, i := p.w.At(k, copy), p.memberAt(k, copy)
	if i < 0 {
		return p.wantOutside(k, copy, c)
	}
	m := p.members[i]
	trusted := p.s.top.exists && !p.untrusted(k)
	switch {
	case m.Gone && p.w.ReadOnly:
		return raid.Absent, ""
	case m.Gone && trusted:
		return raid.Tracked, m.device
	case m.Gone:
		return raid.Absent, ""
	case p.inSync(l):
		return raid.InSync, p.current(m)
	case m.Link != nil && !m.Source:
		return raid.Rebuilding, m.device
	}
	return raid.InSync, m.device // lost, and nothing can stand in: it stays
}

// untrusted reports whether a column keeps a leg that has had errors: what its
// log says of the others is then not all that they miss.
func (p *planner) untrusted(k int) bool {
	return slices.ContainsFunc(p.members, func(m member) bool {
		h := p.s.columns[k].health[m.device]
		return m.Column == k && m.Source && !m.Gone && h != 0 && h != dm.Alive
	})
}

// current is the device that a member is to be used through: a leg that stays
// as the only one may have come back under another.
func (p *planner) current(m member) dm.Ref {
	l := p.s.legs[m.Leg]
	others := slices.ContainsFunc(p.members, func(o member) bool {
		return o.Column == m.Column && o.Leg != m.Leg && o.Source && !o.Gone
	})
	if !others && m.Source && l.live && l.device != "" {
		return l.device
	}
	return m.device
}

// wantOutside is wantCopy for a copy that is not in the tables.
func (p *planner) wantOutside(k, copy int, c columnSeen) (raid.LegState, dm.Ref) {
	l := p.w.At(k, copy)
	sole := len(c.Sources) == 1 && !slices.ContainsFunc(p.members, func(m member) bool { return m.Column == k && m.Source })
	switch {
	case p.w.ReadOnly && c.Kind != raid.ShapeNothing:
		// It was left because it did not answer.
		if p.inSync(l) && p.s.legs[l.Leg].answers && p.silence(l.Leg) == 0 && p.fitToJoin(l) {
			return raid.InSync, p.s.legs[l.Leg].device
		}
		return raid.Absent, ""
	case p.inSync(l) && (c.Kind == raid.ShapeNothing || sole) && p.s.legs[l.Leg].live:
		return raid.InSync, p.s.legs[l.Leg].device
	case l != nil && !p.inSync(l) && !p.recordedStale(l) && p.s.top.exists && p.fitToJoin(l):
		return raid.Rebuilding, p.s.legs[l.Leg].device
	case c.tracks(copy) && c.Kind != raid.ShapeNothing:
		return raid.Tracked, p.m.slot(k, copy).Device
	}
	return raid.Absent, ""
}

func (p *planner) memberAt(k, copy int) int {
	return slices.IndexFunc(p.members, func(m member) bool { return m.Column == k && m.copy == copy })
}

// slotFor is what is to be remembered of a copy.
func (p *planner) slotFor(k, copy int, state raid.LegState, device dm.Ref) slot {
	if state == raid.Absent {
		return slot{}
	}
	was, l := p.m.slot(k, copy), p.w.At(k, copy)
	if state == raid.Tracked || l == nil {
		return was
	}
	s := slot{Leg: l.Leg, Device: device, NQN: l.NQN, NSID: l.NSID, UUID: l.UUID}
	if state == raid.Rebuilding {
		s.Dirty = was.Dirty
	}
	return s
}

// complete reports whether every leg that is in sync by record is in the tables
// or can be put there. One that is not, and another copy is, is recorded stale:
// at once if the column is built, since it has missed writes.
func (p *planner) complete(k int) bool {
	c := p.s.columns[k]
	var record []attachment.Change
	live, missing := 0, 0
	for copy := range p.w.Layout.Copies {
		l := p.w.At(k, copy)
		if !p.inSync(l) || p.memberAt(k, copy) >= 0 {
			continue
		}
		if seen := p.s.legs[l.Leg]; seen.live && (c.Kind == raid.ShapeNothing || len(c.Sources) == 1 && p.w.Layout.Copies == 1) {
			live++
			continue
		}
		missing++
		record = append(record, attachment.Change{Leg: l.Leg, Revision: l.Revision, Column: k, Why: "cannot be connected", Since: p.m.since})
		if !p.s.top.exists {
			p.v.Wait("leg %s of column %d on %s: %s", l.Leg, k, l.Node, p.trouble(l))
		}
	}
	if missing == 0 {
		return true
	}
	if p.w.ReadOnly { // the others join later
		return c.Kind != raid.ShapeNothing || live > 0 && p.s.now.Sub(p.m.since) >= p.l.connect
	}
	if c.Kind != raid.ShapeNothing {
		if slices.ContainsFunc(p.members, func(m member) bool { return m.Column == k && m.Source && !m.Gone && m.Lost == "" }) {
			p.do(order{op: opRecord, legs: record})
		}
		return true
	}
	if live > 0 && p.s.now.Sub(p.m.since) >= p.l.connect {
		p.do(order{op: opRecord, legs: record})
	}
	return false
}

// trouble says what keeps a leg from being live.
func (p *planner) trouble(l *attachment.Link) string {
	switch {
	case p.s.legs[l.Leg].err != "":
		return p.s.legs[l.Leg].err
	case p.s.refused[l.NQN] != "":
		return p.s.refused[l.NQN]
	}
	return "connecting"
}

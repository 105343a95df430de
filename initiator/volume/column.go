// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"hash/crc32"
	"slices"

	"weft.dev/weft/proto/block"
)

// column returns what column k should be; ok is false if it cannot be built or changed yet.
func (p *planner) column(k int) (want Column, ok bool) {
	c := p.s.Columns[k]
	if c.Foreign != "" {
		p.v.Wait("an operator: column %d: %s", k, c.Foreign)
		return want, false
	}
	if p.c.Tables && p.w.Layout.Copies > 1 && !c.Log {
		p.do(MakeLog{Column: k})
		return want, false
	}
	want = Column{
		Size: p.columnSize(k), Copies: make([]Copy, p.w.Layout.Slots()), First: p.first(k),
		Equalize: p.w.Equalize && !p.s.Device.Exists && !(c.Equalizing && c.Left == 0),
	}
	var sources block.MemberSet
	for copy := range want.Copies {
		want.Copies[copy] = p.wantCopy(Place{k, copy})
		if want.Copies[copy].State == InSync {
			sources = sources.With(copy)
		}
	}
	if p.c.Tables {
		p.followOne(k, &want)
	}
	complete, readable := p.complete(k), p.group().Readable(sources)
	if complete && !readable {
		p.v.Wait("a leg of column %d that is in sync", k)
	}
	return want, complete && readable
}

// first is the copy of a column that this host prefers to read from. The readers of a shared
// volume prefer different copies.
func (p *planner) first(k int) int {
	if !p.w.ReadOnly {
		return 0
	}
	return int((p.w.Turn() + uint32(k)) % uint32(p.w.Layout.Copies))
}

// Turn is a number of this host by which the readers of a shared volume share its copies; 0 if it has the
// volume alone.
func (w *Wanted) Turn() uint32 {
	if !w.ReadOnly || len(w.Links) == 0 {
		return 0
	}
	_, _, host, _, err := block.ParseSubsystemNQN(w.Links[0].NQN)
	if err != nil {
		return 0
	}
	return crc32.ChecksumIEEE([]byte(host))
}

// wantCopy returns the copy that a place should hold.
func (p *planner) wantCopy(at Place) Copy {
	i := p.memberAt(at)
	if i < 0 {
		return p.wantOutside(at)
	}
	m := p.members[i]
	c := Copy{Leg: m.Leg, Dirty: p.copy(at).Dirty}
	switch {
	case m.Gone:
		c.Track = !p.w.ReadOnly && p.s.Device.Exists && !p.untrusted(at.Column)
	case m.Link != nil && p.inSync(m.Link):
		c.State, c.Anew = InSync, p.anew(m)
	case !m.Source: // even if it is recorded stale and cannot leave yet
		c.State = Rebuilding
	default:
		c.State = InSync // lost, but no other copy can replace it: it stays
	}
	return c
}

// untrusted reports whether a column keeps a leg that has had errors: the log of what the
// other copies miss is then incomplete.
func (p *planner) untrusted(k int) bool {
	return slices.ContainsFunc(p.members, func(m member) bool {
		return m.Column == k && m.Source && !m.Gone && p.copy(m.Place).Error != ""
	})
}

// anew reports whether a member must move to another device of its leg: the only source of a
// column stays in place, so its leg may have come back as a new device.
func (p *planner) anew(m member) bool {
	others := slices.ContainsFunc(p.members, func(o member) bool {
		return o.Column == m.Column && o.Leg != m.Leg && o.Source && !o.Gone
	})
	return !others && m.Source && p.s.Legs[m.Leg].Live && p.copy(m.Place).Moved != ""
}

// wantOutside is wantCopy for a place whose copy takes no part in I/O.
func (p *planner) wantOutside(at Place) Copy {
	k, l := p.s.Columns[at.Column], p.link(at)
	c := k.Copies[at.Copy]
	switch {
	case p.w.ReadOnly && k.Built:
		if p.rejoins(l) {
			return Copy{Leg: l.Leg, State: InSync, Anew: true}
		}
	case p.inSync(l) && (!k.Built || p.soleUnknown(at.Column)) && p.s.Legs[l.Leg].Live:
		return Copy{Leg: l.Leg, State: InSync, Anew: true}
	case p.toRebuild(l) && p.s.Device.Exists && p.fitToJoin(l):
		return Copy{Leg: l.Leg, State: Rebuilding, Anew: true, Dirty: c.Dirty}
	case k.Built && c.Tracked:
		return Copy{Leg: c.Leg, Track: true, Dirty: c.Dirty}
	}
	return Copy{}
}

// rejoins reports whether a leg that a read-only column dropped, because it did not answer, can
// be read again.
func (p *planner) rejoins(l *Link) bool {
	return p.inSync(l) && p.s.Legs[l.Leg].answers() && p.silence(l.Leg) == 0 && p.fitToJoin(l)
}

// soleUnknown reports whether a column has a single source that cannot be identified.
func (p *planner) soleUnknown(column int) bool {
	known := slices.ContainsFunc(p.members, func(m member) bool { return m.Column == column && m.Source })
	return p.s.Columns[column].Sources == 1 && !known
}

// toRebuild reports whether a leg is wanted and misses writes.
func (p *planner) toRebuild(l *Link) bool { return l != nil && !p.inSync(l) && !p.m.Records.Stale(l) }

// whole says why all of a rebuilding leg is copied; empty: it misses only what is tracked.
func (c CopySeen) whole(l *Link) string {
	switch {
	case c.Leg != l.Leg || !c.Tracked:
		return "this host has not tracked what it misses"
	case !l.CopyAll || c.continues(l.CopyAllSince):
		return ""
	case !l.CacheLost || l.AllSince > 0 && !c.continues(l.AllSince):
		return "it does not have the volume's data"
	case !c.LossCovered:
		return "it may have lost what its drive's cache held, and this host has not tracked what was not flushed"
	}
	return ""
}

// continues reports whether a copy of all of a leg began here since a revision, 0: not known, so that
// only the rest, and what was written since, is missing.
func (c CopySeen) continues(since uint64) bool { return c.Whole > 0 && since > 0 && c.Whole >= since }

// Copied says what the rebuild of a leg copies, for people. whole is why all of it is.
func (l *Link) Copied(whole string) string {
	switch {
	case whole != "":
		return "all of it, because " + whole
	case l.CacheLost:
		return "what it missed, and what may have been only in its drive's cache"
	}
	return "what it missed"
}

// complete reports whether every leg that is recorded in sync takes part in I/O, or can. A leg
// that cannot, while another copy can, is recorded stale: at once if the column is built,
// because the leg has missed writes.
func (p *planner) complete(k int) bool {
	c := p.s.Columns[k]
	record, live := p.missing(k)
	good := func(m member) bool { return m.Column == k && m.Source && !m.Gone && !m.Lost.any() }
	needed := func(c Change) bool { return c.Why.Reason != LeftOut }
	patient := p.s.Now.Sub(p.m.Since) < p.l.Connect && slices.ContainsFunc(record, needed)
	switch {
	case len(record) == 0:
		return true
	case c.Built:
		if !p.w.ReadOnly && slices.ContainsFunc(p.members, good) {
			p.record(record)
		}
		return true
	case len(live) == 0 || patient:
		return false
	case p.w.ReadOnly: // the others join later
		return true
	}
	p.do(FlushLegs{Legs: live}) // or they do not have what they were in sync for any more
	p.record(record)
	return false
}

// missing lists the legs of a column that are recorded in sync but neither take part in I/O
// nor can; live are the others, which are ready to be added.
func (p *planner) missing(k int) (record []Change, live []At) {
	c := p.s.Columns[k]
	for copy := range p.w.Layout.Slots() {
		at := Place{k, copy}
		l := p.link(at)
		if !p.inSync(l) || p.memberAt(at) >= 0 {
			continue
		}
		if p.s.Legs[l.Leg].Live && (!c.Built || c.Sources == 1 && p.w.Layout.Copies == 1) {
			live = append(live, At{Place: at, Leg: l.Leg, Revision: l.Revision})
			continue
		}
		why, since := lost(NotConnected, "cannot be connected"), p.m.Since
		switch {
		case c.Built:
			why, since = lost(NotInUse, "was not in use"), p.s.Now
		case l.LeaveOut != "":
			why = lost(LeftOut, "%s", l.LeaveOut)
		}
		record = append(record, Change{Leg: l.Leg, Revision: l.Revision, Column: k, Why: why, Since: since})
		if !p.s.Device.Exists {
			p.v.Wait("leg %s of column %d on %s: %s", l.Leg, k, l.Node, p.trouble(l))
		}
	}
	return record, live
}

// recovered asks the manager to record a caught-up leg as in sync.
func (p *planner) recovered(m member) {
	c := p.copy(m.Place)
	if c.State != CaughtUp || m.Source || m.Gone || m.Lost.any() || m.Link == nil || p.silence(m.Leg) > 0 || c.Moved != "" {
		return
	}
	// The next host builds the volume from any leg in sync, so the leg must have the wanted
	// size.
	if short := p.short(m.Link); short != "" {
		p.v.Note("record leg %s in sync: %s", m.Leg, short)
		return
	}
	p.do(RecordInSync{Legs: []Change{{Leg: m.Leg, Revision: m.Link.Revision, Column: m.Column, Copied: c.Dirty, What: c.What}}})
	if p.s.RecordError != "" {
		p.v.Note("record leg %s in sync: %s", m.Leg, p.s.RecordError)
	}
}

// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"cmp"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
)

// findMembers finds the copies that take part in I/O, and which of them are lost.
func (p *planner) findMembers() {
	if p.members != nil {
		return
	}
	p.members = []member{}
	for k, c := range p.s.Columns {
		for copy := range min(len(c.Copies), p.w.Layout.Slots()) {
			if m, ok := p.member(Place{k, copy}); ok {
				p.members = append(p.members, m)
			}
		}
		p.keepAlone(k)
		p.keepEnough(k)
	}
}

func (p *planner) memberAt(at Place) int {
	return slices.IndexFunc(p.members, func(m member) bool { return m.Place == at })
}

// member finds the leg that takes part in a place. A copy whose rebuild failed takes no more
// I/O but still counts: writes sent to it may be under way, and recording it stale ends the
// revision that admits them. A copy that has not yet answered everything it was sent counts
// too.
func (p *planner) member(at Place) (member, bool) {
	c, l := p.copy(at), p.link(at)
	m := member{Place: at, Leg: c.Leg, Node: c.Node, Paths: p.pathsTo(c.Subsystem)}
	if l != nil && l.Leg == c.Leg && !p.m.Records.Stale(l) && (!c.Superseded || p.reborn(at)) {
		m.Link = l
	}
	if !c.inUse() && (c.State != Failed || (m.Link == nil || p.w.ReadOnly) && !c.Busy) {
		return m, false
	}
	// Once a rebuilt leg is recorded in sync it is as good as the others, even if one of them
	// is lost before anything is read from it.
	m.Source = c.State == InSync || c.inUse() && m.Link != nil && p.inSync(m.Link)
	p.judge(&m, c)
	return m, true
}

// judge decides whether a member is lost, why, and whether I/O may be waiting on its paths.
//
// Branches: one for each reason.
func (p *planner) judge(m *member, c CopySeen) {
	l := p.s.Legs[m.Leg]
	silence, absent := p.silence(m.Leg), p.absent(m)
	m.Answers = p.answering(m.Leg) && !c.Reborn // what it has is known once it is renewed
	m.since = p.s.Now
	if silence > 0 {
		m.since = l.silent()
	}
	m.Waiting = silence > 0 && c.Moved == "" || m.Link == nil && c.Busy && (!p.alive(m.Paths) || c.Oldest > p.l.Window)
	switch {
	case m.Link == nil:
		m.Lost = lost(recordedStale, "recorded stale")
	case c.State == Failed:
		m.Lost = lost(RebuildFailed, "its rebuild failed: %s", c.Error)
	case l.lost(p.s.Now, p.window(m)):
		m.Lost = lost(NoAnswer, "no answer for more than %v", p.window(m))
	case absent.any():
		m.Lost, m.Early = absent, true
	case c.Error != "" && !p.w.ReadOnly: // a read was served by another copy
		m.Lost = lost(IOError, "%s", c.Error)
	case c.Moved != "":
		m.Lost = lost(DeviceGone, "%s", c.Moved)
	case c.Busy && c.Oldest > p.l.Stuck:
		m.Lost, m.Waiting = lost(IOStuck, "an I/O has not been answered for %v", c.Oldest.Round(time.Second)), true
		m.since = p.s.Now.Add(-c.Oldest)
	case p.undecided(m, c):
		m.Lost = lost(NoAnswer, "it did not answer, and the volume manager has not said whether that is recorded")
	}
}

// window is how long a member may be silent. While its path moves to another portal, or one of several is broken, and the
// other portal has accepted a connection, it has longer: to give it up would not end the wait sooner.
func (p *planner) window(m *member) time.Duration {
	if m.Link != nil && p.moving(m.Link.NQN) {
		return max(p.l.Window, p.l.Moving)
	}
	return p.l.Window
}

// absent is why a member is lost although its window has not passed: nobody is there at its target.
func (p *planner) absent(m *member) Loss {
	switch {
	case m.Link == nil: // it leaves in any case
	case p.changes(m.Link.NQN):
	case p.s.Legs[m.Leg].mute(p.s.Now, p.l.Mute) && p.unreachable(m):
		return lost(NoAnswer, "its target has answered nothing for more than %v", p.l.Mute)
	case p.refused(m.Link):
		return lost(NoAnswer, "its target refuses connections, at each of its portals")
	}
	return Loss{}
}

// unreachable reports whether no portal of a silent target accepts connections, which its kernel
// would do however busy its processes are.
func (p *planner) unreachable(m *member) bool {
	for _, w := range p.s.Legs[m.Leg].Ways {
		if slices.ContainsFunc(p.inTurn(m.Link), func(portal block.Portal) bool { return !p.dead(Path{m.Link.NQN, portal}, w.Mute) }) {
			return false
		}
	}
	return true
}

// refused reports whether every portal of a leg's target has refused connections, again and again,
// for as long as a restart of the target may take. That is no silence: nobody is there.
func (p *planner) refused(l *Link) bool {
	portals := p.inTurn(l)
	return p.l.Refused > 0 && len(portals) > 0 && !p.changes(l.NQN) && !slices.ContainsFunc(portals, func(portal block.Portal) bool {
		path := Path{l.NQN, portal}
		r := p.s.Tried[path].Refused
		return p.seen(path).State == PathLive || r.Last.Sub(r.First) < p.l.Refused || p.s.Now.Sub(r.Last) > refusalsLast
	})
}

// silence is how long a leg has not answered.
func (p *planner) silence(leg block.LegID) time.Duration { return p.s.Legs[leg].Silence(p.s.Now) }

// answering reports whether a leg answers now.
func (p *planner) answering(leg block.LegID) bool { return p.silence(leg) == 0 && p.s.Legs[leg].Live }

// keepAlone gives the legs of targets that are silent or refuse their full window unless the
// column can be read from others that answer now: else no I/O goes on earlier, and if several
// targets fail at once it is more likely this host's network, for a moment.
func (p *planner) keepAlone(column int) {
	var good block.MemberSet
	for _, m := range p.members {
		if m.Column == column && m.good() && p.answering(m.Leg) && !p.s.Legs[m.Leg].mute(p.s.Now, 1) {
			good = good.With(m.Copy)
		}
	}
	if p.group().Readable(good) {
		return
	}
	for i := range p.members {
		if m := &p.members[i]; m.Column == column && m.Early {
			m.Lost, m.Early = Loss{}, false
		}
	}
}

// keepEnough lets legs stay despite their errors when their column cannot be read without them:
// the first that answer. The I/O that failed is sent to them again. (The log of what the others
// miss is incomplete from then on.)
func (p *planner) keepEnough(column int) {
	for {
		i := spared(p.group(), p.copies(), column, p.answering)
		if i < 0 {
			return
		}
		m, say := &p.members[i], p.v.Note
		if p.s.Waits {
			say = p.v.Wait
		}
		say("leg %s of column %d on %s: %s, and no other copy can replace it", m.Leg, column, nodeOf(*m), m.Lost)
		m.Lost = Loss{}
	}
}

// group is the redundancy group of each column.
func (p *planner) group() block.Group { return p.w.Layout.Group() }

func (p *planner) copies() []*member {
	all := make([]*member, len(p.members))
	for i := range p.members {
		all[i] = &p.members[i]
	}
	return all
}

// dropLost decides which members leave now, has them recorded stale, and lets I/O continue
// without them. A leg that its column cannot do without stays, and its I/O waits until the leg
// is back.
func (p *planner) dropLost() {
	left := p.leaveOut()
	leave(p.group(), p.copies())
	p.readmit()
	var record []Change
	var drop []At
	var cut []Path
	for _, m := range p.members {
		if !m.Gone {
			p.waitFor(m)
			continue
		}
		if m.Link != nil && !p.w.ReadOnly {
			record = append(record, Change{Leg: m.Leg, Revision: m.Link.Revision, Column: m.Column, Why: m.Lost, Since: m.since})
		}
		if p.copy(m.Place).inUse() && !p.c.Tables {
			drop = append(drop, At{Place: m.Place, Leg: m.Leg, Why: m.Lost})
		}
		for _, path := range m.Paths {
			if m.Waiting && !slices.Contains(cut, path) {
				cut = append(cut, path)
			}
		}
	}
	p.failOver(cut)
	p.failFast(cut)
	p.flushFirst(left)
	if len(record) > 0 {
		p.record(record)
	}
	p.note()
	if len(drop) > 0 {
		p.do(Drop{Legs: drop})
	}
	for _, path := range cut {
		p.cut(path)
	}
}

// waitFor says what I/O waits for on a member that stays.
func (p *planner) waitFor(m member) {
	switch c := p.copy(m.Place); {
	case c.Full:
		p.v.Wait("space for new data on leg %s of column %d on %s", m.Leg, m.Column, nodeOf(m))
	case c.Short && c.State == InSync:
		p.v.Wait("space for what another copy has, on leg %s of column %d on %s", m.Leg, m.Column, nodeOf(m))
	}
	if m.Lost.any() {
		p.v.Wait("leg %s of column %d on %s: %s, and %s", m.Leg, m.Column, nodeOf(m), m.Lost, m.Stays)
	}
}

// record asks the manager to record legs as stale; I/O waits for the answer.
func (p *planner) record(legs []Change) {
	p.do(RecordStale{Legs: legs})
	if p.s.RecordError != "" {
		p.v.Wait("volume manager, to record that leg %s is stale: %s", legs[0].Leg, p.s.RecordError)
	}
}

func nodeOf(m member) string { return cmp.Or(m.Node, "another node") }

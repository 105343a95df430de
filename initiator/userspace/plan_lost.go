// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/engine"
)

// member is a leg that takes part in the volume's I/O, or holds some of it up.
type member struct {
	attachment.Member
	place
	state engine.State
	since time.Time // of its silence or error
}

func (p *planner) findMembers() {
	p.members = nil
	if !p.s.volume.built {
		return
	}
	for _, at := range p.places() {
		if m, ok := p.member(at); ok {
			p.members = append(p.members, m)
		}
	}
	for column := range p.w.Layout.Stripes {
		p.keepOne(column)
	}
}

func (p *planner) memberAt(at place) int {
	return slices.IndexFunc(p.members, func(m member) bool { return m.place == at })
}

// member finds the leg that is in use in a place. One whose rebuild has failed is
// no more, and counts: a record ends the revision under which writes to it may
// still be on their way. So does one that has not given back what it was sent.
func (p *planner) member(at place) (member, bool) {
	slot, known := p.m.slots[at]
	status := p.status(at)
	if !known {
		return member{}, false
	}
	m := member{
		Member: attachment.Member{Column: at.column, Leg: slot.leg, NQN: slot.nqn},
		place:  at, state: status.State,
	}
	if l := p.link(at); l != nil && l.Leg == slot.leg && l.Revision == slot.revision && !p.m.records.Stale(l) {
		m.Link = l
	} else {
		m.Link = p.reborn(at)
	}
	switch status.State {
	case engine.InSync, engine.CaughtUp, engine.Rebuilding:
	case engine.Dropped:
		if (m.Link == nil || p.w.ReadOnly) && status.Outstanding == 0 {
			return member{}, false
		}
	default:
		return member{}, false
	}
	// A rebuilt leg that is recorded in sync is as good as the others from then
	// on, also if one of them is lost before it is promoted.
	m.Source = status.State == engine.InSync || status.State == engine.CaughtUp && m.Link != nil && p.m.records.InSync(m.Link)
	p.judge(&m, status)
	return m, true
}

// judge says whether a member is lost, why, and whether its connection may hold I/O.
func (p *planner) judge(m *member, status engine.LegStatus) {
	l := p.s.legs[m.Leg]
	silence := p.silence(m.Leg)
	m.since = p.s.now
	if silence > 0 {
		m.since = l.silent
	}
	m.Waiting = silence > 0 || m.Link == nil && status.Outstanding > 0 && (!p.s.conns[m.NQN].live || status.Oldest > p.l.window)
	switch {
	case m.Link == nil:
		m.Lost = "recorded stale"
	case status.State == engine.Dropped:
		m.Lost = fmt.Sprintf("its rebuild failed: %v", status.Err)
	case silence > p.l.window && l.looks >= 3:
		m.Lost = fmt.Sprintf("no answer for more than %v", p.l.window)
	case status.Err != nil && status.State != engine.Rebuilding && !p.w.ReadOnly: // a read has gone to another copy
		m.Lost = status.Err.Error()
	case status.Outstanding > 0 && status.Oldest > p.l.stuck:
		m.Lost, m.Waiting = fmt.Sprintf("an I/O has not been answered for %v", status.Oldest.Round(time.Second)), true
		m.since = p.s.now.Add(-status.Oldest)
	}
}

// silence is how long a leg has not answered.
func (p *planner) silence(leg block.LegID) time.Duration {
	since := p.s.legs[leg].silent
	if since.IsZero() {
		return 0
	}
	return max(p.s.now.Sub(since), 1)
}

// answering reports whether a leg's path answers now.
func (p *planner) answering(leg block.LegID) bool { return p.silence(leg) == 0 && p.s.legs[leg].live }

// keepOne lets a leg with errors stay if every source of its column is lost: the
// first one whose path answers. The engine sends to it again what it failed.
func (p *planner) keepOne(column int) {
	i := attachment.Spared(p.copies(), column, p.answering)
	if i < 0 {
		return
	}
	m, say := &p.members[i], p.v.Note
	if p.s.volume.held > 0 {
		say = p.v.Wait
	}
	say("leg %s of column %d on %s: %s, and no other copy can stand in", m.Leg, column, p.nodeOf(*m), m.Lost)
	m.Lost = ""
}

// copies are the members, for what both data paths decide of them.
func (p *planner) copies() []*attachment.Member {
	all := make([]*attachment.Member, len(p.members))
	for i := range p.members {
		all[i] = &p.members[i].Member
	}
	return all
}

// dropLost marks the members that leave now, has them recorded, and has their I/O
// go on without them. A leg without which its column could not go on stays: its
// I/O waits until it is back.
func (p *planner) dropLost() {
	attachment.Leave(p.copies())
	var record, drop []legAt
	var cut []block.NQN
	for _, m := range p.members {
		if !m.Gone {
			if m.Lost != "" {
				p.v.Wait("leg %s of column %d on %s: %s, and %s", m.Leg, m.Column, p.nodeOf(m), m.Lost, m.Stays)
			}
			continue
		}
		l := legAt{place: m.place, leg: m.Leg, revision: p.m.slots[m.place].revision, why: m.Lost, since: m.since}
		if m.Link != nil && !p.w.ReadOnly {
			record = append(record, l)
		}
		if m.state != engine.Dropped {
			drop = append(drop, l)
		}
		if m.Waiting && !slices.Contains(cut, m.NQN) {
			cut = append(cut, m.NQN)
		}
	}
	if len(record) > 0 {
		p.record(record)
	}
	p.note()
	if len(drop) > 0 {
		p.do(order{op: opDrop, legs: drop})
	}
	for _, n := range cut {
		if _, there := p.s.conns[n]; there {
			p.do(order{op: opCut, nqn: n})
		}
	}
}

// record has the manager record legs stale; I/O waits for that.
func (p *planner) record(legs []legAt) {
	p.do(order{op: opRecord, legs: legs})
	if p.s.recordError != "" {
		p.v.Wait("volume manager, to record that leg %s is stale: %s", legs[0].leg, p.s.recordError)
	}
}

func (p *planner) nodeOf(m member) string { return cmp.Or(p.m.slots[m.place].node, "another node") }

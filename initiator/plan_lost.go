// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"fmt"
	"slices"
	"time"

	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/initiator/fabrics"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/dm"
)

// member is a copy that is in a column's tables.
type member struct {
	attachment.Member
	copy   int
	device dm.Ref
	since  time.Time // of its silence or error
}

func (p *planner) findMembers() {
	for k, c := range p.s.columns {
		for copy := range p.w.Layout.Copies {
			if m, ok := p.member(k, copy, c); ok {
				p.members = append(p.members, m)
			}
		}
		p.keepOne(k)
	}
}

// member finds the copy in the tables: under the device that it had last, or,
// if that was not written down, under the one that it has.
func (p *planner) member(k, copy int, c columnSeen) (member, bool) {
	slot, l := p.m.slot(k, copy), p.w.At(k, copy)
	m := member{Member: attachment.Member{Column: k, Leg: slot.Leg, NQN: slot.NQN}, copy: copy, device: slot.Device}
	if l != nil && (!c.has(m.device) || c.has(p.s.legs[l.Leg].device)) {
		m.Leg, m.device, m.NQN = l.Leg, p.s.legs[l.Leg].device, l.NQN
	}
	if !c.has(m.device) {
		return m, false
	}
	if l != nil && l.Leg == m.Leg && !p.recordedStale(l) {
		m.Link = l
	}
	// A rebuilt leg that is recorded in sync is as good as the others from then
	// on, also if one of them is lost before the tables say so.
	m.Source = slices.Contains(c.Sources, m.device) || m.Link != nil && p.inSync(m.Link)
	p.judge(&m, c)
	return m, true
}

// judge says whether a member is lost, why, and whether its path may hold I/O.
func (p *planner) judge(m *member, c columnSeen) {
	l := p.s.legs[m.Leg]
	silence := p.silence(m.Leg)
	moved := l.device != "" && l.device != m.device
	m.since = p.s.now
	if silence > 0 {
		m.since = l.silent
	}
	m.Waiting = silence > 0 && !moved || m.Link == nil && !p.s.alive(m.NQN)
	switch health := c.health[m.device]; {
	case m.Link == nil:
		m.Lost = "recorded stale"
	case silence > p.l.window && l.looks >= 3:
		m.Lost = fmt.Sprintf("no answer for more than %v", p.l.window)
	case health != 0 && health != dm.Alive && !p.w.ReadOnly: // a read has gone to another copy
		m.Lost = fmt.Sprintf("device-mapper reports a %v", health)
	case moved:
		m.Lost = fmt.Sprintf("its device %s is gone", m.device)
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

// keepOne lets a leg with errors stay if every source of its column has some: the
// first one whose path answers. (No log is right about the others then.)
func (p *planner) keepOne(k int) {
	if i := attachment.Spared(p.copies(), k, p.answering); i >= 0 {
		p.members[i].Lost = ""
	}
}

// copies are the members, for what both data paths decide of them.
func (p *planner) copies() []*attachment.Member {
	all := make([]*attachment.Member, len(p.members))
	for i := range p.members {
		all[i] = &p.members[i].Member
	}
	return all
}

// dropLost marks the members that leave now, has them recorded, and has their
// I/O released. A leg without which its column could not go on stays: its I/O
// waits until it is back.
func (p *planner) dropLost() {
	attachment.Leave(p.copies())
	var record []attachment.Change
	var release []block.NQN
	for _, m := range p.members {
		switch {
		case m.Lost != "" && !m.Gone:
			p.v.Wait("leg %s of column %d on %s: %s, and %s", m.Leg, m.Column, p.nodeOf(m), m.Lost, m.Stays)
		case !m.Gone:
			continue
		case m.Link != nil && !p.w.ReadOnly:
			record = append(record, attachment.Change{Leg: m.Leg, Revision: m.Link.Revision, Column: m.Column, Why: m.Lost, Since: m.since})
		}
		if m.Gone && m.Waiting && !slices.Contains(release, m.NQN) {
			release = append(release, m.NQN)
		}
	}
	if len(record) > 0 {
		p.do(order{op: opRecord, legs: record})
		if p.s.recordError != "" {
			p.v.Wait("volume manager, to record that leg %s is stale: %s", record[0].Leg, p.s.recordError)
		}
	}
	p.note()
	for _, n := range release {
		p.release(n)
	}
}

func (p *planner) nodeOf(m member) string {
	if l := p.w.At(m.Column, m.copy); l != nil && l.Leg == m.Leg {
		return l.Node
	}
	return "another node"
}

func (p *planner) release(n block.NQN) {
	if len(p.s.controllers[n]) > 0 {
		p.do(order{op: opRelease, nqn: n, force: p.s.mute(n)})
	}
}

// alive reports whether a subsystem has a live controller, or none at all: then
// nothing waits on it either.
func (s *seen) alive(n block.NQN) bool {
	return len(s.controllers[n]) == 0 ||
		slices.ContainsFunc(s.controllers[n], func(c fabrics.Controller) bool { return c.State == fabrics.Live })
}

// mute reports whether a subsystem's target seems to be silent as a whole while
// the kernel believes in a connection to it.
func (s *seen) mute(n block.NQN) bool {
	believes := slices.ContainsFunc(s.controllers[n], func(c fabrics.Controller) bool { return c.State == fabrics.Live })
	for _, l := range s.legs {
		if believes && l.nqn == n && !l.silent.IsZero() && !l.peerAnswers {
			return true
		}
	}
	return false
}

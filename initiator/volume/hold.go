// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"maps"
	"slices"
	"time"
)

// Reason says why I/O is held.
type Reason string

// Lease holds I/O because another host may have been granted the volume.
const Lease Reason = "lease"

// Hold asks for I/O to be held for a reason. I/O continues after the limit, whether or not the
// work that needed the hold is done. The lease is no such request and has no limit: it holds
// I/O when the legs fall silent.
type Hold struct {
	Reason Reason
	Limit  time.Duration
}

// Began records when a hold began.
type Began struct {
	At    time.Time
	Limit time.Duration
}

// HoldBegan remembers when a hold began. A lease is not remembered, since it depends only on
// when the legs last answered.
func (m *Memory) HoldBegan(o HoldIO, now time.Time) {
	if _, held := m.Holds[o.Reason]; !held && o.Reason != Lease {
		m.Holds[o.Reason] = Began{At: now, Limit: o.Limit}
	}
}

// KeepHolds forgets holds that are no longer requested. A hold that has ended but is still
// requested is remembered, so that I/O is not held for it again.
func (m *Memory) KeepHolds(w *Wanted) {
	maps.DeleteFunc(m.Holds, func(r Reason, _ Began) bool {
		return w == nil || !slices.ContainsFunc(w.Holds, func(h Hold) bool { return h.Reason == r })
	})
}

// holdIO holds I/O as long as there is a reason to, and resumes it when there is none. Whoever
// suspended the I/O, it is resumed only after every remaining leg has answered, because the
// lease may have expired meanwhile.
func (p *planner) holdIO() {
	if !p.s.Holdable || p.s.Holding {
		return
	}
	held := false
	for _, h := range p.wantedHolds() {
		began, known := p.m.Holds[h.Reason]
		switch {
		case known && p.s.Now.Sub(began.At) >= h.Limit:
			p.v.Note("I/O was held for a %s for %v, and goes on", h.Reason, h.Limit)
			continue
		case !known || !p.s.Held:
			p.do(HoldIO(h))
		}
		p.v.Wait("the end of a %s; I/O is held for it", h.Reason)
		held = true
	}
	switch {
	case p.w.ReadOnly: // no host may write until the readers can reach no leg
	case !p.s.Held && p.leaseLeft() <= 0:
		p.do(HoldIO{Reason: Lease})
		return
	case p.s.Held && !p.allAnswer():
		p.v.Wait("all legs to answer; the volume is suspended")
		return
	}
	if p.s.Held && !held {
		p.do(ResumeIO{})
	}
}

// wantedHolds lists the requested holds, or those in force while the wanted state is unknown.
func (p *planner) wantedHolds() []Hold {
	if !p.guards {
		return p.w.Holds
	}
	var all []Hold
	for _, r := range slices.Sorted(maps.Keys(p.m.Holds)) {
		all = append(all, Hold{Reason: r, Limit: p.m.Holds[r].Limit})
	}
	return all
}

// leaseLeft is how long the volume may still be read if no leg answers from now on. A leg that
// this host has not heard itself counts as expired: an earlier agent may have died long ago,
// or this one may have been frozen.
func (p *planner) leaseLeft() time.Duration {
	if slices.ContainsFunc(p.s.Columns, func(c ColumnSeen) bool { return c.Unknown }) {
		return 0
	}
	left := p.l.Lease
	for _, m := range p.members {
		if m.Link != nil {
			left = min(left, p.l.Lease-p.s.Clock.Sub(p.s.Legs[m.Leg].heard()))
		}
	}
	return left
}

// LeaseLeft is how long a volume may still be read if no leg answers from now on. It guards
// reads that complete between turns.
func LeaseLeft(w *Wanted, m *Memory, s *Seen, l Limits, c Capabilities) time.Duration {
	p := &planner{w: w, m: m, s: s, l: l, c: c}
	p.findMembers()
	return p.leaseLeft()
}

// allAnswer reports whether every leg in use answers. A leg that is recorded stale but still
// in use does not count for the lease: the volume may by now be granted to another host
// without that leg.
func (p *planner) allAnswer() bool {
	return p.leaseLeft() > 0 && !slices.ContainsFunc(p.members, func(m member) bool {
		return m.Link == nil || p.silence(m.Leg) > 0 || !p.s.Legs[m.Leg].answers()
	})
}

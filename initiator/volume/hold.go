// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"maps"
	"slices"
	"time"
)

// Hold asks for I/O to be held. I/O continues after the limit, whether or not the work that
// needed the hold is done. The lease is no such request and has no limit: it holds I/O when the
// legs fall silent, because another host may have been granted the volume.
type Hold struct {
	ID    string
	Limit time.Duration
}

// Began records when a hold began.
type Began struct {
	At    time.Time     `json:"-"` // zero if an earlier agent began it: it has ended then
	Limit time.Duration `json:"limit"`
}

// HoldState is how far a hold has come, in the words of pb.HoldState.
type HoldState string

// The states of a hold.
//
//	pending ──► held ──► ended
//	   └───────────────────▲
const (
	HoldPending HoldState = "pending" // I/O of users may still be under way
	HoldHeld    HoldState = "held"    // no I/O of users is under way, and none begins
	HoldEnded   HoldState = "ended"   // its limit has passed, or the agent has restarted: I/O continues
)

// HoldSeen is a requested hold and its state.
type HoldSeen struct {
	ID    string
	State HoldState
}

// HoldBegan remembers when a hold began, and reports whether an agent that follows has to know it
// too. A lease is not remembered, since it depends only on when the legs last answered.
func (m *Memory) HoldBegan(o HoldIO, now time.Time) (begins bool) {
	if o.LeaveOut && m.LeavingOut.Began.IsZero() {
		m.LeavingOut.Began = now
	}
	if _, known := m.Holds[o.Hold]; known || o.Hold == "" {
		return false
	}
	m.Holds[o.Hold] = Began{At: now, Limit: o.Limit}
	return true
}

// KeepHolds forgets holds that are no longer requested. A hold that has ended but is still
// requested is remembered, so that I/O is not held for it again.
func (m *Memory) KeepHolds(w *Wanted) {
	maps.DeleteFunc(m.Holds, func(id string, _ Began) bool {
		return w == nil || !slices.ContainsFunc(w.Holds, func(h Hold) bool { return h.ID == id })
	})
}

// holdIO holds I/O as long as there is a reason to, and resumes it when there is none. Whoever
// suspended the I/O, it is resumed only after every remaining leg has answered, because the
// lease may have expired meanwhile.
func (p *planner) holdIO() {
	held := p.holdForRequests()
	held = p.holdToLeaveOut() || held
	switch {
	case !p.s.Holdable || p.s.Holding:
		return
	case p.w.ReadOnly: // no host may write until the readers can reach no leg
	case !p.s.Held && p.leaseLeft() <= 0:
		p.do(HoldIO{})
		return
	case p.s.Held && !p.allAnswer():
		p.v.Wait("all legs to answer; the volume is suspended")
		return
	}
	if p.s.Held && !held {
		p.do(ResumeIO{})
	}
}

// holdForRequests holds I/O for the requested holds that have not ended, and reports whether
// there are any.
func (p *planner) holdForRequests() (held bool) {
	for _, h := range p.wantedHolds() {
		began, known := p.m.Holds[h.ID]
		state := HoldPending
		switch {
		case known && p.s.Now.Sub(began.At) >= h.Limit:
			p.v.Note("hold %s has ended after %v, and I/O continues", h.ID, h.Limit)
			p.v.Holds = append(p.v.Holds, HoldSeen{h.ID, HoldEnded})
			continue
		case !p.s.Holdable || p.s.Holding:
		case !known || !p.s.Held:
			p.do(HoldIO{Hold: h.ID, Limit: h.Limit})
		case p.s.Quiet:
			state = HoldHeld
		}
		p.v.Holds = append(p.v.Holds, HoldSeen{h.ID, state})
		if p.s.Holdable {
			p.v.Wait("the end of hold %s, for at most %v", h.ID, h.Limit)
			held = true
		}
	}
	return held
}

// wantedHolds lists the requested holds, or those in force while the wanted state is unknown.
func (p *planner) wantedHolds() []Hold {
	if !p.guards {
		return p.w.Holds
	}
	var all []Hold
	for _, id := range slices.Sorted(maps.Keys(p.m.Holds)) {
		all = append(all, Hold{ID: id, Limit: p.m.Holds[id].Limit})
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

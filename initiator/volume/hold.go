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
	// Freeze: the file systems on the device are frozen before I/O is held, so that the device holds them
	// as they are between two writes of programs.
	Freeze bool
	// Prepare, with Freeze: so far, only write out what the file systems have in memory.
	Prepare bool
}

// Began records when a hold began.
type Began struct {
	At     time.Time     `json:"-"` // zero if an earlier agent began it: it has ended then
	Limit  time.Duration `json:"limit"`
	Freeze bool          `json:"freeze,omitempty"`
}

// HoldState is how far a hold has come, in the words of pb.HoldState.
type HoldState string

// The states of a hold.
//
//	pending ──► prepared ──► pending ──► held ──► ended
//	   └────────────┴───────────┴──────────────────▲
const (
	HoldPending  HoldState = "pending"  // I/O of users may still be under way
	HoldPrepared HoldState = "prepared" // what file systems had in memory is written; I/O continues
	HoldHeld     HoldState = "held"     // no I/O of users is under way, and none begins
	HoldEnded    HoldState = "ended"    // its limit has passed, or the agent has restarted: I/O continues
)

// HoldSeen is a requested hold and its state.
type HoldSeen struct {
	ID     string
	State  HoldState
	Frozen bool   // I/O is held, and the file systems are frozen
	Error  string // why the file systems cannot be frozen; it has ended then
}

// FreezeSeen is the freeze of the device's file systems for a hold.
type FreezeSeen struct {
	State FreezeState
	Error string
}

// FreezeState is how far a freeze has come.
type FreezeState string

// The states of a freeze; empty: it has not begun. One that has begun to freeze ends by itself, at the
// limit of its hold.
const (
	FreezeSyncing FreezeState = "syncing" // what the file systems have in memory is being written
	FreezeSynced  FreezeState = "synced"  // it is written
	FreezeBegins  FreezeState = "begins"  // users of the file systems begin to wait
	FreezeFrozen  FreezeState = "frozen"  // no file system has a write under way, and none begins
	FreezeEnds    FreezeState = "ends"    // it has ended, and the file systems are about to be thawed
	FreezeEnded   FreezeState = "ended"   // nothing is frozen
)

// active reports whether a file system is frozen, or may be.
func (f FreezeSeen) active() bool {
	return f.State == FreezeBegins || f.State == FreezeFrozen || f.State == FreezeEnds
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
	m.Holds[o.Hold] = Began{At: now, Limit: o.Limit, Freeze: o.Freeze}
	return true
}

// KeepHolds forgets holds that are no longer requested. A hold that has ended but is still
// requested is remembered, so that I/O is not held for it again.
func (m *Memory) KeepHolds(w *Wanted) {
	maps.DeleteFunc(m.Holds, func(id string, _ Began) bool {
		return w == nil || !slices.ContainsFunc(w.Holds, func(h Hold) bool { return h.ID == id })
	})
}

// repairTold is after how long it is told that I/O waits for a repair, which takes some milliseconds.
const repairTold = time.Second

// holdIO holds I/O as long as there is a reason to, and resumes it when there is none. Whoever
// suspended the I/O, it is resumed only after every remaining leg has answered, because the
// lease may have expired meanwhile.
func (p *planner) holdIO() {
	held := p.holdForRequests()
	held = p.holdToLeaveOut() || held
	switch {
	case !p.s.Holdable || p.s.Holding:
		return
	case p.s.Held && !p.s.Repairing.IsZero():
		if p.s.Now.Sub(p.s.Repairing) > repairTold {
			p.v.Wait("the end of a repair of copies that differ")
		}
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
		seen := HoldSeen{ID: h.ID, State: HoldPending}
		if h.Freeze && !p.freeze(h, known, &seen) {
			p.v.Holds = append(p.v.Holds, seen)
			continue
		}
		switch {
		case known && p.s.Now.Sub(began.At) >= h.Limit:
			p.v.Note("hold %s has ended after %v, and I/O continues", h.ID, h.Limit)
			p.v.Holds = append(p.v.Holds, HoldSeen{ID: h.ID, State: HoldEnded})
			continue
		case !p.s.Holdable || p.s.Holding:
		case !known || !p.s.Held:
			p.do(HoldIO{Hold: h.ID, Limit: h.Limit, Freeze: h.Freeze})
		case p.s.Quiet && !p.unequal():
			seen.State, seen.Frozen = HoldHeld, h.Freeze
		}
		p.v.Holds = append(p.v.Holds, seen)
		if p.s.Holdable {
			p.v.Wait("the end of hold %s, for at most %v", h.ID, h.Limit)
			held = true
		}
	}
	return held
}

// unequal reports whether a leg in sync may lack a write that another one has: it has failed one, which
// waits until its loss is recorded. A snapshot of both would have two contents.
func (p *planner) unequal() bool {
	return !p.w.ReadOnly && slices.ContainsFunc(p.members, func(m member) bool {
		return m.Source && m.Link != nil && (m.Lost.any() || p.copy(m.Place).Error != "")
	})
}

// freeze takes the next step towards file systems that are frozen, for a hold, and reports whether they
// are; known says whether I/O has been held for it. The file systems are frozen before I/O is held, because
// to freeze them makes them write. I/O that was held while they were frozen finds them so on the device,
// and therefore a hold that has begun is over as soon as they are not.
func (p *planner) freeze(h Hold, known bool, seen *HoldSeen) (frozen bool) {
	f := p.s.Freezes[h.ID]
	switch {
	case f.State == FreezeFrozen && !h.Prepare:
		return true
	case known:
		p.v.Note("hold %s has ended after %v at most, and I/O continues", h.ID, h.Limit)
		seen.State = HoldEnded
	case f.State == FreezeEnds || f.State == FreezeEnded:
		if seen.State, seen.Error = HoldEnded, f.Error; f.Error != "" {
			p.v.Note("hold %s: %s", h.ID, f.Error)
		}
	case f.State == "":
		if !p.guards && p.s.Holdable && p.s.Device.Named {
			p.do(SyncFileSystems{h.ID})
		}
	case f.State == FreezeSynced && h.Prepare:
		seen.State = HoldPrepared
	case f.State == FreezeSynced && !slices.ContainsFunc(slices.Collect(maps.Values(p.s.Freezes)), FreezeSeen.active):
		p.do(FreezeFileSystems{h.ID, h.Limit}) // a file system can be frozen once
	}
	return false
}

// wantedHolds lists the requested holds, or those in force while the wanted state is unknown.
func (p *planner) wantedHolds() []Hold {
	if !p.guards {
		return p.w.Holds
	}
	var all []Hold
	for _, id := range slices.Sorted(maps.Keys(p.m.Holds)) {
		all = append(all, Hold{ID: id, Limit: p.m.Holds[id].Limit, Freeze: p.m.Holds[id].Freeze})
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

// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"slices"
	"time"

	"weft.dev/weft/proto/block"
)

// A volume leaves out a healthy leg when the manager asks for that, before its target stops for
// example. The copies that stay may have acknowledged writes in their drives' caches only, or may
// have lost power a moment ago. So they get everything onto their media first, and the leg counts
// as in sync until then:
//
//	hold I/O ──► flush a copy that stays ──► record the leg stale ──► drop it ──► resume I/O
//
// No write is acknowledged between the flush and the record.

// Times of an attempt to leave out legs.
const (
	leaveOutWithin = time.Second      // until the flush, for which I/O is held, has succeeded
	leaveOutAgain  = 10 * time.Second // from one that failed to the next
)

// LeavingOut is how far a volume has come in leaving out legs.
type LeavingOut struct {
	Began   time.Time // when I/O was held for it; zero: it is not
	Flushed bool      // since then, copies that stay were flushed
	Failed  time.Time // the last attempt that did
}

// Did notes that an order was carried out.
func (m *Memory) Did(o Order, now time.Time) {
	switch o := o.(type) {
	case FlushLegs:
		m.LeavingOut.Flushed = m.LeavingOut.Flushed || !m.LeavingOut.Began.IsZero() && len(o.Without) == 0
	case Drop:
		for _, l := range o.Legs {
			delete(m.Secured, l.Leg)
		}
	case Readmit:
		m.Records.NoteRefused(o.Leg)
		delete(m.Secured, o.Leg)
	case ResumeIO:
		failed := !m.LeavingOut.Began.IsZero() && !m.LeavingOut.Flushed
		m.LeavingOut.Began, m.LeavingOut.Flushed = time.Time{}, false
		if failed {
			m.LeavingOut.Failed = now
		}
	}
}

// holdToLeaveOut holds I/O so that legs can be left out, and reports whether it is to be held.
// Legs that are lost go first. Once the manager may have recorded the legs, I/O continues only
// without them.
func (p *planner) holdToLeaveOut() bool {
	at := &p.m.LeavingOut
	lost := slices.ContainsFunc(p.members, func(m member) bool { return m.Lost.any() })
	switch {
	case p.guards || lost || !p.s.Holdable || !slices.ContainsFunc(p.members, p.asked):
		return false
	case at.Flushed:
	case !p.s.Linked:
		p.v.Note("leave out legs: the volume manager, which has to record them, does not answer")
		return false
	case at.Began.IsZero() && !at.Failed.IsZero() && p.s.Now.Sub(at.Failed) < leaveOutAgain:
		return false
	case at.Began.IsZero() || !p.s.Held && !p.s.Holding:
		p.do(HoldIO{LeaveOut: true})
	case p.s.Now.Sub(at.Began) >= leaveOutWithin:
		p.v.Note("leave out legs: the copies that stay were not flushed within %v; next attempt in %v", leaveOutWithin, leaveOutAgain)
		return false
	}
	p.leavesOut = true
	return true
}

// leaveOut marks the members that are to be left out as lost, while I/O is held. It returns the
// copies to flush before they are recorded stale.
func (p *planner) leaveOut() (flush []At) {
	if !p.leavesOut || p.m.LeavingOut.Began.IsZero() || !p.s.Held {
		return nil
	}
	for i := range p.members {
		m := &p.members[i]
		if !p.asked(*m) {
			continue
		}
		for _, at := range p.stay(m.Column) {
			if !slices.Contains(flush, at) {
				flush = append(flush, at)
			}
		}
		m.Lost = lost(LeftOut, "%s", m.Link.LeaveOut)
	}
	return flush
}

// asked reports whether a member is to be left out and can be: its column can be read from the
// copies that stay and answer.
func (p *planner) asked(m member) bool {
	var stay block.MemberSet
	for _, at := range p.stay(m.Column) {
		stay = stay.With(at.Copy)
	}
	return p.asks(m) && p.group().Readable(stay)
}

func (p *planner) asks(m member) bool {
	detaches := p.w.Detach && !p.s.Device.Open // else it waits for its users, maybe for long
	return m.Link != nil && m.Link.LeaveOut != "" && m.Source && !p.w.ReadOnly && !detaches
}

// stay lists the copies of a column that stay and answer.
func (p *planner) stay(column int) (all []At) {
	for _, m := range p.members {
		c := p.copy(m.Place)
		if m.Column == column && m.Source && m.Link != nil && !c.Superseded && !c.Reborn && !m.Lost.any() && !p.asks(m) && p.answering(m.Leg) {
			all = append(all, p.at(m))
		}
	}
	return all
}

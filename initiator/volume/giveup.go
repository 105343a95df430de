// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"maps"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
)

// A copy that stays when another one is given up may have lost its power a moment ago, and with it
// acknowledged writes that only its drive's cache held. The lost copy still has them. So before the
// lost copy is recorded stale, the others get everything onto their media:
//
//	withhold ──► flush the copies that stay ──► record the lost one stale ──► drop it
//	    │                                          │ certainly refused, and it answers again
//	    └──────────────────────────────────────────┴──► readmit
//
// After a loss of its cache a copy has another identity, under which the host does not use it yet, so
// the flush succeeds only where nothing was lost. Nothing may be acknowledged between the flush and the
// record that the others have in their caches only. A lost copy that is silent acknowledges nothing;
// one that answers again is withheld, where the data path can do that, until the manager has answered.

// securedFor is how long a flush counts where acknowledgements cannot be withheld.
const securedFor = time.Second

// Secured are the copies that were flushed before a leg is given up.
type Secured struct {
	Copies block.MemberSet // of its column
	At     time.Time
}

// Flushed notes that a FlushLegs has been carried out, perhaps long after it was ordered.
func (m *Memory) Flushed(o FlushLegs, now time.Time) {
	for _, without := range o.Without {
		s := Secured{At: now}
		for _, l := range o.Legs {
			if l.Column == without.Column {
				s.Copies = s.Copies.With(l.Copy)
			}
		}
		m.Secured[without.Leg] = s
	}
}

// WithholdFor forgets earlier flushes for legs that are withheld from now on.
func (m *Memory) WithholdFor(o FlushLegs) {
	maps.DeleteFunc(m.Secured, func(leg block.LegID, _ Secured) bool {
		return slices.ContainsFunc(o.Without, func(at At) bool { return at.Leg == leg })
	})
}

// flushFirst flushes the copies that stay before others are recorded stale: left for legs that are
// left out, else those for legs that are lost.
func (p *planner) flushFirst(left []At) {
	flush := FlushLegs{Legs: left}
	if len(left) == 0 {
		flush = p.flushOthers()
	}
	if len(flush.Legs) > 0 {
		p.do(flush)
	}
}

// flushOthers is the flush that comes before the record of lost legs in sync.
func (p *planner) flushOthers() (flush FlushLegs) {
	for i := range p.members {
		m := &p.members[i]
		if !m.Gone || m.Link == nil || !m.Source || p.w.ReadOnly || p.secured(m) {
			continue
		}
		flush.Without = append(flush.Without, p.at(*m))
		for _, at := range p.others(m.Column) {
			if !slices.Contains(flush.Legs, at) {
				flush.Legs = append(flush.Legs, at)
			}
		}
	}
	return flush
}

// others are the copies of a column that stay and answer.
func (p *planner) others(column int) (all []At) {
	for i := range p.members {
		if m := &p.members[i]; m.Column == column && !m.Gone && m.good() && m.Answers {
			all = append(all, p.at(*m))
		}
	}
	return all
}

// secured reports whether the copies that stay have been flushed for a leg that leaves, and have
// everything that was acknowledged on their media since.
func (p *planner) secured(m *member) bool {
	s, flushed := p.m.Secured[m.Leg]
	if !flushed || !p.copy(m.Place).Withheld && (p.c.Withholds || p.s.Now.Sub(s.At) > securedFor) {
		return false
	}
	var stay block.MemberSet
	for _, at := range p.others(m.Column) {
		stay = stay.With(at.Copy)
	}
	return p.group().Readable(stay & s.Copies)
}

// undecided reports whether the manager may have recorded a leg as stale, or will. Until it says so,
// the leg is withheld. (Where no other leg is in sync, the manager cannot have recorded it.)
func (p *planner) undecided(m *member, c CopySeen) bool {
	return m.Link != nil && c.Withheld && p.m.Records.MayBeStale(m.Link) &&
		slices.ContainsFunc(p.w.Links, func(l Link) bool {
			return l.Column == m.Column && l.Leg != m.Leg && p.inSync(&l)
		})
}

// readmit lets writes be acknowledged again in which legs take part that were about to leave.
func (p *planner) readmit() {
	for i := range p.members {
		m := &p.members[i]
		if c := p.copy(m.Place); c.Withheld && m.Link != nil && !m.Gone && !m.Lost.any() && !p.undecided(m, c) {
			p.do(Readmit{p.at(*m)})
		}
	}
}

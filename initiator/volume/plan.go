// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"slices"

	"weft.dev/weft/proto/block"
)

// planner is one run of Plan.
type planner struct {
	w       *Wanted
	m       *Memory
	s       *Seen
	l       Limits
	c       Capabilities
	guards  bool     // the wanted state is not known
	members []member // nil: not looked for yet
	orders  []Order
	// leavesOut: I/O is held, or about to be, so that legs can be left out.
	leavesOut bool
	ends      *Over // why the epoch is given up now
	v         Verdict
}

func (p *planner) do(o Order) { p.orders = append(p.orders, o) }

// Plan lists the steps from what is seen to what is wanted; w is nil if the volume is not
// wanted here. If an order fails, the rest of the list is skipped, because it may be right
// only after that order; only orders that stand [Alone] are exempt.
func Plan(w *Wanted, m *Memory, s *Seen, l Limits, c Capabilities) ([]Order, Verdict) {
	p := &planner{w: w, m: m, s: s, l: l, c: c}
	if s.Built() && m.Over == nil {
		p.end()
	}
	switch {
	case w == nil || s.Built() && !m.Of(w) || p.over() != nil:
		p.tearDown()
	case w.Detach:
		p.detach()
	default:
		p.serve()
		p.v.Phase = p.phase()
	}
	return p.orders, p.v
}

// Guard replaces Plan while the wanted state is not known: I/O continues as it is, within the
// lease.
func Guard(w *Wanted, m *Memory, s *Seen, l Limits, c Capabilities) ([]Order, Verdict) {
	p := &planner{w: w, m: m, s: s, l: l, c: c, guards: true}
	p.v.Phase = Connecting
	switch {
	case s.Held && !(w != nil && w.Heal):
		p.v.Phase = Stalled
	case s.Device.Exists && s.Device.Named:
		p.v.Phase = Serving
	}
	if w != nil {
		p.findMembers()
		p.v.Notes = nil // no order follows from these
		p.holdIO()
		p.failOver(nil)
	}
	return p.orders, p.v
}

func (p *planner) copy(at Place) CopySeen { return p.s.Columns[at.Column].Copies[at.Copy] }

func (p *planner) link(at Place) *Link { return p.w.At(at.Column, at.Copy) }

// inSync reports whether l counts as in sync by the manager's records.
func (p *planner) inSync(l *Link) bool { return p.m.Records.InSync(l) }

// ---- serving ----

func (p *planner) serve() {
	p.connect()
	p.findMembers()
	p.holdIO()
	p.promote()
	p.dropLost()
	p.pace()
	p.device(p.columns())
	p.grow()
	p.noteMore()
	p.cleanUp()
	p.endSurplus()
	p.goBack()
	p.trySilent()
	p.tryRefused()
	p.noteSuspects()
	p.notePreference()
	p.scrub()
	p.v.Done, p.v.Total = p.s.Done, p.s.Total
	p.tellCopies()
}

// columns builds or changes each column, and reports whether all its in-sync copies are in
// place and equal.
func (p *planner) columns() (ready bool) {
	ready = true
	var build []At
	for k := range p.s.Columns {
		want, ok := p.column(k)
		switch {
		case !ok:
			ready = false
		case p.c.Tables:
			ready = p.setColumn(k, want) && ready
		case !p.s.Columns[k].Built:
			build = append(build, p.legsInSync(k, want)...)
		default:
			ready = p.changeCopies(k, want) && ready
		}
	}
	if ready && len(build) > 0 {
		p.do(Build{Legs: build})
		return false
	}
	return ready
}

// noteOf lists the legs that hold every write by the manager's records.
func (p *planner) noteOf() Note {
	n := Note{Epoch: p.w.Epoch, Legs: map[block.LegID]uint64{}}
	for i := range p.w.Links {
		if l := &p.w.Links[i]; !p.s.Columns[l.Column].Built && p.inSync(l) {
			n.Legs[l.Leg] = l.Revision
		}
	}
	for _, m := range p.members {
		if m.Source && !m.Gone && m.Link != nil {
			n.Legs[m.Leg] = m.Link.Revision
		}
	}
	n.Whole = len(n.Legs) == p.w.Layout.Legs()
	return n
}

// notes reports whether the volume needs notes: with a single copy, or no writer, its legs
// cannot differ.
func (p *planner) notes() bool { return p.w.Layout.Copies > 1 && !p.w.ReadOnly && !p.w.Heal }

// note writes down that legs are no longer in sync, before I/O continues without them: after a
// crash, a note must not name too many legs.
func (p *planner) note() {
	n := p.noteOf()
	if !p.notes() || p.s.Noted.Within(n) {
		return
	}
	p.do(WriteNote{Note: n})
	if p.s.NoteError != "" {
		p.v.Wait("this host's disk: %s", p.s.NoteError)
	}
}

// noteMore writes down that legs are in sync. Nothing waits for that.
func (p *planner) noteMore() {
	n := p.noteOf()
	if p.notes() && p.s.Noted.Within(n) && !p.s.Noted.Equal(n) {
		p.do(WriteNote{Note: n})
	}
}

func (p *planner) phase() Phase {
	switch d := p.s.Device; {
	case d.Exists && len(p.v.Waiting) > 0 && !p.w.Heal: // nobody's I/O waits
		return Stalled
	case d.Exists && d.Named:
		return Serving
	case slices.ContainsFunc(p.s.Columns, func(c ColumnSeen) bool { return c.Equalizing }):
		return Equalizing
	}
	return Connecting
}

// device makes and names the volume's device once all columns exist and are equal.
func (p *planner) device(ready bool) {
	switch d := p.s.Device; {
	case p.w.Detach: // detach removes it
	case d.Exists && d.Ended:
		p.do(CloseDevice{})
	case d.Exists && !d.Named:
		p.do(NameDevice{})
	case d.Exists || !ready:
	case p.c.Tables && !p.longEnough():
		p.v.Wait("all legs to have room for %v", p.w.Size)
	default:
		p.do(MakeDevice{})
	}
}

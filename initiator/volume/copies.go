// SPDX-License-Identifier: Apache-2.0

package volume

// This file is for data paths that add and drop copies one by one (no Capabilities.Tables), and
// for what is said of rebuilds.

func (p *planner) at(m member) At { return At{Place: m.Place, Leg: m.Leg, Revision: m.Link.Revision} }

// promote starts reading from legs that are recorded in sync. It comes before others leave,
// because a promoted leg may then be the last copy of its column.
func (p *planner) promote() {
	for _, m := range p.members {
		if !p.c.Tables && p.copy(m.Place).State == CaughtUp && m.Source && !m.Lost.any() {
			p.do(Promote{At: p.at(m)})
		}
	}
}

// legsInSync lists the legs that a column is built from.
func (p *planner) legsInSync(k int, want Column) (all []At) {
	for copy, w := range want.Copies {
		if w.State == InSync {
			all = append(all, At{Place: Place{k, copy}, Leg: w.Leg, Revision: p.w.At(k, copy).Revision})
		}
	}
	return all
}

// changeCopies adds returning legs to a column and asks for caught-up legs to be recorded. It
// reports whether the copies are equal; if they are not, it starts equalizing them.
func (p *planner) changeCopies(k int, want Column) (equal bool) {
	c := p.s.Columns[k]
	for copy, w := range want.Copies {
		at := Place{k, copy}
		switch i := p.memberAt(at); {
		case i >= 0 && p.reborn(at):
			p.renew(p.members[i])
		case i >= 0:
			p.recovered(p.members[i])
		case w.State != Absent:
			l := p.link(at)
			whole := c.Copies[copy].whole(l)
			p.do(Add{At: At{Place: at, Leg: l.Leg, Revision: l.Revision}, Full: whole != "", What: l.Copied(whole)})
		}
	}
	if k == 0 && c.Equalizing && p.s.Whole != "" {
		p.v.Wait("all of the copies to be compared, because %s", p.s.Whole)
	}
	if k == 0 && c.Equalizing && !p.s.Copying && !p.s.Device.Exists && !p.w.Detach {
		p.do(Equalize{})
	}
	return !c.Equalizing
}

// pace has rebuilds keep the wanted rate.
func (p *planner) pace() {
	if p.c.Paces && p.s.Built() && p.s.RebuildRate != p.w.RebuildRate {
		p.do(SetRebuildRate{p.w.RebuildRate})
	}
}

// tellCopies says how far rebuilds have come.
func (p *planner) tellCopies() {
	for k, column := range p.s.Columns {
		for copy, c := range column.Copies {
			l, leg := p.link(Place{k, copy}), c.Leg
			switch {
			case l != nil && c.Awaits != "":
				p.v.Copies = append(p.v.Copies, CopyTold{Leg: l.Leg, Waiting: c.Awaits})
				continue
			case l != nil && c.Ahead:
				leg = l.Leg
			case c.State != Rebuilding || c.Total == 0:
				continue
			}
			told := CopyTold{Leg: leg, Done: c.Done, Total: c.Total, Speed: c.Speed, What: c.What}
			if c.Short {
				told.Waiting = "space on its drive; users do not wait, and what they write meanwhile is copied, too"
			}
			p.v.Copies = append(p.v.Copies, told)
		}
	}
}

// renew continues with a live leg whose lost cache held nothing that counts.
func (p *planner) renew(m member) {
	if m.Link != nil && p.s.Legs[m.Leg].Live {
		p.do(Renew{At: p.at(m)})
	}
}

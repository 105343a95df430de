// SPDX-License-Identifier: Apache-2.0

package volume

import "slices"

// A volume grows while it is in use, from the bottom up: the targets extend the legs first,
// then the volume grows, then its device. A lower layer that is longer than its user knows
// does no harm, so growing may stop after any step. While a layer is too short, I/O continues
// at the old size. Nothing waits for the new size, so the verdict has a note and the volume
// does not stall.

// grow makes the device as large as the volume. Without Tables, the volume itself grows to the
// wanted size first.
func (p *planner) grow() {
	if p.w.Detach {
		return
	}
	d := p.s.Device
	switch {
	case p.c.Tables:
		if d.Exists && d.Size < p.w.Size && p.longEnough() && p.changeable() {
			p.do(GrowDevice{})
		}
	case p.s.Size == 0:
	case p.w.Size < p.s.Size:
		p.v.Note("volume has %v, but %v is wanted: volumes cannot shrink", p.s.Size, p.w.Size)
	case d.Exists && !d.Ended && d.Size < p.s.Size:
		p.do(GrowDevice{})
	case p.w.Size > p.s.Size && p.roomEverywhere():
		p.do(Grow{})
	}
}

// changeable reports whether the table of the device can be changed now: that would resume a
// suspended device, and wait for a silent leg.
func (p *planner) changeable() bool {
	silent := slices.ContainsFunc(p.members, func(m member) bool { return p.silence(m.Leg) > 0 })
	return !p.s.Held && !p.s.Holding && !silent && p.leaseLeft() > 0
}

func (p *planner) roomEverywhere() bool {
	ok := true
	for k := range p.s.Columns {
		ok = p.haveRoom(k) && ok
	}
	return ok
}

// haveRoom reports whether every leg in use of a column has room for the wanted size, and
// notes those that are too short.
func (p *planner) haveRoom(k int) bool {
	ok := true
	for _, m := range p.members {
		if m.Column != k || !p.copy(m.Place).inUse() || m.Gone && p.c.Tables {
			continue
		}
		if short := p.noRoom(m); short != "" {
			ok = false
			p.v.Note("grow to %v: column %d on %s: leg %s: %s", p.w.Size, m.Column, nodeOf(m), m.Leg, short)
		}
	}
	return ok
}

// noRoom says why a member cannot take part in a larger volume; empty if it can.
func (p *planner) noRoom(m member) string {
	switch {
	case m.Link == nil || p.c.Tables && m.Lost.any():
		return "it must leave the volume first"
	case p.c.Tables && (p.silence(m.Leg) > 0 || p.copy(m.Place).Moved != "" && !p.anew(m)): // the change would wait for it
		return "it does not answer"
	}
	if short := p.short(m.Link); short != "" {
		return short
	}
	if p.c.Tables && p.joins(m) {
		return "it must be in sync first"
	}
	return ""
}

// joins reports whether the manager may record a leg as in sync, or may already have done so,
// while this host still rebuilds it. The column must then keep the leg's write errors, and
// each change of its tables clears them: so the leg becomes a source first, and the column
// grows after that. A leg that is still being copied and has no known error is excluded,
// because nobody has asked for its record yet.
func (p *planner) joins(m member) bool {
	c := p.copy(m.Place)
	return (c.State == CaughtUp || c.State == Rebuilding) && !p.inSync(m.Link) && !(c.State == Rebuilding && c.Error == "")
}

// fitToJoin reports whether a leg is live and has room for the wanted size.
func (p *planner) fitToJoin(l *Link) bool {
	leg := p.s.Legs[l.Leg]
	if short := p.short(l); leg.Size > 0 && short != "" {
		p.v.Note("rebuild leg %s of column %d on %s: %s", l.Leg, l.Column, l.Node, short)
		return false
	}
	return leg.Live
}

// short says why a leg has no room for the wanted size; empty if it has.
func (p *planner) short(l *Link) string {
	if size, need := p.s.Legs[l.Leg].Size, p.w.Layout.LegSize(p.w.Size); size < need {
		return TooSmall(size, need)
	}
	return ""
}

// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"slices"

	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid"
	"weft.dev/weft/raid/dm"
)

// This file has a volume grow that is in use, from the legs up: the targets have
// made the legs longer, then each column's tables are, and at last the device's. What
// is longer than its user knows does no harm, so that it can be cut anywhere. While
// something is not long enough I/O goes on at the old size; that is a note, and no
// stall.

// columnSize is how long column k is to be: what is wanted, if it is not built or can
// grow now, else what it is.
func (p *planner) columnSize(k int) block.Size {
	c, want := p.s.columns[k], p.w.Layout.LegSize(p.w.Size)
	switch {
	case c.Kind == raid.ShapeNothing || c.Size == want:
		return want
	case c.Size > want:
		p.v.Note("column %d has %v and is wanted with %v: columns cannot shrink", k, c.Size, want)
	case p.w.Detach:
	default:
		why := p.cannotGrow(k, want)
		if why == "" {
			return want
		}
		p.v.Note("grow to %v: column %d: %s", p.w.Size, k, why)
	}
	return c.Size
}

// cannotGrow says why column k cannot have a size now; empty if it can.
func (p *planner) cannotGrow(k int, size block.Size) string {
	c := p.s.columns[k]
	if err := c.MayGrow(size); err != nil {
		return err.Error() + "; it can at the next attach"
	}
	for _, m := range p.members {
		if m.Column != k || m.Gone {
			continue
		}
		l := p.s.legs[m.Leg]
		switch {
		case m.Link == nil || m.Lost != "":
			return "leg " + m.Leg.String() + " is to leave first"
		case p.silence(m.Leg) > 0 || l.device != p.current(m): // the kernel would wait for it, or for ever
			return "leg " + m.Leg.String() + " does not answer"
		case l.size < size:
			return "leg " + m.Leg.String() + " on " + p.nodeOf(m) + ": " + attachment.TooSmall(l.size, size)
		}
		if p.joins(m, c) {
			return "leg " + m.Leg.String() + " is to be in sync first"
		}
	}
	return ""
}

// joins reports whether the manager may have, or soon has, a leg recorded in sync
// that its mirror still rebuilds. Then the mirror must not forget that a write to the
// leg failed (package raid), as it does with each new table: it first becomes one of
// sources, and then grows. While a mirror copies, and no error is known, no record
// was asked for.
func (p *planner) joins(m member, c columnSeen) bool {
	return c.Kind == raid.ShapeRebuilding && m.device == c.Back && !p.inSync(m.Link) &&
		!(c.inSync < c.total && c.health[m.device] == dm.Alive)
}

// growTop has the volume's device grow when all columns have. It is not begun while
// the device is stopped, for the change would let it go on, nor while a leg is
// silent, for it would wait for that.
func (p *planner) growTop() {
	top := p.s.top
	silent := slices.ContainsFunc(p.members, func(m member) bool { return p.silence(m.Leg) > 0 })
	if top.exists && top.size < p.w.Size && !top.suspended && !top.suspending && !silent && !p.leaseOver() && !p.w.Detach && p.longEnough() {
		p.do(order{op: opGrow})
	}
}

// longEnough reports whether all columns have room for the volume as it is wanted.
func (p *planner) longEnough() bool {
	need := p.w.Layout.LegSize(p.w.Size)
	return !slices.ContainsFunc(p.s.columns, func(c columnSeen) bool { return c.Size < need })
}

// fitToJoin reports whether a leg is live and has room for the volume as it is wanted.
func (p *planner) fitToJoin(l *attachment.Link) bool {
	if !p.s.legs[l.Leg].live {
		return false
	}
	short := p.short(l)
	if short != "" {
		p.v.Note("rebuild leg %s of column %d on %s: %s", l.Leg, l.Column, l.Node, short)
	}
	return short == ""
}

// short says why a leg has no room for the volume as it is wanted; empty if it has.
func (p *planner) short(l *attachment.Link) string {
	if size, need := p.s.legs[l.Leg].size, p.w.Layout.LegSize(p.w.Size); size < need {
		return attachment.TooSmall(size, need)
	}
	return ""
}

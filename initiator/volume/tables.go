// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"slices"

	"weft.dev/weft/proto/block"
)

// This file is for data paths that change a column as a whole (Capabilities.Tables).

// setColumn builds or changes a column, and reports whether it is as wanted.
func (p *planner) setColumn(k int, want Column) (ready bool) {
	c := p.s.Columns[k]
	switch differs, err := c.Differs(want); {
	case err != nil:
		p.v.Wait("an operator: %v", err)
		return false
	case differs:
		p.do(SetColumn{Column: k, Want: want})
		return false
	case k == 0 && c.Equalizing && p.s.Whole != "":
		p.v.Wait("all of the copies to be made equal, because %s", p.s.Whole)
	case p.hasErrors(k) && p.s.Now.Sub(p.m.Retried[k]) >= p.l.Retry:
		p.do(SetColumn{Column: k, Want: want, Retry: true})
		return false
	}
	for _, m := range p.members {
		if m.Column == k {
			p.recovered(m)
		}
	}
	return !c.Equalizing
}

// hasErrors reports whether a column of an attached volume must be retried, because it keeps
// its last source in spite of errors: without a retry it would fail all I/O from now on. (With
// two sources left, a retry could leave them different in the blocks that failed.) A read-only
// column reads from its other copies after an error, and fails when every copy has had one.
func (p *planner) hasErrors(k int) bool {
	if !p.s.Device.Exists {
		return false
	}
	sources, ill := 0, false
	for _, m := range p.members {
		if m.Column != k {
			continue
		}
		bad := p.copy(m.Place).Error != ""
		if p.w.ReadOnly {
			ill = ill || bad
			continue
		}
		if !m.Source {
			continue
		}
		if m.Gone || m.Lost.any() {
			return false
		}
		sources, ill = sources+1, bad
	}
	return ill && (p.w.ReadOnly || sources == 1)
}

// followOne leaves at most one copy tracked or rebuilding, because a log covers only one. A
// rebuilding copy goes first, then the copy that the log already covers.
func (p *planner) followOne(k int, want *Column) {
	c := p.s.Columns[k]
	best := p.followed(k, want)
	for copy, w := range want.Copies {
		if copy != best && w.followed() {
			want.Copies[copy] = Copy{}
		}
	}
	l := p.w.At(k, best)
	if best < 0 || want.Copies[best].State != Rebuilding || l == nil { // nil: recorded stale, but it cannot leave yet
		return
	}
	to, seen := &want.Copies[best], c.Copies[best]
	to.Whole = seen.whole(l)
	want.Full = to.Whole != ""
	switch {
	case seen.inUse() && !to.Anew: // already in progress
	case want.Full:
		to.Dirty = want.Size
	default:
		to.Dirty = min(want.Size, c.Left)
	}
}

// followed chooses the copy that the log covers; -1 if there is none to cover.
func (p *planner) followed(k int, want *Column) int {
	rank := func(copy int) (n int) {
		if want.Copies[copy].State == Rebuilding {
			n += 2
		}
		if p.s.Columns[k].Copies[copy].Tracked {
			n++
		}
		return n
	}
	best := -1
	for copy, w := range want.Copies {
		if w.followed() && (best < 0 || rank(copy) > rank(best)) {
			best = copy
		}
	}
	return best
}

// followed reports whether the log has to cover a copy.
func (c Copy) followed() bool { return c.State == Rebuilding || c.Track }

// ---- the way out ----

// removeColumns removes the columns below the device. Unless all is well, it first makes
// waiting I/O fail: a table is not released before its I/O has ended.
func (p *planner) removeColumns(well bool) {
	if !well {
		p.cutAll()
	}
	for k, c := range p.s.Columns {
		if !c.Exists {
			continue
		}
		if !well && !c.Failed {
			p.do(FailColumn{Column: k})
		}
		p.do(RemoveColumn{Column: k})
	}
}

// failAll fails all I/O that waits in the columns and above them.
func (p *planner) failAll() {
	p.cutAll()
	for k, c := range p.s.Columns {
		if c.Exists && !c.Failed {
			p.do(FailColumn{Column: k})
		}
	}
	p.do(FailDevice{})
}

// ---- growing ----

// columnSize is how long column k should be: the wanted size if it is not built or can grow
// now, otherwise its present size.
func (p *planner) columnSize(k int) block.Size {
	c, want := p.s.Columns[k], p.w.Layout.LegSize(p.w.Size)
	switch {
	case !p.c.Tables:
		return c.Size
	case !c.Built || c.Size == want:
		return want
	case c.Size > want:
		p.v.Note("column %d has %v, but %v is wanted: columns cannot shrink", k, c.Size, want)
	case p.w.Detach:
	case c.CannotGrow != "":
		p.v.Note("grow to %v: column %d: %s; it can at the next attach", p.w.Size, k, c.CannotGrow)
	case p.haveRoom(k):
		return want
	}
	return c.Size
}

// longEnough reports whether every column has the wanted length.
func (p *planner) longEnough() bool {
	need := p.w.Layout.LegSize(p.w.Size)
	return !slices.ContainsFunc(p.s.Columns, func(c ColumnSeen) bool { return c.Size < need })
}

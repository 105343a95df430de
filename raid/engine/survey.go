// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"

	"weft.dev/weft/proto/block"
)

// A rebuild of a thin volume copies only what has data, on the leg in sync or on the one that is copied
// to. Before a lane copies a region, it asks both, one after the other, where they may hold data
// (block.OpMap), and keeps users from the region meanwhile. What neither of them names reads as zeroes
// on both, and stays equal: all writes since then go to both.
//
// A leg that does not know is copied whole. An error of a leg that is asked is not held against it: if
// there is something wrong, the copy will see it.

// survey is what a lane knows of its region.
type survey struct {
	state     surveyState
	base, end int64  // the region as it was when the legs were asked
	bits      []byte // of an OpMap; nil: everything is copied
	room      [2][]byte
}

type surveyState uint8

const (
	surveyNone  surveyState = iota // nobody was asked about the region
	surveyBegun                    // an extent IO asks the legs
	surveyDone
)

// survey begins to ask about the lane's region, unless that was done.
func (ln *lane) survey() bool {
	s, r := &ln.surveyed, ln.r
	if s.state == surveyDone || !r.c.v.cfg.Thin || r.whole.Load() {
		return false
	}
	n := block.MapSize(ln.end - ln.off)
	for i := range s.room {
		if cap(s.room[i]) < n {
			s.room[i] = make([]byte, n)
		}
		s.room[i] = s.room[i][:n]
	}
	s.state, s.base, s.end, s.bits, ln.length = surveyBegun, ln.off, ln.end, nil, 0
	r.c.v.copies(r.c, kindCopy, ln.off, ln.end, job{lane: ln})
	return true
}

// answer continues after a leg's answer, to a request of this incarnation of the leg that is copied to.
func (s *survey) answer(ln *lane, p *extentIO, on *legIO, state part, err error, e *effects) {
	c, target := p.c, on.copy == ln.r.copy
	switch current := c.legs[on.copy].inc == on.inc; {
	case state == partPaused || !current || state == partDone && !c.running():
		p.start(e)
	case state != partDone:
		if errors.Is(err, block.ErrUnsupported) {
			ln.r.whole.Store(true)
		}
		p.finish(nil, e)
	case target:
		s.bits = s.room[0]
		for i, b := range s.room[1] {
			s.bits[i] |= b
		}
		p.finish(nil, e)
	case c.v.weak.sourceAlone:
		s.bits = s.room[0]
		p.finish(nil, e)
	default:
		p.issue(ln.r.copy, block.OpMap, s.room[1], e)
	}
}

// over ends the survey, and counts what will not be copied.
func (s *survey) over(ln *lane) {
	s.state = surveyDone
	ln.r.skipped.Add(s.emptyFrom(s.base))
}

// emptyFrom is how many bytes from off on are not copied.
func (s *survey) emptyFrom(off int64) (n int64) {
	for ; s.bits != nil && off < s.end; off = s.next(off) {
		if s.empty(off) {
			n += s.next(off) - off
		}
	}
	return n
}

// empty reports whether both legs read as zeroes where off is.
func (s *survey) empty(off int64) bool {
	return s.bits != nil && off < s.end && !block.MayHold(s.bits, (off-s.base)/int64(block.MapUnit))
}

// next is where the unit of off ends.
func (s *survey) next(off int64) int64 {
	unit := int64(block.MapUnit)
	return min(s.base+((off-s.base)/unit+1)*unit, s.end)
}

// skip moves on to the next bytes of the region that have to be copied. If there are none, it ends the
// region and returns true.
func (ln *lane) skip() bool {
	s := &ln.surveyed
	for ln.off < ln.end && s.empty(ln.off) {
		ln.off = s.next(ln.off)
	}
	if ln.off < ln.end {
		return false
	}
	ln.copied()
	return true
}

// stretch is how many bytes are to be copied from the lane's offset on, up to most.
func (ln *lane) stretch(most int64) int64 {
	s, end := &ln.surveyed, min(ln.end, ln.off+most)
	if s.bits == nil {
		return end - ln.off
	}
	at := ln.off
	for at < end && !s.empty(at) {
		if at >= s.end {
			return end - ln.off
		}
		at = s.next(at)
	}
	return min(at, end) - ln.off
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"errors"
	"fmt"
	"slices"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid"
)

// Repair says how a scrub repairs what it finds. A range is repaired only if it is known which
// copy is right: see raid.Right.
//
// A repair has its range to itself: it waits for reads, writes and copies there, and they wait for
// it. It reads all copies in sync again, so what users have written since is not lost, and decides
// anew. It writes to the copies that differ, through their caches; legs that are not in sync get
// the data too, or count as missing it. Then it reads all copies in sync once more.
type Repair struct {
	// Named is the copy of each column that the owner names; -1, or no entry: none.
	Named []int
	// Ask: after what was found in a range was told, nothing of it is repaired before Proceed.
	Ask bool
	// Ended is called with what became of a finding, in the order in which they were told, and for
	// each of them. It must not block.
	Ended func(Finding, Outcome, error)
}

// Outcome is what became of a finding that a scrub was to repair.
type Outcome uint8

const (
	// NotKnown: no copy is known to be right; nothing was written.
	NotKnown Outcome = iota + 1
	// Repaired: the copies differed again, were written, and then were equal.
	Repaired
	// Gone: the copies were equal when they were read again; nothing was written.
	Gone
	// NotRepaired: a copy could not be read or written, or differs still. What was written is
	// right.
	NotRepaired
)

func (o Outcome) String() string {
	return [...]string{"", "not known", "repaired", "gone", "not repaired"}[o]
}

// errAlone ends a repair of a column of which the other copies have been dropped.
var errAlone = errors.New("it has no second copy in sync any more")

// repair is the repair of what a scrub has found in a range. It is used only by the goroutine that
// does the scrub's next step and, with the shard locked, by the extent IO under way.
type repair struct {
	todo []Finding // the first of them is next

	began   bool // something was written
	writing bool // legs are being written to
	wrote   bool // they were, and are read again
	buf     []byte
	outcome Outcome
	err     error
}

// next returns the finding to repair next; nil: there is none.
func (r *repair) next() *Finding {
	if len(r.todo) == 0 {
		return nil
	}
	return &r.todo[0]
}

// right is raid.Right for a column of the scrub.
func (s *Scrub) right(column int, groups [][]int, inSync int) int {
	if s.cfg.Repair == nil {
		return -1
	}
	named := -1
	if column < len(s.cfg.Repair.Named) {
		named = s.cfg.Repair.Named[column]
	}
	return raid.Right(groups, inSync, s.v.cfg.Layout.Copies, named)
}

// repair starts to repair what was found in a range.
func (s *Scrub) repair(found []Finding) {
	s.fix.todo = found
	s.fix.buf = slices.Grow(s.fix.buf[:0], int(s.v.copyUnit))[:s.v.copyUnit]
	s.skipUnknown()
	if s.fix.next() == nil || !s.cfg.Repair.Ask {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asks = true
}

// Asks reports whether the scrub waits for Proceed.
func (s *Scrub) Asks() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asks
}

// Proceed lets the scrub repair what it has told.
func (s *Scrub) Proceed() {
	s.mu.Lock()
	kick := s.asks && s.running && !s.busy
	s.asks = false
	s.busy = s.busy || kick
	s.mu.Unlock()
	if kick {
		s.kick()
	}
}

// skipUnknown ends the findings that are next and for which no copy is known to be right.
func (s *Scrub) skipUnknown() {
	for f := s.fix.next(); f != nil && (f.Right < 0 || s.v.cfg.ReadOnly); f = s.fix.next() {
		s.endRepair(NotKnown, nil)
	}
	if s.fix.next() == nil {
		s.settle()
	}
}

func (s *Scrub) endRepair(o Outcome, err error) {
	f := s.fix.todo[0]
	s.fix.todo = s.fix.todo[1:]
	if s.cfg.Repair.Ended != nil {
		s.cfg.Repair.Ended(f, o, err)
	}
}

// repaired ends the repair of one finding.
func (s *Scrub) repaired() {
	o, err := s.fix.outcome, s.fix.err
	s.fix.began, s.fix.writing, s.fix.wrote, s.fix.outcome, s.fix.err = false, false, false, 0, nil
	s.endRepair(o, err)
	s.skipUnknown()
}

// mend decides again which data is right, now that nothing else is under way in the range, and
// writes it.
func (s *Scrub) mend(p *extentIO, copies, unreadable []int, e *effects) {
	r := &s.fix
	from, end := s.differing(copies, p.length())
	equal := from == end && len(unreadable) == 0
	switch {
	case equal && r.began && r.err == nil:
		r.outcome = Repaired
	case r.wrote:
		r.outcome = NotRepaired
		if r.err == nil {
			r.err = fmt.Errorf("after it was written, copies differ still or cannot be read: %v, unreadable %v", s.groups(copies, 0, p.length()), unreadable)
		}
	case len(copies)+len(unreadable) < 2:
		r.outcome, r.err = NotRepaired, errAlone
	case equal:
		r.outcome = Gone
	case p.other:
		r.outcome, r.err = NotRepaired, p.err
	case !s.decide(p, copies, unreadable):
		r.outcome = NotKnown
	default:
		s.write(p, copies, e)
		return
	}
	p.finish(nil, e)
}

// decide collects the data that is right, block by block. It reports false if that is not known of
// all blocks.
func (s *Scrub) decide(p *extentIO, copies, unreadable []int) bool {
	for off := int64(0); off < p.length(); off += scrubBlock {
		to := min(off+scrubBlock, p.length())
		right := s.right(p.c.index, s.groups(copies, off, to), len(copies)+len(unreadable))
		if right < 0 {
			return false
		}
		copy(s.fix.buf[off:to], s.bufs[right][off:to])
	}
	return true
}

// write writes the data that is right to all legs that take writes and are not known to have it,
// and notes that the others miss it.
func (s *Scrub) write(p *extentIO, copies []int, e *effects) {
	right := s.fix.buf[:p.length()]
	s.fix.began, s.fix.writing, s.fix.err, p.fua = true, true, nil, true
	for copy := range p.c.legs {
		switch l := &p.c.legs[copy]; {
		case slices.Contains(copies, copy) && bytes.Equal(s.bufs[copy][:p.length()], right):
		case l.member():
			p.issue(copy, block.OpWrite, right, e)
		default:
			p.c.misses(copy, p)
		}
	}
	if !p.out() { // the copies that differed were dropped
		s.verify(p, e)
	}
}

// failed notes that a leg failed a write. It misses the range from then on, if it is dropped. The
// copies in sync can be equal without one that is being rebuilt.
func (r *repair) failed(p *extentIO, on *legIO, err error) {
	p.c.misses(on.copy, p)
	full := errors.Is(err, block.ErrFull) // then it stays
	if l := &p.c.legs[on.copy]; l.state == InSync || l.inc != on.inc || full && l.state == CaughtUp {
		r.err = fmt.Errorf("write copy %d: %w", on.copy, err)
	}
}

// verify reads the copies in sync again after they were written.
func (s *Scrub) verify(p *extentIO, e *effects) {
	s.fix.writing, s.fix.wrote = false, true
	p.fua, p.tried, p.other, p.err = false, 0, false, nil
	p.begin(e)
}

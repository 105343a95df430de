// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"slices"

	"weft.dev/weft/proto/block"
)

// Healing writes again what a copy could not give a read because the data did not match its checksum
// (block.ErrChecksum). It is a repair as a scrub makes it, by the first of its rules: the range is
// taken for itself, all copies in sync are read again, and what those agree on that can be read is
// written to the others. A copy whose drive or connection fails is left to the rules for lost legs.

// healMost bounds how many ranges wait to be healed. A range that is forgotten is found again by the
// next read of it.
const healMost = 1024

// sick is a range of a copy that could not be read.
type sick struct {
	c        *column
	copy     int
	off, end int64
}

// isSick notes that a copy's data did not match its checksums.
func (p *extentIO) isSick(copy int, err error, e *effects) {
	if errors.Is(err, block.ErrChecksum) {
		e.sick = append(e.sick, sick{p.c, copy, p.off, p.end})
	}
}

// healable reports whether the volume heals.
func (v *Volume) healable() bool {
	return v.cfg.OnHealed != nil && !v.cfg.ReadOnly && v.cfg.Layout.Slots() > 1
}

// heals reports whether an error will be healed: then the leg has not failed, and stays.
func (s *legIO) heals(err error) bool {
	k := s.p.kind
	return (k == kindRead || k == kindCopy) && s.op == block.OpRead && errors.Is(err, block.ErrChecksum) && s.p.c.v.healable()
}

// heal queues a range. Nothing is locked.
func (v *Volume) heal(x sick) {
	if !v.healable() {
		return
	}
	s := v.healer()
	right := 0 // perhaps: the repair decides
	if x.copy == 0 {
		right = 1
	}
	from, end := x.off/scrubBlock*scrubBlock, min((x.end+scrubBlock-1)/scrubBlock*scrubBlock, v.plan.legSize(v.size.Load()))
	for from < end {
		n := min(v.copyUnit-from%v.copyUnit, end-from)
		s.enqueue(Finding{Column: x.c.index, Off: block.Size(from), Length: block.Size(n), Unreadable: []int{x.copy}, Right: right})
		from += n
	}
	if s.begin() {
		s.kick()
	}
}

// healer is the scrub that compares nothing and repairs what is queued.
func (v *Volume) healer() *Scrub {
	v.healing.Lock()
	defer v.healing.Unlock()
	if v.heals == nil {
		v.heals = v.NewScrub(ScrubConfig{From: ScrubPosition{Column: len(v.columns)}})
		v.heals.cfg.Repair = &Repair{Ended: v.heals.healed}
		v.heals.fix.buf = make([]byte, v.copyUnit)
	}
	return v.heals
}

// enqueue adds a range, unless it waits already or too many do.
func (s *Scrub) enqueue(f Finding) {
	s.mu.Lock()
	defer s.mu.Unlock()
	same := func(o Finding) bool { return o.Column == f.Column && o.Off == f.Off && o.Length == f.Length }
	if len(s.queue) < healMost && !slices.ContainsFunc(s.queue, same) {
		s.queue = append(s.queue, f)
	}
}

// begin makes the healer run if it is idle and something is queued.
func (s *Scrub) begin() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.running || len(s.queue) == 0 {
		return false
	}
	idle := !s.busy
	s.running, s.busy, s.err, s.ended = true, true, nil, make(chan struct{})
	return idle
}

// takeQueue makes the next queued range the one to repair. s.mu is locked.
func (s *Scrub) takeQueue() {
	if len(s.queue) > 0 && s.fix.next() == nil {
		s.fix.todo, s.queue = append(s.fix.todo, s.queue[0]), s.queue[1:]
	}
}

// healed tells what became of a range. A long one in which no copy could be read whole is tried again
// block by block.
func (s *Scrub) healed(f Finding, o Outcome, err error) {
	v := s.v
	if o == NotKnown && int64(f.Length) > scrubBlock {
		for off := block.Size(0); off < f.Length; off += block.Size(scrubBlock) {
			s.fix.todo = append(s.fix.todo, Finding{Column: f.Column, Off: f.Off + off, Length: block.Size(scrubBlock), Unreadable: f.Unreadable, Right: f.Right})
		}
		return
	}
	if o == Gone { // a write came first, or another repair
		return
	}
	if o == NotKnown {
		err = fmt.Errorf("no copy of it can be read: %w", block.ErrChecksum)
	}
	v.cfg.OnHealed(f, o, err)
}

// whole is the range and the memory of a read that no copy could give as a whole. It goes on block by
// block: each of them can be good on another copy.
type whole struct {
	off, end int64
	data     []byte
}

// narrow makes a read that no copy could give one of its first block. It reports false if it is of one
// block already.
func (p *extentIO) narrow() bool {
	if p.whole.end > 0 || p.length() <= scrubBlock {
		return false
	}
	p.whole = whole{p.off, p.end, p.data}
	p.block(p.off)
	return true
}

// nextBlock makes a read by blocks one of the next block; false: there is none.
func (p *extentIO) nextBlock() bool {
	if p.whole.end == 0 || p.end == p.whole.end {
		return false
	}
	p.block(p.end)
	return true
}

// block makes a read one of the block that begins at off.
func (p *extentIO) block(off int64) {
	p.off, p.end = off, min((off/scrubBlock+1)*scrubBlock, p.whole.end)
	p.data = p.whole.data[p.off-p.whole.off : p.end-p.whole.off]
	p.tried, p.other, p.err = 0, false, nil
}

// widen makes a read by blocks what it was.
func (p *extentIO) widen() {
	if p.whole.end > 0 {
		p.off, p.end, p.data, p.whole = p.whole.off, p.whole.end, p.whole.data, whole{}
	}
}

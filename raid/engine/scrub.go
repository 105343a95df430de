// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"weft.dev/weft/proto/block"
)

// errOthers ends a comparison that says nothing, because another host may have written since.
var errOthers = errors.New("another host may have written")

// ScrubConfig describes a scrub.
type ScrubConfig struct {
	// Rate is the most that is read of each leg in a second; 0: no limit.
	Rate block.Size
	// Found is called with what a comparison found, one at a time. It must not block.
	Found func(Finding)
}

// Finding is a range of a column whose copies in sync are not known to be equal.
type Finding struct {
	Column      int
	Off, Length block.Size // in each leg, in whole blocks of 4 KiB
	// Copies lists the copies that were compared, in groups with equal data, each group in
	// order, and the groups in the order of their first copies.
	Copies [][]int
	// Unreadable lists the copies that could not be read. A copy that has a medium error there
	// counts as missing the region, as after any other read.
	Unreadable []int
}

// Scrub compares the copies in sync of a volume that is in use, a small range at a time, and
// reports where they differ. It changes nothing: the engine cannot tell which copy is right.
//
// A comparison has its range locked as a read has: it waits for the writes that it overlaps, and
// such writes wait for it. So what differs is not under way. What differs is read a second time
// before it is reported. A volume of one copy has nothing to compare.
//
// After each comparison the scrub waits for as long as that took if users' IO was served
// meanwhile, and for longer if Rate requires it.
type Scrub struct {
	trampoline
	v   *Volume
	cfg ScrubConfig

	mu       sync.Mutex
	column   int // of the next range
	off      int64
	busy     bool // a step is under way or waits for a timer
	running  bool // a Run waits for it
	err      error
	ended    chan struct{} // closed when it stops running
	compared block.Size    // of each leg, summed over the columns
	skipped  block.Size    // the part of it of which there was one copy, or none

	// Used only by the goroutine that does the next step.
	bufs    [block.MaxSlots][]byte
	length  int64
	began   int64
	served  uint64
	again   bool // the range differed once
	alone   bool // fewer than two copies were there to compare
	finding *Finding
}

// NewScrub makes a scrub of the whole volume, which begins with Run.
func (v *Volume) NewScrub(cfg ScrubConfig) *Scrub {
	s := &Scrub{v: v, cfg: cfg}
	s.step = s.next
	return s
}

// Run compares until everything was compared, or ctx ends. After the end of ctx it can be called
// again, and continues where it stopped.
func (s *Scrub) Run(ctx context.Context) error {
	ended, err := s.run()
	if err != nil {
		return fmt.Errorf("compare copies: %w", err)
	}
	select {
	case <-ended:
	case <-ctx.Done():
		s.stop(context.Cause(ctx))
		<-ended
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return fmt.Errorf("compare copies: %w", s.err)
	}
	return nil
}

// Progress says how much is done, as bytes of a leg summed over the columns, and for how much of
// that there were no two copies to compare: those are in sync, and could be read.
func (s *Scrub) Progress() (done Progress, alone block.Size) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return Progress{s.compared, block.Size(s.v.plan.legSize(s.v.size.Load())) * block.Size(len(s.v.columns))}, s.skipped
}

// run lets the steps go on.
func (s *Scrub) run() (ended chan struct{}, err error) {
	s.mu.Lock()
	if s.running {
		s.mu.Unlock()
		return nil, errors.New("it is under way")
	}
	s.running, s.err, s.ended = true, nil, make(chan struct{})
	ended = s.ended
	idle := !s.busy
	s.busy = true
	s.mu.Unlock()
	if idle {
		s.kick()
	}
	return ended, nil
}

func (s *Scrub) stop(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end(err)
}

// end makes Run return. s.mu is locked.
func (s *Scrub) end(err error) {
	if s.running {
		s.running, s.err = false, err
		close(s.ended)
	}
}

// next starts the comparison of the next range.
func (s *Scrub) next() {
	v := s.v
	v.active.Add(1) // first: Close waits for it from now on, or is seen
	defer v.release()
	column, off, ok := s.place()
	if !ok {
		return
	}
	for i := range v.cfg.Layout.Slots() {
		if s.bufs[i] == nil {
			s.bufs[i] = make([]byte, v.copyUnit)
		}
	}
	s.began, s.again, s.finding = v.clock.now(), false, nil
	v.copies(&v.columns[column], kindScrub, off, off+s.length, job{scrub: s})
}

// place finds the next range, or stops.
func (s *Scrub) place() (column int, off int64, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	size := s.v.plan.legSize(s.v.size.Load()) // it may have grown
	if s.column < len(s.v.columns) && s.off >= size {
		s.column, s.off = s.column+1, 0
	}
	switch {
	case s.v.closed.Load():
		s.end(block.ErrGone)
	case s.v.cfg.Layout.Slots() == 1 || s.column == len(s.v.columns):
		s.end(nil)
	}
	if !s.running {
		s.busy = false
		return 0, 0, false
	}
	s.length = min(s.v.copyUnit-s.off%s.v.copyUnit, size-s.off)
	return s.column, s.off, true
}

// done ends one comparison and starts the next.
func (s *Scrub) done(err error) {
	v := s.v
	if err == nil {
		if s.finding != nil && s.cfg.Found != nil {
			s.cfg.Found(*s.finding)
		}
		s.mu.Lock()
		s.off += s.length
		s.compared += block.Size(s.length)
		if s.alone {
			s.skipped += block.Size(s.length)
		}
		s.mu.Unlock()
	}
	pause := s.pause()
	if errors.Is(err, errOthers) {
		pause = max(pause, lastRetry)
	}
	if pause > 0 {
		v.clock.after(pause, s.kick)
		return
	}
	s.kick()
}

// pause is how long to wait before the next comparison.
func (s *Scrub) pause() time.Duration {
	s.mu.Lock()
	c := &s.v.columns[min(s.column, len(s.v.columns)-1)]
	s.mu.Unlock()
	took := time.Duration(s.v.clock.now() - s.began)
	var pause time.Duration
	if served := c.served(); served != s.served {
		s.served = served
		pause = min(max(took, time.Millisecond), longPause)
	}
	if s.cfg.Rate > 0 {
		due := time.Duration(float64(s.length) / float64(s.cfg.Rate) * float64(time.Second))
		pause = max(pause, due-took)
	}
	return pause
}

// start reads the range from all legs in sync that could be read so far.
func (s *Scrub) start(p *extentIO, e *effects) {
	c := p.c
	for copy := range c.legs {
		if c.legs[copy].state == InSync && p.tried>>copy&1 == 0 {
			p.issue(copy, block.OpRead, s.bufs[copy][:p.length()], e)
		}
	}
	if !p.out() {
		s.compare(p, e)
	}
}

// answered waits for the answers of all legs.
func (s *Scrub) answered(p *extentIO, on *legIO, err error, e *effects) {
	c := p.c
	if err != nil {
		on.state = partNone
		if c.legs[on.copy].inc == on.inc {
			p.failedToRead(on.copy, err)
		}
	}
	switch {
	case p.out():
	case c.aborted:
		p.finish(block.ErrGone, e)
	case c.suspended || p.paused(): // start again once resumed
		p.begin(e)
	default:
		s.compare(p, e)
	}
}

// paused reports whether a leg has read a part only.
func (p *extentIO) paused() bool {
	for i := range p.legs {
		if p.legs[i].state == partPaused {
			return true
		}
	}
	return false
}

// begin forgets what the legs have answered, and starts again.
func (p *extentIO) begin(e *effects) {
	for i := range p.legs {
		p.legs[i].state = partNone
	}
	p.start(e)
}

// compare ends a comparison, or reads the range again because the copies differ.
func (s *Scrub) compare(p *extentIO, e *effects) {
	var copies, unreadable []int
	for copy := range p.c.legs {
		on, l := &p.legs[copy], &p.c.legs[copy]
		switch {
		case l.state != InSync: // dropped meanwhile, or never in sync
		case p.tried>>copy&1 == 1:
			unreadable = append(unreadable, copy)
		case on.state == partDone && on.inc == l.inc:
			copies = append(copies, copy)
		}
	}
	s.alone = len(copies) < 2
	from, end := s.differing(copies, p.length())
	switch {
	case !p.c.v.current():
		p.finish(errOthers, e)
		return
	case from == end && len(unreadable) == 0:
		p.finish(nil, e)
		return
	case from < end && !s.again:
		s.again = true
		p.begin(e)
		return
	case from == end:
		from, end = 0, p.length()
	}
	s.finding = &Finding{
		Column: p.c.index, Off: block.Size(p.off + from), Length: block.Size(end - from),
		Copies: s.groups(copies, from, end), Unreadable: unreadable,
	}
	p.finish(nil, e)
}

// scrubBlock is the unit in which differences are reported.
const scrubBlock = 4096

// differing returns the bounds of the blocks in which any two of the copies differ; equal bounds:
// in none.
func (s *Scrub) differing(copies []int, length int64) (from, end int64) {
	for off := int64(0); off < length && len(copies) > 1; off += scrubBlock {
		to := min(off+scrubBlock, length)
		first := s.bufs[copies[0]][off:to]
		for _, copy := range copies[1:] {
			if bytes.Equal(first, s.bufs[copy][off:to]) {
				continue
			}
			if end == 0 {
				from = off
			}
			end = to
			break
		}
	}
	return from, end
}

// groups divides copies into those with equal data in a range.
func (s *Scrub) groups(copies []int, from, end int64) (all [][]int) {
next:
	for _, copy := range copies {
		for i, g := range all {
			if bytes.Equal(s.bufs[g[0]][from:end], s.bufs[copy][from:end]) {
				all[i] = append(g, copy)
				continue next
			}
		}
		all = append(all, []int{copy})
	}
	return all
}

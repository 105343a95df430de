// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid"
	"weft.dev/weft/raid/pace"
)

var (
	// errOthers ends a comparison that says nothing, because another host may have written since.
	errOthers = errors.New("another host may have written")
	// errNarrow ends a comparison that is made again block by block, to find those that cannot be
	// read.
	errNarrow = errors.New("a part of the range cannot be read")
)

// ScrubConfig describes a scrub.
type ScrubConfig struct {
	// Rate is the most that is read of each leg in a second; 0: no limit. See Scrub.SetRate.
	Rate block.Size
	// From is where it begins; the zero value means the beginning of the volume.
	From ScrubPosition
	// Found is called with what the comparison of a range found, one at a time. It must not block.
	Found func(Finding)
	// Repair says that and how findings are repaired; nil: they are not.
	Repair *Repair
}

// ScrubPosition is a place in a scrub's way through the volume, which goes column by column.
type ScrubPosition struct {
	Column int
	Off    block.Size // in each leg
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
	// Right is the copy whose data is right by the rule of Repair; -1: none is known.
	Right int
}

// Scrub compares the copies in sync of a volume that is in use, a small range at a time, and
// reports where they differ. Without Repair it changes nothing.
//
// A comparison has its range locked as a read has: it waits for the writes that it overlaps, and
// such writes wait for it. So what differs is not under way. What differs is read a second time
// before it is reported. A volume of one copy has nothing to compare.
//
// After each comparison the scrub waits for as long as that took if users' IO was served
// meanwhile, and for longer if Rate or the latency of users' IO requires it.
type Scrub struct {
	trampoline
	v   *Volume
	cfg ScrubConfig

	mu       sync.Mutex
	queue    []Finding // of the healer: to be repaired
	column   int       // of the next comparison
	off      int64
	settled  ScrubPosition // everything before it is compared, told, and repaired
	limit    pace.Limiter  // guarded by Volume.background
	busy     bool          // a step is under way or waits for a timer
	running  bool          // a Run waits for it
	asks     bool          // it waits for Proceed
	err      error
	ended    chan struct{} // closed when it stops running
	compared block.Size    // of each leg, summed over the columns
	skipped  block.Size    // the part of it of which there was one copy, or none

	// Used only by the goroutine that does the next step.
	bufs   [block.MaxSlots][]byte
	length int64
	began  int64
	served uint64
	again  bool      // the range differed once
	alone  bool      // fewer than two copies were there to compare
	narrow int64     // up to here in each leg, block by block
	pieces []Finding // of the comparison that ends
	found  []Finding // in the range, see done
	fix    repair
}

// NewScrub makes a scrub of the volume, which begins with Run.
func (v *Volume) NewScrub(cfg ScrubConfig) *Scrub {
	s := &Scrub{v: v, cfg: cfg, column: cfg.From.Column, off: int64(cfg.From.Off), limit: pace.NewLimiter(cfg.Rate), settled: cfg.From}
	s.compared = block.Size(v.plan.legSize(v.size.Load()))*block.Size(s.column) + cfg.From.Off
	s.step = s.next
	return s
}

// SetRate changes ScrubConfig.Rate.
func (s *Scrub) SetRate(rate block.Size) {
	s.v.background.SetRate(&s.limit, rate)
}

// Position returns the place before which everything is compared, told, and repaired. A scrub from
// there continues this one.
func (s *Scrub) Position() ScrubPosition {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.settled
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

// next starts the next comparison or repair.
func (s *Scrub) next() {
	v := s.v
	v.active.Add(1) // first: Close waits for it from now on, or is seen
	defer v.release()
	column, off, ok := s.place()
	if !ok {
		return
	}
	s.began, s.again = v.clock.now(), false
	if rest := v.background.Begin(s.began); rest > 0 {
		v.clock.after(rest, s.kick)
		return
	}
	for i := range v.cfg.Layout.Slots() {
		if s.bufs[i] == nil {
			s.bufs[i] = make([]byte, v.copyUnit)
		}
	}
	if f := s.fix.next(); f != nil {
		s.length = int64(f.Length)
		v.copies(&v.columns[f.Column], kindRepair, int64(f.Off), int64(f.Off+f.Length), job{scrub: s})
		return
	}
	s.pieces = nil
	v.copies(&v.columns[column], kindScrub, off, off+s.length, job{scrub: s})
}

// place finds the next range to compare, or stops.
func (s *Scrub) place() (column int, off int64, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	size := s.v.plan.legSize(s.v.size.Load()) // it may have grown
	s.takeQueue()
	if s.column < len(s.v.columns) && s.off >= size && s.fix.next() == nil {
		s.column, s.off, s.narrow = s.column+1, 0, 0
	}
	switch {
	case s.v.closed.Load():
		s.end(block.ErrGone)
	case s.v.cfg.Layout.Slots() == 1 || s.column >= len(s.v.columns) && s.fix.next() == nil:
		s.end(nil)
	}
	if !s.running || s.asks {
		s.busy = false
		return 0, 0, false
	}
	s.length = max(0, min(s.v.copyUnit-s.off%s.v.copyUnit, size-s.off))
	if s.off < s.narrow {
		s.length = min(s.length, scrubBlock)
	}
	return s.column, s.off, true
}

// done ends one comparison or repair, and starts the next. What a range of copyUnit bytes holds is
// told once all of it is compared, and repaired after that.
func (s *Scrub) done(err error) {
	v := s.v
	switch {
	case errors.Is(err, errNarrow):
		s.narrow = s.off + s.length
	case err != nil: // again
	case s.fix.next() != nil:
		s.repaired()
	default:
		s.piece()
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

// piece ends one comparison.
func (s *Scrub) piece() {
	s.mu.Lock()
	s.off += s.length
	s.compared += block.Size(s.length)
	if s.alone {
		s.skipped += block.Size(s.length)
	}
	whole := s.off%s.v.copyUnit == 0 || s.off >= s.v.plan.legSize(s.v.size.Load())
	s.mu.Unlock()
	for _, f := range s.pieces {
		s.found = join(s.found, f)
	}
	if !whole {
		return
	}
	found := s.found
	s.found = nil
	for _, f := range found {
		if s.cfg.Found != nil {
			s.cfg.Found(f)
		}
	}
	if s.cfg.Repair != nil && len(found) > 0 {
		s.repair(found)
		return
	}
	s.settle()
}

// settle notes that everything before the next comparison is done.
func (s *Scrub) settle() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.settled = ScrubPosition{s.column, block.Size(s.off)}
}

// join adds a finding, to the one before it if it continues that.
func join(all []Finding, f Finding) []Finding {
	if n := len(all); n > 0 {
		last := &all[n-1]
		same := last.Right == f.Right && slices.Equal(last.Unreadable, f.Unreadable) && slices.EqualFunc(last.Copies, f.Copies, slices.Equal)
		if same && last.Column == f.Column && last.Off+last.Length == f.Off {
			last.Length += f.Length
			return all
		}
	}
	return append(all, f)
}

// pause is how long to wait before the next comparison.
func (s *Scrub) pause() time.Duration {
	s.mu.Lock()
	c := &s.v.columns[min(s.column, len(s.v.columns)-1)]
	s.mu.Unlock()
	now := s.v.clock.now()
	pause := s.v.background.End(&s.limit, s.began, now, s.length)
	if served := c.served(); served != s.served {
		s.served = served
		pause = max(pause, min(max(time.Duration(now-s.began), time.Millisecond), longPause))
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

// quiet reports whether a leg's error is not reported to the owner: a medium error in what a repair
// is about to write again. If that does not help, it is reported.
func (s *Scrub) quiet(on *legIO, err error) bool {
	return s.cfg.Repair != nil && !s.fix.wrote && on.op == block.OpRead && errors.Is(err, block.ErrMedium)
}

// answered waits for the answers of all legs.
func (s *Scrub) answered(p *extentIO, on *legIO, err error, e *effects) {
	c := p.c
	if err != nil {
		on.state = partNone
		switch {
		case s.fix.writing:
			s.fix.failed(p, on, err)
		case c.legs[on.copy].inc == on.inc:
			p.failedToRead(on.copy, err)
		}
	}
	switch {
	case p.out():
	case c.aborted:
		p.finish(block.ErrGone, e)
	case c.suspended || p.paused(): // start again once resumed
		s.fix.writing, p.fua = false, false
		p.begin(e)
	case s.fix.writing:
		s.verify(p, e)
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
	copies, unreadable := p.read()
	if !p.c.v.current() {
		p.finish(errOthers, e)
		return
	}
	if p.kind == kindRepair {
		s.mend(p, copies, unreadable, e)
		return
	}
	s.alone = len(copies) < 2
	from, end := s.differing(copies, p.length())
	switch {
	case len(unreadable) > 0 && !p.other && p.length() > scrubBlock:
		p.finish(errNarrow, e)
		return
	case from == end && len(unreadable) == 0:
		p.finish(nil, e)
		return
	case from < end && !s.again:
		s.again = true
		p.begin(e)
		return
	}
	if len(unreadable) > 0 {
		from, end = 0, p.length()
	}
	for off := from; off < end; off += scrubBlock {
		groups := s.groups(copies, off, min(off+scrubBlock, end))
		if len(groups) == 1 && len(unreadable) == 0 {
			continue
		}
		s.pieces = join(s.pieces, Finding{
			Column: p.c.index, Off: block.Size(p.off + off), Length: block.Size(min(off+scrubBlock, end) - off),
			Copies: groups, Unreadable: unreadable, Right: s.right(p.c.index, groups, len(copies)+len(unreadable)),
		})
	}
	p.finish(nil, e)
}

// read lists the copies in sync that were read, and those that could not be.
func (p *extentIO) read() (copies, unreadable []int) {
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
	return copies, unreadable
}

// scrubBlock is the unit in which differences are reported.
const scrubBlock = int64(block.ScrubUnit)

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
func (s *Scrub) groups(copies []int, from, end int64) [][]int {
	return raid.Equal(copies, func(copy int) []byte { return s.bufs[copy][from:end] })
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/pace"
)

// Rebuilds and equalizers copy copyUnit bytes at a time. A rebuild has up to mostLanes
// such copies under way, all rebuilds of a volume together about allLanes.
const (
	copyUnit  = 512 << 10
	mostLanes = 4
	allLanes  = 16
	longPause = 100 * time.Millisecond
	// flushUnit is how much a rebuild copies between two flushes of its leg. If the leg is
	// dropped, data that was not flushed is copied again.
	flushUnit = 256 << 20
)

// errLeft ends a copy whose leg was dropped meanwhile.
var errLeft = errors.New("leg was dropped")

// errUnread ends a copy for which no leg in sync can be read. The copy releases its range,
// so that a write may repair the unreadable data, and is repeated later.
var errUnread = errors.New("no leg can be read")

// rebuild copies to one leg the regions that it misses. Its lanes take regions in turn. A
// region that was copied whole is no longer missed: all writes since the leg was added go
// to this leg too, and no write goes to a range while it is copied.
type rebuild struct {
	c       *column
	copy    int
	inc     uint64 // the leg's
	stopped atomic.Bool
	whole   atomic.Bool   // a leg does not know where it has data
	skipped *atomic.Int64 // the leg's: bytes that had no data and were not copied

	mu        sync.Mutex
	cursor    uint64 // the next region to look at
	lanes     []lane
	finishing bool // everything is copied
	speed     pace.Speedometer
	unflushed int64 // bytes copied since the last flush began
	// begun are the regions that were put back, and up to where each of them is copied.
	begun map[uint64]int64
}

// lane makes one copy after another.
type lane struct {
	trampoline
	r      *rebuild
	number int
	buf    []byte

	// Guarded by r.mu.
	busy   bool
	has    bool // works on region
	region uint64

	// Used only by the goroutine that does the lane's next step.
	off, end int64 // the rest of the region
	surveyed survey
	length   int64 // of the copy under way
	began    int64
	served   uint64
	vain     uint // how many copies in a row could not be read, or found no space
}

// SetRebuildRate changes Config.RebuildRate.
func (v *Volume) SetRebuildRate(rate block.Size) {
	v.background.SetRate(&v.rebuildLimit, rate)
}

func newRebuild(c *column, copy int, inc uint64) *rebuild {
	r := &rebuild{c: c, copy: copy, inc: inc, skipped: &c.legs[copy].skipped, begun: map[uint64]int64{}}
	r.lanes = make([]lane, min(mostLanes, max(1, allLanes/len(c.v.columns))))
	for i := range r.lanes {
		r.lanes[i].r, r.lanes[i].number = r, i
		r.lanes[i].step = r.lanes[i].next
	}
	return r
}

// kick starts all idle lanes.
func (r *rebuild) kick() {
	r.mu.Lock()
	var idle []*lane
	for i := range r.lanes {
		if ln := &r.lanes[i]; !ln.busy && !r.finishing {
			ln.busy = true
			idle = append(idle, ln)
		}
	}
	r.mu.Unlock()
	for _, ln := range idle {
		ln.kick()
	}
}

// next starts the lane's next copy.
func (ln *lane) next() {
	r := ln.r
	if !ln.take() {
		return
	}
	if ln.skip() {
		ln.kick()
		return
	}
	ln.began = r.c.v.clock.now()
	if rest := r.c.v.background.Begin(ln.began); rest > 0 {
		r.c.v.clock.after(rest, ln.kick)
		return
	}
	if ln.survey() {
		return
	}
	ln.length = ln.stretch(r.c.v.copyUnit)
	if ln.buf == nil {
		ln.buf = make([]byte, min(r.c.v.copyUnit, 1<<r.c.v.plan.region))
	}
	r.c.v.copies(r.c, kindCopy, ln.off, ln.off+ln.length, job{lane: ln})
}

// copies starts an extent IO of a job.
func (v *Volume) copies(c *column, k kind, off, end int64, j job) {
	v.active.Add(1)
	p := v.extentIOs.Get().(*extentIO)
	p.c, p.kind, p.off, p.end, p.job, p.op = c, k, off, end, j, block.OpWrite
	if off == end {
		p.op = block.OpFlush
	}
	p.enter()
}

// take gives the lane its next region, if it has none. The last lane for which there is no
// more region ends the rebuild.
func (ln *lane) take() bool {
	r := ln.r
	r.mu.Lock()
	if r.stopped.Load() {
		ln.busy, ln.has = false, false
		r.mu.Unlock()
		return false
	}
	if ln.has || r.pick(ln) {
		r.mu.Unlock()
		return true
	}
	ln.busy = false
	last := true
	for i := range r.lanes {
		last = last && !r.lanes[i].busy
	}
	r.finishing = last
	r.mu.Unlock()
	if last {
		r.flush()
	}
	return false
}

// pick finds a missed region on which no lane works. r.mu is locked.
func (r *rebuild) pick(ln *lane) bool {
	r.c.shards[0].mu.Lock()
	defer r.c.shards[0].mu.Unlock()
	missed := r.c.legs[r.copy].missed
	for range 2 {
		for {
			region, ok := missed.next(r.cursor)
			if !ok {
				break
			}
			r.cursor = region + 1
			if !r.taken(region) {
				ln.has, ln.region = true, region
				ln.off, ln.end = r.bounds(region)
				ln.surveyed.state, ln.surveyed.bits = surveyNone, nil
				r.goOn(ln)
				return true
			}
		}
		r.cursor = 0
	}
	return false
}

// goOn has a lane begin its region where an earlier one has put it back, unless the leg came to miss a
// part of it since: what it comes to miss after unset is seen by copied. Users' writes to the region may be
// issued at the same time. r.mu is locked.
func (r *rebuild) goOn(ln *lane) {
	off, begun := r.begun[ln.region]
	delete(r.begun, ln.region)
	if missed := r.c.legs[r.copy].anew.unset(ln.region); begun && !missed {
		ln.off = off
	}
}

func (r *rebuild) taken(region uint64) bool {
	for i := range r.lanes {
		if r.lanes[i].has && r.lanes[i].region == region {
			return true
		}
	}
	return false
}

// bounds returns the bounds of a region. A shard is locked.
func (r *rebuild) bounds(region uint64) (off, end int64) {
	shift := r.c.v.plan.region
	off = int64(region) << shift
	return off, min(off+1<<shift, r.c.size)
}

// done ends one copy of the lane and starts the next.
func (ln *lane) done(err error) {
	r := ln.r
	v := r.c.v
	moved := ln.length
	if err != nil {
		moved = 0
	}
	rest := v.background.End(&v.rebuildLimit, ln.began, v.clock.now(), moved)
	full := errors.Is(err, block.ErrFull)
	if full { // others may need none, or free some
		ln.putBack()
	}
	if full || errors.Is(err, errUnread) {
		v.clock.after(min(firstRetry<<ln.vain, lastRetry), ln.kick)
		ln.vain = min(ln.vain+1, 8)
		return
	}
	if err != nil {
		r.mu.Lock()
		ln.busy, ln.has = false, false
		r.mu.Unlock()
		return
	}
	if ln.surveyed.state == surveyBegun {
		ln.surveyed.over(ln)
		ln.kick()
		return
	}
	if ln.off += ln.length; ln.off >= ln.end {
		ln.copied()
	}
	if r.fed() {
		ln.vain = 0
	}
	r.count(ln.length)
	if pause := max(ln.pause(), rest); pause > 0 {
		v.clock.after(pause, ln.kick)
		return
	}
	ln.kick()
}

// count adds up what is copied, and makes it durable from time to time.
func (r *rebuild) count(n int64) {
	v := r.c.v
	r.mu.Lock()
	r.speed.Add(v.clock.now(), n)
	r.unflushed += n
	due := r.unflushed >= v.flushUnit
	if due {
		r.unflushed = 0
	}
	r.mu.Unlock()
	if due && r.caches() {
		v.copies(r.c, kindCopy, 0, 0, job{last: r, midway: true})
	}
}

// caches reports whether the leg has a volatile cache.
func (r *rebuild) caches() bool {
	r.c.shards[0].mu.Lock()
	defer r.c.shards[0].mu.Unlock()
	return r.c.legs[r.copy].caches.Load() && !r.c.v.weak.unflushed
}

// putBack leaves the rest of the lane's region to be copied later.
func (ln *lane) putBack() {
	r := ln.r
	r.mu.Lock()
	ln.has = false
	r.begun[ln.region] = ln.off
	r.mu.Unlock()
	r.skipped.Add(-ln.surveyed.emptyFrom(ln.off)) // that will be counted again
}

// copied ends a region: the leg no longer misses it, unless it came to miss a part meanwhile.
func (ln *lane) copied() {
	r := ln.r
	r.mu.Lock()
	defer r.mu.Unlock()
	r.c.shards[0].mu.Lock()
	defer r.c.shards[0].mu.Unlock()
	if _, end := r.bounds(ln.region); end > ln.end {
		ln.end = end // it has grown
		return
	}
	ln.has = false
	l := &r.c.legs[r.copy]
	if l.inc != r.inc {
		return
	}
	if ln.surveyed.bits != nil && l.caches.Load() {
		l.cached.set(ln.region, ln.region) // that it reads as zeroes may not be durable
	}
	l.missed.unset(ln.region)
	if l.anew.has(ln.region) { // after unset: see misses
		l.missed.set(ln.region, ln.region)
	}
}

// pause returns how long the lane waits in favor of user IO. It is zero if there was none
// since the lane's last copy. Otherwise it is about as long as that copy took, and much
// longer for the later lanes, so a rebuild always makes progress.
func (ln *lane) pause() time.Duration {
	c := ln.r.c
	served := c.served()
	if served == ln.served {
		return 0
	}
	ln.served = served
	took := time.Duration(c.v.clock.now() - ln.began)
	return min(max(took, time.Millisecond)<<(2*ln.number), longPause)
}

func (ln *lane) start(p *extentIO, e *effects) {
	c := p.c
	if c.legs[ln.r.copy].inc != ln.r.inc {
		p.finish(errLeft, e)
		return
	}
	p.phase = phaseStarted
	from := c.choose(p)
	if from < 0 {
		p.finish(errUnread, e)
		return
	}
	if ln.surveyed.state == surveyBegun {
		p.issue(from, block.OpMap, ln.surveyed.room[0], e)
		return
	}
	p.issue(from, block.OpRead, ln.buf[:p.length()], e)
}

func (ln *lane) answered(p *extentIO, s *legIO, err error, e *effects) {
	c := p.c
	state := s.state
	s.state = partNone
	current := c.legs[s.copy].inc == s.inc
	switch {
	case c.legs[ln.r.copy].inc != ln.r.inc:
		p.finish(errLeft, e)
	case ln.surveyed.state == surveyBegun:
		ln.surveyed.answer(ln, p, s, state, err, e)
	case s.copy == ln.r.copy && state == partPaused: // start again once resumed
		p.start(e)
	case s.copy == ln.r.copy:
		p.finish(err, e)
	case state == partDone && current && c.running():
		p.issueCopy(ln.r.copy, ln.buf[:p.length()], e)
	default:
		if err != nil && current {
			p.failedToRead(s.copy, err)
			p.isSick(s.copy, err, e)
		}
		p.start(e)
	}
}

// flush makes the copied data durable, before the leg counts as caught up.
func (r *rebuild) flush() {
	if r.caches() {
		r.c.v.copies(r.c, kindCopy, 0, 0, job{last: r})
		return
	}
	r.caughtUp()
}

func (r *rebuild) startFlush(p *extentIO, e *effects) {
	l := &p.c.legs[r.copy]
	if l.inc != r.inc {
		p.finish(errLeft, e)
		return
	}
	l.flush(&p.legs[r.copy])
	p.issue(r.copy, block.OpFlush, nil, e)
}

// caughtUp ends the rebuild, unless there is more to copy or the leg has failed an IO.
func (r *rebuild) caughtUp() {
	c := r.c
	c.lock()
	l := &c.legs[r.copy]
	mine := l.inc == r.inc && !r.stopped.Load()
	more := l.inc == r.inc && l.missed.len() > 0
	failed := mine && !more && c.failed(r.copy)
	if mine && !more && !failed {
		l.state, l.rebuild, l.starved = CaughtUp, nil, 0
		c.v.tell(Event{Kind: LegCaughtUp, Column: c.index, Copy: r.copy})
	}
	c.unlock()
	c.v.tellAll()
	if failed { // for want of space, perhaps: then it will miss more; else it is dropped
		c.v.clock.after(firstRetry, r.caughtUp)
	}
	if more {
		r.mu.Lock()
		r.finishing = false
		r.mu.Unlock()
		r.kick()
	}
}

// failed reports whether the leg failed an IO, and that failure has not been handled yet.
// The column is locked.
func (c *column) failed(copy int) bool {
	for i := range c.shards {
		for _, x := range c.shards[i].spans {
			if s := &x.p.legs[copy]; s.state == partFailed && s.inc == c.legs[copy].inc {
				return true
			}
		}
	}
	return false
}

// trampoline runs one step after another in a loop. A step that calls kick before it
// returns so does not recurse.
type trampoline struct {
	mu             sync.Mutex
	step           func()
	running, again bool
}

func (t *trampoline) kick() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.again = true
	if t.running {
		return
	}
	t.running = true
	for t.again {
		t.again = false
		t.mu.Unlock()
		t.step()
		t.mu.Lock()
	}
	t.running = false
}

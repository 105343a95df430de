// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"sync/atomic"
	"time"

	"weft.dev/weft/proto/block"
)

// shardCount is the number of mutexes among which a column's IO is divided.
const shardCount = 16

// column is a group of legs that mirror one another. Its fields, except those in shards,
// are read with any of the shards' mutexes held, and changed with all of them held.
type column struct {
	v      *Volume
	index  int
	shards [shardCount]shard
	legs   []leg // by copy

	size       int64 // of each leg
	suspended  bool
	equalizing bool
	aborted    bool
	armed      bool // a timer is set that retries held IO
	backoff    time.Duration

	turn    uint8         // of writes that enter; see settling
	emptied chan struct{} // one slot: a shard has no write of the other turn left
}

// leg is one copy of a column.
type leg struct {
	state State
	// inc counts the times that the leg was added or dropped. An answer to an IO that
	// was sent under an earlier count says nothing about the leg now.
	inc      uint64
	dev      block.Device
	gen      uint64 // counts its devices
	born     uint64 // gen of the first device after it last lost its cache
	maxIO    int64
	discards bool
	caches   atomic.Bool // has a volatile cache

	// missed are the regions that the leg misses. cached are the regions that were
	// written and are not known to be durable; when the leg is dropped, it misses them
	// too. flushing are the regions that the flush of flusher, which is under way, makes
	// durable. missed is nil if there is one copy only; flushing and flusher are guarded
	// by the column's first shard.
	missed, cached, flushing *bitmap
	flusher                  *legIO
	// anew are regions that a rebuilding leg came to miss since a lane of its rebuild took them; see
	// misses. It is nil if missed is.
	anew *bitmap
	// starved is when a rebuilding leg last had no space; 0: it has some. See space.go.
	starved int64
	// covered: since it was dropped, missed has all that it may lack, even if it loses its cache now
	// or has lost it since it was added. Says nothing of a member.
	covered bool
	// unsure: a flush has failed or may have been skipped since the leg was added, so what it has written
	// may be missing without being noted. Guarded by the column's first shard.
	unsure bool

	err     error // the last error, until the leg has had none for a while
	errAt   int64
	told    tolling
	again   bool // IOs that it failed are to be sent again
	rebuild *rebuild
	// total is the number of regions that the rebuild had to copy when it began.
	total uint64
	// skipped is what its last rebuild did not have to copy, in bytes.
	skipped atomic.Int64
	out     atomic.Int64 // IOs that its devices have not answered

	withheld bool // no write that it takes part in is acknowledged
}

// tolling says which errors of a leg have been reported to the owner.
type tolling uint8

const (
	tolError tolling = iota + 1 // an error that holds no write
	tolHeld                     // an error that holds a write
)

// unflushed reports whether the leg may have acknowledged writes that it loses with its
// cache. For a leg that was thought to have no cache it is true, because its writes were
// not tracked. The column is locked.
func (l *leg) unflushed() bool { return !l.caches.Load() || l.cached.len()+l.flushing.len() > 0 }

// lossCovered reports whether all that the leg lacks would be known if it lost its cache. While it
// takes writes, what it has not flushed is tracked if it is known to have a cache; see add and
// lookAtCache. The column is locked.
func (l *leg) lossCovered() bool {
	if l.member() {
		return l.caches.Load() && !l.unsure
	}
	return l.covered
}

// member reports whether writes go to the leg.
func (l *leg) member() bool { return l.state >= Rebuilding }

// running reports whether IO may be sent to legs. The column is locked.
func (c *column) running() bool { return !c.suspended && !c.aborted }

func (c *column) lock() {
	for i := range c.shards {
		c.shards[i].mu.Lock()
	}
}

func (c *column) unlock() {
	for i := range c.shards {
		c.shards[i].mu.Unlock()
	}
}

// shard returns the shard for an extent IO at off.
func (c *column) shard(off int64) *shard {
	unit := uint64(off) >> c.v.plan.unit
	return &c.shards[unit*0x9e3779b97f4a7c15>>60]
}

// inSync counts the legs in sync and finds the first of them.
func (c *column) inSync() (n, first int) {
	first = -1
	for i := range c.legs {
		if c.legs[i].state != InSync {
			continue
		}
		if n++; first < 0 {
			first = i
		}
	}
	return n, first
}

// startRead reads from the best leg in sync that has not yet failed this read.
func (p *extentIO) startRead(e *effects) {
	if p.held != 0 && !p.c.v.current() { // the data could not be used
		p.hold(e)
		return
	}
	copy := p.c.choose(p)
	if copy >= 0 {
		p.issue(copy, block.OpRead, p.data, e)
		return
	}
	if n, _ := p.c.inSync(); n > 0 && p.c.v.cfg.FailMedium && p.kind == kindRead && !p.other && p.err != nil {
		if n > 1 && p.narrow() {
			p.startRead(e)
			return
		}
		p.widen()
		p.answer(p.err, e)
		return
	}
	p.hold(e)
}

// answer completes a read, unless another host may have written since.
func (p *extentIO) answer(err error, e *effects) {
	if !p.c.v.current() {
		p.hold(e)
		return
	}
	p.finish(err, e)
}

// choose picks the leg in sync with the fewest IOs outstanding, or -1. A sequential stream
// of reads stays on its leg, unless that has far more outstanding than others: drives and
// caches read ahead. Legs with equally many take turns by lock unit.
func (c *column) choose(p *extentIO) int {
	const stream = 8
	best, least := -1, int64(0)
	var ready [block.MaxSlots]int
	n := 0
	for copy := range c.legs {
		l := &c.legs[copy]
		if (l.state == InSync || c.v.weak.readRebuilding && l.state == Rebuilding && p.kind == kindRead) && p.tried>>copy&1 == 0 {
			ready[n] = copy
			n++
		}
	}
	for i := range n {
		copy := ready[(int(uint64(p.off)>>c.v.plan.unit+uint64(c.index)+uint64(c.v.cfg.Turn))+i)%n]
		out := c.legs[copy].out.Load()
		if copy == p.sh.lastCopy && p.off == p.sh.lastEnd {
			out -= stream
		}
		if best < 0 || out < least {
			best, least = copy, out
		}
	}
	if best >= 0 && p.kind == kindRead {
		p.sh.lastCopy, p.sh.lastEnd = best, p.end
	}
	return best
}

func (p *extentIO) readAnswered(s *legIO, err error, e *effects) {
	l := &p.c.legs[s.copy]
	state := s.state
	s.state = partNone
	// If the leg was dropped meanwhile, its data may be older than that of the others.
	gone := l.inc != s.inc || l.state != InSync && !p.c.v.weak.readRebuilding
	switch {
	case state == partDone && !gone && p.nextBlock():
	case state == partDone && !gone:
		p.widen()
		p.answer(nil, e)
		return
	case err != nil && !gone:
		p.failedToRead(s.copy, err)
		p.isSick(s.copy, err, e)
	}
	p.start(e)
}

// failedToRead notes that a leg in sync failed a read. After a medium error the leg
// misses the region, so that its next rebuild writes it again: otherwise the leg would
// come back with the same fault, and fail again.
func (p *extentIO) failedToRead(copy int, err error) {
	p.tried |= 1 << copy
	p.err = err
	if errors.Is(err, block.ErrMedium) {
		p.c.misses(copy, p)
	} else {
		p.other = true
	}
}

// startWrite sends a write to all legs that take writes, and marks it as missed for the
// others.
func (p *extentIO) startWrite(e *effects) {
	c := p.c
	if n, _ := c.inSync(); n == 0 {
		p.park(p.at)
		return
	}
	op := p.op
	if op == block.OpDiscard {
		if !c.discards() {
			p.finish(nil, e)
			return
		}
		if len(c.legs) > 1 && !c.v.weak.discardsDiffer {
			op, p.unmap = block.OpWriteZeroes, true
		}
		p.op = op // the same if it starts again with other legs
	}
	for copy := range c.legs {
		if l := &c.legs[copy]; l.takes(op) {
			p.issue(copy, op, p.data, e)
		} else {
			c.misses(copy, p)
		}
	}
}

// discards reports whether all legs that take writes can discard.
func (c *column) discards() bool {
	for i := range c.legs {
		if l := &c.legs[i]; l.member() && !l.discards {
			return false
		}
	}
	return true
}

// misses notes that a leg may lack the data of an extent IO. A lane that is copying the region may have
// passed the place, and must not end the region after that: see lane.copied, which looks at these sets
// in the opposite order.
func (c *column) misses(copy int, p *extentIO) {
	l := &c.legs[copy]
	if l.missed == nil || c.v.cfg.ReadOnly {
		return
	}
	first, last := c.v.plan.regionsOf(p.off, p.end)
	if l.state == Rebuilding && !c.v.weak.endsAnyway {
		l.anew.set(first, last)
	}
	l.missed.set(first, last)
}

// startFlush flushes all legs that take writes and have a volatile cache.
func (p *extentIO) startFlush(e *effects) {
	c := p.c
	if n, _ := c.inSync(); n == 0 {
		p.park(p.at)
		return
	}
	for copy := range c.legs {
		l := &c.legs[copy]
		c.lookAtCache(l)
		switch {
		case l.member() && l.caches.Load():
			l.flush(&p.legs[copy])
			p.issue(copy, block.OpFlush, nil, e)
		case l.member():
			p.legs[copy].state, p.legs[copy].inc = partDone, l.inc
		}
	}
	p.settle(e)
}

// lookAtCache notes if a leg's drive has got a volatile cache since the leg was added: data
// already written to the leg may not be durable. If the drive is said to have none any more, its
// flushes may be skipped, so they prove nothing if it has one all the same: writes count as not
// tracked.
func (c *column) lookAtCache(l *leg) {
	if !l.member() || l.dev == nil || c.v.cfg.ReadOnly {
		return
	}
	switch caches := l.dev.Geometry().VolatileCache; {
	case caches && !l.caches.Load():
		l.caches.Store(true)
		l.cached.setAll()
	case !caches && l.caches.Load():
		l.unsure = true
	}
}

// flush notes, before s flushes the leg, which regions the flush will make durable. The
// column's first shard is locked.
func (l *leg) flush(s *legIO) {
	if l.flusher != nil {
		return // one flush at a time is tracked
	}
	l.flusher = s
	l.cached.moveTo(l.flushing)
}

// wrote notes that the data of an extent IO may be in a leg's volatile cache only.
func (l *leg) wrote(p *extentIO) {
	// Linux's target ignores FUA of zeroes.
	if (!p.fua || p.op != block.OpWrite) && l.caches.Load() {
		first, last := p.c.v.plan.regionsOf(p.off, p.end)
		l.cached.set(first, last)
	}
}

func (l *leg) flushed(s *legIO) {
	if l.flusher != s {
		return
	}
	l.flusher = nil
	// If the drive was said meanwhile to have no cache, the flush may have been skipped.
	if s.state == partDone && l.inc == s.inc && l.dev.Geometry().VolatileCache {
		l.flushing.clear()
		return
	}
	if l.inc == s.inc {
		l.unsure = true // a later flush that succeeds does not say where this one's data is
	}
}

// settle completes a write or flush if all legs that must have it do, and holds it if one
// of them failed.
func (p *extentIO) settle(e *effects) {
	c := p.c
	if p.phase != phaseStarted || p.passed > 0 {
		return
	}
	has, failed, paused, out := p.tally()
	switch {
	case out:
	case c.v.weak.oneIsEnough && has > 0:
		p.finish(nil, e)
	case has > 0 && failed == 0 && paused == 0:
		p.finish(nil, e)
	case paused > 0 && failed == 0 && !c.aborted:
		// Resume sends it on, or Withhold.
	default:
		p.hold(e)
	}
}

// tally counts the legs that have a write or flush, and those that prevent its completion.
// out means that a leg has not answered yet.
func (p *extentIO) tally() (has, failed, paused int, out bool) {
	c := p.c
	for copy := range c.legs {
		s, l := &p.legs[copy], &c.legs[copy]
		current := l.inc == s.inc && l.member()
		switch {
		case s.state == partOut:
			return 0, 0, 0, true
		case current && s.state == partFailed:
			failed++
		case current && (s.state == partPaused || l.withheld):
			paused++
		case l.state != InSync:
		case s.state == partDone || p.kind == kindFlush:
			// The leg may have been dropped and rebuilt meanwhile. Then its rebuild has
			// flushed it, and has waited for this extent IO in all regions that it missed.
			has++
		default:
			failed++ // impossible: a leg in sync that was not sent the IO
		}
	}
	return has, failed, paused, false
}

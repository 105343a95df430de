// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"sync/atomic"
	"time"

	"weft.dev/weft/proto/block"
)

// shardCount is how many mutexes a column's IO is spread over.
const shardCount = 16

// column is legs that mirror one another. What is not in its shards is read with
// any of their mutexes held, and changed with all of them.
type column struct {
	v      *Volume
	index  int
	shards [shardCount]shard
	legs   []leg // by copy

	size       int64 // of each leg
	suspended  bool
	equalizing bool
	aborted    bool
	armed      bool // a timer will try again what is held
	backoff    time.Duration
}

// leg is one copy of a column.
type leg struct {
	state State
	// inc counts the times that the leg was added and dropped: an answer to an IO of
	// an earlier time says nothing about the leg now.
	inc      uint64
	dev      block.Device
	gen      uint64 // counts its devices
	born     uint64 // the first of its devices since it last lost its cache
	maxIO    int64
	discards bool
	caches   atomic.Bool // has a volatile cache

	// missed are the regions that writes did not reach, cached those that were
	// written and are not known to be durable; the leg misses them, too, once it is
	// dropped. flushing is what a flush under way, the one of flusher, will have made
	// durable. missed is nil where there is one copy; flushing and flusher are
	// guarded by the column's first shard.
	missed, cached, flushing *bitmap
	flusher                  *sub

	err     error // the last one, until it has been well for a while
	errAt   int64
	told    tolling
	again   bool // what it failed is to be sent again
	rebuild *rebuild
	// total is how much the rebuild had to copy when it began.
	total uint64
	out   atomic.Int64 // IOs that its devices have not answered
}

// tolling is what the owner has been told of a leg's errors.
type tolling uint8

const (
	tolError tolling = iota + 1 // that it erred
	tolHeld                     // that a write is held
)

// unflushed reports whether the leg may have answered what it loses with its cache: of
// one that was taken to have none nobody knows. The column is locked.
func (l *leg) unflushed() bool { return !l.caches.Load() || l.cached.len()+l.flushing.len() > 0 }

// member reports whether writes go to the leg.
func (l *leg) member() bool { return l.state >= Rebuilding }

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

// shard is the one that a piece at off belongs to.
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

// startRead reads from the best leg in sync that has not yet failed to.
func (p *piece) startRead(e *effects) {
	if p.held != 0 && !p.c.v.current() { // it would be read in vain
		p.hold(e)
		return
	}
	copy := p.c.choose(p)
	if copy >= 0 {
		p.issue(copy, block.OpRead, p.data, e)
		return
	}
	if n, _ := p.c.inSync(); n > 0 && p.c.v.cfg.FailMedium && p.kind == kindRead && !p.other && p.err != nil {
		p.answer(p.err, e)
		return
	}
	p.hold(e)
}

// answer ends a read, if what it says is not of the past.
func (p *piece) answer(err error, e *effects) {
	if !p.c.v.current() {
		p.hold(e)
		return
	}
	p.finish(err, e)
}

// choose picks the leg in sync with the least to do. A stream of reads stays on
// the leg that it is on, unless that is far behind: drives and caches read ahead.
// Legs that are equal take turns by lock unit.
func (c *column) choose(p *piece) int {
	const stream = 8
	best, least := -1, int64(0)
	n := len(c.legs)
	turn := int(uint64(p.off)>>c.v.plan.unit+uint64(c.index)) % n
	for i := range n {
		copy := (turn + i) % n
		l := &c.legs[copy]
		if l.state != InSync && !(c.v.weak.readRebuilding && l.state == Rebuilding && p.kind == kindRead) || p.tried>>copy&1 == 1 {
			continue
		}
		out := l.out.Load()
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

func (p *piece) readAnswered(s *sub, err error, e *effects) {
	l := &p.c.legs[s.copy]
	state := s.state
	s.state = partNone
	// What a leg says that was dropped meanwhile may be older than what the others know.
	gone := l.inc != s.inc || l.state != InSync && !p.c.v.weak.readRebuilding
	switch {
	case state == partDone && !gone:
		p.answer(nil, e)
		return
	case err != nil && !gone:
		p.failedToRead(s.copy, err)
	}
	p.start(e)
}

// failedToRead notes that a leg in sync did. What its medium has lost it misses,
// so that its next rebuild writes it again: else the leg would come back as it
// was, and fail again.
func (p *piece) failedToRead(copy int, err error) {
	p.tried |= 1 << copy
	p.err = err
	if errors.Is(err, block.ErrMedium) {
		p.c.misses(copy, p)
	} else {
		p.other = true
	}
}

// startWrite gives a write to all legs that take writes, and notes for the others
// that they miss it.
func (p *piece) startWrite(e *effects) {
	c := p.c
	if n, _ := c.inSync(); n == 0 {
		p.phase = phaseParked
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
		p.op = op // whatever legs come, if it begins anew
	}
	for copy := range c.legs {
		if l := &c.legs[copy]; l.member() {
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

// misses notes that a leg may not have what a piece writes.
func (c *column) misses(copy int, p *piece) {
	if l := &c.legs[copy]; l.missed != nil && !c.v.cfg.ReadOnly {
		l.missed.set(c.v.plan.regionsOf(p.off, p.end))
	}
}

// startFlush flushes all legs that take writes and have a cache.
func (p *piece) startFlush(e *effects) {
	c := p.c
	if n, _ := c.inSync(); n == 0 {
		p.phase = phaseParked
		return
	}
	for copy := range c.legs {
		l := &c.legs[copy]
		c.lookAtCache(l)
		switch {
		case l.member() && l.caches.Load():
			l.flush(&p.subs[copy])
			p.issue(copy, block.OpFlush, nil, e)
		case l.member():
			p.subs[copy].state, p.subs[copy].inc = partDone, l.inc
		}
	}
	p.settle(e)
}

// lookAtCache takes note of a drive that has got a volatile cache since its leg was
// added: what the leg was written may not be durable.
func (c *column) lookAtCache(l *leg) {
	if !l.member() || l.caches.Load() || l.dev == nil || c.v.cfg.ReadOnly || !l.dev.Geometry().VolatileCache {
		return
	}
	l.caches.Store(true)
	l.cached.setAll()
}

// flush notes, before s flushes the leg, what will be durable then. The column's
// first shard is locked.
func (l *leg) flush(s *sub) {
	if l.flusher != nil {
		return // what a flush under way covers is settled first
	}
	l.flusher = s
	l.cached.moveTo(l.flushing)
}

// wrote notes the regions of a piece that may be in a leg's cache alone.
func (l *leg) wrote(p *piece) {
	if !p.fua && l.caches.Load() {
		first, last := p.c.v.plan.regionsOf(p.off, p.end)
		l.cached.set(first, last)
	}
}

func (l *leg) flushed(s *sub) {
	if l.flusher != s {
		return
	}
	l.flusher = nil
	if s.state == partDone && l.inc == s.inc {
		l.flushing.clear()
	}
}

// settle ends a write or flush if all legs have it that must, and holds it if one
// of them failed.
func (p *piece) settle(e *effects) {
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
		// Resume sends it on.
	default:
		p.hold(e)
	}
}

// tally counts the legs that have a write or flush, and those that keep it from being
// ended; out: one of them has not answered yet.
func (p *piece) tally() (has, failed, paused int, out bool) {
	c := p.c
	for copy := range c.legs {
		s, l := &p.subs[copy], &c.legs[copy]
		current := l.inc == s.inc && l.member()
		switch {
		case s.state == partOut:
			return 0, 0, 0, true
		case current && s.state == partFailed:
			failed++
		case current && s.state == partPaused:
			paused++
		case l.state != InSync:
		case s.state == partDone || p.kind == kindFlush:
			// Perhaps it was dropped and rebuilt meanwhile. Then its rebuild has flushed,
			// and had to wait for this piece in all regions that the leg missed.
			has++
		default:
			failed++ // cannot be: it was not given what it must have
		}
	}
	return has, failed, paused, false
}

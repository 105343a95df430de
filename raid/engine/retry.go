// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"weft.dev/weft/proto/block"
)

// How soon held IO is retried, and for how long a leg must have no errors until its last
// one is forgotten.
const (
	firstRetry = 20 * time.Millisecond
	lastRetry  = time.Second
	forgetting = time.Second
)

// clock gives the time since New, and timers. Tests have their own.
type clock interface {
	now() int64 // nanoseconds, never 0
	after(time.Duration, func())
}

type realClock struct{ start time.Time }

func newClock() clock { return realClock{time.Now()} }

func (c realClock) now() int64                       { return int64(time.Since(c.start)) + 1 }
func (c realClock) after(d time.Duration, do func()) { time.AfterFunc(d, do) }

// events delivers events in order, from one goroutine at a time.
type events struct {
	mu      sync.Mutex
	queue   []Event
	telling bool
}

func (v *Volume) tell(ev Event) {
	q := &v.events
	q.mu.Lock()
	defer q.mu.Unlock()
	if v.cfg.OnEvent != nil {
		q.queue = append(q.queue, ev)
	}
}

// tellAll delivers queued events. It is called after tell, with nothing locked.
func (v *Volume) tellAll() {
	q := &v.events
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.telling {
		return
	}
	q.telling = true
	for len(q.queue) > 0 {
		ev := q.queue[0]
		q.queue = q.queue[1:]
		q.mu.Unlock()
		v.cfg.OnEvent(ev)
		q.mu.Lock()
	}
	q.telling = false
}

// legFailed notes the error of a leg. A leg that rebuilds is recorded stale anyway, and is
// dropped. For any other leg, the writes that it failed are held until the owner drops it.
func (c *column) legFailed(f failure, e *effects) {
	c.lock()
	l := &c.legs[f.copy]
	if l.inc == f.inc && l.member() {
		c.noteError(l, f, e)
	}
	c.unlock()
	c.v.tellAll()
}

func (c *column) noteError(l *leg, f failure, e *effects) {
	if l.state == Rebuilding && errors.Is(f.err, block.ErrFull) {
		c.starve(f.copy, e)
		return
	}
	ev := Event{Kind: LegFailed, Column: c.index, Copy: f.copy, Err: f.err, Held: f.held}
	level := tolError
	if f.held {
		level = tolHeld
	}
	tell := level > l.told
	l.told = max(l.told, level)
	if l.state == Rebuilding || l.state == CaughtUp && c.v.weak.dropCaughtUp {
		ev.Kind, tell = RebuildFailed, true
		c.drop(f.copy, e)
	}
	l.err, l.errAt = f.err, c.v.clock.now()
	if tell {
		c.v.tell(ev)
	}
	e.rearm = c
}

// armRetry sets a timer for the column to retry its held IO.
func (c *column) armRetry() {
	c.lock()
	defer c.unlock()
	if c.armed || !c.running() {
		return
	}
	c.armed = true
	c.backoff = min(max(2*c.backoff, firstRetry), lastRetry)
	c.v.clock.after(c.backoff, c.retry)
}

func (c *column) retry() {
	var e effects
	c.lock()
	c.armed = false
	c.tryAgain(&e)
	if again := c.forget(); again {
		e.rearm = c
	} else {
		c.backoff = 0
	}
	c.unlock()
	e.run()
}

// tryAgain sends again the IO that was paused, the IO that failed on the last leg in sync,
// and the reads and copies that found no leg to read from. The column is locked.
func (c *column) tryAgain(e *effects) {
	if !c.running() {
		return
	}
	n, last := c.inSync()
	for _, p := range c.snapshot() {
		switch {
		case p.phase != phaseStarted:
		case p.kind == kindWrite || p.kind == kindFlush:
			p.tryAgain(n == 1, last, e)
		case p.held != 0 && !p.out():
			p.tried, p.other, p.err = 0, false, nil
			p.start(e)
		}
	}
	for i := range c.legs {
		c.legs[i].again = false
	}
}

// tryAgain sends to the legs again the IO that was paused, and that which they failed if
// they are to be retried. If one is set, last is the only leg in sync, which is always
// retried.
func (p *extentIO) tryAgain(one bool, last int, e *effects) {
	for copy := range p.c.legs {
		s := &p.legs[copy]
		if s.state == partPaused || s.state == partFailed && (p.c.legs[copy].again || s.full || one && copy == last) {
			p.again(copy, e)
		}
	}
}

// again sends to a leg the IO that it failed, or the rest of one that was paused.
func (p *extentIO) again(copy int, e *effects) {
	s, l := &p.legs[copy], &p.c.legs[copy]
	if l.inc != s.inc || !l.member() || p.passed > 0 {
		return
	}
	p.yielded = false
	if s.op == block.OpFlush {
		l.flush(s)
	}
	p.at = e.time(p.c.v)
	p.issue(copy, s.op, s.data, e)
}

// Retry sends the IO that a leg failed to it again. For the last leg in sync, the volume
// does so without being asked.
func (v *Volume) Retry(column, copy int) error {
	v.change.Lock()
	defer v.change.Unlock()
	c, l, err := v.leg(column, copy)
	if err != nil {
		return fmt.Errorf("retry leg: %w", err)
	}
	var e effects
	c.lock()
	l.again = true
	c.tryAgain(&e)
	c.unlock()
	e.run()
	return nil
}

// forget forgets the errors of legs that have had none for a while. It reports whether the
// column must be looked at again. The column is locked.
func (c *column) forget() (again bool) {
	var failed [block.MaxSlots]bool
	for _, p := range c.snapshot() {
		again = again || p.held != 0
		for copy := range c.legs {
			failed[copy] = failed[copy] || p.legs[copy].state == partFailed
		}
	}
	now := c.v.clock.now()
	for copy := range c.legs {
		l := &c.legs[copy]
		if l.err == nil || !l.member() {
			continue
		}
		if !failed[copy] && now-l.errAt >= int64(forgetting) {
			l.err, l.told = nil, 0
			continue
		}
		again = true
	}
	return again
}

// unpark starts the parked extent IOs. The column is locked.
func (c *column) unpark(e *effects) {
	for _, p := range c.snapshot() {
		if p.phase == phaseParked {
			p.start(e)
		}
	}
}

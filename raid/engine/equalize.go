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
	"weft.dev/weft/raid/checkpoint"
)

// equalLanes is the number of copies that an equalizer has under way at once.
const equalLanes = 8

// equalizer makes the copies of a volume equal: in each column it compares a leg in sync
// with the others, and writes to those that differ. Any leg in sync can be the one that is
// right, because the volume has not been read since the copies became unequal. It is the
// first, unless another one has no space for what the first has: see lacksSpace.
type equalizer struct {
	v *Volume

	mu      sync.Mutex
	lanes   []equalLane
	parts   []unit  // what is left to look at
	again   []*unit // those that failed
	flushes int     // columns whose flush was started, as the last step
	running bool    // an Equalize waits for it
	err     error
	ended   chan struct{} // closed when it stops running
	made    block.Size
	total   block.Size
}

// unit is the range that one copy makes equal. An empty one stands for a flush of the
// column.
type unit struct {
	column   int
	off, end int64

	right int             // the copy that others are made equal to, if it is in sync
	vain  uint            // how often it was tried and a leg had no space
	short block.MemberSet // those legs
}

// equalLane makes one copy after another.
type equalLane struct {
	trampoline
	q        *equalizer
	busy     bool  // guarded by q.mu
	unit     *unit // changed with q.mu locked, and by this lane alone; nil: none
	from, to int   // the legs being compared
	writing  bool  // to the second of them
	a, b     []byte
}

// Equalize makes all copies in sync equal. Call it before the volume is exposed, if a
// client that wrote to the volume may have crashed. IO waits until it has succeeded.
// After an error or the end of ctx it can be called again, also after a Drop, and
// continues where it stopped. Add legs to rebuild after it, with full set, because the
// regions that they miss are not known.
func (v *Volume) Equalize(ctx context.Context) error { return v.EqualizeParts(ctx, nil) }

// Part is the part of a column in which its copies may differ: the ranges of each leg if
// these are known, otherwise all of it.
type Part struct {
	Known  bool
	Ranges []checkpoint.Range // in order, not overlapping
}

// EqualizeParts is Equalize of a part of each column. If it is called again after an error,
// the parts of the first call count.
func (v *Volume) EqualizeParts(ctx context.Context, parts []Part) error {
	q, ended, err := v.beginEqualize(parts)
	if err != nil || q == nil {
		return err
	}
	select {
	case <-ended:
	case <-ctx.Done():
		q.stop(context.Cause(ctx))
		<-ended
	}
	return v.endEqualize(q)
}

// beginEqualize starts an equalizer, which closes ended when it stops. q is nil if there
// is nothing to make equal.
func (v *Volume) beginEqualize(parts []Part) (q *equalizer, ended chan struct{}, err error) {
	if q, err = v.equalizing(parts); err != nil {
		return nil, nil, fmt.Errorf("make copies equal: %w", err)
	}
	if q == nil {
		return nil, nil, nil
	}
	if ended, err = q.run(); err != nil {
		return nil, nil, fmt.Errorf("make copies equal: %w", err)
	}
	return q, ended, nil
}

// missesEqual notes what a leg may miss of what is made equal without it.
func (l *leg) missesEqual(parts []Part, column int, region uint) {
	if column >= len(parts) || !parts[column].Known {
		l.missed.setAll()
		return
	}
	for _, r := range parts[column].Ranges {
		l.missed.setBytes(r, region)
	}
}

// endEqualize lets waiting IO start if the equalizer has succeeded.
func (v *Volume) endEqualize(q *equalizer) error {
	if err := q.result(); err != nil {
		return fmt.Errorf("make copies equal: %w", err)
	}
	v.each(func(c *column, e *effects) {
		c.equalizing = false
		c.unpark(e)
	})
	v.equalizer.Store(nil)
	return nil
}

// equalizing returns the equalizer that has not finished, or a new one; nil if there is
// nothing to make equal.
func (v *Volume) equalizing(parts []Part) (*equalizer, error) {
	v.change.Lock()
	defer v.change.Unlock()
	if v.closed.Load() {
		return nil, block.ErrGone
	}
	if q := v.equalizer.Load(); q != nil || v.cfg.Layout.Copies == 1 {
		return q, nil
	}
	q := &equalizer{v: v, lanes: make([]equalLane, equalLanes)}
	q.plan(parts)
	for i := range q.lanes {
		q.lanes[i].q = q
		q.lanes[i].step = q.lanes[i].next
	}
	for k := range v.columns {
		c := &v.columns[k]
		c.lock()
		err := c.mayEqualize()
		c.unlock()
		if err != nil {
			return nil, err
		}
	}
	for k := range v.columns {
		c := &v.columns[k]
		c.lock()
		c.equalizing = true
		for i := range c.legs {
			if l := &c.legs[i]; l.state != InSync {
				l.missesEqual(parts, k, v.plan.region)
			}
		}
		c.unlock()
	}
	v.equalizer.Store(q)
	return q, nil
}

// plan lists what to look at. What the volume grows by later is equal.
func (q *equalizer) plan(parts []Part) {
	leg := q.v.plan.legSize(q.v.size.Load())
	for k := range q.v.columns {
		ranges := []checkpoint.Range{{Off: 0, End: leg}}
		if k < len(parts) && parts[k].Known {
			ranges = parts[k].Ranges
		}
		for _, r := range ranges {
			if end := min(r.End, leg); r.Off < end {
				q.parts = append(q.parts, unit{column: k, off: r.Off, end: end})
				q.total += block.Size(end - r.Off)
			}
		}
	}
}

// mayEqualize returns an error if copies cannot be made equal now. The column is locked.
func (c *column) mayEqualize() error {
	if n, _ := c.inSync(); n == 0 {
		return fmt.Errorf("column %d has no leg in sync", c.index)
	}
	for i := range c.legs {
		if l := &c.legs[i]; l.member() && l.state != InSync {
			return fmt.Errorf("leg %d.%d is %v", c.index, i, l.state)
		}
	}
	for _, p := range c.snapshot() {
		if p.phase == phaseStarted && p.kind != kindFlush {
			return errors.New("the volume is in use")
		}
	}
	return nil
}

// run starts the idle lanes.
func (q *equalizer) run() (ended chan struct{}, err error) {
	q.mu.Lock()
	if q.running {
		q.mu.Unlock()
		return nil, errors.New("it is under way")
	}
	q.running, q.err = true, nil
	q.ended = make(chan struct{})
	ended = q.ended
	idle := q.idle()
	q.mu.Unlock()
	for _, ln := range idle {
		ln.kick()
	}
	return ended, nil
}

// idle returns all lanes that have nothing to do, and marks them busy. q.mu is locked.
func (q *equalizer) idle() (idle []*equalLane) {
	for i := range q.lanes {
		if ln := &q.lanes[i]; !ln.busy {
			ln.busy = true
			idle = append(idle, ln)
		}
	}
	return idle
}

func (q *equalizer) stop(err error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.end(err)
}

// end makes Equalize return. q.mu is locked.
func (q *equalizer) end(err error) {
	if q.running {
		q.running, q.err = false, err
		close(q.ended)
	}
}

func (q *equalizer) result() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.err
}

func (q *equalizer) progress() Progress {
	if q == nil {
		return Progress{}
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	return Progress{q.made, q.total}
}

// next starts the lane's next unit.
func (ln *equalLane) next() {
	q := ln.q
	q.mu.Lock()
	switch {
	case !q.running && ln.unit != nil: // it was waiting for space
		q.again = append(q.again, ln.unit)
		ln.unit = nil
	case q.running && ln.unit == nil:
		ln.unit = q.take()
	}
	u := ln.unit
	ln.busy = u != nil
	q.mu.Unlock()
	if u == nil {
		return
	}
	if ln.a == nil {
		ln.a, ln.b = make([]byte, q.v.copyUnit), make([]byte, q.v.copyUnit)
	}
	q.v.copies(&q.v.columns[u.column], kindEqual, u.off, u.end, job{equal: ln})
}

// take returns the next unit, or nil if there is none now. A lane begins to flush the
// columns when no other lane is busy, and ends the equalizer after the last flush. q.mu
// is locked.
func (q *equalizer) take() *unit {
	if n := len(q.again); n > 0 {
		u := q.again[n-1]
		q.again = q.again[:n-1]
		return u
	}
	if len(q.parts) > 0 {
		part := &q.parts[0]
		u := &unit{column: part.column, off: part.off, end: min(part.off-part.off%q.v.copyUnit+q.v.copyUnit, part.end)}
		if part.off = u.end; part.off == part.end {
			q.parts = q.parts[1:]
		}
		return u
	}
	busy := 0
	for i := range q.lanes {
		if q.lanes[i].busy {
			busy++
		}
	}
	switch {
	case busy > 1:
		return nil
	case q.flushes < len(q.v.columns):
		q.flushes++
		return &unit{column: q.flushes - 1}
	}
	q.end(nil)
	return nil
}

// done ends one unit.
func (ln *equalLane) done(err error) {
	q := ln.q
	q.mu.Lock()
	u, pause := ln.unit, time.Duration(0)
	switch {
	case errors.Is(err, block.ErrFull) && ln.writing:
		pause = u.lacksSpace(ln.to)
	case err != nil:
		q.again = append(q.again, u)
		q.end(fmt.Errorf("column %d at %d: %w", u.column, u.off, err))
		ln.unit = nil
	default:
		q.made += block.Size(u.end - u.off)
		ln.unit = nil
	}
	q.mu.Unlock()
	if pause > 0 {
		q.v.clock.after(pause, ln.kick)
		return
	}
	ln.kick()
}

func (ln *equalLane) start(p *extentIO, e *effects) {
	n, first := p.c.inSync()
	switch {
	case p.op == block.OpFlush:
		ln.startFlush(p, e)
		return
	case n == 1: // a single copy need not be read, and may be unreadable
		p.finish(nil, e)
		return
	}
	ln.from, ln.to, ln.writing = first, -1, false
	if right := ln.unit.right; p.c.legs[right].state == InSync {
		ln.from = right
	}
	p.issue(ln.from, block.OpRead, ln.a[:p.length()], e)
}

func (ln *equalLane) startFlush(p *extentIO, e *effects) {
	for copy := range p.c.legs {
		if l := &p.c.legs[copy]; l.state == InSync && l.caches.Load() {
			l.flush(&p.legs[copy])
			p.issue(copy, block.OpFlush, nil, e)
		}
	}
	if !p.out() {
		p.finish(nil, e)
	}
}

func (ln *equalLane) answered(p *extentIO, s *legIO, err error, e *effects) {
	c := p.c
	state := s.state
	s.state = partNone
	if s.inc != c.legs[s.copy].inc {
		err = errLeft
	}
	if p.err == nil {
		p.err = err
	}
	switch {
	case p.out(): // flushes
	case c.aborted:
		p.finish(block.ErrGone, e)
	case p.err != nil || p.op == block.OpFlush:
		p.finish(p.err, e)
	case state == partPaused || c.suspended: // start again once resumed
		p.start(e)
	case s.copy != ln.from && !ln.writing && !bytes.Equal(ln.a[:p.length()], ln.b[:p.length()]):
		ln.writing = true
		p.issueCopy(s.copy, ln.a[:p.length()], e)
	default:
		ln.compare(p, e)
	}
}

// compare reads the next leg in sync, to compare it with the one that is right.
func (ln *equalLane) compare(p *extentIO, e *effects) {
	ln.writing = false
	for ln.to++; ln.to < len(p.c.legs); ln.to++ {
		if ln.to != ln.from && p.c.legs[ln.to].state == InSync {
			p.issue(ln.to, block.OpRead, ln.b[:p.length()], e)
			return
		}
	}
	p.finish(nil, e)
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"

	"weft.dev/weft/proto/block"
)

func (v *Volume) leg(column, copy int) (*column, *leg, error) {
	if column < 0 || column >= len(v.columns) || copy < 0 || copy >= v.cfg.Layout.Copies {
		return nil, nil, fmt.Errorf("leg %d.%d: the volume is %v", column, copy, v.cfg.Layout)
	}
	c := &v.columns[column]
	return c, &c.legs[copy], nil
}

// Add gives a leg its device. As InSync: the caller's record says that it is in
// sync; of a leg that is InSync already it replaces the device, and what the old
// one failed or will fail is sent to the new one. As Rebuilding: the leg is
// recorded stale, and is copied to; full if it may miss more than this volume has
// tracked since New. Before, nothing that an earlier device of the leg was given
// may be able to reach the medium any more.
//
// What a leg in sync with a volatile cache was sent before is not known to be
// durable: it is flushed at once, and dropped before that is done it misses all.
func (v *Volume) Add(column, copy int, dev block.Device, state State, full bool) error {
	v.change.Lock()
	defer v.change.Unlock()
	c, l, err := v.leg(column, copy)
	if err != nil {
		return fmt.Errorf("add leg: %w", err)
	}
	g := dev.Geometry()
	if err := v.fits(g); err != nil {
		return fmt.Errorf("add leg %d.%d: %w", column, copy, err)
	}
	var e effects
	c.lock()
	err = c.mayAdd(l, state)
	if err == nil {
		c.add(copy, dev, g, state, full, &e)
	}
	r, unknown := l.rebuild, l.state == InSync && l.cached.len() > 0
	c.unlock()
	if err != nil {
		return fmt.Errorf("add leg %d.%d as %v: %w", column, copy, state, err)
	}
	v.limitIO()
	e.run()
	if unknown {
		v.active.Add(1)
		v.piece(column, kindFlush, 0, 0, &block.IO{Op: block.OpFlush, Done: func(*block.IO) {}}).enter()
	}
	if r != nil {
		r.kick()
	}
	return nil
}

// fits reports what is wrong with a leg's geometry.
func (v *Volume) fits(g block.Geometry) error {
	want := block.Size(v.plan.legSize(v.size.Load()))
	switch {
	case g.Size < want:
		return fmt.Errorf("device has %v, want %v", g.Size, want)
	case g.BlockSize == 0 || v.cfg.BlockSize%g.BlockSize != 0:
		return fmt.Errorf("device has blocks of %v, the volume has %v", g.BlockSize, v.cfg.BlockSize)
	case g.MaxIO != 0 && g.MaxIO < v.cfg.BlockSize:
		return fmt.Errorf("device takes IOs of at most %v, the volume has blocks of %v", g.MaxIO, v.cfg.BlockSize)
	}
	return nil
}

// mayAdd says why a leg cannot be added in a state. The column is locked.
func (c *column) mayAdd(l *leg, state State) error {
	switch {
	case c.aborted || c.v.closed.Load():
		return fmt.Errorf("volume is closed: %w", block.ErrGone)
	case state != InSync && state != Rebuilding:
		return errors.New("a leg is added in sync or rebuilding")
	case state == Rebuilding && l.member():
		return fmt.Errorf("it is %v", l.state)
	case state == Rebuilding && l.missed == nil:
		return errors.New("there is no other copy")
	case state == InSync && l.state == InSync:
		return nil
	case state == Rebuilding && c.v.cfg.ReadOnly:
		return errors.New("nothing is written to it")
	case state == InSync && l.state != Absent && !c.v.cfg.ReadOnly:
		return fmt.Errorf("it is %v, so it must be rebuilt", l.state)
	case state == InSync && c.equalizing:
		return errors.New("copies are being made equal without it")
	case state == InSync && l.missed != nil && l.missed.len() > 0:
		return fmt.Errorf("it misses %d regions, so it must be rebuilt", l.missed.len())
	}
	return nil
}

// add gives a leg its device. The column is locked.
func (c *column) add(copy int, dev block.Device, g block.Geometry, state State, full bool, e *effects) {
	l := &c.legs[copy]
	again := l.state == InSync
	l.dev, l.maxIO, l.discards = dev, int64(g.MaxIO/c.v.cfg.BlockSize*c.v.cfg.BlockSize), g.DiscardUnit > 0
	l.caches.Store(g.VolatileCache && !c.v.cfg.ReadOnly)
	l.gen++
	l.err, l.told = nil, 0
	if again {
		l.again = true
		c.tryAgain(e)
		return
	}
	l.inc++
	l.state = state
	if state == InSync {
		if l.caches.Load() && !c.v.weak.forgetCached {
			l.cached.setAll() // who knows what was written before, and is not durable
		}
		c.unpark(e)
		return
	}
	if full {
		l.missed.setAll()
	}
	l.total = l.missed.len()
	l.rebuild = newRebuild(c, copy, l.inc)
}

// Renew gives a leg in sync, or one that has caught up and is recorded so, its
// device after the leg has lost what only its cache held. What is under way is sent
// to the new device from its beginning, whatever the old one still says of it. If
// the leg had answered writes and was not told to make them durable, that is
// ErrUnflushed: what the volume has acknowledged may be lost, and it must not go on.
func (v *Volume) Renew(column, copy int, dev block.Device) error {
	v.change.Lock()
	defer v.change.Unlock()
	c, l, err := v.leg(column, copy)
	if err != nil {
		return fmt.Errorf("renew leg: %w", err)
	}
	g := dev.Geometry()
	if err := v.fits(g); err != nil {
		return fmt.Errorf("renew leg %d.%d: %w", column, copy, err)
	}
	var e effects
	c.lock()
	if err = c.mayRenew(l); err == nil {
		c.renew(copy, dev, g, &e)
	}
	c.unlock()
	if err != nil {
		return fmt.Errorf("renew leg %d.%d: %w", column, copy, err)
	}
	v.limitIO()
	e.run()
	return nil
}

// mayRenew says why a leg cannot be renewed. The column is locked.
func (c *column) mayRenew(l *leg) error {
	switch {
	case c.aborted || c.v.closed.Load():
		return fmt.Errorf("volume is closed: %w", block.ErrGone)
	case l.state != InSync && l.state != CaughtUp:
		return fmt.Errorf("it is %v", l.state)
	case l.unflushed() && !c.v.weak.renewAnyway:
		return ErrUnflushed
	}
	return nil
}

// renew gives a leg its device after a loss of its cache. The column is locked.
func (c *column) renew(copy int, dev block.Device, g block.Geometry, e *effects) {
	l := &c.legs[copy]
	l.state = InSync
	if !c.v.weak.oldAnswers {
		l.born = l.gen + 1 // the device that add gives it
		for _, p := range c.snapshot() {
			p.subs[copy].restart()
		}
	}
	c.add(copy, dev, g, InSync, false, e)
	c.unpark(e)
}

// limitIO finds the largest IO that all legs take whole.
func (v *Volume) limitIO() {
	least := int64(0)
	for k := range v.columns {
		c := &v.columns[k]
		c.shards[0].mu.Lock()
		for i := range c.legs {
			if l := &c.legs[i]; l.member() && l.maxIO > 0 && (least == 0 || l.maxIO < least) {
				least = l.maxIO
			}
		}
		c.shards[0].mu.Unlock()
	}
	v.maxIO.Store(least)
}

// Drop goes on without a leg. The caller has durably recorded it as stale. The
// last leg in sync of a column is not dropped: ErrLastLeg. IOs that the leg's
// device still has go on when it gives them back; see the package comment.
func (v *Volume) Drop(column, copy int) error {
	v.change.Lock()
	defer v.change.Unlock()
	c, l, err := v.leg(column, copy)
	if err != nil {
		return fmt.Errorf("drop leg: %w", err)
	}
	var e effects
	c.lock()
	switch n, _ := c.inSync(); {
	case !l.member():
	case l.state == InSync && n == 1:
		err = fmt.Errorf("drop leg %d.%d: %w", column, copy, ErrLastLeg)
	default:
		c.drop(copy, &e)
	}
	c.unlock()
	e.run()
	return err
}

// drop takes a leg out, notes what it may miss, and lets go on what it held up.
// The column is locked.
func (c *column) drop(copy int, e *effects) {
	l := &c.legs[copy]
	if !c.v.weak.forgetCached {
		l.cached.moveTo(l.missed)
		l.flushing.moveTo(l.missed)
	}
	l.cached.clear()
	l.flushing.clear()
	if c.equalizing && !c.v.weak.halfEqual {
		l.missed.setAll()
	}
	if l.rebuild != nil {
		l.rebuild.stopped.Store(true)
		l.rebuild = nil
	}
	l.state, l.dev = Dropped, nil
	l.inc++
	for _, p := range c.snapshot() {
		s := &p.subs[copy]
		if p.kind == kindWrite && p.phase == phaseStarted && s.state != partNone && s.state != partDone && !c.v.weak.forgetUnderWay {
			c.misses(copy, p)
		}
		if s.state == partFailed || s.state == partPaused {
			s.state = partNone
		}
		switch p.kind {
		case kindWrite, kindFlush:
			p.settle(e)
		case kindCopy, kindEqual:
			p.job.dropped(p, e)
		}
	}
}

// snapshot lists the column's pieces, for a caller that changes them.
func (c *column) snapshot() (all []*piece) {
	for i := range c.shards {
		all = append(all, c.shards[i].snapshot()...)
	}
	return all
}

// Promote begins to read from a leg that is CaughtUp. The caller has durably
// recorded it as in sync. An error if it is not CaughtUp any more.
func (v *Volume) Promote(column, copy int) error {
	v.change.Lock()
	defer v.change.Unlock()
	c, l, err := v.leg(column, copy)
	if err != nil {
		return fmt.Errorf("promote leg: %w", err)
	}
	var e effects
	c.lock()
	defer e.run()
	defer c.unlock()
	if l.state != CaughtUp && l.state != InSync {
		return fmt.Errorf("promote leg %d.%d: it is %v", column, copy, l.state)
	}
	l.state = InSync
	c.unpark(&e)
	c.tryAgain(&e)
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"
	"math"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/checkpoint"
)

func (v *Volume) leg(column, copy int) (*column, *leg, error) {
	if column < 0 || column >= len(v.columns) || copy < 0 || copy >= v.cfg.Layout.Slots() {
		return nil, nil, fmt.Errorf("leg %d.%d: the volume is %v", column, copy, v.cfg.Layout)
	}
	c := &v.columns[column]
	return c, &c.legs[copy], nil
}

// Add gives a leg its device.
//
// As InSync, the caller's record says that the leg is in sync. If the leg is InSync
// already, its device is replaced: IO that the old device failed or will fail is sent to
// the new one. As Rebuilding, the leg is recorded stale and is copied to; set full if it
// may miss more than this volume has tracked since New. Before Add, it must be certain
// that no IO of an earlier device of the leg can still reach the medium.
//
// Earlier writes to a leg that has a volatile cache may not be durable, unless this volume has
// tracked them or copies them again. So the leg is flushed at once; if it is dropped before that
// is done, it misses everything.
func (v *Volume) Add(column, copy int, dev block.Device, state State, full bool) error {
	var lacks []checkpoint.Range
	if full {
		lacks = []checkpoint.Range{{Off: 0, End: math.MaxInt64}}
	}
	return v.addLeg(column, copy, dev, state, lacks)
}

// AddBehind adds a leg as Rebuilding that may miss what these ranges name, and what this volume has
// tracked since New.
func (v *Volume) AddBehind(column, copy int, dev block.Device, lacks []checkpoint.Range) error {
	return v.addLeg(column, copy, dev, Rebuilding, lacks)
}

func (v *Volume) addLeg(column, copy int, dev block.Device, state State, lacks []checkpoint.Range) error {
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
		c.add(copy, dev, g, state, lacks, &e)
	}
	r, unknown := l.rebuild, l.cached.len() > 0
	c.unlock()
	if err != nil {
		return fmt.Errorf("add leg %d.%d as %v: %w", column, copy, state, err)
	}
	v.limitIO()
	e.run()
	switch {
	case !unknown:
	case r != nil:
		v.copies(c, kindCopy, 0, 0, job{last: r, midway: true})
	default:
		v.active.Add(1)
		v.extentIO(column, kindFlush, 0, 0, &block.IO{Op: block.OpFlush, Done: func(*block.IO) {}}).enter()
	}
	if r != nil {
		r.kick()
	}
	return nil
}

// fits returns an error if a device's geometry does not suit the volume.
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

// mayAdd returns an error if a leg cannot be added in a state. The column is locked.
func (c *column) mayAdd(l *leg, state State) error {
	switch {
	case c.aborted || c.v.closed.Load():
		return fmt.Errorf("volume is closed: %w", block.ErrGone)
	case state == InSync:
		return c.mayAddInSync(l)
	case state == Rebuilding:
		return c.mayRebuild(l)
	}
	return errors.New("a leg is added in sync or rebuilding")
}

func (c *column) mayAddInSync(l *leg) error {
	switch {
	case l.state == InSync:
		return nil
	case l.state != Absent && !c.v.cfg.ReadOnly:
		return fmt.Errorf("it is %v, so it must be rebuilt", l.state)
	case c.equalizing:
		return errors.New("copies are being made equal without it")
	case l.missed != nil && l.missed.len() > 0:
		return fmt.Errorf("it misses %d regions, so it must be rebuilt", l.missed.len())
	}
	return nil
}

func (c *column) mayRebuild(l *leg) error {
	switch {
	case l.member():
		return fmt.Errorf("it is %v", l.state)
	case l.missed == nil:
		return errors.New("there is no other copy")
	case c.v.cfg.ReadOnly:
		return errors.New("nothing is written to it")
	}
	return nil
}

// add gives a leg its device. The column is locked.
func (c *column) add(copy int, dev block.Device, g block.Geometry, state State, lacks []checkpoint.Range, e *effects) {
	l := &c.legs[copy]
	again, tracked := l.state == InSync, l.lossCovered()
	l.dev, l.maxIO, l.discards = dev, int64(g.MaxIO/c.v.cfg.BlockSize*c.v.cfg.BlockSize), g.DiscardUnit > 0
	l.caches.Store(g.VolatileCache && !c.v.cfg.ReadOnly)
	l.gen++
	l.err, l.told = nil, 0
	if again {
		if !tracked {
			l.unknownCached(c)
		}
		l.again = true
		c.tryAgain(e)
		return
	}
	l.inc++
	l.state, l.unsure = state, false
	if state == InSync {
		l.unknownCached(c)
		c.unpark(e)
		return
	}
	for _, r := range lacks {
		l.missed.setBytes(r, c.v.plan.region)
	}
	if l.total = l.missed.len(); !tracked && l.total < l.missed.n {
		l.unknownCached(c)
	}
	l.skipped.Store(0)
	l.rebuild = newRebuild(c, copy, l.inc)
}

// unknownCached notes that writes to a leg with a cache which were not tracked may not be durable.
func (l *leg) unknownCached(c *column) {
	if l.caches.Load() && !c.v.weak.forgetCached {
		l.cached.setAll()
	}
}

// Renew gives a leg a new device after the leg has lost the contents of its volatile
// cache. The leg is in sync, or has caught up and is recorded in sync. IO under way is
// sent to the new device from its beginning, and answers of the old device to it no longer
// count. If the leg had acknowledged writes that were not flushed, Renew returns
// ErrUnflushed: acknowledged writes may be lost, and the leg must not continue.
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

// mayRenew returns an error if a leg cannot be renewed. The column is locked.
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

// renew gives a leg a new device after the loss of its cache. The column is locked.
func (c *column) renew(copy int, dev block.Device, g block.Geometry, e *effects) {
	l := &c.legs[copy]
	l.state = InSync
	if !c.v.weak.oldAnswers {
		l.born = l.gen + 1 // the device that add gives it
		for _, p := range c.snapshot() {
			p.legs[copy].restart()
		}
	}
	c.add(copy, dev, g, InSync, nil, e)
	c.unpark(e)
}

// limitIO sets maxIO to the size of the largest IO that all legs accept whole.
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

// Drop continues without a leg, which the caller has durably recorded as stale. It returns
// ErrLastLeg for the last leg in sync of a column. IOs that the leg's device still has
// continue when the device answers them; see the package comment.
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

// drop removes a leg, notes the regions that it may miss, and continues the IOs that waited
// for it. The column is locked.
func (c *column) drop(copy int, e *effects) {
	l := &c.legs[copy]
	l.covered = l.lossCovered()
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
	l.state, l.dev, l.withheld, l.starved = Dropped, nil, false, 0
	l.inc++
	for _, p := range c.snapshot() {
		s := &p.legs[copy]
		if p.kind == kindWrite && p.phase == phaseStarted && s.state != partNone && s.state != partDone && !c.v.weak.forgetUnderWay {
			c.misses(copy, p)
		}
		if s.state == partFailed || s.state == partPaused {
			s.state = partNone
		}
		p.waitedFor(s)
		switch p.kind {
		case kindWrite, kindFlush:
			p.settle(e)
		case kindCopy, kindEqual:
			p.job.dropped(p, e)
		}
	}
}

// Withhold keeps writes and flushes in which a leg takes part from being acknowledged, until the leg
// is dropped or Withhold is called with false. The owner does this before it flushes the other
// legs and records this one as stale: what is acknowledged without it is then on their media.
func (v *Volume) Withhold(column, copy int, yes bool) error {
	v.change.Lock()
	defer v.change.Unlock()
	c, l, err := v.leg(column, copy)
	if err != nil {
		return fmt.Errorf("withhold what a leg takes part in: %w", err)
	}
	var e effects
	c.lock()
	if l.withheld = yes && l.member(); !l.withheld {
		for _, p := range c.snapshot() {
			if p.kind == kindWrite || p.kind == kindFlush {
				p.settle(&e)
			}
		}
	}
	c.unlock()
	e.run()
	return nil
}

// snapshot returns the column's extent IOs, for a caller that changes the list.
func (c *column) snapshot() (all []*extentIO) {
	for i := range c.shards {
		all = append(all, c.shards[i].snapshot()...)
	}
	return all
}

// Promote starts reads from a leg that is CaughtUp and that the caller has durably recorded
// as in sync. It returns an error if the leg is no longer CaughtUp.
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

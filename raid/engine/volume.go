// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid"
)

// ErrUnflushed is why a leg that has lost its cache does not go on: it had
// acknowledged what it was not yet told to make durable.
var ErrUnflushed = errors.New("writes were acknowledged and not flushed")

// ErrLastLeg is why a leg is not dropped: no other of its column is in sync.
var ErrLastLeg = errors.New("last leg in sync")

// maxSize of a volume leaves room for sums of offsets.
const maxSize = block.Size(1 << 60)

// Volume is a volume's block device. All methods may be called concurrently.
type Volume struct {
	cfg      Config
	plan     plan
	clock    clock
	copyUnit int64 // bytes that a rebuild copies at once
	weak     guards
	columns  []column

	size   atomic.Int64
	maxIO  atomic.Int64 // the least of the legs', 0 if they take any
	pieces sync.Pool
	reqs   sync.Pool

	active  atomic.Int64 // IOs and copies that are not done
	closed  atomic.Bool
	drained chan struct{} // one slot: active may have come to 0

	// change serializes what changes the volume; it comes before all other locks.
	change    sync.Mutex
	equalizer atomic.Pointer[equalizer]
	events    events
}

// guards weaken single rules, so that tests can show that they would notice.
type guards struct {
	oneIsEnough    bool // a write that one leg has is acknowledged
	noRangeLock    bool // nothing waits for what it overlaps
	readsPass      bool // reads do not wait for writes
	copiesPass     bool // copies and writes do not wait for one another
	readRebuilding bool // legs that rebuild are read
	discardsDiffer bool // each leg discards as it likes
	forgetUnderWay bool // writes under way when a leg is dropped are not tracked
	forgetCached   bool // what a dropped leg had not made durable is not tracked
	dropCaughtUp   bool // a leg that erred after it had caught up is dropped at once
	halfEqual      bool // a leg dropped before copies were equal counts as equal
	unflushed      bool // a rebuilt leg is not flushed
	heldBlocks     bool // copies do not pass writes that are held
	forgetPassed   bool // a held write that copies pass goes on as if there were none
	lateReads      bool // reads are answered whoever may have written meanwhile
	renewAnyway    bool // a leg that has lost its cache goes on, whatever was in it
	oldAnswers     bool // what a leg answered before it lost its cache counts
}

// conflict is the rule of that name, as it may be weakened.
func (v *Volume) conflict(a, b kind) bool {
	if v.weak == (guards{}) {
		return conflict(a, b)
	}
	read, copy := a == kindRead || b == kindRead, a == kindCopy || b == kindCopy
	return !v.weak.noRangeLock && !(v.weak.readsPass && read) && !(v.weak.copiesPass && copy) && conflict(a, b)
}

// current is Config.Current, as it may be weakened.
func (v *Volume) current() bool { return v.cfg.Current == nil || v.weak.lateReads || v.cfg.Current() }

// New makes a volume without legs. IO to a column that has no leg in sync waits.
func New(cfg Config) (*Volume, error) { return newVolume(cfg, newClock()) }

func newVolume(cfg Config, c clock) (*Volume, error) {
	if err := cfg.complete(); err != nil {
		return nil, fmt.Errorf("make volume: %w", err)
	}
	v := &Volume{cfg: cfg, clock: c, copyUnit: copyUnit, plan: newPlan(cfg.Layout, cfg.Region), drained: make(chan struct{}, 1)}
	v.size.Store(int64(cfg.Size))
	v.pieces.New = newPiece
	v.reqs.New = func() any { return &request{v: v} }
	v.columns = make([]column, cfg.Layout.Stripes)
	regions := v.plan.regions(int64(cfg.Size))
	for k := range v.columns {
		c := &v.columns[k]
		c.v, c.index, c.legs = v, k, make([]leg, cfg.Layout.Copies)
		c.size = v.plan.legSize(int64(cfg.Size))
		for i := range c.legs {
			l := &c.legs[i]
			l.cached, l.flushing = newBitmap(regions), newBitmap(regions)
			if len(c.legs) > 1 {
				l.missed = newBitmap(regions)
			}
		}
		for i := range c.shards {
			c.shards[i].lastEnd = -1
		}
	}
	return v, nil
}

func (cfg *Config) complete() error {
	if err := cfg.Layout.Check(); err != nil {
		return err
	}
	if cfg.BlockSize == 0 {
		cfg.BlockSize = 4096
	}
	if cfg.Region == 0 {
		cfg.Region = raid.RegionSize(cfg.Layout.LegSize(cfg.Size))
	}
	switch {
	case cfg.BlockSize != 512 && cfg.BlockSize != 4096:
		return fmt.Errorf("block size %v: must be 512 or 4096", cfg.BlockSize)
	case cfg.Size == 0 || cfg.Size%cfg.BlockSize != 0 || cfg.Size > maxSize:
		return fmt.Errorf("size %v: must be a positive multiple of the block size, at most %v", cfg.Size, maxSize)
	case cfg.Region < 4*block.KiB || cfg.Region&(cfg.Region-1) != 0:
		return fmt.Errorf("region %v: must be a power of two from 4KiB", cfg.Region)
	}
	return nil
}

// Geometry is what the volume is like. It says that there is a volatile cache,
// whatever the legs have, because legs come and go. It has discards if all legs
// that are now in use have them.
func (v *Volume) Geometry() block.Geometry {
	g := v.geometry()
	if v.cfg.ReadOnly {
		return g
	}
	for k := range v.columns {
		c := &v.columns[k]
		c.shards[0].mu.Lock()
		can := c.discards()
		c.shards[0].mu.Unlock()
		if !can {
			return g
		}
	}
	g.DiscardUnit = v.cfg.BlockSize
	return g
}

func (v *Volume) geometry() block.Geometry {
	return block.Geometry{
		Size: block.Size(v.size.Load()), BlockSize: v.cfg.BlockSize, VolatileCache: !v.cfg.ReadOnly, ReadOnly: v.cfg.ReadOnly,
	}
}

// Suspend lets nothing more go to the legs, reads and rebuilds included; IO is
// held. What is under way is answered as ever. Suspended twice is suspended once.
func (v *Volume) Suspend() {
	v.each(func(c *column, _ *effects) { c.suspended = true })
}

// Resume ends Suspend.
func (v *Volume) Resume() {
	v.each(func(c *column, e *effects) {
		c.suspended = false
		c.unpark(e)
		c.tryAgain(e)
		e.rearm = c // no timer was set meanwhile
	})
}

// each does something to each column, locked, and then what follows from it.
func (v *Volume) each(do func(*column, *effects)) {
	v.change.Lock()
	defer v.change.Unlock()
	for k := range v.columns {
		var e effects
		c := &v.columns[k]
		c.lock()
		do(c, &e)
		c.unlock()
		e.run()
	}
}

// Close takes no more IO, waits until all that it took is answered, and stops
// rebuilds. When ctx ends first it is an error, and can be called again.
func (v *Volume) Close(ctx context.Context) error {
	v.closed.Store(true)
	if q := v.equalizer.Load(); q != nil {
		q.stop(block.ErrGone)
	}
	v.each(func(c *column, e *effects) {
		c.stopRebuilds()
		for _, p := range c.snapshot() {
			if p.kind == kindCopy && !p.out() && p.phase != phaseWaiting {
				p.finish(errLeft, e)
			}
		}
	})
	for v.active.Load() != 0 {
		select {
		case <-v.drained:
		case <-ctx.Done():
			return fmt.Errorf("close volume with %d IOs under way: %w", v.active.Load(), context.Cause(ctx))
		}
	}
	return nil
}

// Abort is for a volume that is given up: it sends nothing more to the legs, and
// answers all IO with block.ErrGone, held IO at once, the rest when the legs give
// it back. Writes that fail so may or may not be on each of the legs: equalize.
func (v *Volume) Abort() {
	v.closed.Store(true)
	v.each(func(c *column, e *effects) {
		c.aborted = true
		c.stopRebuilds()
		for _, p := range c.snapshot() {
			if !p.out() && (p.phase == phaseParked || p.phase == phaseStarted) {
				p.finish(block.ErrGone, e)
			}
		}
	})
}

func (c *column) stopRebuilds() {
	for i := range c.legs {
		if r := c.legs[i].rebuild; r != nil {
			r.stopped.Store(true)
		}
	}
}

// release ends what active counts.
func (v *Volume) release() {
	if v.active.Add(-1) == 0 && v.closed.Load() {
		select {
		case v.drained <- struct{}{}:
		default:
		}
	}
}

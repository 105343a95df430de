// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/figures"
	"weft.dev/weft/raid"
	"weft.dev/weft/raid/pace"
)

// ErrUnflushed is returned for a leg that has lost its volatile cache and cannot continue:
// it had acknowledged writes that were not flushed.
var ErrUnflushed = errors.New("writes were acknowledged and not flushed")

// ErrLastLeg is returned if a leg cannot be dropped because it is the only one of its
// column in sync.
var ErrLastLeg = errors.New("last leg in sync")

// maxSize limits the size of a volume, so that sums of offsets do not overflow.
const maxSize = block.Size(1 << 60)

// Volume is a volume's block device. All methods may be called concurrently.
type Volume struct {
	cfg      Config
	plan     plan
	clock    clock
	copyUnit int64 // bytes that a rebuild copies at once
	// flushUnit is how many bytes it copies before a flush.
	flushUnit int64
	weak      guards
	columns   []column

	size      atomic.Int64
	maxIO     atomic.Int64 // the smallest limit of the legs, 0 if they have none
	extentIOs sync.Pool
	reqs      sync.Pool

	active  atomic.Int64 // IOs and copies that are not complete
	closed  atomic.Bool
	drained chan struct{} // one slot: active may have become 0

	// change serializes changes of the volume. It is locked before all other locks.
	change    sync.Mutex
	equalizer atomic.Pointer[equalizer]
	events    events

	figures struct {
		waits figures.Waits // held IOs of users, those that a dropped leg did not answer, and parked ones
		long  figures.Meter // users' IOs of several extents
		off   bool          // nothing is counted; for BenchmarkCounting alone

		mu    sync.Mutex
		taken Figures // from the shards
	}

	healing sync.Mutex // guards heals
	heals   *Scrub     // nil until a range is to be healed

	background   pace.Background
	rebuildLimit pace.Limiter // guarded by background
}

// guards weaken single rules, so that tests can show that a loss of the rule is noticed.
type guards struct {
	oneIsEnough    bool // a write that one leg has is acknowledged
	noRangeLock    bool // overlapping extent IOs do not wait for one another
	readsPass      bool // reads do not wait for writes
	copiesPass     bool // copies and writes do not wait for one another
	readRebuilding bool // legs that rebuild are read
	discardsDiffer bool // discards are passed to the legs, which may read differently after
	forgetUnderWay bool // writes under way when a leg is dropped are not tracked
	forgetCached   bool // writes that a dropped leg had not flushed are not tracked
	dropCaughtUp   bool // a leg that fails after it has caught up is dropped at once
	halfEqual      bool // a leg dropped before copies were equal counts as equal
	unflushed      bool // a rebuilt leg is not flushed
	heldBlocks     bool // copies do not pass held writes
	scrubPasses    bool // a scrub and writes do not wait for one another
	forgetPassed   bool // a held write ignores the copies that pass it
	lateReads      bool // reads are answered even if another host may have written meanwhile
	renewAnyway    bool // a leg that has lost its cache continues, whatever was in it
	oldAnswers     bool // answers from before a leg lost its cache count
	sourceAlone    bool // only the leg in sync is asked where it has data
	endsAnyway     bool // a region counts as copied although users have written what its leg had no space for
}

// conflict is the rule of that name, unless a guard weakens it.
func (v *Volume) conflict(a, b kind) bool {
	if v.weak == (guards{}) {
		return conflict(a, b)
	}
	read, copy := a == kindRead || b == kindRead, a == kindCopy || b == kindCopy
	scrub := a == kindScrub || b == kindScrub || a == kindRepair || b == kindRepair
	return !v.weak.noRangeLock && !(v.weak.scrubPasses && scrub) && !(v.weak.readsPass && read) && !(v.weak.copiesPass && copy) && conflict(a, b)
}

// current is Config.Current, unless a guard weakens it.
func (v *Volume) current() bool { return v.cfg.Current == nil || v.weak.lateReads || v.cfg.Current() }

// New makes a volume without legs. IO to a column without a leg in sync waits.
func New(cfg Config) (*Volume, error) { return newVolume(cfg, newClock()) }

func newVolume(cfg Config, c clock) (*Volume, error) {
	if err := cfg.complete(); err != nil {
		return nil, fmt.Errorf("make volume: %w", err)
	}
	v := &Volume{cfg: cfg, clock: c, copyUnit: copyUnit, flushUnit: flushUnit, plan: newPlan(cfg.Layout, cfg.Region), drained: make(chan struct{}, 1), rebuildLimit: pace.NewLimiter(cfg.RebuildRate)}
	v.size.Store(int64(cfg.Size))
	v.extentIOs.New = newExtentIO
	v.reqs.New = func() any { return &request{v: v} }
	v.columns = make([]column, cfg.Layout.Stripes)
	regions := v.plan.regions(int64(cfg.Size))
	for k := range v.columns {
		c := &v.columns[k]
		c.v, c.index, c.legs = v, k, make([]leg, cfg.Layout.Slots())
		c.size = v.plan.legSize(int64(cfg.Size))
		c.emptied = make(chan struct{}, 1)
		for i := range c.legs {
			l := &c.legs[i]
			l.cached, l.flushing = newBitmap(regions), newBitmap(regions)
			if len(c.legs) > 1 {
				l.missed, l.anew = newBitmap(regions), newBitmap(regions)
			}
		}
		for i := range c.shards {
			c.shards[i].lastEnd, c.shards[i].legs = -1, make([]figures.Tally, len(c.legs))
		}
	}
	return v, nil
}

func (cfg *Config) complete() error {
	if err := cfg.Layout.Check(); err != nil {
		return err
	}
	if cfg.Layout.Kind() != block.Mirror {
		return fmt.Errorf("layout %v: only mirrors can be served", cfg.Layout)
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

// Geometry returns the geometry of the volume. A writable volume always reports a volatile
// cache, whatever its legs have, because legs come and go. It supports discards if all
// legs now in use do.
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

// Suspend stops all IO to the legs, reads and rebuilds included; new IO is held. IO under
// way is answered as usual. A second Suspend has no effect.
func (v *Volume) Suspend() {
	v.each(func(c *column, _ *effects) { c.suspended = true })
}

// Resume ends Suspend.
func (v *Volume) Resume() {
	v.each(func(c *column, e *effects) {
		c.suspended = false
		c.unpark(e)
		c.tryAgain(e)
		e.rearm = c // no timer was set while it was suspended
	})
}

// each calls do for each column, locked, and then runs the effects.
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

// Close accepts no more IO, stops rebuilds, and waits until all accepted IO is answered. If
// ctx ends first, it returns an error and can be called again.
func (v *Volume) Close(ctx context.Context) error {
	v.closed.Store(true)
	if q := v.equalizer.Load(); q != nil {
		q.stop(block.ErrGone)
	}
	v.each(func(c *column, e *effects) {
		c.stopRebuilds()
		for _, p := range c.snapshot() {
			if (p.kind == kindCopy || p.kind == kindScrub || p.kind == kindRepair) && !p.out() && p.phase != phaseWaiting {
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

// Abort gives a volume up: it sends nothing more to the legs and answers all IO with
// block.ErrGone, held IO at once and the rest when the legs have answered it. Each leg may
// or may not have the writes that failed so; call Equalize before the volume is used again.
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

// release notes that an IO or copy is complete.
func (v *Volume) release() {
	if v.active.Add(-1) == 0 && v.closed.Load() {
		select {
		case v.drained <- struct{}{}:
		default:
		}
	}
}

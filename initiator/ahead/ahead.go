// SPDX-License-Identifier: Apache-2.0

// Package ahead copies to a leg what it lacks before the leg takes part in I/O, for a data path that would copy it as
// fast as it can afterwards, and knows no other speed.
//
// Users go on to write to the legs in sync meanwhile. Device-mapper's log of a lost leg notes where they do. A region that
// is copied here counts only if nobody has written to it since that log began.
package ahead

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/dm/mirror"
	"weft.dev/weft/raid/pace"
)

const (
	piece   = 512 << 10 // what a lane copies at a time,
	command = 128 << 10 // in parts of this size at once
	lanes   = 4

	// A piece is tried so many times, with tryAgain in between: a path may be moving, and a leg that does not answer is
	// given up by others.
	attempts = 15
	tryAgain = time.Second

	// flushUnit is how much is copied between two flushes of the leg, and flushEvery how long that takes at most.
	flushUnit  = 256 << 20
	flushEvery = 10 * time.Second
)

// Config describes what is to be copied.
type Config struct {
	Lacks  mirror.LogImage // the regions that are dirty
	Region int64           // bytes in each; the last one may be shorter
	Size   int64           // of the leg
	// Read reads from a leg in sync, Write writes to this one, and Flush makes all that was written durable. They are
	// called from several goroutines, and may block until the leg they ask is given up.
	Read, Write func(p []byte, off int64) error
	Flush       func() error
	// Skip reports whether a region need not be copied now, since users have written there.
	Skip func(region uint64) bool
	// Pace and Rate slow it down, together with all that uses them. Now is their clock.
	Pace *pace.Background
	Rate *pace.Limiter
	Now  func() int64
}

// Copy copies what a leg lacks once. Its methods may be called from any goroutine, Run only once.
type Copy struct {
	cfg Config

	mu        sync.Mutex
	left      mirror.LogImage // what is not copied, or not durable
	next      uint64
	done      int64
	unflushed []uint64 // regions that are copied, and not durable yet
	flushes   bool     // a flush is under way,
	more      bool     // and somebody wants another one
	flushed   time.Time
	speed     pace.Speedometer
}

// New makes a copy, which begins with Run.
func New(cfg Config) *Copy { return &Copy{cfg: cfg, left: cfg.Lacks.Clone()} }

// Left returns what the leg still lacks, beside what users have written since.
func (c *Copy) Left() mirror.LogImage {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.left.Clone()
}

// Progress says how much is copied, of how much, and how much of it in a second lately (0: not known).
func (c *Copy) Progress() (done, total, speed block.Size) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return block.Size(c.done), block.Size(c.cfg.Lacks.CountDirty()) * block.Size(c.cfg.Region), c.speed.Lately()
}

// Run copies until all is copied and durable, something fails, or ctx ends. No call of it is under way when it
// returns.
func (c *Copy) Run(ctx context.Context) error {
	c.flushed = time.Now()
	group, ctx := errgroup.WithContext(ctx)
	for range lanes {
		group.Go(func() error { return c.lane(ctx) })
	}
	err := group.Wait()
	if err == nil {
		err = c.flush()
	}
	if err != nil {
		return fmt.Errorf("copy ahead: %w", err)
	}
	return nil
}

// lane copies one region after another. One that cannot be read is left.
func (c *Copy) lane(ctx context.Context) error {
	p := make([]byte, piece)
	for {
		region, ok := c.take()
		if !ok {
			return c.flush()
		}
		err := c.whole(ctx, p, region)
		if err == nil && c.copied(region) {
			err = c.flush()
		}
		if err != nil && !errors.Is(err, block.ErrMedium) {
			return err
		}
	}
}

// whole copies a region.
func (c *Copy) whole(ctx context.Context, p []byte, region uint64) error {
	end := min(int64(region+1)*c.cfg.Region, c.cfg.Size)
	for off := int64(region) * c.cfg.Region; off < end; {
		n := min(piece, end-off)
		if err := c.insist(ctx, p[:n], off); err != nil {
			return err
		}
		off += n
	}
	return nil
}

// take returns the next region to copy.
func (c *Copy) take() (region uint64, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for ; c.next < c.cfg.Lacks.Regions(); c.next++ {
		if c.cfg.Lacks.Dirty(c.next) && !c.cfg.Skip(c.next) {
			c.next++
			return c.next - 1, true
		}
	}
	return 0, false
}

// insist copies a piece, in several attempts.
func (c *Copy) insist(ctx context.Context, p []byte, off int64) error {
	for attempt := 1; ; attempt++ {
		err := c.step(ctx, p, off)
		final := errors.Is(err, block.ErrMedium) || errors.Is(err, errors.ErrUnsupported)
		if err == nil || final || attempt == attempts || ctx.Err() != nil {
			return err
		}
		if err := sleep(ctx, tryAgain); err != nil {
			return err
		}
	}
}

// step copies a piece, and waits for as long as the pace requires.
func (c *Copy) step(ctx context.Context, p []byte, off int64) error {
	for {
		rest := c.cfg.Pace.Begin(c.cfg.Now())
		if rest == 0 {
			break
		}
		if err := sleep(ctx, rest); err != nil {
			return err
		}
	}
	began := c.cfg.Now()
	err := parts(p, off, c.cfg.Read)
	if err == nil {
		err = parts(p, off, c.cfg.Write)
	}
	pause := c.cfg.Pace.End(c.cfg.Rate, began, c.cfg.Now(), int64(len(p)))
	if err != nil {
		return err
	}
	c.count(int64(len(p)))
	return sleep(ctx, pause)
}

func (c *Copy) count(n int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.done += n
	c.speed.Add(c.cfg.Now(), n)
}

// copied notes that a region is copied, and reports whether the leg is to be flushed.
func (c *Copy) copied(region uint64) (flush bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.unflushed = append(c.unflushed, region)
	return int64(len(c.unflushed))*c.cfg.Region >= flushUnit || time.Since(c.flushed) >= flushEvery
}

// flush makes durable what is copied. Only then the leg lacks it no more: it may lose its cache. If a flush is under way,
// another one follows it.
func (c *Copy) flush() error {
	for {
		c.mu.Lock()
		regions := c.unflushed
		if c.flushes || len(regions) == 0 {
			c.more = c.flushes
			c.mu.Unlock()
			return nil
		}
		c.unflushed, c.flushes, c.flushed = nil, true, time.Now()
		c.mu.Unlock()
		err := c.cfg.Flush()
		if more := c.durable(regions, err); err != nil || !more {
			return err
		}
	}
}

// durable notes the end of a flush, and reports whether another one is wanted.
func (c *Copy) durable(regions []uint64, err error) (more bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	more, c.flushes, c.more = c.more, false, false
	for _, r := range regions {
		if err == nil {
			c.left.Unmark(r)
		}
	}
	return more
}

// parts reads or writes a piece in several commands at once.
func parts(p []byte, off int64, do func(p []byte, off int64) error) error {
	var group errgroup.Group
	for at := 0; at < len(p); at += command {
		group.Go(func() error { return do(p[at:min(at+command, len(p))], off+int64(at)) })
	}
	return group.Wait()
}

func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return ctx.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}

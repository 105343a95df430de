// SPDX-License-Identifier: Apache-2.0

// Package compare compares the copies of a volume that is in use, for a data path that cannot lock a range
// of it.
//
// Copies that are equal when they are read are as they should be. Copies that differ may do so because a write
// is under way, which has reached some of them: for microseconds, or for hours where one of them has no space. So
// what differs is read again, and counts as different if each copy held the same each time, and there was a moment
// in between at which no write was under way. All writes from before have ended at such a moment.
package compare

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid"
)

const (
	piece   = 512 << 10 // what is read of each copy at a time,
	command = 128 << 10 // in parts of this size at once
	unit    = int64(block.ScrubUnit)

	// What differs is read again after firstWait, and then after twice as long each time, lastWait at
	// most. It differs if it was the same enough times one after the other. After mostTimes, in half a minute, it
	// counts as not compared.
	firstWait = 50 * time.Millisecond
	lastWait  = 1600 * time.Millisecond
	enough    = 4
	mostTimes = 24

	// A piece that could not be read for another reason than the medium of a copy, or whose copies are others now,
	// is read again after noAnswer; after mostAttempts it counts as not compared.
	noAnswer     = time.Second
	mostAttempts = 300

	// restEvery is how often users' writes are looked at while a range is to be read again.
	restEvery = 10 * time.Millisecond
)

// Copy is a copy in sync of a column.
type Copy struct {
	Copy int
	Of   string // its leg, and how that is attached: another one if either changes
	// Read reads from the leg. [block.ErrMedium] says that something in this range cannot be read; any
	// other error, that it may be tried again. It may block until the leg is given up.
	Read func(p []byte, off int64) error
}

// Config describes a comparison.
type Config struct {
	Columns int
	LegSize func() int64 // of each column; it may grow
	// Copies lists the copies in sync of a column. settled: they stay so, as far as the host knows.
	Copies func(column int) (all []Copy, settled bool)
	// Rest reports whether no write of users is under way at this moment.
	Rest  func() bool
	Rate  block.Size // most that is read of each copy in a second; 0: no limit
	From  volume.ScrubPosition
	Found func(volume.ScrubFinding) // one at a time
	// Waits is called when a range could not be compared or repaired, and is to be tried again: with each reason once,
	// until a range was compared.
	Waits  func(error)
	Repair *Repair // nil: nothing is repaired
}

// Comparison compares the copies of a volume once, from the beginning to the end. Its methods may be called
// from any goroutine, Run only once.
type Comparison struct {
	cfg Config

	mu    sync.Mutex
	rate  block.Size
	at    volume.ScrubPosition // everything before it is compared and told
	size  int64                // of each column, as far as is known
	sizes map[int]int64        // of the columns before it when they were compared to their ends
	alone block.Size
	// proceed ends the wait for Proceed; nil: nothing waits.
	proceed chan struct{}
}

// New makes a comparison, which begins with Run.
func New(cfg Config) *Comparison {
	return &Comparison{cfg: cfg, rate: cfg.Rate, at: cfg.From, size: cfg.LegSize(), sizes: map[int]int64{}}
}

// SetRate changes Config.Rate.
func (c *Comparison) SetRate(rate block.Size) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.rate = rate
}

// Position is the place from which another comparison would go on.
func (c *Comparison) Position() volume.ScrubPosition {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.at
}

// Progress says how much of a copy of each column was compared, of how much, and for how much of that there
// were no two copies, or they changed all the time.
func (c *Comparison) Progress() (done, total, alone block.Size) {
	c.mu.Lock()
	defer c.mu.Unlock()
	done, total, alone = block.Size(c.size)*block.Size(c.at.Column)+c.at.Off, block.Size(c.size)*block.Size(c.cfg.Columns), c.alone
	for _, size := range c.sizes { // a column that has grown since
		alone += block.Size(max(0, c.size-size))
	}
	return min(done, total), total, alone
}

// Run compares until everything was compared, or ctx ends.
func (c *Comparison) Run(ctx context.Context) error {
	for why, attempts := "", 0; ; {
		at, n, err := c.next()
		if err == nil && n == 0 {
			return nil
		}
		began := time.Now()
		p := &pieceOf{c: c, column: at.Column, off: int64(at.Off), n: n}
		var found []volume.ScrubFinding
		var alone int64
		if err == nil {
			found, alone, err = p.compare(ctx)
		}
		if ctx.Err() != nil {
			return fmt.Errorf("compare copies: %w", context.Cause(ctx))
		}
		if err != nil {
			if err.Error() != why {
				why = err.Error()
				c.cfg.Waits(err)
			}
			if n > 0 {
				attempts++
			}
			if attempts < mostAttempts {
				sleep(ctx, noAnswer)
				continue
			}
			alone = n
		}
		why, attempts = "", 0
		for _, f := range found {
			c.cfg.Found(f)
		}
		if p.repair(ctx, found); ctx.Err() != nil {
			return fmt.Errorf("compare copies: %w", context.Cause(ctx))
		}
		// For as long as the copies were read, they are left to users, and for longer if the rate requires it.
		c.done(at, n, alone)
		sleep(ctx, max(p.reads, c.share(n)-time.Since(began)))
	}
}

// next is the next piece; of 0 bytes: there is none.
func (c *Comparison) next() (at volume.ScrubPosition, n int64, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	size := c.cfg.LegSize()
	if size <= 0 {
		return c.at, 0, errNoSize
	}
	c.size = size
	for c.at.Column < c.cfg.Columns-1 && int64(c.at.Off) >= size {
		c.sizes[c.at.Column] = size
		c.at = volume.ScrubPosition{Column: c.at.Column + 1}
	}
	return c.at, max(0, min(piece-int64(c.at.Off)%piece, size-int64(c.at.Off))), nil
}

// done notes that a piece is compared.
func (c *Comparison) done(at volume.ScrubPosition, n, alone int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.at = volume.ScrubPosition{Column: at.Column, Off: at.Off + block.Size(n)}
	c.alone += block.Size(alone)
}

// share is how long a piece takes at the rate.
func (c *Comparison) share(n int64) time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.rate == 0 {
		return 0
	}
	return time.Duration(float64(n) / float64(c.rate) * float64(time.Second))
}

func sleep(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// pieceOf is the comparison of one piece.
type pieceOf struct {
	c      *Comparison
	column int
	off, n int64
	reads  time.Duration // how long it has read
}

// A reading has the data of each copy as it was read once. bad marks the units that could not be read.
type reading struct {
	copies []Copy
	data   [][]byte
	bad    [][]bool
}

var (
	errOthers = errors.New("other copies are in sync now")
	errNoSize = errors.New("the size of the columns is not known at this moment")
)

// lasts is for how long what differs has been the same.
type lasts struct {
	times int
	rest  bool // no write was under way in between
}

func (l lasts) differs() bool { return l.times >= enough && l.rest }

// compare returns what differs, and how much could not be compared.
func (p *pieceOf) compare(ctx context.Context) (found []volume.ScrubFinding, alone int64, err error) {
	copies, _ := p.c.cfg.Copies(p.column)
	if len(copies) < 2 {
		return nil, p.n, nil
	}
	was, err := p.read(copies)
	if err != nil {
		return nil, 0, err
	}
	differ := map[int64]lasts{} // by offset
	for off := int64(0); off < p.n; off += unit {
		if !was.equal(off) {
			differ[off] = lasts{}
		}
	}
	for wait, turn := firstWait, 0; turn < mostTimes && !all(differ); wait, turn = min(2*wait, lastWait), turn+1 {
		rest := p.rests(ctx, wait)
		is, settled, err := p.again(ctx, copies)
		if err != nil {
			return nil, 0, err
		}
		for off, l := range differ {
			switch {
			case is.equal(off):
				delete(differ, off)
			case settled && is.same(was, off):
				differ[off] = lasts{l.times + 1, l.rest || rest}
			default:
				differ[off] = lasts{}
			}
		}
		was = is
	}
	found, alone = p.tell(was, differ)
	return found, alone, nil
}

// again reads copies again, which must still be those in sync. settled is as in Config.Copies, all the time.
func (p *pieceOf) again(ctx context.Context, copies []Copy) (is reading, settled bool, err error) {
	_, settled = p.c.cfg.Copies(p.column)
	if is, err = p.read(copies); err != nil {
		return is, false, err
	}
	now, still := p.c.cfg.Copies(p.column)
	if !slices.EqualFunc(copies, now, func(a, b Copy) bool { return a.Copy == b.Copy && a.Of == b.Of }) {
		return is, false, errOthers
	}
	return is, settled && still, ctx.Err()
}

func all(differ map[int64]lasts) bool {
	for _, l := range differ {
		if !l.differs() {
			return false
		}
	}
	return true
}

// rests waits, and reports whether there was a moment without a write.
func (p *pieceOf) rests(ctx context.Context, wait time.Duration) (rest bool) {
	for end := time.Now().Add(wait); ctx.Err() == nil; {
		rest = rest || p.c.cfg.Rest()
		left := time.Until(end)
		if left <= 0 {
			return rest
		}
		if !rest {
			left = min(left, restEvery)
		}
		sleep(ctx, left)
	}
	return false
}

// tell lists what differs, and counts what was never the same for long enough.
func (p *pieceOf) tell(r reading, differ map[int64]lasts) (found []volume.ScrubFinding, alone int64) {
	for off := int64(0); off < p.n; off += unit {
		switch l, ok := differ[off]; {
		case !ok:
		case !l.differs():
			alone += p.end(off) - off
		default:
			found = join(found, r.finding(p, off))
		}
	}
	return found, alone
}

func (p *pieceOf) end(off int64) int64 { return min(off+unit, p.n) }

// read reads all copies, at once.
func (p *pieceOf) read(copies []Copy) (reading, error) {
	r := reading{copies: copies, data: make([][]byte, len(copies)), bad: make([][]bool, len(copies))}
	errs := make([]error, len(copies))
	began := time.Now()
	var all sync.WaitGroup
	for i := range copies {
		all.Go(func() { errs[i] = p.readOne(&r, i) })
	}
	all.Wait()
	p.reads += time.Since(began)
	return r, errors.Join(errs...)
}

// readOne reads one copy: as a whole, or unit by unit if a part of it cannot be read.
func (p *pieceOf) readOne(r *reading, i int) error {
	r.data[i], r.bad[i] = make([]byte, p.n), make([]bool, (p.n+unit-1)/unit)
	err := p.readParts(r.copies[i], r.data[i])
	if !errors.Is(err, block.ErrMedium) {
		return err
	}
	for off := int64(0); off < p.n; off += unit {
		err := r.copies[i].Read(r.data[i][off:p.end(off)], p.off+off)
		if err != nil && !errors.Is(err, block.ErrMedium) {
			return err
		}
		r.bad[i][off/unit] = err != nil
	}
	return nil
}

// readParts reads one copy, in several commands at once.
func (p *pieceOf) readParts(c Copy, data []byte) error {
	errs := make([]error, (len(data)+command-1)/command)
	var parts sync.WaitGroup
	for i := range errs {
		parts.Go(func() {
			at := i * command
			errs[i] = c.Read(data[at:min(at+command, len(data))], p.off+int64(at))
		})
	}
	parts.Wait()
	return errors.Join(errs...)
}

// at returns the data of one copy in the unit at off, or nil if that could not be read.
func (r reading) at(copy int, off int64) []byte {
	if r.bad[copy][off/unit] {
		return nil
	}
	return r.data[copy][off:min(off+unit, int64(len(r.data[copy])))]
}

// equal reports whether all copies could be read in a unit, and held the same.
func (r reading) equal(off int64) bool {
	first := r.at(0, off)
	for i := range r.copies {
		if is := r.at(i, off); is == nil || !bytes.Equal(is, first) {
			return false
		}
	}
	return true
}

// same reports whether each copy held in a unit what it had held before.
func (r reading) same(was reading, off int64) bool {
	for i := range r.copies {
		if a, b := r.at(i, off), was.at(i, off); (a == nil) != (b == nil) || !bytes.Equal(a, b) {
			return false
		}
	}
	return true
}

// finding describes the unit at off of a piece.
func (r reading) finding(p *pieceOf, off int64) volume.ScrubFinding {
	f := volume.ScrubFinding{Column: p.column, Off: block.Size(p.off + off), Length: block.Size(p.end(off) - off)}
	var read []int
	of := map[int][]byte{}
	for i, c := range r.copies {
		if is := r.at(i, off); is == nil {
			f.Unreadable = append(f.Unreadable, c.Copy)
		} else {
			read, of[c.Copy] = append(read, c.Copy), is
		}
	}
	f.Equal = raid.Equal(read, func(copy int) []byte { return of[copy] })
	f.Right = p.c.right(p.column, f.Equal, len(r.copies))
	return f
}

// join adds a finding, to the one before it if it continues that.
func join(all []volume.ScrubFinding, f volume.ScrubFinding) []volume.ScrubFinding {
	if n := len(all); n > 0 {
		last := &all[n-1]
		if last.Off+last.Length == f.Off && last.Right == f.Right && slices.Equal(last.Unreadable, f.Unreadable) && slices.EqualFunc(last.Equal, f.Equal, slices.Equal) {
			last.Length += f.Length
			return all
		}
	}
	return append(all, f)
}

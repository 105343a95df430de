// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"context"
	"errors"
	"fmt"
	"time"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/raid"
)

// mostHolds is how often a repair tries to have a column to itself, noAnswer apart, and restFor how long it waits each
// time for a moment without a write.
const (
	mostHolds = 60
	restFor   = 200 * time.Millisecond
)

// Repair says how what differs is made equal again. What was found in a piece is told first, and nothing of it is
// repaired before Proceed. Then, alone with the column, the copies are read again, so that what users have written since
// is not lost; which one is right is decided anew, by raid.Right; all copies are written, and read once more.
type Repair struct {
	// Copies of each column, as the volume is to have them. Named is the copy of each column that is right if nothing else
	// tells; -1, or no entry: none.
	Copies int
	Named  []int
	// Alone calls do while no I/O of users is under way and none begins. An error that is not of do says that do was not
	// called: this cannot be had at the moment. Nil: nothing is repaired, as in a volume that is read only.
	Alone func(ctx context.Context, column int, do func(Column)) error
	// Ended is called with what became of a finding, in the order in which they were told, and for each of them.
	Ended func(volume.ScrubFinding, volume.ScrubOutcome, error)
}

// Column is a column that is repaired, in which nobody else writes.
type Column struct {
	Copies []Copy // in sync
	// Write writes to all copies, and to the drives of those past their caches. A copy that fails it is given up.
	Write func(p []byte, off int64) error
}

var (
	errAlone  = errors.New("it has no second copy in sync any more")
	errWrites = errors.New("writes of users never rest")
)

// right is raid.Right for a column; -1 where nothing is repaired.
func (c *Comparison) right(column int, groups [][]int, inSync int) int {
	r := c.cfg.Repair
	if r == nil || r.Alone == nil {
		return -1
	}
	named := -1
	if column < len(r.Named) {
		named = r.Named[column]
	}
	return raid.Right(groups, inSync, r.Copies, named)
}

// Asks reports whether the comparison waits for Proceed: what it has found is to be recorded first.
func (c *Comparison) Asks() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.proceed != nil
}

// Proceed lets it repair what it has told.
func (c *Comparison) Proceed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.proceed != nil {
		close(c.proceed)
		c.proceed = nil
	}
}

// ask waits for Proceed.
func (c *Comparison) ask(ctx context.Context) {
	proceed := make(chan struct{})
	c.mu.Lock()
	c.proceed = proceed
	c.mu.Unlock()
	select {
	case <-proceed:
	case <-ctx.Done():
	}
}

// mended is what became of a finding.
type mended struct {
	outcome volume.ScrubOutcome
	err     error
}

// repair repairs what was found in a piece, and told.
func (p *pieceOf) repair(ctx context.Context, found []volume.ScrubFinding) {
	r := p.c.cfg.Repair
	if r == nil || len(found) == 0 {
		return
	}
	all := make([]mended, len(found))
	known := false
	for i, f := range found {
		all[i].outcome = volume.ScrubNotKnown
		known = known || f.Right >= 0
	}
	if known {
		p.c.ask(ctx)
		p.mendAll(ctx, found, all)
	}
	for i := 0; i < len(found) && ctx.Err() == nil; i++ {
		r.Ended(found[i], all[i].outcome, all[i].err)
	}
}

// mendAll has the column to itself, once that can be had, and repairs what is known.
func (p *pieceOf) mendAll(ctx context.Context, found []volume.ScrubFinding, all []mended) {
	why, told := error(nil), ""
	for range mostHolds {
		why = errWrites
		// What waits for a write of users that waits itself, as for space, would hold up all others.
		if p.rests(ctx, restFor) {
			why = p.c.cfg.Repair.Alone(ctx, p.column, func(c Column) {
				for i, f := range found {
					if f.Right >= 0 {
						all[i] = p.mend(ctx, f, c)
					}
				}
			})
		}
		if why == nil || ctx.Err() != nil {
			return
		}
		if why.Error() != told {
			told = why.Error()
			p.c.cfg.Waits(fmt.Errorf("repair: %w", why))
		}
		sleep(ctx, noAnswer)
	}
	for i, f := range found {
		if f.Right >= 0 {
			all[i] = mended{volume.ScrubNotRepaired, why}
		}
	}
}

// mend repairs one finding, alone with its column.
func (p *pieceOf) mend(ctx context.Context, f volume.ScrubFinding, c Column) mended {
	if ctx.Err() != nil { // before anything is written
		return mended{volume.ScrubNotRepaired, context.Cause(ctx)}
	}
	if len(c.Copies) < 2 {
		return mended{volume.ScrubNotRepaired, errAlone}
	}
	at := &pieceOf{c: p.c, column: f.Column, off: int64(f.Off), n: int64(f.Length)}
	is, err := at.read(c.Copies)
	switch {
	case err != nil:
		return mended{volume.ScrubNotRepaired, err}
	case at.allEqual(is):
		return mended{volume.ScrubGone, nil}
	}
	data := make([]byte, at.n)
	for off := int64(0); off < at.n; off += unit {
		from := is.copyOf(is.finding(at, off).Right)
		if from < 0 {
			return mended{volume.ScrubNotKnown, nil}
		}
		copy(data[off:at.end(off)], is.at(from, off))
	}
	if err := c.Write(data, at.off); err != nil {
		return mended{volume.ScrubNotRepaired, fmt.Errorf("write: %w", err)}
	}
	is, err = at.read(c.Copies)
	if err == nil && !at.allEqual(is) {
		err = errors.New("after it was written, copies differ still or cannot be read")
	}
	if err != nil {
		return mended{volume.ScrubNotRepaired, err}
	}
	return mended{volume.ScrubRepaired, nil}
}

// allEqual reports whether a reading found all copies of a piece equal.
func (p *pieceOf) allEqual(r reading) bool {
	for off := int64(0); off < p.n; off += unit {
		if !r.equal(off) {
			return false
		}
	}
	return true
}

// copyOf is the place of a copy in a reading; -1: it has none.
func (r reading) copyOf(copied int) int {
	for i, c := range r.copies {
		if c.Copy == copied {
			return i
		}
	}
	return -1
}

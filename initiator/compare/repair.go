// SPDX-License-Identifier: Apache-2.0

package compare

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/raid"
)

const (
	// mostHolds is how often a repair tries to have a column to itself, noAnswer apart, and pause for how long users go on
	// before each.
	mostHolds = 20
	pause     = 50 * time.Millisecond
	// slowest is how long the copies may take to be read while users wait, before something is written.
	slowest = 2 * time.Second
)

// Repair says how copies that differ are made equal again. What was found in a piece is told first, and nothing of it is
// repaired before Proceed. Then each finding is repaired by itself, alone with the column. The copies are read again, so
// that nothing is lost that users have written since. If the copy that was told to be right still is, by raid.Right, its
// data is written to all copies, and these are read once more.
type Repair struct {
	// Copies of each column, as the volume is to have them. Named is the copy of each column that is right if nothing else
	// tells; -1: none.
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
	errAlone = errors.New("it has no second copy in sync any more")
	errSlow  = fmt.Errorf("the copies take more than %v to be read", slowest)
)

// right is raid.Right for a column; -1 where nothing is repaired.
func (c *Comparison) right(column int, groups [][]int, inSync int) int {
	r := c.cfg.Repair
	if r == nil || r.Alone == nil {
		return -1
	}
	return raid.Right(groups, inSync, r.Copies, r.Named[column])
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

// mended is the outcome of a repair; empty: the repair is to be tried again.
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
	if slices.ContainsFunc(found, func(f volume.ScrubFinding) bool { return f.Right >= 0 }) {
		p.c.ask(ctx)
	}
	for _, f := range found {
		is := mended{outcome: volume.ScrubNotKnown}
		if f.Right >= 0 {
			is = p.mendOne(ctx, f)
		}
		if is.outcome == "" { // the comparison ends; another one finds it again
			return
		}
		r.Ended(f, is.outcome, is.err)
	}
}

// mendOne has the column to itself, once that can be had, and repairs one finding.
func (p *pieceOf) mendOne(ctx context.Context, f volume.ScrubFinding) (is mended) {
	told := ""
	for range mostHolds {
		sleep(ctx, pause)
		if ctx.Err() != nil {
			return mended{}
		}
		is = mended{}
		if err := p.c.cfg.Repair.Alone(ctx, p.column, func(c Column) { is = p.mend(ctx, f, c) }); err != nil {
			is.err = err
		}
		switch {
		case is.outcome != "" || ctx.Err() != nil:
			return is
		case is.err.Error() != told:
			told = is.err.Error()
			p.c.cfg.Waits(fmt.Errorf("repair: %w", is.err))
		}
		sleep(ctx, noAnswer)
	}
	return mended{volume.ScrubNotRepaired, is.err}
}

// mend repairs one finding, alone with its column.
func (p *pieceOf) mend(ctx context.Context, f volume.ScrubFinding, c Column) mended {
	if len(c.Copies) < 2 {
		return mended{volume.ScrubNotRepaired, errAlone}
	}
	at := &pieceOf{c: p.c, column: f.Column, off: int64(f.Off), n: int64(f.Length)}
	began := time.Now()
	is, err := at.read(c.Copies)
	switch {
	case err == nil && at.allEqual(is):
		return mended{volume.ScrubGone, nil}
	case err == nil && time.Since(began) > slowest:
		err = errSlow
	}
	if err != nil || ctx.Err() != nil {
		return mended{"", err}
	}
	data, known := at.decide(is, f.Right)
	if !known {
		return mended{volume.ScrubNotKnown, nil}
	}
	if err := c.Write(data, at.off); err != nil {
		return mended{volume.ScrubNotRepaired, fmt.Errorf("write: %w", err)}
	}
	if is, err = at.read(c.Copies); err == nil && !at.allEqual(is) {
		err = errors.New("after it was written, copies differ still or cannot be read")
	}
	if err != nil {
		return mended{volume.ScrubNotRepaired, err}
	}
	return mended{volume.ScrubRepaired, nil}
}

// decide collects the data that is right. It reports false if that is not known, or is not what the copy holds that was
// told to be right.
func (p *pieceOf) decide(r reading, told int) (data []byte, known bool) {
	data = make([]byte, p.n)
	was := slices.IndexFunc(r.copies, func(c Copy) bool { return c.Copy == told })
	for off := int64(0); off < p.n; off += unit {
		if was < 0 || r.at(was, off) == nil {
			return nil, false
		}
		right := r.finding(p, off)
		if !slices.ContainsFunc(right.Equal, func(g []int) bool { return slices.Contains(g, told) && slices.Contains(g, right.Right) }) {
			return nil, false
		}
		copy(data[off:p.end(off)], r.at(was, off))
	}
	return data, true
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

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"errors"
	"fmt"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/checkpoint"
)

// errUnsettled is returned once a write has failed after it may have reached some legs.
var errUnsettled = errors.New("writes were given up that may be on some copies only")

// Members returns a column's legs in sync and those that are copied to, for a checkpoint.
func (v *Volume) Members(column int) (all []checkpoint.Member) {
	c := &v.columns[column]
	c.lock()
	defer c.unlock()
	for i := range c.legs {
		if l := &c.legs[i]; l.member() {
			all = append(all, checkpoint.Member{Copy: i, Stay: l.inc + l.gen, Copying: l.state != InSync})
		}
	}
	return all
}

// Behind returns the ranges that a leg lacks, in order: at most so many, which cover what it lacks.
// It returns false if the leg is given no writes, so that what it lacks grows.
func (v *Volume) Behind(column, copy, most int) ([]checkpoint.Range, bool) {
	c := &v.columns[column]
	c.lock()
	l := &c.legs[copy]
	if l.missed == nil || !l.member() {
		c.unlock()
		return nil, false
	}
	lacks := l.missed.copied()
	c.unlock()
	return checkpoint.Ranges(lacks, 1<<v.plan.region, most), true
}

// Device returns the device of a leg, nil if it has none.
func (v *Volume) Device(column, copy int) block.Device {
	c := &v.columns[column]
	c.shards[0].mu.Lock()
	defer c.shards[0].mu.Unlock()
	return c.legs[copy].dev
}

// Written counts the bytes of a column that writes have touched since New, each write as at
// least one region of a checkpoint.
func (v *Volume) Written(column int) (n uint64) {
	c := &v.columns[column]
	for i := range c.shards {
		c.shards[i].mu.Lock()
		n += c.shards[i].written
		c.shards[i].mu.Unlock()
	}
	return n
}

// Settle waits until all writes to a column that were accepted before the call are on every
// leg in sync, and on those that are copied to where these do not lack them already, and so in the list of a checkpoint that began before it. It must not be
// called before the copies are equal, nor twice at once for a column.
func (v *Volume) Settle(ctx context.Context, column int) error {
	s := v.beginSettle(column)
	for {
		settled, err := s.done()
		if settled || err != nil {
			return err
		}
		select {
		case <-s.c.emptied:
		case <-ctx.Done():
			return fmt.Errorf("wait for the writes to column %d: %w", column, context.Cause(ctx))
		}
	}
}

// settling waits for the writes of a column. Each write belongs to one of two turns. Those
// that enter belong to the current turn. Once the other turn has none left, the turns
// change places, and what was accepted before has then left when the new other turn, too,
// has none left.
type settling struct {
	c       *column
	changed bool
}

func (v *Volume) beginSettle(column int) *settling { return &settling{c: &v.columns[column]} }

// done reports whether all writes are complete that were accepted before beginSettle. If
// not, the column's emptied channel tells when to look again.
func (s *settling) done() (bool, error) {
	c := s.c
	c.lock()
	defer c.unlock()
	if c.aborted || c.equalizing {
		return false, fmt.Errorf("column %d is not in use: %w", c.index, block.ErrGone)
	}
	for i := range c.shards {
		if c.shards[i].gaveUp {
			return false, fmt.Errorf("column %d: %w", c.index, errUnsettled)
		}
	}
	if !s.changed {
		if c.writes(1-c.turn) > 0 {
			return false, nil // of a settling that was given up
		}
		c.turn, s.changed = 1-c.turn, true
	}
	return c.writes(1-c.turn) == 0, nil
}

// writes counts the writes of a turn. The column is locked.
func (c *column) writes(turn uint8) (n int) {
	for i := range c.shards {
		n += c.shards[i].writes[turn]
	}
	return n
}

// entered counts a write that enters the shard.
func (sh *shard) entered(p *extentIO) {
	p.turn = p.c.turn
	sh.writes[p.turn]++
	sh.written += uint64(max(p.length(), int64(checkpoint.Region)))
}

// left counts a write that leaves the shard.
func (sh *shard) left(p *extentIO) {
	sh.writes[p.turn]--
	sh.gaveUp = sh.gaveUp || p.err != nil
	if p.turn != p.c.turn && sh.writes[p.turn] == 0 {
		select {
		case p.c.emptied <- struct{}{}:
		default:
		}
	}
}

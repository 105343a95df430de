// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/figures"
)

// Figures are what a volume has done since New.
type Figures struct {
	Volume figures.Figures // users' IOs, each from Submit to its answer
	// Held is for how long at least one IO of users was held after an error, waited for a leg that
	// was then dropped, or could not start: the volume was suspended or its copies were made equal.
	Held time.Duration
	// Legs is what was sent to legs, by column and copy: parts of users' IOs, and copies.
	Legs [][]figures.Figures
}

// Figures returns what the volume has done. Call it from time to time: see figures.Tally.
func (v *Volume) Figures() Figures {
	f := &v.figures
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.taken.Legs == nil {
		f.taken.Legs = make([][]figures.Figures, len(v.columns))
		for k := range v.columns {
			f.taken.Legs[k] = make([]figures.Figures, len(v.columns[k].legs))
		}
	}
	for k := range v.columns {
		for i := range v.columns[k].shards {
			sh := &v.columns[k].shards[i]
			sh.mu.Lock()
			sh.ios.Take(&f.taken.Volume)
			for copy := range sh.legs {
				sh.legs[copy].Take(&f.taken.Legs[k][copy])
			}
			sh.mu.Unlock()
		}
	}
	now := Figures{Volume: f.long.Figures(), Held: f.waits.Total(v.clock.now()), Legs: make([][]figures.Figures, len(v.columns))}
	now.Volume.Add(&f.taken.Volume)
	for k, legs := range f.taken.Legs {
		now.Legs[k] = make([]figures.Figures, len(legs))
		for copy := range legs {
			now.Legs[k][copy] = legs[copy].Clone()
		}
	}
	return now
}

// countedAs is the kind of IO as which an operation counts.
var countedAs = [...]figures.Op{
	block.OpRead: figures.Read, block.OpWrite: figures.Write, block.OpWriteZeroes: figures.Write,
	block.OpDiscard: figures.Discard, block.OpFlush: figures.Flush,
}

// users reports whether an extent IO is an IO of users, or a part of one.
func (p *extentIO) users() bool { return p.io != nil || p.req != nil }

// park keeps an extent IO until the volume is resumed, or a leg is in sync. The shard is locked.
func (p *extentIO) park(now int64) {
	p.phase = phaseParked
	p.wait(now)
}

// wait notes that an extent IO cannot be answered for now; that ends with its answer.
func (p *extentIO) wait(since int64) {
	if !p.waits && p.users() {
		p.waits = true
		p.c.v.figures.waits.Begin(since)
	}
}

// waitedFor notes that an extent IO waits, if it does, for the answer of a leg that was dropped.
func (p *extentIO) waitedFor(s *legIO) {
	if s.state == partOut && p.phase == phaseStarted {
		p.wait(s.at)
	}
}

// account counts an extent IO that ends. The shard is locked.
func (p *extentIO) account(e *effects) {
	if io := p.io; io != nil && !p.c.v.figures.off {
		op, failed := countedAs[io.Op], p.err != nil
		if p.timed || failed {
			p.sh.ios.Add(op, io.Len, time.Duration(e.time(p.c.v)-p.began), failed)
		} else {
			p.sh.ios.AddUntimed(op, io.Len)
		}
	}
	if p.waits {
		p.c.v.figures.waits.End(e.time(p.c.v))
	}
}

// account counts an IO that a leg has answered whole, or with an error. The shard is locked.
func (s *legIO) account(err error, e *effects) {
	p := s.p
	if p.c.v.figures.off || s.op == block.OpMap {
		return
	}
	t, op := &p.sh.legs[s.copy], countedAs[s.op]
	if p.timed || err != nil {
		t.Add(op, s.done, time.Duration(e.time(p.c.v)-s.at), err != nil)
	} else {
		t.AddUntimed(op, s.done)
	}
}

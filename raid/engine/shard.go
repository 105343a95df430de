// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"slices"
	"sync"

	"weft.dev/weft/proto/figures"
)

// shard holds the range locks of a part of a column's lock units. A change of a leg's state
// locks all shards of the column.
type shard struct {
	mu       sync.Mutex
	spans    []span // the extent IOs that are under way or wait
	seq      uint64
	served   uint64 // extent IOs of users
	lastEnd  int64  // of the last read
	lastCopy int    // which leg had it

	writes  [2]int // those in spans, by turn; see settling
	written uint64 // see Volume.Written
	gaveUp  bool   // a write has failed

	sampler figures.Sampler // which IOs are timed
	ios     figures.Tally   // users' IOs of one extent
	legs    []figures.Tally // by copy
}

type span struct {
	off, end int64
	kind     kind
	p        *extentIO
}

// enter adds an extent IO, and counts those that it must wait for.
func (sh *shard) enter(p *extentIO) {
	sh.seq++
	p.seq, p.slot = sh.seq, len(sh.spans)
	if p.kind != kindCopy && p.kind != kindScrub && p.kind != kindRepair {
		sh.served++
	}
	if p.kind == kindWrite {
		sh.entered(p)
	}
	for i := range sh.spans {
		o := &sh.spans[i]
		switch {
		case !o.meets(p):
		case p.kind == kindCopy && o.p.yielded:
			p.pass(o.p)
		case p.kind == kindCopy && o.p.blockers > 0: // it may wait for a write that the copy passes
			o.p.blockers++
			p.waited = true
		default:
			o.p.waited = true
			p.blockers++
		}
	}
	sh.spans = append(sh.spans, span{p.off, p.end, p.kind, p})
}

// meets reports whether a span and an extent IO must not be under way at once.
func (o *span) meets(p *extentIO) bool {
	return o.off < p.end && p.off < o.end && p.c.v.conflict(o.kind, p.kind)
}

// yield lets copies pass a held write. No leg is still working on the write, and the write
// may wait for a leg that is being copied to. While copies pass it, it is not sent to any
// leg. After them it starts again: they may have overwritten its data on a leg that must
// have it when the write is acknowledged.
func (sh *shard) yield(p *extentIO, e *effects) {
	if p.yielded {
		return
	}
	p.yielded = true
	for i := range sh.spans {
		o := &sh.spans[i]
		if o.kind != kindCopy || o.p.seq < p.seq || !o.meets(p) {
			continue
		}
		o.p.pass(p)
		o.p.unblock(e)
	}
}

// pass notes that a copy passes a held write.
func (p *extentIO) pass(held *extentIO) {
	p.waited = true
	if !p.c.v.weak.forgetPassed {
		held.passed++
	}
}

// unblock notes that an extent IO has to wait for one fewer.
func (p *extentIO) unblock(e *effects) {
	if p.blockers--; p.blockers == 0 {
		p.next = e.ready
		e.ready = p
	}
}

// outlive continues with a held write once all copies have passed it.
func (p *extentIO) outlive(e *effects) {
	if p.c.v.weak.forgetPassed {
		return
	}
	if p.passed--; p.passed > 0 {
		return
	}
	for i := range p.legs {
		p.legs[i].state = partNone // a whole or partial write that came before the copies does not count
	}
	p.phase, p.yielded = phaseWaiting, false
	p.next = e.ready
	e.ready = p
}

// leave removes an extent IO, and unblocks those that waited for it.
func (sh *shard) leave(p *extentIO, e *effects) {
	if p.kind == kindWrite {
		sh.left(p)
	}
	last := len(sh.spans) - 1
	sh.spans[p.slot] = sh.spans[last]
	sh.spans[p.slot].p.slot = p.slot
	sh.spans[last] = span{}
	sh.spans = sh.spans[:last]
	if !p.waited {
		return
	}
	for i := range sh.spans {
		o := &sh.spans[i]
		switch {
		case !o.meets(p):
		case p.kind == kindCopy && o.p.yielded:
			o.p.outlive(e)
		case p.yielded && o.kind == kindCopy: // p was given up while copies passed it
		case o.p.seq > p.seq || p.kind == kindCopy && o.p.blockers > 0:
			o.p.unblock(e)
		}
	}
}

// served counts the extent IOs of users.
func (c *column) served() (n uint64) {
	for i := range c.shards {
		c.shards[i].mu.Lock()
		n += c.shards[i].served
		c.shards[i].mu.Unlock()
	}
	return n
}

// snapshot returns the shard's extent IOs, oldest first, for a caller that changes the list.
func (sh *shard) snapshot() []*extentIO {
	all := make([]*extentIO, len(sh.spans))
	for i := range sh.spans {
		all[i] = sh.spans[i].p
	}
	slices.SortFunc(all, func(a, b *extentIO) int { return int(a.seq - b.seq) })
	return all
}

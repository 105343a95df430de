// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/checkpoint"
)

// sector is the unit of the simulated legs: it is written whole or not at all, and
// its content is a number, the first 8 bytes.
const sector = 512

// simLeg is the medium of a leg, which outlives engines and connections.
type simLeg struct {
	r    *rand.Rand
	g    block.Geometry
	tags []uint64
	// tracker lists what is written; nil without checkpoints.
	tracker *checkpoint.Tracker
	// maps says more than there is of where the leg has data; nil: it does not know.
	maps *rand.Rand

	cache map[int]uint64 // sectors that are not durable, and what they would be after a power loss
	order []int          // of cache's keys
	alive bool
	worn  bool // takes no writes any more, and can be read
	// full: it has no space for data where it has none, nor where only a snapshot has some: own are the
	// sectors written since that was taken, nil if there is none. fills is nil if that never happens.
	full  bool
	own   map[int]bool
	fills *rand.Rand
	told  func(*simOp) // is called with what finds no space; may be nil
	// rebooted: it has lost its power since it was last known to be in sync.
	rebooted bool
	// lostCache: it was kept in sync after a loss of its cache, and the client has not
	// gone on with it yet.
	lostCache bool
	dev       *simDevice // the connection that reaches it
	limbo     []*simOp   // given to connections that were cut; may still be done until the fence

	inSync   bool // by the manager's record
	leaving  bool // recorded stale, and soon to be dropped
	needFull bool // no engine knows what it misses
}

func newSimLeg(r *rand.Rand, size block.Size) *simLeg {
	l := &simLeg{r: r, tags: make([]uint64, size/sector), cache: map[int]uint64{}, alive: true, inSync: true}
	l.g = block.Geometry{Size: size, BlockSize: sector, VolatileCache: r.IntN(3) > 0, MaxIO: []block.Size{0, 0, 256 << 10, 32 << 10}[r.IntN(4)]}
	if r.IntN(4) > 0 {
		l.g.DiscardUnit = 4096
	}
	return l
}

// track begins a new list of writes.
func (l *simLeg) track() { l.tracker = checkpoint.NewTracker(l.g.Size) }

// connect makes a new connection to the leg.
func (l *simLeg) connect() *simDevice {
	l.dev = &simDevice{leg: l}
	return l.dev
}

// simDevice is a connection to a leg: what an engine has.
type simDevice struct {
	leg    *simLeg
	ops    []*simOp
	silent bool // answers nothing
	sick   bool // fails much
	cut    bool
}

// simOp is an IO on its way.
type simOp struct {
	io   block.IO // a copy: the engine may reuse its own after the answer
	orig *block.IO
	at   int // sectors that are done
}

func (d *simDevice) Geometry() block.Geometry { return d.leg.g }

func (d *simDevice) Submit(io *block.IO) {
	check := d.leg.g.CheckIO
	if io.Op == block.OpMap {
		check = d.leg.g.CheckMap
	}
	if err := check(io); err != nil {
		panic(err)
	}
	op := &simOp{io: *io, orig: io}
	if d.cut {
		io.Complete(block.ErrGone)
		return
	}
	d.ops = append(d.ops, op)
}

func (o *simOp) sectors() int { return int(o.io.Len / sector) }

// reads reports whether it changes nothing that another may see.
func (o *simOp) reads() bool { return o.io.Op == block.OpRead || o.io.Op == block.OpMap }

// mapUnit says of the unit that begins at a sector whether it may hold data.
func (l *simLeg) mapUnit(o *simOp, first int) {
	const unit = int(block.MapUnit) / sector
	if o.at == 0 {
		clear(o.io.Data)
	}
	if o.at%unit != 0 || l.maps == nil {
		return
	}
	for s := first + o.at; s < first+min(o.at+unit, o.sectors()); s++ {
		if l.tags[s] != 0 || l.maps.IntN(100) == 0 {
			block.MarkMap(o.io.Data, int64(o.at)*sector, int64(o.at)*sector+1)
		}
	}
}

// lacksSpace reports whether a write goes to a place where the leg has no data of its own.
func (l *simLeg) lacksSpace(o *simOp) bool {
	first := int(o.io.Off / sector)
	for s := first; s < first+o.sectors(); s++ {
		if l.tags[s] == 0 || l.own != nil && !l.own[s] {
			return true
		}
	}
	return false
}

// write changes one sector of the medium.
func (l *simLeg) write(s int, tag uint64, durable bool) {
	if durable || !l.g.VolatileCache {
		delete(l.cache, s)
	} else if _, ok := l.cache[s]; !ok && l.tags[s] != tag {
		l.cache[s] = l.tags[s]
		l.order = append(l.order, s)
	}
	l.tags[s] = tag
	if l.own != nil {
		l.own[s] = true
	}
}

// apply does some of an IO.
func (l *simLeg) apply(o *simOp, n int) {
	first := int(o.io.Off / sector)
	if l.tracker != nil && !o.reads() && n > 0 {
		l.tracker.Mark(o.io.Off, o.io.Len)
	}
	for ; n > 0 && o.at < o.sectors(); n-- {
		s, at := first+o.at, o.at*sector
		switch o.io.Op {
		case block.OpRead:
			binary.LittleEndian.PutUint64(o.io.Data[at:], l.tags[s])
		case block.OpMap:
			l.mapUnit(o, first)
		case block.OpWrite:
			l.write(s, binary.LittleEndian.Uint64(o.io.Data[at:]), o.io.FUA)
		case block.OpWriteZeroes:
			l.write(s, 0, o.io.FUA)
		case block.OpDiscard: // each leg does with it what it likes
			if l.r.IntN(2) == 0 {
				l.write(s, 0, false)
			}
		}
		o.at++
	}
	if o.io.Op == block.OpFlush {
		clear(l.cache)
		l.order = l.order[:0]
	}
}

// losePower loses some of what is not durable, and all connections' sight of it.
func (l *simLeg) losePower() {
	for _, s := range l.order {
		if old, ok := l.cache[s]; ok && l.r.IntN(4) > 0 {
			l.tags[s] = old
		}
	}
	clear(l.cache)
	l.order = l.order[:0]
	l.alive, l.rebooted = false, true
	l.track()
	l.limbo = nil
	if l.dev != nil {
		l.dev.silent = true
	}
}

var errSim = errors.New("some error")

// step moves one IO on: it does some or all of it, and perhaps answers.
func (d *simDevice) step(faults bool) {
	if len(d.ops) == 0 || d.silent {
		return
	}
	i := d.leg.r.IntN(len(d.ops))
	o := d.ops[i]
	if d.leg.worn && !o.reads() && o.io.Op != block.OpFlush {
		if d.leg.r.IntN(4) == 0 {
			d.leg.apply(o, d.leg.r.IntN(o.sectors()+1))
		}
		d.answer(i, errSim)
		return
	}
	if d.leg.full && o.io.Op == block.OpWrite && d.leg.lacksSpace(o) {
		if d.leg.fills.IntN(3) == 0 {
			d.leg.apply(o, d.leg.fills.IntN(o.sectors()+1))
		}
		if d.leg.told != nil {
			d.leg.told(o)
		}
		d.answer(i, block.ErrFull)
		return
	}
	if faults && (d.leg.r.IntN(100) == 0 || d.sick && d.leg.r.IntN(4) == 0) {
		if d.leg.r.IntN(2) == 0 {
			d.leg.apply(o, d.leg.r.IntN(o.sectors()+1))
		}
		d.answer(i, []error{errSim, block.ErrMedium, block.ErrGone}[d.leg.r.IntN(3)])
		return
	}
	if o.io.Op == block.OpWriteZeroes && d.leg.g.DiscardUnit == 0 || o.io.Op == block.OpMap && d.leg.maps == nil {
		d.answer(i, block.ErrUnsupported)
		return
	}
	left := o.sectors() - o.at
	switch {
	case left > 1 && d.leg.r.IntN(3) == 0:
		d.leg.apply(o, 1+d.leg.r.IntN(left-1))
	case left > 0 || o.io.Op == block.OpFlush:
		d.leg.apply(o, left)
		if d.leg.r.IntN(2) == 0 {
			d.answer(i, nil)
		}
	default:
		d.answer(i, nil)
	}
}

func (d *simDevice) answer(i int, err error) {
	o := d.ops[i]
	d.ops = append(d.ops[:i], d.ops[i+1:]...)
	o.orig.Complete(err)
}

// cutNow gives back all that the connection has. What was on its way may still
// reach the medium.
func (d *simDevice) cutNow() {
	d.cut, d.silent = true, true
	ops := d.ops
	d.ops = nil
	for _, o := range ops {
		if !o.reads() && o.at < o.sectors() && d.leg.alive {
			o.io.Data = append([]byte(nil), o.io.Data...)
			d.leg.limbo = append(d.leg.limbo, o)
		}
		o.orig.Complete(block.ErrGone)
	}
}

// forgetOps makes sure that nothing that the connection has will be done.
func (d *simDevice) forgetOps() {
	for _, o := range d.ops {
		o.at = o.sectors()
	}
}

// land does something that was on its way when its connection was cut.
func (l *simLeg) land() {
	if len(l.limbo) == 0 || !l.alive {
		return
	}
	i := l.r.IntN(len(l.limbo))
	o := l.limbo[i]
	if l.apply(o, 1+l.r.IntN(o.sectors())); o.at == o.sectors() {
		l.limbo = append(l.limbo[:i], l.limbo[i+1:]...)
	}
}

// fence makes sure that nothing given to earlier connections is still to come.
func (l *simLeg) fence() {
	for len(l.limbo) > 0 && l.r.IntN(3) > 0 {
		l.land()
	}
	l.limbo = nil
	if l.dev != nil {
		l.dev.silent = true
	}
}

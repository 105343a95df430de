// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"sync"
	"time"

	"weft.dev/weft/proto/block"
)

// window is the number of extent IOs of one IO that are under way at once.
const window = 64

// request is an IO that consists of several extent IOs.
type request struct {
	v  *Volume
	io *block.IO

	mu      sync.Mutex
	pumping bool // a goroutine is cutting the next extent IO
	all     bool // no more extent IOs
	out     int  // extent IOs under way
	err     error
	began   int64
	column  int   // for flushes and IO without data: the next column
	at      int64 // bytes of the IO, or of the column's share of it, that were cut so far
}

// Submit implements block.Device. IOs are held while they cannot be answered. They fail
// only with block.ErrRange, block.ErrUnsupported, block.ErrReadOnly, block.ErrMedium (see
// Config.FailMedium), and block.ErrGone after Close or Abort.
func (v *Volume) Submit(io *block.IO) {
	if err := v.geometry().CheckIO(io); err != nil {
		io.Complete(err)
		return
	}
	v.active.Add(1)
	if v.closed.Load() {
		io.Complete(block.ErrGone)
		v.release()
		return
	}
	if io.Op == block.OpFlush {
		if len(v.columns) > 1 {
			v.request(io)
			return
		}
		v.extentIO(0, kindFlush, 0, 0, io).enter()
		return
	}
	x := v.plan.first(io.Off, io.Len)
	if x.length < io.Len || v.maxExtentIO(io.Op) < io.Len {
		v.request(io)
		return
	}
	v.extentIO(x.column, kindOf(io.Op), x.off, x.length, io).enter()
}

func kindOf(op block.Op) kind {
	if op == block.OpRead {
		return kindRead
	}
	return kindWrite
}

// maxExtentIO returns the most bytes that all legs accept at once. A leg would get a larger
// extent IO in several parts, one after another.
func (v *Volume) maxExtentIO(op block.Op) int64 {
	most := v.maxIO.Load()
	if most == 0 || op != block.OpRead && op != block.OpWrite {
		return 1 << 62
	}
	return most
}

// extentIO makes an extent IO that covers all of io.
func (v *Volume) extentIO(column int, k kind, off, length int64, io *block.IO) *extentIO {
	p := v.extentIOs.Get().(*extentIO)
	p.c = &v.columns[column]
	p.kind, p.off, p.end = k, off, off+length
	p.op, p.fua, p.unmap, p.data, p.io = io.Op, io.FUA, io.Unmap, io.Data, io
	return p
}

// enter adds an extent IO to its shard, and starts it unless it must wait.
func (p *extentIO) enter() {
	c := p.c
	p.sh = c.shard(p.off)
	if p.op == block.OpFlush {
		p.sh = &c.shards[0] // it guards the state of flushes
	}
	var e effects
	p.sh.mu.Lock()
	p.sh.enter(p)
	p.began = e.time(c.v)
	p.timed = p.sh.sampler.Next(p.began)
	if p.blockers == 0 {
		p.start(&e)
	}
	p.sh.mu.Unlock()
	e.run()
}

// request starts an IO of several extent IOs.
func (v *Volume) request(io *block.IO) {
	r := v.reqs.Get().(*request)
	r.io, r.all, r.err, r.column, r.at, r.began = io, false, nil, 0, 0, v.clock.now()
	r.mu.Lock()
	r.pump()
}

// extentDone completes one extent IO, and cuts the next ones.
func (r *request) extentDone(err error) {
	r.mu.Lock()
	r.out--
	if err != nil && r.err == nil {
		r.err, r.all = err, true
	}
	if r.pumping {
		r.mu.Unlock()
		return
	}
	r.pump()
}

// pump cuts extent IOs while fewer than window are under way. It is called with mu locked,
// and unlocks it.
func (r *request) pump() {
	r.pumping = true
	for !r.all && r.out < window {
		p := r.cut()
		if p == nil {
			r.all = true
			break
		}
		r.out++
		r.mu.Unlock()
		p.enter()
		r.mu.Lock()
	}
	r.pumping = false
	done := r.all && r.out == 0
	r.mu.Unlock()
	if !done {
		return
	}
	v, io, err := r.v, r.io, r.err
	v.figures.long.Add(uint64(io.Off), countedAs[io.Op], io.Len, time.Duration(v.clock.now()-r.began), err != nil)
	r.io, r.err = nil, nil
	v.reqs.Put(r)
	io.Complete(err)
	v.release()
}

// cut returns the next extent IO, or nil if there is none.
func (r *request) cut() *extentIO {
	v, io := r.v, r.io
	switch io.Op {
	case block.OpFlush:
		if r.column == len(v.columns) {
			return nil
		}
		r.column++
		return r.own(v.extentIO(r.column-1, kindFlush, 0, 0, io))
	case block.OpRead, block.OpWrite:
		if r.at == io.Len {
			return nil
		}
		x := v.plan.first(io.Off+r.at, min(io.Len-r.at, v.maxExtentIO(io.Op)))
		p := r.own(v.extentIO(x.column, kindOf(io.Op), x.off, x.length, io))
		p.data = io.Data[r.at : r.at+x.length]
		r.at += x.length
		return p
	}
	return r.cutRange()
}

// cutRange returns the next extent IO of an IO without data. Such an IO goes column by
// column, because its share of a column is contiguous in the legs.
func (r *request) cutRange() *extentIO {
	v, io := r.v, r.io
	for ; r.column < len(v.columns); r.column++ {
		from := v.plan.share(r.column, io.Off) + r.at
		rest := v.plan.share(r.column, io.Off+io.Len) - from
		if rest <= 0 {
			r.at = 0
			continue
		}
		unit := int64(1) << v.plan.unit
		length := min(rest, unit-from&(unit-1))
		r.at += length
		return r.own(v.extentIO(r.column, kindWrite, from, length, io))
	}
	return nil
}

func (r *request) own(p *extentIO) *extentIO {
	p.io, p.req = nil, r
	return p
}

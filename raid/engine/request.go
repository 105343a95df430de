// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"sync"

	"weft.dev/weft/proto/block"
)

// window is how many pieces of one IO are under way at once.
const window = 64

// request is an IO of more than one piece.
type request struct {
	v  *Volume
	io *block.IO

	mu      sync.Mutex
	pumping bool // a goroutine is cutting the next piece
	all     bool // no more pieces
	out     int  // pieces under way
	err     error
	column  int   // of flushes and of IO without data, the next one
	at      int64 // how much of the IO, or of the column's part of it, has been cut
}

// Submit is block.Device's. IOs are held while they cannot be answered; they
// fail only with block.ErrRange, block.ErrUnsupported, block.ErrReadOnly, with
// block.ErrMedium (see Config.FailMedium), and with block.ErrGone after Close or
// Abort.
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
		v.piece(0, kindFlush, 0, 0, io).enter()
		return
	}
	x := v.plan.first(io.Off, io.Len)
	if x.length < io.Len || v.maxPiece(io.Op) < io.Len {
		v.request(io)
		return
	}
	v.piece(x.column, kindOf(io.Op), x.off, x.length, io).enter()
}

func kindOf(op block.Op) kind {
	if op == block.OpRead {
		return kindRead
	}
	return kindWrite
}

// maxPiece is the most that legs take at once: more would go to a leg in turns.
func (v *Volume) maxPiece(op block.Op) int64 {
	most := v.maxIO.Load()
	if most == 0 || op != block.OpRead && op != block.OpWrite {
		return 1 << 62
	}
	return most
}

// piece makes a piece that is all of io.
func (v *Volume) piece(column int, k kind, off, length int64, io *block.IO) *piece {
	p := v.pieces.Get().(*piece)
	p.c = &v.columns[column]
	p.kind, p.off, p.end = k, off, off+length
	p.op, p.fua, p.unmap, p.data, p.io = io.Op, io.FUA, io.Unmap, io.Data, io
	return p
}

// enter puts a piece on its way.
func (p *piece) enter() {
	c := p.c
	p.sh = c.shard(p.off)
	if p.op == block.OpFlush {
		p.sh = &c.shards[0] // which guards what flushes note
	}
	var e effects
	p.sh.mu.Lock()
	p.sh.enter(p)
	if p.blockers == 0 {
		p.start(&e)
	}
	p.sh.mu.Unlock()
	e.run()
}

// request makes an IO of several pieces go.
func (v *Volume) request(io *block.IO) {
	r := v.reqs.Get().(*request)
	r.io, r.all, r.err, r.column, r.at = io, false, nil, 0, 0
	r.mu.Lock()
	r.pump()
}

// pieceDone ends one piece, and cuts the next ones.
func (r *request) pieceDone(err error) {
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

// pump cuts pieces as long as there may be more under way. It is called with mu
// locked, and unlocks it.
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
	r.io, r.err = nil, nil
	v.reqs.Put(r)
	io.Complete(err)
	v.release()
}

// cut makes the next piece; nil if there is none.
func (r *request) cut() *piece {
	v, io := r.v, r.io
	switch io.Op {
	case block.OpFlush:
		if r.column == len(v.columns) {
			return nil
		}
		r.column++
		return r.own(v.piece(r.column-1, kindFlush, 0, 0, io))
	case block.OpRead, block.OpWrite:
		if r.at == io.Len {
			return nil
		}
		x := v.plan.first(io.Off+r.at, min(io.Len-r.at, v.maxPiece(io.Op)))
		p := r.own(v.piece(x.column, kindOf(io.Op), x.off, x.length, io))
		p.data = io.Data[r.at : r.at+x.length]
		r.at += x.length
		return p
	}
	return r.cutRange()
}

// cutRange makes the next piece of an IO without data: all of a column that its
// range covers lies together in the legs.
func (r *request) cutRange() *piece {
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
		return r.own(v.piece(r.column, kindWrite, from, length, io))
	}
	return nil
}

func (r *request) own(p *piece) *piece {
	p.io, p.req = nil, r
	return p
}

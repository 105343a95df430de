// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"slices"
	"sync"

	"weft.dev/weft/proto/block"
)

// kind is what a piece does to its range.
type kind uint8

const (
	kindRead  kind = iota
	kindWrite      // also write zeroes and discard
	kindFlush      // of one column; has no range
	kindCopy       // from a leg in sync to one that rebuilds
	kindEqual      // from a leg in sync to the others, with no IO beside it
)

// conflict reports whether two pieces that overlap must not be under way together.
// Reads wait for writes, because what they see could still be taken back by a
// crash; copies write only where nobody reads. A write that is held is no longer under
// way, see shard.yield.
func conflict(a, b kind) bool {
	switch {
	case a == kindWrite:
		return b == kindWrite || b == kindRead || b == kindCopy
	case b == kindWrite:
		return a == kindRead || a == kindCopy
	}
	return false
}

// phase is where a piece is on its way.
type phase uint8

const (
	phaseWaiting phase = iota // for the range, or about to start
	phaseParked               // the volume is suspended or equalizing, or the column has no leg in sync
	phaseStarted
)

// job is what a copy is for: one of these is set. It is no interface, because what
// calls one would have to take its effects from the heap, for every IO.
type job struct {
	lane  *lane      // of a rebuild
	equal *equalLane // of an equalizer
	last  *rebuild   // whose last flush it is
}

// start begins with a job's piece, or begins again. The shard is locked.
func (j job) start(p *piece, e *effects) {
	switch {
	case j.lane != nil:
		j.lane.start(p, e)
	case j.equal != nil:
		j.equal.start(p, e)
	default:
		j.last.startFlush(p, e)
	}
}

// answered goes on with a job's piece. The shard is locked.
func (j job) answered(p *piece, s *sub, err error, e *effects) {
	switch {
	case j.lane != nil:
		j.lane.answered(p, s, err, e)
	case j.equal != nil:
		j.equal.answered(p, s, err, e)
	default:
		s.state = partNone
		p.finish(err, e)
	}
}

// dropped ends a job's piece that nothing else will end, if the leg that it is for
// was dropped. The column is locked.
func (j job) dropped(p *piece, e *effects) {
	r := j.last
	if j.lane != nil {
		r = j.lane.r
	}
	if r != nil && p.c.legs[r.copy].inc != r.inc && !p.out() && p.phase != phaseWaiting {
		p.finish(errLeft, e)
	}
}

// done tells a job the outcome of a piece. Nothing is locked.
func (j job) done(err error) {
	switch {
	case j.lane != nil:
		j.lane.done(err)
	case j.equal != nil:
		j.equal.done(err)
	case err == nil:
		j.last.caughtUp()
	}
}

// part is what one leg has of a piece.
type part uint8

const (
	partNone   part = iota
	partOut         // the leg's device has it
	partDone        // the leg has it
	partFailed      // the leg failed it
	partPaused      // to go on when the volume is resumed
)

// piece is what an IO is to one extent. It is guarded by its shard's mu.
type piece struct {
	c        *column
	sh       *shard
	io       *block.IO // what it is all of, or
	req      *request  // what it is a part of, or
	job      job       // whose copy it is
	kind     kind
	op       block.Op
	fua      bool
	unmap    bool
	off, end int64 // in each leg
	data     []byte

	phase    phase
	seq      uint64 // order of arrival in the shard
	slot     int    // in the shard's spans
	blockers int    // earlier pieces that it waits for
	waited   bool   // others wait for it, or are passed by it
	yielded  bool   // a write that is held: copies pass it
	passed   int    // by how many copies that are not done
	at       int64  // started
	held     int64  // since when it is held for the fate of a leg; 0: it is not
	tried    uint8  // reads and copies: the copies that failed to read
	other    bool   // one of them failed with something other than a medium error
	err      error  // the outcome; of reads the last error
	next     *piece // in effects
	subs     [block.MaxCopies]sub
}

// sub is what one leg gets of a piece, in as many IOs as the leg's MaxIO wants.
type sub struct {
	io    block.IO
	p     *piece
	data  []byte
	copy  int
	state part
	op    block.Op
	zeros bool   // zeroes are written as data
	inc   uint64 // of the leg, see leg.inc
	dev   block.Device
	gen   uint64 // which of the leg's devices it is
	most  int64  // of one IO
	done  int64  // bytes
	at    int64  // given to the device
	next  *sub   // in effects
}

func newPiece() any {
	p := &piece{}
	for i := range p.subs {
		s := &p.subs[i]
		s.p, s.copy, s.io.Owner, s.io.Done = p, i, s, answered
	}
	return p
}

// recycle forgets what the piece was.
func (p *piece) recycle() {
	for i := range p.subs {
		s := &p.subs[i]
		s.state, s.dev, s.data, s.io.Data, s.io.Err, s.zeros = partNone, nil, nil, nil, nil, false
	}
	p.io, p.req, p.job, p.data, p.err, p.next = nil, nil, job{}, nil, nil, nil
	p.blockers, p.waited, p.held, p.tried, p.other, p.phase = 0, false, 0, 0, false, phaseWaiting
	p.yielded, p.passed = false, 0
	p.fua, p.unmap = false, false
}

func (p *piece) length() int64 { return p.end - p.off }

// out reports whether a device has something of the piece.
func (p *piece) out() bool {
	for i := range p.subs {
		if p.subs[i].state == partOut {
			return true
		}
	}
	return false
}

// effects is what is to be done once the shards are unlocked.
type effects struct {
	subs     *sub   // to be given to their devices
	ready    *piece // the way is free for them
	finished *piece
	failures []failure
	rearm    *column // has something to try again
}

// failure is an error of a leg that its column is to know of.
type failure struct {
	c    *column
	copy int
	inc  uint64
	err  error
	held bool // the piece waits for the leg's fate
}

func (e *effects) submit(s *sub) {
	s.next = e.subs
	e.subs = s
}

// run does what was collected, and what follows from that.
func (e *effects) run() {
	for {
		switch {
		case e.subs != nil:
			s := e.subs
			e.subs = s.next
			s.next = nil
			s.dev.Submit(&s.io)
		case e.finished != nil:
			p := e.finished
			e.finished = p.next
			p.complete()
		case e.ready != nil:
			p := e.ready
			e.ready = p.next
			p.next = nil
			p.launch(e)
		case len(e.failures) > 0:
			f := e.failures[0]
			e.failures = e.failures[1:]
			f.c.legFailed(f, e)
		case e.rearm != nil:
			c := e.rearm
			e.rearm = nil
			c.armRetry()
		default:
			return
		}
	}
}

// complete tells whoever the piece was for, after it has left its shard.
func (p *piece) complete() {
	v, io, req, job, err := p.c.v, p.io, p.req, p.job, p.err
	p.recycle()
	v.pieces.Put(p)
	switch {
	case io != nil:
		io.Complete(err)
		v.release()
	case req != nil:
		req.pieceDone(err)
	default:
		job.done(err)
		v.release()
	}
}

// launch starts a piece whose way has become free.
func (p *piece) launch(e *effects) {
	p.sh.mu.Lock()
	p.start(e)
	p.sh.mu.Unlock()
}

// start begins with a piece that nothing is in the way of.
func (p *piece) start(e *effects) {
	c := p.c
	switch {
	case c.aborted:
		p.finish(block.ErrGone, e)
		return
	case c.suspended || c.equalizing && p.kind != kindEqual:
		p.phase = phaseParked
		return
	}
	p.phase = phaseStarted
	p.at = c.v.clock.now()
	switch p.kind {
	case kindRead:
		p.startRead(e)
	case kindWrite:
		p.startWrite(e)
	case kindFlush:
		p.startFlush(e)
	default:
		p.job.start(p, e)
	}
}

// issue gives a piece, or for copies a step of it, to a leg.
func (p *piece) issue(copy int, op block.Op, data []byte, e *effects) {
	s, l := &p.subs[copy], &p.c.legs[copy]
	if s.state != partPaused {
		s.done, s.zeros = 0, false
	}
	s.inc, s.dev, s.gen, s.most = l.inc, l.dev, l.gen, l.maxIO
	s.op, s.data = op, data
	s.at = p.at
	l.out.Add(1)
	s.send(e)
}

// send gives the next part of it to the device.
func (s *sub) send(e *effects) {
	p := s.p
	s.state = partOut
	io := &s.io
	io.Op, io.FUA, io.Unmap, io.Err = s.op, p.fua, p.unmap, nil
	io.Off, io.Len, io.Data = p.off+s.done, p.length()-s.done, nil
	if s.op == block.OpFlush {
		io.Off, io.Len = 0, 0
		e.submit(s)
		return
	}
	if s.most > 0 && io.Len > s.most {
		io.Len = s.most
	}
	switch {
	case s.zeros:
		io.Op, io.Unmap = block.OpWrite, false
		io.Len = min(io.Len, int64(len(zeroes)))
		io.Data = zeroes[:io.Len]
	case s.data != nil:
		io.Data = s.data[s.done : s.done+io.Len]
	}
	e.submit(s)
}

// restart has what waits to go on begin anew. What is out does so when it is answered.
func (s *sub) restart() {
	if s.state == partPaused {
		s.done = 0
	}
}

// zeroes is what is written to a leg that knows no OpWriteZeroes. Never changed.
var zeroes [256 << 10]byte

// answered is the Done of every IO that legs get.
func answered(io *block.IO) {
	s := io.Owner.(*sub)
	p := s.p
	var e effects
	p.sh.mu.Lock()
	s.answered(&e)
	p.sh.mu.Unlock()
	e.run()
}

func (s *sub) answered(e *effects) {
	p := s.p
	c := p.c
	l := &c.legs[s.copy]
	err := s.io.Err
	current := l.inc == s.inc
	if err != nil && errors.Is(err, block.ErrUnsupported) {
		err = s.goWithout(err, current)
	}
	if err == nil && s.op != block.OpFlush {
		s.done += s.io.Len
	}
	void := current && s.gen < l.born && s.op != block.OpRead // said before the leg lost its cache
	if void {
		s.done = 0
	}
	switch more := s.op != block.OpFlush && s.done < p.length(); {
	case (err != nil || void) && current && s.gen != l.gen && s.op != block.OpRead:
		s.state = partPaused // for the device that has come since
		if !c.suspended && !c.aborted {
			l.out.Add(-1)
			p.again(s.copy, e)
			return
		}
	case err != nil:
		s.state = partFailed
		if s.gen == l.gen { // else it is a read, and says nothing about the leg's device
			e.failures = append(e.failures, failure{c, s.copy, s.inc, err, p.kind == kindWrite || p.kind == kindFlush})
		}
	case more && current && !c.suspended && !c.aborted:
		s.send(e)
		return
	case more:
		s.state = partPaused
	default:
		s.state = partDone
		if current && s.op != block.OpRead && s.op != block.OpFlush {
			l.wrote(p)
		}
	}
	l.out.Add(-1)
	if s.op == block.OpFlush {
		l.flushed(s)
	}
	switch p.kind {
	case kindRead:
		p.readAnswered(s, err, e)
	case kindWrite, kindFlush:
		p.settle(e)
	default:
		p.job.answered(p, s, err, e)
	}
}

// goWithout makes do with what a leg supports, if that is possible.
func (s *sub) goWithout(err error, current bool) error {
	switch {
	case s.op == block.OpDiscard: // it is a hint
		s.io.Len = s.p.length() - s.done
		return nil
	case s.op == block.OpWriteZeroes && !s.zeros && current:
		s.zeros, s.io.Len = true, 0
		return nil
	}
	return err
}

// hold keeps a piece, of which nothing is out, until the fate of a leg is decided.
func (p *piece) hold(e *effects) {
	if p.c.aborted {
		if !p.out() {
			p.finish(block.ErrGone, e)
		}
		return
	}
	if p.held == 0 {
		p.held = p.c.v.clock.now()
	}
	if p.kind == kindWrite && !p.c.v.weak.heldBlocks {
		p.sh.yield(p, e)
	}
	e.rearm = p.c
}

// finish lets go of the piece's range and of the piece.
func (p *piece) finish(err error, e *effects) {
	p.err = err
	p.sh.leave(p, e)
	p.next = e.finished
	e.finished = p
}

// shard is a part of a column's range locks: of the lock units that fall to it.
// A change of a leg's state takes all shards of the column.
type shard struct {
	mu       sync.Mutex
	spans    []span // the pieces that are under way or wait
	seq      uint64
	served   uint64 // pieces of users
	lastEnd  int64  // of the last read
	lastCopy int    // which leg had it
}

type span struct {
	off, end int64
	kind     kind
	p        *piece
}

// enter takes a piece in, and counts what it has to wait for.
func (sh *shard) enter(p *piece) {
	sh.seq++
	p.seq, p.slot = sh.seq, len(sh.spans)
	if p.kind != kindCopy {
		sh.served++
	}
	for i := range sh.spans {
		o := &sh.spans[i]
		switch {
		case !o.meets(p):
		case p.kind == kindCopy && o.p.yielded:
			p.pass(o.p)
		case p.kind == kindCopy && o.p.blockers > 0: // it may wait for what the copy passes
			o.p.blockers++
			p.waited = true
		default:
			o.p.waited = true
			p.blockers++
		}
	}
	sh.spans = append(sh.spans, span{p.off, p.end, p.kind, p})
}

// meets reports whether a span and a piece must not be under way together.
func (o *span) meets(p *piece) bool {
	return o.off < p.end && p.off < o.end && p.c.v.conflict(o.kind, p.kind)
}

// yield lets copies pass a write that is held: nothing of it is out, and what it
// waits for may be a leg that is being copied to. While copies pass it, it is not
// sent to any leg. After them it begins anew, for they may have overwritten what it
// wrote before, on a leg that must have it when it is acknowledged.
func (sh *shard) yield(p *piece, e *effects) {
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

// pass notes that a copy goes before a held write.
func (p *piece) pass(held *piece) {
	p.waited = true
	if !p.c.v.weak.forgetPassed {
		held.passed++
	}
}

// unblock takes away one of what a piece waits for.
func (p *piece) unblock(e *effects) {
	if p.blockers--; p.blockers == 0 {
		p.next = e.ready
		e.ready = p
	}
}

// outlive goes on with a held write that a copy has passed.
func (p *piece) outlive(e *effects) {
	if p.c.v.weak.forgetPassed {
		return
	}
	if p.passed--; p.passed > 0 {
		return
	}
	for i := range p.subs {
		p.subs[i].state = partNone // what it had of it, whole or in part, is as good as nothing
	}
	p.phase, p.yielded = phaseWaiting, false
	p.next = e.ready
	e.ready = p
}

// leave takes a piece out, and finds those whose way is free then.
func (sh *shard) leave(p *piece, e *effects) {
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
		case p.yielded && o.kind == kindCopy: // given up while it was passed
		case o.p.seq > p.seq || p.kind == kindCopy && o.p.blockers > 0:
			o.p.unblock(e)
		}
	}
}

// snapshot lists the shard's pieces, oldest first, for a caller that changes them.
func (sh *shard) snapshot() []*piece {
	all := make([]*piece, len(sh.spans))
	for i := range sh.spans {
		all[i] = sh.spans[i].p
	}
	slices.SortFunc(all, func(a, b *piece) int { return int(a.seq - b.seq) })
	return all
}

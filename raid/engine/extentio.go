// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"fmt"

	"weft.dev/weft/proto/block"
)

// kind says what an extent IO does to its range.
type kind uint8

const (
	kindRead   kind = iota
	kindWrite       // also write zeroes and discard
	kindFlush       // of one column; has no range
	kindCopy        // from a leg in sync to one that rebuilds
	kindEqual       // from a leg in sync to the others, while no other IO is under way
	kindScrub       // reads all legs in sync
	kindRepair      // reads all legs in sync, and writes to some of them
)

// conflict reports whether two extent IOs that overlap must not be under way at once. Reads
// wait for writes, because a crash could still undo the data that they would return. Copies
// do not wait for reads: they write only to a leg that is not read. A held write is no
// longer under way, see shard.yield. A repair waits for all that reads or writes its range: it
// changes the legs in sync.
func conflict(a, b kind) bool {
	switch {
	case a == kindRepair:
		return b != kindFlush && b != kindEqual
	case b == kindRepair:
		return a != kindFlush && a != kindEqual
	case a == kindWrite:
		return b == kindWrite || b == kindRead || b == kindCopy || b == kindScrub
	case b == kindWrite:
		return a == kindRead || a == kindCopy || a == kindScrub
	}
	return false
}

// phase is the progress of an extent IO.
type phase uint8

const (
	phaseWaiting phase = iota // waits for its range, or is about to start
	phaseParked               // the volume is suspended or equalizing, or the column has no leg in sync
	phaseStarted
)

// job says what a copy is for; exactly one of its pointers is set. It is not an interface, because a
// call through one would make effects escape to the heap for every IO.
type job struct {
	lane  *lane      // a copy of a rebuild
	equal *equalLane // a copy of an equalizer
	last  *rebuild   // the last flush of a rebuild, or with midway one before it
	scrub *Scrub     // a comparison or a repair

	midway bool
}

// start starts a job's extent IO, or starts it again. The shard is locked.
func (j job) start(p *extentIO, e *effects) {
	switch {
	case j.lane != nil:
		j.lane.start(p, e)
	case j.equal != nil:
		j.equal.start(p, e)
	case j.scrub != nil:
		j.scrub.start(p, e)
	default:
		j.last.startFlush(p, e)
	}
}

// answered continues a job's extent IO after a leg's answer. The shard is locked.
func (j job) answered(p *extentIO, s *legIO, err error, e *effects) {
	switch {
	case j.lane != nil:
		j.lane.answered(p, s, err, e)
	case j.equal != nil:
		j.equal.answered(p, s, err, e)
	case j.scrub != nil:
		j.scrub.answered(p, s, err, e)
	default:
		s.state = partNone
		p.finish(err, e)
	}
}

// dropped ends a job's extent IO if its leg was dropped and nothing else will end it. The
// column is locked.
func (j job) dropped(p *extentIO, e *effects) {
	r := j.last
	if j.lane != nil {
		r = j.lane.r
	}
	if r != nil && p.c.legs[r.copy].inc != r.inc && !p.out() && p.phase != phaseWaiting {
		p.finish(errLeft, e)
	}
}

// quiet reports whether a leg's error is not reported to the owner.
func (j job) quiet(s *legIO, err error) bool {
	return s.op == block.OpMap || j.scrub != nil && j.scrub.quiet(s, err)
}

// done gives a job the result of its extent IO. Nothing is locked.
func (j job) done(err error) {
	switch {
	case j.lane != nil:
		j.lane.done(err)
	case j.equal != nil:
		j.equal.done(err)
	case j.scrub != nil:
		j.scrub.done(err)
	case err == nil && !j.midway:
		j.last.caughtUp()
	}
}

// part is the state of an extent IO on one leg.
type part uint8

const (
	partNone   part = iota
	partOut         // sent to the leg's device
	partDone        // complete
	partFailed      // the leg failed it
	partPaused      // to be continued, for example when the volume is resumed
)

// extentIO is the part of an IO, or the copy, that covers one extent. It is guarded by its
// shard's mu.
type extentIO struct {
	c        *column
	sh       *shard
	io       *block.IO // the IO that it covers whole, or
	req      *request  // the IO that it is a part of, or
	job      job       // the job that it copies for
	kind     kind
	op       block.Op
	fua      bool
	unmap    bool
	off, end int64 // in each leg
	data     []byte

	phase    phase
	turn     uint8     // of a write; see settling
	seq      uint64    // order of arrival in the shard
	slot     int       // index in the shard's spans
	blockers int       // the number of extent IOs that it waits for
	waited   bool      // others wait for it, or are passed by it
	yielded  bool      // a held write that copies pass
	passed   int       // the number of unfinished copies that pass it
	at       int64     // when it started
	watched  bool      // its latency says how the background's work slows users down
	held     int64     // since when it is held; 0 if it is not
	tried    uint8     // reads and copies: a bit for each copy that could not be read
	other    bool      // one of them failed with something other than a medium error
	err      error     // the result; of reads the last error
	whole    whole     // of a read that goes on block by block
	next     *extentIO // in effects
	began    int64     // when it came
	timed    bool      // its latency is measured, and those of its answers
	waits    bool      // it counts in Volume.waits
	legs     [block.MaxSlots]legIO
}

// legIO is an extent IO on one leg, sent in as many IOs as the leg's MaxIO requires.
type legIO struct {
	io    block.IO
	p     *extentIO
	data  []byte
	copy  int
	state part
	op    block.Op
	zeros bool   // zeroes are written as data
	full  bool   // failed for lack of space, which is no fault of the leg
	inc   uint64 // of the leg, see leg.inc
	dev   block.Device
	gen   uint64 // of the device, see leg.gen
	most  int64  // bytes of one IO
	done  int64  // bytes that are complete
	at    int64  // when it was sent
	next  *legIO // in effects
}

func newExtentIO() any {
	p := &extentIO{}
	for i := range p.legs {
		s := &p.legs[i]
		s.p, s.copy, s.io.Owner, s.io.Done = p, i, s, answered
	}
	return p
}

// recycle clears the extent IO for its next use.
func (p *extentIO) recycle() {
	for i := range p.legs {
		s := &p.legs[i]
		s.state, s.dev, s.data, s.io.Data, s.io.Err, s.zeros, s.full = partNone, nil, nil, nil, nil, false, false
	}
	p.io, p.req, p.job, p.data, p.err, p.next = nil, nil, job{}, nil, nil, nil
	p.blockers, p.waited, p.held, p.tried, p.other, p.phase = 0, false, 0, 0, false, phaseWaiting
	p.yielded, p.passed, p.whole = false, 0, whole{}
	p.fua, p.unmap, p.watched, p.waits = false, false, false, false
}

func (p *extentIO) length() int64 { return p.end - p.off }

// out reports whether a leg has not answered yet.
func (p *extentIO) out() bool {
	for i := range p.legs {
		if p.legs[i].state == partOut {
			return true
		}
	}
	return false
}

// effects are collected while shards are locked, and done once these are unlocked.
type effects struct {
	legIOs   *legIO    // to be sent to their devices
	ready    *extentIO // to be started: nothing blocks them any more
	finished *extentIO
	failures []failure
	sick     []sick  // to be healed
	rearm    *column // has something to retry
	now      int64   // while shards are locked: see time
}

// time is the time at which the shards were locked, or a little later. It reads the clock once.
func (e *effects) time(v *Volume) int64 {
	if e.now == 0 {
		e.now = v.clock.now()
	}
	return e.now
}

// failure is an error of a leg, to be noted by its column.
type failure struct {
	c    *column
	copy int
	inc  uint64
	err  error
	held bool // the extent IO is held
}

func (e *effects) submit(s *legIO) {
	s.next = e.legIOs
	e.legIOs = s
}

// run does the collected effects, and those that follow from them.
func (e *effects) run() {
	for {
		e.now = 0
		switch {
		case e.legIOs != nil:
			s := e.legIOs
			e.legIOs = s.next
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
		case len(e.sick) > 0:
			x := e.sick[0]
			e.sick = e.sick[1:]
			x.c.v.heal(x)
		case e.rearm != nil:
			c := e.rearm
			e.rearm = nil
			c.armRetry()
		default:
			return
		}
	}
}

// complete passes on the result of an extent IO that has left its shard.
func (p *extentIO) complete() {
	v, io, req, job, err := p.c.v, p.io, p.req, p.job, p.err
	p.recycle()
	v.extentIOs.Put(p)
	switch {
	case io != nil:
		io.Complete(err)
		v.release()
	case req != nil:
		req.extentDone(err)
	default:
		job.done(err)
		v.release()
	}
}

// launch starts an extent IO that nothing blocks any more.
func (p *extentIO) launch(e *effects) {
	p.sh.mu.Lock()
	p.start(e)
	p.sh.mu.Unlock()
}

// start starts an extent IO that nothing blocks.
func (p *extentIO) start(e *effects) {
	c := p.c
	now := e.time(c.v)
	switch {
	case c.aborted:
		p.finish(block.ErrGone, e)
		return
	case c.suspended || c.equalizing && p.kind != kindEqual:
		p.park(now)
		return
	}
	p.phase = phaseStarted
	p.at = now
	p.watched = (p.kind == kindRead || p.kind == kindWrite) && c.v.background.Watches(p.at)
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

// issue sends an extent IO, or one step of a copy, to a leg.
func (p *extentIO) issue(copy int, op block.Op, data []byte, e *effects) {
	s, l := &p.legs[copy], &p.c.legs[copy]
	if s.state != partPaused {
		s.done, s.zeros = 0, false
	}
	s.inc, s.dev, s.gen, s.most = l.inc, l.dev, l.gen, l.maxIO
	s.op, s.data = op, data
	s.at = e.time(p.c.v)
	l.out.Add(1)
	s.send(e)
}

// issueCopy sends what was read from another leg. Zeroes go to a thin leg as such, so that the copy of
// what was never written takes no space.
func (p *extentIO) issueCopy(copy int, data []byte, e *effects) {
	if p.c.v.cfg.Thin && block.AllZero(data) {
		p.unmap = true
		p.issue(copy, block.OpWriteZeroes, nil, e)
		return
	}
	p.unmap = false
	p.issue(copy, block.OpWrite, data, e)
}

// send sends its next IO to the device.
func (s *legIO) send(e *effects) {
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
	if s.most > 0 && io.Len > s.most && s.op != block.OpMap {
		io.Len = s.most
	}
	switch {
	case s.zeros:
		io.Op, io.Unmap = block.OpWrite, false
		io.Len = min(io.Len, int64(len(zeroes)))
		io.Data = zeroes[:io.Len]
	case s.op == block.OpMap:
		io.Data = s.data
	case s.data != nil:
		io.Data = s.data[s.done : s.done+io.Len]
	}
	e.submit(s)
}

// writes reports whether s changes the leg's data.
func (s *legIO) writes() bool { return !s.reads() && s.op != block.OpFlush }

// reads reports whether s tells something of the leg's data, and changes nothing.
func (s *legIO) reads() bool { return s.op == block.OpRead || s.op == block.OpMap }

// restart makes a paused legIO start at its beginning. One that is out does so when it is
// answered.
func (s *legIO) restart() {
	if s.state == partPaused {
		s.done = 0
	}
}

// zeroes is written to legs that do not support OpWriteZeroes. It is never changed.
var zeroes [256 << 10]byte

// answered is the Done of every IO that is sent to legs.
func answered(io *block.IO) {
	s := io.Owner.(*legIO)
	p := s.p
	var e effects
	p.sh.mu.Lock()
	s.answered(&e)
	p.sh.mu.Unlock()
	e.run()
}

// answered continues after the answer of the leg's device.
func (s *legIO) answered(e *effects) {
	p, l := s.p, &s.p.c.legs[s.copy]
	void, err := s.count(l)
	s.state = s.progress(l, void, err)
	if s.state == partOut {
		s.send(e)
		return
	}
	s.account(err, e)
	switch s.state {
	case partPaused:
		if (void || err != nil) && p.c.running() {
			l.out.Add(-1)
			p.again(s.copy, e)
			return
		}
	case partFailed:
		s.failed(l, err, e)
	case partDone:
		if l.inc == s.inc && s.writes() {
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

// failed notes the error of the leg, unless an earlier device of it gave it, to a read. No leg is blamed
// for a lack of space: see space.go.
func (s *legIO) failed(l *leg, err error, e *effects) {
	p := s.p
	if errors.Is(err, block.ErrFull) && !s.writes() { // else it would be waited for, for ever
		err = fmt.Errorf("it answers what takes no space with %q", err.Error())
	}
	if s.gen == l.gen && !s.waitsForSpace(l, err) && !p.job.quiet(s, err) && !s.heals(err) {
		e.failures = append(e.failures, failure{p.c, s.copy, s.inc, err, p.kind == kindWrite || p.kind == kindFlush})
	}
}

// count adds up what the device has done. The answer is void if the leg has lost its cache
// since it was given.
func (s *legIO) count(l *leg) (void bool, err error) {
	err = s.io.Err
	current := l.inc == s.inc
	if err != nil && errors.Is(err, block.ErrUnsupported) {
		err = s.goWithout(err, current)
	}
	if err == nil && s.op != block.OpFlush {
		s.done += s.io.Len
	}
	if void = current && s.gen < l.born && !s.reads(); void {
		s.done = 0
	}
	return void, err
}

// progress returns the state after an answer: partOut if the next IO is to be sent at once.
func (s *legIO) progress(l *leg, void bool, err error) part {
	current := l.inc == s.inc
	switch more := s.op != block.OpFlush && s.done < s.p.length(); {
	case (err != nil || void) && current && s.gen != l.gen && !s.reads():
		return partPaused // to be sent to the leg's new device
	case err != nil:
		return partFailed
	case more && current && s.p.c.running():
		return partOut
	case more:
		return partPaused
	}
	return partDone
}

// goWithout continues without an operation that the leg does not support, or returns err if
// that is not possible.
func (s *legIO) goWithout(err error, current bool) error {
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

// hold keeps an extent IO that no leg works on until it can be completed or sent again.
func (p *extentIO) hold(e *effects) {
	if p.c.aborted {
		if !p.out() {
			p.finish(block.ErrGone, e)
		}
		return
	}
	if p.held == 0 {
		p.held = e.time(p.c.v)
		p.wait(p.at) // the leg may have been silent before it failed
	}
	if p.kind == kindWrite && !p.c.v.weak.heldBlocks {
		p.sh.yield(p, e)
	}
	e.rearm = p.c
}

// finish ends an extent IO and releases its range.
func (p *extentIO) finish(err error, e *effects) {
	p.err = err
	p.account(e)
	if p.watched && p.held == 0 && err == nil {
		p.c.v.background.Served(p.at, e.time(p.c.v))
	}
	p.sh.leave(p, e)
	p.next = e.finished
	e.finished = p
}

// SPDX-License-Identifier: Apache-2.0

// Package pace slows down work in the background of users' I/O, such as rebuilds and scrubs: to the rate that the
// operator has set for it ([Limiter]), and while users' I/O takes much longer than without it ([Background]).
//
// Times are in nanoseconds, of the caller's clock.
package pace

import (
	"sync"
	"sync/atomic"
	"time"

	"weft.dev/weft/proto/block"
)

// Limiter spaces work out so that it stays below a rate. All work that shares it shares its rate. It is guarded by the
// Background that it is used with.
type Limiter struct {
	rate block.Size // most in a second; 0: no limit
	due  int64      // when the work so far has used up its time
}

// NewLimiter returns a limiter with a rate; 0: no limit.
func NewLimiter(rate block.Size) Limiter { return Limiter{rate: rate} }

// wait is how long to wait after work on n bytes, which lasted from began to now.
func (l *Limiter) wait(began, now, n int64) time.Duration {
	if l.rate == 0 {
		return 0
	}
	l.due = max(l.due, began) + int64(float64(n)/float64(l.rate)*float64(time.Second))
	return time.Duration(max(0, l.due-now))
}

func (l *Limiter) set(rate block.Size) {
	if l.rate != rate {
		l.rate, l.due = rate, 0
	}
}

// The rules. Users' I/O is slow if it takes SlowFactor times as long as without the work, and SlowMore longer. The work
// is never made slower than LeastRate, in a second, so that it ends.
const (
	SlowFactor = 2
	SlowMore   = 200 * time.Microsecond
	LeastRate  = 8 * block.MiB
)

// throttle decides how fast work may be while users' IO is served.
type throttle struct {
	rate  block.Size    // most in a second; 0: no limit
	alone time.Duration // what an IO of users takes without the work; 0: not known
}

// Sample is a number of users' I/Os, and how long they took together.
type Sample struct {
	IOs  int64
	Took time.Duration
}

func (s Sample) mean() time.Duration { return s.Took / time.Duration(max(1, s.IOs)) }

func (s Sample) since(o Sample) Sample { return Sample{s.IOs - o.IOs, s.Took - o.Took} }

// look decides anew, by the users' IOs that were served in a short time during the work and
// without it, and by how fast the work was. The rate is halved while users' IO is slow, and grows
// by a quarter otherwise, until the work is not as fast as it may be.
func (t *throttle) look(during, without Sample, speed block.Size) {
	if without.IOs > 0 {
		t.alone = without.mean()
	}
	slow := t.alone > 0 && during.mean() > max(SlowFactor*t.alone, t.alone+SlowMore)
	switch {
	case slow && t.rate == 0:
		t.rate = max(LeastRate, speed/2)
	case slow:
		t.rate = max(LeastRate, min(t.rate, speed)/2)
	case t.rate > 2*max(speed, LeastRate):
		t.rate = 0
	default:
		t.rate += t.rate / 4
	}
}

// Times of Background. While users' IO is served, the work rests from time to time, to find out
// what the IO takes without it. A rest begins when the steps under way have ended, is long enough for a few IOs,
// and takes less than a tenth of the time.
const (
	lookEvery = 250 * time.Millisecond
	leastRest = 20 * time.Millisecond
	mostRest  = 200 * time.Millisecond
	workRests = 10          // how much longer the work goes on than it rests
	mostDrain = time.Second // for the steps under way to end, before a rest; a drive may hang
	watching  = 2 * time.Second
)

// Background slows down all work on a volume together. The zero value is ready for use, from any goroutine.
//
// Users' I/O is told I/O by I/O ([Background.Served]), or as counts ([Background.Counts]).
type Background struct {
	// Counts returns users' I/Os since some time, for who does not tell them; nil otherwise. ok is false if they are
	// not known. It is set before the first use, and called from [Background.Begin] and [Background.End].
	Counts func() (all Sample, ok bool)

	last  atomic.Int64 // when there was work
	quiet atomic.Int64 // since when the work rests; 0: it does not

	// Users' IOs since the last look.
	during, without meter

	mu       sync.Mutex
	counted  Sample // by Counts, so far
	counts   bool   // counted is known
	busy     int    // steps under way
	throttle throttle
	slowed   Limiter // to throttle.rate
	looked   int64
	moved    int64 // since the last look
	users    bool  // users' IO was served before the last look
	drains   int64 // since when no step begins, so that those under way end and a rest can begin; 0: they may begin
	length   int64 // of that rest
	rest     int64 // the end of the rest under way, or of the last one
	resumed  int64 // when the next one begins
}

// meter adds up users' IOs.
type meter struct{ ios, took atomic.Int64 }

func (m *meter) add(took int64) {
	m.ios.Add(1)
	m.took.Add(took)
}

func (m *meter) addAll(s Sample) {
	m.ios.Add(s.IOs)
	m.took.Add(int64(s.Took))
}

func (m *meter) take() Sample {
	return Sample{m.ios.Swap(0), time.Duration(m.took.Swap(0))}
}

// Watches reports whether the latency of an I/O that starts now says something.
func (b *Background) Watches(now int64) bool {
	last := b.last.Load()
	return last != 0 && now-last < int64(watching)
}

// Served notes that an I/O of users was answered.
func (b *Background) Served(began, now int64) {
	switch quiet := b.quiet.Load(); {
	case quiet == 0:
		b.during.add(now - began)
	case quiet <= began:
		b.without.add(now - began)
	} // else the work was still ending when the IO began
}

// Begin begins a step of the work, unless it has to wait before.
func (b *Background) Begin(now int64) (wait time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.drains != 0 && now-b.drains >= int64(mostDrain) {
		b.rested(now)
	}
	if pause := b.pause(now); pause > 0 {
		return pause
	}
	b.last.Store(now)
	b.busy++
	if b.quiet.Load() != 0 {
		b.count(&b.without)
	}
	b.quiet.Store(0)
	return 0
}

// count adds what users' I/O has come to since it was counted last. b.mu is locked.
func (b *Background) count(to *meter) {
	if b.Counts == nil {
		return
	}
	now, ok := b.Counts()
	if d := now.since(b.counted); ok && b.counts && d.IOs >= 0 && d.Took >= 0 {
		to.addAll(d)
	}
	b.counted, b.counts = now, ok
}

// End ends a step that has worked on n bytes since began, and says how long to wait before the
// next one. own is the limit of the job.
func (b *Background) End(own *Limiter, began, now, n int64) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.last.Store(now)
	b.busy--
	b.moved += n
	b.look(now)
	if b.users && now >= b.resumed && b.drains == 0 {
		b.drains, b.length = now, int64(min(max(leastRest, 2*time.Duration(now-began)), mostRest))
	}
	if b.busy == 0 && b.drains != 0 {
		b.rested(now + b.length)
		b.count(&b.during)
		b.quiet.Store(now)
	}
	return max(own.wait(began, now, n), b.slowed.wait(began, now, n), b.pause(now))
}

// rested sets the end of a rest, and when the next one begins. b.mu is locked.
func (b *Background) rested(end int64) {
	b.rest, b.resumed, b.drains = end, end+workRests*(end-b.drains), 0
}

// pause is how long no step may begin. b.mu is locked.
func (b *Background) pause(now int64) time.Duration {
	if b.drains != 0 {
		return leastRest // then the steps under way may have ended
	}
	return time.Duration(max(0, b.rest-now))
}

// SetRate changes the rate of a job.
func (b *Background) SetRate(own *Limiter, rate block.Size) {
	b.mu.Lock()
	defer b.mu.Unlock()
	own.set(rate)
}

// Slow sets how fast the work may be until users' I/O says otherwise; 0: as fast as it can.
func (b *Background) Slow(rate block.Size) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.throttle.rate = rate
	b.slowed.set(rate)
}

// look has throttle decide anew from time to time. b.mu is locked.
func (b *Background) look(now int64) {
	past := now - b.looked
	if past < int64(lookEvery) {
		return
	}
	if b.quiet.Load() == 0 {
		b.count(&b.during)
	}
	during, without := b.during.take(), b.without.take()
	speed := block.Size(float64(b.moved) / float64(past) * float64(time.Second))
	b.looked, b.moved = now, 0
	b.users = during.IOs+without.IOs > 0
	if past > int64(watching) {
		return // there was a time without work
	}
	b.throttle.look(during, without, speed)
	b.slowed.set(b.throttle.rate)
}

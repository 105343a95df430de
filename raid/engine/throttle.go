// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"sync"
	"sync/atomic"
	"time"

	"weft.dev/weft/proto/block"
)

// Rebuilds and scrubs work in the background of users' IO. Three things slow them down: a pause
// after each step while users' IO is served (see lane.pause and Scrub.pause), the rate that the
// owner has set for each of them (limiter), and the latency of users' IO, which is measured with
// and without them (throttle).

// limiter spaces work out so that it stays below a rate. All work that shares it shares its rate.
type limiter struct {
	rate block.Size // most in a second; 0: no limit
	due  int64      // when the work so far has used up its time
}

// wait is how long to wait after work on n bytes, which lasted from began to now.
func (l *limiter) wait(began, now, n int64) time.Duration {
	if l.rate == 0 {
		return 0
	}
	l.due = max(l.due, began) + int64(float64(n)/float64(l.rate)*float64(time.Second))
	return time.Duration(max(0, l.due-now))
}

func (l *limiter) set(rate block.Size) {
	if l.rate != rate {
		l.rate, l.due = rate, 0
	}
}

// The rules of throttle. Users' IO is slow if it takes slowFactor times as long as without the
// work, and slowMore longer. The work is never made slower than leastRate, so that it ends.
const (
	slowFactor = 2
	slowMore   = 200 * time.Microsecond
	leastRate  = 8 * block.MiB
)

// throttle decides how fast work may be while users' IO is served.
type throttle struct {
	rate  block.Size    // most in a second; 0: no limit
	alone time.Duration // what an IO of users takes without the work; 0: not known
}

// sample is a number of users' IOs, and how long they took together.
type sample struct {
	ios  int64
	took time.Duration
}

func (s sample) mean() time.Duration { return s.took / time.Duration(max(1, s.ios)) }

// look decides anew, by the users' IOs that were served in a short time during the work and
// without it, and by how fast the work was. The rate is halved while users' IO is slow, and grows
// by a quarter otherwise, until the work is not as fast as it may be.
func (t *throttle) look(during, without sample, speed block.Size) {
	if without.ios > 0 {
		t.alone = without.mean()
	}
	slow := t.alone > 0 && during.mean() > max(slowFactor*t.alone, t.alone+slowMore)
	switch {
	case slow && t.rate == 0:
		t.rate = max(leastRate, speed/2)
	case slow:
		t.rate = max(leastRate, min(t.rate, speed)/2)
	case t.rate > 2*max(speed, leastRate):
		t.rate = 0
	default:
		t.rate += t.rate / 4
	}
}

// Times of background. While users' IO is served, the work rests from time to time: what the IO
// takes then is what it takes without the work. A rest is long enough for a few IOs, and takes
// less than a tenth of the time.
const (
	lookEvery = 250 * time.Millisecond
	leastRest = 20 * time.Millisecond
	mostRest  = 200 * time.Millisecond
	workRests = 10 // how much longer the work goes on than it rests
	watching  = 2 * time.Second
)

// background is what the rebuilds and scrubs of a volume share.
type background struct {
	last  atomic.Int64 // when there was work
	quiet atomic.Int64 // since when the work rests; 0: it does not

	// Users' IOs since the last look.
	during, without meter

	mu       sync.Mutex
	busy     int // steps under way
	throttle throttle
	slowed   limiter // to throttle.rate
	looked   int64
	moved    int64 // since the last look
	users    bool  // users' IO was served before the last look
	rest     int64 // the end of the rest under way, or of the last one
	resumed  int64 // when the next one begins
}

// meter adds up users' IOs.
type meter struct{ ios, took atomic.Int64 }

func (m *meter) add(took int64) {
	m.ios.Add(1)
	m.took.Add(took)
}

func (m *meter) take() sample {
	return sample{m.ios.Swap(0), time.Duration(m.took.Swap(0))}
}

// watches reports whether the latency of an IO that starts now says something.
func (b *background) watches(now int64) bool {
	last := b.last.Load()
	return last != 0 && now-last < int64(watching)
}

// served notes that an IO of users was answered.
func (b *background) served(began, now int64) {
	switch quiet := b.quiet.Load(); {
	case quiet == 0:
		b.during.add(now - began)
	case quiet <= began:
		b.without.add(now - began)
	} // else the work was still ending when the IO began
}

// begin begins a step of the work, unless it has to wait before.
func (b *background) begin(now int64) (wait time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if now < b.rest {
		return time.Duration(b.rest - now)
	}
	b.last.Store(now)
	b.busy++
	b.quiet.Store(0)
	return 0
}

// end ends a step that has worked on n bytes since began, and says how long to wait before the
// next one. own is the limit of the job.
func (b *background) end(own *limiter, began, now, n int64) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.last.Store(now)
	b.busy--
	b.moved += n
	b.look(now)
	if b.users && now >= b.resumed {
		length := int64(min(max(leastRest, 2*time.Duration(now-began)), mostRest))
		b.rest, b.resumed = now+length, now+(workRests+1)*length
	}
	if b.busy == 0 && now < b.rest {
		b.quiet.Store(now)
	}
	return max(own.wait(began, now, n), b.slowed.wait(began, now, n), time.Duration(b.rest-now))
}

// setRate changes the rate of a job.
func (b *background) setRate(own *limiter, rate block.Size) {
	b.mu.Lock()
	defer b.mu.Unlock()
	own.set(rate)
}

// look has throttle decide anew from time to time. b.mu is locked.
func (b *background) look(now int64) {
	past := now - b.looked
	if past < int64(lookEvery) {
		return
	}
	during, without := b.during.take(), b.without.take()
	speed := block.Size(float64(b.moved) / float64(past) * float64(time.Second))
	b.looked, b.moved = now, 0
	b.users = during.ios+without.ios > 0
	if past > int64(watching) {
		return // there was a time without work
	}
	b.throttle.look(during, without, speed)
	b.slowed.set(b.throttle.rate)
}

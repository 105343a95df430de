// SPDX-License-Identifier: Apache-2.0

// Package beat lets the periodic work of a program happen at common moments.
//
//	time.Ticker    ·  |    · |  |  ·   | ·      each from its own start
//	beat.Ticker    |       |       |       |    all at multiples of their intervals
//
// To wake a processor that sleeps costs tens of microseconds, more than most periodic work. An
// idle program with a hundred tickers would wake it hundreds of times a second. When the tickers
// fire together, one wake serves all.
package beat

import (
	"hash/fnv"
	"sync"
	"sync/atomic"
	"time"
)

// offset is by how much the ticks of this program come after those of the wall clock.
var offset atomic.Int64

// Spread moves the ticks of all tickers made later by an amount that depends on name, for example
// a machine's: otherwise the programs of a whole cluster would do their periodic work at once.
func Spread(name string) {
	h := fnv.New64a()
	h.Write([]byte(name))
	offset.Store(int64(h.Sum64() % uint64(time.Minute)))
}

// Ticker is like time.Ticker, but ticks together with all tickers of the same interval, and of its
// multiples. So the first tick comes sooner than one interval. If the wall clock is set, one tick
// comes half an interval to one and a half after the last one.
type Ticker struct {
	// C gets the time of each tick. If the last one has not been received, a tick is left out.
	C <-chan time.Time

	c    chan time.Time
	call func() // instead of c; nil: none

	mu      sync.Mutex
	every   time.Duration
	timer   *time.Timer
	stopped bool
}

// NewTicker starts a ticker. The interval is positive.
func NewTicker(every time.Duration) *Ticker {
	c := make(chan time.Time, 1)
	return (&Ticker{C: c, c: c, every: every}).start()
}

// Call starts a ticker that calls f at each tick, in a goroutine of its own, and does not use C.
func Call(every time.Duration, f func()) *Ticker { return (&Ticker{every: every, call: f}).start() }

func (t *Ticker) start() *Ticker {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.timer = time.AfterFunc(until(time.Now(), t.every), t.tick)
	return t
}

// tick is called by the timer.
func (t *Ticker) tick() {
	now := time.Now()
	if !t.again(now) {
		return
	}
	if t.call != nil {
		t.call()
		return
	}
	select {
	case t.c <- now:
	default:
	}
}

// again arms the timer for the next tick, and reports whether this one counts.
func (t *Ticker) again(now time.Time) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.stopped {
		t.timer.Reset(pause(now, t.every))
	}
	return !t.stopped
}

// Reset changes the interval of a ticker that is not stopped.
func (t *Ticker) Reset(every time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.every = every
	t.timer.Reset(until(time.Now(), every))
}

// Stop ends the ticks. It may be called more than once.
func (t *Ticker) Stop() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.stopped = true
	t.timer.Stop()
}

// Pause is how long after a tick of now the next one is, for work whose interval changes.
func Pause(every time.Duration) time.Duration { return pause(time.Now(), every) }

// pause is how long after a tick the next one is. The timer and the wall clock may differ a little,
// so that a tick seems to be early: the same moment does not count twice.
func pause(now time.Time, every time.Duration) time.Duration {
	d := until(now, every)
	if d < every/2 {
		d += every
	}
	return d
}

// until is how long after now the next common moment is: one interval at most.
func until(now time.Time, every time.Duration) time.Duration {
	d := every - time.Duration((now.UnixNano()-offset.Load())%int64(every))
	if d > every { // before 1970
		d -= every
	}
	return d
}

// SPDX-License-Identifier: Apache-2.0

package figures

import (
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// Tally counts what goes through one place of the data path, under the lock of that place. It
// takes memory only for what it has counted, and none for each I/O. It has to be taken before 2^32
// I/Os are in one bucket.
//
// To time an I/O costs several times what it costs to count it. A place with many I/Os may use Add
// only for those that a Sampler chooses, and AddUntimed for the others. Each I/O that is added then
// also stands for the untimed ones before it, so sums of times, and percentiles, are estimates for
// all I/Os.
type Tally struct {
	done  [Ops]done // apart from the rest, because these few bytes are all that most I/Os touch
	times [Ops]times
}

type done struct{ ios, bytes uint64 }

type times struct {
	errors  uint64
	covered uint64 // I/Os for which one in latency stands; what is untimed since then is done.ios less this
	took    int64
	latency *[Buckets]uint32
}

// AddUntimed counts one I/O without its time.
func (t *Tally) AddUntimed(op Op, bytes int64) {
	d := &t.done[op]
	d.ios++
	d.bytes += uint64(bytes)
}

// Add counts one I/O. Unless it has failed, it stands for those that were not timed before it.
func (t *Tally) Add(op Op, bytes int64, took time.Duration, failed bool) {
	t.AddUntimed(op, bytes)
	c := &t.times[op]
	n := uint32(1)
	if failed {
		c.errors++
	} else {
		n = uint32(t.done[op].ios - c.covered)
	}
	c.covered += uint64(n)
	c.took += int64(took) * int64(n)
	if c.latency == nil {
		c.latency = new([Buckets]uint32)
	}
	c.latency[Bucket(took)] += n
}

// Take moves what was counted to f.
func (t *Tally) Take(f *Figures) {
	for op := range t.done {
		d, c, to := &t.done[op], &t.times[op], &f[op]
		if d.ios == 0 {
			continue
		}
		to.IOs += d.ios
		to.Bytes += d.bytes
		to.Errors += c.errors
		to.Took += time.Duration(c.took)
		c.covered -= d.ios // below 0, if some are untimed: that wraps, and so does the difference
		*d, c.errors, c.took = done{}, 0, 0
		if c.latency == nil {
			continue // none was timed yet
		}
		if to.Latency == nil {
			to.Latency = make(Histogram, Buckets)
		}
		for i, n := range c.latency {
			to.Latency[i] += uint64(n)
		}
		clear(c.latency[:])
	}
}

// meterShards is the number of locks of a Meter.
const meterShards = 8

// Meter is a Tally that any goroutine may add to.
type Meter struct {
	shards [meterShards]meterShard

	mu    sync.Mutex
	taken Figures
}

// meterShard counts an I/O that is not timed with one addition, without the lock. Those that are timed
// move these counts to the tally.
type meterShard struct {
	untimed [Ops]atomic.Uint64 // I/Os in the lower countBits, their bytes above
	every   atomic.Uint32      // one of so many is timed

	mu    sync.Mutex
	pace  pace
	tally Tally
	_     [64]byte // the next one is in another cache line
}

// An I/O of more bytes than mostUntimed is counted with the lock. As one in mostEvery moves the counts,
// the lower bits never hold as many I/Os as they could, nor the upper ones as many bytes.
const (
	countBits   = 24
	mostUntimed = 1 << 30
)

// Instant is a time on a clock of this process; 0 is none.
type Instant time.Duration

var started = time.Now()

func now() Instant { return Instant(time.Since(started)) + 1 }

// shard is that of an I/O. I/Os with other values of at rarely wait for one another.
func (m *Meter) shard(at uint64) *meterShard { return &m.shards[at*0x9e3779b97f4a7c15>>61] }

// Begin is called before an I/O. Its result is for End.
func (m *Meter) Begin(at uint64) Instant {
	if every := m.shard(at).every.Load(); every > 1 && rand.Uint32()&(every-1) != 0 {
		return 0
	}
	return now()
}

// End counts one I/O that has ended.
func (m *Meter) End(at uint64, op Op, bytes int64, began Instant, failed bool) {
	s := m.shard(at)
	if began == 0 && !failed && bytes <= mostUntimed {
		s.untimed[op].Add(uint64(bytes)<<countBits | 1)
		return
	}
	ended := now()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.move(op)
	if began == 0 {
		s.tally.AddUntimed(op, bytes)
		if failed {
			s.tally.times[op].errors++
		}
	} else {
		s.tally.Add(op, bytes, time.Duration(ended-began), failed)
	}
	if s.pace.ios++; s.pace.ios >= paceIOs {
		s.every.Store(s.pace.look(int64(ended)))
	}
}

// move moves what was counted without the lock to the tally. The shard is locked.
func (s *meterShard) move(op Op) {
	if s.untimed[op].Load() == 0 {
		return
	}
	n := s.untimed[op].Swap(0)
	ios, to := n&(1<<countBits-1), &s.tally.done[op]
	to.ios += ios
	to.bytes += n >> countBits
	s.pace.ios += uint32(ios)
}

// Add counts one I/O of which the caller knows how long it took.
func (m *Meter) Add(at uint64, op Op, bytes int64, took time.Duration, failed bool) {
	s := m.shard(at)
	s.mu.Lock()
	s.tally.Add(op, bytes, took, failed)
	s.mu.Unlock()
}

// Figures returns what was counted so far.
func (m *Meter) Figures() Figures {
	m.mu.Lock()
	defer m.mu.Unlock()
	for i := range m.shards {
		s := &m.shards[i]
		s.mu.Lock()
		for op := range Op(Ops) {
			s.move(op)
		}
		s.tally.Take(&m.taken)
		s.mu.Unlock()
	}
	return m.taken.Clone()
}

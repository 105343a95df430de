// SPDX-License-Identifier: Apache-2.0

package figures

import (
	"math/rand/v2"
	"time"
)

// Where there are more than 4000 I/Os in a second, one in leastEvery is timed, and one in twice and
// four times as many from 8000 and 16000 on. So at least 500 are timed in a second, of which the
// slowest hundredth is still five.
const (
	paceIOs    = 256 // after so many I/Os the pace is looked at
	paceTime   = 64 * time.Millisecond
	leastEvery = 8
	mostEvery  = 32
)

// pace measures how many I/Os there are.
type pace struct {
	ios   uint32 // since the last look
	since int64
}

// look returns how many I/Os there are to be for one that is timed.
func (p *pace) look(now int64) uint32 {
	took := time.Duration(now-p.since) * paceIOs / time.Duration(p.ios)
	p.ios, p.since = 0, now
	switch {
	case took > paceTime:
		return 1
	case took > paceTime/2:
		return leastEvery
	case took > paceTime/4:
		return 2 * leastEvery
	}
	return mostEvery
}

// Sampler chooses which I/Os of one place are timed: all while they are few, and some where they are
// many. Each has the same chance, whichever were chosen before: then no pattern matters that I/Os could
// have, nor that they end in another order. It is used under the lock of its place.
type Sampler struct {
	skip  uint32 // the next ones are not chosen
	every uint32
	pace  pace
}

// Next reports whether an I/O that begins now is chosen. Now is in nanoseconds, on any clock.
func (s *Sampler) Next(now int64) bool {
	if s.pace.ios++; s.pace.ios == paceIOs {
		s.every = s.pace.look(now)
	}
	if s.skip > 0 {
		s.skip--
		return false
	}
	if s.every > 1 {
		s.skip = uint32(rand.ExpFloat64() * (float64(s.every) - 0.5)) // every-1 in the mean
	}
	return true
}

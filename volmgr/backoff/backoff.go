// SPDX-License-Identifier: Apache-2.0

// Package backoff spaces out the rebuilds of legs whose writes fail. Such a leg may look
// healthy to its host and its target, which report at once that it can be rebuilt again.
//
// A rebuild fails if it does not complete, or if the leg is lost within a minute after it.
// After the first failure the leg is rebuilt at once, after the second it waits for a
// second, then twice as long each time, up to a minute. The count of failures is durable and
// its owner's. The start of a pause is not durable, since it is a monotonic time: after a
// restart of the manager a pause starts again.
package backoff

import (
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/cow"
)

const (
	first   = time.Second
	longest = time.Minute
)

// Pause is how long a leg has to wait for its next rebuild after this many failures in a row.
func Pause(failures int) time.Duration {
	if failures < 2 {
		return 0
	}
	return min(first<<min(failures-2, 10), longest)
}

// Trials says for each leg when it was last lost, and when it was last rebuilt, since the
// manager started. A copy of it stays as it is if the writer then changes, see package cow.
type Trials struct{ of cow.Map[block.LegID, trial] }

type trial struct{ lost, good time.Time }

// Lost notes that a leg was lost.
func (t *Trials) Lost(w *cow.Writer, leg block.LegID, now time.Time) {
	x := t.of.Get(leg)
	x.lost = now
	t.of.Set(w, leg, x)
}

// Rebuilt notes that a leg was rebuilt.
func (t *Trials) Rebuilt(w *cow.Writer, leg block.LegID, now time.Time) {
	t.of.Set(w, leg, trial{good: now})
}

// Forget forgets a leg.
func (t *Trials) Forget(w *cow.Writer, leg block.LegID) { t.of.Delete(w, leg) }

// LostAt is when a leg was last lost; zero if that is not known.
func (t *Trials) LostAt(leg block.LegID) time.Time { return t.of.Get(leg).lost }

// Fresh reports whether a leg was rebuilt so recently that a loss now is a failure of the
// rebuild.
func (t *Trials) Fresh(leg block.LegID, now time.Time) bool {
	good := t.of.Get(leg).good
	return !good.IsZero() && now.Sub(good) < longest
}

// Times are when a leg was last lost, and when it was last rebuilt; zero: that is not known.
type Times struct{ Lost, Rebuilt time.Time }

// All returns the times of every leg.
func (t *Trials) All() map[block.LegID]Times {
	all := map[block.LegID]Times{}
	for leg, x := range t.of.All() {
		all[leg] = Times{x.lost, x.good}
	}
	return all
}

// Put sets the times of a leg.
func (t *Trials) Put(w *cow.Writer, leg block.LegID, times Times) {
	t.of.Set(w, leg, trial{times.Lost, times.Rebuilt})
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"time"

	"weft.dev/weft/proto/block"
)

// A leg that has no space (block.ErrFull) has not failed: no lack of space has a leg dropped, and space
// alone ends it. What lacks space is tried again, at intervals of lastRetry at most:
//
//	a write of users     waits on a leg that is in sync or has caught up: nothing may be acknowledged
//	                     that it lacks
//	a rebuild            waits, and users do not wait for it: see starve
//	copies made equal    wait only if each of the legs lacks space for what another has: see lacksSpace
//	a repair of a scrub  ends as not repaired

// fedAfter is for how long copies must have found space until a rebuilding leg is given what users write
// again. They find some where the leg needs none; and a write that finds none is held up by the target.
const fedAfter = 3 * time.Second

// waitsForSpace reports whether a leg has failed an IO only because it has no space. A rebuilding leg is
// starved, unless it was dropped meanwhile.
func (s *legIO) waitsForSpace(l *leg, err error) bool {
	if !errors.Is(err, block.ErrFull) {
		return false
	}
	s.full = s.p.kind == kindWrite && (l.state == InSync || l.state == CaughtUp)
	return s.full || l.state != Rebuilding
}

// takes reports whether users' writes go to a leg. One that rebuilds and has no space is given what may
// free some, and misses the rest: users would wait at each new place until the target has told that
// there is no space, for a leg from which nothing is read.
func (l *leg) takes(op block.Op) bool {
	return l.member() && (l.starved == 0 || op != block.OpWrite)
}

// starve lets users' writes go on without a rebuilding leg that has no space. The leg stays, keeps what it
// has, and is copied to as space comes free; what it was not given meanwhile it misses, as if it had been
// dropped. The column is locked.
func (c *column) starve(copy int, e *effects) {
	l := &c.legs[copy]
	l.starved = c.v.clock.now()
	for _, p := range c.snapshot() {
		if s := &p.legs[copy]; p.kind == kindWrite && p.phase == phaseStarted && s.state == partFailed && s.inc == l.inc {
			c.misses(copy, p)
			s.state = partNone
			p.settle(e)
		}
	}
}

// fed reports whether the leg has space. It gives the leg what users write again once copies have found
// space for some time.
func (r *rebuild) fed() bool {
	c := r.c
	l, now := &c.legs[r.copy], c.v.clock.now()
	c.shards[0].mu.Lock()
	starved := l.starved
	c.shards[0].mu.Unlock()
	if starved == 0 || now-starved < int64(fedAfter) {
		return starved == 0
	}
	c.lock()
	defer c.unlock()
	if l.inc == r.inc && l.starved == starved {
		l.starved = 0
	}
	return l.starved == 0
}

// lacksSpace notes that a leg has no space for what the unit holds on the leg that is right, and returns
// how long to wait. Either may be right, so first the other way is tried: it needs no space where only a
// write that had not ended made the difference, since the leg that has it has the space. So a full drive
// hardly ever keeps a volume from being used. q.mu is locked.
func (u *unit) lacksSpace(copy int) (pause time.Duration) {
	u.right, u.short = copy, u.short.With(copy)
	if u.vain > 0 {
		pause = min(firstRetry<<(u.vain-1), lastRetry)
	}
	u.vain = min(u.vain+1, 8)
	return pause
}

// addTo notes in the status of the volume which legs lack space for being made equal.
func (q *equalizer) addTo(s *Status) {
	if q == nil {
		return
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	for i := range q.lanes {
		u := q.lanes[i].unit
		if u == nil || u.vain < 2 {
			continue
		}
		for copy := range s.Legs[u.column] {
			leg := &s.Legs[u.column][copy]
			leg.Short = leg.Short || u.short.Has(copy) && leg.State == InSync
		}
	}
}

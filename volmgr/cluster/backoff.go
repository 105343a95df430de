// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"time"

	"weft.dev/weft/proto/block"
)

// A leg whose writes fail looks well to its host and its target, which say at once
// that it can be rebuilt. A rebuild that failed, or was of no use for long, is tried
// again at once; those after it are this far apart at first, twice as far each time, and
// not farther than this. A leg that was good for the latter begins anew, and so does one
// whose target was away: that explains the loss, and ends.
//
// How often is durable. Since when is not, and goes by the clock that nobody sets: after a
// start of the manager a pause begins anew.
const (
	rebuildPause     = time.Second
	rebuildPauseMost = time.Minute
)

// trial is when a leg was last lost, and when it was last good again, in this run of the
// manager.
type trial struct{ lost, good time.Time }

// failed counts a loss during a rebuild, or soon after one.
func (t *tx) failed(l *Leg) {
	good := t.s.trials[l.ID].good
	soon := !good.IsZero() && t.now.Sub(good) < rebuildPauseMost
	away := !t.s.targetOnline(l.Node)
	if (l.State == LegRebuilding || soon) && !away {
		l.Failures++
	} else {
		l.Failures = 0
	}
}

// excuse forgets the failures of a node's legs when it is seen that its target was away:
// the losses may have been noticed before that.
func (t *tx) excuse(node block.NodeName) {
	for id := range t.s.onNode[node] {
		for _, l := range t.peek(id).Legs {
			if l.Node == node && l.Failures > 0 {
				t.volume(id).leg(l.ID).Failures = 0
			}
		}
	}
}

// pause is how long a stale leg has to wait for its next rebuild.
func (l *Leg) pause() time.Duration {
	if l.Failures < 2 {
		return 0
	}
	return min(rebuildPause<<min(l.Failures-2, 10), rebuildPauseMost)
}

// pauses reports whether that time is not over yet.
func (s *State) pauses(l *Leg) bool {
	lost := s.trials[l.ID].lost
	return l.pause() > 0 && (lost.IsZero() || s.now.Sub(lost) < l.pause())
}

// settleTrials begins the pauses of legs that were lost before the manager started.
func (t *tx) settleTrials(id block.VolumeID) {
	for _, l := range t.peek(id).Legs {
		if l.State == LegStale && t.s.trials[l.ID].lost.IsZero() {
			t.s.lost(l.ID, t.now)
		}
	}
}

func (s *State) lost(id block.LegID, now time.Time) {
	x := s.trials[id]
	x.lost = now
	s.trials[id] = x
}

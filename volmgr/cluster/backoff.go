// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"time"

	"weft.dev/weft/proto/block"
)

// A leg whose writes fail may look healthy to its host and its target, which report at once
// that it can be rebuilt again. So rebuilds back off. A rebuild fails if it does not
// complete, or if the leg is lost within rebuildPauseMost after it. After the first failure
// the leg is rebuilt at once, after the second it waits for rebuildPause, then twice as long
// each time, up to rebuildPauseMost. The count starts again for a leg that stayed good
// longer, and for one whose target was away, since that explains the loss.
//
// The count is durable. The start of a pause is not, since it is a monotonic time: after a
// restart of the manager a pause starts again.
const (
	rebuildPause     = time.Second
	rebuildPauseMost = time.Minute
)

// trial says when a leg was last lost, and when it was last rebuilt, since the manager
// started.
type trial struct{ lost, good time.Time }

// failed counts a loss during a rebuild, or soon after one. Any other loss resets the count.
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

// excuse resets the failures of a node's legs when its target turns out to be away: the
// losses may have been recorded before that was known.
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

// pauses reports whether a stale leg's pause is not over yet.
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

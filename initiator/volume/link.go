// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"slices"
	"time"
)

// LinkState is how well a host reaches a leg, in the words of pb.LinkState.
type LinkState string

// The states of a link.
const (
	LinkLive       LinkState = "live"
	LinkConnecting LinkState = "connecting" // or silent for a moment
	LinkLost       LinkState = "lost"       // silent for longer than the window
	LinkAbsent     LinkState = "absent"     // there is no connection
)

// Link reports how a leg is reached, and what is wrong. A leg counts as lost once its silence
// exceeds window.
func (s *Seen) Link(l *Link, window time.Duration) (state LinkState, why string) {
	leg := s.Legs[l.Leg]
	made := func(p PathSeen) bool { return p.Subsystem == l.NQN && p.made() }
	switch silence := leg.Silence(s.Now); {
	case leg.Live && silence == 0:
		return LinkLive, leg.Error
	case !leg.Found && !slices.ContainsFunc(s.Paths, made):
		return LinkAbsent, s.Refusal(l.NQN)
	case silence > window && leg.Found:
		return LinkLost, leg.Error
	}
	return LinkConnecting, leg.Error
}

// Empty reports whether nothing of a volume is here.
func (s *Seen) Empty() bool {
	return !s.Built() && !slices.ContainsFunc(s.Paths, func(p PathSeen) bool { return p.made() || p.usable() })
}

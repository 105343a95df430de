// SPDX-License-Identifier: Apache-2.0

package managers

import (
	"testing"
	"time"
)

// outage is how many streams an agent opens, none of which works, in a time, and the longest pause.
func outage(p *Pauses, lasts time.Duration, random float64) (tries int, longest time.Duration) {
	for now, end := time.Unix(0, 0), time.Unix(0, 0).Add(lasts); now.Before(end); tries++ {
		pause := p.After(now, now, random)
		longest = max(longest, pause)
		now = now.Add(pause)
	}
	return tries, longest
}

// While a leader is elected, an agent asks often, and at most five times a second. After some seconds
// it asks more rarely.
func TestAgentsAskOftenAtFirst(t *testing.T) {
	for _, random := range []float64{0, 0.5, 0.999} {
		var p Pauses
		if tries, longest := outage(&p, 3*time.Second, random); longest > 300*time.Millisecond || tries > 15 {
			t.Errorf("random %v: %d streams in 3s, with pauses up to %v", random, tries, longest)
		}
		p = Pauses{}
		if tries, longest := outage(&p, time.Minute, random); longest > 3*time.Second || longest < 2*time.Second || tries > 60 {
			t.Errorf("random %v: %d streams in a minute, with pauses up to %v", random, tries, longest)
		}
	}
}

// After a stream that has lasted, the pauses are short again.
func TestPausesAreShortAfterAStreamThatWorked(t *testing.T) {
	var p Pauses
	outage(&p, time.Minute, 0)
	began := time.Unix(1000, 0)
	if pause := p.After(began, began.Add(time.Minute), 0); pause != pauseFirst {
		t.Errorf("the pause is %v, want %v", pause, pauseFirst)
	}
}

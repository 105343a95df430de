// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"errors"
	"testing"
	"time"
)

// A leg owes an answer since its probe was sent, but only if the host has looked since: one that was
// frozen cannot tell. An error is an answer.
func TestALegOwesAnAnswerOnlyToAHostThatHasLooked(t *testing.T) {
	var p Pulse
	now := time.Unix(1000, 0)
	look := func(live bool) time.Time {
		now = now.Add(100 * time.Millisecond)
		p.Look(now, live, time.Second)
		return p.Unanswered()
	}
	sent := now
	p.Probe(now, now)
	now = now.Add(time.Hour) // frozen
	for i, want := range []time.Time{{}, {}, sent, sent} {
		if got := look(true); !got.Equal(want) {
			t.Errorf("at look %d it owes an answer since %v, want %v", i+1, got, want)
		}
	}
	p.Answered(errors.New("medium error"))
	for i := range 4 {
		if got := look(true); !got.IsZero() {
			t.Errorf("at look %d after an answer it owes one since %v", i+1, got)
		}
	}
	dark := now.Add(100 * time.Millisecond)
	for i, want := range []time.Time{{}, {}, dark} {
		if got := look(false); !got.Equal(want) {
			t.Errorf("at look %d without a controller it owes an answer since %v, want %v", i+1, got, want)
		}
	}
}

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

// Whoever looks at a volume at each answer of each of its legs looks many times for nothing.
func TestTheAnswerOfALegThatAnswersIsNoNews(t *testing.T) {
	failed := errors.New("medium error")
	now := time.Now()
	p := (*Pulse)(nil).Of("8:0")
	look := func(after time.Duration) {
		now = now.Add(after)
		p.Look(now, true, 500*time.Millisecond)
	}
	for i, c := range []struct {
		err   error
		after time.Duration // it takes
		news  bool
	}{
		{nil, 0, true}, // the first one
		{nil, 0, false},
		{nil, 200 * time.Millisecond, false},
		{nil, 600 * time.Millisecond, true}, // it has been silent
		{nil, 0, false},
		{failed, 0, true},
		{failed, 0, true},
		{nil, 0, true},
		{nil, 0, false},
	} {
		look(time.Second)
		p.Probe(now, now)
		if c.after > 0 {
			look(c.after)
		}
		if news := p.Answered(c.err); news != c.news {
			t.Errorf("answer %d: %v after %v is news: %v, want %v", i, c.err, c.after, news, c.news)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"strings"
	"testing"
)

func TestAScrubIsStartedOnceAndStopped(t *testing.T) {
	wanted := &Scrub{ID: "s1"}
	for what, c := range map[string]struct {
		want   *Scrub
		have   *ScrubSeen
		device bool
		held   bool
		failed bool
		order  string
		shown  bool
	}{
		"none is wanted":             {device: true},
		"wanted":                     {want: wanted, device: true, order: "scrub s1"},
		"before there is a device":   {want: wanted},
		"while it fails":             {want: wanted, device: true, failed: true},
		"while I/O is held":          {want: wanted, device: true, held: true},
		"running":                    {want: wanted, have: &ScrubSeen{ID: "s1", Running: true}, device: true, shown: true},
		"done":                       {want: wanted, have: &ScrubSeen{ID: "s1", Done: true}, device: true, shown: true},
		"stopped early":              {want: wanted, have: &ScrubSeen{ID: "s1"}, device: true, order: "scrub s1", shown: true},
		"no longer wanted":           {have: &ScrubSeen{ID: "s1", Running: true}, device: true, order: "stop scrub"},
		"no longer wanted, and done": {have: &ScrubSeen{ID: "s1", Done: true}, device: true},
		"another is running":         {want: wanted, have: &ScrubSeen{ID: "s0", Running: true}, device: true, order: "stop scrub"},
		"another is done":            {want: wanted, have: &ScrubSeen{ID: "s0", Done: true}, device: true, order: "scrub s1"},
		"the rate has changed":       {want: &Scrub{ID: "s1", Rate: 1 << 20}, have: &ScrubSeen{ID: "s1", Running: true}, device: true, order: "scrub at 1MiB a second", shown: true},
		"it asks":                    {want: &Scrub{ID: "s1", Run: "r", Recorded: 1}, have: &ScrubSeen{ID: "s1", Run: "r", Running: true, Asks: true, Found: 2}, device: true, shown: true},
		"it asks, all is recorded":   {want: &Scrub{ID: "s1", Run: "r", Recorded: 2}, have: &ScrubSeen{ID: "s1", Run: "r", Running: true, Asks: true, Found: 2}, device: true, order: "let scrub repair", shown: true},
		"another run is recorded":    {want: &Scrub{ID: "s1", Run: "q", Recorded: 2}, have: &ScrubSeen{ID: "s1", Run: "r", Running: true, Asks: true, Found: 2}, device: true, shown: true},
	} {
		p := &planner{w: &Wanted{Scrub: c.want}, s: &Seen{Scrub: c.have, Device: DeviceSeen{Exists: c.device, Failed: c.failed}, Held: c.held}}
		p.scrub()
		var got []string
		for _, o := range p.orders {
			got = append(got, o.String())
		}
		if strings.Join(got, ", ") != c.order || (p.v.Scrub != nil) != c.shown {
			t.Errorf("%s: orders %q, shown %v; want %q, %v", what, got, p.v.Scrub, c.order, c.shown)
		}
	}
}

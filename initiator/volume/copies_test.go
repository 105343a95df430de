// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"strings"
	"testing"

	"weft.dev/weft/proto/block"
)

// TestALegIsCopiedByWhatItMayLack: of all that it may lack, this host knows some.
func TestALegIsCopiedByWhatItMayLack(t *testing.T) {
	leg, other := block.LegID{UUID: block.UUIDFromRandom([16]byte{1})}, block.LegID{UUID: block.UUIDFromRandom([16]byte{2})}
	known := CopySeen{Leg: leg, Tracked: true}
	covered, whole := known, known
	covered.LossCovered, whole.Whole = true, 4
	both := covered
	both.Whole = 4
	lost := Link{Leg: leg, CopyAll: true, CopyAllSince: 5, CacheLost: true}
	lostNew := lost
	lostNew.AllSince = 4
	lostNewer := lost
	lostNewer.AllSince = 5
	for name, c := range map[string]struct {
		link Link
		seen CopySeen
		all  string // a part of why all of it is copied
	}{
		"it missed writes":                        {Link{Leg: leg}, known, ""},
		"another leg was there":                   {Link{Leg: other}, covered, "not tracked what it misses"},
		"nothing was tracked":                     {Link{Leg: leg}, CopySeen{Leg: leg, LossCovered: true}, "not tracked what it misses"},
		"it lost its cache":                       {lost, covered, ""},
		"what was not flushed is not tracked":     {lost, known, "not tracked what was not flushed"},
		"nor was it when all was copied before":   {lost, whole, "not tracked what was not flushed"},
		"all was copied since":                    {Link{Leg: leg, CopyAll: true, CopyAllSince: 4, CacheLost: true}, whole, ""},
		"of a manager that does not say why":      {Link{Leg: leg, CopyAll: true, CopyAllSince: 5}, both, "does not have the volume's data"},
		"nor since when":                          {Link{Leg: leg, CopyAll: true}, both, "does not have the volume's data"},
		"it was new, and copied before the loss":  {lostNew, both, ""},
		"it was new, and not copied":              {lostNew, covered, "does not have the volume's data"},
		"it was new, and copied by another leg's": {lostNewer, both, "does not have the volume's data"},
	} {
		got := c.seen.whole(&c.link)
		if (got == "") != (c.all == "") || !strings.Contains(got, c.all) {
			t.Errorf("%s: all is copied because %q, want %q", name, got, c.all)
		}
		if what := c.link.Copied(got); strings.HasPrefix(what, "all of it") != (got != "") || got == "" && strings.Contains(what, "cache") != c.link.CacheLost {
			t.Errorf("%s: copied is %q", name, what)
		}
	}
}

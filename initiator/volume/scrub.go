// SPDX-License-Identifier: Apache-2.0

package volume

import "weft.dev/weft/proto/block"

// Scrub asks for the copies of the volume to be compared while it is served.
type Scrub struct {
	ID   string
	Rate block.Size // most that is read of each leg in a second; 0: no limit
}

// ScrubSeen is a scrub that has begun, and what it has found.
type ScrubSeen struct {
	ID         string
	Running    bool // otherwise it has stopped; Done says whether at its end
	Done       bool
	Compared   block.Size // of one copy of each column, all columns together
	Total      block.Size
	Alone      block.Size // of Compared: there were no two copies to compare
	Found      int
	FirstFound []ScrubFinding // the first findings
}

// ScrubFinding is a range of a column whose copies differ, or that a copy cannot read.
type ScrubFinding struct {
	Column      int
	Off, Length block.Size // in each leg
	Equal       [][]int    // groups of copies with the same data
	Unreadable  []int
}

// The orders for a scrub.
type (
	// StartScrub begins it, in place of any other.
	StartScrub struct{ Scrub }
	// StopScrub ends the one that is running.
	StopScrub struct{}
)

func (o StartScrub) String() string { return "scrub " + o.ID }
func (StopScrub) String() string    { return "stop scrub" }

// scrub starts the wanted scrub once users have the device, and stops one that is no longer
// wanted. A scrub that has ended early begins anew.
func (p *planner) scrub() {
	want, have := p.w.Scrub, p.s.Scrub
	if !p.c.Scrubs {
		if want != nil {
			p.v.Note("scrub %s: this data path cannot compare copies", want.ID)
		}
		return
	}
	same := want != nil && have != nil && want.ID == have.ID
	if same {
		p.v.Scrub = have
	}
	switch {
	case have != nil && have.Running && !same:
		p.do(StopScrub{})
	case want != nil && !(same && (have.Running || have.Done)) && p.s.Device.Exists && !p.s.Held:
		p.do(StartScrub{*want})
	}
}

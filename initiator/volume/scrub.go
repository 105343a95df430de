// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"slices"

	"weft.dev/weft/proto/block"
)

// Scrub asks for the copies of the volume to be compared while it is served.
type Scrub struct {
	ID     string
	Rate   block.Size // most that is read of each leg in a second; 0: no limit
	Repair bool
	From   []Place       // Repair: the copies that are right where nothing else tells
	Begin  ScrubPosition // where to begin
	// Run and Recorded say how many findings of which run the manager has recorded: these may be
	// repaired.
	Run      string
	Recorded int
}

// Named are the copies in From, by column; -1: none.
func (s *Scrub) Named(columns int) []int {
	all := slices.Repeat([]int{-1}, columns)
	for _, at := range s.From {
		all[at.Column] = at.Copy
	}
	return all
}

// ScrubPosition is a place in a scrub's way through the volume, which goes column by column.
type ScrubPosition struct {
	Column int
	Off    block.Size // in each leg
}

// ScrubSeen is a scrub that has begun, and what it has found.
type ScrubSeen struct {
	ID         string
	Run        string // another one for each StartScrub
	Rate       block.Size
	Repairs    bool
	Asks       bool // it waits for ProceedScrub
	Position   ScrubPosition
	Settled    int // of the findings, in order: their repair has ended
	Repaired   int
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
	Right       int // the copy that is right; -1: not known
	Outcome     ScrubOutcome
	Error       string
}

// ScrubOutcome is what became of a finding that was to be repaired, in the words of
// pb.ScrubOutcome; empty: it has not been repaired yet, or is not to be.
type ScrubOutcome string

// The outcomes of a repair.
const (
	ScrubNotKnown    ScrubOutcome = "not_known"    // no copy is known to be right; nothing was written
	ScrubRepaired    ScrubOutcome = "repaired"     // the copies were written, and are equal
	ScrubGone        ScrubOutcome = "gone"         // the copies were equal when they were read again
	ScrubNotRepaired ScrubOutcome = "not_repaired" // they could not be read or written, or differ still
)

// The orders for a scrub.
type (
	// StartScrub begins it, in place of any other.
	StartScrub struct{ Scrub }
	// StopScrub ends the one that is running.
	StopScrub struct{}
	// ProceedScrub lets it repair what it has found: the manager has recorded that.
	ProceedScrub struct{}
	// SetScrubRate changes how much it reads.
	SetScrubRate struct{ Rate block.Size }
)

func (o StartScrub) String() string   { return "scrub " + o.ID }
func (StopScrub) String() string      { return "stop scrub" }
func (ProceedScrub) String() string   { return "let scrub repair" }
func (o SetScrubRate) String() string { return "scrub at " + o.Rate.String() + " a second" }

// scrub starts the wanted scrub once users have the device, and stops one that is no longer
// wanted. A scrub that has ended early begins anew, where the manager has recorded that it was.
// What it finds is repaired only after the manager has recorded it: no repair goes unnoticed.
func (p *planner) scrub() {
	want, have := p.w.Scrub, p.s.Scrub
	p.v.Heals = p.s.Heals
	same := want != nil && have != nil && want.ID == have.ID
	if same {
		p.v.Scrub = have
		p.tellScrub(want, have)
	}
	switch {
	case have != nil && have.Running && !same:
		p.do(StopScrub{})
	case want != nil && !(same && (have.Running || have.Done)) && p.s.Device.Exists && !p.s.Device.Failed && !p.s.Held:
		p.do(StartScrub{*want})
	}
}

// tellScrub tells a running scrub what has changed.
func (p *planner) tellScrub(want *Scrub, have *ScrubSeen) {
	if have.Rate != want.Rate && have.Running {
		p.do(SetScrubRate{want.Rate})
	}
	if have.Asks && want.Run == have.Run && want.Recorded >= have.Found {
		p.do(ProceedScrub{})
	}
}

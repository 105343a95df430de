// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
)

// A rebuild copies a column's data to one leg, which a host does while it serves the volume. This
// file keeps their history, and says how far they are; sync.go decides when they begin and end.

// minRebuildRate bounds the rate of rebuilds from below: a host copies 512 KiB at a time, to up to
// 16 places at once.
const minRebuildRate = block.MiB

// mostPastRebuilds is about how many rebuilds that have ended a record keeps.
const mostPastRebuilds = 8

// LegRebuild is the copying of a column's data to one leg.
type LegRebuild struct {
	Leg    block.LegID    `json:"leg"`
	Column int            `json:"column"`
	Copy   int            `json:"copy"`
	Node   block.NodeName `json:"node"`
	Drive  block.DriveID  `json:"drive"`
	// Replaces is the node of the leg that it takes the place of; empty: the leg was there before.
	Replaces block.NodeName `json:"replaces,omitempty"`
	Began    time.Time      `json:"began"`
	Ended    time.Time      `json:"ended,omitzero"`   // zero: it is under way
	Failed   string         `json:"failed,omitempty"` // why it ended early
	// Done and Total are what was copied and what was to be; 0: not known.
	Done  block.Size `json:"done,omitempty"`
	Total block.Size `json:"total,omitempty"`

	// Derived, for readers: of one under way, bytes in a second lately, and the time left at that
	// rate; 0: not known.
	Speed block.Size    `json:"-"`
	Left  time.Duration `json:"-"`
}

// CopyReport is how far a host is with the rebuild of a leg.
type CopyReport struct {
	Leg                block.LegID
	Done, Total, Speed block.Size
}

// beginRebuild records that a leg is copied to.
func (t *tx) beginRebuild(v *Volume, l *Leg) {
	r := LegRebuild{Leg: l.ID, Column: l.Column, Copy: l.Copy, Node: l.Node, Drive: l.Drive, Began: t.now.UTC()}
	if l.Blank {
		for _, o := range v.column(l.Column) {
			if t.leaving(o) != "" && r.Replaces == "" {
				r.Replaces = o.Node
			}
		}
	}
	all, ended := []LegRebuild{r}, 0
	for _, old := range v.Rebuilds {
		if old.Ended.IsZero() {
			all = append(all, old)
		} else if ended++; ended < mostPastRebuilds {
			all = append(all, old)
		}
	}
	v.Rebuilds = all
}

// endRebuild records the end of a leg's rebuild, if one is under way; copied is 0 if the host did
// not say how much that was, and failed is empty if the leg has everything.
func (t *tx) endRebuild(v *Volume, leg block.LegID, copied block.Size, failed string) {
	i := slices.IndexFunc(v.Rebuilds, func(r LegRebuild) bool { return r.Leg == leg && r.Ended.IsZero() })
	if i < 0 {
		return
	}
	all := slices.Clone(v.Rebuilds)
	r := &all[i]
	if c, ok := t.s.copyReport(v, leg); ok {
		r.Done, r.Total = c.Done, c.Total
	}
	if failed == "" {
		r.Done, r.Total = copied, copied
	}
	r.Ended, r.Failed = t.now.UTC(), failed
	v.Rebuilds = all
}

// copyReport is the host's newest report on the rebuild of a leg.
func (s *State) copyReport(v *Volume, leg block.LegID) (CopyReport, bool) {
	if v.Attachment == nil {
		return CopyReport{}, false
	}
	r, ok := s.attachmentReport(v, v.Attachment)
	i := slices.IndexFunc(r.Copies, func(c CopyReport) bool { return c.Leg == leg })
	if !ok || i < 0 {
		return CopyReport{}, false
	}
	return r.Copies[i], true
}

// rebuildViews are a volume's rebuilds as readers see them.
func (s *State) rebuildViews(v *Volume) []LegRebuild {
	all := slices.Clone(v.Rebuilds)
	for i := range all {
		if r := &all[i]; r.Ended.IsZero() {
			if c, ok := s.copyReport(v, r.Leg); ok {
				r.progress(c, s.now)
			}
		}
	}
	return all
}

// progress adds what a host reports. A host that does not say how fast it copies is taken to go on
// as it did so far.
func (r *LegRebuild) progress(c CopyReport, now time.Time) {
	r.Done, r.Total, r.Speed = min(c.Done, c.Total), c.Total, c.Speed
	if past := now.Sub(r.Began).Seconds(); r.Speed == 0 && past >= 1 {
		r.Speed = block.Size(float64(r.Done) / past)
	}
	if r.Speed > 0 {
		r.Left = time.Duration(float64(r.Total-r.Done)/float64(r.Speed)*float64(time.Second)) + time.Second/2
		r.Left = r.Left.Truncate(time.Second)
	}
}

// String says how far a rebuild that is under way has come; empty if that is not known.
func (r LegRebuild) String() string {
	if r.Total == 0 {
		return ""
	}
	text := fmt.Sprintf("%s of %s, %d%%", r.Done.Short(), r.Total.Short(), uint64(100*float64(r.Done)/float64(r.Total)))
	if r.Speed > 0 {
		text += fmt.Sprintf(", %s a second, %v left", r.Speed.Short(), r.Left)
	}
	return text
}

// rebuildOf is the rebuild of a leg that is under way, as readers see it.
func (s *State) rebuildOf(v *Volume, leg block.LegID) (LegRebuild, bool) {
	for _, r := range s.rebuildViews(v) {
		if r.Leg == leg && r.Ended.IsZero() {
			return r, true
		}
	}
	return LegRebuild{}, false
}

// copying says how far the rebuild of a leg is, in brackets.
func (s *State) copying(v *Volume, l *Leg) string {
	r, _ := s.rebuildOf(v, l.ID)
	if text := r.String(); text != "" {
		return " (" + text + ")"
	}
	return s.progress(v)
}

// explainRebuilds says how fast rebuilds may be.
func (s *State) explainRebuilds(e *Explanation, v *Volume) {
	if v.RebuildRate > 0 {
		e.Facts = append(e.Facts, fmt.Sprintf("its legs are rebuilt at %s a second at most", v.RebuildRate.Short()))
	}
}

// setRebuildRate changes the most that is copied to a volume's legs in a second; nil leaves it.
func (t *tx) setRebuildRate(v *Volume, rate *block.Size) error {
	switch {
	case rate == nil || *rate == v.RebuildRate:
		return nil
	case *rate != 0 && *rate < minRebuildRate:
		return invalid("rebuild_bytes_per_second", "%v: must be at least %v, or 0 for no limit", *rate, minRebuildRate)
	}
	t.volume(v.ID).RebuildRate = *rate
	text := "its legs are rebuilt without a limit of the rate"
	if *rate > 0 {
		text = fmt.Sprintf("its legs are rebuilt at %s a second at most", rate.Short())
	}
	t.volumeEvent(v, event.Info, event.VolumeUpdated, text)
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
)

// A scrub is a comparison of a volume's copies by its host, while the host serves it. Nothing is
// changed by it: it finds where copies differ, and no rule tells which of them is right.
//
//	ScrubVolume          the record: Volume.Scrub
//	the host's reports   what differs: of the first 64 ranges, each is an event
//	settleScrub          the record: its end
//
// A scrub that its host has to begin again, because the host or its agent has started anew,
// reports the same ranges again, as events too.

// Scrub is the last scrub of a volume.
type Scrub struct {
	ID    string     `json:"id"`
	Rate  block.Size `json:"rate,omitempty"` // most that is read of each leg in a second; 0: no limit
	Began time.Time  `json:"began"`
	Ended time.Time  `json:"ended,omitzero"` // zero: it is wanted, and may be under way
	// Stopped: an operator ended it.
	Stopped bool `json:"stopped,omitempty"`
	// Found counts the ranges that differ or cannot be read. Alone is how much could not be
	// compared, of a leg, summed over the columns.
	Found int        `json:"found,omitempty"`
	Alone block.Size `json:"alone,omitempty"`

	Done, Total block.Size `json:"-"` // as the host last reported
}

// wanted reports whether the scrub has not ended.
func (c *Scrub) wanted() bool { return c != nil && c.Ended.IsZero() }

// WantedScrub is a scrub that a host is to carry out.
type WantedScrub struct {
	ID   string
	Rate block.Size
}

// ScrubReport is what a host has found so far.
type ScrubReport struct {
	ID       string
	Done     bool
	Compared block.Size
	Total    block.Size
	Alone    block.Size
	Found    int
	Findings []ScrubFinding // the first of them
}

// ScrubFinding is a range of a column whose copies differ, or that copies cannot read.
type ScrubFinding struct {
	Column      int
	Off, Length block.Size // in each leg
	Equal       [][]int    // groups of copies with the same data
	Unreadable  []int
}

func (f ScrubFinding) String() string {
	text := fmt.Sprintf("column %d, %v at %v of each leg", f.Column, f.Length, f.Off)
	if len(f.Equal) > 1 {
		text += fmt.Sprintf(": copies %v differ", f.Equal)
	}
	if len(f.Unreadable) > 0 {
		text += fmt.Sprintf(": copies %v cannot be read", f.Unreadable)
	}
	return text
}

// ScrubVolume begins a scrub of an attached volume, or with Stop ends it. A volume that is being
// scrubbed goes on with that scrub. Result: Volume.
type ScrubVolume struct {
	Volume string
	Rate   block.Size
	Stop   bool
	Seed   Seed
}

func (in ScrubVolume) apply(t *tx) (view, error) {
	v, err := t.s.find(in.Volume)
	switch {
	case err != nil:
		return nil, err
	case in.Stop == !v.Scrub.wanted():
		return volumeResult(v.ID), nil // repeated
	case in.Stop:
		t.endScrub(t.volume(v.ID), ScrubReport{Found: v.Scrub.Found}, true)
		return volumeResult(v.ID), nil
	case v.State != VolumeReady || v.Restored:
		return nil, refused(ReasonNotReady, v.object(), "%s", v.unready())
	case v.Layout.Copies == 1:
		return nil, invalid("volume", "volume %s has one copy: there is nothing to compare it with", v.Name)
	case v.Attachment == nil || v.Attachment.State != Attached:
		return nil, refused(ReasonNotAttached, v.object(), "not attached: its host would compare the copies").hint("`weft attach %s` first", v.Name)
	}
	v = t.volume(v.ID)
	v.Scrub = &Scrub{ID: in.Seed.id(0).String(), Rate: in.Rate, Began: t.now.UTC()}
	t.volumeEvent(v, event.Info, event.ScrubBegan, fmt.Sprintf("host %s compares its copies", v.Attachment.Node), "node", string(v.Attachment.Node))
	return volumeResult(v.ID), nil
}

// wantedScrub is the scrub that the host of an attachment is to carry out; nil if there is none.
func (v *Volume) wantedScrub(a *Attachment) *WantedScrub {
	if !v.Scrub.wanted() || v.Attachment == nil || a.Node != v.Attachment.Node {
		return nil
	}
	return &WantedScrub{v.Scrub.ID, v.Scrub.Rate}
}

// scrubReport is the newest report on the wanted scrub.
func (s *State) scrubReport(v *Volume) (ScrubReport, bool) {
	if !v.Scrub.wanted() || v.Attachment == nil {
		return ScrubReport{}, false
	}
	r, ok := s.attachmentReport(v, v.Attachment)
	if !ok || r.Scrub == nil || r.Scrub.ID != v.Scrub.ID {
		return ScrubReport{}, false
	}
	return *r.Scrub, true
}

// settleScrub records what the host has found, and the end.
func (t *tx) settleScrub(id block.VolumeID) {
	r, ok := t.s.scrubReport(t.peek(id))
	known := 0
	if ok {
		known = t.peek(id).Scrub.Found
	}
	if !ok || r.Found == known && !r.Done {
		return
	}
	v := t.volume(id)
	if r.Found < known { // the host has begun again
		known = 0
	}
	for _, f := range r.Findings[min(known, len(r.Findings)):] {
		t.volumeEvent(v, event.Trouble, event.ScrubFound, f.String(), "column", fmt.Sprint(f.Column),
			"offset_bytes", fmt.Sprint(uint64(f.Off)), "length_bytes", fmt.Sprint(uint64(f.Length)))
	}
	if r.Done {
		t.endScrub(v, r, false)
		return
	}
	next := *v.Scrub
	next.Found = r.Found
	v.Scrub = &next
}

// endScrub records the end of a scrub.
func (t *tx) endScrub(v *Volume, r ScrubReport, stopped bool) {
	next := *v.Scrub
	next.Ended, next.Stopped, next.Found, next.Alone = t.now.UTC(), stopped, r.Found, r.Alone
	v.Scrub = &next
	severity := event.Info
	if next.Found > 0 {
		severity = event.Trouble
	}
	t.volumeEvent(v, severity, event.ScrubEnded, next.result())
}

// result says what a scrub that has ended found.
func (c *Scrub) result() string {
	text := "its copies are equal"
	if c.Found > 0 {
		text = c.damage()
	}
	switch {
	case c.Stopped && c.Found == 0:
		text = "stopped before the end; nothing differs so far"
	case c.Stopped:
		text = "stopped before the end; " + text
	case c.Alone > 0:
		text += fmt.Sprintf("; of %s there were no two copies to compare", c.Alone.Short())
	}
	return text
}

// damage counts what a scrub found.
func (c *Scrub) damage() string {
	if c.Found == 1 {
		return "1 range differs or cannot be read"
	}
	return fmt.Sprintf("%d ranges differ or cannot be read", c.Found)
}

// explainScrub says how far a scrub is, or what the last one found.
func (s *State) explainScrub(e *Explanation, v *Volume) {
	switch r, ok := s.scrubReport(v); {
	case v.Scrub == nil:
		return
	case ok:
		e.Facts = append(e.Facts, fmt.Sprintf("its copies are being compared: %s of %s, %s", r.Compared.Short(), r.Total.Short(), plural(r.Found, "finding")))
	case v.Scrub.wanted() && v.Attachment == nil:
		e.Waits = append(e.Waits, "scrub: the volume to be attached")
	case v.Scrub.wanted():
		e.Waits = append(e.Waits, fmt.Sprintf("scrub: host %s to begin; the kernel's data path cannot compare copies", v.Attachment.Node))
	default:
		e.Facts = append(e.Facts, fmt.Sprintf("the scrub that ended at %s: %s", v.Scrub.Ended.UTC().Format(time.RFC3339), v.Scrub.result()))
	}
	if v.Scrub.Found > 0 {
		e.Actions = append(e.Actions, fmt.Sprintf("see which ranges differ: weft event list --object \"volume %s\"; Weft cannot tell which copy is right", v.Name))
	}
}

// scrubView is a volume's scrub as readers see it.
func (s *State) scrubView(v *Volume) *Scrub {
	if v.Scrub == nil {
		return nil
	}
	c := *v.Scrub
	if r, ok := s.scrubReport(v); ok {
		c.Done, c.Total, c.Alone, c.Found = r.Compared, r.Total, r.Alone, r.Found
	}
	return &c
}

// wrongCopies names the volumes whose copies differ by their last scrub.
func (s *State) wrongCopies() (wrong []string) {
	for _, v := range s.Volumes() {
		if v.Scrub != nil && v.Scrub.Found > 0 {
			wrong = append(wrong, fmt.Sprintf("volume %s: by its last scrub %s: see `weft explain volume %s`", v.Name, v.Scrub.damage(), v.Name))
		}
	}
	return wrong
}

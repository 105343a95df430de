// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
)

// A scrub is a comparison of a volume's copies by its host, while the host serves it. It finds
// where copies differ, and changes nothing unless an operator has asked for a repair.
//
//	ScrubVolume, schedule  the record: Volume.Scrub
//	the host's reports     what differs: of the first 64 ranges, each is an event; the position
//	wantedScrub            what the host may repair: only what is recorded
//	the host's reports     what became of it: events again
//	settleScrub            the record: its end
//
// A host begins a scrub at the recorded position, under a run of its own; what it reports counts
// from there. The position is recorded once a minute. So a host that begins anew compares what was
// compared since, and may report a range twice, but never hides one.

// Times of scrubs. They use the wall clock, because a schedule outlives managers. A clock that is
// wrong makes a scrub early or late, which harms no data.
const (
	scrubNote = time.Minute // the position of a scrub is recorded that often
	scrubLook = time.Minute // schedules are looked at that often
)

// mostPastScrubs is how many scrubs before the last one a record keeps.
const mostPastScrubs = 8

// Scrub is a scrub of a volume.
type Scrub struct {
	ID    string     `json:"id"`
	Rate  block.Size `json:"rate,omitempty"` // most that is read of each leg in a second; 0: no limit
	Began time.Time  `json:"began"`
	Ended time.Time  `json:"ended,omitzero"` // zero: it is wanted, and may be under way
	// Stopped: an operator ended it. Paused: it waits for an operator. Scheduled: no operator began it.
	Stopped   bool `json:"stopped,omitempty"`
	Paused    bool `json:"paused,omitempty"`
	Scheduled bool `json:"scheduled,omitempty"`
	// Repair: what is found is repaired, where it is known which copy is right. From lists the
	// legs that are right where nothing else tells.
	Repair bool       `json:"repair,omitempty"`
	From   []ScrubLeg `json:"from,omitempty"`
	ScrubCounts
	// Position is where a host is to begin: all before it was compared, and repaired. Done is how
	// much that is, of a leg, summed over the columns. Noted is when they were recorded.
	Position ScrubPosition `json:"position,omitzero"`
	Done     block.Size    `json:"done,omitempty"`
	Noted    time.Time     `json:"noted,omitzero"`
	// Run is the host's run that was heard of last, and Before the counts when it began.
	Run    string      `json:"run,omitempty"`
	Before ScrubCounts `json:"before,omitzero"`

	// By is the reader of a sealed volume that was asked to compare; see takeOverScrub.
	By block.NodeName `json:"by,omitempty"`

	Total block.Size `json:"-"` // derived, for readers
}

// ScrubLeg is a leg that an operator has named.
type ScrubLeg struct {
	Column int         `json:"column"`
	Copy   int         `json:"copy"`
	Leg    block.LegID `json:"leg"`
}

// ScrubPosition is a place in a scrub's way through a volume, which goes column by column.
type ScrubPosition struct {
	Column int        `json:"column,omitempty"`
	Off    block.Size `json:"off,omitempty"` // in each leg
}

// ScrubCounts are what a scrub has found.
type ScrubCounts struct {
	// Found counts the ranges that differ or cannot be read; of these, Settled were to be repaired
	// and are done with, and Repaired are equal now. Alone is how much could not be compared, of a
	// leg, summed over the columns.
	Found    int        `json:"found,omitempty"`
	Settled  int        `json:"settled,omitempty"`
	Repaired int        `json:"repaired,omitempty"`
	Alone    block.Size `json:"alone,omitempty"`
}

func (a ScrubCounts) plus(b ScrubCounts) ScrubCounts {
	return ScrubCounts{a.Found + b.Found, a.Settled + b.Settled, a.Repaired + b.Repaired, a.Alone + b.Alone}
}

// wanted reports whether the scrub has not ended.
func (c *Scrub) wanted() bool { return c != nil && c.Ended.IsZero() }

// open counts the ranges that differ still, as far as is known.
func (c *Scrub) open() int { return c.Found - c.Repaired }

// Open is how many ranges of a volume differ, or cannot be read, by its last scrub.
func (v *Volume) Open() int {
	if v.Scrub == nil {
		return 0
	}
	return v.Scrub.open()
}

// WantedScrub is a scrub that a host is to carry out.
type WantedScrub struct {
	ID       string
	Rate     block.Size
	Repair   bool
	From     []ScrubLeg
	Begin    ScrubPosition
	Run      string
	Recorded int // findings of that run, which may be repaired
}

// ScrubReport is what a host has found so far.
type ScrubReport struct {
	ID       string
	Run      string // empty: the host's version knows none, and begins at the beginning
	Done     bool
	Repairs  bool // it repairs, as wanted
	Position ScrubPosition
	Compared block.Size
	Total    block.Size
	ScrubCounts
	Findings []ScrubFinding // the first of them, in this run
}

// ScrubFinding is a range of a column whose copies differ, or that copies cannot read.
type ScrubFinding struct {
	Column      int
	Off, Length block.Size // in each leg
	Equal       [][]int    // groups of copies with the same data
	Unreadable  []int
	Right       int // the copy that is right; -1: not known
	Outcome     ScrubOutcome
	Error       string
}

// ScrubOutcome is what became of a finding that was to be repaired; empty: it is not done with.
type ScrubOutcome string

// The outcomes.
const (
	ScrubNotKnown    ScrubOutcome = "NOT_KNOWN"
	ScrubRepaired    ScrubOutcome = "REPAIRED"
	ScrubGone        ScrubOutcome = "GONE"
	ScrubNotRepaired ScrubOutcome = "NOT_REPAIRED"
)

func (f ScrubFinding) place() string {
	return fmt.Sprintf("column %d, %v at %v of each leg", f.Column, f.Length, f.Off)
}

func (f ScrubFinding) String() string {
	text := f.place()
	if len(f.Equal) > 1 {
		text += ": copies " + unequal(f.Equal)
	}
	if len(f.Unreadable) > 0 {
		text += ": " + namedCopies(f.Unreadable) + " cannot be read"
	}
	return text
}

// unequal shows groups of copies with the same data: 0 = 2 ≠ 1
func unequal(groups [][]int) string {
	var all []string
	for _, g := range groups {
		all = append(all, joined(g, " = "))
	}
	return strings.Join(all, " ≠ ")
}

func joined(copies []int, by string) string {
	var all []string
	for _, c := range copies {
		all = append(all, fmt.Sprint(c))
	}
	return strings.Join(all, by)
}

// namedCopies is "copy 0" or "copies 0, 1 and 2".
func namedCopies(copies []int) string {
	last := len(copies) - 1
	if last == 0 {
		return fmt.Sprintf("copy %d", copies[0])
	}
	return fmt.Sprintf("copies %s and %d", joined(copies[:last], ", "), copies[last])
}

func areRight(copies []int) string {
	if len(copies) == 1 {
		return namedCopies(copies) + " is right"
	}
	return namedCopies(copies) + " are right"
}

// rule says which copy is right, and why.
func (f ScrubFinding) rule(from []ScrubLeg) string {
	named := slices.ContainsFunc(from, func(l ScrubLeg) bool { return l.Column == f.Column && l.Copy == f.Right })
	i := slices.IndexFunc(f.Equal, func(g []int) bool { return slices.Contains(g, f.Right) })
	switch {
	case f.Right < 0 || i < 0:
		return "it is not known which copy is right"
	case len(f.Equal) == 1:
		return areRight(f.Equal[i]) + ": all that can be read agree"
	case len(f.Equal[i]) == 1 && named:
		return fmt.Sprintf("copy %d is right: an operator named it", f.Right)
	}
	return areRight(f.Equal[i]) + ": they are the majority"
}

// ended says what became of a finding that was to be repaired.
func (f ScrubFinding) ended() string {
	switch f.Outcome {
	case ScrubRepaired:
		return fmt.Sprintf("%s: written again from copy %d; all copies are equal", f.place(), f.Right)
	case ScrubGone:
		return f.place() + ": the copies were equal when they were read again, so nothing was written"
	case ScrubNotKnown:
		return f.place() + ": not repaired: it is not known which copy is right"
	}
	return fmt.Sprintf("%s: not repaired%s", f.place(), because(f.Error))
}

// ScrubVolume begins a scrub of an attached volume, or with Stop ends it. Pause stops it at its
// place until Resume. A volume that is being scrubbed goes on with that scrub, at Rate if one is
// given. Result: Volume.
type ScrubVolume struct {
	Volume              string
	Rate                block.Size
	Stop, Pause, Resume bool
	Repair              bool
	From                []ScrubLeg // without Leg
	Seed                Seed
}

func (in ScrubVolume) apply(t *tx) (view, error) {
	v, err := t.s.find(in.Volume)
	if err != nil {
		return nil, err
	}
	if err := in.check(v); err != nil {
		return nil, err
	}
	switch {
	case in.Stop || in.Pause || in.Resume:
		return volumeResult(v.ID), t.changeScrub(in, v)
	case in.Repair && v.sealed():
		return nil, refused(ReasonReadOnly, v.object(), "it is sealed, and the hosts that compare its copies only read them").
			hint("without --repair, a scrub finds the ranges that differ. %s", v.madeAgain())
	case v.Scrub.wanted():
		return volumeResult(v.ID), t.continueScrub(in, v)
	case !v.usable():
		return nil, refused(ReasonNotReady, v.object(), "%s", v.unready())
	case v.Layout.Copies == 1:
		return nil, invalid("volume", "volume %s has one copy: there is nothing to compare it with", v.Name)
	case t.s.scrubber(v) == nil || t.s.scrubber(v).State != Attached:
		return nil, refused(ReasonNotAttached, v.object(), "not attached: its host would compare the copies").hint("`weft attach %s` first", v.Name)
	}
	from, err := v.scrubLegs(in.From)
	if err != nil {
		return nil, err
	}
	t.beginScrub(t.volume(v.ID), Scrub{ID: in.Seed.id(0).String(), Rate: in.Rate, Repair: in.Repair, From: from})
	return volumeResult(v.ID), nil
}

// check refuses a request that contradicts itself.
func (in ScrubVolume) check(v *Volume) error {
	words := 0
	for _, set := range []bool{in.Stop, in.Pause, in.Resume, in.Repair} {
		if set {
			words++
		}
	}
	switch {
	case words > 1:
		return invalid("stop", "only one of stop, pause, resume and repair can be asked for")
	case len(in.From) > 0 && !in.Repair:
		return invalid("from", "names the copies that are right, which only a repair needs")
	case in.Rate != 0 && in.Rate < block.MinScrubRate:
		return invalid("bytes_per_second", "%v: must be at least %v, or 0 for no limit", in.Rate, block.MinScrubRate)
	}
	for i, l := range in.From {
		if slices.ContainsFunc(in.From[:i], func(o ScrubLeg) bool { return o.Column == l.Column }) {
			return invalid("from", "column %d of %s is named twice", l.Column, v.Name)
		}
	}
	return nil
}

// scrubLegs finds the legs in sync that an operator has named.
func (v *Volume) scrubLegs(named []ScrubLeg) (legs []ScrubLeg, err error) {
	for _, n := range named {
		l := v.legAt(n.Column, n.Copy)
		switch {
		case l == nil:
			return nil, invalid("from", "volume %s has no leg %d.%d", v.Name, n.Column, n.Copy)
		case l.State != LegInSync:
			return nil, refused(ReasonNotReady, v.object(), "%v is not in sync, so it is not known to be right", l)
		}
		legs = append(legs, ScrubLeg{n.Column, n.Copy, l.ID})
	}
	return legs, nil
}

// changeScrub stops a scrub, pauses it or ends its pause.
func (t *tx) changeScrub(in ScrubVolume, v *Volume) error {
	switch {
	case !v.Scrub.wanted() && in.Stop:
		return nil // repeated
	case !v.Scrub.wanted():
		return refused(ReasonNotReady, v.object(), "no scrub of it is under way").hint("`weft volume scrub %s` begins one", v.Name)
	case in.Stop:
		v = t.volume(v.ID)
		t.noteScrub(v)
		t.endScrub(v, *v.Scrub, true)
		return nil
	case v.Scrub.Paused == in.Pause:
		return nil // repeated
	}
	v = t.volume(v.ID)
	t.noteScrub(v)
	c := v.editScrub()
	c.Paused = in.Pause
	text := "goes on"
	if in.Pause {
		text = "paused"
	}
	t.volumeEvent(v, event.Info, event.ScrubPaused, fmt.Sprintf("%s at %s of %s", text, c.Done.Short(), v.scrubTotal().Short()))
	return nil
}

// noteScrub records what the host last reported.
func (t *tx) noteScrub(v *Volume) {
	if r, ok := t.s.scrubReport(v); ok {
		next, _ := v.Scrub.after(r, t.now)
		v.Scrub = &next
	}
}

// continueScrub answers a request for a scrub while there is one.
func (t *tx) continueScrub(in ScrubVolume, v *Volume) error {
	from, err := v.scrubLegs(in.From)
	switch {
	case err != nil:
		return err
	case in.Repair != v.Scrub.Repair || !slices.Equal(from, v.Scrub.From):
		what := map[bool]string{false: "compares only", true: "repairs"}
		return refused(ReasonNotReady, v.object(), "the scrub that is under way %s, with %s named as right", what[v.Scrub.Repair], legList(v.Scrub.From)).
			hint("`weft volume scrub %s --stop` first", v.Name)
	case in.Rate == 0 || in.Rate == v.Scrub.Rate:
		return nil
	}
	t.volume(v.ID).editScrub().Rate = in.Rate
	return nil
}

// editScrub replaces a volume's scrub, which is never changed in place, and returns the new one.
func (v *Volume) editScrub() *Scrub {
	c := *v.Scrub
	v.Scrub = &c
	return &c
}

func legList(legs []ScrubLeg) string {
	var all []string
	for _, l := range legs {
		all = append(all, fmt.Sprintf("leg %d.%d", l.Column, l.Copy))
	}
	if len(all) == 0 {
		return "no leg"
	}
	return strings.Join(all, ", ")
}

// beginScrub records a new scrub, and keeps the one before.
func (t *tx) beginScrub(v *Volume, c Scrub) {
	if v.Scrub != nil {
		v.PastScrubs = append([]Scrub{*v.Scrub}, v.PastScrubs[:min(len(v.PastScrubs), mostPastScrubs-1)]...)
	}
	by := t.s.scrubber(v)
	if c.Began = t.now.UTC(); v.sealed() {
		c.By = by.Node
	}
	v.Scrub = &c
	text := fmt.Sprintf("host %s compares its copies", by.Node)
	if c.Scheduled {
		text += ", as scheduled"
	}
	if c.Repair {
		text += fmt.Sprintf(" and repairs what is known to be wrong, with %s named as right", legList(c.From))
	}
	t.volumeEvent(v, event.Info, event.ScrubBegan, text, "node", string(by.Node))
}

// scrubber is the attachment whose host compares the volume's copies; nil: there is none. It is the one that
// has the volume alone. No host has a sealed volume alone: there, one of its readers compares.
func (s *State) scrubber(v *Volume) *Attachment {
	if !v.sealed() {
		return v.Attachment
	}
	if v.Scrub.wanted() {
		if a := v.attachmentOf(v.Scrub.By); a != nil && a.State == Attached {
			return a
		}
		if i := slices.IndexFunc(v.Shared, func(a Attachment) bool { return a.State == Attached }); i >= 0 {
			return &v.Shared[i]
		}
		return nil
	}
	return s.reader(v)
}

// reader is the attachment of a sealed volume whose host is to compare its copies: the first that is online
// and can, or else the first.
func (s *State) reader(v *Volume) (first *Attachment) {
	for i := range v.Shared {
		switch a := &v.Shared[i]; {
		case a.State != Attached:
		case s.compares(v, a):
			return a
		case first == nil:
			first = a
		}
	}
	return first
}

// compares reports whether a host is online and can compare the volume's copies.
func (s *State) compares(v *Volume, a *Attachment) bool {
	r, ok := s.attachmentReport(v, a)
	return ok && r.Scrubs && s.initiatorOnline(a.Node)
}

// takeOverScrub has another reader of a sealed volume go on with its scrub if the one before is offline or
// cannot compare.
func (t *tx) takeOverScrub(v *Volume) {
	if !v.sealed() || !v.Scrub.wanted() || v.Scrub.Paused {
		return
	}
	a, next := t.s.scrubber(v), t.s.reader(v)
	if a == nil || t.s.compares(v, a) || !t.s.compares(v, next) {
		return
	}
	t.volume(v.ID).editScrub().By = next.Node
}

// madeAgain says what can be done about a copy of a sealed volume that is wrong.
func (v *Volume) madeAgain() string {
	return fmt.Sprintf("No command repairs a copy of a sealed volume. Make the volume again: copy the data of %s to a new volume, compare the data there with its source, seal the new volume, and delete %s", v.Name, v.Name)
}

// wantedScrub is the scrub that the host of an attachment is to carry out; nil if there is none.
func (s *State) wantedScrub(v *Volume, a *Attachment) *WantedScrub {
	c := v.Scrub
	if by := s.scrubber(v); !c.wanted() || c.Paused || by == nil || a.Node != by.Node {
		return nil
	}
	w := &WantedScrub{ID: c.ID, Rate: c.Rate, Repair: c.Repair, Begin: c.Position, Run: c.Run, Recorded: c.Found - c.Before.Found}
	if s.fullLeg(v) != nil {
		w.Recorded = c.Settled - c.Before.Settled
	}
	for _, n := range c.From {
		// Another leg in its place may have been copied from a wrong one.
		if l := v.leg(n.Leg); l != nil && l.member() && l.State == LegInSync {
			w.From = append(w.From, n)
		}
	}
	return w
}

// fullLeg is a leg of a volume whose writes wait for space, nil if there is none. Nothing is repaired then: it may need
// space, and users would wait with it.
func (s *State) fullLeg(v *Volume) *Leg {
	for i := range v.Legs {
		if s.fullLegs[v.Legs[i].ID] {
			return &v.Legs[i]
		}
	}
	return nil
}

// scrubReport is the newest report on the wanted scrub.
func (s *State) scrubReport(v *Volume) (ScrubReport, bool) {
	if !v.Scrub.wanted() || s.scrubber(v) == nil {
		return ScrubReport{}, false
	}
	r, ok := s.attachmentReport(v, s.scrubber(v))
	if !ok || r.Scrub == nil || r.Scrub.ID != v.Scrub.ID {
		return ScrubReport{}, false
	}
	report := *r.Scrub
	if p := report.Position; p.Column < 0 || p.Column >= v.Layout.Stripes || p.Off%block.ScrubUnit != 0 || p.Off > v.Layout.LegSize(v.planned()) {
		report.Position = ScrubPosition{} // a host could not begin there
	}
	return report, true
}

// scrubTotal is how much a scrub compares, of a leg, summed over the columns.
func (v *Volume) scrubTotal() block.Size {
	return v.Layout.LegSize(v.Size) * block.Size(v.Layout.Stripes)
}

// after is the scrub after a report, and what was known before of the run that it is about.
func (c *Scrub) after(r ScrubReport, now time.Time) (next Scrub, known ScrubCounts) {
	next = *c
	known = ScrubCounts{Found: c.Found - c.Before.Found, Settled: c.Settled - c.Before.Settled}
	if r.Run != c.Run || r.Run == "" && r.Found < known.Found { // the host has begun anew
		next.Run, next.Before, known = r.Run, c.ScrubCounts, ScrubCounts{}
		if r.Run == "" { // at the beginning
			next.Before = ScrubCounts{}
		}
	}
	next.ScrubCounts = next.Before.plus(r.ScrubCounts)
	next.Position, next.Done, next.Noted = r.Position, r.Compared, now.UTC()
	return next, known
}

// settleScrub records what the host has found, what became of it, and the end.
func (t *tx) settleScrub(id block.VolumeID) {
	r, ok := t.s.scrubReport(t.peek(id))
	if !ok {
		return
	}
	was := t.peek(id).Scrub
	next, known := was.after(r, t.now)
	news := r.Found != known.Found || r.Settled != known.Settled || r.Done
	moved := next.Position != was.Position && t.now.Sub(was.Noted) >= scrubNote
	if !news && !moved {
		return
	}
	v := t.volume(id)
	if v.sealed() { // it goes on, also if the one before can again
		next.By = t.s.scrubber(v).Node
	}
	t.tellFindings(v, r, known)
	if r.Done {
		t.endScrub(v, next, false)
		return
	}
	v.Scrub = &next
}

// tellFindings makes events of what a report says of findings that was not known before.
func (t *tx) tellFindings(v *Volume, r ScrubReport, known ScrubCounts) {
	for i, f := range r.Findings {
		attributes := []string{
			"column", fmt.Sprint(f.Column), "offset_bytes", fmt.Sprint(uint64(f.Off)), "length_bytes", fmt.Sprint(uint64(f.Length)),
		}
		if i >= known.Found && i < r.Found {
			text := f.String()
			if r.Repairs {
				text += "; " + f.rule(v.Scrub.From)
			}
			t.volumeEvent(v, event.Trouble, event.ScrubFound, text, attributes...)
		}
		if i >= known.Settled && i < r.Settled {
			severity := event.Trouble
			if f.Outcome == ScrubRepaired || f.Outcome == ScrubGone {
				severity = event.Info
			}
			t.volumeEvent(v, severity, event.ScrubRepair, f.ended(), attributes...)
		}
	}
}

// endScrub records the end of a scrub.
func (t *tx) endScrub(v *Volume, next Scrub, stopped bool) {
	next.Ended, next.Stopped, next.Paused = t.now.UTC(), stopped, false
	v.Scrub = &next
	severity := event.Info
	if next.open() > 0 {
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
	text := fmt.Sprintf("%d ranges differ or cannot be read", c.Found)
	if c.Found == 1 {
		text = "1 range differs or cannot be read"
	}
	switch {
	case !c.Repair:
	case c.open() == 0:
		text = plural(c.Found, "range") + " differed or could not be read, and now all copies are equal"
	default:
		text = fmt.Sprintf("%s differed or could not be read, of which %d were repaired", plural(c.Found, "range"), c.Repaired)
	}
	return text
}

// ---- schedules ----

// settleSchedules begins the scrubs that are due, at most one at a time on each host.
func (t *tx) settleSchedules() {
	s := t.s
	if t.now.Sub(s.lookedAtScrubs) < scrubLook {
		return
	}
	s.lookedAtScrubs = t.now
	busy, due := map[block.NodeName]bool{}, []*Volume{}
	for _, v := range s.volumes.All() {
		t.takeOverScrub(v)
		switch {
		case t.s.scrubber(v) == nil:
		case v.Scrub.wanted() && v.Scrub.Scheduled && !v.Scrub.Paused:
			busy[t.s.scrubber(v).Node] = true
		case s.scrubDue(v, t.now):
			due = append(due, v)
		}
	}
	slices.SortFunc(due, func(a, b *Volume) int { return a.nextScrub().Compare(b.nextScrub()) })
	for _, v := range due {
		if host := t.s.scrubber(v).Node; !busy[host] {
			busy[host] = true
			t.beginScrub(t.volume(v.ID), Scrub{ID: fmt.Sprintf("scheduled-%d", t.gen), Rate: v.ScrubRate, Scheduled: true})
		}
	}
}

// scrubDue reports whether a scrub is to begin by the volume's schedule now.
func (s *State) scrubDue(v *Volume, now time.Time) bool {
	if v.ScrubEvery == 0 || v.State != VolumeReady || v.Restored || v.Scrub.wanted() || s.scrubber(v).State != Attached || now.Before(v.nextScrub()) {
		return false
	}
	r, ok := s.attachmentReport(v, s.scrubber(v))
	return ok && r.Scrubs
}

// nextScrub is when the next scrub is due by the volume's schedule: that long after the last one
// began. The first one comes at a time of its own, so that volumes whose schedules were set together
// are not scrubbed together.
func (v *Volume) nextScrub() time.Time {
	if v.Scrub != nil && v.Scrub.Began.After(v.ScrubSince) {
		return v.Scrub.Began.Add(v.ScrubEvery)
	}
	part := float64(binary.BigEndian.Uint32(v.ID.UUID[12:])) / math.MaxUint32
	return v.ScrubSince.Add(time.Duration(part * float64(v.ScrubEvery)))
}

// schedule changes a volume's schedule; nil leaves what it is about as it is.
func (t *tx) schedule(v *Volume, every *time.Duration, rate *block.Size) error {
	if err := v.checkSchedule(every, rate); err != nil {
		return err
	}
	if every != nil && *every != v.ScrubEvery {
		v = t.volume(v.ID)
		v.ScrubEvery, v.ScrubSince = *every, t.now.UTC()
		text := fmt.Sprintf("its copies are compared every %s", days(*every))
		if *every == 0 {
			text, v.ScrubSince = "its copies are compared on request only", time.Time{}
		}
		t.volumeEvent(v, event.Info, event.VolumeUpdated, text)
	}
	if rate != nil && *rate != v.ScrubRate {
		t.volume(v.ID).ScrubRate = *rate
	}
	return nil
}

func (v *Volume) checkSchedule(every *time.Duration, rate *block.Size) error {
	if rate != nil && *rate != 0 && *rate < block.MinScrubRate {
		return invalid("scrub_bytes_per_second", "%v: must be at least %v, or 0 for no limit", *rate, block.MinScrubRate)
	}
	switch {
	case every == nil || *every == 0:
	case v.Layout.Copies == 1:
		return invalid("scrub_every_seconds", "volume %s has one copy: there is nothing to compare it with", v.Name)
	case *every < block.MinScrubEvery || *every > block.MaxScrubEvery:
		return invalid("scrub_every_seconds", "%v: must be at least an hour and at most ten years, or 0 for never", *every)
	}
	return nil
}

// days prints a duration in days if it is whole days.
func days(d time.Duration) string {
	const day = 24 * time.Hour
	if d >= day && d%day == 0 {
		return plural(int(d/day), "day")
	}
	return d.String()
}

// ---- data that does not match its checksum ----

// A volume with checksums heals: its host reads from another copy what does not match, and writes it
// again. Nothing of that is silent: each range is an event, and the volume's record counts them.

// Heals counts the ranges of a volume's copies that did not match their checksums.
type Heals struct {
	// Run is that of the last report, and Count and Failed are what it said.
	Run    string `json:"run"`
	Count  uint64 `json:"count"`
	Failed uint64 `json:"failed,omitempty"`

	Repaired    uint64    `json:"repaired,omitempty"` // since the volume was created
	NotRepaired uint64    `json:"not_repaired,omitempty"`
	Last        time.Time `json:"last"`
}

// HealReport is what a host tells of them.
type HealReport struct {
	Run    string // another one for each time that the host built the volume
	Count  uint64 // of this run
	Failed uint64 // of them: not repaired
	Last   []ScrubFinding
}

// lacks reports whether a host tells of ranges that are not recorded; either may be nil.
func (h *Heals) lacks(r *HealReport) bool {
	return r != nil && r.Count > 0 && (h == nil || h.Run != r.Run || h.Count < r.Count)
}

// settleHeals records what the host has healed, and makes events of it.
func (t *tx) settleHeals(id block.VolumeID) {
	v := t.peek(id)
	host := v.copier() // one that heals a detached volume reads it, too
	if host == nil {
		return
	}
	r, ok := t.s.attachmentReport(v, host)
	if !ok || !v.Heals.lacks(r.Heals) {
		return
	}
	var known Heals
	if v.Heals != nil {
		known = *v.Heals
	}
	if known.Run != r.Heals.Run {
		known.Run, known.Count, known.Failed = r.Heals.Run, 0, 0
	}
	news, failed := r.Heals.Count-known.Count, r.Heals.Failed-min(known.Failed, r.Heals.Failed)
	known.Count, known.Failed, known.Last = r.Heals.Count, r.Heals.Failed, t.now.UTC()
	known.Repaired, known.NotRepaired = known.Repaired+news-min(failed, news), known.NotRepaired+failed
	v = t.volume(id)
	v.Heals = &known
	told := r.Heals.Last[max(0, len(r.Heals.Last)-int(min(news, uint64(len(r.Heals.Last))))):]
	for _, f := range told {
		severity := event.Warning
		if f.Outcome != ScrubRepaired {
			severity = event.Trouble
		}
		t.volumeEvent(v, severity, event.ReadRepair, v.healed(f),
			"column", fmt.Sprint(f.Column), "offset_bytes", fmt.Sprint(uint64(f.Off)), "length_bytes", fmt.Sprint(uint64(f.Length)))
	}
	if more := news - uint64(len(told)); more > 0 {
		t.volumeEvent(v, event.Warning, event.ReadRepair, fmt.Sprintf("%s more did not match their checksums since the last report", plural(int(more), "range")))
	}
}

// healed says what became of a range.
func (v *Volume) healed(f ScrubFinding) string {
	text := f.place()
	for _, copy := range f.Unreadable {
		if l := v.legAt(f.Column, copy); l != nil {
			text += fmt.Sprintf(": %v does not match its checksum", l)
		}
	}
	if f.Outcome == ScrubRepaired {
		return text + "; written again from another copy"
	}
	return text + "; not repaired" + because(f.Error)
}

// explainHeals says how often data did not match its checksum.
func (v *Volume) explainHeals(e *Explanation) {
	h := v.Heals
	if h == nil {
		return
	}
	at := h.Last.UTC().Format(time.RFC3339)
	if h.Repaired > 0 {
		e.Facts = append(e.Facts, fmt.Sprintf("%s of its copies did not match their checksums and were written again from another copy, the last at %s", plural(int(h.Repaired), "range"), at))
	}
	if h.NotRepaired > 0 {
		e.Facts = append(e.Facts, fmt.Sprintf("%s of its copies did not match their checksums and could not be written again, the last at %s or before", plural(int(h.NotRepaired), "range"), at))
		if v.sealed() {
			e.Actions = append(e.Actions, fmt.Sprintf("to compare all copies: weft volume scrub %s", v.Name))
		} else {
			e.Actions = append(e.Actions, fmt.Sprintf("to compare all copies and write again what is known to be wrong: weft volume scrub %s --repair", v.Name))
		}
	}
	e.Actions = append(e.Actions, fmt.Sprintf("see which drives changed data: weft event list --object \"volume %s\"; a drive that does so again and again belongs replaced", v.Name))
}

// ---- for people ----

// explainScrub says how far a scrub is, or what the last one found.
func (s *State) explainScrub(e *Explanation, v *Volume) {
	s.explainSchedule(e, v)
	v.explainHeals(e)
	switch r, ok := s.scrubReport(v); {
	case v.Scrub == nil:
		return
	case v.Scrub.wanted() && v.Scrub.Paused:
		e.Facts = append(e.Facts, fmt.Sprintf("its scrub is paused at %s of %s, with %s", v.Scrub.Done.Short(), v.scrubTotal().Short(), plural(v.Scrub.Found, "finding")))
		e.Actions = append(e.Actions, fmt.Sprintf("to let the scrub go on: weft volume scrub %s --resume", v.Name))
	case ok:
		s.explainRunningScrub(e, v, r)
	case v.Scrub.wanted() && s.scrubber(v) == nil:
		e.Waits = append(e.Waits, fmt.Sprintf("scrub: the volume to be attached; it goes on at %s of %s", v.Scrub.Done.Short(), v.scrubTotal().Short()))
	case v.Scrub.wanted():
		e.Waits = append(e.Waits, fmt.Sprintf("scrub: host %s to begin%s", s.scrubber(v).Node, s.unableToScrub(v)))
	default:
		e.Facts = append(e.Facts, fmt.Sprintf("the scrub that ended at %s: %s", v.Scrub.Ended.UTC().Format(time.RFC3339), v.Scrub.result()))
	}
	if v.Scrub.open() == 0 {
		return
	}
	e.Actions = append(e.Actions, fmt.Sprintf("see which ranges differ: weft event list --object \"volume %s\"", v.Name))
	switch c := v.Scrub; {
	case v.sealed():
		e.Actions = append(e.Actions, v.madeAgain())
	case !c.Repair:
		e.Actions = append(e.Actions, fmt.Sprintf("to write again what is known to be wrong: weft volume scrub %s --repair", v.Name))
	case !c.wanted():
		e.Actions = append(e.Actions, fmt.Sprintf("name the leg that is right where copies differ: weft volume scrub %s --repair --from COLUMN.COPY", v.Name))
	}
}

// explainRunningScrub says how far a scrub is, of which the host has reported r.
func (s *State) explainRunningScrub(e *Explanation, v *Volume, r ScrubReport) {
	c := s.scrubView(v)
	fact := fmt.Sprintf("its copies are being compared: %s of %s, %s", c.Done.Short(), c.Total.Short(), plural(c.Found, "finding"))
	if c.Repair {
		fact += fmt.Sprintf(", %d repaired", c.Repaired)
	}
	e.Facts = append(e.Facts, fact)
	if c.Repair && !r.Repairs {
		e.Facts = append(e.Facts, fmt.Sprintf("host %s has a version that compares copies and repairs nothing", s.scrubber(v).Node))
	}
	if l := s.fullLeg(v); l != nil && c.Repair && c.Settled < c.Found {
		e.Waits = append(e.Waits, fmt.Sprintf("scrub: space on %s, before it repairs what it has found", l))
	}
}

// explainSchedule says when the next scrub begins by itself.
func (s *State) explainSchedule(e *Explanation, v *Volume) {
	if v.ScrubEvery == 0 {
		return
	}
	fact := fmt.Sprintf("its copies are compared every %s", days(v.ScrubEvery))
	switch next := v.nextScrub(); {
	case v.Scrub.wanted():
	case next.After(s.now):
		fact += ", next at " + next.UTC().Format(time.RFC3339)
	default:
		fact += ", and that is due since " + next.UTC().Format(time.RFC3339)
	}
	if s.scrubber(v) != nil {
		fact += s.unableToScrub(v)
	}
	e.Facts = append(e.Facts, fact)
}

// unableToScrub says if the host that is to compare the volume's copies cannot; empty: it can, as far as is known.
func (s *State) unableToScrub(v *Volume) string {
	a := s.scrubber(v)
	if r, ok := s.attachmentReport(v, a); !ok || r.Scrubs {
		return ""
	}
	return fmt.Sprintf("; the version of host %s cannot compare copies on the kernel's data path", a.Node)
}

// scrubView is a volume's scrub as readers see it.
func (s *State) scrubView(v *Volume) *Scrub {
	if v.Scrub == nil {
		return nil
	}
	c := *v.Scrub
	c.Total = v.scrubTotal()
	if r, ok := s.scrubReport(v); ok {
		c, _ = c.after(r, s.now)
		c.Total = r.Total
	}
	return &c
}

// wrongCopies names the volumes whose copies differ by their last scrub.
func (s *State) wrongCopies() (wrong []string) {
	for _, v := range s.Volumes() {
		if v.Open() > 0 {
			wrong = append(wrong, fmt.Sprintf("volume %s: by its last scrub %s: see `weft explain volume %s`", v.Name, v.Scrub.damage(), v.Name))
		}
	}
	return wrong
}

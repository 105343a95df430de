// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
)

// A drive that has been suspect for longer than the policy allows is evacuated: its legs are made
// again elsewhere, as those of a drive that is drained (see replace.go). A suspicion can be false, so
// an evacuation takes care that nobody is worse off for it:
//
//   - a leg is in use until its replacement is in sync: redundancy never drops;
//   - one leg of a drive moves at a time, of a volume whose legs are all in sync and can be copied
//     now, and mostEvacuated drives are evacuated at a time;
//   - while more drives are suspect than mostSuspect allows, no further leg moves: so many do not
//     fail at once, and what they have in common, such as a hot room, does not end by copying;
//   - what an operator does comes first: nothing moves from a drive that is drained or evicted, or
//     whose node is cordoned, drained or under maintenance.
//
// Once a drive is no longer suspect, or an evacuation is held back, a leg whose copy has begun still
// moves; any other one stays.
//
//	            suspect for EvacuateAfter
//	(suspect) ────────────────────────────► EVACUATING ──────────► ENDED  no leg is left that could
//	                                          ▲     │                     be moved
//	                                          │     ▼
//	                                          HELD, with the reason
//
//	from anywhere: the drive is no longer suspect (forgotten)
//
// No record holds any of this. The clocks of drives start anew when a manager begins to lead, and they
// are monotonic, so no wall clock matters. A leg that is on its way shows in the records, since its
// column has a blank leg more than it needs: see resumeEvacuations.

// DefaultEvacuateAfter is twice as long as a drive is suspect after its media errors grew once, so
// only signs that last or come back move data. It leaves an operator who reads alerts the time to
// decide first.
const DefaultEvacuateAfter = 48 * time.Hour

const (
	// evacuationLook is how often evacuateDrives looks.
	evacuationLook = 10 * time.Second
	// mostEvacuated is how many drives of the cluster are evacuated at a time.
	mostEvacuated = 2
	// evacuationPatience is how long a leg's copy may not go on before another leg is tried.
	evacuationPatience = 10 * time.Minute
	// mostUnplaced is how many legs of a drive are tried in vain in one look.
	mostUnplaced = 32
)

// mostSuspect is how many of some drives may be suspect at a time without a common cause.
func mostSuspect(drives int) int { return max(2, drives/10) }

// evacuationStage is how far the evacuation of a suspect drive is.
type evacuationStage string

// The stages. The empty one: it has not begun.
const (
	evacuating      evacuationStage = "EVACUATING"
	evacuationHeld  evacuationStage = "HELD"
	evacuationEnded evacuationStage = "ENDED"
)

// evacuation is what the manager remembers of a suspect drive; it is never changed in place.
type evacuation struct {
	Since time.Time       `json:"since,omitzero"` // since when it is suspect; zero: it no longer is
	Stage evacuationStage `json:"stage,omitempty"`
	Why   string          `json:"why,omitempty"` // it is held, or what is left at its end
	Moved int             `json:"moved,omitempty"`
	// Leg is made again elsewhere now; zero: none.
	Volume block.VolumeID `json:"volume,omitzero"`
	Leg    block.LegID    `json:"leg,omitzero"`

	resumed bool // it was under way when this manager began to lead

	going time.Time                 // when the copy of Leg went on last, or could have
	tried map[block.LegID]time.Time // legs that were chosen: others have their turn first
}

// evacuated reports whether a leg is made again elsewhere since its drive is suspect.
func (s *State) evacuated(l *Leg) bool {
	e, known := s.evacuations[l.Drive]
	return known && e.Leg == l.ID && s.policy.EvacuateAfter > 0
}

// resumeEvacuations finds the evacuations that were under way in the records of the manager before: all
// copies of a column are in sync, none has to leave for another reason, one is on a suspect drive, and
// yet there is a blank leg beside them.
func (s *State) resumeEvacuations() {
	s.evacuations = map[block.DriveID]evacuation{}
	for _, v := range s.volumes.All() {
		for i := range v.Legs {
			if l := &v.Legs[i]; l.Blank && l.member() {
				s.resumeEvacuation(v, l.Column)
			}
		}
	}
}

func (s *State) resumeEvacuation(v *Volume, column int) {
	good := slices.DeleteFunc(v.column(column), func(l *Leg) bool { return l.Blank })
	if len(good) != v.Layout.Group().Members || slices.ContainsFunc(good, func(l *Leg) bool { return !l.trusted() || s.leaving(l) != "" }) {
		return
	}
	i := slices.IndexFunc(good, func(l *Leg) bool { return s.drives[l.Drive].Suspect() != "" })
	if i < 0 {
		return
	}
	l := good[i]
	if e, known := s.evacuations[l.Drive]; !known || bytes.Compare(l.ID.UUID[:], e.Leg.UUID[:]) < 0 {
		s.evacuations[l.Drive] = evacuation{Volume: v.ID, Leg: l.ID, resumed: true}
	}
}

// evacuateDrives starts and stops the clocks of suspect drives and takes the next step of each
// evacuation.
func (t *tx) evacuateDrives() {
	s := t.s
	if t.now.Sub(s.lookedSuspect) < evacuationLook {
		return
	}
	s.lookedSuspect = t.now
	s.evacuations = t.followEvacuations()
	busy := 0
	for _, e := range s.evacuations {
		busy += rank(!e.Leg.IsZero())
	}
	common := t.commonCause()
	for _, d := range t.longSuspect() {
		e := s.evacuations[d.ID]
		stage, why := evacuating, ""
		switch hold, left := cmp.Or(t.nodes.peek(d.Node).shunned(), common), t.neverMoved(d); {
		case left != "":
			stage, why = evacuationEnded, left
		case hold != "":
			stage, why = evacuationHeld, hold
		case !e.Leg.IsZero():
		case busy >= mostEvacuated:
			stage, why = evacuationHeld, fmt.Sprintf("%d other drives are evacuated first", mostEvacuated)
		default:
			e, stage, why = t.evacuateNext(d, e)
			busy += rank(!e.Leg.IsZero())
		}
		s.evacuations[d.ID] = t.enterStage(d, e, stage, why)
	}
}

// commonCause says that more drives are suspect than are likely to fail at once; empty if not. Those
// that an operator empties do not count.
func (t *tx) commonCause() string {
	suspect := 0
	for id := range t.s.drives {
		if d := t.drives.peek(id); d != nil && d.Suspect() != "" && d.Leaving == "" {
			suspect++
		}
	}
	if most := mostSuspect(len(t.s.drives)); suspect > most {
		return fmt.Sprintf("more than %d of the drives are suspect at once, which points to a common cause", most)
	}
	return ""
}

// emptied reports whether an operator empties a drive: all its legs leave then anyway.
func (t *tx) emptied(d *Drive) bool {
	n := t.nodes.peek(d.Node)
	return d.Leaving != "" || n == nil || n.Draining
}

// longSuspect returns the drives in use that have been suspect for longer than the policy allows, the
// longest first.
func (t *tx) longSuspect() (due []*Drive) {
	s := t.s
	for id, e := range s.evacuations {
		d := t.drives.peek(id)
		late := s.policy.EvacuateAfter > 0 && !e.Since.IsZero() && t.now.Sub(e.Since) >= s.policy.EvacuateAfter
		if late && d != nil && d.State == DriveReady && s.targetOnline(d.Node) && !t.emptied(d) {
			due = append(due, d)
		}
	}
	slices.SortFunc(due, func(a, b *Drive) int {
		return cmp.Or(s.evacuations[a.ID].Since.Compare(s.evacuations[b.ID].Since), bytes.Compare(a.ID.UUID[:], b.ID.UUID[:]))
	})
	return due
}

// followEvacuations returns what is known of each drive that is suspect, or from which a leg still
// moves.
func (t *tx) followEvacuations() map[block.DriveID]evacuation {
	next := map[block.DriveID]evacuation{}
	common := t.commonCause()
	for _, id := range t.s.sortedDrives() {
		d := t.drives.peek(id)
		if d == nil {
			continue
		}
		e, well := t.s.evacuations[id], d.Suspect() == ""
		if e.resumed && e.going.IsZero() {
			e.going = t.now
		}
		stops := well || common != "" || t.emptied(d) || t.nodes.peek(d.Node).shunned() != ""
		if e = t.followLeg(e, stops); e.Since.IsZero() && !well {
			e.Since, e.tried = t.now, map[block.LegID]time.Time{}
			if e.resumed {
				e.Since = t.now.Add(-t.s.policy.EvacuateAfter)
			}
		}
		if well {
			e.Since = time.Time{}
		}
		switch {
		case !well || !e.Leg.IsZero():
			next[id] = e
		case e.Stage == evacuating || e.Stage == evacuationHeld:
			t.evacuationEvent(d, event.EvacuationEnded, fmt.Sprintf("it is not suspect any more, and keeps the legs that it has; %s", madeElsewhere(e.Moved)))
		}
	}
	return next
}

// followLeg looks after the leg that is made again elsewhere: whether that is done, or is taken back.
func (t *tx) followLeg(e evacuation, stops bool) evacuation {
	if e.Leg.IsZero() {
		return e
	}
	t.unsure[e.Volume] = true
	v := t.peek(e.Volume)
	switch {
	case v == nil || !v.usable():
		return e.without()
	case v.leg(e.Leg) == nil || !v.leg(e.Leg).member():
		e.Moved++
		return e.without()
	}
	l := v.leg(e.Leg)
	begun := legOf{v, l}.begun() || slices.ContainsFunc(v.column(l.Column), func(o *Leg) bool { return o.Copying != nil })
	switch {
	case begun || !stops && t.copiedNow(v, l) && t.s.uncopied[columnOf{v.ID, l.Column}].why == "":
		e.going = t.now
	case stops || t.now.Sub(e.going) >= evacuationPatience:
		return e.without()
	}
	return e
}

// without is e while no leg is made again.
func (e evacuation) without() evacuation {
	e.Volume, e.Leg = block.VolumeID{}, block.LegID{}
	return e
}

// noPlaceElsewhere is why an evacuation is held back if the drives lack room.
const noPlaceElsewhere = "there is no place elsewhere for the legs that are left"

// evacuateNext has the next leg of a drive made again elsewhere. Without one it says why there is none.
func (t *tx) evacuateNext(d *Drive, e evacuation) (evacuation, evacuationStage, string) {
	unplaced, why := 0, "of the volumes that have legs on it, none is in good order and can be copied now"
	for _, at := range t.evacuees(d, e) {
		v, l := at.volume, at.leg
		if v.oneCopy() || unplaced == mostUnplaced || !t.mayMove(v, l) {
			continue
		}
		e.tried = maps.Clone(e.tried)
		e.tried[l.ID] = t.now
		e.Volume, e.Leg, e.going = v.ID, l.ID, t.now
		t.s.evacuations[d.ID] = e // it leaves from here on
		if t.makeAgain(v, l.Column) {
			return e, evacuating, ""
		}
		unplaced++
		why = noPlaceElsewhere
		e = e.without()
		t.s.evacuations[d.ID] = e
	}
	return e, evacuationHeld, why
}

// neverMoved says what is left on a drive from which nothing can be moved any more; empty if some leg can.
func (t *tx) neverMoved(d *Drive) string {
	single := 0
	for id, legs := range t.s.legsOn(d.Node, d.ID) {
		if v := t.peek(id); v == nil || !v.oneCopy() {
			return ""
		}
		single += len(legs)
	}
	if single > 0 {
		return fmt.Sprintf("it keeps %s of volumes of one copy, which are not moved", plural(single, "leg"))
	}
	return "none of its legs is left"
}

// oneCopy reports whether the volume has one copy of its data, so that its legs are not moved.
func (v *Volume) oneCopy() bool { return v.Layout.Slots() <= v.Layout.Group().Members }

// evacuees are the legs on a drive in the order in which they move: first those that were not tried
// lately, of these those of volumes, and then of snapshots, the oldest first.
func (t *tx) evacuees(d *Drive, e evacuation) (all []legOf) {
	for id, legs := range t.s.legsOn(d.Node, d.ID) {
		for _, l := range legs {
			if v := t.peek(id); v != nil {
				all = append(all, legOf{v, l})
			}
		}
	}
	slices.SortFunc(all, func(a, b legOf) int {
		return cmp.Or(e.tried[a.leg.ID].Compare(e.tried[b.leg.ID]), taken(a.volume).Compare(taken(b.volume)), bytes.Compare(a.leg.ID.UUID[:], b.leg.ID.UUID[:]))
	})
	return all
}

// taken is when a snapshot was taken; zero for a volume.
func taken(v *Volume) time.Time {
	if v.IsSnapshot() {
		return v.Snapshot.Taken
	}
	return time.Time{}
}

// mayMove reports whether a leg may begin to move: its volume is in good order, and is copied now. A
// leg of a snapshot comes after that of its volume, to be beside it again.
func (t *tx) mayMove(v *Volume, l *Leg) bool {
	if !v.usable() || v.ExpandingTo != 0 || !t.copiedNow(v, l) || t.now.Before(t.s.uncopied[columnOf{v.ID, l.Column}].until) {
		return false
	}
	for i := range v.Legs {
		if o := &v.Legs[i]; !o.trusted() || !o.member() || !t.s.servable(o) || t.leaving(o) != "" {
			return false
		}
	}
	return true
}

// copiedNow reports whether a replacement of a leg is copied now, or as soon as there is one.
func (t *tx) copiedNow(v *Volume, l *Leg) bool {
	s := t.s
	switch {
	case v.IsSnapshot():
		return t.level >= copiesLevel && !s.volumeBeside(v, l) && s.copyWaitsFor(v, l.Column) == ""
	case v.copier() != nil || len(v.Shared) > 0:
		return s.noCopier(v) == ""
	}
	return s.policy.HealAfter > 0 && t.level >= healLevel && s.unhealable(v) == "" && s.anyHealer(v)
}

// volumeBeside reports whether a snapshot's volume has a leg on the drive of a leg of the snapshot.
func (s *State) volumeBeside(v *Volume, l *Leg) bool {
	o := s.volumes.Get(v.Snapshot.Volume)
	return o != nil && slices.ContainsFunc(o.Legs, func(x Leg) bool { return x.Drive == l.Drive && x.member() })
}

// makeAgain places one more leg of a column of which one leaves, and reports whether there is a place.
// A snapshot's is placed when it is copied; see noteCopies.
func (t *tx) makeAgain(v *Volume, column int) bool {
	if v.IsSnapshot() {
		_, _, err := t.planCopy(v, column, t.newCopyLook())
		return err == nil
	}
	delete(t.s.crowded, v.ID)
	err := t.addLeg(v.ID, column, "")
	delete(t.s.crowded, v.ID)
	return err == nil
}

// enterStage notes where the evacuation of a drive stands. A change is an event.
func (t *tx) enterStage(d *Drive, e evacuation, stage evacuationStage, why string) evacuation {
	if e.Stage == stage && e.Why == why {
		return e
	}
	was := e.Stage
	e.Stage, e.Why = stage, why
	switch {
	case stage == evacuating:
		t.evacuationEvent(d, event.DriveEvacuating, fmt.Sprintf("its legs are made again elsewhere, one at a time, since it has been suspect for more than %v: %s", t.s.policy.EvacuateAfter, d.Suspect()))
	case stage == evacuationHeld:
		t.evacuationEvent(d, event.EvacuationHeld, fmt.Sprintf("it has been suspect for more than %v, and no further leg of it is made again elsewhere: %s", t.s.policy.EvacuateAfter, why))
	case was != "": // else there was nothing to move
		t.evacuationEvent(d, event.EvacuationEnded, fmt.Sprintf("%s; %s", madeElsewhere(e.Moved), why))
	}
	return e
}

func (t *tx) evacuationEvent(d *Drive, kind, text string) {
	t.event(event.Info, kind, d.object(), text, "node", string(d.Node), "drive", d.ID.String())
}

func madeElsewhere(n int) string {
	if n == 1 {
		return "1 leg was made again elsewhere"
	}
	return fmt.Sprintf("%d legs were made again elsewhere", n)
}

// ---- for people ----

// evacuationWords say where the evacuation of a drive stands; empty if there is nothing to say.
func (s *State) evacuationWords(d *Drive) string {
	e, known := s.evacuations[d.ID]
	n := s.nodes[d.Node]
	if !known || s.policy.EvacuateAfter <= 0 || d.Leaving != "" || n != nil && n.Draining {
		return ""
	}
	if e.Since.IsZero() {
		return "one more of its legs is made again elsewhere"
	}
	switch e.Stage {
	case evacuating:
		return fmt.Sprintf("being evacuated: %s moved so far", plural(e.Moved, "leg"))
	case evacuationHeld:
		return "not evacuated: " + e.Why
	case evacuationEnded:
		return "evacuated: " + e.Why
	}
	return fmt.Sprintf("to be evacuated from %s on if it is still suspect", e.Since.Add(s.policy.EvacuateAfter).UTC().Format(time.RFC3339))
}

// explainDrive adds that a leg's drive is suspect, what becomes of the leg, and what to do.
func (s *State) explainDrive(e *Explanation, v *Volume, l *Leg) {
	d := s.drives[l.Drive]
	if d == nil || d.Suspect() == "" {
		return
	}
	e.Facts = append(e.Facts, fmt.Sprintf("%s, which holds %v, is suspect: %s", d.object(), l, d.Suspect()))
	words := s.evacuationWords(d)
	if words != "" {
		e.Facts = append(e.Facts, fmt.Sprintf("%s is %s", d.object(), words))
	}
	e.Actions = append(e.Actions, fmt.Sprintf("replace %s before it fails; `weft drive list --health` shows what it reports", d.object()))
	switch {
	case v.oneCopy() && v.IsSnapshot():
		e.Facts = append(e.Facts, fmt.Sprintf("%s has one copy, so %v is not moved", v.object(), l))
	case v.oneCopy():
		e.Facts = append(e.Facts, fmt.Sprintf("%s has one copy, so %v is not moved", v.object(), l))
		e.Actions = append(e.Actions, fmt.Sprintf("give it another copy, `weft volume set %s --copies 2`, or copy what it holds to a new volume", v.Name))
	case s.evacuations[d.ID].Why == noPlaceElsewhere:
		e.Actions = append(e.Actions, fmt.Sprintf("add a drive in pool %s with `weft drive add`, so that its legs have a place", v.Pool))
	case d.Leaving == "" && l.member() && !s.evacuated(l):
		e.Actions = append(e.Actions, fmt.Sprintf("have all legs of the drive made again elsewhere now: weft drive drain %s", d.ID))
	}
}

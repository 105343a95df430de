// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
)

// Explain says why a volume is as it is, what it waits for and what an operator
// can do; the error is NotFound.
func (s *State) Explain(nameOrID string) (Explanation, error) {
	v, err := s.find(nameOrID)
	if err != nil {
		return Explanation{}, err
	}
	e := &Explanation{Object: v.object(), Facts: []string{s.volumeFact(v)}}
	for i := range v.Legs {
		l := &v.Legs[i]
		e.Facts = append(e.Facts, fmt.Sprintf("%v (%v) is %s", l, l.ID, s.legFact(l)))
	}
	switch {
	case v.State != VolumeReady:
		s.explainUnready(e, v)
	case v.Attachment != nil:
		s.explainAttachment(e, v)
	case len(v.Shared) > 0:
		s.explainShared(e, v)
	case v.Restored:
		e.Summary = v.object() + " was restored from a backup, and is served after its record was compared with the labels on the drives"
		e.Waits = append(e.Waits, "the labels of "+s.unseenText(v))
	default:
		e.Summary = fmt.Sprintf("%s is detached and %s", v.object(), strings.ToLower(string(s.health(v))))
		for _, wait := range s.fenceWaits(v) {
			e.Waits = append(e.Waits, "the fence against an earlier host: "+wait)
		}
	}
	if v.State == VolumeReady {
		s.explainExpansion(e, v)
		s.explainLegs(e, v)
	}
	slices.Sort(e.Actions)
	e.Actions = slices.Compact(e.Actions)
	return *e, nil
}

func (s *State) volumeFact(v *Volume) string {
	fact := fmt.Sprintf("%v, %v, pool %s, copies apart by %s; epoch %d", v.Size, v.Layout, v.Pool, v.Spread, v.Epoch)
	if v.State == VolumeReady && v.users() == "" && !v.Clean {
		fact += "; it was not detached cleanly, so its copies are made equal at the next attach"
	}
	if v.Holder != "" && (v.Attachment == nil || v.Attachment.Node != v.Holder) {
		fact += fmt.Sprintf("; host %s had it last and was not seen to let go", v.Holder)
	}
	if len(v.Lingering) > 0 {
		fact += fmt.Sprintf("; host %s shared it and was not seen to let go", v.lingererNames())
	}
	return fact
}

func (s *State) explainUnready(e *Explanation, v *Volume) {
	e.Summary = fmt.Sprintf("%s is %s", v.object(), strings.ToLower(string(v.State)))
	for i := range v.Legs {
		l := &v.Legs[i]
		why := s.legWaitsFor(l)
		if why == "" {
			continue
		}
		e.Waits = append(e.Waits, fmt.Sprintf("%v: %s", l, why))
		if d := s.drives[l.Drive]; d != nil && v.State == VolumeDeleting && (d.State == DriveFailed || d.State == DriveMissing) {
			e.Actions = append(e.Actions, fmt.Sprintf("if the drive is gone for ever: weft drive evict %s", d.ID))
		}
		if !s.targetOnline(l.Node) {
			e.Actions = append(e.Actions, s.bringBack(l.Node))
			if v.State == VolumeDeleting {
				e.Actions = append(e.Actions, fmt.Sprintf("if %s is gone for ever: weft node confirm-dead %s && weft node remove %s", l.Node, l.Node, l.Node))
			} else {
				e.Actions = append(e.Actions, fmt.Sprintf("or give the volume up: weft volume delete %s", v.Name))
			}
		}
	}
}

func (s *State) bringBack(node block.NodeName) string {
	return fmt.Sprintf("bring target %s back: is the machine up, does `weft target` run there and reach the manager?", node)
}

func (s *State) explainAttachment(e *Explanation, v *Volume) {
	a := v.Attachment
	e.Waits = append(e.Waits, s.attachmentWaits(v, a)...)
	e.Facts = append(e.Facts, fmt.Sprintf("attachment to %s at epoch %d is %s since %s", a.Node, a.Epoch, a.State, a.Since.UTC().Format(time.RFC3339)))
	switch a.State {
	case Granting:
		e.Summary = fmt.Sprintf("%s is being given to %s: older epochs are being fenced at its targets", v.object(), a.Node)
		if a.Left {
			e.Summary = fmt.Sprintf("%s is kept for %s, which has let go and ends", v.object(), a.Node)
			e.Actions = append(e.Actions, fmt.Sprintf("start `weft initiator` on %s again, or give the volume up: weft detach %s", a.Node, v.Name))
			return
		}
		s.explainGrant(e, v)
	case Granted:
		e.Summary = fmt.Sprintf("%s is given to %s, which is building the device", v.object(), a.Node)
	case Attached:
		e.Summary = fmt.Sprintf("%s is attached to %s and %s", v.object(), a.Node, strings.ToLower(string(s.health(v))))
		if r, ok := s.attachmentReport(v, a); ok && r.Phase == PhaseStalled {
			e.Summary = fmt.Sprintf("%s is attached to %s and its I/O waits", v.object(), a.Node)
		}
	case Detaching:
		e.Summary = fmt.Sprintf("%s is being detached from %s", v.object(), a.Node)
		e.Actions = append(e.Actions, fmt.Sprintf("to take it away without %s, losing what is in flight: weft detach %s --force", a.Node, v.Name))
	}
	if a.State != Detaching && !s.initiatorOnline(a.Node) {
		e.Facts = append(e.Facts, fmt.Sprintf("host %s is offline: it may still read and write", a.Node))
		e.Actions = append(e.Actions,
			fmt.Sprintf("if machine %s is off: weft node confirm-dead %s", a.Node, a.Node),
			fmt.Sprintf("to move the volume away from it: weft detach %s --force", v.Name))
	}
}

func (s *State) explainExpansion(e *Explanation, v *Volume) {
	if v.ExpandingTo == 0 {
		return
	}
	e.Facts = append(e.Facts, fmt.Sprintf("it is being expanded to %v, and has %v until every leg in use has grown", v.ExpandingTo, v.Size))
	e.Waits = append(e.Waits, s.expansionWaits(v)...)
	for i := range v.Legs {
		if l := &v.Legs[i]; l.exported() && !s.targetOnline(l.Node) {
			e.Actions = append(e.Actions, s.bringBack(l.Node))
		}
	}
}

// explainGrant says what an operator can do about targets that do not answer.
func (s *State) explainGrant(e *Explanation, v *Volume) {
	_, rest := s.grantSplit(v)
	for _, l := range rest {
		if s.targetOnline(l.Node) {
			continue
		}
		e.Actions = append(e.Actions, s.bringBack(l.Node))
		if !slices.ContainsFunc(v.twins(l), func(o *Leg) bool { return o.Suspect }) { // explainSuspect says what that would cost
			e.Actions = append(e.Actions, fmt.Sprintf("if machine %s is off: weft node confirm-dead %s", l.Node, l.Node))
		}
	}
}

// explainLegs speaks of legs that are not as they should be, and of columns
// that have none to serve them.
func (s *State) explainLegs(e *Explanation, v *Volume) {
	for i := range v.Legs {
		l := &v.Legs[i]
		switch {
		case l.Suspect:
			s.explainSuspect(e, v, l)
		case l.State == LegStale:
			e.Waits = append(e.Waits, fmt.Sprintf("rebuild of %v: %s", l, s.rebuildWaitsFor(v, l)))
			switch {
			case !s.targetOnline(l.Node):
				e.Actions = append(e.Actions, s.bringBack(l.Node))
			case l.Failures > 0:
				e.Actions = append(e.Actions, seeToDrive(l))
			}
		case l.State == LegRebuilding:
			e.Waits = append(e.Waits, fmt.Sprintf("host %s to copy %v%s", v.Attachment.Node, l, s.progress(v)))
		}
	}
	for c := range v.Layout.Stripes {
		s.explainColumn(e, v, c)
	}
}

func seeToDrive(l *Leg) string {
	return fmt.Sprintf("see to the drive of %v: `weft drive list` says what it has", l)
}

// explainSuspect names who can tell what a suspect leg is worth.
func (s *State) explainSuspect(e *Explanation, v *Volume, l *Leg) {
	if v.Attachment == nil || v.Attachment.State != Granting { // else it is among what the grant waits for
		e.Waits = append(e.Waits, s.suspectWaitsFor(v, l))
	}
	for _, o := range v.twins(l) {
		if !o.Suspect {
			e.Actions = append(e.Actions, s.bringBack(o.Node),
				fmt.Sprintf("if machine %s is gone for ever, lose what only its copy holds: weft node confirm-dead %s", o.Node, o.Node))
		}
	}
}

func (s *State) progress(v *Volume) string {
	r, _ := s.attachmentReport(v, v.Attachment)
	return progress(r)
}

func progress(r AttachmentReport) string {
	if r.ResyncTotal == 0 {
		return ""
	}
	return fmt.Sprintf(" (%s of %s)", r.ResyncDone.Short(), r.ResyncTotal.Short())
}

// explainColumn lists the ways out for a column without a leg that can be served.
func (s *State) explainColumn(e *Explanation, v *Volume, column int) {
	var good, stale []*Leg
	for i := range v.Legs {
		l := &v.Legs[i]
		switch {
		case l.Column != column:
		case l.trusted() && s.servable(l):
			return
		case l.trusted():
			good = append(good, l)
		case l.Suspect: // spoken of above
		case s.servable(l):
			stale = append(stale, l)
		}
	}
	e.Facts = append(e.Facts, fmt.Sprintf("column %d has no in-sync leg that can be reached", column))
	for _, l := range good {
		e.Waits = append(e.Waits, fmt.Sprintf("%v, which holds every write of column %d", l, column))
		if s.targetOnline(l.Node) {
			e.Actions = append(e.Actions, seeToDrive(l))
			continue
		}
		e.Actions = append(e.Actions, s.bringBack(l.Node))
	}
	for _, l := range stale {
		// Promoting needs a detached volume; say the whole way.
		detach := ""
		if v.users() != "" {
			detach = fmt.Sprintf("weft detach %s --force, then ", v.Name)
		}
		e.Actions = append(e.Actions, fmt.Sprintf("if every good copy of column %d is gone for ever, go back to the state of %s and lose what was written since: %sweft volume promote-stale %s %v --accept-data-loss",
			column, l.StaleSince.UTC().Format(time.RFC3339), detach, v.Name, l.ID))
	}
}

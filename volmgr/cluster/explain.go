// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/labelset"
)

// Explain says why a volume is in its state, what it waits for and what an operator can do;
// the error is NotFound.
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
	case v.Restoring != nil && !v.Restored:
		s.explainRestoring(e, v)
	case v.Attachment != nil:
		s.explainAttachment(e, v)
	case len(v.Shared) > 0:
		s.explainShared(e, v)
	case v.Restored:
		e.Summary = v.object() + " was restored from a backup and is served once its record has been compared with the labels on the drives"
		e.Waits = append(e.Waits, s.restoredWaits(v)...)
		s.explainRestored(e, v)
	default:
		e.Summary = fmt.Sprintf("%s is detached and %s", v.object(), strings.ToLower(string(s.health(v))))
		s.explainHealing(e, v)
		for _, wait := range s.fenceWaits(v) {
			e.Waits = append(e.Waits, "the fence against an earlier host: "+wait)
		}
	}
	if excess := labelset.Excess(v.Labels); excess != "" {
		e.Facts = append(e.Facts, fmt.Sprintf("it has %s from an earlier version; drives do not store them", excess))
		e.Actions = append(e.Actions, fmt.Sprintf("remove labels: weft volume set %s --label KEY-, or --label '*-' for all of them", v.Name))
	}
	s.explainSnapshot(e, v)
	s.explainFlattening(e, v)
	s.explainSealed(e, v)
	s.explainInKernel(e, v)
	if v.State == VolumeReady {
		s.explainExpansion(e, v)
		s.explainScrub(e, v)
		s.explainRebuilds(e, v)
		s.explainLegs(e, v)
		s.explainProven(e, v)
		s.explainPaths(e, v)
	}
	slices.Sort(e.Actions)
	e.Actions = slices.Compact(e.Actions)
	return *e, nil
}

func (s *State) volumeFact(v *Volume) string {
	fact := fmt.Sprintf("size %v, %d×%d (columns × copies), chunk %v, pool %s", v.Size, v.Layout.Stripes, v.Layout.Copies, v.Layout.Chunk, v.Pool)
	if v.Layout.Copies > 1 {
		fact += fmt.Sprintf(", each copy on another %s", v.Spread)
	}
	fact += fmt.Sprintf("; epoch %d", v.Epoch)
	if v.State == VolumeReady && v.users() == "" && !v.Clean && !v.oneCopy() {
		fact += "; it was not detached cleanly, so its copies will be made equal at the next attach"
	}
	if v.Holder != "" && (v.Attachment == nil || v.Attachment.Node != v.Holder) {
		fact += fmt.Sprintf("; host %s had it last and has not confirmed its release", v.Holder)
	}
	if len(v.FormerHosts) > 0 {
		fact += fmt.Sprintf("; %s shared it and has not confirmed its release", v.formerHosts())
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
			e.Actions = append(e.Actions, fmt.Sprintf("if the drive is gone for good: weft drive evict %s", d.ID))
		}
		if !s.targetOnline(l.Node) {
			e.Actions = append(e.Actions, s.bringBack(l.Node))
			if v.State == VolumeDeleting {
				e.Actions = append(e.Actions, fmt.Sprintf("if %s is gone for good: weft node confirm-dead %s && weft node remove %s", l.Node, l.Node, l.Node))
			} else {
				e.Actions = append(e.Actions, fmt.Sprintf("or abandon the volume: weft volume delete %s", v.Name))
			}
		}
	}
}

func (s *State) bringBack(node block.NodeName) string {
	if s.revoked(node, "target") {
		return joinAgain(node, "target")
	}
	return fmt.Sprintf("bring target %s back: is the machine up, does `weft target` run there and reach the manager?", node)
}

func (s *State) explainAttachment(e *Explanation, v *Volume) {
	a := v.Attachment
	e.Waits = append(e.Waits, s.attachmentWaits(v, a)...)
	e.Facts = append(e.Facts, fmt.Sprintf("attachment to %s, epoch %d: %s since %s", a.Node, a.Epoch, strings.ToLower(string(a.State)), a.Since.UTC().Format(time.RFC3339)))
	if a.GaveUp != "" {
		e.Facts = append(e.Facts, fmt.Sprintf("%s gave up its device of the previous epoch: %s; programs that had it open get errors until they open it again", a.Node, a.GaveUp))
	}
	e.Facts = append(e.Facts, s.hostProblems(v, a)...)
	if r, old := s.releasing(v, a); old {
		e.Actions = append(e.Actions, fmt.Sprintf("on %s, unmount the device of epoch %d or stop the programs that have it open; then the new device is created", a.Node, r.Epoch))
	}
	switch a.State {
	case Granting:
		e.Summary = fmt.Sprintf("%s is being granted to %s: its targets are fencing older epochs", v.object(), a.Node)
		if a.Left {
			e.Summary = fmt.Sprintf("%s is kept for %s, which has released it and is shutting down", v.object(), a.Node)
			e.Actions = append(e.Actions, fmt.Sprintf("start `weft initiator` on %s again, or detach the volume: weft detach %s", a.Node, v.Name))
			return
		}
		s.explainGrant(e, v)
	case Granted:
		e.Summary = fmt.Sprintf("%s is granted to %s, which is building the device", v.object(), a.Node)
	case Attached:
		e.Summary = fmt.Sprintf("%s is attached to %s and %s", v.object(), a.Node, strings.ToLower(string(s.health(v))))
		if r, ok := s.attachmentReport(v, a); ok && r.Phase == PhaseStalled {
			e.Summary = fmt.Sprintf("%s is attached to %s and its I/O waits", v.object(), a.Node)
		}
	case Detaching:
		e.Summary = fmt.Sprintf("%s is being detached from %s", v.object(), a.Node)
		e.Actions = append(e.Actions, s.detachActions(v, a)...)
	}
	if a.Stock {
		s.explainStock(e, v, a)
		return
	}
	if a.State != Detaching && !s.initiatorOnline(a.Node) {
		e.Facts = append(e.Facts, fmt.Sprintf("host %s is offline: it may still read and write", a.Node))
		if s.revoked(a.Node, "initiator") {
			e.Actions = append(e.Actions, joinAgain(a.Node, "initiator"))
		}
		e.Actions = append(e.Actions,
			fmt.Sprintf("if machine %s is off: weft node confirm-dead %s", a.Node, a.Node),
			fmt.Sprintf("to move the volume away from it: weft detach %s --force", v.Name))
	}
}

// detachActions lists the ways out of a detach that does not end. Force comes last, since it
// removes a mounted volume from under its file system.
func (s *State) detachActions(v *Volume, a *Attachment) []string {
	keep := fmt.Sprintf("to keep it attached: `weft detach %s --node %s --cancel`", v.Name, a.Node)
	force := fmt.Sprintf("`weft detach %s --node %s --force`, which loses what %s has not written yet", v.Name, a.Node, a.Node)
	if s.initiatorOnline(a.Node) {
		return []string{fmt.Sprintf("unmount the volume on %s, and end the programs that have it open", a.Node), keep}
	}
	return []string{fmt.Sprintf("bring host %s back: is the machine up, does `weft initiator` run there and reach the manager?", a.Node), keep,
		fmt.Sprintf("if %s is lost: %s", a.Node, force)}
}

// explainRestored says how an operator can end the waits of a restored volume.
func (s *State) explainRestored(e *Explanation, v *Volume) {
	gone := func(node block.NodeName) string {
		return fmt.Sprintf("if machine %s is gone for good: weft node confirm-dead %s", node, node)
	}
	for _, l := range s.unseen(v) {
		switch d, read := s.driveReport(l); {
		case !s.targetOnline(l.Node):
			e.Actions = append(e.Actions, s.bringBack(l.Node), gone(l.Node))
		case !read || d.Error != "":
			e.Actions = append(e.Actions, checkDrive(l), gone(l.Node))
		}
	}
	if host := s.inquire(v).Awaits(s.confirmedDead); host != "" {
		e.Actions = append(e.Actions, fmt.Sprintf("start `weft initiator` on %s: its note says which copies are good", host), gone(host))
	}
}

func (s *State) explainExpansion(e *Explanation, v *Volume) {
	if v.ExpandingTo == 0 {
		return
	}
	e.Facts = append(e.Facts, fmt.Sprintf("it is being expanded to %v and has %v until every leg in use has grown", v.ExpandingTo, v.Size))
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
		// explainSuspect and explainLoss add this with its cost.
		if !slices.ContainsFunc(v.peers(l), func(o *Leg) bool { return o.Suspect }) && (!s.damagedAlone(v, l.Column) || !s.onlySound(v, l, nil)) {
			e.Actions = append(e.Actions, fmt.Sprintf("if machine %s is off: weft node confirm-dead %s", l.Node, l.Node))
		}
	}
}

// explainLegs covers the legs that are suspect, stale or rebuilding, and the columns that
// cannot be served.
func (s *State) explainLegs(e *Explanation, v *Volume) {
	for i := range v.Legs {
		l := &v.Legs[i]
		s.explainDrive(e, v, l)
		s.explainDamage(e, v, l)
		switch {
		case !l.member():
			s.explainRetired(e, v, l)
		case l.Suspect:
			s.explainSuspect(e, v, l)
		case l.Copying != nil:
			e.Waits = append(e.Waits, fmt.Sprintf("%v to be copied: %s", l, s.copyingWaits(v, l)))
		case l.State == LegStale:
			e.Waits = append(e.Waits, fmt.Sprintf("rebuild of %v: %s", l, s.rebuildWaits(v, l)))
			e.Actions = append(e.Actions, s.staleActions(l)...)
		case l.State == LegRebuilding:
			e.Waits = append(e.Waits, fmt.Sprintf("host %s to copy %v%s", v.copier().Node, l, s.copying(v, l)))
		case s.asked[v.ID][l.ID] != "" && v.Attachment != nil:
			e.Waits = append(e.Waits, fmt.Sprintf("host %s to leave out %v: %s", v.Attachment.Node, l, s.asked[v.ID][l.ID]))
		case l.trusted() && !s.servable(l):
			s.explainAway(e, v, l)
		}
	}
	s.explainSpace(e, v)
	s.explainRedundancy(e, v)
	for c := range v.Layout.Stripes {
		s.explainLoss(e, v, c)
		s.explainColumn(e, v, c)
		explainMissing(e, v, c)
		waits, actions := s.replacementWaits(v, c)
		if v.IsSnapshot() && len(staying(v.column(c), s.leaving)) < v.Layout.Group().Members && len(v.column(c)) < v.slots() {
			waits, actions = s.lackingWaits(v, c)
		}
		e.Waits, e.Actions = append(e.Waits, waits...), append(e.Actions, actions...)
	}
}

// staleActions tells an operator what to do about a stale leg.
func (s *State) staleActions(l *Leg) []string {
	switch {
	case !s.targetOnline(l.Node):
		return []string{s.bringBack(l.Node)}
	case l.Failures > 0 || s.driveAway(l):
		return []string{checkDrive(l)}
	}
	return nil
}

// driveAway reports whether a leg's target is there without its drive.
func (s *State) driveAway(l *Leg) bool {
	d := s.drives[l.Drive]
	return s.targetOnline(l.Node) && (d == nil || d.State == DriveMissing || d.State == DriveFailed)
}

// explainAway covers a leg in sync that cannot be reached, while the others of its column can.
func (s *State) explainAway(e *Explanation, v *Volume, l *Leg) {
	if !v.Layout.Group().Readable(s.serving(v)[l.Column]) {
		return // explainColumn covers it
	}
	switch {
	case !s.targetOnline(l.Node):
		e.Waits = append(e.Waits, fmt.Sprintf("%v: target %s, which is offline", l, l.Node))
		e.Actions = append(e.Actions, s.bringBack(l.Node))
	case s.driveAway(l):
		e.Waits = append(e.Waits, fmt.Sprintf("%v: its drive, which is not ready%s", l, s.driveReason(l)))
		e.Actions = append(e.Actions, checkDrive(l))
		if d := s.drives[l.Drive]; d != nil && d.Leaving == "" {
			e.Actions = append(e.Actions, fmt.Sprintf("if the drive of %v is gone for good: weft drive evict %s", l, l.Drive))
		}
	}
}

// rebuildWaits says what the rebuild of a stale leg waits for, also if nothing is in its way.
func (s *State) rebuildWaits(v *Volume, l *Leg) string {
	if why := s.rebuildWaitsFor(v, l); why != "" {
		return why
	}
	for _, o := range v.Legs {
		if o.Column == l.Column && o.State == LegRebuilding {
			return fmt.Sprintf("the rebuild of %v; a column copies to one leg at a time", &o)
		}
	}
	return "the manager to begin it, which takes a second at most"
}

// explainMissing covers legs that a rebuilt store did not find on any drive.
func explainMissing(e *Explanation, v *Volume, column int) {
	found := len(v.column(column))
	g := v.Layout.Group()
	if found >= g.Members {
		return
	}
	if v.IsSnapshot() {
		e.Facts = append(e.Facts, fmt.Sprintf("column %d has %d of its %v", column, found, g))
		return
	}
	if v.awaitsLegs() {
		e.Facts = append(e.Facts, fmt.Sprintf("column %d has %d of its %v: a leg is added when there is a drive with room for it on a node that may have one", column, found, g))
		return
	}
	e.Facts = append(e.Facts, fmt.Sprintf("column %d has %d of its %v: the others were not on any drive that could be read when the store was rebuilt", column, found, g))
	e.Actions = append(e.Actions, "if their drives can be read now: stop the manager and rebuild the store again with `weft volmgr rebuild-from-drives`",
		fmt.Sprintf("if they are gone for good: copy what %s holds to a new volume", v.object()))
}

// explainDamage covers a leg in a tree of which records are lost.
func (s *State) explainDamage(e *Explanation, v *Volume, l *Leg) {
	r := s.damage(l)
	if r.Damage == "" {
		return
	}
	unknown := "all that it holds can be read"
	if r.Unknown > 0 {
		unknown = fmt.Sprintf("up to %s of it may be lost and cannot be read", r.Unknown.Short())
	}
	e.Facts = append(e.Facts, fmt.Sprintf("%v takes no writes, and %s: %s", l, unknown, r.Damage))
	switch {
	case !v.oneCopy(): // explainLoss
	case v.IsSnapshot():
		e.Actions = append(e.Actions, fmt.Sprintf("copy what can be read of it to another volume, and delete it: weft snapshot delete %s", v.Name))
	case r.Unknown > 0:
		e.Actions = append(e.Actions, fmt.Sprintf("copy what can be read of %s to a new volume, and delete it; `weft doctor --tree` on %s says what may be lost", v.object(), l.Node))
	default:
		e.Actions = append(e.Actions, fmt.Sprintf("give it another copy, `weft volume set %s --copies 2`; then %v is made again as well", v.Name, l))
	}
}

// explainLoss covers a column that is served by legs in damaged trees alone: writes wait for a whole leg, and so do
// reads of what all of them have lost.
func (s *State) explainLoss(e *Explanation, v *Volume, column int) {
	if !s.damagedAlone(v, column) {
		return
	}
	known := v.Layout.Group().Readable(s.known(v)[column])
	var awaited []string
	for _, l := range v.column(column) {
		switch {
		case s.onlySound(v, l, nil) && !s.servable(l):
			awaited = append(awaited, fmt.Sprintf("%v, which is %s", l, s.legFact(l)))
			e.Actions = append(e.Actions, s.lossActions(l, known)...)
		case known || l.trusted() || l.Blank:
		default:
			e.Actions = append(e.Actions, fmt.Sprintf("to go on with %v and lose what only other copies hold: %sweft volume promote-stale %s %d.%d --accept-data-loss", l, detachFirst(v), v.Name, l.Column, l.Copy))
		}
	}
	wait := cmp.Or(strings.Join(awaited, ", and "), fmt.Sprintf("another copy of column %d that is in sync and in no damaged tree", column)) + ": until then writes wait"
	if !known {
		wait += ", and reads of what the copies in damaged trees have lost fail"
		e.Actions = append(e.Actions, s.rescues(v, column)...)
	}
	e.Waits = append(e.Waits, wait)
}

// damagedAlone reports whether a column of several copies is served by legs in damaged trees alone.
func (s *State) damagedAlone(v *Volume, column int) bool {
	g := v.Layout.Group()
	return !v.oneCopy() && s.damagedIn(v, column) && !g.Readable(s.sound(v)[column]) && g.Readable(s.serving(v)[column])
}

// lossActions lists how the wait for a whole leg ends. known: the others, in damaged trees, hold all data.
func (s *State) lossActions(l *Leg, known bool) (actions []string) {
	cost := ", and you accept the loss of data that only its copy holds"
	if known {
		cost = ""
	}
	if !s.targetOnline(l.Node) {
		actions = append(actions, s.bringBack(l.Node), fmt.Sprintf("if machine %s is gone for good%s: weft node confirm-dead %s", l.Node, cost, l.Node))
	} else {
		actions = append(actions, checkDrive(l))
	}
	if s.isLost(l) {
		actions = append(actions, fmt.Sprintf("if %v is gone for good%s: weft drive evict %s", l, cost, l.Drive))
	}
	return actions
}

// rescues says how to keep what can be read of a column of which a part is lost.
func (s *State) rescues(v *Volume, column int) (actions []string) {
	for _, l := range v.column(column) {
		if l.trusted() && s.damage(l).Unknown > 0 {
			actions = append(actions, fmt.Sprintf("if no other copy comes back: copy what can be read of %s to a new volume, and delete it; `weft doctor --tree` on %s says what may be lost", v.object(), l.Node))
		}
	}
	return actions
}

func checkDrive(l *Leg) string {
	return fmt.Sprintf("check the drive of %v: `weft drive list` says what is wrong", l)
}

// explainSuspect covers a suspect leg: the peers that it waits for and what to do about them.
func (s *State) explainSuspect(e *Explanation, v *Volume, l *Leg) {
	if v.Attachment == nil || v.Attachment.State != Granting { // a grant lists the same wait
		e.Waits = append(e.Waits, s.suspectWaitsFor(v, l))
	}
	for _, o := range v.peers(l) {
		switch {
		case o.Suspect:
		case !s.targetOnline(o.Node):
			e.Actions = append(e.Actions, s.bringBack(o.Node),
				fmt.Sprintf("if machine %s is gone for good, and you accept the loss of data that only its copy holds: weft node confirm-dead %s", o.Node, o.Node))
		case !s.servable(o):
			e.Actions = append(e.Actions, checkDrive(o), fmt.Sprintf("if it is gone for good, and you accept the loss of data that only %v holds: %sweft volume promote-stale %s %v --accept-data-loss",
				o, detachFirst(v), v.Name, l.ID))
		}
	}
}

// detachFirst is the start of a command line that needs the volume detached.
func detachFirst(v *Volume) string {
	if v.users() == "" {
		return ""
	}
	return fmt.Sprintf("weft detach %s --force, then ", v.Name)
}

func (s *State) progress(v *Volume) string {
	r, _ := s.attachmentReport(v, v.copier())
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
	if v.Layout.Group().Readable(s.serving(v)[column]) {
		return
	}
	for _, l := range v.column(column) {
		switch {
		case l.trusted() && s.servable(l):
		case l.trusted():
			good = append(good, l)
		case l.Suspect: // explainSuspect covers it
		case s.servable(l) && !l.Blank:
			stale = append(stale, l)
		}
	}
	e.Facts = append(e.Facts, fmt.Sprintf("column %d has %s that can be reached", column, tooFew(v.Layout.Group())))
	for _, l := range good {
		e.Waits = append(e.Waits, fmt.Sprintf("%v, which holds every write of column %d", l, column))
		if s.targetOnline(l.Node) {
			e.Actions = append(e.Actions, checkDrive(l))
			continue
		}
		e.Actions = append(e.Actions, s.bringBack(l.Node))
	}
	if v.Layout.Group().Needs > 1 { // a column of a code cannot be read from one leg
		return
	}
	for _, l := range stale {
		when := fmt.Sprintf("if every good copy of column %d is gone for good: return to the state of %s and lose later writes",
			column, l.StaleSince.UTC().Format(time.RFC3339))
		if v.inSync()[column] == 0 { // a rebuilt or restored store could not tell which is good
			when = fmt.Sprintf("if the evidence favors %v over the other copies of column %d: accept it and lose writes that only the other copies hold", l, column)
		}
		e.Actions = append(e.Actions, fmt.Sprintf("%s: %sweft volume promote-stale %s %d.%d --accept-data-loss", when, detachFirst(v), v.Name, l.Column, l.Copy))
	}
}

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/evidence"
)

// A volume goes back to one of its snapshots while no host has it, in these steps. Each is durable before
// the next:
//
//	RestoreVolume   the record: the legs that can go back are those in sync that share a tree with a leg
//	                of the snapshot; all others are stale, and are copied whole later
//	targets         labels say that the volume is going back
//	Switching       the record: a new revision for each of these legs
//	targets         the leg's record on the label is not prepared, or going back; then the leg is in its tree
//	                what the snapshot is; then its record is prepared, under the new revision
//	settleRestoring the record: it is over, and hosts can have the volume
//
// If the store is lost meanwhile, some legs may have gone back and others not. The labels say so, and the
// volume goes back again, under newer revisions: no host can have written to it.

// Restoring is how far a volume is on its way back to a snapshot.
type Restoring struct {
	To        block.VolumeID   `json:"to"`
	Name      block.VolumeName `json:"name"`      // of the snapshot
	Formatted string           `json:"formatted"` // of the snapshot
	Listed    uint64           `json:"listed"`    // the volume's generation since which labels say so
	Switching bool             `json:"switching,omitempty"`
	// Again: the store was lost on the way, so the volume cannot be left as it is.
	Again bool      `json:"again,omitempty"`
	Since time.Time `json:"since"` // when the present step began
}

const (
	// restoreAwait is how long a leg that could not be reached is waited for, if its column can do
	// without it.
	restoreAwait = 10 * time.Second
	// restoreListFor is the longest that labels may take before a volume that has not changed yet is
	// left as it was.
	restoreListFor = time.Minute
)

// RestoreVolume makes a volume that no host has what one of its snapshots holds. It is complete when
// Restoring is nil. Result: Volume.
type RestoreVolume struct {
	Volume, Snapshot string // name or id
	// IfGeneration and IfEpoch are the volume's as the caller saw it; generation 0: any.
	IfGeneration uint64
	IfEpoch      block.Epoch
}

func (in RestoreVolume) apply(t *tx) (view, error) {
	v, from, err := t.s.restorable(in)
	if err != nil {
		return nil, err
	}
	if x := v.Restoring; x != nil && x.To == from.ID {
		return volumeResult(v.ID), nil
	}
	if err := t.s.mayRestore(v, from, in); err != nil {
		return nil, err
	}
	if !v.Thin {
		if err := t.needsLevel(plainRestoreLevel, "going back of volumes that are not thin"); err != nil {
			return nil, err
		}
	}
	t.restore(t.volume(v.ID), from)
	return volumeResult(v.ID), nil
}

// restorable finds a volume and its snapshot.
func (s *State) restorable(in RestoreVolume) (v, from *Volume, err error) {
	if v, err = s.find(in.Volume); err != nil {
		return nil, nil, err
	}
	if v.unwritten() {
		return nil, nil, v.neverChanges()
	}
	if from, err = s.find(in.Snapshot); err != nil {
		return nil, nil, err
	}
	if !from.IsSnapshot() || from.Snapshot.Volume != v.ID {
		return nil, nil, invalid("snapshot", "%s is no snapshot of %s", from.object(), v.object()).hint("`weft snapshot list %s` shows which there are", v.Name)
	}
	return v, from, nil
}

// mayRestore refuses a volume that cannot go back to its snapshot now.
func (s *State) mayRestore(v, from *Volume, in RestoreVolume) error {
	for _, x := range []*Volume{v, from} {
		if !x.usable() {
			return refused(ReasonNotReady, x.object(), "%s", x.unready()).hint("`weft explain volume %s` says what it waits for", x.Name)
		}
	}
	switch {
	case v.users() != "":
		return refused(ReasonAttached, v.object(), "attached to %s, which would not know that it holds other data", v.users()).hint("`weft detach %s` first", v.Name)
	case v.Holder != "" || len(v.FormerHosts) > 0:
		return refused(ReasonAttached, v.object(), "a host that had it has not confirmed its release").
			hint("attach it to another host, which shuts that one out, and detach it: `weft attach %s --node NODE`, `weft detach %s`", v.Name, v.Name)
	case v.ExpandingTo != 0:
		return refused(ReasonNotReady, v.object(), "it is being expanded").hint("wait until `weft explain volume %s` no longer shows it", v.Name)
	case len(s.takings.Get(v.ID)) > 0:
		return refused(ReasonNotReady, v.object(), "a snapshot of it is being taken").hint("wait until `weft snapshot list %s` shows it ready", v.Name)
	case in.IfGeneration != 0 && (in.IfGeneration != v.Generation || in.IfEpoch != v.Epoch):
		return refused(ReasonNotReady, v.object(), "it has changed since: its generation is %d and its epoch %d, not %d and %d", v.Generation, v.Epoch, in.IfGeneration, in.IfEpoch).hint("look at it again: `weft volume show %s`", v.Name)
	}
	for c := range v.Layout.Stripes {
		if err := s.columnGoesBack(v, from, c); err != nil {
			return err
		}
	}
	return nil
}

// columnGoesBack refuses a volume of which one column cannot go back to a snapshot now.
func (s *State) columnGoesBack(v, from *Volume, column int) error {
	instead := fmt.Sprintf("or use a volume that begins as it: `weft volume create NAME --from %s`", from.Name)
	old, apart := "", false
	for _, l := range v.column(column) {
		switch x, why := s.goesBack(l, from); {
		case x != nil:
			return nil
		case l.trusted() && slices.ContainsFunc(from.Legs, func(x Leg) bool {
			return x.Drive == l.Drive && x.tree() != l.tree() && x.Column == column && x.trusted()
		}):
			apart = true
		case l.trusted() && s.oldForBack(l):
			old = why
		}
	}
	if old != "" {
		return refused(ReasonOldTarget, v.object(), "column %d cannot go back to %s: %s", column, from.Name, old).hint("upgrade the target; %s", instead)
	}
	if apart {
		return refused(ReasonNoInSyncLeg, v.object(), "column %d shares nothing with %s any more: legs of one of them were made again, each in a tree of its own", column, from.Name).
			hint("use a volume that begins as it: `weft volume create NAME --from %s`", from.Name)
	}
	return refused(ReasonNoInSyncLeg, v.object(), "column %d has no copy in sync that shares a drive with one of %s and can be reached", column, from.Name).
		hint("`weft explain volume %s` shows where its legs are; %s", from.Name, instead)
}

// goesBack returns the leg of a snapshot that a leg can be made again of; if there is none now, it says why.
func (s *State) goesBack(l *Leg, from *Volume) (x *Leg, why string) {
	i := slices.IndexFunc(from.Legs, func(x Leg) bool {
		return x.Drive == l.Drive && x.tree() == l.tree() && x.Column == l.Column && x.member()
	})
	switch {
	case !l.trusted():
		return nil, "it is not in sync"
	case !s.servable(l):
		return nil, cmp.Or(s.legWaitsFor(l), fmt.Sprintf("target %s cannot serve it", l.Node))
	case s.damage(l).Damage != "":
		return nil, "its tree is damaged"
	case i < 0:
		return nil, fmt.Sprintf("nothing of %s was found in its tree", from.Name)
	case !from.Legs[i].trusted():
		return nil, fmt.Sprintf("it is not known whether what its tree has of %s is right", from.Name)
	case s.oldForBack(l):
		return nil, fmt.Sprintf("target %s is of an earlier version, and cannot have it go back to a snapshot", l.Node)
	}
	return &from.Legs[i], ""
}

// oldForBack reports whether a leg's target is one that cannot have it go back to a snapshot.
func (s *State) oldForBack(l *Leg) bool {
	return s.servable(l) && (!s.takesSnapshots(l.Node) || l.Based && s.targets[l.Node].status.Level < plainRestoreLevel)
}

// goingBack reports whether a leg's label says that it is going back to a snapshot.
func (s *State) goingBack(l *Leg) bool {
	d, _ := s.driveReport(l)
	return slices.ContainsFunc(d.Legs, func(label evidence.LegLabel) bool { return label.Leg == l.ID && label.GoingBack })
}

// restore begins the way back.
func (t *tx) restore(v, from *Volume) {
	t.endHealing(v, "it goes back to a snapshot")
	for i := range v.Legs {
		l := &v.Legs[i]
		switch x, _ := t.s.goesBack(l, from); {
		case x != nil:
			l.Origin = x.ID
			continue
		case l.State == LegInSync:
			t.evict(v, l.ID, fmt.Sprintf("it cannot go back to %s", from.Name))
		case l.member():
			l.Revision++
		default:
			continue
		}
		l.copyAll()
	}
	if _, says := v.Labels[block.ImportLabel]; says {
		v.Labels = maps.Clone(v.Labels)
		delete(v.Labels, block.ImportLabel)
	}
	v.Generation++
	v.Failed = ""
	v.Restoring = &Restoring{To: from.ID, Name: from.Name, Formatted: from.Formatted, Listed: v.Generation, Since: t.now.UTC()}
	t.volumeEvent(v, event.Warning, event.VolumeRestoring, fmt.Sprintf("to %s, taken at %s: what was written since will be gone", from.Name, from.Snapshot.Taken.Format(time.RFC3339)))
}

// settleRestoring takes the next step of a volume's way back.
func (t *tx) settleRestoring(id block.VolumeID) {
	v := t.peek(id)
	if v.State != VolumeReady || v.Restoring == nil {
		return
	}
	if v.undecided() { // its targets are told nothing until an operator has chosen a copy of each column
		return
	}
	t.findOrigins(v)
	since := v.Restoring.Since
	if t.s.began.After(since) { // its targets may not have reported to this manager yet
		since = t.s.began
	}
	if t.now.Sub(since) > restoreAwait {
		t.leaveBehind(id)
	}
	v = t.peek(id)
	waits := t.s.restoringWaits(v)
	switch x := *v.Restoring; {
	case len(waits) == 0 && x.Switching:
		t.wentBack(t.volume(id))
	case len(waits) == 0:
		v = t.volume(id)
		v.Generation++
		for i := range v.Legs {
			if l := &v.Legs[i]; l.State == LegInSync {
				l.Revision++
			}
		}
		x.Switching, x.Since = true, t.now.UTC()
		v.Clean = true // what an earlier host may have left unequal does not count any more
		v.Restoring = &x
	case !x.Switching && !x.Again && t.now.Sub(since) > restoreListFor:
		v = t.volume(id)
		v.endRestoring()
		v.Failed = fmt.Sprintf("it did not go back to %s, and is unchanged: it took too long to reach its targets: %s", x.Name, waits[0])
		t.volumeEvent(v, event.Warning, event.RestoreFailed, v.Failed)
	}
}

// findOrigins finds what legs are made again of, if the store was lost on the way.
func (t *tx) findOrigins(v *Volume) {
	from := t.peek(v.Restoring.To)
	if !v.Restoring.Again || v.Restoring.Switching || from == nil || !from.usable() {
		return
	}
	for i := range v.Legs {
		l := &v.Legs[i]
		if x, _ := t.s.goesBack(l, from); x != nil && l.Origin.IsZero() {
			v = t.volume(v.ID)
			v.leg(l.ID).Origin = x.ID
		}
	}
}

// wentBack ends the way back of a volume that has arrived.
func (t *tx) wentBack(v *Volume) {
	x := v.Restoring
	v.Formatted = x.Formatted
	for i := range v.Legs {
		if l := &v.Legs[i]; l.State == LegInSync { // what it lost before, it has anew
			l.Suspect = false
		}
	}
	v.endRestoring()
	t.volumeEvent(v, event.Info, event.VolumeWentBack, fmt.Sprintf("it holds what %s does", x.Name))
}

func (v *Volume) endRestoring() {
	v.Restoring = nil
	v.Generation++
	for i := range v.Legs {
		if l := &v.Legs[i]; l.State == LegInSync {
			l.Origin = block.LegID{}
		}
	}
}

// leaveBehind makes legs stale that do not get on and that their columns can do without.
func (t *tx) leaveBehind(id block.VolumeID) {
	for _, l := range t.peek(id).Legs {
		v := t.peek(id)
		if l.State != LegInSync || t.s.restoringWaitsFor(v, &l) == "" {
			continue
		}
		others := slices.ContainsFunc(v.column(l.Column), func(o *Leg) bool {
			return o.ID != l.ID && t.s.isSound(v, o) && t.s.restoringWaitsFor(v, o) == ""
		})
		if others {
			v = t.volume(id)
			t.evict(v, l.ID, fmt.Sprintf("it did not go back to %s", v.Restoring.Name))
			v.leg(l.ID).copyAll()
		}
	}
}

// restoringWaits lists the legs that the present step of a volume's way back waits for.
func (s *State) restoringWaits(v *Volume) (waits []string) {
	for i := range v.Legs {
		if l := &v.Legs[i]; l.State == LegInSync {
			if why := s.restoringWaitsFor(v, l); why != "" {
				waits = append(waits, fmt.Sprintf("%v: %s", l, why))
			}
		}
	}
	return waits
}

// restoringWaitsFor says why one leg is not through with the present step; empty if it is.
func (s *State) restoringWaitsFor(v *Volume, l *Leg) string {
	x := v.Restoring
	d, _ := s.driveReport(l)
	done := slices.ContainsFunc(d.Legs, func(label evidence.LegLabel) bool {
		if x.Switching {
			return label.Leg == l.ID && label.Revision >= l.Revision && label.Zeroed && !label.GoingBack
		}
		return label.Leg == l.ID && label.Volume.Generation >= x.Listed
	})
	switch {
	case l.Origin.IsZero():
		return s.noOriginOf(v, l)
	case done && !x.Switching && s.targets[l.Node].exported.Has(l.ID): // what a host has sent there may still be written
		return fmt.Sprintf("target %s to remove its export", l.Node)
	case done && !x.Switching && !s.admitted(v, l): // or a host that lost the volume could still write there
		return fmt.Sprintf("target %s to fence epochs below %d", l.Node, v.Epoch)
	case done:
		return ""
	}
	return cmp.Or(s.upgradeForBack(v, l), s.legWaitsFor(l), fmt.Sprintf("target %s has not done it yet", l.Node))
}

// upgradeForBack says that a leg which is told to go back has a target that cannot; empty if it can.
func (s *State) upgradeForBack(v *Volume, l *Leg) string {
	if v.Restoring.Switching && s.oldForBack(l) {
		return fmt.Sprintf("target %s to be upgraded: its version cannot have legs go back to a snapshot", l.Node)
	}
	return ""
}

// noOriginOf says why it is not known of what a leg is to be made again.
func (s *State) noOriginOf(v *Volume, l *Leg) (why string) {
	if from := s.volumes.Get(v.Restoring.To); from != nil {
		_, why = s.goesBack(l, from)
	}
	return cmp.Or(why, fmt.Sprintf("nothing of %s was found in its tree", v.Restoring.Name))
}

// restoreAgain has a volume go back again to the snapshot that its labels name, if they say that it was
// going back when the store was lost: its legs may differ. from is the snapshot. If that was not found,
// nil, nobody knows what the legs hold, and none is trusted.
func (v *Volume) restoreAgain(to block.VolumeID, from *Volume, now time.Time) {
	for i := range v.Legs {
		if v.Legs[i].State != LegCreating {
			v.Legs[i].Origin = block.LegID{}
		}
	}
	v.Restoring = nil
	if to.IsZero() || v.IsSnapshot() || v.State != VolumeReady {
		return
	}
	for i := range v.Legs {
		l := &v.Legs[i]
		if from == nil && l.State == LegInSync {
			l.State, l.StaleSince, l.Suspect = LegStale, now.UTC(), false
			l.Reason = fmt.Sprintf("it may hold what it held before the volume went back to snapshot %v, or what that held, which is not known any more", to)
		}
		if l.member() && l.State != LegInSync {
			l.copyAll()
		}
	}
	if from == nil { // an operator has to choose
		v.Clean = false
		return
	}
	v.Restoring, v.Clean = &Restoring{To: to, Name: from.Name, Formatted: from.Formatted, Listed: v.Generation, Again: true, Since: now.UTC()}, true
}

func (s *State) explainRestoring(e *Explanation, v *Volume) {
	x := v.Restoring
	if v.undecided() {
		e.Waits = append(e.Waits, "an operator to choose a copy of each column that has none in sync")
	}
	if from := s.volumes.Get(x.To); from != nil && from.undecided() {
		e.Waits = append(e.Waits, fmt.Sprintf("an operator to choose a copy of each column of %s that has none in sync", x.Name))
		e.Actions = append(e.Actions, fmt.Sprintf("see what is known of each copy of %s, and choose: `weft explain snapshot %s`", x.Name, x.Name))
	}
	e.Summary = fmt.Sprintf("%s is going back to %s; no host can have it until that is over", v.object(), x.Name)
	e.Waits = append(e.Waits, s.restoringWaits(v)...)
	if x.Again {
		e.Facts = append(e.Facts, "the manager's store was lost while it went back, so it goes back again: some of its legs may hold what it held before")
	}
	for i := range v.Legs {
		if l := &v.Legs[i]; l.State == LegInSync && !s.targetOnline(l.Node) {
			e.Actions = append(e.Actions, s.bringBack(l.Node))
		}
	}
}

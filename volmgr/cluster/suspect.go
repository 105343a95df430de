// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"weft.dev/weft/proto/block"
)

// A leg in sync is suspect from the boot of its target, on a drive with a
// volatile cache, until it is known what that boot has cost. Only a twin can
// tell, and it may not have reported yet: volmgr and the target may have lost
// power together, and the twin with them. The suspicion is durable, so another
// restart of volmgr does not forget it.
//
// While it lasts nothing is served from the leg: it is not exported, does not
// count as the leg that a column must keep, and is not named in sync on labels.
// It ends when
//
//   - a twin that is not suspect can be served, and its target has answered since:
//     the leg is evicted and copied whole. A twin on a drive that is dead, or whose
//     target may have lost its power too, takes no good copy with it;
//   - no twin is left that is not suspect, because all of them lost their caches
//     too, or are confirmed dead, or were promoted away: then no copy is better.
//     What had been flushed is on all of them. If a host has the volume, one of
//     them is kept and the others evicted, since they may differ and the host
//     would read now from one and now from another; if none has, all are kept,
//     since they are made equal before the next one does;
//   - an operator promotes it, and so gives the others up.

// rebootLoss and driveLoss are why what a leg holds is not known.
const (
	rebootLoss = "its target rebooted and may have lost cached writes"
	driveLoss  = "its drive was away or failed a flush and may have lost cached writes"
)

func (l *Leg) loss() string { return cmp.Or(l.Loss, rebootLoss) }

// suspectLeg notes that what a leg holds is not known until settleSuspects is.
func (t *tx) suspectLeg(v *Volume, id block.LegID) {
	l := v.leg(id)
	l.Suspect, l.SuspectAt = true, t.gen
	v.Generation++
	t.volumeEvent(v, Warning, EventLegSuspect, fmt.Sprintf("%v: %s; no other copy has reported since", l, l.loss()),
		"leg", id.String(), "node", string(l.Node), "epoch", fmt.Sprint(v.Epoch))
}

// trusted reports whether a leg is known to hold every acknowledged write.
func (l *Leg) trusted() bool { return l.State == LegInSync && !l.Suspect }

// trusted counts the trusted legs of each column.
func (v *Volume) trusted() []int {
	n := make([]int, v.Layout.Stripes)
	for i := range v.Legs {
		if l := &v.Legs[i]; l.trusted() {
			n[l.Column]++
		}
	}
	return n
}

func (v *Volume) suspects() bool {
	return slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.Suspect })
}

// twins lists the other legs in sync of a leg's column.
func (v *Volume) twins(l *Leg) (legs []*Leg) {
	for _, o := range v.column(l.Column) {
		if o.ID != l.ID && o.State == LegInSync {
			legs = append(legs, o)
		}
	}
	return legs
}

// settleSuspects judges the suspect legs of a volume whose twins allow it.
func (t *tx) settleSuspects(id block.VolumeID) {
	for _, l := range slices.Clone(t.peek(id).Legs) {
		if now := t.peek(id).leg(l.ID); now.Suspect {
			t.settleSuspect(id, now)
		}
	}
}

func (t *tx) settleSuspect(id block.VolumeID, l *Leg) {
	var dead []block.LegID
	for _, o := range t.peek(id).twins(l) {
		switch {
		case o.Suspect:
		case t.s.standsIn(o, l):
			t.evict(t.volume(id), l.ID, l.loss())
			return
		case t.confirmedDead(o.Node):
			dead = append(dead, o.ID)
		default:
			return // it may come back, with writes that l has lost
		}
	}
	for _, o := range dead {
		t.evict(t.volume(id), o, "its node is confirmed dead")
	}
	t.believe(id, l.Column)
}

// standsIn reports whether a twin that is not suspect can take the place of a leg that is.
func (s *State) standsIn(o, l *Leg) bool {
	if s.guards.deadStandsIn {
		return s.targetOnline(o.Node)
	}
	return s.servable(o) && s.answeredSince(o.Node, l)
}

// answeredSince reports whether a target has acted on a wanted state that was made
// after a leg became suspect: had it booted too, its report would have said so.
func (s *State) answeredSince(node block.NodeName, l *Leg) bool {
	return s.targets[node].status.Generation >= l.SuspectAt || s.guards.oldWordCounts
}

// believe ends the suspicion in a column whose legs in sync are all suspect. A host
// that has the volume goes on with one of them, which therefore must be one that
// can be served.
func (t *tx) believe(id block.VolumeID, column int) {
	v := t.volume(id)
	kept := v.leg(t.s.bestSuspect(v, column))
	if v.open() && !t.s.servable(kept) {
		return
	}
	for _, l := range v.twins(kept) {
		if v.open() {
			t.evict(v, l.ID, l.loss()+", like all copies")
			continue
		}
		l.Suspect = false
	}
	kept.Suspect = false
	v.Generation++
	t.volumeEvent(v, Warning, EventLegBelieved, fmt.Sprintf("%v: %s, and no copy is better", kept, kept.loss()),
		"leg", kept.ID.String(), "node", string(kept.Node), "epoch", fmt.Sprint(v.Epoch))
	t.lostCache(v, kept)
}

// bestSuspect is the suspect leg of a column that can best be reached.
func (s *State) bestSuspect(v *Volume, column int) (best block.LegID) {
	rank := -1
	for _, l := range v.column(column) {
		if !l.Suspect {
			continue
		}
		n := 0
		switch {
		case s.servable(l):
			n = 2
		case s.targetOnline(l.Node):
			n = 1
		}
		if n > rank {
			best, rank = l.ID, n
		}
	}
	return best
}

// suspectWaitsFor says who can tell what a suspect leg is worth.
func (s *State) suspectWaitsFor(v *Volume, l *Leg) string {
	var who []string
	for _, o := range v.twins(l) {
		switch {
		case o.Suspect:
		case !s.targetOnline(o.Node):
			who = append(who, fmt.Sprintf("target %s, which is offline, to report", o.Node))
		case !s.servable(o):
			who = append(who, fmt.Sprintf("%v, which is %s", o, s.legFact(o)))
		default:
			who = append(who, fmt.Sprintf("target %s to report", o.Node))
		}
	}
	if who == nil {
		return fmt.Sprintf("a copy of column %d that can be served", l.Column)
	}
	return fmt.Sprintf("%s: it may have writes that %v has lost", strings.Join(who, " or "), l)
}

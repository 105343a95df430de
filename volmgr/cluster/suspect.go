// SPDX-License-Identifier: Apache-2.0

package cluster

import (
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
//   - a twin that is not suspect is online: the leg is evicted and copied whole;
//   - no twin is left that is not suspect, because all of them lost their caches
//     too, or are confirmed dead, or were promoted away: then no copy is better.
//     What had been flushed is on all of them. If a host has the volume, one of
//     them is kept and the others evicted, since they may differ and the host
//     would read now from one and now from another; if none has, all are kept,
//     since they are made equal before the next one does.

const rebootLoss = "its target rebooted and may have lost cached writes"

// suspectLeg notes that what a leg holds is not known until settleSuspects is.
func (t *tx) suspectLeg(v *Volume, id block.LegID) {
	l := v.leg(id)
	l.Suspect = true
	v.Generation++
	t.volumeEvent(v, Warning, EventLegSuspect, fmt.Sprintf("%v: %s; no other copy has reported yet", l, rebootLoss),
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
	for i := range v.Legs {
		if o := &v.Legs[i]; o.ID != l.ID && o.Column == l.Column && o.State == LegInSync {
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
		case t.s.targetOnline(o.Node):
			t.evict(t.volume(id), l.ID, rebootLoss)
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

// believe ends the suspicion in a column whose legs in sync are all suspect.
func (t *tx) believe(id block.VolumeID, column int) {
	v := t.volume(id)
	kept := v.leg(t.s.bestSuspect(v, column))
	for _, l := range v.twins(kept) {
		if v.open() {
			t.evict(v, l.ID, rebootLoss+", like all copies")
			continue
		}
		l.Suspect = false
	}
	kept.Suspect = false
	v.Generation++
	t.volumeEvent(v, Warning, EventLegBelieved, fmt.Sprintf("%v: %s, and no copy is better", kept, rebootLoss),
		"leg", kept.ID.String(), "node", string(kept.Node), "epoch", fmt.Sprint(v.Epoch))
}

// bestSuspect is the suspect leg of a column that can best be reached.
func (s *State) bestSuspect(v *Volume, column int) (best block.LegID) {
	rank := -1
	for i := range v.Legs {
		l := &v.Legs[i]
		if l.Column != column || !l.Suspect {
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
	var targets []string
	for _, o := range v.twins(l) {
		if !o.Suspect {
			targets = append(targets, string(o.Node))
		}
	}
	return fmt.Sprintf("target %s, which is offline, to report: it may have writes that %v has lost", strings.Join(targets, " or "), l)
}

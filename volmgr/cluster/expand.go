// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"slices"
	"strings"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/evidence"
	"weft.dev/weft/volmgr/image"
)

// A volume can grow while it is in use. Its legs grow on their own drives, all of them or
// none, in this order. Each step is durable before the next one:
//
//	ExpandVolume       the record: more extents for every leg, Volume.ExpandingTo
//	targets            those extents on the label; then zeroes in them; then the label
//	                   says so; then the leg and its export grow
//	targets' reports   LegReport.Size, and a label that has the expansion
//	settleExpanding    the record: Volume.Size
//	hosts              a larger device
//
// So the new part of a volume reads as zeroes on each copy when the first host sees it. The
// expansion does not wait for stale legs: those have to grow before they are rebuilt.
//
// Whichever labels a crash leaves, a store that is rebuilt from them knows every size that
// a host was told: see package evidence.

// ExpandVolume makes a volume larger, in use or not. It is complete when the volume's Size
// has changed. Result: Volume.
type ExpandVolume struct {
	Volume string
	Size   block.Size
}

func (in ExpandVolume) apply(t *tx) (view, error) {
	if err := checkSize(in.Size); err != nil {
		return nil, err
	}
	v, err := t.s.find(in.Volume)
	if err != nil {
		return nil, err
	}
	if v.unwritten() {
		return nil, v.neverChanges()
	}
	if !v.usable() {
		return nil, refused(ReasonNotReady, v.object(), "%s", v.unready()).
			hint("`weft explain volume %s` says what it waits for", v.Name)
	}
	if c := v.unreadable(v.inSync()); c >= 0 {
		return nil, refused(ReasonNoInSyncLeg, v.object(), "column %d has no in-sync copy of known size", c).
			hint("`weft explain volume %s` says how to choose one", v.Name)
	}
	switch planned := max(v.Size, v.ExpandingTo); {
	case in.Size == v.Size || in.Size == planned:
		return volumeResult(v.ID), nil
	case in.Size < planned && v.ExpandingTo != 0:
		return nil, invalid("size_bytes", "%v is below %v, to which volume %s is being expanded; it cannot be made smaller", in.Size, planned, v.Name)
	case in.Size < planned:
		return nil, invalid("size_bytes", "%v is below %v, the size of volume %s; it cannot be made smaller", in.Size, planned, v.Name)
	}
	extents, err := t.s.mayGrow(v, in.Size)
	if err != nil {
		return nil, err
	}
	v = t.volume(v.ID)
	t.endHealing(v, "it is expanded")
	for i := range v.Legs {
		l := &v.Legs[i]
		if more := image.Beyond(extents[i], l.Extents); len(more) > 0 {
			t.carved[l.Drive] = append(t.carved[l.Drive], more)
		}
		l.Extents = extents[i]
	}
	v.ExpandingTo = in.Size
	v.Generation++ // so that each label shows whether it has the expansion
	t.volumeEvent(v, event.Info, event.VolumeExpanding, fmt.Sprintf("from %v to %v", v.Size, in.Size),
		"size_bytes", fmt.Sprint(uint64(in.Size)))
	return volumeResult(v.ID), nil
}

// mayGrow finds the extents of every leg for a larger size. It refuses if a drive or its
// label has no room, or if a target's version cannot grow legs.
func (s *State) mayGrow(v *Volume, size block.Size) ([][]image.Extent, error) {
	if v.stock() && !wholeLeg(v.Layout, size) {
		return nil, v.notWhole(size, string(v.Attachment.Node))
	}
	if err := s.thinGrowth(v, size); err != nil {
		return nil, err
	}
	extents, err := s.growth(v, size)
	if err != nil {
		return nil, err
	}
	next := v.clone()
	for i := range next.Legs {
		next.Legs[i].Extents = extents[i]
	}
	if d := s.lacksRoom(v, next); d != nil {
		return nil, s.labelFull(v, d, "size_bytes")
	}
	for i := range v.Legs {
		if l := &v.Legs[i]; s.oldTarget(l) {
			return nil, refused(ReasonOldTarget, v.object(), "%v: its target's version cannot grow legs", l).
				hint("upgrade `weft target` on %s", l.Node).with("node", string(l.Node))
		}
	}
	return extents, nil
}

// usable reports whether a volume can be used and changed.
func (v *Volume) usable() bool { return v.State == VolumeReady && !v.Restored && v.Restoring == nil }

// unready says why a volume is not usable.
func (v *Volume) unready() string {
	if x := v.Restoring; x != nil && !v.Restored {
		return fmt.Sprintf("going back to %s", x.Name)
	}
	if v.Restored {
		return "restored from a backup and not yet compared with the labels on the drives"
	}
	if v.State == VolumeDeleting {
		return "being deleted"
	}
	return "still being created"
}

// planned is the size for which a volume's legs have extents.
func (v *Volume) planned() block.Size { return max(v.Size, v.ExpandingTo) }

// growth finds the extents of every leg for a larger size. The error says which drives have
// too little space.
func (s *State) growth(v *Volume, size block.Size) ([][]image.Extent, error) {
	need := uint32(v.Layout.LegExtents(size))
	wanted := map[block.DriveID]uint32{} // more extents, for all legs there
	for _, l := range v.Legs {
		if !l.member() || l.mapped() {
			continue
		}
		wanted[l.Drive] += need - min(need, image.Count(l.Extents))
	}
	if s.short(wanted) {
		return nil, s.noRoom(v, size, wanted)
	}
	taken := map[block.DriveID][]image.Extent{}
	var grown [][]image.Extent
	for _, l := range v.Legs {
		d := s.drives[l.Drive]
		more := need - min(need, image.Count(l.Extents))
		if more == 0 || !l.member() || l.mapped() {
			grown = append(grown, l.Extents)
			continue
		}
		if taken[d.ID] == nil {
			taken[d.ID] = s.carved(d)
		}
		extents := image.Extend(l.Extents, taken[d.ID], d.Extents, more)
		taken[d.ID] = append(taken[d.ID], extents...)
		grown = append(grown, extents)
	}
	return grown, nil
}

func (s *State) short(wanted map[block.DriveID]uint32) bool {
	for id, n := range wanted {
		if n > s.free(id) {
			return true
		}
	}
	return false
}

// free is the number of a drive's extents that no leg occupies.
func (s *State) free(id block.DriveID) uint32 {
	d := s.drives[id]
	if d == nil {
		return 0
	}
	used := s.used.Get(id) + image.Count(d.spaceTaken()) + image.Count(s.strays(d))
	return d.Extents - min(used, d.Extents)
}

// noRoom refuses an expansion and lists, leg by leg, the free space of its drive.
func (s *State) noRoom(v *Volume, size block.Size, wanted map[block.DriveID]uint32) error {
	need := uint32(v.Layout.LegExtents(size))
	var legs []string
	for i := range v.Legs {
		l := &v.Legs[i]
		d := s.drives[l.Drive]
		if d == nil {
			legs = append(legs, fmt.Sprintf("%v: its drive %v is unknown", l, l.Drive))
			continue
		}
		bytes := func(extents uint32) string { return (block.Size(extents) * block.ExtentSize).Short() }
		free := s.free(d.ID)
		text := fmt.Sprintf("%v: drive %s has %s free", l, d.Device, bytes(free))
		if n := need - min(need, image.Count(l.Extents)); wanted[d.ID] > n {
			text += fmt.Sprintf(" for %s of this volume's legs there", bytes(wanted[d.ID]))
		}
		if wanted[d.ID] > free {
			text += fmt.Sprintf(", %s short", bytes(wanted[d.ID]-free))
		}
		legs = append(legs, text)
	}
	e := &Error{
		Kind: ResourceExhausted, Reason: ReasonNoSpace, Field: "size_bytes", Object: v.object(),
		Text: fmt.Sprintf("%s: no space because each of its %d legs would grow from %v to %v on its own drive%s",
			v.object(), len(v.Legs), v.Layout.LegSize(v.Size), v.Layout.LegSize(size), listed(legs)),
	}
	return e.hint("delete volumes that have legs on these drives: legs do not move to other drives")
}

// settleExpanding raises a volume's size once its legs have grown. Only then are hosts told.
func (t *tx) settleExpanding(id block.VolumeID) {
	v := t.peek(id)
	if v.State != VolumeReady || v.ExpandingTo == 0 {
		return
	}
	if len(t.s.expansionWaits(v)) > 0 {
		return
	}
	v = t.volume(id)
	old := v.Size
	v.Size, v.ExpandingTo = v.ExpandingTo, 0
	v.Generation++
	t.volumeEvent(v, event.Info, event.VolumeExpanded, fmt.Sprintf("from %v to %v", old, v.Size), "size_bytes", fmt.Sprint(uint64(v.Size)))
}

// expansionWaits names each exported leg that has not grown, and why.
func (s *State) expansionWaits(v *Volume) (waits []string) {
	for i := range v.Legs {
		l := &v.Legs[i]
		if why := s.growthWaitsFor(v, l); l.exported() && why != "" {
			waits = append(waits, fmt.Sprintf("%v to grow to %v: %s", l, v.Layout.LegSize(v.ExpandingTo), why))
		}
	}
	return waits
}

// growthWaitsFor says why a leg does not count as grown; empty if it does.
func (s *State) growthWaitsFor(v *Volume, l *Leg) string {
	on, d := s.targets[l.Node], s.drives[l.Drive]
	switch {
	case s.grown(v, l):
		return ""
	case on == nil || !on.status.Online:
		return fmt.Sprintf("target %s is offline", l.Node)
	case d != nil && d.State != DriveReady:
		return fmt.Sprintf("drive %s on %s is %s%s", d.Device, d.Node, strings.ToLower(string(d.State)), because(d.Reason))
	}
	if p, ok := on.problem("leg " + l.ID.String()); ok {
		return fmt.Sprintf("target %s: %s: %s", l.Node, p.Doing, p.Cause)
	}
	switch r, known := on.legs.Find(l.ID); {
	case r.Error != "":
		return fmt.Sprintf("target %s: %s", l.Node, r.Error)
	case s.oldTarget(l):
		return fmt.Sprintf("the version of target %s cannot grow legs", l.Node)
	case known && r.Zeroed > 0 && r.Size < v.Layout.LegSize(v.planned()):
		return fmt.Sprintf("target %s has zeroed %s", l.Node, r.Zeroed.Short())
	}
	return fmt.Sprintf("target %s has not grown it yet", l.Node)
}

// grown reports whether a leg has the planned size, and its label says so.
func (s *State) grown(v *Volume, l *Leg) bool {
	on := s.targets[l.Node]
	if on == nil {
		return false
	}
	r, known := on.legs.Find(l.ID)
	return known && r.Error == "" && r.Ready && r.Size >= v.Layout.LegSize(v.planned()) && s.labelKnows(v, l)
}

// labelKnows reports whether a leg's label has the volume's newest in-sync sets and
// expansion.
func (s *State) labelKnows(v *Volume, l *Leg) bool { return s.labelHas(l, v.Generation) }

// labelHas reports whether a leg's label has a generation of its volume.
func (s *State) labelHas(l *Leg, generation uint64) bool {
	d, _ := s.driveReport(l)
	return slices.ContainsFunc(d.Legs, func(label evidence.LegLabel) bool {
		return label.Leg == l.ID && label.Volume.Generation >= generation
	})
}

// oldTarget reports whether a leg's target does not report the sizes of legs. Such a version
// treats a leg with more extents than it has carved as an error.
func (s *State) oldTarget(l *Leg) bool {
	on := s.targets[l.Node]
	return on != nil && on.legs.Get(l.ID).Ready && on.legs.Get(l.ID).Size == 0
}

// largeEnough reports whether a leg is large enough for its volume.
func (s *State) largeEnough(v *Volume, l *Leg) bool {
	on := s.targets[l.Node]
	if on == nil {
		return false
	}
	r := on.legs.Get(l.ID)
	return s.oldTarget(l) || r.Size >= v.Layout.LegSize(v.Size)
}

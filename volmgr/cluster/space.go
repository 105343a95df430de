// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"iter"
	"slices"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/evidence"
	"weft.dev/weft/volmgr/image"
)

// The legs of a thin volume are mapped: each is in a tree on its drive, which takes extents as they
// are needed. Which extents of a drive trees may have is granted here; which tree gets one is the
// target's business, so that writers go on while no manager answers:
//
//	free ──grant──► Drive.Space: reserve ⇄ trees ──return──► Drive.Returning ──gone from the label──► free
//
// An extent is granted, and the record durable, before its target hears of it; and it is free only
// when its target has acted on the return and its label lists it no more. What a label lists and no
// record has, as after a restore of an older backup, is taken for granted.

// DefaultOvercommit is how many times its size a drive may promise to volumes, thin and others, and
// MaxOvercommit the most that can be asked for.
const (
	DefaultOvercommit = 10
	MaxOvercommit     = 1000
)

func (s *State) overcommit() float64 { return cmp.Or(s.policy.Overcommit, DefaultOvercommit) }

// thinLevel is the level from which on there are thin volumes.
const thinLevel block.Level = 3

// needsLevel refuses what begins with a later level than the cluster's.
func (t *tx) needsLevel(least block.Level, what string) error {
	if t.level >= least {
		return nil
	}
	return &Error{Kind: FailedPrecondition, Reason: ReasonOldParts, Text: fmt.Sprintf("%s: the cluster is at level %d, and this begins with level %d", what, t.level, least),
		Hint: "`weft upgrade status` says what is in the way of `weft upgrade finish`"}
}

// reserveFor is how many extents a drive with so many trees has for them besides what they hold: a
// hundredth of its own, at least one and if it is not small four.
func reserveFor(d *Drive) uint32 { return max(d.Extents/100, min(4, d.Extents/16), 1) }

// flatReserve is how many extents of reserve a drive has at least on which something is being flattened, or
// to which a leg of a snapshot is being copied: its target leaves the last one to hosts. A drive with less than smallDrive keeps what it has.
func (t *tx) flatReserve(d *Drive) uint32 {
	if d.Extents < smallDrive || reserveFor(d) > 1 {
		return 0
	}
	for id := range t.s.onNode.Get(d.Node).Keys() {
		v := t.peek(id)
		for i := 0; v != nil && i < len(v.Legs); i++ {
			l := &v.Legs[i]
			if flatten, wait := t.s.wantedFlat(v, l); l.Drive == d.ID && (flatten && !wait || l.Copying != nil) {
				return 2
			}
		}
	}
	return 0
}

// smallDrive is how many extents a drive has that can spare one for what is flattened there.
const smallDrive = 8

// legExtents is how many extents of its drive a leg has been promised.
func (v *Volume) legExtents(l *Leg) uint32 {
	switch {
	case !l.mapped():
		return image.Count(l.Extents)
	case v.IsSnapshot(): // it gets no more than it has
		return 0
	}
	return uint32(min(v.Layout.LegExtents(v.planned()), 1<<31))
}

// mapped reports whether the leg takes space only where it was written.
func (l *Leg) mapped() bool { return l.Kind == image.Mapped }

// tree is the tree of a mapped or based leg; zero for another leg.
func (l *Leg) tree() (id block.UUID) {
	switch {
	case !l.mapped() && !l.Based:
		return id
	case !l.Tree.IsZero():
		return l.Tree
	}
	return l.ID.UUID
}

// takesSpace reports whether a leg takes space from the reserve of its drive as it is written.
func (v *Volume) takesSpace(l *Leg) bool {
	return (l.mapped() || l.Based) && (!v.IsSnapshot() || l.Copying != nil)
}

// spaceTaken is the extents of a drive that are granted to trees, or are being taken back.
func (d *Drive) spaceTaken() []image.Extent { return slices.Concat(d.Space, d.Returning) }

// promise is a drive as the placement of thin legs sees it: with what it may promise, and what it has
// promised, or all if that is more. A drive without a single extent for another tree has nothing to promise.
// A leg that is made again may always be promised as much as by default: it was promised once, and
// redundancy is worth more than the operator's bound.
func (s *State) promise(d *Drive, again bool) (total, used uint32) {
	times := s.overcommit()
	if again {
		times = max(times, DefaultOvercommit)
	}
	total = uint32(min(float64(d.Extents)*times, 1<<31))
	used = s.promised.Get(d.ID)
	if s.free(d.ID) == 0 && s.reserve(d) == 0 {
		used = total
	}
	return total, min(used, total)
}

// reserve is how many extents granted to a drive's trees none of them has, by the newest report.
func (s *State) reserve(d *Drive) uint32 {
	r, seen := s.spaceReport(d)
	if !seen {
		return 0
	}
	return image.Count(d.Space) - min(image.Count(d.Space), image.Count(r.inTrees()))
}

// spaceReport is what a drive's target last said of it, if that can be trusted.
func (s *State) spaceReport(d *Drive) (DriveReport, bool) {
	on := s.targets[d.Node]
	if on == nil {
		return DriveReport{}, false
	}
	r, seen := on.drives[d.ID]
	return r, seen && r.Error == "" && (r.Cluster.IsZero() || r.Cluster == s.meta.ClusterID)
}

func (r *DriveReport) inTrees() (all []image.Extent) {
	for i := range r.Trees {
		all = append(all, r.Trees[i].Extents...)
	}
	return all
}

// wantedSpace is the space of the trees on a node's drives.
func (s *State) wantedSpace(node block.NodeName) (all []WantedSpace) {
	for _, d := range s.recordedDrives(node) {
		if len(d.Space) > 0 {
			all = append(all, WantedSpace{d.ID, d.Space})
		}
	}
	return all
}

// settleSpace settles the space of the drives that a report is about, and of those with legs of
// thin volumes that this step has changed.
func (t *tx) settleSpace() {
	for id := range t.volumes.upper {
		for _, v := range []*Volume{t.volumes.upper[id], t.s.volumes.Get(id)} {
			for i := 0; v != nil && i < len(v.Legs); i++ {
				if l := &v.Legs[i]; l.mapped() || l.Based || t.s.mappedOn.Get(l.Drive) > 0 {
					t.spaces[l.Drive] = true
				}
			}
		}
	}
	for _, id := range sorted(t.spaces) {
		if d := t.drives.peek(id); d != nil {
			t.settleDriveSpace(d)
		}
	}
}

// settleDriveSpace grants a drive's trees extents, takes back what they do not need, and frees what
// has come back.
func (t *tx) settleDriveSpace(d *Drive) {
	r, seen := t.s.spaceReport(d)
	if !seen || d.Extents == 0 {
		return
	}
	legs, trees := t.mappedLegs(d.ID), uint32(len(r.Trees))
	if legs == 0 && len(d.Space)+len(d.Returning)+len(r.Trees)+len(r.Reserve) == 0 {
		return // most drives have nothing of thin volumes
	}
	space, returning := t.adoptSpace(d, &r)
	want := uint32(0)
	if legs > 0 {
		want = max(reserveFor(d)+legs-min(legs, trees), t.flatReserve(d))
	}
	spare := image.Count(space) - min(image.Count(space), image.Count(r.inTrees()))
	switch {
	case spare < want && spare <= want/2:
		taken := slices.Concat(t.legExtents(d.ID), t.s.strays(d), space, returning)
		space = image.Union(space, image.First(image.Holes(taken, d.Extents), want-spare, false))
	case spare > 2*want:
		back := image.First(image.Minus(space, r.inTrees()), spare-want, true)
		space, returning = image.Minus(space, back), image.Union(returning, back)
	}
	if slices.Equal(space, d.Space) && slices.Equal(returning, d.Returning) {
		return
	}
	if len(image.Minus(returning, d.Returning)) > 0 {
		t.drives.edit(d.ID).ReturnedAt = t.gen
	}
	d = t.drives.edit(d.ID)
	d.Space, d.Returning = space, returning
}

// adoptSpace returns the drive's space as its label has it: what a tree holds is granted, whatever
// the record says, unless another leg has it by its record or on the label; and what has come back is
// free. A store that was restored may grant what it gave to a leg later.
func (t *tx) adoptSpace(d *Drive, r *DriveReport) (space, returning []image.Extent) {
	legs := t.legExtents(d.ID)
	for i := range r.Legs {
		legs = append(legs, r.Legs[i].Extents...)
	}
	space, returning = image.Minus(d.Space, legs), image.Minus(d.Returning, legs)
	onLabel := slices.Concat(r.inTrees(), r.Reserve)
	if more := image.Minus(image.Minus(r.inTrees(), space), legs); len(more) > 0 {
		space, returning = image.Union(space, more), image.Minus(returning, more)
	}
	if more := image.Minus(image.Minus(image.Minus(r.Reserve, space), returning), legs); len(more) > 0 {
		space = image.Union(space, more)
	}
	if on := t.s.targets[d.Node]; len(returning) > 0 && on.status.Generation >= d.ReturnedAt {
		returning = image.Minus(returning, image.Minus(returning, onLabel))
	}
	return space, returning
}

// mappedLegs counts the mapped legs of a drive after this step.
func (t *tx) mappedLegs(id block.DriveID) uint32 {
	n := int(t.s.mappedOn.Get(id))
	for volume := range t.volumes.upper {
		n += mappedOn(t.volumes.upper[volume], id) - mappedOn(t.s.volumes.Get(volume), id)
	}
	return uint32(max(n, 0))
}

func mappedOn(v *Volume, id block.DriveID) (n int) {
	for i := 0; v != nil && i < len(v.Legs); i++ {
		if l := &v.Legs[i]; v.takesSpace(l) && l.Drive == id {
			n++
		}
	}
	return n
}

// legExtents is the extents that legs of a drive have after this step.
func (t *tx) legExtents(id block.DriveID) []image.Extent {
	var was, is []image.Extent
	for volume, v := range t.volumes.upper {
		was = append(was, t.s.volumes.Get(volume).extentsOn(id)...)
		is = append(is, v.extentsOn(id)...)
	}
	return slices.Concat(image.Minus(t.s.extents[id], was), is)
}

// extentsOn is the extents of a volume's legs on a drive; none of a volume that is not there.
func (v *Volume) extentsOn(id block.DriveID) (all []image.Extent) {
	for i := 0; v != nil && i < len(v.Legs); i++ {
		if v.Legs[i].Drive == id {
			all = append(all, v.Legs[i].Extents...)
		}
	}
	return all
}

// mappable refuses a size of a thin volume whose legs no tree can hold.
func mappable(l block.Layout, size block.Size) error {
	if l.LegSize(size) > block.MaxMapped {
		return invalid("size_bytes", "%v: a leg would have %v, and one of a thin volume can have %v at most", size, l.LegSize(size), block.MaxMapped).
			hint("more --stripes make the legs smaller")
	}
	return nil
}

// thinGrowth refuses to promise legs of a thin volume more than their drives may promise.
func (s *State) thinGrowth(v *Volume, size block.Size) error {
	if !v.Thin {
		return nil
	}
	if err := mappable(v.Layout, size); err != nil {
		return err
	}
	next := *v
	next.ExpandingTo = size
	more := map[block.DriveID]uint64{}
	for i := range v.Legs {
		if l := &v.Legs[i]; l.member() {
			more[l.Drive] += uint64(next.legExtents(l) - v.legExtents(l))
		}
	}
	return s.mayPromiseMore(v, more)
}

// mayPromiseMore refuses to promise a thin volume so many more extents of each drive.
func (s *State) mayPromiseMore(v *Volume, more map[block.DriveID]uint64) error {
	for _, id := range sorted(more) {
		d := s.drives[id]
		if d == nil {
			continue
		}
		if total, used := s.promise(d, false); uint64(used)+more[id] > uint64(total) {
			return (&Error{
				Kind: ResourceExhausted, Reason: ReasonNoSpace, Field: "size_bytes", Object: v.object(),
				Text: fmt.Sprintf("%s: %s has promised %s of the %s that it may promise, %v times its size", v.object(), d.object(),
					(block.Size(s.promised.Get(d.ID)) * block.ExtentSize).Short(), (block.Size(total) * block.ExtentSize).Short(), s.overcommit()),
			}).hint("add drives, delete volumes with legs there, or let drives promise more: `weft volmgr --overcommit`")
		}
	}
	return nil
}

// spaceReported takes what a report says of space.
func (t *tx) spaceReported(r *TargetReport) {
	for i := range r.Drives {
		t.spaces[r.Drives[i].Drive] = true
	}
	// What is coming back is free once the target has acted on that, which a report may say that has no
	// lists.
	for _, d := range t.s.recordedDrives(r.Node) {
		if len(d.Returning) > 0 {
			t.spaces[d.ID] = true
		}
	}
	for _, l := range r.Legs {
		// One that is not ready says nothing: its target has just begun, and does not know.
		if was := t.s.fullLegs[l.Leg]; was != l.Full && (l.Full || l.Ready) {
			t.noteSpace(r.Node, l)
		}
	}
}

// noteSpace writes an event when the writes of a thin volume begin to wait for space, and when they
// go on.
func (t *tx) noteSpace(node block.NodeName, now LegReport) {
	if delete(t.s.fullLegs, now.Leg); now.Full {
		t.s.fullLegs[now.Leg] = true
	}
	for id := range t.s.onNode.Get(node).Keys() {
		v := t.peek(id)
		if v == nil {
			continue
		}
		l := v.leg(now.Leg)
		if l == nil {
			continue
		}
		if d := t.drives.peek(l.Drive); now.Full && d != nil {
			t.volumeEvent(v, event.Trouble, event.VolumeFull, fmt.Sprintf("%v: %s: %s is full", l, l.whatWaits(), d.object()), "node", string(node), "leg", l.ID.String())
		} else {
			t.volumeEvent(v, event.Info, event.VolumeRoom, fmt.Sprintf("%v has space again", l), "node", string(node), "leg", l.ID.String())
		}
		return
	}
}

// whatWaits says what waits while a leg has no space.
func (l *Leg) whatWaits() string {
	if l.State == LegInSync {
		return "writes to places that were never written wait"
	}
	return "what is copied to it waits, and users do not"
}

// explainSpace adds what a thin volume takes, and what its writes wait for.
func (s *State) explainSpace(e *Explanation, v *Volume) {
	var used block.Size
	for i := range v.Legs {
		l := &v.Legs[i]
		on, d := s.targets[l.Node], s.drives[l.Drive]
		if on == nil || d == nil || !l.mapped() && !l.Based {
			continue
		}
		r := on.legs.Get(l.ID)
		used += r.Used
		if !r.Full {
			if seen := s.driveView(d); d.Full > 0 {
				e.Facts = append(e.Facts, fmt.Sprintf("%s, with %v, is nearly full: %s of %s are left; when none is, writes to places that were never written wait",
					d.object(), l, (seen.Capacity-min(seen.Capacity, seen.Allocated)).Short(), seen.Capacity.Short()))
			}
			continue
		}
		e.Waits = append(e.Waits, fmt.Sprintf("space for %v: %s, and nothing is lost; %s is full", l, l.whatWaits(), d.object()))
		if s.snapshots.Get(v.ID) > 0 {
			e.Actions = append(e.Actions, fmt.Sprintf("delete snapshots: `weft snapshot list %s` shows what each of them frees", v.Name))
		}
		e.Actions = append(e.Actions,
			fmt.Sprintf("make room on %s: delete volumes that have legs there, or discard what is not needed any more, as with `fstrim`", d.object()),
			fmt.Sprintf("move the leg: `weft leg move %s %d.%d`", v.Name, l.Column, l.Copy))
	}
	if !v.Thin {
		return
	}
	if v.IsSnapshot() {
		e.Facts = append(e.Facts, fmt.Sprintf("its legs hold %s that no earlier snapshot has", used.Short()))
		return
	}
	e.Facts = append(e.Facts, fmt.Sprintf("it is thin: its legs take %s of the %s that they may", used.Short(), (v.Layout.LegSize(v.Size)*block.Size(len(v.Legs))).Short()))
}

// ---- volumes that are not thin ----

// A leg of a volume that is not thin is plain: its bytes are in its extents, one after another. With the
// first snapshot it gets a tree, whose base these extents are, and loses it when nothing else is in the
// tree any more:
//
//	plain ──the first attempt to take a snapshot──► Based ──its label says so──► a leg of the snapshot
//	      ◄──its label names no tree── Returning ◄──no other leg in the tree── Based
//
// The leg is in use all the time, and holds the same at each step; the target does the rest
// (target/userspace/based.go). While others are in the tree, the target keeps a leg that is being deleted:
// they need what is in its extents.

// plainSnapshotLevel is the level from which on volumes that are not thin can have snapshots.
const plainSnapshotLevel block.Level = 5

// plainRestoreLevel is the level from which on they can go back to one.
const plainRestoreLevel block.Level = 6

// toldImage is the image and the tree of a leg as its target is told.
func (l *Leg) toldImage() (img image.Image, tree block.UUID) {
	img = l.Image
	switch {
	case !l.Based:
		return img, l.tree()
	case l.Returning:
		return img, tree
	}
	img.Kind = image.Based
	return img, l.tree()
}

// sharedWith is what the record of another leg in the same tree says of the tree.
func (l *Leg) sharedWith() block.UUID {
	if l.mapped() {
		return l.tree()
	}
	return l.ID.UUID
}

// cannotSnapshot says why no snapshot of a volume's leg can be taken now; empty if one can.
//
// Branches: one for each reason.
func (s *State) cannotSnapshot(v *Volume, l *Leg) string {
	d, stays := s.drives[l.Drive], s.stays(v, l.Node)
	switch {
	case !s.servable(l):
		return fmt.Sprintf("%v cannot be reached", l)
	case !s.takesSnapshots(l.Node):
		return fmt.Sprintf("target %s cannot take snapshots: it is of an earlier version", l.Node)
	case s.damage(l).Damage != "":
		return fmt.Sprintf("the tree of %v is damaged", l)
	case l.mapped():
		return ""
	case l.Based && s.nodes[l.Node].besideKernel(): // its process has it already
	case l.Kind == image.Plain && s.inKernelBefore(l.Node):
		return fmt.Sprintf("target %s serves it through the kernel, and the upgrade to level %d is not finished", l.Node, handsLevel)
	case l.Kind != image.Plain || !s.abilities(l.Node).plainSnapshots:
		return fmt.Sprintf("target %s cannot take snapshots of volumes that are not thin: it is of an earlier version, or serves them through a kernel that cannot list writes, without `--datapath user`", l.Node)
	case !l.Based && stays != "":
		return fmt.Sprintf("target %s serves it through the kernel, and would have to serve it by its process: %s", l.Node, stays)
	case !l.Based && s.free(l.Drive) == 0 && s.reserve(d) == 0:
		return fmt.Sprintf("%s has no free extent, of 256MiB, for what is written after the snapshot", d.object())
	}
	return ""
}

// inKernelBefore reports whether a target in the kernel could take snapshots of plain legs if the cluster's level were
// higher.
func (s *State) inKernelBefore(node block.NodeName) bool {
	on := s.targets[node]
	return s.level < handsLevel && s.level >= processLevel && on.report.PlainSnapshots && len(on.report.ProcessPortals) > 0
}

// neverSnapshots reports whether the target of a plain leg has said that it takes no snapshots of it.
func (s *State) neverSnapshots(l *Leg) bool {
	on := s.targets[l.Node]
	can := s.abilities(l.Node)
	return on != nil && on.report != nil && !(can.snapshots && can.plainSnapshots)
}

// damaged returns a leg of a column whose good copies are all in damaged trees; nil if it is another one.
func (s *State) damaged(v *Volume, column int) (leg *Leg) {
	for _, l := range v.column(column) {
		switch {
		case !l.trusted():
		case s.damage(l).Damage == "":
			return nil
		default:
			leg = l
		}
	}
	return leg
}

// mayBase refuses a snapshot of a volume of which a column is in damaged trees alone, and of one that is not thin if
// a column has no leg that can have one.
func (t *tx) mayBase(v *Volume) error {
	for c := range v.Layout.Stripes {
		if l := t.s.damaged(v, c); l != nil {
			return refused(ReasonNoInSyncLeg, v.object(), "no snapshot of column %d can be taken: the tree of %v is damaged", c, l).
				hint("`weft explain volume %s` says what can be done", v.Name)
		}
	}
	if v.Thin {
		return nil
	}
	if err := t.needsLevel(plainSnapshotLevel, "snapshots of volumes that are not thin"); err != nil {
		return err
	}
	for c := range v.Layout.Stripes {
		if why := t.s.cannotSnapshotColumn(v, c); why != "" {
			reason := ReasonNoInSyncLeg
			trusted := slices.DeleteFunc(slices.Clone(v.column(c)), func(l *Leg) bool { return !l.trusted() })
			if len(trusted) > 0 && !slices.ContainsFunc(trusted, func(l *Leg) bool { return !t.s.neverSnapshots(l) }) {
				reason = ReasonOldTarget // waiting does not help
			}
			return refused(reason, v.object(), "no snapshot of column %d can be taken: %s", c, why).
				hint("upgrade the target, run it with `--datapath user`, or make room; or move the leg: `weft leg move %s %d.0`", v.Name, c)
		}
	}
	return nil
}

// cannotSnapshotColumn says why no snapshot of any leg of a column can be taken now, as of the last leg
// in sync; empty if one can.
func (s *State) cannotSnapshotColumn(v *Volume, column int) (why string) {
	why = "it has no copy in sync"
	for _, l := range v.column(column) {
		if !l.trusted() {
			continue
		}
		if why = s.cannotSnapshot(v, l); why == "" {
			return ""
		}
	}
	return why
}

// base has the plain legs that are about to be frozen get trees.
func (t *tx) base(id block.VolumeID, frozen []TakingOrigin) {
	for _, f := range frozen {
		if l := t.peek(id).leg(f.Origin); !l.mapped() && (!l.Based || l.Returning) {
			l = t.volume(id).leg(f.Origin)
			l.Based, l.Returning, l.FreedAt = true, false, 0
		}
	}
}

// based reports whether a leg's label says that there is a tree over it, and names whether it names one.
func (s *State) based(l *Leg) (based, names, known bool) {
	d, seen := s.driveReport(l)
	i := slices.IndexFunc(d.Legs, func(label evidence.LegLabel) bool { return label.Leg == l.ID })
	if !seen || d.Error != "" || i < 0 {
		return false, false, false
	}
	return d.Legs[i].Based, !d.Legs[i].Tree.IsZero(), true
}

// baseWaits lists the legs of an origin that get trees before they can be frozen.
func (s *State) baseWaits(o *Volume, x *Taking) (waits []string) {
	if x.Phase != Preparing || o == nil {
		return nil
	}
	for _, f := range x.Frozen {
		l := o.leg(f.Origin)
		if l == nil || !l.Based {
			continue
		}
		if based, _, _ := s.based(l); !based {
			what := fmt.Sprintf("target %s to make room beside %v", l.Node, l)
			if s.nodes[l.Node].besideKernel() {
				what += ", or to take it over from its kernel, at its host's request"
			}
			waits = append(waits, cmp.Or(s.legWaitsFor(l), what))
		}
	}
	return waits
}

// shares reports whether other legs may be in the tree of a leg: it is in one, or one is over its extents.
func (l *Leg) shares() bool { return l.Based || l.mapped() && !l.Tree.IsZero() }

// indexTree keeps, by tree, the volumes that have a leg in it; in says whether v is new or old.
func (s *State) indexTree(v *Volume, l *Leg, in bool) {
	if !l.shares() {
		return
	}
	on := s.inTree.Get(l.tree())
	if in {
		on.Set(s.by, v.ID, true)
	} else {
		on.Delete(s.by, v.ID)
	}
	if on.Len() == 0 {
		s.inTree.Delete(s.by, l.tree())
		return
	}
	s.inTree.Set(s.by, l.tree(), on)
}

// graft notes that a volume gets legs in trees of others in this step, which the index has only after it.
func (t *tx) graft(v *Volume) {
	for i := range v.Legs {
		if l := &v.Legs[i]; l.shares() && l.State == LegCreating {
			t.grafts[l.tree()] = append(t.grafts[l.tree()], v.ID)
		}
	}
}

// overBase names the volumes that have other legs in the tree over a leg.
func (s *State) overBase(l *Leg) []string {
	return overBase(l, s.inTree.Get(l.tree()).Keys(), s.volumes.Get)
}

// needBase names those of them that need what is in the leg's extents. The target, which knows what its tree is,
// has the last word.
func (s *State) needBase(l *Leg) []string {
	return overBase(l, s.inTree.Get(l.tree()).Keys(), func(id block.VolumeID) *Volume {
		if v := s.volumes.Get(id); v != nil && !s.flattened(v) {
			return v
		}
		return nil
	})
}

func overBase(l *Leg, ids iter.Seq[block.VolumeID], peek func(block.VolumeID) *Volume) (names []string) {
	if !l.Based {
		return nil
	}
	for id := range ids {
		v := peek(id)
		if v != nil && slices.ContainsFunc(v.Legs, func(o Leg) bool { return o.ID != l.ID && o.Drive == l.Drive && o.tree() == l.tree() }) {
			names = append(names, string(v.Name))
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// wakeBases wakes the targets of legs that are being deleted, and were kept for a leg that is gone, or needs
// nothing of others any more.
func (t *tx) wakeBases(wake woken, old, new *Volume) {
	independent := old != nil && new != nil && old.flattening() && !new.flattening()
	for i := 0; old != nil && i < len(old.Legs); i++ {
		l := &old.Legs[i]
		if l.Tree.IsZero() || new != nil && new.leg(l.ID) != nil && !independent {
			continue
		}
		if id, base := t.s.baseOf(l.Tree); base != nil && base.State == LegDeleting {
			wake.volume(l.Node, id)
		}
	}
}

// baseOf is the leg that is not thin over whose extents a tree is, and its volume; nil if there is none.
func (s *State) baseOf(tree block.UUID) (block.VolumeID, *Leg) {
	for id := range s.inTree.Get(tree).Keys() {
		if base := s.volumes.Get(id).leg(block.LegID{UUID: tree}); base != nil && base.Based {
			return id, base
		}
	}
	return block.VolumeID{}, nil
}

// settleBases has legs lose their trees when nothing else is in these, and notes that they have.
func (t *tx) settleBases(id block.VolumeID) {
	v := t.peek(id)
	if v == nil || !slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.Based }) {
		return
	}
	for _, l := range v.Legs {
		if l.Based && l.State != LegDeleting {
			t.settleBase(v.ID, &l)
		}
	}
}

func (t *tx) settleBase(id block.VolumeID, l *Leg) {
	alone := len(overBase(l, t.s.inTree.Get(l.tree()).Keys(), t.peek))+len(overBase(l, slices.Values(t.grafts[l.tree()]), t.peek)) == 0
	switch based, names, known := t.s.based(l); {
	case alone != l.Returning:
		fresh := t.volume(id).leg(l.ID)
		fresh.Returning, fresh.FreedAt = alone, 0
		if alone {
			fresh.FreedAt = t.gen
		}
	case l.Returning && known && !based && !names && t.s.targets[l.Node].status.Generation >= l.FreedAt && t.s.stays(t.peek(id), l.Node) == "":
		fresh := t.volume(id).leg(l.ID)
		fresh.Based, fresh.Returning, fresh.FreedAt = false, false, 0
	}
}

// baseWaitsFor says what goes on with a leg that has a tree; empty if it has none.
func (s *State) baseWaitsFor(v *Volume, l *Leg) string {
	if !l.Based {
		return ""
	}
	if !l.Returning {
		if names := s.needBase(l); len(names) > 0 {
			return "what is written goes beside what these need: " + some(names, 4)
		}
		return "it keeps its tree, in which there are others, which do not need what it holds: " + some(s.overBase(l), 4)
	}
	if on := s.targets[l.Node]; on != nil {
		if left := on.legs.Get(l.ID).Returning; left > 0 {
			return fmt.Sprintf("no snapshot needs it any more: it is copied back to its own place, %s are left", left.Short())
		}
	}
	stays := s.stays(v, l.Node)
	if based, names, known := s.based(l); known && !based && !names && stays != "" {
		return "no snapshot needs it any more: it goes back to the kernel later, since " + stays
	}
	return "no snapshot needs it any more: it goes back to its own place"
}

// freeingWaitsFor says why a leg that is being deleted is still there, if its target can free it.
func (s *State) freeingWaitsFor(l *Leg) string {
	if names := s.needBase(l); len(names) > 0 {
		return fmt.Sprintf("%s to be deleted or flattened, which need what it holds", some(names, 4))
	}
	return fmt.Sprintf("target %s is freeing its extents", l.Node)
}

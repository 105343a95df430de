// SPDX-License-Identifier: Apache-2.0

package target

import (
	"cmp"
	"fmt"
	"slices"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/userspace"
)

// A tree gets another extent of the drive's reserve when less than lowSpace is free in it, before its
// writers have to wait. It gives empty extents back as long as keepFree stays free; the difference
// keeps an extent from going back and forth.
const (
	lowSpace = 64 * block.MiB
	keepFree = 3 * lowSpace
	// hungryExtents is how many extents a tree gets at once if its writers wait.
	hungryExtents = 2
)

// hostsReserve is how many extents of a drive's reserve are for what hosts write, also while no manager
// answers: flattening and copies of snapshots leave them. It is half of what a manager gives, and a manager gives more when no more
// than that is left.
func hostsReserve(l *drive.Label) uint64 {
	n := uint64(drive.Extents(l.Size))
	return max(n/200, min(2, n/32), 1)
}

// flattensFor reports whether a volume is being flattened in a tree, and waits for space.
func flattensFor(tree userspace.TreeSeen) bool {
	for _, f := range tree.Flattening {
		if f.Busy && f.Full {
			return true
		}
	}
	return false
}

// quiet reports whether nobody needs space in a tree: it has stopped, is damaged and so takes none, or is open for
// legs in the kernel alone.
func quiet(tree userspace.TreeSeen) bool {
	return tree.Err != "" || tree.Damage != "" || tree.Idle && !flattensFor(tree)
}

// endFlattening stops what is being flattened on a drive and is not to be, for whatever reason: its leg may
// have been freed, while those of the volume's snapshots are still there.
func (p *planner) endFlattening(id block.DriveID, d driveSeen) {
	if p.unusable(d) != "" {
		return
	}
	for name, tree := range d.trees {
		for volume, f := range tree.Flattening {
			wanted := slices.ContainsFunc(p.want.legs, func(w wantedLeg) bool {
				return w.drive == id && w.volume == volume && !w.GetRemove() && w.GetFlatten() && !w.GetFlattenWait() && legRecord(d.label, w.id).GetTreeId() == name
			})
			if f.Busy && !wanted {
				p.order(flattenLegs{drive: id, volume: volume, tree: name, stop: true})
			}
		}
	}
}

// unreclaimed says which trees of a drive cannot give back what was deleted in them.
func (p *planner) unreclaimed(id block.DriveID, d driveSeen) {
	for _, tree := range d.trees {
		if tree.Unreclaimed != "" && tree.Err == "" {
			p.problem(driveKey(id), "give back the space of deleted snapshots and clones", "%s", tree.Unreclaimed)
		}
	}
}

// space orders what the trees of a drive need, and what they can do without. No manager is asked.
func (p *planner) space(id block.DriveID, d driveSeen) {
	if p.unusable(d) != "" {
		return
	}
	p.unreclaimed(id, d)
	if granted := p.want.space[id]; !d.label.Granted(granted) {
		p.order(grantSpace{id, granted})
	}
	for _, t := range d.label.Trees {
		tree, open := d.trees[t.GetTreeId()]
		has, reserve := int(drive.CountExtents(t.GetExtents())), len(d.label.Reserve) > 0
		switch {
		case !open || quiet(tree):
		case tree.Full && reserve:
			p.order(growTree{id, t.GetTreeId(), has + hungryExtents, hungryExtents})
		case tree.Free < lowSpace && reserve, (flattensFor(tree) || tree.CopyWaits) && drive.CountExtents(d.label.Reserve) > hostsReserve(d.label):
			p.order(growTree{id, t.GetTreeId(), has + 1, 1})
		case tree.Empty+tree.Pending > 0 && tree.Free+tree.Pending >= keepFree+block.ExtentSize:
			p.order(shrinkTree{id, t.GetTreeId()})
		}
	}
}

// unrooted says why a leg that begins as another one cannot: the drive no longer has their tree.
func unrooted(w wantedLeg, l *drive.Label) string {
	if w.origin == (userspace.Origin{}) || l.Tree(w.GetTreeId()) != nil {
		return ""
	}
	if w.origin.Kind == pb.LegOriginKind_LEG_ORIGIN_KIND_COPY && w.origin.Leg.IsZero() && w.GetTreeId() == w.GetLegId() {
		return "" // it is copied to a tree of its own
	}
	return fmt.Sprintf("drive %v does not have tree %s, and so nothing of leg %v", w.drive, w.GetTreeId(), w.origin.Leg)
}

// mappedLeg says why a mapped leg cannot be served, and reports its space.
func (p *planner) mappedLeg(w wantedLeg, d driveSeen, report *pb.LegReport) string {
	if !drive.Mapped(w) {
		return p.basedLeg(w, d, report)
	}
	if cause := cmp.Or(p.misfit(w, d), p.refuses(w, report), unrooted(w, d.label)); cause != "" {
		return cause
	}
	if legRecord(d.label, w.id) == nil && d.label.Tree(w.GetTreeId()) == nil && len(d.label.Reserve) == 0 {
		return fmt.Sprintf("drive %v has no extent for thin volumes yet, or none left", w.drive)
	}
	p.keepTree(w, d)
	tree := d.trees[w.GetTreeId()]
	report.UsedBytes = uint64(tree.Used)
	if len(tree.UsedBy) > 1 {
		report.UsedBytes = uint64(tree.UsedBy[w.id.UUID])
	}
	inTree(report, tree, w.id)
	// While there is a reserve, the tree is about to get some of it: nobody needs to hear of that.
	report.Full = tree.Full && !tree.Idle && len(d.label.Reserve) == 0
	if !p.kernels(w) {
		report.Error = tree.Err // it is opened again
	}
	return ""
}

// inTree reports what a tree says of a leg that is in it.
func inTree(report *pb.LegReport, tree userspace.TreeSeen, leg block.LegID) {
	report.Space = spaceOf(tree, leg)
	report.Damage, report.UnknownBytes = tree.Damage, uint64(tree.Unknown[leg.UUID])
}

// spaceOf is what a leg's data takes, nil if it is not counted yet.
func spaceOf(tree userspace.TreeSeen, leg block.LegID) *pb.LegSpace {
	u, counted := tree.Counted[leg.UUID]
	if !counted {
		return nil
	}
	return &pb.LegSpace{ReferencedBytes: uint64(u.Referenced), FreedBytes: uint64(u.Freed)}
}

// misfit says that a leg in a tree is for nobody here; empty: it is not so.
func (p *planner) misfit(w wantedLeg, d driveSeen) string {
	if d.trees == nil || p.kernels(w) && !w.GetInKernel() {
		return "it belongs to a thin volume, which this target does not serve"
	}
	return ""
}

// keepTree has the tree of a leg in the kernel open, again if it has stopped.
func (p *planner) keepTree(w wantedLeg, d driveSeen) {
	tree, open := d.trees[w.GetTreeId()]
	state, mapped := p.seen.mapped[w.id]
	if number, _, inTree := userspace.TreeOf(state.Table); p.kernels(w) && mapped && inTree && number == d.number && (!open || tree.Err != "" && tree.Idle) {
		p.order(keepTree{w.drive, w.GetTreeId()})
	}
}

// refuses reports that the kernel does not map a leg, and says so if it is to.
func (p *planner) refuses(w wantedLeg, report *pb.LegReport) string {
	if p.seen.refused != nil {
		report.KernelRefuses = p.seen.refused(w.id)
	}
	if report.KernelRefuses == "" || !p.kernels(w) || !w.GetInKernel() {
		return ""
	}
	return "the kernel cannot map it: " + report.KernelRefuses
}

// basedLeg is mappedLeg of one that has, or is to have, a tree over its own extents.
func (p *planner) basedLeg(w wantedLeg, d driveSeen, report *pb.LegReport) string {
	record := legRecord(d.label, w.id)
	switch {
	case record == nil || !drive.Based(record):
		if drive.Based(w) && d.trees != nil && d.label.Tree(w.GetTreeId()) == nil && len(d.label.Reserve) == 0 {
			p.problem(legKey(w.id), "make room for a snapshot", "drive %v has no extent left for it", w.drive)
		}
		return ""
	case d.trees == nil || p.kernels(w):
		return "its volume has, or had, snapshots, which this target does not serve"
	}
	tree := d.trees[record.GetTreeId()]
	report.UsedBytes = uint64(tree.UsedBy[w.id.UUID])
	inTree(report, tree, w.id)
	report.Full = tree.Full && len(d.label.Reserve) == 0
	report.Error = tree.Err // it is opened again
	return ""
}

// SPDX-License-Identifier: Apache-2.0

package target

import (
	"cmp"
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/nvmet"
	"weft.dev/weft/target/userspace"
)

func (p *planner) leg(w wantedLeg) {
	if !p.legNow(w) {
		p.leave(w.id)
	}
}

// leave has a leg leave a tree that has stopped, although it is not to be served now: the tree is opened again,
// for the others, when all have left it.
func (p *planner) leave(id block.LegID) {
	state, ok := p.seen.mapped[id]
	if !ok || !state.Live || p.inKernel(state) {
		return
	}
	number, tree, ok := userspace.TreeOf(state.Table)
	if !ok {
		return
	}
	for _, d := range p.seen.drives {
		if d.number == number && d.trees[tree].Err != "" {
			p.order(mapLeg{leg: id, step: dm.Step{Op: dm.OpReload, Device: state.Device()}})
		}
	}
}

// legNow is leg; false: it has not come to the leg's device, and does not remove it.
func (p *planner) legNow(w wantedLeg) bool {
	have, ok := p.seen.drives[w.drive]
	cause := "drive " + w.drive.String() + " is not here"
	if ok {
		cause = p.unusable(have)
	}
	if w.GetRemove() {
		p.removeLeg(w, have.label, cause)
		return true
	}
	if cause == "" {
		cause = p.unservable(w, have)
	}
	report := &pb.LegReport{LegId: w.GetLegId(), Error: cause}
	p.plan.legs = append(p.plan.legs, report)
	if cause != "" {
		return false
	}
	if cause = p.mappedLeg(w, have, report); cause != "" {
		report.Error = cause
		return false
	}
	record := legRecord(have.label, w.id)
	change, err := recordChange(record, w)
	if err != nil {
		report.Error = err.Error()
		p.problem(legKey(w.id), "record", "%v", err)
		return false
	}
	if change != "" && !p.prepares(w, record) {
		p.order(putLeg{w.drive, w, p.floor(w.volume), change, have.identity()})
	}
	if record == nil {
		return false
	}
	p.prepare(w, record, report)
	p.base(w, have, record, report)
	if !drive.Ready(record) {
		return false
	}
	mapped := p.mapLeg(w, have, record)
	large := mapped > 0 && mapped >= confirmed(w)
	// A change of the record that leaves the revision alone leaves the leg ready.
	report.Ready = large && record.GetRevision() == w.GetRevision()
	report.SizeBytes = uint64(p.usable(w, mapped))
	p.ready[w.id] = large
	p.flatten(w, have, record, report)
	return true
}

// flatten says how far a leg is from needing nothing of other volumes' legs, and orders that it be
// done; endFlattening has it stopped. One that is going back to a snapshot is not there yet.
func (p *planner) flatten(w wantedLeg, d driveSeen, record *pb.LegLabel, report *pb.LegReport) {
	tree, open := d.trees[record.GetTreeId()]
	if !w.GetFlatten() || !open || !drive.Mapped(record) || tree.Err != "" || record.GetRevision() != w.GetRevision() {
		return
	}
	report.Flat = tree.Flat(d.label, w.volume, w.id)
	if report.Flat {
		return
	}
	now := tree.Flattening[w.volume]
	report.FlatteningBytes, report.FlatteningWaitsFor = uint64(now.Left), now.Waits
	if !now.Busy && !w.GetFlattenWait() {
		p.order(flattenLegs{drive: w.drive, volume: w.volume, tree: record.GetTreeId()})
	}
}

// unservable says why a leg cannot be served, although its drive can be used.
func (p *planner) unservable(w wantedLeg, on driveSeen) string {
	judged := w.GetIncarnation()
	switch {
	case judged != "" && !block.SameIncarnation(judged, on.identity()):
		return "its drive may have lost writes since the manager judged what it holds"
	case drive.ImageOf(w).Checked() && (!p.seen.integrity || p.kernels(w)):
		return "its volume keeps checksums, which this target does not"
	}
	return ""
}

// prepare orders what the leg's record lacks before the leg can be mapped.
func (p *planner) prepare(w wantedLeg, record *pb.LegLabel, report *pb.LegReport) {
	switch {
	case drive.Mapped(record):
		p.prepareMapped(w, record, report)
	case record.GetGoingBack():
		p.goBack(w, record)
	case drive.Whole(record):
		report.ZeroedBytes = w.GetSizeBytes()
	default:
		p.order(zeroLeg{w.drive, w.id})
	}
}

func (p *planner) prepareMapped(w wantedLeg, record *pb.LegLabel, report *pb.LegReport) {
	switch size := block.Size(w.GetSizeBytes()); {
	case drive.Zeroed(record) >= size:
		report.ZeroedBytes = w.GetSizeBytes()
	case w.restores() && record.GetRevision() < w.GetRevision():
		// First its record says that it is not prepared: growing it meanwhile would undo that.
	case record.GetZeroed(): // it has begun, so its origin does not count
		p.order(prepareLeg{w.drive, w.id, record.GetRevision(), size, userspace.Origin{}})
	case w.undecided():
	case w.GetOrigin().GetWait():
	case w.source != nil:
		p.order(copyLeg{w.drive, w.id, record.GetRevision(), size, w.origin.Leg, w.source})
	case w.GetVolume().GetSnapshot().GetVolumeId() != "" && w.origin == (userspace.Origin{}):
		report.Error = "it is a leg of a snapshot, and not told of what it is made: zeroes would pass for the snapshot"
	case p.freezable(w):
		p.order(prepareLeg{w.drive, w.id, record.GetRevision(), size, w.origin})
	}
}

// prepares reports whether a leg that is to go back at a new revision is still being prepared for an earlier
// one, which would end the way back that its record is about to begin.
func (p *planner) prepares(w wantedLeg, record *pb.LegLabel) bool {
	return w.restores() && record.GetRevision() < w.GetRevision() && p.seen.zeroing != nil && p.seen.zeroing(w.id)
}

// undecided reports whether the volume is going back and the leg is not told to what: a manager whose store
// was lost does not know yet, or it does without the leg. What the leg holds is not the volume's, so it waits,
// as its record says.
func (w wantedLeg) undecided() bool { return w.GetVolume().GetRestoringToId() != "" && !w.restores() }

// goBack orders that a based leg become what a snapshot holds. If that is not wanted any more, its record is
// to say so: the leg is as it was.
func (p *planner) goBack(w wantedLeg, record *pb.LegLabel) {
	switch {
	case w.undecided():
	case w.restores() && record.GetRevision() < w.GetRevision(): // first its record has this revision
	default:
		p.order(prepareLeg{w.drive, w.id, record.GetRevision(), block.Size(w.GetSizeBytes()), w.origin})
	}
}

// freezable reports whether hosts use the leg that is to be frozen through its tree, and no other way is
// being left.
func (p *planner) freezable(w wantedLeg) bool {
	of := legRecord(p.seen.drives[w.drive].label, w.origin.Leg)
	if w.origin.Kind != pb.LegOriginKind_LEG_ORIGIN_KIND_FREEZE || of == nil || !drive.Based(of) {
		return true
	}
	state, mapped := p.seen.mapped[w.origin.Leg]
	return mapped && userspace.ThroughTree(state.Table) && !p.seen.mapping(w.origin.Leg)
}

// base orders the next step of a plain leg on its way to a tree over it, or back.
//
// Branches: one for each step of the way, and what keeps a leg from it.
func (p *planner) base(w wantedLeg, d driveSeen, record *pb.LegLabel, report *pb.LegReport) {
	if drive.Mapped(record) || drive.ImageOf(record).Checked() || record.GetGoingBack() || d.trees == nil {
		return
	}
	order := func(step baseStep) {
		p.order(baseLeg{w.drive, w.id, step, w.GetTreeId(), min(block.Size(w.GetSizeBytes()), drive.Zeroed(record))})
	}
	tree, open := d.trees[record.GetTreeId()]
	wanted := drive.Based(w) && (record.GetTreeId() == w.GetTreeId() || record.GetTreeId() == "")
	switch {
	case p.seen.beside && !p.processHas(w.id): // the kernel has it, or is about to let go of it
	case drive.Based(record) && !wanted:
		p.unbase(w, tree, order, report)
	case drive.Based(record) || open: // its hosts leave the tree first
	case wanted && drive.Whole(record):
		order(plantTree)
	case !wanted && record.GetTreeId() != "":
		order(fellTree)
	}
}

// unbase orders the next step of a based leg that is to be plain. A copy that has failed, for example at a
// sector that cannot be read, is tried again; until it succeeds, the leg has a problem.
func (p *planner) unbase(w wantedLeg, tree userspace.TreeSeen, order func(baseStep), report *pb.LegReport) {
	if why := cmp.Or(tree.Unreclaimed, tree.Unsettled); why != "" && !tree.Settling.Plain {
		p.problem(legKey(w.id), "copy back to its own extents", "%s", why)
	}
	switch s := tree.Settling; {
	case s.Plain:
		order(unbase)
	case s.Alone && !tree.Busy:
		order(settleBase)
	}
	report.ReturningBytes = uint64(tree.Settling.Left)
}

func legRecord(l *drive.Label, id block.LegID) *pb.LegLabel {
	if l == nil {
		return nil
	}
	i := slices.IndexFunc(l.Legs, func(r *pb.LegLabel) bool { return r.GetLegId() == id.String() })
	if i < 0 {
		return nil
	}
	return l.Legs[i]
}

// recordChange says how a leg's record must change: it is carved, updated or left alone. A record
// that is ahead of the wanted state stays: the wanted state is outdated.
func recordChange(record *pb.LegLabel, w wantedLeg) (string, error) {
	if record == nil && w.GetVolume().GetGeneration() > 1 && !w.GetBlank() {
		// A leg is carved once, while its volume is created or while it is blank. Carving it again
		// would offer zeroes in place of the data that the drive has lost.
		return "", errors.New("the drive no longer holds it: its data is lost")
	}
	if record == nil {
		return "carve", nil
	}
	have, want := record.GetVolume(), w.GetVolume()
	switch {
	case have.GetVolumeId() != want.GetVolumeId():
		return "", fmt.Errorf("the drive's label assigns it to volume %s, not %s", have.GetVolumeId(), want.GetVolumeId())
	case record.GetRevision() > w.GetRevision():
		return "", fmt.Errorf("the drive has revision %d, newer than %d", record.GetRevision(), w.GetRevision())
	case have.GetGeneration() > want.GetGeneration():
		return "", fmt.Errorf("the drive has generation %d of the volume, newer than %d", have.GetGeneration(), want.GetGeneration())
	case have.GetEpoch() > want.GetEpoch():
		return "", fmt.Errorf("the drive has epoch %d of the volume, newer than %d", have.GetEpoch(), want.GetEpoch())
	case !drive.ImageOf(w).Extends(drive.ImageOf(record)):
		return "", fmt.Errorf("the drive has it on extents %v, not %v", record.GetExtents(), w.GetExtents())
	case !drive.ImageOf(record).Extends(drive.ImageOf(w)):
		return fmt.Sprintf("record generation %d with extents %v of", want.GetGeneration(), w.GetExtents()), nil
	case record.GetRevision() < w.GetRevision() || !proto.Equal(have, want):
		return fmt.Sprintf("record generation %d, revision %d of", want.GetGeneration(), w.GetRevision()), nil
	}
	return "", nil
}

// legDevice is the table of a leg.
func legDevice(n block.DeviceNumber, record *pb.LegLabel, id block.LegID, size block.Size) dm.Table {
	if drive.InTree(record) {
		return userspace.MappedTable(n, record.GetTreeId(), id, size)
	}
	return legTable(n, id, drive.ImageOf(record), size)
}

// legTable maps the first size bytes of a leg.
func legTable(n block.DeviceNumber, id block.LegID, image drive.Image, size block.Size) dm.Table {
	if image.Checked() {
		return checkedTable(n, id, image, size)
	}
	var table dm.Table
	var at block.Size
	for _, s := range image.Segments(size) {
		table = append(table, dm.Row{Start: at, Length: s.Length, Target: dm.Linear{Device: dm.RefTo(n), Offset: s.Offset}})
		at += s.Length
	}
	return table
}

// checkedTable is legTable of an image with checksums.
func checkedTable(n block.DeviceNumber, id block.LegID, image drive.Image, size block.Size) dm.Table {
	var table dm.Table
	var at block.Size
	for _, s := range image.Segments(0) {
		length := min(s.Length/block.ExtentSize*block.CheckedData, size-at)
		if length == 0 {
			break
		}
		table = append(table, dm.Row{Start: at, Length: length, Target: dm.Checked{Device: dm.RefTo(n), Offset: s.Offset, Leg: id}})
		at += length
	}
	return table
}

// removeLeg works from the outside in, one layer a round: export, name and device, record. The
// leg's extents are freed when nothing can reach it any more.
func (p *planner) removeLeg(w wantedLeg, label *drive.Label, cause string) {
	const doing = "remove"
	if p.seen.exports == nil || p.seen.mapped == nil || p.seen.names == nil {
		p.problem(legKey(w.id), doing, "the exports and mappings are unknown")
		return
	}
	if by := exporters(*p.seen.exports, p.legPath(w.id, false), p.legPath(w.id, true)); len(by) > 0 {
		p.problem(legKey(w.id), doing, "exported by %s", by[0])
		return
	}
	_, named := p.seen.names[w.id]
	if named {
		p.order(nameLeg{w.id, ""})
	}
	state, mapped := p.seen.mapped[w.id]
	if mapped {
		p.order(mapLeg{leg: w.id, step: dm.Step{Op: dm.OpRemove, Device: state.Device()}})
	}
	if named || mapped {
		return
	}
	if cause != "" {
		p.problem(legKey(w.id), doing, "%s", cause)
		return
	}
	// Extents are not given away while zeroing may still write to them.
	if p.seen.zeroing(w.id) {
		p.problem(legKey(w.id), doing, "it is being zeroed; stopping that")
		return
	}
	// The write under way may be of the leg's record, so the record is not known to be gone.
	if p.seen.writing(w.drive) {
		p.plan.legs = append(p.plan.legs, &pb.LegReport{LegId: w.GetLegId(), Error: "the label of its drive is being written"})
	}
	if legRecord(label, w.id) != nil {
		p.order(freeLeg{w.drive, w.id})
	}
}

func exporters(c nvmet.Config, devices ...string) []block.NQN {
	var out []block.NQN
	for _, s := range c.Subsystems {
		if slices.ContainsFunc(s.Namespaces, func(ns nvmet.Namespace) bool { return slices.Contains(devices, ns.Device) }) {
			out = append(out, s.NQN)
		}
	}
	return out
}

// legPath is the device path under which a leg is exported. A read-only leg has a name of its own,
// by which the exporter recognizes it.
func (p *planner) legPath(id block.LegID, readOnly bool) string {
	file := path.Join(p.legDir, id.String())
	if readOnly {
		file += userspace.ReadOnly
	}
	return file
}

// legOf returns the leg that a path in dir belongs to.
func legOf(dir, device string) (block.LegID, bool) {
	id, err := block.ParseLegID(strings.TrimSuffix(path.Base(device), userspace.ReadOnly))
	return id, err == nil && path.Dir(device) == dir
}

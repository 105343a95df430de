// SPDX-License-Identifier: Apache-2.0

package target

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
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

// dmPrefix begins the name and the uuid of each mapped leg.
const dmPrefix = "weft-leg-"

// seen is what the node has at one moment.
type seen struct {
	devices []*pb.Device
	drives  map[block.DriveID]driveSeen

	// These are nil while they cannot be read: then nothing is known to be
	// unmapped, or fenced.
	mapped  map[block.LegID]dm.State
	names   map[block.LegID]string // where the leg's stable name leads
	exports *nvmet.Config

	// busy says that a call on a subsystem is still in the kernel; it is there
	// when exports is.
	busy func(block.NQN) bool
	// told is how large nvmet is known to know that a namespace is.
	told func(space) block.Size
	// zeroing says that a leg's extents are being written to.
	zeroing func(block.LegID) bool
	// writing says that the label of a drive is being written.
	writing func(block.DriveID) bool
}

// driveSeen is a drive with a label of ours.
type driveSeen struct {
	device string
	number block.DeviceNumber
	label  *drive.Label
	err    string // why it cannot be used

	incarnation uint32 // higher than the label's: acknowledged writes may be lost
	sequence    string // of the disk
}

// plan is what is to be done, and what is so.
type plan struct {
	orders     []order
	exports    nvmet.Config // as nvmet is to be
	resizes    []resize
	problems   []problem
	legs       []*pb.LegReport
	admissions map[block.VolumeID]block.Epoch // that hold now
}

// problem is a pb.Problem without its time.
type problem struct{ object, doing, cause string }

// order is one thing to do that is not a step in nvmet. Orders with the same key
// are done one after another. String identifies it.
type order interface {
	key() string
	about() string // the object of a problem with it
	String() string
}

// The orders; do.go says how each is done.
type (
	formatDrive struct {
		id            block.DriveID
		cluster       block.ClusterID
		device, force string
	}
	eraseDrive struct{ id block.DriveID }
	// putLeg carves a leg, or brings its record up to date.
	putLeg struct {
		drive  block.DriveID
		leg    wantedLeg
		floor  block.Epoch
		change string

		incarnation string // of the drive
	}
	freeLeg struct {
		drive block.DriveID
		leg   block.LegID
	}
	admit struct {
		drive  block.DriveID
		volume block.VolumeID
		epoch  block.Epoch
	}
	zeroLeg struct {
		drive block.DriveID
		leg   block.LegID
	}
	// noteLoss records on a drive that acknowledged writes may be lost, so that this is
	// known when the process is not there any more.
	noteLoss struct {
		drive       block.DriveID
		incarnation uint32
	}
	mapLeg struct {
		leg  block.LegID
		step dm.Step
	}
	// nameLeg makes the leg's stable name lead to node; with no node it goes away.
	nameLeg struct {
		leg  block.LegID
		node string
	}
)

func driveKey(id block.DriveID) string { return "drive " + id.String() }
func legKey(id block.LegID) string     { return "leg " + id.String() }

func (o formatDrive) key() string { return driveKey(o.id) }
func (o eraseDrive) key() string  { return driveKey(o.id) }
func (o putLeg) key() string      { return driveKey(o.drive) }
func (o freeLeg) key() string     { return driveKey(o.drive) }
func (o admit) key() string       { return driveKey(o.drive) }
func (o zeroLeg) key() string     { return "zero " + o.leg.String() }
func (o noteLoss) key() string    { return driveKey(o.drive) }
func (o mapLeg) key() string      { return legKey(o.leg) }
func (o nameLeg) key() string     { return legKey(o.leg) }

func (o formatDrive) about() string { return driveKey(o.id) }
func (o eraseDrive) about() string  { return driveKey(o.id) }
func (o putLeg) about() string      { return legKey(o.leg.id) }
func (o freeLeg) about() string     { return legKey(o.leg) }
func (o admit) about() string       { return "volume " + o.volume.String() }
func (o zeroLeg) about() string     { return legKey(o.leg) }
func (o noteLoss) about() string    { return driveKey(o.drive) }
func (o mapLeg) about() string      { return legKey(o.leg) }
func (o nameLeg) about() string     { return legKey(o.leg) }

func (o formatDrive) String() string { return fmt.Sprintf("format %s as drive %v", o.device, o.id) }
func (o eraseDrive) String() string  { return fmt.Sprintf("erase the label of drive %v", o.id) }
func (o putLeg) String() string {
	return fmt.Sprintf("%s leg %v on drive %v", o.change, o.leg.id, o.drive)
}
func (o freeLeg) String() string { return fmt.Sprintf("free leg %v on drive %v", o.leg, o.drive) }
func (o admit) String() string {
	return fmt.Sprintf("record epoch %d of volume %v on drive %v", o.epoch, o.volume, o.drive)
}
func (o zeroLeg) String() string { return fmt.Sprintf("zero leg %v", o.leg) }
func (o mapLeg) String() string  { return o.step.String() }
func (o noteLoss) String() string {
	return fmt.Sprintf("record on drive %v that it has lost acknowledged writes, as incarnation %d", o.drive, o.incarnation)
}
func (o nameLeg) String() string {
	if o.node == "" {
		return fmt.Sprintf("remove the name of leg %v", o.leg)
	}
	return fmt.Sprintf("name leg %v for %s", o.leg, o.node)
}

// planner makes a plan of what is and what is wanted.
type planner struct {
	seen    seen
	want    wanted
	legDir  string // where the legs' names are
	portals []block.Portal

	plan  plan
	ready map[block.LegID]bool
}

func makePlan(s seen, w wanted, legDir string, portals []block.Portal) plan {
	p := planner{seen: s, want: w, legDir: legDir, portals: portals, ready: map[block.LegID]bool{}}
	p.plan.problems = w.problems
	if w.cluster.IsZero() {
		p.admissions() // those of before hold on
		return p.plan
	}
	for _, d := range w.drives {
		p.drive(d)
	}
	for id, d := range s.drives {
		if d.incarnation > d.label.Incarnation && p.unusable(d) == "" {
			p.order(noteLoss{id, d.incarnation})
		}
	}
	for _, l := range w.legs {
		p.leg(l)
	}
	p.exports()
	p.admissions()
	return p.plan
}

func (p *planner) order(o order) { p.plan.orders = append(p.plan.orders, o) }

func (p *planner) problem(object, doing, format string, args ...any) {
	p.plan.problems = append(p.plan.problems, problem{object, doing, fmt.Sprintf(format, args...)})
}

// ---- drives ----

func (p *planner) drive(w wantedDrive) {
	have, ok := p.seen.drives[w.id]
	switch {
	case ok && w.GetRemove():
		p.eraseDrive(w.id, have)
	case !ok && !w.GetRemove():
		p.formatDrive(w)
	}
}

func (p *planner) eraseDrive(id block.DriveID, have driveSeen) {
	if cause := p.unusable(have); cause != "" {
		p.problem(driveKey(id), "erase the label", "%s", cause)
		return
	}
	if n := len(have.label.Legs); n > 0 {
		p.problem(driveKey(id), "erase the label", "the drive holds %d legs", n)
		return
	}
	p.order(eraseDrive{id})
}

// unusable says why nothing may be written to a drive.
func (p *planner) unusable(d driveSeen) string {
	if d.label.Cluster != p.want.cluster {
		return "belongs to cluster " + d.label.Cluster.String()
	}
	return d.err
}

func (p *planner) formatDrive(w wantedDrive) {
	const doing = "take in"
	device, err := findDevice(p.seen.devices, w.WantedDrive)
	if err != nil {
		p.problem(driveKey(w.id), doing, "%v", err)
		return
	}
	if err := drive.CheckAdd(device, w.GetForceErase()); err != nil {
		p.problem(driveKey(w.id), doing, "%v", err)
		return
	}
	p.order(formatDrive{w.id, p.want.cluster, device.GetPath(), w.GetForceErase()})
}

// findDevice goes by what a device cannot lose; by its path only if nothing
// better is known. Partitions share their disk's names: then the path decides.
func findDevice(devices []*pb.Device, w *pb.WantedDrive) (*pb.Device, error) {
	var is func(*pb.Device) bool
	var by string
	switch {
	case w.GetWwid() != "":
		by, is = "wwid "+w.GetWwid(), func(d *pb.Device) bool { return d.GetWwid() == w.GetWwid() }
	case w.GetSerial() != "":
		by, is = "serial "+w.GetSerial(), func(d *pb.Device) bool { return d.GetSerial() == w.GetSerial() }
	default:
		by, is = w.GetDevice(), func(d *pb.Device) bool { return d.GetPath() == w.GetDevice() }
	}
	var found []*pb.Device
	for _, d := range devices {
		if is(d) {
			found = append(found, d)
		}
	}
	if len(found) > 1 {
		if i := slices.IndexFunc(found, func(d *pb.Device) bool { return d.GetPath() == w.GetDevice() }); i >= 0 {
			return found[i], nil
		}
		return nil, fmt.Errorf("%d devices have %s, and none of them is %s", len(found), by, w.GetDevice())
	}
	if len(found) == 0 {
		return nil, fmt.Errorf("no device has %s", by)
	}
	return found[0], nil
}

// ---- legs ----

func (p *planner) leg(w wantedLeg) {
	have, ok := p.seen.drives[w.drive]
	cause := "drive " + w.drive.String() + " is not here"
	if ok {
		cause = p.unusable(have)
	}
	if w.GetRemove() {
		p.removeLeg(w, have.label, cause)
		return
	}
	if judged := w.GetIncarnation(); cause == "" && judged != "" && judged != have.identity() {
		cause = "its drive may have lost writes since the manager judged what it holds"
	}
	report := &pb.LegReport{LegId: w.GetLegId(), Error: cause}
	p.plan.legs = append(p.plan.legs, report)
	if cause != "" {
		return
	}
	record := legRecord(have.label, w.id)
	change, err := recordChange(record, w)
	if err != nil {
		report.Error = err.Error()
		p.problem(legKey(w.id), "record", "%v", err)
		return
	}
	if change != "" {
		p.order(putLeg{w.drive, w, p.floor(w.volume), change, have.identity()})
	}
	if record == nil {
		return
	}
	if drive.Whole(record) {
		report.ZeroedBytes = w.GetSizeBytes()
	} else {
		p.order(zeroLeg{w.drive, w.id})
	}
	if !record.GetZeroed() {
		return
	}
	mapped := p.mapLeg(w, have, record)
	large := mapped > 0 && mapped >= confirmed(w)
	// A change of the record that does not touch the revision leaves the leg as good as it was.
	report.Ready = large && record.GetRevision() == w.GetRevision()
	report.SizeBytes = uint64(p.told(w, mapped))
	p.ready[w.id] = large
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

// recordChange says what is to be done to a leg's record: carve it, update it, or
// nothing. A record that is ahead of what is wanted stays: the wish is an old one.
func recordChange(record *pb.LegLabel, w wantedLeg) (string, error) {
	if record == nil && w.GetVolume().GetGeneration() > 1 {
		// A leg is carved once, while its volume is created: another would be
		// zeroes under the name of what the drive has lost.
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
	case !drive.Extends(w.GetExtents(), record.GetExtents()):
		return "", fmt.Errorf("the drive has it on extents %v, not %v", record.GetExtents(), w.GetExtents())
	case !drive.Extends(record.GetExtents(), w.GetExtents()):
		return fmt.Sprintf("record generation %d with extents %v of", want.GetGeneration(), w.GetExtents()), nil
	case record.GetRevision() < w.GetRevision() || !proto.Equal(have, want):
		return fmt.Sprintf("record generation %d, revision %d of", want.GetGeneration(), w.GetRevision()), nil
	}
	return "", nil
}

func legTable(n block.DeviceNumber, segments []drive.Segment) dm.Table {
	var table dm.Table
	var at block.Size
	for _, s := range segments {
		table = append(table, dm.Row{Start: at, Length: s.Length, Target: dm.Linear{Device: dm.RefTo(n), Offset: s.Offset}})
		at += s.Length
	}
	return table
}

// removeLeg goes from the outside in, one layer a round: export, name and device,
// record. The leg is free when nothing can reach it any more.
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
		p.order(mapLeg{w.id, dm.Step{Op: dm.OpRemove, Device: state.Device()}})
	}
	if named || mapped {
		return
	}
	if cause != "" {
		p.problem(legKey(w.id), doing, "%s", cause)
		return
	}
	// Extents are not given to anybody else while zeroes may still land on them.
	if p.seen.zeroing(w.id) {
		p.problem(legKey(w.id), doing, "it is being zeroed; stopping that")
		return
	}
	// What is being written may be the leg's record: it is not known to be gone.
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

// legPath is what a leg is exported as. One that is only to be read has a name of
// its own, where the exporter can see to that.
func (p *planner) legPath(id block.LegID, readOnly bool) string {
	file := path.Join(p.legDir, id.String())
	if readOnly {
		file += userspace.ReadOnly
	}
	return file
}

// legOf is the leg that a path in dir is of.
func legOf(dir, device string) (block.LegID, bool) {
	id, err := block.ParseLegID(strings.TrimSuffix(path.Base(device), userspace.ReadOnly))
	return id, err == nil && path.Dir(device) == dir
}

// ---- exports ----

// floor is the epoch below which nothing of a volume may be exported: the
// highest that is on a label, whether the drive can be used or not.
func (p *planner) floor(v block.VolumeID) block.Epoch {
	floor := block.Epoch(0)
	for _, d := range p.seen.drives {
		for _, r := range d.label.Legs {
			if r.GetVolume().GetVolumeId() == v.String() {
				floor = max(floor, block.Epoch(r.GetAdmittedEpoch()))
			}
		}
	}
	return floor
}

func (p *planner) exports() {
	for _, portal := range p.portals {
		p.plan.exports.Ports = append(p.plan.exports.Ports, nvmet.Port{Portal: portal})
	}
	taken := map[block.LegID]block.NQN{}
	for _, e := range p.want.exports {
		p.export(e, taken)
	}
}

func (p *planner) export(e wantedExport, taken map[block.LegID]block.NQN) {
	object := "export " + e.GetNqn()
	const doing = "export"
	// What is being fenced is no longer wanted, whoever still lists it.
	if floor := max(p.floor(e.volume), p.want.admissions[e.volume]); e.epoch < floor {
		p.problem(object, doing, "epoch %d is over; %d is admitted", e.epoch, floor)
		return
	}
	s := e.subsystem()
	old, exists := nvmet.Subsystem{}, false
	if p.seen.exports != nil {
		old, exists = p.seen.exports.Subsystem(s.NQN)
	}
	for _, w := range e.namespaces {
		if other, ok := taken[w.leg]; ok && !nvmet.Shares(other, s.NQN) {
			p.problem(object, doing, "leg %v is exported by %s", w.leg, other)
			continue
		}
		ns := nvmet.Namespace{NSID: w.nsid, Device: p.legPath(w.leg, e.readOnly), UUID: w.uuid, NGUID: w.uuid, Enabled: true}
		// What is exported stays, even if its drive has trouble: the host decides
		// what an I/O error means, and taking the namespace away would be one more.
		if cause := p.notYet(e, w); cause != "" && !slices.Contains(old.Namespaces, ns) {
			p.problem(object, doing, "leg %v: %s", w.leg, cause)
			continue
		}
		taken[w.leg] = s.NQN
		s.Namespaces = append(s.Namespaces, ns)
	}
	if len(s.Namespaces) == 0 && !exists {
		return
	}
	c := nvmet.Config{Subsystems: []nvmet.Subsystem{s}}
	if err := c.Check(); err != nil {
		p.problem(object, doing, "%v", err)
		return
	}
	p.plan.exports.Subsystems = append(p.plan.exports.Subsystems, s)
	for i := range p.plan.exports.Ports {
		port := &p.plan.exports.Ports[i]
		port.Subsystems = append(port.Subsystems, nvmet.LinkTo(s.NQN))
	}
}

// notYet says why a leg cannot be exported at an epoch.
func (p *planner) notYet(e wantedExport, w wantedNamespace) string {
	record := p.record(w.leg)
	switch {
	case record == nil:
		return "no drive of this node holds it"
	case record.GetVolume().GetVolumeId() != e.volume.String():
		return "it belongs to volume " + record.GetVolume().GetVolumeId()
	case block.Epoch(record.GetAdmittedEpoch()) != e.epoch:
		return fmt.Sprintf("its drive has admitted epoch %d, not %d", record.GetAdmittedEpoch(), e.epoch)
	case block.NamespaceUUID(w.leg, e.epoch, record.GetRevision()) != w.uuid:
		return fmt.Sprintf("its drive has revision %d, which is not the wanted one", record.GetRevision())
	case !p.ready[w.leg]:
		return "not ready"
	}
	return ""
}

func (p *planner) record(id block.LegID) *pb.LegLabel {
	for _, d := range p.seen.drives {
		if r := legRecord(d.label, id); r != nil && p.unusable(d) == "" {
			return r
		}
	}
	return nil
}

// ---- admissions ----

// admissions finds which floors hold, and raises those that are wanted higher: a
// floor is recorded only once nothing below it is left in nvmet, and it holds only
// once it is on the label of every usable drive that has a leg of the volume.
func (p *planner) admissions() {
	p.plan.admissions = map[block.VolumeID]block.Epoch{}
	volumes := p.volumes()
	byID := func(a, b block.VolumeID) int { return cmp.Compare(a.String(), b.String()) }
	for _, v := range slices.SortedFunc(maps.Keys(volumes), byID) {
		asked := p.want.admissions[v]
		if asked > 0 && !p.want.cluster.IsZero() {
			p.admit(v, asked)
		}
		if epoch := p.recorded(v, asked); epoch > 0 && p.exportedBelow(v, epoch) == "" {
			p.plan.admissions[v] = epoch
		}
	}
}

func (p *planner) volumes() map[block.VolumeID]bool {
	volumes := map[block.VolumeID]bool{}
	for v := range p.want.admissions {
		volumes[v] = true
	}
	for _, d := range p.seen.drives {
		for _, r := range d.label.Legs {
			if v, err := block.ParseVolumeID(r.GetVolume().GetVolumeId()); err == nil {
				volumes[v] = true
			}
		}
	}
	return volumes
}

func (p *planner) admit(v block.VolumeID, epoch block.Epoch) {
	if cause := p.exportedBelow(v, epoch); cause != "" {
		p.problem("volume "+v.String(), fmt.Sprintf("fence epochs below %d", epoch), "%s", cause)
		return
	}
	for id, d := range p.seen.drives {
		if p.unusable(d) == "" && lowest(d.label, v, epoch) < epoch {
			p.order(admit{id, v, epoch})
		}
	}
}

// exportedBelow names something that may still let a host of an epoch below the
// given one write to v; empty if there is nothing.
func (p *planner) exportedBelow(v block.VolumeID, epoch block.Epoch) string {
	if p.seen.exports == nil {
		return "the exports are unknown"
	}
	for _, s := range p.seen.exports.Subsystems {
		if !s.NQN.Ours() {
			continue
		}
		volume, e, _, _, err := block.ParseSubsystemNQN(s.NQN)
		if err == nil && (volume != v || e >= epoch) {
			continue
		}
		if p.seen.busy(s.NQN) {
			return fmt.Sprintf("export %s is still draining", s.NQN)
		}
		return fmt.Sprintf("export %s is still there", s.NQN)
	}
	return ""
}

// recorded is the epoch that every usable drive with a leg of v has on its label;
// what was asked for, if there is none.
func (p *planner) recorded(v block.VolumeID, asked block.Epoch) block.Epoch {
	const none = ^block.Epoch(0)
	epoch := none
	for _, d := range p.seen.drives {
		if d.err == "" {
			epoch = lowest(d.label, v, epoch)
		}
	}
	if epoch == none {
		return asked
	}
	return epoch
}

// lowest is the lowest admitted epoch of v's legs on a drive, at most top.
func lowest(l *drive.Label, v block.VolumeID, top block.Epoch) block.Epoch {
	for _, r := range l.Legs {
		if r.GetVolume().GetVolumeId() == v.String() {
			top = min(top, block.Epoch(r.GetAdmittedEpoch()))
		}
	}
	return top
}

// SPDX-License-Identifier: Apache-2.0

package target

import (
	"fmt"
	"slices"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/nvmet"
	"weft.dev/weft/target/userspace"
)

// dmPrefix begins the name and the uuid of each mapped leg.
const dmPrefix = "weft-leg-"

// seen is the observed state of the node at one moment.
type seen struct {
	devices []*pb.Device
	drives  map[block.DriveID]driveSeen

	// These are nil while they cannot be read; then no leg may be taken for unmapped or fenced.
	mapped  map[block.LegID]dm.State
	names   map[block.LegID]string // where the leg's stable name leads
	exports *nvmet.Config
	// kernel and process are the parts of exports: see process.go. beside: there are two.
	kernel, process *nvmet.Config
	parts           map[block.NQN]block.ServedBy // see partOf
	beside          bool
	// listed are the subsystems whose hosts can take checkpoints of lists of writes.
	listed []block.NQN

	// replacing are the exports that are being replaced, and by what.
	replacing map[block.NQN]nvmet.Replacing
	// asks reports whether hosts can ask that their exports change hands, and patient whether one of them still
	// has time for that.
	asks    bool
	patient func(block.NQN) bool

	// busy reports whether a call on a subsystem is still in the kernel; it is set when exports is.
	busy func(block.NQN) bool
	// authenticates is whether hosts can be made to prove their identity.
	authenticates pb.Ability
	// kernelMaps is whether the kernel can map legs in trees that nobody writes, and refused why it does not one;
	// nil: nothing is known of any.
	kernelMaps pb.Ability
	refused    func(block.LegID) string
	// integrity is whether legs with checksums can be kept.
	integrity bool
	readOnly  bool         // the kernel, or what stands in for it, has read-only exports
	refusals  *pb.Refusals // nil: none, or they are not counted
	// knownSize returns the size that nvmet is known to have read for a namespace.
	knownSize func(exportedNamespace) block.Size
	// zeroing reports whether a leg's extents are being written.
	zeroing func(block.LegID) bool
	// mapping reports whether a leg's table is being changed.
	mapping func(block.LegID) bool
	// writing reports whether the label of a drive is being written.
	writing func(block.DriveID) bool
}

// driveSeen is a drive with a label of ours.
type driveSeen struct {
	device string
	number block.DeviceNumber
	label  *drive.Label
	err    string // why it cannot be used

	// trees are those that are open; nil where mapped legs cannot be served.
	trees map[string]userspace.TreeSeen

	incarnation uint32 // if higher than the label's: acknowledged writes may be lost
	sequence    string // of the disk
}

// plan holds the orders, the wanted exports and the facts to report.
type plan struct {
	orders     []order
	exports    nvmet.Config      // as nvmet should be
	process    nvmet.Config      // as what this process exports beside nvmet should be
	asked      nvmet.Config      // about which hosts are answered though the kernel has none of it
	between    []nvmet.Subsystem // that change hands: they have ended, or are about to, and begin elsewhere
	awaiting   []block.NQN       // that change hands with others, whose hosts have not asked yet
	paths      map[block.NQN]int // controllers that a host may have; 1 if it is not listed
	resizes    []resize
	problems   []problem
	legs       []*pb.LegReport
	admissions map[block.VolumeID]block.Epoch // that hold now
}

// problem is a pb.Problem without its time.
type problem struct{ object, doing, cause string }

// planner makes a plan from the observed and the wanted state.
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
	p.plan.problems, p.plan.paths = w.problems, map[block.NQN]int{}
	if w.cluster.IsZero() {
		p.admissions() // earlier admissions still hold
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
	for id, d := range s.drives {
		p.space(id, d)
		p.endFlattening(id, d)
	}
	wanted := map[block.LegID]bool{}
	for _, l := range w.legs {
		p.leg(l)
		wanted[l.id] = true
	}
	for id := range s.mapped {
		if !wanted[id] {
			p.leave(id)
		}
	}
	p.exports()
	p.admissions()
	return p.plan
}

func (p *planner) order(o order) { p.plan.orders = append(p.plan.orders, o) }

func (p *planner) problem(object, doing, format string, args ...any) {
	p.plan.problems = append(p.plan.problems, problem{object, doing, fmt.Sprintf(format, args...)})
}

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

// unusable says why a drive must not be written to.
func (p *planner) unusable(d driveSeen) string {
	if d.label.Cluster != p.want.cluster {
		return "belongs to cluster " + d.label.Cluster.String()
	}
	return d.err
}

func (p *planner) formatDrive(w wantedDrive) {
	const doing = "add"
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

// findDevice matches by permanent properties of a device, and by its path only if nothing better is
// known. Partitions share their disk's properties, so there the path decides.
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

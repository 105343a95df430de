// SPDX-License-Identifier: Apache-2.0

package target

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/nvmet"
)

// floor is the epoch below which nothing of a volume may be exported: the highest epoch on any
// label, whether or not its drive is usable.
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
		p.plan.asked.Ports = append(p.plan.asked.Ports, nvmet.Port{Portal: portal})
	}
	if p.seen.beside {
		for _, portal := range processPortals(p.portals) {
			p.plan.process.Ports = append(p.plan.process.Ports, nvmet.Port{Portal: portal})
		}
	}
	taken := map[block.LegID]block.NQN{}
	for _, e := range p.want.exports {
		p.export(e, taken)
	}
}

// exporting is what a problem with an export is about.
const exporting = "export"

func (p *planner) export(e wantedExport, taken map[block.LegID]block.NQN) {
	object := "export " + e.GetNqn()
	// An export that is being fenced is no longer wanted, even if the wanted state still lists it.
	if floor := max(p.floor(e.volume), p.want.admissions[e.volume]); e.epoch < floor {
		p.problem(object, exporting, "epoch %d is over; %d is admitted", e.epoch, floor)
		return
	}
	if p.changeHands(&e) {
		p.ends(e)
		return
	}
	by := p.part(&e)
	s := e.subsystem()
	old, exists := nvmet.Subsystem{}, false
	if p.seen.exports != nil {
		old, exists = p.seen.exports.Subsystem(s.NQN)
	}
	p.identify(e, &s, old)
	s.Namespaces = p.namespaces(e, old, taken)
	if !exists && p.between(e) && len(s.Namespaces) < len(e.namespaces) {
		p.ends(e)
		return
	}
	if !exists && (len(s.Namespaces) == 0 || p.undecidedIn(e)) {
		return
	}
	c := nvmet.Config{Subsystems: []nvmet.Subsystem{s}}
	if err := c.Check(); err != nil {
		p.problem(object, exporting, "%v", err)
		return
	}
	if n := e.GetPaths(); n > 1 {
		p.plan.paths[s.NQN] = int(n)
	}
	offer(by, s, e)
}

// undecidedIn reports whether the kernel has not got all legs in trees of an export that it can have. If it refuses
// one, all of them are the process's: no host is to find some of them in the kernel before.
func (p *planner) undecidedIn(e wantedExport) bool {
	return slices.ContainsFunc(e.namespaces, func(ns wantedNamespace) bool {
		i := slices.IndexFunc(p.want.legs, func(w wantedLeg) bool { return w.id == ns.leg })
		record := p.record(ns.leg)
		return i >= 0 && p.want.legs[i].GetInKernel() && p.kernels(p.want.legs[i]) && !p.ready[ns.leg] && record != nil && drive.Ready(record)
	})
}

// part is the part of the plan to which an export belongs. nvmet has no read-only namespaces and refuses read-only
// devices, so there all exports are writable.
func (p *planner) part(e *wantedExport) *nvmet.Config {
	if p.seen.beside && e.inProcess() {
		return &p.plan.process
	}
	e.readOnly = e.readOnly && p.seen.readOnly
	return &p.plan.exports
}

// namespaces returns the namespaces of an export that can exist now. old is the export as it is.
func (p *planner) namespaces(e wantedExport, old nvmet.Subsystem, taken map[block.LegID]block.NQN) (all []nvmet.Namespace) {
	object, n := "export "+e.GetNqn(), block.NQN(e.GetNqn())
	for _, w := range e.namespaces {
		if other, ok := taken[w.leg]; ok && !nvmet.Shares(other, n) {
			p.problem(object, exporting, "leg %v is exported by %s", w.leg, other)
			continue
		}
		ns := p.namespace(e, w)
		// An existing export stays even if its drive has trouble: the host decides what an I/O
		// error means, and removing the namespace would only add another one.
		if cause := cmp.Or(p.notYet(e, w), p.elsewhere(e, w)); cause != "" && !slices.Contains(old.Namespaces, ns) {
			p.problem(object, exporting, "leg %v: %s", w.leg, cause)
			continue
		}
		taken[w.leg] = n
		all = append(all, ns)
	}
	return all
}

// namespace is a namespace of an export as it should be.
func (p *planner) namespace(e wantedExport, w wantedNamespace) nvmet.Namespace {
	return nvmet.Namespace{NSID: w.nsid, Device: p.legPath(w.leg, e.readOnly), UUID: w.uuid, NGUID: w.uuid, Enabled: true}
}

// offer adds an export to a part of a plan, at all of its portals.
func offer(by *nvmet.Config, s nvmet.Subsystem, e wantedExport) {
	by.Subsystems = append(by.Subsystems, s)
	if e.keys != (nvmet.Keys{}) {
		if by.Keys == nil {
			by.Keys = map[block.NQN]nvmet.Keys{}
		}
		by.Keys[e.host] = e.keys
	}
	for i := range by.Ports {
		port := &by.Ports[i]
		port.Subsystems = append(port.Subsystems, nvmet.LinkTo(s.NQN))
	}
}

// identify gives a wanted export its controller ids: those that it has, or others if it is to be replaced. It is
// not replaced as long as one of its namespaces could not be made again.
func (p *planner) identify(e wantedExport, s *nvmet.Subsystem, old nvmet.Subsystem) {
	ids := s.IDs()
	if old.IDs().Successor() {
		ids = old.IDs()
	}
	if next, asked := p.seen.replacing[s.NQN]; asked && !e.stays {
		ids = next.IDs
		for _, w := range e.namespaces {
			if cause := p.notYet(e, w); cause != "" && len(old.Namespaces) > 0 {
				p.problem("export "+e.GetNqn(), "replace", "leg %v: %s", w.leg, cause)
				ids = old.IDs()
			}
		}
	}
	s.CntlidMin, s.CntlidMax = ids.Min, ids.Max
}

// notYet says why a leg cannot be exported yet at an epoch.
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

// admissions determines which floors hold, and raises those that are wanted higher. A floor is
// recorded only when nothing below it is left in nvmet, and it holds only when it is on the label
// of every usable drive that has a leg of the volume.
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

// exportedBelow names something through which a host of an epoch below the given one may still
// write to v; empty if there is nothing.
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
	// A host of an older epoch that takes a checkpoint makes the list forget what others wrote.
	for _, n := range p.seen.listed {
		if volume, e, _, _, err := block.ParseSubsystemNQN(n); err == nil && volume == v && e < epoch {
			return fmt.Sprintf("the lists of export %s are still served", n)
		}
	}
	return ""
}

// recorded is the epoch that every usable drive with a leg of v has on its label; asked, if there
// is no such drive.
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

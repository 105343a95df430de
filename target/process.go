// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"errors"
	"maps"
	"path/filepath"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/figures"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/nvmet"
	"weft.dev/weft/target/userspace"
)

// The kernel has no tables for legs in trees, nor for those with checksums. Beside the kernel's target, the
// agent's process serves these legs, at portals of their own:
//
//	leg                       mapped by              exported by
//	-------------------------------------------------------------------------------
//	plain                     device mapper          nvmet, at the node's portals
//	in a tree, and nobody     device mapper, see     nvmet, at the node's portals
//	writes it                 userspace.Rows
//	in a tree, or checked     package userspace      package userspace, at Portal.Process
//
// An export is by one of the two as a whole, since hosts reach all legs of a volume here through one subsystem. So
// the process also serves a plain leg of a volume that has another one in a tree. The manager says which of the two
// a leg is for, since it tells hosts where to find it, and knows what nobody writes. The agent plans over both as over one; what each of the two
// should have is apart in a plan, since their trees are apart.
//
// The exports of the process end with it, and those of the kernel do not.

// processPortals are where a process serves beside the kernel, whose portals are given.
func processPortals(portals []block.Portal) (all []block.Portal) {
	taken := map[block.Portal]bool{}
	for _, p := range portals {
		taken[socketOf(p)] = true
		if lists, ok := p.Lists(); ok {
			taken[socketOf(lists)] = true
		}
	}
	for _, p := range portals {
		if own, ok := p.Process(); ok && !taken[socketOf(own)] {
			taken[socketOf(own)] = true
			all = append(all, own)
		}
	}
	return all
}

// kernelAndProcess serves in the kernel what that can serve, and the rest from this process.
func kernelAndProcess(c Config, hungry func()) (kernel, error) {
	m, err := newMachine(c, hungry, true)
	if err != nil {
		return kernel{}, err
	}
	return withProcess(realKernel(c), m, userDrives{m.Drives, sensors{c.Root}}), nil
}

// withProcess returns the data path in which m serves beside the kernel's k. Both have their legs on drives.
func withProcess(k kernel, m *userspace.Machine, drives hardware) kernel {
	inKernel := k
	k.hardware = drives
	k.rows = m.Drives.InKernel(func() (userspace.KernelMapper, error) {
		opened, err := inKernel.mapper()
		if err != nil {
			return nil, err
		}
		return opened.(userspace.KernelMapper), nil
	})
	k.mapper = func() (mapper, error) { return bothMappers{k.rows, m.Legs}, nil }
	k.names = bothNames{inKernel.names, m.Legs}
	if c := inKernel.counting; c != nil {
		k.counting = &counting{legs: bothFigures(c.legs, m.Legs.Figures), drive: c.drive}
	}
	k.process = func() (exporter, error) { return m.Exports.OpenTree() }
	k.integrity = true
	k.inProcess(m)
	return k
}

// inProcess takes from m what a process does for its exports.
func (k *kernel) inProcess(m *userspace.Machine) {
	k.close, k.paths, k.refusals, k.settle = m.Close, m.Exports.SetPaths, m.Exports.Refusals, m.Exports.Settle
	k.keep = func(e *Estate) (err error) {
		e.listeners, err = m.Exports.Keep()
		e.controllers = m.Pass()
		return err
	}
	k.losses = m.Drives.Unnoted
	k.adopt = func(e Estate) error {
		losses, err := e.losses()
		m.Drives.Adopt(losses, e.held())
		m.Exports.Adopt(e.listeners, e.controllers)
		return err
	}
}

// newMachine makes what serves from this process. shared: beside the kernel.
func newMachine(c Config, hungry func(), shared bool) (*userspace.Machine, error) {
	locks := filepath.Join("/", c.Root, "dev/weft")
	if c.FilesOnly { // as in the agent's own lock
		locks = ""
	}
	return userspace.New(userspace.Config{
		Root: c.Root, Files: c.Files, FilesOnly: c.FilesOnly, Listen: c.Listen, Medium: c.Medium, Calls: c.Calls, Label: c.Label, Hungry: hungry,
		LossDir: filepath.Join("/", c.Root, "dev/weft/losses"), Log: c.Log, Locks: locks, Shared: shared,
	})
}

// bothMappers changes a leg where it is mapped. It maps new ones in the kernel; see mapLeg.process for others.
type bothMappers struct {
	kernel  mapper
	process *userspace.Legs
}

func (m bothMappers) Devices(prefix string) ([]dm.State, error) {
	inKernel, err := m.kernel.Devices(prefix)
	if err != nil {
		return nil, err
	}
	own, err := m.process.Devices(prefix)
	return append(inKernel, own...), err
}

func (m bothMappers) Do(s dm.Step) error {
	if m.process.Has(s.Device.Name) {
		return m.process.Do(s)
	}
	return m.kernel.Do(s)
}

// bothNames names each leg where it is mapped.
type bothNames struct {
	kernel  naming
	process *userspace.Legs
}

func (n bothNames) List() (map[block.LegID]string, error) {
	all, err := n.kernel.List()
	if err != nil {
		return nil, err
	}
	for id := range all {
		if n.process.Has(dmPrefix + id.String()) { // a name that an earlier data path has left
			delete(all, id)
		}
	}
	own, err := n.process.List()
	for id, node := range own {
		if n.process.Has(dmPrefix + id.String()) {
			all[id] = node
		}
	}
	return all, err
}

func (n bothNames) Set(id block.LegID, node string) error {
	if node == "" {
		return errors.Join(n.kernel.Set(id, ""), n.process.Set(id, ""))
	}
	if n.process.Has(dmPrefix + id.String()) {
		return errors.Join(n.kernel.Set(id, ""), n.process.Set(id, node))
	}
	return errors.Join(n.process.Set(id, ""), n.kernel.Set(id, node))
}

func bothFigures(of ...func() (map[block.LegID]figures.Figures, error)) func() (map[block.LegID]figures.Figures, error) {
	return func() (map[block.LegID]figures.Figures, error) {
		all := map[block.LegID]figures.Figures{}
		for _, read := range of {
			some, err := read()
			if err != nil {
				return nil, err
			}
			maps.Copy(all, some)
		}
		return all, nil
	}
}

// kernelLegsOf are those of the mapped legs that the kernel has mapped.
func kernelLegsOf(mapped map[block.LegID]dm.State) map[block.LegID]dm.State {
	if mapped == nil {
		return nil
	}
	out := map[block.LegID]dm.State{}
	for id, s := range mapped {
		if !userspace.Ours(s.Number) {
			out[id] = s
		}
	}
	return out
}

// ---- exports ----

// readExports reads what the two parts export, or the only one.
func (r *reconciler) readExports(ctx context.Context, s *seen) error {
	c, busy, err := observeExports(ctx, &r.exports)
	if err != nil || r.process == nil {
		s.exports, s.kernel, s.busy = c, c, busy
		return err
	}
	own, ownBusy, err := observeExports(ctx, r.process)
	if err != nil {
		return err
	}
	all := merged(*c, *own)
	s.exports, s.kernel, s.process, s.parts = &all, c, own, partsOf(*c, *own)
	s.busy = func(n block.NQN) bool { return busy(n) || ownBusy(n) }
	return nil
}

// merged is two configurations as one.
func merged(a, b nvmet.Config) nvmet.Config {
	out := nvmet.Config{
		Subsystems: append(a.Subsystems[:len(a.Subsystems):len(a.Subsystems)], b.Subsystems...),
		Ports:      append(a.Ports[:len(a.Ports):len(a.Ports)], b.Ports...),
		Hosts:      append(a.Hosts[:len(a.Hosts):len(a.Hosts)], b.Hosts...),
		Keys:       maps.Clone(a.Keys),
	}
	for n, k := range b.Keys {
		if out.Keys == nil {
			out.Keys = map[block.NQN]nvmet.Keys{}
		}
		out.Keys[n] = k
	}
	return out
}

// inKernel reports whether a mapped leg is in the kernel, where legs do not depend on a tree that is open.
func (p *planner) inKernel(s dm.State) bool { return p.seen.beside && !userspace.Ours(s.Number) }

// processHas reports whether the process has mapped a leg.
func (p *planner) processHas(id block.LegID) bool {
	s, mapped := p.seen.mapped[id]
	return mapped && userspace.Ours(s.Number)
}

// kernels reports whether the kernel is to serve a leg, and not the process beside it.
func (p *planner) kernels(w wantedLeg) bool { return p.seen.beside && !w.GetProcess() }

// misplaced reports whether a leg is mapped in the kernel and is for the process, or the reverse, as after a
// change of the target's data path. One that is exported stays until it is not.
func (p *planner) misplaced(w wantedLeg, s dm.State) bool {
	return p.seen.beside && p.seen.exports != nil && userspace.Ours(s.Number) != w.GetProcess() &&
		len(exporters(*p.seen.exports, p.legPath(w.id, false), p.legPath(w.id, true))) == 0
}

// An export changes hands when the first snapshot of a plain leg is to be taken, since only the process can have the
// leg in a tree, and back when the leg is plain again. It ends in one part, which waits for what is in the drives,
// before it begins in the other, so no write of the old connection lands after one of the new. In between its host
// waits. So that this is short, the host is asked to choose the time: told of other portals, it asks for the change
// beside the kernel (lists.offer), and gets its answer when it can connect there.

// changeAfter is how long an export waits for its host before it changes hands. A host that has lost its path asks at
// once, too; one without an agent that runs keeps its path for so long, and by then the manager has given up the
// snapshot for which the leg was to change.
const changeAfter = 2 * time.Minute

// partOf is the part of the node that serves an export; SamePart if none does.
func (s seen) partOf(n block.NQN) block.ServedBy { return s.parts[n] }

// partsOf says which exports are in which part.
func partsOf(kernel, process nvmet.Config) map[block.NQN]block.ServedBy {
	parts := map[block.NQN]block.ServedBy{}
	for _, s := range kernel.Subsystems {
		parts[s.NQN] = block.InKernel
	}
	for _, s := range process.Subsystems {
		parts[s.NQN] = block.InProcess
	}
	return parts
}

// wantedPart is the part that an export is for.
func (e wantedExport) wantedPart() block.ServedBy {
	if e.GetProcess() {
		return block.InProcess
	}
	return block.InKernel
}

// changes reports whether an export is there in the other part than that which is to have it.
func (s seen) changes(e wantedExport) bool {
	has := s.partOf(block.NQN(e.GetNqn()))
	return has != block.SamePart && has != e.wantedPart()
}

// changeHands reports whether an export ends now in the part that has it. If it is to change and its time has not
// come, it stays.
func (p *planner) changeHands(e *wantedExport) (ends bool) {
	n := block.NQN(e.GetNqn())
	_, asked := p.seen.replacing[n]
	changes := p.seen.changes(*e)
	if (changes || asked || e.GetProcess()) && p.seen.asks {
		// A host may ask at any time, also for what it does not know to be done, and the connection on which it
		// has asked is not to end.
		offer(&p.plan.asked, e.subsystem(), *e)
	}
	if !changes {
		return false
	}
	ready := !slices.ContainsFunc(e.namespaces, func(w wantedNamespace) bool { return p.notYet(*e, w) != "" })
	if p.awaited(*e) {
		p.plan.awaiting = append(p.plan.awaiting, n)
		ready = false
	}
	if p.seen.asks && p.seen.patient(n) && !(asked && ready) {
		e.stays = true
		return false
	}
	p.problem("export "+e.GetNqn(), exporting, "it is still served by %v", p.seen.partOf(n))
	return true
}

// awaited reports whether another host has a leg of an export, and has still time to ask: the leg is in one part as a
// whole, so this host would wait for that one.
func (p *planner) awaited(e wantedExport) bool {
	return slices.ContainsFunc(p.want.exports, func(o wantedExport) bool {
		n := block.NQN(o.GetNqn())
		_, asked := p.seen.replacing[n]
		shares := slices.ContainsFunc(o.namespaces, func(w wantedNamespace) bool {
			return slices.ContainsFunc(e.namespaces, func(x wantedNamespace) bool { return x.leg == w.leg })
		})
		return n != block.NQN(e.GetNqn()) && shares && !asked && p.seen.changes(o) && p.seen.patient(n)
	})
}

// between reports whether an export changes hands and is to be whole when its host finds it again.
func (p *planner) between(e wantedExport) bool {
	_, asked := p.seen.replacing[block.NQN(e.GetNqn())]
	return asked && p.seen.patient(block.NQN(e.GetNqn()))
}

// ends notes an export that has ended in one part and is not there in the other yet: it has not been given up.
func (p *planner) ends(e wantedExport) {
	s := e.subsystem()
	for _, w := range e.namespaces {
		s.Namespaces = append(s.Namespaces, p.namespace(e, w))
	}
	p.plan.between = append(p.plan.between, s)
}

// elsewhere says that a leg is still mapped in the other part than that which is to export it; empty if not.
func (p *planner) elsewhere(e wantedExport, w wantedNamespace) string {
	if s, mapped := p.seen.mapped[w.leg]; mapped && p.seen.beside && userspace.Ours(s.Number) != e.inProcess() {
		return "it is still mapped in another place"
	}
	return ""
}

// pbPortals are portals as a report says them.
func pbPortals(portals []block.Portal) (all []*pb.Portal) {
	for _, p := range portals {
		all = append(all, portalMessage(p))
	}
	return all
}

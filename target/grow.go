// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"errors"
	"io/fs"
	"slices"

	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/nvmet"
)

// A leg grows while hosts use it, from the inside out. Each step is seen to be done before the
// next: the record gets more extents, they are zeroed, the record says so, the device grows, nvmet
// reads the device's size again. Only then is the new size reported. Until then the leg serves with
// its old size.

// exportedNamespace is a namespace of a leg in nvmet.
type exportedNamespace struct {
	nqn block.NQN
	ns  nvmet.Namespace
}

// resize is a namespace whose device may be larger than nvmet knows.
type resize struct {
	exportedNamespace
	size block.Size
}

func (r resize) step() nvmet.Step { return nvmet.Revalidate(r.nqn, r.ns) }

// confirmed is the size of a leg that hosts may rely on: that of the volume. Hosts are told a
// larger size once every leg has reported it.
func confirmed(w wantedLeg) block.Size {
	layout := drive.Layout(w.GetVolume().GetLayout())
	if layout.Check() != nil {
		return 0
	}
	return layout.LegSize(block.Size(w.GetVolume().GetSizeBytes()))
}

// legSize is the size that a leg's device should have: the wanted size, as far as it is zeroed. A
// device never shrinks below what is mapped, and grows in one step.
func legSize(w wantedLeg, record *pb.LegLabel, mapped block.Size) block.Size {
	wanted, zeroed := block.Size(w.GetSizeBytes()), drive.Zeroed(record)
	mapped = min(mapped, zeroed)
	if mapped > 0 && mapped >= confirmed(w) && zeroed < wanted {
		return mapped
	}
	return max(min(wanted, zeroed), mapped)
}

// mapLeg orders what the leg's device and its name still lack, and returns how much of the leg is
// usable now.
func (p *planner) mapLeg(w wantedLeg, d driveSeen, record *pb.LegLabel) block.Size {
	if p.seen.mapped == nil || p.seen.names == nil {
		return 0
	}
	var got []dm.State
	state, exists := p.seen.mapped[w.id]
	if exists {
		got = append(got, state)
	}
	if exists && p.misplaced(w, state) {
		p.order(mapLeg{leg: w.id, step: dm.Step{Op: dm.OpRemove, Device: state.Device()}})
		return 0
	}
	deviceOf := func(record *pb.LegLabel, size block.Size) []dm.Device {
		table := legDevice(d.number, record, w.id, size)
		return []dm.Device{{Name: dmPrefix + w.id.String(), UUID: dmPrefix + w.id.String(), Table: table, Udev: dm.UdevInner}}
	}
	device := func(size block.Size) []dm.Device { return deviceOf(record, size) }
	size := legSize(w, record, state.Table.Size())
	if exists && !p.inKernel(state) && d.trees[record.GetTreeId()].Err != "" { // all I/O fails; opened again, the tree may work
		p.order(mapLeg{leg: w.id, step: dm.Step{Op: dm.OpReload, Device: device(size)[0]}})
		return 0
	}
	for _, s := range dm.Diff(got, device(size)) {
		p.order(mapLeg{w.id, s, s.Op == dm.OpCreate && w.GetProcess()})
	}
	fits := func(as *pb.LegLabel) bool { return len(dm.Diff(got, deviceOf(as, state.Table.Size()))) == 0 }
	if !exists || !fits(record) && !fits(otherWay(record)) {
		return 0
	}
	if node := dm.NodePath(state.Number); p.seen.names[w.id] != node {
		p.order(nameLeg{w.id, node})
		return 0
	}
	return state.Table.Size()
}

// otherWay is the record of a leg with a tree over its own extents as it is before the tree is recorded,
// or as if the tree still were. A device that is still so serves the same bytes.
func otherWay(record *pb.LegLabel) *pb.LegLabel {
	if record.GetTreeId() == "" || drive.Mapped(record) {
		return record
	}
	other := proto.CloneOf(record)
	if other.Image = pb.ImageKind_IMAGE_KIND_BASED; drive.Based(record) {
		other.Image = pb.ImageKind_IMAGE_KIND_PLAIN
	}
	return other
}

// usable returns how much of a leg's mapped size hosts can use. It orders nvmet to read the size
// again where nvmet may not know all of it.
func (p *planner) usable(w wantedLeg, mapped block.Size) block.Size {
	if p.seen.exports == nil {
		return min(mapped, confirmed(w))
	}
	size := mapped
	for _, x := range namespacesOf(*p.seen.exports, p.legPath(w.id, false), p.legPath(w.id, true)) {
		if p.seen.knownSize(x) < mapped {
			p.plan.resizes = append(p.plan.resizes, resize{x, mapped})
			size = min(mapped, confirmed(w))
		}
	}
	return size
}

// namespacesOf returns our enabled namespaces on any of the devices.
func namespacesOf(c nvmet.Config, devices ...string) (found []exportedNamespace) {
	for _, s := range c.Subsystems {
		for _, ns := range s.Namespaces {
			if s.NQN.Ours() && ns.Enabled && slices.Contains(devices, ns.Device) {
				found = append(found, exportedNamespace{s.NQN, ns})
			}
		}
	}
	return found
}

// sizes are the sizes that nvmet is known to have read, by namespace. They are empty when the agent
// starts; nvmet then reads the size of every device again.
type sizes map[exportedNamespace]block.Size

// revalidate makes nvmet read the size of devices that may have grown, and reports whether it did.
// A kernel without the attribute reads the size whenever a host asks.
func (r *reconciler) revalidate(ctx context.Context, s seen, resizes []resize) bool {
	done := false
	for _, x := range resizes {
		in := &r.exports
		if s.process != nil {
			if _, ours := s.process.Subsystem(x.nqn); ours {
				in = r.process
			}
		}
		e, err := in.get()
		if err != nil {
			continue
		}
		n, failures := e.Apply(ctx, []nvmet.Step{x.step()}, patience)
		if n == 0 && len(failures) > 0 && !errors.Is(failures[0].Err, fs.ErrNotExist) {
			r.failures = append(r.failures, failures...)
			continue
		}
		r.sizes[x.exportedNamespace] = x.size
		done = true
	}
	return done
}

// forget drops the sizes of namespaces that are gone.
func (s sizes) forget(c nvmet.Config) {
	there := map[exportedNamespace]bool{}
	for _, x := range c.Subsystems {
		for _, ns := range x.Namespaces {
			there[exportedNamespace{x.NQN, ns}] = true
		}
	}
	for x := range s {
		if !there[x] {
			delete(s, x)
		}
	}
}

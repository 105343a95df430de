// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"errors"
	"io/fs"
	"slices"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/nvmet"
)

// A leg grows while hosts use it, outwards, each step seen to be done before the
// next: its record has more extents, they are zeroed, the record says so, its device
// is as large, nvmet has looked at the device again. Only then is the new size
// reported. Until then the leg serves on with the size that it had.

// space is a namespace of a leg in nvmet.
type space struct {
	nqn block.NQN
	ns  nvmet.Namespace
}

// resize is a namespace whose device is larger than nvmet may know.
type resize struct {
	space
	size block.Size
}

func (r resize) step() nvmet.Step { return nvmet.Revalidate(r.nqn, r.ns) }

// confirmed is the size of a leg that hosts may count on: that of the volume. They
// are told of a larger one when every leg has reported it.
func confirmed(w wantedLeg) block.Size {
	l := w.GetVolume().GetLayout()
	layout := block.Layout{Stripes: int(l.GetStripes()), Copies: int(l.GetCopies()), Chunk: block.Size(l.GetChunkBytes())}
	if layout.Check() != nil {
		return 0
	}
	return layout.LegSize(block.Size(w.GetVolume().GetSizeBytes()))
}

// legSize is how large a leg's device is to be: what is wanted, as far as it is
// zeroed. What has been mapped stays: a device is never made smaller, and larger
// only once.
func legSize(w wantedLeg, record *pb.LegLabel, mapped block.Size) block.Size {
	wanted, zeroed := block.Size(w.GetSizeBytes()), drive.Zeroed(record)
	mapped = min(mapped, zeroed)
	if mapped > 0 && mapped >= confirmed(w) && zeroed < wanted {
		return mapped
	}
	return max(min(wanted, zeroed), mapped)
}

// mapLeg orders what is missing of the leg's device and its name, and says how much
// of the leg can be used as it is now.
func (p *planner) mapLeg(w wantedLeg, d driveSeen, record *pb.LegLabel) block.Size {
	if p.seen.mapped == nil || p.seen.names == nil {
		return 0
	}
	var got []dm.State
	state, exists := p.seen.mapped[w.id]
	if exists {
		got = append(got, state)
	}
	device := func(size block.Size) []dm.Device {
		table := legTable(d.number, drive.Segments(record.GetExtents(), size))
		return []dm.Device{{Name: dmPrefix + w.id.String(), UUID: dmPrefix + w.id.String(), Table: table, Udev: dm.UdevInner}}
	}
	size := legSize(w, record, state.Table.Size())
	for _, s := range dm.Diff(got, device(size)) {
		p.order(mapLeg{w.id, s})
	}
	if !exists || len(dm.Diff(got, device(state.Table.Size()))) > 0 {
		return 0
	}
	if node := dm.NodePath(state.Number); p.seen.names[w.id] != node {
		p.order(nameLeg{w.id, node})
		return 0
	}
	return state.Table.Size()
}

// told is how much of a leg hosts can use, of what is mapped, and orders that nvmet
// looks again where it may not know all of that.
func (p *planner) told(w wantedLeg, mapped block.Size) block.Size {
	if p.seen.exports == nil {
		return min(mapped, confirmed(w))
	}
	size := mapped
	for _, x := range spaces(*p.seen.exports, p.legPath(w.id, false), p.legPath(w.id, true)) {
		if p.seen.told(x) < mapped {
			p.plan.resizes = append(p.plan.resizes, resize{x, mapped})
			size = min(mapped, confirmed(w))
		}
	}
	return size
}

// spaces are the enabled namespaces of ours with one of the devices.
func spaces(c nvmet.Config, devices ...string) (found []space) {
	for _, s := range c.Subsystems {
		for _, ns := range s.Namespaces {
			if s.NQN.Ours() && ns.Enabled && slices.Contains(devices, ns.Device) {
				found = append(found, space{s.NQN, ns})
			}
		}
	}
	return found
}

// sizes are those that nvmet is known to know, by namespace. It is empty when the
// agent begins: nvmet then looks again at every device.
type sizes map[space]block.Size

// revalidate has nvmet look again at devices that may have grown, and reports
// whether it did. Without the attribute it looks whenever a host asks.
func (r *reconciler) revalidate(ctx context.Context, e exporter, resizes []resize) bool {
	done := false
	for _, x := range resizes {
		n, failures := e.Apply(ctx, []nvmet.Step{x.step()}, patience)
		if n == 0 && len(failures) > 0 && !errors.Is(failures[0].Err, fs.ErrNotExist) {
			r.failures = append(r.failures, failures...)
			continue
		}
		r.sizes[x.space] = x.size
		done = true
	}
	return done
}

// forget drops what is known of namespaces that are not there any more.
func (s sizes) forget(c nvmet.Config) {
	there := map[space]bool{}
	for _, x := range c.Subsystems {
		for _, ns := range x.Namespaces {
			there[space{x.NQN, ns}] = true
		}
	}
	for x := range s {
		if !there[x] {
			delete(s, x)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/nvmet"
	"weft.dev/weft/target/nvmet/memfs"
	"weft.dev/weft/target/userspace"
)

// besideKernel: the kernel serves plain legs, and the process those with checksums. It stands for [Kernel] in
// tests that are about both.
const besideKernel Datapath = "kernel and process"

// withProcess is the kernel's data path with a process beside it, as the agent has it on a real kernel.
func (w *world) withProcess(gate *gate) kernel {
	m, err := userspace.New(userspace.Config{Root: w.root, Listen: w.listen, Locks: filepath.Join(w.root, "dev/weft"), Shared: true})
	if err != nil {
		w.t.Fatal(err)
	}
	m.Legs = userspace.NewLegs(w.device)
	m.Exports, err = userspace.NewExports(slog.New(slog.DiscardHandler), w.listen, m.Legs.Device)
	if err != nil {
		w.t.Fatal(err)
	}
	w.beside = m.Exports
	inKernel := w.inKernel(gate)
	k := withProcess(inKernel, m, inKernel.hardware)
	k.process = func() (exporter, error) { return nvmet.OpenOn(memfs.Root, gatedFiles{m.Exports, gate}) }
	return k
}

// exportedBeside returns what the process exports beside the kernel.
func (w *world) exportedBeside() nvmet.Config {
	if w.beside == nil {
		return nvmet.Config{}
	}
	return w.read(w.beside.OpenTree)
}

func subsystems(c nvmet.Config) (names []string) {
	for _, s := range c.Subsystems {
		names = append(names, string(s.NQN))
	}
	return names
}

// checked gives the legs of a volume checksums.
func (w wish) checked(volume byte) wish {
	for _, l := range w.Legs {
		if l.GetVolume().GetVolumeId() == volumeID(volume).String() {
			l.Image, l.SizeBytes = pb.ImageKind_IMAGE_KIND_CHECKED, uint64(before)
			l.Process, l.Volume.SizeBytes = true, uint64(before)
			l.Volume.Layout = &pb.Layout{Stripes: 1, Copies: 1, ChunkBytes: uint64(block.DefaultChunk), Integrity: true}
		}
	}
	for _, x := range w.Exports {
		x.Process = x.Process || x.GetVolumeId() == volumeID(volume).String()
	}
	return w
}

func TestTheProcessServesBesideTheKernelWhatThatCannot(t *testing.T) {
	in(t, besideKernel, func(t *testing.T, w *world) {
		w.run()
		both := func() wish { return want().drive(1).volume(1, 1, 1).volume(2, 1, 1).checked(2) }
		w.manager.set(both().TargetWanted)
		r := w.until("both exports", exportsReady(2))
		plain, sums := string(block.SubsystemNQN(volumeID(1), 1, host, "t1")), string(block.SubsystemNQN(volumeID(2), 1, host, "t1"))
		if got := subsystems(w.exportedBeside()); !slices.Equal(got, []string{sums}) {
			t.Errorf("beside the kernel: %v; want %s", got, sums)
		}
		c := w.read(w.tree)
		if len(c.Subsystems) != 1 || string(c.Subsystems[0].NQN) != plain || len(c.Ports) != 1 || c.Ports[0].Portal.Port != 4420 {
			t.Errorf("the kernel exports %v; want %s alone", c, plain)
		}
		if p := r.GetProcessPortals(); len(p) != 1 || p[0].GetAddress() != "192.0.2.1" || p[0].GetPort() != 4422 || r.GetThin() || r.GetSnapshots() || r.GetIntegrity() {
			t.Errorf("reported process portals %v; to older managers: thin %v, snapshots %v, integrity %v", p, r.GetThin(), r.GetSnapshots(), r.GetIntegrity())
		}
		if w.listeners[block.Portal{Transport: block.TCP, Address: "192.0.2.1", Port: 4422}] == nil {
			t.Error("nobody listens at port 4422")
		}
		w.targets.Drain = func(nqn string) { t.Errorf("the kernel's export %s ended", nqn) }
		w.stop()
		w.manager.forget()
		w.run()
		w.until("both exports again", exportsReady(2))
		if got := subsystems(w.exportedBeside()); !slices.Equal(got, []string{sums}) {
			t.Errorf("beside the kernel, after a restart: %v; want %s", got, sums)
		}
		w.manager.set(want().drive(1).volume(1, 1, 1).leg(2, 2, 1, 0).checked(2).admit(2, 2).TargetWanted)
		w.checkAdmissions(w.until("epoch 2 to be admitted", admitted(2, 2)))
		if got := subsystems(w.exportedBeside()); len(got) != 0 {
			t.Errorf("fenced, and still exported: %v", got)
		}
		gone := both().removed(2)
		gone.Exports = gone.Exports[:1]
		w.manager.set(gone.TargetWanted)
		w.until("the leg to be freed", func(r *pb.TargetReport) bool { return len(r.GetDrives()[0].GetLegs()) == 1 })
	})
}

// seesBeside is what an agent with a process beside the kernel finds: a drive, and what the kernel exports.
func seesBeside(d driveSeen, kernel *nvmet.Config) seen {
	return seen{
		drives: map[block.DriveID]driveSeen{driveID(1): d},
		mapped: map[block.LegID]dm.State{}, names: map[block.LegID]string{}, exports: kernel, kernel: kernel, process: &nvmet.Config{}, parts: partsOf(*kernel, nvmet.Config{}), beside: true,
		mapping: func(block.LegID) bool { return false }, zeroing: func(block.LegID) bool { return false }, busy: func(block.NQN) bool { return false },
		knownSize: func(exportedNamespace) block.Size { return block.GiB }, refused: func(block.LegID) string { return "" },
	}
}

// TestAProcessBesideTheKernelMayDieAnywhere cuts an agent short after each of its operations.
func TestAProcessBesideTheKernelMayDieAnywhere(t *testing.T) {
	gone := want().drive(1).leg(1, 1, 1, 0).leg(2, 1, 2, 0).checked(2).removed(1).removed(2)
	crashAnywhere(t, besideKernel, []stage{
		{want().drive(1).volume(1, 1, 1).volume(2, 1, 1).checked(2).TargetWanted, exportsReady(2)},
		{want().drive(1).volume(1, 1, 1).leg(2, 1, 1, 0).checked(2).admit(2, 2).TargetWanted, admitted(2, 2)},
		{want().drive(1).volume(1, 1, 1).volume(2, 1, 2).checked(2).TargetWanted, exportsReady(2)},
		{gone.TargetWanted, func(r *pb.TargetReport) bool { return len(r.GetExports()) == 0 && len(r.GetDrives()[0].GetLegs()) == 0 }},
	})
}

// After a change of the data path, a volume can have a leg in a tree beside a plain one. Both are the process's. A
// plain leg that the kernel has mapped is mapped anew once it is not exported.
func TestLegsOfOneVolumeAreServedByOne(t *testing.T) {
	based := func(w wish) wish { // the first leg has a tree over its extents, and is to keep it
		w.Legs[0].Image, w.Legs[0].TreeId = pb.ImageKind_IMAGE_KIND_BASED, treeID
		w.Legs[1].Volume = w.Legs[0].Volume
		w.Legs[0].Process, w.Legs[1].Process = true, true
		return w
	}
	w := based(want().leg(1, 1, 1, 0).leg(2, 1, 1, 0).leg(3, 1, 1, 0))
	l := &drive.Label{Cluster: cluster, Drive: driveID(1), Size: 4 * block.GiB, Trees: []*pb.TreeLabel{{TreeId: treeID, Formatted: true, Extents: []*pb.Extent{{Start: 1, Count: 1}}}}}
	for i := range w.Legs {
		r := w.recorded(i, true)
		r.Extents = w.Legs[i].GetExtents()
		l.Legs = append(l.Legs, r)
	}
	number := block.DeviceNumber{Major: 253, Minor: 1}
	inKernel := func(leg byte) dm.State {
		name := dmPrefix + legID(leg).String()
		table := legTable(block.DeviceNumber{}, legID(leg), drive.ImageOf(w.Legs[leg-1]), 300*block.MiB)
		return dm.State{Info: dm.Info{Name: name, UUID: name, Number: number, Live: true}, Table: table}
	}
	plan := func(mapped map[block.LegID]dm.State, kernel nvmet.Config) (text []string) {
		s := seesBeside(driveSeen{label: l, trees: map[string]userspace.TreeSeen{treeID: {}}}, &kernel)
		s.mapped = mapped
		for _, o := range makePlan(s, parseWanted(w.TargetWanted), "/dev/weft/leg", nil).orders {
			if m, ok := o.(mapLeg); ok {
				text = append(text, fmt.Sprintf("%c %s process=%v", m.leg.String()[3], m.step.Op, m.process))
			}
		}
		return text
	}
	if got, want := plan(map[block.LegID]dm.State{}, nvmet.Config{}), []string{"1 create process=true", "2 create process=true", "3 create process=false"}; !slices.Equal(got, want) {
		t.Errorf("planned %q, want %q", got, want)
	}
	two := map[block.LegID]dm.State{legID(2): inKernel(2), legID(3): inKernel(3)}
	if got, want := plan(two, nvmet.Config{}), []string{"1 create process=true", "2 remove process=false"}; !slices.Equal(got, want) {
		t.Errorf("with plain legs in the kernel: planned %q, want %q", got, want)
	}
	exported := nvmet.Config{Subsystems: []nvmet.Subsystem{{NQN: block.SubsystemNQN(volumeID(1), 1, host, "t1"), Namespaces: []nvmet.Namespace{{NSID: 1, Device: "/dev/weft/leg/" + legID(2).String(), Enabled: true}}}}}
	if got, want := plan(two, exported), []string{"1 create process=true"}; !slices.Equal(got, want) {
		t.Errorf("with a plain leg that the kernel exports: planned %q, want %q", got, want)
	}
}

// The manager says where a leg is for. If that changes, its export ends in one place before it begins in the other.
func TestALegMovesBetweenTheKernelAndTheProcess(t *testing.T) {
	in(t, besideKernel, func(t *testing.T, w *world) {
		in := func(process bool) *pb.TargetWanted {
			v := want().drive(1).volume(1, 1, 1)
			v.Legs[0].Process, v.Exports[0].Process = process, process
			return v.TargetWanted
		}
		w.run()
		for i, process := range []bool{true, false, true, false} {
			w.manager.forget()
			w.manager.set(in(process))
			generation := uint64(i + 1)
			w.until("the export", func(r *pb.TargetReport) bool { return r.GetGeneration() == generation && exportsReady(1)(r) })
			for range 20 {
				time.Sleep(time.Second)
				kernel, own := len(w.read(w.tree).Subsystems), len(w.exportedBeside().Subsystems)
				if kernel+own != 1 || (own == 1) != process {
					t.Fatalf("for the process %v: the kernel has %d exports, the process %d", process, kernel, own)
				}
			}
			if orders := w.gate.done; orders > 200 {
				t.Fatalf("for the process %v: %d operations so far", process, orders)
			}
		}
	})
}

func TestAStopOfTheProcessConcernsWhatItServes(t *testing.T) {
	for name, c := range map[string]struct {
		machine, sums bool
		all, process  bool // what the reports say
	}{
		"the agent":                  {sums: true, process: true},
		"the machine":                {sums: true, machine: true, all: true},
		"the agent of plain legs":    {},
		"the machine, of plain legs": {machine: true, all: true},
	} {
		t.Run(name, func(t *testing.T) {
			in(t, besideKernel, func(t *testing.T, w *world) {
				w.goodbye = func(context.Context) bool { return c.machine }
				w.run()
				wanted := want().drive(1).volume(1, 1, 1)
				if c.sums {
					wanted = wanted.checked(1)
				}
				w.manager.set(wanted.TargetWanted)
				w.until("the export", exportsReady(1))
				took := w.leave()
				r := w.manager.last
				if r.GetStopping() != c.all || r.GetProcessStops() != c.process {
					t.Errorf("the last report says stopping %v, of the process %v; want %v, %v", r.GetStopping(), r.GetProcessStops(), c.all, c.process)
				}
				if waited := took >= goodbyeFor; waited != (c.all || c.process) {
					t.Errorf("it stopped after %v", took.Round(time.Millisecond))
				}
			})
		})
	}
}

func TestPortalsOfTheProcess(t *testing.T) {
	portals := func(text string) (all []block.Portal) {
		for _, x := range strings.Fields(text) {
			p, err := block.ParsePortal(x)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, p)
		}
		return all
	}
	for kernel, want := range map[string]string{
		"tcp://192.0.2.1":                           "tcp://192.0.2.1:4422",
		"rdma://192.0.2.1#a":                        "tcp://192.0.2.1:4422#a",
		"tcp://192.0.2.1#a rdma://192.0.2.1#a":      "tcp://192.0.2.1:4422#a", // one socket
		"tcp://192.0.2.1#a tcp://198.51.100.1#b":    "tcp://192.0.2.1:4422#a tcp://198.51.100.1:4422#b",
		"tcp://192.0.2.1:4420 tcp://192.0.2.1:4422": "tcp://192.0.2.1:4424", // 4422 is the kernel's
		"tcp://192.0.2.1:4420 tcp://192.0.2.1:4421": "tcp://192.0.2.1:4423", // 4422 has the lists of 4421
		"tcp://192.0.2.1:65534":                     "",
	} {
		if got := processPortals(portals(kernel)); !slices.Equal(got, portals(want)) {
			t.Errorf("beside %s: %v; want %s", kernel, got, want)
		}
	}
}

// What nobody writes is mapped in the kernel, although it is in a tree, and stays there whatever becomes of the tree.
func TestLegsInTreesThatTheKernelMaps(t *testing.T) {
	inKernel := func(frozen bool) wish {
		w := want().volume(1, 1, 1).leg(2, 1, 1, 0).thin()
		for _, l := range w.Legs {
			l.InKernel, l.Volume = frozen, w.Legs[0].Volume
		}
		return w
	}
	number := block.DeviceNumber{Major: 8, Minor: 16}
	mapped := func(leg byte, on block.DeviceNumber) dm.State {
		name := dmPrefix + legID(leg).String()
		return dm.State{Info: dm.Info{Name: name, UUID: name, Number: on, Live: true}, Table: userspace.MappedTable(number, treeID, legID(leg), thinSize)}
	}
	kernels, processs := block.DeviceNumber{Major: 253, Minor: 1}, block.DeviceNumber{Major: 1 << 20, Minor: 1}
	for name, c := range map[string]struct {
		frozen  bool
		mapped  []dm.State
		named   bool
		tree    *userspace.TreeSeen
		refused string
		orders  []string
		exports int
		refuses string // reported
	}{
		"not there yet":                     {frozen: true, orders: []string{"create process=false", "create process=false"}},
		"which the manager does not say":    {},
		"one of two":                        {frozen: true, mapped: []dm.State{mapped(1, kernels)}, named: true, orders: []string{"open tree", "create process=false"}},
		"both":                              {frozen: true, mapped: []dm.State{mapped(1, kernels), mapped(2, kernels)}, named: true, orders: []string{"open tree"}, exports: 1},
		"both, with their tree open":        {frozen: true, mapped: []dm.State{mapped(1, kernels), mapped(2, kernels)}, named: true, tree: &userspace.TreeSeen{Idle: true}, exports: 1},
		"both, with a tree that stopped":    {frozen: true, mapped: []dm.State{mapped(1, kernels), mapped(2, kernels)}, named: true, tree: &userspace.TreeSeen{Idle: true, Err: "a flush has failed"}, orders: []string{"open tree"}, exports: 1},
		"in the process before":             {frozen: true, mapped: []dm.State{mapped(1, processs)}, named: true, tree: &userspace.TreeSeen{}, orders: []string{"remove process=false", "create process=false"}},
		"refused":                           {frozen: true, refused: "its data is in too many pieces", refuses: "its data is in too many pieces"},
		"refused, and written by hosts now": {refused: "its data is in too many pieces", refuses: "its data is in too many pieces"},
	} {
		t.Run(name, func(t *testing.T) {
			w := inKernel(c.frozen)
			l := &drive.Label{Cluster: cluster, Drive: driveID(1), Size: 4 * block.GiB, Trees: []*pb.TreeLabel{{TreeId: treeID, Formatted: true, Extents: []*pb.Extent{{Start: 0, Count: 3}}}}}
			for i := range w.Legs {
				r := w.recorded(i, true)
				r.AdmittedEpoch = 1
				l.Legs = append(l.Legs, r)
			}
			s := seesBeside(driveSeen{label: l, number: number, trees: map[string]userspace.TreeSeen{}}, &nvmet.Config{})
			s.refused = func(block.LegID) string { return c.refused }
			for i, state := range c.mapped {
				s.mapped[legID(byte(i+1))] = state
				s.names[legID(byte(i+1))] = dm.NodePath(state.Number)
			}
			if c.tree != nil {
				s.drives[driveID(1)].trees[treeID] = *c.tree
			}
			e := w.Exports[0]
			e.Namespaces = append(e.Namespaces, &pb.WantedNamespace{Nsid: 2, LegId: w.Legs[1].GetLegId(), Uuid: block.NamespaceUUID(legID(2), 1, w.Legs[1].GetRevision()).String()})
			p := makePlan(s, parseWanted(w.TargetWanted), "/dev/weft/leg", nil)
			var orders []string
			for _, o := range p.orders {
				switch o := o.(type) {
				case mapLeg:
					orders = append(orders, fmt.Sprintf("%s process=%v", o.step.Op, o.process))
				case keepTree:
					orders = append(orders, "open tree")
				}
			}
			if orders = slices.Compact(orders); !slices.Equal(orders, slices.Compact(c.orders)) {
				t.Errorf("planned %q, want %q", orders, c.orders)
			}
			if n := len(p.exports.Subsystems); n != c.exports {
				t.Errorf("the kernel is to export %d subsystems, want %d; problems %v", n, c.exports, p.problems)
			}
			for _, r := range p.legs {
				if r.GetKernelRefuses() != c.refuses || r.GetReady() && r.GetKernelRefuses() != "" {
					t.Errorf("reported %v", r)
				}
			}
		})
	}
}

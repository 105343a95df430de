// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"weft.dev/weft/proto/block"
)

var (
	atKernel  = []block.Portal{{Transport: block.RDMA, Address: "192.0.2.1", Port: 4420}, {Transport: block.TCP, Address: "192.0.2.1", Port: 4420}}
	atProcess = []block.Portal{{Transport: block.TCP, Address: "192.0.2.1", Port: 4422}}
)

// newProcessWorld has targets in the kernel with processes beside it, and on c1 a thin volume and two others,
// one of them with checksums.
func newProcessWorld(t *testing.T) *snapWorld {
	w := newSnapWorld(t, 1)
	for _, x := range w.targets {
		x.says = func(r *TargetReport) {
			besideKernel(r)
		}
	}
	w.settle()
	for _, name := range []block.VolumeName{"plain", "sums"} {
		w.must(CreateVolume{Name: name, Size: block.GiB, Copies: 2, Stripes: 1, Integrity: name == "sums", Seed: w.seed()})
		w.settle()
		w.must(Attach{Volume: string(name), Node: "c1"})
	}
	w.settle()
	return w
}

// besideKernel makes a report that of a target in the kernel with a process beside it.
func besideKernel(r *TargetReport) {
	r.Portals, r.ProcessPortals = atKernel, atProcess
	r.Thin, r.Snapshots, r.PlainSnapshots, r.Copies = false, false, false, false
	r.KernelMaps = AbilityUnknown
}

// links are the legs of a volume as its host is told of them.
func (w *snapWorld) links(volume block.VolumeName) []WantedLink {
	for _, a := range w.s.WantedInitiator("c1").Attachments {
		if a.VolumeName == volume {
			return a.Legs
		}
	}
	w.t.Fatalf("%s is not attached", volume)
	return nil
}

func TestLegsThatTheKernelCannotServeAreReachedAtTheProcess(t *testing.T) {
	w := newProcessWorld(t)
	check := func(when string, want map[block.VolumeName][]block.Portal) {
		t.Helper()
		for name, portals := range want {
			for _, l := range w.links(name) {
				if !slices.Equal(l.Portals, portals) {
					t.Errorf("%s, %s: leg on %s is reached at %v, want %v", when, name, l.Node, l.Portals, portals)
				}
			}
		}
	}
	check("beside the kernel", map[block.VolumeName][]block.Portal{"db1": atProcess, "plain": atKernel, "sums": atProcess})

	if s, _, err := Rebuild(w.now, w.reports(), nil); err != nil {
		t.Error(err)
	} else if n := s.nodes["r0-n0"]; !slices.Equal(n.Portals, atKernel) || !slices.Equal(n.ProcessPortals, atProcess) {
		t.Errorf("after a rebuild of the store a node is reached at %v, and its process at %v", n.Portals, n.ProcessPortals)
	}

	for _, x := range w.targets { // they serve in user space now
		x.says = func(r *TargetReport) { r.Portals, r.Integrity = atProcess, true }
	}
	w.settle()
	check("in user space", map[block.VolumeName][]block.Portal{"db1": atProcess, "plain": atProcess, "sums": atProcess})
}

// Hosts leave out what ends with the process; what the kernel exports stays.
func TestAStopOfAProcessBesideTheKernelConcernsItsLegs(t *testing.T) {
	for name, c := range map[string]struct {
		stops func(*TargetReport)
		plain bool // its leg is to be left out, too
	}{
		"the process": {func(r *TargetReport) { r.ProcessStops = true }, false},
		"all":         {func(r *TargetReport) { r.Stopping = true }, true},
	} {
		t.Run(name, func(t *testing.T) {
			w := newProcessWorld(t)
			node := w.links("db1")[0].Node
			x := w.targets[node]
			before := x.says
			x.says = func(r *TargetReport) { before(r); c.stops(r) }
			w.must(TargetReported{Session: 1, Report: w.targetReport(x)})
			for volume, want := range map[block.VolumeName]bool{"db1": true, "plain": c.plain, "sums": true} {
				for _, l := range w.links(volume) {
					if left := l.LeaveOut != ""; left != (want && l.Node == node) {
						t.Errorf("%s: leg on %s is to be left out: %v (%s)", volume, l.Node, left, l.LeaveOut)
					}
				}
			}
			x.says = before
			w.must(TargetReported{Session: 1, Report: w.targetReport(x)})
			for _, l := range w.links("db1") {
				if l.LeaveOut != "" {
					t.Errorf("its next process reports, and a leg is to be left out: %s", l.LeaveOut)
				}
			}
		})
	}
}

// A manager of an earlier version would not know the record, and would send hosts to the kernel.
func TestNothingIsServedBesideTheKernelBeforeItsLevel(t *testing.T) {
	w := newSnapWorld(t, 1)
	for _, x := range w.targets {
		x.says = besideKernel
	}
	w.s.level = processLevel - 1
	w.settle()
	create := func() error {
		return w.step(CreateVolume{Name: "thin", Size: block.GiB, Copies: 2, Stripes: 1, Thin: true, Seed: w.seed()})
	}
	if err := create(); err == nil || !strings.Contains(err.Error(), "its target serves no thin volumes") {
		t.Errorf("a thin volume at level %d: %v; want a refusal", processLevel-1, err)
	}
	if n := w.s.nodes["r0-n0"]; len(n.ProcessPortals) != 0 {
		t.Errorf("at level %d, %v is recorded", processLevel-1, n.ProcessPortals)
	}
	w.must(RaiseLevel{To: processLevel})
	if n := w.s.nodes["r0-n0"]; !slices.Equal(n.ProcessPortals, atProcess) {
		t.Errorf("at level %d, %v is recorded", processLevel, n.ProcessPortals)
	}
	if err := create(); err != nil {
		t.Error(err)
	}
	w.must(CreateVolume{Name: "plain", Size: block.GiB, Copies: 2, Stripes: 1, Seed: w.seed()})
	w.settle()
	if err := w.take("mon", "plain"); err == nil || !strings.Contains(err.Error(), "not thin") {
		t.Errorf("a snapshot of a plain volume: %v; want a refusal", err)
	}
	if err := w.take("mon", "db1"); err != nil {
		t.Error(err)
	}
}

// When a flush of the process fails, legs that the kernel serves may have lost writes, too, and a flush of their
// hosts can have succeeded since: they are copied whole, and those of the process by what was not flushed.
func TestAFailedFlushOfTheProcessHasTheKernelsLegsCopiedWhole(t *testing.T) {
	w := newProcessWorld(t)
	node := w.links("db1")[0].Node
	x, incarnation := w.targets[node], "1.7"
	x.says = func(r *TargetReport) {
		besideKernel(r)
		r.Drives[0].Incarnation, r.BootID = incarnation, "2" // its cache was switched on before the boot
		r.Devices = []Device{{Path: r.Drives[0].Device, DriveID: r.Drives[0].Drive, VolatileCache: true}}
	}
	w.settle()
	for _, c := range []struct {
		incarnation string
		whole       bool // for the kernel's leg
	}{{"1.8", false}, {"2.8", true}} { // first the disk was away, and then a flush failed
		incarnation = c.incarnation
		w.must(TargetReported{Session: 1, Report: w.targetReport(x)})
		for volume, whole := range map[block.VolumeName]bool{"db1": false, "plain": c.whole} {
			v, err := w.s.Volume(string(volume))
			if err != nil {
				t.Fatal(err)
			}
			for _, l := range v.Legs {
				if l.Node != node {
					continue
				}
				if l.State == LegInSync && !l.Suspect || l.CacheLost == whole {
					t.Errorf("after %s: leg of %s is %v, suspect %v, by its cache %v; want it copied whole: %v", incarnation, volume, l.State, l.Suspect, l.CacheLost, whole)
				}
			}
		}
		w.settle()
	}
}

// newFrozenWorld is newProcessWorld with kernels that can map legs in trees, and a snapshot of db1.
func newFrozenWorld(t *testing.T) *snapWorld {
	w := newProcessWorld(t)
	for _, x := range w.targets {
		x.says = func(r *TargetReport) { besideKernel(r); r.KernelMaps = AbilityYes }
	}
	w.settle()
	if err := w.take("mon", "db1"); err != nil {
		t.Fatal(err)
	}
	w.settle()
	return w
}

// servedBy says for each target of a volume who is to serve it.
func (w *snapWorld) servedBy(volume string) map[block.NodeName]string {
	w.t.Helper()
	by := map[block.NodeName]string{}
	v := w.volume(volume)
	for _, node := range v.targets() {
		wanted := w.s.WantedTarget(node)
		for _, l := range wanted.Legs {
			if l.Volume.ID == v.ID {
				by[node] = fmt.Sprintf("process %v kernel %v", l.Process, l.InKernel)
			}
		}
		for _, x := range wanted.Exports {
			if x.Volume == v.ID {
				by[node] = strings.TrimSuffix(by[node], exported(x)) + exported(x) // to each host
			}
		}
	}
	return by
}

func exported(x WantedExport) string { return fmt.Sprintf(", exported by process %v", x.Process) }

const (
	byKernel   = "process false kernel true, exported by process false"
	byProcess  = "process true kernel false, exported by process true"
	unexported = "process true kernel false"
)

// What nobody writes is served by the kernel from the first host that has it to the last one.
func TestTheKernelServesWhatNobodyWrites(t *testing.T) {
	w := newFrozenWorld(t)
	check := func(when, volume, want string) {
		t.Helper()
		for node, by := range w.servedBy(volume) {
			if by != want {
				t.Errorf("%s, %s at %s: %s; want %s", when, volume, node, by, want)
			}
		}
	}
	check("detached", "db1@mon", unexported)
	for _, host := range []block.NodeName{"c1", "c2"} {
		w.must(Attach{Volume: "db1@mon", Node: host})
		w.settle()
		check("with "+string(host), "db1@mon", byKernel)
	}
	for _, l := range w.links("db1@mon") {
		if !slices.Equal(l.Portals, atKernel) {
			t.Errorf("the leg on %s is reached at %v, want %v", l.Node, l.Portals, atKernel)
		}
	}
	check("which is written", "db1", byProcess)
	if e, err := w.s.Explain("db1@mon"); err != nil || !slices.ContainsFunc(e.Facts, func(s string) bool {
		return strings.Contains(s, "the kernel of "+string(w.volume("db1@mon").Legs[0].Node)+" serves it")
	}) {
		t.Errorf("explained as %v, %v", e.Facts, err)
	}
	w.must(Detach{Volume: "db1@mon", Node: "c1"})
	w.settle()
	check("with c2 alone", "db1@mon", byKernel)
	w.must(Detach{Volume: "db1@mon", Node: "c2"})
	w.settle()
	check("detached again", "db1@mon", unexported)
	w.must(Attach{Volume: "db1@mon", Node: "c1"})
	w.settle()
	check("attached again", "db1@mon", byKernel)
	w.must(Detach{Volume: "db1@mon", Force: true})
	check("taken away", "db1@mon", unexported)

	w.must(Detach{Volume: "db1"})
	w.settle()
	w.must(SealVolume{"db1"})
	w.settle()
	w.must(Attach{Volume: "db1", Node: "c2"})
	w.settle()
	check("sealed", "db1", byKernel)
}

// A leg that the kernel does not map is the process's, then and later.
func TestWhatAKernelRefusesIsTheProcesss(t *testing.T) {
	w := newFrozenWorld(t)
	w.must(Attach{Volume: "db1@mon", Node: "c1"})
	refused := w.volume("db1@mon").Legs[0]
	x := w.targets[refused.Node]
	before := x.says
	x.says = func(r *TargetReport) {
		before(r)
		for i := range r.Legs {
			if l := &r.Legs[i]; l.Leg == refused.ID {
				l.KernelRefuses = "its data is in too many pieces"
			}
		}
	}
	w.settle()
	check := func(when string) {
		t.Helper()
		for node, by := range w.servedBy("db1@mon") {
			if want := map[bool]string{true: byProcess, false: byKernel}[node == refused.Node]; by != want {
				t.Errorf("%s, at %s: %s; want %s", when, node, by, want)
			}
		}
	}
	check("refused")
	w.nextManager()
	w.settle()
	check("with another manager")
	w.must(Detach{Volume: "db1@mon"})
	w.settle()
	w.must(Attach{Volume: "db1@mon", Node: "c1"})
	w.settle()
	check("attached again")
	if e, err := w.s.Explain("db1@mon"); err != nil || !slices.ContainsFunc(e.Facts, func(s string) bool { return strings.Contains(s, "too many pieces") }) {
		t.Errorf("explained as %v, %v", e.Facts, err)
	}
}

// The target's machine has booted another kernel while hosts have the volume.
func TestAKernelThatCannotDoItAnyMore(t *testing.T) {
	w := newFrozenWorld(t)
	w.must(Attach{Volume: "db1@mon", Node: "c1"})
	w.settle()
	l := w.volume("db1@mon").Legs[1]
	x := w.targets[l.Node]
	x.says = func(r *TargetReport) {
		besideKernel(r)
		r.KernelMaps = AbilityNo
		for i := range r.Legs {
			if r.Legs[i].Leg == l.ID {
				r.Legs[i].KernelRefuses = "it cannot: it lacks dm-flakey"
			}
		}
	}
	w.settle()
	if by := w.servedBy("db1@mon")[l.Node]; by != byProcess {
		t.Errorf("it is served by: %s; want %s", by, byProcess)
	}
	x.says = func(r *TargetReport) { besideKernel(r) } // an agent that has just begun does not know yet
	w.must(TargetReported{Session: 1, Report: w.targetReport(x)})
	if w.s.nodes[l.Node].KernelMaps {
		t.Error("the kernel counts as able again")
	}
	x.says = func(r *TargetReport) { besideKernel(r); r.KernelMaps = AbilityYes }
	w.settle()
	w.must(Detach{Volume: "db1@mon"})
	w.settle()
	x.says = func(r *TargetReport) { besideKernel(r) }
	w.must(TargetReported{Session: 1, Report: w.targetReport(x)})
	w.must(Attach{Volume: "db1@mon", Node: "c1"})
	w.settle()
	if by := w.servedBy("db1@mon")[l.Node]; by != byKernel {
		t.Errorf("after another boot and an agent that has just begun, it is served by: %s; want %s", by, byKernel)
	}
}

func TestWhatTheProcessKeeps(t *testing.T) {
	for name, change := range map[string]func(*snapWorld, *Volume, *snapTarget){
		"at an earlier level": func(w *snapWorld, _ *Volume, _ *snapTarget) { w.s.level = kernelMapsLevel - 1 },
		"on a kernel that cannot map it": func(_ *snapWorld, _ *Volume, x *snapTarget) {
			x.says = func(r *TargetReport) { besideKernel(r); r.KernelMaps = AbilityNo }
		},
		"where hosts need another network": func(_ *snapWorld, _ *Volume, x *snapTarget) {
			x.says = func(r *TargetReport) {
				besideKernel(r)
				r.KernelMaps, r.Portals = AbilityYes, []block.Portal{{Transport: block.RDMA, Address: "192.0.2.1", Port: 4420}}
			}
		},
		"a leg that is being copied":  func(_ *snapWorld, v *Volume, _ *snapTarget) { v.Legs[0].Copying = &LegCopy{From: v.Legs[1].ID} },
		"the source of a copy":        func(_ *snapWorld, v *Volume, _ *snapTarget) { v.Legs[1].Copying = &LegCopy{From: v.Legs[0].ID} },
		"a leg that is stale":         func(_ *snapWorld, v *Volume, _ *snapTarget) { v.Legs[0].State = LegStale },
		"a plain leg that has a tree": func(_ *snapWorld, v *Volume, _ *snapTarget) { v.Legs[0].Based = true },
	} {
		t.Run(name, func(t *testing.T) {
			w := newFrozenWorld(t)
			v := w.volume("db1@mon").clone()
			node := v.Legs[0].Node
			change(w, v, w.targets[node])
			w.must(TargetReported{Session: 1, Report: w.targetReport(w.targets[node])})
			if got := w.s.kernelsFor(v, AttachSharedReadOnly); slices.Contains(got, node) {
				t.Errorf("the kernels of %v are to serve it", got)
			}
		})
	}
	w := newFrozenWorld(t)
	if v := w.volume("db1@mon"); len(w.s.kernelsFor(v, AttachSharedReadOnly)) != 2 || len(w.s.kernelsFor(v, AttachSharedBlock)) > 0 || len(w.s.kernelsFor(w.volume("db1"), AttachSharedReadOnly)) > 0 {
		t.Error("the kernels are to serve what hosts write, or not what they only read")
	}
}

// newHandsWorld has targets in the kernel, some with a portal for RDMA, and volumes that are not thin.
func newHandsWorld(t *testing.T, rdma bool) *snapWorld {
	w := newSnapWorldOf(t, 1, false)
	for _, x := range w.targets {
		x.says = func(r *TargetReport) {
			besideKernel(r)
			r.PlainSnapshots = true
			if !rdma {
				r.Portals = atKernel[1:]
			}
		}
	}
	w.settle()
	return w
}

// reached is where a host reaches a volume's legs.
func (w *snapWorld) reached(when string, volume block.VolumeName, want []block.Portal) {
	w.t.Helper()
	for _, l := range w.links(volume) {
		if !slices.Equal(l.Portals, want) {
			w.t.Errorf("%s, the leg of %s on %s is reached at %v, want %v", when, volume, l.Node, l.Portals, want)
		}
	}
}

// A leg that is not thin changes hands with its first snapshot, and back after the last one, while it is in use.
func TestLegsThatAreNotThinChangeHandsForASnapshot(t *testing.T) {
	w := newHandsWorld(t, false)
	w.reached("at first", "db1", atKernel[1:])
	w.mustBe(w.take("mon", "db1"))
	w.settle()
	if snap := w.volume("db1@mon"); snap.State != VolumeReady || len(snap.Legs) != 2 {
		t.Fatalf("the snapshot is %+v", snap)
	}
	w.reached("with a snapshot", "db1", atProcess)
	for node, by := range w.servedBy("db1") {
		if by != byProcess {
			t.Errorf("at %s: %s", node, by)
		}
	}
	w.must(DeleteVolume{Volume: "db1@mon"})
	w.settle()
	w.reached("after the last snapshot", "db1", atKernel[1:])
	for _, l := range w.volume("db1").Legs {
		if l.Based || l.State != LegInSync {
			t.Errorf("a leg is %+v", l)
		}
	}
}

// A snapshot of a leg that is not thin sees that leg's extents, which targets do not pin for the kernel.
func TestASnapshotOverABaseIsNotTheKernels(t *testing.T) {
	w := newHandsWorld(t, false)
	for _, x := range w.targets {
		before := x.says
		x.says = func(r *TargetReport) { before(r); r.KernelMaps = AbilityYes }
	}
	w.settle()
	w.mustBe(w.take("mon", "db1"))
	w.settle()
	w.must(Attach{Volume: "db1@mon", Node: "c2"})
	w.settle()
	if v := w.volume("db1@mon"); len(v.InKernel) > 0 {
		t.Errorf("it is to be served by the kernels of %v", v.InKernel)
	}
}

// A host that may have a path over RDMA does not follow to the process, which has none.
func TestALegWithAPathOverRDMADoesNotChangeHandsInUse(t *testing.T) {
	w := newHandsWorld(t, true)
	if err := w.take("mon", "db1"); err == nil || !strings.Contains(err.Error(), "may reach the target over RDMA") {
		t.Errorf("a snapshot of a volume in use: %v", err)
	}
	w.must(Detach{Volume: "db1"})
	w.settle()
	w.mustBe(w.take("mon", "db1"))
	w.settle()
	w.must(Attach{Volume: "db1", Node: "c1"})
	w.settle()
	w.reached("with a snapshot", "db1", atProcess)
	w.must(DeleteVolume{Volume: "db1@mon"})
	w.settle()
	w.reached("after the last snapshot", "db1", atProcess)
	for _, l := range w.s.volumeView(w.volume("db1")).Legs {
		if !strings.Contains(l.Reason, "goes back to the kernel later, since host c1") {
			t.Errorf("the leg on %s: %q", l.Node, l.Reason)
		}
	}
	w.must(Detach{Volume: "db1"})
	w.settle()
	w.must(Attach{Volume: "db1", Node: "c1"})
	w.settle()
	w.reached("attached anew", "db1", atKernel)
}

// Agents of earlier versions do not know how, and not every kernel has what hosts ask through.
func TestLegsDoNotChangeHandsWhereThatIsNotKnown(t *testing.T) {
	w := newHandsWorld(t, false)
	w.s.level = handsLevel - 1
	if err := w.take("mon", "db1"); err == nil || !strings.Contains(err.Error(), "the upgrade to level 11 is not finished") {
		t.Errorf("before the level: %v", err)
	}
	w.s.level = handsLevel
	for _, x := range w.targets {
		before := x.says
		x.says = func(r *TargetReport) { before(r); r.PlainSnapshots = false }
	}
	w.settle()
	if err := w.take("mon", "db1"); err == nil || !strings.Contains(err.Error(), "a kernel that cannot list writes") {
		t.Errorf("without lists of writes: %v", err)
	}
}

// A store that is restored from a backup takes from the labels that legs have trees: the kernel cannot have them.
func TestARestoredStoreKnowsThatLegsHaveTrees(t *testing.T) {
	w := newHandsWorld(t, false)
	before := w.s.Records()
	w.mustBe(w.take("mon", "db1"))
	w.settle()
	w.lose("backup", before)
	w.settle()
	for _, l := range w.volume("db1").Legs {
		if based, names, known := w.s.based(&l); known && (based || names) != l.Based {
			t.Errorf("of the leg on %s the label says based %v, names a tree %v, and the record %v", l.Node, based, names, l.Based)
		}
	}
}

// What a host is to prefer for a volume stays until it is detached, also when the host boots.
func TestAnAttachmentKeepsItsPreference(t *testing.T) {
	w := newHandsWorld(t, false)
	w.must(Detach{Volume: "db1"})
	w.settle()
	near := Preference{Rail: "b", GPU: "3"}
	attach := Attach{Volume: "db1", Node: "c1", Prefers: near}
	for want, in := range map[string]Attach{
		"must be a number or a PCI address": {Volume: "db1", Node: "c1", Prefers: Preference{GPU: "the third"}},
		"must be the name of a rail":        {Volume: "db1", Node: "c1", Prefers: Preference{Rail: "b\n"}},
	} {
		if err := w.step(in); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", in, err, want)
		}
	}
	w.s.level = preferenceLevel - 1
	if err := w.step(attach); err == nil || !strings.Contains(err.Error(), "this begins with level 13") {
		t.Errorf("before its level: %v", err)
	}
	w.s.level = preferenceLevel
	w.must(attach)
	w.settle()
	have := func(when string) {
		t.Helper()
		for _, a := range w.s.WantedInitiator("c1").Attachments {
			if a.Prefers != near {
				t.Errorf("%s, the host is told to prefer %v, want %v", when, a.Prefers, near)
			}
		}
		e, err := w.s.Explain("db1")
		if want := "host c1 prefers rail b and the networks near to GPU 3 for it"; err != nil || !slices.Contains(e.Facts, want) {
			t.Errorf("%s, explain says %q, %v", when, e.Facts, err)
		}
	}
	have("attached")
	w.must(attach)
	w.must(Attach{Volume: "db1", Node: "c1"}) // as it is
	have("attached again")
	attach.Prefers.GPU = "4"
	if err := w.step(attach); err == nil || !strings.Contains(err.Error(), "near to GPU 4") {
		t.Errorf("another preference while it is attached: %v", err)
	}
	epoch := w.volume("db1").Epoch
	w.hosts["c1"].boot++
	w.settle()
	if v := w.volume("db1"); v.Epoch == epoch {
		t.Error("the host has not booted")
	}
	have("the host has booted")
}

// A volume gets several paths only if late writes are accepted, from the next grant on; a grant keeps what it began with.
// Meanwhile its legs do not change hands: the host would not follow with all of its paths.
func TestSeveralPathsAreThoseOfAGrant(t *testing.T) {
	w := newHandsWorld(t, false)
	refused := func(in UpdateVolume, want string) {
		t.Helper()
		if err := w.step(in); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", in, err, want)
		}
	}
	refused(UpdateVolume{Volume: "db1", Paths: 2}, "may replace a newer one that was acknowledged")
	refused(UpdateVolume{Volume: "db1", Paths: MostPaths + 1, LateWrites: true}, "must be 1 to 2")
	w.s.level = pathsLevel - 1
	refused(UpdateVolume{Volume: "db1", Paths: 2, LateWrites: true}, "this begins with level 12")
	w.s.level = pathsLevel
	w.must(UpdateVolume{Volume: "db1", Paths: 1}) // as it is

	have := func(when string, want int) {
		t.Helper()
		for _, l := range w.links("db1") {
			if l.Paths != want {
				t.Errorf("%s, the host has %d paths to the leg on %s, want %d", when, l.Paths, l.Node, want)
			}
		}
		for node := range w.targets {
			for _, x := range w.s.WantedTarget(node).Exports {
				if x.Volume == w.volume("db1").ID && x.Paths != want {
					t.Errorf("%s, %s admits %d paths, want %d", when, node, x.Paths, want)
				}
			}
		}
	}
	w.must(UpdateVolume{Volume: "db1", Paths: 2, LateWrites: true})
	have("in the old grant", 0)
	w.must(Detach{Volume: "db1"})
	w.settle()
	w.must(Attach{Volume: "db1", Node: "c1"})
	w.settle()
	have("in the next grant", 2)
	w.must(UpdateVolume{Volume: "db1", Paths: 1})
	w.settle()
	have("in the same grant", 2)
	if err := w.take("mon", "db1"); err == nil || !strings.Contains(err.Error(), "uses 2 paths at a time") {
		t.Errorf("a snapshot of legs that cannot change hands: %v", err)
	}
	w.must(Detach{Volume: "db1"})
	w.settle()
	w.must(Attach{Volume: "db1", Node: "c1"})
	w.settle()
	have("in the last grant", 0)
}

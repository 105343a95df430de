// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"slices"
	"strings"
	"testing"

	"weft.dev/weft/proto/block"
)

var (
	atKernel  = []block.Portal{{Transport: block.RDMA, Address: "192.0.2.1", Port: 4420}}
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

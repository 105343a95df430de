// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/drivepolicy"
)

// policy makes a policy: policy fast model=sim min=10GiB max=20GiB on=rack=r1 class=fast; policy fast
// delete ends it.
func (s *script) policy(a args) string {
	if a.word(1) == "delete" {
		return s.step(DeleteDrivePolicy{a.word(0)})
	}
	p := drivepolicy.Policy{Name: a.word(0), Model: a.options["model"], MinSize: s.size(a.options["min"]), MaxSize: s.size(a.options["max"])}
	if key, value, ok := strings.Cut(a.options["on"], "="); ok {
		p.Nodes = map[string]string{key: value}
	}
	if class := a.options["class"]; class != "" {
		p.Labels = map[string]string{"class": class}
	}
	return s.step(CreateDrivePolicy{p})
}

// plug puts another device into a target: plug t1 /dev/nvme7n1 size=10GiB model=sim serial=s7
func (s *script) plug(a args) string {
	t := s.targets[a.word(0)]
	t.devices = append(t.devices, Device{Path: a.word(1), Model: a.options["model"], Serial: a.options["serial"], Size: s.size(a.options["size"]), BlockSize: 512})
	return s.reportTarget(t)
}

func (s *script) listDrives(args) (text string) {
	for _, d := range s.state.Drives("") {
		text += fmt.Sprintf("%s %s %s %s\n", d.Node, d.Device, d.State, pairs(d.Labels))
	}
	return text
}

// policyWorld is a random cluster of devices with and without something on them, with what policies
// are expected to leave alone.
type policyWorld struct {
	t       *testing.T
	rng     *rand.Rand
	s       *State
	now     time.Time
	session uint64
	targets map[block.NodeName]*simTarget
	evicted map[drivepolicy.Identity]bool
	drives  map[block.DriveID]bool
	seeds   byte
	taken   int
}

// dirty puts something on a device, or takes it away.
func (w *policyWorld) dirty(d *Device) {
	if !d.DriveID.IsZero() {
		return // only Weft writes to its drives
	}
	d.Signatures, d.Holders, d.ReadOnly, d.Refused, d.Unread = nil, nil, false, "", ""
	switch w.rng.IntN(9) {
	case 0:
		d.Signatures, d.Refused = []string{"ext4"}, "carries ext4"
	case 1:
		d.Signatures = []string{"data at 12288"}
	case 2:
		d.Holders = []string{"dm-0"}
	case 3:
		d.ReadOnly = true
	case 4:
		d.Refused = "has partitions: nvme0n1p1"
	case 5:
		d.Unread, d.Refused = "it does not answer", "it does not answer"
	}
}

func identityOf(d Device) drivepolicy.Identity { return drivepolicy.IdentityOf(d.WWID, d.Serial) }

// mayTake says why no policy may take a device; empty if one may.
func (w *policyWorld) mayTake(node block.NodeName, d Device) string {
	count := 0
	for _, t := range w.targets {
		for _, other := range t.devices {
			if identityOf(other) == identityOf(d) {
				count++
			}
		}
	}
	switch {
	case len(d.Signatures)+len(d.Holders) > 0 || d.ReadOnly || d.Refused != "" || d.Unread != "" || !d.DriveID.IsZero():
		return "something is on it"
	case identityOf(d) == "":
		return "nothing tells it from others"
	case count != 1:
		return "it is seen more than once"
	case w.evicted[identityOf(d)]:
		return "it was evicted"
	}
	return ""
}

// step applies an input and checks each drive that it adds. byHand: an operator asks for one.
func (w *policyWorld) step(in Input, byHand bool) {
	w.t.Helper()
	if _, err := w.s.Step(w.now, in); err != nil && !byHand {
		w.t.Fatalf("%T: %v", in, err)
	}
	for _, d := range w.s.Drives("") {
		if w.drives[d.ID] {
			continue
		}
		w.drives[d.ID] = true
		if byHand {
			continue
		}
		w.taken++
		dev, ok := findDevice(w.targets[d.Node].devices, d.Device)
		if why := w.mayTake(d.Node, dev); !ok || why != "" {
			w.t.Fatalf("a policy took %s on %s, but %s: %+v", d.Device, d.Node, why, dev)
		}
	}
}

func (w *policyWorld) report(t *simTarget) {
	w.step(TargetReported{Session: w.session, Report: t.report()}, false)
}

func (w *policyWorld) seed() Seed {
	w.seeds++
	return Seed{1, w.seeds}
}

// act does one random thing.
func (w *policyWorld) act() {
	w.now = w.now.Add(time.Second)
	t := w.targets[block.NodeName(fmt.Sprintf("t%d", 1+w.rng.IntN(3)))]
	d := &t.devices[w.rng.IntN(len(t.devices))]
	switch w.rng.IntN(8) {
	case 0, 1, 2:
		w.dirty(d)
		w.report(t)
	case 3:
		t.comply(w.s.WantedTarget(t.name))
		w.report(t)
	case 4:
		if drives := w.s.Drives(t.name); len(drives) > 0 {
			drive := drives[w.rng.IntN(len(drives))]
			if len(w.s.DrivePolicies()) > 0 && drive.State != DriveRemoving {
				w.evicted[drivepolicy.IdentityOf(drive.WWID, drive.Serial)] = true
			}
			w.step(EvictDrive{drive.ID}, false)
		}
	case 5:
		before := len(w.s.Drives(""))
		w.step(AddDrive{Node: t.name, Device: d.Path, Seed: w.seed()}, true)
		if len(w.s.Drives("")) > before {
			delete(w.evicted, identityOf(*d))
		}
	case 6:
		name := fmt.Sprintf("p%d", w.rng.IntN(3))
		w.step(DeleteDrivePolicy{name}, false)
		if len(w.s.DrivePolicies()) == 0 {
			clear(w.evicted)
		}
	case 7:
		models := []string{"", "sim", "s*", "other"}
		p := drivepolicy.Policy{Name: fmt.Sprintf("p%d", w.rng.IntN(3)), Model: models[w.rng.IntN(len(models))]}
		w.step(DeleteDrivePolicy{p.Name}, false)
		if len(w.s.DrivePolicies()) == 0 {
			clear(w.evicted)
		}
		w.step(CreateDrivePolicy{p}, false)
	}
}

func TestAPolicyNeverTakesADeviceWithAnythingOnIt(t *testing.T) {
	taken := 0
	for seed := range uint64(150) {
		s := newScript(t)
		w := &policyWorld{
			t: t, rng: rand.New(rand.NewPCG(seed, 1)), s: s.state, now: s.now, session: s.session,
			targets: map[block.NodeName]*simTarget{}, evicted: map[drivepolicy.Identity]bool{}, drives: map[block.DriveID]bool{},
		}
		for i := range 3 {
			sim := newSimTarget(block.NodeName(fmt.Sprintf("t%d", i+1)), nil, 10<<30, 10<<30, 20<<30, 20<<30)
			sim.devices[0].Serial = ""           // as a loop device
			sim.devices[1].Serial = "seen twice" // as a disk that all nodes see
			for j := range sim.devices {
				w.dirty(&sim.devices[j])
			}
			w.targets[sim.name] = sim
		}
		for _, sim := range w.targets {
			w.report(sim)
		}
		for range 120 {
			w.act()
		}
		taken += w.taken
	}
	if taken < 300 {
		t.Errorf("policies took %d devices, want more for a test", taken)
	}
}

func TestPoliciesBeginWithTheirLevel(t *testing.T) {
	s := newScript(t)
	s.state.level = block.FirstLevel
	if _, err := s.state.Step(s.now, CreateDrivePolicy{drivepolicy.Policy{Name: "all"}}); err == nil || !strings.Contains(err.Error(), "level") {
		t.Errorf("CreateDrivePolicy at the first level = %v, want that it is refused because of the level", err)
	}
}

func TestThereIsABoundOnPolicies(t *testing.T) {
	s := newScript(t)
	for i := range drivepolicy.Most {
		if out := s.run(fmt.Sprintf("policy p%d", i)); !strings.HasPrefix(out, "drive.policy-created") {
			t.Fatalf("policy %d: %s", i, out)
		}
	}
	if out := s.run("policy more"); !strings.HasPrefix(out, "resource exhausted") {
		t.Errorf("one more: %s, want resource exhausted", out)
	}
}

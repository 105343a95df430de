// SPDX-License-Identifier: Apache-2.0

package explore

import (
	"fmt"
	"slices"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/evidence"
)

// target is a target's machine at one moment: its one drive with one leg of the volume, and what
// it exports. It carries out a wanted state in one step.
type target struct {
	Index int
	Boot  int
	// The newest order that it has acted on outlives a boot, what it has reached does not.
	Term, Generation, Reached uint64
	Cached                    bool // the drive may lose writes that were not flushed
	Drive                     block.DriveID
	Labelled                  bool // the leg has its label
	Label                     evidence.LegLabel
	Size                      block.Size
	Admitted                  block.Epoch // on the label
	Exports                   []export    // by NQN
}

// export is a subsystem with its namespace.
type export struct {
	NQN   block.NQN
	Epoch block.Epoch
	Host  block.Host
	UUID  block.UUID
}

func targetName(i int) block.NodeName { return [targets]block.NodeName{"t1", "t2", "t3"}[i] }

func (t *target) boot() string { return fmt.Sprintf("t%d-boot-%d", t.Index+1, t.Boot) }

func portalOf(i int) block.Portal {
	return block.Portal{Transport: block.TCP, Address: fmt.Sprintf("192.0.2.%d", i+1), Port: block.DefaultPort}
}

// obeys reports whether the target acts on an order: not if it has acted on a later one.
func (t *target) obeys(w cluster.TargetWanted) bool {
	return w.Term > t.Term || w.Term == t.Term && w.Generation >= t.Generation
}

// comply returns the target after it has carried out a wanted state.
func (t target) comply(w cluster.TargetWanted) target {
	if !t.obeys(w) {
		return t
	}
	t.Term, t.Generation, t.Reached = w.Term, w.Generation, w.Generation
	for _, d := range w.Drives {
		t.Drive = d.Drive
	}
	for _, l := range w.Legs {
		t.want(l)
	}
	t.fence(w)
	return t
}

func (t *target) want(l cluster.WantedLeg) {
	if t.Labelled && (t.Label.Revision > l.Revision || t.Label.Volume.Generation > l.Volume.Generation) {
		return // an old wanted state
	}
	t.Labelled, t.Size = true, l.Size
	t.Label = evidence.LegLabel{
		Leg: l.Leg, Column: l.Column, Copy: l.Copy, Image: l.Image, Zeroed: true,
		Revision: l.Revision, AdmittedEpoch: t.Admitted, Volume: l.Volume, Boot: t.boot(),
	}
}

// fence removes the exports that are not wanted or below the admission, admits, and exports.
func (t *target) fence(w cluster.TargetWanted) {
	for _, a := range w.Admissions {
		t.Admitted = max(t.Admitted, a.Epoch)
		t.Label.AdmittedEpoch = t.Admitted
	}
	t.Exports = nil
	for _, x := range w.Exports {
		if x.Epoch < t.Admitted {
			continue
		}
		for _, n := range x.Namespaces {
			t.Exports = append(t.Exports, export{NQN: x.NQN, Epoch: x.Epoch, Host: x.Host, UUID: n.UUID})
		}
	}
}

// reboot returns the target after its machine has lost its power.
func (t target) reboot() target {
	t.Boot++
	t.Exports, t.Reached = nil, 0
	return t
}

// serves reports whether a leg is exported under an identity.
func (t *target) serves(nqn block.NQN, id block.UUID) bool {
	return slices.ContainsFunc(t.Exports, func(x export) bool { return x.NQN == nqn && x.UUID == id })
}

func (t *target) report() cluster.TargetReport {
	device := cluster.Device{
		Path: "/dev/nvme0n1", Model: "sim", Serial: fmt.Sprintf("s%d", t.Index), Size: 8 * block.GiB, BlockSize: 512,
		VolatileCache: t.Cached, DriveID: t.Drive,
	}
	r := cluster.TargetReport{
		Node: targetName(t.Index), BootID: t.boot(), ClusterID: clusterID, Generation: t.Reached,
		Highest: cluster.Term{Cluster: clusterID, Number: t.Term}, Devices: []cluster.Device{device}, Portals: []block.Portal{portalOf(t.Index)},
	}
	if t.Drive.IsZero() {
		return r
	}
	d := cluster.DriveReport{Drive: t.Drive, Cluster: clusterID, Device: device.Path, Extents: 20}
	if t.Labelled {
		d.Legs = []evidence.LegLabel{t.Label}
		r.Legs = []cluster.LegReport{{Leg: t.Label.Leg, Ready: true, Size: t.Size}}
	}
	r.Drives = []cluster.DriveReport{d}
	if t.Admitted > 0 {
		r.Admissions = []cluster.Admission{{Volume: t.Label.Volume.ID, Epoch: t.Admitted}}
	}
	for _, x := range t.Exports {
		r.Exports = append(r.Exports, cluster.ExportReport{NQN: x.NQN, Ready: true, Legs: []block.LegID{t.Label.Leg}})
	}
	return r
}

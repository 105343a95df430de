// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/evidence"
	"weft.dev/weft/volmgr/image"
)

// simTarget is a target agent with its drives, in memory. It carries out a wanted state at
// once; the test decides when, and whether, it gets one.
type simTarget struct {
	name     block.NodeName
	of       block.ClusterID // of its drives
	labels   map[string]string
	boot     int
	gen      uint64
	devices  []Device
	drives   map[block.DriveID]*simDrive
	admitted map[block.VolumeID]block.Epoch // on the labels: outlives a boot
	exports  map[block.NQN]*simExport       // gone with a boot
	wrong    string                         // the inconsistency in what it was told, if there was one
	slow     bool                           // new extents of legs are zeroed only when zero is called
	unzeroed bool                           // a weakened target: it uses extents that it has not zeroed
	behind   func() bool                    // whether labels cannot be written now; nil: they can
	outlived bool                           // the manager's store may be older than its drives
	rash     bool                           // a weakened target: it maps legs that the manager has not judged
	mute     bool                           // of a version that does not report the sizes of legs
	stopping bool                           // its exports are about to end
	able     Ability                        // to authenticate hosts
	refusals Refusals

	transport block.Transport // of its portal; zero: TCP
}

type simDrive struct {
	device  string
	extents uint32
	error   string
	gone    bool // the device is not there
	// incarnation is the one that it reports; empty: its agent's version reports none.
	incarnation string
	judged      map[block.LegID]string // the incarnation that the manager has judged
	labels      map[block.LegID]evidence.LegLabel
	wanted      map[block.LegID]block.Size
}

type simExport struct {
	volume block.VolumeID
	epoch  block.Epoch
	host   block.Host
	legs   map[block.LegID]block.UUID
}

func newSimTarget(name block.NodeName, labels map[string]string, sizes ...block.Size) *simTarget {
	t := &simTarget{
		name: name, labels: labels, boot: 1, drives: map[block.DriveID]*simDrive{},
		admitted: map[block.VolumeID]block.Epoch{}, exports: map[block.NQN]*simExport{},
	}
	for i, size := range sizes {
		t.devices = append(t.devices, Device{
			Path: fmt.Sprintf("/dev/nvme%dn1", i), Model: "sim", Serial: fmt.Sprintf("%s-%d", name, i), Size: size, BlockSize: 512,
		})
	}
	return t
}

func (t *simTarget) comply(w TargetWanted) {
	t.gen = max(t.gen, w.Generation)
	for _, d := range w.Drives {
		t.wantDrive(d)
	}
	for _, l := range w.Legs {
		t.wantLeg(l)
	}
	t.fence(w)
	for _, x := range w.Exports {
		t.export(x)
	}
}

func (t *simTarget) wantDrive(d WantedDrive) {
	i := slices.IndexFunc(t.devices, func(dev Device) bool { return dev.Path == d.Device })
	switch {
	case i < 0:
	case d.Remove:
		delete(t.drives, d.Drive)
		t.devices[i].DriveID = block.DriveID{}
	case t.drives[d.Drive] == nil:
		t.devices[i].DriveID = d.Drive
		t.devices[i].Signatures = nil
		t.drives[d.Drive] = &simDrive{device: d.Device, extents: uint32(t.devices[i].Size / block.ExtentSize), labels: map[block.LegID]evidence.LegLabel{}, wanted: map[block.LegID]block.Size{}, judged: map[block.LegID]string{}}
	}
}

func (t *simTarget) wantLeg(l WantedLeg) {
	d := t.drives[l.Drive]
	if d == nil {
		return
	}
	if l.Remove {
		delete(d.labels, l.Leg)
		return
	}
	if _, ok := d.labels[l.Leg]; !ok && l.Volume.Generation > 1 && !l.Blank {
		return // a leg that the drive has lost is not carved again
	}
	if d.judged[l.Leg] = l.Incarnation; !t.judged(l.Leg) {
		return
	}
	if !t.carves(d, l) {
		return
	}
	label := evidence.LegLabel{
		Leg: l.Leg, Column: l.Column, Copy: l.Copy, Image: l.Image, Zeroed: true,
		Revision: l.Revision, AdmittedEpoch: t.admitted[l.Volume.ID], Volume: l.Volume,
		Boot: t.bootID(), Incarnation: d.incarnation,
	}
	old, ok := d.labels[l.Leg]
	if ok && t.behind != nil && old.Revision == l.Revision && slices.Equal(old.Extents, l.Extents) && t.behind() {
		d.wanted[l.Leg] = l.Size
		return // it continues with the exports, and tries again
	}
	if ok && (old.ZeroedExtents != 0 || image.Count(l.Extents) > image.Count(old.Extents)) {
		label.ZeroedExtents = old.ZeroedSoFar()
	}
	d.labels[l.Leg] = label
	d.wanted[l.Leg] = l.Size
	if !t.slow {
		t.zero()
	}
}

// carves checks that a leg is wanted where it was and overlaps no other leg. A violation sets
// wrong. A target that has outlived its manager's store only refuses, since an older store
// cannot know better.
func (t *simTarget) carves(d *simDrive, l WantedLeg) bool {
	for id, other := range d.labels {
		moved := id == l.Leg && !l.Continues(other.Image)
		over := id != l.Leg && overlap(l.Extents, other.Extents)
		switch {
		case !moved && !over:
		case t.outlived:
			return false
		case moved:
			t.wrong = fmt.Sprintf("%s is to have leg %v on %v, which was on %v", t.name, l.Leg, l.Extents, other.Extents)
		default:
			t.wrong = fmt.Sprintf("%s is to carve leg %v over leg %v", t.name, l.Leg, id)
		}
	}
	return true
}

// zero fills the new extents of legs with zeroes.
func (t *simTarget) zero() {
	for _, d := range t.drives {
		for id, l := range d.labels {
			l.ZeroedExtents = 0
			d.labels[id] = l
		}
	}
}

// zeroed is how much of a leg holds no data of earlier volumes.
func (t *simTarget) zeroed(leg block.LegID) block.Size {
	for _, d := range t.drives {
		if l, ok := d.labels[leg]; ok {
			return block.Size(l.ZeroedSoFar()) * block.ExtentSize
		}
	}
	return 0
}

// size is the usable size of a leg.
func (t *simTarget) size(leg block.LegID) block.Size {
	for _, d := range t.drives {
		if _, ok := d.labels[leg]; ok && t.unzeroed {
			return d.wanted[leg]
		} else if ok {
			return min(d.wanted[leg], t.zeroed(leg))
		}
	}
	return 0
}

func overlap(a, b []image.Extent) bool {
	for _, x := range a {
		for _, y := range b {
			if x.Start < y.Start+y.Count && y.Start < x.Start+x.Count {
				return true
			}
		}
	}
	return false
}

// fence removes the exports that are not wanted or below the admission, then admits.
func (t *simTarget) fence(w TargetWanted) {
	wanted := map[block.NQN]WantedExport{}
	for _, x := range w.Exports {
		wanted[x.NQN] = x
	}
	for _, a := range w.Admissions {
		t.admitted[a.Volume] = max(t.admitted[a.Volume], a.Epoch)
		for _, d := range t.drives {
			for id, l := range d.labels {
				if l.Volume.ID == a.Volume {
					l.AdmittedEpoch = t.admitted[a.Volume]
					d.labels[id] = l
				}
			}
		}
	}
	for nqn, x := range t.exports {
		if _, ok := wanted[nqn]; !ok || x.epoch < t.admitted[x.volume] {
			delete(t.exports, nqn)
		}
	}
}

func (t *simTarget) export(w WantedExport) {
	if w.Epoch < t.admitted[w.Volume] {
		return // an old wanted state must not lower the admitted epoch
	}
	x := &simExport{volume: w.Volume, epoch: w.Epoch, host: w.Host, legs: map[block.LegID]block.UUID{}}
	for _, n := range w.Namespaces {
		if t.judged(n.Leg) {
			x.legs[n.Leg] = n.UUID
		}
	}
	t.exports[w.NQN] = x
}

// there reports whether a leg's drive is present.
func (t *simTarget) there(leg block.LegID) bool {
	for _, d := range t.drives {
		if _, ok := d.labels[leg]; ok {
			return !d.gone
		}
	}
	return true
}

// judged reports whether the manager has judged a leg at its drive's present incarnation.
func (t *simTarget) judged(leg block.LegID) bool {
	for _, d := range t.drives {
		if t.rash {
			continue
		}
		if judged := d.judged[leg]; judged != "" && judged != d.incarnation {
			return false
		}
	}
	return true
}

// returns brings the drives back with a new incarnation, after they were away.
func (t *simTarget) returns(as string) {
	for _, d := range t.drives {
		d.incarnation = as
		for leg := range d.labels {
			for _, x := range t.exports {
				delete(x.legs, leg)
			}
		}
	}
}

// serves reports whether a leg is exported in a subsystem under an identity.
func (t *simTarget) serves(l WantedLink) bool {
	x := t.exports[l.NQN]
	return x != nil && x.legs[l.Leg] == l.UUID && t.there(l.Leg)
}

func (t *simTarget) reboot() {
	t.boot++
	t.gen = 0
	t.exports = map[block.NQN]*simExport{}
}

func (t *simTarget) bootID() string { return fmt.Sprintf("%s-boot-%d", t.name, t.boot) }

func (t *simTarget) report() TargetReport {
	r := TargetReport{
		Node: t.name, Labels: t.labels, BootID: t.bootID(), ClusterID: t.of, Generation: t.gen, Devices: slices.Clone(t.devices), Stopping: t.stopping, Authenticates: t.able, Refusals: t.refusals,
		Portals: []block.Portal{{Transport: cmp.Or(t.transport, block.TCP), Address: "192.0.2.1", Port: block.DefaultPort}},
	}
	for _, id := range sorted(t.drives) {
		d := t.drives[id]
		if d.gone {
			r.Devices = slices.DeleteFunc(r.Devices, func(dev Device) bool { return dev.DriveID == id })
			continue
		}
		report := DriveReport{Drive: id, Device: d.device, Extents: d.extents, Error: d.error, Incarnation: d.incarnation}
		for _, leg := range sorted(d.labels) {
			report.Legs = append(report.Legs, d.labels[leg])
			report := LegReport{Leg: leg, Ready: true, Size: t.size(leg)}
			if t.mute {
				report.Size = 0
			}
			r.Legs = append(r.Legs, report)
		}
		r.Drives = append(r.Drives, report)
	}
	for _, v := range sorted(t.admitted) {
		r.Admissions = append(r.Admissions, Admission{v, t.admitted[v]})
	}
	for _, nqn := range slices.Sorted(maps.Keys(t.exports)) {
		r.Exports = append(r.Exports, ExportReport{NQN: nqn, Ready: true, Legs: sorted(t.exports[nqn].legs)})
	}
	return r
}

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"slices"

	"weft.dev/weft/proto/block"
)

// WantedTarget is everything that a node's target agent is to have. It follows
// from the records alone, so it is the same after Load.
func (s *State) WantedTarget(node block.NodeName) TargetWanted {
	w := TargetWanted{Generation: s.meta.Generation, ClusterID: s.meta.ClusterID}
	for _, d := range s.recordedDrives(node) {
		// A drive that has had its label is not to get another one: if it comes up
		// blank, what it held is lost, and its legs must not pass for in sync.
		if d.State != DriveAdding && d.State != DriveRemoving {
			continue
		}
		w.Drives = append(w.Drives, WantedDrive{
			Drive: d.ID, Device: d.Device, WWID: d.WWID, Serial: d.Serial,
			ForceErase: d.ForceErase, Remove: d.State == DriveRemoving,
		})
	}
	for _, id := range sorted(s.onNode[node]) {
		v := s.volumes[id]
		if v.Restored || v.undecided() {
			continue // its labels may know more than the record
		}
		label, here := v.label(), false
		for _, l := range v.Legs {
			if l.Node == node {
				here = true
				w.Legs = append(w.Legs, s.wantedLeg(v, l, label))
			}
		}
		if here && v.State != VolumeDeleting && v.Epoch > 0 {
			w.Admissions = append(w.Admissions, Admission{v.ID, v.Epoch})
		}
		for _, a := range v.attachments() {
			if x, ok := s.export(v, a, node); ok {
				w.Exports = append(w.Exports, x)
			}
		}
	}
	return w
}

func (s *State) wantedLeg(v *Volume, l Leg, label VolumeLabel) WantedLeg {
	incarnation := ""
	if d := s.drives[l.Drive]; d != nil {
		incarnation = d.Incarnation
	}
	room := block.Size(count(l.Extents)) * block.ExtentSize
	return WantedLeg{
		Leg: l.ID, Drive: l.Drive, Column: l.Column, Copy: l.Copy, Extents: l.Extents,
		Size: min(v.Layout.LegSize(v.planned()), room), Revision: l.Revision, Volume: label, Remove: l.State == LegDeleting,
		Incarnation: incarnation,
	}
}

// label is the volume as the drives keep it, for the day the store is lost. What it
// says of an epoch has to be true until the next one: a label that calls the volume
// clean while it is being granted would say so of what was written since.
func (v *Volume) label() VolumeLabel {
	label := VolumeLabel{
		ID: v.ID, Name: v.Name, Size: v.Size, Layout: v.Layout, Pool: v.Pool, Spread: v.Spread,
		Labels: v.onDrives(), Epoch: v.Epoch, Generation: v.Generation, Created: v.Created.UnixNano(),
		ExpandingTo: v.ExpandingTo, Quiet: v.quiet(), Writer: v.writer(),
	}
	label.Clean = v.Clean && label.Quiet
	for _, l := range v.Legs {
		switch {
		case l.trusted():
			label.InSync = append(label.InSync, l.ID)
		case l.State == LegInSync:
			label.Suspect = append(label.Suspect, l.ID)
		}
	}
	return label
}

// undecided reports whether an operator has to choose a copy of some column. What the
// labels say may help with that, now or after another loss of the store.
func (v *Volume) undecided() bool {
	return v.State == VolumeReady && slices.Contains(v.inSync(), 0)
}

// quiet reports whether nobody has, or is being given, the volume to write at its
// epoch. A host of an earlier one cannot have a leg recorded stale any more.
func (v *Volume) quiet() bool {
	return !slices.ContainsFunc(v.attachments(), func(a *Attachment) bool {
		return a.Mode != AttachSharedReadOnly && (a.Mode.shared() || !a.Left)
	})
}

// writer is the node that was last given the volume to write, or is being; empty if
// it was seen to let go.
func (v *Volume) writer() block.NodeName {
	if v.Attachment != nil && !v.Attachment.Left {
		return v.Attachment.Node
	}
	return v.Holder
}

// open reports whether the volume's legs may be exported: only under a grant
// that was handed out.
func (v *Volume) open() bool { return slices.ContainsFunc(v.attachments(), (*Attachment).handedOut) }

// exported reports whether a leg takes part in the data path. A stale one does
// not: whoever still holds its old identity must find it gone.
func (l *Leg) exported() bool { return l.State == LegInSync || l.State == LegRebuilding }

func (s *State) export(v *Volume, a *Attachment, node block.NodeName) (WantedExport, bool) {
	if !a.exported() {
		return WantedExport{}, false
	}
	x := WantedExport{
		Volume: v.ID, Epoch: v.Epoch, NQN: s.nqn(v, a, node),
		Serial: block.SerialNumber(v.ID), Host: a.Host, ReadOnly: a.Mode == AttachSharedReadOnly,
	}
	for i := range v.Legs {
		// A host is told of a suspect leg, but cannot reach it.
		if l := &v.Legs[i]; l.Node == node && l.exported() && (!l.Suspect || s.guards.suspectServes) {
			x.Namespaces = append(x.Namespaces, WantedNamespace{v.nsid(l), l.ID, v.namespace(l)})
		}
	}
	return x, len(x.Namespaces) > 0
}

// nqn names the subsystem through which a target exports a volume by one grant.
func (s *State) nqn(v *Volume, a *Attachment, target block.NodeName) block.NQN {
	if s.guards.nameOutlivesGrant {
		return block.SubsystemNQN(v.ID, a.Epoch, a.Host, target)
	}
	return block.SharedNQN(v.ID, a.Epoch, a.Grant, a.Host, target)
}

// nsid is the leg's place in its subsystem. It turns with the revision, so that a
// write which an old connection of a stale leg still had in flight finds no
// namespace instead of the one that is being rebuilt. All stay below 1024, the
// most that nvmet tells a host of.
func (v *Volume) nsid(l *Leg) uint32 {
	const places = block.MaxStripes * 4
	return uint32(1 + l.Column*4 + l.Copy + places*int(l.Revision%3))
}

func (v *Volume) namespace(l *Leg) block.UUID {
	return block.NamespaceUUID(l.ID, v.Epoch, l.Revision)
}

// WantedInitiator is everything that a node's initiator agent is to have.
func (s *State) WantedInitiator(node block.NodeName) InitiatorWanted {
	w := InitiatorWanted{Generation: s.meta.Generation, ClusterID: s.meta.ClusterID}
	for _, id := range sorted(s.onNode[node]) {
		v := s.volumes[id]
		if a := v.attachmentOf(node); a != nil && a.exported() {
			w.Attachments = append(w.Attachments, s.wantedAttachment(v, a))
		}
	}
	return w
}

func (s *State) wantedAttachment(v *Volume, a *Attachment) WantedAttachment {
	w := WantedAttachment{
		Volume: v.ID, VolumeName: v.Name, Size: v.Size, Layout: v.Layout, LegSize: v.Layout.LegSize(v.Size),
		Epoch: v.Epoch, Grant: a.Grant, Mode: a.Mode, BootID: a.BootID, Equalize: a.Equalize, Detach: a.State == Detaching,
	}
	for i := range v.Legs {
		l := &v.Legs[i]
		if !l.exported() {
			continue
		}
		link := WantedLink{
			Leg: l.ID, Column: l.Column, Copy: l.Copy, State: l.State, Revision: l.Revision, Node: l.Node,
			NQN: s.nqn(v, a, l.Node), NSID: v.nsid(l), UUID: v.namespace(l), CopyAll: l.CopyAll,
			Reborn: l.Reborn,
		}
		if n := s.nodes[l.Node]; n != nil {
			link.Portals = n.Portals
		}
		if d := s.drives[l.Drive]; d != nil {
			link.WriteThrough = !d.VolatileCache
		}
		w.Legs = append(w.Legs, link)
	}
	return w
}

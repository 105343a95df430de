// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/evidence"
	"weft.dev/weft/volmgr/image"
)

// TargetReport is the whole observed state of a target agent's node.
type TargetReport struct {
	Node       block.NodeName
	Labels     map[string]string
	BootID     string
	Version    string
	Kernel     string
	Portals    []block.Portal
	ClusterID  block.ClusterID // zero if the node's drives belong to none yet
	Generation uint64          // newest wanted generation that the agent has acted on
	Highest    Term            // highest term that it has acted on; zero: none, or an old version
	Devices    []Device
	Drives     []DriveReport
	Legs       []LegReport
	Admissions []Admission
	Exports    []ExportReport
	Problems   []Problem
}

// Term identifies the reign of one manager of a cluster.
type Term struct {
	Cluster block.ClusterID
	Number  uint64
}

// DriveReport is a drive with a Weft label, and the content of the label.
type DriveReport struct {
	Drive           block.DriveID
	Cluster         block.ClusterID
	Device          string
	Extents         uint32
	LabelGeneration uint64
	Error           string
	Incarnation     string // changes when writes that were not flushed may be lost
	Legs            []evidence.LegLabel
}

// cut reports whether the machine has booted, or the drive has a new incarnation, since the
// leg's label was written.
func (d *DriveReport) cut(l evidence.LegLabel, boot string) bool {
	known := l.Incarnation != "" && d.Incarnation != ""
	return l.Boot != boot || known && l.Incarnation != d.Incarnation
}

// LegReport is a leg as its target sees it.
type LegReport struct {
	Leg    block.LegID
	Ready  bool // carved, zeroed, mapped
	Zeroed block.Size
	Size   block.Size // usable, also by the hosts that it is exported to
	Error  string
}

// Admission is a target's promise that no host can write to a volume through its node at an
// epoch below Epoch, and that its labels say so.
type Admission struct {
	Volume block.VolumeID
	Epoch  block.Epoch
}

// ExportReport is one subsystem that a target has.
type ExportReport struct {
	NQN   block.NQN
	Ready bool
	Legs  []block.LegID
}

// TargetWanted is the whole wanted state of a target agent's node.
type TargetWanted struct {
	Term       uint64
	Generation uint64
	ClusterID  block.ClusterID
	Drives     []WantedDrive
	Legs       []WantedLeg
	Admissions []Admission
	Exports    []WantedExport
}

// WantedDrive is a drive to label or, with Remove, to erase. A drive that has its label is
// in use and no longer listed.
type WantedDrive struct {
	Drive      block.DriveID
	Device     string
	WWID       string
	Serial     string
	ForceErase string
	Remove     bool
}

// WantedLeg is a leg to carve and keep or, with Remove, to free.
type WantedLeg struct {
	Incarnation string // of the drive when the leg was last judged: in another one the leg is not used
	Leg         block.LegID
	Drive       block.DriveID
	Column      int
	Copy        int
	image.Image
	Size     block.Size
	Revision uint64
	Volume   evidence.VolumeLabel
	Remove   bool
}

// WantedExport is one subsystem to export.
type WantedExport struct {
	Volume     block.VolumeID
	Epoch      block.Epoch
	NQN        block.NQN
	Serial     string
	Host       block.Host
	ReadOnly   bool
	Namespaces []WantedNamespace
}

// WantedNamespace is one leg inside a subsystem.
type WantedNamespace struct {
	NSID uint32
	Leg  block.LegID
	UUID block.UUID
}

// InitiatorReport is the whole observed state of an initiator agent's node.
type InitiatorReport struct {
	Node        block.NodeName
	Labels      map[string]string
	BootID      string
	Version     string
	Kernel      string
	Host        block.Host
	ClusterID   block.ClusterID // zero if the machine belongs to none yet
	Generation  uint64
	Highest     Term // as in TargetReport
	Attachments []AttachmentReport
	Problems    []Problem
	Evidence    []evidence.Note
}

// Phase is the progress of an attachment on its host.
type Phase string

// The phases.
const (
	PhaseConnecting      Phase = "CONNECTING"
	PhaseEqualizing      Phase = "EQUALIZING"
	PhaseServing         Phase = "SERVING"
	PhaseStalled         Phase = "STALLED"
	PhaseDetaching       Phase = "DETACHING"
	PhaseDetachedClean   Phase = "DETACHED_CLEAN"
	PhaseDetachedUnclean Phase = "DETACHED_UNCLEAN"
)

// AttachmentReport is how a host sees an attachment.
type AttachmentReport struct {
	Volume      block.VolumeID
	Epoch       block.Epoch
	Grant       uint64
	Phase       Phase
	Device      string
	WaitingFor  string
	Legs        []LegLink
	ResyncDone  block.Size
	ResyncTotal block.Size
	Size        block.Size // of the device
	Number      string     // of the device: "253:4"
	GaveUp      GaveUp     // zero: it has not
}

// GaveUp reports that a host has failed its device, or released it in another way than
// asked, and does not serve the volume again at that epoch.
type GaveUp struct {
	Why        string // for people
	WritesLost bool   // acknowledged writes may be lost
	Reason     string // its word; empty if the host did not give one
}

// LinkState is how well a host reaches a leg; empty if it is not known.
type LinkState string

// The states of a link.
const (
	LinkLive       LinkState = "LIVE"
	LinkConnecting LinkState = "CONNECTING"
	LinkLost       LinkState = "LOST"
	LinkAbsent     LinkState = "ABSENT"
)

// LegLink is how a host sees one leg.
type LegLink struct {
	Leg      block.LegID
	Revision uint64
	State    LinkState
	Device   string
	Error    string
}

// InitiatorWanted is the whole wanted state of an initiator agent's node.
type InitiatorWanted struct {
	Term        uint64
	Generation  uint64
	ClusterID   block.ClusterID
	Attachments []WantedAttachment
}

// WantedAttachment is a volume that the host is to serve or, with Detach, to release.
type WantedAttachment struct {
	Volume     block.VolumeID
	VolumeName block.VolumeName
	Size       block.Size
	Layout     block.Layout
	LegSize    block.Size
	Epoch      block.Epoch
	Grant      uint64
	Mode       AttachMode
	BootID     string
	Equalize   bool
	Detach     bool
	Legs       []WantedLink
}

// WantedLink is one leg, in sync or rebuilding, of an attachment.
type WantedLink struct {
	Leg          block.LegID
	Column       int
	Copy         int
	State        LegState
	Revision     uint64
	Node         block.NodeName
	NQN          block.NQN
	NSID         uint32
	UUID         block.UUID
	Portals      []block.Portal
	WriteThrough bool
	CopyAll      bool
	Reborn       uint64
}

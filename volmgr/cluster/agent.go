// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"slices"

	"weft.dev/weft/proto/block"
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
	Generation uint64          // newest wanted generation that was acted on
	Devices    []Device
	Drives     []DriveReport
	Legs       []LegReport
	Admissions []Admission
	Exports    []ExportReport
	Problems   []Problem
}

// DriveReport is a drive with a label of ours, and what the label says.
type DriveReport struct {
	Drive           block.DriveID
	Cluster         block.ClusterID
	Device          string
	Extents         uint32
	LabelGeneration uint64
	Error           string
	Incarnation     string // changes when what was not flushed may be lost
	Legs            []LegLabel
}

// LegLabel is a leg as it stands on a drive.
type LegLabel struct {
	Leg     block.LegID
	Column  int
	Copy    int
	Extents []Extent
	Zeroed  bool
	// ZeroedExtents is how many of the extents, from the first on, are zeroed or
	// hold data; 0 means all if Zeroed.
	ZeroedExtents uint32
	Revision      uint64
	AdmittedEpoch block.Epoch
	Volume        VolumeLabel
	// Boot of the machine in which Volume was last written here; empty if not known.
	Boot string
	// Incarnation of the drive in which that was; empty if not known.
	Incarnation string
}

// VolumeLabel is a volume's definition as it stands on drives.
type VolumeLabel struct {
	ID         block.VolumeID
	Name       block.VolumeName
	Size       block.Size
	Layout     block.Layout
	Pool       string
	Spread     string
	Labels     map[string]string
	Epoch      block.Epoch
	Generation uint64
	InSync     []block.LegID
	Suspect    []block.LegID // in sync, but they may have lost what only a cache held
	Clean      bool
	Created    int64 // Unix nanoseconds, 0 if not known
	// ExpandingTo is the size that the legs are growing to; 0 if they are not.
	ExpandingTo block.Size
	// Quiet: nobody has, or is being given, the volume to write at Epoch.
	Quiet bool
	// Writer is the node that was last given it to write, or is being.
	Writer block.NodeName
}

// inSync reports whether a leg is in sync by the label, suspect or not.
func (l *VolumeLabel) inSync(leg block.LegID) bool {
	return slices.Contains(l.InSync, leg) || slices.Contains(l.Suspect, leg)
}

// LegReport is a leg as its target sees it.
type LegReport struct {
	Leg    block.LegID
	Ready  bool // carved, zeroed, mapped
	Zeroed block.Size
	Size   block.Size // that can be used, also by the hosts it is exported to
	Error  string
}

// Admission is the target's word that nothing of a volume can be written
// through its node at an epoch below Epoch, and that this is on its labels.
type Admission struct {
	Volume block.VolumeID
	Epoch  block.Epoch
}

// ExportReport is one subsystem that stands on a target.
type ExportReport struct {
	NQN   block.NQN
	Ready bool
	Legs  []block.LegID
}

// TargetWanted is the whole wanted state of a target agent's node.
type TargetWanted struct {
	Generation uint64
	ClusterID  block.ClusterID
	Drives     []WantedDrive
	Legs       []WantedLeg
	Admissions []Admission
	Exports    []WantedExport
}

// WantedDrive is a drive to take in or, with Remove, to give back. One that has
// its label is in use and no longer wanted.
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
	Incarnation string // of the drive, up to which the leg is judged: on another one it is not used
	Leg         block.LegID
	Drive       block.DriveID
	Column      int
	Copy        int
	Extents     []Extent
	Size        block.Size
	Revision    uint64
	Volume      VolumeLabel
	Remove      bool
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
	Attachments []AttachmentReport
	Problems    []Problem
	Evidence    []Evidence
}

// Evidence is what a host has durably noted of a mirrored volume that it could
// write: at Epoch, these legs hold every write that it was told is done. It is noted
// before the host goes on without a leg, and after a leg was recorded in sync, so it
// never names too many.
type Evidence struct {
	Volume block.VolumeID
	Epoch  block.Epoch
	Legs   []EvidenceLeg
}

// EvidenceLeg is a leg under the revision that the host had it at.
type EvidenceLeg struct {
	Leg      block.LegID
	Revision uint64
}

// Phase is how far a host is with an attachment.
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

// GaveUp is a host's word that it has failed its device, or let go of it otherwise
// than asked, and does not take the volume up again at that epoch.
type GaveUp struct {
	Why        string
	WritesLost bool // what was acknowledged may be gone
}

// LegLink is how a host sees one leg.
type LegLink struct {
	Leg      block.LegID
	Revision uint64
	State    string // "live", "connecting", "lost", "absent"
	Device   string
	Error    string
}

// InitiatorWanted is the whole wanted state of an initiator agent's node.
type InitiatorWanted struct {
	Generation  uint64
	ClusterID   block.ClusterID
	Attachments []WantedAttachment
}

// WantedAttachment is a volume that the host is to have or, with Detach, to let go.
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

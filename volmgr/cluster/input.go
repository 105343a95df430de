// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"time"

	"weft.dev/weft/proto/block"
)

// Input is something that happened: a request, a report or a tick.
type Input interface {
	apply(*tx) (view, error)
}

// Seed is 32 random bytes that come with an input. Ids and choices are drawn from it, so
// the same input always has the same outcome.
type Seed [32]byte

// SetNodeLabels replaces the labels that an operator gave a node. Result: Node.
type SetNodeLabels struct {
	Node   block.NodeName
	Labels map[string]string
}

// ConfirmNodeDead records that a machine is off, so that nothing waits for it any more.
// Refused while an agent of it is online. Result: Node.
type ConfirmNodeDead struct{ Node block.NodeName }

// RemoveNode forgets a node that is offline and has no legs or attachments. Result: nil.
type RemoveNode struct{ Node block.NodeName }

// AddDrive adds a device that the node's inventory shows. Result: Drive.
type AddDrive struct {
	Node       block.NodeName
	Device     string
	Labels     map[string]string
	ForceErase string // exactly what the refusal named
	Seed       Seed
}

// SetDriveLabels replaces the labels of a drive. Legs that it holds stay. Result: Drive.
type SetDriveLabels struct {
	Drive  block.DriveID
	Labels map[string]string
}

// EvictDrive removes a drive from the cluster; refused while it holds legs. Result: nil.
type EvictDrive struct{ Drive block.DriveID }

// CreatePool names a set of drives. Result: Pool.
type CreatePool struct {
	Name     string
	Selector map[string]string
}

// DeletePool forgets a pool that no volume uses. Result: nil.
type DeletePool struct{ Name string }

// CreateVolume places a volume and has its legs carved. Result: Volume.
type CreateVolume struct {
	Name    block.VolumeName
	Size    block.Size
	Copies  int        // 0 means 2
	Stripes int        // 0 lets the manager choose
	Chunk   block.Size // 0 means block.DefaultChunk
	// A code of Data and Parity legs instead of copies. It is refused, since no data path
	// serves one yet.
	Data, Parity int
	Pool         string // empty means DefaultPool
	Spread       string // empty means "node"
	Labels       map[string]string
	// The node of each leg must have the labels of one of Topology's segments; empty: any
	// node. Among those, nodes of an earlier segment of Preferred are better.
	Topology  []Segment
	Preferred []Segment
	Seed      Seed
}

// Segment is a part of the cluster: the nodes that have all of these labels. The label
// "node" is the node's name.
type Segment map[string]string

// DeleteVolume frees a detached volume's legs. It succeeds if there is no such volume.
// Result: nil.
type DeleteVolume struct{ Volume string }

// PromoteStaleLeg makes a stale leg the only good one of its column. The writes that it
// missed are lost. Result: Volume.
type PromoteStaleLeg struct {
	Volume         string
	Leg            block.LegID
	AcceptDataLoss bool
}

// Attach gives a volume to a host. The attachment is GRANTING until the older
// epochs are fenced. Result: Attachment.
type Attach struct {
	Volume string
	Node   block.NodeName
	Mode   AttachMode // empty means AttachExclusive
	// KeepsRecord: the caller keeps Volume.Formatted up to date. Otherwise it becomes Raw
	// if the attachment can write and no file system is recorded.
	KeepsRecord bool
}

// Detach takes a volume from its host. Result: nil.
type Detach struct {
	Volume string
	Node   block.NodeName // empty: every node
	Force  bool           // do not wait for the host: fence it
}

// CancelDetach cancels a Detach that waits for its host. A host that releases the volume
// before it hears of this is detached all the same. Result: nil.
type CancelDetach struct {
	Volume string
	Node   block.NodeName // empty: every node
}

// TargetReported carries a report that came on a stream. Every stream that is opened gets
// a higher Session, so reports of an older stream are ignored after a newer one has
// reported, and so is its end. Result: nil, or the *Error that refuses an agent of another
// cluster.
type TargetReported struct {
	Session uint64
	Report  TargetReport
}

// TargetRepeated: the target's last report on this session still holds, and the target has
// acted on Generation; 0: no newer one. Result: nil.
type TargetRepeated struct {
	Session    uint64
	Node       block.NodeName
	Generation uint64
}

// TargetLost: the stream closed. Result: nil.
type TargetLost struct {
	Session uint64
	Node    block.NodeName
}

// InitiatorReported carries a report that came on a stream; Session and Result as
// in TargetReported.
type InitiatorReported struct {
	Session uint64
	Report  InitiatorReport
}

// InitiatorRepeated is TargetRepeated for initiators. Result: nil.
type InitiatorRepeated struct {
	Session    uint64
	Node       block.NodeName
	Generation uint64
}

// InitiatorLost: the stream closed. Result: nil.
type InitiatorLost struct {
	Session uint64
	Node    block.NodeName
}

// RecordStale removes legs from the in-sync sets on behalf of the attached host: all of
// them or, with an error, none. Result: Recorded.
type RecordStale struct {
	Node   block.NodeName
	Volume block.VolumeID
	Epoch  block.Epoch
	Legs   []block.LegID
	Reason string
}

// RecordInSync returns rebuilt legs to the in-sync sets. Result: Recorded.
type RecordInSync struct {
	Node   block.NodeName
	Volume block.VolumeID
	Epoch  block.Epoch
	Legs   []RebuiltLeg
}

// RebuiltLeg is a leg whose resync is complete.
type RebuiltLeg struct {
	Leg      block.LegID
	Revision uint64
	Copied   block.Size
}

// Recorded says when, and as which event, a change of the in-sync sets became durable.
// EventSeq is 0 if nothing had to change. Term and Generation are those of the state after
// the change.
type Recorded struct {
	Time       time.Time
	EventSeq   uint64
	Term       uint64
	Generation uint64
}

// Tick lets time pass: agents go offline, leases run out. Once a second is enough.
// Result: nil.
type Tick struct{}

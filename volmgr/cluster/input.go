// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"time"

	"weft.dev/weft/proto/block"
)

// Input is something that happened. The types that implement it are listed here.
type Input interface {
	apply(*tx) (view, error)
}

// Seed is 32 random bytes that come with an input; ids and choices are drawn
// from it, so that a step can be repeated elsewhere with the same outcome.
type Seed [32]byte

// SetNodeLabels replaces the labels that an operator gave a node. Result: Node.
type SetNodeLabels struct {
	Node   block.NodeName
	Labels map[string]string
}

// ConfirmNodeDead records that a machine is off, so that nothing more is waited
// for from it. Refused while an agent of it is online. Result: Node.
type ConfirmNodeDead struct{ Node block.NodeName }

// RemoveNode forgets a node that is offline and holds nothing. Result: nil.
type RemoveNode struct{ Node block.NodeName }

// AddDrive takes in a device that the node's inventory shows. Result: Drive.
type AddDrive struct {
	Node       block.NodeName
	Device     string
	Labels     map[string]string
	ForceErase string // exactly what the refusal named
	Seed       Seed
}

// SetDriveLabels replaces the labels of a drive. Legs that are placed stay. Result: Drive.
type SetDriveLabels struct {
	Drive  block.DriveID
	Labels map[string]string
}

// EvictDrive gives a drive back; refused while it holds legs. Result: nil.
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
	Pool    string     // empty means DefaultPool
	Spread  string     // empty means "node"
	Labels  map[string]string
	// The node of each leg has the labels of one of Topology's segments; empty: any
	// node. Of those, the ones of an earlier segment of Preferred are better.
	Topology  []Segment
	Preferred []Segment
	Seed      Seed
}

// Segment is a part of the cluster: the nodes that have all of these labels, of
// which "node" is a node's name.
type Segment map[string]string

// DeleteVolume frees a detached volume's legs. Deleting what is not there
// succeeds. Result: nil.
type DeleteVolume struct{ Volume string }

// PromoteStaleLeg makes a stale leg the only good one of its column and so
// gives up the writes that it misses. Result: Volume.
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
	// KeepsRecord: the caller sees to Volume.Formatted itself. Otherwise it becomes
	// Raw, if the attachment can write and no file system is recorded.
	KeepsRecord bool
}

// Detach takes a volume from its host. Result: nil.
type Detach struct {
	Volume string
	Node   block.NodeName // empty: wherever it is
	Force  bool           // do not wait for the host: fence it
}

// CancelDetach takes a Detach back that waits for its host. A host that has let go
// before it hears of this is detached all the same. Result: nil.
type CancelDetach struct {
	Volume string
	Node   block.NodeName // empty: wherever it is
}

// TargetReported carries a report that came on a stream. Session numbers grow
// with every stream that is opened, so that an older one cannot speak after a
// newer one, nor its end be taken for the newer one's. Result: nil, or the *Error
// with which an agent of another cluster is refused.
type TargetReported struct {
	Session uint64
	Report  TargetReport
}

// TargetRepeated: the target still says what it said last on this session, and has
// reached a generation; 0: the one that it had. Result: nil.
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

// RecordStale takes legs out of the in-sync sets on behalf of the attached
// host: all of them or, with an error, none. Result: Recorded.
type RecordStale struct {
	Node   block.NodeName
	Volume block.VolumeID
	Epoch  block.Epoch
	Legs   []block.LegID
	Reason string
}

// RecordInSync puts rebuilt legs back. Result: Recorded.
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

// Recorded says when, and as which event, a change of the in-sync sets became
// durable; EventSeq is 0 if there was nothing left to change.
type Recorded struct {
	Time     time.Time
	EventSeq uint64
}

// Tick lets time pass: agents fall silent, leases run out. Once a second is
// enough. Result: nil.
type Tick struct{}

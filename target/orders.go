// SPDX-License-Identifier: Apache-2.0

package target

import (
	"fmt"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/userspace"
)

// order is one thing to do, other than a step in nvmet. Orders with the same key are carried out
// one after another. String identifies an order.
type order interface {
	key() string
	about() string // the object named when a problem with it is reported
	String() string
}

// The orders; apply.go carries them out.
type (
	formatDrive struct {
		id            block.DriveID
		cluster       block.ClusterID
		device, force string
	}
	eraseDrive struct{ id block.DriveID }
	// putLeg carves a leg, or updates its record.
	putLeg struct {
		drive  block.DriveID
		leg    wantedLeg
		floor  block.Epoch
		change string

		incarnation string // of the drive
	}
	freeLeg struct {
		drive block.DriveID
		leg   block.LegID
	}
	admit struct {
		drive  block.DriveID
		volume block.VolumeID
		epoch  block.Epoch
	}
	zeroLeg struct {
		drive block.DriveID
		leg   block.LegID
	}
	// prepareLeg puts a mapped leg into its tree, or makes it larger there; or has a leg go back.
	prepareLeg struct {
		drive    block.DriveID
		leg      block.LegID
		revision uint64 // of its record
		size     block.Size
		from     userspace.Origin
	}
	// baseLeg is a step on the way of a plain leg to a tree over it, or back.
	baseLeg struct {
		drive block.DriveID
		leg   block.LegID
		step  baseStep
		tree  string
		size  block.Size
	}
	// flattenLegs begins to make the legs of a volume in a tree independent of others', or stops it.
	flattenLegs struct {
		drive  block.DriveID
		volume block.VolumeID
		tree   string
		stop   bool
	}
	// copyLeg fills a leg of a snapshot from another one. It takes long.
	copyLeg struct {
		drive    block.DriveID
		leg      block.LegID
		revision uint64 // of its record
		size     block.Size
		base     block.LegID
		from     *copySource
	}
	// grantSpace makes the drive's reserve what trees may have and none has.
	grantSpace struct {
		drive   block.DriveID
		extents []*pb.Extent
	}
	// growTree gives a tree extents of the reserve, shrinkTree returns those that hold nothing.
	growTree struct {
		drive block.DriveID
		tree  string
		to    int // that it has then
		more  int
	}
	shrinkTree struct {
		drive block.DriveID
		tree  string
	}
	// keepTree opens a tree of which the kernel has legs.
	keepTree struct {
		drive block.DriveID
		tree  string
	}
	// noteLoss records on a drive that acknowledged writes may be lost, so that this is known after
	// the process has ended.
	noteLoss struct {
		drive       block.DriveID
		incarnation uint32
	}
	mapLeg struct {
		leg     block.LegID
		step    dm.Step
		process bool // it is made in the process beside the kernel
	}
	// nameLeg points the leg's stable name at node; an empty node removes the name.
	nameLeg struct {
		leg  block.LegID
		node string
	}
)

type baseStep string

// The steps of baseLeg; see userspace/based.go.
const (
	plantTree  baseStep = "make a tree over"
	settleBase baseStep = "begin to copy to its own extents"
	unbase     baseStep = "make plain"
	fellTree   baseStep = "remove the tree of"
)

// copyRate is how many bytes a second are copied in the background on a drive, at most: to legs' own extents,
// and to flatten legs.
const copyRate = 100 * block.MiB

func (o flattenLegs) do(d planted) error {
	if o.stop {
		return d.StopFlattening(o.volume, o.tree)
	}
	return d.Flatten(o.volume, o.tree, copyRate)
}

func (o baseLeg) do(d planted) error {
	switch o.step {
	case plantTree:
		return d.Plant(o.leg, o.tree, o.size)
	case settleBase:
		return d.Settle(o.leg, copyRate)
	case unbase:
		return d.Unbase(o.leg)
	}
	return d.Fell(o.leg)
}

func driveKey(id block.DriveID) string { return "drive " + id.String() }
func legKey(id block.LegID) string     { return "leg " + id.String() }

func (o formatDrive) key() string { return driveKey(o.id) }
func (o eraseDrive) key() string  { return driveKey(o.id) }
func (o putLeg) key() string      { return driveKey(o.drive) }
func (o freeLeg) key() string     { return driveKey(o.drive) }
func (o admit) key() string       { return driveKey(o.drive) }
func (o zeroLeg) key() string     { return "zero " + o.leg.String() }
func (o prepareLeg) key() string  { return zeroLeg{leg: o.leg}.key() }
func (o baseLeg) key() string     { return zeroLeg{leg: o.leg}.key() }
func (o flattenLegs) key() string { return "flatten tree " + o.tree }
func (o copyLeg) key() string     { return zeroLeg{leg: o.leg}.key() }
func (o grantSpace) key() string  { return driveKey(o.drive) }
func (o growTree) key() string    { return "tree " + o.tree }
func (o shrinkTree) key() string  { return "tree " + o.tree }
func (o keepTree) key() string    { return "tree " + o.tree }
func (o noteLoss) key() string    { return driveKey(o.drive) }
func (o mapLeg) key() string      { return legKey(o.leg) }
func (o nameLeg) key() string     { return legKey(o.leg) }

func (o formatDrive) about() string { return driveKey(o.id) }
func (o eraseDrive) about() string  { return driveKey(o.id) }
func (o putLeg) about() string      { return legKey(o.leg.id) }
func (o freeLeg) about() string     { return legKey(o.leg) }
func (o admit) about() string       { return "volume " + o.volume.String() }
func (o zeroLeg) about() string     { return legKey(o.leg) }
func (o prepareLeg) about() string  { return legKey(o.leg) }
func (o baseLeg) about() string     { return legKey(o.leg) }
func (o flattenLegs) about() string { return "volume " + o.volume.String() }
func (o copyLeg) about() string     { return legKey(o.leg) }
func (o grantSpace) about() string  { return driveKey(o.drive) }
func (o growTree) about() string    { return driveKey(o.drive) }
func (o shrinkTree) about() string  { return driveKey(o.drive) }
func (o keepTree) about() string    { return driveKey(o.drive) }
func (o noteLoss) about() string    { return driveKey(o.drive) }
func (o mapLeg) about() string      { return legKey(o.leg) }
func (o nameLeg) about() string     { return legKey(o.leg) }

func (o formatDrive) String() string { return fmt.Sprintf("format %s as drive %v", o.device, o.id) }
func (o eraseDrive) String() string  { return fmt.Sprintf("erase the label of drive %v", o.id) }
func (o putLeg) String() string {
	return fmt.Sprintf("%s leg %v on drive %v", o.change, o.leg.id, o.drive)
}
func (o freeLeg) String() string { return fmt.Sprintf("free leg %v on drive %v", o.leg, o.drive) }
func (o admit) String() string {
	return fmt.Sprintf("record epoch %d of volume %v on drive %v", o.epoch, o.volume, o.drive)
}
func (o zeroLeg) String() string { return fmt.Sprintf("zero leg %v", o.leg) }
func (o mapLeg) String() string  { return o.step.String() }
func (o prepareLeg) String() string {
	if o.from != (userspace.Origin{}) {
		return fmt.Sprintf("prepare leg %v of %v at revision %d in its tree as %v", o.leg, o.size, o.revision, o.from)
	}
	return fmt.Sprintf("prepare leg %v of %v at revision %d in its tree", o.leg, o.size, o.revision)
}
func (o baseLeg) String() string { return fmt.Sprintf("%s leg %v", o.step, o.leg) }
func (o flattenLegs) String() string {
	if o.stop {
		return fmt.Sprintf("stop flattening volume %v in tree %s", o.volume, o.tree)
	}
	return fmt.Sprintf("flatten volume %v in tree %s", o.volume, o.tree)
}
func (o copyLeg) String() string {
	return fmt.Sprintf("copy what differs from leg %v from namespace %v of %s, as %s, to leg %v of %v at revision %d, which begins as leg %v", o.from.since, o.from.uuid, o.from.nqn, o.from.host.NQN, o.leg, o.size, o.revision, o.base)
}
func (o grantSpace) String() string {
	return fmt.Sprintf("record extents %v for the trees of drive %v", o.extents, o.drive)
}
func (o growTree) String() string {
	return fmt.Sprintf("give tree %s %d more extents of drive %v, up to %d", o.tree, o.more, o.drive, o.to)
}
func (o keepTree) String() string { return "open tree " + o.tree }
func (o shrinkTree) String() string {
	return fmt.Sprintf("return empty extents of tree %s to drive %v", o.tree, o.drive)
}
func (o noteLoss) String() string {
	return fmt.Sprintf("record on drive %v that it has lost acknowledged writes, as incarnation %d", o.drive, o.incarnation)
}
func (o nameLeg) String() string {
	if o.node == "" {
		return fmt.Sprintf("remove the name of leg %v", o.leg)
	}
	return fmt.Sprintf("name leg %v for %s", o.leg, o.node)
}

// lasting reports whether an order takes as long as it has bytes to write. It is ended as soon as it is no
// longer given, and the outcome of all else does not wait for it.
func lasting(o order) bool {
	switch o.(type) {
	case zeroLeg, copyLeg:
		return true
	}
	return false
}

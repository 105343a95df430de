// SPDX-License-Identifier: Apache-2.0

// Package drive knows the block devices of a node: which there are, what they
// carry, which of them are Weft's drives, and how a drive is cut into legs.
//
// A drive is carved by Weft alone, in extents of 256 MiB, with a label at both ends:
//
//	0        4 MiB    8 MiB                                   tail     +4 MiB   +8 MiB
//	| slot A | slot B | extent 0 | extent 1 | ...  | (rest)    | slot A | slot B | (< 1 MiB) |
//
// The label says which cluster and drive this is, and which legs its extents
// hold, each with its volume's definition: enough to rebuild the manager's
// store. Each change is one durable write of a whole new label: a cut at any
// point leaves the old one or the new one.
//
// What is on a device decides what may be done with it. A device that carries
// anything is written only if the caller names exactly what that is; a label of
// another cluster, of another size or of a newer format is never written.
//
// The device itself is reached through [Medium]; device_linux.go is the one file
// with system calls. The package does not decide where legs go (the volume
// manager does), and does not map or export them.
package drive

import (
	"context"
	"errors"
	"sync"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// Drive is a labelled device. Its methods may be called concurrently; changes
// of the label happen one after the other, each durable when it returns.
type Drive struct {
	medium Medium

	mu    sync.Mutex
	label *Label
}

// Open reads the label of a drive and refuses one that can not be used:
// [ErrNoLabel], [ErrCorrupt], [ErrNewer], [ErrOtherSize], [ErrUnfinished],
// [ErrOverwritten], and [ErrOtherCluster] unless cluster is zero, which accepts
// any. On success the drive owns m.
func Open(m Medium, cluster block.ClusterID) (*Drive, error) { return nil, errors.ErrUnsupported }

// OpenPath is Open on the device at path. It is not an exclusive open: the
// device-mapper devices over the drive's legs hold it.
func OpenPath(path string, cluster block.ClusterID) (*Drive, error) {
	return nil, errors.ErrUnsupported
}

// Format makes m an empty drive: it erases what is there, which forceErase must
// name exactly as [Signatures] does, joined by ", " (empty for a blank device),
// writes a label and reads it back. It may be repeated, and finishes a Format
// that was cut; on a drive that already is this one it does nothing.
func Format(m Medium, cluster block.ClusterID, id block.DriveID, forceErase string) error {
	return errors.ErrUnsupported
}

// FormatPath is Format on the device at path, opened exclusively: it fails with
// EBUSY if anything in the kernel holds the device.
func FormatPath(path string, cluster block.ClusterID, id block.DriveID, forceErase string) error {
	return errors.ErrUnsupported
}

// ID identifies the drive.
func (d *Drive) ID() block.DriveID { return d.Label().Drive }

// Label is a copy of what is on the drive.
func (d *Drive) Label() *Label { return nil }

// Update changes the label in one durable write. If change fails, or changes
// nothing, nothing is written. After an error of the device either the old or
// the new label is there; the next call looks.
func (d *Drive) Update(change func(*Label) error) error { return errors.ErrUnsupported }

// PutLeg, RemoveLeg, Admit and SetVolume are Update with the one change of that name.
func (d *Drive) PutLeg(record *pb.LegLabel) error {
	return d.Update(func(l *Label) error { return l.PutLeg(record) })
}

// RemoveLeg frees the extents of a leg; a leg that is not there is already free.
func (d *Drive) RemoveLeg(id block.LegID) error {
	return d.Update(func(l *Label) error { l.RemoveLeg(id); return nil })
}

// Admit raises the admitted epoch of all legs of a volume.
func (d *Drive) Admit(volume block.VolumeID, epoch block.Epoch) error {
	return d.Update(func(l *Label) error { l.Admit(volume, epoch); return nil })
}

// SetVolume writes a volume's definition to all its legs.
func (d *Drive) SetVolume(volume *pb.VolumeLabel) error {
	return d.Update(func(l *Label) error { return l.SetVolume(volume) })
}

// ZeroLeg fills the leg with zeroes and then records it as zeroed; both are
// durable when it returns. It can take minutes: progress (may be nil) is told
// the bytes done so far, and ctx is looked at between chunks of 64 MiB.
func (d *Drive) ZeroLeg(ctx context.Context, id block.LegID, progress func(done block.Size)) error {
	return errors.ErrUnsupported
}

// Erase removes the label. A drive that holds legs is refused.
func (d *Drive) Erase() error { return errors.ErrUnsupported }

// Close lets go of the device.
func (d *Drive) Close() error { return d.medium.Close() }

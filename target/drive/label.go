// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"errors"
	"io"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// What can be wrong with a label.
var (
	ErrNoLabel      = errors.New("no label of ours")
	ErrCorrupt      = errors.New("corrupt label")
	ErrNewer        = errors.New("label of a newer format")
	ErrOtherSize    = errors.New("label of a device of another size")
	ErrOtherCluster = errors.New("label of another cluster")
	ErrUnfinished   = errors.New("label of a format that was cut")
	ErrOverwritten  = errors.New("written to by somebody else")
)

// Label is what a drive says of itself. The records are the contract's own
// messages, checked on the way in and on the way out.
type Label struct {
	Generation uint64 // grows with each write
	Cluster    block.ClusterID
	Drive      block.DriveID
	Size       block.Size     // of the whole device
	Legs       []*pb.LegLabel // by leg id; no two share an extent
}

// ReadLabel reads the newest good copy of the label on a device of size bytes.
// It checks neither the size nor the cluster that the label names.
func ReadLabel(r io.ReaderAt, size block.Size) (*Label, error) { return nil, ErrNoLabel }

// Extents is how many extents a device of size bytes has; 0 if it is too small.
func Extents(size block.Size) int { return 0 }

// Leg is the record of a leg, nil if the drive does not hold it.
func (l *Label) Leg(id block.LegID) *pb.LegLabel { return nil }

// PutLeg adds a leg, or replaces its record. Extents must be free and inside
// the drive; those of a leg that is there do not change. The admitted epoch is
// never lowered; neither are the revision, nor the epoch and generation of the volume.
func (l *Label) PutLeg(record *pb.LegLabel) error { return errors.ErrUnsupported }

// RemoveLeg frees the extents of a leg.
func (l *Label) RemoveLeg(id block.LegID) {}

// Admit raises the admitted epoch of all legs of a volume to at least epoch.
func (l *Label) Admit(volume block.VolumeID, epoch block.Epoch) {}

// SetVolume replaces the definition of a volume in all its legs. One with a
// lower epoch or generation than the label has is refused.
func (l *Label) SetVolume(volume *pb.VolumeLabel) error { return errors.ErrUnsupported }

// Segment is a run of bytes of a device.
type Segment struct{ Offset, Length block.Size }

// Segments are the byte ranges of the drive that hold the first size bytes of a
// leg, in the leg's order, adjacent ones merged; size 0 means all of it.
func Segments(extents []*pb.Extent, size block.Size) []Segment { return nil }

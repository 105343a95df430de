// SPDX-License-Identifier: Apache-2.0

package evidence

import (
	"cmp"
	"slices"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/image"
)

// LegLabel is a leg as the label of its drive describes it.
type LegLabel struct {
	Leg    block.LegID
	Column int
	Copy   int
	image.Image
	Zeroed bool
	// ZeroedExtents is how many of the extents, from the first on, are zeroed or
	// hold data; 0 means all if Zeroed.
	ZeroedExtents uint32
	Revision      uint64
	AdmittedEpoch block.Epoch
	Volume        VolumeLabel
	// Boot is the machine's boot in which Volume was last written here; empty if not known.
	Boot string
	// Incarnation is the drive's at that write; empty if not known.
	Incarnation string
	Tree        block.UUID // of a mapped or based leg, or of a plain one that is about to have it, or had it
	Based       bool       // there is a tree over the leg's extents
	GoingBack   bool       // of a based leg: it does not hold yet what a snapshot does, and is to
}

// ZeroedSoFar is the number of a leg's extents that its label says are zeroed or hold data. One that is going
// back is not reported as zeroed, and keeps its extents.
func (l *LegLabel) ZeroedSoFar() uint32 {
	switch {
	case !l.Zeroed && !l.GoingBack:
		return 0
	case l.ZeroedExtents != 0 || l.Kind == image.Mapped: // of a mapped leg: its size in its tree
		return l.ZeroedExtents
	}
	return image.Count(l.Extents)
}

// VolumeLabel is a volume's definition as drive labels hold it.
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
	// Others are the volume's legs that are neither in InSync nor in Suspect. ListsAll: they
	// are listed. Labels of older versions do not list them.
	Others   []block.LegID
	ListsAll bool
	// Crowded are the columns that have one leg more than members, while a copy is made again
	// elsewhere.
	Crowded []int
	Clean   bool
	Created int64 // Unix nanoseconds, 0 if not known
	// ExpandingTo is the size that the legs grow to; 0 if no expansion is under way.
	ExpandingTo block.Size
	// Quiet: no host has the volume, or is being granted it, for writing at Epoch.
	Quiet bool
	// Writer is the node of the newest grant to write, handed out or not.
	Writer block.NodeName
	// Snapshot says of what the volume is a snapshot; zero: it is none.
	Snapshot SnapshotOf
	// RestoringTo is the snapshot to which the volume is going back; zero: it is not.
	RestoringTo block.VolumeID
}

// SnapshotOf says of which volume a snapshot was taken, what that was called, together with which others,
// and when it was complete, in Unix nanoseconds; 0: it is not.
type SnapshotOf struct {
	Volume block.VolumeID
	Name   block.VolumeName
	Group  string
	Taken  int64
	// FSFrozen: no file system on the volume had a write under way.
	FSFrozen bool
}

// inSync reports whether a leg is in sync by the label, suspect or not.
func (l *VolumeLabel) inSync(leg block.LegID) bool {
	return slices.Contains(l.InSync, leg) || slices.Contains(l.Suspect, leg)
}

// Has reports whether a leg belongs to the volume, as far as the label can tell.
func (l *VolumeLabel) Has(leg block.LegID) bool {
	return !l.ListsAll || l.inSync(leg) || slices.Contains(l.Others, leg)
}

// members is how many legs a column has.
func (l *VolumeLabel) members(layout block.Layout, column int) int {
	n := layout.Group().Members
	if slices.Contains(l.Crowded, column) {
		n++
	}
	return n
}

// newer orders definitions of a volume by age. Generation and epoch only grow, and within
// an epoch a volume may become quiet but not the reverse.
func (l *VolumeLabel) newer(than *VolumeLabel) bool {
	quiet := map[bool]int{true: 1}
	return cmp.Or(cmp.Compare(l.Generation, than.Generation), cmp.Compare(l.Epoch, than.Epoch), quiet[l.Quiet]-quiet[than.Quiet]) > 0
}

// size returns the size of a volume by its labels: best is the newest of them, legs are all
// that were found. If best shows an expansion under way, hosts may have been told the new
// size, but only after all legs that best lists, also as suspect, had grown and their labels
// said so. So if those legs are that large now, the new size is returned. That is safe even
// if no host was told: the new part holds zeroes, or what hosts wrote.
func size(best *VolumeLabel, legs []LegLabel) block.Size {
	if best.ExpandingTo <= best.Size {
		return best.Size
	}
	need := uint32(best.Layout.LegExtents(best.ExpandingTo))
	for i := range legs {
		if l := &legs[i]; best.inSync(l.Leg) && l.ZeroedSoFar() < need {
			return best.Size
		}
	}
	return best.ExpandingTo
}

// Note is a host's durable note about a mirrored volume that it could write: at Epoch,
// these legs hold every acknowledged write. The host writes it before it goes on without a
// leg, and after a leg was recorded in sync, so it never names too many.
type Note struct {
	Volume block.VolumeID
	Epoch  block.Epoch
	Legs   []NotedLeg
}

// NotedLeg is a leg and the revision at which the host had it.
type NotedLeg struct {
	Leg      block.LegID
	Revision uint64
}

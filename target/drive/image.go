// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"fmt"
	"math"
	"slices"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// Image says where the bytes of a leg are on its drive, according to the leg's record or a wanted
// leg. A plain image is a sequence of extents. In a checked image each extent also holds checksums of
// its data, see package integrity. A mapped image is in a tree and has no extents of its own. A based
// image is a plain one over whose extents there is a tree.
type Image struct {
	kind    pb.ImageKind
	extents []*pb.Extent
}

// ImageOf returns the image in a [pb.LegLabel] or [pb.WantedLeg].
func ImageOf(m interface {
	GetImage() pb.ImageKind
	GetExtents() []*pb.Extent
}) Image {
	kind := m.GetImage()
	if kind == pb.ImageKind_IMAGE_KIND_UNSPECIFIED { // as written by versions that knew only this kind
		kind = pb.ImageKind_IMAGE_KIND_PLAIN
	}
	return Image{kind, m.GetExtents()}
}

// Check refuses an image of a kind that this program does not know.
func (i Image) Check() error {
	if i.kind < pb.ImageKind_IMAGE_KIND_PLAIN || i.kind > pb.ImageKind_IMAGE_KIND_BASED {
		return fmt.Errorf("image of kind %d: this program knows %d (plain), %d (checked), %d (mapped) and %d (based)", i.kind,
			pb.ImageKind_IMAGE_KIND_PLAIN, pb.ImageKind_IMAGE_KIND_CHECKED, pb.ImageKind_IMAGE_KIND_MAPPED, pb.ImageKind_IMAGE_KIND_BASED)
	}
	return nil
}

// Checked reports whether the extents also hold checksums.
func (i Image) Checked() bool { return i.kind == pb.ImageKind_IMAGE_KIND_CHECKED }

// Room is how much data fits into the image's extents.
func (i Image) Room() block.Size { return block.Size(i.count()) * i.extentData() }

func (i Image) extentData() block.Size { return block.Layout{Integrity: i.Checked()}.ExtentData() }

func (i Image) count() uint64 { return CountExtents(i.extents) }

// Extends reports whether the image equals old or is old after growth: it has the same kind and
// begins with the same extents in the same order, however they are split into runs. A plain image may
// have got a tree, or lost it.
func (i Image) Extends(old Image) bool {
	have, want := i.Segments(block.Size(old.count())*block.ExtentSize), old.Segments(0)
	return i.ownKind() == old.ownKind() && i.count() >= old.count() && slices.Equal(have, want)
}

// ownKind is the kind without regard to a tree over it.
func (i Image) ownKind() pb.ImageKind {
	if i.kind == pb.ImageKind_IMAGE_KIND_BASED {
		return pb.ImageKind_IMAGE_KIND_PLAIN
	}
	return i.kind
}

// String prints the extents.
func (i Image) String() string { return fmt.Sprint(i.extents) }

// Segment is a run of bytes of a device.
type Segment struct{ Offset, Length block.Size }

// Segments are the byte ranges of the drive that the first size bytes of the image's extents are, in
// order, adjacent ones merged; size 0 means the whole image.
func (i Image) Segments(size block.Size) []Segment {
	left := size
	if size == 0 {
		left = math.MaxUint64
	}
	var segments []Segment
	for _, e := range i.extents {
		offset := firstExtent + block.Size(e.GetStart())*block.ExtentSize
		length := min(block.Size(e.GetCount())*block.ExtentSize, left)
		left -= length
		n := len(segments)
		switch {
		case length == 0:
		case n > 0 && segments[n-1].Offset+segments[n-1].Length == offset:
			segments[n-1].Length += length
		default:
			segments = append(segments, Segment{offset, length})
		}
	}
	return segments
}

// SPDX-License-Identifier: Apache-2.0

// Package image says where the bytes of a leg are on its drive, and finds free space there.
//
// A drive is divided into extents of block.ExtentSize, numbered from 0. An image is an
// ordered list of runs of extents:
//
//	drive   0    4  6      9 10
//	        ├────┼──┼──────┼──┼─────
//	             └1┘       └2┘        the image {4, 2}, {9, 1}: three extents
//
// The functions on runs never change their arguments' elements, except Holes, which may
// sort its first argument.
package image

import (
	"fmt"

	"weft.dev/weft/proto/block"
)

// Image says where the bytes of a leg are on its drive. A plain image is the leg's extents, one after
// another. Those of a checked image also hold checksums. A mapped image has none: the leg is in a tree,
// which takes extents as it needs them.
type Image struct {
	Kind    Kind     `json:"image,omitempty"`
	Extents []Extent `json:"extents"`
}

// Kind is the format of an image.
type Kind string

// The kinds of images.
const (
	Plain   Kind = ""        // stores do not spell it out
	Checked Kind = "CHECKED" // each extent holds the checksums of its data
	Mapped  Kind = "MAPPED"  // the leg is found through the map of a tree
	// Based is a plain image with a tree over it. Records say Plain, and beside it that there is a tree;
	// only agents are told so.
	Based Kind = "BASED"
)

// Of returns the plain image of these extents.
func Of(extents []Extent) Image { return Image{Plain, extents} }

// For returns the image of these extents for a leg of a layout.
func For(l block.Layout, extents []Extent) Image {
	if l.Integrity {
		return Image{Checked, extents}
	}
	return Of(extents)
}

// Check refuses an image of a kind that this version does not know.
func (i Image) Check() error {
	switch {
	case i.Kind != Plain && i.Kind != Checked && i.Kind != Mapped:
		return fmt.Errorf("image of kind %q: this version knows plain ones, those with checksums, and mapped ones", i.Kind)
	case i.Kind == Mapped && len(i.Extents) > 0:
		return fmt.Errorf("a mapped image with extents of its own")
	}
	return nil
}

// Capacity is the size of all extents.
func (i Image) Capacity() block.Size { return block.Size(Count(i.Extents)) * block.ExtentSize }

// Continues reports whether the image is equal to old or an expansion of it: of the same
// kind, and its extents begin with those of old.
func (i Image) Continues(old Image) bool { return i.Kind == old.Kind && begins(i.Extents, old.Extents) }

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"

	"weft.dev/weft/proto/block"
)

// Image says where the bytes of a leg are on its drive. A plain image is the leg's extents,
// one after another.
type Image struct {
	Kind    ImageKind `json:"image,omitempty"`
	Extents []Extent  `json:"extents"`
}

// ImageKind is the format of an image.
type ImageKind string

// Plain is the kind of every image so far; stores do not spell it out.
const Plain ImageKind = ""

// plain is the image of these extents.
func plain(extents []Extent) Image { return Image{Plain, extents} }

// check refuses an image of a kind that this version does not know.
func (i Image) check() error {
	if i.Kind != Plain {
		return fmt.Errorf("image of kind %q: this version knows plain ones", i.Kind)
	}
	return nil
}

// room is the size of all extents.
func (i Image) room() block.Size { return block.Size(count(i.Extents)) * block.ExtentSize }

// continues reports whether the image is equal to old or an expansion of it: of the same
// kind, and its extents begin with those of old.
func (i Image) continues(old Image) bool { return i.Kind == old.Kind && begins(i.Extents, old.Extents) }

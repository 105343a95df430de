// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"maps"

	"weft.dev/weft/proto/block"
)

// Note is what this host has written to its disk about a volume (package evidence): at Epoch,
// these legs, at these revisions, hold every acknowledged write.
type Note struct {
	Epoch block.Epoch            `json:"epoch"`
	Legs  map[block.LegID]uint64 `json:"legs"`
	// Whole says that the volume has no other legs. It is not kept on disk: after a restart it
	// is unknown.
	Whole bool `json:"-"`
}

// Equal reports whether two notes say the same.
func (n Note) Equal(o Note) bool { return n.Epoch == o.Epoch && maps.Equal(n.Legs, o.Legs) }

// Within reports whether every leg that n names is also in o, at the same revision. A note of
// another epoch passes: it does no harm, because only the note of the last epoch counts.
func (n Note) Within(o Note) bool {
	for leg, revision := range n.Legs {
		if r, ok := o.Legs[leg]; n.Epoch == o.Epoch && (!ok || r != revision) {
			return false
		}
	}
	return true
}

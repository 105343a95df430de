// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"maps"
	"slices"
	"testing"

	"weft.dev/weft/proto/pb"
)

// Every list of a wanted state has to be in a piece, also one that is added later.
func TestPiecesHaveEveryListOfAWantedState(t *testing.T) {
	full := &pb.TargetWanted{}
	lists := full.ProtoReflect().Descriptor().Fields()
	for i := range lists.Len() {
		if f := lists.Get(i); f.IsList() {
			entry := full.ProtoReflect().Mutable(f).List().AppendMutable().Message()
			if volume := entry.Descriptor().Fields().ByName("volume"); volume != nil { // of a leg
				entry.Mutable(volume)
			}
		}
	}
	head, all := cutTarget(full)
	for i := range lists.Len() {
		f, n := lists.Get(i), 0
		if !f.IsList() {
			continue
		}
		for _, m := range append(slices.Collect(maps.Values(all)), head) {
			n += m.ProtoReflect().Get(f).List().Len()
		}
		if n != 1 {
			t.Errorf("%s: %d entries in the pieces, want 1", f.Name(), n)
		}
	}
}

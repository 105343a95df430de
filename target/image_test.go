// SPDX-License-Identifier: Apache-2.0

package target

import (
	"strings"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
)

// A leg with an image kind newer than this version is left alone, and the manager is told why.
func TestALegWithAnImageOfAnUnknownKindIsNotPlanned(t *testing.T) {
	id := block.UUIDFromRandom([16]byte{1}).String()
	w := parseWanted(&pb.TargetWanted{Legs: []*pb.WantedLeg{{
		LegId: id, DriveId: id, Volume: &pb.VolumeLabel{VolumeId: id}, SizeBytes: uint64(block.ExtentSize),
		Extents: []*pb.Extent{{Start: 1, Count: 1}}, Image: 9,
	}}})
	if len(w.legs) != 0 || len(w.problems) != 1 || !strings.Contains(w.problems[0].cause, "image of kind 9") {
		t.Errorf("%d legs, problems %v", len(w.legs), w.problems)
	}
}

// A leg with checksums is mapped where these can be kept, over the data of its extents alone; a
// target that keeps none leaves it alone and says why.
func TestALegWithChecksumsIsMappedInUserSpaceAlone(t *testing.T) {
	checked := func(w wish) wish {
		for _, l := range w.Legs {
			l.Image, l.SizeBytes = pb.ImageKind_IMAGE_KIND_CHECKED, uint64(300*block.MiB)
			l.Volume.Layout.Integrity = true
		}
		return w
	}
	for _, able := range []bool{false, true} {
		at(t, func(t *testing.T, w *world) {
			w.integrity = able
			w.run()
			w.manager.set(checked(want().drive(1).volume(1, 1, 1).sized(before)).TargetWanted)
			if !able {
				r := w.until("a refusal", func(r *pb.TargetReport) bool { return legReport(r, 1).GetError() != "" })
				if r.GetIntegrity() || !strings.Contains(legReport(r, 1).GetError(), "which this target does not") || w.size() != 0 {
					t.Errorf("reported %q, mapped %v", legReport(r, 1).GetError(), w.size())
				}
				return
			}
			r := w.until("the leg", legHas(before))
			state := w.mappedLegs()[0]
			if _, ok := state.Table[0].Target.(dm.Checked); !ok || !r.GetIntegrity() {
				t.Errorf("mapped as %v", state.Table)
			}
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

package target

import (
	"strings"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
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

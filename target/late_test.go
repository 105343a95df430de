// SPDX-License-Identifier: Apache-2.0

package target

import (
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/userspace"
)

// The record of a leg does not begin its way back at a later revision while an earlier order to prepare the leg
// is under way: that would end it (userspace.TestALateOrderDoesNotEndTheWayBackAtALaterRevision). And a leg
// whose record says that it is going back, of a volume that is going back and has not switched (its store was
// lost), is not told that it need not.
func TestALegIsNotPreparedAcrossRevisions(t *testing.T) {
	for _, kind := range []pb.ImageKind{basedKind, pb.ImageKind_IMAGE_KIND_MAPPED} {
		plan := func(wanted, revision uint64, to pb.LegOriginKind, busy bool) (orders []order) {
			w := want().leg(1, 1, 1, wanted).sized(200 * block.MiB)
			l := w.Legs[0]
			l.Image, l.TreeId, l.SizeBytes, l.Volume.SizeBytes = kind, treeID, uint64(200*block.MiB), uint64(200*block.MiB)
			if l.Extents = nil; kind == basedKind {
				l.Extents = []*pb.Extent{{Start: 3, Count: 1}}
			}
			l.Volume.RestoringToId = legID(9).String()
			if to != 0 {
				w = w.from(2, to, false)
			}
			record := w.recorded(0, kind == basedKind)
			record.Image, record.TreeId, record.Extents, record.ZeroedExtents = kind, treeID, l.Extents, 0
			record.Revision, record.GoingBack = revision, kind == basedKind
			s := seen{
				drives: map[block.DriveID]driveSeen{driveID(1): {trees: map[string]userspace.TreeSeen{treeID: {}}, label: &drive.Label{
					Cluster: cluster, Drive: driveID(1), Size: block.GiB, Legs: []*pb.LegLabel{record},
					Trees: []*pb.TreeLabel{{TreeId: treeID, Extents: []*pb.Extent{{Start: 0, Count: 1}}, Formatted: true}},
				}}},
				zeroing: func(block.LegID) bool { return busy },
			}
			return makePlan(s, parseWanted(w.TargetWanted), "/dev/weft/leg", nil).orders
		}
		has := func(orders []order, what string) bool {
			for _, o := range orders {
				switch o.(type) {
				case putLeg:
					if what == "record" {
						return true
					}
				case prepareLeg:
					if what == "prepare" {
						return true
					}
				}
			}
			return false
		}
		if got := plan(1004, 3, 0, false); has(got, "prepare") || !has(got, "record") {
			t.Errorf("%v: again, not switched: %v", kind, got)
		}
		if got := plan(1005, 1004, back, true); has(got, "record") {
			t.Errorf("%v: its record begins its way back while an earlier order is under way: %v", kind, got)
		}
		if got := plan(1005, 1004, back, false); !has(got, "record") || has(got, "prepare") {
			t.Errorf("%v: its turn: %v", kind, got)
		}
	}
}

// A manager that does not know that a leg can be going back does not take it for one that is through.
func TestALegThatGoesBackIsNotReportedAsZeroed(t *testing.T) {
	record := &pb.LegLabel{LegId: legID(1).String(), Image: basedKind, Zeroed: true, GoingBack: true, ZeroedExtents: 1}
	r := driveReport(driveID(1), driveSeen{label: &drive.Label{Legs: []*pb.LegLabel{record}}})
	if l := r.GetLegs()[0]; l.GetZeroed() || !l.GetGoingBack() || l.GetZeroedExtents() != 1 || !record.GetZeroed() {
		t.Errorf("its report is %v, and its record %v", l, record)
	}
	record.GoingBack = false
	if r := driveReport(driveID(1), driveSeen{label: &drive.Label{Legs: []*pb.LegLabel{record}}}); !r.GetLegs()[0].GetZeroed() {
		t.Errorf("back: %v", r.GetLegs()[0])
	}
}

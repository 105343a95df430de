// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"errors"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// mapped is the record of a mapped leg in a tree of its own.
func mapped(n byte) *pb.LegLabel {
	return &pb.LegLabel{
		LegId: legID(n).String(), TreeId: legID(n).String(), Image: pb.ImageKind_IMAGE_KIND_MAPPED, Revision: 1,
		Volume: &pb.VolumeLabel{VolumeId: volumeID(n).String()},
	}
}

// owners says who has each extent of the label.
func owners(l *Label) map[uint32]string {
	all := map[uint32]string{}
	for _, t := range l.Trees {
		for i, e := range ExtentNumbers(t.Extents) {
			all[e] = map[bool]string{true: "home of ", false: ""}[i == 0] + t.TreeId[:2]
		}
	}
	for _, e := range ExtentNumbers(l.Reserve) {
		all[e] = "reserve"
	}
	return all
}

func TestExtentsGoFromTheReserveToTreesAndBack(t *testing.T) {
	l := testLabel()
	l.Size = 8 * block.GiB
	tree1, tree2 := legID(1).String(), legID(2).String()
	expect := func(what string, err error, want map[uint32]string) {
		t.Helper()
		must(t, err)
		b, err := encode(l)
		must(t, err)
		again, err := decode(b)
		must(t, err)
		if diff := cmp.Diff(l, again, protocmp.Transform(), cmp.AllowUnexported(Label{})); diff != "" {
			t.Fatalf("%s: read back (-want +got):\n%s", what, diff)
		}
		if diff := cmp.Diff(want, owners(l)); diff != "" {
			t.Fatalf("%s (-want +got):\n%s", what, diff)
		}
	}
	if err := l.PutLeg(mapped(1)); !errors.Is(err, ErrNoReserve) {
		t.Fatalf("a mapped leg without a reserve: %v, want %v", err, ErrNoReserve)
	}
	l = testLabel()
	l.Size = 8 * block.GiB
	one, two := tree1[:2], tree2[:2]
	expect("grant", l.SetGrant([]*pb.Extent{run(5, 3), run(2, 1)}), map[uint32]string{2: "reserve", 5: "reserve", 6: "reserve", 7: "reserve"})
	expect("leg 1", l.PutLeg(mapped(1)), map[uint32]string{2: "home of " + one, 5: "reserve", 6: "reserve", 7: "reserve"})
	expect("leg 2", l.PutLeg(mapped(2)), map[uint32]string{2: "home of " + one, 5: "home of " + two, 6: "reserve", 7: "reserve"})
	expect("growth", l.GrowTree(tree1, 9), map[uint32]string{2: "home of " + one, 5: "home of " + two, 6: one, 7: one})
	if err := l.GrowTree(tree1, 1); !errors.Is(err, ErrNoReserve) {
		t.Fatalf("growth without a reserve: %v, want %v", err, ErrNoReserve)
	}
	expect("shrinking", l.ShrinkTree(tree1, func(e uint32) bool { return e == 7 }), map[uint32]string{2: "home of " + one, 5: "home of " + two, 6: "reserve", 7: one})
	expect("less granted", l.SetGrant([]*pb.Extent{run(2, 1)}), map[uint32]string{2: "home of " + one, 5: "home of " + two, 7: one})
	if !l.Granted([]*pb.Extent{run(7, 1)}) || l.Granted([]*pb.Extent{run(8, 1)}) {
		t.Error("Granted does not tell what SetGrant would change")
	}
	must(t, l.RemoveLeg(legID(1)))
	expect("leg 1 removed", nil, map[uint32]string{2: "reserve", 5: "home of " + two, 7: "reserve"})
	must(t, l.Prepared(legID(2), l.Leg(legID(2)).GetRevision(), 300*block.MiB))
	if leg := l.Leg(legID(2)); !leg.Zeroed || leg.ZeroedExtents != 2 || !l.Tree(tree2).Formatted || !Whole(leg) {
		t.Errorf("prepared: %v, %v", leg, l.Tree(tree2))
	}
	next := mapped(2)
	next.Revision = 2
	must(t, l.PutLeg(next))
	if leg := l.Leg(legID(2)); leg.Revision != 2 || !leg.Zeroed || leg.ZeroedExtents != 2 {
		t.Errorf("the next revision: %v", leg)
	}
}

func TestNoExtentHasTwoOwners(t *testing.T) {
	for name, change := range map[string]func(*Label) error{
		"a leg of what a tree has": func(l *Label) error { return l.PutLeg(leg(3, 3, run(0, 1))) },
		"a leg of the reserve":     func(l *Label) error { return l.PutLeg(leg(3, 3, run(1, 1))) },
		"a mapped leg with extents": func(l *Label) error {
			m := mapped(4)
			m.Extents = []*pb.Extent{run(3, 1)}
			return l.PutLeg(m)
		},
		"another tree for a leg": func(l *Label) error {
			m := mapped(1)
			m.TreeId = legID(5).String()
			return l.PutLeg(m)
		},
	} {
		l := testLabel(leg(2, 2, run(2, 1)))
		must(t, l.SetGrant([]*pb.Extent{run(0, 2)}))
		must(t, l.PutLeg(mapped(1)))
		if err := change(l.clone()); err == nil {
			t.Errorf("%s was not refused", name)
		}
	}
}

// A manager that was restored may grant what another leg has. The rest of the grant is good.
func TestAGrantLeavesOutWhatALegHas(t *testing.T) {
	l := testLabel(leg(2, 2, run(2, 1)))
	must(t, l.SetGrant([]*pb.Extent{run(0, 2)}))
	must(t, l.PutLeg(mapped(1)))
	must(t, l.SetGrant([]*pb.Extent{run(0, 4)}))
	if got := ExtentNumbers(l.Reserve); !slices.Equal(got, []uint32{1, 3}) {
		t.Errorf("the reserve is %v, want 1 and 3: the tree has 0 and a leg 2", got)
	}
}

func TestALabelThatLosesAnEntryIsNoticed(t *testing.T) {
	l := testLabel()
	must(t, l.SetGrant([]*pb.Extent{run(0, 2)}))
	must(t, l.PutLeg(mapped(1)))
	l.Trees = nil
	if err := l.settle(); err == nil {
		t.Error("a mapped leg without its tree is accepted")
	}
}

// A leg under the tree of others holds what they read, whoever frees it: also a target on the kernel path, which
// knows no trees.
func TestALegThatOthersNeedIsNotRemoved(t *testing.T) {
	tree := legID(1).String()
	l := testLabel()
	l.Legs = []*pb.LegLabel{
		{LegId: tree, TreeId: tree, Image: pb.ImageKind_IMAGE_KIND_BASED, Extents: []*pb.Extent{{Start: 1, Count: 1}}},
		{LegId: legID(2).String(), TreeId: tree, Image: pb.ImageKind_IMAGE_KIND_MAPPED},
	}
	l.Trees = []*pb.TreeLabel{{TreeId: tree, Extents: []*pb.Extent{{Start: 2, Count: 1}}, Formatted: true}}
	if err := l.RemoveLeg(legID(1)); !errors.Is(err, ErrNeeded) || len(l.Legs) != 2 {
		t.Errorf("with a snapshot's leg in its tree: %v, want %v; legs are %v", err, ErrNeeded, l.Legs)
	}
	if err := l.RemoveBase(legID(2)); err == nil {
		t.Error("a leg that is no base was removed as one")
	}
	without := l.clone()
	must(t, without.RemoveBase(legID(1)))
	if len(without.Legs) != 1 || without.Tree(tree) == nil || len(without.Tree(tree).Extents) != 1 {
		t.Errorf("without the leg that nobody needs: %v, %v", without.Legs, without.Trees)
	}
	must(t, l.RemoveLeg(legID(2)))
	must(t, l.RemoveLeg(legID(1)))
	if len(l.Legs) > 0 || len(l.Trees) > 0 {
		t.Errorf("legs %v and trees %v are left", l.Legs, l.Trees)
	}
}

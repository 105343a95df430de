// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// Legs that are found through a map share the extents of a tree (package target/mapped). The
// volume manager grants a drive a reserve of extents for its trees; which tree gets one is decided
// here, so that writers go on while no manager answers:
//
//	volume manager ──grant──► reserve ──a leg is carved, or a tree has little space──► tree
//	               ◄─────────         ◄──its last leg goes, or an extent is empty────
//
// Each step is one write of the label, and an extent is in one entry of it or in none.

// ErrNoReserve means that a drive has no extent left for its trees.
var ErrNoReserve = errors.New("the drive's reserve is empty")

// FirstExtent is the offset of a drive's first extent.
const FirstExtent = firstExtent

// ExtentNumbers lists the extents of runs, one by one and in order.
func ExtentNumbers(runs []*pb.Extent) (all []uint32) {
	for _, r := range runs {
		for i := range r.GetCount() {
			all = append(all, r.GetStart()+i)
		}
	}
	return all
}

// runsOf joins extents that follow one another.
func runsOf(extents []uint32) (runs []*pb.Extent) {
	for _, e := range extents {
		if n := len(runs); n > 0 && runs[n-1].Start+runs[n-1].Count == e {
			runs[n-1].Count++
			continue
		}
		runs = append(runs, &pb.Extent{Start: e, Count: 1})
	}
	return runs
}

// Tree is the record of a tree, nil if the drive does not have it.
func (l *Label) Tree(id string) *pb.TreeLabel {
	i := slices.IndexFunc(l.Trees, func(t *pb.TreeLabel) bool { return t.GetTreeId() == id })
	if i < 0 {
		return nil
	}
	return l.Trees[i]
}

// Mapped reports whether a leg is found through the map of a tree.
func Mapped(m interface{ GetImage() pb.ImageKind }) bool {
	return m.GetImage() == pb.ImageKind_IMAGE_KIND_MAPPED
}

// Based reports whether there is a tree over a leg's own extents.
func Based(m interface{ GetImage() pb.ImageKind }) bool {
	return m.GetImage() == pb.ImageKind_IMAGE_KIND_BASED
}

// InTree reports whether a leg is read through a tree.
func InTree(m interface{ GetImage() pb.ImageKind }) bool { return Mapped(m) || Based(m) }

// A plain leg gets a tree, and loses it again, in these steps. Before and after each the leg is what it
// was:
//
//	plain ──BeginBase──► plain, names its tree ──(the tree is made over it)──► Base: based
//	plain ◄──EndBase──── plain, names its tree ◄──Unbase── (all of it is in the base)

// BeginBase has a plain leg name its tree, which gets an extent of the reserve if it has none.
func (l *Label) BeginBase(id block.LegID, tree string) error {
	leg := l.Leg(id)
	if leg == nil || ImageOf(leg).kind != pb.ImageKind_IMAGE_KIND_PLAIN || leg.GetTreeId() != "" && leg.GetTreeId() != tree {
		return fmt.Errorf("leg %v: not a plain one without a tree", id)
	}
	leg.TreeId = tree
	if l.Tree(tree) != nil {
		return nil
	}
	l.Trees = append(l.Trees, &pb.TreeLabel{TreeId: tree})
	if err := l.GrowTree(tree, 1); err != nil {
		return fmt.Errorf("leg %v: %w", id, err)
	}
	return nil
}

// Base records that the tree which a plain leg names has been made over it.
func (l *Label) Base(id block.LegID) error {
	leg := l.Leg(id)
	if leg == nil || ImageOf(leg).kind != pb.ImageKind_IMAGE_KIND_PLAIN || l.Tree(leg.GetTreeId()) == nil {
		return fmt.Errorf("leg %v: not a plain one that names a tree", id)
	}
	leg.Image = pb.ImageKind_IMAGE_KIND_BASED
	l.Tree(leg.GetTreeId()).Formatted = true
	return nil
}

// Unbase records that a based leg, which is alone in its tree, is in its own extents.
func (l *Label) Unbase(id block.LegID) error {
	leg := l.Leg(id)
	switch {
	case leg == nil || !Based(leg):
		return fmt.Errorf("leg %v: not a based one", id)
	case !l.Alone(leg):
		return fmt.Errorf("leg %v: others are in its tree", id)
	case leg.GetGoingBack():
		return fmt.Errorf("leg %v: it is going back to a snapshot", id)
	}
	leg.Image = pb.ImageKind_IMAGE_KIND_PLAIN
	l.Tree(leg.GetTreeId()).Formatted = false
	return nil
}

// EndBase has a plain leg name no tree, and returns the extents of that to the reserve.
func (l *Label) EndBase(id block.LegID) error {
	leg := l.Leg(id)
	if leg == nil || ImageOf(leg).kind != pb.ImageKind_IMAGE_KIND_PLAIN {
		return fmt.Errorf("leg %v: not a plain one", id)
	}
	leg.TreeId = ""
	l.uproot()
	return nil
}

// plant makes the tree of a mapped leg, of one extent of the reserve, if it is not there.
func (l *Label) plant(leg *pb.LegLabel) error {
	if !Mapped(leg) || l.Tree(leg.GetTreeId()) != nil {
		return nil
	}
	l.Trees = append(l.Trees, &pb.TreeLabel{TreeId: leg.GetTreeId()})
	if err := l.GrowTree(leg.GetTreeId(), 1); err != nil {
		return fmt.Errorf("put leg %s: %w", leg.GetLegId(), err)
	}
	return nil
}

// GrowTree gives a tree n extents of the reserve, or as many as there are: ErrNoReserve if there is
// none.
func (l *Label) GrowTree(id string, n int) error {
	t := l.Tree(id)
	if t == nil {
		return fmt.Errorf("tree %s: not there", id)
	}
	reserve := ExtentNumbers(l.Reserve)
	if len(reserve) == 0 {
		return fmt.Errorf("tree %s: %w", id, ErrNoReserve)
	}
	n = min(n, len(reserve))
	t.Extents = runsOf(append(ExtentNumbers(t.Extents), reserve[:n]...))
	l.Reserve = runsOf(reserve[n:])
	return l.settle()
}

// ShrinkTree returns to the reserve all extents of a tree but those to keep, which the home extent
// always is.
func (l *Label) ShrinkTree(id string, keep func(extent uint32) bool) error {
	t := l.Tree(id)
	if t == nil {
		return fmt.Errorf("tree %s: not there", id)
	}
	all := ExtentNumbers(t.Extents)
	var kept []uint32
	for i, e := range all {
		if i == 0 || keep(e) {
			kept = append(kept, e)
			continue
		}
		l.reserve(e)
	}
	t.Extents = runsOf(kept)
	return l.settle()
}

// reserve adds an extent to the reserve.
func (l *Label) reserve(extents ...uint32) {
	all := append(ExtentNumbers(l.Reserve), extents...)
	slices.Sort(all)
	l.Reserve = runsOf(all)
}

// Alone reports whether a mapped leg is the last one of its tree, which goes with it.
func (l *Label) Alone(leg *pb.LegLabel) bool {
	return !slices.ContainsFunc(l.Legs, func(o *pb.LegLabel) bool {
		return o.GetTreeId() == leg.GetTreeId() && o.GetLegId() != leg.GetLegId()
	})
}

// uproot returns the extents of trees without legs to the reserve.
func (l *Label) uproot() {
	l.Trees = slices.DeleteFunc(l.Trees, func(t *pb.TreeLabel) bool {
		if slices.ContainsFunc(l.Legs, func(leg *pb.LegLabel) bool { return leg.GetTreeId() == t.GetTreeId() }) {
			return false
		}
		l.reserve(ExtentNumbers(t.GetExtents())...)
		return true
	})
}

// SetGrant makes the reserve what is granted and neither a tree nor another leg has: a manager that was
// restored may grant what it has forgotten to have given away. Trees keep what they have, granted or
// not.
func (l *Label) SetGrant(granted []*pb.Extent) error {
	l.Reserve = l.ungiven(granted)
	return l.settle()
}

// Granted reports whether the reserve is what SetGrant would make it.
func (l *Label) Granted(granted []*pb.Extent) bool {
	return slices.EqualFunc(l.ungiven(granted), l.Reserve, func(a, b *pb.Extent) bool { return proto.Equal(a, b) })
}

// ungiven are the extents of a grant that neither a tree nor a leg has.
func (l *Label) ungiven(granted []*pb.Extent) []*pb.Extent {
	if len(granted) == 0 {
		return nil
	}
	taken := map[uint32]bool{}
	for _, t := range l.Trees {
		for _, e := range ExtentNumbers(t.GetExtents()) {
			taken[e] = true
		}
	}
	for _, leg := range l.Legs {
		for _, e := range ExtentNumbers(leg.GetExtents()) {
			taken[e] = true
		}
	}
	rest := slices.DeleteFunc(ExtentNumbers(granted), func(e uint32) bool { return taken[e] })
	slices.Sort(rest)
	return runsOf(rest)
}

// Ready reports whether the record of a leg says that hosts may have it: its first part is zeroed or holds
// its data, and it is not going back to a snapshot.
func Ready(leg *pb.LegLabel) bool { return leg.GetZeroed() && !leg.GetGoingBack() }

// Prepared records that a mapped leg is in its tree, which is formatted, with this size; or that a based one
// holds what a snapshot does. Its record must still have the revision for which that was done.
func (l *Label) Prepared(id block.LegID, revision uint64, size block.Size) error {
	leg := l.Leg(id)
	if leg == nil || !InTree(leg) || l.Tree(leg.GetTreeId()) == nil {
		return fmt.Errorf("leg %v: not there", id)
	}
	if leg.GetRevision() != revision {
		return fmt.Errorf("leg %v: prepared for revision %d, and its record has %d", id, revision, leg.GetRevision())
	}
	if Based(leg) {
		leg.GoingBack = false
		return nil
	}
	l.Tree(leg.GetTreeId()).Formatted = true
	leg.Zeroed, leg.ZeroedExtents = true, max(leg.ZeroedExtents, uint32((size+block.ExtentSize-1)/block.ExtentSize))
	return nil
}

// FormattedTree records that a tree is formatted, before a leg in it is prepared.
func (l *Label) FormattedTree(name string) error {
	t := l.Tree(name)
	if t == nil {
		return fmt.Errorf("tree %s: not there", name)
	}
	t.Formatted = true
	return nil
}

// Unprepared records that the place of a leg in its tree is to be made again. A based one keeps its extents,
// which hold what the snapshot has.
func (l *Label) Unprepared(id block.LegID) error {
	leg := l.Leg(id)
	if leg == nil || !InTree(leg) {
		return fmt.Errorf("leg %v: not there", id)
	}
	if Based(leg) {
		leg.GoingBack = true
		return nil
	}
	leg.Zeroed, leg.ZeroedExtents = false, 0
	return nil
}

// checkTrees says what is wrong with the trees, and which extents they and the reserve have.
func (l *Label) checkTrees() (runs []extentRun, err error) {
	for i, t := range l.Trees {
		if _, err := block.ParseUUID(t.GetTreeId()); err != nil {
			return nil, fmt.Errorf("tree %q: %w", t.GetTreeId(), err)
		}
		if i > 0 && l.Trees[i-1].GetTreeId() >= t.GetTreeId() {
			return nil, fmt.Errorf("tree %s: out of order or twice", t.GetTreeId())
		}
		if len(t.GetExtents()) == 0 {
			return nil, fmt.Errorf("tree %s: no extents", t.GetTreeId())
		}
		runs = append(runs, runsNamed("tree "+t.GetTreeId(), t.GetExtents())...)
	}
	for _, leg := range l.Legs {
		if (InTree(leg) || leg.GetTreeId() != "") && l.Tree(leg.GetTreeId()) == nil {
			return nil, fmt.Errorf("leg %s: its tree %q is not there", leg.GetLegId(), leg.GetTreeId())
		}
	}
	return append(runs, runsNamed("the reserve", l.Reserve)...), nil
}

// extentRun is a run of extents with its owner, for people.
type extentRun struct {
	start, end uint64
	owner      string
}

func runsNamed(owner string, extents []*pb.Extent) (runs []extentRun) {
	for _, e := range extents {
		runs = append(runs, extentRun{uint64(e.GetStart()), uint64(e.GetStart()) + uint64(e.GetCount()), owner})
	}
	return runs
}

// checkRuns refuses extents that are beyond the drive's or belong to two owners.
func checkRuns(runs []extentRun, extents int) error {
	for _, r := range runs {
		if r.start >= r.end || r.end > uint64(extents) {
			return fmt.Errorf("%s: extents %d+%d: the drive has %d", r.owner, r.start, r.end-r.start, extents)
		}
	}
	slices.SortFunc(runs, func(a, b extentRun) int { return cmp.Compare(a.start, b.start) })
	for i := 1; i < len(runs); i++ {
		if a, b := runs[i-1], runs[i]; b.start < a.end {
			return fmt.Errorf("%s: extent %d is taken by %s", b.owner, b.start, a.owner)
		}
	}
	return nil
}

// spaceRoom is the room on a label for its trees and its reserve.
func (l *Label) spaceRoom() (sum block.Size) {
	for _, t := range l.Trees {
		sum += block.Size(treeRecord + runRecord*len(t.GetExtents()))
	}
	return sum + block.Size(runRecord*len(l.Reserve))
}

// The most bytes of a tree's record, and of each run in it.
const (
	treeRecord = 64
	runRecord  = 16
)

func sortTrees(trees []*pb.TreeLabel) {
	slices.SortFunc(trees, func(a, b *pb.TreeLabel) int { return strings.Compare(a.GetTreeId(), b.GetTreeId()) })
}

// Entries of the payload for trees and the reserve.
func (l *Label) spaceEntries() (all []entry, err error) {
	for _, t := range l.Trees {
		message, err := proto.MarshalOptions{Deterministic: true}.Marshal(t)
		if err != nil {
			return nil, fmt.Errorf("encode tree %s: %w", t.GetTreeId(), err)
		}
		all = append(all, entry{entryTree, message})
	}
	if len(l.Reserve) > 0 {
		message, err := proto.MarshalOptions{Deterministic: true}.Marshal(&pb.ReserveLabel{Extents: l.Reserve})
		if err != nil {
			return nil, fmt.Errorf("encode reserve: %w", err)
		}
		all = append(all, entry{entryReserve, message})
	}
	if l.Pinned {
		all = append(all, entry{entryPinned, nil})
	}
	return all, nil
}

// decodeSpace reads the entries of trees and of the reserve.
func (l *Label) decodeSpace(entries []entry) error {
	for i, e := range entries {
		var err error
		switch e.kind {
		case entryTree:
			t := new(pb.TreeLabel)
			err = proto.Unmarshal(e.message, t)
			l.Trees = append(l.Trees, t)
		case entryReserve:
			r := new(pb.ReserveLabel)
			err = proto.Unmarshal(e.message, r)
			l.Reserve = append(l.Reserve, r.GetExtents()...)
		case entryPinned:
			l.Pinned = true
		}
		if err != nil {
			return fmt.Errorf("%w: entry %d: %w", ErrCorrupt, i, err)
		}
	}
	return nil
}

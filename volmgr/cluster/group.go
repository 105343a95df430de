// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"slices"

	"weft.dev/weft/proto/block"
)

// Each column of a volume is a redundancy group, and its legs are the members. Only the
// group decides what a column survives: no rule here counts copies.

// layout returns the layout of the requested volume with this many stripes.
func (in CreateVolume) layout(stripes int) block.Layout {
	return block.Layout{Stripes: stripes, Copies: in.Copies, Chunk: in.Chunk, Data: in.Data, Parity: in.Parity, Integrity: in.Integrity}
}

// group returns the redundancy group that each column of the requested volume will be.
func (in CreateVolume) group() block.Group { return in.layout(1).Group() }

// groupField names the request field that sets the number of members.
func groupField(g block.Group) string {
	if g.Kind == block.Code {
		return "parity"
	}
	return "copies"
}

// members returns, for each column, the members whose legs count.
func (v *Volume) members(counts func(*Leg) bool) []block.MemberSet {
	sets := make([]block.MemberSet, v.Layout.Stripes)
	for i := range v.Legs {
		if l := &v.Legs[i]; counts(l) {
			sets[l.Column] = sets[l.Column].With(l.Copy)
		}
	}
	return sets
}

// inSync returns the members of each column that are in sync by record, suspect or not.
func (v *Volume) inSync() []block.MemberSet {
	return v.members(func(l *Leg) bool { return l.State == LegInSync })
}

// trusted returns the members of each column that are known to hold every acknowledged write.
func (v *Volume) trusted() []block.MemberSet { return v.members((*Leg).trusted) }

// unreadable returns the first column that cannot be read from its good members, or -1.
func (v *Volume) unreadable(good []block.MemberSet) int {
	return slices.IndexFunc(good, func(s block.MemberSet) bool { return !v.Layout.Group().Readable(s) })
}

// dispensable reports whether a leg's column can be read from its other in-sync legs.
func (v *Volume) dispensable(l *Leg) bool {
	return v.Layout.Group().Readable(v.inSync()[l.Column].Without(l.Copy))
}

// serving returns the members of each column that can be read now.
func (s *State) serving(v *Volume) []block.MemberSet {
	return v.members(func(l *Leg) bool { return l.trusted() && s.servable(l) })
}

// conditions say how much redundancy each column has now.
func (s *State) conditions(v *Volume) (all []block.Condition) {
	g := v.Layout.Group()
	for _, good := range s.serving(v) {
		all = append(all, g.ConditionOf(good))
	}
	return all
}

// explainRedundancy says what each column of a code can still lose. For a mirror, the facts
// of the legs say that already.
func (s *State) explainRedundancy(e *Explanation, v *Volume) {
	g := v.Layout.Group()
	if g.Kind == block.Mirror {
		return
	}
	for c, good := range s.serving(v) {
		n := good.Len()
		fact := fmt.Sprintf("column %d is %v: %d of its %d members can be read and %d are needed", c, g.ConditionOf(good), n, g.Members, g.Needs)
		if n >= g.Needs {
			fact += fmt.Sprintf(", so it survives the loss of %d more", n-g.Needs)
		}
		e.Facts = append(e.Facts, fact)
	}
}

// needs begins a sentence: "2 copies need".
func needs(g block.Group) string {
	if g.Members == 1 {
		return g.String() + " needs"
	}
	return g.String() + " need"
}

// needed says how many legs in sync a column needs: "an in-sync leg".
func needed(g block.Group) string {
	if g.Needs == 1 {
		return "an in-sync leg"
	}
	return fmt.Sprintf("%d in-sync legs", g.Needs)
}

// tooFew says that a column has fewer: "no in-sync leg".
func tooFew(g block.Group) string {
	if g.Needs == 1 {
		return "no in-sync leg"
	}
	return fmt.Sprintf("fewer than %d in-sync legs", g.Needs)
}

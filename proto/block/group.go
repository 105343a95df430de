// SPDX-License-Identifier: Apache-2.0

package block

import (
	"fmt"
	"math/bits"
)

// GroupKind is the way in which the members of a redundancy group protect its data.
type GroupKind uint8

// The kinds of groups.
const (
	Mirror GroupKind = iota // each member holds all of the data
	Code                    // each data member holds a share; parity members can replace lost shares
)

// MaxMembers is the largest number of members that a group can have.
const MaxMembers = 32

// Group is a redundancy group: the legs of one column of a volume, which together store the
// column's data. Members are numbered from 0; in a code, the data members come first. While a
// mirror's copy is made again elsewhere, the new copy has a number that is not in All.
type Group struct {
	Kind    GroupKind
	Members int
	Needs   int // any so many members suffice to read all of the data
}

// MemberSet is a set of members of a group.
type MemberSet uint32

// Members is the set of the members with these numbers.
func Members(numbers ...int) (s MemberSet) {
	for _, n := range numbers {
		s = s.With(n)
	}
	return s
}

// With is the set with one more member.
func (s MemberSet) With(n int) MemberSet { return s | 1<<n }

// Without is the set without one member.
func (s MemberSet) Without(n int) MemberSet { return s &^ (1 << n) }

// Has reports whether a member is in the set.
func (s MemberSet) Has(n int) bool { return s&(1<<n) != 0 }

// Len is the number of members in the set.
func (s MemberSet) Len() int { return bits.OnesCount32(uint32(s)) }

// All is the set of all members of the group.
func (g Group) All() MemberSet { return MemberSet(uint64(1)<<g.Members - 1) }

// Tolerates is how many members, in any combination, the group can lose.
func (g Group) Tolerates() int { return g.Members - g.Needs }

// Survives reports whether all of the data can be read without the lost members.
func (g Group) Survives(lost MemberSet) bool { return g.Readable(g.All() &^ lost) }

// Readable reports whether all of the data can be read from the good members alone.
func (g Group) Readable(good MemberSet) bool { return g.count(good) >= g.Needs }

// count is how many of the good members count: in a mirror one is as good as another.
func (g Group) count(good MemberSet) int {
	if g.Kind == Mirror {
		return min(good.Len(), g.Members)
	}
	return (good & g.All()).Len()
}

// Sources chooses from the good members those to read all of the data from: as few as
// possible, and data members before parity members. The set is empty if the good members do
// not suffice.
func (g Group) Sources(good MemberSet) (sources MemberSet) {
	if !g.Readable(good) {
		return 0
	}
	for n := 0; sources.Len() < g.Needs; n++ {
		if good.Has(n) {
			sources = sources.With(n)
		}
	}
	return sources
}

// Condition is how much of a group's redundancy is left.
type Condition int

// The conditions of a group, from best to worst.
const (
	Whole    Condition = iota // no member is lost
	Degraded                  // a member is lost; any other one may still be lost
	Critical                  // a member is lost; losing one more would lose data
	Lost                      // the remaining members do not suffice
)

func (c Condition) String() string {
	return [...]string{"whole", "degraded", "critical", "lost"}[c]
}

// Condition is the group's condition without the lost members.
func (g Group) Condition(lost MemberSet) Condition { return g.ConditionOf(g.All() &^ lost) }

// ConditionOf is the group's condition with these good members.
func (g Group) ConditionOf(good MemberSet) Condition {
	switch n := g.Members - g.count(good); {
	case n == 0:
		return Whole
	case n < g.Tolerates():
		return Degraded
	case n == g.Tolerates():
		return Critical
	}
	return Lost
}

// String prints "2 copies", or "4+2 members" of a code.
func (g Group) String() string {
	switch {
	case g.Kind == Code:
		return fmt.Sprintf("%d+%d members", g.Needs, g.Tolerates())
	case g.Members == 1:
		return "1 copy"
	}
	return fmt.Sprintf("%d copies", g.Members)
}

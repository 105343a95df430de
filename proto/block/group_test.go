// SPDX-License-Identifier: Apache-2.0

package block

import "testing"

// groups are all mirrors, and codes with all numbers of data and parity members up to 8.
func groups() (all []Group) {
	for copies := 1; copies <= MaxCopies; copies++ {
		all = append(all, Layout{Copies: copies}.Group())
	}
	for data := 1; data <= 8; data++ {
		for parity := 1; data+parity <= 8; parity++ {
			all = append(all, Layout{Data: data, Parity: parity}.Group())
		}
	}
	return all
}

// model counts the remaining members of a group one by one.
type model struct{ left, gone, needs int }

func count(g Group, lost MemberSet) model {
	m := model{needs: 1}
	if g.Kind == Code {
		m.needs = g.Needs
	}
	for n := range g.Members {
		if lost>>n&1 == 1 {
			m.gone++
		} else {
			m.left++
		}
	}
	return m
}

func (m model) condition() Condition {
	switch {
	case m.left < m.needs:
		return Lost
	case m.gone == 0:
		return Whole
	case m.left-1 < m.needs:
		return Critical
	}
	return Degraded
}

func TestGroupSurvivesWhatAModelThatCountsSurvives(t *testing.T) {
	for _, g := range groups() {
		if err := checkTolerates(g); err != "" {
			t.Error(err)
		}
		for lost := MemberSet(0); lost <= g.All(); lost++ {
			m := count(g, lost)
			if got, want := g.Survives(lost), m.left >= m.needs; got != want {
				t.Errorf("%v: Survives(%b) = %v, want %v", g, lost, got, want)
			}
			if got, want := g.Condition(lost), m.condition(); got != want {
				t.Errorf("%v: Condition(%b) = %v, want %v", g, lost, got, want)
			}
			sources := g.Sources(g.All() &^ lost)
			switch {
			case sources&lost != 0:
				t.Errorf("%v: Sources without %b = %b, of which some are lost", g, lost, sources)
			case m.left >= m.needs && (sources.Len() != m.needs || !g.Readable(sources)):
				t.Errorf("%v: Sources without %b = %b, want %d that are enough", g, lost, sources, m.needs)
			case m.left < m.needs && sources != 0:
				t.Errorf("%v: Sources without %b = %b, want none", g, lost, sources)
			}
		}
	}
}

// checkTolerates compares Tolerates with a search over all sets of lost members.
func checkTolerates(g Group) string {
	for n := range g.Members + 1 {
		any := true
		for lost := MemberSet(0); lost <= g.All(); lost++ {
			any = any && (lost.Len() != n || g.Survives(lost))
		}
		if any != (n <= g.Tolerates()) {
			return g.String() + ": Tolerates is not how many members may be lost"
		}
	}
	return ""
}

func TestGroupOfTheMostMembers(t *testing.T) {
	g := Layout{Data: 28, Parity: 4}.Group()
	if got := g.All().Len(); got != MaxMembers {
		t.Errorf("All has %d members, want %d", got, MaxMembers)
	}
	if lost := Members(0, 7, 30, 31); !g.Survives(lost) || g.Survives(lost.With(8)) || g.Sources(g.All()&^lost).Has(31) {
		t.Errorf("%v: with 4 lost it is to survive, with 5 not", g)
	}
	if s := Members(3, 5); !s.Has(5) || s.Without(5).Has(5) || s.Without(4) != s {
		t.Errorf("Members(3, 5) = %b", s)
	}
}

func TestLayoutOfACode(t *testing.T) {
	l := Layout{Stripes: 2, Data: 4, Parity: 2, Chunk: 128 * KiB}
	if err := l.Check(); err != nil || l.Legs() != 12 || l.LegSize(8*GiB) != GiB || l.String() != "2×(4+2) chunk 128KiB" {
		t.Errorf("%v: Check %v, %d legs of %v", l, err, l.Legs(), l.LegSize(8*GiB))
	}
	for _, bad := range []Layout{
		{Stripes: 1, Chunk: MiB, Copies: 2, Data: 4, Parity: 2},
		{Stripes: 1, Chunk: MiB, Data: 4},
		{Stripes: 1, Chunk: MiB, Parity: 1},
		{Stripes: 1, Chunk: MiB, Data: 30, Parity: 3},
	} {
		if bad.Check() == nil {
			t.Errorf("%v: Check found nothing", bad)
		}
	}
}

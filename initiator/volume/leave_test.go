// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"weft.dev/weft/proto/block"
)

func id(column, copy int) block.LegID {
	return block.LegID{UUID: block.UUIDFromRandom([16]byte{1, byte(column), byte(copy)})}
}

// on returns a healthy member on a node; the node's name identifies it in a test's outcome.
func on(column, copy int, node string) *member {
	l := &Link{Leg: id(column, copy), Column: column, Copy: copy}
	return &member{Place: Place{column, copy}, Leg: l.Leg, Paths: []Path{{Subsystem: block.NQN(node)}}, Link: l, Source: true, Answers: true}
}

// mirror is a group of up to three copies.
var mirror = block.Group{Kind: block.Mirror, Members: 3, Needs: 1}

func silent(m *member) *member   { m.Lost, m.Waiting = lost(NoAnswer, "silent"), true; return m }
func broken(m *member) *member   { m.Lost = lost(IOError, "error"); return m }
func quiet(m *member) *member    { m.Answers = false; return m }
func unlinked(m *member) *member { m.Link = nil; return m }
func copied(m *member) *member   { m.Source = false; return m }

func TestWhatLeaves(t *testing.T) {
	const alone = "no other copy can replace it"
	for _, c := range []struct {
		name    string
		members []*member
		gone    []bool
		stays   []string
	}{
		{"nobody, if none is lost", []*member{on(0, 0, "a"), on(0, 1, "b")}, []bool{false, false}, []string{"", ""}},
		{"a silent copy, if the other one is good", []*member{on(0, 0, "a"), silent(on(0, 1, "b"))}, []bool{false, true}, []string{"", ""}},
		{"not the last copy of a column", []*member{silent(on(0, 0, "a"))}, []bool{false}, []string{alone}},
		{"not while the other copy does not answer, though it is not lost yet", []*member{quiet(on(0, 0, "a")), silent(on(0, 1, "b"))}, []bool{false, false}, []string{"", "no other copy answers"}},
		{"at any time what is recorded stale", []*member{quiet(on(0, 0, "a")), unlinked(silent(on(0, 1, "b")))}, []bool{false, true}, []string{"", ""}},
		{"neither of two silent copies", []*member{silent(on(0, 0, "a")), silent(on(0, 1, "b"))}, []bool{false, false}, []string{alone, alone}},
		{"not a copy whose twin is only being rebuilt", []*member{silent(on(0, 0, "a")), copied(on(0, 1, "b"))}, []bool{false, false}, []string{alone, ""}},
		{"a rebuilding copy, at any time", []*member{on(0, 0, "a"), silent(copied(on(0, 1, "b")))}, []bool{false, true}, []string{"", ""}},
		{"with a silent copy all that share its connection",
			[]*member{on(0, 0, "a"), silent(on(0, 1, "b")), on(1, 0, "b"), on(1, 1, "a")}, []bool{false, true, true, false}, []string{"", "", "", ""}},
		{"with a broken copy nobody else",
			[]*member{on(0, 0, "a"), broken(on(0, 1, "b")), on(1, 0, "b"), on(1, 1, "a")}, []bool{false, true, false, false}, []string{"", "", "", ""}},
		{"not a silent copy whose connection carries the last copy of another column",
			[]*member{on(0, 0, "a"), silent(on(0, 1, "b")), on(1, 0, "b")}, []bool{false, false, false},
			[]string{"", "its connection carries leg " + id(1, 0).String() + " of column 1, which must stay", alone}},
	} {
		t.Run(c.name, func(t *testing.T) {
			leave(mirror, c.members)
			var gone []bool
			var stays []string
			for _, m := range c.members {
				gone, stays = append(gone, m.Gone), append(stays, m.Stays)
			}
			if diff := cmp.Diff(c.stays, stays); diff != "" {
				t.Errorf("why lost ones stay (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(c.gone, gone); diff != "" {
				t.Errorf("who leaves (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAnswersOutweighAnOlderWantedState(t *testing.T) {
	l := &Link{Leg: id(0, 1), Revision: 3}
	r := NewRecords()
	if !r.InSync(l) || r.Stale(l) {
		t.Error("a leg that is wanted in sync does not count as in sync")
	}
	r.NoteStale(l.Leg, 3)
	if r.InSync(l) || !r.Stale(l) {
		t.Error("a leg recorded stale counts as in sync by an older wanted state")
	}
	back := &Link{Leg: l.Leg, Revision: 4, Rebuilding: true}
	if r.InSync(back) || r.Stale(back) {
		t.Error("a leg of a new revision that is to be rebuilt must be neither in sync nor stale")
	}
	r.NoteInSync(l.Leg, 4)
	if !r.InSync(back) {
		t.Error("a leg recorded in sync does not count as such by an older wanted state")
	}
	if again := (&Link{Leg: l.Leg, Revision: 5, Rebuilding: true}); r.InSync(again) {
		t.Error("a record of revision 4 counts for revision 5")
	}
	if r.InSync(nil) {
		t.Error("a leg that is not wanted counts as in sync")
	}
}

func TestOneLegIsSparedWhereAllSourcesAreLost(t *testing.T) {
	unlinked := func(m *member) *member { m.Link = nil; return m }
	all := func(block.LegID) bool { return true }
	none := func(block.LegID) bool { return false }
	for _, c := range []struct {
		name    string
		members []*member
		answers func(block.LegID) bool
		want    int
	}{
		{"one source is well", []*member{broken(on(0, 0, "a")), on(0, 1, "b")}, all, -1},
		{"all are lost", []*member{broken(on(0, 0, "a")), broken(on(0, 1, "b"))}, all, 0},
		{"none answers", []*member{silent(on(0, 0, "a")), silent(on(0, 1, "b"))}, none, -1},
		{"the first is recorded stale", []*member{unlinked(broken(on(0, 0, "a"))), broken(on(0, 1, "b"))}, all, 1},
		{"a copy that is rebuilt is no source", []*member{broken(on(0, 0, "a")), copied(on(0, 1, "b"))}, all, 0},
		{"another column's does not help", []*member{on(1, 0, "a"), broken(on(0, 0, "a"))}, all, 1},
	} {
		if got := spared(mirror, c.members, 0, c.answers); got != c.want {
			t.Errorf("%s: member %d is spared, want %d", c.name, got, c.want)
		}
	}
}

// A healthy leg leaves with one that shares its only path, and only with it.
func TestALegStaysIfTheLegThatSharesItsPathStays(t *testing.T) {
	for _, c := range []struct {
		name    string
		members []*member
	}{
		{"as the last copy", []*member{silent(on(0, 0, "a")), on(1, 0, "a"), on(1, 1, "c")}},
		{"while no other copy answers", []*member{silent(on(0, 0, "a")), on(1, 0, "a"), on(1, 1, "c"), quiet(on(0, 1, "b"))}},
	} {
		leave(mirror, c.members)
		for _, m := range c.members {
			if m.Gone || m.Column == 1 && m.Lost.any() {
				t.Errorf("%s: leg %v leaves: %v", c.name, m.Place, m.Lost)
			}
		}
	}
}

// The rules ask the group what it survives: any two of these three members hold all data.
func TestMembersOfACodeLeaveWhileTheOthersSuffice(t *testing.T) {
	code := block.Group{Kind: block.Code, Members: 3, Needs: 2}
	for _, c := range []struct {
		name    string
		members []*member
		gone    []bool
	}{
		{"one is lost", []*member{on(0, 0, "a"), silent(on(0, 1, "b")), on(0, 2, "c")}, []bool{false, true, false}},
		{"two are lost", []*member{on(0, 0, "a"), silent(on(0, 1, "b")), silent(on(0, 2, "c"))}, []bool{false, false, false}},
		{"one is lost, and one of the others does not answer", []*member{quiet(on(0, 0, "a")), silent(on(0, 1, "b")), on(0, 2, "c")}, []bool{false, false, false}},
	} {
		leave(code, c.members)
		for i, m := range c.members {
			if m.Gone != c.gone[i] {
				t.Errorf("%s: member %d leaves: %v, want %v (%s)", c.name, i, m.Gone, c.gone[i], m.Stays)
			}
		}
	}
	all := func(block.LegID) bool { return true }
	members := []*member{on(0, 0, "a"), broken(on(0, 1, "b")), broken(on(0, 2, "c"))}
	if got := spared(code, members, 0, all); got != 1 {
		t.Errorf("with one member that is not lost, member %d is spared, want 1", got)
	}
	members[1].Lost = Loss{}
	if got := spared(code, members, 0, all); got != -1 {
		t.Errorf("with two members that are not lost, member %d is spared, want none", got)
	}
}

// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"fmt"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
)

// member is a copy that takes part in the volume's I/O, or that some I/O still waits for.
type member struct {
	Place
	Leg     block.LegID
	Node    string
	Paths   []Path    // the paths to it
	Link    *Link     // nil if the manager has it recorded stale
	Source  bool      // it is in sync; else it is being rebuilt
	Lost    Loss      // why it should leave
	Answers bool      // it answers now
	Early   bool      // it is lost by its target's state alone, before its window has passed
	Waiting bool      // I/O may be waiting on its paths
	Gone    bool      // it leaves now
	Stays   string    // why it stays although it is lost
	since   time.Time // when its silence or error began
}

// on reports whether m can be reached only by these paths.
func (m *member) on(paths map[Path]bool) bool {
	return len(m.Paths) > 0 && !slices.ContainsFunc(m.Paths, func(p Path) bool { return !paths[p] })
}

// spared picks a lost member that stays because its column cannot be read from the sources that
// are not lost: the first source that answers. It returns its index, or -1 if they suffice or none
// answers.
func spared(group block.Group, members []*member, column int, answers func(block.LegID) bool) int {
	first, good := -1, block.MemberSet(0)
	for i, m := range members {
		switch {
		case m.Column != column || !m.Source:
		case !m.Lost.any():
			good = good.With(m.Copy)
		case first < 0 && m.Link != nil && answers(m.Leg):
			first = i
		}
	}
	if group.Readable(good) {
		return -1
	}
	return first
}

// leave sets Gone on the largest set of lost members that can leave. Each column keeps enough
// sources to be read, and a member whose last path is cut for another leaves with it.
func leave(group block.Group, members []*member) {
	blocked := map[block.LegID]bool{}
	for range len(members) + 1 {
		spread(members, blocked)
		if !hold(group, members, blocked) {
			return
		}
	}
}

// spread sets Gone on the lost members that are not blocked, and on the members whose every
// path must be cut to release I/O.
func spread(members []*member, blocked map[block.LegID]bool) {
	for _, m := range members {
		if m.Lost.Reason == SharedPath { // by a member that turned out to stay
			m.Lost = Loss{}
		}
		m.Gone = m.Lost.any() && !blocked[m.Leg]
	}
	cut := released(members)
	for _, m := range members {
		if m.on(cut) && !m.Gone && !blocked[m.Leg] {
			m.Gone = true
			if !m.Lost.any() {
				m.Lost = lost(SharedPath, "its connection carries a lost leg")
			}
		}
	}
}

// released returns the paths that must be cut for the members that leave.
func released(members []*member) map[Path]bool {
	cut := map[Path]bool{}
	for _, m := range members {
		for _, path := range m.Paths {
			if m.Gone && m.Waiting {
				cut[path] = true
			}
		}
	}
	return cut
}

// hold blocks the members that turn out to be unable to leave, and reports whether there are
// any.
func hold(group block.Group, members []*member, blocked map[block.LegID]bool) (more bool) {
	needed := map[Path]*member{} // by path: the staying member that has no other
	cut := released(members)
	for _, m := range members {
		if m.Gone {
			continue
		}
		for _, path := range m.Paths {
			if m.on(cut) {
				needed[path] = m
			}
		}
	}
	for _, m := range members {
		if !m.Gone || blocked[m.Leg] {
			continue
		}
		stay, answer := staying(members, m.Column)
		switch other := m.carries(needed); {
		case !group.Readable(stay):
			m.Stays = "no other copy can replace it"
		case m.Link != nil && !group.Readable(answer):
			// The other copy may have lost its power, and with it writes that only its drive's
			// cache held. Until it answers, its I/O waits in any case.
			m.Stays = "no other copy answers"
		case m.Waiting && other != nil:
			m.Stays = fmt.Sprintf("its connection carries leg %s of column %d, which must stay", other.Leg, other.Column)
		default:
			continue
		}
		blocked[m.Leg], more = true, true
	}
	return more
}

// staying are the good members of a column that do not leave, and those of them that answer.
func staying(members []*member, column int) (stay, answer block.MemberSet) {
	for _, m := range members {
		if m.Column != column || m.Gone || !m.good() {
			continue
		}
		stay = stay.With(m.Copy)
		if m.Answers {
			answer = answer.With(m.Copy)
		}
	}
	return stay, answer
}

// good reports whether m has every acknowledged write, and is not lost.
func (m *member) good() bool { return m.Source && m.Link != nil && !m.Lost.any() }

// carries returns the staying member that would lose its last path with those of m; nil if
// none.
func (m *member) carries(needed map[Path]*member) *member {
	for _, path := range m.Paths {
		if other := needed[path]; other != nil {
			return other
		}
	}
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package attachment

import (
	"fmt"

	"weft.dev/weft/proto/block"
)

// Member is a copy of a column that takes part in the volume's I/O.
type Member struct {
	Column  int
	Leg     block.LegID
	NQN     block.NQN // of the connection that it is reached through
	Link    *Link     // nil if the manager has it recorded stale
	Source  bool      // else it is being rebuilt
	Lost    string    // why it must go; empty if it need not
	Waiting bool      // I/O may be waiting on its connection
	Gone    bool      // it leaves now
	Stays   string    // why it does not, though it is lost
}

// Spared is the index of the member of a column that stays although it is lost,
// since each source of the column is: the first one that answers. It is -1 if a
// source is not lost, or none of them answers.
func Spared(members []*Member, column int, answers func(block.LegID) bool) int {
	first := -1
	for i, m := range members {
		switch {
		case m.Column != column || !m.Source:
		case m.Lost == "":
			return -1
		case first < 0 && m.Link != nil && answers(m.Leg):
			first = i
		}
	}
	return first
}

// Leave sets Gone on the largest set of lost members that can leave: each column
// keeps a source, and whatever shares a connection that must be cut leaves, too.
func Leave(members []*Member) {
	blocked := map[block.LegID]bool{}
	for range len(members) + 1 {
		spread(members, blocked)
		if !hold(members, blocked) {
			return
		}
	}
}

// spread sets Gone on all lost members that are not blocked, and on those that
// share a connection with one whose I/O must be released.
func spread(members []*Member, blocked map[block.LegID]bool) {
	cut := map[block.NQN]bool{}
	for _, m := range members {
		m.Gone = m.Lost != "" && !blocked[m.Leg]
		cut[m.NQN] = cut[m.NQN] || m.Gone && m.Waiting
	}
	for _, m := range members {
		if cut[m.NQN] && !m.Gone && !blocked[m.Leg] {
			m.Gone = true
			if m.Lost == "" {
				m.Lost = "its connection carries a lost leg"
			}
		}
	}
}

// hold blocks the members that cannot leave after all; false if there are none.
func hold(members []*Member, blocked map[block.LegID]bool) (more bool) {
	stays := map[int]bool{}
	needed := map[block.NQN]*Member{} // by which of those that stay
	for _, m := range members {
		if m.Gone {
			continue
		}
		stays[m.Column] = stays[m.Column] || m.Source && m.Link != nil && m.Lost == ""
		needed[m.NQN] = m
	}
	for _, m := range members {
		if !m.Gone || blocked[m.Leg] {
			continue
		}
		switch other := needed[m.NQN]; {
		case !stays[m.Column]:
			m.Stays = "no other copy can stand in"
		case m.Waiting && other != nil:
			m.Stays = fmt.Sprintf("its connection carries leg %s of column %d, which must stay", other.Leg, other.Column)
		default:
			continue
		}
		blocked[m.Leg], more = true, true
	}
	return more
}

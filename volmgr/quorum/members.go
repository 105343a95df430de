// SPDX-License-Identifier: Apache-2.0

package quorum

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"
)

// ID names a member for all time. A member whose disk was lost comes back under another one,
// since it does not know any more what it has acknowledged and voted.
type ID uint64

func (id ID) String() string { return fmt.Sprintf("%016x", uint64(id)) }

// ParseID is the inverse of ID.String.
func ParseID(s string) (ID, error) {
	id, err := strconv.ParseUint(s, 16, 64)
	if err != nil || ID(id).String() != s || id == 0 {
		return 0, fmt.Errorf("member %q: must be 16 hexadecimal digits", s)
	}
	return ID(id), nil
}

// Member is one of those that keep the log.
type Member struct {
	ID      ID
	Address string
	Name    string `json:",omitempty"` // that its certificate has to have; empty: any
	Voter   bool   // otherwise it learns
}

// Members are the members of a quorum, sorted by ID.
type Members []Member

// Find returns a member.
func (m Members) Find(id ID) (Member, bool) {
	for _, one := range m {
		if one.ID == id {
			return one, true
		}
	}
	return Member{}, false
}

// Voters returns those that vote.
func (m Members) Voters() (ids []ID) {
	for _, one := range m {
		if one.Voter {
			ids = append(ids, one.ID)
		}
	}
	return ids
}

// with returns the members after a change of one; a removed one is nil.
func (m Members) with(id ID, changed *Member) Members {
	after := slices.DeleteFunc(slices.Clone(m), func(one Member) bool { return one.ID == id })
	if changed != nil {
		after = append(after, *changed)
	}
	slices.SortFunc(after, func(a, b Member) int {
		if a.ID < b.ID {
			return -1
		}
		return 1
	})
	return after
}

// Encode returns the members as the log keeps them.
func (m Members) Encode() []byte {
	if len(m) == 0 {
		return nil
	}
	text, err := json.Marshal(m)
	if err != nil {
		panic(err) // numbers and strings
	}
	return text
}

// DecodeMembers is the inverse of Encode.
func DecodeMembers(text []byte) (m Members, err error) {
	if len(text) == 0 {
		return nil, nil
	}
	return m, json.Unmarshal(text, &m)
}

// state returns the members as Raft knows them.
func (m Members) state() *raftpb.ConfState {
	s := &raftpb.ConfState{}
	for _, one := range m {
		if one.Voter {
			s.Voters = append(s.Voters, uint64(one.ID))
		} else {
			s.Learners = append(s.Learners, uint64(one.ID))
		}
	}
	return s
}

func contextOf(e *raftpb.Entry) []byte {
	var change raftpb.ConfChangeV2
	if proto.Unmarshal(e.GetData(), &change) != nil {
		return nil
	}
	return change.GetContext()
}

func changesMembers(e *raftpb.Entry) bool { return e.GetType() == raftpb.EntryConfChangeV2 }

// changeMembers applies an entry that changes one member.
func (n *Node) changeMembers(e *raftpb.Entry) error {
	var change raftpb.ConfChangeV2
	if err := proto.Unmarshal(e.GetData(), &change); err != nil {
		return fmt.Errorf("change of the members: %w", err)
	}
	_, text := untag(e)
	changed, err := DecodeMembers(text)
	if err != nil || len(changed) != 1 || len(change.GetChanges()) != 1 {
		return errors.Join(errors.New("change of the members: not of one"), err)
	}
	one := &changed[0]
	if change.GetChanges()[0].GetType() == raftpb.ConfChangeRemoveNode {
		n.applied.Members = n.applied.Members.with(one.ID, nil)
	} else {
		n.applied.Members = n.applied.Members.with(one.ID, one)
	}
	n.raft.ApplyConfChange(&change)
	n.changes = append(n.changes, n.applied)
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package quorum

import (
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"go.etcd.io/raft/v3/tracker"
)

func (Tick) step(n *Node) error {
	n.raft.Tick()
	return nil
}

func (r Receive) step(n *Node) error {
	m := r.Message.pb
	if m.GetTo() != uint64(n.id) {
		return nil // for one that had this address before
	}
	switch m.GetType() {
	case raftpb.MsgProp, raftpb.MsgReadIndex, raftpb.MsgReadIndexResp:
		return nil // no member sends these
	case raftpb.MsgApp, raftpb.MsgSnap:
		n.newest = max(n.newest, m.GetIndex()+uint64(len(m.GetEntries())), m.GetSnapshot().GetMetadata().GetIndex())
	case raftpb.MsgHeartbeat:
		// A leader's heartbeat names only entries that this member has acknowledged.
		if m.GetTerm() >= n.hard.Term && m.GetCommit() > n.newest {
			return fmt.Errorf("entry %d of %d: %w", m.GetCommit(), n.newest, ErrOlderDisk)
		}
	}
	err := n.raft.Step(m)
	if errors.Is(err, raft.ErrStepPeerNotFound) || errors.Is(err, raft.ErrStepLocalMsg) || errors.Is(err, raft.ErrProposalDropped) {
		return nil
	}
	return err
}

// A tag in front of an entry's data says whose proposal it is.
type tag struct {
	by     ID
	ticket Ticket
}

const tagSize = 16

func (t tag) prefix(data []byte) []byte {
	b := make([]byte, 0, tagSize+len(data))
	b = binary.LittleEndian.AppendUint64(b, uint64(t.by))
	b = binary.LittleEndian.AppendUint64(b, uint64(t.ticket))
	return append(b, data...)
}

// untag takes an entry apart. An entry that an election makes has neither tag nor data.
func untag(e *raftpb.Entry) (tag, []byte) {
	data := e.GetData()
	if changesMembers(e) {
		data = contextOf(e)
	}
	if len(data) < tagSize {
		return tag{}, nil
	}
	return tag{ID(binary.LittleEndian.Uint64(data)), Ticket(binary.LittleEndian.Uint64(data[8:]))}, data[tagSize:]
}

func (p Propose) step(n *Node) error {
	if p.Term != n.hard.Term {
		n.answer(p.Ticket, ErrNotLeading)
		return nil
	}
	return n.propose(p.Ticket, false, func() error { return n.raft.Propose(tag{n.id, p.Ticket}.prefix(p.Data)) })
}

// propose answers a proposal that is not taken, and remembers one that is.
func (n *Node) propose(t Ticket, change bool, do func() error) error {
	if !n.leading {
		n.answer(t, ErrNotLeading)
		return nil
	}
	if change && n.change != 0 {
		n.answer(t, ErrBusy)
		return nil
	}
	err := do()
	if errors.Is(err, raft.ErrProposalDropped) {
		n.answer(t, ErrBusy)
		return nil
	}
	if err != nil {
		return err
	}
	n.proposals[t] = n.hard.Term
	if change {
		n.change = t
	}
	return nil
}

func (r Read) step(n *Node) error {
	if !n.leading || r.Term != n.hard.Term {
		n.answer(r.Ticket, ErrNotLeading)
		return nil
	}
	n.reads[r.Ticket] = 0
	n.raft.ReadIndex(binary.LittleEndian.AppendUint64(nil, uint64(r.Ticket)))
	return nil
}

func ticketOf(context []byte) Ticket {
	if len(context) != 8 {
		return 0
	}
	return Ticket(binary.LittleEndian.Uint64(context))
}

func (a AddLearner) step(n *Node) error {
	if have, ok := n.applied.Members.Find(a.Member.ID); ok {
		var err error // a repeated request is done
		if have.Address != a.Member.Address {
			err = fmt.Errorf("%w: member %v is there already, at %s", ErrRefused, have.ID, have.Address)
		}
		n.answer(a.Ticket, err)
		return nil
	}
	// Changes follow one another, so of two at once with one address or name the second is refused here.
	if i := slices.IndexFunc(n.applied.Members, a.like); i >= 0 {
		have := n.applied.Members[i]
		n.answer(a.Ticket, fmt.Errorf("%w: member %v is there already, at %s %s", ErrRefused, have.ID, have.Address, have.Name))
		return nil
	}
	m := a.Member
	m.Voter = false
	return n.proposeChange(a.Ticket, raftpb.ConfChangeAddLearnerNode, m)
}

// like reports whether a member has the address or the name of the one to be added.
func (a AddLearner) like(have Member) bool {
	return have.Address == a.Member.Address || a.Member.Name != "" && have.Name == a.Member.Name
}

// nearEnough is how many entries a learner may lack when it gets its vote.
const nearEnough = 64

func (p Promote) step(n *Node) error {
	m, ok := n.applied.Members.Find(p.ID)
	if !ok || m.Voter {
		var err error
		if !ok {
			err = fmt.Errorf("%w: there is no member %v", ErrRefused, p.ID)
		}
		n.answer(p.Ticket, err)
		return nil
	}
	if behind, heard := n.behind(p.ID); n.leading && (!heard || behind > nearEnough) {
		n.answer(p.Ticket, fmt.Errorf("%w: member %v lacks %d entries", ErrBusy, p.ID, behind))
		return nil
	}
	m.Voter = true
	return n.proposeChange(p.Ticket, raftpb.ConfChangeAddNode, m)
}

func (r Remove) step(n *Node) error {
	m, ok := n.applied.Members.Find(r.ID)
	if !ok {
		n.answer(r.Ticket, nil)
		return nil
	}
	if voters := n.applied.Members.Voters(); m.Voter && len(voters) == 1 {
		n.answer(r.Ticket, fmt.Errorf("%w: member %v is the last one that votes", ErrRefused, r.ID))
		return nil
	}
	if r.ID == n.id && n.leading {
		n.answer(r.Ticket, fmt.Errorf("%w: member %v leads: another one has to lead before it is removed", ErrRefused, r.ID))
		return nil
	}
	return n.proposeChange(r.Ticket, raftpb.ConfChangeRemoveNode, m)
}

func (m Move) step(n *Node) error {
	have, ok := n.applied.Members.Find(m.ID)
	if !ok || have.Address == m.Address && have.Name == m.Name {
		var err error // a repeated request is done
		if !ok {
			err = fmt.Errorf("%w: there is no member %v", ErrRefused, m.ID)
		}
		n.answer(m.Ticket, err)
		return nil
	}
	kind := raftpb.ConfChangeAddLearnerNode // neither changes what Raft knows of the member
	if have.Voter {
		kind = raftpb.ConfChangeAddNode
	}
	have.Address, have.Name = m.Address, m.Name
	return n.proposeChange(m.Ticket, kind, have)
}

func (n *Node) proposeChange(t Ticket, kind raftpb.ConfChangeType, m Member) error {
	change := &raftpb.ConfChangeV2{
		Changes: []*raftpb.ConfChangeSingle{{Type: kind.Enum(), NodeId: new(uint64(m.ID))}},
		Context: tag{n.id, t}.prefix(Members{m}.Encode()),
	}
	return n.propose(t, true, func() error { return n.raft.ProposeConfChange(change) })
}

func (t Transfer) step(n *Node) error {
	if !n.leading {
		return nil
	}
	to, most := t.To, uint64(0)
	if to == 0 {
		n.raft.WithProgress(func(id uint64, kind raft.ProgressType, p tracker.Progress) {
			if kind == raft.ProgressTypePeer && ID(id) != n.id && p.RecentActive && (to == 0 || p.Match > most) {
				to, most = ID(id), p.Match
			}
		})
	}
	if to != 0 && to != n.id {
		n.raft.TransferLeader(uint64(to))
	}
	return nil
}

// behind returns how many entries a member lacks, and whether it has answered of late. Raft
// takes a new member for active, so it must also have acknowledged something.
func (n *Node) behind(id ID) (entries uint64, heard bool) {
	n.raft.WithProgress(func(other uint64, _ raft.ProgressType, p tracker.Progress) {
		if ID(other) == id {
			last, _ := n.storage.LastIndex()
			entries, heard = last-min(last, p.Match), p.RecentActive && p.Match > 0
		}
	})
	return entries, heard
}

func (u Unreachable) step(n *Node) error {
	n.raft.ReportUnreachable(uint64(u.ID))
	return nil
}

func (s SnapshotSent) step(n *Node) error {
	status := raft.SnapshotFinish
	if !s.OK {
		status = raft.SnapshotFailure
	}
	n.raft.ReportSnapshot(uint64(s.ID), status)
	return nil
}

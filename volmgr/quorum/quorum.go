// SPDX-License-Identifier: Apache-2.0

// Package quorum decides what several volume managers have agreed on: Raft as a pure step.
//
//	ticks, messages,            ┌────── to save, then to send
//	proposals, reads, ──► Step ─┼────── committed entries, to apply
//	changes of members          └────── answers, role
//
// A Node does no I/O, has no clock and starts no goroutine; package member carries out what
// it says. Raft itself is go.etcd.io/raft; its election timeouts come from crypto/rand.
//
// What an entry holds is opaque. The leader decides it once; the others apply it and decide
// nothing. A proposal ends in one of three ways: it is committed, it was not taken, or its
// outcome is unknown, when leadership was lost while it was under way.
//
// A member that leads has applied an entry of its own term, and so all that was committed
// before. Only then does a Node say that it leads, take proposals and allow reads. A read is
// allowed when a majority has confirmed, after the read was asked for, that this member still
// leads (ReadIndex): no clock takes part in it.
package quorum

import (
	"errors"
	"fmt"
	"slices"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"

	"weft.dev/weft/volmgr/quorum/wal"
)

// Times in ticks. A leader that is silent for electionTicks to twice that is replaced.
const (
	electionTicks  = 12
	heartbeatTicks = 2
)

// Errors of answers.
var (
	// ErrNotLeading means that this member does not lead, and that nothing was recorded.
	ErrNotLeading = errors.New("this member does not lead the quorum")
	// ErrUnknown means that it is not known whether a proposal was recorded.
	ErrUnknown = errors.New("leadership was lost: it is not known whether this was recorded")
	// ErrBusy means that nothing was recorded, and that the request may be repeated soon:
	// leadership is being handed over, or another change of the members is under way.
	ErrBusy = errors.New("the quorum is busy with a change of its leader or members")
	// ErrRefused means that a change of the members makes no sense.
	ErrRefused = errors.New("refused")
)

// ErrOlderDisk is returned by Step if the member's log lacks what it had acknowledged: its
// disk was replaced by an older copy. The member must stop, be removed, and join as a new one.
var ErrOlderDisk = errors.New("this member's log lacks entries that it has acknowledged: its disk is an older copy; remove this member and join again with an empty directory")

// Role is what a member is to the quorum.
type Role int

// The roles. A learner follows, but neither votes nor counts.
const (
	Follower Role = iota
	Candidate
	Leader
)

func (r Role) String() string { return [...]string{"follower", "candidate", "leader"}[r] }

// Position is a place in the log, with the members after it. All up to it is applied.
type Position struct {
	Index, Term uint64
	Members     Members
}

// Base returns the position as the base of a log.
func (p Position) Base() wal.Base {
	return wal.Base{Index: p.Index, Term: p.Term, Members: p.Members.Encode()}
}

// Input is what a Node is stepped through.
type Input interface{ step(n *Node) error }

// Ticket names a request in its answer. Each request of a Node has another.
type Ticket uint64

type (
	// Tick is the passing of time.
	Tick struct{}
	// Receive is a message from another member.
	Receive struct{ Message Message }
	// Propose asks for an entry, which was decided on the state of a leader of this term. It is
	// answered when the entry is applied. It is not taken in another term, even if the member
	// leads again: others may have led meanwhile.
	Propose struct {
		Ticket Ticket
		Term   uint64
		Data   []byte
	}
	// Read asks whether a state may be read that has all that was applied since the beginning
	// of a leader's term. It is answered when all is applied that was committed when it was
	// asked.
	Read struct {
		Ticket Ticket
		Term   uint64
	}
	// AddLearner adds a member, which follows and does not vote.
	AddLearner struct {
		Ticket Ticket
		Member Member
	}
	// Promote gives a learner that has caught up a vote.
	Promote struct {
		Ticket Ticket
		ID     ID
	}
	// Remove removes a member for good. A leader does not remove itself: it would be gone as soon
	// as that is committed, and the others might not know that it is. Of two voters, the one that is
	// left would wait for ever for the vote of the one that is gone.
	Remove struct {
		Ticket Ticket
		ID     ID
	}
	// Move gives a member another address, and another name.
	Move struct {
		Ticket  Ticket
		ID      ID
		Address string
		Name    string
	}
	// Transfer hands leadership to a member; 0 means the voter that has most of the log. It is
	// not answered: see Output.Role.
	Transfer struct{ To ID }
	// Unreachable says that messages to a member were lost.
	Unreachable struct{ ID ID }
	// SnapshotSent says whether a snapshot has arrived.
	SnapshotSent struct {
		ID ID
		OK bool
	}
)

// Answer answers a request; Err is nil if it is done.
type Answer struct {
	Ticket Ticket
	Err    error
}

// Output is what has to be done after a Step, in this order. Then call Done.
type Output struct {
	// Rewrite replaces the log: a snapshot has arrived. It comes with Install, and Save is
	// empty.
	Rewrite *wal.State
	// Install is the position of that snapshot: the state that came with it becomes the state.
	Install *Position
	// Early may be sent before Hard and Entries are durable: a leader's entries and heartbeats,
	// so that followers write while it does (Ongaro's thesis, 10.2.1). Its own vote for an entry
	// still counts only after Done.
	Early []Message
	// Hard and Entries have to be durable before Messages are sent, unless both are nil.
	Hard    *wal.HardState
	Entries []wal.Entry

	Messages []Message
	// Committed has to be applied in this order, as a whole, together with Applied.
	Committed []Entry
	Applied   Position
	Answers   []Answer
}

// Entry is a proposal that is committed.
type Entry struct {
	Index uint64
	Data  []byte
}

// Node is a member's part of the quorum. It is not for concurrent use.
type Node struct {
	id      ID
	raft    *raft.RawNode
	storage *storage
	ready   raft.Ready // of the output that is being carried out
	applied Position
	changes []Position // members after each change since the base
	soft    raft.SoftState
	hard    wal.HardState
	leading bool   // as leader, with an entry of the own term applied
	newest  uint64 // the last entry that the log may hold, with what was received since the last output

	proposals map[Ticket]uint64 // term of each
	change    Ticket            // of proposals, that changes the members; 0 means none
	reads     map[Ticket]uint64 // index of each; 0 means that it is not known yet
	answers   []Answer
}

// New returns the node of a member whose log holds s. If it is the only voter it leads soon;
// otherwise others have to answer first.
func New(id ID, s wal.State) (*Node, error) {
	members, err := DecodeMembers(s.Base.Members)
	if err != nil {
		return nil, fmt.Errorf("members in the log: %w", err)
	}
	if s.Hard.Commit > s.Base.Index+uint64(len(s.Entries)) {
		return nil, fmt.Errorf("entry %d is committed, but the log ends with entry %d: %w", s.Hard.Commit, s.Base.Index+uint64(len(s.Entries)), ErrOlderDisk)
	}
	n := &Node{id: id, applied: Position{s.Base.Index, s.Base.Term, members}, hard: s.Hard, proposals: map[Ticket]uint64{}, reads: map[Ticket]uint64{}}
	n.changes = []Position{n.applied}
	if n.storage, err = newStorage(n, s); err != nil {
		return nil, err
	}
	n.newest, _ = n.storage.LastIndex()
	n.raft, err = raft.NewRawNode(&raft.Config{
		ID: uint64(id), Storage: n.storage, Applied: s.Base.Index, Logger: silent{},
		ElectionTick: electionTicks, HeartbeatTick: heartbeatTicks, PreVote: true, CheckQuorum: true,
		MaxSizePerMsg: 1 << 20, MaxInflightMsgs: 64, MaxUncommittedEntriesSize: 64 << 20,
		DisableProposalForwarding: true, StepDownOnRemoval: true,
	})
	if err != nil {
		return nil, err
	}
	if voters := members.Voters(); slices.Equal(voters, []ID{id}) {
		if err := n.raft.Campaign(); err != nil {
			return nil, err
		}
	}
	return n, nil
}

// Role returns the member's role, and the leader if it knows one; 0 if not.
func (n *Node) Role() (Role, ID) {
	switch {
	case n.leading:
		return Leader, n.id
	case n.soft.RaftState == raft.StateFollower:
		return Follower, ID(n.soft.Lead)
	}
	return Candidate, 0
}

// ID returns the member.
func (n *Node) ID() ID { return n.id }

// Term returns the number of the newest election that the member knows of. It is the one in
// which a leader leads.
func (n *Node) Term() uint64 { return n.hard.Term }

// Applied returns how far the outputs have been applied.
func (n *Node) Applied() Position { return n.applied }

// Step takes inputs and returns what has to be done; nil if nothing. All outputs of the
// previous Step must be done. After an error the member must stop.
func (n *Node) Step(inputs ...Input) (*Output, error) {
	for _, in := range inputs {
		if err := in.step(n); err != nil {
			return nil, err
		}
	}
	return n.next()
}

// Done says that an output has been carried out, and returns the next one; nil if there is
// none.
func (n *Node) Done() (*Output, error) {
	n.raft.Advance(n.ready)
	n.ready = raft.Ready{}
	return n.next()
}

// next returns the next output.
func (n *Node) next() (*Output, error) {
	if !n.raft.HasReady() {
		if len(n.answers) == 0 {
			return nil, nil
		}
		n.ready = raft.Ready{}
		out := &Output{Applied: n.applied, Answers: n.answers}
		n.answers = nil
		return out, nil
	}
	n.ready = n.raft.Ready()
	out := &Output{}
	for _, m := range n.ready.Messages {
		if n.goesEarly(m) {
			out.Early = append(out.Early, Message{m})
		} else {
			out.Messages = append(out.Messages, Message{m})
		}
	}
	if n.ready.SoftState != nil {
		n.soft = *n.ready.SoftState
	}
	if err := n.save(out); err != nil {
		return nil, err
	}
	if err := n.commit(out); err != nil {
		return nil, err
	}
	n.settle()
	out.Answers, n.answers = n.answers, nil
	return out, nil
}

// goesEarly reports whether a message promises nothing that is not durable yet. Only the leader of a
// term sends entries and heartbeats, and its term and vote were saved with an earlier output.
func (n *Node) goesEarly(m *raftpb.Message) bool {
	kind := m.GetType()
	return (kind == raftpb.MsgApp || kind == raftpb.MsgHeartbeat) && m.GetTerm() == n.hard.Term
}

// save says what has to be durable. A hard state in which only the commit index is new is
// left out, since a restarted member learns that index from the leader; unless a change of the
// members is committed, since the leader may be the one who is gone, and members who forget
// the change may wait for its vote for ever.
func (n *Node) save(out *Output) error {
	if h := n.ready.HardState; !raft.IsEmptyHardState(h) {
		n.hard = wal.HardState{Term: h.GetTerm(), Vote: h.GetVote(), Commit: h.GetCommit()}
	}
	if snapshot := n.ready.Snapshot; !raft.IsEmptySnap(snapshot) {
		if err := n.install(out, snapshot); err != nil {
			return err
		}
	}
	if err := n.storage.Append(n.ready.Entries); err != nil {
		return err
	}
	n.newest, _ = n.storage.LastIndex()
	switch {
	case out.Install != nil:
		out.Rewrite = n.log()
	case n.ready.MustSync || slices.ContainsFunc(n.ready.CommittedEntries, changesMembers):
		hard := n.hard
		out.Hard, out.Entries = &hard, entriesOf(n.ready.Entries)
	}
	return nil
}

// install takes a snapshot in.
func (n *Node) install(out *Output, snapshot *raftpb.Snapshot) error {
	p, err := positionOf(snapshot)
	if err != nil {
		return err
	}
	if err := n.storage.ApplySnapshot(snapshot); err != nil {
		return fmt.Errorf("snapshot at entry %d: %w", p.Index, err)
	}
	n.applied, n.changes = p, []Position{p}
	out.Install = &p
	return nil
}

// commit says what has to be applied.
func (n *Node) commit(out *Output) error {
	for _, e := range n.ready.CommittedEntries {
		n.applied.Index, n.applied.Term = e.GetIndex(), e.GetTerm()
		tag, data := untag(e)
		if changesMembers(e) {
			if err := n.changeMembers(e); err != nil {
				return fmt.Errorf("entry %d: %w", e.GetIndex(), err)
			}
		} else if len(data) > 0 {
			out.Committed = append(out.Committed, Entry{e.GetIndex(), data})
		}
		if term, mine := n.proposals[tag.ticket]; mine && tag.by == n.id && term == e.GetTerm() {
			n.answerProposal(tag.ticket, nil)
		}
	}
	out.Applied = n.applied
	return nil
}

func (n *Node) answer(t Ticket, err error) { n.answers = append(n.answers, Answer{t, err}) }

func (n *Node) answerProposal(t Ticket, err error) {
	delete(n.proposals, t)
	if n.change == t {
		n.change = 0
	}
	n.answer(t, err)
}

// settle finds out whether the member leads, and answers reads, or all requests if the term
// in which it led is over.
func (n *Node) settle() {
	leads := n.soft.RaftState == raft.StateLeader
	for _, t := range sorted(n.proposals) {
		if !leads || n.proposals[t] != n.hard.Term {
			n.answerProposal(t, ErrUnknown)
		}
	}
	n.leading = leads && n.applied.Term == n.hard.Term
	for _, s := range n.ready.ReadStates {
		if t := ticketOf(s.RequestCtx); n.asked(t) {
			n.reads[t] = s.Index
		}
	}
	for _, t := range sorted(n.reads) {
		switch index := n.reads[t]; {
		case !n.leading:
			n.answer(t, ErrNotLeading)
		case index > 0 && index <= n.applied.Index:
			n.answer(t, nil)
		default:
			continue
		}
		delete(n.reads, t)
	}
}

func (n *Node) asked(read Ticket) bool {
	_, ok := n.reads[read]
	return ok
}

// Progress is how far a member has followed the leader.
type Progress struct {
	Acknowledged uint64 // the last entry that is durable at the member, as far as the leader knows
	Near         bool   // it has answered of late, and lacks so little that it may vote
}

// Progress returns the members' progress; nil unless this member leads.
func (n *Node) Progress() map[ID]Progress {
	if !n.leading {
		return nil
	}
	all := map[ID]Progress{}
	last, _ := n.storage.LastIndex()
	for _, m := range n.applied.Members {
		behind, heard := n.behind(m.ID)
		all[m.ID] = Progress{last - behind, m.ID == n.id || heard && behind <= nearEnough}
	}
	return all
}

// log returns what the member's log holds.
func (n *Node) log() *wal.State {
	base := n.changes[0]
	first, _ := n.storage.FirstIndex()
	last, _ := n.storage.LastIndex()
	s := &wal.State{Hard: n.hard, Base: base.Base()}
	if last >= first {
		entries, err := n.storage.Entries(first, last+1, ^uint64(0))
		if err != nil {
			panic(err) // the storage holds first to last
		}
		s.Entries = entriesOf(entries)
	}
	return s
}

// Compact drops applied entries until the others have at most keep bytes, and returns what the
// log has to be rewritten to. What is applied must be durable before, and all outputs done.
func (n *Node) Compact(keep int64) (*wal.State, error) {
	state := n.log()
	at, kept := n.applied.Index, int64(0)
	for i := len(state.Entries) - 1; i >= 0; i-- {
		if kept += int64(len(state.Entries[i].Data)); kept > keep {
			break
		}
		at = min(at, state.Entries[i].Index-1)
	}
	if at <= n.changes[0].Index {
		return state, nil
	}
	term, err := n.storage.Term(at)
	if err != nil {
		return nil, err
	}
	if err := n.storage.Compact(at); err != nil {
		return nil, err
	}
	for len(n.changes) > 1 && n.changes[1].Index <= at {
		n.changes = n.changes[1:]
	}
	n.changes[0].Index, n.changes[0].Term = at, term
	return n.log(), nil
}

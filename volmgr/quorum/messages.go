// SPDX-License-Identifier: Apache-2.0

package quorum

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"go.etcd.io/raft/v3"
	"go.etcd.io/raft/v3/raftpb"
	"google.golang.org/protobuf/proto"

	"weft.dev/weft/volmgr/quorum/wal"
)

// Message is a message between members. It may be lost, late, or come twice.
type Message struct{ pb *raftpb.Message }

// To is the receiver.
func (m Message) To() ID { return ID(m.pb.GetTo()) }

// From is the sender.
func (m Message) From() ID { return ID(m.pb.GetFrom()) }

// Type is what Raft calls the kind of message.
func (m Message) Type() string { return m.pb.GetType().String() }

// Snapshot returns, for a message that brings a snapshot, its position. The sender's state,
// as of before the output is applied, has to travel with it, and the receiver keeps it at hand
// before it steps through the message.
func (m Message) Snapshot() (Position, bool) {
	if m.pb.GetType() != raftpb.MsgSnap {
		return Position{}, false
	}
	p, err := positionOf(m.pb.GetSnapshot())
	return p, err == nil
}

// Encode returns the message as it is sent.
func (m Message) Encode() ([]byte, error) {
	return proto.MarshalOptions{Deterministic: true}.Marshal(m.pb)
}

// DecodeMessage is the inverse of Encode.
func DecodeMessage(text []byte) (Message, error) {
	m := Message{&raftpb.Message{}}
	if err := proto.Unmarshal(text, m.pb); err != nil {
		return Message{}, fmt.Errorf("message of a member: %w", err)
	}
	if m.pb.Type == nil || m.From() == 0 || m.To() == 0 {
		return Message{}, errors.New("message of a member: without type, sender or receiver")
	}
	if m.pb.GetType() == raftpb.MsgSnap {
		if _, err := positionOf(m.pb.GetSnapshot()); err != nil {
			return Message{}, err
		}
	}
	return m, nil
}

// snapshotAt is the inverse of positionOf.
func snapshotAt(p Position) *raftpb.Snapshot {
	return &raftpb.Snapshot{Data: p.Members.Encode(), Metadata: &raftpb.SnapshotMetadata{Index: new(p.Index), Term: new(p.Term), ConfState: p.Members.state()}}
}

func positionOf(s *raftpb.Snapshot) (Position, error) {
	members, err := DecodeMembers(s.GetData())
	if err != nil {
		return Position{}, fmt.Errorf("members in a snapshot: %w", err)
	}
	return Position{s.GetMetadata().GetIndex(), s.GetMetadata().GetTerm(), members}, nil
}

// storage is what Raft reads of the log: all of it is in memory.
type storage struct {
	*raft.MemoryStorage
	node *Node
}

func newStorage(n *Node, s wal.State) (*storage, error) {
	memory := raft.NewMemoryStorage()
	if s.Base.Index > 0 {
		if err := memory.ApplySnapshot(snapshotAt(n.applied)); err != nil {
			return nil, err
		}
	}
	hard := &raftpb.HardState{Term: new(s.Hard.Term), Vote: new(s.Hard.Vote), Commit: new(s.Hard.Commit)}
	entries := make([]*raftpb.Entry, len(s.Entries))
	for i, e := range s.Entries {
		entries[i] = &raftpb.Entry{Index: new(e.Index), Term: new(e.Term), Type: raftpb.EntryType(e.Kind).Enum(), Data: e.Data}
	}
	return &storage{memory, n}, errors.Join(memory.SetHardState(hard), memory.Append(entries))
}

// Snapshot is part of raft.Storage: a snapshot for another member is of what is applied.
func (s *storage) Snapshot() (*raftpb.Snapshot, error) { return snapshotAt(s.node.applied), nil }

// Decided returns the proposals in a log, committed or not.
func Decided(s wal.State) (all []Entry) {
	for _, e := range s.Entries {
		one := &raftpb.Entry{Type: raftpb.EntryType(e.Kind).Enum(), Data: e.Data}
		if _, data := untag(one); !changesMembers(one) && len(data) > 0 {
			all = append(all, Entry{e.Index, data})
		}
	}
	return all
}

func entriesOf(entries []*raftpb.Entry) []wal.Entry {
	all := make([]wal.Entry, len(entries))
	for i, e := range entries {
		all[i] = wal.Entry{Index: e.GetIndex(), Term: e.GetTerm(), Kind: uint8(e.GetType()), Data: e.GetData()}
	}
	return all
}

// sorted returns the keys of a map in order, so that the same inputs give the same outputs.
func sorted[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }

// silent is Raft's log: what matters is in the outputs. A broken invariant panics.
type silent struct{}

func (silent) Debug(...any)            {}
func (silent) Debugf(string, ...any)   {}
func (silent) Info(...any)             {}
func (silent) Infof(string, ...any)    {}
func (silent) Warning(...any)          {}
func (silent) Warningf(string, ...any) {}
func (silent) Error(...any)            {}
func (silent) Errorf(string, ...any)   {}

func (silent) Fatal(v ...any)                 { panic(fmt.Sprint(v...)) }
func (silent) Fatalf(format string, v ...any) { panic(fmt.Sprintf(format, v...)) }
func (silent) Panic(v ...any)                 { panic(fmt.Sprint(v...)) }
func (silent) Panicf(format string, v ...any) { panic(fmt.Sprintf(format, v...)) }

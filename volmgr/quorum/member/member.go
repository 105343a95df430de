// SPDX-License-Identifier: Apache-2.0

// Package member is one member of the quorum: it carries out what package quorum says, over
// the member's log and its store.
//
//	inputs ─► quorum.Node ─► 1 log: save, fsync ─► 2 send ─► 3 store: apply ─► 4 answers
//
// A leader sends entries and heartbeats before it saves, so that it and its followers write at the
// same time. All else, such as an acknowledgement or a vote, is sent after the fsync.
//
// The log is the truth: an entry is applied to the store in one transaction, which need not be
// durable. A store that a crash has set back, wholly or in part, is made whole by applying the
// log again from its base on, since an entry sets and removes keys and nothing else. The store
// is synced before the log drops what it has applied.
//
// A snapshot from the leader is staged beside the state, durably, before the log is told of
// it. A crash in between leaves the old state; one after that, and Open finishes.
package member

import (
	"errors"
	"fmt"
	"io"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/quorum"
	"weft.dev/weft/volmgr/quorum/wal"
)

// Store is the state that entries are applied to.
type Store interface {
	// Applied returns the index up to which entries are applied.
	Applied() (uint64, error)
	// Apply applies entries in order, and remembers the position, in one transaction. A crash
	// may undo it, also if later ones are kept, unless Sync was called since.
	Apply(entries []quorum.Entry, at quorum.Position) error
	// Sync makes all that was applied durable.
	Sync() error
	// Content returns a consistent copy of the state as of the call.
	Content() (io.ReadCloser, error)
	// Stage makes content durable beside the state, in place of what was staged before.
	Stage(content io.Reader, index uint64) error
	// Staged returns the index of what is staged; 0 means nothing.
	Staged() (uint64, error)
	// Adopt makes what is staged the state, durably. It may be repeated.
	Adopt(at quorum.Position) error
}

// Outgoing is a message to send. Content goes with a snapshot, and is nil otherwise; whoever
// sends it closes it.
type Outgoing struct {
	quorum.Message
	Content io.ReadCloser
}

// Config is what a member needs.
type Config struct {
	Log   wal.Directory
	Store Store
	// Send sends a message, or loses it. It must not wait, nor call the member.
	Send func(Outgoing)
	// CompactAt is the size of the log, in bytes, from which on applied entries are dropped;
	// 0 means 16 MiB. A quarter stays, for members that are a little behind.
	CompactAt int64
}

func (c Config) withDefaults() Config {
	if c.CompactAt == 0 {
		c.CompactAt = 16 << 20
	}
	return c
}

// Member is an open member. It is not for concurrent use.
type Member struct {
	cfg     Config
	node    *quorum.Node
	log     *wal.Log
	longest int64  // size of the log from which on it is compacted
	applied uint64 // what the store was told last
	failed  error
}

// first is where the log of a new quorum begins: the store's content is as of there.
const first = 1

// Found begins a quorum whose only voter is owner, with the content of the store as its first
// snapshot. Its terms begin above term.
func Found(dir wal.Directory, store Store, owner wal.Owner, address string, term uint64) error {
	members := quorum.Members{{ID: quorum.ID(owner.Member), Address: address, Voter: true}}
	at := quorum.Position{Index: first, Term: max(term, 1), Members: members}
	if err := errors.Join(store.Apply(nil, at), store.Sync()); err != nil {
		return err
	}
	log, err := wal.Create(dir, owner, wal.State{Hard: wal.HardState{Term: at.Term, Commit: first}, Base: at.Base()})
	if err != nil {
		return err
	}
	return log.Close()
}

// Join makes an empty log for a member that another one adds. Its store gets the state from
// the leader.
func Join(dir wal.Directory, owner wal.Owner) error {
	log, err := wal.Create(dir, owner, wal.State{})
	if err != nil {
		return err
	}
	return log.Close()
}

// Open opens a member. Step it without inputs once, to begin.
func Open(cfg Config) (*Member, error) {
	cfg = cfg.withDefaults()
	log, state, err := wal.Open(cfg.Log)
	if err != nil {
		return nil, err
	}
	m := &Member{cfg: cfg, log: log, longest: cfg.CompactAt}
	if err := m.open(state); err != nil {
		return nil, errors.Join(err, log.Close())
	}
	return m, nil
}

func (m *Member) open(state wal.State) (err error) {
	if m.node, err = quorum.New(quorum.ID(m.log.Owner().Member), state); err != nil {
		return err
	}
	applied, err := m.cfg.Store.Applied()
	if err != nil {
		return err
	}
	last := state.Base.Index + uint64(len(state.Entries))
	if applied > last {
		return fmt.Errorf("the store has applied entry %d, but the log ends with entry %d: %w", applied, last, quorum.ErrOlderDisk)
	}
	staged, err := m.cfg.Store.Staged()
	if err != nil {
		return err
	}
	m.applied = state.Base.Index
	if staged == state.Base.Index && applied < staged {
		return m.cfg.Store.Adopt(m.node.Applied())
	}
	if applied < state.Base.Index {
		return fmt.Errorf("the store has applied entry %d, but the log begins after entry %d: the store is of an older copy", applied, state.Base.Index)
	}
	return nil
}

// Node returns the member's view of the quorum, to be read only.
func (m *Member) Node() *quorum.Node { return m.node }

// Cluster returns the cluster that the member's log belongs to.
func (m *Member) Cluster() block.ClusterID { return m.log.Owner().Cluster }

// Stage keeps the content of a snapshot for the message that it belongs to, which has to be
// stepped through next.
func (m *Member) Stage(message quorum.Message, content io.Reader) error {
	at, ok := message.Snapshot()
	if !ok {
		return errors.New("stage: the message brings no snapshot")
	}
	return m.cfg.Store.Stage(content, at.Index)
}

// Step takes inputs, does all that follows, and returns the answers to requests. After an
// error the member refuses everything, and the process must end.
func (m *Member) Step(inputs ...quorum.Input) (answers []quorum.Answer, err error) {
	if m.failed != nil {
		return nil, m.failed
	}
	defer func() { m.failed = err }()
	out, err := m.node.Step(inputs...)
	for err == nil && out != nil {
		if err := m.carryOut(out); err != nil {
			return answers, err
		}
		answers = append(answers, out.Answers...)
		out, err = m.node.Done()
	}
	if err != nil {
		return answers, err
	}
	return answers, m.compact()
}

// carryOut does what an output says.
func (m *Member) carryOut(out *quorum.Output) error {
	if err := m.send(out.Early); err != nil {
		return err
	}
	if err := m.save(out); err != nil {
		return err
	}
	if err := m.send(out.Messages); err != nil {
		return err
	}
	if out.Applied.Index <= m.applied {
		return nil
	}
	m.applied = out.Applied.Index
	return m.cfg.Store.Apply(out.Committed, out.Applied)
}

func (m *Member) save(out *quorum.Output) error {
	switch {
	case out.Rewrite != nil:
		if err := m.log.Rewrite(*out.Rewrite); err != nil {
			return err
		}
		m.applied = out.Install.Index
		return m.cfg.Store.Adopt(*out.Install)
	case out.Hard != nil || len(out.Entries) > 0:
		return m.log.Save(out.Hard, out.Entries)
	}
	return nil
}

func (m *Member) send(messages []quorum.Message) error {
	for _, message := range messages {
		outgoing := Outgoing{Message: message}
		if _, ok := message.Snapshot(); ok {
			var err error
			if outgoing.Content, err = m.cfg.Store.Content(); err != nil {
				return fmt.Errorf("copy the state for a snapshot: %w", err)
			}
		}
		m.cfg.Send(outgoing)
	}
	return nil
}

// compact drops applied entries from a log that has become long. If much has to stay, the log
// may grow to twice of that.
func (m *Member) compact() error {
	if m.log.Size() < m.longest {
		return nil
	}
	if err := m.cfg.Store.Sync(); err != nil {
		return fmt.Errorf("sync the store: %w", err)
	}
	state, err := m.node.Compact(m.cfg.CompactAt / 4)
	if err != nil {
		return err
	}
	if err := m.log.Rewrite(*state); err != nil {
		return err
	}
	m.longest = max(m.cfg.CompactAt, 2*m.log.Size())
	return nil
}

// Close closes the log.
func (m *Member) Close() error {
	if m.failed == nil {
		m.failed = errors.New("the member is closed")
	}
	return m.log.Close()
}

// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"errors"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/quorum"
	"weft.dev/weft/volmgr/quorum/member"
	"weft.dev/weft/volmgr/replicated"
	"weft.dev/weft/volmgr/store"
)

// Quorum says how a manager keeps its records together with others.
type Quorum struct {
	Address string                // where callers reach this manager
	Send    func(member.Outgoing) // to other managers; nil means that there are none
}

// ErrNotLeading is the error of calls to a manager that is not the one that decides. Nothing
// was recorded.
var ErrNotLeading = errors.New("this volume manager does not lead")

// reasonNotLeading is how gRPC carries ErrNotLeading, with the leader's address as metadata.
const reasonNotLeading = "NOT_LEADING"

// notLeading says who leads.
type notLeading struct{ leader string }

func (e notLeading) Error() string {
	if e.leader == "" {
		return ErrNotLeading.Error() + "; no leader is known"
	}
	return fmt.Sprintf("%v; %s does", ErrNotLeading, e.leader)
}

func (notLeading) Is(target error) bool { return target == ErrNotLeading }

func (e notLeading) refusal() *cluster.Error {
	return &cluster.Error{Reason: reasonNotLeading, Text: e.Error(), Hint: "ask the leader", Metadata: map[string]string{"leader": e.leader}}
}

// errDeposed ends the streams of agents and the time in which this manager decides.
var errDeposed = status.Error(codes.Unavailable, "this volume manager does not lead any more: report to the one that does")

// alone is a store without a quorum: its manager always leads.
type alone struct{ *store.Store }

// Run is part of committer.
func (alone) Run(ctx context.Context) error {
	<-ctx.Done()
	return nil
}

// Lead is part of committer.
func (alone) Lead(context.Context) (<-chan struct{}, error) { return nil, nil }

// Confirm is part of committer.
func (alone) Confirm() error { return nil }

// Leader is part of committer.
func (alone) Leader() string { return "" }

// shared is a store that a quorum keeps.
type shared struct {
	*replicated.Store
	term uint64 // in which this manager leads
}

// openShared opens the store in cfg.Dir. One that has been without a quorum becomes that of a
// quorum of one.
func openShared(cfg Config) (*shared, error) {
	c := replicated.Config{Dir: cfg.Dir, Log: cfg.Log, Address: cfg.Quorum.Address, Send: cfg.Quorum.Send}
	if !replicated.Exists(cfg.Dir) {
		var err error
		if c.Cluster, c.Term, err = identity(cfg); err != nil {
			return nil, err
		}
	}
	s, err := replicated.Open(c)
	if err != nil {
		return nil, err
	}
	return &shared{Store: s}, nil
}

// identity returns the cluster and the term of a store.
func identity(cfg Config) (id block.ClusterID, term uint64, err error) {
	s, err := store.Open(cfg.Dir, cfg.Log)
	if err != nil {
		return id, 0, err
	}
	state, err := loadState(alone{s})
	if err = errors.Join(err, s.Close()); err != nil {
		return id, 0, fmt.Errorf("store %s: %w", cfg.Dir, err)
	}
	return state.ClusterID(), state.Term(), nil
}

// Lead is part of committer.
func (s *shared) Lead(ctx context.Context) (over <-chan struct{}, err error) {
	s.term, over, err = s.Store.Lead(ctx)
	return over, err
}

// Commit is part of committer.
func (s *shared) Commit(records []cluster.Record) error {
	return unknown(s.Store.Commit(context.Background(), s.term, records))
}

// Confirm is part of committer.
func (s *shared) Confirm() error { return unknown(s.Store.Confirm(context.Background(), s.term)) }

// unknown tells errors after which the manager goes on from those that end it. What was not
// taken is told as unknown too: the state has to be loaded again in both cases.
func unknown(err error) error {
	for _, goesOn := range []error{quorum.ErrUnknown, quorum.ErrNotLeading, quorum.ErrBusy} {
		if errors.Is(err, goesOn) && !errors.Is(err, replicated.ErrStopped) {
			return fmt.Errorf("%w: %w", err, ErrOutcomeUnknown)
		}
	}
	return err
}

// Leader is part of committer.
func (s *shared) Leader() string {
	now := s.Status()
	leader, _ := now.Applied.Members.Find(now.Leader)
	return leader.Address
}

// awaitLead waits until this manager leads. Callers are told meanwhile who does.
func (m *Manager) awaitLead(ctx context.Context) (over <-chan struct{}, err error) {
	if m.cfg.Quorum == nil { // nobody else could lead, so no caller is told so
		return m.records.Lead(ctx)
	}
	leads := make(chan struct{})
	go func() {
		defer close(leads)
		over, err = m.records.Lead(ctx)
	}()
	for {
		select {
		case <-leads:
			return over, err
		case a := <-m.asks:
			a.reply <- answer{err: notLeading{m.records.Leader()}}
		case a := <-m.urgent:
			a.reply <- answer{err: notLeading{m.records.Leader()}}
		}
	}
}

// load replaces the state by that of the durable records.
func (m *Manager) load() error {
	state, err := loadState(m.records)
	if err != nil {
		return err
	}
	state.SetPolicy(m.cfg.policy())
	m.state, m.fork = state, nil
	return nil
}

// endSessions ends the streams of agents.
func (m *Manager) endSessions(why error) {
	for _, sessions := range []map[block.NodeName]*session{m.targets, m.initiators} {
		for _, s := range sessions {
			s.cancel(why)
		}
		clear(sessions)
	}
}

// depose forgets what this manager knew as leader.
func (m *Manager) depose() {
	m.cfg.Log.Warn("this volume manager does not lead any more", "leader", m.records.Leader())
	m.endSessions(errDeposed)
	for w := range m.watchers {
		poke(w) // they look, and are told
	}
	clear(m.watchers)
	m.state, m.fork = nil, nil
}

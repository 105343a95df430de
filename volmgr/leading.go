// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/proto/pki"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/quorum"
	"weft.dev/weft/volmgr/quorum/member"
	"weft.dev/weft/volmgr/quorum/transport"
	"weft.dev/weft/volmgr/replicated"
	"weft.dev/weft/volmgr/store"
)

// Quorum says how a manager keeps its records together with others.
type Quorum struct {
	Address string // where callers and other managers reach this one
	// Dial opens a connection to another manager. With it, the managers' messages go over gRPC.
	Dial func(address string) (*grpc.ClientConn, error)
	// Send is used instead, in tests: it sends a message to another manager, or loses it.
	Send func(member.Outgoing)
	// Medium is for tests.
	Medium replicated.Medium
}

// ErrNotLeading is the error of calls to a manager that is not the one that decides. Nothing
// was recorded.
var ErrNotLeading = errors.New("this volume manager does not lead")

// notLeading says who leads.
type notLeading struct{ leader string }

func (e notLeading) Error() string {
	if e.leader == "" {
		return ErrNotLeading.Error() + "; no leader is known"
	}
	return fmt.Sprintf("%v; %s does", ErrNotLeading, e.leader)
}

// hint says what an operator can do.
func (e notLeading) hint() string {
	if e.leader == "" {
		return "are most of the managers up, and do they reach one another? `weft volmgr list` says what this one knows"
	}
	return "ask the leader, or list all managers in --manager"
}

func (notLeading) Is(target error) bool { return target == ErrNotLeading }

func (e notLeading) refusal() *cluster.Error {
	return &cluster.Error{Reason: pb.ReasonNotLeader, Text: e.Error(), Hint: e.hint(), Metadata: map[string]string{pb.LeaderKey: e.leader}}
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

// Changed is part of committer.
func (alone) Changed() <-chan struct{} { return nil }

// shared is a store that a quorum keeps.
type shared struct {
	*replicated.Store
	transport *transport.Transport // nil if messages go another way
	term      uint64               // in which this manager leads
	name      string               // of this manager, in its certificate; empty if it has none
	knows     block.Level          // the newest that this manager knows
	version   string
}

// openShared opens the store in cfg.Dir. One that has been without a quorum becomes that of a
// quorum of one.
func openShared(cfg Config) (*shared, error) {
	c := replicated.Config{Dir: cfg.Dir, Log: cfg.Log, Address: cfg.Quorum.Address, Send: cfg.Quorum.Send, Medium: cfg.Quorum.Medium, Level: cfg.Level}
	if !replicated.Exists(cfg.Dir) {
		var err error
		if c.Cluster, c.Term, err = identityOf(cfg); err != nil {
			return nil, err
		}
	}
	var carrier *transport.Transport
	if cfg.Quorum.Dial != nil {
		carrier = transport.New(transport.Config{Address: cfg.Quorum.Address, Dial: cfg.Quorum.Dial, Name: managerName, Log: cfg.Log})
		c.Send = carrier.Send
	}
	s, err := replicated.Open(c)
	if err != nil {
		return nil, err
	}
	own := &shared{Store: s, transport: carrier, knows: cfg.Level, version: cfg.Version}
	if cfg.Keys != nil {
		credential, err := pki.ReadCredential(cfg.Keys.Identity())
		if err != nil {
			return nil, errors.Join(err, s.Close())
		}
		own.name = credential.Identity().Name
	}
	return own, nil
}

// Run is part of committer. Messages are carried until the store's own Run has returned, since
// it hands leadership over.
func (s *shared) Run(ctx context.Context) error {
	if s.transport == nil {
		return s.Store.Run(ctx)
	}
	carrying, stop := context.WithCancel(context.WithoutCancel(ctx))
	var group errgroup.Group
	group.Go(func() error {
		return s.transport.Run(carrying, transport.Self{Cluster: s.Cluster(), ID: s.Status().ID, To: s.Store, Level: s.knows, Version: s.version, Agreed: s.Level,
			Members: func() quorum.Members { return s.Status().Applied.Members },
			Leads:   func() bool { return s.Status().Role == quorum.Leader },
		})
	})
	group.Go(func() error {
		defer stop()
		return s.Store.Run(ctx)
	})
	return group.Wait()
}

// KeysOf is the directory of keys beside a store.
func KeysOf(dir string) string { return filepath.Clean(dir) + ".keys" }

// SocketOf is the socket beside a store, on which its manager answers users of its machine.
func SocketOf(dir string) string { return filepath.Clean(dir) + ".socket" }

// ClusterOf returns the cluster of a store that no process has open.
func ClusterOf(dir string) (id block.ClusterID, err error) {
	id, _, err = identityOf(Config{Dir: dir}.withDefaults())
	return id, err
}

// identityOf returns the cluster and the term of a store.
func identityOf(cfg Config) (id block.ClusterID, term uint64, err error) {
	s, err := store.Open(cfg.Dir, cfg.Log)
	if err != nil {
		return id, 0, err
	}
	state, err := loadState(alone{s}, cfg.Level)
	if err = errors.Join(err, s.Close()); err != nil {
		return id, 0, fmt.Errorf("store %s: %w", cfg.Dir, err)
	}
	return state.ClusterID(), state.Term(), nil
}

// ClusterID returns the cluster of the store.
func (m *Manager) ClusterID() block.ClusterID { return m.cluster }

// Member is this manager's part of the quorum; nil if it has none.
func (m *Manager) Member() *replicated.Store {
	if m.quorum == nil {
		return nil
	}
	return m.quorum.Store
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

// Leader is part of committer. It is not known while this manager is about to lead.
func (s *shared) Leader() string {
	now := s.Status()
	if now.Leader == now.ID {
		return ""
	}
	return s.addressOf(now, now.Leader)
}

// addressOf returns where a manager answers: as it says itself, else as the members have it.
func (s *shared) addressOf(now replicated.Status, id quorum.ID) string {
	if s.transport != nil {
		if peer := s.transport.Peers()[id]; peer.Address != "" {
			return peer.Address
		}
	}
	m, _ := now.Applied.Members.Find(id)
	return m.Address
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
	patience := time.NewTimer(electionPatience)
	defer patience.Stop()
	impatient := false
	for {
		changed, leader := m.records.Changed(), m.records.Leader()
		asks, urgent := m.asks, m.urgent
		if leader == "" && !impatient {
			asks, urgent = nil, nil
		}
		select {
		case <-leads:
			return over, err
		case <-changed:
			patience.Reset(electionPatience)
			impatient = false
		case <-patience.C:
			impatient = true
		case a := <-asks:
			a.reply <- answer{err: notLeading{leader}}
		case a := <-urgent:
			a.reply <- answer{err: notLeading{leader}}
		case pong := <-m.pings:
			close(pong)
		}
	}
}

// electionPatience is how long calls wait while no leader is known. An election takes less than
// two seconds; without a majority there is none.
const electionPatience = 3 * time.Second

// Alive returns nil if the manager's loop answers, whether it leads or not.
func (m *Manager) Alive(ctx context.Context) error {
	pong := make(chan struct{})
	select {
	case m.pings <- pong:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-m.ended:
		return ErrStopped
	}
}

// load replaces the state by that of the durable records.
func (m *Manager) load() error {
	state, err := loadState(m.records, m.cfg.Level)
	if err != nil {
		return err
	}
	state.SetPolicy(m.cfg.policy())
	if m.state != nil {
		state.RememberAnswered(m.state)
	}
	m.state, m.fork = state, nil
	return m.noteRevoked(nil)
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
	m.live.Reset()
	for w := range m.watchers {
		poke(w) // they look, and are told
	}
	clear(m.watchers)
	m.state, m.fork = nil, nil
}

// SPDX-License-Identifier: Apache-2.0

// Package replicated makes a manager's records durable at a majority of the managers.
//
//	Commit ─► one loop, which owns the member ─► log, other managers, store ─► Commit returns
//	Receive ─►
//	ticks   ─►
//
// A single manager is the same with one member: a commit is one fsync, of the log. A store
// that has been without a quorum becomes one of a single voter, with its records as they are.
package replicated

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync/atomic"
	"time"

	"weft.dev/weft/proto/beat"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/quorum"
	"weft.dev/weft/volmgr/quorum/member"
	"weft.dev/weft/volmgr/quorum/wal"
	"weft.dev/weft/volmgr/store"
)

// TickEvery is how long a tick of the quorum takes. A leader that is silent for 0.6 s to
// 1.2 s is replaced.
const TickEvery = 50 * time.Millisecond

// aloneEvery is the interval for a member that is alone.
const aloneEvery = time.Second

// handOverWithin is how long a leader that stops waits for another one to lead.
const handOverWithin = 2 * time.Second

// ErrStopped is the error of requests when Run has ended.
var ErrStopped = errors.New("the quorum's member is stopping")

// ErrRemoved is returned by Run when this manager was removed from the quorum. It can join
// again with an empty directory.
var ErrRemoved = errors.New("this manager was removed from the quorum")

// Config says what a member is.
type Config struct {
	Dir     string // of its store, which must exist
	Address string // where other managers reach it
	Log     *slog.Logger
	// Cluster and Term, the highest so far, are for a store that has been without a quorum.
	Cluster block.ClusterID
	Term    uint64
	// Send sends a message to another member, or loses it; nil means that there are none. It
	// must not wait.
	Send func(member.Outgoing)
	// Level is the newest that this member knows: it ends when the cluster is raised above it. 0
	// means block.KnownLevel; others are for tests.
	Level block.Level
	// Medium is for tests; its zero value is the directory.
	Medium Medium
}

// Medium stands between a member and its log, its store and its messages, so that a test can make
// them slow, cut their power, take back what was not synced, and stop the member.
type Medium struct {
	Log       func(wal.Directory) wal.Directory // nil: as it is
	Store     func(member.Store) member.Store   // nil: as it is
	Send      func(member.Outgoing) bool        // whether to send a message; nil: all are sent
	CompactAt int64                             // see member.Config
}

// over returns the log and the store that the member uses.
func (m Medium) over(log wal.Directory, store member.Store) (wal.Directory, member.Store) {
	if m.Log != nil {
		log = m.Log(log)
	}
	if m.Store != nil {
		store = m.Store(store)
	}
	return log, store
}

// Store is a manager's records, which a quorum keeps. Run it.
type Store struct {
	cfg      Config
	replica  *store.Replica
	member   *member.Member
	requests chan request
	received chan message
	reports  chan []quorum.Input // that nobody waits for
	looks    chan func()         // at the member, by the loop
	ended    chan struct{}       // closed when Run returns
	status   atomic.Pointer[Status]
	heard    atomic.Pointer[time.Time] // when a message of the leader came last; nil: none has come

	// Owned by Run.
	tickets quorum.Ticket
	waiting map[quorum.Ticket]chan error
}

// Status is what a member knows of the quorum.
type Status struct {
	ID      quorum.ID
	Role    quorum.Role
	Leader  quorum.ID // 0 means that none is known
	Term    uint64
	Applied quorum.Position

	changed chan struct{} // closed when Role, Leader or Term are others
	over    chan struct{} // of a leader: closed when its term is over
}

// request becomes an input once it has a ticket.
type request struct {
	input func(quorum.Ticket) quorum.Input
	reply chan error // buffered
}

type message struct {
	quorum.Message
	content io.Reader
	staged  chan error // buffered
}

// requestsMost is the largest number of requests that are stepped through at once.
const requestsMost = 128

// Open opens a store in cfg.Dir. If there is no log yet, it begins a quorum of one voter.
func Open(cfg Config) (*Store, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Send == nil {
		cfg.Send = func(o member.Outgoing) { lose(o) }
	}
	replica, err := store.OpenReplica(cfg.Dir, cfg.Log)
	if err != nil {
		return nil, err
	}
	s := &Store{cfg: cfg, replica: replica, requests: make(chan request), received: make(chan message), reports: make(chan []quorum.Input), looks: make(chan func()), ended: make(chan struct{}), waiting: map[quorum.Ticket]chan error{}}
	if err := s.open(); err != nil {
		return nil, errors.Join(err, replica.Close())
	}
	return s, nil
}

// lose drops a message.
func lose(o member.Outgoing) {
	if o.Content != nil {
		o.Content.Close()
	}
}

func (s *Store) open() (err error) {
	if err := s.replica.Know(cmp.Or(s.cfg.Level, block.KnownLevel)); err != nil {
		return err
	}
	dir, state := s.cfg.Medium.over(wal.InDirectory(store.QuorumDir(s.cfg.Dir)), s.replica)
	if errors.Is(wal.Find(dir), wal.ErrNoLog) {
		owner := wal.Owner{Cluster: s.cfg.Cluster, Member: newID()}
		if err := member.Found(dir, state, owner, s.cfg.Address, s.cfg.Term); err != nil {
			return err
		}
		s.cfg.Log.Info("new quorum of one manager", "member", quorum.ID(owner.Member), "dir", s.cfg.Dir)
	}
	send := s.cfg.Send
	if s.cfg.Medium.Send != nil {
		send = func(o member.Outgoing) {
			if !s.cfg.Medium.Send(o) {
				lose(o)
				return
			}
			s.cfg.Send(o)
		}
	}
	if s.member, err = member.Open(member.Config{Log: dir, Store: state, Send: send, CompactAt: s.cfg.Medium.CompactAt}); err != nil {
		return err
	}
	s.publish()
	return nil
}

// Exists reports whether the store in dir is that of a member.
func Exists(dir string) bool {
	return wal.Find(wal.InDirectory(store.QuorumDir(dir))) == nil
}

// Join makes an empty log beside the store in dir, whose records the leader replaces, for a
// member that another one adds to the quorum. It returns the new member.
func Join(dir string, cluster block.ClusterID) (quorum.ID, error) {
	id := newID()
	return quorum.ID(id), member.Join(wal.InDirectory(store.QuorumDir(dir)), wal.Owner{Cluster: cluster, Member: id})
}

// ErrTaken is returned by Joined if the store in a directory is in use.
var ErrTaken = errors.New("there is the store of another manager")

// Joined returns the member that Join has made in dir. It refuses one that has records, and still
// returns it if it is of this cluster. Its manager may be running.
func Joined(dir string, cluster block.ClusterID) (quorum.ID, error) {
	owner, state, err := wal.Look(wal.InDirectory(store.QuorumDir(dir)))
	switch {
	case errors.Is(err, wal.ErrNoLog):
		return 0, fmt.Errorf("%s: %w", dir, ErrTaken)
	case err != nil:
		return 0, err
	}
	id := quorum.ID(owner.Member)
	taken := fmt.Errorf("%s: %w, member %v of cluster %v", dir, ErrTaken, id, owner.Cluster)
	switch {
	case owner.Cluster != cluster:
		return 0, taken
	case state.Base.Index > 0 || len(state.Entries) > 0:
		return id, taken
	}
	return id, nil
}

func newID() uint64 {
	var random [8]byte
	rand.Read(random[:])
	return max(1, binary.LittleEndian.Uint64(random[:]))
}

// Run steps the member until ctx ends; then a leader hands over. It sends no more heartbeats then, so
// that another one leads soon also if the request to take over, or the answer, is lost. It returns the error of a log
// or a store that fails: the process must end then.
func (s *Store) Run(ctx context.Context) error {
	defer close(s.ended)
	tick := beat.NewTicker(TickEvery)
	defer tick.Stop()
	if err := s.step(); err != nil {
		return err
	}
	done, ticks, stopping := ctx.Done(), tick.C, (<-chan time.Time)(nil)
	for every := TickEvery; ; {
		if due := s.tickEvery(); due != every {
			every = due
			tick.Reset(every)
		}
		var err error
		select {
		case <-done:
			done, ticks, stopping = nil, nil, time.After(handOverWithin)
			err = s.step(quorum.Transfer{})
		case <-stopping:
			return nil
		case <-ticks:
			err = s.step(quorum.Tick{})
		case r := <-s.requests:
			err = s.step(s.taken(r)...)
		case inputs := <-s.reports:
			err = s.step(inputs...)
		case m := <-s.received:
			err = s.receive(m)
		case look := <-s.looks:
			look()
		}
		if err != nil {
			return err
		}
		if ends, err := s.ends(done == nil); ends {
			return err
		}
	}
}

// tickEvery is the interval of ticks. A member that is the only one and leads has nobody to hear
// from and nobody to tell that it lives.
func (s *Store) tickEvery() time.Duration {
	if now := s.Status(); now.Role == quorum.Leader && len(now.Applied.Members) == 1 {
		return aloneEvery
	}
	return TickEvery
}

// ends reports whether the member has nothing more to do.
func (s *Store) ends(stopping bool) (bool, error) {
	status := s.Status()
	members := status.Applied.Members
	if _, there := members.Find(status.ID); len(members) > 0 && !there {
		return true, ErrRemoved
	}
	return stopping && (status.Role != quorum.Leader || len(members.Voters()) == 1), nil
}

// taken returns the inputs of a request and of the others that wait.
func (s *Store) taken(r request) (inputs []quorum.Input) {
	for {
		s.tickets++
		s.waiting[s.tickets] = r.reply
		inputs = append(inputs, r.input(s.tickets))
		if len(inputs) == requestsMost {
			return inputs
		}
		select {
		case r = <-s.requests:
		default:
			return inputs
		}
	}
}

func (s *Store) step(inputs ...quorum.Input) error {
	answers, err := s.member.Step(inputs...)
	s.publish()
	for _, a := range answers {
		s.waiting[a.Ticket] <- a.Err
		delete(s.waiting, a.Ticket)
	}
	return err
}

// publish lets others see what the member knows. Who leads is published before an answer of
// that term, and that a term is over before the answers that say so.
func (s *Store) publish() {
	n := s.member.Node()
	role, leader := n.Role()
	was := s.status.Load()
	now := &Status{n.ID(), role, leader, n.Term(), n.Applied(), nil, nil}
	if was != nil && was.Role == role && was.Leader == leader && was.Term == now.Term {
		now.changed, now.over = was.changed, was.over
		s.status.Store(now)
		return
	}
	now.changed, now.over = make(chan struct{}), make(chan struct{})
	s.status.Store(now)
	s.cfg.Log.Info("quorum", "member", now.ID, "role", role, "leader", leader, "term", now.Term)
	if was != nil {
		close(was.changed)
		close(was.over)
	}
}

func (s *Store) receive(m message) error {
	if _, ok := m.Snapshot(); ok {
		err := s.member.Stage(m.Message, m.content)
		m.staged <- err
		if err != nil {
			s.cfg.Log.Warn("snapshot of another manager", "from", m.From(), "err", err)
			return nil // the leader sends it again
		}
	}
	err := s.step(quorum.Receive{Message: m.Message})
	if now := s.Status(); now.Leader == m.From() && now.Role == quorum.Follower {
		at := time.Now()
		s.heard.Store(&at)
	}
	return err
}

// Heard returns when a manager that led was last heard here, or led here; zero if none was since the
// start.
func (s *Store) Heard() (at time.Time) {
	if heard := s.heard.Load(); heard != nil {
		at = *heard
	}
	return at
}

// Cluster returns the cluster that the member belongs to.
func (s *Store) Cluster() block.ClusterID { return s.member.Cluster() }

// Level returns the cluster's level, as far as this member knows.
func (s *Store) Level() block.Level { return s.replica.Level() }

// Status returns what the member knows of the quorum.
func (s *Store) Status() Status { return *s.status.Load() }

// do passes a request to the loop and waits for its answer.
func (s *Store) do(ctx context.Context, input func(quorum.Ticket) quorum.Input) error {
	r := request{input, make(chan error, 1)}
	select {
	case s.requests <- r:
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-s.ended:
		return ErrStopped
	}
	select {
	case err := <-r.reply:
		return err
	case <-ctx.Done():
		return errors.Join(quorum.ErrUnknown, context.Cause(ctx))
	case <-s.ended:
		return errors.Join(quorum.ErrUnknown, ErrStopped)
	}
}

// Commit makes records durable at a majority of the managers, all or none, and then in this
// one's store. They were decided by this manager as leader of a term. It returns
// quorum.ErrNotLeading or ErrBusy if nothing was recorded, and ErrUnknown if that is not known.
func (s *Store) Commit(ctx context.Context, term uint64, records []cluster.Record) error {
	data := store.EncodeRecords(records)
	return s.do(ctx, func(t quorum.Ticket) quorum.Input { return quorum.Propose{Ticket: t, Term: term, Data: data} })
}

// Confirm returns nil if this manager leads in a term, and its store has all that was committed
// anywhere before the call.
func (s *Store) Confirm(ctx context.Context, term uint64) error {
	return s.do(ctx, func(t quorum.Ticket) quorum.Input { return quorum.Read{Ticket: t, Term: term} })
}

// Lead waits until this manager leads, and returns its term, and a channel that is closed when
// that term is over. The store then has all that was committed in earlier terms.
func (s *Store) Lead(ctx context.Context) (term uint64, over <-chan struct{}, err error) {
	for {
		now := s.status.Load()
		if now.Role == quorum.Leader {
			return now.Term, now.over, nil
		}
		select {
		case <-now.changed:
		case <-ctx.Done():
			return 0, nil, context.Cause(ctx)
		case <-s.ended:
			return 0, nil, ErrStopped
		}
	}
}

// AddLearner adds a manager, which follows and does not vote.
func (s *Store) AddLearner(ctx context.Context, m quorum.Member) error {
	return s.do(ctx, func(t quorum.Ticket) quorum.Input { return quorum.AddLearner{Ticket: t, Member: m} })
}

// Promote gives a manager that has caught up a vote.
func (s *Store) Promote(ctx context.Context, id quorum.ID) error {
	return s.do(ctx, func(t quorum.Ticket) quorum.Input { return quorum.Promote{Ticket: t, ID: id} })
}

// Remove removes a manager for good.
func (s *Store) Remove(ctx context.Context, id quorum.ID) error {
	return s.do(ctx, func(t quorum.Ticket) quorum.Input { return quorum.Remove{Ticket: t, ID: id} })
}

// Move gives a manager another address, and another name.
func (s *Store) Move(ctx context.Context, id quorum.ID, address, name string) error {
	return s.do(ctx, func(t quorum.Ticket) quorum.Input {
		return quorum.Move{Ticket: t, ID: id, Address: address, Name: name}
	})
}

// Progress returns how far the managers have followed this one; nil unless it leads.
func (s *Store) Progress(ctx context.Context) (map[quorum.ID]quorum.Progress, error) {
	progress := make(chan map[quorum.ID]quorum.Progress, 1)
	select {
	case s.looks <- func() { progress <- s.member.Node().Progress() }:
		return <-progress, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-s.ended:
		return nil, ErrStopped
	}
}

// transferWithin is how long a manager may take to become leader. Raft itself gives up sooner.
const transferWithin = 2 * time.Second

// Transfer hands leadership to a manager, 0 meaning the one that has most of the log, and
// waits until this one does not lead any more. It returns quorum.ErrBusy if the other one did
// not take over, and quorum.ErrNotLeading if this one does not lead.
func (s *Store) Transfer(ctx context.Context, to quorum.ID) error {
	now := s.status.Load()
	if now.Role != quorum.Leader {
		return quorum.ErrNotLeading
	}
	if err := s.report(ctx, quorum.Transfer{To: to}); err != nil {
		return err
	}
	select {
	case <-now.over:
		return nil
	case <-time.After(transferWithin):
		return fmt.Errorf("%w: no other manager took over within %v", quorum.ErrBusy, transferWithin)
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-s.ended:
		return ErrStopped
	}
}

// Changed returns a channel that is closed when another manager leads, or another term begins.
func (s *Store) Changed() <-chan struct{} { return s.status.Load().changed }

// Receive passes a message of another member on. Content comes with a snapshot; it is read
// before Receive returns, and before the loop sees it, so that a slow sender does not hold the
// loop.
func (s *Store) Receive(ctx context.Context, m quorum.Message, content io.Reader) error {
	if content != nil {
		spool, err := s.spool(content)
		if err != nil {
			return err
		}
		defer spool.Close()
		content = spool
	}
	received := message{m, content, make(chan error, 1)}
	select {
	case s.received <- received:
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-s.ended:
		return ErrStopped
	}
	if _, ok := m.Snapshot(); !ok {
		return nil
	}
	select {
	case err := <-received.staged:
		return err
	case <-s.ended:
		return ErrStopped
	}
}

// spool returns a file that holds content and has no name.
func (s *Store) spool(content io.Reader) (*os.File, error) {
	file, err := os.CreateTemp(store.QuorumDir(s.cfg.Dir), "arriving-")
	if err != nil {
		return nil, err
	}
	err = os.Remove(file.Name())
	if err == nil {
		_, err = io.Copy(file, content)
	}
	if err == nil {
		_, err = file.Seek(0, io.SeekStart)
	}
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// Unreachable says that messages to a member were lost, but no snapshot.
func (s *Store) Unreachable(ctx context.Context, id quorum.ID) error {
	return s.report(ctx, quorum.Unreachable{ID: id})
}

// Lost says that messages to a member were lost; a snapshot may have been among them.
func (s *Store) Lost(ctx context.Context, id quorum.ID) error {
	return s.report(ctx, quorum.Unreachable{ID: id}, quorum.SnapshotSent{ID: id})
}

// SnapshotSent says that a member has a snapshot.
func (s *Store) SnapshotSent(ctx context.Context, id quorum.ID) error {
	return s.report(ctx, quorum.SnapshotSent{ID: id, OK: true})
}

func (s *Store) report(ctx context.Context, inputs ...quorum.Input) error {
	select {
	case s.reports <- inputs:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-s.ended:
		return ErrStopped
	}
}

// Load returns the records of this manager's store, in key order. See Confirm.
func (s *Store) Load() ([]cluster.Record, error) { return s.replica.Load() }

// LoadPrefix is Load for the records whose keys begin with a prefix.
func (s *Store) LoadPrefix(prefix string) ([]cluster.Record, error) {
	return s.replica.LoadPrefix(prefix)
}

// Observe calls do with records once they are in this manager's store, whether it leads or not, and
// with nil after all may have changed. Call it before Run.
func (s *Store) Observe(do func([]cluster.Record) error) { s.replica.Observe(do) }

// Backup writes a consistent copy of this manager's store.
func (s *Store) Backup(w io.Writer) error { return s.replica.Backup(w) }

// Close closes log and store. Call it after Run has returned.
func (s *Store) Close() error { return errors.Join(s.member.Close(), s.replica.Close()) }

// SPDX-License-Identifier: Apache-2.0

// Package volmgr is the volume manager as a service: it owns the cluster's state, makes it
// durable, answers operators and sends the agents their wanted states.
//
//	gRPC Manager ──┐                    ┌─► answers
//	gRPC Agents  ──┼─► one loop ── Step ┼─► commit (Badger, synced)
//	ticks        ──┘   owns the State   └─► wanted states to agents' streams
//
// Package cluster decides and package store keeps the records; this package passes inputs
// in and outcomes out. The loop takes all waiting inputs, steps through them, commits the
// records in one transaction, and only then answers callers and wakes streams. A record of
// lost legs goes before all other inputs and ends its batch, since a host's writes wait for
// it. If a commit fails, the state is ahead of the durable records and none of it may be
// published: see committer.go. With a store of its own, Run ends with the error and the
// process must be restarted.
//
// In a quorum (Config.Quorum) one or several managers keep the records, and the loop runs only
// at the one that leads. A leader that is deposed forgets the state, and loads it when it leads
// again. What it answers without having recorded anything, it answers after a majority has
// confirmed that it still leads; an agent's report that changes nothing is not answered, and asks
// nobody. Others answer ErrNotLeading, with the leader's address; while no
// leader is known, calls wait for the election.
//
// Lists, status and wanted states are made from snapshots of the state, beside the loop.
package volmgr

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/beat"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/proto/pki"
	"weft.dev/weft/volmgr/audit"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/live"
	"weft.dev/weft/volmgr/replicated"
	"weft.dev/weft/volmgr/store"
)

// Config says where a manager keeps its store.
type Config struct {
	Dir     string
	Version string // shown to operators
	Log     *slog.Logger
	Now     func() time.Time // nil means time.Now; must keep the monotonic reading
	// ReplaceAfter is how long a leg may be away before it is made again elsewhere; 0 means
	// cluster.DefaultReplaceAfter, below 0 never.
	ReplaceAfter time.Duration
	// HealAfter is how long a volume that lacks a copy has to be detached before a host copies to its
	// legs; 0 means cluster.DefaultHealAfter, below 0 never.
	HealAfter time.Duration
	// EvacuateAfter is how long a drive may be suspect before its legs are made again elsewhere; 0 means
	// never.
	EvacuateAfter time.Duration
	// Overcommit is how many times its size a drive may promise to volumes; 0 means cluster.DefaultOvercommit.
	Overcommit float64
	// HoldFor is how long hosts hold I/O for a snapshot at most; 0 means cluster.DefaultHoldFor.
	HoldFor time.Duration

	// Quorum keeps the records together with other managers; nil means in this one's store
	// alone.
	Quorum *Quorum

	// Keys are the cluster's own authorities; nil: it has none, and gives no certificates.
	Keys *pki.Keyring

	// Recent returns the newest lines of this process's log, for support bundles; nil: nobody keeps
	// them.
	Recent func() []byte

	// Level is the newest that this manager knows; 0 means block.KnownLevel, and others are for tests.
	Level block.Level

	// Vouch says who may join without a token of the cluster; nil: nobody may.
	Vouch Voucher

	// Commit is called in place of the store's, which it gets as commit, so that a test can
	// delay commits or make them fail; nil means that nothing is in between.
	Commit func(records []cluster.Record, commit func([]cluster.Record) error) error
	// Confirm is called, in the same way, in place of the question whether this manager still
	// leads.
	Confirm func(confirm func() error) error
}

func (c Config) withDefaults() Config {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	c.Level = cmp.Or(c.Level, block.KnownLevel)
	return c
}

func (c Config) policy() cluster.Policy {
	return cluster.Policy{
		ReplaceAfter: cmp.Or(c.ReplaceAfter, cluster.DefaultReplaceAfter), HealAfter: max(0, cmp.Or(c.HealAfter, cluster.DefaultHealAfter)),
		EvacuateAfter: c.EvacuateAfter, HoldFor: c.HoldFor, Overcommit: c.Overcommit,
	}
}

// Manager is a volume manager. Register its services, then Run it.
type Manager struct {
	pb.UnimplementedManagerServer
	pb.UnimplementedAgentsServer

	cfg     Config
	cluster block.ClusterID
	records committer
	state   *cluster.State // owned by Run
	fork    *cluster.State // of state, for readers; nil if it has been stepped since. Owned by Run
	asks    chan ask
	urgent  chan ask           // records of lost legs
	pings   chan chan struct{} // closed by the loop
	quorum  *shared            // the records' keeper; nil without a quorum
	ended   chan struct{}      // closed when Run returns
	leaves  atomic.Bool        // it is about to end: see HandOver
	metrics metrics
	watches watches
	replica replicaState
	live    *live.Book
	support supporters
	kept    bool // the state is that of a support bundle: see kept.go

	revoked  access.Revocations
	noting   sync.Mutex // what is revoked
	refusals refusals
	refused  chan cluster.Refused

	// Owned by Run.
	over       <-chan struct{} // closed when the term is over in which this manager leads
	sessions   uint64
	targets    map[block.NodeName]*session
	initiators map[block.NodeName]*session
	watchers   map[chan struct{}]bool
}

// ask is a request to the loop: an input to step through, or a look at the state after all
// steps of its batch are durable.
type ask struct {
	input   cluster.Input
	request string // the caller's request id, for the log
	asked   *audit.Asked
	look    func()
	reply   chan answer // buffered
}

type answer struct {
	result any
	err    error
}

// ErrStopped is returned by calls when the manager does not run any more.
var ErrStopped = errors.New("volume manager is stopping")

// ErrNoStore is returned by New if there is no store: it was lost, it is elsewhere, or there
// is no cluster yet. Only an operator can tell which.
var ErrNoStore = store.ErrNoStore

// ErrInUse is returned by New if another process has the store open.
var ErrInUse = store.ErrInUse

// ErrNotEmpty is returned by Init, Restore and NewRebuild if the directory is not empty.
var ErrNotEmpty = store.ErrNotEmpty

// FindStore returns nil if there is a store in dir, ErrNoStore if there is none.
func FindStore(dir string) error { return store.Find(dir) }

// New opens the store in cfg.Dir. It never begins a cluster: an empty directory may be a
// disk that is not mounted, and a new cluster would make agents release what they have.
func New(cfg Config) (*Manager, error) {
	cfg = cfg.withDefaults()
	if cfg.Dir == "" {
		return nil, errors.New("volmgr: Dir: missing")
	}
	if cfg.Quorum != nil {
		s, err := openShared(cfg)
		if err != nil {
			return nil, err
		}
		m := newManager(cfg, s, nil) // the state is loaded when it leads
		m.quorum, m.cluster = s, s.Cluster()
		s.Observe(m.noteRevoked)
		if err := m.noteRevoked(nil); err != nil {
			return nil, errors.Join(err, s.Close())
		}
		return m, nil
	}
	if replicated.Exists(cfg.Dir) {
		return nil, fmt.Errorf("store %s: it belongs to a quorum, and would part from it without", cfg.Dir)
	}
	s, err := store.Open(cfg.Dir, cfg.Log)
	if err != nil {
		return nil, err
	}
	state, err := loadState(alone{s}, cfg.Level)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("store %s: %w", cfg.Dir, err), s.Close())
	}
	m := newManager(cfg, alone{s}, state)
	m.cluster = state.ClusterID()
	if err := m.noteRevoked(nil); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return m, nil
}

// Init begins a new cluster: it creates the store in cfg.Dir, which must be empty or not
// exist. A crash at any point leaves a complete store or none.
func Init(cfg Config) (block.ClusterID, error) {
	cfg = cfg.withDefaults()
	id := block.ClusterID{UUID: newUUID()}
	_, records := cluster.New(id)
	if err := store.Create(cfg.Dir, records, cfg.Log); err != nil {
		return block.ClusterID{}, err
	}
	cfg.Log.Info("new cluster", "cluster", id, "dir", cfg.Dir)
	return id, nil
}

func newUUID() block.UUID {
	var random [16]byte
	rand.Read(random[:])
	return block.UUIDFromRandom(random)
}

func newSeed() (seed cluster.Seed) {
	rand.Read(seed[:])
	return seed
}

func newManager(cfg Config, records committer, state *cluster.State) *Manager {
	if cfg.Commit != nil || cfg.Confirm != nil {
		records = hooked{records, cfg.Commit, cfg.Confirm}
	}
	if state != nil {
		state.SetPolicy(cfg.policy())
	}
	return &Manager{
		cfg: cfg, records: records, state: state, asks: make(chan ask), urgent: make(chan ask), pings: make(chan chan struct{}), ended: make(chan struct{}), metrics: newMetrics(),
		refused: make(chan cluster.Refused, refusedMost),
		targets: map[block.NodeName]*session{}, initiators: map[block.NodeName]*session{}, watchers: map[chan struct{}]bool{}, watches: watches{patience: watchPatience},
		live: live.NewBook(cfg.Now),
	}
}

// Register adds the services of a manager to a server, and those by which managers agree.
func (m *Manager) Register(r grpc.ServiceRegistrar) {
	if m.quorum != nil && m.quorum.transport != nil {
		m.quorum.transport.Register(r)
	}
	r.RegisterService(audited(bounded(pb.Manager_ServiceDesc)), m)
	r.RegisterService(bounded(pb.Agents_ServiceDesc), m)
	r.RegisterService(audited(bounded(pb.Identities_ServiceDesc)), identities{m: m})
	r.RegisterService(bounded(pb.Keys_ServiceDesc), identities{m: m})
}

// Close closes the store. Call it after Run has returned.
func (m *Manager) Close() error { return m.records.Close() }

// tickEvery is how often the state checks leases and silent agents.
const tickEvery = 250 * time.Millisecond

// A batch takes what waits, and waits for nothing itself. It ends with one of these, so that a
// transaction stays far below Badger's limit of some 5 MiB, and those whose batch it is, and a
// record of lost legs that comes next, wait no longer than that for a decision.
const (
	batchMost    = 512 // inputs
	batchRecords = 1024
	batchTime    = 5 * time.Millisecond
)

// Run returns when ctx ends, or with the error of a failed commit. In a quorum it decides only
// while it leads.
func (m *Manager) Run(ctx context.Context) error {
	defer close(m.ended)
	afterwards, stop := context.WithCancel(context.WithoutCancel(ctx))
	defer stop()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return m.records.Run(afterwards) }) // the loop's last commit needs it
	group.Go(func() error { m.tellRefused(ctx); return nil })
	if m.cfg.Keys != nil {
		group.Go(func() error { m.keepKeys(ctx); return nil })
	}
	group.Go(func() error {
		defer stop()
		for {
			err := m.lead(ctx)
			if errors.Is(err, replicated.ErrStopped) {
				return nil // the records' Run says why
			}
			if !errors.Is(err, errDeposed) {
				return err
			}
			if ctx.Err() != nil {
				return nil
			}
			m.depose()
		}
	})
	return group.Wait()
}

// lead is the loop. It waits until this manager leads, and returns errDeposed when it does not
// any more. It begins a new term before it answers anything.
func (m *Manager) lead(ctx context.Context) error {
	over, err := m.awaitLead(ctx)
	m.over = over
	if err != nil && ctx.Err() != nil {
		return nil
	}
	if err == nil && m.state == nil {
		err = m.load()
	}
	if err == nil {
		err = m.beginTerm(ctx, over)
	}
	if err != nil {
		return err
	}
	defer m.startTending(ctx)()
	tick := beat.NewTicker(tickEvery)
	defer tick.Stop()
	for {
		first, err := m.next(ctx, over, tick.C)
		if err != nil || first.reply == nil {
			return err
		}
		if err := m.work(first); err != nil {
			return err
		}
	}
}

// next waits for a request, or for the time of a tick. It returns errDeposed if this manager does
// not lead any more, and an empty request if ctx ends.
func (m *Manager) next(ctx context.Context, over <-chan struct{}, tick <-chan time.Time) (first ask, err error) {
	for {
		select { // before all else: what is decided after that is in vain
		case <-over:
			return first, errDeposed
		default:
		}
		select {
		case <-ctx.Done():
			return first, nil
		case pong := <-m.pings:
			close(pong)
		case <-over:
			return first, errDeposed
		case <-tick:
			return ask{input: cluster.Tick{}, reply: make(chan answer, 1)}, nil
		case first = <-m.urgent:
			return first, nil
		case first = <-m.asks:
			return first, nil
		}
	}
}

// beginTerm makes this manager's term durable. If the outcome of that is unknown, it begins
// the next one.
func (m *Manager) beginTerm(ctx context.Context, over <-chan struct{}) error {
	for {
		select {
		case <-over:
			return errDeposed
		default:
		}
		begin := ask{input: cluster.BeginTerm{Seed: newSeed()}, reply: make(chan answer, 1)}
		b := &batch{}
		m.stepThrough(b, begin) // alone: all that waits, urgent or not, is decided in the new term
		if err := m.finish(b); err != nil {
			return err
		}
		switch err := (<-begin.reply).err; {
		case !errors.Is(err, ErrOutcomeUnknown):
			return err
		case ctx.Err() != nil: // it is being stopped, and decides nothing any more
			return errDeposed
		}
	}
}

// batch is what is stepped through before one commit.
type batch struct {
	asks     []ask
	outcomes []cluster.Outcome // of each of asks
	answers  []answer
	records  []cluster.Record
	urgent   bool // one of asks is a record of lost legs
	// When the first and the last input were stepped through.
	began, last time.Time
}

// full reports whether the next input belongs to the next batch.
func (b *batch) full() bool {
	return len(b.asks) >= batchMost || len(b.records) >= batchRecords || b.last.Sub(b.began) >= batchTime
}

// changed reports whether there is anything in the batch that somebody is told: an answer, an event
// or another wanted state. An agent is not answered.
func (b *batch) changed() bool {
	for i, a := range b.asks {
		out := &b.outcomes[i]
		if !fromAgent(a.input) || b.answers[i].err != nil || out.Result != nil || len(out.Records)+len(out.Changed)+len(out.Events) > 0 {
			return true
		}
	}
	return false
}

// fromAgent reports whether an input is what an agent says of itself, or the passing of time. Nobody
// waits for its answer to learn what is so.
func fromAgent(in cluster.Input) bool {
	switch in.(type) {
	case cluster.TargetReported, cluster.TargetRepeated, cluster.TargetLost,
		cluster.InitiatorReported, cluster.InitiatorRepeated, cluster.InitiatorLost, cluster.Tick:
		return true
	}
	return false
}

// stepThrough adds a request to a batch.
func (m *Manager) stepThrough(b *batch, a ask) {
	var out cluster.Outcome
	var got answer
	if a.input != nil {
		m.fork = nil
		if b.last = m.cfg.Now(); b.began.IsZero() {
			b.began = b.last
		}
		var err error
		out, err = m.state.StepFor(b.last, a.input, a.asked)
		got = answer{out.Result, err}
	}
	b.asks, b.outcomes, b.answers = append(b.asks, a), append(b.outcomes, out), append(b.answers, got)
	b.records = append(b.records, out.Records...)
}

// takeUrgent adds the records of lost legs that wait.
func (m *Manager) takeUrgent(b *batch) {
	for !b.full() {
		select {
		case a := <-m.urgent:
			b.urgent = true
			m.stepThrough(b, a)
		default:
			return
		}
	}
}

// fill steps through a request and the others that wait, until the batch is full. Before each one it
// takes the records of lost legs that have come meanwhile, and none after them.
func (m *Manager) fill(first ask) *batch {
	b := &batch{}
	m.takeUrgent(b)
	m.stepThrough(b, first)
	for {
		m.takeUrgent(b)
		if b.urgent || b.full() {
			return b
		}
		select {
		case a := <-m.asks:
			m.stepThrough(b, a)
		default:
			return b
		}
	}
}

// work steps through a request and those that wait, commits, and only then answers.
func (m *Manager) work(first ask) error {
	begin := m.cfg.Now()
	b := m.fill(first)
	m.metrics.step.Observe(m.cfg.Now().Sub(begin).Seconds())
	return m.finish(b)
}

// settled makes what a batch has decided certain: its records durable or, if it has none, that this
// manager still leads. A batch that tells nobody anything needs neither.
func (m *Manager) settled(b *batch) error {
	if !b.changed() {
		return nil
	}
	begin, took, do := m.cfg.Now(), m.metrics.confirm, m.records.Confirm
	if len(b.records) > 0 {
		took, do = m.metrics.commit, func() error { return m.records.Commit(b.records) }
	}
	err := do()
	took.Observe(m.cfg.Now().Sub(begin).Seconds())
	return err
}

// finish settles a batch and then answers.
func (m *Manager) finish(b *batch) error {
	if err := m.settled(b); err != nil {
		return m.startOver(b.asks, err)
	}
	if m.quorum == nil && len(b.records) > 0 { // else the quorum's store says so
		if err := m.noteRevoked(b.records); err != nil {
			return err
		}
	}
	for i, a := range b.asks {
		if a.look != nil {
			a.look()
		}
		a.reply <- b.answers[i]
	}
	m.spread(b)
	return nil
}

// spread publishes outcomes to the log, the agents and the watchers of events.
func (m *Manager) spread(b *batch) {
	events := false
	for i, out := range b.outcomes {
		m.logEvents(out.Events, b.asks[i].request)
		if a := out.Asked; a != nil {
			m.logFor(b.asks[i].request).Info("audit", "who", a.Who, "from", a.From, "call", a.Call, "seq", a.Seq, "hash", a.Hash)
		}
		events = events || len(out.Events) > 0
		for node, changed := range out.Changed {
			m.wake(node, changed)
		}
	}
	if events {
		for w := range m.watchers {
			poke(w)
		}
	}
}

// logFor is the log with the caller's request id, if there is one.
func (m *Manager) logFor(request string) *slog.Logger {
	if request == "" {
		return m.cfg.Log
	}
	return m.cfg.Log.With("request", request)
}

// logEvents logs the events of an input.
func (m *Manager) logEvents(events []event.Event, request string) {
	log := m.logFor(request)
	for _, e := range events {
		level := slog.LevelInfo
		if e.Severity != event.Info {
			level = slog.LevelWarn
		}
		log.Log(context.Background(), level, e.Kind, "object", e.Object, "text", e.Text, "seq", e.Seq)
	}
}

// poke signals a channel of size 1 without blocking; one pending signal is enough.
func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// step passes an input to the loop and returns its result once it is durable.
func (m *Manager) step(ctx context.Context, in cluster.Input) (any, error) {
	return m.ask(ctx, ask{input: in, request: requestOf(ctx), asked: askedIn(ctx)})
}

// requestOf returns the request id that a caller put into the metadata; empty if none.
func requestOf(ctx context.Context) string {
	if said := metadata.ValueFromIncomingContext(ctx, pb.RequestKey); len(said) > 0 {
		return strings.ToValidUTF8(said[0], "?") // a header may hold any bytes
	}
	return ""
}

// snapshot returns the state for a reader, who may take long: it does not change. All of it
// is durable, and it has all that was answered before the call.
func (m *Manager) snapshot(ctx context.Context) (s *cluster.State, err error) {
	err = m.look(ctx, func() { s = m.forked() })
	return s, err
}

// forked returns a fork of the state, in the loop.
func (m *Manager) forked() *cluster.State {
	if m.fork == nil {
		m.fork = m.state.Fork()
	}
	return m.fork
}

// look runs f in the loop, where it may read the state. All of the state is durable then. The
// loop waits for f: what takes longer reads a snapshot.
func (m *Manager) look(ctx context.Context, f func()) error {
	_, err := m.ask(ctx, ask{look: f})
	return err
}

func (m *Manager) ask(ctx context.Context, a ask) (any, error) {
	if m.kept {
		return nil, m.askKept(a)
	}
	a.reply = make(chan answer, 1)
	queue := m.asks
	if _, ok := a.input.(cluster.RecordStale); ok {
		queue = m.urgent
	}
	select {
	case queue <- a:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-m.ended:
		return nil, ErrStopped
	}
	// The loop has the request now and completes it, even if ctx ends.
	select {
	case got := <-a.reply:
		return got.result, got.err
	case <-m.ended:
		select {
		case got := <-a.reply:
			return got.result, got.err
		default:
			return nil, ErrStopped
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

// Package volmgr is the volume manager as a service: it owns the cluster's
// state, keeps it durable, answers operators and directs the agents.
//
//	gRPC Manager ──┐                    ┌─► answers
//	gRPC Agents  ──┼─► one loop ── Step ┼─► commit (Badger, synced)
//	ticks        ──┘   owns the State   └─► wanted states to agents' streams
//
// Package cluster decides, package store keeps; this one carries inputs in and
// outcomes out. The loop takes what has piled up, steps through it, commits all
// of it in one transaction, and only then answers anybody or wakes a stream. If
// a commit fails, the state is ahead of the disk and nothing more may be told:
// Run ends with the error and the process must be restarted.
package volmgr

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/store"
)

// Config says where a manager keeps its store.
type Config struct {
	Dir     string
	Version string // told to operators
	Log     *slog.Logger
	Now     func() time.Time // nil means time.Now; must keep the monotonic reading

	// Commit stands between the manager and its store, so that a test can be slow
	// there, or cut it off; nil means that nothing does.
	Commit func(records []cluster.Record, commit func([]cluster.Record) error) error
}

func (c Config) withDefaults() Config {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.Commit == nil {
		c.Commit = func(records []cluster.Record, commit func([]cluster.Record) error) error { return commit(records) }
	}
	return c
}

// Manager is a volume manager. Register its services, then Run it.
type Manager struct {
	pb.UnimplementedManagerServer
	pb.UnimplementedAgentsServer

	cfg     Config
	store   *store.Store
	state   *cluster.State // owned by Run
	asks    chan ask
	ended   chan struct{} // closed when Run returns
	metrics metrics
	watches watches

	// Owned by Run.
	sessions   uint64
	targets    map[block.NodeName]*session
	initiators map[block.NodeName]*session
	watchers   map[chan struct{}]bool
}

// ask is something for the loop: an input to step through, or a look at the
// state after all steps of its batch are durable.
type ask struct {
	input   cluster.Input
	request string // the caller's own name for what it asks this for; for the log
	look    func()
	reply   chan answer // buffered
}

type answer struct {
	result any
	err    error
}

// ErrStopped is what calls get when the manager does not run any more.
var ErrStopped = errors.New("volume manager is stopping")

// ErrNoStore is what New returns where there is no store: it was lost, or is
// elsewhere, or there is no cluster yet. Which of these, only an operator knows.
var ErrNoStore = store.ErrNoStore

// FindStore returns nil if there is a store in dir, ErrNoStore if there is none.
func FindStore(dir string) error { return store.Find(dir) }

// New opens the store in cfg.Dir. It never begins a cluster: an empty directory may
// be a disk that is not mounted, and agents would let go of what they have.
func New(cfg Config) (*Manager, error) {
	cfg = cfg.withDefaults()
	if cfg.Dir == "" {
		return nil, errors.New("volmgr: Dir: missing")
	}
	s, err := store.Open(cfg.Dir, cfg.Log)
	if err != nil {
		return nil, err
	}
	records, err := s.Load()
	if err == nil {
		var state *cluster.State
		if state, err = cluster.Load(records); err == nil {
			return newManager(cfg, s, state), nil
		}
	}
	return nil, errors.Join(fmt.Errorf("store %s: %w", cfg.Dir, err), s.Close())
}

// Init begins a new cluster: it makes its store in cfg.Dir, which must be empty or
// not there. Cut at any point, it leaves a whole store or none.
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

func newManager(cfg Config, s *store.Store, state *cluster.State) *Manager {
	return &Manager{
		cfg: cfg, store: s, state: state, asks: make(chan ask), ended: make(chan struct{}), metrics: newMetrics(),
		targets: map[block.NodeName]*session{}, initiators: map[block.NodeName]*session{}, watchers: map[chan struct{}]bool{}, watches: watches{patience: watchPatience},
	}
}

// Register adds the Manager and Agents services to a server.
func (m *Manager) Register(r grpc.ServiceRegistrar) {
	r.RegisterService(bounded(pb.Manager_ServiceDesc), m)
	r.RegisterService(bounded(pb.Agents_ServiceDesc), m)
}

// Close closes the store. Call it after Run has returned.
func (m *Manager) Close() error { return m.store.Close() }

// tickEvery is how often time passes for the state: leases, silent agents.
const tickEvery = 250 * time.Millisecond

// batchMost is how many inputs share one commit. It keeps a transaction far
// below Badger's limit of some 5 MiB.
const batchMost = 128

// Run is the loop. It returns when ctx ends, or with the error of a failed commit.
func (m *Manager) Run(ctx context.Context) error {
	defer close(m.ended)
	tick := time.NewTicker(tickEvery)
	defer tick.Stop()
	for {
		var batch []ask
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			batch = append(batch, ask{input: cluster.Tick{}, reply: make(chan answer, 1)})
		case a := <-m.asks:
			batch = append(batch, a)
		}
		if err := m.work(m.drain(batch)); err != nil {
			return err
		}
	}
}

// drain adds what else has piled up.
func (m *Manager) drain(batch []ask) []ask {
	for len(batch) < batchMost {
		select {
		case a := <-m.asks:
			batch = append(batch, a)
		default:
			return batch
		}
	}
	return batch
}

// work steps through a batch, commits it, and only then tells anybody.
func (m *Manager) work(batch []ask) error {
	answers := make([]answer, len(batch))
	var records []cluster.Record
	wake := map[block.NodeName]bool{}
	events := false
	begin := m.cfg.Now()
	for i, a := range batch {
		if a.input == nil {
			continue
		}
		out, err := m.state.Step(m.cfg.Now(), a.input)
		answers[i] = answer{out.Result, err}
		records = append(records, out.Records...)
		for _, n := range out.Wake {
			wake[n] = true
		}
		m.logEvents(out.Events, a.request)
		events = events || len(out.Events) > 0
	}
	m.metrics.step.Observe(m.cfg.Now().Sub(begin).Seconds())
	if len(records) > 0 {
		begin = m.cfg.Now()
		if err := m.cfg.Commit(records, m.store.Commit); err != nil {
			return err
		}
		m.metrics.commit.Observe(m.cfg.Now().Sub(begin).Seconds())
	}
	for i, a := range batch {
		if a.look != nil {
			a.look()
		}
		a.reply <- answers[i]
	}
	for node := range wake {
		m.wake(node)
	}
	if events {
		for w := range m.watchers {
			poke(w)
		}
	}
	return nil
}

// logEvents logs what came of an input. The request, if there is one, is its caller's.
func (m *Manager) logEvents(events []cluster.Event, request string) {
	log := m.cfg.Log
	if request != "" {
		log = log.With("request", request)
	}
	for _, e := range events {
		level := slog.LevelInfo
		if e.Severity != cluster.Info {
			level = slog.LevelWarn
		}
		log.Log(context.Background(), level, e.Kind, "object", e.Object, "text", e.Text, "seq", e.Seq)
	}
}

// poke says that there is something new, to somebody who may know already.
func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// step has the loop take an input and returns its result once that is durable.
func (m *Manager) step(ctx context.Context, in cluster.Input) (any, error) {
	return m.ask(ctx, ask{input: in, request: requestOf(ctx)})
}

// requestOf is what a caller says that a call is for; empty if it does not.
func requestOf(ctx context.Context) string {
	if said := metadata.ValueFromIncomingContext(ctx, pb.RequestKey); len(said) > 0 {
		return said[0]
	}
	return ""
}

// look runs f in the loop, where it may read the state, which is all durable then.
func (m *Manager) look(ctx context.Context, f func()) error {
	_, err := m.ask(ctx, ask{look: f})
	return err
}

func (m *Manager) ask(ctx context.Context, a ask) (any, error) {
	a.reply = make(chan answer, 1)
	select {
	case m.asks <- a:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-m.ended:
		return nil, ErrStopped
	}
	// The loop has it: whatever becomes of the caller, it will be done.
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

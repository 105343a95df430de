// SPDX-License-Identifier: Apache-2.0

// Package transport carries the messages of the quorum between volume managers, over gRPC.
//
//	member ─ Send ─► queue of a peer ─► stream of messages  ─► Receive of the peer's member
//	                └► one at a time ─► stream of a snapshot ─►
//
// Send never waits: each peer has a queue of bounded length and a goroutine, and what does not
// fit is lost, which Raft expects. A peer that cannot be reached is tried again, with growing
// pauses of at most two seconds.
//
// A stream begins with the cluster and with both members. Whoever receives one for another
// member, or from another cluster, refuses it: addresses are given to other machines, and
// directories are moved. A member says in each stream where it answers, so it may come back at
// another address. If its connection proves a name, the stream is refused unless that is the
// name which the members have for it.
package transport

import (
	"context"
	"io"
	"log/slog"
	"maps"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/quorum"
	"weft.dev/weft/volmgr/quorum/member"
)

const (
	queueMost   = 256       // messages that wait for a peer
	pieceMost   = 256 << 10 // bytes of a message, or of a snapshot, in one part
	messageMost = 256 << 20 // bytes of a message, as the log takes at once
	pauseFirst  = 100 * time.Millisecond
	pauseMost   = 2 * time.Second
	idleMost    = time.Minute      // after which the goroutine of a silent peer ends
	stallMost   = 30 * time.Second // of a snapshot that does not move
)

// Config is what a transport needs.
type Config struct {
	Address string // where other managers reach this one
	// Dial opens a connection to a manager; it does not wait for it.
	Dial func(address string) (*grpc.ClientConn, error)
	// Name returns the name that the manager at the other end of a stream has proved; empty if
	// it was asked for no proof. Nil means that none ever is.
	Name func(context.Context) string
	Log  *slog.Logger
}

// Self is the member that messages are carried for.
type Self struct {
	Cluster block.ClusterID
	ID      quorum.ID
	// Level is the newest that this member knows, and Version what operators are told of it.
	Level   block.Level
	Version string
	// Agreed is the cluster's level: members that do not know it are refused. Nil means any.
	Agreed func() block.Level
	// Members are the members of the quorum, as far as this one knows.
	Members func() quorum.Members
	// Leads reports whether this member leads, and so knows all members.
	Leads func() bool
	To    Receiver
}

// Receiver takes what comes.
type Receiver interface {
	// Receive takes a message. Content comes with a snapshot; it is read before Receive
	// returns.
	Receive(ctx context.Context, m quorum.Message, content io.Reader) error
	// Unreachable says that messages to a member were lost.
	Unreachable(ctx context.Context, id quorum.ID) error
	// Lost says the same, and that a snapshot was among them.
	Lost(ctx context.Context, id quorum.ID) error
	// SnapshotSent says that a member has a snapshot.
	SnapshotSent(ctx context.Context, id quorum.ID) error
}

// Peer is what is known of another member.
type Peer struct {
	Address string      // where it says that it answers; empty if it has not said so
	Name    string      // that it has proved; empty if it has not
	Heard   time.Time   // when it sent something last; zero if it has not
	Problem string      // why messages to it are lost; empty if they are not
	Level   block.Level // the newest that it knows; 0 if it has not said so
	Version string
}

// Transport carries messages. Send may be called before Run, and loses them.
type Transport struct {
	cfg Config
	pb.UnimplementedQuorumServer

	mu      sync.Mutex
	self    *Self // nil while Run does not run
	known   map[quorum.ID]Peer
	links   map[quorum.ID]*link
	start   func(*link) // starts the goroutines of a link
	staging sync.Mutex  // one snapshot at a time is received
}

// New makes a transport. Register it, and Run it.
func New(cfg Config) *Transport {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Name == nil {
		cfg.Name = func(context.Context) string { return "" }
	}
	return &Transport{cfg: cfg, known: map[quorum.ID]Peer{}, links: map[quorum.ID]*link{}}
}

// Register adds the service that other members send to.
func (t *Transport) Register(r grpc.ServiceRegistrar) { pb.RegisterQuorumServer(r, t) }

// Run carries messages until ctx ends. It begins by telling all other members where this one
// answers: they may know another address, and a learner sends nothing by itself.
func (t *Transport) Run(ctx context.Context, self Self) error {
	group, ctx := errgroup.WithContext(ctx)
	t.mu.Lock()
	t.self = &self
	t.start = func(l *link) {
		group.Go(func() error { return t.sendMessages(ctx, l) })
		group.Go(func() error { return t.sendSnapshots(ctx, l) })
	}
	for _, m := range self.Members() {
		if m.ID != self.ID {
			t.linkLocked(m.ID)
		}
	}
	t.mu.Unlock()
	group.Go(func() error {
		<-ctx.Done()
		t.mu.Lock()
		defer t.mu.Unlock()
		t.self, t.start = nil, nil
		for _, l := range t.links {
			l.close()
		}
		clear(t.links)
		return nil
	})
	return group.Wait()
}

// Send sends a message, or loses it. It does not wait.
func (t *Transport) Send(o member.Outgoing) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if l := t.linkLocked(o.To()); l == nil || !l.offer(o) {
		lose(o)
	}
}

// linkLocked returns the link to a member; nil while Run does not run.
func (t *Transport) linkLocked(id quorum.ID) *link {
	l := t.links[id]
	if l == nil && t.start != nil {
		l = newLink(id)
		t.links[id] = l
		t.start(l)
	}
	return l
}

func lose(o member.Outgoing) {
	if o.Content != nil {
		o.Content.Close()
	}
}

// Peers returns what is known of other members.
func (t *Transport) Peers() map[quorum.ID]Peer {
	t.mu.Lock()
	defer t.mu.Unlock()
	return maps.Clone(t.known)
}

// change changes what is known of a member, and returns how it was.
func (t *Transport) change(id quorum.ID, how func(*Peer)) (was Peer) {
	t.mu.Lock()
	defer t.mu.Unlock()
	was = t.known[id]
	is := was
	how(&is)
	t.known[id] = is
	return was
}

// address returns where a member answers: where it says so itself, else as the members have it.
func (t *Transport) address(self *Self, id quorum.ID) string {
	t.mu.Lock()
	said := t.known[id].Address
	t.mu.Unlock()
	if said != "" {
		return said
	}
	m, _ := self.Members().Find(id)
	return m.Address
}

// current is the member that messages are carried for; nil if none is.
func (t *Transport) current() *Self {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.self
}

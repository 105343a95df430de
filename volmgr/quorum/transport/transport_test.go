// SPDX-License-Identifier: Apache-2.0

package transport_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/quorum"
	"weft.dev/weft/volmgr/quorum/member"
	"weft.dev/weft/volmgr/quorum/transport"
	"weft.dev/weft/volmgr/replicated"
	"weft.dev/weft/volmgr/store"
)

var (
	quiet = slog.New(slog.DiscardHandler)
	ours  = block.ClusterID{UUID: block.UUID{1}}
)

// manager is a member of the quorum, at an address of the loopback interface.
type manager struct {
	*replicated.Store
	t         *testing.T
	dir       string
	transport *transport.Transport
	listener  *cuttable
	stop      func()
}

// cuttable is a listener whose connections can be cut; it then closes new ones.
type cuttable struct {
	net.Listener
	mu    sync.Mutex
	cut   bool
	conns []net.Conn
}

func (c *cuttable) Accept() (net.Conn, error) {
	for {
		conn, err := c.Listener.Accept()
		if err != nil {
			return nil, err
		}
		c.mu.Lock()
		c.conns = append(c.conns, conn)
		cut := c.cut
		c.mu.Unlock()
		if !cut {
			return conn, nil
		}
		conn.Close()
	}
}

func (c *cuttable) setCut(cut bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cut = cut; cut {
		for _, conn := range c.conns {
			conn.Close()
		}
		c.conns = nil
	}
}

func listen(t *testing.T) *cuttable {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return &cuttable{Listener: l}
}

// start runs the manager whose store is in dir, at a new address.
func start(t *testing.T, dir string) *manager {
	t.Helper()
	m := &manager{t: t, dir: dir, listener: listen(t)}
	address := m.listener.Addr().String()
	m.transport = transport.New(transport.Config{Address: address, Dial: func(address string) (*grpc.ClientConn, error) {
		return grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
			m.listener.mu.Lock()
			cut := m.listener.cut
			m.listener.mu.Unlock()
			if cut {
				return nil, errors.New("cut off")
			}
			conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
			if err == nil {
				m.listener.mu.Lock()
				m.listener.conns = append(m.listener.conns, conn)
				m.listener.mu.Unlock()
			}
			return conn, err
		}))
	}})
	var err error
	if m.Store, err = replicated.Open(replicated.Config{Dir: dir, Address: address, Cluster: ours, Send: m.transport.Send}); err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	m.transport.Register(server)
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { server.Serve(m.listener) })
	running.Go(func() {
		if err := m.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	running.Go(func() { m.transport.Run(ctx, m.self()) })
	m.stop = sync.OnceFunc(func() {
		cancel()
		server.Stop()
		running.Wait()
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(m.stop)
	return m
}

func (m *manager) self() transport.Self {
	return transport.Self{Cluster: m.Cluster(), ID: m.Status().ID, To: m.Store, Level: block.KnownLevel, Agreed: m.Level,
		Members: func() quorum.Members { return m.Status().Applied.Members },
		Leads:   func() bool { return m.Status().Role == quorum.Leader },
	}
}

func (m *manager) address() string { return m.listener.Addr().String() }

func (m *manager) commit(key string) {
	m.t.Helper()
	if err := m.Commit(m.t.Context(), m.Status().Term, []cluster.Record{{Key: key, Value: []byte("1")}}); err != nil {
		m.t.Fatal(err)
	}
}

func (m *manager) holds(key string) error {
	records, err := m.Load()
	for _, r := range records {
		if r.Key == key {
			return nil
		}
	}
	return errors.Join(err, fmt.Errorf("no record %s", key))
}

func (m *manager) leads() error {
	if s := m.Status(); s.Role != quorum.Leader {
		return fmt.Errorf("it is %v", s.Role)
	}
	return nil
}

func soon(t *testing.T, what string, try func() error) {
	t.Helper()
	var err error
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if err = try(); err == nil {
			return
		}
	}
	t.Fatalf("still not: %s: %v", what, err)
}

func created(t *testing.T, records ...cluster.Record) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "store")
	if err := store.Create(dir, records, quiet); err != nil {
		t.Fatal(err)
	}
	return dir
}

// three managers, of which the first one leads. Its store is large enough for a snapshot in
// several pieces.
func three(t *testing.T) (all []*manager) {
	t.Helper()
	large := cluster.Record{Key: "large", Value: bytes.Repeat([]byte("0123456789abcdef"), 64<<10)}
	first := start(t, created(t, large))
	soon(t, "it leads", first.leads)
	all = append(all, first)
	for range 2 {
		dir := created(t)
		id, err := replicated.Join(dir, ours)
		if err != nil {
			t.Fatal(err)
		}
		m := start(t, dir)
		soon(t, "it is added", func() error {
			return first.AddLearner(t.Context(), quorum.Member{ID: id, Address: m.address()})
		})
		soon(t, "it votes", func() error { return first.Promote(t.Context(), id) })
		soon(t, "it has the snapshot", func() error { return m.holds("large") })
		all = append(all, m)
	}
	return all
}

// A manager that cannot be reached holds nobody up, and catches up when it is back. If it was
// the leader, another one leads.
func TestAManagerThatIsCutOff(t *testing.T) {
	all := three(t)
	first, last := all[0], all[2]
	last.listener.setCut(true)
	for i := range 50 {
		first.commit(fmt.Sprint("while it was away ", i))
	}
	soon(t, "its problem is known", func() error {
		if p := first.transport.Peers()[last.Status().ID]; p.Problem == "" || time.Since(p.Heard) < 500*time.Millisecond {
			return fmt.Errorf("%+v", p)
		}
		return nil
	})
	last.listener.setCut(false)
	soon(t, "it has what it missed", func() error { return last.holds("while it was away 49") })

	leader := first
	soon(t, "one leads", func() error {
		for _, leader = range all {
			if leader.leads() == nil {
				return nil
			}
		}
		return errors.New("none does")
	})
	leader.listener.setCut(true)
	soon(t, "another one leads", func() error {
		for _, m := range all {
			if m != leader && m.leads() == nil {
				m.commit("by another one")
				return nil
			}
		}
		return errors.New("none does")
	})
	leader.listener.setCut(false)
	soon(t, "it follows", func() error { return leader.holds("by another one") })
}

// A manager may come back at another address.
func TestAManagerRestartsAtAnotherAddress(t *testing.T) {
	all := three(t)
	first, last := all[0], all[2]
	id, was := last.Status().ID, last.address()
	last.stop()
	first.commit("while it was away")
	again := start(t, last.dir)
	soon(t, "it has what it missed", func() error { return again.holds("while it was away") })
	if got := first.transport.Peers()[id].Address; got != again.address() || got == was {
		t.Errorf("the leader has it at %s; it was at %s and is at %s", got, was, again.address())
	}
}

// What is not for a manager is refused, with the reason, and it goes on.
func TestStrangersAreRefused(t *testing.T) {
	m := start(t, created(t, cluster.Record{Key: cluster.LevelKey, Value: []byte(`{"level":2}`)}))
	soon(t, "it leads", m.leads)
	for _, c := range []struct {
		what string
		self transport.Self
		to   quorum.ID
		want string
	}{
		{"another cluster", transport.Self{Cluster: block.ClusterID{UUID: block.UUID{2}}, ID: 7}, m.Status().ID, "this manager is of cluster " + ours.String()},
		{"for another member", transport.Self{Cluster: ours, ID: 7}, 8, "this manager is member " + m.Status().ID.String() + ", and not 0000000000000008"},
		{"a member that was removed", transport.Self{Cluster: ours, ID: 7, Level: 2}, m.Status().ID, "member 0000000000000007 was removed from the quorum"},
		{"a version before levels", transport.Self{Cluster: ours, ID: 7}, m.Status().ID, "the cluster is at level 2, and member 0000000000000007 knows no level above 1"},
		{"itself", transport.Self{Cluster: ours, ID: m.Status().ID}, m.Status().ID, "cannot be another manager"},
	} {
		c.self.To = nobody{}
		c.self.Leads = func() bool { return false }
		c.self.Members = func() quorum.Members { return quorum.Members{{ID: c.to, Address: m.address()}} }
		stranger := transport.New(transport.Config{Address: "elsewhere:1", Dial: dial})
		ctx, cancel := context.WithCancel(t.Context())
		ran := make(chan error, 1)
		go func() { ran <- stranger.Run(ctx, c.self) }()
		soon(t, c.what+": it is told why", func() error {
			stranger.Send(member.Outgoing{Message: message(t, c.self.ID, c.to)})
			if got := stranger.Peers()[c.to].Problem; !strings.Contains(got, c.want) {
				return fmt.Errorf("told %q", got)
			}
			return nil
		})
		cancel()
		<-ran
		if _, heard := m.transport.Peers()[7]; heard {
			t.Errorf("%s: it counts as a manager", c.what)
		}
	}
	m.commit("still")
}

// named are a manager's connections to others: they prove a name, as certificates do.
func named(name string) func(address string) (*grpc.ClientConn, error) {
	return func(address string) (*grpc.ClientConn, error) {
		return grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, conn *grpc.ClientConn, method string, stream grpc.Streamer, options ...grpc.CallOption) (grpc.ClientStream, error) {
				return stream(metadata.AppendToOutgoingContext(ctx, "name", name), desc, conn, method, options...)
			}))
	}
}

// nameIn is the name that a manager's connection proves.
func nameIn(ctx context.Context) string {
	md, _ := metadata.FromIncomingContext(ctx)
	return strings.Join(md.Get("name"), "")
}

// A manager cannot take another one's place: what it proves must be the name that the members have
// for whom it says it is.
func TestAManagerIsTheMemberItSays(t *testing.T) {
	runs := func(of *transport.Transport, self transport.Self) (stop func()) {
		ctx, cancel := context.WithCancel(t.Context())
		ran := make(chan error, 1)
		go func() { ran <- of.Run(ctx, self) }()
		return func() { cancel(); <-ran }
	}
	members := quorum.Members{{ID: 1, Name: "m1"}, {ID: 2, Name: "m2"}, {ID: 3, Name: "m3"}, {ID: 4}}
	for _, c := range []struct {
		name    string
		as      quorum.ID
		refused string
	}{
		{"m2", 2, ""},
		{"m3", 2, "member 0000000000000002 is manager m2, and the certificate is that of manager m3"},
		{"m2", 3, "member 0000000000000003 is manager m3, and the certificate is that of manager m2"},
		{"m9", 3, "is manager m3"},
		{"m9", 4, ""}, // its name is not known yet
		{"", 2, ""},   // nobody was asked
	} {
		m := transport.New(transport.Config{Address: "m1:1", Dial: dial, Name: nameIn})
		l := listen(t)
		server := grpc.NewServer()
		m.Register(server)
		go server.Serve(l)
		end := runs(m, transport.Self{Cluster: ours, ID: 1, To: nobody{}, Leads: func() bool { return true }, Members: func() quorum.Members { return members }})
		peer := transport.New(transport.Config{Address: "m:1", Dial: named(c.name)})
		stop := runs(peer, transport.Self{Cluster: ours, ID: c.as, To: nobody{}, Leads: func() bool { return false },
			Members: func() quorum.Members { return quorum.Members{{ID: 1, Address: l.Addr().String()}} }})
		soon(t, fmt.Sprintf("%q as member %v is answered", c.name, c.as), func() error {
			peer.Send(member.Outgoing{Message: message(t, c.as, 1)})
			was := m.Peers()[c.as]
			heard := was.Address == "m:1"
			problem := peer.Peers()[1].Problem
			switch {
			case c.refused != "" && heard:
				t.Fatalf("%q counts as member %v", c.name, c.as)
			case c.refused == "" && strings.Contains(problem, "certificate"):
				t.Fatalf("%q is refused as member %v: %s", c.name, c.as, problem)
			case c.refused != "" && strings.Contains(problem, c.refused), c.refused == "" && heard && was.Name == c.name:
				return nil
			}
			return fmt.Errorf("told %q, heard %v", problem, heard)
		})
		stop()
		end()
		server.Stop()
	}
}

// A peer that takes connections and nothing else does not hold the sender.
func TestSendDoesNotWait(t *testing.T) {
	l := listen(t)
	defer l.Close()
	go func() {
		for {
			if _, err := l.Accept(); err != nil {
				return
			}
		}
	}()
	mute := transport.New(transport.Config{Address: "m1:1", Dial: dial})
	ctx, cancel := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	go func() {
		ran <- mute.Run(ctx, transport.Self{Cluster: ours, ID: 1, To: nobody{}, Leads: func() bool { return true }, Members: func() quorum.Members { return quorum.Members{{ID: 2, Address: l.Addr().String()}} }})
	}()
	content := &closed{make(chan struct{})}
	soon(t, "it runs", func() error {
		for range 3 {
			mute.Send(member.Outgoing{Message: message(t, 1, 2), Content: content})
		}
		select {
		case <-content.done:
			return nil
		default:
			return errors.New("no snapshot was given up")
		}
	})
	begin := time.Now()
	for range 10_000 {
		mute.Send(member.Outgoing{Message: message(t, 1, 2)})
	}
	if took := time.Since(begin); took > 2*time.Second {
		t.Errorf("10 000 messages took %v", took)
	}
	cancel()
	if err := <-ran; err != nil {
		t.Error(err)
	}
}

func dial(address string) (*grpc.ClientConn, error) {
	return grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
}

// message is a heartbeat's answer, as a member sends it: type 9, to, from.
func message(t *testing.T, from, to quorum.ID) quorum.Message {
	t.Helper()
	text := []byte{1 << 3, 9}
	for field, id := range []quorum.ID{to, from} {
		text = append(text, byte(field+2)<<3)
		for v := uint64(id); ; v >>= 7 {
			if v < 0x80 {
				text = append(text, byte(v))
				break
			}
			text = append(text, byte(v)|0x80)
		}
	}
	m, err := quorum.DecodeMessage(text)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

type nobody struct{}

func (nobody) Receive(context.Context, quorum.Message, io.Reader) error { return nil }
func (nobody) Unreachable(context.Context, quorum.ID) error             { return nil }
func (nobody) Lost(context.Context, quorum.ID) error                    { return nil }
func (nobody) SnapshotSent(context.Context, quorum.ID) error            { return nil }

// closed tells when a snapshot's content was given up.
type closed struct{ done chan struct{} }

func (c *closed) Read([]byte) (int, error) { return 0, io.EOF }

func (c *closed) Close() error {
	select {
	case <-c.done:
	default:
		close(c.done)
	}
	return nil
}

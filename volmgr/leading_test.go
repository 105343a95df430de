// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/quorum"
	"weft.dev/weft/volmgr/quorum/member"
	"weft.dev/weft/volmgr/replicated"
	"weft.dev/weft/volmgr/store"
)

// replicas are several managers in one process, with a network that can cut one of them off.
type replicas struct {
	t   *testing.T
	mu  sync.Mutex
	all map[quorum.ID]*replica

	level block.Level // what managers know that are started from now on; 0: what this program does
	ends  error       // with which managers may end

	sees func(message []byte) // guarded by mu: is called with what is sent
}

type replica struct {
	*Manager
	id      quorum.ID
	inbox   chan func()
	cut     bool // guarded by replicas.mu
	ctx     context.Context
	stop    func()
	stopped chan struct{}
}

func (ps *replicas) start(dir, address string) *replica {
	ps.t.Helper()
	p := &replica{inbox: make(chan func(), 256), stopped: make(chan struct{})}
	p.ctx, p.stop = context.WithCancel(context.Background())
	var err error
	p.Manager, err = New(Config{Dir: dir, Level: ps.level, Quorum: &Quorum{Address: address, Send: func(o member.Outgoing) { ps.send(p, o) }}})
	if err != nil {
		ps.t.Fatal(err)
	}
	p.id = p.shared().Status().ID
	ps.mu.Lock()
	ps.all[p.id] = p
	ps.mu.Unlock()
	go func() {
		defer close(p.stopped)
		if err := errors.Join(p.Run(p.ctx), p.Close()); err != nil && (ps.ends == nil || !errors.Is(err, ps.ends)) {
			ps.t.Errorf("%s: %v", address, err)
		}
	}()
	go func() {
		for {
			select {
			case deliver := <-p.inbox:
				deliver()
			case <-p.stopped:
				return
			}
		}
	}()
	ps.t.Cleanup(func() { p.stop(); <-p.stopped })
	return p
}

func (p *replica) shared() *shared { return p.records.(*shared) }

func (ps *replicas) send(from *replica, o member.Outgoing) {
	ps.mu.Lock()
	defer ps.mu.Unlock()
	if text, err := o.Encode(); err == nil && ps.sees != nil {
		ps.sees(text)
	}
	to := ps.all[o.To()]
	if to == nil || to.cut || from.cut {
		if o.Content != nil {
			o.Content.Close()
			go from.shared().Lost(from.ctx, o.To())
		}
		return
	}
	select {
	case to.inbox <- func() {
		err := to.shared().Receive(to.ctx, o.Message, o.Content)
		if o.Content == nil {
			return
		}
		o.Content.Close()
		if err != nil {
			from.shared().Lost(from.ctx, o.To())
			return
		}
		from.shared().Store.SnapshotSent(from.ctx, o.To())
	}:
	default:
	}
}

// three managers, of which the first one leads.
func three(t *testing.T) (*replicas, []*replica) {
	ps := &replicas{t: t, all: map[quorum.ID]*replica{}}
	all := []*replica{ps.start(initialized(t), "m1:9800")}
	eventually(t, "one manager leads", func() bool { return all[0].shared().Status().Role == quorum.Leader })
	cluster := loadedID(t, all[0])
	for _, address := range []string{"m2:9800", "m3:9800"} {
		dir := filepath.Join(t.TempDir(), "volmgr")
		if err := store.Create(dir, nil, slog.New(slog.DiscardHandler)); err != nil {
			t.Fatal(err)
		}
		id, err := replicated.Join(dir, cluster)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, ps.start(dir, address))
		eventually(t, address+" is added", func() bool {
			return all[0].shared().AddLearner(t.Context(), quorum.Member{ID: id, Address: address}) == nil
		})
		eventually(t, address+" votes", func() bool { return all[0].shared().Promote(t.Context(), id) == nil })
	}
	return ps, all
}

// leads waits until one of the managers answers.
func leads(t *testing.T, all ...*replica) (leader *replica) {
	t.Helper()
	eventually(t, "one of them answers", func() bool {
		for _, p := range all {
			if _, err := p.ListPools(t.Context(), &pb.ListPoolsRequest{}); err == nil {
				leader = p
				return true
			}
		}
		return false
	})
	return leader
}

func pools(t *testing.T, p *replica) (names []string) {
	t.Helper()
	all, err := p.ListPools(t.Context(), &pb.ListPoolsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, pool := range all.GetPools() {
		names = append(names, pool.GetName())
	}
	return names
}

// A store that a quorum keeps is not opened without it: it would part from the others'.
func TestAStoreOfAQuorumIsNotOpenedWithout(t *testing.T) {
	dir := initialized(t)
	m, err := New(Config{Dir: dir, Quorum: &Quorum{Address: "m1"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := New(Config{Dir: dir}); err == nil || !strings.Contains(err.Error(), "belongs to a quorum") {
		t.Errorf("New without a quorum = %v, want that the store belongs to one", err)
	}
}

// Another manager leads when the first one stops, and has all that was answered. Who does not
// lead says who does.
func TestAnotherManagerLeads(t *testing.T) {
	_, all := three(t)
	if _, err := all[0].CreatePool(t.Context(), &pb.CreatePoolRequest{Name: "gold"}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a follower says who leads", func() bool {
		_, err := all[1].CreatePool(t.Context(), &pb.CreatePoolRequest{Name: "silver"})
		if err == nil {
			t.Fatal("a follower has created a pool")
		}
		return status.Code(err) == codes.Unavailable && reason(err) == pb.ReasonNotLeader && strings.Contains(err.Error(), "m1:9800 does")
	})
	all[0].stop()
	<-all[0].stopped
	leader := leads(t, all[1:]...)
	if got := fmt.Sprint(pools(t, leader)); !strings.Contains(got, "gold") || strings.Contains(got, "silver") {
		t.Errorf("the new leader has the pools %v", got)
	}
	if _, err := leader.CreatePool(t.Context(), &pb.CreatePoolRequest{Name: "bronze"}); err != nil {
		t.Error(err)
	}
}

// A leader that is cut off answers nothing, neither changes nor reads: another one may lead.
// When it is back, it follows.
func TestALeaderThatIsCutOffAnswersNothing(t *testing.T) {
	ps, all := three(t)
	if _, err := all[0].CreatePool(t.Context(), &pb.CreatePoolRequest{Name: "gold"}); err != nil {
		t.Fatal(err)
	}
	if err := all[0].live.Take(&pb.FiguresReport{Node: "h1", Source: pb.FiguresSource_FIGURES_SOURCE_INITIATOR, Nanoseconds: 2e9}); err != nil {
		t.Fatal(err)
	}
	over := all[0].live.Over()
	ps.mu.Lock()
	all[0].cut = true
	ps.mu.Unlock()
	begin := time.Now()
	answers := make(chan error, 2)
	go func() {
		_, err := all[0].CreatePool(t.Context(), &pb.CreatePoolRequest{Name: "silver"})
		answers <- err
	}()
	go func() {
		_, err := all[0].ListPools(t.Context(), &pb.ListPoolsRequest{})
		answers <- err
	}()
	leader := leads(t, all[1:]...)
	t.Logf("another one leads after %v", time.Since(begin))
	if _, err := leader.CreatePool(t.Context(), &pb.CreatePoolRequest{Name: "bronze"}); err != nil {
		t.Error(err)
	}
	for range 2 {
		if err := <-answers; err == nil || reason(err) != pb.ReasonOutcomeUnknown && reason(err) != pb.ReasonNotLeader {
			t.Errorf("the one that is cut off answers %v", err)
		}
	}
	ps.mu.Lock()
	all[0].cut = false
	ps.mu.Unlock()
	eventually(t, "it follows", func() bool {
		_, err := all[0].ListPools(t.Context(), &pb.ListPoolsRequest{})
		return reason(err) == pb.ReasonNotLeader && strings.Contains(err.Error(), " does")
	})
	select {
	case <-over:
	default:
		t.Error("it still takes figures")
	}
	got := fmt.Sprint(pools(t, leader))
	if !strings.Contains(got, "gold") || !strings.Contains(got, "bronze") {
		t.Errorf("the new leader has the pools %v", got)
	}
}

// deposed is a committer that is told to stop, and leads no more, as soon as it leads.
type deposed struct {
	committer
	stop func()
}

func (d deposed) Lead(context.Context) (<-chan struct{}, error) {
	d.stop()
	over := make(chan struct{})
	close(over)
	return over, nil
}

// relapsing is a committer that leads at once, and no more each time that it is told so; then it leads again.
type relapsing struct {
	committer
	over chan chan struct{} // of the time in which it leads
}

func (r relapsing) Lead(context.Context) (<-chan struct{}, error) {
	over := make(chan struct{})
	r.over <- over
	return over, nil
}

// A manager that leads no more for a moment, and then again, tells its watchers what happens.
func TestAWatchGoesOnWhenItsManagerLeadsAgain(t *testing.T) {
	m, err := New(Config{Dir: initialized(t)})
	if err != nil {
		t.Fatal(err)
	}
	leads := relapsing{m.records, make(chan chan struct{}, 1)}
	m.records = leads
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- errors.Join(m.Run(ctx), m.Close()) }()
	defer func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("Run = %v", err)
		}
	}()
	told := make(chan string, 64)
	go func() {
		_ = m.tellEvents(ctx, &pb.WatchEventsRequest{}, func(e event.Event) error { told <- e.Object; return nil })
	}()
	over := <-leads.over
	for _, name := range []string{"gold", "silver", "bronze"} {
		if _, err := m.CreatePool(t.Context(), &pb.CreatePoolRequest{Name: name}); err != nil {
			t.Fatal(err)
		}
		for object := ""; object != "pool "+name; {
			select {
			case object = <-told:
			case <-time.After(20 * time.Second):
				t.Fatalf("no event of pool %s", name)
			}
		}
		close(over)
		over = <-leads.over
	}
}

// A manager that is told to stop while another one takes over has stopped as it should.
func TestAManagerThatStopsWhileItIsDeposedHasNotFailed(t *testing.T) {
	m, err := New(Config{Dir: initialized(t)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	m.records = deposed{m.records, stop}
	if err := errors.Join(m.Run(ctx), m.Close()); err != nil {
		t.Errorf("Run = %v", err)
	}
}

func loadedID(t *testing.T, p *replica) (id block.ClusterID) {
	t.Helper()
	s, err := p.snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return s.ClusterID()
}

// Managers that do not know a level are there when it is raised, since nobody has asked them. They
// end instead of applying what they do not know, and none of them leads again.
func TestManagersThatDoNotKnowTheLevelEnd(t *testing.T) {
	ps, all := three(t)
	all[0].stop()
	<-all[0].stopped
	ps.level, ps.ends = block.KnownLevel+1, cluster.ErrLevel
	later := ps.start(all[0].cfg.Dir, "m1:9800")
	eventually(t, "the later version leads", func() bool {
		for _, p := range all[1:] {
			_ = p.shared().Transfer(t.Context(), later.id) // only the one that leads can
		}
		return later.shared().Status().Role == quorum.Leader
	})
	_, err := later.step(t.Context(), cluster.RaiseLevel{To: block.KnownLevel + 1})
	if err != nil && !errors.Is(err, ErrOutcomeUnknown) { // there is no majority any more
		t.Fatal(err)
	}
	for _, p := range all[1:] {
		<-p.stopped
	}
}

// A manager that does not lead answers a read only if the caller can do with an old answer.
func TestAFollowerAnswersOnlyStaleReads(t *testing.T) {
	ps, all := three(t)
	leader := leads(t, all...)
	follower := all[2]
	if _, err := leader.CreatePool(t.Context(), &pb.CreatePoolRequest{Name: "before"}); err != nil {
		t.Fatal(err)
	}
	stale := metadata.NewIncomingContext(t.Context(), metadata.Pairs(pb.ReadKey, pb.ReadStale))
	has := func(p *replica, name string) bool {
		pools, err := p.ListPools(stale, &pb.ListPoolsRequest{})
		return err == nil && slices.ContainsFunc(pools.GetPools(), func(p *pb.Pool) bool { return p.GetName() == name })
	}
	eventually(t, "the follower has the pool", func() bool { return has(follower, "before") })
	if _, err := follower.ListPools(t.Context(), &pb.ListPoolsRequest{}); err == nil {
		t.Error("a follower answers a read that has to be new")
	}
	ps.mu.Lock()
	follower.cut = true
	ps.mu.Unlock()
	if _, err := leader.CreatePool(t.Context(), &pb.CreatePoolRequest{Name: "since"}); err != nil {
		t.Fatal(err)
	}
	time.Sleep(2 * staleFor) // a new state is loaded, and no leader is known any more
	if !has(follower, "before") || has(follower, "since") || !has(leader, "since") {
		t.Error("the follower should have what it had, and the leader all")
	}
	if age := time.Since(follower.shared().Heard()); age < 2*staleFor {
		t.Errorf("it says that it heard the leader %v ago", age)
	}
}

// SPDX-License-Identifier: Apache-2.0

package replicated

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/quorum"
	"weft.dev/weft/volmgr/quorum/member"
	"weft.dev/weft/volmgr/store"
)

var quiet = slog.New(slog.DiscardHandler)

func record(key, value string) cluster.Record { return cluster.Record{Key: key, Value: []byte(value)} }

// managers are several in one process, over real files, and the network between them.
type managers struct {
	t   testing.TB
	mu  sync.Mutex
	all map[quorum.ID]*manager
	// passes is asked for each message whether to send it; nil: all are sent.
	passes func(quorum.Message) bool
}

type manager struct {
	*Store
	id   quorum.ID
	dir  string
	in   chan func() // what the network delivers
	stop func() error
}

// start runs the manager whose store is in dir.
func (ms *managers) start(dir string) *manager {
	ms.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	m := &manager{dir: dir, in: make(chan func(), 1024)}
	s, err := Open(Config{Dir: dir, Address: filepath.Base(dir), Cluster: block.ClusterID{UUID: block.UUID{1}}, Send: func(o member.Outgoing) { ms.send(ctx, m, o) }})
	if err != nil {
		ms.t.Fatal(err)
	}
	m.Store, m.id = s, s.Status().ID
	ran := make(chan error, 1)
	go func() { ran <- s.Run(ctx) }()
	go func() {
		for {
			select {
			case deliver := <-m.in:
				deliver()
			case <-s.ended:
				return
			}
		}
	}()
	m.stop = sync.OnceValue(func() error {
		ms.mu.Lock()
		delete(ms.all, m.id)
		ms.mu.Unlock()
		cancel()
		return errors.Join(<-ran, s.Close())
	})
	ms.t.Cleanup(func() { m.stop() })
	ms.mu.Lock()
	ms.all[m.id] = m
	ms.mu.Unlock()
	return m
}

// commit commits as a leader that has just decided.
func (m *manager) commit(records []cluster.Record) error {
	return m.Commit(context.Background(), m.Status().Term, records)
}

// send delivers a message in the background, or reports it lost.
func (ms *managers) send(ctx context.Context, from *manager, o member.Outgoing) {
	ms.mu.Lock()
	to := ms.all[o.To()]
	lost := ms.passes != nil && !ms.passes(o.Message)
	ms.mu.Unlock()
	if to == nil || lost {
		lose(o)
		if o.Content != nil {
			go from.Lost(ctx, o.To())
		}
		return
	}
	deliver := func() {
		if o.Content == nil {
			to.Receive(ctx, o.Message, nil)
			return
		}
		defer o.Content.Close()
		if to.Receive(ctx, o.Message, o.Content) != nil {
			from.Lost(ctx, o.To())
			return
		}
		from.Store.SnapshotSent(ctx, o.To())
	}
	select {
	case to.in <- deliver:
	default:
		lose(o)
	}
}

// created is a directory with a store that has been without a quorum.
func created(t testing.TB, name string, records ...cluster.Record) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), name)
	if err := store.Create(dir, records, quiet); err != nil {
		t.Fatal(err)
	}
	return dir
}

// join adds a manager with an empty store, first as a learner and then as a voter.
func (ms *managers) join(leader *manager, name string) *manager {
	ms.t.Helper()
	dir := created(ms.t, name)
	id, err := Join(dir, block.ClusterID{UUID: block.UUID{1}})
	if err != nil {
		ms.t.Fatal(err)
	}
	m := ms.start(dir)
	ms.eventually("it is added", func() error {
		return leader.AddLearner(context.Background(), quorum.Member{ID: id, Address: name})
	})
	ms.eventually("it votes", func() error { return leader.Promote(context.Background(), id) })
	return m
}

func (ms *managers) eventually(what string, try func() error) {
	ms.t.Helper()
	var err error
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if err = try(); err == nil {
			return
		}
	}
	ms.t.Fatalf("still not: %s: %v", what, err)
}

// leader waits for one of the running managers to lead.
func (ms *managers) leader() (found *manager) {
	ms.t.Helper()
	ms.eventually("one leads", func() error {
		ms.mu.Lock()
		defer ms.mu.Unlock()
		for _, m := range ms.all {
			if m.Status().Role == quorum.Leader {
				found = m
				return nil
			}
		}
		return errors.New("none does")
	})
	return found
}

func quorumOf(t testing.TB, n int, records ...cluster.Record) (*managers, []*manager) {
	ms := &managers{t: t, all: map[quorum.ID]*manager{}}
	all := []*manager{ms.start(created(t, "m1", records...))}
	ms.leader()
	for i := range n - 1 {
		all = append(all, ms.join(all[0], fmt.Sprintf("m%d", i+2)))
	}
	return ms, all
}

// holdsSoon waits until a manager's store has these records and no others.
func (ms *managers) holdsSoon(m *manager, want ...cluster.Record) {
	ms.t.Helper()
	ms.eventually("the store has the records", func() error {
		got, err := m.Load()
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			return fmt.Errorf("%v (-want +got):\n%s", err, diff)
		}
		return nil
	})
}

// A store that has been without a quorum goes on as a quorum of one, and after a restart.
func TestAnExistingStoreBecomesAQuorumOfOne(t *testing.T) {
	ms, all := quorumOf(t, 1, record("a", "1"), record("b", "2"))
	m := all[0]
	if err := m.commit([]cluster.Record{record("c", "3"), {Key: "a"}}); err != nil {
		t.Fatal(err)
	}
	ms.holdsSoon(m, record("b", "2"), record("c", "3"))
	if err := m.stop(); err != nil {
		t.Fatal(err)
	}
	if err := m.commit(nil); !errors.Is(err, ErrStopped) {
		t.Errorf("Commit after Run has ended = %v, want %v", err, ErrStopped)
	}
	again := ms.start(m.dir)
	if again.id != m.id {
		t.Errorf("it is member %v, and was %v", again.id, m.id)
	}
	ms.leader()
	ms.holdsSoon(again, record("b", "2"), record("c", "3"))
}

// A member that is alone has nobody to hear from. With another one, a lost leader must be noticed
// soon.
func TestTicksAreRareOnlyForAMemberThatIsAlone(t *testing.T) {
	_, all := quorumOf(t, 1)
	if got := all[0].tickEvery(); got != aloneEvery {
		t.Errorf("a member that is alone ticks every %v, want %v", got, aloneEvery)
	}
	_, all = quorumOf(t, 3)
	for i, m := range all {
		if got := m.tickEvery(); got != TickEvery {
			t.Errorf("member %d of three ticks every %v, want %v", i, got, TickEvery)
		}
	}
}

// One manager becomes three. The leader stops, another one leads, and all that was committed
// is there; the one that stopped comes back and has what it missed.
func TestOneManagerBecomesThree(t *testing.T) {
	ms, all := quorumOf(t, 3, record("a", "1"))
	first := all[0]
	if err := first.commit([]cluster.Record{record("b", "2")}); err != nil {
		t.Fatal(err)
	}
	for _, m := range all {
		ms.holdsSoon(m, record("a", "1"), record("b", "2"))
	}
	if err := all[1].commit([]cluster.Record{record("x", "x")}); !errors.Is(err, quorum.ErrNotLeading) {
		t.Errorf("Commit at a follower = %v, want %v", err, quorum.ErrNotLeading)
	}
	if got := all[1].Status(); got.Leader != first.id {
		t.Errorf("a follower says that %v leads; it is %v", got.Leader, first.id)
	}
	begin := time.Now()
	if err := first.stop(); err != nil {
		t.Fatal(err)
	}
	next := ms.leader()
	t.Logf("handed over after %v", time.Since(begin))
	if err := next.Confirm(t.Context(), next.Status().Term); err != nil {
		t.Errorf("Confirm at the new leader = %v", err)
	}
	if err := next.commit([]cluster.Record{record("c", "3")}); err != nil {
		t.Fatal(err)
	}
	ms.holdsSoon(ms.start(first.dir), record("a", "1"), record("b", "2"), record("c", "3"))
}

// A term that is over is announced, and what was decided in it is not taken any more.
func TestATermEnds(t *testing.T) {
	ms, all := quorumOf(t, 3)
	term, over, err := all[0].Lead(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := all[0].Commit(t.Context(), term, []cluster.Record{record("a", "1")}); err != nil {
		t.Fatal(err)
	}
	if err := all[0].report(t.Context(), quorum.Transfer{}); err != nil {
		t.Fatal(err)
	}
	select {
	case <-over:
	case <-time.After(10 * time.Second):
		t.Fatal("the term is not over")
	}
	if err := all[0].Commit(t.Context(), term, []cluster.Record{record("b", "2")}); !errors.Is(err, quorum.ErrNotLeading) {
		t.Errorf("Commit of the term before = %v, want %v", err, quorum.ErrNotLeading)
	}
	next := ms.leader()
	if later, _, err := next.Lead(t.Context()); err != nil || later <= term {
		t.Errorf("Lead = %d, %v; want a later term than %d", later, err, term)
	}
	ms.holdsSoon(next, record("a", "1"))
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, _, err := all[0].Lead(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Lead at a follower = %v, want that it waits", err)
	}
}

// A leader that stops keeps nobody from leading, also if no other manager hears that it should.
func TestALeaderThatStopsIsSilent(t *testing.T) {
	ms, all := quorumOf(t, 3)
	heartbeats := 0
	ms.mu.Lock()
	ms.passes = func(m quorum.Message) bool {
		if m.From() == all[0].id && m.Type() == "MsgHeartbeat" {
			heartbeats++
		}
		return m.Type() != "MsgTimeoutNow"
	}
	ms.mu.Unlock()
	if err := all[0].stop(); err != nil {
		t.Error(err)
	}
	ms.mu.Lock()
	defer ms.mu.Unlock()
	if heartbeats > 4 { // two ticks, each to two others, may be before
		t.Errorf("it sent %d heartbeats while it stopped", heartbeats)
	}
}

// A manager that is removed stops, and the others go on.
func TestARemovedManagerStops(t *testing.T) {
	ms, all := quorumOf(t, 3)
	if err := all[0].Remove(t.Context(), all[2].id); err != nil {
		t.Fatal(err)
	}
	ms.eventually("it has stopped", func() error {
		select {
		case <-all[2].ended:
			return nil
		default:
			return errors.New("it runs")
		}
	})
	if err := all[2].stop(); !errors.Is(err, ErrRemoved) {
		t.Errorf("Run = %v, want %v", err, ErrRemoved)
	}
	if err := all[0].commit([]cluster.Record{record("a", "1")}); err != nil {
		t.Error(err)
	}
	ms.holdsSoon(all[1], record("a", "1"))
}

// BenchmarkCommit compares a commit of 1.5 KiB of a store without a quorum, of a quorum of one
// and of one of three managers on one disk.
func BenchmarkCommit(b *testing.B) {
	entry := []cluster.Record{{Key: "v/volume", Value: bytes.Repeat([]byte("x"), 1500)}}
	commits := func(commit func() error) func(*testing.B) {
		return func(b *testing.B) {
			var took []time.Duration
			for b.Loop() {
				begin := time.Now()
				if err := commit(); err != nil {
					b.Fatal(err)
				}
				took = append(took, time.Since(begin))
			}
			slices.Sort(took)
			b.ReportMetric(float64(took[len(took)/2].Microseconds()), "p50-µs")
			b.ReportMetric(float64(took[len(took)*99/100].Microseconds()), "p99-µs")
		}
	}
	plain, err := store.Open(created(b, "plain"), quiet)
	if err != nil {
		b.Fatal(err)
	}
	defer plain.Close()
	b.Run("today", commits(func() error { return plain.Commit(entry) }))
	for _, n := range []int{1, 3} {
		_, all := quorumOf(b, n)
		b.Run(fmt.Sprintf("quorum-of-%d", n), commits(func() error { return all[0].commit(entry) }))
		for _, m := range all {
			m.stop()
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/cluster"
)

// While a commit is under way, no caller, reader, watcher or agent sees any of it.
func TestNothingIsToldBeforeItIsDurable(t *testing.T) {
	r := newRig(t)
	disk := make(chan struct{}) // closed when it no longer hangs
	goesOn := sync.OnceFunc(func() { close(disk) })
	defer goesOn()
	hangs := make(chan struct{}, 1)
	r.adjust = func(m *Manager) {
		m.records = hooked{committer: m.records, commit: func(records []cluster.Record, commit func([]cluster.Record) error) error {
			for _, record := range records {
				if strings.HasPrefix(record.Key, "d/") { // a drive's: the one that is added below
					poke(hangs)
					<-disk
				}
			}
			return commit(records)
		}}
	}
	r.restart()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	agent, err := r.agents.Target(ctx)
	if err != nil {
		t.Fatal(err)
	}
	report := &pb.TargetReport{Node: "t1", BootId: "1", Devices: []*pb.Device{{Path: "/dev/nvme0n1", SizeBytes: 10 << 30}}}
	if err := agent.Send(report); err != nil {
		t.Fatal(err)
	}
	if w, err := agent.Recv(); err != nil || len(w.Drives) > 0 {
		t.Fatal(w, err)
	}
	watch, err := r.WatchEvents(ctx, &pb.WatchEventsRequest{Object: "drive /dev/nvme0n1 on t1"})
	if err != nil {
		t.Fatal(err)
	}
	told := make(chan string, 4)
	tell := func(who string, call func() error) {
		go func() {
			if err := call(); err != nil {
				who += ": " + err.Error()
			}
			told <- who
		}()
	}
	tell("who asked", func() error {
		_, err := r.AddDrive(ctx, &pb.AddDriveRequest{Node: "t1", Device: "/dev/nvme0n1"})
		return err
	})
	<-hangs
	tell("the agent", func() error { _, err := agent.Recv(); return err })
	tell("a watcher", func() error { _, err := watch.Recv(); return err })
	tell("a reader", func() error { _, err := r.ListDrives(ctx, &pb.ListDrivesRequest{}); return err })
	select {
	case who := <-told:
		t.Fatalf("%s was told before the commit", who)
	case <-time.After(500 * time.Millisecond):
	}
	goesOn()
	for range 4 {
		if who := <-told; strings.Contains(who, ":") {
			t.Errorf("after the commit: %s", who)
		}
	}
}

// After a commit that the store refuses, nothing is answered any more, and the process has to
// end.
func TestAFailedCommitEndsTheManager(t *testing.T) {
	m, err := New(Config{Dir: initialized(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	full := errors.New("no space left on device")
	m.records = hooked{committer: m.records, commit: func([]cluster.Record, func([]cluster.Record) error) error { return full }}
	ended := make(chan error, 1)
	go func() { ended <- m.Run(t.Context()) }()
	if pool, err := m.CreatePool(t.Context(), &pb.CreatePoolRequest{Name: "gold"}); status.Code(err) != codes.Unavailable {
		t.Errorf("CreatePool = %v, %v; want UNAVAILABLE", pool, err)
	}
	if err := <-ended; !errors.Is(err, full) {
		t.Errorf("Run = %v, want what the disk said", err)
	}
	if pools, err := m.ListPools(t.Context(), &pb.ListPoolsRequest{}); status.Code(err) != codes.Unavailable {
		t.Errorf("ListPools after that = %v, %v; want UNAVAILABLE", pools, err)
	}
}

// unsure is a committer that does not know whether one of its commits took effect.
type unsure struct {
	committer
	mu       sync.Mutex
	commits  int    // so far
	at       int    // which one, from 1
	after    bool   // it did take effect
	durable  uint64 // generation of the durable records
	overtook []uint64
}

// Commit is part of committer.
func (u *unsure) Commit(records []cluster.Record) error {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.commits++
	fails := u.commits == u.at
	if fails && !u.after {
		return fmt.Errorf("leadership lost: %w", ErrOutcomeUnknown)
	}
	if err := u.committer.Commit(records); err != nil {
		return err
	}
	for _, r := range records {
		var meta struct{ Generation uint64 }
		if r.Key == "m/meta" && json.Unmarshal(r.Value, &meta) == nil {
			u.durable = meta.Generation
		}
	}
	if fails {
		return fmt.Errorf("leadership lost: %w", ErrOutcomeUnknown)
	}
	return nil
}

// told notes an order that was not durable when an agent got it.
func (u *unsure) told(generation uint64) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if generation > u.durable {
		u.overtook = append(u.overtook, generation)
	}
}

// Any commit may fail, and may have taken effect or not. Callers learn that the outcome is
// unknown, agents get no order that is not durable, and after all calls were repeated the
// cluster is as requested.
func TestAnyCommitMayFail(t *testing.T) {
	if *overQuorum {
		t.Skip("it looks into the state before the manager leads")
	}
	failed := 0
	for at := 1; ; at++ {
		u, unknown := &unsure{at: at}, 0
		for _, u.after = range []bool{false, true} {
			t.Run(fmt.Sprintf("commit %d, after %t", at, u.after), func(t *testing.T) {
				u.commits = 0
				unknown = volumeOver(t, u)
			})
			if t.Failed() {
				return
			}
			failed += unknown
		}
		if u.commits < at {
			t.Logf("each of %d commits failed, and %d calls heard of it", at-1, failed)
			// The three calls and the agent's two answers follow one another: five commits. Other
			// reports may share one of theirs.
			if at-1 < 5 || failed < 2 {
				t.Error("want five and two, or more")
			}
			return
		}
	}
}

// volumeOver creates a volume on a target through a manager that commits to u, and counts the
// calls whose outcome was unknown.
func volumeOver(t *testing.T, u *unsure) (unknown int) {
	r := &rig{t: t, dir: initialized(t)}
	r.adjust = func(m *Manager) {
		u.committer, u.durable = m.records, m.state.Generation()
		m.records = u
	}
	r.start()
	defer r.stop()
	r.heard = u.told
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	var agent sync.WaitGroup
	agent.Go(func() { r.fakeTarget(ctx, "t1", "boot") })
	defer agent.Wait()
	defer cancel()
	repeat := func(what string, call func() error) {
		eventually(t, what, func() bool {
			err := call()
			switch {
			case err == nil:
				return true
			case reason(err) == pb.ReasonOutcomeUnknown && status.Code(err) == codes.Unavailable:
				unknown++
			case status.Code(err) != codes.FailedPrecondition && status.Code(err) != codes.NotFound && status.Code(err) != codes.ResourceExhausted:
				t.Fatalf("until %s: %v", what, err)
			}
			return false
		})
	}
	repeat("a pool is made", func() error {
		_, err := r.CreatePool(ctx, &pb.CreatePoolRequest{Name: "gold"})
		return err
	})
	repeat("a drive is added", func() error {
		_, err := r.AddDrive(ctx, &pb.AddDriveRequest{Node: "t1", Device: "/dev/nvme0n1"})
		return err
	})
	repeat("a volume is made", func() error {
		_, err := r.CreateVolume(ctx, &pb.CreateVolumeRequest{Name: "db1", SizeBytes: 1 << 30, Copies: 1})
		return err
	})
	eventually(t, "the volume is ready", func() bool {
		v, err := r.GetVolume(ctx, &pb.GetVolumeRequest{Volume: "db1"})
		return err == nil && v.State == pb.VolumeState_VOLUME_STATE_READY
	})
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.overtook) > 0 {
		t.Errorf("an agent had orders of generations %d before they were durable", u.overtook)
	}
	return unknown
}

// A refusal that rests on something which was not recorded after all does not reach its
// caller, and a look in the same batch does not see it.
func TestNothingOfAFailedCommitIsTold(t *testing.T) {
	m, err := New(Config{Dir: initialized(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	m.records = &unsure{committer: m.records, at: 1}
	gold := func(class string) cluster.Input {
		return cluster.CreatePool{Name: "gold", Selector: map[string]string{"class": class}}
	}
	var seen []string
	asks := []ask{{input: gold("a")}, {input: gold("b")}, {look: func() {
		for name := range m.state.PoolsAfter("") {
			seen = append(seen, name)
		}
	}}}
	b := &batch{}
	for i := range asks {
		asks[i].reply = make(chan answer, 1)
		m.stepThrough(b, asks[i])
	}
	if err := m.finish(b); err != nil {
		t.Fatal(err)
	}
	for i, a := range asks[:2] {
		if got := <-a.reply; !errors.Is(got.err, ErrOutcomeUnknown) {
			t.Errorf("input %d = %v, want that its outcome is not known", i, got)
		}
	}
	if got := <-asks[2].reply; got.err != nil || !slices.Equal(seen, []string{cluster.DefaultPool}) {
		t.Errorf("the look = %v and saw the pools %v", got, seen)
	}
}

// An agent's report that changes nothing, and a tick, cost no round among the managers. What is
// answered does, even if it changes nothing.
func TestAReportThatChangesNothingAsksNobody(t *testing.T) {
	m, err := New(Config{Dir: initialized(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	asked, committed := 0, 0
	m.records = hooked{m.records,
		func(records []cluster.Record, commit func([]cluster.Record) error) error {
			committed++
			return commit(records)
		},
		func(confirm func() error) error { asked++; return confirm() },
	}
	report := cluster.TargetReport{Node: "t1", BootID: "1"}
	for _, c := range []struct {
		what             string
		input            cluster.Input // nil: a look at the state
		asked, committed int
		fails            bool
	}{
		{"the first report", cluster.TargetReported{Session: 1, Report: report}, 0, 1, false},
		{"the same report", cluster.TargetReported{Session: 1, Report: report}, 0, 0, false},
		{"no news", cluster.TargetRepeated{Session: 1, Node: "t1"}, 0, 0, false},
		{"a tick", cluster.Tick{}, 0, 0, false},
		{"a report that is refused", cluster.TargetRepeated{Session: 1, Node: "t2"}, 1, 0, true},
		{"a new pool", cluster.CreatePool{Name: "gold"}, 0, 1, false},
		{"a pool that is there", cluster.CreatePool{Name: "gold"}, 1, 0, false},
		{"a volume to delete that is not there", cluster.DeleteVolume{Volume: "v1"}, 1, 0, false},
		{"a look", nil, 1, 0, false},
	} {
		asked, committed = 0, 0
		a := ask{input: c.input, reply: make(chan answer, 1)}
		if c.input == nil {
			a.look = func() {}
		}
		if err := m.work(a); err != nil {
			t.Fatal(err)
		}
		if got := <-a.reply; (got.err != nil) != c.fails {
			t.Errorf("%s: %v", c.what, got.err)
		}
		if asked != c.asked || committed != c.committed {
			t.Errorf("%s: %d confirmations and %d commits, want %d and %d", c.what, asked, committed, c.asked, c.committed)
		}
	}
}

// A request of a host that was overtaken by one that was refused is not carried out later, also if the
// manager has loaded its state again in between.
func TestARefusalOutlastsAFailedCommit(t *testing.T) {
	r := newRig(t)
	var fail atomic.Bool
	r.adjust = func(m *Manager) {
		m.records = hooked{committer: m.records, commit: func(records []cluster.Record, commit func([]cluster.Record) error) error {
			if fail.Swap(false) {
				return ErrOutcomeUnknown
			}
			return commit(records)
		}}
	}
	r.restart()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r.withAgents(ctx, "t1", "t2")
	r.attachNew(ctx, "db1")
	v := r.volume("db1")
	stale := func(number uint64, legs ...*pb.Leg) string {
		request := &pb.RecordStaleRequest{Node: "c1", VolumeId: v.Id, Epoch: v.Attachment.Epoch, Number: number, Term: 1 << 62}
		for _, l := range legs {
			request.LegIds = append(request.LegIds, l.Id)
		}
		_, err := r.agents.RecordStale(ctx, request)
		return reason(err)
	}
	if got := stale(2, v.Legs...); got != cluster.ReasonLastLeg {
		t.Fatalf("the loss of all legs is refused with %q", got)
	}
	fail.Store(true)
	eventually(t, "a commit has failed", func() bool {
		_, _ = r.CreatePool(ctx, &pb.CreatePoolRequest{Name: "gold"})
		return !fail.Load()
	})
	if got := stale(1, v.Legs[0]); got != cluster.ReasonLateRecord {
		t.Errorf("the request before that arrives: reason %q, want %s", got, cluster.ReasonLateRecord)
	}
	if got := stale(3, v.Legs[0]); got != "" {
		t.Errorf("a new request is refused with %q", got)
	}
}

// loads counts how often the records are loaded.
type loads struct {
	committer
	over  chan struct{}
	count int
}

func (l *loads) Load() ([]cluster.Record, error) {
	l.count++
	return l.committer.Load()
}

func (l *loads) Commit([]cluster.Record) error {
	return fmt.Errorf("leadership lost: %w", ErrOutcomeUnknown)
}

// A manager whose commit fails since another one leads tells its callers so, and does not load what it
// would forget at once.
func TestADeposedManagerLoadsNothing(t *testing.T) {
	for _, deposed := range []bool{true, false} {
		m, err := New(Config{Dir: initialized(t)})
		if err != nil {
			t.Fatal(err)
		}
		defer m.Close()
		l := &loads{committer: m.records, over: make(chan struct{})}
		m.records, m.over = l, l.over
		want, loaded := error(nil), 1
		if deposed {
			close(l.over)
			want, loaded = errDeposed, 0
		}
		change := ask{input: cluster.CreatePool{Name: "gold"}, reply: make(chan answer, 1)}
		look := ask{look: func() {}, reply: make(chan answer, 1)}
		b := &batch{}
		m.stepThrough(b, change)
		m.stepThrough(b, look)
		if err := m.finish(b); !errors.Is(err, want) || l.count != loaded {
			t.Errorf("deposed: %v; finish = %v after loading %d times, want %v and %d", deposed, err, l.count, want, loaded)
		}
		if got := <-change.reply; !errors.Is(got.err, ErrOutcomeUnknown) {
			t.Errorf("deposed: %v; the change is answered with %v", deposed, got.err)
		}
		if got := <-look.reply; errors.Is(got.err, ErrOutcomeUnknown) != deposed {
			t.Errorf("deposed: %v; the look is answered with %v", deposed, got.err)
		}
	}
}

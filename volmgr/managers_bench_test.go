// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"fmt"
	"maps"
	"math"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/managers"
	"weft.dev/weft/proto/pages"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/quorum"
	"weft.dev/weft/volmgr/quorum/member"
	"weft.dev/weft/volmgr/replicated"
)

// trio is three managers over loopback, with their stores on one disk, in the process of their
// callers and agents.
type trio struct {
	b    *testing.B
	dir  string
	all  []*onLoopback
	next int
}

// onLoopback is a manager at an address of its own.
type onLoopback struct {
	*Manager
	dir, address string
	stop         func()
	lose         func() // as a power cut does: it sends and answers nothing any more
}

func newTrio(b *testing.B) *trio {
	t := &trio{b: b, dir: b.TempDir()}
	dir := filepath.Join(t.dir, "m0")
	id, err := Init(Config{Dir: dir})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		for _, m := range t.all {
			m.stop()
		}
	})
	t.start(dir, "127.0.0.1:0")
	eventually(b, "one manager leads", func() bool { return t.all[0].Member().Status().Role == quorum.Leader })
	for range 2 {
		t.join(id)
	}
	eventually(b, "all vote", func() bool { return len(t.all[0].Member().Status().Applied.Members.Voters()) == 3 })
	return t
}

// start runs a manager.
func (t *trio) start(dir, address string) *onLoopback {
	t.b.Helper()
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.b.Fatal(err)
	}
	m := &onLoopback{dir: dir, address: listener.Addr().String()}
	var lost atomic.Bool
	medium := replicated.Medium{Send: func(member.Outgoing) bool { return !lost.Load() }}
	if m.Manager, err = New(Config{Dir: dir, Quorum: &Quorum{Address: m.address, Dial: dialLoopback, Medium: medium}}); err != nil {
		t.b.Fatal(err)
	}
	server := grpc.NewServer()
	m.Register(server)
	ctx, cancel := context.WithCancel(context.Background())
	var serving, running sync.WaitGroup
	serving.Go(func() { _ = server.Serve(listener) })
	running.Go(func() {
		if err := m.Run(ctx); err != nil {
			t.b.Error(err)
		}
	})
	m.lose = func() {
		lost.Store(true)
		server.Stop()
	}
	m.stop = sync.OnceFunc(func() {
		cancel()
		running.Wait() // it hands over, as the program does while its streams end
		server.Stop()
		serving.Wait()
		if err := m.Close(); err != nil {
			t.b.Error(err)
		}
	})
	t.all = append(t.all, m)
	return m
}

// join adds a manager with an empty store. It gets its vote by itself.
func (t *trio) join(id block.ClusterID) *onLoopback {
	t.b.Helper()
	t.next++
	dir := filepath.Join(t.dir, fmt.Sprintf("m%d", t.next))
	member, err := Join(Config{Dir: dir}, id)
	if err != nil {
		t.b.Fatal(err)
	}
	m := t.start(dir, "127.0.0.1:0")
	client, hangUp := t.client()
	defer hangUp()
	eventually(t.b, m.address+" is added", func() bool {
		_, err := client.AddManager(t.b.Context(), &pb.AddManagerRequest{Id: member.String(), Address: m.address})
		return err == nil
	})
	return m
}

func dialLoopback(address string) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithInitialWindowSize(window), grpc.WithInitialConnWindowSize(16*window),
		grpc.WithConnectParams(grpc.ConnectParams{ // as programs have them
			Backoff: backoff.Config{BaseDelay: 200 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second}, MinConnectTimeout: 3 * time.Second,
		}))
}

// connect connects to the manager that leads, as agents and commands do.
func (t *trio) connect() *managers.Conn {
	var addresses []string
	for _, m := range t.all {
		addresses = append(addresses, m.address)
	}
	conn, err := managers.Connect(strings.Join(addresses, ","), dialLoopback)
	if err != nil {
		t.b.Fatal(err)
	}
	return conn
}

func (t *trio) client() (pb.ManagerClient, func() error) {
	conn := t.connect()
	return pages.Client(conn), conn.Close
}

// leader is the manager that leads.
func (t *trio) leader() (leader *onLoopback) {
	t.b.Helper()
	eventually(t.b, "one manager leads", func() bool {
		at := slices.IndexFunc(t.all, func(m *onLoopback) bool { return m.Member().Status().Role == quorum.Leader })
		if at >= 0 {
			leader = t.all[at]
		}
		return at >= 0
	})
	return leader
}

// agents runs a target on each node, and adds its drives.
func (t *trio) agents(ctx context.Context, nodes, drives int) {
	t.b.Helper()
	// A connection carries what it would carry of one node, if each had its own: 20 are enough for
	// gRPC's limits, and cost less memory than 1000.
	for i := range 20 {
		conn := t.connect()
		t.b.Cleanup(func() { conn.Close() })
		agents := pb.NewAgentsClient(conn)
		for n := range nodes / 20 {
			name := fmt.Sprintf("t%d", i*(nodes/20)+n)
			go func() {
				for a := newBenchAgent(name); ctx.Err() == nil; time.Sleep(100 * time.Millisecond) {
					a.run(ctx, agents)
				}
			}()
		}
	}
	client, hangUp := t.client()
	defer hangUp()
	nodesSeen := func() []*pb.Node {
		all, err := client.ListNodes(ctx, &pb.ListNodesRequest{})
		if err != nil {
			return nil
		}
		return all.GetNodes()
	}
	eventually(t.b, "all nodes have reported", func() bool { return len(nodesSeen()) == nodes })
	all := nodesSeen()
	inParallel(64, nodes*drives, func(i int) {
		add := &pb.AddDriveRequest{Node: all[i/drives].GetName(), Device: fmt.Sprintf("/dev/nvme%dn1", i%drives)}
		eventually(t.b, "a drive is added", func() bool { _, err := client.AddDrive(ctx, add); return err == nil })
	})
	eventually(t.b, "all drives are ready", func() bool {
		s, err := client.GetStatus(ctx, &pb.GetStatusRequest{})
		return err == nil && int(s.GetDrives()) == nodes*drives && s.GetDrivesNotReady() == 0
	})
}

// What three managers on one machine cost with 1000 nodes (NODES in the environment changes that)
// and 10 000 volumes: creates through the API, the decisions, a new member while volumes are
// created, and how long nobody answers when the leader stops, or when all managers are started again.
func BenchmarkThreeManagers(b *testing.B) {
	volumes, nodes := sizeOf(b, 10_000), 1000
	if text := os.Getenv("NODES"); text != "" {
		nodes, _ = strconv.Atoi(text)
	}
	t := newTrio(b)
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	t.agents(ctx, nodes, 2)
	client, hangUp := t.client()
	defer hangUp()
	var made atomic.Int64
	create := func(int) {
		name := fmt.Sprintf("v%06d", made.Add(1))
		if _, err := client.CreateVolume(ctx, &pb.CreateVolumeRequest{Name: name, SizeBytes: 1 << 20, Copies: 2, Stripes: 1}); err != nil {
			b.Errorf("%s: %v", name, err)
		}
	}
	before, begin, used := t.spent(), time.Now(), cpu(b)
	inParallel(64, volumes, create).report(b, "create")
	b.ReportMetric(float64(volumes)/time.Since(begin).Seconds(), "creates/s")
	b.ReportMetric(float64((cpu(b)-used).Microseconds())/float64(volumes), "cpu-µs/create")
	eventually(b, "all volumes are ready", func() bool {
		all, err := client.ListVolumes(ctx, &pb.ListVolumesRequest{})
		return err == nil && !slices.ContainsFunc(all.GetVolumes(), func(v *pb.Volume) bool { return v.GetState() != pb.VolumeState_VOLUME_STATE_READY })
	})
	t.reportSpent(before)
	inParallel(1, 300, create).report(b, "alone")
	t.replace(ctx, client, create)
	t.restart(ctx, client)
	b.ReportMetric(0, "ns/op")
}

// spent is how often a manager's loop did something, by the bounds of how long that took.
type spent map[float64]uint64

// spent returns where the leader's loop has spent its time.
func (t *trio) spent() map[string]spent {
	m := &t.leader().metrics
	return map[string]spent{"decision": spentIn(t.b, m.step), "commit": spentIn(t.b, m.commit), "confirm": spentIn(t.b, m.confirm)}
}

// within is how often it took no longer than this.
func (s spent) within(bound float64) (all uint64) {
	for known, count := range s {
		if known <= bound {
			all = max(all, count)
		}
	}
	return all
}

// spentIn reads a histogram by its native buckets, which are 10 % wide.
func spentIn(b *testing.B, times prometheus.Histogram) spent {
	var m dto.Metric
	if err := times.Write(&m); err != nil {
		b.Fatal(err)
	}
	h := m.GetHistogram()
	within := spent{math.Inf(1): h.GetSampleCount()}
	all, count, delta, index := h.GetZeroCount(), int64(0), 0, int32(0)
	for _, span := range h.GetPositiveSpan() {
		index += span.GetOffset()
		for range span.GetLength() {
			count += h.GetPositiveDelta()[delta]
			all += uint64(count)
			within[math.Exp2(math.Ldexp(float64(index), -int(h.GetSchema())))] = all
			index, delta = index+1, delta+1
		}
	}
	return within
}

// reportSpent reports where the leader's loop has spent its time since before: how often it decided
// (creates, agents' reports and ticks, each with those that waited beside it), committed and asked
// for a confirmation, and the bound within which 99 % of each were done.
func (t *trio) reportSpent(before map[string]spent) {
	for what, now := range t.spent() {
		bounds := slices.Sorted(maps.Keys(now))
		all := now[math.Inf(1)] - before[what][math.Inf(1)]
		t.b.ReportMetric(float64(all), what+"s")
		for _, bound := range bounds {
			if all > 0 && (now[bound]-before[what].within(bound))*100 >= all*99 {
				t.b.ReportMetric(bound*1e3, what+"-p99-within-ms")
				break
			}
		}
	}
}

// replace removes a manager that does not lead, and adds a new one while volumes are created.
func (t *trio) replace(ctx context.Context, client pb.ManagerClient, create func(int)) {
	leader := t.leader()
	old := slices.IndexFunc(t.all, func(m *onLoopback) bool { return m != leader })
	id := t.all[old].Member().Status().ID
	t.all[old].stop()
	t.all = slices.Delete(t.all, old, old+1)
	eventually(t.b, "a manager is removed", func() bool {
		_, err := client.RemoveManager(ctx, &pb.RemoveManagerRequest{Manager: id.String()})
		return err == nil
	})
	var during latencies
	var group sync.WaitGroup
	over := make(chan struct{})
	group.Go(func() {
		for {
			select {
			case <-over:
				return
			default:
				during = append(during, inParallel(4, 40, create)...)
			}
		}
	})
	begin := time.Now()
	m := t.join(leader.ClusterID())
	eventually(t.b, "it votes, and has all", func() bool {
		now, leads := m.Member().Status(), leader.Member().Status()
		one, ok := now.Applied.Members.Find(now.ID)
		return ok && one.Voter && now.Applied.Index+10 > leads.Applied.Index
	})
	t.b.ReportMetric(time.Since(begin).Seconds(), "new-member-s")
	close(over)
	group.Wait()
	t.b.ReportMetric(float64(len(during)), "creates-meanwhile")
	during.report(t.b, "meanwhile")
}

// restart loses the leader, stops the next one, and then stops all managers, and measures until a read
// is answered.
func (t *trio) restart(ctx context.Context, client pb.ManagerClient) {
	answered := func() bool {
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		_, err := client.GetStatus(ctx, &pb.GetStatusRequest{})
		return err == nil
	}
	t.withoutLeader("leader-lost", func(m *onLoopback) { m.lose() }, answered)
	t.withoutLeader("leader-stops", func(m *onLoopback) { m.stop() }, answered)
	old := t.all
	for _, m := range old {
		m.stop()
	}
	t.all = nil
	begin := time.Now()
	for _, m := range old {
		t.start(m.dir, m.address)
	}
	eventually(t.b, "they answer", answered)
	t.b.ReportMetric(time.Since(begin).Seconds(), "restart-of-all-s")
}

// withoutLeader measures how long nobody answers after the leader has gone in some way: until another
// one leads, and until that answers. It then starts the one that has gone again.
func (t *trio) withoutLeader(what string, goes func(*onLoopback), answered func() bool) {
	t.b.Helper()
	leader := t.leader()
	t.all = slices.DeleteFunc(t.all, func(m *onLoopback) bool { return m == leader })
	begin, gone := time.Now(), make(chan struct{})
	go func() {
		defer close(gone)
		goes(leader)
	}()
	t.leader()
	t.b.ReportMetric(time.Since(begin).Seconds(), what+"-elected-s")
	eventually(t.b, "another manager answers", answered)
	t.b.ReportMetric(time.Since(begin).Seconds(), what+"-s")
	<-gone
	leader.stop()
	begin = time.Now()
	back := t.start(leader.dir, leader.address)
	eventually(t.b, "it follows", func() bool {
		now := back.Member().Status()
		return now.Leader != 0 && now.Applied.Index+10 > t.leader().Member().Status().Applied.Index
	})
	t.b.ReportMetric(time.Since(begin).Seconds(), "restart-of-one-s")
}

// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/audit"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/event"
)

// shown are a server's credentials: every peer is who they say.
type shown struct {
	credentials.TransportCredentials
	who access.Identity
}

func (s shown) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return conn, access.AuthInfo{Identity: s.who}, nil
}

func (s shown) Clone() credentials.TransportCredentials { return s }

// as connects to what register adds, as who. The server has the guard that a manager's has, which
// tells the managers given of refused calls.
func as(t *testing.T, register func(grpc.ServiceRegistrar), who access.Identity, tell ...*Manager) *grpc.ClientConn {
	t.Helper()
	listener := bufconn.Listen(1 << 20)
	guard := access.Guard{Cluster: who.Cluster}
	for _, m := range tell {
		guard.Refused = m.Refused
	}
	server := grpc.NewServer(grpc.Creds(shown{insecure.NewCredentials(), who}), grpc.UnaryInterceptor(guard.Unary), grpc.StreamInterceptor(guard.Stream))
	register(server)
	var group sync.WaitGroup
	group.Go(func() { _ = server.Serve(listener) })
	conn, err := grpc.NewClient("passthrough:///bufconn", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		conn.Close()
		server.Stop()
		group.Wait()
	})
	return conn
}

// registered is the service of a rig's manager.
func (r *rig) registered(t *testing.T) (register func(grpc.ServiceRegistrar)) {
	t.Helper()
	r.adjust = func(m *Manager) { register, r.manager = m.Register, m }
	r.restart()
	return register
}

// refusedSoon reports how a stream ends.
func refusedSoon[Report, Wanted any](t *testing.T, stream grpc.BidiStreamingClient[Report, Wanted], err error, report *Report) codes.Code {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(report); err != nil && !errors.Is(err, io.EOF) { // EOF: it was refused before; Recv says why
		t.Fatal(err)
	}
	_, err = stream.Recv()
	return status.Code(err)
}

// tellsFigures reports whether an agent may send figures of t1.
func tellsFigures(ctx context.Context, t *testing.T, agents pb.AgentsClient, source pb.FiguresSource) codes.Code {
	t.Helper()
	stream, err := agents.Figures(ctx)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Send(&pb.FiguresReport{Node: "t1", Source: source, Nanoseconds: 2e9}); err != nil && !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
	_, err = stream.CloseAndRecv()
	return status.Code(err)
}

// What a stranger did who had learned the public boot id of an agent: he reported in its name,
// with other drives, and confirmed its fences. A certificate of another node, or of the other
// agent of the same node, does not let him.
func TestAnAgentReportsOnlyForItsOwnNode(t *testing.T) {
	r := newRig(t)
	register := r.registered(t)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for _, c := range []struct {
		who              access.Identity
		target, initiate codes.Code
	}{
		{access.Identity{Kind: access.Node, Name: "t1", Role: access.Target}, codes.OK, codes.PermissionDenied},
		{access.Identity{Kind: access.Node, Name: "t2", Role: access.Target}, codes.PermissionDenied, codes.PermissionDenied},
		{access.Identity{Kind: access.Node, Name: "t1", Role: access.Initiator}, codes.PermissionDenied, codes.OK},
		{access.Identity{Kind: access.Node, Name: "t2", Role: access.Initiator}, codes.PermissionDenied, codes.PermissionDenied},
		{access.Identity{Kind: access.Node, Name: "t1", Role: access.CSI}, codes.PermissionDenied, codes.PermissionDenied},
		{access.Identity{Kind: access.Person, Name: "t1", Role: access.Admin}, codes.PermissionDenied, codes.PermissionDenied},
		{access.Identity{}, codes.Unauthenticated, codes.Unauthenticated},
	} {
		agents := pb.NewAgentsClient(as(t, register, c.who))
		target, err := agents.Target(ctx)
		if got := refusedSoon(t, target, err, &pb.TargetReport{Node: "t1", BootId: "boot-1"}); got != c.target {
			t.Errorf("%v reports as target t1: %v, want %v", c.who, got, c.target)
		}
		initiator, err := agents.Initiator(ctx)
		if got := refusedSoon(t, initiator, err, &pb.InitiatorReport{Node: "t1", BootId: "boot-1", Host: &pb.Host{Nqn: "nqn.2014-08.org.nvmexpress:uuid:" + uuid(1), Id: uuid(1)}}); got != c.initiate {
			t.Errorf("%v reports as initiator t1: %v, want %v", c.who, got, c.initiate)
		}
		if got := tellsFigures(ctx, t, agents, pb.FiguresSource_FIGURES_SOURCE_TARGET); got != c.target {
			t.Errorf("%v sends figures as target t1: %v, want %v", c.who, got, c.target)
		}
		if got := tellsFigures(ctx, t, agents, pb.FiguresSource_FIGURES_SOURCE_INITIATOR); got != c.initiate {
			t.Errorf("%v sends figures as initiator t1: %v, want %v", c.who, got, c.initiate)
		}
	}
}

// A host that has a certificate cannot record anything for a volume that another host has: not in
// its own name, and not in that of the other.
func TestAHostRecordsOnlyForItsOwnAttachment(t *testing.T) {
	r := newRig(t)
	register := r.registered(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r.withAgents(ctx, "t1", "t2")
	r.attachNew(ctx, "db1")
	v := r.volume("db1")
	for _, c := range []struct {
		who  access.Identity
		node string
		want codes.Code
	}{
		{access.Identity{Kind: access.Node, Name: "h2", Role: access.Initiator}, "h2", codes.FailedPrecondition}, // it is not attached there
		{access.Identity{Kind: access.Node, Name: "h2", Role: access.Initiator}, "c1", codes.PermissionDenied},
		{access.Identity{Kind: access.Node, Name: "c1", Role: access.Target}, "c1", codes.PermissionDenied},
		{access.Identity{Kind: access.Person, Name: "c1", Role: access.Admin}, "c1", codes.PermissionDenied},
		{access.Identity{}, "c1", codes.Unauthenticated},
		{access.Identity{Kind: access.Node, Name: "c1", Role: access.Initiator}, "c1", codes.OK}, // last: it changes the volume
	} {
		agents := pb.NewAgentsClient(as(t, register, c.who))
		_, err := agents.RecordStale(ctx, &pb.RecordStaleRequest{Node: c.node, VolumeId: v.Id, Epoch: v.Epoch, LegIds: []string{v.Legs[0].Id}})
		if got := status.Code(err); got != c.want {
			t.Errorf("%v records a lost leg for %s: %v, want %v", c.who, c.node, err, c.want)
		}
		if c.want == codes.OK {
			break
		}
		_, err = agents.RecordInSync(ctx, &pb.RecordInSyncRequest{Node: c.node, VolumeId: v.Id, Epoch: v.Epoch, Legs: []*pb.RebuiltLeg{{LegId: v.Legs[0].Id}}})
		if got := status.Code(err); got != c.want {
			t.Errorf("%v records a rebuilt leg for %s: %v, want %v", c.who, c.node, err, c.want)
		}
	}
}

// A rebuild from the drives trusts what agents report, so a report has to be their own.
func TestARebuildHearsOnlyAgentsThemselves(t *testing.T) {
	rebuild, err := NewRebuild(Config{Dir: t.TempDir()}, []block.NodeName{"t1"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	agents := pb.NewAgentsClient(as(t, rebuild.Register, access.Identity{Kind: access.Node, Name: "t2", Role: access.Target}))
	stream, err := agents.Target(t.Context())
	if got := refusedSoon(t, stream, err, &pb.TargetReport{Node: "t1", BootId: "boot-1"}); got != codes.PermissionDenied {
		t.Errorf("target t2 reports as t1 to a rebuild: %v", got)
	}
	if missing := rebuild.missing(); len(missing) != 1 {
		t.Errorf("the rebuild waits for %v, want target t1", missing)
	}
}

// Who asked for a change is recorded with it, and stays a chain across a restart. Reads, refusals
// and changes that change nothing leave no entry.
func TestWhoAskedIsRecordedWithTheEffect(t *testing.T) {
	r := newRig(t)
	register := r.registered(t)
	ada := access.Identity{Kind: access.Person, Name: "ada", Role: access.Admin}
	conn := as(t, register, ada)
	admin, audits := pb.NewManagerClient(conn), pb.NewIdentitiesClient(conn)
	ctx := metadata.AppendToOutgoingContext(t.Context(), pb.RequestKey, "r-1")
	for range 2 { // the second one changes nothing
		if _, err := admin.CreatePool(ctx, &pb.CreatePoolRequest{Name: "gold"}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := admin.ListPools(ctx, &pb.ListPoolsRequest{}); err != nil {
		t.Fatal(err)
	}
	if _, err := admin.RemoveNode(ctx, &pb.RemoveNodeRequest{Node: "t1"}); err != nil { // there is none
		t.Error(err)
	}
	if _, err := pb.NewManagerClient(as(t, register, access.Identity{Kind: access.Person, Name: "vic", Role: access.Viewer})).CreatePool(ctx, &pb.CreatePoolRequest{Name: "silver"}); status.Code(err) != codes.PermissionDenied {
		t.Errorf("a viewer creates a pool: %v", err)
	}
	if _, err := admin.DeletePool(ctx, &pb.DeletePoolRequest{Name: "gold"}); err != nil {
		t.Fatal(err)
	}
	list, err := audits.ListAudit(ctx, &pb.ListAuditRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range list.Entries {
		got = append(got, fmt.Sprint(e.Seq, " ", e.Who, " ", e.Call, " ", e.Request, " ", e.RequestId))
		events, err := admin.ListEvents(ctx, &pb.ListEventsRequest{AfterSeq: e.FirstEvent - 1, Limit: 1, Object: "pool gold"})
		if err != nil || len(events.Events) != 1 {
			t.Errorf("entry %d names events %d to %d: %v, %v", e.Seq, e.FirstEvent, e.LastEvent, events, err)
		}
	}
	want := []string{`1 person ada (admin) CreatePool {"name":"gold"} r-1`, `2 person ada (admin) DeletePool {"name":"gold"} r-1`}
	if !slices.Equal(got, want) {
		t.Errorf("the audit has %q, want %q", got, want)
	}
	r.restart()
	state, err := r.manager.snapshot(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	entries, head := state.Audit(0, false, 10)
	if err := audit.Verify(entries, head, list.Entries[0].Hash); err != nil || len(entries) != 2 {
		t.Errorf("after a restart there are %d entries: %v", len(entries), err)
	}
}

// The caller's id of a request comes in a header, which may hold any bytes: it neither breaks the chain
// when it is read again, nor the answers that list it, and it is short.
func TestAnyRequestIDIsFitForTheAudit(t *testing.T) {
	for _, id := range []string{"r-\xff\xfe", strings.Repeat("x", 60<<10), "r-1"} {
		var got *audit.Asked
		ctx := metadata.NewIncomingContext(t.Context(), metadata.Pairs(pb.RequestKey, id))
		if _, err := asking(func(ctx context.Context, _ any) (any, error) { got = askedIn(ctx); return nil, nil }, "/weft.v1.Manager/CreatePool")(ctx, &pb.CreatePoolRequest{}); err != nil {
			t.Fatal(err)
		}
		if !utf8.ValidString(got.ID) || len(got.ID) > 256 {
			t.Errorf("an id of %d bytes that begins %.4q is recorded with %d bytes, as %.8q", len(id), id, len(got.ID), got.ID)
		}
		l := audit.NewLog(nil, audit.Head{})
		text, _ := json.Marshal(func() audit.Entry { e, _ := l.Append(audit.Entry{Asked: *got}); return e }())
		var again audit.Entry
		if err := json.Unmarshal(text, &again); err != nil {
			t.Fatal(err)
		}
		if err := audit.Verify([]audit.Entry{again}, l.Head(), ""); err != nil {
			t.Errorf("id %.4q, read again: %v", id, err)
		}
	}
}

// Refused attempts are events, but few: nobody can fill the history with them. All of them count.
func TestRefusedAttemptsAreFewEvents(t *testing.T) {
	r := newRig(t)
	register := r.registered(t)
	vic := pb.NewManagerClient(as(t, register, access.Identity{Kind: access.Person, Name: "vic", Role: access.Viewer}, r.manager))
	for range 200 {
		if _, err := vic.DeletePool(t.Context(), &pb.DeletePoolRequest{Name: "gold"}); status.Code(err) != codes.PermissionDenied {
			t.Fatal(err)
		}
	}
	var events []*pb.Event
	eventually(t, "there is an event", func() bool {
		list, err := r.ListEvents(t.Context(), &pb.ListEventsRequest{Object: "person vic (viewer)"})
		events = list.GetEvents()
		return err == nil && len(events) > 0
	})
	if len(events) != 1 || events[0].Kind != event.AccessRefused || events[0].Attributes["call"] != "DeletePool" {
		t.Errorf("the events are %v, want one", events)
	}
	registry := prometheus.NewRegistry()
	registry.MustRegister(r.manager.metrics.refused)
	if all, err := registry.Gather(); err != nil || len(all) != 1 || all[0].GetMetric()[0].GetCounter().GetValue() != 200 {
		t.Errorf("the attempts are counted as %v, %v, want 200", all, err)
	}
	var some refusals
	told, now := 0, time.Now()
	for i := range 10_000 {
		for range 3 {
			if _, tell := some.note(cluster.Refused{From: fmt.Sprint(i)}, now); tell {
				told++
			}
		}
	}
	if told != refusedMost || len(some.waiting) > 4*refusedMost {
		t.Errorf("%d callers caused %d events, and %d are remembered", 10_000, told, len(some.waiting))
	}
	if times, tell := some.note(cluster.Refused{From: "0"}, now.Add(refusedEvery)); !tell || times != 3 {
		t.Errorf("a minute later the first caller is told of with %d attempts, %v", times, tell)
	}
}

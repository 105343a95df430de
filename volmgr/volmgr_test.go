// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pages"
	"weft.dev/weft/proto/parts"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/store"
)

// rig is a manager that can be killed and started again over one directory.
type rig struct {
	t    testing.TB
	dir  string
	log  *slog.Logger // nil: none
	stop func()
	pb.ManagerClient
	agents pb.AgentsClient

	manager *Manager                // set by registered
	adjust  func(*Manager)          // called before it runs; nil: nothing
	heard   func(generation uint64) // called for each wanted state that a fake target gets
	keys    func(*pb.ExportKeys)    // called for all keys that fake agents get; nil: they cannot authenticate
	drives  int                     // of each fake target; 0 means 1
	mu      sync.Mutex
	reports map[string]*pb.TargetReport // of the fake targets
}

func newRig(t testing.TB) *rig {
	r := &rig{t: t, dir: initialized(t)}
	r.start()
	t.Cleanup(func() { r.stop() })
	return r
}

// initialized is the directory of a new cluster.
func initialized(t testing.TB) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "volmgr")
	if _, err := Init(Config{Dir: dir}); err != nil {
		t.Fatal(err)
	}
	return dir
}

var overQuorum = flag.Bool("quorum", false, "the managers keep their records in a quorum of one")

func quorumOfOne() *Quorum {
	if *overQuorum {
		return &Quorum{Address: "m1"}
	}
	return nil
}

func (r *rig) start() {
	r.t.Helper()
	m, err := New(Config{Dir: r.dir, Log: r.log, Quorum: quorumOfOne()})
	if err != nil {
		r.t.Fatal(err)
	}
	if r.adjust != nil {
		r.adjust(m)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var group sync.WaitGroup
	group.Go(func() {
		if err := m.Run(ctx); err != nil {
			r.t.Error(err)
		}
	})
	conn, stopServing := serveOn(r.t, m.Register)
	if r.reports == nil {
		r.reports = map[string]*pb.TargetReport{}
	}
	r.ManagerClient, r.agents = pages.Client(conn), pb.NewAgentsClient(conn)
	if *overQuorum {
		eventually(r.t, "it leads", func() bool {
			_, err := r.ListPools(ctx, &pb.ListPoolsRequest{})
			return err == nil
		})
	}
	r.stop = sync.OnceFunc(func() {
		cancel()
		stopServing()
		group.Wait()
		if err := m.Close(); err != nil {
			r.t.Error(err)
		}
	})
}

// window is how much unread data a client accepts; without it gRPC enlarges the window.
const window = 64 << 10

// serveOn serves what register adds, in memory.
func serveOn(t testing.TB, register func(grpc.ServiceRegistrar)) (conn *grpc.ClientConn, stop func()) {
	t.Helper()
	return serveWith(t, register)
}

// serveWith is serveOn with options of the server.
func serveWith(t testing.TB, register func(grpc.ServiceRegistrar), options ...grpc.ServerOption) (conn *grpc.ClientConn, stop func()) {
	t.Helper()
	listener := bufconn.Listen(1 << 20)
	server := grpc.NewServer(options...)
	register(server)
	var group sync.WaitGroup
	group.Go(func() { _ = server.Serve(listener) })
	conn, err := grpc.NewClient("passthrough:///bufconn", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithInitialWindowSize(window), grpc.WithInitialConnWindowSize(16*window),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))
	if err != nil {
		t.Fatal(err)
	}
	return conn, func() {
		conn.Close()
		server.Stop()
		group.Wait()
	}
}

func serveFor(t *testing.T, register func(grpc.ServiceRegistrar)) *grpc.ClientConn {
	conn, stop := serveOn(t, register)
	t.Cleanup(stop)
	return conn
}

func (r *rig) restart() {
	r.stop()
	r.start()
}

// eventually waits until ok returns true.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited a minute until %s", what)
		}
	}
}

// fakeTarget is a target agent that carries out every wanted state at once. It begins with
// the state of the last one of its name, as an agent that finds it on its drives.
func (r *rig) fakeTarget(ctx context.Context, name, boot string) {
	for agents := r.agents; ctx.Err() == nil; time.Sleep(10 * time.Millisecond) {
		if open, err := agents.Target(ctx); err == nil {
			r.serveAsTarget(open, name, boot)
		}
	}
}

func (r *rig) serveAsTarget(open grpc.BidiStreamingClient[pb.TargetReport, pb.TargetWanted], name, boot string) {
	r.mu.Lock()
	report := r.reports[name]
	r.mu.Unlock()
	if report == nil {
		report = &pb.TargetReport{
			Node: name, BootId: boot, Scale: parts.Understood(), Labels: map[string]string{"rack": "r-" + name},
			Portals: []*pb.Portal{{Transport: pb.Transport_TRANSPORT_TCP, Address: "192.0.2.1", Port: 4420}},
		}
		if r.keys != nil {
			report.Authenticates = pb.Ability_ABILITY_YES
		}
		for _, path := range r.devices() {
			serial := name + path
			report.Devices = append(report.Devices, &pb.Device{Path: path, Serial: serial, Wwid: "wwid-" + serial, SizeBytes: fakeExtents << 28, BlockSize: 512})
		}
	}
	converse(parts.Reporting(open), report, func(last *pb.TargetReport, wanted *pb.TargetWanted) *pb.TargetReport {
		if r.heard != nil {
			r.heard(wanted.GetGeneration())
		}
		for _, x := range wanted.GetExports() {
			if x.Keys != nil {
				r.keys(x.Keys)
			}
		}
		next := proto.CloneOf(last)
		obey(next, wanted)
		r.mu.Lock()
		r.reports[name] = next
		r.mu.Unlock()
		return next
	})
}

// devices lists the devices of each fake target.
func (r *rig) devices() (paths []string) {
	for i := range max(r.drives, 1) {
		paths = append(paths, fmt.Sprintf("/dev/nvme%dn1", i))
	}
	return paths
}

// converse sends a report, then the next one for each wanted state, and otherwise repeats the
// last one each second, until the stream ends.
func converse[Report, Wanted parts.State](stream *parts.Stream[Report, Wanted], report Report, next func(Report, Wanted) Report) {
	news := make(chan Wanted)
	go func() {
		defer close(news)
		for {
			wanted, err := stream.Recv()
			if err != nil {
				return
			}
			news <- wanted
		}
	}()
	second := time.NewTicker(time.Second)
	defer second.Stop()
	for stream.Send(report) == nil {
		select {
		case wanted, more := <-news:
			if !more {
				return
			}
			report = next(report, wanted)
		case <-second.C:
		}
	}
	for range news { // until its goroutine has ended
	}
}

// fakeExtents is more than any test here uses.
const fakeExtents = 1 << 20

func obey(r *pb.TargetReport, w *pb.TargetWanted) {
	r.Generation, r.ClusterId, r.Admissions = w.Generation, w.ClusterId, w.Admissions
	r.Legs, r.Exports = nil, nil
	for _, d := range w.Drives {
		r.Drives = slices.DeleteFunc(r.Drives, func(have *pb.DriveReport) bool { return have.DriveId == d.DriveId })
		if !d.Remove {
			r.Drives = append(r.Drives, &pb.DriveReport{DriveId: d.DriveId, ClusterId: w.ClusterId, Device: d.Device, Extents: fakeExtents})
			for _, device := range r.Devices {
				if device.Path == d.Device {
					device.DriveId = d.DriveId
				}
			}
		}
	}
	for _, report := range r.Drives {
		report.Legs = nil
		for _, l := range w.Legs {
			if l.DriveId == report.DriveId && !l.Remove {
				report.Legs = append(report.Legs, &pb.LegLabel{LegId: l.LegId, Column: l.Column, Copy: l.Copy, Extents: l.Extents,
					Zeroed: true, Revision: l.Revision, Volume: l.Volume})
				r.Legs = append(r.Legs, &pb.LegReport{LegId: l.LegId, Ready: true, SizeBytes: l.SizeBytes})
			}
		}
	}
	for _, x := range w.Exports {
		report := &pb.ExportReport{Nqn: x.Nqn, Ready: true}
		for _, n := range x.Namespaces {
			report.LegIds = append(report.LegIds, n.LegId)
		}
		r.Exports = append(r.Exports, report)
	}
}

// fakeInitiator is an initiator agent that serves at once whatever it is granted.
func (r *rig) fakeInitiator(ctx context.Context, name string) {
	for agents := r.agents; ctx.Err() == nil; time.Sleep(10 * time.Millisecond) {
		if open, err := agents.Initiator(ctx); err == nil {
			serveAsInitiator(open, name, r.keys)
		}
	}
}

func serveAsInitiator(open grpc.BidiStreamingClient[pb.InitiatorReport, pb.InitiatorWanted], name string, keys func(*pb.ExportKeys)) {
	report := &pb.InitiatorReport{Node: name, BootId: "boot-" + name, Scale: parts.Understood(), Authenticates: keys != nil,
		Host: &pb.Host{Nqn: "nqn.2014-08.org.nvmexpress:uuid:11111111-1111-4111-8111-111111111111", Id: "11111111-1111-4111-8111-111111111111"}}
	converse(parts.Reporting(open), report, func(last *pb.InitiatorReport, wanted *pb.InitiatorWanted) *pb.InitiatorReport {
		next := proto.CloneOf(last)
		next.Generation, next.Attachments = wanted.Generation, nil
		for _, a := range wanted.Attachments {
			for _, l := range a.Legs {
				if l.Keys != nil {
					keys(l.Keys)
				}
			}
			phase := pb.AttachmentPhase_ATTACHMENT_PHASE_SERVING
			if a.Detach {
				phase = pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHED_CLEAN
			}
			next.Attachments = append(next.Attachments, &pb.AttachmentReport{
				VolumeId: a.VolumeId, Epoch: a.Epoch, Phase: phase, Device: "/dev/weft/" + a.VolumeName,
				SizeBytes: a.SizeBytes, DeviceNumber: "253:4"})
		}
		return next
	})
}

// withAgents starts targets and a client and adds the targets' drives.
func (r *rig) withAgents(ctx context.Context, names ...string) {
	for _, name := range names {
		go r.fakeTarget(ctx, name, "boot-"+name)
		for _, device := range r.devices() {
			eventually(r.t, name+"'s drive is added", func() bool {
				_, err := r.AddDrive(ctx, &pb.AddDriveRequest{Node: name, Device: device})
				return err == nil
			})
		}
	}
	go r.fakeInitiator(ctx, "c1")
	eventually(r.t, "all drives are ready and c1 is online", func() bool {
		drives, err := r.ListDrives(ctx, &pb.ListDrivesRequest{})
		if err != nil {
			return false
		}
		ready := 0
		for _, d := range drives.Drives {
			if d.State == pb.DriveState_DRIVE_STATE_READY {
				ready++
			}
		}
		nodes, err := r.ListNodes(ctx, &pb.ListNodesRequest{})
		return err == nil && ready == len(names)*len(r.devices()) && len(nodes.Nodes) == len(names)+1
	})
}

func (r *rig) volume(name string) *pb.Volume {
	r.t.Helper()
	v, err := r.GetVolume(r.t.Context(), &pb.GetVolumeRequest{Volume: name})
	if err != nil {
		r.t.Fatal(err)
	}
	return v
}

func (r *rig) attached(name string) func() bool {
	return func() bool {
		return r.volume(name).Attachment.GetState() == pb.AttachmentState_ATTACHMENT_STATE_ATTACHED
	}
}

// A drive whose target is offline may have failed meanwhile.
func TestADriveOfAnOfflineTargetIsNotListedAsReady(t *testing.T) {
	r := newRig(t)
	ctx, stop := context.WithCancel(t.Context())
	r.withAgents(ctx, "t1")
	stop()
	eventually(t, "the drive is offline", func() bool {
		l, err := r.ListDrives(t.Context(), &pb.ListDrivesRequest{})
		return err == nil && len(l.Drives) == 1 && l.Drives[0].State == pb.DriveState_DRIVE_STATE_OFFLINE
	})
}

func TestVolumeLivesThroughCreateAttachStaleRebuildDetach(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r.withAgents(ctx, "t1", "t2")
	create := &pb.CreateVolumeRequest{Name: "db1", SizeBytes: 1 << 30, Copies: 2, Stripes: 1, Spread: "rack"}
	first, err := r.CreateVolume(ctx, create)
	if err != nil {
		t.Fatal(err)
	}
	again, err := r.CreateVolume(ctx, create)
	if err != nil || again.Id != first.Id {
		t.Errorf("the same create again = %v, %v; want volume %s", again, err, first.Id)
	}
	eventually(t, "db1 is ready", func() bool { return r.volume("db1").State == pb.VolumeState_VOLUME_STATE_READY })
	if _, err := r.Attach(ctx, &pb.AttachRequest{Volume: "db1", Node: "c1"}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "db1 is attached", r.attached("db1"))

	v := r.volume("db1")
	stale := &pb.RecordStaleRequest{Node: "c1", VolumeId: v.Id, Epoch: v.Epoch, LegIds: []string{v.Legs[1].Id}, Reason: "text for older managers",
		Legs: []*pb.StaleLeg{{LegId: v.Legs[1].Id, Reason: pb.StaleReason_STALE_REASON_NO_ANSWER, Text: "no answer for more than 2s"}}}
	if _, err := r.agents.RecordStale(ctx, stale); err != nil {
		t.Fatal(err)
	}
	events, err := r.ListEvents(ctx, &pb.ListEventsRequest{Object: "volume db1"})
	if err != nil {
		t.Fatal(err)
	}
	if i := slices.IndexFunc(events.Events, func(e *pb.Event) bool { return e.Kind == "leg.stale" }); i < 0 ||
		events.Events[i].Attributes["reason"] != "no_answer" || !strings.Contains(events.Events[i].Text, "no answer for more than 2s") {
		t.Errorf("the events are %v, want one of the stale leg, with its reason", events.Events)
	}
	_, err = r.agents.RecordStale(ctx, &pb.RecordStaleRequest{Node: "c1", VolumeId: v.Id, Epoch: v.Epoch, LegIds: []string{v.Legs[0].Id}})
	if status.Code(err) != codes.FailedPrecondition || reason(err) != "LAST_LEG" {
		t.Errorf("RecordStale of the last leg = %v, want FAILED_PRECONDITION with LAST_LEG", err)
	}
	eventually(t, "the stale leg is being rebuilt", func() bool {
		return r.volume("db1").Legs[1].State == pb.LegState_LEG_STATE_REBUILDING
	})
	leg := r.volume("db1").Legs[1]
	_, err = r.agents.RecordInSync(ctx, &pb.RecordInSyncRequest{Node: "c1", VolumeId: v.Id, Epoch: v.Epoch,
		Legs: []*pb.RebuiltLeg{{LegId: leg.Id, Revision: leg.Revision, BytesCopied: 4096}}})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "db1 is healthy", func() bool { return r.volume("db1").Health == pb.Health_HEALTH_HEALTHY })
	if _, err := r.Detach(ctx, &pb.DetachRequest{Volume: "db1"}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "db1 is detached", func() bool { return r.volume("db1").Attachment == nil })
	if v := r.volume("db1"); !v.Clean {
		t.Errorf("after a clean detach db1 = %v, want clean", v)
	}
}

// reason is the reason of an error's ErrorInfo.
func reason(err error) string {
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			return info.Reason
		}
	}
	return ""
}

func TestErrorsCarryCodesAndNameTheField(t *testing.T) {
	r := newRig(t)
	ctx := t.Context()
	for what, c := range map[string]struct {
		call func() error
		code codes.Code
		says string // a field, or an object
	}{
		"size 0": {func() error {
			_, err := r.CreateVolume(ctx, &pb.CreateVolumeRequest{Name: "a"})
			return err
		}, codes.InvalidArgument, "size_bytes"},
		"a code": {func() error {
			_, err := r.CreateVolume(ctx, &pb.CreateVolumeRequest{Name: "a", SizeBytes: 1 << 30, Data: 4, Parity: 2})
			return err
		}, codes.Unimplemented, "parity"},
		"bad name": {func() error {
			_, err := r.CreateVolume(ctx, &pb.CreateVolumeRequest{Name: "no spaces", SizeBytes: 1 << 30})
			return err
		}, codes.InvalidArgument, "name"},
		"bad id": {func() error {
			_, err := r.EvictDrive(ctx, &pb.EvictDriveRequest{DriveId: "x"})
			return err
		}, codes.InvalidArgument, "drive_id"},
		"unknown volume": {func() error {
			_, err := r.Attach(ctx, &pb.AttachRequest{Volume: "none", Node: "c1"})
			return err
		}, codes.NotFound, "volume none"},
		"unknown node": {func() error {
			_, err := r.AddDrive(ctx, &pb.AddDriveRequest{Node: "none", Device: "/dev/sda"})
			return err
		}, codes.NotFound, "node none"},
		"no space": {func() error {
			_, err := r.CreateVolume(ctx, &pb.CreateVolumeRequest{Name: "a", SizeBytes: 1 << 30})
			return err
		}, codes.ResourceExhausted, ""},
	} {
		err := c.call()
		if status.Code(err) != c.code || !carries(err, c.says) {
			t.Errorf("%s: %v with %v, want %v that names %q", what, err, status.Convert(err).Details(), c.code, c.says)
		}
	}
}

func carries(err error, want string) bool {
	if want == "" {
		return true
	}
	for _, d := range status.Convert(err).Details() {
		switch d := d.(type) {
		case *errdetails.BadRequest:
			for _, v := range d.FieldViolations {
				if v.Field == want {
					return true
				}
			}
		case *errdetails.ErrorInfo:
			if d.Metadata["object"] == want && d.Domain == domain {
				return true
			}
		}
	}
	return false
}

// Programs branch on this reason, never on the text.
func TestAnUnknownPoolHasItsReason(t *testing.T) {
	r := newRig(t)
	_, err := r.CreateVolume(t.Context(), &pb.CreateVolumeRequest{Name: "a", SizeBytes: 1 << 30, Pool: "gold"})
	if status.Code(err) != codes.NotFound || reason(err) != pb.ReasonNoPool {
		t.Errorf("a volume in an unknown pool: %v for the reason %q, want NotFound for %s", err, reason(err), pb.ReasonNoPool)
	}
	_, err = r.GetCapacity(t.Context(), &pb.GetCapacityRequest{Pool: "gold"})
	if reason(err) != pb.ReasonNoPool {
		t.Errorf("the capacity of an unknown pool: %v for the reason %q, want %s", err, reason(err), pb.ReasonNoPool)
	}
}

func TestWhatWasAnsweredSurvivesARestart(t *testing.T) {
	r := newRig(t)
	const n = 500
	var group sync.WaitGroup
	for i := range n {
		group.Go(func() {
			if _, err := r.CreatePool(t.Context(), &pb.CreatePoolRequest{Name: fmt.Sprintf("pool%d", i), Selector: map[string]string{"n": fmt.Sprint(i)}}); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	before, err := r.ListEvents(t.Context(), &pb.ListEventsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	r.restart()
	pools, err := r.ListPools(t.Context(), &pb.ListPoolsRequest{})
	if err != nil || len(pools.Pools) != n+1 { // with the default pool
		t.Errorf("after a restart there are %d pools, %v; want %d", len(pools.GetPools()), err, n+1)
	}
	after, err := r.ListEvents(t.Context(), &pb.ListEventsRequest{})
	if err != nil || len(after.Events) < len(before.Events) || !proto.Equal(after.Events[0], before.Events[0]) {
		t.Errorf("after a restart there are %d events, %v; want at least %d", len(after.GetEvents()), err, len(before.Events))
	}
}

func TestNewerStreamOfANodeTakesOver(t *testing.T) {
	r := newRig(t)
	old, err := r.agents.Target(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := old.Send(&pb.TargetReport{Node: "t1", BootId: "1"}); err != nil {
		t.Fatal(err)
	}
	if _, err := old.Recv(); err != nil {
		t.Fatal(err)
	}
	young, err := r.agents.Target(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := young.Send(&pb.TargetReport{Node: "t1", BootId: "1"}); err != nil {
		t.Fatal(err)
	}
	if _, err := young.Recv(); err != nil {
		t.Fatal(err)
	}
	if _, err := old.Recv(); status.Code(err) != codes.Aborted {
		t.Errorf("the older stream ended with %v, want ABORTED", err)
	}
	eventually(t, "t1 is known", func() bool {
		nodes, err := r.ListNodes(t.Context(), &pb.ListNodesRequest{})
		return err == nil && len(nodes.Nodes) == 1 && nodes.Nodes[0].Target.Online
	})
}

func TestSecondMachineWithANodesNameIsRefusedWhileTheFirstLives(t *testing.T) {
	r := newRig(t)
	connect := func(ctx context.Context, boot string) error {
		stream, err := r.agents.Target(ctx)
		if err != nil {
			return err
		}
		if err := stream.Send(&pb.TargetReport{Node: "t1", BootId: boot}); err != nil {
			return err
		}
		_, err = stream.Recv()
		return err
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	if err := connect(ctx, "1"); err != nil {
		t.Fatal(err)
	}
	if err := connect(t.Context(), "2"); status.Code(err) != codes.FailedPrecondition || reason(err) != reasonNameTaken {
		t.Errorf("a second machine called t1 got %v, want FAILED_PRECONDITION with %s", err, reasonNameTaken)
	}
	cancel()
	eventually(t, "t1 may come back after its machine is gone", func() bool { return connect(t.Context(), "2") == nil })
}

// A manager that ends closes the streams of its agents, and no agent is lost by that.
func TestAManagerThatEndsNotesNoLossOfAgents(t *testing.T) {
	for what, ends := range map[string]bool{"an agent that goes": false, "a manager that ends": true} {
		t.Run(what, func(t *testing.T) {
			var m *Manager
			r := newRig(t)
			r.stop()
			r.adjust = func(started *Manager) { m = started }
			r.start()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			r.withAgents(ctx, "t1")
			if ends {
				if err := m.HandOver(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			cancel()
			eventually(t, "the stream is closed", func() bool {
				open := true
				if err := m.look(t.Context(), func() { open = m.targets["t1"] != nil }); err != nil {
					t.Fatal(err)
				}
				return !open
			})
			time.Sleep(20 * time.Millisecond)
			events, err := r.ListEvents(t.Context(), &pb.ListEventsRequest{})
			if err != nil {
				t.Fatal(err)
			}
			lost := slices.ContainsFunc(events.GetEvents(), func(e *pb.Event) bool { return e.GetKind() == string(event.TargetOffline) })
			if lost == ends {
				t.Errorf("the loss of an agent is noted: %t", lost)
			}
		})
	}
}

func TestThousandConcurrentCreatesAreAnsweredAndDurable(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r.withAgents(ctx, "t1", "t2")
	const n = 1000
	var group sync.WaitGroup
	answered := make([]string, n)
	for i := range n {
		group.Go(func() {
			v, err := r.CreateVolume(ctx, &pb.CreateVolumeRequest{Name: fmt.Sprintf("v%04d", i), SizeBytes: 1 << 20, Copies: 2, Stripes: 1})
			if err != nil {
				t.Error(err)
				return
			}
			answered[i] = v.Id
		})
	}
	group.Wait()
	cancel()
	r.restart()
	volumes, err := r.ListVolumes(t.Context(), &pb.ListVolumesRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for i, v := range volumes.Volumes {
		if v.Id != answered[i] {
			t.Errorf("after a restart volume %s = %s, want %s as answered", v.Name, v.Id, answered[i])
		}
	}
	if len(volumes.Volumes) != n {
		t.Errorf("after a restart there are %d volumes, want %d", len(volumes.Volumes), n)
	}
}

// BenchmarkCreateVolume measures volumes created per second by 64 concurrent callers. Each is
// durable when answered.
func BenchmarkCreateVolume(b *testing.B) {
	r := newRig(b)
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	r.withAgents(ctx, "t1", "t2")
	var next atomic.Int64
	b.SetParallelism(32)
	b.RunParallel(func(p *testing.PB) {
		for p.Next() {
			create := &pb.CreateVolumeRequest{Name: fmt.Sprintf("v%d", next.Add(1)), SizeBytes: 1 << 20, Copies: 2, Stripes: 1}
			if _, err := r.CreateVolume(ctx, create); err != nil {
				b.Error(err)
				return
			}
		}
	})
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "volumes/s")
}

func TestWatchGivesOldEventsThenNewOnes(t *testing.T) {
	r := newRig(t)
	pool := func(name string) {
		if _, err := r.CreatePool(t.Context(), &pb.CreatePoolRequest{Name: name, Selector: map[string]string{"a": "b"}}); err != nil {
			t.Fatal(err)
		}
	}
	pool("one")
	watch, err := r.WatchEvents(t.Context(), &pb.WatchEventsRequest{})
	if err != nil {
		t.Fatal(err)
	}
	var last uint64
	for _, name := range []string{"one", "two", "three"} {
		if name != "one" {
			pool(name)
		}
		e, err := watch.Recv()
		if err != nil || e.Object != "pool "+name || e.Seq <= last {
			t.Fatalf("event after %d = %v, %v; want one about pool %s", last, e, err, name)
		}
		last = e.Seq
	}
}

// Conversions must set every field: an agent that misses one would do something else than was
// decided.
func TestConversionsForgetNoField(t *testing.T) {
	r := newRig(t)
	r.keys = func(*pb.ExportKeys) {}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r.withAgents(ctx, "t1", "t2")
	if _, err := r.CreateVolume(ctx, &pb.CreateVolumeRequest{Name: "db1", SizeBytes: 1 << 30, Copies: 2, Stripes: 1, Labels: map[string]string{"a": "b"}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "db1 is ready", func() bool { return r.volume("db1").State == pb.VolumeState_VOLUME_STATE_READY })
	if _, err := r.Attach(ctx, &pb.AttachRequest{Volume: "db1", Node: "c1", Rail: "a", NearGpu: "0"}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "db1 is attached", r.attached("db1"))
	v := r.volume("db1")
	unset(t, v.ProtoReflect(), "Volume", map[string]bool{"VolumeLeg.stale_since": true, "Volume.legs.stale_since": true, "Volume.legs.reason": true,
		"Volume.legs.column": true, "Volume.legs.copy": true, "Volume.legs.revision": true, "Volume.legs.extents.start": true, "Volume.clean": true,
		"Volume.layout.data": true, "Volume.layout.parity": true, // a mirror has none
		"Volume.layout.integrity": true,                                                                                                                                       // it keeps no checksums
		"Volume.flattening":       true,                                                                                                                                       // it is no clone
		"Volume.thin":             true, "Volume.used_bytes": true, "Volume.legs.used_bytes": true, "Volume.legs.full": true, "Volume.space": true, "Volume.legs.space": true, // it is not thin
		"Volume.attachment.stock_nqn": true, "Volume.attachments.stock_nqn": true, // its host has an agent
		"Volume.snapshot": true, "Volume.clone_of": true, "Volume.failed": true, "Volume.restoring_to": true, "Volume.sealed": true, // it is no snapshot, began as none, and is written
		"Volume.scrub": true, "Volume.past_scrubs": true, // there was none
		"Volume.scrub_every_seconds": true, "Volume.scrub_bytes_per_second": true, // nor a schedule
		"Volume.rebuild_bytes_per_second": true, "Volume.rebuilds": true, "Volume.healing": true, // nor a rebuild
		"Volume.expanding_to_bytes": true, "Volume.formatted": true, "Volume.fence_waits_for": true, "Volume.attachments.waiting_for": true,
		"Volume.attachments.resync_done_bytes": true, "Volume.attachments.resync_total_bytes": true,
		"Volume.attachment.waiting_for": true, "Volume.attachment.resync_done_bytes": true, "Volume.attachment.resync_total_bytes": true})
}

// unset fails for each field of a message that is empty and not excused.
func unset(t *testing.T, m protoreflect.Message, path string, excused map[string]bool) {
	t.Helper()
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		at := path + "." + string(f.Name())
		if !m.Has(f) {
			if !excused[at] {
				t.Errorf("%s is not set", at)
			}
			continue
		}
		if f.Message() == nil || f.IsMap() || f.Message().FullName() == "google.protobuf.Timestamp" {
			continue
		}
		if !f.IsList() {
			unset(t, m.Get(f).Message(), at, excused)
			continue
		}
		for list, i := m.Get(f).List(), 0; i < list.Len(); i++ {
			unset(t, list.Get(i).Message(), at, excused)
		}
	}
}

func (r *rig) backup(ctx context.Context) *bytes.Buffer {
	r.t.Helper()
	stream, err := r.Backup(ctx, &pb.BackupRequest{})
	if err != nil {
		r.t.Fatal(err)
	}
	var all bytes.Buffer
	for {
		chunk, err := stream.Recv()
		if err == io.EOF {
			return &all
		}
		if err != nil {
			r.t.Fatal(err)
		}
		all.Write(chunk.Data)
	}
}

func TestRestoredStoreStartsAndADamagedBackupLeavesNothing(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r.withAgents(ctx, "t1", "t2")
	r.attachNew(ctx, "db1")
	backup := r.backup(ctx)
	before := r.volume("db1")
	r.stop()
	r.dir = filepath.Join(t.TempDir(), "restored")
	if err := Restore(Config{Dir: r.dir}, bytes.NewReader(backup.Bytes()[:backup.Len()-1])); err == nil {
		t.Error("a backup that is cut short was restored")
	}
	if entries, err := os.ReadDir(filepath.Dir(r.dir)); err != nil || len(entries) > 0 {
		t.Errorf("after a refused restore there is %v, %v; want nothing", entries, err)
	}
	if err := Restore(Config{Dir: r.dir}, backup); err != nil {
		t.Fatal(err)
	}
	r.start()
	if v := r.volume("db1"); v.Id != before.Id || v.Attachment != nil || v.Clean || v.Epoch <= before.Epoch {
		t.Errorf("restored volume = %v, want it detached, not clean, and above epoch %d", v, before.Epoch)
	}
}

func TestAnExpansionReachesTheHost(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r.withAgents(ctx, "t1", "t2")
	r.attachNew(ctx, "db1")
	v, err := r.ExpandVolume(ctx, &pb.ExpandVolumeRequest{Volume: "db1", SizeBytes: 3 << 30})
	if err != nil || v.SizeBytes != 1<<30 || v.ExpandingToBytes != 3<<30 {
		t.Fatalf("ExpandVolume = %v, %v; want 1GiB that is expanding to 3GiB", v, err)
	}
	eventually(t, "the host has 3GiB", func() bool { return r.volume("db1").GetAttachment().GetSizeBytes() == 3<<30 })
	if v := r.volume("db1"); v.SizeBytes != 3<<30 || v.ExpandingToBytes != 0 {
		t.Errorf("after the expansion the volume has %d bytes, expanding to %d", v.SizeBytes, v.ExpandingToBytes)
	}
	if _, err := r.ExpandVolume(ctx, &pb.ExpandVolumeRequest{Volume: "db1", SizeBytes: 2 << 30}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("ExpandVolume to a smaller size = %v, want %v", err, codes.InvalidArgument)
	}
}

func TestCapacityIsWhatCanBeMade(t *testing.T) {
	r := newRig(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r.withAgents(ctx, "t1", "t2")
	within := []*pb.Segment{{Labels: map[string]string{"rack": "r-t1"}}}
	c, err := r.GetCapacity(ctx, &pb.GetCapacityRequest{Copies: 1, Stripes: 1, Topology: within})
	if err != nil || c.AvailableBytes != fakeExtents<<28 || c.MaximumVolumeBytes != fakeExtents<<28 || c.MinimumVolumeBytes != 1<<20 {
		t.Errorf("GetCapacity in a rack of one drive = %v, %v; want all of it", c, err)
	}
	c, err = r.GetCapacity(ctx, &pb.GetCapacityRequest{Topology: within})
	if err != nil || c.AvailableBytes != 0 || c.MaximumVolumeBytes != 0 {
		t.Errorf("GetCapacity of two copies in a rack of one node = %v, %v; want none", c, err)
	}
	v, err := r.CreateVolume(ctx, &pb.CreateVolumeRequest{Name: "db1", SizeBytes: 1 << 30, Copies: 1, Topology: within})
	if err != nil || v.Legs[0].Node != "t1" {
		t.Errorf("CreateVolume in the rack of t1 = %v, %v", v, err)
	}
	v, err = r.CreateVolume(ctx, &pb.CreateVolumeRequest{Name: "db2", SizeBytes: 1 << 30, Copies: 1, Preferred: []*pb.Segment{{Labels: map[string]string{"node": "t2"}}}})
	if err != nil || v.Legs[0].Node != "t2" {
		t.Errorf("CreateVolume that prefers t2 = %v, %v", v, err)
	}
}

// attachNew makes a volume and attaches it to c1.
func (r *rig) attachNew(ctx context.Context, name string) {
	r.t.Helper()
	if _, err := r.CreateVolume(ctx, &pb.CreateVolumeRequest{Name: name, SizeBytes: 1 << 30, Copies: 2, Stripes: 1, Labels: map[string]string{"a": "b"}}); err != nil {
		r.t.Fatal(err)
	}
	eventually(r.t, name+" is ready", func() bool { return r.volume(name).State == pb.VolumeState_VOLUME_STATE_READY })
	if _, err := r.Attach(ctx, &pb.AttachRequest{Volume: name, Node: "c1"}); err != nil {
		r.t.Fatal(err)
	}
	eventually(r.t, name+" is attached", r.attached(name))
}

func TestStoreIsRebuiltFromWhatTargetsReport(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "rebuilt")
	b, err := NewRebuild(Config{Dir: dir}, []block.NodeName{"t1", "t2"}, []block.NodeName{"c1"})
	if err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := b.Run(short); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "target t1, target t2, host c1") {
		t.Errorf("Run without reports = %v, want DeadlineExceeded that names t1, t2 and c1", err)
	}
	agents := pb.NewAgentsClient(serveFor(t, b.Register))
	type result struct {
		text string
		err  error
	}
	done := make(chan result, 1)
	go func() {
		text, err := b.Run(t.Context())
		done <- result{text, err}
	}()
	volume := &pb.VolumeLabel{VolumeId: uuid(1), Name: "db1", SizeBytes: 1 << 30, Layout: &pb.Layout{Stripes: 1, Copies: 2, ChunkBytes: 128 << 10},
		Pool: "default", Spread: "node", Epoch: 3, Generation: 2, InSyncLegs: []string{uuid(11), uuid(12)}}
	for i, name := range []string{"t1", "t2"} {
		stream, err := agents.Target(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		leg := &pb.LegLabel{LegId: uuid(11 + i), Copy: uint32(i), Extents: []*pb.Extent{{Start: 0, Count: 4}}, Zeroed: true, AdmittedEpoch: 3, Volume: volume}
		err = stream.Send(&pb.TargetReport{Node: name, BootId: "1", ClusterId: uuid(100), Drives: []*pb.DriveReport{{
			DriveId: uuid(21 + i), ClusterId: uuid(100), Device: "/dev/nvme0n1", Extents: 39, Legs: []*pb.LegLabel{leg}}}})
		if err != nil {
			t.Fatal(err)
		}
	}
	host, err := agents.Initiator(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	err = host.Send(&pb.InitiatorReport{Node: "c1", BootId: "1", Host: &pb.Host{Nqn: "nqn.2014-08.org.nvmexpress:uuid:" + uuid(51), Id: uuid(51)},
		Evidence: []*pb.Evidence{{VolumeId: uuid(1), Epoch: 3, Legs: []*pb.EvidenceLeg{{LegId: uuid(12)}}}}})
	if err != nil {
		t.Fatal(err)
	}
	got := <-done
	if got.err != nil || !strings.Contains(got.text, "volume db1") || !strings.Contains(got.text, "targets heard: t1, t2\nhosts heard: c1\n") {
		t.Fatalf("Run = %q, %v; want a text about volume db1, and who was heard", got.text, got.err)
	}
	if _, err := NewRebuild(Config{Dir: dir}, []block.NodeName{"t1"}, nil); !errors.Is(err, store.ErrNotEmpty) {
		t.Errorf("a rebuild over a store = %v, want ErrNotEmpty", err)
	}
	r := &rig{t: t, dir: dir}
	r.start()
	defer r.stop()
	if v := r.volume("db1"); v.Id != uuid(1) || v.Epoch <= 3 || len(v.Legs) != 2 || v.Legs[0].State != pb.LegState_LEG_STATE_STALE || v.Legs[1].State != pb.LegState_LEG_STATE_IN_SYNC {
		t.Errorf("rebuilt volume = %v, want the leg in sync, above epoch 3, that the host noted, though the labels list both", v)
	}
}

func uuid(n int) string { return fmt.Sprintf("%08x-0000-4000-8000-000000000000", n) }

func TestTheLogNamesTheCallersRequest(t *testing.T) {
	var log bytes.Buffer
	r := &rig{t: t, dir: initialized(t), log: slog.New(slog.NewTextHandler(&log, nil))}
	r.start()
	defer r.stop()
	ctx := metadata.AppendToOutgoingContext(t.Context(), pb.RequestKey, "abc-7")
	if _, err := r.CreatePool(ctx, &pb.CreatePoolRequest{Name: "asked"}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.CreatePool(t.Context(), &pb.CreatePoolRequest{Name: "nobody"}); err != nil {
		t.Fatal(err)
	}
	r.stop()
	for line := range strings.Lines(log.String()) {
		if strings.Contains(line, "msg=audit ") { // it names the caller, and not the pool
			continue
		}
		if strings.Contains(line, "asked") != strings.Contains(line, "request=abc-7") {
			t.Errorf("log: %s", line)
		}
	}
	if !strings.Contains(log.String(), "asked") {
		t.Errorf("the pool is not in the log: %s", &log)
	}
}

// When the store was backed up is in the history.
func TestABackupIsRemembered(t *testing.T) {
	r := newRig(t)
	r.backup(t.Context())
	events, err := r.ListEvents(t.Context(), &pb.ListEventsRequest{Object: "cluster"})
	if err != nil || !slices.ContainsFunc(events.GetEvents(), func(e *pb.Event) bool { return e.GetKind() == event.StoreBackedUp }) {
		t.Errorf("events = %v, %v, want one of a backup", events, err)
	}
}

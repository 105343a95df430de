// SPDX-License-Identifier: Apache-2.0

package console

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/url"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/timestamppb"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/pages"
	"weft.dev/weft/proto/pb"
)

// hostile is what an enemy would write into a label, a model or an event.
const hostile = `"'><script>alert(1)</script><img src=x onerror=alert(1)>`

var noon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

func at(d time.Duration) *timestamppb.Timestamp { return timestamppb.New(noon.Add(d)) }

// manager is a volume manager of one volume, which tests change.
type manager struct {
	pb.UnimplementedManagerServer
	pb.UnimplementedIdentitiesServer

	mu      sync.Mutex
	volume  *pb.Volume // nil: deleted
	more    []*pb.Volume
	snaps   []*pb.Volume // of the volume
	taken   *pb.CreateSnapshotsRequest
	back    *pb.RestoreVolumeRequest
	nodes   []*pb.Node
	drives  []*pb.Drive
	events  []*pb.Event
	wrong   []string
	figures map[pb.FiguresOf][]*pb.Figures // nil: the manager is too old for them
	down    bool
	calls   map[string]int
	changed chan struct{} // closed and replaced at each event
}

const (
	driveA = "4f1c22aa-0000-4000-8000-000000000001"
	driveB = "9c01aa37-0000-4000-8000-000000000002"
)

func newManager() *manager {
	leg := func(n string, column, copy uint32, drive, node string) *pb.Leg {
		return &pb.Leg{Id: n + "0000000-0000-4000-8000-000000000000", Column: column, Copy: copy, DriveId: drive, Node: node, State: pb.LegState_LEG_STATE_IN_SYNC}
	}
	stale := leg("b", 0, 1, driveB, "t2")
	stale.State, stale.StaleSince, stale.Reason = pb.LegState_LEG_STATE_STALE, at(-time.Minute), "no answer "+hostile
	return &manager{
		volume: &pb.Volume{
			Id: "0b5e2f7e-1c1d-4a3e-9a52-6f7c1a2b3c4d", Name: "db1", SizeBytes: 10 << 30, Layout: &pb.Layout{Stripes: 2, Copies: 2, ChunkBytes: 128 << 10},
			Pool: "default", Spread: "rack", Labels: map[string]string{"app": hostile}, State: pb.VolumeState_VOLUME_STATE_READY, Health: pb.Health_HEALTH_DEGRADED, Epoch: 3, Created: at(-time.Hour),
			Legs: []*pb.Leg{leg("a", 0, 0, driveA, "t1"), stale, leg("c", 1, 0, driveB, "t2"), leg("d", 1, 1, driveA, "t1")},
			Attachment: &pb.Attachment{
				VolumeName: "db1", Node: "gpu1", Epoch: 3, State: pb.AttachmentState_ATTACHMENT_STATE_ATTACHED, Device: "/dev/weft/db1", Since: at(-time.Hour), WaitingFor: "node t2 " + hostile,
			},
			Rebuilds: []*pb.Rebuild{{LegId: stale.GetId(), Column: 0, Copy: 1, Node: "t2", Began: at(-time.Minute), DoneBytes: 1 << 30, TotalBytes: 4 << 30, BytesPerSecond: 100 << 20}},
			Scrub:    &pb.VolumeScrub{Began: at(-time.Hour), DoneBytes: 1 << 30, TotalBytes: 5 << 30},
		},
		nodes: []*pb.Node{
			{Name: "gpu1", Initiator: &pb.AgentStatus{Known: true, Online: true, Kernel: hostile}, Labels: map[string]string{"rack": "r9"}},
			{Name: "h1", Stock: true, Host: &pb.Host{Nqn: "nqn.2014-08.org.nvmexpress:" + hostile}},
			{Name: "t1", Target: &pb.AgentStatus{Known: true, Online: true}, Labels: map[string]string{"rack": "r1"}, Portals: []*pb.Portal{{Transport: pb.Transport_TRANSPORT_TCP, Address: "192.0.2.11", Port: 4420}}},
			{Name: "t2", Target: &pb.AgentStatus{Known: true, Online: true, Problems: []*pb.Problem{{Object: "drive 9c01aa37", Doing: "read", Cause: hostile}}}, Labels: map[string]string{"rack": hostile}},
		},
		drives: []*pb.Drive{
			{Id: driveA, Node: "t1", Device: "/dev/nvme0n1", Model: "P4510", State: pb.DriveState_DRIVE_STATE_READY, CapacityBytes: 2 << 40, AllocatedBytes: 512 << 30, Health: &pb.DriveHealth{Smart: &pb.SmartLog{Celsius: 41, UsedPercent: 3}}},
			{Id: driveB, Node: "t2", Device: "/dev/" + hostile, Model: hostile, State: pb.DriveState_DRIVE_STATE_SUSPECT, CapacityBytes: 2 << 40, AllocatedBytes: 1 << 40, Reason: hostile},
		},
		events: []*pb.Event{{Seq: 1, Time: at(0), Severity: pb.Severity_SEVERITY_WARNING, Kind: "leg.stale", Object: "volume db1", Text: "leg 0.1: " + hostile}},
		wrong:  []string{"volume db1 is degraded: see `weft explain volume db1`", "node t2: " + hostile},
		figures: map[pb.FiguresOf][]*pb.Figures{
			pb.FiguresOf_FIGURES_OF_VOLUMES: {doing(&pb.Figures{Id: "0b5e2f7e-1c1d-4a3e-9a52-6f7c1a2b3c4d", Name: "db1"}, 3000, 1000, 750*time.Microsecond)},
			pb.FiguresOf_FIGURES_OF_LEGS: {
				doing(&pb.Figures{Id: "a0000000-0000-4000-8000-000000000000", Name: "0.0"}, 1000, 500, 480*time.Microsecond), {Id: stale.GetId(), Name: "0.1"},
				doing(&pb.Figures{Id: "c0000000-0000-4000-8000-000000000000", Name: "1.0"}, 800, 500, 900*time.Microsecond),
				doing(&pb.Figures{Id: "d0000000-0000-4000-8000-000000000000", Name: "1.1"}, 1200, 490, 600*time.Microsecond),
			},
			pb.FiguresOf_FIGURES_OF_HOSTS:  {doing(&pb.Figures{Name: "gpu1"}, 3001, 1000, 750*time.Microsecond)},
			pb.FiguresOf_FIGURES_OF_DRIVES: {doing(&pb.Figures{Id: driveA, Name: driveA, Node: "t1"}, 2200, 990, 300*time.Microsecond), {Id: driveB, Name: driveB, Node: "t2"}},
		},
		calls:   map[string]int{},
		changed: make(chan struct{}),
	}
}

// doing adds what an object does in a second to its figures: of 4 KiB each, over ten seconds.
func doing(f *pb.Figures, reads, writes uint64, p99 time.Duration) *pb.Figures {
	f.Nanoseconds = 10e9
	f.Read = &pb.Rates{Ios: 10 * reads, Bytes: 10 * reads * 4096, P50Nanoseconds: uint64(p99) / 4}
	f.Write = &pb.Rates{Ios: 10 * writes, Bytes: 10 * writes * 4096, P50Nanoseconds: uint64(p99) / 4}
	f.All = &pb.Rates{Ios: 10 * (reads + writes), P50Nanoseconds: uint64(p99) / 4, P99Nanoseconds: uint64(p99)}
	return f
}

// enter begins a call.
func (m *manager) enter(call string) (leave func(), err error) {
	m.mu.Lock()
	m.calls[call]++
	if m.down {
		m.mu.Unlock()
		return nil, status.Error(codes.Unavailable, "no leader")
	}
	return m.mu.Unlock, nil
}

// node is the node of a name.
func (m *manager) node(name string) *pb.Node {
	return m.nodes[slices.IndexFunc(m.nodes, func(n *pb.Node) bool { return n.Name == name })]
}

// change changes the cluster, and makes an event of it.
func (m *manager) change(text string, do func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	do()
	m.events = append(m.events, &pb.Event{Seq: uint64(len(m.events) + 1), Time: at(0), Object: "volume db1", Text: text})
	close(m.changed)
	m.changed = make(chan struct{})
}

func (m *manager) GetStatus(context.Context, *pb.GetStatusRequest) (*pb.Status, error) {
	leave, err := m.enter("GetStatus")
	if err != nil {
		return nil, err
	}
	defer leave()
	return &pb.Status{
		ClusterId: "11111111-2222-4333-8444-555555555555", CapacityBytes: 4 << 40, AllocatedBytes: 1 << 40, Nodes: 3, Drives: 2, DrivesNotReady: 1,
		Volumes: 1, VolumesDegraded: 1, Attachments: 1, Wrong: m.wrong,
	}, nil
}

func (m *manager) ListManagers(context.Context, *pb.ListManagersRequest) (*pb.ListManagersResponse, error) {
	return &pb.ListManagersResponse{Managers: []*pb.ManagerMember{{Id: "m1", Address: "m1:4480", Voter: true, Leader: true, Problem: hostile}, {Id: "m2", Address: "m2:4480", Voter: true}}}, nil
}

func (m *manager) ListNodes(context.Context, *pb.ListNodesRequest) (*pb.ListNodesResponse, error) {
	leave, err := m.enter("ListNodes")
	if err != nil {
		return nil, err
	}
	defer leave()
	return proto.CloneOf(&pb.ListNodesResponse{Nodes: m.nodes}), nil
}

func (m *manager) ListDrives(context.Context, *pb.ListDrivesRequest) (*pb.ListDrivesResponse, error) {
	return &pb.ListDrivesResponse{Drives: m.drives}, nil
}

func (m *manager) ListDevices(context.Context, *pb.ListDevicesRequest) (*pb.ListDevicesResponse, error) {
	return &pb.ListDevicesResponse{Devices: []*pb.Device{{Path: "/dev/sdb", Signatures: []string{hostile}, Refused: hostile}, {Path: "/dev/sdc"}}}, nil
}

func (m *manager) ListPools(context.Context, *pb.ListPoolsRequest) (*pb.ListPoolsResponse, error) {
	return &pb.ListPoolsResponse{Pools: []*pb.Pool{{Name: "default"}, {Name: "fast", Selector: map[string]string{"class": hostile}}}}, nil
}

func (m *manager) ListAttachments(context.Context, *pb.ListAttachmentsRequest) (*pb.ListAttachmentsResponse, error) {
	leave, err := m.enter("ListAttachments")
	if err != nil {
		return nil, err
	}
	defer leave()
	return &pb.ListAttachmentsResponse{Attachments: []*pb.Attachment{proto.CloneOf(m.volume.GetAttachment())}}, nil
}

func (m *manager) ListVolumes(_ context.Context, r *pb.ListVolumesRequest) (*pb.ListVolumesResponse, error) {
	leave, err := m.enter("ListVolumes")
	if err != nil {
		return nil, err
	}
	defer leave()
	all := m.more
	switch {
	case r.GetSnapshots():
		all = m.snaps
	case m.volume != nil:
		all = append(all[:len(all):len(all)], m.volume)
	}
	from, _ := strconv.Atoi(r.GetPageToken())
	to := min(len(all), from+int(r.GetPageSize()))
	list := &pb.ListVolumesResponse{Volumes: all[from:to]}
	if to < len(all) {
		list.NextPageToken = strconv.Itoa(to)
	}
	return proto.CloneOf(list), nil
}

func (m *manager) GetVolume(_ context.Context, r *pb.GetVolumeRequest) (*pb.Volume, error) {
	leave, err := m.enter("GetVolume")
	if err != nil {
		return nil, err
	}
	defer leave()
	for _, x := range m.snaps {
		if x.GetName() == r.GetVolume() || x.GetId() == r.GetVolume() {
			return proto.CloneOf(x), nil
		}
	}
	if m.volume == nil || r.GetVolume() != "db1" && r.GetVolume() != m.volume.GetId() {
		return nil, status.Errorf(codes.NotFound, "volume %s: not found", r.GetVolume())
	}
	return proto.CloneOf(m.volume), nil
}

// snapshot is one of the volume.
func (m *manager) snapshot(name string) *pb.Volume {
	v := proto.CloneOf(m.volume)
	v.Id, v.Name, v.Attachment, v.Thin, v.Health = "id of "+name, "db1@"+name, nil, true, pb.Health_HEALTH_HEALTHY
	v.UsedBytes, v.Rebuilds, v.Scrub = 3<<30, nil, nil
	v.Snapshot = &pb.SnapshotOf{VolumeId: m.volume.GetId(), VolumeName: "db1", Taken: at(-time.Hour)}
	return v
}

func (m *manager) CreateSnapshots(_ context.Context, r *pb.CreateSnapshotsRequest) (*pb.CreateSnapshotsResponse, error) {
	leave, err := m.enter("CreateSnapshots")
	if err != nil {
		return nil, err
	}
	defer leave()
	m.taken = r
	made := m.snapshot(r.GetSnapshots()[0].GetName())
	m.snaps = append(m.snaps, made)
	return &pb.CreateSnapshotsResponse{Snapshots: []*pb.Volume{made}}, nil
}

func (m *manager) RestoreVolume(_ context.Context, r *pb.RestoreVolumeRequest) (*pb.Volume, error) {
	leave, err := m.enter("RestoreVolume")
	if err != nil {
		return nil, err
	}
	defer leave()
	m.back = r
	return m.volume, nil
}

func (m *manager) FlattenVolume(context.Context, *pb.FlattenVolumeRequest) (*pb.Volume, error) {
	leave, err := m.enter("FlattenVolume")
	if err != nil {
		return nil, err
	}
	defer leave()
	m.volume.Flattening = &pb.Flattening{Since: at(0), LeftBytes: 3 << 30}
	return m.volume, nil
}

func (m *manager) SealVolume(context.Context, *pb.SealVolumeRequest) (*pb.Volume, error) {
	leave, err := m.enter("SealVolume")
	if err != nil {
		return nil, err
	}
	defer leave()
	m.volume.Sealed = at(0)
	return m.volume, nil
}

func (m *manager) ExplainVolume(context.Context, *pb.ExplainVolumeRequest) (*pb.Explanation, error) {
	return &pb.Explanation{Summary: "volume db1 is degraded", Facts: []string{hostile}, Waits: []string{"node t2 " + hostile}, Actions: []string{"bring t2 back with `weft target`"}}, nil
}

func (m *manager) WhatIf(_ context.Context, r *pb.WhatIfRequest) (*pb.WhatIfResponse, error) {
	if len(r.GetNodes()) == 1 && r.GetNodes()[0] == "t9" {
		return nil, status.Error(codes.NotFound, "node t9: not found")
	}
	return &pb.WhatIfResponse{Nodes: r.GetNodes(), VolumesLosingData: 1, LegsLost: 2, LegsWithoutPlace: 1, Volumes: []*pb.VolumeLoss{
		{VolumeName: "db1", DataLost: true, Hosts: hostile, Legs: []*pb.LegLoss{{Node: "t1", Why: hostile}, {Node: "t1", To: "t3"}}},
	}}, nil
}

func (m *manager) GetFigures(_ context.Context, r *pb.GetFiguresRequest) (*pb.GetFiguresResponse, error) {
	leave, err := m.enter("GetFigures")
	if err != nil {
		return nil, err
	}
	defer leave()
	if m.figures == nil {
		return nil, status.Error(codes.Unimplemented, "unknown method GetFigures")
	}
	return proto.CloneOf(&pb.GetFiguresResponse{Figures: m.figures[r.GetOf()]}), nil
}

func (m *manager) ListEvents(_ context.Context, r *pb.ListEventsRequest) (*pb.ListEventsResponse, error) {
	leave, err := m.enter("ListEvents")
	if err != nil {
		return nil, err
	}
	defer leave()
	all := m.events
	if n := int(r.GetLimit()); n > 0 && n < len(all) {
		all = all[len(all)-n:]
	}
	return proto.CloneOf(&pb.ListEventsResponse{Events: all}), nil
}

func (m *manager) WatchEvents(r *pb.WatchEventsRequest, stream grpc.ServerStreamingServer[pb.Event]) error {
	for seq := r.GetAfterSeq(); ; {
		m.mu.Lock()
		news, changed := m.events[min(int(seq), len(m.events)):], m.changed
		m.mu.Unlock()
		for _, e := range news {
			if err := stream.Send(e); err != nil {
				return err
			}
			seq = e.GetSeq()
		}
		select {
		case <-stream.Context().Done():
			return nil
		case <-changed:
		}
	}
}

func (m *manager) CreateVolume(_ context.Context, r *pb.CreateVolumeRequest) (*pb.Volume, error) {
	leave, err := m.enter("CreateVolume " + r.GetName())
	if err != nil {
		return nil, err
	}
	defer leave()
	return &pb.Volume{Name: r.GetName(), SizeBytes: r.GetSizeBytes(), Layout: &pb.Layout{Stripes: 2, Copies: r.GetCopies()}}, nil
}

func (m *manager) DeleteVolume(_ context.Context, r *pb.DeleteVolumeRequest) (*pb.DeleteVolumeResponse, error) {
	leave, err := m.enter("DeleteVolume")
	if err != nil {
		return nil, err
	}
	defer leave()
	all := len(m.snaps)
	m.snaps = slices.DeleteFunc(m.snaps, func(x *pb.Volume) bool { return x.GetName() == r.GetVolume() })
	if len(m.snaps) == all {
		m.volume = nil
	}
	return &pb.DeleteVolumeResponse{}, nil
}

func (m *manager) CreateToken(_ context.Context, r *pb.CreateTokenRequest) (*pb.CreateTokenResponse, error) {
	return &pb.CreateTokenResponse{Token: "weft1.secret-of-" + r.GetSubject().GetName()}, nil
}

func (m *manager) ListTokens(context.Context, *pb.ListTokensRequest) (*pb.ListTokensResponse, error) {
	return &pb.ListTokensResponse{Tokens: []*pb.Token{{Id: "5f1c0de5", Subject: &pb.Subject{Name: hostile, Person: true, Role: "viewer"}, Expires: at(time.Hour)}}}, nil
}

func (m *manager) ListAuthorities(context.Context, *pb.ListAuthoritiesRequest) (*pb.ListAuthoritiesResponse, error) {
	return &pb.ListAuthoritiesResponse{Authorities: []*pb.Authority{{Hash: strings.Repeat("ab", 32), Signs: true, Added: at(0)}}}, nil
}

func (m *manager) ListAudit(context.Context, *pb.ListAuditRequest) (*pb.ListAuditResponse, error) {
	return &pb.ListAuditResponse{Entries: []*pb.AuditEntry{{Seq: 1, Time: at(0), Who: "person ada (admin)", Call: "DeleteVolume", Request: hostile}}}, nil
}

func (m *manager) GetUpgrade(context.Context, *pb.GetUpgradeRequest) (*pb.Upgrade, error) {
	return &pb.Upgrade{Level: 1, Newest: 2, Parts: []*pb.UpgradePart{
		{Kind: "target", Name: "t1", Version: "v0.1.0", Level: 2}, {Kind: "target", Name: "t2", Version: hostile, Level: 1}, {Kind: "initiator", Name: "gpu1", Version: "v0.0.9", Level: 1},
	}}, nil
}

// changing counts what would change the cluster. What this manager does not know, it says that it
// has done.
func (m *manager) changing(ctx context.Context, r any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	answer, err := handle(ctx, r)
	for _, a := range actions {
		if a.method != info.FullMethod {
			continue
		}
		m.mu.Lock()
		m.calls["did "+path.Base(a.method)]++
		m.mu.Unlock()
		if status.Code(err) == codes.Unimplemented {
			method, found := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(strings.ReplaceAll(strings.Trim(a.method, "/"), "/", ".")))
			if found != nil {
				return nil, found
			}
			kind, found := protoregistry.GlobalTypes.FindMessageByName(method.(protoreflect.MethodDescriptor).Output().FullName())
			if found != nil {
				return nil, found
			}
			return kind.New().Interface(), nil
		}
		break
	}
	return answer, err
}

// called returns how often a method was called.
func (m *manager) called(method string) int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.calls[method]
}

// as are the credentials of a server whose peers are all one identity.
type as struct {
	credentials.TransportCredentials
	who access.Identity
}

func (a as) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return c, access.AuthInfo{CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity}, Identity: a.who}, nil
}

func (a as) Clone() credentials.TransportCredentials { return a }

// world is a console, its manager, and a browser.
type world struct {
	*manager
	t       testing.TB
	console *Server
	links   *links
	cut     func() // ends the connections of browsers
	url     string
	browser *http.Client
}

// person is a person with a role.
func person(role access.Role) access.Identity {
	return access.Identity{Kind: access.Person, Name: "ada", Role: role}
}

// newWorld starts a console whose calls come from an identity, and checks them as managers do.
func newWorld(t testing.TB, who access.Identity) *world {
	t.Helper()
	m := newManager()
	guard := access.Guard{Refused: func(_ context.Context, _ access.Identity, method string) {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.calls[path.Base(method)+" refused"]++
	}}
	server := grpc.NewServer(grpc.Creds(as{insecure.NewCredentials(), who}), grpc.ChainUnaryInterceptor(guard.Unary, m.changing), grpc.StreamInterceptor(guard.Stream))
	pb.RegisterManagerServer(server, m)
	pb.RegisterIdentitiesServer(server, m)
	socket := filepath.Join(t.TempDir(), "manager")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	go server.Serve(listener) //nolint:errcheck // it ends with the test
	t.Cleanup(server.Stop)
	conn, err := grpc.NewClient("unix:"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	s := NewServer(Config{Clients: Clients{Manager: pages.Client(conn), Identities: pb.NewIdentitiesClient(conn)}, Who: who, Managers: "m1:4480", Version: "v0.1.0"})
	tokens := &links{now: time.Now}
	door := NewDoor(tokens.admit(s), "`weft console` prints a link.", time.Now, slog.New(slog.DiscardHandler))
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { s.Run(ctx) })    //nolint:errcheck // it ends with ctx
	running.Go(func() { door.Run(ctx) }) //nolint:errcheck // it ends with ctx
	t.Cleanup(func() { stop(); running.Wait() })
	web := httptest.NewServer(door.Handler())
	t.Cleanup(web.Close)
	t.Cleanup(web.CloseClientConnections) // before Close, which waits for streams
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	return &world{manager: m, t: t, console: s, links: tokens, url: web.URL, cut: web.CloseClientConnections, browser: &http.Client{Jar: jar, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}}
}

// loggedIn is newWorld with a browser that has logged in.
func loggedIn(t testing.TB, who access.Identity) *world {
	t.Helper()
	w := newWorld(t, who)
	if code, _ := w.post("/login", url.Values{"code": {w.links.make()}}, nil); code != http.StatusSeeOther {
		t.Fatalf("log in: %d", code)
	}
	return w
}

// get returns the status and the text of a page.
func (w *world) get(path string) (int, string) {
	w.t.Helper()
	answer, err := w.browser.Get(w.url + path)
	if err != nil {
		w.t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return answer.StatusCode, string(text)
}

// post sends a form, and returns the status and where the answer leads.
func (w *world) post(path string, form url.Values, headers map[string]string) (int, string) {
	w.t.Helper()
	r, err := http.NewRequestWithContext(w.t.Context(), http.MethodPost, w.url+path, strings.NewReader(form.Encode()))
	if err != nil {
		w.t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	for k, v := range headers {
		r.Header.Set(k, v)
	}
	answer, err := w.browser.Do(r)
	if err != nil {
		w.t.Fatal(err)
	}
	answer.Body.Close()
	return answer.StatusCode, answer.Header.Get("Location")
}

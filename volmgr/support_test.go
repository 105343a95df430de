// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"weft.dev/weft/proto/pages"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/proto/pki"
	"weft.dev/weft/proto/support"
	"weft.dev/weft/volmgr/bundle"
)

// bundled is a support bundle of a rig's manager.
func (r *rig) bundled(ctx context.Context) []byte {
	r.t.Helper()
	stream, err := r.SupportBundle(ctx, &pb.SupportBundleRequest{})
	if err != nil {
		r.t.Fatal(err)
	}
	var out bytes.Buffer
	for {
		chunk, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return out.Bytes()
		}
		if err != nil {
			r.t.Fatal(err)
		}
		out.Write(chunk.Data)
	}
}

// unpacked is the content of each file of a bundle.
func unpacked(t testing.TB, packed []byte) map[string][]byte {
	t.Helper()
	open, err := gzip.NewReader(bytes.NewReader(packed))
	if err != nil {
		t.Fatal(err)
	}
	files, archive := map[string][]byte{}, tar.NewReader(open)
	for {
		h, err := archive.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		if files[h.Name], err = io.ReadAll(archive); err != nil {
			t.Fatal(err)
		}
	}
}

func readBundle(t testing.TB, packed []byte) *bundle.Bundle {
	t.Helper()
	b, err := bundle.Read(bytes.NewReader(packed))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// missing is why a bundle lacks something; empty if it does not say so.
func missing(b *bundle.Bundle, what string) string {
	for _, m := range b.Missing {
		if m.What == what {
			return m.Why
		}
	}
	return ""
}

// answers lets an agent of a rig answer questions of support bundles.
func (r *rig) answers(ctx context.Context, node string, files ...support.File) {
	a := &support.Agent{Manager: r.agents, Node: node, Source: pb.SupportSource_SUPPORT_SOURCE_TARGET, Collect: func(context.Context) []support.File { return files }}
	go a.Run(ctx)
	eventually(r.t, node+" can be asked", func() bool {
		r.manager.support.mu.Lock()
		defer r.manager.support.mu.Unlock()
		return r.manager.support.agents[agentName{"t1", targetWord}] != nil
	})
}

// Every secret of a cluster is planted, and looked for in all that a bundle of it unpacks to.
func TestNoSecretIsInASupportBundle(t *testing.T) {
	var mu sync.Mutex
	told := map[string]bool{}
	r := &rig{t: t, dir: initialized(t)}
	r.keys = func(k *pb.ExportKeys) {
		mu.Lock()
		defer mu.Unlock()
		told[string(k.Host)], told[string(k.Controller)] = true, true
	}
	var log lockedBuffer
	r.log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	var keyring *pki.Keyring
	r.adjust = func(m *Manager) {
		r.manager = m
		var err error
		if keyring, err = pki.CreateKeyring(KeysOf(r.dir), m.ClusterID(), "m1", m.cfg.Now); err != nil {
			t.Fatal(err)
		}
		m.cfg.Keys, m.cfg.Recent = keyring, func() []byte { return []byte(log.String()) }
	}
	r.start()
	defer func() { r.stop() }()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r.withAgents(ctx, "t1", "t2")
	r.attachNew(ctx, "db1")
	if err := r.manager.keepKeysOnce(ctx); err != nil {
		t.Fatal(err)
	}
	token, err := identities{m: r.manager}.CreateToken(ctx, &pb.CreateTokenRequest{Subject: &pb.Subject{Name: "t9", Role: "target"}})
	if err != nil {
		t.Fatal(err)
	}
	b := r.bundled(ctx)
	files := unpacked(t, b)

	var secrets [][]byte
	mu.Lock()
	for k := range told {
		secrets = append(secrets, []byte(k))
	}
	mu.Unlock()
	if len(secrets) != 4 {
		t.Fatalf("%d keys of exports were told, want 4", len(secrets))
	}
	state, err := r.manager.snapshot(ctx)
	if err != nil {
		t.Fatal(err)
	}
	kinds := map[string]int{}
	for _, record := range state.Records() {
		kind, _, _ := strings.Cut(record.Key, "/")
		kinds[kind]++
		if kind == "s" || kind == "t" {
			secrets = append(secrets, record.Value)
		}
	}
	for _, kind := range []string{"s", "t", "a", "v"} {
		if kinds[kind] == 0 {
			t.Errorf("the cluster has no record of kind %q, so this proves nothing about it", kind)
		}
	}
	pem, err := keyring.Export()
	if err != nil {
		t.Fatal(err)
	}
	parts := strings.Split(token.Token, ".")
	for _, s := range append(secrets, []byte(parts[len(parts)-1]), pem) {
		for _, form := range forms(s) {
			for name, content := range files {
				if bytes.Contains(content, form) {
					t.Errorf("a secret is in %s", name)
				}
			}
		}
	}
	for name, content := range files {
		for _, mark := range []string{"PRIVATE KEY", "DHHC-1", `"s/master"`, `"t/`} {
			if bytes.Contains(content, []byte(mark)) {
				t.Errorf("%s has %q", name, mark)
			}
		}
	}
	if text := string(files["manager/log.txt"]); !strings.Contains(text, "volume.attached") || strings.Contains(text, "msg=audit") || !strings.Contains(log.String(), "msg=audit") {
		t.Errorf("the manager's log is to be there, without the audit:\n%s", text)
	}
	if !bytes.Contains(files["nodes/t1/target/wanted.json"], []byte("nqn.2026-11.dev.weft")) {
		t.Error("the wanted state of t1 has no export, so this proves nothing about its keys")
	}
}

// forms are the ways in which a secret could be written.
func forms(s []byte) (all [][]byte) {
	if len(s) < 12 {
		return nil
	}
	return append(all, s, fmt.Appendf(nil, "%x", s), s[:min(len(s), 60)])
}

// Fields of bytes are where messages keep secrets; what a bundle tells of a message has none, at any
// depth, and no other field of a wanted state is called one.
func TestMessagesAreToldWithoutBytes(t *testing.T) {
	w := &pb.TargetWanted{Exports: []*pb.WantedExport{{Nqn: "n", Keys: &pb.ExportKeys{Host: []byte("hush-hush-hush")}}}}
	text, err := tell(w)
	if err != nil {
		t.Fatal(err)
	}
	if s := string(text); !strings.Contains(s, `"n"`) || strings.Contains(s, "host") || len(w.Exports[0].Keys.Host) == 0 {
		t.Errorf("told %s of %v", s, w)
	}
	seen := map[protoreflect.FullName]bool{}
	var walk func(protoreflect.MessageDescriptor)
	walk = func(m protoreflect.MessageDescriptor) {
		if seen[m.FullName()] {
			return
		}
		seen[m.FullName()] = true
		for i := range m.Fields().Len() {
			f := m.Fields().Get(i)
			for _, word := range []string{"secret", "password", "token", "private", "credential"} {
				if f.Kind() == protoreflect.StringKind && strings.Contains(string(f.Name()), word) && f.Name() != "next_page_token" {
					t.Errorf("%s: is it a secret? secrets are fields of bytes", f.FullName())
				}
			}
			if f.Kind() == protoreflect.MessageKind {
				walk(f.Message())
			}
		}
	}
	for _, m := range []proto.Message{&pb.TargetWanted{}, &pb.InitiatorWanted{}, &pb.ListManagersResponse{}, &pb.Upgrade{}, &pb.GetFiguresResponse{}} {
		walk(m.ProtoReflect().Descriptor())
	}
	if len(seen) < 15 {
		t.Errorf("only %d messages were looked at", len(seen))
	}
}

// An agent that is away, that knows no support bundles, or that sends what it must not, costs its own
// files.
func TestABundleSaysWhichAgentsDidNotAnswer(t *testing.T) {
	r := newRig(t)
	r.registered(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r.withAgents(ctx, "t1", "t2")
	r.answers(ctx, "t1", support.File{Name: "doctor.txt", Data: bytes.Repeat([]byte("fine\n"), 40_000)}, support.File{Name: "dm.txt", Missing: "no device mapper"})
	packed := r.bundled(ctx)
	files, b := unpacked(t, packed), readBundle(t, packed)
	if got := files["nodes/t1/target/doctor.txt"]; len(got) != 200_000 {
		t.Errorf("t1's doctor has %d bytes, want 200000", len(got))
	}
	for what, why := range map[string]string{
		"nodes/t1/target/dm.txt": "no device mapper",
		"nodes/t2/target/":       "does not answer questions of support bundles: it is of an earlier version",
		"nodes/c1/initiator/":    "does not answer questions of support bundles",
		"manager/log.txt":        "does not keep its log",
	} {
		if got := missing(b, what); !strings.Contains(got, why) {
			t.Errorf("%s is missing because %q, want %q; there are %v", what, got, why, b.Missing)
		}
	}
	for _, bad := range []string{"../x", "a/b", "wanted.json", "X"} {
		q := &question{number: 1, most: 1 << 20, done: make(chan struct{})}
		q.take(&pb.SupportAnswer{Number: 1, File: bad, Data: []byte("x")})
		q.take(&pb.SupportAnswer{Number: 1, File: "good", Data: []byte("x")})
		q.take(&pb.SupportAnswer{Number: 1, Last: true})
		q.take(&pb.SupportAnswer{Number: 1, Last: true})
		if len(q.files) != 0 || q.wrong == "" {
			t.Errorf("file %q was taken: %v, %q", bad, q.files, q.wrong)
		}
	}
	q := &question{number: 1, most: 3, done: make(chan struct{})}
	for range 4 {
		q.take(&pb.SupportAnswer{Number: 1, File: "a", Data: []byte("x")})
	}
	if len(q.files[0].data) != 3 || q.wrong == "" {
		t.Errorf("of an endless answer %v was taken, %q", q.files, q.wrong)
	}
}

// keptConn connects to a bundle.
func keptConn(t testing.TB, k *Kept) *grpc.ClientConn {
	t.Helper()
	conn, stop := serveWith(t, k.Register, k.Guard()...)
	t.Cleanup(stop)
	return conn
}

// A bundle answers what the manager answers, and refuses the rest.
func TestABundleAnswersAsTheManagerDid(t *testing.T) {
	r := newRig(t)
	r.registered(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r.withAgents(ctx, "t1", "t2", "t3")
	r.attachNew(ctx, "db1")
	k, err := Keep(readBundle(t, r.bundled(ctx)))
	if err != nil {
		t.Fatal(err)
	}
	conn := keptConn(t, k)
	kept := pages.Client(conn)
	for name, ask := range map[string]func(pb.ManagerClient) (proto.Message, error){
		"volumes": func(c pb.ManagerClient) (proto.Message, error) { return c.ListVolumes(ctx, &pb.ListVolumesRequest{}) },
		"volume": func(c pb.ManagerClient) (proto.Message, error) {
			return c.GetVolume(ctx, &pb.GetVolumeRequest{Volume: "db1"})
		},
		"drives": func(c pb.ManagerClient) (proto.Message, error) { return c.ListDrives(ctx, &pb.ListDrivesRequest{}) },
		"devices": func(c pb.ManagerClient) (proto.Message, error) {
			return c.ListDevices(ctx, &pb.ListDevicesRequest{Node: "t1"})
		},
		"attachments": func(c pb.ManagerClient) (proto.Message, error) {
			return c.ListAttachments(ctx, &pb.ListAttachmentsRequest{})
		},
		"pools":  func(c pb.ManagerClient) (proto.Message, error) { return c.ListPools(ctx, &pb.ListPoolsRequest{}) },
		"events": func(c pb.ManagerClient) (proto.Message, error) { return c.ListEvents(ctx, &pb.ListEventsRequest{}) },
		"explain": func(c pb.ManagerClient) (proto.Message, error) {
			return c.ExplainVolume(ctx, &pb.ExplainVolumeRequest{Volume: "db1"})
		},
		"status":  func(c pb.ManagerClient) (proto.Message, error) { return c.GetStatus(ctx, &pb.GetStatusRequest{}) },
		"upgrade": func(c pb.ManagerClient) (proto.Message, error) { return c.GetUpgrade(ctx, &pb.GetUpgradeRequest{}) },
		"what if": func(c pb.ManagerClient) (proto.Message, error) {
			return c.WhatIf(ctx, &pb.WhatIfRequest{Nodes: []string{"t1"}})
		},
		"no volume": func(c pb.ManagerClient) (proto.Message, error) {
			return c.GetVolume(ctx, &pb.GetVolumeRequest{Volume: "x"})
		},
	} {
		want, wantErr := ask(r.ManagerClient)
		got, gotErr := ask(kept)
		if !proto.Equal(got, want) || status.Code(gotErr) != status.Code(wantErr) {
			t.Errorf("%s: the bundle answers %v, %v\nthe manager %v, %v", name, got, gotErr, want, wantErr)
		}
	}
	refused := 0
	protoregistry.GlobalFiles.RangeFilesByPackage("weft.v1", func(f protoreflect.FileDescriptor) bool {
		for s := range f.Services().Len() {
			service := f.Services().Get(s)
			for i := range service.Methods().Len() {
				m := service.Methods().Get(i)
				method := fmt.Sprintf("/%s/%s", service.FullName(), m.Name())
				answered := false
				for _, can := range keptMethods {
					answered = answered || can == method
				}
				if answered || m.IsStreamingClient() || m.IsStreamingServer() || service.Name() != "Manager" && service.Name() != "Identities" {
					continue
				}
				err := conn.Invoke(ctx, method, &pb.GetStatusRequest{}, &pb.Status{})
				if status.Code(err) != codes.FailedPrecondition || !strings.Contains(err.Error(), "a support bundle cannot do that") {
					t.Errorf("%s: %v", method, err)
				}
				refused++
			}
		}
		return true
	})
	if refused < 30 {
		t.Errorf("only %d methods were refused", refused)
	}
	if watch, err := kept.WatchEvents(ctx, &pb.WatchEventsRequest{}); err != nil {
		t.Error(err)
	} else if _, err := watch.Recv(); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a watch of a bundle: %v", err)
	}
}

// A bundle may hold anything: an error is an answer, a panic or a hang is none.
func FuzzKeep(f *testing.F) {
	r := &rig{t: f, dir: initialized(f)}
	r.start()
	defer func() { r.stop() }()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	r.withAgents(ctx, "t1", "t2", "t3")
	r.attachNew(ctx, "db1")
	files := unpacked(f, r.bundled(ctx))
	f.Add(files[bundle.Records], files[bundle.Observed], files[bundle.Manager])
	f.Add([]byte{}, []byte("{}"), []byte("{}"))
	f.Fuzz(func(t *testing.T, records, observed, manager []byte) {
		var out bytes.Buffer
		w := bundle.NewWriter(&out, bundle.Manifest{})
		for name, text := range map[string][]byte{bundle.Records: records, bundle.Observed: observed, bundle.Manager: manager} {
			if err := w.Add(name, text); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		k, err := Keep(readBundle(t, out.Bytes()))
		if err != nil {
			return
		}
		conn, stop := serveWith(t, k.Register, k.Guard()...)
		defer stop()
		c := pages.Client(conn)
		_, _ = c.GetStatus(ctx, &pb.GetStatusRequest{})
		_, _ = c.GetUpgrade(ctx, &pb.GetUpgradeRequest{})
		_, _ = c.ListPools(ctx, &pb.ListPoolsRequest{})
		_, _ = c.ListDrives(ctx, &pb.ListDrivesRequest{})
		_, _ = c.ListAttachments(ctx, &pb.ListAttachmentsRequest{})
		_, _ = c.ListEvents(ctx, &pb.ListEventsRequest{})
		nodes, _ := c.ListNodes(ctx, &pb.ListNodesRequest{})
		for _, n := range nodes.GetNodes() {
			_, _ = c.WhatIf(ctx, &pb.WhatIfRequest{Nodes: []string{n.Name}})
			_, _ = c.ListDevices(ctx, &pb.ListDevicesRequest{Node: n.Name})
		}
		volumes, _ := c.ListVolumes(ctx, &pb.ListVolumesRequest{})
		for _, v := range volumes.GetVolumes() {
			_, _ = c.ExplainVolume(ctx, &pb.ExplainVolumeRequest{Volume: v.Name})
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"net"
	"net/url"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// guarded runs a server of the Manager service, which implements nothing, on a listener.
func guarded(t *testing.T, files TLSFiles, guard access.Guard, listener net.Listener) {
	t.Helper()
	server, err := NewServer(files, NewMetrics(), guard)
	if err != nil {
		t.Fatal(err)
	}
	pb.RegisterManagerServer(server, pb.UnimplementedManagerServer{})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- Serve(discard, listener, server).Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("serve = %v, want nil", err)
		}
	})
}

// Who a peer is follows from its connection: a certificate of a cluster names a role, one of an
// operator's own authority that names none may do everything, and so may who opens the socket.
func TestTheConnectionSaysWhoCalls(t *testing.T) {
	ours, dir := newAuthority(t), t.TempDir()
	cluster := block.ClusterID{UUID: block.UUID{1}}
	named := func(who access.Identity) TLSFiles {
		return ours.issue(t, t.TempDir(), "node", who.URI())
	}
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	socket, err := ListenUnix(filepath.Join(dir, "manager.sock"))
	if err != nil {
		t.Fatal(err)
	}
	var refused []access.Identity
	guard := access.Guard{Cluster: cluster, Refused: func(_ context.Context, who access.Identity, _ string) { refused = append(refused, who) }}
	files := ours.issue(t, dir, "manager")
	guarded(t, files, guard, tcp)
	guarded(t, files, guard, socket)
	plain, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	guarded(t, TLSFiles{}, guard, plain)

	overTLS, allowed := tcp.Addr().String(), codes.Unimplemented
	for _, c := range []struct {
		what    string
		address string
		files   TLSFiles
		want    codes.Code
	}{
		{"an admin", overTLS, named(access.Identity{Kind: access.Person, Cluster: cluster, Name: "ada", Role: access.Admin}), allowed},
		{"a viewer", overTLS, named(access.Identity{Kind: access.Person, Cluster: cluster, Name: "ada", Role: access.Viewer}), codes.PermissionDenied},
		{"an admin of another cluster", overTLS, named(access.Identity{Kind: access.Person, Cluster: block.ClusterID{UUID: block.UUID{2}}, Name: "ada", Role: access.Admin}), codes.PermissionDenied},
		{"a target", overTLS, named(access.Identity{Kind: access.Node, Cluster: cluster, Name: "t1", Role: access.Target}), codes.PermissionDenied},
		{"a certificate without a role", overTLS, ours.issue(t, t.TempDir(), "legacy"), allowed},
		{"a certificate of another SPIFFE domain", overTLS, ours.issue(t, t.TempDir(), "other", &url.URL{Scheme: "spiffe", Host: "example.org", Path: "/ns/a/sa/b"}), allowed},
		{"the socket", Unix + filepath.Join(dir, "manager.sock"), TLSFiles{}, allowed},
		{"plain TCP", plain.Addr().String(), TLSFiles{}, allowed},
	} {
		conn, err := Dial(c.address, c.files)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		_, err = pb.NewManagerClient(conn).ConfirmNodeDead(ctx, &pb.ConfirmNodeDeadRequest{Node: "t1"})
		if got := status.Code(err); got != c.want {
			t.Errorf("%s: %v, want %v", c.what, err, c.want)
		}
		cancel()
		conn.Close()
	}
	if len(refused) != 3 {
		t.Errorf("the guard has told of %v, want three refusals", refused)
	}
}

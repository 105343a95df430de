// SPDX-License-Identifier: Apache-2.0

package member

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/managers"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/proto/pki"
	"weft.dev/weft/volmgr"
)

var quiet = slog.New(slog.DiscardHandler)

// closed is a manager of a closed cluster whose keys were made some days ago.
type closed struct {
	t       *testing.T
	cluster block.ClusterID
	early   *pki.Keyring // as it was then
	address string
	vouch   volmgr.Voucher
}

const daysAgo = 5 * 24 * time.Hour

func newClosed(t *testing.T) *closed {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "store")
	id, err := volmgr.Init(volmgr.Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	c := &closed{t: t, cluster: id}
	if c.early, err = pki.CreateKeyring(volmgr.KeysOf(dir), id, "m1", func() time.Time { return time.Now().Add(-daysAgo) }); err != nil {
		t.Fatal(err)
	}
	keys, err := pki.OpenKeyring(volmgr.KeysOf(dir), time.Now)
	if err != nil {
		t.Fatal(err)
	}
	m, err := volmgr.New(volmgr.Config{Dir: dir, Keys: keys, Vouch: func(ctx context.Context, token string) (string, []access.Role, error) { return c.vouch(ctx, token) }})
	if err != nil {
		t.Fatal(err)
	}
	server, err := daemon.NewServer(daemon.TLSFiles{Identity: keys.Identity()}, daemon.NewMetrics(), access.Guard{Cluster: id})
	if err != nil {
		t.Fatal(err)
	}
	m.Register(server)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c.address = listener.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	var group sync.WaitGroup
	for _, run := range []func(context.Context) error{m.Run, daemon.Serve(quiet, listener, server).Run} {
		group.Go(func() {
			if err := run(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(func() {
		cancel()
		group.Wait()
		m.Close()
	})
	return c
}

// joinedThen is the credential of a node that joined when the keys were made.
func (c *closed) joinedThen(who access.Identity) daemon.TLSFiles {
	c.t.Helper()
	who.Cluster = c.cluster
	credential, err := pki.NewCredential()
	if err != nil {
		c.t.Fatal(err)
	}
	csr, err := credential.Request()
	if err != nil {
		c.t.Fatal(err)
	}
	request, err := pki.ParseRequest(csr)
	if err != nil {
		c.t.Fatal(err)
	}
	authority := c.early.Authorities()[0]
	cert, err := c.early.Issue(pki.Hash(authority), who, request, time.Now().Add(-daysAgo))
	if err != nil {
		c.t.Fatal(err)
	}
	joined, err := credential.Renewed(cert.Raw, [][]byte{authority.Raw})
	if err != nil {
		c.t.Fatal(err)
	}
	files := daemon.TLSFiles{Identity: filepath.Join(c.t.TempDir(), "state", "identity.pem")}
	if err := joined.Write(files.Identity); err != nil {
		c.t.Fatal(err)
	}
	return files
}

func (c *closed) status(conn *managers.Conn) error {
	ctx, cancel := context.WithTimeout(c.t.Context(), 10*time.Second)
	defer cancel()
	_, err := pb.NewManagerClient(conn).GetStatus(ctx, &pb.GetStatusRequest{})
	return err
}

// An agent renews its certificate when two thirds of its life have passed, by itself. Its
// connection goes on, and new ones show the new certificate.
func TestACertificateIsRenewedWithoutARestart(t *testing.T) {
	c := newClosed(t)
	files := c.joinedThen(access.Identity{Kind: access.Node, Name: "t1", Role: access.Target})
	before, err := pki.ReadCredential(files.Identity)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := daemon.Dial(c.address, files)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := c.status(conn); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- Renewing(quiet, c.address, files).Run(ctx) }()
	after := before
	for deadline := time.Now().Add(20 * time.Second); !after.Cert.NotAfter.After(before.Cert.NotAfter); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the certificate still ends on %v", after.Cert.NotAfter)
		}
		if after, err = pki.ReadCredential(files.Identity); err != nil {
			t.Fatal(err) // a reader never finds half a file
		}
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("Renewing = %v", err)
	}
	if after.Identity() != before.Identity() {
		t.Errorf("%v became %v", before.Identity(), after.Identity())
	}
	if info, err := os.Stat(files.Identity); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the credential has mode %v, %v", info.Mode(), err)
	}
	again, err := daemon.Dial(c.address, files)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if err := errors.Join(c.status(conn), c.status(again)); err != nil {
		t.Errorf("after the renewal: %v", err)
	}
}

// A pod joins as the node that it runs on, when the cluster's authority has been published. It shows
// its token to no manager of another cluster, and joins as no other node.
func TestAPodJoinsAsItsNode(t *testing.T) {
	c := newClosed(t)
	var asked atomic.Int32
	c.vouch = func(_ context.Context, token string) (string, []access.Role, error) {
		if asked.Add(1); token != "of the pod" {
			return "", nil, volmgr.ErrNotVouched
		}
		return "n1", []access.Role{access.Target}, nil
	}
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	enter := func(node string, role access.Role) error {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := Entry{Managers: c.address, Path: filepath.Join(t.TempDir(), "identity.pem"), TokenFile: Kubernetes, Account: dir, Role: role, Node: node, Log: quiet}.Enter(ctx)
		return err
	}
	write("token", "of the pod\n")
	if err := enter("n1", access.Target); err == nil || asked.Load() > 0 {
		t.Errorf("before the authority is published: %v, and the token was shown %d times", err, asked.Load())
	}
	write("authority", strings.Repeat("0", 64))
	if err := enter("n1", access.Target); err == nil || asked.Load() > 0 {
		t.Errorf("with the authority of another cluster: %v, and the token was shown %d times", err, asked.Load())
	}
	write("authority", strings.Repeat("0", 64)+"\n"+pki.Hash(c.early.Authorities()[0])+"\n")
	if err := enter("n1", access.Target); err != nil {
		t.Errorf("as its node: %v", err)
	}
	if err := enter("n2", access.Target); err == nil || !strings.Contains(err.Error(), "is of node n1 (target)") {
		t.Errorf("as another node: %v", err)
	}
	if err := enter("n1", access.Initiator); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("in a role that its account has not: %v", err)
	}
	write("token", "of another pod")
	if err := enter("n1", access.Target); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("with a token that Kubernetes does not accept: %v", err)
	}
}

// A person's certificate is renewed by commands, and contexts stay apart.
func TestContexts(t *testing.T) {
	t.Setenv("XDG_CONFIG_HOME", t.TempDir())
	contexts, err := ReadContexts()
	if err != nil {
		t.Fatal(err)
	}
	if _, _, ok, err := contexts.Find(""); ok || err != nil {
		t.Errorf("nobody has logged in, and a context is in use: %v, %v", ok, err)
	}
	if _, _, _, err := contexts.Find("lab"); err == nil {
		t.Error("there is a context lab")
	}
	contexts.Contexts["lab"], contexts.Contexts["home"] = Context{Managers: "m1:4480"}, Context{Managers: "h1:4480"}
	if err := contexts.Use("lab"); err != nil {
		t.Fatal(err)
	}
	if contexts, err = ReadContexts(); err != nil || contexts.Current != "lab" {
		t.Fatalf("the context in use is %q, %v", contexts.Current, err)
	}
	for name, want := range map[string]string{"": "m1:4480", "home": "h1:4480"} {
		got, files, ok, err := contexts.Find(name)
		if err != nil || !ok || got.Managers != want || filepath.Dir(files.Identity) != filepath.Join(os.Getenv("XDG_CONFIG_HOME"), "weft") {
			t.Errorf("Find(%q) = %v, %v, %v, %v", name, got, files, ok, err)
		}
	}
	info, err := os.Stat(filepath.Join(os.Getenv("XDG_CONFIG_HOME"), "weft/contexts.json"))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("contexts.json has mode %v, %v", info.Mode(), err)
	}
	if err := contexts.LogOut("lab"); err != nil || contexts.Current != "" {
		t.Errorf("after logging out %q is in use, %v", contexts.Current, err)
	}
	c := newClosed(t)
	files := c.joinedThen(access.Identity{Kind: access.Person, Name: "ada", Role: access.Viewer})
	before, err := pki.ReadCredential(files.Identity)
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		Refresh(t.Context(), c.address, files) // the manager may have to record its authority first
		if after, err := pki.ReadCredential(files.Identity); err == nil && after.Cert.NotAfter.After(before.Cert.NotAfter) {
			break
		}
	}
	if after, err := pki.ReadCredential(files.Identity); err != nil || !after.Cert.NotAfter.After(before.Cert.NotAfter) || after.Identity() != before.Identity() {
		t.Errorf("a command did not renew the certificate: %v, %v", after.Cert.NotAfter, err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/proto/pki"
	"weft.dev/weft/volmgr/cluster"
)

// secured is a manager of a closed cluster: it answers over TLS, and a test sets its clock.
type secured struct {
	t    *testing.T
	dir  string
	keys *pki.Keyring
	m    *Manager
	at   string
	log  lockedBuffer
	stop func()

	mu  sync.Mutex
	day time.Time
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (s *secured) now() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.day
}

func (s *secured) pass(d time.Duration) {
	s.mu.Lock()
	s.day = s.day.Add(d)
	s.mu.Unlock()
	if _, err := s.m.step(s.t.Context(), cluster.Tick{}); err != nil {
		s.t.Fatal(err)
	}
	if err := s.m.keepKeysOnce(s.t.Context()); err != nil {
		s.t.Fatal(err)
	}
}

func newSecured(t *testing.T) *secured {
	t.Helper()
	s := &secured{t: t, dir: filepath.Join(t.TempDir(), "store"), day: time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)}
	id, err := Init(Config{Dir: s.dir})
	if err != nil {
		t.Fatal(err)
	}
	if s.keys, err = pki.CreateKeyring(KeysOf(s.dir), id, "m1", s.now); err != nil {
		t.Fatal(err)
	}
	s.start()
	t.Cleanup(func() { s.stop() })
	return s
}

func (s *secured) start() {
	s.t.Helper()
	var err error
	if s.m, err = New(Config{Dir: s.dir, Keys: s.keys, Now: s.now, Log: slog.New(slog.NewTextHandler(&s.log, nil))}); err != nil {
		s.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		s.t.Fatal(err)
	}
	s.at = listener.Addr().String()
	guard := s.m.Guard()
	server := grpc.NewServer(grpc.Creds(ofKeyring{insecure.NewCredentials(), s}), grpc.UnaryInterceptor(guard.Unary), grpc.StreamInterceptor(guard.Stream))
	s.m.Register(server)
	var group sync.WaitGroup
	group.Go(func() {
		if err := s.m.Run(ctx); err != nil {
			s.t.Error(err)
		}
	})
	group.Go(func() { _ = server.Serve(listener) })
	s.stop = sync.OnceFunc(func() {
		cancel()
		server.Stop()
		group.Wait()
		if err := s.m.Close(); err != nil {
			s.t.Error(err)
		}
	})
	if err := s.m.keepKeysOnce(ctx); err != nil {
		s.t.Fatal(err)
	}
}

// ofKeyring are the credentials of the server: those that its keyring holds now.
type ofKeyring struct {
	credentials.TransportCredentials
	s *secured
}

func (k ofKeyring) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	c, err := pki.ReadCredential(k.s.keys.Identity())
	if err != nil {
		return nil, nil, err
	}
	secure, info, err := credentials.NewTLS(c.Server(k.s.now)).ServerHandshake(conn)
	if err != nil {
		return nil, nil, err
	}
	return secure, pki.Peer(info.(credentials.TLSInfo).State), nil
}

func (k ofKeyring) Clone() credentials.TransportCredentials { return k }

// call connects anew and calls, as the holder of a credential or of a token.
func (s *secured) call(creds credentials.TransportCredentials, call func(context.Context, *grpc.ClientConn) error) error {
	s.t.Helper()
	conn, err := grpc.NewClient(s.at, grpc.WithTransportCredentials(creds))
	if err != nil {
		s.t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(s.t.Context(), 10*time.Second)
	defer cancel()
	return call(ctx, conn)
}

func (s *secured) as(c *pki.Credential, calls func(context.Context, *grpc.ClientConn) error) error {
	s.t.Helper()
	return s.call(credentials.NewTLS(c.Client(s.now)), calls)
}

// token is one that the manager's own user has made.
func (s *secured) token(subject *pb.Subject) pki.Token {
	s.t.Helper()
	made, err := identities{m: s.m}.CreateToken(s.t.Context(), &pb.CreateTokenRequest{Subject: subject})
	if err != nil {
		s.t.Fatal(err)
	}
	token, err := pki.ParseToken(made.Token)
	if err != nil {
		s.t.Fatal(err)
	}
	return token
}

// join asks for a certificate of a credential's key.
func (s *secured) join(token pki.Token, c *pki.Credential) (joined *pki.Credential, err error) {
	s.t.Helper()
	request, err := c.Request()
	if err != nil {
		s.t.Fatal(err)
	}
	err = s.call(credentials.NewTLS(token.Client(s.now)), func(ctx context.Context, conn *grpc.ClientConn) error {
		got, err := pb.NewIdentitiesClient(conn).Join(ctx, &pb.JoinRequest{TokenId: token.ID, Proof: token.Proof(), CertificateRequest: request})
		if err == nil {
			joined, err = c.Renewed(got.Certificate, got.Authorities)
		}
		return err
	})
	return joined, err
}

func (s *secured) renew(c *pki.Credential) *pki.Credential {
	s.t.Helper()
	next, err := pki.NewCredential()
	if err != nil {
		s.t.Fatal(err)
	}
	request, err := next.Request()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := s.as(c, func(ctx context.Context, conn *grpc.ClientConn) error {
		got, err := pb.NewIdentitiesClient(conn).Renew(ctx, &pb.RenewRequest{CertificateRequest: request})
		if err == nil {
			next, err = next.Renewed(got.Certificate, got.Authorities)
		}
		return err
	}); err != nil {
		s.t.Fatal(err)
	}
	return next
}

func (s *secured) member(subject *pb.Subject) *pki.Credential {
	s.t.Helper()
	c, err := pki.NewCredential()
	if err == nil {
		c, err = s.join(s.token(subject), c)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

func reads(ctx context.Context, conn *grpc.ClientConn) error {
	_, err := pb.NewManagerClient(conn).GetStatus(ctx, &pb.GetStatusRequest{})
	return err
}

var targetT1 = &pb.Subject{Name: "t1", Role: "target"}

// A token is good for the first key that shows it, also after a restart of the manager. Who holds
// that key may ask again.
func TestATokenLetsOneKeyIn(t *testing.T) {
	s := newSecured(t)
	token := s.token(targetT1)
	first, err := pki.NewCredential()
	if err != nil {
		t.Fatal(err)
	}
	second, err := pki.NewCredential()
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		got, err := s.join(token, first)
		if err != nil {
			t.Fatal(err)
		}
		if who := got.Identity(); who.Name != "t1" || who.Role != access.Target || who.Cluster != s.m.ClusterID() {
			t.Errorf("t1 has joined as %+v", who)
		}
		if err := s.as(got, reads); err != nil {
			t.Errorf("GetStatus as t1: %v", err)
		}
	}
	s.stop()
	s.start()
	if _, err := s.join(token, second); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("another key with the same token: %v", err)
	}
	if _, err := s.join(token, first); err != nil {
		t.Errorf("the same key after a restart: %v", err)
	}
	s.pass(16 * time.Minute)
	if _, err := s.join(token, first); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("the same key when the token has expired: %v", err)
	}
	wrong := s.token(targetT1)
	forged := pki.NewToken(wrong.Authority)
	forged.ID = wrong.ID
	if _, err := s.join(forged, second); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a wrong secret: %v", err)
	}
}

// Who has no certificate can call nothing but Join.
func TestAStrangerOnlyJoins(t *testing.T) {
	s := newSecured(t)
	nobody := credentials.NewTLS(s.token(targetT1).Client(s.now)) // no certificate
	for what, call := range map[string]func(context.Context, *grpc.ClientConn) error{
		"GetStatus": reads,
		"DeleteVolume": func(ctx context.Context, conn *grpc.ClientConn) error {
			_, err := pb.NewManagerClient(conn).DeleteVolume(ctx, &pb.DeleteVolumeRequest{Volume: "db1"})
			return err
		},
		"Backup": func(ctx context.Context, conn *grpc.ClientConn) error {
			stream, err := pb.NewManagerClient(conn).Backup(ctx, &pb.BackupRequest{})
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		},
		"Renew": func(ctx context.Context, conn *grpc.ClientConn) error {
			_, err := pb.NewIdentitiesClient(conn).Renew(ctx, &pb.RenewRequest{})
			return err
		},
		"GetKeys": func(ctx context.Context, conn *grpc.ClientConn) error {
			_, err := pb.NewKeysClient(conn).GetKeys(ctx, &pb.GetKeysRequest{})
			return err
		},
	} {
		if err := s.call(nobody, call); status.Code(err) != codes.Unauthenticated {
			t.Errorf("%s by a stranger: %v", what, err)
		}
	}
	admin := s.member(&pb.Subject{Person: true, Name: "ada", Role: "admin"})
	if err := s.as(admin, func(ctx context.Context, conn *grpc.ClientConn) error {
		_, err := pb.NewKeysClient(conn).GetKeys(ctx, &pb.GetKeysRequest{})
		return err
	}); status.Code(err) != codes.PermissionDenied {
		t.Errorf("an admin asks for the authority's key: %v", err)
	}
	manager := s.member(&pb.Subject{Name: "m2", Role: "manager"})
	if err := s.as(manager, func(ctx context.Context, conn *grpc.ClientConn) error {
		_, err := pb.NewKeysClient(conn).GetKeys(ctx, &pb.GetKeysRequest{})
		return err
	}); err != nil {
		t.Errorf("another manager asks for the authority's key: %v", err)
	}
}

// The whole of a rotation: a member that renews in time is let in at every moment, a new one can
// join at every moment, and in the end a certificate of the old authority is worth nothing.
func TestARotationFromEndToEnd(t *testing.T) {
	s := newSecured(t)
	first := s.member(targetT1)
	old := first
	authorities := func() []*pb.Authority {
		list, err := identities{m: s.m}.ListAuthorities(t.Context(), &pb.ListAuthoritiesRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return list.Authorities
	}
	was := authorities()[0].Hash
	if _, err := (identities{m: s.m}).RotateAuthority(t.Context(), &pb.RotateAuthorityRequest{}); err != nil {
		t.Fatal(err)
	}
	if _, err := (identities{m: s.m}).RotateAuthority(t.Context(), &pb.RotateAuthorityRequest{}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a second rotation during the first: %v", err)
	}
	signed := map[string]bool{}
	days := 0
	for ; days < 40 && (len(authorities()) > 1 || days == 0); days++ {
		for range 2 {
			s.pass(12 * time.Hour)
			if !s.now().Before(first.RenewAt()) {
				first = s.renew(first)
			}
			if err := s.as(first, reads); err != nil {
				t.Fatalf("day %d: a member that renews in time: %v", days, err)
			}
		}
		signed[authorities()[0].Hash] = true
		if err := s.as(s.member(&pb.Subject{Name: "h1", Role: "initiator"}), reads); err != nil {
			t.Fatalf("day %d: a new member: %v", days, err)
		}
	}
	if all := authorities(); len(all) != 1 || all[0].Hash == was || len(signed) != 2 {
		t.Fatalf("after %d days the authorities are %v", days, all)
	}
	t.Logf("the rotation took %d days", days)
	if err := s.as(old, reads); err == nil {
		t.Error("a certificate of the old authority is let in")
	}
	// The old key is gone from the manager's file, too.
	if got := s.keys.Authorities(); len(got) != 1 || pki.Hash(got[0]) == was {
		t.Errorf("the manager has the keys of %d authorities", len(got))
	}
}

// A rotation in a cluster whose managers alone have had certificates for a week: what managers have
// signed for themselves counts, or the old authority would go while they still show its certificates.
func TestARotationWaitsForTheManagers(t *testing.T) {
	s := newSecured(t)
	manager := s.member(&pb.Subject{Name: "m2", Role: "manager"})
	for range 20 {
		s.pass(12 * time.Hour)
		if !s.now().Before(manager.RenewAt()) { // as a manager does itself, with the key
			manager = s.signedHere(manager.Identity())
		}
	}
	if _, err := (identities{m: s.m}).RotateAuthority(t.Context(), &pb.RotateAuthorityRequest{}); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		s.pass(time.Second)
	}
	if err := s.as(manager, reads); err != nil {
		t.Errorf("the other manager, seconds after a rotation began: %v", err)
	}
}

// signedHere is a credential that a manager makes with the authority's key, and tells nobody.
func (s *secured) signedHere(who access.Identity) *pki.Credential {
	s.t.Helper()
	c, err := pki.NewCredential()
	if err != nil {
		s.t.Fatal(err)
	}
	der, err := c.Request()
	if err != nil {
		s.t.Fatal(err)
	}
	request, err := pki.ParseRequest(der)
	if err != nil {
		s.t.Fatal(err)
	}
	signs := s.keys.Authorities()[0]
	cert, err := s.keys.Issue(pki.Hash(signs), who, request, s.now())
	if err == nil {
		c, err = c.Renewed(cert.Raw, [][]byte{signs.Raw})
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

// A manager that has no leader for longer than its certificate is good renews that with its own key:
// otherwise the others could not reach it when they come back.
func TestAManagerWithoutALeaderKeepsItsCertificate(t *testing.T) {
	day := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	now := func() time.Time { return day }
	id := block.ClusterID{UUID: block.UUID{1}}
	dir := filepath.Join(t.TempDir(), "store")
	if _, err := Join(Config{Dir: dir}, id); err != nil {
		t.Fatal(err)
	}
	keys, err := pki.CreateKeyring(KeysOf(dir), id, "m2", now)
	if err != nil {
		t.Fatal(err)
	}
	m, err := New(Config{Dir: dir, Now: now, Quorum: &Quorum{Address: "m2:1", Dial: func(string) (*grpc.ClientConn, error) { return nil, errors.New("nobody is there") }}})
	if err != nil {
		t.Fatal(err)
	}
	m.cfg.Keys = keys
	running(t, m, func() {})
	day = day.Add(5 * pki.Life)
	if err := m.keepKeysOnce(t.Context()); err != nil {
		t.Fatal(err)
	}
	if c, err := pki.ReadCredential(keys.Identity()); err != nil || c.Expired(day) {
		t.Errorf("after %v alone its certificate has ended: %v", 5*pki.Life, err)
	}
}

// A manager that begins a rotation and leads no more a moment later is the only one with the new key.
func TestAManagerThatLeadsWithoutAKeySaysSo(t *testing.T) {
	s := newSecured(t)
	next, err := pki.NewAuthority(s.m.cluster, s.now())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.m.step(t.Context(), cluster.AddAuthority{Hash: next.Hash(), Cert: next.Cert.Raw}); err != nil {
		t.Fatal(err)
	}
	if err := s.m.keepKeysOnce(t.Context()); err == nil || !strings.Contains(err.Error(), next.Hash()) || !strings.Contains(err.Error(), "weft volmgr transfer") {
		t.Errorf("without the key of an authority it says %v", err)
	}
}

// An authority whose key is lost everywhere, or was rotated after the backup that is restored, is
// replaced by the one that "weft ca init" has made.
func TestALostAuthorityIsReplaced(t *testing.T) {
	s := newSecured(t)
	old := s.member(targetT1)
	s.pass(time.Minute)
	s.stop()
	if err := os.RemoveAll(KeysOf(s.dir)); err != nil {
		t.Fatal(err)
	}
	id, err := ClusterOf(s.dir)
	if err == nil {
		s.keys, err = pki.CreateKeyring(KeysOf(s.dir), id, "m1", s.now)
	}
	if err != nil {
		t.Fatal(err)
	}
	s.start()
	if err := s.as(old, reads); err == nil {
		t.Error("a certificate of the lost authority is let in")
	}
	if err := s.as(s.member(targetT1), reads); err != nil {
		t.Errorf("a member that joins again: %v", err)
	}
	s.pass(48 * time.Hour)
	if got := s.keys.Authorities(); len(got) != 1 {
		t.Errorf("%d keys are kept, want the new one", len(got))
	}
}

// No secret is in the store, in a backup, in an event or in the log.
func TestSecretsAreInNoRecord(t *testing.T) {
	s := newSecured(t)
	token := s.token(&pb.Subject{Person: true, Name: "ada", Role: "admin"})
	c, err := pki.NewCredential()
	if err != nil {
		t.Fatal(err)
	}
	admin, err := s.join(token, c)
	if err != nil {
		t.Fatal(err)
	}
	var backup bytes.Buffer
	if err := s.as(admin, func(ctx context.Context, conn *grpc.ClientConn) error {
		stream, err := pb.NewManagerClient(conn).Backup(ctx, &pb.BackupRequest{})
		for err == nil {
			var part *pb.BackupChunk
			if part, err = stream.Recv(); err == nil {
				backup.Write(part.Data)
			}
		}
		if err.Error() == "EOF" {
			return nil
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	s.stop()
	keys, err := s.keys.Export()
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(keys)
	secrets := map[string][]byte{"the token's secret": token.Proof(), "the authority's key": block.Bytes[36:68]}
	hold := map[string][]byte{"the log": []byte(s.log.String()), "the backup": backup.Bytes()}
	filepath.WalkDir(s.dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() {
			if hold[path], err = os.ReadFile(path); err != nil {
				t.Error(err)
			}
		}
		return nil
	})
	if len(hold) < 4 || !strings.Contains(s.log.String(), "token.used") || backup.Len() == 0 {
		t.Fatalf("looked at %d places, log:\n%s", len(hold), s.log.String())
	}
	for what, secret := range secrets {
		for where, text := range hold {
			for _, form := range []string{string(secret), hex.EncodeToString(secret), base64.StdEncoding.EncodeToString(secret)[:40], base64.RawURLEncoding.EncodeToString(secret)[:40]} {
				if bytes.Contains(text, []byte(form)) {
					t.Errorf("%s is in %s", what, where)
				}
			}
		}
	}
}

// A person's own token is for the same name and role. Who is no person of the cluster gets none.
func TestAPersonMakesATokenForThemselvesAlone(t *testing.T) {
	s := newSecured(t)
	vic := s.member(&pb.Subject{Person: true, Name: "vic", Role: "viewer"})
	own := func(c *pki.Credential) (token pki.Token, err error) {
		err = s.as(c, func(ctx context.Context, conn *grpc.ClientConn) error {
			made, err := pb.NewIdentitiesClient(conn).CreateOwnToken(ctx, &pb.CreateOwnTokenRequest{})
			if err == nil {
				token, err = pki.ParseToken(made.Token)
			}
			return err
		})
		return token, err
	}
	token, err := own(vic)
	if err != nil {
		t.Fatal(err)
	}
	key, err := pki.NewCredential()
	if err != nil {
		t.Fatal(err)
	}
	if again, err := s.join(token, key); err != nil || again.Identity() != vic.Identity() {
		t.Errorf("the token is for %v: %v; want %v", again.Identity(), err, vic.Identity())
	}
	if _, err := own(s.member(targetT1)); status.Code(err) != codes.PermissionDenied {
		t.Errorf("a node makes a token for itself: %v", err)
	}
	if _, err := (identities{m: s.m}).CreateOwnToken(t.Context(), &pb.CreateOwnTokenRequest{}); status.Code(err) != codes.FailedPrecondition {
		t.Errorf("a user of the socket makes a token for themselves: %v", err)
	}
	for range ownTokensMost {
		_, err = own(vic)
	}
	if status.Code(err) != codes.ResourceExhausted {
		t.Errorf("one person fills the list of tokens: %v", err)
	}
	s.pass(16 * time.Minute)
	if _, err := own(vic); err != nil {
		t.Errorf("after they have expired: %v", err)
	}
}

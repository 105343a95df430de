// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/block"
)

var cluster = block.ClusterID{UUID: block.UUID{1}}

// clock is a clock that a test sets.
type clock struct{ time.Time }

func (c *clock) now() time.Time { return c.Time }

func (c *clock) pass(d time.Duration) { c.Time = c.Add(d) }

func newClock() *clock { return &clock{time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)} }

func keyring(t *testing.T, c *clock) *Keyring {
	t.Helper()
	k, err := CreateKeyring(filepath.Join(t.TempDir(), "keys"), cluster, "m1", c.now)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// joined is a credential as a member gets it from a manager whose authorities are these, of which
// the first one signs.
func joined(t *testing.T, k *Keyring, who access.Identity, authorities ...*x509.Certificate) *Credential {
	t.Helper()
	if len(authorities) == 0 {
		authorities = k.Authorities()
	}
	c, err := NewCredential()
	if err != nil {
		t.Fatal(err)
	}
	return renewed(t, k, c, who, authorities)
}

func renewed(t *testing.T, k *Keyring, c *Credential, who access.Identity, authorities []*x509.Certificate) *Credential {
	t.Helper()
	csr, err := c.Request()
	if err != nil {
		t.Fatal(err)
	}
	r, err := ParseRequest(csr)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := k.Issue(Hash(authorities[0]), who, r, k.now())
	if err != nil {
		t.Fatal(err)
	}
	var ders [][]byte
	for _, a := range authorities {
		ders = append(ders, a.Raw)
	}
	next, err := c.Renewed(cert.Raw, ders)
	if err != nil {
		t.Fatal(err)
	}
	return next
}

func own(t *testing.T, k *Keyring) *Credential {
	t.Helper()
	c, err := ReadCredential(k.Identity())
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// handshake connects a client to a server, and returns whom the server sees.
func handshake(server, client *tls.Config) (who access.Identity, err error) {
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	deadline := time.Now().Add(10 * time.Second)
	a.SetDeadline(deadline)
	b.SetDeadline(deadline)
	done := make(chan error, 1)
	ours, theirs := tls.Server(a, server), tls.Client(b, client)
	go func() {
		err := ours.Handshake()
		if err == nil {
			_, err = ours.Write([]byte{1}) // a client learns only by reading that it was refused
		}
		if err != nil {
			a.Close()
		}
		done <- err
	}()
	err = theirs.Handshake()
	if err == nil {
		_, err = theirs.Read(make([]byte, 1))
	}
	if err != nil {
		b.Close()
	}
	if err = errors.Join(err, <-done); err != nil {
		return who, err
	}
	return Peer(ours.ConnectionState()).Identity, nil
}

func node(name string, role access.Role) access.Identity {
	return access.Identity{Kind: access.Node, Cluster: cluster, Name: name, Role: role}
}

// Both ends accept one another only with certificates of the cluster's authority that are good now,
// and a client accepts only managers.
func TestWhoIsLetIn(t *testing.T) {
	c := newClock()
	k := keyring(t, c)
	other := keyring(t, c)
	manager, target := own(t, k), node("t1", access.Target)
	agent := joined(t, k, target)
	for _, x := range []struct {
		what           string
		server, client *tls.Config
		who            access.Identity
		refused        string
	}{
		{"a target", manager.Server(c.now), agent.Client(c.now), target, ""},
		{"another manager", manager.Server(c.now), manager.Client(c.now), node("m1", access.Manager), ""},
		{"nobody", manager.Server(c.now), &tls.Config{InsecureSkipVerify: true, Time: c.now}, access.Identity{}, ""},
		{"a target of another cluster", manager.Server(c.now), joined(t, other, target).Client(c.now), access.Identity{}, "unknown authority"},
		{"a target as a manager", joined(t, k, node("t2", access.Target)).Server(c.now), agent.Client(c.now), access.Identity{}, "is no manager of this cluster"},
		{"a person who calls himself a manager", joined(t, k, access.Identity{Kind: access.Person, Cluster: cluster, Name: "ada", Role: access.Admin}).Server(c.now), agent.Client(c.now), access.Identity{}, "incompatible key usage"},
		{"an old version of TLS", manager.Server(c.now), &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS12}, access.Identity{}, "protocol version"},
	} {
		who, err := handshake(x.server, x.client)
		if x.refused == "" && (err != nil || who != x.who) {
			t.Errorf("%s: %v, %v; want %v", x.what, who, err, x.who)
		}
		if x.refused != "" && (err == nil || !strings.Contains(err.Error(), x.refused)) {
			t.Errorf("%s: %v; want an error with %q", x.what, err, x.refused)
		}
	}
	c.pass(Life + time.Minute)
	if _, err := handshake(manager.Server(c.now), agent.Client(c.now)); err == nil {
		t.Error("a certificate is good after its life")
	}
}

// Programs that read metrics check a name, which nodes alone have.
func TestTheNameUnderWhichMetricsAreRead(t *testing.T) {
	c := newClock()
	k := keyring(t, c)
	roots := x509.NewCertPool()
	roots.AddCert(k.Authorities()[0])
	for _, who := range []access.Identity{node("t1", access.Target), node("m1", access.Manager), {Kind: access.Person, Cluster: cluster, Name: "ada", Role: access.Admin}} {
		_, err := joined(t, k, who).Cert.Verify(x509.VerifyOptions{Roots: roots, CurrentTime: c.now(), DNSName: MetricsName, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
		if (err == nil) != (who.Kind == access.Node) {
			t.Errorf("%v as %s: %v", who, MetricsName, err)
		}
	}
}

// A token's holder shows its secret only to a manager that the pinned authority has named.
func TestATokenPinsItsAuthority(t *testing.T) {
	c := newClock()
	k, other := keyring(t, c), keyring(t, c)
	token := NewToken(Hash(k.Authorities()[0]))
	if _, err := handshake(own(t, k).Server(c.now), token.Client(c.now)); err != nil {
		t.Errorf("a manager of the cluster: %v", err)
	}
	agent := joined(t, k, node("t1", access.Target))
	for what, server := range map[string]*tls.Config{
		"a manager of another cluster": own(t, other).Server(c.now),
		"an agent of the cluster":      agent.Server(c.now),
		"a stranger who shows the authority's certificate": {Time: c.now, Certificates: []tls.Certificate{{
			Certificate: [][]byte{own(t, other).Cert.Raw, k.Authorities()[0].Raw}, PrivateKey: own(t, other).key}}},
	} {
		// own reads the key anew, and so the stranger's certificate and key belong together
		if _, err := handshake(server, token.Client(c.now)); err == nil {
			t.Errorf("%s: nil, want an error", what)
		}
	}
}

func TestACertificateIsRenewedAtTwoThirdsOfItsLife(t *testing.T) {
	c := newClock()
	agent := joined(t, keyring(t, c), node("t1", access.Target))
	if got, want := agent.RenewAt(), c.Add(Life*2/3); got != want {
		t.Errorf("RenewAt() = %v, want %v", got, want)
	}
}

// Keys are in files that only their owner reads, and in nothing that is printed.
func TestSecretsStayInTheirFiles(t *testing.T) {
	k := keyring(t, newClock())
	filepath.WalkDir(k.dir, func(path string, d fs.DirEntry, _ error) error {
		info, err := d.Info()
		if err != nil || info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %v, %v", path, info.Mode(), err)
		}
		return nil
	})
	token := NewToken(Hash(k.Authorities()[0]))
	secret := token.Text()[strings.LastIndex(token.Text(), ".")+1:]
	var out bytes.Buffer
	slog.New(slog.NewJSONHandler(&out, nil)).Info("join", "token", token)
	slog.New(slog.NewTextHandler(&out, nil)).Info("join", "token", token, "all", []any{token})
	fmt.Fprintf(&out, "%v %+v %#v %s", token, token, token, token)
	text, _ := json.Marshal(token)
	out.Write(text)
	_, err := ParseToken(token.Text() + "x")
	fmt.Fprint(&out, err)
	if strings.Contains(out.String(), secret) || strings.Contains(out.String(), strings.Trim(fmt.Sprint(token.secret[:8]), "[]")) {
		t.Errorf("the secret is in %s", out.String())
	}
}

func TestTokens(t *testing.T) {
	token := NewToken(strings.Repeat("0a", 32))
	got, err := ParseToken(token.Text())
	if err != nil || got != token {
		t.Errorf("ParseToken = %v, %v; want %v", got, err, token)
	}
	path := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(path, []byte(token.Text()+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := ReadToken(path); err != nil || got != token {
		t.Errorf("ReadToken = %v, %v; want %v", got, err, token)
	}
	text := token.Text()
	for _, bad := range []string{"", "weft1", "weft1...", strings.ToUpper(text), text[1:], text[:len(text)-1], text + "A", text + ".", "weft2" + text[5:], text + "\n", strings.Replace(text, ".0a", ".0A", 1)} {
		if got, err := ParseToken(bad); err == nil {
			t.Errorf("ParseToken(%q) = %v, want an error", bad, got)
		}
	}
}

func FuzzParseToken(f *testing.F) {
	f.Add(NewToken(strings.Repeat("0a", 32)).Text())
	f.Add("weft1.00.00.AA")
	f.Add("")
	f.Fuzz(func(t *testing.T, text string) {
		token, err := ParseToken(text)
		if err != nil {
			if len(text) > 8 && strings.Contains(err.Error(), text) {
				t.Errorf("the error repeats %q", text)
			}
			return
		}
		if token.Text() != text {
			t.Errorf("ParseToken(%q) is the token %q", text, token.Text())
		}
	})
}

func FuzzParseRequest(f *testing.F) {
	c, err := NewCredential()
	if err != nil {
		f.Fatal(err)
	}
	csr, err := c.Request()
	if err != nil {
		f.Fatal(err)
	}
	f.Add(csr)
	f.Add(csr[:len(csr)/2])
	f.Add([]byte{})
	a, err := NewAuthority(cluster, time.Now())
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, der []byte) {
		r, err := ParseRequest(der)
		if err != nil {
			return
		}
		// What is parsed can be signed, and the certificate says what the manager says, whatever
		// the request says.
		who := node("t1", access.Target)
		cert, err := a.Issue(who, r, time.Now())
		if err != nil || access.OfCertificate(cert) != who || cert.IsCA || !slices.Equal(cert.DNSNames, []string{MetricsName}) || len(cert.IPAddresses)+len(cert.EmailAddresses) > 0 || len(cert.URIs) != 1 {
			t.Errorf("a request gave %v, %v", cert, err)
		}
	})
}

func FuzzDecode(f *testing.F) {
	c, err := NewCredential()
	if err != nil {
		f.Fatal(err)
	}
	text, err := c.encode()
	if err != nil {
		f.Fatal(err)
	}
	f.Add([]byte(text))
	f.Add([]byte("-----BEGIN CERTIFICATE-----\n-----END CERTIFICATE-----\n"))
	f.Fuzz(func(t *testing.T, text []byte) {
		if c, err := decode(text); err == nil {
			if _, err := c.encode(); err != nil {
				t.Error(err)
			}
		}
		if all, err := decodeAuthorities(text); err == nil {
			if _, err := encodeAuthorities(all); err != nil {
				t.Error(err)
			}
		}
	})
}

func TestRequestsThatAreRefused(t *testing.T) {
	c, err := NewCredential()
	if err != nil {
		t.Fatal(err)
	}
	csr, err := c.Request()
	if err != nil {
		t.Fatal(err)
	}
	forged := bytes.Clone(csr)
	forged[len(forged)-1] ^= 1
	for what, der := range map[string][]byte{"nothing": nil, "a signature of another key": forged, "more than a request": append(bytes.Clone(csr), 0), "too long": make([]byte, requestMost+1)} {
		if _, err := ParseRequest(der); err == nil {
			t.Errorf("%s: nil, want an error", what)
		}
	}
}

// While an authority is rotated, members with certificates of either accept one another as soon as
// both have heard of both.
func TestTwoAuthoritiesAreTrusted(t *testing.T) {
	c := newClock()
	k := keyring(t, c)
	early, late := joined(t, k, node("t1", access.Target)), joined(t, k, node("t2", access.Target))
	one := k.Authorities()[0]
	two, err := k.Add(cluster)
	if err != nil {
		t.Fatal(err)
	}
	both := []*x509.Certificate{one, two.Cert}
	if err := k.Keep(both); err != nil { // the new one is trusted, and the old one signs
		t.Fatal(err)
	}
	meet := func(what string, agent *Credential, wanted bool) {
		t.Helper()
		if _, err := handshake(own(t, k).Server(c.now), agent.Client(c.now)); (err == nil) != wanted {
			t.Errorf("%s: %v; want it let in: %v", what, err, wanted)
		}
	}
	meet("before it has heard of the new authority", early, true)
	early = renewed(t, k, early, early.Identity(), both)
	meet("after that", early, true)
	if err := k.Keep([]*x509.Certificate{two.Cert, one}); err != nil { // the new one signs
		t.Fatal(err)
	}
	meet("with a certificate of the old authority", early, true)
	meet("one that has never heard of the new authority", late, false)
	early = renewed(t, k, early, early.Identity(), []*x509.Certificate{two.Cert, one})
	c.pass(48 * time.Hour)
	if err := k.Keep([]*x509.Certificate{two.Cert}); err != nil {
		t.Fatal(err)
	}
	meet("with a certificate of the new authority", early, true)
	if got := k.Authorities(); len(got) != 1 || Hash(got[0]) != two.Hash() {
		t.Errorf("%d authorities are kept, want the new one alone", len(got))
	}
}

// A manager that was off for longer than its certificate is good goes on with its keys.
func TestAManagerThatWasOffForLong(t *testing.T) {
	c := newClock()
	k := keyring(t, c)
	c.pass(5 * Life)
	again, err := OpenKeyring(k.dir, c.now)
	if err != nil {
		t.Fatal(err)
	}
	if was := own(t, again); !was.Expired(c.now()) {
		t.Fatalf("after %v the certificate is good until %v", 5*Life, was.Cert.NotAfter)
	}
	if err := again.Refresh(); err != nil {
		t.Fatal(err)
	}
	agent := joined(t, again, node("t1", access.Target))
	if _, err := handshake(own(t, again).Server(c.now), agent.Client(c.now)); err != nil {
		t.Errorf("after it was refreshed: %v", err)
	}
}

// A manager that has joined signs nothing until it has the key from another one.
func TestAManagerReceivesTheKey(t *testing.T) {
	c := newClock()
	first := keyring(t, c)
	dir := filepath.Join(t.TempDir(), "keys")
	if _, err := OpenKeyring(dir, c.now); !errors.Is(err, ErrNoKeys) {
		t.Fatalf("OpenKeyring of nothing: %v, want %v", err, ErrNoKeys)
	}
	if err := joined(t, first, node("m2", access.Manager)).Write(IdentityIn(dir)); err != nil {
		t.Fatal(err)
	}
	second, err := OpenKeyring(dir, c.now)
	if err != nil {
		t.Fatal(err)
	}
	signs := Hash(first.Authorities()[0])
	csr, _ := own(t, second).Request()
	r, err := ParseRequest(csr)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := second.Issue(signs, node("t1", access.Target), r, c.now()); !errors.Is(err, ErrNoAuthority) {
		t.Errorf("Issue before it has the key: %v, want %v", err, ErrNoAuthority)
	}
	text, err := first.Export()
	if err != nil {
		t.Fatal(err)
	}
	if err := second.Import(text); err != nil {
		t.Fatal(err)
	}
	again, err := OpenKeyring(dir, c.now)
	if err != nil {
		t.Fatal(err)
	}
	for _, k := range []*Keyring{second, again} {
		if _, err := k.Issue(signs, node("t1", access.Target), r, c.now()); err != nil {
			t.Errorf("Issue with the key: %v", err)
		}
	}
	// Its own certificate is renewed in time.
	c.pass(Life*2/3 + time.Minute)
	was := own(t, again)
	if err := again.Keep(again.Authorities()); err != nil {
		t.Fatal(err)
	}
	if is := own(t, again); !is.Cert.NotAfter.After(was.Cert.NotAfter) || is.Identity() != was.Identity() {
		t.Errorf("after %v its certificate is good until %v, before until %v", c.Time, is.Cert.NotAfter, was.Cert.NotAfter)
	}
}

// The manager that leads makes a new authority, and another one leads before it has received the
// key: the only copy of that must survive that its holder follows now.
func TestTheOnlyCopyOfAKeyIsKept(t *testing.T) {
	c := newClock()
	rotated := keyring(t, c)
	text, err := rotated.Export()
	if err != nil {
		t.Fatal(err)
	}
	next, err := rotated.Add(own(t, rotated).Identity().Cluster)
	if err != nil {
		t.Fatal(err)
	}
	if err := rotated.Import(text); err != nil { // from the one that leads now
		t.Fatal(err)
	}
	c.pass(48 * time.Hour)
	if err := rotated.Keep(append(own(t, rotated).Authorities, next.Cert)); err != nil {
		t.Fatal(err)
	}
	again, err := OpenKeyring(rotated.dir, c.now)
	if err != nil {
		t.Fatal(err)
	}
	if find(next.Hash(), again.Authorities()) == nil {
		t.Error("the key of the authority that will sign is nowhere any more")
	}
}

// Rotations that were begun and not recorded, as by requests at the same moment, leave a file that
// can be read.
func TestAuthoritiesOfAKeyringAreBounded(t *testing.T) {
	c := newClock()
	k := keyring(t, c)
	for range 2 * authoritiesMost {
		_, _ = k.Add(own(t, k).Identity().Cluster)
	}
	if _, err := OpenKeyring(k.dir, c.now); err != nil {
		t.Errorf("the keys after many rotations at once: %v", err)
	}
}

// A manager whose clock was ahead for a while has renewed its credential meanwhile, and nobody accepts
// that before its time: it makes another one.
func TestAManagerOutlivesAClockThatWasAhead(t *testing.T) {
	now := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	keys, err := CreateKeyring(t.TempDir(), block.ClusterID{UUID: block.UUID{1}}, "m1", func() time.Time { return now })
	if err != nil {
		t.Fatal(err)
	}
	right := now
	for _, now = range []time.Time{right, right.Add(30 * 24 * time.Hour), right} {
		if err := keys.Keep(keys.Authorities()); err != nil {
			t.Fatal(err)
		}
		own, err := ReadCredential(keys.Identity())
		if err != nil {
			t.Fatal(err)
		}
		if now.Before(own.Cert.NotBefore) || own.Expired(now) {
			t.Errorf("at %v its certificate is good from %v to %v", now, own.Cert.NotBefore, own.Cert.NotAfter)
		}
	}
}

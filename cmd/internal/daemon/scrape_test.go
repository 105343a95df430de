// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pki"
)

// ownCluster is a cluster with an authority of its own.
type ownCluster struct {
	t    *testing.T
	id   block.ClusterID
	keys *pki.Keyring
}

func newOwnCluster(t *testing.T, id byte) *ownCluster {
	t.Helper()
	c := &ownCluster{t: t, id: block.ClusterID{UUID: block.UUID{id}}}
	var err error
	if c.keys, err = pki.CreateKeyring(t.TempDir(), c.id, "m1", time.Now); err != nil {
		t.Fatal(err)
	}
	return c
}

// member writes the credential of a member.
func (c *ownCluster) member(who access.Identity) (path string) {
	c.t.Helper()
	who.Cluster, path = c.id, filepath.Join(c.t.TempDir(), "identity.pem")
	fresh, err := pki.NewCredential()
	if err != nil {
		c.t.Fatal(err)
	}
	der, err := fresh.Request()
	if err != nil {
		c.t.Fatal(err)
	}
	request, err := pki.ParseRequest(der)
	if err != nil {
		c.t.Fatal(err)
	}
	authority := c.keys.Authorities()[0]
	cert, err := c.keys.Issue(pki.Hash(authority), who, request, time.Now())
	if err != nil {
		c.t.Fatal(err)
	}
	joined, err := fresh.Renewed(cert.Raw, [][]byte{authority.Raw})
	if err == nil {
		err = joined.Write(path)
	}
	if err != nil {
		c.t.Fatal(err)
	}
	return path
}

// reader is a client as Prometheus is one: with the credential's file as its authority, certificate
// and key. Without own, it shows no certificate.
func reader(t *testing.T, authority, own string) *http.Client {
	t.Helper()
	text, err := os.ReadFile(authority)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(text) {
		t.Fatalf("%s has no certificate", authority)
	}
	config := &tls.Config{RootCAs: roots, ServerName: pki.MetricsName}
	if own != "" {
		pair, err := tls.LoadX509KeyPair(own, own)
		if err != nil {
			t.Fatal(err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	transport := &http.Transport{TLSClientConfig: config}
	t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: 10 * time.Second}
}

// kubelet is a client that checks no certificate and has none.
func kubelet() *http.Client {
	return &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}, Timeout: 10 * time.Second}
}

// measured serves metrics on an address until the test ends.
func measured(t *testing.T, at string, readers Readers) (port string) {
	t.Helper()
	listener, err := readers.listen(at, discard)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- ServeHTTP(discard, "metrics", listener, NewMetrics().routes(readers)).Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("serve metrics = %v, want nil", err)
		}
	})
	_, port, err = net.SplitHostPort(listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	return port
}

// got is the status of a request, and whether there are metrics in the answer; 0: there is none.
func got(client *http.Client, url string) (code int, metrics bool) {
	reply, err := client.Get(url)
	if err != nil {
		return 0, false
	}
	defer reply.Body.Close()
	text, _ := io.ReadAll(reply.Body)
	return reply.StatusCode, strings.Contains(string(text), "go_goroutines")
}

// Beyond its own machine, a daemon shows its metrics only to people of its cluster, over TLS.
// /healthz needs no certificate: the kubelet has none.
func TestMetricsAreForMembers(t *testing.T) {
	ours, others := newOwnCluster(t, 1), newOwnCluster(t, 2)
	daemon := ours.member(access.Identity{Kind: access.Node, Name: "t1", Role: access.Target})
	revoked := &access.Revocations{}
	revoked.Set([]access.Revoked{{Kind: access.Person, Name: "eve", Role: access.Viewer, Until: time.Now().Add(time.Minute)}})
	port := measured(t, "0.0.0.0:0", Readers{TLS: TLSFiles{Identity: daemon}, Guard: access.Guard{Cluster: ours.id, Revoked: revoked}})
	viewer := ours.member(access.Identity{Kind: access.Person, Name: "vic", Role: access.Viewer})
	for _, c := range []struct {
		what, own string
		want      int
	}{
		{"a viewer", viewer, http.StatusOK},
		{"an admin", ours.member(access.Identity{Kind: access.Person, Name: "ada", Role: access.Admin}), http.StatusOK},
		{"a viewer whose certificate is revoked", ours.member(access.Identity{Kind: access.Person, Name: "eve", Role: access.Viewer}), http.StatusForbidden},
		{"another node", ours.member(access.Identity{Kind: access.Node, Name: "t2", Role: access.Target}), http.StatusForbidden},
		{"nobody", "", http.StatusForbidden},
		{"a viewer of another cluster", others.member(access.Identity{Kind: access.Person, Name: "vic", Role: access.Viewer}), http.StatusForbidden}, // it is not shown to us
	} {
		code, metrics := got(reader(t, viewer, c.own), "https://127.0.0.1:"+port+"/metrics")
		if code != c.want || metrics != (c.want == http.StatusOK) {
			t.Errorf("%s: %d, metrics %v; want %d", c.what, code, metrics, c.want)
		}
	}
	if code, _ := got(reader(t, viewer, ""), "https://127.0.0.1:"+port+"/healthz"); code != http.StatusOK {
		t.Errorf("/healthz without a certificate: %d", code)
	}
	later := func() time.Time { return time.Now().Add(2 * pki.Life) }
	ended := measured(t, "0.0.0.0:0", Readers{TLS: TLSFiles{Identity: daemon, Now: later}})
	if code, _ := got(kubelet(), "https://127.0.0.1:"+ended+"/healthz"); code != http.StatusOK {
		t.Errorf("/healthz of a daemon whose certificate has ended: %d", code)
	}
	if code, metrics := got(http.DefaultClient, "http://127.0.0.1:"+port+"/metrics"); code == http.StatusOK || metrics {
		t.Errorf("over plain HTTP: %d, metrics %v", code, metrics)
	}
}

// A port alone is one of the loopback address, where plain HTTP is enough. Elsewhere that needs the
// flag. A manager that waits for its store has no certificate: it answers /healthz alone.
func TestPlainMetricsStayOnTheMachine(t *testing.T) {
	if at, here := metricsAddress("9480"); at != "127.0.0.1:9480" || !here {
		t.Errorf("a port alone is %s, %v", at, here)
	}
	for _, at := range []string{":0", "0.0.0.0:0", "[::]:0", "192.0.2.1:9480", "example.org:9480"} {
		if listener, err := (Readers{}).listen(at, discard); err == nil || !strings.Contains(err.Error(), "--insecure-plain-tcp") {
			t.Errorf("%s without a certificate: %v, %v", at, listener, err)
		}
	}
	for what, port := range map[string]string{
		"on the loopback address": measured(t, "127.0.0.1:0", Readers{}),
		"with the flag":           measured(t, "0.0.0.0:0", Readers{Plain: true}),
	} {
		if code, metrics := got(http.DefaultClient, "http://127.0.0.1:"+port+"/metrics"); code != http.StatusOK || !metrics {
			t.Errorf("%s: %d, metrics %v", what, code, metrics)
		}
	}
	waiting := measured(t, "0.0.0.0:0", Readers{waiting: true})
	if code, _ := got(kubelet(), "https://127.0.0.1:"+waiting+"/healthz"); code != http.StatusOK {
		t.Errorf("a manager that waits answers /healthz with %d", code)
	}
	if code, metrics := got(kubelet(), "https://127.0.0.1:"+waiting+"/metrics"); code != http.StatusForbidden || metrics {
		t.Errorf("a manager that waits answers /metrics with %d, metrics %v", code, metrics)
	}
}

// A reader connects anew before its certificate ends, and gets nothing over an old connection after it.
func TestAConnectionReadsNoMetricsAfterItsCertificate(t *testing.T) {
	ours := newOwnCluster(t, 1)
	daemon, viewer := ours.member(access.Identity{Kind: access.Node, Name: "t1", Role: access.Target}), ours.member(access.Identity{Kind: access.Person, Name: "vic", Role: access.Viewer})
	var later atomic.Int64
	clock := func() time.Time { return time.Now().Add(time.Duration(later.Load())) }
	port := measured(t, "0.0.0.0:0", Readers{TLS: TLSFiles{Identity: daemon, Now: clock}, Guard: access.Guard{Cluster: ours.id}})
	client := reader(t, viewer, viewer)
	for _, c := range []struct {
		later time.Duration
		want  int
		ends  bool
	}{{0, http.StatusOK, false}, {pki.Life + time.Minute, http.StatusForbidden, true}} {
		later.Store(int64(c.later))
		reply, err := client.Get("https://127.0.0.1:" + port + "/metrics")
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, reply.Body)
		reply.Body.Close()
		if reply.StatusCode != c.want || reply.Close != c.ends {
			t.Errorf("after %v: %d, the connection ends: %v; want %d, %v", c.later, reply.StatusCode, reply.Close, c.want, c.ends)
		}
	}
	if code, _ := got(client, "https://127.0.0.1:"+port+"/metrics"); code != 0 {
		t.Errorf("a new connection after the certificate's end: %d", code)
	}
}

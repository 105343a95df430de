// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/pb"
)

// selfSigned is a certificate of its own authority, for 127.0.0.1.
func selfSigned(t *testing.T) daemon.TLSFiles {
	t.Helper()
	dir := t.TempDir()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	cert := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	write := func(name, kind string, der []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	public := write("cert", "CERTIFICATE", der)
	return daemon.TLSFiles{CA: public, Cert: public, Key: write("key", "EC PRIVATE KEY", secret)}
}

// If the two ends disagree on TLS, each says so in its own words.
func TestEndsThatDoNotAgreeOnTLS(t *testing.T) {
	one, other := selfSigned(t), selfSigned(t)
	alien := other
	alien.CA = one.CA
	plain := daemon.TLSFiles{}
	for _, c := range []struct {
		name           string
		server, client daemon.TLSFiles
		hint           string
	}{
		{"TLS to one without", plain, one, "does not use TLS"},
		{"none to one with TLS", one, plain, "or the manager uses TLS"},
		{"a manager of another authority", one, other, "the manager's certificate is not trusted"},
		{"a certificate of another authority", one, alien, "rejects this certificate"},
		{"none of its own", one, daemon.TLSFiles{CA: one.CA}, "rejects this certificate"},
	} {
		t.Run(c.name, func(t *testing.T) {
			server, err := daemon.NewServer(c.server, daemon.NewMetrics(), access.Guard{})
			if err != nil {
				t.Fatal(err)
			}
			listener := listen(t)
			defer beside(t, func(ctx context.Context) error {
				context.AfterFunc(ctx, server.Stop)
				return server.Serve(listener)
			})()
			conn, err := daemon.Dial(listener.Addr().String(), c.client, grpc.WithUnaryInterceptor(cli.LimitCall))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			_, err = pb.NewManagerClient(conn).GetStatus(t.Context(), &pb.GetStatusRequest{})
			r := cli.NewReport(err)
			if r.Code != cli.ExitUnreachable || len(r.Hints) != 1 || !strings.Contains(r.Hints[0], c.hint) {
				t.Errorf("%v\nis told with code %d and hints %q, want %q", err, r.Code, r.Hints, c.hint)
			}
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"testing"
	"time"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/pki"
)

// authority signs certificates for 127.0.0.1.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) authority {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"},
		NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return authority{cert, key}
}

// issue writes a certificate, its key and a's own certificate to dir.
func (a authority) issue(t *testing.T, dir, name string, uris ...*url.URL) TLSFiles {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: name}, NotAfter: time.Now().Add(time.Hour), URIs: uris,
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	files := TLSFiles{CA: filepath.Join(dir, "ca.pem"), Cert: filepath.Join(dir, name+".pem"), Key: filepath.Join(dir, name+".key")}
	writePEM(t, files.CA, "CERTIFICATE", a.cert.Raw)
	writePEM(t, files.Cert, "CERTIFICATE", der)
	writePEM(t, files.Key, "EC PRIVATE KEY", keyDER)
	return files
}

func writePEM(t *testing.T, path, kind string, der []byte) {
	t.Helper()
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestOnlyCertificatesOfTheAuthorityGetIn(t *testing.T) {
	ours, dir := newAuthority(t), t.TempDir()
	address := serve(t, ours.issue(t, dir, "manager"), NewMetrics())
	node := ours.issue(t, dir, "node")
	if err := checkHealth(t, address, node); err != nil {
		t.Errorf("with a certificate of the authority: %v, want nil", err)
	}
	if err := checkHealth(t, address, TLSFiles{CA: node.CA}); err == nil {
		t.Error("without a certificate: nil, want an error")
	}
	if err := checkHealth(t, address, TLSFiles{}); err == nil {
		t.Error("without TLS: nil, want an error")
	}
	stranger := newAuthority(t).issue(t, t.TempDir(), "node")
	stranger.CA = node.CA
	if err := checkHealth(t, address, stranger); err == nil {
		t.Error("with a certificate of another authority: nil, want an error")
	}
}

func TestRenewedCertificatesAreUsedWithoutARestart(t *testing.T) {
	dir := t.TempDir()
	address := serve(t, newAuthority(t).issue(t, dir, "manager"), NewMetrics())
	renewed := newAuthority(t)
	node := renewed.issue(t, t.TempDir(), "node")
	if err := checkHealth(t, address, node); err == nil {
		t.Fatal("before the renewal: nil, want an error")
	}
	renewed.issue(t, dir, "manager")
	if err := checkHealth(t, address, node); err != nil {
		t.Errorf("after the renewal: %v, want nil", err)
	}
}

func TestMissingFilesAreRefusedAtTheStart(t *testing.T) {
	dir := t.TempDir()
	files := newAuthority(t).issue(t, dir, "manager")
	files.Key = filepath.Join(dir, "absent")
	if _, err := NewServer(files, NewMetrics(), access.Guard{}); err == nil {
		t.Error("NewServer without its key succeeded")
	}
	if _, err := Dial("127.0.0.1:1", files); err == nil {
		t.Error("Dial without its key succeeded")
	}
}

func TestAHeldCredentialIsShownToNoSocket(t *testing.T) {
	held, err := pki.NewCredential()
	if err != nil {
		t.Fatal(err)
	}
	if conn, err := DialOne("unix:/run/weft.socket", TLSFiles{Held: held}); err == nil {
		conn.Close()
		t.Error("a socket is opened for a person who may do less than its users")
	}
}

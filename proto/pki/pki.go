// SPDX-License-Identifier: Apache-2.0

// Package pki is a cluster's own certificate authority, and what its members keep of it.
//
//	Authority   signs certificates; its key is at the managers alone
//	Keyring     the managers' file of authorities
//	Credential  a member's file: its key, its certificate, and whom it trusts
//	Token       lets one member join: it pins the authority, and carries a secret
//
// A certificate names a [access.Identity] in a URI and is good for [Life]. Its holder renews it
// when two thirds of that have passed. Addresses are in no certificate: a client accepts a server
// that the authority has named a manager of the cluster, wherever it answers. Everything is the
// standard library's: ECDSA on P-256, X.509 and TLS 1.3.
package pki

import (
	"bytes"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"errors"
	"fmt"
	"math/big"
	"net/url"
	"time"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/block"
)

// Life is how long a certificate of a member is good.
const Life = 7 * 24 * time.Hour

// authorityLife is how long an authority's own certificate is good. It is rotated before that.
const authorityLife = 10 * 365 * 24 * time.Hour

// MetricsName is a name in the certificate of each node, for programs that read its metrics: they
// check names, and no address is in a certificate.
const MetricsName = "metrics.weft.internal"

// Throwaway is a certificate that proves nothing, for a server that has none yet, and whose clients
// check none.
func Throwaway(now time.Time) (tls.Certificate, error) {
	a, err := NewAuthority(block.ClusterID{}, now)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{a.Cert.Raw}, PrivateKey: a.key}, nil
}

// skew is how far the clocks of members may be apart.
const skew = time.Hour

// Authority signs certificates of one cluster.
type Authority struct {
	Cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// NewAuthority makes an authority with a new key.
func NewAuthority(cluster block.ClusterID, now time.Time) (*Authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: "weft " + cluster.String()},
		NotBefore: now.Add(-skew), NotAfter: now.Add(authorityLife),
		IsCA: true, BasicConstraintsValid: true, MaxPathLenZero: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	return &Authority{cert, key}, err
}

func serial() *big.Int {
	var b [16]byte
	rand.Read(b[:])
	b[0] &= 0x7f // positive
	return new(big.Int).SetBytes(b[:])
}

// Hash names a certificate: its SHA-256, in hexadecimal digits.
func Hash(cert *x509.Certificate) string {
	sum := sha256.Sum256(cert.Raw)
	return hex.EncodeToString(sum[:])
}

// KeyHash names a public key in the same way.
func KeyHash(public []byte) string {
	sum := sha256.Sum256(public)
	return hex.EncodeToString(sum[:])
}

// Hash is that of the authority's certificate.
func (a *Authority) Hash() string { return Hash(a.Cert) }

// Request is a checked request for a certificate: only its public key counts.
type Request struct {
	public crypto.PublicKey
	// Key is the hash of the public key.
	Key string
}

// requestMost bounds a request for a certificate.
const requestMost = 4 << 10

// ParseRequest checks a request for a certificate, in DER. Its holder has the private key.
func ParseRequest(der []byte) (Request, error) {
	if len(der) > requestMost {
		return Request{}, fmt.Errorf("certificate request: %d bytes; at most %d are allowed", len(der), requestMost)
	}
	csr, err := x509.ParseCertificateRequest(der)
	if err != nil {
		return Request{}, fmt.Errorf("certificate request: %w", err)
	}
	public, ok := csr.PublicKey.(*ecdsa.PublicKey)
	if !ok || public.Curve != elliptic.P256() {
		return Request{}, errors.New("certificate request: its key must be ECDSA on P-256")
	}
	if err := csr.CheckSignature(); err != nil {
		return Request{}, fmt.Errorf("certificate request: %w", err)
	}
	return Request{public, KeyHash(csr.RawSubjectPublicKeyInfo)}, nil
}

// Issue signs a certificate of an identity.
func (a *Authority) Issue(who access.Identity, r Request, now time.Time) (*x509.Certificate, error) {
	if err := who.Check(); err != nil {
		return nil, fmt.Errorf("issue a certificate: %w", err)
	}
	until := now.Add(Life)
	if until.After(a.Cert.NotAfter) {
		until = a.Cert.NotAfter
	}
	usage, names := []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}, []string(nil)
	if who.Kind == access.Node { // it serves metrics, and a manager the cluster: see isManager
		usage, names = append(usage, x509.ExtKeyUsageServerAuth), []string{MetricsName}
	}
	template := &x509.Certificate{
		SerialNumber: serial(), Subject: pkix.Name{CommonName: who.Name}, URIs: []*url.URL{who.URI()}, DNSNames: names,
		NotBefore: now.Add(-skew), NotAfter: until, KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: usage,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, a.Cert, r.public, a.key)
	if err != nil {
		return nil, fmt.Errorf("issue a certificate: %w", err)
	}
	return x509.ParseCertificate(der)
}

// verify returns whom a certificate names, if one of the authorities has signed it for a use and
// it is good now.
func verify(cert *x509.Certificate, authorities []*x509.Certificate, use x509.ExtKeyUsage, now time.Time) (who access.Identity, err error) {
	roots := x509.NewCertPool()
	for _, a := range authorities {
		roots.AddCert(a)
	}
	if _, err := cert.Verify(x509.VerifyOptions{Roots: roots, CurrentTime: now, KeyUsages: []x509.ExtKeyUsage{use}}); err != nil {
		return who, err
	}
	if who = access.OfCertificate(cert); who.Check() != nil {
		return access.Identity{}, errors.New("the certificate names no node or person")
	}
	return who, nil
}

// find returns the certificate of a hash; nil if it is not there.
func find(hash string, certs []*x509.Certificate) *x509.Certificate {
	for _, c := range certs {
		if Hash(c) == hash {
			return c
		}
	}
	return nil
}

// same reports whether two lists have the same certificates in the same order.
func same(a, b []*x509.Certificate) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if !bytes.Equal(a[i].Raw, b[i].Raw) {
			return false
		}
	}
	return true
}

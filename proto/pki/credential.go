// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/durable"
)

// Credential is what a member keeps: its key, its certificate, and the authorities that it trusts.
// They are in one file, so that a renewal replaces all or nothing.
type Credential struct {
	key         *ecdsa.PrivateKey
	Cert        *x509.Certificate   // nil: it has not joined yet
	Authorities []*x509.Certificate // the one that signed Cert first
}

// NewCredential makes a key, for which a certificate can be asked.
func NewCredential() (*Credential, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	return &Credential{key: key}, err
}

const (
	keyBlock  = "PRIVATE KEY"
	certBlock = "CERTIFICATE"
)

// fileMost bounds a file of keys.
const fileMost = 1 << 20

// ReadCredential reads a file that [Credential.Write] has written.
func ReadCredential(path string) (*Credential, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	c, err := decode(text)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

// decode reads keys and certificates of a credential.
func decode(text []byte) (*Credential, error) {
	keys, certs, err := decodePEM(text)
	if err != nil {
		return nil, err
	}
	if len(keys) != 1 {
		return nil, fmt.Errorf("%d private keys, want one", len(keys))
	}
	c := &Credential{key: keys[0]}
	for _, cert := range certs {
		switch {
		case cert.IsCA:
			c.Authorities = append(c.Authorities, cert)
		case c.Cert != nil || !keys[0].PublicKey.Equal(cert.PublicKey):
			return nil, errors.New("a certificate of another key")
		default:
			c.Cert = cert
		}
	}
	if c.Cert != nil && len(c.Authorities) == 0 {
		return nil, errors.New("no certificate of the authority")
	}
	return c, nil
}

// decodePEM reads blocks of keys and certificates.
func decodePEM(text []byte) (keys []*ecdsa.PrivateKey, certs []*x509.Certificate, err error) {
	if len(text) > fileMost {
		return nil, nil, fmt.Errorf("%d bytes; at most %d are expected", len(text), fileMost)
	}
	for len(bytes.TrimSpace(text)) > 0 {
		block, rest := pem.Decode(text)
		if block == nil {
			return nil, nil, errors.New("not PEM")
		}
		text = rest
		switch block.Type {
		case keyBlock:
			key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
			if err != nil {
				return nil, nil, errors.New("a private key that cannot be read") // its error may quote it
			}
			ec, ok := key.(*ecdsa.PrivateKey)
			if !ok || ec.Curve != elliptic.P256() {
				return nil, nil, errors.New("a private key that is not ECDSA on P-256")
			}
			keys = append(keys, ec)
		case certBlock:
			cert, err := x509.ParseCertificate(block.Bytes)
			if err != nil {
				return nil, nil, err
			}
			certs = append(certs, cert)
		default:
			return nil, nil, fmt.Errorf("a block of kind %q", block.Type)
		}
	}
	return keys, certs, nil
}

// encodePEM is the inverse of decodePEM.
func encodePEM(keys []*ecdsa.PrivateKey, certs []*x509.Certificate) (string, error) {
	var text bytes.Buffer
	for _, key := range keys {
		der, err := x509.MarshalPKCS8PrivateKey(key)
		if err != nil {
			return "", err
		}
		pem.Encode(&text, &pem.Block{Type: keyBlock, Bytes: der})
	}
	for _, cert := range certs {
		pem.Encode(&text, &pem.Block{Type: certBlock, Bytes: cert.Raw})
	}
	return text.String(), nil
}

// Write replaces the file in one step. Only its owner may read it.
func (c *Credential) Write(path string) error {
	text, err := c.encode()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	return durable.Write(path, text, 0o600)
}

func (c *Credential) encode() (string, error) {
	certs := c.Authorities
	if c.Cert != nil {
		certs = append([]*x509.Certificate{c.Cert}, certs...)
	}
	return encodePEM([]*ecdsa.PrivateKey{c.key}, certs)
}

// Request is a request for a certificate of the credential's key, in DER.
func (c *Credential) Request() ([]byte, error) {
	return x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: pkix.Name{CommonName: "weft"}}, c.key)
}

// Renewed returns the credential with another certificate, as a manager answers a request. The
// authorities are trusted from then on, so they must come over a connection to a manager.
func (c *Credential) Renewed(cert []byte, authorities [][]byte) (*Credential, error) {
	leaf, err := x509.ParseCertificate(cert)
	if err != nil {
		return nil, fmt.Errorf("certificate: %w", err)
	}
	if !c.key.PublicKey.Equal(leaf.PublicKey) {
		return nil, errors.New("certificate: of another key than was asked for")
	}
	next := &Credential{key: c.key, Cert: leaf}
	if next.Authorities, err = parseAll(authorities); err != nil {
		return nil, err
	}
	signer := slices.IndexFunc(next.Authorities, func(a *x509.Certificate) bool { return leaf.CheckSignatureFrom(a) == nil })
	if signer < 0 {
		return nil, errors.New("certificate: none of the authorities has signed it")
	}
	next.Authorities[0], next.Authorities[signer] = next.Authorities[signer], next.Authorities[0]
	return next, nil
}

// authoritiesMost bounds the authorities of a cluster: the one that signs, and one before or after.
const authoritiesMost = 8

func parseAll(ders [][]byte) (certs []*x509.Certificate, err error) {
	if len(ders) > authoritiesMost {
		return nil, fmt.Errorf("%d authorities; at most %d are expected", len(ders), authoritiesMost)
	}
	for _, der := range ders {
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			return nil, fmt.Errorf("authority: %w", err)
		}
		if !cert.IsCA {
			return nil, errors.New("authority: its certificate is no authority's")
		}
		certs = append(certs, cert)
	}
	return certs, nil
}

// Identity is whom the certificate names; a stranger if there is none.
func (c *Credential) Identity() access.Identity {
	if c == nil || c.Cert == nil {
		return access.Identity{}
	}
	return access.OfCertificate(c.Cert)
}

// RenewAt is when the certificate is to be renewed: when two thirds of its life have passed.
func (c *Credential) RenewAt() time.Time {
	begin := c.Cert.NotBefore.Add(skew)
	return begin.Add(c.Cert.NotAfter.Sub(begin) * 2 / 3)
}

// Expired reports whether the certificate is good no more.
func (c *Credential) Expired(now time.Time) bool { return now.After(c.Cert.NotAfter) }

// tlsCertificate is the certificate as TLS shows it. The authority comes with it, for who joins and
// knows only its hash.
func (c *Credential) tlsCertificate() tls.Certificate {
	return tls.Certificate{Certificate: [][]byte{c.Cert.Raw, c.Authorities[0].Raw}, PrivateKey: c.key, Leaf: c.Cert}
}

// Client is the configuration of a connection to a manager: it must be one of this cluster.
func (c *Credential) Client(now func() time.Time) *tls.Config {
	us := c.Identity()
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Time:         now,
		Certificates: []tls.Certificate{c.tlsCertificate()},
		// A manager is known by the name that its certificate gives it, and not by its address.
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection does it
		VerifyConnection: func(state tls.ConnectionState) error {
			return isManager(state, c.Authorities, &us, now())
		},
	}
}

// Server is the configuration of a manager's end. A client without a certificate is let in: it can
// do nothing but join.
func (c *Credential) Server(now func() time.Time) *tls.Config {
	roots := x509.NewCertPool()
	for _, a := range c.Authorities {
		roots.AddCert(a)
	}
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Time:         now,
		Certificates: []tls.Certificate{c.tlsCertificate()},
		ClientAuth:   tls.VerifyClientCertIfGiven,
		ClientCAs:    roots,
	}
}

// Peer is who is at the other end of a server's connection.
func Peer(state tls.ConnectionState) access.AuthInfo {
	if len(state.PeerCertificates) == 0 {
		return access.AuthInfo{}
	}
	cert := state.PeerCertificates[0]
	who := access.OfCertificate(cert)
	if who.Kind == access.Outside { // not signed here: the cluster's authority names all its members
		return access.AuthInfo{}
	}
	return access.AuthInfo{Identity: who, Issued: cert.NotBefore.Add(skew), Ends: cert.NotAfter}
}

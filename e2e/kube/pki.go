// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"
)

// secrets are the files with which the control plane and its clients authenticate.
type secrets struct {
	dir    string
	tokens map[string]string // by user
}

func (s secrets) file(name string) string { return filepath.Join(s.dir, name) }

// newSecrets makes an authority, the API server's certificate, the key that
// signs the tokens of ServiceAccounts, and a token for each user.
func newSecrets(dir string, groups map[string]string) (secrets, error) {
	s := secrets{dir: dir, tokens: make(map[string]string)}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return s, err
	}
	accounts, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return s, err
	}
	err = errors.Join(
		s.certificates(),
		s.pem("sa.key", "RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(accounts)),
	)
	var table []byte
	for user, group := range groups {
		random := make([]byte, 16)
		rand.Read(random)
		s.tokens[user] = hex.EncodeToString(random)
		table = append(table, s.tokens[user]+","+user+","+user+",\""+group+"\"\n"...)
	}
	return s, errors.Join(err, os.WriteFile(s.file("tokens.csv"), table, 0o600))
}

func (s secrets) certificates() error {
	authority := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "kube-ca"}, IsCA: true, BasicConstraintsValid: true,
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	server := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "kube-apiserver"},
		NotBefore: authority.NotBefore, NotAfter: authority.NotAfter, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:    []string{"localhost", "kubernetes.default.svc"},
		IPAddresses: []net.IP{net.ParseIP(controlAddress), net.ParseIP("127.0.0.1"), net.ParseIP("10.0.0.1")},
	}
	authorityKey, err := s.certificate("ca", authority, authority, nil)
	if err != nil {
		return err
	}
	_, err = s.certificate("apiserver", server, authority, authorityKey)
	return err
}

// certificate writes name.crt and name.key; a nil signer signs itself.
func (s secrets) certificate(name string, c, parent *x509.Certificate, signer crypto.Signer) (crypto.Signer, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	if signer == nil {
		signer = key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, key.Public(), signer)
	if err != nil {
		return nil, err
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	return key, errors.Join(s.pem(name+".crt", "CERTIFICATE", der), s.pem(name+".key", "PRIVATE KEY", private))
}

func (s secrets) pem(name, kind string, der []byte) error {
	return os.WriteFile(s.file(name), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600)
}

// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"crypto/ecdsa"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/durable"
)

// Keyring is a manager's directory of keys:
//
//	authorities.pem  the authorities of the cluster, each with its key
//	identity.pem     the manager's own credential
//
// It lies beside the store and not in it, so that no record, backup or snapshot has a key. Its
// methods may be called concurrently.
type Keyring struct {
	dir string
	now func() time.Time

	mu   sync.Mutex
	keys []*Authority
}

// ErrNoKeys is returned by OpenKeyring if the directory has no credential.
var ErrNoKeys = errors.New("no keys there")

// ErrNoAuthority is returned by Issue at a manager that has no key of the authority yet. It gets
// that from the one that leads.
var ErrNoAuthority = errors.New("this manager has not received the authority's key yet")

func (k *Keyring) authorities() string { return filepath.Join(k.dir, "authorities.pem") }

// Identity is the path of the manager's credential.
func (k *Keyring) Identity() string { return IdentityIn(k.dir) }

// IdentityIn is the path of the credential in a member's directory.
func IdentityIn(dir string) string { return filepath.Join(dir, "identity.pem") }

// CreateKeyring makes an authority for a new cluster, and a credential of its first manager.
// A directory that has keys is left as it is.
func CreateKeyring(dir string, cluster block.ClusterID, manager block.NodeName, now func() time.Time) (*Keyring, error) {
	k, err := OpenKeyring(dir, now)
	if err == nil && len(k.keys) > 0 || err != nil && !errors.Is(err, ErrNoKeys) {
		return k, err
	}
	k = &Keyring{dir: dir, now: now}
	if _, err := k.Add(cluster); err != nil {
		return nil, err
	}
	return k, k.identify(access.Identity{Kind: access.Node, Cluster: cluster, Name: string(manager), Role: access.Manager}, k.keys)
}

// OpenKeyring opens the directory of a manager that has joined, or has made its cluster.
func OpenKeyring(dir string, now func() time.Time) (*Keyring, error) {
	k := &Keyring{dir: dir, now: now}
	if _, err := ReadCredential(k.Identity()); errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w", dir, ErrNoKeys)
	} else if err != nil {
		return nil, err
	}
	text, err := os.ReadFile(k.authorities())
	if errors.Is(err, fs.ErrNotExist) {
		return k, nil
	}
	if err != nil {
		return nil, err
	}
	if k.keys, err = decodeAuthorities(text); err != nil {
		return nil, fmt.Errorf("%s: %w", k.authorities(), err)
	}
	return k, nil
}

// decodeAuthorities reads authorities, each with its key.
func decodeAuthorities(text []byte) (all []*Authority, err error) {
	keys, certs, err := decodePEM(text)
	if err != nil {
		return nil, err
	}
	if len(keys) != len(certs) || len(keys) > authoritiesMost {
		return nil, fmt.Errorf("%d keys for %d authorities", len(keys), len(certs))
	}
	for i, cert := range certs {
		if !cert.IsCA || !keys[i].PublicKey.Equal(cert.PublicKey) {
			return nil, errors.New("a key that is not its authority's")
		}
		all = append(all, &Authority{cert, keys[i]})
	}
	return all, nil
}

// Export returns the authorities with their keys, for another manager and nobody else.
func (k *Keyring) Export() ([]byte, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	text, err := encodeAuthorities(k.keys)
	return []byte(text), err
}

func encodeAuthorities(all []*Authority) (string, error) {
	var keys []*ecdsa.PrivateKey
	var certs []*x509.Certificate
	for _, a := range all {
		keys, certs = append(keys, a.key), append(certs, a.Cert)
	}
	return encodePEM(keys, certs)
}

// Import takes the authorities that another manager has exported. Those that only this manager has
// stay until Keep drops them: one may be recorded whose key nobody else has received yet.
func (k *Keyring) Import(text []byte) error {
	all, err := decodeAuthorities(text)
	if err != nil {
		return err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, own := range k.keys {
		if len(all) < authoritiesMost && !slices.ContainsFunc(all, func(a *Authority) bool { return a.Hash() == own.Hash() }) {
			all = append(all, own)
		}
	}
	return k.saveLocked(all)
}

func (k *Keyring) saveLocked(all []*Authority) error {
	text, err := encodeAuthorities(all)
	if err != nil {
		return err
	}
	if was, err := encodeAuthorities(k.keys); err == nil && was == text {
		return nil
	}
	if err := os.MkdirAll(k.dir, 0o700); err != nil {
		return err
	}
	if err := durable.Write(k.authorities(), text, 0o600); err != nil {
		return err
	}
	k.keys = all
	return nil
}

// Add makes a further authority, which signs nothing yet.
func (k *Keyring) Add(cluster block.ClusterID) (*Authority, error) {
	a, err := NewAuthority(cluster, k.now())
	if err != nil {
		return nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if len(k.keys) >= authoritiesMost { // a file with more could not be read again
		return nil, fmt.Errorf("%d authorities are here already: some are dropped a day after they were made", len(k.keys))
	}
	return a, k.saveLocked(append(slices.Clone(k.keys), a))
}

// Authorities returns the certificates of the authorities whose keys are here.
func (k *Keyring) Authorities() (certs []*x509.Certificate) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, a := range k.keys {
		certs = append(certs, a.Cert)
	}
	return certs
}

// Issue signs a certificate with the authority of a hash. The certificate says that it is issued at
// a time.
func (k *Keyring) Issue(authority string, who access.Identity, r Request, at time.Time) (*x509.Certificate, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, a := range k.keys {
		if a.Hash() == authority {
			return a.Issue(who, r, at)
		}
	}
	return nil, ErrNoAuthority
}

// Keep brings the directory in line with the records: trusted are the authorities, of which the
// first one signs. Keys of others go, unless they are as new as one that is about to be recorded.
// The manager's own credential is renewed where that is due.
func (k *Keyring) Keep(trusted []*x509.Certificate) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	kept := slices.DeleteFunc(slices.Clone(k.keys), func(a *Authority) bool {
		return find(a.Hash(), trusted) == nil && k.now().Sub(a.Cert.NotBefore) > 24*time.Hour
	})
	if err := k.saveLocked(kept); err != nil {
		return err
	}
	own, err := ReadCredential(k.Identity())
	if err != nil {
		return err
	}
	signs := slices.IndexFunc(k.keys, func(a *Authority) bool { return a.Hash() == Hash(trusted[0]) })
	if signs < 0 { // it trusts what is recorded, and renews its credential elsewhere
		if own.Trusts(trusted) {
			return nil
		}
		return own.trusting(trusted).Write(k.Identity())
	}
	now := k.now()
	early := now.Before(own.Cert.NotBefore) // it was renewed while the clock was ahead
	if own.Trusts(trusted) && Hash(own.Authorities[0]) == Hash(trusted[0]) && now.Before(own.RenewAt()) && !early {
		return nil
	}
	order := []*Authority{k.keys[signs]}
	for _, cert := range trusted[1:] {
		order = append(order, &Authority{Cert: cert})
	}
	return k.identify(own.Identity(), order)
}

// Refresh renews the manager's own credential, if that is due and a key of its authority is here. A
// manager that was off for long begins with it: nobody would accept its old one.
func (k *Keyring) Refresh() error {
	own, err := ReadCredential(k.Identity())
	if err != nil || own.Cert == nil {
		return err
	}
	return k.Keep(own.Authorities)
}

// Trusts reports whether these are the authorities that c trusts, in any order.
func (c *Credential) Trusts(authorities []*x509.Certificate) bool {
	sorted := func(certs []*x509.Certificate) []*x509.Certificate {
		return slices.SortedFunc(slices.Values(certs), func(a, b *x509.Certificate) int { return slices.Compare(a.Raw, b.Raw) })
	}
	return same(sorted(c.Authorities), sorted(authorities))
}

// trusting is c with other authorities. The one that has signed its certificate stays first.
func (c *Credential) trusting(authorities []*x509.Certificate) *Credential {
	next := *c
	next.Authorities = []*x509.Certificate{c.Authorities[0]}
	for _, a := range authorities {
		if Hash(a) != Hash(c.Authorities[0]) {
			next.Authorities = append(next.Authorities, a)
		}
	}
	return &next
}

// identify makes a new credential of the manager, signed by the first authority.
func (k *Keyring) identify(who access.Identity, authorities []*Authority) error {
	c, err := NewCredential()
	if err != nil {
		return err
	}
	csr, err := c.Request()
	if err != nil {
		return err
	}
	r, err := ParseRequest(csr)
	if err != nil {
		return err
	}
	if c.Cert, err = authorities[0].Issue(who, r, k.now()); err != nil {
		return err
	}
	for _, a := range authorities {
		c.Authorities = append(c.Authorities, a.Cert)
	}
	return c.Write(k.Identity())
}

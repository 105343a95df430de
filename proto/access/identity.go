// SPDX-License-Identifier: Apache-2.0

// Package access says who a peer of the volume manager is, and what it may call.
//
//	certificate, socket ─► Identity ─┐
//	                                 ├─► Decide ─► nil, or why not
//	method of a call ────────────────┘
//
// An [Identity] is what a connection proves: a node in one role, a person in one role, a user of
// this machine, or nothing. One table gives each method its roles, and [Decide] is a function of
// the two alone. [Guard] applies it to a gRPC server, before the service, and refuses certificates
// that were revoked. What a node may say only of itself, such as a report, the service checks with
// [Speaks].
package access

import (
	"crypto/x509"
	"errors"
	"fmt"
	"net/url"
	"strings"

	"weft.dev/weft/proto/block"
)

// Role is what a person or a node may do.
type Role string

// The roles of people. Each includes those before it.
const (
	Viewer   Role = "viewer"   // reads
	Operator Role = "operator" // changes volumes, drives and nodes
	Admin    Role = "admin"    // decides who may do what, and what may lose data
)

// The roles of nodes. None includes another one.
const (
	Target    Role = "target"
	Initiator Role = "initiator"
	CSI       Role = "csi"
	Manager   Role = "manager"
)

// People are the roles of people, the least first.
var People = []Role{Viewer, Operator, Admin}

// Nodes are the roles of nodes.
var Nodes = []Role{Target, Initiator, CSI, Manager}

// Kind is how a peer has shown who it is.
type Kind int

// The kinds of identities.
const (
	Stranger  Kind = iota // a peer without a certificate
	Anonymous             // over plain TCP, where nobody is asked
	Local                 // on a socket that only its user may open
	Outside               // a certificate of an operator's own authority that names no role
	Node
	Person
)

// Identity is who a peer is.
type Identity struct {
	Kind    Kind
	Cluster block.ClusterID // of a Node or a Person
	Name    string          // of a Node or a Person; the subject of the certificate of Outside
	Role    Role            // of a Node or a Person
}

// String names the identity, for events and errors.
func (i Identity) String() string {
	switch i.Kind {
	case Anonymous:
		return "anonymous"
	case Local:
		return "local"
	case Outside:
		return "certificate " + i.Name
	case Node, Person:
		return fmt.Sprintf("%s %s (%s)", i.word(), i.Name, i.Role)
	}
	return "a peer without a certificate"
}

func (i Identity) word() string {
	if i.Kind == Person {
		return "person"
	}
	return "node"
}

// scheme is that of the names in certificates, as SPIFFE has them.
const scheme = "spiffe"

// URI is the name of a Node or a Person in its certificate.
func (i Identity) URI() *url.URL {
	return &url.URL{Scheme: scheme, Host: i.Cluster.String(), Path: fmt.Sprintf("/%s/%s/%s", i.word(), i.Name, i.Role)}
}

// Check returns an error if i is neither a Node nor a Person with a valid name and role.
func (i Identity) Check() error {
	roles := Nodes
	switch i.Kind {
	case Node:
	case Person:
		roles = People
	default:
		return errors.New("neither a node nor a person")
	}
	if _, err := block.ParseNodeName(i.Name); err != nil {
		return fmt.Errorf("name of a %s: %w", i.word(), err)
	}
	for _, r := range roles {
		if r == i.Role {
			return nil
		}
	}
	return fmt.Errorf("role %q: a %s has one of %v", i.Role, i.word(), roles)
}

// ParseURI is the inverse of [Identity.URI].
func ParseURI(u *url.URL) (i Identity, err error) {
	if u.Scheme != scheme {
		return i, fmt.Errorf("%s: the scheme is not %s", u, scheme)
	}
	if i.Cluster, err = block.ParseClusterID(u.Host); err != nil {
		return i, fmt.Errorf("%s: %w", u, err)
	}
	kind, rest, _ := strings.Cut(strings.TrimPrefix(u.Path, "/"), "/")
	name, role, _ := strings.Cut(rest, "/")
	i.Name, i.Role = name, Role(role)
	switch kind {
	case "node":
		i.Kind = Node
	case "person":
		i.Kind = Person
	}
	if err := i.Check(); err != nil {
		return Identity{}, fmt.Errorf("%s: %w", u, err)
	}
	if u.String() != i.URI().String() {
		return Identity{}, fmt.Errorf("%s: not the name of a node or a person", u)
	}
	return i, nil
}

// OfCertificate returns whom a certificate names, which must have been verified. One that names
// nobody of a cluster is Outside: an operator's own authority has signed it.
func OfCertificate(cert *x509.Certificate) Identity {
	for _, u := range cert.URIs {
		if i, err := ParseURI(u); err == nil {
			return i
		}
	}
	name := cert.Subject.CommonName
	if name == "" {
		name = cert.SerialNumber.String()
	}
	return Identity{Kind: Outside, Name: name}
}

// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/beat"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/proto/pki"
	"weft.dev/weft/volmgr/audit"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/trust"
)

// identities gives certificates to members. The records say who may have one and which authority
// signs; the keyring of this manager has the keys.
type identities struct {
	pb.UnimplementedIdentitiesServer
	pb.UnimplementedKeysServer
	m *Manager
}

var errNoKeys = &cluster.Error{Kind: cluster.FailedPrecondition, Text: "this manager has no authority of its own",
	Hint: "it runs with --tls-ca or --insecure-plain-tcp: start it without, see `weft ca init --help`"}

// keys returns the keyring, or why there is none.
func (s identities) keys() (*pki.Keyring, error) {
	if s.m.cfg.Keys == nil {
		return nil, errNoKeys
	}
	return s.m.cfg.Keys, nil
}

// Join gives a certificate to the holder of a token.
func (s identities) Join(ctx context.Context, r *pb.JoinRequest) (*pb.Credentials, error) {
	keys, err := s.keys()
	if err != nil {
		return nil, toStatus(err)
	}
	request, err := certificateRequest(r.CertificateRequest)
	if err != nil {
		return nil, err
	}
	if len(r.AccountToken) > 0 {
		return s.joinVouched(ctx, keys, r, request)
	}
	result, err := s.m.step(ctx, cluster.UseToken{ID: r.TokenId, Hash: pki.HashProof(r.Proof), Key: request.Key})
	if bad, ok := errors.AsType[*cluster.Error](err); ok && bad.Reason == cluster.ReasonToken {
		s.m.refuse(ctx)
	}
	if err != nil {
		return nil, toStatus(err)
	}
	return s.sign(ctx, keys, result.(cluster.Grant), request)
}

// Renew gives another certificate to a member.
func (s identities) Renew(ctx context.Context, r *pb.RenewRequest) (*pb.Credentials, error) {
	keys, err := s.keys()
	if err != nil {
		return nil, toStatus(err)
	}
	who, _ := access.From(ctx)
	if err := who.Check(); err != nil {
		return nil, toStatus(&cluster.Error{Kind: cluster.FailedPrecondition, Text: fmt.Sprintf("renew a certificate: the caller, %v, has none", who)})
	}
	request, err := certificateRequest(r.CertificateRequest)
	if err != nil {
		return nil, err
	}
	of := trust.Subject{Person: who.Kind == access.Person, Name: who.Name, Role: string(who.Role)}
	result, err := s.m.step(ctx, cluster.RenewCertificate{Subject: of, Issued: access.Issued(ctx)})
	if err != nil {
		return nil, toStatus(err)
	}
	return s.sign(ctx, keys, result.(cluster.Grant), request)
}

func certificateRequest(der []byte) (pki.Request, error) {
	return field("certificate_request", string(der), func(der string) (pki.Request, error) { return pki.ParseRequest([]byte(der)) })
}

// identity is the identity of a subject in this cluster.
func (s identities) identity(of trust.Subject) access.Identity {
	kind := access.Node
	if of.Person {
		kind = access.Person
	}
	return access.Identity{Kind: kind, Cluster: s.m.cluster, Name: of.Name, Role: access.Role(of.Role)}
}

// sign signs a certificate that has been recorded.
func (s identities) sign(ctx context.Context, keys *pki.Keyring, grant cluster.Grant, request pki.Request) (*pb.Credentials, error) {
	all, err := s.authorities(ctx)
	if err != nil {
		return nil, toStatus(err)
	}
	who := s.identity(grant.Subject)
	cert, err := keys.Issue(all[0].Hash, who, request, grant.Issued)
	if errors.Is(err, pki.ErrNoAuthority) {
		return nil, toStatus(&cluster.Error{Kind: cluster.FailedPrecondition, Text: err.Error(), Hint: "repeat it; if that does not help, see the log of the other managers"})
	}
	if err != nil {
		return nil, toStatus(err)
	}
	s.m.cfg.Log.Info("certificate issued", "to", who.String(), "until", cert.NotAfter, "key", request.Key[:16])
	return &pb.Credentials{Certificate: cert.Raw, Authorities: list(all, func(a trust.Authority) []byte { return a.Cert })}, nil
}

// authorities returns the recorded authorities, of which there is at least one.
func (s identities) authorities(ctx context.Context) ([]trust.Authority, error) {
	state, err := s.m.snapshot(ctx)
	if err != nil {
		return nil, err
	}
	all := state.Authorities()
	if len(all) == 0 {
		return nil, errNoKeys
	}
	return all, nil
}

// CreateToken makes a token.
func (s identities) CreateToken(ctx context.Context, r *pb.CreateTokenRequest) (*pb.CreateTokenResponse, error) {
	if _, err := s.keys(); err != nil {
		return nil, toStatus(err)
	}
	subject := trust.Subject{Person: r.GetSubject().GetPerson(), Name: r.GetSubject().GetName(), Role: r.GetSubject().GetRole()}
	if err := s.identity(subject).Check(); err != nil {
		return nil, toStatus(&cluster.Error{Kind: cluster.InvalidArgument, Field: "subject", Text: err.Error()})
	}
	all, err := s.authorities(ctx)
	if err != nil {
		return nil, toStatus(err)
	}
	token := pki.NewToken(all[0].Hash)
	life := time.Duration(min(r.Seconds, math.MaxInt64/uint64(time.Second))) * time.Second
	return call(ctx, s.m, cluster.CreateToken{ID: token.ID, Hash: pki.HashProof(token.Proof()), Subject: subject, Life: life}, func(t trust.Token) *pb.CreateTokenResponse {
		return &pb.CreateTokenResponse{Token: token.Text(), Created: pbToken(t)}
	})
}

func pbSubject(s trust.Subject) *pb.Subject {
	return &pb.Subject{Person: s.Person, Name: s.Name, Role: s.Role}
}

// ownTokensMost is how many tokens a person may have made for themselves that have not expired.
const ownTokensMost = 8

// CreateOwnToken makes a token for the person who calls.
func (s identities) CreateOwnToken(ctx context.Context, _ *pb.CreateOwnTokenRequest) (*pb.CreateTokenResponse, error) {
	who, _ := access.From(ctx)
	if who.Kind != access.Person {
		return nil, toStatus(&cluster.Error{Kind: cluster.FailedPrecondition, Text: fmt.Sprintf("a token for the caller: %v is no person of this cluster", who),
			Hint: "an admin makes one for a person with `weft token create --person NAME --role ROLE`"})
	}
	state, err := s.m.snapshot(ctx)
	if err != nil {
		return nil, toStatus(err)
	}
	own := 0
	for _, t := range state.Tokens() {
		if t.Subject.Person && t.Subject.Name == who.Name {
			own++
		}
	}
	if own >= ownTokensMost {
		return nil, toStatus(&cluster.Error{Kind: cluster.ResourceExhausted, Text: fmt.Sprintf("%d tokens of %s have not expired; no more are made", own, who.Name), Hint: "wait some minutes"})
	}
	return s.CreateToken(ctx, &pb.CreateTokenRequest{Subject: &pb.Subject{Person: true, Name: who.Name, Role: string(who.Role)}})
}

func pbToken(t trust.Token) *pb.Token {
	return &pb.Token{Id: t.ID, Subject: pbSubject(t.Subject),
		Created: pbTime(t.Created), Expires: pbTime(t.Expires), Used: pbTime(t.Used)}
}

// ListTokens lists the tokens that have not expired.
func (s identities) ListTokens(ctx context.Context, _ *pb.ListTokensRequest) (*pb.ListTokensResponse, error) {
	return read(ctx, s.m, always((*cluster.State).Tokens), func(all []trust.Token) *pb.ListTokensResponse {
		return &pb.ListTokensResponse{Tokens: list(all, pbToken)}
	})
}

// DeleteToken makes a token useless.
func (s identities) DeleteToken(ctx context.Context, r *pb.DeleteTokenRequest) (*pb.DeleteTokenResponse, error) {
	return do[pb.DeleteTokenResponse](ctx, s.m, cluster.DeleteToken{ID: r.Id})
}

// ListAccess lists the identities that have certificates.
func (s identities) ListAccess(ctx context.Context, _ *pb.ListAccessRequest) (*pb.ListAccessResponse, error) {
	return read(ctx, s.m, always((*cluster.State).Holders), pbAccess)
}

func pbAccess(all []trust.Holder) *pb.ListAccessResponse {
	return &pb.ListAccessResponse{Access: list(all, func(h trust.Holder) *pb.Access {
		out := &pb.Access{Subject: pbSubject(h.Subject), Joined: pbTime(h.Joined), Ends: pbTime(h.Ends())}
		if h.Out() {
			out.Revoked = pbTime(h.Revoked)
		}
		return out
	})}
}

// RevokeAccess revokes certificates.
func (s identities) RevokeAccess(ctx context.Context, r *pb.RevokeAccessRequest) (*pb.ListAccessResponse, error) {
	subject := trust.Subject{Person: r.GetSubject().GetPerson(), Name: r.GetSubject().GetName(), Role: r.GetSubject().GetRole()}
	checked := subject
	if subject.Role == "" { // every role of the name
		checked.Role = string(access.Target)
		if subject.Person {
			checked.Role = string(access.Viewer)
		}
	}
	if err := s.identity(checked).Check(); err != nil {
		return nil, toStatus(&cluster.Error{Kind: cluster.InvalidArgument, Field: "subject", Text: err.Error()})
	}
	in := cluster.RevokeAccess{Subject: subject}
	if q := s.m.quorum; q != nil && !subject.Person && subject.Role == trust.ManagerRole {
		if _, err := q.confirmed(ctx); err != nil {
			return nil, toStatus(q.refusalOf(err))
		}
		in.NoMember = !q.hasNamed(subject.Name)
	}
	return call(ctx, s.m, in, pbAccess)
}

// ListAuthorities lists the authorities.
func (s identities) ListAuthorities(ctx context.Context, _ *pb.ListAuthoritiesRequest) (*pb.ListAuthoritiesResponse, error) {
	return read(ctx, s.m, always((*cluster.State).Authorities), pbAuthorities)
}

func pbAuthorities(all []trust.Authority) *pb.ListAuthoritiesResponse {
	return &pb.ListAuthoritiesResponse{Authorities: list(all, func(a trust.Authority) *pb.Authority {
		out := &pb.Authority{Hash: a.Hash, Certificate: a.Cert, Added: pbTime(a.Added), Signs: a.Signs}
		if a.Old {
			out.Goes = pbTime(a.Next)
		} else {
			out.Begins = pbTime(a.Next)
		}
		return out
	})}
}

// auditMost is how many entries are in an answer.
const auditMost = 1000

// ListAudit lists who asked for what.
func (s identities) ListAudit(ctx context.Context, r *pb.ListAuditRequest) (*pb.ListAuditResponse, error) {
	limit := int(min(r.Limit, auditMost))
	if limit == 0 {
		limit = auditMost
	}
	return read(ctx, s.m, func(state *cluster.State) (*pb.ListAuditResponse, error) {
		entries, head := state.Audit(r.AfterSeq, r.Newest, limit)
		return &pb.ListAuditResponse{Entries: list(entries, pbAuditEntry), FirstSeq: head.First, Head: head.Hash}, nil
	}, func(answer *pb.ListAuditResponse) *pb.ListAuditResponse { return answer })
}

func pbAuditEntry(e audit.Entry) *pb.AuditEntry {
	return &pb.AuditEntry{
		Seq: e.Seq, Time: pbTime(e.Time), Who: e.Who, From: e.From, Call: e.Call, Request: e.Request, RequestId: e.ID,
		FirstEvent: e.FirstEvent, LastEvent: e.LastEvent, Prev: e.Prev, Hash: e.Hash,
	}
}

// RotateAuthority begins a rotation.
func (s identities) RotateAuthority(ctx context.Context, _ *pb.RotateAuthorityRequest) (*pb.ListAuthoritiesResponse, error) {
	keys, err := s.keys()
	if err != nil {
		return nil, toStatus(err)
	}
	all, err := s.authorities(ctx)
	if err != nil {
		return nil, toStatus(err)
	}
	if len(all) > 1 { // before a key is made; the input checks it too
		return nil, toStatus(&cluster.Error{Kind: cluster.FailedPrecondition, Text: trust.ErrRotating.Error(), Hint: "`weft ca list` says when it ends"})
	}
	next, err := keys.Add(s.m.cluster)
	if err != nil {
		return nil, toStatus(err)
	}
	return call(ctx, s.m, cluster.AddAuthority{Hash: next.Hash(), Cert: next.Cert.Raw}, pbAuthorities)
}

// GetKeys gives the authorities' keys to another manager. The guard lets only managers in; over
// plain TCP, where nobody is asked, no keys are given.
func (s identities) GetKeys(ctx context.Context, _ *pb.GetKeysRequest) (*pb.GetKeysResponse, error) {
	keys, err := s.keys()
	if err != nil {
		return nil, toStatus(err)
	}
	if who, ok := access.From(ctx); ok && (who.Kind != access.Node || who.Role != access.Manager) {
		return nil, toStatus(&cluster.Error{Kind: cluster.FailedPrecondition, Text: fmt.Sprintf("%v is no manager of this cluster", who)})
	}
	if name := managerName(ctx); s.m.quorum != nil && !s.m.quorum.hasNamed(name) {
		return nil, toStatus(&cluster.Error{Kind: cluster.FailedPrecondition, Text: fmt.Sprintf("manager %s is no member: it was removed, or has not joined", name)})
	}
	all, err := s.authorities(ctx)
	if err != nil {
		return nil, toStatus(err)
	}
	text, err := keys.Export()
	if err != nil {
		return nil, toStatus(err)
	}
	return &pb.GetKeysResponse{Keys: text, Authorities: list(all, func(a trust.Authority) []byte { return a.Cert })}, nil
}

// keysEvery is how often a manager compares its keys with the records.
const keysEvery = 5 * time.Second

// keepKeys keeps the keyring in line with the records, until ctx ends.
func (m *Manager) keepKeys(ctx context.Context) {
	tick := beat.NewTicker(keysEvery)
	defer tick.Stop()
	said := ""
	for {
		switch err := m.keepKeysOnce(ctx); {
		case ctx.Err() != nil:
			return
		case err == nil:
			said = ""
		case err.Error() != said:
			said = err.Error()
			m.cfg.Log.Warn("keys of the authority", "err", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// keepKeysOnce takes what the records say of authorities: from the own state if this manager leads,
// else from the manager that does, with the keys.
func (m *Manager) keepKeysOnce(ctx context.Context) error {
	keys := m.cfg.Keys
	ctx, cancel := context.WithTimeout(ctx, keysEvery)
	defer cancel()
	state, err := m.snapshot(ctx)
	if err == nil {
		return m.keepOwn(ctx, keys, state.Authorities())
	}
	var led notLeading
	if !errors.As(err, &led) || led.leader == "" || m.cfg.Quorum == nil || m.cfg.Quorum.Dial == nil {
		return keys.Refresh() // there is no leader; it is asked again soon
	}
	conn, err := m.cfg.Quorum.Dial(led.leader)
	if err != nil {
		return err
	}
	defer conn.Close()
	got, err := pb.NewKeysClient(conn).GetKeys(ctx, &pb.GetKeysRequest{})
	if err != nil {
		err = fmt.Errorf("ask %s for the authority's keys: %w", led.leader, err)
		return errors.Join(err, keys.Refresh()) // if its own certificate has ended, nobody else can help
	}
	if err := keys.Import(got.Keys); err != nil {
		return err
	}
	return keepTrusted(keys, got.Authorities)
}

// keepOwn is for the manager that leads: it records its authority if there is none in the records,
// or if it has the key of none of them and a newer one: then "weft ca init" has made that, or the
// records are of a backup from before a rotation. Managers sign for themselves, so it records that
// they may have.
func (m *Manager) keepOwn(ctx context.Context, keys *pki.Keyring, all []trust.Authority) error {
	have := keys.Authorities()
	if len(all) == 0 && len(have) == 0 {
		return pki.ErrNoAuthority
	}
	if newest := slices.MaxFunc(append(have, &x509.Certificate{}), made); len(all) == 0 || supersedes(newest, have, all) {
		result, err := m.step(ctx, cluster.AddAuthority{Hash: pki.Hash(newest), Cert: newest.Raw, First: len(all) == 0, Alone: true, Seed: newSeed()})
		if err != nil {
			return err
		}
		all = result.([]trust.Authority)
	}
	if _, err := m.step(ctx, cluster.ManagersSign{}); err != nil {
		return err
	}
	return errors.Join(keepTrusted(keys, list(all, func(a trust.Authority) []byte { return a.Cert })), keyless(keys.Authorities(), all))
}

// keyless says which recorded authority's key is not with the manager that leads, although another one's is: the
// one that has made it led only for a moment, and only who leads gives keys.
func keyless(have []*x509.Certificate, all []trust.Authority) error {
	for _, a := range all {
		if !hasKey(have, a) {
			return fmt.Errorf("the key of authority %s is not here, so nobody gets a certificate of it: let the manager lead again that began the rotation (`weft volmgr transfer`)", a.Hash)
		}
	}
	return nil
}

// hasKey reports whether an authority is among those of which the key is here.
func hasKey(have []*x509.Certificate, a trust.Authority) bool {
	return slices.ContainsFunc(have, func(c *x509.Certificate) bool { return pki.Hash(c) == a.Hash })
}

func made(a, b *x509.Certificate) int { return a.NotBefore.Compare(b.NotBefore) }

// supersedes reports whether an authority of which the key is here takes the place of those in the
// records: none of their keys is here, and it is newer than each.
func supersedes(newest *x509.Certificate, have []*x509.Certificate, all []trust.Authority) bool {
	for _, a := range all {
		if hasKey(have, a) {
			return false
		}
		cert, err := x509.ParseCertificate(a.Cert)
		if err != nil || made(newest, cert) <= 0 {
			return false
		}
	}
	return true
}

func keepTrusted(keys *pki.Keyring, ders [][]byte) error {
	var certs []*x509.Certificate
	for _, der := range ders {
		cert, err := x509.ParseCertificate(der)
		if err != nil {
			return err
		}
		certs = append(certs, cert)
	}
	if len(certs) == 0 {
		return pki.ErrNoAuthority
	}
	return keys.Keep(certs)
}

// Guard is the guard of a server on which the manager is registered.
func (m *Manager) Guard() access.Guard {
	return access.Guard{Cluster: m.cluster, Revoked: &m.revoked, Refused: m.Refused}
}

// noteRevoked takes over which certificates are revoked, if records say that anew; nil stands for
// all records. Every manager does so, whether it leads or not, before anyone is told of a commit.
func (m *Manager) noteRevoked(records []cluster.Record) error {
	about := func(r cluster.Record) bool { return strings.HasPrefix(r.Key, cluster.HolderPrefix) }
	if records != nil && !slices.ContainsFunc(records, about) {
		return nil
	}
	m.noting.Lock()
	defer m.noting.Unlock()
	all, err := m.records.LoadPrefix(cluster.HolderPrefix)
	if err != nil {
		return err
	}
	var revoked []access.Revoked
	for _, r := range all {
		h, err := cluster.ParseHolder(r)
		if err != nil {
			return err
		}
		until := h.RefusedUntil()
		if until.IsZero() {
			continue
		}
		who := identities{m: m}.identity(h.Subject)
		revoked = append(revoked, access.Revoked{Kind: who.Kind, Name: who.Name, Role: who.Role, Until: until})
	}
	m.revoked.Set(revoked)
	return nil
}

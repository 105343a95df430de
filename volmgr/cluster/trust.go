// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/audit"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/trust"
)

// ReasonToken is the reason when a token is not accepted, ReasonRevoked when a certificate is not.
const (
	ReasonToken   = "TOKEN_REFUSED"
	ReasonRevoked = "CERTIFICATE_REVOKED"
)

// CreateToken records a token. Result: trust.Token.
type CreateToken struct {
	ID, Hash string
	Subject  trust.Subject
	Life     time.Duration // 0: trust.DefaultLife
}

func (in CreateToken) apply(t *tx) (view, error) {
	if err := t.needs("t", "token"); err != nil {
		return nil, err
	}
	life := cmp.Or(in.Life, trust.DefaultLife)
	if life < 0 || life > trust.LongestLife {
		return nil, &Error{Kind: InvalidArgument, Field: "seconds", Text: fmt.Sprintf("seconds: %v; a token is good for %v at most", life, trust.LongestLife)}
	}
	if len(t.s.tokens) >= trust.TokensMost {
		return nil, &Error{Kind: ResourceExhausted, Text: fmt.Sprintf("%d tokens are good; no more are made", len(t.s.tokens)), Hint: "`weft token delete` some, or wait until they expire"}
	}
	token := trust.Token{ID: in.ID, Hash: in.Hash, Subject: in.Subject, Created: t.now.UTC(), Expires: t.now.Add(life).UTC()}
	t.tokens.set(token.ID, &token)
	t.event(event.Info, event.TokenCreated, "token "+token.ID, fmt.Sprintf("for %v, until %s", token.Subject, token.Expires.Format(time.RFC3339)))
	return func(*State) any { return token }, nil
}

// DeleteToken makes a token useless. Result: nil.
type DeleteToken struct{ ID string }

func (in DeleteToken) apply(t *tx) (view, error) {
	if t.s.tokens[in.ID] == nil {
		return nil, notFound("token " + in.ID)
	}
	t.tokens.drop(in.ID)
	t.event(event.Info, event.TokenDeleted, "token "+in.ID, "it can no longer be used")
	return nil, nil
}

// Grant is a certificate to sign: for whom, and when it says that it was issued.
type Grant struct {
	Subject trust.Subject
	Issued  time.Time
}

// UseToken is a request of a peer to join. Result: Grant.
type UseToken struct {
	ID, Hash string
	Key      string // the hash of the public key for which it asks a certificate
}

func (in UseToken) apply(t *tx) (view, error) {
	was := t.s.tokens[in.ID]
	used, err := was.Use(in.Hash, in.Key, t.now)
	if err != nil {
		return nil, &Error{Kind: FailedPrecondition, Reason: ReasonToken, Text: err.Error(), Hint: "an admin makes another one with `weft token create`"}
	}
	if was.Key == "" {
		let := t.holder(used.Subject).LetIn(t.now)
		t.holders.set(used.Subject, &let)
	}
	grant, err := t.signed(used.Subject)
	if err != nil {
		return nil, err
	}
	if was.Key == "" {
		t.tokens.set(used.ID, &used)
		t.event(event.Info, event.TokenUsed, "token "+used.ID, fmt.Sprintf("%v has joined", used.Subject))
	}
	return func(*State) any { return grant }, nil
}

// RenewCertificate is a request of a member whose certificate says when it was issued. Result:
// Grant.
type RenewCertificate struct {
	Subject trust.Subject
	Issued  time.Time // zero: the certificate is not the cluster's own
}

func (in RenewCertificate) apply(t *tx) (view, error) {
	if h := t.s.holders[in.Subject]; h != nil && !in.Issued.IsZero() && trust.Refuses(h.Bound, in.Issued) {
		return nil, errRevoked(in.Subject)
	}
	grant, err := t.signed(in.Subject)
	return func(*State) any { return grant }, err
}

func errRevoked(of trust.Subject) error {
	return &Error{Kind: FailedPrecondition, Reason: ReasonRevoked, Text: fmt.Sprintf("%v: the certificate was revoked", of), Hint: "an admin lets it join again with `weft token create`"}
}

// JoinVouched is a request to join of somebody for whom Kubernetes vouches. Kubernetes vouches for a
// revoked one too, so that one needs a token. Result: Grant.
type JoinVouched struct{ Subject trust.Subject }

func (in JoinVouched) apply(t *tx) (view, error) {
	if t.shutOut(in.Subject) {
		return nil, errRevoked(in.Subject)
	}
	grant, err := t.signed(in.Subject)
	if err != nil {
		return nil, err
	}
	if h := t.holders.edit(in.Subject); h.Joined.IsZero() {
		h.Joined = t.now.UTC()
		t.event(event.Info, event.AccessJoined, in.Subject.String(), "Kubernetes vouches for it")
	}
	return func(*State) any { return grant }, nil
}

// shutOut reports whether the certificates of an identity were revoked. One that has none, of a node
// that was shut out in another role, is shut out too: Kubernetes vouches for the node in every role.
func (t *tx) shutOut(of trust.Subject) bool {
	if h := t.s.holders[of]; h != nil {
		return h.Out()
	}
	for other, h := range t.s.holders {
		if !other.Person && other.Name == of.Name && h.Out() {
			return true
		}
	}
	return false
}

// ManagersSign records that managers may have signed certificates for themselves until now. Result:
// nil.
type ManagersSign struct{}

func (ManagersSign) apply(t *tx) (view, error) { return nil, t.signs(t.now.Add(trust.CertificateLife)) }

// signed records that the authority signs a certificate.
func (t *tx) signed(of trust.Subject) (Grant, error) {
	holder, issued := t.holder(of).Issue(t.now)
	if err := t.signs(holder.Ends()); err != nil {
		return Grant{}, err
	}
	t.holders.set(of, &holder)
	return Grant{of, issued}, nil
}

// signs records that the authority signs certificates that end at until at the latest.
func (t *tx) signs(until time.Time) error {
	next, changed := trust.Sign(t.s.Authorities(), until)
	if trust.Signer(next) == nil {
		return errNoAuthority
	}
	if changed {
		t.keepAuthorities(next)
	}
	return nil
}

var errNoAuthority = &Error{Kind: FailedPrecondition, Text: "this cluster has no authority of its own", Hint: "start its managers without --tls-ca and --insecure-plain-tcp"}

// holder is what is known of an identity.
func (t *tx) holder(of trust.Subject) trust.Holder {
	if h := t.holders.peek(of); h != nil {
		return *h
	}
	return trust.Holder{Subject: of}
}

// RevokeAccess revokes the certificates and tokens of a name: in one role, or, if Subject has
// none, in all but that of a manager. A manager has the authority's key, so it is removed, and the
// authority rotated; only one that is no member of the quorum is shut out so. Result: []trust.Holder.
type RevokeAccess struct {
	Subject  trust.Subject
	NoMember bool // of the quorum
}

func (in RevokeAccess) apply(t *tx) (view, error) {
	if trust.Signer(t.s.Authorities()) == nil {
		return nil, errNoAuthority
	}
	if !in.Subject.Person && in.Subject.Role == trust.ManagerRole {
		if in.NoMember {
			revoked := []trust.Holder{t.shutOutManager(in.Subject)}
			return func(*State) any { return revoked }, nil
		}
		return nil, &Error{Kind: FailedPrecondition, Text: fmt.Sprintf("%v: a manager has the authority's key, so its certificates cannot be revoked", in.Subject),
			Hint: "remove it with `weft volmgr remove` if it is a member, and rotate the authority with `weft ca rotate`"}
	}
	revoked := t.revoke(in.Subject)
	if len(revoked) == 0 && in.Subject.Role == "" {
		return nil, &Error{Kind: NotFound, Text: fmt.Sprintf("%s %s: nobody of that name has joined", in.Subject.Word(), in.Subject.Name),
			Hint: "`weft access list` lists who has; to revoke what this store does not know, after a restore, give --role"}
	}
	if len(revoked) == 0 {
		revoked = []trust.Holder{t.revokeOne(in.Subject)}
	}
	return func(*State) any { return revoked }, nil
}

// revoke revokes what is known of a name, and drops its tokens: who has used one could show it again.
func (t *tx) revoke(of trust.Subject) (revoked []trust.Holder) {
	all := map[trust.Subject]bool{}
	for subject := range t.s.holders {
		all[subject] = meant(of, subject)
	}
	for _, id := range slices.Sorted(maps.Keys(t.s.tokens)) {
		if subject := t.s.tokens[id].Subject; meant(of, subject) {
			t.tokens.drop(id)
			all[subject] = true
		}
	}
	for _, subject := range slices.SortedFunc(maps.Keys(all), trust.Subject.Compare) {
		if all[subject] {
			revoked = append(revoked, t.revokeOne(subject))
		}
	}
	return revoked
}

func meant(of, subject trust.Subject) bool {
	if of.Role == "" {
		of.Role = subject.Role
	}
	return of == subject && (subject.Person || subject.Role != trust.ManagerRole)
}

func (t *tx) revokeOne(of trust.Subject) trust.Holder {
	h := t.holder(of).Revoke(t.now)
	t.holders.set(of, &h)
	t.event(event.Warning, event.AccessRevoked, of.String(), "its certificates and tokens are worthless; it can join again with a new token")
	return h
}

// AddAuthority adds an authority: the first one, or the next one, which begins a rotation. The
// first one may come again. It raises the level of a cluster from before authorities: a manager of
// an earlier version cannot speak with those of a closed cluster. Result: []trust.Authority.
type AddAuthority struct {
	Hash  string
	Cert  []byte
	First bool // only if there is none
	Alone bool // in place of all that there are: their keys are lost
	Seed  Seed // as in BeginTerm
}

func (in AddAuthority) apply(t *tx) (view, error) {
	all := t.s.Authorities()
	answer := func(s *State) any { return s.Authorities() }
	if in.First && len(all) > 0 {
		return answer, nil
	}
	if in.Alone {
		all = nil
	}
	next, err := trust.Add(all, in.Hash, in.Cert, t.now)
	if errors.Is(err, trust.ErrRotating) {
		return nil, &Error{Kind: FailedPrecondition, Text: err.Error(), Hint: "`weft ca list` says when it ends"}
	}
	if err != nil {
		return nil, err
	}
	if !t.may("a") {
		t.raise(kinds["a"], "the cluster is closed", in.Seed)
	}
	t.keepAuthorities(next)
	if added := next[len(next)-1]; added.Signs {
		t.event(event.Info, event.AuthoritySigns, "authority "+short(added.Hash), "it signs the certificates of this cluster")
	} else {
		t.event(event.Info, event.AuthorityAdded, "authority "+short(added.Hash), "it is trusted, and signs certificates from "+added.Next.Format(time.RFC3339)+" on")
	}
	return answer, nil
}

// short is how an authority is named for people.
func short(hash string) string { return hash[:min(16, len(hash))] }

// keepAuthorities replaces the authorities.
func (t *tx) keepAuthorities(next []trust.Authority) {
	for hash := range t.s.authorities {
		if !slices.ContainsFunc(next, func(a trust.Authority) bool { return a.Hash == hash }) {
			t.authorities.drop(hash)
		}
	}
	for _, a := range next {
		t.authorities.set(a.Hash, &a)
	}
}

// settleTrust drops tokens that have expired and identities whose certificates ended long ago, and
// makes the step of a rotation that is due.
func (t *tx) settleTrust() {
	for subject, h := range t.s.holders {
		if t.forgettable(h) {
			t.holders.drop(subject)
			delete(t.s.overSince, subject)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(t.s.tokens)) {
		if !t.now.Before(t.s.tokens[id].Expires) {
			t.tokens.drop(id)
		}
	}
	if len(t.s.authorities) < 2 {
		return
	}
	next, began, gone := trust.Due(t.s.Authorities(), t.now)
	switch {
	case began != nil:
		t.keepAuthorities(next)
		t.event(event.Info, event.AuthoritySigns, "authority "+short(began.Hash), "it signs certificates from now on; the one before is trusted until its last one ends")
	case gone != nil:
		t.keepAuthorities(next)
		t.event(event.Info, event.AuthorityGone, "authority "+short(gone.Hash), "its last certificate has ended, and it is trusted no more")
	}
}

// clockDoubt is how long the clock of the manager that leads has to say that the last certificate of
// an identity has ended before that is believed and a revocation forgotten: a clock that was set ahead
// by mistake is set back before that.
const clockDoubt = 24 * time.Hour

// forgettable reports whether an identity has been over for clockDoubt of the time for which this
// manager has led, which setting the clock does not change.
func (t *tx) forgettable(h *trust.Holder) bool {
	if !h.Over(t.now) {
		delete(t.s.overSince, h.Subject)
		return false
	}
	since, known := t.s.overSince[h.Subject]
	if !known {
		since = t.now
		t.s.overSince[h.Subject] = since
	}
	return t.now.Sub(since) >= clockDoubt
}

// commitTrust swaps in the tokens, the authorities and the master of keys that this step has changed.
func (t *tx) commitTrust() (records []Record) {
	for _, id := range slices.Sorted(maps.Keys(t.tokens.upper)) {
		records = append(records, t.tokens.commit(id, tokenKey(id)))
	}
	for _, hash := range slices.Sorted(maps.Keys(t.authorities.upper)) {
		records = append(records, t.authorities.commit(hash, authorityKey(hash)))
	}
	for _, of := range slices.SortedFunc(maps.Keys(t.holders.upper), trust.Subject.Compare) {
		records = append(records, t.holders.commit(of, holderKey(of)))
	}
	if len(records) > 0 {
		t.s.still = nil
	}
	if !t.master.IsZero() {
		t.s.master = t.master
		records = append(records, masterRecord(t.master))
	}
	return records
}

// Holders returns the identities that have certificates, in order.
func (s *State) Holders() []trust.Holder {
	var all []trust.Holder
	for _, of := range slices.SortedFunc(maps.Keys(s.holders), trust.Subject.Compare) {
		all = append(all, *s.holders[of])
	}
	return all
}

// revoked reports whether a node's agent has no certificate that is not revoked.
func (s *State) revoked(node block.NodeName, role string) bool {
	h := s.holders[trust.Subject{Name: string(node), Role: role}]
	return h != nil && h.Out()
}

// joinAgain is what to do about an agent whose certificate was revoked.
func joinAgain(node block.NodeName, role string) string {
	return fmt.Sprintf("the certificate of %s %s was revoked: to let it join again, weft token create --node %s --role %s", role, node, node, role)
}

// HolderPrefix begins the keys of the records of identities.
const HolderPrefix = "i/"

func holderKey(of trust.Subject) string {
	return HolderPrefix + of.Word() + "/" + of.Name + "/" + of.Role
}

// ParseHolder returns the identity that a record with [HolderPrefix] holds.
func ParseHolder(r Record) (trust.Holder, error) {
	h, err := decode[trust.Holder](r.Value)
	if err != nil {
		return trust.Holder{}, fmt.Errorf("record %q: %w", r.Key, err)
	}
	return *h, nil
}

// Authorities returns the authorities that members trust, the one that signs first.
func (s *State) Authorities() []trust.Authority {
	var all []trust.Authority
	for _, hash := range slices.Sorted(maps.Keys(s.authorities)) {
		all = append(all, *s.authorities[hash])
	}
	if i := slices.IndexFunc(all, func(a trust.Authority) bool { return a.Signs }); i > 0 {
		all[0], all[i] = all[i], all[0]
	}
	return all
}

// Refused is an attempt to call what the caller may not. Result: nil.
type Refused struct {
	Who, From, Call string
	Times           int // since the last one that was told of
}

func (in Refused) apply(t *tx) (view, error) {
	times := ""
	if in.Times > 1 {
		times = fmt.Sprintf(", %d times", in.Times)
	}
	t.event(event.Warning, event.AccessRefused, in.Who, fmt.Sprintf("refused: %s%s", in.Call, times), "from", in.From, "call", in.Call)
	return nil, nil
}

// ManagersChange tells that a manager was added or removed, which the quorum has recorded. The
// certificates and tokens of one that was removed are worthless. Result: nil.
type ManagersChange struct {
	ID, Address string
	Name        string // that it has proven; empty: none
	Removed     bool
}

func (in ManagersChange) apply(t *tx) (view, error) {
	kind, text := event.ManagerAdded, "it follows, and votes when it has caught up"
	if in.Removed {
		kind, text = event.ManagerRemoved, "it is a member of the quorum no more"
	}
	t.event(event.Info, kind, "manager "+in.ID, text, "address", in.Address)
	if in.Removed && in.Name != "" && trust.Signer(t.s.Authorities()) != nil {
		t.shutOutManager(trust.Subject{Name: in.Name, Role: trust.ManagerRole})
	}
	return nil, nil
}

// shutOutManager revokes the certificates of a manager, and drops its tokens.
func (t *tx) shutOutManager(of trust.Subject) trust.Holder {
	for _, id := range slices.Sorted(maps.Keys(t.s.tokens)) {
		if t.s.tokens[id].Subject == of {
			t.tokens.drop(id)
		}
	}
	return t.revokeOne(of)
}

// LetIn reports whether a node may become a manager: whoever has the authority's key can sign a
// certificate for one, so a token must have let it in. ok is true if there is no such authority.
func (s *State) LetIn(name string) (ok bool) {
	if trust.Signer(s.Authorities()) == nil {
		return true
	}
	h := s.holders[trust.Subject{Name: name, Role: trust.ManagerRole}]
	return h != nil && !h.Joined.IsZero() && !h.Out()
}

// Audit returns at most limit entries after a number, oldest first, and the end of the chain; or
// the newest ones.
func (s *State) Audit(after uint64, newest bool, limit int) ([]audit.Entry, audit.Head) {
	if newest {
		return s.audit.Newest(limit), s.audit.Head()
	}
	return s.audit.After(after, limit), s.audit.Head()
}

// Tokens returns the tokens that have not expired, by id.
func (s *State) Tokens() []trust.Token {
	var all []trust.Token
	for _, id := range slices.Sorted(maps.Keys(s.tokens)) {
		all = append(all, *s.tokens[id])
	}
	return all
}

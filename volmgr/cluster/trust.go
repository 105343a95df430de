// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"weft.dev/weft/volmgr/audit"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/trust"
)

// ReasonToken is the reason when a token is not accepted.
const ReasonToken = "TOKEN_REFUSED"

// CreateToken records a token. Result: trust.Token.
type CreateToken struct {
	ID, Hash string
	Subject  trust.Subject
	Life     time.Duration // 0: trust.DefaultLife
}

func (in CreateToken) apply(t *tx) (view, error) {
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

// UseToken is a request of a peer to join. Result: trust.Subject.
type UseToken struct {
	ID, Hash string
	Key      string    // the hash of the public key for which it asks a certificate
	Until    time.Time // when the certificate will end
}

func (in UseToken) apply(t *tx) (view, error) {
	was := t.s.tokens[in.ID]
	used, err := was.Use(in.Hash, in.Key, t.now)
	if err != nil {
		return nil, &Error{Kind: FailedPrecondition, Reason: ReasonToken, Text: err.Error(), Hint: "an admin makes another one with `weft token create`"}
	}
	if err := t.signed(in.Until); err != nil {
		return nil, err
	}
	if was.Key == "" {
		t.tokens.set(used.ID, &used)
		t.event(event.Info, event.TokenUsed, "token "+used.ID, fmt.Sprintf("%v has joined", used.Subject))
	}
	return func(*State) any { return used.Subject }, nil
}

// RenewCertificate is a request of a member for a certificate that ends at Until. Result: nil.
type RenewCertificate struct{ Until time.Time }

func (in RenewCertificate) apply(t *tx) (view, error) { return nil, t.signed(in.Until) }

// signed records that the authority signs a certificate.
func (t *tx) signed(until time.Time) error {
	next, changed := trust.Sign(t.s.Authorities(), until)
	if trust.Signer(next) == nil {
		return &Error{Kind: FailedPrecondition, Text: "this cluster has no authority of its own", Hint: "start its managers without --tls-ca and --insecure-plain-tcp"}
	}
	if changed {
		t.keepAuthorities(next)
	}
	return nil
}

// AddAuthority adds an authority: the first one, or the next one, which begins a rotation. The
// first one may come again. Result: []trust.Authority.
type AddAuthority struct {
	Hash  string
	Cert  []byte
	First bool // only if there is none
	Alone bool // in place of all that there are: their keys are lost
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

// settleTrust drops tokens that have expired, and makes the step of a rotation that is due.
func (t *tx) settleTrust() {
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

// commitTrust swaps in the tokens and authorities that this step has changed.
func (t *tx) commitTrust() (records []Record) {
	for _, id := range slices.Sorted(maps.Keys(t.tokens.upper)) {
		records = append(records, t.tokens.commit(id, tokenKey(id)))
	}
	for _, hash := range slices.Sorted(maps.Keys(t.authorities.upper)) {
		records = append(records, t.authorities.commit(hash, authorityKey(hash)))
	}
	if len(records) > 0 {
		t.s.still = nil
	}
	return records
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

// ManagersChange tells that a manager was added or removed, which the quorum has recorded. Result: nil.
type ManagersChange struct {
	ID, Address string
	Removed     bool
}

func (in ManagersChange) apply(t *tx) (view, error) {
	kind, text := event.ManagerAdded, "it follows, and votes when it has caught up"
	if in.Removed {
		kind, text = event.ManagerRemoved, "it is a member of the quorum no more"
	}
	t.event(event.Info, kind, "manager "+in.ID, text, "address", in.Address)
	return nil, nil
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

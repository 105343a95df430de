// SPDX-License-Identifier: Apache-2.0

// Package trust decides who may join a cluster, and which authorities its members trust. It works
// on values alone: records hold them, and package proto/pki has the keys.
//
// A token is good for one key: whoever asks for a certificate again with the same key, because an
// answer was lost, gets one. An authority is rotated in three steps, none of which anybody has to
// wait for:
//
//	both are trusted, the old one signs ──► the new one signs ──► the old one is trusted no more
//	          └── until every certificate that ──┘  └── until every certificate that ──┘
//	              was signed before has ended           the old one signed has ended
//
// A certificate is renewed long before it ends, and with it come the authorities to trust. So in
// the second step every member knows the new authority, and in the third none needs the old one.
package trust

import (
	"cmp"
	"crypto/subtle"
	"errors"
	"slices"
	"time"
)

// Subject is who a certificate is for.
type Subject struct {
	Person bool   `json:"person,omitempty"` // else a node
	Name   string `json:"name"`
	Role   string `json:"role"`
}

// String names the subject.
func (s Subject) String() string { return s.Word() + " " + s.Name + " (" + s.Role + ")" }

// Word is "person" or "node".
func (s Subject) Word() string {
	if s.Person {
		return "person"
	}
	return "node"
}

// Compare orders subjects: nodes first, by name and role.
func (s Subject) Compare(other Subject) int {
	return cmp.Or(cmp.Compare(s.Word(), other.Word()), cmp.Compare(s.Name, other.Name), cmp.Compare(s.Role, other.Role))
}

// Token lets one subject join, once. Its secret is nowhere in it.
type Token struct {
	ID      string    `json:"id"`
	Hash    string    `json:"hash"` // of the secret
	Subject Subject   `json:"subject"`
	Created time.Time `json:"created"`
	Expires time.Time `json:"expires"`
	Key     string    `json:"key,omitempty"` // the hash of the public key that has used it; empty: none has
	Used    time.Time `json:"used,omitzero"`
}

// Bounds of tokens.
const (
	TokensMost  = 256
	DefaultLife = 15 * time.Minute
	LongestLife = 7 * 24 * time.Hour
)

// ErrToken is the only answer to a token that is not accepted, so that it tells nothing.
var ErrToken = errors.New("the token is not good: it has expired, another one has used it, it was deleted, or it never existed")

// Use returns the token after the holder of a key has used it.
func (t *Token) Use(hash, key string, now time.Time) (Token, error) {
	if t == nil || subtle.ConstantTimeCompare([]byte(t.Hash), []byte(hash)) != 1 || !now.Before(t.Expires) || t.Key != "" && t.Key != key {
		return Token{}, ErrToken
	}
	used := *t
	if used.Key == "" {
		used.Key, used.Used = key, now.UTC()
	}
	return used, nil
}

// Authority is one that members trust.
type Authority struct {
	Hash  string    `json:"hash"` // of its certificate
	Cert  []byte    `json:"cert"` // in DER
	Added time.Time `json:"added"`
	Signs bool      `json:"signs,omitempty"`
	// Until is when the last certificate that it has signed ends.
	Until time.Time `json:"until,omitzero"`
	// Next is when the next step of a rotation is due: when one that does not sign begins to, or
	// goes. Zero: it signs and is not rotated.
	Next time.Time `json:"next,omitzero"`
	// Old: it has signed, and does not any more.
	Old bool `json:"old,omitempty"`
}

// ErrRotating is the error of a rotation while another one is under way.
var ErrRotating = errors.New("a rotation is under way")

// Signer returns the authority that signs; nil if there is none.
func Signer(all []Authority) *Authority {
	if i := slices.IndexFunc(all, func(a Authority) bool { return a.Signs }); i >= 0 {
		return &all[i]
	}
	return nil
}

// Add returns the authorities with a further one. The first one signs at once; another one when
// every certificate that was signed before has ended.
func Add(all []Authority, hash string, cert []byte, now time.Time) ([]Authority, error) {
	next := Authority{Hash: hash, Cert: cert, Added: now.UTC()}
	switch signer := Signer(all); {
	case signer == nil:
		next.Signs = true
	case len(all) > 1:
		return nil, ErrRotating
	default:
		next.Next = later(signer.Until, now)
	}
	return append(slices.Clone(all), next), nil
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a.UTC()
	}
	return b.UTC()
}

// Due makes the step of a rotation that is due. began is an authority that signs now, gone one
// that is trusted no more; nil: none.
func Due(all []Authority, now time.Time) (next []Authority, began, gone *Authority) {
	next = slices.Clone(all)
	for i := range next {
		a := &next[i]
		if a.Next.IsZero() || now.Before(a.Next) {
			continue
		}
		if a.Old {
			was := *a
			return slices.Delete(next, i, i+1), nil, &was
		}
		for j := range next {
			if old := &next[j]; old.Signs {
				old.Signs, old.Old, old.Next = false, true, later(old.Until, now)
			}
		}
		a.Signs, a.Next = true, time.Time{}
		return next, a, nil
	}
	return next, nil, nil
}

// margin is how far ahead the end of the last certificate is recorded, so that not every one needs
// a record.
const margin = time.Hour

// Sign returns the authorities after the one that signs has signed a certificate that ends at
// until. changed is false if the record covers that.
func Sign(all []Authority, until time.Time) (next []Authority, changed bool) {
	next = slices.Clone(all)
	signer := Signer(next)
	if signer == nil || !until.After(signer.Until) {
		return next, false
	}
	signer.Until = until.Add(margin).UTC()
	return next, true
}

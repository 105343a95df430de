// SPDX-License-Identifier: Apache-2.0

package trust

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
)

var begin = time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)

func TestATokenIsGoodForOneKey(t *testing.T) {
	token := &Token{ID: "1", Hash: "secret's", Expires: begin.Add(DefaultLife)}
	for what, use := range map[string]func() (Token, error){
		"another secret":       func() (Token, error) { return token.Use("another's", "key", begin) },
		"when it has expired":  func() (Token, error) { return token.Use("secret's", "key", begin.Add(DefaultLife)) },
		"a token that is none": func() (Token, error) { return (*Token)(nil).Use("secret's", "key", begin) },
	} {
		if got, err := use(); !errors.Is(err, ErrToken) {
			t.Errorf("%s: %+v, %v; want %v", what, got, err, ErrToken)
		}
	}
	used, err := token.Use("secret's", "key", begin.Add(time.Minute))
	if err != nil || used.Key != "key" || !used.Used.Equal(begin.Add(time.Minute)) || token.Key != "" {
		t.Fatalf("Use = %+v, %v", used, err)
	}
	if again, err := used.Use("secret's", "key", begin.Add(2*time.Minute)); err != nil || again != used {
		t.Errorf("the same key once more: %+v, %v; want %+v", again, err, used)
	}
	if got, err := used.Use("secret's", "another key", begin.Add(2*time.Minute)); !errors.Is(err, ErrToken) {
		t.Errorf("another key: %+v, %v; want %v", got, err, ErrToken)
	}
}

// life of a certificate, in the test below.
const life = 7 * 24 * time.Hour

// member renews its certificate at two thirds of its life, or a little later, and trusts what it
// heard then.
type member struct {
	signer string // of its certificate
	ends   time.Time
	renew  time.Time
	trusts map[string]bool
}

// In any history of joins and renewals in time, members and managers accept one another at each
// moment of a rotation, and a rotation ends.
func TestARotationLocksNobodyOut(t *testing.T) {
	for seed := range uint64(200) {
		random := rand.New(rand.NewPCG(seed, 0))
		all, err := Add(nil, "authority 0", nil, begin)
		if err != nil || Signer(all) == nil {
			t.Fatalf("the first authority: %+v, %v", all, err)
		}
		var members []*member
		sign := func(m *member, now time.Time) {
			m.ends, m.trusts = now.Add(life), map[string]bool{}
			m.renew = now.Add(life*2/3 + time.Duration(random.Int64N(int64(life/4))))
			m.signer = Signer(all).Hash
			for _, a := range all {
				m.trusts[a.Hash] = true
			}
			all, _ = Sign(all, m.ends)
		}
		ended, began := 0, 0
		for now := begin; now.Before(begin.Add(60 * 24 * time.Hour)); now = now.Add(time.Duration(random.Int64N(int64(2 * time.Hour)))) {
			all, _, _ = step(&ended, all, now)
			if random.IntN(50) == 0 && len(members) < 20 {
				m := &member{}
				sign(m, now)
				members = append(members, m)
			}
			if random.IntN(100) == 0 {
				if next, err := Add(all, fmt.Sprint("authority ", began+1), nil, now); err == nil {
					all, began = next, began+1
				} else if !errors.Is(err, ErrRotating) {
					t.Fatal(err)
				}
			}
			signer := Signer(all)
			if signer == nil || len(all) > 2 {
				t.Fatalf("seed %d at %v: %+v", seed, now, all)
			}
			for i, m := range members {
				if !now.Before(m.renew) {
					// It still has a certificate that is good, or renews in vain.
					if now.Before(m.ends) && !known(all, m.signer) {
						t.Fatalf("seed %d at %v: member %d cannot renew: %+v, %+v", seed, now, i, m, all)
					}
					sign(m, now)
				}
				if !known(all, m.signer) || !m.trusts[signer.Hash] {
					t.Fatalf("seed %d at %v: member %d and the managers do not accept one another: %+v, %+v", seed, now, i, m, all)
				}
			}
		}
		if began == 0 || ended == 0 {
			t.Errorf("seed %d: %d rotations began, %d ended", seed, began, ended)
		}
	}
}

func step(ended *int, all []Authority, now time.Time) ([]Authority, *Authority, *Authority) {
	next, began, gone := Due(all, now)
	if gone != nil {
		*ended++
	}
	return next, began, gone
}

func known(all []Authority, hash string) bool {
	for _, a := range all {
		if a.Hash == hash {
			return true
		}
	}
	return false
}

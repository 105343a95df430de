// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/trust"
)

// steps applies inputs, and checks that the records hold what the state has.
func steps(t *testing.T, s *State, store map[string][]byte, now time.Time, in Input) (Outcome, error) {
	t.Helper()
	out, err := s.Step(now, in)
	for _, r := range out.Records {
		if store[r.Key] = r.Value; r.Value == nil {
			delete(store, r.Key)
		}
	}
	var records []Record
	for key, value := range store {
		records = append(records, Record{key, value})
	}
	again, loadErr := Load(records)
	if loadErr != nil {
		t.Fatal(loadErr)
	}
	if diff := cmp.Diff(again.Records(), s.Records()); diff != "" {
		t.Fatalf("after %T the records differ from the state:\n%s", in, diff)
	}
	return out, err
}

// One use of a token holds across restarts and managers, since it is a record: whoever loads the
// records refuses a second one.
func TestATokenIsUsedOnce(t *testing.T) {
	s, records := New(block.ClusterID{UUID: block.UUID{1}})
	store := map[string][]byte{}
	for _, r := range records {
		store[r.Key] = r.Value
	}
	now := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	use := UseToken{ID: "1", Hash: "hash", Key: "key"}
	do := func(in Input) error {
		t.Helper()
		_, err := steps(t, s, store, now, in)
		return err
	}
	if err := do(CreateToken{ID: "1", Hash: "hash", Subject: trust.Subject{Name: "t1", Role: "target"}}); err != nil {
		t.Fatal(err)
	}
	if err := do(use); err == nil {
		t.Error("somebody has joined a cluster without an authority")
	}
	if err := do(AddAuthority{Hash: "a", First: true}); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the answer may be lost
		if out, err := steps(t, s, store, now, use); err != nil || out.Result != (Grant{trust.Subject{Name: "t1", Role: "target"}, now}) {
			t.Fatalf("UseToken = %+v, %v", out.Result, err)
		}
	}
	var err error
	if s, err = Load(s.Records()); err != nil {
		t.Fatal(err)
	}
	other := use
	other.Key = "another key"
	var refused *Error
	if err := do(other); !errors.As(err, &refused) || refused.Reason != ReasonToken {
		t.Errorf("a second use after a restart: %v", err)
	}
	now = now.Add(trust.DefaultLife)
	if err := do(Tick{}); err != nil || len(s.Tokens()) != 0 {
		t.Errorf("%d tokens are kept after they have expired, %v", len(s.Tokens()), err)
	}
	if err := do(use); err == nil {
		t.Error("a token is used after it has expired")
	}
}

// A backup may be older than the use of a token, so it restores none.
func TestNoTokenIsRestored(t *testing.T) {
	s, _ := New(block.ClusterID{UUID: block.UUID{1}})
	now := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	for _, in := range []Input{AddAuthority{Hash: "a", First: true}, CreateToken{ID: "1", Hash: "hash", Subject: trust.Subject{Name: "t1", Role: "target"}}} {
		if _, err := s.Step(now, in); err != nil {
			t.Fatal(err)
		}
	}
	records, err := Restored(now, s.Records())
	if err != nil {
		t.Fatal(err)
	}
	again, err := Load(records)
	if err != nil || len(again.Tokens()) != 0 || len(again.Authorities()) != 1 {
		t.Errorf("restored: %d tokens, %d authorities, %v; want none and one", len(again.Tokens()), len(again.Authorities()), err)
	}
}

// A rotation goes on by itself, in three steps.
func TestAnAuthorityIsRotated(t *testing.T) {
	s, records := New(block.ClusterID{UUID: block.UUID{1}})
	store := map[string][]byte{}
	for _, r := range records {
		store[r.Key] = r.Value
	}
	now := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	do := func(in Input) error {
		t.Helper()
		_, err := steps(t, s, store, now, in)
		return err
	}
	hashes := func() (all []string) {
		for _, a := range s.Authorities() {
			all = append(all, a.Hash)
		}
		return all
	}
	for _, in := range []Input{AddAuthority{Hash: "z", First: true}, AddAuthority{Hash: "y", First: true}, RenewCertificate{Subject: trust.Subject{Name: "t1", Role: "target"}}, AddAuthority{Hash: "a"}} {
		if err := do(in); err != nil {
			t.Fatal(err)
		}
	}
	if err := do(AddAuthority{Hash: "b"}); err == nil {
		t.Error("a second rotation began during the first one")
	}
	var seen [][]string
	for range 20 {
		if all := hashes(); len(seen) == 0 || !slices.Equal(seen[len(seen)-1], all) {
			seen = append(seen, all)
		}
		now = now.Add(24 * time.Hour)
		if err := do(Tick{}); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(seen, [][]string{{"z", "a"}, {"a", "z"}, {"a"}}); diff != "" {
		t.Errorf("the authorities, the one that signs first:\n%s", diff)
	}
}

// What waits for an agent whose certificate was revoked says so, until the agent has joined again.
func TestARevocationExplainsWhyANodeIsAway(t *testing.T) {
	s, _ := New(block.ClusterID{UUID: block.UUID{1}})
	now := time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)
	do := func(in Input) {
		t.Helper()
		if _, err := s.Step(now, in); err != nil {
			t.Fatal(err)
		}
	}
	join := func() {
		do(CreateToken{ID: "1", Hash: "hash", Subject: trust.Subject{Name: "t1", Role: "target"}})
		do(UseToken{ID: "1", Hash: "hash", Key: "key"})
	}
	do(AddAuthority{Hash: "a", First: true})
	join()
	up := s.bringBack("t1")
	do(RevokeAccess{Subject: trust.Subject{Name: "t1"}})
	if got, want := s.bringBack("t1"), joinAgain("t1", "target"); got != want || s.revoked("t1", "initiator") {
		t.Errorf("after it was revoked: %q, want %q", got, want)
	}
	join()
	if got := s.bringBack("t1"); got != up {
		t.Errorf("after it has joined again: %q, want %q", got, up)
	}
}

// A clock that is set ahead by mistake, and back within a day, does not end a revocation.
func TestAClockThatJumpsEndsNoRevocation(t *testing.T) {
	s, _ := New(block.ClusterID{UUID: block.UUID{1}})
	store := map[string][]byte{}
	for _, r := range s.Records() {
		store[r.Key] = r.Value
	}
	begin := time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)
	at := func(after time.Duration, in Input) {
		t.Helper()
		if _, err := steps(t, s, store, begin.Add(after), in); err != nil {
			t.Fatal(err)
		}
	}
	const day = 24 * time.Hour
	at(0, AddAuthority{Hash: "a", Cert: []byte("c"), First: true})
	at(0, RevokeAccess{Subject: trust.Subject{Name: "t1", Role: "target"}})
	for _, c := range []struct {
		what string
		at   time.Duration
		kept bool
	}{
		{"while its certificates are good", day, true},
		{"with a clock that is a month ahead", 30 * day, true},
		{"an hour later", 30*day + time.Hour, true},
		{"after the clock was set back", 2 * day, true},
		{"when all has ended", 9 * day, true},
		{"a day later", 10 * day, false},
	} {
		at(c.at, Tick{})
		if kept := len(s.Holders()) > 0; kept != c.kept {
			t.Errorf("%s: kept is %v, want %v", c.what, kept, c.kept)
		}
	}
}

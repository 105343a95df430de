// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/audit"
	"weft.dev/weft/volmgr/trust"
)

// firstStore is what a version before levels wrote: no record says a level.
func firstStore(t *testing.T) (*State, map[string][]byte) {
	t.Helper()
	store := map[string][]byte{
		"m/meta":    []byte(`{"schema":1,"cluster_id":"` + testCluster().String() + `","generation":1,"first_event":1,"next_event":1}`),
		"p/default": []byte(`{"name":"default"}`),
	}
	return loadStore(t, store), store
}

// agentsKnow returns reports of a node's agents that know a level; 0 is what those from before levels
// say.
func agentsKnow(node block.NodeName, level block.Level) []Input {
	return []Input{
		TargetReported{Session: 1, Report: TargetReport{Node: node, BootID: "1", Level: level}},
		InitiatorReported{1, InitiatorReport{Node: node, BootID: "1", Level: level, Host: hostOf(string(node))}},
	}
}

// A store from before levels is at the first one, and stays there until all agents know the next.
func TestTheLevelIsRaisedWhenAllKnowIt(t *testing.T) {
	s, store := firstStore(t)
	raised := func() error {
		out, err := s.Step(t0, RaiseLevel{To: block.KnownLevel})
		keep(store, out.Records)
		return err
	}
	refused := func(want string) {
		t.Helper()
		if err := raised(); err == nil || !strings.Contains(err.Error(), want) {
			t.Fatalf("RaiseLevel = %v, want one that says %q", err, want)
		}
		if _, there := store[LevelKey]; there || s.Level() != block.FirstLevel {
			t.Fatalf("the level is %d", s.Level())
		}
	}
	for _, in := range append(agentsKnow("n1", 0), agentsKnow("n2", block.KnownLevel)...) {
		apply(t, s, store, in)
	}
	refused("node n1: its target agent knows level 1: upgrade it; node n1: its initiator agent knows level 1")
	s = loadStore(t, store)
	refused("node n2: its initiator agent has not reported to this manager")
	for _, in := range append(agentsKnow("n1", block.KnownLevel), agentsKnow("n2", block.KnownLevel)...) {
		apply(t, s, store, in)
	}
	if _, err := s.Step(t0, RaiseLevel{To: block.KnownLevel, Managers: []string{"manager 7 is asleep"}}); err == nil || !strings.Contains(err.Error(), "manager 7 is asleep") {
		t.Fatalf("RaiseLevel with a manager in the way = %v", err)
	}
	for range 2 { // it may be repeated
		if err := raised(); err != nil {
			t.Fatal(err)
		}
	}
	if s = loadStore(t, store); s.Level() != block.KnownLevel {
		t.Errorf("after a restart the level is %d", s.Level())
	}
}

// Records of a level that this version does not know are refused as a whole, with what to do.
func TestALaterLevelIsRefused(t *testing.T) {
	_, store := firstStore(t)
	later := block.KnownLevel + 1
	store[LevelKey] = fmt.Appendf(nil, `{"level":%d,"word":"of a later version"}`, later)
	store["a/later"] = []byte(`{}`)
	var records []Record
	for key, value := range store {
		records = append(records, Record{key, value})
	}
	if _, err := Load(records); !errors.Is(err, ErrLevel) || !strings.Contains(err.Error(), fmt.Sprintf("the cluster is at level %d, and this program knows no level above %d", later, block.KnownLevel)) {
		t.Errorf("Load = %v", err)
	}
}

// A record of a new kind is not written before its level.
func TestANewKindOfRecordWaitsForItsLevel(t *testing.T) {
	for _, c := range []struct {
		key string
		at  block.Level
		ok  bool
	}{{"v/1", 1, true}, {"l/level", 1, false}, {"l/level", 2, true}, {"t/1", 1, false}, {"a/1", 1, false}, {"i/node/n1/target", 1, false}, {"i/node/n1/target", 2, true}, {"u/1", 1, false}, {"s/master", 1, false}, {"s/master", 2, true}, {"unheard/of", 2, false}} {
		if err := checkKinds(c.at, []Record{{Key: c.key}}); (err == nil) != c.ok {
			t.Errorf("%s at level %d: %v", c.key, c.at, err)
		}
	}
}

// kindsIn returns the kinds of records in a store.
func kindsIn(store map[string][]byte) string {
	found := map[string]bool{}
	for key := range store {
		kind, _, _ := strings.Cut(key, "/")
		found[kind] = true
	}
	return strings.Join(slices.Sorted(maps.Keys(found)), "")
}

// At level 1 a store holds what versions before levels can read, whatever is asked and reported. When
// the level is raised, what agents can prove is recorded without another report.
func TestWhatThisVersionAddsWaitsForItsLevel(t *testing.T) {
	s, store := firstStore(t)
	asked := &audit.Asked{Who: "person ada (admin)", Call: "CreatePool"}
	ask := func(in Input) error {
		t.Helper()
		out, err := s.StepFor(t0, in, asked)
		keep(store, out.Records)
		return err
	}
	apply(t, s, store, BeginTerm{Seed: testSeed(1)})
	apply(t, s, store, TargetReported{Session: 1, Report: TargetReport{Node: "n1", BootID: "1", Level: 2, Authenticates: AbilityYes, Refusals: Refusals{Count: 1}}})
	apply(t, s, store, InitiatorReported{1, InitiatorReport{Node: "n1", BootID: "1", Level: 2, Authenticates: true, Host: hostOf("n1")}})
	if err := ask(CreatePool{Name: "gold"}); err != nil {
		t.Fatal(err)
	}
	for name, in := range map[string]Input{
		"a token":        CreateToken{ID: "1", Hash: "hash", Subject: trust.Subject{Name: "t1", Role: "target"}},
		"integrity":      CreateVolume{Name: "db1", Size: 1 << 30, Integrity: true, Seed: testSeed(2)},
		"a thin volume":  CreateVolume{Name: "db2", Size: 1 << 30, Thin: true, Seed: testSeed(4)},
		"authentication": CreateVolume{Name: "db1", Size: 1 << 30, Authentication: block.AuthenticationRequire, Seed: testSeed(2)},
	} {
		var refused *Error
		if err := ask(in); !errors.As(err, &refused) || refused.Reason != ReasonOldParts {
			t.Errorf("%s at level 1: %v", name, err)
		}
	}
	if got := kindsIn(store); got != "emnp" {
		t.Errorf("at level 1 there are records of the kinds %s", got)
	}
	for key, value := range store {
		if strings.Contains(string(value), "authenticates") || strings.Contains(string(value), `"refused"`) || strings.Contains(string(value), `"audit"`) {
			t.Errorf("at level 1 %s is %s", key, value)
		}
	}
	s = loadStore(t, store)
	for _, in := range []Input{
		TargetReported{Session: 1, Report: TargetReport{Node: "n1", BootID: "1", Level: 2, Authenticates: AbilityYes}},
		InitiatorReported{1, InitiatorReport{Node: "n1", BootID: "1", Level: 2, Authenticates: true, Host: hostOf("n1")}},
	} {
		apply(t, s, store, in)
	}

	if err := ask(RaiseLevel{To: 2, Seed: testSeed(3)}); err != nil {
		t.Fatal(err)
	}
	if got := kindsIn(store); got != "elmnpsu" {
		t.Errorf("at level 2 there are records of the kinds %s", got)
	}
	s = loadStore(t, store)
	if n := s.nodes["n1"]; !n.TargetAuthenticates || !n.InitiatorAuthenticates {
		t.Errorf("n1 is recorded as %+v", n)
	}
}

// Who has joined and who is shut out is in records of the level of authorities, without which nobody
// joins. A node that is removed at level 1 leaves none.
func TestWhoHasJoinedWaitsForTheLevelOfAuthorities(t *testing.T) {
	s, store := firstStore(t)
	apply(t, s, store, TargetReported{Session: 1, Report: TargetReport{Node: "n1", BootID: "1"}})
	apply(t, s, store, TargetLost{Node: "n1", Session: 1})
	apply(t, s, store, RemoveNode{Node: "n1"})
	t1 := trust.Subject{Name: "t1", Role: "target"}
	for _, in := range []Input{JoinVouched{t1}, RenewCertificate{Subject: t1}, RevokeAccess{Subject: t1}} {
		if _, err := s.Step(t0, in); !errors.Is(err, errNoAuthority) {
			t.Errorf("%T at level 1: %v", in, err)
		}
	}
	if got := kindsIn(store); got != "emp" {
		t.Errorf("at level 1 there are records of the kinds %s", got)
	}
	apply(t, s, store, AddAuthority{Hash: "a", First: true, Seed: testSeed(1)})
	apply(t, s, store, JoinVouched{t1})
	apply(t, s, store, RevokeAccess{Subject: trust.Subject{Name: "t1"}})
	if s = loadStore(t, store); s.Level() != 2 || kindsIn(store) != "aeilmps" {
		t.Errorf("level %d, with records of the kinds %s", s.Level(), kindsIn(store))
	}
	if all := s.Holders(); len(all) != 1 || !all[0].Out() {
		t.Errorf("after a restart the identities are %+v", all)
	}
}

// A cluster that gets an authority is closed to managers of earlier versions, and so at the level that
// has authorities. A store that has one already was written so by a version before levels.
func TestAClosedClusterIsAtTheLevelOfAuthorities(t *testing.T) {
	s, store := firstStore(t)
	apply(t, s, store, AddAuthority{Hash: "a", First: true, Seed: testSeed(1)})
	if s = loadStore(t, store); s.Level() != 2 || kindsIn(store) != "aelmps" {
		t.Errorf("level %d, with records of the kinds %s", s.Level(), kindsIn(store))
	}
	delete(store, LevelKey)
	var records []Record
	for key, value := range store {
		records = append(records, Record{key, value})
	}
	s, err := Load(records)
	if err != nil || s.Level() != 2 {
		t.Errorf("without the record of the level: level %d, %v", s.Level(), err)
	}
}

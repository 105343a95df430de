// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/keys"
	"weft.dev/weft/volmgr/trust"
)

// retold is what somebody sees of a state who got it as records and JSON.
func retold(t *testing.T, s *State) *State {
	t.Helper()
	text, err := s.Observed()
	if err != nil {
		t.Fatal(err)
	}
	again, err := LoadObserved(s.Records(), text)
	if err != nil {
		t.Fatal(err)
	}
	return again
}

// questions is looks, and what each node's and each drive's loss would lead to.
func questions(s *State) string {
	var b strings.Builder
	b.WriteString(looks(s))
	for _, n := range s.Nodes() {
		x, err := s.WhatIf(Loss{Nodes: []block.NodeName{n.Name}})
		fmt.Fprintf(&b, "without %s: %+v %v\n", n.Name, x, err)
	}
	for _, d := range s.Drives("") {
		x, err := s.WhatIf(Loss{Drives: []block.DriveID{d.ID}})
		fmt.Fprintf(&b, "without %s: %+v %v\n", d.ID, x, err)
	}
	return address.ReplaceAllString(b.String(), "set")
}

// address matches a pointer as fmt prints it; to what is in a record.
var address = regexp.MustCompile(`0x[0-9a-f]{6,}`)

// Who helps from afar sees what the manager sees; looks shows of keys only whether there are any.
func TestAStateThatIsToldAnswersAsTheStateItself(t *testing.T) {
	t.Parallel()
	compared, degraded := 0, 0
	for seed := range uint64(moods) {
		w := newWorld(seed)
		losesStore(w)
		for i := range historySteps {
			if w.act(); i%100 != 0 {
				continue
			}
			here := w.state.Fork()
			there := retold(t, here)
			want, got := questions(here), questions(there)
			if got != want {
				t.Fatalf("seed %d, step %d: the state that was told answers\n%s\nwant\n%s", seed, i, differs(got, want), differs(want, got))
			}
			compared++
			if strings.Contains(want, string(Degraded)) {
				degraded++
			}
		}
	}
	if degraded == 0 {
		t.Error("no state had a degraded volume")
	}
	t.Logf("%d states were compared, %d with a degraded volume", compared, degraded)
}

// differs returns the lines of a that b does not have.
func differs(a, b string) string {
	lines := strings.Split(b, "\n")
	return strings.Join(slices.DeleteFunc(strings.Split(a, "\n"), func(l string) bool { return slices.Contains(lines, l) }), "\n")
}

// Each kind of record is either told or left out, by a decision: whoever adds a kind makes it.
func TestEveryKindOfRecordIsToldOrLeftOut(t *testing.T) {
	for kind := range kinds {
		if _, decided := tellable[kind]; !decided {
			t.Errorf("records of kind %q: say in tellable whether they are told", kind)
		}
	}
	for kind := range tellable {
		if _, known := kinds[kind]; !known {
			t.Errorf("tellable has kind %q, which there is not", kind)
		}
	}
	for key, want := range map[string]bool{"v/x": true, "s/master": false, "t/x": false, "u/1": false, "z/x": false, "": false, "v": true} {
		if got := (Record{Key: key}).Tellable(); got != want {
			t.Errorf("record %q is told: %v, want %v", key, got, want)
		}
		if r := (Record{Key: key}); r.Secret() && r.Tellable() {
			t.Errorf("record %q is secret, and told", key)
		}
	}
}

// What is told has no place for a secret: its fields are walked, so a new one is found too.
func TestWhatIsToldHasNoPlaceForASecret(t *testing.T) {
	forbidden := map[reflect.Type]string{
		reflect.TypeFor[block.Secret](): "a secret", reflect.TypeFor[block.Keys](): "keys", reflect.TypeFor[keys.Master](): "the master of the keys",
		reflect.TypeFor[trust.Token](): "a token",
	}
	allowed := map[string]bool{"Authority.Cert": true} // bytes: a certificate
	seen := map[reflect.Type]bool{}
	var walk func(path string, x reflect.Type)
	walk = func(path string, x reflect.Type) {
		if what, bad := forbidden[x]; bad {
			t.Errorf("%s is %s", path, what)
		}
		if seen[x] {
			return
		}
		seen[x] = true
		switch x.Kind() {
		case reflect.Pointer, reflect.Array:
			walk(path, x.Elem())
		case reflect.Slice:
			if x.Elem().Kind() == reflect.Uint8 && !allowed[path] {
				t.Errorf("%s is bytes: are they no secret?", path)
			}
			walk(path, x.Elem())
		case reflect.Map:
			walk(path+" (keys)", x.Key())
			walk(path, x.Elem())
		case reflect.Interface:
			t.Errorf("%s may be anything", path)
		case reflect.Struct:
			if x.PkgPath() == "time" {
				return
			}
			for i := range x.NumField() {
				f := x.Field(i)
				name := x.Name() + "." + f.Name
				for _, word := range []string{"secret", "password", "token", "private", "credential"} {
					if strings.Contains(strings.ToLower(f.Name), word) {
						t.Errorf("%s: is it a secret?", name)
					}
				}
				walk(name, f.Type)
			}
		}
	}
	for _, kind := range []any{observed{}, Volume{}, Node{}, Drive{}, Pool{}, event.Event{}, meta{}, levelRecord{}, trust.Authority{}} {
		walk(reflect.TypeOf(kind).Name(), reflect.TypeOf(kind))
	}
	if len(seen) < 60 {
		t.Errorf("only %d types were walked", len(seen))
	}
}

func TestAToldStateThatIsDamagedIsRefused(t *testing.T) {
	s, records := New(testCluster())
	text, err := s.Observed()
	if err != nil {
		t.Fatal(err)
	}
	for name, load := range map[string]func() (*State, error){
		"no JSON":      func() (*State, error) { return LoadObserved(records, text[:len(text)/2]) },
		"no records":   func() (*State, error) { return LoadObserved(nil, text) },
		"wrong record": func() (*State, error) { return LoadObserved([]Record{{Key: "v/x", Value: []byte("{")}}, text) },
	} {
		if _, err := load(); err == nil {
			t.Errorf("%s: it was loaded", name)
		}
	}
}

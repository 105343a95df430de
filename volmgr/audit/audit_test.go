// SPDX-License-Identifier: Apache-2.0

package audit

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

func written(n int) Log {
	l := NewLog(nil, Head{})
	for i := range n {
		l.Append(Entry{Time: time.Date(2026, 11, 23, 12, 0, i%60, i, time.UTC), Asked: Asked{Who: "person ada (admin)", From: "192.0.2.1", Call: "DeleteVolume", Request: fmt.Sprintf(`{"volume":"db%d"}`, i)}})
	}
	return l
}

// Whatever is done to the entries, short of making all of them anew, is noticed; and that is noticed
// by who has noted a hash.
func TestEveryChangeOfTheChainIsNoticed(t *testing.T) {
	l := written(10)
	good, head := l.All(), l.Head()
	noted := good[3].Hash
	if err := Verify(good, head, noted); err != nil {
		t.Fatal(err)
	}
	resealed := func(change func([]Entry)) []Entry { // as who can compute hashes would do
		all := slices.Clone(good)
		change(all)
		for i := range all {
			all[i].Hash = all[i].sum()
		}
		return all
	}
	for what, c := range map[string]struct {
		entries []Entry
		want    string
	}{
		"another name":                {func() []Entry { all := slices.Clone(good); all[4].Who = "person eve"; return all }(), "entry 5 was changed"},
		"another time":                {func() []Entry { all := slices.Clone(good); all[4].Time = all[4].Time.Add(1); return all }(), "entry 5 was changed"},
		"another name, resealed":      {resealed(func(all []Entry) { all[4].Who = "person eve" }), "entry 6 does not follow entry 5"},
		"an entry is gone":            {slices.Delete(slices.Clone(good), 4, 5), "entries 5 to 5 are missing"},
		"two are swapped":             {func() []Entry { all := slices.Clone(good); all[4], all[5] = all[5], all[4]; return all }(), "missing"},
		"the oldest are gone":         {good[2:], "entries 1 to 2 are missing"},
		"the newest are gone":         {good[:8], "the newest entries are missing"},
		"the newest changed":          {resealed(func(all []Entry) { all[9].Who = "person eve" }), "the newest entries are missing"},
		"nothing is left":             {nil, "the newest entries are missing"},
		"another event is its effect": {func() []Entry { all := slices.Clone(good); all[4].LastEvent = 7; return all }(), "entry 5 was changed"},
	} {
		if err := Verify(c.entries, head, ""); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want an error with %q", what, err, c.want)
		}
	}
	cut := Head{First: 4, Next: head.Next, Hash: head.Hash} // who can write to a store moves the beginning, too
	if err := Verify(good[3:], cut, noted); err == nil || !strings.Contains(err.Error(), "the oldest entries are missing") {
		t.Errorf("the oldest are gone, and the head says so: %v", err)
	}
	other := NewLog(nil, Head{})
	for _, e := range good {
		e.Who = "person eve"
		other.Append(e)
	}
	if err := Verify(other.All(), other.Head(), ""); err != nil {
		t.Errorf("a chain that was made anew: %v", err)
	}
	if err := Verify(other.All(), other.Head(), noted); err == nil {
		t.Error("a chain that was made anew has the hash that was noted")
	}
}

// The oldest entries go, and the rest is still a chain. A log that is loaded goes on with it.
func TestTheNewestEntriesAreKept(t *testing.T) {
	l := written(Max + 5)
	if head := l.Head(); head.First != 6 || head.Next != Max+6 || len(l.All()) != Max {
		t.Errorf("%d entries are kept, %+v", len(l.All()), head)
	}
	if err := Verify(l.All(), l.Head(), l.All()[0].Prev); err != nil {
		t.Error(err)
	}
	text, err := json.Marshal(l.All())
	if err != nil {
		t.Fatal(err)
	}
	var again []Entry
	if err := json.Unmarshal(text, &again); err != nil {
		t.Fatal(err)
	}
	slices.Reverse(again)
	loaded := NewLog(again, l.Head())
	if _, dropped := loaded.Append(Entry{Time: time.Now(), Asked: Asked{Who: "local", From: "unix", Call: "CreatePool"}}); !slices.Equal(dropped, []uint64{6}) {
		t.Errorf("one more entry drops %v, want 6", dropped)
	}
	if err := Verify(loaded.All(), loaded.Head(), ""); err != nil {
		t.Error(err)
	}
	if got := loaded.After(Max+4, 10); len(got) != 2 || got[0].Seq != Max+5 {
		t.Errorf("after %d there are %d entries", Max+4, len(got))
	}
}

// SPDX-License-Identifier: Apache-2.0

package event

import (
	"fmt"
	"slices"
	"testing"
)

// happened is a log after n events, about two objects in turn.
func happened(n int) *Log {
	l := NewLog(nil, 1, 1)
	for range n {
		l.Append([]Event{{Seq: l.Next(), Object: fmt.Sprint("volume v", l.Next()%2)}})
	}
	return &l
}

func TestTheNewestEventsAreKept(t *testing.T) {
	l := happened(Max + 5)
	if l.First() != 6 || l.Next() != Max+6 || len(l.All()) != Max || l.All()[0].Seq != 6 {
		t.Errorf("%d events from %d to %d, want %d from 6 on", len(l.All()), l.First(), l.Next(), Max)
	}
	if dropped := l.Append([]Event{{Seq: l.Next()}, {Seq: l.Next() + 1}}); !slices.Equal(dropped, []uint64{6, 7}) {
		t.Errorf("two more events dropped %v, want 6 and 7", dropped)
	}
	again := NewLog(slices.Clone(l.All()), l.First(), l.Next())
	slices.Reverse(again.events)
	if again = NewLog(again.events, l.First(), l.Next()); again.All()[0].Seq != 8 {
		t.Errorf("a log that is loaded begins with %d, want 8", again.All()[0].Seq)
	}
}

func TestAReaderContinuesWhereItStopped(t *testing.T) {
	l := happened(10)
	for _, c := range []struct {
		object string
		after  uint64
		limit  int
		want   string
		seen   uint64
	}{
		{"", 0, 3, "[1 2 3]", 3},
		{"", 7, 100, "[8 9 10]", 10},
		{"volume v1", 4, 2, "[5 7]", 7},
		{"volume v1", 9, 5, "[]", 10},
		{"", 10, 5, "[]", 10},
		{"", 99, 5, "[]", 10},
	} {
		found, seen, ok := l.From(c.object, c.after, c.limit)
		if got := fmt.Sprint(numbers(found)); got != c.want || seen != c.seen || !ok {
			t.Errorf("From(%q, %d, %d) = %s, seen %d, %v; want %s, %d", c.object, c.after, c.limit, got, seen, ok, c.want, c.seen)
		}
	}
	if got := fmt.Sprint(numbers(l.Newest("volume v0", 3, 2))); got != "[8 10]" {
		t.Errorf("Newest = %s, want [8 10]", got)
	}
	if _, _, ok := happened(Max+5).From("", 4, 1); ok {
		t.Error("a reader goes on after event 4 though event 5 is gone")
	}
}

func numbers(events []Event) []uint64 {
	all := []uint64{}
	for _, e := range events {
		all = append(all, e.Seq)
	}
	return all
}

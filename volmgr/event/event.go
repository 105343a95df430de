// SPDX-License-Identifier: Apache-2.0

// Package event holds the history of a cluster: durable facts, numbered in order, of which
// the newest are kept.
package event

import (
	"cmp"
	"slices"
	"time"
)

// Event is one durable fact of the cluster's history.
type Event struct {
	Seq        uint64            `json:"seq"`
	Time       time.Time         `json:"time"`
	Severity   Severity          `json:"severity"`
	Kind       string            `json:"kind"`   // see kinds.go
	Object     string            `json:"object"` // "volume db1", "node t1"
	Text       string            `json:"text"`
	Attributes map[string]string `json:"attributes,omitempty"`
}

// Severity of an event.
type Severity string

// The severities.
const (
	Info    Severity = "INFO"
	Warning Severity = "WARNING"
	Trouble Severity = "ERROR" // a person is needed
)

// Max is how many events are kept; the oldest go first.
const Max = 10_000

// Log is the events that are kept, oldest first.
type Log struct {
	first  uint64 // number of the oldest
	next   uint64 // number of the next event
	events []Event
}

// NewLog makes the log of these events, in any order. first is the number of the oldest event
// that is kept and next that of the next one: both are 1 in a new cluster.
func NewLog(events []Event, first, next uint64) Log {
	slices.SortFunc(events, func(a, b Event) int { return cmp.Compare(a.Seq, b.Seq) })
	return Log{first, next, events}
}

// First is the number of the oldest event that is kept.
func (l *Log) First() uint64 { return l.first }

// Next is the number of the next event.
func (l *Log) Next() uint64 { return l.next }

// All returns every event that is kept. The caller must not change them.
func (l *Log) All() []Event { return l.events }

// Append adds events, numbered from Next on, and returns the numbers of those that are
// dropped.
func (l *Log) Append(events []Event) (dropped []uint64) {
	l.events = append(l.events, events...)
	l.next += uint64(len(events))
	for ; l.next-l.first > Max; l.first++ {
		dropped = append(dropped, l.first)
	}
	if extra := len(l.events) - Max; extra > 0 {
		l.events = l.events[extra:]
	}
	return dropped
}

// Newest returns the newest limit events after a number, oldest first. If object is not
// empty, only events about it count.
func (l *Log) Newest(object string, after uint64, limit int) (found []Event) {
	for _, e := range slices.Backward(l.events) {
		if e.Seq <= after || len(found) == limit {
			break
		}
		if object == "" || e.Object == object {
			found = append(found, e)
		}
	}
	slices.Reverse(found)
	return found
}

// From continues the history after a number: at most limit events, oldest first, of object
// or, if that is empty, of all. seen is the number up to which events were examined. After 0
// the history begins with the oldest event that is kept; after another number, ok is false
// if events in between are gone.
func (l *Log) From(object string, after uint64, limit int) (found []Event, seen uint64, ok bool) {
	if after != 0 && after+1 < l.first {
		return nil, after, false
	}
	seen = min(after, l.next-1)
	from, _ := slices.BinarySearchFunc(l.events, after+1, func(e Event, seq uint64) int { return cmp.Compare(e.Seq, seq) })
	for _, e := range l.events[from:] {
		if len(found) == limit {
			break
		}
		if seen = e.Seq; object == "" || e.Object == object {
			found = append(found, e)
		}
	}
	return found, seen, true
}

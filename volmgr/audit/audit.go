// SPDX-License-Identifier: Apache-2.0

// Package audit holds who asked for what: entries that are recorded in the same commit as their
// effect, each with the hash of the one before. Who changes or removes an entry has to change all
// that follow, and so the newest hash, which anybody may note and compare.
package audit

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"time"
)

// Asked is who asked for what.
type Asked struct {
	Who     string `json:"who"`  // "person ada (admin)"
	From    string `json:"from"` // an address; "unix" for the socket of the manager's machine
	Call    string `json:"call"` // "DeleteVolume"
	Request string `json:"request,omitempty"`
	ID      string `json:"id,omitempty"` // the caller's id of the request
}

// Entry is what was asked, and had an effect.
type Entry struct {
	Seq  uint64    `json:"seq"`
	Time time.Time `json:"time"`
	Asked
	// Events are the numbers of the first and last event of the effect; 0: there are none.
	FirstEvent uint64 `json:"first_event,omitempty"`
	LastEvent  uint64 `json:"last_event,omitempty"`
	Prev       string `json:"prev"` // hash of the entry before
	Hash       string `json:"hash"`
}

// sum is the hash of an entry: of all of it but the hash.
func (e Entry) sum() string {
	e.Hash, e.Time = "", e.Time.UTC()
	text, err := json.Marshal(e)
	if err != nil {
		panic(fmt.Sprintf("audit: encode entry %d: %v", e.Seq, err)) // plain data of our own
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

// Max is how many entries are kept; the oldest go first.
const Max = 10_000

// Head is the end of the chain, and where what is kept begins.
type Head struct {
	First uint64 `json:"first"` // number of the oldest entry
	Next  uint64 `json:"next"`  // number of the next entry
	Hash  string `json:"hash"`  // of the newest entry
}

// Log is the entries that are kept, oldest first.
type Log struct {
	head    Head
	entries []Entry
}

// NewLog makes the log of these entries, in any order. A zero head begins a new one.
func NewLog(entries []Entry, head Head) Log {
	if head.Next == 0 {
		head.First, head.Next = 1, 1
	}
	slices.SortFunc(entries, func(a, b Entry) int { return int(int64(a.Seq) - int64(b.Seq)) })
	return Log{head, entries}
}

// Head returns the end of the chain; zero if nothing was ever recorded.
func (l *Log) Head() Head {
	if l.head.Next <= 1 {
		return Head{}
	}
	return l.head
}

// All returns every entry that is kept. The caller must not change them.
func (l *Log) All() []Entry { return l.entries }

// Append adds an entry, which gets its number and its hash. It returns it, and the numbers of those
// that are dropped.
func (l *Log) Append(e Entry) (added Entry, dropped []uint64) {
	e.Seq, e.Prev = l.head.Next, l.head.Hash
	e.Hash = e.sum()
	l.entries = append(l.entries, e)
	l.head.Next, l.head.Hash = e.Seq+1, e.Hash
	for ; l.head.Next-l.head.First > Max; l.head.First++ {
		dropped = append(dropped, l.head.First)
	}
	if extra := len(l.entries) - Max; extra > 0 {
		l.entries = l.entries[extra:]
	}
	return e, dropped
}

// After returns at most limit entries after a number, oldest first.
func (l *Log) After(seq uint64, limit int) []Entry {
	from := slices.IndexFunc(l.entries, func(e Entry) bool { return e.Seq > seq })
	if from < 0 {
		return nil
	}
	return l.entries[from:min(len(l.entries), from+limit)]
}

// Newest returns the newest limit entries, oldest first.
func (l *Log) Newest(limit int) []Entry {
	return l.entries[max(0, len(l.entries)-limit):]
}

// Verify returns an error if entries are not a chain without a gap, oldest first, that ends at a
// head. If a hash was noted earlier, one of the entries must have it; empty: none was.
func Verify(entries []Entry, head Head, noted string) error {
	if head.First > 1 && len(entries) < Max { // the oldest go only when there are more
		return fmt.Errorf("the oldest entries are missing: %d are there, and %d are kept before any goes", len(entries), Max)
	}
	prev, found := "", noted == ""
	for i, e := range entries {
		before := Entry{Seq: head.First - 1, Hash: e.Prev} // the oldest one that is kept may follow any
		if i > 0 || e.Seq == 1 {
			before.Hash = prev
		}
		if i > 0 {
			before.Seq = entries[i-1].Seq
		}
		if err := e.follows(before); err != nil {
			return err
		}
		prev = e.Hash
		found = found || e.Hash == noted || i == 0 && e.Prev == noted
	}
	switch {
	case prev != head.Hash:
		return fmt.Errorf("the newest entries are missing: the chain ends at %s and not at %s", short(prev), short(head.Hash))
	case !found:
		return fmt.Errorf("no entry has the hash %s: the chain was made anew, or that entry is no longer kept", short(noted))
	}
	return nil
}

// follows returns an error if an entry was changed, or does not follow the one before.
func (e Entry) follows(before Entry) error {
	switch {
	case e.Hash != e.sum():
		return fmt.Errorf("entry %d was changed: its hash is not that of its content", e.Seq)
	case e.Seq != before.Seq+1:
		return fmt.Errorf("entries %d to %d are missing", before.Seq+1, e.Seq-1)
	case e.Prev != before.Hash:
		return fmt.Errorf("entry %d does not follow entry %d: one of them was replaced", e.Seq, before.Seq)
	}
	return nil
}

func short(hash string) string {
	if hash == "" {
		return "nothing"
	}
	return hash[:min(16, len(hash))]
}

// SPDX-License-Identifier: Apache-2.0

// Package wal is the log of one member of the quorum: its hard state (term, vote, commit
// index) and its entries since a base.
//
// A Save is one frame, one write and one fsync: after a crash it is there as a whole or not
// at all. The log is one file at a time. Rewrite, which a compaction or a received snapshot
// needs, writes the next file, and removes the old one when the new one is durable.
//
//	dir/0000000000000007.log    header, then frames
//	dir/0000000000000008.new    the next file, until it is complete and renamed to .log
//
//	header   magic "WEFTLOG1" | number of the file | cluster | member | CRC32C
//	frame    length of the payload | sequence | CRC32C | payload
//	payload  hard state | base, in the first frame only | entries
//
// The checksums of the frames begin with that of the header, so that frames of another file
// are never taken for those of this one. A frame is written only after all before it are
// durable: Save waits for its fsync, and Open writes what it has read into the next file. A
// process before it may have ended between a write and its fsync, or because of an fsync that
// failed; then what was read is in the page cache alone, and a later fsync would not write it.
//
// Therefore a bad frame at the end is a Save that a crash cut short: Open drops it. A bad frame
// with a good one behind it was durable once: the drive has damaged it, and Open refuses the
// log with ErrDamaged. If the very last frame is damaged, the two cannot be told apart; the
// quorum finds out when the leader knows of an entry that the member lacks.
//
// After an error of Save or Rewrite the log refuses everything: an fsync that failed once may
// succeed later without having written anything.
package wal

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"weft.dev/weft/proto/block"
)

// Owner is the member whose log it is.
type Owner struct {
	Cluster block.ClusterID
	Member  uint64
}

// HardState is what a member must not forget before it answers others. The zero value is
// that of a member that has not taken part yet.
type HardState struct{ Term, Vote, Commit uint64 }

// Base is the entry after which the log begins: all up to it is durable elsewhere.
type Base struct {
	Index, Term uint64
	Members     []byte // who is in the quorum after that entry; opaque here
}

// Entry is an entry of the log.
type Entry struct {
	Index, Term uint64
	Kind        uint8
	Data        []byte
}

// State is all that a log holds. The entries follow the base without a gap.
type State struct {
	Hard    HardState
	Base    Base
	Entries []Entry
}

// last returns the index of the last entry.
func (s *State) last() uint64 { return s.Base.Index + uint64(len(s.Entries)) }

// check returns an error if entries cannot be saved: they must be without gaps, and begin
// after the base and at most one behind the last entry. Those from there on are replaced.
func (s *State) check(entries []Entry) error {
	for i, e := range entries {
		if e.Index != entries[0].Index+uint64(i) {
			return fmt.Errorf("entry %d follows entry %d", e.Index, entries[i-1].Index)
		}
	}
	if len(entries) > 0 && (entries[0].Index <= s.Base.Index || entries[0].Index > s.last()+1) {
		return fmt.Errorf("entries from %d on do not fit: the log has %d to %d", entries[0].Index, s.Base.Index+1, s.last())
	}
	return nil
}

// add puts what a frame holds into the state.
func (s *State) add(f frame) error {
	if err := s.check(f.entries); err != nil {
		return err
	}
	if f.hard != nil {
		s.Hard = *f.hard
	}
	if len(f.entries) > 0 {
		s.Entries = append(s.Entries[:f.entries[0].Index-s.Base.Index-1], f.entries...)
	}
	return nil
}

// Errors of Open and Create.
var (
	ErrNoLog   = errors.New("no log there")
	ErrExists  = errors.New("there is a log already")
	ErrDamaged = errors.New("the log is damaged")
)

const (
	whole   = ".log"
	partial = ".new"
)

// Log is an open log. It is not for concurrent use.
type Log struct {
	dir      Directory
	owner    Owner
	number   uint64 // of the file
	file     File
	seed     uint32 // of the frames' checksums
	sequence uint64 // of the next frame
	size     int64
	bounds   State // Base, and Entries without their contents
	failed   error
}

// Find returns nil if there is a log in dir, else ErrNoLog.
func Find(dir Directory) error {
	_, err := newest(dir)
	return err
}

// newest returns the number of the newest complete file.
func newest(dir Directory) (uint64, error) {
	names, err := dir.List()
	if err != nil {
		return 0, err
	}
	found := uint64(0)
	for _, name := range names {
		if n, ok := numberOf(name, whole); ok {
			found = max(found, n)
		}
	}
	if found == 0 {
		return 0, ErrNoLog
	}
	return found, nil
}

func nameOf(number uint64, suffix string) string { return fmt.Sprintf("%016d%s", number, suffix) }

func numberOf(name, suffix string) (uint64, bool) {
	digits, ok := strings.CutSuffix(name, suffix)
	n, err := strconv.ParseUint(digits, 10, 64)
	return n, ok && err == nil && nameOf(n, suffix) == name
}

// Create begins a log that holds s. It returns ErrExists if there is one.
func Create(dir Directory, owner Owner, s State) (*Log, error) {
	err := Find(dir)
	if err == nil {
		return nil, fmt.Errorf("create log: %w", ErrExists)
	}
	if !errors.Is(err, ErrNoLog) {
		return nil, fmt.Errorf("create log: %w", err)
	}
	l := &Log{dir: dir, owner: owner}
	if err := l.Rewrite(s); err != nil {
		return nil, fmt.Errorf("create log: %w", err)
	}
	return l, nil
}

// Open opens the log in dir and returns what it holds, of which all is durable then. It returns
// ErrNoLog if there is none, and ErrDamaged if the log has lost what was durable.
func Open(dir Directory) (*Log, State, error) {
	read, number, err := load(dir)
	if err != nil {
		return nil, State{}, fmt.Errorf("open log: %w", err)
	}
	l := &Log{dir: dir, owner: read.owner, number: number}
	if err := l.Rewrite(read.state); err != nil {
		return nil, State{}, fmt.Errorf("open log: %w", err)
	}
	return l, read.state, nil
}

// Look returns whose log is in dir and what it holds, and changes nothing: a process that runs may
// have it open.
func Look(dir Directory) (Owner, State, error) {
	read, _, err := load(dir)
	if err != nil {
		return Owner{}, State{}, fmt.Errorf("look at log: %w", err)
	}
	return read.owner, read.state, nil
}

// load reads the newest file in dir, and returns its number.
func load(dir Directory) (read contents, number uint64, err error) {
	if number, err = newest(dir); err != nil {
		return read, 0, err
	}
	name := nameOf(number, whole)
	data, err := dir.Read(name)
	if err != nil {
		return read, 0, err
	}
	if read, err = parse(data, number); err != nil {
		return read, 0, fmt.Errorf("%s: %w", name, err)
	}
	return read, number, nil
}

// removeOthers removes the files that a crash has left, and the one before this.
func (l *Log) removeOthers() error {
	names, err := l.dir.List()
	if err != nil {
		return err
	}
	for _, name := range names {
		n, ok := numberOf(name, whole)
		_, unfinished := numberOf(name, partial)
		if unfinished || ok && n < l.number {
			if err := l.dir.Remove(name); err != nil {
				return err
			}
		}
	}
	return nil
}

// Owner returns the member whose log it is.
func (l *Log) Owner() Owner { return l.owner }

// Size is the length of the file. It grows until the next Rewrite.
func (l *Log) Size() int64 { return l.size }

// keepBounds keeps what check needs, and not the entries' contents.
func (l *Log) keepBounds(s State) {
	l.bounds = State{Base: Base{Index: s.Base.Index}, Entries: make([]Entry, len(s.Entries))}
}

// Save makes a hard state, if it is not nil, and entries durable in one write. Entries of the
// log from the first of entries on are replaced.
func (l *Log) Save(hard *HardState, entries []Entry) error {
	if l.failed != nil {
		return l.failed
	}
	f := frame{hard: hard, entries: entries}
	if err := l.bounds.check(entries); err != nil {
		return fmt.Errorf("save: %w", err)
	}
	text, err := f.encode(l.seed, l.sequence)
	if err != nil {
		return fmt.Errorf("save: %w", err)
	}
	if err := l.write(l.file, text); err != nil {
		return l.fail("save", err)
	}
	l.sequence++
	l.size += int64(len(text))
	if len(entries) > 0 {
		l.bounds.Entries = append(l.bounds.Entries[:entries[0].Index-l.bounds.Base.Index-1], make([]Entry, len(entries))...)
	}
	return nil
}

func (l *Log) write(f File, text []byte) error {
	if _, err := f.Write(text); err != nil {
		return err
	}
	return f.Sync()
}

// fail makes the log refuse everything from now on.
func (l *Log) fail(what string, err error) error {
	l.failed = fmt.Errorf("log: %s: %w; nothing more can be recorded", what, err)
	return l.failed
}

// Rewrite replaces all that the log holds. A crash leaves the old contents or the new ones.
func (l *Log) Rewrite(s State) error {
	if l.failed != nil {
		return l.failed
	}
	bounds := State{Base: s.Base}
	if err := bounds.check(s.Entries); err != nil {
		return fmt.Errorf("rewrite: %w", err)
	}
	number := l.number + 1
	head := header{number: number, owner: l.owner}.encode()
	seed := sum(0, head)
	first := frame{hard: &s.Hard, base: &s.Base, entries: s.Entries}
	text, err := first.encode(seed, 0)
	if err != nil {
		return fmt.Errorf("rewrite: %w", err)
	}
	file, err := l.place(number, slices.Concat(head, text))
	if err != nil {
		return l.fail("rewrite", err)
	}
	if l.file != nil {
		l.file.Close()
	}
	l.file, l.number, l.seed, l.sequence, l.size = file, number, seed, 1, int64(len(head)+len(text))
	l.keepBounds(s)
	if err := l.removeOthers(); err != nil {
		return l.fail("rewrite", err)
	}
	return nil
}

// place writes a file under its partial name, and gives it its name when it is durable.
func (l *Log) place(number uint64, text []byte) (File, error) {
	name := nameOf(number, partial)
	file, err := l.dir.Create(name)
	if err != nil {
		return nil, err
	}
	if err := l.write(file, text); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	if err := l.dir.Rename(name, nameOf(number, whole)); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	if err := l.dir.Sync(); err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

// Close closes the file. All that was saved is durable.
func (l *Log) Close() error {
	if l.failed == nil {
		l.failed = errors.New("the log is closed")
	}
	return l.file.Close()
}

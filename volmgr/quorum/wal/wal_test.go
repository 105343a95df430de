// SPDX-License-Identifier: Apache-2.0

package wal_test

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/quorum/wal"
	"weft.dev/weft/volmgr/quorum/wal/waltest"
)

var owner = wal.Owner{Cluster: block.ClusterID{UUID: block.UUID{1, 2, 3}}, Member: 7}

func entry(index, term uint64, text string) wal.Entry {
	return wal.Entry{Index: index, Term: term, Kind: uint8(index % 3), Data: []byte(text)}
}

func created(t testing.TB, dir wal.Directory, s wal.State) *wal.Log {
	t.Helper()
	l, err := wal.Create(dir, owner, s)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func save(t testing.TB, l *wal.Log, hard *wal.HardState, entries ...wal.Entry) {
	t.Helper()
	if err := l.Save(hard, entries); err != nil {
		t.Fatal(err)
	}
}

// holds checks what a log holds when it is opened.
func holds(t testing.TB, dir wal.Directory, want wal.State) *wal.Log {
	t.Helper()
	l, got, err := wal.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	if diff := differ(want, got); diff != "" {
		t.Errorf("the log holds something else than was saved (-want +got):\n%s", diff)
	}
	if l.Owner() != owner {
		t.Errorf("Owner = %v, want %v", l.Owner(), owner)
	}
	return l
}

func differ(a, b wal.State) string { return cmp.Diff(a, b, cmpopts.EquateEmpty()) }

func TestALogHoldsWhatWasSaved(t *testing.T) {
	for name, dir := range map[string]wal.Directory{"files": wal.InDirectory(t.TempDir() + "/log"), "memory": waltest.New()} {
		t.Run(name, func(t *testing.T) {
			if err := wal.Find(dir); !errors.Is(err, wal.ErrNoLog) {
				t.Errorf("Find in an empty directory = %v, want %v", err, wal.ErrNoLog)
			}
			base := wal.Base{Index: 4, Term: 1, Members: []byte("m")}
			l := created(t, dir, wal.State{Base: base})
			save(t, l, &wal.HardState{Term: 2, Vote: 7, Commit: 4}, entry(5, 2, "a"), entry(6, 2, "b"), entry(7, 2, "c"))
			save(t, l, nil, entry(6, 3, "B")) // another leader's, in place of 6 and 7
			save(t, l, &wal.HardState{Term: 3, Vote: 1, Commit: 6})
			want := wal.State{Hard: wal.HardState{Term: 3, Vote: 1, Commit: 6}, Base: base, Entries: []wal.Entry{entry(5, 2, "a"), entry(6, 3, "B")}}
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			l = holds(t, dir, want)
			save(t, l, nil, entry(7, 3, "d"))
			want.Entries = append(want.Entries, entry(7, 3, "d"))
			l.Close()
			l = holds(t, dir, want)

			want = wal.State{Hard: want.Hard, Base: wal.Base{Index: 6, Term: 3, Members: []byte("n")}, Entries: want.Entries[2:]}
			if err := l.Rewrite(want); err != nil {
				t.Fatal(err)
			}
			save(t, l, nil, entry(8, 3, "e"))
			want.Entries = append(want.Entries, entry(8, 3, "e"))
			l.Close()
			holds(t, dir, want).Close()
			if names, err := dir.List(); err != nil || len(names) != 1 {
				t.Errorf("the directory holds %q, %v; want one file", names, err)
			}
		})
	}
}

func TestALogIsCreatedOnce(t *testing.T) {
	dir := waltest.New()
	if _, _, err := wal.Open(dir); !errors.Is(err, wal.ErrNoLog) {
		t.Errorf("Open of an empty directory = %v, want %v", err, wal.ErrNoLog)
	}
	created(t, dir, wal.State{})
	if _, err := wal.Create(dir, owner, wal.State{}); !errors.Is(err, wal.ErrExists) {
		t.Errorf("Create over a log = %v, want %v", err, wal.ErrExists)
	}
}

func TestEntriesWithoutAGap(t *testing.T) {
	l := created(t, waltest.New(), wal.State{Base: wal.Base{Index: 4, Term: 1}})
	save(t, l, nil, entry(5, 1, "a"))
	for _, entries := range [][]wal.Entry{
		{entry(4, 1, "in the base")},
		{entry(7, 1, "behind a gap")},
		{entry(6, 1, "x"), entry(8, 1, "y")},
	} {
		if err := l.Save(nil, entries); err == nil {
			t.Errorf("Save(%v) = nil, want an error", entries)
		}
	}
	if err := l.Rewrite(wal.State{Base: wal.Base{Index: 4}, Entries: []wal.Entry{entry(6, 1, "x")}}); err == nil {
		t.Error("Rewrite with a gap = nil, want an error")
	}
	save(t, l, nil, entry(6, 1, "b")) // a refused call is no failure of the drive
}

// An fsync that failed may have dropped the data, and the next one succeeds nevertheless.
func TestAfterAFailedSyncTheLogRefusesEverything(t *testing.T) {
	for name, fails := range map[string]func(l *wal.Log) error{
		"save":    func(l *wal.Log) error { return l.Save(nil, []wal.Entry{entry(1, 1, "a")}) },
		"rewrite": func(l *wal.Log) error { return l.Rewrite(wal.State{}) },
	} {
		t.Run(name, func(t *testing.T) {
			disk := waltest.New()
			l := created(t, disk, wal.State{})
			disk.FailSync = true
			if err := fails(l); !errors.Is(err, waltest.ErrFailed) {
				t.Fatalf("%s on a drive that fails = %v", name, err)
			}
			disk.FailSync = false
			if err := l.Save(nil, []wal.Entry{entry(1, 1, "b")}); !errors.Is(err, waltest.ErrFailed) {
				t.Errorf("Save after that = %v, want the first error again", err)
			}
			if err := l.Rewrite(wal.State{}); !errors.Is(err, waltest.ErrFailed) {
				t.Errorf("Rewrite after that = %v, want the first error again", err)
			}
		})
	}
}

// life is a random history of a log, whose state is known after each step.
type life struct {
	random *rand.Rand
	state  wal.State
}

// next returns the state after a step, and the step.
func (h *life) next() (wal.State, func(l *wal.Log) error) {
	s := wal.State{Hard: h.state.Hard, Base: h.state.Base, Entries: slices.Clone(h.state.Entries)}
	if h.random.IntN(6) == 0 && len(s.Entries) > 0 {
		n := h.random.IntN(len(s.Entries)) + 1
		s.Base = wal.Base{Index: s.Entries[n-1].Index, Term: s.Entries[n-1].Term, Members: []byte(fmt.Sprint(n))}
		s.Entries = s.Entries[n:]
		return s, func(l *wal.Log) error { return l.Rewrite(s) }
	}
	var hard *wal.HardState
	if h.random.IntN(2) == 0 {
		s.Hard.Term += uint64(h.random.IntN(2))
		s.Hard.Vote, s.Hard.Commit = uint64(h.random.IntN(3)), s.Base.Index
		hard = &s.Hard
	}
	keep := len(s.Entries) - min(len(s.Entries), max(0, h.random.IntN(6)-3))
	s.Entries = s.Entries[:keep]
	first := keep
	for range h.random.IntN(3) + 1 {
		s.Entries = append(s.Entries, entry(s.Base.Index+uint64(len(s.Entries))+1, s.Hard.Term, strings.Repeat("x", h.random.IntN(40))))
	}
	return s, func(l *wal.Log) error { return l.Save(hard, s.Entries[first:]) }
}

// Whatever the operation in the middle of which the power is cut, and whatever of the unsynced
// is left: the log holds all that was saved, or that and the step under way.
func TestACutAtAnyOperation(t *testing.T) {
	const steps, leftovers = 12, 6
	cuts := 0
	for seed := range uint64(6) {
		for at := 1; ; at++ {
			random := rand.New(rand.NewPCG(seed, 1))
			h := &life{random: random}
			disk := waltest.New()
			l := created(t, disk, h.state)
			disk.CutAt = disk.Ops() + at
			var during wal.State
			cut := false
			for range steps {
				next, do := h.next()
				if err := do(l); err != nil {
					during, cut = next, true
					break
				}
				h.state = next
			}
			if !cut {
				break
			}
			cuts++
			for range leftovers {
				found := disk.AfterCut(random)
				opened, got, err := wal.Open(found)
				if err != nil {
					t.Fatalf("seed %d, cut at %d: %v", seed, at, err)
				}
				if before := differ(h.state, got); before != "" && differ(during, got) != "" {
					t.Fatalf("seed %d, cut at %d: neither the state before nor the one after (-before +got):\n%s", seed, at, before)
				}
				// It goes on, and what is saved now is there after the next cut.
				next, do := (&life{random: random, state: got}).next()
				if err := do(opened); err != nil {
					t.Fatal(err)
				}
				holds(t, found.AfterCut(random), next)
			}
		}
	}
	if t.Logf("%d cuts, %d leftovers of each", cuts, leftovers); cuts < 100 {
		t.Errorf("%d cuts, want more", cuts)
	}
}

// A cut may also come while a log that was cut is opened.
func TestACutWhileALogIsOpened(t *testing.T) {
	whole := oneFile(t)
	for n := len(whole.ends); n > 1; n-- {
		torn := whole.text[:whole.ends[n-1]-1]
		for at := 1; ; at++ {
			disk := waltest.New()
			disk.Put(whole.name, torn)
			disk.CutAt = at
			_, _, err := wal.Open(disk)
			if err != nil && !errors.Is(err, waltest.ErrCut) {
				t.Fatalf("Open with the power cut at %d = %v", at, err)
			}
			holds(t, disk.AfterCut(rand.New(rand.NewPCG(uint64(n), uint64(at)))), whole.states[n-2])
			if err != nil {
				continue
			}
			if at < 6 {
				t.Fatalf("Open changes the disk %d times, want more: that no cut was tried says nothing", at-1)
			}
			break
		}
	}
}

// A process may end between a write and its sync. What the next one finds then is in the page cache
// alone, and yet it acts on it: so it must be durable first.
func TestWhatAnOpenLogHoldsIsDurable(t *testing.T) {
	const steps, leftovers = 12, 6
	for seed := range uint64(6) {
		for at := 1; ; at++ {
			random := rand.New(rand.NewPCG(seed, 2))
			h := &life{random: random}
			disk := waltest.New()
			l := created(t, disk, h.state)
			disk.CutAt = disk.Ops() + at
			ended := false
			for range steps {
				next, do := h.next()
				if err := do(l); err != nil {
					ended = true
					break
				}
				h.state = next
			}
			if !ended {
				break
			}
			disk.CutAt = 0 // only the process has ended
			_, got, err := wal.Open(disk)
			if err != nil {
				t.Fatalf("seed %d, ended at %d: %v", seed, at, err)
			}
			for range leftovers {
				holds(t, disk.AfterCut(random), got)
			}
			if t.Failed() {
				t.Fatalf("seed %d, ended at %d", seed, at)
			}
		}
	}
}

// What a sync has failed to write stays in the page cache for a while, and no later one writes it.
func TestALogSurvivesASyncThatFailed(t *testing.T) {
	disk := waltest.New()
	l := created(t, disk, wal.State{})
	save(t, l, &wal.HardState{Term: 1, Vote: 7}, entry(1, 1, "a"))
	disk.FailSync = true
	if err := l.Save(nil, []wal.Entry{entry(2, 1, "b")}); !errors.Is(err, waltest.ErrFailed) {
		t.Fatalf("Save on a drive that fails = %v", err)
	}
	disk.FailSync = false
	want := wal.State{Hard: wal.HardState{Term: 1, Vote: 7}, Entries: []wal.Entry{entry(1, 1, "a"), entry(2, 1, "b")}}
	next := holds(t, disk, want) // the next process
	save(t, next, nil, entry(3, 1, "c"))
	want.Entries = append(want.Entries, entry(3, 1, "c"))
	for seed := range uint64(8) {
		holds(t, disk.AfterCut(rand.New(rand.NewPCG(seed, 3))), want)
	}
}

// file is a log of some frames.
type file struct {
	name   string
	text   []byte
	ends   []int // of the frames
	states []wal.State
}

func oneFile(t testing.TB) (f file) {
	t.Helper()
	disk := waltest.New()
	h := &life{random: rand.New(rand.NewPCG(5, 5))}
	h.state.Base.Members = []byte("members")
	l := created(t, disk, h.state)
	f.ends, f.states = []int{int(l.Size())}, []wal.State{h.state}
	for len(f.ends) < 8 {
		next, do := h.next()
		if next.Base.Index != h.state.Base.Index {
			continue // a rewrite
		}
		if err := do(l); err != nil {
			t.Fatal(err)
		}
		h.state = next
		f.ends, f.states = append(f.ends, int(l.Size())), append(f.states, next)
	}
	names, _ := disk.List()
	f.name = names[0]
	f.text, _ = disk.Read(f.name)
	return f
}

// opened returns what a file holds.
func (f file) opened(text []byte) (wal.State, error) {
	disk := waltest.New()
	disk.Put(f.name, text)
	_, got, err := wal.Open(disk)
	return got, err
}

// saved returns the state after the frames that lie before a byte; -1 for the first frame
// means none.
func (f file) saved(bytes int) int {
	n := -1
	for n+1 < len(f.ends) && f.ends[n+1] <= bytes {
		n++
	}
	return n
}

// A file cut short at any byte, with and without zeroes in place of the rest, holds what was
// saved before. The first frame is never cut short: it is durable before the file has its name.
func TestACutAtEveryByte(t *testing.T) {
	f := oneFile(t)
	for n := range f.text {
		zeroes := append(slices.Clone(f.text[:n]), make([]byte, len(f.text)-n)...)
		for what, text := range map[string][]byte{"short": f.text[:n], "zeroes": zeroes} {
			got, err := f.opened(text)
			same := n
			for same < len(text) && text[same] == f.text[same] { // zeroes of its own
				same++
			}
			last := f.saved(same)
			if last < 0 {
				if !errors.Is(err, wal.ErrDamaged) {
					t.Fatalf("%s from byte %d: %v, want that it is damaged", what, n, err)
				}
				continue
			}
			if err != nil {
				t.Fatalf("%s from byte %d: %v", what, n, err)
			}
			if diff := differ(f.states[last], got); diff != "" {
				t.Fatalf("%s from byte %d (-want +got):\n%s", what, n, diff)
			}
		}
	}
}

// A damaged byte in any frame but the last is found and refused, and the error says where. In
// the last frame it cannot be told from a Save that was cut short.
func TestADamagedByteIsRefused(t *testing.T) {
	f := oneFile(t)
	last := f.ends[len(f.ends)-2]
	for at := range f.text {
		for _, flip := range []byte{0x01, 0x80, 0xff} {
			text := slices.Clone(f.text)
			text[at] ^= flip
			got, err := f.opened(text)
			if at < last {
				if !errors.Is(err, wal.ErrDamaged) {
					t.Fatalf("byte %d changed by %#x: %v, want that it is damaged", at, flip, err)
				}
				continue
			}
			if err != nil || differ(f.states[len(f.states)-2], got) != "" {
				t.Fatalf("byte %d of the last frame changed by %#x: %v, want what was saved before", at, flip, err)
			}
		}
	}
	text := slices.Clone(f.text)
	text[f.ends[2]+20] ^= 1
	_, err := f.opened(text)
	if want := fmt.Sprintf("frame 3 at byte %d is not readable, but frame 4 at byte %d is", f.ends[2], f.ends[3]); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("Open = %v, want that it says %q", err, want)
	}
}

// A file that was copied from elsewhere, or under another name, is refused.
func TestAFileUnderAnotherNameIsRefused(t *testing.T) {
	f := oneFile(t)
	f.name = "0000000000000099.log"
	if _, err := f.opened(f.text); !errors.Is(err, wal.ErrDamaged) {
		t.Errorf("Open = %v, want that it is damaged", err)
	}
}

// Files of a cut Rewrite are removed; others are left alone.
func TestLeftoversAreRemoved(t *testing.T) {
	f := oneFile(t)
	disk := waltest.New()
	disk.Put(f.name, f.text)
	disk.Put("0000000000000000.log", []byte("older"))
	disk.Put("0000000000000002.new", []byte("half"))
	disk.Put("note.txt", []byte("an operator's"))
	if _, _, err := wal.Open(disk); err != nil {
		t.Fatal(err)
	}
	if names, _ := disk.List(); !slices.Equal(names, []string{"0000000000000002.log", "note.txt"}) {
		t.Errorf("the directory holds %q", names)
	}
}

// Whoever looks at a log changes nothing: a write that is under way looks like a torn one.
func TestToLookAtALogLeavesItAsItIs(t *testing.T) {
	dir := wal.InDirectory(t.TempDir())
	l := created(t, dir, wal.State{})
	hard := wal.HardState{Term: 1, Vote: 7, Commit: 1}
	save(t, l, &hard, entry(1, 1, "one"))
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	names, err := dir.List()
	if err != nil || len(names) != 1 {
		t.Fatalf("the log's files are %v, %v", names, err)
	}
	path := filepath.Join(string(dir), names[0])
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	text = append(text, "torn"...)
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	whose, holds, err := wal.Look(dir)
	if err != nil || whose != owner || len(holds.Entries) != 1 {
		t.Errorf("Look = %v, %v, %v; want %v and one entry", whose, holds, err, owner)
	}
	if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, text) {
		t.Errorf("the file has %d bytes, %v; want the %d that it had", len(now), err, len(text))
	}
}

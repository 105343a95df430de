// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/quorum"
)

func replica(t *testing.T, records ...cluster.Record) (*Replica, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "store")
	if err := Create(dir, records, quiet); err != nil {
		t.Fatal(err)
	}
	return openedReplica(t, dir), dir
}

func openedReplica(t *testing.T, dir string) *Replica {
	t.Helper()
	r, err := OpenReplica(dir, quiet)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if !r.s.db.IsClosed() {
			r.Close()
		}
	})
	return r
}

func apply(t *testing.T, r *Replica, index uint64, records ...cluster.Record) {
	t.Helper()
	if err := r.Apply([]quorum.Entry{{Index: index, Data: EncodeRecords(records)}}, quorum.Position{Index: index}); err != nil {
		t.Fatal(err)
	}
}

// replicaHolds checks the records of a replica, and the index of the last entry in it.
func replicaHolds(t *testing.T, r *Replica, index uint64, want ...cluster.Record) {
	t.Helper()
	got, err := r.Load()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("records (-want +got):\n%s", diff)
	}
	if at, err := r.Applied(); err != nil || at != index {
		t.Errorf("Applied = %d, %v; want %d", at, err, index)
	}
}

func TestRecordsInAnEntry(t *testing.T) {
	for _, records := range [][]cluster.Record{nil, {record("a", "1")}, {{Key: "gone"}, record("empty", ""), record("b", "2")}} {
		got, err := DecodeRecords(EncodeRecords(records))
		if diff := cmp.Diff(records, got); err != nil || diff != "" {
			t.Errorf("%v: %v (-want +got):\n%s", records, err, diff)
		}
	}
	if _, err := DecodeRecords([]byte{9}); err == nil {
		t.Error("an entry of a later version is read")
	}
}

func FuzzDecodeRecords(f *testing.F) {
	f.Add(EncodeRecords([]cluster.Record{record("a", "1"), {Key: "gone"}, record("empty", "")}))
	f.Add([]byte{1, 1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		records, err := DecodeRecords(b)
		if err != nil {
			return
		}
		again, err := DecodeRecords(EncodeRecords(records))
		if err != nil || !cmp.Equal(records, again) {
			t.Errorf("%v, %v; want %v", again, err, records)
		}
	})
}

// An existing store becomes a replica, and entries change it.
func TestAReplicaHasWhatItsEntriesSay(t *testing.T) {
	r, dir := replica(t, record("a", "1"), record("b", "2"))
	replicaHolds(t, r, 0, record("a", "1"), record("b", "2"))
	apply(t, r, 7, record("c", "3"), cluster.Record{Key: "a"})
	apply(t, r, 8, record("b", "4"))
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	r = openedReplica(t, dir)
	replicaHolds(t, r, 8, record("b", "4"), record("c", "3"))
	var backup bytes.Buffer
	if err := r.Backup(&backup); err != nil {
		t.Fatal(err)
	}
	got, err := ReadBackup(&backup)
	if diff := cmp.Diff([]cluster.Record{record("b", "4"), record("c", "3")}, got); err != nil || diff != "" {
		t.Errorf("its backup: %v (-want +got):\n%s", err, diff)
	}
}

// An entry that is too large for one transaction of Badger is applied nevertheless.
func TestALargeEntryIsApplied(t *testing.T) {
	r, _ := replica(t)
	var large []cluster.Record
	for i := range 12_000 {
		large = append(large, record(fmt.Sprintf("k%08d", i), string(bytes.Repeat([]byte("x"), 1000))))
	}
	apply(t, r, 3, large...)
	got, err := r.Load()
	if err != nil || !slices.EqualFunc(got, large, func(a, b cluster.Record) bool { return a.Key == b.Key && bytes.Equal(a.Value, b.Value) }) {
		t.Errorf("%d records, %v; want the %d of the entry", len(got), err, len(large))
	}
	if at, err := r.Applied(); err != nil || at != 3 {
		t.Errorf("Applied = %d, %v; want 3", at, err)
	}
}

// What a member gets from the leader is exactly what the leader had at that moment.
func TestASnapshotReplacesTheState(t *testing.T) {
	from, _ := replica(t, record("a", "1"), record("b", "2"))
	apply(t, from, 9, record("c", "3"))
	content, err := from.Content()
	if err != nil {
		t.Fatal(err)
	}
	apply(t, from, 10, record("d", "too late"))

	to, dir := replica(t, record("a", "old"), record("z", "gone"))
	apply(t, to, 4, record("y", "gone"))
	if err := to.Stage(content, 9); err != nil {
		t.Fatal(err)
	}
	replicaHolds(t, to, 4, record("a", "old"), record("y", "gone"), record("z", "gone"))
	for range 2 { // a crash after the first one's index, before its snapshot was removed
		if at, err := to.Staged(); err != nil || at != 9 {
			t.Fatalf("Staged = %d, %v; want 9", at, err)
		}
		kept := read(t, to.stagedPath(9))
		if err := to.Adopt(quorum.Position{Index: 9}); err != nil {
			t.Fatal(err)
		}
		replicaHolds(t, to, 9, record("a", "1"), record("b", "2"), record("c", "3"))
		if at, err := to.Staged(); err != nil || at != 0 {
			t.Errorf("Staged after Adopt = %d, %v; want none", at, err)
		}
		if err := os.WriteFile(to.stagedPath(9), kept, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := to.Close(); err != nil {
		t.Fatal(err)
	}
	replicaHolds(t, openedReplica(t, dir), 9, record("a", "1"), record("b", "2"), record("c", "3"))
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// A snapshot that was cut short or damaged on the way is not staged.
func TestADamagedSnapshotIsNotStaged(t *testing.T) {
	from, _ := replica(t, record("a", "1"))
	content, err := from.Content()
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(content)
	if err != nil {
		t.Fatal(err)
	}
	damaged := slices.Clone(text)
	damaged[len(damaged)/2] ^= 1
	to, _ := replica(t)
	for what, text := range map[string][]byte{"cut short": text[:len(text)-1], "damaged": damaged} {
		if err := to.Stage(bytes.NewReader(text), 5); err == nil {
			t.Errorf("Stage of one that is %s = nil", what)
		}
		if at, err := to.Staged(); err != nil || at != 0 {
			t.Errorf("after one that is %s: Staged = %d, %v; want none", what, at, err)
		}
	}
	if err := to.Adopt(quorum.Position{Index: 5}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Adopt = %v, want that there is nothing", err)
	}
}

// levelRecord is what a version that knows levels writes.
func levelRecord(level string) cluster.Record {
	return cluster.Record{Key: cluster.LevelKey, Value: []byte(`{"level":` + level + `}`)}
}

// A member does not apply records of a level that it does not know, nor opens a store that has them.
// A later program, with the same log, goes on where it stopped.
func TestALevelThatIsNotKnownIsNotApplied(t *testing.T) {
	r, dir := replica(t)
	apply(t, r, 5, levelRecord("2"))
	if err := r.Know(1); !errors.Is(err, cluster.ErrLevel) {
		t.Errorf("Know(1) = %v", err)
	}
	if err := r.Know(2); err != nil || r.Level() != 2 {
		t.Fatalf("Know(2) = %v, level %d", err, r.Level())
	}
	later := []quorum.Entry{{Index: 6, Data: EncodeRecords([]cluster.Record{{Key: "v/1", Value: []byte("x")}, levelRecord("3")})}}
	if err := r.Apply(later, quorum.Position{Index: 6}); !errors.Is(err, cluster.ErrLevel) {
		t.Errorf("Apply = %v", err)
	}
	replicaHolds(t, r, 5, levelRecord("2"))
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	r = openedReplica(t, dir)
	if err := r.Know(3); err != nil {
		t.Fatal(err)
	}
	if err := r.Apply(later, quorum.Position{Index: 6}); err != nil || r.Level() != 3 {
		t.Errorf("a program that knows it: %v, level %d", err, r.Level())
	}
}

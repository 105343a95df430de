// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/volmgr/cluster"
)

// Many commits make many tables. They must be merged while the store is in use: Badger lets commits
// wait for ever beside 15 tables.
func TestTablesAreMergedWhileCommitsGoOn(t *testing.T) {
	dir := t.TempDir()
	small := options(dir, slog.New(slog.DiscardHandler)).WithSyncWrites(false).WithMemTableSize(1 << 20).WithValueThreshold(8 << 10)
	s, err := openWith(small, dir)
	if err != nil {
		t.Fatal(err)
	}
	var merges atomic.Int32
	merge := s.merger.merge
	s.merger.merge = func() error { merges.Add(1); return merge() }
	const keys, rounds = 20, 2000
	value := func(key, round int) string { return fmt.Sprintf("%d/%d/%4000d", key, round, 7) }
	committed := make(chan error)
	go func() {
		defer close(committed)
		for round := range rounds {
			var all []cluster.Record
			for key := range keys {
				all = append(all, record(fmt.Sprintf("k/%d", key), value(key, round)))
			}
			if err := s.Commit(all); err != nil {
				committed <- err
				return
			}
		}
	}()
	select {
	case err := <-committed:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(time.Minute):
		t.Fatalf("commits wait, beside %d tables after %d merges", s.tables(), merges.Load())
	}
	if n := merges.Load(); n < 2 {
		t.Errorf("%d merges, want more", n)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if s, err = openWith(small, dir); err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	got := load(t, s)
	if len(got) != keys {
		t.Fatalf("%d records, want %d", len(got), keys)
	}
	for _, r := range got {
		var key int
		fmt.Sscanf(r.Key, "k/%d", &key)
		if string(r.Value) != value(key, rounds-1) {
			t.Errorf("%s is %.20s, want %.20s", r.Key, r.Value, value(key, rounds-1))
		}
	}
}

// A store that was closed with many tables gets no commit for a long time, perhaps.
func TestTablesAreMergedWhenTheStoreIsOpened(t *testing.T) {
	dir := t.TempDir()
	opened := func() *Store {
		s, err := open(dir, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	for i := range mergeAt {
		s := opened()
		s.merger.close() // no merge yet
		if err := s.Commit([]cluster.Record{record(fmt.Sprint(i), "v")}); err != nil {
			t.Fatal(err)
		}
		if err := s.Close(); err != nil { // makes a table
			t.Fatal(err)
		}
	}
	s := opened()
	defer s.Close()
	for deadline := time.Now().Add(10 * time.Second); s.tables() >= mergeAt; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d tables stay", s.tables())
		}
	}
	if got := load(t, s); len(got) != mergeAt {
		t.Errorf("%d records after the merge, want %d", len(got), mergeAt)
	}
}

// fakeTables is a store whose merges fail, or do nothing.
func fakeTables(fail *atomic.Bool, err error) (m *merger, merges *atomic.Int32) {
	merges = new(atomic.Int32)
	var tables atomic.Int32
	tables.Store(mergeAt)
	return &merger{
		log:    slog.New(slog.DiscardHandler),
		tables: func() int { return int(tables.Load()) },
		merge: func() error {
			if n := merges.Add(1); fail.Load() && n < 100 {
				return err
			}
			tables.Store(0)
			return nil
		},
	}, merges
}

func TestAMergeThatFailedIsRepeatedWithoutACommit(t *testing.T) {
	for _, err := range []error{errors.New("disk full"), nil} { // nil: it changes nothing
		synctest.Test(t, func(t *testing.T) {
			var fail atomic.Bool
			fail.Store(true)
			m, merges := fakeTables(&fail, err)
			defer m.close()
			m.look()
			synctest.Wait()
			for range 3 { // commits do not hasten it
				m.look()
				synctest.Wait()
			}
			if n := merges.Load(); n != 1 {
				t.Errorf("%v: %d merges at once after a failure, want 1", err, n)
			}
			time.Sleep(3*mergeRetry + mergeRetry/2)
			synctest.Wait()
			if n := merges.Load(); n != 4 {
				t.Errorf("%v: %d merges after three more pauses, want 4", err, n)
			}
			fail.Store(false)
			time.Sleep(10 * mergeRetry)
			if n := merges.Load(); n != 5 {
				t.Errorf("%v: %d merges, want 5: one more, which succeeds", err, n)
			}
		})
	}
}

func TestNoMergeRunsInAClosedStore(t *testing.T) {
	for failed := range 2 { // merges before it is closed
		synctest.Test(t, func(t *testing.T) {
			var fail atomic.Bool
			fail.Store(true)
			m, merges := fakeTables(&fail, errors.New("disk full"))
			for range failed {
				m.look()
				synctest.Wait()
			}
			m.close()
			m.look()
			time.Sleep(10 * mergeRetry)
			if n := merges.Load(); int(n) != failed {
				t.Errorf("%d merges, want only the %d before it was closed", n, failed)
			}
		})
	}
}

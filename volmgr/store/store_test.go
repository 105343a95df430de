// SPDX-License-Identifier: Apache-2.0

package store

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/dgraph-io/badger/v4"
	"github.com/google/go-cmp/cmp"

	"weft.dev/weft/volmgr/cluster"
)

var quiet = slog.New(slog.DiscardHandler)

func record(key, value string) cluster.Record { return cluster.Record{Key: key, Value: []byte(value)} }

func create(t *testing.T, records ...cluster.Record) (*Store, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "store")
	if err := Create(dir, records, quiet); err != nil {
		t.Fatal(err)
	}
	s, err := Open(dir, quiet)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s, dir
}

func load(t *testing.T, s *Store) []cluster.Record {
	t.Helper()
	records, err := s.Load()
	if err != nil {
		t.Fatal(err)
	}
	return records
}

// A commit that is only in the page cache is lost in a power cut. No test here can cut power,
// and a kill does not lose it, so the test checks how the store is opened.
func TestEveryCommitReachesTheDisk(t *testing.T) {
	s, _ := create(t)
	if o := s.db.Opts(); !o.SyncWrites || o.InMemory {
		t.Errorf("the store is opened with SyncWrites %v, InMemory %v: commits do not wait for the disk", o.SyncWrites, o.InMemory)
	}
}

func TestCommittedRecordsAreThereAfterReopening(t *testing.T) {
	s, dir := create(t, record("a", "1"), record("b", "2"))
	if err := s.Commit([]cluster.Record{record("c", "3"), {Key: "a"}, record("b", "4"), record("b", "5")}); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	again, err := Open(dir, quiet)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	want := []cluster.Record{record("b", "5"), record("c", "3")}
	if diff := cmp.Diff(want, load(t, again)); diff != "" {
		t.Errorf("records after reopening (-want +got):\n%s", diff)
	}
}

func TestOpenAndCreateKnowWhatIsThere(t *testing.T) {
	if _, err := Open(filepath.Join(t.TempDir(), "none"), quiet); !errors.Is(err, ErrNoStore) {
		t.Errorf("Open(nothing) = %v, want ErrNoStore", err)
	}
	s, dir := create(t, record("a", "1"))
	if _, err := Open(dir, quiet); !errors.Is(err, ErrInUse) {
		t.Errorf("a second Open of an open store = %v, want ErrInUse", err)
	}
	if err := Create(dir, nil, quiet); !errors.Is(err, ErrNotEmpty) {
		t.Errorf("Create over a store = %v, want ErrNotEmpty", err)
	}
	if diff := cmp.Diff([]cluster.Record{record("a", "1")}, load(t, s)); diff != "" {
		t.Errorf("records after a refused Create (-want +got):\n%s", diff)
	}
}

func TestBackupReadsBackAndDamageIsRefused(t *testing.T) {
	var want []cluster.Record
	for i := range 100 {
		want = append(want, record(fmt.Sprintf("k/%03d", i), fmt.Sprintf("value %d", i*i)))
	}
	s, _ := create(t, want...)
	var backup bytes.Buffer
	if err := s.Backup(&backup); err != nil {
		t.Fatal(err)
	}
	got, err := ReadBackup(bytes.NewReader(backup.Bytes()))
	if diff := cmp.Diff(want, got); err != nil || diff != "" {
		t.Fatalf("ReadBackup = %v (-want +got):\n%s", err, diff)
	}
	for cut := range backup.Len() {
		if _, err := ReadBackup(bytes.NewReader(backup.Bytes()[:cut])); err == nil {
			t.Fatalf("a backup cut at byte %d of %d was accepted", cut, backup.Len())
		}
	}
	for at := range backup.Len() {
		damaged := bytes.Clone(backup.Bytes())
		damaged[at] ^= 0x10
		if _, err := ReadBackup(bytes.NewReader(damaged)); err == nil {
			t.Fatalf("a backup damaged at byte %d was accepted", at)
		}
	}
}

func FuzzReadBackup(f *testing.F) {
	f.Add([]byte(backupMagic))
	f.Add([]byte(backupMagic + "\x01\x01ab\x00\x00\x00\x00\x00\x00"))
	f.Add([]byte(backupMagic + "\xff\xff\xff\xff\xff\xff\xff\xff\x7f\x01"))
	f.Fuzz(func(t *testing.T, data []byte) {
		records, err := ReadBackup(bytes.NewReader(data))
		if err != nil && records != nil {
			t.Errorf("ReadBackup gave %d records and %v", len(records), err)
		}
	})
}

// committer is the variable that makes this test binary the process to be killed.
const committer = "WEFT_STORE_COMMITTER"

func TestMain(m *testing.M) {
	if dir := os.Getenv(committer); dir != "" {
		commitForEver(dir)
	}
	os.Exit(m.Run())
}

// commitForEver commits pairs of records and prints the number of each commit
// that was acknowledged.
func commitForEver(dir string) {
	s, err := Open(dir, quiet)
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	for i := 0; ; i++ {
		n := fmt.Sprint(i)
		if err := s.Commit([]cluster.Record{record("left", n), record("right", n)}); err != nil {
			os.Exit(1)
		}
		fmt.Println(i)
	}
}

func TestKilledProcessLosesNothingAcknowledged(t *testing.T) {
	s, dir := create(t, record("left", "-1"), record("right", "-1"))
	s.Close()
	for round := range 5 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), committer+"="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		acknowledged := -1
		lines := bufio.NewScanner(out)
		for deadline := time.Now().Add(200 * time.Millisecond); time.Now().Before(deadline) && lines.Scan(); {
			fmt.Sscan(lines.Text(), &acknowledged)
		}
		cmd.Process.Kill()
		for lines.Scan() {
			fmt.Sscan(lines.Text(), &acknowledged)
		}
		cmd.Wait()
		if acknowledged < 0 {
			t.Fatal("the process acknowledged nothing")
		}

		again, err := Open(dir, quiet)
		if err != nil {
			t.Fatalf("round %d: open after the kill: %v", round, err)
		}
		records := load(t, again)
		again.Close()
		var left, right int
		fmt.Sscan(string(records[0].Value), &left)
		fmt.Sscan(string(records[1].Value), &right)
		if left != right {
			t.Errorf("round %d: half a commit is there: %d and %d", round, left, right)
		}
		if left < acknowledged {
			t.Errorf("round %d: commit %d was acknowledged, %d is there", round, acknowledged, left)
		}
	}
}

// large returns more records than fit in one Badger transaction.
func large() (records []cluster.Record) {
	for i := range 12000 {
		records = append(records, record(fmt.Sprintf("v/%06d", i), strings.Repeat(fmt.Sprint(i%10), 1000)))
	}
	return records
}

func TestCommitBeyondOneTransactionIsAllThere(t *testing.T) {
	s, _ := create(t, record("a", "1"), record("b", "2"))
	want := large()
	if err := s.apply(want); !errors.Is(err, badger.ErrTxnTooBig) {
		t.Fatalf("one transaction of %d records = %v, want ErrTxnTooBig, or this test tests nothing", len(want), err)
	}
	if err := s.Commit(append([]cluster.Record{{Key: "a"}}, want...)); err != nil {
		t.Fatal(err)
	}
	want = append([]cluster.Record{record("b", "2")}, want...)
	same := func(a, b cluster.Record) bool { return a.Key == b.Key && bytes.Equal(a.Value, b.Value) }
	if got := load(t, s); !slices.EqualFunc(got, want, same) {
		t.Errorf("%d records after a large commit, want %d others", len(got), len(want))
	}
	if staged, err := s.staged(); err != nil || len(staged) > 0 {
		t.Errorf("%d staged records are left, %v; want none", len(staged), err)
	}
}

func TestLargeCommitCutShortIsThereOnceMarkedAndNotBefore(t *testing.T) {
	want := large()
	for _, whole := range []bool{false, true} {
		s, dir := create(t, record("a", "1"))
		if err := s.stage(want); err != nil {
			t.Fatal(err)
		}
		if !whole {
			if err := s.apply([]cluster.Record{{Key: stageMark}}); err != nil {
				t.Fatal(err)
			}
		}
		if got := load(t, s); len(got) != 1 {
			t.Errorf("before it is carried out %d records are seen, want 1", len(got))
		}
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		again, err := Open(dir, quiet)
		if err != nil {
			t.Fatal(err)
		}
		defer again.Close()
		n := 1
		if whole {
			n += len(want)
		}
		if got := load(t, again); len(got) != n {
			t.Errorf("marked %v: %d records after reopening, want %d", whole, len(got), n)
		}
	}
}

// A store whose lock is released within a moment is opened, also as that of a member: a process that
// ends may hold the lock a little longer.
func TestAStoreThatIsAboutToBeReleasedIsOpened(t *testing.T) {
	for what, open := range map[string]func(dir string) (interface{ Close() error }, error){
		"store":   func(dir string) (interface{ Close() error }, error) { return Open(dir, quiet) },
		"replica": func(dir string) (interface{ Close() error }, error) { return OpenReplica(dir, quiet) },
	} {
		s, dir := create(t, record("a", "1"))
		released := time.AfterFunc(200*time.Millisecond, func() { s.Close() })
		defer released.Stop()
		again, err := open(dir)
		if err != nil {
			t.Errorf("%s: %v", what, err)
			continue
		}
		again.Close()
	}
}

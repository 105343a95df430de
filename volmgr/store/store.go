// SPDX-License-Identifier: Apache-2.0

// Package store keeps the records of the volume manager's state on disk.
//
// A commit is one Badger transaction with synchronous writes: when it returns, all of its
// records are durable; if it is cut short, none is. Package cluster knows what the records
// mean; the store does not.
//
//	dir/                Badger's files; Badger's own lock keeps a second process out
//	dir.restoring/      a store that is being created, renamed to dir when it is complete
package store

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/dgraph-io/badger/v4"

	"weft.dev/weft/proto/durable"
	"weft.dev/weft/volmgr/cluster"
)

// Store is an open store. Load, Commit and Backup may be called concurrently.
type Store struct {
	db     *badger.DB
	mu     sync.RWMutex // held to write while a commit takes several transactions
	merger *merger
}

// ErrInUse is returned by Open if another process has the store open.
var ErrInUse = errors.New("another process has it open")

// ErrNoStore is returned by Open if the directory holds no store.
var ErrNoStore = errors.New("no store there")

// ErrNotEmpty is returned by Create if the directory is not empty.
var ErrNotEmpty = errors.New("directory is not empty")

// Open opens the store in dir; ErrNoStore if there is none.
func Open(dir string, log *slog.Logger) (*Store, error) {
	if err := Find(dir); err != nil {
		return nil, fmt.Errorf("open store %s: %w", dir, err)
	}
	return open(dir, log)
}

// Find returns nil if dir holds a store, else ErrNoStore, whatever else dir holds. Callers
// need it because Badger would begin a new store there.
func Find(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if slices.ContainsFunc(entries, func(e os.DirEntry) bool { return e.Name() == badger.ManifestFilename }) {
		return nil
	}
	if len(entries) > 0 {
		return fmt.Errorf("%w (the directory holds %s)", ErrNoStore, entries[0].Name())
	}
	return ErrNoStore
}

func open(dir string, log *slog.Logger) (*Store, error) { return openWith(options(dir, log), dir) }

func options(dir string, log *slog.Logger) badger.Options {
	// All values stay in the LSM tree, since the whole state is small: its tables have
	// checksums and need no garbage collection of their own.
	return badger.DefaultOptions(dir).
		WithSyncWrites(true).
		WithValueThreshold(1 << 20).
		WithMemTableSize(32 << 20).
		WithNumMemtables(2).
		WithNumCompactors(0). // see merger
		WithNumLevelZeroTables(mergeAt - 1).
		WithBlockCacheSize(8 << 20).
		WithDetectConflicts(false). // one writer
		WithLogger(badgerLog{log})
}

// locked reports whether Badger could not lock a directory. Its error wraps no value to compare.
func locked(err error) bool {
	return strings.Contains(err.Error(), "Cannot acquire directory lock")
}

// lockPatience is how long opening a store waits for its lock. A process that ends may hold it for
// a moment more, and so may a child that this process is just starting.
const lockPatience = time.Second

func openWith(options badger.Options, dir string) (*Store, error) {
	db, err := badger.Open(options)
	for end := time.Now().Add(lockPatience); err != nil && locked(err) && time.Now().Before(end); {
		time.Sleep(50 * time.Millisecond)
		db, err = badger.Open(options)
	}
	if err != nil && locked(err) {
		return nil, fmt.Errorf("open store %s: %w", dir, ErrInUse)
	}
	if err != nil {
		return nil, fmt.Errorf("open store %s: %w", dir, err)
	}
	s := &Store{db: db}
	s.merger = &merger{tables: s.tables, merge: func() error { return db.Flatten(1) }, log: options.Logger.(badgerLog).log}
	if err := s.finish(); err != nil {
		return nil, errors.Join(fmt.Errorf("open store %s: %w", dir, err), s.Close())
	}
	s.merger.look()
	return s, nil
}

// tables is how many tables have not been merged with those below them.
func (s *Store) tables() int { return s.db.Levels()[0].NumTables }

// CheckEmpty returns ErrNotEmpty for a directory that is not empty, in which no store can be
// created.
func CheckEmpty(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("read directory: %w", err)
	}
	if len(entries) > 0 {
		return fmt.Errorf("%s: %w", dir, ErrNotEmpty)
	}
	return nil
}

// Create creates a store with records in dir, which must be empty or not exist. The store
// appears with all of the records or not at all.
func Create(dir string, records []cluster.Record, log *slog.Logger) (err error) {
	if err := CheckEmpty(dir); err != nil {
		return fmt.Errorf("create store: %w", err)
	}
	temporary := filepath.Clean(dir) + ".restoring"
	if err := os.RemoveAll(temporary); err != nil { // left by a crash
		return err
	}
	if err := os.MkdirAll(temporary, 0o700); err != nil {
		return err
	}
	defer os.RemoveAll(temporary)
	if err := fill(temporary, records, log); err != nil {
		return fmt.Errorf("create store %s: %w", dir, err)
	}
	err = os.Remove(dir)
	if errors.Is(err, syscall.EBUSY) {
		return fmt.Errorf("create store %s: it is a mount point, but a store is created by renaming: use a directory inside it", dir)
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if err := os.Rename(temporary, dir); err != nil {
		return err
	}
	return durable.SyncDir(filepath.Dir(filepath.Clean(dir)))
}

func fill(dir string, records []cluster.Record, log *slog.Logger) (err error) {
	s, err := open(dir, log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	return s.Commit(records)
}

// Load returns all records, in key order.
func (s *Store) Load() (records []cluster.Record, err error) {
	err = s.view(func(r cluster.Record) error {
		records = append(records, r)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("load records: %w", err)
	}
	return records, nil
}

// LoadPrefix returns the records whose keys begin with a prefix, in key order.
func (s *Store) LoadPrefix(prefix string) (records []cluster.Record, err error) {
	txn := s.reading()
	defer txn.Discard()
	err = each(txn, prefix, func(r cluster.Record) error {
		records = append(records, r)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("load records %s…: %w", prefix, err)
	}
	return records, nil
}

// view calls do for every record of one consistent snapshot, in key order.
func (s *Store) view(do func(cluster.Record) error) error {
	txn := s.reading()
	defer txn.Discard()
	return viewed(txn, do)
}

// reading begins a consistent snapshot.
func (s *Store) reading() *badger.Txn {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.db.NewTransaction(false)
}

func viewed(txn *badger.Txn, do func(cluster.Record) error) error {
	return each(txn, "", func(r cluster.Record) error {
		if isStage(r.Key) || r.Key == appliedKey {
			return nil
		}
		return do(r)
	})
}

func each(txn *badger.Txn, prefix string, do func(cluster.Record) error) error {
	options := badger.DefaultIteratorOptions
	options.Prefix = []byte(prefix)
	it := txn.NewIterator(options)
	defer it.Close()
	for it.Rewind(); it.Valid(); it.Next() {
		value, err := it.Item().ValueCopy(nil)
		if err != nil {
			return fmt.Errorf("read %q: %w", it.Item().Key(), err)
		}
		if err := do(cluster.Record{Key: string(it.Item().KeyCopy(nil)), Value: value}); err != nil {
			return err
		}
	}
	return nil
}

// Commit makes records durable, all or none. If several have one key, the last counts.
func (s *Store) Commit(records []cluster.Record) error {
	err := s.apply(records)
	if errors.Is(err, badger.ErrTxnTooBig) {
		err = s.commitStaged(records)
	}
	if err != nil {
		return fmt.Errorf("commit %d records: %w", len(records), err)
	}
	return nil
}

// apply is one transaction.
func (s *Store) apply(records []cluster.Record) error {
	defer s.merger.look()
	return s.db.Update(func(txn *badger.Txn) error {
		for _, r := range records {
			var err error
			if r.Value == nil {
				err = txn.Delete([]byte(r.Key))
			} else {
				err = txn.Set([]byte(r.Key), r.Value)
			}
			if err != nil {
				return fmt.Errorf("%s: %w", r.Key, err)
			}
		}
		return nil
	})
}

// Close closes the store.
func (s *Store) Close() error {
	s.merger.close()
	return s.db.Close()
}

// A backup is the magic, then each record as two lengths (unsigned varints), key
// and value; two zero lengths end the records, and a CRC32C of all before it, in
// little endian, ends the file.
const backupMagic = "WEFT-BACKUP-1\n"

// Limits of the lengths in a backup, checked before memory is allocated.
const (
	maxKey   = 1 << 10
	maxValue = 64 << 20
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Backup writes a consistent copy of all records but the secret ones. Commits may run meanwhile.
func (s *Store) Backup(w io.Writer) error {
	txn := s.reading()
	defer txn.Discard()
	return backup(txn, w, cluster.Record.Secret)
}

// backup writes a copy of all records but those that are left out.
func backup(txn *badger.Txn, w io.Writer, leaveOut func(cluster.Record) bool) error {
	sum := crc32.New(castagnoli)
	out := bufio.NewWriter(io.MultiWriter(w, sum))
	out.WriteString(backupMagic)
	err := viewed(txn, func(r cluster.Record) error {
		if leaveOut(r) {
			return nil
		}
		out.Write(binary.AppendUvarint(binary.AppendUvarint(nil, uint64(len(r.Key))), uint64(len(r.Value))))
		out.WriteString(r.Key)
		_, err := out.Write(r.Value)
		return err
	})
	if err != nil {
		return fmt.Errorf("back up: %w", err)
	}
	out.Write([]byte{0, 0})
	if err := out.Flush(); err != nil {
		return fmt.Errorf("back up: %w", err)
	}
	_, err = w.Write(binary.LittleEndian.AppendUint32(nil, sum.Sum32()))
	return err
}

// ReadBackup reads what Backup wrote. It refuses a backup that is truncated or damaged.
func ReadBackup(r io.Reader) ([]cluster.Record, error) {
	sum := crc32.New(castagnoli)
	in := &summed{r: bufio.NewReader(r), sum: sum}
	magic := make([]byte, len(backupMagic))
	if _, err := io.ReadFull(in, magic); err != nil || string(magic) != backupMagic {
		return nil, errors.New("read backup: not a backup of Weft, or of another version")
	}
	var records []cluster.Record
	for {
		r, err := readRecord(in)
		if err != nil {
			return nil, fmt.Errorf("read backup: record %d: %w", len(records)+1, err)
		}
		if r.Key == "" {
			break
		}
		records = append(records, r)
	}
	want := sum.Sum32()
	var tail [4]byte
	if _, err := io.ReadFull(in, tail[:]); err != nil {
		return nil, errors.New("read backup: cut short at the checksum")
	}
	if got := binary.LittleEndian.Uint32(tail[:]); got != want {
		return nil, fmt.Errorf("read backup: checksum %08x, want %08x: damaged", got, want)
	}
	return records, nil
}

func readRecord(in *summed) (r cluster.Record, err error) {
	key, err := binary.ReadUvarint(in)
	if err != nil {
		return r, noEOF(err)
	}
	value, err := binary.ReadUvarint(in)
	if err != nil {
		return r, noEOF(err)
	}
	if key > maxKey || value > maxValue || key == 0 && value != 0 {
		return r, fmt.Errorf("lengths %d and %d: damaged", key, value)
	}
	b, err := readAll(in, int64(key+value))
	if err != nil {
		return r, err
	}
	return cluster.Record{Key: string(b[:key]), Value: b[key:]}, nil
}

// readAll reads n bytes. It allocates memory as bytes arrive, since n may be wrong.
func readAll(in io.Reader, n int64) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(in, n))
	if err == nil && int64(len(b)) < n {
		err = io.ErrUnexpectedEOF
	}
	return b, err
}

func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// summed reads from r and writes all that it read to sum.
type summed struct {
	r   *bufio.Reader
	sum io.Writer
}

func (s *summed) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	s.sum.Write(p[:n])
	return n, err
}

func (s *summed) ReadByte() (byte, error) {
	b, err := s.r.ReadByte()
	if err == nil {
		s.sum.Write([]byte{b})
	}
	return b, err
}

// badgerLog passes on Badger's log. Info becomes Debug, since it helps only Badger's authors.
type badgerLog struct{ log *slog.Logger }

func (l badgerLog) Errorf(f string, a ...any)   { l.log.Error("badger", "text", fmt.Sprintf(f, a...)) }
func (l badgerLog) Warningf(f string, a ...any) { l.log.Warn("badger", "text", fmt.Sprintf(f, a...)) }
func (l badgerLog) Infof(f string, a ...any)    { l.log.Debug("badger", "text", fmt.Sprintf(f, a...)) }
func (l badgerLog) Debugf(string, ...any)       {}

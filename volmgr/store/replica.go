// SPDX-License-Identifier: Apache-2.0

package store

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/dgraph-io/badger/v4"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/durable"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/quorum"
)

// A Replica is the store of a member of the quorum. Its records come from committed entries.
// The transactions are not synced, since the quorum's log has them: see package member. The
// index of the last entry is a record of its own, set in the same transaction.
//
//	dir/            the store, as without a quorum
//	dir/quorum/     the log, and the snapshot that is staged: INDEX.snapshot, a backup
type Replica struct {
	s       *Store
	dir     string
	knows   block.Level   // records of a higher one are refused
	level   atomic.Uint32 // of the cluster
	observe func([]cluster.Record) error
}

const (
	quorumDir      = "quorum"
	appliedKey     = "!quorum/applied" // no key of package cluster begins like this
	snapshotSuffix = ".snapshot"
)

// QuorumDir is where a replica in dir keeps the quorum's log.
func QuorumDir(dir string) string { return filepath.Join(dir, quorumDir) }

// OpenReplica opens the store in dir, which may have been without a quorum so far.
func OpenReplica(dir string, log *slog.Logger) (*Replica, error) {
	if err := Find(dir); err != nil {
		return nil, fmt.Errorf("open store %s: %w", dir, err)
	}
	s, err := openWith(options(dir, log).WithSyncWrites(false), dir)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(QuorumDir(dir), 0o700); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return &Replica{s: s, dir: dir, knows: block.KnownLevel, observe: func([]cluster.Record) error { return nil }}, nil
}

// Know makes the replica refuse records of a higher level than knows, and returns
// [cluster.ErrLevel] if it has some. What was refused is still in the log: a program that knows the
// level applies it.
func (r *Replica) Know(knows block.Level) error {
	r.knows = knows
	at := cluster.Record{Key: cluster.LevelKey}
	err := r.s.db.View(func(txn *badger.Txn) error {
		item, err := txn.Get([]byte(at.Key))
		if errors.Is(err, badger.ErrKeyNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		at.Value, err = item.ValueCopy(nil)
		return err
	})
	if err != nil {
		return fmt.Errorf("read %s: %w", at.Key, err)
	}
	return r.checkLevel(at)
}

// Level is the cluster's level, as far as this member knows.
func (r *Replica) Level() block.Level { return max(block.Level(r.level.Load()), block.FirstLevel) }

// checkLevel notes the level that records set, or refuses them.
func (r *Replica) checkLevel(records ...cluster.Record) error {
	at, err := cluster.CheckLevel(r.knows, records...)
	if err == nil && at > 0 {
		r.level.Store(uint32(at))
	}
	return err
}

// EncodeRecords returns records as an entry holds them: a version, then for each its key's
// length, its value's length and 1, or 0 for a record that is deleted, key and value.
func EncodeRecords(records []cluster.Record) []byte {
	b := []byte{entryVersion}
	for _, r := range records {
		length := uint64(0)
		if r.Value != nil {
			length = uint64(len(r.Value)) + 1
		}
		b = binary.AppendUvarint(binary.AppendUvarint(b, uint64(len(r.Key))), length)
		b = append(append(b, r.Key...), r.Value...)
	}
	return b
}

const entryVersion = 1

// DecodeRecords is the inverse of EncodeRecords.
func DecodeRecords(b []byte) (records []cluster.Record, err error) {
	if len(b) == 0 || b[0] != entryVersion {
		return nil, fmt.Errorf("entry of a version that this program does not know: %.1x", b)
	}
	for b = b[1:]; len(b) > 0; {
		key, n := binary.Uvarint(b)
		value, m := binary.Uvarint(b[max(n, 0):])
		if n <= 0 || m <= 0 || key > maxKey || value > maxValue || key+max(value, 1)-1 > uint64(len(b)-n-m) {
			return nil, fmt.Errorf("record %d of an entry is damaged", len(records)+1)
		}
		b = b[n+m:]
		r := cluster.Record{Key: string(b[:key])}
		if b = b[key:]; value > 0 {
			r.Value = slices.Clone(b[: value-1 : value-1])
			if b = b[value-1:]; r.Value == nil {
				r.Value = []byte{}
			}
		}
		records = append(records, r)
	}
	return records, nil
}

// Observe calls do with records once they are in the store, and with nil after all may have changed.
// Call it before the replica is used.
func (r *Replica) Observe(do func([]cluster.Record) error) { r.observe = do }

// LoadPrefix returns the records whose keys begin with a prefix, in key order.
func (r *Replica) LoadPrefix(prefix string) ([]cluster.Record, error) { return r.s.LoadPrefix(prefix) }

// Load returns all records, in key order.
func (r *Replica) Load() ([]cluster.Record, error) { return r.s.Load() }

// Backup writes a consistent copy of all records but the secret ones.
func (r *Replica) Backup(w io.Writer) error { return r.s.Backup(w) }

// Close makes all that was applied durable, and closes the store.
func (r *Replica) Close() error { return errors.Join(r.Sync(), r.s.Close()) }

// Applied returns the index of the last entry whose records are in the store.
func (r *Replica) Applied() (index uint64, err error) {
	err = r.s.db.View(func(txn *badger.Txn) error {
		item, err := txn.Get([]byte(appliedKey))
		if errors.Is(err, badger.ErrKeyNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		return item.Value(func(text []byte) error {
			index, err = strconv.ParseUint(string(text), 10, 64)
			return err
		})
	})
	if err != nil {
		return 0, fmt.Errorf("read %s: %w", appliedKey, err)
	}
	return index, nil
}

func appliedRecord(index uint64) cluster.Record {
	return cluster.Record{Key: appliedKey, Value: strconv.AppendUint(nil, index, 10)}
}

// Apply sets the records of entries and the index of the last one, in one transaction. What is
// too large for one takes several: after a crash the log applies them again.
func (r *Replica) Apply(entries []quorum.Entry, at quorum.Position) error {
	var all []cluster.Record
	for _, e := range entries {
		records, err := DecodeRecords(e.Data)
		if err != nil {
			return fmt.Errorf("entry %d: %w", e.Index, err)
		}
		if err := r.checkLevel(records...); err != nil {
			return fmt.Errorf("entry %d: %w", e.Index, err)
		}
		all = append(all, records...)
	}
	if err := r.set(append(all, appliedRecord(at.Index))); err != nil {
		return fmt.Errorf("apply entries up to %d: %w", at.Index, err)
	}
	if len(all) == 0 {
		return nil
	}
	return r.observe(all)
}

// set sets records, in one transaction if they fit into it. Readers see all or none.
func (r *Replica) set(records []cluster.Record) error {
	err := r.s.apply(records)
	if !errors.Is(err, badger.ErrTxnTooBig) {
		return err
	}
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	for len(records) > 0 {
		n := partLength(records)
		if err := r.s.apply(records[:n]); err != nil {
			return err
		}
		records = records[n:]
	}
	return nil
}

// Sync makes all that was applied durable. Badger's own Sync leaves out what it is just moving
// from memory to a table; the files that hold it are synced here.
func (r *Replica) Sync() error {
	files, err := os.ReadDir(r.dir)
	if err != nil {
		return err
	}
	for _, file := range files {
		if err := syncFile(filepath.Join(r.dir, file.Name())); err != nil && !errors.Is(err, os.ErrNotExist) { // Badger has removed it, and synced its successor before
			return fmt.Errorf("sync the store: %w", err)
		}
	}
	return durable.SyncDir(r.dir)
}

func syncFile(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// Content returns a backup as of the call, for another member: with the secret records.
func (r *Replica) Content() (io.ReadCloser, error) {
	txn := r.s.reading()
	read, write := io.Pipe()
	go func() {
		defer txn.Discard()
		write.CloseWithError(backup(txn, write, func(cluster.Record) bool { return false })) // ends at the latest when the reader is closed
	}()
	return read, nil
}

// Stage makes a backup durable, in place of an earlier one.
func (r *Replica) Stage(content io.Reader, index uint64) error {
	if err := r.removeStaged(); err != nil {
		return err
	}
	err := durable.Fill(r.stagedPath(index), 0o600, func(w io.Writer) error {
		_, err := ReadBackup(io.TeeReader(content, w)) // refuses one that is damaged
		return err
	})
	if err != nil {
		return fmt.Errorf("stage the snapshot of entry %d: %w", index, err)
	}
	return nil
}

func (r *Replica) stagedPath(index uint64) string {
	return filepath.Join(QuorumDir(r.dir), fmt.Sprintf("%016d%s", index, snapshotSuffix))
}

// Staged returns the index of the staged backup; 0 if there is none.
func (r *Replica) Staged() (index uint64, err error) {
	err = r.eachStaged(func(name string) error {
		index, err = strconv.ParseUint(strings.TrimSuffix(name, snapshotSuffix), 10, 64)
		return err
	})
	return index, err
}

func (r *Replica) removeStaged() error {
	return r.eachStaged(func(name string) error { return os.Remove(filepath.Join(QuorumDir(r.dir), name)) })
}

// eachStaged calls do for each staged backup, and removes what a cut Stage has left.
func (r *Replica) eachStaged(do func(name string) error) error {
	files, err := os.ReadDir(QuorumDir(r.dir))
	if err != nil {
		return err
	}
	for _, file := range files {
		name := file.Name()
		switch {
		case !strings.Contains(name, snapshotSuffix):
		case strings.HasPrefix(name, "."): // unfinished: see package durable
			if err := os.Remove(filepath.Join(QuorumDir(r.dir), name)); err != nil {
				return err
			}
		default:
			if err := do(name); err != nil {
				return err
			}
		}
	}
	return nil
}

// Adopt makes the staged backup the state. The index is set last, after all else is durable:
// until then, Adopt is repeated after a crash.
func (r *Replica) Adopt(at quorum.Position) error {
	file, err := os.Open(r.stagedPath(at.Index))
	if err != nil {
		return fmt.Errorf("adopt the snapshot of entry %d: %w", at.Index, err)
	}
	defer file.Close()
	records, err := ReadBackup(file)
	if err != nil {
		return fmt.Errorf("adopt the snapshot of entry %d: %w", at.Index, err)
	}
	if err := r.checkLevel(records...); err != nil {
		return fmt.Errorf("adopt the snapshot of entry %d: %w", at.Index, err)
	}
	have, err := r.s.Load()
	if err != nil {
		return err
	}
	keep := make(map[string]bool, len(records))
	for _, record := range records {
		keep[record.Key] = true
	}
	for _, old := range have {
		if !keep[old.Key] {
			records = append(records, cluster.Record{Key: old.Key})
		}
	}
	if err := errors.Join(r.set(records), r.Sync()); err != nil {
		return fmt.Errorf("adopt the snapshot of entry %d: %w", at.Index, err)
	}
	return errors.Join(r.set([]cluster.Record{appliedRecord(at.Index)}), r.Sync(), r.removeStaged(), r.observe(nil))
}

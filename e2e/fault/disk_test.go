// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"weft.dev/weft/volmgr/quorum"
	"weft.dev/weft/volmgr/quorum/member"
	"weft.dev/weft/volmgr/quorum/wal"
	"weft.dev/weft/volmgr/quorum/wal/waltest"
	"weft.dev/weft/volmgr/replicated"
	"weft.dev/weft/volmgr/store"
)

// errKilled is the answer to a process that was killed: what it does has no effect any more.
var errKilled = errors.New("killed")

// compactAt is the size from which on a log is compacted: small, so that members that were away
// need a snapshot.
const compactAt = 64 << 10

// medium is the disk of a manager in a quorum, for one run of it. It can be slow, and its power
// can go in the middle of any write. Then the log's disk forgets what was not synced, wholly or in
// part; and of the store, each page of what Badger has not synced may be as it was at the last
// sync.
type medium struct {
	run *managing
	dir string // of the store

	mu     sync.Mutex
	random *rand.Rand
	disk   *waltest.Disk               // what the log's disk holds
	synced map[string]map[int64][]byte // the pages of the store's logs at its last sync
	ended  error                       // the answer to all, once the process or the power is gone
	cutIn  int                         // the power goes in the so-manyth write from now on; 0: in none
	takes  time.Duration               // the most that a sync takes
	loses  float64                     // the part of the messages that is lost
}

// newMedium loads the disk as it is before a run: all of it is durable.
func newMedium(run *managing, dir string, random *rand.Rand) (*medium, error) {
	m := &medium{run: run, dir: dir, random: random, disk: waltest.New()}
	logs := wal.InDirectory(store.QuorumDir(dir))
	names, err := logs.List()
	for _, name := range names {
		if strings.HasSuffix(name, ".snapshot") {
			continue
		}
		data, failed := logs.Read(name)
		err = errors.Join(err, failed)
		m.disk.Put(name, data)
	}
	if err == nil {
		m.synced, err = m.pages()
	}
	return m, err
}

// over is what a manager is told of it.
func (m *medium) over() replicated.Medium {
	return replicated.Medium{
		Log:       func(d wal.Directory) wal.Directory { return logDirectory{m, d} },
		Store:     func(s member.Store) member.Store { return recordStore{s, m} },
		Send:      m.sends,
		CompactAt: compactAt,
	}
}

// sends reports whether a message is sent. A frozen manager stops here, since all that it does
// sends something or writes something.
func (m *medium) sends(o member.Outgoing) bool {
	m.run.at.awake()
	m.mu.Lock()
	defer m.mu.Unlock()
	return o.Content != nil || m.loses == 0 || m.random.Float64() >= m.loses
}

// die makes the disk do nothing more.
func (m *medium) die(why error) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ended == nil {
		m.ended = why
	}
}

func (m *medium) dead() bool {
	if m == nil {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.ended != nil
}

// set changes how the disk behaves.
func (m *medium) set(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f()
}

// write does something that changes the disk. If the power goes in it, torn says what is done of
// it.
func (m *medium) write(do, torn func() error) error {
	m.run.at.awake()
	m.mu.Lock()
	if m.ended != nil {
		defer m.mu.Unlock()
		return m.ended
	}
	if m.cutIn--; m.cutIn != 0 {
		m.cutIn = max(m.cutIn, 0)
		defer m.mu.Unlock()
		return do()
	}
	err := errors.Join(errNoPower, torn())
	m.mu.Unlock()
	m.run.host.cluster.did("%s loses its power in a write", m.run.host.name)
	m.run.powerOff()
	return err
}

// wait is how long a sync takes.
func (m *medium) wait() {
	m.mu.Lock()
	takes := m.takes
	if takes > 0 {
		takes = time.Duration(m.random.Int64N(int64(takes)))
	}
	m.mu.Unlock()
	if takes > 0 {
		select {
		case <-time.After(takes):
		case <-m.run.off:
		}
	}
}

// half does something or not.
func (m *medium) half(do func() error) func() error {
	return func() error {
		if m.random.IntN(2) == 0 {
			return nil
		}
		return do()
	}
}

// ---- the log ----

// logDirectory writes to the directory, which a process finds again, and to the disk, which a
// power cut leaves.
type logDirectory struct {
	*medium
	wal.Directory
}

// both changes the disk and then the directory.
func (d logDirectory) both(disk, directory func() error) error {
	return d.write(func() error { return errors.Join(disk(), directory()) }, func() error {
		d.disk.CutAt = d.disk.Ops() + 1
		if err := disk(); !errors.Is(err, waltest.ErrCut) {
			return err
		}
		return nil
	})
}

func (d logDirectory) Create(name string) (wal.File, error) {
	d.run.host.cluster.count("log rewritten")
	f := &walFile{medium: d.medium}
	err := d.both(func() (err error) {
		f.disk, err = d.disk.Create(name)
		return err
	}, func() (err error) {
		f.File, err = d.Directory.Create(name)
		return err
	})
	if err != nil {
		return nil, err
	}
	return f, nil
}

func (d logDirectory) Rename(from, to string) error {
	return d.both(func() error { return d.disk.Rename(from, to) }, func() error { return d.Directory.Rename(from, to) })
}

func (d logDirectory) Remove(name string) error {
	if strings.HasSuffix(name, ".snapshot") {
		return d.Directory.Remove(name)
	}
	return d.both(func() error { return d.disk.Remove(name) }, func() error { return d.Directory.Remove(name) })
}

func (d logDirectory) Sync() error {
	d.wait()
	return d.both(d.disk.Sync, func() error { return nil })
}

type walFile struct {
	wal.File
	medium *medium
	disk   wal.File
}

func (f *walFile) both(disk, file func() error) error {
	return logDirectory{medium: f.medium}.both(disk, file)
}

func (f *walFile) Write(p []byte) (n int, err error) {
	err = f.both(func() error {
		_, err := f.disk.Write(p)
		return err
	}, func() error {
		n, err = f.File.Write(p)
		return err
	})
	return n, err
}

func (f *walFile) Sync() error {
	f.medium.wait()
	return f.both(f.disk.Sync, func() error { return nil })
}

// ---- the store ----

// recordStore is a store whose writes the power can go in.
type recordStore struct {
	member.Store
	medium *medium
}

func (s recordStore) Apply(entries []quorum.Entry, at quorum.Position) error {
	apply := func() error { return s.Store.Apply(entries, at) }
	return s.medium.write(apply, s.medium.half(apply))
}

// Sync and Adopt make durable what the store has.
func (s recordStore) Sync() error {
	s.medium.wait()
	sync := s.keep(s.Store.Sync)
	return s.medium.write(sync, s.medium.half(sync))
}

func (s recordStore) Adopt(at quorum.Position) error {
	s.medium.wait()
	adopt := s.keep(func() error { return s.Store.Adopt(at) })
	return s.medium.write(adopt, s.medium.half(adopt))
}

func (s recordStore) keep(do func() error) func() error {
	return func() (err error) {
		if err = do(); err == nil {
			s.medium.synced, err = s.medium.pages()
		}
		return err
	}
}

func (s recordStore) Stage(content io.Reader, index uint64) error {
	s.medium.wait()
	s.medium.run.host.cluster.count("snapshot received")
	stage := func() error { return s.Store.Stage(content, index) }
	return s.medium.write(stage, s.medium.half(stage))
}

// pages returns the pages of the store's logs that are not empty.
func (m *medium) pages() (map[string]map[int64][]byte, error) {
	all := map[string]map[int64][]byte{}
	paths, err := filepath.Glob(filepath.Join(m.dir, "*.mem"))
	for _, path := range paths {
		file, failed := os.Open(path)
		if failed != nil {
			err = errors.Join(err, failed)
			continue
		}
		pages := map[int64][]byte{}
		err = errors.Join(err, eachPage(file, func(at int64, page []byte) error {
			pages[at] = append([]byte(nil), page...)
			return nil
		}), file.Close())
		all[filepath.Base(path)] = pages
	}
	return all, err
}

// unsynced is what of a page of the store's logs is not there after a power cut: all of it, or what
// was written since the last sync, which it puts in place.
func (m *medium) unsynced(file *os.File, at int64, page []byte) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.random.IntN(2) == 0 {
		return false
	}
	return copy(page, m.synced[filepath.Base(file.Name())][at]) == 0
}

// leave writes what the power cut leaves of the log beside a copy of the store.
func (m *medium) leave(to string) error {
	if m == nil {
		return nil
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	from, to := store.QuorumDir(m.dir), store.QuorumDir(to)
	if err := os.MkdirAll(to, 0o700); err != nil {
		return err
	}
	after := m.disk.AfterCut(m.random)
	names, err := after.List()
	for _, name := range names {
		data, failed := after.Read(name)
		err = errors.Join(err, failed, os.WriteFile(filepath.Join(to, name), data, 0o600))
	}
	staged, failed := filepath.Glob(filepath.Join(from, "*.snapshot"))
	err = errors.Join(err, failed)
	for _, path := range staged { // durable since it has its name
		err = errors.Join(err, os.Link(path, filepath.Join(to, filepath.Base(path))))
	}
	return err
}

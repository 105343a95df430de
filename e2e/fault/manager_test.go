// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"weft.dev/weft/volmgr"
	kept "weft.dev/weft/volmgr/cluster"
)

const managerAddress = "m1:4480"

// managing is one run of the manager, with control over its commits.
type managing struct {
	*process

	committing sync.Mutex // held while the store commits

	mu    sync.Mutex
	takes time.Duration // the most that a commit takes
	trap  trap
	off   chan struct{} // closed when the power goes
	lost  bool          // off is closed
}

// trap is what happens in the next commit.
type trap int

const (
	trapNone   trap = iota
	trapBefore      // the power goes before it is durable
	trapAfter       // or after, but before anybody has been told
)

func (c *cluster) managerConfig() volmgr.Config {
	return volmgr.Config{Dir: c.store, Version: "fault", Log: c.log.With("node", "m1")}
}

// initStore creates a new cluster in the manager's store directory.
func (c *cluster) initStore() {
	c.t.Helper()
	if _, err := volmgr.Init(c.managerConfig()); err != nil {
		c.t.Fatalf("%v", err)
	}
}

func (c *cluster) startManager() {
	c.t.Helper()
	m := &managing{off: make(chan struct{})}
	at := c.network.boot("m1")
	config := c.managerConfig()
	config.Now = func() time.Time {
		at.awake()
		return stepped(time.Now(), time.Duration(c.clock.Load()))
	}
	config.Commit = func(records []kept.Record, commit func([]kept.Record) error) error {
		return c.commit(m, records, commit)
	}
	manager, err := volmgr.New(config)
	if err != nil {
		c.t.Fatalf("%v", err)
	}
	listener, err := at.listen(managerAddress)
	if err != nil {
		c.t.Fatalf("%v", err)
	}
	server := grpc.NewServer(
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: time.Second, Timeout: userTimeout}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
	)
	manager.Register(server)
	c.manager = m
	m.process = run(at, func(ctx context.Context) {
		served := make(chan error, 1)
		go func() { served <- server.Serve(listener) }()
		err := manager.Run(ctx)
		server.Stop()
		<-served
		if errors.Is(err, errNoPower) {
			err = nil
		}
		if err = errors.Join(err, manager.Close()); err != nil {
			c.t.Errorf("manager: %v", err)
		}
	})
}

// stepped is a time as read after the clock was set: the difference between two of them must
// not change. Times in a bubble have no monotonic reading, so stepped makes one as package
// time stores it: the first word holds a flag bit, 33 bits of seconds since 1885 and 30 bits
// of nanoseconds; the second holds the reading.
func stepped(t time.Time, by time.Duration) time.Time {
	wall := t.Add(by).Sub(time.Date(1885, 1, 1, 0, 0, 0, 0, time.UTC))
	words := (*[2]uint64)(unsafe.Pointer(&t))
	reading := uint64(t.Sub(time.Date(1999, 1, 1, 0, 0, 0, 0, time.UTC)))
	words[0] = 1<<63 | uint64(wall/time.Second)<<30 | uint64(wall%time.Second)
	words[1] = reading
	return t
}

// commit stands between the manager and its store, with delays and the loss of power. A commit
// that was under way when the power went is later there as a whole or not at all.
func (c *cluster) commit(m *managing, records []kept.Record, commit func([]kept.Record) error) error {
	m.mu.Lock()
	trap, takes := m.trap, m.takes
	m.trap = trapNone
	m.mu.Unlock()
	switch trap {
	case trapBefore: // so that a premature answer can get out
		time.Sleep(20 * time.Millisecond)
		m.powerOff()
		return errNoPower
	case trapAfter:
		err := m.store(records, commit)
		m.powerOff()
		return errors.Join(err, errNoPower)
	}
	if takes > 0 {
		c.historyMutex.Lock()
		d, lands := time.Duration(c.random.Int64N(int64(takes))), c.random.IntN(2) == 0
		c.historyMutex.Unlock()
		select {
		case <-time.After(d):
		case <-m.off:
			if !lands {
				return errNoPower
			}
		}
	}
	err := m.store(records, commit)
	if m.isOff() {
		err = errors.Join(err, errNoPower)
	}
	return err
}

func (m *managing) store(records []kept.Record, commit func([]kept.Record) error) error {
	m.committing.Lock()
	defer m.committing.Unlock()
	return commit(records)
}

func (m *managing) isOff() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.lost
}

// powerOff cuts the power of the manager's machine.
func (m *managing) powerOff() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.lost {
		m.lost = true
		close(m.off)
		m.at.powerOff()
	}
}

// set changes what happens to commits.
func (m *managing) set(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f()
}

// killManager ends the manager's process: a commit that is under way completes.
func (c *cluster) killManager() {
	if c.manager == nil {
		return
	}
	c.manager.at.kill()
	c.manager.end() // it has locked its store
	c.manager = nil
}

// cutManager cuts the power of the manager's machine, and leaves of its store only what was on
// the disk.
func (c *cluster) cutManager() {
	c.t.Helper()
	if c.manager == nil {
		return
	}
	c.manager.powerOff()
	left := c.store + ".left"
	c.manager.committing.Lock()
	err := afterPowerLoss(c.store, left)
	c.manager.committing.Unlock()
	c.manager.end()
	if err = errors.Join(err, os.RemoveAll(c.store), os.Rename(left, c.store)); err != nil {
		c.t.Fatalf("%v", err)
	}
	c.manager = nil
}

// afterPowerLoss copies a store as a loss of power would leave it. Its logs are written once
// from start to end; they lose the pages that the kernel has not written to the disk. Without
// a disk, as on tmpfs, all pages are there. Of other files a page may have been written twice,
// and it is unknown which version the disk has.
func afterPowerLoss(from, to string) error {
	for {
		before, err := inventory(from)
		if err != nil {
			return err
		}
		if err := errors.Join(os.RemoveAll(to), os.Mkdir(to, 0o700)); err != nil {
			return err
		}
		var failed error
		for name := range before {
			if err := leave(filepath.Join(from, name), filepath.Join(to, name)); err != nil {
				failed = fmt.Errorf("copy %s: %w", name, err)
				break
			}
		}
		// The store may clean up at any time, also while a file is read: the copy must show a single
		// moment.
		if after, err := inventory(from); err != nil || maps.Equal(before, after) {
			return errors.Join(failed, err)
		}
	}
}

// inventory returns the time of the last write to each file of a store.
func inventory(dir string) (map[string]time.Time, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	all := map[string]time.Time{}
	for _, e := range entries {
		info, err := e.Info()
		if errors.Is(err, os.ErrNotExist) || e.Name() == "LOCK" {
			continue
		}
		if err != nil {
			return nil, err
		}
		all[e.Name()] = info.ModTime()
	}
	return all, nil
}

func leave(from, to string) error {
	in, err := os.Open(from)
	if errors.Is(err, os.ErrNotExist) { // the store has removed it meanwhile
		return nil
	}
	if err != nil {
		return err
	}
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	out, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer out.Close()
	if err := out.Truncate(info.Size()); err != nil {
		return err
	}
	p := &platter{file: in}
	page := make([]byte, os.Getpagesize())
	for _, s := range p.data(0, info.Size()) {
		for at := s[0]; at < s[0]+s[1]; at += int64(len(page)) {
			n, err := in.ReadAt(page, at)
			if n == 0 {
				return err
			}
			if filepath.Ext(from) == ".mem" && unwritten(in, at, int64(n)) {
				continue
			}
			if _, err := out.WriteAt(page[:n], at); err != nil {
				return err
			}
		}
	}
	return nil
}

// unwritten reports whether a range of a file is in the page cache but not on the disk.
// Kernels before 6.5 cannot tell.
func unwritten(file *os.File, off, n int64) bool {
	span := [2]uint64{uint64(off), uint64(n)}
	var stat struct{ cached, dirty, writeback, evicted, recently uint64 }
	_, _, errno := unix.Syscall6(unix.SYS_CACHESTAT, file.Fd(), uintptr(unsafe.Pointer(&span)), uintptr(unsafe.Pointer(&stat)), 0, 0, 0)
	return errno == 0 && stat.dirty+stat.writeback > 0
}

// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/keepalive"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr"
	kept "weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/quorum"
	"weft.dev/weft/volmgr/replicated"
)

// managerHost is a machine with a manager.
type managerHost struct {
	host
	store   string // its directory
	running *managing
	member  quorum.ID // what it is in the quorum; 0: there is no quorum, or it is no member yet

	replaced bool // it is about to become a new member

	level block.Level // the newest that it knows; 0: that of this program
}

// managing is one run of the manager, with control over its commits and, in a quorum, its disk.
type managing struct {
	host    *managerHost
	at      *machine
	manager *volmgr.Manager
	medium  *medium // nil: there is no quorum

	mu    sync.Mutex
	takes time.Duration // the most that a commit takes
	sure  bool          // it takes itself for the leader, and what it decides for durable, without asking the others
	heard bool          // since then, an agent has told it that it follows a later one
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

// newManagers makes the machines of managers, the first of which gets the store of a new cluster.
func (c *cluster) newManagers() {
	for i := range max(1, c.members) {
		name := fmt.Sprintf("m%d", i+1)
		c.managers = append(c.managers, &managerHost{host: host{cluster: c, name: name}, store: filepath.Join(c.stores, name)})
	}
	c.addresses = ""
	for _, h := range c.managers {
		c.addresses += "," + h.address()
	}
	c.addresses = c.addresses[1:]
}

func (h *managerHost) address() string { return h.name + ":4480" }

func (h *managerHost) config() volmgr.Config {
	return volmgr.Config{Dir: h.store, Version: "fault", Level: h.level, HealAfter: h.cluster.healAfter, Log: h.cluster.log.With("node", h.name)}
}

// initStore creates a new cluster in the first manager's store directory.
func (c *cluster) initStore() {
	c.t.Helper()
	id, err := volmgr.Init(c.managers[0].config())
	if err != nil {
		c.t.Fatalf("%v", err)
	}
	c.id = id
	for i, level := range c.levels {
		c.managers[i].level = level
	}
	if c.levels != nil {
		c.withoutLevel(c.managers[0])
	}
}

// startManager starts all managers. Those without a store join the others.
func (c *cluster) startManager() {
	c.t.Helper()
	for _, h := range c.managers {
		if h.running == nil && (h == c.managers[0] || volmgr.FindStore(h.store) == nil) {
			h.start()
		}
	}
	for _, h := range c.managers {
		if h.running == nil {
			c.join(h)
		}
	}
	c.agreed()
}

func (h *managerHost) start() {
	c := h.cluster
	c.t.Helper()
	h.buried()
	m := &managing{host: h, off: make(chan struct{}), at: c.network.boot(h.name)}
	config := h.config()
	config.Now = func() time.Time {
		m.at.awake()
		return stepped(time.Now(), time.Duration(c.clock.Load()))
	}
	config.Commit = func(records []kept.Record, commit func([]kept.Record) error) error {
		return c.commit(m, records, commit)
	}
	config.Confirm = m.confirm
	if c.quorum {
		config.Quorum = h.quorum(m)
	}
	var err error
	if m.manager, err = volmgr.New(config); err != nil {
		c.t.Fatalf("%s: %v", h.name, err)
	}
	if c.quorum {
		h.member = m.manager.Member().Status().ID
	}
	h.running, h.process = m, run(m.at, m.serve(c.listenManager(m.at, h.address())))
}

func (c *cluster) listenManager(at *machine, address string) net.Listener {
	c.t.Helper()
	listener, err := at.listen(address)
	if err != nil {
		c.t.Fatalf("%v", err)
	}
	return listener
}

// serve returns what the process of the manager does.
func (m *managing) serve(listener net.Listener) func(context.Context) {
	server := grpc.NewServer(
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: time.Second, Timeout: userTimeout}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 5 * time.Second, PermitWithoutStream: true}),
	)
	m.manager.Register(server)
	return func(ctx context.Context) {
		served := make(chan error, 1)
		go func() { served <- server.Serve(listener) }()
		err := m.manager.Run(ctx)
		server.Stop()
		<-served
		if m.medium.dead() || errors.Is(err, errNoPower) || errors.Is(err, replicated.ErrRemoved) {
			err = nil
		}
		left := m.host.store + ".left"
		if m.isOff() {
			err = errors.Join(err, m.afterPowerLoss(left))
		}
		err = errors.Join(err, m.manager.Close())
		if m.isOff() {
			err = errors.Join(err, os.RemoveAll(m.host.store), os.Rename(left, m.host.store))
		}
		if err != nil {
			m.host.cluster.t.Errorf("manager %s: %v", m.host.name, err)
		}
	}
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
	trap, takes, sure := m.trap, m.takes, m.sure
	m.trap = trapNone
	m.mu.Unlock()
	if sure {
		m.set(func() { m.heard = m.heard || tellsOfALaterTerm(records) })
		return nil
	}
	switch trap {
	case trapBefore: // so that a premature answer can get out
		time.Sleep(20 * time.Millisecond)
		m.powerOff()
		return errNoPower
	case trapAfter:
		err := commit(records)
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
	err := commit(records)
	if err == nil && c.quorum {
		c.hasApplied(m.manager.Member().Status().Applied.Index)
	}
	if m.isOff() {
		err = errors.Join(err, errNoPower)
	}
	return err
}

// hasApplied notes that an entry is committed, before anybody is told.
func (c *cluster) hasApplied(index uint64) {
	for {
		if was := c.applied.Load(); was >= index || c.applied.CompareAndSwap(was, index) {
			return
		}
	}
}

// tellsOfALaterTerm reports whether records hold the event that an agent follows a later manager.
func tellsOfALaterTerm(records []kept.Record) bool {
	return slices.ContainsFunc(records, func(r kept.Record) bool {
		return strings.HasPrefix(r.Key, "e/") && bytes.Contains(r.Value, []byte(event.ManagerReplaced))
	})
}

// confirm stands between the manager and the others when it asks them whether it still leads.
func (m *managing) confirm(confirm func() error) error {
	m.mu.Lock()
	sure := m.sure
	m.mu.Unlock()
	if sure {
		return nil
	}
	return confirm()
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
		m.medium.die(errNoPower)
		m.at.powerOff()
	}
}

// set changes what happens to commits.
func (m *managing) set(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	f()
}

// kill ends the manager's process: a commit that is under way completes, or what has reached the
// log of a quorum stays there.
func (h *managerHost) kill() {
	if h.running == nil {
		return
	}
	h.running.medium.die(errKilled)
	h.host.kill()
	h.running = nil
}

// leave stops the manager in order: it hands leadership over while it is still there.
func (h *managerHost) leave() {
	h.process.at.thaw()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	if err := h.running.manager.HandOver(ctx); err != nil {
		h.cluster.did("%s hands over: %v", h.name, err)
	}
	h.host.leave()
	h.running = nil
}

// cut cuts the power of the manager's machine, and leaves of its store only what was on the disk.
func (h *managerHost) cut() {
	if h.running == nil {
		return
	}
	h.running.powerOff()
	h.process.stop()
	h.old, h.process, h.running = h.process, nil, nil
}

// killManager ends the processes of all managers.
func (c *cluster) killManager() { c.endManagers((*managerHost).kill) }

// cutManager cuts the power of all managers.
func (c *cluster) cutManager() { c.endManagers((*managerHost).cut) }

func (c *cluster) endManagers(end func(*managerHost)) {
	for _, h := range c.managers {
		end(h)
	}
	for _, h := range c.managers {
		h.buried() // it has locked its store
	}
}

// afterPowerLoss copies a store as a loss of power would leave it. Its logs are written once
// from start to end; they lose the pages that the kernel has not written to the disk. Without
// a disk, as on tmpfs, all pages are there. Of other files a page may have been written twice,
// and it is unknown which version the disk has. In a quorum nothing of its logs is synced but
// what the medium says.
func (m *managing) afterPowerLoss(to string) error {
	from, lose := m.host.store, unwritten
	if m.medium != nil {
		lose = m.medium.unsynced
	}
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
			if err := leave(filepath.Join(from, name), filepath.Join(to, name), lose); err != nil {
				failed = fmt.Errorf("copy %s: %w", name, err)
				break
			}
		}
		// The store may clean up at any time, also while a file is read: the copy must show a single
		// moment.
		if after, err := inventory(from); err != nil || maps.Equal(before, after) {
			return errors.Join(failed, err, m.medium.leave(to))
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
		if errors.Is(err, os.ErrNotExist) || e.Name() == "LOCK" || e.IsDir() {
			continue
		}
		if err != nil {
			return nil, err
		}
		all[e.Name()] = info.ModTime()
	}
	return all, nil
}

// leave copies a file. Of a page that is not durable it writes what lose leaves.
func leave(from, to string, lose func(file *os.File, at int64, page []byte) bool) error {
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
	return eachPage(in, func(at int64, page []byte) error {
		if filepath.Ext(from) == ".mem" && lose(in, at, page) {
			return nil
		}
		_, err := out.WriteAt(page, at)
		return err
	})
}

// eachPage reads the pages of a file that are no holes.
func eachPage(file *os.File, do func(at int64, page []byte) error) error {
	info, err := file.Stat()
	if err != nil {
		return err
	}
	p := &platter{file: file}
	page := make([]byte, os.Getpagesize())
	for _, s := range p.data(0, info.Size()) {
		for at := s[0]; at < s[0]+s[1]; at += int64(len(page)) {
			n, err := file.ReadAt(page, at)
			if n == 0 && errors.Is(err, io.EOF) { // Badger has cut it off meanwhile, to remove it
				return nil
			}
			if n == 0 {
				return err
			}
			if err := do(at, page[:n]); err != nil {
				return err
			}
		}
	}
	return nil
}

// unwritten reports whether a page of a file is in the page cache but not on the disk. Kernels
// before 6.5 cannot tell.
func unwritten(file *os.File, off int64, page []byte) bool {
	span := [2]uint64{uint64(off), uint64(len(page))}
	var stat struct{ cached, dirty, writeback, evicted, recently uint64 }
	_, _, errno := unix.Syscall6(unix.SYS_CACHESTAT, file.Fd(), uintptr(unsafe.Pointer(&span)), uintptr(unsafe.Pointer(&stat)), 0, 0, 0)
	return errno == 0 && stat.dirty+stat.writeback > 0
}

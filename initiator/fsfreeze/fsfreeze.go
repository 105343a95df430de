// SPDX-License-Identifier: Apache-2.0

// Package fsfreeze freezes the file systems that are mounted from a volume's device, for the short time
// in which a snapshot is taken. kernel_linux.go is the one file that touches the machine.
//
// A frozen file system makes its writers wait, so a freeze always has an end:
//
//   - a timer of its own thaws it at its limit, whatever the caller does meanwhile;
//   - a file in the agent's run directory, which is on a tmpfs, says what is frozen. It is written before
//     the freeze, and the next process of the agent thaws what it names ([Freezer.Recover]);
//   - a file system that the agent itself needs to write to is refused.
package fsfreeze

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"weft.dev/weft/proto/block"
)

// State is how far the freeze for a hold has come.
type State string

// The states.
//
//	syncing ──► synced ──► freezing ──► frozen ──► thawing ──► thawed
//	                                                  └──► failed
const (
	Syncing  State = "syncing"  // what the file systems have in memory is being written
	Synced   State = "synced"   // it is written
	Freezing State = "freezing" // writers begin to wait
	Frozen   State = "frozen"   // no file system has a write under way, and none begins
	Thawing  State = "thawing"  // it has ended; writers go on as soon as the kernel lets them
	Thawed   State = "thawed"   // writers have gone on
	Failed   State = "failed"   // nothing is frozen: see the error
)

// Mount is a mounted file system that can be reached.
type Mount struct {
	ID     int // as statx has it, unique on the machine
	Device block.DeviceNumber
	FSType string
	Point  string // for people
	Path   string // where this process reaches it
	Disk   string // where this process reaches the file that it was mounted from; empty: it is no file
}

// Kernel is what this package uses of its machine. A call may take as long as a device does.
type Kernel interface {
	// Mounts are those of all mount namespaces that /proc shows, the process's own first.
	Mounts() ([]Mount, error)
	// Over are a block device, its partitions, and the devices that are stacked over any of them.
	// fs.ErrNotExist: there is no such device.
	Over(device block.DeviceNumber) ([]block.DeviceNumber, error)
	// BlockDevice is the number of the block device at a path; false if there is none.
	BlockDevice(path string) (block.DeviceNumber, bool)
	// Open opens the file system of a mount. It fails if another one hides it.
	Open(m Mount) (FileSystem, error)
	// Holds reports whether a path is on a file system.
	Holds(fs FileSystem, path string) (bool, error)
}

// FileSystem is a file system that is held open, and so stays mounted.
type FileSystem interface {
	Sync() error
	// Freeze returns when no write is under way, and none begins. ErrFrozen: it is frozen already.
	// ErrCannot: this kind of file system cannot be frozen.
	Freeze() error
	// Thaw lets writers go on. It succeeds if the file system is not frozen.
	Thaw() error
	Close() error
}

// The reasons why nothing is frozen.
var (
	ErrNone   = errors.New("no file system on it is mounted on this host")
	ErrFrozen = errors.New("it is frozen already, by another program")
	ErrCannot = errors.New("this kind of file system cannot be frozen")
	ErrNeeded = errors.New("the initiator agent keeps its own state there")
	ErrThaws  = errors.New("what an earlier process of the agent had frozen is still being thawed")
)

// retry is how often a thaw that failed is tried again.
const retry = time.Second

// Freezer freezes file systems for the agent of a machine. Its methods may be called at any time.
type Freezer struct {
	k    Kernel
	dir  string   // holds the files that say what is frozen
	keep []string // paths whose file systems are not frozen
	log  *slog.Logger

	mu      sync.Mutex
	notes   map[block.DeviceNumber]int  // how many freezes each note stands for
	recover map[block.DeviceNumber]bool // devices of which something may be frozen by an earlier process
}

// New makes a Freezer. runDir is the agent's run directory, and keep are the directories that the agent
// writes to.
func New(k Kernel, runDir string, keep []string, log *slog.Logger) *Freezer {
	return &Freezer{
		k: k, dir: filepath.Join(runDir, "frozen"), keep: append([]string{runDir, "/"}, keep...), log: log,
		notes: map[block.DeviceNumber]int{}, recover: map[block.DeviceNumber]bool{},
	}
}

// Freeze is the freeze of a volume's file systems for one hold. Its methods may be called at any time,
// and do not wait.
type Freeze struct {
	f       *Freezer
	device  block.DeviceNumber
	changed func()

	mu    sync.Mutex
	state State
	err   error
	open  []held
	froze int  // so many of them, from the first, are frozen
	over  bool // it is to end
	timer *time.Timer
}

// held is a file system of a freeze.
type held struct {
	FileSystem
	mount Mount
}

// Begin begins to write out what the file systems of a device have in memory, so that the freeze itself
// takes little time. changed is called when the state has changed.
func (f *Freezer) Begin(device block.DeviceNumber, changed func()) *Freeze {
	z := &Freeze{f: f, device: device, changed: changed, state: Syncing}
	go func() {
		open, err := f.open(device)
		for i := range open {
			if err == nil {
				if err = open[i].Sync(); err != nil {
					err = fmt.Errorf("write out the file system on %s: %w", open[i].mount.Point, err)
				}
			}
		}
		z.mu.Lock()
		z.open = open
		if z.state = Synced; err != nil || z.over {
			z.endLocked(err)
		}
		z.mu.Unlock()
		changed()
	}()
	return z
}

// State is how far the freeze has come. The error is that of Failed.
func (z *Freeze) State() (State, error) {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.state, z.err
}

// Freeze begins to freeze the file systems, which are thawed after the limit at the latest. It does
// nothing unless they are Synced.
func (z *Freeze) Freeze(limit time.Duration) {
	z.mu.Lock()
	defer z.mu.Unlock()
	if z.state != Synced {
		return
	}
	z.state = Freezing
	z.timer = time.AfterFunc(limit, z.End)
	go z.freeze(slices.Clone(z.open))
}

func (z *Freeze) freeze(all []held) {
	err := z.f.note(z.device)
	for _, fs := range all {
		if err != nil || z.ends() {
			break
		}
		if err = fs.Freeze(); err != nil {
			err = fmt.Errorf("freeze the file system on %s (%s): %w", fs.mount.Point, fs.mount.FSType, err)
			break
		}
		z.mu.Lock()
		z.froze++
		z.mu.Unlock()
	}
	z.mu.Lock()
	if z.state = Frozen; err != nil || z.over {
		z.endLocked(err)
	}
	z.mu.Unlock()
	z.changed()
}

func (z *Freeze) ends() bool {
	z.mu.Lock()
	defer z.mu.Unlock()
	return z.over
}

// End thaws what is frozen, in the background. A freeze that is under way ends as soon as the kernel has
// completed it.
func (z *Freeze) End() {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.over = true
	if z.state == Synced || z.state == Frozen {
		z.endLocked(nil)
	}
}

// endLocked gives up the file systems.
func (z *Freeze) endLocked(err error) {
	if z.timer != nil {
		z.timer.Stop()
	}
	began, froze, open := z.timer != nil, z.froze, z.open
	z.state, z.open = Thawing, nil
	go func() {
		for i, fs := range open {
			if i < froze { // the others may be frozen by another program
				z.f.thaw(fs)
			}
			_ = fs.Close()
		}
		if began {
			z.f.clear(z.device)
		}
		z.mu.Lock()
		z.state, z.err = Thawed, nil
		if err != nil {
			z.state, z.err = Failed, err
		}
		z.mu.Unlock()
		z.changed()
	}()
}

// thaw returns when a file system is thawed.
func (f *Freezer) thaw(fs held) {
	for said := false; ; time.Sleep(retry) {
		err := fs.Thaw()
		if err == nil {
			return
		}
		if !said {
			f.log.Error("file system not thawed yet; trying again", "mounted_on", fs.mount.Point, "err", err)
		}
		said = true
	}
}

// open opens the file systems that are mounted from a device, each once.
func (f *Freezer) open(device block.DeviceNumber) (open []held, err error) {
	defer func() {
		if err != nil {
			for _, fs := range open {
				_ = fs.Close()
			}
			open = nil
		}
	}()
	f.mu.Lock()
	thaws := f.recover[device]
	f.mu.Unlock()
	if thaws {
		return nil, ErrThaws
	}
	mounts, err := f.mounts(device)
	if err != nil {
		return nil, err
	}
	var hidden error
	found := map[block.DeviceNumber]bool{}
	for _, m := range mounts {
		if found[m.Device] {
			continue
		}
		fs, err := f.k.Open(m)
		if err != nil {
			hidden = fmt.Errorf("open the file system on %s: %w", m.Point, err)
			continue // it may be mounted elsewhere, too
		}
		found[m.Device] = true
		open = append(open, held{fs, m})
		for _, path := range f.keep {
			if on, err := f.k.Holds(fs, path); err != nil {
				return open, fmt.Errorf("look where %s is: %w", path, err)
			} else if on {
				return open, fmt.Errorf("freeze the file system on %s, which has %s: %w", m.Point, path, ErrNeeded)
			}
		}
	}
	for _, m := range mounts {
		if !found[m.Device] {
			return open, hidden
		}
	}
	if len(open) == 0 {
		return nil, ErrNone
	}
	return open, nil
}

// mounts are the mounts from a device, its partitions, and what is stacked over it. Those of a file system
// with a number of its own, such as btrfs, are found by the file that they were mounted from.
func (f *Freezer) mounts(device block.DeviceNumber) (found []Mount, err error) {
	over, err := f.k.Over(device)
	if err != nil {
		return nil, fmt.Errorf("find the devices over %s: %w", device, err)
	}
	all, err := f.k.Mounts()
	if err != nil {
		return nil, fmt.Errorf("list the mounts: %w", err)
	}
	for _, m := range all {
		from := m.Device
		if m.Device.Major == 0 && m.Disk != "" {
			if disk, ok := f.k.BlockDevice(m.Disk); ok {
				from = disk
			}
		}
		if slices.Contains(over, from) {
			found = append(found, m)
		}
	}
	return found, nil
}

// ---- what the next process has to know ----

func (f *Freezer) file(device block.DeviceNumber) string {
	return filepath.Join(f.dir, strings.ReplaceAll(device.String(), ":", "-"))
}

// note says that the file systems of a device may be frozen. The directory is on a tmpfs, so that a boot,
// after which nothing is frozen, forgets it.
func (f *Freezer) note(device block.DeviceNumber) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.notes[device]++
	err := os.MkdirAll(f.dir, 0o700)
	if err == nil {
		err = os.WriteFile(f.file(device), nil, 0o600)
	}
	if err != nil {
		return fmt.Errorf("note what is frozen: %w", err)
	}
	return nil
}

// clear takes back one note.
func (f *Freezer) clear(device block.DeviceNumber) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.notes[device]--; f.notes[device] > 0 {
		return
	}
	delete(f.notes, device)
	if err := os.Remove(f.file(device)); err != nil && !errors.Is(err, os.ErrNotExist) {
		f.log.Warn("note of a frozen file system not removed", "err", err)
	}
}

// Recover thaws what an earlier process has left frozen, in the background: a thaw may wait for the
// device, whose I/O a keeper has to let go on. Call it once, before anything is frozen. The channel is
// closed when nothing of the earlier process is frozen.
func (f *Freezer) Recover() <-chan struct{} {
	done := make(chan struct{})
	entries, err := os.ReadDir(f.dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		f.log.Warn("cannot tell what an earlier process has frozen", "err", err)
	}
	var all sync.WaitGroup
	for _, e := range entries {
		device, err := block.ParseDeviceNumber(strings.ReplaceAll(e.Name(), "-", ":"))
		if err != nil {
			continue
		}
		f.mu.Lock()
		f.recover[device] = true
		f.notes[device]++
		f.mu.Unlock()
		all.Go(func() {
			f.thawAll(device)
			f.clear(device)
			f.mu.Lock()
			delete(f.recover, device)
			f.mu.Unlock()
		})
	}
	go func() {
		all.Wait()
		close(done)
	}()
	return done
}

// thawAll returns when no file system of a device is frozen.
func (f *Freezer) thawAll(device block.DeviceNumber) {
	said := false
	for wait := retry; ; wait = min(2*wait, time.Minute) {
		mounts, err := f.mounts(device)
		if errors.Is(err, os.ErrNotExist) { // and so nothing is mounted from it
			return
		}
		left := map[block.DeviceNumber]error{}
		for _, m := range mounts {
			if failed, tried := left[m.Device]; !tried || failed != nil {
				left[m.Device] = f.thawAt(m)
			}
		}
		for _, failed := range left {
			err = errors.Join(err, failed)
		}
		if err == nil && len(mounts) > 0 {
			f.log.Warn("thawed what an earlier process had frozen", "device", device.String(), "file_systems", len(left))
			return
		}
		// A frozen file system that was unmounted can be thawed once it is mounted again.
		if !said {
			f.log.Error("a file system may still be frozen by an earlier process; trying again", "device", device.String(), "err", err)
			said = true
		}
		time.Sleep(wait)
	}
}

func (f *Freezer) thawAt(m Mount) error {
	fs, err := f.k.Open(m)
	if err == nil {
		err = errors.Join(fs.Thaw(), fs.Close())
	}
	if err != nil {
		return fmt.Errorf("thaw the file system on %s: %w", m.Point, err)
	}
	return nil
}

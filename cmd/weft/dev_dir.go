// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/volmgr"
)

// devVersion is the version of what a directory of "weft dev" holds.
const devVersion = 1

// devDir is a directory of "weft dev", locked:
//
//	lock           held while it runs; the process's id
//	dev.json       devState
//	manager        the socket that other weft commands talk to
//	control        the socket that "weft dev stop-target" talks to
//	log, log.old   of this run and the last one
//	volmgr/        the manager's store
//	initiator/     the host's NVMe identity
//	t1/drive1      a drive: a sparse file
//	t1/nvme        the socket that the initiator reaches the target at
type devDir struct {
	path  string
	lock  *os.File
	fresh bool // made by this run
	state devState
}

// devState is what one run leaves to the next. The manager's store holds all the rest.
type devState struct {
	Version int         `json:"version"`
	Targets []devTarget `json:"targets"`
}

// devTarget is a target of dev, with one drive.
type devTarget struct {
	Name  block.NodeName `json:"name"`
	Drive string         `json:"drive"` // file, in the directory
	Added bool           `json:"added"` // the drive was given to the cluster; only once, as it may be evicted
}

// defaultDevDir is in the user's state directory.
func defaultDevDir() string {
	state := os.Getenv("XDG_STATE_HOME")
	if state == "" {
		home, err := os.UserHomeDir()
		if err != nil {
			return ""
		}
		state = filepath.Join(home, ".local/state")
	}
	return filepath.Join(state, "weft/dev")
}

// devPath is the directory that --dir names, or the default.
func devPath(dir string) (string, error) {
	dir = cmp.Or(dir, defaultDevDir())
	if dir == "" {
		return "", usageError{err: errors.New("--dir: missing, and this user has no home")}
	}
	return filepath.Abs(dir)
}

// openDevDir makes the directory, or takes over what the last run has left.
func openDevDir(path string) (_ *devDir, retErr error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("make the cluster's directory (choose another with --dir): %w", err)
	}
	// Sockets and drives are in it, which are its user's alone; it may have been
	// made with another mode.
	if err := os.Chmod(path, 0o700); err != nil {
		return nil, err
	}
	d := &devDir{path: path}
	var err error
	if d.lock, err = lockDev(d.in("lock")); err != nil {
		return nil, err
	}
	defer func() {
		if retErr != nil {
			d.lock.Close()
		}
	}()
	text, err := os.ReadFile(d.in("dev.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return d, d.begin()
	}
	if err != nil {
		return nil, err
	}
	// The version first: the rest may mean something else.
	var version struct{ Version int }
	if err := json.Unmarshal(text, &version); err != nil {
		return nil, fmt.Errorf("read %s: %w", d.in("dev.json"), err)
	}
	if version.Version > devVersion {
		return nil, fmt.Errorf("%s was written by a newer weft (version %d; this one knows %d): use that weft, or another --dir", path, version.Version, devVersion)
	}
	return d, json.Unmarshal(text, &d.state)
}

// begin accepts a directory without a state only if it holds nothing of others.
func (d *devDir) begin() error {
	entries, err := os.ReadDir(d.path)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Name() != "lock" {
			return fmt.Errorf("%s is not a directory of `weft dev` and not empty (it holds %s): use another --dir", d.path, e.Name())
		}
	}
	d.fresh, d.state.Version = true, devVersion
	return d.save()
}

// lockDev waits a moment for a process that is just ending.
func lockDev(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	for end := time.Now().Add(500 * time.Millisecond); ; time.Sleep(20 * time.Millisecond) {
		err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			break
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) || time.Now().After(end) {
			owner, _ := os.ReadFile(path)
			f.Close()
			if errors.Is(err, syscall.EWOULDBLOCK) {
				return nil, fmt.Errorf("%s is in use: `weft dev` runs there as process %s", filepath.Dir(path), strings.TrimSpace(string(owner)))
			}
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
	}
	if err := errors.Join(f.Truncate(0), writeAt(f, strconv.Itoa(os.Getpid())+"\n")); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

func writeAt(f *os.File, text string) error {
	_, err := f.WriteAt([]byte(text), 0)
	return err
}

// in is the path of something in the directory.
func (d *devDir) in(name string) string { return filepath.Join(d.path, name) }

// save replaces dev.json in one step.
func (d *devDir) save() error {
	text, err := json.MarshalIndent(d.state, "", "  ")
	if err != nil {
		return err
	}
	fresh := d.in("dev.json.new")
	if err := os.WriteFile(fresh, append(text, '\n'), 0o600); err != nil {
		return err
	}
	return os.Rename(fresh, d.in("dev.json"))
}

// grow makes targets until there are n, each with a sparse drive.
func (d *devDir) grow(n int, size block.Size) error {
	if have := len(d.state.Targets); n < have {
		return fmt.Errorf("%s has %d targets, and their drives hold data: --targets can only be raised", d.path, have)
	}
	for len(d.state.Targets) < n {
		name := fmt.Sprintf("t%d", len(d.state.Targets)+1)
		t := devTarget{Name: block.NodeName(name), Drive: filepath.Join(name, "drive1")}
		if err := os.MkdirAll(d.in(name), 0o700); err != nil {
			return err
		}
		f, err := os.OpenFile(d.in(t.Drive), os.O_RDWR|os.O_CREATE, 0o600)
		if err != nil {
			return err
		}
		if err := errors.Join(f.Truncate(int64(size)), f.Close()); err != nil {
			return fmt.Errorf("make a drive of %v: %w", size, err)
		}
		d.state.Targets = append(d.state.Targets, t)
	}
	return d.save()
}

// needStore begins a cluster where there is none yet. Drives with a label on them
// had one: then its store was lost, and a new one would know nothing of what they hold.
func (d *devDir) needStore(ctx context.Context) error {
	store := d.in("volmgr")
	err := volmgr.FindStore(store)
	if !errors.Is(err, volmgr.ErrNoStore) {
		return err
	}
	labelled, err := d.labelled(ctx)
	if err != nil {
		return err
	}
	if len(labelled) > 0 {
		return refusedError{
			err:   fmt.Errorf("%s: the manager's store is gone, and %d of the drives belong to its cluster", store, len(labelled)),
			hints: []string{"`weft dev rebuild` makes it anew from what the drives say of their volumes"},
		}
	}
	_, err = volmgr.Init(volmgr.Config{Dir: store, Version: version()})
	return err
}

// labelled are the drives that carry a label of ours.
func (d *devDir) labelled(ctx context.Context) (paths []string, err error) {
	var files []string
	for _, t := range d.state.Targets {
		files = append(files, d.in(t.Drive))
	}
	devices, err := drive.NewFileInventory("/", files...).Scan(ctx)
	for _, device := range devices {
		if device.GetDriveId() != "" {
			paths = append(paths, device.GetPath())
		}
	}
	return paths, err
}

// openLog keeps the last run's log beside that of this one.
func (d *devDir) openLog() (*os.File, error) {
	if err := os.Rename(d.in("log"), d.in("log.old")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	return os.OpenFile(d.in("log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
}

// close lets the next one in.
func (d *devDir) close() error { return d.lock.Close() }

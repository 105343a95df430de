// SPDX-License-Identifier: Apache-2.0

package dev

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

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/volmgr"
)

// savedVersion is the newest version of the content of a directory of "weft dev". Version 1 knows one
// manager.
const (
	savedVersion = 2
	savedOne     = 1
)

// directory is a directory of "weft dev", locked:
//
//	lock           held while it runs; the process's id
//	dev.json       saved
//	manager        the socket that other weft commands talk to; manager2, manager3 of further managers
//	control        the socket that "weft dev stop-target" talks to
//	log, log.old   of this run and the last one
//	volmgr/        the manager's store; volmgr2/, volmgr3/ of further managers
//	initiator/     the host's NVMe identity
//	t1/drive1      a drive: a sparse file
//	t1/nvme        the socket that the initiator reaches the target at
type directory struct {
	path  string
	lock  *os.File
	fresh bool // created by this run
	state saved

	version string // of this program
}

// saved is the state that one run leaves to the next, beside the manager's store.
type saved struct {
	Version  int           `json:"version"`
	Targets  []savedTarget `json:"targets"`
	Managers int           `json:"managers,omitempty"` // 0: 1
}

// savedTarget is a target of dev, with one drive.
type savedTarget struct {
	Name  block.NodeName `json:"name"`
	Drive string         `json:"drive"` // file, in the directory
	Added bool           `json:"added"` // to the cluster; done once, as the drive may be evicted
}

// defaultPath is in the user's state directory.
func defaultPath() string {
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

// pathOf is the directory that --dir names, or the default.
func pathOf(dir string) (string, error) {
	dir = cmp.Or(dir, defaultPath())
	if dir == "" {
		return "", cli.UsageError{Err: errors.New("--dir: missing, and this user has no home")}
	}
	return filepath.Abs(dir)
}

// openDirectory makes the directory, or opens that of the last run.
func openDirectory(path, version string) (_ *directory, retErr error) {
	if err := os.MkdirAll(path, 0o700); err != nil {
		return nil, fmt.Errorf("make the cluster's directory (choose another with --dir): %w", err)
	}
	// Only the user may reach the sockets and drives inside; the directory may have been made with
	// another mode.
	if err := os.Chmod(path, 0o700); err != nil {
		return nil, err
	}
	d := &directory{path: path, version: version}
	var err error
	if d.lock, err = lockFile(d.in("lock")); err != nil {
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
	// The version comes first: in another version the rest may mean something else.
	var written struct{ Version int }
	if err := json.Unmarshal(text, &written); err != nil {
		return nil, fmt.Errorf("read %s: %w", d.in("dev.json"), err)
	}
	if written.Version > savedVersion {
		return nil, fmt.Errorf("%s was written by a newer weft (version %d; this one knows %d): use that weft, or another --dir", path, written.Version, savedVersion)
	}
	return d, json.Unmarshal(text, &d.state)
}

// begin accepts a directory without a state only if it holds nothing else.
func (d *directory) begin() error {
	entries, err := os.ReadDir(d.path)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Name() != "lock" {
			return fmt.Errorf("%s is not a directory of `weft dev` and not empty (it holds %s): use another --dir", d.path, e.Name())
		}
	}
	d.fresh, d.state.Version = true, savedOne
	return d.save()
}

// lockFile waits a moment, in case the holder is just ending.
func lockFile(path string) (*os.File, error) {
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

// in returns the path of something in the directory.
func (d *directory) in(name string) string { return filepath.Join(d.path, name) }

// save replaces dev.json in one step.
func (d *directory) save() error {
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
func (d *directory) grow(n int, size block.Size) error {
	if have := len(d.state.Targets); n < have {
		return fmt.Errorf("%s has %d targets, and their drives hold data: --targets can only be raised", d.path, have)
	}
	for len(d.state.Targets) < n {
		name := fmt.Sprintf("t%d", len(d.state.Targets)+1)
		t := savedTarget{Name: block.NodeName(name), Drive: filepath.Join(name, "drive1")}
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

// growManagers makes n managers of those that there are; 0 means as many as there are.
func (d *directory) growManagers(n int) error {
	have := d.managers()
	switch {
	case n == 0 || n == have:
		return nil
	case n < have:
		return fmt.Errorf("%s has %d managers: --managers can only be raised", d.path, have)
	}
	d.state.Version, d.state.Managers = savedVersion, n
	return d.save()
}

// needStore creates a store if no manager has one. If drives already carry a label, their store was
// lost, and a new store would know nothing of their content: then it refuses.
func (d *directory) needStore(ctx context.Context) error {
	for i := range d.managers() {
		if err := volmgr.FindStore(d.store(i)); !errors.Is(err, volmgr.ErrNoStore) {
			return err
		}
	}
	store := d.store(0)
	labelled, err := d.labelled(ctx)
	if err != nil {
		return err
	}
	if len(labelled) > 0 {
		return cli.RefusedError{
			Err:   fmt.Errorf("%s: the manager's store is gone, and %d of the drives belong to its cluster", store, len(labelled)),
			Hints: []string{"`weft dev rebuild` rebuilds it from the labels of the drives"},
		}
	}
	_, err = volmgr.Init(volmgr.Config{Dir: store, Version: d.version})
	return err
}

// labelled lists the drives that carry one of our labels.
func (d *directory) labelled(ctx context.Context) (paths []string, err error) {
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

// openLog keeps the last run's log beside that of this run.
func (d *directory) openLog() (*os.File, error) {
	if err := os.Rename(d.in("log"), d.in("log.old")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	return os.OpenFile(d.in("log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
}

// close releases the directory's lock.
func (d *directory) close() error { return d.lock.Close() }

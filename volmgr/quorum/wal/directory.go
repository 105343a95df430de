// SPDX-License-Identifier: Apache-2.0

package wal

import (
	"errors"
	"os"
	"path/filepath"

	"weft.dev/weft/proto/durable"
)

// Directory is where a log keeps its files: InDirectory, or waltest's, which forgets what was
// not synced. Nothing but a File's Sync and Sync makes anything durable: Sync the names of
// the files, a File's Sync its contents.
type Directory interface {
	// List returns the names of the files; none if there is no such directory yet.
	List() ([]string, error)
	Read(name string) ([]byte, error)
	// Create creates an empty file, in place of one that is there.
	Create(name string) (File, error)
	Rename(from, to string) error
	Remove(name string) error
	Sync() error
}

// File is an open file.
type File interface {
	Write([]byte) (int, error)
	Sync() error
	Close() error
}

// InDirectory is a directory of the file system. Create makes the directory if it is missing.
type InDirectory string

func (d InDirectory) path(name string) string { return filepath.Join(string(d), name) }

// List is part of Directory.
func (d InDirectory) List() (names []string, err error) {
	entries, err := os.ReadDir(string(d))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, err
}

// Read is part of Directory.
func (d InDirectory) Read(name string) ([]byte, error) { return os.ReadFile(d.path(name)) }

// Create is part of Directory.
func (d InDirectory) Create(name string) (File, error) {
	if err := os.Mkdir(string(d), 0o700); err == nil {
		err = durable.SyncDir(filepath.Dir(filepath.Clean(string(d))))
		if err != nil {
			return nil, err
		}
	} else if !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	f, err := os.OpenFile(d.path(name), os.O_CREATE|os.O_TRUNC|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, err // not a nil *os.File in the interface
	}
	return f, nil
}

// Rename is part of Directory.
func (d InDirectory) Rename(from, to string) error { return os.Rename(d.path(from), d.path(to)) }

// Remove is part of Directory.
func (d InDirectory) Remove(name string) error { return os.Remove(d.path(name)) }

// Sync is part of Directory.
func (d InDirectory) Sync() error { return durable.SyncDir(string(d)) }

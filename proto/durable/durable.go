// SPDX-License-Identifier: Apache-2.0

// Package durable writes files that survive a crash whole: afterwards a file has either its
// new contents or its old ones. When a function returns nil, its effect is on disk.
//
// Each function writes and syncs a temporary file, renames it, and then syncs the
// directory. A crash may leave the temporary file behind; it is called .NAME-number.
package durable

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// Write replaces the contents of the file at path with text.
func Write(path, text string, mode fs.FileMode) error {
	return place(path, mode, holding(text), os.Rename)
}

// Fill is Write for contents that the function fill produces. If fill returns an error,
// Fill returns it, and the file at path is unchanged.
func Fill(path string, mode fs.FileMode, fill func(io.Writer) error) error {
	return place(path, mode, fill, os.Rename)
}

// Ensure is Write for a file that does not exist yet. An existing file at path is left as
// it is; of two processes that race, the first one wins.
func Ensure(path, text string, mode fs.FileMode) error {
	return place(path, mode, holding(text), func(written, path string) error {
		if err := os.Link(written, path); !errors.Is(err, fs.ErrExist) {
			return err
		}
		return nil
	})
}

func holding(text string) func(io.Writer) error {
	return func(w io.Writer) error {
		_, err := io.WriteString(w, text)
		return err
	}
}

func place(path string, mode fs.FileMode, fill func(io.Writer) error, give func(written, path string) error) error {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, "."+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	if err := fill(f); err != nil {
		f.Close()
		return err
	}
	if err := errors.Join(f.Chmod(mode), f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := give(f.Name(), path); err != nil {
		return err
	}
	return SyncDir(dir)
}

// SyncDir makes a directory's entries durable.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

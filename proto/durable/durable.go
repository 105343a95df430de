// SPDX-License-Identifier: Apache-2.0

// Package durable writes files that a crash leaves whole: with the new contents, or
// as they were. When a function returns nil, what it did is on disk.
//
// A file is written under another name and synced, gets its own name in one step, and
// then its directory is synced. What a crash leaves behind is called .NAME-number.
package durable

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// Write makes the file at path hold text.
func Write(path, text string, mode fs.FileMode) error {
	return place(path, mode, holding(text), os.Rename)
}

// Fill is Write of what fill writes. If fill returns an error, so does Fill, and path
// is as it was.
func Fill(path string, mode fs.FileMode, fill func(io.Writer) error) error {
	return place(path, mode, fill, os.Rename)
}

// Ensure is Write, unless there is a file at path: it stays as it is. So of two
// processes the first wins.
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

// SyncDir makes durable which files a directory has, and under which names.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// SPDX-License-Identifier: Apache-2.0

package nvmet

import (
	"os"

	"golang.org/x/sys/unix"
)

// Files are the operations that Tree needs from configfs; their errors wrap the errno. Where the
// kernel has no nvmet, OpenOn is given an imitation: see package memfs.
type Files interface {
	Mkdir(path string) error
	Rmdir(path string) error
	Write(path, value string) error
	// WriteSecret is Write of a value that only root may read.
	WriteSecret(path, value string) error
	Symlink(to, path string) error
	Unlink(path string) error
	ReadDir(path string) ([]string, error)
	Read(path string) (string, error)
	Readlink(path string) (string, error)
}

// kernelFiles is configfs itself.
type kernelFiles struct{}

func (kernelFiles) Mkdir(path string) error       { return unix.Mkdir(path, 0o755) }
func (kernelFiles) Rmdir(path string) error       { return unix.Rmdir(path) }
func (kernelFiles) Symlink(to, path string) error { return unix.Symlink(to, path) }
func (kernelFiles) Unlink(path string) error      { return unix.Unlink(path) }

// Write passes the value in one write(2), as configfs requires.
func (kernelFiles) Write(path, value string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	if closed := f.Close(); err == nil {
		err = closed
	}
	return err
}

// WriteSecret takes the file from everybody else first: configfs makes all its files readable.
func (f kernelFiles) WriteSecret(path, value string) error {
	if err := os.Chmod(path, 0o600); err != nil {
		return err
	}
	return f.Write(path, value)
}

func (kernelFiles) ReadDir(path string) ([]string, error) {
	entries, err := os.ReadDir(path)
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, err
}

func (kernelFiles) Read(path string) (string, error) {
	b, err := os.ReadFile(path)
	return string(b), err
}

func (kernelFiles) Readlink(path string) (string, error) { return os.Readlink(path) }

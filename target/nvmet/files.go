// SPDX-License-Identifier: Apache-2.0

package nvmet

import (
	"os"

	"golang.org/x/sys/unix"
)

// files is what Tree asks of configfs; tests put a likeness of it in its place.
// Errors wrap the errno.
type files interface {
	mkdir(path string) error
	rmdir(path string) error
	write(path, value string) error
	symlink(to, path string) error
	unlink(path string) error
	readDir(path string) ([]string, error)
	read(path string) (string, error)
	readlink(path string) (string, error)
}

// kernelFiles is configfs itself.
type kernelFiles struct{}

func (kernelFiles) mkdir(path string) error       { return unix.Mkdir(path, 0o755) }
func (kernelFiles) rmdir(path string) error       { return unix.Rmdir(path) }
func (kernelFiles) symlink(to, path string) error { return unix.Symlink(to, path) }
func (kernelFiles) unlink(path string) error      { return unix.Unlink(path) }

// write hands the value over in one write(2), as configfs wants it.
func (kernelFiles) write(path, value string) error {
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

func (kernelFiles) readDir(path string) ([]string, error) {
	entries, err := os.ReadDir(path)
	names := make([]string, 0, len(entries))
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names, err
}

func (kernelFiles) read(path string) (string, error) {
	b, err := os.ReadFile(path)
	return string(b), err
}

func (kernelFiles) readlink(path string) (string, error) { return os.Readlink(path) }

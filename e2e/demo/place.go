// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// place is where the story keeps its files on the attached volume. A failure ends the
// story.
type place interface {
	format(d *demo)                    // prepare it for files
	enter(d *demo)                     // open it
	put(d *demo, files []string) int64 // copy files to it; returns the number of bytes
	sums(d *demo) sums                 // of its files, read from the volume
	write(d *demo) *writer             // start a program that writes to it
	leave(d *demo)                     // close it
	note() string                      // name of the file with the sums of the files copied to it
}

// span is how many MiB the writer uses.
const span = 16

// mounted is a file system on the volume's block device.
type mounted struct{ device, dir string }

func (m *mounted) note() string { return "files.sums" }

func (m *mounted) format(d *demo) {
	tell("ext4 on %s", m.device)
	d.exec("mkfs.ext4", "-q", "-F", m.device)
}

func (m *mounted) enter(d *demo) {
	d.must(os.MkdirAll(m.dir, 0o755))
	d.exec("mount", m.device, m.dir)
	d.undo = append(d.undo, m.unmount)
}

func (m *mounted) unmount() error {
	if out, err := exec.Command("umount", m.dir).CombinedOutput(); err != nil {
		return fmt.Errorf("umount %s: %w: %s", m.dir, err, bytes.TrimSpace(out))
	}
	return nil
}

func (m *mounted) leave(d *demo) {
	d.done() // unmount
	d.exec("e2fsck", "-fn", m.device)
}

func (m *mounted) put(d *demo, files []string) (size int64) {
	for _, name := range files {
		n, err := copyFile(name, filepath.Join(m.dir, "files", onVolume(name)))
		d.must(err)
		size += n
	}
	return size
}

func copyFile(from, to string) (int64, error) {
	in, err := os.Open(from)
	if err != nil {
		return 0, err
	}
	defer in.Close()
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return 0, err
	}
	out, err := os.Create(to)
	if err != nil {
		return 0, err
	}
	n, err := io.Copy(out, in)
	return n, errors.Join(err, out.Close()) // leave makes the data durable
}

func (m *mounted) sums(d *demo) sums {
	s, root := sums{}, filepath.Join(m.dir, "files")
	d.must(filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		// Drop the page cache: its contents prove nothing about the volume.
		if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
			return err
		}
		_, err = s.add(strings.TrimPrefix(path, root+"/"), f)
		return err
	}))
	return s
}

// write lets the writer overwrite an existing file, so that its writes are data only.
func (m *mounted) write(d *demo) *writer {
	file := filepath.Join(m.dir, "data")
	f, err := os.Create(file)
	d.must(err)
	_, err = f.Write(make([]byte, span<<20))
	d.must(errors.Join(err, f.Sync(), f.Close()))
	return d.startWriter(file)
}

// exec runs a program of the system.
func (d *demo) exec(name string, args ...string) {
	path, err := exec.LookPath(name)
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		if err != nil {
			path, err = exec.LookPath(filepath.Join(dir, name))
		}
	}
	if err != nil {
		d.must(fmt.Errorf("%w: `make install` installs what is missing", err))
	}
	cmd := exec.CommandContext(d.ctx, path, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := cmd.CombinedOutput()
	if err != nil {
		d.must(fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, out))
	}
}

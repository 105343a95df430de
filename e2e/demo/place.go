// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
)

// place is where the story keeps its files on the attached volume.
type place interface {
	fill(d *demo)          // make it, and put files there
	enter(d *demo)         // open what was filled
	check(d *demo)         // every file is as it was put there
	write(d *demo) *writer // a program that writes there
	leave(d *demo)         // close it, and detach the volume
}

// mounted is a file system on the volume's block device.
type mounted struct {
	device, dir string
	sums        string // file: what was put there
}

func (m *mounted) fill(d *demo) {
	d.run("mkfs.ext4", "-q", "-F", m.device)
	m.enter(d)
	files, size, err := m.copyFiles(d.weft)
	d.must(err)
	tell("ext4 is on %s, with %d files of %d MiB", m.device, files, size>>20)
}

func (m *mounted) enter(d *demo) {
	d.must(os.MkdirAll(m.dir, 0o755))
	d.run("mount", m.device, m.dir)
	d.undo = append(d.undo, func() error { return exec.Command("umount", m.dir).Run() })
}

func (m *mounted) leave(d *demo) {
	d.done() // umount
	d.run("e2fsck", "-fn", m.device)
	d.typed("detach", volume)
}

// copyFiles puts this source tree and the program itself on the volume, and keeps
// their checksums outside of it.
func (m *mounted) copyFiles(program string) (files, size int64, err error) {
	list, err := exec.Command("git", "ls-files", "-z").Output()
	if err != nil {
		return 0, 0, fmt.Errorf("git ls-files: %w", err)
	}
	var sums strings.Builder
	names := append(strings.Split(strings.Trim(string(list), "\x00"), "\x00"), program)
	for _, name := range names {
		to := filepath.Join("files", strings.TrimPrefix(name, "/"))
		sum, n, err := copyFile(name, filepath.Join(m.dir, to))
		if errors.Is(err, fs.ErrNotExist) {
			continue // taken away, and not yet committed
		}
		if err != nil {
			return files, size, err
		}
		fmt.Fprintf(&sums, "%s  %s\n", sum, to)
		files, size = files+1, size+n
	}
	return files, size, os.WriteFile(m.sums, []byte(sums.String()), 0o600)
}

func copyFile(from, to string) (sum string, n int64, err error) {
	in, err := os.Open(from)
	if err != nil {
		return "", 0, err
	}
	defer in.Close()
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return "", 0, err
	}
	out, err := os.Create(to)
	if err != nil {
		return "", 0, err
	}
	hash := sha256.New()
	n, err = io.Copy(io.MultiWriter(out, hash), in)
	return hex.EncodeToString(hash.Sum(nil)), n, errors.Join(err, out.Sync(), out.Close())
}

func (m *mounted) check(d *demo) {
	list, err := os.ReadFile(m.sums)
	d.must(err)
	for line := range strings.Lines(string(list)) {
		want, name, _ := strings.Cut(strings.TrimSpace(line), "  ")
		text, err := os.ReadFile(filepath.Join(m.dir, name))
		d.must(err)
		if sum := sha256.Sum256(text); hex.EncodeToString(sum[:]) != want {
			d.must(fmt.Errorf("%s is not what was put there", name))
		}
	}
}

const span = 16 // MiB that the writer uses

// write has the writer fill a file that is there, so that its writes are data.
func (m *mounted) write(d *demo) *writer {
	file := filepath.Join(m.dir, "data")
	f, err := os.Create(file)
	d.must(err)
	_, err = f.Write(bytes.Repeat([]byte{0}, span<<20))
	d.must(errors.Join(err, f.Sync(), f.Close()))
	return d.startWriter(file)
}

// run runs a program of the system.
func (d *demo) run(name string, args ...string) {
	path, err := exec.LookPath(name)
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		if err != nil {
			path, err = exec.LookPath(filepath.Join(dir, name))
		}
	}
	d.must(err)
	cmd := exec.CommandContext(d.ctx, path, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := cmd.CombinedOutput()
	if err != nil {
		d.must(fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, out))
	}
}

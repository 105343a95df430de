// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// nameLock is held by the process that exports a name. The kernel releases it when that
// process dies, however it dies; the file stays.
type nameLock struct{ f *os.File }

func lockName(runDir string, name block.VolumeName) (*nameLock, error) {
	path := filepath.Join(runDir, string(name)+".lock")
	// A thread that waits for the dead device must not keep it open, see unshared.
	var f *os.File
	_, err := serving.open(func() (_ []int, err error) {
		if f, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
			return nil, err
		}
		return []int{int(f.Fd())}, nil
	})
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", name, err)
	}
	l := &nameLock{f}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		defer l.unlock()
		if errors.Is(err, unix.EWOULDBLOCK) {
			pid, _ := os.ReadFile(path)
			return nil, fmt.Errorf("%s: %w by process %s", name, ErrExported, strings.TrimSpace(string(pid)))
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	// For people only, and for the text above.
	if err := errors.Join(f.Truncate(0), writeAt(f, fmt.Sprintln(os.Getpid()))); err != nil {
		l.unlock()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return l, nil
}

func writeAt(f *os.File, text string) error {
	_, err := f.WriteAt([]byte(text), 0)
	return err
}

func (l *nameLock) unlock() {
	serving.forget(int(l.f.Fd()))
	l.f.Close()
}

// record is what a later process needs to know of an exported device. It is only a hint: each
// device in the kernel carries the mark of its owner.
type record struct {
	Kind   Kind             `json:"kind"`
	Disk   string           `json:"disk"`
	Name   block.VolumeName `json:"name,omitempty"` // of the device, under DevDir; empty: the volume's
	Resume string           `json:"resume,omitempty"`
	PID    int              `json:"pid"`
}

// named is the name that a recorded device has under DevDir.
func (r record) named(o Options) block.VolumeName {
	return cmp.Or(r.Name, o.Name)
}

func recordFile(o Options) string { return filepath.Join(o.RunDir, string(o.Name)+".json") }

// readRecord returns the zero record if there is no readable one.
func readRecord(o Options) record {
	var r record
	b, err := os.ReadFile(recordFile(o))
	if err == nil {
		err = json.Unmarshal(b, &r)
	}
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			o.Log.Warn("record of a block device is not readable", "file", recordFile(o), "err", err)
		}
		return record{}
	}
	return r
}

func writeRecord(o Options, r record) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	file := recordFile(o)
	// On a tmpfs, so no fsync. The rename keeps readers from seeing a partial file.
	if err := os.WriteFile(file+".new", append(b, '\n'), 0o600); err != nil {
		return fmt.Errorf("record %s: %w", o.Name, err)
	}
	if err := os.Rename(file+".new", file); err != nil {
		return fmt.Errorf("record %s: %w", o.Name, err)
	}
	return nil
}

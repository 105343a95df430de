// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func oddPlaces(t *testing.T, m machine) {
	node, d := m.made(t, "ext4")
	dir, file := filepath.Join(m.dir, "dir"), filepath.Join(m.dir, "file")
	succeeds(t, "make the directory", m.MakeDir(dir))
	succeeds(t, "make the file", m.MakeFile(file))
	for name, to := range map[string]string{"link": dir, "dangling": filepath.Join(m.dir, "nowhere")} {
		path := filepath.Join(m.dir, name)
		m.link(t, to, path)
		if dir, file := m.MakeDir(path), m.MakeFile(path); !errors.Is(dir, unix.ELOOP) || !errors.Is(file, unix.ELOOP) {
			t.Errorf("make a directory and a file where a link is = %v, %v, want ELOOP", dir, file)
		}
		if err := m.Mount(d, node, path, "ext4", nil); !errors.Is(err, unix.ENOTDIR) {
			t.Errorf("mount on a link = %v, want ENOTDIR", err)
		}
	}
	if err := m.MakeDir(file); !errors.Is(err, unix.ENOTDIR) {
		t.Errorf("make a directory where a file is = %v, want ENOTDIR", err)
	}
	if err := m.MakeFile(dir); !errors.Is(err, unix.EISDIR) {
		t.Errorf("make a file where a directory is = %v, want EISDIR", err)
	}
	all, err := m.Mounts()
	succeeds(t, "read the mounts", err)
	if here := all.FileSystemOn(d.Number()); len(here) > 0 {
		t.Errorf("mounted on %s", here.Points())
	}
}

// Synced writes are visible to a reader with a read-only device, or the mount is refused.
func journalsCount(t *testing.T, m machine) {
	for _, fsType := range fileSystems {
		d, at := m.mounted(t, fsType)
		if readOnly, err := d.ReadOnly(); readOnly || err != nil {
			t.Errorf("ReadOnly of a new device = %v, %v", readOnly, err)
		}
		m.lose(t, at.Point)
		succeeds(t, "unmount", m.Unmount(at.Point, false))
		m.lock(t, at.Source, true)
		if readOnly, err := d.ReadOnly(); !readOnly || err != nil {
			t.Errorf("ReadOnly of a device that is = %v, %v", readOnly, err)
		}
		if err := m.Mount(d, at.Source, at.Point, fsType, []string{"ro"}); !errors.Is(err, unix.EROFS) {
			t.Errorf("mount of %s with a journal on a read-only device = %v, want EROFS", fsType, err)
		}
		if at, ok := m.at(t, at.Point); ok {
			t.Fatalf("and there is %+v", at)
		}
		m.lock(t, at.Source, false)
		succeeds(t, "mount, which replays the journal", m.Mount(d, at.Source, at.Point, fsType, nil))
		succeeds(t, "unmount", m.Unmount(at.Point, false))
		m.lock(t, at.Source, true)
		succeeds(t, "mount on a read-only device", m.Mount(d, at.Source, at.Point, fsType, []string{"ro"}))
		if _, fake := m.Kernel.(*fakeKernel); !fake {
			if got, err := os.ReadFile(filepath.Join(at.Point, "data")); err != nil || string(got) != "acknowledged" {
				t.Errorf("a reader of %s finds %q, %v", fsType, got, err)
			}
		}
		succeeds(t, "unmount", m.Unmount(at.Point, false))
	}
}

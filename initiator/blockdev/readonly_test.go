// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"bytes"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

func testReadOnly(t *testing.T, w *world) {
	g := plain
	g.VolatileCache, g.DiscardUnit, g.ReadOnly = false, 0, true
	w.disk = newMemDisk(g)
	e := w.export()
	if got := e.sys.diskText(filepath.Base(e.Node()), "ro"); got != "1" {
		t.Errorf("the kernel says ro %q, want 1", got)
	}
	if fd, err := unix.Open(e.Path(), unix.O_RDWR|unix.O_CLOEXEC, 0); err == nil {
		if _, err := unix.Pwrite(fd, randomBytes(4096), 0); err == nil {
			t.Error("it was written to")
		}
		w.must(unix.Close(fd))
	}
	fd, err := unix.Open(e.Path(), unix.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	w.must(err)
	got := aligned(4096)
	_, err = unix.Pread(fd, got, 0)
	w.must(err)
	if !bytes.Equal(got, make([]byte, 4096)) {
		t.Error("it does not read as the device")
	}
	w.must(unix.Close(fd))
	if n := w.disk.count(block.OpWrite) + w.disk.count(block.OpWriteZeroes) + w.disk.count(block.OpDiscard); n != 0 {
		t.Errorf("%d writes reached the device", n)
	}
	w.close(e)
}

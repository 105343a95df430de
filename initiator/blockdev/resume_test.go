// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// runResumeSuite tests the kinds that can outlive a process.
func runResumeSuite(t *testing.T, k Kind) {
	for name, test := range map[string]func(*testing.T, *world){
		"IOWaitsForTheNextProcess":           testResume,
		"AFileSystemOutlivesTheProcess":      testResumeMount,
		"AnotherTokenTakesTheDeviceAway":     testOtherToken,
		"RemoveEndsWhatWaitsForADeadProcess": testRemoveWaiting,
	} {
		t.Run(name, func(t *testing.T) { test(t, newWorld(t, k)) })
	}
}

func (w *world) resume(file string) *Exported {
	w.t.Helper()
	w.o.Resume = "token"
	e := w.exportFile(file)
	if !e.Resumed() {
		w.t.Error("the device was made anew, not resumed")
	}
	return e
}

func testResume(t *testing.T, w *world) {
	file := filepath.Join(t.TempDir(), "disk")
	server := w.serveElsewhere(file, "token")
	fd := w.use("/dev/weft/" + string(w.o.Name))
	p := randomBytes(8192)
	_, err := unix.Pwrite(fd, p, 1<<20)
	w.must(err)

	// I/O under way when the process dies is sent again.
	w.must(server.Process.Signal(unix.SIGSTOP))
	q := randomBytes(8192)
	written := do(func() error { _, err := unix.Pwrite(fd, q, 2<<20); return err })
	time.Sleep(50 * time.Millisecond) // so that it is most likely under way
	w.kill(server)
	select {
	case err := <-written:
		t.Fatalf("a write to a dead device ended: %v", err)
	case <-time.After(300 * time.Millisecond):
	}
	e := w.resume(file)
	select {
	case err := <-written:
		w.must(err)
	case <-time.After(nbdLook + 20*time.Second):
		t.Fatal("what waited for the dead process was not sent again")
	}
	for at, want := range map[int64][]byte{1 << 20: p, 2 << 20: q} {
		got := aligned(8192)
		_, err = unix.Pread(fd, got, at)
		if w.must(err); !bytes.Equal(got, want) {
			t.Errorf("at %d: not what was written", at)
		}
	}
	w.leave(fd)
	w.close(e)
}

func testResumeMount(t *testing.T, w *world) {
	file := filepath.Join(t.TempDir(), "disk")
	server := w.serveElsewhere(file, "token")
	link := "/dev/weft/" + string(w.o.Name)
	run(t, "mkfs.ext4", "-q", link)
	dir := mount(t, link, "ext4")
	p := randomBytes(8 << 20)
	synced := do(func() error { return writeSynced(dir+"/file", p) })
	time.Sleep(100 * time.Millisecond)
	w.kill(server)
	e := w.resume(file)
	select {
	case err := <-synced:
		w.must(err)
	case <-time.After(nbdLook + 30*time.Second):
		t.Fatal("the file system does not go on")
	}
	if err := e.Close(w.limit(), false); !errors.Is(err, ErrBusy) {
		t.Errorf("Close of a mounted device = %v, want ErrBusy", err)
	}
	w.must(unix.Unmount(dir, 0))
	run(t, "e2fsck", "-fn", link)
	dir = mount(t, link, "ext4")
	if got, err := os.ReadFile(dir + "/file"); err != nil || !bytes.Equal(got, p) {
		t.Errorf("the file is not what was synced: %v", err)
	}
	w.must(unix.Unmount(dir, 0))
	w.close(e)
}

func testOtherToken(t *testing.T, w *world) {
	file := filepath.Join(t.TempDir(), "disk")
	w.kill(w.serveElsewhere(file, "token"))
	w.o.Resume = "another"
	e := w.exportFile(file)
	if e.Resumed() {
		t.Error("a device of another token was resumed")
	}
	w.close(e)
}

func testRemoveWaiting(t *testing.T, w *world) {
	file := filepath.Join(t.TempDir(), "disk")
	server := w.serveElsewhere(file, "token")
	fd := w.use("/dev/weft/" + string(w.o.Name))
	w.kill(server)
	written := do(func() error { _, err := unix.Pwrite(fd, randomBytes(4096), 0); return err })
	time.Sleep(50 * time.Millisecond)
	w.must(Remove(w.limit(), w.o))
	if err := w.within("a write to a removed device", written); err == nil {
		t.Error("a write to a removed device was acknowledged")
	}
	w.leave(fd)
}

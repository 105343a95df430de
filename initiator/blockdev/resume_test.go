// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// runResumeSuite tests the kinds that can outlive a process.
func runResumeSuite(t *testing.T, k Kind) {
	for name, test := range map[string]func(*testing.T, *world){
		"IOWaitsForTheNextProcess":           testResume,
		"AFileSystemOutlivesTheProcess":      testResumeMount,
		"AnotherTokenTakesTheDeviceAway":     testOtherToken,
		"RemoveEndsWhatWaitsForADeadProcess": testRemoveWaiting,
		"WhatNobodyUsesDoesNotWait":          testUnusedGoes,
		"WritersSurviveKillAfterKill":        testKilledUnderWrites,
		"IOWaitsForALimitedTime":             testWaitEnds,
		"AFrozenProcessKeepsItsDevice":       testFrozenKeeps,
		"AHolderThatDiesIsReplaced":          testHolderDies,
		"ADeviceKeepsItsName":                testResumeName,
	} {
		t.Run(name, func(t *testing.T) { test(t, newWorld(t, k)) })
	}
}

func (w *world) resume(file string) *Exported {
	w.t.Helper()
	w.o.Resume, w.o.Holder = "token", holderCommand(w.o.RunDir)
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
	freeze(t, server.Process)
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

// Two clusters have a volume of one name. Both processes die, and what the first one left is removed before the
// second one is back.
func testResumeName(t *testing.T, w *world) {
	name, other := w.o.Name, w.o.Name.Beside(block.VolumeID{})
	first := w.serveElsewhere(filepath.Join(t.TempDir(), "first"), "token")
	second, file := *w, filepath.Join(t.TempDir(), "second")
	second.o.RunDir, second.o.Names = t.TempDir(), []block.VolumeName{name, other}
	server := second.serveElsewhere(file, "token")
	fd := second.use("/dev/weft/" + string(other))
	w.kill(first)
	w.kill(server)
	w.must(Remove(w.limit(), w.o))
	e := second.resume(file)
	if want := "/dev/weft/" + string(other); e.Path() != want || exists("/dev/weft/"+string(name)) {
		t.Errorf("the resumed device is %s, want %s; the first one's name is there: %v", e.Path(), want, exists("/dev/weft/"+string(name)))
	}
	p := randomBytes(4096)
	_, err := unix.Pwrite(fd, p, 1<<20)
	w.must(err)
	second.leave(fd)
	second.close(e)
	if exists("/dev/weft/" + string(other)) {
		t.Error("the second device left its name")
	}
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

// A process that starts removes what its predecessor has left, except what is used.
func testUnusedGoes(t *testing.T, w *world) {
	file, link := filepath.Join(t.TempDir(), "disk"), "/dev/weft/"+string(w.o.Name)
	w.kill(w.serveElsewhere(file, "token"))
	w.must(RemoveDead(w.limit(), w.o))
	if disk := readRecord(w.o).Disk; disk != "" {
		t.Errorf("%s waits for the next process, and nobody uses it", disk)
	}

	server := w.serveElsewhere(file, "token")
	used, err := os.Open(link)
	w.must(err)
	user := exec.Command("sleep", "60")
	user.ExtraFiles = []*os.File{used}
	w.must(user.Start())
	w.must(used.Close())
	w.kill(server)
	w.must(RemoveDead(w.limit(), w.o))
	e := w.resume(file)
	w.must(user.Process.Kill())
	user.Wait() //nolint:errcheck // it was killed
	w.close(e)
}

// killedWriter writes to its own part of a device, page by page, and knows what each page may hold.
type killedWriter struct {
	fd    int
	at    int64 // of its part
	pages [][]byte
	wrote int
}

// run writes and reads until stop is closed. Any error, and any page that is not what was last
// acknowledged, is a failure.
func (k *killedWriter) run(stop <-chan struct{}) error {
	for {
		select {
		case <-stop:
			return nil
		default:
		}
		page := rand.IntN(len(k.pages))
		p := randomBytes(memPage)
		if n, err := unix.Pwrite(k.fd, p, k.at+int64(page)*memPage); err != nil || n != len(p) {
			return fmt.Errorf("write %d = %d, %w", k.wrote, n, err)
		}
		k.wrote++
		k.pages[page] = p
		if k.wrote%16 == 0 {
			if err := unix.Fsync(k.fd); err != nil {
				return fmt.Errorf("fsync after write %d: %w", k.wrote, err)
			}
		}
		if err := k.check(rand.IntN(len(k.pages))); err != nil {
			return err
		}
	}
}

func (k *killedWriter) check(page int) error {
	got := aligned(memPage)
	if _, err := unix.Pread(k.fd, got, k.at+int64(page)*memPage); err != nil {
		return fmt.Errorf("read after write %d: %w", k.wrote, err)
	}
	if want := k.pages[page]; want != nil && !bytes.Equal(got, want) {
		return fmt.Errorf("page %d of the part at %d is not what was acknowledged", page, k.at)
	}
	return nil
}

func testKilledUnderWrites(t *testing.T, w *world) {
	file := filepath.Join(t.TempDir(), "disk")
	server := w.serveElsewhere(file, "token")
	fd := w.use("/dev/weft/" + string(w.o.Name))
	stop, ended := make(chan struct{}), make(chan error, 8)
	var all []*killedWriter
	for i := range cap(ended) {
		k := &killedWriter{fd: fd, at: int64(i) << 20, pages: make([][]byte, 64)}
		all = append(all, k)
		go func() { ended <- k.run(stop) }()
	}
	for range 6 {
		time.Sleep(time.Duration(100+rand.IntN(200)) * time.Millisecond)
		w.kill(server)
		server = w.serveElsewhere(file, "token")
	}
	time.Sleep(200 * time.Millisecond)
	close(stop)
	for range all {
		select {
		case err := <-ended:
			w.must(err)
		case <-time.After(nbdLook + 30*time.Second):
			t.Fatal("a writer does not go on")
		}
	}
	wrote := 0
	for _, k := range all {
		wrote += k.wrote
		for page := range k.pages {
			w.must(k.check(page))
		}
	}
	if wrote < 2*len(all) { // nbd looks for the next process every 10 s
		t.Errorf("only %d writes", wrote)
	}
	t.Logf("%d verified writes over 6 kills", wrote)
	w.leave(fd)
	w.kill(server)
	w.must(Remove(w.limit(), w.o))
}

func testWaitEnds(t *testing.T, w *world) {
	t.Setenv(withinVariable, "1s")
	server := w.serveElsewhere(filepath.Join(t.TempDir(), "disk"), "token")
	fd := w.use("/dev/weft/" + string(w.o.Name))
	began := time.Now()
	w.kill(server)
	written := do(func() error { _, err := unix.Pwrite(fd, randomBytes(4096), 0); return err })
	if err := w.within("a write that nobody takes over", written); err == nil {
		t.Error("a write that nobody took over was acknowledged")
	}
	if waited := time.Since(began); waited < 900*time.Millisecond {
		t.Errorf("a write failed after %v, before its time of 1 s", waited)
	}
	w.leave(fd)
	for deadline := time.Now().Add(10 * time.Second); exists(recordFile(w.o)); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the holder did not remove the device")
		}
	}
}

// The time of a device begins with the death of its process, not with its silence.
func testFrozenKeeps(t *testing.T, w *world) {
	t.Setenv(withinVariable, "200ms")
	server := w.serveElsewhere(filepath.Join(t.TempDir(), "disk"), "token")
	fd := w.use("/dev/weft/" + string(w.o.Name))
	freeze(t, server.Process)
	written := do(func() error { _, err := unix.Pwrite(fd, randomBytes(4096), 0); return err })
	if _, err := Export(w.limit(), w.disk, w.o); !errors.Is(err, ErrExported) {
		t.Errorf("Export of a name that a frozen process has = %v, want ErrExported", err)
	}
	select {
	case err := <-written:
		t.Errorf("a write to a frozen process = %v, want that it waits", err)
	case <-time.After(time.Second):
	}
	w.must(server.Process.Signal(unix.SIGCONT))
	w.must(w.within("the write", written))
	w.leave(fd)
	w.kill(server)
	w.must(Remove(w.limit(), w.o))
}

func testHolderDies(t *testing.T, w *world) {
	file := filepath.Join(t.TempDir(), "disk")
	server := w.serveElsewhere(file, "token")
	fd := w.use("/dev/weft/" + string(w.o.Name))
	first := w.holder()
	w.must(unix.Kill(first, unix.SIGKILL))
	for deadline := time.Now().Add(10 * time.Second); w.holder() == first || w.holder() == 0; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("a holder that was killed has no successor")
		}
	}
	time.Sleep(100 * time.Millisecond) // the process registers with it
	p := randomBytes(4096)
	_, err := unix.Pwrite(fd, p, 0)
	w.must(err)
	w.kill(server)
	e := w.resume(file)
	got := aligned(4096)
	_, err = unix.Pread(fd, got, 0)
	if w.must(err); !bytes.Equal(got, p) {
		t.Error("not what was written")
	}
	w.leave(fd)
	w.close(e)
}

// holder finds the process that listens on the holder's socket; 0: nobody does.
func (w *world) holder() int {
	c, err := connectHolder(w.o.RunDir)
	if err != nil {
		return 0
	}
	defer c.Close()
	raw, err := c.SyscallConn()
	w.must(err)
	pid := 0
	w.must(raw.Control(func(fd uintptr) {
		if peer, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			pid = int(peer.Pid)
		}
	}))
	return pid
}

// A mount that ended with its process's mount namespace is out of sight; the device grows all the
// same.
func testResumeOutOfContainer(t *testing.T, w *world) {
	file := filepath.Join(t.TempDir(), "disk")
	w.o.Resume = "token"
	server := startRole(t, inContainer, "serving", w.serveArgs(file, "token")...)
	fd := w.use("/dev/weft/" + string(w.o.Name))
	p := randomBytes(4096)
	_, err := unix.Pwrite(fd, p, 0)
	w.must(err)
	w.kill(server)
	disk, err := openFileDisk(file, crashGeometry)
	w.must(err)
	w.o.Holder = holderCommand(w.o.RunDir)
	e, err := Export(w.limit(), disk, w.o)
	w.must(err)
	if !e.Resumed() {
		t.Error("the device was made anew, not resumed")
	}
	disk.geometry.Size *= 2
	w.must(disk.f.Truncate(int64(disk.geometry.Size)))
	w.must(e.Resize(w.limit()))
	if got, want := e.sys.diskText(e.front.disk(), "size"), fmt.Sprint(disk.geometry.Size.Sectors()); got != want {
		t.Errorf("the device has %s sectors after it has grown, want %s", got, want)
	}
	got := aligned(4096)
	_, err = unix.Pread(fd, got, 0)
	if w.must(err); !bytes.Equal(got, p) {
		t.Error("not what was written")
	}
	// By force: with the mount out of sight, the last descriptor ends the connection.
	w.disk = nil
	w.must(e.Close(w.limit(), true))
	if _, err := unix.Pread(fd, got, 0); err == nil {
		t.Error("a read of a device that was closed by force succeeds")
	}
	w.leave(fd)
	w.disk = newMemDisk(plain)
}

// A process that ends in order leaves its device as its death would, and what the device answers
// from then on is not told to anybody.
func testLeave(t *testing.T, w *world) {
	w.o.Resume, w.o.Holder = "token", holderCommand(w.o.RunDir)
	e, err := Export(w.limit(), w.disk, w.o)
	w.must(err)
	fd := w.use(e.Path())
	w.disk.hold(isWrite)
	p := randomBytes(4096)
	written := do(func() error { _, err := unix.Pwrite(fd, p, 0); return err })
	<-w.disk.arrived
	w.disk.fail(func(*block.IO) error { return block.ErrGone })
	e.Leave()
	w.disk.release()
	select {
	case err := <-written:
		t.Fatalf("a write of a device that was left = %v, want that it waits", err)
	case <-time.After(300 * time.Millisecond):
	}
	w.disk.fail(nil)
	next, err := Export(w.limit(), w.disk, w.o)
	w.must(err)
	if !next.Resumed() || next.Node() != e.Node() {
		t.Errorf("the next device is %s, resumed: %v; want %s", next.Node(), next.Resumed(), e.Node())
	}
	w.must(w.within("the write", written))
	got := aligned(4096)
	w.must(block.ReadAt(w.disk, got, 0))
	if !bytes.Equal(got, p) {
		t.Error("the device has not what was written")
	}
	w.leave(fd)
	w.close(next)
}

// A device that cannot be taken over is made as ever, and ends with its process.
func testNoHolder(t *testing.T, w *world) {
	w.o.Resume, w.o.Holder = "token", []string{"/proc/self/no-such-program"}
	e, err := Export(w.limit(), w.disk, w.o)
	w.must(err)
	if e.Survives() || readRecord(w.o).Resume != "" {
		t.Error("a device without a holder passes for one that survives")
	}
	w.close(e)
}

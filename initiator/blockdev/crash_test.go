// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

var crashGeometry = block.Geometry{Size: 400 * block.MiB, BlockSize: 4096, DiscardUnit: 4096, VolatileCache: true}

// run runs a program of the distribution, and skips the test if it is not installed.
func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	if _, err := exec.LookPath(name); err != nil {
		t.Skipf("needs %s", name)
	}
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// mount mounts a device until the test ends.
func mount(t *testing.T, dev, kind string) string {
	t.Helper()
	dir := t.TempDir()
	real, err := filepath.EvalSymlinks(dev)
	if err == nil {
		err = unix.Mount(real, dir, kind, 0, "")
	}
	if err != nil {
		t.Fatalf("mount %s: %v", dev, err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, 0) })
	return dir
}

func testFileSystems(t *testing.T, w *world) {
	for kind, options := range map[string][]string{
		// By default the kernel fills the inode tables after ext4 is mounted, so the pages in
		// use would grow while they are counted below.
		"ext4": {"-E", "lazy_itable_init=0"},
		"xfs":  nil,
	} {
		t.Run(kind, func(t *testing.T) {
			w.disk = newMemDisk(crashGeometry)
			e := w.export()
			run(t, "mkfs."+kind, append(options, "-q", e.Path())...)
			dir := mount(t, e.Path(), kind)
			p := randomBytes(8 << 20)
			w.must(os.WriteFile(dir+"/file", p, 0o600))
			used := w.disk.used()
			w.must(syncFS(dir))
			w.must(os.Remove(dir + "/file"))
			w.must(syncFS(dir))
			full := w.disk.used()
			run(t, "fstrim", dir)
			// xfs frees removed blocks asynchronously.
			for i := 0; i < 40 && w.disk.used() > full-len(p)/memPage*9/10; i++ {
				time.Sleep(100 * time.Millisecond)
				w.must(syncFS(dir))
				run(t, "fstrim", dir)
			}
			if trimmed := w.disk.used(); trimmed > full-len(p)/memPage*9/10 {
				t.Errorf("fstrim of a removed file of %d pages: %d in use before, %d after (%d at first)", len(p)/memPage, full, trimmed, used)
			}
			w.must(os.WriteFile(dir+"/kept", p, 0o600))
			w.must(unix.Unmount(dir, 0))
			dir = mount(t, e.Path(), kind)
			if got, err := os.ReadFile(dir + "/kept"); err != nil || !bytes.Equal(got, p) {
				t.Errorf("a file reads otherwise after a mount: %v", err)
			}
			w.must(unix.Unmount(dir, 0))
			if kind == "ext4" {
				run(t, "e2fsck", "-fn", e.Path())
			} else {
				run(t, "xfs_repair", "-n", e.Path())
			}
			w.close(e)
		})
	}
}

func testMountIsNamed(t *testing.T, w *world) {
	w.disk = newMemDisk(crashGeometry)
	e := w.export()
	run(t, "mkfs.ext4", "-q", e.Path())
	dir := mount(t, e.Path(), "ext4")
	if err := e.Close(w.limit(), false); !errors.Is(err, ErrBusy) || !strings.Contains(err.Error(), "the file system on "+dir) {
		t.Errorf("Close of a mounted device = %v, want that it names %s", err, dir)
	}
	if !exists(e.Path()) {
		t.Error("a refused Close took the name away")
	}
	w.must(unix.Unmount(dir, 0))
	w.close(e)
}

// serveElsewhere serves a file under the world's name in another process.
func (w *world) serveElsewhere(file, resume string) *exec.Cmd {
	w.t.Helper()
	return startRole(w.t, "serve", "serving", w.serveArgs(file, resume)...)
}

func (w *world) serveArgs(file, resume string) []string {
	args := []string{string(w.o.Kind), string(w.o.Name), w.o.RunDir, resume, file}
	for _, n := range w.o.Names {
		args = append(args, string(n))
	}
	return args
}

func (w *world) exportFile(file string) *Exported {
	w.t.Helper()
	disk, err := openFileDisk(file, crashGeometry)
	w.must(err)
	e, err := Export(w.limit(), disk, w.o)
	w.must(err)
	return e
}

// kill kills a process, and checks that what it served does not keep it alive.
func (w *world) kill(cmd *exec.Cmd) {
	w.t.Helper()
	_ = cmd.Process.Kill()
	ended := do(func() error { _ = cmd.Wait(); return nil })
	select {
	case <-ended:
	case <-time.After(15 * time.Second):
		stacks := ""
		tasks, _ := filepath.Glob(filepath.Join("/proc", strconv.Itoa(cmd.Process.Pid), "task/*"))
		for _, task := range tasks {
			stat, _ := os.ReadFile(filepath.Join(task, "stat"))
			stack, _ := os.ReadFile(filepath.Join(task, "stack"))
			stacks += string(stat) + string(stack)
		}
		w.t.Fatalf("a killed process lives on:\n%s", stacks)
	}
}

func testDeath(t *testing.T, w *world) {
	file := filepath.Join(t.TempDir(), "disk")
	server := w.serveElsewhere(file, "")
	link := "/dev/weft/" + string(w.o.Name)
	fd := w.use(link)
	p := randomBytes(8192)
	_, err := unix.Pwrite(fd, p, 1<<20)
	w.must(err)
	w.kill(server)
	// I/O does not wait for a dead process: without a resume token it fails.
	w.must(w.within("a write to a dead device", do(func() error {
		if _, err := unix.Pwrite(fd, p, 0); err == nil {
			return errors.New("a write to a dead device was acknowledged")
		}
		return nil
	})))
	w.leave(fd)
	e := w.exportFile(file)
	fd = w.use(e.Path())
	got := aligned(len(p))
	_, err = unix.Pread(fd, got, 1<<20)
	if w.must(err); !bytes.Equal(got, p) {
		t.Error("what was acknowledged before the death is not there after")
	}
	w.leave(fd)
	w.close(e)

	w.kill(w.serveElsewhere(file, ""))
	w.must(Remove(w.limit(), w.o))
	if exists(link) {
		t.Error("Remove left the name of a dead device")
	}
}

// testDeathOfContainer: the agent's mounts disappear with it, and a loop device stays.
func testDeathOfContainer(t *testing.T, w *world) {
	file := filepath.Join(t.TempDir(), "disk")
	w.kill(startRole(t, inContainer, "serving", w.serveArgs(file, "")...))
	disk := readRecord(w.o).Disk
	if disk == "" {
		t.Fatal("the dead process has left no record")
	}
	w.must(Remove(w.limit(), w.o))
	left := func() string { return systemOf(Options{DevDir: devices}).diskText(disk, "loop/backing_file") }
	// A program that looks for a free loop device may have it open for a moment.
	for deadline := time.Now().Add(5 * time.Second); strings.Contains(left(), string(w.o.Name)); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("Remove left %s, which is over %s", disk, left())
		}
	}
}

func testDeathUnderMount(t *testing.T, w *world) {
	file := filepath.Join(t.TempDir(), "disk")
	server := w.serveElsewhere(file, "")
	link := "/dev/weft/" + string(w.o.Name)
	run(t, "mkfs.ext4", "-q", link)
	dir := mount(t, link, "ext4")
	w.must(os.WriteFile(dir+"/before", []byte("synced"), 0o600))
	w.must(syncFS(dir))
	w.kill(server)

	e := w.exportFile(file) // although the dead one is still mounted
	if users, err := e.Users(); err != nil || len(users) > 0 {
		t.Errorf("users of the new device: %v, %v; the mount is of the old one", users, err)
	}
	_ = os.WriteFile(dir+"/after", []byte("lost"), 0o600)
	w.must(unix.Unmount(dir, unix.MNT_DETACH))
	again := mount(t, e.Path(), "ext4")
	if got, err := os.ReadFile(again + "/before"); err != nil || string(got) != "synced" {
		t.Errorf("the new device has %q, %v; want what was synced to the old one", got, err)
	}
	if exists(again + "/after") {
		t.Error("a write to the dead device reached the new one")
	}
	w.must(unix.Unmount(again, 0))
	w.close(e)
}

// A thread that waits for a device of its own process must not keep the next process from
// removing the device.
func testKilledWaiting(t *testing.T, w *world) {
	cmd := startRole(t, "wait for itself", "waiting", w.serveArgs("", "")[:3]...)
	w.must(cmd.Process.Kill())
	var e *Exported
	w.must(w.within("an Export after the death", do(func() (err error) {
		for range 100 { // the kernel releases the dead process's name asynchronously
			if e, err = Export(w.limit(), w.disk, w.o); !errors.Is(err, ErrExported) {
				return err
			}
			time.Sleep(20 * time.Millisecond)
		}
		return err
	})))
	w.must(w.within("the dead process", do(func() error { _ = cmd.Wait(); return nil })))
	w.close(e)
}

func testKilledAnywhere(t *testing.T, w *world) {
	file := filepath.Join(t.TempDir(), "disk")
	for i := range 8 {
		cmd := roleCommand("serve", w.serveArgs(file, "")...)
		w.must(cmd.Start())
		time.Sleep(time.Duration(rand.IntN(120)) * time.Millisecond)
		w.kill(cmd)
		e := w.exportFile(file)
		fd := w.use(e.Path())
		_, err := unix.Pwrite(fd, randomBytes(4096), int64(i)<<20)
		w.leave(fd)
		w.must(err)
		w.close(e)
	}
}

func testTakenAway(t *testing.T, w *world) {
	e := w.export()
	select {
	case <-e.Done():
		t.Fatal("Done before the end")
	default:
	}
	switch w.o.Kind {
	case FUSE:
		w.must(e.sys.detachLoop(filepath.Base(e.Node())))
	case NBD: // nbd-client -d
		index, err := nbdIndex(filepath.Base(e.Node()))
		w.must(err)
		w.must(nbdDisconnect(index))
	case UBLK: // ublk del
		id, err := ublkID(filepath.Base(e.Node()))
		w.must(err)
		w.must(withUBLK(e.sys, func(c *ublkControl) error { return c.simple("stop", ublkStopDev, id, 0) }))
	}
	w.must(w.within("the end of the device", do(func() error { <-e.Done(); return nil })))
	w.close(e)
}

func writeSynced(path string, p []byte) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = f.Write(p)
	return errors.Join(err, f.Sync(), f.Close())
}

func syncFS(dir string) error {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Syncfs(fd)
}

// SPDX-License-Identifier: Apache-2.0

package fsfreeze

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// mounted mounts a new file system over a loop device, and returns where, and the device.
func mounted(t *testing.T, mkfs ...string) (dir string, device block.DeviceNumber) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	image := filepath.Join(t.TempDir(), "image")
	if err := errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, 64<<20)); err != nil {
		t.Fatal(err)
	}
	if _, err := exec.LookPath(mkfs[0]); err != nil {
		t.Skip(err)
	}
	if out, err := exec.Command(mkfs[0], append(mkfs[1:], image)...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %v: %s", mkfs, err, out)
	}
	dir = t.TempDir()
	if out, err := exec.Command("mount", "-o", "loop", image, dir).CombinedOutput(); err != nil {
		t.Skipf("this machine mounts no %s over a loop device: %v: %s", mkfs[0], err, out)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		t.Fatal(err)
	}
	return dir, block.DeviceNumber{Major: unix.Major(st.Dev), Minor: unix.Minor(st.Dev)}
}

// writing makes a file, and returns a channel that is closed when that has ended.
func writing(t *testing.T, dir string) <-chan struct{} {
	done := make(chan struct{})
	go func() {
		defer close(done)
		if f, err := os.CreateTemp(dir, "x"); err != nil {
			t.Error(err)
		} else if err := f.Close(); err != nil {
			t.Error(err)
		}
	}()
	return done
}

func TestTheKernelFreezes(t *testing.T) {
	dir, device := mounted(t, "mkfs.ext4", "-q")
	run := t.TempDir()
	f := New(Linux(), run, nil, quiet)
	z, changes := begin(f, device)
	changes.until(t, z, Synced)
	z.Freeze(time.Minute)
	changes.until(t, z, Frozen)
	waiting := writing(t, dir)
	select {
	case <-waiting:
		t.Error("a write ends while the file system is frozen")
	case <-time.After(100 * time.Millisecond):
	}
	other, more := begin(f, device)
	more.until(t, other, Synced)
	other.Freeze(time.Minute)
	if err := more.until(t, other, Failed); !errors.Is(err, ErrFrozen) {
		t.Errorf("frozen twice: %v, want %v", err, ErrFrozen)
	}
	select {
	case <-waiting:
		t.Error("the freeze that failed has thawed the other's file system")
	case <-time.After(100 * time.Millisecond):
	}
	z.End()
	changes.until(t, z, Thawed)
	<-waiting
}

// A snapshot of a frozen ext4 can be mounted by those who may only read it: its journal is empty. One
// that was not frozen cannot.
func TestACopyOfAFrozenFileSystemNeedsNoJournal(t *testing.T) {
	dir, device := mounted(t, "mkfs.ext4", "-q")
	<-writing(t, dir)
	under, err := os.ReadFile(filepath.Join("/sys/dev/block", device.String(), "loop/backing_file"))
	if err != nil {
		t.Skip(err)
	}
	image := strings.TrimSpace(string(under))
	if err := readerMounts(t, image); err == nil {
		t.Error("a copy that was not frozen can be mounted: this test shows nothing")
	}
	z, changes := begin(New(Linux(), t.TempDir(), nil, quiet), device)
	changes.until(t, z, Synced)
	z.Freeze(time.Minute)
	changes.until(t, z, Frozen)
	defer changes.until(t, z, Thawed)
	defer z.End()
	if err := readerMounts(t, image); err != nil {
		t.Error(err)
	}
}

// readerMounts copies what is under a device, and mounts the copy over one that cannot be written.
func readerMounts(t *testing.T, image string) error {
	t.Helper()
	taken, dir := filepath.Join(t.TempDir(), "taken"), t.TempDir()
	data, err := os.ReadFile(image)
	if err == nil {
		err = os.WriteFile(taken, data, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("losetup", "--read-only", "--find", "--show", taken).CombinedOutput()
	if err != nil {
		t.Skipf("no loop device: %v: %s", err, out)
	}
	loop := strings.TrimSpace(string(out))
	defer exec.Command("losetup", "--detach", loop).Run() //nolint:errcheck // the machine keeps it
	if err := unix.Mount(loop, dir, "ext4", unix.MS_RDONLY, ""); err != nil {
		return err
	}
	return unix.Unmount(dir, 0)
}

// A process that was killed has left the file system frozen, and the note of it.
func TestTheNextProcessThaws(t *testing.T) {
	dir, device := mounted(t, "mkfs.ext4", "-q")
	f := New(Linux(), t.TempDir(), nil, quiet)
	open, err := f.open(device)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.note(device), open[0].Freeze(), open[0].Close()); err != nil {
		t.Fatal(err)
	}
	waiting := writing(t, dir)
	f = New(Linux(), filepath.Dir(f.dir), nil, quiet)
	<-f.Recover()
	<-waiting
	if _, err := os.Stat(f.file(device)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the note of what is frozen remains: %v", err)
	}
}

// Another mount namespace has it mounted, and this process has not: as a container's agent finds it.
func TestAMountOfAnotherNamespaceIsFound(t *testing.T) {
	dir, device := mounted(t, "mkfs.ext4", "-q")
	other := exec.Command("unshare", "--mount", "sh", "-c", "echo there; read x; : > "+dir+"/written")
	in, err := other.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := other.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := other.Start(); err != nil {
		t.Skip(err)
	}
	ended := make(chan error, 1)
	t.Cleanup(func() { _ = in.Close() })
	if n, err := out.Read(make([]byte, 16)); err != nil || n == 0 {
		t.Skipf("no mount namespace here: %v", other.Wait())
	}
	if err := unix.Unmount(dir, 0); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // for that of mounted
		if err := unix.Mount("none", dir, "tmpfs", 0, ""); err != nil {
			t.Error(err)
		}
	})
	f := New(Linux(), t.TempDir(), nil, quiet)
	z, changes := begin(f, device)
	changes.until(t, z, Synced)
	z.Freeze(time.Minute)
	changes.until(t, z, Frozen)
	if _, err := in.Write([]byte("go\n")); err != nil {
		t.Fatal(err)
	}
	go func() { ended <- other.Wait() }()
	select {
	case <-ended:
		t.Error("the other namespace's write ends while the file system is frozen")
	case <-time.After(100 * time.Millisecond):
	}
	z.End()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	changes.until(t, z, Thawed)
}

func TestAFileSystemThatCannotBeFrozen(t *testing.T) {
	_, device := mounted(t, "mkfs.vfat")
	z, changes := begin(New(Linux(), t.TempDir(), nil, quiet), device)
	changes.until(t, z, Synced)
	z.Freeze(time.Minute)
	if err := changes.until(t, z, Failed); !errors.Is(err, ErrCannot) || !strings.Contains(err.Error(), "vfat") {
		t.Errorf("vfat: %v, want %v", err, ErrCannot)
	}
}

func TestTheAgentsOwnFileSystemIsNotFrozen(t *testing.T) {
	dir, device := mounted(t, "mkfs.ext4", "-q")
	state := filepath.Join(dir, "state")
	if err := os.Mkdir(state, 0o700); err != nil {
		t.Fatal(err)
	}
	z, changes := begin(New(Linux(), t.TempDir(), []string{state}, quiet), device)
	if err := changes.until(t, z, Failed); !errors.Is(err, ErrNeeded) {
		t.Errorf("with the agent's state: %v, want %v", err, ErrNeeded)
	}
}

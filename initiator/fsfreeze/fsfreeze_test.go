// SPDX-License-Identifier: Apache-2.0

package fsfreeze

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
)

var quiet = slog.New(slog.DiscardHandler)

// news is the changes of a freeze.
type news chan struct{}

func begin(f *Freezer, device block.DeviceNumber) (*Freeze, news) {
	n := make(news, 100)
	return f.Begin(device, func() { n <- struct{}{} }), n
}

// until waits until a freeze has come so far, and returns its error.
func (n news) until(t *testing.T, z *Freeze, want State) error {
	t.Helper()
	deadline := time.After(20 * time.Second)
	for {
		state, err := z.State()
		if state == want {
			return err
		}
		select {
		case <-n:
		case <-deadline:
			t.Fatalf("the freeze is %s (%v), want %s", state, err, want)
		}
	}
}

// machine is a fake Kernel. Its block device 8:0 has the partition 8:1, over which is 253:0.
type machine struct {
	mu     sync.Mutex
	mounts []Mount
	frozen map[block.DeviceNumber]bool
	takes  time.Duration // to freeze
	fails  error         // of the thaws
	did    []string
}

var (
	disk      = block.DeviceNumber{Major: 8}
	partition = block.DeviceNumber{Major: 8, Minor: 1}
	over      = block.DeviceNumber{Major: 253}
	btrfs     = block.DeviceNumber{Minor: 40}
	tree      = map[block.DeviceNumber][]block.DeviceNumber{disk: {disk, partition, over}}
)

func newMachine(mounts ...Mount) *machine {
	return &machine{mounts: mounts, frozen: map[block.DeviceNumber]bool{}}
}

func (m *machine) Mounts() ([]Mount, error) { return m.mounts, nil }

func (m *machine) Over(d block.DeviceNumber) ([]block.DeviceNumber, error) {
	if all, ok := tree[d]; ok {
		return all, nil
	}
	return nil, fs.ErrNotExist
}

func (m *machine) BlockDevice(path string) (block.DeviceNumber, bool) {
	return over, path == "/dev/vg/lv"
}

func (m *machine) Open(at Mount) (FileSystem, error) {
	if at.Path == "" {
		return nil, errors.New("another mount hides it")
	}
	return &fakeFS{m, at}, nil
}

func (m *machine) Holds(FileSystem, string) (bool, error) { return false, nil }

func (m *machine) done(what string, at Mount) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.did = append(m.did, what+" "+at.Point)
}

func (m *machine) has(d block.DeviceNumber) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.frozen[d]
}

type fakeFS struct {
	m  *machine
	at Mount
}

func (f *fakeFS) Sync() error  { f.m.done("sync", f.at); return nil }
func (f *fakeFS) Close() error { return nil }

func (f *fakeFS) Freeze() error {
	time.Sleep(f.m.takes)
	if f.m.has(f.at.Device) {
		return ErrFrozen
	}
	f.m.done("freeze", f.at)
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	f.m.frozen[f.at.Device] = true
	return nil
}

func (f *fakeFS) Thaw() error {
	f.m.mu.Lock()
	defer f.m.mu.Unlock()
	if f.m.fails == nil {
		f.m.frozen[f.at.Device] = false
	}
	return f.m.fails
}

func at(d block.DeviceNumber, point string) Mount { return Mount{Device: d, Point: point, Path: point} }

func TestEachFileSystemIsFrozenOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hidden := at(over, "/hidden")
		hidden.Path = ""
		subvolume := at(btrfs, "/b")
		subvolume.Disk = "/dev/vg/lv"
		m := newMachine(at(partition, "/a"), at(partition, "/a2"), hidden, at(over, "/c"), subvolume, at(block.DeviceNumber{Major: 9}, "/other"), at(block.DeviceNumber{Minor: 30}, "/proc"))
		z, changes := begin(New(m, t.TempDir(), nil, quiet), disk)
		changes.until(t, z, Synced)
		z.Freeze(time.Minute)
		changes.until(t, z, Frozen)
		if want := []string{"sync /a", "sync /c", "sync /b", "freeze /a", "freeze /c", "freeze /b"}; !slices.Equal(m.did, want) {
			t.Errorf("did %q, want %q", m.did, want)
		}
		z.End()
		synctest.Wait()
		if m.has(partition) || m.has(over) || m.has(btrfs) {
			t.Error("frozen after the end")
		}
	})
}

// What cannot be reached is not frozen, and that is no success.
func TestAFileSystemThatCannotBeReached(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hidden := at(over, "/hidden")
		hidden.Path = ""
		z, changes := begin(New(newMachine(at(partition, "/a"), hidden), t.TempDir(), nil, quiet), disk)
		if err := changes.until(t, z, Failed); err == nil {
			t.Error("no error")
		}
		none, changes := begin(New(newMachine(at(block.DeviceNumber{Major: 9}, "/other")), t.TempDir(), nil, quiet), disk)
		if err := changes.until(t, none, Failed); !errors.Is(err, ErrNone) {
			t.Errorf("without a mount: %v", err)
		}
	})
}

// Whatever its caller does, a freeze ends at its limit, also one that the kernel completes after it.
func TestAFreezeEndsAtItsLimit(t *testing.T) {
	for _, takes := range []time.Duration{0, 5 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			m := newMachine(at(partition, "/a"))
			m.takes = takes
			f := New(m, t.TempDir(), nil, quiet)
			z, changes := begin(f, disk)
			changes.until(t, z, Synced)
			z.Freeze(2 * time.Second)
			time.Sleep(time.Second)
			if _, err := os.Stat(f.file(disk)); err != nil {
				t.Errorf("nothing says that it may be frozen: %v", err)
			}
			if takes == 0 && !m.has(partition) {
				t.Error("not frozen after 1s")
			}
			time.Sleep(takes + 1001*time.Millisecond)
			synctest.Wait()
			if state, err := z.State(); m.has(partition) || state != Thawed || err != nil {
				t.Errorf("after its limit it is %s (%v), frozen: %v", state, err, m.has(partition))
			}
			if _, err := os.Stat(f.file(disk)); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("the note remains: %v", err)
			}
		})
	}
}

// One that ends while it is only synced freezes nothing; and one that ends while it syncs is given up.
func TestAFreezeThatEndsEarly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(at(partition, "/a"))
		z, changes := begin(New(m, t.TempDir(), nil, quiet), disk)
		z.End()
		changes.until(t, z, Thawed)
		z.Freeze(time.Minute)
		synctest.Wait()
		if m.has(partition) {
			t.Error("frozen after its end")
		}
	})
}

// What another program froze stays frozen.
func TestAnothersFreezeIsLeftAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(at(partition, "/a"), at(over, "/c"))
		m.frozen[over] = true
		z, changes := begin(New(m, t.TempDir(), nil, quiet), disk)
		changes.until(t, z, Synced)
		z.Freeze(time.Minute)
		if err := changes.until(t, z, Failed); !errors.Is(err, ErrFrozen) {
			t.Errorf("error %v", err)
		}
		synctest.Wait()
		if m.has(partition) || !m.has(over) {
			t.Errorf("frozen: ours %v, the other's %v", m.has(partition), m.has(over))
		}
	})
}

func TestAThawThatFailsIsRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newMachine(at(partition, "/a"))
		m.frozen[partition], m.fails = true, errors.New("no")
		f := New(m, t.TempDir(), nil, quiet)
		if err := f.note(disk); err != nil {
			t.Fatal(err)
		}
		gone := block.DeviceNumber{Major: 7}
		if err := f.note(gone); err != nil { // its device is not there any more
			t.Fatal(err)
		}
		f = New(m, f.dir[:len(f.dir)-len("/frozen")], nil, quiet)
		done := f.Recover()
		time.Sleep(10 * time.Second)
		z, changes := begin(f, disk)
		if err := changes.until(t, z, Failed); !errors.Is(err, ErrThaws) { // the thaw would be of this freeze
			t.Errorf("while that is being thawed: %v", err)
		}
		m.mu.Lock()
		m.fails = nil
		m.mu.Unlock()
		<-done
		if m.has(partition) {
			t.Error("frozen still")
		}
		if left, err := os.ReadDir(f.dir); err != nil || len(left) > 0 {
			t.Errorf("notes %v, %v", left, err)
		}
	})
}

func TestMountsAreParsed(t *testing.T) {
	text := "36 35 98:1 / /mnt\\0401 rw,noatime master:1 - ext4 /dev/weft/db1 rw\nbroken\n37 35 0:40 /sub /b rw - btrfs /dev/vg/lv rw\n38 35 0:5 / /proc rw - proc proc rw\n"
	got := fmt.Sprint(parseMounts(text, "/proc/7/root"))
	if want := "[{36 98:1 ext4 /mnt 1 /proc/7/root/mnt 1 /proc/7/root/dev/weft/db1} {37 0:40 btrfs /b /proc/7/root/b /proc/7/root/dev/vg/lv} {38 0:5 proc /proc /proc/7/root/proc }]"; got != want {
		t.Errorf("parsed\n%s, want\n%s", got, want)
	}
}

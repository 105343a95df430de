// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/backend"
	"weft.dev/weft/target/drive"
)

var (
	cluster = block.ClusterID{UUID: block.UUIDFromRandom([16]byte{2})}
	driveA  = block.DriveID{UUID: block.UUIDFromRandom([16]byte{3})}
)

func file(t *testing.T, path string) string {
	t.Helper()
	must(t, os.WriteFile(path, nil, 0o600))
	must(t, os.Truncate(path, int64(block.GiB)))
	return path
}

func newFiles(t *testing.T) (*Drives, string) {
	t.Helper()
	path := file(t, filepath.Join(t.TempDir(), "a"))
	return newDrives(Config{Files: []string{path}, FilesOnly: true}), path
}

func TestADriveHasOneProcess(t *testing.T) {
	t.Run("alone", func(t *testing.T) { hasOneProcess(t, Config{}) })
	t.Run("beside the kernel", func(t *testing.T) { hasOneProcess(t, Config{Locks: t.TempDir(), Shared: true}) })
}

func hasOneProcess(t *testing.T, c Config) {
	t.Helper()
	path := file(t, filepath.Join(t.TempDir(), "a"))
	c.Files, c.FilesOnly = []string{path}, true
	drives := func() *Drives { return newDrives(c) }
	mine, theirs := drives(), drives()
	must(t, mine.Format(path, cluster, driveA, ""))
	disk, err := mine.Open(path)
	must(t, err)
	if _, err := theirs.Open(path); !errors.Is(err, unix.EBUSY) || !strings.Contains(err.Error(), "another process") {
		t.Errorf("opening a drive of another process = %v, want %v", err, unix.EBUSY)
	}
	// A leg on it keeps the lock after its label's reader has gone.
	n, err := mine.Number(path)
	must(t, err)
	leg, err := mine.Device(n)
	must(t, err)
	must(t, disk.Close())
	if err := theirs.Format(path, cluster, driveA, ""); !errors.Is(err, unix.EBUSY) {
		t.Errorf("formatting a drive with a leg of another process = %v, want %v", err, unix.EBUSY)
	}
	if err := mine.Format(path, cluster, driveA, ""); !errors.Is(err, unix.EBUSY) {
		t.Errorf("formatting a drive with a leg = %v, want %v", err, unix.EBUSY)
	}
	must(t, leg.Close())
	disk, err = theirs.Open(path)
	must(t, err)
	must(t, disk.Close())
	if len(mine.held)+len(theirs.held) > 0 {
		t.Errorf("still held: %v, %v", mine.held, theirs.held)
	}
	if err := disk.Update(func(*drive.Label) error { return nil }); err == nil {
		t.Error("a label was written without the lock")
	}
}

// fakeInode is a file as Linux treats it: a writeback error is reported once to everyone who had
// the file open by then, and to the next opener if it was never reported. Then the error is
// forgotten, and so is the data.
type fakeInode struct {
	mu     sync.Mutex
	cache  map[int64][]byte
	broken bool
	wb     int  // number of failed writebacks
	seen   bool // the last one has been reported
}

type opened struct {
	backend.Calls
	inode *fakeInode
	told  int
}

func (i *fakeInode) open(kernel backend.Calls) backend.Calls {
	i.mu.Lock()
	defer i.mu.Unlock()
	o := &opened{kernel, i, i.wb}
	if !i.seen && i.wb > 0 {
		o.told = i.wb - 1
	}
	return o
}

func (o *opened) Pwrite(p []byte, off int64) (int, error) {
	o.inode.mu.Lock()
	defer o.inode.mu.Unlock()
	o.inode.cache[off] = bytes.Clone(p)
	return len(p), nil
}

// writeBack also happens by itself in the kernel.
func (o *opened) writeBack() {
	i := o.inode
	for off, p := range i.cache {
		if i.broken {
			i.wb, i.seen = i.wb+1, false
			break
		}
		o.Calls.Pwrite(p, off) //nolint:errcheck // a file of the test
	}
	clear(i.cache)
}

func (o *opened) Fdatasync() error {
	o.inode.mu.Lock()
	defer o.inode.mu.Unlock()
	o.writeBack()
	if o.told == o.inode.wb {
		return nil
	}
	o.told, o.inode.seen = o.inode.wb, true
	return unix.EIO
}

// lossy is a drive on such a file, with two legs.
type lossy struct {
	t     *testing.T
	path  string
	noted string // the directory for the notes of losses
	inode *fakeInode

	drives *Drives
	disk   *Disk
	legs   *Legs
}

func newLossy(t *testing.T) *lossy {
	_, path := newFiles(t)
	l := &lossy{t: t, path: path, noted: filepath.Join(t.TempDir(), "losses"), inode: &fakeInode{cache: map[int64][]byte{}}}
	l.start()
	must(t, l.drives.Format(path, cluster, driveA, ""))
	l.open()
	return l
}

// start begins a new process.
func (l *lossy) start() {
	l.drives = newDrives(Config{
		Files: []string{l.path}, FilesOnly: true, LossDir: l.noted,
		Label:  func(_ string, m drive.Medium) drive.Medium { return flushing{m, &l.inode.broken} },
		Medium: func(_ string, data block.Device) block.Device { return data },
		Calls:  func(_ string, kernel Calls) Calls { return l.inode.open(kernel) },
	})
}

func (l *lossy) open() {
	l.t.Helper()
	var err error
	l.disk, err = l.drives.Open(l.path)
	must(l.t, err)
	n, err := l.drives.Number(l.path)
	must(l.t, err)
	l.legs = NewLegs(l.drives.Device)
	for i, name := range []string{"weft-leg-x", "weft-leg-y"} {
		s := step(dm.OpCreate, tableOn(n, 4096+int64(i), 1))
		s.Device.Name = name
		must(l.t, l.legs.Do(s))
	}
	states, err := l.legs.Devices("weft-leg-")
	must(l.t, err)
	for i, s := range states {
		must(l.t, l.legs.Set(l.leg(i), dm.NodePath(s.Number)))
	}
}

func (l *lossy) leg(i int) block.LegID {
	return block.LegID{UUID: block.UUIDFromRandom([16]byte{byte(10 + i)})}
}

// export is a leg as one export uses it.
func (l *lossy) export(i int) block.Device {
	l.t.Helper()
	d, err := l.legs.Device("/dev/weft/leg/" + l.leg(i).String())
	must(l.t, err)
	return d
}

// TestALostFlushIsEveryonesOnTheDrive: the kernel reports the loss once, to whoever flushes first.
// The host of another leg must not be told that its writes are durable.
func TestALostFlushIsEveryonesOnTheDrive(t *testing.T) {
	l := newLossy(t)
	one, two := l.export(0), l.export(1)
	data := bytes.Repeat([]byte{1}, 4096)
	must(t, errors.Join(block.WriteAt(one, data, 0), block.WriteAt(two, data, 0)))
	l.inode.broken = true
	if err := block.Flush(one); !errors.Is(err, block.ErrMedium) {
		t.Fatalf("the flush that fails = %v", err)
	}
	l.inode.broken = false
	for what, d := range map[string]block.Device{"the same export": one, "another leg's export": two} {
		if err := block.Flush(d); !errors.Is(err, block.ErrMedium) {
			t.Errorf("a flush after that, of %s = %v, want an error for ever", what, err)
		}
	}
	if n := l.disk.Incarnation(); n != 1 {
		t.Errorf("the drive is incarnation %d, want 1", n)
	}
	// An export that is made later starts with what the leg holds.
	fresh := l.export(1)
	must(t, errors.Join(block.WriteAt(fresh, data, 0), block.Flush(fresh)))
	must(t, errors.Join(l.legs.Close(context.Background()), l.disk.Close()))
}

// TestALossOutlivesTheProcess: the next process finds a loss that the kernel has not reported yet,
// and on the label those that it has.
func TestALossOutlivesTheProcess(t *testing.T) {
	l := newLossy(t)
	one := l.export(0)
	must(t, block.WriteAt(one, bytes.Repeat([]byte{1}, 4096), 0))
	l.inode.broken = true
	l.inode.mu.Lock()
	(&opened{inode: l.inode}).writeBack() // by the kernel, and the process dies
	l.inode.mu.Unlock()
	l.inode.broken = false
	die := func() {
		t.Helper()
		must(t, l.disk.held.lock.Close())
		l.start()
		l.open()
	}
	die()
	if n := l.disk.Incarnation(); n != 1 {
		t.Errorf("after writes were lost that nobody was told of, the drive is incarnation %d, want 1", n)
	}
	fresh := l.export(0)
	must(t, errors.Join(block.WriteAt(fresh, bytes.Repeat([]byte{2}, 4096), 0), block.Flush(fresh)))
	must(t, l.disk.Update(func(label *drive.Label) error { label.Incarnation = l.disk.Incarnation(); return nil }))
	if n := l.disk.Incarnation(); n != 1 {
		t.Errorf("when the label tells of it, the drive is incarnation %d, want 1", n)
	}
	die()
	if n := l.disk.Incarnation(); n != 1 {
		t.Errorf("another process finds incarnation %d, want 1", n)
	}
	must(t, errors.Join(l.legs.Close(context.Background()), l.disk.Close()))
}

// TestALossOutlivesAProcessThatCannotWriteTheLabel: all flushes of the drive fail, those of its
// label too, until the process dies.
func TestALossOutlivesAProcessThatCannotWriteTheLabel(t *testing.T) {
	data := bytes.Repeat([]byte{1}, 4096)
	for what, lose := range map[string]func(l *lossy) error{
		"of data": func(l *lossy) error { return block.Flush(l.export(0)) },
		"of the label": func(l *lossy) error {
			return l.disk.Update(func(label *drive.Label) error { label.Incarnation++; return nil })
		},
	} {
		t.Run("a flush "+what+" fails", func(t *testing.T) {
			l := newLossy(t)
			one := l.export(0)
			must(t, block.WriteAt(one, data, 0))
			l.inode.broken = true
			if err := lose(l); err == nil {
				t.Fatal("the flush has not failed")
			}
			l.inode.broken = false
			if err := block.Flush(one); !errors.Is(err, block.ErrMedium) {
				t.Errorf("the export's flush after that = %v, want an error", err)
			}
			before := l.disk.Incarnation()
			must(t, l.disk.held.lock.Close()) // the process dies
			l.start()
			l.open()
			if n := l.disk.Incarnation(); before == 0 || n < before {
				t.Errorf("the next process finds incarnation %d, want the %d that this one had come to, above 0", n, before)
			}
			must(t, errors.Join(l.legs.Close(context.Background()), l.disk.Close()))
		})
	}
}

// flushing is a label whose flushes fail while the drive is broken.
type flushing struct {
	drive.Medium
	broken *bool
}

func (f flushing) Flush() error {
	if *f.broken {
		return unix.EIO
	}
	return f.Medium.Flush()
}

// TestADeviceBehindThePageCacheHasAVolatileCache: a drive without a cache of its own may still be
// written through the kernel's page cache, if it cannot be opened with O_DIRECT. A host that is
// told of no cache sends no flush.
func TestADeviceBehindThePageCacheHasAVolatileCache(t *testing.T) {
	dev := loopDevice(t)
	number, err := dm.MajorMinor(dev)
	must(t, err)
	must(t, os.WriteFile(fmt.Sprintf("/sys/dev/block/%v/queue/write_cache", number), []byte("write through"), 0))
	for _, buffered := range []bool{false, true} {
		d := newDrives(Config{})
		if buffered {
			d.medium = func(_ string, data block.Device) block.Device { return data }
		}
		volatile := func() bool {
			t.Helper()
			devices, err := d.Scan(t.Context())
			must(t, err)
			i := slices.IndexFunc(devices, func(x *pb.Device) bool { return x.GetPath() == dev })
			if i < 0 {
				t.Fatalf("%s is not among %v", dev, devices)
			}
			return devices[i].GetVolatileCache()
		}
		must(t, d.Format(dev, cluster, driveA, ""))
		if volatile() {
			t.Errorf("%s has a volatile cache when nobody has opened it", dev)
		}
		disk, err := d.Open(dev)
		must(t, err)
		if !buffered && !disk.held.file.Direct() {
			t.Skip("no direct IO on loop devices here")
		}
		leg, err := d.Device(number)
		must(t, err)
		if got := leg.Geometry().VolatileCache; got != buffered || volatile() != buffered {
			t.Errorf("behind the page cache %v: a volatile cache is served %v, reported %v", buffered, got, volatile())
		}
		must(t, errors.Join(leg.Close(), disk.Close()))
	}
}

// loopDevice is a kernel block device over a file.
func loopDevice(t *testing.T) string {
	t.Helper()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("no loop device: %v", err)
	}
	defer control.Close()
	n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
	if err != nil {
		t.Skipf("no loop device: %v", err)
	}
	path := fmt.Sprintf("/dev/loop%d", n)
	dev, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Skipf("no loop device: %v", err)
	}
	below, err := os.OpenFile(file(t, filepath.Join(t.TempDir(), "below")), os.O_RDWR, 0)
	must(t, err)
	defer below.Close()
	must(t, unix.IoctlSetInt(int(dev.Fd()), unix.LOOP_SET_FD, int(below.Fd())))
	t.Cleanup(func() {
		unix.IoctlSetInt(int(dev.Fd()), unix.LOOP_CLR_FD, 0) //nolint:errcheck // the test is over
		dev.Close()
	})
	return path
}

func TestAFileThatIsTakenAwayTakesNoIO(t *testing.T) {
	d, path := newFiles(t)
	must(t, d.Format(path, cluster, driveA, ""))
	disk, err := d.Open(path)
	must(t, err)
	defer disk.Close()
	old, err := d.Number(path)
	must(t, err)
	leg, err := d.Device(old)
	must(t, err)
	defer leg.Close()
	scan := func() []*pb.Device {
		t.Helper()
		devices, err := d.Scan(t.Context())
		must(t, err)
		return devices
	}
	data := bytes.Repeat([]byte("x"), 4096)
	const at = int64(100 * block.MiB)
	if devices := scan(); len(devices) != 1 || devices[0].GetDriveId() != driveA.String() {
		t.Fatalf("scan found %v, want the drive", devices)
	}
	must(t, block.WriteAt(leg, data, at))
	must(t, os.Rename(path, path+".away"))
	if devices := scan(); len(devices) != 0 {
		t.Fatalf("scan found %v, want nothing", devices)
	}
	if err := block.WriteAt(leg, data, at); !errors.Is(err, block.ErrGone) {
		t.Errorf("a write to a file that is gone = %v, want %v", err, block.ErrGone)
	}
	file(t, path)
	scan()
	if again, err := d.Number(path); err != nil || again == old {
		t.Errorf("another file has number %v, %v; the first one had %v", again, err, old)
	}
	if err := block.WriteAt(leg, data, at); !errors.Is(err, block.ErrGone) {
		t.Errorf("a write to a file that another one replaced = %v, want %v", err, block.ErrGone)
	}
	must(t, os.Rename(path+".away", path))
	scan()
	got := make([]byte, 4096)
	must(t, block.ReadAt(leg, got, at))
	if !bytes.Equal(got, data) {
		t.Error("the file that came back has not what was written")
	}
}

func TestAFileThatIsCutOffTakesNoIO(t *testing.T) {
	d, path := newFiles(t)
	must(t, d.Format(path, cluster, driveA, ""))
	disk, err := d.Open(path)
	must(t, err)
	defer disk.Close()
	n, err := d.Number(path)
	must(t, err)
	leg, err := d.Device(n)
	must(t, err)
	defer leg.Close()
	must(t, os.Truncate(path, int64(100*block.MiB)))
	_, err = d.Scan(t.Context())
	must(t, err)
	if err := block.WriteAt(leg, make([]byte, 4096), int64(200*block.MiB)); !errors.Is(err, block.ErrMedium) {
		t.Errorf("a write behind the end of a file that was cut off = %v, want %v", err, block.ErrMedium)
	}
}

func TestAFileWithForeignDataIsRefused(t *testing.T) {
	d, path := newFiles(t)
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	must(t, err)
	if _, err := f.WriteAt([]byte("XFSB"), 0); err != nil {
		t.Fatal(err)
	}
	must(t, f.Close())
	devices, err := d.Scan(t.Context())
	must(t, err)
	if len(devices) != 1 || !strings.Contains(devices[0].GetRefused(), "xfs") {
		t.Errorf("scan found %v, want it refused", devices)
	}
	if err := d.Format(path, cluster, driveA, ""); err == nil || !strings.Contains(err.Error(), "xfs") {
		t.Errorf("format = %v, want it refused for its file system", err)
	}
	must(t, d.Format(path, cluster, driveA, "xfs"))
}

// A target that may not write where the locks are uses those that are there, and does without the others: it
// holds its drives exclusively. One beside the kernel does not.
func TestATargetOfAnotherUserLocksWhatItCan(t *testing.T) {
	dir := t.TempDir()
	must(t, os.Chmod(filepath.Dir(dir), 0o755))
	there, missing := block.DeviceNumber{Major: 259, Minor: 1}, block.DeviceNumber{Major: 259, Minor: 2}
	root, other := newDrives(Config{Locks: dir}), newDrives(Config{Locks: dir})
	held, err := root.lockFile(there)
	must(t, errors.Join(err, held.Close()))
	must(t, os.Chmod(dir, 0o555))
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if os.Geteuid() == 0 { // root may write anywhere
		must(t, unix.Setfsuid(65534))
		defer func() { must(t, unix.Setfsuid(0)) }()
	}
	if held, err := other.lockFile(missing); err != nil || len(held) != 0 {
		t.Errorf("a lock that is not there: %d files, %v; want none", len(held), err)
	}
	held, err = other.lockFile(there)
	if err != nil || len(held) != 1 {
		t.Fatalf("a lock that is there: %d files, %v", len(held), err)
	}
	if _, err := root.lockFile(there); !errors.Is(err, unix.EBUSY) {
		t.Errorf("a lock that another has: %v, want %v", err, unix.EBUSY)
	}
	must(t, held.Close())
	other.shared = true
	if _, err := other.lockFile(missing); err == nil {
		t.Error("beside the kernel it does without a lock")
	}
}

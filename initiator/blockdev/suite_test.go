// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// runSuite checks that every kind behaves the same.
func runSuite(t *testing.T, k Kind) {
	for name, test := range map[string]func(*testing.T, *world){
		"WhatIsWrittenIsRead":                   testReadWrite,
		"TheGeometryIsTheDevices":               testGeometry,
		"AFlushReachesTheDevice":                testFlush,
		"WithoutACacheNoFlushIsSent":            testNoCache,
		"AReadOnlyDeviceIsNotWrittenTo":         testReadOnly,
		"DiscardsAndZeroesPassThrough":          testDiscard,
		"WithoutADiscardUnitNothingIsDiscarded": testNoDiscard,
		"AHeldWriteWaits":                       testHeld,
		"AnErrorIsAnError":                      testError,
		"ItGrowsWhileOpen":                      testResize,
		"CloseRefusesWhileOpen":                 testBusy,
		"ForceEndsWhatIsHeld":                   testForce,
		"ANameIsExportedOnce":                   testOnce,
		"TheSecondOfANameGetsAnother":           testOtherCluster,
		"ARequestIsNeverTooLarge":               testMaxIO,
		"AnIOTakesNoMemory":                     testAllocations,
		"FileSystemsLiveOnIt":                   testFileSystems,
		"AMountIsNamed":                         testMountIsNamed,
		"WhatADeadProcessLeftIsTakenAway":       testDeath,
		"WhatADeadContainerLeftIsTakenAway":     testDeathOfContainer,
		"AMountOverADeadProcessHarmsNobody":     testDeathUnderMount,
		"ItCanBeKilledAtAnyMoment":              testKilledAnywhere,
		"AProcessThatWaitsForItselfCanBeKilled": testKilledWaiting,
		"ADeviceTakenAwayByOthersIsNoticed":     testTakenAway,
	} {
		t.Run(name, func(t *testing.T) { test(t, newWorld(t, k)) })
	}
}

// world is a device and the place where it is exported.
type world struct {
	t    *testing.T
	disk *memDisk
	o    Options
	open map[int]bool // descriptors of devices
}

var plain = block.Geometry{Size: 64 * block.MiB, BlockSize: 4096, DiscardUnit: 4096, VolatileCache: true}

func newWorld(t *testing.T, k Kind) *world {
	name := fmt.Sprintf("test-%d-%08x", os.Getpid(), rand.Uint32())
	w := &world{t: t, disk: newMemDisk(plain), o: Options{Name: block.VolumeName(name), Kind: k, RunDir: t.TempDir()}, open: make(map[int]bool)}
	t.Cleanup(func() {
		for _, bad := range w.disk.bad {
			t.Errorf("the device was sent: %s", bad)
		}
		left, _ := filepath.Glob(filepath.Join(w.o.RunDir, "*.json"))
		if exists("/dev/weft/"+name) || exists("/dev/weft/."+name+".lock") || len(left) > 0 || exists(filepath.Join(w.o.RunDir, name+".fuse")) {
			t.Errorf("something is left of %s: %v", name, left)
		}
		if loops := systemOf(Options{DevDir: devices}).loopsOf(mark(w.o), fuseFile(w.o), ""); len(loops) > 0 {
			t.Errorf("left behind: %v", loops)
		}
	})
	return w
}

func (w *world) limit() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	w.t.Cleanup(cancel)
	return ctx
}

func (w *world) export() *Exported {
	w.t.Helper()
	e, err := Export(w.limit(), w.disk, w.o)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() {
		w.disk.release()
		if err := e.Close(w.limit(), true); err != nil {
			w.t.Error(err)
		}
	})
	return e
}

func (w *world) must(err error) {
	w.t.Helper()
	if err != nil {
		w.t.Fatal(err)
	}
}

// use opens the device, bypassing the page cache, until leave or the end of the test.
func (w *world) use(path string) int {
	w.t.Helper()
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	w.must(err)
	w.open[fd] = true
	w.t.Cleanup(func() { w.leave(fd) })
	return fd
}

// leave closes what use opened, and only once, since the number may be reused by then.
func (w *world) leave(fd int) {
	if w.open[fd] {
		delete(w.open, fd)
		unix.Close(fd)
	}
}

func (w *world) close(e *Exported) {
	w.t.Helper()
	w.must(e.Close(w.limit(), false))
}

// aligned returns memory that O_DIRECT accepts.
func aligned(n int) []byte {
	const page = 4096
	b := make([]byte, n+page)
	skip := page - int(uintptr(unsafe.Pointer(&b[0]))%page)
	return b[skip : skip+n]
}

func randomBytes(n int) []byte {
	b := aligned(n)
	var seed [32]byte
	binary.NativeEndian.PutUint64(seed[:], rand.Uint64())
	rand.NewChaCha8(seed).Read(b)
	return b
}

// within fails the test if something does not end within the time limit.
func (w *world) within(what string, done <-chan error) error {
	w.t.Helper()
	select {
	case err := <-done:
		return err
	case <-time.After(15 * time.Second):
		w.t.Fatalf("%s did not end within 15 s", what)
		return nil
	}
}

func do(f func() error) <-chan error {
	done := make(chan error, 1)
	go func() { done <- f() }()
	return done
}

func testReadWrite(t *testing.T, w *world) {
	e := w.export()
	fd := w.use(e.Path())
	model := aligned(int(plain.Size))
	for range 60 {
		n := (1 + rand.IntN(64)) * 4096
		at := rand.IntN((len(model)-n)/4096+1) * 4096
		p := randomBytes(n)
		copy(model[at:], p)
		_, err := unix.Pwrite(fd, p, int64(at))
		w.must(err)
	}
	got := aligned(len(model))
	for at := 0; at < len(got); at += 1 << 20 {
		_, err := unix.Pread(fd, got[at:at+1<<20], int64(at))
		w.must(err)
	}
	if !bytes.Equal(got, model) {
		t.Error("what was read is not what was written")
	}
	direct := aligned(len(model))
	w.must(block.ReadAt(w.disk, direct, 0))
	if !bytes.Equal(direct, model) {
		t.Error("the device has not what was written")
	}
	w.leave(fd)
	w.close(e)
}

func testGeometry(t *testing.T, w *world) {
	for _, blockSize := range []block.Size{512, 4096} {
		w.disk = newMemDisk(block.Geometry{Size: 8*block.MiB + 4096, BlockSize: blockSize, DiscardUnit: 64 * block.KiB, VolatileCache: true})
		e := w.export()
		disk := filepath.Base(e.Node())
		for attribute, want := range map[string]string{
			"size":                      fmt.Sprint((8*block.MiB + 4096).Sectors()),
			"queue/logical_block_size":  fmt.Sprint(uint64(blockSize)),
			"queue/write_cache":         "write back",
			"queue/rotational":          "0",
			"queue/discard_granularity": fmt.Sprint(64 << 10),
			"dev":                       e.Number().String(),
		} {
			if w.o.Kind == NBD && attribute == "queue/discard_granularity" {
				continue // the largest block size that this driver's device has ever had
			}
			if got := e.sys.diskText(disk, attribute); got != want {
				t.Errorf("%s with blocks of %s has %s %q, want %q", disk, blockSize, attribute, got, want)
			}
		}
		if to, err := os.Readlink(e.Path()); err != nil || to != "../"+disk {
			t.Errorf("%s leads to %q, %v; want ../%s", e.Path(), to, err, disk)
		}
		if e.Path() != "/dev/weft/"+string(w.o.Name) {
			t.Errorf("Path() = %q", e.Path())
		}
		w.close(e)
	}
}

func testFlush(t *testing.T, w *world) {
	e := w.export()
	fd := w.use(e.Path())
	_, err := unix.Pwrite(fd, randomBytes(4096), 0)
	w.must(err)
	before := w.disk.count(block.OpFlush)
	w.must(unix.Fsync(fd))
	if got := w.disk.count(block.OpFlush); got != before+1 {
		t.Errorf("fsync made %d flushes, want 1", got-before)
	}
	w.disk.fail(func(io *block.IO) error {
		if io.Op == block.OpFlush {
			return block.ErrMedium
		}
		return nil
	})
	_, err = unix.Pwrite(fd, randomBytes(4096), 0)
	w.must(err)
	if err := unix.Fsync(fd); !errors.Is(err, unix.EIO) {
		t.Errorf("fsync = %v when the device's flush fails, want EIO", err)
	}
	w.disk.fail(nil)
	w.leave(fd)
	w.close(e)
}

func testNoCache(t *testing.T, w *world) {
	g := plain
	g.VolatileCache = false
	w.disk = newMemDisk(g)
	e := w.export()
	// A loop device always reports a cache: a setting would stay for later users.
	if got := e.sys.diskText(filepath.Base(e.Node()), "queue/write_cache"); got != "write through" && w.o.Kind != FUSE {
		t.Errorf("write cache %q, want write through", got)
	}
	fd := w.use(e.Path())
	_, err := unix.Pwrite(fd, randomBytes(4096), 0)
	w.must(errors.Join(err, unix.Fsync(fd)))
	if got := w.disk.count(block.OpFlush); got != 0 {
		t.Errorf("%d flushes of a device without a cache", got)
	}
	w.leave(fd)
	w.close(e)
}

const (
	blkDiscard = 0x1277 // BLKDISCARD
	blkZeroOut = 0x127f // BLKZEROOUT
)

func ioctlRange(fd int, op uintptr, off, n uint64) error {
	r := [2]uint64{off, n}
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), op, uintptr(unsafe.Pointer(&r))); e != 0 {
		return e
	}
	return nil
}

func testDiscard(t *testing.T, w *world) {
	e := w.export()
	fd := w.use(e.Path())
	_, err := unix.Pwrite(fd, randomBytes(4<<20), 0)
	w.must(err)
	w.must(ioctlRange(fd, blkDiscard, 1<<20, 1<<20))
	if got := w.disk.count(block.OpDiscard) + w.disk.count(block.OpWriteZeroes); got == 0 {
		t.Error("the discard did not reach the device")
	}
	if got, want := w.disk.used(), 3<<20/memPage; got != want {
		t.Errorf("%d pages in use after a discard, want %d", got, want)
	}
	w.must(ioctlRange(fd, blkZeroOut, 2<<20, 1<<20))
	got := aligned(4 << 20)
	_, err = unix.Pread(fd, got, 0)
	w.must(err)
	if !bytes.Equal(got[2<<20:3<<20], make([]byte, 1<<20)) {
		t.Error("what was zeroed does not read as zeroes")
	}
	if bytes.Equal(got[3<<20:], make([]byte, 1<<20)) {
		t.Error("more was zeroed than was asked for")
	}
	w.leave(fd)
	w.close(e)
}

func testNoDiscard(t *testing.T, w *world) {
	g := plain
	g.DiscardUnit = 0
	w.disk = newMemDisk(g)
	e := w.export()
	fd := w.use(e.Path())
	_, err := unix.Pwrite(fd, randomBytes(1<<20), 0)
	w.must(err)
	if err := ioctlRange(fd, blkDiscard, 0, 1<<20); !errors.Is(err, unix.EOPNOTSUPP) {
		t.Errorf("BLKDISCARD = %v, want EOPNOTSUPP", err)
	}
	w.must(ioctlRange(fd, blkZeroOut, 0, 512<<10)) // by writing, if there is no other way
	if got := w.disk.count(block.OpDiscard); got != 0 {
		t.Errorf("%d discards of a device that has none", got)
	}
	w.leave(fd)
	w.close(e)
}

func isWrite(io *block.IO) bool { return io.Op == block.OpWrite }

func testHeld(t *testing.T, w *world) {
	e := w.export()
	fd := w.use(e.Path())
	w.disk.hold(func(io *block.IO) bool { return isWrite(io) && io.Off < 1<<20 })
	written := do(func() error { _, err := unix.Pwrite(fd, randomBytes(8192), 0); return err })
	<-w.disk.arrived
	// Other I/O continues meanwhile.
	other := do(func() error {
		_, err := unix.Pwrite(fd, randomBytes(8192), 2<<20)
		if err == nil {
			_, err = unix.Pread(fd, aligned(8192), 4<<20)
		}
		return err
	})
	w.must(w.within("a write elsewhere", other))
	select {
	case err := <-written:
		t.Fatalf("a held write ended: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	w.disk.release()
	w.must(w.within("the released write", written))
	w.leave(fd)
	w.close(e)
}

func testError(t *testing.T, w *world) {
	e := w.export()
	fd := w.use(e.Path())
	w.disk.fail(func(io *block.IO) error {
		if io.Op != block.OpFlush && io.Off == 1<<20 {
			return block.ErrMedium
		}
		return nil
	})
	if _, err := unix.Pwrite(fd, randomBytes(4096), 1<<20); !errors.Is(err, unix.EIO) {
		t.Errorf("a write that the device fails = %v, want EIO", err)
	}
	if _, err := unix.Pread(fd, aligned(4096), 1<<20); !errors.Is(err, unix.EIO) {
		t.Errorf("a read that the device fails = %v, want EIO", err)
	}
	_, err := unix.Pwrite(fd, randomBytes(4096), 0)
	w.must(err)
	w.leave(fd)
	w.close(e)
}

func testResize(t *testing.T, w *world) {
	e := w.export()
	fd := w.use(e.Path())
	p := randomBytes(4096)
	_, err := unix.Pwrite(fd, p, 0)
	w.must(err)
	w.disk.grow(2 * plain.Size)
	if err := e.Resize(w.limit()); err != nil {
		if errors.Is(err, errors.ErrUnsupported) {
			t.Skip(err)
		}
		t.Fatal(err)
	}
	end, err := unix.Seek(fd, 0, unix.SEEK_END)
	if w.must(err); end != 2*int64(plain.Size) {
		t.Errorf("size %d after growing, want %d", end, 2*plain.Size)
	}
	_, err = unix.Pwrite(fd, p, 2*int64(plain.Size)-4096)
	w.must(err)
	got := aligned(4096)
	_, err = unix.Pread(fd, got, 0)
	if w.must(err); !bytes.Equal(got, p) {
		t.Error("growing changed what was written before")
	}
	w.leave(fd)
	w.close(e)
}

func testBusy(t *testing.T, w *world) {
	e := w.export()
	sleep := startHolding(t, e.Path())
	err := e.Close(w.limit(), false)
	var busy *BusyError
	if !errors.As(err, &busy) || !errors.Is(err, ErrBusy) || len(busy.Users) != 1 || busy.Users[0].PID != sleep.Process.Pid {
		t.Fatalf("Close while process %d has it open = %v, want that it is named", sleep.Process.Pid, err)
	}
	if !strings.Contains(err.Error(), fmt.Sprintf("process %d", sleep.Process.Pid)) {
		t.Errorf("the refusal %q does not name the process", err)
	}
	fd := w.use(e.Path()) // it still serves
	_, err = unix.Pwrite(fd, randomBytes(4096), 0)
	w.must(err)
	w.leave(fd)
	w.must(sleep.Process.Kill())
	_ = sleep.Wait()
	w.close(e)
	w.close(e) // closing it again is no error
}

func testForce(t *testing.T, w *world) {
	e := w.export()
	fd := w.use(e.Path())
	w.disk.hold(isWrite)
	written := do(func() error { _, err := unix.Pwrite(fd, randomBytes(4096), 0); return err })
	<-w.disk.arrived
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err := e.Close(ctx, true); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("forced Close while the device keeps a write = %v, want that it waits for the device", err)
	}
	if err := w.within("the held write", written); err == nil {
		t.Error("a write that the device never did was acknowledged")
	}
	w.disk.release()
	w.must(e.Close(w.limit(), true))
	if _, err := unix.Pwrite(fd, randomBytes(4096), 0); err == nil {
		t.Error("a write after the end was acknowledged")
	}
	w.leave(fd)
}

func testOnce(t *testing.T, w *world) {
	e := w.export()
	if _, err := Export(w.limit(), w.disk, w.o); !errors.Is(err, ErrExported) {
		t.Errorf("second Export = %v, want ErrExported", err)
	}
	if err := Remove(w.limit(), w.o); !errors.Is(err, ErrExported) {
		t.Errorf("Remove of what is served = %v, want ErrExported", err)
	}
	w.close(e)
	w.must(Remove(w.limit(), w.o))
	w.close(w.export())
}

func testOtherCluster(t *testing.T, w *world) {
	server := w.serveElsewhere(filepath.Join(t.TempDir(), "disk"), "")
	ours := *w
	ours.o.RunDir, ours.disk = t.TempDir(), newMemDisk(plain)
	if _, err := Export(w.limit(), ours.disk, ours.o); !errors.Is(err, ErrExported) || !strings.Contains(err.Error(), w.o.RunDir) {
		t.Errorf("Export of the only name, which another cluster has = %v, want ErrExported that says where", err)
	}
	name, other := w.o.Name, w.o.Name.Beside(block.VolumeID{})
	leads := func(name block.VolumeName) string {
		to, _ := os.Readlink("/dev/weft/" + string(name))
		return filepath.Base(to)
	}
	theirs := leads(name)
	w.must(Remove(w.limit(), ours.o))
	unchanged := func(when string) {
		t.Helper()
		if now := leads(name); now != theirs {
			t.Errorf("%s, the first one's name leads to %q, before it was %q", when, now, theirs)
		}
	}
	unchanged("after a refusal")

	var chosen []block.VolumeName
	ours.o.Names = []block.VolumeName{name, other}
	ours.o.Chosen = func(n block.VolumeName) error { chosen = append(chosen, n); return nil }
	freeze(t, server.Process) // the second one asks it nothing
	e := ours.export()
	if e.Path() != "/dev/weft/"+string(other) || leads(other) != filepath.Base(e.Node()) {
		t.Errorf("the second device is %s, which leads to %s; its node is %s", e.Path(), leads(other), e.Node())
	}
	fd := ours.use(e.Path())
	unchanged("beside the second")
	w.kill(server)
	w.must(RemoveAll(w.limit(), ours.o))
	unchanged("while its device is there")
	w.must(Remove(w.limit(), w.o)) // what the dead process left
	if to := leads(name); to != "." {
		t.Errorf("the removed device's name leads to %s", to)
	}
	if now := leads(other); now != filepath.Base(e.Node()) {
		t.Errorf("after the first was removed, %s leads to %s, not to %s", other, now, e.Node())
	}
	ours.leave(fd)
	ours.close(e)
	if exists("/dev/weft/"+string(other)) || exists(systemOf(Options{DevDir: devices}).claimFile(other)) {
		t.Error("the second device left its name")
	}
	w.close(ours.export())
	if want := []block.VolumeName{other, name}; !slices.Equal(chosen, want) {
		t.Errorf("chosen: %v, want %v", chosen, want)
	}
}

// testAllocations counts what the whole process takes from Go's heap while its device is read and
// written, one I/O at a time, small and large.
func testAllocations(t *testing.T, w *world) {
	if raceDetector {
		t.Skip("the race detector makes pools drop items")
	}
	e := w.export()
	fd := w.use(e.Path())
	for _, size := range []int{4 << 10, 128 << 10} {
		p := randomBytes(size)
		for what, do := range map[string]func() (int, error){
			"read":  func() (int, error) { return unix.Pread(fd, p, 1<<20) },
			"write": func() (int, error) { return unix.Pwrite(fd, p, 1<<20) },
		} {
			const warm, n = 50, 500
			var before, after runtime.MemStats
			for i := range warm + n {
				if i == warm {
					runtime.ReadMemStats(&before)
				}
				_, err := do()
				w.must(err)
			}
			runtime.ReadMemStats(&after)
			if each := float64(after.Mallocs-before.Mallocs) / n; each > 0.1 {
				t.Errorf("a %s of %d KiB allocates %.2f times", what, size>>10, each)
			}
		}
	}
	w.leave(fd)
	w.close(e)
}

func testMaxIO(t *testing.T, w *world) {
	g := plain
	g.MaxIO = 64 * block.KiB
	w.disk = newMemDisk(g)
	e := w.export()
	fd := w.use(e.Path())
	p := randomBytes(1 << 20)
	_, err := unix.Pwrite(fd, p, 0)
	w.must(err)
	got := aligned(len(p))
	_, err = unix.Pread(fd, got, 0)
	w.must(err)
	w.must(ioctlRange(fd, blkDiscard, 8<<20, 8<<20))
	if !bytes.Equal(got, p) {
		t.Error("what was read is not what was written")
	}
	w.leave(fd)
	w.close(e)
	if w.disk.largest > int64(g.MaxIO) {
		t.Errorf("the device got an IO of %d bytes, it takes %s", w.disk.largest, g.MaxIO)
	}
}

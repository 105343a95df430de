// SPDX-License-Identifier: Apache-2.0

package dm

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// TestOverTheKernel runs the suite that the fake passes over the real kernel.
func TestOverTheKernel(t *testing.T) {
	requireKernel(t)
	runSuite(t, kernelWorld)
}

// requireKernel skips the test where there is no device mapper. If WEFT_REQUIRE_DM is set,
// the test fails instead.
func requireKernel(t *testing.T) {
	t.Helper()
	skip := t.Skipf
	if os.Getenv("WEFT_REQUIRE_DM") != "" {
		skip = t.Fatalf
	}
	if os.Getuid() != 0 {
		skip("needs root")
	}
	c, err := Open()
	if err != nil {
		skip("needs a kernel with device-mapper: %v", err)
	}
	defer c.Close()
	if targets, err := c.Targets(); err != nil {
		t.Fatal(err)
	} else if _, ok := targets["mirror"]; !ok {
		skip("needs the mirror target (module dm-mirror)")
	}
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		skip("needs loop devices: %v", err)
	}
}

func kernelWorld(t *testing.T) *world {
	c, err := Open()
	must(t, err)
	t.Cleanup(func() { must(t, c.Close()) })
	w := &world{client: c, kernel: c.kernel, prefix: fmt.Sprintf("weft-test-%d-", os.Getpid())}
	for i := range 6 {
		w.disks = append(w.disks, RefTo(loopDisk(t, fmt.Sprint("disk", i)).Number))
	}
	w.hold = func(name string) func() {
		f, err := os.Open(nodeOf(t, c, name))
		must(t, err)
		return func() { f.Close() }
	}
	w.ios = func(name string, reads, writes int) {
		f, err := os.OpenFile(nodeOf(t, c, name), os.O_RDWR|unix.O_DIRECT, 0)
		must(t, err)
		defer f.Close()
		for range writes {
			_, err := f.WriteAt(aligned(4096), 0)
			must(t, err)
		}
		for range reads {
			_, err := f.ReadAt(aligned(4096), 0)
			must(t, err)
		}
	}
	// The write hangs until the test swaps the table, and then succeeds.
	w.failLeg = func(name string) {
		f, err := os.OpenFile(nodeOf(t, c, name), os.O_RDWR|unix.O_DIRECT, 0)
		must(t, err)
		written := make(chan error, 1)
		go func() {
			defer f.Close()
			_, err := f.WriteAt(aligned(4096), 0)
			written <- err
		}()
		t.Cleanup(func() {
			select {
			case err := <-written:
				must(t, err)
			case <-time.After(20 * time.Second):
				t.Error("the held write was never released")
			}
		})
	}
	return w
}

func loopDisk(t *testing.T, name string) Loop {
	t.Helper()
	file := filepath.Join(t.TempDir(), name)
	must(t, os.WriteFile(file, nil, 0o600))
	must(t, os.Truncate(file, int64(diskSize)))
	l, err := new(Loops).Attach(file)
	must(t, err)
	t.Cleanup(func() { must(t, new(Loops).Detach(l)) })
	return l
}

// nodeOf waits for devtmpfs, which may lag behind.
func nodeOf(t *testing.T, c *Client, name string) string {
	t.Helper()
	info, err := c.Info(name)
	must(t, err)
	path := NodePath(info.Number)
	for range 50 {
		if n, err := MajorMinor(path); err == nil && n == info.Number {
			return path
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Fatalf("%s has no node %s", name, path)
	return ""
}

func TestAWriteIsBelowTheDeviceWhenItReturns(t *testing.T) {
	requireKernel(t)
	w := kernelWorld(t)
	must(t, w.client.Do(Step{OpCreate, w.device("a", w.linear(0))}))
	defer func() { must(t, w.remove(w.name("a"))) }()
	nodeOf(t, w.client, w.name("a"))
	data := bytes.Repeat([]byte{7}, 12288)
	must(t, w.client.Write(w.name("a"), data[1:8193], 4096)) // wherever it is in memory
	_, minor, _ := strings.Cut(string(w.disks[0]), ":")
	disk, err := os.OpenFile("/dev/loop"+minor, os.O_RDONLY|unix.O_DIRECT, 0)
	must(t, err)
	defer disk.Close()
	got := aligned(16384)
	_, err = disk.ReadAt(got, 0)
	must(t, err)
	if want := slices.Concat(make([]byte, 4096), data[:8192], make([]byte, 4096)); !bytes.Equal(got, want) {
		t.Errorf("the disk below begins with %d, %d, %d, %d", got[0], got[4096], got[8192], got[12288])
	}
	if err := w.client.Write(w.name("a"), data[:100], 0); !errors.Is(err, unix.EINVAL) {
		t.Errorf("a write of a part of a block: %v, want EINVAL", err)
	}
	if err := w.client.Write(w.name("b"), data, 0); !NotFound(err) {
		t.Errorf("a write to a device that is not there: %v", err)
	}
}

// TestNothingWritesWhatIsUnwritable: dm-flakey does that, and it is there to break things for tests.
func TestNothingWritesWhatIsUnwritable(t *testing.T) {
	requireKernel(t)
	w := kernelWorld(t)
	skip := t.Skipf
	if os.Getenv("WEFT_REQUIRE_DM") != "" {
		skip = t.Fatalf
	}
	if targets, err := w.client.Targets(); err != nil {
		t.Fatal(err)
	} else if _, ok := targets["flakey"]; !ok {
		skip("needs the flakey target (module dm-flakey)")
	}
	must(t, w.client.Do(Step{OpCreate, w.device("below", w.linear(0))}))
	defer func() { must(t, w.remove(w.name("below"))) }()
	open := func(name string) *os.File {
		f, err := os.OpenFile(nodeOf(t, w.client, w.name(name)), os.O_RDWR|unix.O_DIRECT, 0)
		must(t, err)
		return f
	}
	data := aligned(4096)
	copy(data, "as it was")
	below := open("below")
	_, err := below.WriteAt(data, 8192)
	must(t, err)
	must(t, below.Close())

	must(t, w.client.Do(Step{OpCreate, w.device("a", Whole(w.linear(0).Size(), Unwritable{Ref(w.name("below"))}))}))
	defer func() { must(t, w.remove(w.name("a"))) }()
	info, err := w.client.Info(w.name("a"))
	must(t, err)
	must(t, WriteThrough("/", info.Number))
	a := open("a")
	defer a.Close()
	unchanged := func(after string) {
		t.Helper()
		got := aligned(4096)
		if _, err := a.ReadAt(got, 8192); err != nil || !bytes.Equal(got, data) {
			t.Errorf("after %s it reads %.16q, %v; want %q", after, got, err, "as it was")
		}
	}
	unchanged("nothing")
	time.Sleep(1500 * time.Millisecond) // flakey counts seconds
	unchanged("a while")
	if _, err := a.WriteAt(aligned(4096), 8192); !errors.Is(err, unix.EIO) {
		t.Errorf("a write: %v, want EIO", err)
	}
	unchanged("a write")
	discarded := [2]uint64{8192, 4096}
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, a.Fd(), unix.BLKDISCARD, uintptr(unsafe.Pointer(&discarded))); errno == 0 {
		t.Error("a discard succeeded")
	}
	unchanged("a discard")
	if err := a.Sync(); err != nil {
		t.Errorf("a flush, of which nothing is to be seen below: %v", err)
	}
}

func TestLoopDevicesAreFoundAgain(t *testing.T) {
	requireKernel(t)
	loop := loopDisk(t, "disk")
	if n, err := MajorMinor(loop.Path); err != nil || n != loop.Number {
		t.Errorf("MajorMinor(%s) = %v, %v; want %v", loop.Path, n, err, loop.Number)
	}
	again, err := new(Loops).Attach(loop.File)
	if err != nil || again != loop {
		t.Errorf("Attach a second time = %+v, %v; want %+v", again, err, loop)
	}
	if all, err := new(Loops).List(); err != nil || !slices.Contains(all, loop) {
		t.Errorf("List() = %+v, %v; want %+v in it", all, err, loop)
	}
	must(t, new(Loops).Detach(loop))
	must(t, new(Loops).Detach(loop))
	if got, found, err := new(Loops).Find(loop.File); found || err != nil {
		t.Errorf("Find after Detach = %+v, %v, %v; want nothing", got, found, err)
	}
	if _, err := new(Loops).Attach(filepath.Join(t.TempDir(), "nothing")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("Attach of no file: %v, want that it does not exist", err)
	}
}

func TestAFileOfAnotherNameIsAnotherLoop(t *testing.T) {
	sys, dev, run := t.TempDir(), "/dev", t.TempDir()
	must(t, os.WriteFile(run+"/a", nil, 0o600))
	for name, file := range map[string]string{"loop0": run + "/a", "loop3": run + "/a (deleted)", "loop12": "/run/b c"} {
		must(t, os.MkdirAll(filepath.Join(sys, "block", name, "loop"), 0o755))
		must(t, os.WriteFile(filepath.Join(sys, "block", name, "loop/backing_file"), []byte(file+"\n"), 0o644))
		must(t, os.WriteFile(filepath.Join(sys, "block", name, "dev"), []byte("7:"+strings.TrimPrefix(name, "loop")+"\n"), 0o644))
	}
	must(t, os.MkdirAll(filepath.Join(sys, "block/loop5"), 0o755)) // not attached
	l := &Loops{Sys: sys, Dev: dev}
	all, err := l.List()
	if err != nil || len(all) != 3 || all[2] != (Loop{block.DeviceNumber{Major: 7, Minor: 12}, "/dev/loop12", "/run/b c"}) {
		t.Errorf("List() = %+v, %v; want three, the last over /run/b c", all, err)
	}
	find := func(when string, minor uint32) {
		t.Helper()
		if got, found, err := l.Find(run + "/a"); err != nil || !found || got.Number.Minor != minor {
			t.Errorf("%s: Find = %+v, %v, %v; want loop%d", when, got, found, err, minor)
		}
	}
	find("at first", 0)
	find("again", 0)
	backing := filepath.Join(sys, "block/loop0/loop/backing_file")
	must(t, os.WriteFile(backing, []byte("/run/other\n"), 0o644))
	if got, found, err := l.Find(run + "/a"); found || err != nil {
		t.Errorf("when its device has another file, Find = %+v, %v, %v", got, found, err)
	}
	must(t, os.WriteFile(filepath.Join(sys, "block/loop3/loop/backing_file"), []byte(run+"/a\n"), 0o644))
	find("over another device", 3)
	must(t, os.Remove(run+"/a"))
	if got, found, err := l.Find(run + "/a"); found || err != nil {
		t.Errorf("without the file, Find = %+v, %v, %v", got, found, err)
	}
}

func TestControlIsFoundInProcMisc(t *testing.T) {
	misc := filepath.Join(t.TempDir(), "misc")
	must(t, os.WriteFile(misc, []byte("237 loop-control\n236 device-mapper\n  1 psaux\n"), 0o644))
	if n, err := miscMinor(misc, "device-mapper"); n != 236 || err != nil {
		t.Errorf("miscMinor(device-mapper) = %d, %v; want 236", n, err)
	}
	if _, err := miscMinor(misc, "nothing"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("miscMinor(nothing): %v, want that it does not exist", err)
	}
}

func TestMajorMinorWantsABlockDevice(t *testing.T) {
	if _, err := MajorMinor("/dev/null"); !errors.Is(err, syscall.ENOTBLK) {
		t.Errorf("MajorMinor(/dev/null): %v, want ENOTBLK", err)
	}
	if _, err := MajorMinor("/nothing"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("MajorMinor(/nothing): %v, want that it does not exist", err)
	}
}

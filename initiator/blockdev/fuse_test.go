// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// TestFUSE runs the suite over FUSE and a loop device, which most kernels support.
func TestFUSE(t *testing.T) {
	require(t, FUSE)
	setFUSERing(t, false)
	runFUSESuite(t)
}

func TestFUSEOutlivesItsProcess(t *testing.T) {
	require(t, FUSE)
	if !systemOf(Options{DevDir: devices}).probe(FUSE).Survives {
		t.Skip("the kernel does not send FUSE requests again")
	}
	runResumeSuite(t, FUSE)
	for name, test := range map[string]func(*testing.T, *world){
		"AContainersDeviceIsTakenOver":       testResumeOutOfContainer,
		"ADeviceIsLeftToTheNextProcess":      testLeave,
		"WithoutAHolderItEndsWithItsProcess": testNoHolder,
	} {
		t.Run(name, func(t *testing.T) { test(t, newWorld(t, FUSE)) })
	}
}

// runFUSESuite runs the suite in the way in which FUSE works now.
func runFUSESuite(t *testing.T) {
	runSuite(t, FUSE)
	for name, test := range map[string]func(*testing.T, *world){
		"ADeviceThatAnswersNothingIsSetUpAndTornDown": testUnanswering,
		"AReadThatIsNotAnsweredEndsTheSetUp":          testSetUpLimit,
		"OnlyWhatWasNotFlushedIsFlushed":              testFlushes,
		"AFrozenProcessHoldsIO":                       testFrozen,
	} {
		t.Run(name, func(t *testing.T) { test(t, newWorld(t, FUSE)) })
	}
}

func anything(*block.IO) bool { return true }

// The kernel flushes while it makes a loop device. A program that opens the same loop number
// meanwhile would wait for that flush, whichever volume it wants.
func testUnanswering(t *testing.T, w *world) {
	w.disk.hold(anything)
	e := w.export()
	holder := startHolding(t, e.Node())
	w.must(holder.Process.Kill())
	_ = holder.Wait()
	w.must(w.within("Close", do(func() error { return e.Close(w.limit(), false) })))
	if len(w.disk.arrived) > 0 {
		t.Errorf("%d I/Os were sent to a device that nobody used", len(w.disk.arrived))
	}

	e = w.export()
	w.must(w.within("forced Close", do(func() error { return e.Close(w.limit(), true) })))
}

// While the loop device is made only the kernel reads, if it looks for partitions.
func testSetUpLimit(t *testing.T, w *world) {
	e := w.export()
	w.disk.hold(anything)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	var read error
	err := w.within("the set-up", do(func() error {
		return e.front.(*fuseDisk).setUp(ctx, func() error {
			fd, err := unix.Open(e.Node(), unix.O_RDONLY|unix.O_CLOEXEC, 0)
			if err == nil {
				_, read = unix.Pread(fd, make([]byte, 512), 0)
				unix.Close(fd)
			}
			return errors.Join(err, read)
		})
	}))
	if !errors.Is(err, context.DeadlineExceeded) || !errors.Is(read, unix.EIO) {
		t.Errorf("set-up that reads what is not answered = %v, its read %v; want the end of the deadline and EIO", err, read)
	}
	w.disk.release()
	w.close(e)
}

func testFlushes(t *testing.T, w *world) {
	e := w.export()
	fd := w.use(e.Path())
	for _, step := range []struct {
		what string
		do   func() error
		want int
	}{
		{"the first fsync, by which the device keeps what an earlier process wrote", nil, 1},
		{"fsync with nothing written since", nil, 0},
		{"fsync after a write", func() error { _, err := unix.Pwrite(fd, randomBytes(4096), 0); return err }, 1},
		{"fsync after a discard", func() error { return ioctlRange(fd, blkDiscard, 0, 1<<20) }, 1},
		{"fsync after a read", func() error { _, err := unix.Pread(fd, aligned(4096), 0); return err }, 0},
	} {
		if step.do != nil {
			w.must(step.do())
		}
		before := w.disk.count(block.OpFlush)
		w.must(unix.Fsync(fd))
		if got := w.disk.count(block.OpFlush) - before; got != step.want {
			t.Errorf("%s made %d flushes, want %d", step.what, got, step.want)
		}
	}
	_, err := unix.Pwrite(fd, randomBytes(4096), 0)
	w.must(err)
	w.leave(fd)
	before := w.disk.count(block.OpFlush)
	w.close(e)
	if got := w.disk.count(block.OpFlush) - before; got != 1 {
		t.Errorf("Close after a write made %d flushes, want 1", got)
	}
}

// require skips the test if the machine does not support the kind. In CI it fails instead if
// the kernel has its part of the kind but the kind cannot be used.
func require(t *testing.T, k Kind) {
	t.Helper()
	a := systemOf(Options{DevDir: devices}).probe(k)
	if a.Usable {
		return
	}
	if k == FUSE && os.Getenv("CI") == "true" && exists("/dev/fuse") && exists("/dev/loop-control") {
		t.Fatalf("%s is there, but: %s", k, a.Reason)
	}
	t.Skipf("%s: %s", k, a.Reason)
}

func testFrozen(t *testing.T, w *world) {
	server := w.serveElsewhere(filepath.Join(t.TempDir(), "disk"), "")
	fd := w.use("/dev/weft/" + string(w.o.Name))
	freeze(t, server.Process)
	p := randomBytes(8192)
	written := do(func() error { _, err := unix.Pwrite(fd, p, 1<<20); return err })
	select {
	case err := <-written:
		t.Errorf("a write while the process was frozen = %v, want that it waits", err)
	case <-time.After(300 * time.Millisecond):
	}
	w.must(server.Process.Signal(unix.SIGCONT))
	w.must(w.within("the write", written))
	got := aligned(len(p))
	_, err := unix.Pread(fd, got, 1<<20)
	if w.must(err); !bytes.Equal(got, p) {
		t.Error("what was read is not what was written")
	}
	w.leave(fd)
	w.kill(server)
	w.must(Remove(w.limit(), w.o))
}

// freeze returns when all threads of a process stand still.
func freeze(t *testing.T, p *os.Process) {
	t.Helper()
	if err := p.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	stands := func() bool {
		tasks, _ := filepath.Glob(filepath.Join("/proc", strconv.Itoa(p.Pid), "task/*/stat"))
		return !slices.ContainsFunc(tasks, func(file string) bool {
			text, err := os.ReadFile(file)
			_, state, _ := strings.Cut(string(text), ") ")
			return err == nil && !strings.HasPrefix(state, "T")
		})
	}
	for deadline := time.Now().Add(5 * time.Second); !stands(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("process %d does not stop", p.Pid)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const enableURing = "/sys/module/fuse/parameters/enable_uring"

// setFUSERing makes this machine's FUSE offer io_uring, or not, until the test ends. It waits
// for other tests on the machine that do the same.
func setFUSERing(t *testing.T, on bool) {
	t.Helper()
	if _, err := os.Stat(enableURing); err != nil {
		if on {
			t.Skip("this kernel's FUSE cannot use io_uring (Linux 6.14 can)")
		}
		return
	}
	lock, err := os.OpenFile(filepath.Join(os.TempDir(), "weft-fuse-uring.lock"), os.O_RDWR|os.O_CREATE, 0o666)
	if err == nil {
		err = unix.Flock(int(lock.Fd()), unix.LOCK_EX)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { lock.Close() })
	want := map[bool]string{true: "Y", false: "N"}[on]
	before, err := os.ReadFile(enableURing)
	if err == nil && strings.TrimSpace(string(before)) == want {
		return
	}
	if err := os.WriteFile(enableURing, []byte(want), 0); err != nil {
		if !on {
			t.Logf("with io_uring, which this test may not switch off: %v", err)
			return
		}
		t.Skipf("this test may not switch io_uring for FUSE: %v", err)
	}
	t.Cleanup(func() {
		if err := os.WriteFile(enableURing, before, 0); err != nil {
			t.Error(err)
		}
	})
}

// TestFUSEOverURing runs the same suite as TestFUSE.
func TestFUSEOverURing(t *testing.T) {
	require(t, FUSE)
	setFUSERing(t, true)
	if depths, why, _ := systemOf(Options{DevDir: devices}).fuseRingState(); depths == nil {
		t.Skip(why)
	}
	w := newWorld(t, FUSE)
	e := w.export()
	if e.Way() != overURing {
		t.Fatalf("the device works through %s, want io_uring", e.Way())
	}
	w.close(e)
	runFUSESuite(t)
}

// fakeMachine is this machine, but with another /sys.
func fakeMachine(t *testing.T, files map[string]string) system {
	t.Helper()
	s := systemOf(Options{DevDir: devices})
	s.sys = t.TempDir()
	for name, text := range files {
		name = filepath.Join(s.sys, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

func TestFUSEGoesOnWithoutIOURing(t *testing.T) {
	require(t, FUSE)
	for what, c := range map[string]struct {
		offered bool
		cpus    string
	}{
		"the kernel does not offer it":                   {false, "0-1"},
		"the kernel refuses an entry of the last thread": {true, "0-" + strconv.Itoa(possible(t))},
	} {
		t.Run(what, func(t *testing.T) {
			setFUSERing(t, c.offered)
			w := newWorld(t, FUSE)
			o, err := w.o.withDefaults()
			w.must(err)
			s := fakeMachine(t, map[string]string{"module/fuse/parameters/enable_uring": "Y\n", "devices/system/cpu/possible": c.cpus + "\n"})
			d, err := mountFUSE(w.limit(), s, newGate(w.disk), o)
			w.must(err)
			if d.rings != nil {
				t.Error("it works over io_uring")
			}
			var st unix.Stat_t
			w.must(w.within("a request", do(func() error { return unshared(func() error { return unix.Stat(fuseFile(o), &st) }) })))
			if st.Size != int64(plain.Size) {
				t.Errorf("the file has %d bytes, want %d", st.Size, plain.Size)
			}
			d.unmount()
		})
	}
}

// A goroutine of the first file system may end it once more when the second is at its place.
func TestFUSEEndsNoFileSystemThatIsMountedLater(t *testing.T) {
	require(t, FUSE)
	setFUSERing(t, false)
	w := newWorld(t, FUSE)
	o, err := w.o.withDefaults()
	w.must(err)
	first, err := mountFUSE(w.limit(), systemOf(o), newGate(w.disk), o)
	w.must(err)
	first.unmount()
	second, err := mountFUSE(w.limit(), systemOf(o), newGate(w.disk), o)
	w.must(err)
	first.abort()
	var st unix.Stat_t
	w.must(w.within("a request", do(func() error { return unshared(func() error { return unix.Stat(fuseFile(o), &st) }) })))
	second.unmount()
}

// The kernel holds all requests until each of its queues has an entry.
func TestFUSEGivesUpIOURingThatDoesNotAnswer(t *testing.T) {
	require(t, FUSE)
	setFUSERing(t, true)
	if possible(t) < 2 {
		t.Skip("needs two processors")
	}
	w := newWorld(t, FUSE)
	o, err := w.o.withDefaults()
	w.must(err)
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := mountFUSEWith(ctx, systemOf(o), newGate(w.disk), o, ringDepths(possible(t)-1, nil)); err == nil {
		t.Error("it works although one processor has no entries")
	}
	w.close(w.export())
}

// possible is the number of the kernel's processors.
func possible(t *testing.T) int {
	t.Helper()
	n := len(systemOf(Options{DevDir: devices}).processors("possible"))
	if n == 0 {
		t.Skip("the number of processors is unknown")
	}
	return n
}

func TestAListOfProcessorsIsParsed(t *testing.T) {
	for list, want := range map[string][]int{"0": {0}, "0-3": {0, 1, 2, 3}, "0-1,8-9,20": {0, 1, 8, 9, 20}, "": nil, "a": nil, "0-": nil} {
		if got := parseList(list); !slices.Equal(got, want) {
			t.Errorf("parseList(%q) = %v, want %v", list, got, want)
		}
	}
}

func TestEachProcessorHasEntriesAndThoseThatAreThereHaveMany(t *testing.T) {
	for _, c := range []struct {
		possible int
		online   []int
		want     []int
	}{
		{2, []int{0, 1}, []int{64, 64}},
		{4, []int{0, 2}, []int{64, 4, 64, 4}},
		{1, []int{0, 7}, []int{64}},
		{2, nil, []int{4, 4}},
	} {
		if got := ringDepths(c.possible, c.online); !slices.Equal(got, c.want) {
			t.Errorf("ringDepths(%d, %v) = %v, want %v", c.possible, c.online, got, c.want)
		}
	}
	all := make([]int, 128)
	for i := range all {
		all[i] = i
	}
	if got := ringDepths(128, all)[127]; got != 32 {
		t.Errorf("one of 128 processors has %d entries, want 32", got)
	}
}

func TestProbeSaysHowFUSEGetsFaster(t *testing.T) {
	const parameter, list = "module/fuse/parameters/enable_uring", "devices/system/cpu/possible"
	for what, c := range map[string]struct {
		files map[string]string
		cpus  int
		why   string
		fix   string
	}{
		"an old kernel": {nil, 0, "Linux 6.14", ""},
		"switched off":  {map[string]string{parameter: "N\n", list: "0-3\n"}, 0, "may not", "echo Y > /sys/module/fuse/parameters/enable_uring"},
		"switched on":   {map[string]string{parameter: "Y\n", list: "0-3\n"}, 4, "", ""},
	} {
		s := fakeMachine(t, c.files)
		if refused, _ := s.uringRefused(fuseRingFlags); c.cpus > 0 && refused != "" {
			t.Logf("not checked: %s", refused)
			continue
		}
		depths, why, fix := s.fuseRingState()
		if len(depths) != c.cpus || !strings.Contains(why, c.why) || !strings.Contains(fix, c.fix) {
			t.Errorf("%s: %d, %q, %q; want %d, %q, %q", what, len(depths), why, fix, c.cpus, c.why, c.fix)
		}
	}
}

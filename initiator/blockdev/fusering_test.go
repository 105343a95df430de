// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"context"
	"os"
	"path/filepath"
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
	before, err := os.ReadFile(enableURing)
	if err != nil {
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
	if before, err = os.ReadFile(enableURing); err == nil && strings.TrimSpace(string(before)) == want {
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
	if cpus, why, _ := systemOf(Options{DevDir: devices}).fuseRingState(); cpus == 0 {
		t.Skip(why)
	}
	w := newWorld(t, FUSE)
	e := w.export()
	if e.front.(*fuseDisk).rings == nil {
		t.Fatal("the device was made without io_uring")
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
	cpus, _, _ := systemOf(Options{DevDir: devices}).fuseRingState()
	for what, c := range map[string]struct {
		offered bool
		cpus    string
	}{
		"the kernel does not offer it":                   {false, "0-1"},
		"the kernel refuses an entry of the last thread": {true, "0-" + strconv.Itoa(max(cpus, possible(t)))},
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
			w.must(w.within("a request", do(func() error { return apart(func() error { return unix.Stat(fuseFile(o), &st) }) })))
			if st.Size != int64(plain.Size) {
				t.Errorf("the file has %d bytes, want %d", st.Size, plain.Size)
			}
			d.unmount()
		})
	}
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
	if _, err := mountFUSEWith(ctx, systemOf(o), newGate(w.disk), o, possible(t)-1); err == nil {
		t.Error("it works although one processor has no entries")
	}
	w.close(w.export())
}

// possible is the number of the kernel's processors.
func possible(t *testing.T) int {
	t.Helper()
	text, err := os.ReadFile("/sys/devices/system/cpu/possible")
	if err != nil {
		t.Skip(err)
	}
	return countList(string(text))
}

func TestAListOfProcessorsIsCounted(t *testing.T) {
	for list, want := range map[string]int{"0\n": 1, "0-3\n": 4, "0-3,8-11,20": 9, "": 0, "a": 0, "0-": 0} {
		if got := countList(list); got != want {
			t.Errorf("countList(%q) = %d, want %d", list, got, want)
		}
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
		cpus, why, fix := s.fuseRingState()
		if cpus != c.cpus || !strings.Contains(why, c.why) || !strings.Contains(fix, c.fix) {
			t.Errorf("%s: %d, %q, %q; want %d, %q, %q", what, cpus, why, fix, c.cpus, c.why, c.fix)
		}
	}
}

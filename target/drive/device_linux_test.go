// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"bytes"
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// imageFile is a sparse file of a drive's size.
func imageFile(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "image")
	must(t, os.WriteFile(path, nil, 0o600))
	must(t, os.Truncate(path, int64(testSize)))
	return path
}

// loopDevice is a loop device over such a file.
func loopDevice(t *testing.T, options ...string) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("making a loop device needs root")
	}
	out, err := exec.CommandContext(t.Context(), "losetup", append(options, "--show", "-f", imageFile(t))...).CombinedOutput()
	if err != nil {
		t.Skipf("no loop device can be made here: %v: %s", err, out)
	}
	path := strings.TrimSpace(string(out))
	t.Cleanup(func() {
		if out, err := exec.Command("losetup", "-d", path).CombinedOutput(); err != nil {
			t.Errorf("losetup -d %s: %v: %s", path, err, out)
		}
	})
	return path
}

func TestADeviceDoesWhatAMediumPromises(t *testing.T) {
	for name, open := range map[string]func(t *testing.T) string{
		"file":                     imageFile,
		"loop device":              func(t *testing.T) string { return loopDevice(t) },
		"loop device of 4k blocks": func(t *testing.T) string { return loopDevice(t, "--sector-size", "4096") },
	} {
		t.Run(name, func(t *testing.T) {
			path := open(t)
			d, err := OpenDevice(path, Exclusive)
			must(t, err)
			defer d.Close()
			testMedium(t, d)
		})
	}
	t.Run("memory", func(t *testing.T) { testMedium(t, newMemory(testSize)) })
}

// testMedium tests what the fake and the real devices have in common.
func testMedium(t *testing.T, m Medium) {
	b := m.BlockSize()
	if b < 512 || b > 4096 || m.Size()%b != 0 || m.Size() > testSize || m.Size()+b <= testSize {
		t.Errorf("%v in blocks of %v, want about %v", m.Size(), b, block.Size(testSize))
	}
	data := bytes.Repeat([]byte("0123456789abcdef"), 4096/16*3)
	at := int64(firstExtent)
	if n, err := m.WriteAt(data, at); err != nil || n != len(data) {
		t.Fatalf("WriteAt = %d, %v", n, err)
	}
	must(t, m.Flush())
	got := make([]byte, 5000)
	if n, err := m.ReadAt(got, at+777); err != nil || n != len(got) || !bytes.Equal(got, data[777:5777]) {
		t.Errorf("ReadAt of an odd range = %d, %v, or other bytes than were written", n, err)
	}
	for _, offset := range []int64{at + 1, int64(m.Size()), -4096} {
		if _, err := m.WriteAt(data, offset); err == nil {
			t.Errorf("WriteAt(%d) succeeded", offset)
		}
	}
	if _, err := m.ReadAt(got, int64(m.Size())-1); err == nil {
		t.Error("ReadAt beyond the end succeeded")
	}
	told := block.Size(0)
	must(t, m.Zero(t.Context(), firstExtent+4096, 100*block.MiB, func(n block.Size) { told = n }))
	if told != 100*block.MiB {
		t.Errorf("progress ended at %v, want 100MiB", told)
	}
	want := append(bytes.Clone(data[:4096]), make([]byte, 8192)...)
	got = make([]byte, len(want))
	if _, err := m.ReadAt(got, at); err != nil || !bytes.Equal(got, want) {
		t.Errorf("after Zero of all but the first 4096 bytes: %v, or other bytes than expected", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := m.Zero(ctx, 0, block.MiB, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("Zero when cancelled = %v, want %v", err, context.Canceled)
	}
	if err := m.Zero(t.Context(), 1, 4096, nil); err == nil {
		t.Error("Zero of an odd range succeeded")
	}
}

func TestADriveLivesOnALoopDevice(t *testing.T) {
	path := loopDevice(t)
	must(t, FormatPath(path, cluster1, drive1, ""))
	d, err := OpenPath(path, cluster1)
	must(t, err)
	must(t, d.PutLeg(leg(1, 1, run(1, 2))))
	must(t, d.ZeroLeg(t.Context(), legID(1), nil))
	must(t, d.Close())
	d, err = OpenPath(path, cluster1)
	must(t, err)
	if !d.Label().Leg(legID(1)).Zeroed {
		t.Error("the leg is not zeroed after a second open")
	}
	must(t, d.RemoveLeg(legID(1)))
	must(t, d.Erase())
	must(t, d.Close())

	held, err := OpenDevice(path, Exclusive)
	must(t, err)
	defer held.Close()
	if err := FormatPath(path, cluster1, drive1, ""); !errors.Is(err, unix.EBUSY) {
		t.Errorf("FormatPath of a device that is held = %v, want %v", err, unix.EBUSY)
	}
}

func TestOnlyBlockDevicesAndFilesAreOpened(t *testing.T) {
	for _, path := range []string{"/dev/null", t.TempDir(), filepath.Join(t.TempDir(), "none")} {
		if d, err := OpenDevice(path, ReadOnly); err == nil {
			t.Errorf("OpenDevice(%q) = %v, want an error", path, d)
		}
	}
}

// The test opens only a device of its own: any other may never answer, and the test would never
// end.
func TestTheDevicesOfThisMachineAreDescribed(t *testing.T) {
	if _, err := os.Stat("/sys/block"); err != nil {
		t.Skipf("no sysfs here: %v", err)
	}
	devices, err := sysfs("/").devices()
	must(t, err)
	for _, d := range devices {
		t.Logf("%s %v %s %q", d.Path, block.Size(d.SizeBytes), d.Model, d.Holders)
		if d.SizeBytes == 0 || !strings.HasPrefix(d.Path, "/dev/") {
			t.Errorf("device %v has no size or no path", d)
		}
	}
	path := loopDevice(t)
	devices, err = sysfs("/").devices()
	must(t, err)
	if !slices.ContainsFunc(devices, func(f found) bool { return f.Path == path }) {
		t.Errorf("%s, a loop device over a file of this machine, is not among them", path)
	}
}

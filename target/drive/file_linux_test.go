// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

func TestAFileIsADriveLikeAnyOther(t *testing.T) {
	dir := t.TempDir()
	good, other := filepath.Join(dir, "good"), filepath.Join(dir, "other")
	for _, path := range []string{good, other} {
		must(t, os.WriteFile(path, nil, 0o600))
		must(t, os.Truncate(path, int64(deviceSize)+5))
	}
	must(t, patch(other, 0, "XFSB"))
	inventory := NewFileInventory("/", good, other, filepath.Join(dir, "missing"), dir)
	devices, err := inventory.Scan(t.Context())
	must(t, err)
	if len(devices) != 2 || devices[0].Path != good || devices[1].Path != other {
		t.Fatalf("scan found %v, want the two files", devices)
	}
	d := devices[0]
	if d.Refused != "" || d.SizeBytes != uint64(deviceSize) || d.BlockSize != 4096 || !d.VolatileCache || d.Model != FileModel || d.NumaNode != -1 {
		t.Errorf("file is described as %v", d)
	}
	if !strings.Contains(devices[1].Refused, "it carries xfs") {
		t.Errorf("a file with a file system is refused for %q", devices[1].Refused)
	}
	must(t, FormatPath(good, cluster1, drive1, ""))
	if devices, err = inventory.Scan(t.Context()); err != nil || devices[0].DriveId != drive1.String() {
		t.Errorf("after Format: %v, %v; want drive %v", devices, err, drive1)
	}
	opened, err := OpenPath(good, cluster1)
	must(t, err)
	must(t, opened.PutLeg(leg(1, 1, run(0, 2))))
	must(t, opened.ZeroLeg(t.Context(), legID(1), nil))
	must(t, opened.Close())
}

func TestAFileHasOneExclusiveOwner(t *testing.T) {
	path := imageFile(t)
	held, err := OpenDevice(path, Exclusive)
	must(t, err)
	if err := FormatPath(path, cluster1, drive1, ""); !errors.Is(err, unix.EBUSY) {
		t.Errorf("FormatPath of a file that is held = %v, want %v", err, unix.EBUSY)
	}
	shared, err := OpenDevice(path, ReadWrite)
	must(t, err)
	must(t, shared.Close())
	must(t, held.Close())
	must(t, FormatPath(path, cluster1, drive1, ""))
}

func TestAFileIsZeroedWhereItCanHaveNoHoles(t *testing.T) {
	d, err := OpenDevice(imageFile(t), ReadWrite)
	must(t, err)
	defer d.Close()
	const at, n = int64(3 * block.MiB), 2*block.MiB + 4096
	pattern := strings.Repeat("x", int(4*block.MiB))
	if _, err := d.WriteAt([]byte(pattern), at-4096); err != nil {
		t.Fatal(err)
	}
	must(t, d.writeZeroes(block.Size(at), n))
	got := make([]byte, 4*block.MiB)
	if _, err := d.ReadAt(got, at-4096); err != nil {
		t.Fatal(err)
	}
	if string(got[:4096]) != pattern[:4096] || !allZero(got[4096:4096+n]) || string(got[4096+n:]) != pattern[4096+n:] {
		t.Error("the range is not what was zeroed, or more was")
	}
}

// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
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
	mine, path := newFiles(t)
	must(t, mine.Format(path, cluster, driveA, ""))
	disk, err := mine.Open(path)
	must(t, err)
	theirs := newDrives(Config{Files: []string{path}, FilesOnly: true})
	if _, err := theirs.Open(path); !errors.Is(err, unix.EBUSY) || !strings.Contains(err.Error(), "another process") {
		t.Errorf("opening a drive of another process = %v, want %v", err, unix.EBUSY)
	}
	// A leg on it keeps it, when its label's reader has gone.
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

// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"weft.dev/weft/proto/block"
)

func signaturesOf(t *testing.T, m Medium) []string {
	t.Helper()
	got, err := Signatures(m, m.Size())
	must(t, err)
	return got
}

// A device with data but no signature, such as a database's raw device.
func TestDataInTheMiddleIsNamedAndForced(t *testing.T) {
	m := newMemory(10 * block.GiB)
	at := block.MiB + 40*((10*block.GiB-2*block.MiB)/samples/copyUnit*copyUnit) // one of the sampled places
	_, err := m.WriteAt(bytes.Repeat([]byte{1}, 4096), int64(at))
	must(t, err)
	want := []string{"data at " + at.String()}
	if got := signaturesOf(t, m); !cmp.Equal(got, want) {
		t.Fatalf("Signatures = %q, want %q", got, want)
	}
	if err := Format(m, cluster1, drive1, ""); err == nil || !strings.Contains(err.Error(), want[0]) {
		t.Errorf("Format = %v, want it refused for %q", err, want[0])
	}
	if err := Format(m, cluster1, drive1, "data"); err == nil {
		t.Error("Format was forced by another name than that of what is there")
	}
	must(t, Format(m, cluster1, drive1, want[0]))
}

// Data that fills a twentieth of a device is found.
func TestASpreadOfDataIsFound(t *testing.T) {
	for _, from := range []block.Size{block.GiB, 5 * block.GiB, 9 * block.GiB} {
		m := newMemory(10 * block.GiB)
		for at := from; at < from+block.GiB/2; at += copyUnit {
			m.cache[int64(at)/sector] = bytes.Repeat([]byte{7}, sector)
		}
		if got := signaturesOf(t, m); len(got) != 1 || !strings.HasPrefix(got[0], "data at ") {
			t.Errorf("Signatures with 512MiB from %v on = %q", from, got)
		}
	}
}

// In a file every piece of data is examined, however small.
func TestDataInAFileIsFoundByItsHoles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	must(t, os.WriteFile(path, nil, 0o600))
	must(t, os.Truncate(path, int64(10*block.GiB)))
	m, err := OpenDevice(path, ReadWrite)
	must(t, err)
	defer m.Close()
	if got := signaturesOf(t, m); len(got) > 0 {
		t.Errorf("Signatures of a hole = %q", got)
	}
	if m.NextData(0) == 0 {
		t.Skip("the file system of the temporary files does not know its holes")
	}
	_, err = m.WriteAt(make([]byte, 4096), int64(2*block.GiB))
	must(t, err)
	if got := signaturesOf(t, m); len(got) > 0 {
		t.Errorf("Signatures of written zeroes = %q", got)
	}
	at := 3*block.GiB + 20*block.KiB
	_, err = m.WriteAt(bytes.Repeat([]byte{1}, 4096), int64(at))
	must(t, err)
	if got, want := signaturesOf(t, m), []string{"data at " + at.String()}; !cmp.Equal(got, want) {
		t.Errorf("Signatures = %q, want %q", got, want)
	}
}

func TestWhatADiscardLeavesIsBlank(t *testing.T) {
	const size = MinSize + block.MiB
	ones := strings.NewReader(strings.Repeat("\xff", int(size)))
	if got, err := Signatures(ones, size); err != nil || len(got) > 0 {
		t.Errorf("Signatures of ones = %q, %v; want none", got, err)
	}
}

// Data that legs left on an erased drive has no owner; data written afterwards has.
func TestWhatLegsLeftOnAnErasedDriveIsNobodys(t *testing.T) {
	m := newMemory(testSize)
	must(t, Format(m, cluster1, drive1, ""))
	fill := func(with byte) {
		block := bytes.Repeat([]byte{with}, sector) // one for all: the guests have 1 GiB of memory
		for s := int64(firstExtent) / sector; s < int64(tailArea(testSize))/sector; s += 8 {
			m.cache[s] = block
		}
	}
	fill(1)
	must(t, mustOpen(t, m).Erase())
	if got := signaturesOf(t, m); len(got) > 0 {
		t.Errorf("Signatures of an erased drive = %q", got)
	}
	again := m.clone()
	must(t, Format(again, cluster1, drive2, ""))
	fill(2)
	if got := signaturesOf(t, m); len(got) != 1 || !strings.HasPrefix(got[0], "data at ") {
		t.Errorf("Signatures of an erased drive that somebody wrote to = %q", got)
	}
}

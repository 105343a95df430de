// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"bytes"
	"errors"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/dm"
)

// checkedTable is the table of a leg with checksums on extents of a drive.
func checkedTable(n block.DeviceNumber, size block.Size, extents ...block.Size) (t dm.Table) {
	for i, at := range extents {
		start := block.Size(i) * block.CheckedData
		length := min(size-start, block.CheckedData)
		t = append(t, dm.Row{Start: start, Length: length, Target: dm.Checked{Device: dm.RefTo(n), Offset: at * block.ExtentSize, Leg: leg}})
	}
	return t
}

// flip changes a bit of a drive.
func (s *spare) flip(t *testing.T, at int64) {
	t.Helper()
	b := make([]byte, 4096)
	must(t, block.ReadAt(s.Device, b, at))
	b[7] ^= 4
	must(t, block.WriteAt(s.Device, b, at))
}

// A leg with checksums refuses what its drive has changed, grows, and is found as it was after it was
// unmapped.
func TestALegWithChecksumsGrowsAndIsFoundAgain(t *testing.T) {
	drive := newSpare(4 * block.ExtentSize)
	l := legsOn(map[block.DeviceNumber]*spare{one: drive})
	d := mapLeg(t, l, checkedTable(one, block.MiB, 2))
	data := bytes.Repeat([]byte{9}, 8192)
	must(t, block.WriteAt(d, data, 4096))
	size := block.CheckedData + 4*block.MiB
	must(t, l.Do(step(dm.OpResize, checkedTable(one, size, 2, 0))))
	if g := d.Geometry(); g.Size != size {
		t.Fatalf("it has %v, want %v", g.Size, size)
	}
	must(t, block.WriteAt(d, data, int64(block.CheckedData)-4096)) // across two extents
	got := make([]byte, len(data))
	for _, at := range []int64{4096, int64(block.CheckedData) - 4096} {
		must(t, block.ReadAt(d, got, at))
		if !bytes.Equal(got, data) {
			t.Errorf("other data at %d", at)
		}
	}
	must(t, l.Do(step(dm.OpRemove, nil)))
	if drive.closed != 2 {
		t.Errorf("the drive was released %d times, want once for each table", drive.closed)
	}
	drive.flip(t, int64(2*block.ExtentSize+block.MiB)+4096)
	d = mapLeg(t, l, checkedTable(one, size, 2, 0))
	if err := block.ReadAt(d, got, 4096); !errors.Is(err, block.ErrChecksum) {
		t.Errorf("a flipped bit: %v", err)
	}
	must(t, block.ReadAt(d, got, int64(block.CheckedData)-4096))
	if !bytes.Equal(got, data) {
		t.Error("other data across the extents")
	}
}

// A leg that is mapped on another drive ends on the one before first.
func TestALegWithChecksumsMovesToAnotherDriveWhole(t *testing.T) {
	first, second := newSpare(2*block.ExtentSize), newSpare(2*block.ExtentSize)
	l := legsOn(map[block.DeviceNumber]*spare{one: first, two: second})
	d := mapLeg(t, l, checkedTable(one, block.MiB, 1))
	must(t, block.WriteAt(d, make([]byte, 4096), 0))
	must(t, l.Do(step(dm.OpReload, checkedTable(two, block.MiB, 1))))
	must(t, block.WriteAt(d, bytes.Repeat([]byte{1}, 4096), 0))
	if first.closed != 1 || second.closed != 0 {
		t.Errorf("closed %d and %d times", first.closed, second.closed)
	}
	mixed := append(checkedTable(one, block.CheckedData, 0), dm.Row{Start: block.CheckedData, Length: block.MiB, Target: dm.Linear{Device: dm.RefTo(one), Offset: block.ExtentSize}})
	if err := l.Do(step(dm.OpReload, mixed)); err == nil {
		t.Error("a leg has checksums in a part")
	}
}

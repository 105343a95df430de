// SPDX-License-Identifier: Apache-2.0

package written

import (
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid"
	"weft.dev/weft/raid/checkpoint"
	"weft.dev/weft/raid/dm"
)

// device is a mapped device over a file, whose writes are listed.
type device struct {
	*os.File
	name    string
	number  block.DeviceNumber
	watcher *Watcher
	list    *checkpoint.Tracker
}

// open makes a mapped device of a size over a sparse file. The test needs a machine of its own, since
// it has a program run for every I/O of the machine.
func open(t *testing.T, w *Watcher, name string, size block.Size) *device {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	file := filepath.Join(t.TempDir(), name)
	must(os.WriteFile(file, nil, 0o600))
	must(os.Truncate(file, int64(size)))
	loop, err := new(dm.Loops).Attach(file)
	must(err)
	t.Cleanup(func() { new(dm.Loops).Detach(loop) })
	c, err := dm.Open()
	must(err)
	t.Cleanup(func() { c.Close() })
	d := dm.Device{Name: "weft-written-" + name, UUID: "weft-written-" + name, Table: dm.Whole(size, dm.Linear{Device: dm.RefTo(loop.Number)})}
	must(c.Do(dm.Step{Op: dm.OpCreate, Device: d}))
	t.Cleanup(func() {
		for range 50 {
			if err = c.Remove(d.Name, false); err == nil {
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
		t.Error(err)
	})
	info, err := c.Info(d.Name)
	must(err)
	f, err := os.OpenFile(dm.NodePath(info.Number), os.O_RDWR|unix.O_DIRECT, 0)
	must(err)
	t.Cleanup(func() { f.Close() })
	list, err := w.Track(info.Number, size)
	must(err)
	return &device{f, d.Name, info.Number, w, list}
}

func watch(t *testing.T) *Watcher {
	t.Helper()
	if os.Getenv("WEFT_GUEST") == "" {
		t.Skip("needs a kernel of its own: make kernel")
	}
	w, err := Open("/sys")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	return w
}

// aligned is memory for direct I/O.
func aligned(n int) []byte {
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		panic(err)
	}
	return b
}

func (d *device) write(t *testing.T, off, n int64) {
	t.Helper()
	if _, err := d.WriteAt(aligned(int(n)), off); err != nil {
		t.Fatal(err)
	}
}

func listed(d *device) []checkpoint.Range {
	l := d.list.List()
	return checkpoint.Ranges(l.Words, int64(l.Region), 1<<30)
}

func TestKernelListsWhatIsWritten(t *testing.T) {
	d := open(t, watch(t), "a", 64*block.GiB)
	if err := os.WriteFile("/proc/sys/kernel/bpf_stats_enabled", []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	model := make([]uint64, checkpoint.Words(64*block.GiB))
	const region = int64(checkpoint.Region)
	for range 300 {
		n := (rand.Int64N(64) + 1) * 4096
		if rand.IntN(10) == 0 {
			n = 9 << 20 // over two words
		}
		off := rand.Int64N((int64(64*block.GiB)-n)/4096) * 4096
		d.write(t, off, n)
		first, last := uint64(off/region), uint64((off+n-1)/region)
		for w := first / 64; w <= last/64; w++ {
			model[w] |= raid.WordMask(w, first, last)
		}
	}
	if want := checkpoint.Ranges(model, region, 1<<30); !slices.Equal(listed(d), want) {
		t.Errorf("listed are %d ranges, %v; written were %d, %v", len(listed(d)), listed(d), len(want), want)
	}
	if missed, err := d.watcher.Missed(d.number); missed != 0 || err != nil {
		t.Errorf("%d I/Os were missed: %v", missed, err)
	}
	program, err := infoOf(d.watcher.program)
	if err != nil || program.runs == 0 {
		t.Fatalf("the kernel ran the program %d times: %v", program.runs, err)
	}
	t.Logf("300 writes took %v; meanwhile the program ran %d times, for %v each", time.Since(began), program.runs, time.Duration(program.took/program.runs))
}

func TestReadsAndOtherDevicesAreNotListed(t *testing.T) {
	w := watch(t)
	d, other := open(t, w, "a", block.GiB), open(t, w, "b", block.GiB)
	if _, err := d.ReadAt(aligned(1<<20), 0); err != nil {
		t.Fatal(err)
	}
	if err := d.Sync(); err != nil {
		t.Fatal(err)
	}
	other.write(t, 1<<20, 4096)
	if got := listed(d); len(got) > 0 {
		t.Errorf("a device that was read lists %v", got)
	}
	if got := listed(other); len(got) != 1 {
		t.Errorf("a device that was written lists %v, want one range", got)
	}
	if err := w.Forget(other.number); err != nil {
		t.Fatal(err)
	}
	other.write(t, 0, 4096) // marks no memory that is gone
}

// A checkpoint takes what was marked, and the kernel marks it again.
func TestKernelListsWritesAfterACheckpoint(t *testing.T) {
	d := open(t, watch(t), "a", block.GiB)
	d.write(t, 0, 4096)
	d.list.Begin(1, false)
	d.write(t, 1<<20, 4096)
	if err := d.list.Commit(1, nil); err != nil {
		t.Fatal(err)
	}
	if got, want := listed(d), []checkpoint.Range{{Off: 1 << 20, End: 1<<20 + int64(checkpoint.Region)}}; !slices.Equal(got, want) {
		t.Errorf("after a checkpoint %v is listed, want %v", got, want)
	}
	d.write(t, 0, 4096)
	if got := listed(d); len(got) != 2 {
		t.Errorf("a region that is written again is not listed: %v", got)
	}
}

// Discards and zeroes can be larger than a program may mark.
func TestAnIOThatIsTooLongIsCounted(t *testing.T) {
	d := open(t, watch(t), "a", 8*block.GiB)
	d.discard(t, 0, 1<<30)
	if got, want := listed(d), []checkpoint.Range{{Off: 0, End: 1 << 30}}; !slices.Equal(got, want) {
		t.Errorf("after a discard of 1 GiB %v is listed, want %v", got, want)
	}
	if missed, err := d.watcher.Missed(d.number); missed != 0 || err != nil {
		t.Errorf("after it, %d I/Os were missed: %v", missed, err)
	}
	d.discard(t, 1<<30, 3<<30)
	missed, err := d.watcher.Missed(d.number)
	if got := listed(d); err != nil || missed == 0 && !slices.Equal(got, []checkpoint.Range{{Off: 0, End: 4 << 30}}) {
		t.Errorf("after a discard of 3 GiB %v is listed and %d I/Os count as missed, %v", got, missed, err)
	}
}

func (d *device) discard(t *testing.T, off, n uint64) {
	t.Helper()
	if err := blkdiscard(d.Fd(), off, n); err != nil {
		t.Fatal(err)
	}
}

// SPDX-License-Identifier: Apache-2.0

package dm

import (
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"weft.dev/weft/proto/figures"
)

// fakeCounts is what a device counts: one area of drivers/md/dm-stats.c.
type fakeCounts struct {
	program       string
	bounds        []int64 // upper ends of the buckets but the last, in nanoseconds
	buckets       []uint64
	reads, writes int
}

func (d *fakeDevice) stats(message string) (string, error) {
	switch words := strings.Fields(message); {
	case words[0] == "@stats_create":
		if len(words) != 7 || words[3] != "2" || words[4] != "precise_timestamps" ||
			d.live != nil { // the kernel would suspend it, and could wait for ever
			return "", syscall.EINVAL
		}
		c := &fakeCounts{program: words[6]}
		for text := range strings.SplitSeq(strings.TrimPrefix(words[5], "histogram:"), ",") {
			var n int64
			if _, err := fmt.Sscan(text, &n); err != nil || len(c.bounds) > 0 && n <= c.bounds[len(c.bounds)-1] {
				return "", syscall.EINVAL
			}
			c.bounds = append(c.bounds, n)
		}
		c.buckets = make([]uint64, len(c.bounds)+1)
		d.counts = c
		return "0", nil
	case words[0] == "@stats_list" && d.counts != nil && d.counts.program == words[1]:
		return "0: 0+18014398509481983 18014398509481983 weft - precise_timestamps histogram:...\n", nil
	case words[0] == "@stats_list":
		return "", nil
	case words[0] == "@stats_print" && words[1] == "0" && d.counts != nil:
		return d.counts.String(), nil
	}
	return "", syscall.EINVAL
}

// fakeTook is how long each I/O of the fake takes, in nanoseconds.
const fakeTook = 50_000

func (c *fakeCounts) String() string {
	return fmt.Sprintf("0+18014398509481983 %d 0 %d %d %d 0 %d %d 0 0 0 0 0 %s\n",
		c.reads, 8*c.reads, fakeTook*c.reads, c.writes, 8*c.writes, fakeTook*c.writes,
		strings.Trim(strings.ReplaceAll(fmt.Sprint(c.buckets), " ", ":"), "[]"))
}

func (k *fakeKernel) countIOs(name string, reads, writes int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if c := k.devices[name].counts; c != nil {
		c.reads, c.writes = c.reads+reads, c.writes+writes
		bucket, found := slices.BinarySearch(c.bounds, fakeTook)
		if found {
			bucket++
		}
		c.buckets[bucket] += uint64(reads + writes)
	}
}

// counted are counts of a device that must be there.
func counted(t *testing.T, w *world, name string) figures.Figures {
	t.Helper()
	f, ok, err := w.client.Counted(name)
	if err != nil || !ok {
		t.Fatalf("Counted = %v, %v; want counts", ok, err)
	}
	return f
}

func count(t *testing.T, w *world) {
	d := w.device("a", w.linear(0))
	d.Count = true
	must(t, w.client.Do(Step{OpCreate, d}))
	if f := counted(t, w, d.Name); len(f[figures.Any].Latency) != figures.Buckets {
		t.Errorf("%d buckets, want %d", len(f[figures.Any].Latency), figures.Buckets)
	}
	must(t, w.client.Do(Step{OpCreate, w.device("b", w.linear(1))}))
	if _, ok, err := w.client.Counted(w.name("b")); err != nil || ok {
		t.Errorf("Counted of a device that is not counted = %v, %v", ok, err)
	}
}

// The system may look at a device when a program opens it, or closes it after writing: so there may be
// more reads.
func countAll(t *testing.T, w *world) {
	d := w.device("a", w.linear(0))
	d.Count = true
	must(t, w.client.Do(Step{OpCreate, d}))
	w.ios(d.Name, 3, 2)
	f := counted(t, w, d.Name)
	reads, writes := f[figures.Read], f[figures.Write]
	if writes.IOs != 2 || writes.Bytes != 2*4096 || reads.IOs < 3 || reads.Bytes < 3*4096 {
		t.Errorf("%d writes of %d bytes and %d reads of %d bytes; want 2 of 8192 and 3 of 12288", writes.IOs, writes.Bytes, reads.IOs, reads.Bytes)
	}
	latency := f[figures.Any].Latency
	if latency.Count() != reads.IOs+writes.IOs {
		t.Errorf("%d latencies of %d I/Os", latency.Count(), reads.IOs+writes.IOs)
	}
	took := reads.Took + writes.Took
	if longest := latency.Quantile(1); took <= 0 || took > 11*longest/10*time.Duration(latency.Count()) || longest > 11*took/10+figures.Least() {
		t.Errorf("the longest took %v, all %d together %v", longest, latency.Count(), took)
	}

	must(t, w.client.Do(Step{OpReload, w.device("a", w.linear(1))}))
	must(t, w.client.Do(Step{OpResize, w.device("a", Whole(diskSize, Linear{Device: w.disks[1]}))}))
	w.ios(d.Name, 1, 1)
	after := counted(t, w, d.Name)
	since, ok := after.Since(&f)
	if !ok || since[figures.Write].IOs != 1 || since[figures.Read].IOs < 1 || since[figures.Any].Latency.Count() != since.IOs() {
		t.Errorf("with another table: %d writes, %d reads, %d latencies more, %v; want the counts to go on with 1 of each", since[figures.Write].IOs, since[figures.Read].IOs, since[figures.Any].Latency.Count(), ok)
	}
}

func TestCountsOfTheKernelAreRead(t *testing.T) {
	buckets := make([]string, figures.Buckets)
	for i := range buckets {
		buckets[i] = fmt.Sprint(i % 3)
	}
	f, err := parseStats("0+204800 3 1 24 3000 2 0 16 2000000 0 5000 5000 3000 2000 " + strings.Join(buckets, ":") + "\n")
	if err != nil || f[figures.Read].IOs != 3 || f[figures.Read].Bytes != 24*512 || f[figures.Write].IOs != 2 || f[figures.Write].Took != 2*time.Millisecond || f[figures.Any].Latency[200] != 2 {
		t.Errorf("parseStats = %+v, %v", f, err)
	}
	for _, bad := range []string{"", "0+1 1 2 3", "0+1 3 1 24 3000 2 0 16 2000 0 5000 5000 3000 2000 1:2:3", "0+1 x 1 24 3000 2 0 16 2000 0 5000 5000 3000 2000 " + strings.Join(buckets, ":")} {
		if _, err := parseStats(bad); err == nil {
			t.Errorf("parseStats(%q) = nil, want an error", bad)
		}
	}
	if n := strings.Count(statsCreate, ","); n != figures.Buckets-2 || len(statsCreate) > 4096 {
		t.Errorf("%d bounds in %d bytes", n+1, len(statsCreate))
	}
}

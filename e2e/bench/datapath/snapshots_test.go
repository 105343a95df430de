// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
)

func TestOnceIsEachPlaceOnce(t *testing.T) {
	for _, slots := range []int{1, 32} {
		seen := map[int64]bool{}
		for slot := range slots {
			o := newOffsets(job{Size: 4096, Span: 8 << 20, Stride: 64 << 10}).share(slot, slots)
			for off, more := o.next(); more; off, more = o.next() {
				if seen[off] {
					t.Errorf("%d slots: %d comes twice", slots, off)
				}
				seen[off] = true
			}
		}
		all := slices.Sorted(maps.Keys(seen))
		if len(all) != 128 || all[127] != 127*64<<10 || all[1] != 64<<10 {
			t.Errorf("%d slots: %d places, want the 128 multiples of 64 KiB: %v", slots, len(all), all)
		}
	}
}

// What is measured as a first write takes space, and as any other none; each state has its snapshots.
func TestStatesAreAsTheyAreCalled(t *testing.T) {
	const span = 8 << 20
	for _, c := range []struct {
		state     state
		stride    int64
		snapshots int
		takes     bool
	}{{empty, 1 << 20, 0, true}, {full, 1 << 20, 0, false}, {frozen, 1 << 20, 1, true}, {rewritten, 1 << 20, 100, false}} {
		v, err := newTree(ramdisk.New(treeSize, 4096))
		if err != nil {
			t.Fatal(err)
		}
		if err := prepare(v, c.state, span); err != nil {
			t.Fatalf("%s: %v", c.state, err)
		}
		if n := len(v.Layers()) - 1; n != c.snapshots {
			t.Errorf("%s: %d snapshots, want %d", c.state, n, c.snapshots)
		}
		before := v.Space().Free
		r, err := loadDevice(v.leg, job{Write: true, Size: 4096, Depth: 4, Span: span, Stride: c.stride, Seconds: 60})
		if err != nil || r.IOs != span/uint64(c.stride) {
			t.Errorf("%s: %d writes, %v; want %d", c.state, r.IOs, err, span/c.stride)
		}
		if took := before - v.Space().Free; (took > 0) != c.takes {
			t.Errorf("%s: the writes took %v", c.state, took)
		}
		v.close()
	}
}

// A device of the test whose snapshots are only counted.
type countedLife struct {
	plainDevice
	bytes           int64
	made, copied    int
	removed, unmade int
}

func (*countedLife) name() string              { return "counted" }
func (*countedLife) begin() error              { return nil }
func (*countedLife) end()                      {}
func (c *countedLife) written() (int64, error) { return c.bytes, nil }
func (c *countedLife) write(off, n int64) error {
	c.bytes += n
	return nil
}

func (c *countedLife) snapshot(int) error {
	c.made++
	c.bytes += 2048
	return nil
}

func (c *countedLife) clone(n int) error {
	if n > 1 {
		return errors.ErrUnsupported
	}
	c.copied++
	return nil
}

func (c *countedLife) remove(_ int, clone bool) error {
	if clone {
		c.unmade++
		return errors.ErrUnsupported
	}
	c.removed++
	return nil
}

func TestBytesOfASnapshotAreNotThoseOfWrites(t *testing.T) {
	var out strings.Builder
	c := &countedLife{}
	if err := lifetimes(t.Context(), Options{Count: 10, Out: &out}, []lifecycle{c}, 8<<20); err != nil {
		t.Fatal(err)
	}
	if c.made != 10 || c.removed != 10 || c.copied != 1 || c.unmade != 1 {
		t.Errorf("%+v", c)
	}
	for line := range strings.Lines(out.String()) {
		f := strings.Fields(line)
		if len(f) > 2 && f[0] == "counted" && f[1] == "create" && (f[len(f)-2] != "2.0" || f[len(f)-1] != "KiB") {
			t.Errorf("a snapshot wrote 2 KiB, and this is said: %s", line)
		}
	}
	if !strings.Contains(out.String(), "delete the clone  –") {
		t.Errorf("nothing says that clones were not deleted:\n%s", &out)
	}
}

// TestQcow2TakesTheSameJobs needs QEMU's programs.
func TestQcow2TakesTheSameJobs(t *testing.T) {
	if err := installed("qemu-storage-daemon", "qemu-img"); err != nil {
		t.Skip(err)
	}
	client, err := start(-1, "client")
	if err != nil {
		t.Fatal(err)
	}
	defer client.stop()
	q := &qcow2Lab{dir: t.TempDir(), cpu: -1, client: client}
	d, err := q.newImage(images[0])
	if err != nil {
		t.Fatal(err)
	}
	defer d.close()
	if err := prepare(d, frozen, 4<<20); err != nil {
		t.Fatal(err)
	}
	life := &qcow2Life{lab: q, storageDaemon: d}
	before, err := life.written()
	if err != nil {
		t.Fatal(err)
	}
	r, err := d.measured(client).do(job{Write: true, Size: 4096, Depth: 4, Span: 4 << 20, Stride: place, FUA: true, Seconds: 60})
	if err != nil || r.IOs != 64 {
		t.Errorf("%d writes, %v; want 64", r.IOs, err)
	}
	if after, err := life.written(); err != nil || after-before < 64*grain {
		t.Errorf("64 first writes after a snapshot wrote %d bytes, %v; want at least a subcluster for each", after-before, err)
	}
	if err := life.remove(1, false); err != nil {
		t.Error(err)
	}
	if err := life.remove(1, false); err == nil || !strings.Contains(err.Error(), "1") {
		t.Errorf("a snapshot that is not there was deleted: %v", err)
	}
}

// TestAMappedLegIsServed: the process of the leg takes jobs as a plain file's does.
func TestAMappedLegIsServed(t *testing.T) {
	client, err := start(-1, "client")
	if err != nil {
		t.Fatal(err)
	}
	defer client.stop()
	q := &qcow2Lab{dir: t.TempDir(), cpu: -1, client: client}
	m, err := q.leg(empty)
	if err != nil {
		t.Fatal(err)
	}
	defer m.close()
	for _, write := range []bool{true, false} {
		r, err := m.do(job{Write: write, Size: 4096, Depth: 4, Span: int64(8 * block.MiB), Stride: place, FUA: write, Seconds: 60})
		if err != nil || r.IOs != 128 {
			t.Errorf("write %t: %d I/Os, %v; want 128", write, r.IOs, err)
		}
	}
}

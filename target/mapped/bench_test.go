// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
)

const (
	benchLeg  = 200 << 20
	benchSize = firstExtent + 8*256<<20 + 8<<20
)

// someData is n bytes that are not zeroes: a leg takes no space for zeroes.
func someData(n int) []byte { return bytes.Repeat([]byte{0xa5}, n) }

// benchTree is a tree of which each chunk is mapped, under so many snapshots that have a part of it.
func benchTree(b testing.TB, below block.Device, layers int) (*Tree, *Leg) {
	b.Helper()
	tree, leg := emptyBenchTree(b, below)
	buf := someData(ChunkSize)
	for off := int64(0); off < benchLeg; off += ChunkSize {
		must(b, block.WriteAt(leg, buf, off))
	}
	r := rand.New(rand.NewPCG(1, 1))
	for n := range layers {
		must(b, tree.Freeze(id(1), id(uint64(n+2)), nil))
		for range 1500 / max(layers, 100) { // somewhere, a grain of its own
			must(b, block.WriteAt(leg, buf[:GrainSize], int64(r.IntN(benchLeg/GrainSize))*GrainSize))
		}
	}
	return tree, leg
}

func emptyBenchTree(b testing.TB, below block.Device) (*Tree, *Leg) {
	b.Helper()
	p := testPlace(below)
	p.Extents = []uint32{0, 1, 2, 3, 4, 5, 6, 7}
	tree, err := Format(p, id(1), benchLeg, nil)
	must(b, err)
	leg, err := tree.Leg(id(1))
	must(b, err)
	return tree, leg
}

// BenchmarkMapped divides mapped by plain, in memory: the times of 4 KiB IOs, at random. A plain leg
// is the drive itself. Turns are short and follow one another, and the median of their ratios is
// reported.
func BenchmarkMapped(b *testing.B) {
	below := func() block.Device { return ramdisk.New(benchSize, 4096) }
	for _, layers := range []int{0, 1, 10, 100, 1000} {
		plain, full := below(), someData(ChunkSize)
		for off := int64(0); off < benchLeg; off += ChunkSize {
			must(b, block.WriteAt(plain, full, off))
		}
		tree, leg := benchTree(b, below(), layers)
		for _, op := range []block.Op{block.OpRead, block.OpWrite} {
			for _, depth := range []int{1, 32} {
				b.Run(fmt.Sprintf("%v/depth=%d/snapshots=%d", op, depth, layers), func(b *testing.B) {
					compareTurns(b, plain, leg, op, depth, benchLeg)
				})
			}
		}
		tree.Close()
	}
}

// BenchmarkLongChain is BenchmarkMapped for reads of one chunk, a grain of which was written between any two
// snapshots: the same one, so that all other reads pass by the records of all snapshots, or any.
func BenchmarkLongChain(b *testing.B) {
	plain := ramdisk.New(benchSize, 4096)
	must(b, block.WriteAt(plain, someData(ChunkSize), 0))
	for _, layers := range []int{0, 1, 10, 100, 1000} {
		for name, grain := range map[string]func() int64{
			"same": func() int64 { return 5 },
			"any":  func() int64 { return rand.Int64N(ChunkSize / GrainSize) },
		} {
			tree, leg := emptyBenchTree(b, ramdisk.New(benchSize, 4096))
			must(b, block.WriteAt(leg, someData(ChunkSize), 0))
			for n := range layers {
				must(b, tree.Freeze(id(1), id(uint64(n+2)), nil))
				must(b, block.WriteAt(leg, someData(4096), grain()*GrainSize))
			}
			for _, depth := range []int{1, 32} {
				b.Run(fmt.Sprintf("grain=%s/depth=%d/snapshots=%d", name, depth, layers), func(b *testing.B) {
					compareTurns(b, plain, leg, block.OpRead, depth, ChunkSize)
				})
			}
			tree.Close()
		}
	}
}

// compareTurns uses the first span bytes of both.
func compareTurns(b *testing.B, plain, mapped block.Device, op block.Op, depth, span int) {
	turn := func(d block.Device) float64 {
		var group sync.WaitGroup
		began := time.Now()
		for w := range depth {
			group.Go(func() {
				r := rand.New(rand.NewPCG(uint64(w), 5)) // the same places in each turn: mapped after the first
				io := &block.IO{Op: op, Len: 4096, Data: someData(4096)}
				for range 2048 / depth {
					io.Off = int64(r.IntN(span/4096)) * 4096
					if err := block.Do(d, io); err != nil {
						panic(err)
					}
				}
			})
		}
		group.Wait()
		return float64(time.Since(began)) / 2048
	}
	turn(plain)
	turn(mapped)
	var ratios, of []float64
	for i := 0; b.Loop(); i++ {
		var x, y float64
		if i%2 == 0 {
			x, y = turn(plain), turn(mapped)
		} else {
			y, x = turn(mapped), turn(plain)
		}
		ratios, of = append(ratios, x/y), append(of, y)
	}
	slices.Sort(ratios)
	slices.Sort(of)
	b.ReportMetric(0, "ns/op")
	b.ReportMetric(of[len(of)/2], "ns/IO")
	b.ReportMetric(ratios[len(ratios)/2], "mapped/plain")
}

// timed is a drive that takes 12 µs and 3 GB/s for each command, any number of them side by side. It has a command for
// zeroes.
type timed struct {
	block.Device
	writes *atomic.Int64 // to tables
}

func (d timed) Submit(io *block.IO) {
	if io.Op == block.OpWrite && io.Len == unit && (io.Off-firstExtent)%extentSize < ChunkSize {
		d.writes.Add(1)
	}
	done := io.Done
	io.Done = func(io *block.IO) {
		io.Done = done
		took := 12*time.Microsecond + time.Duration(io.Len)*time.Second/(3<<30)
		if io.Op == block.OpWriteZeroes {
			took = 100 * time.Microsecond
		}
		time.AfterFunc(took, func() { done(io) })
	}
	d.Device.Submit(io)
}

// TestWhatFirstWritesCost divides the IOPS of first writes by those of a plain leg, on a drive whose
// times are set, in virtual time: other programs on the machine, and its processor, do not count.
func TestWhatFirstWritesCost(t *testing.T) {
	for _, c := range []struct {
		name   string
		size   int64
		depth  int
		frozen bool
		ready  int // chunks that the tree keeps ready
		least  float64
	}{
		{"4k, fresh", 4096, 1, false, 0, 0.40},
		{"4k, fresh", 4096, 32, false, 0, 0.31},
		{"4k, fresh, ready", 4096, 1, false, 128, 0.95},
		{"4k, fresh, ready", 4096, 32, false, 128, 0.48},
		{"4k, after a snapshot", 4096, 1, true, 128, 0.27},
		{"4k, after a snapshot", 4096, 32, true, 128, 0.22},
		{"16k aligned, fresh", 16384, 1, false, 0, 0.5},
		{"16k aligned, fresh", 16384, 32, false, 0, 0.4},
		{"16k aligned, fresh, ready", 16384, 1, false, 128, 0.95},
		{"16k aligned, fresh, ready", 16384, 32, false, 128, 0.5},
		{"16k aligned, after a snapshot", 16384, 1, true, 128, 0.5},
		{"16k aligned, after a snapshot", 16384, 32, true, 128, 0.4},
	} {
		synctest.Test(t, func(t *testing.T) {
			prepareAhead = c.ready
			defer func() { prepareAhead = 0 }()
			ratio, tables := firstWrites(t, c.size, c.depth, c.frozen)
			t.Logf("%-30s depth %2d: mapped/plain %.2f, %.2f table writes for a write", c.name, c.depth, ratio, tables)
			if tables == 0 {
				t.Fatal("no write of a table: these were no first writes")
			}
			if c.depth > 1 && tables > 1.5 {
				t.Errorf("%s, depth %d: %.2f table writes for a write, want requests to share them", c.name, c.depth, tables)
			}
			if ratio < c.least {
				t.Errorf("%s, depth %d: mapped/plain is %.2f, want at least %.2f", c.name, c.depth, ratio, c.least)
			}
		})
	}
}

func firstWrites(t testing.TB, size int64, depth int, frozen bool) (ratio, tables float64) {
	below := timed{ramdisk.New(benchSize, 4096), &atomic.Int64{}}
	var tree *Tree
	var leg *Leg
	if frozen {
		tree, leg = benchTree(t, below, 0)
		must(t, tree.Freeze(id(1), id(2), nil))
	} else {
		tree, leg = emptyBenchTree(t, below)
	}
	time.Sleep(time.Second) // chunks become ready
	plain := writeEach(below, size, depth)
	below.writes.Store(0)
	mapped := writeEach(leg, size, depth)
	tables = float64(below.writes.Load()) / 2000
	tree.Close()
	return plain / mapped, tables
}

// tallied counts the bytes that are written to it.
type tallied struct {
	block.Device
	written *atomic.Int64
}

func (d tallied) Submit(io *block.IO) {
	if io.Op == block.OpWrite {
		d.written.Add(io.Len)
	}
	d.Device.Submit(io)
}

// A leg that is filled from begin to end writes little beside its data: at most one block of the map, twice, for each
// write, and one for all writes of a chunk that come together.
func TestWhatAFillWritesBesideItsData(t *testing.T) {
	for _, c := range []struct {
		size int64
		most float64
	}{{16 << 10, 0.51}, {128 << 10, 0.065}, {ChunkSize, 0.009}} {
		below := tallied{ramdisk.New(benchSize, 4096), &atomic.Int64{}}
		tree, leg := emptyBenchTree(t, below)
		below.written.Store(0)
		p := someData(int(c.size))
		for off := int64(0); off < benchLeg; off += c.size {
			must(t, block.WriteAt(leg, p, off))
		}
		tree.Close()
		beside := float64(below.written.Load()-benchLeg) / benchLeg
		t.Logf("writes of %4d KiB: %.4f written beside the data", c.size>>10, beside)
		if beside > c.most || beside <= 0 {
			t.Errorf("writes of %d KiB: %.4f written beside the data, want up to %.4f", c.size>>10, beside, c.most)
		}
	}
}

// hollow keeps what is written, but for grains.
type hollow struct{ block.Device }

func (d hollow) Submit(io *block.IO) {
	if io.Op == block.OpWrite && io.Len == GrainSize {
		io.Complete(nil)
		return
	}
	d.Device.Submit(io)
}

// BenchmarkOpen opens the tree of a leg of 256 GiB of which each chunk is mapped, in memory.
func BenchmarkOpen(b *testing.B) {
	const extents = 1100
	p := testPlace(hollow{ramdisk.New(block.Size(firstExtent+extents*extentSize), 4096)})
	p.Extents = nil
	for n := range uint32(extents - 1) {
		p.Extents = append(p.Extents, n)
	}
	const size = 256 * block.GiB
	tree, err := Format(p, id(1), size, nil)
	must(b, err)
	leg, err := tree.Leg(id(1))
	must(b, err)
	for off := int64(0); off < int64(size); off += ChunkSize {
		must(b, block.WriteAt(leg, someData(GrainSize), off))
	}
	tree.Close()
	for b.Loop() {
		tree, err := Open(p)
		must(b, err)
		tree.Close()
	}
	b.ReportMetric(b.Elapsed().Seconds()/float64(b.N)*4, "s/TiB")
}

// writeEach writes 2000 places once, at random, and returns how long one took.
func writeEach(d block.Device, size int64, depth int) float64 {
	places := rand.New(rand.NewPCG(9, 9)).Perm(benchLeg / GrainSize)[:2000]
	var next atomic.Int64
	var group sync.WaitGroup
	began := time.Now()
	for range depth {
		group.Go(func() {
			p := someData(int(size))
			for n := next.Add(1) - 1; n < int64(len(places)); n = next.Add(1) - 1 {
				if err := block.WriteAt(d, p, firstIn(d)+int64(places[n])*GrainSize); err != nil {
					panic(err)
				}
			}
		})
	}
	group.Wait()
	return float64(time.Since(began))
}

// firstIn keeps the writes to the plain leg away from the tree: behind its extents' heads they would
// be in its tables.
func firstIn(d block.Device) int64 {
	if _, plain := d.(timed); plain {
		return firstExtent + 5*extentSize + ChunkSize // an extent that the tree does not reach
	}
	return 0
}

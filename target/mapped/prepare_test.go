// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
)

const grainSectors = GrainSize / sector

// withReady runs f on a new tree that keeps so many chunks ready, on drives with and without a volatile cache. What is
// free on them was used by others before.
func withReady(t *testing.T, ahead int, f func(t *testing.T, d *drive, tree *Tree, leg *Leg)) {
	prepareAhead = ahead
	defer func() { prepareAhead = 0 }()
	for _, volatile := range []bool{false, true} {
		t.Run(fmt.Sprintf("volatile=%v", volatile), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				img := usedBefore(3, 40)
				d := &drive{size: testSize, volatile: volatile, base: img, img: newImage(img)}
				tree, err := Format(testPlace(d), id(1), 64<<20, nil)
				must(t, err)
				leg, err := tree.Leg(id(1))
				must(t, err)
				time.Sleep(time.Second)
				f(t, d, tree, leg)
				tree.Close()
			})
		})
	}
}

// writes are the writes to the drive since an event, without those of zeroes to whole chunks: of data, and of tables.
func (d *drive) writes(since int) (data, tables []*write) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, w := range d.log {
		switch {
		case w.begun < since || w.data == nil || len(w.data) >= ChunkSize:
		case (w.off-firstExtent)%extentSize < ChunkSize:
			tables = append(tables, w)
		default:
			data = append(data, w)
		}
	}
	return data, tables
}

func TestAFirstWriteToAReadyChunkIsOneStep(t *testing.T) {
	withReady(t, 4, func(t *testing.T, d *drive, _ *Tree, leg *Leg) {
		for _, off := range []int64{8192, GrainSize} { // the first one of the chunk, and another one
			from := d.now()
			must(t, block.WriteAt(leg, tagged(1, 8), off))
			data, tables := d.writes(from)
			if len(data) != 1 || len(data[0].data) != 4096 || data[0].fua {
				t.Fatalf("the data is written in %d writes, want one of 4 KiB without FUA", len(data))
			}
			for _, w := range tables {
				if w.begun > data[0].end || data[0].begun > w.end {
					t.Errorf("the data was written in events %d to %d, a table in %d to %d; want both at once", data[0].begun, data[0].end, w.begun, w.end)
				}
			}
		}
		if got, want := readObjectAt(t, leg, 0, 2*grainSectors), slices.Concat(make([]uint64, 16), repeated(1, 8), make([]uint64, 8), repeated(1, 8), make([]uint64, 24)); !slices.Equal(got, want) {
			t.Errorf("the grains read %x, want %x", got, want)
		}
	})
}

func repeated(tag uint64, n int) []uint64 { return slices.Repeat([]uint64{tag}, n) }

// A part of a grain is written to a chunk that others have used, and the power is cut at any time: neither then nor
// ever does the rest of the grain show what they wrote.
func TestWhatOthersWroteIsNeverRead(t *testing.T) {
	withReady(t, 4, func(t *testing.T, d *drive, _ *Tree, leg *Leg) {
		from := d.now()
		for i := range int64(8) { // more chunks than were ready
			must(t, block.Do(leg, &block.IO{Op: block.OpWrite, FUA: i%2 == 0, Off: i * ChunkSize, Len: 4096, Data: tagged(uint64(i+1), 8)}))
			for k := range d.now() - from {
				after := d.afterCut(t, uint64(k), from+k)
				l, err := after.Leg(id(1))
				must(t, err)
				for c := range i + 1 {
					got := readObjectAt(t, l, c*ChunkSize, grainSectors)
					if slices.ContainsFunc(got[:8], func(v uint64) bool { return v != 0 && v != uint64(c+1) }) || slices.ContainsFunc(got[8:], func(v uint64) bool { return v != 0 }) {
						t.Fatalf("cut at %d: chunk %d reads %x", from+k, c, got)
					}
				}
			}
		}
	})
}

// The bytes of a grain that was discarded are still there, and do not come back with a write to a part of it.
func TestADiscardedGrainIsNotBlank(t *testing.T) {
	withReady(t, 4, func(t *testing.T, _ *drive, tree *Tree, leg *Leg) {
		must(t, block.WriteAt(leg, tagged(1, 2*grainSectors), 0))
		must(t, block.Do(leg, &block.IO{Op: block.OpDiscard, Len: GrainSize}))
		must(t, block.WriteAt(leg, tagged(2, 8), 4096))
		want := slices.Concat(make([]uint64, 8), repeated(2, 8), make([]uint64, 16))
		if got := readObjectAt(t, leg, 0, grainSectors); !slices.Equal(got, want) {
			t.Errorf("the grain reads %x, want %x", got, want)
		}
	})
}

// A slot that comes free holds what its owner has written, and its next owner must not count on zeroes.
func TestASlotThatIsTakenAgainIsNotBlank(t *testing.T) {
	withReady(t, 1, func(t *testing.T, _ *drive, tree *Tree, leg *Leg) {
		tree.prepareNothing() // so that the slot is not made ready again
		must(t, block.WriteAt(leg, tagged(1, grainSectors), 0))
		slot := tree.own(leg.layer, 0)
		must(t, block.Do(leg, &block.IO{Op: block.OpDiscard, Len: ChunkSize}))
		must(t, block.Flush(leg))
		must(t, block.WriteAt(leg, tagged(2, 8), 5*ChunkSize))
		if tree.own(leg.layer, 5) != slot {
			t.Fatal("another slot is taken: nothing is tried here")
		}
		if got, want := readObjectAt(t, leg, 5*ChunkSize, grainSectors), slices.Concat(repeated(2, 8), make([]uint64, 24)); !slices.Equal(got, want) {
			t.Errorf("the grain reads %x, want %x", got, want)
		}
	})
}

// Where a snapshot has data, a record that a power cut leaves without its data would hide it. So the data is written
// first, also in a chunk that is blank.
func TestARecordOverDataWaitsForIt(t *testing.T) {
	withReady(t, 4, func(t *testing.T, d *drive, tree *Tree, leg *Leg) {
		must(t, block.WriteAt(leg, tagged(1, grainSectors), 0))
		must(t, tree.Freeze(id(1), id(2), nil))
		must(t, block.WriteAt(leg, tagged(3, grainSectors), 5*GrainSize))
		if !tree.isBlank(tree.own(leg.layer, 0)) {
			t.Fatal("the leg's chunk is not blank: nothing is tried here")
		}
		must(t, block.Flush(leg))
		from := d.now()
		must(t, block.WriteAt(leg, tagged(2, grainSectors), 0))
		for seed := range uint64(200) {
			l, err := d.afterCut(t, seed, from+int(seed)%(d.now()-from+1)).Leg(id(1))
			must(t, err)
			if got := readObjectAt(t, l, 0, grainSectors); slices.ContainsFunc(got, func(v uint64) bool { return v != 1 && v != 2 }) {
				t.Fatalf("seed %d: after a power cut the grain has %x", seed, got)
			}
		}
	})
}

// torn makes writes of data fail when the drive has done the first half of them.
func (d *drive) torn(io *block.IO) error {
	if io.Op != block.OpWrite || (io.Off-firstExtent)%extentSize < ChunkSize {
		return nil
	}
	w := &write{off: io.Off, data: slices.Clone(io.Data[:io.Len/2/sector*sector]), begun: d.events, end: d.events + 1}
	d.events += 2
	d.log = append(d.log, w)
	d.img.write(w.data, w.off)
	return block.ErrMedium
}

// Of a write that failed a part may be on the drive. What did not become visible then does not later.
func TestWhatAFailedWriteLeftStaysOut(t *testing.T) {
	withReady(t, 4, func(t *testing.T, d *drive, tree *Tree, leg *Leg) {
		must(t, block.WriteAt(leg, tagged(1, grainSectors), GrainSize))
		must(t, tree.Freeze(id(1), id(2), nil))
		must(t, block.WriteAt(leg, tagged(3, grainSectors), 5*GrainSize))
		d.broken = d.torn
		if err := block.WriteAt(leg, tagged(4, 2*grainSectors), 0); !errors.Is(err, block.ErrMedium) { // zeroes below, and data
			t.Fatalf("a write to a bad place: %v", err)
		}
		d.broken = nil
		must(t, block.WriteAt(leg, tagged(5, 8), 8192))
		want := slices.Concat(make([]uint64, 16), repeated(5, 8), make([]uint64, 8), repeated(1, grainSectors))
		if got := readObjectAt(t, leg, 0, 2*grainSectors); !slices.Equal(got, want) {
			t.Errorf("the grains read %x, want %x", got, want)
		}
	})
}

// The drive may have a record whose data, written beside it, has failed. A read now and a read after a restart agree.
func TestAFailedWriteBesideItsRecordReadsTheSameLater(t *testing.T) {
	withReady(t, 4, func(t *testing.T, d *drive, tree *Tree, leg *Leg) {
		must(t, block.WriteAt(leg, tagged(1, grainSectors), 5*GrainSize))
		d.broken = d.torn
		if err := block.WriteAt(leg, tagged(2, 16), 0); !errors.Is(err, block.ErrMedium) || tree.Err() != nil {
			t.Fatalf("a write to a bad place: %v; the tree says %v", err, tree.Err())
		}
		d.broken = nil
		now := readObjectAt(t, leg, 0, grainSectors)
		if want := slices.Concat(repeated(2, 8), make([]uint64, 24)); !slices.Equal(now, want) && !slices.Equal(now, make([]uint64, grainSectors)) {
			t.Errorf("the grain reads %x, want zeroes, or the half that was written", now)
		}
		must(t, block.Flush(leg))
		l, err := d.afterCut(t, 1, d.now()).Leg(id(1))
		must(t, err)
		if got := readObjectAt(t, l, 0, grainSectors); !slices.Equal(got, now) && !slices.Equal(got, make([]uint64, grainSectors)) {
			t.Errorf("the grain reads %x, and %x before the restart", got, now)
		}
		must(t, block.Do(leg, &block.IO{Op: block.OpDiscard, Len: GrainSize}))
		must(t, block.Flush(leg))
		l, err = d.afterCut(t, 2, d.now()).Leg(id(1))
		must(t, err)
		if got := readObjectAt(t, l, 0, grainSectors); !slices.Equal(got, make([]uint64, grainSectors)) {
			t.Errorf("after a discard and a restart the grain reads %x", got)
		}
	})
}

// Chunks that are ready, and those that are being zeroed, are free: a tree can be filled to the last one.
func TestReadyChunksCountAsFree(t *testing.T) {
	withReady(t, 1000, func(t *testing.T, d *drive, tree *Tree, leg *Leg) {
		must(t, tree.Grow(id(1), 1<<30))
		space := tree.Space()
		if space.Free != space.Total || space.Empty != block.Size(usable(false))<<20 {
			t.Fatalf("space is %+v, want all of it free", space)
		}
		taken := map[uint32]bool{}
		for c := range int64(space.Total / ChunkSize) {
			must(t, block.WriteAt(leg, tagged(uint64(c+1), 8), c*ChunkSize))
			own := tree.own(leg.layer, uint32(c))
			if taken[own] {
				t.Fatalf("slot %#x is given to two chunks", own)
			}
			taken[own] = true
		}
		if err := block.WriteAt(leg, tagged(1, 8), 1000<<20); !errors.Is(err, block.ErrFull) {
			t.Errorf("a write to a full tree: %v", err)
		}
		for c := range int64(space.Total / ChunkSize) {
			if got := readObjectAt(t, leg, c*ChunkSize, 16); got[0] != uint64(c+1) || got[8] != 0 {
				t.Fatalf("chunk %d reads %x", c, got)
			}
		}
	})
}

// A write that finds only chunks which are being zeroed waits for them.
func TestAWriteWaitsForChunksThatAreBeingZeroed(t *testing.T) {
	withReady(t, 0, func(t *testing.T, d *drive, tree *Tree, leg *Leg) {
		must(t, tree.Grow(id(1), 1<<30))
		free := int64(tree.Space().Free / ChunkSize)
		for c := range free - 2 {
			must(t, block.WriteAt(leg, tagged(1, 8), c*ChunkSize))
		}
		tree.preparing.Lock() // until they are taken out
		tree.space.ahead = 2
		first, n := tree.space.beginZeroing(8)
		if n != 2 {
			t.Fatalf("%d chunks are to be zeroed, want the last 2", n)
		}
		time.AfterFunc(time.Millisecond, func() {
			tree.space.endZeroing(first, n, false)
			tree.preparing.Unlock()
		})
		for c := range int64(2) {
			must(t, block.WriteAt(leg, tagged(2, 8), (free-2+c)*ChunkSize))
		}
	})
}

// An extent can be given back although chunks of it are ready, and none of them is used afterwards.
func TestReadyChunksGoWithTheirExtent(t *testing.T) {
	withReady(t, 300, func(t *testing.T, d *drive, tree *Tree, leg *Leg) {
		has, err := tree.GiveBack(0)
		must(t, err)
		if len(has) != 1 {
			t.Fatalf("the tree has the extents %v, want its home alone", has)
		}
		must(t, tree.Grow(id(1), 1<<30))
		gone := tree.place.offset(0)
		from := d.now()
		for c := range int64(tree.Space().Free / ChunkSize) {
			must(t, block.WriteAt(leg, tagged(1, 8), c*ChunkSize))
		}
		time.Sleep(time.Second)
		for _, w := range d.log {
			if w.begun >= from && w.off >= gone && w.off < gone+extentSize {
				t.Fatalf("%d bytes are written at %d of an extent that was given back", len(w.data), w.off-gone)
			}
		}
	})
}

// slowZeroes is a drive on which zeroing takes time.
type slowZeroes struct {
	block.Device
	takes       time.Duration
	begun, ends atomic.Int64

	mu    sync.Mutex
	unmap []bool
}

// asked says how it was asked for zeroes: whether space may be freed.
func (d *slowZeroes) asked() []bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.unmap)
}

func (d *slowZeroes) Submit(io *block.IO) {
	if io.Op != block.OpWriteZeroes {
		d.Device.Submit(io)
		return
	}
	d.begun.Add(1)
	d.mu.Lock()
	d.unmap = append(d.unmap, io.Unmap)
	d.mu.Unlock()
	time.AfterFunc(d.takes, func() {
		d.ends.Add(1)
		d.Device.Submit(io)
	})
}

func onSlowZeroes(t *testing.T, takes time.Duration, f func(t *testing.T, d *slowZeroes, tree *Tree, leg *Leg)) {
	prepareAhead = 16
	defer func() { prepareAhead = 0 }()
	synctest.Test(t, func(t *testing.T) {
		img := usedBefore(3, 40)
		d := &slowZeroes{Device: &drive{size: testSize, base: img, img: newImage(img)}, takes: takes}
		tree, err := Format(testPlace(d), id(1), 1<<30, nil)
		must(t, err)
		leg, err := tree.Leg(id(1))
		must(t, err)
		f(t, d, tree, leg)
		tree.Close()
	})
}

// A drive that is slow to zero is asked twice in each of two ways, and then left alone for a while.
func TestSlowDrivesAreNotZeroed(t *testing.T) {
	onSlowZeroes(t, 100*time.Millisecond, func(t *testing.T, d *slowZeroes, _ *Tree, leg *Leg) {
		for c := range int64(300) {
			must(t, block.WriteAt(leg, tagged(1, 8), c*ChunkSize))
			time.Sleep(prepareRest / 400)
		}
		want := []bool{true, true, false, false}
		if !slices.Equal(d.asked(), want) {
			t.Errorf("it was asked for zeroes, with space to be freed or not: %v, want %v", d.asked(), want)
		}
		time.Sleep(prepareRest)
		must(t, block.WriteAt(leg, tagged(1, 8), 300*ChunkSize))
		time.Sleep(time.Second)
		if want = slices.Repeat(want, 2); !slices.Equal(d.asked(), want) {
			t.Errorf("after %v it was asked for zeroes, with space to be freed or not: %v, want %v", prepareRest, d.asked(), want)
		}
	})
}

// Whoever has the extents next must not find chunks being zeroed.
func TestCloseWaitsForZeroes(t *testing.T) {
	onSlowZeroes(t, time.Millisecond, func(t *testing.T, d *slowZeroes, tree *Tree, _ *Leg) {
		time.Sleep(time.Microsecond)
		if d.begun.Load() == 0 {
			t.Fatal("nothing is being zeroed: nothing is tried here")
		}
		tree.Close()
		if begun, ended := d.begun.Load(), d.ends.Load(); begun != ended {
			t.Errorf("closed when %d of %d chunks were zeroed", ended, begun)
		}
	})
}

// A drive that cannot zero is written to as before.
func TestDrivesThatCannotZero(t *testing.T) {
	prepareAhead = 16
	defer func() { prepareAhead = 0 }()
	synctest.Test(t, func(t *testing.T) {
		img := usedBefore(3, 40)
		d := &drive{size: testSize, base: img, img: newImage(img), broken: func(io *block.IO) error {
			if io.Op == block.OpWriteZeroes {
				return block.ErrUnsupported
			}
			return nil
		}}
		tree, err := Format(testPlace(d), id(1), 64<<20, nil)
		must(t, err)
		leg, err := tree.Leg(id(1))
		must(t, err)
		free := tree.Space().Free
		for c := range int64(20) {
			must(t, block.WriteAt(leg, tagged(1, 8), c*ChunkSize))
			if got := readObjectAt(t, leg, c*ChunkSize, 16); got[8] != 0 {
				t.Fatalf("chunk %d reads %x", c, got)
			}
			time.Sleep(time.Second)
		}
		if took := free - tree.Space().Free; took != 20<<20 {
			t.Errorf("20 chunks are written, and %v are taken", took)
		}
	})
}

// Writes, discards, snapshots and merges in any order read what a plain array would.
func TestReadyChunksAtRandom(t *testing.T) {
	withReady(t, 8, func(t *testing.T, d *drive, tree *Tree, leg *Leg) {
		r := rand.New(rand.NewPCG(11, 12))
		const sectors = 3 << 20 / sector
		want := make([]uint64, sectors)
		blank := 0
		for op := range 400 {
			at := r.IntN(3)*(1<<20/sector) + r.IntN(4*grainSectors) // a few grains of each chunk
			n := 1 + r.IntN(2*grainSectors)
			io := &block.IO{Op: block.OpWrite, FUA: r.IntN(4) == 0, Off: int64(at) * sector, Len: int64(n) * sector, Data: tagged(uint64(op+1), n)}
			tag := uint64(op + 1)
			switch r.IntN(12) {
			case 0, 1, 2:
				io.Op, io.Data, tag = block.OpWriteZeroes, nil, 0
			case 3:
				io.Op, io.Data, io.FUA, tag = block.OpDiscard, nil, false, 0
				io.Off = io.Off / GrainSize * GrainSize
				io.Len = (io.Len + GrainSize - 1) / GrainSize * GrainSize
				at, n = int(io.Off/sector), int(io.Len/sector)
			case 4:
				must(t, tree.Freeze(id(1), id(uint64(100+op)), nil))
				must(t, tree.Delete(id(uint64(100+op))))
			case 5:
				must(t, tree.Reclaim(t.Context()))
			}
			must(t, block.Do(leg, io))
			for i := range n {
				want[at+i] = tag
			}
			if got := readObjectAt(t, leg, 0, sectors); !slices.Equal(got, want) {
				t.Fatalf("after op %d, %v %d sectors at %d, the leg has something else", op, io.Op, n, at)
			}
			for slot := range tree.used() {
				if tree.isBlank(slot) {
					blank++
				}
			}
		}
		if blank == 0 {
			t.Error("no slot was ever blank: nothing is tried here")
		}
	})
}

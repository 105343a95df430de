// SPDX-License-Identifier: Apache-2.0

package integrity

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"weft.dev/weft/proto/block"
)

// device is a drive without a log, on which bits can be changed.
func device(volatile bool) *drive {
	return &drive{size: testSize, at: true, img: newImage(nil), volatile: volatile}
}

func open(t *testing.T, d block.Device) *Leg {
	t.Helper()
	l, err := Open(testPlace(d))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// onDrive is where a place of the leg is on the drive of testPlace.
func onDrive(at int64) int64 {
	return testPlace(nil).Extents[at/ExtentData] + dataAt + at%ExtentData
}

func (d *drive) flip(r *rand.Rand, at, length int64) {
	var b [1]byte
	at += r.Int64N(length)
	d.img.read(b[:], at)
	b[0] ^= 1 << r.IntN(8)
	d.img.write(b[:], at)
}

// A block of which a bit has changed cannot be read, all others can, and writing it again heals it.
func TestAFlippedBitIsNeverRead(t *testing.T) {
	r := rand.New(rand.NewPCG(5, 6))
	for _, at := range []int64{0, pageData - BlockSize, pageData, ExtentData - BlockSize, ExtentData} {
		d := device(false)
		l := open(t, d)
		data := tagged(uint64(at)+1, 2*BlockSize/sector)
		begin := max(0, at-BlockSize)
		if err := block.WriteAt(l, data, begin); err != nil {
			t.Fatal(err)
		}
		if r.IntN(2) == 0 { // with the checksums from the drive
			l.Close(context.Background())
			l = open(t, d)
		}
		d.flip(r, onDrive(at), BlockSize)
		got := make([]byte, BlockSize)
		err := block.ReadAt(l, got, at)
		if !errors.Is(err, block.ErrChecksum) || !errors.Is(err, block.ErrMedium) {
			t.Fatalf("a read of the block at %d: %v", at, err)
		}
		if err := block.ReadAt(l, make([]byte, sector), at+sector); !errors.Is(err, block.ErrChecksum) {
			t.Errorf("a read of a sector of it: %v", err)
		}
		other := 2*begin + BlockSize - at
		if err := block.ReadAt(l, got, other); err != nil || !bytes.Equal(got, data[other-begin:][:BlockSize]) {
			t.Errorf("the block beside it: %v", err)
		}
		if l.Stats().Mismatches == 0 {
			t.Error("it is not counted")
		}
		if err := block.WriteAt(l, data[at-begin:][:BlockSize], at); err != nil {
			t.Fatal(err)
		}
		if err := block.ReadAt(l, got, at); err != nil || !bytes.Equal(got, data[at-begin:][:BlockSize]) {
			t.Errorf("the block at %d, written again: %v", at, err)
		}
	}
}

// A block that was never written is zeroes, and anything else there is wrong.
func TestWhatAppearsInABlockOfZeroesIsWrong(t *testing.T) {
	d := device(false)
	l := open(t, d)
	d.flip(rand.New(rand.NewPCG(1, 1)), onDrive(pageData), BlockSize)
	if err := block.ReadAt(l, make([]byte, BlockSize), pageData); !errors.Is(err, block.ErrChecksum) {
		t.Errorf("a read: %v", err)
	}
	if err := block.ReadAt(l, make([]byte, BlockSize), 0); err != nil {
		t.Error(err)
	}
}

// A write of a part of a bad block does not make the rest of it right.
func TestAWriteOfAPartDoesNotHealABlock(t *testing.T) {
	d := device(false)
	l := open(t, d)
	if err := block.WriteAt(l, tagged(1, 8), 0); err != nil {
		t.Fatal(err)
	}
	d.flip(rand.New(rand.NewPCG(1, 1)), onDrive(0), sector)
	if err := block.WriteAt(l, tagged(2, 1), sector); err != nil {
		t.Fatal(err)
	}
	if err := block.ReadAt(l, make([]byte, BlockSize), 0); !errors.Is(err, block.ErrChecksum) {
		t.Fatalf("a read: %v", err)
	}
	l.Close(context.Background())
	if err := block.ReadAt(open(t, d), make([]byte, BlockSize), 0); !errors.Is(err, block.ErrChecksum) {
		t.Errorf("a read after the next start: %v", err)
	}
}

// Damage to a page costs no data: its checksums are made again.
func TestADamagedPageIsMadeAgain(t *testing.T) {
	d := device(false)
	l := open(t, d)
	data := tagged(1, 80)
	if err := block.WriteAt(l, data, pageData); err != nil {
		t.Fatal(err)
	}
	l.Close(context.Background())
	page := testPlace(nil).Extents[0] + pagesAt + pageSize
	d.flip(rand.New(rand.NewPCG(1, 1)), page, pageSize)
	l = open(t, d)
	got := make([]byte, len(data))
	if err := block.ReadAt(l, got, pageData); err != nil || !bytes.Equal(got, data) {
		t.Fatalf("read: %v", err)
	}
	if s := l.Stats(); s.Damaged != 1 || s.Mismatches != 0 {
		t.Errorf("counted %+v", s)
	}
	l.Close(context.Background())
	d.flip(rand.New(rand.NewPCG(1, 1)), onDrive(pageData), BlockSize)
	if err := block.ReadAt(open(t, d), got, pageData); !errors.Is(err, block.ErrChecksum) {
		t.Errorf("with its checksums made again, a flipped bit: %v", err)
	}
}

// A page of another place, as after a write that went astray, does not count.
func TestAPageOfAnotherPlaceDoesNotCount(t *testing.T) {
	d := device(false)
	l := open(t, d)
	if err := block.WriteAt(l, tagged(1, 8), 0); err != nil {
		t.Fatal(err)
	}
	if err := block.WriteAt(l, tagged(2, 8), pageData); err != nil {
		t.Fatal(err)
	}
	l.Close(context.Background())
	page := make([]byte, pageSize)
	d.img.read(page, testPlace(nil).Extents[0]+pagesAt)
	d.img.write(page, testPlace(nil).Extents[0]+pagesAt+pageSize)
	l = open(t, d)
	if err := block.ReadAt(l, make([]byte, BlockSize), pageData); err != nil {
		t.Errorf("the data is right, and is not read: %v", err)
	}
	if l.Stats().Damaged != 1 {
		t.Errorf("%+v", l.Stats())
	}
}

// counting counts the writes of a drive.
type counting struct {
	*drive
	writes, flushes atomic.Int64
}

func (c *counting) Submit(io *block.IO) {
	switch io.Op {
	case block.OpWrite, block.OpWriteZeroes:
		c.writes.Add(1)
	case block.OpFlush:
		c.flushes.Add(1)
	}
	c.drive.Submit(io)
}

// A page costs a write before the first write to a part of it, one more when another part follows,
// and one when it is quiet again. Zeroes over zeroes cost none.
func TestWhatWritesCost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &counting{drive: device(true)}
		l := open(t, d)
		writes := func(at ...int64) int64 {
			t.Helper()
			before := d.writes.Load()
			for _, at := range at {
				if err := block.WriteAt(l, tagged(uint64(at)+9, 8), at); err != nil {
					t.Fatal(err)
				}
			}
			return d.writes.Load() - before - int64(len(at))
		}
		for i, c := range []struct {
			at   []int64
			more int64
		}{
			{[]int64{0}, 1},
			{[]int64{0, BlockSize, 31 * BlockSize, 0}, 0},
			{[]int64{32 * BlockSize}, 1},
			{[]int64{64 * BlockSize, 959 * BlockSize}, 0},
			{[]int64{960 * BlockSize}, 1},
		} {
			if got := writes(c.at...); got != c.more {
				t.Errorf("%d: writes at %v cost %d more, want %d", i, c.at, got, c.more)
			}
		}
		before := d.writes.Load()
		sleep(3)
		if got := d.writes.Load() - before; got != 2 || d.flushes.Load() == 0 {
			t.Errorf("two quiet pages: %d writes, %d flushes", got, d.flushes.Load())
		}
		before = d.writes.Load()
		if err := block.Do(l, &block.IO{Op: block.OpWriteZeroes, Off: 2 * pageData, Len: pageData}); err != nil {
			t.Fatal(err)
		}
		if got := d.writes.Load() - before; got != 1 {
			t.Errorf("zeroes over zeroes: %d writes", got)
		}
	})
}

// What the drive has lost after a failed flush is not called wrong.
func TestLostWritesAreNotCalledWrong(t *testing.T) {
	var losses atomic.Uint64
	d := device(true)
	place := testPlace(d)
	place.Losses = losses.Load
	l, err := Open(place)
	if err != nil {
		t.Fatal(err)
	}
	if err := block.WriteAt(l, tagged(1, 8), 0); err != nil {
		t.Fatal(err)
	}
	d.img.write(make([]byte, BlockSize), onDrive(0)) // as it was before the write
	losses.Add(1)
	got := tagged(3, 8)
	if err := block.ReadAt(l, got, 0); err != nil || tags(got)[0] != 0 {
		t.Errorf("read %x: %v", tags(got)[0], err)
	}
}

// After a failed write it is not known what the block holds; it can be read.
func TestAFailedWriteLeavesABlockThatCanBeRead(t *testing.T) {
	d := device(false)
	l := open(t, d)
	if err := block.WriteAt(l, tagged(1, 8), 0); err != nil {
		t.Fatal(err)
	}
	d.broken = func(io *block.IO) error {
		if io.Op == block.OpWrite && io.Off == onDrive(0) {
			d.img.write(io.Data[:sector], io.Off) // a part of it
			return block.ErrMedium
		}
		return nil
	}
	if err := block.WriteAt(l, tagged(2, 8), 0); !errors.Is(err, block.ErrMedium) {
		t.Fatalf("write: %v", err)
	}
	got := make([]byte, BlockSize)
	if err := block.ReadAt(l, got, 0); err != nil || !slices.Equal(tags(got), []uint64{2, 1, 1, 1, 1, 1, 1, 1}) {
		t.Errorf("read %x: %v", tags(got), err)
	}
}

// Few pages fit in memory, and many are written to by many at once.
func TestManyWritersAndLittleMemory(t *testing.T) {
	d := device(false)
	l := open(t, d)
	l.pagesMost, l.markedMost = 4, 3
	var all sync.WaitGroup
	errs := make(chan error, 8)
	for w := range 8 {
		all.Go(func() {
			r := rand.New(rand.NewPCG(9, uint64(w)))
			is := map[int64]uint64{}
			for i := range 150 {
				at := r.Int64N(40)*pageData + int64(w)*BlockSize
				if tag, ok := is[at]; ok && r.IntN(2) == 0 {
					b := make([]byte, BlockSize)
					if err := block.ReadAt(l, b, at); err != nil || tags(b)[3] != tag {
						errs <- fmt.Errorf("at %d read %x, want %x: %w", at, tags(b)[3], tag, err)
						return
					}
					continue
				}
				is[at] = uint64(w)<<32 + uint64(i) + 1
				if err := block.WriteAt(l, tagged(is[at], 8), at); err != nil {
					errs <- err
					return
				}
			}
		})
	}
	all.Wait()
	close(errs)
	for err := range errs {
		t.Error(err)
	}
	l.Close(context.Background())
	if n := len(l.pages); n > 4+3+8 {
		t.Errorf("%d pages in memory", n)
	}
	if l.marked != 0 {
		t.Errorf("%d marks are left", l.marked)
	}
}

// Overlapping IOs leave checksums that fit, whichever came last.
func TestOverlappingWritesLeaveRightChecksums(t *testing.T) {
	d := device(false)
	l := open(t, d)
	var all sync.WaitGroup
	for w := range 6 {
		all.Go(func() {
			r := rand.New(rand.NewPCG(3, uint64(w)))
			for i := range 200 {
				n := 1 + r.IntN(40)
				at := int64(r.IntN(64-n)) * sector
				if r.IntN(2) == 0 {
					if err := block.ReadAt(l, make([]byte, n*sector), at); err != nil {
						t.Error(err)
						return
					}
					continue
				}
				if err := block.WriteAt(l, tagged(uint64(w*1000+i+1), n), at); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	l.Close(context.Background())
	if _, err := check(d.img); err != nil {
		t.Error(err)
	}
}

// A leg grows by extents, and keeps what it has.
func TestALegGrows(t *testing.T) {
	d := device(false)
	l := open(t, d)
	if err := block.WriteAt(l, tagged(1, 8), 0); err != nil {
		t.Fatal(err)
	}
	larger := testPlace(d)
	larger.Extents = append(larger.Extents, 8<<20+256<<20)
	larger.Size = 3 * block.CheckedData
	if err := l.Grow(larger); err != nil {
		t.Fatal(err)
	}
	if err := block.WriteAt(l, tagged(2, 8), 3*ExtentData-BlockSize); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, BlockSize)
	if err := block.ReadAt(l, got, 0); err != nil || tags(got)[0] != 1 {
		t.Errorf("read %x: %v", tags(got)[0], err)
	}
	larger.Extents = larger.Extents[1:]
	if err := l.Grow(larger); !errors.Is(err, block.ErrRange) {
		t.Errorf("other extents: %v", err)
	}
	if err := l.Grow(testPlace(d)); !errors.Is(err, block.ErrRange) {
		t.Errorf("smaller: %v", err)
	}
}

// A page that a newer version wrote is not written over.
func TestAPageOfANewerVersionIsLeftAlone(t *testing.T) {
	d := device(false)
	c := content{}
	b := make([]byte, pageSize)
	c.encode(b, testLeg, 0)
	b[4] = 2
	reseal(b)
	at := testPlace(nil).Extents[0] + pagesAt
	d.img.write(b, at)
	l := open(t, d)
	if err := block.WriteAt(l, tagged(1, 8), 0); err == nil {
		t.Error("a write succeeds")
	}
	got := make([]byte, pageSize)
	if d.img.read(got, at); !bytes.Equal(got, b) {
		t.Error("the page was changed")
	}
}

// A leg that must end now leaves its marks, and loses nothing by that: the next opening takes the
// checksums from the data.
func TestALegThatEndsAtOnceLeavesItsMarks(t *testing.T) {
	d := device(false)
	l, data := open(t, d), tagged(7, 8)
	if err := block.WriteAt(l, data, sectorAt(0)); err != nil {
		t.Fatal(err)
	}
	over, cancel := context.WithCancel(t.Context())
	cancel()
	l.Close(over)
	if marked, err := check(d.img); marked == 0 || err != nil {
		t.Errorf("%d parts have marks, %v; want some: there was no time", marked, err)
	}
	l = open(t, d)
	got := make([]byte, len(data))
	if err := block.ReadAt(l, got, sectorAt(0)); err != nil || !slices.Equal(got, data) {
		t.Errorf("read %v: %v", tags(got), err)
	}
	l.Close(t.Context())
	if marked, err := check(d.img); marked != 0 || err != nil {
		t.Errorf("%d parts have marks, %v; want none", marked, err)
	}
}

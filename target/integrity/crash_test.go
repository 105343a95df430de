// SPDX-License-Identifier: Apache-2.0

package integrity

import (
	"context"
	"encoding/binary"
	"flag"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
)

var (
	histories = flag.Int("histories", 2, "random histories of each kind of drive")
	firstSeed = flag.Uint64("first", 1, "seed of the first one")
	opCount   = flag.Int("ops", 25, "operations of a history")
)

const (
	testSize = 8<<20 + 3*256<<20 + 8<<20
	legSize  = block.CheckedData + 4*block.MiB
)

var testLeg = block.LegID{UUID: block.UUID{0xaa, 1}}

// windows are the parts of a leg that histories write to: at its start, across two pages, and across
// two extents.
var windows = [][2]int64{{0, 48 << 10}, {pageData - 16<<10, pageData + 160<<10}, {ExtentData - 24<<10, ExtentData + 24<<10}}

func testPlace(d block.Device) Place {
	return Place{Device: d, Leg: testLeg, Size: legSize, Extents: []int64{8<<20 + 512<<20, 8 << 20}}
}

func windowSectors() (n int) {
	for _, w := range windows {
		n += int(w[1]-w[0]) / sector
	}
	return n
}

// sectorAt is the place of a sector of the windows in the leg.
func sectorAt(i int) int64 {
	for _, w := range windows {
		n := int(w[1]-w[0]) / sector
		if i < n {
			return w[0] + int64(i)*sector
		}
		i -= n
	}
	panic("beyond the windows")
}

// tagged is data of which each sector says which write it is of, at both ends.
func tagged(tag uint64, sectors int) []byte {
	b := make([]byte, sectors*sector)
	for i := range sectors {
		binary.LittleEndian.PutUint64(b[i*sector:], tag)
		binary.LittleEndian.PutUint64(b[(i+1)*sector-8:], tag)
	}
	return b
}

func tags(b []byte) []uint64 {
	out := make([]uint64, len(b)/sector)
	for i := range out {
		out[i] = binary.LittleEndian.Uint64(b[i*sector:])
		if binary.LittleEndian.Uint64(b[(i+1)*sector-8:]) != out[i] {
			out[i] = ^uint64(0)
		}
	}
	return out
}

func readWindows(l *Leg) (out []uint64, err error) {
	for _, w := range windows {
		b := make([]byte, w[1]-w[0])
		if err := block.ReadAt(l, b, w[0]); err != nil {
			return nil, err
		}
		out = append(out, tags(b)...)
	}
	return out, nil
}

// model is what the leg holds, by sector of the windows, and what else a sector may hold after a
// power cut.
type model struct {
	is  []uint64
	may map[int][]uint64
}

func (m model) clone() model {
	c := model{slices.Clone(m.is), map[int][]uint64{}}
	for i, x := range m.may {
		c.may[i] = slices.Clone(x)
	}
	return c
}

type world struct {
	r    *rand.Rand
	d    *drive
	l    *Leg
	m    model
	next uint64
}

func (w *world) note(i int, v uint64) {
	w.m.may[i] = append(w.m.may[i], w.m.is[i])
	w.m.is[i] = v
}

// span is a run of sectors inside one window, mostly of whole blocks.
func (w *world) span(most int) (at, n int) {
	k := w.r.IntN(len(windows))
	first := 0
	for _, v := range windows[:k] {
		first += int(v[1]-v[0]) / sector
	}
	size := int(windows[k][1]-windows[k][0]) / sector
	if w.r.IntN(3) > 0 {
		n = 8 * (1 + w.r.IntN(min(most, size)/8))
		return first + 8*w.r.IntN((size-n)/8+1), n
	}
	n = 1 + w.r.IntN(min(most, size))
	return first + w.r.IntN(size-n+1), n
}

type writing struct {
	at, n int
	tag   uint64
	err   error
}

func (w *world) burst(count int) (all []*writing) {
	for range count {
		x := &writing{}
		x.at, x.n = w.span([]int{8, 24, 96}[w.r.IntN(3)])
		if slices.ContainsFunc(all, func(o *writing) bool { return x.at < o.at+o.n && o.at < x.at+x.n }) {
			continue
		}
		w.next++
		x.tag = w.next
		all = append(all, x)
		for i := range x.n {
			w.note(x.at+i, x.tag)
		}
	}
	return all
}

func (w *world) write(all []*writing) error {
	var done sync.WaitGroup
	for _, x := range all {
		done.Go(func() {
			x.err = block.Do(w.l, &block.IO{Op: block.OpWrite, FUA: x.tag%5 == 0, Off: sectorAt(x.at), Len: int64(x.n) * sector, Data: tagged(x.tag, x.n)})
		})
	}
	done.Wait()
	for _, x := range all {
		if x.err != nil {
			return x.err
		}
	}
	return nil
}

// step does one random operation. before is called with what is to be, when the leg has not been
// touched.
func (w *world) step(before func()) error {
	if !w.d.volatile {
		clear(w.m.may)
	}
	switch x := w.r.IntN(100); {
	case x < 55:
		all := w.burst(1 + w.r.IntN(5))
		before()
		return w.write(all)
	case x < 70:
		return w.zero(before)
	case x < 85: // marks go
		before()
		time.Sleep(3 * quiet)
		return nil
	case x < 90: // an orderly stop
		before()
		w.l.Close(context.Background())
		var err error
		w.l, err = Open(testPlace(w.d))
		return err
	}
	before()
	if err := block.Flush(w.l); err != nil {
		return err
	}
	clear(w.m.may)
	return nil
}

// zero discards, or writes zeroes. A discard leaves the edges of its range as they are.
func (w *world) zero(before func()) error {
	io := &block.IO{Op: block.OpDiscard, Unmap: w.r.IntN(2) == 0}
	at, n := w.span(60)
	io.Off, io.Len = sectorAt(at), int64(n)*sector
	if w.r.IntN(12) == 0 { // across windows
		io.Off, io.Len = windows[1][0]-1<<20, pageData+2<<20
	}
	from, to := (io.Off+BlockSize-1)/BlockSize*BlockSize, (io.Off+io.Len)/BlockSize*BlockSize
	if w.r.IntN(2) == 0 {
		io.Op, io.FUA = block.OpWriteZeroes, w.r.IntN(2) == 0
		from, to = io.Off, io.Off+io.Len
	}
	for i := range windowSectors() {
		if p := sectorAt(i); p >= from && p < to {
			w.note(i, 0)
		}
	}
	before()
	return block.Do(w.l, io)
}

func (w *world) verify() error {
	got, err := readWindows(w.l)
	if err != nil {
		return err
	}
	for i := range got {
		if got[i] != w.m.is[i] {
			return fmt.Errorf("sector %d reads %x, want %x", i, got[i], w.m.is[i])
		}
	}
	return nil
}

// check compares the blocks of the windows with their checksums, by the words of the format and
// without the package's code. It returns how many of them have a mark.
func check(img *image) (marked int, err error) {
	table, extents := crc32.MakeTable(crc32.Castagnoli), testPlace(nil).Extents
	for i := 0; i < windowSectors(); i += 8 {
		extent, at := sectorAt(i)/(255<<20), sectorAt(i)%(255<<20)
		number, nth := at/(960*4096), at/4096%960
		page, data := make([]byte, 4096), make([]byte, 4096)
		img.read(page, extents[extent]+576<<10+number*4096)
		img.read(data, extents[extent]+1<<20+at)
		mark := binary.LittleEndian.Uint32(page[8:])
		switch {
		case [4096]byte(page) == [4096]byte{}:
		case crc32.Checksum(page[4:], table) != binary.LittleEndian.Uint32(page):
			mark = 1<<30 - 1 // damaged
		case binary.LittleEndian.Uint64(page[32:]) != uint64(extent*68+number) || block.UUID(page[16:32]) != testLeg.UUID:
			return 0, fmt.Errorf("page %d of extent %d says that it is another", number, extent)
		}
		if mark>>(nth/32)&1 == 1 {
			marked++
			continue
		}
		is, want := crc32.Checksum(data, table)^0x98f94189, binary.LittleEndian.Uint32(page[256+4*nth:])
		if is != want {
			return 0, fmt.Errorf("block %d of page %d of extent %d has checksum %08x, the page says %08x", nth, number, extent, is, want)
		}
	}
	return marked, nil
}

type counts struct{ points, marked, adopted int }

// history does random operations, and cuts the power before every event of each.
func history(seed uint64, volatile bool, n *counts) error {
	r := rand.New(rand.NewPCG(seed, 11))
	d := &drive{size: testSize, volatile: volatile, base: newImage(nil), img: newImage(nil)}
	l, err := Open(testPlace(d))
	if err != nil {
		return err
	}
	w := &world{r: r, d: d, l: l, m: model{make([]uint64, windowSectors()), map[int][]uint64{}}}
	for op := range *opCount {
		d.fold()
		start := d.now()
		before := w.m.clone()
		var after model
		if err := w.step(func() { after = w.m.clone() }); err != nil {
			return fmt.Errorf("op %d: %w", op, err)
		}
		if err := w.verify(); err != nil {
			return fmt.Errorf("op %d: %w", op, err)
		}
		for k, end := start, d.now(); k <= end; k++ {
			n.points++
			if err := afterCut(r, d.crash(r, k), volatile, before, after, n); err != nil {
				return fmt.Errorf("op %d, cut before event %d of %d-%d: %w", op, k, start, end, err)
			}
		}
	}
	w.l.Close(context.Background())
	if s := w.l.Stats(); s != (Stats{}) {
		return fmt.Errorf("without a cut, the leg has met %+v", s)
	}
	marked, err := check(d.img)
	if marked > 0 {
		return fmt.Errorf("after an orderly stop, %d blocks have marks", marked)
	}
	return err
}

// afterCut opens what a power cut has left, reads it, writes to it and stops in order.
func afterCut(r *rand.Rand, img *image, volatile bool, before, after model, n *counts) error {
	marked, err := check(img)
	if err != nil {
		return err
	}
	n.marked += min(marked, 1)
	d := &drive{size: testSize, volatile: volatile, at: true, img: img}
	l, err := Open(testPlace(d))
	if err != nil {
		return err
	}
	first := before.is[0]
	if r.IntN(4) == 0 { // the first use is a write
		first = 1 << 40
		if err := block.WriteAt(l, tagged(first, 1), 0); err != nil {
			return err
		}
	}
	got, err := readWindows(l)
	if err != nil {
		return err
	}
	for i, v := range got {
		ok := v == before.is[i] || v == after.is[i] || slices.Contains(before.may[i], v) || slices.Contains(after.may[i], v)
		if !ok && (i > 0 || v != first) {
			return fmt.Errorf("sector %d is %x", i, v)
		}
	}
	l.Close(context.Background())
	n.adopted += int(min(l.Stats().Adopted, 1))
	if marked, err = check(d.img); err == nil && marked > 0 {
		err = fmt.Errorf("an orderly stop leaves marks of %d blocks", marked)
	}
	return err
}

func TestCrashAtEveryWrite(t *testing.T) {
	for _, volatile := range []bool{false, true} {
		t.Run(map[bool]string{false: "durable", true: "volatile"}[volatile], func(t *testing.T) {
			var n counts
			for seed := *firstSeed; seed < *firstSeed+uint64(*histories); seed++ {
				synctest.Test(t, func(t *testing.T) {
					if err := history(seed, volatile, &n); err != nil {
						t.Fatalf("seed %d: %v", seed, err)
					}
				})
			}
			t.Logf("%d histories, %d places of a cut, %d with marks, %d with blocks whose checksums were older", *histories, n.points, n.marked, n.adopted)
			if n.points == 0 || n.marked == 0 || n.adopted == 0 {
				t.Error("the histories do not reach what they should")
			}
		})
	}
}

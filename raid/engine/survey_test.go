// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"testing"

	"weft.dev/weft/proto/block"
)

// thin makes a world's volume thin. Most of its legs know where they have data.
func (w *world) thin(seed uint64) {
	w.cfg.Thin = true
	r := rand.New(rand.NewPCG(seed, 78))
	for _, copies := range w.legs {
		for _, l := range copies {
			if r.IntN(8) > 0 {
				l.maps = r
			}
		}
	}
}

func playThin(seed uint64, weak guards) (string, *world) {
	w := newWorld(seed, weak, errant{})
	w.thin(seed)
	return w.play(seed), w
}

func TestRandomHistoriesOfThinVolumes(t *testing.T) {
	seeds := *histories
	if testing.Short() || raced { // it is one goroutine
		seeds = min(seeds, 60)
	}
	var sum world
	skipped := block.Size(0)
	for seed := *firstSeed; seed < *firstSeed+seeds; seed++ {
		bad, w := playThin(seed, guards{})
		if bad != "" {
			t.Fatalf("%s\nreproduce: go test -run HistoriesOfThin -seed %d -histories 1", bad, seed)
		}
		sum.acks += w.acks
		sum.rebuilds += w.rebuilds
		for _, legs := range w.v.Status().Legs {
			for _, l := range legs {
				skipped += l.Skipped // by the last engine of each
			}
		}
	}
	t.Logf("%d histories: %d writes acknowledged, %d legs rebuilt, %v not copied", seeds, sum.acks, sum.rebuilds, skipped)
	if n := int(seeds); sum.acks < 20*n || sum.rebuilds < n || skipped < block.Size(n)*64*block.KiB {
		t.Error("too little happened")
	}
}

func TestEachRuleOfThinVolumesIsNeeded(t *testing.T) {
	if raced {
		t.Skip("one goroutine has no races; run it without the detector")
	}
	for name, c := range map[string]struct {
		from uint64
		weak guards
	}{
		"only the leg in sync is asked":       {weak: guards{sourceAlone: true}},
		"users write while legs are asked":    {weak: guards{copiesPass: true}},
		"copies discard as they like":         {weak: guards{discardsDiffer: true}},
		"a rebuilt leg is not flushed":        {weak: guards{unflushed: true}},
		"held writes forget what passes them": {weak: guards{forgetPassed: true}},
	} {
		t.Run(name, func(t *testing.T) {
			const most = 6000
			for seed := c.from; seed < c.from+most; seed++ {
				if bad, _ := playThin(seed, c.weak); bad != "" {
					t.Log(bad)
					return
				}
			}
			t.Errorf("no violation in %d histories", most)
		})
	}
}

// mappedLeg is a leg in memory that knows where it has data.
type mappedLeg struct {
	*memory
	t             *testing.T
	fail          atomic.Pointer[error] // of maps
	asked         chan func()           // unless nil: a map waits until the function is called
	read, written atomic.Int64          // bytes
	discarded     atomic.Int64          // bytes
	maps          atomic.Int64          // how many
	flushing      chan *block.IO        // unless nil: flushes wait here
}

func (l *mappedLeg) Submit(io *block.IO) {
	switch io.Op {
	case block.OpRead:
		l.read.Add(io.Len)
	case block.OpWrite:
		l.written.Add(io.Len)
	case block.OpWriteZeroes:
		l.discarded.Add(io.Len)
	case block.OpFlush:
		if l.flushing != nil {
			l.flushing <- io
			return
		}
	case block.OpMap:
		l.maps.Add(1)
		if l.asked != nil {
			l.asked <- func() { l.answer(io) }
			return
		}
		l.answer(io)
		return
	}
	l.memory.Submit(io)
}

func (l *mappedLeg) answer(io *block.IO) {
	if err := l.g.CheckMap(io); err != nil {
		l.t.Errorf("map of %d+%d into %d bytes: %v", io.Off, io.Len, len(io.Data), err)
	}
	if err := l.fail.Load(); err != nil {
		io.Complete(*err)
		return
	}
	clear(io.Data)
	l.mu.RLock()
	for at := io.Off; at < io.Off+io.Len; at += 4096 {
		if !block.AllZero(l.data[at:min(at+4096, io.Off+io.Len)]) {
			block.MarkMap(io.Data, at-io.Off, at-io.Off+1)
		}
	}
	l.mu.RUnlock()
	io.Complete(nil)
}

// thinPair is a mirror whose second leg has dropped out.
func thinPair(t *testing.T, events func(Event)) (*Volume, [2]*mappedLeg) {
	t.Helper()
	cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: 4 * block.MiB, BlockSize: 512, Region: 256 * block.KiB, Thin: true, OnEvent: events}
	var legs [2]*mappedLeg
	for i := range legs {
		legs[i] = &mappedLeg{t: t, memory: newMemory(layout(1, 2, block.DefaultChunk).LegSize(cfg.Size))}
		legs[i].g.MaxIO = 64 * block.KiB // which maps need not keep to
	}
	v := volume(t, cfg, legs[0], legs[1])
	if err := v.Drop(0, 1); err != nil {
		t.Fatal(err)
	}
	return v, legs
}

func (l *mappedLeg) forget() {
	for _, n := range []*atomic.Int64{&l.read, &l.written, &l.discarded, &l.maps} {
		n.Store(0)
	}
}

func TestOnlyWhatHasDataIsCopied(t *testing.T) {
	v, legs := thinPair(t, nil)
	copy(legs[0].data[1<<20:], fill(20<<10, 3))
	copy(legs[0].data[3<<20+100<<10:], fill(4<<10, 4))
	copy(legs[0].data[len(legs[0].data)-512:], fill(512, 5))
	copy(legs[1].data[2<<20:], fill(300<<10, 8)) // what the leg had before
	legs[0].forget()
	legs[1].forget()
	if err := v.Add(0, 1, legs[1], Rebuilding, true); err != nil {
		t.Fatal(err)
	}
	until(t, func() bool { return v.Status().Legs[0][1].State == CaughtUp })
	if !bytes.Equal(legs[0].data, legs[1].data) {
		t.Errorf("the copy differs from byte %d on", diffAt(legs[0].data, legs[1].data))
	}
	const data, stale = 20<<10 + 4<<10 + 4<<10, 300 << 10
	if n := legs[0].read.Load(); n != data+stale {
		t.Errorf("%d bytes were read, want %d: those that either leg has", n, data+stale)
	}
	if w, d := legs[1].written.Load(), legs[1].discarded.Load(); w != data || d != stale {
		t.Errorf("%d bytes were written and %d discarded, want %d and %d", w, d, data, stale)
	}
	if got, want := v.Status().Legs[0][1].Skipped, block.Size(len(legs[0].data))-data-stale; got != want {
		t.Errorf("%v were skipped, want %v", got, want)
	}
}

// A leg that cannot say where it has data, whichever it is, is copied whole, and not blamed.
func TestALegWithoutAMapIsCopiedWhole(t *testing.T) {
	for i := range 2 {
		for _, err := range []error{block.ErrUnsupported, block.ErrGone, errors.New("broken")} {
			v, legs := thinPair(t, func(e Event) {
				if e.Kind != LegCaughtUp {
					t.Errorf("%v: %v", e.Kind, e.Err)
				}
			})
			copy(legs[0].data[1<<20:], fill(20<<10, 3))
			copy(legs[1].data[2<<20:], fill(300<<10, 8))
			legs[i].fail.Store(&err)
			legs[0].forget()
			if err := v.Add(0, 1, legs[1], Rebuilding, true); err != nil {
				t.Fatal(err)
			}
			until(t, func() bool { return v.Status().Legs[0][1].State == CaughtUp })
			if !bytes.Equal(legs[0].data, legs[1].data) {
				t.Errorf("leg %d has no map: the copy differs from byte %d on", i, diffAt(legs[0].data, legs[1].data))
			}
			if n := legs[0].read.Load(); n != int64(len(legs[0].data)) {
				t.Errorf("leg %d has no map: %d bytes were read of %d", i, n, len(legs[0].data))
			}
			if n, first := legs[i].maps.Load(), int64(mostLanes); errors.Is(err, block.ErrUnsupported) && n > first {
				t.Errorf("leg %d has no map and was asked %d times", i, n)
			}
		}
	}
}

// A write to a region waits while its legs are asked, so that what is skipped is not what it writes.
func TestAWriteWaitsWhileLegsAreAsked(t *testing.T) {
	v, legs := thinPair(t, nil)
	legs[0].asked = make(chan func(), 64)
	if err := v.Add(0, 1, legs[1], Rebuilding, true); err != nil {
		t.Fatal(err)
	}
	answer := <-legs[0].asked // of the first region, or one of the next
	others := make(chan struct{})
	go func() {
		defer close(others)
		for {
			select {
			case answer := <-legs[0].asked:
				answer()
			case <-t.Context().Done():
				return
			}
		}
	}()
	var writes []chan error
	for region := range int64(16) {
		writes = append(writes, start(v, write(region<<18+8192, fill(4096, uint64(region+1)))))
	}
	until(t, func() bool { return v.Status().InFlight == 2 }) // a write, and the copy that it waits for
	answer()
	for _, w := range writes {
		if err := wait(t, w); err != nil {
			t.Fatal(err)
		}
	}
	until(t, func() bool { return v.Status().Legs[0][1].State == CaughtUp })
	if !bytes.Equal(legs[0].data, legs[1].data) {
		t.Errorf("the copy differs from byte %d on", diffAt(legs[0].data, legs[1].data))
	}
}

// What a leg reads as zeroes may be in its volatile cache only, until it is flushed.
func TestWhatIsSkippedMayNotBeDurable(t *testing.T) {
	v, legs := thinPair(t, nil)
	legs[1].flushing = make(chan *block.IO, 8)
	if err := v.Add(0, 1, legs[1], Rebuilding, true); err != nil {
		t.Fatal(err)
	}
	flush := <-legs[1].flushing // everything is skipped
	if n := v.Status().Legs[0][1].Dirty; n != 0 {
		t.Errorf("%d regions are left to copy", n)
	}
	if err := v.Drop(0, 1); err != nil {
		t.Fatal(err)
	}
	if l := v.Status().Legs[0][1]; l.Dirty != l.Regions {
		t.Errorf("the leg was dropped before it was flushed, and misses %d regions of %d", l.Dirty, l.Regions)
	}
	flush.Complete(nil)
}

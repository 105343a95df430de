// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/figures"
)

func TestEachIOOfUsersCountsOnceAndOnEachLegThatHadIt(t *testing.T) {
	cfg := Config{Layout: layout(2, 2, block.DefaultChunk), Size: 16 * block.MiB}
	v := volume(t, cfg, memories(cfg)...)
	was := v.Figures()
	for _, io := range []*block.IO{
		write(0, make([]byte, 4096)), write(0, make([]byte, 1<<20)), read(4096, make([]byte, 8192)),
		{Op: block.OpWriteZeroes, Len: 4096}, {Op: block.OpDiscard, Len: 2 << 20}, {Op: block.OpFlush},
	} {
		if err := block.Do(v, io); err != nil {
			t.Fatal(err)
		}
	}
	now := v.Figures()
	f, ok := now.Volume.Since(&was.Volume)
	if !ok {
		t.Fatal("counts went back")
	}
	for op, want := range map[figures.Op][2]uint64{
		figures.Read: {1, 8192}, figures.Write: {3, 1<<20 + 8192}, figures.Discard: {1, 2 << 20}, figures.Flush: {1, 0},
	} {
		if got := f[op]; got.IOs != want[0] || got.Bytes != want[1] || got.Errors != 0 || got.Latency.Count() != want[0] {
			t.Errorf("%v: %d I/Os, %d bytes, %d errors, %d latencies; want %v", op, got.IOs, got.Bytes, got.Errors, got.Latency.Count(), want)
		}
	}
	var written, readBytes uint64
	for k := range now.Legs {
		for copy := range now.Legs[k] {
			l, _ := now.Legs[k][copy].Since(&was.Legs[k][copy])
			written += l[figures.Write].Bytes
			readBytes += l[figures.Read].Bytes
		}
	}
	// Discards are writes of zeroes on mirrors.
	if want := uint64(2 * (1<<20 + 8192 + 2<<20)); written != want || readBytes != 8192 {
		t.Errorf("legs: %d bytes written and %d read; want %d and 8192", written, readBytes, want)
	}
	if now.Held != 0 {
		t.Errorf("held for %v, and nothing was held", now.Held)
	}
}

// countedClock counts how often it is read.
type countedClock struct {
	realClock
	reads *atomic.Int64
}

func (c countedClock) now() int64 {
	c.reads.Add(1)
	return c.realClock.now()
}

// Batches of writes to one lock unit take 100 µs and 300 µs in turn.
func TestWhereIOsAreManySomeAreTimedAndAllCount(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: block.MiB}
		var reads atomic.Int64
		v, err := newVolume(cfg, countedClock{realClock{time.Now()}, &reads})
		if err != nil {
			t.Fatal(err)
		}
		legs := []*slow{{memory: newMemory(cfg.Size)}, {memory: newMemory(cfg.Size)}}
		for copy, leg := range legs {
			if err := v.Add(0, copy, leg, InSync, false); err != nil {
				t.Fatal(err)
			}
		}
		answerAll(legs)
		data := make([]byte, 4096)
		batches := func(n int) {
			for i := range n {
				for at := range int64(64) {
					io := write(at*4096, data)
					io.Done = func(*block.IO) {}
					v.Submit(io)
				}
				time.Sleep([]time.Duration{100, 300}[i%2] * time.Microsecond)
				answerAll(legs)
			}
		}
		batches(32) // until the pace is known
		was := v.Figures()
		reads.Store(0)
		const n = 2000
		batches(n)
		if per := float64(reads.Load()) / (64 * n); per > 1.1 {
			t.Errorf("the clock is read %.2f times for each write, want 1 and 2 in 32", per)
		}

		now := v.Figures()
		check := func(who string, now, was *figures.Figures) {
			t.Helper()
			since, _ := now.Since(was)
			w := since[figures.Write]
			if w.IOs != 64*n || w.Bytes != 64*n*4096 || w.Latency.Count() < 64*n-400 || w.Latency.Count() > 64*n+400 {
				t.Errorf("%s: %d writes of %d bytes, %d latencies; want %d", who, w.IOs, w.Bytes, w.Latency.Count(), 64*n)
			}
			short := float64(w.Latency[figures.Bucket(100*time.Microsecond)]) / float64(w.Latency.Count())
			long := float64(w.Latency[figures.Bucket(300*time.Microsecond)]) / float64(w.Latency.Count())
			if short < 0.45 || short > 0.55 || long < 0.45 || long > 0.55 {
				t.Errorf("%s: %.2f took 100 µs, %.2f took 300 µs; want half and half", who, short, long)
			}
		}
		check("the volume", &now.Volume, &was.Volume)
		for copy := range legs {
			check("a leg", &now.Legs[0][copy], &was.Legs[0][copy])
		}
	})
}

func TestHeldTimeIsThatOfHoldsErrorsAndLostLegs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: block.MiB}
		silent := &slow{memory: newMemory(cfg.Size)}
		v := volume(t, cfg, newMemory(cfg.Size), silent)
		silent.answer(nil) // the flush of Add
		done := 0
		submit := func() {
			io := write(0, make([]byte, 4096))
			io.Done = func(*block.IO) { done++ }
			v.Submit(io)
		}
		held := func(want time.Duration, when string) {
			t.Helper()
			if got := v.Figures().Held.Round(time.Millisecond); got != want {
				t.Errorf("%s: held for %v, want %v", when, got, want)
			}
		}

		submit()
		time.Sleep(time.Second)
		held(0, "a slow leg")
		silent.answer(nil)
		held(0, "it has answered")

		v.Suspend()
		submit()
		time.Sleep(2 * time.Second)
		held(2*time.Second, "suspended")
		v.Resume()
		silent.answer(nil)
		time.Sleep(time.Hour)
		held(2*time.Second, "resumed")

		submit()
		time.Sleep(3 * time.Second)
		if err := v.Drop(0, 1); err != nil {
			t.Fatal(err)
		}
		silent.answer(errors.New("cut"))
		time.Sleep(time.Hour)
		held(5*time.Second, "a silent leg was dropped")
		if done != 3 {
			t.Errorf("%d of 3 writes are answered", done)
		}
		if f := v.Figures().Volume[figures.Write]; f.Latency.Quantile(1) < 2800*time.Millisecond || f.Latency.Quantile(1) > 3200*time.Millisecond {
			t.Errorf("the longest write took %v, want 3s", f.Latency.Quantile(1))
		}
	})
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
)

// oneByOne is a leg that serves one IO at a time, in 100 µs, whoever asks.
type oneByOne struct {
	block.Device
	mu   sync.Mutex
	free time.Time // when it has served all that it was asked for
}

func (d *oneByOne) Submit(io *block.IO) {
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	if d.free.Before(now) {
		d.free = now
	}
	d.free = d.free.Add(100 * time.Microsecond)
	time.AfterFunc(d.free.Sub(now), func() { d.Device.Submit(io) })
}

// rate is how much hosts with these turns, which begin to read the same volume at the same moment, read of it
// together, divided by what one of them reads alone. The time is virtual.
func rate(t *testing.T, copies int, turns ...uint32) (ratio float64) {
	const reads, size = 64, 128 * block.KiB
	read := func(turns []uint32) (took time.Duration) {
		synctest.Test(t, func(t *testing.T) {
			legs := make([]block.Device, copies)
			for i := range legs {
				legs[i] = &oneByOne{Device: newMemory(reads * size)}
			}
			var hosts sync.WaitGroup
			began := time.Now()
			for _, turn := range turns {
				v := volume(t, Config{Layout: layout(1, copies, block.DefaultChunk), Size: reads * size, ReadOnly: true, Turn: turn}, legs...)
				hosts.Go(func() {
					for i := range int64(reads) {
						if err := block.ReadAt(v, make([]byte, size), i*int64(size)); err != nil {
							t.Error(err)
						}
					}
				})
			}
			hosts.Wait()
			took = time.Since(began)
		})
		return took
	}
	one := read(turns[:1])
	return float64(len(turns)) * one.Seconds() / read(turns).Seconds()
}

// Hosts that read a data set from its beginning, all at the same time, read from all of its copies.
func TestReadersOfTheSameDataReadFromAllCopies(t *testing.T) {
	for _, c := range []struct {
		copies int
		turns  []uint32
		least  float64
		most   float64
	}{
		{2, []uint32{0, 0}, 0, 1.5}, // of the same turn they follow one another from leg to leg; 1.21 where one is late by a read
		{2, []uint32{0, 1}, 1.9, 2.1},
		{2, []uint32{7, 6, 5, 4}, 1.9, 2.1},
		{3, []uint32{0, 1, 2}, 2.8, 3.1},
	} {
		got := rate(t, c.copies, c.turns...)
		t.Logf("%d hosts with turns %v read %.2f times what one reads, of %d copies", len(c.turns), c.turns, got, c.copies)
		if got < c.least || got > c.most {
			t.Errorf("that is not %.1f to %.1f", c.least, c.most)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"sync/atomic"
	"testing"

	"weft.dev/weft/proto/block"
)

// full is a leg that can be read and fails writes.
type full struct {
	*memory
	flushes bool // and no flushes
}

func (f full) Submit(io *block.IO) {
	if io.Op == block.OpRead || io.Op == block.OpFlush && !f.flushes {
		f.memory.Submit(io)
		return
	}
	io.Complete(errDisk)
}

// replaced makes a mirror whose first copy fails writes and whose second is away, and calls
// begin for the writes to hold. Then it rebuilds the second copy and drops the first: the
// held writes must end. It returns the data of the second copy.
func replaced(t *testing.T, first full, begin func(v *Volume) []chan error) []byte {
	t.Helper()
	cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: 4 * block.MiB, Region: 64 * block.KiB}
	v := volume(t, cfg, first, nil)
	held := begin(v)
	second := newMemory(cfg.Size)
	if err := v.Add(0, 1, second, Rebuilding, true); err != nil {
		t.Fatal(err)
	}
	until(t, func() bool { return v.Status().Legs[0][1].State == CaughtUp })
	for _, done := range held {
		if !open(done) {
			t.Error("acknowledged before the leg that lacks it was dropped")
		}
	}
	if err := v.Promote(0, 1); err != nil {
		t.Fatal(err)
	}
	if err := v.Drop(0, 0); err != nil {
		t.Fatal(err)
	}
	for _, done := range held {
		if err := wait(t, done); err != nil {
			t.Error(err)
		}
	}
	return second.data
}

func TestAHeldWriteDoesNotHoldUpTheCopyThatReplacesItsLeg(t *testing.T) {
	first := full{memory: newMemory(4 * block.MiB)}
	copy(first.data, fill(4<<20, 1))
	got := replaced(t, first, func(v *Volume) []chan error {
		return []chan error{
			start(v, write(4096, fill(8192, 2))),
			start(v, write(1<<20-4096, fill(8192, 3))), // across regions
			start(v, write(3<<20, fill(4096, 4))),
			start(v, &block.IO{Op: block.OpWriteZeroes, Off: 2 << 20, Len: 128 << 10}),
		}
	})
	want := fill(4<<20, 1)
	copy(want[4096:], fill(8192, 2))
	copy(want[1<<20-4096:], fill(8192, 3))
	copy(want[3<<20:], fill(4096, 4))
	clear(want[2<<20 : 2<<20+128<<10])
	if !bytes.Equal(got, want) {
		t.Errorf("the copy differs from byte %d on", diffAt(got, want))
	}
}

// TestWritesBehindAHeldOneDoNotHoldUpTheCopyEither: they wait for the held one.
func TestWritesBehindAHeldOneDoNotHoldUpTheCopyEither(t *testing.T) {
	first := full{memory: newMemory(4 * block.MiB)}
	copy(first.data, fill(4<<20, 1))
	got := replaced(t, first, func(v *Volume) []chan error {
		return []chan error{
			start(v, write(0, fill(16384, 2))),
			start(v, write(8192, fill(16384, 3))),
			start(v, read(12288, make([]byte, 16384))),
			start(v, write(20480, fill(16384, 4))),
		}
	})
	want := fill(4<<20, 1)
	copy(want, fill(16384, 2))
	copy(want[8192:], fill(16384, 3))
	copy(want[20480:], fill(16384, 4))
	if !bytes.Equal(got, want) {
		t.Errorf("the copy differs from byte %d on", diffAt(got, want))
	}
}

func TestAHeldFlushIsAnsweredByTheCopyThatReplacesItsLeg(t *testing.T) {
	replaced(t, full{memory: newMemory(4 * block.MiB), flushes: true}, func(v *Volume) []chan error {
		return []chan error{start(v, &block.IO{Op: block.OpFlush}), start(v, write(0, fill(4096, 1)))}
	})
}

func diffAt(a, b []byte) int {
	for i := range a {
		if a[i] != b[i] {
			return i
		}
	}
	return -1
}

// lossy is a leg with a range that cannot be read until it is written. Writes fail until
// takes is set.
type lossy struct {
	*scratched
	takes atomic.Bool
}

func (l *lossy) Submit(io *block.IO) {
	if io.Op == block.OpWrite && !l.takes.Load() {
		io.Complete(errDisk)
		return
	}
	l.scratched.Submit(io)
}

// TestACopyThatCanNotBeReadLetsTheWriteThatMendsItPass: a rebuild whose only source cannot be
// read in some range releases that range.
func TestACopyThatCanNotBeReadLetsTheWriteThatMendsItPass(t *testing.T) {
	for _, held := range []bool{false, true} {
		events := make(chan Event, 100)
		cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: 4 * block.MiB, OnEvent: func(e Event) { events <- e }}
		source := &lossy{scratched: &scratched{memory: newMemory(cfg.Size), at: 1 << 20}}
		source.takes.Store(!held)
		v := volume(t, cfg, source, nil)
		var done chan error
		if held {
			done = start(v, write(1<<20, fill(4096, 1)))
		}
		if err := v.Add(0, 1, newMemory(cfg.Size), Rebuilding, true); err != nil {
			t.Fatal(err)
		}
		wait(t, events) // that the source has failed
		if held {
			source.takes.Store(true)
		} else {
			done = start(v, write(1<<20, fill(4096, 1)))
		}
		if err := wait(t, done); err != nil {
			t.Fatal(err)
		}
		until(t, func() bool { return v.Status().Legs[0][1].State == CaughtUp })
	}
}

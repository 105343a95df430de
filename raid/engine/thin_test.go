// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"fmt"
	"sync/atomic"
	"testing"

	"weft.dev/weft/proto/block"
)

// thinLeg is a leg that has no space while it is full, and counts what was written to it as data.
type thinLeg struct {
	*memory
	full    atomic.Bool
	written atomic.Int64
}

func (l *thinLeg) Submit(io *block.IO) {
	if io.Op == block.OpWrite && l.full.Load() {
		io.Complete(fmt.Errorf("leg: %w", block.ErrFull))
		return
	}
	if io.Op == block.OpWrite {
		l.written.Add(io.Len)
	}
	l.memory.Submit(io)
}

func thinMirror(t *testing.T, events func(Event)) (*Volume, [2]*thinLeg) {
	t.Helper()
	cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: 4 * block.MiB, Region: 64 * block.KiB, Thin: true, OnEvent: events}
	legs := [2]*thinLeg{{memory: newMemory(cfg.Size)}, {memory: newMemory(cfg.Size)}}
	return volume(t, cfg, legs[0], legs[1]), legs
}

func TestAWriteWithoutSpaceWaitsAndNoLegIsBlamed(t *testing.T) {
	var told atomic.Int32
	v, legs := thinMirror(t, func(e Event) { told.Add(1) })
	legs[1].full.Store(true)
	done := start(v, write(8192, fill(4096, 7)))
	until(t, func() bool { return v.Status().Legs[0][1].Full == 1 })
	if err := block.ReadAt(v, make([]byte, 4096), 1<<20); err != nil {
		t.Errorf("a read meanwhile: %v", err)
	}
	if !open(done) {
		t.Fatal("a write is answered that one leg had no space for")
	}
	v.Suspend()
	until(t, func() bool { return v.Status().Legs[0][0].Outstanding+v.Status().Legs[0][1].Outstanding == 0 })
	if s := v.Status(); s.Begun == 0 {
		t.Error("a write that one leg has and another lacks does not count as begun")
	}
	v.Resume()
	legs[1].full.Store(false)
	if err := wait(t, done); err != nil {
		t.Fatal(err)
	}
	if n := v.Status().Begun; n != 0 {
		t.Errorf("%d writes have begun and not ended, want 0", n)
	}
	if s := v.Status().Legs[0][1]; told.Load() != 0 || s.State != InSync || s.Err != nil || s.Full != 0 {
		t.Errorf("%d events, leg %+v: want a leg in sync without an error", told.Load(), s)
	}
	for i, l := range legs {
		if !bytes.Equal(l.data[8192:12288], fill(4096, 7)) {
			t.Errorf("leg %d does not have the write", i)
		}
	}
}

func TestACopyOfZeroesTakesNoSpace(t *testing.T) {
	v, legs := thinMirror(t, nil)
	if err := v.Drop(0, 1); err != nil {
		t.Fatal(err)
	}
	copy(legs[0].data[1<<20:], fill(64<<10, 3))
	copy(legs[1].data, fill(4<<20, 8)) // what the leg had before
	legs[1].written.Store(0)
	if err := v.Add(0, 1, legs[1], Rebuilding, true); err != nil {
		t.Fatal(err)
	}
	until(t, func() bool { return v.Status().Legs[0][1].State == CaughtUp })
	if !bytes.Equal(legs[0].data, legs[1].data) {
		t.Errorf("the copy differs from byte %d on", diffAt(legs[0].data, legs[1].data))
	}
	if n := legs[1].written.Load(); n > 1<<20 {
		t.Errorf("%d bytes were written, of 64 KiB that are not zeroes", n)
	}
}

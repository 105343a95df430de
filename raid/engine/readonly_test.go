// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"testing"

	"weft.dev/weft/proto/block"
)

// counted is a leg with a cache that counts all IOs except reads, and can lose its medium.
type counted struct {
	block.Device
	changes int
	bad     bool
}

func (d *counted) Submit(io *block.IO) {
	switch {
	case io.Op != block.OpRead:
		d.changes++
	case d.bad:
		io.Complete(block.ErrMedium)
		return
	}
	d.Device.Submit(io)
}

func TestNothingIsWrittenToAReadOnlyVolumesLegs(t *testing.T) {
	legs := []*counted{{Device: newMemory(16 * block.MiB)}, {Device: newMemory(16 * block.MiB)}}
	v := volume(t, Config{Layout: layout(1, 2, block.DefaultChunk), Size: 16 * block.MiB, ReadOnly: true, FailMedium: true}, legs[0], legs[1])
	for _, io := range []*block.IO{write(0, fill(4096, 1)), {Op: block.OpWriteZeroes, Len: 4096}, {Op: block.OpDiscard, Len: 4096}} {
		if err := block.Do(v, io); !errors.Is(err, block.ErrReadOnly) {
			t.Errorf("%v = %v, want %v", io.Op, err, block.ErrReadOnly)
		}
	}
	if err := block.Flush(v); err != nil {
		t.Errorf("a flush = %v", err)
	}
	// A leg with a bad block, that is dropped and comes back, misses nothing.
	legs[0].bad = true
	for off := range int64(8) {
		if err := block.ReadAt(v, make([]byte, 4096), off<<20); err != nil {
			t.Errorf("a read with one bad copy = %v", err)
		}
	}
	for range 2 {
		if err := v.Drop(0, 0); err != nil {
			t.Fatal(err)
		}
		if err := v.Add(0, 0, legs[0], Rebuilding, false); err == nil {
			t.Error("a leg is to be rebuilt by a host that may only read")
		}
		if err := v.Add(0, 0, legs[0], InSync, false); err != nil {
			t.Fatalf("add the leg again: %v", err)
		}
	}
	for i, l := range legs {
		if l.changes > 0 {
			t.Errorf("leg %d was sent %d operations that are no reads", i, l.changes)
		}
	}
}

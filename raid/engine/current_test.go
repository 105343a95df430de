// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"sync/atomic"
	"testing"

	"weft.dev/weft/proto/block"
)

// TestNoReadIsAnsweredOnceAnotherMayHaveWritten: neither with data nor with the error of a
// medium that may have been overwritten.
func TestNoReadIsAnsweredOnceAnotherMayHaveWritten(t *testing.T) {
	var over atomic.Bool
	cfg := Config{
		Layout: layout(1, 1, block.DefaultChunk), Size: 4 * block.MiB, FailMedium: true,
		Current: func() bool { return !over.Load() },
	}
	leg := &slow{memory: newMemory(cfg.Size)}
	v := volume(t, cfg, leg)
	leg.answer(nil) // the first flush
	got, bad := make([]byte, 4096), make([]byte, 4096)
	good, scratch := start(v, read(0, got)), start(v, read(1<<20, bad))
	over.Store(true)
	leg.mu.Lock()
	first, second := leg.kept[0], leg.kept[1]
	leg.kept = nil
	leg.mu.Unlock()
	leg.memory.Submit(first)
	second.Complete(block.ErrMedium)
	if !open(good) || !open(scratch) || v.Status().Held != 2 {
		t.Fatalf("reads answered: %v and %v; status %+v; want both held", !open(good), !open(scratch), v.Status())
	}
	copy(leg.data, fill(4096, 7)) // by the other
	over.Store(false)
	until(t, func() bool { leg.answer(nil); return !open(good) && !open(scratch) })
	if !bytes.Equal(got, fill(4096, 7)) {
		t.Errorf("read %d, want what is there when it is answered", got[0])
	}
}

func TestWritesNeedNotBeCurrent(t *testing.T) {
	cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: 4 * block.MiB, Current: func() bool { return false }}
	v := volume(t, cfg, memories(cfg)...)
	if err := block.WriteAt(v, fill(4096, 1), 0); err != nil {
		t.Error(err)
	}
	if err := block.Flush(v); err != nil {
		t.Error(err)
	}
}

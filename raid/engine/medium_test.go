// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
)

// worn is a leg that cannot be read.
type worn struct{ *memory }

func (w worn) Submit(io *block.IO) {
	if io.Op == block.OpRead {
		io.Complete(block.ErrMedium)
		return
	}
	w.memory.Submit(io)
}

func TestTheOnlyCopyNeedNotBeReadToBeEqual(t *testing.T) {
	cfg := Config{Layout: layout(2, 2, block.DefaultChunk), Size: 4 * block.MiB}
	legs := memories(cfg)
	v := volume(t, cfg, worn{legs[0].(*memory)}, nil, legs[2], legs[3])
	copy(legs[2].(*memory).data, fill(4096, 1))
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := v.Equalize(ctx); err != nil {
		t.Fatal(err)
	}
	if err := block.WriteAt(v, fill(4096, 2), 0); err != nil {
		t.Fatal(err)
	}
}

// scratched is a leg with a place that cannot be read until it is written.
type scratched struct {
	*memory
	at     int64
	healed atomic.Bool
}

func (s *scratched) Submit(io *block.IO) {
	switch hit := io.Off <= s.at && s.at < io.Off+io.Len; {
	case hit && io.Op == block.OpWrite:
		s.healed.Store(true)
	case hit && io.Op == block.OpRead && !s.healed.Load():
		io.Complete(block.ErrMedium)
		return
	}
	s.memory.Submit(io)
}

func TestARebuildWritesWhatTheMediumHadLost(t *testing.T) {
	cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: 16 * block.MiB}
	events := make(chan Event, 10)
	cfg.OnEvent = func(e Event) { events <- e }
	legs := memories(cfg)
	s := &scratched{memory: legs[0].(*memory), at: 4 << 20} // where copy 0 is read first
	v := volume(t, cfg, s, legs[1])
	if err := block.WriteAt(v, fill(1<<20, 1), 0); err != nil {
		t.Fatal(err)
	}
	if err := block.ReadAt(v, make([]byte, 4096), s.at); err != nil {
		t.Fatal(err)
	}
	if e := wait(t, events); e.Kind != LegFailed || e.Copy != 0 {
		t.Fatalf("event %+v", e)
	}
	if err := block.Flush(v); err != nil {
		t.Fatal(err)
	}
	if err := v.Drop(0, 0); err != nil {
		t.Fatal(err)
	}
	if err := v.Add(0, 0, s, Rebuilding, false); err != nil {
		t.Fatal(err)
	}
	if e := wait(t, events); e.Kind != LegCaughtUp {
		t.Fatalf("event %+v", e)
	}
	if !s.healed.Load() {
		t.Error("it is in sync again, and still cannot be read")
	}
}

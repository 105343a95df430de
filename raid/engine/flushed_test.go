// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"slices"
	"sync"
	"testing"

	"weft.dev/weft/proto/block"
)

// noted is a leg that records the IOs that it was sent, in order.
type noted struct {
	*memory
	mu  sync.Mutex
	ops []block.Op
}

func (n *noted) Submit(io *block.IO) {
	n.mu.Lock()
	n.ops = append(n.ops, io.Op)
	n.mu.Unlock()
	n.memory.Submit(io)
}

// took returns what the leg was sent since the last call.
func (n *noted) took() []block.Op {
	n.mu.Lock()
	defer n.mu.Unlock()
	ops := n.ops
	n.ops = nil
	return ops
}

// TestEqualCopiesAreFlushedBeforeTheyCountAsEqual: all of them, also the source of the
// copies, because its user's last writes may be only in its cache.
func TestEqualCopiesAreFlushedBeforeTheyCountAsEqual(t *testing.T) {
	cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: 4 * block.MiB}
	legs := []*noted{{memory: newMemory(cfg.Size)}, {memory: newMemory(cfg.Size)}}
	copy(legs[0].data[1<<20:], fill(4096, 1))
	v := volume(t, cfg, legs[0], legs[1])
	legs[0].took()
	legs[1].took()
	if err := v.Equalize(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, l := range legs {
		ops := l.took()
		slices.Reverse(ops)
		flush, write := slices.Index(ops, block.OpFlush), slices.Index(ops, block.OpWrite)
		if flush < 0 || write >= 0 && write < flush {
			t.Errorf("copy %d was sent, last first, %v; want a flush after all writes", i, ops)
		}
		if i == 1 && write < 0 {
			t.Error("nothing was made equal")
		}
	}
}

func TestALegMissesAllRegionsThatAWriteTouches(t *testing.T) {
	const region = 64 << 10
	cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: 4 * block.MiB, Region: region}
	legs := memories(cfg)
	away := legs[1].(*memory)
	away.g.VolatileCache = false // or it would miss all that it was sent before
	v := volume(t, cfg, legs...)
	if err := v.Drop(0, 1); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ off, length, regions int64 }{
		{region - 4096, 8192, 2},
		{4*region + 4096, 3 * region, 4},
		{16 * region, region, 1},
	} {
		before := v.Status().Legs[0][1].Dirty
		if err := block.WriteAt(v, fill(int(c.length), 1), c.off); err != nil {
			t.Fatal(err)
		}
		if got := int64(v.Status().Legs[0][1].Dirty - before); got != c.regions {
			t.Errorf("after %d bytes at %d it misses %d regions more, want %d", c.length, c.off, got, c.regions)
		}
	}
}

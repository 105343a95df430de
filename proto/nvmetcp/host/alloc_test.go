// SPDX-License-Identifier: Apache-2.0

package host

import (
	"sync"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
)

// burst submits n IOs at once and waits for all of them; it allocates nothing itself.
type burst struct {
	d   block.Device
	ios []block.IO
	all sync.WaitGroup
}

func newBurst(d block.Device, op block.Op, n, size int) *burst {
	b := &burst{d: d, ios: make([]block.IO, n)}
	done := func(io *block.IO) {
		if io.Err != nil {
			panic(io.Err)
		}
		b.all.Done()
	}
	for i := range b.ios {
		b.ios[i] = block.IO{Op: op, Off: int64(i * size), Len: int64(size), Data: make([]byte, size), Done: done}
	}
	return b
}

func (b *burst) run() {
	b.all.Add(len(b.ios))
	for i := range b.ios {
		b.d.Submit(&b.ios[i])
	}
	b.all.Wait()
}

// The controller runs in the same process, so its allocations are counted too.
func TestNoMemoryIsTakenPerIO(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector makes pools drop items")
	}
	w := newWorld(t, ramdisk.New(16*block.MiB, blocks))
	n := space(t, connect(t, w.config()), uuidA)
	const depth = 64
	for name, b := range map[string]*burst{
		"read":  newBurst(n, block.OpRead, depth, 4096),
		"write": newBurst(n, block.OpWrite, depth, 4096),
		"R2T":   newBurst(n, block.OpWrite, depth, 64<<10),
	} {
		b.run()
		if got := testing.AllocsPerRun(100, b.run) / depth; got > 0.1 {
			t.Errorf("%s: %.2f allocations per IO", name, got)
		}
	}
}

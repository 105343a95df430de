// SPDX-License-Identifier: Apache-2.0

package host

import (
	"sync/atomic"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
)

// far notes how far a device was looked at.
type far struct {
	block.Device
	end *atomic.Int64
}

func (d far) Allocated(off, end int64, most int) ([]block.Range, int64, error) {
	d.end.Store(max(d.end.Load(), end))
	return nil, end, nil
}
func (d far) Differing(block.UUID, int64, int64, int) ([]block.Range, int64, error) { panic("") }

// A region of 32 MiB of 512-byte blocks (legs above 2 TiB) must not have the target look at all that follows.
func TestARegionIsAllThatIsLookedAt(t *testing.T) {
	var end atomic.Int64
	n := space(t, connect(t, newWorld(t, far{ramdisk.New(1<<30, 512), &end}).config()), uuidA)
	const region = 32 << 20
	io := block.IO{Op: block.OpMap, Len: region, Data: make([]byte, block.MapSize(region))}
	if err := block.Do(n, &io); err != nil {
		t.Fatal(err)
	}
	if end.Load() > region {
		t.Errorf("for the first %d bytes the target looked at %d", region, end.Load())
	}
}

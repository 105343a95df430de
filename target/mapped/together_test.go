// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
)

// writeTogether writes to new grains of a tree on a drive with a volatile cache, so many at once, and returns how often
// the drive was asked to make data durable.
func writeTogether(t *testing.T, n int, broken func(*block.IO) error) (durably int, errs []error, tree *Tree) {
	synctest.Test(t, func(t *testing.T) {
		d := &drive{size: testSize, volatile: true, base: newImage(nil), img: newImage(nil)}
		var err error
		tree, err = Format(testPlace(d), id(1), 512<<20, nil)
		must(t, err)
		leg, err := tree.Leg(id(1))
		must(t, err)
		d.broken = func(io *block.IO) error {
			if io.Op == block.OpFlush || io.Op == block.OpWrite && io.FUA {
				durably++
			}
			if broken != nil {
				return broken(io)
			}
			return nil
		}
		ended := make(chan error, n)
		for i := range n {
			leg.Submit(&block.IO{Op: block.OpWrite, Off: int64(i) * ChunkSize, Len: GrainSize, Data: tagged(uint64(i+1), GrainSize/sector), Done: func(io *block.IO) { ended <- io.Err }})
		}
		for range n {
			if err := <-ended; err != nil {
				errs = append(errs, err)
			}
		}
		time.Sleep(time.Second)
		if broken != nil {
			return
		}
		for i := range n { // acknowledged, and so behind a flush
			if got := readObjectAt(t, leg, int64(i)*ChunkSize, 1); got[0] != uint64(i+1) {
				t.Errorf("chunk %d holds %d", i, got[0])
			}
		}
	})
	return durably, errs, tree
}

func TestFirstWritesThatComeTogetherShareFlushes(t *testing.T) {
	if alone, _, _ := writeTogether(t, 1, nil); alone != 1 {
		t.Errorf("one write asks for durable data %d times, want once", alone)
	}
	if together, errs, _ := writeTogether(t, 64, nil); together > 16 || len(errs) > 0 {
		t.Errorf("64 writes ask for durable data %d times, want a few; errors %v", together, errs)
	}
}

// If the flush fails, nobody knows what the drive has: no record is written, and the tree stops.
func TestAFlushThatFailsStopsTheFirstWrites(t *testing.T) {
	_, errs, tree := writeTogether(t, 8, func(io *block.IO) error {
		if io.Op == block.OpFlush {
			return block.ErrMedium
		}
		return nil
	})
	if len(errs) == 0 || tree.Err() == nil {
		t.Errorf("%d of 8 writes failed; the tree says %v", len(errs), tree.Err())
	}
	for _, err := range errs {
		if !errors.Is(err, block.ErrMedium) {
			t.Errorf("a write failed with %v", err)
		}
	}
}

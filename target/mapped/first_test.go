// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"errors"
	"sync"
	"testing"
	"testing/synctest"

	"weft.dev/weft/proto/block"
)

// freshAndFrozen runs f on a leg without data, and on one over a snapshot that has some, tagged 1.
func freshAndFrozen(t *testing.T, f func(t *testing.T, d *drive, tree *Tree, leg *Leg, below uint64)) {
	for name, below := range map[string]uint64{"fresh": 0, "over a snapshot": 1} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				d := &drive{size: testSize, base: newImage(nil), img: newImage(nil)}
				tree, err := Format(testPlace(d), id(1), 64<<20, nil)
				must(t, err)
				leg, err := tree.Leg(id(1))
				must(t, err)
				if below != 0 {
					must(t, block.WriteAt(leg, tagged(below, ChunkSize/sector), 0))
					must(t, tree.Freeze(id(1), id(2), nil))
				}
				f(t, d, tree, leg, below)
			})
		})
	}
}

// Two first writes to one grain each bring all of it: one of them has to wait.
func TestFirstWritesToOneGrainKeepEachOther(t *testing.T) {
	freshAndFrozen(t, func(t *testing.T, _ *drive, _ *Tree, leg *Leg, below uint64) {
		done := make(chan error, 3)
		for i := range int64(3) {
			leg.Submit(&block.IO{Op: block.OpWrite, Off: i * unit, Len: unit, Data: tagged(uint64(10+i), unit/sector), Done: func(io *block.IO) { done <- io.Err }})
		}
		must(t, errors.Join(<-done, <-done, <-done))
		got := readObjectAt(t, leg, 0, GrainSize/sector)
		for i, want := range []uint64{10, 11, 12, below} {
			if got[i*unit/sector] != want {
				t.Errorf("page %d of the grain has %d, want %d", i, got[i*unit/sector], want)
			}
		}
	})
}

// overlapping is a drive that notes whether two writes of one table block were under way together: they
// may end in any order.
type overlapping struct {
	block.Device
	mu     sync.Mutex
	under  map[int64]bool
	twice  bool
	writes int
}

func (d *overlapping) Submit(io *block.IO) {
	if io.Op != block.OpWrite || (io.Off-firstExtent)%extentSize >= ChunkSize {
		d.Device.Submit(io)
		return
	}
	d.mu.Lock()
	d.twice = d.twice || d.under[io.Off]
	d.under[io.Off] = true
	d.writes++
	d.mu.Unlock()
	done := io.Done
	io.Done = func(io *block.IO) {
		d.mu.Lock()
		d.under[io.Off] = false
		d.mu.Unlock()
		io.Done = done
		done(io)
	}
	d.Device.Submit(io)
}

func TestATableBlockIsWrittenOnceAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := &overlapping{Device: &drive{size: testSize, base: newImage(nil), img: newImage(nil)}, under: map[int64]bool{}}
		tree, err := Format(testPlace(d), id(1), 64<<20, nil)
		must(t, err)
		leg, err := tree.Leg(id(1))
		must(t, err)
		d.writes = 0
		var group sync.WaitGroup
		const writers, each = 16, 8
		for w := range int64(writers) {
			group.Go(func() {
				for i := range int64(each) {
					must(t, block.WriteAt(leg, tagged(1, int(1+w)), (w*each+i)*GrainSize))
				}
			})
		}
		group.Wait()
		if d.twice {
			t.Error("a table block was written twice at a time")
		}
		if d.writes < 2 || d.writes > writers*each {
			t.Errorf("%d writes of tables for %d first writes, want fewer than one for each", d.writes, writers*each)
		}
	})
}

// A first write that fails changes nothing, and keeps neither its grain nor a chunk.
func TestAFirstWriteThatFails(t *testing.T) {
	freshAndFrozen(t, func(t *testing.T, d *drive, tree *Tree, leg *Leg, below uint64) {
		free := tree.Space().Free
		for _, op := range []block.Op{block.OpRead, block.OpWrite} {
			if op == block.OpRead && below == 0 {
				continue // nothing to read
			}
			broken := errors.New("broken")
			d.broken = func(io *block.IO) error {
				if io.Op == op {
					return broken
				}
				return nil
			}
			if err := block.WriteAt(leg, tagged(2, 8), 0); !errors.Is(err, broken) {
				t.Errorf("a write whose %v failed: %v", op, err)
			}
			d.broken = nil
			if got := readObjectAt(t, leg, 0, 8); got[0] != below {
				t.Errorf("after a %v that failed the leg has %d, want %d", op, got[0], below)
			}
			if now := tree.Space().Free; now != free {
				t.Errorf("after a %v that failed %v are free, before %v", op, now, free)
			}
		}
		must(t, block.WriteAt(leg, tagged(3, 8), 0))
		if got := readObjectAt(t, leg, 0, 16); got[0] != 3 || got[8] != below {
			t.Errorf("the grain has %v, want 3 and %d", got, below)
		}
	})
}

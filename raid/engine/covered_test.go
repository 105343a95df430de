// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"slices"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/checkpoint"
)

// coveredRegion is the region of the volumes below, of which a leg has 64.
const coveredRegion = 64 << 10

// cachedPair is a volume with two legs on drives with volatile caches, both flushed.
func cachedPair(t *testing.T) (*Volume, []*slow) {
	t.Helper()
	cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: 64 * coveredRegion, Region: coveredRegion}
	legs := []*slow{{memory: newMemory(cfg.Size)}, {memory: newMemory(cfg.Size)}}
	v := volume(t, cfg, legs[0], legs[1])
	answerAll(legs)
	return v, legs
}

// through does an IO that all legs answer.
func through(t *testing.T, v *Volume, legs []*slow, io *block.IO) {
	t.Helper()
	done := start(v, io)
	answerAll(legs)
	if err := wait(t, done); err != nil {
		t.Fatal(err)
	}
}

// lacks drops the second leg, and returns how many regions the volume says that it lacks, and whether
// that is so even if the leg has lost its cache.
func lacks(t *testing.T, v *Volume) (dirty uint64, covered bool) {
	t.Helper()
	if err := v.Drop(0, 1); err != nil {
		t.Fatal(err)
	}
	s := v.Status().Legs[0][1]
	return s.Dirty, s.LossCovered
}

// TestADroppedLegLacksWhatItHadNotFlushed: after a loss of its cache it has everything else.
func TestADroppedLegLacksWhatItHadNotFlushed(t *testing.T) {
	data := func(region int64) *block.IO { return write(region*coveredRegion, fill(4096, 1)) }
	fua := data(3)
	fua.FUA = true
	zeroes := &block.IO{Op: block.OpWriteZeroes, Off: 3 * coveredRegion, Len: 4096, FUA: true}
	flush := &block.IO{Op: block.OpFlush}
	for name, c := range map[string]struct {
		ios  []*block.IO
		want uint64
	}{
		"nothing":                     {},
		"two regions":                 {[]*block.IO{data(1), data(2)}, 2},
		"flushed":                     {[]*block.IO{data(1), flush}, 0},
		"written again after a flush": {[]*block.IO{data(1), data(2), flush, data(2)}, 1},
		"through the cache":           {[]*block.IO{fua}, 0},
		"zeroes through the cache":    {[]*block.IO{zeroes}, 1}, // Linux's target ignores that
	} {
		v, legs := cachedPair(t)
		for _, io := range c.ios {
			through(t, v, legs, io)
		}
		if dirty, covered := lacks(t, v); dirty != c.want || !covered {
			t.Errorf("%s: it lacks %d regions (known: %v), want %d", name, dirty, covered, c.want)
		}
	}
}

// TestAFailedFlushMakesNothingDurable, whatever the next one says that began before.
func TestAFailedFlushMakesNothingDurable(t *testing.T) {
	v, legs := cachedPair(t)
	through(t, v, legs, write(0, fill(4096, 1)))
	start(v, &block.IO{Op: block.OpFlush})
	legs[0].answer(nil)
	legs[1].answer(block.ErrGone)
	if dirty, _ := lacks(t, v); dirty != 1 {
		t.Errorf("it lacks %d regions, want the one that was not flushed", dirty)
	}
}

// TestAWriteDuringAFlushIsNotCovered: the drive may have begun the flush before it had the write.
func TestAWriteDuringAFlushIsNotCovered(t *testing.T) {
	v, legs := cachedPair(t)
	flushed := start(v, &block.IO{Op: block.OpFlush})
	written := start(v, write(0, fill(4096, 1)))
	for _, l := range legs {
		slices.Reverse(l.kept) // the write first
		l.answer(nil)
	}
	if err := wait(t, written); err != nil {
		t.Fatal(err)
	}
	if err := wait(t, flushed); err != nil {
		t.Fatal(err)
	}
	if dirty, _ := lacks(t, v); dirty != 1 {
		t.Errorf("it lacks %d regions, want the one that was written", dirty)
	}
}

// TestALegThatWasNeverFlushedHereIsCopiedWhole: what earlier hosts have written may be in its cache.
func TestALegThatWasNeverFlushedHereIsCopiedWhole(t *testing.T) {
	cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: 64 * coveredRegion, Region: coveredRegion}
	add := map[string]func(*Volume, block.Device) error{
		"in sync": func(v *Volume, d block.Device) error { return v.Add(0, 1, d, InSync, false) },
		"behind": func(v *Volume, d block.Device) error {
			return v.AddBehind(0, 1, d, []checkpoint.Range{{Off: 0, End: coveredRegion}})
		},
		"copied whole": func(v *Volume, d block.Device) error { return v.Add(0, 1, d, Rebuilding, true) },
	}
	for name, add := range add {
		v := volume(t, cfg, newMemory(cfg.Size))
		if s := v.Status().Legs[0][1]; s.LossCovered {
			t.Errorf("%s: it is said to be known before it was there", name)
		}
		late := &slow{memory: newMemory(cfg.Size)}
		if err := add(v, late); err != nil {
			t.Fatal(err)
		}
		if dirty, covered := lacks(t, v); dirty != 64 || !covered {
			t.Errorf("%s: it lacks %d regions (known: %v), want all 64", name, dirty, covered)
		}
		late.answer(block.ErrGone)
	}
}

// TestALegThatIsBehindIsFlushedAtOnce, so that it is copied whole only if it is lost at once.
func TestALegThatIsBehindIsFlushedAtOnce(t *testing.T) {
	cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: 64 * coveredRegion, Region: coveredRegion}
	source := &slow{memory: newMemory(cfg.Size)}
	v := volume(t, cfg, source)
	source.answer(nil) // the first flush; nothing is read from it after that
	late := &noted{memory: newMemory(cfg.Size)}
	if err := v.AddBehind(0, 1, late, []checkpoint.Range{{Off: 0, End: coveredRegion}}); err != nil {
		t.Fatal(err)
	}
	if ops := late.took(); len(ops) != 1 || ops[0] != block.OpFlush {
		t.Fatalf("it was sent %v, want a flush", ops)
	}
	if dirty, covered := lacks(t, v); dirty != 1 || !covered {
		t.Errorf("it lacks %d regions (known: %v), want 1", dirty, covered)
	}
}

// TestWritesToALegWithoutACacheAreNotTracked, so nobody knows what it lacks if it had one.
func TestWritesToALegWithoutACacheAreNotTracked(t *testing.T) {
	cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: 64 * coveredRegion, Region: coveredRegion}
	legs := memories(cfg)
	plain := legs[1].(*memory)
	plain.g.VolatileCache = false
	v := volume(t, cfg, legs...)
	if err := block.WriteAt(v, fill(4096, 1), 0); err != nil {
		t.Fatal(err)
	}
	if dirty, covered := lacks(t, v); dirty != 0 || covered {
		t.Errorf("it lacks %d regions, and is said to be known: %v; want 0 and false", dirty, covered)
	}
}

// TestALegThatGetsACacheMayHaveFlushedNothing: it has another device, which has a cache.
func TestALegThatGetsACacheMayHaveFlushedNothing(t *testing.T) {
	cfg := Config{Layout: layout(1, 2, block.DefaultChunk), Size: 64 * coveredRegion, Region: coveredRegion}
	legs := memories(cfg)
	legs[1].(*memory).g.VolatileCache = false
	v := volume(t, cfg, legs...)
	again := &slow{memory: newMemory(cfg.Size)}
	if err := v.Add(0, 1, again, InSync, false); err != nil {
		t.Fatal(err)
	}
	if dirty, covered := lacks(t, v); dirty != 64 || !covered {
		t.Errorf("it lacks %d regions (known: %v), want all 64", dirty, covered)
	}
	again.answer(block.ErrGone)
}

// TestASkippedFlushMakesNothingDurable: flushes of a drive that is said to have no cache are skipped. If
// it has one all the same, nobody knows what is in it.
func TestASkippedFlushMakesNothingDurable(t *testing.T) {
	for name, caches := range map[string]struct{ before, during bool }{
		"said before the flush": {false, false},
		"said during the flush": {true, false},
		"said only before it":   {false, true},
	} {
		v, legs := cachedPair(t)
		through(t, v, legs, write(0, fill(4096, 1)))
		legs[1].g.VolatileCache = caches.before
		done := start(v, &block.IO{Op: block.OpFlush})
		legs[1].g.VolatileCache = caches.during
		answerAll(legs)
		if err := wait(t, done); err != nil {
			t.Fatal(err)
		}
		if dirty, covered := lacks(t, v); covered && dirty == 0 {
			t.Errorf("%s: it is said to lack nothing even if it has lost a cache", name)
		}
	}
}

// Where the data of a failed flush is nobody knows, also after one that succeeds.
func TestALaterFlushDoesNotMakeUpForAFailedOne(t *testing.T) {
	v, legs := cachedPair(t)
	through(t, v, legs, write(0, fill(4096, 1)))
	start(v, &block.IO{Op: block.OpFlush})
	legs[0].answer(nil)
	legs[1].answer(block.ErrMedium)
	start(v, &block.IO{Op: block.OpFlush})
	legs[0].answer(nil)
	legs[1].answer(nil)
	if dirty, covered := lacks(t, v); covered {
		t.Errorf("it is said to lack only %d regions if it loses its cache", dirty)
	}
}

// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"context"
	"fmt"
	"math/bits"
	"sync"
	"time"

	"weft.dev/weft/proto/block"
)

// space knows which slots are free.
type space struct {
	mu         sync.Mutex
	free       [][slotCount / 64]uint64 // by extent, a bit for each slot
	from       [2]int                   // extents before this one have no free slot of the kind: without and with a chunk
	chunks     uint64                   // with a chunk, free
	total      uint64                   // with a chunk, free or not
	quarantine []uint32                 // free once the drive has been flushed
	flushing   int                      // flushes under way that are to make slots free
	ready      []uint32                 // with a chunk of zeroes; free, and not in free; see prepare.go
	ahead      int                      // how many are kept ready
	zeroing    int                      // so many are free, and nobody can take them now
	rest       time.Time                // no chunk is zeroed until then
	freed      chan struct{}            // closed when a chunk comes free
	wanted     bool                     // somebody may wait for freed
}

// FullError says that a write needs a chunk and the tree has none. Nothing was changed. It unwraps
// to block.ErrFull.
type FullError struct {
	Tree  block.UUID
	freed <-chan struct{}
}

func (e *FullError) Error() string { return fmt.Sprintf("tree %v: %v", e.Tree, block.ErrFull) }

// Unwrap returns block.ErrFull.
func (e *FullError) Unwrap() error { return block.ErrFull }

// Freed is closed when a chunk has come free since the write failed: it is worth repeating.
func (e *FullError) Freed() <-chan struct{} { return e.freed }

// Wait returns when the write is worth repeating, or ctx ends.
func (e *FullError) Wait(ctx context.Context) error {
	select {
	case <-e.freed:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func kind(slot uint32) int {
	if hasChunk(slot) {
		return 1
	}
	return 0
}

// addExtent makes room for the slots of another extent. None of them is free yet.
func (s *space) addExtent(home bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.free = append(s.free, [slotCount / 64]uint64{})
	s.total += usable(home)
}

// usable is how many chunks of an extent are for data.
func usable(home bool) uint64 {
	if home {
		return chunkCount - 3 // the tables, and two of the superblock
	}
	return chunkCount - 1
}

// take returns a free slot, the lowest, so that a leg which is written from its beginning lies in
// order on the drive. A slot whose chunk is ready is taken if it is wanted, or nothing else is there.
// Without a slot it returns 0 and what is closed when there may be one.
func (s *space) take(withChunk, wantReady bool) (slot uint32, ready bool, freed <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	slot, ok := uint32(0), false
	if !wantReady || len(s.ready) == 0 {
		slot, ok = s.lowest(withChunk)
	}
	switch {
	case ok:
		s.takeOut(slot)
	case withChunk && len(s.ready) > 0:
		slot, ready, s.ready = s.ready[0], true, s.ready[1:]
	default:
		s.wanted = true
		return 0, false, s.freed
	}
	if withChunk {
		s.chunks--
	}
	return slot, ready, nil
}

// lowest finds the lowest free slot of a kind that is not ready.
func (s *space) lowest(withChunk bool) (slot uint32, ok bool) {
	first, last, k := chunkCount/64, slotCount/64, 0
	if withChunk {
		first, last, k = 0, chunkCount/64, 1
	}
	for ; s.from[k] < len(s.free); s.from[k]++ {
		if i, ok := lowestBit(s.free[s.from[k]][:last], first); ok {
			return uint32(s.from[k]<<slotShift + i), true
		}
	}
	return 0, false
}

// lowestBit is the place of the lowest bit in words, from the word first on.
func lowestBit(words []uint64, first int) (i int, ok bool) {
	for w := first; w < len(words); w++ {
		if words[w] != 0 {
			return w*64 + bits.TrailingZeros64(words[w]), true
		}
	}
	return 0, false
}

func (s *space) takeOut(slot uint32) {
	i := slot % slotCount
	s.free[slot>>slotShift][i/64] &^= 1 << (i % 64)
}

func (s *space) putBack(slot uint32) {
	e, i, k := int(slot>>slotShift), slot%slotCount, kind(slot)
	s.free[e][i/64] |= 1 << (i % 64)
	s.from[k] = min(s.from[k], e)
}

// put makes a slot free.
func (s *space) put(slot uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.putBack(slot)
	if hasChunk(slot) {
		s.chunks++
		s.tell()
	}
}

// tell wakes those who wait for a chunk.
func (s *space) tell() {
	if s.wanted {
		close(s.freed)
		s.freed, s.wanted = make(chan struct{}), false
	}
}

// fill makes the slots of an extent free whose bits are set.
func (s *space) fill(e int, free [slotCount / 64]uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.free[e] = free
	for _, word := range free[:chunkCount/64] {
		s.chunks += uint64(bits.OnesCount64(word))
	}
	s.from = [2]int{min(s.from[0], e), min(s.from[1], e)}
	s.tell()
}

// room returns what is free, and what will be after a flush.
func (s *space) room() (free, pending block.Size) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return block.Size(s.chunks) * ChunkSize, block.Size(len(s.quarantine)) * ChunkSize
}

// takeQuarantine begins a flush that is to make slots free: endFlush is called at its end.
func (s *space) takeQuarantine() []uint32 {
	s.mu.Lock()
	defer s.mu.Unlock()
	batch := s.quarantine
	s.quarantine = nil
	if len(batch) > 0 {
		s.flushing++
	}
	return batch
}

func (s *space) endFlush(batch []uint32, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(batch) > 0 {
		s.flushing--
	}
	if !ok {
		s.quarantine = append(s.quarantine, batch...)
	}
}

// unsettled reports whether a slot was given up so that its record may still be on the drive.
func (s *space) unsettled() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.quarantine) > 0 || s.flushing > 0
}

func (s *space) putQuarantine(batch []uint32) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.quarantine = append(s.quarantine, batch...)
}

// free gives up a slot that means nothing any more on the drive, or will not after a flush.
func (t *Tree) free(slot uint32) {
	if t.volatile {
		t.space.putQuarantine([]uint32{slot})
		return
	}
	t.whenIdle(slot, t.space.put)
}

// alloc returns a free slot, 0 if there is none; one whose chunk is ready if that is wanted. It flushes a volatile
// drive if that frees one; no lock may be held.
func (t *Tree) alloc(withChunk, wantReady bool) (slot uint32, err error) {
	slot, freed := t.takeAwaited(withChunk, wantReady)
	if slot != 0 {
		return slot, t.Err()
	}
	if t.space.unsettled() {
		if err := t.flush(); err != nil {
			return 0, err
		}
		if slot, freed = t.takeAwaited(withChunk, wantReady); slot != 0 {
			return slot, t.Err()
		}
	}
	return 0, &FullError{Tree: t.place.Tree, freed: freed}
}

// takeAwaited is take, and waits for chunks that are being zeroed. No lock may be held.
func (t *Tree) takeAwaited(withChunk, wantReady bool) (slot uint32, freed <-chan struct{}) {
	slot, freed = t.take(withChunk, wantReady)
	for slot == 0 && withChunk && t.awaitZeroing(freed) {
		slot, freed = t.take(withChunk, wantReady)
	}
	return slot, freed
}

// take takes a slot for the caller. Its record says nothing yet, and the slot is blank if its chunk was ready.
func (t *Tree) take(withChunk, wantReady bool) (slot uint32, freed <-chan struct{}) {
	slot, ready, freed := t.space.take(withChunk, wantReady)
	if slot != 0 {
		t.block(slot) // its record
		t.setBlank(slot, ready)
	}
	if wantReady {
		t.prepareSoon()
	}
	return slot, freed
}

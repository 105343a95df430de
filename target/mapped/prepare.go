// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"time"

	"weft.dev/weft/proto/block"
)

// A first write is cheaper in a chunk that is known to hold zeroes. Then a part of a grain need not be made a whole
// one, and the record need not wait for the data: if a crash leaves the record alone, the grain reads as zeroes, as
// it did before. So the tree keeps some free chunks ready:
//
//	free ──► being zeroed ──► a flush ──► ready ──► taken: blank ──► not blank
//
// A chunk that is being zeroed belongs to nobody, and nobody can take it. It is ready when its zeroes are durable:
// if a power cut undid them, what its last owner had written would be read in its place.
//
// A slot is blank as long as the following is true: each grain of its chunk that its record does not have as data, and
// that no write has taken (busy), holds zeroes, durably. Whoever would make that untrue clears the mark first, and
// nothing sets it again while the slot has an owner:
//
//   - a grain that was data is discarded, or the record is replaced: replace
//   - a write fails, and may have left a part of its data in grains that get no record: chunkWrite.end
//   - grains are copied to the chunk, and have no record until the end: copyGrains, writeGrains
//
// What is not blank is written as if there were no such marks. They are in memory only: a tree that was just opened
// has none. Chunks are zeroed when a leg without records is opened, and when a first write takes a chunk, so a tree
// to which nobody writes costs its drive nothing.

// prepareAhead is how many chunks a tree keeps ready that is opened. Tests have fewer, and most have none.
var prepareAhead = 128

const (
	prepareLeast = 16 // so many must be missing: a flush is for more than a few
	prepareRun   = 32 // chunks in one command, and before one flush
	prepareTry   = 4  // as long as it is not known to be quick
	// A drive that takes longer than prepareStart, and a second for each prepareSpeed bytes, writes the zeroes, which
	// costs more than it saves; or it is a file of which each block has to be freed.
	prepareSpeed = 8 << 30
	prepareStart = time.Millisecond / 2
	prepareTries = 2 // slow commands, one after another, until another way is tried, and then none
	prepareRest  = time.Minute
)

// preparing is how chunks are zeroed. It belongs to whoever has Tree.preparing.
type preparing struct {
	keeps bool // the drive is asked to keep the space allocated, since freeing it was slow
	quick bool // the last command was
	slow  int  // commands, one after another
}

// prepareSoon has chunks zeroed if too few are ready. It does not wait.
func (t *Tree) prepareSoon() {
	if !t.space.lacksReady() {
		return
	}
	select {
	case t.preparing <- struct{}{}:
	default:
		return // it is being done
	}
	go func() {
		defer t.preparing.Unlock()
		for t.prepare() { // who waits, as for space, goes first
			t.preparing.Unlock()
			t.preparing.Lock()
		}
	}()
}

// prepare zeroes a run of free chunks, and reports whether there may be more to do. The caller has t.preparing.
func (t *Tree) prepare() (more bool) {
	most := int64(prepareTry)
	if t.prepared.quick {
		most = prepareRun
	}
	if g := t.below.Geometry(); g.MaxIO > 0 {
		most = min(most, int64(g.MaxIO/ChunkSize))
	}
	if t.closing.Load() || t.Err() != nil {
		return false
	}
	first, n := t.space.beginZeroing(int(most))
	if n == 0 {
		return false
	}
	err := t.zeroChunks(first, n)
	t.space.endZeroing(first, n, err == nil)
	return err == nil
}

// zeroChunks makes the chunks of n slots zeroes, durably.
func (t *Tree) zeroChunks(first uint32, n int) error {
	began := time.Now()
	io := &block.IO{Op: block.OpWriteZeroes, Unmap: !t.prepared.keeps, Off: t.data(first), Len: int64(n) * ChunkSize}
	err := block.Do(t.below, io)
	allowed := prepareStart + time.Duration(io.Len*int64(time.Second)/prepareSpeed)
	if t.prepared.judge(err == nil && time.Since(began) <= allowed) {
		t.space.restUntil(time.Now().Add(prepareRest))
	}
	if err == nil && t.volatile {
		err = t.flush()
	}
	return err
}

// judge chooses how the next chunks are zeroed, after a command that was quick or not. It reports whether no way is
// quick.
func (p *preparing) judge(quick bool) (none bool) {
	if p.quick = quick; quick {
		p.slow = 0
		return false
	}
	if p.slow++; p.slow < prepareTries {
		return false
	}
	none = p.keeps
	p.slow, p.keeps = 0, !p.keeps
	return none
}

// lacksReady reports whether so few chunks are ready that more should be.
func (s *space) lacksReady() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ahead > 0 && s.ahead-len(s.ready) >= min(prepareLeast, s.ahead) && !s.rests()
}

// rests reports whether the drive was too slow a short time ago. The caller holds mu.
func (s *space) rests() bool { return !s.rest.IsZero() && time.Now().Before(s.rest) }

func (s *space) restUntil(rest time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rest = rest
}

// beginZeroing takes a run of slots with chunks, the lowest that are free. They are counted as free.
func (s *space) beginZeroing(most int) (first uint32, n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	most = min(most, s.ahead-len(s.ready))
	if s.rests() {
		return 0, 0
	}
	first, ok := s.lowest(true)
	for ok && n < most && s.isFree(first+uint32(n)) {
		s.takeOut(first + uint32(n))
		n++
	}
	s.zeroing = n
	return first, n
}

// endZeroing makes slots free again, or ready if their chunks are zeroes for sure.
func (s *space) endZeroing(first uint32, n int, ready bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.zeroing = 0
	for slot := first; slot < first+uint32(n); slot++ {
		if ready {
			s.ready = append(s.ready, slot)
		} else {
			s.putBack(slot)
		}
	}
	s.tell()
}

// isFree reports whether a slot with a chunk is free, and not ready.
func (s *space) isFree(slot uint32) bool {
	i := slot % slotCount
	return hasChunk(slot) && s.free[slot>>slotShift][i/64]>>(i%64)&1 == 1
}

// all returns the free slots of an extent, with those that are ready.
func (s *space) all(e int) [slotCount / 64]uint64 {
	words := s.free[e]
	for _, slot := range s.ready {
		if i := slot % slotCount; int(slot>>slotShift) == e {
			words[i/64] |= 1 << (i % 64)
		}
	}
	return words
}

// awaitZeroing reports whether a slot may be had that could not be before, when take returned freed. It waits for the
// chunks that are being zeroed. No lock may be held.
func (t *Tree) awaitZeroing(freed <-chan struct{}) bool {
	t.space.mu.Lock()
	some := t.space.zeroing > 0
	t.space.mu.Unlock()
	if some {
		t.preparing.Lock() // who had it has put its slots back
		defer t.preparing.Unlock()
		return true
	}
	select {
	case <-freed:
		return true
	default:
		return false
	}
}

// isBlank reports whether a slot is blank. The caller holds the stripe of its chunk, as for setBlank.
func (t *Tree) isBlank(slot uint32) bool {
	i := slot % slotCount
	return hasChunk(slot) && t.extent(slot).blank[i/64].Load()>>(i%64)&1 == 1
}

// setBlank notes whether a slot is blank. Only who has just taken it may say so.
func (t *Tree) setBlank(slot uint32, blank bool) {
	if !hasChunk(slot) {
		return
	}
	i := slot % slotCount
	if word, bit := &t.extent(slot).blank[i/64], uint64(1)<<(i%64); blank {
		word.Or(bit)
	} else {
		word.And(^bit)
	}
}

// wantsReady reports whether a write that takes a chunk should have one that is ready. The caller holds the stripe.
//
// Over data it need not: the record has to wait. Nor if first writes come together on a drive with a volatile cache, who
// share their flushes: if the drive is a file, zeroes are ranges that the file system has to change when they are written
// to, one after another, and so many writes would wait for that.
func (l *Leg) wantsReady(chunk uint32, touched uint64) bool {
	t := l.tree
	return !(t.volatile && t.shared.writes.Load() >= togetherFrom) && !t.seesData(l.layer, chunk, touched)
}

// seesData reports whether some of the grains are data as l sees them. The caller holds the stripe.
func (t *Tree) seesData(l *layer, chunk uint32, grains uint64) bool {
	left, data := grains, uint64(0)
	t.deciding(l, chunk, grains, func(_ uint32, r *record) bool {
		data |= r.data.Load() & left
		left &^= r.have.Load()
		return left != 0
	})
	return data|t.fromBase(l, chunk, ^left) != 0
}

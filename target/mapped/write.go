// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"errors"

	"golang.org/x/sync/errgroup"

	"weft.dev/weft/proto/block"
)

// busy is what changes the map of one chunk. Changes of different grains go on side by side, so that
// none waits for the record of another.
type busy struct {
	grains uint64
	slots  map[uint32]uint32 // by layer: taken for the chunk, the record may not be written yet
	quiet  bool              // no I/O to the chunk begins: it is being moved
}

// take waits until nothing changes these grains of a chunk, and keeps others from it until drop.
// The caller holds the stripe.
func (s *stripe) take(chunk uint32, grains uint64) *busy {
	for {
		b := s.begin(chunk)
		if b.grains&grains == 0 {
			b.grains |= grains
			return b
		}
		s.idle.Wait()
	}
}

func (s *stripe) begin(chunk uint32) *busy {
	b := s.busy[chunk]
	if b == nil {
		b = &busy{}
		s.busy[chunk] = b
	}
	return b
}

// use notes that a slot was taken for a layer.
func (b *busy) use(id, slot uint32) {
	if b.slots == nil {
		b.slots = map[uint32]uint32{}
	}
	b.slots[id] = slot
}

// drop ends what take began. A slot that was taken, and not used after all, is free again; not in a tree that has
// stopped, since a copy of its record may be on the drive, and what another leg wrote to it would be read there.
func (t *Tree) drop(s *stripe, chunk uint32, grains uint64) {
	b := s.busy[chunk]
	if b.grains &^= grains; b.grains == 0 {
		delete(s.busy, chunk)
		for _, slot := range b.slots {
			if t.record(slot).layer == 0 && t.Err() == nil {
				t.whenIdle(slot, t.space.put)
			}
		}
	}
	s.idle.Broadcast()
}

// changesAtOnce is how many chunks one request changes at a time.
const changesAtOnce = 32

// change does a write, discard or write of zeroes that needs the map.
func (l *Leg) change(io *block.IO) {
	err := l.changeAll(io)
	if err == nil && l.flushes(io) {
		err = l.tree.flush()
	}
	l.writes.leave()
	io.Complete(err)
}

// flushes reports whether an IO is durable only after a flush. With FUA on a drive with a volatile cache,
// what it relies on may be in the cache alone: the record of a grain that an earlier write has added, or
// a discard after which there is nothing left to write zeroes to.
func (l *Leg) flushes(io *block.IO) bool { return io.FUA && l.tree.volatile }

func (l *Leg) changeAll(io *block.IO) error {
	if io.Off/ChunkSize == (io.Off+io.Len-1)/ChunkSize {
		return l.changeChunk(io, io.Off, io.Len)
	}
	var group errgroup.Group
	group.SetLimit(changesAtOnce)
	for at := io.Off; at < io.Off+io.Len; {
		from, n := at, min(ChunkSize-at%ChunkSize, io.Off+io.Len-at)
		if io.Op == block.OpWrite || l.mapsAny(uint32(from/ChunkSize)) {
			group.Go(func() error { return l.changeChunk(io, from, n) })
		}
		at += n
	}
	return group.Wait()
}

// mapsAny reports whether a chunk may have data.
func (l *Leg) mapsAny(chunk uint32) bool {
	s := l.tree.stripe(chunk)
	s.mu.Lock()
	defer s.mu.Unlock()
	return l.tree.first[chunk] != 0 || s.busy[chunk] != nil || l.tree.overBase(l.layer, chunk)
}

// changeChunk does the part of a request that is in one chunk: n bytes at a place of the leg. Zeroes
// take no chunk where there is none: they are what is read there. With FUA they do, since the discard
// that took a chunk away may not be durable.
func (l *Leg) changeChunk(io *block.IO, at, n int64) error {
	chunk, from := uint32(at/ChunkSize), at%ChunkSize
	if io.Op == block.OpWrite {
		data := io.Data[at-io.Off:][:n]
		if !io.FUA && !l.mapsAny(chunk) && block.AllZero(data) {
			return nil // as a kernel writes that copies what was never written
		}
		return l.write(chunk, from, data, io.FUA)
	}
	first, last := (from+GrainSize-1)/GrainSize*GrainSize, (from+n)/GrainSize*GrainSize
	if first < last {
		if err := l.zero(chunk, mask(first, last-first), io); err != nil {
			return err
		}
	}
	if io.Op == block.OpDiscard {
		return nil
	}
	if first > last { // inside one grain
		return l.writeZeroes(chunk, from, n, io.FUA)
	}
	if err := l.writeZeroes(chunk, from, first-from, io.FUA); err != nil {
		return err
	}
	return l.writeZeroes(chunk, last, from+n-last, io.FUA)
}

// writeZeroes writes zeroes to a part of a grain, unless it reads as zeroes as it is.
func (l *Leg) writeZeroes(chunk uint32, from, n int64, fua bool) error {
	if n == 0 {
		return nil
	}
	s := l.tree.stripe(chunk)
	s.mu.Lock()
	_, data := l.tree.source(l.layer, chunk, from/GrainSize)
	s.mu.Unlock()
	if !data {
		return nil
	}
	return l.write(chunk, from, make([]byte, n), fua)
}

// write writes to one chunk. What is partly in the base and partly in a chunk of its own is written
// part by part.
func (l *Leg) write(chunk uint32, from int64, p []byte, fua bool) error {
	err := l.writePart(chunk, from, p, fua)
	var mixed *mixedError
	if !errors.As(err, &mixed) {
		return err
	}
	for len(p) > 0 {
		n := mixed.until(from, from+int64(len(p))) - from
		if err := l.write(chunk, from, p[:n], fua); err != nil {
			return err
		}
		from, p = from+n, p[n:]
	}
	return nil
}

// writePart is write for a range that is all in the base, or all not.
func (l *Leg) writePart(chunk uint32, from int64, p []byte, fua bool) error {
	t := l.tree
	s := t.stripe(chunk)
	s.mu.Lock()
	touched := mask(from, int64(len(p)))
	grains := touched
	b := s.take(chunk, grains)
	if own := t.own(l.layer, chunk); own != 0 && !hasChunk(own) {
		t.drop(s, chunk, grains) // the record moves to another slot: alone
		grains = allGrains
		b = s.take(chunk, grains)
	}
	direct, slot := l.direct(chunk, touched), uint32(0)
	var err error
	switch {
	case direct == touched:
		at := t.baseAt(chunk)
		s.mu.Unlock()
		err = block.Do(t.below, &block.IO{Op: block.OpWrite, FUA: fua, Off: at + from, Len: int64(len(p)), Data: p})
		s.mu.Lock()
	case direct != 0:
		err = &mixedError{direct}
	default:
		slot, err = t.slotFor(l.layer.ID, s, b, chunk, l.wantsReady(chunk, touched))
	}
	if err != nil || direct != 0 {
		t.drop(s, chunk, grains)
		s.mu.Unlock()
		return err
	}
	done, w := make(chan error, 1), newChunkWrite()
	w.told = func(err error) { done <- err }
	w.start(l, slot, chunk, from, p, grains, fua)
	return <-done
}

// slotFor returns the slot with the chunk that a layer has, or takes one. The caller holds the stripe, which
// is given up meanwhile.
func (t *Tree) slotFor(id uint32, s *stripe, b *busy, chunk uint32, wantReady bool) (uint32, error) {
	for {
		if own := t.own(t.layers[id], chunk); own != 0 && hasChunk(own) {
			return own, nil
		}
		if slot := b.slots[id]; slot != 0 {
			return slot, nil
		}
		s.mu.Unlock()
		slot, err := t.alloc(true, wantReady)
		s.mu.Lock()
		if err != nil {
			return 0, err
		}
		if own := t.own(t.layers[id], chunk); b.slots[id] != 0 || own != 0 && hasChunk(own) {
			t.whenIdle(slot, t.space.put)
			continue
		}
		b.use(id, slot)
	}
}

// edge is a grain that a write covers in part, and that its layer does not have: its other bytes
// come from below.
type edge struct {
	grain  int64
	source source
	data   bool // else it is zeroes
}

// edges appends them to all, and holds their sources. The caller holds the stripe.
func (l *Leg) edges(all []edge, chunk uint32, fresh uint64, from, n int64) []edge {
	add := func(grain int64) {
		if fresh>>grain&1 == 0 || len(all) > 0 && all[0].grain == grain {
			return
		}
		e := edge{grain: grain}
		if e.source, e.data = l.tree.source(l.layer, chunk, grain); e.source.slot != 0 {
			l.tree.record(e.source.slot).hold()
		}
		all = append(all, e)
	}
	if from%GrainSize != 0 {
		add(from / GrainSize)
	}
	if (from+n)%GrainSize != 0 {
		add((from + n) / GrainSize)
	}
	return all
}

// addGrains makes grains a layer's own, in a slot that has their data. was is the slot of the
// layer's record so far, 0 if it had none.
func (t *Tree) addGrains(id, slot, was, chunk uint32, grains uint64, fua bool) error {
	zero := t.zeroMoved(slot, was)
	if err := t.put(slot, fua, func(e *entry) { e.add(id, chunk, grains, zero) }); err != nil {
		return err
	}
	if moves(was, slot) {
		if err := t.supersede(was); err != nil {
			return err
		}
	}
	s := t.stripe(chunk)
	s.mu.Lock()
	t.showGrains(id, slot, was, chunk, grains, zero)
	s.mu.Unlock()
	return nil
}

// moves reports whether a layer's record of a chunk, which was in the slot old if that is not 0, comes to another
// slot.
func moves(old, slot uint32) bool { return old != 0 && old != slot }

// zeroMoved is the grains that come to a slot with the layer's record, which was in another slot: one without
// a chunk, so they are zeroes.
func (t *Tree) zeroMoved(slot, was uint32) uint64 {
	if !moves(was, slot) {
		return 0
	}
	return t.record(was).have.Load()
}

// add makes grains data, and zero zeroes unless they are among them.
func (e *entry) add(layer, chunk uint32, grains, zero uint64) {
	e.layer, e.chunk = layer, chunk
	e.have |= grains | zero
	e.zero = (e.zero | zero) &^ grains
}

// showGrains makes look-ups see what add has made of a record, and gives up the slot of the record that it has
// superseded. The caller holds the stripe.
func (t *Tree) showGrains(id, slot, was, chunk uint32, grains, zero uint64) {
	if moves(was, slot) {
		t.hide(was, chunk)
		defer t.free(was) // see hide
	}
	linked := t.record(slot).layer != 0
	t.publish(slot, func(r *record) {
		r.layer, r.chunk = id, chunk
		r.have.Or(grains | zero)
		r.data.Or(grains)
	})
	if linked {
		t.stripe(chunk).forgetFar(chunk)
	} else {
		t.link(slot)
		t.retop(chunk)
	}
}

// supersede clears the record of a slot on the drive, since a newer one is in another slot. That must be
// before the newer one may be cleared: else this one would count again. And it must be before look-ups see
// the newer one: what is written to its chunk in place would be lost if the newer record were, and this one
// counted (see damage.go). Then hide follows.
func (t *Tree) supersede(slot uint32) error {
	if t.volatile {
		if err := t.flush(); err != nil {
			return t.fail(err) // the slot is lost to this tree, and its record may come back
		}
	}
	return t.put(slot, false, func(e *entry) { *e = entry{} })
}

// hide takes a record that is cleared on the drive out of its chain. Open legs may still look at its slot until
// retop: if it were free before, another chunk's data could be in it when they do. The caller holds the stripe.
func (t *Tree) hide(slot, chunk uint32) {
	t.unlink(slot, chunk)
	t.publish(slot, func(r *record) { r.set(entry{}) })
}

// zero makes whole grains read as zeroes, and gives up what needs no space any more. What is in the
// leg's own base goes to the drive as it was asked for.
func (l *Leg) zero(chunk uint32, grains uint64, io *block.IO) error {
	t := l.tree
	s := t.stripe(chunk)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.take(chunk, allGrains)
	defer t.drop(s, chunk, allGrains)
	if direct := l.direct(chunk, grains); direct != 0 {
		grains &^= direct
		at := t.baseAt(chunk)
		s.mu.Unlock()
		err := t.zeroBase(at, direct, io)
		s.mu.Lock()
		if err != nil || grains == 0 {
			return err
		}
	}
	own := t.own(l.layer, chunk)
	var have, data uint64
	if own != 0 {
		have, data = t.record(own).have.Load(), t.record(own).data.Load()
	}
	next := entry{layer: l.layer.ID, chunk: chunk}
	next.zero = (have&^data | grains) & t.inherited(l.layer, chunk)
	next.have = data&^grains | next.zero
	if next.have == have && next.have&^next.zero == data {
		return nil
	}
	s.mu.Unlock()
	defer s.mu.Lock()
	return l.setZero(own, next, io.FUA)
}

// setZero makes next the layer's record of a chunk, which was in the slot own if that is not 0.
func (l *Leg) setZero(own uint32, next entry, fua bool) error {
	t := l.tree
	if next.have == 0 {
		return t.clearSlot(own, next.chunk, fua)
	}
	slot := own
	if next.have == next.zero && (own == 0 || hasChunk(own)) { // needs no chunk
		free, err := t.alloc(false, false)
		if err != nil && own == 0 {
			free, err = t.alloc(true, false)
		}
		switch {
		case err == nil:
			slot = free
		case own == 0:
			return err
		}
	}
	return t.replace(own, slot, next, fua)
}

// clearSlot gives up a layer's record of a chunk.
func (t *Tree) clearSlot(slot, chunk uint32, fua bool) error {
	if err := t.put(slot, fua, func(e *entry) { *e = entry{} }); err != nil {
		return err
	}
	s := t.stripe(chunk)
	s.mu.Lock()
	t.hide(slot, chunk)
	t.retop(chunk)
	s.mu.Unlock()
	t.free(slot)
	return nil
}

// replace makes next the record in slot, and clears the one that it replaces if that is in another
// slot. The caller has taken all grains of the chunk.
func (t *Tree) replace(old, slot uint32, next entry, fua bool) error {
	t.setBlank(slot, false) // grains may be data no longer, and hold what they held
	err := t.put(slot, fua, func(e *entry) { e.layer, e.chunk, e.have, e.zero = next.layer, next.chunk, next.have, next.zero })
	if err == nil && moves(old, slot) {
		err = t.supersede(old)
	}
	if err != nil {
		return err
	}
	s := t.stripe(next.chunk)
	s.mu.Lock()
	defer s.mu.Unlock()
	if moves(old, slot) {
		t.hide(old, next.chunk)
		defer t.free(old) // see hide
	}
	if t.record(slot).layer != 0 {
		t.unlink(slot, next.chunk)
	}
	t.publish(slot, func(r *record) {
		r.layer, r.chunk = next.layer, next.chunk
		r.data.Store(next.have &^ next.zero)
		r.have.Store(next.have)
	})
	t.link(slot)
	t.retop(next.chunk)
	return nil
}

// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"slices"
	"sync"
	"sync/atomic"

	"weft.dev/weft/proto/block"
)

// chunkWrite is a write to one chunk that is not in the base:
//
//	grains that it covers in part ──► the data ──► a flush ──► the record ──► the answer
//	       from below                 in one piece   shared     if the layer has not all of them
//
// The flush is for some writes on a drive with a volatile cache; see together.go. In a chunk that holds zeroes
// less is needed; see prepare.go:
//
//	the data, and the record beside it ──► the answer
//
// Each step begins when the drive has ended the one before, and none has a goroutine.
type chunkWrite struct {
	leg   *Leg
	io    *block.IO   // answered at the end; nil: told is called
	told  func(error) // must not wait
	chunk uint32
	from  int64 // of p, in the chunk
	p     []byte
	fua   bool

	id      uint32 // the layer
	slot    uint32 // whose chunk it writes to
	was     uint32 // slot of the layer's record so far, 0 if it has none
	taken   uint64 // grains that are given up at the end
	touched uint64
	fresh   uint64 // those of them that the layer does not have as data

	edges  []edge
	reads  [2]block.IO // of edges
	left   atomic.Int32
	whole  []byte // p, with the edges; it is kept for the next write
	below  block.IO
	record waiter
	edit   func(*entry)
	// volatile: it needs its data to be durable before its record, and counts as one that is under way; durable is
	// told that, if it shares a flush.
	volatile, shares bool
	durable          waiter
	beside           bool  // the record is written beside the data; see prepare.go
	unrecorded       error // why it was not

	edgesOf [2]edge
}

var chunkWrites sync.Pool

func newChunkWrite() *chunkWrite {
	if w, ok := chunkWrites.Get().(*chunkWrite); ok {
		return w
	}
	w := &chunkWrite{}
	w.below.Owner, w.below.Done = w, dataWritten
	for i := range w.reads {
		w.reads[i].Owner, w.reads[i].Done = w, edgeRead
	}
	w.record.told, w.edit, w.durable.told = w.recorded, w.addTo, w.flushed
	return w
}

// writeFirst begins a write to grains of which the leg does not have all, without a goroutine. False: it
// has to wait for another change, or is none of the usual ones, so that change has to do it.
func (l *Leg) writeFirst(io *block.IO) bool {
	chunk, from := uint32(io.Off/ChunkSize), io.Off%ChunkSize
	if from+io.Len > ChunkSize || !io.FUA && block.AllZero(io.Data) {
		return false
	}
	t, touched := l.tree, mask(from, io.Len)
	s := t.stripe(chunk)
	s.mu.Lock()
	slot, ok := l.slotNow(s, chunk, touched, l.flushes(io))
	if !ok {
		s.mu.Unlock()
		return false
	}
	s.begin(chunk).grains |= touched
	w := newChunkWrite()
	w.io = io
	w.start(l, slot, chunk, from, io.Data, touched, io.FUA)
	return true
}

// slotNow returns the slot whose chunk a write goes to, if it can be told, or taken, at once. A write that
// needs a flush may go there only if it writes the record: with FUA, as the data, which leaves nothing that
// the write relies on in the cache. And only if no record that was cleared may come back: this one may be cleared,
// too, and the drive keep that and lose the other. The caller holds the stripe.
func (l *Leg) slotNow(s *stripe, chunk uint32, touched uint64, flushes bool) (slot uint32, ok bool) {
	t, b := l.tree, s.busy[chunk]
	if b != nil && b.grains&touched != 0 {
		return 0, false
	}
	own := t.own(l.layer, chunk)
	if own != 0 && !hasChunk(own) || l.direct(chunk, touched) != 0 || flushes && t.space.unsettled() {
		return 0, false
	}
	if own != 0 {
		return own, !flushes || touched&^t.record(own).data.Load() != 0
	}
	if b != nil && b.slots[l.layer.ID] != 0 {
		return b.slots[l.layer.ID], true
	}
	if slot, _ = t.take(true, l.wantsReady(chunk, touched)); slot == 0 {
		return 0, false
	}
	s.begin(chunk).use(l.layer.ID, slot)
	return slot, true
}

// start begins the write of p to a chunk of which the caller has taken grains. The caller holds the
// stripe, which is given up.
func (w *chunkWrite) start(l *Leg, slot, chunk uint32, from int64, p []byte, taken uint64, fua bool) {
	t := l.tree
	w.leg, w.chunk, w.from, w.p, w.fua = l, chunk, from, p, fua
	w.id, w.slot, w.was, w.taken = l.layer.ID, slot, t.own(l.layer, chunk), taken
	w.touched = mask(from, int64(len(p)))
	w.fresh = w.touched
	if w.was == slot {
		w.fresh &^= t.record(slot).data.Load()
	}
	w.edges = l.edges(w.edgesOf[:0], chunk, w.fresh, from, int64(len(p)))
	if w.fresh != 0 && t.isBlank(slot) {
		w.edges = slices.DeleteFunc(w.edges, func(e edge) bool { return !e.data }) // they hold zeroes as they are
		w.beside = !moves(w.was, slot) && !t.seesData(l.layer, chunk, w.fresh)
	}
	t.stripe(chunk).mu.Unlock()
	if len(w.edges) == 0 {
		w.write(from, p)
		return
	}
	w.readEdges()
}

// readEdges gets the grains that are covered in part: from below, or zeroes.
func (w *chunkWrite) readEdges() {
	start, end := w.bounds()
	if n := int(end - start); cap(w.whole) < n {
		w.whole = make([]byte, max(n, 2*GrainSize))
	}
	w.whole = w.whole[:end-start]
	w.left.Store(int32(len(w.edges)) + 1)
	for i := range w.edges {
		e, io := &w.edges[i], &w.reads[i]
		io.Err = nil
		from, to := w.missing(e.grain)
		p := w.whole[from-start : to-start]
		if !e.data {
			clear(p)
			w.left.Add(-1)
			continue
		}
		io.Op, io.Off, io.Len, io.Data = block.OpRead, e.source.at+from, to-from, p
		w.leg.tree.below.Submit(io)
	}
	w.edgesDone()
}

// bounds is the part of the chunk that is written.
func (w *chunkWrite) bounds() (start, end int64) {
	start, end = w.from, w.from+int64(len(w.p))
	for i := range w.edges {
		start, end = min(start, w.edges[i].grain*GrainSize), max(end, (w.edges[i].grain+1)*GrainSize)
	}
	return start, end
}

// missing is the part of a grain that has what the write does not cover: all of it if that is on both
// sides.
func (w *chunkWrite) missing(grain int64) (from, to int64) {
	from, to = grain*GrainSize, (grain+1)*GrainSize
	switch first, last := w.from, w.from+int64(len(w.p)); {
	case first <= from:
		from = last
	case last >= to:
		to = first
	}
	return from, to
}

func edgeRead(io *block.IO) { io.Owner.(*chunkWrite).edgesDone() }

// edgesDone is called once for each read, and once when all have begun. The last one goes on.
func (w *chunkWrite) edgesDone() {
	if w.left.Add(-1) > 0 {
		return
	}
	var err error
	for i := range w.edges {
		w.leg.tree.releaseSource(w.edges[i].source.slot)
		if w.reads[i].Err != nil {
			err = w.reads[i].Err
		}
	}
	if err != nil {
		w.end(err)
		return
	}
	start, _ := w.bounds()
	copy(w.whole[w.from-start:], w.p)
	w.write(start, w.whole)
}

// write writes the data. On a drive with a volatile cache it must be durable before a record may be that
// names it.
func (w *chunkWrite) write(at int64, p []byte) {
	t, io := w.leg.tree, &w.below
	io.Op, io.Off, io.Len, io.Data = block.OpWrite, t.data(w.slot)+at, int64(len(p)), p
	if w.volatile = t.volatile && w.fresh != 0; w.volatile {
		w.shares = t.shared.writes.Add(1) >= togetherFrom && !w.fua && !w.beside
	}
	if w.beside {
		w.writeBoth(io)
		return
	}
	io.FUA = w.fua || w.volatile && !w.shares
	t.below.Submit(io)
}

// writeBoth writes the data and the record side by side. The grains read as zeroes now, and do so if a crash
// leaves the record alone: so the drive need not have the data first.
func (w *chunkWrite) writeBoth(io *block.IO) {
	t := w.leg.tree
	io.FUA = w.fua
	w.left.Store(2)
	t.below.Submit(io)
	t.putThen(w.slot, w.fua, w.edit, &w.record)
}

// bothDone is called at the end of each of both; the second one goes on.
func (w *chunkWrite) bothDone() {
	switch {
	case w.left.Add(-1) > 0:
	case w.unrecorded != nil:
		w.end(w.unrecorded)
	default:
		w.show(w.below.Err)
	}
}

func dataWritten(io *block.IO) {
	w := io.Owner.(*chunkWrite)
	switch {
	case w.beside:
		w.bothDone()
	case io.Err != nil || w.fresh == 0:
		w.end(io.Err)
	case w.shares:
		w.leg.tree.flushThen(&w.durable)
	default:
		w.flushed(nil)
	}
}

// flushed goes on once the data is as durable as it has to be.
func (w *chunkWrite) flushed(err error) {
	if err != nil {
		w.end(err)
		return
	}
	w.leg.tree.putThen(w.slot, w.fua, w.edit, &w.record)
}

func (w *chunkWrite) zeroBefore() uint64 { return w.leg.tree.zeroMoved(w.slot, w.was) }

func (w *chunkWrite) addTo(e *entry) { e.add(w.id, w.chunk, w.touched, w.zeroBefore()) }

// recorded shows the grains to look-ups, once the record is on the drive.
func (w *chunkWrite) recorded(err error) {
	switch {
	case w.beside:
		w.unrecorded = err
		w.bothDone()
		return
	case err != nil:
		w.end(err)
		return
	case !moves(w.was, w.slot):
		w.show(nil)
		return
	}
	go func() { // it waits for the drive
		if err := w.leg.tree.supersede(w.was); err != nil {
			w.end(err)
			return
		}
		w.show(nil)
	}()
}

// show is recorded, once an older record in another slot is cleared. If the data could not be written beside the
// record, its grains are shown as well: the drive has that they are data, and what they hold is not known.
func (w *chunkWrite) show(err error) {
	t := w.leg.tree
	s := t.stripe(w.chunk)
	s.mu.Lock()
	t.showGrains(w.id, w.slot, w.was, w.chunk, w.touched, w.zeroBefore())
	t.drop(s, w.chunk, w.taken)
	s.mu.Unlock()
	w.answer(err)
}

func (w *chunkWrite) end(err error) {
	t := w.leg.tree
	s := t.stripe(w.chunk)
	s.mu.Lock()
	if err != nil && w.fresh != 0 {
		t.setBlank(w.slot, false) // a part of the data may be there
	}
	t.drop(s, w.chunk, w.taken)
	s.mu.Unlock()
	w.answer(err)
}

// keptMost is the largest buffer that is kept.
const keptMost = 64 << 10

func (w *chunkWrite) answer(err error) {
	leg, io, told := w.leg, w.io, w.told
	if w.volatile {
		leg.tree.shared.writes.Add(-1)
	}
	w.volatile, w.shares, w.beside, w.unrecorded = false, false, false, nil
	w.leg, w.io, w.told, w.p, w.below.Data = nil, nil, nil, nil, nil
	for i := range w.reads {
		w.reads[i].Data = nil
	}
	if cap(w.whole) > keptMost {
		w.whole = nil
	}
	chunkWrites.Put(w)
	if io == nil {
		told(err)
		return
	}
	leg.writes.leave()
	io.Complete(err)
}

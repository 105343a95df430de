// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"weft.dev/weft/proto/block"
)

// Leg is an open layer as a block.Device: the head of a leg, or a snapshot, which is read-only.
// Reads of any chunk and writes to what the layer has already go to the drive at once and take no
// memory. Nor do first writes, which go from step to step as the drive ends them (chunkWrite); requests
// that have to wait for another one, and others that change the leg, have a goroutine each. Discards and
// zeroes give whole grains back; the rest of a discard does nothing, and the rest of a range of zeroes is
// written.
type Leg struct {
	tree     *Tree
	layer    *layer // guarded by the stripes
	geometry atomic.Pointer[block.Geometry]
	// top has, by chunk, the first record that the layer sees, with ownBit. 0: look under the
	// stripe.
	top    atomic.Pointer[[]atomic.Uint32]
	reads  gate
	writes gate // and all else that changes the leg
	// restored counts how often the leg was made again of a snapshot while it was open.
	restored atomic.Uint64
}

// Restored is how often the leg was made again of a snapshot since it was opened.
func (l *Leg) Restored() uint64 { return l.restored.Load() }

// Leg opens a leg or a snapshot for I/O. An object is open once at a time (ErrInUse).
func (t *Tree) Leg(object block.UUID) (*Leg, error) {
	t.admin.Lock()
	defer t.admin.Unlock()
	l := t.super.layer(object)
	switch {
	case l == nil:
		return nil, fmt.Errorf("open %v: %w", object, ErrUnknown)
	case t.openLeg(l.ID) != nil || t.isPinned(object):
		return nil, fmt.Errorf("open %v: %w", object, ErrInUse)
	}
	leg := &Leg{tree: t, layer: t.layers[l.ID]}
	leg.reads.init()
	leg.writes.init()
	g := t.below.Geometry()
	g.Size, g.DiscardUnit, g.ReadOnly = l.Size, GrainSize, g.ReadOnly || l.State == StateFrozen
	leg.geometry.Store(&g)
	t.lockAll()
	defer t.unlockAll()
	top := make([]atomic.Uint32, chunksOf(l.Size))
	leg.top.Store(&top)
	leg.lookAnew()
	t.legs = append(t.legs, leg)
	if l.State == StateOpen && leg.layer.records.Load() == 0 {
		t.prepareSoon() // it is new: first writes will come
	}
	return leg, nil
}

// lookAnew finds, for all chunks, where look-ups begin. The caller holds all stripes.
func (l *Leg) lookAnew() {
	top := *l.top.Load()
	for c := range top {
		at := uint32(0)
		if b := l.tree.stripe(uint32(c)).busy[uint32(c)]; b == nil || !b.quiet {
			at = l.tree.topOf(l.layer, uint32(c))
		}
		top[c].Store(at)
	}
}

// Close waits for the I/O under way. Later I/O fails with block.ErrGone.
func (l *Leg) Close() {
	t := l.tree
	t.admin.Lock() // a freeze shuts the gate, too
	defer t.admin.Unlock()
	l.writes.end()
	l.reads.end()
	t.lockAll()
	defer t.unlockAll()
	t.legs = slices.DeleteFunc(slices.Clone(t.legs), func(o *Leg) bool { return o == l })
}

// Geometry implements block.Device.
func (l *Leg) Geometry() block.Geometry { return *l.geometry.Load() }

// moveTo makes another layer the leg's, which has no records yet. The caller holds all stripes, and
// no write is under way.
func (l *Leg) moveTo(id uint32) {
	l.layer = l.tree.layers[id]
	top := *l.top.Load()
	for c := range top {
		if was := top[c].Load(); was&ownBit != 0 {
			top[c].Store(was &^ ownBit)
		}
	}
}

// resize shows the leg's new size. The caller holds all stripes.
func (l *Leg) resize(size block.Size) {
	old := *l.top.Load()
	top := make([]atomic.Uint32, chunksOf(size))
	for c := range old {
		top[c].Store(old[c].Load())
	}
	l.top.Store(&top)
	for c := range old { // for those who still look here
		old[c].Store(0)
	}
	g := *l.geometry.Load()
	g.Size = size
	l.geometry.Store(&g)
}

// Extend has a leg of a damaged tree, which does not grow, read as zeroes from its end to size. That is right if it
// was to grow to there when the records were lost: nobody has written there. A smaller size changes nothing.
func (l *Leg) Extend(size block.Size) {
	t := l.tree
	t.admin.Lock()
	defer t.admin.Unlock()
	if t.damage == nil || size <= l.Geometry().Size {
		return
	}
	t.lockAll()
	defer t.unlockAll()
	if n := int(chunksOf(size)); n > len(t.first) {
		t.first = append(t.first, make([]uint32, n-len(t.first))...)
	}
	l.resize(size)
}

// Submit implements block.Device.
func (l *Leg) Submit(io *block.IO) {
	err := l.geometry.Load().CheckIO(io)
	if err == nil {
		err = l.tree.Err()
	}
	if err == nil {
		err = l.refuses(io)
	}
	if err != nil {
		io.Complete(err)
		return
	}
	if io.Op != block.OpRead && io.Op != block.OpFlush {
		l.submitChange(io)
		return
	}
	if !l.reads.enter() {
		io.Complete(l.gone(io))
		return
	}
	switch {
	case io.Op == block.OpFlush:
		l.flush(io)
	case !l.forward(io, &l.reads):
		l.read(io)
	}
}

func (l *Leg) submitChange(io *block.IO) {
	if !l.writes.enter() {
		go func() { // a freeze is under way, or the end
			if !l.writes.enterLater() {
				io.Complete(l.gone(io))
				return
			}
			l.change(io)
		}()
		return
	}
	if io.Op == block.OpWrite && (!l.flushes(io) && l.forward(io, &l.writes) || l.writeFirst(io)) {
		return
	}
	go l.change(io)
}

func (l *Leg) gone(io *block.IO) error {
	return fmt.Errorf("%v, to a leg that is closed: %w", io.Op, block.ErrGone)
}

// forwarded is an IO that goes to the drive as it is, at another place.
type forwarded struct {
	io    *block.IO
	leg   *Leg
	gate  *gate
	slot  uint32   // 0: a flush
	batch []uint32 // what a flush makes free
	below block.IO
}

var forwards sync.Pool

func newForwarded() *forwarded {
	if f, ok := forwards.Get().(*forwarded); ok {
		return f
	}
	f := &forwarded{}
	f.below.Owner, f.below.Done = f, forwardDone
	return f
}

// forward sends a read or a write on if all of it is in one chunk, and for a write in the leg's own.
func (l *Leg) forward(io *block.IO, g *gate) bool {
	chunk, from := io.Off/ChunkSize, io.Off%ChunkSize
	if from+io.Len > ChunkSize {
		return false
	}
	slot := l.holdTop(uint32(chunk), mask(from, io.Len), io.Op == block.OpWrite)
	if slot == 0 {
		return false
	}
	l.forwardTo(io, g, slot, l.tree.data(slot)+from)
	return true
}

// forwardTo sends a read or a write on to a place of the drive, in a slot that is held.
func (l *Leg) forwardTo(io *block.IO, g *gate, slot uint32, at int64) {
	f := newForwarded()
	f.io, f.leg, f.gate, f.slot = io, l, g, slot
	f.below.Op, f.below.FUA, f.below.Off, f.below.Len, f.below.Data = io.Op, io.FUA, at, io.Len, io.Data
	l.tree.below.Submit(&f.below)
}

// holdTop holds the slot that has all the grains as data, if that is the first one to look at.
func (l *Leg) holdTop(chunk uint32, grains uint64, own bool) uint32 {
	top := &(*l.top.Load())[chunk]
	was := top.Load()
	if was == 0 || own && was&ownBit == 0 {
		return 0
	}
	slot := was &^ ownBit
	r := l.tree.record(slot)
	r.hold()
	// Whoever takes the slot away changes top first, and then waits for those who hold it.
	if top.Load() == was && grains&^r.data.Load() == 0 {
		return slot
	}
	l.tree.release(slot)
	return 0
}

func (l *Leg) flush(io *block.IO) {
	f := newForwarded()
	f.io, f.leg, f.gate, f.slot = io, l, &l.reads, 0
	f.batch = l.tree.space.takeQuarantine()
	f.below.Op, f.below.FUA, f.below.Off, f.below.Len, f.below.Data = block.OpFlush, false, 0, 0, nil
	l.tree.below.Submit(&f.below)
}

func forwardDone(below *block.IO) {
	f := below.Owner.(*forwarded)
	io, leg, gate, err := f.io, f.leg, f.gate, below.Err
	if f.slot != 0 {
		leg.tree.release(f.slot)
	} else if len(f.batch) > 0 || err != nil {
		leg.tree.flushed(f.batch, err)
	}
	if f.slot == 0 && err == nil {
		err = leg.tree.Err()
	}
	f.io, f.leg, f.gate, f.batch, below.Data, below.Err = nil, nil, nil, nil, nil, nil
	forwards.Put(f)
	gate.leave()
	io.Complete(err)
}

// scattered is a read from several places.
type scattered struct {
	io    *block.IO
	leg   *Leg
	parts []part
	left  atomic.Int32
	err   atomic.Pointer[error]
}

type part struct {
	below block.IO
	slot  uint32 // 0: in the base
	of    *scattered
}

var scatters = sync.Pool{New: func() any { return &scattered{} }}

// read collects the parts of a read from the layers.
func (l *Leg) read(io *block.IO) {
	r := scatters.Get().(*scattered)
	r.io, r.leg = io, l
	for at := io.Off; at < io.Off+io.Len; {
		chunk, from := uint32(at/ChunkSize), at%ChunkSize
		n := min(ChunkSize-from, io.Off+io.Len-at)
		s := l.tree.stripe(chunk)
		s.mu.Lock()
		if b := s.busy[chunk]; b != nil && b.quiet {
			s.mu.Unlock()
			r.drop()
			go l.readLater(io, chunk)
			return
		}
		if n == io.Len {
			if slot := l.tree.holder(l.layer, chunk, mask(from, n)); slot != 0 { // all in one place
				l.tree.record(slot).hold()
				s.mu.Unlock()
				r.drop()
				l.forwardTo(io, &l.reads, slot, l.tree.data(slot)+from)
				return
			}
		}
		r.collect(chunk, from, io.Data[at-io.Off:][:n])
		s.mu.Unlock()
		at += n
	}
	parts := r.parts
	if len(parts) == 0 {
		r.done()
		return
	}
	r.left.Store(int32(len(parts)))
	for i := range parts {
		parts[i].of = r
		parts[i].below.Owner, parts[i].below.Done = &parts[i], partDone
		l.tree.below.Submit(&parts[i].below)
	}
}

// readLater reads once a chunk that is being moved is in its place.
func (l *Leg) readLater(io *block.IO, chunk uint32) {
	s := l.tree.stripe(chunk)
	s.mu.Lock()
	for b := s.busy[chunk]; b != nil && b.quiet; b = s.busy[chunk] {
		s.idle.Wait()
	}
	s.mu.Unlock()
	l.read(io)
}

// collect finds who has the grains of a range of a chunk, and holds their slots. The caller holds
// the chunk's stripe.
func (r *scattered) collect(chunk uint32, from int64, p []byte) {
	t, to := r.leg.tree, from+int64(len(p))
	left := mask(from, int64(len(p)))
	t.deciding(r.leg.layer, chunk, left, func(slot uint32, rec *record) bool {
		have := rec.have.Load() & left
		data := rec.data.Load() & have
		clearRuns(p, have&^data, from, to)
		for left &^= have; data != 0; {
			grains, a, b := run(data)
			data &^= grains
			a, b = max(a, from), min(b, to)
			rec.hold()
			r.parts = append(r.parts, part{slot: slot, below: block.IO{Op: block.OpRead, Off: t.data(slot) + a, Len: b - a, Data: p[a-from : b-from]}})
		}
		return left != 0
	})
	if inBase := t.fromBase(r.leg.layer, chunk, ^left); inBase != 0 {
		at := t.baseAt(chunk)
		for left = 0; inBase != 0; {
			grains, a, b := run(inBase)
			inBase &^= grains
			a, b = max(a, from), min(b, to)
			r.parts = append(r.parts, part{below: block.IO{Op: block.OpRead, Off: at + a, Len: b - a, Data: p[a-from : b-from]}})
		}
	}
	clearRuns(p, left, from, to)
}

// clearRuns makes the grains of m zeroes in p, the bytes from, to of a chunk.
func clearRuns(p []byte, m uint64, from, to int64) {
	for m != 0 {
		grains, a, b := run(m)
		m &^= grains
		clear(p[max(a, from)-from : min(b, to)-from])
	}
}

func partDone(below *block.IO) {
	p := below.Owner.(*part)
	r, slot, err := p.of, p.slot, below.Err
	if err != nil {
		r.fail(err)
	}
	r.leg.tree.releaseSource(slot)
	if r.left.Add(-1) == 0 {
		r.done()
	}
}

func (r *scattered) fail(err error) { r.err.CompareAndSwap(nil, &err) }

// drop forgets what was collected.
func (r *scattered) drop() {
	for i := range r.parts {
		r.leg.tree.releaseSource(r.parts[i].slot)
	}
	r.io, r.leg = nil, nil
	clear(r.parts)
	r.parts = r.parts[:0]
	r.err.Store(nil)
	scatters.Put(r)
}

func (r *scattered) done() {
	io, leg := r.io, r.leg
	var err error
	if p := r.err.Load(); p != nil {
		err = *p
	}
	clear(r.parts) // their slots are released
	r.parts = r.parts[:0]
	r.drop()
	leg.reads.leave()
	io.Complete(err)
}

// gate counts the I/Os under way, and can be shut to wait until there are none.
type gate struct {
	n       atomic.Int64
	empty   chan struct{}
	mu      sync.Mutex
	opened  chan struct{} // closed when the gate opens again
	forever bool
}

const shutBit = 1 << 62

func (g *gate) init() { g.empty = make(chan struct{}, 1) }

// enter reports whether the gate is open; then leave has to be called.
func (g *gate) enter() bool {
	if g.n.Add(1)&shutBit == 0 {
		return true
	}
	g.leave()
	return false
}

// enterLater waits until the gate is open; false if it never will be.
func (g *gate) enterLater() bool {
	for !g.enter() {
		g.mu.Lock()
		opened, forever := g.opened, g.forever
		g.mu.Unlock()
		if forever {
			return false
		}
		if opened != nil {
			<-opened
		}
	}
	return true
}

func (g *gate) leave() {
	if g.n.Add(-1) == shutBit {
		select {
		case g.empty <- struct{}{}:
		default:
		}
	}
}

// shut lets nothing in and waits for what is inside.
func (g *gate) shut() {
	g.mu.Lock()
	g.opened = make(chan struct{})
	g.mu.Unlock()
	for g.n.Add(shutBit); g.n.Load() != shutBit; {
		<-g.empty
	}
}

func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.n.Add(-shutBit)
	close(g.opened)
	g.opened = nil
}

// end shuts the gate for ever. A second end does nothing.
func (g *gate) end() {
	g.mu.Lock()
	if g.forever {
		g.mu.Unlock()
		return
	}
	g.forever = true
	g.mu.Unlock()
	g.shut()
	g.mu.Lock()
	close(g.opened)
	g.mu.Unlock()
}

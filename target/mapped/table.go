// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"fmt"
	"sync"
	"sync/atomic"

	"weft.dev/weft/proto/block"
)

// record is a slot's record as look-ups use it. layer, chunk and next are guarded by the stripe of
// the chunk; layer, chunk and seq are changed only with the lock of the table block held as well.
// have and data lose and gain grains under the stripe, and data is read without it by those who
// hold the slot (users).
type record struct {
	have, data atomic.Uint64 // data is a part of have: the grains that do not read as zeroes
	users      atomic.Int32  // I/Os to the chunk under way, and idleWanted
	layer      uint32        // 0: the slot is free
	chunk      uint32
	next       uint32 // slot of the next record of the chunk; see chain.go
	seq        uint64
}

// tableBlock is a block of an extent's table: 64 records and the writes to the drive. What is
// changed while the block is being written goes with the next write.
type tableBlock struct {
	records atomic.Pointer[[perBlock]record] // nil until a slot of the block is used

	mu      sync.Mutex
	pending map[uint32]change // by slot
	writing bool
	fua     bool // some waiter needs its change to be durable
	waiting waiters
}

// change is what a slot's record is becoming: it is on the drive, or about to be, and some of its
// users have not published it yet.
type change struct {
	entry
	users int
}

// waiter is told when a change that it has put is on the drive.
type waiter struct {
	next *waiter
	told func(error) // must not wait
}

// waiters are told in the order in which they came.
type waiters struct{ first, last *waiter }

func (w *waiters) add(x *waiter) {
	x.next = nil
	if w.first == nil {
		w.first = x
	} else {
		w.last.next = x
	}
	w.last = x
}

// tell may find a waiter used again, for another change, as soon as it was told.
func (w waiters) tell(err error) {
	for x := w.first; x != nil; {
		next := x.next
		x.told(err)
		x = next
	}
}

// entry is the record as it is on the drive when no change is pending.
func (r *record) entry() entry {
	have := r.have.Load()
	return entry{layer: r.layer, chunk: r.chunk, have: have, zero: have &^ r.data.Load(), seq: r.seq}
}

func (t *Tree) block(slot uint32) *tableBlock {
	b := &t.extent(slot).blocks[slot%slotCount/perBlock]
	if b.records.Load() == nil {
		b.records.CompareAndSwap(nil, new([perBlock]record))
	}
	return b
}

// put changes a slot's record on the drive, in both copies of the table, and returns when it is as
// durable as the drive's writes are. Nothing sees the change in memory until the caller publishes
// it. An error stops the tree.
func (t *Tree) put(slot uint32, fua bool, edit func(*entry)) error {
	done := make(chan error, 1)
	t.putThen(slot, fua, edit, &waiter{told: func(err error) { done <- err }})
	return <-done
}

// putThen is put, for who does not wait but is told.
func (t *Tree) putThen(slot uint32, fua bool, edit func(*entry), w *waiter) {
	b := t.block(slot)
	b.mu.Lock()
	p, ok := b.pending[slot]
	if !ok {
		p.entry = t.record(slot).entry()
		if b.pending == nil {
			b.pending = map[uint32]change{}
		}
	}
	p.users++
	edit(&p.entry)
	p.seq = t.seq.Add(1)
	b.pending[slot] = p
	b.fua = b.fua || fua
	b.waiting.add(w)
	begin := !b.writing
	b.writing = true
	b.mu.Unlock()
	if begin {
		t.newTableWrite(slot).run(waiters{}, nil)
	}
}

// publish makes a change that put has made durable the state in memory. The caller holds the
// stripe of the chunk.
func (t *Tree) publish(slot uint32, edit func(*record)) {
	b, r := t.block(slot), t.record(slot)
	b.mu.Lock()
	defer b.mu.Unlock()
	edit(r)
	p := b.pending[slot]
	if p.users--; p.users == 0 {
		delete(b.pending, slot)
	} else {
		b.pending[slot] = p
	}
	r.seq = p.seq
}

// tableWrite writes a table block, both copies side by side, again and again while somebody waits for it.
type tableWrite struct {
	tree    *Tree
	extent  *extent
	block   *tableBlock
	first   uint32  // slot of the block's first record, in its extent
	waiting waiters // for the write under way
	stopped error   // why it was not begun
	left    atomic.Int32
	copies  [len(tableAt)]block.IO
	page    []byte
}

var tableWrites sync.Pool

func (t *Tree) newTableWrite(slot uint32) *tableWrite {
	w, ok := tableWrites.Get().(*tableWrite)
	if !ok {
		w = &tableWrite{page: make([]byte, unit)}
		for i := range w.copies {
			w.copies[i].Owner, w.copies[i].Done = w, tableWritten
		}
	}
	w.tree, w.extent, w.block, w.first = t, t.extent(slot), t.block(slot), slot%slotCount&^(perBlock-1)
	return w
}

// run tells who waited for the write before, and writes the block as it is now, unless nobody waits for
// that. The drive has its next command before anybody is told.
func (w *tableWrite) run(before waiters, err error) {
	for {
		more := w.collect()
		if more {
			w.submit()
		}
		before.tell(err)
		if !more {
			w.tree, w.extent, w.block = nil, nil, nil
			tableWrites.Put(w)
			return
		}
		if w.left.Add(-1) > 0 {
			return // tableWritten goes on
		}
		before, err = w.waiting, w.outcome()
	}
}

// collect takes those who wait, and the records as they are to be. Without any, the block is not being
// written any more.
func (w *tableWrite) collect() bool {
	b := w.block
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.waiting.first == nil {
		b.writing = false
		return false
	}
	w.waiting, b.waiting = b.waiting, waiters{}
	records := b.records.Load()
	for i := range records {
		slot := int(w.first) + i
		records[i].entry().encode(w.page[i*recordSize:][:recordSize], w.tree.place.Tree, w.extent.number, slot)
	}
	for slot, c := range b.pending {
		c.encode(w.page[slot%perBlock*recordSize:][:recordSize], w.tree.place.Tree, w.extent.number, int(slot%slotCount))
	}
	for i := range w.copies {
		at := w.extent.at + tableAt[i] + int64(w.first)*recordSize
		io := &w.copies[i]
		io.Op, io.FUA, io.Off, io.Len, io.Data, io.Err = block.OpWrite, b.fua, at, unit, w.page, nil
	}
	b.fua = false
	return true
}

// submit writes both copies, unless the tree has stopped. It leaves one to be counted by the caller.
func (w *tableWrite) submit() {
	w.left.Store(1)
	if w.stopped = w.tree.Err(); w.stopped != nil {
		return
	}
	w.left.Add(int32(len(w.copies)))
	for i := range w.copies {
		w.tree.below.Submit(&w.copies[i])
	}
}

func tableWritten(io *block.IO) {
	w := io.Owner.(*tableWrite)
	if w.left.Add(-1) == 0 {
		w.run(w.waiting, w.outcome())
	}
}

// outcome is how the write ended. An error stops the tree.
func (w *tableWrite) outcome() error {
	for i := range w.copies {
		if err := w.copies[i].Err; err != nil {
			return w.tree.fail(fmt.Errorf("write the table of extent %d: %w", w.extent.number, err))
		}
	}
	return w.stopped
}

// idleWanted is set in a record's users while somebody waits until there are none.
const idleWanted = 1 << 30

// idlers are to be called when slots have no users.
type idlers struct {
	mu   sync.Mutex
	slot map[uint32]func(uint32)
}

// whenIdle calls f once no I/O to the chunk of a slot is under way, perhaps at once. No more than
// one f waits for a slot at a time.
func (t *Tree) whenIdle(slot uint32, f func(slot uint32)) {
	t.idlers.mu.Lock()
	if t.idlers.slot == nil {
		t.idlers.slot = map[uint32]func(uint32){}
	}
	t.idlers.slot[slot] = f
	t.idlers.mu.Unlock()
	r := t.record(slot)
	if r.users.Add(idleWanted) == idleWanted {
		t.idle(slot, r)
	}
}

// hold keeps the chunk of a slot from being given to another owner until release.
func (r *record) hold() { r.users.Add(1) }

func (t *Tree) release(slot uint32) {
	r := t.record(slot)
	if r.users.Add(-1) == idleWanted {
		t.idle(slot, r)
	}
}

// idle is called by whoever finds that a slot which is waited for has no users. Whoever looks at
// the slot a moment later may hold it for a moment, so only one of them clears the mark.
func (t *Tree) idle(slot uint32, r *record) {
	t.idlers.mu.Lock()
	f := t.idlers.slot[slot]
	if f == nil || !r.users.CompareAndSwap(idleWanted, 0) {
		t.idlers.mu.Unlock()
		return
	}
	delete(t.idlers.slot, slot)
	t.idlers.mu.Unlock()
	f(slot)
}

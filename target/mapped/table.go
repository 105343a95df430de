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
	pending map[uint32]*change // by slot
	writing bool
	fua     bool // some waiter needs its change to be durable
	waiting []chan error
}

// change is what a slot's record is becoming: it is on the drive, or about to be, and some of its
// users have not published it yet.
type change struct {
	entry
	users int
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
	b := t.block(slot)
	b.mu.Lock()
	p := b.pending[slot]
	if p == nil {
		p = &change{entry: t.record(slot).entry()}
		if b.pending == nil {
			b.pending = map[uint32]*change{}
		}
		b.pending[slot] = p
	}
	p.users++
	edit(&p.entry)
	p.seq = t.seq.Add(1)
	b.fua = b.fua || fua
	if b.writing {
		done := make(chan error, 1)
		b.waiting = append(b.waiting, done)
		b.mu.Unlock()
		return <-done
	}
	b.writing = true
	b.mu.Unlock()

	err := t.writeBlock(slot)
	for {
		b.mu.Lock()
		waiting := b.waiting
		b.waiting = nil
		if len(waiting) == 0 {
			b.writing = false
			b.mu.Unlock()
			return err
		}
		b.mu.Unlock()
		next := t.writeBlock(slot)
		for _, done := range waiting {
			done <- next
		}
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
	}
	r.seq = p.seq
}

// writeBlock writes the table block of a slot as it is now, both copies side by side.
func (t *Tree) writeBlock(slot uint32) error {
	e, b := t.extent(slot), t.block(slot)
	at := slot % slotCount &^ (perBlock - 1)
	p := make([]byte, unit)
	b.mu.Lock()
	fua := b.fua
	b.fua = false
	records := b.records.Load()
	for i := range uint32(perBlock) {
		now := records[i].entry()
		if c := b.pending[slot&^(perBlock-1)+i]; c != nil {
			now = c.entry
		}
		now.encode(p[i*recordSize:][:recordSize], t.place.Tree, e.number, int(at+i))
	}
	b.mu.Unlock()
	if err := t.Err(); err != nil {
		return err
	}
	if err := t.writeBoth(p, [2]int64{e.at + tableAt[0] + int64(at)*recordSize, e.at + tableAt[1] + int64(at)*recordSize}, fua); err != nil {
		return t.fail(fmt.Errorf("write the table of extent %d: %w", e.number, err))
	}
	return nil
}

// writeBoth writes p at two places side by side.
func (t *Tree) writeBoth(p []byte, at [2]int64, fua bool) error {
	var done sync.WaitGroup
	var ios [2]block.IO
	done.Add(len(ios))
	for i := range ios {
		ios[i] = block.IO{Op: block.OpWrite, FUA: fua, Off: at[i], Len: int64(len(p)), Data: p, Done: func(*block.IO) { done.Done() }}
		t.below.Submit(&ios[i])
	}
	done.Wait()
	if ios[0].Err != nil {
		return ios[0].Err
	}
	return ios[1].Err
}

// idleWanted is set in a record's users while somebody waits until there are none.
const idleWanted = 1 << 30

// waiters are to be called when slots have no users.
type waiters struct {
	mu   sync.Mutex
	slot map[uint32]func(uint32)
}

// whenIdle calls f once no I/O to the chunk of a slot is under way, perhaps at once. No more than
// one f waits for a slot at a time.
func (t *Tree) whenIdle(slot uint32, f func(slot uint32)) {
	t.waiters.mu.Lock()
	if t.waiters.slot == nil {
		t.waiters.slot = map[uint32]func(uint32){}
	}
	t.waiters.slot[slot] = f
	t.waiters.mu.Unlock()
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
	t.waiters.mu.Lock()
	f := t.waiters.slot[slot]
	if f == nil || !r.users.CompareAndSwap(idleWanted, 0) {
		t.waiters.mu.Unlock()
		return
	}
	delete(t.waiters.slot, slot)
	t.waiters.mu.Unlock()
	f(slot)
}

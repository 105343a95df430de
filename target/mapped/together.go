// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"sync"
	"sync/atomic"

	"weft.dev/weft/proto/block"
)

// On a drive with a volatile cache, data must be durable before a record that names it may be. A write by itself is
// written with FUA. Of writes that come together, each would wait for the drive's medium, one after another; so they
// are written to the cache, and share a flush:
//
//	data ──┐
//	data ──┼──► flush ──► records
//	data ──┘
//
// A write that ends while a flush is under way waits for the next one.

// togetherFrom is how many first writes have to be under way for them to share flushes. Tests have fewer.
var togetherFrom int32 = 4

// sharedFlushes are the flushes of a tree for first writes.
type sharedFlushes struct {
	writes atomic.Int32 // first writes under way

	mu       sync.Mutex
	flushing bool
	waiting  waiters // for the next one
}

// sharedFlush is a flush, and then the next one, until nobody waits.
type sharedFlush struct {
	tree    *Tree
	waiting waiters  // for the flush under way
	freed   []uint32 // slots that it makes free
	left    atomic.Int32
	below   block.IO
}

// flushThen tells w once everything that the drive has acknowledged until now is durable, or that it is not known to
// be. Then the tree has stopped.
func (t *Tree) flushThen(w *waiter) {
	s := &t.shared
	s.mu.Lock()
	s.waiting.add(w)
	begin := !s.flushing
	s.flushing = true
	s.mu.Unlock()
	if begin {
		f := &sharedFlush{tree: t}
		f.below.Owner, f.below.Done = f, sharedFlushDone
		f.run(waiters{}, nil)
	}
}

// run tells who waited for the flush before, and begins the next one, unless nobody waits for that. The drive has its
// next command before anybody is told.
func (f *sharedFlush) run(before waiters, err error) {
	for {
		more := f.collect()
		if more {
			f.left.Store(2)
			f.freed = f.tree.space.takeQuarantine()
			f.below.Op, f.below.Err = block.OpFlush, nil
			f.tree.below.Submit(&f.below)
		}
		before.tell(err)
		if !more || f.left.Add(-1) > 0 {
			return // sharedFlushDone goes on, or the next flushThen
		}
		before, err = f.waiting, f.outcome()
	}
}

// collect takes those who wait. Without any, there is no flush any more.
func (f *sharedFlush) collect() bool {
	s := &f.tree.shared
	s.mu.Lock()
	defer s.mu.Unlock()
	f.waiting, s.waiting = s.waiting, waiters{}
	s.flushing = f.waiting.first != nil
	return s.flushing
}

func sharedFlushDone(io *block.IO) {
	f := io.Owner.(*sharedFlush)
	if f.left.Add(-1) == 0 {
		f.run(f.waiting, f.outcome())
	}
}

// outcome is how the flush ended.
func (f *sharedFlush) outcome() error {
	f.tree.flushed(f.freed, f.below.Err)
	f.freed = nil
	if f.below.Err != nil {
		return f.below.Err
	}
	return f.tree.Err() // another flush may have failed meanwhile, and this one not
}

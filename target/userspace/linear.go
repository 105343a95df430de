// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/figures"
	"weft.dev/weft/raid/checkpoint"
)

// linear is a leg: a block.Device made of segments of a drive. Its table can be replaced while it
// is in use.
type linear struct {
	size    block.Size
	table   atomic.Pointer[table] // nil: removed
	writers writers
	meter   figures.Meter
	off     bool // nothing is counted; for BenchmarkCounting alone
}

func newLinear(t *table) *linear {
	l := &linear{size: t.geometry.Size}
	l.table.Store(t)
	return l
}

// swap replaces the table and returns the old one; nil removes the leg.
func (l *linear) swap(t *table) *table { return l.table.Swap(t) }

// Geometry is the drive's, except for the size, which is the leg's.
func (l *linear) Geometry() block.Geometry {
	if t := l.table.Load(); t != nil {
		return t.geometry
	}
	return block.Geometry{Size: l.size, BlockSize: 4 * block.KiB}
}

// failed reports whether the leg's tree has stopped, so that no I/O can succeed.
func (l *linear) failed() bool {
	t := l.take()
	if t == nil {
		return false
	}
	defer t.release()
	m, ok := t.below.(*mappedLeg)
	return ok && m.tree.Err() != nil
}

// losses returns the losses of the drive below, which are the same whatever the table is. While there is no table, as while a tree that has stopped is
// opened again, it is a number that no drive has.
func (l *linear) losses() uint64 {
	t := l.take()
	if t == nil {
		return ^uint64(0)
	}
	defer t.release()
	return t.below.Losses()
}

// Submit splits an IO over the segments that it touches.
func (l *linear) Submit(io *block.IO) {
	t := l.take()
	if t == nil {
		io.Complete(fmt.Errorf("%v, to a leg: %w", io.Op, block.ErrGone))
		return
	}
	if err := t.geometry.CheckIO(io); err != nil {
		t.release()
		io.Complete(err)
		return
	}
	if io.Op != block.OpRead && io.Op != block.OpFlush {
		t.written.Mark(io.Off, io.Len)
	}
	t.submit(io, l)
}

// take holds the table until release, so that its drive stays open. A retired table has been
// swapped out before, so the next look finds the new one.
func (l *linear) take() *table {
	for {
		t := l.table.Load()
		if t == nil || t.hold() {
			return t
		}
	}
}

// table holds a leg's segments, and the drive that they are on.
type table struct {
	below    Device
	number   block.DeviceNumber
	segments []segment // by start
	geometry block.Geometry

	// written lists the writes. A new table begins a new list, about which nothing is known until
	// the next checkpoint.
	written *list

	// users counts the IOs under way, plus one until retire.
	users   atomic.Int64
	drained chan struct{}
}

// segment is a part of a leg; all in bytes.
type segment struct{ start, length, offset int64 }

// settle is called once, when all segments are added.
func (t *table) settle(size block.Size) error {
	t.drained = make(chan struct{})
	t.users.Store(1)
	g := t.below.Geometry()
	for _, s := range t.segments {
		b := int64(g.BlockSize)
		if s.start%b != 0 || s.length%b != 0 || s.offset%b != 0 || uint64(s.offset+s.length) > uint64(g.Size) {
			return fmt.Errorf("segment of %d bytes at %d: %w", s.length, s.offset, block.ErrRange)
		}
	}
	g.Size = size
	t.geometry, t.written = g, &list{Tracker: checkpoint.NewTracker(size)}
	t.written.losses.Store(t.unlisted())
	return nil
}

// unlisted counts what has changed the leg and is in no list of writes: losses of the drive, and that the leg was
// made again of a snapshot. The latter begins anew when the tree is opened again, after a loss, so the two are apart.
func (t *table) unlisted() uint64 {
	if m, ok := t.below.(*mappedLeg); ok {
		return m.Losses()<<32 + m.Restored()
	}
	return t.below.Losses()
}

func (t *table) hold() bool {
	for {
		n := t.users.Load()
		if n == 0 {
			return false
		}
		if t.users.CompareAndSwap(n, n+1) {
			return true
		}
	}
}

func (t *table) release() {
	if t.users.Add(-1) == 0 {
		close(t.drained)
	}
}

// retire waits for the IOs under way and releases the drive.
func (t *table) retire() error { return t.retireUntil(context.Background()) }

// retireUntil is retire, and writes checksums until ctx ends.
func (t *table) retireUntil(ctx context.Context) error {
	if t == nil {
		return nil
	}
	t.release()
	<-t.drained
	if c, ok := t.below.(*checked); ok {
		return c.closeUntil(ctx)
	}
	return t.below.Close()
}

// request is an IO of a leg, split into parts.
type request struct {
	io    *block.IO
	leg   *linear
	table *table
	began figures.Instant
	parts []part
	left  atomic.Int32
	err   atomic.Pointer[error] // of the first part that failed
}

type part struct {
	io      block.IO
	request *request
	waits   time.Time // since when it waits for space; zero: it never did
}

// requests are reused, so that an IO allocates none.
var requests = sync.Pool{New: func() any { return &request{} }}

func (t *table) submit(io *block.IO, leg *linear) {
	r := requests.Get().(*request)
	r.io, r.leg, r.table = io, leg, t
	if !leg.off {
		r.began = leg.meter.Begin(uint64(io.Off))
	}
	if io.Op == block.OpFlush {
		r.add(block.IO{Op: block.OpFlush})
	} else {
		t.cut(r)
	}
	// The last part to complete recycles r, so r is not touched after that part's Submit.
	parts := r.parts
	r.left.Store(int32(len(parts)))
	for i := range parts {
		parts[i].request = r
		parts[i].io.Owner = &parts[i]
		parts[i].io.Done = partDone
		t.below.Submit(&parts[i].io)
	}
}

// cut makes one part for each segment that the IO touches.
func (t *table) cut(r *request) {
	io := r.io
	at, end := io.Off, io.Off+io.Len
	for _, s := range t.segments {
		if at >= s.start+s.length || at >= end {
			continue
		}
		n := min(end, s.start+s.length) - at
		p := block.IO{Op: io.Op, FUA: io.FUA, Unmap: io.Unmap, Off: s.offset + at - s.start, Len: n}
		if io.Data != nil {
			p.Data = io.Data[at-io.Off:][:n]
		}
		r.add(p)
		at += n
	}
}

func (r *request) add(io block.IO) { r.parts = append(r.parts, part{io: io}) }

func partDone(io *block.IO) {
	if io.Err != nil {
		if m, ok := io.Owner.(*part).request.table.below.(*mappedLeg); ok && m.wait(io, &io.Owner.(*part).waits, partEnded) {
			return
		}
	}
	partEnded(io)
}

func partEnded(io *block.IO) {
	r := io.Owner.(*part).request
	if io.Err != nil {
		r.failed(io.Err)
	}
	if r.left.Add(-1) == 0 {
		r.done()
	}
}

func (r *request) failed(err error) { r.err.CompareAndSwap(nil, &err) }

// kindOf is the kind of I/O as which an operation counts.
func kindOf(op block.Op) figures.Op {
	switch op {
	case block.OpRead:
		return figures.Read
	case block.OpFlush:
		return figures.Flush
	case block.OpDiscard:
		return figures.Discard
	}
	return figures.Write
}

// done releases the table first: whoever waits for the IO may unmap the leg next.
func (r *request) done() {
	io, t, leg, began := r.io, r.table, r.leg, r.began
	var err error
	if p := r.err.Load(); p != nil {
		err = *p
	}
	r.io, r.leg, r.table = nil, nil, nil
	r.err.Store(nil)
	clear(r.parts)
	r.parts = r.parts[:0]
	requests.Put(r)
	if !leg.off {
		leg.meter.End(uint64(io.Off), kindOf(io.Op), io.Len, began, err != nil)
	}
	t.release()
	io.Complete(err)
}

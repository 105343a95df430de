// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// A request is an IO on its way from the kernel. Its owner fills in the IO, except Done and
// Owner, and finish, and passes it to gate.submit.
type request struct {
	block.IO
	finish func(*request) // called once with the outcome in Err; must not block
	front  any            // its owner
	covers uint64         // a flush: how many changes had completed when it started

	gate *gate
}

// gate is between all front ends and the device. It counts outstanding IOs, so that Close can
// wait for them, and refuses new ones once it is shut.
type gate struct {
	dev      block.Device
	geometry atomic.Pointer[block.Geometry] // what the kernel was told

	n    atomic.Int64 // outstanding IOs; plus shutGate once shut
	idle chan struct{}
	once sync.Once

	// The state that decides whether a flush is needed, as counts of IOs that change data.
	begun, ended atomic.Uint64
	flushed      atomic.Uint64 // of those that ended, how many are covered by a successful flush
	everFlushed  atomic.Bool

	left atomic.Bool // nothing is answered any more: another process will be asked again
}

const shutGate = math.MinInt64 / 2

var errShut = fmt.Errorf("device was closed: %w", block.ErrGone)

func newGate(dev block.Device) *gate {
	g := &gate{dev: dev, idle: make(chan struct{})}
	geometry := dev.Geometry()
	g.geometry.Store(&geometry)
	return g
}

// submit submits r to the device. A gate that is shut fails it at once.
func (g *gate) submit(r *request) {
	r.gate, r.Owner, r.Done = g, r, requestDone
	switch {
	case r.Op == block.OpFlush:
		r.covers = g.ended.Load()
	case r.Op != block.OpRead:
		g.begun.Add(1) // even if it fails: it may have changed data
	}
	if g.n.Add(1) < 0 {
		r.Complete(errShut)
		return
	}
	geometry := g.geometry.Load()
	if err := geometry.CheckIO(&r.IO); err != nil {
		r.Complete(err)
		return
	}
	if r.Op == block.OpFlush && !geometry.VolatileCache {
		r.Complete(nil)
		return
	}
	if geometry.MaxIO > 0 && r.Len > int64(geometry.MaxIO) {
		go g.pieces(&r.IO, int64(geometry.MaxIO))
		return
	}
	g.dev.Submit(&r.IO)
}

func requestDone(io *block.IO) {
	r := io.Owner.(*request)
	g := r.gate // the owner may reuse r
	switch {
	case r.Op == block.OpFlush && r.Err == nil:
		g.flushedTo(r.covers)
	case r.Op != block.OpFlush && r.Op != block.OpRead:
		g.ended.Add(1) // before anybody can learn that it has
	}
	if !g.left.Load() {
		r.finish(r)
	}
	g.leave()
}

func (g *gate) flushedTo(n uint64) {
	for {
		old := g.flushed.Load()
		if n <= old || g.flushed.CompareAndSwap(old, n) {
			break
		}
	}
	g.everFlushed.Store(true)
}

// clean reports whether every change made through this gate is covered by a successful flush,
// and none is under way. It says nothing about changes from before this gate existed; see
// everFlushed.
func (g *gate) clean() bool {
	ended := g.ended.Load() // read first: a change that ends later has begun earlier
	return ended == g.flushed.Load() && ended == g.begun.Load()
}

// inherit is for the gate of a device that a dead process served: its acknowledged writes may
// not have been flushed.
func (g *gate) inherit() {
	g.begun.Add(1)
	g.ended.Add(1)
}

// flush flushes the device unless the gate is clean.
func (g *gate) flush(ctx context.Context) error {
	if g.clean() {
		return nil
	}
	done := make(chan error, 1)
	r := &request{IO: block.IO{Op: block.OpFlush}, finish: func(r *request) { done <- r.Err }}
	g.submit(r)
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (g *gate) leave() {
	if g.n.Add(-1) == shutGate {
		g.once.Do(func() { close(g.idle) })
	}
}

// shut refuses all further IOs; it may be called once.
func (g *gate) shut() {
	g.n.Add(1)
	g.n.Add(shutGate)
	g.leave()
}

// drained waits until the device has answered everything, after shut.
func (g *gate) drained(ctx context.Context) error {
	select {
	case <-g.idle:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for %d I/Os that the device has not answered: %w", g.n.Load()-shutGate, ctx.Err())
	}
}

// pieceWindow is how many pieces of one large IO are outstanding together.
const pieceWindow = 4

// pieces splits an IO that is too large for the device, such as the discard of a whole file
// system.
func (g *gate) pieces(io *block.IO, limit int64) {
	var (
		window = make(chan struct{}, pieceWindow)
		failed atomic.Pointer[error]
		done   = func(p *block.IO) {
			if p.Err != nil {
				failed.CompareAndSwap(nil, &p.Err)
			}
			<-window
		}
	)
	for at := int64(0); at < io.Len && failed.Load() == nil; {
		p := &block.IO{Op: io.Op, FUA: io.FUA, Unmap: io.Unmap, Off: io.Off + at, Len: min(limit, io.Len-at), Done: done}
		if io.Data != nil {
			p.Data = io.Data[at : at+p.Len]
		}
		at += p.Len
		window <- struct{}{}
		g.dev.Submit(p)
	}
	for range pieceWindow {
		window <- struct{}{}
	}
	var err error
	if e := failed.Load(); e != nil {
		err = *e
	}
	io.Complete(err)
}

// errno is the form in which the kernel gets an error.
func errno(err error) unix.Errno {
	switch {
	case err == nil:
		return 0
	case errors.Is(err, block.ErrUnsupported):
		return unix.EOPNOTSUPP
	case errors.Is(err, block.ErrRange):
		return unix.EINVAL
	case errors.Is(err, block.ErrReadOnly):
		return unix.EROFS
	}
	return unix.EIO
}

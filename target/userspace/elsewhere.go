// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"fmt"
	"sync"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/raid/checkpoint"
)

// Elsewhere is a leg that something else serves, such as the kernel. Hosts can ask for the list of
// its writes, and take checkpoints, through exports of it; they cannot read or write there. Its
// methods may be called concurrently.
type Elsewhere struct {
	writers writers

	mu     sync.Mutex
	size   block.Size
	list   *list // nil: none is kept
	missed func() (uint64, error)
}

// Begin begins a new list, about which nothing is known yet. Missed counts what the list may lack; an
// error means that it may lack anything.
func (l *Elsewhere) Begin(size block.Size, written *checkpoint.Tracker, missed func() (uint64, error)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.size, l.missed, l.list = size, missed, &list{Tracker: written}
	l.list.losses.Store(l.losses())
}

// End ends the list: after it, its Tracker is not touched any more.
func (l *Elsewhere) End() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = nil
}

// unreadable stands for a number of losses that is not known.
const unreadable = ^uint64(0)

// losses counts what the list may lack.
func (l *Elsewhere) losses() uint64 {
	n, err := l.missed()
	if err != nil {
		return unreadable
	}
	return n
}

// Export returns the leg as the device of one export.
func (l *Elsewhere) Export() block.Device { return &listOnly{l} }

// listOnly is such a leg as the hosts of one export see it.
type listOnly struct{ leg *Elsewhere }

func (e *listOnly) opened() { e.leg.writers.opened(e) }
func (e *listOnly) closed() { e.leg.writers.closed(e) }

// Geometry implements block.Device.
func (e *listOnly) Geometry() block.Geometry {
	e.leg.mu.Lock()
	defer e.leg.mu.Unlock()
	return block.Geometry{Size: e.leg.size, BlockSize: 4 * block.KiB}
}

// Submit refuses all I/O: it would be a second way to the leg, which no fence covers.
func (e *listOnly) Submit(io *block.IO) {
	io.Complete(fmt.Errorf("%v, to the list of a leg's writes: %w", io.Op, block.ErrUnsupported))
}

// Checkpoint implements controller.Tracker.
func (e *listOnly) Checkpoint(k nvmetcp.Checkpoint) error {
	return e.leg.writers.alone(e, func() error {
		e.leg.mu.Lock()
		defer e.leg.mu.Unlock()
		if e.leg.list == nil {
			return block.ErrGone
		}
		now := e.leg.losses()
		if now == unreadable {
			return errLosses
		}
		return e.leg.list.take(k, now)
	})
}

// Written implements controller.Tracker.
func (e *listOnly) Written() (nvmetcp.WrittenLog, error) {
	e.leg.mu.Lock()
	defer e.leg.mu.Unlock()
	if e.leg.list == nil {
		return nvmetcp.WrittenLog{}, block.ErrGone
	}
	return e.leg.list.log(e.leg.losses), nil
}

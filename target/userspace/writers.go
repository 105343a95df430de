// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/raid/checkpoint"
)

// writers are the exports through which hosts may write to a leg. A host knows only of its own
// writes, so it may take checkpoints only while nobody else could have written.
type writers struct {
	mu   sync.Mutex
	open map[writer]bool // true: no other export has been open since
}

// writer is the device of a namespace that hosts may write to.
type writer interface {
	opened() // before hosts can write through it
	closed() // when no host can any more
}

var (
	errShared = fmt.Errorf("another host may have written: %w", block.ErrUnsupported)
	errLosses = errors.New("the list may lack writes")
)

func (w *writers) opened(e writer) {
	w.mu.Lock()
	defer w.mu.Unlock()
	alone := len(w.open) == 0
	for other := range w.open {
		w.open[other] = false
	}
	if w.open == nil {
		w.open = map[writer]bool{}
	}
	w.open[e] = alone
}

func (w *writers) closed(e writer) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.open, e)
}

// alone calls do if no other export has been open since e was. No export opens meanwhile.
func (w *writers) alone(e writer, do func() error) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.open[e] {
		return errShared
	}
	return do()
}

func (e *exported) opened() { e.linear.writers.opened(e) }
func (e *exported) closed() { e.linear.writers.closed(e) }

// list is what is written to a leg. Losses grows when something else than writes may have changed
// the leg, or when writes may be missing; it is that of the time when the list began, or when a
// checkpoint last began.
type list struct {
	*checkpoint.Tracker
	losses atomic.Uint64
}

// take begins or commits a checkpoint; now is the present number of losses.
func (l *list) take(k nvmetcp.Checkpoint, now uint64) error {
	switch {
	case k.Commit && l.losses.Load() != now:
		return errLosses
	case k.Commit:
		return l.Commit(checkpoint.Token(k.Token), behindOf(k.Behind))
	case l.losses.Swap(now) != now:
		l.Forget()
	}
	l.Begin(checkpoint.Token(k.Token), k.Behind != nil)
	return nil
}

// behindOf is what a host says that the leg lacks; nil: nothing.
func behindOf(l *nvmetcp.Behind) *checkpoint.Behind {
	if l == nil {
		return nil
	}
	b := &checkpoint.Behind{Since: l.Since}
	for _, r := range l.Ranges {
		b.Ranges = append(b.Ranges, checkpoint.Range{Off: r[0], End: r[1]})
	}
	return b
}

// log is the list for the protocol. The number of losses is asked for after the list was read. If
// it has grown, nothing is known.
func (l *list) log(losses func() uint64) nvmetcp.WrittenLog {
	now := l.List()
	if l.losses.Load() != losses() {
		now.Committed = 0
	}
	log := nvmetcp.WrittenLog{
		Committed: uint64(now.Committed), Begun: uint64(now.Begun), Region: uint64(now.Region), Words: uint64(len(now.Words)), Regions: now.Words,
	}
	if now.Behind != nil {
		log.Behind = &nvmetcp.Behind{Since: now.Behind.Since}
		for _, r := range now.Behind.Ranges {
			log.Behind.Ranges = append(log.Behind.Ranges, [2]int64{r.Off, r.End})
		}
	}
	return log
}

// Checkpoint implements controller.Tracker.
func (e *exported) Checkpoint(k nvmetcp.Checkpoint) error {
	return e.linear.writers.alone(e, func() error {
		t := e.linear.take()
		if t == nil {
			return block.ErrGone
		}
		defer t.release()
		if t.below.Losses() != e.losses { // the leg may lack what its host believes it to have
			return errLosses
		}
		return t.written.take(k, t.unlisted())
	})
}

// Written implements controller.Tracker. If the drive may have lost writes that are listed no
// more, nothing is known.
func (e *exported) Written() (nvmetcp.WrittenLog, error) {
	t := e.linear.take()
	if t == nil {
		return nvmetcp.WrittenLog{}, block.ErrGone
	}
	defer t.release()
	return t.written.log(t.unlisted), nil
}

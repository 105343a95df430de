// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"fmt"
	"sync"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/raid/checkpoint"
)

// writers are the exports through which hosts may write to a leg. A host knows only of its own
// writes, so it may take checkpoints only while nobody else could have written.
type writers struct {
	mu   sync.Mutex
	open map[*exported]bool // true: no other export has been open since
}

var (
	errShared = fmt.Errorf("another host may have written: %w", block.ErrUnsupported)
	errLosses = errors.New("the drive has lost acknowledged writes")
)

// opened is called before hosts can write through an export.
func (e *exported) opened() {
	w := &e.linear.writers
	w.mu.Lock()
	defer w.mu.Unlock()
	alone := len(w.open) == 0
	for other := range w.open {
		w.open[other] = false
	}
	if w.open == nil {
		w.open = map[*exported]bool{}
	}
	w.open[e] = alone
}

// closed is called when no host can write through an export any more.
func (e *exported) closed() {
	w := &e.linear.writers
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.open, e)
}

// Checkpoint implements controller.Tracker.
func (e *exported) Checkpoint(k nvmetcp.Checkpoint) error {
	w := &e.linear.writers
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.open[e] {
		return errShared
	}
	t := e.linear.take()
	if t == nil {
		return block.ErrGone
	}
	defer t.release()
	switch now := t.below.Losses(); {
	case now != e.losses: // the leg may lack what its host believes it to have
		return errLosses
	case k.Commit:
		return t.written.Commit(checkpoint.Token(k.Token), behindOf(k.Behind))
	case t.losses.Swap(now) != now:
		t.written.Forget()
	}
	t.written.Begin(checkpoint.Token(k.Token), k.Behind != nil)
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

// Written implements controller.Tracker. If the drive may have lost writes that are listed no
// more, nothing is known.
func (e *exported) Written() (nvmetcp.WrittenLog, error) {
	t := e.linear.take()
	if t == nil {
		return nvmetcp.WrittenLog{}, block.ErrGone
	}
	defer t.release()
	l := t.written.List()
	if t.losses.Load() != t.below.Losses() {
		l.Committed = 0
	}
	log := nvmetcp.WrittenLog{
		Committed: uint64(l.Committed), Begun: uint64(l.Begun), Region: uint64(l.Region), Words: uint64(len(l.Words)), Regions: l.Words,
	}
	if l.Behind != nil {
		log.Behind = &nvmetcp.Behind{Since: l.Behind.Since}
		for _, r := range l.Behind.Ranges {
			log.Behind.Ranges = append(log.Behind.Ranges, [2]int64{r.Off, r.End})
		}
	}
	return log, nil
}

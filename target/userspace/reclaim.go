// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"fmt"
	"time"

	"weft.dev/weft/proto/block"
)

// The space of what was deleted in a tree comes free in the background, which may take long: data moves
// to the layer that still needs it. Meanwhile the tree is open, with or without legs. At the end of the
// process it stops between two chunks, and the next opening of the tree goes on.

// spareSpace is what a tree without users keeps free, so that its next writers find some.
const spareSpace = 64 * block.MiB

// reclaim begins to give back the space of what was deleted in an open tree. The caller has the turn.
func (h *held) reclaim(name string, t *openTree) {
	if t.reclaiming {
		t.again = true
		return
	}
	if !h.drives.begin() {
		return
	}
	t.reclaiming = true
	t.busy.Store(true)
	go func() {
		defer h.drives.background.Done()
		h.reclaimAll(name, t)
	}()
}

func (h *held) reclaimAll(name string, t *openTree) {
	ctx, cancel := h.drives.untilStop()
	defer cancel()
	for more := true; more; {
		err := t.Reclaim(ctx)
		h.noteUnreclaimed(ctx, name, t, err)
		if id, rate := h.toSettle(t); err == nil && !id.IsZero() {
			if err := h.settleNow(ctx, t, id, rate); t.settled(ctx, err) {
				h.drives.log.Warn("a leg is not copied back to its own place; it is tried again", "leg", id, "err", err)
			}
		}
		more = h.reclaimed(name, t, err)
	}
}

// noteUnreclaimed notes why space has not come free, for Trees, and has that tried again: a host may write anew
// what could not be read, or discard it.
func (h *held) noteUnreclaimed(ctx context.Context, name string, t *openTree, err error) {
	if t.retry != nil {
		t.retry.Stop()
	}
	if err == nil {
		t.unreclaimed.Store(nil)
		t.pause = 0
		return
	}
	if ctx.Err() != nil || t.Err() != nil || errors.Is(err, block.ErrGone) {
		return
	}
	why := err.Error()
	t.unreclaimed.Store(&why)
	t.pause = min(max(2*t.pause, tryAgain), tryAgainMost)
	h.drives.log.Warn("the space of deleted snapshots or clones has not come free; it is tried again", "tree", name, "after", t.pause, "err", err)
	t.retry = time.AfterFunc(t.pause, func() {
		h.trees.turn <- struct{}{}
		defer func() { <-h.trees.turn }()
		if h.trees.get(name) == t {
			h.reclaim(name, t)
		}
	})
}

// toSettle is the leg that Settle was asked for.
func (h *held) toSettle(t *openTree) (block.LegID, block.Size) {
	h.trees.turn <- struct{}{}
	defer func() { <-h.trees.turn }()
	id := t.settle
	t.settle = block.LegID{}
	return id, t.settleRate
}

// reclaimed ends reclaiming, unless there is more of it.
func (h *held) reclaimed(name string, t *openTree, err error) (more bool) {
	h.trees.turn <- struct{}{}
	defer func() { <-h.trees.turn }()
	if h.trees.get(name) != t {
		return false // it was closed, and all of it is gone
	}
	if t.again && (err == nil || t.Err() == nil && t.unreclaimed.Load() != nil) { // more was deleted meanwhile
		t.again = false
		return true
	}
	t.reclaiming, t.again = false, false
	t.busy.Store(false)
	var kept error
	if d := h.label.Load(); err == nil && len(t.legs) == 0 && d != nil {
		kept = t.shrink(d, name, spareSpace)
	}
	if err := errors.Join(kept, h.closeTree(name)); err != nil {
		h.drives.log.Warn("a tree keeps extents that it does not need", "tree", name, "err", err)
	}
	return false
}

// begin counts work in the background, unless the process ends.
func (d *Drives) begin() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.ends() {
		return false
	}
	d.background.Add(1)
	return true
}

// ends reports whether the process ends.
func (d *Drives) ends() bool {
	select {
	case <-d.ending:
		return true
	default:
		return false
	}
}

// untilStop returns a context that ends with cancel, or when stop is called.
func (d *Drives) untilStop() (ctx context.Context, cancel context.CancelFunc) {
	ctx, cancel = context.WithCancel(context.Background())
	go func() {
		select {
		case <-d.ending:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

// stop ends what waits or works in the background, and keeps more of it from beginning.
func (d *Drives) stop() {
	d.mu.Lock()
	defer d.mu.Unlock()
	close(d.ending)
}

// finish waits, after stop, for the work in the background.
func (d *Drives) finish(ctx context.Context) error {
	done := make(chan struct{})
	go func() {
		d.background.Wait()
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("space is still being given back: %w", context.Cause(ctx))
	}
}

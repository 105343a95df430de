// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"sync/atomic"
	"time"

	"weft.dev/weft/initiator/ahead"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/raid/dm/mirror"
	"weft.dev/weft/raid/pace"
)

// This file has the agent copy to a leg what it lacks before it joins its column, since dm-mirror copies as fast as it
// can, and users wait. The leg is beside the tables meanwhile, and the log has what users write. Then the leg joins, and
// the kernel copies what the log has: what users wrote during the copy.
//
// Where users have written already, nothing is copied here. So a volume that is written everywhere is copied by the
// kernel, after all.
//
// A leg may join only when nothing is written beside the tables any more: it would be written over what users write
// then. Each write of this agent has returned when the copy has ended. One of an agent that was killed may be under way
// for as long as the kernel waits for an answer, so there is a file from before a copy begins until it has ended, and an
// agent that finds it waits for that.

// aheadOf is a copy to a leg before it joins.
type aheadOf struct {
	*ahead.Copy
	of     *asking // whose answer it copies
	leg    block.LegID
	copy   int
	rev    uint64
	device dm.Ref
	from   dm.Ref     // the leg in sync
	since  uint64     // see checkpoint.Behind
	what   string     // for people
	before block.Size // what earlier ones have copied, of the same answer
	log    atomic.Pointer[mirror.LogImage]
	cancel func()

	// Of the keeper's goroutine:
	//
	//	under way ──► ended
	//	     └──► given up ──► ended: another one goes on where it was, if it answers the same question
	given  bool
	ended  bool
	failed bool // it ended with an error

	kept time.Time // when what is left was kept last
}

// What a copy waits for before it begins, or goes on.
const (
	lastCopyToEnd  = "writes of an earlier copy to the leg to end"
	sourceToAnswer = "a leg in sync to copy from"
)

// copyAhead has the agent copy what a leg lacks. It reports whether the copy has ended; then left is what the leg still
// lacks.
func (k *kernelKeeper) copyAhead(ctx context.Context, s *seen, o volume.SetColumn, l *volume.Link, b *copyBegin, a *asking) (left mirror.LogImage, ended bool) {
	h, next := k.lists.ahead[o.Column], &aheadOf{of: a}
	switch {
	case h == nil || h.ended && h.of != a:
		if left = a.image; b.logged && h != nil && h.leg == l.Leg && h.rev == l.Revision { // which it does not lack any more
			next.before, _, _ = h.Progress()
		}
	case !h.ended:
		if h.of != a {
			h.giveUp()
		}
		if h.given {
			b.waits = lastCopyToEnd
		}
		return left, false
	default:
		if left = h.Left(); !h.given {
			return left, true
		}
		next.before, _, _ = h.Progress()
	}
	from, ok := k.sourceOf(s, o)
	switch {
	case !k.lastEnded(o.Column, s.Now):
		b.waits = lastCopyToEnd
		return left, false
	case !ok:
		b.waits = sourceToAnswer
		return left, false
	case left.AllClean(), k.keep(&s.columns[o.Column], o.Column, b.copy, l.Leg, left) != nil, k.kernel.markAhead(k.volume, o.Column) != nil:
		return left, true
	}
	k.beginAhead(ctx, s, o, l, b, next, from, left)
	return left, false
}

// beginAhead begins to copy.
func (k *kernelKeeper) beginAhead(ctx context.Context, s *seen, o volume.SetColumn, l *volume.Link, b *copyBegin, h *aheadOf, from legSeen, lacks mirror.LogImage) {
	c, to, host, limit := &s.columns[o.Column], s.legs[l.Leg], k.kernel.host, k.agent.cfg.IOTimeout
	h.since, h.what = b.told(h.of)
	h.leg, h.copy, h.rev, h.device, h.from = l.Leg, b.copy, l.Revision, to.device, from.device
	h.Copy = ahead.New(ahead.Config{
		Lacks: lacks, Region: int64(c.Region), Size: int64(c.Size),
		Read:  func(p []byte, off int64) error { return host.Read(from.head, p, off, limit) },
		Write: func(p []byte, off int64) error { return host.Overwrite(to.head, p, off, limit) },
		Flush: func() error { return host.Flush(to.head, limit) },
		Skip:  func(region uint64) bool { now := h.log.Load(); return now != nil && now.Dirty(region) },
		Pace:  &k.pace, Rate: &k.rate, Now: func() int64 { return int64(time.Since(k.began)) + 1 },
	})
	ctx, h.cancel = context.WithCancel(ctx)
	k.lists.ahead[o.Column] = h
	k.log.Info("a leg is copied to before it joins", "leg", l.Leg.String(), "regions", lacks.CountDirty(), "what", h.what)
	k.aheads.Go(func() {
		began := time.Now()
		err := h.Run(ctx)
		h.cancel()
		done, _, _ := h.Copy.Progress()
		k.log.Info("the copy ahead has ended", "leg", h.leg.String(), "copied", done.String(), "took", time.Since(began).String(), "left", h.Left().CountDirty(), "err", err)
		k.kernel.unmarkAhead(k.volume, o.Column)
		again := err != nil && done > 0 && !errors.Is(err, errors.ErrUnsupported) // the leg was away, perhaps
		k.Tell(func() {
			h.ended, h.given, h.failed = true, h.given || again, err != nil
			k.keepLeft(o.Column, h)
		})
		k.Poke()
	})
}

// endAhead waits until nothing is written beside the tables any more, so that the next agent need not.
func (k *kernelKeeper) endAhead() {
	ended := make(chan struct{})
	go func() { k.aheads.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(callTimeout):
		k.log.Warn("a leg is still written beside the tables; it joins no sooner than that has ended")
	}
}

// Progress is as of ahead.Copy, with what earlier ones have copied.
func (h *aheadOf) Progress() (done, total, speed block.Size) {
	done, total, speed = h.Copy.Progress()
	return h.before + done, h.before + total, speed
}

func (h *aheadOf) giveUp() {
	h.given = true
	h.cancel()
}

// sourceOf is a leg in sync to copy from.
func (k *kernelKeeper) sourceOf(s *seen, o volume.SetColumn) (legSeen, bool) {
	for copy, want := range o.Want.Copies {
		if l := k.link(o.Column, copy); want.State == volume.InSync && l != nil && s.legs[l.Leg].fit {
			return s.legs[l.Leg], true
		}
	}
	return legSeen{}, false
}

// under reports whether a copy ahead to a leg of a column is under way, beside tables that log what it misses.
func (h *aheadOf) under(c *columnSeen) bool {
	return h != nil && !h.ended && !h.given && c.Kind == mirror.ShapeTracked && c.Copy == h.copy && c.Log == c.log.device
}

// keepAhead gives up the copies whose legs are not to join any more, or cannot now, and tells the others how fast they
// may be and what users have written.
func (k *kernelKeeper) keepAhead(w *volume.Wanted, s *seen) {
	if w != nil {
		k.pace.SetRate(&k.rate, w.RebuildRate)
	}
	for column, h := range k.lists.ahead {
		if h.ended || h.given {
			continue
		}
		l := k.link(column, h.copy)
		if w == nil || w.Detach || !k.memory.Of(w) || !s.Device.Exists || column >= len(s.columns) || !h.wanted(l, s) || !h.under(&s.columns[column]) {
			h.giveUp()
			continue
		}
		c := &s.columns[column]
		if image, err := k.kernel.readLog(c.log.file, c.Regions()); err == nil {
			h.log.Store(&image)
		}
		if s.Now.Sub(h.kept) >= keepEvery {
			h.kept = s.Now
			k.keepLeft(column, h)
		}
	}
}

// wanted reports whether the leg is still the one to be copied to, on the same device, and the other one is in the tables.
func (h *aheadOf) wanted(l *volume.Link, s *seen) bool {
	same := l != nil && l.Rebuilding && l.Leg == h.leg && l.Revision == h.rev && s.legs[h.leg].device == h.device
	return same && l.Column < len(s.columns) && s.columns[l.Column].has(h.from)
}

// lastEnded gives up an earlier copy to a column, and reports whether nothing can be written there beside the tables any
// more, by this agent or by one that was killed.
func (k *kernelKeeper) lastEnded(column int, now time.Time) bool {
	if h := k.lists.ahead[column]; h != nil && !h.ended {
		h.giveUp()
		return false
	}
	if !k.kernel.markedAhead(k.volume, column) {
		delete(k.lists.found, column)
		return true
	}
	if k.lists.found[column].IsZero() {
		k.lists.found[column] = now
	}
	if now.Sub(k.lists.found[column]) <= k.agent.cfg.IOTimeout+time.Second {
		return false
	}
	k.kernel.unmarkAhead(k.volume, column)
	return true
}

// users counts the I/O of users, as pace wants it.
func (k *kernelKeeper) users() (all pace.Sample, ok bool) {
	counts, ok, err := k.kernel.dm.Counted(mirror.TopName(k.volume))
	if err != nil || !ok {
		return all, false
	}
	sum := counts.Sum()
	return pace.Sample{IOs: int64(sum.IOs), Took: sum.Took}, true
}

// aheadFile is there while a leg of a column may be written beside the tables.
func (k *kernel) aheadFile(v block.VolumeID, column int) string {
	return k.logFiles(v, column)[0] + ".ahead"
}

func (k *kernel) markAhead(v block.VolumeID, column int) error {
	if err := os.MkdirAll(k.runDir, 0o700); err != nil {
		return err
	}
	return os.WriteFile(k.aheadFile(v, column), nil, 0o600)
}

func (k *kernel) unmarkAhead(v block.VolumeID, column int) { _ = remove(k.aheadFile(v, column)) }

// markedAhead reports whether the file is there; if that cannot be found out, it may be so.
func (k *kernel) markedAhead(v block.VolumeID, column int) bool {
	_, err := os.Stat(k.aheadFile(v, column))
	return !errors.Is(err, fs.ErrNotExist)
}

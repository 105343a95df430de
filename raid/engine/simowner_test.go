// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"errors"
	"slices"

	"weft.dev/weft/proto/block"
)

var errImpatient = errors.New("owner is impatient")

// own lets the owner do one thing, as the keeper of a volume would: record before
// drop, fence before add, equal before served.
func (w *world) own() {
	switch {
	case w.v == nil:
		w.attach()
	case len(w.todo) > 0 && w.r.IntN(2) == 0:
		do := w.todo[0]
		w.todo = slices.Delete(w.todo, 0, 1)
		do()
	case w.equal != nil && w.r.IntN(2) == 0:
		w.equalize()
	case w.mayGrow() && w.r.IntN(2) == 0:
		w.growVolume()
	default:
		k := w.r.IntN(len(w.legs))
		w.ownLeg(k, w.r.IntN(len(w.legs[k])))
	}
}

// attach starts an engine on what the manager has recorded.
func (w *world) attach() {
	w.cfg.Size = w.size
	v, err := newVolume(w.cfg, w)
	if err != nil {
		w.fail("%w", err)
		return
	}
	v.weak, v.copyUnit = w.weak, 64<<10<<w.r.IntN(3)
	v.flushUnit = 2 * v.copyUnit
	for k, copies := range w.legs {
		for _, l := range copies {
			// What restarted may have lost what was not durable.
			if l.rebooted && l.inSync || w.r.IntN(12) == 0 && w.mayEvict(k, l) {
				l.inSync = false
			}
			l.needFull, l.leaving = !l.inSync, false
			l.fence()
		}
	}
	w.v = v
	w.keepLists()
	for k, copies := range w.legs {
		for i, l := range copies {
			if !l.inSync {
				continue
			}
			if err := v.Add(k, i, l.connect(), InSync, false); err != nil {
				w.fail("attach: %w", err)
			}
		}
	}
	if !w.unclean || w.errant.serveUnequal {
		w.serving = true
		return
	}
	w.beginEqualize()
}

func (w *world) beginEqualize() {
	q, ended, err := w.v.beginEqualize(w.parts())
	if err != nil {
		w.fail("%w", err)
		return
	}
	w.equal, w.ended, w.serving = q, ended, q == nil
}

// equalize looks how it goes, loses patience, or begins again.
func (w *world) equalize() {
	if w.ended == nil {
		w.beginEqualize()
		return
	}
	select {
	case <-w.ended:
	default:
		if w.faults && w.r.IntN(20) == 0 {
			w.equal.stop(errImpatient)
		}
		return
	}
	w.ended = nil
	if err := w.v.endEqualize(w.equal); err == nil {
		w.equal, w.serving = nil, true
		w.checkEqual()
	}
}

// mayEvict reports whether the manager would record a leg of column k as stale:
// not without another one that has all.
func (w *world) mayEvict(k int, leg *simLeg) bool {
	return slices.ContainsFunc(w.legs[k], func(l *simLeg) bool { return l != leg && l.inSync && !l.rebooted })
}

func (w *world) ownLeg(k, i int) {
	l, leg := w.legs[k][i], &w.v.columns[k].legs[i]
	trouble := l.dev != nil && l.dev.silent || leg.err != nil && w.r.IntN(3) == 0
	switch leg.state {
	case InSync, CaughtUp:
		switch {
		case trouble:
			w.evict(k, i)
		case leg.state == CaughtUp && !l.inSync && !l.leaving && w.largeEnough(l):
			l.inSync, l.needFull, l.rebooted = true, false, false
			w.rebuilds++
			l.dev.sick = w.faults && w.r.IntN(2) == 0 // now, of all times
			if w.faults && w.r.IntN(8) == 0 {
				w.todo = append(w.todo, w.blackout)
			}
		case leg.state == CaughtUp && l.inSync && !l.leaving && (!w.faults || w.r.IntN(10) == 0):
			if err := w.v.Promote(k, i); err != nil {
				w.fail("%w", err)
			}
		}
	case Rebuilding:
		if trouble {
			w.drop(k, i)
		}
	default:
		if l.inSync {
			w.evict(k, i)
		} else if l.alive && w.equal == nil && w.largeEnough(l) {
			w.readd(k, i)
		}
	}
}

// evict records a leg stale and drops it.
func (w *world) evict(k, i int) {
	l := w.legs[k][i]
	if l.leaving || !w.mayEvict(k, l) {
		return
	}
	w.drops++
	if w.errant.dropBeforeRecord {
		w.drop(k, i)
		w.todo = append(w.todo, func() { l.inSync = false })
		return
	}
	l.inSync, l.leaving = false, true
	w.todo = append(w.todo, func() { w.drop(k, i) })
}

// drop drops a leg and cuts its device, in either order.
func (w *world) drop(k, i int) {
	dev := w.legs[k][i].dev
	cut := func() {
		if dev != nil && !dev.cut {
			dev.cutNow()
		}
	}
	if w.r.IntN(2) == 0 {
		cut()
	}
	if err := w.v.Drop(k, i); err != nil { // the last one that is read from
		for j := range w.legs[k] {
			if w.legs[k][j].inSync && w.v.columns[k].legs[j].state == CaughtUp {
				_ = w.v.Promote(k, j)
			}
		}
		w.todo = append(w.todo, func() { w.drop(k, i) })
		return
	}
	w.legs[k][i].leaving = false
	w.todo = append(w.todo, cut)
}

// readd brings a leg back that is there again.
func (w *world) readd(k, i int) {
	l := w.legs[k][i]
	if !w.faults || w.r.IntN(2) == 0 {
		l.worn = false // another drive
	}
	if l.dev != nil && !l.dev.cut && w.r.IntN(2) == 0 {
		l.dev.cutNow()
	}
	old := l.dev
	if w.errant.unfenced {
		if old != nil && !old.cut {
			old.cutNow()
		}
	} else {
		l.fence()
		if old != nil && !old.cut { // it gives back what it has some time
			old.forgetOps()
			w.todo = append(w.todo, old.cutNow)
		}
	}
	full := l.needFull && !w.errant.partialOfUnknown || w.r.IntN(5) == 0
	if lacks, known := w.behind(k, l); known && full {
		w.marks.resumed++
		if err := w.v.AddBehind(k, i, l.connect(), lacks); err != nil {
			w.fail("%w", err)
		}
		l.needFull = false // from now on the engine knows, also if the leg loses its cache
		return
	}
	if err := w.v.Add(k, i, l.connect(), Rebuilding, full); err != nil {
		w.fail("%w", err)
	}
	l.needFull = false
}

// replace gives a leg in sync another connection.
func (w *world) replace() {
	if w.v == nil {
		return
	}
	k := w.r.IntN(len(w.legs))
	i := w.r.IntN(len(w.legs[k]))
	l := w.legs[k][i]
	if l.dev == nil || l.rebooted || !l.alive || w.v.columns[k].legs[i].state != InSync {
		return
	}
	dev, late := l.dev, w.r.IntN(2) == 0 // whether the old one gives back what it has later
	if !late {
		dev.cutNow()
	}
	w.todo = append(w.todo, func() {
		if l.dev != dev || !l.inSync || w.v.columns[k].legs[i].state != InSync || l.rebooted || l.lostCache {
			return
		}
		l.fence()
		if late {
			dev.forgetOps()
			w.todo = append(w.todo, dev.cutNow)
		}
		if err := w.v.Add(k, i, l.connect(), InSync, false); err != nil {
			w.fail("%w", err)
		}
	})
}

// spuriousDrop gives up a leg that has nothing.
func (w *world) spuriousDrop() {
	if w.v == nil {
		return
	}
	k := w.r.IntN(len(w.legs))
	w.evict(k, w.r.IntN(len(w.legs[k])))
}

func (w *world) event(e Event) {
	if errors.Is(e.Err, block.ErrFull) {
		w.fail("leg %d.%d is blamed for a lack of space: %v", e.Column, e.Copy, e.Kind)
	}
}

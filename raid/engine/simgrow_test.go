// SPDX-License-Identifier: Apache-2.0

package engine

import "weft.dev/weft/proto/block"

// grow has the volume wanted larger, or a leg made so by its target.
func (w *world) grow() {
	if w.wanted == w.size && w.r.IntN(3) == 0 {
		w.wanted = min(simMost, w.wanted+block.Size(1+w.r.IntN(2000))*sector)
	}
	w.growLeg(w.randomLeg())
}

// growLeg makes a leg as large as is wanted, if its target lives. When all legs in
// sync are, and not before, the manager records the new size.
func (w *world) growLeg(l *simLeg) {
	size := w.cfg.Layout.LegSize(w.wanted)
	if !l.alive {
		return
	}
	l.grow(size, w.errant.growsOntoRubbish)
	for _, copies := range w.legs {
		for _, l := range copies {
			if l.inSync && l.g.Size < size {
				return
			}
		}
	}
	w.size = w.wanted
}

// grow makes room on the leg. What is new reads as zeroes, and is durable.
func (l *simLeg) grow(size block.Size, rubbish bool) {
	for s := len(l.tags); s < int(size/sector); s++ {
		tag := uint64(0)
		if rubbish {
			tag = uint64(l.r.IntN(1000))
		}
		l.tags = append(l.tags, tag)
	}
	if l.g.Size < size {
		l.g.Size = size
		l.track()
	}
}

// largeEnough reports whether a leg has room for the volume as it is recorded. One
// that has not is neither added nor recorded in sync: the next client could not use
// it.
func (w *world) largeEnough(l *simLeg) bool { return l.g.Size >= w.cfg.Layout.LegSize(w.size) }

// mayGrow reports whether the volume can be made as large as is recorded: all legs
// in use have grown.
func (w *world) mayGrow() bool {
	size := w.v.Geometry().Size
	if size == w.size {
		return false
	}
	for k, copies := range w.legs {
		for i, l := range copies {
			if w.v.columns[k].legs[i].dev != nil && !w.largeEnough(l) {
				return false
			}
		}
	}
	return true
}

func (w *world) growVolume() {
	if err := w.v.Grow(w.size); err != nil {
		w.fail("%w", err)
		return
	}
	w.grown++
}

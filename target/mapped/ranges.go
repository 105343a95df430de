// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"fmt"

	"weft.dev/weft/proto/block"
)

// Allocated returns the ranges of [off, end) that may hold data, whole grains, in order. What it does
// not name up to next reads as zeroes at some moment between the call and its return. It returns at
// most so many ranges; next is where the rest begins, end if there is none. Writes, freezes and merges
// go on meanwhile: each chunk is looked at by itself.
func (l *Leg) Allocated(off, end int64, most int) (found []block.Range, next int64, err error) {
	found, next, err = l.scan(off, end, most, func(chunk uint32) (uint64, error) { return l.tree.allocated(l.layer, chunk), nil })
	if err != nil {
		err = fmt.Errorf("find the data of leg %v: %w", l.layerNow().Object, err)
	}
	return found, next, err
}

// Differing is Allocated for the ranges in which the leg may differ from a snapshot of the same tree.
// What it does not name is equal in both. The snapshot need not be an ancestor of the leg. ErrUnknown
// is returned if it is not there, or is deleted meanwhile, and ErrState if it is no snapshot.
func (l *Leg) Differing(since block.UUID, off, end int64, most int) (found []block.Range, next int64, err error) {
	base, err := l.tree.snapshot(since)
	if err == nil {
		found, next, err = l.scan(off, end, most, func(chunk uint32) (uint64, error) {
			s, err := l.tree.frozen(base)
			if err != nil {
				return 0, err
			}
			return l.tree.differing(l.layer, s, chunk), nil
		})
	}
	if err != nil {
		err = fmt.Errorf("compare leg %v with snapshot %v: %w", l.layerNow().Object, since, err)
	}
	return found, next, err
}

// Ranges is Allocated for a snapshot that need not be open, or Differing if since is not zero. What it
// does not name is so for good, as long as both snapshots exist.
func (t *Tree) Ranges(snapshot, since block.UUID, off, end int64, most int) (found []block.Range, next int64, err error) {
	of, err := t.snapshot(snapshot)
	base := of
	if err == nil && !since.IsZero() {
		base, err = t.snapshot(since)
	}
	if err == nil {
		err = t.Err()
	}
	if l, there := t.Layer(snapshot); err == nil && there && (off < 0 || off > end || end > int64(l.Size)) {
		err = block.ErrRange
	}
	if err == nil {
		found, next, err = t.scan(off, end, most, func(chunk uint32) (uint64, error) {
			s, err := t.frozen(of)
			if err != nil {
				return 0, err
			}
			if since.IsZero() {
				return t.allocated(s, chunk), nil
			}
			b, err := t.frozen(base)
			if err != nil {
				return 0, err
			}
			return t.differing(s, b, chunk), nil
		})
	}
	if err != nil {
		err = fmt.Errorf("ranges of snapshot %v: %w", snapshot, err)
	}
	return found, next, err
}

// frozen returns the layer of a snapshot by its id. The caller holds a stripe.
func (t *Tree) frozen(id uint32) (*layer, error) {
	l := t.layers[id]
	if l == nil || l.State != StateFrozen {
		return nil, ErrUnknown
	}
	return l, nil
}

// snapshot returns the id of a snapshot's layer.
func (t *Tree) snapshot(object block.UUID) (id uint32, err error) {
	s := t.stripe(0)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, l := range t.layers {
		switch {
		case l.Object != object || l.State == StateDoomed:
		case l.State != StateFrozen:
			return 0, fmt.Errorf("%w: %v", ErrState, l.State)
		default:
			return l.ID, nil
		}
	}
	return 0, ErrUnknown
}

// layerNow is the leg's layer; a freeze changes it.
func (l *Leg) layerNow() *layer {
	s := l.tree.stripe(0)
	s.mu.Lock()
	defer s.mu.Unlock()
	return l.layer
}

// scan is Tree.scan, in the leg.
func (l *Leg) scan(off, end int64, most int, look func(chunk uint32) (uint64, error)) (found []block.Range, next int64, err error) {
	if size := int64(l.Geometry().Size); off < 0 || off > end || end > size {
		return nil, off, fmt.Errorf("%d to %d of %d bytes: %w", off, end, size, block.ErrRange)
	}
	if !l.reads.enter() {
		return nil, off, block.ErrGone
	}
	defer l.reads.leave()
	return l.tree.scan(off, end, most, look)
}

// scan collects the ranges of the grains that look finds in each chunk. Look is called with the chunk's
// stripe held.
func (t *Tree) scan(off, end int64, most int, look func(chunk uint32) (uint64, error)) (found []block.Range, next int64, err error) {
	for at := off; at < end; {
		chunk := uint32(at / ChunkSize)
		s := t.stripe(chunk)
		s.mu.Lock()
		grains, err := look(chunk)
		s.mu.Unlock()
		if err != nil {
			return nil, off, err
		}
		begin := int64(chunk) * ChunkSize
		for grains != 0 {
			m, a, b := run(grains)
			grains &^= m
			r := block.Range{Off: max(begin+a, off), End: min(begin+b, end)}
			if r.Off >= r.End {
				continue
			}
			if n := len(found); n > 0 && found[n-1].End == r.Off {
				found[n-1].End = r.End
			} else if n < most {
				found = append(found, r)
			} else {
				return found, r.Off, t.Err()
			}
		}
		at = begin + ChunkSize
	}
	return found, end, t.Err()
}

// view is what a layer sees of a chunk: the grains that a record decides, and those of them that it
// reads as data.
type view struct{ seen, data uint64 }

// look adds the next record, nearest first, and returns the grains that it decides.
func (v *view) look(r *record) (decided uint64) {
	decided = r.have.Load() &^ v.seen
	v.seen |= decided
	v.data |= r.data.Load() & decided
	return decided
}

// allocated returns the grains that a layer reads as data. The caller holds the chunk's stripe.
func (t *Tree) allocated(l *layer, chunk uint32) uint64 {
	var v view
	t.walk(l, chunk, func(_ uint32, r *record) bool {
		v.look(r)
		return v.seen != allGrains
	})
	return v.data | t.fromBase(l, chunk, v.seen) | t.unknown(l, chunk)
}

// differing returns the grains in which two layers may differ: all but those that one record decides
// for both, and those that both read as zeroes. The caller holds the chunk's stripe.
func (t *Tree) differing(a, b *layer, chunk uint32) uint64 {
	var of, other view
	same := uint64(0)
	for slot := t.first[chunk]; slot != 0; {
		r := t.record(slot)
		if o := t.layers[r.layer]; o != nil {
			var mine, theirs uint64
			if a.sees(o) {
				mine = of.look(r)
			}
			if b.sees(o) {
				theirs = other.look(r)
			}
			same |= mine & theirs
		}
		slot = r.next
	}
	mine, theirs := t.fromBase(a, chunk, of.seen), t.fromBase(b, chunk, other.seen)
	of.data, other.data, same = of.data|mine, other.data|theirs, same|mine&theirs
	return (of.data|other.data)&^same | t.unknown(a, chunk) | t.unknown(b, chunk)
}

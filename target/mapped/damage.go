// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"maps"
	"math/bits"
	"slices"
	"strings"

	"weft.dev/weft/proto/block"
)

// A slot whose record is bad in both copies may have held a record, of any layer and any chunk. The tree is
// opened all the same, to be read. What the lost record may have decided is unknown: reads of it fail with
// block.ErrMedium. Everything else is certain. For a slot that held a record of layer L and chunk c:
//
//  1. There is a good record of L and c: then that one counts. A layer has one record of a chunk. Only a change
//     that moves it to another slot makes a second one, and clears the first on the drive before look-ups see the
//     second (supersede). So if the lost record was the older of two, it meant nothing. If it was the newer one, the
//     change was cut off: it had not been answered, or on a drive with a volatile cache not been flushed, and nothing
//     was built on it. What the good record says is L as it was before that change, which a crash may leave. In a
//     frozen layer only merging and flattening move records, and L reads the same before and after.
//  2. There is none: then the lost record may have decided each grain of c that no layer over L decides. If the slot
//     has no chunk, it can only have made them zeroes. So those that read as zeroes without it are certain.
//  3. c is beyond the end of L, or L is not in the superblock: then it meant nothing.
//
// So if no layer on the way from the one that is read to the good record that decides a grain lacks a record of the
// chunk, the grain is certain. The way to zeroes, or to the base, ends behind the last layer.
//
// The data of other slots is not touched: a record names the chunk of its own slot alone.
//
// Nothing is written to such a tree but which layers are deleted. No slot is free, none comes free, and no record
// changes. So the lost record's chunk gets no other owner. And if the record can be read again one day, after an
// error that passed, it fits the others, and the tree is whole. A stale record could only do harm beside newer ones.
// What cures the tree is to be without it: its legs are made again in others, and it goes with the last one.

// DamageError says that records of a tree are bad in both copies. It unwraps to ErrDamaged.
type DamageError struct {
	Records string // the bad ones
	// Unknown says how much of each leg and snapshot cannot be read, since it may have been in these records. A leg
	// that is not in the map can be read as a whole. Callers must not change the map.
	Unknown map[block.UUID]block.Size

	data bool // a bad slot has a chunk
}

func (e *DamageError) Error() string {
	return fmt.Sprintf("%v: both copies are bad of %s", ErrDamaged, e.Records)
}

// Unwrap returns ErrDamaged.
func (e *DamageError) Unwrap() error { return ErrDamaged }

// Damage says what is lost of a tree; nil: nothing. It stays the same while the tree is open. A damaged tree can
// be read, except for what is unknown. Its layers can be deleted. Whatever else changes it fails: writes with an
// error that is block.ErrMedium.
func (t *Tree) Damage() *DamageError { return t.damage }

// intact returns the error with which a damaged tree refuses changes; nil if it is not damaged.
func (t *Tree) intact() error {
	if t.damage == nil {
		return nil
	}
	return t.damage
}

// lose notes which records are bad in both copies, by extent.
func (t *Tree) lose(bad [][]int) {
	var where []string
	e := &DamageError{}
	for i, slots := range bad {
		if len(slots) == 0 {
			continue
		}
		where = append(where, fmt.Sprintf("the records %s of extent %d", spans(slots), (*t.extents.Load())[i].number))
		e.data = e.data || hasChunk(uint32(slots[0]))
	}
	if len(where) > 0 {
		e.Records = strings.Join(where, ", ")
		t.damage = e
	}
}

// spans writes ascending numbers, as few as possible of them.
func spans(of []int) string {
	var all []string
	for i := 0; i < len(of); {
		n := 1
		for i+n < len(of) && of[i+n] == of[i]+n {
			n++
		}
		if all = append(all, fmt.Sprint(of[i])); n > 1 {
			all[len(all)-1] = fmt.Sprintf("%d to %d", of[i], of[i]+n-1)
		}
		i += n
	}
	return strings.Join(all, ", ")
}

// measure counts what is unknown of each object. Nobody else knows the tree yet.
//
// It looks at each layer once in a chunk, and at chunks of which no layer has a record together.
func (t *Tree) measure() {
	t.damage.Unknown = map[block.UUID]block.Size{}
	layers := slices.SortedFunc(maps.Values(t.layers), func(a, b *layer) int { return cmp.Compare(a.ID, b.ID) }) // a parent first
	n := make([]uint64, len(layers))
	parents, is := lineage(layers)
	views, own := make([]doubt, len(layers)), make([]*record, len(layers))
	for from, end := range t.alike(layers) {
		for slot := t.first[from]; slot != 0; slot = t.record(slot).next {
			if i, there := is[t.record(slot).layer]; there {
				own[i] = t.record(slot)
			}
		}
		for i, l := range layers {
			var below doubt
			if p := parents[i]; p >= 0 {
				below = views[p]
			} else if t.overBase(l, from) {
				below.data = allGrains
			}
			views[i], own[i] = t.over(below, own[i], from < chunksOf(l.Size)), nil
			if bytes := int64(l.Size) - int64(from)*ChunkSize; bytes > 0 {
				n[i] += uint64(bits.OnesCount64(views[i].unknown&mask(0, min(bytes, ChunkSize)))) * uint64(end-from)
			}
		}
	}
	for i, l := range layers {
		if l.State != StateDoomed && n[i] > 0 {
			t.damage.Unknown[l.Object] = block.Size(n[i]) * GrainSize
		}
	}
}

// lineage returns where the parent of each layer is, -1 if it has none, and where each id is.
func lineage(layers []*layer) (parents []int, is map[uint32]int) {
	is = map[uint32]int{}
	for i, l := range layers {
		p, there := is[l.Parent]
		if is[l.ID] = i; !there {
			p = -1
		}
		parents = append(parents, p)
	}
	return parents, is
}

// doubt is of a layer and a chunk: the grains that lost records may have decided, and the grains that are data if
// these records decided nothing.
type doubt struct{ unknown, data uint64 }

// over is the doubt of a layer over that of its parent. own is its record, nil if there is none, and has says that
// the layer may have had one.
func (t *Tree) over(below doubt, own *record, has bool) doubt {
	switch {
	case own != nil:
		have := own.have.Load()
		return doubt{below.unknown &^ have, below.data&^have | own.data.Load()}
	case !has:
	case t.damage.data:
		below.unknown = allGrains
	default: // zeroes, if anything
		below.unknown |= below.data
	}
	return below
}

// alike yields the chunks, from one to before another, of which each layer has the same doubt: one, or several of
// which no layer has a record.
func (t *Tree) alike(layers []*layer) iter.Seq2[uint32, uint32] {
	ends := []uint32{uint32(len(t.first)), uint32(len(t.base)) * chunkCount}
	for _, l := range layers {
		ends = append(ends, uint32(l.Size/ChunkSize), chunksOf(l.Size))
	}
	slices.Sort(ends)
	return func(yield func(uint32, uint32) bool) {
		from := uint32(0)
		for _, end := range ends {
			for end = min(end, uint32(len(t.first))); from < end; {
				n := from + 1
				for t.first[from] == 0 && n < end && t.first[n] == 0 {
					n++
				}
				if !yield(from, n) {
					return
				}
				from = n
			}
		}
	}
}

// unknown returns the grains of a chunk that l may see in a record which is lost. The caller holds the chunk's
// stripe.
func (t *Tree) unknown(l *layer, chunk uint32) (grains uint64) {
	if t.damage == nil {
		return 0
	}
	left, hidden := allGrains, false // hidden: a layer that was passed by may make what is left zeroes
	at, slot := l, t.first[chunk]
	for ; at != nil && left != 0; at = t.layers[at.Parent] {
		for slot != 0 && t.record(slot).layer > at.ID {
			slot = t.record(slot).next
		}
		switch {
		case slot != 0 && t.record(slot).layer == at.ID:
			if r := t.record(slot); hidden {
				grains |= r.data.Load() & left
			}
			left &^= t.record(slot).have.Load()
		case chunk >= chunksOf(at.Size):
		case t.damage.data:
			return grains | left
		default:
			hidden = true
		}
	}
	if hidden {
		grains |= t.fromBase(l, chunk, ^left)
	}
	return grains
}

var errUnknown = errors.New("what it held is unknown")

// refuses says why a damaged tree does not do an IO; nil if it does.
func (l *Leg) refuses(io *block.IO) error {
	t := l.tree
	if t.damage == nil || io.Op == block.OpFlush {
		return nil
	}
	if io.Op != block.OpRead {
		return fmt.Errorf("%v, to a tree that can only be read: %w: %w", io.Op, block.ErrMedium, t.damage)
	}
	for at := io.Off; at < io.Off+io.Len; {
		chunk, from := uint32(at/ChunkSize), at%ChunkSize
		n := min(ChunkSize-from, io.Off+io.Len-at)
		s := t.stripe(chunk)
		s.mu.Lock()
		unknown := t.unknown(l.layer, chunk) & mask(from, n)
		s.mu.Unlock()
		if unknown != 0 {
			return fmt.Errorf("read %d bytes at %d: %w: %w: %w", io.Len, io.Off, errUnknown, block.ErrMedium, t.damage)
		}
		at += n
	}
	return nil
}

// unreadable fills the place of a block of a table that the drive cannot read. No good record looks like that.
const unreadable = 0xff

// readTable reads a part of a table. What the drive cannot read is bad in this copy, and no more than that.
func (t *Tree) readTable(p []byte, at int64) error {
	err := block.ReadAt(t.below, p, at)
	switch {
	case !errors.Is(err, block.ErrMedium):
		return err
	case len(p) <= int(t.below.Geometry().BlockSize):
		copy(p, slices.Repeat([]byte{unreadable}, len(p)))
		return nil
	}
	half := len(p) / 2
	if err := t.readTable(p[:half], at); err != nil {
		return err
	}
	return t.readTable(p[half:], at+int64(half))
}

// SPDX-License-Identifier: Apache-2.0

package treecheck

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"strings"
)

// ErrUnknown is what Content's readers return for what may have been in records that are lost.
var ErrUnknown = errors.New("it may have been in a record that is bad in both copies")

// fault is the unknown grains of a chunk as a layer reads it: all that a layer on the way may have had in a
// record which is lost. of are the good records of the chunk.
func (t *Tree) fault(layer, chunk uint32, of []record, layers map[uint32]Layer) (grains uint64) {
	open, over, based := ^uint64(0), false, false
	for id, next := layer, uint32(0); id != 0 && open != 0; id = next {
		if next = layers[id].Parent; next >= id { // a finding of its own
			next = 0
		}
		based = layers[id].OverBase
		if i := slices.IndexFunc(of, func(r record) bool { return r.layer == id }); i >= 0 {
			if over {
				grains |= open & of[i].data()
			}
			open &^= of[i].have
			continue
		}
		if uint64(chunk)*mib >= layers[id].SizeBytes {
			continue
		}
		if t.lostChunk {
			return grains | open
		}
		over = true // zeroes, if anything: they hide only data
	}
	if based && over && int(chunk) < len(t.Base)*withChunk {
		grains |= open
	}
	return grains
}

// unknown says what may have been in the records that are lost.
func (t *Tree) unknown(all map[uint32][]record) {
	if t.lost == 0 {
		return
	}
	layers := map[uint32]Layer{}
	for _, l := range t.Layers {
		layers[l.ID] = l
	}
	bounds := t.bounds(all)
	for i := range t.Layers {
		l := &t.Layers[i]
		var where []span
		for n, from := range bounds[:len(bounds)-1] {
			end := min(bounds[n+1], (l.SizeBytes+mib-1)/mib)
			if from >= end {
				break
			}
			grains := t.fault(l.ID, uint32(from), all[uint32(from)], layers)
			if tail := l.SizeBytes - from*mib; tail < mib {
				grains &= 1<<((tail+kib16-1)/kib16) - 1
			}
			if grains != 0 {
				where = append(where, span{from, end})
				l.UnknownBytes += uint64(bits.OnesCount64(grains)) * kib16 * (end - from)
			}
		}
		if len(where) > 0 && l.State != "doomed" {
			t.damage("layer %d (%s, %v): up to %d KiB may have been in these records and cannot be read, in %s", l.ID, l.State, l.Object, l.UnknownBytes/1024, spell("chunk", where, 8))
		}
	}
}

// bounds is where chunks begin, ascending, that may be unlike those before them: all others have no record and end
// in the same layers.
func (t *Tree) bounds(all map[uint32][]record) []uint64 {
	is := map[uint64]bool{0: true, uint64(len(t.Base)) * withChunk: true, 1 << 32: true}
	for _, l := range t.Layers {
		is[min(l.SizeBytes/mib, 1<<32)], is[min((l.SizeBytes+mib-1)/mib, 1<<32)] = true, true
	}
	for chunk := range all {
		is[uint64(chunk)], is[uint64(chunk)+1] = true, true
	}
	return slices.Sorted(maps.Keys(is))
}

// span is numbers from one to before another.
type span struct{ from, end uint64 }

// spell writes ascending spans, joined as far as possible, and at most so many of them.
func spell(what string, of []span, most int) string {
	var joined []span
	for _, s := range of {
		if n := len(joined) - 1; n >= 0 && joined[n].end == s.from {
			joined[n].end = s.end
		} else {
			joined = append(joined, s)
		}
	}
	if len(joined) > 1 || joined[0].end > joined[0].from+1 {
		what += "s"
	}
	var all []string
	for i, s := range joined {
		if i == most {
			all = append(all, "and others")
			break
		}
		if all = append(all, fmt.Sprint(s.from)); s.end > s.from+1 {
			all[i] = fmt.Sprintf("%d to %d", s.from, s.end-1)
		}
	}
	return what + " " + strings.Join(all, ", ")
}

// noteLost adds an extent's records that are bad in both copies. Some slots are never used: theirs are nothing.
func (t *Tree) noteLost(e uint32, slots []uint32) {
	slots = slices.DeleteFunc(slots, func(s uint32) bool { return reserved(t, e, s) })
	if len(slots) == 0 {
		return
	}
	var where []span
	for _, s := range slots {
		t.lost++
		t.lostChunk = t.lostChunk || s < withChunk
		where = append(where, span{uint64(s), uint64(s) + 1})
	}
	t.damage("extent %d, %s: both copies of the record are bad", e, spell("slot", where, len(where)))
}

// readTable reads a copy of a table. What cannot be read of it is bad.
func (c *checker) readTable(off int64) ([]byte, error) {
	const size, piece = records * 64, 4096
	b, err := c.read(size, off)
	if err == nil {
		return b, nil
	}
	whole := 0
	b = nil
	for at := int64(0); at < size; at += piece {
		part, err := c.read(piece, off+at)
		if err != nil {
			part = bytes.Repeat([]byte{0xff}, piece)
		} else {
			whole++
		}
		b = append(b, part...)
	}
	if whole == 0 {
		return nil, err
	}
	return b, nil
}

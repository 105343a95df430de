// SPDX-License-Identifier: Apache-2.0

package treecheck

import (
	"bytes"
	"encoding/binary"
	"maps"
	"math/bits"
	"slices"

	"weft.dev/weft/proto/block"
)

// record is a record that counts.
type record struct {
	extent, slot, layer uint32
	have, zero, seq     uint64
}

func (r record) data() uint64 { return r.have &^ r.zero }

func (r record) chunk() bool { return r.slot < withChunk }

var never [64]byte

// parse reads a record: ok if the slot may hold it, used if it names a layer.
func parse(b []byte, id block.UUID, extent, slot uint32) (r record, chunk uint32, ok bool) {
	if bytes.Equal(b, never[:]) {
		return r, 0, true
	}
	place := binary.LittleEndian.AppendUint32(nil, extent)
	place = binary.LittleEndian.AppendUint32(place, slot)
	if num32(b, 0) != crc(b[4:64], id[:], place) || num32(b, 12) != 0 || !bytes.Equal(b[40:64], never[40:]) {
		return r, 0, false
	}
	r = record{extent: extent, slot: slot, layer: num32(b, 4), have: num64(b, 16), zero: num64(b, 24), seq: num64(b, 32)}
	return r, num32(b, 8), r.seq != 0
}

// tables reads all records, both copies, and returns those that count, by chunk.
func (c *checker) tables(t *Tree) (map[uint32][]record, error) {
	size := map[uint32]uint64{}
	for _, l := range t.Layers {
		size[l.ID] = l.SizeBytes
	}
	all := map[uint32][]record{}
	for _, e := range t.Extents {
		if e >= c.count {
			continue
		}
		a, err := c.readTable(c.at(e) + 64<<10)
		if err != nil {
			return nil, err
		}
		b, err := c.readTable(c.at(e) + 512<<10)
		if err != nil {
			return nil, err
		}
		t.table(all, a, b, e, size)
	}
	return all, nil
}

// table adds the records of one extent, from both copies of its table.
func (t *Tree) table(all map[uint32][]record, a, b []byte, e uint32, size map[uint32]uint64) {
	differ, bad := 0, 0
	var lost []uint32
	for slot := range uint32(records) {
		x, chunkX, okX := parse(a[slot*64:][:64], t.ID, e, slot)
		y, chunkY, okY := parse(b[slot*64:][:64], t.ID, e, slot)
		switch {
		case !okX && !okY:
			lost = append(lost, slot)
			continue
		case !okX || !okY:
			bad++
		case x != y || chunkX != chunkY:
			differ++
		}
		if !okX || okY && y.seq > x.seq {
			x, chunkX = y, chunkY
		}
		t.take(all, x, chunkX, size)
	}
	t.noteLost(e, lost)
	if differ > 0 {
		t.left("extent %d: %d records differ between the copies of the table", e, differ)
	}
	if bad > 0 {
		t.left("extent %d: %d records are bad in one copy of the table", e, bad)
	}
}

// reserved reports whether a slot is never used.
func reserved(t *Tree, e, slot uint32) bool { return slot == 0 || slot <= 2 && e == t.Home }

// take adds a record to those that count, if it names a layer of the tree and may.
//
// Branches: a check of each field.
func (t *Tree) take(all map[uint32][]record, r record, chunk uint32, size map[uint32]uint64) {
	bytes, known := size[r.layer]
	switch {
	case r.layer == 0:
		if r.have|r.zero != 0 || chunk != 0 {
			t.damage("extent %d, slot %d: a free record that is not empty", r.extent, r.slot)
		}
	case reserved(t, r.extent, r.slot):
		t.damage("extent %d, slot %d: a record where none may be", r.extent, r.slot)
	case r.have == 0 || r.zero&^r.have != 0 || !r.chunk() && r.data() != 0:
		t.damage("extent %d, slot %d: grains %#x, of them zeroes %#x, are not possible there", r.extent, r.slot, r.have, r.zero)
	case !known: // of a layer that is gone: free
	case uint64(chunk)*mib >= bytes:
		t.damage("extent %d, slot %d: chunk %d is beyond the end of layer %d", r.extent, r.slot, chunk, r.layer)
	default:
		at := slices.IndexFunc(all[chunk], func(o record) bool { return o.layer == r.layer })
		if at < 0 {
			all[chunk] = append(all[chunk], r)
			return
		}
		o := &all[chunk][at]
		t.left("chunk %d of layer %d has two records: extent %d slot %d, and extent %d slot %d", chunk, r.layer, o.extent, o.slot, r.extent, r.slot)
		if o.seq == r.seq {
			t.damage("chunk %d of layer %d: both have sequence number %d", chunk, r.layer, r.seq)
		}
		if o.seq < r.seq {
			*o = r
		}
	}
}

// count makes the figures of the tree and its layers.
func (t *Tree) count(all map[uint32][]record) {
	t.TotalBytes = uint64(len(t.Extents)*(withChunk-1)-2) * mib
	parent, children := map[uint32]uint32{}, map[uint32][]uint32{}
	for _, l := range t.Layers {
		parent[l.ID] = l.Parent
		children[l.Parent] = append(children[l.Parent], l.ID)
	}
	t.countBase(all)
	for _, chunk := range slices.Sorted(maps.Keys(all)) {
		of := map[uint32]record{}
		for _, r := range all[chunk] {
			of[r.layer] = r
			if r.chunk() {
				t.UsedBytes += mib
			}
		}
		for i := range t.Layers {
			l := &t.Layers[i]
			if uint64(chunk)*mib >= l.SizeBytes {
				continue
			}
			decided := uint64(0)
			for id := l.ID; id != 0; id = parent[id] {
				l.ReferencedBytes += uint64(bits.OnesCount64(of[id].data()&^decided)) * kib16
				decided |= of[id].have
			}
			if own := of[l.ID]; own.have != 0 && own.chunk() {
				l.UsedBytes += mib
				if freed(own, children[l.ID], of) {
					l.FreedBytes += mib
				}
			}
		}
	}
}

// countBase adds what layers read of the base.
func (t *Tree) countBase(all map[uint32][]record) {
	parent, over := map[uint32]uint32{}, uint32(0)
	for _, l := range t.Layers {
		parent[l.ID] = l.Parent
		if l.OverBase {
			over = l.ID
		}
	}
	for i := range t.Layers {
		l := &t.Layers[i]
		path := map[uint32]bool{}
		for id := l.ID; id != 0 && !path[id]; id = parent[id] {
			path[id] = true
		}
		chunks := min((l.SizeBytes+mib-1)/mib, uint64(len(t.Base))*withChunk)
		if !path[over] {
			continue
		}
		l.ReferencedBytes += chunks * mib
		for chunk, of := range all {
			decided := uint64(0)
			for _, r := range of {
				if path[r.layer] && uint64(chunk) < chunks {
					decided |= r.have
				}
			}
			l.ReferencedBytes -= uint64(bits.OnesCount64(decided)) * kib16
		}
	}
}

// freed reports whether deleting a layer frees the chunk of its record.
func freed(own record, children []uint32, of map[uint32]record) bool {
	switch len(children) {
	case 0:
		return true
	case 1:
		over := of[children[0]]
		return over.have != 0 && (over.chunk() || own.data()&^over.have == 0)
	}
	return false
}

// SPDX-License-Identifier: Apache-2.0

package mapped

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"sync"

	"weft.dev/weft/proto/block"
)

// The geometry of a tree, fixed in format version 1. docs/tree-format.md describes all of it.
const (
	// ChunkSize is the unit of space: each chunk of an extent belongs to one layer.
	ChunkSize = 1 << 20
	// GrainSize is the unit of copy-on-write: a layer has a grain or has it not.
	GrainSize = 16 << 10

	version    = 1
	baseVer    = 2 // of a superblock whose tree has a base
	extentSize = int64(block.ExtentSize)
	slotShift  = 10
	slotCount  = 1 << slotShift // slots of an extent's table
	chunkCount = 256            // slots below this have a chunk; the others hold only zero grains
	recordSize = 64
	tableSize  = slotCount * recordSize
	headSize   = 512 // of an extent head, and of the header of a superblock
	unit       = 4096
	perBlock   = unit / recordSize
	allGrains  = ^uint64(0)
	layerSize  = 48 // of a layer in the superblock, without its note

	// MaxNote is the most bytes that a layer's note may have.
	MaxNote = 4096
	// maxSuper is the most bytes of a superblock copy: its chunk.
	maxSuper = ChunkSize
)

// tableAt and superAt are the offsets of both copies: of the table in each extent, and of the
// superblock in the home extent.
var (
	tableAt = [2]int64{64 << 10, 512 << 10}
	superAt = [2]int64{ChunkSize, 2 * ChunkSize}
)

const (
	extentMagic = "weft tree extent"
	superMagic  = "weft layer tree\x00"
)

var (
	castagnoli = crc32.MakeTable(crc32.Castagnoli)
	le         = binary.LittleEndian
)

// entry is a record: whose a slot is, and which grains of the chunk it decides.
type entry struct {
	layer, chunk uint32 // layer 0: the slot is free
	have         uint64 // the grains that this record decides
	zero         uint64 // those of them that read as zeroes and have no data
	seq          uint64 // of two records for one layer and chunk the higher counts
}

// sum is the checksum of a record in its place, so that a misplaced record has a wrong one.
func sum(b []byte, tree block.UUID, extent uint32, slot int) uint32 {
	place := sumPlaces.Get().(*[24]byte)
	defer sumPlaces.Put(place)
	copy(place[:], tree[:])
	le.PutUint32(place[16:], extent)
	le.PutUint32(place[20:], uint32(slot))
	return crc32.Update(crc32.Checksum(b[4:recordSize], castagnoli), castagnoli, place[:])
}

// sumPlaces has buffers of sum: what goes to package crc32 would be allocated for each record.
var sumPlaces = sync.Pool{New: func() any { return new([24]byte) }}

// encode writes a record to b, which has recordSize bytes. A slot that was never used is zeroes.
func (e entry) encode(b []byte, tree block.UUID, extent uint32, slot int) {
	clear(b)
	if e == (entry{}) {
		return
	}
	le.PutUint32(b[4:], e.layer)
	le.PutUint32(b[8:], e.chunk)
	le.PutUint64(b[16:], e.have)
	le.PutUint64(b[24:], e.zero)
	le.PutUint64(b[32:], e.seq)
	le.PutUint32(b, sum(b, tree, extent, slot))
}

var noRecord [recordSize]byte

// decodeEntry reads a record; false if it is damaged, or cannot be in this slot.
func decodeEntry(b []byte, tree block.UUID, extent uint32, slot int) (e entry, ok bool) {
	if bytes.Equal(b, noRecord[:]) {
		return e, true
	}
	if le.Uint32(b) != sum(b, tree, extent, slot) || le.Uint32(b[12:]) != 0 || !bytes.Equal(b[40:], noRecord[40:]) {
		return e, false
	}
	e = entry{layer: le.Uint32(b[4:]), chunk: le.Uint32(b[8:]), have: le.Uint64(b[16:]), zero: le.Uint64(b[24:]), seq: le.Uint64(b[32:])}
	switch {
	case e.seq == 0 || e.zero&^e.have != 0:
		return entry{}, false
	case e.layer == 0:
		return e, e.have == 0 && e.chunk == 0
	}
	return e, e.have != 0 && slot != 0 && (slot < chunkCount || e.have == e.zero)
}

// encodeHead makes the head of an extent.
func encodeHead(tree, drive block.UUID, extent uint32, home bool) []byte {
	b := make([]byte, unit)
	copy(b, extentMagic)
	le.PutUint32(b[16:], version)
	copy(b[24:], tree[:])
	copy(b[40:], drive[:])
	le.PutUint32(b[56:], extent)
	b[60], b[61] = 20, 14
	le.PutUint16(b[62:], slotCount)
	if home {
		b[64] = 1
	}
	le.PutUint32(b[20:], headSum(b))
	return b
}

// headSum is the checksum of the first 512 bytes of a head or a superblock, without its own field.
func headSum(b []byte) uint32 {
	var none [4]byte
	s := crc32.Checksum(b[:20], castagnoli)
	s = crc32.Update(s, castagnoli, none[:])
	return crc32.Update(s, castagnoli, b[24:headSize])
}

// State is what a layer is for.
type State uint8

// The states of a layer.
const (
	StateOpen   State = 1 // a volume's head: it takes writes
	StateFrozen State = 2 // a snapshot: it never changes
	StateDoomed State = 3 // deleted; its space is being reclaimed, or waits for children
)

func (s State) String() string {
	switch s {
	case StateOpen:
		return "open"
	case StateFrozen:
		return "frozen"
	case StateDoomed:
		return "doomed"
	}
	return "unknown"
}

// Layer describes a layer of a tree.
type Layer struct {
	ID     uint32 // never used again
	Parent uint32 // the layer that decides what this one does not; 0: none
	State  State
	Object block.UUID // the leg whose head it is, or the snapshot
	Size   block.Size
	// Frozen is the sequence number when the layer was frozen. Its records were written before, but for
	// those that were moved here since: it was flattened, or a layer below it was deleted.
	Frozen uint64
	// Base says that what neither this layer nor one over it decides is in the base. The layer has no
	// parent.
	Base bool
	// Note is the owner's, at most MaxNote bytes. It is kept with the layer and not looked at.
	Note []byte
}

// super is the content of a superblock.
type super struct {
	generation uint64
	next       uint32   // layer id
	extents    []uint32 // in use, ascending
	layers     []Layer  // by id
	base       []uint32 // extents of the base, in the order of its bytes; empty: none
}

func (s *super) clone() *super {
	c := *s
	c.extents, c.layers, c.base = slices.Clone(s.extents), slices.Clone(s.layers), slices.Clone(s.base)
	return &c
}

func (s *super) layer(object block.UUID) *Layer {
	for i := range s.layers {
		if l := &s.layers[i]; l.Object == object && l.State != StateDoomed {
			return l
		}
	}
	return nil
}

func (s *super) byID(id uint32) *Layer {
	i, ok := slices.BinarySearchFunc(s.layers, id, func(l Layer, id uint32) int { return int(int64(l.ID) - int64(id)) })
	if !ok {
		return nil
	}
	return &s.layers[i]
}

func (s *super) children(id uint32) (all []uint32) {
	for _, l := range s.layers {
		if l.Parent == id {
			all = append(all, l.ID)
		}
	}
	return all
}

func (s *super) encode(tree, drive block.UUID, home uint32) ([]byte, error) {
	b := make([]byte, headSize)
	b, runs := appendRuns(b, s.extents)
	b, baseRuns := appendRuns(b, s.base)
	for _, l := range s.layers {
		b = le.AppendUint32(b, l.ID)
		b = le.AppendUint32(b, l.Parent)
		b = append(b, byte(l.State), flags(l))
		b = le.AppendUint16(b, uint16(len(l.Note)))
		b = append(b, 0, 0, 0, 0)
		b = append(b, l.Object[:]...)
		b = le.AppendUint64(b, uint64(l.Size))
		b = le.AppendUint64(b, l.Frozen)
		b = append(b, l.Note...)
		b = append(b, make([]byte, -len(l.Note)&7)...)
	}
	if len(b) > maxSuper {
		return nil, fmt.Errorf("%w: %d layers and %d runs of extents take %d bytes of %d", ErrTooMany, len(s.layers), runs, len(b), maxSuper)
	}
	copy(b, superMagic)
	le.PutUint32(b[16:], version)
	if baseRuns > 0 {
		le.PutUint32(b[16:], baseVer)
	}
	le.PutUint64(b[24:], s.generation)
	copy(b[32:], tree[:])
	copy(b[48:], drive[:])
	le.PutUint32(b[64:], home)
	le.PutUint32(b[68:], s.next)
	le.PutUint32(b[72:], uint32(len(s.layers)))
	le.PutUint32(b[76:], uint32(runs))
	le.PutUint32(b[80:], uint32(len(b)-headSize))
	le.PutUint32(b[84:], crc32.Checksum(b[headSize:], castagnoli))
	le.PutUint32(b[88:], uint32(baseRuns))
	le.PutUint32(b[20:], headSum(b))
	return append(b, make([]byte, -len(b)&(unit-1))...), nil
}

// appendRuns writes extents as runs of consecutive numbers.
func appendRuns(b []byte, extents []uint32) (_ []byte, runs int) {
	for i := 0; i < len(extents); {
		n := 1
		for i+n < len(extents) && extents[i+n] == extents[i]+uint32(n) {
			n++
		}
		b = le.AppendUint32(b, extents[i])
		b = le.AppendUint32(b, uint32(n))
		i, runs = i+n, runs+1
	}
	return b, runs
}

// flags is the byte of a layer behind its state.
func flags(l Layer) byte {
	if l.Base {
		return 1
	}
	return 0
}

var errBad = errors.New("damaged superblock")

// superLength checks the header of a superblock copy and returns the length of the whole.
func superLength(b []byte, tree, drive block.UUID, home uint32) (int, error) {
	switch {
	case len(b) < headSize || string(b[:16]) != superMagic || le.Uint32(b[20:]) != headSum(b):
		return 0, errBad
	case le.Uint32(b[16:]) != version && le.Uint32(b[16:]) != baseVer:
		return 0, fmt.Errorf("%w %d", ErrNewer, le.Uint32(b[16:]))
	case block.UUID(b[32:48]) != tree || block.UUID(b[48:64]) != drive || le.Uint32(b[64:]) != home:
		return 0, fmt.Errorf("%w: it is of another tree", errBad)
	case le.Uint32(b[80:]) > maxSuper-headSize:
		return 0, errBad
	}
	return headSize + int(le.Uint32(b[80:])), nil
}

// decodeSuper reads a superblock copy. It checks everything that the rest of the package relies on.
func decodeSuper(b []byte, tree, drive block.UUID, home uint32) (*super, error) {
	n, err := superLength(b, tree, drive, home)
	if err != nil {
		return nil, err
	}
	if n > len(b) || le.Uint32(b[84:]) != crc32.Checksum(b[headSize:n], castagnoli) {
		return nil, errBad
	}
	s := &super{generation: le.Uint64(b[24:]), next: le.Uint32(b[68:])}
	p := b[headSize:n]
	for range le.Uint32(b[76:]) {
		if p, err = addRun(&s.extents, p, true); err != nil {
			return nil, err
		}
	}
	for range le.Uint32(b[88:]) {
		if p, err = addRun(&s.base, p, false); err != nil {
			return nil, err
		}
	}
	for range le.Uint32(b[72:]) {
		if p, err = s.addLayer(p); err != nil {
			return nil, err
		}
	}
	if len(p) != 0 || s.generation == 0 || !slices.Contains(s.extents, home) || !s.baseFits(le.Uint32(b[16:])) {
		return nil, errBad
	}
	return s, nil
}

// addRun adds a run to extents, which ascend or are only not too many.
func addRun(extents *[]uint32, p []byte, ascending bool) ([]byte, error) {
	if len(p) < 8 {
		return nil, errBad
	}
	first, n := le.Uint32(p), le.Uint32(p[4:])
	last := uint64(first) + uint64(n) - 1
	had := *extents
	if n == 0 || n > 1<<20 || last > 1<<21 || ascending && len(had) > 0 && had[len(had)-1] >= first || len(had) > 1<<21 {
		return nil, errBad
	}
	for e := range n {
		*extents = append(*extents, first+e)
	}
	return p[8:], nil
}

// baseFits reports whether the base is as the version of the superblock says, has no extent twice or
// of the tree's own, and belongs to one layer.
func (s *super) baseFits(of uint32) bool {
	seen := map[uint32]bool{}
	for _, e := range slices.Concat(s.extents, s.base) {
		if seen[e] {
			return false
		}
		seen[e] = true
	}
	owners := 0
	for _, l := range s.layers {
		if l.Base {
			owners++
		}
	}
	if of == version {
		return len(s.base) == 0 && owners == 0
	}
	return len(s.base) > 0 && owners == 1
}

// addLayer reads a layer and returns what follows it.
//
// Branches: a check of each field.
func (s *super) addLayer(p []byte) ([]byte, error) {
	if len(p) < layerSize {
		return nil, errBad
	}
	note := int(le.Uint16(p[10:]))
	end := layerSize + (note+7)&^7
	if note > MaxNote || len(p) < end {
		return nil, errBad
	}
	l := Layer{
		ID: le.Uint32(p), Parent: le.Uint32(p[4:]), State: State(p[8]), Object: block.UUID(p[16:32]),
		Size: block.Size(le.Uint64(p[32:])), Frozen: le.Uint64(p[40:]), Note: slices.Clone(p[layerSize:][:note:note]),
		Base: p[9] == 1,
	}
	switch {
	case l.ID == 0 || l.ID >= s.next || len(s.layers) > 0 && s.layers[len(s.layers)-1].ID >= l.ID:
		return nil, errBad
	case l.State < StateOpen || l.State > StateDoomed || l.Size > MaxSize:
		return nil, errBad
	case p[9] > 1 || l.Base && l.Parent != 0:
		return nil, errBad
	case l.Parent != 0 && (l.Parent >= l.ID || s.byID(l.Parent) == nil): // a parent is older than its children
		return nil, errBad
	}
	s.layers = append(s.layers, l)
	return p[end:], nil
}

// MaxSize is the size of the largest layer: 2^31 chunks.
const MaxSize = block.MaxMapped

// SPDX-License-Identifier: Apache-2.0

// Package treecheck reads trees of layers from a drive, or from an image of one, and says what is
// wrong with them. It changes nothing.
//
// It is written from docs/tree-format.md alone and shares no code with target/mapped, which writes
// trees: a misunderstanding of the one is a finding of the other.
//
// It keeps all records of a tree in memory, about 100 bytes for each MiB that is in use.
package treecheck

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"slices"

	"weft.dev/weft/proto/block"
)

const (
	mib       = 1 << 20
	kib16     = 16 << 10
	perExtent = 256 * mib
	records   = 1024
	withChunk = 256 // slots below this have a chunk
)

// FirstExtent is where extent 0 begins on a drive with a label.
const FirstExtent = 8 * mib

// Report is what was found on a drive.
type Report struct {
	Trees []Tree `json:"trees"`
}

// Damaged reports whether a tree has lost something.
func (r *Report) Damaged() bool {
	return slices.ContainsFunc(r.Trees, func(t Tree) bool { return t.Damaged() })
}

// Tree is one tree.
type Tree struct {
	ID         block.UUID `json:"id"`
	Drive      block.UUID `json:"drive"`
	Home       uint32     `json:"home_extent"`
	Generation uint64     `json:"generation"`
	Extents    []uint32   `json:"extents"`
	Base       []uint32   `json:"base_extents,omitempty"` // in the order of its bytes
	Layers     []Layer    `json:"layers"`
	TotalBytes uint64     `json:"total_bytes"` // for data
	UsedBytes  uint64     `json:"used_bytes"`  // of it; the rest is free
	Findings   []Finding  `json:"findings"`

	lost      int  // records that are bad in both copies
	lostChunk bool // one of them is of a slot with a chunk
}

// Damaged reports whether the tree has lost something.
func (t *Tree) Damaged() bool {
	return slices.ContainsFunc(t.Findings, func(f Finding) bool { return f.Damage })
}

// Layer is one layer of a tree, with its space.
type Layer struct {
	ID              uint32     `json:"id"`
	Parent          uint32     `json:"parent"` // 0: none
	OverBase        bool       `json:"over_base,omitempty"`
	State           string     `json:"state"`
	Object          block.UUID `json:"object"`
	SizeBytes       uint64     `json:"size_bytes"`
	UsedBytes       uint64     `json:"used_bytes"`       // chunks of its own
	ReferencedBytes uint64     `json:"referenced_bytes"` // grains that it reads as data
	FreedBytes      uint64     `json:"freed_bytes"`      // chunks that come free if it is deleted
	// UnknownBytes are grains that may have been in records which are lost.
	UnknownBytes uint64 `json:"unknown_bytes,omitempty"`
}

// Finding is one thing that is not as it should be.
type Finding struct {
	// Damage means that content is lost or unknown. Anything else is what an interrupted program or
	// a power cut leaves, which is repaired when the tree is opened.
	Damage bool   `json:"damage"`
	Text   string `json:"text"`
}

// Check looks for trees in every extent of a drive of size bytes, whose extent 0 begins at first,
// and checks each. Its error is the drive's.
func Check(r io.ReaderAt, size, first int64) (*Report, error) {
	c := &checker{r: r, first: first, count: uint32(max(0, size-first) / perExtent)}
	if err := c.find(); err != nil {
		return nil, err
	}
	report := &Report{}
	for _, id := range slices.SortedFunc(maps.Keys(c.seen), func(a, b block.UUID) int { return bytes.Compare(a[:], b[:]) }) {
		t, err := c.check(id, c.seen[id])
		if err != nil {
			return nil, err
		}
		report.Trees = append(report.Trees, *t)
	}
	c.overlaps(report)
	return report, nil
}

type checker struct {
	r     io.ReaderAt
	first int64
	count uint32 // extents of the drive
	seen  map[block.UUID]*sighting
}

// sighting is what heads and superblocks say about a tree.
type sighting struct {
	homes []uint32 // extents with a copy of its superblock, or a head that says so
	heads map[uint32][]byte
}

func (c *checker) at(extent uint32) int64 { return c.first + int64(extent)*perExtent }

func (c *checker) read(n int, off int64) ([]byte, error) {
	b := make([]byte, n)
	if _, err := c.r.ReadAt(b, off); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read %d bytes at %d: %w", n, off, err)
	}
	return b, nil
}

var crcTable = crc32.MakeTable(crc32.Castagnoli)

func crc(parts ...[]byte) (sum uint32) {
	for _, p := range parts {
		sum = crc32.Update(sum, crcTable, p)
	}
	return sum
}

// headerOK checks the checksum that heads and superblocks have at byte 20.
func headerOK(b []byte, magic string) bool {
	return bytes.HasPrefix(b, []byte(magic)) && num32(b, 20) == crc(b[:20], make([]byte, 4), b[24:512])
}

func num16(b []byte, at int) uint16 { return binary.LittleEndian.Uint16(b[at:]) }
func num32(b []byte, at int) uint32 { return binary.LittleEndian.Uint32(b[at:]) }
func num64(b []byte, at int) uint64 { return binary.LittleEndian.Uint64(b[at:]) }

// find looks at each extent for a head, and for superblocks.
func (c *checker) find() error {
	c.seen = map[block.UUID]*sighting{}
	see := func(id block.UUID) *sighting {
		if c.seen[id] == nil {
			c.seen[id] = &sighting{heads: map[uint32][]byte{}}
		}
		return c.seen[id]
	}
	for e := range c.count {
		head, err := c.read(4096, c.at(e))
		if err != nil {
			return err
		}
		if headerOK(head, "weft tree extent") {
			s := see(block.UUID(head[24:40]))
			s.heads[e] = head
			if head[64] == 1 {
				s.homes = append(s.homes, e)
			}
		}
		for copy := int64(1); copy <= 2; copy++ {
			super, err := c.read(4096, c.at(e)+copy*mib)
			if err != nil {
				return err
			}
			// Data of a leg may look like a superblock; a real one knows in which extent it is.
			if headerOK(super, "weft layer tree\x00") && num32(super, 64) == e {
				s := see(block.UUID(super[32:48]))
				s.homes = append(s.homes, e)
			}
		}
	}
	return nil
}

// overlaps finds extents that two trees use.
func (c *checker) overlaps(r *Report) {
	owner := map[uint32]int{}
	for i := range r.Trees {
		for _, e := range slices.Concat(r.Trees[i].Extents, r.Trees[i].Base) {
			if other, ok := owner[e]; ok {
				r.Trees[i].damage("extent %d is also in use by tree %v", e, r.Trees[other].ID)
			}
			owner[e] = i
		}
	}
}

func (t *Tree) damage(format string, args ...any) {
	t.Findings = append(t.Findings, Finding{Damage: true, Text: fmt.Sprintf(format, args...)})
}

func (t *Tree) left(format string, args ...any) {
	t.Findings = append(t.Findings, Finding{Text: fmt.Sprintf(format, args...)})
}

func (c *checker) check(id block.UUID, s *sighting) (*Tree, error) {
	t := &Tree{ID: id}
	slices.Sort(s.homes)
	s.homes = slices.Compact(s.homes)
	if len(s.homes) == 0 {
		t.damage("no superblock, and no head of the home extent; extents with its heads: %v", slices.Sorted(maps.Keys(s.heads)))
		return t, nil
	}
	t.Home = s.homes[0]
	if len(s.homes) > 1 {
		t.damage("extents %v all look like the home extent", s.homes)
	}
	found, err := c.superblock(t)
	if err != nil || !found {
		return t, err
	}
	c.heads(t, s)
	for _, e := range t.Base {
		if e >= c.count {
			t.damage("extent %d of the base is beyond the end of the drive, which has %d", e, c.count)
		}
	}
	all, err := c.tables(t)
	if err != nil {
		return nil, err
	}
	t.unknown(all)
	t.count(all)
	return t, nil
}

// superblock reads both copies and takes over the newer good one.
func (c *checker) superblock(t *Tree) (bool, error) {
	var raw [2][]byte
	var good [2]*Tree
	for i := range raw {
		var err error
		if raw[i], err = c.read(mib, c.at(t.Home)+int64(i+1)*mib); err != nil {
			return false, err
		}
		good[i] = parseSuper(raw[i], t.ID, t.Home)
	}
	name := "AB"
	best := good[0]
	switch {
	case good[0] == nil && good[1] == nil && len(bytes.Trim(raw[1][:4096], "\x00")) == 0:
		t.left("it was never completely made, and held nothing")
		return false, nil
	case good[0] == nil && good[1] == nil:
		t.damage("both copies of the superblock are bad: no layer can be read")
		return false, nil
	case good[0] == nil || good[1] == nil:
		bad := 0
		if good[1] == nil {
			bad = 1
		}
		best = good[1-bad]
		t.left("copy %c of the superblock is bad", name[bad])
	case good[0].Generation != good[1].Generation:
		if good[1].Generation > good[0].Generation {
			best = good[1]
		}
		t.left("the copies of the superblock are of generations %d and %d", good[0].Generation, good[1].Generation)
	case !bytes.Equal(raw[0][:512], raw[1][:512]):
		t.damage("the copies of the superblock differ, and both are of generation %d", good[0].Generation)
	}
	t.Drive, t.Generation, t.Extents, t.Base, t.Layers = best.Drive, best.Generation, best.Extents, best.Base, best.Layers
	t.Findings = append(t.Findings, best.Findings...)
	return true, nil
}

// parseSuper reads a copy of the superblock; nil if it is bad.
//
// Branches: a check of each field.
//
// Long: the fields in their order.
func parseSuper(b []byte, id block.UUID, home uint32) *Tree {
	version, baseRuns := num32(b, 16), num32(b, 88)
	if !headerOK(b, "weft layer tree\x00") || version != 1 && version != 2 || block.UUID(b[32:48]) != id || num32(b, 64) != home {
		return nil
	}
	length := num32(b, 80)
	if uint64(length) > uint64(len(b)-512) || crc(b[512:512+length]) != num32(b, 84) {
		return nil
	}
	t := &Tree{Drive: block.UUID(b[48:64]), Generation: num64(b, 24)}
	rest := b[512 : 512+length]
	for range num32(b, 76) {
		if len(rest) < 8 || num32(rest, 4) > 1<<20 {
			return nil
		}
		for i := range num32(rest, 4) {
			e := num32(rest, 0) + i
			if len(t.Extents) > 0 && t.Extents[len(t.Extents)-1] >= e {
				t.damage("superblock: extents are out of order at %d", e)
			}
			t.Extents = append(t.Extents, e)
		}
		rest = rest[8:]
	}
	for range baseRuns {
		if len(rest) < 8 || num32(rest, 4) > 1<<20 || len(t.Base) > 1<<22 {
			return nil
		}
		for i := range num32(rest, 4) {
			t.Base = append(t.Base, num32(rest, 0)+i)
		}
		rest = rest[8:]
	}
	t.checkBase(version)
	over := 0
	size := map[uint32]uint64{}
	for range num32(b, 72) {
		if len(rest) < 48 {
			return nil
		}
		note := (int(num16(rest, 10)) + 7) / 8 * 8
		if len(rest) < 48+note {
			return nil
		}
		l := Layer{ID: num32(rest, 0), Parent: num32(rest, 4), Object: block.UUID(rest[16:32]), SizeBytes: num64(rest, 32), OverBase: rest[9] == 1}
		if l.State = [256]string{1: "open", 2: "frozen", 3: "doomed"}[rest[8]]; l.State == "" {
			t.damage("layer %d is in state %d", l.ID, rest[8])
		}
		parent, known := size[l.Parent]
		if l.OverBase {
			over++
		}
		switch {
		case rest[9] > 1 || l.OverBase && l.Parent != 0:
			t.damage("layer %d: its byte 9 is %d, and its parent is %d", l.ID, rest[9], l.Parent)
		case l.ID == 0 || l.ID >= num32(b, 68) || len(t.Layers) > 0 && t.Layers[len(t.Layers)-1].ID >= l.ID:
			t.damage("layer %d: its id is out of order, or not below the next one, %d", l.ID, num32(b, 68))
		case l.Parent != 0 && !known:
			t.damage("layer %d: its parent %d is not before it", l.ID, l.Parent)
		case l.Parent != 0 && parent > l.SizeBytes:
			t.damage("layer %d is smaller than its parent %d", l.ID, l.Parent)
		case l.SizeBytes%4096 != 0 || l.SizeBytes == 0:
			t.damage("layer %d has %d bytes", l.ID, l.SizeBytes)
		}
		size[l.ID] = l.SizeBytes
		t.Layers, rest = append(t.Layers, l), rest[48+note:]
	}
	if len(rest) != 0 {
		return nil
	}
	if want := min(len(t.Base), 1); over != want {
		t.damage("superblock: %d layers are over a base of %d extents", over, len(t.Base))
	}
	return t
}

// checkBase looks at the extents of the base.
func (t *Tree) checkBase(version uint32) {
	if (version == 2) != (len(t.Base) > 0) {
		t.damage("superblock: version %d with %d extents of a base", version, len(t.Base))
	}
	seen := map[uint32]bool{}
	for _, e := range t.Extents {
		seen[e] = true
	}
	for _, e := range t.Base {
		if seen[e] {
			t.damage("extent %d is in the base, and is another one of the tree too", e)
		}
		seen[e] = true
	}
}

// heads compares the heads with the superblock's list of extents.
func (c *checker) heads(t *Tree, s *sighting) {
	used := map[uint32]bool{}
	for _, e := range t.Extents {
		used[e] = true
		head := s.heads[e]
		switch {
		case e >= c.count:
			t.damage("extent %d is beyond the end of the drive, which has %d", e, c.count)
		case head == nil:
			t.left("extent %d has no good head", e)
		case num32(head, 16) != 1 || num32(head, 56) != e || block.UUID(head[40:56]) != t.Drive || head[60] != 20 || head[61] != 14 || num16(head, 62) != records || (head[64] == 1) != (e == t.Home):
			t.left("the head of extent %d is not that of this place", e)
		}
	}
	if !used[t.Home] {
		t.damage("the superblock does not list its own extent %d", t.Home)
	}
	for _, e := range slices.Sorted(maps.Keys(s.heads)) {
		if !used[e] {
			t.left("extent %d has a head, and the superblock does not list it: it was being taken", e)
		}
	}
}

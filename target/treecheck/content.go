// SPDX-License-Identifier: Apache-2.0

package treecheck

import (
	"fmt"
	"io"
	"math"
	"slices"

	"weft.dev/weft/proto/block"
)

// Content returns what a leg's head or a snapshot reads as, from the drive on which Check has found the
// tree. Nothing may change on the drive meanwhile. Reads of what is unknown fail with ErrUnknown.
func (t *Tree) Content(r io.ReaderAt, first int64, object block.UUID) (*io.SectionReader, error) {
	l := slices.IndexFunc(t.Layers, func(l Layer) bool { return l.Object == object && l.State != "doomed" })
	if l < 0 {
		return nil, fmt.Errorf("tree %v: no layer is %v", t.ID, object)
	}
	scratch := *t // its findings are known
	scratch.lost = 0
	drive := &checker{r: r, first: first, count: math.MaxUint32}
	all, err := drive.tables(&scratch)
	if err != nil {
		return nil, err
	}
	c := &content{drive: drive, tree: t, layers: map[uint32]Layer{}, top: t.Layers[l].ID, records: all, base: t.Base}
	for _, l := range t.Layers {
		c.layers[l.ID] = l
	}
	return io.NewSectionReader(c, 0, int64(t.Layers[l].SizeBytes)), nil
}

// content is a layer as the layers below it complete it.
type content struct {
	drive   *checker
	tree    *Tree
	layers  map[uint32]Layer
	top     uint32
	records map[uint32][]record // by chunk
	base    []uint32
}

// ReadAt implements io.ReaderAt.
func (c *content) ReadAt(p []byte, off int64) (n int, err error) {
	for n < len(p) {
		at := off + int64(n)
		part := p[n:min(len(p), n+int(kib16-at%kib16))]
		if err := c.grain(part, at); err != nil {
			return n, err
		}
		n += len(part)
	}
	return n, nil
}

// grain reads a part of one grain.
func (c *content) grain(p []byte, at int64) error {
	clear(p)
	of, bit := c.records[uint32(at/mib)], uint64(1)<<(at%mib/kib16)
	if c.tree.lost > 0 && c.tree.fault(c.top, uint32(at/mib), of, c.layers)&bit != 0 {
		return fmt.Errorf("read at %d: %w", at, ErrUnknown)
	}
	based := false
	for id := c.top; id != 0; id = c.layers[id].Parent {
		based = c.layers[id].OverBase
		i := slices.IndexFunc(of, func(r record) bool { return r.layer == id && r.have&bit != 0 })
		if i < 0 {
			continue
		}
		if of[i].zero&bit == 0 {
			_, err := c.drive.r.ReadAt(p, c.drive.at(of[i].extent)+int64(of[i].slot)*mib+at%mib)
			return err
		}
		return nil
	}
	if n := at / perExtent; based && n < int64(len(c.base)) {
		_, err := c.drive.r.ReadAt(p, c.drive.at(c.base[n])+at%perExtent)
		return err
	}
	return nil
}

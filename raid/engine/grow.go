// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"

	"weft.dev/weft/proto/block"
)

// Grow makes the volume larger, also with IO under way. A volume never shrinks. Existing
// bytes stay where they are, because the place of a byte does not depend on the size.
// Rebuilds continue.
//
// All legs in use must already have room; otherwise Grow returns an error and changes
// nothing. The new part must durably read as zeroes on every leg, also on absent legs that
// will come back: it counts as equal on all of them.
func (v *Volume) Grow(size block.Size) error {
	v.change.Lock()
	defer v.change.Unlock()
	old := block.Size(v.size.Load())
	switch {
	case size < old:
		return fmt.Errorf("grow volume from %v to %v: it never shrinks", old, size)
	case size%v.cfg.BlockSize != 0 || size > maxSize:
		return fmt.Errorf("grow volume to %v: not a multiple of its blocks, or more than %v", size, maxSize)
	}
	if err := v.haveRoom(size); err != nil {
		return fmt.Errorf("grow volume to %v: %w", size, err)
	}
	for k := range v.columns {
		c := &v.columns[k]
		c.lock()
		c.grow(size)
		c.unlock()
	}
	v.size.Store(int64(size)) // last: IO that is accepted from now on has room in all columns
	return nil
}

// haveRoom returns an error if a leg in use has no room for a volume of the given size.
func (v *Volume) haveRoom(size block.Size) error {
	want := v.cfg.Layout.LegSize(size)
	for k := range v.columns {
		c := &v.columns[k]
		for i := range c.legs {
			c.shards[0].mu.Lock()
			dev := c.legs[i].dev
			c.shards[0].mu.Unlock()
			if dev == nil {
				continue
			}
			if g := dev.Geometry(); g.Size < want {
				return fmt.Errorf("leg %d.%d has %v, want %v", k, i, g.Size, want)
			}
		}
	}
	return nil
}

// grow makes room in the bitmaps; no leg misses the new regions. The column is locked.
func (c *column) grow(volume block.Size) {
	regions := c.v.plan.regions(int64(volume))
	c.size = c.v.plan.legSize(int64(volume))
	for i := range c.legs {
		l := &c.legs[i]
		for _, b := range []*bitmap{l.missed, l.anew, l.cached, l.flushing} {
			if b != nil {
				b.grow(regions)
			}
		}
	}
}

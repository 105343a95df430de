// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"fmt"

	"weft.dev/weft/proto/block"
)

// Grow makes the volume larger, with IO under way; it never shrinks. A byte of the
// old size stays where it is, because where a byte lies does not depend on the
// size. Rebuilds go on.
//
// All legs in use must have room before, else it is an error and nothing has
// changed. What is new must read as zeroes, durably, on every leg, also on those
// that are away and will come back: it counts as equal on all of them.
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
	v.size.Store(int64(size)) // last: what is taken from now on finds room in all columns
	return nil
}

// haveRoom checks that all legs in use have room for a volume of a size.
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

// grow makes room in the maps; nobody misses what is new. The column is locked.
func (c *column) grow(volume block.Size) {
	regions := c.v.plan.regions(int64(volume))
	c.size = c.v.plan.legSize(int64(volume))
	for i := range c.legs {
		l := &c.legs[i]
		for _, b := range []*bitmap{l.missed, l.cached, l.flushing} {
			if b != nil {
				b.grow(regions)
			}
		}
	}
}

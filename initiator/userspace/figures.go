// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"cmp"
	"maps"
	"slices"

	"weft.dev/weft/initiator/keeper"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/engine"
)

// counted is a volume whose I/O is counted, for goroutines other than the keeper's.
type counted struct {
	name   block.VolumeName
	volume *engine.Volume
	slots  map[volume.Place]slot
}

// publishCounted tells other goroutines which volume is here, and which legs it has.
func (k *Keeper) publishCounted() {
	if k.stack == nil || k.stack.wanted.Heal { // what it reads and waits for is nobody's
		k.counted.Store(nil)
		return
	}
	k.counted.Store(&counted{k.stack.wanted.Name, k.stack.volume, maps.Clone(k.memory.slots)})
}

// Figures returns the I/O of the volume; nil if it is not here. It may be called at any time.
func (k *Keeper) Figures() *keeper.Figures {
	c := k.counted.Load()
	if c == nil {
		return nil
	}
	now := c.volume.Figures()
	f := &keeper.Figures{Key: c.volume, Volume: k.volume, Name: c.name, Users: now.Volume, Held: now.Held, Latencies: true}
	for at, s := range c.slots {
		f.Legs = append(f.Legs, keeper.LegFigures{Column: at.Column, Copy: at.Copy, Leg: s.leg, Node: s.node, Sent: now.Legs[at.Column][at.Copy]})
	}
	slices.SortFunc(f.Legs, func(a, b keeper.LegFigures) int {
		return cmp.Or(cmp.Compare(a.Column, b.Column), cmp.Compare(a.Copy, b.Copy))
	})
	return f
}

// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"weft.dev/weft/initiator/fabrics"
	"weft.dev/weft/initiator/keeper"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/dm/mirror"
)

// recordInSync tells the manager that legs have caught up; until it answers they count as
// stale. What was copied to them is flushed first: a leg in sync must have everything that the
// volume's user has flushed, even after a power loss.
func (k *kernelKeeper) recordInSync(ctx context.Context, s *seen, o volume.RecordInSync) error {
	if !k.MayAsk() {
		return volume.ErrLater
	}
	for _, l := range o.Legs {
		// The flush is not part of the request: if a leg hangs, its flush ends only when the
		// leg is recorded stale.
		if err := k.flushLeg(ctx, s, l.Leg); err != nil {
			return err
		}
	}
	return k.RecordInSync(ctx, o)
}

func (k *kernelKeeper) flushLeg(ctx context.Context, s *seen, leg block.LegID) error {
	h := s.legs[leg].head
	flush := func() error { return k.kernel.host.Flush(h, k.agent.cfg.IOTimeout) }
	return k.await(ctx, "flush "+h.Name, keeper.Patience, flush, func(err error) error { return err })
}

// flushLegs makes the drives of some legs write out their caches.
func (k *kernelKeeper) flushLegs(ctx context.Context, s *seen, o volume.FlushLegs) error {
	var heads []fabrics.Head
	for _, l := range o.Legs {
		if c := s.columns[l.Column]; c.Kind != mirror.ShapeNothing && !c.has(s.legs[l.Leg].device) {
			return fmt.Errorf("leg %s: its column uses another device", l.Leg)
		}
		heads = append(heads, s.legs[l.Leg].head)
	}
	if k.Busy(o.String()) {
		return volume.ErrLater
	}
	m := &k.memory.Memory
	return k.await(ctx, o.String(), keeper.Patience, func() error {
		for _, h := range heads {
			if err := k.kernel.host.Flush(h, k.agent.cfg.IOTimeout); err != nil {
				return err
			}
		}
		return nil
	}, func(err error) error {
		if err == nil {
			m.Flushed(o, time.Now())
		}
		return err
	})
}

// flushEqualized flushes the copies that were made equal before the device is available: the
// record says what they hold, so it must survive a power loss.
func (k *kernelKeeper) flushEqualized(w *volume.Wanted, s *seen) error {
	if !w.Equalize || w.Layout.Copies == 1 {
		return nil
	}
	for _, id := range slices.SortedFunc(maps.Keys(s.legs), func(a, b block.LegID) int { return bytes.Compare(a.UUID[:], b.UUID[:]) }) {
		l := s.legs[id]
		if s.Legs[id].Live && slices.ContainsFunc(s.columns, func(c columnSeen) bool { return c.has(l.device) }) {
			if err := k.kernel.host.Flush(l.head, k.agent.cfg.IOTimeout); err != nil {
				return err
			}
		}
	}
	return nil
}

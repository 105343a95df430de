// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"

	"weft.dev/weft/initiator/keeper"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
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
	h := s.legs[leg].head()
	flush := func() error { return k.kernel.host.Flush(h) }
	return k.await(ctx, "flush "+h.Name, keeper.Patience, flush, func(err error) error { return err })
}

// flushLegs makes the drives of some legs write out their caches.
func (k *kernelKeeper) flushLegs(ctx context.Context, s *seen, o volume.FlushLegs) error {
	for _, l := range o.Legs {
		if !s.columns[l.Column].has(s.legs[l.Leg].device) {
			return fmt.Errorf("leg %s: its column uses another device", l.Leg)
		}
		if err := k.flushLeg(ctx, s, l.Leg); err != nil {
			return fmt.Errorf("leg %s: %w", l.Leg, err)
		}
		// The kernel sends no flush to a drive without a cache. A read shows that it is there.
		h := s.legs[l.Leg].head()
		probe := func() error { return k.kernel.host.Probe(h) }
		if err := k.await(ctx, "read "+h.Name, keeper.Patience, probe, func(err error) error { return err }); err != nil {
			return fmt.Errorf("leg %s: %w", l.Leg, err)
		}
	}
	return nil
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
			if err := k.kernel.host.Flush(l.head()); err != nil {
				return err
			}
		}
	}
	return nil
}

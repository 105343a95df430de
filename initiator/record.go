// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"bytes"
	"context"
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
		h := s.legs[l.Leg].head()
		// The flush is not part of the request: if a leg hangs, its flush ends only when the
		// leg is recorded stale.
		flush := func() error { return k.kernel.host.Flush(h) }
		if err := k.await(ctx, "flush "+h.Name, keeper.Patience, flush, func(err error) error { return err }); err != nil {
			return err
		}
	}
	return k.RecordInSync(ctx, o)
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

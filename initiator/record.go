// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// recordStale tells the manager of lost legs and returns when it is durable.
// Until then nothing may be acknowledged that they miss.
func (k *kernelKeeper) recordStale(ctx context.Context, s *seen, o order) error {
	if time.Now().Before(k.retry) {
		return errLater
	}
	began := time.Now()
	request := &pb.RecordStaleRequest{
		Node: string(k.agent.cfg.Node), VolumeId: k.volume.String(), Epoch: uint64(k.memory.Epoch), Reason: o.legs[0].why,
	}
	for _, l := range o.legs {
		request.LegIds = append(request.LegIds, l.leg.String())
		if k.losses[l.leg] == nil {
			k.losses[l.leg] = &loss{column: l.column, since: l.since, detected: began}
			k.log.Warn("leg lost", "leg", l.leg.String(), "column", l.column, "why", l.why, "detect", began.Sub(l.since))
			k.agent.lostLeg()
		}
	}
	mem := k.memory
	return k.ask(ctx, func(ctx context.Context) error {
		_, err := k.agent.cfg.Manager.RecordStale(ctx, request)
		return err
	}, func() {
		for _, l := range o.legs {
			mem.records.NoteStale(l.leg, l.revision)
			if loss := k.losses[l.leg]; loss != nil && loss.recorded.IsZero() {
				loss.recorded = time.Now()
				k.log.Info("leg recorded stale", "leg", l.leg.String(), "record", loss.recorded.Sub(loss.detected))
			}
		}
	})
}

// recordInSync tells the manager that legs have caught up; until its answer they
// count as stale. What was copied to them is flushed first: a leg in sync has
// everything that the volume's user has flushed, also after it lost its power.
func (k *kernelKeeper) recordInSync(ctx context.Context, s *seen, o order) error {
	if time.Now().Before(k.retry) || k.busy[asking] {
		return errLater
	}
	for _, l := range o.legs {
		h := s.legs[l.leg].head()
		// Apart from the asking: the flush of a leg that hangs ends only when it is
		// recorded stale.
		flush := func() error { return k.m.host.Flush(h) }
		if err := k.apart(ctx, "flush "+h.Name, attachment.Patience, flush, func(err error) error { return err }); err != nil {
			return err
		}
	}
	request := &pb.RecordInSyncRequest{Node: string(k.agent.cfg.Node), VolumeId: k.volume.String(), Epoch: uint64(k.memory.Epoch)}
	for _, l := range o.legs {
		request.Legs = append(request.Legs, &pb.RebuiltLeg{LegId: l.leg.String(), Revision: l.revision, BytesCopied: uint64(l.copied)})
	}
	mem := k.memory
	return k.ask(ctx, func(ctx context.Context) error {
		_, err := k.agent.cfg.Manager.RecordInSync(ctx, request)
		return err
	}, func() {
		for _, l := range o.legs {
			mem.records.NoteInSync(l.leg, l.revision)
			k.agent.resynced(l.copied)
			k.log.Info("leg in sync", "leg", l.leg.String(), "copied", l.copied.String())
		}
	})
}

// flushEqualized has the copies that were made equal flushed before the device is
// there for anybody: what they hold by the record must outlive their power.
func (k *kernelKeeper) flushEqualized(w *attachment.Wanted, s *seen) error {
	if !w.Equalize || w.Layout.Copies == 1 {
		return nil
	}
	for _, id := range slices.SortedFunc(maps.Keys(s.legs), func(a, b block.LegID) int { return bytes.Compare(a.UUID[:], b.UUID[:]) }) {
		l := s.legs[id]
		if l.live && slices.ContainsFunc(s.columns, func(c columnSeen) bool { return c.has(l.device) }) {
			if err := k.m.host.Flush(l.head()); err != nil {
				return err
			}
		}
	}
	return nil
}

const asking = "ask the volume manager for a record"

// ask asks the manager for a record, one at a time: the order of its answers is
// then that of its records. A manager that does not answer is waited for apart,
// since the lease ends meanwhile.
func (k *kernelKeeper) ask(ctx context.Context, request func(context.Context) error, done func()) error {
	if k.busy[asking] {
		return errLater
	}
	return k.apart(ctx, asking, attachment.Patience, func() error {
		ctx, cancel := context.WithTimeout(ctx, attachment.RecordTimeout)
		defer cancel()
		return request(ctx)
	}, func(err error) error {
		if err := k.answer(err); err != nil {
			return err
		}
		done()
		return nil
	})
}

// answer remembers what the manager said, and when to ask again if it said no.
func (k *kernelKeeper) answer(err error) error {
	if err == nil {
		k.recorded = ""
		return nil
	}
	k.retry = time.Now().Add(attachment.RetryInterval)
	k.recorded = attachment.Refusal(err)
	return fmt.Errorf("volume manager: %s", k.recorded)
}

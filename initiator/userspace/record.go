// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"fmt"
	"time"

	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/proto/pb"
)

// loss is a leg's way out, for the breakdown of the stall.
type loss struct{ since, detected, recorded time.Time }

// recordStale tells the manager of lost legs and returns when it is durable.
// Until then nothing may be acknowledged that they miss.
func (k *Keeper) recordStale(ctx context.Context, o order) error {
	if time.Now().Before(k.retry) {
		return errLater
	}
	request := &pb.RecordStaleRequest{
		Node: string(k.cfg.Node), VolumeId: k.volume.String(), Epoch: uint64(k.memory.epoch), Reason: o.legs[0].why,
	}
	now := time.Now()
	for _, l := range o.legs {
		request.LegIds = append(request.LegIds, l.leg.String())
		if k.losses[l.leg] == nil {
			k.losses[l.leg] = &loss{since: l.since, detected: now}
			k.log.Warn("leg lost", "leg", l.leg.String(), "column", l.column, "why", l.why, "detect", now.Sub(l.since))
			k.cfg.Meter.LegLost()
		}
	}
	mem := k.memory
	return k.ask(ctx, func(ctx context.Context) error {
		_, err := k.cfg.Manager.RecordStale(ctx, request)
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
// count as stale.
func (k *Keeper) recordInSync(ctx context.Context, o order) error {
	if time.Now().Before(k.retry) {
		return errLater
	}
	request := &pb.RecordInSyncRequest{Node: string(k.cfg.Node), VolumeId: k.volume.String(), Epoch: uint64(k.memory.epoch)}
	for _, l := range o.legs {
		request.Legs = append(request.Legs, &pb.RebuiltLeg{LegId: l.leg.String(), Revision: l.revision, BytesCopied: uint64(l.copied)})
	}
	mem := k.memory
	return k.ask(ctx, func(ctx context.Context) error {
		_, err := k.cfg.Manager.RecordInSync(ctx, request)
		return err
	}, func() {
		for _, l := range o.legs {
			mem.records.NoteInSync(l.leg, l.revision)
			k.cfg.Meter.Resynced(l.copied)
			k.log.Info("leg in sync", "leg", l.leg.String(), "copied", l.copied.String())
		}
	})
}

// ask makes a request for a record, one at a time, and does done if it was granted.
func (k *Keeper) ask(ctx context.Context, request func(context.Context) error, done func()) error {
	return k.apart(ctx, "ask the volume manager for a record", attachment.RecordTimeout, request, func(err error) error {
		if err != nil {
			k.retry = time.Now().Add(attachment.RetryInterval)
			k.recorded = attachment.Refusal(err)
			return fmt.Errorf("volume manager: %s", k.recorded)
		}
		k.recorded = ""
		done()
		return nil
	})
}

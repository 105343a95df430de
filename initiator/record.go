// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"fmt"
	"time"

	"weft.dev/weft/initiator/attachment"
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
// count as stale.
func (k *kernelKeeper) recordInSync(ctx context.Context, o order) error {
	if time.Now().Before(k.retry) {
		return errLater
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

// ask asks the manager for a record, one at a time: the order of its answers is
// then that of its records. A manager that does not answer is waited for apart,
// since the lease ends meanwhile.
func (k *kernelKeeper) ask(ctx context.Context, request func(context.Context) error, done func()) error {
	const what = "ask the volume manager for a record"
	if k.busy[what] {
		return errLater
	}
	return k.apart(ctx, what, patience, func() error {
		ctx, cancel := context.WithTimeout(ctx, recordTimeout)
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
	k.retry = time.Now().Add(retryInterval)
	k.recorded = attachment.Refusal(err)
	return fmt.Errorf("volume manager: %s", k.recorded)
}

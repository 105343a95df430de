// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"

	"weft.dev/weft/initiator/attachment"
)

// recordStale tells the manager of lost legs and returns when it is durable.
// Until then nothing may be acknowledged that they miss.
func (k *Keeper) recordStale(ctx context.Context, o order) error {
	if !k.recorder.Due() {
		return errLater
	}
	return k.ask(ctx, k.recorder.Stale(k.memory.epoch, k.memory.records, o.changes()))
}

// recordInSync tells the manager that legs have caught up; until its answer they
// count as stale.
func (k *Keeper) recordInSync(ctx context.Context, o order) error {
	if !k.recorder.Due() {
		return errLater
	}
	return k.ask(ctx, k.recorder.InSync(k.memory.epoch, k.memory.records, o.changes()))
}

// ask asks the manager for a record, one at a time.
func (k *Keeper) ask(ctx context.Context, r attachment.Request) error {
	return k.apart(ctx, "ask the volume manager for a record", attachment.RecordTimeout, r.Send, r.Done)
}

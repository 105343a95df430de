// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"time"

	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/initiator/evidence"
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

// note writes down which legs are in sync, and returns when that is durable. A disk
// that hangs is waited for apart: the lease ends meanwhile.
func (k *Keeper) note(ctx context.Context, n evidence.Note) error {
	if k.cfg.Evidence == nil {
		k.noted = n
		return nil
	}
	if time.Now().Before(k.noteAgain) {
		return errLater
	}
	write := func(context.Context) error { return k.cfg.Evidence.Write(k.volume, n) }
	return k.apart(ctx, "note which legs are in sync", callTimeout, write, func(err error) error {
		k.noteError = ""
		if err != nil {
			k.noteError = err.Error()
		}
		if k.noted = k.cfg.Evidence.Of(k.volume); !k.noted.Equal(n) {
			k.noteAgain = time.Now().Add(evidence.Again)
		}
		return err
	})
}

// ask asks the manager for a record, one at a time.
func (k *Keeper) ask(ctx context.Context, r attachment.Request) error {
	return k.apart(ctx, "ask the volume manager for a record", attachment.RecordTimeout, r.Send, r.Done)
}

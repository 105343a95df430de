// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"fmt"
	"time"

	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/raid/engine"
)

// doAll does orders in turn. After one that fails those that rely on it are left;
// what legs do when they come does not hold up the rest, nor do the device's users.
func (k *Keeper) doAll(ctx context.Context, w *attachment.Wanted, s *seen, orders []order) (did bool, failed []string) {
	for _, o := range orders {
		err := k.do(ctx, w, s, o)
		switch {
		case err == nil:
			did = did || o.op != opConnect && o.op != opEqualize
			k.log.Debug("order done", "order", o.String())
			continue
		case !errors.Is(err, errLater):
			failed = append(failed, fmt.Sprintf("%v: %v", o, err))
		}
		switch o.op {
		case opConnect, opAdd, opRecovered, opPromote, opRenew, opDisconnect, opClose, opGrow, opResize:
		case opNote:
			if !s.noted.Within(o.note) {
				return false, failed
			}
		default:
			return false, failed
		}
	}
	return did && len(failed) == 0, failed
}

func (k *Keeper) do(ctx context.Context, w *attachment.Wanted, s *seen, o order) error {
	switch o.op {
	case opConnect:
		return k.connect(ctx, s, w, o)
	case opSuspend:
		k.log.Warn("volume suspended: a leg is silent and cannot be recorded stale")
		k.stack.volume.Suspend()
		return nil
	case opResume:
		k.log.Info("volume resumed: all legs answer")
		k.stack.volume.Resume()
		return nil
	case opRecord:
		return k.recordStale(ctx, o)
	case opNote:
		return k.note(ctx, o.note)
	case opDrop:
		return k.drop(o)
	case opCut:
		k.cut(o.nqn)
		return nil
	case opBuild:
		return k.build(w, o)
	case opEqualize:
		return k.equalize(ctx)
	case opAdd:
		return k.add(w, o.legs[0])
	case opRecovered:
		return k.recordInSync(ctx, o)
	case opRenew:
		return k.renew(w, o.legs[0])
	case opGiveUp:
		k.memory.over = o.end
		k.path.gaveUp(k.volume, k.memory.epoch, o.end)
		k.log.Error("epoch given up", "epoch", k.memory.epoch, "why", o.end.Why, "writes_lost", o.end.WritesLost)
		return nil
	case opPromote:
		return k.stack.volume.Promote(o.legs[0].column, o.legs[0].copy)
	case opExport:
		return k.export(ctx, w)
	case opGrow:
		return k.grow(w)
	case opResize:
		return k.resize(ctx)
	case opClose:
		return k.closeDevice(ctx, o.force)
	case opFlush:
		return k.flush(ctx)
	case opDismantle:
		return k.dismantle(ctx, o.clean)
	case opAbort:
		return k.abort(ctx)
	case opDisconnect:
		return k.disconnect(ctx, o.nqn)
	case opForget:
		if len(k.conns) > 0 {
			return errLater // they end by themselves
		}
		k.forget(w, o.clean)
		return nil
	}
	panic("no such order: " + o.String())
}

// drop has the volume go on without legs.
func (k *Keeper) drop(o order) error {
	var failed error
	for _, l := range o.legs {
		if err := k.stack.volume.Drop(l.column, l.copy); err != nil {
			failed = errors.Join(failed, err)
			continue
		}
		k.log.Info("leg dropped", "leg", l.leg.String(), "column", l.column, "why", l.why)
		k.recorder.Released(l.leg)
	}
	return failed
}

// add begins the rebuild of a leg.
func (k *Keeper) add(w *attachment.Wanted, l legAt) error {
	v := k.stack.volume
	state := engine.Rebuilding
	if w.ReadOnly {
		state = engine.InSync
	}
	if err := v.Add(l.column, l.copy, k.devices[l.leg], state, l.full); err != nil {
		return err
	}
	slot := slotOf(w, l)
	slot.tracked = true // whatever is dropped now, the engine knows what it still misses
	slot.dirty = v.Status().Legs[l.column][l.copy].Resync.Total
	k.memory.slots[l.place] = slot
	k.log.Info("leg is back", "leg", l.leg.String(), "column", l.column, "to_copy", slot.dirty.String(), "full", l.full)
	return nil
}

// renew goes on with a leg that has come back without what only a cache had held,
// and lacks nothing.
func (k *Keeper) renew(w *attachment.Wanted, l legAt) error {
	if err := k.stack.volume.Renew(l.column, l.copy, k.devices[l.leg]); err != nil {
		return err
	}
	slot := slotOf(w, l)
	slot.tracked, slot.dirty = k.memory.slots[l.place].tracked, k.memory.slots[l.place].dirty
	k.memory.slots[l.place] = slot
	k.log.Warn("leg lost its drive's cache, but no unflushed writes", "leg", l.leg.String(), "column", l.column)
	k.conns[slot.nqn].connection.Rescan() // what was sent to the old identity is given back
	return nil
}

// abort takes the stack away, whoever uses it.
func (k *Keeper) abort(ctx context.Context) error {
	st, device := k.stack, k.stack.device
	return k.apart(ctx, "remove the volume", callTimeout, func(ctx context.Context) error {
		return st.abort(ctx, device)
	}, func(err error) error {
		if err == nil && k.stack == st {
			k.stack = nil
			k.memory.slots = map[place]slot{}
		}
		return err
	})
}

// forget ends an epoch. The outcome of a detach is remembered, since the manager
// asks until it has it.
func (k *Keeper) forget(w *attachment.Wanted, clean bool) {
	was := k.memory
	if k.cfg.Evidence != nil && w == nil {
		k.cfg.Evidence.Leave(k.volume, was.gone && was.clean)
	}
	k.memory = newMemory(0, time.Now())
	k.recorder.Forget()
	clear(k.devices)
	clear(k.pulses)
	if w != nil && w.Detach && (was.of(w) || was.epoch == 0) {
		k.memory.epoch, k.memory.grant, k.memory.gone, k.memory.clean = w.Epoch, w.Grant, true, clean
		k.log.Info("detached", "epoch", w.Epoch, "clean", clean)
	}
}

// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"time"

	"weft.dev/weft/initiator/lists"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/raid/checkpoint"
	"weft.dev/weft/raid/engine"
)

// Apply implements keeper.Path.
//
// Branches: one for each kind of order.
//
// Long: likewise.
func (k *Keeper) Apply(ctx context.Context, w *volume.Wanted, o volume.Order) error {
	switch o := o.(type) {
	case volume.Connect:
		return k.connect(ctx, w, o)
	case volume.HoldIO:
		k.memory.HoldBegan(o, time.Now())
		k.log.Warn("volume suspended", "for", o.For())
		k.stack.volume.Suspend()
		go k.pokeAtRest(ctx, k.stack.volume)
		return nil
	case volume.ResumeIO:
		k.log.Info("volume resumed: all legs answer")
		k.stack.volume.Resume()
		return nil
	case volume.Drop:
		return k.drop(o)
	case volume.Move:
		k.move(o)
		return nil
	case volume.Try:
		return k.portals.Try(ctx, o.Path)
	case volume.Cut:
		k.cut(o.Path)
		return nil
	case volume.Build:
		return k.build(ctx, w, o)
	case volume.Equalize:
		return k.equalize(ctx)
	case volume.Add:
		return k.add(ctx, w, o)
	case volume.SetRebuildRate:
		k.stack.volume.SetRebuildRate(o.Rate)
		k.stack.rebuildRate = o.Rate
		return nil
	case volume.RecordInSync:
		return k.RecordInSync(ctx, o)
	case volume.Renew:
		return k.renew(w, o.At)
	case volume.GiveUp:
		k.path.gaveUp(k.volume, k.memory.Epoch, &o.Over)
		return nil
	case volume.Promote:
		return k.stack.volume.Promote(o.Column, o.Copy)
	case volume.MakeDevice:
		return k.export(ctx, w)
	case volume.Grow:
		return k.grow(w)
	case volume.GrowDevice:
		return k.resize(ctx)
	case volume.CloseDevice:
		return k.closeDevice(ctx, o.Force)
	case volume.StartScrub, volume.StopScrub, volume.ProceedScrub, volume.SetScrubRate:
		return k.scrub(ctx, o)
	case volume.Flush:
		return k.flush(ctx)
	case volume.FlushLegs:
		return k.flushLegs(ctx, o)
	case volume.Readmit:
		return k.stack.volume.Withhold(o.Column, o.Copy, false)
	case volume.Dismantle:
		return k.dismantle(ctx, o.Clean)
	case volume.Abort:
		return k.abort(ctx)
	case volume.Disconnect:
		return k.disconnect(ctx, o.Path)
	case volume.Forget:
		if len(k.conns) > 0 {
			return volume.ErrLater // paths reconnect and end on their own
		}
		k.forget(w, o.Clean)
		return nil
	}
	panic("no such order: " + o.String())
}

// drop lets the volume continue without some legs.
func (k *Keeper) drop(o volume.Drop) error {
	var failed error
	for _, l := range o.Legs {
		if err := k.stack.volume.Drop(l.Column, l.Copy); err != nil {
			failed = errors.Join(failed, err)
			continue
		}
		k.log.Info("leg dropped", "leg", l.Leg.String(), "column", l.Column, "why", l.Why.Text)
		k.Released(l.Leg)
	}
	return failed
}

// add starts the rebuild of a leg. If this host does not know what the leg lacks, the targets may.
func (k *Keeper) add(ctx context.Context, w *volume.Wanted, l volume.Add) error {
	st := k.stack
	before := st.listed[l.Column]
	switch {
	case !l.Full || w.ReadOnly || before == nil:
		return k.addBehind(w, l, nil)
	case !before.known:
		return volume.ErrLater
	case before.err != nil:
		return k.addBehind(w, l, nil)
	}
	what := "ask what leg " + l.Leg.String() + " lacks"
	if k.Busy(what) {
		return volume.ErrLater
	}
	d := k.devices[l.Leg]
	var list checkpoint.List
	return k.await(ctx, what, lists.ListTimeout, func(ctx context.Context) (err error) {
		list, err = listOf(ctx, d)
		return err
	}, func(err error) error {
		if k.stack != st || k.devices[l.Leg] != d || !k.stillWanted(l.At) {
			return volume.ErrLater
		}
		behind := (*checkpoint.Behind)(nil)
		if err == nil {
			behind, err = lists.Lacks(list, before.lists, w.At(l.Column, l.Copy).Believes)
		}
		if err != nil {
			k.log.Info("all of a leg is copied", "leg", l.Leg.String(), "column", l.Column, "why", err)
		}
		return k.addBehind(w, l, behind)
	})
}

// stillWanted reports whether a leg is wanted in this place and revision.
func (k *Keeper) stillWanted(l volume.At) bool {
	w := k.Last().Wanted
	if w == nil {
		return false
	}
	link := w.At(l.Column, l.Copy)
	return link != nil && link.Leg == l.Leg && link.Revision == l.Revision
}

// addBehind starts the rebuild of a leg. lacks is what the targets know of what it lacks; nil:
// nothing.
func (k *Keeper) addBehind(w *volume.Wanted, l volume.Add, lacks *checkpoint.Behind) (err error) {
	v, d := k.stack.volume, k.devices[l.Leg]
	switch {
	case w.ReadOnly:
		err = v.Add(l.Column, l.Copy, d, engine.InSync, false)
	case lacks != nil:
		err = v.AddBehind(l.Column, l.Copy, d, lacks.Ranges)
	default:
		err = v.Add(l.Column, l.Copy, d, engine.Rebuilding, l.Full)
	}
	if err != nil {
		return err
	}
	slot, link := slotOf(w, l.At), w.At(l.Column, l.Copy)
	slot.what = l.What
	slot.tracked = true // from now on the engine knows what the leg misses, even if it is dropped
	slot.dirty = v.Status().Legs[l.Column][l.Copy].Resync.Total
	switch was := k.memory.slots[l.Place]; {
	case lacks != nil:
		slot.whole, slot.what = lacks.Since, lists.CopiesOn
	case l.Full || link.CopyAll && link.CacheLost:
		slot.whole = l.Revision // what it lacks is known: all of it, or no more than the engine says
	case was.leg == l.Leg:
		slot.whole = was.whole
	}
	k.stack.since[l.Column][l.Copy].Store(slot.whole)
	k.memory.slots[l.Place] = slot
	k.log.Info("rebuild of a leg has begun", "leg", l.Leg.String(), "column", l.Column, "to_copy", slot.dirty.String(),
		"full", l.Full && lacks == nil, "continued", lacks != nil, "what", slot.what)
	return nil
}

// renew continues with a leg that lost its drive's cache but lacks nothing.
func (k *Keeper) renew(w *volume.Wanted, l volume.At) error {
	if err := k.stack.volume.Renew(l.Column, l.Copy, k.devices[l.Leg]); err != nil {
		return err
	}
	slot := slotOf(w, l)
	slot.tracked, slot.dirty = k.memory.slots[l.Place].tracked, k.memory.slots[l.Place].dirty
	k.memory.slots[l.Place] = slot
	k.log.Warn("leg lost its drive's cache, but no unflushed writes", "leg", l.Leg.String(), "column", l.Column)
	if _, r := k.connectionTo(slot.nqn); r != nil {
		r.connection.Rescan() // I/O sent to the old identity is returned
	}
	return nil
}

// abort removes the stack even if it is in use.
func (k *Keeper) abort(ctx context.Context) error {
	st, device := k.stack, k.stack.device
	return k.await(ctx, "remove the volume", callTimeout, func(ctx context.Context) error {
		return st.abort(ctx, device)
	}, func(err error) error {
		if err == nil && k.stack == st {
			k.stack = nil
			k.memory.slots = map[volume.Place]slot{}
		}
		return err
	})
}

// forget ends an epoch.
func (k *Keeper) forget(w *volume.Wanted, clean bool) {
	k.memory = newMemory(k.memory.Ended(w, clean), time.Now())
	clear(k.devices)
	clear(k.pulses)
	k.portals.Forget()
}

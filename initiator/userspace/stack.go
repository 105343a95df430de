// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"time"

	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/initiator/blockdev"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/engine"
)

// stack is a volume with its device. The keeper's goroutine owns it.
type stack struct {
	wanted     *attachment.Wanted // what was last wanted of it
	volume     *engine.Volume
	lease      *lease
	device     Exported   // nil: none
	size       block.Size // of the device
	equal      bool       // the copies are
	equalizing bool
	again      time.Time          // no Equalize before
	cancel     context.CancelFunc // of Equalize and of Export
	flushed    bool               // since the device was closed
	refusal    string             // why the device could not be closed when that was last tried
	open       bool               // namely because somebody has it open
}

// build makes the volume of its legs in sync.
func (k *Keeper) build(w *attachment.Wanted, o order) error {
	lease := newLease(k.cfg.Clock)
	config := engine.Config{Layout: w.Layout, Size: w.Size, BlockSize: block.SectorSize, FailMedium: true, ReadOnly: w.ReadOnly, OnEvent: k.event}
	if !w.ReadOnly {
		config.Current = lease.runs
	}
	for _, l := range o.legs {
		config.BlockSize = max(config.BlockSize, k.devices[l.leg].Geometry().BlockSize)
	}
	v, err := engine.New(config)
	if err != nil {
		return err
	}
	slots := map[place]slot{}
	for _, l := range o.legs {
		if err := v.Add(l.column, l.copy, k.devices[l.leg], engine.InSync, false); err != nil {
			v.Abort()
			return err
		}
		slots[l.place] = slotOf(w, l)
	}
	k.stack = &stack{wanted: w, volume: v, lease: lease, equal: !w.Equalize || w.Layout.Copies == 1, cancel: func() {}}
	k.memory.slots, k.memory.used = slots, true
	k.trackIfEqual()
	if k.stack.equal && !w.ReadOnly {
		// Until a first flush the engine must take a leg with a cache to lack anything
		// that was ever written to it. There is nothing: it was let go flushed.
		go block.Flush(v) //nolint:errcheck // the next flush will do
	}
	k.log.Info("volume built", "epoch", w.Epoch, "legs", len(o.legs), "equalize", !k.stack.equal)
	return nil
}

func slotOf(w *attachment.Wanted, l legAt) slot {
	link := w.At(l.column, l.copy)
	return slot{leg: l.leg, revision: l.revision, node: link.Node, nqn: link.NQN}
}

// trackIfEqual notes that from now on the engine knows all that a leg misses
// which it drops.
func (k *Keeper) trackIfEqual() {
	if !k.stack.equal {
		return
	}
	for at, slot := range k.memory.slots {
		slot.tracked = slot.tracked || k.stack.volume.Status().Legs[at.column][at.copy].State == engine.InSync
		k.memory.slots[at] = slot
	}
}

// event wakes the keeper; what it is about is in the volume's status.
func (k *Keeper) event(e engine.Event) {
	k.log.Info("volume", "event", e.Kind.String(), "column", e.Column, "copy", e.Copy, "err", e.Err)
	k.Poke()
}

// equalize begins to make the copies equal.
func (k *Keeper) equalize(ctx context.Context) error {
	st := k.stack
	if st.equalizing || time.Now().Before(st.again) {
		return errLater
	}
	ctx, st.cancel = context.WithCancel(ctx)
	st.equalizing = true
	go func() {
		err := st.volume.Equalize(ctx)
		k.Tell(func() {
			st.equalizing = false
			st.cancel()
			if err != nil {
				st.again = time.Now().Add(attachment.RetryInterval)
				k.log.Warn("copies not equal yet", "err", err)
				return
			}
			st.equal = true
			if k.stack == st {
				k.trackIfEqual()
			}
			k.log.Info("copies are equal")
		})
	}()
	return nil
}

// export makes the device. To make one takes reads of the volume, which may be held.
func (k *Keeper) export(ctx context.Context, w *attachment.Wanted) error {
	st := k.stack
	const what = "make the device"
	if k.busy[what] {
		return errLater
	}
	ctx, st.cancel = context.WithCancel(ctx)
	size := st.volume.Geometry().Size // at least; it may grow meanwhile
	var device Exported
	return k.apart(ctx, what, exportTimeout, func(ctx context.Context) (err error) {
		device, err = k.cfg.Export(ctx, st.volume, w.Name)
		return err
	}, func(err error) error {
		st.cancel()
		if err != nil {
			return err
		}
		if k.stack != st { // torn down meanwhile
			go func() {
				ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
				defer cancel()
				_ = device.Close(ctx, true) // a failure is logged where it happens
			}()
			return nil
		}
		st.device, st.size, st.flushed, st.refusal, st.open = device, size, false, "", false
		k.log.Info("device is there", "device", device.Path())
		go func() {
			select {
			case <-device.Done():
				k.Poke()
			case <-k.Ended():
			}
		}()
		return nil
	})
}

// grow makes the volume larger.
func (k *Keeper) grow(w *attachment.Wanted) error {
	was := k.stack.volume.Geometry().Size
	if err := k.stack.volume.Grow(w.Size); err != nil {
		return err
	}
	k.log.Info("volume has grown", "from", was.String(), "to", w.Size.String())
	return nil
}

// resize makes the device as large as the volume.
func (k *Keeper) resize(ctx context.Context) error {
	st, size := k.stack, k.stack.volume.Geometry().Size
	return k.apart(ctx, "resize the device", callTimeout, st.device.Resize, func(err error) error {
		if err == nil && st.device != nil {
			st.size = size
			k.log.Info("device has grown", "size", size.String())
		}
		return err
	})
}

// closeDevice takes the device away, unless somebody has it open.
func (k *Keeper) closeDevice(ctx context.Context, force bool) error {
	st := k.stack
	return k.apart(ctx, "remove the device", callTimeout, func(ctx context.Context) error {
		return st.device.Close(ctx, force)
	}, func(err error) error {
		st.refusal, st.open = "", false
		if err != nil {
			st.refusal, st.open = err.Error(), errors.Is(err, blockdev.ErrBusy)
			return err
		}
		st.device = nil
		return nil
	})
}

// flush has the drives write out what they may hold in their caches. It waits as
// long as a leg holds it up.
func (k *Keeper) flush(ctx context.Context) error {
	st := k.stack
	return k.apart(ctx, "flush", callTimeout, func(context.Context) error { return block.Flush(st.volume) }, func(err error) error {
		st.flushed = err == nil
		return err
	})
}

// dismantle takes the volume apart, which has no device any more.
func (k *Keeper) dismantle(ctx context.Context, clean bool) error {
	st := k.stack
	finish := func(err error) error {
		if err == nil && k.stack == st {
			k.stack, k.memory.clean = nil, clean
		}
		return err
	}
	if !clean {
		return finish(st.abort(ctx, nil))
	}
	return k.apart(ctx, "disassemble the volume", callTimeout, st.volume.Close, finish)
}

// abort takes the volume away, and its device if it has one; whoever waits for
// them gets errors. The connections have been cut: what is out on others is never
// answered.
func (st *stack) abort(ctx context.Context, device Exported) error {
	st.cancel()
	st.volume.Abort()
	if device == nil {
		return nil
	}
	return device.Close(ctx, true)
}

// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"weft.dev/weft/initiator/blockdev"
	"weft.dev/weft/initiator/keeper"
	"weft.dev/weft/initiator/lists"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/engine"
)

// stack is a volume with its device. The keeper's goroutine owns it.
type stack struct {
	wanted     *volume.Wanted // the last wanted state
	volume     *engine.Volume
	lease      *lease
	device     Exported   // nil: none
	size       block.Size // of the device
	equal      bool       // the copies are equal
	equalizing bool
	again      time.Time          // when Equalize may be tried again
	failed     int                // how often it was tried in vain
	whole      string             // why copies are compared whole; empty: they are not
	cancel     context.CancelFunc // of Equalize and of Export
	flushed    bool               // since the device was closed
	refusal    string             // why the last attempt to close the device failed
	open       bool               // that was because somebody has it open
	scrub      *keeper.Scrub      // the last one; nil: none
	heals      *heals

	rebuildRate block.Size

	stopCheckpoints context.CancelFunc
	listed          map[int]*columnLists // by column, of those that had a stale leg when checkpoints began
	since           [][]atomic.Uint64    // by column and copy: the slots' whole
}

// build builds the volume from its legs in sync.
func (k *Keeper) build(ctx context.Context, w *volume.Wanted, o volume.Build) error {
	lease := newLease(k.cfg.Clock)
	config := engine.Config{Layout: w.Layout, Size: w.Size, BlockSize: block.SectorSize, FailMedium: true, ReadOnly: w.ReadOnly, Turn: w.Turn(), RebuildRate: w.RebuildRate, Thin: w.Thin, OnEvent: k.event}
	healed := newHeals()
	config.OnHealed = func(f engine.Finding, o engine.Outcome, err error) {
		healed.note(k.log, f, o, err)
		k.Poke()
	}
	if !w.ReadOnly {
		config.Current = lease.runs
	}
	for _, l := range o.Legs {
		config.BlockSize = max(config.BlockSize, k.devices[l.Leg].Geometry().BlockSize)
	}
	v, err := engine.New(config)
	if err != nil {
		return err
	}
	slots := map[volume.Place]slot{}
	for _, l := range o.Legs {
		if err := v.Add(l.Column, l.Copy, k.devices[l.Leg], engine.InSync, false); err != nil {
			v.Abort()
			return err
		}
		slots[l.Place] = slotOf(w, l)
	}
	since := make([][]atomic.Uint64, w.Layout.Stripes)
	for i := range since {
		since[i] = make([]atomic.Uint64, w.Layout.Slots())
	}
	k.stack = &stack{listed: map[int]*columnLists{}, since: since, wanted: w, volume: v, heals: healed, rebuildRate: w.RebuildRate, lease: lease, equal: !w.Equalize || w.Layout.Copies == 1, cancel: func() {}, stopCheckpoints: func() {}}
	k.memory.slots, k.memory.Used = slots, true
	k.trackIfEqual(ctx)
	if k.stack.equal && !w.ReadOnly {
		// Until the first flush, the engine must assume that a leg with a cache lacks data
		// written before. It lacks none: the volume was flushed when it was detached.
		go block.Flush(v) //nolint:errcheck // the next flush will do
	}
	k.log.Info("volume built", "epoch", w.Epoch, "legs", len(o.Legs), "equalize", !k.stack.equal)
	return nil
}

// slot is the leg that the engine has, or last had, in a place.
type slot struct {
	leg      block.LegID
	revision uint64
	node     string
	nqn      block.NQN
	tracked  bool       // the engine knows everything that it may miss
	dirty    block.Size // bytes to copy when its rebuild began
	whole    uint64     // the revision at which a copy of all of it began; 0: none did
	what     string     // what its rebuild copies, and why
}

// memory is what the keeper knows of an epoch but cannot find out by looking.
type memory struct {
	volume.Memory
	slots map[volume.Place]slot
}

func newMemory(m volume.Memory, now time.Time) *memory {
	m.Begin(now)
	return &memory{Memory: m, slots: map[volume.Place]slot{}}
}

func slotOf(w *volume.Wanted, l volume.At) slot {
	link := w.At(l.Column, l.Copy)
	return slot{leg: l.Leg, revision: l.Revision, node: link.Node, nqn: link.NQN}
}

// trackIfEqual notes that from now on the engine knows everything that a dropped leg misses,
// and has the targets list what is written.
func (k *Keeper) trackIfEqual(ctx context.Context) {
	if !k.stack.equal {
		return
	}
	k.startCheckpoints(ctx)
	for at, slot := range k.memory.slots {
		slot.tracked = slot.tracked || k.stack.volume.Status().Legs[at.Column][at.Copy].State == engine.InSync
		k.memory.slots[at] = slot
	}
}

// event wakes the keeper; the volume's status has the details.
func (k *Keeper) event(e engine.Event) {
	k.log.Info("volume", "event", e.Kind.String(), "column", e.Column, "copy", e.Copy, "err", e.Err)
	k.Poke()
}

// equalize starts to make the copies equal.
func (k *Keeper) equalize(ctx context.Context) error {
	st := k.stack
	if st.equalizing || time.Now().Before(st.again) {
		return volume.ErrLater
	}
	long, columns, last := ctx, st.wanted.Layout.Stripes, st.failed >= lists.Attempts
	ctx, st.cancel = context.WithCancel(ctx)
	st.equalizing = true
	go func() {
		err := k.equalizeUnequal(ctx, st, columns, last)
		k.Tell(func() {
			st.equalizing = false
			st.cancel()
			if err != nil {
				st.again = time.Now().Add(keeper.RetryInterval)
				st.failed++
				k.log.Warn("copies could not be made equal; trying again", "err", err)
				return
			}
			st.equal = true
			if k.stack == st {
				k.trackIfEqual(long)
			}
			k.log.Info("copies are equal")
		})
	}()
	return nil
}

// equalizeUnequal makes the copies equal where they may differ: everywhere if this is the last
// attempt and a target does not answer.
func (k *Keeper) equalizeUnequal(ctx context.Context, st *stack, columns int, last bool) error {
	parts, whole, err := unequal(ctx, st.volume, columns)
	switch {
	case err != nil && !last:
		return fmt.Errorf("ask the targets what was written: %w", err)
	case err != nil:
		whole = err.Error()
	}
	k.Tell(func() { st.whole = whole })
	k.log.Info("making the copies equal", "read", toRead(parts, columns, int64(st.volume.Geometry().Size)), "whole_because", whole)
	return st.volume.EqualizeParts(ctx, parts)
}

// toRead is how many bytes of each copy are read to make a volume of size bytes equal. All of a
// column is read if its part is not known, or missing.
func toRead(parts []engine.Part, columns int, size int64) (n int64) {
	for column := range columns {
		if column >= len(parts) || !parts[column].Known {
			n += size / int64(columns)
			continue
		}
		for _, r := range parts[column].Ranges {
			n += r.End - r.Off
		}
	}
	return n
}

// export makes the device. That reads from the volume, and the reads may be held.
func (k *Keeper) export(ctx context.Context, w *volume.Wanted) error {
	st := k.stack
	const what = "make the device"
	if k.Busy(what) {
		return volume.ErrLater
	}
	ctx, st.cancel = context.WithCancel(ctx)
	if w.Heal { // the volume has no users
		st.cancel()
		st.device, st.size, st.flushed = noDevice{}, st.volume.Geometry().Size, false
		return nil
	}
	size := st.volume.Geometry().Size // at least; it may grow meanwhile
	var device Exported
	return k.await(ctx, what, exportTimeout, func(ctx context.Context) (err error) {
		device, err = k.cfg.Export(ctx, st.volume, Of{Volume: k.volume, Name: w.Name, Resume: resumeToken(w)})
		return err
	}, func(err error) error {
		st.cancel()
		if err != nil {
			return err
		}
		if k.stack != st { // torn down in the meantime
			go func() {
				ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
				defer cancel()
				_ = device.Close(ctx, true) // Close logs a failure itself
			}()
			return nil
		}
		st.device, st.size, st.flushed, st.refusal, st.open = device, size, false, "", false
		k.log.Info("device made", "device", device.Path())
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

// resumeToken stands for what the kernel may have in memory of a volume's device: a device that was made
// with the same token may go on. Another host, or a loss of acknowledged writes, changes the token.
// Readers that share a volume, and older managers, have none.
func resumeToken(w *volume.Wanted) string {
	if w.Grant != 0 || w.SinceEpoch == 0 {
		return ""
	}
	return fmt.Sprintf("%s since epoch %d", w.Volume, w.SinceEpoch)
}

// grow makes the volume larger.
func (k *Keeper) grow(w *volume.Wanted) error {
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
	return k.await(ctx, "resize the device", callTimeout, st.device.Resize, func(err error) error {
		if err == nil && st.device != nil {
			st.size = size
			k.log.Info("device has grown", "size", size.String())
		}
		return err
	})
}

// closeDevice removes the device, unless somebody has it open.
func (k *Keeper) closeDevice(ctx context.Context, force bool) error {
	st := k.stack
	return k.await(ctx, "remove the device", callTimeout, func(ctx context.Context) error {
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

// flushLegs makes the drives of some legs write out their caches, all at once. A drive without a
// cache is asked all the same: its answer shows that the leg is there.
func (k *Keeper) flushLegs(ctx context.Context, o volume.FlushLegs) error {
	if k.Busy(o.String()) { // that flush began before this withholding
		return fmt.Errorf("%w: %v", keeper.ErrBusy, o)
	}
	m := &k.memory.Memory
	m.WithholdFor(o)
	for _, l := range o.Without {
		if err := k.stack.volume.Withhold(l.Column, l.Copy, true); err != nil {
			return err
		}
	}
	flushes := make([]func() error, len(o.Legs))
	for i, l := range o.Legs {
		d, ok := k.legDevice(l)
		if !ok {
			return fmt.Errorf("leg %s: %w", l.Leg, block.ErrGone)
		}
		flushes[i] = func() error { return block.Flush(d.Device) }
	}
	st := k.stack
	return k.await(ctx, o.String(), keeper.Patience, func(ctx context.Context) error {
		if st != nil && len(o.Without) == 0 {
			if err := await(ctx, st.volume, quiet); err != nil {
				return err
			}
		}
		return inParallel(flushes)
	}, func(err error) error {
		if err == nil {
			m.Flushed(o, time.Now())
		}
		return err
	})
}

// legDevice is the device of a leg: of the volume, or before it is built the one that it would use.
func (k *Keeper) legDevice(l volume.At) (d legDevice, ok bool) {
	of := k.devices[l.Leg]
	if k.stack != nil {
		of, ok = k.stack.volume.Device(l.Column, l.Copy).(device)
		if !ok {
			return d, false
		}
	}
	d, ok = of.Device.(legDevice)
	return d, ok
}

// pokeAtRest makes the keeper look as soon as the I/O under way has ended. It would look too late for
// those who wait until I/O is held.
func (k *Keeper) pokeAtRest(ctx context.Context, v *engine.Volume) {
	if await(ctx, v, atRest) == nil {
		k.Poke()
	}
}

// await waits until a volume is quiet or at rest.
func await(ctx context.Context, v *engine.Volume, is func(engine.Status) bool) error {
	ctx, cancel := context.WithTimeout(ctx, keeper.Patience)
	defer cancel()
	for !is(v.Status()) {
		select {
		case <-time.After(time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("wait for the I/O under way: %w", ctx.Err())
		}
	}
	return nil
}

func inParallel(all []func() error) error {
	var g errgroup.Group
	for _, do := range all {
		g.Go(do)
	}
	return g.Wait()
}

// atRest reports whether the copies of a volume are equal as far as its users are concerned: no leg has a
// write that another one still lacks.
func atRest(s engine.Status) bool { return quiet(s) && s.Begun == 0 }

// quiet reports whether no I/O has been sent to a leg and not been answered.
func quiet(s engine.Status) bool {
	for _, column := range s.Legs {
		if slices.ContainsFunc(column, func(l engine.LegStatus) bool { return l.Outstanding > 0 }) {
			return false
		}
	}
	return true
}

// flush makes the drives write out their caches. It waits as long as a leg delays it.
func (k *Keeper) flush(ctx context.Context) error {
	st := k.stack
	return k.await(ctx, "flush", callTimeout, func(context.Context) error { return block.Flush(st.volume) }, func(err error) error {
		st.flushed = err == nil
		return err
	})
}

// dismantle takes apart a volume that has no device any more.
func (k *Keeper) dismantle(ctx context.Context, clean bool) error {
	st := k.stack
	st.stopCheckpoints()
	finish := func(err error) error {
		if err == nil && k.stack == st {
			k.stack, k.memory.Clean = nil, clean
		}
		return err
	}
	st.scrub.Stop()
	if !clean {
		return finish(st.abort(ctx, nil))
	}
	return k.await(ctx, "disassemble the volume", callTimeout, st.volume.Close, finish)
}

// abort removes the volume, and its device if it has one; those who wait for them get errors.
// Connections have been cut before, because pending I/O on a silent one would never be
// answered.
func (st *stack) abort(ctx context.Context, device Exported) error {
	st.cancel()
	st.stopCheckpoints()
	st.scrub.Stop()
	st.volume.Abort()
	if device == nil {
		return nil
	}
	return device.Close(ctx, true)
}

// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/dm"
)

// This file lets users of thin volumes discard. dm-mirror sends a discard to all legs, but it does not mark it in its
// log, does not hold it for a leg that fails it, and copies to a leg without regard to it. So:
//
//   - From before it is found out what a leg lacks until it is in sync, the device takes no discards, and none is under
//     way (beginCopy).
//   - What was discarded while a leg was away, its targets know: their lists of writes have it (question).
//
// A discard that one leg alone has done, because another one or the host was lost meanwhile, is an error to its user.
// What is read there may depend on the leg until it is written again.
//
// The devices of mirrors that are not thin take no discards: what drives read where something was discarded differs.

// mostDiscarded is how much users discard at a time: a target has to answer within the time limit of an I/O.
const mostDiscarded = block.GiB

// keepDiscards has the device take discards, or take none.
func (k *kernelKeeper) keepDiscards(ctx context.Context, w *volume.Wanted, s *seen) {
	if !s.Device.Exists {
		k.noDiscards = true
		return
	}
	now, could, err := k.kernel.discards(k.top)
	if err != nil {
		k.log.Debug("whether the device takes discards is not known", "err", err)
		return
	}
	k.discardsOff = now == 0
	k.noDiscards = now == 0 && (k.noDiscards || s.Held && !k.suspends) // since none begins, nothing was under way once
	if !k.mirrors(w, s) {
		return
	}
	want := block.Size(0)
	if mayDiscard(w, s) {
		want = min(could, mostDiscarded)
	}
	if (now == 0) == (want == 0) { // or an operator has chosen less
		return
	}
	top := k.top
	if err := k.call(ctx, "discards", func() error { return k.kernel.setDiscards(top, want) }); err != nil {
		k.log.Warn("whether the device takes discards is not changed", "err", err)
		return
	}
	k.discardsOff = want == 0
	k.log.Info("device takes discards", "at_a_time", want)
}

// mirrors reports whether a volume is served to a writer over mirrors, or may be.
func (k *kernelKeeper) mirrors(w *volume.Wanted, s *seen) bool {
	return w != nil && !w.ReadOnly && !w.Detach && k.memory.Of(w) && !s.Device.Failed && (w.Thin || w.Layout.Copies > 1)
}

// mayDiscard reports whether users may discard: all copies read the same afterwards, and no copy is under way, nor
// begins.
func mayDiscard(w *volume.Wanted, s *seen) bool {
	if !w.Thin || slices.ContainsFunc(w.Links, func(l volume.Link) bool { return l.Rebuilding }) {
		return false
	}
	return !slices.ContainsFunc(s.Columns, func(c volume.ColumnSeen) bool {
		return slices.ContainsFunc(c.Copies, func(is volume.CopySeen) bool { return is.State == volume.Rebuilding || is.State == volume.CaughtUp })
	})
}

// discarded reports whether anything was discarded since the device was made, as far as is known. None may be under way.
func (k *kernelKeeper) discarded() bool {
	if !k.kernel.countsIO(k.top.Number, k.agent.cfg.Kernel) {
		return true
	}
	fields, err := k.kernel.statistics(k.top.Number)
	return err != nil || len(fields) < 12 || fields[11] != "0"
}

// discards says how much of a device one command may discard, and how much it could; 0: none.
func (k *kernel) discards(d dm.State) (now, could block.Size, err error) {
	var unit block.Size
	for _, of := range []struct {
		name string
		to   *block.Size
	}{{discardMost, &now}, {"discard_max_hw_bytes", &could}, {"discard_granularity", &unit}} {
		b, err := os.ReadFile(k.queue(d.Number, of.name))
		if err != nil {
			return 0, 0, err
		}
		if _, err := fmt.Sscan(string(b), of.to); err != nil {
			return 0, 0, fmt.Errorf("%s of %s: %q: %w", of.name, d.Name, b, err)
		}
	}
	return now, could / max(unit, 1) * unit, nil // the kernel takes multiples only
}

const discardMost = "discard_max_bytes"

func (k *kernel) setDiscards(d dm.State, atATime block.Size) error {
	if err := os.WriteFile(k.queue(d.Number, discardMost), []byte(strconv.FormatUint(uint64(atATime), 10)), 0); err != nil {
		return fmt.Errorf("set how much of %s is discarded at a time to %d: %w", d.Name, atATime, err)
	}
	return nil
}

// queue is where sysfs has a limit of a mapped device.
func (k *kernel) queue(n block.DeviceNumber, name string) string {
	return filepath.Join(k.sysDir, "block", fmt.Sprintf("dm-%d", n.Minor), "queue", name)
}

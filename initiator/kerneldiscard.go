// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/raid/dm/mirror"
)

// This file lets users of thin volumes discard. dm-mirror sends a discard to all legs, but it does not mark it in its
// log, does not hold it for a leg that fails it, and copies to a leg without regard to it. So:
//
//   - The device takes discards only while all copies are in sync. Before it is found out what a leg lacks, no discard is
//     under way any more (beginCopy).
//   - What was discarded before the device took none any more, and a leg had left, its targets know: their lists of writes
//     have it (question).
//
// A discard that one leg has not done, because it failed there or was cut off, counts as done to its user: Linux tells
// nobody. A read of it may depend on the leg until somebody writes or discards it again.
//
// The devices of mirrors that are not thin take no discards: what drives read where something was discarded differs.

const (
	// mostDiscarded is how much users discard at a time: a target has to answer within the time limit of an I/O.
	mostDiscarded = block.GiB
	// discardsRetry is when discards are tried to be changed again after an error.
	discardsRetry = 10 * time.Second

	changeDiscards = "change-discards"
)

// keepDiscards has the device take discards, or take none.
func (k *kernelKeeper) keepDiscards(ctx context.Context, w *volume.Wanted, s *seen) {
	if !s.Device.Exists {
		k.noDiscards = true
		return
	}
	now, err := k.kernel.limit(k.top, discardMost)
	if err != nil {
		k.log.Warn("whether the device takes discards is not known; no leg is copied to before that", "err", err)
		return
	}
	if k.discardsOff = now == 0; now != 0 {
		k.discardsOn++
	}
	k.noDiscards = now == 0 && (k.noDiscards || s.Held && !k.suspends) // since none begins, nothing was under way once
	if !k.mirrors(w, s) || k.Busy(changeDiscards) || s.Now.Before(k.discardsNext) {
		return
	}
	want := block.Size(0)
	if mayDiscard(w, s) {
		could, err := k.kernel.limit(k.top, "discard_max_hw_bytes")
		if err != nil {
			return // it is read again at the next look
		}
		want = min(could, mostDiscarded)
	}
	if (now == 0) == (want == 0) && now <= mostDiscarded { // or an operator has chosen less
		return
	}
	k.changeDiscards(ctx, w, s, want)
}

// changeDiscards changes how much users discard at a time; 0: nothing. Linux 6.12 does not allow more for a table for which
// that was 0 once: then the table is loaded again, which is not done while I/O is held, or a leg is silent.
func (k *kernelKeeper) changeDiscards(ctx context.Context, w *volume.Wanted, s *seen, want block.Size) {
	reload := false
	if want > 0 {
		unit, err := k.kernel.limit(k.top, "discard_granularity")
		if reload = unit == 0; err != nil || reload && (s.Held || k.suspends || k.repair != nil || !k.allAnswer(s)) {
			return
		}
		k.noDiscards = false
	}
	top, again := k.top, mirror.Top(w.Volume, w.Layout, k.top.Table.Size())
	err := k.call(ctx, changeDiscards, func() error {
		if reload {
			if err := k.kernel.dm.Do(dm.Step{Op: dm.OpReload, Device: again}); err != nil {
				return err
			}
		}
		return k.kernel.setDiscards(top, want)
	})
	if err != nil {
		k.discardsNext = s.Now.Add(discardsRetry)
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

// mayDiscard reports whether users may discard: all copies read the same afterwards, and all are in sync.
func mayDiscard(w *volume.Wanted, s *seen) bool {
	if !w.Thin || slices.ContainsFunc(w.Links, func(l volume.Link) bool { return l.Rebuilding }) {
		return false
	}
	return !slices.ContainsFunc(s.columns, func(c columnSeen) bool {
		return c.Kind != mirror.ShapeFlat && c.Kind != mirror.ShapeLinear || len(c.Sources) < w.Layout.Copies
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

const discardMost = "discard_max_bytes"

// setDiscards sets how much of a device one command may discard.
func (k *kernel) setDiscards(d dm.State, atATime block.Size) error {
	err := os.WriteFile(k.queue(d.Number, discardMost), []byte(strconv.FormatUint(uint64(atATime), 10)), 0)
	if err != nil {
		return fmt.Errorf("set %s of %s to %d: %w", discardMost, d.Name, atATime, err)
	}
	return nil
}

// limit reads a limit of a mapped device from sysfs.
func (k *kernel) limit(d dm.State, name string) (n block.Size, err error) {
	b, err := os.ReadFile(k.queue(d.Number, name))
	if err == nil {
		_, err = fmt.Sscan(string(b), &n)
	}
	if err != nil {
		return 0, fmt.Errorf("read %s of %s: %w", name, d.Name, err)
	}
	return n, nil
}

func (k *kernel) queue(n block.DeviceNumber, name string) string {
	return filepath.Join(k.sysDir, "block", fmt.Sprintf("dm-%d", n.Minor), "queue", name)
}

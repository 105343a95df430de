// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"weft.dev/weft/initiator/compare"
	"weft.dev/weft/initiator/fabrics"
	"weft.dev/weft/initiator/keeper"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
)

// This file compares the copies of a volume through the legs' heads, beside the tables: see package compare. What
// differs is repaired by kernelrepair.go.

var errNotAttached = errors.New("the leg is not attached as its column has it")

// toCompare has the copies that a scrub may compare, as the last look found them.
type toCompare struct {
	columns [][]compare.Copy // the copies in sync
	settled []bool           // by column: no leg in use has failed, and the tables stay as they are
	legSize int64            // 0: not known
	rest    func() bool      // whether no write of users is under way
}

// nothingToCompare holds for a scrub that has ended, and before the first look.
var nothingToCompare = &toCompare{rest: func() bool { return false }}

// applyScrub starts or stops a scrub, or tells it what has changed.
func (k *kernelKeeper) applyScrub(ctx context.Context, w *volume.Wanted, o volume.Order) error {
	start, ok := o.(volume.StartScrub)
	if !ok {
		k.scrub.Apply(o)
		return nil
	}
	k.scrub = k.StartScrub(ctx, start.Scrub, func(s *keeper.Scrub) keeper.Comparer {
		config := compare.Config{
			Columns: w.Layout.Stripes, Copies: k.copiesToCompare,
			LegSize: func() int64 { return k.compares.Load().legSize }, Rest: func() bool { return k.compares.Load().rest() },
			Rate: start.Rate, From: start.Begin, Waits: func(err error) { k.log.Warn("scrub waits", "scrub", start.ID, "err", err) }, Found: s.Found,
		}
		if start.Repair {
			config.Repair = &compare.Repair{Copies: w.Layout.Copies, Named: start.Named(w.Layout.Stripes), Ended: s.Settled}
			if !w.ReadOnly {
				config.Repair.Alone = k.alone
			}
		}
		return compare.New(config)
	})
	return nil
}

// copiesToCompare lists the copies in sync of a column.
func (k *kernelKeeper) copiesToCompare(column int) (all []compare.Copy, settled bool) {
	c := k.compares.Load()
	if column >= len(c.columns) {
		return nil, false
	}
	return c.columns[column], c.settled[column]
}

// unsettle has what is compared of a column count for nothing until the next look: its tables are about to change, and
// a write that one copy has not got is held until then.
func (k *kernelKeeper) unsettle(column int) {
	was := k.compares.Load()
	if column >= len(was.settled) {
		return
	}
	now := *was
	now.settled = slices.Clone(was.settled)
	now.settled[column] = false
	k.compares.Store(&now)
}

// publishComparable tells the scrub what it may compare. Without a device there is nothing in use: the scrub ends,
// and another one begins with the next device, where the manager has recorded that this one was.
func (k *kernelKeeper) publishComparable(w *volume.Wanted, s *seen) {
	if w == nil || w.Scrub == nil || !s.Device.Exists || s.Device.Failed || !k.memory.Of(w) {
		k.scrub.Stop()
		k.scrub, s.Scrub = nil, nil
		k.compares.Store(nothingToCompare)
		return
	}
	number, counts := k.top.Number, k.kernel.countsIO(k.top.Number, k.agent.cfg.Kernel)
	all := &toCompare{legSize: int64(w.Layout.LegSize(s.Device.Size)), rest: func() bool { return counts && k.kernel.rests(number) }}
	for i, c := range s.Columns {
		all.legSize = min(all.legSize, int64(c.Size)) // 0 for one that cannot be interpreted now
		var copies []compare.Copy
		settled := k.changes[i] == nil
		for copy, is := range c.Copies {
			if !is.State.InUse() {
				continue
			}
			settled = settled && is.Error == ""
			if is.State == volume.InSync {
				copies = append(copies, k.copyToCompare(s, i, copy, is.Leg))
			}
		}
		all.columns, all.settled = append(all.columns, copies), append(all.settled, settled)
	}
	k.compares.Store(all)
}

// copyToCompare is a copy in sync. One that is not attached at this moment, or anew, is awaited.
func (k *kernelKeeper) copyToCompare(s *seen, column, copy int, id block.LegID) compare.Copy {
	leg := s.legs[id]
	c := compare.Copy{Copy: copy, Of: fmt.Sprint(id, leg.device), Read: func([]byte, int64) error { return errNotAttached }}
	live := slices.ContainsFunc(s.controllers[leg.nqn], func(c fabrics.Controller) bool { return c.State == fabrics.Live })
	if live && leg.device != "" && s.columns[column].has(leg.device) {
		c.Read = func(p []byte, off int64) error { return k.kernel.host.Read(leg.head, p, off, k.agent.cfg.IOTimeout) }
	}
	return c
}

// countsIO reports whether the kernel counts what a device has under way, as it does unless that is switched off.
// Linux before 6.2 says that it is off for mapped devices, and counts nevertheless: then what was read and written is
// not 0.
func (k *kernel) countsIO(number block.DeviceNumber, release string) bool {
	text, err := os.ReadFile(filepath.Join(k.sysDir, "dev/block", number.String(), "queue/iostats"))
	if err == nil && strings.TrimSpace(string(text)) == "1" {
		return true
	}
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil || major > 6 || major == 6 && minor >= 2 {
		return false
	}
	counts, err := k.statistics(number)
	return err == nil && len(counts) > 4 && (counts[0] != "0" || counts[4] != "0") // reads, writes
}

// begun are the counts of writes and of discards, which count as writes under way, too.
func begun(statistics []string) (counts []string) {
	for _, i := range []int{4, 11} {
		if i < len(statistics) {
			counts = append(counts, statistics[i])
		}
	}
	return counts
}

// statistics are what the kernel counts of a device (Documentation/block/stat.rst): reads, three more, writes, six more,
// discards, and others.
func (k *kernel) statistics(number block.DeviceNumber) ([]string, error) {
	text, err := os.ReadFile(filepath.Join(k.sysDir, "dev/block", number.String(), "stat"))
	return strings.Fields(string(text)), err
}

// rests reports whether a device has no write under way. The kernel adds up what each processor has counted, one after
// the other, so a sum is right only if no write has begun or ended meanwhile.
func (k *kernel) rests(number block.DeviceNumber) bool {
	before, err := k.statistics(number)
	if err != nil {
		return false
	}
	text, err := os.ReadFile(filepath.Join(k.sysDir, "dev/block", number.String(), "inflight"))
	fields := strings.Fields(string(text)) // reads, writes
	if err != nil || len(fields) != 2 || fields[1] != "0" {
		return false
	}
	after, err := k.statistics(number)
	return err == nil && slices.Equal(begun(before), begun(after))
}

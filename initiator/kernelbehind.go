// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"fmt"
	"os"
	"time"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/raid/dm/mirror"
)

// This file begins the log of a column anew before a leg joins, so that the agent copies what the log had so far
// (kernelahead.go): what a leg has missed that was away, or what users wrote while it was copied to. The kernel would
// copy that as fast as it can.
//
// From then on the leg lacks what three files have: the log in use, the one before, and one for what was known beside
// them. That is noted before the log begins anew, and is so whenever the agent is killed. An agent of an earlier version
// knows nothing of it, so such a leg is noted where that agent does not look, and it takes the leg for an unknown one.

// A log begins anew if it has more than users may notice when the kernel copies it: what the volume's rate allows in a
// second, within these limits.
const (
	restLeast = 8 * block.MiB
	restMost  = 256 * block.MiB
)

// keepEvery is how often what is left of a copy is kept for an agent that goes on with it.
const keepEvery = 10 * time.Second

// rest is how much is left to the kernel at a rate.
func rest(rate block.Size) block.Size {
	if rate == 0 {
		return restMost
	}
	return min(max(rate, restLeast), restMost)
}

// beginAnew reports whether the log of a column is to begin anew before a leg joins, since it has more than is left to
// the kernel. left is what the leg lacks beside it.
func (k *kernelKeeper) beginAnew(w *volume.Wanted, s *seen, o volume.SetColumn, b *copyBegin, a *asking, left mirror.LogImage) bool {
	c, h, slot, l := &s.columns[o.Column], k.lists.ahead[o.Column], k.memory.slot(o.Column, b.copy), k.link(o.Column, b.copy)
	logged, err := k.kernel.readLog(c.log.file, c.Regions())
	now, before := block.Size(logged.CountDirty())*c.Region, block.Size(a.image.CountDirty())*c.Region
	if b.logged {
		before = slot.Dirty
	}
	since, what := b.told(a)
	switch {
	case err != nil || now <= rest(w.RebuildRate), c.ill(), h != nil && h.of == a && h.failed:
		return false
	case slot.More && slot.Leg != l.Leg, !b.logged && !l.Believes(since):
		return false // nobody would believe what is noted of it
	case b.logged && slot.Begun != l.Revision: // all that it has missed while it was away
	case now > before/4*3:
		return false // users write about as fast as is copied
	}
	log, err := k.kernel.makeLog(c.spare.file)
	if err == nil {
		err = k.keepAll(c, o.Column, left)
	}
	if err != nil {
		k.log.Warn("the kernel copies what a leg missed, as fast as it can", "column", o.Column, "err", err)
		return false
	}
	b.anew, b.before, b.log = true, now, dm.RefTo(log.Number)
	b.whole, b.what, b.revision = since, what, l.Revision
	return true
}

// keep has the file beside the logs have all that a leg lacks beside the log in use. Only then may a part of it be
// copied.
func (k *kernelKeeper) keep(c *columnSeen, column, copy int, leg block.LegID, left mirror.LogImage) error {
	if slot := k.memory.slot(column, copy); !slot.More || slot.Leg != leg {
		return nil
	}
	err := k.keepAll(c, column, left)
	if err != nil {
		k.log.Warn("the kernel copies what a leg lacks, as fast as it can", "column", column, "err", err)
	}
	return err
}

// keepAll has the file beside the logs have all, and then the log before nothing: until then, that may be the only one
// that has it.
func (k *kernelKeeper) keepAll(c *columnSeen, column int, all mirror.LogImage) error {
	err := k.kernel.keepBehind(k.volume, column, all)
	if err == nil {
		err = k.kernel.writeLog(c.spare.file, mirror.CleanLog(all.Regions()))
	}
	return err
}

// keepLeft has the file have what is left of a copy, for another one that goes on with it. Without that, it copies more.
func (k *kernelKeeper) keepLeft(column int, h *aheadOf) {
	if slot := k.memory.slot(column, h.copy); !slot.More || slot.Leg != h.leg {
		return
	}
	if err := k.kernel.keepBehind(k.volume, column, h.Left()); err != nil {
		k.log.Debug("what is left of a copy is not kept", "column", column, "err", err)
	}
}

// behind is what a leg lacks beside the log in use, as far as files have it.
func (k *kernelKeeper) behind(c *columnSeen, column, copy int) (mirror.LogImage, error) {
	all := mirror.CleanLog(c.Regions())
	if !k.memory.slot(column, copy).More {
		return all, nil
	}
	for _, file := range []string{k.kernel.behindFile(k.volume, column), c.spare.file} {
		raw, err := os.ReadFile(file)
		if err != nil {
			return all, fmt.Errorf("read what a leg lacks: %w", err)
		}
		image, err := mirror.ParseLog(raw)
		if err == nil { // the column may have grown since
			all, err = all.Merge(image.Grow(c.Regions()))
		}
		if err != nil {
			return all, fmt.Errorf("read what a leg lacks in %s: %w", file, err)
		}
	}
	return all, nil
}

// behindFile is the file beside the logs of a column.
func (k *kernel) behindFile(v block.VolumeID, column int) string {
	return k.logFiles(v, column)[0] + ".behind"
}

func (k *kernel) keepBehind(v block.VolumeID, column int, left mirror.LogImage) error {
	file := k.behindFile(v, column)
	err := os.WriteFile(file+".new", left.Bytes(), 0o600)
	if err == nil {
		err = os.Rename(file+".new", file)
	}
	if err != nil {
		return fmt.Errorf("keep what a leg lacks: %w", err)
	}
	return nil
}

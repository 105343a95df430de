// SPDX-License-Identifier: Apache-2.0

package volume

import "fmt"

// Giving up an epoch ends it for this host: the device fails, and the volume comes back only
// under the next epoch, which the manager grants once it hears of it. There are two reasons to
// give up.
//
// First, a leg has lost acknowledged, unflushed writes with its drive's cache: reads would go
// back in time, and a flush would succeed although data is missing. (Where the host does not
// know what was flushed, it assumes such a loss.)
//
// Second, the volume was removed without a regular detach: writes may be on some copies only,
// or still under way at a target, and only a new epoch drains them and makes the copies equal.
//
// The decision is noted on disk before anything is removed, so that an agent that stops
// halfway still knows it.

// end gives up the epoch of a volume that cannot continue, or that is removed without a
// detach.
func (p *planner) end() {
	switch {
	case p.s.ReadOnly || p.w != nil && !p.m.Of(p.w): // it is over anyway
	case p.w == nil:
		p.ends = &Over{Reason: Removed, Why: "it was removed by force while the volume manager did not want it here"}
	case p.w.Grant == 0:
		p.ends = p.lostWrites()
	}
	if p.ends != nil {
		p.do(GiveUp{Over: *p.ends})
	}
}

// over is why the wanted epoch must not be taken up again; nil if it may be.
func (p *planner) over() *Over {
	switch {
	case p.w == nil || !p.m.Of(p.w) || p.w.Grant != 0: // shared: each grant stands for itself
		return nil
	case p.ends != nil:
		return p.ends
	case p.m.Over == nil && p.m.Gone && !p.m.Clean && !p.w.Detach:
		return &Over{Reason: Unclean, Why: "it had been released, but not cleanly"}
	}
	return p.m.Over
}

// gaveUp reports the reason to the manager until it has granted the volume again.
func (p *planner) gaveUp(why *Over) {
	p.v.GaveUp = why
	if !p.w.Detach {
		p.v.Wait("the volume manager, to grant it again: %s", why.Why)
	}
	if p.s.Built() || p.connecting() {
		return
	}
	p.v.Phase = DetachedUnclean
	if !p.m.Gone {
		p.do(Forget{})
	}
}

// reborn reports whether the leg in a place has lost its drive's cache since the column took
// it in, and still counts as in sync.
func (p *planner) reborn(at Place) bool {
	l := p.link(at)
	return p.copy(at).Reborn && l != nil && p.inSync(l)
}

// lostWrites finds a leg that has lost acknowledged writes, or may have.
func (p *planner) lostWrites() *Over {
	for k, c := range p.s.Columns {
		for copy := range min(len(c.Copies), p.w.Layout.Slots()) {
			at, l := Place{k, copy}, p.w.At(k, copy)
			if !c.Built || !p.reborn(at) {
				continue
			}
			if s := p.copy(at); p.c.KnowsFlushed && !s.Unflushed && (s.State == InSync || s.State == CaughtUp) {
				continue
			}
			return &Over{ // writes are lost only if there was a device
				WritesLost: p.s.Device.Exists || p.w.Detach, Reason: LostCache,
				Why: fmt.Sprintf("leg %s of column %d on %s returned without data that only its drive's cache had held", l.Leg, k, l.Node),
			}
		}
	}
	return nil
}

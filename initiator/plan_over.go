// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"fmt"

	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid"
)

// An epoch that is given up is over for this host: its device fails, and the volume
// is taken up again only under the next one, which the manager grants when it hears.
// There are two reasons. A leg has lost what only its drive's cache held. The kernel
// does not tell what of it had been acknowledged and not flushed, so it must be taken
// for some: else reads would go back in time, and a flush succeed over a hole. Or the
// volume is let go of otherwise than asked: writes may be on some copies and not on
// others, or still under way at a target, and only a new epoch drains these and makes
// the copies equal. It is noted before anything is taken away, so that an agent that
// ends in the middle has not forgotten.

// over is why an epoch was given up.
type over struct {
	Why        string `json:"why"`
	WritesLost bool   `json:"writes_lost,omitempty"`
}

// end gives the epoch of a volume up that cannot go on, or that goes away without
// having been let go.
func (p *planner) end() {
	switch {
	case p.s.top.readOnly || p.w != nil && !p.m.of(p.w): // it is over in any case
	case p.w == nil:
		p.ends = &over{Why: "it was removed by force while the volume manager did not want it here"}
	case p.w.Grant == 0:
		p.ends = p.lostWrites()
	}
	if p.ends != nil {
		p.do(order{op: opGiveUp, end: p.ends})
	}
}

// over is why the epoch that is wanted is not taken up again; nil if it may be.
func (p *planner) over() *over {
	switch {
	case p.w == nil || !p.m.of(p.w) || p.w.Grant != 0: // it is shared, and each grant is another one
		return nil
	case p.ends != nil:
		return p.ends
	case p.m.Over == nil && p.m.Gone && !p.m.Clean && !p.w.Detach:
		return &over{Why: "it had been released, but not cleanly"}
	}
	return p.m.Over
}

// gaveUp tells the manager so until it has granted the volume anew.
func (p *planner) gaveUp(why *over) {
	p.v.GaveUp = &pb.GaveUp{Why: why.Why, WritesLost: why.WritesLost}
	if !p.w.Detach {
		p.v.Wait("the volume manager, to grant it again: %s", why.Why)
	}
	if p.built() || len(p.s.connecting) > 0 {
		return
	}
	p.v.Phase = pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHED_UNCLEAN
	if !p.m.Gone {
		p.do(order{op: opForget})
	}
}

// lostWrites finds a leg that may have lost what was acknowledged.
func (p *planner) lostWrites() *over {
	for k, c := range p.s.columns {
		for copy := range p.w.Layout.Copies {
			if l := p.w.At(k, copy); c.Kind != raid.ShapeNothing && p.reborn(l, c) {
				return &over{ // if anybody has had the device
					WritesLost: p.s.top.exists || p.w.Detach,
					Why:        fmt.Sprintf("leg %s of column %d on %s returned without data that only its drive's cache had held", l.Leg, k, l.Node),
				}
			}
		}
	}
	return nil
}

// reborn reports whether a leg in sync has lost its cache since it came into the
// tables: they have it under another identity, or, if that was not noted, not under
// the one that it has now.
func (p *planner) reborn(l *attachment.Link, c columnSeen) bool {
	if l == nil || l.Reborn == 0 || l.Reborn != l.Revision || !p.inSync(l) {
		return false
	}
	slot, now := p.m.slot(l.Column, l.Copy), p.s.legs[l.Leg].device
	if slot.Leg == l.Leg && c.has(slot.Device) {
		return slot.UUID != l.UUID
	}
	return now != "" && !c.has(now)
}

// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"fmt"

	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/engine"
)

// An epoch that is given up is over for this host: its device fails, and the volume
// is taken up again only under the next one, which the manager grants when it hears.
// There are two reasons. A leg has lost with its drive's cache what was acknowledged
// and not flushed: reads would go back in time, and a flush would succeed over a
// hole. Or the volume is let go of otherwise than asked: writes may be on some copies
// and not on others, or still under way at a target, and only a new epoch drains
// these and makes the copies equal.

// end gives the epoch of a volume up that cannot go on, or that goes away without
// having been let go.
func (p *planner) end() {
	var over *pb.GaveUp
	switch {
	case p.w != nil && !p.m.of(p.w): // it is over in any case
	case p.w == nil && p.m.used:
		over = &pb.GaveUp{Why: "it was removed by force while the volume manager did not want it here"}
	case p.w != nil && p.w.Grant == 0:
		over = p.lostWrites()
	}
	if over != nil {
		p.ends = over
		p.do(order{op: opGiveUp, end: over})
	}
}

// over is why the epoch that is wanted is not taken up again; nil if it may be.
func (p *planner) over() *pb.GaveUp {
	switch {
	case p.w == nil || !p.m.of(p.w) || p.w.Grant != 0: // it is shared, and each grant is another one
		return nil
	case p.ends != nil:
		return p.ends
	case p.m.over == nil && p.m.gone && !p.m.clean && !p.w.Detach:
		return &pb.GaveUp{Why: "it had been released, but not cleanly"}
	}
	return p.m.over
}

// gaveUp tells the manager so until it has granted the volume anew.
func (p *planner) gaveUp(over *pb.GaveUp, making bool) {
	p.v.GaveUp = over
	if !p.built() && !making {
		p.v.Phase = pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHED_UNCLEAN
	}
	if !p.w.Detach {
		p.v.Wait("the volume manager, to grant it again: %s", over.Why)
	}
}

// reborn is the link of the leg in use in a place, if that has lost since what only
// its drive's cache held, and counts as in sync all the same; nil if it has not.
func (p *planner) reborn(at place) *attachment.Link {
	slot, l := p.m.slots[at], p.link(at)
	if l == nil || l.Rebuilding || l.Leg != slot.leg || l.Reborn <= slot.revision || p.m.records.Stale(l) {
		return nil
	}
	return l
}

// lostWrites finds a leg that has lost what was acknowledged.
func (p *planner) lostWrites() *pb.GaveUp {
	for _, at := range p.places() {
		l := p.reborn(at)
		if l == nil {
			continue
		}
		if s := p.status(at); s.Unflushed || s.State != engine.InSync && s.State != engine.CaughtUp {
			return &pb.GaveUp{ // if anybody has had the device
				WritesLost: p.s.device.exists || p.w.Detach,
				Why:        fmt.Sprintf("leg %s of column %d on %s returned without data that only its drive's cache had held", l.Leg, l.Column, l.Node),
			}
		}
	}
	return nil
}

// renew goes on with a leg that has lost nothing that counts, once it is there.
func (p *planner) renew(m member) {
	if p.s.legs[m.Leg].live {
		p.do(order{op: opRenew, legs: []legAt{{place: m.place, leg: m.Leg, revision: m.Link.Revision}}})
	}
}

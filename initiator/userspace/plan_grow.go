// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"weft.dev/weft/initiator/attachment"
	"weft.dev/weft/raid/engine"
)

// grow makes the volume as large as it is wanted when all legs in use have room,
// and then its device as large as the volume. Until then I/O goes on at the old
// size: nothing waits for the new one, so that this is noted, and no stall.
func (p *planner) grow() {
	size, d := p.s.volume.size, p.s.device
	switch {
	case p.w.Detach:
	case p.w.Size < size:
		p.v.Note("volume has %v and is wanted with %v: volumes cannot shrink", size, p.w.Size)
	case d.exists && !d.ended && d.size < size:
		p.do(order{op: opResize})
	case p.w.Size > size && p.haveRoom():
		p.do(order{op: opGrow})
	}
}

// haveRoom reports whether all legs in use have room for the volume as it is wanted,
// and notes which have not.
func (p *planner) haveRoom() bool {
	ok := true
	for _, m := range p.members {
		if m.state == engine.Dropped {
			continue
		}
		short := "it is to leave first"
		if m.Link != nil {
			short = p.short(m.Link)
		}
		if short != "" {
			ok = false
			p.v.Note("grow to %v: leg %s of column %d on %s: %s", p.w.Size, m.Leg, m.Column, p.nodeOf(m), short)
		}
	}
	return ok
}

// short says why a leg has no room for the volume as it is wanted; empty if it has.
func (p *planner) short(l *attachment.Link) string {
	if size, need := p.s.legs[l.Leg].size, p.w.Layout.LegSize(p.w.Size); size < need {
		return attachment.TooSmall(size, need)
	}
	return ""
}

// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"maps"
	"slices"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/engine"
)

// letGo takes away a volume that nobody uses, after everything that was written
// has reached every leg.
func (p *planner) letGo() {
	if p.m.gone && !p.built() && len(p.s.conns) == 0 {
		p.v.Phase = pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHED_UNCLEAN
		if p.m.clean {
			p.v.Phase = pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHED_CLEAN
		}
		return
	}
	p.v.Phase = pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHING
	if !p.s.volume.built {
		// A volume that was never built is as it was before the grant.
		p.disconnect(order{op: opForget, clean: p.m.clean || !p.m.used && !p.w.Equalize})
		return
	}
	p.findMembers()
	hopeless := p.hopeless()
	switch {
	case p.s.device.exists && hopeless: // before what waits for ever
		p.do(order{op: opClose, force: p.s.device.refusal != "" && !p.s.device.open})
	case hopeless:
		p.do(order{op: opDismantle})
		return
	}
	p.serve()
	settled := p.settled()
	switch {
	case p.s.device.exists:
		if p.s.device.refusal != "" {
			p.v.Wait("%s", p.s.device.refusal)
		}
		if settled && !hopeless {
			p.do(order{op: opClose})
		}
	case !p.s.volume.equal:
		p.do(order{op: opDismantle})
	case settled && !p.s.volume.flushed && !p.w.ReadOnly:
		p.do(order{op: opFlush})
	case settled:
		p.do(order{op: opDismantle, clean: true})
	}
}

// settled reports whether every leg in sync is in use, and well.
func (p *planner) settled() bool {
	for i := range p.w.Links {
		l := &p.w.Links[i]
		if !p.m.records.InSync(l) {
			continue
		}
		at := p.memberAt(place{l.Column, l.Copy})
		if at < 0 && p.w.ReadOnly {
			continue
		}
		if at < 0 || p.members[at].Lost != "" || p.members[at].Link == nil || p.silence(l.Leg) > 0 {
			return false
		}
	}
	return p.s.volume.equal && !p.s.volume.suspended &&
		!slices.ContainsFunc(p.members, func(m member) bool { return m.state == engine.InSync && m.Lost != "" })
}

// hopeless reports whether a leg has been silent for the whole lease.
func (p *planner) hopeless() bool {
	return slices.ContainsFunc(p.members, func(m member) bool { return p.silence(m.Leg) >= p.l.lease })
}

// disconnect ends what connections there are, and then does last.
func (p *planner) disconnect(last order) {
	making := false
	for _, n := range p.connections() {
		if making = making || !p.s.conns[n].made; p.s.conns[n].made {
			p.do(order{op: opDisconnect, nqn: n})
		}
	}
	if making {
		p.v.Wait("a connection attempt in progress")
		return
	}
	p.do(last)
}

func (p *planner) connections() []block.NQN { return slices.Sorted(maps.Keys(p.s.conns)) }

// tearDown takes away the volume of an attachment that is over: the targets let no
// write of it through any more. Whoever still has the device open gets errors.
func (p *planner) tearDown() {
	p.v.Phase = pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHING
	making := false
	for _, n := range p.connections() {
		if making = making || !p.s.conns[n].made; p.s.conns[n].made {
			p.do(order{op: opCut, nqn: n})
		}
	}
	if p.built() {
		p.do(order{op: opAbort})
	}
	if over := p.over(); over != nil {
		p.gaveUp(over, making)
		return
	}
	if !making && (p.built() || p.m.epoch != 0) {
		p.do(order{op: opForget})
	}
}

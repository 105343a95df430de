// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"cmp"
	"slices"

	"weft.dev/weft/proto/pb"
)

// letGo removes the stack of a volume that nobody uses, after everything that
// was written has reached every leg.
func (p *planner) letGo() {
	if p.m.Gone && !p.built() && len(p.s.controllers) == 0 {
		p.v.Phase = p.outcome()
		return
	}
	p.v.Phase = pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHING
	p.findMembers()
	switch {
	case p.s.top.exists && (p.s.top.open > 0 || !p.settled() && !p.hopeless()):
		p.members = nil
		p.serve()
		p.v.Phase = pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHING
		if p.s.top.open > 0 {
			p.v.Wait("%s has it open", cmp.Or(p.s.top.users, "somebody"))
		}
	case p.s.top.exists:
		clean := p.settled()
		if clean && !p.w.ReadOnly {
			p.do(order{op: opFlush})
		}
		p.hide()
		p.do(order{op: opRemoveTop, clean: clean})
	default:
		p.removeRest(p.m.Clean && p.settled())
	}
}

func (p *planner) outcome() pb.AttachmentPhase {
	if p.m.Clean {
		return pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHED_CLEAN
	}
	return pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHED_UNCLEAN
}

// settled reports whether every in-sync leg is in the tables, and well, and the
// device not stopped: a flush would wait in it.
func (p *planner) settled() bool {
	if p.s.top.suspended || p.s.top.suspending {
		return false
	}
	for i := range p.w.Links {
		l := &p.w.Links[i]
		at := p.memberAt(l.Column, l.Copy)
		if !p.inSync(l) || !p.s.top.exists && len(p.s.columns[l.Column].devices) == 0 {
			continue
		}
		if at < 0 && p.w.ReadOnly {
			continue
		}
		if at < 0 || p.members[at].Lost != "" || p.silence(l.Leg) > 0 {
			return false
		}
	}
	return !slices.ContainsFunc(p.members, func(m member) bool { return m.Source && m.Lost != "" })
}

// hopeless reports whether a leg has been silent for the whole lease.
func (p *planner) hopeless() bool {
	return slices.ContainsFunc(p.members, func(m member) bool { return p.silence(m.Leg) >= p.l.lease })
}

// removeRest removes what is below the device. If it is not well, whatever may
// still wait on the legs is made to fail first: a table is not let go before
// its I/O has ended.
func (p *planner) removeRest(well bool) {
	if !well {
		p.releaseAll()
	}
	for k, c := range p.s.columns {
		if len(c.devices) == 0 {
			continue
		}
		if !well && !c.failed {
			p.do(order{op: opFailCol, column: k})
		}
		p.do(order{op: opRemoveCol, column: k})
	}
	if well {
		p.releaseAll()
	}
	if len(p.s.connecting) > 0 {
		p.v.Wait("a connection attempt in progress")
		return
	}
	p.do(order{op: opForget})
}

func (p *planner) releaseAll() {
	for _, n := range p.subsystems() {
		p.release(n)
	}
}

func (p *planner) hide() {
	if p.s.top.exposed {
		p.do(order{op: opHide})
	}
}

// tearDown takes away the stack of an attachment that is over: the targets let
// no write of it through any more. Whoever still has the device open gets errors.
func (p *planner) tearDown() {
	p.v.Phase = pb.AttachmentPhase_ATTACHMENT_PHASE_DETACHING
	p.takeDown()
	switch why := p.over(); {
	case why != nil:
		p.gaveUp(why)
	case p.s.top.exists && p.s.top.open > 0: // it is gone when its users are
	case len(p.s.connecting) == 0 && (p.built() || p.m.Epoch != 0):
		p.do(order{op: opForget})
	}
}

// takeDown fails what may still wait and removes what nobody uses.
func (p *planner) takeDown() {
	p.hide()
	top := p.s.top
	inUse := top.exists && top.open > 0
	if inUse {
		p.v.Wait("%s has the device of epoch %d open, and that epoch is over", cmp.Or(top.users, "somebody"), p.m.Epoch)
	}
	switch {
	case inUse && !top.failed:
		p.failAll()
		return
	case top.exists && !inUse:
		p.do(order{op: opRemoveTop})
	}
	if p.built() {
		p.removeColumns()
	}
	if !inUse {
		p.releaseAll()
	}
}

// failAll fails what waits in the columns and above them.
func (p *planner) failAll() {
	p.releaseAll()
	for k, c := range p.s.columns {
		if len(c.devices) > 0 && !c.failed {
			p.do(order{op: opFailCol, column: k})
		}
	}
	p.do(order{op: opFailTop})
}

// removeColumns fails what may still wait and removes the columns.
func (p *planner) removeColumns() {
	p.releaseAll()
	for k, c := range p.s.columns {
		if len(c.devices) == 0 {
			continue
		}
		if !c.failed {
			p.do(order{op: opFailCol, column: k})
		}
		p.do(order{op: opRemoveCol, column: k})
	}
}

// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"cmp"
	"slices"
)

// detach removes a volume that has no users, after every write has reached every leg.
func (p *planner) detach() {
	if p.m.Gone && !p.s.Built() && !p.connected() {
		p.v.Phase = DetachedUnclean
		if p.m.Clean {
			p.v.Phase = DetachedClean
		}
		return
	}
	p.findMembers()
	switch {
	case p.s.Device.Exists:
		p.detachDevice()
	case p.c.Tables:
		well := p.m.Clean && p.settled()
		p.removeColumns(well)
		p.detachPaths(well, p.m.Clean)
	case p.s.Built():
		p.detachVolume()
	default:
		// A volume that was never built is unchanged since the grant.
		p.detachPaths(true, p.m.Clean || !p.m.Used && !p.w.Equalize && !p.c.Outlives)
	}
	p.v.Phase = Detaching
}

// detachDevice removes a device that nobody has open, once every leg has every write or a leg
// has been silent for too long to wait for it.
func (p *planner) detachDevice() {
	d, hopeless := p.s.Device, p.hopeless()
	if p.c.KnowsUsers {
		clean := p.settled()
		if d.Open || !clean && !hopeless {
			p.serve()
			if d.Open {
				p.v.Wait("%s has it open", cmp.Or(d.Users, "somebody"))
			}
			return
		}
		if clean && !p.w.ReadOnly {
			p.do(Flush{})
		}
		p.hide()
		p.do(CloseDevice{Clean: clean})
		return
	}
	if hopeless { // before anything that might wait forever
		p.do(CloseDevice{Force: d.Refusal != "" && !d.Open})
	}
	p.serve()
	if d.Refusal != "" {
		p.v.Wait("%s", d.Refusal)
	}
	if (p.settled() || d.Ended) && !hopeless {
		p.do(CloseDevice{})
	}
}

// detachVolume takes apart a volume whose device is gone.
func (p *planner) detachVolume() {
	if p.hopeless() {
		p.do(Dismantle{})
		return
	}
	p.serve()
	settled := p.settled()
	switch {
	case slices.ContainsFunc(p.s.Columns, func(c ColumnSeen) bool { return c.Equalizing }):
		p.do(Dismantle{})
	case settled && !p.s.Flushed && !p.w.ReadOnly:
		p.do(Flush{})
	case settled:
		p.do(Dismantle{Clean: true})
	}
}

// detachPaths disconnects the paths, and then ends the epoch.
func (p *planner) detachPaths(well, clean bool) {
	if well {
		p.disconnectAll()
	}
	if p.connecting() {
		p.v.Wait("a connection attempt in progress")
		return
	}
	p.do(Forget{Clean: clean})
}

// settled reports whether every leg in sync takes part and is healthy, and no I/O is held: a
// flush would wait for held I/O.
func (p *planner) settled() bool {
	if p.s.Held || p.s.Holding {
		return false
	}
	for i := range p.w.Links {
		l := &p.w.Links[i]
		at := p.memberAt(Place{l.Column, l.Copy})
		c := p.s.Columns[l.Column]
		if !p.inSync(l) || !p.s.Device.Exists && !c.Exists {
			continue
		}
		if c.Equalizing {
			return false
		}
		if at < 0 && p.w.ReadOnly {
			continue
		}
		if at < 0 || p.members[at].Lost.any() || p.silence(l.Leg) > 0 {
			return false
		}
	}
	return !slices.ContainsFunc(p.members, func(m member) bool { return m.Source && m.Lost.any() })
}

// hopeless reports whether a leg has been silent for the whole lease.
func (p *planner) hopeless() bool {
	return slices.ContainsFunc(p.members, func(m member) bool { return p.silence(m.Leg) >= p.l.Lease })
}

func (p *planner) hide() {
	if p.c.KnowsUsers && p.s.Device.Named {
		p.do(HideDevice{})
	}
}

// tearDown removes the volume of an attachment that is over: the targets reject its writes
// already. Processes that still have the device open get errors.
func (p *planner) tearDown() {
	p.v.Phase = Detaching
	inUse := p.takeDown()
	switch why := p.over(); {
	case why != nil:
		p.gaveUp(why)
	case inUse: // it is removed when its users have closed it
	case !p.connecting() && (p.s.Built() || p.m.Epoch != 0):
		p.do(Forget{})
	}
}

// takeDown fails the I/O that may still wait and removes what is unused; inUse says that the
// device stays until its users close it.
func (p *planner) takeDown() (inUse bool) {
	if !p.c.KnowsUsers {
		p.cutAll()
		if p.s.Built() {
			p.do(Abort{})
		}
		return false
	}
	p.hide()
	d := p.s.Device
	if inUse = d.Exists && d.Open; inUse {
		p.v.Wait("%s has the device of epoch %d open, and that epoch is over", cmp.Or(d.Users, "somebody"), p.m.Epoch)
	}
	switch {
	case inUse && !d.Failed:
		p.failAll()
		return true
	case d.Exists && !inUse:
		p.do(CloseDevice{})
	}
	p.removeColumns(false)
	return inUse
}

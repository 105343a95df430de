// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
)

// A stock host is a machine without Weft's agent. Its operator connects to volumes with Linux's own
// NVMe tools, which find them at the discovery controllers of the targets. Nobody there keeps the
// promises that an agent keeps: to record a lost copy before a write is acknowledged, to make copies
// equal, to release a volume when asked. So such a host gets only what needs none of them:
//
//   - one leg: a volume of one column and one copy, exclusively. There is nothing to record;
//   - one path: the log names one portal of the leg's target. A host with two could send a write
//     again on one path while the first one is still on its way on the other;
//   - the fence as it is: the name of the subsystem holds the epoch, so a detached host finds nothing
//     under the old name, and its targets confirm that before another host is let in.
//
// A detach asks nobody. Whoever detaches has unmounted the volume, or loses what was not written yet.
// A leg that loses its drive's cache gets a new identity, as for any host: the old device fails, and
// the host finds a new one.

// stockLevel is the level from which on hosts may be without an agent: earlier managers would drop
// that they are.
const stockLevel block.Level = 3

// AddHost adds a stock host. It may be repeated, and may change a host that has nothing attached.
// Result: AddedHost.
type AddHost struct {
	Node         block.NodeName
	NQN          block.NQN // of the host
	Authenticate bool      // it proves its identity to targets, and they theirs to it
}

// AddedHost is a stock host, and what it and the targets prove to one another; zero: nothing.
type AddedHost struct {
	Node Node
	Keys block.Keys
}

func (in AddHost) apply(t *tx) (view, error) {
	if err := t.needsLevel(stockLevel, "a host without Weft's agent"); err != nil {
		return nil, err
	}
	if err := in.check(t); err != nil {
		return nil, err
	}
	host := block.Host{NQN: in.NQN, ID: block.StockHostID(in.NQN)}
	was := t.nodes.peek(in.Node)
	if was == nil || !was.Stock || was.Host != host || was.InitiatorAuthenticates != in.Authenticate || was.ConfirmedDead {
		n := t.node(in.Node)
		n.Stock, n.Host, n.InitiatorAuthenticates, n.ConfirmedDead = true, host, in.Authenticate, false
		if was == nil || !was.Stock {
			t.event(event.Info, event.NodeJoined, nodeObject(in.Node), fmt.Sprintf("added as a host without Weft's agent, %s", in.NQN), "node", string(in.Node))
		}
	}
	return func(s *State) any {
		added := AddedHost{Node: s.nodeView(s.nodes[in.Node])}
		if in.Authenticate {
			added.Keys = s.stockKeys(in.NQN)
		}
		return added
	}, nil
}

// check refuses what is no host, or another one's.
func (in AddHost) check(t *tx) error {
	if _, err := block.ParseNodeName(string(in.Node)); err != nil {
		return invalid("node", "%v", err)
	}
	if _, err := block.ParseNQN(string(in.NQN)); err != nil {
		return invalid("host_nqn", "%v", err)
	}
	for _, name := range slices.Sorted(maps.Keys(t.s.nodes)) {
		if name != in.Node && t.s.nodes[name].Host.NQN == in.NQN {
			return refused(ReasonNodeInUse, nodeObject(name), "it has the NQN %s already", in.NQN).hint("give each host its own: `nvme gen-hostnqn`")
		}
	}
	n := t.nodes.peek(in.Node)
	switch {
	case n == nil:
		return nil
	case !n.Stock && n.InitiatorBoot != "":
		return refused(ReasonNodeInUse, nodeObject(in.Node), "an initiator agent runs there, or did").
			hint("attach volumes to it as to any host; or remove it first: `weft node remove %s`", in.Node)
	case n.Stock && n.Host.NQN == in.NQN && n.InitiatorAuthenticates == in.Authenticate:
		return nil
	}
	for _, id := range t.s.volumesOn(in.Node) {
		if v := t.peek(id); v.attachmentOf(in.Node) != nil {
			return refused(ReasonAttached, v.object(), "attached to %s, which is to change", in.Node).hint("detach it first: `weft detach %s`", v.Name)
		}
	}
	return nil
}

// stockKeys are what a stock host and the targets prove to one another. A host has the same for all
// of its volumes, since its tools know one secret, and so does the kernel's target.
func (s *State) stockKeys(host block.NQN) block.Keys { return s.master.Of("weft stock host", host) }

// identity is the host to which a target exports a grant that has to be proven, and the keys.
func (s *State) identity(a *Attachment, subsystem block.NQN) (block.Host, block.Keys) {
	if a.Stock {
		return a.Host, s.stockKeys(a.Host.NQN)
	}
	host := block.ProvenHost(subsystem)
	return host, s.master.Of(subsystem, host.NQN)
}

// stock reports whether a stock host has the volume, or is about to.
func (v *Volume) stock() bool { return v != nil && v.Attachment != nil && v.Attachment.Stock }

// mayUse refuses a volume that a stock host cannot use safely.
func (s *State) mayUse(v *Volume, n *Node, mode AttachMode) error {
	good := 0
	for i := range v.Legs {
		if v.Legs[i].State == LegInSync {
			good++
		}
	}
	switch {
	case !n.Stock:
		return nil
	case mode != AttachExclusive:
		return &Error{Kind: Unimplemented, Field: "mode", Object: v.object(), Text: fmt.Sprintf("mode: %s: a host without Weft's agent, such as %s, can only have it exclusively", v.object(), n.Name)}
	case v.Layout.Stripes != 1 || v.Layout.Group().Members != 1:
		return &Error{
			Kind: Unimplemented, Field: "node", Object: v.object(),
			Text: fmt.Sprintf("node: %s has %d×%v (columns × copies), which a host without Weft's agent, such as %s, cannot put together", v.object(), v.Layout.Stripes, v.Layout.Group(), n.Name),
			Hint: "create a volume with --stripes 1 --copies 1, or run `weft initiator` on the host",
		}
	case v.Thin:
		return &Error{
			Kind: Unimplemented, Field: "node", Object: v.object(),
			Text: fmt.Sprintf("node: %s is thin, and a host without Weft's agent, such as %s, fails writes that wait for space", v.object(), n.Name),
			Hint: "create a volume without --thin, or run `weft initiator` on the host",
		}
	case !wholeLeg(v.Layout, v.planned()):
		return v.notWhole(v.planned(), string(n.Name))
	case good > 1: // it would write to one of them
		return refused(ReasonNotReady, v.object(), "a leg has just been moved, and the old one is still in sync").hint("try again in a few seconds")
	}
	return nil
}

// wholeLeg reports whether a volume of this size fills its leg. A stock host sees the leg: if that were
// larger, it could write where the next host sees nothing.
func wholeLeg(l block.Layout, size block.Size) bool { return l.LegSize(size) == size }

func (v *Volume) notWhole(size block.Size, node string) error {
	return invalid("size_bytes", "%v: a host without Weft's agent, such as %s, would see %v, the whole leg of %s", size, node, v.Layout.LegSize(size), v.object()).
		hint("`weft volume expand %s --size %v` first", v.Name, v.Layout.LegSize(size))
}

// settleStock notes when the target of an attached stock host does not export its leg any more, as after
// it was started anew, and when it does again: a host that was refused meanwhile is then told to
// connect.
func (t *tx) settleStock(id block.VolumeID) {
	v := t.peek(id)
	if !v.stock() || v.Attachment.State != Attached {
		return
	}
	for _, at := range t.s.subsystems(v, v.Attachment) {
		if on := t.s.targets[at.node]; on == nil || !t.s.targetOnline(at.node) {
			return // it has not said
		}
	}
	if away := !t.s.exportsTo(v, v.Attachment); away != v.Attachment.Away {
		t.volume(id).Attachment.Away = away
	}
}

// exportsTo reports whether the targets of a stock host's legs have confirmed its exports.
func (s *State) exportsTo(v *Volume, a *Attachment) bool {
	all := s.subsystems(v, a)
	return len(all) > 0 && !slices.ContainsFunc(all, func(at subsystem) bool {
		on := s.targets[at.node]
		return on == nil || !slices.Contains(on.exports.Get(at.nqn), at.leg)
	})
}

// subsystem is where a leg is exported.
type subsystem struct {
	node block.NodeName
	nqn  block.NQN
	leg  block.LegID
}

// subsystems are those through which a host reaches its legs. A stock host has one.
func (s *State) subsystems(v *Volume, a *Attachment) (all []subsystem) {
	for i := range v.Legs {
		if l := &v.Legs[i]; l.exported() && !l.Suspect {
			all = append(all, subsystem{l.Node, s.nqn(v, a, l.Node), l.ID})
		}
	}
	return all
}

// Discovered is one subsystem that a stock host may connect to.
type Discovered struct {
	Volume block.VolumeID
	Host   block.NQN
	NQN    block.NQN // of the subsystem
	Portal block.Portal
	Away   bool       // the target does not export it at the moment; the host is told when it does again
	Keys   block.Keys // that the host proves to a discovery controller; zero: none
}

// discovered is what discovery controllers tell hosts of a volume. They tell it once the target has
// confirmed the export: a host that connects at once may be one that tries only once.
func (s *State) discovered(v *Volume) (all []Discovered) {
	if !v.stock() || v.Attachment.State != Attached {
		return nil
	}
	a := v.Attachment
	for _, at := range s.subsystems(v, a) {
		n := s.nodes[at.node]
		portals := v.portals(n)
		if n == nil || len(portals) == 0 || a.Proven.Required && !n.TargetAuthenticates {
			continue
		}
		d := Discovered{Volume: v.ID, Host: a.Host.NQN, NQN: at.nqn, Portal: stockPortal(portals), Away: a.Away}
		if slices.Contains(portals, a.Portal) { // the host may be connected there: a second path is dangerous
			d.Portal = a.Portal
		}
		if a.Proven.By {
			d.Keys = s.stockKeys(a.Host.NQN)
		}
		all = append(all, d)
	}
	return all
}

// stockPortal is the portal of a target that hosts are told of: the first one of TCP, if there is one.
func stockPortal(portals []block.Portal) block.Portal {
	if i := slices.IndexFunc(portals, func(p block.Portal) bool { return p.Transport == block.TCP }); i >= 0 {
		return portals[i]
	}
	return portals[0]
}

// toldTo are the volumes of which a node's target is told: those with a leg or an attachment there, and
// those of stock hosts, of which each discovery controller tells.
func (s *State) toldTo(node block.NodeName) []block.VolumeID {
	all := map[block.VolumeID]bool{}
	for id := range s.onNode.Get(node).Keys() {
		all[id] = true
	}
	for id := range s.stocked.Keys() {
		all[id] = true
	}
	return sorted(all)
}

// wakeDiscovery wakes all targets if what discovery tells of a volume may have changed.
func (t *tx) wakeDiscovery(wake woken, old, new *Volume) {
	if !old.stock() && !new.stock() {
		return
	}
	id := cmp.Or(new, old).ID
	for node := range t.s.targets {
		wake.volume(node, id)
	}
}

// anyStock reports whether there is a stock host. Without one no target listens for any.
func (s *State) anyStock() bool {
	for _, n := range s.nodes {
		if n.Stock {
			return true
		}
	}
	return false
}

// wakeDiscoverers wakes all targets when the first stock host is added, or the last is gone.
func (t *tx) wakeDiscoverers(wake woken, old, new *Node) {
	if (old != nil && old.Stock) == (new != nil && new.Stock) {
		return
	}
	for node := range t.s.targets {
		wake.head(node)
	}
}

// stockWaits says what an attachment to a stock host waits for.
func (s *State) stockWaits(v *Volume, a *Attachment) string {
	if a.State == Attached {
		return ""
	}
	for _, at := range s.subsystems(v, a) {
		return s.targetWait(at.node, "to export it to "+string(a.Node))
	}
	return "a leg that can be exported"
}

func (s *State) targetWait(node block.NodeName, what string) string {
	if !s.targetOnline(node) {
		return fmt.Sprintf("target %s, which is offline, %s", node, what)
	}
	return fmt.Sprintf("target %s %s", node, what)
}

// explainStock says how a stock host reaches its volume.
func (s *State) explainStock(e *Explanation, v *Volume, a *Attachment) {
	if a.State == Granted {
		e.Summary = fmt.Sprintf("%s is granted to %s, a host without Weft's agent", v.object(), a.Node)
	}
	for _, d := range s.discovered(v) {
		e.Facts = append(e.Facts, fmt.Sprintf("host %s (%s) has no agent: its own NVMe tools connect to %s at %s, and find that at the discovery port of any target", a.Node, d.Host, d.NQN, d.Portal))
	}
	e.Facts = append(e.Facts, fmt.Sprintf("a detach does not wait for %s: unmount the volume there first", a.Node))
}

// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"cmp"
	"fmt"
	"hash/crc32"
	"net/netip"
	"slices"

	"weft.dev/weft/proto/block"
)

// connect asks for the paths that the legs need. This includes subsystems that were connected
// before: some kernels drop a connection for good when a returning target is not complete yet. While the kernel connects
// to a silent portal it connects nothing else, also not what other volumes wait for; so a path beside another one is
// made only to a portal that accepts connections.
func (p *planner) connect() {
	asked := map[block.NQN]bool{}
	for i := range p.w.Links {
		l := &p.w.Links[i]
		if asked[l.NQN] || p.m.Records.Stale(l) {
			continue
		}
		asked[l.NQN] = true
		there := 0
		for _, path := range p.s.Paths {
			if path.Subsystem == l.NQN && path.usable() {
				there++
			}
		}
		if portals := p.portals(l); there < p.paths(l) && len(portals) > 0 && (there == 0 || p.accepts(Path{l.NQN, portals[0]})) {
			p.do(Connect{Path: Path{Subsystem: l.NQN, Portal: portals[0]}, Others: len(portals) > 1, Keys: l.Keys, Host: l.Host})
		}
	}
}

// accepts reports whether a portal has accepted a connection lately, and has it tried otherwise.
func (p *planner) accepts(path Path) bool {
	tried := p.s.Tried[path]
	if p.s.Now.Sub(tried.At) >= tryEvery {
		p.do(Try{path})
		return false
	}
	return tried.OK
}

// paths is the number of portals that this host connects to for a leg's subsystem.
func (p *planner) paths(l *Link) int {
	if !p.c.Multipath {
		return 1
	}
	return max(1, l.Paths)
}

// portals lists the portals of a leg that are usable and not in use, the next to try first. A
// portal that could not be connected goes to the end, and after it those that have fallen silent lately, the
// latest last.
func (p *planner) portals(l *Link) (all []block.Portal) {
	for _, portal := range p.inTurn(l) {
		if !p.seen(Path{l.NQN, portal}).usable() {
			all = append(all, portal)
		}
	}
	slices.SortStableFunc(all, func(a, b block.Portal) int {
		x, y := Path{l.NQN, a}, Path{l.NQN, b}
		return cmp.Or(
			p.suspect(x).Compare(p.suspect(y)),
			cmp.Compare(p.seen(x).Turns, p.seen(y).Turns),
		)
	})
	return all
}

// inTurn lists the portals that fit, as this leg would use them if all were alike. Volumes begin
// at different rails, and so do the columns of a volume and the copies of a column. The volume's own rail
// comes first, then the networks near to its GPU, then the host's rail and the networks near to that.
func (p *planner) inTurn(l *Link) (all []block.Portal) {
	for _, portal := range l.Portals {
		if p.fits(portal) {
			all = append(all, portal)
		}
	}
	if len(all) == 0 {
		return nil
	}
	slices.SortStableFunc(all, func(a, b block.Portal) int { return cmp.Compare(a.Rail, b.Rail) }) // targets may list them differently
	first := (int(crc32.ChecksumIEEE(p.w.Volume.UUID[:])%uint32(len(all))) + l.Column + l.Copy) % len(all)
	all = append(all[first:], all[:first]...)
	own := func(portal block.Portal) int {
		switch {
		case p.w.Rail != "" && portal.Rail == p.w.Rail:
			return 0
		case within(p.w.Near, portal):
			return 1
		case p.c.Rail != "" && portal.Rail == p.c.Rail:
			return 2
		case within(p.c.Near, portal):
			return 3
		}
		return 4
	}
	slices.SortStableFunc(all, func(a, b block.Portal) int { return cmp.Compare(own(a), own(b)) })
	for i := range all {
		all[i].Rail = "" // it does not change where the portal leads
	}
	return all
}

// notePreference tells why a network that is preferred for the volume is not used.
func (p *planner) notePreference() {
	if p.w.NearError != "" {
		p.v.path("networks near to a GPU are not preferred: %s", p.w.NearError)
	}
	has := func(which func(block.Portal) bool) bool {
		return slices.ContainsFunc(p.w.Links, func(l Link) bool {
			return slices.ContainsFunc(l.Portals, func(portal block.Portal) bool { return p.fits(portal) && which(portal) })
		})
	}
	if p.w.Rail != "" && !has(func(portal block.Portal) bool { return portal.Rail == p.w.Rail }) {
		p.v.path("rail %s is not preferred: no target has a portal on it that this host can use", p.w.Rail)
	}
	if len(p.w.Near) > 0 && !has(func(portal block.Portal) bool { return within(p.w.Near, portal) }) {
		p.v.path("networks near to a GPU are not preferred: no target has a portal in %v that this host can use", p.w.Near)
	}
}

// within reports whether a portal is in one of these networks.
func within(networks []netip.Prefix, portal block.Portal) bool {
	at, err := netip.ParseAddr(portal.Address)
	return err == nil && slices.ContainsFunc(networks, func(n netip.Prefix) bool { return n.Contains(at) })
}

func (p *planner) fits(portal block.Portal) bool {
	return p.c.Transports == nil || slices.Contains(p.c.Transports, portal.Transport)
}

// seen returns a path as it was found; the zero state means that nothing is known of it.
func (p *planner) seen(path Path) PathSeen {
	i := slices.IndexFunc(p.s.Paths, func(s PathSeen) bool { return s.Path == path })
	if i < 0 {
		return PathSeen{Path: path}
	}
	return p.s.Paths[i]
}

// pathsTo lists the existing paths to a subsystem. If there are none, one path without a
// portal stands for any.
func (p *planner) pathsTo(n block.NQN) (all []Path) {
	for _, path := range p.s.Paths {
		if path.Subsystem == n && path.made() {
			all = append(all, path.Path)
		}
	}
	if len(all) == 0 {
		all = []Path{{Subsystem: n}}
	}
	return all
}

// alive reports whether one of the paths is live. It is also true if none of them exists,
// because nothing waits on them then.
func (p *planner) alive(paths []Path) bool {
	there := false
	for _, path := range paths {
		s := p.seen(path)
		if s.State == PathLive {
			return true
		}
		there = there || s.made()
	}
	return !there
}

// mute reports whether the target of a path that counts as live seems to answer nothing at
// all.
func (p *planner) mute(path Path) bool {
	if p.seen(path).State != PathLive {
		return false
	}
	for _, l := range p.s.Legs {
		for _, w := range l.Ways {
			if w.Path == path && !w.Silent.IsZero() && !w.Peer {
				return true
			}
		}
	}
	return false
}

// cut ends a path on which I/O may be waiting.
func (p *planner) cut(path Path) {
	if p.seen(path).made() {
		p.do(Cut{Path: path, Mute: p.mute(path)})
	}
}

// failFast prepares paths that are about to be cut, where the cut could take a minute by the time
// the record is made. Until then the mirrors hold the writes that fail. All other paths must let
// I/O wait: it could have no other copy to go to.
func (p *planner) failFast(cut []Path) {
	for _, path := range p.s.Paths {
		leaves := slices.Contains(cut, path.Path)
		if path.Lingers && path.FailsFast != leaves && (path.State == PathLive || path.State == PathSilent && leaves) {
			p.do(FailFast{Path: path.Path, On: leaves})
		}
	}
}

// cutAll cuts every path.
func (p *planner) cutAll() {
	for _, path := range p.s.Paths {
		p.cut(path.Path)
	}
}

// disconnectAll ends all paths; nothing uses them any more.
func (p *planner) disconnectAll() {
	for _, path := range p.s.Paths {
		if path.made() {
			p.do(Disconnect{Path: path.Path, Mute: p.mute(path.Path)})
		}
	}
}

// cleanUp disconnects paths that nothing uses.
func (p *planner) cleanUp() {
	for _, path := range p.s.Paths {
		wanted := slices.ContainsFunc(p.w.Links, func(l Link) bool { return l.NQN == path.Subsystem && !p.m.Records.Stale(&l) })
		used := slices.ContainsFunc(p.members, func(m member) bool { return slices.Contains(m.Paths, path.Path) })
		asked := slices.ContainsFunc(p.orders, func(o Order) bool { c, ok := o.(Cut); return ok && c.Path == path.Path })
		if !wanted && !used && !asked && path.made() && path.usable() {
			p.do(Disconnect{Path: path.Path, Mute: p.mute(path.Path)})
		}
	}
}

// endSurplus disconnects paths beyond the number that a leg is to have. An attempt to connect may have
// been left behind, and then have succeeded beside another path: the kernel would change from one to the
// other without anybody draining the first. Of a move that was interrupted, the old path is left.
func (p *planner) endSurplus() {
	if p.c.Hears { // its moves leave nothing behind
		return
	}
	seen := map[block.NQN]bool{}
	for i := range p.w.Links {
		l := &p.w.Links[i]
		if seen[l.NQN] || p.hangs(l.NQN) || p.moving(l.NQN) {
			continue
		}
		seen[l.NQN] = true
		live := 0
		if p.paths(l) == 1 {
			p.endReplaced(l.NQN)
		}
		for _, portal := range p.inTurn(l) {
			path := Path{l.NQN, portal}
			if p.seen(path).State != PathLive {
				continue
			}
			if live++; live > p.paths(l) {
				p.do(Disconnect{Path: path})
			}
		}
	}
}

// endReplaced disconnects paths whose controllers the target has ended, since the host has come back
// over another one.
func (p *planner) endReplaced(n block.NQN) {
	replaced := slices.ContainsFunc(p.s.Paths, func(path PathSeen) bool {
		return path.Subsystem == n && path.State == PathLive && path.Replaces
	})
	for _, path := range p.s.Paths {
		if replaced && path.Subsystem == n && path.State == PathSilent {
			p.do(Disconnect{Path: path.Path})
		}
	}
}

// moving reports whether a path to a subsystem is being moved.
func (p *planner) moving(n block.NQN) bool {
	return slices.ContainsFunc(p.s.Paths, func(path PathSeen) bool { return path.Subsystem == n && path.Moving })
}

// changes reports whether the legs of a subsystem change hands.
func (p *planner) changes(n block.NQN) bool {
	return slices.ContainsFunc(p.s.Paths, func(path PathSeen) bool { return path.Subsystem == n && path.Changes })
}

// connecting reports whether an attempt to connect is under way.
func (p *planner) connecting() bool {
	return slices.ContainsFunc(p.s.Paths, func(path PathSeen) bool { return path.State == PathConnecting })
}

// connected reports whether any path exists or is being made.
func (p *planner) connected() bool {
	return slices.ContainsFunc(p.s.Paths, func(path PathSeen) bool { return path.made() || path.usable() })
}

// Refusal is why the paths to a subsystem cannot be made; empty if they can.
func (s *Seen) Refusal(n block.NQN) string {
	for _, path := range s.Paths {
		if path.Subsystem == n && path.Error != "" {
			return path.Error
		}
	}
	return ""
}

// trouble says why a leg is not live.
func (p *planner) trouble(l *Link) string {
	if e := p.s.Legs[l.Leg].Error; e != "" {
		return e
	}
	if e := p.s.Refusal(l.NQN); e != "" {
		return e
	}
	if !slices.ContainsFunc(l.Portals, p.fits) {
		return fmt.Sprintf("node %s has no portal of a transport that this data path supports (%v)", l.Node, p.c.Transports)
	}
	return "connecting"
}

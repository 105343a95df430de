// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"slices"
	"time"

	"weft.dev/weft/proto/block"
)

// A leg has one active path. When that falls silent, the path moves to another portal of the same
// target, well before the leg counts as lost: nothing is recorded, and no copy falls behind.
//
// A write that is still on its way through the old portal must not land after its retry through
// the new one has been answered. The target sees to that: before it answers the new connection it
// ends the old controller and waits until that one's commands have left its drives
// (PathSeen.Replaces). Other targets make no such promise, so a path to them moves only after
// they must have given up the old connection.

// Suspect is a portal that has fallen silent.
type Suspect struct {
	Times int // how often, since it last worked for long
	Last  time.Time
}

// Times of suspects.
const (
	quarantineLeast = 10 * time.Second // for the first silence; it doubles with each further one
	quarantineMost  = 10 * time.Minute
	suspectForgets  = 30 * time.Minute // after which a portal that works is as good as new
)

// until is when a portal is trusted again; zero if it is.
func (s Suspect) until() time.Time {
	if s.Times == 0 {
		return time.Time{}
	}
	return s.Last.Add(min(quarantineMost, quarantineLeast<<min(s.Times-1, 10)))
}

// FellSilent remembers that a path has fallen silent and moves elsewhere. An outage counts once,
// however often the path is tried meanwhile.
func (m *Memory) FellSilent(path PathSeen, now time.Time) {
	s := m.Suspects[path.Path]
	if now.Sub(s.Last) > suspectForgets {
		s.Times = 0
	}
	if path.Answered || s.Times == 0 {
		s.Times++
	}
	s.Last = now
	m.Suspects[path.Path] = s
}

// suspect is until when a portal is suspect, zero if it is not.
func (p *planner) suspect(path Path) time.Time {
	if until := p.m.Suspects[path].until(); until.After(p.s.Now) {
		return until
	}
	return time.Time{}
}

// failOver moves paths that have fallen silent, except those that are about to be cut.
func (p *planner) failOver(cut []Path) {
	if !p.c.Moves {
		return
	}
	for _, path := range p.s.Paths {
		l := p.linkOf(path.Subsystem)
		if l == nil || p.paths(l) > 1 || path.State != PathLive && path.State != PathSilent || slices.Contains(cut, path.Path) {
			continue
		}
		silent := p.s.Now.Sub(path.Heard)
		if path.Looks < 3 || silent <= p.patience(path) { // a host that was frozen cannot tell
			continue
		}
		if to := p.portals(l); len(to) > 0 {
			p.do(Move{Path: path.Path, To: to[0], Silent: silent})
		}
	}
}

// patience is how long a path may be silent before it moves.
func (p *planner) patience(path PathSeen) time.Duration {
	if path.Replaces {
		return p.l.FailOver
	}
	return p.l.Quiesce
}

// linkOf returns a wanted leg of a subsystem, nil if there is none.
func (p *planner) linkOf(n block.NQN) *Link {
	i := slices.IndexFunc(p.w.Links, func(l Link) bool { return l.NQN == n && !p.m.Records.Stale(&l) })
	if i < 0 {
		return nil
	}
	return &p.w.Links[i]
}

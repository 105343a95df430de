// SPDX-License-Identifier: Apache-2.0

package volume

import (
	"fmt"
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
// (PathSeen.Replaces). Beside the kernel's target, which does not, the agent has it done before the host
// connects. Other targets make no such promise, so a path to them moves only after they must have given up the
// old connection.

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
// however often the path is tried meanwhile. A portal that was greeted is not to blame.
func (m *Memory) FellSilent(path PathSeen, now time.Time) {
	if path.greeted() {
		return
	}
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

// failOver moves paths that have fallen silent, except those that are about to be cut. If the leg has another one, it
// breaks their connection.
func (p *planner) failOver(cut []Path) {
	if !p.c.Moves {
		return
	}
	for _, path := range p.s.Paths {
		l := p.linkOf(path.Subsystem)
		if l == nil || path.State != PathLive && path.State != PathSilent || slices.Contains(cut, path.Path) {
			continue
		}
		silent := p.s.Now.Sub(path.Silent)
		if path.Silent.IsZero() || path.Moving || path.Looks < EnoughLooks || silent <= p.patience(l, path) { // a host that was frozen cannot tell
			continue
		}
		if p.paths(l) > 1 {
			if path.Portal.Transport == block.TCP && p.spare(path) {
				p.do(BreakDead{path.Path})
			}
			continue
		}
		to := slices.DeleteFunc(p.refuges(l, path), func(to block.Portal) bool { return to.Transport != path.Portal.Transport })
		if len(to) > 0 {
			p.do(Move{PathSeen: path, To: to[0], Silent: silent})
		}
	}
}

// spare reports whether one of several paths to a leg is dead and another one is not, so that I/O which waits on the
// first can go on. All of them count as silent if one is: a question about the leg goes through any of them.
func (p *planner) spare(path PathSeen) bool {
	return p.gone(path.Path, path.Silent) && slices.ContainsFunc(p.s.Paths, func(other PathSeen) bool {
		return other.Subsystem == path.Subsystem && other.Path != path.Path && other.State == PathLive && p.accepted(other.Path, path.Silent)
	})
}

// refuges are the portals to which a silent path can move, the best first. A data path that hears legs
// alone moves it only if its portal accepts no connection and the other does: else a drive may hang, and
// the target would not answer there either before that has ended. Nor can it wait for time to pass: to a
// target that keeps the old controller, the path does not move.
func (p *planner) refuges(l *Link, path PathSeen) []block.Portal {
	all := p.portals(l)
	if p.c.Hears {
		return all
	}
	if !path.Replaces || !p.gone(path.Path, path.Silent) {
		return nil
	}
	return slices.DeleteFunc(all, func(to block.Portal) bool { return !p.accepted(Path{l.NQN, to}, path.Silent) })
}

// A machine accepts connections without its processes, so a portal that accepts one belongs to a
// target that is merely slow, and one that does not for so long belongs to one that is gone.
const (
	tryAfter   = 100 * time.Millisecond // of silence
	tryAgain   = 250 * time.Millisecond // at the soonest, then less and less often
	acceptsFor = 150 * time.Millisecond
)

// trySilent tries all portals of a target that is silent on the path in use, again and again in a silence: a target
// that was merely slow at its beginning may be gone since.
func (p *planner) trySilent() {
	for _, path := range p.s.Paths {
		l, silent := p.linkOf(path.Subsystem), p.s.Now.Sub(path.Silent)
		if l == nil || path.Silent.IsZero() || silent < tryAfter {
			continue
		}
		for _, portal := range p.inTurn(l) {
			to := Path{l.NQN, portal}
			tried := p.s.Tried[to].At
			if _, under := p.s.Trying[to]; !under && (!tried.After(path.Silent) || p.s.Now.Sub(tried) >= max(tryAgain, silent/4)) {
				p.do(Try{to})
			}
		}
	}
}

// dead reports whether a portal has accepted no connection since a time, though it was tried.
func (p *planner) dead(path Path, since time.Time) bool {
	if tried := p.s.Tried[path]; tried.At.After(since) { // a path moves to a portal that has just accepted one
		return !tried.OK
	}
	return p.overdue(path)
}

// gone is dead, or that a portal has accepted one since, and then no more. That is enough to leave a path, which costs
// a pause, and not to give up a leg: an attempt is also overdue if this host has stood still for a moment. A leg is lost
// when that attempt has failed.
func (p *planner) gone(path Path, since time.Time) bool {
	return p.dead(path, since) || p.overdue(path)
}

// overdue reports whether a portal is being tried, and has not accepted the connection soon.
func (p *planner) overdue(path Path) bool {
	began, under := p.s.Trying[path]
	return under && began.After(p.s.Tried[path].At) && p.s.Now.Sub(began) >= acceptsFor
}

// accepted reports whether a portal has accepted the last connection that was tried, since a time.
func (p *planner) accepted(path Path, since time.Time) bool {
	tried := p.s.Tried[path]
	_, under := p.s.Trying[path]
	return !under && tried.OK && tried.At.After(since)
}

// tryRefused tries the other portals of a target that refuses connections at one, as often as it is
// tried there. If all refuse, nobody listens, and its legs are lost sooner than by silence.
func (p *planner) tryRefused() {
	if !p.c.Moves {
		return
	}
	for _, path := range p.s.Paths {
		l, refused := p.linkOf(path.Subsystem), p.s.Tried[path.Path].Refused
		if l == nil || path.State != PathSilent || refused.Last.IsZero() || p.s.Now.Sub(refused.Last) > refusalsLast {
			continue
		}
		for _, portal := range p.inTurn(l) {
			if to := (Path{l.NQN, portal}); to != path.Path && p.s.Tried[to].At.Before(refused.Last) {
				p.do(Try{to})
			}
		}
	}
}

// How often a portal is tried before a path goes back to it, and for how long the outcome counts.
const tryEvery = 5 * time.Second

// goBack moves paths that work to the portal where they belong, once that is trusted again and can
// be reached: rails stay balanced after one was down, and when portals are added or removed. Only
// targets for which that is quick are worth it.
func (p *planner) goBack() {
	if !p.c.Moves {
		return
	}
	for _, path := range p.s.Paths {
		l := p.linkOf(path.Subsystem)
		if l == nil || p.paths(l) > 1 {
			continue
		}
		if to, by := p.changed(l, path.Portal); by != block.SamePart {
			p.follow(Move{PathSeen: path, To: to, By: by})
			continue
		}
		if !path.mayGoBack() {
			continue
		}
		to, ok := p.home(l)
		if !ok || to == path.Path || to.Portal.Transport != path.Portal.Transport || p.hangs(path.Subsystem) {
			continue
		}
		if p.accepts(to) {
			p.do(Move{PathSeen: path, To: to.Portal})
		}
	}
}

// A target in the kernel serves from the agent's process what the kernel cannot, such as a leg of which a snapshot
// is to be taken, at portals of its own. If a leg changes from one to the other, the manager names the other's
// portals. The path works until the host asks, beside the kernel, that its export change too; the answer comes when
// it has.

// ChangeWithin is how long a target may take to have a leg change, before it is asked again. Meanwhile a leg may be
// silent for as long as while its path moves.
const ChangeWithin = 10 * time.Second

// changed is where a leg's path goes on, and by whom it is served there; SamePart if the leg has not changed.
func (p *planner) changed(l *Link, from block.Portal) (to block.Portal, by block.ServedBy) {
	all := p.inTurn(l)
	if from.Transport != block.TCP || slices.ContainsFunc(all, func(at block.Portal) bool { return at.HostPort() == from.HostPort() }) {
		return to, block.SamePart
	}
	beside := func(kernel, process block.Portal) bool {
		at, ok := kernel.Process()
		return ok && kernel.Transport == block.TCP && at.HostPort() == process.HostPort()
	}
	for _, to := range all {
		switch {
		case beside(from, to):
			return to, block.InProcess
		case beside(to, from):
			return to, block.InKernel
		}
	}
	return to, block.SamePart
}

// follow has a path follow a leg that has changed. One that is silent is another matter, unless it has lost its
// connection: that may be because the export has changed already. The target's answer promises then that nothing of
// the old connection is left.
func (p *planner) follow(m Move) {
	works := m.Replaces && m.State == PathLive && m.Answered && m.PathSeen.Silent.IsZero() && !p.hangs(m.Subsystem)
	if !m.Moving && (works || m.State == PathSilent) && p.seen(Path{m.Subsystem, m.To}).State != PathLive {
		p.do(m)
	}
}

// mayGoBack reports whether a path works, and a move is quick and disturbs nobody.
func (s PathSeen) mayGoBack() bool {
	return s.State == PathLive && !s.Moving && s.Answered && s.Silent.IsZero() && s.Replaces && !s.Stays
}

// hangs reports whether a leg of a subsystem does not answer. If its path moved, the others would
// wait for its commands, too.
func (p *planner) hangs(n block.NQN) bool {
	return slices.ContainsFunc(p.w.Links, func(l Link) bool { return l.NQN == n && !p.answering(l.Leg) })
}

// home is the path to a leg's subsystem that is used if all is well; false if none is trusted.
func (p *planner) home(l *Link) (Path, bool) {
	for _, portal := range p.inTurn(l) {
		if path := (Path{l.NQN, portal}); p.suspect(path).IsZero() {
			return path, true
		}
	}
	return Path{}, false
}

// noteSuspects tells the operator which portals are suspect.
func (p *planner) noteSuspects() {
	told := map[Path]bool{}
	for i := range p.w.Links {
		l := &p.w.Links[i]
		for _, portal := range p.inTurn(l) {
			path := Path{l.NQN, portal}
			until := p.suspect(path)
			if until.IsZero() || told[path] {
				continue
			}
			told[path] = true
			p.v.path("portal %v of %s is suspect: it has fallen silent %s, and is used again from %s on, earlier only if no other answers",
				portal, l.Node, times(p.m.Suspects[path].Times), until.UTC().Format(time.RFC3339))
		}
	}
}

func times(n int) string {
	if n == 1 {
		return "once"
	}
	return fmt.Sprintf("%d times", n)
}

// patience is how long a path may be silent before what waits on it goes elsewhere.
func (p *planner) patience(l *Link, path PathSeen) time.Duration {
	switch {
	case p.paths(l) > 1: // nothing of it has to end first
		return p.l.FailOver
	case !path.Replaces:
		return p.l.Quiesce
	case p.gone(path.Path, path.Silent): // also if it was greeted: then the network has failed since
		return p.l.FailOver
	case path.greeted():
		return p.l.Window
	}
	return 2 * p.l.FailOver
}

// greeted reports whether the target answers at a portal but does not let the host in yet: it
// waits for commands of the host's older controller, as it would at its other portals.
func (s PathSeen) greeted() bool { return s.State == PathSilent && s.Greeted }

// linkOf returns a wanted leg of a subsystem, nil if there is none.
func (p *planner) linkOf(n block.NQN) *Link {
	i := slices.IndexFunc(p.w.Links, func(l Link) bool { return l.NQN == n && !p.m.Records.Stale(&l) })
	if i < 0 {
		return nil
	}
	return &p.w.Links[i]
}

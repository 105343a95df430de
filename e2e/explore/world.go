// SPDX-License-Identifier: Apache-2.0

package explore

import "weft.dev/weft/initiator/volume"

// world is everything at one moment. Managers, targets, hosts and messages are numbers of values
// that the rig holds, so a world is small, and equal worlds are ==. Masks are of targets, of hosts,
// or of copies, which are those of the targets.
type world struct {
	manager int32
	target  [targets]int32
	host    [hosts]int32

	// Messages under way, one in each direction of a stream; 0: none. When one has arrived, the
	// next tells the newest state.
	toTarget, fromTarget [targets]int32
	toHost, fromHost     [hosts]int32
	targetSaid           [targets]int32 // the last report that was sent on this stream
	hostSaid             [hosts]int32
	targetDue, hostDue   uint8        // the manager has something newer for them
	call, reply          [hosts]int32 // a record, on its way to the manager and back
	granted              [hosts]bool  // the reply says that the record was made
	held                 uint16       // of these and of the hosts' turns, those that are late

	targetUp, hostUp         uint8
	targetLinked, hostLinked uint8          // with a stream to the manager
	cut                      [targets]uint8 // hosts that do not reach it

	// The data path: one block. Writes are numbered, and a leg's content is the last write that it
	// executed; its medium holds the last one that survives the loss of its cache.
	content, medium [targets]uint8
	late            [targets]command // left at a target by a connection or a host that has ended
	write           [hosts]write
	missed          [hosts]uint8 // copies of which the host's engine knows that they miss a write
	cached          [hosts]uint8 // copies that may have, as far as it knows, a write in their cache alone
	had             [hosts]uint8 // the newest write that the present device acknowledged or showed
	acked, flushed  uint8        // the newest write that users may rely on; the part that a cache may not lose
	lossy           uint8        // legs that have lost a cache, which the manager does not know
	next            uint8        // number of the next write

	spent [faults]uint8
}

// command is a write at a target that nobody waits for any more.
type command struct {
	write    uint8
	identity int32
}

// write is a user's write: one at a time on each host.
type write struct {
	number uint8 // 0: none
	at     [targets]progress
}

// progress is how far a write has come at a leg.
//
//	out ──► sent ──► done
type progress uint8

const (
	out  progress = iota // the leg takes no part
	sent                 // under way: to the target, in its queue, or on the way back
	done                 // executed and answered
)

type fault int

const (
	writes fault = iota
	attaches
	detaches
	forces
	cuts
	partings
	crashes
	deaths
	restartings
	lates
	slownesses
	faults
)

func (r *rig) most(f fault) int {
	return [faults]int{r.Writes, r.Attaches, r.Detaches, r.Forces, r.Cuts, r.Partings, r.Crashes, r.Deaths, r.Restarts, r.Lates, r.Slownesses}[f]
}

// may reports whether a fault may happen once more, and counts it.
func (r *rig) may(w *world, f fault) bool {
	if int(w.spent[f]) >= r.most(f) {
		return false
	}
	w.spent[f]++
	return true
}

// edge is a step to a world.
type edge struct {
	to  world
	did action
}

// action says what a step was.
type action struct {
	what string
	at   int8 // a target, or the copy there; -1: none
	by   int8 // a host; -1: none
	kind class
}

// class tells steps apart.
type class int8

const (
	progresses class = iota // what is under way goes on
	heals                   // something is well again
	uses                    // a user or an operator does something
	breaks
	waits // time passes
)

// reaches reports whether a host's packets reach a target that is up.
func (w *world) reaches(h, i int) bool {
	return w.targetUp&(1<<i) != 0 && w.cut[i]&(1<<h) == 0
}

// answers reports whether a copy answers a host under the identity that the host uses.
func (r *rig) answers(w *world, h, i int) bool {
	if !w.reaches(h, i) {
		return false
	}
	x := r.hosts.at(w.host[h])
	s := &x.Stack.Slots[i]
	return x.Conns[i] == s.NQN && r.targets.at(w.target[i]).serves(s.NQN, s.UUID)
}

func (r *rig) stack(w *world, h int) *stack {
	if w.hostUp&(1<<h) == 0 {
		return nil
	}
	return r.hosts.at(w.host[h]).Stack
}

// normal does what takes no time: agents send what is new, the engine acknowledges what is done,
// and commands whose export is gone are dropped.
func (r *rig) normal(w world) world {
	for i := range r.Copies {
		r.sendTarget(&w, i)
		if c := w.late[i]; c.write != 0 {
			if id := r.identities.at(c.identity); !r.targets.at(w.target[i]).serves(id.NQN, id.UUID) {
				w.late[i] = command{}
			}
		}
	}
	for h := range r.Hosts {
		r.sendHost(&w, h)
		r.settle(&w, h)
	}
	if !r.Cached {
		w.medium = w.content
	}
	for n := range kinds {
		if w.held&(1<<n) != 0 {
			if _, there := r.pending(&w, 1<<n); !there {
				w.held &^= 1 << n // it was lost, or came to nothing
			}
		}
	}
	return w
}

// sendTarget sends what is new on the stream of a target, in either direction.
func (r *rig) sendTarget(w *world, i int) {
	bit := uint8(1) << i
	if w.targetLinked&bit == 0 {
		return
	}
	if w.targetDue&bit != 0 && w.toTarget[i] == 0 {
		w.toTarget[i], w.targetDue = r.wantsOfTarget(w.manager, i), w.targetDue&^bit
	}
	if said := r.reportOfTarget(w.target[i]); w.fromTarget[i] == 0 && said != w.targetSaid[i] {
		w.fromTarget[i], w.targetSaid[i] = said, said
	}
}

func (r *rig) sendHost(w *world, h int) {
	bit := uint8(1) << h
	if w.hostLinked&bit == 0 {
		return
	}
	if w.hostDue&bit != 0 && w.toHost[h] == 0 {
		w.toHost[h], w.hostDue = r.wantsOfHost(w.manager, h), w.hostDue&^bit
	}
	if said := r.reportOfHost(w.host[h]); w.fromHost[h] == 0 && said != w.hostSaid[h] {
		w.fromHost[h], w.hostSaid[h] = said, said
	}
}

// settle drops what a target refuses, and acknowledges a write that all copies in use have.
func (r *rig) settle(w *world, h int) {
	x := &w.write[h]
	if x.number == 0 {
		return
	}
	st := r.stack(w, h)
	all := true
	for i := range r.Copies {
		id := &st.Slots[i]
		if x.at[i] != out && !id.inUse() {
			x.at[i] = out
		}
		all = all && (x.at[i] == out || x.at[i] == done && !id.Withheld)
	}
	if all && !st.Held {
		if w.had[h] = max(w.had[h], x.number); r.holds(w) >= x.number { // else caches have lost it again
			w.acked = max(w.acked, x.number)
		}
		*x = write{}
	}
}

// holds is the newest write that a leg in sync holds; without caches, whatever that is.
func (r *rig) holds(w *world) (newest uint8) {
	if !r.Cached {
		return ^uint8(0)
	}
	inSync := r.managers.at(w.manager).inSync
	for i := range r.Copies {
		if inSync&(1<<i) != 0 {
			newest = max(newest, w.content[i])
		}
	}
	return newest
}

// tell gives the manager an input.
func (r *rig) tell(w *world, kind askedKind, node int, arg int32) decided {
	d := r.ask(asked{w.manager, kind, int8(node), arg})
	w.manager = d.manager
	w.targetDue |= d.wake & (1<<r.Copies - 1)
	w.hostDue |= d.wake >> targets & (1<<r.Hosts - 1)
	return d
}

// look is a host's view of the world.
func (r *rig) look(w *world, h int) looked {
	l := looked{host: w.host[h], linked: w.hostLinked&(1<<h) != 0, asking: w.call[h]+w.reply[h] != 0}
	for i := range r.Copies {
		if w.reaches(h, i) {
			l.sees[i] = r.visible(w.target[i], h)
		}
	}
	if st := r.stack(w, h); st != nil {
		for i := range r.Copies {
			if at := w.write[h].at[i]; at != out && at != done {
				l.busy |= 1 << i
			}
		}
		l.unflushed = w.cached[h]
	}
	return l
}

// turnOf lets a host take a turn; false if nothing changes. Connections to the copies in ended
// have ended with it.
func (r *rig) turnOf(w world, h int) (n world, changed bool, ended uint8) {
	t := r.turn(r.look(&w, h))
	if t.host == w.host[h] && t.effects == (effects{}) {
		return w, false, 0
	}
	if ended = t.cut | t.dropped | t.renewed; t.gone {
		ended = 1<<r.Copies - 1
	}
	r.effect(&w, h, t)
	return w, true, ended
}

// effect carries out what a turn does to the data path.
func (r *rig) effect(w *world, h int, t turned) {
	for i := range r.Copies {
		r.effectOn(w, h, i, t.effects)
	}
	w.host[h] = t.host
	if t.flushed != 0 {
		w.flushed = w.acked
	}
	if t.gone {
		w.write[h], w.had[h], w.missed[h], w.cached[h] = write{}, 0, 0, 0
	}
	if t.exposed {
		w.had[h] = r.shown(w, h)
		w.acked = max(w.acked, w.had[h])
	}
	if t.call != 0 {
		w.call[h] = t.call
	}
}

// effectOn is the part of effect that is about one copy.
func (r *rig) effectOn(w *world, h, i int, t effects) {
	x, bit := &w.write[h], uint8(1)<<i
	if t.connected&bit != 0 {
		w.late[i] = command{} // the target drains this host's older connection first
	}
	if t.dropped&bit != 0 {
		if x.at[i] == sent || w.cached[h]&bit != 0 {
			w.missed[h] |= bit // what was not flushed there counts as missed
		}
		x.at[i], w.cached[h] = out, w.cached[h]&^bit
	}
	if t.full&bit != 0 {
		w.missed[h] |= bit
	}
	if r.Cached {
		w.cached[h] |= t.earlier & bit
	}
	if (t.added|t.renewed)&bit != 0 && x.number != 0 {
		x.at[i] = sent
	}
	if (t.flushed|t.synced)&bit != 0 {
		w.medium[i] = w.content[i]
	}
	w.cached[h] &^= t.flushed & bit
}

// shown returns the write that a read from the first copy of a host sees.
func (r *rig) shown(w *world, h int) uint8 {
	for i := range r.Copies {
		if r.hosts.at(w.host[h]).Stack.Slots[i].State == volume.InSync {
			return w.content[i]
		}
	}
	return 0
}

// SPDX-License-Identifier: Apache-2.0

package explore

import (
	"fmt"
	"slices"

	"weft.dev/weft/initiator/volume"
)

func (a action) String() string {
	s := a.what
	if a.by >= 0 {
		s = string(hostName(int(a.by))) + ": " + s
	}
	if a.at >= 0 {
		s += fmt.Sprintf(" (t%d)", a.at+1)
	}
	return s
}

// all lists every step from a world.
func (r *rig) all(w world) []edge {
	next, quiet := r.urgent(w)
	next = r.lazy(w, next)
	next = r.heal(w, next)
	next = r.use(w, next)
	next = r.breakDown(w, next)
	return r.wait(w, next, quiet)
}

// add adds a step to next, and what follows from it at once. Where messages may be late, there is
// one world for each choice of those that are.
func (r *rig) add(next []edge, w world, kind class, what string, by, at int) []edge {
	return r.follow(next, r.normal(w), action{what, int8(at), int8(by), kind})
}

func (r *rig) follow(next []edge, w world, did action) []edge {
	bit, there := r.pending(&w, ^w.held)
	if r.Lates < 0 || !there {
		return append(next, edge{w, did})
	}
	next = r.follow(next, r.deliver(w, bit), did)
	if r.may(&w, lates) {
		w.held |= 1 << bit
		did.what += "; " + underWay[bit] + " is late"
		next = r.follow(next, w, did)
	}
	return next
}

// What can be under way, in the order in which it arrives if nothing is late: a number for each
// kind, and of those one for each target or host.
const (
	aReply      = 0
	aCall       = aReply + hosts
	aHostSays   = aCall + hosts
	aTargetSays = aHostSays + hosts
	anOrder     = aTargetSays + targets
	aWish       = anOrder + targets
	aTurn       = aWish + hosts
	kinds       = aTurn + hosts
)

// pending finds the first thing under way among some.
//
// Branches: one for each kind.
func (r *rig) pending(w *world, among uint16) (n int, there bool) {
	for n := range kinds {
		if among&(1<<n) == 0 {
			continue
		}
		switch {
		case n < aCall:
			there = w.reply[n-aReply] != 0
		case n < aHostSays:
			there = w.call[n-aCall] != 0
		case n < aTargetSays:
			there = w.fromHost[n-aHostSays] != 0
		case n < anOrder:
			there = w.fromTarget[n-aTargetSays] != 0
		case n < aWish:
			there = w.toTarget[n-anOrder] != 0
		case n < aTurn:
			there = w.toHost[n-aWish] != 0
		case n-aTurn < r.Hosts && w.hostUp&(1<<(n-aTurn)) != 0:
			_, there, _ = r.turnOf(*w, n-aTurn)
		}
		if there {
			return n, true
		}
	}
	return 0, false
}

// underWay names what pending finds.
var underWay = [kinds]string{
	"the answer to c1", "the answer to c2", "the call of c1", "the call of c2", "the report of c1", "the report of c2",
	"the report of t1", "the report of t2", "the report of t3", "the order to t1", "the order to t2", "the order to t3",
	"the order to c1", "the order to c2", "the next turn of c1", "the next turn of c2",
}

// deliver lets one thing that is under way arrive.
func (r *rig) deliver(w world, n int) world {
	w.held &^= 1 << n
	switch {
	case n < aCall:
		h := n - aReply
		w.host[h] = r.answer(w.host[h], w.reply[h], w.granted[h])
		w.reply[h], w.granted[h] = 0, false
	case n < aHostSays:
		h := n - aCall
		w.reply[h], w.call[h] = w.call[h], 0
		w.granted[h] = !r.tell(&w, hostCalls, h, w.reply[h]).refused
	case n < aTargetSays:
		h := n - aHostSays
		said := w.fromHost[h]
		w.fromHost[h] = 0
		r.tell(&w, hostSays, h, said)
	case n < anOrder:
		i := n - aTargetSays
		said := w.fromTarget[i]
		w.fromTarget[i] = 0
		r.tell(&w, targetSays, i, said)
	case n < aWish:
		i := n - anOrder
		w.target[i], w.toTarget[i] = r.comply(w.target[i], w.toTarget[i]), 0
	case n < aTurn:
		h := n - aWish
		w.host[h], w.toHost[h] = r.hear(w.host[h], w.toHost[h]), 0
	default:
		w, _, _ = r.turnOf(w, n-aTurn)
	}
	return r.normal(w)
}

// urgent lists the steps that come about before time passes, and whether there are any beside
// messages and turns that are late.
func (r *rig) urgent(w world) (next []edge, quiet bool) {
	quiet = true
	for n := range kinds {
		if _, there := r.pending(&w, 1<<n); there {
			next = r.follow(next, r.deliver(w, n), action{underWay[n] + arrives(n), -1, -1, progresses})
			quiet = quiet && r.Lates >= 0
		}
		if h := n - aTurn; h >= 0 && h < r.Hosts && w.hostUp&(1<<h) != 0 {
			if n, changed, ended := r.turnOf(w, h); changed {
				for _, late := range r.leave(w, n, h, ended) {
					next = r.add(next, late, progresses, "takes a turn; its write had arrived"+late.where(&w), h, -1)
				}
			}
		}
	}
	before := len(next)
	for h := range r.Hosts {
		next = r.engine(w, h, next)
	}
	return next, quiet && len(next) == before
}

func arrives(n int) string {
	if n >= aTurn {
		return ""
	}
	return " arrives"
}

// engine lists what a host's engine and its targets do.
func (r *rig) engine(w world, h int, next []edge) []edge {
	st := r.stack(&w, h)
	if st == nil {
		return next
	}
	for i := range r.Copies {
		if w.write[h].at[i] == sent && !st.Held && r.answers(&w, h, i) {
			n := w
			n.content[i], n.write[h].at[i] = w.write[h].number, done
			n.wrote(r, h, i)
			next = r.add(next, n, progresses, "its write is executed and answered", h, i)
		}
		if st.Slots[i].State == volume.Rebuilding && r.answers(&w, h, i) {
			next = r.rebuild(w, h, i, next)
		}
	}
	if st.Equalizing && !st.Equal {
		next = r.equalize(w, h, next)
	}
	return next
}

// wrote notes that a host's write may be in a copy's cache alone.
func (w *world) wrote(r *rig, h, i int) {
	if r.Cached {
		w.cached[h] |= 1 << i
	}
}

// rebuild copies to a leg what it misses.
func (r *rig) rebuild(w world, h, to int, next []edge) []edge {
	st := r.stack(&w, h)
	for from := range r.Copies {
		if st.Slots[from].State != volume.InSync || !r.answers(&w, h, from) {
			continue
		}
		n := w
		n.host[h] = r.copied(w.host[h], to)
		if w.missed[h]&(1<<to) != 0 {
			n.content[to], n.missed[h] = w.content[from], w.missed[h]&^(1<<to)
			n.lossy &^= 1 << to
		}
		n.medium[to], n.cached[h] = n.content[to], n.cached[h]&^(1<<to)
		if n.write[h].number != 0 { // it goes to the leg after that, too
			n.write[h].at[to] = sent
		}
		return r.add(next, n, progresses, "copies all that the leg misses", h, to)
	}
	return next
}

// equalize makes the copies equal: any of them may be taken as the source.
func (r *rig) equalize(w world, h int, next []edge) []edge {
	st := r.stack(&w, h)
	var sources []uint8
	for i := range r.Copies {
		switch {
		case !st.Slots[i].inUse():
		case !r.answers(&w, h, i):
			return next
		case !slices.Contains(sources, w.content[i]):
			sources = append(sources, w.content[i])
		}
	}
	for _, value := range sources {
		n := w
		n.host[h] = r.equalized(w.host[h])
		for i := range r.Copies {
			if st.Slots[i].inUse() {
				n.content[i], n.medium[i] = value, value
				n.cached[h] &^= 1 << i
				n.lossy &^= 1 << i
			}
		}
		next = r.add(next, n, progresses, fmt.Sprintf("makes the copies equal, at write %d", value), h, -1)
	}
	return next
}

// lazy lists what may happen now or much later.
func (r *rig) lazy(w world, next []edge) []edge {
	for i := range r.Copies {
		if w.late[i].write != 0 && w.targetUp&(1<<i) != 0 {
			n := w
			n.content[i], n.late[i] = w.late[i].write, command{}
			next = r.add(next, n, progresses, fmt.Sprintf("late write %d is executed", w.late[i].write), -1, i)
		}
	}
	return next
}

func (r *rig) heal(w world, next []edge) []edge {
	for i := range r.Copies {
		bit := uint8(1) << i
		switch n := w; {
		case w.targetUp&bit == 0:
			n.targetUp |= bit
			next = r.add(next, n, heals, "the target starts", -1, i)
		case w.targetLinked&bit == 0:
			n.targetLinked, n.targetDue = w.targetLinked|bit, w.targetDue|bit
			n.lossy &^= bit // from now on the manager knows
			n.targetSaid[i] = r.reportOfTarget(w.target[i])
			r.tell(&n, targetSays, i, n.targetSaid[i])
			next = r.add(next, n, heals, "the target finds the manager", -1, i)
		}
	}
	for h := range r.Hosts {
		bit := uint8(1) << h
		switch n := w; {
		case w.hostUp&bit == 0:
			n.hostUp |= bit
			next = r.add(next, n, heals, "starts", h, -1)
		case w.hostLinked&bit == 0:
			n.hostLinked, n.hostDue = w.hostLinked|bit, w.hostDue|bit
			n.hostSaid[h] = r.reportOfHost(w.host[h])
			r.tell(&n, hostSays, h, n.hostSaid[h])
			next = r.add(next, n, heals, "finds the manager", h, -1)
		}
		for i := range r.Copies {
			if w.cut[i]&bit != 0 {
				n := w
				n.cut[i] &^= bit
				if x := r.hosts.at(w.host[h]); w.late[i].write != 0 && r.identities.at(w.late[i].identity).NQN == x.Conns[i] {
					n.late[i] = command{} // the connection goes on, and with it the command
				}
				next = r.add(next, n, heals, "reaches the target again", h, i)
			}
		}
	}
	return next
}

// use lists what users and operators may do.
func (r *rig) use(w world, next []edge) []edge {
	for h := range r.Hosts {
		st := r.stack(&w, h)
		if st != nil && st.Device && w.write[h].number == 0 {
			next = r.useDevice(w, h, st, next)
		}
		if n := w; r.may(&n, attaches) {
			if d := r.tell(&n, operatorAttaches, h, 0); !d.refused && n.manager != w.manager {
				next = r.add(next, n, uses, "the operator attaches the volume", h, -1)
			}
		}
	}
	if n := w; r.may(&n, detaches) {
		if r.tell(&n, operatorDetaches, -1, 0); n.manager != w.manager {
			next = r.add(next, n, uses, "the operator detaches the volume", -1, -1)
		}
	}
	if n := w; r.may(&n, forces) {
		if r.tell(&n, operatorForces, -1, 0); n.manager != w.manager {
			next = r.add(next, n, uses, "the operator detaches the volume by force", -1, -1)
		}
	}
	return next
}

func (r *rig) useDevice(w world, h int, st *stack, next []edge) []edge {
	if n := w; r.may(&n, writes) {
		n.write[h].number = w.next
		n.next++
		for i := range r.Copies {
			if st.Slots[i].inUse() {
				n.write[h].at[i] = sent
			} else {
				n.missed[h] |= 1 << i
			}
		}
		next = r.add(next, n, uses, fmt.Sprintf("write %d begins", w.next), h, -1)
	}
	if r.Cached && w.flushed < w.acked && !st.Held {
		n := w
		for i := range r.Copies {
			switch {
			case !st.Slots[i].inUse():
			case !r.answers(&w, h, i):
				return next
			default:
				n.medium[i], n.cached[h] = w.content[i], n.cached[h]&^(1<<i)
			}
		}
		n.flushed = w.acked
		next = r.add(next, n, uses, "flushes", h, -1)
	}
	return next
}

func (r *rig) breakDown(w world, next []edge) []edge {
	for i := range r.Copies {
		next = r.breakTarget(w, i, next)
	}
	for h := range r.Hosts {
		next = r.breakHost(w, h, next)
	}
	if n := w; r.may(&n, restartings) {
		r.tell(&n, restarts, -1, 0)
		n.targetLinked, n.hostLinked, n.targetDue, n.hostDue = 0, 0, 0, 0
		n.toTarget, n.fromTarget, n.targetSaid = [targets]int32{}, [targets]int32{}, [targets]int32{}
		for h := range r.Hosts {
			n = r.forgetStream(n, h)
		}
		next = r.add(next, n, breaks, "the manager restarts", -1, -1)
	}
	return next
}

func (r *rig) breakTarget(w world, i int, next []edge) []edge {
	bit := uint8(1) << i
	unlinked := w
	unlinked.targetLinked &^= bit
	unlinked.targetDue &^= bit
	unlinked.toTarget[i], unlinked.fromTarget[i], unlinked.targetSaid[i] = 0, 0, 0
	if n := unlinked; w.targetLinked&bit != 0 && r.may(&n, partings) {
		next = r.add(next, n, breaks, "the target loses the manager, which does not notice yet", -1, i)
		r.tell(&n, targetLost, i, 0)
		next = r.add(next, n, breaks, "the target loses the manager", -1, i)
	}
	if n := unlinked; w.targetUp&bit != 0 && r.may(&n, crashes) {
		n.targetUp &^= bit
		n.target[i] = r.reboot(w.target[i])
		if n.content[i] != n.medium[i] {
			n.lossy |= bit
		}
		n.content[i], n.late[i] = n.medium[i], command{}
		r.forgive(&n)
		if w.targetLinked&bit != 0 {
			next = r.add(next, n, breaks, "the target loses its power, which the manager does not notice yet", -1, i)
			r.tell(&n, targetLost, i, 0)
		}
		next = r.add(next, n, breaks, "the target loses its power", -1, i)
	}
	for h := range r.Hosts {
		if n := w; w.cut[i]&(1<<h) == 0 && r.may(&n, cuts) {
			n.cut[i] |= 1 << h
			next = r.add(next, n, breaks, "reaches the target no more", h, i)
			for _, late := range r.leave(w, n, h, 1<<i) {
				next = r.add(next, late, breaks, "reaches the target no more; its write has arrived", h, i)
			}
		}
	}
	return next
}

// forgetStream ends a host's stream to the manager, and its call.
func (r *rig) forgetStream(w world, h int) world {
	w.hostLinked &^= 1 << h
	w.hostDue &^= 1 << h
	w.toHost[h], w.fromHost[h], w.hostSaid[h] = 0, 0, 0
	if w.call[h]+w.reply[h] != 0 {
		w.call[h], w.reply[h], w.granted[h] = 0, 0, false
		w.host[h] = r.unanswered(w.host[h])
	}
	return w
}

func (r *rig) breakHost(w world, h int, next []edge) []edge {
	bit := uint8(1) << h
	if n := r.forgetStream(w, h); w.hostLinked&bit != 0 && r.may(&n, partings) {
		next = r.add(next, n, breaks, "loses the manager, which does not notice yet", h, -1)
		r.tell(&n, hostLost, h, 0)
		next = r.add(next, n, breaks, "loses the manager", h, -1)
	}
	if n := r.forgetStream(w, h); w.hostUp&bit != 0 && r.may(&n, deaths) {
		n.write[h], n.missed[h], n.cached[h], n.had[h] = write{}, 0, 0, 0
		n.hostUp &^= bit
		n.host[h] = r.restartHost(w.host[h])
		if w.hostLinked&bit != 0 {
			next = r.add(next, n, breaks, "dies, which the manager does not notice yet", h, -1)
			r.tell(&n, hostLost, h, 0)
		}
		next = r.add(next, n, breaks, "dies", h, -1)
		for _, late := range r.leave(w, n, h, 1<<r.Copies-1) {
			next = r.add(next, late, breaks, "dies; its write has arrived"+late.where(&w), h, -1)
		}
	}
	return next
}

// leave lists worlds after n in which a write that was under way in w was in the queues of some
// targets when its connections ended.
func (r *rig) leave(w, n world, h int, ended uint8) (all []world) {
	var queued uint8
	for i := range r.Copies {
		if w.write[h].at[i] == sent && r.answers(&w, h, i) && n.targetUp&(1<<i) != 0 {
			queued |= ended & (1 << i)
		}
	}
	for some := queued; some != 0; some = (some - 1) & queued {
		late := n
		for i := range r.Copies {
			if some&(1<<i) != 0 {
				late.late[i] = command{w.write[h].number, r.identity(w.host[h], i)}
			}
		}
		all = append(all, late)
	}
	return all
}

// where names the targets at which a late write is left since w.
func (w *world) where(was *world) (s string) {
	for i := range w.late {
		if w.late[i] != was.late[i] {
			s += fmt.Sprintf(" at t%d", i+1)
		}
	}
	return s
}

// forgive lets users lose what only caches held, once no leg in sync has it any more.
func (r *rig) forgive(w *world) {
	m := r.managers.at(w.manager)
	least := w.acked
	for i := range r.Copies {
		if m.inSync&(1<<i) == 0 {
			continue
		}
		if (w.lossy|m.suspect)&(1<<i) == 0 {
			return
		}
		least = min(least, w.content[i])
	}
	w.acked = max(least, w.flushed)
}

// wait lets a tick pass.
func (r *rig) wait(w world, next []edge, quiet bool) []edge {
	n := w
	if !quiet && !r.may(&n, slownesses) {
		return next
	}
	what := "time passes"
	if !quiet {
		what = "time passes, and nothing else has happened yet"
	}
	r.tell(&n, timePasses, -1, int32(w.targetLinked)|int32(w.hostLinked)<<targets)
	for h := range r.Hosts {
		if w.hostUp&(1<<h) != 0 {
			n.host[h] = r.passHost(w.host[h], r.live(&w, h))
		}
	}
	return r.add(next, n, waits, what, -1, -1)
}

// live lists the legs that answer a host's probes.
func (r *rig) live(w *world, h int) (legs uint8) {
	x := r.hosts.at(w.host[h])
	for i := range r.Copies {
		if w.reaches(h, i) && x.Conns[i] != "" && r.targets.at(w.target[i]).serves(x.Conns[i], x.Pulses[i].Identity) {
			legs |= 1 << i
		}
	}
	return legs
}

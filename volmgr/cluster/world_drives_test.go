// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"slices"
	"strings"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
)

// hardware is the trouble with drives in some histories: some drives have a volatile cache
// and some have none, which a power cycle may change; a drive may lose power alone; and the
// drives of one target die, or take no more writes.
type hardware struct {
	resets    int // how many drives lost their power alone
	kinds     int // how many gained or lost a volatile cache
	acts      int
	bad       *wTarget // its drives die, or wear out
	wears     bool     // they wear out; false: they die
	badSince  int      // 0: they are healthy
	suspected map[block.LegID]int
	excused   map[block.LegID]bool // may be suspect: they have, or are assumed to have, lost their caches
}

// withHardware adds trouble with drives to a history of caches.
func withHardware(w *world) {
	w.hardware = &hardware{
		bad: pick(w, w.targets), wears: w.chance(50),
		suspected: map[block.LegID]int{}, excused: map[block.LegID]bool{},
	}
	for _, t := range w.targets {
		t.returns("1")
		if w.chance(50) {
			w.changeCache(t, false)
		}
	}
	w.settle(3)
}

// isBad reports whether the drives of a target are dead, or worn out.
func (w *world) isBad(t *wTarget) bool {
	return w.hardware != nil && w.hardware.badSince > 0 && t == w.hardware.bad
}

func (w *world) worn(t *wTarget) bool { return w.isBad(t) && w.hardware.wears }
func (w *world) dead(t *wTarget) bool { return w.isBad(t) && !w.hardware.wears }

// gone reports whether a leg can never be read again.
func (w *world) gone(l *Leg) bool { return w.dead(w.target(l.Node)) }

func (w *world) hardwareActs() (acted bool) {
	w.hardware.acts++
	switch n := w.rng.IntN(400); {
	case n < 2:
		w.reset(pick(w, w.targets))
	case n == 2 && w.hardware.badSince == 0 && w.hardware.acts > historySteps/4:
		w.goBad(w.hardware.bad)
	case n == 3, n < 8 && w.hardware.badSince > 0:
		w.rackCut()
	default:
		return false
	}
	return true
}

// reset makes a target's drives alone lose power. They are back at once.
func (w *world) reset(t *wTarget) {
	if !t.up || w.dead(t) {
		return
	}
	w.hardware.resets++
	w.newIncarnation(t)
	if t.cached {
		w.loseCache(t)
	}
	w.writes = slices.DeleteFunc(w.writes, func(c *wCommand) bool { return c.link.Node == t.name && c.arrived })
}

func (w *world) newIncarnation(t *wTarget) {
	w.nextID++
	t.returns(fmt.Sprint(w.nextID))
}

// goBad makes a target's drives wear out or die: alone, or in a power cut of the whole rack
// after which the others come back first, or before all others lose power. Before that
// everything works for a while, so that there is something to lose.
func (w *world) goBad(bad *wTarget) {
	how := w.rng.IntN(3)
	w.heal()
	w.step(Attach{Volume: "a", Node: "c1"})
	w.settle(8)
	for _, t := range w.targets {
		if how == 1 {
			w.crashTarget(t)
		}
	}
	w.hardware.badSince = w.hardware.acts
	if !w.hardware.wears {
		w.die(bad)
	}
	for _, h := range w.hosts {
		if how == 2 {
			w.crashHost(h)
		}
	}
	for _, t := range w.targets {
		if t != bad && how > 0 {
			w.crashTarget(t)
			t.up = true
			w.linkTarget(t)
		}
	}
}

func (w *world) die(t *wTarget) {
	for _, d := range t.drives {
		d.gone = true
	}
	for _, id := range sortedIDs(w.state.volumes.Keys()) {
		for column := range w.state.volumes.Get(id).Layout.Stripes {
			w.forgive(w.state.volumes.Get(id), column)
		}
	}
	w.writes = slices.DeleteFunc(w.writes, func(c *wCommand) bool { return c.link.Node == t.name && c.arrived })
}

// powerCycled does to a target's drives what a boot may do.
func (w *world) powerCycled(t *wTarget) {
	if w.hardware == nil {
		return
	}
	w.newIncarnation(t)
	if w.chance(20) {
		w.changeCache(t, !t.devices[0].VolatileCache)
	}
	t.cached = t.devices[0].VolatileCache
}

// changeCache adds or removes the volatile cache of a target's drives while they lose power.
// Writes that they acknowledged before may still be in it until the next boot.
func (w *world) changeCache(t *wTarget, volatile bool) {
	w.hardware.kinds++
	t.devices[0].VolatileCache = volatile
	t.cached = t.cached || volatile
	for _, d := range t.drives {
		for leg := range d.labels {
			if volatile {
				w.medium[leg] = w.value[leg]
			}
		}
	}
}

// watch checks the manager's evictions. A copy that may have lost its cache may be evicted
// only if another copy has been seen since.
func (w *world) watch(events []event.Event) {
	for _, e := range events {
		id, err := block.ParseLegID(e.Attributes["leg"])
		switch {
		case err != nil:
		case e.Kind == event.LegSuspect:
			w.hardware.suspected[id] = w.hardware.acts
		case e.Kind == event.LegEvicted && strings.Contains(e.Text, "may have lost cached writes"):
			w.violation = w.givenUpFor(id, e.Text)
		}
	}
}

func (w *world) givenUpFor(id block.LegID, why string) string {
	for _, v := range w.state.volumes.All() {
		l := v.leg(id)
		if l == nil || w.dead(w.target(l.Node)) {
			continue
		}
		if !slices.ContainsFunc(v.peers(l), func(o *Leg) bool {
			return !w.dead(w.target(o.Node)) || w.hardware.badSince > w.hardware.suspected[id]
		}) {
			return fmt.Sprintf("I1: given up for a copy on a drive that was dead: %s", why)
		}
	}
	return ""
}

// unjudged reports whether the manager does not know yet that a leg's drive may have lost
// writes.
func (w *world) unjudged(l *Leg) bool {
	d, have := w.state.drives[l.Drive], w.target(l.Node).drives[l.Drive]
	return w.hardware != nil && d != nil && have != nil && d.Incarnation != have.incarnation
}

// unflushed reports whether hosts do not flush a leg, because the manager records no volatile
// cache of its drive. (A host that does not know of a new cache yet is a known limit.)
func (w *world) unflushed(l *wLink) bool {
	for _, d := range w.state.drives {
		if _, on := w.state.onDrive[d.ID][l.Leg]; on {
			return !d.VolatileCache
		}
	}
	return false
}

// wornLinks returns the legs of a host's table that take no writes.
func (w *world) wornLinks(v *wVolume) (legs []block.LegID) {
	for c := range v.writes {
		for _, id := range sorted(v.links) {
			if l := v.links[id]; l.Column == c.column && w.worn(w.target(l.Node)) {
				legs = append(legs, id)
			}
		}
	}
	return legs
}

// lacks reports whether some leg that could be in sync is not.
func (w *world) lacks(v *Volume) bool {
	return slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.State != LegInSync && !w.isBad(w.target(l.Node)) })
}

// decide acts as an operator who gives up data that only dead drives hold, when all else
// works.
func (w *world) decide() {
	w.step(Detach{Volume: "s", Force: true})
	if a := w.state.volumes.Get(w.state.idOf("a")).Attachment; a != nil && a.State == Detaching {
		w.step(Detach{Volume: "a", Force: true}) // it waits for a write that no leg can take
	}
	for _, id := range sortedIDs(w.state.volumes.Keys()) {
		v := w.state.volumes.Get(id)
		if v.State != VolumeReady {
			continue
		}
		for c := range v.Layout.Stripes {
			w.decideColumn(w.state.volumes.Get(id), c)
		}
	}
}

func (w *world) decideColumn(v *Volume, column int) {
	var left *Leg
	for i := range v.Legs {
		switch l := &v.Legs[i]; {
		case l.Column != column:
		case w.dead(w.target(l.Node)):
		case l.trusted():
			return
		case left == nil || l.Suspect:
			left = l
		}
	}
	if left == nil {
		return
	}
	if left.Suspect && !w.hardware.excused[left.ID] {
		w.violation = fmt.Sprintf("I1: %v, whose drive lost nothing, counts only if an operator says so", left)
		return
	}
	w.step(Detach{Volume: v.ID.String(), Force: true})
	if err := w.step(PromoteStaleLeg{Volume: v.ID.String(), Leg: left.ID, AcceptDataLoss: true}); err != nil {
		return // not yet
	}
	for r := range registers {
		c := wCell{v.ID, column, r}
		w.acked[c] = min(w.acked[c], w.value[left.ID][r])
		w.seen[c] = min(w.seen[c], w.value[left.ID][r])
		w.flushed[c] = min(w.flushed[c], w.value[left.ID][r])
	}
}

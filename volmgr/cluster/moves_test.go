// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/health"
)

// moves makes legs leave all the time: operators move them, empty drives and nodes, announce
// maintenances, and a leg is made again elsewhere when it was away for half a minute.
func moves(w *world) {
	for i := range 3 {
		name := block.NodeName(fmt.Sprintf("t%d", len(w.targets)+1))
		t := &wTarget{simTarget: newSimTarget(name, map[string]string{"rack": fmt.Sprintf("r%d", 4+i)}, 1536*block.MiB)}
		t.up, t.slow, t.cached = true, true, w.mood == caches
		t.devices[0].VolatileCache = t.cached
		w.targets = append(w.targets, t)
		w.linkTarget(t)
		w.step(AddDrive{Node: name, Device: t.devices[0].Path, Seed: w.seed()})
	}
	w.settle(3)
	w.moves = &movesWorld{}
	w.state.SetPolicy(w.policy())
}

// movesWorld counts what happens in a history of moves.
type movesWorld struct {
	added, retired, drained, changed int
	copies                           bool // operators also change how many copies there are
	stops                            bool // targets also stop in order
	stopped                          int
	sick                             bool // drives also become suspect, and are evacuated
	begun, evacuated                 int  // legs that were added for that, and retired since there was one more
}

func (w *world) policy() Policy {
	var p Policy
	if w.moves != nil {
		p.ReplaceAfter = 30 * time.Second
	}
	if w.moves != nil && w.moves.sick {
		p.EvacuateAfter = 3 * time.Second
	}
	if w.heals != nil {
		p.HealAfter = time.Second
	}
	return p
}

// moveActs is an operator who empties and refills parts of the cluster.
func (w *world) moveActs() {
	t := pick(w, w.targets)
	if w.moves.copies && w.chance(15) {
		if w.step(UpdateVolume{Volume: "a", Copies: 2 + w.rng.IntN(2)}) == nil {
			w.moves.changed++
		}
		return
	}
	if w.moves.stops && w.chance(30) {
		t.stopping = t.up // it may go on, and is stuck then
		return
	}
	if w.moves.sick && w.chance(90) {
		w.sickActs(t)
		return
	}
	switch w.rng.IntN(8) {
	case 0, 1, 2:
		if v := w.state.volumes.Get(w.state.idOf("a")); v != nil {
			l := pick(w, v.Legs)
			w.step(MoveLeg{Volume: "a", Column: l.Column, Copy: l.Copy})
		}
	case 3:
		w.step(CordonNode{Node: t.name, Drain: true})
	case 4:
		w.step(UncordonNode{Node: pick(w, w.targets).name})
	case 5:
		w.step(MaintainNode{Node: t.name, For: time.Minute})
	case 6, 7:
		for _, d := range w.state.recordedDrives(t.name) {
			w.step(DrainDrive{Drive: d.ID, Cancel: d.Leaving != ""})
		}
	}
}

// sickActs has a drive of the volume warn, or a drive be well. The manager looks at once: in a history, as much
// happens in a minute as elsewhere in a day.
func (w *world) sickActs(t *wTarget) {
	v := w.state.volumes.Get(w.state.idOf("a"))
	warning := uint8(0)
	if v != nil && w.chance(40) {
		t, warning = w.target(pick(w, v.Legs).Node), 1<<2 // its reliability is degraded
	}
	t.devices[0].Health = &health.Reading{Smart: &health.Smart{Warning: warning, Spare: 100}}
	w.state.lookedSuspect = time.Time{}
	for id, e := range w.state.evacuations {
		e.pause = time.Time{}
		w.state.evacuations[id] = e
	}
}

// mayStop checks that no host uses a leg of a target that may stop, if it could do without, and
// mostly stops the target.
func (w *world) mayStop(t *wTarget) {
	for _, h := range w.hosts {
		for _, id := range sorted(h.volumes) {
			v, record := h.volumes[id], w.state.volumes.Get(id)
			for _, leg := range sorted(v.links) {
				if l := v.links[leg]; l.Node == t.name && w.owns(h, v) && record.leg(leg).State == LegStale {
					w.violation = fmt.Sprintf("I13: %s may stop, and %s still uses %v", t.name, h.name, record.leg(leg))
				}
			}
		}
	}
	if w.chance(80) && !w.healed { // else it is stuck, and stays so
		w.moves.stopped++
		w.unlinkTarget(t)
		t.up, t.stopping, t.gen, t.exports = false, false, 0, map[block.NQN]*simExport{}
		w.writes = slices.DeleteFunc(w.writes, func(c *wCommand) bool { return c.link.Node == t.name && c.arrived })
	}
}

// checkMove compares the legs of a column before and after a step: only what happens to the
// legs themselves may leave it with fewer in sync, and never a move.
func (w *world) checkMove(before map[block.LegID]Leg, v *Volume) string {
	for _, l := range v.Legs {
		was, known := before[l.ID]
		switch {
		case !known && l.Blank:
			w.moves.added++
		case known && was.Retired == 0 && l.Retired != 0:
			w.moves.retired++
			good := v.trusted()[l.Column].Len()
			needless := !was.Blank && strings.Contains(l.Reason, "enough copies without it")
			w.moves.evacuated += rank(needless && w.state.evacuated(&l))
			if (was.State == LegInSync || needless) && good < v.Layout.Copies {
				return fmt.Sprintf("I11: %v was retired, was %s before, and %d of %d copies are left", &l, was.State, good, v.Layout.Copies)
			}
		case known && was.Draining != 0 && l.Draining == 0:
			w.moves.drained++
		case l.Blank && l.State == LegInSync:
			return fmt.Sprintf("I12: %v is in sync and blank", &l)
		}
	}
	return w.checkEvacuations(before, v)
}

// checkEvacuations looks at the legs that are made again since their drives are suspect: those of two drives
// at most, and never in a failure domain of another leg of the column.
func (w *world) checkEvacuations(before map[block.LegID]Leg, v *Volume) string {
	moving := 0
	for _, e := range w.state.evacuations {
		moving += rank(!e.Leg.IsZero())
	}
	if moving > 2 {
		return fmt.Sprintf("I15: legs of %d suspect drives are made again at once", moving)
	}
	for _, l := range v.Legs {
		column := v.column(l.Column)
		if _, known := before[l.ID]; known || !l.Blank || !slices.ContainsFunc(column, w.state.evacuated) {
			continue
		}
		w.moves.begun++
		domain := func(l *Leg) string { return w.state.nodes[l.Node].label(v.Spread) }
		if i := slices.IndexFunc(column, func(o *Leg) bool { return o.ID != l.ID && domain(o) == domain(&l) }); i >= 0 {
			return fmt.Sprintf("I16: %v was added for an evacuation, in the failure domain of %v", &l, column[i])
		}
	}
	return ""
}

// Whatever becomes of the drives, one look at them searches few for legs that could move.
func TestFewDrivesAreSearchedForLegsAtATime(t *testing.T) {
	s := newScript(t)
	s.run("target t1 drives=4GiB,4GiB,4GiB,4GiB,4GiB")
	s.run("target t2 drives=8GiB")
	for i := range 5 {
		s.run(fmt.Sprintf("create db%d size=1GiB stripes=1", i))
	}
	s.run("comply")
	s.run("host c1")
	for i := range 5 {
		s.run(fmt.Sprintf("attach db%d c1", i))
	}
	s.run("comply")
	for i := range 5 {
		s.run(fmt.Sprintf("serve c1 db%d", i))
	}
	s.run("target t3 drives=512MiB" + strings.Repeat(",512MiB", 43)) // too small for any leg
	s.run("evacuate-after 1m")
	for i := range 5 {
		s.run(fmt.Sprintf("health t1 nvme%dn1 warning=4", i))
	}
	s.run("wait 55s t1 t2 t3 c1")
	searched := 0
	for range 35 {
		held := strings.Count(s.run("wait 1s t1 t2 t3 c1"), noPlaceElsewhere)
		if searched += held; held > mostLookedThrough {
			t.Errorf("%d drives were searched at once, want %d", held, mostLookedThrough)
		}
	}
	if searched != 5 {
		t.Errorf("%d drives were searched, want 5, each once", searched)
	}
}

// A leg that shares space stays, and is named with the way out. It moves once it does not any more.
func TestALegThatSharesSpaceIsNotEvacuated(t *testing.T) {
	w := newSnapWorld(t, 1)
	w.s.SetPolicy(Policy{EvacuateAfter: time.Minute})
	w.mustBe(w.take("mon", "db1", "db2"))
	w.settle()
	from := w.volume("db1").Legs[0]
	w.s.drives[from.Drive].Signs = health.Record{Warnings: "its reliability is degraded"}
	w.look(30)
	words := w.s.evacuationWords(w.s.drives[from.Drive])
	if !strings.HasPrefix(words, "evacuated: it keeps ") || !strings.Contains(words, "that share space with snapshots or clones; `weft drive drain "+from.Drive.String()) {
		t.Errorf("the drive is %q", words)
	}
	for _, name := range []string{"db1", "db1@mon"} {
		e, err := w.s.Explain(name)
		if text := fmt.Sprint(e); err != nil || !strings.Contains(text, "shares space with snapshots or clones") || !strings.Contains(text, "weft drive drain") {
			t.Errorf("Explain(%s) = %s, %v", name, text, err)
		}
		if v := w.volume(name); len(v.Legs) != 2 || v.column(0)[0].Blank || v.column(0)[1].Blank {
			t.Errorf("%s has legs %+v", name, v.Legs)
		}
	}
	w.must(DeleteVolume{Volume: "db1@mon"})
	w.settle()
	w.look(30)
	if v := w.volume("db1"); v.leg(from.ID) != nil && len(v.Legs) == 2 {
		t.Errorf("without the snapshot it does not move: %q, legs %+v", w.s.evacuationWords(w.s.drives[from.Drive]), v.Legs)
	}
}

func TestRandomHistoriesOfMoves(t *testing.T) {
	t.Parallel()
	for name, setting := range map[string]func(*world){
		"moves":       moves,
		"lost stores": func(w *world) { moves(w); losesStore(w) },
		"old hosts":   func(w *world) { moves(w); w.oldHosts = true },
		"copies":      func(w *world) { moves(w); w.moves.copies = true },
		"stops":       func(w *world) { moves(w); w.moves.stops = true },
		"sick drives": func(w *world) { moves(w); w.moves.sick = true; w.state.SetPolicy(w.policy()) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			seeds := *histories / 2
			if testing.Short() {
				seeds = min(seeds, 10)
			}
			added, retired, drained, changed, stopped, served, begun, evacuated := 0, 0, 0, 0, 0, 0, 0, 0
			for seed := range seeds {
				bad, w := history(seed, setting)
				if bad != "" {
					t.Fatal(bad)
				}
				added, retired, drained, changed, served = added+w.moves.added, retired+w.moves.retired, drained+w.moves.drained, changed+w.moves.changed, served+w.serves
				stopped, begun, evacuated = stopped+w.moves.stopped, begun+w.moves.begun, evacuated+w.moves.evacuated
			}
			did := fmt.Sprintf("%d histories added %d legs, retired %d of which %d drained, changed the copies %d times, stopped %d targets, evacuated %d of %d legs, and served %d times", seeds, added, retired, drained, changed, stopped, evacuated, begun, served)
			if n := int(seeds); (added < n*2 || retired < n) && name != "sick drives" || served < n*3 || (drained*10 < retired) != (name == "old hosts") || (stopped < n) != (name != "stops") || (evacuated == 0) != (name != "sick drives") && !testing.Short() {
				t.Errorf("%s, want more", did)
			}
			t.Log(did)
		})
	}
}

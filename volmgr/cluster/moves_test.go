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
	evacuated                        int  // legs that were retired for that
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
	if w.moves.sick && w.chance(80) {
		warning := uint8(rank(w.chance(30))) << 2 // its reliability is degraded, or is not
		t.devices[0].Health = &health.Reading{Smart: &health.Smart{Warning: warning, Spare: 100}}
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
			w.moves.evacuated += rank(strings.Contains(l.Reason, "suspect for more than"))
			if was.State == LegInSync && good < v.Layout.Copies {
				return fmt.Sprintf("I11: %v was retired in sync, and %d of %d copies are left", &l, good, v.Layout.Copies)
			}
		case known && was.Draining != 0 && l.Draining == 0:
			w.moves.drained++
		case l.Blank && l.State == LegInSync:
			return fmt.Sprintf("I12: %v is in sync and blank", &l)
		}
	}
	return w.checkEvacuations()
}

// checkEvacuations counts the legs that leave suspect drives: one of a drive, and of two drives.
func (w *world) checkEvacuations() string {
	var drives []block.DriveID
	for _, v := range w.state.volumes.All() {
		for _, l := range v.Legs {
			if l.member() && strings.Contains(w.state.leaving(&l), "suspect for more than") {
				drives = append(drives, l.Drive)
			}
		}
	}
	if n := len(drives); n > 2 || n == 2 && drives[0] == drives[1] {
		return fmt.Sprintf("I15: %d legs leave the suspect drives %v at once", n, drives)
	}
	return ""
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
			added, retired, drained, changed, stopped, served, evacuated := 0, 0, 0, 0, 0, 0, 0
			for seed := range seeds {
				bad, w := history(seed, setting)
				if bad != "" {
					t.Fatal(bad)
				}
				added, retired, drained, changed, served = added+w.moves.added, retired+w.moves.retired, drained+w.moves.drained, changed+w.moves.changed, served+w.serves
				stopped, evacuated = stopped+w.moves.stopped, evacuated+w.moves.evacuated
			}
			did := fmt.Sprintf("%d histories added %d legs, retired %d of which %d drained, changed the copies %d times, stopped %d targets, evacuated %d legs, and served %d times", seeds, added, retired, drained, changed, stopped, evacuated, served)
			if n := int(seeds); (added < n*2 || retired < n) && name != "sick drives" || served < n*3 || (drained*10 < retired) != (name == "old hosts") || (stopped < n) != (name != "stops") || (evacuated == 0) != (name != "sick drives") && !testing.Short() {
				t.Errorf("%s, want more", did)
			}
			t.Log(did)
		})
	}
}

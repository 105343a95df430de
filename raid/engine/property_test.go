// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"flag"
	"fmt"
	"testing"
)

var (
	histories = flag.Uint64("histories", 400, "random histories to try")
	firstSeed = flag.Uint64("seed", 0, "the first one")
)

const historySteps = 1500

// play runs one random history and reports the first violation.
func play(seed uint64, weak guards, wrong errant) (violation string, w *world) {
	w = newWorld(seed, weak, wrong)
	return w.play(seed), w
}

// play lets everything happen, and reports the first violation.
func (w *world) play(seed uint64) (violation string) {
	for i := range historySteps {
		w.act()
		if w.bad != nil {
			return fmt.Sprintf("seed %d step %d: %v", seed, i, w.bad)
		}
	}
	w.finish()
	if w.bad != nil {
		return fmt.Sprintf("seed %d after healing: %v", seed, w.bad)
	}
	return ""
}

func TestRandomHistoriesLoseNothingAndNeverGoBack(t *testing.T) {
	seeds := *histories
	if testing.Short() || raced { // it is one goroutine
		seeds = min(seeds, 60)
	}
	var sum world
	for seed := *firstSeed; seed < *firstSeed+seeds; seed++ {
		bad, w := play(seed, guards{}, errant{})
		if bad != "" {
			t.Fatalf("%s\nreproduce: go test -run RandomHistories -seed %d -histories 1", bad, seed)
		}
		sum.acks += w.acks
		sum.reads += w.reads
		sum.crashes += w.crashes
		sum.drops += w.drops
		sum.rebuilds += w.rebuilds
		sum.grown += w.grown
		sum.renewed += w.renewed
		sum.failed += w.failed
	}
	t.Logf("%d histories: %d writes acknowledged, %d reads, %d crashes, %d legs dropped, %d rebuilt, %d times grown, %d renewed and %d volumes failed after a loss of cache", seeds, sum.acks, sum.reads, sum.crashes, sum.drops, sum.rebuilds, sum.grown, sum.renewed, sum.failed)
	// Histories that get nowhere would prove nothing.
	if n := int(seeds); sum.acks < 20*n || sum.reads < 20*n || sum.rebuilds < n || sum.crashes < n || 2*sum.grown < n {
		t.Error("too little happened")
	}
}

// Each rule weakened must be noticed by the same histories. The search begins at
// from, near a history that is known to notice, to save time; a change of the
// simulator may make it longer.
func TestEachRuleIsNeeded(t *testing.T) {
	if raced {
		t.Skip("one goroutine has no races; run it without the detector")
	}
	for name, c := range map[string]struct {
		from  uint64
		weak  guards
		wrong errant
	}{
		"one leg is enough to acknowledge":             {weak: guards{oneIsEnough: true}},
		"nothing waits for what it overlaps":           {weak: guards{noRangeLock: true}},
		"reads pass writes":                            {weak: guards{readsPass: true}},
		"copies and writes pass one another":           {weak: guards{copiesPass: true}},
		"rebuilding legs are read":                     {weak: guards{readRebuilding: true}},
		"copies discard as they like":                  {weak: guards{discardsDiffer: true}},
		"writes under way at a drop are forgotten":     {from: 100, weak: guards{forgetUnderWay: true}},
		"what was not durable is forgotten":            {from: 325, weak: guards{forgetCached: true}},
		"a leg that has caught up drops out":           {from: 680, weak: guards{dropCaughtUp: true}},
		"a leg dropped while unequal counts as equal":  {from: 2150, weak: guards{halfEqual: true}},
		"a rebuilt leg is not flushed":                 {from: 1470, weak: guards{unflushed: true}},
		"reads are answered whoever may have written":  {weak: guards{lateReads: true}},
		"copies wait for writes that are held":         {weak: guards{heldBlocks: true}},
		"held writes forget the copies that pass them": {weak: guards{forgetPassed: true}},
		"a volume goes on over what is lost":           {weak: guards{renewAnyway: true}},
		"what a leg said before a loss counts":         {from: 700, weak: guards{oldAnswers: true}},
		"the owner drops before it records":            {wrong: errant{dropBeforeRecord: true}},
		"the owner serves unequal copies":              {wrong: errant{serveUnequal: true}},
		"the owner adds a leg without a fence":         {wrong: errant{unfenced: true}},
		"the owner trusts a map that is gone":          {wrong: errant{partialOfUnknown: true}},
		"the owner grows onto rubbish":                 {wrong: errant{growsOntoRubbish: true}},
	} {
		t.Run(name, func(t *testing.T) {
			const most = 3000
			for seed := c.from; seed < c.from+most; seed++ {
				if bad, _ := play(seed, c.weak, c.wrong); bad != "" {
					t.Log(bad)
					return
				}
			}
			t.Errorf("no violation in %d histories", most)
		})
	}
}

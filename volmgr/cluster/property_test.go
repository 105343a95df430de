// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"flag"
	"fmt"
	"testing"
)

var histories = flag.Uint64("histories", 120, "random histories to try")

const historySteps = 2000

// history runs one random history and reports the first violation.
func history(seed uint64, g guards, weaken func(*world)) (violation string, w *world) {
	w = newWorld(seed, g)
	if weaken != nil {
		weaken(w)
	}
	for i := range historySteps {
		w.act()
		if bad := w.check(); bad != "" {
			return fmt.Sprintf("seed %d step %d: %s", seed, i, bad), w
		}
	}
	if bad := w.recovered(); bad != "" {
		return fmt.Sprintf("seed %d after healing: %s", seed, bad), w
	}
	return "", w
}

func TestRandomHistoriesKeepTheInvariants(t *testing.T) {
	t.Parallel()
	seeds := *histories
	if testing.Short() {
		seeds = min(seeds, 20)
	}
	served, acked, left, expanded, looked, shared := 0, 0, 0, 0, 0, 0
	for seed := range seeds {
		bad, w := history(seed, guards{}, nil)
		if bad != "" {
			t.Fatal(bad)
		}
		served += w.serves
		left += w.leaves
		expanded += w.expanded
		looked += w.looks
		shared += w.shares
		acked += len(w.acked)
	}
	did := fmt.Sprintf("%d histories served %d times, acknowledged in %d registers, left %d and expanded %d times, read %d and wrote %d times while shared",
		seeds, served, acked, left, expanded, looked, shared)
	// Histories that get nowhere would prove nothing.
	n := int(seeds)
	if served < n*3 || acked < n*4 || left < n/4 || expanded < n*2 || looked < n*4 || shared < n*2 {
		t.Errorf("%s, want more", did)
	}
	t.Log(did)
}

// Each rule weakened must be noticed by the same histories.
func TestEachGuardIsNeeded(t *testing.T) {
	for name, c := range map[string]struct {
		guards guards
		weaken func(*world)
		in     mood   // where to look; mixed means everywhere
		first  uint64 // where it was found before: looked at first, and then all others
	}{
		"no fence":                        {guards: guards{noFence: true}},
		"lease not waited for":            {guards: guards{skipLease: true}, in: split, first: 47},
		"unfenced leg stays in sync":      {guards: guards{keepUnreachable: true}},
		"superseded epoch may record":     {guards: guards{staleEpochMayRecord: true}},
		"last leg may be dropped":         {guards: guards{mayDropLastLeg: true}},
		"served before copies are equal":  {guards: guards{serveBeforeEqual: true}},
		"copies in one domain":            {guards: guards{sameDomain: true}},
		"resync of an older revision":     {guards: guards{revisionIgnored: true}, first: 31},
		"forced detach counts as clean":   {guards: guards{forcedIsClean: true}},
		"space given away before it free": {guards: guards{freeBeforeAbsent: true}},
		"reboot of a target forgotten":    {guards: guards{rebootForgotten: true}, in: caches, first: 173},
		"suspect leg served":              {guards: guards{suspectServes: true}, in: caches, first: 683},
		"host told before all legs grew":  {guards: guards{toldBeforeGrown: true}},
		"leg rebuilt that did not grow":   {guards: guards{shortLegRebuilt: true}, in: split, first: 677},
		"host told before labels know":    {guards: guards{labelsBehind: true}, in: split, first: 187},
		"leg used before it is zeroed":    {weaken: func(w *world) { w.unzeroed() }},
		"readers of a shared epoch":       {guards: guards{readersForgotten: true}, in: sharing, first: 39},
		"copies that differ are shared":   {guards: guards{sharesUnequal: true}, in: sharing},
		"host taken out and not fenced":   {guards: guards{sharerNotFenced: true}, in: sharing},
		"copy in sync before its flush":   {weaken: func(w *world) { w.noFlush = true }, in: caches, first: 248},
		"reboot of a host ignored":        {guards: guards{bootIgnored: true}},
		"host leaves with writes out":     {weaken: func(w *world) { w.leavesDirty = true }, in: split, first: 337},
		"host acknowledges before record": {weaken: func(w *world) { w.ackBeforeRecord = true }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const most = 300
			seeds := []uint64{c.first}
			for seed := range uint64(most) {
				if c.in != mixed {
					seed = seed*uint64(moods) + uint64(c.in)
				}
				seeds = append(seeds, seed)
			}
			for _, seed := range seeds {
				if bad, _ := history(seed, c.guards, c.weaken); bad != "" {
					t.Log(bad)
					return
				}
			}
			t.Errorf("no violation in %d histories", most)
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"flag"
	"fmt"
	"slices"
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
	served, acked, left, expanded, looked, shared, renewed, givenUp := 0, 0, 0, 0, 0, 0, 0, 0
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
		renewed += w.renewed
		givenUp += w.givenUp
		acked += len(w.acked)
	}
	did := fmt.Sprintf("%d histories served %d times, acknowledged in %d registers, left %d and expanded %d times, read %d and wrote %d times while shared, went on after %d losses of cache and gave up %d times",
		seeds, served, acked, left, expanded, looked, shared, renewed, givenUp)
	// Histories that get nowhere would prove nothing.
	n := int(seeds)
	if served < n*3 || acked < n*4 || left < n/4 || expanded < n*2 || looked < n*4 || shared < n*2 || renewed < n/20 || givenUp < n/8 {
		t.Errorf("%s, want more", did)
	}
	t.Log(did)
}

// The store is lost again and again, rebuilt from the drives or restored from backups
// that are older than they, while labels lag behind the records, agents hear nothing
// and hosts go on. No copy that is believed then may lack what was acknowledged.
func TestRandomHistoriesOfLostStores(t *testing.T) {
	t.Parallel()
	seeds := *histories
	if testing.Short() {
		seeds = min(seeds, 20)
	}
	lost, decided, served := 0, 0, 0
	for seed := range seeds {
		bad, w := history(seed, guards{}, losesStore)
		if bad != "" {
			t.Fatal(bad)
		}
		lost, decided, served = lost+w.lostStores, decided+w.decided, served+w.serves
	}
	if n := int(seeds); lost < n || decided < n || served < n*3 {
		t.Errorf("%d histories lost %d stores, believed %d columns of several copies and served %d times, want more", n, lost, decided, served)
	}
	t.Logf("%d histories lost %d stores, believed %d columns of several copies, and served %d times", seeds, lost, decided, served)
}

// Drives die, wear out, lose their power alone, and change what caches they have, while
// several targets and the manager lose theirs.
func TestRandomHistoriesOfBadDrives(t *testing.T) {
	t.Parallel()
	seeds := *histories / 2
	if testing.Short() {
		seeds = min(seeds, 10)
	}
	resets, kinds, bad, served := 0, 0, 0, 0
	for seed := range seeds {
		violation, w := history(seed*uint64(moods)+uint64(caches), guards{}, withHardware)
		if violation != "" {
			t.Fatal(violation)
		}
		resets, kinds, served = resets+w.hardware.resets, kinds+w.hardware.kinds, served+w.serves
		if w.hardware.badSince > 0 {
			bad++
		}
	}
	if n := int(seeds); resets < n || kinds < n || bad < n/2 || served < n*3 {
		t.Errorf("%d histories reset %d drives, changed the caches of %d, had bad ones in %d, and served %d times, want more", n, resets, kinds, bad, served)
	}
	t.Logf("%d histories reset %d drives, changed the caches of %d, had bad ones in %d, and served %d times", seeds, resets, kinds, bad, served)
}

// losesStore also has labels that cannot be written while exports go on.
func losesStore(w *world) {
	w.losesStore = true
	for _, t := range w.targets {
		t.behind = func() bool { return !w.healed && w.chance(20) }
	}
}

func rashTargets(w *world) {
	withHardware(w)
	for _, t := range w.targets {
		t.rash = true
	}
}

// Each rule weakened must be noticed by the same histories.
func TestEachGuardIsNeeded(t *testing.T) {
	for name, c := range map[string]struct {
		guards guards
		weaken func(*world)
		in     mood   // where to look; mixed means everywhere
		first  uint64 // where it was found before: looked at first, and then all others
	}{
		"no fence":                          {guards: guards{noFence: true}},
		"lease not waited for":              {guards: guards{skipLease: true}, in: split, first: 282},
		"unfenced leg stays in sync":        {guards: guards{keepUnreachable: true}},
		"superseded epoch may record":       {guards: guards{staleEpochMayRecord: true}},
		"last leg may be dropped":           {guards: guards{mayDropLastLeg: true}},
		"served before copies are equal":    {guards: guards{serveBeforeEqual: true}, first: 36},
		"copies in one domain":              {guards: guards{sameDomain: true}},
		"resync of an older revision":       {guards: guards{revisionIgnored: true}, first: 206},
		"forced detach counts as clean":     {guards: guards{forcedIsClean: true}},
		"space given away before it free":   {guards: guards{freeBeforeAbsent: true}},
		"reboot of a target forgotten":      {guards: guards{rebootForgotten: true}, in: caches, first: 173},
		"suspect leg served":                {guards: guards{suspectServes: true}, in: caches, first: 188},
		"host told before all legs grew":    {guards: guards{toldBeforeGrown: true}},
		"leg rebuilt that did not grow":     {guards: guards{shortLegRebuilt: true}, in: split, first: 677},
		"host told before labels know":      {guards: guards{labelsBehind: true}, in: split, first: 187},
		"leg used before it is zeroed":      {weaken: func(w *world) { w.unzeroed() }},
		"readers of a shared epoch":         {guards: guards{readersForgotten: true}, in: sharing, first: 364},
		"copies that differ are shared":     {guards: guards{sharesUnequal: true}, in: sharing},
		"host taken out and not fenced":     {guards: guards{sharerNotFenced: true}, in: sharing},
		"name that outlives its grant":      {guards: guards{nameOutlivesGrant: true}, in: sharing},
		"copy in sync before its flush":     {weaken: func(w *world) { w.noFlush = true }, in: caches, first: 248},
		"reboot of a host ignored":          {guards: guards{bootIgnored: true}},
		"host not told of a lost cache":     {guards: guards{rebornForgotten: true}, in: caches},
		"given up counts as clean":          {guards: guards{givesUpClean: true}, first: 34},
		"host goes on over lost writes":     {weaken: func(w *world) { w.goesOn = true }, in: caches},
		"host leaves with writes out":       {weaken: func(w *world) { w.leavesDirty = true }, in: split, first: 247},
		"labels believed of what is in use": {guards: guards{labelsBelieved: true}, weaken: losesStore, in: flapping, first: 721},
		"restored below what targets have":  {guards: guards{restoredBelow: true}, weaken: losesStore, first: 20},
		"host goes on before its note":      {weaken: func(w *world) { losesStore(w); w.notesLate = true }, first: 436},
		"boot of a durable drive judged":    {guards: guards{durableIsLossy: true}, weaken: withHardware, in: caches},
		"cache as when it was added":        {guards: guards{cacheAsAdded: true}, weaken: withHardware, in: caches},
		"drive's loss of power forgotten":   {guards: guards{driveLossForgotten: true}, weaken: withHardware, in: caches},
		"dead drive stands in":              {guards: guards{deadStandsIn: true}, weaken: withHardware, in: caches},
		"word from before counts":           {guards: guards{oldWordCounts: true}, weaken: withHardware, in: caches},
		"stalled host not helped":           {guards: guards{stalledWaits: true}, weaken: withHardware, in: caches},
		"leg mapped before it is judged":    {weaken: rashTargets, in: caches},
		"host acknowledges before record":   {weaken: func(w *world) { w.ackBeforeRecord = true }},
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

// What the state keeps of the records in other forms is what the records say, however
// it came about: Load makes it from nothing.
func TestWhatIsDerivedFollowsTheRecords(t *testing.T) {
	t.Parallel()
	for seed := range uint64(10) {
		w := newWorld(seed, guards{})
		for range historySteps {
			w.act()
		}
		fresh := loadStore(t, w.store)
		for id := range w.state.drives {
			if got, want := w.state.extents[id], fresh.extents[id]; !slices.Equal(got, want) || len(got) == 0 != (w.state.used[id] == 0) {
				t.Errorf("seed %d: drive %v has the extents %v in use, want %v", seed, id, got, want)
			}
			if w.state.used[id] != fresh.used[id] {
				t.Errorf("seed %d: drive %v has %d extents in use, want %d", seed, id, w.state.used[id], fresh.used[id])
			}
		}
	}
}

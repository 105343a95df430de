// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"reflect"
	"slices"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/cow"
)

var histories = flag.Uint64("histories", usually(), "random histories to try; $WEFT_HISTORIES or 80 if not given")

// usually is how many histories are tried: make unit has less time than the mutations, some of which only many
// histories notice.
func usually() uint64 {
	if n, err := strconv.ParseUint(os.Getenv("WEFT_HISTORIES"), 10, 64); err == nil {
		return n
	}
	return 80
}

const historySteps = 2000

// history runs one random history and reports the first violation.
func history(seed uint64, setting func(*world)) (violation string, w *world) {
	w = newWorld(seed)
	if setting != nil {
		setting(w)
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
		bad, w := history(seed, nil)
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
	// Histories in which nothing happens would prove nothing.
	n := int(seeds)
	if served < n*3 || acked < n*4 || left < n/4 || expanded < n*2 || looked < n*4 || shared < n*2 || renewed < n/20 || givenUp < n/8 {
		t.Errorf("%s, want more", did)
	}
	t.Log(did)
}

// The store is lost repeatedly, and rebuilt from the drives or restored from backups that
// are older than the drives. Meanwhile labels lag behind the records, agents are cut off and
// hosts continue. No copy that is then believed may lack an acknowledged write.
func TestRandomHistoriesOfLostStores(t *testing.T) {
	t.Parallel()
	seeds := *histories
	if testing.Short() {
		seeds = min(seeds, 20)
	}
	lost, decided, served := 0, 0, 0
	for seed := range seeds {
		bad, w := history(seed, losesStore)
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

// Drives die, wear out, lose power alone, and gain or lose volatile caches, while several
// targets and the manager lose power.
func TestRandomHistoriesOfBadDrives(t *testing.T) {
	t.Parallel()
	seeds := *histories / 2
	if testing.Short() {
		seeds = min(seeds, 10)
	}
	resets, kinds, bad, served := 0, 0, 0, 0
	for seed := range seeds {
		violation, w := history(seed*uint64(moods)+uint64(caches), withHardware)
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

// losesStore also makes labels unwritable at times, while exports continue.
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

// place says which histories show a violation.
type place struct {
	setting func(*world) // nil: nothing special
	in      mood         // mixed means every mood
	first   uint64       // the seed that showed it before, which is tried before all others
}

// search looks for a violation in the first place and in most others.
func (p place) search(most uint64) (violation string) {
	seeds := []uint64{p.first}
	for seed := range most {
		if p.in != mixed {
			seed = seed*uint64(moods) + uint64(p.in)
		}
		seeds = append(seeds, seed)
	}
	for _, seed := range seeds {
		if bad, _ := history(seed, p.setting); bad != "" {
			return bad
		}
	}
	return ""
}

var searched = flag.Uint64("search", 0, "histories to try for each rule beside the one that broke without it; the mutations in e2e/mutants that take a rule out set it")

// For each rule of this package, a history that breaks an invariant without the rule. The
// mutations in e2e/mutants remove the rules one at a time, and also search other histories,
// since this one may have changed its course. With all rules in place none breaks.
func TestHistoriesThatBreakWithoutARule(t *testing.T) {
	for name, p := range map[string]place{
		"no fence":                         {},
		"lease not waited for":             {in: split, first: 282},
		"unfenced leg stays in sync":       {first: 2},
		"superseded epoch may record":      {},
		"last leg may be dropped":          {},
		"served before copies are equal":   {first: 36},
		"copies in one domain":             {first: 1},
		"forced detach counts as clean":    {first: 2},
		"space given away before it free":  {first: 18},
		"reboot of a target forgotten":     {in: caches, first: 173},
		"suspect leg served":               {in: caches, first: 188},
		"host told before all legs grew":   {},
		"leg rebuilt that did not grow":    {in: split, first: 97},
		"host told before labels know":     {in: split, first: 37},
		"readers of a shared epoch":        {in: sharing, first: 249},
		"copies that differ are shared":    {in: sharing, first: 4},
		"host taken out and not fenced":    {in: sharing, first: 74},
		"name that outlives its grant":     {in: sharing, first: 264},
		"reboot of a host ignored":         {first: 1},
		"given up counts as clean":         {first: 34},
		"restored below what targets have": {setting: losesStore, first: 15},
		"boot of a durable drive judged":   {setting: withHardware, in: caches, first: 18},
		"word from before counts":          {setting: withHardware, in: caches, first: 8},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if bad := p.search(*searched); bad != "" {
				t.Error(bad)
			}
		})
	}
}

// If agents break the protocol, the histories detect the harm.
func TestEachPromiseOfAgentsIsNeeded(t *testing.T) {
	for name, p := range map[string]place{
		"leg used before it is zeroed":    {setting: func(w *world) { w.unzeroed() }},
		"copy in sync before its flush":   {setting: func(w *world) { w.noFlush = true }, in: caches, first: 248},
		"host goes on over lost writes":   {setting: func(w *world) { w.goesOn = true }, in: caches},
		"host leaves with writes out":     {setting: func(w *world) { w.leavesDirty = true }, in: split, first: 247},
		"host goes on before its note":    {setting: func(w *world) { losesStore(w); w.notesLate = true }, first: 436},
		"leg mapped before it is judged":  {setting: rashTargets, in: caches},
		"host acknowledges before record": {setting: func(w *world) { w.ackBeforeRecord = true }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const most = 300
			if p.search(most) == "" {
				t.Errorf("no violation in %d histories", most)
			}
		})
	}
}

// plain is the durable part of a state, with its volumes in a map of Go's.
func plain(s *State) (durable, map[block.VolumeID]*Volume) {
	d := s.durable
	d.volumes = cow.Map[block.VolumeID, *Volume]{}
	return d, maps.Collect(s.volumes.All())
}

// A manager that starts on the store has what the manager before it made durable, and
// nothing that agents reported to that one.
func TestTheStoreHoldsWhatIsDurableAndNothingElse(t *testing.T) {
	t.Parallel()
	const seeds = 2 * uint64(moods)
	heard := 0
	for seed := range seeds {
		w := newWorld(seed)
		if seed%2 == 1 {
			losesStore(w)
		}
		for range historySteps {
			w.act()
		}
		fresh := loadStore(t, w.store)
		want, volumes := plain(w.state)
		got, loaded := plain(fresh)
		if !reflect.DeepEqual(want, got) || !reflect.DeepEqual(volumes, loaded) {
			events := cmpopts.IgnoreFields(durable{}, "events", "volumes") // thousands: a diff of them takes minutes
			t.Errorf("seed %d: durable state before and after Load (-want +got):\n%s%s", seed,
				cmp.Diff(want, got, cmp.AllowUnexported(durable{}, meta{}), events), cmp.Diff(volumes, loaded))
		}
		if blank := empty(); !reflect.DeepEqual(fresh.reported, blank.reported) || fresh.clock != blank.clock {
			t.Errorf("seed %d: after Load, agents have said %+v at %+v, want nothing", seed, fresh.reported, fresh.clock)
		}
		if len(w.state.targets) > 0 && len(w.state.initiators) > 0 && len(w.state.served) > 0 {
			heard++
		}
	}
	if heard < int(seeds)/2 { // in some, the manager has just started
		t.Errorf("agents had told %d of %d managers anything: too few prove something", heard, seeds)
	}
}

// The derived part of a state, after any history, equals what Load derives from its records.
func TestWhatIsDerivedFollowsTheRecords(t *testing.T) {
	t.Parallel()
	for seed := range uint64(10) {
		w := newWorld(seed)
		for range historySteps {
			w.act()
		}
		fresh := loadStore(t, w.store)
		for id := range w.state.drives {
			if got, want := w.state.extents[id], fresh.extents[id]; !slices.Equal(got, want) || len(got) == 0 != (w.state.used.Get(id) == 0) {
				t.Errorf("seed %d: drive %v has the extents %v in use, want %v", seed, id, got, want)
			}
			if w.state.used.Get(id) != fresh.used.Get(id) {
				t.Errorf("seed %d: drive %v has %d extents in use, want %d", seed, id, w.state.used.Get(id), fresh.used.Get(id))
			}
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package explore

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"testing"
	"time"
)

var (
	states = flag.Int("states", 0, "stop a search at this many states; 0: never")
	depth  = flag.Int("depth", 0, "stop a search at this many steps from the beginning; 0: never")
	config = flag.String("config", "", "search this configuration, as JSON, in place of the usual ones")
	keep   = flag.String("keep", "", "keep the trace of a broken promise under this name in testdata")
	larger = flag.Bool("larger", false, "search larger configurations")
)

// small are the configurations that are visited completely in each run of the tests.
var small = []Config{
	{Name: "every interleaving: nothing fails", Copies: 2, Hosts: 1, Writes: 3, Lates: -1},
	{Name: "every interleaving: a host dies", Copies: 2, Hosts: 1, Writes: 2, Deaths: 1, Lates: -1},
	{Name: "a link is cut, a target loses its power", Copies: 2, Hosts: 1, Writes: 2, Cuts: 1, Crashes: 1},
	{Name: "a target loses its power, a host dies", Copies: 2, Hosts: 1, Writes: 2, Crashes: 1, Deaths: 1},
	{Name: "a link is cut, a host dies, something is late", Copies: 2, Hosts: 1, Writes: 2, Cuts: 1, Deaths: 1, Lates: 1},
	{Name: "a link is cut, an agent loses the manager, something is late", Copies: 2, Hosts: 1, Writes: 2, Cuts: 1, Partings: 1, Lates: 1},
	{Name: "a link is cut, the manager restarts, something is late", Copies: 2, Hosts: 1, Writes: 2, Cuts: 1, Restarts: 1, Lates: 1},
	{Name: "two power cuts with caches", Copies: 2, Hosts: 1, Writes: 2, Crashes: 2, Cached: true},
	{Name: "a link is cut, a power cut with caches", Copies: 2, Hosts: 1, Writes: 1, Cuts: 1, Crashes: 1, Cached: true},
	{Name: "three copies: a link is cut, a host dies", Copies: 3, Hosts: 1, Writes: 2, Cuts: 1, Deaths: 1},
	{Name: "two hosts: detached, attached elsewhere, something is late", Copies: 2, Hosts: 2, Writes: 2, Attaches: 1, Detaches: 1, Lates: 1},
	{Name: "two hosts: detached by force, attached elsewhere, something is late", Copies: 2, Hosts: 2, Writes: 2, Attaches: 1, Forces: 1, Lates: 1},
	{Name: "two hosts: detached by force, attached elsewhere, an agent loses the manager", Copies: 2, Hosts: 2, Writes: 2, Attaches: 1, Forces: 1, Partings: 1},
	{Name: "two hosts: detached, attached elsewhere, the manager restarts", Copies: 2, Hosts: 2, Writes: 2, Attaches: 1, Detaches: 1, Restarts: 1},
	{Name: "two hosts: detached by force, attached elsewhere, the manager restarts", Copies: 2, Hosts: 2, Writes: 2, Attaches: 1, Forces: 1, Restarts: 1},
	{Name: "three copies, two hosts: detached, attached elsewhere, something is late", Copies: 3, Hosts: 2, Writes: 2, Attaches: 1, Detaches: 1, Lates: 1},
	{Name: "three copies, two hosts: detached by force, attached elsewhere, an agent loses the manager", Copies: 3, Hosts: 2, Writes: 2, Attaches: 1, Forces: 1, Partings: 1},
}

// large are visited with -larger.
var large = []Config{
	{Name: "a link is cut, a target loses its power, a host dies", Copies: 2, Hosts: 1, Writes: 2, Cuts: 1, Crashes: 1, Deaths: 1},
	{Name: "a link is cut, a power cut with caches, something is late, one write", Copies: 2, Hosts: 1, Writes: 1, Cuts: 1, Crashes: 1, Cached: true, Lates: 1},
	{Name: "a host dies twice, something is late", Copies: 2, Hosts: 1, Writes: 2, Deaths: 2, Lates: 1},
	{Name: "a link is cut twice, something is late", Copies: 2, Hosts: 1, Writes: 2, Cuts: 2, Lates: 1},
	{Name: "the manager restarts, a link is cut, a host dies, something is late", Copies: 2, Hosts: 1, Writes: 2, Restarts: 1, Cuts: 1, Deaths: 1, Lates: 1},
	{Name: "two power cuts with caches, something is late", Copies: 2, Hosts: 1, Writes: 2, Crashes: 2, Cached: true, Lates: 1},
	{Name: "a link is cut, a power cut with caches, something is late", Copies: 2, Hosts: 1, Writes: 2, Cuts: 1, Crashes: 1, Cached: true, Lates: 1},
	{Name: "three copies: a link is cut, a target loses its power", Copies: 3, Hosts: 1, Writes: 2, Cuts: 1, Crashes: 1},
	{Name: "three copies: two power cuts with caches", Copies: 3, Hosts: 1, Writes: 1, Crashes: 2, Cached: true},
	{Name: "two hosts: detached by force, an agent loses the manager, something is late", Copies: 2, Hosts: 2, Writes: 2, Attaches: 1, Forces: 1, Partings: 1, Lates: 1},
	{Name: "two hosts: detached by force, a link is cut, an agent loses the manager", Copies: 2, Hosts: 2, Writes: 2, Attaches: 1, Forces: 1, Cuts: 1, Partings: 1},
	{Name: "two hosts: detached, a power cut with caches", Copies: 2, Hosts: 2, Writes: 2, Attaches: 1, Detaches: 1, Crashes: 1, Cached: true},
	{Name: "two hosts: detached, the manager restarts, something is late", Copies: 2, Hosts: 2, Writes: 2, Attaches: 1, Detaches: 1, Restarts: 1, Lates: 1},
	{Name: "two hosts: detached by force, the manager restarts, something is late", Copies: 2, Hosts: 2, Writes: 2, Attaches: 1, Forces: 1, Restarts: 1, Lates: 1},
	{Name: "two hosts: detached, the manager restarts, a host dies", Copies: 2, Hosts: 2, Writes: 2, Attaches: 1, Detaches: 1, Restarts: 1, Deaths: 1},
	{Name: "two hosts: detached by force, the manager restarts twice", Copies: 2, Hosts: 2, Writes: 2, Attaches: 1, Forces: 1, Restarts: 2},
	{Name: "two hosts: detached by force, the manager restarts, a link is cut, one write", Copies: 2, Hosts: 2, Writes: 1, Attaches: 1, Forces: 1, Restarts: 1, Cuts: 1},
	{Name: "three copies, two hosts: detached, a target loses its power", Copies: 3, Hosts: 2, Writes: 2, Attaches: 1, Detaches: 1, Crashes: 1},
	{Name: "three copies, two hosts: detached by force, the manager restarts", Copies: 3, Hosts: 2, Writes: 2, Attaches: 1, Forces: 1, Restarts: 1},
	{Name: "a link is cut, everything is slow", Copies: 2, Hosts: 1, Writes: 2, Cuts: 1, Slownesses: 2},
}

// Each configuration is visited completely, unless a flag bounds the search.
func TestConfigurationsKeepEveryPromise(t *testing.T) {
	for _, c := range configurations(t) {
		t.Run(c.Name, func(t *testing.T) { searches(t, c) })
	}
}

// configurations lists the configurations that the flags ask for.
func configurations(t *testing.T) []Config {
	switch {
	case *config == "" && *larger:
		return large
	case *config == "":
		return small
	}
	var c Config
	if err := json.Unmarshal([]byte(*config), &c); err != nil {
		t.Fatal(err)
	}
	return []Config{c}
}

func searches(t *testing.T, c Config) {
	began := time.Now()
	f := Explore(c, Bounds{States: *states, Depth: *depth})
	t.Logf("%v: %v", time.Since(began).Round(time.Millisecond), f)
	if f.Broken != "" || !f.Complete && *states == 0 && *depth == 0 {
		t.Error("see above")
	}
	if f.Broken == "" || *keep == "" {
		return
	}
	kept := Kept{What: f.Broken, Config: c, Steps: f.Trace}
	if err := os.WriteFile(filepath.Join("testdata", *keep+".txt"), []byte(kept.Text()), 0o600); err != nil {
		t.Error(err)
	}
}

// Each trace in testdata broke a promise while the guard of that name in e2e/mutants/list was missing.
func TestKeptTracesBreakNothing(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			k, err := ParseKept(string(text))
			if err != nil {
				t.Fatal(err)
			}
			if taken, broken := k.Replay(); broken != "" {
				t.Errorf("after %d of %d steps: %s", taken, len(k.Steps), broken)
			}
		})
	}
}

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/image"
)

// able makes the first n targets of a grid such that keep checksums.
func able(s *State, n int) *State {
	for _, name := range slices.Sorted(maps.Keys(s.targets)) {
		s.targets[name].report = &TargetReport{Node: name, Integrity: n > 0}
		n--
	}
	return s
}

// A volume with checksums goes to targets that keep them, takes the extents that it needs, and says
// so in its legs; a repeated request must ask for the same.
func TestAVolumeWithChecksumsGoesToTargetsThatKeepThem(t *testing.T) {
	s := able(grid(1, 4, 1, fixed(64)), 2)
	in := CreateVolume{Name: "db1", Size: block.GiB, Stripes: 1, Integrity: true, Seed: testSeed(1)}
	if _, err := s.Step(time.Unix(1, 0), in); err != nil {
		t.Fatal(err)
	}
	id, _ := s.byName.Find("db1")
	v := s.volumes.Get(id)
	for _, l := range v.Legs {
		if l.Kind != image.Checked || image.Count(l.Extents) != 5 || s.cannotServe(false, v.Layout, l.Node) != "" {
			t.Errorf("%v has an image %q of %d extents; want 1 GiB with checksums, in 5 extents", &l, l.Kind, image.Count(l.Extents))
		}
	}
	if again, err := Load(s.Records()); err != nil || again.volumes.Get(id).Layout != v.Layout {
		t.Errorf("loaded: %v", err)
	}
	in.Integrity, in.Seed = false, testSeed(2)
	var e *Error
	if _, err := s.Step(time.Unix(1, 0), in); !errors.As(err, &e) || e.Field != "integrity" {
		t.Errorf("the same volume without: %v", err)
	}
	in.Name = "db2"
	if _, err := s.Step(time.Unix(1, 0), in); err != nil {
		t.Fatal(err)
	}
}

func TestWithoutTargetsThatKeepChecksumsTheRefusalSaysWhy(t *testing.T) {
	s := able(grid(1, 3, 1, fixed(64)), 1)
	_, err := s.Step(time.Unix(1, 0), CreateVolume{Name: "db1", Size: block.GiB, Integrity: true, Seed: testSeed(1)})
	if err == nil || !strings.Contains(err.Error(), "its target cannot keep checksums") {
		t.Fatalf("create: %v", err)
	}
	able(s, 2) // another agent has been upgraded
	s.fields = nil
	if _, err := s.Step(time.Unix(2, 0), CreateVolume{Name: "db1", Size: block.GiB, Integrity: true, Seed: testSeed(1)}); err != nil {
		t.Error(err)
	}
}

// The capacity for volumes with checksums is what the data of their extents is.
func TestCapacityWithoutTheChecksums(t *testing.T) {
	s := able(grid(1, 2, 1, fixed(8)), 2)
	for integrity, want := range map[bool]block.Size{false: 8 * block.ExtentSize, true: 8 * block.CheckedData} {
		c, err := s.Capacity(CreateVolume{Copies: 2, Stripes: 1, Integrity: integrity})
		if err != nil || c.Available != want || c.Maximum != want {
			t.Errorf("integrity %v: %v, %v available; want %v", integrity, c.Maximum, c.Available, want)
		}
	}
}

// What a host heals is told once, counted, and explained.
func TestHealedRangesAreToldOnce(t *testing.T) {
	s := newScript(t)
	for _, line := range []string{
		"target t1 drives=4GiB", "target t2 drives=4GiB", "create db1 size=1GiB stripes=1", "comply", "host c1", "attach db1 c1", "comply", "serve c1 db1",
	} {
		s.run(line)
	}
	id := s.state.idOf("db1")
	heals := &HealReport{Run: "r1"}
	add := func(outcome ScrubOutcome) {
		heals.Count++
		if outcome != ScrubRepaired {
			heals.Failed++
		}
		heals.Last = append(heals.Last, ScrubFinding{Off: block.Size(heals.Count) * 4096, Length: 4096, Unreadable: []int{1}, Right: -1, Outcome: outcome})
	}
	told := func(want int, text string) {
		t.Helper()
		s.hosts["c1"].heals = heals
		out := s.reportHost("c1")
		if n := strings.Count(out, event.ReadRepair+":"); n != want || !strings.Contains(out, text) {
			t.Errorf("%d events, want %d, one with %q:\n%s", n, want, text, out)
		}
	}
	add(ScrubRepaired)
	told(1, "leg 0.1 on t2 does not match its checksum; written again from another copy")
	told(0, "")
	add(ScrubRepaired)
	add(ScrubNotKnown)
	told(2, "not repaired")
	heals.Count += 10 // more than the host remembers
	told(4, "7 ranges more did not match")
	heals = &HealReport{Run: "r2"} // the volume was attached again
	add(ScrubRepaired)
	told(1, "")
	if h := s.state.volumes.Get(id).Heals; h == nil || h.Repaired != 13 || h.NotRepaired != 1 {
		t.Errorf("the record has %+v", h)
	}
	var e Explanation
	s.state.volumes.Get(id).explainHeals(&e)
	if text := fmt.Sprint(e.Facts, e.Actions); !strings.Contains(text, "13 ranges of its copies did not match") || !strings.Contains(text, "1 range of its copies did not match their checksums and could not") || !strings.Contains(text, "--repair") {
		t.Errorf("explained as %s", text)
	}
}

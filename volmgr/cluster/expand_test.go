// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"slices"
	"strings"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/image"
)

// expanding is labelled with an expansion of db1 to 2 GiB under way. The further commands
// say how far its targets have come.
func expanding(t *testing.T, more ...string) (*script, func(nodes ...string) []TargetReport) {
	commands := []string{"slow t1", "slow t2", "slow t3", "expand db1 size=2GiB"}
	return labelled(t, append(commands, more...)...)
}

// A crash in the middle of an expansion leaves the old size or the new one.
func TestRebuildInTheMiddleOfAnExpansion(t *testing.T) {
	for name, c := range map[string]struct {
		commands []string // before the store was lost
		size     block.Size
	}{
		"no label knows of it":                {nil, block.GiB},
		"one label knows of it":               {[]string{"comply LEG0"}, block.GiB},
		"both know, none is zeroed":           {[]string{"comply"}, block.GiB},
		"one is zeroed":                       {[]string{"comply", "zero LEG0"}, block.GiB},
		"both are zeroed, no host was told":   {[]string{"comply", "zero LEG0", "restart", "zero LEG1"}, 2 * block.GiB},
		"a host was told, no label has it":    {[]string{"comply", "zero LEG0", "zero LEG1"}, 2 * block.GiB},
		"a host was told, one label has it":   {[]string{"comply", "zero LEG0", "zero LEG1", "comply LEG0"}, 2 * block.GiB},
		"it is over":                          {[]string{"comply", "zero LEG0", "zero LEG1", "comply"}, 2 * block.GiB},
		"one leg went stale before it was":    {[]string{"lost LEG1", "stale c1 db1 0.1", "comply LEG0", "zero LEG0"}, 2 * block.GiB},
		"and no label knows that it ended":    {[]string{"comply LEG0", "zero LEG0", "stale c1 db1 0.1", "report LEG0", "comply LEG0"}, 2 * block.GiB},
		"a second expansion is not zeroed":    {[]string{"comply", "zero LEG0", "zero LEG1", "comply", "expand db1 size=3GiB", "comply"}, 2 * block.GiB},
		"a second one over the first is half": {[]string{"comply", "expand db1 size=3GiB", "zero LEG0", "comply LEG1", "zero LEG1"}, block.GiB},
	} {
		t.Run(name, func(t *testing.T) {
			s, reports := expanding(t)
			v, _ := s.state.Volume("db1")
			for _, line := range c.commands {
				line = strings.ReplaceAll(line, "LEG0", string(v.Legs[0].Node))
				s.run(strings.ReplaceAll(line, "LEG1", string(v.Legs[1].Node)))
			}
			state, text := rebuilt(t, reports("t1", "t2", "t3"), s.hostReport("c1"))
			got, err := state.Volume("db1")
			if err != nil || got.Size != c.size || got.ExpandingTo != 0 {
				t.Fatalf("rebuilt volume has %v, expanding to %v (%v), want %v; report:\n%s", got.Size, got.ExpandingTo, err, c.size, text)
			}
			for i := range got.Legs {
				l := &got.Legs[i]
				on := s.targets[string(l.Node)]
				if int(image.Count(l.Extents)) < got.Layout.LegExtents(got.Size) {
					t.Errorf("%v has %v, too little for %v", l, l.Extents, got.Size)
				}
				if have := on.zeroed(l.ID); l.State == LegInSync && have < got.Layout.LegSize(got.Size) {
					t.Errorf("%v is in sync, and only %v of it is zeroed", l, have)
				}
			}
			// The rebuilt state completes what was left undone, and accepts a further expansion.
			s.state, s.session, s.store = state, 2, map[string][]byte{}
			keep(s.store, state.Records())
			for _, line := range []string{"expand db1 size=3GiB", "comply", "zero t1", "zero t2", "zero t3", "comply"} {
				s.run(line)
			}
			if got, _ := s.state.Volume("db1"); got.Size != 3*block.GiB {
				t.Errorf("after another expansion:\n%s%s", s.run("volume db1"), s.run("explain db1"))
			}
		})
	}
}

// A leg that missed an expansion gets new extents in a rebuilt store.
func TestARebuiltStoreHasRoomForALegThatMissedAnExpansion(t *testing.T) {
	s, reports := expanding(t)
	v, _ := s.state.Volume("db1")
	first, second := string(v.Legs[0].Node), string(v.Legs[1].Node)
	for _, line := range []string{"lost " + second, "stale c1 db1 0.1", "comply " + first, "zero " + first, "comply " + first} {
		s.run(line)
	}
	state, text := rebuilt(t, reports("t1", "t2", "t3"), s.hostReport("c1"))
	got, _ := state.Volume("db1")
	if l := got.Legs[1]; l.State != LegStale || image.Count(l.Extents) != 8 {
		t.Errorf("leg 0.1 is %s on %v, want it stale with 8 extents; report:\n%s", l.State, l.Extents, text)
	}
}

// A restored backup from before an expansion must not shrink the volume again, nor give its
// new extents to another one.
func TestRestoredVolumeKeepsWhatItGrewBy(t *testing.T) {
	for name, c := range map[string]struct {
		more []string
		size block.Size
	}{
		"expanded":   {[]string{"expand db1 size=2GiB", "comply", "comply"}, 2 * block.GiB},
		"told":       {[]string{"slow t1", "slow t2", "slow t3", "expand db1 size=2GiB", "comply", "zero t1", "zero t2", "zero t3"}, 2 * block.GiB},
		"not zeroed": {[]string{"slow t1", "slow t2", "slow t3", "expand db1 size=2GiB", "comply"}, block.GiB},
	} {
		t.Run(name, func(t *testing.T) {
			state, report := restored(t, c.more...)
			nodes := legNodes(restoredVolume(t, state))
			report(nodes[0])
			// The other leg's label was not read yet, so its extents go to another volume.
			in := CreateVolume{Name: "db2", Size: 3 * block.GiB, Stripes: 1, Copies: 1, Seed: testSeed(99)}
			if _, err := state.Step(t0, in); err == nil {
				v2, _ := state.Volume("db2")
				if slices.Contains(nodes, string(v2.Legs[0].Node)) {
					t.Errorf("db2 was put on %s, where db1 has 2GiB of 4GiB", v2.Legs[0].Node)
				}
			}
			if _, err := state.Step(t0, ExpandVolume{"db1", 3 * block.GiB}); !isReason(err, ReasonNotReady) {
				t.Errorf("expanding a restored volume before its labels were seen = %v, want %s", err, ReasonNotReady)
			}
			report(append(nodes, "c1")...)
			v := restoredVolume(t, state)
			if v.Size != c.size || image.Count(v.Legs[0].Extents) != 8 || image.Count(v.Legs[1].Extents) != 8 {
				t.Errorf("restored volume has %v on %v and %v, want %v on 8 extents each", v.Size, v.Legs[0].Extents, v.Legs[1].Extents, c.size)
			}
			for _, l := range v.Legs {
				for _, w := range state.WantedTarget(l.Node).Legs {
					if !slices.Equal(w.Extents, l.Extents) || w.Size != v.Layout.LegSize(c.size) {
						t.Errorf("leg %d.%d is wanted with %v on %v, want %v on %v", w.Column, w.Copy, w.Size, w.Extents, c.size, l.Extents)
					}
				}
			}
		})
	}
}

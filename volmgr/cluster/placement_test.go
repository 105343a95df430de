// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/image"
)

// grid is a cluster of racks × nodes × drives, all ready and online.
func grid(racks, nodes, drives int, extents func(int) uint32) *State {
	s, _ := New(testCluster())
	for r := range racks {
		for n := range nodes {
			name := block.NodeName(fmt.Sprintf("r%d-n%d", r, n))
			s.nodes[name] = &Node{Name: name, AgentLabels: map[string]string{"rack": fmt.Sprint(r)}}
			s.targets[name] = &target{agent: agent{status: AgentStatus{Online: true}}}
			for range drives {
				id := block.DriveID{UUID: testSeed(len(s.drives)).id(7)}
				d := &Drive{ID: id, Node: name, Device: fmt.Sprintf("/dev/d%d", len(s.drives)), State: DriveReady, Extents: extents(len(s.drives))}
				s.drives[id] = d
				s.indexDrive(nil, d)
			}
		}
	}
	return s
}

func fixed(n uint32) func(int) uint32 { return func(int) uint32 { return n } }

// mustHold checks the promises of placement over all volumes.
func mustHold(t *testing.T, s *State) {
	t.Helper()
	taken := map[block.DriveID][]image.Extent{}
	for _, v := range s.volumes.All() {
		for i, l := range v.Legs {
			if n := image.Count(l.Extents); n != uint32(v.Layout.LegExtents(v.Size)) {
				t.Fatalf("%v of %s has %d extents, want %d", &l, v.Name, n, v.Layout.LegExtents(v.Size))
			}
			for _, o := range v.Legs[:i] {
				if o.Column == l.Column && (o.Node == l.Node || s.nodes[o.Node].labels()[v.Spread] == s.nodes[l.Node].labels()[v.Spread]) {
					t.Fatalf("%v and %v of %s share a node or a %s", &o, &l, v.Name, v.Spread)
				}
			}
			for _, x := range l.Extents {
				if x.Count == 0 || x.Start+x.Count > s.drives[l.Drive].Extents {
					t.Fatalf("%v of %s: extent %v is not on the drive", &l, v.Name, x)
				}
				for _, o := range taken[l.Drive] {
					if x.Overlaps(o) {
						t.Fatalf("%v of %s: extent %v overlaps %v", &l, v.Name, x, o)
					}
				}
				taken[l.Drive] = append(taken[l.Drive], x)
			}
		}
	}
}

func TestPlacementKeepsCopiesApartAndExtentsDisjoint(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for round := range 20 {
		s := grid(2+rng.IntN(4), 1+rng.IntN(3), 1+rng.IntN(3), func(i int) uint32 { return uint32(20 + 13*i%90) })
		for i := range 60 {
			in := CreateVolume{
				Name: block.VolumeName(fmt.Sprintf("v%d", i)), Size: block.Size(1+rng.IntN(4000)) * block.MiB,
				Copies: 1 + rng.IntN(3), Stripes: rng.IntN(5), Spread: []string{"node", "rack"}[rng.IntN(2)], Seed: testSeed(1000*round + i),
			}
			if _, err := s.Step(t0, in); err != nil {
				var e *Error
				if !errors.As(err, &e) || e.Kind != ResourceExhausted {
					t.Fatalf("Step(%+v) = %v, want space or ResourceExhausted", in, err)
				}
			}
			if rng.IntN(4) == 0 && s.volumes.Len() > 0 { // holes
				for id, v := range s.volumes.All() {
					s.index(v, nil)
					s.volumes.Delete(s.by, id)
					break
				}
			}
		}
		mustHold(t, s)
	}
}

func TestPlacementFillsDrivesEvenly(t *testing.T) {
	s := grid(10, 5, 8, func(i int) uint32 { return []uint32{7680, 15360}[i%2] }) // 400 drives, 2 sizes
	total, used := uint32(0), uint32(0)
	for _, d := range s.drives {
		total += d.Extents
	}
	rng := rand.New(rand.NewPCG(3, 4))
	for i := 0; used < total*7/10; i++ {
		size := block.Size(10+rng.IntN(500)) * block.GiB
		if _, err := s.Step(t0, CreateVolume{Name: block.VolumeName(fmt.Sprintf("v%d", i)), Size: size, Spread: "rack", Seed: testSeed(i)}); err != nil {
			t.Fatal(err)
		}
		v := s.volumes.Get(s.idOf(block.VolumeName(fmt.Sprintf("v%d", i))))
		used += uint32(v.Layout.LegExtents(size) * v.Layout.Legs())
	}
	mean, most, least := float64(used)/float64(total), 0.0, 1.0
	for id, d := range s.drives {
		fill := float64(s.used.Get(id)) / float64(d.Extents)
		most, least = max(most, fill), min(least, fill)
	}
	t.Logf("mean %.3f, least %.3f, most %.3f", mean, least, most)
	if most > mean+0.08 || least < mean-0.15 {
		t.Errorf("fill at mean %.3f: least %.3f, most %.3f; want them close", mean, least, most)
	}
}

func TestPlacementIsTheSameForTheSameSeed(t *testing.T) {
	place := func() []Record {
		s := grid(4, 3, 4, fixed(400))
		for i := range 20 {
			if _, err := s.Step(t0, CreateVolume{Name: block.VolumeName(fmt.Sprintf("v%d", i)), Size: 7 * block.GiB, Seed: testSeed(i)}); err != nil {
				t.Fatal(err)
			}
		}
		return s.Records()
	}
	if diff := cmp.Diff(place(), place()); diff != "" {
		t.Errorf("two placements with the same seeds differ:\n%s", diff)
	}
}

// The reference: with legs of one extent, a placement exists if and only if the domains have
// enough room, each counted up to one leg a column.
func TestPlacementFindsRoomWheneverThereIsAny(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	found, refusals := 0, 0
	for range 3000 {
		s := grid(2+rng.IntN(3), 1, 1+rng.IntN(3), func(int) uint32 { return uint32(rng.IntN(4)) })
		stripes, copies := 1+rng.IntN(4), 1+rng.IntN(3)
		room, domains := 0, map[block.NodeName]int{}
		for _, d := range s.drives {
			domains[d.Node] += int(d.Extents)
		}
		for _, n := range domains {
			room += min(n, stripes)
		}
		want := room >= stripes*copies
		in := CreateVolume{Name: "v", Size: block.Size(stripes) * 256 * block.MiB, Stripes: stripes, Copies: copies, Seed: testSeed(rng.IntN(1 << 30))}
		_, err := s.Step(t0, in)
		if (err == nil) != want {
			t.Fatalf("%d×%d legs into %v: %v, want room %v", stripes, copies, domains, err, want)
		}
		if want {
			found++
		} else {
			refusals++
		}
	}
	if found < 300 || refusals < 300 {
		t.Errorf("%d placements and %d refusals, want many of both", found, refusals)
	}
}

func TestFirstLegsRotateOverNodes(t *testing.T) {
	s := grid(4, 1, 2, fixed(1000))
	if _, err := s.Step(t0, CreateVolume{Name: "v", Size: 8 * block.GiB, Stripes: 8, Seed: testSeed(1)}); err != nil {
		t.Fatal(err)
	}
	firsts := map[block.NodeName]int{}
	for _, l := range s.volumes.Get(s.idOf("v")).Legs {
		if l.Copy == 0 {
			firsts[l.Node]++
		}
	}
	for node, n := range firsts {
		if n > 3 {
			t.Errorf("node %s has %d of 8 first legs (%v), want them spread", node, n, firsts)
		}
	}
}

func TestNoSpaceTextIsBounded(t *testing.T) {
	s := grid(10, 10, 10, fixed(1))
	_, err := s.Step(t0, CreateVolume{Name: "v", Size: block.TiB, Stripes: 1, Seed: testSeed(1)})
	var e *Error
	if !errors.As(err, &e) || e.Kind != ResourceExhausted || len(e.Text) > 2000 || !strings.Contains(e.Text, "and 988 more") {
		t.Errorf("Step(too large) = %v, want a bounded list", err)
	}
}

func BenchmarkCreateVolume(b *testing.B) {
	s := grid(25, 25, 16, fixed(30720)) // 10 000 drives
	for i := 0; b.Loop(); i++ {
		if _, err := s.Step(t0, CreateVolume{Name: block.VolumeName(fmt.Sprintf("v%d", i)), Size: block.GiB, Spread: "rack", Seed: testSeed(i)}); err != nil {
			b.Fatal(err)
		}
	}
}

// Looking at a few drives must not change where legs go: whatever the request and the state
// of the drives, the places are those that looking at all drives finds.
func TestSampledDrivesAreThoseOfTheFullWalk(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	quick, full := 0, 0
	for round := range 12 {
		s := grid(3+rng.IntN(5), 1+rng.IntN(6), 1+rng.IntN(20), func(i int) uint32 { return uint32(10 + 13*i%90) })
		s.pools["gold"] = &Pool{Name: "gold", Selector: map[string]string{"class": "gold"}}
		for _, d := range s.drives {
			if rng.IntN(3) > 0 {
				d.Labels = map[string]string{"class": "gold"}
			}
		}
		for i := range 150 {
			disturb(t, s, rng)
			in, err := CreateVolume{
				Name: block.VolumeName(fmt.Sprintf("v%d", i)), Size: block.Size(1+rng.IntN(3000)) * block.MiB,
				Copies: 1 + rng.IntN(3), Stripes: rng.IntN(4), Spread: []string{"node", "rack", "room"}[rng.IntN(8)%3], Seed: testSeed(1000*round + i),
				Pool: []string{"", "", "gold"}[rng.IntN(3)],
			}.normal()
			if err != nil {
				t.Fatal(err)
			}
			if rng.IntN(3) == 0 {
				in.Topology = []Segment{{"rack": "0"}, {"rack": "1"}, {"rack": "2"}}
				in.Preferred = in.Topology[1:]
			}
			layout, legs := s.sampled(s.pools[in.Pool], in)
			wantLayout, want, wantErr := s.placeAmongAll(s.pools[in.Pool], in)
			if legs == nil {
				full++
			} else if quick++; wantErr != nil || layout != wantLayout || !cmp.Equal(legs, want) {
				t.Fatalf("%+v is placed as %v %v, among all drives as %v %v, %v", in, layout, legs, wantLayout, want, wantErr)
			}
			if _, err := s.Step(t0, in); (err == nil) != (wantErr == nil) {
				t.Fatalf("Step = %v, among all drives %v", err, wantErr)
			}
		}
	}
	if quick < 300 || full < 300 {
		t.Errorf("%d placements among a few drives and %d among all, want many of both", quick, full)
	}
}

// disturb changes which drives may be used, as reports and operators do, and frees space.
func disturb(t *testing.T, s *State, rng *rand.Rand) {
	t.Helper()
	step := func(in Input) {
		if _, err := s.Step(t0, in); err != nil {
			t.Fatal(err)
		}
	}
	ids, names := s.sortedDrives(), slices.Sorted(maps.Keys(s.nodes))
	node := names[rng.IntN(len(names))]
	switch rng.IntN(12) {
	case 0:
		step(TargetLost{Node: node})
	case 1:
		for _, name := range names {
			if s.targets[name] == nil || !s.targets[name].status.Online {
				r := TargetReport{Node: name, BootID: "b", Labels: s.nodes[name].AgentLabels}
				for _, d := range s.Drives(name) {
					r.Drives = append(r.Drives, DriveReport{Drive: d.ID, Extents: d.Extents, Device: d.Device})
				}
				step(TargetReported{Report: r})
			}
		}
	case 2:
		step(SetDriveLabels{Drive: ids[rng.IntN(len(ids))], Labels: map[string]string{"class": []string{"gold", "iron"}[rng.IntN(2)]}})
	case 3:
		step(SetNodeLabels{Node: node, Labels: map[string]string{"rack": fmt.Sprint(rng.IntN(8)), "room": fmt.Sprint(rng.IntN(4))}})
	case 4:
		for id, v := range s.volumes.All() {
			s.index(v, nil)
			s.volumes.Delete(s.by, id)
			break
		}
	}
}

// volumeOnGrid returns a volume of two copies in a state of many drives, and what a step looks at.
func volumeOnGrid(t testing.TB, s *State) (*Volume, lookup) {
	t.Helper()
	if _, err := s.Step(t0, CreateVolume{Name: "v", Size: block.GiB, Copies: 2, Stripes: 1, Spread: "rack", Seed: testSeed(1)}); err != nil {
		t.Fatal(err)
	}
	at := s.lookup()
	at.step = true
	return s.volumes.Get(s.idOf("v")), at
}

func TestANewLegAmongManyDrivesHasAFailureDomainOfItsOwn(t *testing.T) {
	s := grid(5, 20, 10, func(i int) uint32 { return uint32(1 + i%40) })
	v, at := volumeOnGrid(t, s)
	to := s.drives[s.sortedDrives()[17]].Node
	for i := range 300 {
		p, err := s.newPlace(v, 0, "", testSeed(i), at)
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range v.Legs {
			if rack := s.nodes[l.Node].label("rack"); rack == s.nodes[p.Drive.Node].label("rack") {
				t.Fatalf("seed %d: the new leg is on %s, in rack %s, as %v is", i, p.Drive.Node, rack, &l)
			}
		}
		if s.unfit(v, 0, to, s.candidate(s.drives[s.sortedDrives()[17]], "", 0, CreateVolume{}), at) == "" {
			if p, err := s.newPlace(v, 0, to, testSeed(i), at); err != nil || p.Drive.Node != to {
				t.Fatalf("seed %d: a leg that is to be on %s is on %v, %v", i, to, p, err)
			}
		}
	}
}

// Legs that are made again elsewhere are placed while all other decisions wait.
func BenchmarkNewPlace(b *testing.B) {
	s := grid(25, 25, 16, fixed(30720)) // 10 000 drives
	v, at := volumeOnGrid(b, s)
	for i := 0; b.Loop(); i++ {
		if _, err := s.newPlace(v, 0, "", testSeed(i), at); err != nil {
			b.Fatal(err)
		}
	}
}

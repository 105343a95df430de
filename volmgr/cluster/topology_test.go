// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"weft.dev/weft/proto/block"
)

// try reports whether a volume can be created now, and removes it again.
func try(t *testing.T, s *State, in CreateVolume) bool {
	t.Helper()
	in.Name = "try"
	_, err := s.Step(t0, in)
	var refused *Error
	if err != nil && (!errors.As(err, &refused) || refused.Kind != ResourceExhausted) {
		t.Fatalf("Step(%+v) = %v, want a volume or ResourceExhausted", in, err)
	}
	if err != nil {
		return false
	}
	v := s.volumes.Get(s.idOf("try"))
	s.index(v, nil)
	s.volumes.Delete(s.by, v.ID)
	return true
}

// filled is a random cluster with volumes on it.
func filled(t *testing.T, rng *rand.Rand, seeds int) *State {
	t.Helper()
	s := grid(1+rng.IntN(4), 1+rng.IntN(3), 1+rng.IntN(3), func(i int) uint32 { return uint32(3 + 13*i%40) })
	for i := range rng.IntN(12) {
		in := CreateVolume{
			Name: block.VolumeName(fmt.Sprintf("v%d", i)), Size: block.Size(1+rng.IntN(3000)) * block.MiB,
			Copies: 1 + rng.IntN(2), Seed: testSeed(seeds + i),
		}
		var refused *Error
		if _, err := s.Step(t0, in); err != nil && !errors.As(err, &refused) {
			t.Fatal(err)
		}
	}
	return s
}

func TestTheLargestVolumeCanBeMadeAndNoLargerOne(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	some, none := 0, 0
	for round := range 400 {
		s := filled(t, rng, 1000*round)
		in := CreateVolume{Copies: 1 + rng.IntN(3), Stripes: rng.IntN(5), Spread: []string{"node", "rack"}[rng.IntN(2)], Seed: testSeed(5000000 + round)}
		if rng.IntN(3) == 0 {
			in.Topology = []Segment{{"rack": "0"}, {"rack": "2"}}
		}
		c, err := s.Capacity(in)
		if err != nil {
			t.Fatal(err)
		}
		if c.Maximum > c.Available || c.Minimum > block.MiB {
			t.Fatalf("round %d: %+v", round, c)
		}
		if c.Maximum > 0 {
			some++
			in.Size = c.Maximum
			if !try(t, s, in) {
				t.Fatalf("round %d: no volume of %v, which is said to be possible: %+v", round, c.Maximum, in)
			}
		} else {
			none++
		}
		for _, more := range []block.Size{4 * block.KiB, block.ExtentSize * block.Size(max(in.Stripes, 1))} {
			if in.Size = max(c.Maximum+more, minVolume); try(t, s, in) {
				t.Fatalf("round %d: there is room for %v, said was %v: %+v", round, in.Size, c.Maximum, in)
			}
		}
	}
	if some < 100 || none < 10 {
		t.Errorf("%d rounds with room and %d without, want more", some, none)
	}
}

func TestWhatIsAvailableIsWhatSmallVolumesCanTake(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	var said, made block.Size
	for round := range 60 {
		s := filled(t, rng, 1000*round)
		in := CreateVolume{Size: block.ExtentSize, Copies: 1 + round%3, Stripes: 1}
		c, err := s.Capacity(in)
		if err != nil {
			t.Fatal(err)
		}
		var sum block.Size
		for i := 0; ; i++ {
			in.Name, in.Seed = block.VolumeName(fmt.Sprintf("s%d", i)), testSeed(1000000+1000*round+i)
			if _, err := s.Step(t0, in); err != nil {
				break
			}
			sum += in.Size
		}
		if sum > c.Available || in.Copies == 1 && sum != c.Available {
			t.Errorf("round %d: volumes of %d copies took %v, said to be available was %v", round, in.Copies, sum, c.Available)
		}
		said, made = said+c.Available, made+sum
	}
	if made < said*9/10 {
		t.Errorf("%v was made of %v that was said to be available", made, said)
	}
}

func TestCapacityIsRefusedForWhatCreateRefuses(t *testing.T) {
	s := grid(2, 1, 1, fixed(10))
	for field, in := range map[string]CreateVolume{"copies": {Copies: 9}, "stripes": {Stripes: 100}, "chunk_bytes": {Chunk: 5}} {
		var refused *Error
		if _, err := s.Capacity(in); !errors.As(err, &refused) || refused.Field != field {
			t.Errorf("Capacity(%+v) = %v, want field %s", in, err, field)
		}
	}
	var refused *Error
	if _, err := s.Capacity(CreateVolume{Pool: "gold"}); !errors.As(err, &refused) || refused.Kind != NotFound {
		t.Errorf("Capacity of an unknown pool = %v, want not found", err)
	}
}

func TestLegsLieInTheSegmentsThatAreAskedFor(t *testing.T) {
	s := grid(4, 2, 2, fixed(40))
	create := func(in CreateVolume) (*Volume, error) {
		in.Size, in.Seed = 4*block.GiB, testSeed(s.volumes.Len()+1)
		_, err := s.Step(t0, in)
		return s.volumes.Get(s.idOf(in.Name)), err
	}
	rack := func(l Leg) string { return s.nodes[l.Node].label("rack") }
	v, err := create(CreateVolume{Name: "a", Stripes: 3, Spread: "rack", Topology: []Segment{{"rack": "1"}, {"rack": "3"}}})
	if err != nil {
		t.Fatal(err)
	}
	for _, l := range v.Legs {
		if r := rack(l); r != "1" && r != "3" {
			t.Errorf("%v is in rack %s", &l, r)
		}
	}
	// A repeated request returns the same volume; one for another topology is a conflict.
	if _, err := create(CreateVolume{Name: "a", Stripes: 3, Spread: "rack", Topology: []Segment{{"rack": "1"}, {"rack": "3"}}}); err != nil {
		t.Errorf("the same create again = %v", err)
	}
	var refused *Error
	if _, err := create(CreateVolume{Name: "a", Stripes: 3, Spread: "rack", Topology: []Segment{{"rack": "1"}}}); !errors.As(err, &refused) || refused.Field != "topology" || refused.Kind != AlreadyExists {
		t.Errorf("create of what lies elsewhere = %v, want a conflict of topology", err)
	}
	// One rack has no two racks.
	_, err = create(CreateVolume{Name: "b", Spread: "rack", Topology: []Segment{{"rack": "1"}}})
	if !isReason(err, ReasonNoSpace) || !strings.Contains(err.Error(), "within rack=1 has them on 1") || !strings.Contains(err.Error(), "its node is not in rack=1") {
		t.Errorf("two copies apart by rack in one rack = %v, want %s and why", err, ReasonNoSpace)
	}
	// By name, and with all labels of a segment.
	v, err = create(CreateVolume{Name: "c", Copies: 1, Stripes: 1, Topology: []Segment{{"rack": "2", "node": "r2-n1"}}})
	if err != nil || v.Legs[0].Node != "r2-n1" {
		t.Errorf("a volume for r2-n1 = %v, %v", v, err)
	}
	if _, err = create(CreateVolume{Name: "d", Copies: 1, Topology: []Segment{{"rack": "2", "node": "r1-n1"}}}); !isReason(err, ReasonNoSpace) {
		t.Errorf("a volume for a node that is not in the rack = %v, want %s", err, ReasonNoSpace)
	}
}

func TestPreferredSegmentsAreTakenFirstAndNeverAtAnyPrice(t *testing.T) {
	s := grid(3, 2, 1, fixed(40))
	prefer := []Segment{{"node": "r1-n0"}, {"rack": "1"}, {"rack": "2"}}
	var first []block.NodeName
	for i := range 6 {
		in := CreateVolume{Name: block.VolumeName(fmt.Sprintf("v%d", i)), Size: 2 * block.GiB, Stripes: 1, Preferred: prefer, Seed: testSeed(i)}
		if _, err := s.Step(t0, in); err != nil {
			t.Fatal(err)
		}
		v := s.volumes.Get(s.idOf(in.Name))
		first = append(first, v.Legs[0].Node)
		if i == 0 && v.Legs[1].Node != "r1-n1" {
			t.Errorf("the second leg is on %s, want the node of the next segment", v.Legs[1].Node)
		}
	}
	if first[0] != "r1-n0" {
		t.Errorf("first legs are on %v, want the first one where it is preferred", first)
	}
	if n := len(slices.Compact(slices.Sorted(slices.Values(first)))); n < 2 {
		t.Errorf("first legs are on %v: a drive that is full of them is still preferred", first)
	}
	// A preference for a node that does not exist has no effect.
	if _, err := s.Step(t0, CreateVolume{Name: "w", Size: block.GiB, Preferred: []Segment{{"node": "nowhere"}}, Seed: testSeed(99)}); err != nil {
		t.Errorf("a preference that cannot be met = %v", err)
	}
}

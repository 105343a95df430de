// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"maps"
	"reflect"
	"slices"
	"testing"

	"weft.dev/weft/proto/block"
)

// told is what the agents of a node would be told of each volume, and of drives.
type told struct {
	target    map[block.VolumeID]TargetWanted
	initiator map[block.VolumeID]InitiatorWanted
	drives    []WantedDrive
}

func toldBy(s *State, node block.NodeName) told {
	t := told{map[block.VolumeID]TargetWanted{}, map[block.VolumeID]InitiatorWanted{}, s.WantedTargetOf(node, nil).Drives}
	for _, id := range s.volumesOn(node) {
		target, initiator := s.WantedTargetOf(node, []block.VolumeID{id}), s.WantedInitiatorOf(node, []block.VolumeID{id})
		target.Generation, initiator.Generation, target.Term, initiator.Term, target.Drives = 0, 0, 0, 0, nil
		t.target[id], t.initiator[id] = target, initiator
	}
	return t
}

// Agents are told only what a step lists as changed, so it must list all that it changes.
func TestEveryChangeOfAWantedStateIsListed(t *testing.T) {
	t.Parallel()
	narrow, nodes := 0, 0
	for seed := range 3 * uint64(moods) {
		w := newWorld(seed)
		if seed%2 == 1 {
			withHardware(w)
		}
		known, state := map[block.NodeName]told{}, w.state
		w.stepped = func(in Input, out Outcome) {
			if w.state != state { // another manager: its streams begin with whole states
				known, state = map[block.NodeName]told{}, w.state
			}
			if got := slices.Sorted(maps.Keys(out.Changed)); !slices.Equal(got, out.Wake) {
				t.Fatalf("%T: changes are listed of %v, and %v are woken", in, got, out.Wake)
			}
			for _, name := range slices.Sorted(maps.Keys(state.nodes)) {
				is := toldBy(state, name)
				was, seen := known[name]
				known[name] = is
				changed, woken := out.Changed[name]
				if !seen || woken && changed == nil {
					continue
				}
				nodes++
				if woken {
					narrow++
				}
				if !reflect.DeepEqual(is.drives, was.drives) {
					t.Fatalf("seed %d: %T changed what %s is told of drives, and does not say so", seed, in, name)
				}
				ids := maps.Clone(changed)
				for _, id := range slices.Concat(slices.Collect(maps.Keys(is.target)), slices.Collect(maps.Keys(was.target))) {
					if ids[id] {
						continue
					}
					if !reflect.DeepEqual(is.target[id], was.target[id]) || !reflect.DeepEqual(is.initiator[id], was.initiator[id]) {
						t.Fatalf("seed %d: %T changed what %s is told of volume %v, and lists only %v:\n%+v\n%+v\nwas\n%+v\n%+v",
							seed, in, name, id, changed, is.target[id], is.initiator[id], was.target[id], was.initiator[id])
					}
				}
			}
		}
		for range historySteps {
			w.act()
		}
	}
	if narrow < 1000 {
		t.Errorf("%d nodes were told of some volumes only, want many", narrow)
	}
	t.Logf("%d of %d wanted states changed in some volumes only", narrow, nodes)
}

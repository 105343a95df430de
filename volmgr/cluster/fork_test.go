// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
)

// looks is all that readers can see of a state.
func looks(s *State) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%+v\n", s.Status())
	for _, name := range slices.Sorted(maps.Keys(s.nodes)) {
		devices, err := s.Devices(name)
		fmt.Fprintf(&b, "%+v %v\n%+v\n%+v\n", devices, err, s.WantedTarget(name), s.WantedInitiator(name))
		for key, a := range s.AttachmentsAfter(name, "") {
			fmt.Fprintf(&b, "%q %+v\n", key, a)
		}
	}
	fmt.Fprintf(&b, "%+v\n%+v\n%+v\n", s.Nodes(), values(s.PoolsAfter("")), s.Drives(""))
	for _, v := range s.Volumes() {
		e, err := s.Explain(string(v.Name))
		if v.Attachment != nil {
			fmt.Fprintf(&b, "%+v\n", *v.Attachment)
			v.Attachment = nil // an address
		}
		fmt.Fprintf(&b, "%+v\n%+v %v\n", v, e, err)
	}
	capacity, err := s.Capacity(CreateVolume{Copies: 2, Stripes: 1})
	fmt.Fprintf(&b, "%+v %v\n%d %+v\n", capacity, err, s.Generation(), s.Events("", 0, 5))
	return b.String()
}

// A reader of a fork sees the state of one moment, while the state goes on. The readers here
// run beside the steps, so that the race detector sees what they share.
func TestAForkStaysAsItIs(t *testing.T) {
	t.Parallel()
	forks := 0
	for seed := range uint64(moods) {
		w := newWorld(seed)
		losesStore(w)
		var readers sync.WaitGroup
		for i := range historySteps {
			w.act()
			if i%100 != 0 {
				continue
			}
			forks++
			fork, before := w.state.Fork(), looks(w.state)
			readers.Go(func() {
				if after := looks(fork); after != before {
					t.Errorf("seed %d: a fork shows\n%s\nwant\n%s", seed, after, before)
				}
			})
			if i%500 == 0 {
				readers.Wait()
				for range 20 {
					w.act()
				}
				if after := looks(fork); after != before {
					t.Fatalf("seed %d: 20 steps later a fork shows\n%s\nwant\n%s", seed, after, before)
				}
			}
		}
		readers.Wait()
	}
	t.Logf("%d forks", forks)
}

func TestAForkIsNotStepped(t *testing.T) {
	s, _ := New(testCluster())
	defer func() {
		if recover() == nil {
			t.Error("a fork was stepped")
		}
	}()
	_, _ = s.Fork().Step(t0, Tick{})
}

// A copy goes its own way: neither it nor the state that it was made of sees what is done to the
// other.
func TestACopyGoesItsOwnWay(t *testing.T) {
	t.Parallel()
	for seed := range uint64(moods) {
		w := newWorld(seed)
		losesStore(w)
		for i := range historySteps {
			if w.act(); i%200 != 0 {
				continue
			}
			here, there := w.state, w.state.Copy()
			before := looks(here)
			if after := looks(there); after != before {
				t.Fatalf("seed %d: a copy shows\n%s\nwant\n%s", seed, after, before)
			}
			w.state = there // the history goes on with the copy
			for range 50 {
				w.act()
			}
			if after := looks(here); after != before {
				t.Fatalf("seed %d: what was done to its copy shows in a state:\n%s\nwant\n%s", seed, after, before)
			}
		}
		if w.violation != "" {
			t.Fatalf("seed %d: after its copies: %s", seed, w.violation)
		}
	}
}

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
)

// Any client that can reach the manager can make nodes join, one for each name that it
// invents. So unused nodes are bounded: those without a drive, a leg, an attachment or an
// operator's label. Forgetting one loses nothing: it joins again when its agent reports.
const (
	MaxUnusedNodes = 5000
	// unusedFor is how long an unused node must be silent before a new node may replace it.
	// It also keeps a flood of names from pushing all other events out of the history.
	unusedFor = time.Hour
	// lookAgain is how long makeRoom refuses new nodes after it found none to forget, so
	// that it does not search for each.
	lookAgain = 5 * time.Second
)

// makeRoom makes sure that a node can join: it forgets the unused node that has been silent
// longest, or refuses.
func (t *tx) makeRoom(name block.NodeName) error {
	if t.s.nodes[name] != nil || len(t.s.nodes) < MaxUnusedNodes {
		return nil
	}
	if t.now.Before(t.s.full) {
		return tooManyNodes(name)
	}
	unused := t.s.unusedNodes()
	if len(unused) < MaxUnusedNodes {
		return nil
	}
	oldest := slices.MinFunc(unused, func(a, b block.NodeName) int {
		return cmp.Or(t.s.heard(a).Compare(t.s.heard(b)), cmp.Compare(a, b))
	})
	if t.now.Sub(t.s.heard(oldest)) < unusedFor {
		t.s.full = t.now.Add(lookAgain)
		return tooManyNodes(name)
	}
	t.event(Info, EventNodeRemoved, nodeObject(oldest), "removed: it was unused, and another node joins", "node", string(oldest))
	t.forget(oldest)
	return nil
}

func tooManyNodes(name block.NodeName) error {
	e := &Error{
		Kind: ResourceExhausted, Reason: ReasonTooManyNodes, Object: nodeObject(name),
		Text: fmt.Sprintf("%s cannot join: there are already %d nodes without a drive, an attachment or an operator's label", nodeObject(name), MaxUnusedNodes),
	}
	return e.hint("remove nodes that are gone with `weft node remove`; one that has been silent for %v is removed by itself", unusedFor)
}

func (s *State) unusedNodes() (names []block.NodeName) {
	named := map[block.NodeName]bool{} // hosts that may still have a volume
	for _, v := range s.volumes {
		named[v.Holder] = true
		for _, l := range v.Lingering {
			named[l.Node] = true
		}
	}
	for name, n := range s.nodes {
		if len(s.drivesOn[name]) == 0 && len(s.onNode[name]) == 0 && len(n.OperatorLabels) == 0 && !named[name] {
			names = append(names, name)
		}
	}
	return names
}

// heard is when an agent of a node last reported; the first step of this process if none
// has since.
func (s *State) heard(name block.NodeName) time.Time {
	at := s.began
	if on := s.targets[name]; on != nil && on.status.Seen.After(at) {
		at = on.status.Seen
	}
	if on := s.initiators[name]; on != nil && on.status.Seen.After(at) {
		at = on.status.Seen
	}
	return at
}

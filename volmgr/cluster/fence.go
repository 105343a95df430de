// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"slices"

	"weft.dev/weft/proto/block"
)

// settleFence starts the lease clock of a host that was not seen to let go.
func (t *tx) settleFence(id block.VolumeID) {
	if v := t.peek(id); v.users() == "" && v.haunted() {
		t.noteFence(v)
	}
}

// fenceWaits says what keeps it from being certain that no earlier host of a
// volume, one that nobody has now, can write to it: the targets that have not
// confirmed, each with why. A host that has let go does not write; its exports may
// still be going. One that was not seen to let go is kept out by the targets alone.
//
// A leg that cannot be fenced counts as long as it might be used again without
// being made anew: when its column has a fenced one and the lease of the earlier
// host is over, the next grant evicts it (see settleGrant), and what is still
// written to it is read by nobody.
func (s *State) fenceWaits(v *Volume) []string {
	if v.open() {
		return nil
	}
	fenced := make([]bool, v.Layout.Stripes)
	for i := range v.Legs {
		if l := &v.Legs[i]; l.State == LegInSync && s.admitted(v, l) {
			fenced[l.Column] = true
		}
	}
	var waits []string
	for i := range v.Legs {
		l := &v.Legs[i]
		on := s.targets[l.Node]
		online := on != nil && on.status.Online
		switch {
		case online && on.exported[l.ID]:
			waits = append(waits, fmt.Sprintf("target %s to remove its export", l.Node))
		case !v.haunted() || l.State != LegInSync || s.admitted(v, l):
		case s.confirmedDead(l.Node):
		case fenced[l.Column] && !s.readersLeft(v) && s.leaseLeft(v, s.now) == 0:
		case !online:
			waits = append(waits, fmt.Sprintf("target %s, which is offline, to fence epochs below %d", l.Node, v.Epoch))
		default:
			waits = append(waits, fmt.Sprintf("target %s to fence epochs below %d", l.Node, v.Epoch))
		}
	}
	slices.Sort(waits)
	return slices.Compact(waits)
}

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"slices"

	"weft.dev/weft/proto/block"
)

// settleFence starts the lease clock of a detached volume whose last host has not reported
// a release.
func (t *tx) settleFence(id block.VolumeID) {
	if v := t.peek(id); v.users() == "" && v.writerMayRemain() {
		t.noteFence(v)
	}
}

// fenceWaits lists what must happen before no earlier host of a detached volume can write
// to it: each target that has not confirmed it, with the reason. A host that has released
// the volume does not write, but its exports may not be removed yet. A host that has not
// reported a release is kept out by the targets alone.
//
// A leg that cannot be fenced is waited for as long as it might be used again without a
// rebuild. Once its column has a fenced leg and the earlier host's lease is over, the next
// grant evicts it (see settleGrant), and no host reads what is still written to it.
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
		case online && on.exported.Has(l.ID):
			waits = append(waits, fmt.Sprintf("target %s to remove its export", l.Node))
		case !s.waitsForFence(v, l, fenced[l.Column]):
		case !online:
			waits = append(waits, fmt.Sprintf("target %s, which is offline, to fence epochs below %d", l.Node, v.Epoch))
		default:
			waits = append(waits, fmt.Sprintf("target %s to fence epochs below %d", l.Node, v.Epoch))
		}
	}
	slices.Sort(waits)
	return slices.Compact(waits)
}

// waitsForFence reports whether a leg of a detached volume must still be fenced. columnFenced
// says that a leg of its column is.
func (s *State) waitsForFence(v *Volume, l *Leg, columnFenced bool) bool {
	if !v.writerMayRemain() || l.State != LegInSync || s.admitted(v, l) || s.confirmedDead(l.Node) {
		return false
	}
	return !columnFenced || s.readersLeft(v) || s.leaseLeft(v, s.now) > 0
}

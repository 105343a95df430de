// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"slices"
	"strings"

	"weft.dev/weft/proto/block"
)

// A foreign drive carries a Weft label, but the store has no record of it. It may hold
// volumes of another cluster, or of this one if the store was lost or is older than the
// drive. So no hint tells how to erase it.

// carriesLabel reports whether a device carries a Weft label, readable or not.
func carriesLabel(dev Device) bool {
	return !dev.Cluster.IsZero() || slices.ContainsFunc(dev.Signatures, func(s string) bool { return strings.HasPrefix(s, "weft drive") })
}

// isNew reports whether the cluster has no drives and no volumes.
func (s *State) isNew() bool { return len(s.drives) == 0 && s.volumes.Len() == 0 }

// foreignDrive refuses a device with a Weft label, and says which cluster owns it.
func (s *State) foreignDrive(in AddDrive, dev Device, word string) *Error {
	e := refused(ReasonForeignData, fmt.Sprintf("device %s on %s", dev.Path, in.Node), "holds %s", word).with("force_erase", word)
	switch {
	case dev.Cluster.IsZero():
		return e.hint("it may be in use by a working cluster: check before you erase it; see `weft drive add --help`")
	case dev.Cluster == s.meta.ClusterID:
		return e.hint("%s", unknownHere)
	case s.isNew():
		return e.hint("%s", storeLost)
	}
	return e.hint("%s", givenBackThere)
}

// Hints about foreign drives.
const (
	storeLost      = "this manager's store is new: if it replaced a lost one, stop the manager and rebuild the lost one with `weft volmgr rebuild-from-drives`"
	unknownHere    = "unknown to this cluster's store: the drive was evicted while out of reach, or the store is from an older backup; in that case use `weft volmgr rebuild-from-drives`"
	givenBackThere = "to release it, run `weft drive evict` in that cluster"
)

// wrongDrives reports the foreign drives on online nodes, by cluster.
func (s *State) wrongDrives() (sentences []string) {
	counts, nodes := map[block.ClusterID]int{}, map[block.ClusterID][]string{}
	for _, n := range s.Nodes() {
		on := s.targets[n.Name]
		if on == nil || !on.status.Online {
			continue
		}
		for _, dev := range on.devices {
			if dev.Cluster.IsZero() || s.drives[dev.DriveID] != nil {
				continue
			}
			counts[dev.Cluster]++
			if !slices.Contains(nodes[dev.Cluster], string(n.Name)) {
				nodes[dev.Cluster] = append(nodes[dev.Cluster], string(n.Name))
			}
		}
	}
	for _, id := range sorted(counts) {
		whose, what := fmt.Sprintf("cluster %v, not to this one", id), givenBackThere
		switch {
		case id == s.meta.ClusterID:
			whose, what = "this cluster", unknownHere
		case s.isNew():
			what = storeLost
		}
		sentences = append(sentences, fmt.Sprintf("drives on %s (%d) belong to %s: %s", some(nodes[id], 8), counts[id], whose, what))
	}
	return sentences
}

// SPDX-License-Identifier: Apache-2.0

package target

import (
	"bytes"
	"fmt"
	"slices"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/target/drive"
)

// This file decides whom the agent obeys while anything is exported: only the manager of the
// cluster that owns the exported drives. Another manager on the known address, with an empty store
// say, wants no exports; obeying it would cut hosts off.

// clusterOfExports returns the cluster that the exports belong to: that of the drives with the
// exported legs or, if these are dead, that of the node's other drives. It is zero if nothing is
// exported, or if the drives cannot tell.
func (s seen) clusterOfExports(legDir string) block.ClusterID {
	if s.exports == nil {
		return block.ClusterID{}
	}
	stands, legs := false, map[block.LegID]bool{}
	for _, x := range s.exports.Subsystems {
		if !x.NQN.Ours() {
			continue
		}
		stands = true
		for _, ns := range x.Namespaces {
			if leg, ours := legOf(legDir, ns.Device); ours {
				legs[leg] = true
			}
		}
	}
	if !stands {
		return block.ClusterID{}
	}
	var exported, others []block.ClusterID
	for _, d := range s.drives {
		others = append(others, d.label.Cluster)
		if holds(d.label, legs) {
			exported = append(exported, d.label.Cluster)
		}
	}
	if id := theOne(exported); !id.IsZero() {
		return id
	}
	return theOne(others)
}

func holds(l *drive.Label, legs map[block.LegID]bool) bool {
	for _, record := range l.Legs {
		if id, err := block.ParseLegID(record.GetLegId()); err == nil && legs[id] {
			return true
		}
	}
	return false
}

// theOne returns the cluster that all agree on; zero if they disagree, or there are none.
func theOne(all []block.ClusterID) block.ClusterID {
	slices.SortFunc(all, func(a, b block.ClusterID) int { return bytes.Compare(a.UUID[:], b.UUID[:]) })
	if all = slices.Compact(all); len(all) != 1 {
		return block.ClusterID{}
	}
	return all[0]
}

// ofCluster returns w, or nothing wanted and the reason if w comes from another cluster than the
// exports.
func (w wanted) ofCluster(own block.ClusterID) (_ wanted, why string) {
	if own.IsZero() || w.cluster.IsZero() || w.cluster == own {
		return w, ""
	}
	why = fmt.Sprintf("the exports here belong to cluster %v", own)
	return wanted{
		admissions: map[block.VolumeID]block.Epoch{},
		problems:   []problem{{"cluster " + w.cluster.String(), "follow its volume manager", why}},
	}, why
}

// obeyed notes whether the manager is obeyed (why is empty), and logs once that it is not.
func (a *Agent) obeyed(other, why string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if why == "" {
		other = ""
	}
	if other != "" && a.other != other {
		a.log.Error("volume manager is not obeyed: its orders are ignored, and the exports stay as they are", "why", why, "its_cluster", other,
			"do", "start the right volume manager at this address, or correct --manager; drives can move to another cluster when nothing on them is exported")
	}
	a.other = other
}

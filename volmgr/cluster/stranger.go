// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
)

// stranger is an agent of another cluster that asks this one for orders: the address
// that it was given is wrong, or this manager stands in place of the right one.
// Nothing of what it reports is believed, and it is told nothing.
type stranger struct {
	cluster block.ClusterID
	seen    time.Time
}

// strangerKey names the agent: "target" or "initiator" of a node.
type strangerKey struct {
	node  block.NodeName
	agent string
}

const (
	// strangerFor is how long one that does not ask any more is still shown; agents
	// ask every 2 s.
	strangerFor = 15 * time.Second

	// maxStrangers bounds what names that anybody can make up take of memory.
	maxStrangers = 1000
)

// foreign reports whether an agent belongs to another cluster; one that belongs to
// none yet has a zero id.
func (s *State) foreign(cluster block.ClusterID) bool {
	return !cluster.IsZero() && cluster != s.meta.ClusterID
}

// admit lets an agent of this cluster report, which is no stranger any more.
func (t *tx) admit(node block.NodeName, agent string) error {
	delete(t.s.strangers, strangerKey{node, agent})
	return t.makeRoom(node)
}

// stranger refuses an agent of another cluster, and notes that it was there.
func (t *tx) stranger(node block.NodeName, agent string, of block.ClusterID) *Error {
	key, own := strangerKey{node, agent}, t.s.meta.ClusterID
	was, known := t.s.strangers[key]
	if known || len(t.s.strangers) < maxStrangers {
		t.s.strangers[key] = stranger{cluster: of, seen: t.now}
	}
	text := fmt.Sprintf("its %s agent belongs to cluster %v; this is %v", agent, of, own)
	if was.cluster != of {
		t.event(Trouble, EventAgentRefused, nodeObject(node), text+": it receives no instructions", "node", string(node), "agent", agent, "cluster", of.String())
	}
	return refused(ReasonOtherCluster, nodeObject(node), "%s", text).with("cluster", own.String())
}

// forgetStrangers leaves out those that ask no more.
func (t *tx) forgetStrangers() {
	maps.DeleteFunc(t.s.strangers, func(_ strangerKey, x stranger) bool { return t.now.Sub(x.seen) > strangerFor })
}

// sortedStrangers are all of them, by node and agent.
func (s *State) sortedStrangers() []strangerKey {
	return slices.SortedFunc(maps.Keys(s.strangers), func(a, b strangerKey) int {
		return cmp.Or(cmp.Compare(a.node, b.node), cmp.Compare(a.agent, b.agent))
	})
}

// refusedAgent says why an agent is refused; empty if it is not.
func (s *State) refusedAgent(key strangerKey) string {
	x, ok := s.strangers[key]
	if !ok {
		return ""
	}
	return fmt.Sprintf("belongs to cluster %v, not to this one", x.cluster)
}

// wrongStrangers says for each other cluster which agents of it are here.
func (s *State) wrongStrangers() (sentences []string) {
	agents := map[block.ClusterID][]string{}
	for _, key := range s.sortedStrangers() {
		id := s.strangers[key].cluster
		agents[id] = append(agents[id], fmt.Sprintf("%s's %s", key.node, key.agent))
	}
	for _, id := range sorted(agents) {
		sentences = append(sentences, fmt.Sprintf("agents of cluster %v ask this manager, and are refused (%s): is this manager at the right address, with the right store?",
			id, some(agents[id], 8)))
	}
	return sentences
}

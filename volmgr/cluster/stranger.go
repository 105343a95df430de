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

// stranger is an agent of another cluster that reports to this manager: it was given a wrong
// address, or this manager runs at the address of the right one. Its reports are ignored,
// and it gets no wanted state.
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
	// strangerFor is how long a stranger that has stopped asking is still shown; agents ask
	// every 2 s.
	strangerFor = 15 * time.Second

	// maxStrangers bounds the memory for names that any client can invent.
	maxStrangers = 1000
)

// foreign reports whether an agent belongs to another cluster; zero means that it belongs to
// none yet.
func (s *State) foreign(cluster block.ClusterID) bool {
	return !cluster.IsZero() && cluster != s.meta.ClusterID
}

// admit lets an agent of this cluster report: it is not a stranger any more.
func (t *tx) admit(node block.NodeName, agent string) error {
	delete(t.s.strangers, strangerKey{node, agent})
	return t.makeRoom(node)
}

// stranger refuses an agent of another cluster and remembers it for a while.
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

// forgetStrangers forgets strangers that have stopped asking.
func (t *tx) forgetStrangers() {
	maps.DeleteFunc(t.s.strangers, func(_ strangerKey, x stranger) bool { return t.now.Sub(x.seen) > strangerFor })
}

// sortedStrangers returns all strangers, by node and agent.
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

// wrongStrangers names, for each other cluster, its agents that report to this manager.
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

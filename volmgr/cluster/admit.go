// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
)

// Which agents may report. Agents of another cluster are refused, and so is a new node when
// too many nodes have no use: both are names that any client can invent, so both are bounded.

// ---- agents of another cluster ----

// foreignAgent is an agent of another cluster that reports to this manager: it was given a wrong
// address, or this manager runs at the address of the right one. Its reports are ignored,
// and it gets no wanted state.
type foreignAgent struct {
	cluster block.ClusterID
	seen    time.Time
}

// agentKey names the agent: "target" or "initiator" of a node.
type agentKey struct {
	node  block.NodeName
	agent string
}

const (
	// shownFor is how long a foreign agent that has stopped asking is still shown; agents ask
	// every 2 s.
	shownFor = 15 * time.Second

	// maxForeignAgents bounds the memory for names that any client can invent.
	maxForeignAgents = 1000
)

// foreign reports whether an agent belongs to another cluster; zero means that it belongs to
// none yet.
func (s *State) foreign(cluster block.ClusterID) bool {
	return !cluster.IsZero() && cluster != s.meta.ClusterID
}

// admit lets an agent of this cluster report: it is no longer foreign.
func (t *tx) admit(node block.NodeName, agent string) error {
	delete(t.s.foreignAgents, agentKey{node, agent})
	return t.makeRoom(node)
}

// refuseForeign refuses an agent of another cluster and remembers it for a while.
func (t *tx) refuseForeign(node block.NodeName, agent string, of block.ClusterID) *Error {
	key, own := agentKey{node, agent}, t.s.meta.ClusterID
	was, known := t.s.foreignAgents[key]
	if known || len(t.s.foreignAgents) < maxForeignAgents {
		t.s.foreignAgents[key] = foreignAgent{cluster: of, seen: t.now}
	}
	text := fmt.Sprintf("its %s agent belongs to cluster %v; this is %v", agent, of, own)
	if was.cluster != of {
		t.event(event.Trouble, event.AgentRefused, nodeObject(node), text+": it receives no instructions", "node", string(node), "agent", agent, "cluster", of.String())
	}
	return refused(ReasonOtherCluster, nodeObject(node), "%s", text).with("cluster", own.String())
}

// forgetForeignAgents forgets foreign agents that have stopped asking.
func (t *tx) forgetForeignAgents() {
	maps.DeleteFunc(t.s.foreignAgents, func(_ agentKey, x foreignAgent) bool { return t.now.Sub(x.seen) > shownFor })
}

// sortedForeignAgents returns all foreign agents, by node and agent.
func (s *State) sortedForeignAgents() []agentKey {
	return slices.SortedFunc(maps.Keys(s.foreignAgents), func(a, b agentKey) int {
		return cmp.Or(cmp.Compare(a.node, b.node), cmp.Compare(a.agent, b.agent))
	})
}

// refusedAgent says why an agent is refused; empty if it is not.
func (s *State) refusedAgent(key agentKey) string {
	x, ok := s.foreignAgents[key]
	if !ok {
		return ""
	}
	return fmt.Sprintf("belongs to cluster %v, not to this one", x.cluster)
}

// wrongAgents names, for each other cluster, its agents that report to this manager.
func (s *State) wrongAgents() (sentences []string) {
	agents := map[block.ClusterID][]string{}
	for _, key := range s.sortedForeignAgents() {
		id := s.foreignAgents[key].cluster
		agents[id] = append(agents[id], fmt.Sprintf("%s's %s", key.node, key.agent))
	}
	for _, id := range sorted(agents) {
		sentences = append(sentences, fmt.Sprintf("agents of cluster %v report to this manager and are refused (%s): check this manager's address and its store",
			id, some(agents[id], 8)))
	}
	return sentences
}

// ---- unused nodes ----

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
	t.event(event.Info, event.NodeRemoved, nodeObject(oldest), "removed: it was unused, and another node joins", "node", string(oldest))
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
	for _, v := range s.volumes.All() {
		named[v.Holder] = true
		for _, l := range v.FormerHosts {
			named[l.Node] = true
		}
	}
	for name, n := range s.nodes {
		if len(s.drivesOn[name]) == 0 && s.onNode.Get(name).Len() == 0 && len(n.OperatorLabels) == 0 && !n.Stock && !named[name] {
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

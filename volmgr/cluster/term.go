// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
)

// A term is the reign of one manager, a process that has opened the store. Agents remember
// the highest term that they have acted on, and ignore a manager of a lower term. That
// fences a manager that was replaced but still runs, and one that was started on a copy of
// the store: the records of such a manager lack what happened since.
//
// So a manager never raises its term to outrank one that agents report, except in a store
// that an operator has just put in the place of a lost one.

// A restored store begins termJump terms above its backup, and termRate more for each
// second of Unix time. No manager begins terms as often as termRate.
const (
	termJump = 1 << 20
	termRate = 1 << 8 // a second
)

// BeginTerm is the first input of a manager, before it decides anything. Result: nil.
type BeginTerm struct{}

func (BeginTerm) apply(t *tx) (view, error) {
	t.term, t.raised = t.term+1, true
	return nil, nil
}

// replacing marks the store as a replacement for a lost one and raises its term above all
// that agents can have seen. A wrong clock may leave it below, so until every agent has
// reported once, the term is raised above what they report.
func (m *meta) replacing(now time.Time, highest uint64) {
	m.Term = highest + termJump + termRate*uint64(max(0, now.Unix()))
	m.Replaces = true
}

// of returns the term's number, or 0 if it is a term of another cluster: those cannot be
// compared.
func (x Term) of(cluster block.ClusterID) uint64 {
	if x.Cluster != cluster {
		return 0
	}
	return x.Number
}

// Term is the number of the manager's term; see BeginTerm.
func (s *State) Term() uint64 { return s.meta.Term }

// acted returns the generation of this store up to which an agent has acted, given the term
// and the generation that it reports; 0 if it follows another manager.
func (t *tx) acted(on *agent, node block.NodeName, what string, highest Term, generation uint64) uint64 {
	was, term := on.term, highest.of(t.s.meta.ClusterID)
	on.term = term
	if term > t.term && t.replaces {
		t.term, t.raised = term+1, true
	}
	switch {
	case term <= t.term:
		return t.outlast(on, generation)
	case was <= t.term:
		t.event(event.Trouble, event.ManagerReplaced, nodeObject(node), fmt.Sprintf("its %s agent follows a volume manager of term %d and ignores this one, of term %d", what, term, t.term), "node", string(node))
	}
	return 0
}

// settleReplaced ends the raising of terms once every agent in the records has reported.
func (t *tx) settleReplaced() {
	if !t.replaces {
		return
	}
	for name, n := range t.s.nodes {
		if n.ConfirmedDead {
			continue
		}
		target, initiator := t.s.targets[name], t.s.initiators[name]
		if n.TargetBoot != "" && (target == nil || target.report == nil) || n.InitiatorBoot != "" && (initiator == nil || initiator.report == nil) {
			return
		}
	}
	t.replaces, t.raised = false, true
}

// wrongTerms names the nodes whose agents follow a manager of a later term.
func (s *State) wrongTerms() (wrong []string) {
	var nodes []string
	for name, on := range s.targets {
		if on.term > s.meta.Term {
			nodes = append(nodes, string(name))
		}
	}
	for name, on := range s.initiators {
		if on.term > s.meta.Term {
			nodes = append(nodes, string(name))
		}
	}
	if len(nodes) == 0 {
		return nil
	}
	slices.Sort(nodes)
	return []string{fmt.Sprintf("nodes %v follow a volume manager of a later term than this one's, %d, and ignore this one: it was replaced, or its store is a copy; stop this manager", slices.Compact(nodes), s.meta.Term)}
}

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/keys"
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
type BeginTerm struct {
	// Seed is what the master of the keys is made of, if the store has none and the cluster's level
	// has one; zero: none is made.
	Seed Seed
}

func (in BeginTerm) apply(t *tx) (view, error) {
	t.term, t.raised = t.term+1, true
	t.makeMaster(in.Seed)
	return nil, nil
}

// makeMaster makes the master of the keys, if the store has none and the level has one.
func (t *tx) makeMaster(seed Seed) {
	if t.may("s") && t.s.master.IsZero() && seed != (Seed{}) {
		t.master = keys.Make(seed)
	}
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

// ---- levels ----

// kinds are the kinds of records, with the level from which on each may be written. A new kind comes
// with a new level: managers that do not know it have no place in the quorum by then.
var kinds = map[string]block.Level{"v": 1, "n": 1, "d": 1, "p": 1, "e": 1, "m": 1, "l": 2, "t": 2, "a": 2, "i": 2, "u": 2, "s": 2, "r": 2}

// LevelKey is the key of the record of the cluster's level. A store without that record is at
// [block.FirstLevel].
const LevelKey = "l/level"

type levelRecord struct {
	Level block.Level `json:"level"`
}

// ErrLevel is the error for records of a level that a program does not know. It must not act on
// them: it would not understand some, and drop them when it writes.
var ErrLevel = errors.New("records of a later version")

// CheckLevel returns the level that records set, 0 if none does, and an error that is ErrLevel if it
// is above known. It reads level records of later versions, too.
func CheckLevel(known block.Level, records ...Record) (block.Level, error) {
	var at levelRecord
	for _, r := range records {
		if r.Key != LevelKey || r.Value == nil {
			continue
		}
		if err := json.Unmarshal(r.Value, &at); err != nil {
			return 0, fmt.Errorf("record %q: %w", r.Key, err)
		}
		if at.Level > known {
			return at.Level, fmt.Errorf("%w: the cluster is at level %d, and this program knows no level above %d; install the version that the other managers have", ErrLevel, at.Level, known)
		}
	}
	return at.Level, nil
}

// checkKinds returns an error if a record is of a kind that there is not at a level.
func checkKinds(at block.Level, records []Record) error {
	for _, r := range records {
		kind, _, _ := strings.Cut(r.Key, "/")
		if since, ok := kinds[kind]; !ok || at < since {
			return fmt.Errorf("record %q: there are none of its kind at level %d", r.Key, at)
		}
	}
	return nil
}

// may reports whether records of a kind may be written at the cluster's level.
func (t *tx) may(kind string) bool { return t.level >= kinds[kind] }

// needs refuses what needs records of a kind that the cluster's level does not have.
func (t *tx) needs(kind, what string) error {
	if t.may(kind) {
		return nil
	}
	return t.needsLevel(kinds[kind], what)
}

// Level is the cluster's level.
func (s *State) Level() block.Level { return s.level }

// RaiseLevel raises the cluster's level. Managers says which managers do not know it, one sentence
// each. Result: nil.
type RaiseLevel struct {
	To       block.Level
	Managers []string
	Seed     Seed // as in BeginTerm
}

func (in RaiseLevel) apply(t *tx) (view, error) {
	if in.To <= t.level {
		return nil, nil
	}
	blocked := slices.Clone(in.Managers)
	for _, a := range t.s.AgentLevels() {
		if why := a.Blocks(in.To); why != "" {
			blocked = append(blocked, fmt.Sprintf("node %s: its %s agent %s", a.Node, a.Kind, why))
		}
	}
	if len(blocked) > 0 {
		return nil, &Error{Kind: FailedPrecondition, Reason: ReasonOldParts, Text: fmt.Sprintf("level %d: %s", in.To, strings.Join(shorted(blocked), "; ")),
			Hint: "`weft upgrade status` lists what has to be upgraded first"}
	}
	t.raise(in.To, "the upgrade is finished", in.Seed)
	return nil, nil
}

// raise raises the level. What agents have said that only this level records is recorded.
func (t *tx) raise(to block.Level, why string, seed Seed) {
	t.event(event.Info, event.LevelRaised, "cluster", fmt.Sprintf("%s: level %d instead of %d", why, to, t.level))
	t.level = to
	t.makeMaster(seed)
	for _, name := range slices.Sorted(maps.Keys(t.s.targets)) {
		if r := t.s.targets[name].report; r != nil {
			t.targetProves(r)
			t.processAt(r)
		}
	}
	t.s.fields = nil // targets may be able to serve more
	for _, name := range slices.Sorted(maps.Keys(t.s.initiators)) {
		if r := t.s.initiators[name].report; r != nil {
			t.initiatorProves(r)
		}
	}
}

// targetProves records whether a target can demand that hosts prove their identity.
func (t *tx) targetProves(r *TargetReport) {
	if n := t.nodes.peek(r.Node); t.may("s") && n != nil && r.Authenticates.changes(n.TargetAuthenticates) {
		t.node(r.Node).TargetAuthenticates = !n.TargetAuthenticates
	}
}

// initiatorProves records whether a host can prove its identity.
func (t *tx) initiatorProves(r *InitiatorReport) {
	if n := t.nodes.peek(r.Node); t.may("s") && n != nil && n.InitiatorAuthenticates != r.Authenticates {
		t.node(r.Node).InitiatorAuthenticates = r.Authenticates
	}
}

// shorted returns the first of many sentences, and how many more there are.
func shorted(sentences []string) []string {
	const most = 5
	if more := len(sentences) - most; more > 1 {
		return append(slices.Clone(sentences[:most]), fmt.Sprintf("and %d more", more))
	}
	return sentences
}

// AgentLevel says which level an agent knows.
type AgentLevel struct {
	Node      block.NodeName
	Kind      string // "target" or "initiator"
	Version   string
	Level     block.Level // 0: it has not reported since this manager leads
	Online    bool
	HandsOver bool // see AgentStatus
}

// Blocks says why a level cannot be begun because of an agent; empty if it can.
func (a AgentLevel) Blocks(to block.Level) string {
	switch {
	case a.Level == 0:
		return "has not reported to this manager: start it, or remove the node"
	case a.Level < to:
		return fmt.Sprintf("knows level %d: upgrade it", a.Level)
	case !a.Online:
		return "is offline: start it, or remove the node"
	}
	return ""
}

// AgentLevels returns the levels that the agents in the records know, by node.
func (s *State) AgentLevels() (all []AgentLevel) {
	for _, n := range s.Nodes() {
		for _, a := range []struct {
			kind, boot string
			AgentStatus
		}{{"target", n.TargetBoot, n.Target}, {"initiator", n.InitiatorBoot, n.Initiator}} {
			if a.boot != "" || a.Known {
				all = append(all, AgentLevel{n.Name, a.kind, a.Version, a.Level, a.Online, a.HandsOver})
			}
		}
	}
	return all
}

// NoteBackup says that a backup of the store was made and sent whole. No result.
type NoteBackup struct{ Size block.Size }

func (in NoteBackup) apply(t *tx) (view, error) {
	t.backedUp = t.now.UTC()
	t.event(event.Info, event.StoreBackedUp, "cluster", fmt.Sprintf("a backup of %s was made", in.Size.Short()))
	return nil, nil
}

// BackedUp is when the last backup of the store was made; zero: none was.
func (s *State) BackedUp() time.Time { return s.meta.BackedUp }

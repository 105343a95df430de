// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/trust"
)

// labels returns the labels that placement sees: the operator's over the agents', and
// "node", which is always the node's name.
func (n *Node) labels() map[string]string {
	all := maps.Clone(n.AgentLabels)
	if all == nil {
		all = map[string]string{}
	}
	maps.Copy(all, n.OperatorLabels)
	all["node"] = string(n.Name)
	return all
}

// label is labels()[key].
func (n *Node) label(key string) string {
	if key == "node" {
		return string(n.Name)
	}
	if value, ok := n.OperatorLabels[key]; ok {
		return value
	}
	return n.AgentLabels[key]
}

func nodeObject(name block.NodeName) string { return "node " + string(name) }

func nodeResult(name block.NodeName) view {
	return func(s *State) any { return s.nodeView(s.nodes[name]) }
}

// SetNodeLabels replaces the labels that an operator gave a node. Result: Node.
type SetNodeLabels struct {
	Node   block.NodeName
	Labels map[string]string
}

func (in SetNodeLabels) apply(t *tx) (view, error) {
	n := t.s.nodes[in.Node]
	if n == nil {
		return nil, notFound(nodeObject(in.Node))
	}
	if err := checkLabels("labels", in.Labels); err != nil {
		return nil, err
	}
	if _, ok := in.Labels["node"]; ok {
		return nil, invalid("labels", "key %q cannot be set", "node")
	}
	if !maps.Equal(n.OperatorLabels, in.Labels) {
		t.node(in.Node).OperatorLabels = maps.Clone(in.Labels)
	}
	return nodeResult(in.Node), nil
}

// ConfirmNodeDead records that a machine is off, so that nothing waits for it any more.
// Refused while an agent of it is online. Result: Node.
type ConfirmNodeDead struct{ Node block.NodeName }

func (in ConfirmNodeDead) apply(t *tx) (view, error) {
	n := t.s.nodes[in.Node]
	if n == nil {
		return nil, notFound(nodeObject(in.Node))
	}
	if t.s.targetOnline(in.Node) || t.s.initiatorOnline(in.Node) {
		return nil, refused(ReasonNodeOnline, nodeObject(in.Node), "its agent is online").
			hint("switch the machine off first: its later writes would be lost")
	}
	if n.ConfirmedDead {
		return nodeResult(in.Node), nil
	}
	t.node(in.Node).ConfirmedDead = true
	t.event(event.Warning, event.NodeConfirmed, nodeObject(in.Node), "an operator has confirmed that it is off: nothing waits for it any more", "node", string(in.Node))
	t.settleNode(in.Node)
	for id := range t.s.unsettled { // grants that wait for the lease of this node, their previous holder
		if t.s.volumes.Get(id).Holder == in.Node {
			t.unsure[id] = true
		}
	}
	return nodeResult(in.Node), nil
}

// RemoveNode forgets a node that is offline and has no legs or attachments, and revokes its
// certificates. Result: nil.
type RemoveNode struct{ Node block.NodeName }

func (in RemoveNode) apply(t *tx) (view, error) {
	if t.s.nodes[in.Node] == nil {
		return nil, nil
	}
	if t.s.targetOnline(in.Node) || t.s.initiatorOnline(in.Node) {
		return nil, refused(ReasonNodeOnline, nodeObject(in.Node), "its agent is online and would join again").hint("stop Weft's agents on %s first", in.Node)
	}
	var users []string
	for _, id := range sortedIDs(t.s.onNode.Get(in.Node).Keys()) {
		if v := t.s.volumes.Get(id); v.State != VolumeDeleting && v.uses(in.Node) {
			users = append(users, string(v.Name))
		}
	}
	if len(users) > 0 {
		return nil, refused(ReasonNodeInUse, nodeObject(in.Node), "has legs or attachments of %s", some(users, 8)).
			hint("delete or detach them first")
	}
	for _, d := range t.s.recordedDrives(in.Node) {
		t.drives.drop(d.ID)
	}
	t.event(event.Warning, event.NodeRemoved, nodeObject(in.Node), "removed, with its drives", "node", string(in.Node))
	t.revoke(trust.Subject{Name: string(in.Node)})
	t.forget(in.Node)
	t.settleNode(in.Node)
	return nil, nil
}

func (t *tx) forget(name block.NodeName) {
	t.nodes.drop(name)
	t.s.fields = nil
	delete(t.s.targets, name)
	delete(t.s.stopping, name)
	delete(t.s.initiators, name)
}

// some joins the first n names and counts the rest.
func some(names []string, n int) string {
	if len(names) <= n {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:n], ", "), len(names)-n)
}

// join records what both kinds of agents report of their node.
func (t *tx) join(name block.NodeName, labels map[string]string) {
	n := t.s.nodes[name]
	if n == nil {
		t.event(event.Info, event.NodeJoined, nodeObject(name), "its first agent reported", "node", string(name))
	}
	if n == nil || n.ConfirmedDead {
		t.node(name).ConfirmedDead = false
	}
	if len(labels) > 0 && !maps.Equal(t.nodes.peek(name).AgentLabels, labels) {
		t.node(name).AgentLabels = maps.Clone(labels)
	}
}

// target returns what a node's target has said, for a change that forks do not see; nil if
// there is none.
func (t *tx) target(name block.NodeName) *target {
	on := t.s.targets[name]
	if on != nil && on.by != t.s.by {
		c := *on
		c.by, on = t.s.by, &c
		t.s.targets[name] = on
	}
	return on
}

// initiator is target for initiators.
func (t *tx) initiator(name block.NodeName) *initiator {
	on := t.s.initiators[name]
	if on != nil && on.by != t.s.by {
		c := *on
		c.by, on = t.s.by, &c
		t.s.initiators[name] = on
	}
	return on
}

// heard notes a report on a stream. It returns false if the agent has already reported on a
// newer one.
func (a *agent) heard(session uint64) bool {
	if session < a.session {
		return false
	}
	a.session, a.open = session, true
	return true
}

// TargetReported carries a report that came on a stream. Every stream that is opened gets
// a higher Session, so reports of an older stream are ignored after a newer one has
// reported, and so is its end. Result: nil, or the *Error that refuses an agent of another
// cluster.
type TargetReported struct {
	Session uint64
	Report  TargetReport
	Change  Change
}

func (in TargetReported) apply(t *tx) (view, error) {
	r := &in.Report
	if err := checkAgent(r.Node, r.BootID); err != nil {
		return nil, err
	}
	on := t.target(r.Node)
	if in.Change.Partial && (on == nil || on.report == nil || on.session != in.Session) {
		return nil, noReport(r.Node)
	}
	// A node that exports nothing may join with drives of another cluster: they are left
	// alone, and can be added by force.
	if t.s.foreign(r.ClusterID) && (len(r.Exports) > 0 || in.Change.Partial && on.exports.Len() > 0) {
		return refusal(t.refuseForeign(r.Node, "target", r.ClusterID)), nil
	}
	if err := t.admit(r.Node, "target"); err != nil {
		return nil, err
	}
	if on == nil {
		on = &target{by: t.s.by}
		t.s.targets[r.Node] = on
	}
	if !on.heard(in.Session) {
		return nil, nil
	}
	if on.observe(r, &in.Change) {
		t.changed[r.Node] = true
	}
	t.targetSays(on, r)
	return nil, nil
}

// TargetRepeated: the target's last report on this session still holds, and the target has
// acted on Generation; 0: no newer one. Result: nil.
type TargetRepeated struct {
	Session    uint64
	Node       block.NodeName
	Generation uint64
}

func (in TargetRepeated) apply(t *tx) (view, error) {
	on := t.target(in.Node)
	if on == nil || on.report == nil || on.session < in.Session {
		return nil, noReport(in.Node)
	}
	if on.heard(in.Session) {
		r := *on.report
		r.Generation = cmp.Or(in.Generation, r.Generation)
		t.targetSays(on, &r)
	}
	return nil, nil
}

// noReport refuses the repeat of a report that this manager does not have, because the node
// was removed. The agent then opens a new stream and reports in full.
func noReport(node block.NodeName) error {
	return refused(ReasonNoReport, nodeObject(node), "its agent is unknown until it reports in full")
}

// targetSays acts on a target's report, of which on has the lists already.
func (t *tx) targetSays(on *target, r *TargetReport) {
	r.Generation = t.acted(&on.agent, r.Node, "target", r.Highest, r.Generation)
	t.join(r.Node, r.Labels)
	if !on.status.Online {
		t.changed[r.Node] = true
	}
	t.targetSeen(on, r)
	if !slices.Equal(t.nodes.peek(r.Node).Portals, r.Portals) {
		t.node(r.Node).Portals = slices.Clone(r.Portals)
	}
	t.processAt(r)
	t.targetProves(r)
	t.refused(on, r)
	boot := t.nodes.peek(r.Node).TargetBoot
	if boot != r.BootID {
		t.node(r.Node).TargetBoot = r.BootID
		if boot != "" {
			t.event(event.Warning, event.NodeRebooted, nodeObject(r.Node), "its target rebooted", "node", string(r.Node), "boot_id", r.BootID)
			t.targetRebooted(r.Node)
			t.resetFailures(r.Node)
		}
	}
	t.drivesReturned(r.Node, on, boot != r.BootID)
	t.cachesReported(r.Node, on, boot != r.BootID)
	t.drivesReported(r.Node, on)
	t.spaceReported(r)
	t.drivesJudged(r.Node, on)
	t.takeIn(r.Node, on)
	t.settleReplaced()
	t.kernelRefuses(r.Node, on)
	t.settleNode(r.Node)
	t.settleDrives(r.Node)
}

// maxBootID is longer than any boot id of the kernel, or of agents in user space.
const maxBootID = 256

// refusal is the result of an input that is refused but leaves something to record.
func refusal(e *Error) view { return func(*State) any { return e } }

func checkAgent(name block.NodeName, boot string) error {
	if _, err := block.ParseNodeName(string(name)); err != nil {
		return invalid("node", "%v", err)
	}
	if boot == "" {
		return invalid("boot_id", "missing")
	}
	if len(boot) > maxBootID {
		return invalid("boot_id", "%d bytes; at most %d are allowed", len(boot), maxBootID)
	}
	return nil
}

// targetSeen notes what a target's newest report says beside its lists.
func (t *tx) targetSeen(on *target, r *TargetReport) {
	if on.report == nil || on.report.Integrity != r.Integrity || on.report.Thin != r.Thin || on.report.PlainSnapshots != r.PlainSnapshots ||
		len(on.report.ProcessPortals) > 0 != (len(r.ProcessPortals) > 0) {
		t.s.fields = nil
	}
	if !on.status.Online {
		t.s.fields = nil
		t.backFromMaintenance(r.Node, on)
	}
	// After a restart of the manager every agent reports for the first time: no event.
	if !on.status.Online && (!on.status.Seen.IsZero() || t.nodes.peek(r.Node).TargetBoot == "") {
		t.event(event.Info, event.TargetOnline, nodeObject(r.Node), "its target agent reports", "node", string(r.Node))
	}
	on.status = AgentStatus{
		Known: true, Online: true, BootID: r.BootID, Seen: t.now, Version: r.Version, Level: max(r.Level, block.FirstLevel),
		Kernel: r.Kernel, Generation: r.Generation, Problems: r.Problems, HandsOver: r.HandsOver,
	}
	head := *r
	head.Drives, head.Legs, head.Admissions, head.Exports = nil, nil, nil, nil
	on.report, on.devices = &head, r.Devices
	t.stopSaid(r)
	t.s.compare(on)
}

// InitiatorReported carries a report that came on a stream; Session and Result as
// in TargetReported.
type InitiatorReported struct {
	Session uint64
	Report  InitiatorReport
}

func (in InitiatorReported) apply(t *tx) (view, error) {
	r := &in.Report
	if err := checkAgent(r.Node, r.BootID); err != nil {
		return nil, err
	}
	if _, err := block.ParseNQN(string(r.Host.NQN)); err != nil {
		return nil, invalid("host", "%v", err)
	}
	if len(r.Heals) > maxBootID {
		return nil, invalid("healer_id", "%d bytes; at most %d are allowed", len(r.Heals), maxBootID)
	}
	if t.s.foreign(r.ClusterID) {
		return refusal(t.refuseForeign(r.Node, "initiator", r.ClusterID)), nil
	}
	if err := t.admit(r.Node, "initiator"); err != nil {
		return nil, err
	}
	on := t.initiator(r.Node)
	if on == nil {
		on = &initiator{}
		t.s.initiators[r.Node] = on
	}
	if !on.heard(in.Session) {
		return nil, nil
	}
	t.initiatorSays(on, r)
	return nil, nil
}

// InitiatorRepeated is TargetRepeated for initiators. Result: nil.
type InitiatorRepeated struct {
	Session    uint64
	Node       block.NodeName
	Generation uint64
}

func (in InitiatorRepeated) apply(t *tx) (view, error) {
	on := t.initiator(in.Node)
	if on == nil || on.report == nil || on.session < in.Session {
		return nil, noReport(in.Node)
	}
	if on.heard(in.Session) {
		r := *on.report
		r.Generation = cmp.Or(in.Generation, r.Generation)
		t.initiatorSays(on, &r)
	}
	return nil, nil
}

// initiatorSays acts on a host's report, new or repeated.
func (t *tx) initiatorSays(on *initiator, r *InitiatorReport) {
	r.Generation = t.acted(&on.agent, r.Node, "initiator", r.Highest, r.Generation)
	on.report = r
	t.join(r.Node, r.Labels)
	t.initiatorSeen(on, r)
	t.initiatorProves(r)
	t.hostSeen(r)
	t.settleReplaced()
	t.settleNode(r.Node)
	for _, e := range r.Evidence {
		if v := t.peek(e.Volume); v != nil && v.Restored {
			t.unsure[e.Volume] = true
		}
	}
	for _, a := range r.Attachments {
		if (a.Phase == PhaseDetachedClean || a.GaveUp.Why != "") && t.peek(a.Volume) != nil {
			t.unsure[a.Volume] = true // the host may have released it without a Detach
		}
		if v := t.peek(a.Volume); v != nil && v.Heals.lacks(a.Heals) {
			t.unsure[a.Volume] = true
		}
	}
}

// hostSeen acts on a new boot or identity of a host. A grant is bound to both.
func (t *tx) hostSeen(r *InitiatorReport) {
	old := *t.nodes.peek(r.Node)
	if old.Host == r.Host && old.InitiatorBoot == r.BootID {
		return
	}
	n := t.node(r.Node)
	n.Host, n.InitiatorBoot, n.Stock = r.Host, r.BootID, false
	if old.InitiatorBoot != "" && old.InitiatorBoot != r.BootID {
		t.event(event.Warning, event.NodeRebooted, nodeObject(r.Node), "its initiator rebooted", "node", string(r.Node), "boot_id", r.BootID)
	}
	t.hostChanged(n)
}

func (t *tx) initiatorSeen(on *initiator, r *InitiatorReport) {
	if !on.status.Online && (!on.status.Seen.IsZero() || t.nodes.peek(r.Node).InitiatorBoot == "") {
		t.event(event.Info, event.InitiatorOnline, nodeObject(r.Node), "its initiator agent reports", "node", string(r.Node))
	}
	on.status = AgentStatus{
		Known: true, Online: true, BootID: r.BootID, Seen: t.now, Version: r.Version, Level: max(r.Level, block.FirstLevel),
		Kernel: r.Kernel, Generation: r.Generation, Problems: r.Problems, Freezes: r.Freezes, SeveralPaths: r.SeveralPaths,
	}
	on.attachments = map[block.VolumeID]AttachmentReport{}
	for _, a := range r.Attachments {
		// A host may still be releasing an older epoch while it builds the next.
		if old, ok := on.attachments[a.Volume]; !ok || old.Epoch < a.Epoch {
			on.attachments[a.Volume] = a
		}
	}
}

// TargetLost: the stream closed. Result: nil.
type TargetLost struct {
	Session uint64
	Node    block.NodeName
}

func (in TargetLost) apply(t *tx) (view, error) {
	if on := t.target(in.Node); on != nil && on.session == in.Session {
		on.open = false
		t.targetSilent(in.Node, on, "its stream closed")
	}
	return nil, nil
}

// InitiatorLost: the stream closed. Result: nil.
type InitiatorLost struct {
	Session uint64
	Node    block.NodeName
}

func (in InitiatorLost) apply(t *tx) (view, error) {
	if on := t.initiator(in.Node); on != nil && on.session == in.Session {
		on.open = false
		t.initiatorSilent(in.Node, on, "its stream closed")
	}
	return nil, nil
}

func (t *tx) targetSilent(name block.NodeName, on *target, why string) {
	if on.status.Online {
		on.status.Online = false
		t.s.fields = nil
		t.stopEnded(name)
		t.changed[name] = true
		t.event(event.Warning, event.TargetOffline, nodeObject(name), why, "node", string(name))
		t.resetFailures(name)
	}
}

func (t *tx) initiatorSilent(name block.NodeName, on *initiator, why string) {
	if on.status.Online {
		on.status.Online = false
		t.event(event.Warning, event.InitiatorOffline, nodeObject(name), why, "node", string(name))
	}
}

// Tick lets time pass: agents go offline, leases run out. Once a second is enough.
// Result: nil.
type Tick struct{}

// Tick marks silent agents as offline and lets leases run out.
func (Tick) apply(t *tx) (view, error) {
	for _, name := range slices.Sorted(maps.Keys(t.s.targets)) {
		if on := &t.s.targets[name].status; on.Online && t.now.Sub(on.Seen) > OnlineWithin {
			t.targetSilent(name, t.target(name), silence(t.now, on.Seen))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(t.s.initiators)) {
		if on := &t.s.initiators[name].status; on.Online && t.now.Sub(on.Seen) > OnlineWithin {
			t.initiatorSilent(name, t.initiator(name), silence(t.now, on.Seen))
		}
	}
	for id := range t.s.unsettled {
		t.unsure[id] = true
	}
	t.noteAway()
	t.evacuateDrives()
	t.noteFull()
	t.noteCopies()
	t.settleMaintenance()
	t.settleSchedules()
	t.settleRebalances()
	t.beginHealings()
	t.settleTrust()
	t.forgetForeignAgents()
	return nil, nil
}

func silence(now, seen time.Time) string {
	return fmt.Sprintf("no report for %v", now.Sub(seen).Round(time.Second))
}

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"cmp"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/cow"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/image"
	"weft.dev/weft/volmgr/labelset"
)

// Nodes lists the nodes by name, including nodes that are known only by a refused agent.
func (s *State) Nodes() []Node { return values(s.NodesAfter("")) }

// Node returns one node; the error is NotFound.
func (s *State) Node(name block.NodeName) (Node, error) {
	n := s.nodes[name]
	if n == nil {
		return Node{}, notFound(nodeObject(name))
	}
	return s.nodeView(n), nil
}

func (s *State) nodeView(n *Node) Node {
	v := *n
	v.Labels = labelset.Shown(n.labels())
	if t := s.targets[n.Name]; t != nil {
		v.Target = s.agentView(t.status)
	}
	if i := s.initiators[n.Name]; i != nil {
		v.Initiator = s.agentView(i.status)
	}
	// Also one that has not reported to this manager, which leads since a moment ago.
	v.Target.Known = v.Target.Known || n.TargetBoot != ""
	v.Initiator.Known = v.Initiator.Known || n.InitiatorBoot != ""
	v.StopWaits, v.StopsIO = s.stopWaits(n)
	v.Target.Problems, v.Initiator.Problems = s.named(n.Name, v.Target.Problems), s.named(n.Name, v.Initiator.Problems)
	v.Target.Refused = s.refusedAgent(agentKey{n.Name, "target"})
	v.Initiator.Refused = s.refusedAgent(agentKey{n.Name, "initiator"})
	return v
}

// named returns an agent's problems with the names that people know their objects by. An
// object without a record keeps its id.
func (s *State) named(node block.NodeName, problems []Problem) []Problem {
	problems = slices.Clone(problems)
	for i := range problems {
		if name := s.objectName(node, problems[i].Object); name != "" {
			problems[i].Object = name
		}
	}
	return problems
}

// objectName is the name of a drive, leg, export or attachment that an agent knows by an id.
func (s *State) objectName(node block.NodeName, object string) string {
	kind, id, _ := strings.Cut(object, " ")
	if kind == "drive" {
		if d, err := block.ParseDriveID(id); err == nil && s.drives[d] != nil {
			return s.drives[d].object()
		}
		return ""
	}
	for _, volume := range s.volumesOn(node) {
		v := s.volumes.Get(volume)
		switch kind {
		case "leg":
			if leg, err := block.ParseLegID(id); err == nil && v.leg(leg) != nil {
				return fmt.Sprintf("%v of %s", v.leg(leg), v.object())
			}
		case "attachment":
			if id == volume.String() {
				return v.object()
			}
		case "paths":
			if id == volume.String() {
				return "paths of " + v.object()
			}
		case "export":
			if strings.Contains(id, volume.String()) {
				return "export of " + v.object()
			}
		}
	}
	return ""
}

func (s *State) agentView(a AgentStatus) AgentStatus {
	if a.Known && !a.Online {
		a.Silent = s.now.Sub(a.Seen)
	}
	return a
}

// Devices lists what a node's inventory found at its last report.
func (s *State) Devices(name block.NodeName) ([]Device, error) {
	if s.nodes[name] == nil {
		return nil, notFound(nodeObject(name))
	}
	t := s.targets[name]
	if t == nil || !t.status.Online {
		return nil, refused(ReasonNodeOffline, nodeObject(name), "its target agent is offline, so its devices are unknown").
			hint("start `weft target` on %s, or look at `weft node list`", name)
	}
	return slices.Clone(t.devices), nil
}

// Drives lists the drives of a node, or all if node is empty, by node and device.
func (s *State) Drives(node block.NodeName) []Drive { return values(s.DrivesAfter(node, "")) }

// recordedDrives returns the records of a node's drives, by device.
func (s *State) recordedDrives(node block.NodeName) []*Drive {
	var all []*Drive
	for id := range s.drivesOn[node] {
		all = append(all, s.drives[id])
	}
	slices.SortFunc(all, func(a, b *Drive) int {
		return cmp.Or(cmp.Compare(a.Device, b.Device), bytes.Compare(a.ID.UUID[:], b.ID.UUID[:]))
	})
	return all
}

// driveView is a drive as readers see it. A ready drive whose target is offline is shown as
// offline, since it may have failed meanwhile.
func (s *State) driveView(d *Drive) Drive {
	v := *d
	if v.State == DriveReady && d.Suspect() != "" {
		v.State, v.Reason = DriveSuspect, d.Suspect()
	}
	if d.State == DriveReady && !s.targetOnline(v.Node) {
		v.State, v.Reason = DriveOffline, "its target is offline"
	}
	v.Health = s.readingOf(d)
	v.Labels = labelset.Shown(d.Labels)
	v.Reason = strings.Join(slices.DeleteFunc([]string{v.Reason, d.Leaving.words(), s.evacuationWords(d)}, func(w string) bool { return w == "" }), "; ")
	v.Capacity = block.Size(d.Extents) * block.ExtentSize
	granted := image.Count(d.spaceTaken())
	v.Allocated = block.Size(s.used.Get(d.ID)+granted) * block.ExtentSize
	v.Thin = block.Size(granted) * block.ExtentSize
	v.ThinUsed = v.Thin - min(v.Thin, block.Size(s.reserve(d))*block.ExtentSize)
	v.Promised = block.Size(s.promised.Get(d.ID)) * block.ExtentSize
	return v
}

func (s *State) poolView(p *Pool) Pool {
	v := *p
	v.Selector = labelset.Shown(p.Selector)
	if p.Rebalance != nil {
		r := *p.Rebalance
		r.Moving = len(s.rebalanced(p, s.volumes.Get))
		v.Rebalance = &r
	}
	for _, d := range s.drives {
		if d.State != DriveRemoving && p.selects(d, s.nodes[d.Node]) {
			d := s.driveView(d)
			v.Drives++
			v.Capacity += d.Capacity
			v.Allocated += d.Allocated
			v.Promised += d.Promised
		}
	}
	return v
}

// Volumes lists the volumes by name, without snapshots.
func (s *State) Volumes() []Volume { return values(s.VolumesAfter("")) }

// Volume returns one volume by name or id; the error is NotFound.
func (s *State) Volume(nameOrID string) (Volume, error) {
	v, err := s.find(nameOrID)
	if err != nil {
		return Volume{}, err
	}
	return s.volumeView(v), nil
}

func (s *State) find(nameOrID string) (*Volume, error) {
	if id, ok := s.byName.Find(nameOrID); ok {
		return s.volumes.Get(id), nil
	}
	if id, err := block.ParseVolumeID(nameOrID); err == nil && s.volumes.Get(id) != nil {
		return s.volumes.Get(id), nil
	}
	return nil, notFound("volume " + nameOrID)
}

func (s *State) volumeView(v *Volume) Volume {
	view := *v
	view.Labels = labelset.Shown(v.Labels)
	view.Legs = slices.Clone(v.Legs)
	view.Health, view.Scrub = s.health(v), s.scrubView(v)
	view.CopiesLeft, view.Flatten = s.copiesLeft(v), s.flattenView(v)
	if s.unheard {
		view.Health = ""
	}
	view.Rebuilds = s.rebuildViews(v)
	view.FenceWaitsFor = s.fenceWaits(v)
	if v.Attachment != nil {
		a := s.attachmentView(v, v.Attachment)
		view.Attachment = &a
	}
	if v.Heal != nil {
		a := s.attachmentView(v, v.Heal)
		view.Heal = &a
	}
	view.Shared, view.FormerHosts = slices.Clone(v.Shared), slices.Clone(v.FormerHosts)
	for i := range view.Shared {
		view.Shared[i] = s.attachmentView(v, &v.Shared[i])
	}
	for i := range view.Legs {
		l := &view.Legs[i]
		if on := s.targets[l.Node]; on != nil && (l.mapped() || l.Based) {
			r := on.legs.Get(l.ID)
			l.Used, l.Full, l.Space = r.Used, r.Full, r.Space
		}
		l.Reason = s.legReason(v, l)
	}
	return view
}

// legReason says why a leg is as it is.
func (s *State) legReason(v *Volume, l *Leg) string {
	switch {
	case l.State == LegCreating || l.State == LegDeleting:
		return s.legWaitsFor(l)
	case l.Suspect:
		return fmt.Sprintf("suspect: %s; waits for %s", l.loss(), s.suspectWaitsFor(v, l))
	case l.State == LegStale && l.member():
		why := s.rebuildWaitsFor(v, l)
		switch {
		case l.Copying != nil:
			return l.Reason + ": " + why
		case why != "":
			return l.Reason + "; rebuild waits for " + why
		}
		return l.Reason
	case l.Full:
		return l.whatWaits() + ": its drive is full"
	}
	return cmp.Or(l.Reason, s.baseWaitsFor(v, l))
}

// health sums up the legs. A leg counts only while it is servable.
func (s *State) health(v *Volume) Health {
	if v.State != VolumeReady {
		return ""
	}
	worst := slices.Max(s.conditions(v))
	switch {
	case worst == block.Lost:
		return Unavailable
	case worst == block.Whole: // also while a copy is moved
		return Healthy
	case slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.State == LegRebuilding }):
		return Rebuilding
	}
	return Degraded
}

// copiesLeft is how many copies the column with fewest has that can be served. A column of a code
// counts as one copy more than the losses that it survives.
func (s *State) copiesLeft(v *Volume) int {
	g, least, serving := v.Layout.Group(), v.Layout.Group().Members, s.serving(v)
	for c, good := range s.sound(v) {
		if !g.Readable(good) { // what is left is in damaged trees
			good = serving[c]
		}
		least = min(least, good.Len()-g.Needs+1)
	}
	return max(0, least)
}

// servable reports whether a leg's target is online, its drive is ready, and the target
// reports no error of the leg.
func (s *State) servable(l *Leg) bool {
	d, on := s.drives[l.Drive], s.targets[l.Node]
	if !s.targetOnline(l.Node) || d == nil || d.State != DriveReady || s.legError(l) != "" {
		return false
	}
	r, seen := on.drives[l.Drive] // newer than d.State while a report is being processed
	return seen && r.Error == ""
}

// legError is the error that the target reports of a leg; empty if there is none.
func (s *State) legError(l *Leg) string {
	if t := s.targets[l.Node]; t != nil {
		return t.legs.Get(l.ID).Error
	}
	return ""
}

func (s *State) targetOnline(name block.NodeName) bool {
	t := s.targets[name]
	return t != nil && t.status.Online
}

func (s *State) initiatorOnline(name block.NodeName) bool {
	i := s.initiators[name]
	return i != nil && i.status.Online
}

func (s *State) attachmentView(v *Volume, of *Attachment) Attachment {
	a := *of
	a.VolumeID, a.VolumeName = v.ID, v.Name
	if r, ok := s.attachmentReport(v, of); ok {
		a.Device, a.Number, a.Size, a.ResyncDone, a.ResyncTotal = r.Device, r.Number, r.Size, r.ResyncDone, r.ResyncTotal
	}
	a.WaitingFor = strings.Join(s.attachmentWaits(v, of), "; ")
	a.AuthenticatesWith = s.authenticatesWith(v, of)
	for _, d := range s.discovered(v) {
		a.StockNQN = d.NQN
	}
	return a
}

// attachmentReport returns the host's newest report on the current grant of an attachment.
func (s *State) attachmentReport(v *Volume, a *Attachment) (AttachmentReport, bool) {
	i := s.initiators[a.Node]
	if i == nil || i.status.BootID != a.BootID || i.status.Generation < a.JoinedAt {
		return AttachmentReport{}, false
	}
	r, ok := i.attachments[v.ID]
	return r, ok && r.Epoch == a.Epoch && r.Grant == a.Grant
}

// maxWrong is the number of sentences of a Status that fit on a screen.
const maxWrong = 40

// Status summarizes the cluster. What cannot be served comes first, and then causes before what
// they lead to: nodes, drives, volumes that lack a copy.
func (s *State) Status() Status {
	st := Status{ClusterID: s.meta.ClusterID, Generation: s.meta.Generation, Nodes: len(s.nodes), Drives: len(s.drives), Volumes: s.volumes.Len() - s.allSnapshots}
	var drives, degraded []string
	for _, d := range s.Drives("") {
		st.Capacity += d.Capacity
		st.Allocated += d.Allocated
		if d.State != DriveReady && d.State != DriveSuspect { // a suspect one is in use
			st.DrivesNotReady++
		}
		if d.State != DriveReady && d.State != DriveOffline { // offline: its node's sentence says so
			drives = append(drives, fmt.Sprintf("drive %s (%s on %s) is %s%s", d.ID, d.Device, d.Node, strings.ToLower(string(d.State)), because(d.Reason)))
		}
	}
	nodes, awaited := s.wrongNodes()
	st.NodesOffline = len(nodes)
	for _, v := range s.Volumes() {
		st.Attachments += len(v.attachments())
		switch v.Health {
		case Unavailable:
			st.VolumesUnavailable++
			st.Wrong = append(st.Wrong, fmt.Sprintf("volume %s cannot be served: see `weft explain volume %s`", v.Name, v.Name))
		case Degraded, Rebuilding:
			st.VolumesDegraded++
			degraded = append(degraded, fmt.Sprintf("volume %s is %s: see `weft explain volume %s`", v.Name, strings.ToLower(string(v.Health)), v.Name))
		}
		for _, wait := range s.waits(&v) {
			degraded = append(degraded, fmt.Sprintf("volume %s waits for %s", v.Name, wait))
		}
	}
	degraded = append(degraded, s.wrongSnapshots()...)
	st.Wrong = slices.Concat(awaited, st.Wrong, s.wrongTerms(), s.wrongAgents(), s.wrongDrives(), nodes, drives, s.wrongCopies(), degraded, s.unknown())
	if extra := len(st.Wrong) - maxWrong; extra > 0 {
		st.Wrong = append(st.Wrong[:maxWrong], fmt.Sprintf("and %d more", extra))
	}
	return st
}

// waits are what the hosts of a volume wait for. A host names a full drive only while a write waits for space. The
// target names it until there is space, so the target is asked if no host waits.
func (s *State) waits(v *Volume) (all []string) {
	for _, a := range v.attachments() {
		if a.WaitingFor != "" {
			all = append(all, a.WaitingFor)
		}
	}
	if len(all) > 0 {
		return all
	}
	for i := range v.Legs {
		if l := &v.Legs[i]; s.fullLegs[l.ID] && l.State == LegInSync {
			return []string{fmt.Sprintf("space for %v: its drive is full", l)}
		}
	}
	return nil
}

// wrongSnapshots are the snapshots that lack copies, one sentence each.
func (s *State) wrongSnapshots() (wrong []string) {
	for name, id := range s.byName.After("") {
		v := s.volumes.Get(id)
		if !v.IsSnapshot() {
			continue
		}
		if health := s.health(v); health == Degraded || health == Unavailable {
			wrong = append(wrong, fmt.Sprintf("snapshot %s is %s: see `weft explain snapshot %s`", name, strings.ToLower(string(health)), name))
		}
	}
	return wrong
}

// unknown reports volumes that are on drives but not in this store: they were created after
// the backup that it was restored from. Their space stays taken.
func (s *State) unknown() (wrong []string) {
	names, nodes := map[block.VolumeID]block.VolumeName{}, map[block.VolumeID][]string{}
	for _, node := range slices.Sorted(maps.Keys(s.targets)) {
		for id, d := range s.targets[node].drives {
			for _, l := range d.Legs {
				if s.drives[id] != nil && s.volumes.Get(l.Volume.ID) == nil && !slices.Contains(nodes[l.Volume.ID], string(node)) {
					names[l.Volume.ID] = l.Volume.Name
					nodes[l.Volume.ID] = append(nodes[l.Volume.ID], string(node))
				}
			}
		}
	}
	for _, id := range sorted(names) {
		wrong = append(wrong, fmt.Sprintf("volume %s (%v) is on drives of %s but not in this store, which is older than they are: the drives keep its data, and `weft volmgr rebuild-from-drives` recovers it",
			names[id], id, some(nodes[id], 8)))
	}
	return wrong
}

// silent names the agents that have run on a node and are not online.
func (s *State) silent(n Node) (agents []string) {
	if n.TargetBoot != "" && !n.Target.Online {
		agents = append(agents, "target")
	}
	if n.InitiatorBoot != "" && !n.Initiator.Online {
		agents = append(agents, "initiator")
	}
	return agents
}

// reportsWithin is how long agents have to find a manager that begins to lead. They do so in about a
// second; those that come later are offline.
const reportsWithin = 10 * time.Second

// awaits reports whether the agents of a node that are silent may just not have found this manager
// yet.
func (s *State) awaits(n Node) bool {
	late := func(a AgentStatus) bool { return !a.Online && !a.Seen.IsZero() }
	return s.now.Sub(s.began) < reportsWithin && !late(n.Target) && !late(n.Initiator)
}

// wrongNodes are the nodes with an agent that is offline, one sentence each, and a sentence about those
// that may just not have found this manager yet, if there are any.
func (s *State) wrongNodes() (offline, awaited []string) {
	var late []string
	for _, n := range s.Nodes() {
		switch down := s.silent(n); {
		case len(down) > 0 && s.awaits(n):
			late = append(late, string(n.Name))
		case len(down) > 0:
			offline = append(offline, fmt.Sprintf("node %s: %s offline%s", n.Name, strings.Join(down, " and "), s.sinceSeen(n)))
		}
	}
	if len(late) == 0 {
		return offline, nil
	}
	return offline, []string{fmt.Sprintf("this manager began to lead %v ago, and %s not reported to it yet: until then it shows their drives and volumes as if they were lost",
		s.now.Sub(s.began).Round(time.Second), haveOf(late))}
}

// haveOf says that nodes have done something.
func haveOf(nodes []string) string {
	if len(nodes) == 1 {
		return "node " + nodes[0] + " has"
	}
	return fmt.Sprintf("nodes %s have", some(nodes, 8))
}

func (s *State) sinceSeen(n Node) string {
	seen := n.Target.Seen
	if n.Initiator.Seen.After(seen) {
		seen = n.Initiator.Seen
	}
	if seen.IsZero() {
		return " (not seen since the manager started)"
	}
	return fmt.Sprintf(" (last seen %v ago)", s.now.Sub(seen).Round(time.Second))
}

func because(reason string) string {
	if reason == "" {
		return ""
	}
	return ": " + reason
}

// ---- lists ----

// The lists of a cluster. Each is sorted by a key that does not change, so that a reader can
// continue after any key. Entries are made on demand.

// keySeparator occurs in no name and sorts before every character that does.
const keySeparator = "\x00"

// NodesAfter lists nodes by name, including nodes that are known only by a refused agent.
func (s *State) NodesAfter(after string) iter.Seq2[string, Node] {
	nodes := s.nodes
	if len(s.foreignAgents) > 0 {
		nodes = maps.Clone(nodes)
	}
	for key := range s.foreignAgents {
		if nodes[key.node] == nil {
			nodes[key.node] = &Node{Name: key.node}
		}
	}
	return inOrder(nodes, after, func(n *Node) string { return string(n.Name) }, s.nodeView)
}

// PoolsAfter lists pools by name.
func (s *State) PoolsAfter(after string) iter.Seq2[string, Pool] {
	return inOrder(s.pools, after, func(p *Pool) string { return p.Name }, s.poolView)
}

// VolumesAfter lists volumes by name, without snapshots.
func (s *State) VolumesAfter(after string) iter.Seq2[string, Volume] {
	return func(yield func(string, Volume) bool) {
		for name, id := range s.byName.After(after) {
			if v := s.volumes.Get(id); !v.IsSnapshot() && !yield(name, s.volumeView(v)) {
				return
			}
		}
	}
}

// DrivesAfter lists the drives of a node, or all if node is empty, by node and device.
func (s *State) DrivesAfter(node block.NodeName, after string) iter.Seq2[string, Drive] {
	drives := s.drives
	if node != "" {
		drives = map[block.DriveID]*Drive{}
		for id := range s.drivesOn[node] {
			drives[id] = s.drives[id]
		}
	}
	key := func(d *Drive) string {
		return strings.Join([]string{string(d.Node), d.Device, d.ID.String()}, keySeparator)
	}
	return inOrder(drives, after, key, s.driveView)
}

// DevicesAfter lists by path what a node's inventory found at its last report.
func (s *State) DevicesAfter(node block.NodeName, after string) (iter.Seq2[string, Device], error) {
	devices, err := s.Devices(node)
	if err != nil {
		return nil, err
	}
	byPath := map[string]*Device{}
	for i := range devices {
		byPath[devices[i].Path] = &devices[i]
	}
	return inOrder(byPath, after, func(d *Device) string { return d.Path }, func(d *Device) Device { return *d }), nil
}

// AttachmentsAfter lists the attachments of a node, or all if node is empty, by volume
// and node.
func (s *State) AttachmentsAfter(node block.NodeName, after string) iter.Seq2[string, Attachment] {
	first, _, _ := strings.Cut(after, keySeparator)
	return func(yield func(string, Attachment) bool) {
		for name, id := range s.volumesOf(node).From(first) {
			v := s.volumes.Get(id)
			all := v.attachments()
			slices.SortFunc(all, func(a, b *Attachment) int { return cmp.Compare(a.Node, b.Node) })
			for _, a := range all {
				key := name + keySeparator + string(a.Node)
				if (node == "" || a.Node == node) && key > after && !yield(key, s.attachmentView(v, a)) {
					return
				}
			}
		}
	}
}

// volumesOf is the volumes that may have an attachment to a node, or all, by name.
func (s *State) volumesOf(node block.NodeName) cow.Sorted[block.VolumeID] {
	if node == "" {
		return s.byName
	}
	var on cow.Sorted[block.VolumeID]
	for id := range s.onNode.Get(node).Keys() {
		on = on.Set(string(s.volumes.Get(id).Name), id)
	}
	return on
}

// Events lists the newest limit events (0 means 1000) after a sequence number, oldest
// first. If object is not empty, only events about it count.
func (s *State) Events(object string, after uint64, limit int) []event.Event {
	if limit <= 0 {
		limit = 1000
	}
	return s.events.Newest(object, after, limit)
}

// EventsFrom continues the history after a sequence number: at most limit events, oldest
// first, of object or, if that is empty, of all. seen is the number up to which events
// were examined, last that of the newest event. After 0 the history begins with the oldest
// event that is kept; after another number it is refused if events in between are gone.
func (s *State) EventsFrom(object string, after uint64, limit int) (found []event.Event, seen, last uint64, err error) {
	found, seen, ok := s.events.From(object, after, limit)
	if !ok {
		err = eventsGone(after+1, s.events.First())
	}
	return found, seen, s.events.Next() - 1, err
}

// eventsGone is the error for events that are not kept any more.
func eventsGone(from, first uint64) error {
	e := &Error{
		Kind: FailedPrecondition, Reason: ReasonEventsGone,
		Text: fmt.Sprintf("events %d to %d are gone: the newest %d are kept, from %d on", from, first-1, event.Max, first),
	}
	return e.hint("continue after %d, or list the events that are kept with `weft event list`", first-1).with("first_seq", fmt.Sprint(first))
}

// EventsAfter lists the events that Events finds, by their number. Each key also holds the
// end of the list, so that later pages leave out events that happen meanwhile.
func (s *State) EventsAfter(object string, seq uint64, limit int, after string) iter.Seq2[string, event.Event] {
	end := s.events.Next()
	found := s.Events(object, seq, limit)
	if n, _ := fmt.Sscanf(after, "%d to %d", &seq, &end); n == 2 {
		found = s.Events(object, seq, event.Max)
	}
	return func(yield func(string, event.Event) bool) {
		for _, e := range found {
			if e.Seq >= end || !yield(fmt.Sprintf("%d to %d", e.Seq, end), e) {
				return
			}
		}
	}
}

// values returns a whole list without its keys.
func values[T any](list iter.Seq2[string, T]) (all []T) {
	for _, v := range list {
		all = append(all, v)
	}
	return all
}

// inOrder lists the views of the values whose keys are after a key, sorted by key.
func inOrder[K comparable, V, T any](all map[K]*V, after string, key func(*V) string, view func(*V) T) iter.Seq2[string, T] {
	type entry struct {
		key   string
		value *V
	}
	var entries []entry
	for v := range maps.Values(all) {
		if k := key(v); k > after {
			entries = append(entries, entry{k, v})
		}
	}
	slices.SortFunc(entries, func(a, b entry) int { return cmp.Compare(a.key, b.key) })
	return func(yield func(string, T) bool) {
		for _, e := range entries {
			if !yield(e.key, view(e.value)) {
				return
			}
		}
	}
}

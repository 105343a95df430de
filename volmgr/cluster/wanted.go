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
	"weft.dev/weft/volmgr/evidence"
)

// WantedTarget returns the whole wanted state of a node's target agent. All but MayStop follows
// from the records alone, so it is the same after Load.
func (s *State) WantedTarget(node block.NodeName) TargetWanted {
	return s.WantedTargetOf(node, s.toldTo(node))
}

// volumesOn returns the volumes with a leg or an attachment on a node, in order.
func (s *State) volumesOn(node block.NodeName) []block.VolumeID {
	return sortedIDs(s.onNode.Get(node).Keys())
}

// WantedTargetOf is the part of WantedTarget that is about drives and some volumes, which
// need not exist.
func (s *State) WantedTargetOf(node block.NodeName, volumes []block.VolumeID) TargetWanted {
	w := TargetWanted{Term: s.meta.Term, Generation: s.meta.Generation, ClusterID: s.meta.ClusterID, MayStop: s.stopping[node].may, Space: s.wantedSpace(node), Discovers: s.anyStock()}
	for _, d := range s.recordedDrives(node) {
		// A drive that has had its label must not get another one: if it comes up blank its
		// data is lost, and its legs must not pass for in sync.
		if d.State != DriveAdding && d.State != DriveRemoving {
			continue
		}
		w.Drives = append(w.Drives, WantedDrive{
			Drive: d.ID, Device: d.Device, WWID: d.WWID, Serial: d.Serial,
			ForceErase: d.ForceErase, Remove: d.State == DriveRemoving,
		})
	}
	for _, id := range volumes {
		v := s.volumes.Get(id)
		if v == nil || v.Restored || v.undecided() {
			continue // its labels may hold evidence that the record lacks
		}
		label, here := v.label(), false
		for _, l := range v.Legs {
			if l.Node == node {
				here = true
				w.Legs = append(w.Legs, s.wantedLeg(v, l, label))
			}
		}
		if here && v.State != VolumeDeleting && v.Epoch > 0 {
			w.Admissions = append(w.Admissions, Admission{v.ID, v.Epoch})
		}
		for _, a := range v.grants() {
			if x, ok := s.export(v, a, node); ok {
				w.Exports = append(w.Exports, x)
			}
		}
		w.Exports = append(w.Exports, s.copyExports(v, node)...)
		w.Discovered = append(w.Discovered, s.discovered(v)...)
	}
	return w
}

func (s *State) wantedLeg(v *Volume, l Leg, label evidence.VolumeLabel) WantedLeg {
	incarnation := ""
	if d := s.drives[l.Drive]; d != nil {
		incarnation = d.Incarnation
	}
	size := v.Layout.LegSize(v.planned())
	if !l.mapped() {
		size = min(size, l.Capacity())
	}
	img, tree := l.toldImage()
	flatten, wait := s.wantedFlat(v, &l)
	inKernel := v.inKernel(l.Node)
	return WantedLeg{
		Flatten: flatten, FlattenWait: wait, InKernel: inKernel && l.frozen(), Process: v.inProcess(s.nodes[l.Node]) || inKernel && !l.frozen(),
		Leg: l.ID, Drive: l.Drive, Column: l.Column, Copy: l.Copy, Image: img, Tree: tree,
		Size: size, Revision: l.Revision, Volume: label, Remove: l.State == LegDeleting && len(s.needBase(&l)) == 0,
		Incarnation: incarnation, Blank: l.Blank && l.State == LegStale && l.member(), Origin: s.originOf(v, &l),
	}
}

// label returns the volume's definition for drive labels, from which a lost store is
// rebuilt. It has to stay true until the next epoch: a label that called the volume clean
// while it is being granted would still say so after the host has written.
func (v *Volume) label() evidence.VolumeLabel {
	label := evidence.VolumeLabel{
		ID: v.ID, Name: v.Name, Size: v.Size, Layout: v.Layout, Pool: v.Pool, Spread: v.Spread,
		Labels: v.onDrives(), Epoch: v.Epoch, Generation: v.Generation, Created: v.Created.UnixNano(),
		ExpandingTo: v.ExpandingTo, Quiet: v.quiet(), Writer: v.writer(),
	}
	label.Clean = v.Clean && label.Quiet
	label.ListsAll = true
	if x := v.Snapshot; x != nil {
		label.Snapshot = evidence.SnapshotOf{Volume: x.Volume, Name: x.Name, Group: x.Group, Taken: nanoseconds(x.Taken), FSFrozen: x.FSFrozen}
	}
	if x := v.Restoring; x != nil {
		label.RestoringTo = x.To
	}
	count := make([]int, v.Layout.Stripes)
	for _, l := range v.Legs {
		if l.member() {
			count[l.Column]++
		}
		switch {
		case l.trusted():
			label.InSync = append(label.InSync, l.ID)
		case l.State == LegInSync:
			label.Suspect = append(label.Suspect, l.ID)
		case l.member():
			label.Others = append(label.Others, l.ID)
		}
	}
	for c, n := range count {
		if n > v.Layout.Group().Members {
			label.Crowded = append(label.Crowded, c)
		}
	}
	return label
}

// nanoseconds is a time as labels hold it; 0 if there is none.
func nanoseconds(at time.Time) int64 {
	if at.IsZero() {
		return 0
	}
	return at.UnixNano()
}

// undecided reports whether an operator has to choose a copy of some column. The labels may
// be the evidence for that, now or after another loss of the store.
func (v *Volume) undecided() bool {
	return v.State == VolumeReady && v.unreadable(v.inSync()) >= 0
}

// quiet reports whether no host has the volume, or is being granted it, for writing at its
// epoch. Hosts of earlier epochs can no longer record a leg stale.
func (v *Volume) quiet() bool {
	return !slices.ContainsFunc(v.attachments(), func(a *Attachment) bool {
		return a.Mode != AttachSharedReadOnly && (a.Mode.shared() || !a.Left)
	})
}

// writer is the node of the newest exclusive grant, handed out or not; empty if that host
// has released the volume.
func (v *Volume) writer() block.NodeName {
	if v.Attachment != nil && !v.Attachment.Left {
		return v.Attachment.Node
	}
	return v.Holder
}

// open reports whether the volume's legs may be exported: only when a grant was handed out.
func (v *Volume) open() bool { return slices.ContainsFunc(v.attachments(), (*Attachment).handedOut) }

// exported reports whether a leg takes part in the data path. A stale leg does not: a host
// that still uses its old identity must not reach it.
func (l *Leg) exported() bool { return l.State == LegInSync || l.State == LegRebuilding }

func (s *State) export(v *Volume, a *Attachment, node block.NodeName) (WantedExport, bool) {
	if !a.exported() {
		return WantedExport{}, false
	}
	if a.Proven.Required && !s.authenticates(node) {
		return WantedExport{}, false
	}
	x := WantedExport{
		Volume: v.ID, Epoch: v.Epoch, NQN: s.nqn(v, a, node),
		Serial: block.SerialNumber(v.ID), Host: a.Host, ReadOnly: a.Mode == AttachSharedReadOnly, Process: v.inProcess(s.nodes[node]),
		Paths: a.Paths,
	}
	if s.proves(a, node) {
		x.Host, x.Keys = s.identity(a, x.NQN)
	}
	for i := range v.Legs {
		l := &v.Legs[i]
		if l.Node != node {
			continue
		}
		// A host is told of a suspect leg, but cannot reach it.
		if v.drains(l) || l.exported() && !l.Suspect {
			x.Namespaces = append(x.Namespaces, WantedNamespace{v.nsid(l), l.ID, v.namespace(l)})
		}
	}
	return x, len(x.Namespaces) > 0
}

// nqn names the subsystem through which a target exports a volume under one grant.
func (s *State) nqn(v *Volume, a *Attachment, target block.NodeName) block.NQN {
	return block.SharedNQN(v.ID, a.Epoch, a.Grant, a.Host, target)
}

// maxPlaces is the largest number of legs of a volume on one node. One subsystem holds them,
// and a node has at most one leg of a column.
const maxPlaces = 256

// nsid is the number of the leg's namespace in its subsystem. It changes with the revision,
// so that a write still in flight on an old connection of a stale leg finds no namespace
// rather than the one that is being rebuilt. All numbers stay below 1024, the most that
// nvmet reports to a host.
func (v *Volume) nsid(l *Leg) uint32 {
	return uint32(l.place() + maxPlaces*int(l.Revision%3))
}

// place returns the recorded place. A leg from before places were recorded must keep its
// namespace number, so its place follows from its column and copy, at four members a column.
func (l *Leg) place() int {
	if l.Place != 0 {
		return l.Place
	}
	return 1 + l.Column*4 + l.Copy
}

// setPlaces numbers the legs of a volume on each node.
func setPlaces(legs []Leg) {
	last := map[block.NodeName]int{}
	for i := range legs {
		last[legs[i].Node]++
		legs[i].Place = last[legs[i].Node]
	}
}

// checkPlaces refuses legs that would have the same namespace.
func (v *Volume) checkPlaces() error {
	taken := map[block.NodeName]map[int]bool{}
	for i := range v.Legs {
		l := &v.Legs[i]
		if p := l.place(); p < 1 || p > maxPlaces || taken[l.Node][p] {
			return fmt.Errorf("leg %v: place %d on node %s is taken, or not 1 to %d", l.ID, p, l.Node, maxPlaces)
		}
		put(taken, l.Node, l.place(), true)
	}
	return nil
}

func (v *Volume) namespace(l *Leg) block.UUID {
	return block.NamespaceUUID(l.ID, v.Epoch, l.Revision)
}

// WantedInitiator returns the whole wanted state of a node's initiator agent.
func (s *State) WantedInitiator(node block.NodeName) InitiatorWanted {
	return s.WantedInitiatorOf(node, s.volumesOn(node))
}

// WantedInitiatorOf is the part of WantedInitiator that is about some volumes, which need not
// exist.
func (s *State) WantedInitiatorOf(node block.NodeName, volumes []block.VolumeID) InitiatorWanted {
	w := InitiatorWanted{Term: s.meta.Term, Generation: s.meta.Generation, ClusterID: s.meta.ClusterID}
	for _, id := range volumes {
		v := s.volumes.Get(id)
		if v == nil {
			continue
		}
		if a := v.grantOf(node); a != nil && a.exported() && !a.Stock {
			w.Attachments = append(w.Attachments, s.wantedAttachment(v, a))
		}
	}
	return w
}

func (s *State) wantedAttachment(v *Volume, a *Attachment) WantedAttachment {
	w := WantedAttachment{
		Volume: v.ID, VolumeName: v.Name, Size: v.Size, Layout: a.layout(v), LegSize: v.Layout.LegSize(v.Size),
		Epoch: v.Epoch, Grant: a.Grant, Mode: a.Mode, BootID: a.BootID, Equalize: a.Equalize, Detach: a.State == Detaching, Scrub: s.wantedScrub(v, a),
		SinceEpoch: a.SinceEpoch, RebuildRate: v.RebuildRate, Thin: v.Thin, Holds: s.wantedHolds(v, a), Heal: a.Run, Prefers: a.Prefers,
	}
	for i := range v.Legs {
		l := &v.Legs[i]
		if !l.exported() {
			continue
		}
		link := WantedLink{
			Leg: l.ID, Column: l.Column, Copy: l.Copy, State: l.State, Revision: l.Revision, Node: l.Node,
			NQN: s.nqn(v, a, l.Node), NSID: v.nsid(l), UUID: v.namespace(l), CopyAll: l.CopyAll, CopyAllSince: l.CopyAllSince,
			CacheLost: l.CacheLost, AllSince: l.AllSince, Reborn: l.Reborn, Portals: v.portals(s.nodes[l.Node]),
			Paths: a.Paths,
		}
		if d := s.drives[l.Drive]; d != nil {
			link.WriteThrough = !d.VolatileCache
		}
		if s.proves(a, l.Node) {
			link.Host = block.ProvenHost(link.NQN)
			link.Keys = s.master.Of(link.NQN, link.Host.NQN)
		}
		link.LeaveOut = s.asked[v.ID][l.ID]
		w.Legs = append(w.Legs, link)
	}
	return w
}

// A target in the kernel can serve from its agent's process, at portals of its own, what the kernel knows
// nothing of: legs that are found through a map, and those with checksums. An older manager would send hosts to
// the kernel for them, so a target says this in a field that older ones do not read, and nothing comes of it
// before processLevel.

// processLevel is the level from which on targets serve legs from a process beside the kernel.
const processLevel block.Level = 9

// abilities are what a target can do for legs.
type abilities struct{ thin, integrity, snapshots, plainSnapshots, copies bool }

// abilities of a target, as far as it has reported.
func (s *State) abilities(node block.NodeName) abilities {
	on := s.targets[node]
	if on == nil || on.report == nil {
		return abilities{}
	}
	r := on.report
	if len(r.ProcessPortals) > 0 && s.level >= processLevel {
		return abilities{thin: true, integrity: true, snapshots: true, plainSnapshots: r.PlainSnapshots && s.level >= handsLevel, copies: true}
	}
	return abilities{r.Thin, r.Integrity, r.Snapshots, r.PlainSnapshots, r.Copies}
}

// With its first snapshot a plain leg is found through a map, and changes hands from the kernel to the process, while
// it is in use; and back when it is plain again.

// handsLevel is the level from which on agents know how.
const handsLevel block.Level = 11

// stays says why a host that has a volume does not follow its legs on a node from the kernel to the process, or back;
// empty if all do.
func (s *State) stays(v *Volume, node block.NodeName) string {
	n := s.nodes[node]
	if !n.besideKernel() {
		return "" // one part serves everything
	}
	rdma := slices.ContainsFunc(n.Portals, func(p block.Portal) bool { return p.Transport != block.TCP })
	for _, a := range v.grants() {
		switch on := s.initiators[a.Node]; {
		case a.Stock:
			return fmt.Sprintf("host %s, which has the volume, has no agent", a.Node)
		case a.Paths > 1:
			return fmt.Sprintf("host %s, which has the volume, uses %d paths at a time", a.Node, a.Paths)
		case rdma:
			return fmt.Sprintf("host %s, which has the volume, may reach the target over RDMA", a.Node)
		case on == nil || !on.status.Online:
			return fmt.Sprintf("the agent of host %s, which has the volume, does not report", a.Node)
		}
	}
	return ""
}

// besideKernel reports whether a process serves beside the kernel of n, which may be nil.
func (n *Node) besideKernel() bool { return n != nil && len(n.ProcessPortals) > 0 }

// processAt records where a target serves from its process, and whether its kernel can have some of that.
func (t *tx) processAt(r *TargetReport) {
	n := t.nodes.peek(r.Node)
	if t.level >= processLevel && n != nil && !slices.Equal(n.ProcessPortals, r.ProcessPortals) {
		t.node(r.Node).ProcessPortals = slices.Clone(r.ProcessPortals)
	}
	if t.level >= kernelMapsLevel && n != nil && r.KernelMaps.changes(n.KernelMaps) {
		t.node(r.Node).KernelMaps = !n.KernelMaps
	}
}

// portals are where hosts reach a volume's legs on n, which may be nil.
func (v *Volume) portals(n *Node) []block.Portal {
	switch {
	case n == nil:
		return nil
	case v.inProcess(n):
		return n.ProcessPortals
	}
	return n.Portals
}

// inProcess reports whether a volume's legs on n, which may be nil, are served from a process beside the
// kernel. All of them are, once one has to be: hosts reach them through one subsystem.
func (v *Volume) inProcess(n *Node) bool {
	return n.besideKernel() && !v.inKernel(n.Name) && (v.Layout.Integrity || slices.ContainsFunc(v.Legs, func(l Leg) bool {
		return l.Node == n.Name && (l.mapped() || l.Based)
	}))
}

// Legs in trees that nobody writes, of snapshots and of sealed volumes, can be served by the kernel all the same: their
// target tells it once where on the drive their data is. This is decided when the first host gets the volume, and
// holds until no host has it, since hosts do not follow from one to the other. Meanwhile such a leg cannot be
// the source of a copy to another target, since the kernel does not tell what it holds, nor does space come
// free that was deleted under it.

// kernelMapsLevel is the level from which on the kernel serves legs in trees.
const kernelMapsLevel block.Level = 10

// inKernel reports whether the kernel of a node serves legs in trees to the hosts that have the volume.
func (v *Volume) inKernel(node block.NodeName) bool {
	return len(v.Shared) > 0 && slices.Contains(v.InKernel, node)
}

// frozen reports whether nobody writes a leg of a volume that nobody writes, not even a copy.
func (l *Leg) frozen() bool {
	return l.State == LegInSync && l.mapped() && !l.Based && l.Copying == nil
}

// kernelsFor chooses the targets whose kernels are to serve a volume that hosts only read. Some hosts know TCP alone,
// and find the process over TCP wherever its kernel is.
func (s *State) kernelsFor(v *Volume, mode AttachMode) (nodes []block.NodeName) {
	if s.level < kernelMapsLevel || mode != AttachSharedReadOnly || !v.unwritten() || v.Layout.Integrity {
		return nil
	}
	for _, node := range v.targets() {
		n := s.nodes[node]
		able := n.besideKernel() && n.KernelMaps && slices.ContainsFunc(n.Portals, func(p block.Portal) bool { return p.Transport == block.TCP })
		if able && !slices.ContainsFunc(v.Legs, func(l Leg) bool { return s.needsProcess(v, &l, node) }) {
			nodes = append(nodes, node)
		}
	}
	return nodes
}

// needsProcess reports whether a leg keeps a volume that nobody writes in the process of a target: as one of its legs
// there, or as a copy that is being made from there.
func (s *State) needsProcess(v *Volume, l *Leg, node block.NodeName) bool {
	if l.Copying != nil {
		if from := v.leg(l.Copying.From); from != nil && from.Node == node {
			return true
		}
	}
	return l.Node == node && (!l.frozen() || s.overABase(l) || s.kernelRefusal(l) != "")
}

// overABase reports whether a leg may see the extents of a leg that is not thin. Targets do not pin these.
func (s *State) overABase(l *Leg) bool {
	_, base := s.baseOf(l.tree())
	return base != nil
}

// kernelRefusal is why the kernel of its target does not map a leg, as far as the target has said.
func (s *State) kernelRefusal(l *Leg) string {
	if on := s.targets[l.Node]; on != nil {
		return on.legs.Get(l.ID).KernelRefuses
	}
	return ""
}

// kernelRefuses has the process of a target serve what its kernel does not after all. A target refuses before it
// exports anything of a volume that its kernel serves. Hosts that have the volume already, as after a reboot of the
// target with another kernel, find its legs at other portals then.
func (t *tx) kernelRefuses(node block.NodeName, on *target) {
	refused := on.refuses
	if on.refuses = nil; len(refused) == 0 {
		return
	}
	for _, id := range sortedIDs(t.s.onNode.Get(node).Keys()) {
		v := t.peek(id)
		if v != nil && v.inKernel(node) && slices.ContainsFunc(v.Legs, func(l Leg) bool { return slices.Contains(refused, l.ID) }) {
			v = t.volume(id)
			v.InKernel = slices.DeleteFunc(v.InKernel, func(n block.NodeName) bool { return n == node })
		}
	}
}

// explainInKernel says which targets' kernels serve legs in trees, and which do not.
func (s *State) explainInKernel(e *Explanation, v *Volume) {
	for _, node := range v.InKernel {
		e.Facts = append(e.Facts, fmt.Sprintf("the kernel of %s serves it, since nobody writes it: the space of what is deleted under it comes free there once no host has it", node))
	}
	for i := range v.Legs {
		if why := s.kernelRefusal(&v.Legs[i]); why != "" && v.unwritten() {
			e.Facts = append(e.Facts, fmt.Sprintf("the process of target %s serves %v, which its kernel does not: %s", v.Legs[i].Node, &v.Legs[i], why))
		}
	}
}

// ---- who proves its identity to whom ----

// A host and a target prove their identities to one another (DH-HMAC-CHAP) with keys that the
// manager makes for each grant and target, and tells to these two alone; see package keys. Names and
// ids can be found out or guessed, keys cannot.
//
// What holds for a grant is fixed when it is handed out, and for each target before either end is
// told of the other. A connection that was made without keys could not be made again with them, and
// some kernels give up a controller that is refused. So an agent that has learned to authenticate
// since, and a change of the volume's property, count from the next grant on.

// authentication is the volume's property.
func (v *Volume) authentication() string {
	return cmp.Or(v.Authentication, block.PropertyAuthentication.Default)
}

// checkAuthentication returns a property as records hold it: empty for the default.
func checkAuthentication(word string) (string, error) {
	p := block.PropertyAuthentication
	switch {
	case word == "" || word == p.Default:
		return "", nil
	case !slices.Contains(p.Words(), word):
		return "", invalid(p.Field, "%q: must be one of %s", word, strings.Join(p.Words(), ", "))
	}
	return word, nil
}

// authenticates reports whether a node's target can demand that hosts prove their identity.
func (s *State) authenticates(target block.NodeName) bool {
	n := s.nodes[target]
	return n != nil && n.TargetAuthenticates
}

// proves reports whether a host and a target prove their identities to one another under a grant. A
// target that has lost the ability, as after a downgrade of its agent, is used without it, unless
// it is required.
func (s *State) proves(a *Attachment, target block.NodeName) bool {
	return a.Proven.By && (a.Proven.Required || a.Proven.At[target]) && s.authenticates(target)
}

// proven is what holds for a grant that is handed out now.
func (t *tx) proven(v *Volume, node block.NodeName) Proven {
	n := t.nodes.peek(node)
	if n != nil && n.Stock { // it has one secret, for all that it connects to
		return Proven{By: n.InitiatorAuthenticates, Required: n.InitiatorAuthenticates}
	}
	if v.authentication() == block.AuthenticationOff || t.s.master.IsZero() || n == nil || !n.InitiatorAuthenticates {
		return Proven{}
	}
	return Proven{By: true, Required: v.authentication() == block.AuthenticationRequire}
}

// barred reports whether a volume may not be granted to a host, since the host cannot prove its
// identity.
func (t *tx) barred(v *Volume, node block.NodeName) bool {
	n := t.nodes.peek(node)
	return v.authentication() == block.AuthenticationRequire && (n == nil || !n.InitiatorAuthenticates)
}

// settleProven decides for each target of a grant whether it demands a proof.
func (t *tx) settleProven(id block.VolumeID) {
	v := t.peek(id)
	for _, a := range v.grants() {
		if !a.exported() || !a.Proven.By || a.Proven.Required {
			continue
		}
		at := maps.Clone(a.Proven.At)
		for i := range v.Legs {
			node := v.Legs[i].Node
			if _, decided := at[node]; decided {
				continue
			}
			if at == nil {
				at = map[block.NodeName]bool{}
			}
			n := t.nodes.peek(node)
			at[node] = n != nil && n.TargetAuthenticates
		}
		if len(at) > len(a.Proven.At) {
			t.volume(id).grantOf(a.Node).Proven.At = at
		}
	}
}

// refusedEvery is how often at most an event tells of the hosts that a target refused.
const refusedEvery = time.Minute

// refused tells of hosts that did not prove their identity to a target. One event counts all since
// the one before: a host that tries for ever does not push everything else out of the history.
func (t *tx) refused(on *target, r *TargetReport) {
	if !t.may("s") {
		return // no host has to prove anything yet
	}
	last, told := r.Refusals, t.nodes.peek(r.Node).Refused
	if last.Count < told { // its agent has restarted
		told = 0
		t.node(r.Node).Refused = 0
	}
	if last.Count == told || !on.refusedAt.IsZero() && t.now.Sub(on.refusedAt) < refusedEvery {
		return
	}
	t.node(r.Node).Refused, on.refusedAt = last.Count, t.now
	text := fmt.Sprintf("target %s refused a host that did not prove its identity: from %s as %s: %s", r.Node, last.Address, last.Host, last.Reason)
	if n := last.Count - told; n > 1 {
		text += fmt.Sprintf("; %d connections since the last such event", n)
	}
	attributes := []string{"node", string(r.Node), "host", string(last.Host), "address", last.Address, "connections", fmt.Sprint(last.Count - told)}
	id, _, _, _, err := block.ParseSubsystemNQN(last.NQN)
	if v := t.peek(id); err == nil && v != nil {
		t.volumeEvent(v, event.Warning, event.TargetRefused, text, attributes...)
		return
	}
	t.event(event.Warning, event.TargetRefused, nodeObject(r.Node), text, attributes...)
}

// mayProve refuses a volume that requires authentication if an end cannot do it.
func (s *State) mayProve(v *Volume, n *Node) error {
	if v.authentication() != block.AuthenticationRequire && !(n.Stock && n.InitiatorAuthenticates) {
		return nil
	}
	var cannot []string
	if !n.InitiatorAuthenticates {
		cannot = append(cannot, "host "+string(n.Name))
	}
	for _, node := range v.nodes() {
		if slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.Node == node && l.member() }) && !s.authenticates(node) {
			cannot = append(cannot, "target "+string(node))
		}
	}
	if len(cannot) == 0 {
		return nil
	}
	requires, instead := "it requires authentication", fmt.Sprintf("allow connections without: `weft volume set %s --authentication prefer`", v.Name)
	switch {
	case n.Stock && !n.InitiatorAuthenticates:
		return refused(ReasonNoAuthentication, v.object(), "%s, which %s cannot do", requires, some(cannot, 8)).
			hint("`weft node add %s --host-nqn %s --authenticate`", n.Name, n.Host.NQN)
	case v.authentication() != block.AuthenticationRequire:
		requires, instead = fmt.Sprintf("host %s authenticates", n.Name), fmt.Sprintf("let it do without: `weft node add %s --host-nqn %s`", n.Name, n.Host.NQN)
	}
	return refused(ReasonNoAuthentication, v.object(), "%s, which %s cannot do", requires, some(cannot, 8)).
		hint("upgrade their agents; Linux's own data path needs Linux 6.0 built with NVME_HOST_AUTH on the host and NVME_TARGET_AUTH on the target, the user-space path does it on any kernel; or %s", instead)
}

// provenWaits is the wait for a host that cannot prove its identity.
func (s *State) provenWaits(v *Volume, a *Attachment) []string {
	n := s.nodes[a.Node]
	if v.authentication() != block.AuthenticationRequire || n != nil && n.InitiatorAuthenticates {
		return nil
	}
	return []string{fmt.Sprintf("host %s to be able to authenticate, which the volume requires", a.Node)}
}

// targets are the nodes with legs of a volume, sorted.
func (v *Volume) targets() (all []block.NodeName) {
	for _, node := range v.nodes() {
		if slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.Node == node }) {
			all = append(all, node)
		}
	}
	return all
}

// authenticatesWith are the targets that a host and they prove their identities to one another.
func (s *State) authenticatesWith(v *Volume, a *Attachment) (with []block.NodeName) {
	for _, node := range v.targets() {
		if a.exported() && s.proves(a, node) {
			with = append(with, node)
		}
	}
	return with
}

// explainProven says for each host which targets it and they prove their identities to, and why not.
func (s *State) explainProven(e *Explanation, v *Volume) {
	if s.master.IsZero() {
		return
	}
	for _, a := range v.attachments() {
		if !a.exported() {
			continue
		}
		if a.Proven.By {
			s.explainTargets(e, v, a)
			continue
		}
		why := "its agent or kernel cannot"
		if a.Stock {
			e.Facts = append(e.Facts, fmt.Sprintf("host %s does not authenticate, since it was added without --authenticate: whoever knows its NQN can connect in its place", a.Node))
			continue
		}
		if n := s.nodes[a.Node]; v.authentication() == block.AuthenticationOff {
			why = "it is switched off for this volume"
		} else if n != nil && n.InitiatorAuthenticates {
			why = "it could not, or was not to, when the grant was handed out; it does at the next one"
		}
		e.Facts = append(e.Facts, fmt.Sprintf("host %s does not authenticate (%s): whoever knows its host ID can connect in its place", a.Node, why))
	}
}

// explainTargets says with which targets a host that can authenticate does so.
func (s *State) explainTargets(e *Explanation, v *Volume, a *Attachment) {
	var with []string
	for _, node := range v.targets() {
		switch can := s.authenticates(node); {
		case s.proves(a, node):
			with = append(with, string(node))
		case a.Proven.Required:
			e.Waits = append(e.Waits, fmt.Sprintf("target %s to be able to authenticate, which the volume requires: its legs are not exported", node))
		case can:
			e.Facts = append(e.Facts, fmt.Sprintf("host %s does not authenticate at target %s, which could not do it when the grant was handed out; it does at the next one", a.Node, node))
		default:
			e.Facts = append(e.Facts, fmt.Sprintf("host %s does not authenticate at target %s, whose agent or kernel cannot: whoever knows the host ID can connect in its place", a.Node, node))
		}
	}
	if len(with) > 0 {
		e.Facts = append(e.Facts, fmt.Sprintf("host %s and its targets authenticate to one another: %s", a.Node, some(with, 8)))
	}
}

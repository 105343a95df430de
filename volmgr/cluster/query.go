// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
)

// Nodes lists the nodes by name.
func (s *State) Nodes() []Node {
	var all []Node
	for _, name := range slices.Sorted(maps.Keys(s.nodes)) {
		all = append(all, s.nodeView(s.nodes[name]))
	}
	return all
}

// Node is one node; the error is NotFound.
func (s *State) Node(name block.NodeName) (Node, error) {
	n := s.nodes[name]
	if n == nil {
		return Node{}, notFound(nodeObject(name))
	}
	return s.nodeView(n), nil
}

func (s *State) nodeView(n *Node) Node {
	v := *n
	v.Labels = n.labels()
	if t := s.targets[n.Name]; t != nil {
		v.Target = s.agentView(t.status)
	}
	if i := s.initiators[n.Name]; i != nil {
		v.Initiator = s.agentView(i.status)
	}
	return v
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
		return nil, refused(ReasonNodeOffline, nodeObject(name), "its target agent is offline, so its devices are not known").
			hint("start `weft target` on %s, or look at `weft node list`", name)
	}
	return slices.Clone(t.devices), nil
}

// Drives lists the drives of a node, or all if node is empty, by node and device.
func (s *State) Drives(node block.NodeName) []Drive {
	ids := maps.Keys(s.drives)
	if node != "" {
		ids = maps.Keys(s.drivesOn[node])
	}
	var all []Drive
	for id := range ids {
		all = append(all, s.driveView(s.drives[id]))
	}
	slices.SortFunc(all, func(a, b Drive) int {
		return cmp.Or(cmp.Compare(a.Node, b.Node), cmp.Compare(a.Device, b.Device), bytes.Compare(a.ID.UUID[:], b.ID.UUID[:]))
	})
	return all
}

func (s *State) driveView(d *Drive) Drive {
	v := *d
	v.Capacity = block.Size(d.Extents) * block.ExtentSize
	v.Allocated = block.Size(s.used[d.ID]) * block.ExtentSize
	return v
}

// Pools lists the pools by name.
func (s *State) Pools() []Pool {
	var all []Pool
	for _, name := range slices.Sorted(maps.Keys(s.pools)) {
		all = append(all, s.poolView(s.pools[name]))
	}
	return all
}

func (s *State) poolView(p *Pool) Pool {
	v := *p
	for _, d := range s.drives {
		if d.State != DriveRemoving && p.selects(d, s.nodes[d.Node]) {
			d := s.driveView(d)
			v.Drives++
			v.Capacity += d.Capacity
			v.Allocated += d.Allocated
		}
	}
	return v
}

// Volumes lists the volumes by name.
func (s *State) Volumes() []Volume {
	var all []Volume
	for _, name := range slices.Sorted(maps.Keys(s.byName)) {
		all = append(all, s.volumeView(s.volumes[s.byName[name]]))
	}
	return all
}

// Volume is one volume by name or id; the error is NotFound.
func (s *State) Volume(nameOrID string) (Volume, error) {
	v, err := s.find(nameOrID)
	if err != nil {
		return Volume{}, err
	}
	return s.volumeView(v), nil
}

func (s *State) find(nameOrID string) (*Volume, error) {
	if id, ok := s.byName[block.VolumeName(nameOrID)]; ok {
		return s.volumes[id], nil
	}
	if id, err := block.ParseVolumeID(nameOrID); err == nil && s.volumes[id] != nil {
		return s.volumes[id], nil
	}
	return nil, notFound("volume " + nameOrID)
}

func (s *State) volumeView(v *Volume) Volume {
	view := *v
	view.Legs = slices.Clone(v.Legs)
	view.Health = s.health(v)
	view.FenceWaitsFor = s.fenceWaits(v)
	if v.Attachment != nil {
		a := s.attachmentView(v, v.Attachment)
		view.Attachment = &a
	}
	view.Shared, view.Lingering = slices.Clone(v.Shared), slices.Clone(v.Lingering)
	for i := range view.Shared {
		view.Shared[i] = s.attachmentView(v, &v.Shared[i])
	}
	for i := range view.Legs {
		l := &view.Legs[i]
		switch {
		case l.State == LegCreating || l.State == LegDeleting:
			l.Reason = s.legWaitsFor(l)
		case l.Suspect:
			l.Reason = fmt.Sprintf("suspect: %s; waits for %s", rebootLoss, s.suspectWaitsFor(v, l))
		case l.State == LegStale:
			if why := s.rebuildWaitsFor(v, l); why != "" {
				l.Reason += "; rebuild waits for " + why
			}
		}
	}
	return view
}

// health sums up the legs: a leg counts only while its target is online and its
// drive is ready.
func (s *State) health(v *Volume) Health {
	if v.State != VolumeReady {
		return ""
	}
	served, whole, rebuilding := make([]bool, v.Layout.Stripes), true, false
	for i := range v.Legs {
		l := &v.Legs[i]
		good := l.trusted() && s.servable(l)
		whole = whole && good
		served[l.Column] = served[l.Column] || good
		rebuilding = rebuilding || l.State == LegRebuilding
	}
	switch {
	case slices.Contains(served, false):
		return Unavailable
	case rebuilding:
		return Rebuilding
	case !whole || len(v.Legs) < v.Layout.Legs():
		return Degraded
	}
	return Healthy
}

// servable reports whether a leg's target is online, its drive is ready, and
// the target has nothing against the leg.
func (s *State) servable(l *Leg) bool {
	d := s.drives[l.Drive]
	return s.targetOnline(l.Node) && d != nil && d.State == DriveReady && s.legError(l) == ""
}

// legError is what a leg's target says is wrong with it.
func (s *State) legError(l *Leg) string {
	if t := s.targets[l.Node]; t != nil {
		return t.legs[l.ID].Error
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

// Attachments lists the attachments of a node, or all if node is empty, by volume.
func (s *State) Attachments(node block.NodeName) []Attachment {
	var all []Attachment
	for _, name := range slices.Sorted(maps.Keys(s.byName)) {
		v := s.volumes[s.byName[name]]
		for _, a := range v.attachments() {
			if node == "" || a.Node == node {
				all = append(all, s.attachmentView(v, a))
			}
		}
	}
	return all
}

func (s *State) attachmentView(v *Volume, of *Attachment) Attachment {
	a := *of
	a.VolumeID, a.VolumeName = v.ID, v.Name
	if r, ok := s.attachmentReport(v, of); ok {
		a.Device, a.Number, a.Size, a.ResyncDone, a.ResyncTotal = r.Device, r.Number, r.Size, r.ResyncDone, r.ResyncTotal
	}
	a.WaitingFor = strings.Join(s.attachmentWaits(v, of), "; ")
	return a
}

// attachmentReport is what the host last said about the grant that stands.
func (s *State) attachmentReport(v *Volume, a *Attachment) (AttachmentReport, bool) {
	i := s.initiators[a.Node]
	if i == nil || i.status.BootID != a.BootID || i.status.Generation < a.JoinedAt {
		return AttachmentReport{}, false
	}
	r, ok := i.attachments[v.ID]
	return r, ok && r.Epoch == a.Epoch
}

// maxWrong is how many sentences of a Status still fit a screen.
const maxWrong = 40

// Status sums the cluster up.
func (s *State) Status() Status {
	st := Status{ClusterID: s.meta.ClusterID, Generation: s.meta.Generation, Nodes: len(s.nodes), Drives: len(s.drives), Volumes: len(s.volumes)}
	var drives, nodes, degraded []string
	for _, d := range s.Drives("") {
		st.Capacity += d.Capacity
		st.Allocated += d.Allocated
		if d.State != DriveReady {
			st.DrivesNotReady++
			drives = append(drives, fmt.Sprintf("drive %s (%s on %s) is %s%s", d.ID, d.Device, d.Node, d.State, because(d.Reason)))
		}
	}
	for _, n := range s.Nodes() {
		down := s.silent(n)
		if len(down) > 0 {
			st.NodesOffline++
			nodes = append(nodes, fmt.Sprintf("node %s: %s offline%s", n.Name, strings.Join(down, " and "), s.sinceSeen(n)))
		}
	}
	for _, v := range s.Volumes() {
		st.Attachments += len(v.attachments())
		switch v.Health {
		case Unavailable:
			st.VolumesUnavailable++
			st.Wrong = append(st.Wrong, fmt.Sprintf("volume %s can not be served: see `weft explain volume %s`", v.Name, v.Name))
		case Degraded, Rebuilding:
			st.VolumesDegraded++
			degraded = append(degraded, fmt.Sprintf("volume %s is %s: see `weft explain volume %s`", v.Name, strings.ToLower(string(v.Health)), v.Name))
		}
		for _, a := range v.attachments() {
			if a.WaitingFor != "" {
				degraded = append(degraded, fmt.Sprintf("volume %s waits for %s", v.Name, a.WaitingFor))
			}
		}
	}
	st.Wrong = append(st.Wrong, slices.Concat(nodes, degraded, drives)...)
	if extra := len(st.Wrong) - maxWrong; extra > 0 {
		st.Wrong = append(st.Wrong[:maxWrong], fmt.Sprintf("and %d more", extra))
	}
	return st
}

// silent names the agents that a node is expected to run and that are not online.
func (s *State) silent(n Node) (agents []string) {
	if n.TargetBoot != "" && !n.Target.Online {
		agents = append(agents, "target")
	}
	if n.InitiatorBoot != "" && !n.Initiator.Online {
		agents = append(agents, "initiator")
	}
	return agents
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

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/drivepolicy"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/image"
	"weft.dev/weft/volmgr/placement"
	"weft.dev/weft/volmgr/rebalance"
)

// What an operator asks for so that drives and nodes can be emptied, replaced, or switched off
// for a while. Cordoned nodes and leaving drives take no new legs; replace.go moves those that
// they have.

// DriveLeave says whether a drive's legs move away, and what follows.
type DriveLeave string

// The ways in which a drive is left.
const (
	LeaveDrain DriveLeave = "DRAIN" // it stays in the cluster, empty
	LeaveEvict DriveLeave = "EVICT" // it is removed once it is empty
)

// shunned says why new legs are not placed on a node; empty if they may be.
func (n *Node) shunned() string {
	switch {
	case n.Draining:
		return "its node is being drained"
	case !n.MaintainedUntil.IsZero():
		return "its node is under maintenance"
	case n.Cordoned:
		return "its node is cordoned"
	}
	return ""
}

// leavingWords are for people.
func (l DriveLeave) words() string {
	return map[DriveLeave]string{LeaveDrain: "being drained", LeaveEvict: "being evicted"}[l]
}

// ---- drives ----

// DrainDrive has the legs of a drive made again elsewhere, and keeps new ones away; Cancel ends
// that, and an eviction that waits for it. Result: Drive.
type DrainDrive struct {
	Drive  block.DriveID
	Cancel bool
}

func (in DrainDrive) apply(t *tx) (view, error) {
	d := t.s.drives[in.Drive]
	if d == nil {
		return nil, notFound("drive " + in.Drive.String())
	}
	if d.State == DriveRemoving {
		return nil, refused(ReasonDriveInUse, d.object(), "being removed")
	}
	want := LeaveDrain
	if in.Cancel {
		want = ""
	} else if err := t.s.movable(d.object(), t.s.legsOn(d.Node, d.ID), t.s.onlyGood); err != nil {
		return nil, err
	}
	if d.Leaving != want {
		t.leaveDrive(d, want)
	}
	return driveResult(d.ID), nil
}

// leaveDrive changes whether a drive's legs move away.
func (t *tx) leaveDrive(d *Drive, how DriveLeave) {
	t.drives.edit(d.ID).Leaving = how
	text := cmp.Or(how.words(), "its legs stay")
	if how != "" {
		text += ": its legs are made again elsewhere"
	}
	t.event(event.Info, event.DriveLeaving, d.object(), text, "node", string(d.Node), "drive", d.ID.String())
	clear(t.s.crowded)
	t.settleDriveVolumes(d)
}

// movable refuses legs that cannot be made again elsewhere: those of volumes of one copy, and those that cannot be
// read, if their columns need them. only reports the latter: it is onlyGood or onlyLeft.
func (s *State) movable(object string, legs map[block.VolumeID][]*Leg, only func(*Volume, *Leg) bool) error {
	for _, id := range sorted(legs) {
		v := s.volumes.Get(id)
		switch {
		case v.State != VolumeReady || v.Restoring != nil:
			return refused(ReasonNotReady, object, "holds legs of %s, which is %s", v.Name, v.unready())
		case v.IsSnapshot():
			if err := s.mayLose(object, v, legs[id], only); err != nil {
				return err
			}
			continue
		case !v.replaceable():
			return refused(ReasonDriveInUse, object, "holds legs of %s, which has a single copy of its data", v.Name).
				hint("a volume of one copy is not moved: copy what it holds to a new volume and delete it")
		}
		for _, l := range legs[id] {
			if !s.servable(l) && only(v, l) {
				return refused(ReasonDriveInUse, object, "%v of %s is the only good copy of its column and cannot be read", l, v.Name).
					hint("`weft explain volume %s` says what can be done", v.Name)
			}
		}
	}
	return nil
}

// settleDrives removes the drives of a node that are to be evicted and are empty.
func (t *tx) settleDrives(node block.NodeName) {
	for _, d := range t.s.recordedDrives(node) {
		if d.Leaving == LeaveEvict {
			t.settleDrive(d)
		}
	}
}

func (t *tx) settleDrive(d *Drive) {
	if now := t.drives.peek(d.ID); now != nil && now.State != DriveRemoving {
		t.removeDrive(now)
	}
}

// lostDrive reports whether a drive's label cannot be erased.
func (t *tx) lostDrive(d *Drive) bool {
	return d.State == DriveMissing || d.State == DriveFailed || t.confirmedDead(d.Node) ||
		d.State == DriveRemoving && t.s.driveError(d) != ""
}

// removeDrive removes a drive that no leg needs, and reports whether it could.
func (t *tx) removeDrive(d *Drive) bool {
	lost := t.lostDrive(d)
	if len(t.s.usersOf(d, !lost)) > 0 {
		return false
	}
	t.setPolicies(t.policies.Evict(drivepolicy.IdentityOf(d.WWID, d.Serial)))
	if lost {
		t.drives.drop(d.ID)
		t.event(event.Info, event.DriveRemoved, d.object(), "removed: its label cannot be erased", "node", string(d.Node), "drive", d.ID.String())
		t.settleNode(d.Node)
		return true
	}
	fresh := t.drives.edit(d.ID)
	fresh.State, fresh.Reason, fresh.RemovedAt = DriveRemoving, "", t.gen
	t.event(event.Info, event.DriveRemoving, d.object(), "its label is being erased", "node", string(d.Node), "drive", d.ID.String())
	return true
}

// ---- nodes ----

// CordonNode keeps new legs away from a node. With Drain, the legs that it has are made again
// elsewhere too. Result: Node.
type CordonNode struct {
	Node  block.NodeName
	Drain bool
}

func (in CordonNode) apply(t *tx) (view, error) {
	n := t.s.nodes[in.Node]
	if n == nil {
		return nil, notFound(nodeObject(in.Node))
	}
	legs := t.s.legsOn(in.Node, block.DriveID{})
	if in.Drain {
		if err := t.s.movable(nodeObject(in.Node), legs, t.s.onlyGood); err != nil {
			return nil, err
		}
	}
	if n.Cordoned && (n.Draining || !in.Drain) {
		return nodeResult(in.Node), nil
	}
	text := "it takes no new legs"
	n = t.node(in.Node)
	n.Cordoned, n.Draining = true, n.Draining || in.Drain
	if in.Drain {
		text += ", and those that it has are made again elsewhere"
		clear(t.s.crowded)
		for id := range legs {
			t.unsure[id] = true
		}
	}
	t.event(event.Info, event.NodeCordoned, nodeObject(in.Node), text, "node", string(in.Node))
	return nodeResult(in.Node), nil
}

// UncordonNode ends a cordon, a drain and a maintenance. Result: Node.
type UncordonNode struct{ Node block.NodeName }

func (in UncordonNode) apply(t *tx) (view, error) {
	n := t.s.nodes[in.Node]
	if n == nil {
		return nil, notFound(nodeObject(in.Node))
	}
	if n.shunned() != "" {
		t.endMaintenance(in.Node, "it takes legs again")
		n = t.node(in.Node)
		n.Cordoned, n.Draining = false, false
	}
	return nodeResult(in.Node), nil
}

func (t *tx) endMaintenance(name block.NodeName, why string) {
	t.node(name).MaintainedUntil = time.Time{}
	t.event(event.Info, event.NodeUncordoned, nodeObject(name), why, "node", string(name))
	t.settleNode(name)
	t.settleUsersOf(name)
}

// backFromMaintenance ends the maintenance of a node whose target was away and reports again.
func (t *tx) backFromMaintenance(name block.NodeName, on *target) {
	if n := t.nodes.peek(name); !n.MaintainedUntil.IsZero() && !on.status.Seen.IsZero() {
		t.endMaintenance(name, "its target is back: its maintenance is over")
	}
}

// longestMaintenance bounds how long the legs of a node may stay away unreplaced.
const longestMaintenance = 24 * time.Hour

// MaintainNode announces that a node is switched off for a while. Its legs that hosts use become
// stale now, so that no write waits for them when the node stops, and nothing on it is made again
// elsewhere before the time is over. It is refused if a volume in use cannot do without the node,
// unless Force is set. The maintenance ends when the time is over, when the node's target is back
// after it was away, or with UncordonNode. Result: Node.
type MaintainNode struct {
	Node  block.NodeName
	For   time.Duration
	Force bool
}

func (in MaintainNode) apply(t *tx) (view, error) {
	if t.s.nodes[in.Node] == nil {
		return nil, notFound(nodeObject(in.Node))
	}
	if in.For <= 0 || in.For > longestMaintenance {
		return nil, invalid("for", "%v: must be positive and at most %v", in.For, longestMaintenance)
	}
	if needed := t.s.Dependents(in.Node); len(needed) > 0 && !in.Force {
		return nil, refused(ReasonNodeInUse, nodeObject(in.Node), "volumes in use would stop without it: %s", some(needed, 8)).
			hint("wait until other copies are in sync, and detach volumes of a single copy; with --force their I/O waits while the node is off")
	}
	until := t.now.UTC().Add(in.For)
	t.node(in.Node).MaintainedUntil = until
	t.event(event.Info, event.NodeMaintained, nodeObject(in.Node), fmt.Sprintf("under maintenance until %s: its legs are left out and not made again elsewhere", until.Format(time.RFC3339)), "node", string(in.Node))
	t.settleUsersOf(in.Node)
	return nodeResult(in.Node), nil
}

// Dependents names the volumes in use that cannot be served without some nodes, each with the reason.
func (s *State) Dependents(nodes ...block.NodeName) (names []string) {
	affected := map[block.VolumeID]bool{}
	for _, node := range nodes {
		for id := range s.legsOn(node, block.DriveID{}) {
			affected[id] = true
		}
	}
	for _, id := range sorted(affected) {
		v := s.volumes.Get(id)
		if !v.open() || s.doesWithout(v, nodes) {
			continue
		}
		why := "no other copy is in sync"
		if v.Layout.Group().Members == 1 {
			why = "a single copy"
		} else if s.doesWith(v, nodes, s.serving(v)) {
			why = "the other copies are in damaged trees and take no writes"
		}
		names = append(names, fmt.Sprintf("%s (%s)", v.Name, why))
	}
	return names
}

// doesWithout reports whether each column that has a good leg on some nodes can be read and written with its other
// legs that are served now.
func (s *State) doesWithout(v *Volume, nodes []block.NodeName) bool {
	return s.doesWith(v, nodes, s.sound(v))
}

// doesWith reports whether each column that has a good leg on some nodes can be read from those others that serve.
func (s *State) doesWith(v *Volume, nodes []block.NodeName, serving []block.MemberSet) bool {
	depends := map[int]bool{}
	for _, l := range v.Legs {
		if l.trusted() && slices.Contains(nodes, l.Node) {
			depends[l.Column] = true
			serving[l.Column] = serving[l.Column].Without(l.Copy)
		}
	}
	for column := range depends {
		if !v.Layout.Group().Readable(serving[column]) {
			return false
		}
	}
	return true
}

// settleUsersOf settles the volumes in use with a leg on a node that hosts write.
func (t *tx) settleUsersOf(node block.NodeName) {
	for id := range t.s.onNode.Get(node).Keys() {
		if v := t.peek(id); v != nil && v.Attachment != nil && v.open() && slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.Node == node && l.exported() }) {
			t.unsure[id] = true
		}
	}
}

// leftOut says why hosts are to leave out a leg, if they can do without it; empty if they are not. n is the
// record of its node, which may be nil.
func (s *State) leftOut(v *Volume, l *Leg, n *Node) string {
	switch {
	case n != nil && !n.MaintainedUntil.IsZero():
		return "its node is under maintenance"
	case s.stopsLegs(v, l.Node, n):
		return "its target was about to stop"
	}
	return ""
}

// leftOutUntil says what ends that; empty if it is not so.
func (s *State) leftOutUntil(v *Volume, l *Leg) string {
	switch n := s.nodes[l.Node]; {
	case n != nil && !n.MaintainedUntil.IsZero():
		return fmt.Sprintf("the end of the maintenance of %s, at %s at the latest", n.Name, n.MaintainedUntil.Format(time.RFC3339))
	case s.stopsLegs(v, l.Node, n):
		return fmt.Sprintf("target %s, which is stopping, to be back", l.Node)
	}
	return ""
}

// settleLeftOut returns the healthy legs, with the reasons, that a volume's host is to leave out
// because their nodes are under maintenance or their targets stop, and that it can do without. The
// host has them recorded stale once another copy has everything that was acknowledged on its medium:
// only the host knows that the others answer, and can flush their drives' caches. A leg that is
// being rebuilt on such a node is recorded stale at once.
func (t *tx) settleLeftOut(id block.VolumeID) (ask map[block.LegID]string) {
	ask = map[block.LegID]string{}
	v := t.peek(id)
	if v.State != VolumeReady || v.Attachment == nil || !v.open() {
		return ask
	}
	var serving []block.MemberSet // looked up once it is needed
	for _, l := range v.Legs {
		why := t.s.leftOut(v, &l, t.nodes.peek(l.Node))
		if why == "" || !l.member() {
			continue
		}
		if l.State == LegRebuilding {
			t.stale(t.volume(id), l.ID, event.LegStale, why)
			t.drain(t.volume(id), l.ID)
			continue
		}
		if serving == nil {
			serving = t.s.sound(v)
		}
		if without := serving[l.Column].Without(l.Copy); l.trusted() && v.Layout.Group().Readable(without) {
			serving[l.Column] = without
			ask[l.ID] = why
		}
	}
	return ask
}

// settleAsked asks a volume's host to leave out some legs, and no others.
func (t *tx) settleAsked(id block.VolumeID, ask map[block.LegID]string) {
	switch {
	case maps.Equal(t.s.asked[id], ask):
		return
	case len(ask) == 0:
		delete(t.s.asked, id)
	default:
		t.s.asked[id] = ask
	}
	t.retold[id] = true
}

// hostDecides reports whether a leg may be given up only when the volume's host has left it out:
// it has the leg in use, and only one other copy to rely on.
func (t *tx) hostDecides(v *Volume, l *Leg) bool {
	return l.trusted() && v.Attachment != nil && v.open() && t.others(v, l) < 2
}

// wakeAsked wakes the hosts that are asked to leave out other legs than before.
func (t *tx) wakeAsked(wake woken) {
	for id := range t.retold {
		if v := t.s.volumes.Get(id); v != nil {
			wake.hosts(v)
		}
	}
}

// stopWaits says what has to happen before a node under maintenance can be stopped without a
// pause of I/O: hosts have to leave its stale legs out. stops names the volumes whose I/O waits
// all the same while the node is off. Both are empty of a node that is not under maintenance, and
// waits of one whose target has stopped.
func (s *State) stopWaits(n *Node) (waits, stops []string) {
	if n.MaintainedUntil.IsZero() {
		return nil, nil
	}
	return s.stillUsing(n.Name), s.Dependents(n.Name)
}

// stillUsing lists the legs of a target that hosts are to leave out and have not yet; none of one
// that has stopped.
func (s *State) stillUsing(node block.NodeName) (waits []string) {
	if !s.targetOnline(node) {
		return nil
	}
	legs := s.legsOn(node, block.DriveID{})
	n := s.nodes[node]
	for _, id := range sorted(legs) {
		v := s.volumes.Get(id)
		if s.stopping[node].process && !v.inProcess(n) && (n == nil || n.MaintainedUntil.IsZero()) {
			continue // the kernel goes on
		}
		for _, l := range legs[id] {
			for _, a := range v.attachments() {
				if s.uses(v, l, a) && a.handedOut() && !a.Stock { // a stock host reports nothing, and uses the leg in sync
					waits = append(waits, fmt.Sprintf("host %s to leave out %v of %s", a.Node, l, v.object()))
				}
			}
		}
	}
	return waits
}

// uses reports whether a host may still use a leg that it is to leave out.
func (s *State) uses(v *Volume, l *Leg, a *Attachment) bool {
	on := s.initiators[a.Node]
	return l.State == LegStale && (v.drains(l) || on == nil || on.status.Generation < l.StaleAt) || s.asked[v.ID][l.ID] != ""
}

// settleMaintenance ends the maintenances whose time is over. The others may find legs that are
// no longer needed.
func (t *tx) settleMaintenance() {
	for _, name := range t.s.maintained() {
		if !t.now.Before(t.nodes.peek(name).MaintainedUntil) {
			t.endMaintenance(name, "the time of its maintenance is over")
			continue
		}
		t.settleUsersOf(name)
	}
	for name := range t.s.stopping {
		t.settleUsersOf(name)
	}
}

// ---- targets that stop ----

// A target whose exports are about to end says so in its reports. Until it is gone its legs are
// treated like those of a node under maintenance. No record holds that: it ends with the target's
// stream, with the first report of the next process, and after stopAtMost.

// stopAtMost bounds how long a target that stops is treated so. It stops within seconds, whatever
// it is told; one that still reports by then is stuck, and its legs are worth more than its word.
const stopAtMost = 30 * time.Second

// stop is what is known of a target that stops.
type stop struct {
	since   time.Time
	process bool // the kernel's exports stay; those of the agent's process end
	may     bool // it is told that it may
}

// stops reports whether a target is about to stop.
func (s *State) stops(name block.NodeName) bool {
	told, ok := s.stopping[name]
	return ok && s.now.Sub(told.since) < stopAtMost
}

// stopsLegs reports whether the exports of a volume's legs on a node are about to end. n is its record, which
// may be nil.
func (s *State) stopsLegs(v *Volume, name block.NodeName, n *Node) bool {
	return s.stops(name) && (!s.stopping[name].process || v.inProcess(n))
}

// stopSaid notes whether a target's newest report says that it stops.
func (t *tx) stopSaid(r *TargetReport) {
	told, known := t.s.stopping[r.Node]
	stops := r.Stopping || r.ProcessStops
	switch {
	case known && !stops:
		t.stopEnded(r.Node)
	case r.Stopping && told.process: // the machine stops now
		t.s.stopping[r.Node] = stop{since: t.now}
		t.settleUsersOf(r.Node)
	case stops && !known:
		t.s.stopping[r.Node] = stop{since: t.now, process: !r.Stopping}
		t.s.fields = nil
		which := "its legs"
		if !r.Stopping {
			which = "those of its legs that it serves itself, and not the kernel,"
		}
		t.event(event.Info, event.TargetStopping, nodeObject(r.Node), fmt.Sprintf("its target agent is stopping: hosts leave out %s that they can do without", which), "node", string(r.Node))
		t.settleUsersOf(r.Node)
	}
}

// stopEnded forgets that a target was about to stop: it is gone, or another process reports.
func (t *tx) stopEnded(name block.NodeName) {
	if _, known := t.s.stopping[name]; known {
		delete(t.s.stopping, name)
		t.s.fields = nil
		t.settleUsersOf(name)
	}
}

// wakeStopping wakes the targets that may stop now, since no host uses their stale legs any more,
// and those that may not any more. The changes of the step must be in the state already.
func (t *tx) wakeStopping(wake woken) {
	for name, told := range t.s.stopping {
		may := t.s.stops(name) && len(t.s.stillUsing(name)) == 0
		if may != told.may {
			told.may = may
			t.s.stopping[name] = told
			wake.head(name)
		}
	}
}

// ---- legs ----

// MoveLeg has one leg made again elsewhere, on a node if one is named. Result: Volume.
type MoveLeg struct {
	Volume string
	Column int
	Copy   int
	To     block.NodeName
}

func (in MoveLeg) apply(t *tx) (view, error) {
	v, err := t.s.find(in.Volume)
	if err != nil {
		return nil, err
	}
	if !v.usable() {
		return nil, refused(ReasonNotReady, v.object(), "%s", v.unready())
	}
	if v.IsSnapshot() {
		return nil, refused(ReasonNotReady, v.object(), "a target copies legs of snapshots to another drive only when they have to leave theirs").
			hint("`weft drive drain DRIVE` empties a drive, snapshots included")
	}
	if in.To != "" && t.s.nodes[in.To] == nil {
		return nil, notFound(nodeObject(in.To))
	}
	leg := v.legAt(in.Column, in.Copy)
	if leg == nil {
		return nil, notFound(fmt.Sprintf("leg %d.%d of %s", in.Column, in.Copy, v.object()))
	}
	if err := t.s.movable(v.object(), map[block.VolumeID][]*Leg{v.ID: {leg}}, t.s.onlyGood); err != nil {
		return nil, err
	}
	if leg.Leave {
		return volumeResult(v.ID), nil
	}
	if len(v.column(in.Column)) > v.Layout.Group().Members {
		if in.To == "" && t.s.leaving(leg) != "" {
			return volumeResult(v.ID), nil // it is being made again elsewhere as it is
		}
		return nil, refused(ReasonNotReady, v.object(), "another leg of column %d is being moved", in.Column).
			hint("wait until `weft explain volume %s` no longer shows it", v.Name)
	}
	t.volume(v.ID).leg(leg.ID).Leave = true
	delete(t.s.crowded, v.ID)
	if err := t.addLeg(v.ID, in.Column, in.To); err != nil {
		return nil, err
	}
	return volumeResult(v.ID), nil
}

// ---- how many copies ----

// A volume gets more copies as it gets a copy again elsewhere: new legs, blank and stale, are
// placed and copied. It gets fewer by giving up legs in good order. A host that has the volume
// has made room for as many legs as the layout of its grant has slots; see Attachment.Copies.

// setCopies changes how many copies a volume has. All legs are placed, or none.
func (t *tx) setCopies(v *Volume, copies int) error {
	if v.IsSnapshot() {
		return v.neverChanges()
	}
	if copies == v.Layout.Copies {
		return nil
	}
	next := v.Layout
	next.Copies = copies
	if err := t.s.mayHave(v, next); err != nil {
		return err
	}
	was := v.Layout
	fresh := t.volume(v.ID)
	t.endHealing(fresh, "its number of copies changes")
	if a := fresh.Attachment; a != nil {
		a.Copies = cmp.Or(a.Copies, was.Copies)
	}
	fresh.Generation++
	fresh.Layout = next
	delete(t.s.crowded, v.ID)
	t.volumeEvent(v, event.Info, event.VolumeUpdated, fmt.Sprintf("copies: %d, before %d", copies, was.Copies))
	for column := range next.Stripes {
		for range copies - was.Copies {
			if err := t.addLeg(v.ID, column, ""); err != nil {
				delete(t.s.crowded, v.ID)
				return err
			}
		}
		if copies < was.Copies {
			t.keepOnly(v.ID, column)
		}
	}
	if d := t.s.lacksRoom(v, t.peek(v.ID)); d != nil {
		return t.s.labelFull(v, d, block.PropertyCopies.Field)
	}
	return nil
}

// mayHave refuses a number of copies that a volume cannot have now.
func (s *State) mayHave(v *Volume, next block.Layout) error {
	copies := next.Copies
	switch {
	case v.Layout.Kind() != block.Mirror:
		return &Error{Kind: Unimplemented, Object: v.object(), Text: fmt.Sprintf("%s: columns of %v have no copies", v.object(), v.Layout.Group())}
	case !block.PropertyCopies.Allows(copies):
		return invalid(block.PropertyCopies.Field, "%d: must be %s", copies, block.PropertyCopies.Bounds())
	case !v.usable():
		return refused(ReasonNotReady, v.object(), "%s", v.unready())
	case v.ExpandingTo != 0:
		return refused(ReasonNotReady, v.object(), "it is being expanded").hint("wait until `weft explain volume %s` no longer shows it", v.Name)
	case len(v.Shared) > 0:
		return refused(ReasonAttached, v.object(), "shared by %s: its copies can be changed while one host has it alone, or none", v.users()).
			hint("`weft detach %s` first", v.Name)
	case v.Attachment != nil && copies > v.Attachment.layout(v).Slots():
		return refused(ReasonAttached, v.object(), "attached to %s, which was granted it with %s and has no room for %d", v.users(), v.Attachment.layout(v).Group(), copies).
			hint("`weft detach %s` first; it can be attached again at once", v.Name)
	}
	for column, legs := range v.columns() {
		if len(legs) != v.Layout.Copies {
			return refused(ReasonNotReady, v.object(), "a leg of column %d is being moved or made again", column).
				hint("wait until `weft explain volume %s` no longer shows it", v.Name)
		}
		if good := len(s.keepers(legs, next)); good < copies && copies < v.Layout.Copies {
			return refused(ReasonNotReady, v.object(), "column %d would keep %d good copies: of the %d that can stay, %d are in sync and can be reached",
				column, good, slotted(legs, next), good).
				hint("wait until all copies are in sync; if they are, `weft leg move` gives a leg with a high number a lower one")
		}
	}
	return nil
}

// columns lists the legs of each column, without those that were made again elsewhere.
func (v *Volume) columns() (all [][]*Leg) {
	for c := range v.Layout.Stripes {
		all = append(all, v.column(c))
	}
	return all
}

// slotted counts the legs that have a slot in a layout.
func slotted(legs []*Leg, layout block.Layout) (n int) {
	for _, l := range legs {
		if l.Copy < layout.Slots() {
			n++
		}
	}
	return n
}

// keepers are the legs that a layout with fewer copies keeps: the first that are in sync, can be
// served, are in no damaged tree, and have a slot in it.
func (s *State) keepers(legs []*Leg, layout block.Layout) (keep []*Leg) {
	for _, l := range legs {
		if len(keep) < layout.Copies && l.Copy < layout.Slots() && l.trusted() && s.servable(l) && s.damage(l).Damage == "" {
			keep = append(keep, l)
		}
	}
	return keep
}

// keepOnly gives up the legs of a column that its volume's layout does not keep; where the host
// decides, once it has left them out.
func (t *tx) keepOnly(id block.VolumeID, column int) {
	v := t.volume(id)
	keep := map[block.LegID]bool{}
	for _, l := range t.s.keepers(v.column(column), v.Layout) {
		keep[l.ID] = true
	}
	var rest []block.LegID
	for _, l := range v.column(column) {
		if !keep[l.ID] {
			rest = append(rest, l.ID)
		}
	}
	for _, leg := range rest {
		if !t.hostDecides(v, v.leg(leg)) {
			t.retire(v, leg, "the volume has fewer copies now")
		}
	}
}

// slots is how many legs a column can have now: as many as the layout allows, and as the host
// that has the volume has made room for.
func (v *Volume) slots() int {
	n := v.Layout.Slots()
	if v.Attachment != nil {
		n = min(n, v.Attachment.layout(v).Slots())
	}
	return n
}

// layout is the volume's layout as the host was granted it.
func (a *Attachment) layout(v *Volume) block.Layout {
	layout := v.Layout
	layout.Copies = cmp.Or(a.Copies, layout.Copies)
	return layout
}

// ---- rebalancing ----

// Legs of a pool move from its fullest drives to its emptiest ones while an operator wants that:
// package rebalance chooses them, and replace.go moves them as any other leg, so redundancy never
// drops. Only volumes in good order move, one leg of each at a time: a leg of a detached volume could
// not be copied.

const (
	rebalanceLook  = 10 * time.Second
	mostRebalanced = 2    // moves at a time in a pool
	mostPlanned    = 1000 // moves of a plan
	mostRefused    = 32   // moves that are tried in vain in one look
)

// Rebalance is the rebalancing of a pool; it is never changed in place.
type Rebalance struct {
	Began    time.Time `json:"began"`
	Ended    time.Time `json:"ended,omitzero"` // zero: it is under way
	Stopped  bool      `json:"stopped,omitempty"`
	MaxMoves int       `json:"max_moves,omitempty"` // 0: as many as it takes
	Moves    int       `json:"moves,omitempty"`     // begun

	Moving int `json:"-"` // derived, for readers: legs that are being moved
}

func (r *Rebalance) active() bool { return r != nil && r.Ended.IsZero() }

// RebalancePool begins to rebalance a pool, with MaxMoves moves at most unless that is 0, or stops
// that. Result: Pool.
type RebalancePool struct {
	Pool     string
	Stop     bool
	MaxMoves int
}

func (in RebalancePool) apply(t *tx) (view, error) {
	p := t.s.pools[in.Pool]
	switch {
	case p == nil:
		return nil, noPool(in.Pool)
	case in.Stop && in.MaxMoves > 0:
		return nil, invalid("stop", "cannot be asked for together with max_moves")
	case in.Stop && p.Rebalance.active():
		t.stopRebalance(p)
	case in.Stop: // repeated
	case p.Rebalance.active():
		next := *p.Rebalance
		next.MaxMoves = in.MaxMoves
		t.pools.edit(p.Name).Rebalance = &next
	default:
		t.pools.edit(p.Name).Rebalance = &Rebalance{Began: t.now.UTC(), MaxMoves: in.MaxMoves}
		t.event(event.Info, event.PoolRebalancing, "pool "+p.Name, "legs move from its fullest drives to its emptiest ones")
		t.s.lookedRebalance = time.Time{}
	}
	return poolResult(in.Pool), nil
}

// settleRebalances begins the next moves.
func (t *tx) settleRebalances() {
	s := t.s
	if t.now.Sub(s.lookedRebalance) < rebalanceLook {
		return
	}
	s.lookedRebalance = t.now
	for _, name := range slices.Sorted(maps.Keys(s.pools)) {
		if p := t.pools.peek(name); p != nil && p.Rebalance.active() {
			t.rebalance(p)
		}
	}
}

func (t *tx) rebalance(p *Pool) {
	next := *p.Rebalance
	moving, away := 0, 0
	for _, at := range t.s.rebalanced(p, t.peek) {
		switch {
		case t.s.noCopier(at.volume) == "":
			moving++
		case at.begun():
			away++ // it goes on when a host has the volume again, and nothing waits for that
		default:
			t.stays(at)
			next.Moves--
		}
	}
	b := t.s.balancer(p, t.peek, t.lookup())
	for moving < mostRebalanced && (next.MaxMoves == 0 || next.Moves < next.MaxMoves) {
		m, ok := b.next()
		if !ok || len(b.refused) > mostRefused {
			break
		}
		if !t.moveTo(m) {
			b.refused[m] = true
			continue
		}
		moving++
		next.Moves++
		b = t.s.balancer(p, t.peek, t.lookup())
	}
	if moving+away == 0 {
		t.endRebalance(p, next, false)
		return
	}
	if next != *p.Rebalance {
		t.pools.edit(p.Name).Rebalance = &next
	}
}

// moveTo has a leg made again on a drive. It reports whether there is room for it.
func (t *tx) moveTo(m rebalance.Move) bool {
	v := t.volume(m.Leg.Volume)
	l := v.leg(m.Leg.ID)
	column := l.Column
	l.Leave, l.Rebalanced = true, true
	delete(t.s.crowded, v.ID)
	at := t.lookup()
	at.only = m.To
	if err := t.addLegAt(v.ID, column, "", at); err != nil {
		l = t.volume(m.Leg.Volume).leg(m.Leg.ID)
		l.Leave, l.Rebalanced = false, false
		delete(t.s.crowded, v.ID)
		return false
	}
	return true
}

// stopRebalance ends a rebalancing. A leg whose copy has begun still moves, any other stays.
func (t *tx) stopRebalance(p *Pool) {
	for _, at := range t.s.rebalanced(p, t.peek) {
		if !at.begun() {
			t.stays(at)
		}
	}
	t.endRebalance(p, *p.Rebalance, true)
}

func (t *tx) endRebalance(p *Pool, next Rebalance, stopped bool) {
	next.Ended, next.Stopped = t.now.UTC(), stopped
	t.pools.edit(p.Name).Rebalance = &next
	text := fmt.Sprintf("%s moved; volumes that are detached or not in good order were left out", plural(next.Moves, "leg"))
	if stopped {
		text = fmt.Sprintf("stopped after the begin of %s", plural(next.Moves, "move"))
	}
	t.event(event.Info, event.PoolRebalanced, "pool "+p.Name, text)
}

// legOf is a leg and its volume.
type legOf struct {
	volume *Volume
	leg    *Leg
}

// begun reports whether a leg that moves is being copied.
func (at legOf) begun() bool {
	return slices.ContainsFunc(at.volume.column(at.leg.Column), func(l *Leg) bool { return l.Blank && l.State == LegRebuilding })
}

// stays takes a move back.
func (t *tx) stays(at legOf) {
	l := t.volume(at.volume.ID).leg(at.leg.ID)
	l.Leave, l.Rebalanced = false, false
}

// rebalanced lists the legs of a pool that are being moved to rebalance it.
func (s *State) rebalanced(p *Pool, volume func(block.VolumeID) *Volume) (all []legOf) {
	for id := range s.volumes.All() {
		v := volume(id)
		if v == nil || v.Pool != p.Name {
			continue
		}
		for i := range v.Legs {
			if l := &v.Legs[i]; l.Rebalanced && l.Leave {
				all = append(all, legOf{v, l})
			}
		}
	}
	return all
}

// settled reports whether a volume is attached and all its legs are in sync and stay.
func (s *State) settled(v *Volume) bool {
	if v.State != VolumeReady || !v.replaceable() || v.ExpandingTo != 0 || s.noCopier(v) != "" {
		return false
	}
	return !slices.ContainsFunc(v.Legs, func(l Leg) bool { return !l.trusted() || !l.member() || s.leaving(&l) != "" })
}

// balancer finds moves for a pool.
type balancer struct {
	s       *State
	pool    *Pool
	volume  func(block.VolumeID) *Volume
	at      lookup
	drives  []rebalance.Drive
	legs    []rebalance.Leg
	refused map[rebalance.Move]bool
	usable  map[string]map[block.DriveID]*placement.Drive // by spread
	tried   int
}

// mostTried is how many pairs of a leg and a drive are tried in one look, some microseconds each:
// everything else waits meanwhile.
const mostTried = 20_000

func (s *State) balancer(p *Pool, volume func(block.VolumeID) *Volume, at lookup) *balancer {
	b := &balancer{s: s, pool: p, volume: volume, at: at, refused: map[rebalance.Move]bool{}, usable: map[string]map[block.DriveID]*placement.Drive{}}
	used := map[block.DriveID]uint32{}
	for id := range s.volumes.All() {
		v := volume(id)
		if v == nil {
			continue
		}
		mine := v.Pool == p.Name && s.settled(v)
		for i := range v.Legs {
			l := &v.Legs[i]
			if !l.member() || l.Leave {
				continue // its space is about to be free
			}
			used[l.Drive] += image.Count(l.Extents)
			if mine {
				b.legs = append(b.legs, rebalance.Leg{Volume: id, ID: l.ID, Drive: l.Drive, Extents: image.Count(l.Extents)})
			}
		}
	}
	for id, x := range b.drivesFor(block.DefaultSpread) {
		b.drives = append(b.drives, rebalance.Drive{ID: id, Extents: x.Extents, Used: used[id]})
	}
	return b
}

// drivesFor are the drives that volumes of a spread can be placed on.
func (b *balancer) drivesFor(spread string) map[block.DriveID]*placement.Drive {
	all, ok := b.usable[spread]
	if !ok {
		some, _ := b.s.candidates(b.pool, CreateVolume{Spread: spread})
		all = map[block.DriveID]*placement.Drive{}
		for _, x := range some {
			all[x.ID] = x
		}
		b.usable[spread] = all
	}
	return all
}

// next is the next move.
func (b *balancer) next() (rebalance.Move, bool) { return rebalance.Next(b.drives, b.legs, b.fits) }

// fits reports whether a leg may be on a drive, by the rules of placement.
func (b *balancer) fits(l rebalance.Leg, to block.DriveID) bool {
	if b.tried++; b.tried > mostTried {
		return false
	}
	v := b.volume(l.Volume)
	x := b.drivesFor(v.Spread)[to]
	if x == nil || b.refused[rebalance.Move{Leg: l, To: to}] || x.Free() < l.Extents || x.Room < v.legRecord() {
		return false
	}
	v = v.clone()
	v.leg(l.ID).Leave = true
	return v.noSlot(v.leg(l.ID).Column) == nil && b.s.unfit(v, v.leg(l.ID).Column, "", x, b.at) == ""
}

// PlannedMove is a leg that would move to another drive.
type PlannedMove struct {
	Volume       block.VolumeName
	Column, Copy int
	Size         block.Size
	From, To     block.DriveID
	FromNode     block.NodeName
	ToNode       block.NodeName
}

// PlanRebalance lists the moves that would rebalance a pool as things are now, at most so many
// unless that is 0. It changes nothing.
func (s *State) PlanRebalance(pool string, most int) (plan []PlannedMove, err error) {
	p := s.pools[pool]
	if p == nil {
		return nil, noPool(pool)
	}
	changed := map[block.VolumeID]*Volume{}
	volume := func(id block.VolumeID) *Volume {
		if v := changed[id]; v != nil {
			return v
		}
		return s.volumes.Get(id)
	}
	if most == 0 || most > mostPlanned {
		most = mostPlanned
	}
	b := s.balancer(p, volume, s.lookup())
	for len(plan) < most {
		m, ok := b.next()
		if !ok {
			break
		}
		v := volume(m.Leg.Volume).clone()
		l, to := v.leg(m.Leg.ID), s.drives[m.To]
		plan = append(plan, PlannedMove{v.Name, l.Column, l.Copy, block.Size(m.Leg.Extents) * block.ExtentSize, l.Drive, m.To, l.Node, to.Node})
		l.Drive, l.Node = to.ID, to.Node
		changed[v.ID] = v
		b = s.balancer(p, volume, s.lookup())
	}
	return plan, nil
}

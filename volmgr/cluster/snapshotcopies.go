// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/evidence"
	"weft.dev/weft/volmgr/image"
	"weft.dev/weft/volmgr/placement"
)

// A leg of a volume that was away while a snapshot was taken has no copy of it, a leg that was made again
// elsewhere has none of any, and copies leave drives that are lost, drained or evicted. The target of
// another drive makes the missing copy from one that is left, in these steps. Each is durable before the
// next:
//
//	beginCopy       the record: a new leg of the snapshot, blank and stale
//	targets         the source exports its leg, read-only, to the target of the new one; that makes a layer
//	                which begins as the nearest earlier snapshot that both trees have, copies what differs,
//	                freezes the layer, and records on the label that the leg is prepared
//	settleCopying   the record: the leg is in sync
//	settleColumn    a leg that leaves is given up, now that the column has enough without it
//
// So a column never has fewer legs in sync than before, and a part of a copy is never taken for whole. The
// oldest snapshot comes first, so each has the one before it to begin as. A node makes one copy at a time.
// If what is copied or begun as is lost meanwhile, the leg is freed, and a new one begins anew.
//
// The new leg is in the tree of a leg of the volume, where later snapshots will share data with it; else
// in that of another of the volume's snapshots; else in a tree of its own. A tree over a plain leg (see
// space.go) takes none: it would keep that leg from being plain again. What is in one can be copied.

// LegCopy says of what a leg of a snapshot is copied.
type LegCopy struct {
	From  block.LegID    `json:"from"`           // of the same snapshot
	Of    block.VolumeID `json:"of,omitzero"`    // the earlier snapshot as which it begins; zero: none
	Base  block.LegID    `json:"base,omitzero"`  // the leg of that in the new leg's tree
	Since block.LegID    `json:"since,omitzero"` // and in the source's
	Began time.Time      `json:"began,omitzero"`
}

// copiesFrom reports whether another leg of a snapshot is being copied from one.
func (v *Volume) copiesFrom(l *Leg) bool {
	return slices.ContainsFunc(v.Legs, func(o Leg) bool { return o.Copying != nil && o.Copying.From == l.ID })
}

const (
	// copiesLook is how often noteCopies looks.
	copiesLook = 5 * time.Second
	// A copy that has failed for copyFails is given up, so that others of its node have their turn, and
	// begun anew, perhaps from another source, after copyAgain.
	copyFails = time.Minute
	copyAgain = 3 * time.Minute
	// placeAgain is how soon a source and a place are looked for again if there was none.
	placeAgain = 15 * time.Second
)

// columnOf is a column of a volume.
type columnOf struct {
	volume block.VolumeID
	column int
}

// uncopied says why a column of a snapshot has not been copied, since when that is so, when it is tried again,
// and the drives and sources with which it has failed: others have their turn first. The map does not change.
type uncopied struct {
	why          string
	since, until time.Time
	failed       map[block.UUID]bool
}

// noteUncopied notes why a column is not copied for some time.
func (t *tx) noteUncopied(v *Volume, column int, why string, wait time.Duration) {
	key := columnOf{v.ID, column}
	was := t.s.uncopied[key]
	if was.why != why {
		was.since = t.now
	}
	t.s.uncopied[key] = uncopied{why, was.since, t.now.Add(wait), was.failed}
}

// noteUnfreed notes that a column is not copied to a drive before a leg that it had there, as of an attempt
// that failed, is freed: else legs without number would gather where none is freed. After copyAgain, other
// drives are tried.
func (t *tx) noteUnfreed(v *Volume, l *Leg) {
	key := columnOf{v.ID, l.Column}
	t.noteUncopied(v, l.Column, fmt.Sprintf("%v, of an earlier attempt, is to be freed on %s before (leg %v)", l, l.Node, l.ID), placeAgain)
	if now := t.s.uncopied[key]; t.now.Sub(now.since) >= copyAgain {
		now.failed = withFailed(now.failed, l.Drive.UUID)
		t.s.uncopied[key] = now
	}
}

// withFailed returns what failed before, and what fails now.
func withFailed(before map[block.UUID]bool, now ...block.UUID) map[block.UUID]bool {
	failed := map[block.UUID]bool{}
	maps.Copy(failed, before)
	for _, id := range now {
		failed[id] = true
	}
	return failed
}

// unfreed is a leg of a column on a drive that is to be freed; nil if there is none.
func (v *Volume) unfreed(column int, drive block.DriveID) *Leg {
	i := slices.IndexFunc(v.Legs, func(l Leg) bool { return l.Column == column && l.Drive == drive && !l.member() })
	if i < 0 {
		return nil
	}
	return &v.Legs[i]
}

// noteFailure notes that a leg could not be copied. A source that cannot be reached says nothing about the drive.
func (t *tx) noteFailure(v *Volume, l *Leg, why string) {
	key := columnOf{v.ID, l.Column}
	failed := withFailed(t.s.uncopied[key].failed, l.Copying.From.UUID)
	if from := v.leg(l.Copying.From); from != nil && t.s.servable(from) {
		failed[l.Drive.UUID] = true
	}
	t.s.uncopied[key] = uncopied{"the last attempt failed: " + why, t.now, t.now.Add(copyAgain), failed}
}

// noteCopies begins to copy snapshots that lack copies, the oldest first.
func (t *tx) noteCopies() {
	if t.level < copiesLevel || t.now.Sub(t.s.lookedAtCopies) < copiesLook {
		return
	}
	t.s.lookedAtCopies = t.now
	t.settleStrays()
	look := t.newCopyLook()
	for _, id := range t.lacking() {
		for c := range t.peek(id).Layout.Stripes {
			if t.lacksCopy(t.peek(id), c) {
				t.beginCopy(id, c, look)
			}
		}
	}
}

// copyLook is what one look at the snapshots that lack copies finds: there may be thousands, so it looks at
// the trees of a volume once.
type copyLook struct {
	busy  map[string]bool // the nodes and drives that copy
	trees map[columnOf][]Leg
}

func (t *tx) newCopyLook() *copyLook {
	return &copyLook{t.copying(), map[columnOf][]Leg{}}
}

// lacking returns the snapshots that may lack copies, the oldest first.
func (t *tx) lacking() (ids []block.VolumeID) {
	all := map[block.VolumeID]bool{}
	maps.Copy(all, t.s.fewer)
	for _, d := range t.s.drives {
		if n := t.nodes.peek(d.Node); n == nil || !t.parts(d, n) {
			continue
		}
		for id := range t.s.onNode.Get(d.Node).Keys() {
			all[id] = true
		}
	}
	var lack []*Volume
	for _, id := range sorted(all) {
		if v := t.peek(id); v != nil && v.IsSnapshot() && v.usable() {
			lack = append(lack, v)
		}
	}
	slices.SortStableFunc(lack, func(a, b *Volume) int { return a.Snapshot.Taken.Compare(b.Snapshot.Taken) })
	for _, v := range lack {
		ids = append(ids, v.ID)
	}
	return ids
}

// parts reports whether legs on a drive leave it, or some of them may.
func (t *tx) parts(d *Drive, n *Node) bool {
	left, away := t.s.awayLeft(d.ID)
	return d.Leaving != "" || n.Draining || n.ConfirmedDead || away && left <= 0 || t.s.damagedAt(d.Node)
}

// fewer reports whether a snapshot has fewer legs than it is to have.
func (v *Volume) fewer() bool { return v.IsSnapshot() && v.usable() && v.lacksLegs() }

// lacksCopy reports whether a column of a snapshot is to get one more leg.
func (t *tx) lacksCopy(v *Volume, column int) bool {
	legs := v.column(column)
	return len(staying(legs, t.leaving)) < v.Layout.Group().Members && len(legs) < v.slots()
}

// copying names the nodes that make a copy, and the drives with one that fails, or that is not reached: it
// stands in the way of no other drive's.
func (t *tx) copying() map[string]bool {
	busy := map[string]bool{}
	for id := range t.s.unsettled {
		v := t.peek(id)
		for i := 0; v != nil && i < len(v.Legs); i++ {
			l := &v.Legs[i]
			if l.Copying == nil || !l.member() {
				continue
			}
			if busy[l.Drive.String()] = true; t.s.copyFailed(l).Cause == "" && t.s.servable(l) {
				busy[string(l.Node)] = true
			}
		}
	}
	return busy
}

// copyFailed is what the target of a leg that is being copied says is wrong with that; zero: nothing.
func (s *State) copyFailed(l *Leg) (p Problem) {
	if on := s.targets[l.Node]; on != nil && on.status.Online {
		p, _ = on.problem("leg " + l.ID.String())
	}
	return p
}

// beginCopy begins to make a copy of a column of a snapshot, if there is a source, a place for it, and
// nothing else to do there.
func (t *tx) beginCopy(id block.VolumeID, column int, look *copyLook) {
	v, key := t.peek(id), columnOf{id, column}
	if t.now.Before(t.s.uncopied[key].until) || t.s.copyWaitsFor(v, column) != "" {
		return
	}
	from, to, err := t.planCopy(v, column, look)
	if err != nil {
		t.noteUncopied(v, column, err.Error(), placeAgain)
		return
	}
	if l := v.unfreed(column, to.Drive); l != nil {
		t.noteUnfreed(v, l)
		return
	}
	if look.busy[string(to.Node)] || look.busy[to.Drive.String()] {
		return
	}
	next := v.clone()
	next.Generation++
	next.Placed = next.nextPlace()
	to.ID, to.Column, to.Copy, to.Place = frozenLeg(v.ID, from.ID, 0, t.gen), column, v.freeSlot(column), next.Placed
	to.Image, to.Listed = image.Image{Kind: image.Mapped}, next.Generation
	to.Copying = t.copyOf(v, &from, &to)
	to.State, to.Revision, to.StaleSince, to.StaleAt, to.CopyAll, to.CopyAllSince, to.Blank, to.Reason = LegStale, 1, t.now.UTC(), t.gen, true, 1, true, "it is being copied"
	next.Legs = append(next.Legs, to)
	next.sortLegs()
	if d := t.s.lacksRoom(v, next); d != nil {
		t.noteUncopied(v, column, fmt.Sprintf("the label of %s has no room for another leg", d.object()), copyAgain)
		return
	}
	t.noteUncopied(v, column, "", 0) // with what it failed before counts until it succeeds
	t.volumes.set(id, next)
	t.unsure[id] = true
	look.busy[string(to.Node)] = true
	t.volumeEvent(next, event.Info, event.LegAdded, fmt.Sprintf("%v, on drive %s: the snapshot is copied there from %s%s", &to, t.drives.peek(to.Drive).Device, from.Node, because(t.whyAdded(v, column))),
		"leg", to.ID.String(), "node", string(to.Node))
}

// planCopy chooses of what a copy is made, and where.
func (t *tx) planCopy(v *Volume, column int, look *copyLook) (from, to Leg, err error) {
	if err := v.noSlot(column); err != nil {
		return from, to, err
	}
	failed := t.s.uncopied[columnOf{v.ID, column}].failed
	var sources []*Leg
	why := "none is in sync"
	for _, l := range v.column(column) {
		if !l.trusted() {
			continue
		}
		cause := t.s.unexportable(v, l)
		if n := t.s.damage(l).Unknown; cause == "" && n > 0 {
			cause = fmt.Sprintf("up to %s of %v is lost, since its tree is damaged", n.Short(), l)
		}
		if cause != "" {
			why = cause
			continue
		}
		sources = append(sources, l)
	}
	if len(sources) == 0 {
		return from, to, fmt.Errorf("no copy of column %d can be read: %s", column, why)
	}
	slices.SortStableFunc(sources, func(a, b *Leg) int {
		return cmp.Or(rank(failed[a.ID.UUID])-rank(failed[b.ID.UUID]), rank(t.leaving(a) != "")-rank(t.leaving(b) != ""))
	})
	if to, err = t.copyPlace(v, column, failed, look); err != nil && len(failed) > 0 {
		to, err = t.copyPlace(v, column, nil, look) // all have failed, so each is tried again
	}
	return *sources[0], to, err
}

// copyPlace returns the place of one more leg of a column: its drive, its node and its tree, zero for one of
// its own. It is on no drive with which the copy has failed, and on a full one only if there is no other.
func (t *tx) copyPlace(v *Volume, column int, failed map[block.UUID]bool, look *copyLook) (to Leg, err error) {
	if to, err = t.copyPlaceBut(v, column, failed, t.full, look); err != nil {
		to, err = t.copyPlaceBut(v, column, failed, func(block.DriveID) bool { return false }, look)
	}
	return to, err
}

// full reports whether a drive has no more space for trees than its target leaves to hosts; see flatReserve.
func (t *tx) full(id block.DriveID) bool {
	d := t.drives.peek(id)
	if d == nil {
		return false
	}
	_, seen := t.s.spaceReport(d)
	return seen && t.s.free(id) == 0 && t.s.reserve(d) <= max(reserveFor(d)/2, 1)
}

// copyPlaceBut is copyPlace without the drives that are called full.
func (t *tx) copyPlaceBut(v *Volume, column int, failed map[block.UUID]bool, full func(block.DriveID) bool, look *copyLook) (to Leg, err error) {
	of := columnOf{v.Snapshot.Volume, column}
	if _, known := look.trees[of]; !known {
		look.trees[of] = t.treesOf(v, column)
	}
	for _, l := range look.trees[of] {
		if !failed[l.Drive.UUID] && t.takesCopy(v, &l) && !full(l.Drive) {
			return Leg{Drive: l.Drive, Node: l.Node, Tree: l.tree()}, nil
		}
	}
	at := t.lookup()
	at.refuses = func(x *placement.Drive) string {
		switch {
		case !t.s.copies(x.Node):
			return fmt.Sprintf("target %s cannot copy snapshots: it is of an earlier version", x.Node)
		case failed[x.ID.UUID]:
			return "a copy to it has failed"
		case full(x.ID):
			return "what is left of its space is for hosts"
		}
		return ""
	}
	place, err := t.s.newPlace(v, column, "", t.seedFor(v, column), at)
	if err != nil {
		return to, err
	}
	return Leg{Drive: place.Drive.ID, Node: place.Drive.Node}, nil
}

// treesOf returns one leg of each tree with good legs of a column of a snapshot's volume, or of its snapshots:
// first those of the volume, then those of the newest snapshots.
func (t *tx) treesOf(v *Volume, column int) (legs []Leg) {
	all := t.siblings(v)
	if o := t.peek(v.Snapshot.Volume); o != nil && o.usable() {
		all = append(all, o)
	}
	type tree struct {
		drive block.DriveID
		tree  block.UUID
	}
	known := map[tree]bool{}
	for _, o := range slices.Backward(all) {
		for _, l := range o.column(column) {
			if x := (tree{l.Drive, l.tree()}); l.trusted() && !known[x] && t.s.servable(l) && t.s.ownTree(l) && t.s.damage(l).Damage == "" {
				known[x] = true
				legs = append(legs, *l)
			}
		}
	}
	return legs
}

// takesCopy reports whether a copy of a snapshot can be made in the tree of a leg, beside the copies that stay.
func (t *tx) takesCopy(v *Volume, l *Leg) bool {
	n, d := t.nodes.peek(l.Node), t.drives.peek(l.Drive)
	switch {
	case n == nil || d == nil || t.leaving(l) != "" || n.shunned() != "":
		return false
	case !t.s.servable(l) || !t.s.copies(l.Node):
		return false
	}
	return t.s.besides(v, l.Column, &placement.Drive{ID: d.ID, Node: d.Node, Domain: n.label(v.Spread)}, t.lookup()) == ""
}

// copyWaitsFor says what a copy waits for before a place is looked for; empty if it may begin. A leg of the
// volume that is on its way comes first, so that the copy can be beside it.
func (s *State) copyWaitsFor(v *Volume, column int) string {
	o := s.volumes.Get(v.Snapshot.Volume)
	for _, id := range s.takings.Get(v.Snapshot.Volume) {
		if x := s.volumes.Get(id); x != nil {
			return fmt.Sprintf("snapshot %s to be taken", x.Name)
		}
	}
	switch {
	case o == nil || o.State == VolumeDeleting || !o.Thin:
		return ""
	case !o.usable():
		return fmt.Sprintf("%s, which is %s", o.object(), o.unready())
	}
	legs := o.column(column)
	for _, l := range legs {
		if !l.trusted() || s.leaving(l) != "" {
			return fmt.Sprintf("%v of %s to be in sync where it stays", l, o.object())
		}
	}
	if len(legs) != o.Layout.Group().Members {
		return fmt.Sprintf("%s to have all copies of column %d", o.object(), column)
	}
	return ""
}

// ownTree reports whether a leg is in a tree that is over no plain leg.
func (s *State) ownTree(l *Leg) bool {
	if !l.mapped() {
		return false
	}
	for id := range s.inTree.Get(l.tree()).Keys() {
		v := s.volumes.Get(id)
		if v != nil && slices.ContainsFunc(v.Legs, func(o Leg) bool { return o.Based && o.Drive == l.Drive && o.tree() == l.tree() }) {
			return false
		}
	}
	return true
}

// copies reports whether a target knows how to copy legs of snapshots.
func (s *State) copies(node block.NodeName) bool { return s.abilities(node).copies }

// siblings returns the snapshots of the same volume that are complete, the oldest first.
func (t *tx) siblings(of *Volume) (all []*Volume) {
	volume, _, _ := strings.Cut(string(of.Name), "@")
	prefix := volume + "@"
	for name, id := range t.s.byName.After(prefix) {
		if !strings.HasPrefix(name, prefix) {
			break
		}
		v := t.peek(id)
		if v.IsSnapshot() && v.Snapshot.Volume == of.Snapshot.Volume && v.usable() {
			all = append(all, v)
		}
	}
	slices.SortStableFunc(all, func(a, b *Volume) int { return a.Snapshot.Taken.Compare(b.Snapshot.Taken) })
	return all
}

// copyOf says of what a leg is copied, and as which earlier snapshot it begins.
func (t *tx) copyOf(v *Volume, from, to *Leg) *LegCopy {
	work := &LegCopy{From: from.ID, Began: t.now.UTC()}
	for _, o := range slices.Backward(t.siblings(v)) {
		here, there := o.inTree(to), o.inTree(from)
		if o.Snapshot.Taken.Before(v.Snapshot.Taken) && here != nil && there != nil && o.Size <= v.Size {
			work.Of, work.Base, work.Since = o.ID, here.ID, there.ID
			break
		}
	}
	return work
}

// inTree returns the complete leg of a snapshot in the tree of another leg; nil if there is none.
func (v *Volume) inTree(beside *Leg) *Leg {
	for i := range v.Legs {
		if l := &v.Legs[i]; l.Column == beside.Column && l.Drive == beside.Drive && l.tree() == beside.tree() && l.trusted() {
			return l
		}
	}
	return nil
}

// settleCopying ends copies that are complete, that have lost what they are made of, or that fail.
func (t *tx) settleCopying(id block.VolumeID) {
	v := t.peek(id)
	if !v.IsSnapshot() || !v.usable() {
		return
	}
	for _, l := range v.Legs {
		if l.Copying == nil || !l.member() {
			continue
		}
		why := t.copyLost(v, &l)
		p := t.s.copyFailed(&l)
		failed := p.Cause != "" && t.now.Sub(p.Since) > copyFails && t.now.Sub(l.Copying.Began) > copyFails
		switch {
		case t.s.copied(&l) && !t.doubtful(v, &l):
			delete(t.s.uncopied, columnOf{id, l.Column})
			v = t.volume(id)
			fresh := v.leg(l.ID)
			fresh.good()
			fresh.Rebuilt = t.now.UTC()
			v.Generation++
			t.volumeEvent(v, event.Info, event.LegInSync, fmt.Sprintf("%v: the snapshot is copied%s", &l, t.s.copiedBytes(&l)), "leg", l.ID.String(), "node", string(l.Node))
		case why != "":
			t.endCopy(id, l.ID, why)
		case failed:
			why = fmt.Sprintf("target %s: %s: %s", l.Node, p.Doing, p.Cause)
			t.endCopy(id, l.ID, why)
			t.noteFailure(v, &l, why)
		}
	}
}

// endCopy frees a leg that is not complete.
func (t *tx) endCopy(id block.VolumeID, leg block.LegID, why string) {
	v := t.volume(id)
	l := v.leg(leg)
	l.State, l.FreedAt, l.Copying = LegDeleting, t.gen, nil
	v.Generation++
	t.volumeEvent(v, event.Info, event.LegRetired, fmt.Sprintf("%v is not copied: %s", l, why), "leg", leg.String(), "node", string(l.Node))
	v.sortLegs()
}

// copied reports whether a leg is complete by its label.
func (s *State) copied(l *Leg) bool {
	d, _ := s.driveReport(l)
	return slices.ContainsFunc(d.Legs, func(label evidence.LegLabel) bool { return label.Leg == l.ID && label.Zeroed && label.Tree == l.tree() })
}

// copiedBytes says how much was copied to a leg; empty if its target does not say.
func (s *State) copiedBytes(l *Leg) string {
	if on := s.targets[l.Node]; on != nil {
		if n := on.legs.Get(l.ID).Copied; n > 0 {
			return ", " + n.Short()
		}
	}
	return ""
}

// copyLost says why a copy cannot be completed; empty if it can.
func (t *tx) copyLost(v *Volume, l *Leg) string {
	if why := t.leaving(l); why != "" {
		return why
	}
	from := v.leg(l.Copying.From)
	if from == nil || from.State != LegInSync {
		return "the leg that it is copied from is lost"
	}
	if t.doubtful(v, l) {
		return "it is not certain that what it is made of is good"
	}
	if why := t.s.unproven(v, from.Node); why != "" {
		return why
	}
	if l.Copying.Of.IsZero() {
		return ""
	}
	o := t.peek(l.Copying.Of)
	for _, id := range []block.LegID{l.Copying.Base, l.Copying.Since} {
		if o == nil || o.State != VolumeReady || o.leg(id) == nil || o.leg(id).State != LegInSync {
			return "the snapshot that it begins as was deleted"
		}
	}
	return ""
}

// doubtful reports whether a copy is made of a leg that is suspect. Even if it is complete, it is not taken then.
func (t *tx) doubtful(v *Volume, l *Leg) bool {
	suspect := func(o *Volume, id block.LegID) bool { return o != nil && o.leg(id) != nil && o.leg(id).Suspect }
	o := t.peek(l.Copying.Of)
	return suspect(v, l.Copying.From) || suspect(o, l.Copying.Base) || suspect(o, l.Copying.Since)
}

// unexportable says why a leg of a snapshot cannot be copied from; empty if it can.
func (s *State) unexportable(v *Volume, l *Leg) string {
	if !s.servable(l) || s.nodes[l.Node] == nil {
		return cmp.Or(s.legWaitsFor(l), fmt.Sprintf("%v is not served", l))
	}
	if v.inKernel(l.Node) {
		return fmt.Sprintf("the kernel of %s serves %v to hosts that have the snapshot: detach it", l.Node, l)
	}
	return s.unproven(v, l.Node)
}

// unproven says why a snapshot that requires authentication is not read from a target; empty if it may be.
func (s *State) unproven(v *Volume, target block.NodeName) string {
	if v.authentication() == block.AuthenticationRequire && (s.master.IsZero() || !s.authenticates(target)) {
		return fmt.Sprintf("target %s does not authenticate hosts, which %s requires", target, v.object())
	}
	return ""
}

// originOf is what a target makes a leg of. A leg that is to be copied is never left to begin as zeroes.
func (s *State) originOf(v *Volume, l *Leg) LegOrigin {
	if l.Copying == nil {
		return v.origin(l)
	}
	from := v.leg(l.Copying.From)
	if !l.member() || from == nil || !from.trusted() || s.nodes[from.Node] == nil || v.State != VolumeReady || s.unproven(v, from.Node) != "" {
		return LegOrigin{Wait: true, Copy: &CopySource{}}
	}
	x := s.copyExport(v, l, from)
	source := &CopySource{
		Portals: v.portals(s.nodes[from.Node]), NQN: x.NQN, Host: x.Host, Keys: x.Keys, NSID: v.nsid(from), UUID: v.namespace(from), Since: l.Copying.Since,
	}
	if o := s.volumes.Get(v.Snapshot.Volume); o != nil {
		source.Rate = o.RebuildRate
	}
	return LegOrigin{Leg: l.Copying.Base, Copy: source}
}

// copyExport is the subsystem through which a leg of a snapshot is copied from another one.
func (s *State) copyExport(v *Volume, l, from *Leg) WantedExport {
	x := WantedExport{
		Volume: v.ID, Epoch: v.Epoch, Serial: block.SerialNumber(v.ID), Host: block.HostFromID(l.ID.UUID), ReadOnly: true, Process: v.inProcess(s.nodes[from.Node]),
		Namespaces: []WantedNamespace{{v.nsid(from), from.ID, v.namespace(from)}},
	}
	x.NQN = block.SubsystemNQN(v.ID, v.Epoch, x.Host, from.Node)
	if v.authentication() != block.AuthenticationOff && !s.master.IsZero() && s.authenticates(from.Node) {
		x.Host = block.ProvenHost(x.NQN)
		x.Keys = s.master.Of(x.NQN, x.Host.NQN)
	}
	return x
}

// copyExports are the exports of a node for copies of a snapshot.
func (s *State) copyExports(v *Volume, node block.NodeName) (all []WantedExport) {
	for i := range v.Legs {
		l := &v.Legs[i]
		if l.Copying == nil || !l.member() || v.State != VolumeReady {
			continue
		}
		if from := v.leg(l.Copying.From); from != nil && from.Node == node && from.trusted() && s.unproven(v, node) == "" {
			all = append(all, s.copyExport(v, l, from))
		}
	}
	return all
}

// copyingWaits says how far the copy of a leg is, or what is in its way.
func (s *State) copyingWaits(v *Volume, l *Leg) string {
	from := v.leg(l.Copying.From)
	if from != nil && !s.servable(from) {
		return fmt.Sprintf("its source: %s", cmp.Or(s.legWaitsFor(from), "it is not ready"))
	}
	if from != nil && s.unproven(v, from.Node) != "" {
		return "its source: " + s.unproven(v, from.Node)
	}
	if on := s.targets[l.Node]; on != nil && s.servable(l) && s.copyFailed(l).Cause == "" && from != nil {
		r := on.legs.Get(l.ID)
		return fmt.Sprintf("%s copied from %s, up to %s of %s", r.Copied.Short(), from.Node, r.Zeroed.Short(), v.Layout.LegSize(v.Size).Short())
	}
	return s.legWaitsFor(l)
}

// uncopiedWaits says what becomes of a stale leg of a snapshot that is not being copied. No host writes to it.
func (s *State) uncopiedWaits(v *Volume, l *Leg) string {
	if v.trusted()[l.Column] == 0 && !l.Blank {
		return fmt.Sprintf("an operator to choose a copy of column %d: none is known to be right", l.Column)
	}
	return fmt.Sprintf("another copy of column %d to be in sync and reached; this one is given up then, and copied again", l.Column)
}

// lackingWaits says what a column of a snapshot that lacks a copy waits for before that is begun.
func (s *State) lackingWaits(v *Volume, column int) (waits, actions []string) {
	failed := s.uncopied[columnOf{v.ID, column}]
	switch {
	case s.level < copiesLevel:
		return []string{fmt.Sprintf("the cluster to be at level %d, from which on snapshots are copied", copiesLevel)}, []string{"`weft upgrade finish`"}
	case v.oneCopy():
		return nil, nil // it has one copy, of which there is no other
	}
	why := cmp.Or(s.copyWaitsFor(v, column), failed.why)
	return []string{fmt.Sprintf("another copy of column %d: %s", column, cmp.Or(why, "its turn: it is begun within seconds unless other snapshots are copied first, the oldest first and one at a time on each node"))}, nil
}

// settleStrays looks after legs of snapshots that no record has: a target has made them for a manager whose
// store was lost then. One that is complete, and of the moment of which the snapshot is, is one of its legs
// again where the column lacks one. One that is not prepared holds nothing, and is freed. Another one may be of
// an attempt that failed, and is freed once the column has all of its legs in sync.
func (t *tx) settleStrays() {
	for _, name := range slices.Sorted(maps.Keys(t.s.targets)) {
		on := t.s.targets[name]
		for _, id := range sorted(on.unknown) {
			if d := t.drives.peek(id); d != nil && on.status.Online {
				t.settleStraysOn(d, on.drives[id].Legs)
			}
		}
	}
}

func (t *tx) settleStraysOn(d *Drive, labels []evidence.LegLabel) {
	for i := range labels {
		label := &labels[i]
		v := t.peek(label.Volume.ID)
		switch {
		case !v.lostTrackOf(label):
		case t.adoptable(v, d, label):
			t.adoptStray(v, d, label)
		case !label.Zeroed || t.s.sound(v)[label.Column].Len() >= v.Layout.Group().Members:
			t.freeStray(v, d, label)
		}
	}
}

// lostTrackOf reports whether a label is of a leg of a snapshot, which is nil if there is no such volume, and
// the record does not have the leg.
func (v *Volume) lostTrackOf(label *evidence.LegLabel) bool {
	return v != nil && v.IsSnapshot() && v.usable() && v.leg(label.Leg) == nil && label.Column < v.Layout.Stripes && label.Kind == image.Mapped
}

// adoptable reports whether a leg that no record has is as good as those of the record. Labels say when a
// snapshot was taken only once it is complete, and a copy is complete only when it holds all of that. If its
// own label does not list it as in sync, the lost manager may have ended its copy, as one of a suspect leg. It
// is then adopted only where no other leg is good, and is stale until an operator chooses it.
func (t *tx) adoptable(v *Volume, d *Drive, label *evidence.LegLabel) bool {
	n := t.nodes.peek(d.Node)
	known := slices.Contains(label.Volume.InSync, label.Leg) || !slices.ContainsFunc(v.column(label.Column), func(l *Leg) bool { return l.trusted() })
	return v.ofItsMoment(label) && known && label.Volume.Size == v.Size && label.Volume.Epoch <= v.Epoch && n != nil && d.Leaving == "" && n.shunned() == "" && t.lacksCopy(v, label.Column) &&
		t.s.besides(v, label.Column, &placement.Drive{ID: d.ID, Node: d.Node, Domain: n.label(v.Spread)}, t.lookup()) == ""
}

// ofItsMoment reports whether a label is of a complete leg of a snapshot, and of the moment of which that is.
func (v *Volume) ofItsMoment(label *evidence.LegLabel) bool {
	taken := label.Volume.Snapshot.Taken
	return v.IsSnapshot() && label.Zeroed && taken != 0 && taken == nanoseconds(v.Snapshot.Taken)
}

// complete reports whether a leg of a snapshot is complete by its label, and of the snapshot's moment.
func (s *State) complete(v *Volume, l *Leg) bool {
	d, _ := s.driveReport(l)
	return slices.ContainsFunc(d.Legs, func(label evidence.LegLabel) bool { return label.Leg == l.ID && v.ofItsMoment(&label) })
}

// strayLeg is the leg that a label is of.
func (v *Volume) strayLeg(d *Drive, label *evidence.LegLabel) Leg {
	l := Leg{ID: label.Leg, Column: label.Column, Drive: d.ID, Node: d.Node, Image: label.Image, Based: label.Based, Place: v.nextPlace(), Revision: label.Revision}
	if label.Tree != label.Leg.UUID {
		l.Tree = label.Tree
	}
	return l
}

func (t *tx) adoptStray(v *Volume, d *Drive, label *evidence.LegLabel) {
	if v.nextPlace() == 0 {
		return
	}
	v = t.volume(v.ID)
	l := v.strayLeg(d, label)
	v.Generation = max(v.Generation, label.Volume.Generation) + 1
	l.Copy, l.State, l.Listed, v.Placed = v.freeSlot(l.Column), LegInSync, v.Generation, l.Place
	said, kind := "by its label it is complete", event.LegInSync
	if !slices.Contains(label.Volume.InSync, label.Leg) {
		said, kind = "its label does not say that it was in sync, so an operator has to choose it", event.LegStale
		l.State, l.StaleSince, l.StaleAt, l.CopyAll, l.CopyAllSince, l.Reason = LegStale, t.now.UTC(), t.gen, true, l.Revision, "its label does not say that it was in sync"
	}
	v.Legs = append(v.Legs, l)
	v.sortLegs()
	if l.shares() {
		t.grafts[l.tree()] = append(t.grafts[l.tree()], v.ID)
	}
	t.volumeEvent(v, event.Info, kind, fmt.Sprintf("%v, on drive %s: no record had it, as after a store was lost; %s", &l, d.Device, said), "leg", l.ID.String(), "node", string(l.Node))
}

func (t *tx) freeStray(v *Volume, d *Drive, label *evidence.LegLabel) {
	if v.nextPlace() == 0 {
		return // it stays until other legs are freed
	}
	v = t.volume(v.ID)
	l := v.strayLeg(d, label)
	l.Copy, l.State, l.FreedAt, l.Reason, v.Placed = min(label.Copy, block.MaxSlots-1), LegDeleting, t.gen, "no record had it", l.Place
	v.Legs = append(v.Legs, l)
	v.sortLegs()
	t.volumeEvent(v, event.Info, event.LegRetired, fmt.Sprintf("%v, on drive %s: no record had it, as after a store was lost, so it is freed", &l, d.Device), "leg", l.ID.String(), "node", string(l.Node))
}

// stray is a label of a leg that its volume's record does not have, and where it is.
type stray struct {
	node  block.NodeName
	drive block.DriveID
	label *evidence.LegLabel
}

// straysOf yields those of a volume.
func (s *State) straysOf(v *Volume) iter.Seq[stray] {
	return func(yield func(stray) bool) {
		for _, node := range slices.Sorted(maps.Keys(s.targets)) {
			on := s.targets[node]
			for _, id := range sorted(on.unknown) {
				for i := range on.drives[id].Legs {
					label := &on.drives[id].Legs[i]
					if label.Volume.ID == v.ID && v.leg(label.Leg) == nil && !yield(stray{node, id, label}) {
						return
					}
				}
			}
		}
	}
}

// freeStrays has the legs of a volume freed that labels list and its record does not, as the volume is deleted: a
// store that was restored, or has lost its newest records, would not know to what they belong.
func (t *tx) freeStrays(v *Volume) {
	for x := range t.s.straysOf(v) {
		if d := t.drives.peek(x.drive); d != nil && d.Node == x.node && x.label.Column < v.Layout.Stripes {
			t.freeStray(v, d, x.label)
		}
	}
}

// explainStrays names the legs of a snapshot that no record has, and that stay for now.
func (s *State) explainStrays(e *Explanation, v *Volume) {
	for x := range s.straysOf(v) {
		if v.lostTrackOf(x.label) {
			e.Facts = append(e.Facts, fmt.Sprintf("drive %v on %s has leg %v of it, which no record has, as after a store was lost: it is freed once column %d has all of its copies, since it may be of another moment", x.drive, x.node, x.label.Leg, x.label.Column))
		}
	}
}

// ---- legs that are lost ----

// mayLose refuses to give up legs of a snapshot that cannot be copied, and that no other leg stands in for. only is
// that of movable.
func (s *State) mayLose(object string, v *Volume, legs []*Leg, only func(*Volume, *Leg) bool) error {
	for _, l := range legs {
		switch {
		case !s.servable(l) && only(v, l):
			return refused(ReasonDriveInUse, object, "%v of %s is the only good copy of its column and cannot be read", l, v.Name).
				hint("`weft explain volume %s` says what can be done", v.Name)
		case !s.servable(l):
		case s.level < copiesLevel:
			return refused(ReasonDriveInUse, object, "holds %v of %s, and snapshots are copied to other drives from level %d on", l, v.Name, copiesLevel).
				hint("`weft upgrade finish`, or delete the snapshot: `weft snapshot delete %s`", v.Name)
		case v.oneCopy():
			return refused(ReasonDriveInUse, object, "holds a leg of %s, which has a single copy of its data", v.Name).
				hint("delete the snapshot: `weft snapshot delete %s`; to keep what it holds, copy it to another volume before", v.Name)
		}
	}
	return nil
}

// onlyTrusted reports whether a trusted leg is the only one of its column.
func (v *Volume) onlyTrusted(l *Leg) bool {
	return l.trusted() && !v.Layout.Group().Readable(v.trusted()[l.Column].Without(l.Copy))
}

// onlyGood reports whether a trusted leg is the only one of its column, or the only one of which nothing is lost.
func (s *State) onlyGood(v *Volume, l *Leg) bool {
	known := v.members(s.isKnown)[l.Column].Without(l.Copy)
	return v.onlyTrusted(l) || s.isKnown(l) && !v.Layout.Group().Readable(known)
}

// onlyLeft is onlyGood for a drive that an operator evicts. A leg that is known to be lost may go if others are
// trusted, also if these are in damaged trees: else nothing would ever end the wait for it.
func (s *State) onlyLeft(v *Volume, l *Leg) bool {
	if s.isLost(l) {
		return v.onlyTrusted(l)
	}
	return s.onlyGood(v, l)
}

// loseLegs gives up the legs of a snapshot's column that are gone for good, and those that are not known to
// be good any more, if there is another: it is copied from that.
func (t *tx) loseLegs(id block.VolumeID, column int) {
	for _, l := range t.peek(id).column(column) {
		n, d := t.nodes.peek(l.Node), t.drives.peek(l.Drive)
		gone := (n == nil || d == nil || n.ConfirmedDead || d.Leaving == LeaveEvict) && !t.s.servable(l)
		stale := l.State == LegStale && l.Copying == nil && t.level >= copiesLevel
		switch {
		case t.others(t.peek(id), l) == 0 || l.Copying != nil:
		case gone:
			t.retire(t.volume(id), l.ID, t.leaving(l))
		case stale:
			t.retire(t.volume(id), l.ID, cmp.Or(l.Reason, "it is stale"))
		}
	}
}

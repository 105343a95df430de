// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
)

// This file is the only one that moves legs between in sync, stale and
// rebuilding. The rules, each of which a test breaks on purpose:
//
//   - only the host of the epoch that stands may record;
//   - the last in-sync leg of a column is never taken away;
//   - recording a leg stale is otherwise always safe, whoever asks: what remains
//     in sync has every acknowledged write, since none was acknowledged without it;
//   - a leg that may have lost what only a cache held counts for nothing until it
//     is judged (suspect.go);
//   - a leg is put back only by the resync of this epoch and of this revision.

// current finds the volume of a record request and checks the asker's standing.
func (t *tx) current(id block.VolumeID, node block.NodeName, epoch block.Epoch) (*Volume, error) {
	v := t.s.volumes[id]
	if v == nil {
		return nil, notFound("volume " + id.String())
	}
	if epoch < v.Epoch && !t.s.guards.staleEpochMayRecord {
		return nil, refused(ReasonEpochSuperseded, v.object(), "epoch %d is superseded by %d", epoch, v.Epoch).
			with("epoch", fmt.Sprint(v.Epoch))
	}
	if t.s.guards.staleEpochMayRecord {
		return v, nil
	}
	a := v.attachmentOf(node)
	switch {
	case a == nil || a.Epoch != epoch || !a.exported():
		return nil, refused(ReasonNotAttached, v.object(), "not attached to %s at epoch %d", node, epoch)
	case a.Mode == AttachSharedReadOnly:
		return nil, refused(ReasonReadOnly, v.object(), "%s has it read-only: no copy misses anything", node)
	}
	return v, nil
}

func (in RecordStale) apply(t *tx) (view, error) {
	v, err := t.current(in.Volume, in.Node, in.Epoch)
	if err != nil {
		return nil, err
	}
	if len(in.Legs) == 0 {
		return nil, invalid("leg_ids", "empty: name the legs that are lost")
	}
	left := v.trusted()
	lost := map[block.LegID]bool{}
	for _, id := range in.Legs {
		l := v.leg(id)
		if l == nil {
			return nil, invalid("leg_ids", "%v is no leg of volume %s", id, v.Name)
		}
		if l.trusted() && !lost[id] {
			left[l.Column]--
		}
		if l.State == LegInSync || l.State == LegRebuilding {
			lost[id] = true
		}
	}
	if c := slices.Index(left, 0); c >= 0 && !t.s.guards.mayDropLastLeg {
		return nil, refused(ReasonLastLeg, v.object(), "column %d would be left without an in-sync leg", c).
			hint("its writes wait until a leg answers again").with("column", fmt.Sprint(c))
	}
	var seq uint64
	for _, id := range in.Legs {
		if lost[id] {
			t.volume(v.ID).leg(id).failed(t.now)
			seq = t.stale(t.volume(v.ID), id, EventLegStale, in.Reason)
			delete(lost, id)
		}
	}
	return recorded(t, seq), nil
}

func recorded(t *tx, seq uint64) view {
	r := Recorded{Time: t.now.UTC(), EventSeq: seq}
	return func(*State) any { return r }
}

func (in RecordInSync) apply(t *tx) (view, error) {
	v, err := t.current(in.Volume, in.Node, in.Epoch)
	if err != nil {
		return nil, err
	}
	for _, r := range in.Legs {
		if err := t.rebuilt(v, r); err != nil {
			return nil, err
		}
	}
	var seq uint64
	for _, r := range in.Legs {
		if v.leg(r.Leg).State == LegInSync {
			continue
		}
		v = t.volume(v.ID)
		l := v.leg(r.Leg)
		l.good()
		l.Rebuilt = t.now.UTC()
		v.Generation++
		seq = t.volumeEvent(v, Info, EventLegInSync, fmt.Sprintf("%v: %s copied", l, r.Copied.Short()),
			"leg", l.ID.String(), "node", string(l.Node), "epoch", fmt.Sprint(v.Epoch), "bytes_copied", fmt.Sprint(uint64(r.Copied)))
	}
	return recorded(t, seq), nil
}

// failed counts a loss during a rebuild, or soon after one.
func (l *Leg) failed(now time.Time) {
	if l.State == LegRebuilding || now.Sub(l.Rebuilt) < rebuildPauseMost {
		l.Failures++
	} else {
		l.Failures = 0
	}
}

// good makes a leg in sync and forgets why it was not.
func (l *Leg) good() {
	l.State, l.Reason, l.StaleSince, l.StaleAt, l.CopyAll = LegInSync, "", time.Time{}, 0, false
}

// rebuilt judges one leg of RecordInSync. A repeat of what was recorded is fine.
func (t *tx) rebuilt(v *Volume, r RebuiltLeg) error {
	l := v.leg(r.Leg)
	switch {
	case l == nil:
		return invalid("legs", "%v is no leg of volume %s", r.Leg, v.Name)
	case t.s.guards.revisionIgnored:
		return nil
	case l.Revision != r.Revision:
		return refused(ReasonRevisionMoved, v.object(), "%v went stale again: it is at revision %d, not %d", l, l.Revision, r.Revision)
	case l.State == LegInSync:
		return nil
	case l.State != LegRebuilding:
		return refused(ReasonRevisionMoved, v.object(), "%v is not being rebuilt", l)
	case !t.s.admitted(v, l):
		return refused(ReasonNotFenced, v.object(), "%s has not confirmed epoch %d since the manager started", l.Node, v.Epoch).hint("ask again")
	}
	return nil
}

// stale records one leg, in sync or rebuilding, as missing writes.
func (t *tx) stale(v *Volume, id block.LegID, kind, reason string) uint64 {
	l := v.leg(id)
	if l.State == LegInSync {
		v.Generation++
	}
	l.CopyAll = l.CopyAll || l.Suspect // what it lost is in no host's log
	l.State, l.Reason, l.StaleSince, l.StaleAt, l.Suspect = LegStale, reason, t.now.UTC(), t.gen, false
	l.Revision++
	return t.volumeEvent(v, Warning, kind, fmt.Sprintf("%v%s", l, because(reason)),
		"leg", id.String(), "node", string(l.Node), "epoch", fmt.Sprint(v.Epoch), "revision", fmt.Sprint(l.Revision))
}

// evict is stale by volmgr's own decision. The caller has made sure that the
// column keeps an in-sync leg; it is worth a crash if not.
func (t *tx) evict(v *Volume, id block.LegID, reason string) {
	if l := v.leg(id); l.State == LegInSync && v.inSync()[l.Column] < 2 {
		panic(fmt.Sprintf("cluster: evicting the last in-sync leg %v of column %d of volume %s", id, l.Column, v.Name))
	}
	t.stale(v, id, EventLegEvicted, reason)
}

func (t *tx) abandonRebuilds(v *Volume, why string) {
	for _, l := range v.Legs {
		if l.State == LegRebuilding {
			t.stale(v, l.ID, EventLegStale, why)
		}
	}
}

// settleRebuilds turns stale legs of a served volume into rebuilding ones, one
// per column at a time.
func (t *tx) settleRebuilds(id block.VolumeID) {
	v := t.peek(id)
	busy := map[int]bool{}
	for _, l := range v.Legs {
		busy[l.Column] = busy[l.Column] || l.State == LegRebuilding
	}
	for _, l := range v.Legs {
		if l.State != LegStale || busy[l.Column] || t.s.rebuildWaitsFor(v, &l) != "" {
			continue
		}
		busy[l.Column] = true
		v = t.volume(id)
		v.leg(l.ID).State = LegRebuilding
		t.volumeEvent(v, Info, EventLegRebuilding, l.String(),
			"leg", l.ID.String(), "node", string(l.Node), "epoch", fmt.Sprint(v.Epoch), "revision", fmt.Sprint(l.Revision))
	}
}

// rebuildWaitsFor says why a stale leg is not being rebuilt; empty if it may be.
func (s *State) rebuildWaitsFor(v *Volume, l *Leg) string {
	if len(v.Shared) > 0 {
		return fmt.Sprintf("the volume, shared by %s, to be attached to one host alone", v.users())
	}
	if v.Attachment == nil || v.Attachment.State != Attached {
		return "the volume to be attached"
	}
	if r, ok := s.attachmentReport(v, v.Attachment); !ok || r.Phase != PhaseServing {
		return fmt.Sprintf("host %s to serve the volume", v.Attachment.Node)
	}
	on, d := s.targets[l.Node], s.drives[l.Drive]
	switch {
	case on == nil || !on.status.Online:
		return fmt.Sprintf("target %s, which is offline", l.Node)
	case d == nil || d.State != DriveReady:
		return fmt.Sprintf("the drive of %v, which is not ready", l)
	case !s.legReady(l):
		return fmt.Sprintf("target %s to map the leg%s", l.Node, because(s.legError(l)))
	case !s.tall(v, l):
		return fmt.Sprintf("target %s to grow %v to %v, as it missed an expansion", l.Node, l, v.Layout.LegSize(v.Size))
	case !s.admitted(v, l):
		return fmt.Sprintf("target %s to fence epochs below %d", l.Node, v.Epoch)
	case on.status.Generation < l.StaleAt || on.exported[l.ID]:
		return fmt.Sprintf("target %s to take down the stale export", l.Node)
	case s.now.Before(l.rebuildAfter()):
		return fmt.Sprintf("%s: it failed, or the leg was lost soon after, %d times in a row",
			l.rebuildAfter().Format(time.RFC3339), l.Failures)
	}
	return ""
}

// targetRebooted gives up the node's copies that may have lost what only their
// drives' caches held, or has them judged when their twins are there. A volume
// that was let go of cleanly had its caches flushed.
func (t *tx) targetRebooted(name block.NodeName) {
	for _, id := range sorted(t.s.onNode[name]) {
		v := t.peek(id)
		if v.State != VolumeReady || v.Clean {
			continue
		}
		for _, l := range v.Legs {
			if l.Node == name {
				t.legRebooted(id, l)
			}
		}
	}
}

func (t *tx) legRebooted(id block.VolumeID, l Leg) {
	v := t.peek(id)
	switch l.State {
	case LegInSync:
		switch {
		case t.hasOnlineTwin(v, &l):
			t.evict(t.volume(id), l.ID, rebootLoss)
		case len(v.twins(&l)) > 0 && !l.Suspect && t.volatileCache(l.Drive) && !t.s.guards.rebootForgotten:
			t.suspectLeg(t.volume(id), l.ID)
		}
	case LegRebuilding:
		t.stale(t.volume(id), l.ID, EventLegStale, "its target rebooted during the rebuild")
	}
	// A host that still tracks what the leg misses must not trust the rest of it.
	if v := t.peek(id); v.leg(l.ID).State == LegStale && t.volatileCache(l.Drive) {
		t.volume(id).leg(l.ID).CopyAll = true
	}
}

func (t *tx) volatileCache(id block.DriveID) bool {
	d := t.drives.peek(id)
	return d == nil || d.VolatileCache
}

func (t *tx) hasOnlineTwin(v *Volume, l *Leg) bool {
	return slices.ContainsFunc(v.twins(l), func(o *Leg) bool { return !o.Suspect && t.s.targetOnline(o.Node) })
}

func (in PromoteStaleLeg) apply(t *tx) (view, error) {
	found, err := t.s.find(in.Volume)
	if err != nil {
		return nil, err
	}
	l := found.leg(in.Leg)
	switch {
	case l == nil:
		return nil, notFound(fmt.Sprintf("leg %v of volume %s", in.Leg, found.Name))
	case found.State != VolumeReady:
		return nil, refused(ReasonNotReady, found.object(), "%s", found.State)
	case l.State == LegInSync && found.inSync()[l.Column] == 1:
		return volumeResult(found.ID), nil // repeated
	case found.users() != "":
		return nil, refused(ReasonAttached, found.object(), "attached to %s", found.users()).
			hint("`weft detach %s --force` first", found.Name)
	case l.State != LegStale:
		return nil, refused(ReasonLegNotStale, found.object(), "%v is %s", l, l.State)
	case !in.AcceptDataLoss:
		return nil, refused(ReasonDataLoss, found.object(), "%v misses writes made since %v", l, l.StaleSince).
			hint("if every good copy is gone for ever: `weft volume promote-stale %s %v --accept-data-loss`", found.Name, l.ID)
	}
	for i := range found.Legs {
		if o := &found.Legs[i]; o.Column == l.Column && o.trusted() && t.s.servable(o) {
			return nil, refused(ReasonInSyncLegExists, found.object(), "%v is in sync and can be reached", o).
				hint("attach the volume: the stale leg is then rebuilt without loss")
		}
	}
	v := t.volume(found.ID)
	t.promote(v, in.Leg)
	return volumeResult(v.ID), nil
}

// promote begins a new lineage with one leg: whatever else the column has is
// stale, good or not, and a new epoch keeps old and new apart.
func (t *tx) promote(v *Volume, id block.LegID) {
	v.Epoch++
	v.Clean = false
	v.Generation++
	chosen := v.leg(id)
	chosen.good()
	chosen.Revision++
	for _, l := range v.Legs {
		if l.Column == chosen.Column && l.ID != id && l.State == LegInSync {
			t.stale(v, l.ID, EventLegStale, "another leg was promoted in its place")
		}
	}
	t.volumeEvent(v, Trouble, EventLegPromoted, fmt.Sprintf("%v: the writes that it missed are lost", chosen),
		"leg", id.String(), "node", string(chosen.Node), "epoch", fmt.Sprint(v.Epoch))
}

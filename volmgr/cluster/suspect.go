// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
)

// When a target boots, or one of its drives was away or failed a flush, the in-sync legs on
// drives with a volatile cache become suspect if their column has another copy: they may
// have lost writes that only the cache held. Only a peer can show what was lost, and it may
// not have reported yet: volmgr, the target and the peer may all have lost power together.
// The suspicion is durable, so another restart of volmgr does not forget it.
//
// A suspect leg serves nothing: it is not exported, does not count as the leg that a
// column must keep, and is not listed as in sync on labels. The suspicion ends when
//
//   - a peer that is not suspect can be served, and its target has answered since: the
//     suspect leg is evicted and copied whole. A peer on a dead drive, or on a target that
//     may have lost power too, is no reason to evict what may be the last good copy;
//   - no peer is left that is not suspect, because all lost their caches too, are
//     confirmed dead, or went stale in a promotion: then no copy is better, and all of
//     them hold every flushed write. If a host has the volume, one copy is kept and the
//     others are evicted: they may differ, and the host would read now one, now another. If
//     no host has it, all are kept, since they are made equal before the next host gets it;
//   - an operator promotes it, and so gives up the others.

// rebootLoss and driveLoss are the reasons why a leg may have lost cached writes.
const (
	rebootLoss = "its target rebooted and may have lost cached writes"
	driveLoss  = "its drive was away or failed a flush and may have lost cached writes"
)

func (l *Leg) loss() string { return cmp.Or(l.Loss, rebootLoss) }

// suspectLeg makes a leg suspect. settleSuspects judges it later.
func (t *tx) suspectLeg(v *Volume, id block.LegID) {
	l := v.leg(id)
	l.Suspect, l.SuspectAt, l.CacheLost = true, t.gen, t.flushes(l.Drive)
	v.Generation++
	t.volumeEvent(v, event.Warning, event.LegSuspect, fmt.Sprintf("%v: %s; no other copy has reported since", l, l.loss()),
		"leg", id.String(), "node", string(l.Node), "epoch", fmt.Sprint(v.Epoch))
}

// trusted reports whether a leg is known to hold every acknowledged write.
func (l *Leg) trusted() bool { return l.State == LegInSync && !l.Suspect }

func (v *Volume) suspects() bool {
	return slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.Suspect })
}

// peers lists the other legs in sync of a leg's column.
func (v *Volume) peers(l *Leg) (legs []*Leg) {
	for _, o := range v.column(l.Column) {
		if o.ID != l.ID && o.State == LegInSync {
			legs = append(legs, o)
		}
	}
	return legs
}

// settleSuspects judges the suspect legs of a volume, as far as their peers have reported.
func (t *tx) settleSuspects(id block.VolumeID) {
	for _, l := range slices.Clone(t.peek(id).Legs) {
		if now := t.peek(id).leg(l.ID); now.Suspect && now.member() {
			t.settleSuspect(id, now)
		}
	}
}

// settleSuspect judges one suspect leg by all of its peers: a peer that can stand in decides,
// whatever the others may still report.
func (t *tx) settleSuspect(id block.VolumeID, l *Leg) {
	var dead []block.LegID
	var stand block.MemberSet
	awaited := false // a peer may come back, with writes that l has lost
	g := t.peek(id).Layout.Group()
	for _, o := range t.peek(id).peers(l) {
		switch {
		case o.Suspect:
		case t.s.standsIn(o, l):
			stand = stand.With(o.Copy)
		case t.confirmedDead(o.Node):
			dead = append(dead, o.ID)
		default:
			awaited = true
		}
	}
	switch {
	case g.Readable(stand):
		t.evict(t.volume(id), l.ID, l.loss())
		return
	case awaited || g.Needs > 1: // members of a code that lost different writes cannot be combined
		return
	}
	for _, o := range dead {
		t.evict(t.volume(id), o, "its node is confirmed dead")
	}
	t.believe(id, l.Column)
}

// standsIn reports whether a peer that is not suspect can replace a suspect leg: the leg is copied from it, all of it.
func (s *State) standsIn(o, l *Leg) bool {
	return s.servable(o) && s.isKnown(o) && s.answeredSince(o.Node, l)
}

// answeredSince reports whether a target has acted on a wanted state from after a leg
// became suspect. Such a target has not booted in the same event: its report would say so.
func (s *State) answeredSince(node block.NodeName, l *Leg) bool {
	return s.targets[node].status.Generation >= l.SuspectAt
}

// believe ends the suspicion in a column whose in-sync legs are all suspect. If a host has
// the volume it goes on with one of them, so believe waits until the best can be served.
func (t *tx) believe(id block.VolumeID, column int) {
	v := t.volume(id)
	kept := v.leg(t.s.bestSuspect(v, column))
	if v.open() && !t.s.servable(kept) {
		return
	}
	for _, l := range v.peers(kept) {
		if v.open() {
			t.evict(v, l.ID, l.loss()+", like all copies")
			continue
		}
		l.Suspect, l.CacheLost = false, false
	}
	kept.Suspect, kept.CacheLost = false, false
	v.Generation++
	t.volumeEvent(v, event.Warning, event.LegBelieved, fmt.Sprintf("%v: %s, and no copy is better", kept, kept.loss()),
		"leg", kept.ID.String(), "node", string(kept.Node), "epoch", fmt.Sprint(v.Epoch))
	t.lostCache(v, kept)
}

// bestSuspect returns the suspect leg of a column that is easiest to reach: one that can be
// served, else one on an online target. One in a damaged tree comes last, but for those on dead nodes.
func (s *State) bestSuspect(v *Volume, column int) (best block.LegID) {
	rank := -1
	for _, l := range v.column(column) {
		if !l.Suspect {
			continue
		}
		n := 2
		switch {
		case s.confirmedDead(l.Node):
			n = 0
		case s.damage(l).Damage != "":
			n = 1
		case s.servable(l):
			n = 4
		case s.targetOnline(l.Node):
			n = 3
		}
		if n > rank {
			best, rank = l.ID, n
		}
	}
	return best
}

// suspectWaitsFor says what a suspect leg waits for: its peers that are not suspect.
func (s *State) suspectWaitsFor(v *Volume, l *Leg) string {
	var who []string
	for _, o := range v.peers(l) {
		switch {
		case o.Suspect:
		case !s.targetOnline(o.Node):
			who = append(who, fmt.Sprintf("target %s, which is offline, to report", o.Node))
		case !s.servable(o) || !s.isKnown(o):
			who = append(who, fmt.Sprintf("%v, which is %s", o, s.legFact(o)))
		default:
			who = append(who, fmt.Sprintf("target %s to report", o.Node))
		}
	}
	if who == nil {
		return fmt.Sprintf("a copy of column %d that can be served", l.Column)
	}
	return fmt.Sprintf("%s: it may have writes that %v has lost", strings.Join(who, " or "), l)
}

// An in-sync leg that has lost its drive's cache stays in sync if no copy is better: it was
// the only copy, or all have lost their caches. It has every flushed write. Writes that were
// acknowledged but not flushed may be lost. A host that uses the volume must learn this:
// otherwise its next flush would succeed although writes that it covers are missing.
//
// So while a host has the volume, such a leg is reborn: it gets a new revision, and the
// host's connections to the old identity fail. The host knows whether writes were
// acknowledged since the last flush. If none were, it continues with the new identity. Else
// it fails its device, whose users get errors until they open it again, and gives up the
// grant. The volume is granted to it again, as after a crash.
//
// Hosts that share a volume do not know what the others have written or read, so the volume
// is granted to all of them again, at a new epoch.

// lostCache handles a leg that stays in sync but has lost cached writes.
func (t *tx) lostCache(v *Volume, l *Leg) {
	if v.Attachment != nil {
		v.Attachment.SinceEpoch = 0 // also while the next process of its host waits for the grant
	}
	switch {
	case !v.open():
	case len(v.Shared) > 0:
		t.shareAnew(v, l)
	case v.Attachment.Stock:
		l.Revision++
		t.volumeEvent(v, event.Trouble, event.WritesLost, fmt.Sprintf("%v: %s: writes that %s had not flushed may be lost; its device fails, and it finds a new one", l, l.loss(), v.users()),
			"leg", l.ID.String(), "node", string(l.Node), "epoch", fmt.Sprint(v.Epoch), "revision", fmt.Sprint(l.Revision))
	default:
		l.Revision++
		l.Reborn = l.Revision
		t.volumeEvent(v, event.Warning, event.LegReborn, fmt.Sprintf("%v: %s, and no copy is better: %s continues only if it had flushed all writes", l, l.loss(), v.users()),
			"leg", l.ID.String(), "node", string(l.Node), "epoch", fmt.Sprint(v.Epoch), "revision", fmt.Sprint(l.Revision))
	}
}

// shareAnew ends a shared epoch and begins the next one with the same hosts. They include a
// host that released the volume to shut down: its release is about the old epoch, so the new
// one can be granted to it.
func (t *tx) shareAnew(v *Volume, l *Leg) {
	why := fmt.Sprintf("%v: %s, and no copy is better", l, l.loss())
	t.volumeEvent(v, event.Trouble, event.WritesLost, fmt.Sprintf("%s: writes that hosts had not flushed may be lost; the device of %s is replaced by a new one", why, v.users()),
		"leg", l.ID.String(), "node", string(l.Node), "epoch", fmt.Sprint(v.Epoch))
	hosts := slices.Clone(v.Shared)
	t.beginShared(v, hosts[0].Mode)
	for _, a := range hosts {
		if n := t.nodes.peek(a.Node); a.State != Detaching && n != nil {
			v.Shared = append(v.Shared, Attachment{
				Node: a.Node, Host: n.Host, Mode: a.Mode, Epoch: v.Epoch, State: Granting, BootID: n.InitiatorBoot,
				GaveUp: why, JoinedAt: t.gen, Since: t.now.UTC(), Paths: t.s.pathsOf(v, n), Prefers: a.Prefers,
			})
		}
	}
}

// settleGaveUp grants a volume again to a host that gave up its grant.
func (t *tx) settleGaveUp(id block.VolumeID) {
	v := t.peek(id)
	a := v.Attachment
	if a == nil || a.State != Granted && a.State != Attached {
		return
	}
	r, ok := t.s.attachmentReport(v, a)
	if !ok || r.GaveUp.Why == "" {
		return
	}
	v = t.volume(id)
	t.gaveUp(v, r)
	t.grant(v, t.nodes.peek(a.Node), a.Prefers)
	v.Attachment.GaveUp = r.GaveUp.Why
}

// gaveUp writes the event that a host has given up its current grant.
func (t *tx) gaveUp(v *Volume, r AttachmentReport) {
	node := v.Attachment.Node
	severity, kind, text := event.Warning, event.GaveUp, fmt.Sprintf("%s gave up epoch %d: %s", node, v.Epoch, r.GaveUp.Why)
	if r.GaveUp.WritesLost {
		severity, kind = event.Trouble, event.WritesLost
		text += "; writes that were acknowledged but not flushed may be lost"
	}
	t.volumeEvent(v, severity, kind, text, "node", string(node), "epoch", fmt.Sprint(v.Epoch), "reason", r.GaveUp.Reason)
}

// releasing returns the report on a host's older device of a volume, if the host waits to
// release that device before it builds the next one.
func (s *State) releasing(v *Volume, a *Attachment) (AttachmentReport, bool) {
	i := s.initiators[a.Node]
	if i == nil || i.status.BootID != a.BootID {
		return AttachmentReport{}, false
	}
	r, ok := i.attachments[v.ID]
	return r, ok && r.Epoch < a.Epoch && r.WaitingFor != ""
}

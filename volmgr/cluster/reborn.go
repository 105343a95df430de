// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"slices"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
)

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
	switch {
	case !v.open():
	case len(v.Shared) > 0:
		t.shareAnew(v, l)
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
	t.supersede(v)
	for _, a := range hosts {
		if n := t.nodes.peek(a.Node); a.State != Detaching && n != nil {
			v.Shared = append(v.Shared, Attachment{
				Node: a.Node, Host: n.Host, Mode: a.Mode, Epoch: v.Epoch, State: Granting, BootID: n.InitiatorBoot,
				GaveUp: why, JoinedAt: t.gen, Since: t.now.UTC(),
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
	t.grant(v, t.nodes.peek(a.Node))
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

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"slices"

	"weft.dev/weft/proto/block"
)

// A leg in sync that has lost what only its drive's cache held is kept in sync where
// no copy is better: it was the only one, or all have lost their caches. What had
// been flushed is there. What was acknowledged and not flushed may be gone, and a
// host that lives through this must know: else its next flush, which is to cover
// those writes, would succeed over a hole.
//
// So while a host has the volume, such a leg is reborn: it gets another revision, and
// what the host still has of the old identity finds nothing. The host knows what was
// acknowledged since the last flush. If that was nothing, it goes on under the new
// identity. Else it fails its device, whose users get errors until they open it anew,
// and gives the grant up; the volume is granted to it again, like after a crash.
//
// Hosts that share a volume cannot tell what the others have written or read, so it
// is taken from all of them, and given to them anew.

// lostCache takes note that a leg which stays in sync is without what only its
// drive's cache held.
func (t *tx) lostCache(v *Volume, l *Leg) {
	switch {
	case !v.open() || t.s.guards.rebornForgotten:
	case len(v.Shared) > 0:
		t.shareAnew(v, l)
	default:
		l.Revision++
		l.Reborn = l.Revision
		t.volumeEvent(v, Warning, EventLegReborn, fmt.Sprintf("%v: %s, and no copy is better: %s continues only if it had flushed everything", l, l.loss(), v.users()),
			"leg", l.ID.String(), "node", string(l.Node), "epoch", fmt.Sprint(v.Epoch), "revision", fmt.Sprint(l.Revision))
	}
}

// shareAnew ends a shared epoch, and begins the next one with the same hosts: also with
// one that has let go and ends, since only the old epoch was ever handed out to it.
func (t *tx) shareAnew(v *Volume, l *Leg) {
	why := fmt.Sprintf("%v: %s, and no copy is better", l, l.loss())
	t.volumeEvent(v, Trouble, EventWritesLost, fmt.Sprintf("%s: writes that hosts had not flushed may be lost; the device of %s is replaced by a new one", why, v.users()),
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

// settleGaveUp grants a volume anew to a host that has given it up.
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
	v.Clean = v.Clean || t.s.guards.givesUpClean
	v.Attachment.GaveUp = r.GaveUp.Why
}

// gaveUp says that a host has given up the grant that stands.
func (t *tx) gaveUp(v *Volume, r AttachmentReport) {
	node := v.Attachment.Node
	severity, kind, text := Warning, EventGaveUp, fmt.Sprintf("%s gave up epoch %d: %s", node, v.Epoch, r.GaveUp.Why)
	if r.GaveUp.WritesLost {
		severity, kind = Trouble, EventWritesLost
		text += "; writes that were acknowledged but not flushed may be lost"
	}
	t.volumeEvent(v, severity, kind, text, "node", string(node), "epoch", fmt.Sprint(v.Epoch))
}

// lettingGo is what an older device of a host waits for before the next one is made.
func (s *State) lettingGo(v *Volume, a *Attachment) (AttachmentReport, bool) {
	i := s.initiators[a.Node]
	if i == nil || i.status.BootID != a.BootID {
		return AttachmentReport{}, false
	}
	r, ok := i.attachments[v.ID]
	return r, ok && r.Epoch < a.Epoch && r.WaitingFor != ""
}

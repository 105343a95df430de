// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/evidence"
	"weft.dev/weft/volmgr/labelset"
)

// A shared volume is attached to several hosts, all in one mode and at one epoch. The
// first attach begins the epoch. Further hosts join it. Each host has exports of its own,
// named for its grant:
//
//	          Attach: the first begins an epoch        every column can be served
//	(without) ──────────────────────────────► GRANTING ──────────────┐
//	    ▲  │  Attach: a further one, once that was handed out        ▼
//	    │  └────────────────────────────────────────────────────► GRANTED ◄──┐
//	    │                                                            │       │
//	    │ released, or exports removed      Detach            serves ▼       │
//	    └────────────────────── DETACHING ◄──────────────────── ATTACHED     │
//	                                                                 │       │
//	      the host's boot changed: GRANTING until its exports are gone ──────┘
//
// A read-only volume sees no writes, so its copies stay equal. A host may leave a copy and
// return to it without a record, and a copy whose target has not admitted the epoch joins
// when it has. The copies must be equal when the epoch begins. Readers have no lease, so a
// later grant to write evicts no copy that one of them may still read (see evictable).
//
// Shared block is for volumes of one copy. With more copies, a write that missed one could
// be acknowledged only after all hosts had given up that copy.
//
// A host that is detached by force while others keep the volume is fenced on its own: every
// target removes its exports and confirms it (FenceAt). A read-only host does not wait for
// targets that are offline: it is remembered as a former host instead. When the last host is
// detached by force the epoch ends, as it does for an exclusive volume.

func (m AttachMode) shared() bool { return m == AttachSharedReadOnly || m == AttachSharedBlock }

// words is the mode as the command line spells it.
func (m AttachMode) words() string { return strings.ToLower(strings.ReplaceAll(string(m), "_", "-")) }

// attachments are all attachments of a volume.
func (v *Volume) attachments() []*Attachment {
	if v.Attachment != nil {
		return []*Attachment{v.Attachment}
	}
	all := make([]*Attachment, len(v.Shared))
	for i := range v.Shared {
		all[i] = &v.Shared[i]
	}
	return all
}

// grants are all attachments of a volume, and the host that heals it.
func (v *Volume) grants() []*Attachment {
	all := v.attachments()
	if v.Heal != nil {
		all = append(all, v.Heal)
	}
	return all
}

// grantOf is the one of grants that is a node's; nil if there is none.
func (v *Volume) grantOf(node block.NodeName) *Attachment {
	if v.Heal != nil && v.Heal.Node == node {
		return v.Heal
	}
	return v.attachmentOf(node)
}

// attachmentOf is the attachment to a node, nil if there is none.
func (v *Volume) attachmentOf(node block.NodeName) *Attachment {
	for _, a := range v.attachments() {
		if a.Node == node {
			return a
		}
	}
	return nil
}

// users names the hosts that a volume is attached to; empty if it is detached.
func (v *Volume) users() string {
	var names []string
	for _, a := range v.attachments() {
		names = append(names, string(a.Node))
	}
	return some(names, 8)
}

// handedOut reports whether the host was told of the grant of this epoch. A shared
// attachment may be GRANTING again after that; an exclusive one gets a new epoch then, see
// settleLeft.
func (a *Attachment) handedOut() bool {
	return a.State != Granting || a.Mode.shared() && (a.FenceAt != 0 || a.Left)
}

// exported reports whether the host has the volume's legs exported to it.
func (a *Attachment) exported() bool { return a.State != Granting && a.FenceAt == 0 }

func (v *Volume) checkShared() error {
	if len(v.Shared) > 0 && v.Attachment != nil {
		return fmt.Errorf("attached to %s alone, and shared", v.Attachment.Node)
	}
	if v.sealed() && slices.ContainsFunc(v.attachments(), func(a *Attachment) bool { return a.Mode != AttachSharedReadOnly }) {
		return fmt.Errorf("sealed, and attached to %s for writing", v.users())
	}
	for i := range v.Shared {
		a := &v.Shared[i]
		switch {
		case !a.Mode.shared() || a.Mode != v.Shared[0].Mode || a.Epoch != v.Epoch:
			return fmt.Errorf("%s shares it %s at epoch %d, %s %s at %d", a.Node, a.Mode, a.Epoch, v.Shared[0].Node, v.Shared[0].Mode, v.Epoch)
		case a.Mode == AttachSharedBlock && v.Layout.Group().Members > 1:
			return fmt.Errorf("%s shares it %s, and it has %v", a.Node, a.Mode, v.Layout.Group())
		}
	}
	return nil
}

// equal reports whether the in-sync legs of each column hold the same data, and no host of
// an earlier epoch can change one of them alone.
func (v *Volume) equal() bool {
	return !v.suspects() && (v.Clean || !slices.ContainsFunc(v.inSync(), func(s block.MemberSet) bool { return s.Len() > 1 }))
}

// mayShare refuses a mode in which the volume cannot be shared now.
func (s *State) mayShare(v *Volume, mode AttachMode) error {
	switch {
	case mode == AttachSharedBlock && v.Layout.Group().Members > 1:
		return &Error{
			Kind: Unimplemented, Field: "mode", Object: v.object(),
			Text: fmt.Sprintf("mode: %s: %s needs a volume with copies 1; this one has copies %d, and all writers would have to agree on each lost copy",
				v.object(), mode.words(), v.Layout.Copies),
			Metadata: map[string]string{"copies": fmt.Sprint(v.Layout.Copies)},
		}
	case mode == AttachSharedReadOnly && !v.equal() && v.sealed():
		return refused(ReasonCopiesDiffer, v.object(), "its copies may differ").hint("`weft explain volume %s` says what can be done", v.Name)
	case mode == AttachSharedReadOnly && !v.equal():
		return refused(ReasonCopiesDiffer, v.object(), "its copies may differ, since its last host did not release it cleanly").
			hint("attach it to one host, which makes them equal: `weft attach %s --node NODE`; mount its file system there for writing, which replays the journal, and unmount it; then `weft detach %s`", v.Name, v.Name)
	}
	return nil
}

// sameName finds a host that shares a volume and whose exports would have the same names as
// n's.
func (v *Volume) sameName(n *Node) *Attachment {
	for i := range v.Shared {
		if a := &v.Shared[i]; a.Node != n.Name && a.Host.Short() == n.Host.Short() {
			return a
		}
	}
	return nil
}

// share adds a host to the current shared epoch, or begins one.
func (t *tx) share(v *Volume, n *Node, mode AttachMode, prefers Preference) {
	a := Attachment{Node: n.Name, Host: n.Host, Mode: mode, State: Granting, BootID: n.InitiatorBoot, JoinedAt: t.gen, Since: t.now.UTC(), Paths: t.s.pathsOf(v, n), Prefers: prefers}
	if len(v.Shared) == 0 || v.Shared[0].Mode != mode {
		t.beginShared(v, mode)
	}
	a.Epoch = v.Epoch
	v.Shared = append(v.Shared, a)
	t.volumeEvent(v, event.Info, event.Granting, fmt.Sprintf("epoch %d for %s, %s; hosts that share it: %d", v.Epoch, n.Name, mode.words(), len(v.Shared)),
		"node", string(n.Name), "epoch", fmt.Sprint(v.Epoch), "mode", string(mode))
}

// beginShared begins a shared epoch, and decides who serves the volume in it.
func (t *tx) beginShared(v *Volume, mode AttachMode) {
	t.supersede(v)
	v.InKernel = t.s.kernelsFor(v, mode)
}

// settleShared makes the due transitions of each attachment of a shared volume.
func (t *tx) settleShared(id block.VolumeID) {
	if len(t.peek(id).Shared) == 0 {
		return
	}
	t.noteFence(t.peek(id))
	for _, a := range slices.Clone(t.peek(id).Shared) {
		switch {
		case a.FenceAt != 0:
			t.settleSharerFence(id, &a)
		case a.State == Granting:
			t.settleShareGrant(id, &a)
		default:
			t.settleSharer(id, &a)
		}
	}
}

// settleShareGrant hands out a host's grant when every column can be read from fenced legs.
// The legs that are not fenced do no harm: a volume of one copy then has none, and no host
// writes to those of a clean volume.
func (t *tx) settleShareGrant(id block.VolumeID, a *Attachment) {
	v := t.peek(id)
	if a.Left || t.barred(v, a.Node) {
		return
	}
	if keep, _ := t.s.grantSplit(v); v.unreadable(keep) >= 0 {
		return
	}
	v = t.volume(id)
	v.Holder = ""
	v.Clean = v.Clean && a.Mode == AttachSharedReadOnly
	t.sharerGranted(v, a.Node)
}

func (t *tx) sharerGranted(v *Volume, node block.NodeName) {
	a := v.attachmentOf(node)
	a.State, a.Since, a.FenceAt, a.Left, a.Grant = Granted, t.now.UTC(), 0, false, t.gen
	a.Proven = t.proven(v, node)
	t.volumeEvent(v, event.Info, event.Granted, fmt.Sprintf("epoch %d to %s, %s", v.Epoch, node, a.Mode.words()),
		"node", string(node), "epoch", fmt.Sprint(v.Epoch), "mode", string(a.Mode))
}

// settleSharer acts on the report of a host that may have the volume.
func (t *tx) settleSharer(id block.VolumeID, a *Attachment) {
	v := t.peek(id)
	r, ok := t.s.attachmentReport(v, a)
	clean := ok && r.Phase == PhaseDetachedClean
	switch {
	case a.KeptAt != 0: // see settleKept
	case a.State == Detaching:
		t.settleLeaver(id, a, clean, ok && r.Phase == PhaseDetachedUnclean)
	case clean:
		fresh := t.volume(id).attachmentOf(a.Node)
		fresh.State, fresh.Left, fresh.Since = Granting, true, t.now.UTC()
		t.volumeEvent(v, event.Info, event.Left, fmt.Sprintf("%s released the volume to shut down: it is admitted again at its next boot", a.Node),
			"node", string(a.Node), "epoch", fmt.Sprint(v.Epoch))
	case a.State == Granted && ok && (r.Phase == PhaseServing || r.Phase == PhaseStalled):
		fresh := t.volume(id).attachmentOf(a.Node)
		fresh.State, fresh.Since = Attached, t.now.UTC()
		t.volumeEvent(v, event.Info, event.Attached, fmt.Sprintf("to %s as %s, %s", a.Node, r.Device, a.Mode.words()),
			"node", string(a.Node), "epoch", fmt.Sprint(v.Epoch), "device", r.Device)
	}
}

// settleLeaver ends the attachment of a detaching host once it has released the volume or is
// dead.
func (t *tx) settleLeaver(id block.VolumeID, a *Attachment, clean, unclean bool) {
	switch {
	case t.confirmedDead(a.Node):
		t.forceSharer(id, a.Node, "confirmed dead")
	case clean || unclean && a.Mode == AttachSharedReadOnly:
		t.unshare(id, a.Node, true, "which has released it")
	case unclean:
		t.forceSharer(id, a.Node, "which has released it, but not cleanly")
	}
}

// detachShared detaches a shared volume from the named node, or from all.
func (t *tx) detachShared(v *Volume, in Detach) {
	if in.Force && in.Node == "" {
		t.forceDetach(v, "forced")
		return
	}
	for _, a := range slices.Clone(v.Shared) {
		if in.Node != "" && in.Node != a.Node {
			continue
		}
		fresh := v.attachmentOf(a.Node)
		switch {
		case in.Force || t.confirmedDead(a.Node):
			t.forceSharer(v.ID, a.Node, "forced")
			if v = t.peek(v.ID); len(v.Shared) == 0 {
				return
			}
		case a.Left:
			t.unshare(v.ID, a.Node, true, "which had released it")
		case !a.handedOut():
			t.unshare(v.ID, a.Node, v.Clean, "before the grant was handed out")
		case a.State != Detaching:
			fresh.State, fresh.Since = Detaching, t.now.UTC()
			t.volumeEvent(v, event.Info, event.Detaching, fmt.Sprintf("waiting for %s to release the volume", a.Node), "node", string(a.Node), "epoch", fmt.Sprint(v.Epoch))
		}
	}
}

// forceSharer detaches a shared volume from a host without its consent. It ends the epoch if
// no other host has the volume, else it has that host's exports removed.
func (t *tx) forceSharer(id block.VolumeID, node block.NodeName, why string) {
	v := t.volume(id)
	a := v.attachmentOf(node)
	switch {
	case !a.handedOut():
		t.unshare(id, node, v.Clean, why)
	case len(v.Shared) == 1:
		t.forceDetach(v, why)
	case a.Mode == AttachSharedReadOnly && t.confirmedDead(node):
		t.unshare(id, node, true, why)
	case a.State != Detaching || a.FenceAt == 0:
		a.State, a.FenceAt, a.Since = Detaching, t.gen, t.now.UTC()
		t.volumeEvent(v, event.Warning, event.Detaching, fmt.Sprintf("%s, %s: its exports are being removed", node, why),
			"node", string(node), "epoch", fmt.Sprint(v.Epoch))
	}
}

// settleSharerFence completes a detach, or the grant to the host's new boot, once no removal
// of its old exports is waited for.
func (t *tx) settleSharerFence(id block.VolumeID, a *Attachment) {
	v := t.peek(id)
	if len(t.s.sharerWaits(v, a)) > 0 {
		return
	}
	if a.State == Detaching {
		if len(t.s.exportsLeft(v, a)) > 0 { // at offline targets
			v = t.volume(id)
			v.FormerHosts = append(v.FormerHosts, FormerHost{a.Node, a.BootID, a.Epoch, a.Mode})
		}
		t.unshare(id, a.Node, false, "its exports are gone")
		return
	}
	if t.barred(v, a.Node) {
		return
	}
	n := t.nodes.peek(a.Node)
	v = t.volume(id)
	fresh := v.attachmentOf(a.Node)
	fresh.Host, fresh.BootID = n.Host, n.InitiatorBoot
	t.sharerGranted(v, a.Node)
}

// exportsLeft lists the targets that have not confirmed the removal of a host's exports.
func (s *State) exportsLeft(v *Volume, a *Attachment) (nodes []block.NodeName) {
	for i := range v.Legs {
		node := v.Legs[i].Node
		on := s.targets[node]
		switch {
		case s.confirmedDead(node):
		case on != nil && on.status.Generation >= a.FenceAt && !on.exports.Has(s.nqn(v, a, node)):
		default:
			nodes = append(nodes, node)
		}
	}
	slices.Sort(nodes)
	return slices.Compact(nodes)
}

// sharerWaits names the targets whose removal of a host's exports is waited for.
func (s *State) sharerWaits(v *Volume, a *Attachment) (waits []string) {
	for _, node := range s.exportsLeft(v, a) {
		switch {
		case s.targetOnline(node):
			waits = append(waits, fmt.Sprintf("target %s to remove its export to %s", node, a.Node))
		case a.Mode != AttachSharedReadOnly:
			waits = append(waits, fmt.Sprintf("target %s, which is offline, to remove its export to %s", node, a.Node))
		}
	}
	return waits
}

// unshare ends one attachment of a shared volume. clean: its host has released the volume
// and all its writes are on the drives.
func (t *tx) unshare(id block.VolumeID, node block.NodeName, clean bool, how string) {
	v := t.volume(id)
	block := v.attachmentOf(node).Mode == AttachSharedBlock
	v.Shared = slices.DeleteFunc(v.Shared, func(a Attachment) bool { return a.Node == node })
	if len(v.Shared) == 0 {
		v.InKernel = nil
	}
	if block && len(v.Shared) == 0 {
		v.Clean = clean
	}
	t.volumeEvent(v, event.Info, event.Detached, fmt.Sprintf("from %s, %s; hosts that still share it: %d", node, how, len(v.Shared)),
		"node", string(node), "epoch", fmt.Sprint(v.Epoch))
}

// sharerChanged moves a shared attachment to the host's new boot or identity. I/O of the old
// boot may still be in flight at the targets, so they drain it before a writer is granted
// the volume again.
func (t *tx) sharerChanged(id block.VolumeID, n *Node) {
	v := t.peek(id)
	old := v.attachmentOf(n.Name)
	if old == nil || !old.Mode.shared() {
		return
	}
	booted := old.BootID != n.InitiatorBoot
	if !booted && (old.Host == n.Host || old.State == Detaching) {
		return
	}
	v = t.volume(id)
	a := v.attachmentOf(n.Name)
	readOnly := a.Mode == AttachSharedReadOnly
	switch {
	case a.FenceAt != 0: // the old boot's exports are being removed already
	case a.State == Detaching && readOnly:
		t.unshare(id, n.Name, true, "it rebooted")
	case a.State == Detaching:
		t.forceSharer(id, n.Name, "it rebooted")
	case !a.handedOut():
		a.Host, a.BootID = n.Host, n.InitiatorBoot
	case a.Left || readOnly:
		a.Host, a.BootID = n.Host, n.InitiatorBoot
		t.sharerGranted(v, n.Name)
	default:
		a.State, a.FenceAt, a.Since = Granting, t.gen, t.now.UTC()
		t.volumeEvent(v, event.Info, event.Granting, fmt.Sprintf("epoch %d for the new boot of %s: the old boot's exports are being removed", v.Epoch, n.Name),
			"node", string(n.Name), "epoch", fmt.Sprint(v.Epoch))
	}
}

// ---- sealed volumes ----

// A sealed volume is written by no host any more, for ever: it can only be shared read-only. It is sealed
// when the copies in sync are equal and no host can write it, so they stay equal whatever follows, and a
// store that is rebuilt or restored needs no proof of that. What writes to its legs from then on is the
// copying to legs that are not in sync, which nobody reads.
//
// What is sealed stays so: the record says it before the caller is answered, and then the labels of the
// legs do. The newest label counts if the record is lost: see adoptSeal.

// sealLevel is the level from which on volumes can be sealed: an older manager would have them written.
const sealLevel block.Level = 6

// sealedLabel is where the labels of drives keep Volume.Sealed, among the labels of volumes.
const sealedLabel = labelset.Own + "sealed"

func (v *Volume) sealed() bool { return !v.Sealed.IsZero() }

// unwritten reports whether no host may write the volume, nor could since its copies were equal.
func (v *Volume) unwritten() bool { return v.IsSnapshot() || v.sealed() }

// SealVolume makes a volume one that no host writes any more. Result: Volume.
type SealVolume struct{ Volume string }

func (in SealVolume) apply(t *tx) (view, error) {
	v, err := t.s.find(in.Volume)
	if err != nil {
		return nil, err
	}
	if v.sealed() {
		return volumeResult(v.ID), nil
	}
	if err := cmp.Or(t.needsLevel(sealLevel, "sealed volumes"), t.s.maySeal(v)); err != nil {
		return nil, err
	}
	next := v.clone()
	next.Sealed = t.now.UTC()
	if d := t.s.lacksRoom(v, next); d != nil {
		return nil, t.s.labelFull(v, d, "volume")
	}
	fresh := t.volume(v.ID)
	fresh.Generation++
	fresh.Sealed, fresh.SealedAt = next.Sealed, fresh.Generation
	if c := fresh.Scrub; c.wanted() && c.Repair { // who reads it from now on repairs nothing
		t.endScrub(fresh, *c, true)
	}
	t.volumeEvent(fresh, event.Info, event.VolumeSealed, "no host writes it any more")
	return volumeResult(v.ID), nil
}

// maySeal refuses a volume that a host may write, now or without the manager's word, or whose copies may
// differ.
func (s *State) maySeal(v *Volume) error {
	writer := slices.IndexFunc(v.attachments(), func(a *Attachment) bool { return a.Mode != AttachSharedReadOnly })
	switch {
	case v.IsSnapshot():
		return v.neverChanges()
	case !v.usable():
		return refused(ReasonNotReady, v.object(), "%s", v.unready()).hint("`weft explain volume %s` says what it waits for", v.Name)
	case v.ExpandingTo != 0:
		return refused(ReasonNotReady, v.object(), "it is being expanded").hint("wait until `weft explain volume %s` no longer shows it", v.Name)
	case writer >= 0:
		return refused(ReasonAttached, v.object(), "attached to %s, which may write it", v.users()).hint("`weft detach %s` first", v.Name)
	case v.writerMayRemain():
		return refused(ReasonAttached, v.object(), "a host that had it has not confirmed its release").hint("%s", v.detachInOrder())
	case !v.Clean || v.suspects():
		return refused(ReasonCopiesDiffer, v.object(), "its copies may differ, since its last host did not release it cleanly").hint("%s", v.detachInOrder())
	case strings.HasPrefix(v.Formatted, Formatting):
		return refused(ReasonNotReady, v.object(), "the making of a file system on it was not completed: %s", v.Formatted).
			hint("mount it for writing once, or say that nothing on it is needed: `weft volume set %s --formatted none`", v.Name)
	case v.undecided():
		return refused(ReasonNoInSyncLeg, v.object(), "column %d has no copy in sync", v.unreadable(v.inSync())).hint("`weft explain volume %s` says what can be done", v.Name)
	}
	return nil
}

// detachInOrder says how a volume comes to be clean.
func (v *Volume) detachInOrder() string {
	return fmt.Sprintf("attach it to one host, which makes its copies equal, and detach it in order: `weft attach %s --node NODE`, `weft detach %s`", v.Name, v.Name)
}

// sealedBy is when a volume was sealed by the label of a leg; zero if it does not say so. A date that cannot
// be read counts: it is of a later version.
func sealedBy(l evidence.VolumeLabel) time.Time {
	text, says := l.Labels[sealedLabel]
	if !says {
		return time.Time{}
	}
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		at = time.Unix(0, l.Created)
	}
	return at.UTC()
}

// adoptSeal seals a volume whose record is older than its labels, if the newest of them says that it was
// sealed. An older label may be of a time before the store was lost, and the seal with it: hosts may have
// written the volume since.
func (v *Volume) adoptSeal(newest evidence.VolumeLabel) {
	if at := sealedBy(newest); !at.IsZero() && !v.sealed() {
		v.Sealed, v.SealedAt, v.Clean = at, v.Generation, newest.Clean
	}
}

// explainSealed says what being sealed means, and which labels do not say so yet.
func (s *State) explainSealed(e *Explanation, v *Volume) {
	if !v.sealed() {
		return
	}
	e.Facts = append(e.Facts, fmt.Sprintf("it was sealed at %s: no host writes it any more, and any number of hosts can read it", v.Sealed.Format(time.RFC3339)))
	for column := range v.Layout.Stripes {
		if l := s.labelsLack(v, column, v.SealedAt); l != nil {
			e.Waits = append(e.Waits, fmt.Sprintf("the label of %v to say that the volume is sealed", l))
		}
	}
}

// ---- hosts that may not know that their epoch has ended ----

// endShared ends a shared epoch. Its hosts are remembered until none can read at it any more.
func (v *Volume) endShared() {
	for i := range v.Shared {
		if a := &v.Shared[i]; a.handedOut() && !a.Left {
			v.FormerHosts = append(v.FormerHosts, FormerHost{a.Node, a.BootID, a.Epoch, a.Mode})
		}
	}
	v.Shared, v.InKernel = nil, nil
}

// settleFormerHosts forgets former hosts when every in-sync leg is fenced to an epoch after
// theirs, so that they can read none.
func (t *tx) settleFormerHosts(id block.VolumeID) {
	v := t.peek(id)
	if slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.State == LegInSync && !t.s.admitted(v, &l) }) {
		return
	}
	over := func(l FormerHost) bool { return l.Epoch < v.Epoch }
	if slices.ContainsFunc(v.FormerHosts, over) {
		v = t.volume(id)
		v.FormerHosts = slices.DeleteFunc(v.FormerHosts, over)
	}
}

// writerMayRemain reports whether an earlier host that could write has not reported a release.
func (v *Volume) writerMayRemain() bool {
	return v.Holder != "" || slices.ContainsFunc(v.FormerHosts, func(l FormerHost) bool { return l.Mode != AttachSharedReadOnly })
}

// formerHosts names the former hosts for people.
func (v *Volume) formerHosts() string {
	var names []string
	for _, l := range v.FormerHosts {
		if l.Node == "" {
			return "a host that this store does not know"
		}
		names = append(names, string(l.Node))
	}
	slices.Sort(names)
	return "host " + some(slices.Compact(names), 8)
}

// readersLeft reports whether a former host may still read a leg that is not fenced.
func (s *State) readersLeft(v *Volume) bool {
	return slices.ContainsFunc(v.FormerHosts, func(l FormerHost) bool {
		n := s.nodes[l.Node]
		return l.Node == "" || n != nil && !n.ConfirmedDead && n.InitiatorBoot == l.BootID
	})
}

// ---- for people ----

func (s *State) explainShared(e *Explanation, v *Volume) {
	mode := v.Shared[0].Mode.words()
	e.Summary = fmt.Sprintf("%s is attached to %s, %s, and %s", v.object(), v.users(), mode, strings.ToLower(string(s.health(v))))
	if !v.open() {
		e.Summary = fmt.Sprintf("%s is being granted to %s, %s: its targets are fencing older epochs", v.object(), v.users(), mode)
		e.Waits = append(e.Waits, s.grantWaits(v)...)
		s.explainGrant(e, v)
	}
	for i := range v.Shared {
		a := &v.Shared[i]
		e.Facts = append(e.Facts, fmt.Sprintf("attachment to %s, epoch %d: %s since %s", a.Node, a.Epoch, strings.ToLower(string(a.State)), a.Since.UTC().Format(time.RFC3339)))
		e.Facts = append(e.Facts, s.hostProblems(v, a)...)
		if v.open() {
			for _, wait := range s.attachmentWaits(v, a) {
				e.Waits = append(e.Waits, fmt.Sprintf("%s: %s", a.Node, wait))
			}
		}
		switch {
		case a.Left:
			e.Actions = append(e.Actions, fmt.Sprintf("start `weft initiator` on %s again, or detach the volume from it: weft detach %s --node %s", a.Node, v.Name, a.Node))
		case a.State == Detaching && a.FenceAt == 0:
			e.Actions = append(e.Actions, s.detachActions(v, a)...)
		case !s.initiatorOnline(a.Node):
			e.Actions = append(e.Actions, fmt.Sprintf("to detach the volume from %s only: weft detach %s --node %s --force", a.Node, v.Name, a.Node))
		}
		if !s.initiatorOnline(a.Node) {
			e.Facts = append(e.Facts, fmt.Sprintf("host %s is offline: it may still use the volume", a.Node))
		}
	}
}

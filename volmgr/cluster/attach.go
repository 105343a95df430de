// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
)

// The states of an attachment and their transitions. E is the volume's epoch:
//
//	              Attach, E+1
//	(detached) ─────────────────► GRANTING ◄───────────────────────────┐
//	     ▲  ▲                        │ every in-sync leg fenced to E,  │ the host's boot id or
//	     │  │                        │ or evicted after the lease      │ identity changed: E+1
//	     │  │ Detach                 ▼                                 │
//	     │  ├───────────────────  GRANTED ─────────────────────────────┤
//	     │  │ (GRANTING only)        │ the host serves the device      │
//	     │  │                        ▼                                 │
//	     │  │                     ATTACHED ────────────────────────────┘
//	     │  │                        │ Detach
//	     │  │ released, clean or not ▼  CancelDetach: GRANTED again
//	     │  └───────────────────  DETACHING
//	     └── from anywhere: Detach force, host confirmed dead: E+1, not clean
//
// A host that cannot continue (suspect.go), or that has released the volume in another way
// than asked, gives up the grant: GRANTED or ATTACHED ──► GRANTING at E+1, not clean.
//
// A host whose data path runs in its process releases the volume before that process ends:
// GRANTED or ATTACHED ──► GRANTING at E+1, clean, and handed out to its next boot.
//
// A host reaches a volume's data only through GRANTED, and the epoch only grows. The
// targets, not this record, keep a superseded host out: the grant is handed out when every
// leg that stays in sync is on a target that has fenced all epochs below E. A leg that
// cannot be fenced is evicted, but not before [ClientLease] has passed since the first
// in-sync leg was fenced. A superseded host cannot record that it lost the fenced leg, so by
// then it has stopped reading too.

// Attach gives a volume to a host. The attachment is GRANTING until the older
// epochs are fenced. Result: Attachment.
type Attach struct {
	Volume string
	Node   block.NodeName
	Mode   AttachMode // empty means AttachExclusive
	// KeepsRecord: the caller keeps Volume.Formatted up to date. Otherwise it becomes Raw
	// if the attachment can write and no file system is recorded.
	KeepsRecord bool
	Prefers     Preference
}

// Preference is through which portals of its targets a host reaches a volume, if there is a choice. The zero value
// is what the host prefers for all its volumes.
type Preference struct {
	Rail string `json:"rail,omitempty"`
	GPU  string `json:"gpu,omitempty"` // a GPU of the host, to the networks of whose nearest card they belong
}

func (p Preference) String() string {
	switch {
	case p == Preference{}:
		return "none"
	case p.GPU == "":
		return "rail " + p.Rail
	case p.Rail == "":
		return "the networks near to GPU " + p.GPU
	}
	return "rail " + p.Rail + " and the networks near to GPU " + p.GPU
}

// preferenceLevel is the level from which on records hold preferences.
const preferenceLevel block.Level = 13

var gpuName = regexp.MustCompile(`^([0-9]{1,3}|[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7])$`)

// mayPrefer refuses a preference that means nothing, or that a host cannot have.
func (t *tx) mayPrefer(n *Node, p Preference) error {
	switch {
	case p == Preference{}:
		return nil
	case len(p.Rail) > mostRail || strings.ContainsFunc(p.Rail, func(r rune) bool { return !unicode.IsGraphic(r) }):
		return invalid("rail", "%q: must be the name of a rail, of at most %d bytes", p.Rail, mostRail)
	case p.GPU != "" && !gpuName.MatchString(p.GPU):
		return invalid("near_gpu", "%q: must be a number or a PCI address", p.GPU).hint("`weft doctor --gpu` on %s lists its GPUs", n.Name)
	case n.Stock:
		return refused(ReasonNoInitiator, nodeObject(n.Name), "it has no agent, which chooses portals").hint("attach without a rail and a GPU")
	}
	return t.needsLevel(preferenceLevel, "a network for one volume")
}

// mostRail is the length of the longest name of a rail, in bytes.
const mostRail = 253

func (in Attach) apply(t *tx) (view, error) {
	v, n, err := t.s.parties(in)
	if err != nil {
		return nil, err
	}
	mode, err := in.mode(v)
	if err != nil {
		return nil, err
	}
	if err := t.mayPrefer(n, in.Prefers); err != nil {
		return nil, err
	}
	if v.users() != "" {
		done, err := t.attachAgain(v, in, mode)
		if done {
			t.handOut(v, in.KeepsRecord, mode)
		}
		if done || err != nil {
			return attachmentResult(v.ID, in.Node), err
		}
	}
	if err := t.s.mayAttach(v, n, mode); err != nil {
		return nil, err
	}
	t.handOut(v, in.KeepsRecord, mode)
	if mode.shared() {
		t.share(t.volume(v.ID), n, mode, in.Prefers)
	} else {
		t.grant(t.volume(v.ID), n, in.Prefers)
	}
	return attachmentResult(v.ID, in.Node), nil
}

// mode is the mode that is asked for, or the usual one: exclusive, and shared read-only of what no host may
// write.
func (in Attach) mode(v *Volume) (AttachMode, error) {
	usual := AttachExclusive
	if v.unwritten() {
		usual = AttachSharedReadOnly
	}
	mode := cmp.Or(in.Mode, usual)
	switch {
	case mode != AttachExclusive && !mode.shared():
		return mode, invalid("mode", "%q is not known", in.Mode)
	case mode != usual && v.sealed():
		return mode, refused(ReasonReadOnly, v.object(), "it is sealed: hosts can only read it, in the mode %s", usual.words()).hint("%s", v.version())
	case mode != usual && v.IsSnapshot():
		return mode, refused(ReasonReadOnly, v.object(), "it is a snapshot: hosts can only read it, in the mode %s", usual.words()).hint("%s", v.version())
	}
	return mode, nil
}

// parties finds the volume and the node of an Attach, and refuses a volume or a node that
// can take part in none.
func (s *State) parties(in Attach) (*Volume, *Node, error) {
	v, err := s.find(in.Volume)
	if err != nil {
		return nil, nil, err
	}
	if v.State != VolumeReady || v.Restoring != nil {
		return nil, nil, refused(ReasonNotReady, v.object(), "%s", v.unready()).
			hint("`weft explain volume %s` says what it waits for", v.Name)
	}
	n := s.nodes[in.Node]
	if n == nil {
		return nil, nil, notFound(nodeObject(in.Node))
	}
	if n.Host.NQN == "" || n.InitiatorBoot == "" && !n.Stock {
		return nil, nil, refused(ReasonNoInitiator, nodeObject(in.Node), "no initiator agent has ever reported from it").
			hint("start `weft initiator` on %s; or, for Linux's own NVMe tools: `weft node add %s --host-nqn NQN`", in.Node, in.Node)
	}
	if n.ConfirmedDead && n.Stock {
		return nil, nil, refused(ReasonNodeOffline, nodeObject(in.Node), "confirmed dead").hint("if it is back: `weft node add %s --host-nqn %s`", in.Node, n.Host.NQN)
	}
	if n.ConfirmedDead {
		return nil, nil, refused(ReasonNodeOffline, nodeObject(in.Node), "confirmed dead").hint("the node counts as alive again once one of its agents reports")
	}
	return v, n, nil
}

// mayAttach refuses a volume that cannot be served to a node in this mode now.
func (s *State) mayAttach(v *Volume, n *Node, mode AttachMode) error {
	if err := s.mayShare(v, mode); err != nil {
		return err
	}
	if err := s.mayUse(v, n, mode); err != nil {
		return err
	}
	if err := s.mayProve(v, n); err != nil {
		return err
	}
	if err := s.attachable(v); err != nil {
		return err
	}
	if a := v.sameName(n); a != nil && a.Mode == mode {
		return refused(ReasonAttachedElse, v.object(), "attached to %s, whose host ID begins with the same characters as that of %s", a.Node, n.Name).
			hint("give %s another host ID", n.Name).with("node", string(a.Node))
	}
	return nil
}

// handOut makes the volume Raw before its device is handed out to a caller that may write
// without recording a file system.
func (t *tx) handOut(v *Volume, keepsRecord bool, mode AttachMode) {
	if keepsRecord || mode == AttachSharedReadOnly {
		return
	}
	if after := orRaw(v.Formatted); after != v.Formatted {
		t.volume(v.ID).Formatted = after
	}
}

func attachmentResult(id block.VolumeID, node block.NodeName) view {
	return func(s *State) any { v := s.volumes.Get(id); return s.attachmentView(v, v.attachmentOf(node)) }
}

// attachAgain checks an Attach of a volume that is attached: done if this host already has
// it in this mode, an error if it cannot get it, neither if it may take it over or join.
func (t *tx) attachAgain(v *Volume, in Attach, mode AttachMode) (done bool, err error) {
	if a := v.attachmentOf(in.Node); a != nil {
		switch {
		case a.State == Detaching:
			return false, refused(ReasonDetaching, v.object(), "being detached from %s", a.Node).
				hint("%s", strings.Join(t.s.detachActions(v, a), "; ")).with("node", string(a.Node))
		case a.Mode != mode:
			return false, conflict(v.object(), "mode", a.Mode, mode)
		case in.Prefers != Preference{} && in.Prefers != a.Prefers:
			return false, conflict(v.object(), "preference", a.Prefers, in.Prefers).hint("detach it first")
		}
		return true, nil
	}
	all := v.attachments()
	alive := slices.DeleteFunc(slices.Clone(all), func(a *Attachment) bool { return t.confirmedDead(a.Node) })
	if len(alive) == 0 || mode.shared() && all[0].Mode == mode {
		return false, nil
	}
	a, how := alive[0], ""
	if a.Mode.shared() {
		how = ", " + a.Mode.words()
	}
	if a.Stock {
		return false, refused(ReasonAttachedElse, v.object(), "attached to %s%s", v.users(), how).
			hint("unmount it on %s, which has no agent; then `weft detach %s`", a.Node, v.Name).with("node", string(a.Node))
	}
	return false, refused(ReasonAttachedElse, v.object(), "attached to %s%s", v.users(), how).
		hint("`weft detach %s`; if %s does not answer, `weft detach %s --force`; if it is off, `weft node confirm-dead %s`", v.Name, a.Node, v.Name, a.Node).
		with("node", string(a.Node))
}

func (t *tx) confirmedDead(name block.NodeName) bool {
	n := t.nodes.peek(name)
	return n != nil && n.ConfirmedDead
}

func (s *State) confirmedDead(name block.NodeName) bool {
	n := s.nodes[name]
	return n != nil && n.ConfirmedDead
}

// attachable refuses a volume with a column that has no in-sync leg on an online target.
func (s *State) attachable(v *Volume) error {
	if v.Restored {
		return s.stillRestored(v)
	}
	var columns []string
	for c := range v.Layout.Stripes {
		if facts, served := s.columnFacts(v, c); !served {
			columns = append(columns, fmt.Sprintf("column %d: %s", c, facts))
		}
	}
	if len(columns) == 0 {
		return nil
	}
	return refused(ReasonNoInSyncLeg, v.object(), "no in-sync leg can be reached: %s", strings.Join(columns, "; ")).
		hint("bring the targets back; `weft explain volume %s` lists what can be done if they are gone for good", v.Name)
}

// driveReason says in brackets why a leg's drive is not ready.
func (s *State) driveReason(l *Leg) string {
	if d := s.drives[l.Drive]; d != nil && d.Reason != "" {
		return " (" + d.Reason + ")"
	}
	return ""
}

// columnFacts describes a column's legs, and says whether enough of them can be served.
func (s *State) columnFacts(v *Volume, column int) (facts string, served bool) {
	var all []string
	for _, l := range v.column(column) {
		all = append(all, fmt.Sprintf("%v is %s", l, s.legFact(l)))
	}
	return strings.Join(all, ", "), v.Layout.Group().Readable(s.serving(v)[column])
}

// legFact is a leg's state and the reason why it cannot be used, if it cannot.
func (s *State) legFact(l *Leg) string {
	fact := strings.ToLower(strings.ReplaceAll(string(l.State), "_", " "))
	if l.State == LegStale && l.Reason != "" {
		fact += " (" + l.Reason + ")"
	}
	if l.Suspect {
		fact += ", but suspect (" + l.loss() + ")"
	}
	switch d := s.drives[l.Drive]; {
	case !s.targetOnline(l.Node):
		fact += ", its target is offline"
	case d == nil || d.State != DriveReady:
		fact += ", its drive is not ready" + s.driveReason(l)
	case s.legError(l) != "":
		fact += ", but " + s.legError(l)
	case s.damage(l).Damage != "":
		fact += ", but its tree is damaged"
	}
	return fact
}

// grant begins a new epoch for a host. The host gets nothing before settleGrant
// has seen the older epochs fenced.
func (t *tx) grant(v *Volume, n *Node, prefers Preference) {
	t.supersede(v)
	v.Attachment = &Attachment{
		Node: n.Name, Host: n.Host, Mode: AttachExclusive, Epoch: v.Epoch,
		State: Granting, BootID: n.InitiatorBoot, Since: t.now.UTC(), SinceEpoch: v.Epoch, Stock: n.Stock,
		Paths: t.s.pathsOf(v, n), Prefers: prefers,
	}
	if n.Stock {
		v.Attachment.SinceEpoch = 0 // an agent that takes the host over knows nothing of it
	}
	t.volumeEvent(v, event.Info, event.Granting, fmt.Sprintf("epoch %d for %s: fencing older epochs", v.Epoch, n.Name),
		"node", string(n.Name), "epoch", fmt.Sprint(v.Epoch))
}

// supersede begins a new epoch, below which the targets are to admit nothing. Rebuilds under
// way are abandoned, since the host that made them loses the volume. So every grant ends the
// healing of the volume.
func (t *tx) supersede(v *Volume) {
	v.Epoch++
	t.healingEnds(v, fmt.Sprintf("epoch %d began", v.Epoch))
	v.Attachment = nil
	v.endShared()
	t.abandonRebuilds(v, fmt.Sprintf("epoch %d began", v.Epoch))
}

// admitted reports whether a leg's target has confirmed the volume's epoch.
func (s *State) admitted(v *Volume, l *Leg) bool {
	t := s.targets[l.Node]
	return t != nil && t.admitted.Get(v.ID) >= v.Epoch
}

// settleGrant hands out the grant when every column can be read from fenced legs and every
// other in-sync leg may be evicted.
func (t *tx) settleGrant(id block.VolumeID) {
	v := t.peek(id)
	if v.Attachment == nil || v.Attachment.State != Granting {
		return
	}
	t.noteFence(v)
	if v.Attachment.Left || t.barred(v, v.Attachment.Node) {
		return
	}
	keep, evict := t.s.grantSplit(v)
	if v.unreadable(keep) >= 0 {
		return
	}
	for _, l := range evict {
		if !t.evictable(v, l) || !t.confirmedDead(l.Node) && t.s.standsAlone(v, l, keep) {
			return
		}
	}
	for _, l := range evict {
		v = t.volume(id)
		t.evict(v, l.ID, fmt.Sprintf("its target did not confirm the fence for epoch %d", v.Epoch))
	}
	v = t.volume(id)
	a := v.Attachment
	a.State, a.Equalize, a.Since = Granted, !v.Clean, t.now.UTC()
	a.Copies = 0 // the host is told the present layout
	a.Proven = t.proven(v, a.Node)
	v.Clean, v.Holder, v.FormerHosts = false, a.Node, nil
	delete(t.s.fences, id)
	t.volumeEvent(v, event.Info, event.Granted, fmt.Sprintf("epoch %d to %s", v.Epoch, a.Node),
		"node", string(a.Node), "epoch", fmt.Sprint(v.Epoch), "equalize", fmt.Sprint(a.Equalize))
}

// noteFence starts the lease clock when the first in-sync leg is reported fenced.
func (t *tx) noteFence(v *Volume) {
	if f, ok := t.s.fences[v.ID]; ok && f.epoch == v.Epoch {
		return
	}
	for i := range v.Legs {
		if l := &v.Legs[i]; l.State == LegInSync && t.s.admitted(v, l) {
			t.s.fences[v.ID] = fence{v.Epoch, t.now}
			return
		}
	}
}

// grantSplit returns the in-sync members of each column that could be granted now, and the
// in-sync legs that could not.
func (s *State) grantSplit(v *Volume) (keep []block.MemberSet, rest []*Leg) {
	keep = make([]block.MemberSet, v.Layout.Stripes)
	for i := range v.Legs {
		switch l := &v.Legs[i]; {
		case l.State != LegInSync:
		case s.admitted(v, l) && s.servable(l) && !l.Suspect:
			keep[l.Column] = keep[l.Column].With(l.Copy)
		default:
			rest = append(rest, l)
		}
	}
	return keep, rest
}

// standsAlone reports whether a leg that cannot be granted is in no damaged tree and may come back, while all of its
// column that could be granted is in damaged trees. If it were evicted, what those have lost would be lost for good.
// Whether a tree is damaged is known once its target has mapped the leg.
func (s *State) standsAlone(v *Volume, l *Leg, keep []block.MemberSet) bool {
	if s.damage(l).Damage != "" || s.gone(l) {
		return false
	}
	sound := v.members(func(o *Leg) bool {
		return keep[o.Column].Has(o.Copy) && s.isSound(v, o) && (o.tree().IsZero() || s.legReady(o))
	})
	return !v.Layout.Group().Readable(sound[l.Column])
}

// whyAlone says why a leg stands alone: what is wrong with each leg of its column that could be granted.
func (s *State) whyAlone(v *Volume, l *Leg, keep []block.MemberSet) string {
	var why []string
	for _, o := range v.column(l.Column) {
		switch {
		case !keep[o.Column].Has(o.Copy):
		case !s.isSound(v, o):
			why = append(why, fmt.Sprintf("%v is in a damaged tree", o))
		case !o.tree().IsZero() && !s.legReady(o):
			why = append(why, fmt.Sprintf("target %s has not mapped %v yet, so whether its tree is damaged is not known", o.Node, o))
		}
	}
	return strings.Join(why, ", ")
}

// evictable reports whether an in-sync leg that is not fenced may be evicted: no earlier
// host can still read it.
func (t *tx) evictable(v *Volume, l *Leg) bool {
	switch {
	case t.confirmedDead(l.Node):
		return true
	case t.s.readersLeft(v): // they have no lease
		return false
	case v.Holder != "" && t.confirmedDead(v.Holder) && !t.s.targetOnline(l.Node):
		return true
	}
	return t.s.leaseLeft(v, t.now) == 0
}

// leaseLeft is how much longer the previous host may read; ClientLease if no leg has been
// fenced yet.
func (s *State) leaseLeft(v *Volume, now time.Time) time.Duration {
	f, ok := s.fences[v.ID]
	if !ok || f.epoch != v.Epoch {
		return ClientLease
	}
	return max(0, ClientLease-now.Sub(f.first))
}

// settleAttached records that the host serves the device.
func (t *tx) settleAttached(id block.VolumeID) {
	v := t.peek(id)
	if v.Attachment == nil || v.Attachment.State != Granted || v.Attachment.KeptAt != 0 {
		return
	}
	if v.Attachment.Stock {
		if t.s.exportsTo(v, v.Attachment) {
			v = t.volume(id)
			v.Attachment.State, v.Attachment.Since = Attached, t.now.UTC()
			for _, at := range t.s.subsystems(v, v.Attachment) {
				if portals := v.portals(t.nodes.peek(at.node)); len(portals) > 0 {
					v.Attachment.Portal = stockPortal(portals)
				}
			}
			t.volumeEvent(v, event.Info, event.Attached, fmt.Sprintf("to %s, which has no agent and may connect now", v.Attachment.Node),
				"node", string(v.Attachment.Node), "epoch", fmt.Sprint(v.Epoch))
		}
		return
	}
	if r, ok := t.s.attachmentReport(v, v.Attachment); ok && (r.Phase == PhaseServing || r.Phase == PhaseStalled) {
		v = t.volume(id)
		v.Attachment.State, v.Attachment.Since = Attached, t.now.UTC()
		t.volumeEvent(v, event.Info, event.Attached, fmt.Sprintf("to %s as %s", v.Attachment.Node, r.Device),
			"node", string(v.Attachment.Node), "epoch", fmt.Sprint(v.Epoch), "device", r.Device)
	}
}

// settleLeft handles a host that is shutting down and has released the volume without being
// asked. The volume stays reserved for it under a new epoch, which only its next boot gets.
// The new epoch makes the targets fence the old one now, so that the clean release it
// reported stays true.
func (t *tx) settleLeft(id block.VolumeID) {
	v := t.peek(id)
	a := v.Attachment
	if a == nil || a.State != Granted && a.State != Attached || a.KeptAt != 0 {
		return
	}
	if r, ok := t.s.attachmentReport(v, v.Attachment); !ok || r.Phase != PhaseDetachedClean {
		return
	}
	v = t.volume(id)
	left := *v.Attachment
	v.Holder, v.Clean = "", true
	t.supersede(v)
	left.State, left.Epoch, left.Equalize, left.Left, left.Since = Granting, v.Epoch, false, true, t.now.UTC()
	v.Attachment = &left
	t.volumeEvent(v, event.Info, event.Left, fmt.Sprintf("%s released the volume cleanly to shut down: epoch %d is reserved for its next boot", left.Node, v.Epoch),
		"node", string(left.Node), "epoch", fmt.Sprint(v.Epoch))
}

// Detach takes a volume from its host. Result: nil.
type Detach struct {
	Volume string
	Node   block.NodeName // empty: every node
	Force  bool           // do not wait for the host: fence it
}

func (in Detach) apply(t *tx) (view, error) {
	found, err := t.s.find(in.Volume)
	if err != nil {
		return nil, err
	}
	if len(found.Shared) > 0 {
		t.detachShared(t.volume(found.ID), in)
		return nil, nil
	}
	a := found.Attachment
	if a == nil || in.Node != "" && in.Node != a.Node {
		return nil, nil
	}
	switch {
	case in.Force || t.confirmedDead(a.Node):
		t.forceDetach(t.volume(found.ID), "forced")
	case a.Left:
		t.detached(t.volume(found.ID), "which had released it")
	case a.State == Granting:
		t.detached(t.volume(found.ID), "before the grant was handed out")
	case a.Stock:
		t.forceDetach(t.volume(found.ID), "which has no agent to ask")
	case a.State != Detaching:
		v := t.volume(found.ID)
		v.Attachment.State, v.Attachment.Since = Detaching, t.now.UTC()
		t.volumeEvent(v, event.Info, event.Detaching, fmt.Sprintf("waiting for %s to release the volume", a.Node), "node", string(a.Node), "epoch", fmt.Sprint(v.Epoch))
	}
	return nil, nil
}

// CancelDetach cancels a Detach that waits for its host. A host that releases the volume
// before it hears of this is detached all the same. Result: nil.
type CancelDetach struct {
	Volume string
	Node   block.NodeName // empty: every node
}

func (in CancelDetach) apply(t *tx) (view, error) {
	found, err := t.s.find(in.Volume)
	if err != nil {
		return nil, err
	}
	var asked []*Attachment
	for _, a := range found.attachments() {
		if in.Node == "" || in.Node == a.Node {
			asked = append(asked, a)
		}
	}
	if len(asked) == 0 {
		where := "to any node"
		if in.Node != "" {
			where = "to " + string(in.Node)
		}
		return nil, refused(ReasonNotAttached, found.object(), "not attached %s: the detach is complete", where).
			hint("attach it again: `weft attach %s`", found.Name)
	}
	for _, a := range asked {
		if a.FenceAt != 0 {
			return nil, refused(ReasonDetaching, found.object(), "forcibly detached from %s, which cannot be withdrawn", a.Node).
				hint("wait until it is detached, then attach it again")
		}
	}
	for _, a := range asked {
		if a.State == Detaching {
			t.withdrawDetach(found.ID, a.Node)
		}
	}
	return nil, nil
}

// withdrawDetach withdraws a detach: the host keeps the volume.
func (t *tx) withdrawDetach(id block.VolumeID, node block.NodeName) {
	v := t.volume(id)
	a := v.attachmentOf(node)
	a.State, a.KeptAt, a.Since = Granted, t.gen, t.now.UTC()
	t.volumeEvent(v, event.Info, event.DetachCancelled, fmt.Sprintf("%s keeps the volume", node), "node", string(node), "epoch", fmt.Sprint(v.Epoch))
}

// settleKept waits until hosts have heard that their detach was cancelled. A host that
// reports that it released the volume before it heard of this is detached.
func (t *tx) settleKept(id block.VolumeID) {
	for _, a := range t.peek(id).attachments() {
		on := t.s.initiators[a.Node]
		if a.KeptAt == 0 || on == nil || on.status.BootID != a.BootID {
			continue
		}
		r, ok := t.s.attachmentReport(t.peek(id), a)
		switch {
		case on.status.Generation >= a.KeptAt:
			t.volume(id).attachmentOf(a.Node).KeptAt = 0
		case ok && (r.Phase == PhaseDetachedClean || r.Phase == PhaseDetachedUnclean):
			fresh := t.volume(id).attachmentOf(a.Node)
			fresh.State, fresh.KeptAt = Detaching, 0
		}
	}
}

// forceDetach detaches a volume without its host's consent. The targets fence the host by
// admitting a new epoch.
func (t *tx) forceDetach(v *Volume, why string) {
	who := v.users()
	t.supersede(v)
	t.volumeEvent(v, event.Warning, event.Detached, fmt.Sprintf("from %s, %s: fenced by epoch %d", who, why, v.Epoch),
		"node", who, "epoch", fmt.Sprint(v.Epoch), "clean", fmt.Sprint(v.Clean))
}

func (t *tx) detached(v *Volume, how string) {
	node := v.Attachment.Node
	v.Attachment = nil
	t.abandonRebuilds(v, "detached")
	t.volumeEvent(v, event.Info, event.Detached, fmt.Sprintf("from %s, %s", node, how),
		"node", string(node), "epoch", fmt.Sprint(v.Epoch), "clean", fmt.Sprint(v.Clean))
}

// settleDetaching ends an attachment when its host has released the volume or is dead.
func (t *tx) settleDetaching(id block.VolumeID) {
	v := t.peek(id)
	if v.Attachment == nil || v.Attachment.State != Detaching {
		return
	}
	if t.confirmedDead(v.Attachment.Node) {
		t.forceDetach(t.volume(id), "confirmed dead")
		return
	}
	r, ok := t.s.attachmentReport(v, v.Attachment)
	if !ok || r.Phase != PhaseDetachedClean && r.Phase != PhaseDetachedUnclean {
		return
	}
	v = t.volume(id)
	if r.GaveUp.Why != "" {
		t.gaveUp(v, r)
	}
	v.Holder = ""
	v.Clean = r.Phase == PhaseDetachedClean && !v.suspects()
	t.detached(v, map[bool]string{true: "clean", false: "not clean: the copies will be made equal at the next attach"}[v.Clean])
}

// hostChanged moves a node's attachments to its new boot or identity, by a new grant. The
// old boot cannot come back, but its I/O may still be in flight at the targets.
func (t *tx) hostChanged(n *Node) {
	for _, id := range sortedIDs(t.s.onNode.Get(n.Name).Keys()) {
		t.sharerChanged(id, n)
		a := t.peek(id).Attachment
		if a == nil || a.Node != n.Name {
			continue
		}
		booted := a.BootID != n.InitiatorBoot
		switch {
		case a.State == Detaching && booted:
			v := t.volume(id)
			v.Holder, v.Clean = "", false
			t.detached(v, "it rebooted")
		case a.State != Detaching && (booted || a.Host != n.Host):
			v, was := t.volume(id), *a
			t.grant(v, n, was.Prefers)
			if was.Host == n.Host && was.SinceEpoch != 0 { // nobody else had it in between
				v.Attachment.SinceEpoch = was.SinceEpoch
			}
		}
	}
}

// attachmentWaits says what an attachment waits for.
func (s *State) attachmentWaits(v *Volume, a *Attachment) []string {
	if a.FenceAt != 0 {
		return s.sharerWaits(v, a)
	}
	switch a.State {
	case Granting:
		if a.Left {
			return []string{fmt.Sprintf("host %s, which has released the volume and is shutting down, to start again", a.Node)}
		}
		return append(s.provenWaits(v, a), s.grantWaits(v)...)
	case Granted, Attached:
		if why := s.deviceWaitsFor(v, a); why != "" {
			return []string{why}
		}
	case Detaching:
		if r, ok := s.attachmentReport(v, a); ok && r.WaitingFor != "" {
			return []string{fmt.Sprintf("host %s to release the volume: %s", a.Node, r.WaitingFor)}
		}
		return []string{s.hostWait(a.Node, "to release the volume")}
	}
	return nil
}

// deviceWaitsFor says why a host does not serve a volume that it was granted.
func (s *State) deviceWaitsFor(v *Volume, a *Attachment) string {
	if a.Stock {
		return s.stockWaits(v, a)
	}
	if r, old := s.releasing(v, a); old {
		return fmt.Sprintf("host %s to release epoch %d: %s", a.Node, r.Epoch, r.WaitingFor)
	}
	if a.KeptAt != 0 { // the host's report is still about the detach
		return s.hostWait(a.Node, "to hear that its detach was cancelled")
	}
	r, reported := s.attachmentReport(v, a)
	equalizing := a.State == Granted && reported && r.Phase == PhaseEqualizing
	switch {
	case equalizing && r.WaitingFor != "":
		return s.hostWait(a.Node, "to make the copies equal"+progress(r)) + ": " + r.WaitingFor
	case reported && r.WaitingFor != "":
		return r.WaitingFor
	}
	if p, ok := s.hostProblem(v, a); ok {
		return fmt.Sprintf("%s: %s: %s", a.Node, p.Doing, p.Cause)
	}
	switch {
	case equalizing:
		return s.hostWait(a.Node, "to make the copies equal"+progress(r))
	case a.State == Granted && a.Run != "":
		return s.hostWait(a.Node, "to connect the legs, so that it can copy")
	case a.State == Granted:
		return s.hostWait(a.Node, "to build the device")
	}
	return ""
}

func (s *State) hostProblem(v *Volume, a *Attachment) (Problem, bool) {
	if i := s.initiators[a.Node]; i != nil {
		for _, p := range i.status.Problems {
			if p.Object == "attachment "+v.ID.String() {
				return p, true
			}
		}
	}
	return Problem{}, false
}

// hostProblems lists what a host reports of a volume and of its paths to it, beside what the attachment waits for:
// a call that does not return, for example.
func (s *State) hostProblems(v *Volume, a *Attachment) (facts []string) {
	i := s.initiators[a.Node]
	if i == nil {
		return nil
	}
	for _, p := range i.status.Problems {
		switch p.Object {
		case "paths " + v.ID.String():
			facts = append(facts, fmt.Sprintf("on host %s, %s", a.Node, p.Cause))
		case "attachment " + v.ID.String():
			facts = append(facts, fmt.Sprintf("host %s reports: %s", a.Node, p.Cause))
		}
	}
	return facts
}

func (s *State) hostWait(node block.NodeName, what string) string {
	if !s.initiatorOnline(node) {
		return fmt.Sprintf("host %s, which is offline, %s", node, what)
	}
	return fmt.Sprintf("host %s %s", node, what)
}

// grantWaits names each in-sync leg that is not fenced, and what ends the wait.
func (s *State) grantWaits(v *Volume) (waits []string) {
	keep, rest := s.grantSplit(v)
	g := v.Layout.Group()
	for _, l := range rest {
		if l.Suspect {
			waits = append(waits, s.suspectWaitsFor(v, l))
			continue
		}
		wait := s.fenceWait(v, l)
		if g.Readable(keep[l.Column]) && len(v.Shared) > 0 {
			continue // it joins later
		}
		left := s.leaseLeft(v, s.now)
		switch {
		case v.Epoch == 1 && s.targetOnline(l.Node): // no older epoch, so the target only has to answer
		case s.standsAlone(v, l, keep) && g.Readable(keep[l.Column]):
			wait += fmt.Sprintf(" (%s)", s.whyAlone(v, l, keep))
		case !g.Readable(keep[l.Column]):
			wait += fmt.Sprintf(" (no other in-sync leg of column %d can be used)", l.Column)
		case s.readersLeft(v):
			wait += fmt.Sprintf(" (%s may still read from it)", v.formerHosts())
		case left > 0:
			wait += fmt.Sprintf(" (its copy is left out in %v)", left.Round(time.Second))
		}
		if !slices.Contains(waits, wait) { // name a target with several legs once
			waits = append(waits, wait)
		}
	}
	return waits
}

// fenceWait says what a leg waits for to be fenced.
func (s *State) fenceWait(v *Volume, l *Leg) string {
	fence := fmt.Sprintf("to fence epochs below %d", v.Epoch)
	if v.Epoch == 1 {
		fence = "to record epoch 1 on its drives" // there is no older epoch to fence
	}
	switch d := s.drives[l.Drive]; {
	case !s.targetOnline(l.Node):
		return fmt.Sprintf("target %s, which is offline, %s", l.Node, fence)
	case d == nil || d.State != DriveReady:
		return fmt.Sprintf("the drive of %v, which is not ready%s", l, s.driveReason(l))
	case s.legError(l) != "":
		return fmt.Sprintf("target %s to serve %v: %s", l.Node, l, s.legError(l))
	}
	return fmt.Sprintf("target %s %s%s", l.Node, fence, because(s.fenceProblem(v, l)))
}

// fenceProblem is the problem that a target reports with fencing a volume.
func (s *State) fenceProblem(v *Volume, l *Leg) string {
	for _, p := range s.targets[l.Node].status.Problems {
		if strings.Contains(p.Object, v.ID.String()) || strings.Contains(p.Object, l.ID.String()) {
			return p.Doing + ": " + p.Cause
		}
	}
	return ""
}

// ---- earlier hosts that are not fenced yet ----

// settleFence starts the lease clock of a detached volume whose last host has not reported
// a release.
func (t *tx) settleFence(id block.VolumeID) {
	if v := t.peek(id); v.users() == "" && v.writerMayRemain() {
		t.noteFence(v)
	}
}

// fenceWaits lists what must happen before no earlier host of a detached volume can write
// to it: each target that has not confirmed it, with the reason. A host that has released
// the volume does not write, but its exports may not be removed yet. A host that has not
// reported a release is kept out by the targets alone.
//
// A leg that cannot be fenced is waited for as long as it might be used again without a
// rebuild. Once its column has a fenced leg and the earlier host's lease is over, the next
// grant evicts it (see settleGrant), and no host reads what is still written to it.
func (s *State) fenceWaits(v *Volume) []string {
	if v.open() || v.Heal != nil && v.Heal.handedOut() { // every leg in sync was fenced for that
		return nil
	}
	fenced := make([]bool, v.Layout.Stripes)
	for i := range v.Legs {
		if l := &v.Legs[i]; l.State == LegInSync && s.admitted(v, l) {
			fenced[l.Column] = true
		}
	}
	var waits []string
	for i := range v.Legs {
		l := &v.Legs[i]
		on := s.targets[l.Node]
		online := on != nil && on.status.Online
		switch {
		case online && on.exported.Has(l.ID) && !v.copiesFrom(l): // else a target reads it
			waits = append(waits, fmt.Sprintf("target %s to remove its export", l.Node))
		case !s.waitsForFence(v, l, fenced[l.Column]):
		case !online:
			waits = append(waits, fmt.Sprintf("target %s, which is offline, to fence epochs below %d", l.Node, v.Epoch))
		default:
			waits = append(waits, fmt.Sprintf("target %s to fence epochs below %d", l.Node, v.Epoch))
		}
	}
	slices.Sort(waits)
	return slices.Compact(waits)
}

// waitsForFence reports whether a leg of a detached volume must still be fenced. columnFenced
// says that a leg of its column is.
func (s *State) waitsForFence(v *Volume, l *Leg, columnFenced bool) bool {
	if !v.writerMayRemain() || l.State != LegInSync || s.admitted(v, l) || s.confirmedDead(l.Node) {
		return false
	}
	return !columnFenced || s.readersLeft(v) || s.leaseLeft(v, s.now) > 0
}

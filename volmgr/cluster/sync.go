// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/backoff"
	"weft.dev/weft/volmgr/event"
)

// This file is the only one that moves legs between in sync, stale and
// rebuilding. The rules, each of which a test breaks on purpose:
//
//   - only the host of the current epoch may record;
//   - the last in-sync leg of a column is never removed;
//   - any other leg may be recorded stale when its host asks: the legs that stay in sync have
//     every acknowledged write, since none was acknowledged without them;
//   - a healthy leg only while its host is asked to leave it out: the host flushes the others for that
//     request, and goes on with the leg once it has ended;
//   - the manager does not give up a healthy leg that a host uses: what the others
//     acknowledged may be in their drives' caches, which only the host can flush (upkeep.go);
//   - a leg that may have lost cached writes counts for nothing until it is judged
//     (suspect.go);
//   - a request that the host has sent before one that was answered takes no effect, so that a host
//     that goes on with a leg after a refusal does not lose it unasked;
//   - a leg returns only by a resync of this epoch and of this revision, and no late request of its host
//     takes it out again.

// current finds the volume of a record request and refuses a host that may not record.
func (t *tx) current(id block.VolumeID, node block.NodeName, epoch block.Epoch) (*Volume, error) {
	v := t.s.volumes.Get(id)
	if v == nil {
		return nil, notFound("volume " + id.String())
	}
	if epoch < v.Epoch {
		return nil, refused(ReasonEpochSuperseded, v.object(), "epoch %d is superseded by %d", epoch, v.Epoch).
			with("epoch", fmt.Sprint(v.Epoch))
	}
	a := v.grantOf(node)
	switch {
	case a == nil || a.Epoch != epoch || !a.exported():
		return nil, refused(ReasonNotAttached, v.object(), "not attached to %s at epoch %d", node, epoch)
	case a.Mode == AttachSharedReadOnly:
		return nil, refused(ReasonReadOnly, v.object(), "%s has the volume read-only, so no copy can miss writes", node)
	}
	return v, nil
}

// RecordStale removes legs from the in-sync sets on behalf of the attached host: all of
// them or, with an error, none. Result: Recorded.
type RecordStale struct {
	Node   block.NodeName
	Volume block.VolumeID
	Epoch  block.Epoch
	Legs   []block.LegID
	Reason string // for people, of the legs that Reasons lacks

	Reasons map[block.LegID]StaleReason
	// Revisions are those under which the host used the legs. Hosts of older versions tell none.
	Revisions map[block.LegID]uint64

	// Number grows with each request of the host, and Term is the newest that the host knew of when
	// it sent this one; 0: not told, by a host of an older version.
	Number, Term uint64
}

// answered is the newest request of a host about a volume that this manager has answered. Whatever the
// answer was, requests that the host has sent before are not answered any more: their answers count
// for nothing there, and the host may go on with a leg whose loss was refused.
type answered struct {
	epoch  block.Epoch
	number uint64
}

// RememberAnswered takes over which requests of hosts the state in place of which s was loaded has
// answered. A manager of another term need not know: it refuses the requests of earlier terms.
func (s *State) RememberAnswered(before *State) { s.answered = before.answered }

// overtaken refuses a request if a later one of the host was answered, or may have been by the
// manager of an earlier term. It notes that this one is answered.
func (in RecordStale) overtaken(s *State) error {
	if in.Number == 0 {
		return nil
	}
	was := s.answered[in.Volume][in.Node]
	if was.epoch != in.Epoch {
		was = answered{epoch: in.Epoch} // the epoch itself refuses those of an earlier one
	}
	if in.Term < s.meta.Term || in.Number <= was.number {
		return refused(ReasonLateRecord, "volume "+in.Volume.String(), "request %d of term %d was overtaken: %d is answered, and the term is %d", in.Number, in.Term, was.number, s.meta.Term).
			with("term", fmt.Sprint(s.meta.Term)).with("number", fmt.Sprint(was.number))
	}
	if s.answered[in.Volume] == nil {
		s.answered[in.Volume] = map[block.NodeName]answered{}
	}
	s.answered[in.Volume][in.Node] = answered{in.Epoch, in.Number}
	return nil
}

// StaleReason is why a host continues without a leg.
type StaleReason struct {
	Word string // of the wire's enumeration; empty if the host did not give one
	Text string // for people
}

// leftOutReason is the word for a leg that the host was asked to leave out.
const leftOutReason = "left_out"

func (in RecordStale) apply(t *tx) (view, error) {
	if t.s.volumes.Get(in.Volume) == nil {
		return nil, notFound("volume " + in.Volume.String())
	}
	if err := in.overtaken(t.s); err != nil {
		return nil, err
	}
	v, err := t.current(in.Volume, in.Node, in.Epoch)
	if err != nil {
		return nil, err
	}
	if len(in.Legs) == 0 {
		return nil, invalid("leg_ids", "empty: name the lost legs")
	}
	left, lost, err := in.lost(v)
	if err != nil {
		return nil, err
	}
	if err := cmp.Or(in.unasked(t.s, v, lost), in.healing(t.s, v, lost)); err != nil {
		return nil, err
	}
	if c := v.unreadable(left); c >= 0 {
		return nil, refused(ReasonLastLeg, v.object(), "column %d would be left without %s", c, needed(v.Layout.Group())).
			hint("its writes wait until a leg answers again").with("column", fmt.Sprint(c))
	}
	if err := in.soundLost(t.s, v, lost); err != nil {
		return nil, err
	}
	var seq uint64
	for _, id := range in.Legs {
		if lost[id] {
			why := in.Reasons[id]
			if why.Word != leftOutReason {
				t.failed(t.volume(v.ID).leg(id))
			}
			seq = t.stale(t.volume(v.ID), id, event.LegStale, cmp.Or(why.Text, in.Reason), "reason", why.Word)
			if why.Word == leftOutReason {
				t.drain(t.volume(v.ID), id)
			}
			delete(lost, id)
		}
	}
	return recorded(t, seq), nil
}

// lost returns the copies of each column that stay, and the legs to record. It refuses a request that
// is late: the leg was recorded since, and is in sync again under another revision. What is being
// rebuilt under another one is stale already, as the request wants it.
func (in RecordStale) lost(v *Volume) (left []block.MemberSet, lost map[block.LegID]bool, err error) {
	left, lost = v.trusted(), map[block.LegID]bool{}
	for _, id := range in.Legs {
		l := v.leg(id)
		if l == nil {
			return nil, nil, invalid("leg_ids", "%v is not a leg of volume %s", id, v.Name)
		}
		used := in.Revisions[id]
		late := used != 0 && used != l.Revision
		if late && l.State == LegInSync {
			return nil, nil, refused(ReasonRevisionMoved, v.object(), "%v is in sync at revision %d, and the host lost revision %d", l, l.Revision, used)
		}
		if l.trusted() {
			left[l.Column] = left[l.Column].Without(l.Copy)
		}
		if l.State == LegInSync || l.State == LegRebuilding && !late {
			lost[id] = true
		}
	}
	return left, lost, nil
}

// unasked refuses to record a healthy leg as left out that its host is not asked to leave out, or no
// longer: it flushed the others for an earlier request, and may have gone on with the leg since.
func (in RecordStale) unasked(s *State, v *Volume, lost map[block.LegID]bool) error {
	for _, id := range in.Legs {
		if lost[id] && in.Reasons[id].Word == leftOutReason && s.asked[v.ID][id] == "" {
			return refused(ReasonNotAsked, v.object(), "%s is not asked to leave out %v, or no longer", in.Node, v.leg(id))
		}
	}
	return nil
}

// soundLost refuses to record a leg without which its column has legs in damaged trees alone. These take no writes,
// so the host gains nothing, and what they have lost would be lost for good. A leg that an online target has not
// mapped yet may turn out to be in one.
func (in RecordStale) soundLost(s *State, v *Volume, lost map[block.LegID]bool) error {
	for _, id := range in.Legs {
		l := v.leg(id)
		if !lost[id] {
			continue
		}
		if s.onlySound(v, l, lost) {
			return refused(ReasonLastLeg, v.object(), "%v is the only leg of column %d that is not in a damaged tree", l, l.Column).
				hint("its writes wait until the leg answers again").with("column", fmt.Sprint(l.Column))
		}
		if o := s.unsureOf(v, l, lost); o != nil {
			return refused(ReasonLastLeg, v.object(), "target %s has not mapped %v yet, so whether its tree is damaged is not known, and %v would be given up for it", o.Node, o, l).
				hint("its writes wait until the target has mapped the leg, or until the other leg answers again").with("column", fmt.Sprint(l.Column))
		}
	}
	return nil
}

// healing refuses to record a leg in sync of a volume that its host only heals: nobody writes, so no
// such leg misses a write. One in a damaged tree cannot be made equal to others.
func (in RecordStale) healing(s *State, v *Volume, lost map[block.LegID]bool) error {
	if v.Heal == nil {
		return nil
	}
	for _, id := range in.Legs {
		if l := v.leg(id); lost[id] && l.State == LegInSync && s.damage(l).Damage == "" {
			return refused(ReasonReadOnly, v.object(), "%s copies to legs that are not in sync and nobody writes, so %v cannot miss writes", in.Node, l)
		}
	}
	return nil
}

// Recorded says when, and as which event, a change of the in-sync sets became durable.
// EventSeq is 0 if nothing had to change. Term and Generation are those of the state after
// the change.
type Recorded struct {
	Time       time.Time
	EventSeq   uint64
	Term       uint64
	Generation uint64
}

func recorded(t *tx, seq uint64) view {
	r := Recorded{Time: t.now.UTC(), EventSeq: seq}
	return func(s *State) any {
		r.Term, r.Generation = s.meta.Term, s.meta.Generation
		return r
	}
}

// RecordInSync returns rebuilt legs to the in-sync sets. Result: Recorded.
type RecordInSync struct {
	Node   block.NodeName
	Volume block.VolumeID
	Epoch  block.Epoch
	Legs   []RebuiltLeg
}

// RebuiltLeg is a leg whose resync is complete.
type RebuiltLeg struct {
	Leg      block.LegID
	Revision uint64
	Copied   block.Size
	What     string // what was copied, and why; empty: not told
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
		t.endRebuild(v, l.ID, r.Copied, "")
		l.good()
		l.Rebuilt = t.now.UTC()
		t.s.trials.Rebuilt(t.s.by, l.ID, t.now)
		v.Generation++
		seq = t.volumeEvent(v, event.Info, event.LegInSync, fmt.Sprintf("%v: %s copied%s", l, r.Copied.Short(), because(r.What)),
			"leg", l.ID.String(), "node", string(l.Node), "epoch", fmt.Sprint(v.Epoch), "bytes_copied", fmt.Sprint(uint64(r.Copied)))
	}
	return recorded(t, seq), nil
}

// good makes a leg in sync and clears what described it as stale.
func (l *Leg) good() {
	l.State, l.Reason, l.StaleSince, l.StaleAt, l.Blank = LegInSync, "", time.Time{}, 0, false
	l.CopyAll, l.CopyAllSince, l.CacheLost, l.AllSince = false, 0, false, 0
	l.Copying = nil
}

// copyAll notes that what a stale leg misses is not known from now on.
func (l *Leg) copyAll() {
	l.CopyAll, l.CopyAllSince, l.CacheLost, l.AllSince = true, l.Revision, false, 0
}

// copyUnflushed notes that a stale leg may have lost what only its drive's cache held. Its target exports
// it only under a later revision than any before the loss, so nothing that a host has written or
// flushed before can be answered after it.
func (l *Leg) copyUnflushed() {
	switch known := l.CopyAllSince > 0; {
	case !l.CopyAll:
		l.CacheLost = true
	case !l.CacheLost && known:
		l.CacheLost, l.AllSince = true, l.CopyAllSince
	}
	l.CopyAll, l.CopyAllSince = true, l.Revision
}

// rebuilt checks one leg of RecordInSync. A leg that is in sync already at this revision is
// accepted, so a request may be repeated.
func (t *tx) rebuilt(v *Volume, r RebuiltLeg) error {
	l := v.leg(r.Leg)
	switch {
	case l == nil:
		return invalid("legs", "%v is not a leg of volume %s", r.Leg, v.Name)
	case l.Revision != r.Revision:
		return refused(ReasonRevisionMoved, v.object(), "%v became stale again: it is at revision %d, not %d", l, l.Revision, r.Revision)
	case l.State == LegInSync:
		return nil
	case l.State != LegRebuilding:
		return refused(ReasonRevisionMoved, v.object(), "%v is not being rebuilt", l)
	case !t.s.admitted(v, l):
		return refused(ReasonNotFenced, v.object(), "%s has not confirmed epoch %d since the manager started", l.Node, v.Epoch).hint("try again")
	}
	return nil
}

// stale records one leg, in sync or rebuilding, as missing writes.
func (t *tx) stale(v *Volume, id block.LegID, kind, reason string, attributes ...string) uint64 {
	l := v.leg(id)
	if l.State == LegInSync {
		v.Generation++
	}
	if l.State == LegRebuilding {
		t.endRebuild(v, id, 0, reason)
	}
	suspect := l.Suspect
	l.State, l.Reason, l.StaleSince, l.StaleAt, l.Suspect = LegStale, reason, t.now.UTC(), t.gen, false
	l.Revision++
	switch {
	case !suspect:
	case l.CacheLost:
		l.copyUnflushed()
	default:
		l.copyAll()
	}
	t.s.trials.Lost(t.s.by, l.ID, t.now)
	attributes = append([]string{"leg", id.String(), "node", string(l.Node), "epoch", fmt.Sprint(v.Epoch), "revision", fmt.Sprint(l.Revision)}, attributes...)
	return t.volumeEvent(v, event.Warning, kind, fmt.Sprintf("%v%s", l, because(reason)), attributes...)
}

// evict makes a leg stale by volmgr's own decision. The caller has made sure that the
// column can be read without it; evict panics if it cannot.
func (t *tx) evict(v *Volume, id block.LegID, reason string) {
	if l := v.leg(id); l.State == LegInSync && !v.dispensable(l) {
		panic(fmt.Sprintf("cluster: evicting an in-sync leg %v that cannot be spared, of column %d of volume %s", id, l.Column, v.Name))
	}
	t.stale(v, id, event.LegEvicted, reason)
}

// drain lets a leg's host stop using it before its export ends, so that no I/O fails. The leg
// was well and has just become stale. A host that shares the volume could read what others no
// longer write there, so only an exclusive attachment is waited for, and only if its host tells
// what it uses.
func (t *tx) drain(v *Volume, id block.LegID) {
	a := v.Attachment
	if a == nil || !a.handedOut() {
		return
	}
	if r, ok := t.s.attachmentReport(v, a); ok && r.Tells {
		l := v.leg(id)
		l.Draining, l.DrainingAt = v.Epoch, t.gen
		l.Revision-- // until that export ends
	}
}

// drains reports whether a stale leg is still exported to the host that used it.
func (v *Volume) drains(l *Leg) bool {
	return l.State == LegStale && l.Draining != 0 && l.Draining == v.Epoch && v.Attachment != nil && v.Attachment.handedOut()
}

// settleDraining ends the exports of legs that their host has stopped using.
func (t *tx) settleDraining(id block.VolumeID) {
	for _, l := range t.peek(id).Legs {
		if v := t.peek(id); l.Draining != 0 && (!v.drains(&l) || t.s.released(v, &l)) {
			t.endDraining(id, l.ID)
		}
	}
}

func (t *tx) endDraining(id block.VolumeID, leg block.LegID) {
	l := t.volume(id).leg(leg)
	l.Draining, l.DrainingAt, l.StaleAt = 0, 0, t.gen
	l.Revision++
}

// released reports whether the host of a volume has stopped using a leg that drains.
func (s *State) released(v *Volume, l *Leg) bool {
	r, ok := s.attachmentReport(v, v.Attachment)
	return ok && r.Tells && s.initiators[v.Attachment.Node].status.Generation >= l.DrainingAt && !slices.Contains(r.InUse, l.ID)
}

func (t *tx) abandonRebuilds(v *Volume, why string) {
	for _, l := range v.Legs {
		if l.State == LegRebuilding {
			t.stale(v, l.ID, event.LegStale, why)
		}
	}
}

// failed counts a loss during a rebuild, or soon after one. Any other loss resets the count,
// and so does one of a target that was away, since that explains it.
func (t *tx) failed(l *Leg) {
	away := !t.s.targetOnline(l.Node)
	if (l.State == LegRebuilding || t.s.trials.Fresh(l.ID, t.now)) && !away {
		l.Failures++
	} else {
		l.Failures = 0
	}
}

// resetFailures resets the failures of a node's legs when its target turns out to be away: the
// losses may have been recorded before that was known.
func (t *tx) resetFailures(node block.NodeName) {
	for id := range t.s.onNode.Get(node).Keys() {
		for _, l := range t.peek(id).Legs {
			if l.Node == node && l.Failures > 0 {
				t.volume(id).leg(l.ID).Failures = 0
			}
		}
	}
}

// pauses reports whether a stale leg's pause is not over yet.
func (s *State) pauses(l *Leg) bool {
	lost := s.trials.LostAt(l.ID)
	return backoff.Pause(l.Failures) > 0 && (lost.IsZero() || s.now.Sub(lost) < backoff.Pause(l.Failures))
}

// settleTrials begins the pauses of legs that were lost before the manager started.
func (t *tx) settleTrials(id block.VolumeID) {
	for _, l := range t.peek(id).Legs {
		if l.State == LegStale && t.s.trials.LostAt(l.ID).IsZero() {
			t.s.trials.Lost(t.s.by, l.ID, t.now)
		}
	}
}

// settleRebuilds turns stale legs of a served volume into rebuilding ones, one
// per column at a time.
func (t *tx) settleRebuilds(id block.VolumeID) {
	t.settleTrials(id)
	v := t.peek(id)
	if v.copier() == nil { // as of any number of detached volumes, at each look
		return
	}
	t.giveWay(id)
	v = t.peek(id)
	busy := map[int]bool{}
	for _, l := range v.Legs {
		busy[l.Column] = busy[l.Column] || l.State == LegRebuilding
	}
	legs := slices.Clone(v.Legs) // first those of which only changes are copied
	slices.SortStableFunc(legs, func(a, b Leg) int { return cmp.Compare(rank(a.Blank), rank(b.Blank)) })
	for _, l := range legs {
		if l.State != LegStale || !l.member() || l.Copying != nil || busy[l.Column] || t.s.rebuildWaitsFor(v, &l) != "" {
			continue
		}
		busy[l.Column] = true
		v = t.volume(id)
		v.leg(l.ID).State = LegRebuilding
		t.beginRebuild(v, &l)
		t.volumeEvent(v, event.Info, event.LegRebuilding, l.String(),
			"leg", l.ID.String(), "node", string(l.Node), "epoch", fmt.Sprint(v.Epoch), "revision", fmt.Sprint(l.Revision))
	}
}

func rank(last bool) int {
	if last {
		return 1
	}
	return 0
}

// rebuildWaitsFor says why a stale leg is not being rebuilt; empty if it may be.
func (s *State) rebuildWaitsFor(v *Volume, l *Leg) string {
	switch {
	case l.Copying != nil:
		return s.copyingWaits(v, l)
	case v.IsSnapshot():
		return s.uncopiedWaits(v, l)
	}
	why := cmp.Or(s.noCopier(v), s.notCopied(v, l))
	switch unhealed := s.unhealed(v, l); {
	case unhealed == "" || v.users() != "":
		return why
	case v.Heal != nil:
		return cmp.Or(why, unhealed)
	default:
		return "the volume to be attached; no host heals it meanwhile, since " + unhealed
	}
}

// noCopier says why no host could copy to a leg now; empty if one can.
func (s *State) noCopier(v *Volume) string {
	if len(v.Shared) > 0 && v.sealed() {
		return fmt.Sprintf("the volume, shared by %s, to be detached, so that a host can heal it", v.users())
	}
	if len(v.Shared) > 0 {
		return fmt.Sprintf("the volume, shared by %s, to be attached to one host alone", v.users())
	}
	a := v.copier()
	switch {
	case a == nil:
		return s.noHealer(v)
	case a.State == Detaching && a.Run != "":
		return fmt.Sprintf("host %s to end its copying", a.Node)
	case a.State != Attached && a.Run != "":
		return fmt.Sprintf("host %s to connect the legs, so that it can copy", a.Node)
	case a.State != Attached:
		return "the volume to be attached"
	case a.Stock:
		return fmt.Sprintf("the volume to be attached to a host with Weft's agent; %s has none to copy with", a.Node)
	}
	// A stalled host counts too: its I/O may wait for this very copy.
	if r, ok := s.attachmentReport(v, a); !ok || r.Phase != PhaseServing && r.Phase != PhaseStalled {
		return fmt.Sprintf("host %s to serve the volume", a.Node)
	}
	return ""
}

// notCopied says why a stale leg cannot be copied to yet; empty if it can.
func (s *State) notCopied(v *Volume, l *Leg) string {
	on := s.targets[l.Node]
	if why := s.unreachable(v, l); why != "" {
		return why
	}
	switch {
	case !s.admitted(v, l):
		return fmt.Sprintf("target %s to fence epochs below %d", l.Node, v.Epoch)
	case on.status.Generation < l.StaleAt || on.exported.Has(l.ID):
		return fmt.Sprintf("target %s to remove the stale export", l.Node)
	case l.Blank && s.labelsLack(v, l.Column, l.Listed) != nil:
		return fmt.Sprintf("the label of %v to list the new leg", s.labelsLack(v, l.Column, l.Listed))
	}
	return s.rests(v, l)
}

// uncopyable is the part of notCopied that may take long: no host is given a volume to copy to such
// a leg.
func (s *State) uncopyable(v *Volume, l *Leg) string {
	return cmp.Or(s.unreachable(v, l), s.rests(v, l))
}

// unreachable says why a leg could not be written; empty if it can.
func (s *State) unreachable(v *Volume, l *Leg) string {
	on, d := s.targets[l.Node], s.drives[l.Drive]
	switch {
	case on == nil || !on.status.Online:
		return fmt.Sprintf("target %s, which is offline", l.Node)
	case d == nil || d.State != DriveReady:
		return fmt.Sprintf("the drive of %v, which is not ready%s", l, s.driveReason(l))
	case !s.legReady(l):
		return fmt.Sprintf("target %s to map the leg%s", l.Node, because(s.legError(l)))
	case s.damage(l).Damage != "": // it would fail each write
		return fmt.Sprintf("%v to be made again elsewhere: its tree is damaged, and takes no writes", l)
	case !s.largeEnough(v, l):
		return fmt.Sprintf("target %s to grow %v to %v, as it missed an expansion", l.Node, l, v.Layout.LegSize(v.Size))
	}
	return ""
}

// rests says until when a leg that could be copied to is left alone; empty if it is not.
func (s *State) rests(v *Volume, l *Leg) string {
	switch {
	case s.leftOutUntil(v, l) != "":
		return s.leftOutUntil(v, l)
	case s.pauses(l):
		return fmt.Sprintf("the end of a pause of %v, since the rebuild failed, or the leg was lost soon after it, %d times in a row", backoff.Pause(l.Failures), l.Failures)
	}
	return ""
}

// targetRebooted applies lossOf to the node's legs, which may have lost cached writes. It
// skips the legs in sync of volumes that were detached cleanly: their caches were flushed, also of
// those that were copied to since.
func (t *tx) targetRebooted(name block.NodeName) {
	for _, id := range sortedIDs(t.s.onNode.Get(name).Keys()) {
		if !t.peek(id).Restored { // a restored one is judged by its labels
			t.losses(id, "", func(l *Leg) bool { return l.Node == name })
		}
	}
}

// losses applies lossOf to those legs of a volume which were lost, unless their caches were flushed. The loss
// of one leg may change others: it ends a healing.
func (t *tx) losses(id block.VolumeID, why string, lost func(*Leg) bool) {
	v := t.peek(id)
	if v.State != VolumeReady || v.Clean && v.Heal == nil {
		return
	}
	for _, old := range v.Legs {
		now := t.peek(id)
		if l := now.leg(old.ID); lost(l) && !(now.Clean && l.State == LegInSync) {
			t.lossOf(id, *l, why)
		}
	}
}

// drivesReturned applies lossOf to the legs on drives that were away or failed a flush, and
// so may have lost cached writes though their target has not booted.
func (t *tx) drivesReturned(name block.NodeName, on *target, booted bool) {
	for _, d := range t.s.recordedDrives(name) {
		r, seen := on.drives[d.ID]
		if !seen || r.Incarnation == "" || r.Incarnation == d.Incarnation {
			continue
		}
		t.drives.edit(d.ID).Incarnation = r.Incarnation
		if d.Incarnation == "" || block.SameIncarnation(d.Incarnation, r.Incarnation) || booted || !t.volatileCache(d.ID) {
			continue
		}
		t.event(event.Warning, event.DriveReturned, d.object(), "it was away or failed a flush: unflushed data may be lost", "node", string(name), "drive", d.ID.String())
		t.driveReturned(d, on.report != nil && len(on.report.ProcessPortals) > 0 && !block.SameLosses(d.Incarnation, r.Incarnation))
	}
}

// driveReturned applies lossOf to the legs of a drive. failed: a flush of the process beside its kernel has failed.
func (t *tx) driveReturned(d *Drive, failed bool) {
	for _, id := range sortedIDs(t.s.onNode.Get(d.Node).Keys()) {
		t.losses(id, driveLoss, func(l *Leg) bool { return l.Drive == d.ID })
		if failed {
			t.unknownLosses(id, d.ID)
		}
	}
}

// unknownLosses has legs copied whole that the kernel serves beside a process whose flush has failed. A flush
// of their hosts may have succeeded since, although their own writes were lost by the other one.
func (t *tx) unknownLosses(id block.VolumeID, on block.DriveID) {
	for _, old := range t.peek(id).Legs {
		if old.Drive != on || t.peek(id).inProcess(t.nodes.peek(old.Node)) {
			continue
		}
		switch l := t.peek(id).leg(old.ID); {
		case l.State == LegStale && l.CacheLost:
			t.volume(id).leg(l.ID).copyAll()
		case l.Suspect && l.CacheLost:
			t.volume(id).leg(l.ID).CacheLost = false
		}
	}
}

// lossOf handles a leg that may have lost cached writes: it becomes suspect, or stale if it
// was rebuilding, or reborn if no copy is better. why is empty if its target booted.
func (t *tx) lossOf(id block.VolumeID, l Leg, why string) {
	if why != l.Loss {
		t.volume(id).leg(l.ID).Loss = why
	}
	lossy := t.volatileCache(l.Drive)
	if l.State == LegInSync && lossy { // what was copied from it may be newer than what it has now
		t.stopHealing(id, fmt.Sprintf("%v: %s", &l, cmp.Or(why, rebootLoss)))
		l = *t.peek(id).leg(l.ID)
	}
	alone := !t.peek(id).dispensable(&l)
	switch {
	case l.State == LegRebuilding:
		t.stale(t.volume(id), l.ID, event.LegStale, cmp.Or(why, "its target rebooted during the rebuild"))
	case l.State != LegInSync || l.Suspect:
	case !alone && lossy:
		t.suspectLeg(t.volume(id), l.ID)
	case alone && lossy && len(t.peek(id).attachments()) > 0:
		v := t.volume(id)
		t.lostCache(v, v.leg(l.ID))
	}
	if t.peek(id).leg(l.ID).State == LegStale && lossy {
		t.copiesUnflushed(id, l)
	}
}

// copiesUnflushed has a stale leg copied by what its drive's cache may have lost.
func (t *tx) copiesUnflushed(id block.VolumeID, l Leg) {
	if l.Draining != 0 { // its host would read what it lost
		t.endDraining(id, l.ID)
	}
	if l := t.volume(id).leg(l.ID); t.flushes(l.Drive) {
		l.copyUnflushed()
	} else {
		l.copyAll()
	}
}

// flushes reports whether each flush of a drive has made durable what was written before, since its target
// booted; until cachesReported has seen a boot, it speaks of the time before that.
func (t *tx) flushes(id block.DriveID) bool {
	d := t.drives.peek(id)
	return d != nil && !d.CacheChanged
}

func (t *tx) volatileCache(id block.DriveID) bool {
	d := t.drives.peek(id)
	return d == nil || d.VolatileCache
}

// PromoteStaleLeg makes a stale leg the only good one of its column. The writes that it
// missed are lost. Result: Volume.
type PromoteStaleLeg struct {
	Volume         string
	Leg            block.LegID
	AcceptDataLoss bool
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
	case found.State != VolumeReady || found.Restoring != nil && !found.undecided():
		return nil, refused(ReasonNotReady, found.object(), "%s", found.unready())
	case found.Restored:
		return nil, t.s.stillRestored(found)
	case l.State == LegInSync && found.inSync()[l.Column] == block.Members(l.Copy):
		return volumeResult(found.ID), nil // repeated
	}
	if err := t.s.mayPromote(found, l, in.AcceptDataLoss); err != nil {
		return nil, err
	}
	v := t.volume(found.ID)
	t.promote(v, in.Leg)
	if x := v.Restoring; x != nil { // its legs begin only now to go back
		next := *x
		next.Since = t.now.UTC()
		v.Restoring = &next
	}
	return volumeResult(v.ID), nil
}

// mayPromote refuses to promote a leg while the volume is attached, while a good leg of its
// column can be served and nothing of it is lost, or while the operator has not accepted the loss of writes.
func (s *State) mayPromote(v *Volume, l *Leg, acceptLoss bool) error {
	switch {
	case v.Layout.Group().Needs > 1:
		return &Error{
			Kind: Unimplemented, Object: v.object(),
			Text: fmt.Sprintf("%s: a column of %v cannot be read from one leg, so none can be promoted alone", v.object(), v.Layout.Group()),
		}
	case l.Blank || !l.member():
		return refused(ReasonLegNotStale, v.object(), "%v never held the volume's data, or was given up: it cannot be promoted", l)
	case l.State != LegStale && !l.Suspect:
		return refused(ReasonLegNotStale, v.object(), "%v is %s: only a stale leg can be promoted", l, s.legFact(l)).
			hint("`weft explain volume %s` says what the volume waits for", v.Name)
	case v.users() != "":
		return refused(ReasonAttached, v.object(), "attached to %s", v.users()).
			hint("`weft detach %s` first; with --force if its host is lost", v.Name)
	case l.Suspect && !acceptLoss:
		return refused(ReasonDataLoss, v.object(), "%v may have lost cached writes", l).
			hint("if every other copy is gone for good: `weft volume promote-stale %s %v --accept-data-loss`", v.Name, l.ID)
	case !acceptLoss:
		return refused(ReasonDataLoss, v.object(), "%v has missed writes since %s", l, l.StaleSince.UTC().Format(time.RFC3339)).
			hint("if every good copy is gone for good: `weft volume promote-stale %s %d.%d --accept-data-loss`", v.Name, l.Column, l.Copy)
	}
	for i := range v.Legs {
		if o := &v.Legs[i]; o.Column == l.Column && s.isKnown(o) && s.servable(o) {
			return refused(ReasonInSyncLegExists, v.object(), "%v is in sync and can be reached", o).
				hint("attach the volume: the stale leg is then rebuilt without loss")
		}
	}
	return nil
}

// promote makes one leg the only good one of its column. All other legs of the column
// become stale, even good ones, and a new epoch keeps their old contents apart.
func (t *tx) promote(v *Volume, id block.LegID) {
	t.endHealing(v, "an operator promotes a leg")
	v.Epoch++
	v.Clean = v.unwritten() // nobody could write it
	v.Generation++
	chosen := v.leg(id)
	chosen.good()
	chosen.Suspect = false
	chosen.Revision++
	for _, l := range v.Legs {
		if l.Column == chosen.Column && l.ID != id && l.State == LegInSync {
			t.stale(v, l.ID, event.LegStale, "another leg was promoted in its place")
		}
	}
	t.volumeEvent(v, event.Trouble, event.LegPromoted, fmt.Sprintf("%v: the writes that it missed are lost", chosen),
		"leg", id.String(), "node", string(chosen.Node), "epoch", fmt.Sprint(v.Epoch))
}

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
)

// A rebuild copies a column's data to one leg, which a host does while it serves the volume. This
// file keeps their history, says how far they are, and gives detached volumes to hosts that copy;
// sync.go decides when rebuilds begin and end.

// mostPastRebuilds is about how many rebuilds that have ended a record keeps.
const mostPastRebuilds = 8

// LegRebuild is the copying of a column's data to one leg.
type LegRebuild struct {
	Leg    block.LegID    `json:"leg"`
	Column int            `json:"column"`
	Copy   int            `json:"copy"`
	Node   block.NodeName `json:"node"`
	Drive  block.DriveID  `json:"drive"`
	// Replaces is the node of the leg that it takes the place of; empty: the leg was there before.
	Replaces block.NodeName `json:"replaces,omitempty"`
	Began    time.Time      `json:"began"`
	Ended    time.Time      `json:"ended,omitzero"`   // zero: it is under way
	Failed   string         `json:"failed,omitempty"` // why it ended early
	// Done and Total are what was copied and what was to be; 0: not known.
	Done  block.Size `json:"done,omitempty"`
	Total block.Size `json:"total,omitempty"`

	// Derived, for readers: of one under way, bytes in a second lately, and the time left at that
	// rate; 0: not known.
	Speed block.Size    `json:"-"`
	Left  time.Duration `json:"-"`
}

// CopyReport is how far a host is with the rebuild of a leg.
type CopyReport struct {
	Leg                block.LegID
	Done, Total, Speed block.Size
	What               string // what is copied, and why; empty: not told
	WaitingFor         string // empty: it goes on
}

// beginRebuild records that a leg is copied to.
func (t *tx) beginRebuild(v *Volume, l *Leg) {
	r := LegRebuild{Leg: l.ID, Column: l.Column, Copy: l.Copy, Node: l.Node, Drive: l.Drive, Began: t.now.UTC()}
	if l.Blank {
		for _, o := range v.column(l.Column) {
			if t.leaving(o) != "" && r.Replaces == "" {
				r.Replaces = o.Node
			}
		}
	}
	all, ended := []LegRebuild{r}, 0
	for _, old := range v.Rebuilds {
		if old.Ended.IsZero() {
			all = append(all, old)
		} else if ended++; ended < mostPastRebuilds {
			all = append(all, old)
		}
	}
	v.Rebuilds = all
}

// endRebuild records the end of a leg's rebuild, if one is under way; copied is 0 if the host did
// not say how much that was, and failed is empty if the leg has everything.
func (t *tx) endRebuild(v *Volume, leg block.LegID, copied block.Size, failed string) {
	i := slices.IndexFunc(v.Rebuilds, func(r LegRebuild) bool { return r.Leg == leg && r.Ended.IsZero() })
	if i < 0 {
		return
	}
	all := slices.Clone(v.Rebuilds)
	r := &all[i]
	if c, ok := t.s.copyReport(v, leg); ok {
		r.Done, r.Total = c.Done, c.Total
	}
	if failed == "" {
		r.Done, r.Total = copied, copied
	}
	r.Ended, r.Failed = t.now.UTC(), failed
	v.Rebuilds = all
}

// copyReport is the host's newest report on the rebuild of a leg.
func (s *State) copyReport(v *Volume, leg block.LegID) (CopyReport, bool) {
	a := v.copier()
	if a == nil {
		return CopyReport{}, false
	}
	r, ok := s.attachmentReport(v, a)
	i := slices.IndexFunc(r.Copies, func(c CopyReport) bool { return c.Leg == leg })
	if !ok || i < 0 {
		return CopyReport{}, false
	}
	return r.Copies[i], true
}

// rebuildViews are a volume's rebuilds as readers see them.
func (s *State) rebuildViews(v *Volume) []LegRebuild {
	all := slices.Clone(v.Rebuilds)
	for i := range all {
		if r := &all[i]; r.Ended.IsZero() {
			if c, ok := s.copyReport(v, r.Leg); ok {
				r.progress(c, s.now)
			}
		}
	}
	return all
}

// progress adds what a host reports. A host that does not say how fast it copies is taken to go on
// as it did so far.
func (r *LegRebuild) progress(c CopyReport, now time.Time) {
	r.Done, r.Total, r.Speed = min(c.Done, c.Total), c.Total, c.Speed
	if past := now.Sub(r.Began).Seconds(); r.Speed == 0 && past >= 1 {
		r.Speed = block.Size(float64(r.Done) / past)
	}
	if r.Speed > 0 {
		r.Left = time.Duration(float64(r.Total-r.Done)/float64(r.Speed)*float64(time.Second)) + time.Second/2
		r.Left = r.Left.Truncate(time.Second)
	}
}

// String says how far a rebuild that is under way has come; empty if that is not known.
func (r LegRebuild) String() string {
	if r.Total == 0 {
		return ""
	}
	text := fmt.Sprintf("%s of %s, %d%%", r.Done.Short(), r.Total.Short(), uint64(100*float64(r.Done)/float64(r.Total)))
	if r.Speed > 0 {
		text += fmt.Sprintf(", %s a second, %v left", r.Speed.Short(), r.Left)
	}
	return text
}

// rebuildOf is the rebuild of a leg that is under way, as readers see it.
func (s *State) rebuildOf(v *Volume, leg block.LegID) (LegRebuild, bool) {
	for _, r := range s.rebuildViews(v) {
		if r.Leg == leg && r.Ended.IsZero() {
			return r, true
		}
	}
	return LegRebuild{}, false
}

// copying says how far the rebuild of a leg is, in brackets.
func (s *State) copying(v *Volume, l *Leg) string {
	r, _ := s.rebuildOf(v, l.ID)
	what := ""
	if c, ok := s.copyReport(v, l.ID); ok {
		if what = because(c.What); c.WaitingFor != "" {
			what += "; it waits for " + c.WaitingFor
		}
	}
	if text := r.String(); text != "" {
		return " (" + text + ")" + what
	}
	return s.progress(v) + what
}

// explainRebuilds says how fast rebuilds may be.
func (s *State) explainRebuilds(e *Explanation, v *Volume) {
	if v.RebuildRate > 0 {
		e.Facts = append(e.Facts, fmt.Sprintf("its legs are rebuilt at %s a second at most", v.RebuildRate.Short()))
	}
}

// setRebuildRate changes the most that is copied to a volume's legs in a second; nil leaves it.
func (t *tx) setRebuildRate(v *Volume, rate *block.Size) error {
	switch {
	case rate == nil || *rate == v.RebuildRate:
		return nil
	case *rate != 0 && *rate < block.MinRebuildRate:
		return invalid("rebuild_bytes_per_second", "%v: must be at least %v, or 0 for no limit", *rate, block.MinRebuildRate)
	}
	t.volume(v.ID).RebuildRate = *rate
	text := "its legs are rebuilt without a limit of the rate"
	if *rate > 0 {
		text = fmt.Sprintf("its legs are rebuilt at %s a second at most", rate.Short())
	}
	t.volumeEvent(v, event.Info, event.VolumeUpdated, text)
	return nil
}

// ---- detached volumes ----

// A detached volume that lacks a copy is healed: the manager has a host copy to its stale legs, as the
// host to which a volume is attached does, but without a device for users.
//
//	                wants a copy, HealAfter          every leg in sync is fenced to E
//	(detached, E-1) ────────────────────► GRANTING ─────────────────────────────────► GRANTED
//	        ▲                       copies were made equal                               │ legs connected,
//	        │ released         ┌─────────────────────────────────────────────────────────┤ and made equal
//	        │                  ▼    nothing left to copy, or the host shall not heal     ▼
//	(detached, E) ◄──── DETACHING ◄─────────────────────────────────────────────────  ATTACHED
//
//	from anywhere: a grant to somebody, a change of the volume, the host is gone or
//	makes no progress: (detached, E+1), and the legs that were copied to are stale
//
// The first host to heal a volume that was not detached cleanly only makes its copies equal, which takes
// seconds where copying takes hours. From then on the volume is detached cleanly, so that it can be shared
// and snapshots can be taken of it. The next host copies.
//
// It is no attachment. Nobody can write, so
//
//   - the host may not record that a leg in sync is stale: none misses a write. So the in-sync sets
//     only grow at this epoch, and labels say of it what they say of a detached volume;
//   - a volume that was detached cleanly stays so, whatever becomes of the host: it writes only to legs
//     that are not in sync, and what is recorded in sync was flushed;
//   - nobody waits for the host. A grant begins the next epoch at once, and needs the same fence as
//     every grant: no leg that is used admits an older epoch.
//
// All legs in sync take part, so that a clean release says that all of them are equal. A sealed volume can
// have no host that leaves out a lost leg, so its healing does: see leftBehind.

// healLevel is the level from which on there are healings.
const healLevel block.Level = 5

const (
	healLook     = 2 * time.Second  // how often beginHealings looks
	healRelease  = 10 * time.Second // how long a host may take to release a volume
	healPatience = time.Minute      // how long it may make no progress
	mostHealed   = 8                // volumes at a time, one for each host
)

// healing is what the manager remembers of a detached volume that lacks a copy.
type healing struct {
	since time.Time // it is detached, and lacks a copy that could be made

	failures int       // attempts in a row that failed; one that a user, or a change of the volume, ended did not
	failed   time.Time // when the last of them did
	why      string    // why, for people

	moved time.Time // when the present one last made progress
	reach string    // how far it was then
	done  block.Size
}

// again is when the next host may begin.
func (x *healing) again() time.Time {
	if x.failures == 0 {
		return time.Time{}
	}
	return x.failed.Add(min(10*time.Minute, 10*time.Second<<min(x.failures, 10)))
}

// copier is the host that copies to the volume's legs: the one that heals it, or that has it alone; nil:
// there is none.
func (v *Volume) copier() *Attachment {
	if v.Heal != nil {
		return v.Heal
	}
	return v.Attachment
}

func (v *Volume) checkHeal() error {
	switch h := v.Heal; {
	case h == nil:
	case v.Attachment != nil || len(v.Shared) > 0:
		return fmt.Errorf("healed by %s, and attached to %s", h.Node, v.users())
	case h.Epoch != v.Epoch || h.Run == "":
		return fmt.Errorf("healed by %s at epoch %d, process %q; the volume is at epoch %d", h.Node, h.Epoch, h.Run, v.Epoch)
	}
	return nil
}

// wantsCopy reports whether a host could copy to a leg of the volume now.
func (s *State) wantsCopy(v *Volume) bool {
	return slices.ContainsFunc(v.Legs, func(l Leg) bool {
		return l.member() && (l.State == LegRebuilding || l.State == LegStale && cmp.Or(s.uncopyable(v, &l), s.unhealed(v, &l)) == "")
	})
}

// unhealable says why no host may be given a detached volume to copy to its legs; empty if one may.
func (s *State) unhealable(v *Volume) string {
	switch {
	case v.IsSnapshot():
		return "targets copy snapshots"
	case !v.usable():
		return "it is " + v.unready()
	case v.users() != "":
		return "it is attached to " + v.users()
	case v.ExpandingTo != 0:
		return "it is being expanded"
	case len(s.takings.Get(v.ID)) > 0:
		return "a snapshot of it is being taken"
	case v.unreadable(v.inSync()) >= 0:
		return fmt.Sprintf("column %d has no copy in sync", v.unreadable(v.inSync()))
	}
	for i := range v.Legs {
		if why := s.holdsUp(v, &v.Legs[i]); why != "" {
			return why
		}
	}
	return ""
}

// holdsUp says why no host can heal a volume because of one of its legs in sync; empty if it does not matter.
func (s *State) holdsUp(v *Volume, l *Leg) string {
	switch {
	case l.State != LegInSync || s.leftBehind(v, l):
		return ""
	case !l.Suspect && s.servable(l):
		return s.unhealed(v, l)
	case v.sealed() && s.lostForGood(l) && s.readersLeft(v):
		return fmt.Sprintf("%v is %s, and %s may still read from it", l, s.legFact(l), v.formerHosts())
	}
	return fmt.Sprintf("%v is %s", l, s.legFact(l))
}

// unhealed says why no host that heals can reach a leg, as it uses TCP alone; empty if one may.
func (s *State) unhealed(v *Volume, l *Leg) string {
	portals := v.portals(s.nodes[l.Node])
	if len(portals) == 0 || slices.ContainsFunc(portals, func(p block.Portal) bool { return p.Transport == block.TCP }) {
		return ""
	}
	return fmt.Sprintf("target %s, with %v, has no TCP portal", l.Node, l)
}

// leftBehind reports whether a healing that has not begun to copy goes on without a leg in sync of a sealed
// volume: the leg is lost for good, another leg of its column can be read, and no host may still read this
// one. Nobody writes a sealed volume, so nothing is lost. The leg becomes stale at the epoch of the healing.
// If its drive comes back, the leg is copied to or freed, as any stale leg.
func (s *State) leftBehind(v *Volume, l *Leg) bool {
	switch {
	case !v.sealed() || !v.Clean || v.users() != "" || v.Heal != nil && v.Heal.State != Granting:
		return false
	case s.servable(l) || !s.lostForGood(l):
		return false
	case s.readersLeft(v) && !s.confirmedDead(l.Node):
		return false
	}
	return v.Layout.Group().Readable(s.sound(v)[l.Column].Without(l.Copy))
}

// lostForGood reports whether a leg that cannot be served is not waited for any more.
func (s *State) lostForGood(l *Leg) bool {
	n, d := s.nodes[l.Node], s.drives[l.Drive]
	if n == nil || d == nil || n.ConfirmedDead || d.Leaving == LeaveEvict {
		return true
	}
	left, away := s.awayLeft(d.ID)
	return away && left <= 0 && n.MaintainedUntil.IsZero()
}

// noHealer says what copying to a detached volume's stale legs waits for.
func (s *State) noHealer(v *Volume) string {
	attach := "the volume to be attached"
	if v.sealed() { // those to whom it can be attached do not copy
		attach = "a host to heal it"
	}
	switch why := s.unhealable(v); {
	case s.policy.HealAfter <= 0 && v.sealed():
		return attach + ", which is switched off: `weft volmgr --heal-after`"
	case s.policy.HealAfter <= 0 || v.IsSnapshot():
		return attach
	case s.level < healLevel:
		return fmt.Sprintf("%s; from level %d on a host heals it meanwhile: `weft upgrade finish`", attach, healLevel)
	case why != "":
		return fmt.Sprintf("%s; no host heals it meanwhile, since %s", attach, why)
	case !s.anyHealer(v):
		return attach + "; no host can heal it meanwhile: none that is online and in service has an agent that can copy without a device"
	}
	if x := s.healings.Get(v.ID); x.again().After(s.now) {
		return fmt.Sprintf("a host to heal it: the next one begins after %s, since %s failed, the last one because %s", x.again().UTC().Format(time.RFC3339), plural(x.failures, "attempt"), x.why)
	}
	return fmt.Sprintf("a host to heal it: one begins %v after it is detached, when its turn comes", s.policy.HealAfter)
}

// anyHealer reports whether some host can heal a volume.
func (s *State) anyHealer(v *Volume) bool {
	for name := range s.initiators {
		if s.cannotHeal(v, name) == "" {
			return true
		}
	}
	return false
}

// cannotHeal says why a host cannot heal a volume; empty if it can.
func (s *State) cannotHeal(v *Volume, host block.NodeName) string {
	on, n := s.initiators[host], s.nodes[host]
	switch {
	case on == nil || on.report == nil || !on.status.Online:
		return fmt.Sprintf("host %s is offline", host)
	case n == nil || n.Stock || on.report.Heals == "":
		return fmt.Sprintf("host %s has no agent that can copy without a device", host)
	case n.ConfirmedDead || n.Draining || !n.MaintainedUntil.IsZero():
		return fmt.Sprintf("host %s is taken out of service", host)
	case v.authentication() == block.AuthenticationRequire && !n.InitiatorAuthenticates:
		return fmt.Sprintf("host %s cannot prove its identity, as %s requires", host, v.object())
	}
	return ""
}

// beginHealings has hosts heal the detached volumes that have lacked a copy for long enough: those of which
// no attempt has failed first, then those whose last one failed longest ago; of these, those with the fewest
// copies. So volumes whose attempts fail take no turns from others.
func (t *tx) beginHealings() {
	s := t.s
	if s.policy.HealAfter <= 0 || t.level < healLevel || t.now.Sub(s.lookedHealing) < healLook {
		return
	}
	s.lookedHealing = t.now
	due, busy := t.dueHealings()
	for _, v := range due {
		if len(busy) >= mostHealed {
			return
		}
		if host := s.healer(v, busy, s.healings.Get(v.ID).failures); host != "" {
			busy[host] = true
			t.beginHealing(v.ID, host)
		}
	}
}

// dueHealings returns the volumes that a host should heal now, and the hosts that heal one. It notes since
// when volumes want a copy.
func (t *tx) dueHealings() (due []*Volume, busy map[block.NodeName]bool) {
	s := t.s
	busy = map[block.NodeName]bool{}
	for id := range s.unsettled {
		v, x := t.peek(id), s.healings.Get(id)
		switch {
		case v == nil:
		case v.Heal != nil:
			busy[v.Heal.Node] = true
		case s.unhealable(v) != "" || !s.wantsCopy(v):
			if !x.again().After(t.now) || v.users() != "" {
				s.healings.Delete(s.by, id)
			}
		default:
			if x.since.IsZero() {
				x.since = t.now
				s.healings.Set(s.by, id, x)
			}
			if t.now.Sub(x.since) >= s.policy.HealAfter && !t.now.Before(x.again()) {
				due = append(due, v)
			}
		}
	}
	for _, id := range slices.Collect(s.healings.Keys()) {
		if !s.unsettled[id] {
			s.healings.Delete(s.by, id)
		}
	}
	s.inTurn(due)
	return due, busy
}

// inTurn sorts volumes that hosts should heal as beginHealings says.
func (s *State) inTurn(due []*Volume) {
	left := map[block.VolumeID]int{}
	for _, v := range due {
		left[v.ID] = s.copiesLeft(v)
	}
	slices.SortFunc(due, func(a, b *Volume) int {
		x, y := s.healings.Get(a.ID), s.healings.Get(b.ID)
		return cmp.Or(x.failed.Compare(y.failed), cmp.Compare(left[a.ID], left[b.ID]), x.since.Compare(y.since), bytes.Compare(a.ID.UUID[:], b.ID.UUID[:]))
	})
}

// healer chooses a host that is to heal a volume; empty if there is none. One with a leg in sync comes
// first, since it reads from itself, and after each attempt that failed another one. Last comes the one that
// lost the volume by force and has not released it: it may hang, or still have the old device in use.
func (s *State) healer(v *Volume, busy map[block.NodeName]bool, attempt int) block.NodeName {
	var near, others, last []block.NodeName
	for name := range s.initiators {
		switch {
		case busy[name] || s.cannotHeal(v, name) != "":
		case name == v.Holder:
			last = append(last, name)
		case slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.Node == name && l.trusted() }):
			near = append(near, name)
		default:
			others = append(others, name)
		}
	}
	slices.Sort(near)
	slices.Sort(others)
	if n := len(others); n > 0 { // volumes begin at different hosts
		first := int(v.ID.UUID[len(v.ID.UUID)-1]) % n
		others = slices.Concat(others[first:], others[:first])
	}
	all := slices.Concat(near, others, last)
	if len(all) == 0 {
		return ""
	}
	return all[attempt%len(all)]
}

// beginHealing begins an epoch for a host that is to heal a volume.
func (t *tx) beginHealing(id block.VolumeID, host block.NodeName) {
	v, n := t.volume(id), t.nodes.peek(host)
	t.supersede(v)
	v.Heal = &Attachment{
		Node: host, Host: n.Host, Mode: AttachExclusive, Epoch: v.Epoch, State: Granting, BootID: n.InitiatorBoot, Since: t.now.UTC(),
		Run: t.s.initiators[host].report.Heals,
	}
	x := t.s.healings.Get(id)
	x.moved, x.reach = t.now, ""
	t.s.healings.Set(t.s.by, id, x)
	does := "copies to its stale legs"
	if !v.Clean {
		does = "makes its copies equal, so that its stale legs can be copied to"
	}
	t.volumeEvent(v, event.Info, event.VolumeHealing, fmt.Sprintf("host %s %s while it is detached, at epoch %d", host, does, v.Epoch),
		"node", string(host), "epoch", fmt.Sprint(v.Epoch))
}

// settleHealing makes the due transition of a volume that a host heals.
func (t *tx) settleHealing(id block.VolumeID) {
	v := t.peek(id)
	h := v.Heal
	if h == nil {
		return
	}
	t.leaveOutCopied(id)
	if why := t.healingBroken(t.peek(id)); why != "" {
		t.stopHealing(id, why)
		return
	}
	v = t.peek(id)
	r, ok := t.s.attachmentReport(v, h)
	if !ok {
		r = AttachmentReport{} // it is about another epoch
	}
	serves := r.Phase == PhaseServing || r.Phase == PhaseStalled
	over := t.s.healedEnough(v, serves)
	switch {
	case r.Phase == PhaseDetachedClean || r.Phase == PhaseDetachedUnclean:
		t.released(id, r)
	case h.State == Granting && over:
		t.endHealing(t.volume(id), "there is nothing to do for it")
	case h.State == Granting:
		t.settleHealGrant(id)
	case h.State != Detaching && over:
		fresh := t.volume(id).Heal
		fresh.State, fresh.Since = Detaching, t.now.UTC()
	case h.State == Granted && serves:
		fresh := t.volume(id).Heal
		fresh.State, fresh.Since = Attached, t.now.UTC()
	}
	t.noteHealing(id)
}

// healedEnough reports whether the host that heals a volume is to release it. serves: it has connected the legs,
// and made them equal if it was to.
func (s *State) healedEnough(v *Volume, serves bool) bool {
	h := v.Heal
	return !s.wantsCopy(v) || s.cannotHeal(v, h.Node) != "" || s.policy.HealAfter <= 0 || h.Equalize && serves
}

// settleHealGrant hands a volume to the host that is to heal it once every leg in sync is fenced. None
// is left out, since nobody is in a hurry, except a leg of a sealed volume that is lost for good: see
// leftBehind.
func (t *tx) settleHealGrant(id block.VolumeID) {
	v := t.peek(id)
	keep, rest := t.s.grantSplit(v)
	if v.unreadable(keep) >= 0 {
		return
	}
	for _, l := range rest {
		if !t.s.leftBehind(v, l) || t.s.targetOnline(l.Node) && !t.s.admitted(v, l) {
			return
		}
	}
	v = t.volume(id)
	for _, l := range rest {
		t.evict(v, l.ID, "it is lost, and a host makes the copy again elsewhere")
	}
	h := v.Heal
	h.State, h.Equalize, h.Since, h.Proven = Granted, !v.Clean, t.now.UTC(), t.proven(v, h.Node)
}

// leaveOutCopied ends the copying to legs of nodes under maintenance, and of targets that stop.
func (t *tx) leaveOutCopied(id block.VolumeID) {
	v := t.peek(id)
	for _, l := range v.Legs {
		if why := t.s.leftOut(v, &l, t.nodes.peek(l.Node)); why != "" && l.State == LegRebuilding {
			t.stale(t.volume(id), l.ID, event.LegStale, why)
		}
	}
}

// healingBroken says why a healing cannot go on; empty if it can. After a start, agents have some time to
// report.
func (t *tx) healingBroken(v *Volume) string {
	h := v.Heal
	began := t.now.Sub(t.s.began) < 2*OnlineWithin
	on := t.s.initiators[h.Node]
	if on == nil || on.report == nil {
		if began {
			return ""
		}
		return fmt.Sprintf("host %s is offline", h.Node)
	}
	x, n := t.s.healings.Get(v.ID), t.nodes.peek(h.Node)
	switch {
	case !on.status.Online || t.confirmedDead(h.Node):
		return fmt.Sprintf("host %s is offline", h.Node)
	case n == nil || n.InitiatorBoot != h.BootID || n.Host != h.Host || on.report.Heals != h.Run:
		return fmt.Sprintf("the agent of host %s has started again", h.Node)
	case h.State == Detaching && t.now.Sub(h.Since) > healRelease:
		return fmt.Sprintf("host %s did not release it within %v", h.Node, healRelease)
	case !x.moved.IsZero() && t.now.Sub(x.moved) > healPatience:
		return fmt.Sprintf("host %s has made no progress for %v%s", h.Node, healPatience, t.s.healWaits(v))
	case began:
		return ""
	}
	return t.s.unhealable(v)
}

// healWaits says in brackets what the host that heals a volume waits for; empty: it does not say.
func (s *State) healWaits(v *Volume) string {
	r, _ := s.attachmentReport(v, v.Heal)
	waits := r.WaitingFor
	for _, c := range r.Copies {
		if l := v.leg(c.Leg); l != nil && c.WaitingFor != "" {
			waits = fmt.Sprintf("%v waits for %s", l, c.WaitingFor)
		}
	}
	if waits == "" {
		return ""
	}
	return " (" + waits + ")"
}

// copiedSoFar is how much the host that copies to a volume's legs says that it has copied.
func (s *State) copiedSoFar(v *Volume) (done block.Size) {
	if v.copier() == nil {
		return 0
	}
	r, _ := s.attachmentReport(v, v.copier())
	done = r.ResyncDone
	for _, c := range r.Copies {
		done += c.Done
	}
	return done
}

// noteHealing notes whether a healing makes progress.
func (t *tx) noteHealing(id block.VolumeID) {
	v := t.peek(id)
	if v.Heal == nil {
		return
	}
	done := t.s.copiedSoFar(v)
	// A host that begins anew again and again, or stalls and goes on, makes no progress.
	reach := fmt.Sprint(v.Heal.State, v.Generation)
	if x := t.s.healings.Get(id); x.reach != reach || done > x.done || x.moved.IsZero() {
		if x.reach != reach {
			x.done = 0
		}
		x.reach, x.done, x.moved = reach, max(x.done, done), t.now
		t.s.healings.Set(t.s.by, id, x)
	}
}

// released ends a healing whose host has released the volume. After a clean release all legs in sync
// are equal: all of them took part, and were flushed.
func (t *tx) released(id block.VolumeID, r AttachmentReport) {
	v := t.volume(id)
	h := *v.Heal
	if r.Phase == PhaseDetachedClean && !v.suspects() {
		v.Clean, v.Holder = true, ""
	}
	v.Heal = nil
	t.abandonRebuilds(v, fmt.Sprintf("host %s has released the volume", h.Node))
	text, equal := "some legs are still stale", h.Equalize && v.Clean
	switch {
	case !slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.member() && l.State != LegInSync }):
		text = "every leg is in sync"
	case equal:
		text = "its copies are equal, and it counts as detached cleanly; its stale legs are copied to next"
	}
	t.healed(v, &h, text)
	x := t.s.healings.Get(id)
	if x.moved = (time.Time{}); !equal { // else the next host need not wait once more
		x.since = time.Time{}
	}
	if r.GaveUp.Why != "" {
		x.fail(t.now, r.GaveUp.Why)
	}
	t.s.healings.Set(t.s.by, id, x)
}

func (t *tx) healed(v *Volume, h *Attachment, text string) {
	t.volumeEvent(v, event.Info, event.HealingEnded, fmt.Sprintf("host %s has ended: %s", h.Node, text),
		"node", string(h.Node), "epoch", fmt.Sprint(h.Epoch), "clean", fmt.Sprint(v.Clean))
}

// fail has the next host begin only after a pause.
func (x *healing) fail(now time.Time, why string) {
	x.failures++
	x.failed, x.why = now, why
}

// stopHealing ends the healing of a volume, if there is one, because it fails. The targets fence its host.
func (t *tx) stopHealing(id block.VolumeID, why string) {
	if v := t.peek(id); v != nil && v.Heal != nil {
		x := t.s.healings.Get(id)
		t.endHealing(t.volume(id), why)
		x.moved = time.Time{}
		x.fail(t.now, why)
		t.s.healings.Set(t.s.by, id, x)
	}
}

// endHealing ends the healing of a volume, if there is one, because something else is wanted of the volume:
// that is no failure. The targets fence its host.
func (t *tx) endHealing(v *Volume, why string) {
	if v.Heal == nil {
		return
	}
	t.healingEnds(v, why)
	t.supersede(v)
}

// healingEnds ends the healing of a volume, if there is one. The caller begins an epoch.
func (t *tx) healingEnds(v *Volume, why string) {
	if v.Heal == nil {
		return
	}
	t.healed(v, v.Heal, why)
	v.Heal = nil
	x := t.s.healings.Get(v.ID)
	x.since, x.moved = time.Time{}, time.Time{}
	t.s.healings.Set(t.s.by, v.ID, x)
}

// explainHealing covers a detached volume that a host heals.
func (s *State) explainHealing(e *Explanation, v *Volume) {
	h := v.Heal
	if h == nil {
		return
	}
	e.Summary = fmt.Sprintf("%s is detached and %s; host %s heals it, and lets go of it when somebody attaches it", v.object(), strings.ToLower(string(s.health(v))), h.Node)
	e.Facts = append(e.Facts, fmt.Sprintf("healing on %s, epoch %d: %s since %s", h.Node, h.Epoch, strings.ToLower(string(h.State)), h.Since.UTC().Format(time.RFC3339)))
	e.Waits = append(e.Waits, s.attachmentWaits(v, h)...)
}

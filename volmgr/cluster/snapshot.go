// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/image"
)

// A snapshot is a volume of its own that no host may write. Each of its legs is a frozen layer in the
// tree of a leg of the volume that it was taken of, its origin, on the same drive. Several snapshots
// can be taken at one moment; they then go through the same phases together:
//
//	PREPARING   targets record the new legs on their drives' labels
//	HOLDING     hosts that may write hold their I/O, for a bounded time
//	FREEZING    targets freeze the legs
//	CONFIRMING  hosts are asked whether they hold I/O still
//	(none)      the snapshots are READY, and hosts go on
//
// Each phase is durable before anybody is told of it. A host that says in CONFIRMING, of a wanted
// state which says so, that it holds I/O still has not gone on since it said so in HOLDING: a hold that
// has ended stays ended. Every leg was frozen between the two. So at one moment no host had a write
// under way, and the frozen legs hold exactly what was acknowledged. No clock is compared.
//
// If a hold ends, or anything about an origin changes that the attempt was begun with, it is given up:
// its legs are freed, and another attempt begins with new ones. A late message of an attempt can only
// make legs that nobody reads.
//
// A leg that goes stale meanwhile is left out, also if it is in sync again: the host did not wait for
// it. An origin that no host may write is not held; its epoch shows whether it stayed so.

const (
	// snapshotLevel is the level from which on there are snapshots and clones.
	snapshotLevel block.Level = 4
	// copiesLevel is the level from which on snapshots are copied: an earlier manager would have the leg of
	// a copy made of nothing.
	copiesLevel block.Level = 8
	// DefaultHoldFor is shorter than what programs take for an error, and long for a network of storage.
	DefaultHoldFor = 2 * time.Second
	// MaxHoldFor is the longest that agents hold I/O.
	MaxHoldFor = time.Minute
	// phaseSlack is how much longer than a hold a phase after PREPARING may take: a host that does not
	// answer has gone on by then.
	phaseSlack = 2 * time.Second
	// prepareFor is the longest that targets may take to record the new legs.
	prepareFor = 10 * time.Second
	// takeFor is the longest that all attempts may take, and maxAttempts how many there are.
	takeFor     = time.Minute
	maxAttempts = 5
	// syncFor and takeFrozenFor stand for prepareFor and takeFor where hosts first write out what file
	// systems have in memory, which may be much.
	syncFor       = 2 * time.Minute
	takeFrozenFor = 4 * time.Minute
	// againAfter is the least time between two attempts that fail while they are prepared.
	againAfter = time.Second
	// MaxSnapshots is how many snapshots a volume may have.
	MaxSnapshots = 1024
	// MaxGroup is how many snapshots are taken at one moment.
	MaxGroup = 64
)

// SnapshotOf says of what a snapshot was taken. It is never changed in place.
type SnapshotOf struct {
	Volume block.VolumeID   `json:"volume"`
	Name   block.VolumeName `json:"name"`             // of the volume, then
	Group  string           `json:"group,omitempty"`  // of the snapshots taken at the same moment; empty: it was taken alone
	Taken  time.Time        `json:"taken,omitzero"`   // when it became complete
	Taking *Taking          `json:"taking,omitempty"` // nil: it is complete, or was given up
	// FSFrozen: no file system had a write under way. Hosts had frozen those that they had mounted, or no
	// host had the volume, which was released cleanly.
	FSFrozen bool `json:"fs_frozen,omitempty"`
}

// Taking is how far a snapshot that is not complete has come. It is never changed in place.
type Taking struct {
	Members []block.VolumeID `json:"members"` // all that are taken at the same moment, this one too
	Attempt int              `json:"attempt"`
	Phase   TakingPhase      `json:"phase"`
	Hold    string           `json:"hold"`             // id of the holds of this attempt
	Freeze  bool             `json:"freeze,omitempty"` // hosts freeze file systems, too
	PhaseAt uint64           `json:"phase_at"`         // generation in which the phase began
	Since   time.Time        `json:"since"`            // when it began
	Began   time.Time        `json:"began"`            // when the first attempt began
	// Of the origin, as the attempt was begun with.
	Epoch  block.Epoch    `json:"epoch"`
	Hosts  []TakingHost   `json:"hosts,omitempty"` // that may write, and hold I/O
	Frozen []TakingOrigin `json:"frozen"`          // the legs that are frozen
}

// TakingHost is a host that may write an origin.
type TakingHost struct {
	Node   block.NodeName `json:"node"`
	BootID string         `json:"boot_id"`
	Grant  uint64         `json:"grant,omitempty"`
}

// TakingOrigin is the leg of an origin of which a snapshot's leg is made.
type TakingOrigin struct {
	Leg      block.LegID `json:"leg"` // of the snapshot
	Origin   block.LegID `json:"origin"`
	Revision uint64      `json:"revision"` // of the origin
}

// TakingPhase is drawn above.
type TakingPhase string

// The phases.
const (
	Preparing  TakingPhase = "PREPARING"
	Holding    TakingPhase = "HOLDING"
	Freezing   TakingPhase = "FREEZING"
	Confirming TakingPhase = "CONFIRMING"
)

// taking is the snapshot's progress; nil if it is complete, or no snapshot.
func (v *Volume) taking() *Taking {
	if v == nil || v.Snapshot == nil {
		return nil
	}
	return v.Snapshot.Taking
}

// IsSnapshot reports whether the volume is a snapshot.
func (v *Volume) IsSnapshot() bool { return v.Snapshot != nil }

// neverChanges refuses to change a volume that no host may write.
func (v *Volume) neverChanges() error {
	what := "a snapshot"
	if v.sealed() {
		what = "a sealed volume"
	}
	return refused(ReasonReadOnly, v.object(), "%s never changes", what).hint("%s", v.version())
}

// version says how to have a volume that begins as one that no host may write, and can be written.
func (v *Volume) version() string {
	if v.IsSnapshot() {
		return fmt.Sprintf("for a volume that begins as it and can be written: `weft volume create NAME --from %s`", v.Name)
	}
	if v.Layout.Integrity { // it can have no snapshots
		return "copy what it holds to a new volume"
	}
	return fmt.Sprintf("for a volume that begins as it and can be written: `weft snapshot create %s@NAME`, `weft volume create NEW --from %s@NAME`", v.Name, v.Name)
}

// NewSnapshot names one snapshot to take.
type NewSnapshot struct {
	Volume string // name or id
	Name   string // without that of the volume
	Labels map[string]string
}

// CreateSnapshots takes snapshots at one moment. Result: []Volume, in order. They are complete when they
// are READY.
type CreateSnapshots struct {
	Snapshots []NewSnapshot
	// Freeze: hosts freeze the file systems that they have mounted from the volumes.
	Freeze bool
	Seed   Seed
}

func (in CreateSnapshots) apply(t *tx) (view, error) {
	if n := len(in.Snapshots); n == 0 || n > MaxGroup {
		return nil, invalid("snapshots", "%d: one to %d can be taken at a time", n, MaxGroup)
	}
	if err := t.needsLevel(snapshotLevel, "snapshots"); err != nil {
		return nil, err
	}
	var ids []block.VolumeID
	var fresh []*Volume
	origins := map[block.VolumeID]bool{}
	for i, x := range in.Snapshots {
		origin, err := t.s.snapshotOrigin(x)
		if err != nil {
			return nil, err
		}
		if origins[origin.ID] {
			return nil, invalid("snapshots", "%s is listed twice", origin.object())
		}
		origins[origin.ID] = true
		v, err := t.newSnapshot(in, i, origin)
		if err != nil {
			return nil, err
		}
		if t.peek(v.ID) == nil {
			fresh = append(fresh, v)
		}
		ids = append(ids, v.ID)
	}
	switch {
	case len(fresh) > 0 && len(fresh) < len(in.Snapshots):
		return nil, in.half(t, ids)
	case len(fresh) > 0:
		if err := t.beginSnapshots(fresh, in.Seed.id(MaxGroup).String(), in.Freeze); err != nil {
			return nil, err
		}
	}
	return func(s *State) any {
		all := make([]Volume, len(ids))
		for i, id := range ids {
			all[i] = s.volumeView(s.volumes.Get(id))
		}
		return all
	}, nil
}

// half refuses to take some snapshots together with others that exist.
func (in CreateSnapshots) half(t *tx, ids []block.VolumeID) error {
	for _, id := range ids {
		if v := t.peek(id); v != nil {
			e := &Error{Kind: AlreadyExists, Object: v.object(), Field: "snapshots", Text: fmt.Sprintf("%s: already exists, and others that are to be taken at the same moment do not", v.object())}
			return e.hint("use other names, or delete it: `weft snapshot delete %s`", v.Name)
		}
	}
	return nil
}

// snapshotOrigin finds the volume of which a snapshot is to be taken, and refuses one that can have none.
func (s *State) snapshotOrigin(x NewSnapshot) (*Volume, error) {
	v, err := s.find(x.Volume)
	if err != nil {
		return nil, err
	}
	if _, err := block.ParseSnapshotName(x.Name); err != nil {
		return nil, invalid("name", "%v", err)
	}
	if err := checkVolumeLabels("labels", x.Labels); err != nil {
		return nil, err
	}
	switch {
	case v.IsSnapshot():
		return nil, invalid("volume", "%s is a snapshot", v.object()).hint("a volume can begin as it: `weft volume create NAME --from %s`", v.Name)
	case v.Layout.Integrity:
		return nil, (&Error{Kind: Unimplemented, Field: "volume", Object: v.object(), Text: v.object() + ": a volume with checksums can have no snapshots"}).
			hint("`weft volume create NAME --thin`, and copy the data")
	}
	return v, nil
}

// newSnapshot returns the snapshot that is asked for, which may exist, or one to begin.
func (t *tx) newSnapshot(in CreateSnapshots, i int, origin *Volume) (*Volume, error) {
	name := origin.Name.Snapshot(in.Snapshots[i].Name)
	if id, ok := t.s.byName.Find(string(name)); ok {
		return existing(t.s.volumes.Get(id), origin, in.Freeze)
	}
	if !origin.usable() {
		return nil, refused(ReasonNotReady, origin.object(), "%s", origin.unready()).hint("`weft explain volume %s` says what it waits for", origin.Name)
	}
	if who := t.s.cannotHold(origin); who != "" {
		return nil, refused(ReasonAttached, origin.object(), "attached to %s, which has no agent that could hold its I/O", who).hint("`weft detach %s` first", origin.Name)
	}
	if who := t.s.cannotFreeze(origin); in.Freeze && who != "" {
		return nil, (&Error{Kind: Unimplemented, Object: origin.object(), Field: "freeze", Text: fmt.Sprintf("%s: attached to %s, whose agent cannot freeze file systems", origin.object(), who)}).
			hint("upgrade it: `weft upgrade plan` says how; or take the snapshot without freezing")
	}
	if origin.users() == "" && (!origin.equal() || origin.Holder != "") { // only a host that gets it ends that
		return nil, refused(ReasonCopiesDiffer, origin.object(), "its copies may differ, since its last host did not release it cleanly").
			hint("attach it to one host, which makes them equal: `weft attach %s --node NODE`", origin.Name)
	}
	if err := t.mayBase(origin); err != nil {
		return nil, err
	}
	if n := t.s.snapshots.Get(origin.ID); n >= MaxSnapshots {
		return nil, (&Error{Kind: ResourceExhausted, Object: origin.object(), Text: fmt.Sprintf("%s: it has %d snapshots, and can have no more", origin.object(), n)}).
			hint("delete some: `weft snapshot list %s`", origin.Name)
	}
	return &Volume{
		ID: block.VolumeID{UUID: in.Seed.id(uint32(i))}, Name: name, Pool: origin.Pool, Spread: origin.Spread, Labels: in.Snapshots[i].Labels,
		Authentication: origin.Authentication, Thin: true, State: VolumeCreating, Clean: true, Generation: 1, Created: t.now.UTC(),
		Size: origin.Size, Layout: origin.Layout, Formatted: origin.Formatted, Snapshot: &SnapshotOf{Volume: origin.ID, Name: origin.Name},
	}, nil
}

// existing returns the snapshot that has the name of one that is asked for, if it is what is asked for.
func existing(v, origin *Volume, freeze bool) (*Volume, error) {
	switch {
	case v.State == VolumeDeleting:
		return nil, refused(ReasonVolumeIsDeleting, v.object(), "a snapshot of this name is being deleted").hint("wait, or use another name")
	case v.Snapshot.Volume != origin.ID:
		return nil, (&Error{Kind: AlreadyExists, Object: v.object(), Field: "name", Text: fmt.Sprintf("%s: already exists, of an earlier volume of this name", v.object())}).
			hint("use another name, or delete it: `weft snapshot delete %s`", v.Name)
	case freeze && !v.Snapshot.FSFrozen && (v.taking() == nil || !v.taking().Freeze):
		return nil, (&Error{Kind: AlreadyExists, Object: v.object(), Field: "freeze", Text: fmt.Sprintf("%s: already exists, taken without freezing file systems", v.object())}).
			hint("use another name, or delete it: `weft snapshot delete %s`", v.Name)
	}
	return v, nil
}

// cannotHold names a host of a volume that may write and has no agent.
func (s *State) cannotHold(v *Volume) block.NodeName {
	for _, a := range v.attachments() {
		if a.Stock {
			return a.Node
		}
	}
	return ""
}

// cannotFreeze names a host of a volume that may write and whose agent is known not to freeze file systems.
func (s *State) cannotFreeze(v *Volume) block.NodeName {
	for _, h := range writers(v) {
		if on := s.initiators[h.Node]; on != nil && on.status.Known && !on.status.Freezes {
			return h.Node
		}
	}
	return ""
}

// beginSnapshots begins the first attempt to take some snapshots.
func (t *tx) beginSnapshots(all []*Volume, group string, freeze bool) error {
	first := Taking{Began: t.now.UTC(), Freeze: freeze}
	for _, v := range all {
		first.Members = append(first.Members, v.ID)
	}
	for _, v := range all {
		if t.peek(v.ID) != nil {
			return invalid("seed", "volume %v exists: the seed was used before", v.ID)
		}
		if len(all) > 1 {
			v.Snapshot.Group = group
		}
		taking := first
		v.Snapshot.Taking = &taking
		t.volumes.set(v.ID, v)
		t.unsure[v.ID] = true
		t.volumeEvent(v, event.Info, event.VolumeCreating, fmt.Sprintf("a snapshot of %s", v.Snapshot.Name))
	}
	t.attempt(first.Members)
	for _, v := range all {
		if o := t.s.volumes.Get(v.Snapshot.Volume); o != nil {
			if d := t.s.lacksRoom(o, t.peek(o.ID)); d != nil {
				return t.s.labelFull(t.peek(o.ID), d, "snapshots")
			}
		}
		if d := t.s.lacksRoom(&Volume{}, v); d != nil {
			return t.s.labelFull(v, d, "snapshots")
		}
	}
	return nil
}

// attempt begins another attempt to take snapshots. While an origin cannot be frozen its snapshot has no
// legs: see begun.
func (t *tx) attempt(members []block.VolumeID) {
	hold := t.holdID(members)
	for _, id := range members {
		v := t.volume(id)
		if o := t.peek(v.Snapshot.Volume); o != nil && o.Heal != nil {
			t.endHealing(t.volume(o.ID), "a snapshot of it is taken")
		}
		next := *v.Snapshot.Taking
		next.Attempt++
		next.Phase, next.PhaseAt, next.Since, next.Hold = Preparing, t.gen, t.now.UTC(), hold
		next.Hosts, next.Frozen = nil, nil
		for i := range v.Legs {
			if l := &v.Legs[i]; l.State != LegDeleting {
				l.State, l.FreedAt = LegDeleting, t.gen
			}
		}
		if o := t.peek(v.Snapshot.Volume); settledOrigin(o) {
			v.Size, v.Layout, v.Formatted = o.Size, o.Layout, o.Formatted
			next.Epoch, next.Hosts = o.Epoch, writers(o)
			t.freezable(v, o, &next)
			t.base(o.ID, next.Frozen)
			t.graft(v)
		}
		v.Snapshot = v.Snapshot.with(&next)
	}
}

func (s *SnapshotOf) with(taking *Taking) *SnapshotOf {
	next := *s
	next.Taking = taking
	return &next
}

// holdID names the holds of an attempt. It is never used again, also not by a manager that was restored
// from a backup, whose generations are higher.
func (t *tx) holdID(members []block.VolumeID) string {
	return fmt.Sprintf("snapshot-%v-%d", members[0], t.gen)
}

// settledOrigin reports whether a snapshot of a volume can be taken now: hosts that may write it serve
// it, and its copies are equal but for what those hosts know.
func settledOrigin(o *Volume) bool {
	if !o.usable() || o.ExpandingTo != 0 {
		return false
	}
	for _, a := range o.attachments() {
		if a.Mode != AttachSharedReadOnly && (a.State != Attached || a.Left || a.FenceAt != 0 || a.KeptAt != 0 || a.Stock) {
			return false
		}
	}
	return len(writers(o)) > 0 || o.equal() && !o.writerMayRemain()
}

// unsettledOrigin says why no snapshot of a volume can be taken now, unfrozenColumn why there is none of a column.
func unsettledOrigin(o *Volume) string {
	return fmt.Sprintf("%s is being attached, detached or expanded, or no host has made its copies equal", o.object())
}

func unfrozenColumn(o *Volume) string {
	return fmt.Sprintf("%s has a column without a copy in sync on a target that is online and can take snapshots", o.object())
}

// writers are the hosts that may write a volume.
func writers(o *Volume) (all []TakingHost) {
	for _, a := range o.attachments() {
		if a.Mode != AttachSharedReadOnly {
			all = append(all, TakingHost{a.Node, a.BootID, a.Grant})
		}
	}
	return all
}

// freezable gives a snapshot a leg for each leg of its origin that is in sync and whose target answers.
func (t *tx) freezable(v, o *Volume, next *Taking) {
	for i := range o.Legs {
		l := &o.Legs[i]
		if !l.trusted() || t.s.cannotSnapshot(o, l) != "" || t.s.asked[o.ID][l.ID] != "" {
			continue
		}
		id, place := frozenLeg(v.ID, l.ID, next.Attempt, t.gen), v.freePlace(l.Node)
		if place == 0 {
			continue // until legs of earlier attempts are freed
		}
		next.Frozen = append(next.Frozen, TakingOrigin{id, l.ID, l.Revision})
		v.Legs = append(v.Legs, Leg{
			ID: id, Column: l.Column, Copy: l.Copy, Drive: l.Drive, Node: l.Node, Image: image.Image{Kind: image.Mapped},
			Tree: l.sharedWith(), Origin: l.ID, State: LegCreating, Revision: 1, Place: place,
		})
	}
	v.sortLegs()
}

// freePlace is the lowest place that no leg of the volume on a node has; 0: there is none.
func (v *Volume) freePlace(node block.NodeName) int {
	for p := 1; p <= maxPlaces; p++ {
		if !slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.Node == node && l.place() == p }) {
			return p
		}
	}
	return 0
}

// takesSnapshots reports whether a target knows how to freeze legs. One that did not would make empty ones.
func (s *State) takesSnapshots(node block.NodeName) bool { return s.abilities(node).snapshots }

// frozenLeg is the id of a snapshot's leg in one attempt. No other attempt has it.
func frozenLeg(snapshot block.VolumeID, origin block.LegID, attempt int, gen uint64) block.LegID {
	text := append([]byte("frozen"), snapshot.UUID[:]...)
	text = append(text, origin.UUID[:]...)
	text = binary.BigEndian.AppendUint64(text, gen)
	return block.LegID{UUID: Seed(sha256.Sum256(text)).id(uint32(attempt))}
}

// settleTaking takes the next step of snapshots that are not complete.
func (t *tx) settleTaking(id block.VolumeID) {
	v := t.peek(id)
	if !v.IsSnapshot() || v.State != VolumeCreating {
		return
	}
	if gone := func(l Leg) bool { return l.State == LegDeleting && t.legGone(v, &l) }; slices.ContainsFunc(v.Legs, gone) {
		fresh := t.volume(id)
		fresh.Legs = slices.DeleteFunc(fresh.Legs, gone)
	}
	taking := t.peek(id).taking()
	if taking == nil {
		t.giveUp([]block.VolumeID{id}, "it was not complete when the manager's store was restored")
		return
	}
	members := taking.Members
	if why := t.hopeless(members); why != "" {
		t.giveUp(members, why)
		return
	}
	t.leaveOutStale(members)
	switch why := t.broken(members); {
	case why == "":
		t.advance(members, taking)
	case t.now.Sub(taking.Began) > taking.takeFor() || taking.Attempt >= maxAttempts && taking.Phase != Preparing:
		t.giveUp(members, why)
	case taking.Phase != Preparing || t.begun(members):
		t.attempt(members)
	}
}

// begun reports whether an attempt that could not begin can begin now. So waiting costs no attempt.
func (t *tx) begun(members []block.VolumeID) bool {
	for _, id := range members {
		o := t.peek(t.peek(id).Snapshot.Volume)
		if !settledOrigin(o) {
			return false
		}
		probe := Volume{ID: id, Layout: o.Layout}
		t.freezable(&probe, o, &Taking{})
		if !probe.everyColumn() {
			return false
		}
	}
	return true
}

// leaveOutStale frees the legs whose origins went stale since the attempt began.
func (t *tx) leaveOutStale(members []block.VolumeID) {
	for _, id := range members {
		v := t.peek(id)
		o := t.peek(v.Snapshot.Volume)
		for _, f := range v.taking().Frozen {
			l, from := v.leg(f.Leg), o.leg(f.Origin)
			if l == nil || l.State == LegDeleting || from != nil && from.trusted() && from.Revision == f.Revision {
				continue
			}
			v = t.volume(id)
			l = v.leg(f.Leg)
			l.State, l.FreedAt = LegDeleting, t.gen
		}
	}
}

// hopeless says why no attempt can be completed; empty if one may.
func (t *tx) hopeless(members []block.VolumeID) string {
	for _, id := range members {
		v := t.peek(id)
		if v == nil || v.taking() == nil || v.State != VolumeCreating {
			return "one that was to be taken at the same moment was deleted"
		}
		o := t.peek(v.Snapshot.Volume)
		if o == nil || o.State == VolumeDeleting {
			return fmt.Sprintf("volume %s was deleted", v.Snapshot.Name)
		}
		for _, h := range v.taking().Hosts {
			if _, f := t.s.holdReport(o, h, v.taking().Hold); f.Error != "" {
				return fmt.Sprintf("host %s cannot freeze what it has mounted from %s: %s", h.Node, o.object(), f.Error)
			}
		}
	}
	return ""
}

// broken says why the attempt cannot be completed; empty if it can.
func (t *tx) broken(members []block.VolumeID) string {
	for _, id := range members {
		if why := t.brokenOne(t.peek(id)); why != "" {
			return why
		}
	}
	return ""
}

// brokenOne is broken of one snapshot, whose origin is there.
func (t *tx) brokenOne(v *Volume) string {
	taking, o := v.taking(), t.peek(v.Snapshot.Volume)
	switch {
	case !settledOrigin(o):
		return unsettledOrigin(o)
	case o.Epoch != taking.Epoch || !slices.Equal(writers(o), taking.Hosts) || o.Size != v.Size:
		return fmt.Sprintf("%s was attached, detached or expanded meanwhile", o.object())
	case !v.everyColumn():
		return unfrozenColumn(o)
	}
	if taking.Phase == Preparing {
		ended := func(h TakingHost) bool { return t.s.holdOf(o, h, taking) == HoldEnded } // before it began
		if age := t.now.Sub(taking.Since); age > taking.prepareFor() || age > againAfter && slices.ContainsFunc(taking.Hosts, ended) {
			return fmt.Sprintf("it took too long%s", because(t.s.takingWaits(v)))
		}
		return ""
	}
	for _, h := range taking.Hosts {
		if s := t.s.holdOf(o, h, taking); s == HoldEnded {
			return fmt.Sprintf("hosts hold their I/O for %v at most, and in that time %s%s", t.s.holdFor(), notDone[taking.Phase], because(t.s.takingWaits(v)))
		}
	}
	if t.now.Sub(taking.Since) > t.s.holdFor()+phaseSlack {
		return fmt.Sprintf("it took too long%s", because(t.s.takingWaits(v)))
	}
	return ""
}

func (x *Taking) prepareFor() time.Duration {
	if x.Freeze {
		return syncFor
	}
	return prepareFor
}

func (x *Taking) takeFor() time.Duration {
	if x.Freeze {
		return takeFrozenFor
	}
	return takeFor
}

// holdFor is how long a host holds I/O for a snapshot at most.
func (s *State) holdFor() time.Duration { return cmp.Or(s.policy.HoldFor, DefaultHoldFor) }

// notDone is what had not come about when a hold ended, by phase.
var notDone = map[TakingPhase]string{
	Holding:    "not all I/O that was under way ended",
	Freezing:   "not all legs were frozen",
	Confirming: "not all hosts said that they hold it still",
}

// everyColumn reports whether each column has a leg that is not being freed.
func (v *Volume) everyColumn() bool {
	for c := range v.Layout.Stripes {
		if len(v.column(c)) == 0 {
			return false
		}
	}
	return true
}

// advance begins the next phase if the present one is complete. The caller knows that nothing broke it.
func (t *tx) advance(members []block.VolumeID, taking *Taking) {
	if len(t.s.takingWaitsOf(members, t.peek)) > 0 {
		return
	}
	hosts := slices.ContainsFunc(members, func(id block.VolumeID) bool { return len(t.peek(id).taking().Hosts) > 0 })
	switch next := map[TakingPhase]TakingPhase{Preparing: Holding, Holding: Freezing, Freezing: Confirming}[taking.Phase]; {
	case next == Holding && !hosts:
		t.phase(members, Freezing)
	case next == Confirming && !hosts, next == "":
		t.complete(members)
	default:
		t.phase(members, next)
	}
}

func (t *tx) phase(members []block.VolumeID, p TakingPhase) {
	for _, id := range members {
		v := t.volume(id)
		next := *v.Snapshot.Taking
		next.Phase, next.PhaseAt, next.Since = p, t.gen, t.now.UTC()
		v.Snapshot = v.Snapshot.with(&next)
	}
}

// complete makes snapshots ready.
func (t *tx) complete(members []block.VolumeID) {
	for _, id := range members {
		v := t.volume(id)
		held := ""
		if s := v.Snapshot.Taking; len(s.Hosts) > 0 {
			held = fmt.Sprintf(", at attempt %d", s.Attempt)
		}
		frozen := v.Snapshot.Taking.Freeze
		v.Snapshot = v.Snapshot.with(nil)
		v.Snapshot.Taken, v.Snapshot.FSFrozen = t.now.UTC(), frozen
		v.State = VolumeReady
		v.Generation++
		legs := 0
		for i := range v.Legs {
			if l := &v.Legs[i]; l.State == LegCreating {
				l.State, l.Origin = LegInSync, block.LegID{}
				legs++
			}
		}
		t.volumeEvent(v, event.Info, event.VolumeReady, fmt.Sprintf("the snapshot of %s is complete, on %s%s", v.Snapshot.Name, plural(legs, "leg"), held))
	}
}

// giveUp deletes snapshots that cannot be taken.
func (t *tx) giveUp(members []block.VolumeID, why string) {
	for _, id := range members {
		if v := t.peek(id); v == nil || v.State != VolumeCreating {
			continue
		}
		v := t.volume(id)
		v.Snapshot, v.Failed = v.Snapshot.with(nil), why
		t.free(v)
		t.volumeEvent(v, event.Warning, event.SnapshotFailed, "the snapshot was not taken: "+why)
	}
}

// ---- what agents are told, and what they say ----

// HoldState is how far a hold has come on a host; empty: it is not known there.
type HoldState string

// The states of a hold.
const (
	HoldPending  HoldState = "PENDING"
	HoldPrepared HoldState = "PREPARED"
	HoldHeld     HoldState = "HELD"
	HoldEnded    HoldState = "ENDED"
)

// holdOf is the state of the hold of an attempt on a host. I/O that is held over a file system that is not
// frozen is no hold of an attempt that freezes them.
func (s *State) holdOf(o *Volume, h TakingHost, x *Taking) HoldState {
	state, f := s.holdReport(o, h, x.Hold)
	if state == HoldHeld && x.Freeze && !f.Frozen {
		return HoldEnded
	}
	return state
}

// holdReport is what a host says of a hold, by the newest report of the attachment that it is of.
func (s *State) holdReport(o *Volume, h TakingHost, hold string) (state HoldState, f FreezeReport) {
	a := o.attachmentOf(h.Node)
	if a == nil || a.BootID != h.BootID || a.Grant != h.Grant {
		return "", f
	}
	r, ok := s.attachmentReport(o, a)
	if !ok {
		return "", f
	}
	return r.Holds[hold], r.Freezes[hold]
}

// wantedHolds are the holds that the host of an attachment shall have.
func (s *State) wantedHolds(v *Volume, a *Attachment) (all []WantedHold) {
	on := s.initiators[a.Node]
	freezes := on != nil && on.status.Freezes
	here := func(h TakingHost) bool { return h.Node == a.Node }
	for _, id := range s.takings.Get(v.ID) {
		switch x := s.volumes.Get(id).taking(); {
		case x == nil || !slices.ContainsFunc(x.Hosts, here):
		case x.Freeze && !freezes: // refused when it was asked for, unless the agent was not known yet
		case x.Phase == Preparing && !x.Freeze: // there is nothing to write out before the hold
		default:
			all = append(all, WantedHold{x.Hold, s.holdFor(), x.Freeze, x.Phase == Preparing})
		}
	}
	return all
}

// origin is what a target makes a leg of.
func (v *Volume) origin(l *Leg) (o LegOrigin) {
	if x := v.Restoring; x != nil && x.Switching && l.State == LegInSync {
		return LegOrigin{Leg: l.Origin, Restore: true}
	}
	if l.Origin.IsZero() || l.State != LegCreating {
		return o
	}
	o = LegOrigin{Leg: l.Origin, Clone: !v.IsSnapshot()}
	if x := v.taking(); x != nil {
		o.Wait = x.Phase == Preparing || x.Phase == Holding
	}
	return o
}

// takingWaitsOf lists what the present phase of some snapshots waits for.
func (s *State) takingWaitsOf(members []block.VolumeID, peek func(block.VolumeID) *Volume) (waits []string) {
	for _, id := range members {
		if v := peek(id); v.taking() != nil {
			waits = append(waits, s.phaseWaits(v, peek(v.Snapshot.Volume))...)
		}
	}
	return waits
}

// phaseWaits lists what the present phase of a snapshot waits for.
func (s *State) phaseWaits(v, o *Volume) (waits []string) {
	x := v.taking()
	for i := range v.Legs {
		l := &v.Legs[i]
		switch on := s.targets[l.Node]; { // nil: it has said nothing to this manager yet
		case l.State == LegDeleting:
		case x.Phase == Preparing && (on == nil || !on.labelled.Has(l.ID)), x.Phase == Freezing && !s.frozen(v, l):
			waits = append(waits, fmt.Sprintf("%v: %s", l, s.legWaitsFor(l)))
		}
	}
	if o == nil {
		return waits
	}
	switch {
	case x.Phase != Preparing:
	case !settledOrigin(o):
		waits = append(waits, unsettledOrigin(o))
	case !v.everyColumn():
		waits = append(waits, unfrozenColumn(o))
	}
	waits = append(waits, s.baseWaits(o, x)...)
	for _, h := range x.Hosts {
		if what := s.hostWaits(o, h, x); what != "" {
			waits = append(waits, fmt.Sprintf("host %s to %s", h.Node, what))
		}
	}
	return waits
}

// hostWaits is what the present phase of an attempt waits for on a host of an origin; empty: nothing.
func (s *State) hostWaits(o *Volume, h TakingHost, x *Taking) string {
	on, state := s.initiators[h.Node], s.holdOf(o, h, x)
	switch x.Phase {
	case Preparing:
		if x.Freeze && state != HoldPrepared {
			return "write out its file systems"
		}
	case Holding:
		if state != HoldHeld {
			return "hold its I/O"
		}
	case Confirming:
		if state != HoldHeld || on == nil || on.status.Generation < x.PhaseAt {
			return "hold its I/O"
		}
	}
	return ""
}

// frozen reports whether a leg of a snapshot is frozen and its label says so. It need not be mapped yet:
// hosts hold their I/O meanwhile.
func (s *State) frozen(v *Volume, l *Leg) bool {
	on := s.targets[l.Node]
	if on == nil {
		return false
	}
	r := on.legs.Get(l.ID)
	return r.Error == "" && r.Zeroed >= v.Layout.LegSize(v.Size)
}

// takingWaits is the first of what a snapshot waits for, for people.
func (s *State) takingWaits(v *Volume) string {
	if waits := s.phaseWaits(v, s.volumes.Get(v.Snapshot.Volume)); len(waits) > 0 {
		return waits[0]
	}
	return ""
}

// wakeHolders wakes the hosts that are told of a snapshot's phase.
func wakeHolders(wake woken, old, new *Volume) {
	for _, v := range []*Volume{old, new} {
		if x := v.taking(); x != nil {
			for _, h := range x.Hosts {
				wake.volume(h.Node, v.Snapshot.Volume)
			}
		}
	}
}

// indexSnapshot keeps, by volume, how many snapshots it has and which are being taken, and which snapshots
// lack legs. by is 1 if v is new, -1 if it is old.
func (s *State) indexSnapshot(v *Volume, by int) {
	if !v.IsSnapshot() {
		return
	}
	if delete(s.fewer, v.ID); by > 0 && v.fewer() {
		s.fewer[v.ID] = true
	}
	of := v.Snapshot.Volume
	if n := s.snapshots.Get(of) + by; n > 0 {
		s.snapshots.Set(s.by, of, n)
	} else {
		s.snapshots.Delete(s.by, of)
	}
	s.allSnapshots += by
	if v.taking() == nil {
		return
	}
	left := slices.DeleteFunc(slices.Clone(s.takings.Get(of)), func(id block.VolumeID) bool { return id == v.ID })
	if by > 0 {
		left = append(left, v.ID)
	}
	if len(left) == 0 {
		s.takings.Delete(s.by, of)
		return
	}
	s.takings.Set(s.by, of, left)
}

// ---- clones ----

// from returns the request for a clone as one for a volume like its snapshot, and the snapshot.
func (in CreateVolume) from(t *tx) (CreateVolume, *Volume, error) {
	v, err := t.s.find(in.From)
	if err != nil {
		return in, nil, err
	}
	if err := t.needsLevel(snapshotLevel, "clones"); err != nil {
		return in, nil, err
	}
	if !v.IsSnapshot() {
		return in, nil, invalid("from", "%s is no snapshot", v.object()).hint("`weft snapshot create %s@NAME` first", v.Name)
	}
	if own := in.ownLayout(); own != "" {
		return in, nil, invalid(own, "a volume that begins as %s has its layout and its place", v.object())
	}
	in.Size = cmp.Or(in.Size, v.Size)
	if in.Size < v.Size {
		return in, nil, invalid("size_bytes", "%v is less than %v, the size of %s", in.Size, v.Size, v.object())
	}
	in.Copies, in.Stripes, in.Chunk, in.Pool, in.Spread, in.Thin = v.Layout.Copies, v.Layout.Stripes, v.Layout.Chunk, v.Pool, v.Spread, true
	return in, v, nil
}

// ownLayout names a property of a request that a clone cannot choose; empty if there is none.
func (in CreateVolume) ownLayout() string {
	for _, x := range []struct {
		field string
		set   bool
	}{
		{"copies", in.Copies != 0}, {"stripes", in.Stripes != 0}, {"chunk_bytes", in.Chunk != 0}, {"data", in.Data+in.Parity != 0},
		{"pool", in.Pool != ""}, {"spread", in.Spread != ""}, {"integrity", in.Integrity},
	} {
		if x.set {
			return x.field
		}
	}
	return ""
}

// clone makes a volume that begins as a snapshot, in the same trees.
func (in CreateVolume) clone(t *tx, from *Volume) (view, error) {
	if id, ok := t.s.byName.Find(string(in.Name)); ok {
		v := t.s.volumes.Get(id)
		if v.CloneOf != from.Name {
			return nil, conflict(v.object(), "from", cmp.Or(v.CloneOf, "nothing"), from.Name)
		}
		return volumeResult(id), in.differs(v)
	}
	if from.State != VolumeReady || from.Restored {
		return nil, refused(ReasonNotReady, from.object(), "%s", from.unready()).hint("`weft explain volume %s` says what it waits for", from.Name)
	}
	if err := mappable(from.Layout, in.Size); err != nil {
		return nil, err
	}
	v := &Volume{
		ID: block.VolumeID{UUID: in.Seed.id(0)}, Name: in.Name, Size: in.Size, Layout: from.Layout, Pool: from.Pool, Spread: from.Spread,
		Labels: in.Labels, Authentication: in.Authentication, Thin: true, State: VolumeCreating, Clean: true, Generation: 1,
		Created: t.now.UTC(), Formatted: from.Formatted, CloneOf: from.Name,
	}
	if t.peek(v.ID) != nil {
		return nil, invalid("seed", "volume %v exists: the seed was used before", v.ID)
	}
	for i := range from.Legs {
		if l := &from.Legs[i]; l.trusted() && t.s.servable(l) && t.s.takesSnapshots(l.Node) && t.s.damage(l).Damage == "" {
			v.Legs = append(v.Legs, Leg{
				ID: block.LegID{UUID: in.Seed.id(uint32(1 + i))}, Column: l.Column, Copy: l.Copy, Drive: l.Drive, Node: l.Node,
				Image: image.Image{Kind: image.Mapped}, Tree: l.tree(), Origin: l.ID, State: LegCreating, Revision: 1,
			})
		}
	}
	if !v.everyColumn() {
		return nil, refused(ReasonNoInSyncLeg, from.object(), "a column has no copy that can be read").hint("`weft explain volume %s` says why", from.Name)
	}
	if err := t.s.mayPromise(v); err != nil {
		return nil, err
	}
	if d := t.s.lacksRoom(&Volume{}, v); d != nil {
		return nil, t.s.labelFull(v, d, "from")
	}
	setPlaces(v.Legs)
	t.volumes.set(v.ID, v)
	t.graft(v)
	t.unsure[v.ID] = true
	t.volumeEvent(v, event.Info, event.VolumeCreating, fmt.Sprintf("%v, beginning as %s, on %s", v.Size, from.Name, places(v.Legs)))
	return volumeResult(v.ID), nil
}

// mayPromise refuses a clone whose drives may not promise so much more.
func (s *State) mayPromise(v *Volume) error {
	more := map[block.DriveID]uint64{}
	for i := range v.Legs {
		more[v.Legs[i].Drive] += uint64(v.legExtents(&v.Legs[i]))
	}
	return s.mayPromiseMore(v, more)
}

// clonesBegin names a volume that is being created from a snapshot, or is going back to it; empty if
// there is none.
func (s *State) clonesBegin(v *Volume) string {
	if !v.IsSnapshot() {
		return ""
	}
	for _, node := range v.nodes() {
		for id := range s.onNode.Get(node).Keys() {
			if c := s.volumes.Get(id); c.State == VolumeCreating && c.CloneOf == v.Name || c.Restoring != nil && c.Restoring.To == v.ID {
				return string(c.Name)
			}
		}
	}
	return ""
}

// ---- clones that are made independent ----

// A clone shares what neither has changed with the snapshot as which it began. When it is flattened, its
// targets copy that, while hosts use the volume, until its legs and those of its snapshots need nothing of
// other volumes' legs in their trees. Each target says so of each leg; until all of them have, those that
// were away too, the record stays, and with it what targets are told. What a target has copied it finds in
// its trees, so nothing else has to be remembered. A leg that is made again elsewhere is in no tree of
// others.

// flattenLevel is the level from which on clones are flattened: an older manager would forget it half way.
const flattenLevel block.Level = 7

// Flatten is how far a volume is on its way to needing nothing of the snapshot as which it began.
type Flatten struct {
	Since time.Time `json:"since"`          // when it was asked for
	Ended time.Time `json:"ended,omitzero"` // zero: it is under way
	// For readers: what is left to be looked at, and what legs wait for.
	Left  block.Size `json:"-"`
	Waits []string   `json:"-"`
}

func (v *Volume) flattening() bool { return v.Flatten != nil && v.Flatten.Ended.IsZero() }

// flattened reports whether a volume, or the one of which it is a snapshot, was made independent.
func (s *State) flattened(v *Volume) bool {
	if v.IsSnapshot() {
		v = s.volumes.Get(v.Snapshot.Volume)
	}
	return v != nil && v.Flatten != nil && !v.flattening()
}

// FlattenVolume makes a volume independent of the snapshot as which it began. It is complete when
// Flatten.Ended is set. Result: Volume.
type FlattenVolume struct{ Volume string }

func (in FlattenVolume) apply(t *tx) (view, error) {
	v, err := t.s.find(in.Volume)
	if err != nil {
		return nil, err
	}
	if v.Flatten != nil && !v.IsSnapshot() && v.usable() {
		return volumeResult(v.ID), nil
	}
	if err := cmp.Or(t.needsLevel(flattenLevel, "flattening of clones"), t.s.mayFlatten(v)); err != nil {
		return nil, err
	}
	v = t.volume(v.ID)
	v.Flatten = &Flatten{Since: t.now.UTC()}
	t.volumeEvent(v, event.Info, event.VolumeFlattening, "what it shares with other volumes is copied")
	return volumeResult(v.ID), nil
}

// mayFlatten refuses a volume that shares nothing.
func (s *State) mayFlatten(v *Volume) error {
	switch {
	case v.IsSnapshot():
		return refused(ReasonReadOnly, v.object(), "a snapshot is flattened with its volume").hint("`weft volume flatten %s`", v.Snapshot.Name)
	case !v.Thin:
		return invalid("volume", "%s is not thin, so it shares nothing that it began as", v.object()).
			hint("nothing has to be done: it needs no other volume")
	case !v.usable():
		return refused(ReasonNotReady, v.object(), "%s", v.unready()).hint("`weft explain volume %s` says what it waits for", v.Name)
	}
	return nil
}

// mayInherit reports whether a leg may share something with legs of other volumes.
func (l *Leg) mayInherit() bool { return l.mapped() && !l.Tree.IsZero() && l.State != LegDeleting }

// wantedFlat says whether a leg is to be flattened, and whether nothing is copied at the moment.
func (s *State) wantedFlat(v *Volume, l *Leg) (flatten, wait bool) {
	flatten = v.flattening() && v.State == VolumeReady && l.mayInherit()
	d := s.drives[l.Drive]
	return flatten, flatten && d != nil && d.Full >= fullTrouble
}

// flat reports whether a leg needs nothing of other volumes' legs, as its target says.
func (s *State) flat(l *Leg) bool {
	if !l.mayInherit() {
		return true
	}
	on := s.targets[l.Node]
	return on != nil && on.legs.Get(l.ID).Flat
}

// settleFlattening notes that a volume has become independent. Until then its drives have a reserve for it.
func (t *tx) settleFlattening(id block.VolumeID) {
	v := t.peek(id)
	for i := 0; v.flattening() && i < len(v.Legs); i++ {
		t.spaces[v.Legs[i].Drive] = true
	}
	if !v.flattening() || v.State != VolumeReady || slices.ContainsFunc(v.Legs, func(l Leg) bool { return !t.s.flat(&l) }) {
		return
	}
	v = t.volume(id)
	v.Flatten = &Flatten{Since: v.Flatten.Since, Ended: t.now.UTC()}
	t.volumeEvent(v, event.Info, event.VolumeFlattened, "it shares nothing with other volumes any more")
}

// flattenView is Volume.Flatten for readers.
func (s *State) flattenView(v *Volume) *Flatten {
	switch {
	case !v.flattening():
		return v.Flatten
	case v.State != VolumeReady:
		return nil // it is being deleted
	}
	view := *v.Flatten
	for i := range v.Legs {
		l := &v.Legs[i]
		if s.flat(l) {
			continue
		}
		if on := s.targets[l.Node]; on != nil {
			view.Left += on.legs.Get(l.ID).FlatLeft
		}
		if why := s.flatWaitsFor(v, l); why != "" {
			view.Waits = append(view.Waits, fmt.Sprintf("%v: %s", l, why))
		}
	}
	return &view
}

// flatWaitsFor says what the flattening of a leg waits for; empty if it goes on.
func (s *State) flatWaitsFor(v *Volume, l *Leg) string {
	on, d := s.targets[l.Node], s.drives[l.Drive]
	switch _, wait := s.wantedFlat(v, l); {
	case on == nil || !on.status.Online:
		return fmt.Sprintf("target %s is offline", l.Node)
	case on.status.Level < flattenLevel:
		return fmt.Sprintf("target %s is of an earlier version, which does not flatten", l.Node)
	case wait:
		return fmt.Sprintf("%s is nearly full, and what is left is kept for what hosts write", d.object())
	case on.legs.Get(l.ID).FlatWaits != "":
		return fmt.Sprintf("target %s: %s", l.Node, on.legs.Get(l.ID).FlatWaits)
	}
	return s.legWaitsFor(l)
}

// explainFlattening says how far a volume is on its way to being independent.
func (s *State) explainFlattening(e *Explanation, v *Volume) {
	x := s.flattenView(v)
	switch {
	case x == nil:
		return
	case !v.flattening():
		e.Facts = append(e.Facts, fmt.Sprintf("it was flattened at %s: it needs no snapshot of another volume", x.Ended.Format(time.RFC3339)))
		return
	}
	fact := "it is being flattened: what it shares with other volumes is copied"
	if x.Left > 0 {
		fact += fmt.Sprintf(", %s are left", x.Left.Short())
	}
	e.Facts = append(e.Facts, fact)
	for _, why := range x.Waits {
		e.Waits = append(e.Waits, "the flattening of "+why)
	}
	for i := range v.Legs {
		l := &v.Legs[i]
		on, d := s.targets[l.Node], s.drives[l.Drive]
		switch flatten, wait := s.wantedFlat(v, l); {
		case wait:
			e.Actions = append(e.Actions, fmt.Sprintf("make room on %s, or move the leg: `weft leg move %s %d.%d`", d.object(), v.Name, l.Column, l.Copy))
		case flatten && on != nil && !s.flat(l) && on.legs.Get(l.ID).FlatWaits != "":
			e.Actions = append(e.Actions, fmt.Sprintf("if %v goes on to wait, have it copied to another drive, where it shares nothing: `weft leg move %s %d.%d`", l, v.Name, l.Column, l.Copy))
		}
	}
}

// ---- for people ----

func (s *State) explainSnapshot(e *Explanation, v *Volume) {
	if !v.IsSnapshot() {
		if n := s.snapshots.Get(v.ID); n > 0 {
			e.Facts = append(e.Facts, fmt.Sprintf("it has %s: `weft snapshot list %s`", plural(n, "snapshot"), v.Name))
		}
		for i := range v.Legs {
			if l := &v.Legs[i]; l.Based && l.State != LegDeleting {
				e.Facts = append(e.Facts, fmt.Sprintf("%v: %s", l, s.baseWaitsFor(v, l)))
			}
		}
		if v.CloneOf != "" && (v.Flatten == nil || v.flattening()) {
			e.Facts = append(e.Facts, fmt.Sprintf("it began as %s, and shares what neither has changed with it", v.CloneOf))
		}
		return
	}
	x := v.taking()
	if x == nil {
		s.explainStrays(e, v)
		e.Facts = append(e.Facts, fmt.Sprintf("it is a snapshot of %s, and never changes", v.Snapshot.Name))
		if v.Snapshot.FSFrozen {
			e.Facts = append(e.Facts, "no file system on it had a write under way when it was taken")
		}
		return
	}
	e.Summary = fmt.Sprintf("%s is being taken: attempt %d of %d, %s", v.object(), x.Attempt, maxAttempts, strings.ToLower(string(x.Phase)))
	e.Waits = append(e.Waits, s.takingWaitsOf(x.Members, s.volumes.Get)...)
}

// SnapshotsAfter yields the snapshots after a name, by name; of is the volume whose snapshots are listed, or one
// snapshot, name or id; empty: all.
func (s *State) SnapshotsAfter(of, after string) (iter.Seq2[string, Volume], error) {
	var origin *Volume
	if of != "" {
		var err error
		if origin, err = s.find(of); err != nil {
			return nil, err
		}
	}
	return func(yield func(string, Volume) bool) {
		for name, id := range s.byName.After(after) {
			v := s.volumes.Get(id)
			if v.IsSnapshot() && (origin == nil || v.Snapshot.Volume == origin.ID || v.ID == origin.ID) && !yield(name, s.volumeView(v)) {
				return
			}
		}
	}, nil
}

// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"crypto/sha256"
	"encoding/binary"
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
	if origin.users() == "" && !origin.equal() {
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
		if !l.trusted() || t.s.cannotSnapshot(l) != "" || t.s.asked[o.ID][l.ID] != "" {
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
func (s *State) takesSnapshots(node block.NodeName) bool {
	on := s.targets[node]
	return on != nil && on.report != nil && on.report.Snapshots
}

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
		if l := &from.Legs[i]; l.trusted() && t.s.servable(l) && t.s.takesSnapshots(l.Node) {
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

// mayFlatten refuses a volume that shares nothing, or would go on to need others.
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
	for i := range v.Legs {
		if over := s.baseUnder(&v.Legs[i]); over != "" {
			return (&Error{Kind: Unimplemented, Field: "volume", Object: v.object(), Text: fmt.Sprintf("%s: %v is in the extents of volume %s, which is not thin, and stays there", v.object(), &v.Legs[i], over)}).
				hint("move its legs to other drives, where they are independent: `weft leg move %s %d.%d`", v.Name, v.Legs[i].Column, v.Legs[i].Copy)
		}
	}
	return nil
}

// baseUnder names the volume that is not thin, and in the tree over whose leg another leg is; empty if there
// is none.
func (s *State) baseUnder(l *Leg) string {
	if !l.mayInherit() {
		return ""
	}
	for id := range s.inTree.Get(l.Tree).Keys() {
		if base := s.volumes.Get(id); base.leg(block.LegID{UUID: l.Tree}) != nil && !base.Thin {
			return string(base.Name)
		}
	}
	return ""
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
		e.Facts = append(e.Facts, fmt.Sprintf("it was flattened at %s: it needs nothing of the snapshot as which it began", x.Ended.Format(time.RFC3339)))
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

// ---- going back ----

// A volume goes back to one of its snapshots while no host has it, in these steps. Each is durable before
// the next:
//
//	RestoreVolume   the record: the legs that can go back are those in sync that share a tree with a leg
//	                of the snapshot; all others are stale, and are copied whole later
//	targets         labels say that the volume is going back
//	Switching       the record: a new revision for each of these legs
//	targets         the leg's record on the label is not prepared, or going back; then the leg is in its tree
//	                what the snapshot is; then its record is prepared, under the new revision
//	settleRestoring the record: it is over, and hosts can have the volume
//
// If the store is lost meanwhile, some legs may have gone back and others not. The labels say so, and the
// volume goes back again, under newer revisions: no host can have written to it.

// Restoring is how far a volume is on its way back to a snapshot.
type Restoring struct {
	To        block.VolumeID   `json:"to"`
	Name      block.VolumeName `json:"name"`      // of the snapshot
	Formatted string           `json:"formatted"` // of the snapshot
	Listed    uint64           `json:"listed"`    // the volume's generation since which labels say so
	Switching bool             `json:"switching,omitempty"`
	// Again: the store was lost on the way, so the volume cannot be left as it is.
	Again bool      `json:"again,omitempty"`
	Since time.Time `json:"since"` // when the present step began
}

const (
	// restoreAwait is how long a leg that could not be reached is waited for, if its column can do
	// without it.
	restoreAwait = 10 * time.Second
	// restoreListFor is the longest that labels may take before a volume that has not changed yet is
	// left as it was.
	restoreListFor = time.Minute
)

// RestoreVolume makes a volume that no host has what one of its snapshots holds. It is complete when
// Restoring is nil. Result: Volume.
type RestoreVolume struct {
	Volume, Snapshot string // name or id
	// IfGeneration and IfEpoch are the volume's as the caller saw it; generation 0: any.
	IfGeneration uint64
	IfEpoch      block.Epoch
}

func (in RestoreVolume) apply(t *tx) (view, error) {
	v, from, err := t.s.restorable(in)
	if err != nil {
		return nil, err
	}
	if x := v.Restoring; x != nil && x.To == from.ID {
		return volumeResult(v.ID), nil
	}
	if err := t.s.mayRestore(v, from, in); err != nil {
		return nil, err
	}
	if !v.Thin {
		if err := t.needsLevel(plainRestoreLevel, "going back of volumes that are not thin"); err != nil {
			return nil, err
		}
	}
	t.restore(t.volume(v.ID), from)
	return volumeResult(v.ID), nil
}

// restorable finds a volume and its snapshot.
func (s *State) restorable(in RestoreVolume) (v, from *Volume, err error) {
	if v, err = s.find(in.Volume); err != nil {
		return nil, nil, err
	}
	if v.unwritten() {
		return nil, nil, v.neverChanges()
	}
	if from, err = s.find(in.Snapshot); err != nil {
		return nil, nil, err
	}
	if !from.IsSnapshot() || from.Snapshot.Volume != v.ID {
		return nil, nil, invalid("snapshot", "%s is no snapshot of %s", from.object(), v.object()).hint("`weft snapshot list %s` shows which there are", v.Name)
	}
	return v, from, nil
}

// mayRestore refuses a volume that cannot go back to its snapshot now.
func (s *State) mayRestore(v, from *Volume, in RestoreVolume) error {
	for _, x := range []*Volume{v, from} {
		if !x.usable() {
			return refused(ReasonNotReady, x.object(), "%s", x.unready()).hint("`weft explain volume %s` says what it waits for", x.Name)
		}
	}
	switch {
	case v.users() != "":
		return refused(ReasonAttached, v.object(), "attached to %s, which would not know that it holds other data", v.users()).hint("`weft detach %s` first", v.Name)
	case v.Holder != "" || len(v.FormerHosts) > 0:
		return refused(ReasonAttached, v.object(), "a host that had it has not confirmed its release").
			hint("attach it to another host, which shuts that one out, and detach it: `weft attach %s --node NODE`, `weft detach %s`", v.Name, v.Name)
	case v.ExpandingTo != 0:
		return refused(ReasonNotReady, v.object(), "it is being expanded").hint("wait until `weft explain volume %s` no longer shows it", v.Name)
	case len(s.takings.Get(v.ID)) > 0:
		return refused(ReasonNotReady, v.object(), "a snapshot of it is being taken").hint("wait until `weft snapshot list %s` shows it ready", v.Name)
	case in.IfGeneration != 0 && (in.IfGeneration != v.Generation || in.IfEpoch != v.Epoch):
		return refused(ReasonNotReady, v.object(), "it has changed since: its generation is %d and its epoch %d, not %d and %d", v.Generation, v.Epoch, in.IfGeneration, in.IfEpoch).hint("look at it again: `weft volume show %s`", v.Name)
	}
	for c := range v.Layout.Stripes {
		if err := s.columnGoesBack(v, from, c); err != nil {
			return err
		}
	}
	return nil
}

// columnGoesBack refuses a volume of which one column cannot go back to a snapshot now.
func (s *State) columnGoesBack(v, from *Volume, column int) error {
	instead := fmt.Sprintf("or use a volume that begins as it: `weft volume create NAME --from %s`", from.Name)
	old, apart := "", false
	for _, l := range v.column(column) {
		switch x, why := s.goesBack(l, from); {
		case x != nil:
			return nil
		case l.trusted() && slices.ContainsFunc(from.Legs, func(x Leg) bool {
			return x.Drive == l.Drive && x.tree() != l.tree() && x.Column == column && x.trusted()
		}):
			apart = true
		case l.trusted() && s.oldForBack(l):
			old = why
		}
	}
	if old != "" {
		return refused(ReasonOldTarget, v.object(), "column %d cannot go back to %s: %s", column, from.Name, old).hint("upgrade the target; %s", instead)
	}
	if apart {
		return refused(ReasonNoInSyncLeg, v.object(), "column %d shares nothing with %s any more: legs of one of them were made again, each in a tree of its own", column, from.Name).
			hint("use a volume that begins as it: `weft volume create NAME --from %s`", from.Name)
	}
	return refused(ReasonNoInSyncLeg, v.object(), "column %d has no copy in sync that shares a drive with one of %s and can be reached", column, from.Name).
		hint("`weft explain volume %s` shows where its legs are; %s", from.Name, instead)
}

// goesBack returns the leg of a snapshot that a leg can be made again of; if there is none now, it says why.
func (s *State) goesBack(l *Leg, from *Volume) (x *Leg, why string) {
	i := slices.IndexFunc(from.Legs, func(x Leg) bool {
		return x.Drive == l.Drive && x.tree() == l.tree() && x.Column == l.Column && x.member()
	})
	switch {
	case !l.trusted():
		return nil, "it is not in sync"
	case !s.servable(l):
		return nil, cmp.Or(s.legWaitsFor(l), fmt.Sprintf("target %s cannot serve it", l.Node))
	case i < 0:
		return nil, fmt.Sprintf("nothing of %s was found in its tree", from.Name)
	case !from.Legs[i].trusted():
		return nil, fmt.Sprintf("it is not known whether what its tree has of %s is right", from.Name)
	case s.oldForBack(l):
		return nil, fmt.Sprintf("target %s is of an earlier version, or has not `--datapath user`, and cannot have it go back to a snapshot", l.Node)
	}
	return &from.Legs[i], ""
}

// oldForBack reports whether a leg's target is one that cannot have it go back to a snapshot.
func (s *State) oldForBack(l *Leg) bool {
	return s.servable(l) && (!s.takesSnapshots(l.Node) || l.Based && s.targets[l.Node].status.Level < plainRestoreLevel)
}

// goingBack reports whether a leg's label says that it is going back to a snapshot.
func (s *State) goingBack(l *Leg) bool {
	d, _ := s.driveReport(l)
	return slices.ContainsFunc(d.Legs, func(label evidence.LegLabel) bool { return label.Leg == l.ID && label.GoingBack })
}

// restore begins the way back.
func (t *tx) restore(v, from *Volume) {
	t.endHealing(v, "it goes back to a snapshot")
	for i := range v.Legs {
		l := &v.Legs[i]
		switch x, _ := t.s.goesBack(l, from); {
		case x != nil:
			l.Origin = x.ID
			continue
		case l.State == LegInSync:
			t.evict(v, l.ID, fmt.Sprintf("it cannot go back to %s", from.Name))
		case l.member():
			l.Revision++
		default:
			continue
		}
		l.copyAll()
	}
	if _, says := v.Labels[block.ImportLabel]; says {
		v.Labels = maps.Clone(v.Labels)
		delete(v.Labels, block.ImportLabel)
	}
	v.Generation++
	v.Failed = ""
	v.Restoring = &Restoring{To: from.ID, Name: from.Name, Formatted: from.Formatted, Listed: v.Generation, Since: t.now.UTC()}
	t.volumeEvent(v, event.Warning, event.VolumeRestoring, fmt.Sprintf("to %s, taken at %s: what was written since will be gone", from.Name, from.Snapshot.Taken.Format(time.RFC3339)))
}

// settleRestoring takes the next step of a volume's way back.
func (t *tx) settleRestoring(id block.VolumeID) {
	v := t.peek(id)
	if v.State != VolumeReady || v.Restoring == nil {
		return
	}
	if v.undecided() { // its targets are told nothing until an operator has chosen a copy of each column
		return
	}
	t.findOrigins(v)
	since := v.Restoring.Since
	if t.s.began.After(since) { // its targets may not have reported to this manager yet
		since = t.s.began
	}
	if t.now.Sub(since) > restoreAwait {
		t.leaveBehind(id)
	}
	v = t.peek(id)
	waits := t.s.restoringWaits(v)
	switch x := *v.Restoring; {
	case len(waits) == 0 && x.Switching:
		t.wentBack(t.volume(id))
	case len(waits) == 0:
		v = t.volume(id)
		v.Generation++
		for i := range v.Legs {
			if l := &v.Legs[i]; l.State == LegInSync {
				l.Revision++
			}
		}
		x.Switching, x.Since = true, t.now.UTC()
		v.Clean = true // what an earlier host may have left unequal does not count any more
		v.Restoring = &x
	case !x.Switching && !x.Again && t.now.Sub(since) > restoreListFor:
		v = t.volume(id)
		v.endRestoring()
		v.Failed = fmt.Sprintf("it did not go back to %s, and is unchanged: it took too long to reach its targets: %s", x.Name, waits[0])
		t.volumeEvent(v, event.Warning, event.RestoreFailed, v.Failed)
	}
}

// findOrigins finds what legs are made again of, if the store was lost on the way.
func (t *tx) findOrigins(v *Volume) {
	from := t.peek(v.Restoring.To)
	if !v.Restoring.Again || v.Restoring.Switching || from == nil || !from.usable() {
		return
	}
	for i := range v.Legs {
		l := &v.Legs[i]
		if x, _ := t.s.goesBack(l, from); x != nil && l.Origin.IsZero() {
			v = t.volume(v.ID)
			v.leg(l.ID).Origin = x.ID
		}
	}
}

// wentBack ends the way back of a volume that has arrived.
func (t *tx) wentBack(v *Volume) {
	x := v.Restoring
	v.Formatted = x.Formatted
	for i := range v.Legs {
		if l := &v.Legs[i]; l.State == LegInSync { // what it lost before, it has anew
			l.Suspect = false
		}
	}
	v.endRestoring()
	t.volumeEvent(v, event.Info, event.VolumeWentBack, fmt.Sprintf("it holds what %s does", x.Name))
}

func (v *Volume) endRestoring() {
	v.Restoring = nil
	v.Generation++
	for i := range v.Legs {
		if l := &v.Legs[i]; l.State == LegInSync {
			l.Origin = block.LegID{}
		}
	}
}

// leaveBehind makes legs stale that do not get on and that their columns can do without.
func (t *tx) leaveBehind(id block.VolumeID) {
	for _, l := range t.peek(id).Legs {
		v := t.peek(id)
		if l.State != LegInSync || t.s.restoringWaitsFor(v, &l) == "" {
			continue
		}
		others := slices.ContainsFunc(v.column(l.Column), func(o *Leg) bool {
			return o.ID != l.ID && o.trusted() && t.s.restoringWaitsFor(v, o) == ""
		})
		if others {
			v = t.volume(id)
			t.evict(v, l.ID, fmt.Sprintf("it did not go back to %s", v.Restoring.Name))
			v.leg(l.ID).copyAll()
		}
	}
}

// restoringWaits lists the legs that the present step of a volume's way back waits for.
func (s *State) restoringWaits(v *Volume) (waits []string) {
	for i := range v.Legs {
		if l := &v.Legs[i]; l.State == LegInSync {
			if why := s.restoringWaitsFor(v, l); why != "" {
				waits = append(waits, fmt.Sprintf("%v: %s", l, why))
			}
		}
	}
	return waits
}

// restoringWaitsFor says why one leg is not through with the present step; empty if it is.
func (s *State) restoringWaitsFor(v *Volume, l *Leg) string {
	x := v.Restoring
	d, _ := s.driveReport(l)
	done := slices.ContainsFunc(d.Legs, func(label evidence.LegLabel) bool {
		if x.Switching {
			return label.Leg == l.ID && label.Revision >= l.Revision && label.Zeroed && !label.GoingBack
		}
		return label.Leg == l.ID && label.Volume.Generation >= x.Listed
	})
	switch {
	case l.Origin.IsZero():
		return s.noOriginOf(v, l)
	case done && !x.Switching && s.targets[l.Node].exported.Has(l.ID): // what a host has sent there may still be written
		return fmt.Sprintf("target %s to remove its export", l.Node)
	case done && !x.Switching && !s.admitted(v, l): // or a host that lost the volume could still write there
		return fmt.Sprintf("target %s to fence epochs below %d", l.Node, v.Epoch)
	case done:
		return ""
	}
	return cmp.Or(s.upgradeForBack(v, l), s.legWaitsFor(l), fmt.Sprintf("target %s has not done it yet", l.Node))
}

// upgradeForBack says that a leg which is told to go back has a target that cannot; empty if it can.
func (s *State) upgradeForBack(v *Volume, l *Leg) string {
	if v.Restoring.Switching && s.oldForBack(l) {
		return fmt.Sprintf("target %s to be upgraded: its version cannot have legs go back to a snapshot", l.Node)
	}
	return ""
}

// noOriginOf says why it is not known of what a leg is to be made again.
func (s *State) noOriginOf(v *Volume, l *Leg) (why string) {
	if from := s.volumes.Get(v.Restoring.To); from != nil {
		_, why = s.goesBack(l, from)
	}
	return cmp.Or(why, fmt.Sprintf("nothing of %s was found in its tree", v.Restoring.Name))
}

// restoreAgain has a volume go back again to the snapshot that its labels name, if they say that it was
// going back when the store was lost: its legs may differ. from is the snapshot. If that was not found,
// nil, nobody knows what the legs hold, and none is trusted.
func (v *Volume) restoreAgain(to block.VolumeID, from *Volume, now time.Time) {
	for i := range v.Legs {
		if v.Legs[i].State != LegCreating {
			v.Legs[i].Origin = block.LegID{}
		}
	}
	v.Restoring = nil
	if to.IsZero() || v.IsSnapshot() || v.State != VolumeReady {
		return
	}
	for i := range v.Legs {
		l := &v.Legs[i]
		if from == nil && l.State == LegInSync {
			l.State, l.StaleSince, l.Suspect = LegStale, now.UTC(), false
			l.Reason = fmt.Sprintf("it may hold what it held before the volume went back to snapshot %v, or what that held, which is not known any more", to)
		}
		if l.member() && l.State != LegInSync {
			l.copyAll()
		}
	}
	if from == nil { // an operator has to choose
		v.Clean = false
		return
	}
	v.Restoring, v.Clean = &Restoring{To: to, Name: from.Name, Formatted: from.Formatted, Listed: v.Generation, Again: true, Since: now.UTC()}, true
}

// ---- copies that are made again ----

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
		n := t.nodes.peek(d.Node)
		left, away := t.s.awayLeft(d.ID)
		if n == nil || d.Leaving == "" && !n.Draining && !n.ConfirmedDead && (!away || left > 0) {
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
		if cause := t.s.unexportable(v, l); cause != "" {
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
			if x := (tree{l.Drive, l.tree()}); l.trusted() && !known[x] && t.s.servable(l) && t.s.ownTree(l) {
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
func (s *State) copies(node block.NodeName) bool {
	on := s.targets[node]
	return on != nil && on.report != nil && on.report.Copies
}

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
		Portals: s.nodes[from.Node].Portals, NQN: x.NQN, Host: x.Host, Keys: x.Keys, NSID: v.nsid(from), UUID: v.namespace(from), Since: l.Copying.Since,
	}
	if o := s.volumes.Get(v.Snapshot.Volume); o != nil {
		source.Rate = o.RebuildRate
	}
	return LegOrigin{Leg: l.Copying.Base, Copy: source}
}

// copyExport is the subsystem through which a leg of a snapshot is copied from another one.
func (s *State) copyExport(v *Volume, l, from *Leg) WantedExport {
	x := WantedExport{
		Volume: v.ID, Epoch: v.Epoch, Serial: block.SerialNumber(v.ID), Host: block.HostFromID(l.ID.UUID), ReadOnly: true,
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
	case v.Layout.Slots() <= v.Layout.Group().Members:
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
		case !label.Zeroed || t.s.serving(v)[label.Column].Len() >= v.Layout.Group().Members:
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
	l := Leg{ID: label.Leg, Column: label.Column, Drive: d.ID, Node: d.Node, Image: label.Image, Place: v.nextPlace(), Revision: label.Revision}
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

// explainStrays names the legs of a snapshot that no record has, and that stay for now.
func (s *State) explainStrays(e *Explanation, v *Volume) {
	for _, node := range slices.Sorted(maps.Keys(s.targets)) {
		on := s.targets[node]
		for _, id := range sorted(on.unknown) {
			for i := range on.drives[id].Legs {
				if label := &on.drives[id].Legs[i]; label.Volume.ID == v.ID && v.lostTrackOf(label) {
					e.Facts = append(e.Facts, fmt.Sprintf("drive %v on %s has leg %v of it, which no record has, as after a store was lost: it is freed once column %d has all of its copies, since it may be of another moment", id, node, label.Leg, label.Column))
				}
			}
		}
	}
}

// ---- legs that are lost ----

// mayLose refuses to give up legs of a snapshot that cannot be copied, and that no other leg stands in for.
func (s *State) mayLose(object string, v *Volume, legs []*Leg) error {
	for _, l := range legs {
		only := l.trusted() && !v.Layout.Group().Readable(v.trusted()[l.Column].Without(l.Copy))
		switch {
		case !s.servable(l) && only:
			return refused(ReasonDriveInUse, object, "%v of %s is the only good copy of its column and cannot be read", l, v.Name).
				hint("`weft explain volume %s` says what can be done", v.Name)
		case !s.servable(l):
		case s.level < copiesLevel:
			return refused(ReasonDriveInUse, object, "holds %v of %s, and snapshots are copied to other drives from level %d on", l, v.Name, copiesLevel).
				hint("`weft upgrade finish`, or delete the snapshot: `weft snapshot delete %s`", v.Name)
		case v.Layout.Slots() <= v.Layout.Group().Members:
			return refused(ReasonDriveInUse, object, "holds a leg of %s, which has a single copy of its data", v.Name).
				hint("delete the snapshot: `weft snapshot delete %s`; to keep what it holds, copy it to another volume before", v.Name)
		}
	}
	return nil
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

// ---- for people ----

func (s *State) explainSnapshot(e *Explanation, v *Volume) {
	if !v.IsSnapshot() {
		if n := s.snapshots.Get(v.ID); n > 0 {
			e.Facts = append(e.Facts, fmt.Sprintf("it has %s: `weft snapshot list %s`", plural(n, "snapshot"), v.Name))
		}
		for i := range v.Legs {
			if l := &v.Legs[i]; l.Based && l.State != LegDeleting {
				e.Facts = append(e.Facts, fmt.Sprintf("%v: %s", l, s.baseWaitsFor(l)))
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

func (s *State) explainRestoring(e *Explanation, v *Volume) {
	x := v.Restoring
	if v.undecided() {
		e.Waits = append(e.Waits, "an operator to choose a copy of each column that has none in sync")
	}
	if from := s.volumes.Get(x.To); from != nil && from.undecided() {
		e.Waits = append(e.Waits, fmt.Sprintf("an operator to choose a copy of each column of %s that has none in sync", x.Name))
		e.Actions = append(e.Actions, fmt.Sprintf("see what is known of each copy of %s, and choose: `weft explain snapshot %s`", x.Name, x.Name))
	}
	e.Summary = fmt.Sprintf("%s is going back to %s; no host can have it until that is over", v.object(), x.Name)
	e.Waits = append(e.Waits, s.restoringWaits(v)...)
	if x.Again {
		e.Facts = append(e.Facts, "the manager's store was lost while it went back, so it goes back again: some of its legs may hold what it held before")
	}
	for i := range v.Legs {
		if l := &v.Legs[i]; l.State == LegInSync && !s.targetOnline(l.Node) {
			e.Actions = append(e.Actions, s.bringBack(l.Node))
		}
	}
}

// SnapshotsAfter yields the snapshots after a name, by name; of is the volume whose snapshots are listed,
// name or id; empty: all.
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
			if v.IsSnapshot() && (origin == nil || v.Snapshot.Volume == origin.ID) && !yield(name, s.volumeView(v)) {
				return
			}
		}
	}, nil
}

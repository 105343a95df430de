// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/labelset"
)

func (v *Volume) object() string { return "volume " + string(v.Name) }

func (v *Volume) clone() *Volume {
	c := *v
	c.Legs, c.Shared, c.FormerHosts = slices.Clone(v.Legs), slices.Clone(v.Shared), slices.Clone(v.FormerHosts)
	c.InKernel = slices.Clone(v.InKernel)
	if v.Attachment != nil {
		a := *v.Attachment
		c.Attachment = &a
	}
	if v.Heal != nil {
		a := *v.Heal
		c.Heal = &a
	}
	return &c
}

// nodes lists the nodes with a leg of v or an attachment, or that hold I/O for it, each once.
func (v *Volume) nodes() []block.NodeName {
	var all []block.NodeName
	for _, l := range v.Legs {
		all = append(all, l.Node)
	}
	for _, a := range v.grants() {
		all = append(all, a.Node)
	}
	if x := v.taking(); x != nil { // what they report decides how it goes on
		for _, h := range x.Hosts {
			all = append(all, h.Node)
		}
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// changing reports whether its legs grow, or are being made independent of others.
func (v *Volume) changing() bool { return v.ExpandingTo != 0 || v.flattening() }

// unsettled reports whether time or a report may make settleVolume change the volume.
func (v *Volume) unsettled() bool {
	if !v.usable() || v.changing() || v.suspects() || v.awaitsLegs() || v.legTooMany() || v.Scrub.wanted() || slices.ContainsFunc(v.Legs, Leg.unsettled) {
		return true
	}
	if len(v.Shared) > 0 {
		return len(v.FormerHosts) > 0 || slices.ContainsFunc(v.Shared, func(a Attachment) bool { return a.State != Attached })
	}
	if v.Attachment == nil {
		return v.Heal != nil || v.Holder != "" || len(v.FormerHosts) > 0 // hosts that the targets have to fence
	}
	return v.Attachment.State != Attached || slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.State != LegInSync })
}

func (l Leg) unsettled() bool {
	return l.State == LegStale || l.State == LegDeleting || l.Leave || l.Based
}

// legTooMany reports whether some column has more legs than it needs: one is given up as soon as that is
// safe, also by a manager that does not know why it was added.
func (v *Volume) legTooMany() bool {
	n := 0
	for i := range v.Legs {
		n += rank(v.Legs[i].member())
	}
	return n > v.Layout.Stripes*v.Layout.Group().Members
}

// awaitsLegs reports whether a clone is to get more legs: it began on the targets that were there.
func (v *Volume) awaitsLegs() bool { return v.CloneOf != "" && v.replaceable() && v.lacksLegs() }

// lacksLegs reports whether a column has fewer legs than it is to have.
func (v *Volume) lacksLegs() bool {
	for c := range v.Layout.Stripes {
		if len(v.column(c)) < v.Layout.Group().Members {
			return true
		}
	}
	return false
}

// check refuses a volume record that is inconsistent, whatever its source.
func (v *Volume) check() error {
	if err := v.Layout.Check(); err != nil {
		return err
	}
	for _, l := range v.Legs {
		slots := v.Layout.Slots()
		if !l.member() { // the volume may have had more copies
			slots = max(slots, block.MaxSlots)
		}
		if l.Column < 0 || l.Column >= v.Layout.Stripes || l.Copy < 0 || l.Copy >= slots {
			return fmt.Errorf("leg %v: column %d copy %d outside of layout %v", l.ID, l.Column, l.Copy, v.Layout)
		}
		if err := l.Image.Check(); err != nil {
			return fmt.Errorf("leg %v: %w", l.ID, err)
		}
		if l.State == LegRebuilding && v.copier() == nil {
			return fmt.Errorf("leg %v: rebuilding in a volume that no host has exclusively", l.ID)
		}
	}
	return cmp.Or(v.checkPlaces(), v.checkShared(), v.checkHeal())
}

func (v *Volume) leg(id block.LegID) *Leg {
	for i := range v.Legs {
		if v.Legs[i].ID == id {
			return &v.Legs[i]
		}
	}
	return nil
}

// legAt returns the leg in a place of the layout; nil if there is none.
func (v *Volume) legAt(column, copy int) *Leg {
	for _, l := range v.column(column) {
		if l.Copy == copy {
			return l
		}
	}
	return nil
}

// uses reports whether a node has a leg that counts, or an attachment.
func (v *Volume) uses(node block.NodeName) bool {
	return v.attachmentOf(node) != nil || slices.ContainsFunc(v.Legs, func(l Leg) bool { return l.Node == node && l.State != LegDeleting })
}

// column lists the legs of a column, without those that were made again elsewhere.
func (v *Volume) column(c int) (legs []*Leg) {
	for i := range v.Legs {
		if l := &v.Legs[i]; l.Column == c && l.member() {
			legs = append(legs, l)
		}
	}
	return legs
}

func (l *Leg) String() string {
	return fmt.Sprintf("leg %d.%d on %s", l.Column, l.Copy, l.Node)
}

// The smallest and the largest volume. The largest is well within the limits of the
// arithmetic here and of a kernel block device.
const (
	minVolume = block.MiB
	maxVolume = 1024 * block.PiB
)

// checkSize refuses a requested size that no volume can have.
func checkSize(size block.Size) error {
	switch {
	case size == 0:
		return invalid("size_bytes", "missing: specify the volume's size")
	case size < minVolume:
		return invalid("size_bytes", "%v is below the smallest volume, %v", size, minVolume)
	case size > maxVolume:
		return invalid("size_bytes", "%v is above the largest volume, %v", size, maxVolume)
	case size%(4*block.KiB) != 0:
		return invalid("size_bytes", "%d bytes is not a multiple of 4KiB", uint64(size)).
			hint("the nearest sizes are %d and %d bytes; whole GiB are multiples, GB are not", uint64(size/(4*block.KiB)*4*block.KiB), uint64(size.RoundUp(4*block.KiB)))
	}
	return nil
}

// CreateVolume places a volume and has its legs carved. Result: Volume.
type CreateVolume struct {
	again bool // it is there already: a place for one more of its legs is looked for

	Name    block.VolumeName
	Size    block.Size
	Copies  int        // 0 means 2
	Stripes int        // 0 lets the manager choose
	Chunk   block.Size // 0 means block.DefaultChunk
	// A code of Data and Parity legs instead of copies. It is refused, since no data path
	// serves one yet.
	Data, Parity int
	Pool         string // empty means DefaultPool
	Spread       string // empty means "node"
	Labels       map[string]string
	// Authentication is one of block.PropertyAuthentication; empty means its default.
	Authentication string
	Integrity      bool // targets keep a checksum of each block
	// Thin: it takes space only where it is written.
	Thin bool
	// From is the snapshot as which it begins, name or id; empty: it begins as zeroes. It then has the
	// snapshot's place and layout, and its size if Size is 0.
	From string
	// The node of each leg must have the labels of one of Topology's segments; empty: any
	// node. Among those, nodes of an earlier segment of Preferred are better.
	Topology  []Segment
	Preferred []Segment
	Seed      Seed
}

// normal returns the request with its defaults filled in, or refuses it. Stripes 0 stays,
// since it lets the placement choose.
func (in CreateVolume) normal() (CreateVolume, error) {
	if in.Data == 0 && in.Parity == 0 {
		in.Copies = cmp.Or(in.Copies, block.DefaultCopies)
	}
	in.Chunk = cmp.Or(in.Chunk, block.DefaultChunk)
	in.Pool = cmp.Or(in.Pool, DefaultPool)
	in.Spread = cmp.Or(in.Spread, block.DefaultSpread)
	if _, err := block.ParseVolumeName(string(in.Name)); err != nil {
		return in, invalid("name", "%v", err)
	}
	if err := checkSize(in.Size); err != nil {
		return in, err
	}
	g := in.group()
	switch {
	case g.Kind == block.Mirror && !block.PropertyCopies.Allows(in.Copies):
		return in, invalid(block.PropertyCopies.Field, "%d: must be %s", in.Copies, block.PropertyCopies.Bounds())
	case !block.PropertyStripes.Allows(in.Stripes):
		return in, invalid(block.PropertyStripes.Field, "%d: must be 1 to %d, or 0 to let the manager choose", in.Stripes, block.MaxStripes)
	}
	if err := cmp.Or(checkVolumeLabels("labels", in.Labels), checkSegments("topology", in.Topology), checkSegments("preferred", in.Preferred)); err != nil {
		return in, err
	}
	if len(in.Spread) > labelset.MostKey {
		return in, invalid("spread", "%q has %d bytes; at most %d are allowed", labelset.Shorten(in.Spread, 40), len(in.Spread), labelset.MostKey)
	}
	var err error
	if in.Authentication, err = checkAuthentication(in.Authentication); err != nil {
		return in, err
	}
	if err := (block.Layout{Stripes: 1, Copies: 1, Chunk: in.Chunk}).Check(); err != nil {
		return in, invalid("chunk_bytes", "%v", err)
	}
	if err := in.layout(1).Check(); err != nil {
		return in, invalid(groupField(g), "%v", err)
	}
	return in, nil
}

// offered refuses what no data path serves yet.
func (in CreateVolume) offered() error {
	if in.Thin && in.Integrity {
		return (&Error{
			Kind: Unimplemented, Field: block.PropertyThin.Field, Object: "volume " + string(in.Name),
			Text: fmt.Sprintf("volume %s: thin volumes with checksums are not supported yet", in.Name),
		}).hint("leave out one of `--thin` and `--integrity`")
	}
	g := in.group()
	if g.Kind == block.Mirror {
		return nil
	}
	e := &Error{
		Kind: Unimplemented, Field: groupField(g), Object: "volume " + string(in.Name),
		Text: fmt.Sprintf("volume %s: columns of %v are not supported yet: this version offers mirrors only", in.Name, g),
	}
	return e.hint("ask for copies instead, up to %d", block.MaxCopies)
}

// differs refuses a repeated create that asks for something else than the existing volume.
//
// Branches: one for each property.
func (in CreateVolume) differs(v *Volume) error {
	switch {
	case v.State == VolumeDeleting:
		return refused(ReasonVolumeIsDeleting, v.object(), "a volume of this name is being deleted").
			hint("wait until `weft explain volume %s` no longer finds it, or use another name", v.Name)
	case in.Size != v.Size:
		e := conflict(v.object(), "size_bytes", v.Size, in.Size)
		if in.Size > v.Size {
			return e.hint("to make it larger: `weft volume expand %s --size %v`", v.Name, in.Size)
		}
		return e.hint("a volume cannot be made smaller; use another name")
	case in.Data != v.Layout.Data || in.Parity != v.Layout.Parity:
		return conflict(v.object(), "parity", v.Layout.Group(), in.group())
	case in.Copies != v.Layout.Copies:
		return conflict(v.object(), "copies", v.Layout.Copies, in.Copies)
	case in.Stripes != 0 && in.Stripes != v.Layout.Stripes:
		return conflict(v.object(), "stripes", v.Layout.Stripes, in.Stripes)
	case in.Chunk != v.Layout.Chunk:
		return conflict(v.object(), "chunk_bytes", v.Layout.Chunk, in.Chunk)
	case in.Integrity != v.Layout.Integrity:
		return conflict(v.object(), block.PropertyIntegrity.Field, v.Layout.Integrity, in.Integrity)
	case in.Pool != v.Pool:
		return conflict(v.object(), "pool", v.Pool, in.Pool)
	case in.Thin != v.Thin:
		return conflict(v.object(), block.PropertyThin.Field, v.Thin, in.Thin)
	case in.Spread != v.Spread:
		return conflict(v.object(), "spread", v.Spread, in.Spread)
	case in.Authentication != v.Authentication:
		asked := cmp.Or(in.Authentication, block.PropertyAuthentication.Default)
		return conflict(v.object(), "authentication", v.authentication(), asked).
			hint("to change it: `weft volume set %s --authentication %s`", v.Name, asked)
	case !maps.Equal(in.Labels, v.Labels):
		return conflict(v.object(), "labels", v.Labels, in.Labels)
	}
	return nil
}

func (in CreateVolume) apply(t *tx) (view, error) {
	var from *Volume
	if in.From != "" {
		var err error
		if in, from, err = in.from(t); err != nil {
			return nil, err
		}
	}
	in, err := in.normal()
	if err != nil {
		return nil, err
	}
	if err := in.offered(); err != nil {
		return nil, err
	}
	if in.Authentication != "" {
		if err := t.needs("s", block.PropertyAuthentication.Field+" "+in.Authentication); err != nil {
			return nil, err
		}
	}
	if in.Integrity {
		if err := t.needs("s", block.PropertyIntegrity.Field); err != nil {
			return nil, err
		}
	}
	if in.Thin {
		if err := t.needsLevel(thinLevel, "volume "+string(in.Name)+": thin"); err != nil {
			return nil, err
		}
	}
	if from != nil {
		return in.clone(t, from)
	}
	return in.create(t)
}

// create applies a request that has been checked.
func (in CreateVolume) create(t *tx) (view, error) {
	if id, ok := t.s.byName.Find(string(in.Name)); ok {
		return volumeResult(id), cmp.Or(in.differs(t.s.volumes.Get(id)), t.misplaced(in, t.s.volumes.Get(id)))
	}
	pool := t.s.pools[in.Pool]
	if pool == nil {
		return nil, noPool(in.Pool)
	}
	layout, legs, err := t.s.place(pool, in)
	if err != nil {
		return nil, err
	}
	if in.Thin {
		if err := mappable(layout, in.Size); err != nil {
			return nil, err
		}
	}
	v := &Volume{
		ID: block.VolumeID{UUID: in.Seed.id(0)}, Name: in.Name, Size: in.Size, Layout: layout,
		Pool: in.Pool, Spread: in.Spread, Labels: in.Labels, Authentication: in.Authentication, Thin: in.Thin, State: VolumeCreating,
		Clean: true, Generation: 1, Legs: legs, Created: t.now.UTC(),
	}
	if t.peek(v.ID) != nil {
		return nil, invalid("seed", "volume %v exists: the seed was used before", v.ID)
	}
	t.volumes.set(v.ID, v)
	t.unsure[v.ID] = true
	t.volumeEvent(v, event.Info, event.VolumeCreating, fmt.Sprintf("%v, %v, on %s", v.Size, v.Layout, places(v.Legs)))
	return volumeResult(v.ID), nil
}

func places(legs []Leg) string {
	var nodes []string
	for _, l := range legs {
		nodes = append(nodes, string(l.Node))
	}
	slices.Sort(nodes)
	return strings.Join(slices.Compact(nodes), ", ")
}

func volumeResult(id block.VolumeID) view {
	return func(s *State) any { return s.volumeView(s.volumes.Get(id)) }
}

// settleCreating makes a volume ready when every leg is allocated and zeroed: all
// of them hold the same zeroes, so all are in sync.
func (t *tx) settleCreating(id block.VolumeID) {
	v := t.peek(id)
	if v.State != VolumeCreating || v.IsSnapshot() {
		return
	}
	for i := range v.Legs {
		if !t.s.legReady(&v.Legs[i]) {
			return
		}
	}
	v = t.volume(id)
	v.State = VolumeReady
	v.Generation++
	for i := range v.Legs {
		v.Legs[i].State = LegInSync
	}
	t.volumeEvent(v, event.Info, event.VolumeReady, "every leg is allocated and zeroed")
}

func (s *State) legReady(l *Leg) bool {
	t := s.targets[l.Node]
	return t != nil && t.legs.Get(l.ID).Ready && t.legs.Get(l.ID).Error == ""
}

// DeleteVolume frees a detached volume's legs. It succeeds if there is no such volume.
// Result: nil.
type DeleteVolume struct{ Volume string }

func (in DeleteVolume) apply(t *tx) (view, error) {
	found, err := t.s.find(in.Volume)
	if err != nil || found.State == VolumeDeleting {
		return nil, nil
	}
	if who := found.users(); who != "" {
		return nil, refused(ReasonAttached, found.object(), "attached to %s", who).
			hint("`weft detach %s` first", found.Name).with("node", who)
	}
	if c := t.s.clonesBegin(found); c != "" {
		return nil, refused(ReasonNotReady, found.object(), "volume %s, which begins as it or goes back to it, is not ready", c).
			hint("wait until `weft volume show %s` shows it ready, or delete that volume", c)
	}
	v := t.volume(found.ID)
	t.endHealing(v, "it is deleted")
	if v.IsSnapshot() {
		v.Snapshot = v.Snapshot.with(nil)
	}
	t.free(v)
	for _, id := range t.s.takings.Get(v.ID) { // or a target is told to make their legs of those it is told to remove
		t.unsure[id] = true
	}
	t.volumeEvent(v, event.Info, event.VolumeDeleting, "its legs are being freed")
	return nil, nil
}

// free has a volume's legs freed, and those that only labels list.
func (t *tx) free(v *Volume) {
	v.State, v.Restored, v.ExpandingTo, v.Restoring = VolumeDeleting, false, 0, nil
	v.DeletedAt = t.gen
	v.Generation++
	for i := range v.Legs {
		v.Legs[i].State = LegDeleting
	}
	t.freeStrays(v)
}

// settleDeleting drops the legs that their drives have freed, and then the volume.
func (t *tx) settleDeleting(id block.VolumeID) {
	v := t.peek(id)
	if v.State != VolumeDeleting {
		return
	}
	gone := func(l Leg) bool { return t.legGone(v, &l) }
	if slices.ContainsFunc(v.Legs, gone) {
		v = t.volume(id)
		v.Legs = slices.DeleteFunc(v.Legs, gone)
	}
	if len(v.Legs) > 0 {
		return
	}
	t.volumeEvent(v, event.Info, event.VolumeDeleted, "every leg is freed")
	t.volumes.drop(id)
}

// legGone reports whether a deleted leg's extents may be used by another leg. Its target must
// see the drive and not the leg, and must have acted on the deletion: before that, the leg
// may be missing only because it was not carved yet.
func (t *tx) legGone(v *Volume, l *Leg) bool {
	d := t.drives.peek(l.Drive)
	if d == nil || t.nodes.peek(l.Node) == nil {
		return true
	}
	on := t.s.targets[l.Node]
	if on == nil || on.status.Generation < max(v.DeletedAt, l.FreedAt) {
		return false
	}
	return on.lacks(l)
}

// lacks reports whether a target sees a leg's drive and nothing of the leg.
func (t *target) lacks(l *Leg) bool {
	report, seen := t.drives[l.Drive]
	return seen && report.Error == "" && !t.legs.Has(l.ID) && !t.labelled.Has(l.ID) && !t.exported.Has(l.ID)
}

// legWaitsFor says why a leg is not carved, or not freed, yet.
func (s *State) legWaitsFor(l *Leg) string {
	on, d := s.targets[l.Node], s.drives[l.Drive]
	switch {
	case on == nil || !on.status.Online:
		return fmt.Sprintf("target %s is offline", l.Node)
	case d != nil && d.State != DriveReady:
		return fmt.Sprintf("drive %s on %s is %s%s", d.Device, d.Node, strings.ToLower(string(d.State)), because(d.Reason))
	}
	if p, ok := on.problem("leg " + l.ID.String()); ok {
		return fmt.Sprintf("target %s: %s: %s", l.Node, p.Doing, p.Cause)
	}
	r, ok := on.legs.Find(l.ID)
	switch {
	case ok && r.Error != "":
		return fmt.Sprintf("target %s: %s", l.Node, r.Error)
	case l.State == LegDeleting:
		return s.freeingWaitsFor(l)
	case !r.Ready && (l.mapped() || s.goingBack(l)):
		return fmt.Sprintf("target %s has not made it yet", l.Node)
	case ok && !r.Ready:
		return fmt.Sprintf("target %s has zeroed %s", l.Node, r.Zeroed.Short())
	case !ok:
		return fmt.Sprintf("target %s has not begun to zero it", l.Node)
	}
	return ""
}

func (t *target) problem(object string) (Problem, bool) {
	for _, p := range t.status.Problems {
		if p.Object == object {
			return p, true
		}
	}
	return Problem{}, false
}

// ---- redundancy groups ----

// Each column of a volume is a redundancy group, and its legs are the members. Only the
// group decides what a column survives: no rule here counts copies.

// layout returns the layout of the requested volume with this many stripes.
func (in CreateVolume) layout(stripes int) block.Layout {
	return block.Layout{Stripes: stripes, Copies: in.Copies, Chunk: in.Chunk, Data: in.Data, Parity: in.Parity, Integrity: in.Integrity}
}

// group returns the redundancy group that each column of the requested volume will be.
func (in CreateVolume) group() block.Group { return in.layout(1).Group() }

// groupField names the request field that sets the number of members.
func groupField(g block.Group) string {
	if g.Kind == block.Code {
		return "parity"
	}
	return "copies"
}

// members returns, for each column, the members whose legs count.
func (v *Volume) members(counts func(*Leg) bool) []block.MemberSet {
	sets := make([]block.MemberSet, v.Layout.Stripes)
	for i := range v.Legs {
		if l := &v.Legs[i]; counts(l) {
			sets[l.Column] = sets[l.Column].With(l.Copy)
		}
	}
	return sets
}

// inSync returns the members of each column that are in sync by record, suspect or not.
func (v *Volume) inSync() []block.MemberSet {
	return v.members(func(l *Leg) bool { return l.State == LegInSync })
}

// trusted returns the members of each column that are known to hold every acknowledged write.
func (v *Volume) trusted() []block.MemberSet { return v.members((*Leg).trusted) }

// unreadable returns the first column that cannot be read from its good members, or -1.
func (v *Volume) unreadable(good []block.MemberSet) int {
	return slices.IndexFunc(good, func(s block.MemberSet) bool { return !v.Layout.Group().Readable(s) })
}

// dispensable reports whether a leg's column can be read from its other in-sync legs.
func (v *Volume) dispensable(l *Leg) bool {
	return v.Layout.Group().Readable(v.inSync()[l.Column].Without(l.Copy))
}

// serving returns the members of each column that can be read now.
func (s *State) serving(v *Volume) []block.MemberSet {
	return v.members(func(l *Leg) bool { return l.trusted() && s.servable(l) })
}

// sound returns the members of each column that can be read now, all of them, and take writes if hosts write to the
// volume. Those in damaged trees serve the rest, and are not among them.
func (s *State) sound(v *Volume) []block.MemberSet {
	return v.members(func(l *Leg) bool { return s.isSound(v, l) && s.servable(l) })
}

// isSound reports whether a trusted leg is, as far as is known, not in a damaged tree. One that no host writes to may
// be, if nothing of it is lost.
func (s *State) isSound(v *Volume, l *Leg) bool {
	return l.trusted() && (s.damage(l).Damage == "" || v.unwritten() && s.isKnown(l))
}

// isKnown reports whether a trusted leg can be read as a whole, so that a copy of it can become complete.
func (s *State) isKnown(l *Leg) bool { return l.trusted() && s.damage(l).Unknown == 0 }

// known returns the members of each column of which a copy can be made now.
func (s *State) known(v *Volume) []block.MemberSet {
	return v.members(func(l *Leg) bool { return s.isKnown(l) && s.servable(l) })
}

// onlySound reports whether a leg is sound, may come back, and is what is left of its column besides those that are
// given up, and those in damaged trees. Writes cannot go on without it, and what the others have lost can be read from it alone.
func (s *State) onlySound(v *Volume, l *Leg, without map[block.LegID]bool) bool {
	if !s.isSound(v, l) || s.gone(l) || !s.damagedIn(v, l.Column) {
		return false
	}
	left := v.members(func(o *Leg) bool { return o.ID != l.ID && !without[o.ID] && s.isSound(v, o) })
	return !v.Layout.Group().Readable(left[l.Column])
}

// unmapped reports whether a target that is online says that it has not mapped a leg in a tree yet. It does not know
// then whether the tree is damaged. A leg that it cannot serve, or has not reported, is not meant.
func (s *State) unmapped(l *Leg) bool {
	if l.tree().IsZero() || !s.targetOnline(l.Node) {
		return false
	}
	r := s.targets[l.Node].legs.Get(l.ID)
	return r.Leg == l.ID && !r.Ready && r.Error == ""
}

// unsureOf returns a leg for which another one, which is sound and may come back, would be given up before it is known
// whether it is in a damaged tree: those that stay besides it are in such trees, or not mapped either. Nil: none.
func (s *State) unsureOf(v *Volume, l *Leg, without map[block.LegID]bool) (unsure *Leg) {
	if !s.isSound(v, l) || s.gone(l) || s.unmapped(l) {
		return nil
	}
	left := v.members(func(o *Leg) bool {
		stays := o.ID != l.ID && !without[o.ID] && s.isSound(v, o)
		if stays && o.Column == l.Column && s.unmapped(o) {
			unsure = v.leg(o.ID)
			return false
		}
		return stays
	})
	if v.Layout.Group().Readable(left[l.Column]) {
		return nil
	}
	return unsure
}

// damagedIn reports whether a column has a trusted leg that is not sound.
func (s *State) damagedIn(v *Volume, column int) bool {
	return slices.ContainsFunc(v.column(column), func(l *Leg) bool { return l.trusted() && !s.isSound(v, l) })
}

// gone reports whether a leg cannot be served and is not waited for: its node is confirmed dead, or its drive is
// being evicted and the leg is known to be lost. A target that is away may come back, also with a drive that is evicted.
func (s *State) gone(l *Leg) bool {
	n, d := s.nodes[l.Node], s.drives[l.Drive]
	return (n == nil || d == nil || n.ConfirmedDead || d.Leaving == LeaveEvict && s.isLost(l)) && !s.servable(l)
}

// isLost reports whether a leg is known to be lost where it is, as far as Weft can tell: its drive is missing or
// failed, its node is confirmed dead, or its target is there and cannot serve it.
func (s *State) isLost(l *Leg) bool {
	n, d := s.nodes[l.Node], s.drives[l.Drive]
	return n == nil || d == nil || n.ConfirmedDead || d.State == DriveMissing || d.State == DriveFailed || s.targetOnline(l.Node) && s.legError(l) != ""
}

// conditions say how much redundancy each column has now. Legs in damaged trees are none, but serve a column that has
// nothing else: it is not lost.
func (s *State) conditions(v *Volume) (all []block.Condition) {
	g, serving := v.Layout.Group(), s.serving(v)
	for c, good := range s.sound(v) {
		switch {
		case g.Readable(good) || !g.Readable(serving[c]):
			all = append(all, g.ConditionOf(good))
		default:
			all = append(all, block.Critical)
		}
	}
	return all
}

// explainRedundancy says what each column of a code can still lose. For a mirror, the facts
// of the legs say that already.
func (s *State) explainRedundancy(e *Explanation, v *Volume) {
	g := v.Layout.Group()
	if g.Kind == block.Mirror {
		return
	}
	for c, good := range s.serving(v) {
		n := good.Len()
		fact := fmt.Sprintf("column %d is %v: %d of its %d members can be read and %d are needed", c, g.ConditionOf(good), n, g.Members, g.Needs)
		if n >= g.Needs {
			fact += fmt.Sprintf(", so it survives the loss of %d more", n-g.Needs)
		}
		e.Facts = append(e.Facts, fact)
	}
}

// needs begins a sentence: "2 copies need".
func needs(g block.Group) string {
	if g.Members == 1 {
		return g.String() + " needs"
	}
	return g.String() + " need"
}

// needed says how many legs in sync a column needs: "an in-sync leg".
func needed(g block.Group) string {
	if g.Needs == 1 {
		return "an in-sync leg"
	}
	return fmt.Sprintf("%d in-sync legs", g.Needs)
}

// tooFew says that a column has fewer: "no in-sync leg".
func tooFew(g block.Group) string {
	if g.Needs == 1 {
		return "no in-sync leg"
	}
	return fmt.Sprintf("fewer than %d in-sync legs", g.Needs)
}

// ---- changing ----

// UpdateVolume changes the properties that may change while a volume is in use.
// Result: Volume.
type UpdateVolume struct {
	Volume       string
	SetLabels    map[string]string
	RemoveLabels []string
	Formatted    string // empty: unchanged; NotFormatted: erase the record
	Copies       int    // 0: unchanged
	// ScrubEvery and ScrubRate are those of Volume; nil: unchanged.
	ScrubEvery *time.Duration
	ScrubRate  *block.Size
	// RebuildRate is that of Volume; nil: unchanged.
	RebuildRate *block.Size
	// Authentication is that of Volume, its default by name; empty: unchanged.
	Authentication string
	// Paths is that of Volume, 1 to MostPaths; 0: unchanged. LateWrites accepts what Volume.Paths says of more than
	// one.
	Paths      int
	LateWrites bool
}

// The labels of drives keep Volume.Formatted and Volume.Authentication there.
const (
	formattedLabel      = labelset.Own + "formatted"
	authenticationLabel = labelset.Own + "authentication"
)

// mostFormatted is the longest Volume.Formatted, in bytes.
const mostFormatted = 64

// checkLabels refuses labels, or a selector of labels, that no object may have.
func checkLabels(field string, labels map[string]string) error {
	if why := labelset.Check(labels); why != "" {
		return invalid(field, "%s", why)
	}
	return nil
}

// checkVolumeLabels also refuses keys that have another meaning among a volume's labels.
func checkVolumeLabels(field string, labels map[string]string) error {
	if why := labelset.CheckVolume(labels); why != "" {
		return invalid(field, "%s", why)
	}
	return nil
}

// Formatting is the prefix of Volume.Formatted while a file system is being made:
// "formatting ext4". A caller that finds it and an empty device may continue.
const Formatting = "formatting "

// Raw is Volume.Formatted of a volume that was attached for arbitrary writes: it is never
// treated as empty. NotFormatted erases the record.
const (
	Raw          = "raw"
	NotFormatted = "none"
)

func (in UpdateVolume) apply(t *tx) (view, error) {
	v, err := t.s.find(in.Volume)
	if err != nil {
		return nil, err
	}
	if err := checkVolumeLabels("set_labels", in.SetLabels); err != nil {
		return nil, err
	}
	if in.Formatted != "" {
		if err := v.mayBecome(in.Formatted); err != nil {
			return nil, err
		}
	}
	if in.Copies != 0 {
		if err := t.setCopies(v, in.Copies); err != nil {
			return nil, err
		}
		v = t.peek(v.ID)
	}
	labels := in.change(v.Labels)
	// A volume with too many labels may lose some, but not get more.
	if why := labelset.Excess(labels); why != "" && len(in.SetLabels) > 0 {
		return nil, invalid("set_labels", "%s would have %s", v.object(), why)
	}
	if !maps.Equal(labels, v.Labels) {
		next := v.clone()
		next.Labels = labels
		if d := t.s.lacksRoom(v, next); d != nil {
			return nil, t.s.labelFull(v, d, "set_labels")
		}
		t.volume(v.ID).Labels = labels
		keys := slices.Sorted(maps.Keys(in.SetLabels))
		t.volumeEvent(v, event.Info, event.VolumeUpdated, fmt.Sprintf("labels set: %s; removed: %s",
			some8(keys), some8(in.RemoveLabels)))
	}
	if in.Formatted != "" && in.Formatted != cmp.Or(v.Formatted, NotFormatted) {
		fresh := t.volume(v.ID)
		fresh.Formatted = in.Formatted
		if in.Formatted == NotFormatted {
			fresh.Formatted = ""
		}
		t.volumeEvent(v, event.Info, event.VolumeFormatted, in.Formatted)
	}
	err = cmp.Or(t.setAuthentication(t.peek(v.ID), in.Authentication), t.setPaths(t.peek(v.ID), in.Paths, in.LateWrites), t.schedule(t.peek(v.ID), in.ScrubEvery, in.ScrubRate))
	if err != nil {
		return nil, err
	}
	return volumeResult(v.ID), t.setRebuildRate(t.peek(v.ID), in.RebuildRate)
}

func (t *tx) setAuthentication(v *Volume, word string) error {
	if word == "" {
		return nil
	}
	recorded, err := checkAuthentication(word)
	if err != nil || recorded == v.Authentication {
		return err
	}
	if err := t.needs("s", block.PropertyAuthentication.Field+" "+word); err != nil {
		return err
	}
	t.volume(v.ID).Authentication = recorded
	t.volumeEvent(v, event.Info, event.VolumeUpdated, fmt.Sprintf("authentication: %s, from the next grant on", word))
	return nil
}

// change returns the labels after the update.
func (in UpdateVolume) change(labels map[string]string) map[string]string {
	labels = maps.Clone(labels)
	for _, key := range in.RemoveLabels {
		delete(labels, key)
		if key == labelset.Every {
			clear(labels)
		}
	}
	if labels == nil && len(in.SetLabels) > 0 {
		labels = map[string]string{}
	}
	maps.Copy(labels, in.SetLabels)
	return labels
}

// mayBecome refuses an update that would forget a file system, made or being made. A Raw
// volume may be recorded as having one, once it was found; but a file system is made on it
// only after the record was erased.
func (v *Volume) mayBecome(formatted string) error {
	fs := strings.TrimPrefix(v.Formatted, Formatting)
	switch {
	case len(formatted) > mostFormatted || strings.TrimSpace(formatted) != formatted:
		return invalid("formatted", "%q is not the name of a file system", formatted)
	case v.sealed() && unmade(formatted):
		return v.neverChanges()
	case formatted == NotFormatted && v.users() != "":
		return refused(ReasonAttached, v.object(), "attached to %s, which may write it", v.users()).
			hint("`weft detach %s` first", v.Name)
	case formatted == NotFormatted:
		return nil
	case v.Formatted == "" || v.Formatted == formatted:
		return nil
	case v.Formatted == Raw && !strings.HasPrefix(formatted, Formatting): // a file system was found on it
		return nil
	case v.Formatted != fs && (formatted == fs || formatted == Raw): // the file system was made, or will not be made
		return nil
	}
	return conflict(v.object(), "formatted", v.Formatted, formatted)
}

// unmade reports whether a record says that a volume has no file system yet.
func unmade(formatted string) bool {
	return formatted == NotFormatted || strings.HasPrefix(formatted, Formatting)
}

// orRaw returns the record after writes that it does not cover. A recorded file system
// stays: none is made over it either.
func orRaw(formatted string) string {
	if formatted == "" || strings.HasPrefix(formatted, Formatting) {
		return Raw
	}
	return formatted
}

func some8(words []string) string {
	if len(words) == 0 {
		return "none"
	}
	return some(words, 8)
}

// kept are the labels that drives keep: none if they are too many.
func (v *Volume) kept() map[string]string {
	if labelset.Excess(v.Labels) != "" {
		return nil
	}
	return v.Labels
}

// onDrives are the volume's labels, Formatted, Authentication and Sealed as drive labels keep them.
func (v *Volume) onDrives() map[string]string {
	labels := maps.Clone(v.kept())
	own := map[string]string{formattedLabel: v.Formatted, authenticationLabel: v.Authentication}
	if v.sealed() {
		own[sealedLabel] = v.Sealed.Format(time.RFC3339)
	}
	for key, value := range own {
		if value == "" {
			continue
		}
		if labels == nil {
			labels = map[string]string{}
		}
		labels[key] = value
	}
	return labels
}

// fromDrives is the inverse of onDrives. For Sealed, see sealedBy.
func fromDrives(onDrives map[string]string) (labels map[string]string, formatted, authentication string) {
	labels = maps.Clone(onDrives)
	formatted, authentication = labels[formattedLabel], labels[authenticationLabel]
	delete(labels, formattedLabel)
	delete(labels, authenticationLabel)
	delete(labels, sealedLabel)
	if word, err := checkAuthentication(authentication); err == nil {
		return labels, formatted, word
	}
	return labels, formatted, block.AuthenticationRequire // of a later version: the strictest that is known
}

// ---- several paths ----

// A host reaches a leg through one portal at a time. If that falls silent, the target ends the old connection and
// drains it before the host goes on through another one. With several at a time Linux sends a write again by
// itself, at once, while the first may still be under way in the network or in a drive: it may be carried out over a
// newer one of the same blocks that was acknowledged meanwhile (TestScenarioLateWrite shows it). In turn, one
// connection gets the bandwidth of several networks.

// MostPaths is through how many portals at a time a host may reach a leg. With more, two could fail at once.
const MostPaths = 2

// pathsLevel is the level from which on records hold Volume.Paths.
const pathsLevel block.Level = 12

// pathsOf is how many paths a grant for a host has. The target of a host that can use one alone ends the old path when
// that moves, which it does not if it may have several.
func (s *State) pathsOf(v *Volume, n *Node) int {
	if on := s.initiators[n.Name]; n.Stock || on == nil || !on.status.SeveralPaths {
		return 0
	}
	return v.Paths
}

// setPaths changes through how many portals at a time hosts reach a volume's legs; 0 leaves it.
func (t *tx) setPaths(v *Volume, n int, lateWrites bool) error {
	switch {
	case n == 0 || n == max(1, v.Paths):
		return nil
	case n < 0 || n > MostPaths:
		return invalid("paths", "%d: must be 1 to %d", n, MostPaths)
	case n > 1 && !lateWrites && !v.unwritten():
		return invalid("paths", "%s can be written: with %d paths at a time, a write that was sent on a path that then failed may replace a newer one that was acknowledged on another path", v.object(), n).
			hint("accept that with --accept-late-writes, or leave one path at a time")
	}
	if err := t.needsLevel(pathsLevel, "several paths at a time"); err != nil {
		return err
	}
	text := fmt.Sprintf("hosts on the kernel path reach each leg through %d portals at a time from the next attach on", n)
	if n == 1 {
		text, n = "hosts reach each leg through one portal at a time from the next attach on", 0
	}
	t.volume(v.ID).Paths = n
	t.volumeEvent(v, event.Info, event.VolumeUpdated, text)
	return nil
}

// explainPaths says which portals hosts prefer, which hosts use several paths, and what changes when they attach the
// volume the next time.
func (s *State) explainPaths(e *Explanation, v *Volume) {
	others := len(v.grants()) == 0 && v.Paths > 1
	for _, a := range v.grants() {
		if a.Prefers != (Preference{}) {
			e.Facts = append(e.Facts, fmt.Sprintf("host %s prefers %v for it", a.Node, a.Prefers))
		}
		others = others || a.Paths != s.pathsOf(v, s.nodes[a.Node])
		if a.Paths <= 1 {
			continue
		}
		text := fmt.Sprintf("host %s reaches each leg through up to %d portals at a time", a.Node, a.Paths)
		if a.Mode != AttachSharedReadOnly && !v.unwritten() {
			text += ": if one fails, a write may be carried out late, over a newer one"
		}
		e.Facts = append(e.Facts, text)
	}
	if others {
		e.Facts = append(e.Facts, fmt.Sprintf("from the next attach on, hosts on the kernel path reach each leg through up to %d portals at a time", max(1, v.Paths)))
	}
}

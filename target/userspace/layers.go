// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/mapped"
)

// A leg's record is on the label before the leg is in its tree, and until it is out of it again. So
// nothing in a tree is without an owner, and each step is repeated until the label says that it is done:
//
//	label: record ──► tree: Create, Freeze or Clone ──► label: prepared
//	label: no record ◄── tree: Delete ◄──
//
// A leg goes back to a snapshot in the same way:
//
//	label: not prepared, new revision ──► tree: Restore ──► label: prepared
//
// A based leg is recorded as going back in place of not prepared: its extents count as prepared, since its
// snapshots need them.
// A copy of a snapshot's leg that is elsewhere is filled while its record says that it is not prepared:
//
//	label: record ──► tree: Create or Clone ──► writes, flush ──► tree: Seal ──► label: prepared
//
// If it is the first of its tree, the label says before the first write that the tree is formatted.
//
// What a record that says "prepared" names was in the tree. If it is not there it is lost, and an
// empty leg must not pass for it.

// Origin is what a leg begins as; the zero value is a leg that begins as zeroes.
type Origin struct {
	Leg  block.LegID // of the same tree
	Kind pb.LegOriginKind
}

// String says what happens to the origin.
func (o Origin) String() string {
	switch o.Kind {
	case pb.LegOriginKind_LEG_ORIGIN_KIND_FREEZE:
		return "freeze of leg " + o.Leg.String()
	case pb.LegOriginKind_LEG_ORIGIN_KIND_CLONE:
		return "clone of leg " + o.Leg.String()
	case pb.LegOriginKind_LEG_ORIGIN_KIND_RESTORE:
		return "what leg " + o.Leg.String() + " holds"
	}
	return "zeroes"
}

// Prepare puts a mapped leg into its tree, or makes it larger there, and then records it. A tree that
// was never completely formatted is formatted: nothing was in it. Once the leg is recorded as prepared,
// from does not count. A based leg is there, and can only go back to a snapshot.
//
// It is for one revision of the leg's record: one that is late must not pass for the way back of a later one.
//
// Legs that wait for their turn at the same time are prepared together, and recorded in one write of the label.
func (d *Disk) Prepare(id block.LegID, revision uint64, size block.Size, from Origin) error {
	p := &preparing{on: d.Drive, id: id, revision: revision, size: size, from: from}
	q := &d.held.trees
	q.await(p)
	err := d.inTurn(func() error {
		if !p.done {
			d.prepareAll(append([]*preparing{p}, q.waiting(p)...))
		}
		return p.err
	})
	q.done(p)
	if err != nil {
		return fmt.Errorf("prepare leg %v: %w", id, err)
	}
	return nil
}

// preparing is a leg that is to be prepared.
type preparing struct {
	on       *drive.Drive // whose label it is planned from
	id       block.LegID
	revision uint64
	size     block.Size
	from     Origin

	// The caller of these has the turn.
	done bool
	err  error
}

// await notes a leg that waits for a turn in which it is prepared.
func (t *trees) await(p *preparing) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.prepare = append(t.prepare, p)
}

// waiting are the legs other than p that wait, and that are planned from a label that is read after this.
func (t *trees) waiting(p *preparing) []*preparing {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(t.prepare), func(o *preparing) bool { return o == p || o.on != p.on || o.done })
}

// done ends the wait of a leg.
func (t *trees) done(p *preparing) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.prepare = slices.DeleteFunc(t.prepare, func(o *preparing) bool { return o == p })
}

// prepareAll prepares the first of these legs, and one leg of each other tree. Another leg of the same tree waits: how it
// is prepared depends on what is recorded of the one before. The caller has the turn.
func (d *Disk) prepareAll(all []*preparing) {
	label, err := certain(d.Drive)
	if err != nil {
		all[0].end(err)
		return
	}
	var ready []*preparing
	trees := map[string]bool{}
	for _, p := range all {
		leg := label.Leg(p.id)
		if leg == nil || !drive.InTree(leg) {
			p.end(fs.ErrNotExist)
			continue
		}
		if name := leg.GetTreeId(); !trees[name] {
			trees[name] = true
			if err := d.held.prepare(label, leg, p.id, p.size, p.from); err != nil {
				p.end(err)
			} else {
				ready = append(ready, p)
			}
		}
	}
	if d.record(ready...) == nil || len(ready) == 1 {
		return
	}
	for _, p := range ready { // what cannot be recorded of one is not in the way of the others
		d.record(p) //nolint:errcheck // it is told
	}
}

// record notes on the label that legs are prepared.
func (d *Disk) record(all ...*preparing) error {
	err := d.Drive.Update(func(l *drive.Label) error {
		for _, p := range all {
			if err := l.Prepared(p.id, p.revision, p.size); err != nil {
				return err
			}
		}
		return nil
	})
	for _, p := range all {
		p.end(err)
	}
	return err
}

func (p *preparing) end(err error) { p.done, p.err = true, err }

func (h *held) prepare(label *drive.Label, leg *pb.LegLabel, id block.LegID, size block.Size, from Origin) error {
	if !label.Tree(leg.GetTreeId()).GetFormatted() {
		if from != (Origin{}) {
			return fmt.Errorf("%v, of a tree in which nothing is: %w", from, mapped.ErrUnknown)
		}
		return h.format(label, leg.GetTreeId(), id, size)
	}
	if of := label.Leg(from.Leg); of != nil && drive.Based(of) && from.Kind == pb.LegOriginKind_LEG_ORIGIN_KIND_FREEZE && !leg.GetZeroed() {
		if open := h.trees.get(leg.GetTreeId()); open == nil || open.legs[from.Leg] == nil {
			return fmt.Errorf("%v: hosts do not use it through its tree yet", from)
		}
	}
	return h.within(leg.GetTreeId(), func(t *openTree) error {
		switch {
		case drive.Based(leg) && (drive.Ready(leg) || from == Origin{}): // it grows when it is opened
			return nil
		case drive.Ready(leg):
			return reach(t.Tree, id, size)
		}
		if err := begin(t.Tree, id, size, from); err != nil {
			return err
		}
		if t.Reclaimable() { // what a leg held that went back to a snapshot
			h.reclaim(leg.GetTreeId(), t)
		}
		return nil
	})
}

// Copy makes a leg a copy of a snapshot's leg that is elsewhere. The leg is recorded and not prepared. In
// its tree it begins as base, a snapshot, or as zeroes if base is zero; fill writes the rest to it, and room
// is how many more bytes it could take now. Then the leg never changes again, and is recorded as prepared.
// What an earlier attempt has copied does not count. If there is no space for all of it, it gives back what
// it took.
func (d *Disk) Copy(id block.LegID, revision uint64, size block.Size, base block.LegID, fill func(to block.Device, room func() block.Size) error) error {
	to, err := d.beginCopy(id, size, base)
	if err != nil {
		return fmt.Errorf("copy to leg %v: %w", id, err)
	}
	if to != nil {
		err = to.fill(func() error { return fill(to, to.room) })
		to.awaits(false)
		err = errors.Join(err, to.Close())
	}
	if errors.Is(err, block.ErrFull) {
		err = errors.Join(err, d.inTurn(func() error { return d.held.undo(to.name, id) }))
	}
	if err != nil {
		return fmt.Errorf("copy to leg %v: %w", id, err)
	}
	return d.inTurn(func() error {
		label, err := certain(d.Drive)
		if err != nil {
			return fmt.Errorf("seal leg %v: %w", id, err)
		}
		leg := label.Leg(id)
		if leg == nil {
			return fmt.Errorf("seal leg %v: %w", id, fs.ErrNotExist)
		}
		if err := d.held.within(leg.GetTreeId(), func(t *openTree) error { return t.Seal(id.UUID) }); err != nil {
			return fmt.Errorf("seal leg %v: %w", id, err)
		}
		return d.Drive.Update(func(l *drive.Label) error { return l.Prepared(id, revision, size) })
	})
}

// beginCopy makes the leg in its tree, and opens it. It returns nil if the leg is a snapshot there already:
// an earlier attempt was cut off before the label was written.
func (d *Disk) beginCopy(id block.LegID, size block.Size, base block.LegID) (to *mappedLeg, err error) {
	err = d.inTurn(func() error {
		label, err := certain(d.Drive)
		if err != nil {
			return err
		}
		leg := label.Leg(id)
		if leg == nil || !drive.Mapped(leg) {
			return fs.ErrNotExist
		}
		name := leg.GetTreeId()
		if err := d.root(label, name, id, size, base); err != nil {
			return err
		}
		t, err := d.held.openTree(name)
		if err != nil {
			return err
		}
		l, there := t.Layer(id.UUID)
		if leg.GetZeroed() || there && l.State == mapped.StateFrozen {
			return d.held.closeTree(name)
		}
		opened, err := t.startCopy(id, size, base)
		if err != nil {
			return errors.Join(err, d.held.closeTree(name))
		}
		if t.Reclaimable() { // what an earlier attempt has copied
			d.held.reclaim(name, t)
		}
		to = &mappedLeg{Leg: opened.leg, id: id, tree: t, name: name, held: d.held}
		return nil
	})
	return to, err
}

// root makes the tree of a leg that is the first in it. Nothing else is, as long as the label does not say
// that it is formatted.
func (d *Disk) root(label *drive.Label, name string, id block.LegID, size block.Size, base block.LegID) error {
	switch {
	case label.Tree(name).GetFormatted():
		return nil
	case !base.IsZero():
		return fmt.Errorf("leg %v, of a tree in which nothing is: %w", base, mapped.ErrUnknown)
	}
	if err := d.held.format(label, name, id, size); err != nil {
		return err
	}
	return d.Drive.Update(func(l *drive.Label) error { return l.FormattedTree(name) })
}

// room is how much is free in the leg's tree. While that is less than FlattenSpare, the tree is said to wait
// for more of the drive's reserve, of which it gets what is not left to hosts.
func (m *mappedLeg) room() block.Size {
	free, err := m.tree.Room(FlattenSpare)
	if err != nil {
		return FlattenSpare // the next write says so
	}
	m.awaits(free < FlattenSpare)
	return free
}

// awaits notes whether a copy to the leg waits for space.
func (m *mappedLeg) awaits(space bool) {
	switch {
	case space && !m.waits:
		m.tree.copiesWait.Add(1)
	case !space && m.waits:
		m.tree.copiesWait.Add(-1)
	}
	m.waits = space
}

// startCopy makes a leg in its tree anew, and opens it. An earlier attempt may have begun as something else.
func (t *openTree) startCopy(id block.LegID, size block.Size, base block.LegID) (*openLeg, error) {
	if err := t.Delete(id.UUID); err != nil {
		return nil, err
	}
	from := Origin{}
	if !base.IsZero() {
		from = Origin{Leg: base, Kind: pb.LegOriginKind_LEG_ORIGIN_KIND_CLONE}
	}
	if err := begin(t.Tree, id, size, from); err != nil {
		return nil, err
	}
	return t.openLeg(id, size)
}

// fill has a leg written, and makes that durable.
func (m *mappedLeg) fill(write func() error) error {
	before := m.Losses()
	if err := write(); err != nil {
		return err
	}
	if err := block.Flush(m.Leg); err != nil {
		return err
	}
	if m.Losses() != before {
		return errors.New("the drive may have lost a part of it")
	}
	return nil
}

// undo deletes what was copied to a leg.
func (h *held) undo(name string, id block.LegID) error {
	return h.within(name, func(t *openTree) error {
		if err := t.Delete(id.UUID); err != nil {
			return err
		}
		h.reclaim(name, t)
		return nil
	})
}

// format makes a tree, with its first leg.
func (h *held) format(label *drive.Label, name string, id block.LegID, size block.Size) error {
	device, err := h.drives.Device(h.number)
	if err != nil {
		return err
	}
	defer device.Close() //nolint:errcheck // the disk is open, so this is not its last user
	place, err := h.place(label, name, device)
	if err != nil {
		return err
	}
	tree, err := mapped.Format(place, id.UUID, size, nil)
	if err != nil {
		return err
	}
	tree.Close()
	return nil
}

// within does something with a tree that may be open. The caller has the turn.
func (h *held) within(name string, do func(*openTree) error) error {
	t, err := h.openTree(name)
	if err != nil {
		return err
	}
	return errors.Join(do(t), h.closeTree(name))
}

// begin makes a leg in its tree. If it is there, an earlier attempt was cut off before the label was
// written.
func begin(t *mapped.Tree, id block.LegID, size block.Size, from Origin) error {
	if from.Kind == pb.LegOriginKind_LEG_ORIGIN_KIND_RESTORE {
		return restore(t, id, size, from)
	}
	frozen := from.Kind == pb.LegOriginKind_LEG_ORIGIN_KIND_FREEZE
	if l, there := t.Layer(id.UUID); there {
		if frozen != (l.State == mapped.StateFrozen) {
			return fmt.Errorf("%v: it is there: %w: %v", from, mapped.ErrState, l.State)
		}
		return reach(t, id, size)
	}
	switch {
	case from == Origin{}:
		return t.Create(id.UUID, size, nil)
	case frozen:
		l, there := t.Layer(from.Leg.UUID)
		if there && l.Size < size { // the host would find less than it is told
			return fmt.Errorf("%v of %v, as %v: %w", from, l.Size, size, block.ErrRange)
		}
		return t.Freeze(from.Leg.UUID, id.UUID, nil)
	case from.Kind == pb.LegOriginKind_LEG_ORIGIN_KIND_CLONE:
		// The snapshot may be larger here than its volume: its leg had grown already, in an expansion that
		// was not complete and that a manager whose store was lost does not know.
		if l, there := t.Layer(from.Leg.UUID); there {
			size = max(size, l.Size)
		}
		return t.Clone(from.Leg.UUID, id.UUID, size, nil)
	}
	return fmt.Errorf("origin of kind %d: %w", from.Kind, block.ErrUnsupported)
}

// restore makes a leg again of a snapshot. Nobody has written to it since an earlier attempt that was cut
// off before the label was written, since its label says that it is not prepared.
func restore(t *mapped.Tree, id block.LegID, size block.Size, from Origin) error {
	if err := t.Restore(id.UUID, from.Leg.UUID); err != nil {
		return err
	}
	return t.Grow(id.UUID, size)
}

// reach makes a leg that is in its tree at least as large as size. A snapshot is, or never will be.
func reach(t *mapped.Tree, id block.LegID, size block.Size) error {
	l, there := t.Layer(id.UUID)
	if !there || l.State != mapped.StateFrozen {
		return t.Grow(id.UUID, size)
	}
	if l.Size < size {
		return fmt.Errorf("snapshot %v of %v cannot have %v: %w", id, l.Size, size, block.ErrRange)
	}
	return nil
}

// FreeLeg removes a leg from its tree and then from the label, and the tree with its last leg. The leg
// must not be in use. Its space comes free in the background. One under the tree of others is removed when none of
// them needs what is in its extents; until then it fails: drive.ErrNeeded if that depends on them.
func (d *Disk) FreeLeg(id block.LegID) error {
	return d.inTurn(func() error {
		label, err := certain(d.Drive)
		if err != nil {
			return fmt.Errorf("free leg %v: %w", id, err)
		}
		if leg := label.Leg(id); leg != nil && leg.GetTreeId() != "" {
			if err := d.held.cut(label, leg, id); err != nil {
				return fmt.Errorf("free leg %v: %w", id, err)
			}
		}
		return d.Drive.RemoveLeg(id)
	})
}

// cut takes a leg out of its tree, durably.
func (h *held) cut(label *drive.Label, leg *pb.LegLabel, id block.LegID) error {
	name := leg.GetTreeId()
	if label.Alone(leg) {
		return h.fell(label, name)
	}
	if drive.Based(leg) {
		return h.leaveBase(name, id)
	}
	if !label.Tree(name).GetFormatted() {
		return nil // nothing is in it
	}
	err := h.within(name, func(t *openTree) error {
		if err := t.Delete(id.UUID); err != nil {
			return err
		}
		h.reclaim(name, t)
		return nil
	})
	if errors.Is(err, mapped.ErrDamaged) {
		return nil // nobody can open it any more; it goes with its last leg
	}
	return err
}

// leaveBase takes a leg out of a tree over its extents in which others stay, and lets the label forget it. Whoever
// makes others over the leg, a snapshot or a clone, takes the same turn.
func (h *held) leaveBase(name string, id block.LegID) error {
	return h.within(name, func(t *openTree) error {
		needed, err := t.LeaveBase(id.UUID)
		switch {
		case err != nil:
			return err
		case needed:
			return drive.ErrNeeded
		case t.Damage() != nil: // it gives nothing back
			return t.Damage()
		case len(t.Base()) > 0:
			h.reclaim(name, t)
			return errors.New("what was deleted in its tree is being given back")
		}
		return h.label.Load().Update(func(l *drive.Label) error { return l.RemoveBase(id) })
	})
}

// fell makes the extents of a tree nobody's, while the label still keeps them from others.
func (h *held) fell(label *drive.Label, name string) error {
	if has, err := h.kernelHas(name); has || err != nil {
		return errors.Join(err, errors.New("the kernel has legs of its tree"))
	}
	if open := h.trees.get(name); open != nil {
		if len(open.legs) > 0 {
			return errors.New("its tree is open")
		}
		if err := h.shut(name, open); err != nil {
			return err
		}
	}
	device, err := h.drives.Device(h.number)
	if err != nil {
		return err
	}
	defer device.Close() //nolint:errcheck // the disk is open, so this is not its last user
	place, err := h.place(label, name, device)
	if err != nil {
		return err
	}
	return mapped.Wipe(place)
}

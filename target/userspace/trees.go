// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/mapped"
)

// mappedRow names the target of a table that is a leg in a tree: "mapped" and the drive's number, the
// tree and the leg.
const mappedRow = "mapped"

// MappedTable maps the first size bytes of a leg in a tree.
func MappedTable(n block.DeviceNumber, tree string, leg block.LegID, size block.Size) dm.Table {
	return dm.Table{{Length: size, Target: dm.Other{Name: mappedRow, Params: fmt.Sprintf("%v %s %v", n, tree, leg)}}}
}

// ThroughTree reports whether a table is that of a leg in a tree.
func ThroughTree(t dm.Table) bool {
	_, _, _, ok := parseMapped(t)
	return ok
}

// TreeOf returns the drive and the tree through which a table reaches a leg; ok is false if it is none.
func TreeOf(t dm.Table) (n block.DeviceNumber, tree string, ok bool) {
	n, tree, _, ok = parseMapped(t)
	return n, tree, ok
}

// parseMapped is the inverse of MappedTable; ok is false for another table.
func parseMapped(t dm.Table) (n block.DeviceNumber, tree string, leg block.LegID, ok bool) {
	if len(t) != 1 || t[0].Target.Type() != mappedRow {
		return n, "", leg, false
	}
	fields := strings.Fields(t[0].Target.String())
	if len(fields) != 3 {
		return n, "", leg, false
	}
	n, plain := dm.Ref(fields[0]).Number()
	leg, err := block.ParseLegID(fields[2])
	return n, fields[1], leg, plain && err == nil
}

// trees are a drive's trees that are open. A change of the label that concerns a tree, and opening
// one, take turns: what a tree has is always what the label says, or less.
type trees struct {
	turn chan struct{}

	mu      sync.Mutex
	open    map[string]*openTree
	prepare []*preparing // legs that wait for their turn
}

type openTree struct {
	*mapped.Tree
	device Device // keeps the drive open
	legs   map[block.LegID]*openLeg
	// reclaiming is set while space is given back, and again if more has come to be given back since.
	reclaiming, again bool

	busy       atomic.Bool  // reclaiming
	users      atomic.Int32 // open legs
	settle     block.LegID  // that is to be copied to its own extents, at this rate; zero: none
	settleRate block.Size
	unsettled  atomic.Pointer[string] // why the last Settle failed; nil: it did not

	unreclaimed atomic.Pointer[string] // why space could not be given back; nil: it could
	// pause is for how long, and retry what has, space tried for again; used while reclaiming.
	pause time.Duration
	retry *time.Timer

	flattening map[block.VolumeID]*flattening // guarded by trees.mu

	hungry atomic.Pointer[time.Time] // since when writes have found no space; nil: there is some
	// copiesWait is how many copies of legs of snapshots wait for space.
	copiesWait atomic.Int32
	count      count
	// told is what Trees said of the space last, and when.
	told   mapped.Space
	toldOf map[block.UUID]block.Size
	toldAt time.Time
}

type openLeg struct {
	leg   *mapped.Leg
	users int
}

// TreeSeen is what can be seen of an open tree.
type TreeSeen struct {
	Free, Empty, Pending block.Size // as in mapped.Space, now
	Used                 block.Size // as of some seconds ago
	// UsedBy is each leg's own space, as of then: it must not be changed.
	UsedBy map[block.UUID]block.Size
	// Counted is each leg's space as it was counted last, some minutes ago; nil: not yet. It must not be changed.
	Counted map[block.UUID]mapped.Usage
	Full    bool // writes wait for space
	// Settling is how far the leg is that has the tree to itself; Busy: work goes on in the background.
	Settling mapped.Settling
	Busy     bool
	// Unsettled is why the leg could not be copied to its own extents; empty: it could, or was not tried.
	Unsettled string
	// Unreclaimed is why the space of what was deleted could not be given back; empty: it could.
	Unreclaimed string
	// Layers are those of the tree, which must not be changed, and Flattening the volumes whose legs are being
	// made independent of others.
	Layers     []mapped.Layer
	Flattening map[block.VolumeID]Flattening
	CopyWaits  bool   // a copy of a snapshot's leg waits for more space than is left to those who write
	Idle       bool   // nobody writes to it, or copies: it is open for the kernel's legs, or for work in the background
	Err        string // why it has stopped
	// Damage says which of its records are lost, so that it is only read; empty: none. Unknown is how much of
	// each leg may have been in them: it must not be changed.
	Damage  string
	Unknown map[block.UUID]block.Size
}

// usedEvery is how often the used space is looked at anew, since it changes all the time.
const usedEvery = 5 * time.Second

// Trees says how the open trees are. It does not wait for the drive.
func (d *Disk) Trees() map[string]TreeSeen {
	all, due := d.held.trees.seen(time.Now())
	d.held.count(due)
	return all
}

// seen is Trees, and which of them are to be counted now.
func (t *trees) seen(now time.Time) (all map[string]TreeSeen, due []*openTree) {
	t.mu.Lock()
	defer t.mu.Unlock()
	all = map[string]TreeSeen{}
	for id, o := range t.open {
		space := o.Space()
		if space.Free > 0 {
			o.hungry.Store(nil)
		}
		if now.Sub(o.toldAt) >= usedEvery {
			o.told, o.toldOf, o.toldAt = space, o.Tree.Used(), now
			if o.count.due(now, o.Tree) {
				o.count.running, due = true, append(due, o)
			}
		}
		seen := TreeSeen{Free: space.Free, Empty: space.Empty, Pending: space.Pending, Used: o.told.Total - o.told.Free, UsedBy: o.toldOf, Counted: o.count.of, Full: o.hungry.Load() != nil}
		seen.Settling, seen.Busy = o.Tree.Settling(block.UUID{}), o.busy.Load()
		seen.Layers, seen.Flattening = o.Kin(), o.flatteningNow()
		seen.CopyWaits, seen.Idle = o.copiesWait.Load() > 0, o.users.Load() == 0
		if why := o.unsettled.Load(); why != nil {
			seen.Unsettled = *why
		}
		if why := o.unreclaimed.Load(); why != nil {
			seen.Unreclaimed = *why
		}
		if err := o.Err(); err != nil {
			seen.Err = err.Error()
		}
		if damage := o.Damage(); damage != nil {
			seen.Damage, seen.Unknown = damage.Error(), damage.Unknown
		}
		all[id] = seen
	}
	return all, due
}

func (t *trees) get(id string) *openTree {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.open[id]
}

// place is where a tree is, by the label.
func (h *held) place(l *drive.Label, id string, device block.Device) (mapped.Place, error) {
	t := l.Tree(id)
	if t == nil {
		return mapped.Place{}, fmt.Errorf("tree %s of drive %v: %w", id, l.Drive, fs.ErrNotExist)
	}
	tree, err := block.ParseUUID(id)
	p := mapped.Place{
		Device: device, First: drive.FirstExtent, Tree: tree, Drive: l.Drive.UUID, Extents: drive.ExtentNumbers(t.GetExtents()),
		Losses: h.file.Losses,
	}
	for _, leg := range l.Legs {
		if leg.GetTreeId() == id && drive.Based(leg) {
			p.Base = baseOf(leg)
		}
	}
	return p, err
}

// certain returns the label as it is on the drive. After an error of the drive it may be another one
// than was read last, and have other extents for a tree.
func certain(d *drive.Drive) (*drive.Label, error) {
	if err := d.Update(func(*drive.Label) error { return nil }); err != nil {
		return nil, err
	}
	return d.Label(), nil
}

// GrowTree gives a tree up to n extents of the drive's reserve.
func (d *Disk) GrowTree(id string, n int) error {
	return d.inTurn(func() error {
		if err := d.Drive.Update(func(l *drive.Label) error { return l.GrowTree(id, n) }); err != nil {
			return err
		}
		open := d.held.trees.get(id)
		if open == nil {
			return nil // it takes them when it is opened
		}
		return open.AddExtents(drive.ExtentNumbers(d.Label().Tree(id).GetExtents()))
	})
}

// ShrinkTree returns a tree's extents that hold nothing to the reserve, as long as keep stays free.
func (d *Disk) ShrinkTree(id string, keep block.Size) error {
	return d.inTurn(func() error {
		if open := d.held.trees.get(id); open != nil {
			return open.shrink(d.Drive, id, keep)
		}
		return nil
	})
}

// shrink is ShrinkTree. The caller has the turn.
func (t *openTree) shrink(d *drive.Drive, id string, keep block.Size) error {
	has, err := t.GiveBack(keep)
	if err != nil {
		return err
	}
	return d.Update(func(l *drive.Label) error {
		return l.ShrinkTree(id, func(e uint32) bool { return slices.Contains(has, e) })
	})
}

// inTurn does something that concerns trees.
func (d *Disk) inTurn(do func() error) error {
	return d.locked(func() error {
		d.held.trees.turn <- struct{}{}
		defer func() { <-d.held.trees.turn }()
		return do()
	})
}

// leg opens a leg of a tree, and the tree if it is not open.
func (d *Drives) leg(n block.DeviceNumber, id string, leg block.LegID, size block.Size) (_ Device, retErr error) {
	device, err := d.Device(n)
	if err != nil {
		return nil, err
	}
	h := device.(*lent).held
	defer func() { retErr = errors.Join(retErr, device.Close()) }() // the tree has its own
	h.trees.turn <- struct{}{}
	defer func() { <-h.trees.turn }()
	tree, err := h.openTree(id)
	if err != nil {
		return nil, err
	}
	opened, err := h.openLeg(tree, leg, size)
	if err != nil {
		return nil, errors.Join(err, h.closeTree(id))
	}
	return &mappedLeg{Leg: opened.leg, id: leg, tree: tree, name: id, held: h}, nil
}

func (h *held) openTree(id string) (*openTree, error) {
	if open := h.trees.get(id); open != nil {
		err := open.Err()
		switch {
		case err == nil && h.drives.rows != nil && h.drives.rows.unsure():
			return open, h.keepPins(id, open)
		case err == nil:
			return open, nil
		case len(open.legs) > 0 || open.reclaiming:
			return nil, fmt.Errorf("other legs have not left it yet: %w", err)
		}
		if err := h.shut(id, open); err != nil { // it was kept for legs in the kernel
			return nil, err
		}
	}
	return h.openFresh(id)
}

// openFresh opens a tree that is not open.
func (h *held) openFresh(id string) (*openTree, error) {
	opened := h.label.Load()
	if opened == nil {
		return nil, fmt.Errorf("tree %s: its drive's label: %w", id, fs.ErrClosed)
	}
	label, err := certain(opened)
	if err != nil {
		return nil, err
	}
	if !label.Tree(id).GetFormatted() {
		return nil, fmt.Errorf("tree %s: %w", id, mapped.ErrUnfinished)
	}
	device, err := h.drives.Device(h.number)
	if err != nil {
		return nil, err
	}
	place, err := h.place(label, id, device)
	if err != nil {
		return nil, errors.Join(err, device.Close())
	}
	tree, err := mapped.Open(place)
	if err != nil {
		return nil, errors.Join(err, device.Close())
	}
	o := &openTree{Tree: tree, device: device, legs: map[block.LegID]*openLeg{}}
	if err := h.keepPins(id, o); err != nil { // before anything is given back
		tree.Close()
		return nil, errors.Join(err, device.Close())
	}
	if tree.Damage() == nil && tree.Space().Free == 0 {
		o.fullSince() // its writers did not stop waiting when the last process ended
	}
	h.trees.mu.Lock()
	defer h.trees.mu.Unlock()
	if h.trees.open == nil {
		h.trees.open = map[string]*openTree{}
	}
	h.trees.open[id] = o
	if tree.Reclaimable() { // the last process did not come to its end
		h.reclaim(id, o)
	}
	return o, nil
}

// openLeg opens a leg of a tree. The base grows first, as far as the label says that it has; but a damaged tree is
// not written to. The caller has the turn.
func (h *held) openLeg(t *openTree, id block.LegID, size block.Size) (*openLeg, error) {
	if opened := h.label.Load(); opened != nil {
		switch leg := opened.Label().Leg(id); {
		case leg != nil && drive.Based(leg):
			if err := t.GrowBase(baseOf(leg)); err != nil && t.Damage() == nil {
				return nil, err
			}
		case leg != nil && !drive.Mapped(leg): // the order is older than the label: what it grew by would not be in the base
			return nil, fmt.Errorf("leg %v is plain: %w", id, mapped.ErrState)
		}
	}
	return t.openLeg(id, size)
}

// openLeg opens a leg, or counts one more user of it. The caller has the turn.
func (t *openTree) openLeg(id block.LegID, size block.Size) (*openLeg, error) {
	if err := reach(t.Tree, id, size); err != nil && !t.short(id) {
		return nil, err
	}
	if l := t.legs[id]; l != nil {
		l.leg.Extend(size)
		l.users++
		return l, nil
	}
	leg, err := t.Leg(id.UUID)
	if err != nil {
		return nil, err
	}
	leg.Extend(size)
	l := &openLeg{leg: leg, users: 1}
	t.legs[id] = l
	t.users.Add(1)
	return l, nil
}

// short reports whether a leg is in a damaged tree and may be smaller there than its label says: it was to grow when
// it was opened. A snapshot never grows.
func (t *openTree) short(id block.LegID) bool {
	l, there := t.Layer(id.UUID)
	return t.Damage() != nil && there && l.State == mapped.StateOpen
}

// closeTree closes a tree that nothing uses. The caller has the turn.
func (h *held) closeTree(id string) error {
	o := h.trees.get(id)
	if o == nil || len(o.legs) > 0 || o.reclaiming || len(o.Pinned()) > 0 && !h.drives.ends() {
		return nil
	}
	return h.shut(id, o)
}

// shut closes a tree that no leg uses; its reclaiming ends. The caller has the turn.
func (h *held) shut(id string, o *openTree) error {
	h.trees.mu.Lock()
	for _, f := range o.flattening {
		f.cancel()
	}
	h.trees.mu.Unlock()
	o.Tree.Close()
	h.trees.mu.Lock()
	delete(h.trees.open, id)
	h.trees.mu.Unlock()
	return o.device.Close()
}

// mappedLeg is a leg of a tree as a table uses it.
type mappedLeg struct {
	*mapped.Leg
	id   block.LegID
	tree *openTree
	name string // of the tree
	held *held
	// waits: a copy to it waits for space. Only that copy uses it.
	waits bool
}

// Losses are the drive's.
func (m *mappedLeg) Losses() uint64 { return m.tree.device.Losses() }

// Close waits for the turn, so it may take as long as opening a tree of the drive.
func (m *mappedLeg) Close() error {
	m.held.trees.turn <- struct{}{}
	defer func() { <-m.held.trees.turn }()
	l := m.tree.legs[m.id]
	if l.users--; l.users > 0 {
		return nil
	}
	l.leg.Close()
	delete(m.tree.legs, m.id)
	m.tree.users.Add(-1)
	return m.held.closeTree(m.name)
}

// fullSince is since when writes to the tree find no space: now, unless one has found none before. It is
// forgotten when a look at the tree finds some.
func (o *openTree) fullSince() time.Time {
	if since := o.hungry.Load(); since != nil {
		return *since
	}
	now := time.Now()
	o.hungry.CompareAndSwap(nil, &now)
	return now
}

// fullFor is how long a write waits here for space. If there is none by then, its host is told, and
// repeats the write.
const fullFor = 500 * time.Millisecond

// wait sends an IO that found no space again when there may be some. It reports false if the IO has
// another error, or has waited for long enough since the time that it keeps in since; else it calls
// ended if there is no space in time. Then the error says for how long there has been none.
func (m *mappedLeg) wait(io *block.IO, since *time.Time, ended func(*block.IO)) bool {
	var full *mapped.FullError
	if !errors.As(io.Err, &full) {
		return false
	}
	if since.IsZero() {
		*since = time.Now()
	}
	left := m.held.drives.fullFor - time.Since(*since)
	began := m.tree.fullSince()
	late := func() { io.Err = &block.FullError{For: time.Since(began), Err: io.Err} }
	if m.held.drives.hungry != nil {
		m.held.drives.hungry()
	}
	if left <= 0 { // others got what was freed
		late()
		return false
	}
	go func() {
		timer := time.NewTimer(left)
		defer timer.Stop()
		select {
		case <-full.Freed():
			io.Err = nil
			m.Leg.Submit(io)
		case <-timer.C:
			late()
			ended(io)
		case <-m.held.drives.ending: // the next process is waiting
			late()
			ended(io)
		}
	}()
	return true
}

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
	"weft.dev/weft/proto/pb"
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

	mu   sync.Mutex
	open map[string]*openTree
}

type openTree struct {
	*mapped.Tree
	device Device // keeps the drive open
	legs   map[block.LegID]*openLeg

	hungry atomic.Bool // a write has found no space
	// told is what Trees said of the space last, and when.
	told   mapped.Space
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
	Full                 bool       // writes wait for space
	Err                  string     // why it has stopped
}

// usedEvery is how often the used space is looked at anew, since it changes all the time.
const usedEvery = 5 * time.Second

// Trees says how the open trees are. It does not wait for the drive.
func (d *Disk) Trees() map[string]TreeSeen {
	t := &d.held.trees
	t.mu.Lock()
	defer t.mu.Unlock()
	all := map[string]TreeSeen{}
	for id, o := range t.open {
		space := o.Space()
		if space.Free > 0 {
			o.hungry.Store(false)
		}
		if now := time.Now(); now.Sub(o.toldAt) >= usedEvery {
			o.told, o.toldAt = space, now
		}
		seen := TreeSeen{Free: space.Free, Empty: space.Empty, Pending: space.Pending, Used: o.told.Total - o.told.Free, Full: o.hungry.Load()}
		if err := o.Err(); err != nil {
			seen.Err = err.Error()
		}
		all[id] = seen
	}
	return all
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
	return mapped.Place{
		Device: device, First: drive.FirstExtent, Tree: tree, Drive: l.Drive.UUID, Extents: drive.ExtentNumbers(t.GetExtents()),
	}, err
}

// certain returns the label as it is on the drive. After an error of the drive it may be another one
// than was read last, and have other extents for a tree.
func certain(d *drive.Drive) (*drive.Label, error) {
	if err := d.Update(func(*drive.Label) error { return nil }); err != nil {
		return nil, err
	}
	return d.Label(), nil
}

// Prepare puts a mapped leg into its tree, or makes it larger there, and then records it. A tree that
// was never completely formatted is formatted: nothing was in it.
func (d *Disk) Prepare(id block.LegID, size block.Size) error {
	return d.inTurn(func() error {
		label, err := certain(d.Drive)
		if err != nil {
			return fmt.Errorf("prepare leg %v: %w", id, err)
		}
		leg := label.Leg(id)
		if leg == nil || !drive.Mapped(leg) {
			return fmt.Errorf("prepare leg %v: %w", id, fs.ErrNotExist)
		}
		if err := d.prepare(label, leg, id, size); err != nil {
			return fmt.Errorf("prepare leg %v: %w", id, err)
		}
		return d.Drive.Update(func(l *drive.Label) error { return l.Prepared(id, size) })
	})
}

func (d *Disk) prepare(label *drive.Label, leg *pb.LegLabel, id block.LegID, size block.Size) error {
	if open := d.held.trees.get(leg.GetTreeId()); open != nil {
		return put(open.Tree, id, size)
	}
	device, err := d.held.drives.Device(d.held.number)
	if err != nil {
		return err
	}
	defer device.Close() //nolint:errcheck // the disk is open, so this is not its last user
	place, err := d.held.place(label, leg.GetTreeId(), device)
	if err != nil {
		return err
	}
	var tree *mapped.Tree
	if label.Tree(leg.GetTreeId()).GetFormatted() {
		tree, err = mapped.Open(place)
	} else {
		tree, err = mapped.Format(place, id.UUID, size, nil)
	}
	if err != nil {
		return err
	}
	defer tree.Close()
	return put(tree, id, size)
}

// put makes a leg in an open tree, or makes it larger.
func put(t *mapped.Tree, id block.LegID, size block.Size) error {
	if err := t.Create(id.UUID, size, nil); !errors.Is(err, mapped.ErrExists) {
		return err
	}
	return t.Grow(id.UUID, size)
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
		open := d.held.trees.get(id)
		if open == nil {
			return nil
		}
		has, err := open.GiveBack(keep)
		if err != nil {
			return err
		}
		return d.Drive.Update(func(l *drive.Label) error {
			return l.ShrinkTree(id, func(e uint32) bool { return slices.Contains(has, e) })
		})
	})
}

// FreeLeg removes a leg from the label, and its tree with its last leg. The tree must not be open.
func (d *Disk) FreeLeg(id block.LegID) error {
	return d.inTurn(func() error {
		label, err := certain(d.Drive)
		if err != nil {
			return fmt.Errorf("free leg %v: %w", id, err)
		}
		if leg := label.Leg(id); leg != nil && drive.Mapped(leg) {
			if open := d.held.trees.get(leg.GetTreeId()); open != nil {
				return fmt.Errorf("free leg %v: its tree is open", id)
			}
			if label.Alone(leg) {
				if err := d.wipe(label, leg.GetTreeId()); err != nil {
					return fmt.Errorf("free leg %v: %w", id, err)
				}
			}
		}
		return d.Drive.RemoveLeg(id)
	})
}

// wipe makes the extents of a tree nobody's, while the label still keeps them from others.
func (d *Disk) wipe(label *drive.Label, tree string) error {
	device, err := d.held.drives.Device(d.held.number)
	if err != nil {
		return err
	}
	defer device.Close() //nolint:errcheck // the disk is open, so this is not its last user
	place, err := d.held.place(label, tree, device)
	if err != nil {
		return err
	}
	return mapped.Wipe(place)
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
	opened, err := tree.openLeg(leg, size)
	if err != nil {
		return nil, errors.Join(err, h.closeTree(id))
	}
	return &mappedLeg{Leg: opened.leg, id: leg, tree: tree, name: id, held: h}, nil
}

func (h *held) openTree(id string) (*openTree, error) {
	if open := h.trees.get(id); open != nil {
		if err := open.Err(); err != nil {
			return nil, fmt.Errorf("other legs have not left it yet: %w", err)
		}
		return open, nil
	}
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
	o.hungry.Store(tree.Space().Free == 0) // its writers did not stop waiting when the last process ended
	h.trees.mu.Lock()
	defer h.trees.mu.Unlock()
	if h.trees.open == nil {
		h.trees.open = map[string]*openTree{}
	}
	h.trees.open[id] = o
	return o, nil
}

// openLeg opens a leg, or counts one more user of it. The caller has the turn.
func (t *openTree) openLeg(id block.LegID, size block.Size) (*openLeg, error) {
	if err := t.Grow(id.UUID, size); err != nil {
		return nil, err
	}
	if l := t.legs[id]; l != nil {
		l.users++
		return l, nil
	}
	leg, err := t.Leg(id.UUID)
	if err != nil {
		return nil, err
	}
	l := &openLeg{leg: leg, users: 1}
	t.legs[id] = l
	return l, nil
}

// closeTree closes a tree that no leg uses. The caller has the turn.
func (h *held) closeTree(id string) error {
	o := h.trees.get(id)
	if o == nil || len(o.legs) > 0 {
		return nil
	}
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
}

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
	return m.held.closeTree(m.name)
}

// fullFor is how long a write waits here for space. If there is none by then, its host is told, and
// repeats the write.
const fullFor = 500 * time.Millisecond

// wait sends an IO that found no space again when there may be some. It reports false if the IO has
// another error, or has waited for long enough since the time that it keeps in since; else it calls
// ended if there is no space in time.
func (m *mappedLeg) wait(io *block.IO, since *time.Time, ended func(*block.IO)) bool {
	var full *mapped.FullError
	if !errors.As(io.Err, &full) {
		return false
	}
	if since.IsZero() {
		*since = time.Now()
	}
	left := m.held.drives.fullFor - time.Since(*since)
	m.tree.hungry.Store(true)
	if m.held.drives.hungry != nil {
		m.held.drives.hungry()
	}
	if left <= 0 {
		return false // others got what was freed
	}
	go func() {
		timer := time.NewTimer(left)
		defer timer.Stop()
		select {
		case <-full.Freed():
			io.Err = nil
			m.Leg.Submit(io)
		case <-timer.C:
			ended(io)
		case <-m.held.drives.ending: // the next process is waiting
			ended(io)
		}
	}()
	return true
}

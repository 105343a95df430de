// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/raid/dm/mirror"
)

// This file translates between the planner's copies of a column and the kernel's tables of
// devices. It does no I/O.

// columnSeen is one column as it is in the kernel.
type columnSeen struct {
	mirror.Observed
	name    string
	devices []dm.State // complete or not
	failed  bool       // it fails all I/O
	foreign string     // why its tables cannot be interpreted
	logs
	health        map[dm.Ref]dm.Health
	inSync, total uint64 // regions

	at [block.MaxSlots]dm.Ref // by copy: its device in the tables; empty if none
}

// logs are the logs of a column: the one in use, or to be used, and the one that is written while
// that is in use.
type logs struct{ log, spare logDevice }

// logDevice is a log in RAM.
type logDevice struct {
	device dm.Ref // empty: it is not there
	file   string // under it
}

// file returns the file under one of the log devices.
func (l logs) file(device dm.Ref) string {
	if device == l.spare.device {
		return l.spare.file
	}
	return l.log.file
}

func (c columnSeen) copying() bool {
	return (c.Kind == mirror.ShapeEqualizing || c.Kind == mirror.ShapeRebuilding) && c.inSync < c.total
}

// ill reports whether a leg in sync has an error.
func (c columnSeen) ill() bool {
	return slices.ContainsFunc(c.Sources, func(d dm.Ref) bool { return c.health[d] != 0 && c.health[d] != dm.Alive })
}

func (c columnSeen) has(d dm.Ref) bool {
	return d != "" && (slices.Contains(c.Sources, d) || c.Kind == mirror.ShapeRebuilding && c.Back == d)
}

// tracks reports whether the log of c may record what a copy misses.
func (c columnSeen) tracks(copy int) bool {
	return (c.Kind == mirror.ShapeTracked || c.Kind == mirror.ShapeRebuilding) && c.Copy == copy
}

func (c columnSeen) left() block.Size { return block.Size(c.total-c.inSync) * c.Region }

// slot is one copy of a column as the tables last had it. A slot whose leg has left the tables
// shows which leg the column's log covers. A leg that lacks more than the log has, since that has
// begun clean, has none.
type slot struct {
	Leg    block.LegID `json:"leg"`
	Device dm.Ref      `json:"device"`
	NQN    block.NQN   `json:"nqn"`
	NSID   uint32      `json:"nsid"`
	UUID   block.UUID  `json:"uuid"`
	Dirty  block.Size  `json:"dirty,omitempty"` // bytes to copy when its rebuild began, or its log began anew
	Whole  uint64      `json:"whole,omitempty"` // as in volume.CopySeen
	What   string      `json:"what,omitempty"`  // what its rebuild copies, for people

	Begun uint64 `json:"begun,omitempty"` // the leg's revision when its log began anew last
	More  bool   `json:"-"`               // it is lost, and lacks more than the log in use has: see kernelbehind.go
}

// superseded reports whether the manager has since replaced the identity of the slot's leg.
func (s slot) superseded(l *volume.Link) bool {
	return l != nil && s.Leg == l.Leg && !s.UUID.IsZero() && s.UUID != l.UUID
}

// same reports whether two slots have the same leg in the same way.
func (s slot) same(o slot) bool {
	o.Dirty, o.Whole, o.What, o.Begun = s.Dirty, s.Whole, s.What, s.Begun
	return s == o
}

// logged reports whether the log in use has all writes that the slot's leg has missed.
func (s slot) logged() bool { return !s.Leg.IsZero() && !s.More }

const slotFormat = "%d.%d"

func slotKey(column, copy int) string { return fmt.Sprintf(slotFormat, column, copy) }

// memory is what the agent knows of a volume but cannot find out by looking. The exported part
// is kept in the run directory; without it, every resync is a full one.
type memory struct {
	volume.Memory
	Slots map[string]slot `json:"slots"` // by slotKey
	// Behind are those that lack more than the log in use has. Agents of earlier versions do not read them.
	Behind map[string]slot `json:"behind,omitempty"`
}

func newMemory(m volume.Memory, now time.Time) *memory {
	m.Begin(now)
	return &memory{Memory: m, Slots: map[string]slot{}, Behind: map[string]slot{}}
}

func (m *memory) slot(column, copy int) slot {
	if s, ok := m.Behind[slotKey(column, copy)]; ok {
		s.More = true
		return s
	}
	return m.Slots[slotKey(column, copy)]
}

func (m *memory) setSlot(column, copy int, s slot) {
	m.forget(column, copy)
	if s.More {
		m.Behind[slotKey(column, copy)] = s
		return
	}
	m.Slots[slotKey(column, copy)] = s
}

func (m *memory) forget(column, copy int) {
	delete(m.Slots, slotKey(column, copy))
	delete(m.Behind, slotKey(column, copy))
}

// describe translates the columns for the planner.
func (k *kernelKeeper) describe(w *volume.Wanted, s *seen) {
	for i := range s.columns {
		c := &s.columns[i]
		seen := volume.ColumnSeen{
			Exists: len(c.devices) > 0, Built: c.Kind != mirror.ShapeNothing, Failed: c.failed, Foreign: c.foreign, Log: c.log.device != "",
			Size: c.Size, Sources: len(c.Sources),
			Equalizing: c.Kind == mirror.ShapeEqualizing, Left: c.left(),
		}
		if w != nil {
			if err := c.MayGrow(w.Layout.LegSize(w.Size)); err != nil {
				seen.CannotGrow = err.Error()
			}
		}
		for copy := range block.MaxSlots {
			seen.Copies = append(seen.Copies, k.describeCopy(s, i, copy))
		}
		known := func(d dm.Ref) bool { return d == "" || slices.Contains(c.at[:], d) }
		seen.Unknown = !known(c.Back) || slices.ContainsFunc(c.Sources, func(d dm.Ref) bool { return !known(d) })
		seen.Differs = func(want volume.Column) (bool, error) {
			steps, slots, err := k.stepsTo(w, s, i, want, false, nil)
			return len(steps) > 0 || !k.memory.has(i, slots), err
		}
		s.Columns = append(s.Columns, seen)
		if c.copying() {
			total := block.Size(c.total) * c.Region
			if c.Kind == mirror.ShapeRebuilding {
				total = max(k.memory.slot(i, c.Copy).Dirty, c.left())
				copied := &s.Columns[i].Copies[c.Copy]
				copied.Done, copied.Total = total-c.left(), total
			}
			s.Total += total
			s.Done += total - c.left()
		}
		if h := k.lists.ahead[i]; h.under(c) {
			copied := &s.Columns[i].Copies[h.copy]
			copied.Done, copied.Total, copied.Speed = h.Progress()
			copied.Ahead, copied.What = true, h.what
			s.Total, s.Done = s.Total+copied.Total, s.Done+copied.Done
		}
	}
}

// describeCopy finds a copy in the tables by the last device noted for it, or by its present
// device if none was noted.
func (k *kernelKeeper) describeCopy(s *seen, column, copy int) volume.CopySeen {
	c, slot, l := &s.columns[column], k.memory.slot(column, copy), k.link(column, copy)
	// The kernel does not tell what is still in flight, or what a cache held: assume the worst.
	seen := volume.CopySeen{
		Leg: slot.Leg, Subsystem: slot.NQN, Tracked: c.tracks(copy), Dirty: slot.Dirty, Whole: slot.Whole, What: slot.What,
		Busy: true, Unflushed: true, Reborn: c.Kind != mirror.ShapeNothing && k.reborn(s, l, c),
	}
	seen.Awaits = k.lists.awaits[column].of(l, s.Now)
	leg, device, nqn := slot.Leg, slot.Device, slot.NQN
	if l != nil && (!c.has(device) || c.has(s.legs[l.Leg].device)) {
		leg, device, nqn = l.Leg, s.legs[l.Leg].device, l.NQN
	}
	if !c.has(device) {
		return seen
	}
	c.at[copy] = device
	seen.Leg, seen.Subsystem = leg, nqn
	if l != nil && l.Leg == leg {
		seen.Node = l.Node
	}
	seen.State = c.stateOf(device)
	if h := c.health[device]; h != 0 && h != dm.Alive {
		seen.Error = fmt.Sprintf("device-mapper reports a %v", h)
	}
	seen.Superseded = slot.Device == device && slot.superseded(l)
	if now := s.legs[leg].device; now != "" && now != device {
		seen.Moved = fmt.Sprintf("its device %s is gone", device)
	}
	return seen
}

// stateOf is the state of a copy that takes part in I/O through device.
func (c columnSeen) stateOf(device dm.Ref) volume.CopyState {
	switch {
	case slices.Contains(c.Sources, device):
		return volume.InSync
	case c.total > 0 && c.inSync >= c.total:
		return volume.CaughtUp
	}
	return volume.Rebuilding
}

// link is the leg wanted in a place, or the one wanted last if the wanted state is not known.
func (k *kernelKeeper) link(column, copy int) *volume.Link {
	w := volume.Wanted{Links: k.links}
	return w.At(column, copy)
}

// reborn reports whether a leg has lost its cache since it entered the tables. If so, the
// tables use it under an older identity; if none was noted, under another device than its
// present one.
func (k *kernelKeeper) reborn(s *seen, l *volume.Link, c *columnSeen) bool {
	if l == nil || l.Reborn == 0 || l.Reborn != l.Revision {
		return false
	}
	slot, now := k.memory.slot(l.Column, l.Copy), s.legs[l.Leg].device
	if slot.Leg == l.Leg && c.has(slot.Device) {
		return slot.UUID != l.UUID
	}
	return now != "" && !c.has(now)
}

// stepsTo returns the table changes that bring a column to what is wanted, and its copies
// afterwards. With retry the column stays as it is, and the errors of its legs are cleared. begin is how a copy begins.
func (k *kernelKeeper) stepsTo(w *volume.Wanted, s *seen, column int, want volume.Column, retry bool, begin *copyBegin) ([]mirror.Step, []slot, error) {
	c := s.columns[column]
	t, slots := k.columnOf(w, s, column, want)
	begin.apply(&t, slots)
	if retry {
		return mirror.Refresh(c.devices, t), slots, nil
	}
	steps, err := mirror.Plan(c.devices, t)
	return steps, slots, err
}

// columnOf returns a wanted column for the tables, and what to remember of its copies.
func (k *kernelKeeper) columnOf(w *volume.Wanted, s *seen, column int, want volume.Column) (mirror.Column, []slot) {
	t := mirror.NewColumn(w.Volume, column, w.Layout, w.Size, s.columns[column].log.device)
	t.Size, t.Equalize, t.ReadOnly, t.First, t.Full = want.Size, want.Equalize, w.ReadOnly, want.First, want.Full
	t.Equal = t.Equalize && k.madeEqual(column)
	var slots []slot
	for copy, w := range want.Copies {
		leg, slot := k.legFor(s, column, copy, w)
		t.Legs, slots = append(t.Legs, leg), append(slots, slot)
	}
	return t, slots
}

// legFor returns a copy for the tables, and what to remember of it.
func (k *kernelKeeper) legFor(s *seen, column, copy int, want volume.Copy) (mirror.Leg, slot) {
	was, l := k.memory.slot(column, copy), k.link(column, copy)
	device := s.columns[column].at[copy]
	if want.Anew {
		device = s.legs[want.Leg].device
	}
	leg := mirror.Leg{Device: device}
	switch {
	case want.State == volume.InSync:
		leg.State = mirror.InSync
	case want.State == volume.Rebuilding:
		leg.State = mirror.Rebuilding
	case want.Track:
		leg.State, leg.Device = mirror.Tracked, cmp.Or(device, was.Device)
		if l != nil && l.Leg != was.Leg {
			was = slot{} // another leg has its place
		}
		return leg, was
	default:
		return mirror.Leg{}, slot{}
	}
	if l == nil || l.Leg != want.Leg {
		return leg, was
	}
	now := slot{Leg: l.Leg, Device: device, NQN: l.NQN, NSID: l.NSID, UUID: l.UUID}
	if want.State == volume.Rebuilding {
		now.Dirty = want.Dirty
		if was.Leg == l.Leg {
			now.Whole, now.What = was.Whole, was.What
		}
	}
	return leg, now
}

// set remembers the copies of a column that was changed. If a leg has joined with what it lacked, copied is how much is
// copied to it.
func (m *memory) set(column int, slots []slot, begin *copyBegin, copied block.Size) {
	for copy, slot := range slots {
		if begin != nil && begin.copy == copy && begin.lacked != nil {
			slot.Dirty = begin.before + copied
		}
		m.setSlot(column, copy, slot)
	}
}

// has reports whether the slots of a column are remembered. They are not if an agent stopped
// between a step and its note; a later loss would then be blamed on the leg that had the slot
// before.
func (m *memory) has(column int, slots []slot) bool {
	for copy, s := range slots {
		if !m.slot(column, copy).same(s) {
			return false
		}
	}
	return true
}

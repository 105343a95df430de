// SPDX-License-Identifier: Apache-2.0

package dm

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Device describes a wanted mapped device. A stack of them is a slice, the lowest first.
type Device struct {
	Name, UUID string
	Table      Table
	Udev       Udev // zero means UdevInner
	// ReadOnly: the devices below are opened for reading only, and the device cannot be
	// opened for writing. Diff does not compare it.
	ReadOnly bool
	// Count: the kernel counts the device's I/O, if it can; see Client.Counted. It counts only for
	// devices that are created so. Diff does not compare it.
	Count bool
}

// State is the observed state of a mapped device.
type State struct {
	Info
	// Table is the live table. In the result of [Client.Devices], tables refer to other
	// devices of that result by name, as in a Device.
	Table Table
}

// Device returns the wanted device that matches s.
func (s State) Device() Device {
	return Device{Name: s.Name, UUID: s.UUID, Table: s.Table, ReadOnly: s.ReadOnly}
}

// Op is the kind of a Step.
type Op string

// Every step may be repeated, and may be interrupted at any point: the next Diff finds the
// rest.
const (
	OpCreate Op = "create" // create, load, resume; if one fails, the device is removed again
	OpReload Op = "reload" // load, suspend without a flush, resume
	OpResize Op = "resize" // a reload that changes the size; a smaller size is refused
	OpResume Op = "resume" // the live table is right, but the device is suspended; not for mirrors
	OpClear  Op = "clear"  // the live table is right; drop the inactive one
	OpRemove Op = "remove"
)

// Step is one change to one device. It is atomic for the device's users.
type Step struct {
	Op     Op
	Device Device // OpRemove, OpClear: the name is enough
}

func (s Step) String() string {
	switch s.Op {
	case OpCreate, OpReload, OpResize:
		return fmt.Sprintf("%s %s: %s", s.Op, s.Device.Name, strings.ReplaceAll(s.Device.Table.String(), "\n", "; "))
	}
	return fmt.Sprintf("%s %s", s.Op, s.Device.Name)
}

// Diff returns the steps from the observed devices to the wanted ones: creations and
// changes in the order of want, then removals, each device before those below it. Devices
// are identified by name; a device with a wanted name and another uuid is replaced.
func Diff(got []State, want []Device) []Step {
	byName := map[string]State{}
	names := map[Ref]Ref{}
	for _, s := range got {
		byName[s.Name] = s
		names[RefTo(s.Number)] = Ref(s.Name)
	}
	named := func(t Table) string {
		return t.mapRefs(func(r Ref) Ref {
			if n, ok := names[r]; ok {
				return n
			}
			return r
		}).String()
	}
	var steps []Step
	wanted := map[string]bool{}
	for _, d := range want {
		wanted[d.Name] = true
		s, exists := byName[d.Name]
		if exists && s.UUID != d.UUID {
			steps = append(steps, Step{OpRemove, s.Device()})
			exists = false
		}
		if !exists {
			steps = append(steps, Step{OpCreate, d})
			continue
		}
		steps = append(steps, change(s, d, named(s.Table) == named(d.Table))...)
	}
	unwanted := slices.DeleteFunc(slices.Clone(got), func(s State) bool { return wanted[s.Name] })
	for _, s := range usersFirst(unwanted) {
		steps = append(steps, Step{OpRemove, s.Device()})
	}
	return steps
}

func change(s State, d Device, same bool) []Step {
	switch {
	case !s.Live:
		return []Step{{OpReload, d}}
	case !same && s.Table.Size() != d.Table.Size():
		return []Step{{OpResize, d}}
	case !same || s.Suspended && hasMirror(d.Table):
		return []Step{{OpReload, d}}
	}
	var steps []Step
	if s.Inactive { // a resume would make it live
		steps = append(steps, Step{OpClear, d})
	}
	if s.Suspended {
		steps = append(steps, Step{OpResume, d})
	}
	return steps
}

// hasMirror reports whether t has a mirror. A suspended mirror must not be resumed without
// loading its table again: with a nosync disk log, it would treat all regions as in sync
// and forget that a leg failed, but not in which regions. Writes there would go to one leg
// and be acknowledged (dm-raid1.c, disk_resume and do_writes, 6.1). A newly loaded table
// forgets all of it, and held writes are tried on all legs again.
func hasMirror(t Table) bool {
	return slices.ContainsFunc(t, func(r Row) bool { return r.Target.Type() == "mirror" })
}

// usersFirst sorts devices so that each comes before those that its table refers to.
func usersFirst(devices []State) []State {
	var sorted []State
	seen := map[string]bool{}
	var visit func(State)
	visit = func(s State) {
		if seen[s.Name] {
			return
		}
		seen[s.Name] = true
		for _, r := range s.Table.Refs() {
			for _, below := range devices {
				if r == Ref(below.Name) || r == RefTo(below.Number) {
					visit(below)
				}
			}
		}
		sorted = append(sorted, s)
	}
	for _, s := range devices {
		visit(s)
	}
	slices.Reverse(sorted)
	return sorted
}

// Devices returns all devices whose uuid begins with prefix, sorted by name.
func (c *Client) Devices(prefix string) ([]State, error) {
	list, err := c.list(prefix)
	if err != nil {
		return nil, err
	}
	var all []State
	names := map[Ref]Ref{}
	for _, l := range list {
		s, ok, err := c.state(l.Name, prefix)
		if NotFound(err) { // removed since it was listed
			continue
		}
		if err != nil {
			return nil, err
		}
		if ok {
			all = append(all, s)
			names[RefTo(s.Number)] = Ref(s.Name)
		}
	}
	for i := range all {
		all[i].Table = all[i].Table.mapRefs(func(r Ref) Ref {
			if n, ok := names[r]; ok {
				return n
			}
			return r
		})
	}
	return all, nil
}

// state returns the state of a device; ok is false if its uuid has another prefix.
func (c *Client) state(name, prefix string) (s State, ok bool, err error) {
	info, err := c.Info(name)
	if err != nil || !strings.HasPrefix(info.UUID, prefix) {
		return State{}, false, err
	}
	t, err := c.Table(name)
	return State{info, t}, true, err
}

// Do makes one change. It returns the errors of the calls that it makes. After an error,
// read the devices and call Diff again.
func (c *Client) Do(s Step) error { return c.do(s, func() error { return nil }) }

// DoWith is Do for a reload or a resize, and calls between while the device is suspended,
// after the old table and before the new one. If between fails, the old table becomes
// live again and its error is returned. If the step is repeated, between is called again.
func (c *Client) DoWith(s Step, between func() error) error {
	if s.Op != OpReload && s.Op != OpResize {
		return opError("do", s.Device.Name, fmt.Errorf("step %q does not suspend", s.Op))
	}
	return c.do(s, between)
}

// DoContext is Do, but a reload checks ctx again before the new table becomes live. The
// suspend of a reload may wait for I/O below that does not end, and only the end of that
// I/O ends the wait. If ctx has ended by then, the old table is loaded again and becomes
// live, and ctx's error is returned: the state that the step was planned on may have
// changed, and an outdated table must not become live.
func (c *Client) DoContext(ctx context.Context, s Step) error {
	if err := context.Cause(ctx); err != nil {
		return opError(string(s.Op), s.Device.Name, err)
	}
	return c.do(s, func() error { return context.Cause(ctx) })
}

// do makes a change. It calls goOn while the device is suspended, before the new table
// becomes live; an error keeps the old one.
func (c *Client) do(s Step, goOn func() error) error {
	d := s.Device
	switch s.Op {
	case OpCreate:
		return c.create(d)
	case OpReload:
		return c.reload(d, goOn)
	case OpResize:
		return c.resize(d, goOn)
	case OpResume:
		return c.Resume(d.Name, d.udev())
	case OpClear:
		return c.Clear(d.Name)
	case OpRemove:
		return c.Remove(d.Name, false)
	}
	return opError("do", d.Name, fmt.Errorf("step %q unknown", s.Op))
}

func (d Device) udev() Udev {
	if d.Udev == 0 {
		return UdevInner
	}
	return d.Udev
}

func (c *Client) create(d Device) (err error) {
	if err := d.Table.Check(); err != nil {
		return opError("create", d.Name, err)
	}
	if _, err := c.Create(d.Name, d.UUID); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			c.Remove(d.Name, false)
		}
	}()
	if err := c.load(d.Name, d.Table, d.ReadOnly); err != nil {
		return err
	}
	if d.Count {
		_ = c.count(d.Name) // Counted says whether it does
	}
	return c.Resume(d.Name, d.udev())
}

// reload always suspends without a flush and without freezing a file system: writes that
// a mirror holds are issued again through the new table, and a freeze could wait for
// exactly these writes.
func (c *Client) reload(d Device, goOn func() error) error {
	old, err := c.Table(d.Name)
	if err != nil {
		return err
	}
	if err := c.load(d.Name, d.Table, d.ReadOnly); err != nil {
		return err
	}
	if err := c.Suspend(d.Name, true, true); err != nil {
		return errors.Join(err, c.Clear(d.Name))
	}
	if err := goOn(); err != nil {
		if loadErr := c.load(d.Name, old, d.ReadOnly); loadErr != nil {
			return loadErr // stays suspended: the loaded table must not become live
		}
		return errors.Join(opError("reload", d.Name, err), c.Resume(d.Name, d.udev()))
	}
	return c.Resume(d.Name, d.udev())
}

func (c *Client) resize(d Device, goOn func() error) error {
	t, err := c.Table(d.Name)
	if err != nil {
		return err
	}
	if d.Table.Size() < t.Size() {
		return opError("resize", d.Name, fmt.Errorf("from %v to %v would cut off data", t.Size(), d.Table.Size()))
	}
	return c.reload(d, goOn)
}

// SPDX-License-Identifier: Apache-2.0

package dm

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Device is a mapped device as it is wanted. A stack of them is a slice, the
// lowest first.
type Device struct {
	Name, UUID string
	Table      Table
	Udev       Udev // zero means UdevInner
	// ReadOnly: what is below is opened for reading alone, and nobody can open the
	// device for writing. Diff does not look at it.
	ReadOnly bool
}

// State is a mapped device as it is.
type State struct {
	Info
	// Table is the live table. In what [Client.Devices] returns, the devices of
	// the result stand in one another's tables by name, as they do in a Device.
	Table Table
}

// Device is s as it could have been wanted.
func (s State) Device() Device {
	return Device{Name: s.Name, UUID: s.UUID, Table: s.Table, ReadOnly: s.ReadOnly}
}

// Op is what a Step does.
type Op string

// Every step may be repeated, and may be cut at any point: the next Diff finds
// what is left to do.
const (
	OpCreate Op = "create" // create, load, resume; what fails half way is removed again
	OpReload Op = "reload" // load, suspend without a flush, resume
	OpResize Op = "resize" // a reload that changes the size; to a smaller one it is refused
	OpResume Op = "resume" // the table is right, the device was left suspended; not for mirrors
	OpClear  Op = "clear"  // the table is right, a loaded one is dropped
	OpRemove Op = "remove"
)

// Step is one change to one device, atomic for those who use it.
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

// Diff says how to get from the devices that are to those that are wanted:
// creations and changes in the order of want, then removals, users before what
// they use. Devices are told apart by name; one with a foreign uuid under a
// wanted name is replaced.
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
	if s.Inactive { // else a resume would make it live
		steps = append(steps, Step{OpClear, d})
	}
	if s.Suspended {
		steps = append(steps, Step{OpResume, d})
	}
	return steps
}

// hasMirror: a mirror that was suspended is never resumed as it is. With a
// nosync disk log it then takes all regions for in sync and forgets that a leg
// failed, but not which regions it had failed in: writes there go to one leg and
// are acknowledged (dm-raid1.c, disk_resume and do_writes, 6.1). A table loaded
// anew forgets all of it, and what was held is tried on all legs again.
func hasMirror(t Table) bool {
	return slices.ContainsFunc(t, func(r Row) bool { return r.Target.Type() == "mirror" })
}

// usersFirst sorts devices so that each comes before those that its table names.
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

// Devices reads all devices whose uuid begins with prefix, sorted by name.
func (c *Client) Devices(prefix string) ([]State, error) {
	list, err := c.List()
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

// state reads a device; not ok if its uuid has another prefix.
func (c *Client) state(name, prefix string) (s State, ok bool, err error) {
	info, err := c.Info(name)
	if err != nil || !strings.HasPrefix(info.UUID, prefix) {
		return State{}, false, err
	}
	t, err := c.Table(name)
	return State{info, t}, true, err
}

// Do makes one change. Errors are those of the calls it is made of; after one,
// read the devices and Diff again.
func (c *Client) Do(s Step) error { return c.do(s, func() error { return nil }) }

// DoWith is Do of a reload or a resize that does something more while the device is
// suspended, between the old table and the new one. If that fails the old table
// goes on, and its error is returned. When the whole is repeated, so is it.
func (c *Client) DoWith(s Step, between func() error) error {
	if s.Op != OpReload && s.Op != OpResize {
		return opError("do", s.Device.Name, fmt.Errorf("step %q does not suspend", s.Op))
	}
	return c.do(s, between)
}

// DoContext is Do with a second thought. A reload may have to wait in its
// suspend for I/O below that does not end, and nothing ends the call but that
// I/O. If ctx has ended meanwhile, the old table is loaded again and goes on,
// and ctx's error is returned: what the step was planned on may have changed,
// and a table that has become wrong must not become live.
func (c *Client) DoContext(ctx context.Context, s Step) error {
	if err := context.Cause(ctx); err != nil {
		return opError(string(s.Op), s.Device.Name, err)
	}
	return c.do(s, func() error { return context.Cause(ctx) })
}

// do makes a change; goOn is asked before a device that is suspended for it gets
// its new table.
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
	return c.Resume(d.Name, d.udev())
}

// reload always suspends without a flush and without freezing a file system:
// writes that a mirror holds are issued again through the new table, and a
// frozen file system could wait for just these.
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
			return loadErr // left suspended: the table that is loaded must not become live
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

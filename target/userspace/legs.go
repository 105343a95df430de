// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"fmt"
	"path"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/dm"
)

// Device is a drive's device as a leg uses it; Close gives it back.
type Device interface {
	block.Device
	// Losses grows when acknowledged writes to the drive may have been lost.
	Losses() uint64
	Close() error
}

// legMajor numbers the mapped legs: the kernel's own device-mapper has another
// major number, and these are no nodes in /dev.
const legMajor = 1 << 20

// Legs is a device-mapper that knows linear tables alone, and the legs' stable
// names. Its methods may be called concurrently.
type Legs struct {
	open func(block.DeviceNumber) (Device, error)

	mu     sync.Mutex
	mapped map[string]*mapped // by name
	names  map[block.LegID]string
	minor  uint32
}

type mapped struct {
	state  dm.State
	linear *linear
}

// NewLegs is a device-mapper over the drives that open knows by their numbers.
func NewLegs(open func(block.DeviceNumber) (Device, error)) *Legs {
	return &Legs{open: open, mapped: map[string]*mapped{}, names: map[block.LegID]string{}}
}

// Devices lists what is mapped with a name that begins with prefix.
func (l *Legs) Devices(prefix string) ([]dm.State, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []dm.State
	for name, m := range l.mapped {
		if strings.HasPrefix(name, prefix) {
			out = append(out, m.state)
		}
	}
	slices.SortFunc(out, func(a, b dm.State) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}

// Do makes one change. What was mapped away waits for its I/O.
func (l *Legs) Do(s dm.Step) error {
	if err := l.do(s); err != nil {
		return fmt.Errorf("%s %s: %w", s.Op, s.Device.Name, err)
	}
	return nil
}

func (l *Legs) do(s dm.Step) error {
	switch s.Op {
	case dm.OpCreate:
		return l.create(s.Device)
	case dm.OpReload, dm.OpResize:
		return l.reload(s.Device)
	case dm.OpRemove:
		return l.remove(s.Device.Name)
	case dm.OpResume, dm.OpClear: // nothing here is ever suspended, or loaded and not live
		return nil
	}
	return unix.EOPNOTSUPP
}

func (l *Legs) create(d dm.Device) error {
	t, err := l.load(d.Table)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.mapped[d.Name] != nil {
		return errors.Join(unix.EBUSY, t.retire())
	}
	l.minor++
	info := dm.Info{Name: d.Name, UUID: d.UUID, Number: block.DeviceNumber{Major: legMajor, Minor: l.minor}, Live: true}
	l.mapped[d.Name] = &mapped{state: dm.State{Info: info, Table: d.Table}, linear: newLinear(t)}
	return nil
}

func (l *Legs) reload(d dm.Device) error {
	t, err := l.load(d.Table)
	if err != nil {
		return err
	}
	l.mu.Lock()
	m := l.mapped[d.Name]
	if m == nil {
		l.mu.Unlock()
		return errors.Join(unix.ENXIO, t.retire())
	}
	m.state.Table = d.Table
	old := m.linear.swap(t)
	l.mu.Unlock()
	return old.retire()
}

func (l *Legs) remove(name string) error {
	l.mu.Lock()
	m := l.mapped[name]
	delete(l.mapped, name)
	l.mu.Unlock()
	if m == nil {
		return unix.ENXIO
	}
	return m.linear.swap(nil).retire()
}

// load opens what a table stands on.
func (l *Legs) load(t dm.Table) (_ *table, retErr error) {
	if err := t.Check(); err != nil {
		return nil, err
	}
	out := &table{}
	for _, row := range t {
		target, ok := row.Target.(dm.Linear)
		number, plain := target.Device.Number()
		if !ok || !plain {
			return nil, fmt.Errorf("%v: only linear maps of a drive are supported here", row)
		}
		if out.below == nil {
			below, err := l.open(number)
			if err != nil {
				return nil, err
			}
			out.below, out.number = below, number
			defer func() {
				if retErr != nil {
					retErr = errors.Join(retErr, below.Close())
				}
			}()
		}
		if number != out.number {
			return nil, fmt.Errorf("%v: a leg lies on one drive", row)
		}
		out.segments = append(out.segments, segment{start: int64(row.Start), length: int64(row.Length), offset: int64(target.Offset)})
	}
	return out, out.settle(t.Size())
}

// List says where each leg's name leads.
func (l *Legs) List() (map[block.LegID]string, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := map[block.LegID]string{}
	for id, node := range l.names {
		out[id] = node
	}
	return out, nil
}

// Set makes a leg's name lead to node; with no node it goes away.
func (l *Legs) Set(id block.LegID, node string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if node == "" {
		delete(l.names, id)
		return nil
	}
	l.names[id] = node
	return nil
}

// Device is the leg that a name, as a path, leads to, for one export of it. If the
// drive loses what was acknowledged, no flush of that export succeeds any more, not
// even one by a host that wrote to another leg there; an export that is made later is
// not concerned.
func (l *Legs) Device(name string) (block.Device, error) {
	id, err := block.ParseLegID(strings.TrimSuffix(path.Base(name), ReadOnly))
	if err != nil {
		return nil, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, m := range l.mapped {
		if node := dm.NodePath(m.state.Number); node == l.names[id] {
			return &exported{m.linear, m.linear.losses()}, nil
		}
	}
	return nil, errNoDevice
}

// Close unmaps all legs.
func (l *Legs) Close() error {
	l.mu.Lock()
	all := l.mapped
	l.mapped, l.names = map[string]*mapped{}, map[block.LegID]string{}
	l.mu.Unlock()
	var errs []error
	for _, m := range all {
		errs = append(errs, m.linear.swap(nil).retire())
	}
	return errors.Join(errs...)
}

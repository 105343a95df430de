// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/figures"
	"weft.dev/weft/raid/dm"
)

// Device is a drive's device as a leg uses it; Close releases it.
type Device interface {
	block.Device
	// Losses grows when acknowledged writes to the drive may have been lost.
	Losses() uint64
	Close() error
}

// legMajor is the major number of the mapped legs. It differs from that of the kernel's own
// device-mapper, and these devices have no nodes in /dev.
const legMajor = 1 << 20

// Ours reports whether a mapped device is one of this package, and not one of the kernel.
func Ours(n block.DeviceNumber) bool { return n.Major == legMajor }

// Legs is a device-mapper with linear tables only, and the legs' stable names. Its methods may be
// called concurrently.
type Legs struct {
	open func(block.DeviceNumber) (Device, error)
	// mappedLeg opens a leg in a tree of a drive; nil: there are none.
	mappedLeg func(n block.DeviceNumber, tree string, leg block.LegID, size block.Size) (Device, error)

	mu     sync.Mutex
	mapped map[string]*mappedDevice // by name
	names  map[block.LegID]string
	minor  uint32
	closed bool
}

type mappedDevice struct {
	state  dm.State
	linear *linear
}

// NewLegs returns a device-mapper over the drives that open finds by number.
func NewLegs(open func(block.DeviceNumber) (Device, error)) *Legs {
	return &Legs{open: open, mapped: map[string]*mappedDevice{}, names: map[block.LegID]string{}}
}

// Devices lists the mapped devices whose names begin with prefix.
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

// Has reports whether a device of that name is mapped.
func (l *Legs) Has(name string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.mapped[name] != nil
}

// Do makes one change. It waits for the I/O through a replaced or removed table.
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
	case dm.OpResume, dm.OpClear: // here no device is ever suspended, and no table waits to become live
		return nil
	}
	return unix.EOPNOTSUPP
}

func (l *Legs) create(d dm.Device) error {
	t, err := l.load(d.Table, nil)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.closed: // while the drive answered: nobody would give it back any more
		return errors.Join(fs.ErrClosed, t.retire())
	case l.mapped[d.Name] != nil:
		return errors.Join(unix.EBUSY, t.retire())
	}
	l.minor++
	info := dm.Info{Name: d.Name, UUID: d.UUID, Number: block.DeviceNumber{Major: legMajor, Minor: l.minor}, Live: true}
	l.mapped[d.Name] = &mappedDevice{state: dm.State{Info: info, Table: d.Table}, linear: newLinear(t)}
	return nil
}

func (l *Legs) reload(d dm.Device) error {
	if err := l.leaveFailed(d.Name); err != nil {
		return err
	}
	before := l.tableOf(d.Name)
	if before.otherDrive(d.Table) { // two at once would spoil one another's checksums or map
		if err := l.unload(d.Name); err != nil {
			return err
		}
		before = nil
	}
	t, err := l.load(d.Table, before)
	if err != nil {
		return err
	}
	l.mu.Lock()
	m := l.mapped[d.Name]
	if m == nil {
		l.mu.Unlock()
		return errors.Join(unix.ENXIO, t.retire())
	}
	m.state.Table, m.state.Live = d.Table, true
	old := m.linear.swap(t)
	l.mu.Unlock()
	return old.retire()
}

// tableOf is the table of a mapped leg, nil if there is none.
func (l *Legs) tableOf(name string) *table {
	l.mu.Lock()
	defer l.mu.Unlock()
	if m := l.mapped[name]; m != nil {
		return m.linear.table.Load()
	}
	return nil
}

// otherDrive reports whether a leg with checksums, or one in a tree, is to be mapped on another drive
// than it is on.
func (t *table) otherDrive(next dm.Table) bool {
	if t == nil || len(next) == 0 {
		return false
	}
	if _, inTree := t.below.(*mappedLeg); inTree {
		number, _, _, ok := parseMapped(next)
		if !ok { // the leg is plain again: both reach the same bytes
			device, _, _ := placeOf(next[0].Target)
			number, _ = device.Number()
		}
		return number != t.number
	}
	_, sums := t.below.(*checked)
	device, _, _ := placeOf(next[0].Target)
	number, _ := device.Number()
	return sums && number != t.number
}

// unload takes the table from a leg; its I/O fails until it gets another one.
func (l *Legs) unload(name string) error {
	l.mu.Lock()
	m := l.mapped[name]
	l.mu.Unlock()
	if m == nil {
		return nil
	}
	return m.linear.swap(nil).retire()
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

// leaveFailed ends the use of a tree that has stopped, so that it can be opened again. I/O to the leg
// fails until then, as it did before.
func (l *Legs) leaveFailed(name string) error {
	l.mu.Lock()
	m := l.mapped[name]
	if m == nil || !m.linear.failed() {
		l.mu.Unlock()
		return nil
	}
	m.state.Live = false
	old := m.linear.swap(nil)
	l.mu.Unlock()
	return old.retire()
}

// load opens the drive under a table, which replaces another one unless that is nil.
//
// Branches: one for each kind of table, and one for each error.
func (l *Legs) load(t dm.Table, before *table) (_ *table, retErr error) {
	if err := t.Check(); err != nil {
		return nil, err
	}
	if n, tree, leg, ok := parseMapped(t); ok && l.mappedLeg != nil {
		return l.loadMapped(n, tree, leg, t.Size())
	}
	sums, err := isChecked(t)
	if err != nil {
		return nil, err
	}
	out := &table{}
	for _, row := range t {
		device, offset, ok := placeOf(row.Target)
		number, plain := device.Number()
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
					retErr = errors.Join(retErr, out.below.Close())
				}
			}()
		}
		if number != out.number {
			return nil, fmt.Errorf("%v: a leg lies on one drive", row)
		}
		out.segments = append(out.segments, segment{start: int64(row.Start), length: int64(row.Length), offset: int64(offset)})
	}
	if sums {
		var old *checked
		if before != nil && before.number == out.number {
			old, _ = before.below.(*checked)
		}
		leg, err := openChecked(t, out.below, old)
		if err != nil {
			return nil, err
		}
		out.below, out.segments = leg, []segment{{length: int64(t.Size())}}
	}
	return out, out.settle(t.Size())
}

// placeOf is where a row of a leg's table is.
func placeOf(t dm.Target) (device dm.Ref, offset block.Size, ok bool) {
	switch t := t.(type) {
	case dm.Linear:
		return t.Device, t.Offset, true
	case dm.Checked:
		return t.Device, t.Offset, true
	}
	return "", 0, false
}

func (l *Legs) loadMapped(n block.DeviceNumber, tree string, leg block.LegID, size block.Size) (*table, error) {
	below, err := l.mappedLeg(n, tree, leg, size)
	if err != nil {
		return nil, err
	}
	out := &table{below: below, number: n, segments: []segment{{length: int64(size)}}}
	if err := out.settle(size); err != nil {
		return nil, errors.Join(err, below.Close())
	}
	return out, nil
}

// Figures returns the I/O of the named legs since each was mapped.
func (l *Legs) Figures() (map[block.LegID]figures.Figures, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	of := map[string]*linear{}
	for _, m := range l.mapped {
		of[dm.NodePath(m.state.Number)] = m.linear
	}
	all := map[block.LegID]figures.Figures{}
	for id, node := range l.names {
		if leg := of[node]; leg != nil {
			all[id] = leg.meter.Figures()
		}
	}
	return all, nil
}

// List returns where each leg's name leads.
func (l *Legs) List() (map[block.LegID]string, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := map[block.LegID]string{}
	for id, node := range l.names {
		out[id] = node
	}
	return out, nil
}

// Set points a leg's name at node; an empty node removes the name.
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

// Device returns the leg to which a name, as a path, leads, for one export. If the drive loses
// acknowledged writes, no flush of that export succeeds any more, even if the lost writes belong to
// another leg; an export made later is not affected.
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

// Close unmaps all legs, side by side: it waits for each one's I/O, and for what is done to its tree.
// Drives may hang: when ctx ends, the legs that are left go on being unmapped. Legs with checksums write
// them until ctx ends. No leg is mapped after it.
func (l *Legs) Close(ctx context.Context) error {
	l.mu.Lock()
	all := l.mapped
	l.mapped, l.names, l.closed = map[string]*mappedDevice{}, map[block.LegID]string{}, true
	l.mu.Unlock()
	ends := make(chan error, len(all))
	for _, m := range all {
		go func() { ends <- m.linear.swap(nil).retireUntil(ctx) }()
	}
	var errs []error
	for left := len(all); left > 0; left-- {
		select {
		case err := <-ends:
			errs = append(errs, err)
		case <-ctx.Done():
			return errors.Join(append(errs, fmt.Errorf("%d legs are still mapped: %w", left, context.Cause(ctx)))...)
		}
	}
	return errors.Join(errs...)
}

// SPDX-License-Identifier: Apache-2.0

package mirror

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/dm"
)

// Kind is the kind of a column's shape; see the package comment.
type Kind string

const (
	ShapeNothing    Kind = "" // not built
	ShapeLinear     Kind = "linear"
	ShapeFlat       Kind = "flat"
	ShapeEqualizing Kind = "equalizing"
	ShapeTracked    Kind = "tracked"
	ShapeRebuilding Kind = "rebuilding"
)

// Shape describes the devices that a column has or should have. It has the copy number
// only of the leg that is not in sync.
type Shape struct {
	Kind    Kind
	Sources []dm.Ref // the legs in sync
	Inner   bool     // the sources are behind the inner device
	Copy    int      // tracked, rebuilding: which copy is not in sync
	Back    dm.Ref   // rebuilding: its device
}

// Shape returns the shape that c asks for.
func (c Column) Shape() Shape {
	var s Shape
	for n := range c.Legs {
		i := (c.First + n) % len(c.Legs)
		switch l := c.Legs[i]; l.State {
		case InSync:
			s.Sources = append(s.Sources, l.Device)
		case Tracked:
			s.Kind, s.Copy = ShapeTracked, i
		case Rebuilding:
			s.Kind, s.Copy, s.Back = ShapeRebuilding, i, l.Device
		}
	}
	switch many := len(s.Sources) > 1; {
	case c.Equalize && many:
		return Shape{Kind: ShapeEqualizing, Sources: s.Sources}
	case s.Kind != ShapeNothing:
		s.Inner = many
	case many:
		s.Kind = ShapeFlat
	default:
		s.Kind = ShapeLinear
	}
	return s
}

func (s Shape) equal(t Shape) bool {
	return s.Kind == t.Kind && s.Inner == t.Inner && s.Copy == t.Copy && s.Back == t.Back && slices.Equal(s.Sources, t.Sources)
}

// tracks reports whether s uses its log for the writes that a copy misses.
func (s Shape) tracks(copy int) bool {
	return (s.Kind == ShapeTracked || s.Kind == ShapeRebuilding) && s.Copy == copy
}

// Observed is a column as it is in the kernel.
type Observed struct {
	Shape
	Size, Region block.Size
	Log          dm.Ref // empty if the shape uses none
}

// Regions returns the number of bits in the column's log.
func (o Observed) Regions() uint64 { return Column{Size: o.Size, Region: o.Region}.Regions() }

// Observe finds the column with a name among the devices of its volume (see
// dm.Client.Devices). It is the inverse of Column.Devices, and understands every state
// in which an interrupted plan can leave the devices. A column in a state that Weft did
// not make is an error; the caller must not change it then.
func Observe(name string, devices []dm.State) (Observed, error) {
	o, err := observe(name, devices)
	if err != nil {
		return Observed{}, fmt.Errorf("read column %s: %w", name, err)
	}
	return o, nil
}

func observe(name string, devices []dm.State) (o Observed, err error) {
	target, size, err := only(name, devices)
	if err != nil || target == nil {
		return o, err
	}
	o.Size = size
	c := Column{Name: name}
	switch t := target.(type) {
	case dm.Linear:
		o.Kind = ShapeLinear
		o.Sources, o.Inner, err = c.sources(t.Device, devices)
		return o, err
	case dm.Mirror:
		o.Region, o.Log = t.Log.Region, t.Log.Device
		o.Shape, err = c.mirrorShape(t, devices)
		return o, err
	}
	return o, fmt.Errorf("is %s %v", target.Type(), target)
}

func (c Column) mirrorShape(m dm.Mirror, devices []dm.State) (s Shape, err error) {
	last := m.Legs[len(m.Legs)-1].Device
	lost, isLost := copyOf(last, c.Name+"-lost")
	back, isBack := copyOf(last, c.Name+"-back")
	switch {
	case len(m.Legs) == 2 && isLost:
		s.Kind, s.Copy = ShapeTracked, lost
	case len(m.Legs) == 2 && isBack:
		s.Kind, s.Copy = ShapeRebuilding, back
		below, _, err := only(string(last), devices)
		if err != nil {
			return s, err
		}
		l, ok := below.(dm.Linear)
		if !ok {
			return s, fmt.Errorf("%s is not linear", last)
		}
		s.Back = l.Device
	default:
		s.Kind = ShapeFlat
		if m.Log.Sync != dm.NoSync {
			s.Kind = ShapeEqualizing
		}
		for _, l := range m.Legs {
			s.Sources = append(s.Sources, l.Device)
		}
		return s, nil
	}
	s.Sources, s.Inner, err = c.sources(m.Legs[0].Device, devices)
	return s, err
}

// sources returns the legs that a device stands for: the device itself or, if it is the
// inner device, those behind it.
func (c Column) sources(device dm.Ref, devices []dm.State) (refs []dm.Ref, inner bool, err error) {
	if string(device) != c.innerName() {
		return []dm.Ref{device}, false, nil
	}
	target, _, err := only(c.innerName(), devices)
	if err != nil {
		return nil, true, err
	}
	switch t := target.(type) {
	case dm.Linear:
		return []dm.Ref{t.Device}, true, nil
	case dm.ErrorTarget:
		return nil, true, nil
	case dm.Mirror:
		for _, l := range t.Legs {
			refs = append(refs, l.Device)
		}
		return refs, true, nil
	}
	return nil, true, fmt.Errorf("inner device is %v", target)
}

// only returns the single target of a device, or nil if there is no such device or it has
// no live table.
func only(name string, devices []dm.State) (dm.Target, block.Size, error) {
	i := slices.IndexFunc(devices, func(s dm.State) bool { return s.Name == name })
	if i < 0 || len(devices[i].Table) == 0 {
		return nil, 0, nil
	}
	t := devices[i].Table
	if len(t) != 1 {
		return nil, 0, fmt.Errorf("%s has %d rows", name, len(t))
	}
	return t[0].Target, t.Size(), nil
}

func copyOf(device dm.Ref, prefix string) (int, bool) {
	digits, ok := strings.CutPrefix(string(device), prefix)
	n, err := strconv.Atoi(digits)
	return n, ok && err == nil
}

// SPDX-License-Identifier: Apache-2.0

package raid

import (
	"fmt"
	"strings"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/dm"
)

// LegState is what a leg is to its column.
type LegState string

const (
	// Absent: the leg takes no part; what it misses is not tracked. The zero value.
	Absent LegState = ""
	// InSync: the leg holds every acknowledged write, by volmgr's record or because
	// its rebuilding mirror was seen synced.
	InSync LegState = "in-sync"
	// Tracked: recorded stale; the column's log keeps what it misses.
	Tracked LegState = "tracked"
	// Rebuilding: recorded stale; it takes all writes and catches up on the dirty regions.
	Rebuilding LegState = "rebuilding"
)

// Leg is one copy of a column.
type Leg struct {
	// Device is the leg's block device. For a leg that is to be Tracked it is
	// the device that it was lost from, if known: only then can Plan see that
	// the column's log has tracked the leg from the start.
	Device dm.Ref // by number
	State  LegState
}

// Column is what one column of an attached volume should be. The first leg in
// sync is the one that reads come from.
type Column struct {
	Name string     // see [ColumnName]
	UUID string     // see [ColumnUUID]
	Size block.Size // of each leg
	// Region is the unit of tracking. Zero means RegionSize(Size); it must stay
	// the same while the column is attached, also when it grows.
	Region block.Size
	// Log is the device for the dirty log, of [LogDeviceSize]; a column of one
	// copy needs none.
	Log  dm.Ref
	Legs []Leg // by copy
	// Equalize: the legs in sync may differ in writes that were never
	// acknowledged; copy the first to the others before the volume is exposed.
	// Set it until the mirror is synced, and expose the volume only once [Observe]
	// finds the column no longer equalizing. It has no effect on a column that was
	// built without it or has left it.
	Equalize bool
	// ReadOnly: nobody writes to the legs, here or elsewhere, as long as the column
	// lives. A leg may then leave and come back in sync.
	ReadOnly bool
	// First is the copy that a ReadOnly column reads from, if it can: hosts that share
	// a volume so share its copies out.
	First int
	// Full: a rebuilding leg may have lost more than the log knows (a volatile
	// cache). It is copied whole. No effect on a rebuild under way.
	Full bool
}

// Check says what is wrong with c.
func (c Column) Check() error {
	count := map[LegState]int{}
	for i, l := range c.Legs {
		switch l.State {
		case Absent, Tracked:
		case InSync, Rebuilding:
			if _, ok := l.Device.Number(); !ok {
				return fmt.Errorf("column %s: leg %d is %s on %q, want a device number", c.Name, i, l.State, l.Device)
			}
		default:
			return fmt.Errorf("column %s: leg %d: state %q unknown", c.Name, i, l.State)
		}
		count[l.State]++
	}
	switch {
	case c.ReadOnly && (c.Equalize || count[Tracked]+count[Rebuilding] > 0):
		return fmt.Errorf("column %s: read-only, and legs to be written to", c.Name)
	case c.First < 0 || c.First > 0 && (!c.ReadOnly || c.First >= len(c.Legs)):
		return fmt.Errorf("column %s: reads from copy %d of %d", c.Name, c.First, len(c.Legs))
	case c.Size == 0 || c.Size%block.SectorSize != 0:
		return fmt.Errorf("column %s: size %d is not a positive multiple of %d", c.Name, c.Size, block.SectorSize)
	case len(c.Legs) == 0 || len(c.Legs) > block.MaxCopies:
		return fmt.Errorf("column %s: %d legs, want 1 to %d", c.Name, len(c.Legs), block.MaxCopies)
	case count[InSync] == 0:
		return fmt.Errorf("column %s: no leg in sync", c.Name)
	case count[Tracked]+count[Rebuilding] > 1:
		return fmt.Errorf("column %s: %d legs tracked or rebuilding, at most one is possible", c.Name, count[Tracked]+count[Rebuilding])
	case len(c.Legs) > 1 && c.Log == "":
		return fmt.Errorf("column %s: no log device", c.Name)
	}
	return c.checkLog()
}

func (c Column) checkLog() error {
	if c.regions() > maxRegions {
		return fmt.Errorf("column %s: %d regions of %v; at most %d fit in the log", c.Name, c.regions(), c.region(), maxRegions)
	}
	return nil
}

// MayGrow says why a column cannot have a size while it is attached; its regions
// stay as they are, and its log has room for so many.
func (o Observed) MayGrow(size block.Size) error {
	return Column{Size: size, Region: o.Region}.checkLog()
}

// regions is how many bits the column's log has.
func (c Column) regions() uint64 { return Regions(c.Size, c.region()) }

func (c Column) region() block.Size {
	if c.Region == 0 {
		return RegionSize(c.Size)
	}
	return c.Region
}

// Devices are the mapped devices of the column, the lowest first; the last one
// is the column itself.
func (c Column) Devices() []dm.Device { return c.devices(c.Shape()) }

func (c Column) innerName() string        { return c.Name + "-in" }
func (c Column) lostName(copy int) string { return fmt.Sprintf("%s-lost%d", c.Name, copy) }
func (c Column) backName(copy int) string { return fmt.Sprintf("%s-back%d", c.Name, copy) }

func (c Column) devices(s Shape) []dm.Device {
	var stack []dm.Device
	add := func(name string, t dm.Target) dm.Ref {
		uuid := c.UUID + strings.TrimPrefix(name, c.Name)
		stack = append(stack, dm.Device{Name: name, UUID: uuid, Table: dm.Whole(c.Size, t), Udev: dm.UdevInner, ReadOnly: c.ReadOnly})
		return dm.Ref(name)
	}
	if s.Kind == ShapeNothing {
		return nil
	}
	var source dm.Ref
	if s.Inner {
		source = add(c.innerName(), c.innerTarget(s.Sources))
	} else {
		source = s.Sources[0]
	}
	switch s.Kind {
	case ShapeLinear:
		add(c.Name, dm.Linear{Device: source})
	case ShapeFlat:
		add(c.Name, c.mirror(dm.NoSync, false, s.Sources...))
	case ShapeEqualizing:
		add(c.Name, c.mirror(dm.UseLog, false, s.Sources...))
	case ShapeTracked:
		lost := add(c.lostName(s.Copy), dm.ErrorTarget{})
		add(c.Name, c.mirror(dm.UseLog, true, source, lost))
	case ShapeRebuilding:
		back := add(c.backName(s.Copy), dm.Linear{Device: s.Back})
		add(c.Name, c.mirror(dm.UseLog, false, source, back))
	}
	return stack
}

// innerTarget holds the sources behind a column that tracks or rebuilds. It is
// always nosync, so its log can be forgotten. With one source left it is there
// for the moment only, and with none it lets go of what it held.
func (c Column) innerTarget(sources []dm.Ref) dm.Target {
	switch len(sources) {
	case 0:
		return dm.ErrorTarget{}
	case 1:
		return dm.Linear{Device: sources[0]}
	}
	return dm.Mirror{Log: dm.Log{Region: c.region(), Sync: dm.NoSync}, Legs: legsOf(sources), HandleErrors: true}
}

func (c Column) mirror(sync dm.Sync, keepLog bool, legs ...dm.Ref) dm.Mirror {
	return dm.Mirror{
		Log:          dm.Log{Device: c.Log, Region: c.region(), Sync: sync},
		Legs:         legsOf(legs),
		HandleErrors: true,
		KeepLog:      keepLog,
	}
}

func legsOf(devices []dm.Ref) []dm.Leg {
	legs := make([]dm.Leg, len(devices))
	for i, d := range devices {
		legs[i] = dm.Leg{Device: d}
	}
	return legs
}

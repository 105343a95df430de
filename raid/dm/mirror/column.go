// SPDX-License-Identifier: Apache-2.0

package mirror

import (
	"fmt"
	"slices"
	"strings"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid"
	"weft.dev/weft/raid/dm"
)

// LegState is the state of a leg in its column.
type LegState string

const (
	// Absent: the leg takes no part, and the writes that it misses are not tracked. The
	// zero value.
	Absent LegState = ""
	// InSync: the leg holds every acknowledged write. Either volmgr's record says so, or
	// its rebuilding mirror was seen synced.
	InSync LegState = "in-sync"
	// Tracked: the leg is recorded stale, and the column's log marks the regions that it
	// misses.
	Tracked LegState = "tracked"
	// Rebuilding: the leg is recorded stale. It takes all writes while the dirty regions
	// are copied to it.
	Rebuilding LegState = "rebuilding"
)

// Leg is one copy of a column.
type Leg struct {
	// Device is the leg's block device. For a leg that is to be Tracked, it is the last
	// device that the leg had, if that is known: only then can Plan see that the
	// column's log has tracked the leg from the start.
	Device dm.Ref // by number
	State  LegState
}

// Column describes one wanted column of an attached volume. Reads go to the first leg
// in sync.
type Column struct {
	Name string     // see [ColumnName]
	UUID string     // see [ColumnUUID]
	Size block.Size // of each leg
	// Region is the unit of tracking. Zero means raid.RegionSize(Size). It must stay the
	// same while the column is attached, also when the column grows.
	Region block.Size
	// Log is the device for the dirty log, [LogDeviceSize] large. A column of one copy
	// needs none.
	Log  dm.Ref
	Legs []Leg // by copy
	// Equalize: the legs in sync may differ in writes that were never acknowledged, so
	// copy the first leg to the others before the volume is exposed. Keep it set until
	// the mirror is synced, and expose the volume only when [Observe] finds that the
	// column is no longer equalizing. It has no effect on a column that was built without
	// it or that has finished equalizing.
	Equalize bool
	// Equal, with Equalize: the copies have been made equal already, since nothing could write to them.
	Equal bool
	// ReadOnly: no host writes to the legs for the lifetime of the column, so a leg may
	// leave and come back in sync.
	ReadOnly bool
	// First is the copy that a ReadOnly column prefers for reads. Hosts that share a
	// volume can so distribute their reads over the copies.
	First int
	// Full: copy a rebuilding leg whole, because it may have lost more than the log knows
	// (a volatile cache). It has no effect on a rebuild under way.
	Full bool
	// FromNow: a log that has to be begun for a tracked leg begins clean, and has only what the
	// leg misses from now on. The caller remembers, before the first step, that it lacks more.
	FromNow bool
	// Lacked is what a rebuilding leg lacked before its log began clean. The caller has found it
	// out while the column tracked the leg; nil otherwise. With it, Log is another device than the
	// one in use, and gets what both name. It has no effect on a rebuild under way. Where the
	// column does not track the leg, everything is copied.
	Lacked *LogImage
}

// Check returns an error that names the first mistake in c.
func (c Column) Check() error {
	if err := c.checkLegs(); err != nil {
		return fmt.Errorf("column %s: %w", c.Name, err)
	}
	switch {
	case c.ReadOnly && (c.Equalize || slices.ContainsFunc(c.Legs, Leg.stale)):
		return fmt.Errorf("column %s: read-only, and legs to be written to", c.Name)
	case c.First < 0 || c.First > 0 && (!c.ReadOnly || c.First >= len(c.Legs)):
		return fmt.Errorf("column %s: reads from copy %d of %d", c.Name, c.First, len(c.Legs))
	case c.Size == 0 || c.Size%block.SectorSize != 0:
		return fmt.Errorf("column %s: size %d is not a positive multiple of %d", c.Name, c.Size, block.SectorSize)
	case len(c.Legs) > 1 && c.Log == "":
		return fmt.Errorf("column %s: no log device", c.Name)
	case c.Lacked != nil && c.Full:
		return fmt.Errorf("column %s: a leg to be copied whole, and only where it lacks something", c.Name)
	}
	return c.checkLog()
}

// checkLegs returns an error if no stack can be built from c's legs.
func (c Column) checkLegs() error {
	inSync, stale := 0, 0
	for i, l := range c.Legs {
		if err := l.check(); err != nil {
			return fmt.Errorf("leg %d: %w", i, err)
		}
		if l.State == InSync {
			inSync++
		}
		if l.stale() {
			stale++
		}
	}
	switch {
	case len(c.Legs) == 0 || len(c.Legs) > block.MaxSlots:
		return fmt.Errorf("%d legs, want 1 to %d", len(c.Legs), block.MaxSlots)
	case inSync == 0:
		return fmt.Errorf("no leg in sync")
	case stale > 1: // a log describes what one leg misses
		return fmt.Errorf("%d legs tracked or rebuilding, at most one is possible", stale)
	}
	return nil
}

func (l Leg) check() error {
	switch l.State {
	case Absent, Tracked:
		return nil
	case InSync, Rebuilding:
		if _, ok := l.Device.Number(); !ok {
			return fmt.Errorf("%s on %q, want a device number", l.State, l.Device)
		}
		return nil
	}
	return fmt.Errorf("state %q unknown", l.State)
}

// stale reports whether l is recorded stale and takes part in its column.
func (l Leg) stale() bool { return l.State == Tracked || l.State == Rebuilding }

func (c Column) checkLog() error {
	if c.Regions() > maxRegions {
		return fmt.Errorf("column %s: %d regions of %v; at most %d fit in the log", c.Name, c.Regions(), c.RegionSize(), maxRegions)
	}
	return nil
}

// MayGrow returns an error if the column cannot grow to a size while it is attached: its
// regions keep their size, and the log has room for a limited number of them.
func (o Observed) MayGrow(size block.Size) error {
	return Column{Size: size, Region: o.Region}.checkLog()
}

// Regions returns the number of bits in the column's log.
func (c Column) Regions() uint64 { return raid.Regions(c.Size, c.RegionSize()) }

// RegionSize returns the unit of tracking: Region, or what is used without one.
func (c Column) RegionSize() block.Size {
	if c.Region == 0 {
		return raid.RegionSize(c.Size)
	}
	return c.Region
}

// Devices returns the mapped devices of the column, the lowest first. The last one is
// the column itself.
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

// innerTarget returns the target that holds the sources of a column that tracks or
// rebuilds. As a mirror it is always nosync, so its log may be lost. With one source
// left, it is a temporary linear map; with none, it fails the writes that it held.
func (c Column) innerTarget(sources []dm.Ref) dm.Target {
	switch len(sources) {
	case 0:
		return dm.ErrorTarget{}
	case 1:
		return dm.Linear{Device: sources[0]}
	}
	return dm.Mirror{Log: dm.Log{Region: c.RegionSize(), Sync: dm.NoSync}, Legs: legsOf(sources), HandleErrors: true}
}

func (c Column) mirror(sync dm.Sync, keepLog bool, legs ...dm.Ref) dm.Mirror {
	return dm.Mirror{
		Log:          dm.Log{Device: c.Log, Region: c.RegionSize(), Sync: sync},
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

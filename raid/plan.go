// SPDX-License-Identifier: Apache-2.0

package raid

import (
	"fmt"
	"slices"
	"strings"

	"weft.dev/weft/raid/dm"
)

// Step is one step of a plan: either a log image to write, or a device to change.
type Step struct {
	Why string
	Log *LogWrite
	DM  *dm.Step
	// LogTo, if it is not 0, is how many regions the column's log is to have from
	// this change on, by LogImage.Grow: while the device is suspended (dm.Client.DoWith),
	// since the table that is live writes its log as it knows it.
	LogTo uint64
}

// LogWrite is an image to write to the start of the log device (or its backing
// file, without truncating it), before the next step.
type LogWrite struct {
	Device dm.Ref
	Image  LogImage
}

func (s Step) String() string {
	if s.Log != nil {
		return fmt.Sprintf("write log %s: %d of %d regions dirty (%s)", s.Log.Device, s.Log.Image.CountDirty(), s.Log.Image.Regions(), s.Why)
	}
	return fmt.Sprintf("%v (%s)", s.DM, s.Why)
}

// Plan says how to get from a volume's devices, as dm.Client.Devices returns
// them, to a wanted column. It is empty when nothing is to be done. Every prefix
// of it leaves a column that serves I/O and keeps the promises of the package
// comment, and from which Plan finds the rest; after an error, read the devices
// and plan again.
//
// A log holds what one leg misses, so one leg can be tracked or rebuilding. If a
// leg is wanted so whose misses the log has not held from the start, the log is
// first written anew with all regions dirty: the claim "tracked" is then never
// false, only useless.
//
// The transitions, each one atomic switch of the column's device, with what goes
// before it:
//
//	from          to            by
//	nothing       any           log written all dirty if it will be used; built bottom up
//	flat          flat, linear  a leg that is not tracked leaves, or a device has a new number:
//	                            what was held is issued again to those that stay
//	flat          tracked       the log goes over as it is: it holds the regions with writes
//	                            under way, a few more than the leg misses. More than one leg
//	                            stays: they get the inner mirror first, which joins the
//	                            log's mirror as its one source
//	tracked       rebuilding    the log goes over; keep_log ends in the same switch in which a
//	                            second leg comes alive
//	rebuilding    tracked       the same back again: regions not yet copied stay dirty
//	rebuilding    rebuilding    (another device number) by way of tracked, so that the mirror
//	                            forgets the old device's errors
//	rebuilding    flat          the mirror was seen synced, and the leg was recorded in sync
//	equalizing    flat          all regions are in sync
//	equalizing    equalizing    a leg left: any of the rest may be copied from, the log goes over
//	any           rebuilding    of another leg: by way of linear, during which no table uses
//	                            the log, so that it can be written all dirty
//
// Behind an inner mirror a source leaves in two switches: first the inner device
// lets go of it, which releases the writes that it holds; only then can the
// column above be suspended, because it waits for these. What that source misses
// is not tracked.
func Plan(devices []dm.State, want Column) ([]Step, error) {
	if err := want.Check(); err != nil {
		return nil, err
	}
	mine := slices.DeleteFunc(slices.Clone(devices), func(s dm.State) bool { return !want.owns(s.Name) })
	got, err := Observe(want.Name, mine)
	if err != nil {
		return nil, err
	}
	if err := want.checkAgainst(got); err != nil {
		return nil, fmt.Errorf("column %s: %w", want.Name, err)
	}
	if want.Region == 0 {
		want.Region = got.Region // zero where there is none: the rule decides
	}
	before := want
	if got.Kind != ShapeNothing {
		before.Size = got.Size
	}
	if want.Region == 0 {
		before.Region = RegionSize(before.Size)
		want.Region = before.Region
	}
	if err := want.checkLog(); err != nil {
		return nil, err
	}
	var steps []Step
	for _, h := range before.route(got, mine) {
		switch {
		case h.image != nil:
			steps = append(steps, Step{Why: h.why, Log: &LogWrite{want.Log, *h.image}})
		case h.inner != nil:
			mine = appendInner(&steps, mine, *h.inner, h.why)
		default:
			mine = appendSteps(&steps, mine, before.devices(h.to), h.why)
		}
	}
	return want.grow(steps, mine, want.goal(got).Shape()), nil
}

// grow appends what makes the devices of a shape longer, the lowest first: each one
// that is, is longer than what its user has of it yet.
func (c Column) grow(steps []Step, devices []dm.State, s Shape) []Step {
	first := len(steps)
	appendSteps(&steps, devices, c.devices(s), "grow")
	for i := range steps[first:] {
		step := &steps[first+i]
		if d := step.DM.Device; step.DM.Op == dm.OpResize && keepsLog(d.Table) {
			step.LogTo = c.regions()
		}
	}
	return steps
}

// keepsLog reports whether a table believes what its log says.
func keepsLog(t dm.Table) bool {
	m, ok := t[0].Target.(dm.Mirror)
	return ok && m.Log.Device != "" && m.Log.Sync == dm.UseLog
}

// owns reports whether a device's name is one of c's.
func (c Column) owns(name string) bool {
	return name == c.Name || strings.HasPrefix(name, c.Name+"-")
}

// checkAgainst refuses what no order of steps makes safe.
func (c Column) checkAgainst(got Observed) error {
	if got.Kind == ShapeNothing {
		return nil
	}
	if c.Size < got.Size {
		return fmt.Errorf("from %v to %v would cut off data", got.Size, c.Size)
	}
	most := len(got.Sources)
	joins := got.Copy < len(c.Legs) && c.Legs[got.Copy].State == InSync
	switch {
	case joins && got.Kind == ShapeTracked:
		return fmt.Errorf("copy %d is to be in sync, and the log holds what it misses", got.Copy)
	case joins && got.Kind == ShapeRebuilding:
		most++
	}
	if n := len(c.goal(got).Shape().Sources); n > most && !c.ReadOnly {
		return fmt.Errorf("%d legs are to be in sync where %d are, and the others were not rebuilt here", n, most)
	}
	return nil
}

// goal is c without what does not apply any more.
func (c Column) goal(got Observed) Column {
	if got.Kind != ShapeNothing && got.Kind != ShapeEqualizing {
		c.Equalize = false
	}
	return c
}

// hop is one switch of the column's shape or of its inner device alone, or the
// writing of its log.
type hop struct {
	why   string
	to    Shape
	inner *dm.Device
	image *LogImage
}

func (c Column) route(got Observed, devices []dm.State) []hop {
	r := router{c: c.goal(got), got: got, at: got.Shape}
	want := r.c.Shape()
	r.releaseInner(devices)
	switch want.Kind {
	case ShapeEqualizing:
		if got.Kind == ShapeNothing || got.Log != c.Log {
			r.freeLog(want)
		}
		r.to(want, "copy the first leg to the others")
	case ShapeTracked:
		if !r.trackedSinceLost(want) {
			r.freeLog(want)
		}
		r.to(want, fmt.Sprintf("copy %d is lost: log what it misses", want.Copy))
	case ShapeRebuilding:
		r.rebuild(want)
	case ShapeFlat:
		r.to(want, "mirror the legs in sync")
	case ShapeLinear:
		r.to(want, "one leg is in sync")
	}
	return r.hops
}

// router collects the hops on the way from got to c.
type router struct {
	c    Column
	got  Observed
	at   Shape
	hops []hop
}

func (r *router) to(s Shape, why string) {
	r.hops = append(r.hops, hop{why: why, to: s})
	r.at = s
}

// releaseInner lets the inner device go of sources that are to leave, and go on
// if a cut plan has left it suspended: the column above waits for what it holds.
// The column itself is not touched. It may be suspended too, on its way to a
// table with a leg that is recorded in sync, and then must not get its old one
// back (see the package comment).
func (r *router) releaseInner(devices []dm.State) {
	i := slices.IndexFunc(devices, func(s dm.State) bool { return s.Name == r.c.innerName() })
	if !r.at.Inner || i < 0 {
		return
	}
	var stay []dm.Ref
	for i, l := range r.c.Legs {
		// A leg that has caught up joins above, unless a plan that was cut has put
		// it in here: then it may be all that is left.
		if l.State == InSync && (!r.at.tracks(i) || slices.Contains(r.at.Sources, l.Device)) {
			stay = append(stay, l.Device)
		}
	}
	if slices.Equal(stay, r.at.Sources) && !devices[i].Suspended {
		return
	}
	r.at.Sources = stay
	r.hops = append(r.hops, hop{why: "the inner mirror lets go of what it holds for a leg that leaves", to: r.at, inner: &dm.Device{
		Name: devices[i].Name, UUID: devices[i].UUID, Table: dm.Whole(r.c.Size, r.c.innerTarget(stay)), Udev: dm.UdevInner,
	}})
}

// freeLog makes the column linear, if it exists, and writes its log all dirty.
func (r *router) freeLog(want Shape) {
	if r.at.Kind != ShapeNothing && r.at.Kind != ShapeLinear {
		r.to(Shape{Kind: ShapeLinear, Sources: want.Sources, Inner: len(want.Sources) > 1}, "no table may use the log while it is written")
	}
	image := DirtyLog(r.c.regions())
	r.hops = append(r.hops, hop{why: "what the leg misses is not known", image: &image})
}

func (r *router) trackedSinceLost(want Shape) bool {
	if r.got.Log != r.c.Log {
		return false
	}
	if r.at.Kind == ShapeFlat || r.at.Kind == ShapeEqualizing {
		lost := r.c.Legs[want.Copy].Device
		return slices.Contains(r.at.Sources, lost) && !slices.Contains(want.Sources, lost)
	}
	return r.at.tracks(want.Copy)
}

func (r *router) rebuild(want Shape) {
	underWay := r.at.Kind == ShapeRebuilding && r.at.Copy == want.Copy && r.at.Back == want.Back
	switch {
	case r.got.Log != r.c.Log || !r.at.tracks(want.Copy) || r.c.Full && !underWay:
		r.freeLog(want)
	case r.at.Kind == ShapeRebuilding && !underWay:
		r.to(Shape{Kind: ShapeTracked, Sources: want.Sources, Inner: want.Inner, Copy: want.Copy}, "the returning leg has another device")
	}
	r.to(want, fmt.Sprintf("copy the dirty regions to copy %d", want.Copy))
}

// appendSteps appends what leads to the devices of one hop, and returns the
// devices as they will then be.
func appendSteps(steps *[]Step, devices []dm.State, want []dm.Device, why string) []dm.State {
	for _, s := range dm.Diff(devices, want) {
		*steps = append(*steps, Step{Why: why, DM: &s})
		devices = after(devices, s)
	}
	return devices
}

// appendInner is appendSteps for one device; the others stay as they are.
func appendInner(steps *[]Step, devices []dm.State, inner dm.Device, why string) []dm.State {
	i := slices.IndexFunc(devices, func(s dm.State) bool { return s.Name == inner.Name })
	for _, s := range dm.Diff(devices[i:i+1], []dm.Device{inner}) {
		*steps = append(*steps, Step{Why: why, DM: &s})
		devices = after(devices, s)
	}
	return devices
}

// after is what a step makes of devices.
func after(devices []dm.State, s dm.Step) []dm.State {
	devices = slices.Clone(devices)
	i := slices.IndexFunc(devices, func(d dm.State) bool { return d.Name == s.Device.Name })
	switch s.Op {
	case dm.OpRemove:
		return slices.Delete(devices, i, i+1)
	case dm.OpCreate:
		return append(devices, dm.State{Info: dm.Info{Name: s.Device.Name, UUID: s.Device.UUID, Live: true}, Table: s.Device.Table})
	}
	d := &devices[i]
	switch s.Op {
	case dm.OpReload, dm.OpResize:
		d.Table, d.Live, d.Suspended, d.Inactive = s.Device.Table, true, false, false
	case dm.OpResume:
		d.Suspended = false
	case dm.OpClear:
		d.Inactive = false
	}
	return devices
}

// Refresh swaps the mirrors of a column for the same again. A mirror remembers
// an error of a leg for as long as its table lives, and after one of the only
// good leg fails everything; where that leg stays, because it is the last one,
// this makes the mirror try it again. It also helps a rebuilding or equalizing
// mirror that stands still with all legs alive: an error just before its last
// region was in sync is forgotten, and the write that met it still held. It is
// as safe as any step of Plan.
func Refresh(devices []dm.State, c Column) []Step {
	var steps []Step
	for _, s := range devices {
		if !c.owns(s.Name) || len(s.Table) != 1 {
			continue
		}
		if _, ok := s.Table[0].Target.(dm.Mirror); ok {
			d := s.Device()
			d.Udev = dm.UdevInner
			steps = append(steps, Step{Why: "forget the errors of a leg that stays", DM: &dm.Step{Op: dm.OpReload, Device: d}})
		}
	}
	// The inner mirror first: the column above waits for what it holds.
	slices.SortStableFunc(steps, func(a, b Step) int { return len(b.DM.Device.Name) - len(a.DM.Device.Name) })
	return steps
}

// SPDX-License-Identifier: Apache-2.0

package mirror

import (
	"fmt"
	"slices"
	"strings"

	"weft.dev/weft/raid"
	"weft.dev/weft/raid/dm"
)

// Step is one step of a plan: either a log image to write (Log) or a device to change (DM).
type Step struct {
	Why string
	Log *LogWrite
	DM  *dm.Step
	// LogTo, if it is not 0, is the number of regions that the column's log must have
	// after this change. Grow the image (LogImage.Grow) while the device is suspended
	// (dm.Client.DoWith): before that, the live table still writes the log in its old size.
	LogTo uint64
	// Lacked, if it is not nil, has the regions that are to be dirty in the log of the new table
	// beside those in the log of the old one, which is on another device. While the device is
	// suspended (dm.Client.DoWith), read the old log, merge the two (LogImage.Merge) and write
	// the new one. The new table must not become live without it. (To the old log, the kernel may
	// still write then: kmirrord flushes what the last writes have marked beside the suspend.)
	Lacked *LogImage
}

// LogWrite is an image to write to the start of the log device before the next step. If
// it is written to the device's backing file, that must not be truncated.
type LogWrite struct {
	Device dm.Ref
	Image  LogImage
}

func (s Step) String() string {
	if s.Log != nil {
		return fmt.Sprintf("write log %s: %d of %d regions dirty (%s)", s.Log.Device, s.Log.Image.CountDirty(), s.Log.Image.Regions(), s.Why)
	}
	if s.Lacked != nil {
		return fmt.Sprintf("%v, with %d of %d regions dirty and what the log before has (%s)", s.DM, s.Lacked.CountDirty(), s.Lacked.Regions(), s.Why)
	}
	return fmt.Sprintf("%v (%s)", s.DM, s.Why)
}

// Plan returns the steps from a volume's devices, as dm.Client.Devices returns them, to a
// wanted column; none if there is nothing to do. It is safe to stop after any step: the
// column then serves I/O and keeps the promises of the package comment, and another Plan
// finds the rest. After an error, read the devices and plan again.
//
// A log describes what one leg misses, so only one leg can be tracked or rebuilding. If
// the log has not tracked that leg from the start, it is first rewritten with all regions
// dirty. A leg called tracked then never misses more than the log says. The exception is
// one whose log has begun clean (Column.FromNow): it misses what the caller finds out, too.
//
// These are the transitions. Each is one atomic switch of the column's device; the right
// column says what comes before it.
//
//	from          to            by
//	nothing       any           log written all dirty if it will be used; built bottom up
//	flat          flat, linear  a leg leaves untracked, or a device has a new number: held
//	                            writes are issued again to the legs that stay
//	flat          tracked       the log is kept: it marks the regions with writes under way,
//	                            a few more than the leg misses. If more than one leg stays,
//	                            they first get an inner mirror, which becomes the one source
//	                            of the log's mirror
//	tracked       tracked       with Column.FromNow and another log: that begins clean, and has
//	                            all writes from the switch on; the one before has those until then
//	tracked       rebuilding    the log is kept, or with Column.Lacked becomes a part of another;
//	                            the switch that adds the second live leg also ends keep_log
//	rebuilding    tracked       the same in reverse: regions not yet copied stay dirty
//	rebuilding    rebuilding    (another device number) through tracked, so that the mirror
//	                            forgets the old device's errors
//	rebuilding    flat          the mirror was seen synced, and the leg was recorded in sync
//	equalizing    flat          all regions are in sync
//	equalizing    equalizing    a leg left: any of the rest can be the source; the log is kept
//	any           rebuilding    of another leg: through linear, where no table uses the log,
//	                            so that it can be rewritten all dirty
//
// A source behind an inner mirror leaves in two switches. First the inner device drops
// it, which releases the writes held for it. Only then can the column above be suspended,
// because its suspend waits for these writes. Writes that this source misses are not
// tracked.
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
		want.Region = got.Region // zero if there is no mirror: RegionSize decides below
	}
	before := want
	if got.Kind != ShapeNothing {
		before.Size = got.Size
	}
	if want.Region == 0 {
		before.Region = raid.RegionSize(before.Size)
		want.Region = before.Region
	}
	if err := want.checkLog(); err != nil {
		return nil, err
	}
	if l := want.Lacked; l != nil && l.Regions() != before.Regions() {
		return nil, fmt.Errorf("column %s: it has %d regions, and what a leg lacks is known in %d", want.Name, before.Regions(), l.Regions())
	}
	var steps []Step
	for _, h := range before.route(got, mine) {
		switch {
		case h.image != nil:
			steps = append(steps, Step{Why: h.why, Log: &LogWrite{want.Log, *h.image}})
		case h.inner != nil:
			mine = appendInner(&steps, mine, *h.inner, h.why)
		default:
			first := len(steps)
			mine = appendSteps(&steps, mine, before.devices(h.to), h.why)
			before.addLacked(steps[first:], h.lacked)
		}
	}
	return want.grow(steps, mine, want.goal(got).Shape()), nil
}

// Release returns the steps, if any, that are to be done while a step on the column's own
// device has not returned: the inner mirror drops the legs that are to leave, and so
// releases the writes that the column's suspend waits for. They do not change the column.
func Release(devices []dm.State, want Column) ([]Step, error) {
	mine := slices.DeleteFunc(slices.Clone(devices), func(s dm.State) bool { return !want.owns(s.Name) })
	got, err := Observe(want.Name, mine)
	if err != nil || got.Kind == ShapeNothing {
		return nil, err
	}
	want.Size, want.Region = got.Size, got.Region
	if want.Region == 0 {
		want.Region = raid.RegionSize(want.Size)
	}
	r := router{c: want.goal(got), got: got, at: got.Shape}
	r.releaseInner(mine)
	var steps []Step
	for _, h := range r.hops {
		mine = appendInner(&steps, mine, *h.inner, h.why)
	}
	return steps, nil
}

// grow appends the steps that make the devices of a shape longer, the lowest first: so
// each device grows before the one above it uses the new part.
func (c Column) grow(steps []Step, devices []dm.State, s Shape) []Step {
	first := len(steps)
	appendSteps(&steps, devices, c.devices(s), "grow")
	for i := range steps[first:] {
		step := &steps[first+i]
		if d := step.DM.Device; step.DM.Op == dm.OpResize && keepsLog(d.Table) {
			step.LogTo = c.Regions()
		}
	}
	return steps
}

// addLacked has the step that makes a column's new table live add to its log.
func (c Column) addLacked(steps []Step, lacked *LogImage) {
	for i := range steps {
		if d := steps[i].DM; d.Op == dm.OpReload && d.Device.Name == c.Name {
			steps[i].Lacked = lacked
		}
	}
}

// keepsLog reports whether a table relies on the contents of its log device.
func keepsLog(t dm.Table) bool {
	m, ok := t[0].Target.(dm.Mirror)
	return ok && m.Log.Device != "" && m.Log.Sync == dm.UseLog
}

// owns reports whether a device's name is one of c's.
func (c Column) owns(name string) bool {
	return name == c.Name || strings.HasPrefix(name, c.Name+"-")
}

// checkAgainst refuses changes that no order of steps makes safe.
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

// goal returns c without Equalize if that no longer applies.
func (c Column) goal(got Observed) Column {
	if got.Kind != ShapeNothing && got.Kind != ShapeEqualizing {
		c.Equalize = false
	}
	return c
}

// hop is one switch of the column's shape, one of its inner device alone, or one write of
// its log.
type hop struct {
	why    string
	to     Shape
	lacked *LogImage // becomes a part of the log with the switch to a shape
	inner  *dm.Device
	image  *LogImage
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
		switch {
		case r.anew(want):
			r.beginLog(CleanLog(c.Regions()), "what the leg misses from now on is logged anew")
		case !r.trackedSinceLost(want):
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

// releaseInner makes the inner device drop the sources that are to leave, and resumes it
// if an interrupted plan has left it suspended: the column above waits for the writes
// that it holds. The column itself is not changed. It may be suspended too, before a
// switch to a table with a leg that is recorded in sync; then its old table must not
// become live again (see the package comment).
func (r *router) releaseInner(devices []dm.State) {
	i := slices.IndexFunc(devices, func(s dm.State) bool { return s.Name == r.c.innerName() })
	if !r.at.Inner || i < 0 {
		return
	}
	var stay []dm.Ref
	for i, l := range r.c.Legs {
		// A leg that has caught up joins the column, not the inner device. But if an
		// interrupted plan has already added it here, it may be the only one left.
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
	image, why := DirtyLog(r.c.Regions()), "what the leg misses is not known"
	if want.Kind == ShapeEqualizing && r.c.Equal && r.got.Kind == ShapeNothing {
		image, why = CleanLog(r.c.Regions()), "the copies are equal already"
	}
	if want.Kind == ShapeTracked && r.c.FromNow {
		image, why = CleanLog(r.c.Regions()), "what the leg misses from now on is logged"
	}
	r.beginLog(image, why)
}

// beginLog writes a log that no table uses.
func (r *router) beginLog(image LogImage, why string) {
	r.hops = append(r.hops, hop{why: why, image: &image})
}

// anew reports whether the column logs what a leg misses, and is to do so on another device from now on.
func (r *router) anew(want Shape) bool {
	return r.c.FromNow && r.at.Kind == ShapeTracked && r.at.Copy == want.Copy && r.got.Log != r.c.Log
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
	joins := r.c.Lacked != nil && r.at.Kind == ShapeTracked && r.at.Copy == want.Copy && r.got.Log != r.c.Log
	why := fmt.Sprintf("copy the dirty regions to copy %d", want.Copy)
	switch {
	case joins:
		r.hops = append(r.hops, hop{why: why, to: want, lacked: r.c.Lacked})
		return
	case r.got.Log != r.c.Log || !r.at.tracks(want.Copy) || (r.c.Full || r.c.Lacked != nil) && !underWay:
		r.freeLog(want)
	case r.at.Kind == ShapeRebuilding && !underWay:
		r.to(Shape{Kind: ShapeTracked, Sources: want.Sources, Inner: want.Inner, Copy: want.Copy}, "the returning leg has another device")
	}
	r.to(want, why)
}

// appendSteps appends the steps to the devices of one hop, and returns the devices as they
// will be after them.
func appendSteps(steps *[]Step, devices []dm.State, want []dm.Device, why string) []dm.State {
	for _, s := range dm.Diff(devices, want) {
		*steps = append(*steps, Step{Why: why, DM: &s})
		devices = after(devices, s)
	}
	return devices
}

// appendInner is appendSteps for one device alone; the others stay unchanged.
func appendInner(steps *[]Step, devices []dm.State, inner dm.Device, why string) []dm.State {
	i := slices.IndexFunc(devices, func(s dm.State) bool { return s.Name == inner.Name })
	for _, s := range dm.Diff(devices[i:i+1], []dm.Device{inner}) {
		*steps = append(*steps, Step{Why: why, DM: &s})
		devices = after(devices, s)
	}
	return devices
}

// after returns the devices as they will be after a step.
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

// Refresh returns steps that load the same tables of a column's mirrors again, so that
// the mirrors forget the errors of their legs. A mirror remembers an error for as long as
// its table lives, and after an error of its only good leg it fails all I/O. If that leg
// stays, because it is the last one, Refresh makes the mirror try it again.
//
// It also helps a rebuilding or equalizing mirror that makes no progress although all its
// legs are alive: such a mirror met an error just before its last region came in sync,
// forgot it, and still holds the write. Refresh is as safe as any step of Plan.
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
	// The inner mirror comes first: the column above waits for the writes that it holds.
	slices.SortStableFunc(steps, func(a, b Step) int { return len(b.DM.Device.Name) - len(a.DM.Device.Name) })
	return steps
}

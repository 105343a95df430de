// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/mapped"
)

// Rows is the kernel's device mapper, which through it also maps legs in trees (MappedTable), as long as nobody
// writes them: snapshots, and legs of sealed volumes. Where their data lies is told to the kernel once, when such a
// leg is created, and the tree then leaves that where it is (mapped.Tree.Pin). So the kernel serves it without this
// process, also while there is none.
//
//	weft-leg-ID   refuses writes, so that nobody changes what other legs have as well; nvmet exports it
//	     │
//	weft-rows-ID  a linear row for each piece of data, and zeroes between them
//	     │
//	the drive
//
// The lower device is there before the upper one and after it. It stands for the pin: legs with one are pinned when
// their tree is opened, before anything is reclaimed. Both have the drive and the tree in their uuids.
type Rows struct {
	open   func() (KernelMapper, error)
	drives *Drives
	most   int // rows of a leg
	// settle is called for each leg's device before it is exported.
	settle func(block.DeviceNumber) error

	mu      sync.Mutex
	kernel  KernelMapper // nil until it could be opened
	settled map[string]bool
	left    map[string]bool // devices that could not be removed
	failed  map[block.LegID]int
	refused map[block.LegID]refusal
	probed  time.Time
	able    error
}

// refusal is why the kernel does not get a leg.
type refusal struct {
	why   string
	until time.Time // zero: for good
}

// KernelMapper is the kernel's device mapper; *dm.Client.
type KernelMapper interface {
	Devices(prefix string) ([]dm.State, error)
	Do(dm.Step) error
	Info(name string) (dm.Info, error)
	List() ([]dm.Listed, error)
}

const (
	legPrefix = "weft-leg-"
	// RowsPrefix is that of the names of devices under those of legs.
	RowsPrefix = "weft-rows-"
	// mostRows bounds what the kernel's memory holds for a leg: a row takes about 250 bytes there.
	mostRows = 1 << 16
	// mostFailures is how often the kernel may fail to create a leg before it counts as refused, for refusedFor.
	mostFailures = 5
	refusedFor   = 10 * time.Minute
)

// InKernel has the kernel map legs on these drives, which must not be in use yet. Open is called until it succeeds;
// its error is fs.ErrNotExist where there is no device mapper, and so no leg in it.
func (d *Drives) InKernel(open func() (KernelMapper, error)) *Rows {
	d.rows = &Rows{
		open: open, drives: d, most: mostRows, settled: map[string]bool{}, left: map[string]bool{}, failed: map[block.LegID]int{}, refused: map[block.LegID]refusal{},
		settle: func(n block.DeviceNumber) error { return dm.WriteThrough(d.root, n) },
	}
	return d.rows
}

// mapper returns the kernel's, which is there for all calls once it is for one.
func (r *Rows) mapper() (KernelMapper, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.kernel == nil {
		kernel, err := r.open()
		if err != nil {
			return nil, err
		}
		r.kernel = kernel
	}
	return r.kernel, nil
}

// uuidOf names where a leg is, behind the name of its device.
func uuidOf(name string, n block.DeviceNumber, tree string) string {
	return fmt.Sprintf("%s %v %s", name, n, tree)
}

// parseUUID is the inverse of uuidOf; ok is false for a device without rows.
func parseUUID(uuid string) (name string, n block.DeviceNumber, tree string, ok bool) {
	fields := strings.Fields(uuid)
	if len(fields) != 3 {
		return "", n, "", false
	}
	n, ok = dm.Ref(fields[1]).Number()
	return fields[0], n, fields[2], ok
}

// Devices is that of the kernel, in which a leg with rows has the table of the leg in its tree.
func (r *Rows) Devices(prefix string) ([]dm.State, error) {
	kernel, err := r.mapper()
	if err != nil {
		return nil, err
	}
	all, err := kernel.Devices(prefix)
	if err != nil {
		return nil, err
	}
	for i := range all {
		s := &all[i]
		name, n, tree, ok := parseUUID(s.UUID)
		id, err := block.ParseLegID(strings.TrimPrefix(name, legPrefix))
		if !ok || err != nil {
			continue
		}
		s.UUID = name
		if !s.Live {
			continue
		}
		s.Table = MappedTable(n, tree, id, s.Table.Size())
		if err := r.settleOnce(s.Info); err != nil { // or it is gone
			r.drives.log.Debug("flushes reach a device that fails them", "device", s.Name, "err", err)
		}
	}
	return all, nil
}

// settleOnce settles a leg's device, also that of an earlier process.
func (r *Rows) settleOnce(i dm.Info) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.settled[i.Name] {
		return nil
	}
	err := r.settle(i.Number)
	r.settled[i.Name] = err == nil
	return err
}

// Do makes one change. If a leg cannot be created, Refused may say why from then on.
func (r *Rows) Do(s dm.Step) error {
	kernel, err := r.mapper()
	if err != nil {
		return err
	}
	n, tree, leg, inTree := parseMapped(s.Device.Table)
	switch s.Op {
	case dm.OpRemove:
		if strings.HasPrefix(s.Device.Name, legPrefix) {
			return r.remove(kernel, s)
		}
	case dm.OpReload, dm.OpResize: // of one without a table, as a crash has left it, or on another drive
		if inTree {
			if err := r.remove(kernel, dm.Step{Op: dm.OpRemove, Device: s.Device}); err != nil {
				return err
			}
			s.Op = dm.OpCreate
		}
	}
	if !inTree || s.Op != dm.OpCreate {
		return kernel.Do(s)
	}
	if err := r.create(kernel, n, tree, leg, s); err != nil {
		return fmt.Errorf("%s %s: %w", s.Op, s.Device.Name, err)
	}
	return nil
}

// Refused says why a leg is not mapped by the kernel, so that it has to be served by this process; empty if nothing
// keeps it. What may pass counts for a while.
func (r *Rows) Refused(leg block.LegID) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	if no := r.refused[leg]; no.until.IsZero() || time.Now().Before(no.until) {
		return no.why
	}
	delete(r.refused, leg)
	return ""
}

// refuse has Refused say why the kernel does not map a leg, until then.
func (r *Rows) refuse(leg block.LegID, why error, until time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.refused[leg] = refusal{why.Error(), until}
	delete(r.failed, leg)
}

// count counts how often in a row the kernel has failed to create a leg.
func (r *Rows) count(leg block.LegID, err error) (failures int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if err == nil {
		delete(r.failed, leg)
		return 0
	}
	r.failed[leg]++
	return r.failed[leg]
}

func (r *Rows) create(kernel KernelMapper, n block.DeviceNumber, tree string, leg block.LegID, s dm.Step) error {
	passes := time.Now().Add(refusedFor)
	if err := r.Able(); err != nil {
		if errors.Is(err, errNotAble) {
			r.refuse(leg, err, passes)
		}
		return err
	}
	err := r.drives.pin(n, tree, leg, s.Device.Table.Size(), r.most, func(rows []mapped.Row) error {
		err := r.stack(kernel, leg, uuidOf("", n, tree), tableOf(n, rows), s.Device)
		if r.count(leg, err) >= mostFailures {
			r.refuse(leg, err, passes)
		}
		return err
	})
	switch {
	case errors.Is(err, mapped.ErrTooManyRows) || errors.Is(err, mapped.ErrState): // it lies in the leg
		r.refuse(leg, err, time.Time{})
	case errors.Is(err, mapped.ErrDamaged): // the kernel would read zeroes for what is unknown
		r.refuse(leg, err, passes)
	}
	return err
}

// tableOf maps rows on a drive.
func tableOf(n block.DeviceNumber, rows []mapped.Row) (table dm.Table) {
	at := block.Size(0)
	for _, r := range rows {
		row := dm.Row{Start: at, Length: block.Size(r.Length), Target: dm.Linear{Device: dm.RefTo(n), Offset: block.Size(r.At)}}
		if r.Zero {
			row.Target = dm.Zero{}
		}
		table = append(table, row)
		at += row.Length
	}
	return table
}

// stack makes both devices, unless they are there. If it returns an error, none is, as far as they can be removed.
func (r *Rows) stack(kernel KernelMapper, leg block.LegID, where string, rows dm.Table, upper dm.Device) error {
	lower := dm.Device{Name: RowsPrefix + leg.String(), UUID: RowsPrefix + leg.String() + where, Table: rows, Udev: dm.UdevInner}
	upper.UUID += where
	upper.Table = dm.Whole(rows.Size(), dm.Unwritable{Device: dm.Ref(lower.Name)})
	if there, err := kernel.Info(upper.Name); err == nil && there.UUID == upper.UUID && there.Live {
		return r.settleOnce(there) // an observation that was too early has it created again
	}
	if _, err := kernel.Info(lower.Name); err == nil { // of an earlier time, and without a user
		if err := r.drop(kernel, lower.Name); err != nil {
			return err
		}
	}
	if err := kernel.Do(dm.Step{Op: dm.OpCreate, Device: lower}); err != nil {
		return err
	}
	err := kernel.Do(dm.Step{Op: dm.OpCreate, Device: upper})
	if err == nil {
		info, why := kernel.Info(upper.Name)
		if err = why; err == nil {
			err = r.settleOnce(info)
		}
		if err != nil {
			err = errors.Join(err, r.drop(kernel, upper.Name))
		}
	}
	if err != nil {
		return errors.Join(err, r.drop(kernel, lower.Name))
	}
	return nil
}

// drop removes a device. One of the same name is settled anew.
func (r *Rows) drop(kernel KernelMapper, name string) error {
	forget := func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.settled, name)
	}
	forget()
	err := kernel.Do(dm.Step{Op: dm.OpRemove, Device: dm.Device{Name: name}})
	forget() // somebody has looked at it meanwhile
	r.mu.Lock()
	defer r.mu.Unlock()
	if delete(r.left, name); unlessGone(err) != nil {
		r.left[name] = true
	}
	return err
}

// unlessGone is err, unless it says that there is no such device.
func unlessGone(err error) error {
	if dm.NotFound(err) {
		return nil
	}
	return err
}

// unsure reports whether a device could not be removed: then pins may be of no use.
func (r *Rows) unsure() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.left) > 0
}

// remove removes a leg's device, and what is under it if it has rows.
func (r *Rows) remove(kernel KernelMapper, s dm.Step) error {
	if err := r.drop(kernel, s.Device.Name); err != nil {
		return err
	}
	lower := RowsPrefix + strings.TrimPrefix(s.Device.Name, legPrefix)
	n, tree, leg, ok := parseMapped(s.Device.Table)
	if !ok { // it is plain, or had no table yet
		info, err := kernel.Info(lower)
		if dm.NotFound(err) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("%s %s: %w", s.Op, s.Device.Name, err)
		}
		var name string
		name, n, tree, _ = parseUUID(info.UUID)
		leg, _ = block.ParseLegID(strings.TrimPrefix(name, RowsPrefix)) //nolint:errcheck // zero is no leg of any tree
	}
	err := r.drives.unpin(n, tree, leg, func() error { return unlessGone(r.drop(kernel, lower)) })
	if err != nil {
		return fmt.Errorf("%s %s: %w", s.Op, lower, err)
	}
	return nil
}

// of lists the legs on a drive of which the kernel has rows, and their trees. Rows without a leg's device are what a
// crash has left of a leg that was being created or removed; they are removed, if they can be.
func (r *Rows) of(n block.DeviceNumber) (trees map[block.LegID]string, err error) {
	kernel, err := r.mapper()
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	all, err := kernel.List()
	if err != nil {
		return nil, err
	}
	trees = map[block.LegID]string{}
	for _, d := range all {
		id, err := block.ParseLegID(strings.TrimPrefix(d.Name, RowsPrefix))
		if err != nil || !strings.HasPrefix(d.Name, RowsPrefix) {
			continue
		}
		info, err := kernel.Info(d.Name)
		if dm.NotFound(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		_, on, tree, ok := parseUUID(info.UUID)
		if !ok || on != n {
			continue
		}
		switch _, err := kernel.Info(legPrefix + id.String()); {
		case err == nil:
			trees[id] = tree
		case !dm.NotFound(err):
			return nil, err
		case r.drop(kernel, d.Name) != nil: // somebody has it open
			trees[id] = tree
		}
	}
	return trees, nil
}

// errNotAble is an error of a kernel that lacks something.
var errNotAble = errors.New("it cannot")

// Able reports whether the kernel can map legs in trees, and why not. It finds out with devices that it removes
// again, and looks anew now and then if it cannot: a module may have been installed.
func (r *Rows) Able() error {
	kernel, err := r.mapper()
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.probed.IsZero() || r.able != nil && time.Since(r.probed) >= refusedFor {
		r.able, r.probed = probe(kernel, r.settle), time.Now()
	}
	return r.able
}

func probe(kernel KernelMapper, settle func(block.DeviceNumber) error) error {
	const lower, upper = RowsPrefix + "probe", RowsPrefix + "probe-upper"
	remove := func() error {
		var errs []error
		for _, name := range []string{upper, lower} {
			errs = append(errs, unlessGone(kernel.Do(dm.Step{Op: dm.OpRemove, Device: dm.Device{Name: name}})))
		}
		return errors.Join(errs...)
	}
	if err := remove(); err != nil { // what a crash has left
		return err
	}
	for _, d := range []dm.Device{
		{Name: lower, UUID: lower, Table: dm.Whole(block.MiB, dm.Zero{})},
		{Name: upper, UUID: upper, Table: dm.Whole(block.MiB, dm.Unwritable{Device: lower})},
	} {
		err := kernel.Do(dm.Step{Op: dm.OpCreate, Device: d})
		if errors.Is(err, unix.EINVAL) {
			err = fmt.Errorf("%w: it lacks dm-%s: %w", errNotAble, d.Table[0].Target.Type(), err)
		}
		if err != nil {
			return errors.Join(err, remove())
		}
	}
	info, err := kernel.Info(upper)
	if err == nil {
		if err = settle(info.Number); err != nil {
			err = fmt.Errorf("%w: %w", errNotAble, err)
		}
	}
	return errors.Join(err, remove())
}
